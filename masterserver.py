#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""masterserver.py: where game servers announce themselves and players find them.

    python3 masterserver.py                 serve; the page is at http://localhost:27790/
    python3 masterserver.py --help          everything else that it can do
    python3 masterserver.py --print-config  every setting, with its default and its meaning

One file, standard library only, CPython 3.8 or later or PyPy. Read from the top, each section uses
only what stands above it:

     1  this text                   7  protocols: poller, and a class or two a game
     2  limits                      8  pages: HTML, CSS, JavaScript
     3  settings                    9  web: routes, lists as JSON, XML and pages
     4  wire helpers               10  PROTOCOLS, the table that names them all
     5  registry                   11  event loop, news, other masters
     6  storage                    12  client tools and command line

    game                     transport, default port                  in the program
    Iceball, current         UDP 27790, list by HTTP on TCP 27790     class Iceball
    Iceball, first draft     the same                                 class IceballDraft
    Hyperbol                 TCP 20203, servers polled by UDP         class Hyperbol
    SubSpace                 UDP 4991 (announce, ping), 4990 (list)   SubSpacePing, SubSpaceList
    AIO, three dialects      TCP 27011                                class Aio
    Quake III, its family    UDP 27950                                class Quake3
    Luanti (Minetest)        HTTP POST /announce, probed by UDP       class Luanti
    any other game           HTTP POST /announce                      post_announce in section 9
    news to webhooks         HTTP POST to them                        News in section 11
    other masters            Redis or Valkey, TCP 6379                Cluster in section 11

Sections 3 to 10 have no socket, no thread and no clock, and but for the ini and the database no
file: a protocol takes bytes and the time and gives bytes back, so every one of them is tested with
recorded packets and a clock that the test moves. To add a game, see PROTOCOLS in section 10.

Licence: MIT, see the end of README.md.
"""
from __future__ import annotations

import argparse
import array
import base64
import codecs
import collections
import concurrent.futures
import configparser
import contextlib
import copy
import difflib
import errno
import ftplib
import functools
import gc
import gzip
import hashlib
import html
import http.client
import http.server
import io
import ipaddress
import itertools
import json
import logging
import logging.handlers
import math
import netrc
import os
import queue
import random
import re
import selectors
import signal
import socket
import sqlite3
import string
import struct
import sys
import threading
import time
import urllib.parse
import urllib.request
import zlib
from datetime import datetime, timezone
from typing import (Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional,
                    Sequence, Tuple, Union)

__version__ = "1.0"

try:
    import resource
except ImportError:                 # Windows has no such limits
    pass
try:
    import ctypes                   # for MessageVector alone
except (ImportError, MemoryError):  # under MemoryDenyWriteExecute, or a Python without it
    pass

log = logging.getLogger("masterserver")

# ================================================================================================
# 2  Limits
#
# Numbers that bound something, each with its reason or its source. What an operator may want to
# change is a setting (section 3); what bounds one protocol or one tool stands with it.
# ================================================================================================

TICK_S = 1.0                        # protocols are ticked this often; documents count whole seconds
LOOK_S = 0.25                       # connections are ticked so often: AIO greets after 1.2 s
HELD_UP_S = 5.0                     # a tick this late: the program was stopped (docker pause)
DRAIN_DATAGRAMS = 128               # read from one socket before the others get their turn: 1 ms
ACCEPT_CONNECTIONS = 64             # taken from one listener before the others get theirs
BACKLOG = 1024                      # connections that wait: half a second of 2,000 a second
# The longest datagram in a document has 520 bytes; what is beyond this is cut off
MAX_DATAGRAM_BYTES = 2048
UDP_BUFFER_BYTES = 8 << 20          # 20,000 announcements, which cost about 800 bytes each there
RECV_BYTES = 65536                  # one read from a connection
SEND_BUFFER_BYTES = 1 << 18         # the system's own megabytes would hide a slow reader's progress
LINGER_S = 5.0                      # how long what a peer sends after our last byte is read away …
LINGER_BYTES = 65536                # … and how much of it; then the connection is closed
OUTPUT_TOTAL_S = 120.0              # who takes longer for one answer is not reading it
# What waits for all readers together: three lists of 50,000 servers
OUTPUT_BYTES = 64 << 20
WORKER_JOBS = 64                    # waiting for one thread; others are told to try again
# Host names of strangers that wait to be looked up. With a name server that is slow each of them
# takes half a minute
LOOKUPS = 64
LOOKUPS_PER_SOURCE = 2
LOOKUPS_PER_NETWORK = 4             # of an IPv6 /48, which anybody can have
# Sources that are remembered as served lately: 16 times as many as can wait
LOOKUP_TURNS = 1024
# Game servers of one source that wait for the same look-up. If each is a Luanti server with the
# longest announcement, those of all strangers take 80 MB
LOOKUP_WAITERS = 16
STOP_S = 2.0                        # at a stop, for answers on their way: people wait no longer
STOP_DISK_S = 5.0                   # and for a batch being written, which takes milliseconds
DESCRIPTORS_KEPT = 40               # for all but connections: listeners, streams, database, log
DESCRIPTORS_UNTOLD = 256            # assumed where the system does not tell: macOS's limit
FAULT_RATE = 1, 20                  # tracebacks a second / at once: a fault must not fill the disk

NAME_CHARACTERS = 128               # Hyperbol has 32, Iceball 30, SubSpace 32 bytes; AIO sets none
# Of a description; SubSpace's 386 bytes are the longest in a document
TEXT_CHARACTERS = 512
PLAYERS_MAX = 65535                 # the widest field in a list (Iceball, SubSpace: u16)

# A cookie lives one to two windows; servers return it in a second
COOKIE_WINDOW_S = 30
COOKIE_MAC_BYTES = 8                # 2**64 guesses: at 100,000 a second six million years
SITE_SOURCES = 16                   # an IPv6 /48, which anybody can have, lists as much as so many
LIMITER_SOURCES = 16384             # sources remembered by one limiter, about 3 MB
# What all unproven sources together get beyond what they sent, a second / at once, for each use of
# allow_surplus(): 200 lists a second, or 0.8 Mbit/s for somebody who forges addresses
SURPLUS_BYTES = 100_000, 1_000_000
# No real limit: a flood in its name must not make a server silent
ANSWERS_RATE = 1e6, 1e6
# Of silence, while a flood in its name keeps a server's own packets out
FLOODED_LIFETIMES = 3
ALTERED_SERVERS = 100_000           # waiting for the disk: all that can be listed, and who has left
# Servers that have gone and are remembered on disk: those that were here for longest
KNOWN_SERVERS = 60_000
# Games whose history is kept: the page has some 80 at a time, those of the Quake III family 64
KNOWN_GAMES = 1000
# What became of the last packets, for /check: so many notes in all, about 3 MB at their longest
OUTCOMES_KEPT = 4096
# two for each of the 32 servers that a source lists by default
OUTCOMES_PER_SOURCE = 64
OUTCOMES_PER_S = 500                   # a flood leaves eight seconds to look at
OUTCOME_CHARACTERS = 200               # of the detail: two lines on the page

HTTP_LINE_BYTES = 4096              # the longest request line; 128 Chinese characters need 1,200
HTTP_HEAD_BYTES = 16384             # line and headers; browsers behind proxies send up to 4 kB
# An announcement needs 500, with every text at its longest 12,500; Luanti's has all names of mods
HTTP_BODY_BYTES = 65536
# A body of so many bytes costs the loop 3 ms at most, whatever is in it, with these two limits
ANNOUNCED_FIELDS_MAX = 64           # Luanti's announcements have 27, those of other games 10
NUMBER_DIGITS = 400                 # a float has 309 before its point; int() takes the square
HTTP_REQUEST_S = 10.0               # from a request's first byte to its last
HTTP_IDLE_S = 30.0                  # a kept connection without a request; the page asks every 5 s
HTTP_CACHE_BYTES = 16 << 20         # responses kept; a larger one, of 50,000 servers, alone
GZIP_MIN_BYTES = 600                # a shorter one fits one packet with its head, compressed or not
GZIP_LEVEL = 3                      # 10,000 servers, 4 MB, in 10 ms to 266 kB; level 6: 23, 222
RENDER_S = 1.0                      # a list is rebuilt at most this often, however many ask
# A short list may be rebuilt sooner: so long after the last time for each of its servers
RENDER_SERVER_S = 0.0001
# How long a cache in front may keep an answer: the page's refresh
CACHE_S = 5
PAGE_ROWS = 2000                    # rows on one page; a search finds the others
CHECK_FINDINGS = 100                # on one page of /check, the latest

# ================================================================================================
# 3  Settings
#
# One row a setting; its type is the function that reads it. The ini, --set, --print-config, the
# README's table and the errors all come from this table. A setting that is live takes effect on
# reload, the others at the next start.
# ================================================================================================


class SettingsError(Exception):
    """A setting that cannot be used; the text names file, key and the nearest right name."""


# What may follow "://" in a URL without telling a secret
URL_HOST = re.compile(r"\[[0-9A-Fa-f:.]*\]|[A-Za-z0-9.-]*")


def without_secrets(text):
    """A setting's name or value as messages may show it: of a URL no more than the host.

    URLs of webhooks and of Redis are secrets, wherever in the ini they stand. A password may have
    blanks in it, so nothing after the URL is shown either; and it may have @ and / in it, so that
    nobody can tell where the host is once there is an @."""
    before, separator, url = text.partition("://")
    if not separator:
        return text
    host = URL_HOST.match(url)[0] if "@" not in url else ""     # type: ignore[index]
    if host == url:
        return text
    return before + separator + (host + "/" if host else "") + "…"


# Readers take the text of a setting and give its value. A wrong one raises ValueError, whose words
# never repeat the text: Settings.put() shows as much of it as may be shown

read_text = str.strip


def read_line(text):
    if "\n" in text.strip():        # settings in the lines below would be lost without a word
        raise ValueError("expected one line; an indented line continues the one above")
    return text.strip()


def read_without_url(text):
    """A line that everybody sees, or that names a file: no webhook that has lost its header."""
    if "://" in text:
        raise ValueError("a URL cannot stand here")
    return read_line(text)


def read_choice(choices):
    def read(text):
        if text.strip().lower() not in choices:
            raise ValueError("expected one of %s" % ", ".join(choices))
        return choices[text.strip().lower()]
    return read


read_flag = read_choice(configparser.ConfigParser.BOOLEAN_STATES)
read_log_level = read_choice({level: level for level in ("debug", "info", "warning", "error")})


def read_number(low, high, kind=int):
    def read(text):
        try:
            value = kind(text.strip())
        except ValueError:
            raise ValueError("expected a number") from None
        if not low <= value <= high:
            raise ValueError("expected a number from %.12g to %.12g" % (low, high))
        return value
    return read


def read_port(text):
    """A port; empty switches the listener off, 0 takes a free one."""
    # 65535 is for nobody: SubSpace also listens on the port after the one in the ini
    return read_number(0, 65534)(text) if text.strip() else None


def read_list(read, separator=","):
    def read_all(text):
        return tuple(read(part.strip()) for part in text.split(separator) if part.strip())
    return read_all


def parsed_address(text):
    """IPv4-mapped IPv6 as IPv4."""
    try:
        parsed = ipaddress.ip_address(text)
    except ValueError:
        raise ValueError("expected an IPv4 or IPv6 address") from None
    return getattr(parsed, "ipv4_mapped", None) or parsed


def read_address(text):
    """An IP address as lists have it."""
    return str(parsed_address(text.strip().strip("[]")))


def read_addresses(text):
    return tuple(read_address(part) for part in text.split(","))


@functools.lru_cache(1024)          # one server's address is asked for several times in a row
def is_unicast(address):
    """An IP address that a game server can have; with a scope it means nothing elsewhere."""
    try:
        parsed = parsed_address(address)
    except ValueError:
        return False
    # RFC 1122 and 1112: IPv4 unicast is 1.0.0.0 to 223.255.255.255
    reserved = parsed.version == 4 and not 1 <= parsed.packed[0] < 224
    return not (reserved or parsed.is_multicast or parsed.is_unspecified or "%" in address)


def read_unicast(text):
    """An address that a list may carry."""
    address = read_address(text)
    if not is_unicast(address):
        raise ValueError("this cannot be the address of a server")
    return address


def read_public(text):
    """The same, or nothing."""
    return read_unicast(text) if text.strip() else ""


def read_network(text):
    try:
        return ipaddress.ip_network(text.strip(), strict=False)
    except ValueError:
        raise ValueError("expected an IPv4 or IPv6 network, such as 198.51.100.0/24") from None


def read_endpoint(text: str) -> Tuple[str, int]:
    """`ADDRESS:PORT` or `[ADDRESS]:PORT`; the address may be a host name."""
    match = re.fullmatch(r"\s*(?:\[([^][/]+)\]|([^][:/]+)):([0-9]{1,5})\s*", text)
    if not match or not 0 < int(match[3]) <= 65535:
        raise ValueError("expected ADDRESS:PORT")
    return match[1] or match[2], int(match[3])


def read_numeric_endpoint(text):
    host, port = read_endpoint(text)
    return read_address(host), port


def read_known_hyperbol(text):
    """`ADDRESS:PORT FLAVOR`; the address may be a host name."""
    place, flavor = (text.split(None, 1) + ["0"])[:2]
    return (*read_endpoint(place), read_number(0, 255)(flavor))


def read_pattern(text):
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as error:           # its words repeat parts of the pattern
        raise ValueError("expected a regular expression; there is a mistake at character %d"
                         % ((error.pos or 0) + 1)) from None
    except (OverflowError, RecursionError):
        raise ValueError("expected a regular expression; this one is too large") from None


def read_form(pattern, expected):
    """A text of this form; the error does not repeat it."""
    def read(text):
        if not re.fullmatch(pattern, text.strip()):
            raise ValueError("expected " + expected)
        return text.strip()
    return read


read_game_id = read_form("[a-z0-9_-]{1,32}", "1 to 32 characters of a-z, 0-9, - and _")
# No user and no password, as everybody sees it
read_page_url = read_form(r"(https?://[!-?A-~]*[!-.0-?A-~])?",
                          "https://HOST, with no / at its end and no @")
# A name that keys, metrics and JSON carry as it is; or nothing
WORD = "[A-Za-z0-9._-]{1,64}"
read_word = read_form("(%s)?" % WORD, "at most 64 of the characters A-Z, a-z, 0-9, . _ -")
ENGINE_SCHEMES = "redis", "rediss", "unix"
ENGINE_FORM = ("redis://[[user]:password@]host[:port][/db], rediss://... for TLS or unix:///path;"
               " in a password write %40 for @ and %2F for /")
# No user and no password: urllib would take them for the host
read_webhook = read_form(
    r"(discord|slack|text|json)\s+https?://[^\s/@]+(/[!-~]*)?",
    "FORMAT URL: discord, slack, text or json, and what begins with https:// or http://")


class EngineAddress(NamedTuple):
    """Where Redis or Valkey is: the path of a Unix socket, or a host and a port."""

    path: str = ""
    tls: bool = False
    user: str = ""
    password: str = ""
    host: str = ""
    port: int = 6379                    # Redis's own default
    database: int = 0


def read_engine(text):
    """An EngineAddress, or None; the error does not repeat the text, which has a password in it."""
    text = text.strip()
    try:
        return engine_address(text) if text else None
    except ValueError:
        raise ValueError("expected " + ENGINE_FORM) from None


def engine_address(url):
    """The EngineAddress of an ENGINE_FORM; raises ValueError."""
    if "\n" in url:
        raise ValueError("more than one line")
    scheme, _, after_scheme = url.partition("://")
    if scheme == "unix":
        if not re.match("/.", after_scheme):
            raise ValueError("no path")
        return EngineAddress(path=urllib.parse.unquote(after_scheme))
    if scheme not in ("redis", "rediss"):
        raise ValueError("another scheme")
    place, _, database = after_scheme.partition("/")
    login, has_login, host_and_port = place.rpartition("@")
    user, has_password, password = login.partition(":")
    if has_login and not has_password:
        raise ValueError("a user without a password")
    match = re.fullmatch(r"(\[[^][]+\]|[^][:]+)(?::([0-9]{1,5}))?", host_and_port)
    if not match:
        raise ValueError("no host and port")
    host, port = match.groups("6379")
    return EngineAddress(
        tls=scheme == "rediss", user=urllib.parse.unquote(user),
        password=urllib.parse.unquote(password), host=urllib.parse.unquote(host.strip("[]")),
        port=read_number(1, 65535)(port), database=read_number(0, 65535)(database or "0"))


def read_own_game_id(text):
    if text in SECTIONS:
        raise ValueError("the id %s is taken" % text)
    return read_game_id(text)


def read_rate(text):
    """`100/400`: 100 a second, 400 at once."""
    rate, _, burst = text.partition("/")
    return read_number(0.01, 1e6, float)(rate), read_number(1, 1e6, float)(burst or rate)


def read_iceball_version(text):
    """"0.2.1-37" -> 8421413: w.5 x.5 y.7 a.5 z.10 from high to low bits.

    Written w.x[.y][letter][-z]."""
    match = re.fullmatch(r"(\d+)\.(\d+)(?:\.(\d+))?([a-z\x7b-\x7e])?(?:-(\d+))?", text)
    if not match:
        raise ValueError("expected a version such as 0.2.1-37")
    w, x, y, z = (int(part or 0) for part in match.group(1, 2, 3, 5))
    a = ord(match[4] or "`") - 96           # a is 1; the backquote stands before it
    if max(w, x) > 31 or y > 127 or z > 1023:
        raise ValueError("a part of the version is too large")
    return w << 27 | x << 22 | y << 15 | a << 10 | z


class Setting(NamedTuple):
    name: str                       # section.key, or a section whose keys are data
    default: str                    # or an example of data
    read: Callable[[str], Any]
    help: str                       # one line of the ini
    live: bool = True
    read_key: Callable[[str], Any] = read_text

    @property
    def section(self) -> str:
        return self.name.partition(".")[0]

    @property
    def key(self) -> str:
        return self.name.partition(".")[2]


SETTINGS = (
    Setting("server.bind", "0.0.0.0, ::", read_addresses,
            "Addresses to listen on. Games whose lists carry IPv4 alone use only the IPv4 ones.",
            live=False),
    Setting("server.public_address", "", read_public,
            "The address by which players reach game servers on this machine; not 127.0.0.1."),
    Setting("server.database", "masterserver.db", read_without_url,
            "SQLite file for the list and the player history, from the ini's folder; empty: none.",
            live=False),
    Setting("server.refuse_names", "", read_list(read_pattern, "\n"),
            "Names not to list: regular expressions, one a line. Beware: (a+)+ may take for ever."),
    Setting("server.log_level", "info", read_log_level,
            "How much is logged (debug, info, warning, error); debug reports every bad packet."),
    Setting("server.log_file", "", read_without_url,
            "A file for the log, from the ini's folder, rotated at 10 MB; empty: standard error.",
            live=False),
    Setting("http.ports", "27790, 27795", read_list(read_port),
            "TCP ports of the page and the lists. Iceball looks for both.", live=False),
    Setting("http.title", "Game servers", read_without_url, "The page's title."),
    Setting("http.url", "", read_page_url,
            "Where the page is reached from outside, as https://games.example; for links to it."),
    Setting("http.intro", "", read_text, "A sentence or two at the top of the page."),
    Setting("http.template", "", read_without_url,
            "A file with your own list page; LIST_PAGE in the program explains its placeholders."),
    Setting("http.stylesheet", "", read_without_url, "A file with your own style.css."),
    Setting("http.trusted_proxies", "", read_list(read_network),
            "Networks of reverse proxies whose X-Forwarded-For header is believed."),
    Setting("iceball.port", "27790", read_port, "UDP port for announcements.", live=False),
    Setting("iceball.version", "0.2.1-37", read_iceball_version,
            "The game's current version; players with an older one are told of the update."),
    Setting("iceball.accept_versions", "", read_list(read_iceball_version),
            "Versions to list, such as 0.2.1 (every build of it) or 0.2.1-37; empty: all."),
    Setting("iceball.timeout", "120", read_number(1, 86400, float),
            "Seconds of silence after which a server is removed (the document says 120).",
            live=False),
    Setting("hyperbol.port", "20203", read_port, "TCP port of the list.", live=False),
    Setting("hyperbol.servers", "", read_list(read_known_hyperbol, "\n"),
            "Known servers, one a line: ADDRESS:PORT FLAVOR (0: unofficial; others: official)."),
    Setting("subspace.port", "4990", read_port,
            "UDP port of the zone list; announcements and pings use the next port.", live=False),
    Setting("subspace.zones", "", read_list(read_endpoint, "\n"),
            "Known zones, one ADDRESS:PORT a line; pinged even if they never announce themselves."),
    Setting("aio.port", "27011", read_port,
            "TCP port for servers and clients of every generation.", live=False),
    Setting("aio.news", "", read_text, "What players read under News."),
    Setting("aio.news_file", "", read_without_url,
            "A text file to read the news from instead; read again when it changes."),
    Setting("quake3.port", "27950", read_port,
            "UDP port for the servers and clients of Quake III Arena and its family.", live=False),
    Setting("quake3.games", "", read_list(str.lower),
            "Games to list, such as xonotic, openarena; or !nexuiz: all but this; empty: all."),
    Setting("quake3.tags", "", read_list(read_form(r"\S+\s*=\s*\S+", "TAG = GAME"), "\n"),
            "Further heartbeat tags, one a line: TAG = GAME, as in Warsow = Warsow."),
    Setting("quake3.timeout", "900", read_number(1, 86400, float),
            "Seconds without an answer after which one is removed; missed polls do so sooner."),
    Setting("luanti.enabled", "yes", read_flag,
            "List the Luanti servers that announce themselves on the ports of [http].",
            live=False),
    Setting("luanti.timeout", "330", read_number(1, 86400),
            "Seconds without an announcement after which one is removed; they come every 300."),
    Setting("games", "mygame = My Game", read_without_url,
            "Games of your own, announced by HTTP: id = Title.", read_key=read_own_game_id),
    Setting("cluster.redis", "", read_engine,
            "Redis or Valkey through which masters share their lists, as redis://:password@host/0.",
            live=False),
    Setting("cluster.name", "", read_word,
            "This master's name among others; empty: the host's and a random part.", live=False),
    Setting("cluster.prefix", "masterserver", read_word,
            "What the keys there begin with; masters with another one are not seen.", live=False),
    Setting("poll.interval", "30", read_number(5, 3600, float),
            "Seconds between two queries to one game server, of all games that are polled."),
    Setting("poll.rate", "500", read_number(1, 100000),
            "Queries per second at most, to all servers together; to listed ones first."),
    Setting("notify.players", "2", read_number(1, PLAYERS_MAX),
            "A server is news when it comes to have so many players, after it had fewer."),
    Setting("notify.again_after", "10800", read_number(0, 86400),
            "Seconds for which the same server is not news again."),
    Setting("notify.official_only", "no", read_flag, "News of official servers alone."),
    Setting("notify.games", "", read_list(read_game_id),
            "News of these games alone, by their ids such as iceball; empty: of all."),
    Setting("notify.text", "$players of $max_players are playing on $name ($game, map $map) $url",
            read_text, "What is told; there are no other placeholders than these."),
    Setting("webhooks", "ours = discord https://discord.com/api/webhooks/ID/TOKEN", read_webhook,
            "Who is told: NAME = FORMAT URL. FORMAT is discord, slack, text or json.",
            read_key=read_game_id),
    Setting("official", "203.0.113.7:20737 = yes", read_flag,
            "Servers marked as official.", read_key=read_numeric_endpoint),
    Setting("priority", "203.0.113.7:20737 = 10", read_number(-1000, 1000),
            "Servers to put first (or, below 0, last) in every list.",
            read_key=read_numeric_endpoint),
    Setting("address_map", "192.168.1.5 = 203.0.113.7", read_unicast,
            "Public addresses of game servers behind the same router as this master.",
            read_key=read_address),
    Setting("bans", "198.51.100.0/24 = fake players", read_line,
            "Networks that may not announce, with the reason they are told.",
            read_key=read_network),
    Setting("blocked", "192.0.2.66 = floods", read_line,
            "Networks that get no answer at all, with a note for the operator.",
            read_key=read_network),
    Setting("limits.exempt", "127.0.0.0/8, ::1", read_list(read_network),
            "Networks to which no limit per source applies."),
    Setting("limits.datagrams", "100/400", read_rate,
            "Datagrams from one source (an IPv4 address, an IPv6 /64): per second / at once."),
    Setting("limits.requests", "10/50", read_rate,
            "Pings, list and page requests of a source, UDP and TCP apart: per second / at once."),
    Setting("limits.connections", "20/100", read_rate,
            "New connections from one source: per second / at once."),
    Setting("limits.connections_open", "64", read_number(1, 100000),
            "Open connections of one source."),
    Setting("limits.connections_total", "2000", read_number(8, 100000),
            "Open connections in all; above that the one idle for longest is closed.",
            live=False),
    Setting("limits.servers_per_source", "32", read_number(1, 1000000),
            "Servers of one source that are listed, or queried; of one IPv6 /48, 16 times as "
            "many."),
    Setting("limits.servers", "50000", read_number(1, 10000000), "Listed servers in all."),
)
SETTINGS_BY_NAME = {row.name: row for row in SETTINGS}
SECTIONS = {row.section for row in SETTINGS}

# Settings of earlier versions; one that is still in an ini has no effect and is a warning
REMOVED_SETTINGS = ("aio.dialects", "aio.text_greeting_after")

# Sections of which no value is shown, as it is a secret even where it is no URL
SECRET_SECTIONS = "webhooks", "cluster"

# Settings that name a text file, which is read with the settings and again when it changes
TEXT_FILES = ("http.template", "http.stylesheet", "aio.news_file")


class Settings:
    """Values by name: `settings["iceball.port"]`; a section of data is a dict: `settings["bans"]`.

    `values`: texts by name as for --set; anything wrong raises SettingsError."""

    def __init__(self, values=None):
        self.path = ""                          # of the ini, there or not
        self.found = False                      # it is there, and not empty
        # Where relative paths begin; None: settings made by a program, which keeps nothing unasked
        self.folder: Optional[str] = None
        self.given = set()                      # names of those that are not left at their default
        self.warnings = []
        self.texts = {}                         # of TEXT_FILES, by name of the setting
        self.values = {row.name: row.read(row.default) if row.key else {} for row in SETTINGS}
        for name, text in (values or {}).items():
            self.put(name, str(text), "setting")

    def __getitem__(self, name):
        return self.values[name]

    def put(self, name, text, where):
        """`name`: section.key; `where`: the file, or --set, for the errors."""
        section, _, key = name.partition(".")
        if "://" in section:            # the dot is the URL's
            raise SettingsError("%s: %s: expected section.key" % (where, without_secrets(name)))
        shown = "%s: [%s] %s" % (where, section, without_secrets(key))
        if name in REMOVED_SETTINGS:
            self.warnings.append(shown + " is no setting any more; it has no effect")
            return
        row = SETTINGS_BY_NAME.get(name) or SETTINGS_BY_NAME.get(section)
        if row is None:
            raise SettingsError("%s: [%s] %s" % (where, section, what_is_unknown(section, key)))
        for line in text.split("\n")[1:]:
            check_line_below(line, shown)
        self.given.add(row.name)
        try:
            (name + text).encode()          # bytes of the command line that are no text
            if "\0" in text:
                raise ValueError("a NUL is no text")        # and the name of no file
            if row.key:
                self.values[name] = row.read(text)
            else:
                self.values[section][row.read_key(key)] = row.read(text)
        except ValueError as error:
            # If the key has a URL in it, the value is the rest of it: "=" may stand in a URL
            secret = section in SECRET_SECTIONS or "://" in key
            value = "…" if secret else without_secrets(" ".join(text.split()))
            raise SettingsError("%s = %s: %s" % (shown, value, error)) from None

    @classmethod
    def load(cls, path, overrides=(), missing_ok=False):
        """Read the ini at `path`, then the overrides (`section.key=value`)."""
        self = cls()
        self.path, self.folder = path, os.path.dirname(os.path.abspath(path))
        parser = read_ini(path, missing_ok)
        self.found = bool(parser.sections())
        for section in parser.sections():
            for key, text in parser.items(section):
                self.put("%s.%s" % (section, key), text, path)
        for item in overrides:
            name, equals, text = item.partition("=")
            if not equals:
                # No more of it: without "=" nobody can tell where a secret begins
                raise SettingsError("--set %.16s: expected section.key=value"
                                    % without_secrets(item))
            self.put(name.strip(), text.strip(), "--set")
        database = self.file("server.database")
        if database and os.path.realpath(database) == os.path.realpath(path):
            raise SettingsError("[server] database: that is the ini; it would be overwritten")
        return self

    def file(self, name):
        """The path that a setting names, from the ini's folder on; "" if there is none."""
        path = self.values[name]
        if not path or self.folder is None and name not in self.given:
            return ""
        return os.path.join(self.folder or "", path)


def what_is_unknown(section, key):
    """Words for a setting that there is not, with the nearest right name."""
    keys = [row.key for row in SETTINGS if row.section == section]
    if not keys:
        return "is no section" + nearest(section, SECTIONS)
    return "has no key " + without_secrets(key) + nearest(key, keys)


def check_line_below(line, shown):
    """Raise SettingsError for a line that is indented, and so continues the value of the setting
    `shown`, although it looks like a setting of its own whose value is a URL.

    It might be shown on the page, and would be sent nowhere."""
    name, _, value = line.partition("=")
    name = name.strip()
    before_url, separator, _ = value.partition("://")
    words = before_url.split()          # the scheme; in [webhooks] a FORMAT stands before it
    if not separator or not re.fullmatch(WORD, name) or len(words) not in (1, 2):
        return
    section = "webhooks"
    if words[-1] in ENGINE_SCHEMES:
        section = "cluster"
    elif SETTINGS_BY_NAME.get("http." + name):
        section = "http"
    raise SettingsError(
        "%s: the line %s = … stands below this value and continues it, as it is indented; it "
        "probably belongs into [%s], without blanks before it" % (shown, name, section))


def read_ini(path, missing_ok):
    # Not strict: a section may come twice, as lines are often appended; of a key the last counts
    parser = configparser.ConfigParser(
        interpolation=None, default_section="", delimiters=("=",), comment_prefixes=("#", ";"),
        strict=False)
    # The parser's own pattern takes "[::1]:27790 = yes" for a section
    parser.SECTCRE = re.compile(r"\[(?P<header>[^]:]+)\]\s*$")  # type: ignore[misc]
    try:
        read = parser.read(path, encoding="utf-8-sig")
    except (configparser.Error, UnicodeDecodeError) as error:
        raise SettingsError(
            "%s: %s; expected, in UTF-8, [section], key = value, or an indented line that "
            "continues the one above" % (path, what_is_unreadable(error))) from None
    # The parser does not say what kept it from reading
    if not read and (not missing_ok or os.path.lexists(path)):
        raise SettingsError("%s: cannot be read; is the name right, and may this user read it?"
                            % path)
    return parser


def what_is_unreadable(error):
    """Words for what kept an ini from being read: never the line, as it may be a secret."""
    if isinstance(error, UnicodeDecodeError):
        return "byte %d is no text" % (error.start + 1)
    if isinstance(error, configparser.MissingSectionHeaderError):
        return "line %d: no section headers stand above it" % error.lineno
    lines = [number for number, _ in getattr(error, "errors", ())]
    # The error of Python 3.13 for what continues no value has but one line
    return "line " + ", ".join(map(str, lines or [getattr(error, "lineno", 0)]))


def nearest(word, words):
    close = difflib.get_close_matches(word, words, 1, 0.5)
    if close:
        return "; did you mean %s?" % close[0]
    return "; there are %s" % ", ".join(sorted(words))


def config_text():
    """masterserver.ini: every setting commented out at its default, with its help."""
    lines = [
        "# masterserver.ini: settings of masterserver.py, each at its default or as an example;",
        "# remove the # to change one. A wrong name or value is an error at start that says where.",
        "# This file is what --print-config prints."]
    section = ""
    for row in SETTINGS:
        if row.section != section:
            section = row.section
            lines += ["", "[%s]" % section]
        setting = "%s = %s" % (row.key, row.default) if row.key else row.default
        lines += ["", "# " + row.help, ("#" + setting).rstrip()]
    return "\n".join(lines) + "\n"


# ================================================================================================
# 4  Wire helpers
#
# What several protocols need and none owns: the one exception for bad input, text, addresses, the
# cookie, the rate limiter. Nothing here does I/O.
# ================================================================================================

# as the socket gives it: (address, port) or (address, port, flow, scope)
Peer = Tuple[Any, ...]
Replies = List[Tuple[bytes, Peer]]
Key = Tuple[str, str, int]          # a server's identity: game, address, port
# not the module's own generator, which an embedding program may have seeded
RANDOM = random.SystemRandom()


def error_text(error):
    """Its message; its type where there is none, as for a MemoryError."""
    return str(error) or type(error).__name__


class Malformed(Exception):
    """Bytes that are not what the protocol's document says; the text names the field.

    The only exception of a decoder."""


def c_string(data: bytes) -> bytes:
    """Up to the first NUL; a field filled to its end has none."""
    return data.partition(b"\0")[0]


# Control sequences such as colours, control strings up to their end, other escapes (ECMA-48)
ANSI = re.compile("(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]"
                  "|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x90\x98\x9c-\x9f]*"
                  "(?:\x07|\x1b\\\\|\x9c)"
                  "|\x1b[ -/]*[0-~]?")
# What shows as a space: a name must not be taken that only looks like another's
BREAKS = re.compile("[\t-\r\x85\xa0\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\u2800]+")
# Control, soft hyphen, bidirectional, zero-width, shorthand, tag characters, surrogates, non-
# characters
INVISIBLE = re.compile(
    "[\0-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
    "\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff\ud800-\udfff"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]")
# More than three accents on one letter are not writing: those behind the third
ACCENTS = ("[\u0300-\u036f\u0483-\u0489\u0591-\u05bd\u0e31-\u0e4e\u1ab0-\u1aff"
           "\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]")
STACKED = re.compile("(?<=%s{3})%s+" % (ACCENTS, ACCENTS))


def clean(text, characters=NAME_CHARACTERS):
    """Text fit for every list: no control, bidirectional or zero-width characters, no outer
    space."""
    if not (text.isascii() and text.isprintable()):
        text = ANSI.sub("", text)
        text = BREAKS.sub(" ", text)
        text = INVISIBLE.sub("", text)
        text = STACKED.sub("", text)
    return text.strip()[:characters].strip()


def decode_utf8(raw: bytes, characters: int = NAME_CHARACTERS) -> str:
    """UTF-8, cleaned. A character cut off at the end goes; other invalid bytes become U+FFFD."""
    return clean(codecs.utf_8_decode(raw, "replace")[0], characters)


def decode_legacy(raw: bytes, characters: int = NAME_CHARACTERS) -> str:
    """UTF-8 if valid, whole or cut off within a character, else Windows-1252; cleaned."""
    try:
        text, used = codecs.utf_8_decode(raw)       # without a character cut off at the end
    except UnicodeDecodeError:
        text, used = "", 0
    # Where all else is ASCII, what seems cut off is a letter of Windows-1252
    if used < len(raw) and text.isascii():
        text = raw.decode("cp1252", "replace")
    return clean(text, characters)


def clamp(value, high=PLAYERS_MAX):
    return 0 if value < 0 else high if value > high else value


def canonical_address(address):
    """The address as lists and limits know it: no scope, IPv4-mapped IPv6 as IPv4."""
    if ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address.partition("%")[0])
    return str(parsed.ipv4_mapped or parsed)


def is_loopback(address):
    """`address`: as read_address() and sockets give it."""
    return address.startswith("127.") or address == "::1"


def address_number(address):
    """An address as a number, every IPv6 one above all IPv4 ones, in a third of ipaddress's time.
    """
    if ":" in address:
        return 1 << 128 | int(ipaddress.IPv6Address(address.partition("%")[0]))
    a, b, c, d = address.split(".")
    return int(a) << 24 | int(b) << 16 | int(c) << 8 | int(d)


class Networks:
    """Networks, with a word about each.

    Finding an address takes one look-up a prefix length, however many networks there are: tens of
    thousands of strangers come each second."""

    def __init__(self, networks, words=None):
        sizes = collections.defaultdict(dict)
        for network in networks:
            bits = network.max_prefixlen - network.prefixlen
            number = address_number(str(network.network_address))
            sizes[bits][number >> bits] = (words or {}).get(network, "")
        self.sizes = sorted(sizes.items())          # no two are alike; the smallest network counts

    def find(self, number):
        """What is said about the network that has this address_number(); None: none has it."""
        for bits, words in self.sizes:
            if number >> bits in words:
                return words[number >> bits]
        return None

    def __contains__(self, address):
        return self.find(address_number(address)) is not None

    def __bool__(self):
        return bool(self.sizes)


# Loopback, private or link-local: a server there may name another address for itself
LOCAL_NETWORKS = Networks(map(ipaddress.ip_network, (
    "127.0.0.0/8", "::1/128",                                   # loopback
    "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16",            # RFC 1918
    "169.254.0.0/16", "fe80::/10", "fc00::/7")))                # link-local, unique local


def ipv6_network(parsed, bits):
    number = int(parsed) >> 128 - bits << 128 - bits
    return "%s/%d" % (ipaddress.IPv6Address(number), bits)


def source_key(address):
    """What a limit by source counts: an IPv4 address, an IPv6 /64 (a host has all of it)."""
    if ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address.partition("%")[0])
    return str(parsed.ipv4_mapped or ipv6_network(parsed, 64))


def source_keys(address):
    """What listed servers are counted by: their source, and of IPv6 its /48 as well."""
    source = source_key(address)
    if ":" not in source:
        return (source,)
    return source, ipv6_network(ipaddress.IPv6Address(source[:-3]), 48)


def source_limits(address, limit):
    """Each key that counts what this source has, with the limit for that key.

    Anybody can have an IPv6 /48, so a /48 gets as much as SITE_SOURCES single sources."""
    if ":" not in address:
        return ((address, limit),)
    source, *network = source_keys(address)
    return [(source, limit)] + [(key, limit * SITE_SOURCES) for key in network]


def decrement(counts, key):
    """One fewer of these; a key with none left is dropped."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def keep_latest(table, key, value, most):
    """Put this into the ordered `table` as its latest; the oldest makes room."""
    table[key] = value
    table.move_to_end(key)
    if len(table) > most:
        table.popitem(last=False)


def endpoint_text(address, port):
    return "[%s]:%d" % (address, port) if ":" in address else "%s:%d" % (address, port)


def ipv4_bytes(address):
    return ipaddress.IPv4Address(address).packed


class Cookie:
    """A keyed MAC with a lifetime, so that a handshake needs no memory: what returns has gone out.

    `key`: 16 bytes. `make` gives `size` bytes over the message in the window of `now`; `good`
    accepts those of this window and the one before."""

    def __init__(self, key, size=COOKIE_MAC_BYTES, window_s=COOKIE_WINDOW_S):
        self.key, self.size, self.window_s = key, size, window_s
        self.turn(0.0)

    def turn(self, now):
        """Begin the window of `now`."""
        window = int(now // self.window_s)
        self.ends = (window + 1.0) * self.window_s
        # BLAKE2's own keyed mode would pad the key to a block and compress a second one each time
        self.previous, self.current = (
            hashlib.blake2b(self.key + struct.pack("<q", number), digest_size=self.size)
            for number in (window - 1, window))

    def make(self, message, now):
        if now >= self.ends:
            self.turn(now)
        mac = self.current.copy()
        mac.update(message)
        return mac.digest()

    def is_valid(self, mac, message, now):
        if mac == self.make(message, now):
            return True
        older = self.previous.copy()
        older.update(message)
        return mac == older.digest()


# Verdicts, which stand in a limiter's table in place of the time at which the bucket is full
EXEMPT, BLOCKED = -math.inf, math.inf


class Limiter:
    """Token buckets by source in a bounded table.

    A bucket is one number, the time at which it will be full again (the "generic cell rate
    algorithm"). An unknown source has a full bucket, so a full table forgets the least recently
    used one and refuses nobody. `verdict(address)` says once, when a source is first seen, whether
    it is EXEMPT or BLOCKED; else 0. Verdicts are about addresses, buckets about source_key()."""

    def __init__(self, rate, verdict=lambda address: 0.0):
        """`rate`: tokens a second, tokens at once."""
        self.verdict = verdict
        self.table = collections.OrderedDict()
        self.set_rate(rate)

    def set_rate(self, rate):
        """This rate from now on; every bucket is full, every verdict is asked for anew."""
        self.cost_s = 1.0 / rate[0]
        self.depth_s = (rate[1] + 0.001) / rate[0]      # a bit more, so that sums of fractions fit
        self.table.clear()

    def is_nearly_empty(self, address, now):
        """Has this source next to nothing left? Asking costs it nothing."""
        full_at = self.table.get(source_key(address), 0.0)
        return full_at - now > self.depth_s - 2 * self.cost_s

    def allow(self, address, now, tokens=1.0):
        table = self.table
        full_at = table.get(address)
        if full_at is None:
            full_at = self.verdict(address)
            if not full_at and ":" in address:          # a verdict may be about less than the /64
                address = source_key(address)
                full_at = table.get(address, 0.0)
            if address not in table:
                if len(table) >= LIMITER_SOURCES:
                    table.popitem(last=False)
                table[address] = full_at
        if full_at == EXEMPT:
            return True
        table.move_to_end(address)
        full_at = (full_at if full_at > now else now) + self.cost_s * tokens
        if full_at - now > self.depth_s:
            return False
        table[address] = full_at
        return True


class Limited(Exception):
    """A UDP request that a limit turns away: it is counted and gets no answer."""


class Tally:
    """What one protocol has seen, for /metrics and the last line of the log."""

    def __init__(self):
        self.received = self.sent = self.bytes_in = self.bytes_out = 0
        self.malformed = self.limited = self.unsent = self.errors = self.connections = 0


# ================================================================================================
# 5  Registry
#
# The listed servers of all games, the rules that the operator has set for them, and what was
# heard last from whom. It knows nothing of protocols, sockets or disks. Times are those of the
# monotonic clock that is handed in.
# ================================================================================================

class Refused(Exception):
    """A server that is not to be listed: `outcome` is a key of OUTCOMES (section 9); the reason
    in words."""

    def __init__(self, outcome, reason):
        super().__init__(reason)
        self.outcome = outcome


# The settings that give the rates of the limiters in Rules, in their order
LIMITS = ("limits.datagrams", "limits.datagrams", "limits.connections", "limits.requests",
          "limits.requests")


class Rules:
    """What the operator has decided about addresses: public ones, bans, marks, limits.

    The limiters are shared by all protocols: datagrams, messages within a connection, new
    connections, and requests (what costs more than a look-up, or gets an answer longer than
    itself). What comes by UDP may have a forged address, so it has limiters of its own: a flood in
    somebody's name takes nothing from what he does by TCP. `answers` is for those to the poller,
    and has but the verdict."""

    def __init__(self, settings):
        (self.datagram_limiter, self.message_limiter, self.connection_limiter,
         self.udp_request_limiter, self.request_limiter,
         self.answer_limiter) = self.limiters = [Limiter(ANSWERS_RATE,
                                                         self.verdict) for _ in range(6)]
        self.surplus_limiter = Limiter(SURPLUS_BYTES)
        self.read(settings)

    def read(self, settings):
        self.public_address = settings["server.public_address"]
        self.address_map = settings["address_map"]
        self.official = settings["official"]
        self.priority = settings["priority"]
        self.games = settings["games"]
        self.blocked = Networks(settings["blocked"])
        self.exempt = Networks(settings["limits.exempt"])
        # Why one is blocked is for the operator alone
        self.bans = Networks({**settings["blocked"], **settings["bans"]}, settings["bans"])
        self.refuse_names = settings["server.refuse_names"]
        self.max_servers = settings["limits.servers"]
        self.max_servers_per_source = settings["limits.servers_per_source"]
        for limiter, name in zip(self.limiters, LIMITS):
            limiter.set_rate(settings[name])
        self.answer_limiter.set_rate(ANSWERS_RATE)             # who is blocked may have changed
        _, self.requests_at_once = settings["limits.requests"]

    def request_tokens(self, tokens):
        """What a request that costs so many tokens takes from the bucket: half of a full bucket at
        most, so that the smallest bucket lets it through now and then."""
        return min(tokens, self.requests_at_once / 2)

    def believes_claim(self, source, claimed):
        """May a server say that it has this address? Only one on a local network, and no
        loopback."""
        if source not in LOCAL_NETWORKS or not is_unicast(claimed):
            return False
        return not is_loopback(canonical_address(claimed))

    def listed_address(self, source, claimed=""):
        """Where players find a server that sends from `source` and claims to be at `claimed`."""
        if claimed and self.believes_claim(source, claimed):
            return canonical_address(claimed)
        if source in self.address_map:
            return self.address_map[source]
        if self.public_address and is_loopback(source):
            return self.public_address
        return source

    def verdict(self, address):
        """For the limiters: BLOCKED, EXEMPT or 0."""
        number = address_number(address)
        if self.blocked.find(number) is not None:
            return BLOCKED
        return EXEMPT if self.exempt.find(number) is not None else 0.0

    def exempts(self, address):
        # The table costs less than the verdict, and knows most of them
        return (self.datagram_limiter.table.get(address) or self.verdict(address)) == EXEMPT

    def allow_surplus(self, use, address, size, now):
        """May a source that has proven nothing get `size` bytes more than it sent?

        All of them share one bucket: a limit by source does not bind those who forge sources. Each
        `use` has its own: a flood of pings keeps nobody from the list."""
        return size <= 0 or self.exempts(address) or self.surplus_limiter.allow(use, now, size)

    def surplus_is_spent(self, use, address, now):
        """Would allow_surplus() refuse this source even a few bytes?"""
        return self.surplus_limiter.is_nearly_empty(use, now) and not self.exempts(address)

    def ban_reason(self, *addresses):
        """Why none of these addresses may announce, or ""."""
        for address in set(addresses) if self.bans else ():
            reason = self.bans.find(address_number(address))
            if reason is not None:
                return reason or "banned, no reason given"
        return ""

    def check_source_limit(self, counts, source, participle):
        """Raise Refused if this source has as many servers as it may have.

        `counts`: how many there are by source_keys(); `participle`: "listed" or "queried"."""
        for key, limit in source_limits(source, self.max_servers_per_source):
            if counts.get(key, 0) >= limit and not self.exempts(source):
                network = key[-3:] + " network" if ":" in key else "address"
                raise Refused("limit", "at most %d servers of one %s are %s"
                              % (limit, network, participle))

    def operator_marks(self, place):
        return self.official.get(place, False), self.priority.get(place, 0)


NO_DETAILS = {}


class Server:
    """One listed server. Identity is (game, address, port); the rest is what it told last.

    first_seen, last_seen   seconds of the monotonic clock
    ping_ms      milliseconds; None: it was not asked
    flavor       Hyperbol's: 0 is unofficial
    responding   it answers the poller; a list by TCP or UDP leaves it out if not
    details      further texts by name; its page shows them, but for UNSHOWN_DETAILS (section 8)
    source       the address that its packets come from (differs from `address` behind a router)
    lifetime     seconds that it stays listed after last_seen; infinite where a connection or the
                 poller decides
    playing      in ships, on the field; None: the protocol is silent
    verified     how it is known to be there: handshake, query, connection, or self-reported
    luanti_announcement what Luanti's told, as its list has it
    aio_published_name   the name as an AIO server has published it, with its counter of players
    zone_owner the announcer that a SubSpace zone belongs to, as texts: see ZoneOwner
    fingerprint  of the packet that, repeated, changes nothing; see Registry.by_fingerprint
    sender       the address and UDP port that an Iceball server announces from
    official, priority   the operator's marks
    confirmed    heard from since this program started
    pinned       named by the ini: it stays, as not responding, however long it is silent
    master       the master that has heard it; "": this one
    rank         as ranking() made it; None after a change
    entry_cache  its entry of each list, as rendered last
    """

    __slots__ = (
        "game", "address", "port", "name", "mode", "map", "version", "players", "max_players",
        "playing", "description", "official", "priority", "flavor", "verified", "confirmed",
        "pinned", "responding", "ping_ms", "details", "source", "first_seen", "last_seen",
        "lifetime", "rank", "entry_cache", "aio_published_name", "luanti_announcement",
        "zone_owner", "fingerprint", "sender", "master")

    def __init__(self, game, address, port, source, now, lifetime, name="", mode="", map="",
                 version="", players=0, max_players=0, verified="self-reported", *, description="",
                 playing=None, flavor=0, responding=True, ping_ms=None, details=NO_DETAILS,
                 aio_published_name="", luanti_announcement=NO_DETAILS, zone_owner=NO_DETAILS):
        self.game, self.address, self.port, self.source = game, address, port, source
        self.first_seen = self.last_seen = now
        self.lifetime, self.name, self.mode, self.map = lifetime, name, mode, map
        self.version, self.players, self.max_players = version, players, max_players
        self.verified, self.description, self.playing = verified, description, playing
        self.flavor, self.responding, self.ping_ms = flavor, responding, ping_ms
        self.details, self.aio_published_name = details, aio_published_name
        self.luanti_announcement, self.zone_owner = luanti_announcement, zone_owner
        self.fingerprint, self.sender, self.master = None, None, ""
        self.official, self.priority, self.confirmed, self.pinned = False, 0, True, False
        self.rank = self.entry_cache = None

    @property
    def key(self) -> Key:
        return self.game, self.address, self.port


def ranking(server):
    """The order of every list: the operator's priority, official, players, name, identity."""
    if server.rank is None:
        server.rank = (-server.priority, not server.official, -server.players,
                       server.name.casefold(), server.address, server.port, server.game)
    return server.rank


class Census(NamedTuple):
    """The responding servers of one game, and who is on them."""

    servers: int = 0
    players: int = 0
    playing: int = 0


def census_of(servers):
    counts = collections.defaultdict(lambda: [0, 0, 0])
    for server in servers:
        if server.responding:
            count = counts[server.game]
            count[0] += 1
            count[1] += server.players
            count[2] += server.players if server.playing is None else server.playing
    return {game: Census(*count) for game, count in counts.items()}


class PacketOutcome(NamedTuple):
    """What became of a packet."""

    at: float                           # seconds of the monotonic clock
    outcome: str                        # a key of OUTCOMES (section 9)
    detail: str


class PacketOutcomes:
    """What became of the last packets, by source, protocol and announced port.

    A source that fills its share loses its own oldest note; when all are too many, the source goes
    that was silent for longest."""

    def __init__(self):
        # By source_key(), and then by address, protocol and port
        self.by_source = collections.OrderedDict()
        self.total = 0
        self.this_second, self.second_ends = 0, 0.0     # how many were added in it

    def add(self, source, protocol, port, outcome, now, detail):
        if now >= self.second_ends:
            self.this_second, self.second_ends = 0, now + 1.0
        elif self.this_second >= OUTCOMES_PER_S:
            return
        self.this_second += 1
        note = PacketOutcome(now, outcome, detail[:OUTCOME_CHARACTERS])
        shared = source_key(source)
        notes = self.by_source.get(shared)
        if notes is None:
            notes = self.by_source[shared] = collections.OrderedDict()
        else:
            self.by_source.move_to_end(shared)
        self.total -= len(notes)
        keep_latest(notes, (source, protocol, port), note, OUTCOMES_PER_SOURCE)
        self.total += len(notes)
        while self.total > OUTCOMES_KEPT:
            _, oldest = self.by_source.popitem(last=False)
            self.total -= len(oldest)

    def get(self, source, protocol, port):
        """The PacketOutcome, or None."""
        return self.by_source.get(source_key(source), {}).get((source, protocol, port))

    def __iter__(self):
        """(address, protocol, port, PacketOutcome), those of the source heard longest ago first."""
        for notes in self.by_source.values():
            for (address, protocol, port), note in notes.items():
                yield address, protocol, port, note


class Registry:
    """The servers by identity, their expiry, and a generation that moves when a list changes.

    Own ones are those that this master has heard itself. Another master's are in all lists; they
    are no protocol's business: only Cluster lists, changes and removes them."""

    master = ""                         # this master's name, among several

    def __init__(self, rules):
        self.rules = rules
        self.games = collections.defaultdict(dict)          # servers by game, address and port
        # Of games that nobody but their servers names, with the source of the server that brought
        # the game; both go with its last server
        self.titles, self.title_sources = {}, {}
        self.sources = collections.defaultdict(int)         # how many, by source_keys()
        self.total = 0
        self.generation = 0
        self.subscribers = []                  # whom to tell: call, game ("": all), events, whose
        self.altered = set()                # own, listed, changed or gone since the disk was told
        # nobody could be heard before: no silence counts
        self.silence_counts_from = -math.inf
        # The shortcut of the hot path: the fingerprint of a packet, and the server that it is from
        # and about which it says nothing new. changed() ends the shortcut, whoever changed the
        # server: another master, the operator, the server itself
        self.by_fingerprint = {}
        self.outcomes = PacketOutcomes()
        self.census_cache = RenderedList(self, "", census_of)

    def subscribe(self, call, game="", events=("listed", "changed", "gone"), every_master=False):
        """Have `call(event, server)` called for a game, or for all: for own servers, or for all.
        """
        self.subscribers.append((call, game, events, every_master))

    def get(self, game, address, port):
        return self.games.get(game, {}).get((address, port))

    def set_fingerprint(self, server, fingerprint):
        """From now on a packet with this fingerprint says nothing new about the server."""
        self.forget_fingerprint(server)
        server.fingerprint = fingerprint
        self.by_fingerprint[fingerprint] = server

    def forget_fingerprint(self, server):
        if server.fingerprint is not None:
            self.by_fingerprint.pop(server.fingerprint, None)
            server.fingerprint = None

    def forget_fingerprints(self):
        """Every server is read in full once more."""
        for server in self.by_fingerprint.values():
            server.fingerprint = None
        self.by_fingerprint.clear()

    def check_admission(self, key, source, name=None, pinned=False):
        """Raise Refused if a server that is not listed yet may not be.

        `name`: None if it has not told it; `pinned`: named in the ini, without limits."""
        game, address, port = key
        if not 0 < port <= 65535:
            raise Refused("bad packet", "port %d cannot be listed" % port)
        # Whoever sent us a packet has an address, but 0.* and a link-local one mean nothing to
        # others
        if address != source and not is_unicast(address) or source[:2] == "0." or "%" in source:
            raise Refused("bad packet", "%s cannot be the address of a server" % address)
        self.check_rules(source, address, port, name)
        if pinned:
            return
        # Another master's server that announces itself here as well takes no further room
        if self.total >= self.rules.max_servers and self.get(game, address, port) is None:
            raise Refused("limit", "this master lists at most %d servers" % self.rules.max_servers)
        self.rules.check_source_limit(self.sources, source, "listed")

    def check_rules(self, source, address, port, name):
        """Raise Refused for who is banned, and for a refused name."""
        ban = self.rules.ban_reason(source, address)
        if ban:
            raise Refused("banned", ban)
        self.check_name(name, address, port)

    def check_name(self, name, address="", port=0):
        """Raise Refused for a refused name; the place itself, for want of a name, never is."""
        for pattern in self.rules.refuse_names if name else ():
            if pattern.search(name) and name != endpoint_text(address, port):
                raise Refused("name", "names matching %s are not listed here" % pattern.pattern)

    def list_or_refresh(self, key: Key, source: str, now: float, lifetime: float,
                        fields: Mapping[str, Any], pinned: bool = False) -> Server:
        """List a server, or refresh it, with what it told; raises Refused.

        `fields`: attributes of Server."""
        game, address, port = key
        server = self.get(game, address, port)
        if server is None or server.master:
            self.check_admission(key, source, fields.get("name"), pinned)
            if server is not None:      # another master's: now it is an own one, and never left
                self.detach(server)
            server = Server(game, address, port, source, now, lifetime, **fields)
            server.pinned = pinned
            self.insert(server)
            return server
        self.check_rules(source, address, port, fields.get("name"))
        if server.source != source:
            self.count_source(server, -1)
            server.source = source
            self.count_source(server, 1)
        server.last_seen, server.lifetime = now, lifetime
        self.update(server, {**fields, "confirmed": True, "pinned": pinned})
        return server

    def insert(self, server):
        """A new server, admitted or restored."""
        place = server.address, server.port
        server.official, server.priority = self.rules.operator_marks(place)
        self.games[server.game][place] = server
        self.count_source(server, 1)
        self.total += 1
        self.changed("listed", server)

    def confirm(self, server, now):
        """The server was heard from, with nothing new."""
        server.last_seen = now
        if not server.confirmed:
            self.update(server, {"confirmed": True})

    def update(self, server, fields):
        """Take over what the server told; the lists change only if something did."""
        most = fields.get("max_players", server.max_players) or PLAYERS_MAX
        if fields.get("players", 0) > most:
            fields = {**fields, "players": most}
        different = [item for item in fields.items() if getattr(server, item[0]) != item[1]]
        if different:
            for name, value in different:
                setattr(server, name, value)
            self.changed("changed", server)

    def remove_own(self, server):
        """An own server goes; None, or another master's, changes nothing."""
        if server is not None and not server.master:
            self.remove_any(server)

    def remove_any(self, server):
        """The same, whoever has heard it; one that has left already changes nothing."""
        if server is None or self.get(*server.key) is not server:
            return
        self.detach(server)
        if not self.games[server.game] and self.titles.pop(server.game, ""):
            del self.games[server.game], self.title_sources[server.game]
        self.changed("gone", server)

    def set_game_title(self, server, title):
        """Give the server's game a title, unless an earlier server has given it one."""
        if server.game not in self.titles:
            self.titles[server.game] = title
            self.title_sources[server.game] = server.source

    def detach(self, server):
        """Out of the tables, and nobody is told."""
        del self.games[server.game][server.address, server.port]
        self.count_source(server, -1)
        self.total -= 1
        self.forget_fingerprint(server)

    def count_source(self, server, by):
        for key in source_keys(server.source) if not server.master else ():
            self.sources[key] += by
            if not self.sources[key]:
                del self.sources[key]

    def changed(self, event, server):
        if event != "gone":             # no list counts more players than there is room for
            server.players = clamp(server.players, server.max_players or PLAYERS_MAX)
            if server.playing is not None:
                server.playing = clamp(server.playing, server.players)
        self.generation += 1
        server.rank = server.entry_cache = None
        self.forget_fingerprint(server)
        if len(self.altered) < ALTERED_SERVERS and not server.master:
            self.altered.add(server.key)
        for call, game, events, every_master in self.subscribers:
            if event in events and game in ("", server.game):
                if every_master or not server.master:
                    call(event, server)

    def apply_rules(self, settings):
        """After a reload: marks as the settings now have them. Servers that are now banned, whose
        game is no longer served or whose address is another one now, go; if they may come back,
        their next announcement lists them again."""
        rules, before = self.rules, copy.copy(self.rules)
        rules.read(settings)
        self.forget_fingerprints()
        for server in self.servers():
            leaves = server.game in before.games and server.game not in rules.games
            listed_at = before.listed_address(server.source)
            if server.address == listed_at != rules.listed_address(server.source):
                leaves = True
            try:
                self.check_rules(server.source, server.address, server.port, server.name)
            except Refused:
                leaves = True
            if leaves:
                self.remove_any(server)
            else:
                official, priority = rules.operator_marks((server.address, server.port))
                self.update(server, {"official": official, "priority": priority})

    def expire(self, now):
        """Drop every server that was silent for its lifetime; called once a second."""
        # Looking at all 50,000 takes 5 ms, less than keeping them in order as they announce
        silent = [server for listed in self.games.values() for server in listed.values()
                  if server.last_seen + server.lifetime <= now]
        for server in silent:
            if self.is_silent(server.source, server.last_seen, server.lifetime, now):
                self.remove_own(server)

    def is_silent(self, source, heard_at, seconds, now):
        """Has this source, last heard at `heard_at`, been silent for so many seconds, and does the
        silence prove anything?"""
        if now < max(heard_at, self.silence_counts_from) + seconds:
            return False
        # A flood in its name keeps its own packets out: then silence proves little
        return (now >= heard_at + FLOODED_LIFETIMES * seconds
                or not self.rules.datagram_limiter.is_nearly_empty(source, now))

    def servers(self, game=""):
        """All servers, or those of a game, in the master's order; the list is the caller's."""
        games = [self.games.get(game, {})] if game else list(self.games.values())
        return sorted([server for listed in games for server in list(listed.values())], key=ranking)

    def census(self, now):
        """A Census by game; at most RENDER_S old."""
        return self.census_cache.get(now)

    def forget_entries(self):
        """What was made of servers no longer holds, though none has changed."""
        self.generation += 1
        for server in self.servers():
            server.entry_cache = None

    def record_outcome(self, source, protocol, port, outcome, now, detail=""):
        """Remember what became of a packet, for the operator of that game server.

        `port`: as announced, 0 if it could not be read; `outcome`: a key of OUTCOMES (section 9).
        """
        self.outcomes.add(source, protocol, port, outcome, now, detail)


def cached_entries(servers, name, render):
    """Each server's part of the list `name`, rendered when the server has changed since."""
    out = []
    for server in servers:
        made = server.entry_cache
        if made is None:
            made = server.entry_cache = {}
        part = made.get(name)
        if part is None:
            part = made[name] = render(server)
        out.append(part)
    return out


class RenderedList:
    """What `make(servers)` gives for one game's servers ("": all), made anew when a list has
    changed: at most once in RENDER_S, a short list sooner, so that it takes a tenth of the time at
    most."""

    def __init__(self, registry, game, make):
        self.registry, self.game, self.make = registry, game, make
        self.generation = -1
        self.due = 0.0
        self.made = None

    def get(self, now):
        registry = self.registry
        if registry.generation != self.generation and now >= self.due:
            servers = registry.servers(self.game)
            self.made = self.make(servers)
            self.generation = registry.generation
            self.due = now + min(RENDER_S, RENDER_SERVER_S * len(servers))
        return self.made


# ================================================================================================
# 6  Storage
#
# The list and the history of player counts in one SQLite file. It knows sqlite3 and the name of its
# file, no server, no clock and no thread: rows and the wall clock (`wall`, seconds since 1970) come
# in, rows go out. The disk thread alone calls it, but for the start and the stop. A damaged file is
# renamed and a new one begun; any other trouble (a full disk, a lock) is raised as sqlite3.Error,
# and the next call opens the file again.
# ================================================================================================

MINUTE, QUARTER, HOUR, DAY = 60, 900, 3600, 86400
# The longest of each, so that a whole one is always there
WEEK, MONTH, YEAR = 7 * DAY, 31 * DAY, 366 * DAY

# A sample on disk is one number for a minute, mean and peak for the other steps. A number has 16
# bits, little-endian: 0 is away, n + 1 is n players.
PLAYERS, MEAN_AND_PEAK = struct.Struct("<H"), struct.Struct("<HH")


class Sample(NamedTuple):
    """The players of a server or a game in one step of time."""
    mean: int
    peak: int


class BlockForm(NamedTuple):
    """How the samples of one step are kept: those of `covers` seconds are one row of the table.

    A block has 120, 384 or 672 bytes. A WITHOUT ROWID table moves what exceeds 1,002 bytes to a
    page of its own, which would waste most of it: hence a week of hours and not a fortnight."""
    step: int                           # seconds
    covers: int
    kept: int                           # seconds, from the end of a block on
    sample: struct.Struct

    def begin(self, at):
        """When the block with the sample of this time begins."""
        return at // self.covers * self.covers

    def offset(self, at):
        """The bytes in its block before the sample of this time."""
        return at % self.covers // self.step * self.sample.size

    def empty(self):
        return bytes(self.covers // self.step * self.sample.size)

    def begins(self, times):
        """When the blocks with the samples of these times begin."""
        return range(self.begin(times.start), times.stop, self.covers)

    def oldest(self, wall):
        """When the oldest block begins that is kept; an hour more, as a series ends up to 16
        minutes ago."""
        return self.begin(int(wall) - self.kept - HOUR)

    def samples(self, begin, block, times):
        """A Sample by its time, of the block that begins then; without gaps."""
        first = max(begin, times.start)
        there = {}
        numbers = self.sample.iter_unpack(block[self.offset(first):])
        for at, stored in zip(range(first, times.stop, self.step), numbers):
            # The one number of a minute is both
            mean, peak = stored if len(stored) == 2 else stored * 2
            if mean:
                there[at] = Sample(mean - 1, peak - 1)
        return there


BLOCKS = {form.step: form for form in (
    BlockForm(MINUTE, HOUR, DAY, PLAYERS), BlockForm(QUARTER, DAY, MONTH, MEAN_AND_PEAK),
    BlockForm(HOUR, WEEK, YEAR, MEAN_AND_PEAK))}
SPANS = {"day": (MINUTE, DAY), "week": (QUARTER, WEEK), "month": (QUARTER, MONTH),
         "year": (HOUR, YEAR)}
SAMPLE_MAX = 65534

STORAGE_BUSY_S = 0.2        # how long SQLite waits for another program's lock

# Nothing is dropped for its age before samples have come for so long without a jump of the clock: a
# clock that runs two years ahead, until NTP sets it, would make everything too old
STEADY_S = DAY
# A jump: a sample's wall clock is before that of the last sample, or so much after it. Samples come
# every minute; a restart of the machine takes some minutes
JUMP_S = HOUR
# What was sampled under a clock that ran ahead is dropped after so long: longer, as the clock of a
# machine without network may stand at 1970 for days
AHEAD_S = MONTH

# What changes each minute stands apart from the texts: 150 rows share a page, so that a minute
# rewrites few of them. `server` has every server seen within a year; with address '' and port 0 the
# sum of a game; and with game '' two rows of the file itself: its number, as the port, and the
# clock of the samples (port -1; first_seen: since when there was no jump; last_seen: of the last
# one). Its ids are never given out twice (AUTOINCREMENT), so that the blocks of a forgotten server
# belong to nobody else. Blocks sort by time first: one sample of all servers lies together, and so
# does what has become too old. There is no NOT NULL: no row from outside breaks a constraint, so a
# broken one means damage. PRAGMA user_version = 1 says what the tables are, and what the bytes in a
# block mean.
SCHEMA = (
    "CREATE TABLE server (id INTEGER PRIMARY KEY AUTOINCREMENT, game TEXT, address TEXT,"
    " port INTEGER, first_seen REAL, last_seen REAL, fields TEXT, UNIQUE (game, address, port))",
    "CREATE TABLE listed (server INTEGER PRIMARY KEY, expires REAL, last_seen REAL)",
    "CREATE TABLE block (step INTEGER, start INTEGER, server INTEGER, samples BLOB,"
    " PRIMARY KEY (step, start, server)) WITHOUT ROWID",
)


class ListedRow(NamedTuple):
    """A listed server as it is stored, and as masters tell it to each other.

    The times are wall-clock seconds; `fields` is a JSON list in the order of STORED (section 11),
    and before it is encoded the list itself."""
    game: str
    address: str
    port: int
    expires: float
    first_seen: float
    last_seen: float
    fields: Any

    @property
    def key(self) -> Tuple[str, str, int]:
        return self.game, self.address, self.port

    def has_types(self) -> bool:
        """Is each value of the type that an encoded row has there?"""
        return tuple(map(type, self)) == (str, str, int, float, float, float, str)


Counts = List[Optional[int]]        # of players; None where the server or the master was away
DISK_ERRORS = sqlite3.Error, OSError        # what any method of Database may raise


class Series(NamedTuple):
    """Player counts from `start` on, one every `step` seconds."""
    start: int
    step: int
    means: Counts
    peaks: Counts


class Remembered(NamedTuple):
    """What is remembered of a server, listed or gone. Wall-clock seconds; the name as stored."""
    first_seen: float
    last_seen: float
    name: str


def stored_fields(text: str) -> List[Any]:
    """The list in a row's `fields`."""
    return json.loads(text)


def mean_and_peak(samples):
    """Of the samples that are no gaps, as 4 bytes; 0 and 0 where all are gaps."""
    here = [sample for sample in samples if sample] or [0]
    return MEAN_AND_PEAK.pack((sum(here) + len(here) // 2) // len(here), max(here))


def series_end(step, wall):
    """Where a series ends, so that it never closes with a gap which the next sample fills. The
    running minute may have no sample yet. The others are made of minutes when the first sample of
    the next quarter hour comes, within a minute."""
    late = MINUTE if step == MINUTE else QUARTER + MINUTE
    return (int(wall) - late) // step * step + step


def means(samples, times):
    """Of the samples by time, None for a gap."""
    return [samples[at].mean if at in samples else None for at in times]


def peaks(samples, times):
    return [samples[at].peak if at in samples else None for at in times]


# What says that the file itself is broken: SQLite (the bare class; a constraint), or values that
# are not what was written. Locks, full disks and the like are sqlite3.OperationalErrors.
# https://www.sqlite.org/rescode.html
DAMAGE = (sqlite3.DatabaseError, sqlite3.IntegrityError, UnicodeDecodeError, json.JSONDecodeError,
          struct.error, TypeError)


class Database:
    """One SQLite file. Every method may raise sqlite3.Error, or OSError if a damaged file cannot be
    renamed, and may be called again after that.

    `set_aside`: where the last damaged file went.
    """

    def __init__(self, path):
        # SQLite's logs are beside the file that a link leads to, and a damaged file is renamed
        # there; and a program that embeds us may work in another folder later
        self.path = os.path.realpath(path)
        self.set_aside = ""
        self._db: Optional[sqlite3.Connection] = None
        self._wall = 0.0            # of the last call that knew it: names the files set aside
        self._quarter = -1          # of the last sample

    def close(self):
        """Close the file; a transaction that is open is rolled back."""
        if self._db is not None:
            self._db.close()
            self._db = None

    # -- the list

    def load(self, wall):
        """All that is listed, as save() took it, with the time each was first seen ever."""
        self._wall = wall

        def work(db):
            rows = [ListedRow(*row) for row in db.execute(
                "SELECT game, address, port, expires, first_seen, listed.last_seen, fields"
                " FROM listed JOIN server ON id = server ORDER BY server")]
            for row in rows:
                if not row.has_types():
                    raise TypeError("a row has values of another type")
                stored_fields(row.fields)
            return rows
        return self._run(work)

    def save(self, rows, gone):
        """List these rows, new or changed, and list these keys no longer: one transaction. On
        return it outlives the process."""
        names = "game", "address", "port", "expires", "first_seen", "last_seen", "fields"
        saved = [dict(zip(names, row)) for row in rows]
        left = [dict(zip(names, key)) for key in gone]

        def work(db):
            self._keep_names(db, gone)
            # Never back: the clock may stand at 1970, after a power cut
            db.executemany(
                "UPDATE server SET last_seen = max(last_seen, coalesce("
                "(SELECT last_seen FROM listed WHERE server = id), 0))"
                " WHERE game = :game AND address = :address AND port = :port", left)
            db.executemany(
                "DELETE FROM listed WHERE server = (SELECT id FROM server"
                " WHERE game = :game AND address = :address AND port = :port)", left)
            db.executemany(
                "INSERT INTO server (game, address, port, first_seen, last_seen, fields)"
                " VALUES (:game, :address, :port, :first_seen, :last_seen, :fields)"
                " ON CONFLICT (game, address, port)"
                " DO UPDATE SET fields = excluded.fields WHERE fields IS NOT excluded.fields",
                saved)
            db.executemany(
                "INSERT OR REPLACE INTO listed SELECT id, :expires, :last_seen FROM server"
                " WHERE game = :game AND address = :address AND port = :port", saved)
        self._run(work)

    def _keep_names(self, db, gone):
        """Of servers that have left keep the name alone, the first of the fields: a stranger could
        have thousands of them listed, one after another, each with many texts."""
        for game, address, port in gone:
            server = self._server_id(db, game, address, port)
            row = db.execute("SELECT fields FROM server WHERE id = :server AND fields NOTNULL",
                             {"server": server}).fetchone()
            if row is not None:
                fields, = row
                db.execute("UPDATE server SET fields = :fields WHERE id = :server",
                           {"fields": json.dumps(stored_fields(fields)[:1]), "server": server})

    def known(self, game, address, port):
        """What is remembered of a server, also of one that left within the year."""
        def work(db):
            row = db.execute(
                "SELECT first_seen, coalesce(listed.last_seen, server.last_seen), fields"
                " FROM server LEFT JOIN listed ON id = server WHERE fields NOTNULL"
                " AND game = :game AND address = :address AND port = :port",
                {"game": game, "address": address, "port": port}).fetchone()
            if row is None:
                return None
            first_seen, last_seen, fields = row
            name, *_ = stored_fields(fields)
            return Remembered(first_seen, last_seen, name)
        return self._run(work)

    def number(self, chosen):
        """A number that is kept with the file: the first that was chosen."""
        def work(db):
            db.execute("INSERT INTO server (game, address, port) SELECT '', '', :chosen WHERE NOT"
                       " EXISTS (SELECT * FROM server WHERE game = '' AND port >= 0)",
                       {"chosen": chosen})
            number, = db.execute(
                "SELECT port FROM server WHERE game = '' AND port >= 0").fetchone()
            return number
        return self._run(work)

    # -- history

    def sample(self, wall, players):
        """Once a minute: (game, address, port, players) of every server that responds; address ""
        and port 0 are the sum of a game. Gives recent() when a quarter hour has ended. A second
        sample of the same minute replaces the first."""
        self._wall = wall
        minute = int(wall) // MINUTE * MINUTE
        ended = minute // QUARTER != self._quarter          # whichever way the clock went

        def work(db):
            steady = self._note_clock(db, wall)
            if ended:
                self._roll_up(db, minute)
                self._drop_old(db, minute, steady)
                self._drop_excess(db)
            for game, address, port, count in players:
                # Of sums nothing else keeps the time
                db.execute(
                    "INSERT INTO server (game, address, port, first_seen, last_seen)"
                    " VALUES (:game, :address, :port, :wall, :wall)"
                    " ON CONFLICT (game, address, port)"
                    " DO UPDATE SET last_seen = excluded.last_seen WHERE address = ''",
                    {"game": game, "address": address, "port": port, "wall": wall})
                sample = PLAYERS.pack(clamp(count, SAMPLE_MAX) + 1)
                server = self._server_id(db, game, address, port)
                self._write_samples(db, BLOCKS[MINUTE], minute, server, sample)
        self._run(work)
        self._quarter = minute // QUARTER
        return self.hourly_players(wall) if ended else None

    def history(self, game, address, port, span, wall):
        """The last 'day' (1,440 minutes), 'week' (672 quarter hours), 'month' (2,976) or 'year'
        (8,784 hours) of a server, or with "" and 0 of a game. Of minutes the peak is the mean.
        Raises KeyError for another span."""
        step, length = SPANS[span]
        form, end = BLOCKS[step], series_end(step, wall)
        times = range(end - length, end, step)

        def work(db):
            samples = {}
            server = self._server_id(db, game, address, port)
            for begin in form.begins(times):
                samples.update(form.samples(begin, self._block(db, form, begin, server), times))
            return samples
        samples = self._run(work)
        return Series(times.start, step, means(samples, times), peaks(samples, times))

    def hourly_players(self, wall):
        """The hourly means of the last 24 hours, for every server and game that has any."""
        form, end = BLOCKS[HOUR], series_end(HOUR, wall)
        times = range(end - DAY, end, HOUR)
        blocks = {"step": HOUR, "first": form.begin(times.start), "end": times.stop}

        def work(db):
            servers = collections.defaultdict(dict)
            for game, address, port, begin, block in db.execute(
                    "SELECT game, address, port, start, samples FROM block"
                    " JOIN server ON id = server"
                    " WHERE step = :step AND start >= :first AND start < :end", blocks):
                samples = form.samples(begin, block, times)
                if samples:
                    servers[game, address, port].update(samples)
            return servers
        return {key: means(samples, times) for key, samples in self._run(work).items()}

    def _server_id(self, db, game, address, port):
        """None for one that nobody has seen."""
        row = db.execute("SELECT id FROM server"
                         " WHERE game = :game AND address = :address AND port = :port",
                         {"game": game, "address": address, "port": port}).fetchone()
        return row and row[0]

    def _block(self, db, form, begin, server):
        """The bytes of the samples from `begin` on; all are gaps if there is no such block."""
        row = db.execute(
            "SELECT samples FROM block WHERE step = :step AND start = :begin AND server = :server",
            {"step": form.step, "begin": begin, "server": server}).fetchone()
        return row[0] if row else form.empty()

    def _write_samples(self, db, form, at, server, samples):
        """Write the samples from the time `at` on, all of them in one block."""
        begin, offset = form.begin(at), form.offset(at)
        block = bytearray(self._block(db, form, begin, server))
        block[offset:offset + len(samples)] = samples
        db.execute("INSERT OR REPLACE INTO block VALUES (:step, :begin, :server, :block)",
                   {"step": form.step, "begin": begin, "server": server, "block": block})

    def _roll_up(self, db, minute):
        """Make the quarter hours and the hour of the last minutes there are. Doing it again changes
        nothing."""
        # Not those that a clock running ahead has left
        [(hour,)] = db.execute(
            "SELECT max(start) FROM block WHERE step = :step AND start <= :minute",
            {"step": MINUTE, "minute": minute})
        for server, block in db.execute(
                "SELECT server, samples FROM block WHERE step = :step AND start = :hour",
                {"step": MINUTE, "hour": hour}).fetchall():
            minutes = struct.unpack("<60H", block)
            for step, size in ((QUARTER, 15), (HOUR, 60)):
                samples = [mean_and_peak(minutes[at:at + size]) for at in range(0, 60, size)]
                self._write_samples(db, BLOCKS[step], hour, server, b"".join(samples))

    def _note_clock(self, db, wall):
        """Note when this sample was taken: for how many seconds samples have come without a jump
        of the clock."""
        row = db.execute("SELECT first_seen, last_seen FROM server WHERE game = '' AND port = -1"
                         ).fetchone()
        if row is None:
            # A new file, or one of a program that did not keep the time of sums
            db.execute("UPDATE server SET last_seen = :wall WHERE address = '' AND game != ''",
                       {"wall": wall})
        since, last = row or (wall, wall)
        if not last <= wall <= last + JUMP_S:
            since = wall
        db.execute(
            "INSERT INTO server (game, address, port, first_seen, last_seen)"
            " VALUES ('', '', -1, :since, :wall) ON CONFLICT (game, address, port)"
            " DO UPDATE SET first_seen = excluded.first_seen, last_seen = excluded.last_seen",
            {"since": since, "wall": wall})
        return wall - since

    def _drop_old(self, db, minute, steady):
        """Drop what is too old, and what comes after now, if the clock has been right for long
        enough: for `steady` seconds without a jump."""
        if steady >= STEADY_S:
            for form in BLOCKS.values():
                db.execute("DELETE FROM block WHERE step = :step AND start < :oldest",
                           {"step": form.step, "oldest": form.oldest(minute)})
            # Servers and sums, with their last block
            db.execute("DELETE FROM server WHERE game != '' AND last_seen < :oldest"
                       " AND id NOT IN (SELECT server FROM listed)",
                       {"oldest": BLOCKS[HOUR].oldest(minute)})
        if steady >= AHEAD_S:
            for form in BLOCKS.values():
                db.execute("DELETE FROM block WHERE step = :step AND start > :minute",
                           {"step": form.step, "minute": minute})
            # As if they had left just now: they go within a year
            db.execute("UPDATE server SET first_seen = min(first_seen, :minute),"
                       " last_seen = :minute WHERE game != '' AND last_seen > :minute",
                       {"minute": float(minute)})

    def _drop_excess(self, db):
        """Forget those that were here for the shortest time, where they are too many: nobody who
        lists one server after another, or renames one again and again, drives out others or fills
        the disk."""
        servers = db.execute(
            "SELECT id, first_seen FROM server"
            " WHERE address != '' AND id NOT IN (SELECT server FROM listed)"
            " ORDER BY first_seen - last_seen, last_seen DESC LIMIT -1 OFFSET :most",
            {"most": KNOWN_SERVERS}).fetchall()
        sums = db.execute(
            "SELECT id, first_seen FROM server WHERE address = '' AND game != ''"
            " ORDER BY first_seen - last_seen, last_seen DESC LIMIT -1 OFFSET :most",
            {"most": KNOWN_GAMES}).fetchall()
        excess = servers + sums
        if not excess:
            return
        db.executemany("DELETE FROM server WHERE id = :id", [{"id": id} for id, _ in excess])
        # Their blocks; not all of the table is read, as most of them came lately
        first_seen = min(first_seen for _, first_seen in excess)
        for form in BLOCKS.values():
            db.execute("DELETE FROM block WHERE step = :step AND start >= :begin"
                       " AND server NOT IN (SELECT id FROM server)",
                       {"step": form.step, "begin": form.begin(first_seen)})

    # -- the file

    def _run(self, work):
        """Do `work` in a transaction; if the file turns out to be damaged, once more in a new
        one."""
        for last in (False, True):
            try:
                with self._db or self._open() as db:
                    return work(db)
            except Exception as error:
                # It rolls back, and the next call looks afresh at a file that was read-only
                self.close()
                # Noise in the head, and text that is not UTF-8, are OperationalErrors
                damaged = type(error) in DAMAGE or str(error).startswith(
                    ("Could not decode to UTF-8", "unsupported file format"))
                if last or not damaged:
                    raise
            # Outside of `except`: the error keeps the file open, and Windows renames no such file
            self._rename_damaged()
        return None

    def _open(self):
        # A transaction begins with the first statement that writes
        db = self._db = sqlite3.connect(self.path, timeout=STORAGE_BUSY_S, check_same_thread=False,
                                        isolation_level="IMMEDIATE")
        tables = {sql for sql, in db.execute("SELECT sql FROM sqlite_master")}
        [(version,)] = db.execute("PRAGMA user_version")
        if not tables:
            db.executescript("; ".join(
                ("BEGIN IMMEDIATE", *SCHEMA, "PRAGMA user_version = 1", "COMMIT")))
        elif not tables.issuperset(SCHEMA) or version not in (0, 1):
            # 0: restored from a .dump, which does not tell
            raise sqlite3.OperationalError("it belongs to another program or to a later version of"
                                           " this one; change [server] database")
        # A file system without shared memory has no log: SQLite's default is slower and as safe
        with contextlib.suppress(sqlite3.OperationalError):
            # With the log and NORMAL a commit is a write without fsync. It outlives the process; a
            # power cut costs the last seconds and never the file.
            db.execute("PRAGMA journal_mode = WAL").fetchall()
            db.execute("PRAGMA synchronous = NORMAL")
        return db

    def _rename_damaged(self):
        at = datetime.fromtimestamp(self._wall, timezone.utc)
        name = self.path + at.strftime(".damaged-%Y%m%d-%H%M%S")
        # The file itself last: if we are stopped on the way, the new file must not read an old log
        for suffix in ("-wal", "-shm", "-journal", ""):
            if os.path.lexists(self.path + suffix):
                os.replace(self.path + suffix, name + suffix)
        self.set_aside = name
        log.warning("the database was damaged; it has been renamed to %s, and a new one begun",
                    name)


# ================================================================================================
# 7  Protocols
#
# Each game is one class (or two) with real bytes of its protocol in the docstring. A protocol is
# given bytes, the peer that sent them and the time, and it returns bytes. It keeps what it learns
# in the registry, and raises Malformed for everything that its document does not have. "The
# document" is the game's own description of the protocol; the docstring of the class has its title.
# Where the document leaves something open, the class does what programs in use were seen to do.
# ================================================================================================

class UdpProtocol:
    """The base class of a protocol on one UDP port.

    Replies are a list of (datagram, peer) pairs, which the event loop sends."""

    # The id that the game has in the registry; "" if there are several: see serves()
    game = ""
    # True if the game's lists have room for IPv4 addresses alone; it then gets IPv4 sockets only
    ipv4_only = True
    # A longer datagram is cut off here
    datagram_bytes = MAX_DATAGRAM_BYTES

    def answer_repeats(self, data: Sequence[bytes], peers: Sequence[Peer],
                       now: float) -> Sequence[Optional[bytes]]:
        """Answer those datagrams of a batch in which a listed server only repeats itself.

        `data` has the datagrams and `peers` has the sender of each. Return a list of the same
        length: the answer to each datagram, or None if datagram() has to read it. The repetitions
        of a batch count as if they had arrived before its other datagrams."""
        return [None] * len(data)

    def datagram(self, data: bytes, peer: Peer, now: float) -> Replies:
        """Read one datagram and return the replies.

        Raise Malformed if the protocol has no such datagram, and Limited if a limit forbids an
        answer."""
        raise NotImplementedError

    def serves(self, server: Server) -> bool:
        """Return whether this server announces itself here.

        The master asks this for servers that were listed before a restart."""
        return server.game == self.game

    def tick(self, now: float) -> Replies:
        """Do the work of each second and return the datagrams to send.

        This is the place for polls, retries, and forgetting what the protocol remembers."""
        return []

    def read(self, settings: Settings) -> None:
        """Take over the settings, at the start and after a reload."""


class Session:
    """One TCP connection.

    The bytes that a method returns are written to the peer, those of each call in one piece."""

    # True once no more is to come: what is still unsent is written, then the connection is closed
    done = False
    # Bytes that have been received and not yet answered
    buffer = b""
    # True for the connection of a game server that publishes itself here. If there are too many
    # connections, those of such servers are closed last
    kept = False
    # Work for the disk thread; its result is handed to resume()
    job: Optional[Callable[[], Any]] = None

    def opened(self, now: float) -> bytes:
        """Return what the master sends before it has received anything."""
        return b""

    def receive(self, data: bytes, now: float) -> bytes:
        """Answer one message at most, and keep the bytes behind it in `buffer`.

        Once the answer has been written, this method is called again with b"". The answers are
        the same however the network splits the input. Raise Malformed for bytes that the protocol
        does not have."""
        return b""

    def ended(self, now: float) -> bytes:
        """Return what is still to be sent to a peer that sends no more but may still read."""
        return b""

    def resume(self, result: Any, now: float) -> bytes:
        """Answer with the result of `job`, or with the exception that the job raised."""
        return b""

    def tick(self, now: float) -> bytes:
        """Return a greeting that is due, or set `done` after a timeout.

        The event loop calls this a few times a second while no output waits."""
        return b""

    def closed(self, now: float) -> None:
        """Clean up after the connection, whichever side has ended it."""


class TcpProtocol:
    """The base class of a protocol on one TCP port: it creates a session for each connection."""

    # As in UdpProtocol
    game = ""
    ipv4_only = False
    # False if clients send the first bytes, which are then read as soon as they connect
    speaks_first = True

    def session(self, address: str, now: float) -> Session:
        """Return the session for a new connection from this address."""
        raise NotImplementedError

    def refusal(self, address: str, now: float) -> Session:
        """Return the session for a connection over a limit.

        The connection is closed once the bytes that its opened() returns have been sent."""
        session = Session()
        session.done = True
        return session

    def serves(self, server: Server) -> bool:
        """Return whether this server announces itself here, as in UdpProtocol."""
        return server.game == self.game

    def tick(self, now: float) -> None:
        """Do the work of each second."""

    def read(self, settings: Settings) -> None:
        """Take over the settings, at the start and after a reload."""


class Core(NamedTuple):
    """The parts of the master that every protocol is given when it is created."""

    settings: Settings
    registry: Registry
    poller: Poller
    # resolve(host, done, source, like="") has the address of a host name looked up in another
    # thread, and returns at once. The event loop later calls done(address, now); the address is
    # "" if the host has none. `source` is the address of the client that named the host, or "" if
    # the ini names it. If a host has several addresses, `like` is chosen if it is one of them, and
    # otherwise one of the same family as `like`, if there is one. resolve() raises Refused if too
    # many look-ups for clients are waiting; the client then has to try again
    resolve: Callable[..., None]
    # The games whose servers may be announced by HTTP, by their ids
    http_announcers: Dict[str, PolledGame]
    # Only for jobs of the disk thread
    database: Optional[Database] = None
    # How much each protocol has received and sent, by its name
    tallies: Mapping[str, Tally] = {}
    # The parts of the program that do not work, with the reason; empty while all is well
    health: Mapping[str, str] = {}
    # The open ports; each has .protocol, .transport, .host and .port
    listeners: Sequence[Any] = ()
    # Measured values for /metrics that are in no tally, by their names
    gauges: Mapping[str, float] = {}
    # Returns the hourly player counts of the last day, by server
    hourly_players: Callable[[], Mapping[Key, Sequence[Optional[int]]]] = dict
    # The state of the link to other masters; empty if there is no link
    cluster: Mapping[str, Any] = {}


# --- Poller --------------------------------------------------------------------------------------
#
# A query is one datagram to a game server. A poll is everything that it takes to learn the state of
# the server: one query, or several if its game has further questions or if a datagram is lost.

# The longest answer that is read. AIO's descriptions have no limit, but only their first
# TEXT_CHARACTERS are shown
POLL_ANSWER_BYTES = 16384
POLL_TIMEOUT_S = 3.0                # the script in the Hyperbol document waits 3 s
# A poll is missed after two queries without an answer, because a single datagram may get lost
POLL_ATTEMPTS = 2
# A server is gone after so many missed polls in a row
MISSED_POLLS_LIMIT = 3
# Announcements may restart so many polls in a row, because a server that has just started may
# announce itself several times
RESTARTED_POLLS_LIMIT = 5
# At the default rate, so many newcomers are all queried within 4 s, or within 40 s if listed
# servers take nine tenths of the rate. If each is a Luanti server with the longest announcement,
# those announcements take 160 MB
MAX_NEWCOMERS = 2000
# Listed servers leave one query in ten to newcomers
NEWCOMER_SHARE = 10
# Host names in the ini are looked up again after so long, because home addresses change
RESOLVE_S = 600.0
# A host name without an address is looked up sooner, because our network may just have come up
RESOLVE_RETRY_S = 60.0


class Target:
    """One game server that the poller queries."""

    # True if the ini names the server: it is then queried however long it is silent
    pinned = False
    # The time of the next query; while a query is open, the time at which the poller gives it up
    due = 0.0
    # The time at which the open query was sent; None if no query is open
    asked_at: Optional[float] = None
    # A number that the open query carries and its answer has to repeat
    nonce = 0
    # The queries in the current poll that got no answer
    unanswered = 0
    # The polls that announcements have restarted since the last answer
    restarted_polls = 0
    # The polls in a row that got no answer
    missed_polls = 0
    # The time from the query to its answer, in milliseconds
    ping_ms = 0.0
    # The reason why a datagram that came in this poll is no answer, or ""
    answer_error = ""
    # For the querier alone: whatever it has to remember during a poll
    querier_data: Any = None

    def __init__(self, querier, address, server_port):
        """`server_port` is the port that players use; queries may go to another one."""
        self.querier = querier
        self.address = address
        self.server_port = server_port
        self.port = server_port + querier.offset
        self.key = querier.game, address, server_port
        self.source = source_key(address)
        # The game under which the server is listed; a Quake III server's answer names it
        self.game = querier.game
        # When the server is polled within each interval: 0 is its start, 1 its end
        self.phase = RANDOM.random()


class Querier:
    """The base class of a game whose servers answer queries.

    The poller decides when a query is sent. The querier knows the bytes of its game."""

    registry: Registry
    # The id that the game has in the registry. Quake III's family is one querier with many games
    game = ""
    # The port that answers queries is the server's own port plus this
    offset = 0
    # How long a query waits for its answer
    timeout_s = POLL_TIMEOUT_S
    # A poll is missed after so many queries without an answer
    attempts = POLL_ATTEMPTS

    def nonce(self) -> int:
        """Return an unsigned 32-bit number for one query, which its answer has to repeat."""
        return RANDOM.getrandbits(32)

    def query(self, target: Target) -> bytes:
        """Return the bytes of the next query to this target, with `target.nonce` in them."""
        raise NotImplementedError

    def answer(self, target: Target, data: bytes, now: float) -> Optional[bytes]:
        """Read the answer to the target's open query.

        Return None if the poll has a further question, which then goes out at the next tick.
        Otherwise the poll is complete, and the bytes that this returns go to the server as a
        goodbye (b"": nothing is sent).

        Raise Malformed if the bytes are no answer to this query. If this raises Refused, the
        poller also behaves as if no answer had come."""
        raise NotImplementedError

    def poll_missed(self, target: Target, now: float) -> bool:
        """Handle a poll without an answer, the `target.missed_polls`th in a row.

        Return True if the poller is to query this target no longer."""
        raise NotImplementedError

    def record_silence(self, target: Target, now: float) -> None:
        """Record for /check why the poll of this target failed.

        Either no datagram came at all, or one came that could not be read as an answer."""
        outcome = "silent"
        reason = "no answer from UDP port %d" % target.port
        error = target.answer_error
        if error:
            outcome = "bad packet"
            reason = "its answer from UDP port %d: %s" % (target.port, error)
        self.record_outcome(target.address, target.server_port, outcome, now, reason)

    def record_outcome(self, source, port, outcome, now, detail=""):
        """Record for /check what became of the server at this address and port.

        `outcome` is a key of OUTCOMES (section 9); `detail` is the reason in words."""
        self.registry.record_outcome(source, self.game, port, outcome, now, detail)


class Poller(UdpProtocol):
    """Queries game servers for their state, from one UDP port, evenly over the interval.

    An answer counts only if it comes from the address and port that were queried, and while a
    query to them is open. The poller queries only servers that the ini names or from whose address
    a proven packet came. The protocols see to that, because only they add targets.

    A newcomer is a target that has announced itself and is not listed yet. Listed servers are
    queried first, and the sources of newcomers take turns, so that servers that never answer do
    not delay the others."""

    ipv4_only = False
    datagram_bytes = POLL_ANSWER_BYTES

    def __init__(self, settings):
        # Every querier that has added a target
        self.queriers = set()
        # The targets by game, address and the server's own port
        self.targets = {}
        # The number of targets by source_keys()
        self.sources = collections.defaultdict(int)
        # The newcomers by source, and those of each source by the target's key. The first source
        # is the next to be queried
        self.newcomers = collections.OrderedDict()
        self.ticked_at = 0.0
        self.read(settings)

    def read(self, settings):
        """Take over the interval and the rate, and move waiting polls into the new interval."""
        self.interval = settings["poll.interval"]
        self.rate = settings["poll.rate"]
        now = self.ticked_at
        next_tick = now + TICK_S
        for target in self.targets.values():
            # A query that is open or due at the next tick keeps its time: its poll has begun
            has_begun = target.asked_at is not None or target.due <= next_tick
            if not has_begun:
                target.due = next_slot(now, self.interval, target.phase)

    # Targets

    def find(self, querier, address, server_port):
        """Return the target behind a game server's own port, or None."""
        key = querier.game, address, server_port
        return self.targets.get(key)

    def keep_polling(self, querier, address, server_port):
        """Return the target for a server that is listed or named in the ini; add it if it is new.

        A new target is queried at the next tick, and from then on in its slot of each interval.
        If the target was a newcomer, it no longer is."""
        target = self.find(querier, address, server_port)
        if target is None:
            target = Target(querier, address, server_port)
            self.insert(target)
        else:
            self.end_newcomer(target)
        return target

    def add_newcomer(self, querier, address, server_port):
        """Add a target for a game server that has announced itself and is not a target yet.

        Return None if there is room for it. Otherwise a newcomer has been removed, perhaps this
        one; return its target."""
        newcomer = Target(querier, address, server_port)
        self.insert(newcomer)
        same_source = self.newcomers.setdefault(newcomer.source, {})
        same_source[newcomer.key] = newcomer
        count = sum(map(len, self.newcomers.values()))
        if count <= MAX_NEWCOMERS:
            return None
        return self.remove_one_newcomer()

    def insert(self, target):
        """Enter this new target into the tables."""
        self.queriers.add(target.querier)
        self.targets[target.key] = target
        for key in source_keys(target.address):
            self.sources[key] += 1

    def remove_one_newcomer(self):
        """Remove and return the oldest newcomer of the source that has the most newcomers.

        Thus a source that sends many announcements pushes out its own newcomers only."""
        # Of sources with equally many, max() takes its first one: here the one that came or was
        # queried last, because the other sources have waited for longer
        latest_first = reversed(list(self.newcomers.values()))
        same_source = max(latest_first, key=len)
        oldest = next(iter(same_source.values()))
        self.remove(oldest)
        return oldest

    def is_newcomer(self, target):
        """Return whether this target has announced itself and is not listed yet."""
        same_source = self.newcomers.get(target.source, {})
        return target.key in same_source

    def end_newcomer(self, target):
        """Take this target out of the newcomers, if it is one; it stays a target."""
        if not self.is_newcomer(target):
            return
        same_source = self.newcomers[target.source]
        del same_source[target.key]
        if not same_source:
            del self.newcomers[target.source]

    def remove(self, target):
        """Query this target no longer. Do nothing for None or a target that is removed already."""
        if target is None:
            return
        is_removed_already = self.targets.get(target.key) is not target
        if is_removed_already:
            return
        self.end_newcomer(target)
        del self.targets[target.key]
        for key in source_keys(target.address):
            decrement(self.sources, key)

    # Polls

    def poll_now(self, querier, address, server_port, now):
        """Begin a new poll of this game server at the next tick, and return its target.

        A server that is no target yet becomes one, as in keep_polling(). A poll that is under way
        starts again, without what the querier remembers of it. This restarts at most
        RESTARTED_POLLS_LIMIT polls in a row, so that a server that announces itself every few
        seconds and never answers is missed like every silent server."""
        target = self.find(querier, address, server_port)
        if target is None:
            target = self.keep_polling(querier, address, server_port)
        is_under_way = target.asked_at is not None or target.unanswered > 0
        if is_under_way:
            if target.restarted_polls >= RESTARTED_POLLS_LIMIT:
                return target
            target.restarted_polls += 1
        target.asked_at = None
        target.unanswered = 0
        target.answer_error = ""
        target.querier_data = None
        target.due = now
        return target

    def datagram(self, data, peer, now):
        """Give an answer to the querier that waits for it, and return the goodbye, if any.

        Raise Malformed if no query to this peer is open, or if no querier can read the answer."""
        source, source_port = peer[:2]
        address = canonical_address(source)
        error_text = "an answer that nobody asked for"
        # Servers of two games may be at one endpoint, so that each querier gets its chance
        for querier in self.queriers:
            target = self.find(querier, address, source_port - querier.offset)
            if target is None or target.asked_at is None:
                continue
            target.ping_ms = (now - target.asked_at) * 1000
            try:
                goodbye = querier.answer(target, data, now)
            except (Malformed, Refused) as error:
                error_text = str(error)
                target.answer_error = error_text
                continue
            self.end_query(target, goodbye is None, now)
            return [(goodbye, peer)] if goodbye else []
        raise Malformed(error_text)

    def end_query(self, target, has_further_question, now):
        """Schedule what comes after an answer to this target's query.

        A further question goes out at the next tick. Without one the poll is over."""
        target.missed_polls = 0
        target.restarted_polls = 0
        if has_further_question:
            target.asked_at = None
            target.due = now
        else:
            self.finish_poll(target, now)

    def tick(self, now):
        """Return the queries of this tick, each with the endpoint that it goes to.

        A query that got no answer in time is sent again, if its poll has attempts left."""
        self.ticked_at = now
        to_query = []
        for target in self.due_targets(now):
            self.give_up_query(target)
            if target.unanswered < target.querier.attempts:
                to_query.append(target)
            else:
                self.miss_poll(target, now)
        chosen = self.choose_within_rate(to_query)
        return [self.open_query(target, now) for target in chosen]

    def due_targets(self, now):
        """Return the targets with a query to send or to give up now, the longest overdue first."""
        # Looking at all 10,000 takes a millisecond, less than keeping them in order
        due = []
        for target in self.targets.values():
            if target.due <= now:
                due.append(target)
        due.sort(key=lambda target: target.due)
        return due

    def give_up_query(self, target):
        """Count the target's open query, if there is one, as unanswered."""
        if target.asked_at is not None:
            target.asked_at = None
            target.unanswered += 1

    def miss_poll(self, target, now):
        """Count the target's poll as missed. The querier decides whether it stays a target."""
        target.missed_polls += 1
        if target.querier.poll_missed(target, now):
            self.remove(target)
        self.finish_poll(target, now)

    def choose_within_rate(self, targets):
        """Return those of the targets that the rate allows to query in this tick.

        Listed servers come first, but they leave a share of the rate to newcomers. The sources
        of the newcomers that are chosen go to the end of the queue of sources."""
        listed = []
        newcomers = []
        for target in targets:
            if self.is_newcomer(target):
                newcomers.append(target)
            else:
                listed.append(target)
        # At most half, because a rate of 1 would otherwise leave nothing to listed servers
        share = max(1, self.rate // NEWCOMER_SHARE)
        share = min(share, self.rate // 2, len(newcomers))
        listed = listed[:self.rate - share]
        remaining = self.rate - len(listed)
        in_turns = self.order_by_turns(newcomers)
        chosen_newcomers = in_turns[:remaining]
        for target in chosen_newcomers:
            self.newcomers.move_to_end(target.source)
        return listed + chosen_newcomers

    def order_by_turns(self, newcomers):
        """Return the newcomers in an order in which their sources take turns.

        The first newcomer of each source comes first, then the second of each source, and so on.
        In each round the source that was queried longest ago begins."""
        by_source = {source: [] for source in self.newcomers}
        for target in newcomers:
            by_source[target.source].append(target)
        rounds = collections.defaultdict(list)
        for same_source in by_source.values():
            for round_number, target in enumerate(same_source):
                rounds[round_number].append(target)
        ordered = []
        for round_number in sorted(rounds):
            ordered.extend(rounds[round_number])
        return ordered

    def open_query(self, target, now):
        """Open a query to this target. Return its bytes and the endpoint that they go to."""
        querier = target.querier
        target.nonce = querier.nonce()
        target.asked_at = now
        target.due = now + querier.timeout_s
        endpoint = target.address, target.port
        return querier.query(target), endpoint

    def finish_poll(self, target, now):
        """End the target's poll. The next poll begins in the target's slot of the interval."""
        target.asked_at = None
        target.unanswered = 0
        target.answer_error = ""
        target.due = next_slot(now, self.interval, target.phase)


def next_slot(now, interval, phase):
    """Return the first time after `now` that lies at `phase` within an interval.

    Intervals follow each other from time 0 on. Times are in seconds; `phase` is the part of the
    interval that has passed at the slot, from 0 to 1. Example: with an interval of 30 s and a
    phase of 0.5 the slots are at 15, 45, 75 and 105 s, so next_slot(100.0, 30.0, 0.5) is 105.0."""
    since_last_slot = (now - phase * interval) % interval
    return now + interval - since_last_slot


class PolledGame(Querier):
    """A game whose servers are listed for as long as they answer the poller.

    A server becomes a target in one of three ways: the ini names it by address or host name
    (set_pinned), it announces itself in the game's protocol or by HTTP (on_http_announcement), or
    it was listed before a restart. list_polled() lists the servers that answer. poll_missed()
    removes the servers that do not; a server that the ini names is shown as not responding instead.
    """

    def __init__(self, core):
        self.core = core
        self.registry = core.registry
        self.poller = core.poller
        self.rules = core.registry.rules
        # The servers that the ini names, by host and port. What the values are is up to the game
        self.pinned_by_host = {}
        # The same values by the addresses and ports that the hosts lead to
        self.pinned_by_address = {}
        # The address of each host, "" if it has none
        self.addresses = {}
        # The hosts that are being looked up
        self.hosts_being_resolved = set()
        # The time at which all hosts are looked up again
        self.resolve_at = -math.inf
        core.http_announcers[self.game] = self
        self.registry.subscribe(self.on_registry_event, self.game, ["listed", "gone"])

    def on_http_announcement(self, source, port, fields, now):
        """Handle an announcement, received by HTTP, of the server at `source` and `port`.

        `fields` has what the announcement says of the server, as attributes of Server. Raise
        Refused if the server may not be queried."""
        raise NotImplementedError

    def query_newcomer(self, source, port, now, name=None):
        """Begin a poll of a game server that has announced itself, and return its target.

        The server may be listed or a target already. `name` is the name that it has announced, or
        None if the announcement had none. Raise Refused if the server may not be queried."""
        self.check_newcomer(source, port, name)
        poller = self.poller
        is_new = poller.find(self, source, port) is None
        if is_new:
            self.add_newcomer(source, port, now)
        target = poller.poll_now(self, source, port, now)
        outcome = "announced"
        if self.is_answering(target):
            outcome = "listed"
        self.record_outcome(source, port, outcome, now)
        return target

    def check_newcomer(self, source, port, name):
        """Raise Refused if a game server that has announced itself may not be queried.

        `name` is None if the server has not said its name."""
        registry = self.registry
        address = self.rules.listed_address(source)
        key = self.game, address, port
        server = registry.get(*key)
        target = self.poller.find(self, source, port)
        is_listed_here = server is not None and not server.master
        if is_listed_here:
            registry.check_rules(source, address, port, name)
        else:
            is_pinned = target is not None and target.pinned
            registry.check_admission(key, source, name, is_pinned)
        if target is None:
            counts = self.poller.sources
            self.rules.check_source_limit(counts, source, "queried")

    def add_newcomer(self, source, port, now):
        """Add a newcomer to the poller.

        If there are too many newcomers, one of them is removed, and /check shows the reason to its
        operator. Raise Refused if it is this one."""
        removed = self.poller.add_newcomer(self, source, port)
        if removed is None:
            return
        busy = Refused("busy", "too many game servers wait for their first query; "
                               "try again in a minute")
        if removed.key == (self.game, source, port):
            raise busy
        removed.querier.record_outcome(
            removed.address, removed.server_port, busy.outcome, now, str(busy))

    def is_answering(self, target):
        """Return whether the target's server is listed, as responding, by this master itself."""
        server = self.listed_server(target)
        if server is None or server.master:
            return False
        return server.responding

    def stop_polling(self, source, port):
        """Query this server no longer, because it has left or says that it leaves.

        A server that the ini names stays a target. Return False if the server was no target."""
        target = self.poller.find(self, source, port)
        if target is None:
            return False
        if not target.pinned:
            self.poller.remove(target)
        return True

    def on_registry_event(self, event, server):
        """Poll every server that is listed, and no server that is gone.

        `event` is "listed" or "gone". Servers restored from the disk are listed in this way too."""
        if event == "listed":
            target = self.poller.keep_polling(self, server.source, server.port)
            target.game = server.game
            if server.pinned:
                target.pinned = True
        else:
            self.stop_polling(server.source, server.port)

    def listed_endpoint(self, target):
        """Return the address and port at which the target's server is listed, or would be."""
        address = self.rules.listed_address(target.address)
        return address, target.server_port

    def listed_server(self, target):
        """Return the target's server in the list, or None."""
        address, port = self.listed_endpoint(target)
        return self.registry.get(target.game, address, port)

    # Servers that the ini names

    def set_pinned(self, pinned_by_host):
        """Take over the servers that the ini names: a dict by (host, port)."""
        self.pinned_by_host = pinned_by_host
        self.resolve_at = -math.inf

    def resolve_pinned(self, now):
        """Poll the servers that the ini names, at the addresses that their hosts lead to now.

        Called once a second. Servers that the ini has named before and names no longer are
        removed; they may announce themselves again."""
        hosts = {host for host, _ in self.pinned_by_host}
        if now >= self.resolve_at:
            self.resolve_at = now + RESOLVE_S
            self.resolve_hosts(hosts)
        self.pinned_by_address = {}
        for (host, port), value in self.pinned_by_host.items():
            address = self.addresses.get(host)
            if address:
                self.pinned_by_address[address, port] = value
        for address, port in self.pinned_by_address:
            target = self.poller.keep_polling(self, address, port)
            target.pinned = True
        is_look_up_complete = hosts <= self.addresses.keys()
        if is_look_up_complete:
            self.remove_unpinned()

    def resolve_hosts(self, hosts):
        """Look up the addresses of these hosts. The results go to pinned_resolved()."""
        for host in hosts:
            if is_unicast(host):
                self.addresses[host] = canonical_address(host)
            elif host not in self.hosts_being_resolved:
                self.hosts_being_resolved.add(host)
                done = functools.partial(self.pinned_resolved, host)
                self.core.resolve(host, done, "")

    def pinned_resolved(self, host, address, now):
        """Remember the address of a host that the ini names.

        `address` is "" if the look-up found none. The host's last address then stays in use."""
        self.hosts_being_resolved.discard(host)
        if is_unicast(address):
            self.addresses[host] = address
            return
        self.resolve_at = min(self.resolve_at, now + RESOLVE_RETRY_S)
        if host not in self.addresses:
            self.addresses[host] = ""
            log.warning("%s: the host name %s in the ini has no address; "
                        "it will be looked up again", self.game, ascii(host))

    def remove_unpinned(self):
        """Remove the targets and servers that the ini named before and names no longer."""
        for target in list(self.poller.targets.values()):
            was_named = target.querier is self and target.pinned
            if not was_named:
                continue
            endpoint = target.address, target.server_port
            if endpoint in self.pinned_by_address:
                continue
            server = self.listed_server(target)
            self.poller.remove(target)
            self.registry.remove_own(server)

    # Results of polls

    def list_polled(self, target, fields, now, lifetime=math.inf):
        """List the target's server with the contents of its answer, or refresh it.

        `fields` has attributes of Server, `lifetime` is in seconds. Return the Server. Return None
        if it is refused: it is then removed from the list, and from the poller unless the ini names
        it."""
        source = target.address
        port = target.server_port
        server_before = self.listed_server(target)
        was_responding = server_before is not None and server_before.responding
        try:
            server = self.list_answer(target, fields, now, lifetime)
        except Refused as refused:
            self.record_outcome(source, port, refused.outcome, now, str(refused))
            self.registry.remove_own(server_before)
            self.stop_polling(source, port)
            return None
        self.poller.end_newcomer(target)
        has_begun_to_respond = server.responding and not was_responding
        if has_begun_to_respond:
            self.record_outcome(source, port, "listed", now)
        return server

    def list_answer(self, target, fields, now, lifetime):
        """Put the target's server into the list under the game that its answer names.

        If the server was listed under another game, it leaves that game's list. Return the Server.
        Raise Refused if it may not be listed."""
        complete_fields = {"responding": True, "verified": "query", **fields}
        source = target.address
        game = self.admitted_game(source, complete_fields)
        server = self.listed_server(target)
        has_changed_game = server is not None and server.game != game
        if has_changed_game:
            self.registry.remove_own(server)
        target.game = game
        address, port = self.listed_endpoint(target)
        key = game, address, port
        return self.registry.list_or_refresh(
            key, source, now, lifetime, complete_fields, target.pinned)

    def admitted_game(self, source, fields):
        """Return the id of the game under which a server with this answer is listed.

        `source` is the server's address, `fields` has attributes of Server. Raise Refused if the
        game is not listed here."""
        return self.game

    def poll_missed(self, target, now):
        """Handle a missed poll: remove a server that is gone, or show it as not responding.

        Return True if the poller is to query this target no longer."""
        is_gone = (target.missed_polls >= MISSED_POLLS_LIMIT
                   or self.poller.is_newcomer(target))
        server = self.listed_server(target)
        if server is not None and self.is_listed_otherwise(server, target):
            return is_gone and not target.pinned
        if is_gone or server is None:
            self.record_silence(target, now)
        if target.pinned:
            self.list_silent(target, server, is_gone, now)
            return False
        if is_gone:
            self.registry.remove_own(server)
        return is_gone

    def is_listed_otherwise(self, server, target):
        """Return whether this server is in the list for another reason than the target's answers.

        Either another master has heard the server, or the server is behind a router and has
        announced itself from an address that is not the target's."""
        if server.master:
            return True
        return server.source != target.address

    def list_silent(self, target, server, is_gone, now):
        """Show a server that the ini names and that is silent as not responding.

        `server` is None if it is not listed yet. If it is listed, nothing changes as long as
        `is_gone` is False, because only few polls have been missed so far."""
        if server is None:
            name = endpoint_text(*self.listed_endpoint(target))
            self.list_polled(target, {"name": name, "responding": False}, now)
        elif is_gone:
            # Its next answer brings these values again
            self.registry.update(server, {
                "responding": False,
                "players": 0,
                "ping_ms": None,
                "confirmed": True,
                "details": NO_DETAILS,
            })


# --- Iceball -------------------------------------------------------------------------------------

ICEBALL_HBVERSION = 2
# The kind of a datagram: its first 4 bytes
ICEBALL_ANNOUNCE = b"1CEB"
ICEBALL_COOKIE = b"MSOK"
ICEBALL_HANDSHAKE = b"HSHK"
ICEBALL_BAD_VERSION = b"BADV"
ICEBALL_BAD_FORMAT = b"BADF"
# Kind, hbversion, ibversion, port, players, maximum, name, mode, map
ICEBALL_ANNOUNCEMENT = struct.Struct("<4sHIHHH30s10s30s")
ICEBALL_ANNOUNCEMENT_BYTES = ICEBALL_ANNOUNCEMENT.size          # 86
# Kind, hbversion, ibversion: the beginning of an announcement, and all of a BADV
ICEBALL_VERSIONS = struct.Struct("<4sHI")
# The port within an announcement
ICEBALL_PORT = struct.Struct("<10xH")
# The beginning that all announcements have in common. The bytes behind it, without the zeros at
# their end, are the "trimmed" announcement, which a cookie carries
ICEBALL_HEAD = ICEBALL_ANNOUNCE + struct.pack("<H", ICEBALL_HBVERSION)
# In an MSOK and an HSHK, a MAC stands between the kind and the trimmed announcement
ICEBALL_MAC = slice(len(ICEBALL_HANDSHAKE), len(ICEBALL_HANDSHAKE) + COOKIE_MAC_BYTES)
ICEBALL_TRIMMED = slice(ICEBALL_MAC.stop, None)
# An MSOK with a trimmed announcement of this length is as long as the announcement itself
ICEBALL_TRIMMED_BYTES = ICEBALL_ANNOUNCEMENT_BYTES - ICEBALL_TRIMMED.start
# A listed server that repeats its announcement has nothing to prove, so its MSOK has this constant
# in place of a cookie. The server echoes it like any cookie, and the master ignores the echo
ICEBALL_SAME = ICEBALL_COOKIE + b"same"
ICEBALL_SAME_RETURNED = ICEBALL_HANDSHAKE + b"same"
# Every server has to prove its address again after so many times the setting iceball.timeout
ICEBALL_PROOF_LIFETIMES = 2
# The bits of a version that hold the build. Without them a version stands for all of its builds
ICEBALL_BUILD_BITS = 1023
# How many BADV and BADF one source gets, per second and at once. A server sends a burst of five
# announcements every 40 s, so each of them is answered
ICEBALL_REJECTIONS = 1 / 8, 5


@functools.lru_cache(maxsize=256)
def iceball_version_text(number):
    """Return a version as a text: 8421413 is "0.2.1-37". The reverse of read_iceball_version().

    The texts are cached, so that all servers of one version share one text."""
    major = number >> 27
    minor = number >> 22 & 31
    patch = number >> 15 & 127
    letter = number >> 10 & 31
    build = number & ICEBALL_BUILD_BITS
    text = "%d.%d" % (major, minor)
    if patch:
        text += ".%d" % patch
    # 1 is "a"; 31 would be a control character
    if 0 < letter < 31:
        text += chr(ord("a") + letter - 1)
    if build:
        text += "-%d" % build
    return text


def iceball_text(field):
    """Return the text in a field of an announcement, cleaned.

    The field is in UTF-8. Many game servers take the UTF-8 of their configuration for Latin-1 and
    encode it again, so such a text is decoded twice. A character that the end of the field cuts
    off is dropped."""
    raw = c_string(field)
    if raw.isascii():
        return clean(raw.decode())
    once, _ = codecs.utf_8_decode(raw, "replace")
    try:
        twice, _ = codecs.utf_8_decode(once.encode("latin-1"))
    except UnicodeError:
        return clean(once)          # it was encoded once
    # The second utf_8_decode() has dropped an incomplete character at the end, such as a last "Ã".
    # If all else is ASCII and the field had room for more, the text was encoded once, and "Ã" is
    # its last letter
    may_be_cut_off = len(raw) == len(field)
    if twice.isascii() and not may_be_cut_off:
        return clean(once)
    return clean(twice)


# For modes and maps, of which all servers together have few
cached_iceball_text = functools.lru_cache(maxsize=4096)(iceball_text)


class Iceball(UdpProtocol):
    """Iceball's heartbeat protocol, hbversion 2; document: "Heartbeat server protocol".

        > 31434542 0200 25808000 e954 0000 4000     "1CEB" hbversion ibversion port players maximum
          4963656261 6c6c20536572766572 00…         name[30] mode[10] map[30]: NUL-terminated
                                                    unless full; 86 bytes in all
        < 4d534f4b cookie[]                         "MSOK"
        > 4853484b cookie[]                         "HSHK": the address is real
        < 42414456 0200 25808000                    "BADV": the versions that this master expects
        < 42414446                                  "BADF": the length is wrong

    A server is listed, or changed, only when its HSHK has come. Until then the master remembers
    nothing, because the cookie carries all that it needs: a MAC over the source and the
    announcement, and the announcement itself without the zeros at its end. A listed server that
    repeats its announcement is refreshed at once.

    The server's address is the source of the datagram; its port stands in the announcement. The
    same UDP port serves the first draft of the protocol, which the first byte tells apart.
    """

    game = "iceball"

    def __init__(self, core):
        settings = core.settings
        self.registry = core.registry
        self.cookie = Cookie(os.urandom(16))
        self.draft = IceballDraft(self)
        self.timeout = settings["iceball.timeout"]
        # The time at which all servers have to prove their addresses again
        self.prove_at = -math.inf
        self.rejection_limiter = Limiter(ICEBALL_REJECTIONS)
        # The listed servers by the address and UDP port that they send from
        self.senders = {}
        self.registry.subscribe(self.forget_sender, "iceball", ["gone"])
        self.read(settings)

    def read(self, settings):
        """Take over the version that players should have, and the versions to list."""
        self.version = settings["iceball.version"]
        self.accepted_versions = set(settings["iceball.accept_versions"])

    def tick(self, now):
        """Have every server prove its address again, once in ICEBALL_PROOF_LIFETIMES lifetimes.

        Without this, somebody who repeats a server's announcement with a forged source could keep
        it listed after it has left."""
        if now >= self.prove_at:
            pause = ICEBALL_PROOF_LIFETIMES * self.timeout
            self.prove_at = now + pause
            self.registry.forget_fingerprints()
            self.draft.tick(now)
        return []

    def answer_repeats(self, data, peers, now):
        """Refresh the servers that repeat their announcements; return an answer or None for each.

        This is the busiest function of the program. With 100,000 servers each look-up waits for
        the memory three times. If the look-ups of a batch follow each other directly, as they do
        in these short loops, their waits overlap, and an announcement costs only 1.11 times as
        much as it does with 100 servers."""
        sources = [source for source, _ in peers]
        packets = zip(data, sources)
        fingerprints = list(map(hash, packets))
        by_fingerprint = self.registry.by_fingerprint
        servers = list(map(by_fingerprint.get, fingerprints))
        for server in servers:
            if server is not None:
                server.last_seen = now
        return [None if server is None else ICEBALL_SAME for server in servers]

    def datagram(self, data, peer, now):
        """Answer an announcement, a handshake or a packet of the first draft.

        Raise Malformed for every other datagram, and record the reason for /check."""
        source, _ = peer
        kind = data[:len(ICEBALL_ANNOUNCE)]
        try:
            if kind == ICEBALL_ANNOUNCE:
                answer = self.answer_announcement(data, source, now)
            elif kind == ICEBALL_HANDSHAKE:
                answer = self.accept_handshake(data, peer, now)
            elif kind[:1] in DRAFT_KINDS:
                answer = self.draft.answer(data, peer, now)
            else:
                raise Malformed("neither 1CEB nor HSHK nor a packet of the first draft")
        except Malformed as error:
            self.registry.record_outcome(source, "iceball", 0, "bad packet", now, str(error))
            raise
        return [(answer, peer)] if answer else []

    def answer_announcement(self, data, source, now):
        """Return an MSOK with a cookie, or a rejection if the announcement cannot be listed.

        A rejection is a BADV, a BADF, or b"" if no answer is to be sent. Raise Malformed if the
        announcement is too short to have versions."""
        size = len(data)
        if size < ICEBALL_VERSIONS.size:
            raise Malformed("an announcement too short for its versions")
        reason = self.version_error(data)
        if reason:
            return self.reject(source, now, "version", reason)
        # The length comes second, because the announcements of other versions may differ in length
        if size != ICEBALL_ANNOUNCEMENT_BYTES:
            reason = "length: %d bytes instead of %d" % (size, ICEBALL_ANNOUNCEMENT_BYTES)
            return self.reject(source, now, "bad packet", reason)
        port, = ICEBALL_PORT.unpack_from(data)
        registry = self.registry
        address = registry.rules.listed_address(source)
        server = registry.get("iceball", address, port)
        if server is None:
            registry.record_outcome(source, "iceball", port, "announced", now)
        return self.answer_with_cookie(data, source, now)

    def version_error(self, data):
        """Return the reason why this announcement's versions are not listed, "" if they are."""
        _, hbversion, version = ICEBALL_VERSIONS.unpack_from(data)
        if hbversion != ICEBALL_HBVERSION:
            return "heartbeat version %d, only %d" % (hbversion, ICEBALL_HBVERSION)
        accepted = self.accepted_versions
        if not accepted:
            return ""
        any_build = version & ~ICEBALL_BUILD_BITS
        if version in accepted or any_build in accepted:
            return ""
        text = iceball_version_text(version)
        accepted_text = ", ".join(map(iceball_version_text, sorted(accepted)))
        return "Iceball version %s, only %s" % (text, accepted_text)

    def reject(self, source, now, outcome, reason):
        """Return BADV or BADF, or b"" for no answer; record the reason for /check.

        `outcome` is "version", for a BADV, or "bad packet". A game server that gets such an answer
        stops announcing itself to every master. The packet may have been forged to bring that
        about, so a source with a listed server gets no such answer, and every other source gets
        few. Packets from loopback cannot be forged."""
        self.registry.record_outcome(source, "iceball", 0, outcome, now, reason)
        if not is_loopback(source):
            has_listed_server = source in self.registry.sources
            if has_listed_server:
                return b""
            if not self.rejection_limiter.allow(source, now):
                return b""
        if outcome == "version":
            return ICEBALL_VERSIONS.pack(ICEBALL_BAD_VERSION, ICEBALL_HBVERSION, self.version)
        return ICEBALL_BAD_FORMAT

    def answer_with_cookie(self, data, source, now):
        """Return an MSOK with a cookie for this announcement, which has 86 bytes."""
        body = data[len(ICEBALL_HEAD):]
        trimmed = body.rstrip(b"\0")
        surplus = len(trimmed) - ICEBALL_TRIMMED_BYTES
        if surplus > 0:
            rules = self.registry.rules
            if not rules.allow_surplus("cookie", source, surplus, now):
                # The end of the map's name is lost for now. The next announcement of the burst
                # brings it, a second later
                trimmed = trimmed[:ICEBALL_TRIMMED_BYTES]
        # The "=" ends the address. Without it, the cookie of an announcement that begins with a
        # digit would also be valid for a longer address that ends in this digit
        message = source.encode() + b"=" + trimmed
        mac = self.cookie.make(message, now)
        return ICEBALL_COOKIE + mac + trimmed

    def accept_handshake(self, data, peer, now):
        """List or update the server that returns a cookie. Return b"", because HSHK has no answer.

        Raise Malformed if the cookie is not one that went to this source, or is too old."""
        if data == ICEBALL_SAME_RETURNED:
            return b""
        source, _ = peer
        packet = self.proven_announcement(data, source, now)
        (_, _, version, port, players, max_players, name, mode,
         map_name) = ICEBALL_ANNOUNCEMENT.unpack(packet)
        if self.is_sender_taken(peer, port):
            self.registry.record_outcome(
                source, "iceball", port, "owner", now,
                "the UDP port that it came from announces another game port")
            return b""
        server = self.list_proven(source, "", port, now, {
            "name": iceball_text(name),
            "mode": cached_iceball_text(mode),
            "map": cached_iceball_text(map_name),
            "version": iceball_version_text(version),
            "players": players,
            "max_players": max_players,
        })
        if server is not None:
            # Hashes have 64 bits, so that two of a million servers share one once in 40 million
            # times
            self.registry.set_fingerprint(server, hash((packet, source)))
            self.set_sender(server, peer)
        return b""

    def proven_announcement(self, data, source, now):
        """Return the announcement (86 bytes) that the cookie in this handshake carries.

        Raise Malformed if the cookie is not one that went to this source, or is too old."""
        mac = data[ICEBALL_MAC]
        trimmed = data[ICEBALL_TRIMMED]
        message = source.encode() + b"=" + trimmed
        if not self.cookie.is_valid(mac, message, now):
            raise Malformed("a cookie that went to another address, or is older than %d s"
                            % COOKIE_WINDOW_S)
        packet = ICEBALL_HEAD + trimmed
        return packet.ljust(ICEBALL_ANNOUNCEMENT_BYTES, b"\0")

    def is_sender_taken(self, sender, port):
        """Return whether a new server is to be refused because another one sends from there.

        `sender` is the address and UDP port that a handshake came from, `port` is the game port in
        it. A game server echoes every MSOK, even one for an announcement that was forged in its
        name. Therefore each sender may announce one game port only: otherwise an attacker could
        list further servers at its address. A server that is listed already is never refused."""
        server = self.senders.get(sender)
        if server is None or server.port == port:
            return False
        # list_proven() refuses port 0, and gives the better reason
        if port == 0:
            return False
        source, _ = sender
        rules = self.registry.rules
        if rules.exempts(source):
            return False
        address = rules.listed_address(source)
        return self.registry.get("iceball", address, port) is None

    def list_proven(self, source, claimed_address, port, now, fields):
        """List or refresh a server that has proven its source.

        `claimed_address` is the address that the server gives itself, or ""; `fields` has
        attributes of Server. Return the Server, or None if it is refused."""
        registry = self.registry
        rules = registry.rules
        address = rules.listed_address(source, claimed_address)
        key = "iceball", address, port
        fields["verified"] = "handshake"
        try:
            server = registry.list_or_refresh(key, source, now, self.timeout, fields)
        except Refused as refused:
            registry.record_outcome(source, "iceball", port, refused.outcome, now, str(refused))
            return None
        registry.record_outcome(source, "iceball", port, "listed", now)
        return server

    def set_sender(self, server, sender):
        """Remember the address and UDP port that a listed server sends from."""
        if server.sender != sender:
            self.forget_sender("changed", server)
            server.sender = sender
        self.senders[sender] = server

    def forget_sender(self, event: str, server: Server) -> None:
        """Forget where a server sends from, when it leaves or sends from elsewhere.

        `event` is "gone" or "changed"; it makes no difference here."""
        sender = server.sender
        if self.senders.get(sender) is server:
            del self.senders[sender]


# The kind of a packet of the first draft: its first byte
DRAFT_REQUEST = b"\1"
DRAFT_ID = b"\2"
DRAFT_TEXT = b"\3"
DRAFT_NUMBER = b"\4"
DRAFT_STILL_HERE = b"\5"
DRAFT_NO_SESSION = b"\6"
DRAFT_WRONG_VERSION = b"\7"
# The packets in which a game server returns the id of its session
DRAFT_SESSION_KINDS = DRAFT_TEXT, DRAFT_NUMBER, DRAFT_STILL_HERE
DRAFT_KINDS = (DRAFT_REQUEST, DRAFT_ID, DRAFT_TEXT, DRAFT_NUMBER, DRAFT_STILL_HERE,
               DRAFT_NO_SESSION, DRAFT_WRONG_VERSION)
# A game server's packets begin with the kind and hbversion, or with the kind and its session's id
DRAFT_VERSION = slice(1, 3)
DRAFT_IDENTITY = slice(1, 5)
# A packet that sets a field has the number of the field behind the id, and then the value
DRAFT_FIELD_NUMBER = slice(5, 6)
DRAFT_FIELD_VALUE = slice(6, None)
DRAFT_HBVERSION = b"\1\0"
# Kind, hbversion, port. The address follows as a text
DRAFT_REQUEST_HEAD = struct.Struct("<c2sH")
# Kind, id, port. The address follows as a text
DRAFT_ID_HEAD = struct.Struct("<c4sH")
# The attribute of Server by the kind of the packet and the number of the field
DRAFT_FIELDS = {
    (DRAFT_TEXT, b"\1"): "name",
    (DRAFT_TEXT, b"\2"): "mode",
    (DRAFT_NUMBER, b"\1"): "players",
    (DRAFT_NUMBER, b"\2"): "max_players",
}
DRAFT_VALUE = struct.Struct("<i")
# The latest requests are kept until their ids come back. If 30,000 forged requests come each
# second, more than can be read, an honest game server still has 0.3 s to return its id
DRAFT_REQUESTS = 8192
# A source may have so many sessions for each server that it may list
DRAFT_SESSIONS = 2


class DraftSession(NamedTuple):
    """The session that a game server of the first draft has requested."""

    # 4 random bytes, which every further packet of the session repeats
    identity: bytes
    # The address that the game server gives itself, or ""
    claimed_address: str
    port: int
    ends: float


class IceballDraft:
    """Iceball's first heartbeat protocol (hbversion 1), from a draft of its document.

        > 01 0100 0151 00                      request id: hbversion, port 20737, address ""
        < 02 id.u32 0151 "203.0.113.9\\0"       your id, port, address as this master sees it
        > 03 id.u32 01 "My server\\0"           text field: 1 name, 2 mode
        > 04 id.u32 01 05000000                number field: 1 players, 2 maximum
        < the same with the value as stored
        > 05 id.u32                            still here
        < 06                                   no such session: request an id
        < 07 0100                              wrong hbversion

    The id is random, so whoever returns it has received it. The first packet that returns the id
    lists the server.
    """

    def __init__(self, iceball):
        self.iceball = iceball
        self.registry = iceball.registry
        # The sessions whose id has not come back yet, by peer. They are apart from the others,
        # because requests may be forged and must not push out a session whose id has come back
        self.requests = collections.OrderedDict()
        # The sessions whose id has come back, by address and then by peer
        self.sessions = collections.defaultdict(collections.OrderedDict)

    def answer(self, data, peer, now):
        """Return the answer to a packet of the draft, or b"" for none.

        Raise Malformed if the draft has no such packet from a game server."""
        kind = data[:1]
        if kind == DRAFT_REQUEST:
            return self.answer_request(data, peer, now)
        if kind not in DRAFT_SESSION_KINDS:
            raise Malformed("type %d is sent by masters only" % ord(kind))
        session = self.session_of(peer, data[DRAFT_IDENTITY], now)
        if session is None:
            return DRAFT_NO_SESSION
        name, value = read_draft_field(data)
        fields = {name: value} if name else {}
        server = self.list_session(session, peer, fields, now)
        if server is None or not name:
            return b""
        head = data[:DRAFT_FIELD_VALUE.start]
        stored = getattr(server, name)
        return head + draft_value_bytes(stored)

    def answer_request(self, data, peer, now):
        """Return a new id for this request, or the right version, or b"" if a limit forbids it.

        Raise Malformed if the request cannot be read."""
        version = data[DRAFT_VERSION]
        if len(version) < len(DRAFT_HBVERSION):
            raise Malformed("a request without a version")
        if version != DRAFT_HBVERSION:
            return DRAFT_WRONG_VERSION + DRAFT_HBVERSION
        claimed_address, port = read_draft_request(data)
        source, _ = peer
        rules = self.registry.rules
        address = rules.listed_address(source, claimed_address)
        identity = struct.pack("<I", RANDOM.getrandbits(32))
        head = DRAFT_ID_HEAD.pack(DRAFT_ID, identity, port)
        answer = head + draft_value_bytes(address)
        surplus = len(answer) - len(data)
        if not rules.allow_surplus("id", source, surplus, now):
            return b""
        ends = now + self.iceball.timeout
        session = DraftSession(identity, claimed_address, port, ends)
        keep_latest(self.requests, peer, session, DRAFT_REQUESTS)
        return answer

    def session_of(self, peer, identity, now):
        """Return the peer's DraftSession with this id, or None if it has none or it has ended.

        It does not matter whether the id has come back before."""
        source, _ = peer
        proven = self.sessions.get(source, {})
        for session in (proven.get(peer), self.requests.get(peer)):
            if session is None or session.identity != identity:
                continue
            if now < session.ends:
                return session
        return None

    def list_session(self, session, peer, fields, now):
        """List or refresh the session's server with these attributes, and prolong the session.

        Return the Server, or None if it is refused."""
        source, _ = peer
        server = self.iceball.list_proven(
            source, session.claimed_address, session.port, now, fields)
        if server is None:
            return None
        self.requests.pop(peer, None)
        ends = now + self.iceball.timeout
        prolonged = session._replace(ends=ends)
        self.keep_session(prolonged, peer)
        if not server.name:
            name = endpoint_text(server.address, server.port)
            self.registry.update(server, {"name": name})
        return server

    def keep_session(self, session, peer):
        """Keep a session whose id has come back. If its source has too many, the oldest goes."""
        source, _ = peer
        rules = self.registry.rules
        max_servers = rules.max_servers_per_source
        if rules.exempts(source):
            max_servers = rules.max_servers
        limit = DRAFT_SESSIONS * max_servers
        keep_latest(self.sessions[source], peer, session, limit)

    def tick(self, now):
        """Forget the sessions that have ended. Only listed game servers have sessions."""
        for address, sessions in list(self.sessions.items()):
            for peer, session in list(sessions.items()):
                if now >= session.ends:
                    del sessions[peer]
            if not sessions:
                del self.sessions[address]


def read_draft_request(data):
    """Return the address that a request for an id claims, perhaps "", and its port.

    Raise Malformed if the request does not end with a text."""
    text = read_draft_text(data[DRAFT_REQUEST_HEAD.size:])
    _, _, port = DRAFT_REQUEST_HEAD.unpack_from(data)
    claimed_address = text.decode("ascii", "replace")
    return claimed_address, port


def read_draft_field(data):
    """Return the attribute of Server that a packet of the draft sets, and its value.

    The attribute is "" if the packet sets none that is known here. Raise Malformed if the value
    cannot be read."""
    kind = data[:1]
    if kind == DRAFT_STILL_HERE:
        return "", None
    number = data[DRAFT_FIELD_NUMBER]
    value = data[DRAFT_FIELD_VALUE]
    name = DRAFT_FIELDS.get((kind, number), "")
    if kind == DRAFT_TEXT:
        return name, decode_utf8(read_draft_text(value))
    return name, read_draft_number(value)


def read_draft_text(raw):
    """Return the bytes of a text without the NUL at its end. Raise Malformed if there is none."""
    text, end, surplus = raw.partition(b"\0")
    if not end or surplus:
        raise Malformed("text: expected one with a NUL at its end")
    return text


def read_draft_number(raw):
    """Return a number, at least 0 and at most PLAYERS_MAX. Raise Malformed if it is no number."""
    if len(raw) != DRAFT_VALUE.size:
        raise Malformed("number: expected 4 bytes")
    number, = DRAFT_VALUE.unpack(raw)
    return clamp(number)


def draft_value_bytes(value):
    """Return a text or a number as the draft's packets have it."""
    if isinstance(value, str):
        return value.encode() + b"\0"
    return DRAFT_VALUE.pack(value)


# --- Hyperbol ------------------------------------------------------------------------------------

HYPERBOL_GREETING = struct.Struct("<4sII")                          # "HBSL", key, players
HYPERBOL_REQUEST_BYTES = 8
HYPERBOL_UNOFFICIAL = 16                                            # in the filter's first byte
HYPERBOL_ENTRY = struct.Struct("<4sIB3x")                           # address, port, flavor
HYPERBOL_INFO = struct.Struct("<32s32sBBB64s20sxIIBBBB16sIIIIB20s3BBxxx")   # the document's script
HYPERBOL_INFO_BYTES = 5 + HYPERBOL_INFO.size                        # 229
HYPERBOL_REQUEST_S = 5.0            # "just a few seconds to ask for the full list"


class Hyperbol(TcpProtocol, PolledGame):
    """Hyperbol's list by TCP, its game servers by UDP; document: "The master Server Protocol".

        < 4842534c key.u32 players.u32              "HBSL"; players on all servers; one segment
        > key.u32 filter[4]                         10 in the first byte: unofficial ones as well
        < { address[4] port.u32 flavor.u8 000000 }* address in network order; then it is closed

        the master to a game server, and its answer (229 bytes):
        > 02 timestamp.u32
        < 1b timestamp.u32 name[32] gametype[32] players.u8 maximum.u8 00 map[64] address[20] 00
          port.u32 flags.u32 inet[4] version[16] 00×37 factions[3] skill.u8 000000
                                                    texts are NUL-terminated unless full

    The document does not say how game servers register: the ini names them, or they announce
    themselves by HTTP. The flavor is the ini's alone: nobody makes himself official.
    """

    game = "hyperbol"

    def __init__(self, core):
        super().__init__(core)
        self.everything = RenderedList(self.registry, self.game, hyperbol_everything)
        self.official = RenderedList(self.registry, self.game, hyperbol_official)
        self.flavors = {}                       # by listed address and port
        self.read(core.settings)

    def read(self, settings):
        self.set_pinned({(host, port): flavor
                          for host, port, flavor in settings["hyperbol.servers"]})

    def tick(self, now):
        self.resolve_pinned(now)
        self.flavors = {(self.rules.listed_address(address), port): flavor
                        for (address, port), flavor in self.pinned_by_address.items()}
        for place, server in self.registry.games[self.game].items():
            if not server.master:
                self.registry.update(server, {"flavor": self.flavors.get(place, 0)})

    def session(self, address, now):
        return HyperbolSession(self, address, now)

    def on_http_announcement(self, source, port, fields, now):
        # What it says of itself is not needed: it is queried, and listed with what it answers
        if ":" in source:
            raise Refused("bad packet", "Hyperbol's list has room for IPv4 addresses only; "
                                        "this came from %s" % source)
        self.query_newcomer(source, port, now)

    def query(self, target):
        return struct.pack("<BI", 2, target.nonce)

    def answer(self, target, data, now):
        fields = hyperbol_info(data, target.nonce)
        place = self.listed_endpoint(target)
        fields["name"] = fields["name"] or endpoint_text(*place)
        # Whole milliseconds: jitter alone makes no new list
        fields.update(ping_ms=round(target.ping_ms), flavor=self.flavors.get(place, 0))
        self.list_polled(target, fields, now)
        return b""


class HyperbolSession(Session):
    """One player who asks for the list."""

    def __init__(self, hyperbol, address, now):
        self.hyperbol, self.address = hyperbol, address
        self.deadline = now + HYPERBOL_REQUEST_S
        self.key = RANDOM.getrandbits(32)           # over TCP it proves nothing
        self.request = b""

    def opened(self, now):
        census = self.hyperbol.registry.census(now).get("hyperbol", Census())
        return HYPERBOL_GREETING.pack(b"HBSL", self.key, census.players)

    def receive(self, data, now):
        self.request += data
        if self.done or len(self.request) < HYPERBOL_REQUEST_BYTES:
            return b""
        self.done = True
        key, filter = struct.unpack_from("<IB", self.request)
        if key != self.key:
            raise Malformed("key: %08x instead of %08x" % (key, self.key))
        hyperbol = self.hyperbol
        if not hyperbol.rules.request_limiter.allow(self.address, now):
            return b""
        chosen = hyperbol.everything if filter & HYPERBOL_UNOFFICIAL else hyperbol.official
        return chosen.get(now)

    def tick(self, now):
        self.done = self.done or now >= self.deadline
        return b""


def hyperbol_everything(servers):
    """12 bytes for each server that answers."""
    shown = [server for server in servers if server.responding and ":" not in server.address]
    return b"".join(cached_entries(shown, "hyperbol", hyperbol_entry))


def hyperbol_official(servers):
    return hyperbol_everything(server for server in servers if server.flavor)


def hyperbol_entry(server):
    return HYPERBOL_ENTRY.pack(ipv4_bytes(server.address), server.port, server.flavor)


def hyperbol_info(data, timestamp):
    """What a game server answers to the query with this timestamp: attributes of Server.

    Raises Malformed."""
    if len(data) < HYPERBOL_INFO_BYTES:
        raise Malformed("an answer of %d bytes instead of %d" % (len(data), HYPERBOL_INFO_BYTES))
    kind, echo = struct.unpack_from("<BI", data)
    if kind != 27:
        raise Malformed("an answer begins with 27 and not with %d" % kind)
    if echo != timestamp:
        raise Malformed("timestamp: not that of the open query")
    values = HYPERBOL_INFO.unpack_from(data, 5)
    name, mode, map, version = (decode_legacy(c_string(values[i])) for i in (0, 1, 5, 13))
    return {"name": name, "mode": mode, "map": map, "version": version,
            "players": values[2], "max_players": values[3],
            "details": {"skill": str(values[23]), "flags": "0x%08x" % values[8],
                        "factions": "IMF %d, Syndicate %d, Republic %d" % values[20:23]}}


def hyperbol_greeting(data):
    """Key and number of players in a master's greeting, 12 bytes. Raises Malformed."""
    if len(data) < HYPERBOL_GREETING.size or data[:4] != b"HBSL":
        raise Malformed("a greeting begins with HBSL and has 12 bytes; this is %s"
                        % ascii(data[:12]))
    return HYPERBOL_GREETING.unpack_from(data)[1:]


def hyperbol_entries(data):
    """Address, port and flavor of each server in a list; a rest of under 12 bytes is ignored."""
    whole = len(data) - len(data) % HYPERBOL_ENTRY.size
    return [(".".join(map(str, address)), port, flavor)
            for address, port, flavor in HYPERBOL_ENTRY.iter_unpack(data[:whole])]


# --- SubSpace ------------------------------------------------------------------------------------

ZONE_ANNOUNCEMENT = struct.Struct("<4sHHHI32s48s")      # 94 bytes, then the description
ZONE_ENTRY = struct.Struct("<4sHHHI64s")                # in a list, then the description
ZONE_DESCRIPTION_BYTES = 480        # in a list, its NUL included: the most that clients take
ZONE_VERSION = 134                  # what every zone announces; for those that the ini names
ZONE_PASSWORD = b"cane"             # what every zone announces that has not set another
ZONE_LIFETIME_S = 180.0             # zones announce every 60 s, so three in a row were lost
ZONE_PASSWORD_HASH_BYTES = 8        # two of a million passwords are alike once in 40 million times
ZONE_CLAIMS = 8192                  # waiting for the answer to a ping, 15 MB at most: at 30,000 a
                                    # second, more than can be read, one waits 0.3 s
ZONE_CLAIM_HELD_S = POLL_TIMEOUT_S  # a claim keeps its place so long: the answer takes no longer
BY_HTTP = 0                         # in place of the UDP port that an announcement came from
ECHO_RATE = 1, 5                    # answers as long as their pings, by source, a second / at once:
                                    # two ping ports would answer each other for ever
PING_SUMMARY, PING_ARENAS = 1, 2    # the document's options
PING_BYTES = 512                    # the document: no packet is larger …
PING_BYTES_SEEN = 520               # … but one implementation sends up to 520
PING_FORMS = b"", b"\3\0\0\0", b"\2\0\0\0"      # what follows the timestamp, as asked in turn


class ZonePoll:
    """What one zone answers to the questions of one poll, each with its own nonce as timestamp;
    document: "ping/information protocol", version 1.0.

        > 11223344              < 06000000 11223344
        > 11223344 03000000     < 11223344 03000000 06000000 04000000
                                  3000 0200 0100 706200 0100 0100 00

    The 4-byte form comes first: every zone knows it, and of several virtual servers on one asss it
    alone counts this one's players. Then options 1 and 2 are asked together; if 2 is missing in
    the answer, the list was too long and is asked for alone.
    """

    def __init__(self):
        self.step = 0                   # the one of PING_FORMS to ask; so many were answered
        self.players = 0
        self.playing = None             # None: it has not told
        self.arenas = ""                # `(Public 0) 2/1, duel 1/1`: total and playing

    def question(self, nonce):
        """4 or 8 bytes."""
        return struct.pack("<I", nonce) + PING_FORMS[self.step]

    def answer(self, data, nonce):
        """True: the poll is complete. False: there is another question. Raises Malformed."""
        timestamp = data[:4] if self.step else data[4:]
        if timestamp != struct.pack("<I", nonce) or not 8 <= len(data) <= PING_BYTES_SEEN:
            raise Malformed("timestamp: not the one that was sent, or %d bytes" % len(data))
        self.step += 1
        if self.step == 1:
            self.players = clamp(int.from_bytes(data[:4], "little"))
            return False
        options, blocks = data[4], data[8:]
        if options & PING_SUMMARY and len(blocks) >= 8:
            total, playing = struct.unpack_from("<II", blocks)
            # Two players may have come since. More: it is one of several zones of a server, and
            # this answer counts all of them
            if total > self.players + 2:
                return True
            self.playing, blocks = playing, blocks[8:]
        if options & PING_ARENAS:
            self.arenas = arenas_text(blocks)
            return True
        return self.step == len(PING_FORMS)


def arenas_text(data):
    """Of blocks `name\\0 total.u16 playing.u16`, ended by an empty name; one that is cut off ends
    them too."""
    arenas = []
    name, _, data = data.partition(b"\0")
    while name and len(data) >= 4:
        shown = "(Public %s)" % name.decode() if name.isdigit() else decode_legacy(name) or "?"
        arenas.append("%s %d/%d" % (shown, *struct.unpack_from("<HH", data)))
        name, _, data = data[4:].partition(b"\0")
    return ", ".join(arenas)


def ping_answer(data: bytes, total: int, playing: int,
                arenas: Iterable[Tuple[bytes, int, int]]) -> bytes:
    """The answer of at most 512 bytes to a ping of 4 or 8; `arenas`: name, total, playing."""
    if len(data) == 4:
        return struct.pack("<I", total) + data
    options = data[4] & (PING_SUMMARY | PING_ARENAS)
    out = data[:4] + struct.pack("<I", options)
    if options & PING_SUMMARY:
        out += struct.pack("<II", total, playing)
    if options & PING_ARENAS:
        for name, *counts in arenas:
            block = name + struct.pack("<xHH", *counts)
            if len(out) + len(block) >= PING_BYTES:
                break
            out += block
        out += b"\0"
    return out


def ping_nonce():
    """A timestamp for which zones count everybody: for some, `t % 600 < 300` or `t % 1000 < 500`
    means the total."""
    return 3000 * RANDOM.randrange((1 << 32) // 3000) + RANDOM.randrange(300)


class ZoneOwner(NamedTuple):
    """The announcer that a listed zone belongs to."""

    source_port: int                # the UDP port that it announces from, or BY_HTTP
    password_hash: str              # hexadecimal

    def texts(self):
        """For Server.zone_owner."""
        return {"port": str(self.source_port), "password": self.password_hash}


def zone_owner(source_port, password):
    hashed = hashlib.blake2b(
        password, digest_size=ZONE_PASSWORD_HASH_BYTES, person=b"zone password")
    return ZoneOwner(source_port, hashed.hexdigest())


def owner_of(zone):
    """The ZoneOwner of a listed zone; None if nobody has announced it, or if what the disk or
    another master says of the owner cannot be read."""
    source_port = zone.zone_owner.get("port", "")
    password_hash = zone.zone_owner.get("password", "")
    if not re.fullmatch("[0-9]{1,5}", source_port) or int(source_port) > 65535:
        return None
    if not re.fullmatch("[0-9a-f]{%d}" % (2 * ZONE_PASSWORD_HASH_BYTES), password_hash):
        return None
    return ZoneOwner(int(source_port), password_hash)


class HeardOwner(NamedTuple):
    """When the owner of a zone has announced it last."""

    owner: ZoneOwner
    at: float                       # seconds of the monotonic clock


class Claim(NamedTuple):
    """What an announcement says of a zone, but for the players, which the zone's answers tell."""

    port: int
    fields: Dict[str, Any]          # for the registry
    owner: ZoneOwner                # the announcer, whom the zone will belong to
    lifetime: float                 # infinite: it came by HTTP


def zone_announcement(data, source_port):
    """The claim in the 95 to 480 bytes of an announcement; raises Malformed with the field."""
    if not ZONE_ANNOUNCEMENT.size < len(data) <= 480:
        raise Malformed("length: %d bytes instead of 4, 8 or 95 to 480" % len(data))
    if source_port == BY_HTTP:
        raise Malformed("source port: a datagram from port 0 is forged")
    _, port, _, scores, version, name, password = ZONE_ANNOUNCEMENT.unpack_from(data)
    description = c_string(data[ZONE_ANNOUNCEMENT.size:])
    fields = {"name": decode_legacy(c_string(name)), "version": str(version),
              "description": decode_legacy(description, TEXT_CHARACTERS),
              "details": {"scores": "yes" if scores & 255 else "no"}}
    if port == 65535:
        raise Malformed("port: 65535 leaves no next one for pings")
    return Claim(port, fields, zone_owner(source_port, c_string(password)), ZONE_LIFETIME_S)


def is_listed_so(zone, claim):
    """Is the zone listed with all that the claim says?"""
    for name, value in claim.fields.items():
        if name == "details":               # the others are from the zone's answers
            if zone.details.get("scores") != value["scores"]:
                return False
        elif getattr(zone, name) != value:
            return False
    return True


class WaitingClaim(NamedTuple):
    """A claim whose zone was pinged and has not answered yet."""

    claim: Claim
    since: float                    # seconds of the monotonic clock


class WaitingClaims:
    """The WaitingClaim of each zone that was pinged, by source and announced port.

    An answer proves the zone, but not which announcer is the right one. So for ZONE_CLAIM_HELD_S a
    claim keeps its place against other announcers: a forged claim that replaced it would profit
    from the answer to its ping. A source that fills its share loses its own oldest claim. When all
    together are too many, the source that was silent for longest loses its oldest. Sources are IPv4
    addresses here, and each counts for itself."""

    def __init__(self):
        self.by_source = collections.OrderedDict()      # and then by port
        self.total = 0

    def add(self, source, claim, share, now):
        """Let a claim wait; False: that of another announcer keeps its place. `share`: how many of
        this source may wait."""
        claims = self.by_source.setdefault(source, collections.OrderedDict())
        self.by_source.move_to_end(source)
        waiting = claims.get(claim.port)
        if (waiting and waiting.claim.owner != claim.owner
                and now < waiting.since + ZONE_CLAIM_HELD_S):
            return False
        self.total -= len(claims)
        keep_latest(claims, claim.port, WaitingClaim(claim, now), share)
        self.total += len(claims)
        while self.total > ZONE_CLAIMS:
            silent_source, silent_claims = next(iter(self.by_source.items()))
            oldest_port = next(iter(silent_claims))
            self.take(silent_source, oldest_port)
        return True

    def take(self, source, port):
        """The claim, which waits no more; None: there is none."""
        claims = self.by_source.get(source, {})
        waiting = claims.pop(port, None)
        if waiting is None:
            return None
        self.total -= 1
        if not claims:
            del self.by_source[source]
        return waiting.claim


class SubSpacePing(UdpProtocol, PolledGame):
    """SubSpace's ping port, one above the list: answers pings to this master, hears announcements.

        > 11223344 03000000                     a ping of 4 or 8 bytes; answered as in ZonePoll,
                                                one arena a game
        > 00000000 a861 0600 0100 86000000      ip (ignored), port, players, scores, version 134
          4c6f6f706261636b2054657374205a6f6e65 00…          name[32]
          63616e65 00…                                      password[48]
          61207265616c 00                                   description, NUL-terminated
        < e0a11c4b                              to the port after the announced one: a ping, its
                                                timestamp a MAC over that address and port
        > 06000000 e0a11c4b                     from there: the zone is there, it is listed

    Nothing counts before that answer but the repetition of what is listed already. The answer
    proves the zone alone, not the announcement: a zone answers every ping. So a listed zone belongs
    to its ZoneOwner, which is stored with it as Server.zone_owner, until this one has been silent
    for ZONE_LIFETIME_S. Until then other announcers may repeat what is listed and change nothing. A
    zone that was announced by HTTP lives by its answers, so its owner never falls silent. Listed
    zones are in the registry, where SubSpaceList finds them; here are only the claims that wait.
    """

    game = "subspace"
    offset = 1
    nonce = staticmethod(ping_nonce)

    def __init__(self, core):
        super().__init__(core)
        self.cookie = Cookie(os.urandom(16), 4)
        self.claims = WaitingClaims()
        self.heard = {}                                 # HeardOwner by the key of an own zone
        self.pings = []                                 # for what came by HTTP
        self.echoes = Limiter(ECHO_RATE)
        self.read(core.settings)

    def read(self, settings):
        self.set_pinned(dict.fromkeys(settings["subspace.zones"]))

    def on_registry_event(self, event, server):
        super().on_registry_event(event, server)
        if event == "gone":
            self.heard.pop(server.key, None)

    def tick(self, now):
        self.resolve_pinned(now)
        pings, self.pings = self.pings, []
        return pings

    def datagram(self, data, peer, now):
        source, source_port = peer[:2]
        if len(data) in (4, 8):
            return self.ping(data, peer, now)
        try:
            claim = zone_announcement(data, source_port)
        except Malformed as wrong:
            self.registry.record_outcome(source, self.game, 0, "bad packet", now, str(wrong))
            raise
        try:
            return self.announcement(source, claim, now)
        except Refused as refused:
            self.record_refusal(source, claim.port, refused, now)
            return []

    def record_refusal(self, source, port, refused, now):
        self.registry.record_outcome(source, self.game, port, refused.outcome, now, str(refused))

    def ping(self, data, peer, now):
        """Answer for this master itself, or take a zone's answer to our ping; raises Limited."""
        source, source_port = peer[:2]
        # A zone's answer is no request, so a flood of pings in the zone's name does not keep it out
        if self.cookie.is_valid(data[-4:], endpoint_text(source, source_port).encode(), now):
            if len(data) == 8:                  # else it came back to ourselves: we are no zone
                self.proves(source, source_port - 1, int.from_bytes(data[:4], "little"), now)
            return []
        if not self.rules.udp_request_limiter.allow(source, now):
            raise Limited
        arenas = [(game.encode(), clamp(players), clamp(playing))
                  for game, (_, players, playing) in sorted(self.registry.census(now).items())]
        answer = ping_answer(data, sum(arena[1] for arena in arenas),
                             sum(arena[2] for arena in arenas), arenas)
        surplus = len(answer) - len(data)
        if not self.rules.allow_surplus("ping", source, surplus, now):
            raise Limited
        if not surplus and not self.echoes.allow(source, now):
            raise Limited
        return [(answer, peer)]

    # Announcements

    def announcement(self, source, claim, now):
        """Refresh a zone that repeats itself; ping another one. Raises Refused."""
        address = self.rules.listed_address(source)
        claim.fields["name"] = claim.fields.get("name") or endpoint_text(address, claim.port)
        zone = self.registry.get(self.game, address, claim.port)
        ping_place = source, claim.port + 1
        if zone is None:
            self.registry.check_admission((self.game, address, claim.port), source,
                                          claim.fields["name"])
            self.registry.record_outcome(source, self.game, claim.port, "silent", now,
                               "no answer yet to a ping on UDP port %d" % ping_place[1])
        else:
            if claim.owner == owner_of(zone) and not zone.master:
                self.heard[zone.key] = HeardOwner(claim.owner, now)
            if self.is_repetition(zone, claim, now):
                self.registry.confirm(zone, now)
                return []
        self.check_claim(zone, claim, now)
        share = ZONE_CLAIMS if self.rules.exempts(source) else self.rules.max_servers_per_source
        if not self.claims.add(source, claim, share, now):
            return []
        return [(self.cookie.make(endpoint_text(*ping_place).encode(), now), ping_place)]

    def on_http_announcement(self, source, port, fields, now):
        if ":" in source or port == 65535:
            raise Refused("bad packet", "SubSpace lists IPv4 addresses and ports up to 65534 only; "
                                        "this is %s" % endpoint_text(source, port))
        fields = {name: value for name, value in fields.items() if name != "players"}
        claim = Claim(port, fields, zone_owner(BY_HTTP, ZONE_PASSWORD), math.inf)
        self.pings += self.announcement(source, claim, now)

    def is_repetition(self, zone, claim, now):
        """Does this announcement only say that a listed zone is still there?"""
        owner = owner_of(zone)
        if owner is None or owner.password_hash != claim.owner.password_hash:
            return False
        if not is_listed_so(zone, claim):
            return False
        if claim.owner == owner:
            return not zone.master          # else it is to be listed as heard here as well
        return not self.is_silent(zone, owner, now)

    def is_silent(self, zone, owner, now):
        """Does the owner of a listed zone announce it no more?"""
        if owner.source_port == BY_HTTP:
            return False
        heard_at = zone.last_seen           # another master vouches for its zone
        if not zone.master:
            heard = self.heard.get(zone.key)
            if heard is None or heard.owner != owner:
                # Listed before a restart, or another master told of this owner
                heard = self.heard[zone.key] = HeardOwner(owner, zone.last_seen)
            heard_at = heard.at
        return self.registry.is_silent(zone.source, heard_at, ZONE_LIFETIME_S, now)

    def check_claim(self, zone, claim, now):
        """Raise Refused if the listed `zone` belongs to another announcer, or the name to another
        zone. `zone`: None if it is not listed."""
        owner = zone and owner_of(zone)
        if owner and owner != claim.owner and not self.is_silent(zone, owner, now):
            if owner.source_port == BY_HTTP:
                raise Refused("owner", "it was announced by HTTP; sign it off there (action=stop)")
            if owner.password_hash != claim.owner.password_hash:
                raise Refused("password", "this zone is listed with another one; a new one is "
                                          "taken once it was silent for %d s" % ZONE_LIFETIME_S)
            raise Refused("owner", "another UDP port of this address announces it in other words; "
                                   "this is taken once that was silent for %d s" % ZONE_LIFETIME_S)
        if zone is None or zone.name != claim.fields["name"]:
            self.check_name(zone, claim)

    def check_name(self, zone, claim):
        """Raise Refused if a listed zone, other than `zone`, has the name and another password.

        The first password that comes with a name owns it while a zone of that name is there."""
        name = claim.fields["name"].casefold()
        for other in self.registry.games[self.game].values():
            if other.name.casefold() != name or not other.responding or other is zone:
                continue
            owner = owner_of(other)
            if owner and owner.password_hash != claim.owner.password_hash:
                raise Refused("name", "the name %s belongs to another zone, with another "
                                      "password, for as long as that is listed" % other.name)

    def proves(self, source, port, players, now):
        """The zone on this port has answered a ping: list it, or change it to what it claims."""
        claim = self.claims.take(source, port)
        if claim is None:                       # it answered twice, or too late
            return
        address = self.rules.listed_address(source)
        try:
            # Meanwhile its owner may have announced it, or another zone have got the name
            self.check_claim(self.registry.get(self.game, address, port), claim, now)
        except Refused as refused:
            self.record_refusal(source, port, refused, now)
            return
        # A poll that is under way may have asked before the zone was there
        target = self.poller.poll_now(self, source, port, now)
        fields = {**claim.fields, "players": clamp(players), "zone_owner": claim.owner.texts()}
        zone = self.list_polled(target, fields, now, claim.lifetime)
        if zone is not None:
            self.heard[zone.key] = HeardOwner(claim.owner, now)

    # Polls

    def query(self, target):
        target.querier_data = target.querier_data or ZonePoll()
        return target.querier_data.question(target.nonce)

    def answer(self, target, data, now):
        complete = target.querier_data.answer(data, target.nonce)
        if complete:
            self.polled(target, now)
        return b"" if complete else None

    def poll_missed(self, target, now):
        if not target.querier_data.step:
            return super().poll_missed(target, now)
        target.missed_polls = 0                       # an old zone knows the first question alone
        self.polled(target, now)
        return False

    def polled(self, target, now):
        """Bring the zone up to date with what it answered to the poll; list it if the ini does."""
        poll, target.querier_data = target.querier_data, None
        server = self.listed_server(target)
        if server is not None and server.master:
            return                              # a poll does not tell the name, which it knows
        fields = {"players": poll.players, "playing": poll.playing, "responding": True,
                  "verified": "query", "ping_ms": round(target.ping_ms)}
        if server is None:
            fields["name"] = endpoint_text(*self.listed_endpoint(target))
        else:
            fields["details"] = {**server.details, "arenas": poll.arenas}
        if target.pinned or server and server.lifetime == math.inf:
            self.list_polled(target, fields, now)
        elif server:                            # it lives by its announcements
            self.registry.update(server, {**fields, "confirmed": True})


LINK_WINDOW = 4                     # packets in flight: what deployed clients are used to
LINK_RESEND_S = 0.5                 # longer than the round trip between any two places
LINK_ANSWERS = 8                    # to the parts of one datagram: it could have seventy
LINK_IDLE_S = 20.0                  # a peer that takes nothing for so long has gone: twenty packets
                                    # in a row were lost, or 10 kB went to a false address
LINK_CHUNK_BYTES = 480              # of a list in a packet: with headers below the 512 of clients
LINK_PACKET_BYTES = 520             # the longest that any end sends
# The kinds of packet that both ends know
RELIABLE, ACKNOWLEDGEMENT, SYNC, SYNC_ANSWER, DISCONNECT, CLUSTER = (
    b"\0\3", b"\0\4", b"\0\5", b"\0\6", b"\0\7", b"\0\x0e")


def unclustered(data):
    """Yield the packets of a datagram: itself, or of a cluster each one, in order. Within a cluster
    a packet has at most 255 bytes, so clusters in clusters are less than a hundred deep."""
    if data[:2] != CLUSTER:
        yield data
        return
    at = 2
    while at < len(data):
        begin = at + 1
        at = begin + data[at]
        yield from unclustered(data[begin:at])


class SubSpaceLink:
    """One end of the SubSpace core protocol, unencrypted. Its packets begin with 00.

        00 03 seq[4] packet                     reliable: taken in order and acknowledged; what is
                                                not acknowledged is sent again
        00 04 seq[4]                            acknowledgement
        00 05 time[4] …                         sync, answered with 00 06 time[4] servertime[4]
        00 07                                   disconnect
        00 0e {len.u8 packet}*                  cluster

    `receive` and `tick` return datagrams for the peer; `payloads` gives what to send reliably, and
    is read no faster than the peer acknowledges. `closed`: the link has ended, by the peer or
    because it acknowledges nothing.
    """

    def __init__(self, now, payloads=()):
        self.payloads = iter(payloads)
        self.flights = {}               # packets under way, and when they were sent, by number
        self.sequence = 0               # the number of our next packet …
        self.expected = 0               # … and of the peer's
        self.active_at = now            # when the peer last sent or acknowledged one
        self.closed = False

    @property
    def proven(self):
        """The peer has acknowledged something."""
        return self.sequence > len(self.flights)

    def packet(self, data, now):
        """A packet that is not the link's own. Those that are not known are ignored."""

    def allowed(self, packet, now):
        """May this one go out now? Else it waits."""
        return True

    def permitted(self, answers, size, now):
        """Give those of the answers to a datagram of `size` bytes that may go out."""
        return answers[:LINK_ANSWERS]

    def receive(self, data, now):
        answers = []
        for packet in unclustered(data):
            answers += self.take(packet, now)
        return self.permitted(answers, len(data), now) + self.tick(now)

    def take(self, packet, now):
        """Take one packet that is no cluster, and give its answers: one or none."""
        kind, has_number = packet[:2], len(packet) >= 6
        if kind == DISCONNECT:
            self.closed = True
        elif kind == RELIABLE and has_number:
            return self.take_reliable(packet, now)
        elif kind == ACKNOWLEDGEMENT and has_number:
            self.take_acknowledgement(packet, now)
        elif kind == SYNC and has_number:
            hundredths = int(now * 100)
            return [SYNC_ANSWER + packet[2:6] + struct.pack("<I", hundredths & 0xFFFFFFFF)]
        else:
            self.packet(packet, now)
        return []

    def take_reliable(self, packet, now):
        number = int.from_bytes(packet[2:6], "little")
        if number > self.expected:              # it comes again
            return []
        if number == self.expected:             # else our acknowledgement was lost
            self.expected += 1
            self.active_at = now
            for carried in unclustered(packet[6:]):
                self.packet(carried, now)
        return [ACKNOWLEDGEMENT + packet[2:6]]

    def take_acknowledgement(self, packet, now):
        number = int.from_bytes(packet[2:6], "little")
        if number in self.flights:              # else it came twice
            del self.flights[number]
            self.active_at = now

    def tick(self, now):
        """What is due: packets that seem lost, then new ones as far as the window allows."""
        flights, out = self.flights, []
        self.closed = self.closed or now - self.active_at > LINK_IDLE_S
        # Never more than a window beyond the oldest one that is missing
        end = min(flights, default=self.sequence) + (LINK_WINDOW if self.proven else 1)
        for payload in itertools.islice(self.payloads, end - self.sequence):
            packet = RELIABLE + struct.pack("<I", self.sequence) + payload
            flights[self.sequence] = packet, -math.inf
            self.sequence += 1
        for number, (packet, sent_at) in flights.items():
            if now - sent_at >= LINK_RESEND_S:
                if self.closed or not self.allowed(packet, now):
                    break
                flights[number] = packet, now
                out.append(packet)
        return out


LIST_RATE = 100_000, 1_000_000      # bytes of lists to one address that acknowledges, a second / at
                                    # once: 5,000 zones, as fast as can be …
LIST_RATE_IN_ALL = 500_000, 4_000_000       # … and to all: as our numbers begin at 0, who reads
                                    # nothing can acknowledge too, in somebody else's name
UDP_HEAD_BYTES = 28                 # of IPv4 and UDP: each answer has its own, a cluster has one
LIST_LINKS = 4096                   # open exchanges; 1 kB apiece, and the packets on both ways


class ListLink(SubSpaceLink):
    """The master's end: takes list requests, `01 minplayers[4]`."""

    def __init__(self, protocol, address, key, now):
        super().__init__(now)
        self.protocol, self.address, self.key = protocol, address, key

    def packet(self, data, now):
        # One list at a time, which has arrived when no packet is under way
        if (data[:1] == b"\1" and len(data) == 5 and not self.flights
                and self.protocol.rules.udp_request_limiter.allow(self.address, now)):
            self.payloads = self.protocol.chunks(int.from_bytes(data[1:], "little"), now)

    def permitted(self, answers, size, now):
        answers = answers[:LINK_ANSWERS if self.proven else 1]
        answers_size = sum(len(answer) + UDP_HEAD_BYTES for answer in answers)
        surplus = answers_size - size - UDP_HEAD_BYTES
        return answers if self.allows_surplus(surplus, now) else []

    def allowed(self, packet, now):
        if not self.proven and not self.protocol.rules.udp_request_limiter.allow(self.address, now):
            return False
        return self.allows_surplus(len(packet), now)

    def allows_surplus(self, size, now):
        """May so many bytes more go to the peer than came from it?"""
        protocol = self.protocol
        if size <= 0:
            return True
        if not self.proven:
            return protocol.rules.allow_surplus("list", self.address, size, now)
        return (protocol.limiter.allow(self.address, now, size)
                and protocol.limiter_in_all.allow("", now, size))


class SubSpaceList(UdpProtocol):
    """SubSpace's list port: an exchange over the core protocol (SubSpaceLink), one link a peer.

        > 00 01 key[4] VV 00                    connect, VV 01 or 11
        < 00 02 key[4]                          the same key: no encryption
        > 00 03 00000000 01 minplayers[4]       which zones
        < 00 04 00000000
        < 00 03 seq[4] 00 0a total[4] …         at most 480 bytes of the list; and so on
        > 00 04 seq[4]
        > 00 07                                 disconnect, often twice

    The list is `01` and for each zone
    ip[4] port.u16 players.u16 scores.u16 version.u32 name[64] description NUL.
    Nothing in the exchange proves the peer's address. Before its first acknowledgement one packet
    is in flight, a datagram gets one answer at most, and what goes out beyond what came shares one
    bucket with all other peers. The acknowledgement may be sent blind: after it LIST_RATE_IN_ALL
    bounds whatever goes out beyond what came, answers as well as lists.
    """

    datagram_bytes = LINK_PACKET_BYTES

    def __init__(self, core):
        self.rules = core.registry.rules
        self.limiter, self.limiter_in_all = Limiter(LIST_RATE), Limiter(LIST_RATE_IN_ALL)
        self.links = collections.OrderedDict()          # by peer
        self.zones = RenderedList(core.registry, "subspace", zone_list)

    def datagram(self, data, peer, now):
        link = self.links.get(peer)
        if data[:2] == b"\0\1":
            return self.connect(data, peer, link, now)
        if not link:
            raise Malformed("a packet outside an exchange")
        self.links.move_to_end(peer)
        return [(packet, peer) for packet in link.receive(data, now)]

    def connect(self, data, peer, link, now):
        key, version = data[2:6], data[6:]
        if version not in (b"\1\0", b"\x11\0"):
            raise Malformed("connect: not 00 01 key[4] and version 01 or 11")
        # Repeated, it changes nothing, unless the peer has its list: then it wants another
        if (not link or link.closed or link.key != key
                or link.sequence and not link.flights):
            link = ListLink(self, peer[0], key, now)
        keep_latest(self.links, peer, link, LIST_LINKS)
        return [(b"\0\2" + key, peer)]

    def tick(self, now):
        out = []
        for peer, link in list(self.links.items()):
            out += [(packet, peer) for packet in link.tick(now)]
            if link.closed:
                del self.links[peer]
        return out

    def chunks(self, minimum, now):
        """The list of zones with at least so many players, in packets, made one by one as they can
        be sent: thousands may be under way."""
        entries = [entry for players, entry in self.zones.get(now) if players >= minimum]
        head, rest = b"\0\x0a" + struct.pack("<I", 1 + sum(map(len, entries))), b"\1"
        for entry in entries:
            rest += entry
            while len(rest) > LINK_CHUNK_BYTES:
                yield head + rest[:LINK_CHUNK_BYTES]
                rest = rest[LINK_CHUNK_BYTES:]
        yield head + rest


def zone_list(servers):
    """Each zone's players and list entry."""
    zones = [server for server in servers if ":" not in server.address and server.responding]
    return cached_entries(zones, "subspace", lambda zone: (zone.players, zone_entry(zone)))


def zone_entry(server):
    """A zone in the list: 78 bytes and the description, as Windows-1252."""
    version = int(server.version) if server.version.isdecimal() else ZONE_VERSION
    name, description = (text.encode("cp1252", "replace")
                         for text in (server.name, server.description))
    return ZONE_ENTRY.pack(
        ipv4_bytes(server.address), server.port, server.players,
        server.details.get("scores") == "yes", clamp(version, 0xFFFFFFFF), name[:63],
    ) + description[:ZONE_DESCRIPTION_BYTES - 1] + b"\0"


def zone_entries(data: bytes) -> List[Dict[str, Any]]:
    """The way back: what a list tells of each zone; raises Malformed."""
    zones = []
    at = 1
    while at < len(data):
        end = data.find(b"\0", at + ZONE_ENTRY.size)
        if end < 0:
            raise Malformed("list: the last zone is cut off")
        address, port, players, scores, version, name = ZONE_ENTRY.unpack_from(data, at)
        description = data[at + ZONE_ENTRY.size:end]
        at = end + 1
        zones.append({
            "address": str(ipaddress.IPv4Address(address)), "port": port,
            "name": decode_legacy(c_string(name)), "players": players,
            "scores": bool(scores & 255), "version": version,
            "description": decode_legacy(description, TEXT_CHARACTERS)})
    if data[:1] != b"\1":
        raise Malformed("a list begins with 01")
    return zones


# --- AIO -----------------------------------------------------------------------------------------

AIO_CONNECTED = b"\1\0\0\0\0"       # the document's CONNECT with id 0; greets framed peers as well
AIO_GREETING_S = 1.2                # of silence before the text greeting; text clients wait for it
# Of all connections those of listed servers are so much at most: the others are for players and
# browsers, and where room must be made no server has to leave
AIO_SHARE = 0.5
AIO_IDLE_S = 330.0                  # who publishes nothing; framed clients speak every 270 s
AIO_KEEPALIVE_S = 120.0             # without one from who has sent some; they come every 20 to 40 s
AIO_NEWLINE_S = 0.2                 # between `12#%` and its newline, if a network parted them
AIO_MESSAGE_BYTES = 8192            # a name and a description at their longest have 2,600
AIO_ANSWER_BYTES = 16384            # of a game server's answer, unpacked; 2,600 can be shown
AIO_ZLIB_BYTES = 1200               # a longer frame does not fit one packet, and is compressed
AIO_COUNTER = re.compile(r"(?:^| )\[([0-9]{1,5})/([0-9]{1,5})\]$")


AIO_UINTV = 0, 0x80, 0x4080, 0x204080           # the lowest values of 1 to 4 bytes


def uintv(port):
    """The variable-size integer: 27010 = 144801, 8080 = 427c; as many bytes as its tag has bits.
    """
    size = sum(port >= lowest for lowest in AIO_UINTV)
    return (port - AIO_UINTV[size - 1] << size | 1 << size - 1).to_bytes(size, "little")


def read_uintv(data, at):
    """The value at `at`, and where the next field begins; past the end of `data` if it is cut."""
    tag = data[at] & 7 if at < len(data) else 0         # 0 in 4 bytes, of which it has 3 bits
    size = (4, 1, 2, 1, 3, 1, 2, 1)[tag]
    number = int.from_bytes(data[at:at + size], "little") >> min(size, 3)
    return number + AIO_UINTV[size - 1], at + size


def inflate(data, limit):
    """One zlib stream, never unpacked beyond `limit` bytes; raises Malformed."""
    stream = zlib.decompressobj()
    try:
        unpacked = stream.decompress(data, limit + 1)       # one more, to see its end
    except zlib.error as error:
        raise Malformed("zlib: %s" % error) from None
    if not stream.eof:
        raise Malformed("zlib: cut off, or more than %d bytes" % limit)
    return unpacked


def aio_info(data: bytes) -> Tuple[str, str, int, int, int]:
    """A game server's answer to the query `00`: name, description, players, maximum, version.

    zlib of `00 name.string16 description.string16 players.u32 maximum.u32 version.u16`;
    raises Malformed."""
    payload = inflate(data, AIO_ANSWER_BYTES)
    if payload[:1] != b"\0":
        raise Malformed("type: not an answer")
    texts, at = [], 1
    for characters in (NAME_CHARACTERS, TEXT_CHARACTERS):
        begin = at + 2
        at = begin + int.from_bytes(payload[at:begin], "little")
        texts.append(decode_legacy(payload[begin:at], characters))
    if len(payload) < at + 10:
        raise Malformed("length: %d bytes instead of %d" % (len(payload), at + 10))
    return (texts[0], texts[1], *struct.unpack_from("<IIH", payload, at))


def aio_frame(payload):
    """length.u24 compression.u8 payload; zlib for one that no packet holds."""
    compressed = len(payload) > AIO_ZLIB_BYTES
    if compressed:
        payload = zlib.compress(payload, GZIP_LEVEL)
    return len(payload).to_bytes(3, "little") + bytes((compressed,)) + payload


def aio_unframe(data: bytes, most: int) -> Optional[Tuple[bytes, bytes]]:
    """The payload of the first frame, and what follows it; None: it is not whole yet.

    `most`: bytes of the payload, packed and unpacked. Raises Malformed."""
    length = int.from_bytes(data[:3], "little")
    if len(data) >= 4 and length > most:
        raise Malformed("length: a frame of %d bytes" % length)
    if len(data) < 4 + length:
        return None
    payload = data[4:4 + length]
    return inflate(payload, most) if data[3] else payload, data[4 + length:]


def aio_string16(text):
    return struct.pack("<H", len(text)) + text


def aio_escape(text):
    return text.replace("#", "<num>").replace("%", "<percent>")


# The lists, as bytes. The two text forms share their parts

AIO_NOBODY = Server(                # what the document shows in a list of no servers
    "aio", "127.0.0.1", 27010, "", 0.0, 0.0, "No servers currently online :pepe:",
    description="There are currently no available servers... Maybe host your own or wait later?:O")


def aio_text_part(server):
    # Clients unescape nothing in names, so there the full-width forms stand
    name = (server.aio_published_name or server.name).replace("#", "\uff03").replace("%", "\uff05")
    description = aio_escape(server.description)
    return ("%s#%s#%s#%d#" % (name, description, server.address, server.port)).encode("utf-8")


def aio_text_list(servers):
    entries = cached_entries(servers or [AIO_NOBODY], "aio text", aio_text_part)
    return b"%12#" + b"".join(entries) + b"%"


def aio_document_list(servers):
    entries = cached_entries(servers or [AIO_NOBODY], "aio text", aio_text_part)
    return b"%12#" + b"".join([b"%d#%s" % entry for entry in enumerate(entries)]) + b"%"


def aio_binary_part(server):
    texts = server.aio_published_name or server.name, server.description, server.address
    return ("%s\0%s\0%s\0" % texts).encode("utf-8") + uintv(server.port)


def aio_binary_list(servers):
    entries = cached_entries(servers or [AIO_NOBODY], "aio binary", aio_binary_part)
    return b"\x0c" + b"".join([
        struct.pack("<H", index) + entry for index, entry in enumerate(entries)])


def aio_framed_part(server):
    address = server.address.encode("ascii")
    return bytes((len(address),)) + address + struct.pack("<H", server.port)


def aio_framed_list(servers):
    entries = cached_entries(servers, "aio framed", aio_framed_part)
    return aio_frame(b"\2" + struct.pack("<H", len(entries)) + b"".join(entries))


# The dialects. Each takes one message from the buffer and answers it; None: it is not whole

AIO_TEXT_PUBLISH = re.compile(rb"13#([^#]*)#([^#]*)(?:#([^#]*))?#([0-9]{1,5})")


def aio_text(session, now):
    r"""The document's examples as they are typed there; clients and servers of 2018 to 2022.

        < %1#5#%                        greeting, after a silence: the peer's id
        > 13#NAME#DESC#27010#%\n        publish, or the document's 13#NAME#DESC#203.0.113.7#27010#%
        < %SUCCESS#13#%
        > SET_IP#203.0.113.7#%\n        its public address, from a server on this machine or network
        < %SUCCESS#SET_IP#%
        > KEEPALIVE#%\n                 < %SUCCESS#KEEPALIVE#%
        > 12#%\n                        < %12#NAME#DESC#IP#PORT#NAME#...#%
        > 12#%                          < %12#0#NAME#DESC#IP#PORT#1#NAME#...#%
        > NEWS#%\n                      < %NEWS#TEXT#%

    The `%` before every reply flushes the first greeting's five bytes out of the peer's buffer.
    Servers' texts have a `%` in them, so a message ends at `#%`. Only the newline tells the two
    lists apart; where none has come, the answer waits for it.
    """
    session.buffer = session.buffer.lstrip(b"\r\n")
    message, end, rest = session.buffer.partition(b"#%")
    if not end:
        return None
    header = message.partition(b"#")[0]
    if header == b"12" and not rest and now < session.since + AIO_NEWLINE_S:
        return None
    session.buffer = rest
    if header == b"12":
        deployed = rest[:1].isspace()
        return session.list_for(aio_text_list if deployed else aio_document_list, now)
    if header == b"13":
        fields = AIO_TEXT_PUBLISH.fullmatch(message)
        if fields is None:
            raise Malformed("publish: not name, description, address (may be left out), port")
        *texts, port = [field.replace(b"<num>", b"#").replace(b"<percent>", b"%")
                        for field in fields.groups(b"")]
        refused = session.publish_texts(*texts, int(port), now)
        return b"" if refused else b"%SUCCESS#13#%"     # there are no words for a refusal
    if header == b"NEWS":
        return session.aio.text_news
    if header == b"SET_IP":
        session.claim(message[7:])
        return b"%SUCCESS#SET_IP#%"
    if header == b"KEEPALIVE":
        session.keepalive(now)
        return b"%SUCCESS#KEEPALIVE#%"
    if b"\n" in header:             # HTTP: a web page can have a browser send any body it likes
        raise Malformed("a line break within a message")
    return b""                      # what else these programs say is meant for game servers


AIO_BINARY_TEXTS = re.compile(rb"\x0d([^\0]*)\0([^\0]*)\0([^\0]*)\0")


def aio_binary(session, now):
    r"""The document, literally; a string ends with a NUL.

        < 01 00000000                               CONNECT, id
        > 0c                                        ASKFORSERVERS
        < 0c 0000 "NAME\0" "DESC\0" "203.0.113.7\0" 144801 0100 …
                                                    of each index.u16, texts, port.uintv
        > 0d "NAME\0" "DESC\0" "203.0.113.7\0" 144801
                                                    PUBLISH, port 27010; no answer
    """
    data = session.buffer
    if data[0] == 0x0C:
        session.buffer = data[1:]
        return session.list_for(aio_binary_list, now)
    if data[0] != 0x0D:
        raise Malformed("type %d is neither ASKFORSERVERS nor PUBLISH" % data[0])
    texts = AIO_BINARY_TEXTS.match(data)
    if texts is None:
        return None
    port, end = read_uintv(data, texts.end())
    if end > len(data):
        return None
    session.buffer = data[end:]
    session.publish_texts(*texts.groups(), port, now)
    return b""


def aio_framed(session, now):
    """Clients and servers since 2022. length.u24 compression.u8 (0 none, 1 zlib) payload:

        < 01000000 00                   connected
        > 03000000 03 8269              publish, port 27010
        < 02000000 05 03                done, or 06 03 reason.string16
        > 01000000 04                   keepalive
        < 02000000 05 04                or 06 04 reason.string16
        > 01000000 02                   list
        < … 02 n.u16 {ip.string8 port.u16}*
        > 01000000 01                   news
        < … 01 text.string16

    Peers read a frame with one recv(4) and one recv(length), hence zlib for a long one, and one
    write for each.
    """
    found = aio_unframe(session.buffer, AIO_MESSAGE_BYTES)
    if found is None:
        return None
    payload, session.buffer = found
    kind = payload[:1]
    if kind == b"\1":
        return session.aio.framed_news
    if kind == b"\2":
        return session.list_for(aio_framed_list, now)
    if kind == b"\3" and len(payload) >= 3:
        reason = session.publish(int.from_bytes(payload[1:3], "little"),
                                 {"aio_published_name": ""}, now)
    elif kind == b"\4":
        session.keepalive(now)
        reason = "" if session.server else "nothing is published on this connection"
    else:
        raise Malformed("type %s, %d bytes" % (kind.hex(), len(payload)))
    if reason:
        return aio_frame(b"\6" + kind + aio_string16(reason.encode("utf-8")))
    return aio_frame(b"\5" + kind)


def aio_dialect(first):
    """What a peer speaks, by its first byte."""
    if first in (b"\x0c", b"\x0d"):
        return aio_binary
    if first.isalnum():
        return aio_text
    if first < b" ":                    # a publish has 3 bytes, or 14 in zlib
        return aio_framed
    raise Malformed("the first byte, %s, is of no dialect" % first.hex())


class AioSession(Session):
    """One peer of whatever dialect."""

    def __init__(self, aio, address, number, now):
        self.aio, self.registry, self.rules = aio, aio.registry, aio.rules
        self.address, self.number = address, number
        self.dialect = None                     # one of the functions above
        self.greet_at = now + AIO_GREETING_S
        # When the message in the buffer began, the last one ended, or the connection began
        self.since = now
        self.server = None                      # listed by this connection
        self.claimed = ""                       # the address that the server says it has
        self.fields = None                      # what was published last, on `port`
        self.port = 0
        self.kept_alive_at = math.inf           # infinite: it sends no keepalives

    def opened(self, now):
        return AIO_CONNECTED

    def receive(self, data, now):
        if data and not self.buffer:
            self.since = now
        self.buffer += data
        try:
            # To the first message that has an answer; the others are taken on the way
            while self.buffer:
                if len(self.buffer) > AIO_MESSAGE_BYTES:
                    raise Malformed("a message of more than %d bytes" % AIO_MESSAGE_BYTES)
                self.dialect = self.dialect or aio_dialect(self.buffer[:1])
                answer = self.dialect(self, now)
                if answer is None:
                    break
                if not self.rules.message_limiter.allow(self.address, now):
                    raise Malformed("too many messages from one address")
                self.since = now
                if answer:
                    return answer
        except Malformed as error:
            self.registry.record_outcome(self.address, "aio", 0, "bad packet", now, str(error))
            raise
        return b""

    def ended(self, now):
        self.since -= AIO_NEWLINE_S             # no newline can follow
        return self.receive(b"", now)

    def tick(self, now):
        if self.dialect is None and now >= self.greet_at:
            self.greet_at = math.inf
            return b"%%1#%d#%%" % self.number
        if self.server:                         # it is connected, and so it is there
            self.registry.confirm(self.server, now)
            self.done = now - self.kept_alive_at >= AIO_KEEPALIVE_S
        else:
            self.done = now - self.since >= AIO_IDLE_S
        return self.receive(b"", now)           # a list that was asked for without a newline

    def closed(self, now):
        self.registry.remove_own(self.server)

    # What the messages ask for

    def list_for(self, make, now):
        if not self.rules.request_limiter.allow(self.address, now):
            raise Malformed("too many requests from one address")
        return self.aio.lists[make].get(now)

    def claim(self, text):
        """The server says that it has this address. If it may, it is listed there."""
        address = text.decode("ascii", "replace").strip()
        if self.rules.believes_claim(self.address, address):
            self.claimed = address

    def listed_endpoint(self, port):
        return self.rules.listed_address(self.address, self.claimed), port

    def keepalive(self, now):
        """List what was published last, if it is not listed there: its address is another one now,
        a ban was lifted, or a newer connection that had it has ended."""
        self.kept_alive_at = now
        if self.fields and self.registry.get("aio", *self.listed_endpoint(self.port)) is None:
            self.publish(self.port, self.fields, now)

    def publish_texts(self, name, description, claimed, port, now):
        """What a publish of the text and the binary dialect tells.

        ` [n/max]` at the end of a name is the player count. This game's lists carry the name as
        published."""
        self.claim(claimed)
        published = decode_legacy(name)
        counter = AIO_COUNTER.search(published)
        players, max_players = map(int, counter.groups()) if counter else (0, 0)
        return self.publish(port, {
            "name": AIO_COUNTER.sub("", published), "aio_published_name": published,
            "description": decode_legacy(description, TEXT_CHARACTERS),
            "players": clamp(players), "max_players": clamp(max_players)}, now)

    def publish(self, port, fields, now):
        """List the server, or refresh it; gives the reason why not, or "".

        Without a name it keeps the one it had."""
        place = self.listed_endpoint(port)
        if self.server and self.server.key != ("aio", *place):
            self.registry.remove_own(self.server)
        known = self.registry.get("aio", *place)
        name = fields.get("name") or (known.name if known else endpoint_text(*place))
        try:
            if self.server is None:
                self.aio.admit_connection()
            server = self.registry.list_or_refresh(("aio", *place), self.address, now, math.inf, {
                **fields, "name": name, "verified": "connection"})
        except Refused as refused:
            self.registry.record_outcome(self.address, "aio", port, refused.outcome, now,
                                         str(refused))
            return str(refused)
        self.registry.record_outcome(self.address, "aio", port, "listed", now)
        self.port, self.fields = port, fields
        if self.server is not server:
            self.aio.disown("taken", server)
            self.aio.owners[server], self.server, self.kept = self, server, True
            if self.dialect is aio_framed:      # queried where the connection comes from
                self.aio.poller.keep_polling(self.aio, self.address, port).querier_data = server
        return ""


class Aio(TcpProtocol, Querier):
    """AIO, three generations on one port. "AIO masterserver protocol", and what came after it.

    The master speaks first: CONNECT, and after a silence the text greeting. The first byte of
    the peer tells its dialect: 0c or 0d the binary one, a digit or a letter text, other control
    characters a frame. A server is listed for as long as its connection lasts; if it connects
    again, it belongs to the newer connection.

    A framed server is queried for its name and players by UDP on its game port:

        < 00                                            the query
        > zlib of: 00 name.string16 desc.string16 players.u32 max.u32 version.u16

    One that leaves it unanswered stays listed, as ADDRESS:PORT: it is connected. The query has no
    room for a nonce, so whoever forges the server's address while a query is open can have another
    name shown until the next answer: an exception to the rule that nothing that players see comes
    from an unproven packet.
    """

    game = "aio"

    def __init__(self, core):
        self.registry, self.poller = core.registry, core.poller
        self.rules = core.registry.rules
        self.numbers = itertools.count()
        self.owners = {}                        # the session of each listed server
        self.lists = {make: RenderedList(self.registry, self.game, make) for make in (
            aio_text_list, aio_document_list, aio_binary_list, aio_framed_list)}
        self.registry.subscribe(self.disown, self.game, ["gone"])
        self.read(core.settings)

    def read(self, settings):
        self.servers_at_most = max(1, int(settings["limits.connections_total"] * AIO_SHARE))
        text = settings.texts.get("aio.news_file") or settings["aio.news"]
        text = text.strip()[:16000]             # a string16 carries 65,535 bytes
        self.text_news = ("%%NEWS#%s#%%" % aio_escape(text)).encode("utf-8", "replace")
        self.framed_news = aio_frame(b"\1" + aio_string16(text.encode("utf-8", "replace")))

    def session(self, address, now):
        return AioSession(self, address, next(self.numbers), now)

    def admit_connection(self):
        """Raise Refused if too many connections are those of listed servers."""
        if len(self.owners) >= self.servers_at_most:
            raise Refused("limit", "this master keeps connections to at most %d servers"
                          % self.servers_at_most)

    def disown(self, event, server):
        """Its session has it no more: it is gone, or another one's."""
        session = self.owners.pop(server, None)
        if session:
            self.poller.remove(self.poller.find(self, session.address, server.port))
            session.server, session.kept = None, False

    # Queries to framed servers

    def query(self, target):
        return b"\0"

    def answer(self, target, data, now):
        name, description, players, max_players, version = aio_info(data)
        self.registry.check_name(name)
        server = target.querier_data
        self.registry.update(server, {
            "name": name or server.name, "description": description,
            "players": clamp(players), "max_players": clamp(max_players),
            "version": str(version), "ping_ms": round(target.ping_ms)})
        return b""

    def poll_missed(self, target, now):
        self.record_silence(target, now)
        return False


# --- Quake III -----------------------------------------------------------------------------------

QUAKE3_HEAD = b"\xff\xff\xff\xff"       # every packet begins with it
QUAKE3_HEARTBEAT = QUAKE3_HEAD + b"heartbeat"
QUAKE3_GETINFO = QUAKE3_HEAD + b"getinfo "
QUAKE3_INFO = QUAKE3_HEAD + b"infoResponse\n"
QUAKE3_GETSERVERS = QUAKE3_HEAD + b"getservers"
QUAKE3_GETSERVERS_EXT = QUAKE3_HEAD + b"getserversExt"
QUAKE3_END = b"\\EOT\0\0\0"
QUAKE3_PACKET_BYTES = 1400              # of a list, as dpmaster: no network splits it
QUAKE3_TEXT_BYTES = 255                 # of a key or a value; a longer one is skipped
QUAKE3_CHALLENGE = re.compile(rb"[A-Za-z0-9_-]{8}")
QUAKE3_NUMBER = re.compile(rb"-?[0-9]{1,9}")
# The words of game types in a question
QUAKE3_GAMETYPES = {b"ffa": "0", b"tourney": "1", b"team": "3", b"ctf": "4"}
QUAKE3_GAMETYPE = b"gametype="          # the number, or another word, stands behind it
# Heartbeat tags and the games they stand for; servers of DarkPlaces tell theirs themselves. The
# Flatlines say that a server shuts down, and like any heartbeat are believed if it is silent then
QUAKE3_TAGS = {"DarkPlaces": "", "QuakeArena-1": "Quake3Arena", "Wolfenstein-1": "wolfmp",
               "EnemyTerritory-1": "et", "WolfFlatline-1": "wolfmp", "ETFlatline-1": "et"}
# The game of a server that tells none, as Quake III 1.32 does not, by its protocol
QUAKE3_GAME_OF_PROTOCOL = {
    "66": "Quake3Arena", "67": "Quake3Arena", "68": "Quake3Arena",
    "50": "wolfmp", "59": "wolfmp", "60": "wolfmp",
    "72": "et", "80": "et", "83": "et", "84": "et"}
QUAKE3_TITLES = {                       # by id in the registry; others have their gamename
    "quake3arena": "Quake III Arena", "openarena": "OpenArena", "xonotic": "Xonotic",
    "wolfmp": "Return to Castle Wolfenstein", "et": "Wolfenstein: Enemy Territory",
    "nexuiz": "Nexuiz", "warsow": "Warsow"}
# What the numbers of game types mean to players of the games that the protocol was made for
QUAKE3_MODES = {"0": "free for all", "1": "tournament", "3": "team deathmatch",
                "4": "capture the flag"}
QUAKE3_MODES_OF = "quake3arena", "openarena"
QUAKE3_GAMES = 64                       # at a time: each is a tab on the page
# New ones that one source may bring: a machine runs servers of one game, rarely of two
QUAKE3_GAMES_PER_SOURCE = 4
QUAKE3_GAMES_PER_NETWORK = 8            # of an IPv6 /48, which anybody can have
QUAKE3_QUESTIONS = 256                  # whose answers are kept: programs ask a few for each game
# The form of what an infoResponse must have, once the defaults are in it
QUAKE3_NEEDED = {"protocol": "0|-?[1-9][0-9]{0,8}", "clients": "-?[0-9]{1,9}",
                 "sv_maxclients": "0*[1-9][0-9]{0,8}", "gametype": r"\S+"}


class Quake3Info(NamedTuple):
    """What an infoResponse tells of its server."""

    gamename: Optional[str]             # None: it has no such key
    protocol: str
    gametype: str
    hostname: str                       # without colours
    mapname: str
    clients: int
    max_clients: int
    people: str                         # how many clients are no bots; "": not told


def quake3_pairs(data):
    r"""The `\key\value` pairs of an infoResponse, as bytes; of a key that comes twice the last."""
    texts = data.split(b"\\")[1:]
    return dict(zip(texts[::2], texts[1::2]))


def quake3_info(pairs):
    """The Quake3Info that these pairs of an infoResponse give. Raises Malformed."""
    texts = {"gametype": "0"}
    for key, value in pairs.items():
        if len(key) <= QUAKE3_TEXT_BYTES and len(value) <= QUAKE3_TEXT_BYTES:
            texts[decode_legacy(key)] = decode_legacy(value)
    for key, form in QUAKE3_NEEDED.items():
        if not re.fullmatch(form, texts.get(key, "")):
            raise Malformed("%s: %a" % (key, texts.get(key, "")))
    gamename = texts.get("gamename")
    if gamename is not None and len(gamename.split()) != 1:
        raise Malformed("gamename: %a" % gamename)
    hostname = re.sub(r"\^(?:x[0-9a-fA-F]{3}|[0-9])", "", texts.get("hostname", ""))
    return Quake3Info(
        gamename, texts["protocol"], texts["gametype"], clean(hostname),
        texts.get("mapname", ""), int(texts["clients"]), clamp(int(texts["sv_maxclients"])),
        texts.get("g_humanplayers", ""))


def quake3_fields(info, gamename):
    """The same as attributes of Server; `gamename`: of the game that the server is of."""
    return {"name": info.hostname, "map": info.mapname, "mode": info.gametype,
            "version": info.protocol, "players": info.clients, "max_players": info.max_clients,
            "details": {"gamename": gamename, "people": info.people}}


def quake3_game(gamename, protocol=""):
    """The id in the registry of the game with this gamename."""
    game = re.sub("[^a-z0-9_.-]", "-", gamename.lower())[:32]
    # OpenArena has kept the name that it comes from, and no other game has its protocol
    return "openarena" if (game, protocol) == ("quake3arena", "71") else game


class Quake3Question(NamedTuple):
    """What a player's program asks for by getservers or getserversExt."""

    extended: bool                      # getserversExt
    gamename: str                       # "": the anonymous games
    protocol: str
    gametype: str                       # "": any
    empty: bool                         # with servers that nobody is on …
    full: bool                          # … and with those that have no room
    ipv4: bool
    ipv6: bool


def quake3_question(words):
    """The Quake3Question that is asked by the words of this packet. Raises Malformed."""
    command, *words = words
    extended = command == QUAKE3_GETSERVERS_EXT
    if not extended and command != QUAKE3_GETSERVERS:
        raise Malformed("no heartbeat, infoResponse, getservers or getserversExt")
    gamename = b""
    # Without a name the protocol comes first; a name may begin with a digit
    if words and (extended or not QUAKE3_NUMBER.fullmatch(words[0])):
        gamename, *words = words
    if not words or not QUAKE3_NUMBER.fullmatch(words[0]):
        raise Malformed("a question without the number of a protocol")
    protocol, *filters = words
    gametype = ""
    for word in filters:
        if word.startswith(QUAKE3_GAMETYPE):
            gametype = decode_legacy(word[len(QUAKE3_GAMETYPE):])
        elif word in QUAKE3_GAMETYPES:
            gametype = QUAKE3_GAMETYPES[word]
    ipv4, ipv6 = b"ipv4" in filters, b"ipv6" in filters
    if not extended:
        ipv4, ipv6 = True, False
    elif not ipv4 and not ipv6:
        ipv4 = ipv6 = True
    return Quake3Question(extended, decode_legacy(gamename), protocol.decode(), gametype,
                          b"empty" in filters, b"full" in filters, ipv4, ipv6)


class Quake3Entry(NamedTuple):
    """A server in the lists of its game."""

    gamenames: Sequence[str]            # by which it is found, "" among them if it is anonymous
    protocol: str
    gametype: str
    empty: bool                         # only players that ask for empty servers get it, …
    full: bool                          # … or only those that ask for full ones
    ipv6: bool
    packed: bytes                       # as it stands in a list

    def answers(self, question):
        """Does the server belong in the answer to this question about its game and protocol?"""
        if self.empty and not question.empty or self.full and not question.full:
            return False
        if question.gametype not in ("", self.gametype):
            return False
        return question.ipv6 if self.ipv6 else question.ipv4


def quake3_entry(server, anonymous):
    """The Quake3Entry of a server; `anonymous`: the gamenames that are found without a name."""
    address, gamename = ipaddress.ip_address(server.address), server.details["gamename"]
    ipv6 = address.version == 6
    empty = server.players == 0
    full = not empty and server.players == server.max_players
    if gamename == "et":                # whose players always get empty and full servers
        empty = full = False
    return Quake3Entry(
        (gamename, "") if gamename in anonymous else (gamename,), server.version, server.mode,
        empty, full, ipv6,
        (b"/" if ipv6 else b"\\") + address.packed + struct.pack(">H", server.port))


def quake3_packets(question, entries):
    """The answer to a question; `entries`: those of its game and protocol."""
    head = QUAKE3_HEAD + b"getserversResponse"
    if question.extended:
        head = QUAKE3_HEAD + b"getserversExtResponse"
    packets = [head]
    packed = [entry.packed for entry in entries if entry.answers(question)]
    for piece in (*packed, QUAKE3_END):
        if len(packets[-1]) + len(piece) > QUAKE3_PACKET_BYTES:
            packets.append(head)
        packets[-1] += piece
    return packets


class Quake3(UdpProtocol, PolledGame):
    r"""The protocol of Quake III Arena's master, as dpmaster speaks it for the whole family.

        > ffffffff "heartbeat QuakeArena-1\n"           every 5 minutes, and twice at shutdown
        < ffffffff "getinfo AbCdEf-_"                   the challenge: a MAC
        > ffffffff "infoResponse\n" \sv_maxclients\8\clients\0\mapname\oa_dm1\hostname\^1Red
          \protocol\71\gamename\Quake3Arena\challenge\AbCdEf-_
        > ffffffff "getservers 71 empty full\n"         or "getserversExt Xonotic 3 ipv4 ipv6"
        < ffffffff "getserversResponse" \ 7f000001 9060 \ "EOT" 000000

    A heartbeat may be forged, so it only says "ask me": nothing is kept before an infoResponse with
    the right challenge, and what is listed comes from that. The poller has the servers that are
    listed, by the address and port that each sends from. A heartbeat of one of them has it polled
    at once, for the last time if it is silent then, as that may have been its farewell. To the
    poller's own port its answer comes through, whatever is sent in its name to this one.
    """

    game = "quake3"                     # for poller and /check; each gamename is a game in the list
    ipv4_only = False
    timeout_s, attempts = 1.0, 3        # a server that has left is to go within 5 s

    def __init__(self, core):
        super().__init__(core)
        del core.http_announcers[self.game]          # heartbeats alone announce it
        self.answers = RenderedList(self.registry, "", self.answers_about)
        self.registry.subscribe(self.on_registry_event, events=["listed", "gone"],
                                every_master=True)
        self.read(core.settings)

    def read(self, settings):
        # With a MAC of 6 bytes getinfo has 20, no more than a heartbeat; 50,000 guesses a second
        # take 180 years. An answer has 2 s to come back, up to twice that counts
        self.cookie = Cookie(os.urandom(16), 6, 2.0)
        self.settings = settings
        self.tags = dict(QUAKE3_TAGS)
        for line in settings["quake3.tags"]:
            tag, _, gamename = line.partition("=")
            self.tags[tag.strip()] = gamename.strip()
        self.tag_gamenames = tuple(dict.fromkeys(self.tags.values()))       # each game once
        self.registry.forget_entries()            # entries tell whether their server is anonymous

    def serves(self, server):
        """Every game of the family, as watch() knows them."""
        return "gamename" in server.details

    def on_registry_event(self, event, server):
        """Every listed server is polled, also one that was restored from disk."""
        gamename = server.details.get("gamename")
        if gamename and not server.master:
            super().on_registry_event(event, server)
        if gamename and event == "listed":
            # A foreign letter may look like another one: then the id, which has none, is the title
            title = gamename if gamename.isascii() else server.game
            self.registry.set_game_title(server, QUAKE3_TITLES.get(server.game, title))

    def answers_about(self, servers):
        """The function that gives the packets that answer a Quake3Question about these servers."""
        ours = [server for server in servers if "gamename" in server.details]
        render = functools.partial(quake3_entry, anonymous=self.tag_gamenames)
        entries = collections.defaultdict(list)         # by gamename and protocol
        for entry in cached_entries(ours, "quake3", render):
            for gamename in entry.gamenames:
                entries[gamename, entry.protocol].append(entry)

        @functools.lru_cache(QUAKE3_QUESTIONS)
        def answer(question):
            return quake3_packets(question, entries.get((question.gamename, question.protocol), ()))
        return answer

    def datagram(self, data, peer, now):
        try:
            packets = self.packets_for(data, peer[:2], now)
        except Malformed as wrong:
            self.registry.record_outcome(peer[0], self.game, peer[1], "bad packet", now, str(wrong))
            raise
        surplus = sum(map(len, packets)) - len(data)
        if not self.rules.allow_surplus("quake3", peer[0], surplus, now):
            raise Limited
        return [(packet, peer) for packet in packets]

    def packets_for(self, data, place, now):
        """The packets that answer this one from `place`. Raises Malformed and Limited."""
        if data.startswith(QUAKE3_INFO):
            self.refresh(data, place, now)
            target = self.poller.find(self, *place)
            if target is not None:                      # else it is refused
                target.missed_polls = 0
            return []
        words = data.split()
        if len(words) == 2 and words[0] == QUAKE3_HEARTBEAT:
            return self.heartbeat(words[1].decode("latin-1"), place, now)
        question = quake3_question(words or [b""])
        # Forged questions have emptied the bucket: an answer is not even made
        if self.rules.surplus_is_spent("quake3", place[0], now):
            raise Limited
        # By default a source gets 5 at once, then 1 a second
        if not self.rules.udp_request_limiter.allow(place[0], now, self.rules.request_tokens(10)):
            raise Limited
        return self.answers.get(now)(question)

    # Heartbeats, and the challenge that an answer must have

    def heartbeat(self, tag, place, now):
        """A getinfo for a server that is listed, which is polled as well, or that may be listed."""
        if tag not in self.tags:
            raise Malformed("heartbeat tag %a: not known here, but the operator can add it" % tag)
        target = self.poller.find(self, *place)
        if target is None or self.listed_server(target) is None:
            if not self.may_be_listed(place, now):
                return []
            tag_gamename = self.tags[tag]
        elif self.is_last_poll(target, now):            # it is asked once a second, whatever comes
            return []
        else:
            self.poller.poll_now(self, *place, now).missed_polls = MISSED_POLLS_LIMIT - 1
            tag_gamename = ""                           # its game is known already
        return [QUAKE3_GETINFO + self.challenge(tag_gamename, place, now)]

    def may_be_listed(self, place, now):
        """Is there room for a server here? For /check it is noted, or why not."""
        source, port = place
        try:
            address = self.rules.listed_address(source)
            self.registry.check_admission((self.game, address, port), source)
        except Refused as refused:
            self.registry.record_outcome(source, self.game, port, refused.outcome, now,
                                         str(refused))
            return False
        self.registry.record_outcome(source, self.game, port, "announced", now)
        return True

    def is_last_poll(self, target, now):
        """Is the server polled just now, and goes if it is silent?"""
        under_way = target.asked_at is not None or target.due <= now
        return under_way and target.missed_polls == MISSED_POLLS_LIMIT - 1

    def challenge(self, tag_gamename, place, now):
        """For a getinfo; `tag_gamename`: what the heartbeat's tag stands for, "" for no game."""
        return base64.urlsafe_b64encode(self.cookie.make(repr((tag_gamename, place)).encode(), now))

    def proven_tag(self, challenge, place, now):
        """The gamename that this challenge was made with, for `place`. Raises Malformed."""
        if QUAKE3_CHALLENGE.fullmatch(challenge):
            mac = base64.urlsafe_b64decode(challenge)
            for tag_gamename in self.tag_gamenames:
                if self.cookie.is_valid(mac, repr((tag_gamename, place)).encode(), now):
                    return tag_gamename
        raise Malformed("no infoResponse to a getinfo of the last 2 s")

    # What a server tells of itself

    def refresh(self, data, place, now, measured=NO_DETAILS):
        """List the server that sent this infoResponse from `place`, or refresh it; it may be
        refused. Raises Malformed.

        `measured`: attributes of Server that the poller adds."""
        pairs = quake3_pairs(data)
        challenge = pairs.get(b"challenge", b"")
        tag_gamename = self.proven_tag(challenge, place, now)
        # With 64 bits two of a million are alike once in 40 million times
        fingerprint = hash((place, data.replace(challenge, b"", 1)))
        server = self.registry.by_fingerprint.get(fingerprint)
        if server is not None:
            self.registry.confirm(server, now)
            if not measured:
                return
            self.registry.update(server, measured)
        else:
            server = self.take_info(quake3_info(pairs), tag_gamename, place, now, measured)
        if server is not None:
            self.registry.set_fingerprint(server, fingerprint)

    def take_info(self, info, tag_gamename, place, now, measured):
        """The server that these answers list or refresh; None: it is refused."""
        target = self.poller.find(self, *place)
        listed = target and self.listed_server(target)
        fields = quake3_fields(info, self.gamename(info, listed, tag_gamename))
        target = self.poller.keep_polling(self, *place)
        return self.list_polled(target, {**fields, **measured}, now,
                                self.settings["quake3.timeout"])

    def gamename(self, info, listed, tag_gamename):
        """The gamename that the server tells, or that its protocol stands for, or that it is listed
        with, or that its heartbeat's tag stands for. Raises Malformed."""
        gamename = info.gamename or QUAKE3_GAME_OF_PROTOCOL.get(info.protocol)
        if not gamename and listed:
            gamename = listed.details.get("gamename")
        if not gamename and not tag_gamename:
            raise Malformed("gamename: it is not told, and protocol %s is of no known game"
                            % info.protocol)
        return gamename or tag_gamename

    def admitted_game(self, source, fields):
        gamename, games = fields["details"]["gamename"], self.settings["quake3.games"]
        game = quake3_game(gamename, fields["version"])
        only = games and not games[0].startswith("!")
        # Under the id of another protocol's game nothing would be what it seems
        if (game in SECTIONS or game in self.rules.games or "!" + game in games
                or only and game not in games):
            raise Refused("game", "%a is none of those here" % gamename)
        # Strangers keep out strangers alone, not the games that have a name here
        named_games = {*QUAKE3_TITLES, *games, *map(quake3_game, self.tag_gamenames)}
        if game not in self.registry.titles and game not in named_games:
            self.admit_new_game(source, named_games)
        return game

    def admit_new_game(self, source, named_games):
        """Raise Refused if there are too many games, in all or of this source."""
        if len(self.registry.titles.keys() - named_games) >= QUAKE3_GAMES:
            raise Refused("limit", "at most %d games of this family" % QUAKE3_GAMES)
        if self.rules.exempts(source):
            return
        bringers = [source_keys(bringer) for game, bringer in self.registry.title_sources.items()
                    if game not in named_games]
        for key, limit in source_limits(source, QUAKE3_GAMES_PER_SOURCE):
            limit = min(limit, QUAKE3_GAMES_PER_NETWORK)
            if sum(key in keys for keys in bringers) >= limit:
                raise Refused("limit", "at most %d new games of one source" % limit)

    # As a Querier

    def query(self, target):
        return QUAKE3_GETINFO + self.challenge("", target.key[1:], target.asked_at)

    def answer(self, target, data, now):
        if not data.startswith(QUAKE3_INFO):
            raise Malformed("no infoResponse")
        self.refresh(data, target.key[1:], now, {"ping_ms": round(target.ping_ms)})
        return b""


# --- Luanti --------------------------------------------------------------------------------------

LUANTI_ID = b"OEt\3"                # every packet begins with it
LUANTI_ADDRESS_CHARACTERS = 250     # a host name has 253 at most (RFC 1035), with its last dot
LUANTI_NUMBER_CHARACTERS = 32       # 17 digits tell any of its numbers; int() is slow with 10,000
# Of each list of names so many are kept: few servers have 500 mods
LUANTI_NAMES = 500
LUANTI_NAME_CHARACTERS = 32         # names of players have 20, those of mods rarely 30
# What is kept of the lists, in bytes of JSON, as they stand in what every client fetches: 180
# players with the longest names, 500 mods with usual ones. The official list takes 8 kB for all
LUANTI_LIST_BYTES = {"clients_list": 4096, "mods": 8192}


def read_luanti_description(text):
    return clean(text, TEXT_CHARACTERS)


def read_luanti_address(text):
    """What players connect to: nothing, an IP address, or a name with a dot. Raises ValueError."""
    if not isinstance(text, str) or len(text) > LUANTI_ADDRESS_CHARACTERS:
        raise ValueError("no text of that length")
    if text == "":
        return text                     # the address that it announces from
    if ":" in text:                     # an IPv6 address, or a port, or a scope
        if "%" in text:
            raise ValueError("a scope means nothing to players")
        ipaddress.IPv6Address(text)
        return text
    if not all("!" <= character <= "~" for character in text):
        raise ValueError("a blank, or a letter beyond ASCII")
    if "." not in text[1:]:             # the first character is part of the name
        raise ValueError("no dot")
    return text


def read_luanti_names(names):
    """A list of names, each of them once. Raises TypeError and AttributeError."""
    if not isinstance(names, list):
        raise TypeError("no list")
    cleaned = [clean(name, LUANTI_NAME_CHARACTERS) for name in names[:LUANTI_NAMES]]
    return list(dict.fromkeys(cleaned))


def read_luanti_number(high, kind=int):
    """The function that reads a number from 0 to `high` and raises ValueError."""
    read = read_number(0, high, kind)

    def read_short(text):
        if len(text) > LUANTI_NUMBER_CHARACTERS:
            raise ValueError("too long for a number")
        return read(text)
    return read_short


class LuantiField(NamedTuple):
    """A field of an announcement. `read` takes a text, or a list, as it was announced; it raises
    ValueError, TypeError or AttributeError."""

    name: str
    read: Callable[[Any], Any]
    expected: str                       # in words, for the answer to another value
    needed: bool = False


A_TEXT, TEXTS, A_FLAG, A_NUMBER = (
    "a text", "a list of texts", "true or false", "a number, 0 or more")
read_luanti_count = read_luanti_number(10**15)
LUANTI_FIELDS = (
    LuantiField("name", clean, A_TEXT, needed=True),
    LuantiField("gameid", clean, A_TEXT, needed=True),
    LuantiField("mapgen", clean, A_TEXT),
    LuantiField("version", clean, A_TEXT, needed=True),
    LuantiField("description", read_luanti_description, A_TEXT, needed=True),
    LuantiField("privs", read_luanti_description, A_TEXT),
    LuantiField("url", read_luanti_description, A_TEXT),
    LuantiField("address", read_luanti_address, "a name with a dot in it or an IP address; without "
                "a port, blanks or letters beyond ASCII"),
    LuantiField("clients_list", read_luanti_names, TEXTS),
    LuantiField("mods", read_luanti_names, TEXTS),
    LuantiField("creative", read_flag, A_FLAG),
    LuantiField("damage", read_flag, A_FLAG),
    LuantiField("pvp", read_flag, A_FLAG),
    LuantiField("password", read_flag, A_FLAG),
    LuantiField("dedicated", read_flag, A_FLAG),
    LuantiField("rollback", read_flag, A_FLAG),
    LuantiField("can_see_far_names", read_flag, A_FLAG),
    LuantiField("clients", read_luanti_count, A_NUMBER, needed=True),
    LuantiField("clients_max", read_luanti_count, A_NUMBER, needed=True),
    LuantiField("uptime", read_luanti_count, A_NUMBER, needed=True),
    LuantiField("game_time", read_luanti_count, A_NUMBER, needed=True),
    LuantiField("proto_min", read_luanti_count, A_NUMBER, needed=True),
    LuantiField("proto_max", read_luanti_count, A_NUMBER, needed=True),
    LuantiField("lag", read_luanti_number(10**6, float), A_NUMBER),
    # The master counts these three: the most clients, announcements, the mean of clients
    LuantiField("clients_top", read_luanti_count, A_NUMBER, needed=True),
    LuantiField("updates", read_luanti_count, A_NUMBER, needed=True),
    LuantiField("pop_v", read_luanti_number(10**6, float), A_NUMBER, needed=True),
)
LUANTI_COUNTED = "clients_top", "updates", "pop_v"
LUANTI_FLAGS = "creative", "damage", "pvp", "password"


class Luanti(TcpProtocol, PolledGame):
    """Luanti, once Minetest; captured from minetestserver 5.6.1. The rules are the official list's.

    A game server announces itself by HTTP when it starts, every 300 s, and when it ends:

        > POST /announce, in the field json of a form; see HttpRequest in section 9
          {"action":"start","address":"","clients":0,"clients_list":[],"clients_max":12, …
           "gameid":"minetest","mapgen":"v7","mods":["weather", …],"port":30000,"version":"5.6.1"}

        the master's probe to its port, the answer of 14 bytes, and the goodbye:
        < 4f457403 0000 00 01
        > 4f457403 0001 00 03 ffdc 00 01 peer.u16       bytes 6 to 10 may differ
        < 4f457403 peer.u16 00 00 03

    It is listed once it answers, with what it has announced. It goes when it says so, when it
    leaves three polls unanswered, or after [luanti] timeout without an announcement. The answer
    has no room for a nonce: who forges a game server's address can pretend that it is there.
    """

    game = "luanti"

    def __init__(self, core):
        super().__init__(core)
        if not core.settings["luanti.enabled"]:
            del core.http_announcers[self.game]
        # What was announced with an address that is being looked up, by source and port; bounded
        # as look-ups are
        self.being_looked_up = {}

    def serves(self, server):
        """Servers announce themselves on the ports of [http]."""
        settings = self.core.settings
        return (server.game == self.game and settings["luanti.enabled"]
                and bool(settings["http.ports"]))

    def on_http_announcement(self, source, port, fields, now):
        """A start or an update; an update leaves out some of what the start has told."""
        registry, listed = self.registry, self.rules.listed_address(source)
        server, action = registry.get(self.game, listed, port), fields.get("action")
        if action not in ("start", "update"):
            raise Refused("bad packet", "action: expected start, update or delete; Luanti servers "
                                        "announce themselves")
        old = server.luanti_announcement if server and action == "update" else NO_DETAILS
        announced = luanti_counted(fields, old)
        address = announced.get("address")
        if old and address == old.get("address"):
            self.refresh(source, port, announced, now)
        elif address:
            self.look_up(source, port, announced, now)
        else:
            self.ask(source, port, announced, now)

    def look_up(self, source, port, announced, now):
        """Have it looked up where the address for players leads. Raises Refused."""
        self.check_newcomer(source, port, announced["name"])
        done = functools.partial(self.looked_up, source, port, announced)
        self.core.resolve(announced["address"], done, source, self.rules.listed_address(source))
        self.being_looked_up[source, port] = announced
        self.registry.record_outcome(source, self.game, port, "announced", now)

    def refresh(self, source, port, announced, now):
        """An update of a server that is listed with this address for players: nothing has to be
        proven again."""
        self.registry.list_or_refresh((self.game, self.rules.listed_address(source), port),
                                      source, now,
                           self.core.settings["luanti.timeout"], luanti_server(announced))
        self.registry.record_outcome(source, self.game, port, "listed", now)
        self.being_looked_up.pop((source, port), None)
        target = self.poller.find(self, source, port)
        if target is not None:
            target.querier_data = None

    def ask(self, source, port, announced, now):
        """Query the server. What it has announced counts once it answers, and stands in the target
        until then, so that it is bounded and leaves as targets do. Raises Refused."""
        self.query_newcomer(source, port, now, announced["name"]).querier_data = announced
        self.being_looked_up.pop((source, port), None)          # what came last counts

    def looked_up(self, source, port, announced, found, now):
        """Query the server unless the address that it has for players leads elsewhere (`found`; "":
        nowhere). An address of the other family tells nothing: a name may have IPv4 alone."""
        if self.being_looked_up.get((source, port)) != announced:
            return                      # it has announced something else since
        del self.being_looked_up[source, port]
        listed = self.rules.listed_address(source)
        if found and (found == listed or (":" in found) != (":" in listed)
                      or self.rules.believes_claim(source, found)):
            try:
                self.ask(source, port, announced, now)
            except Refused as refused:
                self.registry.record_outcome(source, self.game, port, refused.outcome, now,
                                             str(refused))
        else:
            self.registry.record_outcome(source, self.game, port, "address", now,
                                         "%s leads to %s, not to %s"
                               % (announced["address"], found or "no address", listed))

    def query(self, target):
        return LUANTI_ID + b"\0\0\0\1"

    def answer(self, target, data, now):
        goodbye = luanti_goodbye(data)
        announced, target.querier_data = target.querier_data, None
        if announced:
            timeout = self.core.settings["luanti.timeout"]
            self.list_polled(target, luanti_server(announced), now, timeout)
        server = self.listed_server(target)
        if server:                          # it lives by its announcements
            self.registry.update(server, {"ping_ms": round(target.ping_ms), "confirmed": True})
        else:
            self.poller.remove(target)
        return goodbye


def luanti_goodbye(data):
    """What ends the exchange after this answer to a probe. Raises Malformed."""
    if not re.fullmatch(rb"OEt\x03\0\x01.{5}\x01..", data, re.S):
        raise Malformed("an answer has 14 bytes, 4f457403 0001 and then a peer's number")
    return LUANTI_ID + data[12:] + b"\0\0\3"


def luanti_fields(told):
    """The fields of an announcement that are known, sent or stored. Raises Refused."""
    fields = {}
    for field in LUANTI_FIELDS:
        if field.name not in told and not field.needed:
            continue
        value = told.get(field.name)
        if isinstance(value, (int, float)):
            value = str(value)              # as old servers send numbers and flags
        try:
            fields[field.name] = field.read(value)
        except (ValueError, TypeError, AttributeError):
            words = "%s: expected %s" % (field.name, field.expected)
            raise Refused("bad packet", words) from None
    if fields["proto_min"] > fields["proto_max"]:
        raise Refused("bad packet", "proto_min is above proto_max")
    if "clients_list" in fields:
        fields["clients"] = len(fields["clients_list"])
    for name, most in LUANTI_LIST_BYTES.items():
        if name in fields:
            fields[name] = luanti_first_names(fields[name], most)
    if not re.match("https?://", fields.get("url", "")):
        fields.pop("url", None)
    return fields


def luanti_first_names(names, most):
    """The first of the names, as many as have `most` bytes in JSON."""
    total = 0
    for number, name in enumerate(names):
        escapes = name.count('"') + name.count("\\")
        total += len(name.encode()) + escapes + len('"",')
        if total > most:
            return names[:number]
    return names


def luanti_counted(fields, old):
    """An announcement with what the server has told before (`old`), and the record and the mean of
    its clients. Raises Refused."""
    counted = {name: old.get(name, 0) for name in LUANTI_COUNTED}
    told = luanti_fields({**old, **fields, **counted})
    told["clients_top"] = max(told["clients"], told["clients_top"])
    told["updates"] += 1
    told["pop_v"] += (told["clients"] - told["pop_v"]) / told["updates"]
    return told


def luanti_server(told):
    """The same as attributes of Server."""
    return {"luanti_announcement": told, "verified": "query", "name": told["name"],
            "mode": told["gameid"],
            "map": told.get("mapgen", ""), "version": told["version"],
            "description": told["description"], "players": told["clients"],
            "max_players": clamp(told["clients_max"]),
            "details": {"flags": ", ".join(flag for flag in LUANTI_FLAGS if told.get(flag))}}


# ================================================================================================
# 8  Pages
#
# What people see: a departures board, not a dashboard. Templates, style sheet and script; below
# them the functions that fill the templates from a Server or a Series. Nothing here knows HTTP. The
# style sheet and the script have addresses of their own and are never formatted, so that the
# Content-Security-Policy needs no exception: no style attribute, no inline script, nothing from
# elsewhere. Every page is complete without the script.
# ================================================================================================

SPARK_CROWD = 4             # players that fill a sparkline's height, at least: one is no crowd
CHART_POINTS = 366          # one per day in a year: about one per pixel on a phone
PREVIEW_NAMES = 5           # more than a chat shows of a link
CHART_GRIDLINES = 4         # at most, above zero: few enough to be read, not counted

# The list page, and what the operator's own `[http] template` may hold instead. Placeholders,
# each once or not at all:
#   $title    the title in the ini (text)             $intro    the paragraph of the ini, or nothing
#   $head     <meta>, style sheet, script, icon       $totals   "312 players on 87 servers"
#   $tabs     all games or one, with counts           $search   the form: name, minimum of players
#   $table    the list, or what to do if it is empty  $foot     the links to /check, /servers.json
# A dollar sign of your own is written $$.
LIST_PAGE = """\
<!doctype html>
<html lang="en">
<head>
$head</head>
<body>
<header class="list">
<div><h1>$title</h1>
$intro</div>
$totals</header>
<main>
<div class="bar">
$tabs$search</div>
$table</main>
$foot</body>
</html>
"""

PAGE = """\
<!doctype html>
<html lang="en">
<head>
$head</head>
<body>
<header><a class="home" href="/">$title</a></header>
<main>
<p id="status" role="status"></p>
$main</main>
$foot</body>
</html>
"""

HEAD = """\
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<meta name="description" content="$about">
<meta property="og:title" content="$title">
<meta property="og:description" content="$about">
<meta property="og:site_name" content="$site">
$link<link rel="icon" href="/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="/style.css">
<script src="/app.js" defer></script>
"""

HEAD_LINK = """\
<meta property="og:url" content="$url">
"""

FOOT = """\
<footer>
<nav aria-label="More"><a href="/check">Is my server listed?</a> <a href="/servers.json">JSON</a>
<a href="/servers.xml">XML</a> <a href="/metrics">Metrics</a></nav>
</footer>
"""

TOTALS = """\
<p class="totals" id="totals" data-live>$spark$totals</p>
"""

SEARCH = """\
<form id="search" action="/" role="search">
<input type="hidden" name="game" value="$game">
<label>Name <input type="search" name="name" value="$name" maxlength="128"
 autocomplete="off" spellcheck="false"></label>
<label>Min. players <input type="number" name="players_min" value="$players_min"
 min="0" max="65535"></label>
<button>Search</button>
</form>
"""

TAB = """\
<a href="$link" aria-current="$current">$text<small>$count</small></a>
"""

TABS = """\
<nav class="tabs" id="tabs" data-live aria-label="Games">$tabs</nav>
"""

HINT = """\
<p>$whom</p>
<pre><code>$what</code></pre>
"""

TABLE = """\
<p id="status" role="status">$status</p>
<table role="table" aria-label="Servers" id="servers" data-total="$total"$state>
<thead role="rowgroup"><tr role="row"><th role="columnheader">Name<th role="columnheader">Game\
<th role="columnheader">Mode<th role="columnheader">Map<th role="columnheader">Players\
<th role="columnheader">Version<th role="columnheader">Seen\
<th role="columnheader">Address</thead>
<tbody role="rowgroup">
$rows</tbody>
</table>
<div id="empty">$empty</div>
"""

EMPTY = """\
<section class="empty">
<h2>No servers yet</h2>
<p>The first game server to announce itself appears here.</p>
$hint
</section>
"""

# Formatted with %, every value escaped before: 2,000 of them are made in one go, a template would
# take three times as long. End tags that HTML lets one leave out are left out. The cells have no
# classes: the style sheet counts columns. The roles say what the tags say already, for browsers
# that forget it when the style sheet makes a row something else.
ROW = ('<tr role="row"%s>'
       '<td role="cell"><a href="/server?game=%s&amp;address=%s&amp;port=%d"><bdi>%s</bdi></a>%s'
       '<td role="cell">%s<td role="cell">%s<td role="cell">%s'
       '<td role="cell"><span><b>%d</b>%s</span>%s'
       '<td role="cell">%s<td role="cell"')
ROW_END = '<td role="cell"><code>%s</code>\n'
METER = '/%d<meter aria-hidden="true" max="%d" value="%d"></meter>'

BADGES = {          # what each means, shown as its title
    "official": "Marked as official by the operator of this list",
    "unconfirmed": "Listed before its master was restarted, not heard from since",
    "self-reported": "Not verified: this master cannot query it",
    "not responding": "Known to this master, but does not answer its queries",
}

VERIFIED = {
    "handshake": "It answered this master's handshake",
    "query": "It answers this master's queries",
    "connection": "It keeps a connection to this master",
    "self-reported": "Not verified: everything here is what it says of itself",
}

SERVER_PAGE = """\
<div id="state" data-live>
<h1><bdi>$name</bdi> $badges</h1>
<p class="lead">$lead</p>
$play</div>
$history<section>
<h2>Details</h2>
<dl id="facts" data-live>
$facts</dl>
</section>
<section>
<h2>Banner</h2>
<p><img src="$image" alt="" width="560" height="95"></p>
<p>For other pages, in HTML:</p>
<pre><code>&lt;a href="$base$link"&gt;&lt;img src="$base$image"
alt="$address" width="560" height="95"&gt;&lt;/a&gt;</code></pre>
<p>In BBCode, for forums:</p>
<pre><code>[url=$base$link][img]$base$image[/img][/url]</code></pre>
<p>In Markdown:</p>
<pre><code>[![$address]($base$image)]($base$link)</code></pre>
</section>
"""

# What is too long for its place fades out there: nobody knows how wide a font draws a name
BANNER = """\
<svg xmlns="http://www.w3.org/2000/svg" width="560" height="95" viewBox="0 0 560 95" role="img">
<title>$name $players</title>
<style>
svg { --ground: #fcfbf8; --ink: #1d1b18; --soft: #625d55; --line: #e3dfd6; --accent: #8a5700; }
@media (prefers-color-scheme: dark) {
  svg { --ground: #131210; --ink: #ece8df; --soft: #a8a195; --line: #2d2a26; --accent: #f2b23a; }
}
.card { fill: var(--ground); stroke: var(--line); }
text {
  fill: var(--soft);
  font: 400 13px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif;
}
tspan { fill: var(--ink); }
.name { fill: var(--ink); font-size: 18px; font-weight: 650; }
.address { font: 12px ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; }
.players { fill: var(--accent); font-size: 20px; font-weight: 650; text-anchor: end; }
path { fill: var(--accent); opacity: .75; }
</style>
<linearGradient id="fade"><stop offset=".92" stop-color="#fff"/><stop offset="1"/></linearGradient>
<mask id="end" maskUnits="userSpaceOnUse" x="0" y="0" width="400" height="95">
<rect width="400" height="95" fill="url(#fade)"/></mask>
<rect class="card" x=".5" y=".5" width="559" height="94" rx="6"/>
<g mask="url(#end)">
<text class="name" x="16" y="33">$name</text>
<text x="16" y="56"><tspan>$game</tspan> $state</text>
<text class="address" x="16" y="79">$address</text>
</g>
<text class="players" x="544" y="34">$players</text>
<svg x="424" y="42" width="120" height="45">$spark</svg>
</svg>
"""

GONE = """\
Not listed now. Last seen $seen. <a href="$link">Why?</a>"""

PLAY = """\
<p><a class="play" href="iceball://$address">Play</a></p>
"""

FACT = """\
<div$width><dt>$name</dt><dd>$value</dd></div>
"""

HISTORY = """\
<section>
<div class="bar">
<h2>Players</h2>
<nav class="tabs" aria-label="Span">$tabs</nav>
</div>
<div id="history" data-live>
$chart</div>
</section>
"""

CHECK_PAGE = """\
<h1>Is my server listed?</h1>
<p class="lead">What this master last received from an address, what became of it, and what to
do.</p>
<form class="check" action="/check">
<label>Address <input name="address" value="$address" required autocomplete="off" spellcheck="false"
 placeholder="192.0.2.1"></label>
<label>Port <input type="number" name="port" value="$port" min="1" max="65535"
 placeholder="any"></label>
<button>Check</button>
</form>
<section id="listed" data-live>
<h2>$verdict</h2>
<ul class="servers">
$listed</ul>
</section>
<section id="findings" data-live>
<h2>What arrived</h2>
$findings</section>
"""

LISTED = """\
<li><a href="$link"><bdi>$name</bdi></a> $badges <code>$peer</code> <small>seen $seen</small>
"""

FINDINGS = """\
<ol class="findings">
$items</ol>
"""

FINDING = """\
<li><h3>$outcome</h3>
<p>$todo</p>
$arrival"""

ARRIVAL = """\
<p class="from">$when · $protocol from <code>$peer</code></p>
"""

NOTHING_ARRIVED = """\
<p>Nothing has arrived from $whom lately. Is the address of this master right in the settings of
the game server, and does its firewall let packets out? Most game servers announce themselves by
IPv4. Without the port, this page tells what came from any.</p>
"""

ERROR_PAGE = """\
<div class="error">
<p class="status">$status</p>
<h1>$reason</h1>
<p class="lead">$hint</p>
<p><a href="/">All servers</a></p>
</div>
"""

ICON_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">\
<rect width="32" height="32" rx="6" fill="#131210"/>\
<g stroke="#f2b23a" stroke-width="3" stroke-linecap="round"><path d="M7 9h11M7 16h8M7 23h12"/>\
<path d="M24 9h1M21 16h4M24 23h1" stroke="#ece8df"/></g></svg>
"""

# One set of custom properties, twice. Text on its ground has a contrast of 4.5:1 at least.
STYLE_CSS = r""":root {
  color-scheme: light dark;
  --ground: #fcfbf8; --raised: #f4f1ea; --ink: #1d1b18; --soft: #625d55; --line: #e3dfd6;
  --accent: #8a5700; --glow: #fae7bd;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #131210; --raised: #1d1b18; --ink: #ece8df; --soft: #a8a195; --line: #2d2a26;
    --accent: #f2b23a; --glow: #43351a;
  }
}

* { box-sizing: border-box; }
html {
  -webkit-text-size-adjust: 100%; text-size-adjust: 100%; scrollbar-gutter: stable;
  scroll-padding-top: 2.5rem;       /* the table's head */
}
body {
  margin: 0 auto; padding: 0 1.25rem; max-width: 75rem; background: var(--ground);
  color: var(--ink);
  font: 400 .9375rem/1.5rem
    system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif;
  font-variant-numeric: tabular-nums;
}
a { color: inherit; text-decoration-color: var(--soft); text-underline-offset: .2em; }
a:hover { color: var(--accent); text-decoration-color: currentColor; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; border-radius: 2px; }
h1 { margin: 0; font-size: 1.625rem; line-height: 2rem; font-weight: 650; letter-spacing: -.015em; }
h2 { margin: 0 0 .75rem; font-size: 1rem; font-weight: 650; }
h3 { margin: 0; font-size: 1rem; font-weight: 650; }
p, dd { margin: 0; }
b, .servers bdi { font-weight: 650; }
section { margin-top: 2.5rem; }
code, pre {
  font: .8rem/1.5rem
    ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "Liberation Mono", monospace;
}
[hidden] { display: none !important; }
/* a name of combining marks alone has nowhere to break; what stands a little outside, as a focus
   does, is seen */
main { margin: 0 -1rem; padding: 0 1rem; overflow-x: clip; }
.unseen {
  position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%);
  white-space: nowrap;
}

header { padding: 2.5rem 0 1.5rem; }
header.list {
  display: flex; flex-wrap: wrap; justify-content: space-between; align-items: end; gap: 1rem 2rem;
}
header.list > div { min-width: 0; max-width: 42rem; }
header p, .lead { color: var(--soft); overflow-wrap: anywhere; }
.home { color: var(--soft); font-weight: 650; text-decoration: none; }
.totals b { color: var(--ink); font-size: 1.625rem; letter-spacing: -.015em; }
.totals svg { width: 4rem; height: 1.5rem; margin-right: .75rem; vertical-align: -.125rem; }
footer {
  margin: 3rem 0 2rem; padding-top: 1rem; border-top: 1px solid var(--line); color: var(--soft);
  font-size: .875rem;
}
footer nav { display: flex; flex-wrap: wrap; gap: .25rem 1.5rem; }

/* Tabs and forms */
.bar {
  display: flex; flex-wrap: wrap; justify-content: space-between; align-items: center;
  gap: .75rem 2rem;
}
.bar h2 { margin: 0; }
.tabs { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; }
.tabs:empty, .tabs small:empty { display: none; }
.tabs a {
  padding: .25rem 0; border-bottom: 2px solid transparent; color: var(--soft);
  text-decoration: none;
}
.tabs a:hover { color: var(--ink); }
.tabs a[aria-current=page] { border-color: var(--accent); color: var(--ink); font-weight: 650; }
.tabs small { margin-left: .25rem; font-size: .8125rem; font-weight: 400; color: var(--soft); }
form, form label { max-width: 100%; }
form {
  display: flex; flex-wrap: wrap; align-items: center; gap: .5rem 1rem; color: var(--soft);
  font-size: .875rem;
}
form label { display: inline-flex; align-items: center; gap: .5rem; }
input, button { font: inherit; color: var(--ink); }
button:hover { color: var(--accent); }
input:not([type=checkbox]) {
  height: 2rem; padding: 0 .5rem; border: 1px solid var(--line); border-bottom-color: var(--soft);
  border-radius: 3px; background: var(--raised);
}
input[type=search] { width: 11rem; }
#search input[type=number] { width: 3.75rem; }
input[type=checkbox] { margin: 0; width: 1rem; height: 1rem; accent-color: var(--accent); }
::placeholder { color: var(--soft); opacity: 1; }
form button {
  height: 2rem; padding: 0 .875rem; border: 1px solid var(--soft); border-radius: 3px;
  background: none; cursor: pointer;
}
form button:hover { border-color: currentColor; }
form.check { margin-top: 1.5rem; }
.check input { width: 16rem; max-width: 100%; }
.check input[type=number] { width: 6rem; }

/* The board: rows are no table's, so that those out of sight cost no layout and a phone can fold
   them.
   Columns: 1 name, 2 game, 3 mode, 4 map, 5 players, 6 version, 7 seen, 8 address */
#status { margin: 1rem 0 .25rem; min-height: 1.5rem; color: var(--soft); font-size: .8125rem; }
#status.old { color: var(--ink); font-weight: 650; }
#status:first-child:empty { display: none; }
table, thead, tbody { display: block; }
tr {
  display: flex; column-gap: .875rem; align-items: center; border-bottom: 1px solid var(--line);
}
thead { position: sticky; top: 0; z-index: 1; background: var(--ground); }
tbody tr { height: 2.5rem; content-visibility: auto; contain-intrinsic-height: 2.5rem; }
tbody tr:hover { background: var(--raised); }
th {
  padding: .25rem 0; color: var(--soft); font-size: .8125rem; font-weight: 400; text-align: left;
}
th button {
  margin: 0 -.25rem; padding: 0 .25rem; border: 0; background: none; color: inherit;
  cursor: pointer; white-space: nowrap;
}
th[aria-sort] { color: var(--ink); }
th[aria-sort] button::after { content: "\00a0↑"; color: var(--accent); }
th[aria-sort=descending] button::after { content: "\00a0↓"; }
td {
  min-width: 0; padding: 0; overflow: hidden; text-overflow: ellipsis; white-space: nowrap;
  max-height: 1.5rem;
}
.one-game :is(th, td):nth-child(2) { display: none; }
td:first-child { display: flex; }
td:first-child a { min-width: 0; overflow: hidden; font-weight: 650; text-decoration: none; }
/* its end, the left one of right-to-left words */
td bdi {
  display: block; overflow: hidden; text-overflow: ellipsis; text-align: left;
}
td:nth-child(n+2) { color: var(--soft); }
td:nth-child(4), td:nth-child(5) { color: var(--ink); }
tr.empty td:first-child a { font-weight: 400; }
tr.empty td:nth-child(n+4), tr.full td { color: var(--soft); }
tr.empty b { font-weight: 400; }
tr.full :is(svg, meter) { opacity: .5; }
td:nth-child(5), td:last-child { display: flex; align-items: center; }
td span { flex: 0 0 4rem; line-height: 1.25rem; }
td svg { width: 3.25rem; height: 1.21875rem; margin-left: .625rem; }
td svg, .totals svg { fill: var(--accent); opacity: .75; }
meter {
  display: block; width: 100%; height: 2px; appearance: none; -webkit-appearance: none; border: 0;
  background: var(--line);
}
meter::-webkit-meter-inner-element { display: block; }
meter::-webkit-meter-bar { height: 2px; border: 0; border-radius: 0; background: var(--line); }
meter::-webkit-meter-optimum-value { background: var(--accent); }
meter::-moz-meter-bar { background: var(--accent); }
i {
  flex: none; margin-left: .5rem; color: var(--soft); font-size: .75rem; font-style: normal;
  font-weight: 400; letter-spacing: 0; white-space: nowrap;
}
td i { line-height: 1.625rem; }
/* the first to give way, then the name */
td i + i { flex: 0 9999 auto; overflow: hidden; text-overflow: ellipsis; }
td a, td .copy { outline-offset: -2px; }
td code { flex: 1; min-width: 0; overflow: hidden; text-overflow: ellipsis; }
td a:hover { text-decoration: underline; }
.copy {
  position: relative; flex: none; width: 1.5rem; height: 1.5rem; margin-left: .25rem; padding: 0;
  border: 0; background: none; color: var(--soft);
  vertical-align: top; cursor: pointer;
}
.copy::before, .copy::after {
  content: ""; position: absolute; width: .5625rem; height: .6875rem; border: 1px solid;
  border-radius: 2px;
}
.copy::before {
  left: .3125rem; top: .3125rem; border-right-color: transparent; border-bottom-color: transparent;
}
.copy::after { left: .5rem; top: .5rem; }
.copy.done::before { display: none; }
.copy.done::after {
  top: .25rem; width: .4375rem; height: .8125rem; border-width: 0 2px 2px 0; border-radius: 0;
  color: var(--accent); rotate: 40deg;
}
section.empty { margin: 3rem 0; max-width: 42rem; }
.empty p + p { margin-top: 1rem; }
pre {
  margin: .25rem 0 1rem; padding: .75rem 1rem; border-left: 2px solid var(--accent);
  background: var(--raised); white-space: pre-wrap;
}

/* Every column has its width, and leaves where there is no room for it; the name has what is left
   */
@media (min-width: 40.01rem) {
  th, td { flex: none; width: 5rem; }
  :is(th, td):first-child { flex: 1; }
  :is(th, td):nth-child(2) { width: 5.5rem; }
  :is(th, td):nth-child(3) { width: 6rem; }
  :is(th, td):nth-child(4), :is(th, td):nth-child(5) { width: 8rem; }
  :is(th, td):last-child { width: 12rem; }
}
@media (max-width: 70rem) { :is(th, td):nth-child(3), :is(th, td):nth-child(6) { display: none; } }
@media (max-width: 60rem) { :is(th, td):nth-child(7) { display: none; } }
@media (min-width: 40.01rem) and (max-width: 52rem) {
  .one-game :is(th, td):nth-child(4) { width: 6rem; }
  table:not(.one-game) :is(th, td):nth-child(4) { display: none; }
}

/* A phone: every row is two lines, name and players above, game, mode, map and address below */
@media (max-width: 40rem) {
  html { scroll-padding-top: 6rem; }
  body { padding: 0 1rem; }
  header { padding: 1.5rem 0 1.25rem; }
  h1 { font-size: 1.375rem; }
  .totals b { font-size: 1.25rem; }
  #search input[type=search] { flex: 1; width: auto; min-width: 0; }
  #search, #search label:has([type=search]) { flex: 1 0 100%; }
  .check input { flex: 1; width: auto; min-width: 0; }
  .check label:first-child { flex: 1 0 100%; }
  thead tr { flex-wrap: wrap; }
  tbody tr {
    display: grid;
    grid-template-columns: fit-content(5rem) fit-content(6rem) minmax(0, 1fr) auto auto;
    column-gap: 0; align-items: start;
    height: 4rem; padding: .5rem 0; contain-intrinsic-height: 4rem;
  }
  :is(th, td):nth-child(3) { display: block; }
  td:first-child { grid-area: 1 / 1 / 2 / 5; margin-right: .75rem; font-size: 1rem; }
  td:nth-child(5) { grid-area: 1 / 5; width: 7.25rem; }
  td:nth-child(2), td:nth-child(3), td:nth-child(4) {
    grid-area: 2 / 1; margin-right: .5rem; color: var(--soft); font-size: .8125rem;
  }
  td:nth-child(3) { grid-column: 2; }
  td:nth-child(4) { grid-column: 3; }
  td:last-child { grid-area: 2 / 4 / 3 / 6; justify-content: end; }
  td:last-child code { flex: 0 1 auto; max-width: 10.5rem; font-size: .75rem; }
  td span { flex-basis: 3.5rem; }
  form { gap: .5rem .875rem; font-size: .8125rem; }
}
/* and where text is twice as large on it: the name, and how many play */
@media (max-width: 19.99rem) {
  td:nth-child(5) { width: 3.5rem; }
  td svg, td i { display: none; }
}

/* One server, one check */
h1, h3, dd, li, pre, .from { overflow-wrap: anywhere; }
h1 i { margin: 0 .5rem 0 0; vertical-align: .25rem; }
.play {
  display: inline-block; margin-top: 1rem; padding: .25rem .875rem; border: 1px solid var(--accent);
  border-radius: 3px; color: var(--accent);
  font-weight: 650; text-decoration: none;
}
.play:hover { background: var(--accent); color: var(--ground); }
dl {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 16rem), 1fr));
  gap: 1rem 2rem; margin: 0;
}
dl div { min-width: 0; padding-top: .5rem; border-top: 1px solid var(--line); }
dl .wide { grid-column: 1 / -1; max-width: 48rem; }
img { max-width: 100%; height: auto; }
dt { color: var(--soft); font-size: .8125rem; line-height: 1.25rem; }
.findings, .servers { margin: 0; padding: 0; list-style: none; }
.findings { max-width: 48rem; }
.findings li, .servers li { overflow: hidden; }
.findings li { padding: 1rem 0; border-top: 1px solid var(--line); }
.findings li:first-child {
  border-left: 2px solid var(--accent); padding-left: 1rem; border-top: 0;
}
.from, figcaption { margin-top: .25rem; color: var(--soft); font-size: .8125rem; }
.servers small { margin-left: .5rem; color: var(--soft); white-space: nowrap; }
.servers code { margin-left: .5rem; }
.error { padding: 3rem 0; }
.error .status { color: var(--accent); font-size: 3rem; line-height: 3.5rem; font-weight: 650; }
.error .lead { margin: .5rem 0 1.5rem; max-width: 42rem; }

/* A chart: text keeps its size at every width, only the line inside is stretched */
figure { margin: .75rem 0 0; }
.chart { display: block; width: 100%; height: 16rem; overflow: visible; }
.chart text { fill: var(--soft); font-size: .75rem; }
.chart .grid { stroke: var(--line); }
.chart .axis { stroke: var(--soft); }
.chart svg { overflow: visible; }
.chart path {
  vector-effect: non-scaling-stroke; stroke-linejoin: round; stroke-linecap: round; fill: none;
}
.chart .peak { fill: var(--accent); opacity: .18; }
.chart .mean { stroke: var(--accent); stroke-width: 1.75; }
.chart circle { fill: var(--ground); stroke: var(--accent); stroke-width: 1.5; }
.chart .label {
  fill: var(--ink); paint-order: stroke; stroke: var(--ground); stroke-width: 4px;
  stroke-linejoin: round;
}
.chart .latest { fill: var(--accent); font-size: .9375rem; font-weight: 650; }
.middle { text-anchor: middle; }
.end { text-anchor: end; }
@media (max-width: 40rem) {
  .chart { height: 13rem; }
  .chart .minor { display: none; }
  /* numbers too long for the margins stand in the plot: over their gridline and the
     line */
  .chart .tick.long { text-anchor: start; transform: translate(12px, -9px); }
  .chart .latest.long { text-anchor: end; transform: translate(-8px, -16px); }
}
@media print {
  form, .copy, footer { display: none; }
  tr, li, dl div, figure { break-inside: avoid; }
}
"""

APP_JS = r"""'use strict';
// Every page is complete without this script. It adds: search as you type, sorting, hiding, copy
// buttons, and a refresh every five seconds that touches only what has changed.

const REFRESH_MS = 5000;            // as long as caches keep a page
const ANSWER_MS = 10000;            // two of those: packets that were lost have come again
const FADE_MS = 1600;               // to be seen by who looks elsewhere
const COPIED_MS = 1500;             // likewise
const TYPING_MS = 300;              // longer than from key to key
const PLAYERS_MAX = 65535;          // as the master counts them
const COLUMNS = ['name', 'game', 'mode', 'map', 'players', 'version', 'seen', 'address'];
const PLAYERS = 4, SEEN = 6, ADDRESS = 7;
const table = document.querySelector('#servers');
const LIVE = table ? '#servers' : '[data-live]';    // what a refreshed page must have too
const rowsOf = page => [...page.querySelectorAll('#servers tbody tr')];
const make = (tag, properties) => Object.assign(document.createElement(tag), properties);
const put = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};

// ---- Times: relative, the exact one in the title. The master's clock counts, known from Date.

let skew = 0;

function ago(seconds) {
  if (seconds < 1) return 'now';
  for (const [unit, size, next] of [['s', 1, 90], ['min', 60, 5400], ['h', 3600, 129600]])
    if (seconds < next) return Math.floor(seconds / size) + ' ' + unit + ' ago';
  return Math.floor(seconds / 86400) + ' d ago';
}

function tellTimes() {
  const now = Date.now() + skew;
  for (const time of document.querySelectorAll('time, td[title]'))
    put(time, ago((now - Date.parse(time.title)) / 1000));
}

// ---- Copy: a button beside each <code>, which says what it did to the eye and to the ear

const said = make('div', {className: 'unseen'});
said.setAttribute('role', 'status');
document.body.append(said);

function addCopyButtons(root) {
  for (const code of root.querySelectorAll('code:not(.from code)')) {
    const button = make('button', {type: 'button', className: 'copy', title: 'Copy'});
    button.setAttribute('aria-label', 'Copy ' + code.textContent);
    code.after(button);
  }
}

document.addEventListener('click', async event => {
  const button = event.target.closest('.copy');
  if (!button) return;
  const text = button.previousElementSibling.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {                         // plain http has no clipboard: copy a selection instead
    const area = make('textarea', {value: text, className: 'unseen'});
    document.body.append(area);
    area.select();
    document.execCommand('copy');
    area.remove();
    button.focus({preventScroll: true});
  }
  said.textContent = 'Copied ' + text;
  button.classList.add('done');
  setTimeout(() => {
    button.classList.remove('done');
    said.textContent = '';
  }, COPIED_MS);
});

// ---- The view: what is searched, sorted and hidden. It is kept in the address, for links.

const linked = new URLSearchParams(location.search);
const view = {
  name: linked.get('name') || '',
  players_min: linked.get('players_min') || '',
  hide: (linked.get('hide') || '').split(',').filter(Boolean),
  sort: linked.get('sort') || '',
};
const NUMBERS = ['players', 'seen'];                // sorted with the largest first
const collator = new Intl.Collator(undefined, {numeric: true, sensitivity: 'base'});
const players = row => parseInt(row.cells[PLAYERS].textContent);
// ß as ss: what Python's casefold() takes for one is one
const fold = text => text.toLowerCase().toUpperCase();
const nameOf = row => row.querySelector('bdi').textContent;
const labelOf = element => element.getAttribute('aria-label') || element.getAttribute('href');
const keyOf = row => row.querySelector('a').getAttribute('href');
let order = [];                                     // the rows in the master's order
let capped = false;         // the master has more rows than a page shows: it must search

function viewQuery() {
  const query = new URLSearchParams(location.search);
  const players_min = +view.players_min ? view.players_min : '';
  for (const [key, value] of [['name', view.name], ['players_min', players_min],
                              ['hide', view.hide.join(',')], ['sort', view.sort]])
    value ? query.set(key, value) : query.delete(key);
  return query;
}

function keepView() {
  const query = viewQuery(), search = String(query) && '?' + query;
  if (search !== location.search) history.replaceState(null, '', location.pathname + search);
  for (const link of document.querySelectorAll('#tabs a')) {
    const game = new URL(link.href).searchParams.get('game');
    game ? query.set('game', game) : query.delete('game');
    link.href = '/?' + query;
  }
}

function wanted(row) {              // a part of the name or of the address, as the master searches
  // Nothing invisible is in a name, and keyboards write some behind emoji
  const name = fold(view.name.replace(/\p{DI}/gu, '').trim());
  const endpoint = row.querySelector('code').textContent;
  const address = name.includes(':') ? endpoint : endpoint.replace(/^\[|\]?:\d+$/g, '');
  return players(row) >= (+view.players_min || 0) && !view.hide.includes(row.className)
    && [nameOf(row), address].some(text => fold(text).includes(name));
}

function sorted(rows) {
  const by = view.sort.replace('-', ''), sign = view.sort.startsWith('-') ? -1 : 1;
  const column = COLUMNS.indexOf(by);
  if (column < 0) return rows;
  const values = {name: nameOf, players, seen: row => Date.parse(row.cells[SEEN].title)};
  const value = values[by] || (row => row.cells[column].textContent);
  const compare = NUMBERS.includes(by) ? (a, b) => a - b : collator.compare;
  return rows.map(row => [value(row), row])
    .sort((a, b) => sign * compare(a[0], b[0]))
    .map(pair => pair[1]);
}

function show() {
  for (const row of order) row.hidden = !wanted(row);
  const rows = sorted(order), body = table.tBodies[0];
  let place = body.firstElementChild;
  if (rows.filter((row, index) => body.rows[index] !== row).length > 100) body.append(...rows);
  else for (const row of rows) {    // a few rows move: leave the others where they are
    if (place && place !== row && place.nextElementSibling === row) place = row;
    if (place === row) place = row.nextElementSibling;
    else body.insertBefore(row, place);
  }
  for (const [index, head] of [...table.tHead.rows[0].cells].entries()) {
    const direction = view.sort.startsWith('-') ? 'descending' : 'ascending';
    if (COLUMNS[index] === view.sort.replace('-', '')) head.setAttribute('aria-sort', direction);
    else head.removeAttribute('aria-sort');
  }
  tellStatus();
}

// ---- The refresh

let lastText, lastUrl, lastAnswer = Date.now(), failed = '', asking = false, pause;
const lastParts = new Map();
const number = n => n.toLocaleString('en');

function statusText() {
  if (failed)
    return failed + ' This ' + (table ? 'list' : 'page') + ' is from '
      + new Date(lastAnswer).toLocaleString() + '.';
  if (!table) return '';
  const visible = order.filter(row => !row.hidden).length;
  const total = Math.max(+table.dataset.total, order.length);
  if (total > order.length)
    return number(visible) + ' of ' + number(total)
      + ' servers. Search by name to find the others.';
  if (!visible) return table.hidden ? '' : 'No server matches.';
  if (visible < total) return number(visible) + ' of ' + number(total) + ' servers shown';
  return number(total) + (total === 1 ? ' server' : ' servers');
}

function tellStatus() {
  const status = document.querySelector('#status');
  if (!status) return;              // an operator's own template may have none
  status.classList.toggle('old', failed !== '');
  put(status, statusText());
}

function source(search = capped) {  // filters stay here, unless the master has too many rows
  if (!table) return location.pathname + location.search;
  const query = new URLSearchParams(), now = viewQuery();
  for (const key of search ? ['game', 'name', 'players_min'] : ['game'])
    if (now.get(key)) query.set(key, now.get(key));
  return location.pathname + (String(query) && '?' + query);
}

function fade(element) {
  if (!matchMedia('(prefers-reduced-motion: reduce)').matches)
    element.animate([{backgroundColor: 'var(--glow)'}, {backgroundColor: 'transparent'}], FADE_MS);
}

function patchRow(row, fresh) {
  row.className = fresh.className;
  for (const [index, cell] of [...fresh.cells].entries()) {
    const old = row.cells[index];
    // The address never changes, and has a copy button
    if (index === ADDRESS || old.isEqualNode(cell)) continue;
    if (index === SEEN) old.title = cell.title;
    old.replaceChildren(...cell.childNodes);
    if (index !== SEEN) fade(old);                  // which always moves
  }
}

function patchRows(page, fading) {
  const known = new Map(order.map(row => [keyOf(row), row]));
  order = rowsOf(page).map(fresh => {
    const key = keyOf(fresh), row = known.get(key);
    if (row) {
      patchRow(row, fresh);
      known.delete(key);
      return row;
    }
    addCopyButtons(fresh);
    if (fading) setTimeout(fade, 0, fresh);
    return fresh;
  });
  for (const gone of known.values()) gone.remove();
  table.dataset.total = page.querySelector('#servers').dataset.total;
}

function patchTable(page, fading) {
  const held = document.activeElement, row = held.closest('#servers tbody tr');
  const inAddress = row && row.cells[ADDRESS].contains(held);
  patchRows(page, fading);
  if (table.hidden !== page.querySelector('#servers').hidden) {
    // The first server has come, or the last one gone
    const empty = page.querySelector('#empty');
    addCopyButtons(empty);
    document.querySelector('#empty').replaceWith(empty);
    table.hidden = !table.hidden;
  }
  show();
  if (row && row.isConnected && document.activeElement !== held) {
    // A row that moved or changed keeps the focus
    const heir = (inAddress ? row.cells[ADDRESS] : row).querySelector(held.tagName);
    (held.isConnected ? held : heir).focus({preventScroll: true});
  }
}

function patchParts(page) {
  const held = document.activeElement;
  for (const part of document.querySelectorAll('[data-live]')) {
    const fresh = page.getElementById(part.id), text = fresh && fresh.innerHTML;
    if (!fresh || text === lastParts.get(part.id)) continue;
    addCopyButtons(fresh);
    const within = part.contains(held);
    const heir = within && [...fresh.querySelectorAll(held.tagName)]
      .find(element => labelOf(element) === labelOf(held));
    if (within && !heir) continue;
    lastParts.set(part.id, text);
    part.replaceChildren(...fresh.childNodes);
    if (heir) heir.focus({preventScroll: true});
  }
}

function reading() {                // text is held selected: nothing may move under it
  const selection = getSelection();
  return !selection.isCollapsed && [...document.querySelectorAll('#servers, [data-live]')]
    .some(part => selection.getRangeAt(0).intersectsNode(part));
}

function takePage(url, text) {
  const page = new DOMParser().parseFromString(text, 'text/html');
  if (!page.querySelector(LIVE)) throw new Error('a page of a proxy, such as one to log in');
  if (url !== source()) return;     // the view moved on
  if (table && url === source(false))
    capped = +page.querySelector('#servers').dataset.total > rowsOf(page).length;
  if (url !== source()) return;     // the master has too many rows: ask it to search
  patchParts(page);
  if (table) patchTable(page, url === lastUrl);
  [lastText, lastUrl] = [text, url];
}

async function refresh() {
  if (document.hidden || asking || reading()) return;
  asking = true;
  const url = source();
  const late = new AbortController();               // AbortSignal.timeout() is too young
  setTimeout(() => late.abort(), ANSWER_MS);
  try {
    const answer = await fetch(url, {cache: 'no-cache', signal: late.signal});
    if (!answer.ok) throw answer.status;
    const text = await answer.text();
    if (text !== lastText) takePage(url, text);
    skew = Date.parse(answer.headers.get('date')) - Date.now() || 0;
    if (Math.abs(skew) < 2000) skew = 0;            // Date has whole seconds, and took its time
    lastAnswer = Date.now();
    failed = '';
  } catch (error) {
    failed = error === 404 && !table ? 'This server is not listed any more.'
      : error > 0 ? 'The master answers with error ' + error + '.' : 'The master does not answer.';
  }
  asking = false;
  if (!reading()) tellTimes();
  tellStatus();
  if (url !== source()) refresh();                  // the view moved on while the answer came
  if (table) keepView();                            // tabs may be new
}

// ---- Start

for (const part of document.querySelectorAll('[data-live]'))
  lastParts.set(part.id, part.innerHTML);
addCopyButtons(document);

function startSearch(form) {
  form.elements.name.value = view.name;             // a browser may put back what stood there
  form.elements.players_min.value = view.players_min;
  form.querySelector('button').hidden = true;
  for (const word of ['empty', 'full']) {
    const box = make('input', {type: 'checkbox', value: word, checked: view.hide.includes(word)});
    const label = make('label');
    label.append(box, 'Hide ' + word);
    form.append(label);
  }
  form.addEventListener('submit', event => event.preventDefault());
  form.addEventListener('input', () => {
    const least = Math.ceil(form.elements.players_min.value);
    view.name = form.elements.name.value;
    view.players_min = String(Math.min(PLAYERS_MAX, Math.max(0, least)) || '');
    view.hide = [...form.querySelectorAll(':checked')].map(box => box.value);
    show();
    clearTimeout(pause);
    if (capped) pause = setTimeout(refresh, TYPING_MS);         // the master counts searches
    keepView();
  });
}

function startSorting() {
  for (const [index, head] of [...table.tHead.rows[0].cells].entries()) {
    const button = make('button', {type: 'button', textContent: head.textContent});
    const up = COLUMNS[index], down = '-' + up;
    const ways = NUMBERS.includes(up) ? [down, up, ''] : [up, down, ''];
    head.replaceChildren(button);
    button.addEventListener('click', () => {        // one way, the other way, the master's order
      view.sort = ways[(ways.indexOf(view.sort) + 1) % 3];
      show();
      keepView();
    });
  }
}

if (table) {
  order = rowsOf(document);
  capped = +table.dataset.total > order.length;
  const form = document.querySelector('#search');
  if (form) startSearch(form);      // an operator's own template may have none
  startSorting();
  keepView();
  show();
  if (view.name || view.players_min) refresh();     // it came filtered: fetch the rest
}

if (document.querySelector(LIVE)) {
  setInterval(refresh, REFRESH_MS);
  document.addEventListener('visibilitychange', refresh);
}
"""


class Html(str):
    """Text that is HTML already; everything else is escaped by fill()."""


def markup(value):
    """HTML as it is, a list piece by piece, everything else escaped."""
    if isinstance(value, list):
        return "".join(map(markup, value))
    return value if isinstance(value, Html) else html.escape(str(value))


def fill(template, **values):
    """The template with the markup() of every value in its place; KeyError: one is missing."""
    return Html(string.Template(template).substitute(
        {key: markup(value) for key, value in values.items()}))


class PageContext(NamedTuple):
    """What the operator has chosen for the pages."""

    title: str
    intro: str
    template: str                   # LIST_PAGE or his own
    games: Mapping[str, str]        # their titles
    url: str                        # where the pages are reached from outside, or ""

    def game_title(self, game):
        return self.games.get(game, game)


def list_template(text):
    """Raise ValueError if this is no list page: what does not parse, or is unknown."""
    known = "title intro head totals tabs search table foot".split()
    try:
        string.Template(text).substitute(dict.fromkeys(known, ""))
    except KeyError as error:
        raise ValueError("unknown placeholder $%s (there are: %s)"
                         % (error.args[0], ", ".join(known))) from None


def ago(seconds):
    """12 -> '12 s ago'. The same steps as in the script."""
    if seconds < 1:
        return "now"
    for unit, size, following in ("s", 1, 90), ("min", 60, 5400), ("h", 3600, 129600):
        if seconds < following:
            return "%d %s ago" % (seconds // size, unit)
    return "%d d ago" % (seconds // 86400)


def utc(wall):
    return datetime.fromtimestamp(wall, timezone.utc)


def iso(wall):
    return utc(wall).strftime("%Y-%m-%dT%H:%M:%SZ")


def time_tag(then, wall):
    return fill('<time datetime="$exact" title="$exact">$words</time>',
                exact=iso(then), words=ago(wall - then))


def mode_words(server):
    """The server's mode as players call it."""
    if server.game in QUAKE3_MODES_OF:
        return QUAKE3_MODES.get(server.mode, server.mode)
    return server.mode


def server_link(server, path="/server"):
    quote = urllib.parse.quote
    return "%s?game=%s&address=%s&port=%d" % (
        path, quote(server.game), quote(server.address), server.port)


def badges(server):
    has = {"official": server.official, "unconfirmed": not server.confirmed,
           "self-reported": server.verified == "self-reported",
           "not responding": not server.responding}
    return Html("".join([
        ' <i title="%s">%s</i>' % (title, word) for word, title in BADGES.items() if has[word]]))


def plural(number, word):
    return "%s %s%s" % (format(number, ","), word, "" if number == 1 else "s")


def page(look, title, template=PAGE, about="", path="", **values):
    """A whole page as UTF-8; `title`: what it is of, "": everything; `about`: a sentence that a
    chat shows beside a link to it, at `path`."""
    title = " · ".join(filter(None, (title, look.title)))
    head = fill(HEAD, title=title, about=about or title, site=look.title,
                link=look.url and path and fill(HEAD_LINK, url=look.url + path))
    return fill(template, title=look.title, head=head, foot=Html(FOOT), **values).encode()


def tab(link, text, current, count=""):
    return fill(TAB, link=link, text=text, current="page" if current else "false", count=count)


# The list

def server_row(server, spark, title):
    """One row of the list, about 630 bytes, in two pieces.

    The time at which the server was last seen comes between, as it moves when nothing else does.
    `spark` is sparkline(...), `title` the game's."""
    escape, quote = html.escape, urllib.parse.quote
    address = escape(endpoint_text(server.address, server.port))
    bar, state = "", ""
    if server.max_players:
        bar = METER % (server.max_players, server.max_players, server.players)
        if server.players >= server.max_players:
            state = ' class="full"'
    if not server.players:
        state = ' class="empty"'
    before = ROW % (
        state, quote(server.game), quote(server.address), server.port,
        escape(server.name) or address, badges(server), escape(title),
        escape(mode_words(server)), escape(server.map), server.players, bar, spark,
        escape(server.version))
    if server.game == "iceball":
        address = '<a href="iceball://%s" title="Start the game">%s</a>' % (address, address)
    return before, ROW_END % address


def list_rows(look, servers, recent, epoch, wall):
    """`recent`: the last day's hourly player counts by server; `epoch`: see Web."""
    made = cached_entries(servers, "row", lambda server: server_row(
        server, sparkline(recent.get(server.key, ())), look.game_title(server.game)))
    rows = []
    for server, (before, after) in zip(servers, made):
        seen = server.last_seen + epoch
        rows.append('%s title="%s">%s%s' % (before, iso(seen), ago(wall - seen), after))
    return Html("".join(rows))


def sparkline(values):
    """24 hourly values, None where there is none: a histogram of about 160 bytes.

    Empty if nothing is known."""
    known = [value for value in values if value is not None]
    if not known:
        return Html("")
    crowd = max(SPARK_CROWD, max(known))
    # 9 is the ground: away. 8: here and empty. 0: the day's peak
    levels = [9 if value is None else 8 - round(8 * value / crowd) for value in values]
    steps = "".join(["V%dh1" % level for level in levels])
    return Html('<svg aria-hidden="true" viewBox="0 0 24 9"><path d="M0 9%sV9"/></svg>' % steps)


def game_tabs(look, counts, game):
    """All games, those with servers and the one chosen; nothing where that is one."""
    shown = [id for id in look.games if id in counts or id == game]
    tabs = [tab("/", "All games", not game, format(sum(counts.values()), ","))]
    for id in shown:
        tabs.append(tab("/?game=" + urllib.parse.quote(id), look.games[id], id == game,
                        format(counts.get(id, 0), ",")))
    return fill(TABS, tabs=tabs if len(shown) > 1 else "")


def list_status(total, filtered):
    servers = plural(total, "server")
    if total > PAGE_ROWS:
        return "The first %s of %s. Search by name to find the others." % (
            format(PAGE_ROWS, ","), servers)
    if total:
        return servers
    return "No server matches." if filtered else ""


def list_page(look, wanted, servers, rows, counts, contacts, spark):
    """wanted: a ListFilter; servers: all that match; rows: list_rows() of the first; counts: how
    many servers a game has; contacts: contact_lines(), shown while nobody is listed; spark: the
    day's sparkline of all players."""
    game, total = wanted.game, len(servers)
    state, empty = ' class="one-game"' if game else "", ""
    status = list_status(total, wanted.name or wanted.players_min)
    if not status:
        # Not there when there are servers, instead of hidden: a browser for text shows all
        state, empty = state + " hidden", fill(EMPTY, hint=[
            fill(HINT, whom=whom, what=what) for id, whom, what in contacts if game in ("", id)])
    players = plural(sum([server.players for server in servers]), "player")
    totals = re.sub("[0-9,]+", r"<b>\g<0></b>", players + " on " + plural(total, "server"))
    crowded = [server for server in servers if server.players]
    about = "%s on %d of %s: %s" % (players, len(crowded), plural(total, "server"), ", ".join([
        "%s %d" % (server.name or endpoint_text(server.address, server.port), server.players)
        for server in crowded[:PREVIEW_NAMES]]))
    return page(
        look, look.games.get(game), look.template, about.rstrip(": "),
        "/?game=" + game if game else "/", intro=fill("<p>$text</p>\n", text=look.intro),
        totals=fill(TOTALS, spark=spark, totals=Html(totals)), tabs=game_tabs(look, counts, game),
        search=fill(SEARCH, game=game, name=wanted.name, players_min=wanted.players_min or ""),
        table=fill(TABLE, status=status, total=total, rows=rows, state=Html(state), empty=empty))


# One server, one check, an error

def uptime(series, first_seen):
    """The share of the samples with the server, since it is known; "" if there is none."""
    samples = series.means[max(0, int((first_seen - series.start) // series.step)):]
    here = len(samples) - samples.count(None)
    # Rounded down: 100 only if always
    return samples and "%.4g %% of the time" % (1000 * here // len(samples) / 10)


# Of no interest to players: programs ask for servers by the gamename. The others are in records of
# older versions only
UNSHOWN_DETAILS = "gamename", "tag", "players_online"
DESCRIPTION = "Description"


def server_facts(server):
    """What is shown of a server that is listed; what is empty is left out."""
    players = str(server.players)
    if server.max_players:
        players += " of %d" % server.max_players
    if server.playing is not None:
        players += ", %d of them playing" % server.playing
    facts = [
        ("Players", players),
        ("Mode", mode_words(server)),
        ("Map", server.map),
        ("Version", server.version),
        (DESCRIPTION, server.description),
        ("Ping from this master", server.ping_ms and "%.0f ms" % server.ping_ms),
        ("Verified", VERIFIED[server.verified])]
    for name, value in server.details.items():
        if name not in UNSHOWN_DETAILS:
            facts.append((name.replace("_", " ").capitalize(), value))
    facts.append(("Players online", ", ".join(server.luanti_announcement.get("clients_list", ()))))
    return facts


def fact(name, value):
    """One fact of a server; a description has a line of its own."""
    width = Html(' class="wide"') if name == DESCRIPTION else ""
    return fill(FACT, width=width, name=name, value=value)


def server_lead(server, game, listed, wall):
    """What stands below its name; game: its title."""
    if not listed:
        return fill(GONE, seen=time_tag(server.last_seen, wall), link=server_link(server, "/check"))
    return Html(" · ".join([fill("<bdi>$part</bdi>", part=part)
                            for part in (game, mode_words(server), server.map) if part]))


def server_page(look, server, listed, series, span, wall, base):
    """One server, its times the wall clock's. Of one that is not `listed` the name and the times
    are known. series: of the span, see chart(); None where no history is kept. base: where other
    pages reach this one."""
    address, game = endpoint_text(server.address, server.port), look.game_title(server.game)
    name, marks, play, history = server.name or address, "", "", ""
    link, lead = server_link(server), server_lead(server, game, listed, wall)
    about = plural(server.players, "player") + " · " if listed else ""
    about += re.sub("<a .*|<.+?>", "", lead)
    facts = [("Address", fill("<code>$address</code>", address=address)), ("Game", game)]
    if listed:
        marks = badges(server)
        facts += server_facts(server)
        play = fill(PLAY, address=address) if server.game == "iceball" else ""
    if series:
        history = fill(HISTORY, chart=chart(series, wall), tabs=[
            tab(link + "&span=" + key, key.capitalize(), key == span) for key in SPANS])
        facts.append(("Uptime, past " + span, uptime(series, server.first_seen)))
    facts += [("First seen", time_tag(server.first_seen, wall)),
              ("Last seen", time_tag(server.last_seen, wall))]
    return page(look, name, about=Html(about), path=link, main=fill(
        SERVER_PAGE, name=name, badges=marks, lead=lead, play=play, history=history, link=link,
        image=server_link(server, "/banner.svg"), base=base, address=address,
        facts=[fact(name, value) for name, value in facts if value]))


def check_page(look, address, port, findings, listed, wall):
    """What became of what an address sent.

    port: 0 for any; findings: filled FINDINGs; listed: its servers, their times the wall clock's.
    """
    whom = endpoint_text(address, port) if port else address
    verdict = "Nothing at %s is listed now" % whom
    if listed:
        verdict = "Listed now: " + plural(len(listed), "server")
    rows = []
    for server in listed:
        peer = endpoint_text(server.address, server.port)
        rows.append(fill(
            LISTED, link=server_link(server), name=server.name or peer, badges=badges(server),
            peer=peer, seen=time_tag(server.last_seen, wall)))
    found = fill(FINDINGS, items=findings) if findings else fill(NOTHING_ARRIVED, whom=whom)
    return page(look, "Is my server listed?", main=fill(
        CHECK_PAGE, address=address, port=port or "", verdict=verdict, listed=rows,
        findings=found))


def error_page(look, status, reason, hint):
    return page(look, reason, main=fill(ERROR_PAGE, status=status, reason=reason, hint=hint))


# The chart of one server's players

CHART = """\
<figure>
<svg class="chart" role="img" aria-labelledby="chart-title">\
<title id="chart-title">Players from $start to $end</title>
$marks
</svg>
<figcaption>Peak $peak at $peak_time. Latest $latest, $latest_time. Times are UTC.</figcaption>
</figure>
"""
NO_HISTORY = """\
<p class="lead">No history in this span yet. A sample is taken every minute.</p>
"""
VALUE_MARK = """\
<line class="$kind" x1="6%" x2="92%" y1="$y" y2="$y"/>\
<text class="tick$long end" x="6%" y="$y" dx="-6" dy="4">$words</text>
"""
TIME_MARK = """\
<line class="axis$minor" x1="$x" x2="$x" y1="86%" y2="88%"/>\
<text class="middle$minor" x="$x" y="95%">$words</text>
"""
CURVES = """\
<svg x="6%" y="14%" width="86%" height="72%" viewBox="0 0 $points 100" preserveAspectRatio="none">\
<path class="peak" d="$area"/><path class="mean" d="$line"/></svg>
"""
PEAK_DOT = """\
<circle cx="$x" cy="$y" r="3"/>"""
PEAK_MARK = """\
<text class="label middle" x="$x" y="$y" dy="-9">peak $words</text>
"""
LATEST_MARK = """\
<text class="label latest$long" x="$x" y="$y" dx="6" dy="5">$words</text>
"""

TIME_STEPS = (      # the longest span in days, seconds from tick to tick, their words
    (2, 10800, "%H:%M"), (10, 86400, "%a %d"), (100, 5 * 86400, "%d %b"), (366, 86400, "%b"))


def value_ticks(top):
    """Round whole numbers from 0 to at least `top`, CHART_GRIDLINES above zero at most."""
    most = max(1, math.ceil(top))
    step = next(factor * 10 ** power for power in range(10) for factor in (1, 2, 5)
                if factor * 10 ** power * CHART_GRIDLINES >= most)
    return list(range(0, most + step, step))


def time_ticks(start, end):
    """Round times within a span with their words: hours in a day, days in a week, dates, months."""
    step, words = next(row[1:] for row in TIME_STEPS if end - start <= row[0] * 86400)
    ticks = range(math.ceil(start / step) * step, math.floor(end) + 1, step)
    return [(tick, utc(tick).strftime(words)) for tick in ticks
            if words != "%b" or utc(tick).day == 1]


def minute(wall):
    return iso(wall)[:16].replace("T", " ")


def mark(template, words, x, y, **more):
    """`x` and `y`: its place in the plot, from 0 to 1.

    The plot takes 6 % to 92 % of the width, as there are numbers left and right of it, and 14 % to
    86 % of the height: the peak's label stands above."""
    return fill(template, words=words, x="%.5g%%" % (6 + 86 * x), y="%.4g%%" % (86 - 72 * y),
                **more)


def axes(ticks, start, end):
    long = " long" if ticks[-1] > 999 else ""       # more than a phone's margins hold
    marks = [mark(VALUE_MARK, format(tick, ","), 0, tick / ticks[-1], long=long,
                  kind="grid" if tick else "axis") for tick in ticks]
    for index, (tick, words) in enumerate(time_ticks(start, end)):
        marks.append(mark(TIME_MARK, words, (tick - start) / (end - start), 0,
                          minor=" minor" * (index % 2)))
    return marks


def curves(known, count, top):
    """The mean as a line, the peaks as an area of bars; and the mean's last point."""
    every = math.ceil(count / CHART_POINTS)
    line, area, following, level = "", "", -1, 0.0
    for at, samples in itertools.groupby(known, lambda sample: sample[0] // every * every):
        _, means, peaks = zip(*samples)
        level = sum(means) / len(means)
        pen = "L" if at == following else "M"          # a gap is a gap
        # h.01: a sample alone is a dot
        line += "%s%d %.4gh.01" % (pen, at, 100 - 100 * level / top)
        area += "M%d 100V%.4gh%dV100" % (at, 100 - 100 * max(peaks) / top, every)
        following = at + every
    return fill(CURVES, points=count, area=area, line=line), level


def chart(series, wall):
    """Players over time as inline SVG, about 13 kB.

    The plot is stretched to the width at hand; the text around it keeps its size."""
    start, step, count = series.start, series.step, len(series.means)
    known = [sample for sample in zip(range(count), series.means, series.peaks)
             if sample[1] is not None]          # else the server was away
    if not known:
        return Html(NO_HISTORY)
    last, (peak_at, _, peak) = known[-1][0], max(known, key=lambda sample: sample[2])
    ticks = value_ticks(peak)
    drawing, level = curves(known, count, ticks[-1])
    latest = format(round(level, 1) if level < 10 else round(level), ",g")
    latest_at = min(wall, start + (last + 1) * step)
    x, y, words = peak_at / count, peak / ticks[-1], format(round(peak, 1), ",")
    marks = [
        *axes(ticks, start, start + count * step), drawing, mark(PEAK_DOT, "", x, y),
        mark(PEAK_MARK, words, min(max(x, .04), .96), y),       # within the page
        mark(LATEST_MARK, latest, last / count, level / ticks[-1],
             long=" long" if len(latest) > 2 else "")]
    return fill(
        CHART, start=minute(start), end=minute(start + count * step), peak=words, marks=marks,
        peak_time=minute(start + peak_at * step), latest=latest,
        latest_time=time_tag(latest_at, wall))

# ================================================================================================
# 9  Web
#
# The page and the lists over HTTP. http.server parses a request and formats its response, over
# bytes in memory; one function a route makes the answer. Every response carries `Length` beside
# `Content-Length`: the Iceball client exits without it. Lists, and whole responses by the bytes of
# their requests, are kept until the next tick, so the common request is one look-up.
# ================================================================================================

GAME_TITLES = {"iceball": "Iceball", "hyperbol": "Hyperbol", "subspace": "SubSpace", "aio": "AIO",
               "luanti": "Luanti", "quake3": "Quake III family", **QUAKE3_TITLES}

SEARCH_SERVERS = 1000               # looked through for what one request costs, some 4 ms

JSON_TYPE = "application/json; charset=utf-8"
HTML_TYPE = "text/html; charset=utf-8"
TEXT_TYPE = "text/plain; charset=utf-8"

NO_FIELDS: Dict[str, str] = {}
RETRY_AFTER = {"Retry-After": "5"}
FIELDS = {                          # of every response that has none of its own
    "Content-Security-Policy":
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
BANNER_FIELDS = {       # its style stands in it: a picture on another page can load none
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Cache-Control": "public, max-age=60", "Vary": "Accept-Encoding",
}
METHODS_KNOWN = "GET HEAD POST PUT DELETE OPTIONS PATCH TRACE CONNECT".split()      # others: 501


class HttpError(Exception):
    """A request that gets an error: its status, and in words what was wrong."""

    def __init__(self, status, hint, fields=NO_FIELDS):
        super().__init__(hint)
        self.status, self.fields = status, fields


class DiskNeeded(Exception):
    """Raised by a route, with a job for the disk thread; then the route is asked again."""


class HttpResponse:
    """What a route gives: the body, and what else stands in the head."""

    def __init__(self, body, type=TEXT_TYPE, status=200, fields=NO_FIELDS):
        self.body, self.status = body, status
        self.fields = {"Content-Type": type, "Cache-Control": "no-store", **fields}

    @functools.cached_property
    def gzipped(self):
        return gzip.compress(self.body, GZIP_LEVEL, mtime=0)


def public(body, type):
    """The same for everybody: caches may keep it for CACHE_S, our own until the next tick."""
    return HttpResponse(body, type, fields={
        "ETag": 'W/"%s"' % hashlib.blake2b(body, digest_size=8).hexdigest(),
        "Vary": "Accept-Encoding", "Cache-Control": "public, max-age=%d" % CACHE_S})


# json.dumps() makes an encoder at each call, a quarter of the time that one server takes
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def to_json(value):
    """Compact, raw UTF-8: the Iceball client fails on any \\u escape. Texts are clean, so that none
    is needed."""
    return ENCODER.encode(value).encode()


# --- One request ---------------------------------------------------------------------------------

# A pattern that begins with the line end before would take 15 times as long
HEAD_END = re.compile(rb"\n\r?\n")
HEADER_LINES = re.compile(rb"([!#-'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*\r?\n)*\r?\n")


def head_end(data):
    """Where the body begins, 0 if that is not here yet; HttpError for what can be no request."""
    line = data.partition(b"\n")[0]
    if not line[:1].isalpha():
        raise HttpError(400, "This is not an HTTP request; this port speaks HTTP without TLS.")
    if len(line) > HTTP_LINE_BYTES:
        raise HttpError(414, "The request line is longer than %d bytes." % HTTP_LINE_BYTES)
    match = HEAD_END.search(data)
    end = match.end() if match else 0
    if (end or len(data)) > HTTP_HEAD_BYTES:
        raise HttpError(431, "The headers are longer than %d bytes." % HTTP_HEAD_BYTES)
    return end


class HttpRequest(http.server.BaseHTTPRequestHandler):
    """One request and its response, over bytes instead of a socket."""

    protocol_version = "HTTP/1.1"
    command, headers = "GET", http.client.HTTPMessage()
    page = "/"                          # the path without the query
    query: Dict[str, str] = {}
    route = "none"                      # as ROUTES has it; "other" if there is none at this path
    body_bytes = status = 0             # its length; what was answered
    found: Any = None                   # by the disk thread

    def __init__(self, head):
        """`head`: request line and headers, with the empty line; read by parse()."""
        self.head, self.body = head, b""
        self.close_connection = True
        self.wfile: Any = io.BytesIO()

    def parse(self):
        """Read the head; raises HttpError."""
        line, _, lines = self.head.partition(b"\n")
        if not HEADER_LINES.fullmatch(lines):
            raise HttpError(400, "A header line is not NAME: VALUE.")
        # A shell sends the bytes of a search for Straße as they were typed
        self.raw_requestline = urllib.parse.quote(line, safe=bytes(range(128))).encode()
        self.rfile = io.BytesIO(lines)
        if not self.parse_request() or self.request_version not in ("HTTP/1.0", "HTTP/1.1"):
            raise HttpError(505, "Of HTTP only the versions 1.0 and 1.1 are spoken here.")
        if self.request_version == "HTTP/1.1" and len(self.headers.get_all("Host", [])) != 1:
            raise HttpError(400, "Exactly one Host header is required.")
        if "close" in self.header("Connection").lower():        # Perl's clients say "TE, close"
            self.close_connection = True
        if self.command not in METHODS_KNOWN:
            raise HttpError(501, "The method %s is not known." % self.command[:32])
        # Also of http://HOST/PATH (RFC 9112, 3.2.2)
        page, _, query = re.sub("^https?://[^/?]*", "", self.path).partition("?")
        self.page = page or "/"
        self.route = self.page if self.page in ROUTES else "other"
        self.query = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        self.read_length()

    def header(self, name):
        """Several lines with one name are one list (RFC 9110, 5.3)."""
        return ",".join(self.headers.get_all(name, []))

    def read_length(self):
        text = self.header("Content-Length").strip(" \t")
        if "Transfer-Encoding" in self.headers or self.command == "POST" and not text:
            raise HttpError(411, "A body needs a Content-Length; it cannot come in chunks.")
        if not re.fullmatch("[0-9]{0,18}", text):
            raise HttpError(400, "Content-Length is not a number of bytes.")
        self.body_bytes = int(text or 0)
        if self.body_bytes > HTTP_BODY_BYTES:
            raise HttpError(413, "At most %d bytes are accepted." % HTTP_BODY_BYTES)

    @functools.cached_property
    def luanti(self):
        """What a form of Luanti's has in its field json, by multipart/form-data (RFC 7578) or not;
        b"": it is none. Called with the whole body."""
        if self.body.startswith(b"json="):
            return urllib.parse.unquote_to_bytes(self.body[5:].replace(b"+", b" "))
        return self.body.partition(b'name="json"')[2].partition(b"\r\n\r\n")[2].partition(
            b"\r\n--")[0]

    # What http.server would write to a socket or to standard error

    def handle_expect_100(self):
        return True                     # the Iceball client exits at a "100 Continue"

    def send_error(self, code, message=None, explain=None):
        raise HttpError(code, "%s." % message)

    def log_request(self, code="-", size="-"):
        self.status = code

    def version_string(self):
        return "masterserver/" + __version__

    def response(self, answer):
        """The whole response; for HEAD and 304 without the body, whose length the head tells."""
        body, fields = answer.body, {**FIELDS, **answer.fields}
        if len(body) >= GZIP_MIN_BYTES and "gzip" in self.header("Accept-Encoding").lower():
            body, fields["Content-Encoding"] = answer.gzipped, "gzip"
        fields["Length"] = fields["Content-Length"] = str(len(body))
        fields["Connection"] = "close" if self.close_connection else "keep-alive"
        if self.route.endswith((".json", ".xml")):          # for scripts of other sites too
            fields["Access-Control-Allow-Origin"] = "*"
        known = "ETag" in fields and fields["ETag"] in self.header("If-None-Match")
        self.request_version = "HTTP/1.1"       # an answer to HTTP/0.9 would have no head
        self.send_response(304 if known else answer.status)
        for field in fields.items():
            self.send_header(*field)
        self.end_headers()
        if not known and not self.head.startswith(b"HEAD "):
            self.wfile.write(body)
        return self.wfile.getvalue()


# --- One connection ------------------------------------------------------------------------------

class HttpSession(Session):
    """HTTP/1.0 and 1.1, keep-alive, one request after another."""

    def __init__(self, web, address, now):
        self.web, self.address = web, address
        # A proxy's requests are not answered from the cache: each is its client's, who pays for it
        self.proxied = address in web.trusted
        self.cache = {} if self.proxied else web.cache
        self.request: Any = None      # its head is read, it is not answered yet
        self.deadline = now + HTTP_REQUEST_S

    def receive(self, data, now):
        web = self.web
        if not (self.buffer or self.request or self.done):
            cached = self.cache.get(data)
            if cached and web.rules.request_limiter.allow(self.address, now):
                response, self.done, counted = cached
                web.requests[counted] += 1
                self.deadline = now + HTTP_IDLE_S
                return response
            # Without data: all of an answer is written
            self.deadline = now + (HTTP_REQUEST_S if data else HTTP_IDLE_S)
        self.buffer += data
        try:
            if self.done or self.job or not self.is_whole(now):
                return b""
            return self.respond(web.answer(self.request), now)
        except DiskNeeded as needed:
            self.job, = needed.args
            return b""
        except HttpError as error:
            return self.refuse(error, now)

    def is_whole(self, now):
        """Is the first request in the buffer here, with its body? Raises HttpError."""
        request = self.request
        if request is None:
            self.buffer = self.buffer.lstrip(b"\r\n")   # a blank line begins no request
            end = self.buffer and head_end(self.buffer)
            if not end:
                return False
            self.request = request = HttpRequest(self.buffer[:end])
            self.buffer = self.buffer[end:]
            try:
                request.parse()
            except HttpError:                   # what comes behind it may be no request
                request.close_connection = True
                raise
        request.body = self.buffer[:request.body_bytes]
        request.now = now
        request.address = self.web.client(self.address, request.header("X-Forwarded-For"))
        return len(request.body) == request.body_bytes

    def respond(self, answer, now):
        request, web = self.request, self.web
        if answer.status in (408, 503) or answer.status == 429 and not self.proxied:
            request.close_connection = True     # what comes behind it costs as much as an answer
        response, done = request.response(answer), request.close_connection
        counted = request.route, request.status
        web.requests[counted] += 1
        if "ETag" in answer.fields and not (self.proxied or request.body):
            web.remember(request.head, (response, done, counted))
        self.buffer = self.buffer[request.body_bytes:]
        self.request, self.done = None, done
        self.deadline = now + (HTTP_REQUEST_S if self.buffer else HTTP_IDLE_S)
        return response

    def refuse(self, error, now):
        """Answer the request, or what is no request and ends the connection, with an error."""
        self.request = self.request or HttpRequest(self.buffer)
        return self.respond(self.web.error(self.request, error), now)

    def resume(self, result, now):
        self.job, self.request.found = None, result
        return self.receive(b"", now)

    def tick(self, now):
        if now < self.deadline or self.done:
            return b""
        self.done = True
        if self.job:
            return self.refuse(HttpError(503, "The answer takes too long.", RETRY_AFTER), now)
        if self.buffer or self.request:
            return self.refuse(HttpError(408, "The request did not arrive in time."), now)
        return b""


class RefusedConnection(HttpSession):
    """A connection over a limit: it is told so, and ends."""

    def opened(self, now):
        hint = "Too many connections at once; wait a few seconds."
        return self.refuse(HttpError(429, hint, RETRY_AFTER), now)


# --- All connections -----------------------------------------------------------------------------

class Web(TcpProtocol):
    """What all connections share: the cache, the lists, the dispatch."""

    speaks_first = False

    def __init__(self, core):
        self.core, self.settings = core, core.settings
        self.registry, self.rules = core.registry, core.registry.rules
        self.epoch = 0.0                # wall clock minus monotonic clock, told by the event loop
        # By request: the response, does it end the connection, and its key in `requests`
        self.cache: Dict[bytes, Any] = {}
        self.cache_bytes = 0
        self.lists: Dict[Any, HttpResponse] = {}          # by route and game
        self.hourly_players = core.hourly_players()     # what the sparklines in servers' parts show
        self.requests: Dict[Any, int] = collections.Counter()   # by route and status
        self.read(core.settings)

    def session(self, address, now):
        return HttpSession(self, address, now)

    def refusal(self, address, now):
        return RefusedConnection(self, address, now)

    def serves(self, server):
        """The operator's own games; those that have a protocol belong to it."""
        return server.game in self.settings["games"]

    def read(self, settings):
        self.trusted = Networks(settings["http.trusted_proxies"])
        self.look = PageContext(settings["http.title"], settings["http.intro"],
                         settings.texts.get("http.template") or LIST_PAGE,
                         collections.ChainMap(self.registry.titles,
                                              {**GAME_TITLES, **settings["games"]}),
                         settings["http.url"])
        self.registry.forget_entries()    # titles stand in them
        self.forget_answers()

    def tick(self, now):
        """What was made in the last second is made anew if anybody asks: lists have changed, and
        times move."""
        self.forget_answers()
        recent = self.core.hourly_players()
        if recent != self.hourly_players:
            self.hourly_players = recent
            self.registry.forget_entries()

    def forget_answers(self):
        self.lists.clear()
        self.cache.clear()
        self.cache_bytes = 0

    def remember(self, request, cached):
        size = len(request) + len(cached[0])
        self.cache_bytes += size
        if self.cache_bytes > HTTP_CACHE_BYTES:
            self.cache.clear()
            self.cache_bytes = size
        self.cache[request] = cached

    def client(self, address, forwarded):
        """Whose request it is: of the addresses in X-Forwarded-For, with or without a port, the
        last that is no trusted proxy's."""
        for text in reversed(forwarded.split(",")):
            if address not in self.trusted:
                break
            text = re.sub(r"^([0-9.]+|\[.*\]):[0-9]+$", r"\1", text.strip())
            try:
                address = read_public(text) or address
            except ValueError:
                break
        return address

    def answer(self, request):
        """What the request's route gives; raises HttpError and DiskNeeded."""
        if request.found is None:
            self.charge(request, 1)
        route = ROUTES.get(request.route)
        if route is None:
            raise HttpError(404, "There is no page %s here." % request.page[:100])
        methods = allowed_methods(request.route)
        fields = {"Allow": methods, "Access-Control-Allow-Methods": methods}
        if request.command not in methods.split(", "):
            raise HttpError(405, "%s takes %s." % (request.route, methods), fields)
        if request.command == "OPTIONS":
            return HttpResponse(b"", fields=fields)
        return route(self, request)

    def charge(self, request, tokens):
        """Let the client pay for this request; raises HttpError."""
        address = request.address
        if self.rules.request_limiter.allow(address, request.now, tokens):
            return
        if self.rules.verdict(address) == BLOCKED:          # whose proxy is not
            raise HttpError(403, "Requests from %s are not answered here." % address)
        hint = "Too many requests from %s; wait a few seconds." % address
        raise HttpError(429, hint, RETRY_AFTER)

    def error(self, request, error):
        """In the form that its reader expects."""
        status, hint = error.status, str(error)
        reason = http.client.responses[status]
        type, body = TEXT_TYPE, ("%d %s\n%s\n" % (status, reason, hint)).encode()
        if request.route == "/announce" and not request.luanti:
            type, body = JSON_TYPE, to_json({"listed": False, "reason": hint})
        elif request.route == "/master.json" and status in (403, 429):
            type, body = JSON_TYPE, iceball_list(self, [])
        elif "text/html" in request.header("Accept"):
            type, body = HTML_TYPE, error_page(self.look, status, reason, hint)
        return HttpResponse(body, type, status, error.fields)

    def list_answer(self, request, wanted, type, make):
        """The list that `make(servers, wall)` gives. A whole one, of a game or of all, is kept
        until the next tick; a search is one client's, who pays for each server looked at."""
        game, registry = wanted.game, self.registry
        key, wall = (request.route, game), request.now + self.epoch
        if wanted == ListFilter(game) and game in ("", *self.look.games):
            if key not in self.lists:
                self.lists[key] = public(make(registry.servers(game), wall), type)
            return self.lists[key]
        # A page with a search in it asks every 5 s
        self.charge(request, self.rules.request_tokens(registry.total / SEARCH_SERVERS))
        return public(make(list(filter(wanted.matches, registry.servers(game))), wall), type)


# --- What is asked for ---------------------------------------------------------------------------

def whole_number(request, name, low, high):
    """A number in the query, 0 if there is none."""
    text = request.query.get(name, "").strip()
    try:
        return read_number(low, high)(text) if text else 0
    except ValueError as error:
        raise HttpError(400, "%s: %s." % (name, error)) from None


class ListFilter(NamedTuple):
    """Which servers a list is to have."""

    game: str                           # "": of every game
    name: str = ""                      # a part of their name or address
    players_min: int = 0

    def matches(self, server):
        """The page's script has the same rule (wanted)."""
        name, address = self.name.casefold(), server.address
        if ":" in name:
            address = endpoint_text(address, server.port)
        return server.players >= self.players_min and (
            name in server.name.casefold() or name in address)


def list_filter(web, request, game=""):
    """`game`: the one that is listed unless another one is asked for."""
    query = request.query
    wanted = ListFilter(query.get("game", game), clean(query.get("name", "")),
                        whole_number(request, "players_min", 0, PLAYERS_MAX))
    if wanted.game not in ("", *web.look.games) and request.route != "/servers.json":
        raise HttpError(404, "There is no game %s here." % ascii(wanted.game[:100]))
    return wanted


def asked_place(request, own=""):
    """The address (`own` if none is given) and the port in the query; both may stand in address=,
    as in 203.0.113.7:20737. Raises HttpError."""
    text = request.query.get("address", "").strip()[:100] or own
    port = whole_number(request, "port", 0, 65535)
    try:
        if re.search(r"\.[0-9]+:|\]:", text):
            text, port = read_numeric_endpoint(text)
        return canonical_address(read_address(text)), port
    except ValueError:
        hint = "%s is not an IP address, a number such as 203.0.113.7." % ascii(text)
        raise HttpError(400, hint) from None


def asked_server(request):
    """(game, address, port), the last two empty if neither is asked for, and the span."""
    query = request.query
    game, span = query.get("game", ""), query.get("span", "day")
    address, port = asked_place(request) if {"address", "port"} & query.keys() else ("", 0)
    if not game or address and not port:
        raise HttpError(400, "game is required; for one server address and port as well.")
    if span not in SPANS:
        raise HttpError(400, "span must be one of %s." % ", ".join(SPANS))
    return (game, address, port), span


def from_disk(request, job):
    """What `job` gives in the disk thread; until that is known it raises DiskNeeded."""
    found = request.found
    if found is None:
        raise DiskNeeded(job)
    # The disk's, or too many wait for it; any other exception is a fault of the program
    if isinstance(found, (*DISK_ERRORS, RuntimeError, MemoryError)):
        hint = "The answer cannot be made just now: %s." % error_text(found)
        raise HttpError(503, hint, RETRY_AFTER)
    if isinstance(found, Exception):
        raise found
    return found


# --- Lists ---------------------------------------------------------------------------------------

# Both documents' keys, each a text or a number. `official` counts as true whatever it is, so it is
# left out unless it is
ICEBALL_FIELDS = {
    "name": "name", "address": "address", "port": "port", "players_current": "players",
    "players_max": "max_players", "mode": "mode", "map": "map", "version": "version",
    "basedir": "mode"}


def iceball_json(server):
    fields = {key: getattr(server, name) for key, name in ICEBALL_FIELDS.items()}
    if server.official:
        fields["official"] = True
    return to_json(fields)


def iceball_list(web, servers):
    return b'{"version":%d,"iceball_version":%d,"servers":[%s]}' % (
        ICEBALL_HBVERSION, web.settings["iceball.version"],
        b",\n".join(cached_entries(servers, "master.json", iceball_json)))


def get_master_json(web, request):
    return web.list_answer(request, ListFilter("iceball"), JSON_TYPE,
                           lambda servers, wall: iceball_list(web, servers))


JSON_FIELDS = (
    "game address port name mode map version players max_players playing description official "
    "priority flavor verified responding").split()
JSON_DETAILS = "arenas factions skill flags".split()


def server_json(server):
    """A server in /servers.json up to its times, which move when nothing else does."""
    fields = {name: getattr(server, name) for name in JSON_FIELDS}
    fields["unconfirmed"] = not server.confirmed
    fields["ping_ms"] = None if server.ping_ms is None else round(server.ping_ms, 1)
    for name in JSON_DETAILS:
        fields[name] = server.details.get(name, "")
    return to_json(fields)[:-1]


def with_times(part, server, epoch, own):
    """A whole server in /servers.json; `own`: this master's name, if there are others."""
    return b'%s,"master":"%s","first_seen":%d,"last_seen":%d}' % (
        part, (server.master or own).encode(), server.first_seen + epoch, server.last_seen + epoch)


def get_servers_json(web, request):
    """Every field of every server; ?game=, ?name= (a part of it), ?players_min=."""
    def make(servers, wall):
        rows = [with_times(part, server, web.epoch, web.registry.master)
                for server, part in zip(servers, cached_entries(servers, "servers.json",
                                                                server_json))]
        return b'{"generated":%d,"generation":%d,"servers":[%s]}\n' % (
            wall, web.registry.generation, b",\n".join(rows))
    return web.list_answer(request, list_filter(web, request), JSON_TYPE, make)


# As the script in Hyperbol's document has them
XML_SERVER = """\
<server ip="%(address)s" port="%(port)s" responding="1" servername="%(name)s" gametype="%(mode)s" \
playercount="%(players)s" maxplayercount="%(max_players)s" mapname="%(map)s" version="%(version)s" \
skill="%(skill)s" flavor="%(flavor)s" ping_milliseconds="%(ping)s"/>
"""
XML_SILENT = """\
<server ip="%(address)s" port="%(port)s" responding="0"/>
"""
XML_FIELDS = "address port name mode players max_players map version flavor".split()


def server_xml(server):
    """A server in /servers.xml and in an exported file."""
    fields = {name: getattr(server, name) for name in XML_FIELDS}
    fields.update(skill=server.details.get("skill", "0"), ping=round(server.ping_ms or 0))
    escaped = {name: html.escape(str(value)) for name, value in fields.items()}
    return ((XML_SERVER if server.responding else XML_SILENT) % escaped).encode()


def servers_xml(servers, wall):
    """The document around them; `wall` is the time in seconds since 1970."""
    made = utc(wall).replace(microsecond=0)
    head = '<?xml version="1.0" encoding="UTF-8"?>\n<serverlist localtime="%s" gmtime="%s">\n' % (
        made.astimezone().isoformat(), made.isoformat())
    return head.encode() + b"".join(servers) + b"</serverlist>\n"


def get_servers_xml(web, request):
    return web.list_answer(
        request, list_filter(web, request, "hyperbol"), "application/xml; charset=utf-8",
        lambda servers, wall: servers_xml(cached_entries(servers, "servers.xml", server_xml), wall))


def luanti_entry(server):
    """Its place in the list, by the operator's priority and the official list's score; the entry.
    """
    told = server.luanti_announcement
    entry = {**told, "address": told.get("address") or server.address, "port": server.port,
             "ping": (server.ping_ms or 0) / 1000}
    # Who is beyond 80 % of the room does not count
    points = (min(told["clients"], int(0.8 * told["clients_max"])) + min(4, told["pop_v"] / 2)
              + min(8, told["game_time"] / MONTH) - 8 * max(0, entry["ping"] - 0.4)
              - 8 * (told["clients_max"] > 200))
    if told["proto_min"] <= 32 and told["proto_max"] > 36:      # two incompatible generations
        points *= 0.6
    return (-server.priority, -points), to_json(entry)


def get_list(web, request):
    """Luanti's list, as the official one gives it to clients. What it had at most is not kept."""
    def make(servers, wall):
        shown = [server for server in servers if server.luanti_announcement]
        ranked = sorted(cached_entries(shown, "list", luanti_entry))
        entries = b",\n".join([entry for _, entry in ranked])
        total = b'{"clients":%d,"servers":%d}' % (
            sum(server.players for server in shown), len(shown))
        return b'{"list":[%s],"total":%s,"total_max":%s}\n' % (entries, total, total)
    return web.list_answer(request, ListFilter("luanti"), JSON_TYPE, make)


# --- Pages ---------------------------------------------------------------------------------------

# What to put into a game server's settings, by protocol
ANNOUNCE = "python3 masterserver.py announce --game %(game)s --port PORT %(page)s"
CONTACTS = {
    "iceball": ("Iceball servers, in svsave/pub/server.json",
                '"heartbeat_send": true, "heartbeat": [["%(host)s", %(port)d]]'),
    "subspace": ("SubSpace zones (asss)", "Directory:Server1 = %(host)s, port %(port)d"),
    "aio": ("AIO servers", "master server %(host)s, port %(port)d"),
    "luanti": ("Luanti servers, in minetest.conf",
               "server_announce = true, and serverlist_url = http://%(page)s"),
    "hyperbol": ("Hyperbol servers", ANNOUNCE),
    "quake3": ("Quake III and OpenArena servers; sv_masterextra1 for Xonotic and Nexuiz",
               'set sv_master1 "%(host)s:%(port)d"'),
}


def contact_lines(listeners, host, settings):
    """(game, whom it is for, line for the settings of its game servers or to run beside them).

    Of what listens, of Luanti and of the operator's own games; of several ports of one protocol the
    last takes announcements, but of HTTP the first is named."""
    ports = {listener.protocol: listener.port for listener in listeners}
    page = next((endpoint_text(host, listener.port) for listener in listeners
                 if listener.protocol == "http"), "")
    ports["luanti"] = settings["luanti.enabled"]
    contacts = {game: contact for game, contact in CONTACTS.items() if ports.get(game)}
    contacts.update({game: (title + " servers", ANNOUNCE)
                     for game, title in settings["games"].items()})
    return [(game, whom, line % {"host": host, "port": ports.get(game), "game": game,
                                 "page": page})
            for game, (whom, line) in contacts.items() if page or "%(page)s" not in line]


def day_total(recent, games):
    """The last day's hourly player counts of these games together."""
    days = [recent[game, "", 0] for game in games if (game, "", 0) in recent]
    hours = [[value for value in hour if value is not None] for hour in zip(*days)]
    return [sum(known) if known else None for known in hours]


def get_page(web, request):
    wanted = list_filter(web, request)
    game, look, recent = wanted.game, web.look, web.hourly_players

    def make(servers, wall):
        counts = {id: len(listed) for id, listed in web.registry.games.items() if listed}
        rows = list_rows(look, servers[:PAGE_ROWS], recent, web.epoch, wall)
        day = day_total(recent, [game] if game else counts) if wanted == ListFilter(game) else ()
        contacts = contact_lines(web.core.listeners, web.settings["server.public_address"]
                                 or "THIS-HOST", web.settings)
        return list_page(look, wanted, servers, rows, counts, contacts, sparkline(day))
    return web.list_answer(request, wanted, HTML_TYPE, make)


def as_shown(server, epoch):
    """A server as pages show it: its times are the wall clock's."""
    shown = copy.copy(server)
    shown.first_seen += epoch
    shown.last_seen += epoch
    return shown


def get_server(web, request):
    key, span = asked_server(request)
    game, address, port = key
    wall, database = request.now + web.epoch, web.core.database
    listed, known, series = web.registry.get(*key), None, None
    if database is not None:
        known, series = from_disk(request, lambda: (
            database.known(*key), database.history(*key, span, wall)))
    if listed:
        shown = as_shown(listed, web.epoch)
    elif known:
        shown = Server(game, address, port, address, known.last_seen, 0.0, known.name)
    else:
        raise HttpError(404, "No server %s of %s is known here." % (endpoint_text(address, port),
                                                                    game))
    if known:                           # it may have been here before it was listed this time
        shown.first_seen = min(shown.first_seen, known.first_seen)
    base = web.look.url or "http://" + request.header("Host")
    return HttpResponse(server_page(web.look, shown, listed, series, span, wall, base), HTML_TYPE)


def get_banner(web, request):
    """A picture of one server for other pages, 560 × 95."""
    key, _ = asked_server(request)
    found, database = web.registry.get(*key), web.core.database
    state, players, address = "is not known here", "", endpoint_text(*key[1:])
    if found:
        state = found.map if found.responding else "not responding"
        players = "%d/%s" % (found.players, found.max_players or "?")
    elif database:
        found, = from_disk(request, lambda: [database.known(*key)])
        if found:
            state = "not listed since %s UTC" % minute(found.last_seen)
    svg = fill(BANNER, name=found and clean(found.name) or address, state=state, players=players,
               game=web.look.game_title(clean(key[0])), address=address,
               spark=sparkline(web.hourly_players.get(key, ())))
    return HttpResponse(svg.encode(), "image/svg+xml", 200 if found else 404, BANNER_FIELDS)


def get_history_json(web, request):
    """The player counts of one server, or with a game alone of all its servers: ?game=, ?address=,
    ?port=, ?span=day|week|month|year."""
    key, span = asked_server(request)
    database, wall = web.core.database, request.now + web.epoch
    if database is None:
        raise HttpError(404, "This master keeps no history ([server] database is empty).")
    series = from_disk(request, lambda: database.history(*key, span, wall))
    game, address, port = key
    return HttpResponse(to_json({
        "game": game, "address": address, "port": port, "span": span, "start": series.start,
        "step": series.step, "players": series.means, "peak": series.peaks}), JSON_TYPE)


# --- Announcements by HTTP -----------------------------------------------------------------------

ANNOUNCED_TTL_S = 120               # `announce` repeats it after half of this
REFUSED_STATUS = {"bad packet": 400, "limit": 429, "busy": 429}        # all others: 403
FORM_TYPE = "application/x-www-form-urlencoded"
# The fields of an announcement beside game and port, and the lowest number where one is expected
ANNOUNCED_FIELDS = "action name mode map version description players max_players".split()
ANNOUNCED_NUMBERS = {"port": 1, "players": 0, "max_players": 0}
# In a form a character has twelve bytes at most: of the four bytes of UTF-8 each as %F0; those of
# the names above have three
FORM_VALUE_BYTES = 12 * TEXT_CHARACTERS
FORM_NAME_BYTES = 3 * len("max_players")
# What bytes.translate() takes to leave digits as they are, and blanks of all else
DIGITS_ALONE = bytes(byte if chr(byte) in "0123456789" else 32 for byte in range(256))


def announced_fields(request):
    """The fields of an announcement, a form or a JSON object; raises HttpError and Refused."""
    type = (request.header("Content-Type") or FORM_TYPE).partition(";")[0].strip().lower()
    body = request.luanti or request.body
    # A `{` comes by `curl -d`, which says it is a form
    if request.luanti or type == "application/json" or body[:1] == b"{":
        return json_fields(body)
    if type != FORM_TYPE:
        raise HttpError(415, "Expected %s or application/json, not %s." % (
            FORM_TYPE, ascii(type[:100])))
    return form_fields(body)


def json_fields(body):
    """The fields of a JSON object but for those that are null; raises Refused."""
    numbers = body.translate(DIGITS_ALONE).split()
    if max(map(len, numbers), default=0) > NUMBER_DIGITS:
        raise Refused("bad packet", "a number of more than %d digits" % NUMBER_DIGITS)
    try:
        fields = json.loads(body.decode("utf-8-sig")).items()
    except (ValueError, RecursionError, AttributeError):
        raise Refused("bad packet", "the body is not a JSON object in UTF-8 "
                                    'such as {"game": "hyperbol", "port": 27888}') from None
    admit_fields(len(fields))
    return {name: value for name, value in fields if value is not None}


def form_fields(body):
    """The fields of a form that an announcement can have, as texts; raises Refused."""
    pairs = body.split(b"&", ANNOUNCED_FIELDS_MAX)
    admit_fields(len(pairs))
    values = {}
    for pair in pairs:
        name, _, value = pair.partition(b"=")
        values[urllib.parse.unquote_to_bytes(name[:FORM_NAME_BYTES])] = value[:FORM_VALUE_BYTES]
    fields = {}
    for name in ("game", "port", *ANNOUNCED_FIELDS):
        value = values.get(name.encode())
        if value is not None:
            # As bytes all survives: curl under Windows sends the console's encoding
            value = urllib.parse.unquote_to_bytes(value.replace(b"+", b" "))
            fields[name] = decode_legacy(value, TEXT_CHARACTERS)
    return fields


def admit_fields(count):
    if count > ANNOUNCED_FIELDS_MAX:
        raise Refused("bad packet", "an announcement has at most %d fields" % ANNOUNCED_FIELDS_MAX)


def announced_value(name, value):
    """What is kept of a field; raises Refused."""
    if name in ANNOUNCED_NUMBERS:
        text = "" if isinstance(value, (list, dict)) else str(value)    # which may be long
        match = re.fullmatch(r"\s*([0-9]{1,9})(\.0)?\s*", text)       # Lua writes 27500.0
        low, high = ANNOUNCED_NUMBERS[name], PLAYERS_MAX
        if not match or not low <= int(match[1]) <= high:
            raise Refused("bad packet", "%s: expected a number from %d to %d" % (name, low, high))
        return int(match[1])
    if isinstance(value, (bool, list, dict)):
        raise Refused("bad packet", "%s is not a text" % name)
    return clean(str(value), TEXT_CHARACTERS if name == "description" else NAME_CHARACTERS)


def announced_game(web, value):
    game = announced_value("game", value)
    games = [*web.core.http_announcers, *web.settings["games"]]
    if game in games:
        return game
    reason = "game: expected one of %s, not %s" % (", ".join(games), ascii(game))
    if re.fullmatch("[a-z0-9_-]{1,32}", game) and game not in GAME_TITLES:
        reason += ("; the operator of this master can allow it with a line `%s = %s` under [games]"
                   % (game, game.capitalize()))
    raise Refused("bad packet", reason)


def post_announce(web, request):
    """An announcement by HTTP; the address is the connection's."""
    # Browsers send these two, the first only over HTTPS and to their own machine. What a page says
    # of itself and of Host proves nothing: its name may lead here (DNS rebinding)
    if request.header("Origin") or request.header("Sec-Fetch-Site") not in ("", "none"):
        raise HttpError(403, "A web page may not announce servers here.")
    game, port = "announce", 0
    try:
        sent = announced_fields(request)
        game = announced_game(web, "luanti" if request.luanti else sent.get("game", ""))
        port = announced_value("port", sent.get("port"))
        if request.luanti:
            return take_luanti(web, request, port, sent)
        fields = {name: announced_value(name, sent[name])
                  for name in ANNOUNCED_FIELDS if name in sent}
        return take_announcement(web, request, game, port, **fields)
    except Refused as refused:
        web.registry.record_outcome(request.address, game, port, refused.outcome, request.now,
                                    str(refused))
        raise HttpError(REFUSED_STATUS.get(refused.outcome, 403), str(refused)) from None


def take_announcement(web, request, game, port, action="", **fields):
    """List the server, have it queried, or end it; raises Refused."""
    registry, source, now = web.registry, request.address, request.now
    address = web.rules.listed_address(source)
    server, polled = registry.get(game, address, port), web.core.http_announcers.get(game)
    answer: Dict[str, Any] = {"listed": True, "ttl": ANNOUNCED_TTL_S}
    if action == "stop":                # only from the address that it is announced from
        queried = polled and polled.stop_polling(source, port)
        if server and server.source == source and not server.master:
            registry.remove_own(server)
        elif not queried and game != "luanti":
            raise HttpError(404, "No server from %s on port %d is listed here as %s." % (
                source, port, game))
        registry.record_outcome(source, game, port, "stopped", now)
        answer.update(listed=False, reason="stopped")
    elif action not in ("", "announce"):
        raise Refused("bad packet", "action: expected stop, or nothing")
    elif polled:
        polled.on_http_announcement(source, port, fields, now)
        server = registry.get(game, address, port)
        if not (server and server.responding):
            answer.update(listed=False, reason=(
                "waiting for its answer to a query on UDP port %d; the page /check tells what came "
                "of it" % (port + polled.offset)))
    else:                               # it cannot be queried: it is listed with what it says
        if not server or "name" in fields:
            fields["name"] = fields.get("name") or endpoint_text(address, port)
        registry.list_or_refresh((game, address, port), source, now, ANNOUNCED_TTL_S, fields)
        if not server:
            registry.record_outcome(source, game, port, "listed", now)
    return HttpResponse(to_json(answer), JSON_TYPE)


def take_luanti(web, request, port, told):
    """Luanti's own announcement, answered in words that its game server logs; raises Refused."""
    if told.get("action") == "delete":
        take_announcement(web, request, "luanti", port, "stop")
        return HttpResponse(b"Removed from the list.\n")
    before = web.registry.outcomes.get(request.address, "luanti", port)
    web.core.http_announcers["luanti"].on_http_announcement(request.address, port, told,
                                                            request.now)
    if before and before.outcome in ("silent", "address"):
        raise HttpError(409, "Request has been filed. So far it was not listed: %s. The page "
                             "/check tells what to do." % before.detail)
    return HttpResponse(b"Request has been filed.\n", status=202)


# --- Is my server listed? ------------------------------------------------------------------------

# What became of a packet: a title, and what to do, with the detail noted then
OUTCOMES = {key: (title, " ".join(advice.split())) for key, title, advice in re.findall(
    "^(.+?): (.*)\n((?:    .*\n)+)", """\
announced: Announced, but the answer did not come back
    This master answered and is waiting for the game server's reply. If that does not change,
    a firewall or router between the game server and here lets packets out but not in: open
    UDP, or forward the game's port.
version: Wrong version
    This master does not list %s. Another version of the game server is needed.
bad packet: A packet that cannot be read
    What is wrong with it: %s. If the port is the one for this game, update the game server,
    or fix what announces it.
silent: It does not answer queries
    There was %s. Open that UDP port in the firewall and forward it in the router.
address: Another address
    Players would be sent elsewhere: %s. Leave server_address in minetest.conf empty, or set it to
    a name of the machine that the game server runs on.
banned: Banned
    The operator of this master has excluded this address: %s. If that is a mistake, ask its
    operator.
limit: Over the limit
    It is not listed: %s. Stop one of the others, or ask this master's operator for more.
busy: Try again
    This master could not ask the game server when it announced itself: %s. The game server's
    next announcement does that; nothing is wrong with it.
flood: Too many packets
    More than %s packets per second come from this address, and the rest are not read. Does a
    game server announce itself in a loop? If many share the address, ask this master's
    operator for more.
name: The name is refused
    Not under this name: %s. Give the server another name.
game: The game is refused
    It is not listed: %s. Its operator chooses this master's games.
owner: Announced from elsewhere
    It is not accepted: %s. If you know of no other announcer, ask this master's operator.
password: Another password
    It is not accepted: %s. Wait, or set the former password again.
stopped: Signed off
    The game server said that it was stopping.
listed: Listed
    All is well.
private: Listed under a private address
    Players elsewhere cannot reach it. This master's operator can name its public address in
    [server] public_address or [address_map].
ipv6: Listed under an IPv6 address
    The page shows it, but the list that this game's players get has room for IPv4 addresses
    only. Let the game server announce itself by IPv4.
unconfirmed: Not heard since a restart
    It was listed before this master was restarted, and stays for a while. Is the game server
    running, and does it still announce itself here?
gone: No longer listed
    It was listed then, and has since fallen silent, or this master's settings no longer allow
    it. Is the game server running, and does it still announce itself here?
""", re.M)}
IPV4_LISTS = "subspace", "hyperbol"     # games whose own lists have room for no other address


def finding(outcome, detail, arrival=""):
    title, advice = OUTCOMES.get(outcome, (outcome, "%s"))
    return fill(FINDING, outcome=title, arrival=arrival,
                todo=advice.replace("%s", detail or "nothing more is known"))


def listed_outcome(server):
    """Where a listed server stands, as one of OUTCOMES."""
    if not server.confirmed:
        return "unconfirmed"
    if server.address in LOCAL_NETWORKS:
        return "private"
    return "ipv6" if ":" in server.address and server.game in IPV4_LISTS else "listed"


def get_check(web, request):
    """What became of what an address sent."""
    address, port = asked_place(request, request.address)
    rules, wall = web.rules, request.now + web.epoch
    listed = [as_shown(server, web.epoch) for server in web.registry.servers()
              if address in (server.address, server.source) and port in (0, server.port)]
    state = [(listed_outcome(server), "") for server in listed if server.responding]
    ban = rules.ban_reason(address, rules.listed_address(address))
    if ban:
        state.append(("banned", ban))
    if rules.datagram_limiter.is_nearly_empty(address, request.now):
        state.append(("flood", "%g" % web.settings["limits.datagrams"][0]))
    findings = [finding(*outcome) for outcome in dict.fromkeys(state)]
    findings += arrivals(web, address, port, listed, wall)
    return HttpResponse(check_page(web.look, address, port, findings, listed, wall), HTML_TYPE)


def arrivals(web, address, port, listed, wall):
    """The findings about what came from there, the latest first. The address is the one that was
    asked for: which machine is behind a public one is not told."""
    well = {server.port for server in listed if server.confirmed and server.responding}
    findings = []
    for source, protocol, announced, note in web.registry.outcomes:
        if address not in (source, web.rules.listed_address(source)):
            continue
        if port and announced not in (0, port):
            continue
        # Of a ban the page tells what holds now
        if note.outcome == "banned":
            continue
        if note.outcome in ("announced", "listed") and announced in well:
            continue
        arrival = fill(ARRIVAL, when=time_tag(note.at + web.epoch, wall),
                       protocol=web.look.game_title(protocol),
                       peer=endpoint_text(address, announced) if announced else address)
        outcome = "gone" if note.outcome == "listed" else note.outcome
        findings.append((note.at, finding(outcome, note.detail, arrival)))
    findings.sort(key=lambda timed: timed[0], reverse=True)
    return [shown for _, shown in findings[:CHECK_FINDINGS]]


# --- For the operator ----------------------------------------------------------------------------

METRICS = """\
received_total          Packets and pieces of requests received.
sent_total              Packets and answers sent.
bytes_in_total          Bytes received.
bytes_out_total         Bytes sent.
malformed_total         Packets and connections that broke their protocol.
limited_total           Packets, connections and requests turned away by a limit.
unsent_total            Packets that the system refused to send.
errors_total            Packets and connections ended by a fault of the program.
connections_total       Connections accepted.
servers                 Listed servers that respond.
players                 Players on listed servers.
playing                 Players in the game rather than watching.
loop_delay_max_seconds  The longest round of the event loop in the last minutes.
connections             Open connections.
http_requests_total     HTTP requests by route and status.
news_dropped_total      News that was not told, as there was too much in that minute.
generation              How often a list has changed: a number that grows.
cluster_connected       1 while the link to the other masters works.
cluster_lag_seconds     How old what is known of their servers may be.
cluster_pending         Own servers of which they are to be told.
cluster_reconnects_total  How often the link was made anew.
cluster_servers         Listed servers by the master that has heard them.
trouble                 1 while something does not work.
info                    The program.
"""


def get_metrics(web, request):
    """The Prometheus text format, version 0.0.4."""
    core = web.core
    values = collections.defaultdict(dict)          # by name and labels
    for protocol, tally in core.tallies.items():
        for field, value in vars(tally).items():
            values[field + "_total"]['{protocol="%s"}' % protocol] = value
    for game, census in web.registry.census(request.now).items():
        for field, value in census._asdict().items():
            values[field]['{game="%s"}' % game] = value
    for counted, value in web.requests.items():
        values["http_requests_total"]['{route="%s",status="%d"}' % counted] = value
    for where in core.health:
        values["trouble"]['{where="%s"}' % where] = 1
    for name, value in {**core.gauges, "generation": web.registry.generation}.items():
        values[name][""] = value
    for name, value in core.cluster.items():
        values["cluster_" + name] = (
            {'{master="%s"}' % master: count for master, count in value.items()}
            if isinstance(value, dict) else {"": float(value)})
    values["info"]['{version="%s"}' % __version__] = 1
    text = ""
    for name, help in re.findall("(.+?) +(.+)", METRICS):
        kind = "counter" if name.endswith("_total") else "gauge"
        text += "# HELP masterserver_%s %s\n# TYPE masterserver_%s %s\n" % (name, help, name, kind)
        for labels, value in values[name].items():
            text += "masterserver_%s%s %r\n" % (name, labels, value)
    return HttpResponse(text.encode(), "text/plain; version=0.0.4; charset=utf-8")


def get_healthz(web, request):
    """200 as long as it serves; `trouble` says what does not work."""
    health = web.core.health
    return HttpResponse(to_json({
        "status": "trouble" if health else "ok", "trouble": dict(health),
        "servers": web.registry.total, "version": __version__,
        "cluster": web.core.cluster}) + b"\n", JSON_TYPE)


def allowed_methods(route):
    return "POST, OPTIONS" if route == "/announce" else "GET, HEAD, OPTIONS"


def text_route(text, type, setting=""):
    """A route to a text, or to that of the file which a setting names."""
    return lambda web, request: public(
        (web.settings.texts.get(setting) or text).encode(), type)


ROUTES = {
    "/": get_page,
    "/index.html": get_page,
    "/server": get_server,
    "/banner.svg": get_banner,
    "/check": get_check,
    "/style.css": text_route(STYLE_CSS, "text/css; charset=utf-8", "http.stylesheet"),
    "/app.js": text_route(APP_JS, "text/javascript; charset=utf-8"),
    "/icon.svg": text_route(ICON_SVG, "image/svg+xml"),
    "/robots.txt": text_route("User-agent: *\nDisallow: /server\nDisallow: /check\n", TEXT_TYPE),
    "/master.json": get_master_json,
    "/servers.json": get_servers_json,
    "/history.json": get_history_json,
    "/metrics": get_metrics,
    "/healthz": get_healthz,
    "/servers.xml": get_servers_xml,
    "/announce": post_announce,
    "/list": get_list,
    "/geoip": text_route('{"continent":null}', JSON_TYPE),
}


# --- News ----------------------------------------------------------------------------------------

def escaped_markdown(name):
    """A name that Markdown shows as it is written: a backslash stands before every mark."""
    return re.sub("[!-/:-@[-`{-~]", r"\\\g<0>", name)


def parted_marks(name):
    """A name for Slack's format, which has no backslash and which others take for Markdown: a
    zero-width space parts each mark, or run of equal marks, from what it would act on."""
    return re.sub(r"([!-/:-@[-`{-~])\1*", "\\g<0>\u200b", name)


def news_text(server, settings, escape=str):
    """What [notify] text says of this server; `escape` makes a name harmless in the format."""
    game = server.details.get("gamename", server.game)
    titles = {**GAME_TITLES, **settings["games"]}
    return string.Template(settings["notify.text"]).safe_substitute(
        name=escape(server.name or endpoint_text(server.address, server.port)),
        game=escape(titles.get(server.game, game)), map=escape(server.map or "?"),
        url=settings["http.url"] and settings["http.url"] + server_link(server),
        players=server.players, max_players=server.max_players or "?").strip()


def discord_news(server, settings, shown):
    text = news_text(server, settings, escaped_markdown)
    return JSON_TYPE, to_json({"content": text, "allowed_mentions": {"parse": []}})


def slack_news(server, settings, shown):
    text = news_text(server, settings, parted_marks)
    return JSON_TYPE, to_json({"text": html.escape(text, quote=False)})


def text_news(server, settings, shown):
    return TEXT_TYPE, news_text(server, settings).encode()


def json_news(server, settings, shown):
    text = to_json(news_text(server, settings))
    return JSON_TYPE, b'{"event":"players","text":%s,"server":%s}' % (text, shown)


# By the format that [webhooks] names: what makes the type and the body of a message about a server;
# `shown` is the server as /servers.json has it
NEWS_FORMATS = {"discord": discord_news, "slack": slack_news, "text": text_news, "json": json_news}


# ================================================================================================
# 10  The table of protocols
#
# To add a game: write its class in section 7, add a row here, its settings in section 3 and its
# title in section 9, put its packets into the tests; README.md shows how. The listener's port is
# the setting plus `offset`; where the setting is empty, the row is left out.
# ================================================================================================

class ProtocolEntry(NamedTuple):
    name: str
    transport: str                  # udp or tcp; "": no socket of its own
    setting: str                    # its port, or ports; "" stands for any free port
    offset: int
    make: Callable[[Core], Any]     # a UdpProtocol or a TcpProtocol


PROTOCOLS = (
    ProtocolEntry("iceball", "udp", "iceball.port", 0, Iceball),
    ProtocolEntry("hyperbol", "tcp", "hyperbol.port", 0, Hyperbol),
    ProtocolEntry("subspace", "udp", "subspace.port", 0, SubSpaceList),
    ProtocolEntry("subspace", "udp", "subspace.port", 1, SubSpacePing),
    ProtocolEntry("aio", "tcp", "aio.port", 0, Aio),
    ProtocolEntry("quake3", "udp", "quake3.port", 0, Quake3),
    ProtocolEntry("http", "tcp", "http.ports", 0, Web),
    ProtocolEntry("luanti", "", "", 0, Luanti),
    # Last: in a tick it asks those that the others have just named
    ProtocolEntry("poll", "udp", "", 0, lambda core: core.poller),
)

# ================================================================================================
# 11  Event loop
#
# Sockets, threads and the clock; what carries settings and list between files, registry and other
# masters; and news to webhooks. One thread serves every listener and connection, with one time for
# all that a wake-up brings; everything is made there, so nothing needs a lock. One more thread has
# the disk, one looks up host names if there are any, one talks to other masters if there are some,
# and each webhook that was told something has one; the log's stands in section 12.
# ================================================================================================

WINDOWS = os.name == "nt"
# What connections inherit: writes go out at once, and a dead peer is found after two minutes, by
# the last (in ms) also while sent data is unacknowledged. macOS has other names, Windows none.
TCP_OPTIONS = (("TCP_NODELAY", 1), ("SO_KEEPALIVE", 1), ("SO_SNDBUF", SEND_BUFFER_BYTES),
               ("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4),
               ("TCP_USER_TIMEOUT", 120_000))
# As much room for datagrams as the system grants. Sizes grow: the last one granted stays
UDP_OPTIONS = [("SO_RCVBUF", UDP_BUFFER_BYTES >> halved) for halved in (5, 3, 2, 1, 0)]
DESCRIPTORS_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class StartError(Exception):
    """The server cannot start; the text says what to change."""


class Listener(NamedTuple):
    """One bound socket, as in the ready file."""

    protocol: str
    transport: str
    host: str
    port: int


# --- Datagrams -----------------------------------------------------------------------------------

class MessageVector:
    """Many datagrams in one system call each way: recvmmsg(2) and sendmmsg(2) of 64-bit Linux, by
    ctypes, with buffers made once.

    For IPv4 sockets. An announcement of a listed server costs a tenth to a fifth less than by
    recvfrom() and sendto(). send() takes peers as their `struct sockaddr_in`, 16 bytes, as it came.
    """

    # struct mmsghdr: name, its length, vector, its length, control, its length, flags, bytes
    HEADER = struct.Struct("@PI4xPNPNi4xI4x")
    PIECE = struct.Struct("@PN")                # struct iovec: base, length
    NAME_BYTES = 16                             # struct sockaddr_in: family, port, address, zeros

    @classmethod
    def make(cls):
        """None where there is no such thing, or where the system refuses it; PyPy's is slower."""
        system = sys.platform, sys.implementation.name, struct.calcsize("P")
        with contextlib.suppress(NameError, AttributeError, OSError):
            if system == ("linux", "cpython", 8):
                return cls(ctypes.CDLL(None, use_errno=True))
        return None

    def __init__(self, library):
        """`library`: a ctypes.CDLL. Raises AttributeError if it has no such calls, OSError if the
        system refuses them."""
        self.receive_call, self.send_call = library.recvmmsg, library.sendmmsg
        self.receive_call(-1, None, 0, 0, None)
        if ctypes.get_errno() != errno.EBADF:
            raise OSError
        count, size = DRAIN_DATAGRAMS, MAX_DATAGRAM_BYTES
        # of what came, and then of what goes
        self.data = ctypes.create_string_buffer(count * size)
        self.begins = range(0, count * size, size)
        self.headers, self.pieces, self.names = self.vector()
        self.out_headers, self.out_pieces, self.out_names = self.vector()
        words = self.HEADER.size // 4
        self.lengths = memoryview(self.headers).cast("B").cast("I")[words - 2::words]
        self.out_data = memoryview(self.data).cast("B")
        self.out_named = memoryview(self.out_names).cast("B")
        out_pieces = memoryview(self.out_pieces).cast("B").cast("Q")
        self.out_begins, self.out_lengths = out_pieces[::2], out_pieces[1::2]
        # The text of an address takes five times as long to make as to look up
        self.peer = functools.lru_cache(LIMITER_SOURCES)(
            lambda name: (socket.inet_ntoa(name[4:8]), name[2] << 8 | name[3]))

    def vector(self):
        """Headers, pieces and names, each piece a part of `data`."""
        headers, pieces, names = (ctypes.create_string_buffer(DRAIN_DATAGRAMS * size) for size in (
            self.HEADER.size, self.PIECE.size, self.NAME_BYTES))
        for number, begin in enumerate(self.begins):
            self.PIECE.pack_into(pieces, number * self.PIECE.size,
                                 ctypes.addressof(self.data) + begin, MAX_DATAGRAM_BYTES)
            self.HEADER.pack_into(
                headers, number * self.HEADER.size,
                ctypes.addressof(names) + number * self.NAME_BYTES, self.NAME_BYTES,
                ctypes.addressof(pieces) + number * self.PIECE.size, 1, 0, 0, 0, 0)
        return headers, pieces, names

    def receive(self, sock):
        """Up to DRAIN_DATAGRAMS of those that wait: data, peers, and these as send() takes them."""
        count = self.receive_call(sock.fileno(), self.headers, DRAIN_DATAGRAMS,
                                  socket.MSG_DONTWAIT, None)
        if count <= 0:
            return [], [], []
        data = self.data
        size = self.NAME_BYTES
        named = self.names[:count * size]
        names = [named[at:at + size] for at in range(0, count * size, size)]
        lengths = self.lengths[:count].tolist()
        packets = [data[begin:begin + length] for begin, length in zip(self.begins, lengths)]
        return packets, list(map(self.peer, names)), names

    def send(self, sock, answers, tally):
        lengths = [len(data) for data, _ in answers]
        size, count = sum(lengths), len(answers)
        if count > DRAIN_DATAGRAMS or size > len(self.out_data):
            half = count // 2
            self.send(sock, answers[:half], tally)
            self.send(sock, answers[half:], tally)
            return
        self.out_data[:size] = b"".join([data for data, _ in answers])
        self.out_named[:count * self.NAME_BYTES] = b"".join([name for _, name in answers])
        begins = itertools.accumulate([ctypes.addressof(self.data)] + lengths[:-1])
        self.out_begins[:count] = array.array("Q", begins)
        self.out_lengths[:count] = array.array("Q", lengths)
        done = 0
        while done < count:
            rest = ctypes.byref(self.out_headers, done * self.HEADER.size)
            taken = self.send_call(sock.fileno(), rest, count - done, 0)
            # this one: no room, no route, no such port; the peer asks again
            if taken <= 0:
                tally.unsent += 1
                size -= lengths[done]
                done += 1
            else:
                tally.sent += taken
                done += taken
        tally.bytes_out += size


def failed(error, tally, peer, name, data):
    """A packet or a connection that could not be read, or that the protocol failed on: a fault."""
    if isinstance(error, Malformed):
        tally.malformed += 1
        log.debug("%s %s malformed: %s: %a", peer, name, error, data[:48])
    else:
        tally.errors += 1
        log.error("%s %s: a fault of the program: %a", peer, name, data[:600], exc_info=error)


def report(health, where, trouble):
    """Something does not work: say so once, and at /healthz as long as it lasts."""
    if where not in health:
        log.error("trouble with the %s: %s", where, trouble)
    health[where] = trouble


class UdpSocket:
    """A UDP socket and its protocol: reads and answers by the vector, or one call each."""

    def __init__(self, name, sock, protocol, tally, limiter, vector=None):
        self.name, self.sock, self.protocol, self.tally = name, sock, protocol, tally
        self.limiter = limiter
        fits = sock.family == socket.AF_INET and protocol.datagram_bytes == MAX_DATAGRAM_BYTES
        self.vector = vector if fits else None

    def ready(self, now):
        """Read what waits, up to a bound, and answer it."""
        allow, handle = self.limiter.allow, self.protocol.datagram
        vector, tally = self.vector, self.tally
        data, peers, names = vector.receive(self.sock) if vector else self.receive()
        tally.received += len(data)
        tally.bytes_in += sum(map(len, data))
        # Before the limit: a flood in a server's name does not keep out what it repeats
        repeated = self.protocol.answer_repeats(data, peers, now)
        allowed = [allow(peer[0], now) for peer in peers]
        if not all(allowed):
            tally.limited += allowed.count(False)
            data, peers, names, repeated = (list(itertools.compress(column, allowed))
                                            for column in (data, peers, names, repeated))
        answers = []
        for packet, peer, name, answer in zip(data, peers, names, repeated):
            if answer is not None:
                answers.append((answer, name))
                continue
            try:
                for reply, to in handle(packet, peer, now):
                    if to is peer:              # in the form that the socket has it
                        answers.append((reply, name))
                    else:
                        self.send([(reply, to)])
            except Limited:
                tally.limited += 1
            except Exception as error:
                failed(error, tally, endpoint_text(*peer[:2]), self.name, packet)
        if answers and vector:
            vector.send(self.sock, answers, tally)
        else:
            self.send(answers)

    def receive(self):
        """As in MessageVector, for any socket; send() takes peers as they are."""
        data, peers, size = [], [], self.protocol.datagram_bytes
        for _ in range(DRAIN_DATAGRAMS):
            try:
                packet, peer = self.sock.recvfrom(1 << 16)     # Windows loses a longer one
            except (BlockingIOError, InterruptedError):
                break
            # Windows: an earlier answer met a closed port (ConnectionResetError)
            except OSError:
                continue
            data.append(packet[:size])
            peers.append(peer)
        return data, peers, peers

    def send(self, answers):
        for data, peer in answers:
            try:
                self.tally.bytes_out += self.sock.sendto(data, peer)
                self.tally.sent += 1
            except (OSError, OverflowError):        # no room, no route, no such port: it asks again
                self.tally.unsent += 1


# --- Connections ---------------------------------------------------------------------------------

class TcpConnection:
    """A TCP connection and its session: bounded in what it may hold, how long it may stall, and
    never ended by a reset.

    It waits for one thing at a time: input, room for `out`, or the session's job in the disk
    thread. Nothing is read while output waits or is being made: that bounds both. Once a session
    is done and its output is written, our side has ended, and what still comes is read away, as
    closing with unread input sends a reset."""

    def __init__(self, listener, sock, address, session):
        self.listener, self.server, self.tally = listener, listener.server, listener.tally
        self.sock, self.address, self.session = sock, address, session
        self.out: Any = b""                 # what waits for room
        self.deadline = math.inf            # for a reader to take it, or for what is read away
        self.linger_bytes = LINGER_BYTES
        self.events = 0                     # what the selector watches for; 0: a job is under way
        self.wait_for(selectors.EVENT_READ)

    def wait_for(self, events):
        if events == self.events:
            return
        if self.events:
            self.server.selector.unregister(self.sock)
        if events:
            call = self.writable if events == selectors.EVENT_WRITE else self.read
            self.server.selector.register(self.sock, events, call)
        self.events = events

    def read(self, now):
        try:
            data = self.sock.recv(RECV_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close(now)
            return
        if self.session.done:
            self.linger_bytes -= len(data)
            if not data or self.linger_bytes < 0:
                self.close(now)
        elif data:
            self.tally.received += 1
            self.tally.bytes_in += len(data)
            self.server.connections.move_to_end(self)
            self.answer(self.session.receive, data, now)
        else:
            self.answer(self.session.ended, now)
            if not self.out:                # else it is read once more
                self.close(now)

    def answer(self, method, *arguments):
        """Write what the session gives, and then what it gives for the rest of what came.

        The last argument is the time. Bad input ends the connection just as a fault does."""
        session, now = self.session, arguments[-1]
        try:
            data = method(*arguments)
            while data and self.write(data, now) and session.buffer and not session.done:
                data = session.receive(b"", now)
        except Exception as error:
            failed(error, self.tally, self.address, self.listener.name, session.buffer)
            session.done = True
        self.settle(now)

    def write(self, data, now):
        """True: all of it went out. What did not waits, and nothing is read until it has gone."""
        try:
            sent = self.sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.close(now)
            return False
        self.tally.bytes_out += sent
        if sent == len(data):
            self.tally.sent += 1
            self.out, self.deadline = b"", math.inf
            return True
        if not self.out:
            self.deadline = now + OUTPUT_TOTAL_S
        elif sent:                          # who reads slowly is not idle
            self.server.connections.move_to_end(self)
        self.out = memoryview(data)[sent:]
        return False

    def writable(self, now):
        if self.write(self.out, now) and not self.session.done:
            self.answer(self.session.receive, b"", now)
        else:
            self.settle(now)

    def settle(self, now):
        """Wait for what comes next; end once everything is written."""
        session = self.session
        if self.sock.fileno() < 0:
            return
        if self.out:
            self.wait_for(selectors.EVENT_WRITE)
        elif session.job is None or session.done:
            self.wait_for(selectors.EVENT_READ)
        elif self.events:
            self.wait_for(0)
            self.server.disk.submit(session.job, self.resume)
        if session.done and not self.out:
            self.deadline = now + LINGER_S
            try:
                self.sock.shutdown(socket.SHUT_WR)
            except OSError:
                self.close(now)

    def resume(self, result, now):
        """The session's job is done."""
        if not self.events and self.sock.fileno() >= 0:     # else it has answered without it (503)
            self.wait_for(selectors.EVENT_READ)
            self.answer(self.session.resume, result, now)

    def tick(self, now):
        if now >= self.deadline:
            self.close(now)
        elif not self.out and not self.session.done:
            self.answer(self.session.tick, now)

    def close(self, now):
        if self.sock.fileno() < 0:
            return
        self.wait_for(0)
        self.sock.close()
        del self.server.connections[self]
        for key in source_keys(self.address):
            decrement(self.server.by_source, key)
        self.server.guarded(self.session.closed, now)


def bound_output(connections, now):
    """What waits for slow readers is bounded in all: the longest wait is closed first."""
    waiting = [connection for connection in connections if connection.out]
    waiting.sort(key=lambda connection: -connection.deadline)
    total, seen = 0, set()              # many may wait for the same answer
    for connection in waiting:
        answer = connection.out.obj
        if id(answer) not in seen:
            seen.add(id(answer))
            total += len(answer)
        if total > OUTPUT_BYTES:
            connection.tally.limited += 1
            connection.close(now)


class TcpListener:
    """A listening socket and its protocol."""

    def __init__(self, server, name, sock, protocol, tally):
        self.server, self.name, self.sock, self.protocol = server, name, sock, protocol
        self.tally = tally
        self.paused = False

    def ready(self, now):
        """Take those who have connected, up to a bound."""
        for _ in range(ACCEPT_CONNECTIONS):
            try:
                sock, peer = self.sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in DESCRIPTORS_SHORT:
                    # What waits stays in the backlog until the next tick; it would spin the loop
                    report(self.server.health, "descriptors", error.strerror)
                    self.server.selector.unregister(self.sock)
                    self.paused = True
                    return
                continue                # the peer has gone already …
            if peer:
                self.server.health.pop("descriptors", None)
                self.accept(sock, canonical_address(peer[0]), now)
            else:                       # … as macOS tells it
                sock.close()

    def tick(self, now):
        if self.paused:
            self.server.selector.register(self.sock, selectors.EVENT_READ, self.ready)
            self.paused = False

    def accept(self, sock, address, now):
        server, protocol = self.server, self.protocol
        rules, settings = server.rules, server.settings
        if rules.blocked and address in rules.blocked:
            self.tally.limited += 1
            sock.close()
            return
        crowded = any(server.by_source[key] >= limit for key, limit in source_limits(
            address, settings["limits.connections_open"]))
        refused = (crowded and not rules.exempts(address)
                   or not rules.connection_limiter.allow(address, now))
        if refused:
            self.tally.limited += 1
        else:
            self.tally.connections += 1
        most = min(settings["limits.connections_total"], server.descriptors - DESCRIPTORS_KEPT)
        while server.connections and len(server.connections) >= most:
            self.make_room(now)
        sock.setblocking(False)
        session = (protocol.refusal if refused else protocol.session)(address, now)
        connection = TcpConnection(self, sock, address, session)
        server.connections[connection] = None
        for key in source_keys(address):
            server.by_source[key] += 1
        if refused or protocol.speaks_first:
            connection.answer(session.opened, now)
        else:                           # its request is usually here already
            connection.read(now)

    def make_room(self, now):
        """Close a connection that has had its answer, as those over a limit, or the one idle for
        longest, publishing game servers last."""
        everybody = self.server.connections
        idle = next((one for one in everybody if one.session.done and not one.out), None)
        idle = idle or next((one for one in everybody if not one.session.kept), None)
        idle = idle or next(iter(everybody))
        idle.tally.limited += 1
        idle.close(now)


# --- Threads -------------------------------------------------------------------------------------

class WorkerThread:
    """A thread for what can block, started with its first job.

    `done(result, now)` is called in the event loop; the result may be an exception."""

    def __init__(self, name, post):
        self.name, self.post = name, post
        self.jobs = queue.SimpleQueue()
        self.thread: Optional[threading.Thread] = None

    def submit(self, job, done):
        if self.jobs.qsize() >= WORKER_JOBS:
            self.post(done, RuntimeError("too many others are waiting"))
            return
        if self.thread is None:
            self.thread = threading.Thread(
                target=self.work, name="masterserver " + self.name, daemon=True)
            self.thread.start()
        self.jobs.put((job, done))

    def work(self):
        for job, done in iter(self.jobs.get, None):
            try:
                result = job()
            except Exception as error:
                result = error
            self.post(done, result)

    def stop(self, timeout):
        """True: it has ended. False: it is still at something."""
        if self.thread is None:
            return True
        self.jobs.put(None)
        self.thread.join(timeout)
        return not self.thread.is_alive()


# --- Host names ----------------------------------------------------------------------------------

class Lookup(NamedTuple):
    """A host name to be looked up; see Core.resolve."""

    host: str
    source: str                         # the address of the stranger who named it, "" for the ini
    like: str
    waiters: List[Callable[[str, float], None]]         # each `done` that waits for the address

    @property
    def key(self) -> Tuple[str, str, str]:
        return self.source, self.host, self.like


class HostNames:
    """Looks host names up in a thread, one after another: each can take half a minute.

    Those that the ini names go first, so that no stranger delays them by more than the one that is
    under way. A stranger has few at a time, and strangers take turns, so that there is room for
    others. The game servers
    of one machine, which have the same name and start together, wait for the same look-up. All of
    this happens in the event loop, but for the look-up itself."""

    def __init__(self, post):
        self.worker = WorkerThread("names", post)
        self.of_ini, self.of_strangers = collections.deque(), collections.deque()
        self.is_busy = False                            # one is under way
        self.sources = collections.defaultdict(int)     # look-ups of strangers, by source_keys()
        # The sources whose look-ups were begun last, the latest at the end
        self.served = collections.OrderedDict()
        # The latest Lookup by its key; once it has no room for more waiters another one follows
        self.open: Dict[Tuple[str, str, str], Lookup] = {}

    def resolve(self, host, done, source, like=""):
        """As Core.resolve."""
        lookup = Lookup(host, source, like, [done])
        latest = self.open.get(lookup.key)
        if latest is not None and (not source or len(latest.waiters) < LOOKUP_WAITERS):
            latest.waiters.append(done)
            return
        if source:
            self.admit(source)
            for key in source_keys(source):
                self.sources[key] += 1
            self.of_strangers.append(lookup)
        else:
            self.of_ini.append(lookup)
        self.open[lookup.key] = lookup
        self.begin_next()

    def admit(self, source):
        for key, limit in source_limits(source, LOOKUPS_PER_SOURCE):
            limit = min(limit, LOOKUPS_PER_NETWORK)
            if self.sources.get(key, 0) >= limit:
                raise Refused("busy", "%d host names that this source has named are being looked "
                                      "up; try again in a minute" % limit)
        if len(self.of_strangers) >= LOOKUPS:
            raise Refused("busy", "too many host names are being looked up; try again in a minute")

    def begin_next(self):
        if self.is_busy:
            return
        if self.of_ini:
            lookup = self.of_ini.popleft()
        elif self.of_strangers:
            lookup = self.next_of_strangers()
        else:
            return
        self.is_busy = True
        self.worker.submit(functools.partial(resolved, lookup.host, lookup.like),
                           functools.partial(self.looked_up, lookup))

    def next_of_strangers(self):
        """Take the look-up of the source that was served longest ago; a new source comes first."""
        turns = {source: turn for turn, source in enumerate(self.served, 1)}
        lookup = min(self.of_strangers, key=lambda one: turns.get(source_key(one.source), 0))
        self.of_strangers.remove(lookup)
        keep_latest(self.served, source_key(lookup.source), None, LOOKUP_TURNS)
        return lookup

    def looked_up(self, lookup: Lookup, result: Any, now: float) -> None:
        self.is_busy = False
        if lookup.source:
            for key in source_keys(lookup.source):
                decrement(self.sources, key)
        latest = self.open.get(lookup.key)
        if latest is lookup:
            del self.open[lookup.key]
        self.begin_next()
        for done in lookup.waiters:
            done(result if isinstance(result, str) else "", now)


# --- Webhooks ------------------------------------------------------------------------------------

WEBHOOK_S = 10.0                    # for each try
WEBHOOK_TRIES = 3                   # of one message
WEBHOOK_RETRY_S = 5.0               # later, unless the answer names a time
WEBHOOK_WITHIN_S = 2 * MINUTE       # later it is no news: the players may have left again
NEWS_PER_MINUTE = 10                # more is no news, and receivers have limits
# … of which one source has so few within `again_after`: it can list 32 servers, and say anything
NEWS_PER_SOURCE = 2


class AnyStatus(urllib.request.HTTPErrorProcessor):
    """Gives back every answer, whatever its status: urllib would follow redirects, and news must
    go nowhere else."""

    def http_response(self, request, response):
        return response

    https_response = http_response


def post_url(url, type, body):
    """POST once: the status, or what kept it from coming; and its Retry-After.

    The text of an exception may have the URL in it, which is a secret; its type has not."""
    try:
        request = urllib.request.Request(url, body, {
            "Content-Type": type, "User-Agent": "masterserver/" + __version__})
        with urllib.request.build_opener(AnyStatus).open(request, timeout=WEBHOOK_S) as answer:
            return str(answer.status), answer.headers.get("Retry-After", "")
    except Exception as error:
        return getattr(error, "reason", error).__class__.__name__, ""


class Webhook(WorkerThread):
    """A receiver of news, told in a thread of its own: one that hangs keeps nobody else waiting."""

    failing, dismissed = False, False

    def __init__(self, name, line):
        """`line`: FORMAT URL, as the ini has it."""
        super().__init__("webhook " + name, lambda *result: None)
        self.line = line
        self.format, self.url = line.split()

    def dismiss(self):
        """Send nothing more, and nothing of what waits."""
        self.dismissed = True
        self.stop(0.0)

    def tell(self, until, type, body):
        """Tell it one message, which is no news any more after `until`; a 429 is no try."""
        tries = 0
        while not self.dismissed and tries < WEBHOOK_TRIES and time.monotonic() < until:
            status, pause = post_url(self.url, type, body)
            good = status.startswith("2")
            if good == self.failing:        # once, and when it works again
                self.failing = not good
                log.warning("%s answers: %s", self.name, status)
            if good:
                return
            tries += status != "429"
            pause_s = int(pause) if re.fullmatch("[1-9][0-9]{0,3}", pause) else WEBHOOK_RETRY_S
            if tries == WEBHOOK_TRIES or time.monotonic() + pause_s > until:
                return                      # so that what waits is not old when its turn comes
            time.sleep(pause_s)


class News:
    """Tells webhooks when a listed server's players become as many as the ini says.

    It watches the servers of all masters and keeps, by their identity, which of them had fewer
    players: a server goes on where it was when another master has heard it. Every master follows
    all servers in this way and keeps the same account of messages, and one of them sends: a
    Cluster says which, see `sends` and `follows`.

    Used as a protocol is: told the time, the settings, and `epoch` as Web."""

    now = epoch = 0.0                               # now: of the last tick
    # Does this master send the messages?
    sends = staticmethod(lambda now: True)
    # Was the master that has heard this server heard without a break?
    follows = staticmethod(lambda server, now: True)

    def __init__(self, settings, registry, gauges):
        self.gauges, self.registry, self.hooks = gauges, registry, {}
        self.had_few = set()                        # servers that told of fewer players, by key
        self.departed = []                          # those of them that left since the last tick
        # When there was a message about each server, and those about each source
        self.sent_at = collections.OrderedDict()
        self.sent_by_source = collections.OrderedDict()
        self.sent_last = collections.deque([-math.inf] * NEWS_PER_MINUTE, NEWS_PER_MINUTE)
        gauges["news_dropped_total"] = 0
        registry.subscribe(self.on_registry_event, every_master=True)
        self.read(settings)

    def read(self, settings):
        """Take new settings over. A webhook whose line is the same goes on with what it sends."""
        self.settings, before = settings, self.hooks
        self.hooks = {}
        for name, line in settings["webhooks"].items():
            hook = before.get(name)
            self.hooks[name] = hook if hook and hook.line == line else Webhook(name, line)
        for name, hook in before.items():
            if self.hooks.get(name) is not hook:
                hook.dismiss()

    def stop(self):
        for hook in self.hooks.values():
            hook.dismiss()

    def tick(self, now):
        self.now = now
        # A server that left here may have been listed again at once, as another master has it
        for key in self.departed:
            if self.registry.get(*key) is None:
                self.had_few.discard(key)
        self.departed.clear()

    def on_registry_event(self, event, server):
        key = server.key
        if event == "gone":
            if key in self.had_few:
                self.departed.append(key)
        elif not server.confirmed or not server.responding:
            self.had_few.discard(key)               # what it tells when it is heard is no news
        elif not self.tells_players(server):
            return
        elif server.players < self.settings["notify.players"]:
            self.had_few.add(key)
        elif key in self.had_few:
            self.had_few.remove(key)
            if self.is_news(server):
                self.publish(server)

    @staticmethod
    def tells_players(server):
        """AIO's framed servers are listed before they are asked for anything."""
        return bool(server.game != "aio" or server.aio_published_name or server.version
                    or server.max_players)

    def is_news(self, server):
        """Is there to be a message about this server, which had few players and has many?"""
        games, again_after = self.settings["notify.games"], self.settings["notify.again_after"]
        if not self.hooks:
            return False
        if games and server.game not in games:
            return False
        if self.settings["notify.official_only"] and not server.official:
            return False
        # While its master could not be heard here, that master sent the message itself
        if not self.follows(server, self.now):
            return False
        if self.now - self.sent_at.get(server.key, -math.inf) < again_after:
            return False
        # A stranger can list many servers and say of each what he likes
        return not self.source_had_its_share(server, again_after)

    def source_had_its_share(self, server, again_after):
        for key, limit in source_limits(server.source, NEWS_PER_SOURCE):
            times = self.sent_by_source.get(key, ())
            if len(times) >= limit and self.now - times[-limit] < again_after:
                return not self.registry.rules.exempts(server.source)
        return False

    def publish(self, server):
        """Enter a message in the account; send it if no other master does."""
        if self.now - self.sent_last[0] < MINUTE:
            self.gauges["news_dropped_total"] += self.sends(self.now)
            return
        self.sent_last.append(self.now)
        keep_latest(self.sent_at, server.key, self.now, KNOWN_SERVERS)
        for key, limit in source_limits(server.source, NEWS_PER_SOURCE):
            times = self.sent_by_source.get(key, ())
            keep_latest(self.sent_by_source, key, (*times, self.now)[-limit:], KNOWN_SERVERS)
        if self.sends(self.now):
            until = time.monotonic() + WEBHOOK_WITHIN_S
            shown = with_times(server_json(server), server, self.epoch, self.registry.master)
            for hook in self.hooks.values():
                message = NEWS_FORMATS[hook.format](server, self.settings, shown)
                hook.submit(functools.partial(hook.tell, until, *message), None)


# --- What is asked of the system -----------------------------------------------------------------

def file_stamps(settings):
    """Of the ini and the text files that it names: a value that changes when one of them does."""
    stamps = []
    for path in (settings.path, *map(settings.file, TEXT_FILES)):
        with contextlib.suppress(OSError):
            found = os.stat(path)
            stamps.append((path, found.st_mtime_ns, found.st_size))
    return stamps


def is_special(path):
    """There, and no plain file: a pipe, a terminal, a folder."""
    return os.path.exists(path) and not os.path.isfile(path)


def check_is_file(path):
    """Raise ValueError where reading may wait for ever."""
    if is_special(path) and path != os.devnull:
        raise ValueError("%s: not a plain file; reading from a pipe may take for ever" % path)


def read_text_files(settings):
    """Put the files that the settings name into `settings.texts`; raises SettingsError."""
    for name in TEXT_FILES:
        path, text = settings.file(name), ""
        try:
            if path:
                check_is_file(path)
                with open(path, encoding="utf-8-sig") as file:
                    text = file.read()
            if name == "http.template":
                list_template(text)
        except (OSError, ValueError) as error:
            raise SettingsError("[%s] %s = %s: %s" % (*name.split("."), path, error)) from None
        settings.texts[name] = text


def take_over(settings, new):
    """Copy the live settings that have changed; gives their names, and warns of those that need a
    restart."""
    changed = []
    for row in SETTINGS:
        was, now = ((some[row.name], some.texts.get(row.name)) for some in (settings, new))
        if was != now and row.live:
            changed.append(row.name)
            settings.values[row.name] = new[row.name]
        elif was != now:
            log.warning("[%s] %s has changed; that needs a restart", row.section, row.key)
    settings.texts, settings.found = new.texts, new.found
    return changed


def descriptor_limit(raise_to=0):
    """How many files and sockets this process may have open, raised to `raise_to` if it may."""
    if WINDOWS:
        return 512                          # what its select() serves
    limit = DESCRIPTORS_UNTOLD
    with contextlib.suppress(OSError, ValueError):          # a sandbox may forbid either call
        limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = min(raise_to, hard)
        if limit < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            limit = wanted
    return limit


def own_address(far="192.0.2.1"):
    """This machine's address on the way to `far`, as the machine knows it; "" where no way leads.

    Nothing is sent. The default stands for the internet: an address for documentation."""
    family = socket.AF_INET6 if ":" in far else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((far, 9))
            return sock.getsockname()[0]
    except OSError:
        return ""


def addresses(host):
    """The addresses of a host, IPv4 first; those with a route to them, if any. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    known = list(dict.fromkeys(canonical_address(str(entry[4][0])) for entry in found))
    return list(filter(own_address, known)) or known


def resolved(host, like=""):
    """Of its addresses() `like`, or the first of its family, or the first."""
    return min(addresses(host), key=lambda address: (
        address != like, (":" in address) != (":" in like)))


def bound_socket(family, transport, address, port):
    """A non-blocking socket on this address; port 0 takes a free one. Raises OSError."""
    tcp = transport == "tcp"
    sock = socket.socket(family, socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if WINDOWS:                     # there SO_REUSEADDR would let another program take the port
            exclusive = getattr(socket, "SO_EXCLUSIVEADDRUSE")  # noqa: B009
            sock.setsockopt(socket.SOL_SOCKET, exclusive, 1)
        elif tcp:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        for name, value in TCP_OPTIONS if tcp else UDP_OPTIONS:
            level = socket.IPPROTO_TCP if name.startswith("TCP") else socket.SOL_SOCKET
            with contextlib.suppress(AttributeError, OSError):
                sock.setsockopt(level, getattr(socket, name), value)
        if tcp:
            sock.listen(BACKLOG)
        sock.setblocking(False)
        return sock
    except BaseException:
        sock.close()
        raise


# --- The list on disk ----------------------------------------------------------------------------

SAVE_LATE_S = 10.0          # a batch takes milliseconds, a disk that has to spin up some seconds
# For servers that live as long as their connection: AIO's come back. Nor do those stay for longer
# which nothing here can hear, as their game's listener has been switched off
RESTORED_S = 60.0
RESTORE_WITHIN_S = HOUR     # who was last seen before that is not worth showing

# What is saved of a server beside its identity and its times, in this order. New fields go last;
# a longer row is an older program's.
STORED: Dict[str, type] = {
    "name": str, "mode": str, "map": str, "version": str, "players": int, "max_players": int,
    "playing": int, "description": str, "flavor": int, "verified": str, "responding": bool,
    "details": dict, "source": str, "pinned": bool, "luanti_announcement": dict,
    "zone_owner": dict}

CLEANERS: Dict[Union[str, type], Callable[[Any], Any]] = {
    str: lambda text: clean(text, TEXT_CHARACTERS), int: clamp, bool: bool,
    dict: lambda details: {clean(name): clean(str(text)) for name, text in details.items()},
    "luanti_announcement": lambda told: told and luanti_fields(told)}


def stored_row(server, epoch):
    """Its ListedRow, the fields not yet encoded. `epoch`: wall clock minus monotonic clock."""
    seen = server.last_seen + epoch
    return ListedRow(
        server.game, server.address, server.port, expires=seen + min(server.lifetime, DAY),
        first_seen=server.first_seen + epoch, last_seen=seen,
        fields=[getattr(server, name) for name in STORED])


def encoded_row(row):
    return row._replace(fields=ENCODER.encode(row.fields))


def restored_server(row, now, wall):
    """The server of a saved row, unconfirmed; None if it cannot be read. Raises Refused."""
    game, address, port, expires, first_seen, last_seen, text = row
    told = {name: CLEANERS.get(name, CLEANERS[kind])(value)
            for (name, kind), value in zip(STORED.items(), stored_fields(text))
            if type(value) is kind}
    source, pinned = told.pop("source", address), told.pop("pinned", False)
    if (not is_unicast(address) or not is_unicast(source)
            or told.get("verified") not in VERIFIED or told.get("flavor", 0) > 255):
        return None
    server = Server(game, address, port, source, now, expires - last_seen, **told)
    if server.lifetime > DAY - 1:           # it was infinite, for which a day stood once
        server.lifetime = math.inf if server.verified == "query" else RESTORED_S
    server.confirmed, server.pinned = False, pinned
    # The clock may have been put back since
    server.first_seen = min(now, first_seen + now - wall)
    server.last_seen = min(now, last_seen + now - wall)
    return server


class SavedList:
    """Carries the registry to the database and back. One batch is under way at a time; what fails
    is tried again with the next one."""

    def __init__(self, database, registry, disk, health):
        self.database, self.registry, self.disk, self.health = database, registry, disk, health
        self.hourly_players = {}                            # the last day's hourly player counts
        self.began: Optional[float] = None          # the batch under way
        self.minute = -1.0                          # of the last batch with everybody in it

    def restore(self, now, wall, protocols):
        """List what was listed before the restart; `protocols`: those that run now."""
        try:
            rows = self.database.load(wall)
            self.hourly_players = self.database.hourly_players(wall)
        except DISK_ERRORS as error:
            report(self.health, "database", error_text(error))
            return
        registry = self.registry
        registry.silence_counts_from = now
        for row in rows:
            registry.altered.add(row.key)           # a server that is not listed again is to go
            with contextlib.suppress(Refused):
                server = restored_server(row, now, wall)
                if (server and server.responding            # else the ini names it anyway
                        and wall - row.last_seen <= RESTORE_WITHIN_S):
                    if not any(protocol.serves(server) for protocol in protocols):
                        server.lifetime = min(server.lifetime, RESTORED_S)
                    registry.check_admission(server.key, server.source, server.name)
                    registry.insert(server)
        log.info("restored as before the restart, unconfirmed: %s",
                 plural(registry.total, "server"))

    def tick(self, now, wall):
        """Once a second: hand over what has changed, and once a minute everybody's players."""
        if self.began is not None:
            if now - self.began >= SAVE_LATE_S:
                report(self.health, "database",
                       "nothing has been written for %d s or more" % SAVE_LATE_S)
            return
        registry = self.registry
        sample = []
        if wall // MINUTE != self.minute:           # the times of all move
            self.minute = wall // MINUTE
            for game, listed in registry.games.items():
                here = [server for server in listed.values() if server.responding]
                sample += [(*server.key, server.players) for server in here]
                sample.append((game, "", 0, sum(server.players for server in here)))
                registry.altered.update((game, *place) for place, server in listed.items()
                                        if not server.master)
        if sample or registry.altered:
            self.save(now, wall, sample)

    def save(self, now, wall, sample):
        """Have the disk thread write what has changed."""
        keys, self.registry.altered = self.registry.altered, set()
        servers = [self.registry.get(*key) for key in keys]
        rows = [stored_row(server, wall - now) for server in servers
                if server and not server.master]
        gone = keys.difference(row.key for row in rows)
        self.began = now

        def write():
            # Encoding 10,000 rows takes 60 ms
            self.database.save(list(map(encoded_row, rows)), gone)
            return self.database.sample(wall, sample) if sample else None

        def written(result, now):
            self.began = None
            if not isinstance(result, Exception):
                self.hourly_players = result or self.hourly_players
                if self.health.pop("database", ""):
                    log.info("the list is saved again")
                return
            self.minute = -1.0                          # the next batch is everybody, …
            if len(keys) < ALTERED_SERVERS:
                self.registry.altered |= keys           # … and who has gone
            report(self.health, "database", error_text(result))
        self.disk.submit(write, written)


# --- Several masters, one list -------------------------------------------------------------------
#
# Cluster runs in the event loop. Its thread makes one exchange after another through MasterLogs,
# which speaks to Redis or Valkey through EngineLink.

# A reply has a thousand records at most. The longest record, of a Luanti server, has 25 kB, or
# twice as much if each byte has to be escaped.
REPLY_BYTES = 64 << 20
REPLY_PART_BYTES = 50       # what Python needs for each part of a reply beside its bytes
CLUSTER_BATCH = 1000        # records that are written or read at once; usually 400 kB
# One exchange reads 60,000 servers of a log at most. The event loop needs 15 ms for each 1,000.
CLUSTER_BATCHES = 60
CLUSTER_MASTERS = 16        # operators run two or three masters
CLUSTER_RETRY_S = 1.0       # before each connection; so the whole list is sent again within 5 s
CLUSTER_PACE_S = 0.3        # between writing and reading; a change reaches others in two exchanges
CLUSTER_LEASE_S = 10        # a master that is silent for so long has stopped, and its log expires
# After a lease has ended, the next attempt comes a second later, and its answer may take another.
CLUSTER_MARGIN_S = 2.0
# A master begins a new log when the old one has more records than this for each listed server,
# not counting CLUSTER_LOG_SERVERS more servers.
CLUSTER_LOG = 4
CLUSTER_LOG_SERVERS = 1000
CLUSTER_LOG_BYTES = 32 << 20        # of changes in a log; otherwise long records would fill Redis
# All other masters together can have two lists of 50,000 servers, which is what clients take. A
# server needs some 2 kB.
CLUSTER_SERVERS = 100_000
# A reply takes a millisecond; an engine that forks or saves may need a second.
ENGINE_ANSWER_S = 3.0


class EngineLink:
    """A connection to Redis or Valkey. It blocks, so only the cluster's thread and --check use it.

        > *2 $4 LLEN $1 x                                       each part ended by CRLF
        < +OK   -ERR unknown command   :1000   $5 hello   $-1   *2 $3 foo :7

    The protocol is RESP2: https://redis.io/docs/latest/develop/reference/protocol-spec/. Methods
    raise OSError when the connection fails, and Malformed or ValueError when the engine answers
    with an error or with something that is no RESP2."""

    file: Any = None

    def __init__(self, engine: EngineAddress):
        """Connect, log in and select the database."""
        self.password = engine.password
        if engine.path:
            self.sock = socket.socket(socket.AF_UNIX)
        else:
            self.sock = socket.create_connection((engine.host, engine.port), ENGINE_ANSWER_S)
        try:
            self.open(engine)
        except BaseException:
            self.close()
            raise

    def open(self, engine):
        """Finish the connection whose socket has just been created."""
        self.sock.settimeout(ENGINE_ANSWER_S)
        if engine.path:
            self.sock.connect(engine.path)
        if engine.tls:
            import ssl              # the import takes 10 ms, and only TLS needs the module
            context = ssl.create_default_context()
            self.sock = context.wrap_socket(self.sock, server_hostname=engine.host)
        self.file = self.sock.makefile("rb")
        if engine.password:
            login = [engine.password]
            if engine.user:
                login.insert(0, engine.user)
            self.ask("AUTH", *login)
        self.ask("SELECT", engine.database)

    def close(self):
        """Close the connection."""
        if self.file:
            self.file.close()           # an open file would keep the socket open
        self.sock.close()

    def ask(self, *arguments):
        """Send a command and return the reply.

        `arguments`: the command's name and its arguments, as bytes, texts or numbers. A reply is
        bytes, a list of replies for an array, or b"" where the engine has nothing ($-1)."""
        command = [b"*%d\r\n" % len(arguments)]
        for argument in arguments:
            if not isinstance(argument, bytes):
                argument = str(argument).encode()
            command.append(b"$%d\r\n%s\r\n" % (len(argument), argument))
        self.sock.sendall(b"".join(command))
        self.bytes_left = REPLY_BYTES
        return self.read_reply()

    def read_reply(self):
        """Read one reply and return it, as described in ask(). Raise Malformed for an error
        reply, and for a reply that is longer than `bytes_left`."""
        line = self.file.readline(REPLY_BYTES)
        kind, value = line[:1], line[1:].rstrip()
        if kind == b"-":
            raise Malformed(self.without_password(decode_utf8(value)))
        self.use_bytes(len(line) + REPLY_PART_BYTES)
        if kind in (b"+", b":"):
            return value
        if kind not in (b"$", b"*"):
            raise Malformed("it has closed the connection, or is not Redis")
        length = int(value)
        if length < 0:
            return b""
        self.use_bytes(length)
        if kind == b"*":
            return [self.read_reply() for _ in range(length)]
        text = self.file.read(length + len(b"\r\n"))
        return text[:length]

    def use_bytes(self, count):
        """Count these bytes of the current reply; raise Malformed if it becomes too long."""
        self.bytes_left -= count
        if self.bytes_left < 0:
            raise Malformed("a reply that is too long")

    def without_password(self, error):
        """Return the engine's error text without our password, which the error may repeat."""
        if not self.password:
            return error
        return error.replace(self.password, "...")


class NameTaken(Exception):
    """Another process holds the lease under this master's name."""


class LogEntry(NamedTuple):
    """What one record of a master's log says about one server."""

    key: Key
    server: Optional[Server]            # None if the server has left or the record is unreadable


class LogUpdate(NamedTuple):
    """What is new in another master's log."""

    master: str
    has_webhooks: bool
    is_new_log: bool                    # True: `entries` are all servers that this master has
    entries: List[LogEntry]


UNREADABLE = LogEntry(("", "", 0), None)


class MasterLogs:
    """The leases and the logs that masters keep in Redis or Valkey, as one of the masters uses
    them.

    Each master writes the servers that it has heard itself to a log of its own: a list of JSON
    records, first of all its servers, then of those that have changed. A record without fields
    says that the server has left. The master's lease is a key that expires. The lease names the
    log and says whether this master has webhooks. The log expires as well. One exchange:

        > GET masterserver:a                            5e1f…-1 news: it is our own lease
        > RPUSH masterserver:5e1f…-1 ["iceball","203.0.113.7",20737,…]
        > EXPIRE masterserver:5e1f…-1 10
        > SET masterserver:a "5e1f…-1 news" EX 10       with NX if nobody held the lease
        > SADD masterserver a
        > SMEMBERS masterserver                         a, b
        > GET masterserver:b                            77aa…-4
        > LRANGE masterserver:77aa…-4 200 699           the records of b that are new to us

    The name of a log begins with a number that the writing process draws at its start. So a
    process recognizes its own lease, and two masters that have one name, because both come from
    one image, cannot both hold it. Each connection begins a new log, and a log that has grown long
    is followed by a new one. Records that an old connection delivers late end up in a log that
    nobody reads any more. A lease names a log only once the log is complete.

    connect() and exchange() can block, so only the cluster's thread calls them. close() is called
    after that thread has ended. Between two exchanges the event loop reads the attributes, and may
    call disconnect(). Methods raise NameTaken, or what EngineLink raises."""

    link: Any = None                    # the EngineLink, None without a connection
    # When this connection has renewed the lease last; None until it has done so once
    renewed_at: Any = None
    log_name = b""
    logs_begun = 0                      # how many logs this process has begun; part of their names
    log_records = 0                     # how many records the current log has
    appended_bytes = 0                  # bytes of records that followed the log's first, whole list

    def __init__(self, engine: EngineAddress, prefix: str, name: str, tally: Tally):
        """`prefix`: the text that all keys begin with; `name`: this master's name."""
        self.engine = engine
        self.prefix = prefix.encode()
        self.name = name
        self.tally = tally
        self.process_id = b"%016x" % RANDOM.getrandbits(64)
        self.lease_key = self.full_key(name.encode())
        self.records_read = {}          # how many records of each other master's log, by its name

    def full_key(self, name):
        """Return the engine's key for a log or a master's lease."""
        return self.prefix + b":" + name

    def connect(self):
        """Connect to the engine, and raise NameTaken if another process holds our name."""
        time.sleep(CLUSTER_RETRY_S)
        self.link = EngineLink(self.engine)
        self.renewed_at = None
        self.records_read = {}
        self.own_lease()

    def disconnect(self):
        """Close the connection, if there is one."""
        if self.link:
            self.link.close()
        self.link = None

    def close(self):
        """Give the lease up, so that the next process of this name can take it at once."""
        with contextlib.suppress(NameTaken, Malformed, OSError, ValueError):
            if self.link and self.own_lease():
                self.link.ask("DEL", self.lease_key)
        self.disconnect()

    def exchange(self, records, begins_log, has_webhooks):
        """Write what is new here; CLUSTER_PACE_S later read what is new elsewhere. Return a list
        with a LogUpdate for each other master.

        `records`: pairs of a server's stored row and whether the server is confirmed;
        `begins_log`: True if the records are all our servers and begin a new log;
        `has_webhooks`: whether this master has webhooks."""
        lease = self.own_lease()
        if self.renewed_at is not None and not lease:
            raise Malformed(self.why_lease_ended())
        if begins_log:
            self.logs_begun += 1
            self.log_name = b"%s-%d" % (self.process_id, self.logs_begun)
            self.log_records = 0
        self.append_records(records)
        if begins_log:
            self.appended_bytes = 0
        self.renew_lease(lease, has_webhooks)
        time.sleep(CLUSTER_PACE_S)
        return self.read_other_logs()

    def own_lease(self):
        """Return the lease of this process, or b"" if nobody holds it. Raise NameTaken if another
        process holds it."""
        lease = self.link.ask("GET", self.lease_key)
        if lease and not lease.startswith(self.process_id):
            raise NameTaken("another master is called %s as well; change its [cluster] name"
                            % self.name)
        return lease

    def why_lease_ended(self):
        """Return the reason why our lease is not there any more, in words."""
        held_up_s = time.monotonic() - self.renewed_at
        if held_up_s >= CLUSTER_LEASE_S:
            return "this master was held up for %d s, and its lease has ended" % held_up_s
        return "this master's records have disappeared from Redis (restart, flush or eviction)"

    def append_records(self, records):
        """Append records, as in exchange(), to our log."""
        log_key = self.full_key(self.log_name)
        for start in range(0, len(records), CLUSTER_BATCH):
            batch = []
            for row, is_confirmed in records[start:start + CLUSTER_BATCH]:
                columns = encoded_row(row)
                batch.append(to_json((*columns, is_confirmed)))
            self.link.ask("RPUSH", log_key, *batch)
            # If the link breaks now, the incomplete log must expire like any other
            self.link.ask("EXPIRE", log_key, CLUSTER_LEASE_S)
            self.appended_bytes += sum(map(len, batch))
        self.log_records += len(records)
        self.link.ask("EXPIRE", log_key, CLUSTER_LEASE_S)

    def renew_lease(self, lease, has_webhooks):
        """Renew our lease, or take it if `lease` is b"". The log must be complete."""
        value = self.log_name
        if has_webhooks:
            value += b" news"
        options = ["EX", CLUSTER_LEASE_S]
        if not lease:
            options.append("NX")                    # only if nobody else has taken it meanwhile
        if self.link.ask("SET", self.lease_key, value, *options) != b"OK":
            self.own_lease()
            raise Malformed("the lease could not be taken")
        self.renewed_at = time.monotonic()
        self.link.ask("SADD", self.prefix, self.name)

    def read_other_logs(self):
        """Return a LogUpdate for each other master that holds a lease."""
        updates, records_read = [], {}
        for member in self.link.ask("SMEMBERS", self.prefix)[:CLUSTER_MASTERS]:
            master = member.decode("ascii", "replace")
            lease = self.link.ask("GET", self.full_key(member))
            log_name, _, webhook_mark = lease.partition(b" ")
            if not log_name:
                self.link.ask("SREM", self.prefix, member)
            elif master != self.name and re.fullmatch(WORD, master):
                is_new_log = log_name not in self.records_read
                already_read = self.records_read.get(log_name, 0)
                records = self.read_new_records(log_name, already_read)
                entries = [self.decode_record(master, record) for record in records]
                records_read[log_name] = already_read + len(records)
                has_webhooks = webhook_mark == b"news"
                updates.append(LogUpdate(master, has_webhooks, is_new_log, entries))
        self.records_read = records_read
        return updates

    def read_new_records(self, log_name, already_read):
        """Return the records that follow the first `already_read` ones in this log."""
        records = []
        for _ in range(CLUSTER_BATCHES):
            start = already_read + len(records)
            batch = self.link.ask("LRANGE", self.full_key(log_name),
                                  start, start + CLUSTER_BATCH - 1)
            records += batch
            if len(batch) < CLUSTER_BATCH:
                break
        return records

    def decode_record(self, master, record):
        """Return the LogEntry for a record of another master's log; UNREADABLE, which no server
        has, if the record is not understood."""
        try:
            values = list(json.loads(record))
            columns = len(ListedRow._fields)
            row = self.checked_row(ListedRow(*values[:columns]))
            server = restored_server(row, time.monotonic(), time.time())
        except (ValueError, TypeError, RecursionError, Refused) as error:
            failed(Malformed(error), self.tally, master, "cluster", record)
            return UNREADABLE
        if server:
            server.master = master
            # A master of an older version does not send this value: its servers are confirmed
            is_confirmed, = values[columns:columns + 1] or [True]
            server.confirmed = is_confirmed is not False
            if server.lifetime == math.inf:
                server.lifetime = RESTORED_S
        return LogEntry(row.key, server)

    @staticmethod
    def checked_row(row):
        """Return the row with its address in the usual form. Raise ValueError if a value has the
        wrong type or is out of bounds."""
        if not row.has_types() or not re.fullmatch(WORD, row.game):
            raise ValueError("values of another type")
        if not math.isfinite(row.expires + row.first_seen + row.last_seen):
            raise ValueError("a time that is not finite")
        return row._replace(address=read_address(row.address))


def default_master_name(database):
    """Return a name for this master: the host's name, and a number that stays with the database.
    `database` is None if there is none; then the number changes with each start."""
    number = RANDOM.getrandbits(32)
    if database:
        with contextlib.suppress(*DISK_ERRORS):
            number = database.number(number)
    host = re.sub("[^A-Za-z0-9.-]", "-", socket.gethostname())[:50]
    return "%s-%08x" % (host, number)


class Cluster:
    """Shares this master's list with other masters, through MasterLogs.

    A thread makes the exchanges, one at a time, because they can block. Everything else is done in
    the event loop. Without a link each master serves what it knows. `pending` has what this master
    has still to send: one entry for each server that has changed."""

    # The attributes that an own server takes over from another master that has heard it later. The
    # other attributes say how this master knows the server, who may change it, and whether the ini
    # names it; that is for each master to know.
    TAKEN_OVER = STORED.keys() - {"source", "zone_owner", "pinned"}

    linked_at = 0.0                             # when the link began to work; 0 without a link
    # Since when another process has held this master's name; None if none does
    name_taken_since: Optional[float] = None

    def __init__(self, master_server):
        settings = master_server.settings
        self.master_server = master_server
        self.registry = master_server.registry
        self.name = settings["cluster.name"] or default_master_name(master_server.database)
        self.registry.master = self.name
        self.tally = master_server.tallies.setdefault("cluster", Tally())
        self.logs = MasterLogs(settings["cluster.redis"], settings["cluster.prefix"], self.name,
                               self.tally)
        self.pending = {}                       # own servers by key; None if the server has left
        self.exchanged_at = time.monotonic()    # when the last exchange ended, or the start
        self.masters_with_lease = {}            # has_webhooks of each other master, by name
        self.remote_servers = collections.defaultdict(dict)     # by master, and then by key
        self.heard_at = {}                      # when each other master was heard last
        self.without_room = {}                  # keys of remote servers for which there was no room
        self.thread = WorkerThread("cluster", master_server.post)
        self.registry.subscribe(self.on_registry_event)
        master_server.news.sends, master_server.news.follows = self.sends_news, self.follows
        master_server.protocols.append(self)
        self.start_exchange(time.monotonic())

    def close(self):
        """End the thread, and give the lease up if the thread has ended in time."""
        if self.thread.stop(ENGINE_ANSWER_S):
            self.logs.close()

    # Exchanges

    def start_exchange(self, now):
        """Have the thread make an exchange, or connect if there is no connection."""
        if self.logs.link is None:
            self.pending = {}                   # the first exchange will send the whole list
            self.thread.submit(self.logs.connect, self.on_exchange_end)
            return
        begins_log = self.needs_new_log()
        if begins_log:
            self.pending = {server.key: server for server in self.registry.servers()
                            if not server.master}
        records = self.pending_records(epoch=time.time() - now)
        self.pending = {}
        has_webhooks = bool(self.master_server.news.hooks)
        exchange = functools.partial(self.logs.exchange, records, begins_log, has_webhooks)
        self.thread.submit(exchange, self.on_exchange_end)

    def needs_new_log(self):
        """Must the next exchange begin a new log, because the link is new or the log is long?"""
        if not self.linked_at:
            return True
        max_records = CLUSTER_LOG * (self.registry.total + CLUSTER_LOG_SERVERS)
        return (self.logs.log_records > max_records
                or self.logs.appended_bytes > CLUSTER_LOG_BYTES)

    def pending_records(self, epoch):
        """Return `pending` as records for MasterLogs.exchange(). `epoch`: wall clock minus
        monotonic clock, in seconds."""
        records = []
        for (game, address, port), server in self.pending.items():
            if server:
                records.append((stored_row(server, epoch), server.confirmed))
            else:
                departed = ListedRow(game, address, port, 0.0, 0.0, 0.0, [])
                records.append((departed, True))
        return records

    def on_exchange_end(self, result, now):
        """Use the result of connect() (None), of exchange() (a list of LogUpdates) or the
        exception that one of them raised; then start the next exchange."""
        if isinstance(result, Exception):
            self.logs.disconnect()
            self.linked_at = 0.0
            self.report_broken_link(result, now)
        elif result is not None:
            self.report_working_link(now)
            for update in result:
                self.remember_update(update, now)
            self.exchanged_at = now
            self.masters_with_lease = {update.master: update.has_webhooks for update in result}
        self.start_exchange(now)

    def report_broken_link(self, error, now):
        """Say in the log and at /healthz why there is no link.

        If the name is taken, wait before saying so: the lease may be that of a killed process of
        this master, and then it ends soon."""
        health = self.master_server.health
        if not isinstance(error, NameTaken):
            self.name_taken_since = None
            report(health, "cluster", ascii(error_text(error)))
        elif self.name_taken_since is None:
            self.name_taken_since = now
            health.pop("cluster", None)
        elif now - self.name_taken_since >= CLUSTER_LEASE_S + CLUSTER_MARGIN_S:
            report(health, "cluster", str(error))

    def report_working_link(self, now):
        """Say, after the first exchange on a connection, that the link works."""
        self.name_taken_since = None
        if not self.linked_at:
            self.linked_at = now
            self.tally.connections += 1
            self.master_server.health.pop("cluster", None)
            log.info("linked to the other masters as %s", self.name)

    # Other masters' servers

    def remember_update(self, update, now):
        """Remember the servers of a LogUpdate, and bring the list up to date with them."""
        self.heard_at[update.master] = now
        servers = self.remote_servers[update.master]
        changed_keys = dict.fromkeys(entry.key for entry in update.entries)
        if update.is_new_log:
            changed_keys.update(servers)
            servers.clear()
        room = CLUSTER_SERVERS - sum(map(len, self.remote_servers.values()))
        for key, server in update.entries:
            if servers.pop(key, None):
                room += 1
            if server and room > 0:
                servers[key] = server
                room -= 1
        for key in changed_keys:
            self.publish_entry(key)

    def publish_entry(self, key):
        """Bring one server of our list up to date with what other masters know about it.

        If several other masters know the server, the one that has heard it last counts. If none
        knows it any more, it leaves our list, unless we have heard it ourselves."""
        registry = self.registry
        server = registry.get(*key)
        remote = self.latest_remote_server(key)
        self.without_room.pop(key, None)
        if remote is None:
            if server and server.master:
                registry.remove_any(server)
        elif server is None:
            if registry.total < registry.rules.max_servers:
                registry.insert(copy.copy(remote))
            else:
                self.without_room[key] = None
        elif server.master:
            self.copy_attributes(remote, server, (*STORED, "confirmed", "master"))
        elif not self.own_entry_wins(server, remote):
            self.copy_attributes(remote, server, self.TAKEN_OVER)

    def latest_remote_server(self, key):
        """Return the server as the other master that heard it last knows it. Return None if no
        other master knows it, or if our rules forbid to list it."""
        candidates = [servers[key] for servers in self.remote_servers.values() if key in servers]
        latest = max(candidates, key=lambda server: server.last_seen, default=None)
        if latest is None:
            return None
        try:
            # "pinned" because publish_entry() looks at the limit on all servers itself
            self.registry.check_admission(key, latest.source, latest.name, pinned=True)
        except Refused:
            return None
        return latest

    @staticmethod
    def own_entry_wins(server, remote):
        """Does our own entry of a server win against that of another master? It does if we have
        heard the server later, or if the server has no lifetime, because then our connection to
        it or our polls decide when it leaves."""
        if server.lifetime == math.inf:
            return True
        return server.last_seen >= remote.last_seen

    def copy_attributes(self, remote, server, names):
        """Give a listed server the named attributes of another master's entry."""
        fields = {}
        for name in names:
            fields[name] = getattr(remote, name)
        self.registry.update(server, fields)

    def on_registry_event(self, event, server):
        """Have the next exchange send what has changed in our own list."""
        if event == "gone":
            self.pending[server.key] = None
            self.publish_entry(server.key)      # another master may still know the server
        else:
            self.pending[server.key] = server

    # News

    def current_masters(self, now):
        """Return has_webhooks of the other masters, by name; {} if the last exchange was too long
        ago.

        They are those of the last exchange, for as long as their leases and our own last. So a
        master that loses the link begins to send news itself at the moment when the others cease
        to count on it."""
        if now >= self.exchanged_at + CLUSTER_LEASE_S:
            return {}
        return self.masters_with_lease

    def sends_news(self, now):
        """Is it for this master to send news? Of the masters with webhooks, the one whose name
        sorts first sends them."""
        for name, has_webhooks in self.current_masters(now).items():
            if has_webhooks and name <= self.name:
                return False
        return True

    def follows(self, server, now):
        """Has this master heard the server without a break, itself or through another master?"""
        if not server.master:
            return True
        return server.master in self.current_masters(now)

    # Called like a protocol

    def read(self, settings):
        """Apply the rules of new settings to all servers of other masters."""
        for servers in self.remote_servers.values():
            for key in servers:
                self.publish_entry(key)

    def tick(self, now):
        """Once a second: remove servers of masters that have stopped, list servers for which
        there is room now, keep the other remote servers listed, and update the figures of
        /healthz."""
        self.expire_masters(now)
        self.list_those_without_room()
        server_counts = self.keep_remote_servers(now)
        own_servers = server_counts[self.name]
        self.master_server.cluster.update(
            connected=self.linked_at > 0,
            servers=dict(server_counts),
            lag_seconds=round(now - self.exchanged_at, 1),
            pending=len(self.pending) if self.linked_at else own_servers,
            reconnects_total=max(0, self.tally.connections - 1))

    def keep_remote_servers(self, now):
        """Keep other masters' servers from expiring while there is a link. Return how many
        servers each master has in the list."""
        counts = collections.Counter({self.name: 0})
        for servers in self.registry.games.values():
            for server in servers.values():
                counts[server.master or self.name] += 1
                if server.master and self.linked_at:
                    server.last_seen = now
        return counts

    def list_those_without_room(self):
        """List servers that the list had no room for, if there is room now. A batch takes 20 ms,
        and there is one batch a second at most."""
        room = self.registry.rules.max_servers - self.registry.total
        count = min(room, CLUSTER_BATCH)
        if count > 0:
            keys = list(self.without_room)[:count]
            for key in keys:
                self.publish_entry(key)

    def expire_masters(self, now):
        """Forget servers of masters that have been silent for the servers' lifetimes."""
        for master, servers in list(self.remote_servers.items()):
            counts_from = self.silence_counts_from(master)
            for key, server in list(servers.items()):
                if counts_from + server.lifetime <= now:
                    del servers[key]
                    self.publish_entry(key)
            if not servers:
                del self.remote_servers[master], self.heard_at[master]

    def silence_counts_from(self, master):
        """Return the time from which this master's silence counts. Without a link no master can
        be heard, so the servers of all stay for another hour."""
        last_proof = max(self.heard_at[master], self.linked_at, self.registry.silence_counts_from)
        if self.linked_at:
            return last_proof + ENGINE_ANSWER_S
        return last_proof + HOUR


# --- The running program -------------------------------------------------------------------------

LOGGED_EVENTS = 20                  # lines a second for servers that come and go
LOOP_DELAY_FADES = 0.99             # a second: the longest delay is remembered for some minutes


class MasterServer:
    """The running program, to be embedded as well:

        with masterserver.MasterServer({"iceball.port": "0"}, on_event=print) as server:
            print(server.listeners, [s.name for s in server.registry.servers()])

    `settings`: a Settings, or texts by name as for --set; raises SettingsError. `run()` serves in
    this thread, `start()` in one of its own, both until `stop()`; it runs once. `listeners` says
    what is bound where. `on_event(event, server)` is called in the serving thread with "listed",
    "changed" or "gone"; it must be quick, must change nothing and may call stop(); what it raises
    is logged. Several can run in one process.
    """

    thread: Optional[threading.Thread] = None       # of start()
    selector: Any = None                            # made by bind(), as the wake pair
    wake_in: Any = None
    wake_out: Any = None
    link: Optional[Cluster] = None
    next_look = next_tick = 0.0
    busy_s = 0.0                                    # the longest that one round took, fading
    logged = 0                                      # servers that came or went in this second

    def __init__(self, settings: Union[Settings, Mapping[str, str], None] = None,
                 on_event: Optional[Callable[[str, Server], None]] = None,
                 reload: Optional[Callable[[], Settings]] = None) -> None:
        """`reload` reads the settings anew, or raises SettingsError; None: they never change."""
        self.settings = settings if isinstance(settings, Settings) else Settings(settings)
        read_text_files(self.settings)
        self.read_settings: Any = reload
        self.files_seen = file_stamps(self.settings)
        self.rules = Rules(self.settings)
        self.registry = Registry(self.rules)
        self.poller = Poller(self.settings)
        self.health, self.gauges, self.tallies, self.cluster = {}, {}, {}, {}   # as in Core
        self.listeners: List[Listener] = []
        self.news = News(self.settings, self.registry, self.gauges)
        self.protocols, self.udp, self.tcp = [self.news], [], []
        self.ways = {}              # the first socket of a protocol and a family (True: IPv6)
        self.connections = collections.OrderedDict()        # the one idle for longest first
        self.by_source = collections.defaultdict(int)       # how many they are
        self.stopping = False       # no Event: a signal's stop() may interrupt who has its lock
        self.posted = collections.deque()
        self.disk, self.names = WorkerThread("disk", self.post), HostNames(self.post)
        path = self.settings.file("server.database")
        self.database = Database(path) if path else None
        self.saved = None if self.database is None else SavedList(
            self.database, self.registry, self.disk, self.health)
        if on_event:
            self.registry.subscribe(functools.partial(self.guarded, on_event), every_master=True)

    def __enter__(self) -> MasterServer:
        self.start()
        return self

    def __exit__(self, *exception):
        self.stop()

    # Start and stop

    def bind(self):
        """Open everything, once; raises StartError. run() closes it at its end; who does not run
        it, calls close()."""
        if self.selector is not None:
            return
        self.selector = selectors.DefaultSelector()
        self.wake_in, self.wake_out = socket.socketpair()
        self.wake_out.setblocking(False)
        self.selector.register(self.wake_in, selectors.EVENT_READ, self.woken)
        self.vector, self.descriptors = MessageVector.make(), descriptor_limit()
        try:
            self.open()
            self.registry.subscribe(self.log_event, events=("listed", "gone"), every_master=True)
            if self.settings["cluster.redis"]:
                self.link = Cluster(self)
        except BaseException:
            self.close()
            raise

    def run(self):
        """Serve until stop(), in this thread; raises StartError."""
        if self.thread not in (None, threading.current_thread()):
            raise StartError("It runs in a thread, and only once; make a new one.")
        self.bind()
        try:
            while not self.stopping:
                self.round()
            self.leave()
        finally:
            self.close()

    def start(self):
        """Serve in a thread; returns once everything is bound. Raises StartError."""
        if self.stopping:
            raise StartError("It has been stopped; make a new one.")
        self.bind()
        if self.thread is None:
            self.thread = threading.Thread(target=self.run, name="masterserver", daemon=True)
            self.thread.start()

    def stop(self):
        """End run(), from any thread, a callback or a signal handler, and wait for the thread of
        start(): answers on their way and work for the disk may take some seconds."""
        self.stopping = True
        self.wake()
        if self.thread not in (None, threading.current_thread()):
            self.thread.join()

    def leave(self):
        """Accept nobody more; what was asked is answered for a moment, as there are clients that
        die of an answer cut off by a reset."""
        now = time.monotonic()
        until = now + STOP_S
        for listener in self.tcp:
            self.guarded(listener.ready, now)       # closing the listener would reset them
            if not listener.paused:
                self.selector.unregister(listener.sock)
            listener.sock.close()
        self.tcp.clear()
        if self.connections:
            self.round(now)
        while now < until and any(one.out or not one.events for one in self.connections):
            self.round(until)
            now = time.monotonic()

    def close(self):
        """Save the list once more and close everything. Servers whose connections end with the
        program stay in the saved list: they have time to come back."""
        self.stopping = True
        now = time.monotonic()
        if self.saved and self.registry.altered:
            self.saved.save(now, time.time(), [])
        if not self.disk.stop(STOP_DISK_S):
            log.error("the list could not be saved at the end: the disk takes too long")
        elif self.database:
            self.database.close()
        self.names.worker.stop(0.0)
        self.news.stop()
        if self.link:
            self.link.close()
        self.deliver(now)
        for place in (*self.udp, *self.tcp, *self.connections):
            place.sock.close()
        self.tcp.clear()
        self.connections.clear()
        if self.selector is not None:
            self.selector.close()
            self.wake_in.close()
            self.wake_out.close()

    # The loop

    def wake(self):
        """Make select() return; from any thread or a signal handler."""
        if self.wake_out is not None:
            with contextlib.suppress(OSError):      # it is full, or closed
                self.wake_out.send(b"\0")

    def post(self, call, *arguments):
        """Have `call(*arguments, now)` called in the loop; from any thread or a signal handler."""
        self.posted.append((call, *arguments))
        self.wake()

    def woken(self, now):
        self.wake_in.recv(4096)
        self.deliver(now)

    def deliver(self, now):
        for _ in range(len(self.posted)):
            self.guarded(*self.posted.popleft(), now)

    def guarded(self, call, *arguments):
        """No fault of the program in one place ends it in the others."""
        try:
            call(*arguments)
        except Exception:
            # An argument may be another thread's error, with a URL in it
            log.exception("a fault of the program in %s",
                          without_secrets("%s%s" % (call, arguments)))

    def round(self, until=math.inf):
        """Handle what comes next, waiting for it no longer than `until`, and do what is due."""
        due = min(until, self.next_look, self.next_tick)
        events = self.selector.select(max(0.0, due - time.monotonic()))
        now = time.monotonic()
        for key, _ in events:
            self.guarded(key.data, now)
        if now >= self.next_look:
            self.next_look = now + LOOK_S
            for connection in list(self.connections):
                self.guarded(connection.tick, now)
        if now >= self.next_tick:
            if now - self.next_tick >= HELD_UP_S:
                self.registry.silence_counts_from = now      # silence before it proves nothing
            self.next_tick = now + TICK_S
            self.tick(now)
        self.busy_s = max(self.busy_s, time.monotonic() - now)

    def tick(self, now):
        self.tell_epoch()
        self.gauges.update(loop_delay_max_seconds=self.busy_s, connections=len(self.connections))
        self.busy_s *= LOOP_DELAY_FADES
        self.guarded(self.registry.expire, now)
        for listener in self.tcp:
            self.guarded(listener.tick, now)
        for protocol in self.protocols:
            self.guarded(self.tick_protocol, protocol, now)
        self.guarded(bound_output, self.connections, now)
        if self.saved:
            self.guarded(self.saved.tick, now, time.time())
        else:
            self.registry.altered.clear()
        if self.logged > LOGGED_EVENTS:
            log.info("and %d more listed or gone in this second", self.logged - LOGGED_EVENTS)
        self.logged = 0
        if self.read_settings and file_stamps(self.settings) != self.files_seen:
            self.guarded(self.reload, now)

    def tick_protocol(self, protocol, now):
        """By the protocol's first socket of each peer's family; who binds several addresses of a
        family names the one that can reach everybody first."""
        for data, peer in protocol.tick(now) or ():
            way = self.ways.get((protocol, ":" in peer[0]))
            if way:
                way.send([(data, peer)])

    def log_event(self, event, server):
        """Who comes and goes, one by one unless they are many."""
        self.logged += 1
        if self.logged <= LOGGED_EVENTS:
            log.info("%s %s %s %a", endpoint_text(server.address, server.port), server.game, event,
                     server.name)

    def tell_epoch(self):
        """Tell the pages and the news what the wall clock says."""
        for protocol in self.protocols:
            protocol.epoch = time.time() - time.monotonic()

    # Sockets

    def open(self):
        core = Core(self.settings, self.registry, self.poller, self.names.resolve, {},
                    self.database, self.tallies, self.health, self.listeners, self.gauges,
                    functools.partial(getattr, self.saved, "hourly_players", {}), self.cluster)
        problems = []               # all of them, as another program often holds several ports
        hosts = self.settings["server.bind"]
        for row in PROTOCOLS:
            ports = self.settings[row.setting] if row.setting else 0
            if ports in (None, ()):
                continue
            protocol = row.make(core)
            self.protocols.append(protocol)
            several = ports if isinstance(ports, tuple) else (ports,)
            for port, host in itertools.product(several, hosts if row.transport else ()):
                port = port and port + row.offset
                if protocol.ipv4_only and ":" in host:
                    continue
                try:
                    self.serve(row, protocol, host, port)
                except OSError as error:
                    if host == "::" and len(hosts) > 1 and error.errno != errno.EADDRINUSE:
                        log.info("%s: no IPv6 on this machine: %s", row.name, error)
                        continue
                    section, key = (row.setting or "server.bind").split(".")
                    problems.append("%s cannot listen on %s %s: %s. Change [%s] %s or [server]"
                                    " bind." % (row.name, row.transport.upper(), endpoint_text(
                                        host, port), error.strerror or error, section, key))
        if problems:
            raise StartError("\n".join(problems))
        self.tell_epoch()
        if self.saved:
            serving = [protocol for protocol in self.protocols if protocol is not self.news]
            self.saved.restore(time.monotonic(), time.time(), serving)

    def serve(self, row, protocol, host, port):
        """Serve a protocol on a socket of its own. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = bound_socket(family, row.transport, host, port)
        self.listeners.append(Listener(row.name, row.transport, *sock.getsockname()[:2]))
        tally = self.tallies.setdefault(row.name, Tally())
        if row.transport == "tcp":
            place: Any = TcpListener(self, row.name, sock, protocol, tally)
            self.tcp.append(place)
        else:
            is_poller = protocol is self.poller
            limiter = self.rules.answer_limiter if is_poller else self.rules.datagram_limiter
            place = UdpSocket(row.name, sock, protocol, tally, limiter, self.vector)
            self.udp.append(place)
            self.ways.setdefault((protocol, ":" in host), place)
        self.selector.register(sock, selectors.EVENT_READ, place.ready)

    # Settings

    def reload(self, now):
        """Read the settings again. With any error the old ones stay in force, whole."""
        self.files_seen = file_stamps(self.settings)
        try:
            new = self.read_settings()
            if self.settings.found and not new.found:
                raise SettingsError("%s: it is gone or empty" % new.path)
            read_text_files(new)
        except SettingsError as error:
            log.error("the old settings stay in force: %s", error)
            return
        # What changes from now on is read at the next tick, and so is a file that the ini names now
        changed = take_over(self.settings, new)
        log.info("settings read again; changed: %s", ", ".join(changed) or "nothing")
        if changed:
            self.apply(now)

    def apply(self, now):
        """Let the live settings take effect."""
        self.registry.apply_rules(self.settings)
        for connection in list(self.connections):
            if connection.address in self.rules.blocked:
                connection.close(now)
        for protocol in self.protocols:         # the poller among them
            protocol.read(self.settings)
        if log.handlers:            # a log of ours; a program around this one has its own
            log.setLevel(self.settings["server.log_level"].upper())


# ================================================================================================
# 12  Client tools and command line
#
# What is typed: to serve, to check the settings, to announce a game server that cannot do it
# itself, to query servers and masters. The tools use the codecs of section 7, are ordinary
# blocking programs, and say at the end what went wrong. They never use the event loop;
# command_serve() starts it, and its log stands here too.
# ================================================================================================

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
GC_THRESHOLDS = 10_000, 20, 20      # servers live long and have no cycles: a look after every 700
                                    # new objects (from 3.13 on 2,000) costs 4 % of listing them
EXIT_STATUSES = """exit status:
  0  ended as told, by a signal, Ctrl+C or Ctrl+Break, or the end of standard input; or the
     command succeeded
  1  it cannot start, or cannot go on; standard error says why
  2  wrong arguments or settings; standard error says which

Nothing is written to standard output but what was asked for; the log goes to standard error or to
[server] log_file."""


# --- Announcing a game server that cannot do it itself -------------------------------------------

# To announce another game in its own protocol: an Announcer, and its row in ANNOUNCERS.

ICEBALL_VERSION = "0.2.1-37"        # the default of [iceball] version
# After each announcement of a burst; the document: five, 1 s apart, from burst to burst 40 s
ICEBALL_GAPS_S = 1.0, 1.0, 1.0, 1.0, 36.0
SUBSPACE_PERIOD_S = 60.0            # as asss does
AIO_KEEPALIVE_EVERY_S = 30.0        # deployed servers: every 20 to 40 s; each is answered
AIO_MASTER_BYTES = 4096             # what a master tells a server has 20, a reason perhaps 200
REFUSED_S = 1800.0                  # a refused server asks again after so long, as Iceball's do;
                                    # by HTTP it does so after RETRY_MAX_S
RETRY_S, RETRY_MAX_S = 1.0, 60.0    # pauses after a failure: 1, 2, 4 … 60 s
CONNECT_S = 10.0                    # for a connection to come about
RESPONSE_S = 20.0                   # for an HTTP answer
TTL_MIN_S, TTL_MAX_S = 10.0, 3600.0     # a lifetime beyond these makes no sense
STEP_S = 0.25                       # how often a waiting thread looks whether it is to stop
GOODBYE_S = 3.0                     # what stop() grants each master that does not answer


class MasterRefused(Exception):
    """A master does not want this server; the text says why."""


class Announcer:
    """One game server towards one master, in the game's own protocol. Without I/O but for the log.

    server     what is announced: name, players and so on
    host, port of the master, where announcements go; `master` for the log
    address    where the master was reached last
    due        when to announce next; without a connection, when to make one
    state      how it stands, in words
    taken      the master has had it; False: refused from the beginning; None: no word yet

    What a method raises ends the connection and goes to failed(). By TCP there is also opened(now):
    what a new connection begins with. Where masters query the game server, there is answer(data):
    what it answers to such a query; raises Malformed."""

    transport = "udp"               # or "tcp": one connection that stays; or "http": one a request
    refused_s = REFUSED_S
    master_port = 27790             # where its masters listen
    port_offset = 0                 # from the port that is named to the one for announcements
    query_offset: Optional[int] = None      # from the game port to the UDP port that masters query
    address = state = ""
    due = 0.0
    taken: Optional[bool] = None

    def __init__(self, server, host, port):
        self.server, self.host, self.port = server, host, port
        self.master = endpoint_text(host, port)
        self.pause_s = RETRY_S          # after the next failure

    def announce(self, now: float) -> bytes:
        """What is to be sent at `due`, which moves. Raises OSError if the master has gone."""
        raise NotImplementedError

    def receive(self, data: bytes, now: float) -> bytes:
        """The answer to what the master says, in any split if by TCP. Raises MasterRefused and
        Malformed."""
        return b""

    def tell(self, state, level=logging.WARNING):
        if state != self.state:
            self.state = state
            log.log(level, "%s: %s", self.master, state)

    def accepted(self, state):
        self.taken, self.pause_s = True, RETRY_S
        self.tell(state, logging.INFO)

    def failed(self, error, now):
        """Say why, and try again after a pause."""
        self.tell(clean(str(error), TEXT_CHARACTERS))       # first: run() may end with these words
        pause_s = self.pause_s
        if isinstance(error, MasterRefused):
            self.taken, pause_s = bool(self.taken), self.refused_s
        else:
            self.pause_s = min(2 * pause_s, RETRY_MAX_S)
        self.due = now + pause_s


def text_field(text, size, coding="utf-8"):
    """At most `size` bytes of whole characters; ? for one that `coding` does not have."""
    return text.encode(coding, "replace")[:size].decode(coding, "ignore").encode(coding)


class IceballAnnouncer(Announcer):
    """Bursts of five, a HSHK for every MSOK. After BADV or BADF silence for 30 minutes, as
    deployed servers keep it."""

    sent = 0                        # of the present burst
    answered = False                # since the end of the last one

    def announce(self, now):
        self.due = now + ICEBALL_GAPS_S[self.sent]
        self.sent = (self.sent + 1) % len(ICEBALL_GAPS_S)
        if not self.sent:
            if not self.answered:
                self.tell("no answer; are address and port right, and does UDP get through?")
            self.answered = False
        server = self.server
        return ICEBALL_ANNOUNCEMENT.pack(
            b"1CEB", ICEBALL_HBVERSION, read_iceball_version(server.version or ICEBALL_VERSION),
            server.port, server.players, server.max_players,
            text_field(server.name, 30), text_field(server.mode, 10), text_field(server.map, 30))

    def receive(self, data, now):
        kind = data[:4]
        if kind == b"MSOK":
            self.answered = True
            self.accepted("announced")
            return b"HSHK" + data[4:]
        if kind in (b"BADV", b"BADF"):
            if kind == b"BADF":
                raise MasterRefused("refused: the master cannot read the announcement")
            version = iceball_version_text(int.from_bytes(data[6:10], "little"))
            raise MasterRefused("refused: the master lists Iceball %s and not this version"
                                % version)
        return b""


class SubSpaceAnnouncer(Announcer):
    """An announcement at once (asss waits for 10 s until its modules are loaded; this zone runs
    already) and then every 60 s.

    The master pings the zone on game port + 1. Everybody is in one public arena, or in the one
    that the map names. Clients show Windows-1252."""

    master_port = 4990
    port_offset = query_offset = 1

    def announce(self, now):
        self.due = now + SUBSPACE_PERIOD_S
        server = self.server
        self.accepted("announced; masters of this game do not answer but ping the next UDP port")
        return ZONE_ANNOUNCEMENT.pack(
            bytes(4), server.port, server.players, 1, ZONE_VERSION,
            text_field(server.name, 31, "cp1252"), ZONE_PASSWORD,
        ) + text_field(server.description, 385, "cp1252") + b"\0"

    def answer(self, data):
        if len(data) not in (4, 8):
            raise Malformed("a ping has 4 or 8 bytes")
        total, playing = self.server.players, self.server.playing
        if playing is None:
            playing = total
        arena = text_field(self.server.map, 15, "cp1252") or b"0"
        return ping_answer(data, total, playing, [(arena, total, playing)])


class AioAnnouncer(Announcer):
    """A kept connection in the text dialect. It has no word for a refusal, which may end, so the
    server is published again with each keepalive. The name has the players, as the game has it."""

    transport = "tcp"
    master_port = 27011
    keepalive = b"KEEPALIVE#%\n"

    def opened(self, now):
        self.buffer, self.heard, self.confirmed = b"", False, False
        self.due = now + AIO_KEEPALIVE_EVERY_S
        return self.publication()

    def announce(self, now):
        if not self.heard:
            raise ConnectionError("the master has fallen silent")
        if not self.confirmed:
            self.tell("the master does not confirm it; has it banned this address, "
                      "refused the name, or run out of room?")
        self.heard = self.confirmed = False
        self.due = now + AIO_KEEPALIVE_EVERY_S
        return self.keepalive + self.publication()

    def publication(self):
        server = self.server
        name = server.name
        if server.players or server.max_players:
            name += " [%d/%d]" % (server.players, server.max_players)
        # A % at the beginning would end the message
        texts = [text.replace("#", "<num>").lstrip("%") for text in (name, server.description)]
        return ("13#%s#%s#%d#%%\n" % (*texts, server.port)).encode("utf-8")

    def receive(self, data, now):
        self.heard = True
        heard = self.buffer + data
        self.buffer = heard[-11:]       # a byte less than what is looked for
        if b"SUCCESS#13#%" in heard:
            self.confirmed = True
            self.accepted("announced")
        return b""


class FramedAioAnnouncer(AioAnnouncer):
    """The same in the framed dialect. It announces the port alone; masters ask for the rest on
    it, by UDP."""

    query_offset = 0
    keepalive = aio_frame(b"\4")

    def publication(self):
        return aio_frame(struct.pack("<BH", 3, self.server.port))

    def receive(self, data, now):
        self.heard = True
        self.buffer += data
        while (found := aio_unframe(self.buffer, AIO_MASTER_BYTES)) is not None:
            payload, self.buffer = found
            if payload[:2] == b"\5\3":
                self.confirmed = True
                self.accepted("announced")
            elif payload[:2] == b"\6\3":
                raise MasterRefused("refused: " + payload[4:].decode("utf-8", "replace"))
        return b""

    def answer(self, data):
        if data != b"\0":
            raise Malformed("a query is the one byte 00")
        server = self.server
        version = int(server.version) if server.version.isdecimal() else 0
        texts = [aio_string16(text.encode("utf-8")) for text in (server.name, server.description)]
        return zlib.compress(b"\0" + b"".join(texts) + struct.pack(
            "<IIH", server.players, server.max_players, clamp(version)))


class HttpAnnouncer(Announcer):
    """POST /announce, again after half the time that the master grants, and action=stop at the
    end."""

    transport = "http"
    refused_s = RETRY_MAX_S             # the master's operator may put it right at any time

    def fields(self):
        """What is posted."""
        return {name: getattr(self.server, name) for name in ("game", "port", *ANNOUNCED)}

    def answered(self, status, body, now):
        """Raises MasterRefused, and OSError if it is to be tried again."""
        told, ttl = {}, 0.0
        with contextlib.suppress(ValueError, TypeError, OverflowError, RecursionError):
            told = dict(json.loads(body))
            ttl = float(told.get("ttl", 0))
        if told.get("listed") is True:
            self.due = now + min(max(TTL_MIN_S, ttl), TTL_MAX_S) / 2    # in this order for a NaN
            self.accepted("listed")
            return
        reason = str(told.get("reason", "HTTP status %d" % status))
        if 400 <= status < 500 and status not in (408, 429):
            raise MasterRefused("refused: " + reason)
        raise OSError("not listed yet: " + reason)


class HyperbolAnnouncer(HttpAnnouncer):
    """POST /announce; the master then queries the server itself, on its game port, every 30 s."""

    query_offset = 0

    def answer(self, data):
        if len(data) != 5 or data[0] != 2:
            raise Malformed("a query is 02 and a timestamp")
        server = self.server
        return b"\x1b" + data[1:] + HYPERBOL_INFO.pack(
            text_field(server.name, 31), text_field(server.mode, 31),
            min(server.players, 255), min(server.max_players, 255), 0, text_field(server.map, 63),
            b"", server.port, *bytes(5), text_field(server.version, 15), *bytes(5), b"", *bytes(4))


ANNOUNCERS = {                      # by game and dialect; others by HTTP
    "iceball": IceballAnnouncer,
    "subspace": SubSpaceAnnouncer,
    "hyperbol": HyperbolAnnouncer,
    "aio text": AioAnnouncer,
    "aio framed": FramedAioAnnouncer,
}


def post(announcer, **more):
    """Announce by HTTP. Raises OSError and MasterRefused."""
    announcer.address = resolved(announcer.host)
    with contextlib.closing(http.client.HTTPConnection(
            announcer.address, announcer.port, timeout=RESPONSE_S)) as connection:
        try:
            connection.request(
                "POST", "/announce", json.dumps(dict(announcer.fields(), **more)),
                {"Host": announcer.master, "Content-Type": "application/json"})
            response = connection.getresponse()
            body = response.read(HTTP_BODY_BYTES)
        except (http.client.HTTPException, ValueError, socket.timeout) as error:
            raise OSError("no answer that can be read; is that the port of the master's page? %s"
                          % error) from None
    announcer.answered(response.status, body, time.monotonic())


ANNOUNCED = {"name": str, "players": int, "max_players": int, "playing": int, "mode": str,
             "map": str, "version": str, "description": str}


class Announcement:
    """A game server announced to masters by somebody else: for games that cannot do it, and for
    bundles.

        announcement = masterserver.Announcement("iceball", 21737,
                                                 ["master.example", "other.example:27790"],
                                                 name="My server")
        announcement.start()                        # or run() in this thread
        announcement.update(players=5, max_players=16, map="castle")        # whenever it changes
        announcement.stop()                         # signs off where the protocol has a way to

    `game`: iceball, subspace, aio, hyperbol, or any other name that the masters list. `port`:
    where players find the game server. `masters`: HOST or HOST:PORT, or several. Further fields:
    name, players, max_players, playing, map, mode, version, description. `dialect`: for AIO, text
    or framed; text if there is a name. `players_from`: a file whose last line is as for
    read_players(), read again when it changes. A wrong argument raises ValueError.

    Where masters query the game server itself (SubSpace on port + 1, Hyperbol and framed AIO on
    the port, by UDP), they are answered here if that port is free, and left to the game server if
    not. `give_up`: run() ends when each master has refused from the beginning; `failure` then says
    why. An instance runs once.
    """

    failure = ""
    stopping = False        # no Event: a signal's stop() may interrupt who has its lock
    complained = False

    def __init__(self, game: str, port: int, masters: Union[str, Sequence[str]],
                 dialect: str = "", players_from: str = "", give_up: bool = False,
                 **fields: Any) -> None:
        check_is_file(players_from)
        if game == "aio" and not dialect:
            dialect = "text" if fields.get("name") else "framed"
        make: Any = ANNOUNCERS.get((game + " " + dialect).rstrip(), HttpAnnouncer)
        if dialect and make is HttpAnnouncer:
            raise ValueError("%s has no dialect %s" % (game, dialect))
        self.server = Server(read_game_id(game), "", read_number(1, 65534)(str(port)), "", 0.0,
                             math.inf, "%s server" % GAME_TITLES.get(game, game))
        self.update(**fields)
        self.announcers = []
        for place in [masters] if isinstance(masters, str) else masters:
            host, named_port = read_place(place)
            host = host.encode("idna").decode("ascii")      # a ValueError if it can be no name
            self.announcers.append(make(
                self.server, host, (named_port or make.master_port) + make.port_offset))
        if not self.announcers:
            raise ValueError("expected a master")
        self.players_from, self.give_up = players_from, give_up
        self.surplus = Limiter(SURPLUS_BYTES)
        self.thread = threading.Thread(target=self.run, daemon=True)

    def update(self, **fields: Any) -> None:
        """Announce these values from now on; from any thread. Raises ValueError."""
        for name, value in fields.items():
            if (type(value) is not ANNOUNCED.get(name)
                    or type(value) is int and not 0 <= value <= PLAYERS_MAX):
                raise ValueError("%s=%r cannot be announced" % (name, value))
            if name == "version" and value and self.server.game == "iceball":
                read_iceball_version(str(value))
        for name, value in fields.items():
            setattr(self.server, name,
                    clean(value, TEXT_CHARACTERS) if isinstance(value, str) else value)

    def start(self):
        """Announce in threads of its own. A second call changes nothing."""
        if not self.thread.is_alive():
            self.thread.start()

    def stop(self):
        """Sign off and end; from any thread or a signal handler. A master that hangs takes 3 s."""
        self.stopping = True
        if self.thread.is_alive():
            self.thread.join()

    def __enter__(self) -> Announcement:
        self.start()
        return self

    def __exit__(self, *exception):
        self.stop()

    def run(self):
        """Announce until stop(), or with give_up until no master is left."""
        sock = self.query_socket()          # first: a master asks at once
        threads = [threading.Thread(target=self.keep_announced, args=[announcer], daemon=True)
                   for announcer in self.announcers]
        for thread in threads:
            thread.start()
        while not self.stopping:
            if self.players_from:
                self.take_players()
            if self.give_up and all(announcer.taken is False for announcer in self.announcers):
                self.failure = "; ".join("%s: %s" % (announcer.master, announcer.state)
                                         for announcer in self.announcers)
                self.stopping = True
            if sock is None:
                time.sleep(STEP_S)
            else:
                self.answer_query(sock)
        for thread in threads:
            thread.join(GOODBYE_S)
        if sock:
            sock.close()

    def keep_announced(self, announcer):
        """To one master, in a thread of its own."""
        by_http = announcer.transport == "http"
        while not self.stopping:
            try:
                if time.monotonic() < announcer.due:
                    time.sleep(STEP_S)
                elif by_http:
                    post(announcer)
                else:
                    self.converse(announcer)
            except (OSError, OverflowError, Malformed, MasterRefused) as error:
                announcer.failed(error, time.monotonic())
        if by_http:
            with contextlib.suppress(OSError, MasterRefused):
                post(announcer, action="stop")

    def converse(self, announcer):
        """Send what is due and answer what comes: by TCP until the master hangs up, by UDP until
        its name is to be looked up anew. Raises OSError, Malformed and MasterRefused."""
        tcp = announcer.transport == "tcp"
        announcer.address = resolved(announcer.host)
        place = announcer.address, announcer.port
        # By UDP a ConnectionError says that nobody has the port now
        usual = (socket.timeout,) if tcp else (socket.timeout, ConnectionError)
        with socket.create_connection(place, CONNECT_S) if tcp else udp_socket(*place) as sock:
            sock.settimeout(STEP_S)
            now = time.monotonic()
            until = math.inf if tcp else now + RESOLVE_S
            if tcp:
                sock.sendall(announcer.opened(now))
            while now < until and not self.stopping:
                with contextlib.suppress(*usual):
                    if now >= announcer.due:
                        sock.sendall(announcer.announce(now))
                    data = sock.recv(RECV_BYTES)
                    if tcp and not data:
                        raise ConnectionError("the master has closed the connection")
                    answer = announcer.receive(data, time.monotonic())
                    if answer:
                        sock.sendall(answer)
                now = time.monotonic()

    def query_socket(self):
        """Where masters query the game server; None if they do not, or it listens there itself."""
        offset = self.announcers[0].query_offset
        if offset is None:
            return None
        port = self.server.port + offset
        try:
            sock = bound_socket(socket.AF_INET, "udp", "0.0.0.0", port)
        except OSError as error:
            log.info("masters' queries on UDP port %d are left to the game server: %s", port, error)
            return None
        log.info("masters' queries are answered here, on UDP port %d", port)
        sock.settimeout(STEP_S)
        return sock

    def answer_query(self, sock):
        """One, or none within STEP_S."""
        with contextlib.suppress(OSError, Malformed):
            data, (source, port) = sock.recvfrom(MAX_DATAGRAM_BYTES)
            answer = self.announcers[0].answer(data)
            # None as long as its query: after one forged query two ports would answer each other
            # for ever. An AIO query of one byte gets a thousand times as much: all but the masters,
            # whose addresses may be made up, share one bucket
            surplus = len(answer) - len(data)
            known = source in [announcer.address for announcer in self.announcers]
            if surplus > 0 and self.surplus.allow(
                    source if known else "", time.monotonic(), surplus):
                sock.sendto(answer, (source, port))

    def take_players(self, line=None):
        """Announce what `line` says, or the last one of the file, as for read_players(); from any
        thread. Trouble is logged once, as a script may fail each second."""
        try:
            if line is None:
                with open(self.players_from, encoding="utf-8-sig", errors="replace") as file:
                    line = file.read().strip().rpartition("\n")[2]
            if line.strip():        # a file that is being written anew is empty for a moment
                self.update(**read_players(line))
                self.complained = False
        except (OSError, ValueError) as error:
            if not self.complained:
                log.warning("the players are not known: %s", error)
            self.complained = True


def read_players(line):
    """`5`, `5/16` or `5/16 map name`: players, their maximum, the map. Raises ValueError."""
    match = re.fullmatch(r"\s*(?P<players>\d{1,5})(?:\s*/\s*(?P<max_players>\d{1,5}))?"
                         r"(?:\s+(?P<map>\S.*?))?\s*", line)
    if not match:
        raise ValueError("%r is not PLAYERS, PLAYERS/MAXIMUM or PLAYERS/MAXIMUM MAP" % line[:60])
    return {name: text if name == "map" else int(text)
            for name, text in match.groupdict().items() if text}


def command_announce(arguments):
    """announce: until a signal or the end of standard input."""
    fields = {name: value for name, value in vars(arguments).items()
              if name in ANNOUNCED and value is not None}
    from_stdin = arguments.players_from == "-"
    try:
        announcement = Announcement(
            arguments.game, arguments.port, arguments.masters, dialect=arguments.dialect,
            give_up=True, players_from="" if from_stdin else arguments.players_from, **fields)
    except ValueError as error:
        raise SettingsError("announce: %s" % error) from None
    start_log(Settings({"server.log_level": "debug" if arguments.verbose else "info"}))
    stop_on_signals(announcement.stop)
    if from_stdin or arguments.exit_with_stdin:
        read_stdin(announcement.take_players, announcement.stop)
    announcement.run()
    if announcement.failure:
        raise StartError("announce: no master accepts this server: %s" % announcement.failure)
    return EXIT_OK


# --- Asking game servers and masters -------------------------------------------------------------

# What `ping` and `list` do. To add a game: a function that takes host and port and gives what it
# learned, ready for JSON, and its row in PINGS or LISTS. An OSError or Malformed says in words why
# there is nothing.

ASK_TRIES, ASK_WAIT_S = 3, 2.0      # a lost datagram; a round trip around the world, several times
ASK_TOTAL_S = OUTPUT_TOTAL_S        # for all of a list: our master gives no reader longer
FETCH_S = 10.0                      # silence of a list server, after which it has gone
FETCH_BYTES = 64 << 20              # a list of 50,000 servers has 20 MB in its longest form
LIST_SERVERS = 65536                # of one game; a master lists 50,000 of all games by default
AIO_TEXT_S = 3.0                    # masters answer text at once, or do not have that dialect
AIO_LIST_BYTES = 3 + 65535 * 258    # a framed list at its longest
HYPERBOL_LIST_S = 5.0               # the document's script waits so long for the master
QUAKE3_LIST_HEADS = (b"\xff\xff\xff\xffgetserversExtResponse",
                     b"\xff\xff\xff\xffgetserversResponse")
QUAKE3_ADDRESS_BYTES = {b"\\": 4, b"/": 16}        # by what a server in a list begins with


@contextlib.contextmanager
def udp_socket(host, port):
    """A socket that hears this place alone. Raises OSError."""
    address = resolved(host)
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET,
                       socket.SOCK_DGRAM) as sock:
        sock.connect((address, port))
        yield sock


def udp_ask(sock, question, answer, tries=ASK_TRIES):
    """Send `question` until `answer(data)` takes what comes: its result, and the milliseconds.

    Raises OSError."""
    wrong = ""
    sock.settimeout(ASK_WAIT_S)
    for _ in range(tries):
        asked_at = time.monotonic()
        try:
            sock.send(question)
            data = sock.recv(POLL_ANSWER_BYTES)
            return answer(data), round((time.monotonic() - asked_at) * 1000, 1)
        except Malformed as error:
            wrong = "; what came is not an answer: %s" % error
        except socket.timeout:
            pass
    raise TimeoutError("no answer from UDP port %d%s" % (sock.getpeername()[1], wrong))


def tcp_ask(sock, question, answer=None, entry_bytes=0):
    """Send `question`: what `answer(data)` makes of what has come, as soon as that is not None;
    without `answer` all that comes until the other side closes.

    The socket's own timeout bounds each piece, ASK_TOTAL_S bounds all; `entry_bytes`, of a list of
    nothing but entries of so many bytes, bounds it to LIST_SERVERS. Raises OSError, Malformed."""
    most, words = FETCH_BYTES, "%d bytes" % FETCH_BYTES
    if entry_bytes:
        most, words = entry_bytes * LIST_SERVERS, "%d servers" % LIST_SERVERS
    sock.sendall(question)
    data, until = bytearray(), time.monotonic() + ASK_TOTAL_S
    for more in iter(lambda: sock.recv(RECV_BYTES), b""):
        data += more
        found = answer(data) if answer else None
        if found is not None:
            return found
        if len(data) > most:
            raise Malformed("more than " + words)
        check_total_time(until)
    if answer:
        raise Malformed("no list came before the end")
    return data


def check_total_time(until):
    """Raise TimeoutError if what is not complete yet has taken ASK_TOTAL_S, until `until`."""
    if time.monotonic() > until:
        raise TimeoutError("it was not complete within %g s" % ASK_TOTAL_S)


def ping_subspace(host, port):
    poll, complete = ZonePoll(), False
    with udp_socket(host, port + 1) as sock:
        while not complete:
            nonce = ping_nonce()
            try:
                complete, ping_ms = udp_ask(sock, poll.question(nonce),
                                            functools.partial(poll.answer, nonce=nonce))
            except TimeoutError:        # some zones know only some of the forms
                if not poll.step:
                    raise
                break
    return {"players": poll.players, "playing": poll.playing, "arenas": poll.arenas,
            "ping_ms": ping_ms}


def udp_ping(host, port, question, answer, tries=ASK_TRIES):
    """What `answer(data)` learns from a game server, and how long that took."""
    with udp_socket(host, port) as sock:
        found, ping_ms = udp_ask(sock, question, answer, tries)
    return dict(found, ping_ms=ping_ms)


def ping_hyperbol(host, port, tries=ASK_TRIES):
    nonce = RANDOM.getrandbits(32)
    return udp_ping(host, port, struct.pack("<BI", 2, nonce),
                    functools.partial(hyperbol_info, timestamp=nonce), tries)


def ping_aio(host, port):
    names = "name", "description", "players", "max_players", "version"
    return udp_ping(host, port, b"\0", lambda data: zip(names, aio_info(data)))


def quake3_ping_answer(data):
    """What an infoResponse tells, for `ping`. Raises Malformed."""
    answer = quake3_info(quake3_pairs(data))
    # So it was called for servers that tell no game, and scripts may read it
    gamename = answer.gamename or QUAKE3_GAME_OF_PROTOCOL.get(answer.protocol, "Quake3Arena")
    return quake3_fields(answer, gamename)


def ping_quake3(host, port):
    return udp_ping(host, port, QUAKE3_GETINFO + b"challenge",
                    quake3_ping_answer)


def ping_luanti(host, port):
    with udp_socket(host, port) as sock:
        goodbye, ping_ms = udp_ask(sock, LUANTI_ID + b"\0\0\0\1", luanti_goodbye)
        sock.send(goodbye)
    return {"ping_ms": ping_ms}


class ZoneListLink(SubSpaceLink):
    """The player's end of SubSpaceList's exchange: the list in `zones`, of `total` bytes."""

    zones = b""
    total = FETCH_BYTES

    def packet(self, data, now):
        if data[:2] == b"\0\x0a":
            self.total = min(self.total, int.from_bytes(data[2:6], "little"))
            self.zones += data[6:]


def list_subspace(host, port):
    with udp_socket(host, port) as sock:
        udp_ask(sock, b"\0\1" + os.urandom(3) + b"\0\1\0", bytes)     # any answer means yes
        sock.settimeout(LINK_RESEND_S / 2)
        until = time.monotonic() + ASK_TOTAL_S
        # Zones with at least 0 players
        link = ZoneListLink(time.monotonic(), [b"\1" + bytes(4)])
        out = link.tick(time.monotonic())
        while len(link.zones) < link.total and not link.closed and time.monotonic() < until:
            for packet in out:
                sock.send(packet)
            try:
                out = link.receive(sock.recv(LINK_PACKET_BYTES), time.monotonic())
            except (socket.timeout, Malformed):
                out = link.tick(time.monotonic())
        with contextlib.suppress(OSError):      # it may have gone
            sock.send(b"\0\7")
    if len(link.zones) != link.total:
        raise TimeoutError("no list from UDP port %d" % port)
    return zone_entries(link.zones)


def list_hyperbol(host, port):
    with socket.create_connection((host, port), HYPERBOL_LIST_S) as sock:
        key, _ = hyperbol_greeting(sock.recv(HYPERBOL_GREETING.size))   # it is one segment
        # The document: always 255, for all
        entries = hyperbol_entries(tcp_ask(
            sock, struct.pack("<IB3x", key, 255), entry_bytes=HYPERBOL_ENTRY.size))
    return [dict(zip(("address", "port", "flavor"), entry)) for entry in entries]


def list_aio(host, port):
    """The text form, as it has names; the framed form from a master without that dialect, which
    waits for more or hangs up, and from one whose text cannot be read."""
    try:
        return list_aio_text(host, port)
    except (socket.timeout, ConnectionResetError, Malformed) as error:
        text_error = error_text(error)
    try:
        return list_aio_framed(host, port)
    except (OSError, Malformed) as error:
        raise Malformed("no list as text (%s), and none in frames (%s)" % (
            text_error, error_text(error))) from None


def list_aio_text(host, port):
    with socket.create_connection((host, port), AIO_TEXT_S) as sock:
        return aio_text_entries(tcp_ask(sock, b"12#%\n", aio_text_fields))


def aio_text_fields(data):
    """What stands between `12#` and `#%` at the end; None: it is not whole yet.

    Greetings may come before it, with any number."""
    start = re.search(rb"(?:^|[%\0\r\n])12#", data)
    if not start or not data.endswith(b"#%"):
        return None
    return data[start.end():-len(b"#%")]


def aio_text_entries(data):
    """The servers of a text list, by its fields `name#description#address#port#` and so on.

    Raises Malformed."""
    if data.count(b"#") >= 4 * LIST_SERVERS:
        raise Malformed("more than %d servers" % LIST_SERVERS)
    fields = [aio_unescape(field) for field in data.decode("utf-8", "replace").split("#")]
    servers = []
    for name, description, address, port in zip(*(fields[at::4] for at in range(4))):
        if not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
            raise Malformed("port: %a" % port)
        # The document's entry for an empty list is no server
        if not name.startswith("No servers currently online"):
            servers.append({"name": name, "description": description, "address": address,
                            "port": int(port)})
    return servers


def aio_unescape(field):
    return clean(field.replace("<num>", "#").replace("<percent>", "%"), TEXT_CHARACTERS)


def list_aio_framed(host, port):
    def payload(data):
        """What is in the frame that follows the greeting; None: it is not whole yet."""
        unframed = aio_unframe(data[len(AIO_CONNECTED):], AIO_LIST_BYTES)
        return unframed and unframed[0]

    with socket.create_connection((host, port), FETCH_S) as sock:
        return aio_framed_entries(tcp_ask(sock, aio_frame(b"\2"), payload))


def aio_framed_entries(payload):
    """The servers of a framed list; raises Malformed.

        02 count.u16 { length.u8 address[length] port.u16 }*        to the payload's end"""
    if payload[:1] != b"\2":
        raise Malformed("type: not a list")
    servers, at = [], 3
    while at < len(payload):
        begin = at + 1
        end = begin + payload[at]
        at = end + 2
        if len(payload) < at:
            raise Malformed("a list that is cut off")
        address = clean(payload[begin:end].decode("ascii", "replace"))
        servers.append({"address": address, "port": int.from_bytes(payload[end:at], "little")})
    return servers


def list_quake3(host, port, gamename, protocol):
    question = "\xff\xff\xff\xffgetserversExt %s %d empty full" % (gamename, protocol)
    until = time.monotonic() + ASK_TOTAL_S
    with udp_socket(host, port) as sock:
        (servers, complete), _ = udp_ask(sock, question.encode("latin-1"), quake3_list_part)
        while not complete:
            check_total_time(until)
            try:
                more, complete = quake3_list_part(sock.recv(MAX_DATAGRAM_BYTES))
            except socket.timeout:
                raise TimeoutError("timed out: the end of the list did not come") from None
            servers += more
            if len(servers) > LIST_SERVERS:
                raise Malformed("more than %d servers" % LIST_SERVERS)
    return servers


def quake3_list_part(data):
    r"""The servers in one datagram of a list, and whether it is the last. Raises Malformed.

        ffffffff "getserversExtResponse" { \ address[4] port.u16 | / address[16] port.u16 }*
        \ "EOT" 000000                                  this only at the end of the last one

    All is in network order; to `getservers` the answer is "getserversResponse", without IPv6."""
    heads = [head for head in QUAKE3_LIST_HEADS if data.startswith(head)]
    if not heads:
        raise Malformed("a list begins with getserversResponse or getserversExtResponse")
    servers, at = [], len(heads[0])
    while at < len(data) and data[at:] != QUAKE3_END:
        size = QUAKE3_ADDRESS_BYTES.get(data[at:at + 1])
        if size is None:
            raise Malformed("a server begins with \\ or /, not with %a" % data[at:at + 1])
        begin = at + 1
        end = begin + size
        at = end + 2
        if len(data) < at:
            raise Malformed("a list that is cut off")
        servers.append({"address": str(ipaddress.ip_address(data[begin:end])),
                        "port": int.from_bytes(data[end:at], "big")})
    return servers, at < len(data)


def list_from_json(host, port, path, read):
    """`read(found)` of the JSON at http://host:port/path."""
    # HTTP/1.0: the answer comes in one piece, and ends with the connection
    request = "GET %s HTTP/1.0\r\nHost: %s\r\n\r\n" % (path, endpoint_text(host, port))
    with socket.create_connection((host, port), FETCH_S) as sock:
        body = tcp_ask(sock, request.encode()).partition(b"\r\n\r\n")[2]
    try:
        return read(json.loads(body))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError,
            ValueError) as error:
        raise Malformed("%s: %r" % (path, error)) from None


def list_json(path, key, players, max_players, host, port):
    """A list of Iceball's or of Luanti's, and what those three fields are called in it."""
    def rows(found):
        return [dict({name: clean(str(entry.get(name, "")))
                      for name in ("address", "name", "mode", "map", "version")},
                     port=int(entry["port"]), players=int(entry[players]),
                     max_players=int(entry[max_players]))
                for entry in found[key]]
    return list_from_json(host, port, path, rows)


list_iceball = functools.partial(list_json, "/master.json", "servers", "players_current",
                                 "players_max")
list_luanti = functools.partial(list_json, "/list", "list", "clients", "clients_max")
PINGS = {"subspace": ping_subspace, "hyperbol": ping_hyperbol, "aio": ping_aio,
         "quake3": ping_quake3, "luanti": ping_luanti}
LISTS: Any = {                          # with the default port
    "iceball": (list_iceball, 27790),
    "subspace": (list_subspace, 4990),
    "hyperbol": (list_hyperbol, 20203),
    "aio": (list_aio, 27011),
    "quake3": (list_quake3, 27950),
    "luanti": (list_luanti, 27790),
}


# --- Command line -------------------------------------------------------------------------------

def read_place(text):
    """HOST, HOST:PORT, ADDRESS, [ADDRESS] or [ADDRESS]:PORT."""
    with contextlib.suppress(ValueError):
        return read_address(text), None
    return (text, None) if text and ":" not in text else read_endpoint(text)


def argument(read):
    """A type for argparse that keeps the reader's words."""
    def read_argument(text):
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return read_argument


class ToolError(Exception):
    """A tool's end, with two arguments: its exit status and a message."""


@contextlib.contextmanager
def failing_with(status, words, *errors):
    """Such an error ends the command with this exit status; it is told after these words."""
    try:
        yield
    except errors as error:
        text = clean(error_text(error), TEXT_CHARACTERS)        # it may be another machine's
        raise ToolError(status, "%s: %s" % (words, text)) from None


def say(text):
    with failing_with(EXIT_FAILED, "standard output", OSError):
        print(text, flush=True)


def complain(text):
    with contextlib.suppress(OSError):          # whatever standard error is, the status tells
        print("masterserver.py:", text, file=sys.stderr, flush=True)


def write_file(path, data):
    """Readers find the old file or the new one, whole. A pipe or device is written to directly.

    Raises OSError."""
    path = os.path.realpath(path)               # where a link leads; the link stays
    new = path if is_special(path) else path + ".new"
    with open(new, "wb") as file:
        file.write(data)
    if new != path:
        os.replace(new, path)


def read_stdin(line, end):
    """In a thread of its own: each line of standard input, then `end`."""
    def read():
        # None there, or taken away, is the same as its end
        with contextlib.suppress(OSError), open(0, "rb", closefd=False) as file:
            for text in file:
                line(text.decode("utf-8-sig", "replace"))
        log.info("standard input has ended")
        end()
    threading.Thread(target=read, name="masterserver stdin", daemon=True).start()


def on_signals(call, *names):
    for name in names:
        if hasattr(signal, name):           # Windows has no SIGHUP, and SIGBREAK alone
            signal.signal(getattr(signal, name), lambda number, frame: call())


def stop_on_signals(stop):
    """SIGINT, SIGTERM and Ctrl+Break end the program cleanly."""
    on_signals(stop, "SIGINT", "SIGTERM", "SIGBREAK")


# --- The log ------------------------------------------------------------------------------------


LOG_FILE_BYTES, LOG_FILES = 10 << 20, 3         # of each, and how many older ones: 40 MB at most
LOG_LINES = 1000                    # wait for the thread that writes them
LOG_END_S = 1.0                     # for what waits when the program ends


class LogFile(logging.handlers.RotatingFileHandler):
    """The log file. Once it is closed the next line opens it anew, as logrotate wants."""

    def rotate(self, source, dest):
        # In a folder that cannot be written, or while Windows has it open, the file grows
        with contextlib.suppress(OSError):
            super().rotate(source, dest)


class LogQueue(logging.handlers.QueueHandler):
    """Lines for the thread of `listener`, which writes them: a terminal in which somebody selects
    text, or a disk that hangs, keeps nobody else waiting."""

    listener: logging.handlers.QueueListener


def start_log(settings):
    """Log to where the settings say: what writes it. Raises ToolError."""
    path = settings.file("server.log_file")
    with failing_with(EXIT_FAILED, "the log cannot be written; change [server] log_file", OSError):
        writer = (LogFile(path, "a", LOG_FILE_BYTES, LOG_FILES, "utf-8") if path
                  else logging.StreamHandler())
    writer.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    lines: queue.SimpleQueue[Any] = queue.SimpleQueue()
    faults = Limiter(FAULT_RATE)

    def takes(record):
        """Lines for which there is no room are lost, and tracebacks beyond their rate."""
        return lines.qsize() < LOG_LINES and (
            not record.exc_info or faults.allow("", time.monotonic()))

    handler = LogQueue(lines)                       # type: ignore[arg-type,unused-ignore]
    handler.addFilter(takes)
    handler.listener = logging.handlers.QueueListener(handler.queue, writer)
    handler.listener.start()
    log.addHandler(handler)
    log.setLevel(settings["server.log_level"].upper())
    log.propagate = False
    return writer


def end_log():
    """Write what waits, unless that takes too long."""
    for handler in log.handlers[:]:
        if isinstance(handler, LogQueue):
            log.removeHandler(handler)
            ending = threading.Thread(target=handler.listener.stop, daemon=True)
            ending.start()
            ending.join(LOG_END_S)


# --- Serving ------------------------------------------------------------------------------------

def load_settings(arguments):
    # PyInstaller and the like unpack this file into a folder that is gone with the process
    program = sys.executable if getattr(sys, "frozen", False) else __file__
    beside = os.path.join(os.path.dirname(os.path.abspath(program)), "masterserver.ini")
    return Settings.load(arguments.config or beside,
                         arguments.set + ["server.log_level=debug"] * arguments.verbose,
                         missing_ok=not arguments.config)


def first_contact(server):
    """For people: what listens where, what to put into game servers' settings, and where players
    look."""
    host = server.settings["server.public_address"] or own_address() or "localhost"
    places = ["%s on %s %d" % (protocol, transport.upper(), port)
              for protocol, transport, _, port in server.listeners]
    contacts = contact_lines(server.listeners, host, server.settings)
    pages = [listener.port for listener in server.listeners if listener.protocol == "http"]
    # Each place once, however many addresses it has
    return ["; ".join(dict.fromkeys(places)), *("%s: %s" % line[1:] for line in contacts),
            *("Players and browsers: http://%s/" % endpoint_text(host, page) for page in pages[:1])]


def write_ready_file(path, server):
    """Tell programs what listens where, but for the port that nobody contacts first."""
    listeners = [listener._asdict() for listener in server.listeners if listener.protocol != "poll"]
    ready = json.dumps({"pid": os.getpid(), "listeners": listeners}) + "\n"
    with failing_with(EXIT_FAILED, "the ready file cannot be written", OSError):
        write_file(path, ready.encode())


def command_serve(arguments):
    """Open everything, tell everybody, serve. Raises StartError."""
    if arguments.print_config:
        say(config_text()[:-1])
        return EXIT_OK
    settings = load_settings(arguments)
    if arguments.check:
        return check(settings)
    writer = start_log(settings)

    def reload():
        # In a thread: a disk that hangs would keep the loop waiting
        threading.Thread(target=writer.close, daemon=True).start()
        return load_settings(arguments)

    descriptor_limit(settings["limits.connections_total"] + DESCRIPTORS_KEPT)
    server = MasterServer(settings, reload=reload)
    on_signals(lambda: server.post(server.reload), "SIGHUP")
    stop_on_signals(server.stop)
    try:
        if hasattr(gc, "set_threshold"):    # not PyPy's collector
            gc.set_threshold(*GC_THRESHOLDS)
        server.bind()
        if arguments.ready_file:
            write_ready_file(arguments.ready_file, server)
        for line in first_contact(server):
            log.info("%s", line)
        for line in settings.warnings:
            log.warning("%s", line)
        if arguments.exit_with_stdin:
            read_stdin(lambda line: None, server.stop)
        server.run()
    except StartError as error:
        if settings["server.log_file"]:         # a scheduled task has no standard error
            log.error("%s", error)
        raise
    finally:
        server.close()
    log.info("stopped")
    return EXIT_OK


# --- Checking the settings ----------------------------------------------------------------------

def reach_warnings(settings):
    """Settings with which players do not find, or do not reach, what is listed."""
    public, bound = settings["server.public_address"], settings["server.bind"]
    rows = (
        (not public, "[server] public_address is empty: game servers on this machine that announce "
         "to localhost are listed as 127.0.0.1, where no other machine finds them. Set it to the "
         "address that players use."),
        (public and public in LOCAL_NETWORKS,
         "[server] public_address: %s is private; players outside "
         "cannot reach what is listed there." % public),
        (all(map(is_loopback, bound)), "[server] bind: %s can be reached from this machine only."
         % ", ".join(bound)),
        (settings["iceball.port"] is not None and not {27790, 27795} & set(settings["http.ports"]),
         "[http] ports: Iceball's players ask for the list on port 27790 or 27795."))
    return [text for wrong, text in rows if wrong]


def check_engine(engine):
    """Say what is wrong with Redis or Valkey, if masters are to meet there. Raises ToolError."""
    with failing_with(EXIT_FAILED, "[cluster] redis", Malformed, OSError, ValueError,
                      AttributeError):                  # Windows has no Unix sockets
        if engine:
            with contextlib.closing(EngineLink(engine)) as link:
                told = link.ask("INFO")
            if not re.search(rb"redis_version:([6-9]|\d\d)", told):
                raise Malformed("it is too old; masters need Redis 6 or Valkey")
            if b"policy:noeviction" not in told:
                say("warning: [cluster] redis: its maxmemory-policy may drop what the masters have"
                    " written; set noeviction.")


def check(settings):
    """Say what is probably wrong, and try to listen everywhere. Raises StartError."""
    for text in settings.warnings + reach_warnings(settings):
        say("warning: " + text)
    check_engine(settings["cluster.redis"])
    # The trial leaves both alone
    settings.values.update({"server.database": "", "cluster.redis": None})
    server = MasterServer(settings)
    try:
        server.bind()
    finally:
        server.close()
    say("The server can start with these settings.")
    return EXIT_OK


# --- A test of the webhooks ----------------------------------------------------------------------

def command_notify(arguments):
    """Tell of a server that does not exist, and say what each webhook answered."""
    settings, good = load_settings(arguments), True
    server = Server("iceball", "203.0.113.7", 20737, "", 0.0, 0.0, "A test of the news")
    shown = with_times(server_json(server), server, time.time(), "")
    webhooks = settings["webhooks"]
    for name in arguments.name or webhooks or [""]:
        if name not in webhooks:
            raise ToolError(EXIT_USAGE, "[webhooks] has no such NAME: '%s'" % without_secrets(name))
        format, url = webhooks[name].split()
        status, _ = post_url(url, *NEWS_FORMATS[format](server, settings, shown))
        say("%s: %s" % (name, status))
        good &= status.startswith("2")
    return EXIT_OK if good else EXIT_FAILED


# --- list and ping ------------------------------------------------------------------------------

def show(arguments, ask, port):
    """Print what `ask(host, port)` learns, as JSON or in words; the exit status."""
    host = arguments.place[0]
    with failing_with(EXIT_FAILED, endpoint_text(host, port),
                      Malformed, OSError, OverflowError, ValueError):
        found = {"game": arguments.game, "address": host, "port": port, **ask(host, port)}
    found.update(found.pop("details", {}))
    if arguments.json:
        say(json.dumps(found, indent=2))
    elif "servers" in found:
        say("\n".join(map(list_line, found["servers"])) or "no servers")
    else:
        say("\n".join("%-12s %s" % fact for fact in found.items() if fact[1] not in (None, "")))
    return EXIT_OK


def command_ping(arguments):
    return show(arguments, PINGS[arguments.game], arguments.place[1])


def command_list(arguments):
    fetch, port = LISTS[arguments.game]
    more = (arguments.gamename, arguments.protocol) if arguments.game == "quake3" else ()
    return show(arguments, lambda *place: {"servers": fetch(*place, *more)},
                arguments.place[1] or port)


def list_line(row):
    players = str(row.get("players", "-"))
    if row.get("max_players"):
        players += "/%d" % row["max_players"]
    place = endpoint_text(row["address"], row["port"])
    return "%7s  %-21s  %s" % (players, place, row.get("name", ""))


# --- Export -------------------------------------------------------------------------------------

EXPORT_TRIES = 2                    # queries to each server: together 4 s, the script's are 3 s
EXPORT_AT_ONCE = 200                # as many sockets; macOS grants a program 256
EXPORT_TOTAL_S = 60.0               # then no more are queried: 3,000 silent ones until then
EXPORT_FTP_S = 30.0                 # for each answer of the FTP server: a disk may have to wake

# The script's own numbers
EXIT_CONNECTION, EXIT_IDENTIFIER, EXIT_EMPTY, EXIT_FILE, EXIT_FTP = 3, 4, 6, 7, 8
EXPORT_HELP = """\
Fetch the list of a Hyperbol master, query every server in it, and write the answers as XML, as the
script in Hyperbol's protocol document does. A server that does not answer has responding="0".

The FTP password is read from the environment variable MASTERSERVER_FTP_PASSWORD or from ~/.netrc.
PATH begins in the user's folder (in the root if it begins with %2F); if it does not end in /, its
last part is the file's name.

Exit status: 0 done; 2 wrong usage; 3 no connection to the master, or no answer from it; 4 it is
not a Hyperbol master, or its list has more than 65,536 servers; 6 its list is empty; 7 the file
cannot be written; 8 the upload failed. With --every it goes on until a signal or Ctrl+C, and ends
with 0."""


def command_export(arguments):
    if not arguments.every:
        say(export_once(arguments))
        return EXIT_OK
    # Each of them raises KeyboardInterrupt, in the middle of a query as well
    stop_on_signals(functools.partial(signal.default_int_handler, signal.SIGINT, None))
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            try:
                say(export_once(arguments))
            except ToolError as error:          # the next round may succeed
                complain(error.args[1])
            time.sleep(arguments.every)
    return EXIT_OK


def export_once(arguments):
    """Fetch, query, write, upload; what was done, in words. Raises ToolError."""
    host, port = arguments.master[0], arguments.master[1] or LISTS["hyperbol"][1]
    place, path = endpoint_text(host, port), arguments.output
    with failing_with(EXIT_CONNECTION, "No list from " + place, OSError, ValueError), \
            failing_with(EXIT_IDENTIFIER, place + " is not a Hyperbol master", Malformed):
        rows = list_hyperbol(host, port)
    if not rows:
        raise ToolError(EXIT_EMPTY, "The list of %s is empty; %s is left as it is." % (place, path))
    until = time.monotonic() + EXPORT_TOTAL_S
    with concurrent.futures.ThreadPoolExecutor(EXPORT_AT_ONCE) as pool:
        servers = list(pool.map(functools.partial(queried_server, until), rows))
    data = servers_xml(map(server_xml, servers), time.time())
    with failing_with(EXIT_FILE, path + " cannot be written", OSError):
        write_file(path, data)
    if arguments.ftp:
        upload(arguments.ftp, os.path.basename(path), data)
    return "%d servers, %d of them responding, %d players: %s written." % (
        len(servers), sum(server.responding for server in servers),
        sum(server.players for server in servers), path)


def queried_server(until, row):
    """A listed server with what it answers; not responding if it does not, or not `until` then."""
    address, port = row["address"], row["port"]
    found: Dict[str, Any] = {"responding": False}
    if time.monotonic() < until:
        with contextlib.suppress(Malformed, OSError, OverflowError):    # the last is of its port
            found = ping_hyperbol(address, port, EXPORT_TRIES)
    return Server("hyperbol", address, port, address, 0.0, 0.0, flavor=row["flavor"], **found)


def read_ftp_url(text):
    """ftp://USER@HOST[:PORT]/PATH/"""
    place = urllib.parse.urlsplit(text)
    if place.scheme != "ftp" or not place.hostname or place.port == 0 or place.password:
        raise ValueError("expected ftp://USER@HOST/PATH/; the password is read from the environment"
                         " variable MASTERSERVER_FTP_PASSWORD or from ~/.netrc")
    return place


def ftp_login(place):
    """User and password; both empty stands for the anonymous one."""
    user = urllib.parse.unquote(place.username or "")
    password = os.environ.get("MASTERSERVER_FTP_PASSWORD", "")
    if not password:
        with contextlib.suppress(FileNotFoundError):
            known = netrc.netrc().authenticators(place.hostname)
            if known:
                return user or known[0], known[2]
    return user, password


def upload(place, name, data):
    """Store `data` there, under `name` if the URL has none. Raises ToolError."""
    # One byte a character: no answer is unreadable, and %C3%BC in the URL goes out as it is
    path = urllib.parse.unquote(place.path[1:], "latin-1")
    if not path or path.endswith("/"):
        path += name
    with failing_with(EXIT_FTP, "The upload to %s failed" % place.hostname, *ftplib.all_errors,
                      ValueError, netrc.NetrcParseError), ftplib.FTP(timeout=EXPORT_FTP_S) as ftp:
        ftp.encoding = "latin-1"
        ftp.connect(place.hostname, place.port or ftplib.FTP_PORT)
        ftp.login(*ftp_login(place))
        ftp.storbinary("STOR " + path, io.BytesIO(data))


# --- The arguments ------------------------------------------------------------------------------

SERVE_HELP = """\
A master server for Iceball, Hyperbol, SubSpace, AIO and others. Without a command it serves.

commands, each with a --help of its own:
  announce  announce a game server that cannot do it itself
  ping      query a game server
  list      show a master's list
  export    write a master's list as XML
  notify    tell the webhooks in the settings, as a test"""
ANNOUNCE_HELP = """\
Announce a game server to one or several masters, in its game's own protocol, until told to stop.
Start the game server first: where masters query the game server itself (SubSpace, Hyperbol, framed
AIO), they are answered here if that UDP port is free."""


def settings_arguments(parser):
    parser.epilog = EXIT_STATUSES
    add = parser.add_argument
    add("--config", metavar="FILE",
        help="read the settings from FILE, not from masterserver.ini beside the program")
    add("--set", metavar="SECTION.KEY=VALUE", action="append", default=[],
        help="set this, whatever the ini says; repeatable")
    add("-v", "--verbose", action="store_true", help="log at debug level")
    return add


def notify_arguments(parser):
    settings_arguments(parser)("name", metavar="NAME", nargs="*", help="of a webhook; none: all")


def serve_arguments(parser):
    add = settings_arguments(parser)
    add("--check", action="store_true",
        help="say what is wrong with the settings, or probably wrong on this machine, and exit")
    add("--print-config", action="store_true",
        help="print every setting with its default and its meaning")
    add("--ready-file", metavar="FILE",
        help="write what listens where to FILE, as JSON, once everything listens")
    add("--exit-with-stdin", action="store_true",
        help="exit when standard input is closed, as a child process should")
    add("--version", action="version", version="masterserver.py " + __version__)


def game_arguments(parser, games):
    parser.add_argument("--game", choices=sorted(games), required=True)
    parser.add_argument("--json", action="store_true", help="as JSON")


def ping_arguments(parser):
    parser.add_argument("place", metavar="HOST:PORT", type=argument(read_endpoint),
                        help="the game port, even where another one is queried")
    game_arguments(parser, PINGS)


def list_arguments(parser):
    parser.add_argument("place", metavar="HOST[:PORT]", type=argument(read_place),
                        help="the master; without a port on its game's default")
    game_arguments(parser, LISTS)
    parser.add_argument("--protocol", type=int, default=68,
                        help="of quake3: 68 is Quake III Arena's, 71 OpenArena's, 3 Xonotic's")
    parser.add_argument("--gamename", default="Quake3Arena", help="of quake3, such as Xonotic")


def export_arguments(parser):
    add = parser.add_argument
    add("--game", choices=["hyperbol"], default="hyperbol", help="the master's game (hyperbol)")
    add("master", metavar="HOST[:PORT]", type=argument(read_place),
        help="the master; on port %d if none is given" % LISTS["hyperbol"][1])
    add("--output", metavar="FILE", default="servers.xml", help="the file to write (servers.xml)")
    add("--ftp", metavar="ftp://USER@HOST/PATH/", type=argument(read_ftp_url),
        help="upload it there; see above for the password")
    add("--every", metavar="SECONDS", type=argument(read_number(1, 86400, float)),
        help="repeat, with this long a pause")


def announce_arguments(parser):
    parser.epilog = EXIT_STATUSES
    add = parser.add_argument
    add("--game", required=True, metavar="iceball|subspace|aio|hyperbol|NAME",
        help="any other NAME that the masters list is announced by HTTP")
    add("--port", required=True, type=int, help="where players find the game server")
    add("--players", type=int, help="how many there are now")
    add("--max-players", type=int, help="how many there may be")
    for name, help in (
            ("name", "as players see it"), ("map", "the map being played"),
            ("mode", "the game mode"), ("description", "a sentence or two (SubSpace, AIO, HTTP)"),
            ("version", "of the game; if left out, Iceball's is the default of [iceball] version")):
        add("--" + name, help=help)
    add("--dialect", choices=["text", "framed"], default="",
        help="of AIO; text if there is a name, which framed does not carry")
    add("--players-from", metavar="FILE|-", default="",
        help="read PLAYERS, PLAYERS/MAXIMUM or PLAYERS/MAXIMUM MAP from this file's last line "
             "whenever it changes, or from each line of standard input")
    add("-v", "--verbose", action="store_true", help="log at debug level")
    add("--exit-with-stdin", action="store_true", help="exit when standard input is closed")
    add("masters", nargs="+", metavar="MASTER[:PORT]",
        help="default ports: iceball 27790, subspace 4990 (announcements go to the next one), "
             "aio 27011, others 27790")


# To add a command: a function command_NAME(arguments) that gives the exit status, one that adds its
# arguments to its parser, and their row here
COMMANDS = {
    "": (command_serve, serve_arguments, SERVE_HELP),
    "announce": (command_announce, announce_arguments, ANNOUNCE_HELP),
    "ping": (command_ping, ping_arguments, "Query a game server."),
    "list": (command_list, list_arguments, "Show a master's list."),
    "export": (command_export, export_arguments, EXPORT_HELP),
    "notify": (command_notify, notify_arguments, "Tell the webhooks of a server, as a test."),
}


class ArgumentParser(argparse.ArgumentParser):
    """Its errors repeat the words of the command line; there may be a URL among them."""

    def error(self, message):
        super().error(" ".join(map(without_secrets, message.split(" "))))


def main(argv=None):
    words = list(sys.argv[1:] if argv is None else argv)
    name = words.pop(0) if words and words[0] in COMMANDS else ""
    command, add_arguments, help = COMMANDS[name]
    parser = ArgumentParser(
        prog=("masterserver.py " + name).strip(), description=help,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    try:
        return command(parser.parse_args(words))
    except KeyboardInterrupt:
        return EXIT_FAILED
    except ToolError as error:
        status, text = error.args
    except (SettingsError, StartError) as error:
        status, text = EXIT_USAGE if isinstance(error, SettingsError) else EXIT_FAILED, str(error)
    finally:
        end_log()
    complain(text)
    return status


if __name__ == "__main__":
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr,unused-ignore]
    exit_status = main()
    # At once: the interpreter's end would wait for a terminal in which somebody selects text, and
    # one more signal in it would give another status
    os._exit(exit_status)
