#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""masterserver.py: where game servers announce themselves and players find them.

    python3 masterserver.py                 serve; the page is at http://localhost:27790/
    python3 masterserver.py --help          everything else that it can do
    python3 masterserver.py --print-config  every setting, with its default and its meaning

One file, standard library only, CPython 3.8 or later or PyPy. Read from the top, each section uses only what stands above it:

     1  this text                   7  protocols: poller, Iceball, Hyperbol, SubSpace, AIO
     2  limits                      8  pages: HTML, CSS, JavaScript
     3  settings                    9  web: routes, lists as JSON, XML and pages
     4  wire helpers               10  PROTOCOLS, the table that names them all
     5  registry                   11  event loop
     6  storage                    12  client tools and command line

    game                     transport, default port                  in the program
    Iceball, current         UDP 27790, list by HTTP on TCP 27790     class Iceball
    Iceball, first draft     the same                                 class IceballDraft
    Hyperbol                 TCP 20203, servers polled by UDP         class Hyperbol
    SubSpace                 UDP 4991 (announce, ping), 4990 (list)   class SubSpacePing, SubSpaceList
    AIO, three dialects      TCP 27011                                class Aio
    any other game           HTTP POST /announce                      class Web

Sections 3 to 10 have no socket, no thread and no clock, and but for the ini and the database no file: a protocol takes bytes and the
time and gives bytes back, so every one of them is tested with recorded packets and a clock that the test moves. To add a game, see
PROTOCOLS in section 10.

Licence: MIT, see the end of README.md.
"""
from __future__ import annotations

import argparse
import array
import bisect
import codecs
import collections
import configparser
import contextlib
import copy
import difflib
import email.errors
import errno
import ftplib
import functools
import gc
import gzip
import hashlib
import heapq
import html
import http.client
import http.server
import io
import ipaddress
import itertools
import json
import logging
import math
import netrc
import os
import queue
import random
import re
import select
import selectors
import signal
import socket
import string
import struct
import sys
import threading
import time
import types
import urllib.parse
import zlib
from datetime import datetime, timedelta, timezone
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, TypeVar, Union

__version__ = "1.0"

try:
    import sqlite3
except ImportError as missing:      # FreeBSD has it in a package of its own, and a Python built without SQLite's headers lacks it
    if __name__ != "__main__":
        raise
    sys.exit("masterserver.py: this Python lacks sqlite3 (%s). Install it (FreeBSD: pkg install py3XX-sqlite3), or use another Python." % missing)
try:
    import resource
except ImportError:                 # Windows has no such limits
    pass
try:
    import ctypes
except (ImportError, MemoryError):  # a Python built without it, or an old libffi under MemoryDenyWriteExecute; only MessageVector needs it
    pass

log = logging.getLogger("masterserver")

# =====================================================================================================================
# 2  Limits
#
# Numbers that bound something, each with its reason or its source. What an operator may want to change is a setting
# (section 3); what bounds one protocol, one store or one tool stands with it, in the same form.
# =====================================================================================================================

TICK_S = 1.0                        # protocols are ticked this often; their documents count in whole seconds
HELD_UP_S = 5.0                     # a tick this late: the program was stopped (Ctrl+Z, docker pause, a debugger); no work takes so long
HELD_UP_FOR_S = 120.0               # for this time after it silence is forgiven: game servers announce themselves once a minute or more often
CLOCK_STEP_S = 1.0                  # a wall clock that has jumped by more was set; one that is slewed moves 83 ms a second at most (chrony)
DRAIN_DATAGRAMS = 128               # datagrams read from one socket before the others get their turn: 1 ms
BACKLOG = 1024                      # connections that wait to be accepted: half a second of 2,000 a second, while the loop is held up
MAX_DATAGRAM_BYTES = 2048           # no document has one over 520 bytes; a longer one is cut and found malformed
UDP_BUFFER_BYTES = 8 << 20          # 20,000 announcements (two seconds at 10,000/s): Linux doubles it, and each costs about 800 bytes there
RECV_BYTES = 65536                  # one read from a connection
SEND_BUFFER_BYTES = 1 << 18         # the system's own choice is megabytes, and shows a slow reader's progress only once a minute
LINGER_S = 5.0                      # how long what a peer still sends after our last byte is discarded …
LINGER_BYTES = 65536                # … and how much of it; then the connection is closed whatever comes
OUTPUT_STALL_S = 20.0               # a reader that takes nothing for so long has gone
OUTPUT_TOTAL_S = 120.0              # and one that takes longer than this for one answer is not reading it
OUTPUT_BYTES = 64 << 20             # what waits for all readers together: three lists of 50,000 servers at their longest …
OUTPUT_ANSWERS = 3                  # … or so many times the longest that waits: a list of 160,000 would reach nobody
ACCEPT_PAUSE_S = 1.0                # out of descriptors: accept() would fail at once again, so the listener rests
STOP_S = 2.0                        # at a stop, for answers on their way: a service manager waits for 10 s or more, people for less
STOP_FRESH_S = 0.3                  # a round trip: within it a new connection brings its request, and a body goes on
STOP_LOOK_S = 0.05                  # how often to look whether all have ended
STOP_DISK_S = 5.0                   # and for a batch being written, which takes milliseconds; if the disk hangs for longer, what came since is lost
TURN_S = 0.01                       # work for connections, after which the UDP sockets have their turn: answers are due within 50 ms
DESCRIPTORS_KEPT = 20               # for all but connections: standard streams, selector, database and its logs, log, look-ups
DESCRIPTORS_UNTOLD = 256            # assumed where the system does not tell: macOS's limit, the lowest in use
REFUSED_CONNECTIONS = 64            # over a limit, and about to be told so; the oldest goes first
WORKER_JOBS = 64                    # waiting for one thread, half a second's work; others are told to try again
FAULT_RATE = 1, 20                  # tracebacks in the log a second / at once: a fault that packets can cause must not fill the disk

NAME_CHARACTERS = 128               # Hyperbol has 32, Iceball 30, SubSpace 32 bytes; AIO sets none
TEXT_CHARACTERS = 512               # a description; SubSpace's 386 bytes are the longest in a document
PLAYERS_MAX = 65535                 # the widest field in a list (Iceball, SubSpace: u16)

COOKIE_WINDOW_S = 30                # a cookie lives one to two windows; deployed servers return it within a second
COOKIE_MAC_BYTES = 8                # 2**64 guesses: a forger at 100,000 packets a second needs six million years
SITE_SOURCES = 16                   # an IPv6 /48, which anybody can have with its 65,536 sources, may list as many servers as these together
LIMITER_SOURCES = 16384             # sources remembered by one limiter, about 3 MB
SURPLUS_BYTES = 100_000, 1_000_000  # what all unproven sources together get beyond what they sent, a second / at once, for each use that
                                    # allow_surplus() has: 200 lists a second, or 0.8 Mbit/s for somebody who forges addresses
ANSWERS_RATE = 1e6, 1e6             # no real limit: a flood in a server's name must not make it seem silent, and whoever was queried knows the port
KNOWN_SERVERS = 60_000              # on disk: the 50,000 that can be listed, and those here for longest; a fifth more than are listed, if [limits]
                                    # servers allows more. As many departures may wait for the disk
HEARD_SOURCES = 4096                # what became of the last packets, for /check, about 2 MB, with the longest reasons 8 …
HEARD_PER_S = 500                   # … and how many of them a second: a flood costs less, and leaves eight seconds to look at
HEARD_BACK_S = 120.0                # /check says so if they do not reach back so far: servers announce themselves once a minute

HTTP_LINE_BYTES = 4096              # the longest request line; a search for 128 Chinese characters needs 1,200
HTTP_HEAD_BYTES = 16384             # line and headers; browsers behind proxies send up to 4 kB
HTTP_BODY_BYTES = 16384             # an announcement needs 500, with every text at its longest 12,500
HTTP_HEAD_S = 10.0                  # from a request's first byte to the end of its head
HTTP_BODY_S = 10.0                  # and from there to the end of its body
HTTP_IDLE_S = 30.0                  # a kept connection without a request; the page asks every 5 s
HTTP_PIPELINE_BYTES = 1 << 18       # answers made ahead of a reader; the requests behind them wait
HTTP_TURN_REQUESTS = 16             # answered in one go (2 ms, up to 9 if compressed searches); then the others have their turn
HTTP_MEMO_BYTES = 16 << 20          # answers remembered, all together, or one that is longer: /servers.json of 50,000 servers has 20 MB
HTTP_MEMO_REQUEST_BYTES = 2048      # a longer request is not worth remembering
GZIP_MIN_BYTES = 600                # a shorter one fits into one packet with its head, compressed or not
GZIP_INLINE_BYTES = 65536           # compressed in the event loop (1 ms); more is done in a worker
GZIP_LEVEL = 6                      # within 6 % of level 9 on lists, at two thirds of its time or less
RENDER_S = 1.0                      # a list is rebuilt at most this often, however many ask and however fast it changes
RENDER_SERVER_S = 0.0001            # or, if it is short, after this long per server: ten times or more what rendering one takes
RENDER_INLINE_SERVERS = 4000        # rows put together in the event loop (2 ms); longer lists are made in a worker
SEARCH_INLINE_SERVERS = RENDER_INLINE_SERVERS // HTTP_TURN_REQUESTS     # searched for one answer; a client may get HTTP_TURN_REQUESTS of
                                                                        # those in one go
RENDER_STALE_S = 10.0               # and at least this often, for the times in it …
RENDER_TIMES_S = 5.0                # … which are in parts kept for this long: together they are at most 15 s old
CACHE_S = 5                         # how long a cache in front may keep an answer: the page refreshes every 5 s
PAGE_ROWS = 2000                    # rows on one page; a search finds the others
CHECK_FINDINGS = 100                # on one page of /check, the latest (3 ms); 32 servers of one address have 64, a stranger may have thousands

# =====================================================================================================================
# 3  Settings
#
# One row per setting; its type is the function that reads it. The ini, --set, --print-config, the README's table and
# the errors all come from this table. A setting marked live takes effect on reload, the others at the next start.
# =====================================================================================================================


Network = Union[ipaddress.IPv4Network, ipaddress.IPv6Network]
Pattern = Any                       # re.Pattern[str], which Python 3.8 cannot subscript


class SettingsError(Exception):
    """A setting that cannot be used; the text names file, key and the nearest right name."""


read_text = str.strip


def read_line(text: str) -> str:
    if "\n" in text.strip():           # settings in the lines below would be lost without a word
        raise ValueError("expected one line; an indented line continues the one above")
    return text.strip()


def read_path(text: str) -> str:
    os.fsencode(text)           # raises ValueError where the locale has no bytes for it
    return read_line(text)


def read_flag(text: str) -> bool:
    value = configparser.ConfigParser.BOOLEAN_STATES.get(text.strip().lower())
    if value is None:
        raise ValueError("expected yes or no")
    return value


def read_number(low: float, high: float, kind: Callable[[str], Any] = int) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            value = kind(text.strip())
        except ValueError:
            raise ValueError("expected a number") from None
        if not low <= value <= high:
            raise ValueError("expected a number from %.12g to %.12g" % (low, high))
        return value
    return read


def read_port(text: str, last: int = 65535) -> Optional[int]:
    """A port; empty switches the listener off, 0 takes a free one."""
    return read_number(0, last)(text) if text.strip() else None


def read_list(read: Callable[[str], Any], separator: str = ",", least: str = "") -> Callable[[str], Tuple[Any, ...]]:
    """`least`: the error's text, where an empty list is one."""
    def read_all(text: str) -> Tuple[Any, ...]:
        values = [read(part.strip()) for part in text.split(separator) if part.strip()]
        if least and not values:
            raise ValueError(least)
        return tuple(value for number, value in enumerate(values) if not value or value not in values[:number])     # port 0 is a new one each time
    return read_all


def read_address(text: str) -> str:
    try:
        parsed = ipaddress.ip_address(text.strip().strip("[]"))
        return str(getattr(parsed, "ipv4_mapped", None) or parsed)
    except ValueError:
        raise ValueError("%r is not an IP address" % text.strip()) from None


# IPv4 unicast (RFC 1122, 1112), 1.0.0.0 to 223.255.255.255, in the one form that lists have
UNICAST_IPV4 = re.compile(r"(?:[1-9]\d?|1\d\d|2[01]\d|22[0-3])(?:\.(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)){3}", re.ASCII)


def is_unicast(address: str) -> bool:
    """An IP address that a game server can have; with a scope it means nothing to another machine."""
    if UNICAST_IPV4.fullmatch(address):
        return True
    try:
        parsed = ipaddress.IPv6Address(address)
    except ValueError:
        return False
    if "%" in address or parsed.is_multicast or parsed.is_unspecified:
        return False
    return parsed.ipv4_mapped is None or is_unicast(str(parsed.ipv4_mapped))


def read_unicast(text: str) -> str:
    """An address that a list may carry."""
    if not is_unicast(read_address(text)):
        raise ValueError("%s cannot be the address of a server" % text.strip())
    return read_address(text)


def read_public(text: str) -> str:
    """The same, or nothing."""
    return read_unicast(text) if text.strip() else ""


def read_network(text: str) -> Network:
    try:
        network = ipaddress.ip_network(text.strip(), strict=False)
        if getattr(network.network_address, "ipv4_mapped", None) and network.prefixlen >= 96:
            return ipaddress.ip_network((network.network_address.ipv4_mapped, network.prefixlen - 96))  # type: ignore[union-attr,arg-type]
        return network
    except ValueError:
        raise ValueError("%r is not a network such as 203.0.113.0/24 or an address" % text.strip()) from None


def read_endpoint(text: str) -> Tuple[str, int]:
    """`ADDRESS:PORT` or `[ADDRESS]:PORT`; the address may be a host name."""
    host, _, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or not port.isdecimal() or not 0 < int(port) <= 65535 or (":" in host and not bracketed):
        raise ValueError("%r is not ADDRESS:PORT" % text.strip())
    return host.strip("[]"), int(port)


def read_zone(text: str) -> Tuple[str, int]:
    host, port = read_endpoint(text)
    if port == 65535:
        raise ValueError("zones are pinged on the next port, and 65535 is the last")
    return host, port


def read_numeric_endpoint(text: str) -> Tuple[str, int]:
    host, port = read_endpoint(text)
    return read_address(host), port


def read_known_hyperbol(text: str) -> Tuple[str, int, int]:
    """`ADDRESS:PORT FLAVOR`; the address may be a host name."""
    place, flavor = (text.split(None, 1) + ["0"])[:2]
    return read_endpoint(place) + (read_number(0, 255)(flavor),)


def read_pattern(text: str) -> Pattern:
    try:
        return re.compile(text, re.IGNORECASE)
    except (re.error, OverflowError, RecursionError, Warning) as error:         # a warning: under -W error
        raise ValueError("%r is not a regular expression: %s" % (text, error)) from None


def read_choice(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.strip().lower() not in choices:
            raise ValueError("expected one of %s" % ", ".join(choices))
        return text.strip().lower()
    return read


def read_game_id(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9_-]{1,32}", text):
        raise ValueError("a game's id is 1 to 32 characters: a-z, 0-9, - and _")
    return text


def read_own_game_id(text: str) -> str:
    if text in {row.section for row in SETTINGS}:
        raise ValueError("the id %s is taken" % text)
    return read_game_id(text)


def read_rate(text: str) -> Tuple[float, float]:
    """`100/400`: 100 a second, 400 at once."""
    rate, _, burst = text.partition("/")
    return read_number(0.01, 1e6, float)(rate), read_number(1, 1e6, float)(burst or rate)


def read_iceball_version(text: str) -> int:
    """"0.2.1-37" -> 8421413: w.5 x.5 y.7 a.5 z.10 from high to low bits, written w.x[.y][letter][-z]."""
    match = re.fullmatch(r"(\d+)\.(\d+)(?:\.(\d+))?([a-z\x7b-\x7e])?(?:-(\d+))?", text)
    if not match:
        raise ValueError("expected a version such as 0.2.1-37")
    w, x, y, z = (int(part or 0) for part in match.group(1, 2, 3, 5))
    a = ord(match.group(4)) - 96 if match.group(4) else 0
    if w > 31 or x > 31 or y > 127 or z > 1023:
        raise ValueError("a part of %s is too large" % text)
    return w << 27 | x << 22 | y << 15 | a << 10 | z


class Setting(NamedTuple):
    section: str
    key: str                        # "" stands for a section whose keys are data, read by read_key
    default: str
    read: Callable[[str], Any]
    help: str
    live: bool = False
    read_key: Callable[[str], Any] = read_text
    example: str = ""

    @property
    def name(self) -> str:
        return "%s.%s" % (self.section, self.key) if self.key else self.section


SETTINGS = (
    Setting("server", "bind", "0.0.0.0, ::", read_list(read_address, least="expected an address; 0.0.0.0 and :: stand for all"),
            "Addresses to listen on. Games whose lists carry IPv4 alone use only the IPv4 ones."),
    Setting("server", "public_address", "", read_public,
            "The address that players use for game servers on this machine (127.0.0.1 means nothing to them).", live=True),
    Setting("server", "database", "masterserver.db", read_path,
            "What survives a restart: the list and the history of player counts (SQLite). A path relative to the ini's folder; "
            "empty: nothing is kept."),
    Setting("server", "refuse_names", "", read_list(read_pattern, "\n"),
            "Names that are not listed: regular expressions, one per line, matched anywhere in the name, upper or lower case. "
            "One with repetitions of repetitions, such as (a+)+, may take for ever.", live=True),
    Setting("server", "log_level", "info", read_choice("debug", "info", "warning", "error"),
            "How much is logged; debug reports every bad packet.", live=True),
    Setting("server", "log_file", "", read_path, "A file for the log, relative to the ini's folder, rotated at 10 MB; empty: standard error."),
    Setting("http", "ports", "27790, 27795", read_list(read_port),
            "TCP ports of the page and the lists. Iceball looks for both."),
    Setting("http", "title", "Game servers", read_line, "The page's title.", live=True),
    Setting("http", "intro", "", read_text, "A sentence or two at the top of the page.", live=True),
    Setting("http", "template", "", read_path,
            "A file with your own list page; its placeholders are explained at LIST_PAGE in the program.", live=True),
    Setting("http", "stylesheet", "", read_path, "A file with your own style.css.", live=True),
    Setting("http", "trusted_proxies", "", read_list(read_network),
            "Networks of reverse proxies whose X-Forwarded-For header is believed.", live=True),
    Setting("iceball", "port", "27790", read_port, "UDP port for announcements."),
    Setting("iceball", "version", "0.2.1-37", read_iceball_version,
            "The current version of the game; players with an older one are told of the update.", live=True),
    Setting("iceball", "accept_versions", "", read_list(read_iceball_version),
            "Versions that may be listed, such as 0.2.1 (every build of it) or 0.2.1-37; empty: all.", live=True),
    Setting("iceball", "timeout", "120", read_number(1, 86400, float),
            "Seconds of silence after which a server is removed (the document says 120)."),
    Setting("hyperbol", "port", "20203", read_port, "TCP port of the list."),
    Setting("hyperbol", "servers", "", read_list(read_known_hyperbol, "\n"),
            "Known game servers, one per line: ADDRESS:PORT FLAVOR (0: unofficial; others: official, by kind of game).", live=True),
    Setting("subspace", "port", "4990", functools.partial(read_port, last=65534),
            "UDP port of the zone list; announcements and pings use the next port."),
    Setting("subspace", "zones", "", read_list(read_zone, "\n"),
            "Known zones, one ADDRESS:PORT per line; they are pinged even if they do not announce themselves.", live=True),
    Setting("aio", "port", "27011", read_port, "TCP port for servers and clients of every generation."),
    Setting("aio", "dialects", "text, binary, framed", read_list(
        read_choice("text", "binary", "framed"), least="expected a dialect; an empty port switches the listener off"),
            "The dialects spoken on the port."),
    Setting("aio", "text_greeting_after", "1.2", read_number(0, 4, float),
            "Seconds of silence before the greeting that text clients wait for."),
    Setting("aio", "news", "", read_text, "What players read under News.", live=True),
    Setting("aio", "news_file", "", read_path, "A text file to read the news from instead; read again when it changes.", live=True),
    Setting("games", "", "", read_line, "Games of your own, announced by HTTP: id = Title.", live=True,
            read_key=read_own_game_id, example="mygame = My Game"),
    Setting("poll", "interval", "30", read_number(5, 3600, float),
            "Seconds between two queries to one game server (Hyperbol, SubSpace, AIO).", live=True),
    # At least one in a second is for new servers, a quarter: with a rate of 1 silent ones would keep all others from being queried, and with 2
    # they would never be given up
    Setting("poll", "rate", "500", read_number(4, 100000),
            "Queries per second at most, to all servers together, not counting the pings that answer a flood of announcements.", live=True),
    Setting("official", "", "", read_flag, "Servers marked as official.", live=True,
            read_key=read_numeric_endpoint, example="203.0.113.7:20737 = yes"),
    Setting("priority", "", "", read_number(-1000, 1000), "Servers to put first (or, below 0, last) in every list.", live=True,
            read_key=read_numeric_endpoint, example="203.0.113.7:20737 = 10"),
    Setting("address_map", "", "", read_unicast,
            "Public addresses of game servers behind the same router as this master.", live=True,
            read_key=read_address, example="192.168.1.5 = 203.0.113.7"),
    Setting("bans", "", "", read_line, "Networks that may not announce, with the reason they are told.", live=True,
            read_key=read_network, example="198.51.100.0/24 = fake players"),
    Setting("blocked", "", "", read_line, "Networks that get no answer at all, with a note for the operator.", live=True,
            read_key=read_network, example="192.0.2.66 = floods"),
    Setting("limits", "exempt", "127.0.0.0/8, ::1", read_list(read_network), "Networks to which no limit per source applies.", live=True),
    Setting("limits", "datagrams", "100/400", read_rate,
            "Datagrams from one source (an IPv4 address, an IPv6 /64): per second / at once. 32 busy servers send 32 at once.", live=True),
    Setting("limits", "requests", "10/50", read_rate,
            "Pings, list and page requests from one source, counted apart for UDP and TCP: per second / at once.", live=True),
    Setting("limits", "connections", "20/100", read_rate, "New connections from one source: per second / at once.", live=True),
    Setting("limits", "connections_open", "64", read_number(1, 100000), "Open connections of one source.", live=True),
    Setting("limits", "connections_total", "2000", read_number(8, 100000),
            "Open connections in all; above that the one idle for longest is closed.", live=True),
    Setting("limits", "servers_per_source", "32", read_number(1, 1000000),
            "Listed servers of one source; of one IPv6 /48, 16 times as many.", live=True),
    Setting("limits", "servers", "50000", read_number(1, 10000000), "Listed servers in all.", live=True),
)


# Settings that name a text file, which is read with the settings and again when it changes
TEXT_FILES = ("http.template", "http.stylesheet", "aio.news_file")


class Section(Dict[str, Any]):
    """A section of an ini: it may come twice, as lines are often appended; a key may not."""

    name = ""

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, Section):                  # this is the whole ini
            value.name = key
        elif type(value) is list and key in self:       # as configparser reads it; it joins the lines later
            raise configparser.Error("[%s] %s appears twice" % (self.name, key))
        super().__setitem__(key, value)


class Settings:
    """Values by name: `settings["iceball.port"]`, and for a section of data a dict: `settings["official"]`."""

    def __init__(self, values: Optional[Mapping[str, str]] = None) -> None:
        """`values`: texts by name as for --set; anything wrong raises SettingsError."""
        self.path = ""              # of the ini, there or not
        self.found = False          # it is there, and not empty, as it is while being saved
        self.folder: Optional[str] = None       # where relative paths begin; None: settings made by a program, which keeps nothing unasked
        self.given: Set[str] = set()
        self.texts: Dict[str, str] = {}         # of the files that settings in TEXT_FILES name, read by the event loop
        self.values: Dict[str, Any] = {s.name: s.read(s.default) if s.key else {} for s in SETTINGS}
        for name, text in (values or {}).items():
            section, _, key = name.partition(".")
            if text is None:
                raise SettingsError("setting: [%s] %s: expected a text; \"\" switches off" % (section, key))
            self.put(section, key, str(text), "setting")

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def put(self, section: str, key: str, text: str, where: str) -> None:
        rows = {s.key: s for s in SETTINGS if s.section == section}
        if not rows:
            raise SettingsError("%s: no section [%s]%s" % (where, section, nearest(section, {s.section for s in SETTINGS})))
        row = rows.get(key) or rows.get("")
        if row is None:
            raise SettingsError("%s: [%s] has no key %s%s" % (where, section, key, nearest(key, rows)))
        self.given.add(row.name)
        try:
            if re.search("[\0\ud800-\udfff]", key + text):     # no file has such a name, and no answer can carry it
                raise ValueError("it contains a NUL or a lone surrogate")
            if row.key:
                self.values[row.name] = row.read(text)
            else:
                self.values[row.name][row.read_key(key)] = row.read(text)
        except ValueError as error:
            raise SettingsError("%s: [%s] %s = %s: %s" % (where, section, key, " ".join(text.split()), error)) from None

    @classmethod
    def load(cls, path: str, overrides: Sequence[str] = (), missing_ok: bool = False) -> Settings:
        """Read the ini at `path`, then the overrides (`section.key=value`)."""
        self = cls()
        parser = configparser.ConfigParser(interpolation=None, default_section="", delimiters=("=",), comment_prefixes=("#", ";"),
                                           strict=False, dict_type=Section)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        # The parser's own pattern takes "[::1]:27790 = yes" for a section.
        parser.SECTCRE = re.compile(r"\[(?P<header>[^]:]+)\]\s*$")  # type: ignore[misc]
        try:
            found = parser.read(path, encoding="utf-8-sig")
        except configparser.Error as error:
            expected = "; expected [section], key = value, or an indented line that continues the one above"
            raise SettingsError("%s: %s%s" % (path, " ".join(str(error).split()), expected * isinstance(error, configparser.ParsingError))) from None
        except UnicodeDecodeError as error:
            raise SettingsError("%s: not UTF-8 text (%s); save it as UTF-8" % (path, error)) from None
        if not found and (not missing_ok or os.path.lexists(path)):        # the parser does not say what kept it from reading
            raise SettingsError("%s: cannot be read; is the name right, and may this user read the file?" % path)
        self.path, self.found = path, bool(parser.sections())
        self.folder = os.path.dirname(os.path.abspath(path))
        for section in parser.sections():
            if section not in {s.section for s in SETTINGS}:
                self.put(section, "", "", path)         # an error also where it has no keys
            for key, text in parser.items(section):
                self.put(section, key, text, path)
        for item in overrides:
            name, equals, text = item.partition("=")
            section, dot, key = name.strip().partition(".")
            if not equals or not dot:
                raise SettingsError("--set %s: expected section.key=value" % item)
            self.put(section, key.strip(), text.strip(), "--set")
        return self

    def file(self, name: str) -> str:
        """The path that a setting names, from the ini's folder on; "" if there is none."""
        path = self.values[name]
        if not path or self.folder is None and name not in self.given:
            return ""
        return os.path.join(self.folder or "", path)


def nearest(word: str, words: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, words, 1, 0.5)
    return "; did you mean %s?" % close[0] if close else "; there are %s" % ", ".join(sorted(words))


def config_text() -> str:
    """masterserver.ini: every setting commented out at its default, with its help."""
    lines = ["# masterserver.ini: settings of masterserver.py. Each setting is shown at its default, or as an example;",
             "# remove the # to change one. A wrong name or value is an error at start that says where.",
             "# This file is what --print-config prints."]
    section = ""
    for row in SETTINGS:
        if row.section != section:
            section = row.section
            lines += ["", "[%s]" % section]
        lines += ["", "# " + row.help, "#%s = %s" % (row.key, row.default) if row.key else "#" + row.example]
    return "\n".join(line.rstrip() for line in lines) + "\n"


# =====================================================================================================================
# 4  Wire helpers
#
# What several protocols need and none owns: the one exception for bad input, text, addresses, the cookie, the rate
# limiter. Nothing here does I/O.
# =====================================================================================================================

Peer = Tuple[Any, ...]              # as the socket gives it: (address, port) or (address, port, flow, scope)
Replies = List[Tuple[bytes, Peer]]
Key = Tuple[str, str, int]          # a server's identity: game, address, port
CHANCE = random.SystemRandom()      # not the module's own generator: an embedding program may seed that, and rely on its order


def error_text(error: BaseException) -> str:
    """Its message; its type where there is none, as for a MemoryError."""
    return str(error) or type(error).__name__


class Malformed(Exception):
    """Bytes that are not what the protocol's document says; the text names the field. The only exception of a decoder."""


def c_string(data: bytes) -> bytes:
    """Up to the first NUL; a field filled to its end has none."""
    return data.partition(b"\0")[0]


# Control sequences such as colours, introduced by one byte or two; control strings, up to their end; other escapes (ECMA-48)
ANSI = re.compile("(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x90\x98\x9c-\x9f]*(?:\x07|\x1b\\\\|\x9c)"
                  "|\x1b[ -/]*[0-~]?")
# Also what shows as a space, or a name could be taken that only looks like another's; the last is the Braille pattern without dots
BREAKS = re.compile("[\t-\r\x85\xa0\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\u2800]+")
# Control, soft hyphen, bidirectional, zero-width, interlinear, shorthand format, tag characters, lone surrogates, non-characters
INVISIBLE = re.compile("[\0-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
                       "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff\ud800-\udfff"
                       "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]")
# More than three accents on one letter are not writing
STACKED = re.compile("([\u0300-\u036f\u0483-\u0489\u0591-\u05bd\u0e31-\u0e4e\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]{3})"
                     "[\u0300-\u036f\u0483-\u0489\u0591-\u05bd\u0e31-\u0e4e\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]+")


def clean(text: str, characters: int = NAME_CHARACTERS) -> str:
    """Text fit for every list: no control, bidirectional or zero-width characters, no ANSI sequences, no outer space."""
    if not (text.isascii() and text.isprintable()):
        text = ANSI.sub("", text)
        text = BREAKS.sub(" ", text)
        text = INVISIBLE.sub("", text)
        text = STACKED.sub(r"\1", text)
    return text.strip()[:characters].strip()


def decode_utf8(raw: bytes, characters: int = NAME_CHARACTERS) -> str:
    """UTF-8, cleaned; a character cut off at the end goes, other invalid bytes become U+FFFD."""
    return clean(codecs.utf_8_decode(raw, "replace")[0], characters)


def decode_legacy(raw: bytes, characters: int = NAME_CHARACTERS) -> str:
    """UTF-8 if valid, whole or cut off within a character, else Windows-1252 (whose five unassigned bytes become U+FFFD), cleaned."""
    try:
        return clean(raw.decode("utf-8"), characters)
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data" and not raw[:error.start].isascii():         # Windows-1252 would be wrong before it, too
            return decode_legacy(raw[:error.start], characters)
        return clean(raw.decode("cp1252", "replace"), characters)


def clamp(value: int, high: int = PLAYERS_MAX) -> int:
    return 0 if value < 0 else high if value > high else value


def canonical(address: str) -> str:
    """The address as lists and limits know it: no scope, IPv4-mapped IPv6 as IPv4."""
    if ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address.partition("%")[0])
    return str(parsed.ipv4_mapped or parsed)


def is_loopback(address: str) -> bool:
    """`address`: as read_address() and sockets give it."""
    return address.startswith("127.") or address == "::1"


def address_number(address: str) -> int:
    """An address, as sockets give it, as a number; every IPv6 one is above all IPv4 ones. It takes a third of ipaddress's time."""
    if ":" in address:
        return 1 << 128 | int(ipaddress.IPv6Address(address.partition("%")[0]))
    a, b, c, d = address.split(".")
    return int(a) << 24 | int(b) << 16 | int(c) << 8 | int(d)


class Networks:
    """Networks, with a word about each. Finding an address takes one look-up per prefix length, however many networks there are: tens of
    thousands of strangers come each second."""

    def __init__(self, networks: Iterable[Network], words: Mapping[Network, str] = {}) -> None:
        sizes: Dict[int, Dict[int, str]] = collections.defaultdict(dict)
        for network in networks:
            bits = network.max_prefixlen - network.prefixlen
            sizes[bits][address_number(str(network.network_address)) >> bits] = words.get(network, "")
        self.sizes = sorted(sizes.items(), key=lambda size: size[0])        # the smallest network that holds an address counts

    def find(self, number: int) -> Optional[str]:
        """What is said about the network that has this address_number(); None: none has it."""
        for bits, words in self.sizes:
            if number >> bits in words:
                return words[number >> bits]
        return None

    def __contains__(self, address: str) -> bool:
        return self.find(address_number(address)) is not None

    def __bool__(self) -> bool:
        return bool(self.sizes)


# Loopback, private or link-local: a server there may name another address for itself
LOCAL = Networks(map(ipaddress.ip_network, (
    "127.0.0.0/8", "::1/128",                                   # loopback
    "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16",            # RFC 1918
    "169.254.0.0/16", "fe80::/10", "fc00::/7")))                # link-local, unique local


def source_key(address: str) -> str:
    """What a limit by source counts: an IPv4 address, an IPv6 /64 (a host has all of it)."""
    if ":" in address:
        address = canonical(address)
        if ":" in address:
            return "%s/64" % ipaddress.IPv6Address(int(ipaddress.IPv6Address(address)) >> 64 << 64)
    return address


def source_keys(address: str) -> Tuple[str, ...]:
    """What servers are counted by: their source, and of IPv6 its /48 as well."""
    source = source_key(address)
    return (source, "%s/48" % ipaddress.IPv6Address(int(ipaddress.IPv6Address(source[:-3])) >> 80 << 80)) if ":" in source else (source,)


def uncount(counts: Dict[Any, int], key: Any) -> None:
    """One fewer of these; a key with none left is dropped."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def keep_latest(table: collections.OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Put this into the table as its latest; the oldest makes room."""
    table[key] = value
    table.move_to_end(key)
    if len(table) > most:
        table.popitem(last=False)


def endpoint(address: str, port: int) -> str:
    return "[%s]:%d" % (address, port) if ":" in address else "%s:%d" % (address, port)


def ipv4_bytes(address: str) -> bytes:
    return ipaddress.IPv4Address(address).packed


class Cookie:
    """A keyed MAC with a lifetime, so that a handshake needs no memory: what comes back proves that it went out.

    `key`: 16 bytes. `make` gives `size` bytes over the message in the window of `now`; `good` accepts those of this window and the one before.
    """

    def __init__(self, key: bytes, size: int = COOKIE_MAC_BYTES) -> None:
        self.key, self.size = key, size
        self.ends = -math.inf           # of the current window
        self.current = self.previous = hashlib.blake2b()

    def turn(self, now: float) -> None:
        window = int(now // COOKIE_WINDOW_S)
        self.ends = (window + 1.0) * COOKIE_WINDOW_S
        # BLAKE2's own keyed mode pads the key to a block, which would be a second one to compress each time
        self.previous, self.current = (
            hashlib.blake2b(self.key + struct.pack("<q", number), digest_size=self.size) for number in (window - 1, window))

    def make(self, message: bytes, now: float) -> bytes:
        if now >= self.ends:
            self.turn(now)
        mac = self.current.copy()
        mac.update(message)
        return mac.digest()

    def good(self, mac: bytes, message: bytes, now: float) -> bool:
        if mac == self.make(message, now):
            return True
        older = self.previous.copy()
        older.update(message)
        return mac == older.digest()


EXEMPT, BLOCKED = -math.inf, math.inf


class Limiter:
    """Token buckets by source in a bounded table.

    A bucket is one number, the time at which it will be full again (the "generic cell rate algorithm"). An unknown source has a full
    bucket, so a full table forgets the least recently used one and refuses nobody. `verdict(address)` says once, when a source
    is first seen, whether it is EXEMPT or BLOCKED; else 0. Verdicts are about addresses, buckets about what source_key() gives.
    """

    def __init__(self, rate: Tuple[float, float], verdict: Callable[[str], float] = lambda address: 0.0) -> None:
        """`rate`: tokens a second, tokens at once."""
        self.verdict = verdict
        self.table: collections.OrderedDict[str, float] = collections.OrderedDict()
        self.set_rate(rate)

    def set_rate(self, rate: Tuple[float, float]) -> None:
        self.cost_s = 1.0 / rate[0]
        self.depth_s = (rate[1] + 0.001) / rate[0]       # a thousandth of a token, so that sums of fractions come out exact
        self.table.clear()

    def spent(self, address: str, now: float) -> bool:
        """Has this source next to nothing left? Asking costs it nothing."""
        full_at = self.table.get(address) or self.table.get(source_key(address), 0.0)         # as in allow()
        return full_at < BLOCKED and full_at - now > self.depth_s - 2 * self.cost_s

    def allow(self, address: str, now: float, tokens: float = 1) -> bool:
        table = self.table
        full_at = table.get(address)
        if full_at is None:
            full_at = self.verdict(address)
            if not full_at and ":" in address:          # a verdict may be about less than the /64 that shares a bucket
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


class Tally:
    """What one protocol has seen, for /metrics and the last line of the log."""

    def __init__(self) -> None:         # what each counts: TALLY_HELP, section 9
        self.received = self.sent = self.bytes_in = self.bytes_out = 0
        self.malformed = self.limited = self.unsent = self.errors = self.connections = 0


# =====================================================================================================================
# 5  Registry
#
# The listed servers of all games, the rules that the operator has set for them, and what was heard last from whom. It
# knows nothing of protocols, sockets or disks. Times are those of the monotonic clock that is handed in.
# =====================================================================================================================

class Refused(Exception):
    """A server that is not to be listed: `outcome` is a key of OUTCOMES (section 9), and the reason in words."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


class Rules:
    """What the operator has decided about addresses: public ones, bans, marks, limits. Read anew on reload.

    The limiters are shared by all protocols: datagrams and messages within a connection, new connections, and requests: whatever costs more
    than a look-up, or gets an answer longer than itself. What comes by UDP may have a forged address, so it has limiters of its own: a
    flood in somebody's name takes nothing from what he does by TCP.
    """

    def __init__(self, settings: Settings) -> None:
        self.limiters = {name: [Limiter(settings["limits." + name], self.verdict) for _ in range(number)]
                         for name, number in (("datagrams", 2), ("connections", 1), ("requests", 2))}
        self.datagrams, self.messages = self.limiters["datagrams"]
        self.connections, = self.limiters["connections"]
        self.udp_requests, self.requests = self.limiters["requests"]
        self.surplus = Limiter(SURPLUS_BYTES)
        self.answers = Limiter(ANSWERS_RATE, self.verdict)          # to the poller's queries; only for the verdict
        self.read(settings)

    def read(self, settings: Settings) -> None:
        self.public_address: str = settings["server.public_address"]
        self.address_map: Dict[str, str] = settings["address_map"]
        self.official: Dict[Tuple[str, int], bool] = settings["official"]
        self.priority: Dict[Tuple[str, int], int] = settings["priority"]
        self.games: Dict[str, str] = settings["games"]
        self.blocked, self.exempt = Networks(settings["blocked"]), Networks(settings["limits.exempt"])
        self.bans = Networks({**settings["blocked"], **settings["bans"]}, settings["bans"])         # why one is blocked is for the operator alone
        self.refuse_names: Tuple[Pattern, ...] = settings["server.refuse_names"]
        self.servers: int = settings["limits.servers"]
        self.servers_per_source: int = settings["limits.servers_per_source"]
        for name, limiters in self.limiters.items():
            for limiter in limiters:
                limiter.set_rate(settings["limits." + name])
        self.answers.set_rate(ANSWERS_RATE)             # the same rate, to clear the table: who is blocked may have changed

    @property
    def allowances(self) -> Tuple[int, int]:
        """How many servers each of the source_keys() may have."""
        return self.servers_per_source, SITE_SOURCES * self.servers_per_source

    def believes(self, source: str, claimed: str) -> bool:
        """May a server say that it has this address? Only one that has reached us by loopback or a private network, and never a loopback address."""
        return source in LOCAL and is_unicast(claimed) and not is_loopback(canonical(claimed))

    def listed_address(self, source: str, claimed: str = "") -> str:
        """Where players find a server whose packets come from `source` and which claims to be at `claimed`."""
        if claimed and self.believes(source, claimed):
            return canonical(claimed)
        if source in self.address_map:
            return self.address_map[source]
        if self.public_address and is_loopback(source):
            return self.public_address
        return source

    def verdict(self, address: str) -> float:
        """For the limiters: BLOCKED, EXEMPT or 0."""
        number = address_number(address)
        return BLOCKED if self.blocked.find(number) is not None else EXEMPT if self.exempt.find(number) is not None else 0.0

    def exempts(self, address: str) -> bool:
        return (self.datagrams.table.get(address) or self.verdict(address)) == EXEMPT          # the table costs less, and knows most of them

    def allow_surplus(self, use: str, address: str, size: int, now: float) -> bool:
        """May a source that has proven nothing get `size` bytes more than it sent? One bucket for all of them: a limit by source does not
        bind those who forge sources. Each `use` has its own: a flood of pings keeps nobody from the list."""
        return size <= 0 or self.exempts(address) or self.surplus.allow(use, now, size)

    def ban(self, *addresses: str) -> str:
        """Why none of these addresses may announce, or ""."""
        if not self.bans:
            return ""
        found = [self.bans.find(address_number(address)) for address in addresses]
        return next((reason or "banned, no reason given" for reason in found if reason is not None), "")

    def marks(self, place: Tuple[str, int]) -> Tuple[bool, int]:
        return self.official.get(place, False), self.priority.get(place, 0)

    def refused_name(self, name: str) -> str:
        return next((pattern.pattern for pattern in self.refuse_names if pattern.search(name)), "")


Rank = Tuple[int, bool, int, str, str, int, str]
NO_DETAILS: Dict[str, str] = {}


class Server:
    """One listed server. Identity is (game, address, port); the rest is what it told last.

    verified     how it is known to be there: handshake, query, connection, or self-reported
    source       the address that its packets come from (differs from `address` behind a router)
    lifetime     seconds that it stays listed after last_seen; infinite where a connection or the poller decides
    named        by the ini: it stays, as not responding, however long it is silent
    unconfirmed  listed before a restart, and not heard since
    mapped       its address follows from its source by the operator's settings, and moves with them; False: it named that itself
    """

    __slots__ = ("game", "address", "port", "name", "mode", "map", "version", "players", "max_players", "playing", "description",
                 "official", "priority", "flavor", "verified", "unconfirmed", "responding", "ping_ms", "details", "named",
                 "mapped", "source", "first_seen", "last_seen", "lifetime", "rank", "parts", "packet", "batch")

    def __init__(self, game: str, address: str, port: int, source: str, now: float, lifetime: float, name: str = "", mode: str = "",
                 map: str = "", version: str = "", players: int = 0, max_players: int = 0, verified: str = "self-reported", *,
                 description: str = "", playing: Optional[int] = None, flavor: int = 0, responding: bool = True,
                 ping_ms: Optional[float] = None, details: Dict[str, str] = NO_DETAILS, named: bool = False, mapped: Optional[bool] = None,
                 packet: Any = b"") -> None:
        self.game, self.address, self.port, self.source, self.verified = game, address, port, source, verified
        self.name, self.description, self.mode, self.map, self.version = name, description, mode, map, version
        self.players, self.max_players = players, max_players
        self.playing = playing                              # in ships, on the field; None: the protocol does not say
        self.flavor, self.details = flavor, details
        self.responding, self.ping_ms = responding, ping_ms
        self.named, self.mapped = named, mapped             # mapped: None: as insert() finds it
        self.official, self.priority = False, 0             # the operator's marks
        self.unconfirmed = False
        self.first_seen = self.last_seen = now
        self.lifetime = lifetime
        self.rank: Optional[Rank] = None                    # as rank_of made it last; None after a change
        self.parts: Optional[Dict[str, Any]] = None         # its part of each list, as rendered last
        self.packet = packet                                # the announcement heard last, or its fingerprint, as the protocol needs it
        self.batch = sys.maxsize        # the registry's at its last change, once insert() has ended: storage writes those of its own batch or later

    @property
    def key(self) -> Key:
        return self.game, self.address, self.port

    @property
    def lasting(self) -> bool:
        return self.lifetime == math.inf

    @property
    def stays(self) -> bool:
        """It is listed for as long as it answers, with or without announcements."""
        return self.named or self.lasting

    @property
    def nameless(self) -> bool:
        """It has told no name, and has its address for one."""
        return self.name == endpoint(self.address, self.port)

    def move(self, address: str) -> None:
        if self.nameless:
            self.name = endpoint(address, self.port)
        self.address = address


# What survives a restart, in this order; new fields go last
STORED: Dict[str, Any] = {
    "name": str, "mode": str, "map": str, "version": str, "players": int, "max_players": int, "playing": int, "description": str, "flavor": int,
    "verified": str, "responding": bool, "details": dict, "source": str, "lasting": bool, "named": bool, "mapped": bool}


def stored_fields(text: str) -> List[Any]:
    """The values of a text that stored_row() (section 11) made; always as many, whatever the text is."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = []
    return ((fields if type(fields) is list else []) + [None] * len(STORED))[:len(STORED)]


def ranking(server: Server) -> Rank:
    """The order of every list: the operator's priority, then official, then players, then name. Many have the same name, the game's own;
    their identity breaks the tie, so that each can be found in the list by bisection."""
    return -server.priority, not server.official, -server.players, server.name.casefold(), server.address, server.port, server.game


def rank_of(server: Server) -> Rank:
    """The same, remembered; for the event loop alone, as a rank that another thread made while the server was changing would stay."""
    rank = server.rank
    if rank is None:
        rank = server.rank = ranking(server)
    return rank


BLOCK_SERVERS = 128         # a list of 10,000 is 80 of them, and when one server changes two are made anew, in a tenth of a millisecond


class Block:
    """Some servers that follow each other in a list. It is never changed once others have seen it: where a server changes, another block
    takes its place. So what was made of it stays valid, whichever thread made it."""

    def __init__(self, servers: List[Server]) -> None:
        self.servers = servers
        self.ranks = list(map(rank_of, servers))
        self.made: Dict[str, Tuple[Any, Any]] = {}

    def part(self, name: str, make: Callable[[List[Server]], Any], stamp: Any = None) -> Any:
        """What `make(servers)` gives, made once for as long as `stamp` is the same."""
        found = self.made.get(name)
        if found is None or found[0] != stamp:
            found = self.made[name] = stamp, make(self.servers)
        return found[1]


Blocks = List[Block]


def blocks_of(servers: Sequence[Server]) -> Blocks:
    """`servers` in order."""
    return [Block(list(servers[at:at + BLOCK_SERVERS])) for at in range(0, len(servers), BLOCK_SERVERS)]


class Order:
    """The servers of one list in the master's order, in blocks. One that changes is taken out and put back where it belongs: sorting 10,000
    servers takes 5 ms, and 1 ms even if they are in order, as each of them must be looked at."""

    def __init__(self, servers: List[Server]) -> None:
        """`servers` in order."""
        self.blocks = blocks_of(servers)
        self.size = len(servers)
        self.moved: Dict[Server, Optional[Rank]] = {}           # who has changed since: the rank it has here, None if it is new

    def worn(self) -> bool:
        """So much has changed that starting over is quicker."""
        return len(self.moved) > self.size // 8 or len(self.blocks) > 3 * (1 + self.size // BLOCK_SERVERS)

    def mend(self, listed: Callable[[Server], bool]) -> None:
        if not self.moved:
            return
        places = self.blocks or [Block([])]
        firsts: List[Any] = [(), *(block.ranks[0] for block in places[1:])]         # () is less than every rank
        changed: Dict[int, Block] = {}

        def own_block(rank: Rank) -> Block:
            place = bisect.bisect_right(firsts, rank) - 1
            if place not in changed:
                changed[place] = copied = Block([])
                copied.servers, copied.ranks = list(places[place].servers), list(places[place].ranks)
            return changed[place]

        for left in filter(None, self.moved.values()):          # all of them first: two may have changed places
            block = own_block(left)
            at = bisect.bisect_left(block.ranks, left)
            del block.servers[at], block.ranks[at]
        for server in filter(listed, self.moved):
            rank = rank_of(server)
            block = own_block(rank)
            at = bisect.bisect_left(block.ranks, rank)
            block.servers.insert(at, server)
            block.ranks.insert(at, rank)
        self.moved.clear()
        self.blocks = []
        for place, block in enumerate(places):
            block = changed.get(place, block)
            self.blocks += [block] if 0 < len(block.servers) <= 2 * BLOCK_SERVERS else blocks_of(block.servers)
        self.size = sum(len(block.servers) for block in self.blocks)


class Registry:
    """The servers, by game and by identity, their expiry, and a generation number that moves whenever a list changes."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.games: Dict[str, Dict[Tuple[str, int], Server]] = collections.defaultdict(dict)
        self.census: Dict[str, List[int]] = collections.defaultdict(lambda: [0, 0, 0])     # servers, players, playing
        self.sources: Dict[str, int] = collections.defaultdict(int)         # servers by source_keys()
        self.total = 0
        self.generation = 0
        self.watchers: Dict[Tuple[str, str], List[Callable[[str, Server], Any]]] = collections.defaultdict(list)    # by event and game ("": all)
        # Servers by the second in which their lifetime may end. A server that was heard from since moves on when its
        # second comes: one move in a lifetime, however often it announces.
        self.endings: Dict[int, List[Server]] = {}
        self.orders: Dict[str, Order] = {}          # of each list that somebody reads; "": all games
        # What became of the last packets, for /check: (source, protocol, port) -> (time, a key of OUTCOMES, detail); the port is
        # the announced one, 0 if it could not be read
        self.heard: collections.OrderedDict[Tuple[str, str, int], Tuple[float, str, str]] = collections.OrderedDict()
        self.notes, self.notes_end = 0, -math.inf       # in this second, and when it ends
        # What storage has not been told yet: who has left (some may be back), and the number that servers changed since bear
        self.left: Set[Key] = set()
        self.batch = 1

    def watch(self, call: Callable[[str, Server], Any], game: str = "", events: Iterable[str] = ("listed", "changed", "gone")) -> None:
        """Have `call(event, server)` called for a game, or for all. When a reload moves a server to another address, only those who watch
        all games are told, as if one went and another came: whoever keeps servers by their addresses watches all."""
        for event in events:
            self.watchers[event, game].append(call)

    def get(self, game: str, address: str, port: int) -> Optional[Server]:
        return self.games[game].get((address, port)) if game in self.games else None

    def admit(self, game: str, address: str, port: int, source: str, name: Optional[str] = None, known: bool = False) -> None:
        """Raise Refused if a server that is not listed yet may not be. `name`: None if it has not told it; `known`: named in the ini, without
        limits."""
        if not 0 < port <= 65535:
            raise Refused("bad packet", "port %d cannot be listed" % port)
        # A source that sent us a packet can be one, except 0.*, and by UDP on IPv6 a link-local one with its scope
        if address != source and not is_unicast(address) or source[:2] == "0." or "%" in source:
            raise Refused("bad packet", "%s cannot be the address of a server" % address)
        rules = self.rules
        if rules.bans:
            self.admit_source(source, address)
        if rules.refuse_names:
            self.admit_name(name, address, port)
        if known:
            return
        if self.total >= rules.servers:
            raise Refused("limit", "this master lists at most %d servers" % rules.servers)
        for key, most in zip(source_keys(source), rules.allowances):
            if self.sources.get(key, 0) >= most and not rules.exempts(source):
                one = key[-3:] + " network" if ":" in key else "address"
                raise Refused("limit", "at most %d servers of one %s are listed" % (most, one))

    def admit_source(self, source: str, address: str) -> None:
        ban = self.rules.ban(source, address)
        if ban:
            raise Refused("banned", ban)

    def admit_name(self, name: Optional[str], address: str = "", port: int = 0) -> None:
        """Raise Refused for a refused name; the place itself, which is the name of a server that has told none, never is."""
        pattern = "" if name is None else self.rules.refused_name(name)
        if pattern and name != endpoint(address, port):
            raise Refused("name", "names matching %s are not listed here" % pattern)

    def hear(self, game: str, address: str, port: int, source: str, now: float, lifetime: float,
             fields: Mapping[str, Any], known: bool = False) -> Server:
        """List a server, or refresh it, with what it told; raises Refused. Fields are attributes of Server."""
        server = self.get(game, address, port)
        if server is None:
            self.admit(game, address, port, source, fields.get("name"), known)
            server = Server(game, address, port, source, now, lifetime, named=known, **fields)
            self.insert(server)
        else:
            self.admit_name(fields.get("name"), address, port)
            if server.source != source:
                self.admit_source(source, address)
                self.uncount_source(server)
                server.source, server.mapped = source, address == self.rules.listed_address(source)
                self.count_source(server)
                server.batch = self.batch
            server.lifetime = lifetime
            self.refresh(server, now)
            self.update(server, {**fields, "named": True} if known else fields)
        return server

    def insert(self, server: Server) -> None:
        """A new server, admitted or restored, into every index."""
        place = server.address, server.port
        server.official, server.priority = self.rules.marks(place)
        if server.mapped is None:
            server.mapped = server.address == self.rules.listed_address(server.source)
        self.games[server.game][place] = server
        self.count_source(server)
        self.total += 1
        self.count_in(server)
        self.schedule(server)
        self.changed("listed", server)

    def refresh(self, server: Server, now: float) -> None:
        """The server was heard from."""
        server.last_seen = now
        if server.unconfirmed:
            self.schedule(server)           # its lifetime may be shorter than the one it was restored with
            self.update(server, {"unconfirmed": False})

    def update(self, server: Server, fields: Mapping[str, Any]) -> None:
        """Take over what the server told; the lists change only if something did."""
        different = [(name, value) for name, value in fields.items() if getattr(server, name) != value]
        if not different:
            return
        self.count_out(server)
        for name, value in different:
            setattr(server, name, value)
        self.count_in(server)
        self.changed("changed", server)

    def remove(self, server: Optional[Server]) -> None:
        """None, and one that has left already, change nothing."""
        if server is None or self.get(*server.key) is not server:
            return
        del self.games[server.game][server.address, server.port]
        self.count_out(server)
        self.uncount_source(server)
        self.total -= 1
        self.changed("gone", server)

    def count_source(self, server: Server) -> None:
        for key in source_keys(server.source):
            self.sources[key] += 1

    def uncount_source(self, server: Server) -> None:
        for key in source_keys(server.source):
            uncount(self.sources, key)

    def count_in(self, server: Server) -> None:
        """Count its players from now on, limited to what is possible; a server that the ini names and that does not respond counts for nothing."""
        server.players = clamp(server.players, server.max_players or PLAYERS_MAX)
        if server.playing is not None:
            server.playing = clamp(server.playing, server.players)
        if server.responding:
            census = self.census[server.game]
            census[0] += 1
            census[1] += server.players
            census[2] += server.players if server.playing is None else server.playing

    def count_out(self, server: Server) -> None:
        if server.responding:
            census = self.census[server.game]
            census[0] -= 1
            census[1] -= server.players
            census[2] -= server.players if server.playing is None else server.playing

    def changed(self, event: str, server: Server) -> None:
        self.generation += 1
        server.parts = None
        for game in (server.game, ""):
            order = self.orders.get(game)
            if order is not None:
                order.moved.setdefault(server, server.rank)
                if order.worn():
                    del self.orders[game]           # it may never be read again, and would hold on to every server that leaves
        server.rank = None
        if event == "gone":
            if len(self.left) < KNOWN_SERVERS:      # reached while the disk takes nothing; who comes and goes meanwhile is not on it
                self.left.add(server.key)
        else:
            server.batch = self.batch
        for watcher in self.watchers[event, server.game] + self.watchers[event, ""]:
            watcher(event, server)

    def apply_rules(self, settings: Settings) -> None:
        """After a reload: addresses and marks as the settings now have them; servers that are now banned, or whose game is no longer
        served, go."""
        closed = self.rules.games.keys() - settings["games"]
        self.rules.read(settings)
        moving: Dict[Server, Key] = {}
        for server in [server for listed in self.games.values() for server in listed.values()]:
            address = self.rules.listed_address(server.source) if server.mapped else server.address
            if (server.game in closed or self.rules.ban(*{server.source, address})
                    or self.rules.refused_name(server.name) and not server.nameless):
                self.remove(server)
            elif server.address != address:
                moving[server] = server.game, address, server.port
            elif (server.official, server.priority) != self.rules.marks((address, server.port)):
                official, priority = self.rules.marks((address, server.port))
                self.update(server, {"official": official, "priority": priority})
        for game in closed:
            self.census.pop(game, None)
        self.move(moving)

    def move(self, moving: Mapping[Server, Key]) -> None:
        """The same servers at other addresses; two may change places. Their protocols keep them, and whoever watches all games sees one go
        and another come. Of two that come to one place, the one known to be there stays."""
        there: Dict[Key, Server] = {}
        for server, key in moving.items():
            other = there.get(key) or self.get(*key)
            if other is None or other in moving and key not in there:           # the other one moves away itself
                there[key] = server
                continue
            stays, goes = sorted((other, server), key=lambda one: (not one.responding, one.unconfirmed))
            self.update(stays, {"named": stays.named or goes.named})
            self.remove(goes)
            there[key] = stays
        arrived = [(copy.copy(server), server) for key, server in there.items() if server.key != key]
        games = {game: dict(self.games[game]) for game in {server.game for server, _ in arrived}}
        for before, _ in arrived:
            del games[before.game][before.address, before.port]
        for _, server in arrived:
            games[server.game][moving[server][1:]] = server
        self.games.update(games)            # at once, as other threads may look, and none may be missing
        for before, server in arrived:
            server.batch = self.batch       # first: under its new key it is not on disk
            server.move(moving[server][1])
            server.official, server.priority = self.rules.marks((server.address, server.port))
            self.left.add(before.key)
            self.changed("moved", server)
        for event, seen in [("gone", before) for before, _ in arrived] + [("listed", server) for _, server in arrived]:
            for watcher in self.watchers[event, ""]:
                watcher(event, seen)

    def schedule(self, server: Server, ends: Optional[float] = None) -> None:
        """`ends`: when a restored server without a lifetime of its own goes, unless it is heard from by then."""
        if ends is None:
            ends = math.inf if server.stays else server.last_seen + server.lifetime
        if ends != math.inf:
            self.endings.setdefault(int(ends), []).append(server)

    def expire(self, now: float, deaf_s: float = 0.0) -> None:
        """Drop every server that was silent for its lifetime; called once a second. `deaf_s`: for this long nobody could be heard."""
        if sum(map(len, self.endings.values())) > 3 * self.total + 1000:           # most are of servers that have left; a restored one has two
            self.endings = {second: [server for server in ending if self.get(*server.key) is server] for second, ending in self.endings.items()}
        for second in sorted(s for s in self.endings if s <= now):
            ending = self.endings.pop(second)
            try:
                while ending:
                    server = ending.pop()
                    silent = server.unconfirmed if server.stays else server.last_seen + server.lifetime <= now
                    if not silent:
                        self.schedule(server)
                    elif server.stays or (server.last_seen + server.lifetime <= now - deaf_s
                                          and not self.rules.datagrams.spent(server.source, now)):
                        self.remove(server)
                    else:                   # nobody could hear it, or a flood in its name keeps its own packets out: silence proves nothing
                        self.schedule(server, now + server.lifetime)
                        server.batch = self.batch           # else it would end on disk
            finally:                        # a watcher that fails keeps nobody else in the list
                if ending:
                    self.endings.setdefault(second, []).extend(ending)

    def servers(self, game: str = "", key: Callable[[Server], Rank] = ranking) -> List[Server]:
        """All servers, or those of a game, in the master's order; the list is the caller's. Safe from any thread."""
        games = [self.games.get(game, {})] if game else list(self.games.values())
        return sorted((server for listed in games for server in list(listed.values())), key=key)

    def news(self, batch: int, then: float) -> Tuple[List[Server], List[Server]]:
        """For storage: who has changed since `batch` began, and who else was heard from `then` on. Safe from any thread. Looking at all of
        them once a second costs less than recording each one heard."""
        altered, heard = [], []
        for listed in list(self.games.values()):
            for server in list(listed.values()):
                if server.batch >= batch:
                    altered.append(server)
                elif server.last_seen >= then:
                    heard.append(server)
        return altered, heard

    def in_blocks(self, game: str = "") -> Blocks:
        """The same in blocks, for the event loop alone: only who has changed is put in its place anew."""
        order = self.orders.pop(game, None)         # and not put back if a fault leaves it half mended
        if order is None:
            order = Order(self.servers(game, rank_of))
        else:
            order.mend(lambda server: self.get(*server.key) is server)
        self.orders[game] = order
        return order.blocks

    def forget_parts(self) -> None:
        """What was made of servers no longer holds, though none has changed."""
        self.orders.clear()
        for listed in self.games.values():
            for server in listed.values():
                server.parts = None

    def forget_part(self, name: str) -> None:
        """This part of every server no longer holds: it is made again with the list that it stands in."""
        for listed in self.games.values():
            for server in listed.values():
                if server.parts is not None:
                    server.parts = server.parts.copy()          # a worker may be about to put the old one into what it has taken
                    server.parts.pop(name, None)

    def note(self, source: str, protocol: str, port: int, outcome: str, now: float, detail: str = "") -> None:
        """Remember what became of a packet, for the operator of that server."""
        if now >= self.notes_end:
            self.notes, self.notes_end = 0, now + 1.0
        elif self.notes >= HEARD_PER_S:
            return
        self.notes += 1
        keep_latest(self.heard, (source, protocol, port), (now, outcome, detail), HEARD_SOURCES)


def parts(servers: Iterable[Server], name: str, render: Callable[[Server], Any]) -> List[Any]:
    """Each server's part of the list `name`, rendered when the server has changed since."""
    out = []
    for server in servers:
        made = server.parts         # the event loop may take it away while a worker renders
        if made is None:
            made = server.parts = {}
        part = made.get(name)
        if part is None:
            part = made[name] = render(server)
        out.append(part)
    return out


def joined_parts(blocks: Blocks, name: str, render: Callable[[Server], bytes], separator: bytes = b"") -> List[bytes]:
    """By block, the parts of its servers, for a list that has nothing but `separator` between them."""
    return [block.part(name, lambda servers: separator.join(parts(servers, name, render))) for block in blocks]


class Rendered:
    """One game's list in one form, rebuilt when a server has changed: at most once in RENDER_S, a short list sooner, so that it takes a
    tenth of the time at most."""

    def __init__(self, registry: Registry, game: str, make: Callable[[Blocks], Any]) -> None:
        self.registry, self.game, self.make = registry, game, make
        self.generation = -1
        self.made_at = -math.inf
        self.made: Any = None

    def get(self, now: float) -> Any:
        generation = self.registry.generation
        if generation != self.generation and now - self.made_at >= min(RENDER_S, RENDER_SERVER_S * len(self.registry.games.get(self.game, ()))):
            self.made = self.make(self.registry.in_blocks(self.game))
            self.generation, self.made_at = generation, now
        return self.made


# =====================================================================================================================
# 6  Storage
#
# The registry and the history of player counts in one SQLite file. It knows sqlite3 and the name of its file, no
# server, no clock and no thread: rows and the wall clock (`wall`, seconds since 1970) come in, rows go out, and the
# caller makes one call at a time. A file that is damaged is renamed and a new one begun. Any other
# trouble (a full disk, a locked file) is left in `trouble` and raised as sqlite3.Error; the next call opens the file
# again and tries anew.
# =====================================================================================================================

MINUTE, QUARTER, HOUR, DAY = 60, 900, 3600, 86400
WEEK, MONTH, YEAR = 7 * DAY, 31 * DAY, 366 * DAY    # the longest of each, so that a whole one is always there

# How history is kept: step -> (seconds a block covers, seconds it is kept). A block is one row of the table, a sample 2
# bytes in the block of minutes and 4 (mean and peak) in the others: 120, 384 and 672 bytes. A WITHOUT ROWID table moves
# what exceeds 1,002 bytes to a page of its own, which would waste most of it: hence a week of hours and not a
# fortnight.
BLOCKS = {MINUTE: (HOUR, DAY), QUARTER: (DAY, MONTH), HOUR: (WEEK, YEAR)}
WIDTHS = {MINUTE: 2, QUARTER: 4, HOUR: 4}                           # bytes of a sample
SPANS = {"day": (MINUTE, DAY), "week": (QUARTER, WEEK), "month": (QUARTER, MONTH), "year": (HOUR, YEAR)}
SAMPLE_MAX = 65534         # a sample is 16 bits, little-endian: 0 = away, n + 1 = n players
SPARKLINE_HOURS = 24
WALL_END = 3e10             # the year 2920: times on disk beyond it, or before 1970, are noise, and Windows has no calendar for them

STORAGE_BUSY_S = 0.2        # how long SQLite waits for another program's lock; the next batch tries again, and a server's page waits for this thread
WAL_BYTES = 4 << 20         # the log is cut back to this after a large write; SQLite's own checkpoint comes at 4 MB

# The hot columns of a listed server are apart from its text: 150 of them share a page, so that a batch of heartbeats
# rewrites a few pages. `server` keeps everyone seen within a year; its numbers are never given out twice
# (AUTOINCREMENT), so that blocks of a server removed early can belong to nobody else. Blocks sort by time first:
# one sample of all servers lies together, and so does what is to be thinned. There is no NOT NULL: no row from outside breaks a constraint,
# so a broken one means damage.
SCHEMA_VERSION = 1          # PRAGMA user_version: the tables, and what the bytes in a block mean
SCHEMA_LATER = 100          # numbers from here on are noise
SCHEMA = (
    "CREATE TABLE server (id INTEGER PRIMARY KEY AUTOINCREMENT, game TEXT, address TEXT, port INTEGER,"
    " first_seen REAL, last_seen REAL, fields TEXT, UNIQUE (game, address, port))",
    "CREATE TABLE listed (server INTEGER PRIMARY KEY, expires REAL, last_seen REAL)",
    "CREATE TABLE block (step INTEGER, start INTEGER, server INTEGER, samples BLOB,"
    " PRIMARY KEY (step, start, server)) WITHOUT ROWID",
)
SERVER_ID = "(SELECT id FROM server WHERE game = ? AND address = ? AND port = ?)"

ListedRow = Tuple[str, str, int, float, float, float, str]         # key, expires, first seen, last seen, fields as JSON


class Series(NamedTuple):
    """Player counts from `start` on, one every `step` seconds; None where the server or the master was away."""
    start: int
    step: int
    means: List[Optional[int]]
    peaks: List[Optional[int]]


class Remembered(NamedTuple):
    """What is remembered of a server, listed or gone: wall-clock seconds, and its last fields as JSON."""
    first_seen: float
    last_seen: float
    fields: str


def roll_up(samples: Sequence[int]) -> bytes:
    """Mean and peak of the samples that are not gaps, as 4 bytes; 0 and 0 where all are gaps."""
    here = [sample for sample in samples if sample]
    return struct.pack("<HH", (sum(here) + len(here) // 2) // len(here), max(here)) if here else bytes(4)


def is_damage(error: Exception) -> bool:
    """Is the file itself broken? Locks, full disks and the like are OperationalErrors; damage is the bare base class
    (SQLITE_CORRUPT, SQLITE_NOTADB), a broken constraint, text that is not UTF-8, in a row or in SQLite's message, or
    noise in the file's head. https://www.sqlite.org/rescode.html"""
    return (type(error) in (sqlite3.DatabaseError, sqlite3.IntegrityError, UnicodeDecodeError)
            or str(error).startswith(("Could not decode to UTF-8", "unsupported file format")))


def typed(rows: Iterable[Tuple[Any, ...]], *kinds: type) -> List[Any]:
    """The rows, if their values are of these types: SQLite keeps anything in any column, and noise may look like it."""
    found = list(rows)
    if any(set(map(type, column)) != {kind} for column, kind in zip(zip(*found), kinds)):
        raise sqlite3.DatabaseError("a value of the wrong type")
    return found


def has_content(path: str) -> bool:
    """Is this a file that is not empty? Where the disk is full, SQLite leaves empty ones."""
    return os.path.isfile(path) and os.path.getsize(path) > 0


class Storage:
    """One SQLite file. Every method may raise sqlite3.Error, and any of them may be called again after that.

    `trouble` is the last error in words, "" once something has been written since. `set_aside` is where the last
    damaged file went, "" if there was none. `renewed` moves whenever the file is a different one (first opened, begun anew, replaced from
    outside): what was saved earlier is not in it, so save the whole registry again.
    """

    def __init__(self, path: str) -> None:
        # SQLite's logs are beside the file that a link leads to; and the program around us may work in another folder later
        self.path = path if path == ":memory:" else os.path.realpath(path)
        self.trouble = ""
        self.set_aside = ""
        self.renewed = 0
        self._db: Optional[sqlite3.Connection] = None
        self._file: Optional[Tuple[int, int]] = None    # device and inode of the file that was opened last
        self._wall = 0.0                                # of the last call that knew it: names the files set aside
        self._sampled = 0                               # the minute of the last sample

    def close(self) -> None:
        """Close the file; a transaction that is open is rolled back."""
        if self._db is not None:
            self._db.close()
            self._db = None

    # -- the registry

    def load(self, wall: float) -> List[ListedRow]:
        """The servers listed and not expired at `wall`, as save() took them, with the time each was first seen ever.
        If the clock was put back meanwhile, `expires` may lie further ahead than any server lives."""
        self._wall = wall
        return self._run(lambda db: self._listed(db, wall), "BEGIN")

    def peek(self, wall: float) -> List[ListedRow]:
        """load() where the file cannot be opened normally: the disk is full or the folder read-only. This needs a file without a log, and
        ignores locks."""
        if any(has_content(self.path + suffix) for suffix in ("-wal", "-journal")):
            raise sqlite3.OperationalError("a log stands beside the file")
        db = sqlite3.connect("file:%s?mode=ro&immutable=1" % urllib.parse.quote(os.fsencode(self.path), ""), uri=True)
        try:
            return self._listed(db, wall)
        finally:
            db.close()

    def save(self, listed: Sequence[ListedRow], seen: Sequence[Tuple[float, float, str, str, int]],
             gone: Sequence[Key]) -> bool:
        """Write one batch in one transaction: rows new or changed, (last seen, expires, key) of servers only heard
        from, and keys no longer listed, which go first. On return the rows outlive the process. False: some of those only heard from are no
        longer listed here."""
        def work(db: sqlite3.Connection) -> bool:
            for key in gone:
                self._leave(db, "server = " + SERVER_ID, key)
            db.executemany(
                "INSERT INTO server (game, address, port, first_seen, last_seen, fields) VALUES (?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (game, address, port) DO UPDATE SET fields = excluded.fields"
                " WHERE fields IS NOT excluded.fields",
                [row[:3] + row[4:] for row in listed])
            db.executemany("INSERT OR REPLACE INTO listed VALUES (" + SERVER_ID + ", ?, ?)",
                           [row[:4] + (row[5],) for row in listed])
            found = db.executemany("UPDATE listed SET last_seen = ?, expires = ? WHERE server = " + SERVER_ID, seen).rowcount if seen else 0
            if listed:
                self._forget(db)
            return found == len(seen)
        return not (listed or seen or gone) or self._run(work)

    def known(self, game: str, address: str, port: int) -> Optional[Remembered]:
        """What is remembered of a server, also of one that left within the year; None if nothing is, or its times are noise."""
        rows = self._run(lambda db: typed(db.execute(
            "SELECT first_seen, coalesce(listed.last_seen, server.last_seen), fields FROM server LEFT JOIN listed"
            " ON id = server WHERE id = " + SERVER_ID, (game, address, port)), float, float, str), "BEGIN")
        return Remembered(*rows[0]) if rows and all(0 <= at < WALL_END for at in rows[0][:2]) else None

    # -- history

    def sample(self, wall: float, players: Sequence[Tuple[str, str, int, int]]) -> Optional[Dict[Key, List[Optional[int]]]]:
        """Once a minute: (game, address, port, players) of every listed server; address "" and port 0 are
        the total of a game. Returns recent() when a quarter hour has ended, otherwise None. A second sample of the same minute replaces the
        first."""
        self._wall = wall
        minute = int(wall) // MINUTE * MINUTE

        def work(db: sqlite3.Connection) -> bool:
            # Whichever way the clock went: a quarter hour other than that of the last sample means that one has ended.
            turned = minute // QUARTER != self._sampled // QUARTER
            if turned:
                self._roll_up(db, self._sampled // HOUR * HOUR)
            # Thin once an hour, but not right after a leap of the clock: it may be a mistake.
            if minute // HOUR != self._sampled // HOUR and 0 < minute - self._sampled <= 2 * HOUR:
                self._thin(db, minute)
            # Those that expired while no master ran, and would come back if the clock were set back before the next start
            self._leave(db, "expires < ?", (minute,))
            db.executemany("INSERT OR IGNORE INTO server (game, address, port, first_seen, last_seen, fields)"
                           " VALUES (?, ?, ?, ?, ?, '{}')", [row[:3] + (wall, wall) for row in players])
            for *key, count in players:
                [(server,)] = db.execute("SELECT " + SERVER_ID, key)
                self._put(db, MINUTE, minute, server, struct.pack("<H", max(0, min(count, SAMPLE_MAX)) + 1))
            return turned
        turned = self._run(work)
        self._sampled = minute
        return self.recent(wall) if turned else None

    def history(self, game: str, address: str, port: int, span: str, wall: float) -> Series:
        """The last 'day' (1,440 minutes), 'week' (672 quarter hours), 'month' (2,976) or 'year' (8,784 hours) of a
        server, or with "" and 0 of a game. Of minutes the peak is the mean. Raises KeyError for another span."""
        step, length = SPANS[span]
        end = self._end(step, wall)
        start = end - length
        covers = BLOCKS[step][0]
        first = start // covers * covers

        def work(db: sqlite3.Connection) -> List[int]:
            [(server,)] = db.execute("SELECT " + SERVER_ID, (game, address, port))
            data = b"".join(self._block(db, step, block, server) for block in range(first, end, covers))
            return list(struct.unpack("<%dH" % (len(data) // 2), data))
        values = [value - 1 if value else None for value in self._run(work, "BEGIN")]
        width = WIDTHS[step] // 2
        values = values[(start - first) // step * width:(end - first) // step * width]
        return Series(start, step, values[::width], values[width - 1::width])

    def recent(self, wall: float) -> Dict[Key, List[Optional[int]]]:
        """The hourly means of the last 24 hours, for every server and game that has any."""
        end = self._end(HOUR, wall)
        start = end - SPARKLINE_HOURS * HOUR
        first = start // WEEK * WEEK

        def work(db: sqlite3.Connection) -> Dict[Key, List[Optional[int]]]:
            found: Dict[Key, List[Optional[int]]] = {}
            for game, address, port, block, samples in db.execute(
                    "SELECT game, address, port, start, samples FROM block JOIN server ON id = server"
                    " WHERE step = ? AND start IN (?, ?)", (HOUR, first, first + WEEK)):
                self._check(HOUR, samples)
                lower, upper = max(start, block), min(end, block + WEEK)
                if lower < upper and any(samples[(lower - block) // HOUR * 4:(upper - block) // HOUR * 4]):
                    means = found.setdefault((game, address, port), [None] * SPARKLINE_HOURS)
                    for hour in range(lower, upper, HOUR):
                        value, = struct.unpack_from("<H", samples, (hour - block) // HOUR * 4)
                        means[(hour - start) // HOUR] = value - 1 if value else None
            return found
        return self._run(work, "BEGIN")

    @staticmethod
    def _end(step: int, wall: float) -> int:
        """Where a series ends, so that it never closes with a gap which the next sample fills. The running minute may
        not be sampled yet; the others are rolled up by the first sample of the next quarter hour, within a minute."""
        late = MINUTE if step == MINUTE else QUARTER + MINUTE
        return (int(wall) - late) // step * step + step

    def _check(self, step: int, samples: Any) -> bytes:
        if not isinstance(samples, bytes) or len(samples) != BLOCKS[step][0] // step * WIDTHS[step]:
            raise sqlite3.DatabaseError("a block of history has the wrong size")
        return samples

    def _block(self, db: sqlite3.Connection, step: int, start: int, server: Optional[int]) -> bytes:
        rows = db.execute("SELECT samples FROM block WHERE step = ? AND start = ? AND server = ?",
                          (step, start, server)).fetchall()
        return self._check(step, rows[0][0]) if rows else bytes(BLOCKS[step][0] // step * WIDTHS[step])

    def _put(self, db: sqlite3.Connection, step: int, at: int, server: int, new: bytes) -> None:
        """Write the samples from the time `at` on, all of them in one block."""
        start = at // BLOCKS[step][0] * BLOCKS[step][0]
        samples = self._block(db, step, start, server)
        offset = (at - start) // step * WIDTHS[step]
        db.execute("INSERT OR REPLACE INTO block VALUES (?, ?, ?, ?)",
                   (step, start, server, samples[:offset] + new + samples[offset + len(new):]))

    def _roll_up(self, db: sqlite3.Connection, hour: int) -> None:
        """Make the quarter hours and the hour out of the minutes so far; doing it again changes nothing."""
        for server, samples in db.execute("SELECT server, samples FROM block WHERE step = ? AND start = ?",
                                          (MINUTE, hour)).fetchall():
            minutes = struct.unpack("<60H", self._check(MINUTE, samples))
            self._put(db, QUARTER, hour, server, b"".join(roll_up(minutes[at:at + 15]) for at in range(0, 60, 15)))
            self._put(db, HOUR, hour, server, roll_up(minutes))

    def _thin(self, db: sqlite3.Connection, wall: float) -> None:
        for step, (covers, kept) in BLOCKS.items():
            # An hour more, as a series ends up to 16 minutes ago. At most the two oldest at a time, while one is added: an hour with the
            # clock ahead does not cost a month, and what a leap of the clock left behind still goes.
            db.execute("DELETE FROM block WHERE step = ? AND start < ? AND start <= (SELECT min(start) FROM block WHERE step = ?) + ?",
                       (step, wall - kept - covers - HOUR, step, covers))
        # Servers whose last block is gone too; last_seen alone may be of a clock that stood at 1970 after a power cut. The totals stay, one
        # row per game. Blocks are looked up by where they may begin: their key is step, start, server, and without start the whole year
        # would be read.
        weeks = ",".join(map(str, range(int(wall) // WEEK * WEEK, int(wall) - YEAR - 2 * WEEK, -WEEK)))
        db.execute("DELETE FROM server WHERE last_seen < (SELECT min(start) FROM block WHERE step = ?) AND address != ''"
                   " AND id NOT IN (SELECT server FROM listed)"
                   " AND NOT EXISTS (SELECT 1 FROM block WHERE step = ? AND start IN (" + weeks + ") AND server = id)", (HOUR, HOUR))

    # -- the file

    @staticmethod
    def _listed(db: sqlite3.Connection, wall: float) -> List[ListedRow]:
        return typed(db.execute(
            "SELECT game, address, port, expires, first_seen, listed.last_seen, fields FROM listed JOIN server"
            " ON id = server WHERE expires > ? ORDER BY server", (wall,)), str, str, int, float, float, float, str)

    @staticmethod
    def _leave(db: sqlite3.Connection, which: str, values: Sequence[Any]) -> None:
        db.execute("UPDATE server SET last_seen = (SELECT last_seen FROM listed WHERE server = id)"
                   " WHERE id IN (SELECT server FROM listed WHERE " + which + ")", values)
        db.execute("DELETE FROM listed WHERE " + which, values)

    @staticmethod
    def _forget(db: sqlite3.Connection) -> None:
        """When there are too many, drop those gone that were here for the shortest time, with their history, so that nobody who lists one
        server after another displaces others' history or fills the disk: 5 % at once, as finding them means sorting all."""
        [(count,)] = db.execute("SELECT count(*) FROM server")
        [(here,)] = db.execute("SELECT count(*) FROM listed") if count > KNOWN_SERVERS else [(0,)]
        most = max(KNOWN_SERVERS, here + here // 5)
        if count > most:
            gone = db.execute("DELETE FROM server WHERE id IN (SELECT id FROM server WHERE address != ''"
                              " AND id NOT IN (SELECT server FROM listed) ORDER BY last_seen - first_seen, last_seen LIMIT ?)",
                              (count - most + most // 20,)).rowcount
            if gone > most // 20:          # where fewer went, nearly all are listed: the blocks age away
                db.execute("DELETE FROM block WHERE server NOT IN (SELECT id FROM server)")

    def _run(self, work: Callable[[sqlite3.Connection], Any], begin: str = "BEGIN IMMEDIATE") -> Any:
        """Do `work` in a transaction; if the file turns out to be damaged, once more in a new one."""
        try:
            for _ in range(2):          # SQLite also calls it damage when the disk failed to read a page, which it may read now
                try:
                    return self._attempt(work, begin)
                except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                    if not is_damage(error):
                        raise
            self._move_aside()          # without the error, which keeps its cursors and so the file open: Windows renames no such file
            return self._attempt(work, begin)
        except (sqlite3.Error, OSError) as error:
            self.trouble = str(error)
            if isinstance(error, OSError):
                raise sqlite3.OperationalError(str(error)) from error
            raise

    def _attempt(self, work: Callable[[sqlite3.Connection], Any], begin: str) -> Any:
        try:
            db = self._connection()
            db.execute(begin)
            result = work(db)
            db.execute("COMMIT")
        except BaseException:
            # Closing rolls back, and a file that was read-only or broken at first is looked at afresh next time.
            self.close()
            raise
        if begin == "BEGIN IMMEDIATE":  # reading from a full disk succeeds, and is no sign of its end
            self.trouble = ""
        return result

    def _connection(self) -> sqlite3.Connection:
        # SQLite goes on writing to a file that was deleted or replaced under it, without a word, and leaves a log that
        # would ruin the next one.
        if self._db is not None and self._identity() != self._file:
            self.close()
            self._file = None
            for suffix in ("-wal", "-shm"):
                if os.path.lexists(self.path + suffix):
                    os.remove(self.path + suffix)
        if self._db is None:
            self._db = self._connect()
            self._prepare(self._db)
            if self._identity() != self._file:
                self._file = self._identity()
                self.renewed += 1
        return self._db

    def _identity(self) -> Optional[Tuple[int, int]]:
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=STORAGE_BUSY_S, isolation_level=None, check_same_thread=False)

    def _prepare(self, db: sqlite3.Connection) -> None:
        tables = {sql for sql, in db.execute("SELECT sql FROM sqlite_master")}
        [(version,)] = db.execute("PRAGMA user_version")
        if not tables and not version:
            db.execute("BEGIN IMMEDIATE")
            for statement in SCHEMA:
                db.execute(statement)
            db.execute("PRAGMA user_version = %d" % SCHEMA_VERSION)
            db.execute("COMMIT")
            self._file = None
        elif ((SCHEMA_VERSION < version < SCHEMA_LATER or tables.isdisjoint(SCHEMA))
                and db.execute("PRAGMA quick_check").fetchall() == [("ok",)]):
            raise sqlite3.OperationalError("it belongs to another program or to a later version of this one; change [server] database")
        elif version not in (0, SCHEMA_VERSION) or not tables.issuperset(SCHEMA):           # 0: restored from a .dump, which does not tell
            raise sqlite3.DatabaseError("the tables are not those of this program")
        with contextlib.suppress(sqlite3.OperationalError):     # file systems without shared memory: SQLite's default is slower and as safe
            # With the log and NORMAL a commit is a write without fsync: it outlives the process, and a power cut costs
            # the last seconds and never the file.
            db.execute("PRAGMA journal_mode = WAL").fetchall()
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA journal_size_limit = %d" % WAL_BYTES).fetchall()
        # Not one that a clock running ahead has left
        [(newest,)] = db.execute("SELECT max(start) FROM block WHERE step = ? AND start <= ?", (MINUTE, self._wall))
        self._sampled = newest or 0

    def _move_aside(self) -> None:
        stamp = datetime.fromtimestamp(self._wall, timezone.utc).strftime("%Y%m%d-%H%M%S")
        name = free = "%s.damaged-%s" % (self.path, stamp)
        number = 1
        while os.path.lexists(free):
            number += 1
            free = "%s-%d" % (name, number)
        # The file itself last: were we stopped on the way, a log must not be left for the new file to read.
        for suffix in ("-wal", "-shm", "-journal", ""):
            if os.path.lexists(self.path + suffix):
                os.replace(self.path + suffix, free + suffix)
        self.set_aside = free
        log.warning("the database was damaged; it has been renamed to %s, and a new one begun", free)
        self._file = None


# =====================================================================================================================
# 7  Protocols
#
# Each game is one class (or two) with its real bytes in the docstring. A protocol gets bytes, the peer and the time and
# gives bytes back; it keeps what it knows in the registry, and raises Malformed for anything that its document does not have.
# "The document" is the game's own, by the title that stands at the class. What it leaves open is done as programs in use
# were seen to do it.
# =====================================================================================================================

class UdpProtocol:
    """One UDP port. `replies` are [(datagram, peer), …]."""

    ipv4_only = True                # its lists carry 4-byte addresses
    datagram_bytes = MAX_DATAGRAM_BYTES     # of a longer one the rest is lost
    by_socket = False               # True: one per socket, as what it sends later must leave from the socket that the peer first wrote to

    def repeated(self, data: Sequence[bytes], peers: Sequence[Peer], now: float) -> Sequence[Optional[bytes]]:
        """For each datagram its answer if a listed server only repeats itself; None: datagram() is to read it. Repetitions are treated as
        if they had come before the others, as datagrams may."""
        return [None] * len(data)

    def datagram(self, data: bytes, peer: Peer, now: float) -> Replies:
        raise NotImplementedError

    def tick(self, now: float) -> Replies:
        """Once a second: polls, retries, expiry of what the protocol itself remembers."""
        return []

    def read(self, settings: Settings) -> None:
        """The settings, at start and after a reload."""


class Session:
    """One TCP connection. What a method returns is written, each return in one piece."""

    done = False                    # True: write what is out, then close gracefully
    kept = False                    # True: a connection worth keeping when room must be made (a publishing server)
    held = False                    # True: input waits for its turn, so that one peer does not keep the loop from the others
    wake_at: Optional[float] = None         # set by any method: tick() is called at this time as well
    job: Optional[Callable[[], Any]] = None         # work for a thread; its result comes to resume()
    worker = "lists"                # the thread that has it: "disk" if it reads the database, "searches" if it is for this peer alone

    def opened(self, now: float) -> bytes:
        return b""

    def receive(self, data: bytes, now: float) -> bytes:
        """Any split of the input gives the same result. Called with b"" when all output is written, for what was held back."""
        return b""

    def ended(self, now: float) -> bytes:
        """The peer sends no more, and may still read."""
        return b""

    def resume(self, result: Any, now: float) -> bytes:
        """The result of `job`, or the exception that it raised."""
        return b""

    def tick(self, now: float) -> bytes:
        """Once a second while no output waits: greetings after silence, timeouts."""
        return b""

    def dismissed(self, now: float) -> bytes:
        """The last words of a connection over a limit that is closed to make room."""
        return b""

    def closed(self, now: float) -> None:
        """The connection has ended, whoever ended it."""


class TcpProtocol:
    """One TCP port: makes a session for each connection."""

    ipv4_only = False
    speaks_first = True             # False: the client does; opened() is not called, its first bytes are read at once

    def session(self, address: str, now: float) -> Session:
        raise NotImplementedError

    def refusal(self, address: str, now: float) -> Session:
        """For a connection over a limit: it ends at once, or says why if the protocol has words for that."""
        session = Session()
        session.done = True
        return session

    def tick(self, now: float) -> None:
        """Once a second."""

    def read(self, settings: Settings) -> None:
        """As in UdpProtocol."""

    def leave(self) -> None:
        """The program is about to stop: no answer may invite another request."""


# --- Poller ----------------------------------------------------------------------------------------------------------

POLL_ANSWER_BYTES = 16384           # AIO's descriptions have no limit in the protocol; what is shown of them is cut
POLL_TIMEOUT_S = 3.0                # the Hyperbol document's script waits so long
POLL_ATTEMPTS = 2                   # a lost datagram is not a missed poll
POLL_MISSED = 3                     # polls without an answer after which a server is gone: a minute and a half
POLL_SHARE = 10                     # at most a tenth of all targets is queried in one second, more only if the interval requires it: no volleys
POLL_QUESTIONS = 3                  # what one target may need in one interval: a silent zone is queried three times
POLL_MIN_PER_S = 10                 # but always this many, so that a few new servers do not wait for each other
POLL_CROWD = 256                    # however few servers may be listed, this many are queried: one liar alone may have servers_per_source of them
POLL_PHASE = 0.6180339887           # multiples of the golden ratio, modulo 1, lie evenly however many there are


class Target:
    """One game server to be queried. `step` and `scratch` belong to its querier."""

    __slots__ = ("querier", "key", "address", "port", "server_port", "known", "announced", "phase", "asked_at", "nonce",
                 "attempt", "step", "missed", "ping_ms", "wrong", "scratch")

    def __init__(self, querier: Querier, address: str, server_port: int, phase: float) -> None:
        self.querier, self.address, self.port, self.server_port = querier, address, server_port + querier.offset, server_port
        self.key: Key = querier.game, address, server_port
        self.phase = phase                              # its place in the interval, from 0 to 1
        self.known = False                              # named in the ini: polled however long it is silent
        self.announced: Optional[bool] = False          # it announced itself; None: perhaps, before a restart
        self.asked_at = 0.0
        self.nonce = 0
        self.attempt = self.step = self.missed = 0
        self.ping_ms = 0.0                              # round trip of the answer at hand
        self.wrong = ""                                 # why what came in this poll is no answer; "": nothing did, or it was one
        self.scratch: Any = None


class Querier:
    """A protocol whose game servers answer queries. The poller sends them; the querier knows the bytes."""

    registry: Registry
    game = ""                       # as in the registry
    offset = 0                      # from a server's port to the one that answers queries
    attempts = POLL_ATTEMPTS

    def announced(self, source: str, port: int, fields: Mapping[str, Any], now: float) -> None:
        """An announcement by HTTP, with fields for the registry; raises Refused."""
        raise NotImplementedError

    def nonce(self) -> int:
        """What a query carries and its answer must: an unsigned 32-bit integer."""
        return CHANCE.getrandbits(32)

    def query(self, target: Target) -> bytes:
        raise NotImplementedError

    def answer(self, target: Target, data: bytes, now: float) -> bool:
        """Take an answer. True: the poll is complete. False: ask again at once (`target.step` says what), a few times at most: one server
        that is queried for ever uses up poll.rate.

        Raises Malformed if it is none, or not to this query (`target.nonce`). Where the last query may go unanswered, missed() is called
        for it, and sets `target.missed` back."""
        raise NotImplementedError

    def missed(self, target: Target, now: float) -> bool:
        """A poll went unanswered, the `target.missed`th in a row. True: stop querying it."""
        raise NotImplementedError

    def unanswered(self, target: Target, now: float, why: str) -> None:
        """For /check: nothing came, which is `why`, or something that is no answer."""
        outcome, why = ("bad packet", "its answer from UDP port %d: %s" % (target.port, target.wrong)) if target.wrong else ("silent", why)
        self.registry.note(target.address, self.game, target.server_port, outcome, now, why)

    def removed(self, target: Target) -> None:
        """It is no longer queried, for whatever reason."""

    def named(self, address: str, port: int) -> None:
        """The ini now leads to this place, or no longer does."""


class Poller(UdpProtocol):
    """Queries game servers for what they really are, through one UDP port, evenly over the interval.

    An answer counts only from the address and port that were queried, while a query is open there. Servers of two games may be believed to
    be at one endpoint, and each is queried in its own way. Nobody is queried whom neither the ini nor a packet from that address named; the
    protocols see to that, as they alone call `add`.
    """

    ipv4_only = False
    datagram_bytes = POLL_ANSWER_BYTES

    def __init__(self, settings: Settings, rules: Rules) -> None:
        self.rules = rules
        self.queriers: Dict[str, Querier] = {}          # whoever has added a target, by game
        self.targets: Dict[Key, Target] = {}            # by game, source and the server's own port
        self.sources: collections.Counter[Tuple[str, str]] = collections.Counter()      # targets by game and source; "" for all sources
        self.fresh: collections.deque[Target] = collections.deque()     # new, or put off in the midst of a poll
        self.open: collections.OrderedDict[Target, None] = collections.OrderedDict()        # asked, by time
        self.waiting: List[Tuple[float, int, Target]] = []              # a heap by the time at which each is due
        self.phases = itertools.count()
        self.numbers = itertools.count()        # of the entries in the heap, to keep equals in order
        self.asked = 0              # queries since the last tick …
        self.ticked_at = 0.0        # … and when that was
        self.interval = math.inf
        self.read(settings)

    def read(self, settings: Settings) -> None:
        before, self.interval = self.interval, settings["poll.interval"]
        if self.interval < before:          # holds at once
            self.waiting = [(min(due, self.ticked_at + target.phase * self.interval), number, target) for due, number, target in self.waiting]
            heapq.heapify(self.waiting)
        self.rate: int = settings["poll.rate"]

    def crowded(self, game: str, address: str, times: int = 1) -> bool:
        """Would one more that announces itself from here be too many? Silent ones count too, or a liar could have thousands queried; those
        of other games do not, as their address may have been forged. `times`: how many times what the settings allow is too many."""
        return self.sources[game, ""] >= times * max(self.rules.servers, POLL_CROWD) or (
            any(self.sources[game, key] >= times * most for key, most in zip(source_keys(address), self.rules.allowances))
            and not self.rules.exempts(address))

    def add(self, querier: Querier, address: str, server_port: int, known: bool = False) -> Target:
        """Poll this game server from now on; `known`: the ini names it."""
        target = self.find(querier, address, server_port)
        if target is None:
            target = Target(querier, address, server_port, next(self.phases) * POLL_PHASE % 1.0)
            self.queriers[querier.game] = querier
            self.targets[target.key] = target
            self.sources.update(self.counted(target))
            if known:
                self.wait(target, 0.0)      # a long list in the ini takes its turn
            else:
                self.fresh.append(target)
        if known:
            target.known = True
        else:
            target.announced = True
        return target

    def remove(self, target: Optional[Target]) -> None:
        """None, and one that is removed already, change nothing."""
        if target is None or not self.asks(target):
            return
        del self.targets[target.key]
        self.open.pop(target, None)
        for key in self.counted(target):
            uncount(self.sources, key)
        target.querier.removed(target)

    def counted(self, target: Target) -> List[Tuple[str, str]]:
        return [(target.querier.game, key) for key in ("", *source_keys(target.address))]

    def find(self, querier: Querier, address: str, server_port: int) -> Optional[Target]:
        """The target behind a game server's own port."""
        return self.targets.get((querier.game, address, server_port))

    def datagram(self, data: bytes, peer: Peer, now: float) -> Replies:
        wrong = "an answer that nobody asked for"
        for querier in self.queriers.values():
            target = self.find(querier, canonical(peer[0]), peer[1] - querier.offset)
            if target is None or target not in self.open:
                continue
            target.ping_ms = (now - target.asked_at) * 1000
            try:
                complete = querier.answer(target, data, now)
            except Malformed as error:              # perhaps it is the answer to another game's query
                wrong = target.wrong = str(error)
                continue
            if complete:
                target.missed = 0
                self.rest(target, now)
            elif self.asked < self.rate:
                return self.ask(target, now)
            else:                           # no more queries in this second: it waits for another
                self.open.pop(target, None)
                self.fresh.append(target)
            return []
        raise Malformed(wrong)

    def tick(self, now: float) -> Replies:
        """A quarter of the queries for new targets and another for silent ones, then those that are due, then what is left: a flood of new
        ones that are silent keeps nobody from being queried."""
        out: Replies = []
        self.asked, self.ticked_at = 0, now
        budget = min(self.rate, max(POLL_MIN_PER_S, len(self.targets) // POLL_SHARE, math.ceil(POLL_QUESTIONS * len(self.targets) / self.interval)))
        for step, share in ((self.next_fresh, 1 / 4), (self.next_silent, 1 / 2), (self.next_due, 1), (self.next_fresh, 1), (self.next_silent, 1)):
            while self.asked < share * budget:
                questions = step(now)
                if questions is None:
                    break
                out += questions
        return out

    def next_fresh(self, now: float) -> Optional[Replies]:
        """The first query to the target that has waited longest; None: there is none."""
        return self.ask(self.fresh.popleft(), now) if self.fresh else None

    def next_due(self, now: float) -> Optional[Replies]:
        return self.ask(heapq.heappop(self.waiting)[2], now) if self.waiting and self.waiting[0][0] <= now else None

    def next_silent(self, now: float) -> Optional[Replies]:
        """The next attempt at a target that has not answered, or the end of its poll."""
        target = next(iter(self.open), None)
        if target is None or now - target.asked_at < POLL_TIMEOUT_S:
            return None
        target.attempt += 1
        if target.attempt < target.querier.attempts:
            return self.ask(target, now)
        target.missed += 1
        self.open.pop(target, None)
        if target.querier.missed(target, now):
            self.remove(target)
        else:
            self.rest(target, now)
        return []

    def ask(self, target: Target, now: float) -> Replies:
        if not self.asks(target):           # removed while it waited
            return []
        self.asked += 1
        target.nonce = target.querier.nonce()
        target.asked_at = now
        self.open[target] = None
        self.open.move_to_end(target)
        return [(target.querier.query(target), (target.address, target.port))]

    def rest(self, target: Target, now: float) -> None:
        """The poll is over; the next one comes at the target's place in the interval, whenever this one came."""
        self.open.pop(target, None)
        target.attempt, target.step, target.wrong = 0, 0, ""
        self.wait(target, now + ((target.phase * self.interval - now) % self.interval or self.interval))

    def wait(self, target: Target, due: float) -> None:
        heapq.heappush(self.waiting, (due, next(self.numbers), target))
        if len(self.waiting) > 2 * len(self.targets) + 100:         # most are of removed targets: swept together, and not each time for a few
            self.waiting = [entry for entry in self.waiting if self.asks(entry[2])]
            heapq.heapify(self.waiting)

    def asks(self, target: Target) -> bool:
        return self.targets.get(target.key) is target


class Core(NamedTuple):
    """What every protocol is handed."""

    settings: Settings
    registry: Registry
    poller: Poller
    resolve: Callable[[str, Callable[[str, float], None]], None]        # (host, done): done(address or "", now) follows later
    announcers: Dict[str, Querier]          # by game, who takes an announcement that came by HTTP
    storage: Optional[Storage] = None       # only for jobs in the worker
    tallies: Mapping[str, Tally] = {}       # by protocol
    health: Mapping[str, str] = {}          # what is wrong, by where; empty while all is well
    listeners: Sequence[Any] = ()           # with .protocol and .port
    gauges: Mapping[str, float] = {}        # what the event loop measures of itself, for /metrics
    recent: Callable[[], Mapping[Key, Sequence[Optional[int]]]] = dict         # the last day's hourly player counts


RESOLVE_S = 600.0                   # host names in the ini are looked up anew: dynamic addresses change daily
RESOLVE_RETRY_S = 60.0              # sooner where one was not found: the network may have come up after us


class Known:
    """The game servers that the ini names, kept among the poller's targets wherever their host names lead."""

    def __init__(self, core: Core, querier: Querier) -> None:
        self.core, self.querier = core, querier
        self.targets: Dict[Tuple[str, int], Optional[Target]] = {}      # by host and port as the ini has them
        self.places: Dict[Tuple[str, int], Tuple[str, int]] = {}        # the way back, by address and port as listed
        self.unresolved: Set[str] = set()
        self.pending: Set[Tuple[str, int]] = set()      # looked up just now: a slow name server does not get them twice
        self.due = -math.inf
        self.patient_until = math.inf               # from then on a name that leads nowhere keeps nobody in the list
        core.registry.watch(self.watch, querier.game, ["listed", "gone"])

    def watch(self, event: str, server: Server) -> None:
        """Every listed server is queried, named by the ini or not."""
        if event == "gone":
            self.drop(server.source, server.port)
        elif self.core.poller.find(self.querier, server.source, server.port) is None:           # restored from disk
            self.core.poller.add(self.querier, server.source, server.port).announced = None

    def drop(self, source: str, port: int) -> None:
        """Stop querying this server, unless the ini names it."""
        target = self.core.poller.find(self.querier, source, port)
        if target is not None and not target.known:
            self.core.poller.remove(target)

    def read(self, places: Iterable[Tuple[str, int]]) -> None:
        before = self.targets
        self.targets = {place: before.get(place) for place in places}
        for place, target in before.items():
            if target is not None and place not in self.targets:
                self.release(target)
        self.places = {self.identity(target): place for place, target in self.targets.items() if target is not None}    # as mapped now
        self.unresolved &= {host for host, _ in self.targets}
        self.due = -math.inf

    def tick(self, now: float) -> None:
        if now < self.due:
            return
        self.due = now + RESOLVE_S
        self.patient_until = min(self.patient_until, now + RESOLVE_S)
        for host, port in self.targets:
            if is_unicast(host):
                self.take(host, port, canonical(host), now)
            elif (host, port) not in self.pending:
                self.pending.add((host, port))
                self.core.resolve(host, functools.partial(self.found, host, port))
        self.settle(now)

    def found(self, host: str, port: int, address: str, now: float) -> None:
        self.pending.discard((host, port))
        if (host, port) in self.targets:
            self.take(host, port, address, now)
        self.settle(now)

    def take(self, host: str, port: int, address: str, now: float) -> None:
        if not is_unicast(address):
            self.due = min(self.due, now + RESOLVE_RETRY_S)
            if host not in self.unresolved:
                log.warning("%s: the host name %s in the ini has no address; it will be looked up again",
                            self.querier.game, ascii(host))
                self.unresolved.add(host)
            return
        self.unresolved.discard(host)
        before = self.targets[host, port]
        target = self.core.poller.add(self.querier, address, port, known=True)
        self.targets[host, port] = target
        if before is not None and before is not target:
            self.release(before)
        self.places[self.identity(target)] = host, port
        self.querier.named(*self.identity(target))

    def settle(self, now: float) -> None:
        """Servers listed only because the ini named them go when it no longer does, as after a restart with another one."""
        if not self.pending and (not self.unresolved or now >= self.patient_until):
            registry = self.core.registry
            for place, server in list(registry.games[self.querier.game].items()):
                if server.named and place not in self.places:
                    self.unname(server)

    def identity(self, target: Target) -> Tuple[str, int]:
        return self.core.registry.rules.listed_address(target.address), target.server_port

    def release(self, target: Target) -> None:
        """The ini does not lead here any more: it stays only if it announced itself."""
        if target in self.targets.values():
            return
        target.known = False
        self.places.pop(self.identity(target), None)
        server = self.core.registry.get(self.querier.game, *self.identity(target))
        if server is not None:
            self.unname(server)
        if not target.announced:
            self.core.poller.remove(target)

    def unname(self, server: Server) -> None:
        target = self.core.poller.find(self.querier, server.source, server.port)          # where its packets come from
        if target is not None and (target.announced or target.announced is None and server.responding and not server.lasting):
            target.announced = True         # it has its lifetime, or the time that it was restored with, to say so again
            self.core.registry.update(server, {"named": False})
            if not server.unconfirmed:
                self.core.registry.schedule(server)
            self.querier.named(server.address, server.port)
        else:
            self.core.registry.remove(server)


# --- Iceball ---------------------------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=256)               # a few versions are in use, and all servers of one share the text
def iceball_version_text(number: int) -> str:
    """8421413 -> "0.2.1-37": the way back from read_iceball_version. The 31st letter would be a control character."""
    w, x, y, a, z = number >> 27, number >> 22 & 31, number >> 15 & 127, number >> 10 & 31, number & 1023
    return "%d.%d%s%s%s" % (w, x, ".%d" % y if y else "", chr(96 + a) if 0 < a < 31 else "", "-%d" % z if z else "")


@functools.lru_cache(maxsize=4096)              # modes and maps are few
def iceball_text(field: bytes) -> str:
    return decode_utf8(c_string(field))


ICEBALL_HBVERSION = 2
ICEBALL_HBVERSION_BYTES = b"\2\0"
ICEBALL_ANNOUNCEMENT = struct.Struct("<4sHIHHH30s10s30s")
ICEBALL_ANNOUNCEMENT_BYTES = ICEBALL_ANNOUNCEMENT.size             # 86
ICEBALL_PACKED_BYTES = ICEBALL_ANNOUNCEMENT_BYTES - len(b"MSOK") - COOKIE_MAC_BYTES
ICEBALL_BUILD = 1023                # the bits of a version that count builds; without them it stands for all
ICEBALL_REPROACHES = 1 / 8, 5       # BADV or BADF by source: one an announcement, and never to a flood


# Identifies a datagram and its source. With 64 bits two of a million are alike once in 40 million times; with 32 it has to be the whole
fingerprint: Callable[[Tuple[bytes, str]], Any] = hash if sys.hash_info.width >= 64 else tuple


class Iceball(UdpProtocol):
    """Iceball's heartbeat protocol, current form (hbversion 2); document: "Heartbeat server protocol".

        > 31434542 0200 25808000 e954 0000 4000     "1CEB" hbversion ibversion port players maximum
          4963656261 6c6c20536572766572 00…         name[30] mode[10] map[30]: NUL-terminated unless full; 86 bytes in all
        < 4d534f4b cookie[]                         "MSOK"
        > 4853484b cookie[]                         "HSHK": the address is real, the server is listed
        < 42414456 0200 25808000                    "BADV": the versions that this master expects
        < 42414446                                  "BADF": the length is wrong

    The cookie is all the memory there is of an unlisted server: a MAC over its address and announcement, and the announcement itself
    without its padding. The address is the datagram's source, the port stands in the packet. The same UDP port serves the
    first draft, told by the first byte.
    """

    game = "iceball"

    def __init__(self, core: Core) -> None:
        self.registry = core.registry
        self.cookie = Cookie(os.urandom(16))
        self.draft = IceballDraft(core)
        self.timeout: float = core.settings["iceball.timeout"]
        # Those that have announced themselves since they were listed, by the fingerprint of the last datagram and its source
        self.known: Dict[Any, Server] = {}
        # A listed server's announcement need not be proven again, so its cookie can be the same for all
        self.thanks = b"MSOK" + os.urandom(4)
        self.reproaches = Limiter(ICEBALL_REPROACHES)
        self.registry.watch(lambda event, server: self.known.pop(server.packet, None), "iceball", ["gone"])
        self.read(core.settings)

    def read(self, settings: Settings) -> None:
        self.version: int = settings["iceball.version"]
        self.accepted: Tuple[int, ...] = settings["iceball.accept_versions"]
        self.known.clear()                          # each is checked once against the new settings
        self.draft.guesses.set_rate(DRAFT_GUESSES)          # who was exempt may no longer be

    def repeated(self, data: Sequence[bytes], peers: Sequence[Peer], now: float) -> Sequence[Optional[bytes]]:
        # Among 100,000 servers each look-up waits for memory three times. Done one right after the other, those of a batch wait together,
        # and an announcement costs 1.10 to 1.12 times that among 100 servers instead of 1.11 to 1.14: the bar is 1.15
        fingerprints = list(map(fingerprint, zip(data, [peer[0] for peer in peers])))
        servers = list(map(self.known.get, fingerprints))
        for server in servers:
            if server is not None:
                server.last_seen = now
        return [None if server is None else self.thanks for server in servers]

    def datagram(self, data: bytes, peer: Peer, now: float) -> Replies:
        head = data[:4]
        if head == b"1CEB":
            return self.announcement(data, peer, now)
        if head == b"HSHK":
            return self.handshake(data, peer, now)
        if b"\1" <= head[:1] <= b"\7":
            try:
                return self.draft.datagram(data, peer, now)
            except Malformed as wrong:
                raise self.unreadable(str(wrong), peer, now) from None
        raise self.unreadable("neither 1CEB nor HSHK nor a packet of the first draft", peer, now)

    def unreadable(self, why: str, peer: Peer, now: float) -> Malformed:
        self.registry.note(peer[0], "iceball", 0, "bad packet", now, why)
        return Malformed(why)

    def announcement(self, data: bytes, peer: Peer, now: float) -> Replies:
        if len(data) != ICEBALL_ANNOUNCEMENT_BYTES or data[4:6] != ICEBALL_HBVERSION_BYTES or self.accepted:
            wrong = self.wrong(data, peer, now)
            if wrong is not None:
                return wrong
        source = peer[0]
        port = data[10] | data[11] << 8
        server = self.registry.games[self.game].get((self.registry.rules.listed_address(source), port))
        if server is not None and server.source == source:
            self.list_server(source, data, now)
            return [(self.thanks, peer)]
        self.registry.note(source, "iceball", port, "announced", now)
        packed = iceball_pack(data)
        if len(packed) > ICEBALL_PACKED_BYTES and not self.registry.rules.allow_surplus("cookie", source, len(packed) - ICEBALL_PACKED_BYTES, now):
            packed = iceball_pack(data, whole=False)
        return [(b"MSOK" + self.cookie.make(source.encode() + packed, now) + packed, peer)]

    def wrong(self, data: bytes, peer: Peer, now: float) -> Optional[Replies]:
        """The answer to an announcement that cannot be listed; None: it can. The versions are checked first, as another version may have
        another length."""
        if len(data) < 10:
            raise self.unreadable("an announcement too short for its versions", peer, now)
        hbversion, version = struct.unpack_from("<HI", data, 4)
        outcome, packet = "version", b"BADV" + struct.pack("<HI", ICEBALL_HBVERSION, self.version)
        if hbversion != ICEBALL_HBVERSION:
            why = "heartbeat version %d, only %d" % (hbversion, ICEBALL_HBVERSION)
        elif self.accepted and version not in self.accepted and version & ~ICEBALL_BUILD not in self.accepted:
            why = "Iceball version %s, only %s" % (iceball_version_text(version), ", ".join(map(iceball_version_text, self.accepted)))
        elif len(data) != ICEBALL_ANNOUNCEMENT_BYTES:
            outcome, packet = "bad packet", b"BADF"
            why = "length: %d bytes instead of %d" % (len(data), ICEBALL_ANNOUNCEMENT_BYTES)
        else:
            return None
        self.registry.note(peer[0], "iceball", 0, outcome, now, why)
        # Its receiver stops announcing to every master, so a source that has a listed server does not get one (the packet may be
        # forged to silence it), and no source gets many, even one exempt from limits; loopback is not forged
        if not is_loopback(peer[0]) and (source_key(peer[0]) in self.registry.sources or not self.reproaches.allow(peer[0], now)):
            raise Malformed(why)
        return [(packet, peer)]

    def handshake(self, data: bytes, peer: Peer, now: float) -> Replies:
        if len(data) <= len(self.thanks):           # of a server that is listed already
            return []
        mac, packed = data[4:4 + COOKIE_MAC_BYTES], data[4 + COOKIE_MAC_BYTES:]
        if not self.cookie.good(mac, peer[0].encode() + packed, now):
            raise self.unreadable("a cookie that went to another address, or is older than %d s" % COOKIE_WINDOW_S, peer, now)
        self.list_server(peer[0], iceball_unpack(packed), now, shaken=True)
        return []

    def list_server(self, source: str, packet: bytes, now: float, shaken: bool = False) -> None:
        """`packet`: an announcement whose source is proven; `shaken`: by a handshake just now, which may be late or come twice."""
        _, _, number, port, players, max_players, name_field, mode, map = ICEBALL_ANNOUNCEMENT.unpack(packet)
        name, mode, map, version = decode_utf8(c_string(name_field)), iceball_text(mode), iceball_text(map), iceball_version_text(number)
        if players > max_players:
            players = max_players
        registry = self.registry
        address = registry.rules.listed_address(source)
        server = registry.games[self.game].get((address, port))
        try:
            if server is None:
                registry.admit("iceball", address, port, source, name)
                server = Server("iceball", address, port, source, now, self.timeout, name, mode, map, version, players, max_players, "handshake")
                registry.insert(server)
                registry.note(source, "iceball", port, "listed", now)
            elif shaken and server.packet and server.source == source:
                return                              # it has said more since
            else:
                self.known.pop(server.packet, None)
                registry.hear("iceball", address, port, source, now, self.timeout, {
                    "name": name, "mode": mode, "map": map, "version": version, "players": players,
                    "max_players": max_players, "verified": "handshake"})
        except Refused as refused:
            registry.note(source, "iceball", port, refused.outcome, now, str(refused))
            return
        if shaken:
            server.packet = b""                     # until it announces itself
        else:
            server.packet = fingerprint((packet, source))
            self.known[server.packet] = server


def iceball_pack(announcement: bytes, whole: bool = True) -> bytes:
    """What a cookie carries of an announcement, usually in 74 bytes so that MSOK is no longer than the 86 bytes it answers: "=" and all
    after the heartbeat version without the NULs at the end; or, if that is too long, "-" and the texts without their padding.
    Texts that fill all 70 bytes of their fields are kept `whole` (MSOK has 93 bytes then); of those that
    nearly do, the end of the map is lost until the next announcement, a second later."""
    packed = announcement[6:].rstrip(b"\0")
    if len(packed) < ICEBALL_PACKED_BYTES or whole and len(packed) == 80 and b"\0" not in packed[10:]:
        return b"=" + packed
    name, mode, map = (field if b"\0" not in field else c_string(field) + b"\0"
                       for field in (announcement[16:46], announcement[46:56], announcement[56:]))
    return b"-" + (announcement[6:16] + name + mode + c_string(map))[:ICEBALL_PACKED_BYTES - 1]


def iceball_unpack(packed: bytes) -> bytes:
    """The announcement again, of bytes whose MAC was good."""
    form, body = packed[:1], packed[1:]
    if form == b"-":
        texts, rest = [], body[10:]
        for width in (30, 10):
            field, nul, _ = rest[:width].partition(b"\0")
            texts.append(field.ljust(width, b"\0"))
            rest = rest[len(field) + len(nul):]
        body = body[:10] + texts[0] + texts[1] + rest
    return b"1CEB" + ICEBALL_HBVERSION_BYTES + body.ljust(80, b"\0")


DRAFT_FIELDS = {(3, 1): "name", (3, 2): "mode", (4, 1): "players", (4, 2): "max_players"}        # by type and field number
DRAFT_HBVERSION = b"\1\0"
DRAFT_GUESSES = 1 / 10, 10          # wrong ids by source: half of an id is the port, so only 16 bits are secret …
DRAFT_GUESSES_IN_ALL = 10, 100      # … and of all sources, which may be forged: one guess an hour is right. Beyond it no session begins
DRAFT_CLAIMS = 256                  # the latest addresses named by servers on the local network
DRAFT_NO_SESSION = b"\6"


class IceballDraft:
    """Iceball's first heartbeat protocol (hbversion 1), from a draft of its document. Shares the UDP port with the current one.

        > 01 0100 0151 00                      request id: hbversion, port 20737, address ""
        < 02 id.u32 0151 "203.0.113.9\\0"       your id, port, address as this master sees it
        > 03 id.u32 01 "My server\\0"           text field: 1 name, 2 mode          < the same with the value as stored
        > 04 id.u32 01 05000000                number field: 1 players, 2 maximum   < the same with the value as stored
        > 05 id.u32                            still here
        < 06                                   no such session: request an id
        < 07 0100                              wrong hbversion

    The id is the announced port and 16 bits of a MAC, so that a request leaves nothing behind: the first packet that returns it from
    the same source opens the session and lists the server.
    """

    def __init__(self, core: Core) -> None:
        self.registry = core.registry
        self.cookie = Cookie(os.urandom(16), 2)
        self.timeout: float = core.settings["iceball.timeout"]          # the document: "after 120 seconds of inactivity"
        self.sessions: Dict[Peer, Tuple[bytes, Server]] = {}
        self.peers: Dict[Server, Peer] = {}
        self.claims: collections.OrderedDict[Peer, str] = collections.OrderedDict()
        self.guesses = Limiter(DRAFT_GUESSES, core.registry.rules.verdict)
        self.guesses_in_all = Limiter(DRAFT_GUESSES_IN_ALL)
        self.registry.watch(lambda event, server: self.forget(server), "iceball", ["gone"])

    def datagram(self, data: bytes, peer: Peer, now: float) -> Replies:
        kind = data[0]
        if kind == 1:
            return self.request(data, peer, now)
        if kind not in (3, 4, 5):
            raise Malformed("type %d is sent by masters only" % kind)
        if len(data) < 5:
            raise Malformed("too short for an id")
        server = self.session(data[1:5], peer, now)
        if server is None:
            if self.guessed_out(peer, now):         # not counted, or a server that goes on with the right id would never get in
                return []
            return [(DRAFT_NO_SESSION, peer)] if self.guesses.allow(peer[0], now) and self.guesses_in_all.allow("", now) else []
        if kind == 5:
            return []
        return self.set_field(data, server, peer)

    def request(self, data: bytes, peer: Peer, now: float) -> Replies:
        if len(data) < 3:
            raise Malformed("a request without a version")
        if data[1:3] != DRAFT_HBVERSION:
            self.registry.note(peer[0], "iceball", 0, "version", now, "heartbeat version %d in the form of version 1" % (data[1] | data[2] << 8))
            return [(b"\7" + DRAFT_HBVERSION, peer)]
        if len(data) < 6 or data[-1] or b"\0" in data[5:-1]:
            raise Malformed("address: expected one text with a NUL at its end")
        port = data[3] | data[4] << 8
        claim = data[5:-1].decode("ascii", "replace")
        rules = self.registry.rules
        self.registry.note(peer[0], "iceball", port, "announced", now)
        identity = self.cookie.make(endpoint(*peer[:2]).encode() + data[3:5], now) + data[3:5]
        answer = b"\2" + identity + data[3:5] + rules.listed_address(peer[0], claim).encode() + b"\0"
        if not rules.udp_requests.allow(peer[0], now) or not rules.allow_surplus("id", peer[0], len(answer) - len(data), now):
            return []
        self.claims.pop(peer, None)
        if rules.believes(peer[0], claim):
            keep_latest(self.claims, peer, claim, DRAFT_CLAIMS)
        return [(answer, peer)]

    def guessed_out(self, peer: Peer, now: float) -> bool:
        """So many ids were wrong that the next right one may be a guess."""
        return self.guesses.spent(peer[0], now) or self.guesses_in_all.spent("", now)

    def session(self, identity: bytes, peer: Peer, now: float) -> Optional[Server]:
        """The server behind this id, listed now if it is returned for the first time; None: there is none."""
        session = self.sessions.get(peer)
        if session is not None and session[0] == identity:
            self.registry.refresh(session[1], now)
            return session[1]
        if not self.cookie.good(identity[:2], endpoint(*peer[:2]).encode() + identity[2:], now) or self.guessed_out(peer, now):
            return None
        port = identity[2] | identity[3] << 8
        address = self.registry.rules.listed_address(peer[0], self.claims.get(peer, ""))
        fields = {"verified": "handshake", "mapped": peer not in self.claims}
        if self.registry.get("iceball", address, port) is None:
            fields["name"] = endpoint(address, port)
        try:
            server = self.registry.hear("iceball", address, port, peer[0], now, self.timeout, fields)
        except Refused as refused:
            self.registry.note(peer[0], "iceball", port, refused.outcome, now, str(refused))
            return None
        self.registry.note(peer[0], "iceball", port, "listed", now)
        self.forget(server)
        if session is not None:
            self.forget(session[1])
        self.sessions[peer] = identity, server
        self.peers[server] = peer
        return server

    def set_field(self, data: bytes, server: Server, peer: Peer) -> Replies:
        text = data[0] == 3
        if text and (len(data) < 7 or data[-1] or b"\0" in data[6:-1]):
            raise Malformed("text field: expected one text with a NUL at its end")
        if not text and len(data) != 10:
            raise Malformed("number field: expected 10 bytes")
        name = DRAFT_FIELDS.get((data[0], data[5]))
        if name is None:
            return []
        value: Any = decode_utf8(data[6:-1]) if text else clamp(struct.unpack_from("<i", data, 6)[0])
        if name == "name":
            try:
                self.registry.admit_name(value)
            except Refused as refused:
                raise Malformed(str(refused)) from None
        self.registry.update(server, {name: value})
        return [(data[:6] + (value.encode() + b"\0" if text else struct.pack("<i", getattr(server, name))), peer)]

    def forget(self, server: Server) -> None:
        self.sessions.pop(self.peers.pop(server, ()), None)


# --- Hyperbol --------------------------------------------------------------------------------------------------------

HYPERBOL_GREETING = struct.Struct("<4sII")                          # "HBSL", key, players
HYPERBOL_REQUEST_BYTES = 8
HYPERBOL_UNOFFICIAL = 16                                            # in the first byte of the filter
HYPERBOL_ENTRY = struct.Struct("<4sIB3x")                           # address in network order, port, flavor
HYPERBOL_INFO = struct.Struct("<32s32sBBB64s20sxIIBBBB16sIIIIB20s3BBxxx")       # the format in the document's script
HYPERBOL_INFO_BYTES = 5 + HYPERBOL_INFO.size                        # 229
HYPERBOL_REQUEST_S = 5.0                                            # "just a few seconds to ask for the full list"


class Hyperbol(TcpProtocol, Querier):
    """Hyperbol's list by TCP, and its game servers by UDP; document: "The master Server Protocol".

        < 4842534c key.u32 players.u32                      "HBSL"; players on all servers; one segment
        > key.u32 filter[4]                                 10 in the first byte: unofficial servers as well
        < { address[4] port.u32 flavor.u8 000000 }*         address in network order; then the connection is closed

        the master to a game server, and its answer (229 bytes):
        > 02 timestamp.u32
        < 1b timestamp.u32 name[32] gametype[32] players.u8 maximum.u8 00 map[64] address[20] 00 port.u32 flags.u32
          inet[4] version[16] 00×37 factions[3] skill.u8 000000     texts are NUL-terminated unless full

    The document does not say how game servers register: the ini names them, or they announce themselves by HTTP. Either
    way one is listed while it answers; one named in the ini that does not is kept as not responding. The flavor is the ini's.
    """

    game = "hyperbol"

    def __init__(self, core: Core) -> None:
        self.registry, self.poller = core.registry, core.poller
        self.known = Known(core, self)
        self.rules = core.registry.rules
        self.everything, self.official = (Rendered(self.registry, self.game, functools.partial(hyperbol_flavors, flavor)) for flavor in (0, 1))
        core.announcers[self.game] = self
        self.read(core.settings)

    def read(self, settings: Settings) -> None:
        self.flavors: Dict[Tuple[str, int], int] = {
            (host, port): flavor for host, port, flavor in settings["hyperbol.servers"]}
        self.known.read(self.flavors)
        for place in list(self.registry.games[self.game]):
            self.named(*place)

    def named(self, address: str, port: int) -> None:
        server = self.registry.get(self.game, address, port)
        if server is not None:
            self.registry.update(server, {"flavor": self.flavor(address, port)})

    def tick(self, now: float) -> None:
        self.known.tick(now)

    # The list

    def session(self, address: str, now: float) -> Session:
        return HyperbolSession(self, address, now)

    def entries(self, filter: int, now: float) -> bytes:
        return (self.everything if filter & HYPERBOL_UNOFFICIAL else self.official).get(now)

    # The game servers

    def flavor(self, address: str, port: int) -> int:
        place = self.known.places.get((address, port))
        return self.flavors.get(place, 0) if place else 0

    def announced(self, source: str, port: int, fields: Mapping[str, Any], now: float) -> None:
        # The server is queried, and listed with what it answers
        if ":" in source:
            raise Refused("bad packet", "Hyperbol's list has room for IPv4 addresses only; this came from %s" % source)
        address = self.rules.listed_address(source)
        if self.registry.get(self.game, address, port) is None:
            self.registry.admit(self.game, address, port, source)
            if self.poller.find(self, source, port) is None:            # else it is known what became of the last query
                if self.poller.crowded(self.game, source):
                    raise Refused("limit", "too many servers are already waiting to be queried")
                self.registry.note(source, self.game, port, "announced", now)
        self.poller.add(self, source, port)

    def query(self, target: Target) -> bytes:
        return struct.pack("<BI", 2, target.nonce)

    def answer(self, target: Target, data: bytes, now: float) -> bool:
        # Whole milliseconds: jitter alone makes no new list
        self.take(target, now, dict(hyperbol_info(data, target.nonce), responding=True, ping_ms=round(target.ping_ms)))
        return True

    def take(self, target: Target, now: float, fields: Dict[str, Any]) -> None:
        """List the server or bring it up to date."""
        address, port = self.known.identity(target)
        fields.update(name=fields.get("name") or endpoint(address, port), verified="query", flavor=self.flavor(address, port))
        before = self.registry.get(self.game, address, port)
        if before is not None and before.source != target.address and before.responding and not before.unconfirmed:
            if target.known:                # the ini's name leads to this source; it stays listed by the other one
                self.registry.update(before, {"named": True})
            return
        if fields["responding"] and (before is None or not before.responding):
            self.registry.note(target.address, self.game, port, "listed", now)
        try:
            self.registry.hear(self.game, address, port, target.address, now, math.inf, fields, target.known)
        except Refused as refused:
            self.registry.note(target.address, self.game, port, refused.outcome, now, str(refused))
            self.registry.remove(before)
            self.known.drop(target.address, port)

    def missed(self, target: Target, now: float) -> bool:
        address, port = self.known.identity(target)
        server = self.registry.get(self.game, address, port)
        gone = target.missed >= POLL_MISSED
        if gone or server is None:
            self.unanswered(target, now, "no answer from UDP port %d" % port)
        ours = server if server is not None and server.source == target.address else None          # or it comes from another address
        if not target.known:
            if ours is not None and (gone or not ours.responding):
                self.registry.remove(ours)
            return gone
        if server is None:
            self.take(target, now, {"responding": False})
        else:
            silent = {"responding": False, "players": 0, "ping_ms": None, "unconfirmed": False}
            self.registry.update(server, {"named": True, **(silent if gone and ours is not None else {})})
        return False


class HyperbolSession(Session):
    """One player who asks for the list."""

    def __init__(self, hyperbol: Hyperbol, address: str, now: float) -> None:
        self.hyperbol, self.address, self.deadline = hyperbol, address, now + HYPERBOL_REQUEST_S
        self.key = CHANCE.getrandbits(32)           # over TCP it proves nothing
        self.request = b""

    def opened(self, now: float) -> bytes:
        return HYPERBOL_GREETING.pack(b"HBSL", self.key, self.hyperbol.registry.census["hyperbol"][1])

    def receive(self, data: bytes, now: float) -> bytes:
        self.request += data
        if self.done or len(self.request) < HYPERBOL_REQUEST_BYTES:
            return b""
        self.done = True
        key, filter = struct.unpack_from("<IB", self.request)
        if key != self.key:
            raise Malformed("key: %08x instead of %08x" % (key, self.key))
        return self.hyperbol.entries(filter, now) if self.hyperbol.rules.requests.allow(self.address, now) else b""

    def tick(self, now: float) -> bytes:
        self.done = self.done or now >= self.deadline
        return b""


def hyperbol_flavors(flavor: int, blocks: Blocks) -> bytes:
    """The servers of this flavor and those above it, 12 bytes each; 0 are the unofficial ones."""
    def make(servers: List[Server]) -> bytes:
        shown = [server for server in servers if server.responding and ":" not in server.address and server.flavor >= flavor]
        return b"".join(parts(shown, "hyperbol", lambda server: HYPERBOL_ENTRY.pack(ipv4_bytes(server.address), server.port, server.flavor)))
    return b"".join([block.part("hyperbol %d" % flavor, make) for block in blocks])


def hyperbol_info(data: bytes, timestamp: int) -> Dict[str, Any]:
    """What a game server answers to the query with this timestamp; attributes of Server. Raises Malformed."""
    if len(data) < HYPERBOL_INFO_BYTES:
        raise Malformed("an answer of %d bytes instead of %d" % (len(data), HYPERBOL_INFO_BYTES))
    kind, echo = struct.unpack_from("<BI", data)
    if kind != 27:
        raise Malformed("an answer begins with 27 and not with %d" % kind)
    if echo != timestamp:
        raise Malformed("timestamp: not that of the open query")
    values = HYPERBOL_INFO.unpack_from(data, 5)
    name, mode, map, version = (decode_legacy(c_string(values[i])) for i in (0, 1, 5, 13))
    return {"name": name, "mode": mode, "map": map, "version": version, "players": values[2], "max_players": values[3],
            "details": {"skill": str(values[23]), "flags": "0x%08x" % values[8],
                        "factions": "IMF %d, Syndicate %d, Republic %d" % values[20:23]}}


def hyperbol_greeting(data: bytes) -> Tuple[int, int]:
    """Key and number of players in a master's greeting, 12 bytes. Raises Malformed."""
    if len(data) < HYPERBOL_GREETING.size or data[:4] != b"HBSL":
        raise Malformed("a greeting begins with HBSL and has 12 bytes; this is %s" % ascii(data[:12]))
    return HYPERBOL_GREETING.unpack_from(data)[1:]


def hyperbol_entries(data: bytes) -> List[Tuple[str, int, int]]:
    """Address, port and flavor of each server in a list; a rest of fewer than 12 bytes is ignored."""
    whole = len(data) - len(data) % HYPERBOL_ENTRY.size
    return [(".".join(map(str, address)), port, flavor)
            for address, port, flavor in HYPERBOL_ENTRY.iter_unpack(data[:whole])]


# --- SubSpace --------------------------------------------------------------------------------------------------------

ZONE_LIFETIME_S = 180.0             # zones announce every 60 s, so three in a row were lost
ZONE_CLAIMS = 1024                  # announced, not answering yet; up to 2 MB. The last of as many at once is queried after 13 s
ZONE_CLAIMS_PROVEN = 4096           # as many if their addresses are known to be real …
ZONE_PROVEN = 4096                  # … which these are, for whom there was no room when they announced themselves
ZONE_ANNOUNCEMENT = struct.Struct("<4sHHHI32s48s")          # 94 bytes, then the description: 1 to 386 with its NUL
ZONE_ANNOUNCEMENT_MAX = 480
ZONE_ENTRY = struct.Struct("<4sHHHI64s")                            # in a list, then the description with its NUL
ZONE_DESCRIPTION_BYTES = 480        # in a list, its NUL included: the most that clients take
ZONE_VERSION = 134                  # what every zone announces; for those that the ini names
ZONE_PASSWORD = b"cane"             # what every zone announces that has not set another
ZONE_ANSWERED = ("players", "playing", "verified", "responding", "ping_ms")     # answers tell better than announcements
PING_SUMMARY, PING_ARENAS = 1, 2    # the document's options
ECHO_RATE = 1, 5                    # answers as long as their pings, by source, a second / at once: two ping ports would answer each other for
                                    # ever after one forged ping; as a round trip takes less than a second, this ends it
PING_BYTES = 512                    # the document: no packet is larger …
PING_BYTES_SEEN = 520               # … but one implementation sends up to 520
# As asked in turn; None stands for the 4-byte form
PING_FORMS: Tuple[Optional[int], ...] = (PING_SUMMARY | PING_ARENAS, PING_ARENAS, None)


class ZonePoll:
    """What one zone answers to the queries of one poll, each with a nonce of its own as timestamp; document:
    "ping/information protocol", version 1.0.

        > 11223344              < 06000000 11223344
        > 11223344 03000000     < 11223344 03000000 06000000 04000000 3000 0200 0100 706200 0100 0100 00

    Options 1 and 2 are asked together; if 2 is missing in the answer, the list was too long and is asked for alone. The
    4-byte form comes last: old zones know no other, and of several virtual servers on one asss it alone counts this
    one's players.
    """

    def __init__(self) -> None:
        self.step = self.form = 0           # places in PING_FORMS: the one to ask, the one asked
        self.count: Optional[int] = None    # players as the 4-byte form has them
        self.total: Optional[int] = None    # and as option 1 has them
        self.playing: Optional[int] = None
        self.arenas: Optional[List[Tuple[bytes, int, int]]] = None

    def question(self, nonce: int, attempt: int) -> bytes:
        """4 or 8 bytes. Each attempt without an answer goes on to the next form."""
        self.form = min(max(self.step, attempt), len(PING_FORMS) - 1)
        options = PING_FORMS[self.form]
        return struct.pack("<I", nonce) if options is None else struct.pack("<II", nonce, options)

    def answer(self, data: bytes, nonce: int) -> bool:
        """True: the poll is complete. False: `step` is to be asked next. Raises Malformed."""
        if PING_FORMS[self.form] is None:
            if len(data) != 8 or int.from_bytes(data[4:], "little") != nonce:
                raise Malformed("total: not the 8 bytes that answer the 4-byte form, or another timestamp")
            self.count = int.from_bytes(data[:4], "little")
            return True
        if len(data) < 8 or int.from_bytes(data[:4], "little") != nonce:
            raise Malformed("timestamp: not the one that was sent")
        if len(data) > PING_BYTES_SEEN:
            raise Malformed("length: %d bytes" % len(data))
        options, offset = int.from_bytes(data[4:8], "little"), 8
        if options & PING_SUMMARY:
            if len(data) < 16:
                raise Malformed("global summary: cut off")
            self.total, self.playing = struct.unpack_from("<II", data, 8)
            offset = 16
        if options & PING_ARENAS:
            self.arenas = arena_blocks(data[offset:])
        elif PING_FORMS[self.form] == PING_ARENAS:
            self.arenas = []                # some leave the bit out when there is none to list
        self.step = self.form + 1 if self.arenas is None else len(PING_FORMS) - 1
        return False

    @property
    def answered(self) -> bool:
        return any(part is not None for part in (self.count, self.total, self.arenas))

    def fields(self) -> Dict[str, Any]:
        """For the registry: players, playing, as far as they were told."""
        seen = sum(total for _, total, _ in self.arenas or [])
        players = next(number for number in (self.count, self.total, seen) if number is not None)
        fields: Dict[str, Any] = {"players": clamp(players)}
        if self.playing is not None:
            fields["playing"] = None if self.virtual or self.playing > players else self.playing
        return fields

    @property
    def virtual(self) -> bool:
        """One of several zones of a server: the longer answer counts all of them. Two players may come between the queries."""
        return self.count is not None and self.total is not None and self.total > self.count + 2

    def arenas_text(self) -> str:
        """`(Public 0) 2/1, duel 1/1`: total and playing."""
        return "" if self.virtual else ", ".join("%s %d/%d" % (arena_name(name), total, playing) for name, total, playing in self.arenas or [])


def arena_name(raw: bytes) -> str:
    return "(Public %s)" % raw.decode("ascii") if raw.isdigit() else decode_legacy(raw) or "?"


def arena_blocks(data: bytes) -> List[Tuple[bytes, int, int]]:
    """`name\\0 total.u16 playing.u16`, ended by an empty name; a list that was cut off ends where it does."""
    blocks: List[Tuple[bytes, int, int]] = []
    while True:
        name, nul, data = data.partition(b"\0")
        if not name or not nul or len(data) < 4:
            return blocks
        blocks.append((name,) + struct.unpack_from("<HH", data))
        data = data[4:]


def ping_answer(data: bytes, total: int, playing: int, arenas: Iterable[Tuple[bytes, int, int]]) -> bytes:
    """The answer of at most 512 bytes to a ping of 4 or 8; `arenas` as arena_blocks() gives them."""
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


def ping_nonce() -> int:
    """A timestamp for which zones count everybody: for some, `t % 600 < 300` or `t % 1000 < 500` means the total."""
    return 3000 * CHANCE.randrange((1 << 32) // 3000) + CHANCE.randrange(300)


class Claim(NamedTuple):
    """What a zone said of itself before it answered a ping."""

    port: int
    fields: Dict[str, Any]          # for the registry
    password: bytes
    lifetime: float                 # infinite: it came by HTTP, which proves the address, and stays for as long as it answers


def zone_announcement(data: bytes) -> Claim:
    """The 95 to 480 bytes of an announcement; raises Malformed with the field."""
    if not ZONE_ANNOUNCEMENT.size < len(data) <= ZONE_ANNOUNCEMENT_MAX:
        raise Malformed("length: %d bytes instead of 4, 8 or %d to %d" % (
            len(data), ZONE_ANNOUNCEMENT.size + 1, ZONE_ANNOUNCEMENT_MAX))
    _, port, players, scores, version, name, password = ZONE_ANNOUNCEMENT.unpack_from(data)
    fields = {"name": decode_legacy(c_string(name)), "players": players, "version": str(version),
              "description": decode_legacy(c_string(data[ZONE_ANNOUNCEMENT.size:]), TEXT_CHARACTERS),
              "details": {"scores": "yes" if scores & 255 else "no"}}
    if not fields["name"]:
        raise Malformed("name: it is empty")
    return Claim(port, fields, c_string(password), ZONE_LIFETIME_S)


def alike(name: str) -> str:
    """What names have in common that look the same on the page, where several spaces show as one."""
    return " ".join(name.casefold().split())


class SubSpacePing(UdpProtocol, Querier):
    """SubSpace's ping port, one above the list: answers pings to this master, hears announcements, pings zones.

        > 11223344 03000000                         a ping of 4 or 8 bytes; answered as in ZonePoll, one arena a game
        > 00000000 a861 0600 0100 86000000           ip (ignored), port, players, scores, version 134
          4c6f6f706261636b2054657374205a6f6e65 00…   name[32]
          63616e65 00…                               password[48]
          61207265616c 00                            description, NUL-terminated

    An announcement is a claim: the zone is listed once it answers a ping on its port + 1 at the datagram's source.
    Listed zones are in the registry, where SubSpaceList finds them; here are only the claims and who owns which name.
    Where there are too many claims, perhaps a flood of forged ones, the next one is only pinged and not kept: the ping's timestamp is a
    MAC, so a zone that returns it is known to be there, and is queried when it announces itself again.
    """

    game = "subspace"
    offset = 1
    attempts = len(PING_FORMS)
    nonce = staticmethod(ping_nonce)

    def __init__(self, core: Core) -> None:
        self.registry = core.registry
        self.poller = core.poller
        core.announcers[self.game] = self
        self.rules, self.listeners = core.registry.rules, core.listeners
        self.claims: Dict[Tuple[str, int], Claim] = {}          # by source and announced port
        self.cookie = Cookie(os.urandom(16), 4)
        self.proven: collections.OrderedDict[str, Set[int]] = collections.OrderedDict()         # ping ports by source, the latest last
        # A name's password (None: listed before a restart, not announced since), the zones that have it, and when it was announced last
        self.owners: Dict[str, Tuple[Optional[bytes], Set[Server], float]] = {}
        self.known = Known(core, self)
        self.echoes = Limiter(ECHO_RATE)
        self.registry.watch(self.watch, self.game)
        self.read(core.settings)

    def read(self, settings: Settings) -> None:
        self.known.read(settings["subspace.zones"])

    def tick(self, now: float) -> Replies:
        self.known.tick(now)
        return []

    def datagram(self, data: bytes, peer: Peer, now: float) -> Replies:
        if len(data) in (4, 8):
            if not self.rules.udp_requests.allow(peer[0], now) or len(data) == 8 and self.proves(data, peer, now):
                return []
            answer = self.ping(data)
            surplus = len(answer) - len(data)
            allowed = self.rules.allow_surplus("ping", peer[0], surplus, now) if surplus else self.echoes.allow(peer[0], now)
            return [(answer, peer)] if allowed else []
        if len(data) < 8:
            raise Malformed("length: %d bytes" % len(data))
        try:
            claim = zone_announcement(data)
        except Malformed as wrong:
            port = int.from_bytes(data[4:6], "little") if len(data) > ZONE_ANNOUNCEMENT.size else 0
            self.registry.note(peer[0], self.game, port, "bad packet", now, str(wrong))
            raise
        try:
            room = self.claim(peer[0], claim, now)
        except Refused as refused:
            self.registry.note(peer[0], self.game, claim.port, refused.outcome, now, str(refused))
            return []
        place = peer[0], claim.port + 1
        return [] if room else [(self.cookie.make(endpoint(*place).encode(), now), place)]

    def proves(self, data: bytes, peer: Peer, now: float) -> bool:
        """True: this is not a ping, but the answer to one of which nothing was kept, and proves that a zone is there."""
        if not self.cookie.good(data[4:], endpoint(*peer[:2]).encode(), now):
            return False
        ports = self.proven.get(peer[0], set())
        keep_latest(self.proven, peer[0], ports, ZONE_PROVEN)
        if peer[1] not in ports and len(ports) >= (ZONE_CLAIMS_PROVEN if self.rules.exempts(peer[0]) else self.rules.servers_per_source):
            ports.remove(CHANCE.choice(list(ports)))        # not the oldest: with one zone too many, each would go before it comes again
        ports.add(peer[1])
        self.registry.note(peer[0], self.game, peer[1] - 1, "waiting", now)
        return True

    def ping(self, data: bytes) -> bytes:
        """The answer for this master itself, one arena a game."""
        census = self.registry.census
        total, playing = (min(sum(counts[i] for counts in census.values()), 0xFFFFFFFF) for i in (1, 2))
        return ping_answer(data, total, playing, (
            (game.encode(), clamp(counts[1]), clamp(counts[2])) for game, counts in sorted(census.items()) if counts[0]))

    # Announcements

    def announced(self, source: str, port: int, fields: Mapping[str, Any], now: float) -> None:
        # Such a zone stays for as long as it answers
        told = {key: value for key, value in fields.items() if key != "name" or value}
        self.claim(source, Claim(port, told, ZONE_PASSWORD, math.inf), now)

    def claim(self, source: str, claim: Claim, now: float) -> bool:
        """Refresh a listed zone; have another one queried. False: there is no room for one whose source is not
        proven. Raises Refused."""
        server = self.zone(source, claim.port)
        self.admit_owner(claim, server, now)
        if server is None:
            return self.ask_claimed(source, claim, now)
        name = claim.fields.get("name", "")
        self.registry.admit_name(name)
        fields = {key: value for key, value in claim.fields.items() if key not in ZONE_ANSWERED}
        fields["details"] = dict(server.details, **claim.fields.get("details", {}))
        if not server.lasting:
            fields["lifetime"] = claim.lifetime
        self.poller.add(self, source, claim.port)
        if name and alike(name) != alike(server.name):
            self.disown(server, server.name)
        self.registry.update(server, fields)
        self.registry.refresh(server, now)
        self.own(server, claim.password, now)
        self.registry.note(source, self.game, claim.port, "listed", now)
        return True

    def ask_claimed(self, source: str, claim: Claim, now: float) -> bool:
        """The second half of claim()."""
        if claim.port == 65535:
            raise Refused("bad packet", "port 65535 leaves no next port for pings")
        if is_loopback(source) and any(l.port == claim.port + 1 and l.transport == "udp" for l in self.listeners):
            raise Refused("bad packet", "the port after %d is this master's own" % claim.port)
        self.registry.admit(self.game, self.rules.listed_address(source), claim.port, source, claim.fields.get("name", ""))
        self.registry.note(source, self.game, claim.port, "announced", now)
        crowded = self.poller.find(self, source, claim.port) is None and (len(self.claims) >= ZONE_CLAIMS or self.poller.crowded(self.game, source))
        if crowded:
            if claim.lifetime != math.inf and claim.port + 1 not in self.proven.get(source, ()):
                return False
            if len(self.claims) >= ZONE_CLAIMS_PROVEN or self.poller.crowded(self.game, source, 2):         # half may be others' lies
                raise Refused("limit", "too many zones are already waiting to be queried")
        self.claims[source, claim.port] = claim
        target = self.poller.add(self, source, claim.port)
        if crowded:                     # one query for each, in the form that every zone knows
            target.attempt, target.scratch = len(PING_FORMS) - 1, ZonePoll()
            self.proven.get(source, set()).discard(target.port)
        return True

    def zone(self, source: str, port: int) -> Optional[Server]:
        server = self.registry.get(self.game, self.rules.listed_address(source), port)
        return server if server is not None and server.source == source else None

    # Names: the password of a name's first announcer owns it while a zone of that name is listed

    def admit_owner(self, claim: Claim, server: Optional[Server], now: float) -> None:
        """Raise Refused if `claim` may not have its name; `server`: the listed server that it is about, if any. Who may not keep its
        present name may not give it up either."""
        for name in ("" if server is None else server.name, claim.fields.get("name", "")):
            key = alike(name)
            owner, servers, announced_at = self.owners.get(key, (claim.password, set(), now))
            if owner == claim.password:
                continue
            if server not in servers:
                if name == claim.fields.get("name") and any(other.responding for other in servers):
                    raise Refused("name", "the name %s belongs to another zone, with another password, for as long as that is listed" % name)
            elif owner is not None and claim.lifetime != math.inf:          # HTTP has no password, but proves the address
                if now - announced_at < ZONE_LIFETIME_S:
                    raise Refused("password", "the name %s is announced with another password; a new one is accepted "
                                          "once that has not been heard for %d s" % (name, ZONE_LIFETIME_S))
                self.owners[key] = None, servers, announced_at

    def own(self, server: Server, password: Optional[bytes], now: float) -> None:
        """`password`: None if it is not known."""
        if server.nameless:
            return
        before, servers, announced_at = self.owners.get(alike(server.name), (None, set(), now))
        if server not in servers and not any(other.responding for other in servers):         # listed only because the ini names them, and not there
            before, servers = None, set()
        owner = password if before is None else before
        self.owners[alike(server.name)] = owner, servers | {server}, now if password == owner else announced_at

    def disown(self, server: Server, name: str) -> None:
        _, servers, _ = self.owners.get(alike(name), (None, set(), 0.0))
        servers.discard(server)
        if not servers:
            self.owners.pop(alike(name), None)

    def watch(self, event: str, server: Server) -> None:
        if event == "listed":           # by us, or by storage after a restart
            self.own(server, None, server.last_seen)        # nobody else's until its announcement tells the password
        elif event == "gone":
            self.disown(server, server.name)

    # Polls

    def query(self, target: Target) -> bytes:
        if target.attempt == target.step == 0:
            target.scratch = ZonePoll()
        return target.scratch.question(target.nonce, target.attempt)

    def answer(self, target: Target, data: bytes, now: float) -> bool:
        poll = target.scratch
        complete = poll.answer(data, target.nonce)
        target.step = poll.step
        if complete or self.zone(target.address, target.server_port) is None:       # a new zone: listed at its first answer
            self.take(target, now)
        return complete

    def missed(self, target: Target, now: float) -> bool:
        source, port = target.address, target.server_port
        if target.scratch.answered:         # all but the last question of the poll
            target.missed = 0
            self.take(target, now)
            return False
        server = self.zone(source, port)
        gone = target.missed >= POLL_MISSED
        if gone or server is None:
            self.unanswered(target, now, "no answer to a ping on UDP port %d" % target.port)
        if not gone and (server is not None or target.known):
            return False
        if target.known:
            self.take(target, now)
            return False
        self.registry.remove(server)
        return True

    def removed(self, target: Target) -> None:
        self.claims.pop((target.address, target.server_port), None)

    def take(self, target: Target, now: float) -> None:
        """List the zone, or bring it up to date, with what it answered to the poll."""
        source, port, poll = target.address, target.server_port, target.scratch
        server = self.zone(source, port)
        claim = self.claims.pop((source, port), None)
        fields = dict(poll.fields(), responding=poll.answered, verified="query", ping_ms=round(target.ping_ms) if poll.answered else None)
        details = server.details if server is not None else claim.fields.get("details", {}) if claim is not None else {}
        if poll.arenas is not None or not poll.answered:
            details = {name: text for name, text in dict(details, arenas=poll.arenas_text()).items() if text}
        fields["details"] = details
        if server is None:
            self.list_zone(target, claim, fields, now)
            return
        if target.known:
            fields["named"] = True
            if not poll.answered:
                fields["unconfirmed"] = False           # it is known to be silent
        if poll.answered and (server.unconfirmed or server.stays or self.rules.datagrams.spent(source, now)):
            self.registry.refresh(server, now)          # the others live by their announcements, if a flood in their names lets any in
        if poll.answered and not server.responding:
            self.registry.note(source, self.game, port, "listed", now)
        self.registry.update(server, fields)
        if poll.answered and alike(server.name) not in self.owners:         # who had its name while it was silent has left
            self.own(server, None, now)

    def list_zone(self, target: Target, claim: Optional[Claim], fields: Dict[str, Any], now: float) -> None:
        """The second half of take(); `claim`: what it announced, if it did; `fields`: what it answered, for the registry."""
        source, port = target.address, target.server_port
        if claim is None and not target.known:          # its zone has gone, or comes from another source now
            self.known.drop(source, port)
            return
        address = self.rules.listed_address(source)
        before = self.registry.get(self.game, address, port)           # from another source
        if before is not None and before.responding and not before.unconfirmed and claim is None:
            self.registry.update(before, {"named": True})       # the ini's name for it leads here, its announcements come from there
            return
        name = before.name if before is not None else endpoint(address, port)
        told, lifetime = {"name": name}, ZONE_LIFETIME_S
        try:
            if claim is not None:
                told.update(claim.fields)
                lifetime = claim.lifetime
                self.admit_owner(claim, before, now)
            if before is not None and before.lasting:
                lifetime = before.lifetime
            server = self.registry.hear(self.game, address, port, source, now, lifetime, dict(told, **fields), target.known)
            if alike(name) != alike(server.name):
                self.disown(server, name)
        except Refused as refused:
            self.registry.note(source, self.game, port, refused.outcome, now, str(refused))
            self.known.drop(source, port)
            return
        if claim is not None:
            self.own(server, claim.password, now)
        if fields["responding"]:
            self.registry.note(source, self.game, port, "listed", now)


LINK_WINDOW = 4                     # packets in flight: what deployed clients are used to
LINK_AHEAD = 16                     # and so many beyond the oldest one missing, which the peer has to keep
LINK_EARLY = 32                     # packets kept until the ones before them come: 16 kB a link
LINK_RESEND_S = 0.5                 # longer than the round trip between any two places
LINK_OVERTAKEN = 2                  # later packets acknowledged, after which one is taken for lost, not for late
LINK_TRIES = 12                     # at a fifth lost each way, one packet in 200,000 goes unacknowledged so often
LINK_NESTING = 3                    # a cluster in a reliable packet in a cluster; no client goes deeper
LINK_IDLE_S = 30.0                  # a peer that says nothing for so long has gone
LINK_CHUNK_BYTES = 480              # of a list in one packet: with headers below the 512 bytes that clients read
LINK_PACKET_BYTES = 520             # the longest that any end sends
LINK_SEQUENCES = 1 << 32


class Flight:
    """A reliable packet under way."""

    __slots__ = ("packet", "sent_at", "tries", "overtaken", "order")

    def __init__(self, packet: bytes) -> None:
        self.packet = packet
        self.sent_at = -math.inf
        self.tries = self.overtaken = self.order = 0


class SubSpaceLink:
    """One end of the SubSpace core protocol, unencrypted. Packets begin with 00; what does not belongs to the game.

        00 03 seq[4] packet                     reliable: acknowledged, taken in order, sent again until it is
        00 04 seq[4]                            acknowledgement
        00 05 time[4] …                         sync              answered with 00 06 time[4] servertime[4]
        00 07                                   disconnect
        00 0e {len.u8 packet}*                  cluster

    `receive` and `tick` return datagrams for the peer; `payloads` gives what to send reliably, and is read no faster than
    the peer acknowledges. `closed`: the link has ended, by the peer or because it acknowledges nothing.
    """

    def __init__(self, now: float, payloads: Iterable[bytes] = ()) -> None:
        self.heard_at = now
        self.closed = False
        self.proven = False                             # the peer has acknowledged something
        self.expected = 0                               # the peer's next sequence number
        self.early: Dict[int, bytes] = {}
        self.sequence = 0                               # our next one
        self.order = 0                                  # datagrams sent, resent ones too
        self.payloads = iter(payloads)
        self.flights: collections.OrderedDict[int, Flight] = collections.OrderedDict()

    def packet(self, data: bytes, now: float) -> List[bytes]:
        """A packet that is not the link's own."""
        raise Malformed("type %s" % data[:2].hex())

    def receive(self, data: bytes, now: float) -> List[bytes]:
        if len(data) > LINK_PACKET_BYTES:
            raise Malformed("length: %d bytes" % len(data))
        self.heard_at = now
        return self.take(data, now, 0) + self.send(now)

    def tick(self, now: float) -> List[bytes]:
        if now - self.heard_at > LINK_IDLE_S:
            self.closed = True
        return self.send(now)

    def take(self, data: bytes, now: float, depth: int) -> List[bytes]:
        kind = data[:2]
        if depth > LINK_NESTING:
            raise Malformed("packets in packets, more than %d deep" % LINK_NESTING)
        if kind == b"\0\x0e":
            return self.cluster(data[2:], now, depth)
        if kind == b"\0\7":
            self.closed = True
            return []
        if kind not in (b"\0\3", b"\0\4", b"\0\5", b"\0\6"):
            return self.packet(data, now)
        if len(data) < 6:
            raise Malformed("type %s: cut off" % kind.hex())
        number = int.from_bytes(data[2:6], "little")
        if kind == b"\0\3":
            return self.reliable(number, data[6:], now, depth)
        if kind == b"\0\4":
            self.acknowledged(number)
        elif kind == b"\0\5":
            hundredths = int(now * 100) % LINK_SEQUENCES
            return [b"\0\6" + data[2:6] + struct.pack("<I", hundredths)]
        return []

    def cluster(self, data: bytes, now: float, depth: int) -> List[bytes]:
        out, wrong = [], ""
        while data:
            size = data[0]
            if not 0 < size < len(data):
                wrong = "cluster: a packet of %d bytes where %d are left" % (size, len(data) - 1)
                break
            try:
                out += self.take(data[1:1 + size], now, depth + 1)
            except Malformed as error:
                wrong = str(error)
            data = data[1 + size:]
        if wrong and not out:
            raise Malformed(wrong)
        return out

    def reliable(self, number: int, data: bytes, now: float, depth: int) -> List[bytes]:
        ahead = (number - self.expected) % LINK_SEQUENCES
        out = [b"\0\4" + struct.pack("<I", number)]
        if ahead >= LINK_SEQUENCES // 2:
            return out                                  # our acknowledgement was lost
        if ahead >= LINK_EARLY:
            return []
        self.early[number] = data
        while self.expected in self.early:
            data = self.early.pop(self.expected)
            self.expected = (self.expected + 1) % LINK_SEQUENCES
            with contextlib.suppress(Malformed):            # it is acknowledged all the same, or it would come again
                out += self.take(data, now, depth + 1)
        return out

    def acknowledged(self, number: int) -> None:
        flight = self.flights.pop(number, None)
        if flight is not None:
            self.proven = True
            for other in self.flights.values():
                other.overtaken += other.order < flight.order

    def send(self, now: float) -> List[bytes]:
        """What is due: packets that seem lost, then new ones as far as the window allows."""
        out: List[bytes] = []
        window = LINK_WINDOW if self.proven else 1
        while len(self.flights) < window and (self.sequence - next(iter(self.flights), self.sequence)) % LINK_SEQUENCES < LINK_AHEAD:
            payload = next(self.payloads, None)
            if payload is None:
                break
            self.flights[self.sequence] = Flight(b"\0\3" + struct.pack("<I", self.sequence) + payload)
            self.sequence = (self.sequence + 1) % LINK_SEQUENCES
        for flight in self.flights.values():
            if now - flight.sent_at < LINK_RESEND_S and flight.overtaken < LINK_OVERTAKEN:
                continue
            if flight.tries == LINK_TRIES:
                self.closed = True
                return []
            self.order += 1
            flight.sent_at, flight.tries, flight.overtaken, flight.order = now, flight.tries + 1, 0, self.order
            out.append(flight.packet)
        return out


LIST_UNPROVEN_BYTES = 4096          # to a peer that acknowledged nothing, whose address may be false: a packet, eight times
LIST_UNPROVEN_RATE = 4, 32          # and datagrams to all such peers of one address, a second / at once: 2 kB/s
LIST_RATE = 100_000, 1_000_000      # bytes of lists to one address that acknowledges, a second / at once: 5,000 zones, as fast as can be …
LIST_RATE_IN_ALL = 500_000, 4_000_000       # … and to all of them at one socket: our sequence numbers begin at 0, so that one who reads
                                            # nothing can acknowledge too, in somebody else's name; 4 Mbit/s, and four such lists at once
UDP_HEADER_BYTES = 28               # and IPv4's: a hundred answers of 10 bytes are 4 kB on the wire
LIST_LINKS = 4096                   # open exchanges, of proven and of unproven peers each; 3 to 5 kB apiece, beside LINK_EARLY


class ListLink(SubSpaceLink):
    """The master's end: takes list requests, `01 minplayers[4]`."""

    def __init__(self, protocol: SubSpaceList, address: str, key: bytes, now: float) -> None:
        super().__init__(now)
        self.protocol, self.address, self.key = protocol, address, key
        self.wanted: Optional[int] = None               # minimum of players, of the request that waits
        self.requests = 0
        self.heard_bytes = self.unproven_bytes = 0      # in and out, until the peer has proven its address
        self.balance = 0                                # what came less what went out beside the list, headers too

    def packet(self, data: bytes, now: float) -> List[bytes]:
        if data[:1] != b"\1" or len(data) != 5:
            return super().packet(data, now)
        self.wanted = int.from_bytes(data[1:], "little")
        return []

    def send(self, now: float) -> List[bytes]:
        out = super().send(now)
        # The first request is paid for by the connection. One list at a time: with no packet under way, all of the last one has arrived.
        if self.wanted is not None and not self.flights and (not self.requests or self.protocol.rules.udp_requests.allow(self.address, now)):
            self.requests += 1
            self.payloads, self.wanted = self.protocol.chunks(self.wanted, now), None
            out += super().send(now)
        return out


class SubSpaceList(UdpProtocol):
    """SubSpace's list port: a short exchange over the core protocol (SubSpaceLink), one link a peer.

        > 00 01 key[4] VV 00                    connect, VV 01 or 11
        < 00 02 key[4]                          the same key: no encryption
        > 00 03 00000000 01 minplayers[4]       which zones
        < 00 04 00000000
        < 00 03 seq[4] 00 0a total[4] …         at most 480 bytes of the list, as often as it takes
        > 00 04 seq[4]
        > 00 07                                 disconnect

    The list is `01` and for each zone ip[4] port.u16 players.u16 scores.u16 version.u32 name[64] description NUL. Nothing in
    the exchange proves the peer's address: before its first acknowledgement one packet is in flight and at most
    LIST_UNPROVEN_BYTES go out; after it, as that may have been sent blind, no more than LIST_RATE allows.
    """

    by_socket = True

    def __init__(self, core: Core) -> None:
        self.registry = core.registry
        self.rules = core.registry.rules
        self.unproven_limiter, self.limiter = Limiter(LIST_UNPROVEN_RATE), Limiter(LIST_RATE)
        self.limiter_in_all = Limiter(LIST_RATE_IN_ALL)
        self.unproven: collections.OrderedDict[Peer, ListLink] = collections.OrderedDict()
        self.proven: collections.OrderedDict[Peer, ListLink] = collections.OrderedDict()
        self.zones = Rendered(self.registry, "subspace", lambda blocks: [block.part("subspace", zones_of) for block in blocks])

    def datagram(self, data: bytes, peer: Peer, now: float) -> Replies:
        link = self.proven.get(peer) or self.unproven.get(peer)
        connect = data[:2] == b"\0\1"
        if connect:
            if len(data) != 8 or data[6:] not in (b"\1\0", b"\x11\0"):
                raise Malformed("connect: not 00 01 key[4] and version 01 or 11")
            # A repeated connect changes nothing, unless the peer has its list: then it wants another
            if link is None or link.key != data[2:6] or link.requests and not link.flights:
                if not self.rules.udp_requests.allow(peer[0], now):
                    return []
                self.proven.pop(peer, None)
                link = ListLink(self, peer[0], data[2:6], now)
        elif link is None:
            if data == b"\0\7":             # often sent twice
                return []
            if len(data) > ZONE_ANNOUNCEMENT.size:
                self.registry.note(peer[0], "subspace", 0, "bad packet", now, "on the port of the list; zones announce themselves on the next port")
            raise Malformed("a packet outside an exchange")
        link.heard_bytes += len(data)
        link.balance += UDP_HEADER_BYTES + len(data)
        return self.post(link, [b"\0\2" + link.key] if connect else link.receive(data, now), peer, now)

    def post(self, link: ListLink, packets: List[bytes], peer: Peer, now: float) -> Replies:
        self.unproven.pop(peer, None)
        # Strangers who come once, thousands a second, displace only each other
        keep_latest(self.proven if link.proven else self.unproven, peer, link, LIST_LINKS)
        out: Replies = []
        verdict = self.rules.verdict(peer[0]) if packets else 0.0
        exempt = verdict == EXEMPT
        if verdict == BLOCKED:
            packets = []
        for packet in packets:
            if packet[:2] != b"\0\3":               # one datagram may ask for a hundred of them
                if link.balance <= 0 and not exempt:
                    continue
                link.balance -= UDP_HEADER_BYTES + len(packet)
            if not link.proven:
                if link.unproven_bytes + len(packet) > LIST_UNPROVEN_BYTES:
                    link.closed = True
                    break
                surplus = 0                     # none for an acknowledgement, as long as what it answers; the list and the sync's answer are longer
                if packet[:2] in (b"\0\3", b"\0\6"):
                    surplus = min(len(packet), link.unproven_bytes + len(packet) - link.heard_bytes)
                if not (exempt or self.unproven_limiter.allow(peer[0], now)) or not self.rules.allow_surplus("list", peer[0], surplus, now):
                    continue
                link.unproven_bytes += len(packet)
            elif packet[:2] == b"\0\3" and not exempt:
                flight, size = link.flights[int.from_bytes(packet[2:6], "little")], len(packet)
                again = flight.tries > 1                # no acknowledgement has paid for it
                if not self.limiter.allow(peer[0], now, size) or not (
                        self.rules.allow_surplus("list again", peer[0], size, now) if again else self.limiter_in_all.allow("", now, size)):
                    flight.tries -= not again           # one never sent waits, and its link with it; one sent before counts as lost
                    continue
            out.append((packet, peer))
        if link.closed:
            self.proven.pop(peer, None)
            self.unproven.pop(peer, None)
        return out

    def tick(self, now: float) -> Replies:
        return [reply for links in (self.proven, self.unproven) for peer, link in list(links.items())
                for reply in self.post(link, link.tick(now), peer, now)]

    def chunks(self, minimum: int, now: float) -> Iterator[bytes]:
        """The list of zones with at least so many players, in packets, made one by one as they can be sent."""
        zones = self.zones.get(now)             # shared by all who read it
        head = b"\0\x0a" + struct.pack("<I", 1 + sum(len(entry) for block in zones for players, entry in block if players >= minimum))
        rest = b"\1"
        for players, entry in itertools.chain.from_iterable(zones):
            if players >= minimum:
                rest += entry
                while len(rest) > LINK_CHUNK_BYTES:
                    yield head + rest[:LINK_CHUNK_BYTES]
                    rest = rest[LINK_CHUNK_BYTES:]
        yield head + rest


def zones_of(servers: List[Server]) -> List[Tuple[int, bytes]]:
    """Each zone's players and list entry."""
    zones = [server for server in servers if ":" not in server.address and server.responding]
    return list(zip([server.players for server in zones], parts(zones, "subspace", zone_entry)))


def zone_entry(server: Server) -> bytes:
    """A zone in the list: 78 bytes and the description, as Windows-1252."""
    version = int(server.version) if server.version.isdecimal() else ZONE_VERSION
    name, description = (text.encode("cp1252", "replace") for text in (server.name, server.description))
    return ZONE_ENTRY.pack(ipv4_bytes(server.address), server.port, server.players, server.details.get("scores") == "yes",
                           clamp(version, 0xFFFFFFFF), name[:63]) + description[:ZONE_DESCRIPTION_BYTES - 1] + b"\0"


def zone_entries(data: bytes) -> List[Dict[str, Any]]:
    """The way back: what a list tells of each zone; raises Malformed."""
    if data[:1] != b"\1":
        raise Malformed("a list begins with 01")
    zones = []
    at = 1
    while at < len(data):
        if len(data) - at <= ZONE_ENTRY.size:
            raise Malformed("list: the last zone is cut off")
        address, port, players, scores, version, name = ZONE_ENTRY.unpack_from(data, at)
        end = data.find(b"\0", at + ZONE_ENTRY.size)
        if end < 0:
            raise Malformed("list: a description without its NUL")
        description, at = data[at + ZONE_ENTRY.size:end], end + 1
        zones.append({"address": str(ipaddress.IPv4Address(address)), "port": port, "name": decode_legacy(c_string(name)),
                      "players": players, "scores": bool(scores & 255), "version": version,
                      "description": decode_legacy(description, TEXT_CHARACTERS)})
    return zones


# --- AIO -------------------------------------------------------------------------------------------------------------

AIO_CONNECTED = b"\1\0\0\0\0"       # the document's CONNECT with id 0, and the framed dialect's greeting as well
AIO_MESSAGE_S = 20.0                # from the greeting to the first byte, and from a message's first byte to its last
AIO_IDLE_S = 330.0                  # a peer that publishes nothing; a framed client's keepalive comes after about 270 s
AIO_KEEPALIVE_S = 120.0             # a published peer that has sent a keepalive and then none; they come every 20 to 40 s
AIO_NEWLINE_S = 0.2                 # between `12#%` and its newline, if a network parted what was written as one
AIO_MESSAGE_BYTES = 8192            # of any dialect: a name and a description at their longest, four bytes a character, are 2,600
AIO_FRAME_BYTES = 31                # the first frame: a publish has 3, or 14 in zlib; a longer one could begin like a text
AIO_ANSWER_BYTES = 16384            # the answer to a query, unpacked; the longest that a list can show has 2,600
AIO_ZLIB_BYTES = 1200               # a longer frame does not fit one packet, and is compressed
AIO_SERVERS = 65535                 # a list's index and count are u16
AIO_NEWS_BYTES = 65000              # a string16 carries 65,535
AIO_TURN_MESSAGES = 64              # answered in one go (3 ms); then the other connections have their turn …
AIO_TURN_BYTES = 1 << 18            # … and the peer takes the answers
AIO_SEEN_S = 60.0                   # how often a silent connection counts as a sign of life
AIO_NAME_HASH, AIO_NAME_PERCENT = "\uff03".encode(), "\uff05".encode()       # text clients unescape nothing in names
AIO_COUNTER = re.compile(r"(?:^| )\[([0-9]{1,5})/([0-9]{1,5})\]$")


def uintv(value: int) -> bytes:
    """The variable-size integer of AIO's binary dialect, 1 to 4 bytes; OverflowError above 0x2020407f, the last it has.

    0 = 01, 127 = ff, 128 = 0200, 8080 = 427c, 16512 = 040000, 27010 = 144801, 65535 = fcfb05."""
    if value < 0x80:
        return (value << 1 | 1).to_bytes(1, "little")
    if value < 0x4080:
        return (value - 0x80 << 2 | 2).to_bytes(2, "little")
    if value < 0x204080:
        return (value - 0x4080 << 3 | 4).to_bytes(3, "little")
    return (value - 0x204080 << 3).to_bytes(4, "little")


def read_uintv(data: bytes, at: int) -> Tuple[int, int]:
    """The value at `at` and where the next field begins; that is past the end of `data` if the value is not whole."""
    first = data[at] if at < len(data) else 0
    size, bits, base = ((1, 1, 0) if first & 1 else (2, 2, 0x80) if first & 2
                        else (3, 3, 0x4080) if first & 4 else (4, 3, 0x204080))
    return (int.from_bytes(data[at:at + size], "little") >> bits) + base, at + size


def inflate(data: bytes, limit: int) -> bytes:
    """One zlib stream; Malformed if it is none, or of more than `limit` bytes, of which it never unpacks more."""
    stream = zlib.decompressobj()
    try:
        unpacked = stream.decompress(data, limit + 1)
    except zlib.error as error:
        raise Malformed("zlib: %s" % error) from None
    if len(unpacked) > limit or not stream.eof:
        raise Malformed("zlib: %s" % ("more than %d bytes" % limit if len(unpacked) > limit else "cut off"))
    return unpacked


def aio_info(data: bytes) -> Tuple[str, str, int, int, int]:
    """A game server's answer to the query `00`, zlib of `00 name.string16 description.string16 players.u32 maximum.u32 version.u16`:
    name, description, players, maximum, version. Raises Malformed."""
    payload = inflate(data, AIO_ANSWER_BYTES)
    if payload[:1] != b"\0":
        raise Malformed("type: not an answer")
    texts, at = [], 1
    for _ in range(2):
        size = int.from_bytes(payload[at:at + 2], "little")
        texts.append(decode_legacy(payload[at + 2:at + 2 + size], TEXT_CHARACTERS))
        at += 2 + size
    if len(payload) < at + 10:
        raise Malformed("length: %d bytes instead of %d" % (len(payload), at + 10))
    return (texts[0], texts[1], *struct.unpack_from("<IIH", payload, at))


def aio_frame(payload: bytes) -> bytes:
    """length.u24 compression.u8 payload; zlib where it pays."""
    packed = zlib.compress(payload, GZIP_LEVEL) if len(payload) > AIO_ZLIB_BYTES else payload
    if len(packed) < len(payload):
        return len(packed).to_bytes(3, "little") + b"\1" + packed
    return len(payload).to_bytes(3, "little") + b"\0" + payload


def aio_unframe(data: bytes, most: int) -> Optional[Tuple[bytes, bytes]]:
    """The payload of the first frame, of `most` bytes packed and unpacked, and what follows it; None: it is not whole yet."""
    length = int.from_bytes(data[:3], "little")
    if len(data) < 4:
        return None
    if not 0 < length <= most:
        raise Malformed("length: a frame of %d bytes" % length)
    if data[3] > 1:
        raise Malformed("compression %d" % data[3])
    if len(data) < 4 + length:
        return None
    payload, rest = data[4:4 + length], data[4 + length:]
    return inflate(payload, most) if data[3] else payload, rest


def aio_string16(text: bytes) -> bytes:
    return struct.pack("<H", len(text)) + text


def aio_fields(name: bytes, description: bytes) -> Dict[str, Any]:
    """What a publish of the text and the binary dialect tells. A ` [n/max]` at the end of a name is the player count;
    lists of this game carry the name as published, which is kept in `packet`."""
    published = decode_legacy(name, AIO_MESSAGE_BYTES)
    counter = AIO_COUNTER.search(published)
    text = published[:counter.start() if counter else NAME_CHARACTERS][:NAME_CHARACTERS].strip()
    players, max_players = map(int, counter.groups()) if counter else (0, 0)
    return {"name": text, "description": decode_legacy(description, TEXT_CHARACTERS), "players": clamp(players),
            "max_players": clamp(max_players), "version": "", "ping_ms": None,
            "packet": (text + counter.group() if counter else text).encode("utf-8")}


def aio_published_name(server: Server) -> bytes:
    name = server.name.encode("utf-8")
    if server.unconfirmed and not server.version and (server.players or server.max_players):       # as published before the restart
        return b"%s [%d/%d]" % (name, server.players, server.max_players)
    return server.packet or name


# The lists, as bytes. The two text forms share their parts.

def aio_escape(text: str) -> bytes:
    return text.encode("utf-8").replace(b"#", b"<num>").replace(b"%", b"<percent>")


def aio_text_part(server: Server) -> bytes:
    name = aio_published_name(server).replace(b"#", AIO_NAME_HASH).replace(b"%", AIO_NAME_PERCENT)
    return b"%s#%s#%s#%d#" % (name, aio_escape(server.description), server.address.encode("ascii"), server.port)


def aio_shown(blocks: Blocks) -> Blocks:
    """If nobody is listed, the document's placeholder."""
    return blocks or [Block([Server("aio", "127.0.0.1", 27010, "", 0.0, 0.0, "No servers currently online :pepe:", description=(
        "There are currently no available servers... Maybe host your own or wait later?:O"))])]


def aio_numbered(blocks: Blocks, name: str, make: Callable[[int, List[Server]], bytes]) -> List[bytes]:
    """The blocks of a list that numbers its servers; `make(number of the first, servers)`."""
    made, first = [], 0
    for block in blocks:
        if first + len(block.servers) > AIO_SERVERS:
            break
        made.append(block.part(name, functools.partial(make, first), first))
        first += len(block.servers)
    return made


def aio_text_list(blocks: Blocks) -> bytes:
    return b"%12#" + b"".join(joined_parts(aio_shown(blocks), "aio text", aio_text_part)) + b"%"


def aio_document_list(blocks: Blocks) -> bytes:
    def make(first: int, servers: List[Server]) -> bytes:
        return b"".join([b"%d#%s" % entry for entry in enumerate(parts(servers, "aio text", aio_text_part), first)])
    return b"%12#" + b"".join(aio_numbered(aio_shown(blocks), "aio document", make)) + b"%"


def aio_binary_part(server: Server) -> bytes:
    return b"%s\0%s\0%s\0%s" % (aio_published_name(server), server.description.encode("utf-8"),
                                server.address.encode("ascii"), uintv(server.port))


def aio_binary_list(blocks: Blocks) -> bytes:
    def make(first: int, servers: List[Server]) -> bytes:
        return b"".join([struct.pack("<H", index) + entry for index, entry in enumerate(parts(servers, "aio binary", aio_binary_part), first)])
    return b"\x0c" + b"".join(aio_numbered(aio_shown(blocks), "aio binary", make))


def aio_framed_part(server: Server) -> bytes:
    return bytes((len(server.address),)) + server.address.encode("ascii") + struct.pack("<H", server.port)


def aio_framed_list(blocks: Blocks) -> bytes:
    made = aio_numbered(blocks, "aio framed", lambda first, servers: b"".join(parts(servers, "aio framed", aio_framed_part)))
    return aio_frame(b"\2" + struct.pack("<H", sum(len(block.servers) for block in blocks[:len(made)])) + b"".join(made))


def aio_text(session: AioSession, now: float) -> Optional[bytes]:
    r"""The document's examples as they are typed there; clients and servers of 2018 to 2022.

        < %1#5#%                                greeting, after a silence: the peer's id
        > 13#NAME#DESC#27010#%\n                publish           > 13#NAME#DESC#203.0.113.7#27010#%
        < %SUCCESS#13#%
        > SET_IP#203.0.113.7#%\n                its public address, from a server on this machine or network
        < %SUCCESS#SET_IP#%
        > KEEPALIVE#%\n                         < %SUCCESS#KEEPALIVE#%
        > 12#%\n                                < %12#NAME#DESC#IP#PORT#NAME#...#%
        > 12#%                                  < %12#0#NAME#DESC#IP#PORT#1#NAME#...#%
        > NEWS#%\n                              < %NEWS#TEXT#%

    The `%` before every reply flushes the five bytes of AIO_CONNECTED out of the peer's buffer. A `%` occurs inside
    servers' texts, so a message ends at `#%`. Only the newline tells the two lists apart; without one the answer waits
    AIO_NEWLINE_S for it.
    """
    session.buffer = session.buffer.lstrip(b"\r\n")
    message, end, rest = session.buffer.partition(b"#%")
    if len(message) > AIO_MESSAGE_BYTES:
        raise Malformed("a text of more than %d bytes without its end" % AIO_MESSAGE_BYTES)
    if not end:
        return None
    header, *fields = message.split(b"#")
    if header == b"12" and not rest and not session.settled(now):
        return None
    session.buffer = rest
    if header == b"12":
        return session.aio.list_for(aio_text_list if rest[:1] in (b"\r", b"\n") else aio_document_list, session, now)
    if header == b"NEWS":
        session.aio.allow(session, now)
        return session.aio.news[0]
    if header == b"13":
        if len(fields) not in (3, 4):
            raise Malformed("publish: %d fields instead of name, description, address (may be left out), port" % len(fields))
        port = fields.pop()
        if not re.fullmatch(rb"[0-9]{1,5}", port):
            raise Malformed("port: %s is not a number" % ascii(port[:16]))
        name, description, *claim = (field.replace(b"<num>", b"#").replace(b"<percent>", b"%") for field in fields)
        return b"%SUCCESS#13#%" if session.publish(name, description, b"".join(claim), int(port), now) else b""
    if header == b"SET_IP":
        return b"%SUCCESS#SET_IP#%" if fields and session.claim(fields[0], now) else b""
    if header == b"KEEPALIVE":
        session.keepalive(now)
        return b"%SUCCESS#KEEPALIVE#%"
    if b"\n" in header:             # HTTP: a web page can have its visitor's browser send any body it likes
        raise Malformed("a line break within a message")
    return b""                      # what else these programs say is meant for game servers, and harmless


def aio_binary(session: AioSession, now: float) -> Optional[bytes]:
    """The document, literally.

        < 01 00000000                               CONNECT, id
        > 0c                                        ASKFORSERVERS
        < 0c 0000 "NAME\\0" "DESC\\0" "203.0.113.7\\0" 144801 0100 …     of each server index.u16, texts, port.uintv
        > 0d "NAME\\0" "DESC\\0" "203.0.113.7\\0" 144801                 PUBLISH, port 27010; no answer
    """
    data = session.buffer
    if data[0] == 0x0C:
        session.buffer = data[1:]
        return session.aio.list_for(aio_binary_list, session, now)
    if data[0] != 0x0D:
        raise Malformed("type %d is neither ASKFORSERVERS nor PUBLISH" % data[0])
    name, description, claim, rest = (data[1:].split(b"\0", 3) + [b"", b"", b""])[:4]
    at = len(name) + len(description) + len(claim) + 4
    if at > AIO_MESSAGE_BYTES:
        raise Malformed("a publish of more than %d bytes" % AIO_MESSAGE_BYTES)
    port, end = read_uintv(data, at)
    if end > len(data):
        return None
    session.buffer = data[end:]
    session.publish(name, description, claim, port, now)
    return b""


def aio_framed(session: AioSession, now: float) -> Optional[bytes]:
    """Clients and servers since 2022. length.u24 compression.u8 (0 none, 1 zlib) payload, written in one piece:

        < 01000000 00                               connected
        > 03000000 03 8269                          publish, port 27010     < 02000000 05 03, or 06 03 reason.string16
        > 01000000 04                               keepalive               < 02000000 05 04, or 06 04 reason.string16
        > 01000000 02                               list                    < … 02 n.u16 {ip.string8 port.u16}*
        > 01000000 01                               news                    < … 01 text.string16

    Peers read a frame with one recv(4) and one recv(length), hence zlib for a long one.
    """
    found = aio_unframe(session.buffer, AIO_MESSAGE_BYTES)
    if found is None:
        return None
    payload, session.buffer = found
    if not payload:
        raise Malformed("an empty frame")
    kind = payload[0]
    if kind == 3 and len(payload) < 3:
        raise Malformed("port: expected two bytes")
    reason = "this master knows no request %d" % kind
    try:
        if kind == 1:
            session.aio.allow(session, now)
            return session.aio.news[1]
        if kind == 2:
            return session.aio.list_for(aio_framed_list, session, now)
    except Malformed as limit:              # this dialect has words for it
        reason = str(limit)
    if kind == 3:
        reason = session.aio.publish(session, "", payload[1] | payload[2] << 8, {"packet": b""}, now)
    elif kind == 4:
        session.keepalive(now)
        reason = "" if session.server else "nothing is published on this connection"
    return aio_frame(bytes((6, kind)) + aio_string16(reason.encode("utf-8")) if reason else bytes((5, kind)))


AioDialect = Callable[["AioSession", float], Optional[bytes]]           # takes one message from the buffer, answers it; None: it is not whole
AIO_DIALECTS: Dict[str, AioDialect] = {"text": aio_text, "binary": aio_binary, "framed": aio_framed}


class AioSession(Session):
    """One peer of whatever dialect; its first byte tells which."""

    def __init__(self, aio: Aio, address: str, number: int, now: float) -> None:
        self.aio, self.address, self.number = aio, address, number
        self.dialect: Optional[AioDialect] = None
        self.buffer = b""
        self.server: Optional[Server] = None            # published by this connection
        self.target: Optional[Target] = None            # of a framed server
        self.claimed = ""                               # SET_IP
        self.told: Tuple[str, int, Dict[str, Any]] = "", 0, {}          # what it published last: address, port, fields
        self.kept_alive_at: Optional[float] = None      # its last keepalive, or publish, if it sends keepalives
        self.wrong = ""                                 # raised once the answers before it are written; an exception would keep its frames
        self.greet_at: Optional[float] = None           # the text greeting is due
        self.since = now                                # when the message in the buffer began, the last one ended, or the connection began
        self.heard_at = now                             # the last byte

    def opened(self, now: float) -> bytes:
        if self.aio.dialects == ("text",):
            return self.greeting()
        if "text" in self.aio.dialects:
            self.greet_at = self.wake_at = now + self.aio.greeting_after
        return AIO_CONNECTED

    def greeting(self) -> bytes:
        return b"%%1#%d#%%" % self.number

    def receive(self, data: bytes, now: float) -> bytes:
        if data:
            if not self.buffer:
                self.since = now
            self.heard_at = now
            self.buffer += data
        return self.work(now)

    def ended(self, now: float) -> bytes:
        self.heard_at = -math.inf           # no newline follows any more
        return self.work(now)

    def settled(self, now: float) -> bool:
        """Whether the buffer has all that the peer has written; while that is open, tick() comes when it is known."""
        settled_at = self.heard_at + AIO_NEWLINE_S
        if now >= settled_at:
            return True
        self.wake_at = settled_at
        return False

    def work(self, now: float) -> bytes:
        """Answer the messages in the buffer, as many as fit one turn."""
        self.held = False
        if self.wrong:
            raise Malformed(self.wrong)
        out: List[bytes] = []
        while self.buffer and not self.done:
            if len(out) >= AIO_TURN_MESSAGES or sum(map(len, out)) >= AIO_TURN_BYTES:
                self.held = True
                break
            try:
                if self.dialect is None:
                    self.dialect = self.aio.dialect(self.buffer)
                    if self.dialect is None:
                        break
                    self.greet_at = self.wake_at = None
                answer = self.dialect(self, now)
                if answer is not None and not self.aio.rules.messages.allow(self.address, now):
                    raise Malformed("too many messages from one address")
            except Malformed as error:
                self.buffer = b""
                self.closed(now)
                self.aio.registry.note(self.address, "aio", 0, "bad packet", now, str(error))
                if not out:
                    raise
                self.wrong, self.held = str(error), True
                break
            if answer is None:
                break
            out.append(answer)
            self.since = now
        return b"".join(out)

    def publish(self, name: bytes, description: bytes, claim: bytes, port: int, now: float) -> bool:
        """List what a text or binary server tells of itself; these dialects have no words for a refusal."""
        return not self.aio.publish(self, claim.decode("ascii", "replace").strip(), port, aio_fields(name, description), now)

    def claim(self, text: bytes, now: float) -> bool:
        """SET_IP: True if the peer may say so. What is published already moves to that address."""
        address = text.decode("ascii", "replace").strip()
        if not self.aio.rules.believes(self.address, address):
            return False
        self.claimed = address
        if self.server is None:
            return True
        self.told = "", *self.told[1:]
        return not self.aio.publish(self, *self.told, now)

    def keepalive(self, now: float) -> None:
        self.kept_alive_at = now
        if self.server is not None:
            self.aio.registry.refresh(self.server, now)
        elif self.told[2] and self.aio.registry.get("aio", self.aio.address(self), self.told[1]) is None:
            self.aio.publish(self, *self.told, now)         # a ban that was lifted, or a newer connection that has ended

    def own(self, server: Optional[Server]) -> None:
        """Publish this server from now on, or nothing."""
        self.server = server
        self.kept = server is not None
        self.aio.poller.remove(self.target)
        self.target = None

    def tick(self, now: float) -> bytes:
        if self.greet_at is not None and now >= self.greet_at:
            self.greet_at = None
            return self.greeting()
        out = self.work(now)                    # a list that was asked for without a newline
        if out or self.held:
            return out
        if self.dialect is None or self.buffer:
            if now - self.since >= AIO_MESSAGE_S:
                self.closed(now)
                raise Malformed("%s in %d s" % ("no whole message" if self.buffer else "not a byte", AIO_MESSAGE_S))
        elif self.server is None:
            self.done = now - self.since >= AIO_IDLE_S
        elif self.kept_alive_at is not None:
            if now - self.kept_alive_at >= AIO_KEEPALIVE_S:
                self.done = True
                self.closed(now)
        elif now - self.server.last_seen >= AIO_SEEN_S:
            self.aio.registry.refresh(self.server, now)
        return b""

    def closed(self, now: float) -> None:
        if self.buffer and not self.held:           # as a text without its #%
            self.aio.registry.note(self.address, "aio", 0, "bad packet", now, "a message without its end")
        self.aio.registry.remove(self.server)


AIO_PARTS = ("aio text", aio_text_part), ("aio binary", aio_binary_part), ("aio framed", aio_framed_part)


class Aio(TcpProtocol, Querier):
    """AIO, three generations of it on one port; document: "AIO masterserver protocol", and what its programs became.

    The master speaks first: AIO_CONNECTED, and after a silence the text greeting. The first byte of the peer tells its
    dialect: 0c or 0d the binary one, a digit or a letter text, other control characters a frame. A server
    is listed for as long as its connection lasts; if it connects again, it belongs to the newer connection.

    A framed server is queried for its name by UDP on its game port:

        < 00                                                                                 the question
        > zlib of: 00 name.string16 desc.string16 players.u32 max.u32 version.u16            the answer

    The query has no room for a nonce: an answer counts only from the endpoint that was queried, while the query is
    open. A server that leaves it unanswered stays listed, as ADDRESS:PORT: it is connected.
    """

    game = "aio"

    def __init__(self, core: Core) -> None:
        self.registry, self.poller = core.registry, core.poller
        self.greeting_after: float = core.settings["aio.text_greeting_after"]
        self.dialects: Tuple[str, ...] = core.settings["aio.dialects"]
        self.numbers = itertools.count()
        self.owners: Dict[Server, AioSession] = {}
        self.lists: Dict[Callable[[Blocks], bytes], Rendered] = {
            make: Rendered(self.registry, self.game, make)
            for make in (aio_text_list, aio_document_list, aio_binary_list, aio_framed_list)}
        self.rules = core.registry.rules
        self.registry.watch(lambda event, server: self.disown(server), self.game, ["gone"])
        self.read(core.settings)

    def read(self, settings: Settings) -> None:
        text: str = settings.texts.get("aio.news_file") or settings["aio.news"]
        raw = "\n".join(text.strip().splitlines()).encode("utf-8", "replace")[:AIO_NEWS_BYTES]
        text = raw.decode("utf-8", "ignore")            # without a character that was cut
        # As text and framed
        self.news = b"%%NEWS#%s#%%" % aio_escape(text), aio_frame(b"\1" + aio_string16(text.encode("utf-8")))

    def session(self, address: str, now: float) -> AioSession:
        return AioSession(self, address, next(self.numbers), now)

    def dialect(self, data: bytes) -> Optional[AioDialect]:
        """What a peer speaks, by its first byte; None: that is a line's end, which may come before a text or begin a frame of ten
        bytes (0a 00 00), and the next byte tells."""
        first = data[:1]
        if data == b"\n":
            return None
        if first in (b"\x0c", b"\x0d"):
            name = "binary"
        elif first.isalnum() or first == b"\n" and data[1]:
            name = "text"
        else:
            name = "framed" if 0 < data[0] <= AIO_FRAME_BYTES else ""
        if name not in self.dialects:
            raise Malformed("the first byte, %02x, is of no dialect spoken here" % data[0])
        return AIO_DIALECTS[name]

    # Servers

    def publish(self, session: AioSession, claim: str, port: int, fields: Dict[str, Any], now: float) -> str:
        """List the server of this connection, or refresh it; gives the reason why not, or "". Without a name it keeps the one it had."""
        told, session.told = session.told, (claim, port, fields)
        if session.kept_alive_at is not None:
            session.kept_alive_at = now
        address = self.address(session)
        if session.server is not None and (session.server.address, session.server.port) != (address, port):
            self.registry.remove(session.server)
        known = self.registry.get(self.game, address, port)
        name = fields.get("name") or (known.name if known else endpoint(address, port))
        try:
            server = self.registry.hear(self.game, address, port, session.address, now, math.inf,
                                        {**fields, "name": name, "verified": "connection", "mapped": not self.claim(session)})
        except Refused as refused:
            self.registry.note(session.address, self.game, port if port <= 65535 else 0, refused.outcome, now, str(refused))
            if session.server is not None:
                session.told = told                 # which is listed
            return str(refused)
        for form, part in AIO_PARTS:            # made now, so that the first list of many new servers is quick
            parts((server,), form, part)
        self.registry.note(session.address, self.game, port, "listed", now)
        if self.owners.get(server) is not session:
            self.disown(server)
            self.owners[server] = session
            session.own(server)
        self.ask(session)
        return ""

    def ask(self, session: AioSession) -> None:
        """A framed server is queried by UDP for its name and players, at the address that the connection comes from."""
        if session.dialect is aio_framed and session.server is not None:
            session.target = self.poller.add(self, session.address, session.server.port)
            session.target.scratch = session.server

    def claim(self, session: AioSession) -> str:
        """The address that the server of this connection says it has, if it may."""
        claim = session.told[0]
        return claim if self.rules.believes(session.address, claim) else session.claimed

    def address(self, session: AioSession) -> str:
        """Where the server of this connection is listed."""
        return self.rules.listed_address(session.address, self.claim(session))

    def disown(self, server: Server) -> None:
        owner = self.owners.pop(server, None)
        if owner is not None:
            owner.own(None)

    # Lists and news

    def list_for(self, make: Callable[[Blocks], bytes], session: AioSession, now: float) -> bytes:
        self.allow(session, now)
        return self.lists[make].get(now)

    def allow(self, session: AioSession, now: float) -> None:
        if not self.rules.requests.allow(session.address, now):
            raise Malformed("too many requests from one address")

    # Queries to framed servers

    def query(self, target: Target) -> bytes:
        return b"\0"

    def answer(self, target: Target, data: bytes, now: float) -> bool:
        name, description, players, max_players, version = aio_info(data)
        server: Server = target.scratch
        name = name[:NAME_CHARACTERS].strip() or endpoint(server.address, server.port)
        try:
            self.registry.admit_name(name)
        except Refused as refused:
            self.registry.note(server.source, self.game, server.port, refused.outcome, now, str(refused))
            name = endpoint(server.address, server.port)
        self.registry.update(server, {
            "name": name, "description": description, "players": clamp(players), "max_players": clamp(max_players),
            "version": str(version), "ping_ms": round(target.ping_ms)})
        return True

    def missed(self, target: Target, now: float) -> bool:
        self.unanswered(target, now, "no answer from UDP port %d, so its name is not known" % target.port)
        return False


# =====================================================================================================================
# 8  Pages
#
# What people see: a departures board, not a dashboard. Templates, style sheet and script as raw strings; they know nothing of
# the program around them. The style sheet and the script have addresses of their own and are never formatted, so that the
# Content-Security-Policy needs no exception: no style attribute, no inline script, nothing from elsewhere. Every page is
# complete without the script.
# =====================================================================================================================

SPARK_CROWD = 4             # players that fill a sparkline's height, at least: one lone visitor is no crowd
CHART_POINTS = 366          # one per day in a year, per four minutes in a day: about one per pixel on a phone
CHART_GRIDLINES = 4         # at most, above zero: few enough to be read, not counted

# The list page, and what the operator's own `[http] template` may hold instead. Placeholders, each once or not at all:
#   $title    the title in the ini (text)             $intro    the paragraph of the ini, or nothing
#   $head     <meta>, style sheet, script, icon       $totals   "312 players on 87 servers", with the day's sparkline
#   $tabs     all games or one, with counts           $search   the form: name, minimum of players
#   $table    the list, or what to do if it is empty  $foot     the links to /check, /servers.json, ...
# A dollar sign of your own is written $$.
LIST_PAGE = string.Template("""\
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
""")

PAGE = string.Template("""\
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
""")

HEAD = string.Template("""\
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<link rel="icon" href="/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="/style.css">
<script src="/app.js" defer></script>
""")

FOOT = """\
<footer>
<nav aria-label="More"><a href="/check">Is my server listed?</a> <a href="/servers.json">JSON</a>
<a href="/servers.xml">XML</a> <a href="/metrics">Metrics</a></nav>
</footer>
"""

TOTALS = string.Template("""\
<p class="totals" id="totals" data-live>$spark$totals</p>
""")

SEARCH = string.Template("""\
<form id="search" action="/" role="search">
$game<label>Name <input type="search" name="name" value="$name" maxlength="%d" autocomplete="off" spellcheck="false"></label>
<label>Min. players <input type="number" name="players_min" value="$players_min" min="0" max="65535"></label>
<button>Search</button>
</form>
""" % NAME_CHARACTERS)

HINT = string.Template("""\
<p>$whom</p>
<pre><code>$what</code></pre>
""")

TABLE = string.Template("""\
<p id="status" role="status">$status</p>
<table role="table" aria-label="Servers" id="servers" data-total="$total"$one_game>
<thead role="rowgroup"><tr role="row"><th role="columnheader">Name<th role="columnheader">Game\
<th role="columnheader">Mode<th role="columnheader">Map<th role="columnheader">Players\
<th role="columnheader">Version<th role="columnheader">Seen\
<th role="columnheader">Address</thead>
<tbody role="rowgroup">
$rows</tbody>
</table>
<div id="empty">$empty</div>
""")

EMPTY = string.Template("""\
<section class="empty">
<h2>No servers yet</h2>
<p>The first game server to announce itself appears here.</p>
$hint
</section>
""")

# Formatted with %, every value escaped before: 2,000 of them are made in one go, Template would take three times as long. End
# tags that HTML lets one leave out are left out. The cells have no classes: the style sheet counts columns. The roles
# say what the tags say already, for browsers that forget it when the style sheet makes a row something else.
ROW = ('<tr role="row"%s><td role="cell"><a href="/server?game=%s&amp;address=%s&amp;port=%d"><bdi>%s</bdi></a>%s'
       '<td role="cell">%s<td role="cell">%s<td role="cell">%s<td role="cell"><span><b>%d</b>%s</span>%s'
       '<td role="cell">%s<td role="cell"')
ROW_END = '<td role="cell"><code>%s</code>\n'

BADGES = (      # word, what it means (shown as its title), who has it
    ("official", "Marked as official by the operator of this list", lambda server: server.official),
    ("unconfirmed", "Listed before this master was restarted, not heard from since", lambda server: server.unconfirmed),
    ("self-reported", "Not verified: this master cannot query it", lambda server: server.verified == "self-reported"),
    ("not responding", "Known to this master, but does not answer its queries", lambda server: not server.responding),
)

VERIFIED = {
    "handshake": "It answered this master's handshake",
    "query": "It answers this master's queries",
    "connection": "It keeps a connection to this master",
    "self-reported": "Not verified: everything here is what it says of itself",
}

SERVER_PAGE = string.Template("""\
<div id="state" data-live>
<h1><bdi>$name</bdi> $badges</h1>
<p class="lead">$lead</p>
$play</div>
$history<section>
<h2>Details</h2>
<dl id="facts" data-live>
$facts</dl>
</section>
""")

HISTORY = string.Template("""\
<section>
<div class="bar">
<h2>Players</h2>
<nav class="tabs" aria-label="Span">$tabs</nav>
</div>
<div id="history" data-live>
$chart</div>
</section>
""")

CHECK_PAGE = string.Template("""\
<h1>Is my server listed?</h1>
<p class="lead">What this master last received from an address, what became of it, and what to do.</p>
<form class="check" action="/check">
<label>Address <input name="address" value="$address" required autocomplete="off" spellcheck="false"
 placeholder="192.0.2.1"></label>
<label>Port <input type="number" name="port" value="$port" min="1" max="65535" placeholder="any"></label>
<button>Check</button>
</form>
<section id="listed"$live>
<h2>$verdict</h2>
$listed</section>
<section id="findings"$live>
<h2>What arrived</h2>
$findings</section>
""")

FINDING = string.Template("""\
<li><h3>$outcome</h3>
<p>$todo</p>
$arrival""")

ARRIVAL = string.Template("""\
<p class="from">$when · $protocol from <code>$peer</code></p>
""")

ERROR_PAGE = string.Template("""\
<div class="error">
<p class="status">$status</p>
<h1>$reason</h1>
<p class="lead">$hint</p>
<p><a href="/">All servers</a></p>
</div>
""")

ICON_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="6" fill="#131210"/>\
<g stroke="#f2b23a" stroke-width="3" stroke-linecap="round"><path d="M7 9h11M7 16h8M7 23h12"/>\
<path d="M24 9h1M21 16h4M24 23h1" stroke="#ece8df"/></g></svg>
"""

# One set of custom properties, twice. A test computes every pair of text and ground: 4.5:1 at least.
STYLE_CSS = r""":root {
  color-scheme: light dark;
  --ground: #fcfbf8; --raised: #f4f1ea; --ink: #1d1b18; --soft: #625d55; --line: #e3dfd6; --accent: #8a5700; --glow: #fae7bd;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #131210; --raised: #1d1b18; --ink: #ece8df; --soft: #a8a195; --line: #2d2a26; --accent: #f2b23a; --glow: #43351a;
  }
}

* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; scrollbar-gutter: stable; scroll-padding-top: 2.5rem; }     /* the table's head */
body {
  margin: 0 auto; padding: 0 1.25rem; max-width: 75rem; background: var(--ground); color: var(--ink);
  font: 400 .9375rem/1.5rem system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; font-variant-numeric: tabular-nums;
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
code, pre { font: .8rem/1.5rem ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "Liberation Mono", monospace; }
[hidden] { display: none !important; }
/* a name of combining marks alone has nowhere to break; what stands a little outside, as a focus does, is seen */
main { margin: 0 -1rem; padding: 0 1rem; overflow-x: clip; }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }

header { padding: 2.5rem 0 1.5rem; }
header.list { display: flex; flex-wrap: wrap; justify-content: space-between; align-items: end; gap: 1rem 2rem; }
header.list > div { min-width: 0; max-width: 42rem; }
header p, .lead { color: var(--soft); overflow-wrap: anywhere; }
.home { color: var(--soft); font-weight: 650; text-decoration: none; }
.totals b { color: var(--ink); font-size: 1.625rem; letter-spacing: -.015em; }
.totals svg { width: 4rem; height: 1.5rem; margin-right: .75rem; vertical-align: -.125rem; }
footer { margin: 3rem 0 2rem; padding-top: 1rem; border-top: 1px solid var(--line); color: var(--soft); font-size: .875rem; }
footer nav { display: flex; flex-wrap: wrap; gap: .25rem 1.5rem; }

/* Tabs and forms */
.bar { display: flex; flex-wrap: wrap; justify-content: space-between; align-items: center; gap: .75rem 2rem; }
.bar h2 { margin: 0; }
.tabs { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; }
.tabs:empty { display: none; }
.tabs a { padding: .25rem 0; border-bottom: 2px solid transparent; color: var(--soft); text-decoration: none; }
.tabs a:hover { color: var(--ink); }
.tabs a[aria-current] { border-color: var(--accent); color: var(--ink); font-weight: 650; }
.tabs small { margin-left: .25rem; font-size: .8125rem; font-weight: 400; color: var(--soft); }
form, form label { max-width: 100%; }
form { display: flex; flex-wrap: wrap; align-items: center; gap: .5rem 1rem; color: var(--soft); font-size: .875rem; }
form label { display: inline-flex; align-items: center; gap: .5rem; }
input, button { font: inherit; color: var(--ink); }
button:hover { color: var(--accent); }
input:not([type=checkbox]) {
  height: 2rem; padding: 0 .5rem; border: 1px solid var(--line); border-bottom-color: var(--soft); border-radius: 3px; background: var(--raised);
}
input[type=search] { width: 11rem; }
#search input[type=number] { width: 3.75rem; }
input[type=checkbox] { margin: 0; width: 1rem; height: 1rem; accent-color: var(--accent); }
::placeholder { color: var(--soft); opacity: 1; }
form button { height: 2rem; padding: 0 .875rem; border: 1px solid var(--soft); border-radius: 3px; background: none; cursor: pointer; }
form button:hover { border-color: currentColor; }
form.check { margin-top: 1.5rem; }
.check input { width: 16rem; max-width: 100%; }
.check input[type=number] { width: 6rem; }

/* The board: rows are no table's, so that those out of sight cost no layout and a phone can fold them.
   Columns: 1 name, 2 game, 3 mode, 4 map, 5 players, 6 version, 7 seen, 8 address */
#status { margin: 1rem 0 .25rem; min-height: 1.5rem; color: var(--soft); font-size: .8125rem; }
#status.old { color: var(--ink); font-weight: 650; }
#status:first-child:empty { display: none; }
table, thead, tbody { display: block; }
tr { display: flex; column-gap: .875rem; align-items: center; border-bottom: 1px solid var(--line); }
thead { position: sticky; top: 0; z-index: 1; background: var(--ground); }
tbody tr { height: 2.5rem; content-visibility: auto; contain-intrinsic-height: 2.5rem; }
tbody tr:hover { background: var(--raised); }
th { padding: .25rem 0; color: var(--soft); font-size: .8125rem; font-weight: 400; text-align: left; }
th button { margin: 0 -.25rem; padding: 0 .25rem; border: 0; background: none; color: inherit; cursor: pointer; white-space: nowrap; }
th[aria-sort] { color: var(--ink); }
th[aria-sort] button::after { content: "\00a0↑"; color: var(--accent); }
th[aria-sort=descending] button::after { content: "\00a0↓"; }
td { min-width: 0; padding: 0; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; max-height: 1.5rem; }
.one-game :is(th, td):nth-child(2) { display: none; }
td:first-child { display: flex; }
td:first-child a { min-width: 0; overflow: hidden; font-weight: 650; text-decoration: none; }
td bdi { display: block; overflow: hidden; text-overflow: ellipsis; text-align: left; }     /* its end, the left one of right-to-left words */
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
meter { display: block; width: 100%; height: 2px; appearance: none; -webkit-appearance: none; border: 0; background: var(--line); }
meter::-webkit-meter-inner-element { display: block; }
meter::-webkit-meter-bar { height: 2px; border: 0; border-radius: 0; background: var(--line); }
meter::-webkit-meter-optimum-value { background: var(--accent); }
meter::-moz-meter-bar { background: var(--accent); }
i {
  flex: none; margin-left: .5rem; color: var(--soft); font-size: .75rem; font-style: normal; font-weight: 400; letter-spacing: 0; white-space: nowrap;
}
td i { line-height: 1.625rem; }
/* the first to give way, then the name */
td i + i { flex: 0 9999 auto; overflow: hidden; text-overflow: ellipsis; }
td a, td .copy { outline-offset: -2px; }
td code { flex: 1; min-width: 0; overflow: hidden; text-overflow: ellipsis; }
td a:hover { text-decoration: underline; }
.copy {
  position: relative; flex: none; width: 1.5rem; height: 1.5rem; margin-left: .25rem; padding: 0; border: 0; background: none; color: var(--soft);
  vertical-align: top; cursor: pointer;
}
.copy::before, .copy::after { content: ""; position: absolute; width: .5625rem; height: .6875rem; border: 1px solid; border-radius: 2px; }
.copy::before { left: .3125rem; top: .3125rem; border-right-color: transparent; border-bottom-color: transparent; }
.copy::after { left: .5rem; top: .5rem; }
.copy.done::before { display: none; }
.copy.done::after {
  top: .25rem; width: .4375rem; height: .8125rem; border-width: 0 2px 2px 0; border-radius: 0; color: var(--accent); rotate: 40deg;
}
section.empty { margin: 3rem 0; max-width: 42rem; }
.empty p + p { margin-top: 1rem; }
.empty pre { margin: .25rem 0 1rem; padding: .75rem 1rem; border-left: 2px solid var(--accent); background: var(--raised); white-space: pre-wrap; }

/* Every column has its width, and leaves where there is no room for it; the name has what is left */
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
    display: grid; grid-template-columns: fit-content(5rem) fit-content(6rem) minmax(0, 1fr) auto auto; column-gap: 0; align-items: start;
    height: 4rem; padding: .5rem 0; contain-intrinsic-height: 4rem;
  }
  :is(th, td):nth-child(3) { display: block; }
  td:first-child { grid-area: 1 / 1 / 2 / 5; margin-right: .75rem; font-size: 1rem; }
  td:nth-child(5) { grid-area: 1 / 5; width: 7.25rem; }
  td:nth-child(2), td:nth-child(3), td:nth-child(4) { grid-area: 2 / 1; margin-right: .5rem; color: var(--soft); font-size: .8125rem; }
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
  display: inline-block; margin-top: 1rem; padding: .25rem .875rem; border: 1px solid var(--accent); border-radius: 3px; color: var(--accent);
  font-weight: 650; text-decoration: none;
}
.play:hover { background: var(--accent); color: var(--ground); }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 16rem), 1fr)); gap: 1rem 2rem; margin: 0; }
dl div { min-width: 0; padding-top: .5rem; border-top: 1px solid var(--line); }
dl .long { grid-column: 1 / -1; max-width: 48rem; }
dt { color: var(--soft); font-size: .8125rem; line-height: 1.25rem; }
.findings, .servers { margin: 0; padding: 0; list-style: none; }
.findings { max-width: 48rem; }
.findings li, .servers li { overflow: hidden; }
.findings li { padding: 1rem 0; border-top: 1px solid var(--line); }
.findings li:first-child { border-left: 2px solid var(--accent); padding-left: 1rem; border-top: 0; }
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
.chart path { vector-effect: non-scaling-stroke; stroke-linejoin: round; stroke-linecap: round; fill: none; }
.chart .peak { fill: var(--accent); opacity: .18; }
.chart .mean { stroke: var(--accent); stroke-width: 1.75; }
.chart circle { fill: var(--ground); stroke: var(--accent); stroke-width: 1.5; }
.chart .label { fill: var(--ink); paint-order: stroke; stroke: var(--ground); stroke-width: 4px; stroke-linejoin: round; }
.chart .latest { fill: var(--accent); font-size: .9375rem; font-weight: 650; }
.middle { text-anchor: middle; }
.end { text-anchor: end; }
@media (max-width: 40rem) {
  .chart { height: 13rem; }
  .chart .minor { display: none; }
  /* numbers too long for the margins stand in the plot: over their gridline, and over or under the line */
  .chart .tick.long { text-anchor: start; transform: translate(12px, -9px); }
  .chart .latest.long { text-anchor: end; transform: translate(-8px, -16px); }
  .chart .latest.long.high { transform: translate(-8px, 16px); }
}
@media print {
  form, .copy, footer { display: none; }
  tr, li, dl div, figure { break-inside: avoid; }
}
"""

APP_JS = r"""'use strict';
// Every page is complete without this script. It adds: search as you type, sorting, hiding, copy buttons, and a refresh
// every five seconds that touches only what has changed.

const REFRESH_MS = 5000, ANSWER_MS = 10000;             // as long as caches keep a page; two of those: packets that were lost have come again
const FADE_MS = 1600, COPIED_MS = 1500, TYPING_MS = 300;            // to be seen by who looks elsewhere; longer than from key to key
const PLAYERS_MAX = 65535;                              // as the master counts them
const COLUMNS = ['name', 'game', 'mode', 'map', 'players', 'version', 'seen', 'address'];
const PLAYERS = 4, SEEN = 6, ADDRESS = 7;
const table = document.querySelector('#servers');
const LIVE = table ? '#servers' : '[data-live]';        // a page with it is refreshed from one that has it too
const rowsOf = page => [...page.querySelectorAll('#servers tbody tr')];
const make = (tag, properties) => Object.assign(document.createElement(tag), properties);
const put = (element, text) => { if (element.textContent !== text) element.textContent = text; };

// ---- Times: relative, the exact one in the title. The master's clock counts, known from the answers' Date.

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

// ---- Copy: a button beside every <code> that one may want, which says what it did to the eye and to the ear

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
  } catch {                                             // plain http has no clipboard: copy a selection instead
    const area = make('textarea', {value: text, className: 'unseen'});
    document.body.append(area);
    area.select();
    document.execCommand('copy');
    area.remove();
    button.focus({preventScroll: true});
  }
  said.textContent = 'Copied ' + text;
  button.classList.add('done');
  setTimeout(() => { button.classList.remove('done'); said.textContent = ''; }, COPIED_MS);
});

// ---- The view: what is searched, sorted and hidden, kept in the address so that a link reproduces it

const asked = new URLSearchParams(location.search);
const view = {
  name: asked.get('name') || '', players_min: asked.get('players_min') || '',
  hide: (asked.get('hide') || '').split(',').filter(Boolean), sort: asked.get('sort') || '',
};
const NUMBERS = ['players', 'seen'];                    // sorted with the largest first
const collator = new Intl.Collator(undefined, {numeric: true, sensitivity: 'base'});
const players = row => parseInt(row.cells[PLAYERS].textContent);
const fold = text => text.toLowerCase().toUpperCase();  // ß as ss: what Python's casefold() takes for one is one
const nameOf = row => row.querySelector('bdi').textContent;
const labelOf = element => element.getAttribute('aria-label') || element.getAttribute('href');
const keyOf = row => row.querySelector('a').getAttribute('href');
let order = [];                                         // the rows in the master's order
let capped = false;                                     // the master has more rows than a page shows: it must search

function viewQuery() {
  const query = new URLSearchParams(location.search);
  for (const [key, value] of [['name', view.name], ['players_min', +view.players_min ? view.players_min : ''],
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

function wanted(row) {                                  // a part of the name or of the address, as the master searches
  // Nothing invisible is in a name, and keyboards write some behind emoji
  const name = fold(view.name.replace(/\p{DI}/gu, '').trim()), address = row.querySelector('code').textContent;
  return players(row) >= (+view.players_min || 0) && !view.hide.includes(row.className)
    && [nameOf(row), name.includes(':') ? address : address.replace(/^\[|\]?:\d+$/g, '')].some(text => fold(text).includes(name));
}

function sorted(rows) {
  const by = view.sort.replace('-', ''), column = COLUMNS.indexOf(by), sign = view.sort.startsWith('-') ? -1 : 1;
  if (column < 0) return rows;
  const value = {name: nameOf, players, seen: row => Date.parse(row.cells[SEEN].title)}[by] || (row => row.cells[column].textContent);
  const compare = NUMBERS.includes(by) ? (a, b) => a - b : collator.compare;
  return rows.map(row => [value(row), row]).sort((a, b) => sign * compare(a[0], b[0])).map(pair => pair[1]);
}

function show() {
  for (const row of order) row.hidden = !wanted(row);
  const rows = sorted(order), body = table.tBodies[0];
  let place = body.firstElementChild;
  if (rows.filter((row, index) => body.rows[index] !== row).length > 100) body.append(...rows);
  else for (const row of rows) {                        // a few rows move: leave the others where they are
    if (place && place !== row && place.nextElementSibling === row) place = row;
    if (place === row) place = row.nextElementSibling;
    else body.insertBefore(row, place);
  }
  for (const [index, head] of [...table.tHead.rows[0].cells].entries()) {
    const on = COLUMNS[index] === view.sort.replace('-', '');
    if (on) head.setAttribute('aria-sort', view.sort.startsWith('-') ? 'descending' : 'ascending');
    else head.removeAttribute('aria-sort');
  }
  tellStatus();
}

// ---- The refresh

// A page that a browser has kept, for Back or a tab that is opened again, may be days old, and does not say
const [load] = performance.getEntriesByType('navigation');
let lastText, lastUrl, lastAnswer = load && load.transferSize && Date.now(), failed = '', asking = false, pause;
const lastParts = new Map();
const number = n => n.toLocaleString('en');

function tellStatus() {
  const status = document.querySelector('#status');
  if (!status) return;
  status.classList.toggle('old', failed !== '');
  const visible = order.filter(row => !row.hidden).length, total = table && Math.max(+table.dataset.total, order.length);
  put(status, failed
    ? failed + ' This ' + (table ? 'list' : 'page') + ' is from ' + (lastAnswer ? new Date(lastAnswer).toLocaleString() : 'an earlier visit') + '.'
    : !table ? ''
    : total > order.length ? number(visible) + ' of ' + number(total) + ' servers. Search by name to find the others.'
    : !visible ? table.hidden ? '' : 'No server matches.'
    : visible < total ? number(visible) + ' of ' + number(total) + ' servers shown'
    : number(total) + (total === 1 ? ' server' : ' servers'));
}

function source(search = capped) {                      // filters stay here, unless the master has too many rows
  if (!table) return location.pathname + location.search;
  const query = new URLSearchParams(), now = viewQuery();
  for (const key of search ? ['game', 'name', 'players_min'] : ['game']) if (now.get(key)) query.set(key, now.get(key));
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
    if (index === ADDRESS || old.isEqualNode(cell)) continue;           // it never changes, and has a copy button
    if (index === SEEN) old.title = cell.title;
    old.replaceChildren(...cell.childNodes);
    if (index !== SEEN) fade(old);                      // which always moves
  }
}

function patchRows(page, fading) {
  const known = new Map(order.map(row => [keyOf(row), row]));
  order = rowsOf(page).map(fresh => {
    const key = keyOf(fresh), row = known.get(key);
    if (row) { patchRow(row, fresh); known.delete(key); return row; }
    addCopyButtons(fresh);
    if (fading) setTimeout(fade, 0, fresh);
    return fresh;
  });
  for (const gone of known.values()) gone.remove();
  table.dataset.total = page.querySelector('#servers').dataset.total;
}

function patch(page, fading) {
  const held = document.activeElement, row = held.closest('#servers tbody tr');
  const tag = held.tagName, inAddress = row && row.cells[ADDRESS].contains(held);
  for (const part of document.querySelectorAll('[data-live]')) {
    const fresh = page.getElementById(part.id), text = fresh && fresh.innerHTML, within = part.contains(held);
    if (!fresh || text === lastParts.get(part.id)) continue;
    addCopyButtons(fresh);
    const heir = within && [...fresh.querySelectorAll(tag)].find(element => labelOf(element) === labelOf(held));
    if (within && !heir) continue;
    lastParts.set(part.id, text);
    part.replaceChildren(...fresh.childNodes);
    if (heir) heir.focus({preventScroll: true});
  }
  if (table) {
    patchRows(page, fading);
    if (table.hidden !== page.querySelector('#servers').hidden) {       // the first server has come, or the last one gone
      const empty = page.querySelector('#empty');
      addCopyButtons(empty);
      document.querySelector('#empty').replaceWith(empty);
      table.hidden = !table.hidden;
    }
    show();
    if (row && row.isConnected && document.activeElement !== held)      // a row that moved or changed keeps the focus
      (held.isConnected ? held : (inAddress ? row.cells[ADDRESS] : row).querySelector(tag))
        .focus({preventScroll: true});
  }
}

function reading() {                                    // text held selected in what is refreshed: nothing may move under it
  const selection = getSelection();
  return !selection.isCollapsed
    && [...document.querySelectorAll('#servers, [data-live]')].some(part => selection.getRangeAt(0).intersectsNode(part));
}

async function refresh() {
  if (document.hidden || asking || reading()) return;
  asking = true;
  const url = source(), late = new AbortController();   // AbortSignal.timeout() is younger than many phones
  setTimeout(() => late.abort(), ANSWER_MS);
  try {
    const answer = await fetch(url, {cache: 'no-cache', signal: late.signal});
    if (!answer.ok) throw answer.status;
    const text = await answer.text(), page = text !== lastText && new DOMParser().parseFromString(text, 'text/html');
    if (page && !page.querySelector(LIVE)) throw new Error('a page of a proxy, such as one to log in');
    skew = Date.parse(answer.headers.get('date')) - Date.now() || 0;
    if (Math.abs(skew) < 2000) skew = 0;                // Date has whole seconds, and the answer was on its way
    lastAnswer = Date.now();
    failed = '';
    if (page && url === source() && !reading()) {
      if (table && url === source(false)) capped = +page.querySelector('#servers').dataset.total > rowsOf(page).length;
      if (url === source()) {                           // else: it has too many rows, ask it to search
        patch(page, url === lastUrl);
        [lastText, lastUrl] = [text, url];
      }
    }
  } catch (error) {
    failed = error === 404 && !table ? 'This server is not listed any more.'
      : error > 0 ? 'The master answers with error ' + error + '.' : 'The master does not answer.';
  }
  asking = false;
  if (!reading()) tellTimes();
  tellStatus();
  if (url !== source()) refresh();                      // the view moved on while the answer came
  if (table) keepView();                                // tabs may be new, and a browser takes no more than so many addresses at once
}

// ---- Start

for (const part of document.querySelectorAll('[data-live]')) lastParts.set(part.id, part.innerHTML);
addCopyButtons(document);

if (table) {
  order = rowsOf(document);
  capped = +table.dataset.total > order.length;
  const form = document.querySelector('#search');
  if (form) {                                           // an operator's own template may have none
    form.elements.name.value = view.name;               // a browser may put back what stood there before
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
      view.name = form.elements.name.value;
      view.players_min = String(Math.min(PLAYERS_MAX, Math.max(0, Math.ceil(form.elements.players_min.value))) || '');
      view.hide = [...form.querySelectorAll(':checked')].map(box => box.value);
      show();
      clearTimeout(pause);
      if (capped) pause = setTimeout(refresh, TYPING_MS);           // a search through many counts as several requests
      keepView();
    });
  }
  for (const [index, head] of [...table.tHead.rows[0].cells].entries()) {
    const button = make('button', {type: 'button', textContent: head.textContent});
    head.replaceChildren(button);
    button.addEventListener('click', () => {            // one way, the other way, back to the master's order
      const column = COLUMNS[index], ways = [column, '-' + column];
      if (NUMBERS.includes(column)) ways.reverse();
      view.sort = view.sort === ways[0] ? ways[1] : view.sort === ways[1] ? '' : ways[0];
      show();
      keepView();
    });
  }
  keepView();
  show();
  if (view.name || view.players_min) refresh();         // it came filtered: fetch the rest
}

if (document.querySelector(LIVE)) {
  setInterval(refresh, REFRESH_MS);
  if (!lastAnswer) refresh();
  document.addEventListener('visibilitychange', refresh);
}
"""


class Html(str):
    """Text that is HTML already; everything else is escaped by fill()."""


def fill(template: string.Template, **values: object) -> Html:
    """The template with every value in its place, escaped unless it is Html. KeyError: a value is missing."""
    return Html(template.substitute({key: value if isinstance(value, Html) else html.escape(str(value), quote=True)
                                     for key, value in values.items()}))


class Look(NamedTuple):
    """How the operator has changed the page."""

    title: str
    intro: str
    template: Optional[string.Template]      # instead of LIST_PAGE


def list_template(text: str) -> string.Template:
    """An operator's own list page from its text. ValueError says what does not parse or is unknown."""
    template = string.Template(text)
    known = ("title", "intro", "head", "totals", "tabs", "search", "table", "foot")
    try:
        template.substitute(dict.fromkeys(known, ""))
    except KeyError as error:
        raise ValueError("unknown placeholder $%s (there are: %s)" % (error.args[0], ", ".join(known))) from None
    return template


def ago(seconds: float) -> str:
    """12 -> '12 s ago'. The same steps as in the script."""
    if seconds < 1:
        return "now"
    for unit, size, following in ("s", 1, 90), ("min", 60, 5400), ("h", 3600, 129600):
        if seconds < following:
            return "%d %s ago" % (seconds // size, unit)
    return "%d d ago" % (seconds // 86400)


def utc(wall: float) -> datetime:
    return datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=wall)          # Windows converts no time before 1970


def time_tag(then: float, wall: float) -> Html:
    exact = utc(then).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Html('<time datetime="%s" title="%s">%s</time>' % (exact, exact, ago(wall - then)))


def server_link(server: Any) -> Html:
    return Html("/server?game=%s&amp;address=%s&amp;port=%d" % (urllib.parse.quote(server.game), urllib.parse.quote(server.address), server.port))


def badges(server: Any) -> Html:
    return Html("".join([' <i title="%s">%s</i>' % (title, word) for word, title, has in BADGES if has(server)]))


def plural(number: int, word: str) -> str:
    return "%s %s%s" % (format(number, ","), word, "" if number == 1 else "s")


def server_row(server: Any, spark: Html, title: str) -> Tuple[bytes, bytes]:
    """One row of the list, about 570 bytes, in two pieces: the time that the server was last seen comes between (seen_cell), as
    it moves when nothing else does. `spark` is sparkline(...), `title` the game's."""
    escape = html.escape
    address = escape(endpoint(server.address, server.port))
    bar, state = "", ""
    if server.max_players:
        bar = '/%d<meter aria-hidden="true" max="%d" value="%d"></meter>' % (server.max_players, server.max_players, server.players)
        if server.players >= server.max_players:
            state = ' class="full"'
    if not server.players:
        state = ' class="empty"'
    quote = urllib.parse.quote
    before = ROW % (
        state, quote(server.game), quote(server.address), server.port, escape(server.name) or address, badges(server), escape(title),
        escape(server.mode), escape(server.map), server.players, bar, spark, escape(server.version))
    after = ROW_END % ('<a href="iceball://%s" title="Start the game">%s</a>' % (address, address) if server.game == "iceball" else address)
    return before.encode("utf-8"), after.encode("utf-8")


def seen_cell(then: float, wall: float) -> bytes:
    """What stands between the two pieces of a row."""
    return (' title="%sZ">%s' % (utc(then).isoformat()[:19], ago(wall - then))).encode("utf-8")


def sparkline(values: Sequence[Optional[float]]) -> Html:
    """24 hourly values, None where there is none: a histogram about 100 bytes long; empty if nothing is known."""
    known = [value for value in values if value is not None]
    if not known:
        return Html("")
    crowd = max(SPARK_CROWD, max(known))
    path, level, width = ["M0 9"], 9, 0             # 9 is the ground: away. 8: here and empty. 0: the day's peak
    for value in values:
        y = 9 if value is None else 8 - round(8 * value / crowd)
        if y == level:
            width += 1
            continue
        if width:
            path.append("h%d" % width)
        path.append("V%d" % y)
        level, width = y, 1
    return Html('<svg aria-hidden="true" viewBox="0 0 24 9"><path d="%sh%dV9"/></svg>' % ("".join(path), width))


def page(look: Look, title: str, main: Html) -> Html:
    return fill(PAGE, head=fill(HEAD, title="%s · %s" % (title, look.title)), title=look.title, main=main, foot=Html(FOOT))


def tab(link: str, text: str, current: bool, count: Optional[int] = None) -> Html:
    return fill(string.Template('<a href="$link"$current>$text$count</a>\n'), link=link, text=text,
                current=Html(' aria-current="page"') if current else "",
                count="" if count is None else Html("<small>%s</small>" % format(count, ",")))


ROWS_HERE = "<rows>"                # no text has it, as texts are escaped


def list_page(titles: Dict[str, str], counts: Dict[str, int], game: str, rows: Iterable[bytes], total: int, players: int, look: Look,
              name: str = "", players_min: int = 0, hint: Html = Html(""), spark: Html = Html("")) -> bytes:
    """The list as UTF-8. titles, counts: {game id: title}, {game id: servers}; game: the one chosen, or "" for all; rows: what
    server_row() and seen_cell() give for PAGE_ROWS at most, a megabyte that is copied only once; total: how many servers match; players:
    on all of them; hint: what a game server needs to appear here, shown while there is none; spark: the day's sparkline of all players."""
    if total > PAGE_ROWS:
        status = "The first %s of %s. Search by name to find the others." % (format(PAGE_ROWS, ","), plural(total, "server"))
    else:
        status = plural(total, "server") if total else "No server matches." if name or players_min else ""
    tabs = "".join([tab("/", "All games", not game, sum(counts.values()))] + [
        tab("/?game=" + urllib.parse.quote(key), title, key == game, counts.get(key, 0)) for key, title in titles.items()])
    nothing = not total and not name and not players_min
    totals = "%s on %s" % (plural(players, "player"), plural(total, "server"))
    text = fill(
        look.template or LIST_PAGE, title=look.title, foot=Html(FOOT),
        head=fill(HEAD, title="%s · %s" % (titles.get(game, game), look.title) if game else look.title),
        intro=fill(string.Template("<p>$text</p>\n"), text=look.intro) if look.intro else "",
        totals=fill(TOTALS, spark=spark, totals=Html(re.sub("[0-9,]+", r"<b>\g<0></b>", totals))),
        tabs=Html('<nav class="tabs" id="tabs" data-live aria-label="Games">%s</nav>\n' % (tabs if len(titles) > 1 else "")),
        search=fill(SEARCH, name=name, players_min=players_min or "",
                    game=fill(string.Template('<input type="hidden" name="game" value="$game">\n'), game=game)
                    if game else ""),
        table=fill(TABLE, status=status, total=total, rows=Html(ROWS_HERE),
                   one_game=Html((' class="one-game"' if game else "") + (" hidden" if nothing else "")),
                   empty=fill(EMPTY, hint=hint) if nothing else ""))          # not hidden: a browser for text shows it
    before, *after = text.encode("utf-8").split(ROWS_HERE.encode())         # an operator's template may have it anywhere, or nowhere
    return b"".join([before] + [piece for rest in after for piece in (*rows, rest)])


def server_page(server: Any, known: Any, series: Any, span: str, wall: float, look: Look, title: str = "") -> Html:
    """One server. server: as listed now, or None; known: game, address, port, name, first_seen, last_seen (as last
    known); series: of the span ('day', 'week', 'month', 'year'), see chart(), None where no history is kept; title: the game's."""
    here = server or known
    address = endpoint(here.address, here.port)
    name = here.name or address
    game = title or here.game
    facts = [("Address", fill(string.Template("<code>$address</code>"), address=address)), ("Game", game)]
    if server:
        lead = Html(" · ".join("<bdi>%s</bdi>" % html.escape(part) for part in (game, server.mode, server.map) if part))
        count = format(server.players, ",")
        if server.max_players:
            count += " of %s" % format(server.max_players, ",")
        if server.playing is not None:
            count += ", %d of them playing" % server.playing
        facts += [("Players", count), ("Mode", server.mode), ("Map", server.map), ("Version", server.version),
                  ("Description", server.description),
                  ("Ping from this master", "" if server.ping_ms is None else "%.0f ms" % server.ping_ms),
                  ("Verified", VERIFIED[server.verified])]
        facts += [(key.replace("_", " ").capitalize(), value) for key, value in server.details.items()]
    else:
        lead = Html("Not listed now. Last seen %s. <a href=\"/check?address=%s&amp;port=%d\">Why?</a>"
                    % (time_tag(known.last_seen, wall), urllib.parse.quote(known.address), known.port))
    sampled = series and [mean for index, mean in enumerate(series.means)
               if here.first_seen - series.step < series.start + index * series.step < wall - series.step]
    if sampled:
        here_part = sum(mean is not None for mean in sampled) / len(sampled)
        facts.append(("Uptime, past " + span, "%.4g %% of the time" % (math.floor(here_part * 1000) / 10)))
    facts += [("First seen", time_tag(here.first_seen, wall)), ("Last seen", time_tag(here.last_seen, wall))]
    fact = string.Template("<div$long><dt>$key</dt><dd>$value</dd></div>\n")
    return page(look, name, fill(
        SERVER_PAGE, name=name, badges=badges(server) if server else "", lead=lead,
        play=fill(string.Template('<p><a class="play" href="iceball://$address">Play</a></p>\n'), address=address)
        if server and server.game == "iceball" else "",
        history=series and fill(HISTORY, chart=chart(series, wall), tabs=Html("".join(
            tab(Html("%s&amp;span=%s" % (server_link(here), key)), key.capitalize(), key == span) for key in SPANS))) or "",
        facts=Html("".join(fill(fact, key=key, value=value, long=Html(' class="long"' if key == "Description" else ""))
                           for key, value in facts if value))))


def check_page(address: str, port: int, state: Iterable[Tuple[str, str]], findings: Iterable[tuple], listed: Sequence[Any], wall: float,
               look: Look, lately: str = "lately") -> Html:
    """What became of what an address sent. port: 0 for any; state: (what holds for the address, what to do); findings: (when, protocol,
    address, port, outcome, what to do), the latest first; listed: the servers of this address that are listed now; wall: 0.0 if none of it
    changes with time; lately: how far the findings go back."""
    item = string.Template('<li><a href="$link"><bdi>$name</bdi></a> $badges <code>$peer</code> <small>seen $seen</small>\n')
    servers = "".join(fill(
        item, link=server_link(server), name=server.name or endpoint(server.address, server.port), badges=badges(server),
        peer=endpoint(server.address, server.port), seen=time_tag(server.last_seen, wall)) for server in listed)
    what = "".join([fill(FINDING, outcome=outcome, todo=todo, arrival="") for outcome, todo in state] + [
        fill(FINDING, outcome=outcome, todo=todo, arrival=fill(
            ARRIVAL, when=time_tag(when, wall), protocol=protocol, peer=endpoint(source, announced) if announced else source))
        for when, protocol, source, announced, outcome, todo in findings])
    whom = endpoint(address, port) if port else address
    return page(look, "Is my server listed?", fill(
        CHECK_PAGE, address=address, port=port or "", live=Html(" data-live" if wall else ""),
        verdict="Listed now: " + plural(len(listed), "server") if listed else "Nothing at %s is listed now" % whom,
        listed=Html('<ul class="servers">\n%s</ul>\n' % servers) if listed else "",
        findings=Html('<ol class="findings">\n%s</ol>\n' % what) if what else fill(string.Template(
            "<p>Nothing has arrived from $whom $lately. Is the address of this master right in the settings of the game "
            "server, and does its firewall let packets out?$more</p>\n"), whom=whom, lately=lately, more=(
                " Without the port, this page tells what came from any." if port else "") + (
                " Most game servers announce themselves by IPv4; look up that address as well." if ":" in address else ""))))


def error_page(status: int, reason: str, hint: str, look: Look) -> Html:
    return page(look, reason, fill(ERROR_PAGE, status=status, reason=reason, hint=hint))


def value_ticks(top: float) -> List[int]:
    """Round whole numbers from 0 to at least `top`, CHART_GRIDLINES above zero at most."""
    step = next(factor * 10 ** power for power in range(10) for factor in (1, 2, 5)
                if factor * 10 ** power * CHART_GRIDLINES >= top)
    return list(range(0, max(step, math.ceil(top / step) * step) + 1, step))


def time_ticks(start: float, end: float) -> List[Tuple[float, str]]:
    """Round times within a span with their words: hours in a day, days in a week, dates, months."""
    span = end - start
    if span > 100 * 86400:
        months = [utc(start).replace(day=1, hour=0, minute=0, second=0)]
        while months[-1].timestamp() < end:
            months.append((months[-1] + timedelta(days=31)).replace(day=1))
        ticks = [(month.timestamp(), "%b" if month.month > 1 else "%Y") for month in months]
    else:
        step, words = ((10800, "%H:%M") if span <= 2 * 86400 else (86400, "%a %d") if span <= 10 * 86400 else
                       (5 * 86400, "%d %b"))
        ticks = [(tick, words) for tick in range(math.ceil(start / step) * step, math.ceil(end), step)]
    return [(tick, utc(tick).strftime(words)) for tick, words in ticks if start <= tick <= end]


def chart(series: Any, wall: float) -> Html:
    """Players over time as inline SVG, about 8 kB. series: start (epoch), step (s), mean and peak (a number a step, or
    None where the server was away). The plot is stretched to the width at hand; the text around it, placed in per cent,
    keeps its size."""
    peaks = [mean if peak is None else peak for mean, peak in zip(series.means, series.peaks)]
    if all(peak is None for peak in peaks):
        return Html('<p class="lead">No history in this span yet. A sample is taken every minute.</p>\n')
    start, end = series.start, series.start + len(peaks) * series.step
    peak = max(value for value in peaks if value is not None)
    peak_at = peaks.index(peak)
    last = max(index for index, mean in enumerate(series.means) if mean is not None)
    ticks = value_ticks(peak)
    every = math.ceil(len(peaks) / CHART_POINTS)
    count = len(peaks) / every                      # points; the last may stand for fewer samples

    def x(index: float) -> str:                                   # the plot is from 6 % to 92 % of the width: numbers left and right
        return "%.5g%%" % (6 + 86 * index / len(peaks))

    def y(value: float) -> str:                                   # and from 14 % to 86 % of the height: the peak's label above
        return "%.4g%%" % (86 - 72 * value / ticks[-1])

    def height(value: float) -> str:
        return "%.4g" % (100 - 100 * value / ticks[-1])

    marks = []
    for tick in ticks:
        marks.append('<line class="%s" x1="6%%" x2="92%%" y1="%s" y2="%s"/>'
                     '<text class="%s end" x="6%%" y="%s" dx="-6" dy="4">%s</text>' % (
                         "grid" if tick else "axis", y(tick), y(tick), "tick long" if ticks[-1] > 999 else "tick", y(tick), format(tick, ",")))
    for index, (at_time, words) in enumerate(time_ticks(start, end)):
        at, minor = x((at_time - start) / series.step), " minor" * (index % 2)
        marks.append('<line class="axis%s" x1="%s" x2="%s" y1="86%%" y2="88%%"/>'
                     '<text class="middle%s" x="%s" y="95%%">%s</text>' % (minor, at, at, minor, at, words))
    line, area, drawing = [], [], False
    for index in range(math.ceil(count)):
        means = [mean for mean in series.means[index * every:(index + 1) * every] if mean is not None]
        if means:
            level = sum(means) / len(means)
            here = height(level)
            line.append(("L%d %s" if drawing else "M%d %sh.01") % (index, here))    # h.01: one sample alone is a dot
            area.append("%s%d %s" % ("L" if drawing else "M%d 100L" % index, index, height(max(
                value for value in peaks[index * every:(index + 1) * every] if value is not None))))
        elif drawing:
            area.append("V100")
        drawing = bool(means)
    area.append("V100" * drawing)
    marks.append('<svg x="6%%" y="14%%" width="86%%" height="72%%" viewBox="0 0 %g 100" preserveAspectRatio="none">'
                 '<path class="peak" d="%s"/><path class="mean" d="%s"/></svg>' % (count, "".join(area), "".join(line)))
    anchor = "" if peak_at < .08 * len(peaks) else " end" if peak_at > .92 * len(peaks) else " middle"
    peak_words = format(round(peak, 1), ",")
    marks.append('<circle cx="%s" cy="%s" r="3"/><text class="label%s" x="%s" y="%s" dy="-9">peak %s</text>' % (
        x(peak_at), y(peak), anchor, x(peak_at), y(peak), peak_words))
    # "long": more than a phone's margins hold
    latest = format(round(level, 1) if level < 10 else round(level), ",g")         # of the last point, as the line shows it
    marks.append('<text class="label latest%s%s" x="%s" y="%s" dx="6" dy="5">%s</text>' % (
        " long" if len(latest) > 2 else "", " high" if level > ticks[-1] / 2 else "", x(last), y(level), latest))
    moment = "%Y-%m-%d %H:%M"
    words = "Peak %s at %s. Latest %s, " % (peak_words, utc(start + peak_at * series.step).strftime(moment), latest)
    latest_at = min(wall, start + (last + 1) * series.step)
    return Html('<figure>\n<svg class="chart" role="img" aria-labelledby="chart-title chart-desc">'
                '<title id="chart-title">Players from %s to %s</title><desc id="chart-desc">%s%s.</desc>\n%s\n</svg>\n'
                '<figcaption>%s%s. Times are UTC.</figcaption>\n</figure>\n' % (
                    utc(start).strftime(moment), utc(end).strftime(moment), words, ago(wall - latest_at), "\n".join(marks),
                    words, time_tag(latest_at, wall)))


# =====================================================================================================================
# 9  Web
#
# The page and the lists over HTTP. http.server parses the request and formats the answer, over bytes in memory. Every answer
# carries `Length` beside `Content-Length`: the Iceball client exits without it. The same request bytes
# have the same answer until a list changes, so the common request is one look-up.
# =====================================================================================================================

GAME_TITLES = {"iceball": "Iceball", "hyperbol": "Hyperbol", "subspace": "SubSpace", "aio": "AIO"}

READABLE_BY_ALL = (("Access-Control-Allow-Origin", "*"),)
GZIPPED = ("Content-Encoding", "gzip")
SECURITY_HEADERS = (
    ("Content-Security-Policy", "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; connect-src 'self'; "
                                "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
)

JSON_TYPE, HTML_TYPE, TEXT_TYPE = "application/json; charset=utf-8", "text/html; charset=utf-8", "text/plain; charset=utf-8"
XML_TYPE = "application/xml; charset=utf-8"
# The others concern multipart bodies, which are not looked at
HEADER_DEFECTS = (email.errors.HeaderDefect, email.errors.MissingHeaderBodySeparatorDefect,
                  email.errors.FirstHeaderLineIsContinuationDefect, email.errors.MisplacedEnvelopeHeaderDefect)
RETRY_AFTER = (("Retry-After", "5"),)
METHODS_KNOWN = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT")     # others: 501


class HttpError(Exception):
    """A request that gets an error: status, and in words what was wrong."""

    def __init__(self, status: int, hint: str, headers: Tuple[Tuple[str, str], ...] = ()) -> None:
        super().__init__(hint)
        self.status, self.hint, self.headers = status, hint, headers


class Answer(NamedTuple):
    body: bytes
    type: str = TEXT_TYPE
    status: int = 200
    headers: Tuple[Tuple[str, str], ...] = ()
    etag: str = ""                  # if it has one, it is the same for everybody until a list changes: remembered, and kept by caches
    made: Optional[Made] = None     # where it comes from, and its compressed form may be kept


class Later(NamedTuple):
    """An answer that takes too long for the event loop: `job` runs in a worker, `then(result)` makes the answer of it."""

    job: Callable[[], Any]
    then: Callable[[Any], Union[Answer, Later]]
    worker: str = "lists"


class Exchange(http.server.BaseHTTPRequestHandler):
    """One request and its answer, over bytes instead of a socket."""

    protocol_version = "HTTP/1.1"
    request_version = "HTTP/1.1"
    command = "GET"
    route = "other"             # its key in ROUTES
    headers = http.client.HTTPMessage()
    waits = False               # for "100 Continue", with its body
    status = 0                  # what was answered
    client = ""                 # whose request it is, behind a proxy

    def __init__(self, head: bytes = b"") -> None:
        """`head`: request line and headers with the empty line; raises HttpError. Without one: for an answer to no request."""
        self.rfile = io.BytesIO(head)
        self.wfile = self.out = io.BytesIO()
        self.close_connection = True
        if not head:
            return
        if head.count(b"\r") != head.count(b"\r\n") or b"\0" in head:
            raise HttpError(400, "The head contains a bare carriage return or a NUL.")         # others may see a line end (RFC 9112, 2.2)
        self.raw_requestline = self.rfile.readline()         # of three words, as head_end() has seen
        if not self.raw_requestline.isascii():              # as it was typed
            self.raw_requestline = urllib.parse.quote(self.raw_requestline, safe=bytes(range(128))).encode()
        if re.search(rb"[\x1c-\x1f]", self.raw_requestline):
            raise HttpError(400, "The request line contains control characters that some take for spaces.")
        version = re.fullmatch(rb"HTTP/0*([0-9]{1,9})(\.[0-9]{1,9})?", self.raw_requestline.split()[-1])
        if not version:
            raise HttpError(400, "The version is not HTTP/NUMBER.NUMBER.")
        if version[1] != b"1" or not version[2]:            # an answer to HTTP/0.9 would have no head
            raise HttpError(505, "Of HTTP only versions 1.0 and 1.1 are spoken here.")
        self.parse_request()
        if (self.headers.get_unixfrom() or any(isinstance(defect, HEADER_DEFECTS) for defect in self.headers.defects)
                or any(not re.fullmatch(r"[!#-'*+.^_`|~0-9A-Za-z-]+", name) for name in self.headers)):
            raise HttpError(400, "A header line is not NAME: VALUE.")
        hosts = len(self.headers.get_all("Host", []))
        if hosts > 1 or not hosts and self.request_version >= "HTTP/1.1":
            raise HttpError(400, "Exactly one Host header is required.")
        if re.search(r"(^|,)\s*close\s*(,|$)", self.header("Connection"), re.IGNORECASE):     # Perl's clients say "TE, close"
            self.close_connection = True
        if self.command not in METHODS_KNOWN:
            raise HttpError(501, "The method %s is not known." % self.command[:32])
        try:
            self.target = urllib.parse.urlsplit(self.path)
        except ValueError:
            raise HttpError(400, "The path cannot be read.") from None
        # Also for http://host, as clients of a proxy ask, and for the server as such (RFC 9110, 9.3.7)
        path = "/" if (self.command, self.path) == ("OPTIONS", "*") else self.target.path or "/"
        if path in ROUTES:
            self.route = path

    def header(self, name: str) -> str:
        """Several lines with one name make one list (RFC 9110, 5.3)."""
        return ",".join(self.headers.get_all(name, []))

    def body_length(self) -> Optional[int]:
        """In bytes; None: it is chunked."""
        lengths = set(self.headers.get_all("Content-Length", []))
        if "Transfer-Encoding" in self.headers:
            if lengths or self.request_version < "HTTP/1.1":
                raise HttpError(400, "Transfer-Encoding requires HTTP/1.1, and excludes Content-Length.")
            if self.header("Transfer-Encoding").strip(" \t").lower() != "chunked":
                raise HttpError(501, "The only Transfer-Encoding known here is chunked.")
            return None
        if not lengths:
            route = ROUTES.get(self.route)
            if self.command == "POST" and route and "POST" in route.methods:        # elsewhere it is 405 or 404
                raise HttpError(411, "A POST needs a Content-Length.")
            return 0
        text = lengths.pop().strip(" \t")
        if lengths or not re.fullmatch(r"[0-9]+", text):
            raise HttpError(400, "Content-Length is not a number.")
        if len(text.lstrip("0")) > 18 or int(text) > HTTP_BODY_BYTES:
            raise HttpError(413, "At most %d bytes are accepted." % HTTP_BODY_BYTES)
        return int(text)

    def handle_expect_100(self) -> bool:
        self.waits = True
        return True

    def send_error(self, code: int, message: Optional[str] = None, explain: Optional[str] = None) -> None:
        raise HttpError(code, "%s." % message)

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        self.status = code

    def version_string(self) -> str:
        return "masterserver/" + __version__

    def response(self, answer: Answer) -> bytes:
        """The whole response; for HEAD and 304 without the body, whose length the head still tells."""
        if answer.etag and self.matches(answer.etag):
            answer = answer._replace(status=304)
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.type)
        self.send_header("Length", str(len(answer.body)))
        self.send_header("Content-Length", str(len(answer.body)))
        route = ROUTES.get(self.route)
        for name, value in answer.headers + SECURITY_HEADERS + (READABLE_BY_ALL if route and route.readable else ()):
            self.send_header(name, value)
        if answer.etag:
            self.send_header("ETag", answer.etag)
        self.send_header("Cache-Control", "public, max-age=%d" % CACHE_S if answer.etag else "no-store")
        self.send_header("Connection", "close" if self.close_connection else "keep-alive")
        self.end_headers()
        return self.out.getvalue() + (answer.body if self.command != "HEAD" and answer.status != 304 else b"")

    def matches(self, etag: str) -> bool:
        wanted = self.header("If-None-Match")
        return wanted.strip() == "*" or etag in re.findall(r'"[^"]*"', wanted)

    def takes_gzip(self) -> bool:
        takes = {}
        for coding in self.header("Accept-Encoding").lower().split(","):
            name, *parameters = (part.strip() for part in coding.split(";"))
            takes[name] = not any(re.fullmatch(r"q\s*=\s*0(\.0*)?", parameter) for parameter in parameters)
        return takes.get("gzip", takes.get("x-gzip", takes.get("*", False)))


class Route(NamedTuple):
    answer: Callable[..., Union[Answer, Later]]     # (web, request) -> answer
    methods: Tuple[str, ...] = ("GET", "HEAD", "OPTIONS")
    readable: bool = False          # by scripts of other sites


class Request(NamedTuple):
    """What a route gets to see."""

    query: Dict[str, str]
    body: bytes
    exchange: Exchange
    address: str
    now: float


class Asked(NamedTuple):
    """Which servers a list is to have."""

    game: str                   # "": of every game
    name: str = ""              # a part of their name or address
    players_min: int = 0


class Kept(NamedTuple):
    """A response that is given again to the same request bytes."""

    response: bytes
    close: bool
    counter: List[int]              # that of its route and status, in Web.requests
    client: str                     # whose limit pays, "" for whoever is connected


PROXIED = b"\0"                     # stands before what came through a proxy: without one, the same bytes may be somebody else's
HEAD_END = re.compile(rb"\n\r?\n")            # a line end before it is not told from others; to look for one takes fifteen times as long
CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n\0]{0,256})?\r\n")       # size and extensions, which mean nothing here
TRAILERS = re.compile(rb"(?:[^\r\n\0]+\r\n)*\r\n")


class HttpSession(Session):
    """One connection: HTTP/1.0 and 1.1, keep-alive, pipelining, one answer after another."""

    def __init__(self, web: Web, address: str, now: float, limited: bool = False) -> None:
        """`limited`: the connection is over a limit, and is told so in answer to its first request."""
        self.web = web
        self.address = address
        self.limited = limited
        self.proxied = address in web.trusted       # limits count its clients, not it
        self.buffer = b""
        self.exchange: Optional[Exchange] = None            # its head is read, its body not yet
        self.request_bytes = b""
        self.body_bytes = 0                                 # in the buffer; for chunks, as far as known
        self.chunks: Optional[bytearray] = None             # their contents
        self.then: Callable[[Any], Union[Answer, Later]]    # what makes an answer of the job's result
        self.edition = 0                                    # of the lists when the answer was made
        self.deadline = now + (LINGER_S if limited else HTTP_HEAD_S)

    def receive(self, data: bytes, now: float) -> bytes:
        web = self.web
        if not self.buffer and self.exchange is None and self.job is None and not self.done:
            web.turn(now)
            kept = web.memo.get(PROXIED + data if self.proxied else data)
            if kept is not None and not self.limited and web.rules.requests.allow(self.proxied and kept.client or self.address, now):
                kept.counter[0] += 1
                self.deadline = now + HTTP_IDLE_S
                self.done = kept.close
                return kept.response
        if self.done:
            return b""
        if not self.buffer and self.exchange is None:
            if not data:                        # a long answer has gone out at last: idle from here on
                self.deadline = now + HTTP_IDLE_S
            data = data.lstrip(b"\r\n")         # a blank line does not begin a request
            if data and not self.limited:
                self.deadline = now + HTTP_HEAD_S
        self.buffer += data
        return self.work(now)

    def work(self, now: float) -> bytes:
        out: List[bytes] = []
        while self.buffer or self.exchange:
            self.held = len(out) >= HTTP_TURN_REQUESTS or sum(map(len, out)) >= HTTP_PIPELINE_BYTES
            if self.done or self.job or self.held:
                break
            try:
                piece = self.step(now)
            except HttpError as error:
                piece = self.refuse(error)
            if piece is None:
                break
            out.append(piece)
        return b"".join(out)

    def step(self, now: float) -> Optional[bytes]:
        """Read one request and answer it; None: it is not whole yet, or its answer comes later."""
        if self.exchange is None:
            self.buffer, self.request_bytes = self.buffer.lstrip(b"\r\n"), b""
            if not self.buffer:
                return None
            end = self.head_end()
            if end is None:
                return None
            self.request_bytes, self.buffer = self.buffer[:end], self.buffer[end:]
            self.exchange = exchange = Exchange(self.request_bytes)
            length = exchange.body_length()
            self.body_bytes, self.chunks = length or 0, bytearray() if length is None else None
            self.deadline = now + HTTP_BODY_S
            if exchange.waits and length != 0 and not self.buffer:
                return b"HTTP/1.1 100 Continue\r\n\r\n"
        if self.chunks is not None and not self.read_chunks(self.chunks) or len(self.buffer) < self.body_bytes:
            return None
        exchange, self.exchange = self.exchange, None
        body, self.buffer = self.buffer[:self.body_bytes], self.buffer[self.body_bytes:]
        self.request_bytes += body
        if self.chunks is not None:
            body = bytes(self.chunks)
        if self.limited or self.web.leaving and not self.buffer:
            exchange.close_connection = True
        answer = self.web.answer(exchange, body, self.address, now, self.limited)
        self.edition = self.web.edition
        return self.respond(exchange, answer, now)

    def read_chunks(self, body: bytearray) -> bool:
        """Read what is here of a chunked body (RFC 9112, 7.1); True: that is all of it, with the trailers."""
        while True:
            start = self.buffer.find(b"\n", self.body_bytes) + 1
            if not start and len(self.buffer) - self.body_bytes <= HTTP_LINE_BYTES:
                return False
            line = CHUNK_LINE.fullmatch(self.buffer, self.body_bytes, start)
            if not line:
                raise HttpError(400, "A chunk does not begin with its size.")
            size = int(line.group(1), 16)
            if not size:
                break
            end = start + size + 2
            if len(body) + size > HTTP_BODY_BYTES or end > HTTP_BODY_BYTES + HTTP_HEAD_BYTES:
                raise HttpError(413, "At most %d bytes are accepted." % HTTP_BODY_BYTES)
            if len(self.buffer) < end:
                return False
            if self.buffer[end - 2:end] != b"\r\n":
                raise HttpError(400, "A chunk does not end where its size says.")
            body += self.buffer[start:end - 2]
            self.body_bytes = end
        match = HEAD_END.search(self.buffer, start - 2)
        if (match.end() if match else len(self.buffer)) - start > HTTP_HEAD_BYTES:
            raise HttpError(431, "The trailers are longer than %d bytes." % HTTP_HEAD_BYTES)
        if not match:
            return False
        if not TRAILERS.fullmatch(self.buffer, start, match.end()):
            raise HttpError(400, "A trailer line does not end as it should.")
        self.body_bytes = match.end()
        return True

    def respond(self, exchange: Exchange, answer: Union[Answer, Later], now: float) -> Optional[bytes]:
        """None: it comes later."""
        self.deadline = now + (HTTP_HEAD_S if self.buffer else HTTP_IDLE_S)         # for the next request, of which some may be here
        if isinstance(answer, Later):
            (self.job, self.then, self.worker), self.waiting = answer, exchange
            return None
        request = (PROXIED if exchange.client else b"") + self.request_bytes
        self.request_bytes, self.chunks = b"", None
        if self.edition != self.web.edition:            # the lists have changed meanwhile: only for those who have waited as well
            request += answer.etag.encode()
        kept = self.web.memo.get(request) if answer.etag else None
        if kept is not None:                # many may have waited for the same long list
            kept.counter[0] += 1
            self.done = kept.close
            return kept.response
        response = exchange.response(answer)
        count = self.web.requests[exchange.route, exchange.status]
        count[0] += 1
        self.done = exchange.close_connection
        if answer.etag:
            self.web.remember(request, Kept(response, self.done, count, exchange.client if exchange.client != self.address else ""))
        return response

    def resume(self, result: Any, now: float) -> bytes:
        if self.done:                       # it has taken too long
            return b""
        self.job, then, exchange = None, self.then, self.waiting
        del self.then, self.waiting         # the former may hold the list that it makes an answer of, and the connection may be kept for days
        try:
            if isinstance(result, (OSError, sqlite3.Error, RuntimeError, MemoryError)):         # the disk's, or because too many wait
                raise HttpError(503, "The answer cannot be made just now: %s." % error_text(result))
            if isinstance(result, Exception):
                raise result            # a fault of the program
            answer = self.web.finish(exchange, then(result))
        except HttpError as error:
            answer = self.web.refused(error, exchange)
        out = self.respond(exchange, answer, now)
        self.held = bool(out and self.buffer)           # until this answer is out
        return out or b""

    def head_end(self) -> Optional[int]:
        """Where the body begins; None: not there yet. Raises HttpError for what cannot become a request."""
        line_end = self.buffer.find(b"\n")
        line = self.buffer if line_end < 0 else self.buffer[:line_end]
        if not re.match(rb"[A-Za-z]", line):
            raise HttpError(400, "This is not an HTTP request; this port speaks HTTP without TLS.")
        if len(line) > HTTP_LINE_BYTES:
            raise HttpError(414, "The request line is longer than %d bytes." % HTTP_LINE_BYTES)
        if line_end >= 0 and len(line.split()) != 3:
            raise HttpError(400, "The request line is not METHOD PATH HTTP/VERSION.")
        match = HEAD_END.search(self.buffer)
        if (match.end() if match else len(self.buffer)) > HTTP_HEAD_BYTES:
            raise HttpError(431, "The headers are longer than %d bytes." % HTTP_HEAD_BYTES)
        return match.end() if match else None

    def refuse(self, error: HttpError) -> bytes:
        """An error after which the connection ends: what follows in it cannot be trusted to be a request."""
        exchange = self.exchange or Exchange()
        exchange.close_connection = True
        if (self.request_bytes or self.buffer).startswith(b"HEAD "):
            exchange.command = "HEAD"
        self.done = True
        self.buffer, self.exchange = b"", None
        self.web.requests["", error.status][0] += 1
        return exchange.response(self.web.refused(error, exchange))

    def ended(self, now: float) -> bytes:
        if (self.buffer or self.exchange) and not (self.done or self.job or self.held):
            return self.refuse(HttpError(400, "The request ended before it was complete."))
        return b""

    def dismissed(self, now: float) -> bytes:
        self.done = True
        self.web.requests["", 429][0] += 1
        return self.web.dismissal()

    def tick(self, now: float) -> bytes:
        if now < self.deadline or self.done:
            return b""
        if self.job:
            self.waiting.close_connection = True        # the worker is still at this one
            return self.resume(TimeoutError("it takes too long"), now)
        if self.buffer or self.exchange:
            return self.refuse(HttpError(408, "The request did not arrive in time."))
        self.done = True
        return b""


ANNOUNCED_TTL_S = 120               # a server of the operator's own game must be announced again within it; `announce` does so after half of it
REFUSED_STATUS = {"bad packet": 400, "limit": 429}      # banned, refused names and anything else: 403


def announced_fields(exchange: Exchange, body: bytes) -> Dict[str, Any]:
    """The fields of an announcement, a form or a JSON object; raises HttpError and Refused."""
    type = exchange.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if exchange.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise HttpError(415, "An announcement must not be compressed.")
    form_type = type in ("application/x-www-form-urlencoded", "")
    if type == "application/json" or form_type and body[:1] == b"{":        # curl -d calls all that it sends a form
        try:
            fields = json.loads(body.decode("utf-8"))
        except (ValueError, RecursionError):
            raise Refused("bad packet", "the body is not JSON in UTF-8") from None
        if not isinstance(fields, dict):
            raise Refused("bad packet", 'the body is not a JSON object such as {"game": "hyperbol", "port": 27888}')
        return {name: value for name, value in fields.items() if value is not None}
    if form_type:
        try:
            # Bytes kept as Latin-1: curl under Windows sends the console's encoding, which is not always UTF-8
            form = urllib.parse.parse_qsl(body.decode("latin-1"), keep_blank_values=True, encoding="latin-1", max_num_fields=50)
            return {name: decode_legacy(value.encode("latin-1"), TEXT_CHARACTERS) for name, value in form}
        except ValueError as error:
            raise Refused("bad packet", "the form cannot be read: %s" % error) from None
    raise HttpError(415, "Expected application/x-www-form-urlencoded or application/json, not %s." % ascii(type[:100]))


def announced_text(fields: Mapping[str, Any], name: str, characters: int = NAME_CHARACTERS) -> str:
    value = fields.get(name, "")
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise Refused("bad packet", "%s is not a text" % name)
    return clean(str(value), characters)


def announced_number(fields: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = fields.get(name)
    if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,9}\s*", value) or isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise Refused("bad packet", "%s: expected a number from %d to %d" % (name, low, high))
    return value


class Made:
    """The bytes of a list, their ETag, and their compressed form once somebody has asked for it."""

    def __init__(self, body: bytes, etag: str) -> None:
        self.body, self.etag = body, etag
        self.gzipped: Optional[bytes] = None

    def packed(self) -> bytes:
        if self.gzipped is None:
            self.gzipped = gzip.compress(self.body, GZIP_LEVEL, mtime=0)        # the same bytes whenever it is done
        return self.gzipped


class Rendering:
    """One list as bytes, made once per edition if anybody asks for it. A long one is made in a worker: what belongs together is replaced in
    one piece, as the event loop may be answering with it."""

    def __init__(self, name: str, make: Callable[[Blocks, float], bytes]) -> None:
        self.make = make
        self.edition = 0
        self.made = Made(b"", "")
        # Random, as the numbers start over with the program and with other settings; hashing the bytes takes as long as making them
        self.tag = '"%x-%s-%%d"' % (CHANCE.getrandbits(32), name)
        self.number = 0                     # moves only when the bytes do

    def refresh(self, edition: int, blocks: Blocks, now: float) -> Made:
        if edition != self.edition:
            body = self.make(blocks, now)
            if body != self.made.body:
                self.number += 1
                self.made = Made(body, self.tag % self.number)
            self.edition = edition
        return self.made


# json.dumps() makes an encoder at each call, a quarter of the time that one server takes
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def to_json(value: Any) -> bytes:
    """Compact, raw UTF-8: the Iceball client fails on any \\u escape. Texts are clean, so none is needed."""
    return ENCODER.encode(value).encode("utf-8")


def iceball_json(server: Server) -> bytes:
    """A server in /master.json: both documents' keys, all of them texts or numbers; `official` only if true."""
    fields: Dict[str, Any] = {
        "name": server.name, "address": server.address, "port": server.port, "players_current": server.players,
        "players_max": server.max_players, "mode": server.mode, "map": server.map, "version": server.version, "basedir": server.mode}
    if server.official:
        fields["official"] = True
    return to_json(fields)


def server_xml(server: Server) -> bytes:
    """A server in /servers.xml and in an exported file, as the script in Hyperbol's document writes it."""
    fields: Dict[str, Any] = {"ip": server.address, "port": server.port, "responding": int(server.responding)}
    if server.responding:
        fields.update(servername=server.name, gametype=server.mode, playercount=server.players,
                      maxplayercount=server.max_players, mapname=server.map, version=server.version,
                      skill=server.details.get("skill", "0"), flavor=server.flavor,
                      ping_milliseconds=round(server.ping_ms or 0))
    attributes = "".join(' %s="%s"' % (name, html.escape(str(value))) for name, value in fields.items())
    return b"<server%s/>\n" % attributes.encode("utf-8")


def servers_xml(servers: Iterable[bytes], wall: float) -> bytes:
    """The document around them; `wall` is the time in seconds since 1970."""
    made = utc(wall).replace(microsecond=0)
    return b'<?xml version="1.0" encoding="UTF-8"?>\n<serverlist localtime="%s" gmtime="%s">\n%s</serverlist>\n' % (
        made.astimezone().isoformat().encode(), made.isoformat().encode(), b"".join(servers))


class Web(TcpProtocol):
    """The HTTP side: routes, renderings, and what is remembered of both."""

    speaks_first = False

    def __init__(self, core: Core) -> None:
        self.core = core
        self.settings = core.settings
        self.registry = core.registry
        self.epoch = 0.0            # wall clock minus monotonic clock, told by the event loop
        # All lists change together, from one edition to the next: when a server has changed, but at most once in RENDER_S,
        # and after RENDER_STALE_S anyway. What is remembered is of this edition, and no older than RENDER_S and a tick.
        self.edition = 1
        self.edition_at = -math.inf
        self.edition_generation = -1
        self.recent: Mapping[Key, Sequence[Optional[int]]] = {}        # what stands in the rows …
        self.parts_epoch = 0.0          # … and what the times in /servers.json are counted from
        self.memo: Dict[bytes, Kept] = {}
        self.memo_bytes = 0
        self.last_words = b""
        self.renderings: Dict[Tuple[str, str], Rendering] = {}
        self.requests: Dict[Tuple[str, int], List[int]] = collections.defaultdict(lambda: [0])          # how many, by route and status
        self.rules = core.registry.rules
        self.leaving = False
        self.read(core.settings)

    def leave(self) -> None:
        self.leaving = True
        self.forget()                   # answers that keep the connection open

    def session(self, address: str, now: float) -> HttpSession:
        return HttpSession(self, address, now)

    def refusal(self, address: str, now: float) -> HttpSession:
        return HttpSession(self, address, now, limited=True)

    def read(self, settings: Settings) -> None:
        self.trusted = Networks(settings["http.trusted_proxies"])
        self.titles: Dict[str, str] = {**GAME_TITLES, **settings["games"]}
        self.renderings.clear()
        self.edition_at = -math.inf             # what is being made by the old settings is of an edition that is over
        self.registry.forget_parts()                # titles stand in them

    def client(self, exchange: Exchange, address: str) -> str:
        """Whose request it is: behind a trusted proxy the last address in X-Forwarded-For, with or without a port, that is not such a proxy."""
        for text in reversed(exchange.header("X-Forwarded-For").split(",")):
            if address not in self.trusted:
                break
            try:
                address = read_public(re.sub(r"^([0-9.]+|\[.*\]):[0-9]+$", r"\1", text.strip())) or address
            except ValueError:
                break
        return address

    # What is remembered

    def tick(self, now: float) -> None:
        if now - self.edition_at >= RENDER_S:
            self.forget()               # answers tell the time (Date), whatever else they tell
        recent, self.recent = self.recent, self.core.recent()
        if recent is not self.recent and (recent or self.recent):
            self.registry.forget_part("row")
        if abs(self.epoch - self.parts_epoch) > CLOCK_STEP_S:
            self.parts_epoch = self.epoch
            self.registry.forget_part("servers.json")

    def turn(self, now: float) -> None:
        """Begin a new edition if it is time."""
        age = now - self.edition_at
        if age >= RENDER_S and self.edition_generation != self.registry.generation or age >= RENDER_STALE_S:
            self.edition += 1
            self.edition_at = now
            self.edition_generation = self.registry.generation
            self.forget()

    def dismissal(self) -> bytes:
        """To a client who may not have asked yet; the same for all of a second, as they come in floods."""
        if not self.last_words:
            nobody = Exchange()
            self.last_words = nobody.response(self.refused(HttpError(429, "Too many connections at once; wait a few seconds.", RETRY_AFTER), nobody))
        return self.last_words

    def forget(self) -> None:
        self.last_words = b""
        self.memo.clear()
        self.memo_bytes = 0

    def remember(self, request: bytes, kept: Kept) -> None:
        if len(request) > HTTP_MEMO_REQUEST_BYTES or self.leaving:
            return
        size = len(request) + len(kept.response)
        if self.memo_bytes + size > HTTP_MEMO_BYTES:
            self.forget()
        self.memo_bytes += size
        self.memo[request] = kept

    # Answers

    def answer(self, exchange: Exchange, body: bytes, address: str, now: float, limited: bool = False) -> Union[Answer, Later]:
        if address in self.trusted:
            address = exchange.client = self.client(exchange, address)
        route = ROUTES.get(exchange.route)
        try:
            if limited or not self.rules.requests.allow(address, now):
                if not exchange.client:         # what is pipelined behind it costs as much as an answer; a proxy's connection is shared
                    exchange.close_connection = True
                raise self.too_many(address)
            if route is None:
                raise HttpError(404, "There is no page %s here." % exchange.target.path[:100])
            methods = ", ".join(route.methods)
            if exchange.command not in route.methods:
                raise HttpError(405, "%s takes %s." % (exchange.route, methods), (("Allow", methods),))
            if exchange.command == "OPTIONS":
                return Answer(b"", headers=(("Allow", methods),) + (
                    (("Access-Control-Allow-Methods", methods), ("Access-Control-Max-Age", "86400")) if route.readable else ()))
            query = dict(urllib.parse.parse_qsl(exchange.target.query, keep_blank_values=True, errors="replace"))
            return self.finish(exchange, route.answer(self, Request(query, body, exchange, address, now)))
        except HttpError as error:
            return self.refused(error, exchange)

    def too_many(self, address: str) -> HttpError:
        if self.rules.verdict(address) == BLOCKED:              # whose proxy is not
            return HttpError(403, "Requests from %s are not answered here." % address)
        return HttpError(429, "Too many requests from %s; wait a few seconds." % address, RETRY_AFTER)

    def refused(self, error: HttpError, exchange: Exchange) -> Answer:
        """An error in the form that its reader expects."""
        reason = exchange.responses[error.status][0]
        if exchange.route == "/announce":
            body, type = to_json({"listed": False, "reason": error.hint}), JSON_TYPE
        elif exchange.route == "/master.json" and error.status in (403, 429):
            body, type = self.master_json_frame([]), JSON_TYPE
        elif "text/html" in exchange.header("Accept"):
            body, type = error_page(error.status, reason, error.hint, self.look()).encode("utf-8"), HTML_TYPE
        else:
            body, type = ("%d %s\n%s\n" % (error.status, reason, error.hint)).encode("utf-8"), TEXT_TYPE
        return Answer(body, type, error.status, error.headers)

    def finish(self, exchange: Exchange, answer: Union[Answer, Later]) -> Union[Answer, Later]:
        """Compress where the client takes it and it pays: small ones here, large ones in a worker."""
        if isinstance(answer, Later) or answer.status != 200 or len(answer.body) < GZIP_MIN_BYTES or GZIPPED in answer.headers:
            return answer
        answer = answer._replace(headers=answer.headers + (("Vary", "Accept-Encoding"),))
        if not exchange.takes_gzip():
            return answer
        packed = answer._replace(headers=answer.headers + (GZIPPED,),
                                 etag=answer.etag and answer.etag[:-1] + '-gz"')
        made = answer.made or Made(answer.body, "")

        def done(body: bytes) -> Answer:
            return packed._replace(body=body)
        return done(made.packed()) if made.gzipped or len(made.body) <= GZIP_INLINE_BYTES else Later(made.packed, done)

    def rendered(self, name: str, asked: Asked, request: Request, type: str, make: Callable[[Blocks, float], bytes],
                 rows: int = sys.maxsize) -> Union[Answer, Later]:
        """The list `name`, made by `make(blocks, now)`, which uses at most `rows` servers of them. A game's whole list is kept for everybody."""
        known = asked.game in ("", *self.titles)
        self.turn(request.now)

        def answer(made: Made) -> Answer:
            return Answer(made.body, type, etag=made.etag, made=made)
        if not known or asked != Asked(asked.game):
            return self.searched(asked, request, self.registry.in_blocks(asked.game) if known else [], make, answer)
        rendering = self.renderings.get((name, asked.game))
        if rendering is None:
            rendering = self.renderings[name, asked.game] = Rendering("%s-%s" % (name, asked.game), make)
        if rendering.edition == self.edition:
            return answer(rendering.made)
        blocks = self.registry.in_blocks(asked.game)
        job = functools.partial(rendering.refresh, self.edition, blocks, request.now)
        taken = min(rows, sum(len(block.servers) for block in blocks))
        return Later(job, answer) if taken > RENDER_INLINE_SERVERS else answer(job())

    def searched(self, asked: Asked, request: Request, blocks: Blocks, make: Callable[[Blocks, float], bytes],
                 answer: Callable[[Made], Answer]) -> Union[Answer, Later]:
        """A list of those among `blocks` that are asked for. It is for one client, who must not fill a worker with it: a long search counts
        as several requests."""
        def job() -> Made:
            part = asked.name.casefold()
            found = Block([])
            found.servers = [server for block in blocks for server in block.servers
                             if server.players >= asked.players_min and is_called(server, part)]
            body = make([found], request.now)
            made = Made(body, etag_of(body))
            if looked_at > SEARCH_INLINE_SERVERS and request.exchange.takes_gzip():
                made.packed()               # here: bodies that wait for a turn of their own in the worker are many, and megabytes each
            return made
        looked_at = sum(len(block.servers) for block in blocks)
        if looked_at <= SEARCH_INLINE_SERVERS:
            return answer(job())
        tokens = min(looked_at / RENDER_INLINE_SERVERS, self.settings["limits.requests"][1] - 1)
        if not self.rules.requests.allow(request.address, request.now, tokens):
            raise self.too_many(request.address)
        return Later(job, answer, "searches")

    def master_json(self, request: Request) -> Union[Answer, Later]:
        return self.rendered("master.json", Asked("iceball"), request, JSON_TYPE,
                             lambda blocks, now: self.master_json_frame(joined_parts(blocks, "master.json", iceball_json, b",\n")))

    def master_json_frame(self, servers: List[bytes]) -> bytes:
        return b'{"version":%d,"iceball_version":%d,"servers":[%s]}' % (
            ICEBALL_HBVERSION, self.settings["iceball.version"], b",\n".join(servers))

    def servers_json(self, request: Request) -> Union[Answer, Later]:
        """Every field of every server; ?game=, ?name= (a part of it), ?players_min=."""
        return self.rendered("servers.json", list_asked_for(request), request, JSON_TYPE, self.servers_json_frame)

    def servers_json_frame(self, blocks: Blocks, now: float) -> bytes:
        epoch = self.epoch

        def make(servers: List[Server]) -> bytes:
            made = parts(servers, "servers.json", lambda server: server_json(server, self.epoch))       # not `epoch`: tick() may have come since
            return b"".join([piece for server, part in zip(servers, made) for piece in (part, b"%d},\n" % (server.last_seen + epoch))])
        rows = [block.part("servers.json", make, now // RENDER_TIMES_S) for block in blocks]
        if rows:
            rows[-1] = rows[-1][:-2]        # no comma after the last
        return b"".join([b'{"generated":%d,"generation":%d,"servers":[' % (now + epoch, self.registry.generation), *rows, b"]}\n"])

    def look(self) -> Look:
        text = self.settings.texts.get("http.template", "")
        return Look(self.settings["http.title"], self.settings["http.intro"], list_template(text) if text else None)

    def servers_xml(self, request: Request) -> Union[Answer, Later]:
        game = request.query.get("game", "hyperbol")
        if game not in self.titles:
            raise HttpError(404, "There is no game %s here." % ascii(game[:100]))
        return self.rendered("servers.xml", Asked(game), request, XML_TYPE,
                             lambda blocks, now: servers_xml(joined_parts(blocks, "servers.xml", server_xml), self.epoch + now))

    def announce(self, request: Request) -> Answer:
        """An announcement by HTTP; the address is the connection's."""
        source, now, game, port = request.address, request.now, "announce", 0
        header = request.exchange.header            # browsers send these two, the first only over HTTPS and to their own machine
        if (header("Sec-Fetch-Site") or header("Origin")) not in ("", "none", "same-origin", "http://" + header("Host")):
            raise HttpError(403, "A web page of another site may not announce servers here.")
        try:
            sent = announced_fields(request.exchange, request.body)
            named = announced_text(sent, "game")
            games = [*self.core.announcers, *self.settings["games"]]
            if named not in games:
                raise Refused("bad packet", "game: expected one of %s, not %s" % (", ".join(games), ascii(named)))
            game = named
            port = announced_number(sent, "port", 1, 65535)
            fields: Dict[str, Any] = {}
            for name in sent.keys() & {"name", "mode", "map", "version", "description"}:
                fields[name] = announced_text(sent, name, TEXT_CHARACTERS if name == "description" else NAME_CHARACTERS)
            for name in sent.keys() & {"players", "max_players"}:
                fields[name] = announced_number(sent, name, 0, PLAYERS_MAX)
            action = announced_text(sent, "action")
            if action == "stop":
                return self.stop(game, source, port, now)
            if action not in ("", "announce"):
                raise Refused("bad packet", "action: expected stop, or nothing")
            querier = self.core.announcers.get(game)
            before = self.registry.heard.get((source, game, port))
            if querier is not None:
                querier.announced(source, port, fields, now)
            else:
                self.announce_own(game, source, port, fields, now)
        except Refused as refused:
            self.registry.note(source, game, port, refused.outcome, now, str(refused))
            raise HttpError(REFUSED_STATUS.get(refused.outcome, 403), str(refused)) from None
        server = self.registry.get(game, self.rules.listed_address(source), port)
        if server is not None and server.responding:
            return Answer(to_json({"listed": True, "ttl": ANNOUNCED_TTL_S}), JSON_TYPE)
        asked = port if querier is None else port + querier.offset
        reason = "waiting for its answer to a query on UDP port %d" % asked
        if before is not None and before[2]:            # who has only this answer would wait for ever
            reason += "; the last time: " + before[2]
        return Answer(to_json({"listed": False, "ttl": ANNOUNCED_TTL_S, "reason": reason}), JSON_TYPE)

    def announce_own(self, game: str, source: str, port: int, fields: Dict[str, Any], now: float) -> None:
        """A game of the operator's own: its servers cannot be queried, so each is listed with what it says."""
        address = self.rules.listed_address(source)
        if self.registry.get(game, address, port) is None:
            fields.setdefault("name", "")
            self.registry.note(source, game, port, "listed", now)
        if fields.get("name") == "":
            fields["name"] = endpoint(address, port)
        self.registry.hear(game, address, port, source, now, ANNOUNCED_TTL_S, {**fields, "verified": "self-reported"})

    def stop(self, game: str, source: str, port: int, now: float) -> Answer:
        """action=stop: only the address that a server is announced from can end it."""
        server = self.registry.get(game, self.rules.listed_address(source), port)
        querier = self.core.announcers.get(game)
        target = None if querier is None else self.core.poller.find(querier, source, port)
        if target is not None:
            target.announced = False
            if not target.known:
                self.core.poller.remove(target)
        if server is not None and server.source == source:
            self.registry.remove(server)
        elif target is None:
            raise HttpError(404, "No server from %s on port %d is listed here as %s." % (source, port, game))
        self.registry.note(source, game, port, "stopped", now)
        return Answer(to_json({"listed": False, "ttl": ANNOUNCED_TTL_S, "reason": "stopped"}), JSON_TYPE)

    def page(self, request: Request) -> Union[Answer, Later]:
        asked = list_asked_for(request)
        if asked.game not in ("", *self.titles):
            raise HttpError(404, "There is no game %s here." % ascii(asked.game[:100]))
        return self.rendered("page", asked, request, HTML_TYPE, lambda blocks, now: self.list_page(blocks, asked, now), PAGE_ROWS)

    def list_page(self, rows: Blocks, asked: Asked, now: float) -> bytes:
        game, name, players_min = asked
        epoch = self.epoch
        wall = now + epoch
        counts = {id: len(listed) for id, listed in list(self.registry.games.items()) if listed}
        seen = functools.lru_cache(maxsize=None)(lambda second: seen_cell(second, wall))           # once for all of a second

        def make(servers: List[Server]) -> bytes:
            # As of now, as these are kept: a reload or another hour may have come since the page was begun
            made = parts(servers, "row", lambda server: server_row(
                server, sparkline(self.core.recent().get(server.key, ())), self.titles.get(server.game, server.game)))
            return b"".join([piece for server, (before, after) in zip(servers, made)
                             for piece in (before, seen(int(server.last_seen + epoch)), after)])
        total = sum(len(block.servers) for block in rows)
        shown: List[bytes] = []
        room = PAGE_ROWS
        for block in rows:
            if room < len(block.servers):
                shown.append(make(block.servers[:room]))
                break
            shown.append(block.part("row", make, now // RENDER_TIMES_S))
            room -= len(block.servers)
        if name or players_min:
            players = sum(server.players for block in rows for server in block.servers)
        else:
            players = sum(self.registry.census[id][1] for id in counts if game in ("", id))
        return list_page({id: title for id, title in self.titles.items() if id in counts or id == game}, counts, game, shown,
                         total, players, self.look(), name, players_min, self.hint(game),
                         sparkline(() if name or players_min else day_total(self.core.recent(), [game] if game else counts)))

    def hint(self, game: str) -> Html:
        """What a game server needs to appear here."""
        public = self.settings["server.public_address"]
        there = {listener.protocol for listener in self.core.listeners if (":" in listener.host) == (":" in public)}
        return Html("".join(fill(HINT, whom=whom, what=what) for name, whom, what in contact_lines(
            self.core.listeners, lambda name: public if public and name in there else "THIS-HOST", self.settings["games"]) if game in ("", name)))

    def server(self, request: Request) -> Union[Answer, Later]:
        game, address, port = server_asked_for(request)
        span = span_asked_for(request)
        listed = self.registry.get(game, address, port)
        wall = request.now + self.epoch
        storage = self.core.storage

        def job() -> Tuple[Optional[Remembered], Series]:
            assert storage is not None
            return storage.known(game, address, port), storage.history(game, address, port, span, wall)

        def then(found: Tuple[Optional[Remembered], Optional[Series]]) -> Answer:
            known, series = found
            if listed is None and (known is None or not address):
                raise HttpError(404, "No server %s of %s is known here." % (endpoint(address, port), game))
            shown = listed and as_shown(listed, self.epoch)
            if shown and known:             # it may have been here before it was listed this time
                shown.first_seen = min(shown.first_seen, known.first_seen)
            return Answer(server_page(shown, known and remembered(game, address, port, known), series, span, wall,
                                      self.look(), self.titles.get(game, game)).encode("utf-8"), HTML_TYPE)
        return Later(job, then, "disk") if storage else then((None, None))

    def history_json(self, request: Request) -> Union[Answer, Later]:
        """The player counts of one server, or with a game alone of all its servers: ?game=&address=&port=&span=day|week|month|year."""
        one = "address" in request.query or "port" in request.query
        game, address, port = server_asked_for(request) if one else (request.query.get("game", ""), "", 0)
        if not game:
            raise HttpError(400, "game is required; for one server address and port as well.")
        span = span_asked_for(request)
        storage = self.core.storage
        if storage is None:
            raise HttpError(404, "This master keeps no history ([server] database is empty).")
        wall = request.now + self.epoch

        def then(series: Series) -> Answer:
            return Answer(to_json({"game": game, "address": address, "port": port, "span": span, "start": series.start, "step": series.step,
                                   "players": series.means, "peak": series.peaks}), JSON_TYPE)
        return Later(lambda: storage.history(game, address, port, span, wall), then, "disk")

    def check(self, request: Request) -> Union[Answer, Later]:
        """What became of what an address sent."""
        text = request.query.get("address", "").strip()[:100] or request.address
        port = whole_number(request, "port", 0, 65535)
        try:
            if re.search(r"\.[0-9]+:|\]:", text):           # as the lists have it, and their copy button
                text, port = read_numeric_endpoint(text)
            address = canonical(read_address(text))
        except ValueError:
            return Answer(check_page(text, port, [("That is not an IP address", "A server's address is a number such as 203.0.113.7.")],
                                     [], [], 0.0, self.look()).encode("utf-8"), HTML_TYPE, 400)
        addresses = {address, self.rules.listed_address(address)}
        blocks = self.registry.in_blocks()

        def find() -> List[Server]:
            return [server for block in blocks for server in block.servers
                    if (server.address in addresses or server.source == address) and port in (0, server.port)]
        then = functools.partial(self.checked, address, port, addresses, request.now)
        return Later(find, then, "searches") if self.registry.total > SEARCH_INLINE_SERVERS else then(find())

    def checked(self, address: str, port: int, addresses: Set[str], now: float, listed: List[Server]) -> Answer:
        """The page, once it is known who is listed."""
        # Not every packet of a listed server is noted; its source is told only to those who ask by that
        heard = [(server.source if server.source == address else server.address, server.game, server.port, server.last_seen,
                  listed_outcome(server), "") for server in listed if server.responding]
        known = {(game, port) for _, game, port, _, outcome, _ in heard if outcome != "unconfirmed"}
        ban = self.rules.ban(*addresses)
        for (source, protocol, announced), (at, outcome, detail) in self.registry.heard.items():
            if (source in addresses or self.rules.listed_address(source) == address) and (not port or announced in (0, port)):
                if outcome in ("announced", "listed") and (protocol, announced) in known or outcome == "banned" and ban:
                    continue
                heard.append((source, protocol, announced, at, "gone" if outcome == "listed" else outcome, detail))
        heard.sort(key=lambda finding: -finding[3])
        titles, epoch = self.titles, self.epoch
        findings = [(at + epoch, titles.get(protocol, protocol),
                     address if self.rules.listed_address(source) == address else source,         # not which machine is behind a public address
                     announced, *outcome_words(outcome, detail)) for source, protocol, announced, at, outcome, detail in heard[:CHECK_FINDINGS]]
        state = [outcome_words("banned", ban)] if ban else []
        if any(self.rules.datagrams.spent(source, now) for source in addresses):
            state.append(outcome_words("flood", "%g" % self.settings["limits.datagrams"][0]))
        notes = self.registry.heard
        back = now - next(iter(notes.values()))[0] if len(notes) >= HEARD_SOURCES else math.inf
        lately = "in the last %d s (so much arrives now that this page looks back no further)" % back if back < HEARD_BACK_S else "lately"
        return Answer(check_page(address, port, state, findings, [as_shown(server, epoch) for server in listed], now + epoch,
                                 self.look(), lately).encode("utf-8"), HTML_TYPE)

    def healthz(self, request: Request) -> Answer:
        """200 as long as it serves; `trouble` says what does not work."""
        return Answer(to_json({"status": "trouble" if self.core.health else "ok", "trouble": dict(self.core.health),
                               "servers": self.registry.total, "version": __version__}) + b"\n", JSON_TYPE)


def etag_of(body: bytes) -> str:
    return '"%s"' % hashlib.blake2b(body, digest_size=8).hexdigest()


def fixed(text: str, type: str) -> Answer:
    body = text.encode("utf-8")
    return Answer(body, type, etag=etag_of(body))


def whole_number(request: Request, name: str, low: int, high: int) -> int:
    """A number in the query, 0 if there is none."""
    text = request.query.get(name, "").strip()
    if not text:
        return 0
    if not re.fullmatch(r"[0-9]{1,6}", text) or not low <= int(text) <= high:
        raise HttpError(400, "%s must be a number from %d to %d." % (name, low, high))
    return int(text)


def is_called(server: Any, name: str) -> bool:
    """Is `name`, casefolded, a part of its name or of its address? The script has the same rule (wanted)."""
    return name in server.name.casefold() or name in (endpoint(server.address, server.port) if ":" in name else server.address)


def list_asked_for(request: Request) -> Asked:
    return Asked(request.query.get("game", ""), clean(request.query.get("name", "")), whole_number(request, "players_min", 0, PLAYERS_MAX))


def server_asked_for(request: Request) -> Key:
    try:
        address = canonical(read_address(request.query.get("address", "")))
    except ValueError:
        address = ""
    port = whole_number(request, "port", 1, 65535)
    if not address or not port:
        raise HttpError(400, "game, address and port are required, the address as a number such as 203.0.113.7.")
    return request.query.get("game", ""), address, port


def span_asked_for(request: Request) -> str:
    span = request.query.get("span", "day")
    if span not in SPANS:
        raise HttpError(400, "span must be one of %s." % ", ".join(SPANS))
    return span


def as_shown(server: Server, epoch: float) -> Server:
    """A server as pages show it: its times are the wall clock's."""
    shown = copy.copy(server)
    shown.first_seen, shown.last_seen = server.first_seen + epoch, server.last_seen + epoch
    return shown


def remembered(game: str, address: str, port: int, known: Remembered) -> types.SimpleNamespace:
    """A server that has left, as pages show it."""
    name = clean(str(stored_fields(known.fields)[0] or ""))
    return types.SimpleNamespace(game=game, address=address, port=port, name=name, first_seen=known.first_seen, last_seen=known.last_seen)


def day_total(recent: Mapping[Key, Sequence[Optional[int]]], games: Iterable[str]) -> List[Optional[int]]:
    """The last day's hourly player counts of these games together."""
    days = [recent[game, "", 0] for game in games if (game, "", 0) in recent]
    return [sum(value or 0 for value in hour) if any(value is not None for value in hour) else None for hour in zip(*days)]


JSON_DETAILS = ("arenas", "factions", "skill", "flags")


def server_json(server: Server, epoch: float) -> bytes:
    """A server in /servers.json, up to the value of `last_seen`, which moves even if the server does not change."""
    fields = {
        "game": server.game, "address": server.address, "port": server.port, "name": server.name, "mode": server.mode, "map": server.map,
        "version": server.version, "players": server.players, "max_players": server.max_players, "playing": server.playing,
        "description": server.description, "official": server.official, "priority": server.priority, "flavor": server.flavor,
        "verified": server.verified, "unconfirmed": server.unconfirmed, "responding": server.responding,
        "ping_ms": None if server.ping_ms is None else round(server.ping_ms, 1)}
    fields.update({name: server.details.get(name, "") for name in JSON_DETAILS})
    fields["first_seen"] = int(server.first_seen + epoch)
    return to_json(fields)[:-1] + b',"last_seen":'


# What /check says about what became of a packet: a title, and what to do, with the detail noted then.
OUTCOMES = {
    "announced": ("Announced, but the answer did not come back",
                  "This master answered and is waiting for the game server's reply. If that does not change, a firewall or router between the game "
                  "server and here lets packets out but not in: open UDP, or forward the game's port."),
    "waiting": ("It has to wait",
                "It answers, but many others are waiting to be queried. It gets its turn when it announces itself again, within a minute."),
    "version": ("Wrong version", "This master does not list %s. Another version of the game server is needed."),
    "bad packet": ("A packet that cannot be read", "What is wrong with it: %s. If the port is the one for this game, update the game "
                                                   "server, or fix what announces it."),
    "silent": ("It does not answer queries", "There was %s. Open that UDP port in the firewall and forward it in the router."),
    "banned": ("Banned", "The operator of this master has excluded this address: %s. If that is a mistake, ask its operator."),
    "limit": ("Over the limit", "It is not listed: %s. Stop one of the others, or ask this master's operator for more."),
    "flood": ("Too many packets", "More than %s packets per second come from this address, and the rest are not read. Does a game server "
                                  "announce itself in a loop? If many share the address, ask this master's operator for more."),
    "name": ("The name is refused", "Not under this name: %s. Give the server another name."),
    "password": ("Another password", "It is not accepted: %s. Wait, or set the former password again."),
    "stopped": ("Signed off", "The game server said that it was stopping."),
    "listed": ("Listed", "All is well."),
    "private": ("Listed under a private address", "Players elsewhere cannot reach it. This master's operator can name its public address "
                                                  "in [server] public_address or [address_map]."),
    "ipv6": ("Listed under an IPv6 address", "The page shows it, but the list that this game's players get has room for IPv4 addresses only. "
                                             "Let the game server announce itself by IPv4."),
    "unconfirmed": ("Not heard since a restart", "It was listed before this master was restarted, and stays for a while. Is the game server "
                                                 "running, and does it still announce itself here?"),
    "gone": ("No longer listed", "It was listed then, and has since fallen silent, or this master's settings no longer allow it. Is the game "
                                 "server running, and does it still announce itself here?"),
}
IPV4_LISTS = "subspace", "hyperbol"         # games whose own lists have room for no other address


def listed_outcome(server: Server) -> str:
    """Where a listed server stands, as one of OUTCOMES."""
    if server.unconfirmed:
        return "unconfirmed"
    if server.address in LOCAL:
        return "private"
    return "ipv6" if ":" in server.address and server.game in IPV4_LISTS else "listed"


def outcome_words(outcome: str, detail: str) -> Tuple[str, str]:
    title, advice = OUTCOMES.get(outcome, (outcome, "%s"))
    return title, advice.replace("%s", detail or "nothing more is known")


# What to put into a game server's settings, by protocol
CONTACTS = {
    "iceball": ("Iceball servers, in svsave/pub/server.json", '"heartbeat_send": true, "heartbeat": [["%(host)s", %(port)d]]'),
    "subspace": ("SubSpace zones (asss)", "Directory:Server1 = %(host)s, port %(port)d"),
    "aio": ("AIO servers", "master server %(host)s, port %(port)d"),
}


def contact_lines(listeners: Iterable[Any], host: Callable[[str], str], games: Mapping[str, str]) -> List[Tuple[str, str, str]]:
    """(game, whom it is for, line for the settings of its game servers, or to run beside them) of what listens and of the operator's own
    `games`; of several ports of one protocol the last takes announcements. `host` gives the address to name for a protocol."""
    ports = {listener.protocol: listener.port for listener in listeners}
    page = next((endpoint(host("http"), listener.port) for listener in listeners if listener.protocol == "http"), "")
    by_http = {**({"hyperbol": "Hyperbol"} if "hyperbol" in ports else {}), **games}
    return [(game, whom, line % {"host": host(game), "port": ports[game]}) for game, (whom, line) in CONTACTS.items() if game in ports] + [
        (game, title + " servers", "python3 masterserver.py announce --game %s --port PORT %s" % (game, page))
        for game, title in by_http.items() if page]


def metrics_text(web: Web) -> str:
    """The Prometheus text format, version 0.0.4."""
    core = web.core
    out: List[str] = []

    def family(name: str, kind: str, help: str, samples: Iterable[Tuple[Mapping[str, Any], float]]) -> None:
        out.append("# HELP masterserver_%s %s\n# TYPE masterserver_%s %s\n" % (name, help, name, kind))
        for labels, value in samples:
            inside = ",".join('%s="%s"' % (label, str(text).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
                              for label, text in labels.items())
            out.append("masterserver_%s%s %s\n" % (name, "{%s}" % inside if inside else "", repr(value)))

    for field, help in TALLY_HELP.items():
        family(field + "_total", "counter", help, [({"protocol": name}, getattr(tally, field)) for name, tally in core.tallies.items()])
    census = [(game, list(counts)) for game, counts in web.registry.census.items()]
    for position, (name, help) in enumerate((("servers", "Listed servers."), ("players", "Players on listed servers."),
                                             ("playing", "Players in the game rather than watching."))):
        family(name, "gauge", help, [({"game": game}, counts[position]) for game, counts in census])
    family("http_requests_total", "counter", "HTTP requests by route and status.",
           [({"route": route or "none", "status": status}, count[0]) for (route, status), count in web.requests.items()])
    family("generation", "gauge", "How often a list has changed: a number that grows.", [({}, web.registry.generation)])
    family("trouble", "gauge", "1 while something does not work.", [({"where": where}, 1) for where in core.health])
    for name, value in core.gauges.items():
        family(name, "gauge", GAUGE_HELP[name], [({}, value)])
    family("info", "gauge", "The program.", [({"version": __version__}, 1)])
    return "".join(out)


TALLY_HELP = {
    "received": "Packets and pieces of requests received.", "sent": "Packets and answers sent.", "bytes_in": "Bytes received.",
    "bytes_out": "Bytes sent.", "malformed": "Packets and connections that broke their protocol.",
    "limited": "Packets, connections and requests turned away by a limit.", "unsent": "Packets that the system refused to send.",
    "errors": "Packets and connections ended by a fault of the program.", "connections": "Connections accepted."}
GAUGE_HELP = {
    "loop_delay_seconds": "The longest round of the event loop in the last second.",
    "loop_delay_max_seconds": "The longest round of the event loop in the last minutes.",
    "connections": "Open connections."}

ROUTES = {
    "/": Route(Web.page),
    "/index.html": Route(Web.page),
    "/server": Route(Web.server),
    "/check": Route(Web.check),
    "/style.css": Route(lambda web, request: fixed(web.settings.texts.get("http.stylesheet") or STYLE_CSS, "text/css; charset=utf-8")),
    "/app.js": Route(lambda web, request: fixed(APP_JS, "text/javascript; charset=utf-8")),
    "/icon.svg": Route(lambda web, request: fixed(ICON_SVG, "image/svg+xml")),
    "/robots.txt": Route(lambda web, request: fixed("User-agent: *\nDisallow: /server\nDisallow: /check\n", TEXT_TYPE)),
    "/master.json": Route(Web.master_json, readable=True),
    "/servers.json": Route(Web.servers_json, readable=True),
    "/history.json": Route(Web.history_json, readable=True),
    "/metrics": Route(lambda web, request: Answer(metrics_text(web).encode("utf-8"), "text/plain; version=0.0.4; charset=utf-8")),
    "/healthz": Route(Web.healthz),
    "/servers.xml": Route(Web.servers_xml, readable=True),
    "/announce": Route(Web.announce, ("POST", "OPTIONS")),
}

# =====================================================================================================================
# 10  The table of protocols
#
# To add a game: write its class in section 7, add a row here, its settings in section 3 and its title in section 9
# (without one no list finds it by `?game=`), put its packets into the tests; README.md shows how. The listener's port is
# the setting plus `offset`; where the setting is empty, the row is left out.
# =====================================================================================================================

class Row(NamedTuple):
    name: str
    transport: str                  # udp or tcp
    setting: str                    # its port, or ports; "" stands for any free port
    offset: int
    make: Callable[[Core], Union[UdpProtocol, TcpProtocol]]


PROTOCOLS = (
    Row("iceball", "udp", "iceball.port", 0, Iceball),
    Row("hyperbol", "tcp", "hyperbol.port", 0, Hyperbol),
    Row("subspace", "udp", "subspace.port", 0, SubSpaceList),
    Row("subspace", "udp", "subspace.port", 1, SubSpacePing),
    Row("aio", "tcp", "aio.port", 0, Aio),
    Row("http", "tcp", "http.ports", 0, Web),
    Row("poll", "udp", "", 0, lambda core: core.poller),        # last: the others may just have named servers
)

# =====================================================================================================================
# 11  Event loop
#
# Sockets, threads and the clock; but for the tools of section 12, which may block, nothing else has them. One thread serves every listener
# and connection, with one time for all that a wake-up brings, or for 10 ms of it. Four more do what takes long: one has the disk, one makes
# and compresses long lists, one searches them, one resolves names.
# =====================================================================================================================

WINDOWS = os.name == "nt"
DYNAMIC_PORTS = range(49152, 65536)         # of nobody in particular (RFC 6335)
FREE_RUN_TRIES = 100                # for ports in a row; on a machine with half of its ports taken, one try in four succeeds
SO_RCVBUFFORCE = 33                 # Linux, for a privileged process: past net.core.rmem_max; Python has no name for it
# A dead peer is found after two minutes, by the last (in milliseconds) while sent data is unacknowledged: then the others do not count
KEEP_ALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 120_000))
DESCRIPTORS_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
TEXT_FILE_CHARACTERS = 1 << 18      # of a template, a stylesheet or the news
LOGGED_EVENTS = 20                  # lines a second for servers that come and go: a line costs as much as listing a server …
LOGGED_EVENTS_RATE = 2, 1200        # … and in the long run, a second / at once: one that comes and goes all the time must not fill the disk either
LOOP_DELAY_FADES = 0.99             # a second: the longest delay is remembered for some minutes
RELOAD_LOOK_S = 3.0                 # how often the ini is looked at


class StartError(Exception):
    """The server cannot start; the text says what to change."""


class Listener(NamedTuple):
    """One bound socket, as in the ready file."""

    protocol: str
    transport: str
    host: str
    port: int


# --- Datagrams, connections and threads ------------------------------------------------------------------------------

Received = Tuple[Sequence[bytes], Sequence[Peer], Sequence[Any]]       # data, peers, and the peers in the form that the socket's send() takes
Answers = List[Tuple[bytes, Any]]               # data, and the peer in that form


class MessageVector:
    """Many datagrams in one system call each way: recvmmsg(2) and sendmmsg(2) of 64-bit Linux, by ctypes, with buffers made once.

    For IPv4 sockets. An announcement of a listed server costs a tenth to a fifth less than by recvfrom() and sendto(). send() takes peers
    as their `struct sockaddr_in`, 16 bytes, as it came.
    """

    HEADER = struct.Struct("@PI4xPNPNi4xI4x")   # struct mmsghdr: name, its length, vector, its length, control, its length, flags, bytes
    PIECE = struct.Struct("@PN")                # struct iovec: base, length
    NAME_BYTES = 16                             # struct sockaddr_in: family, port, address, zeros; all but the first in network order

    @classmethod
    def make(cls) -> Optional[MessageVector]:
        """None where there is no such thing, or where the system refuses it."""
        with contextlib.suppress(NameError, AttributeError, OSError):
            if sys.platform == "linux" and struct.calcsize("P") == 8 and sys.implementation.name == "cpython":      # PyPy's is slower
                return cls(ctypes.CDLL(None, use_errno=True))
        return None

    def __init__(self, library: Any) -> None:
        """`library`: a ctypes.CDLL. Raises AttributeError if it has no such calls, OSError if the system refuses them."""
        self.receive_call, self.send_call = library.recvmmsg, library.sendmmsg
        for call in self.receive_call, self.send_call:
            call(-1, None, 0, 0, None)
            if ctypes.get_errno() != errno.EBADF:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        count = DRAIN_DATAGRAMS
        self.data = ctypes.create_string_buffer(count * MAX_DATAGRAM_BYTES)     # of what came, and then of what goes
        self.begins = range(0, count * MAX_DATAGRAM_BYTES, MAX_DATAGRAM_BYTES)
        (self.headers, self.pieces, self.names), (self.out_headers, self.out_pieces, self.out_names) = (
            [ctypes.create_string_buffer(count * size) for size in (self.HEADER.size, self.PIECE.size, self.NAME_BYTES)] for _ in "io")
        for headers, pieces, names in ((self.headers, self.pieces, self.names), (self.out_headers, self.out_pieces, self.out_names)):
            for number, begin in enumerate(self.begins):
                self.PIECE.pack_into(pieces, number * self.PIECE.size, ctypes.addressof(self.data) + begin, MAX_DATAGRAM_BYTES)
                self.HEADER.pack_into(headers, number * self.HEADER.size,
                                      ctypes.addressof(names) + number * self.NAME_BYTES, self.NAME_BYTES,
                                      ctypes.addressof(pieces) + number * self.PIECE.size, 1, 0, 0, 0, 0)
        words = self.HEADER.size // 4
        self.lengths = memoryview(self.headers).cast("B").cast("I")[words - 2::words]
        self.out_data, self.out_named = memoryview(self.data).cast("B"), memoryview(self.out_names).cast("B")
        out_pieces = memoryview(self.out_pieces).cast("B").cast("Q")
        self.out_begins, self.out_lengths = out_pieces[::2], out_pieces[1::2]
        # The text of an address takes five times as long to make as to look up
        self.peer = functools.lru_cache(LIMITER_SOURCES)(lambda name: (socket.inet_ntoa(name[4:8]), name[2] << 8 | name[3]))

    def name(self, peer: Peer) -> bytes:
        return struct.pack("=H2s4s8x", socket.AF_INET, peer[1].to_bytes(2, "big"), socket.inet_aton(peer[0]))

    def receive(self, sock: socket.socket) -> Received:
        """Up to DRAIN_DATAGRAMS of those that wait."""
        count = self.receive_call(sock.fileno(), self.headers, DRAIN_DATAGRAMS, socket.MSG_DONTWAIT, None)
        if count <= 0:
            return [], [], []
        data: Any = self.data
        size = self.NAME_BYTES
        named: Any = self.names[:count * size]
        names = [named[at:at + size] for at in range(0, count * size, size)]
        return [data[begin:begin + length] for begin, length in zip(self.begins, self.lengths[:count].tolist())], list(map(self.peer, names)), names

    def send(self, sock: socket.socket, answers: Answers) -> Tuple[int, int]:
        """How many of them the system took, and their bytes."""
        lengths = [len(data) for data, _ in answers]
        size, count = sum(lengths), len(answers)
        if count > DRAIN_DATAGRAMS or size > len(self.out_data):
            some, others = self.send(sock, answers[:count // 2]), self.send(sock, answers[count // 2:])
            return some[0] + others[0], some[1] + others[1]
        self.out_data[:size] = b"".join([data for data, _ in answers])
        self.out_named[:count * self.NAME_BYTES] = b"".join([name for _, name in answers])
        self.out_begins[:count] = array.array("Q", itertools.accumulate([ctypes.addressof(self.data)] + lengths[:-1]))
        self.out_lengths[:count] = array.array("Q", lengths)
        done = sent = 0
        while done < count:
            taken = self.send_call(sock.fileno(), ctypes.byref(self.out_headers, done * self.HEADER.size), count - done, 0)
            if taken <= 0:              # this one: no room, no route, no such port; the peer asks again
                size -= lengths[done]
                done += 1
            else:
                done += taken
                sent += taken
        return sent, size


def failed(error: Exception, tally: Tally, peer: str, name: str, data: bytes = b"") -> None:
    """A packet or a connection that the protocol could not read, which is nothing special, or that it failed on, which is a fault."""
    if isinstance(error, Malformed):
        tally.malformed += 1
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s %s malformed: %s%s", peer, name, error, ": " + ascii(data[:48]) if data else "")
    else:
        tally.errors += 1
        log.error("%s %s: a fault of the program%s", peer, name, ": " + ascii(data[:600]) if data else "", exc_info=error)


class Datagrams:
    """A UDP socket and its protocol."""

    def __init__(self, name: str, sock: socket.socket, protocol: UdpProtocol, tally: Tally, limiter: Limiter,
                 vector: Optional[MessageVector] = None) -> None:
        self.name, self.sock, self.protocol, self.tally, self.limiter = name, sock, protocol, tally, limiter
        self.vector = vector if sock.family == socket.AF_INET and protocol.datagram_bytes == MAX_DATAGRAM_BYTES else None

    def ready(self, now: float) -> None:
        allow, handle, vector, tally = self.limiter.allow, self.protocol.datagram, self.vector, self.tally
        data, peers, names = vector.receive(self.sock) if vector else self.receive()
        tally.received += len(data)
        tally.bytes_in += sum(map(len, data))
        allowed = [allow(peer[0], now) for peer in peers]
        if not all(allowed):
            tally.limited += allowed.count(False)
            data, peers, names = (list(itertools.compress(column, allowed)) for column in (data, peers, names))
        answers: Answers = []
        for packet, peer, name, answer in zip(data, peers, names, self.protocol.repeated(data, peers, now)):
            if answer is not None:
                answers.append((answer, name))
                continue
            try:
                for reply, to in handle(packet, peer, now):
                    answers.append((reply, name if to is peer else vector.name(to) if vector else to))
            except Exception as error:
                failed(error, tally, endpoint(*peer[:2]), self.name, packet)
        if answers:
            sent, size = vector.send(self.sock, answers) if vector else self.send_all(answers)
            tally.sent += sent
            tally.bytes_out += size
            tally.unsent += len(answers) - sent

    def receive(self) -> Received:
        """As in MessageVector, for any socket; send_all() takes peers as they are."""
        data, peers, size = [], [], self.protocol.datagram_bytes
        room = 1 << 16 if WINDOWS else size             # there a datagram that is longer is an error, and lost
        for _ in range(DRAIN_DATAGRAMS):
            try:
                packet, peer = self.sock.recvfrom(room)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:         # Windows: an earlier answer met a closed port (ConnectionResetError)
                continue
            data.append(packet[:size])
            peers.append(peer)
        return data, peers, peers

    def send_all(self, answers: Answers) -> Tuple[int, int]:
        sent = size = 0
        for data, peer in answers:
            try:
                size += self.sock.sendto(data, peer)
            except (OSError, OverflowError):        # no room, no route, no such port: the peer asks again
                continue
            sent += 1
        return sent, size

    def send(self, data: bytes, to: Peer) -> bool:
        sent, size = self.send_all([(data, to)])
        self.tally.sent += sent
        self.tally.bytes_out += size
        return sent > 0


class Connection:
    """A TCP connection and its session: bounded in what it may hold, how long it may stall, and never ended by a reset."""

    def __init__(self, loop: Loop, sock: socket.socket, address: str, session: Session, tally: Tally, name: str, now: float) -> None:
        self.loop, self.sock, self.address, self.session, self.tally, self.name = loop, sock, address, session, tally, name
        self.source = source_key(address)
        self.out: Union[bytes, memoryview] = b""    # what waits for room
        self.out_since = self.progress_at = self.placed_at = now
        self.events = 0                     # what the selector watches for
        self.writing = False                # room to write is waited for
        self.working = False                # the session's job is with a worker
        self.eof = False                    # the peer sends no more
        self.linger_until = 0.0             # not 0: our last byte is out, what comes is read away until then
        self.linger_bytes = LINGER_BYTES
        self.woken_at: Optional[float] = None       # the timer that the session asked for last

    def read(self, now: float) -> None:
        try:
            data = self.sock.recv(RECV_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close(now)
            return
        if self.linger_until:
            self.linger_bytes -= len(data)
            if not data or self.linger_bytes < 0:
                self.close(now)
            return
        if not data:
            self.eof = True
            self.watch()
            self.call(self.session.ended, now)
            return
        tally = self.tally
        tally.received += 1
        tally.bytes_in += len(data)
        self.place(now)
        try:                            # as call() does: that would cost a kept connection's list 2 to 4 % more
            answer = self.session.receive(data, now)
        except Exception as error:
            answer = self.failed(error)
        self.give(answer, now)

    def place(self, now: float) -> None:
        self.placed_at = now
        self.loop.placed(self)

    def call(self, method: Callable[..., bytes], *arguments: Any) -> None:
        """Let the session work; the last argument is the time."""
        try:
            answer = method(*arguments)
        except Exception as error:
            answer = self.failed(error)
        self.give(answer, arguments[-1])

    def failed(self, error: Exception) -> bytes:
        """Bad input ends the connection just as a fault does."""
        failed(error, self.tally, self.address, self.name)
        self.session.done = True
        return b""

    def give(self, data: bytes, now: float) -> None:
        """Write what the session gives, and do what else it asks for."""
        session = self.session
        if session.job is not None and not self.working:
            self.working = True
            job = session.job               # for nobody once it has taken too long: doing it would delay those behind it
            self.loop.workers[session.worker].submit(lambda: None if session.done else job(), self.resumed, WORKER_JOBS)
            if self.events:
                self.watch()
        if session.wake_at is not None and session.wake_at != self.woken_at:
            self.woken_at = session.wake_at
            self.loop.wake_at(self.woken_at, self)
        if data:
            if self.out:
                self.out = bytes(self.out) + data
            else:
                self.out_since = now
                self.write(data, now)
        elif not self.out and (session.done or (session.held or self.eof) and not self.writing):
            self.settle(now)

    def resumed(self, result: Any, now: float) -> None:
        self.working = False
        if self.sock.fileno() >= 0:
            self.place(now)             # what came meanwhile is read only now
            self.call(self.session.resume, result, now)
            if self.sock.fileno() >= 0 and not self.linger_until:
                self.watch()

    def writable(self, now: float) -> None:
        if self.sock.fileno() < 0:          # closed, to make room, after the selector had seen it
            return
        if self.out:
            self.write(self.out, now)
        else:
            self.settle(now)

    def write(self, out: Union[bytes, memoryview], now: float) -> None:
        try:
            sent = self.sock.send(out)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.close(now)
            return
        self.tally.bytes_out += sent
        if sent == len(out):
            self.tally.sent += 1
            if self.out:
                self.out = b""
            session = self.session
            if self.writing or session.done or session.held or self.eof:
                self.settle(now)
            return
        self.out = memoryview(out)[sent:]
        if sent:
            self.progress_at = now
            self.place(now)
        if not self.writing:
            self.watch()

    def settle(self, now: float) -> None:
        """Nothing waits to be written: go on, or come to the end."""
        session = self.session
        if self.writing:                # a later round of the loop than the one in which this was to be written
            self.writing = False
            if not session.done:
                self.call(session.receive, b"", now)        # what was held back while the output was full
                if self.writing or self.sock.fileno() < 0:
                    return
            self.watch()
        if session.done:
            if not self.linger_until:
                self.finish(now)
        elif session.held:
            self.watch()
        elif self.eof and not self.working:
            self.close(now)

    def watch(self) -> None:
        """Tell the selector what to wait for. Nothing is read while output waits or is being made: that bounds both."""
        self.writing = bool(self.out) or self.session.held and not self.session.done
        self.loop.watch(self, selectors.EVENT_WRITE if self.writing else 0 if self.eof or self.working else selectors.EVENT_READ)

    def finish(self, now: float) -> None:
        """Everything is written: end our side, and read away what still comes, for closing with unread input sends a reset."""
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self.close(now)
            return
        if self.eof:
            self.close(now)
            return
        self.linger_until = now + LINGER_S
        self.loop.watch(self, selectors.EVENT_READ)

    def tick(self, now: float) -> None:
        if self.linger_until:
            if now >= self.linger_until:
                self.close(now)
        elif self.out:
            if now - max(self.progress_at, self.out_since) >= OUTPUT_STALL_S or now - self.out_since >= OUTPUT_TOTAL_S:
                self.close(now)
        else:
            sent = self.tally.sent
            self.call(self.session.tick, now)
            if self.tally.sent > sent:          # greeted: its request comes now
                self.placed_at = now

    def busy(self, now: float) -> bool:
        """Something is on its way, or is soon."""
        return bool(self.out or self.working or self.session.held or now - self.placed_at < STOP_FRESH_S
                    or self.session.wake_at is not None and self.session.wake_at > now)

    def dismiss(self, now: float) -> None:
        """Room must be made: close, after the last words if they can go at once."""
        if not self.linger_until and not self.out:
            self.call(self.session.dismissed, now)
        self.close(now)

    def close(self, now: float) -> None:
        if self.sock.fileno() < 0:
            return
        self.loop.forget(self)
        self.sock.close()
        try:
            self.session.closed(now)
        except Exception as error:
            failed(error, self.tally, self.address, self.name)


class Acceptor:
    """A listening socket and its protocol."""

    def __init__(self, loop: MasterServer, name: str, sock: socket.socket, protocol: TcpProtocol, tally: Tally) -> None:
        self.loop, self.name, self.sock, self.protocol, self.tally = loop, name, sock, protocol, tally
        self.paused_until = 0.0

    def ready(self, now: float) -> None:
        while self.take(now) and time.monotonic() - now < TURN_S:           # those who have asked already are answered at once
            pass

    def take(self, now: float) -> bool:
        """The next connection; False if there is none."""
        try:
            sock, peer = self.sock.accept()
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            if error.errno in DESCRIPTORS_SHORT:
                self.pause(now, error)
                return False
            return True             # the peer has gone already …
        if not peer:                # … as macOS tells it
            sock.close()
            return True
        if self.loop.health.pop("descriptors", None):
            log.info("%s: connections are accepted again", self.name)
        try:
            self.loop.accepted(self, sock, canonical(peer[0]), now)
        except BaseException:
            sock.close()
            raise
        return True

    def pause(self, now: float, error: OSError) -> None:
        """Out of descriptors: what waits stays in the backlog, and readiness would spin the loop."""
        if "descriptors" not in self.loop.health:
            log.warning("%s: no new connections for now: %s", self.name, error.strerror)
            self.loop.health["descriptors"] = str(error.strerror)
        if not self.paused_until:
            self.loop.selector.unregister(self.sock)
        self.paused_until = now + ACCEPT_PAUSE_S

    def tick(self, now: float) -> None:
        if self.paused_until and now >= self.paused_until:
            self.loop.selector.register(self.sock, selectors.EVENT_READ, self.ready)        # may fail too; then it is tried again
            self.paused_until = 0.0

    def leave(self, now: float) -> None:
        """Accept those who have connected already, whom closing the listener would reset, and nobody else."""
        try:
            for _ in range(BACKLOG):
                if not self.take(now):
                    break
                if time.monotonic() - now >= TURN_S:
                    now = time.monotonic()
                    self.loop.bound_output(now)
        finally:
            if not self.paused_until:
                self.loop.selector.unregister(self.sock)
            self.paused_until = 0.0
            self.sock.close()


class Worker:
    """A thread for what can block. `done(result, now)` is called in the event loop; the result may be an exception."""

    def __init__(self, name: str, wake: Callable[[], None]) -> None:
        self.name = name
        self.wake = wake
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.results: collections.deque[Any] = collections.deque()
        self.thread: Optional[threading.Thread] = None

    def submit(self, job: Callable[[], Any], done: Callable[[Any, float], None], most: float = math.inf) -> None:
        """With `most` jobs waiting, or without a thread, the result is a RuntimeError."""
        try:
            if self.jobs.qsize() >= most:
                raise RuntimeError("too many others are waiting")
            if self.thread is None:
                thread = threading.Thread(target=self.work, name="masterserver " + self.name, daemon=True)
                thread.start()
                self.thread = thread
        except RuntimeError as error:
            self.results.append((done, error))
            self.wake()
        else:
            self.jobs.put((job, done))

    def work(self) -> None:
        while True:
            item = self.jobs.get()
            if item is None:
                return
            job, done = item
            try:
                result = job()
            except Exception as error:
                result = error
            self.results.append((done, result))
            del item, job, done, result         # which may hold a list and all its servers, and the next job may come in days
            self.wake()

    def deliver(self, now: float) -> None:
        for _ in range(len(self.results)):      # what they lead to waits for the next round
            done, result = self.results.popleft()
            try:
                done(result, now)
            except Exception:
                log.exception("a fault of the program after a job of the thread %s", self.name)
            if self.results and time.monotonic() - now >= TURN_S:       # each may be a long answer, to be bounded with the others
                self.wake()
                return

    def stop(self, timeout: float) -> bool:
        """True: it has ended. False: it is still at something."""
        if self.thread is None:
            return True
        self.jobs.put(None)
        self.thread.join(timeout)
        return not self.thread.is_alive()


# --- The list on disk ------------------------------------------------------------------------------------------------

SAVE_S = 1.0                        # what a crash can cost; 10,000 servers are 1,250 rows a second, one per cent of a core
RESTORED_S = 60.0                   # for servers without a lifetime of their own: AIO's reconnect; those that are queried have longer (list_again)
SAVE_LATE_S = 10.0                  # a batch takes milliseconds, on a disk that has to spin up some seconds: from here on that is trouble
TROUBLE_AGAIN_S = 600.0             # a disk that is nearly full fails and works by turns, which is one trouble
LASTING_S = 86400.0                 # how long such a server is kept on disk after it was last heard from …
NAMED_S = float(YEAR)               # … and one that the ini names: as long as anybody's history is kept


class Keeper:
    """Carries the registry to storage and back. What touches the disk runs in the worker; a batch is under way at a time."""

    def __init__(self, storage: Storage, registry: Registry, poller: Poller, worker: Worker, health: Dict[str, str]) -> None:
        self.storage, self.registry, self.poller, self.worker, self.health = storage, registry, poller, worker, health
        self.busy = False
        self.shared = False                 # another program has been seen to write this database
        self.whole = False                  # the next batch is the whole registry: the file is new, or the last batch failed
        self.rows: Optional[List[ListedRow]] = None         # read and not listed yet; None: the file could not be read so far
        self.renewed = 0
        self.saved_at = self.minute = 0.0
        self.told, self.told_at = False, -math.inf      # the log was told of the present trouble, and when of any
        self.epoch = 0.0                    # wall clock minus monotonic clock at the last batch; the first one after a start is whole
        self.recent: Dict[Key, List[Optional[int]]] = {}        # the last day's hourly player counts, for the sparklines

    def restore(self, now: float, wall: float, needed: bool = False) -> None:
        """List what was listed before the restart, now or when the file can be read. Raises sqlite3.Error if the file is `needed`, does not
        exist and cannot be created."""
        needed = needed and not has_content(self.storage.path)
        try:
            self.rows = self.read(wall)
        except sqlite3.Error as error:
            if needed:
                raise
            log.warning("the database %s cannot be used: %s; until it can, the list will not survive a restart", self.storage.path, error)
            self.health["database"] = str(error)
            self.whole = self.told = True
            with contextlib.suppress(sqlite3.Error, OSError, UnicodeDecodeError):
                self.rows = self.storage.peek(wall)
        self.renewed = self.storage.renewed
        self.list_again(now, wall)

    def read(self, wall: float) -> List[ListedRow]:
        rows = self.storage.load(wall)
        self.recent = self.storage.recent(wall)
        return rows

    def list_again(self, now: float, wall: float, left: Iterable[Key] = ()) -> None:
        """List what was read, except servers heard from before it could be read, some of which have `left` since."""
        if not self.rows:
            return
        rows, self.rows = self.rows, []
        # A server that is queried goes when it has missed its polls; this is for those that are no longer queried
        polled_s = RESTORED_S + (POLL_MISSED + 1) * max(self.poller.interval, POLL_QUESTIONS * len(rows) / self.poller.rate)
        count, moved = 0, []
        for row, server in restored_servers(rows, now, wall):
            if server is None:
                log.warning("a server in the database cannot be read: %s port %d of %s", ascii(row[1][:40]), row[2], ascii(row[0][:32]))
                self.registry.left.add(row[:3])
                continue
            if server.mapped or server.mapped is None and (server.verified == "query" or server.address == server.source):      # an older database
                server.move(self.registry.rules.listed_address(server.source))          # as it is now
                if server.address != row[1]:
                    moved.append(row[:3])
            if self.registry.get(*server.key) or server.key in left or server.key in self.registry.left:
                continue
            try:
                self.registry.admit(server.game, server.address, server.port, server.source, server.name, server.named)
            except Refused:
                self.registry.left.add(row[:3])
                continue
            self.registry.insert(server)
            if server.stays:
                self.registry.schedule(server, now + (polled_s if server.verified == "query" else RESTORED_S))
            count += 1
        self.registry.left.update(key for key in moved if self.registry.get(*key) is None)
        log.info("restored as before the restart, unconfirmed: %s", plural(count, "server"))

    def tick(self, now: float, wall: float) -> None:
        """Hand over what has changed, and once a minute the player counts."""
        if self.busy and now - self.saved_at >= SAVE_LATE_S:
            self.troubled("nothing has been written for %d s or more" % SAVE_LATE_S, now)
        if self.busy or now - self.saved_at < SAVE_S:
            return
        since, self.saved_at = self.saved_at, now
        registry = self.registry
        batch = self.begin(now, wall)
        registry.batch += 1
        left, registry.left = registry.left, set()
        counted, self.minute = wall // 60 != self.minute, wall // 60
        self.busy = True
        self.worker.submit(functools.partial(self.write, batch, since, left, counted, wall - now, wall),
                           functools.partial(self.written, left))

    def begin(self, now: float, wall: float) -> int:
        """The number of the next batch; 0: it is the whole registry."""
        stepped = abs(wall - now - self.epoch) > CLOCK_STEP_S       # the times on disk are those of a clock that has been set since
        self.epoch = wall - now
        return 0 if self.whole or stepped else self.registry.batch

    def write(self, batch: int, since: float, left: Set[Key], counted: bool, epoch: float, wall: float
              ) -> Optional[Dict[Key, List[Optional[int]]]]:
        """In the worker. A server that changes meanwhile is in the next batch again."""
        if self.rows is None:
            self.rows = self.read(wall)
        altered, heard = self.registry.news(batch, since)
        if not self.storage.save([stored_row(server, epoch, wall) for server in altered],
                                 [(server.last_seen + epoch, expiry(server, epoch, wall), *server.key) for server in heard], list(left)):
            # The file is the same as at the last batch, and nobody has moved meanwhile
            if not self.shared and self.storage.renewed == self.renewed and all(server.batch < batch for server in heard):
                self.shared = True
                log.warning("%s: another program removes servers from this database; each master needs one of its own ([server] database)",
                            self.storage.path)
            self.storage.save([stored_row(server, epoch, wall) for server in self.registry.servers()], [], [])
        if not counted:
            return None
        everybody, _ = self.registry.news(0, since)
        rows = [(*server.key, server.players) for server in everybody if server.responding]
        rows += [(game, "", 0, census[1]) for game, census in list(self.registry.census.items())]
        return self.storage.sample(wall, rows)

    def written(self, left: Set[Key], result: Any, now: float) -> None:
        self.busy = False
        self.list_again(now, now + self.epoch, left)
        failed = isinstance(result, Exception)
        trouble = error_text(result) if failed else self.storage.trouble       # which an empty batch does not end
        before, self.renewed = self.renewed, self.storage.renewed           # looked at once: the worker may open the file for a server's page
        self.whole = bool(trouble) or self.renewed != before
        if failed:
            self.minute = 0.0               # the failed batch may have been the minute's count
            newer, self.registry.left = self.registry.left, {key for key in left if self.registry.get(*key) is None}
            if len(self.registry.left) < KNOWN_SERVERS:
                self.registry.left |= newer
        if trouble:
            self.troubled(trouble, now)
        elif self.health.pop("database", "") and self.told:
            self.told = False
            log.info("the list is saved again")
        if result and not failed:
            self.recent = result

    def troubled(self, trouble: str, now: float) -> None:
        if "database" not in self.health and now - self.told_at >= TROUBLE_AGAIN_S:
            self.told, self.told_at = True, now
            log.error("the list is not saved: %s: %s; the master keeps serving", self.storage.path, trouble)
        self.health["database"] = trouble

    def close(self, now: float, wall: float) -> None:
        """The last batch, once the worker has stopped."""
        self.rows = []                      # what could not be read stays on disk as it is
        registry = self.registry
        try:
            self.write(self.begin(now, wall), self.saved_at, registry.left, False, wall - now, wall)
        except Exception as error:          # as written() takes it: connections and the file are closed whatever it is
            log.error("the list could not be saved at the end: %s", error_text(error))
        self.storage.close()


def expiry(server: Server, epoch: float, wall: float) -> float:
    lifetime = NAMED_S if server.named else LASTING_S if server.lasting else server.lifetime
    ends = server.last_seen + lifetime + epoch
    return ends if ends > wall else wall + lifetime         # it is listed all the same: a flood, or a stop of the program, kept it from being heard


def stored_row(server: Server, epoch: float, wall: float) -> ListedRow:
    fields = ENCODER.encode([getattr(server, name) for name in STORED])
    return (*server.key, expiry(server, epoch, wall), server.first_seen + epoch, server.last_seen + epoch, fields)


STORED_MOST = {"flavor": 255}       # a byte in Hyperbol's list; all other numbers count players
STORED_DEFAULTS = {"playing": None, "responding": True, "mapped": None}         # of the others "", 0, {}


def mended(name: str, values: Sequence[Any]) -> Sequence[Any]:
    """A stored field of many servers with its right type and size, whatever noise may have made of it. At a start there may be 10,000, so
    texts are checked together, and one by one only if need be."""
    kind = STORED[name]
    if set(map(type, values)) != {kind}:
        values = [value if type(value) is kind else STORED_DEFAULTS.get(name, kind()) for value in values]
    if kind is str:
        texts = "".join(values)
        if not (texts.isascii() and texts.isprintable() and max(map(len, values)) <= TEXT_CHARACTERS):
            return [clean(value, TEXT_CHARACTERS) for value in values]
    elif kind is int:
        most = STORED_MOST.get(name, PLAYERS_MAX)
        return [value and clamp(value, most) for value in values]           # None stays
    elif kind is dict and any(values):
        return [{clean(key): clean(text, TEXT_CHARACTERS) for key, text in value.items() if isinstance(text, str)} for value in values]
    return values


def restored_servers(rows: Sequence[ListedRow], now: float, wall: float) -> Iterator[Tuple[ListedRow, Optional[Server]]]:
    """The listed servers as they were, unconfirmed; None for a row whose address or times are noise."""
    try:
        stored = json.loads("[%s]" % ",".join([row[6] for row in rows]))
    except (ValueError, RecursionError):
        stored = []
    if len(stored) != len(rows) or set(map(type, stored)) != {list} or set(map(len, stored)) != {len(STORED)}:
        stored = [stored_fields(row[6]) for row in rows]
    for row, fields in zip(rows, zip(*map(mended, STORED, zip(*stored)))):
        game, address, port, expires, first_seen, last_seen, _ = row
        if not (is_unicast(address) and 0 < port <= 65535 and 0 <= expires < WALL_END and 0 <= first_seen < WALL_END
                and 0 <= last_seen < WALL_END):
            yield row, None
            continue
        told = dict(zip(STORED, fields))
        source, lasting = told.pop("source"), told.pop("lasting")
        if source != address and not is_unicast(source):
            source = address
        if told["verified"] not in VERIFIED:
            told["verified"] = "self-reported"
        server = Server(game, address, port, source, now, 0.0, **told)
        server.unconfirmed = True
        server.first_seen = now - max(0.0, wall - first_seen)
        server.last_seen = now - max(0.0, wall - last_seen)         # the clock may have been put back meanwhile
        # A zone that the ini does not name any more lives by its announcements, if there are any
        server.lifetime = math.inf if lasting else ZONE_LIFETIME_S if server.named else expires - last_seen
        yield row, server


# --- The loop, and the running program -------------------------------------------------------------------------------

class Loop:
    """A life between start and stop: `run()` in this thread or `start()` in one of its own, in both cases until `stop()`.

    It runs once; `with` starts and stops it. One that is made and never started needs stop() as well, as it holds a pair of sockets.
    """

    workers: Mapping[str, Worker]                       # for sessions, by what Session.worker says
    # What each kind of loop does its own way
    open_all: Callable[[], None]                        # open what can fail; raises StartError
    round: Callable[[], None]                           # wait for what comes next, handle it, and do what is due
    leave: Callable[[], None]                           # the rounds after stop() has been called
    close_all: Callable[[], None]                       # close what open_all() has opened, and every connection
    forget: Callable[[Connection], None]                # the connection is about to be closed
    wake_at: Callable[[float, Connection], None]        # tick the connection's session at this time too

    def __init__(self) -> None:
        self.state = "new"                  # then binding, bound, running, closed
        self.life = threading.RLock()       # for the changes of state, and while it binds; a signal handler may interrupt one and stop()
        self.stopping = False
        self.thread: Optional[threading.Thread] = None
        self.selector = selectors.DefaultSelector()
        self.wake_in, self.wake_out = socket.socketpair()
        self.wake_in.setblocking(False)
        self.wake_out.setblocking(False)
        self.selector.register(self.wake_in, selectors.EVENT_READ, self.woken)

    def placed(self, connection: Connection) -> None:
        """The connection is not the idlest any more."""

    def bind(self) -> None:
        """Open what can fail, once; raises StartError."""
        with self.life:
            if self.state != "new":
                return
            self.state = "binding"
            try:
                if not self.stopping:           # by a signal handler just now, which has closed what there was
                    self.open_all()
            except BaseException:
                self.close()
                raise
            self.state = "bound"
            if self.stopping:               # meanwhile
                self.close()

    def run(self) -> None:
        """Serve until stop(); opens what bind() has not."""
        self.bind()
        with self.life:
            if self.state == "closed":          # stop() was quicker
                return
            if self.state in ("binding", "running") or self.thread not in (None, threading.current_thread()):
                raise StartError("It is running already.")
            self.state = "running"
            if self.stopping:           # as in bind()
                self.close()
                return
        try:
            while not self.stopping:
                self.round()
            self.leave()
        finally:
            self.close()

    def close(self) -> None:
        with self.life:
            if self.state == "closed":
                return
            self.state = "closed"
        self.close_all()
        self.selector.close()
        self.wake_in.close()
        self.wake_out.close()

    def start(self) -> None:
        """Serve in a thread; returns once everything is bound. A second call changes nothing; raises StartError."""
        if self.state == "closed":
            raise StartError("It has been stopped; make a new one.")
        self.bind()
        with self.life:
            if self.thread is None:
                thread = threading.Thread(target=self.run, name="masterserver", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:           # there are too many, or the interpreter ends
                    self.close()
                    raise StartError("no thread to serve in: %s" % error) from None
                self.thread = thread        # only now can a signal handler's stop() wait for it

    def stop(self) -> None:
        """End run(), from any thread, a callback or a signal handler, and wait for the thread if there is one, or until everything is bound:
        answers on their way and work for the disk may take some seconds. No callback may wait for a thread that is in here."""
        with self.life:
            self.stopping = True
            if self.state in ("new", "bound") and self.thread is None:
                self.close()
        self.wake()
        # A signal handler may have interrupted what the thread waits for; threading.Condition asks its lock the same way
        interrupts = self.life._is_owned()  # type: ignore[attr-defined,unused-ignore]
        if self.thread is not None and self.thread is not threading.current_thread() and not interrupts:
            self.thread.join()

    def __enter__(self: Started) -> Started:
        self.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.stop()

    def watch(self, connection: Connection, events: int) -> None:
        """Have the selector watch a connection for one kind of event, 0 for none."""
        if connection.events == events:
            return
        if connection.events:
            connection.events = 0           # first: if Ctrl+C ends this in between, it is closed all the same, with all others
            self.selector.unregister(connection.sock)
        if events:
            self.selector.register(connection.sock, events, connection.writable if events == selectors.EVENT_WRITE else connection.read)
            connection.events = events

    def wake(self) -> None:
        """Make select() return; from any thread."""
        with contextlib.suppress(OSError):
            self.wake_out.send(b"\0")

    def woken(self, now: float) -> None:
        with contextlib.suppress(OSError):
            self.wake_in.recv(4096)


Started = TypeVar("Started", bound=Loop)


class MasterServer(Loop):
    """The running program, to be embedded as well:

        with masterserver.MasterServer({"iceball.port": "0"}, on_event=print) as server:
            print(server.listeners, [s.name for s in server.registry.servers()])

    `settings`: a Settings, or texts by name as for --set; raises SettingsError. `listeners` says what is bound where.
    `registry.servers()` may be called from any thread. `on_event(event, server)` is called in the serving thread with "listed", "changed"
    or "gone"; it must be quick, must change nothing and may call stop(); what it raises is logged. Several can run in one process.
    """

    def __init__(self, settings: Union[Settings, Mapping[str, str], None] = None,
                 on_event: Optional[Callable[[str, Server], None]] = None, reload: Optional[Callable[[], Settings]] = None) -> None:
        self.settings = settings if isinstance(settings, Settings) else Settings(settings)
        read_text_files(self.settings)
        self.rules = Rules(self.settings)
        self.registry = Registry(self.rules)
        self.poller = Poller(self.settings, self.rules)
        self.vector = MessageVector.make()
        self.listeners: List[Listener] = []
        self.tallies: Dict[str, Tally] = {}
        self.health: Dict[str, str] = {}
        self.gauges: Dict[str, float] = {}
        database = self.settings.file("server.database")
        self.storage = Storage(database) if database else None
        self.core = Core(self.settings, self.registry, self.poller, self.resolve, {}, self.storage, self.tallies,
                         self.health, self.listeners, self.gauges, lambda: self.keeper.recent if self.keeper else {})
        self.read_again = reload
        self.tell: Callable[[str], None] = lambda state: None       # how we are, to whoever started us
        self.descriptors: Callable[[int], int] = lambda wanted: descriptor_limit()           # how many there may be, given how many are wanted
        self.reload_asked = False
        self.ini_stamp = self.stamp()
        self.ini_trouble = ""               # why it was not taken over
        self.ini_looked_at = self.next_tick = 0.0
        self.held_up_s = self.held_up_at = 0.0              # how long it was stopped last, and until when
        self.watchdog_s = self.watchdog_at = 0.0            # systemd wants a sign of life this often, and next at this time
        self.free: Dict[str, int] = {}      # what port 0 became for settings that several listeners share
        self.protocols: List[Union[UdpProtocol, TcpProtocol]] = []
        self.datagrams: List[Datagrams] = []
        self.acceptors: List[Acceptor] = []
        self.connections: collections.OrderedDict[Connection, None] = collections.OrderedDict()        # the idlest first
        self.refused: collections.OrderedDict[Connection, None] = collections.OrderedDict()            # those over a limit
        self.connections_by_source: Dict[str, int] = collections.defaultdict(int)
        self.timers: List[Tuple[float, int, Connection]] = []
        super().__init__()
        self.timer_numbers = itertools.count()
        # Separate, as a disk may hang, and as strangers may ask for more searches than one thread can do
        self.workers = {name: Worker(name, self.wake) for name in ("disk", "lists", "searches")}
        self.names = Worker("names", self.wake)             # no stop waits for it
        self.events: List[Tuple[str, Server]] = []          # of this second, to be logged
        self.event_lines = Limiter(LOGGED_EVENTS_RATE)
        self.busy_s = 0.0                   # the longest that one round of the loop took, since the last tick
        self.keeper = Keeper(self.storage, self.registry, self.poller, self.workers["disk"], self.health) if self.storage else None
        if on_event is not None:
            self.registry.watch(functools.partial(self.guarded, on_event))

    # Sockets

    def open_all(self) -> None:
        self.measure_room()                 # sockets already take some of it
        problems = []                       # all of them, as another program often holds several ports
        for row in PROTOCOLS:
            ports = self.settings[row.setting] if row.setting else 0
            if ports in (None, ()):
                continue
            protocol = row.make(self.core)
            if isinstance(protocol, Web):
                protocol.epoch = time.time() - time.monotonic()
            self.protocols.append(protocol)
            for port in ports if isinstance(ports, tuple) else (ports,):
                try:
                    self.open(row, protocol, port or self.free_ports(row))
                except StartError as error:
                    problems.append(str(error))
        if problems:
            raise StartError("\n".join(problems))
        self.measure_room()
        self.restore()
        self.next_tick = time.monotonic() + TICK_S

    def restore(self) -> None:
        if self.keeper:
            try:
                self.keeper.restore(time.monotonic(), time.time(), "server.database" in self.settings.given)
            except sqlite3.Error as error:
                raise StartError("the database %s cannot be created: %s. Change [server] database, or leave it empty." % (
                    self.keeper.storage.path, error)) from None
        self.registry.watch(lambda event, server: self.events.append((event, server)), events=("listed", "gone"))

    def free_ports(self, row: Row) -> int:
        """For port 0 where rows share a setting: a port free with those after it; 0 where the row stands alone."""
        last = max(r.offset for r in PROTOCOLS if r.setting == row.setting)
        if last and row.setting not in self.free:
            hosts = [address for address in self.settings["server.bind"] if ":" not in address]
            self.free[row.setting] = free_run(row.transport, hosts, last + 1)
        return self.free.get(row.setting, 0)

    def open(self, row: Row, protocol: Union[UdpProtocol, TcpProtocol], port: int) -> None:
        tally = self.tallies.setdefault(row.name, Tally())
        optional_ipv6 = self.settings["server.bind"] == ("0.0.0.0", "::")
        before = len(self.listeners)
        for address in self.settings["server.bind"]:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            if protocol.ipv4_only and family == socket.AF_INET6:
                continue
            wanted = port + row.offset if port else 0
            same = 0 if wanted else next((l.port for l in self.listeners[before:] if (":" in l.host) != (":" in address)), 0)
            sock = None
            try:
                if same:                    # one free port for all addresses if that can be had
                    with contextlib.suppress(OSError):
                        sock = bound_socket(family, row.transport, address, same)
                sock = sock or bound_socket(family, row.transport, address, wanted)
            except OSError as error:
                if family == socket.AF_INET6 and optional_ipv6 and error.errno not in DESCRIPTORS_SHORT | {errno.EADDRINUSE}:
                    log.info("%s: no IPv6 on this machine: %s", row.name, error)
                    continue
                raise StartError("%s cannot listen on %s %s: %s. %s" % (
                    row.name, row.transport.upper(), endpoint(address, wanted), error.strerror or error,
                    self.way_out(row, address, wanted, error.errno))) from None
            host, bound_port = sock.getsockname()[:2]
            self.listeners.append(Listener(row.name, row.transport, host, bound_port))
            if isinstance(protocol, UdpProtocol):
                udp: Any = protocol
                if udp.by_socket and any(source.protocol is udp for source in self.datagrams):
                    udp = row.make(self.core)
                    self.protocols.append(udp)
                limiter = self.rules.answers if udp is self.poller else self.rules.datagrams
                self.datagrams.append(Datagrams(row.name, sock, udp, tally, limiter, self.vector))
                ready = self.datagrams[-1].ready
            else:
                self.acceptors.append(Acceptor(self, row.name, sock, protocol, tally))
                ready = self.acceptors[-1].ready
            self.selector.register(sock, selectors.EVENT_READ, ready)

    def way_out(self, row: Row, address: str, port: int, status: Optional[int]) -> str:
        """What to do where a port cannot be had."""
        if status in DESCRIPTORS_SHORT:
            return "It needs more open files than it may have (ulimit -n)."
        if status in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) or not row.setting:           # the latter: no IPv6 in the kernel, or in a sandbox
            return "Change [server] bind; this machine has no such address."
        ours = [l for l in self.listeners if l.port == port and l.transport == row.transport and (":" in l.host) == (":" in address)]
        if any(l.protocol == row.name and {l.host, address} & {"0.0.0.0", "::"} for l in ours):
            return "Change [server] bind; 0.0.0.0 and :: stand for all addresses there."
        if any(l.protocol != row.name for l in ours):
            why = "Another setting of this program uses it."
        elif status == errno.EACCES and port < 1024:
            why = "A port below 1024 needs privileges."
        else:
            holder = port_holder(row.transport, port) if status == errno.EADDRINUSE else ""
            why = "It is held by %s." % holder if holder else "Is another master server running?"
        return "%s Change it with [%s] %s (--set %s=PORT)." % (why, *row.setting.split("."), row.setting)

    def accepted(self, acceptor: Acceptor, sock: socket.socket, address: str, now: float) -> None:
        rules = self.rules
        if rules.blocked and rules.verdict(address) == BLOCKED:
            acceptor.tally.limited += 1
            sock.close()
            return
        source = source_key(address)
        others = self.connections_by_source.get(source, 0)
        limited = (not rules.connections.allow(address, now)
                   or others >= self.settings["limits.connections_open"] and not rules.exempts(address))
        sock.setblocking(False)
        if limited:
            acceptor.tally.limited += 1
            session = acceptor.protocol.refusal(address, now)
            if len(self.refused) >= self.most_refused:
                next(iter(self.refused)).dismiss(now)
        else:
            acceptor.tally.connections += 1
            session = acceptor.protocol.session(address, now)
            for _ in range(len(self.connections) - self.most_connections + 1):          # several if fewer are allowed since a reload
                self.make_room(now)
        connection = Connection(self, sock, address, session, acceptor.tally, acceptor.name, now)
        if limited:
            self.refused[connection] = None
        else:
            self.connections[connection] = None
            self.connections_by_source[source] += 1
        try:
            if acceptor.protocol.speaks_first:
                connection.call(session.opened, now)
            else:
                connection.read(now)        # its request is usually here already, and often the whole exchange over at once
            if sock.fileno() >= 0 and not connection.linger_until:
                connection.watch()
        except BaseException:
            connection.close(now)
            raise

    def wake_at(self, at: float, connection: Connection) -> None:
        heapq.heappush(self.timers, (at, next(self.timer_numbers), connection))

    def measure_room(self) -> None:
        """How many connections there may be, and how many refused ones beside them: as the ini says, and as descriptors allow."""
        descriptors = self.descriptors(self.settings["limits.connections_total"] + 2 * REFUSED_CONNECTIONS)
        free = max(2, descriptors - len(self.listeners) - DESCRIPTORS_KEPT)
        self.most_refused = min(REFUSED_CONNECTIONS, max(1, free // 8))
        self.most_connections = min(self.settings["limits.connections_total"], free - self.most_refused)

    def placed(self, connection: Connection) -> None:
        if connection in self.connections:
            self.connections.move_to_end(connection)

    def make_room(self, now: float) -> None:
        """Close the connection that has been idle for longest, publishing servers last."""
        idle = next((connection for connection in self.connections if not connection.session.kept), next(iter(self.connections)))
        idle.tally.limited += 1
        idle.close(now)

    def bound_output(self, now: float) -> None:
        """What waits for slow readers is bounded in all: the source that has most of it loses it first, its longest wait before the others."""
        waiting = [(connection, getattr(connection.out, "obj", connection.out)) for connection in self.connections if connection.out]
        held = {id(answer): len(answer) for _, answer in waiting}           # many may wait for the same one
        total = sum(held.values())
        most = max(OUTPUT_BYTES, OUTPUT_ANSWERS * max(held.values(), default=0))
        if total <= most:
            return
        holders = collections.Counter(id(answer) for _, answer in waiting)
        of_source: Dict[str, float] = collections.defaultdict(float)
        for connection, answer in waiting:
            of_source[connection.source] += len(answer) / holders[id(answer)]
        for connection, answer in sorted(waiting, key=lambda held: (-of_source[held[0].source], held[0].out_since)):
            holders[id(answer)] -= 1
            total -= 0 if holders[id(answer)] else len(answer)
            connection.tally.limited += 1
            connection.close(now)
            if total <= most:
                break

    def forget(self, connection: Connection) -> None:
        self.watch(connection, 0)
        if connection in self.refused:
            del self.refused[connection]
        elif connection in self.connections:
            del self.connections[connection]
            uncount(self.connections_by_source, connection.source)

    # Running

    def round(self, until: float = math.inf) -> None:
        """Handle what comes next, waiting for it no longer than `until`, and do what is due."""
        due = min(until, self.next_tick, self.timers[0][0] if self.timers else math.inf)
        events = self.selector.select(max(0.0, due - time.monotonic()))
        now = turn = began = time.monotonic()
        for key, _ in events:
            try:                    # as guarded() does, in half of its time
                key.data(now)
            except Exception:
                self.fault(key.data, now)
            if time.monotonic() - turn >= TURN_S:
                now = turn = time.monotonic()
                for datagrams in self.datagrams:
                    self.guarded(datagrams.ready, now)
                self.guarded(self.bound_output, now)
        while self.timers and self.timers[0][0] <= now:
            connection = heapq.heappop(self.timers)[2]
            if connection.sock.fileno() >= 0:
                self.guarded(connection.tick, now)
        if now >= self.next_tick:
            if now - self.next_tick >= HELD_UP_S:
                self.held_up_s, self.held_up_at = now - self.next_tick, now
            self.next_tick = now + TICK_S
            self.tick(now)
        self.busy_s = max(self.busy_s, time.monotonic() - began)

    def leave(self) -> None:
        """Answer what was asked on a connection before the stop: there are clients that die of an answer cut off by a reset."""
        self.tell("STOPPING=1")
        now = time.monotonic()
        for acceptor in self.acceptors:
            acceptor.protocol.leave()
        for acceptor in self.acceptors:
            self.guarded(acceptor.leave, now)
        self.round(now)
        until = now + STOP_S
        while now < until and any(connection.busy(now) for connection in (*self.connections, *self.refused)):
            self.round(min(until, now + STOP_LOOK_S))
            now = time.monotonic()

    def tick(self, now: float) -> None:
        epoch = time.time() - time.monotonic()          # not `now`, which is as old as this round of the loop
        self.gauges["loop_delay_seconds"] = self.busy_s
        self.gauges["loop_delay_max_seconds"] = max(self.busy_s, self.gauges.get("loop_delay_max_seconds", 0.0) * LOOP_DELAY_FADES)
        self.gauges["connections"] = len(self.connections)
        self.busy_s = 0.0
        for protocol in self.protocols:
            if isinstance(protocol, Web):
                protocol.epoch = epoch
        # Of what came while it was stopped the system has kept what it had room for, often no more than 500 announcements
        self.guarded(self.registry.expire, now, self.held_up_s if now < self.held_up_at + HELD_UP_FOR_S else 0.0)
        self.log_events(now)
        if self.watchdog_s and now >= self.watchdog_at:
            self.watchdog_at = now + self.watchdog_s
            self.tell("WATCHDOG=1")
        for acceptor in self.acceptors:
            self.guarded(acceptor.tick, now)
        for protocol in self.protocols:
            self.guarded(self.tick_protocol, protocol, now)
        for connection in list(self.connections) + list(self.refused):
            self.guarded(connection.tick, now)
        self.guarded(self.bound_output, now)
        if not self.keeper:
            self.registry.left.clear()
        elif now > self.held_up_at or not self.keeper.busy:         # a batch that was under way when the program was stopped had no time either
            self.guarded(self.keeper.tick, now, now + epoch)
        if now - self.ini_looked_at >= RELOAD_LOOK_S:
            self.ini_looked_at = now
            if self.ini_trouble or self.stamp() != self.ini_stamp:          # what the ini names and is missing may have come
                self.guarded(self.reload, self.stamp() != self.ini_stamp)

    def tick_protocol(self, protocol: Union[UdpProtocol, TcpProtocol], now: float) -> None:
        """Once, however many sockets it has; what it sends leaves by the socket whose address is nearest to this machine's own on the way
        to the peer, or by the next one that can send it."""
        if isinstance(protocol, TcpProtocol):
            protocol.tick(now)
            return
        sockets = [source for source in self.datagrams if source.protocol is protocol]
        for data, to in protocol.tick(now):
            family = socket.AF_INET6 if ":" in to[0] else socket.AF_INET
            ways = [source for source in sockets if source.sock.family == family]
            if len(ways) > 1:           # a socket of another network sends as well, even that of ::1, and the answer goes astray
                own = address_number(own_address(to[0]) or to[0])           # often not bound: a machine has several IPv6 addresses
                ways.sort(key=lambda source: address_number(source.sock.getsockname()[0]) ^ own)
            if not any(source.send(data, to) for source in ways) and sockets:
                sockets[0].tally.unsent += 1

    def guarded(self, call: Callable[..., None], *arguments: Any) -> None:
        """No fault of the program in one place ends it in the others."""
        try:
            call(*arguments)
        except Exception:
            self.fault(call, *arguments)

    def fault(self, call: Callable[..., None], *arguments: Any) -> None:
        log.exception("a fault of the program in %s%s", call, arguments)

    def stamp(self) -> Dict[str, Tuple[int, ...]]:
        """For the ini and each file that it names, a value that changes when the file does."""
        return {path: file_stamp(path) for path in [self.settings.path] + [self.settings.file(name) for name in TEXT_FILES]}

    def reload(self, asked: bool = True) -> None:
        """Read the settings again. With any error the old ones stay in force, whole. `asked`: by somebody, or by a change; else it is one
        more try, and logged only if the error is a different one."""
        before = self.ini_stamp = self.stamp()
        told, self.ini_trouble = self.ini_trouble, ""
        if self.read_again is None:
            return
        if asked:
            self.tell("RELOADING=1\nMONOTONIC_USEC=%d" % (time.monotonic() * 1e6))
        try:
            check_is_file(self.settings.path, SettingsError)
            new = self.read_again()
            if self.settings.found and not new.found:
                raise SettingsError("%s: it is gone or empty" % self.settings.path)
            read_text_files(new)
            self.settings.found = new.found
        except SettingsError as error:
            self.ini_trouble = str(error)
            if asked or self.ini_trouble != told:
                log.error("the old settings stay in force: %s", error)
        else:
            # In themselves or in the file they name
            different = [row for row in SETTINGS if self.settings[row.name] != new[row.name]
                         or self.settings.texts.get(row.name) != new.texts.get(row.name)]
            for row in different:
                if row.live:
                    self.settings.values[row.name] = new.values[row.name]
                else:
                    log.warning("[%s] %s has changed; that needs a restart", row.section, row.key)
            self.settings.texts = new.texts
            if any(row.live for row in different):
                self.apply()
            self.ini_stamp = {path: before.get(path, stamp) for path, stamp in self.stamp().items()}
            log.info("settings read again; changed: %s", ", ".join(row.name for row in different if row.live) or "nothing")
        finally:
            if asked:
                self.tell("READY=1")

    def apply(self) -> None:
        """Let the live settings take effect."""
        settings = self.settings
        self.measure_room()
        self.registry.apply_rules(settings)
        if self.rules.blocked:
            for connection in [*self.connections, *self.refused]:
                if connection.address in self.rules.blocked:
                    connection.close(time.monotonic())
        for protocol in self.protocols:         # the poller among them
            protocol.read(settings)
        if log.handlers:            # a log of ours; a program around this one has its own
            log.setLevel(settings["server.log_level"].upper())

    def woken(self, now: float) -> None:
        super().woken(now)
        for worker in (*self.workers.values(), self.names):
            worker.deliver(now)
        if self.reload_asked:               # by a signal, which wakes
            self.reload_asked = False
            self.reload()

    def resolve(self, host: str, done: Callable[[str, float], None]) -> None:
        """Look a host name up in a thread of its own; a lookup can take half a minute."""
        self.names.submit(functools.partial(resolved, host),
                          lambda result, now: done(result if isinstance(result, str) else "", now))

    def close_all(self) -> None:
        now = time.monotonic()
        self.log_events(now)
        for sock in [datagrams.sock for datagrams in self.datagrams] + [acceptor.sock for acceptor in self.acceptors]:
            sock.close()
        self.names.stop(0.0)
        until = now + STOP_DISK_S           # for all together, the disk first: ten seconds after the signal a container is killed
        ended = {name: worker.stop(until - time.monotonic()) for name, worker in self.workers.items()}
        for worker in self.workers.values():
            while worker.results:
                worker.deliver(now)
                self.bound_output(now)
        if self.keeper and ended["disk"]:
            self.keeper.close(now, time.time())
        elif self.keeper:                   # whoever touched the file now would wait for that thread
            log.error("the list could not be saved at the end: the disk takes too long")
        # Only now: a server that leaves because we do (AIO) is listed again until it has had the time to come back
        for connection in list(self.connections) + list(self.refused):
            connection.close(now)

    def log_events(self, now: float) -> None:
        """Who came and went in this second, one by one unless they are many, or have been for long."""
        told = [seen for seen in self.events[:LOGGED_EVENTS] if self.event_lines.allow("", now)]
        for event, server in told:
            log.info("%s %s %s %s", endpoint(server.address, server.port), server.game, event, ascii(server.name))
        if len(self.events) > len(told):
            log.info("and %d more listed or gone in this second", len(self.events) - len(told))
        self.events.clear()


# --- What is asked of the system -------------------------------------------------------------------------------------

def file_stamp(path: str) -> Tuple[int, ...]:
    """A value that changes when the file does; () if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


def is_special(path: str) -> bool:
    """There, and no plain file: a pipe, a terminal, a folder."""
    return os.path.exists(path) and not os.path.isfile(path)


def check_is_file(path: str, wrong: Callable[[str], Exception] = ValueError) -> None:
    """Raises ValueError, or what `wrong` makes, where reading may wait for ever."""
    if is_special(path) and path != os.devnull:
        raise wrong("%s: not a plain file; reading from a pipe may take for ever" % path)


def read_text_files(settings: Settings) -> None:
    """Put the files that the settings name into `settings.texts`; raises SettingsError."""
    for name in TEXT_FILES:
        path = settings.file(name)
        settings.texts[name] = ""
        if path:
            try:
                check_is_file(path)
                with open(path, encoding="utf-8-sig") as file:
                    settings.texts[name] = file.read(TEXT_FILE_CHARACTERS + 1)
                if len(settings.texts[name]) > TEXT_FILE_CHARACTERS:
                    raise ValueError("it has more than %d characters" % TEXT_FILE_CHARACTERS)
                if name == "http.template":
                    list_template(settings.texts[name])
            except (OSError, ValueError) as error:
                raise SettingsError("[%s] %s = %s: %s" % (*name.split("."), path, error)) from None


def descriptor_limit(raise_to: int = 0) -> int:
    """How many files and sockets this process may have open; the limit is raised to `raise_to` if the process may do so."""
    if WINDOWS:
        return 512                          # what its select() serves
    soft = DESCRIPTORS_UNTOLD
    with contextlib.suppress(OSError, ValueError):          # a sandbox may forbid either call, and macOS sets a bound below the hard limit
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = raise_to if hard == resource.RLIM_INFINITY else min(raise_to, hard)
        if soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


class Systemd:
    """systemd, if it started us: told by datagrams how we are, sd_notify(3)."""

    def __init__(self) -> None:
        path = os.environ.get("NOTIFY_SOCKET", "")
        self.path = "\0" + path[1:] if path.startswith("@") else path
        self.sock: Optional[socket.socket] = None
        if path and hasattr(socket, "AF_UNIX"):
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)       # kept: later there may be no descriptor left
            self.sock.setblocking(False)

    def tell(self, state: str) -> None:
        try:
            if self.sock is not None:
                self.sock.sendto(state.encode(), self.path)
        except OSError as error:
            log.debug("systemd cannot be notified: %s", error)

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()


def watchdog_interval() -> float:
    """Seconds between two signs of life: half of what systemd grants (sd_watchdog_enabled(3)); 0 if it does not watch this process."""
    usec, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    return int(usec) / 2e6 if usec.isdigit() and pid in ("", str(os.getpid())) else 0.0


def own_address(far: str = "192.0.2.1") -> str:
    """This machine's address on the way to `far`, as the machine knows it; "" where no way leads there. Nothing is sent. The default stands
    for the internet: an address for documentation, which nobody has."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in far else socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((far, 9))
            return str(sock.getsockname()[0])
    except OSError:
        return ""


def addresses(host: str, reached: bool = False) -> List[str]:
    """The addresses of a host, IPv4 first; `reached`: those with a route to them, if there are any. Raises OSError, also while it cannot be
    known whether it has IPv4."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    if all(entry[0] != socket.AF_INET for entry in found):
        try:                        # of two queries to name servers one may have failed, which is not told
            found += socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_DGRAM)
        except socket.gaierror as error:
            if error.errno == socket.EAI_AGAIN:
                raise
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    known = list(dict.fromkeys(canonical(str(entry[4][0])) for entry in found))
    return reached and list(filter(own_address, known)) or known


def resolved(host: str, reached: bool = False) -> str:
    """The first of its addresses()."""
    return addresses(host, reached)[0]


def port_holder(transport: str, port: int) -> str:
    """The program that has this port, as "command (process 123)"; "" where the system does not tell: only Linux does, for one's own."""
    sockets = set()
    for table in (transport, transport + "6"):
        try:
            with open("/proc/net/" + table, encoding="ascii") as file:
                lines = file.readlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if int(fields[1].rpartition(":")[2], 16) == port and (transport == "udp" or fields[3] == "0A"):     # listening
                sockets.add("socket:[%s]" % fields[9])
    for process in filter(str.isdigit, os.listdir("/proc") if sockets else ()):
        folder = "/proc/%s/" % process
        try:
            for name in os.listdir(folder + "fd"):
                if os.path.realpath(folder + "fd/" + name).rpartition("/")[2] in sockets:       # no error if it is closed meanwhile
                    with open(folder + "cmdline", "rb") as file:
                        return "%s (process %s)" % (decode_utf8(file.read().replace(b"\0", b" "), 80), process)
        except OSError:             # another user's, or it has ended meanwhile
            continue
    return ""


def bound_socket(family: int, transport: str, address: str, port: int) -> socket.socket:
    """A non-blocking socket on this address; port 0 takes a free one. Raises OSError."""
    sock = socket.socket(family, socket.SOCK_DGRAM if transport == "udp" else socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if WINDOWS:                     # there SO_REUSEADDR would let another program take the port over
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)  # type: ignore[attr-defined,unused-ignore]
        elif transport == "tcp":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if transport == "udp":
            options = (SO_RCVBUFFORCE, socket.SO_RCVBUF) if sys.platform == "linux" else (socket.SO_RCVBUF,)
            for halved, option in itertools.product(range(6), options):         # 8 MB down to 256 kB
                with contextlib.suppress(OSError):          # not privileged, or more than the system allows: the BSDs grant none of it then
                    sock.setsockopt(socket.SOL_SOCKET, option, UDP_BUFFER_BYTES >> halved)
                    break
        sock.bind((address, port))
        if transport == "tcp":              # what connections inherit: writes go out at once, and the kernel finds peers that have vanished
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            for name, value in KEEP_ALIVE:
                with contextlib.suppress(AttributeError, OSError):          # macOS has other names, an older Windows none
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            sock.listen(BACKLOG)
        sock.setblocking(False)
        return sock
    except BaseException:
        sock.close()
        raise


def free_run(transport: str, hosts: Sequence[str], length: int) -> int:
    """The first of `length` free ports in a row on all these IPv4 addresses; 0 if one is not this machine's."""
    for first in CHANCE.sample(DYNAMIC_PORTS[:len(DYNAMIC_PORTS) + 1 - length], FREE_RUN_TRIES):
        try:
            for host, offset in itertools.product(hosts, range(length)):
                bound_socket(socket.AF_INET, transport, host, first + offset).close()
            return first
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):         # Windows keeps some for itself
                return 0
    raise StartError("there are no %d free %s ports in a row" % (length, transport.upper()))


# =====================================================================================================================
# 12  Client tools and command line
#
# What is typed: to serve, to check the settings, to announce a game server that cannot do it itself, to query servers and masters. The
# tools use the codecs of section 7, may block, and say at the end what went wrong.
# =====================================================================================================================

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
GC_THRESHOLDS = 10_000, 20, 20      # servers live long and have no cycles: a look after every 700 (from 3.13 on 2,000) costs 4 % of listing them
SWITCH_S = 0.001                    # the event loop gets the interpreter back from a worker within this (Python's default is 5 ms)
EXIT_STATUSES = """exit status:
  0  ended as told, by a signal, Ctrl+C or Ctrl+Break, or the end of standard input; or the command succeeded
  1  it cannot start, or cannot go on; standard error says why
  2  wrong arguments or settings; standard error says which

Nothing is written to standard output but what was asked for; the log goes to standard error or to [server] log_file."""


# --- Announcing a game server that cannot do it itself ---------------------------------------------------------------

ICEBALL_BURST = 5                   # announcements in a burst; the document
ICEBALL_GAP_S = 1.0                 # between two of them; the document
ICEBALL_PERIOD_S = 40.0             # from burst to burst; the document
SUBSPACE_PERIOD_S = 60.0            # as asss does
AIO_KEEPALIVE_EVERY_S = 30.0        # deployed servers: every 20 to 40 s; the master forgets after 120 s
AIO_SILENT_S = 100.0                # three keepalives unanswered: the connection leads nowhere
AIO_MASTER_BYTES = 4096             # what a master tells a server has 20, a reason perhaps 200
REFUSED_S = 1800.0                  # a master that has refused is asked again after so long, as Iceball servers do
RETRY_S, RETRY_MAX_S = 1.0, 60.0    # pauses after a failure: 1, 2, 4 … 60 s; a master restarts within seconds
CONNECT_S = 10.0                    # for a connection to come about
RESPONSE_S = 20.0                   # for an HTTP answer
UPDATE_S = 5.0                      # announced by HTTP again after a change, but at most this often
GOODBYE_S = 3.0                     # what stop() grants a master that does not answer
UNREADABLE_RATE = 1 / 600, 20       # lines in the log a second / at once: a script may write an error in the place of players each second
ANSWER_RATE = 20, 100               # queries from one source answered: a second, at once; a master sends one every 30 s


class Announcer:
    """One game server towards one master, in the game's own protocol. Without I/O, like the protocols of section 7.

    server     what is announced: name, players and so on; after changing it call `changed`
    master     the master's address and port, once they are known; nothing from elsewhere is heeded
    due        when tick() is wanted next; while a TCP master is not connected, when to connect
    state      how it stands, in words for the log
    refused    the master does not want this server; `state` says why
    """

    master_port = 27790             # where its masters listen
    port_offset = 0                 # from the port that is named to the one that takes announcements
    asked_at: Optional[int] = None  # from the game port to the UDP port that masters query; None: they do not
    done = False                    # of a connection, if there is one: as in Session

    def __init__(self, server: Server, now: float = 0.0) -> None:
        self.server = server
        self.master: Peer = ("", 0)
        self.due = now
        self.state = ""
        self.refused = self.taken = False           # taken: the master has had it
        self.failures = 0           # in a row

    def changed(self, now: float) -> None:
        """The server's numbers or texts have changed."""

    def leave(self, now: float) -> None:
        """Stop announcing, and sign off where the protocol has a way to; the end of a connection is one."""
        self.due, self.done = math.inf, True

    def answer(self, data: bytes) -> bytes:
        """What the game server answers to a master's query; raises Malformed if it is none."""
        raise Malformed("not a query")

    def failed(self, why: str, now: float) -> None:
        """The master cannot be reached; try again after a pause that grows. Its spread keeps a hundred servers from coming back at once."""
        self.state, self.done = why, True
        pause = min(RETRY_MAX_S, RETRY_S * 2 ** min(self.failures, 10))
        self.failures += 1
        self.due = now + pause * CHANCE.uniform(0.8, 1.0)

    def refuse(self, why: str, now: float) -> None:
        self.state, self.done = "refused: " + why, True
        self.refused = True
        self.due = now + REFUSED_S

    def accepted(self, state: str) -> None:
        self.state, self.refused, self.taken, self.failures = state, False, True, 0


def cut_utf8(text: str, size: int) -> bytes:
    """At most `size` bytes of UTF-8, ending with a whole character."""
    return text.encode("utf-8", "replace")[:size].decode("utf-8", "ignore").encode("utf-8")


class IceballAnnouncer(UdpProtocol, Announcer):
    """Bursts of five, a HSHK for every MSOK. After BADV or BADF silence for 30 minutes, as deployed servers keep it."""

    def __init__(self, server: Server, now: float = 0.0) -> None:
        super().__init__(server, now)
        self.sent = 0               # of the present burst
        self.answered = True        # something has come since the burst before

    @property
    def version(self) -> str:
        return self.server.version or next(s.default for s in SETTINGS if s.name == "iceball.version")

    def announcement(self) -> bytes:
        server = self.server
        return ICEBALL_ANNOUNCEMENT.pack(
            b"1CEB", ICEBALL_HBVERSION, read_iceball_version(self.version), server.port, clamp(server.players), clamp(server.max_players),
            cut_utf8(server.name, 30), cut_utf8(server.mode, 10), cut_utf8(server.map, 30))

    def datagram(self, data: bytes, peer: Peer, now: float) -> Replies:
        if peer[:2] != self.master:
            raise Malformed("not from the master")
        kind, rest = data[:4], data[4:]
        if kind == b"MSOK":
            self.answered = True
            self.accepted("announced")
            return [(b"HSHK" + rest, peer)]
        if kind == b"BADV":
            expected = "; it expects heartbeat version %d and Iceball %s" % (
                struct.unpack_from("<H", rest)[0], iceball_version_text(struct.unpack_from("<I", rest, 2)[0])) if len(rest) >= 6 else ""
            self.refuse("the master does not list Iceball %s%s" % (self.version, expected), now)
        elif kind == b"BADF":
            self.refuse("the master cannot read the announcement", now)
        else:
            raise Malformed("neither MSOK nor BADV nor BADF")
        self.sent = 0
        return []

    def tick(self, now: float) -> Replies:
        if now < self.due:
            return []
        if self.sent == 0:
            self.answered = False
        self.sent = (self.sent + 1) % ICEBALL_BURST
        if self.sent == 0 and not self.answered:
            self.state = "no answer; are address and port right, and does UDP get through?"
            self.failures += 1
        gap = ICEBALL_GAP_S if self.sent else ICEBALL_PERIOD_S - (ICEBALL_BURST - 1) * ICEBALL_GAP_S
        self.due = (self.due if now - self.due < ICEBALL_GAP_S else now) + gap
        return [(self.announcement(), self.master)]


class SubSpaceAnnouncer(UdpProtocol, Announcer):
    """An announcement at once (asss waits for 10 s until its modules are loaded; this zone runs already) and then every 60 s.

    The master pings the zone on game port + 1. Everybody is in one public arena, or in the one that the map names."""

    master_port = 4990
    port_offset = 1
    asked_at = 1

    def announcement(self) -> bytes:
        server = self.server
        return ZONE_ANNOUNCEMENT.pack(bytes(4), server.port, clamp(server.players), 1, ZONE_VERSION,
                                      self.text(server.name, 31), ZONE_PASSWORD) + self.text(server.description, 385) + b"\0"

    def text(self, text: str, size: int) -> bytes:
        """Windows-1252, which clients show, or UTF-8 for what that does not have."""
        try:
            return text.encode("cp1252")[:size]
        except UnicodeEncodeError:
            return cut_utf8(text, size)

    def datagram(self, data: bytes, peer: Peer, now: float) -> Replies:
        raise Malformed("masters do not answer announcements")

    def tick(self, now: float) -> Replies:
        if now < self.due:
            return []
        self.due = (self.due if now - self.due < SUBSPACE_PERIOD_S else now) + SUBSPACE_PERIOD_S
        self.accepted("announced; masters of this game do not answer, they ping UDP port %d" % (self.server.port + 1))
        return [(self.announcement(), self.master)]

    def answer(self, data: bytes) -> bytes:
        total = clamp(self.server.players)
        playing = total if self.server.playing is None else clamp(self.server.playing, total)
        if len(data) not in (4, 8):
            raise Malformed("a ping has 4 or 8 bytes")
        return ping_answer(data, total, playing, [(self.text(self.server.map, 15) or b"0", total, playing)])


class TcpAnnouncer(Session, Announcer):
    """An announcer that is the session of one connection after another."""

    began = 0.0                     # the connection
    brief = 0                       # short connections in a row
    buffer = b""

    def opened(self, now: float) -> bytes:
        self.done, self.buffer, self.began = False, b"", now
        return b""

    def closed(self, now: float) -> None:
        if self.due <= self.began:      # else it is known already when to come again
            if self.failures == 0:      # a master that takes a server and closes each time, as all who come are too many for it, is given time
                self.brief = self.brief + 1 if now < self.began + CONNECT_S else 0
                self.failures = max(0, self.brief - 1)
            self.failed("the master has closed the connection", now)


class AioAnnouncer(TcpAnnouncer):
    """A kept connection, in the text dialect or the framed one.

    The framed dialect announces the port alone; masters ask for the rest on it, by UDP."""

    master_port = 27011

    def __init__(self, server: Server, now: float = 0.0, framed: bool = False) -> None:
        super().__init__(server, now)
        self.framed = framed
        self.asked_at = 0 if framed else None
        self.keepalive_at = self.heard_at = now
        self.confirmed = True       # what was published last
        self.stale = False          # the name carries the players, and they are others by now

    def changed(self, now: float) -> None:
        self.stale = not self.framed

    def opened(self, now: float) -> bytes:
        self.keepalive_at, self.heard_at = now + AIO_KEEPALIVE_EVERY_S, now
        return super().opened(now) + self.publish()

    def publish(self) -> bytes:
        self.stale = self.confirmed = False
        server = self.server
        if self.framed:
            return aio_frame(struct.pack("<BH", 3, server.port))
        name = "%s [%d/%d]" % (server.name, server.players, server.max_players) if server.players or server.max_players else server.name
        return b"13#%s#%s#%d#%%\n" % (self.text(name), self.text(server.description), server.port)

    def text(self, text: str) -> bytes:
        """With the separator as <num>, and no % at the beginning, where it would end the message."""
        return re.sub("^%", "<percent>", text.replace("#", "<num>")).encode("utf-8", "replace")

    def receive(self, data: bytes, now: float) -> bytes:
        self.buffer += data
        self.heard_at = now
        out = self.frames(now) if self.framed else b""
        while not self.framed and b"#%" in self.buffer:
            message, _, self.buffer = self.buffer.partition(b"#%")
            if message.endswith(b"SUCCESS#13"):
                self.confirmed = True
                self.accepted("announced")
        if len(self.buffer) > AIO_MASTER_BYTES:
            raise Malformed("a message without end")
        return out

    def frames(self, now: float) -> bytes:
        out = b""
        while not self.done:
            found = aio_unframe(self.buffer, AIO_MASTER_BYTES)
            if found is None:
                break
            payload, self.buffer = found
            if payload[:2] == b"\5\3":
                self.accepted("announced")
            elif payload[:2] == b"\6\3":
                self.refuse(decode_utf8(payload[4:], TEXT_CHARACTERS) or "no reason given", now)
            elif payload[:2] == b"\6\4":        # a keepalive of a server that the master has forgotten
                out += self.publish()
        return out

    def tick(self, now: float) -> bytes:
        if now - self.heard_at >= AIO_SILENT_S:
            self.failed("no answer for %d s" % AIO_SILENT_S, now)
            return b""
        out = self.publish() if self.stale else b""
        if now >= self.keepalive_at:
            self.keepalive_at = now + AIO_KEEPALIVE_EVERY_S
            if self.framed:
                return aio_frame(b"\4")
            waited, out = not out, out + b"KEEPALIVE#%\n"         # answered whether the server is listed or not
            if waited and not self.confirmed:
                self.state = "the master does not confirm it; has it banned this address, refused the name, or run out of room?"
                self.failures += 1
                out += self.publish()
        return out

    def answer(self, data: bytes) -> bytes:
        if data != b"\0":
            raise Malformed("a query is the one byte 00")
        server = self.server
        name, description = cut_utf8(server.name, 65535), cut_utf8(server.description, 65535)
        return zlib.compress(b"\0" + aio_string16(name) + aio_string16(description) + struct.pack(
            "<IIH", clamp(server.players), clamp(server.max_players), clamp(int(server.version) if server.version.isdecimal() else 0)))


class HttpAnnouncer(TcpAnnouncer):
    """POST /announce, again after half the time that the master grants, and action=stop at the end."""

    def __init__(self, server: Server, now: float = 0.0) -> None:
        super().__init__(server, now)
        self.host = ""              # for the Host header, as the name servers know it; else the address
        self.listed = self.leaving = self.goodbye = False
        self.stale = False          # it has changed since it was announced

    def changed(self, now: float) -> None:
        self.stale = True
        if self.listed and not self.failures:           # a pause after a failure is one all the same
            self.due = min(self.due, max(now, self.began + UPDATE_S))

    def leave(self, now: float) -> None:
        self.leaving = True
        self.due = now if self.taken else math.inf          # its last answer may have been a proxy's

    def opened(self, now: float) -> bytes:
        super().opened(now)
        self.goodbye, self.stale = self.leaving, False
        server = self.server
        fields: Dict[str, Any] = {"game": server.game, "port": server.port}
        if self.leaving:
            fields["action"] = "stop"
        else:
            fields.update(players=server.players, max_players=server.max_players)
            fields.update((name, getattr(server, name)) for name in ("name", "mode", "map", "version", "description")
                          if getattr(server, name))
        body = to_json(fields)
        head = "POST /announce HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        host = self.host.encode("idna").decode() or self.master[0]
        return (head % (endpoint(host, self.master[1]), len(body))).encode("ascii") + body

    def receive(self, data: bytes, now: float) -> bytes:
        self.buffer += data
        if len(self.buffer) > HTTP_HEAD_BYTES + HTTP_BODY_BYTES:
            raise Malformed("an answer that is too long")
        return b""

    def tick(self, now: float) -> bytes:
        if now >= self.began + RESPONSE_S:
            self.failed("no answer within %d s; is that the port of the master's page?" % RESPONSE_S, now)
        return b""

    def closed(self, now: float) -> None:
        """The connection was asked to end with the answer, so the answer is here."""
        if self.done:
            super().closed(now)
            return
        self.done = True
        if self.leaving:
            self.due = math.inf if self.goodbye else now
            return
        response = http.client.HTTPResponse(types.SimpleNamespace(makefile=lambda mode: io.BytesIO(self.buffer)))  # type: ignore[arg-type]
        try:
            response.begin()
            body = response.read(HTTP_BODY_BYTES)
        except (http.client.HTTPException, ValueError) as error:
            self.failed("the answer cannot be read; is that the port of the master's page? %s" % ascii(error_text(error))[:TEXT_CHARACTERS], now)
            return
        self.answered(response.status, body, now)

    def answered(self, status: int, body: bytes, now: float) -> None:
        try:
            told = json.loads(body.decode("utf-8"))
        except (ValueError, RecursionError):
            told = None
        if not isinstance(told, dict):
            told = {}
        words = told.get("reason")
        words = words if words and isinstance(words, str) else body[:200].decode("utf-8", "replace")
        reason = clean(words, TEXT_CHARACTERS) or "HTTP status %d" % status
        self.listed = status < 300 and told.get("listed") is True
        if self.listed:
            ttl = told.get("ttl")
            self.accepted("listed")
            self.due = now + min(max(10, ttl if isinstance(ttl, (int, float)) else 0), 3600) / 2     # in this order against NaN
            if self.stale:
                self.changed(now)
        elif 400 <= status < 500 and status not in (408, 429):
            self.refuse(reason, now)
            if self.taken:              # by a proxy while the master starts anew, or for a name that changes again
                self.due = now + RETRY_MAX_S
        else:
            self.failed("not listed yet: " + reason, now)


class HyperbolAnnouncer(HttpAnnouncer):
    """POST /announce; the master then queries the server itself, on its game port, every 30 s."""

    asked_at = 0

    def answer(self, data: bytes) -> bytes:
        if len(data) != 5 or data[0] != 2:
            raise Malformed("a query is 02 and a timestamp")
        server = self.server
        address = ipv4_bytes(server.address) if server.address and ":" not in server.address else bytes(4)
        return b"\x1b" + data[1:] + HYPERBOL_INFO.pack(
            cut_utf8(server.name, 31), cut_utf8(server.mode, 31), clamp(server.players, 255), clamp(server.max_players, 255), 0,
            cut_utf8(server.map, 63), server.address.encode()[:19], server.port, 0, *address, cut_utf8(server.version, 15),
            0, 0, 0, 0, 0, b"", 0, 0, 0, 0)


class GamePort(UdpProtocol):
    """Answers masters' queries in the game server's place."""

    def __init__(self, *announcers: Announcer) -> None:
        """`announcers`: of the one game server, towards each of its masters."""
        self.announcers = announcers
        self.echoes, self.surplus = Limiter(ECHO_RATE), Limiter(SURPLUS_BYTES)

    def datagram(self, data: bytes, peer: Peer, now: float) -> Replies:
        answer = self.announcers[0].answer(data)
        surplus, source = len(answer) - len(data), canonical(peer[0])
        # To an AIO query of one byte a thousand times as much: all whose addresses may be made up share one bucket, as in the master. That
        # asks from whichever of its IPv6 addresses the system takes
        use = source if source_key(source) in [source_key(announcer.master[0]) for announcer in self.announcers] else ""
        return [(answer, peer)] if (self.surplus.allow(use, now, surplus) if surplus > 0 else self.echoes.allow(source, now)) else []


class Link:
    """One master of an Announcement, and the way that leads there."""

    def __init__(self, host: str, port: int, announcer: Announcer, names: Worker) -> None:
        """`names`: for this one alone. A look-up may take half a minute, each time, and keeps no other master waiting."""
        self.host, self.port, self.announcer, self.names = host, port, announcer, names
        self.resolving = self.unknown = False       # its name is looked up; there is no such name
        self.resolve_at = -math.inf             # host names are looked up anew now and then
        self.others: List[str] = []             # addresses to try, where a connection does not come about
        self.by_ipv4 = announcer.server.game in IPV4_LISTS      # one has come about, or no other would be of use
        self.datagrams: Optional[Datagrams] = None
        self.connecting: Optional[socket.socket] = None
        self.deadline = 0.0
        self.connection: Optional[Connection] = None
        self.told = ""

    @property
    def lost(self) -> bool:
        """It has to wait for its name: there is no address yet, or none that still leads there."""
        return self.resolving and (not self.announcer.master[0] or self.announcer.failures > 0)

    @property
    def hopeless(self) -> bool:
        """It has refused and never taken the server, or its name has never led anywhere."""
        return self.announcer.refused and not self.announcer.taken or self.unknown


# The errno of an OSError: the resolver's, under the name that this system has for it, or None for one of ours
NO_SUCH_NAME = {None, socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}
ANNOUNCED = ("name", "players", "max_players", "playing", "map", "mode", "version", "description")


class Announcement(Loop):
    """A game server announced to masters by somebody else: for games that cannot do it, and for bundles.

        announcement = masterserver.Announcement("iceball", 21737, ["master.example", "other.example:27790"], name="My server")
        announcement.start()                        # or run() in this thread
        announcement.update(players=5, max_players=16, map="castle")         # from any thread, whenever it changes
        announcement.stop()                         # signs off where the game's protocol has a way to

    `game`: iceball, subspace, aio, hyperbol, or any other name that the masters list. `port`: where players find the game server.
    `masters`: HOST or HOST:PORT, or several. Further fields: name, players, max_players, playing, map, mode, version, description.
    `dialect`: for AIO, text or framed; text if there is a name. `players_from`: a file whose last line is as for read_players(), read again
    when it changes. A wrong argument raises ValueError. Where masters query the game server itself (SubSpace on port + 1, Hyperbol and
    framed AIO on the port, by UDP), they are answered here if that port is free, and left to the game server if not. `give_up`: run() ends
    when each master has refused from the beginning or has a name that does not exist; `failure` then says why.
    """

    def __init__(self, game: str, port: int, masters: Union[str, Sequence[str]], dialect: str = "", players_from: str = "",
                 give_up: bool = False, **fields: Any) -> None:
        if dialect not in ("", "text", "framed"):
            raise ValueError("the dialect must be text or framed")
        if dialect and game != "aio":
            raise ValueError("only AIO has dialects")
        if type(port) is not int:
            raise ValueError("port %r: expected a number" % (port,))
        self.server = Server(read_game_id(game), "", port, "", 0.0, math.inf)
        self.apply(fields)
        if not self.server.name and (game in ("iceball", "subspace", "hyperbol") or dialect == "text"):
            self.server.name = "%s server" % GAME_TITLES[game]
        make: Callable[..., Announcer] = ANNOUNCERS.get(game, HttpAnnouncer)
        if game == "aio":
            make = functools.partial(AioAnnouncer, framed=dialect == "framed" or not self.server.name)
        self.links = []
        for text in [masters] if isinstance(masters, str) else masters:
            announcer = make(self.server, time.monotonic())
            host, given = read_place(text)
            link = Link(host, (given or announcer.master_port) + announcer.port_offset, announcer, Worker("names", self.wake))
            for number in (port, port + (announcer.asked_at or 0), link.port):
                if not 0 < number <= 65535:
                    raise ValueError("port %d is needed, and is not a port" % number)
            if isinstance(announcer, HttpAnnouncer):
                announcer.host = link.host
            self.links.append(link)
        if not self.links:
            raise ValueError("expected a master")
        check_is_file(players_from)
        self.players_from = players_from
        self.players_read: Optional[Tuple[int, ...]] = None         # its stamp when it was read
        self.give_up = give_up
        self.failure = ""
        self.updates: Dict[str, Any] = {}           # not announced yet
        self.sockets: List[Datagrams] = []
        self.tally = Tally()
        self.limiter, self.unreadable = Limiter(ANSWER_RATE), Limiter(UNREADABLE_RATE)
        self.next_tick = -math.inf
        super().__init__()

    # What is announced

    def update(self, **fields: Any) -> None:
        """Announce these values from now on; from any thread. Raises ValueError."""
        self.check(fields)
        with self.life:
            self.updates.update(fields)         # the latest alone: a game may say it with each frame, and go on when this has ended
        self.wake()

    def check(self, fields: Mapping[str, Any]) -> None:
        for name, value in fields.items():
            if name not in ANNOUNCED:
                raise ValueError("%s cannot be announced%s" % (name, nearest(name, ANNOUNCED)))
            if name in ("players", "max_players", "playing"):
                if type(value) is not int or not 0 <= value <= PLAYERS_MAX:
                    raise ValueError("%s: expected a number from 0 to %d" % (name, PLAYERS_MAX))
            elif not isinstance(value, str):
                raise ValueError("%s: expected a text" % name)
            if name == "version" and value and self.server.game == "iceball":
                read_iceball_version(value)

    def apply(self, fields: Mapping[str, Any]) -> bool:
        """True: something has changed."""
        self.check(fields)
        changed = False
        for name, value in fields.items():
            value = clean(value, TEXT_CHARACTERS) if isinstance(value, str) else value
            changed |= value != getattr(self.server, name)
            setattr(self.server, name, value)
        return changed

    def read_file(self) -> None:
        """Take the last line over when the file has changed, or say what is wrong with it."""
        stamp = file_stamp(self.players_from)
        if stamp == self.players_read:
            return
        self.players_read = stamp
        try:
            check_is_file(self.players_from)
            with open(self.players_from, "rb") as file:
                mark = file.read(2)
                file.seek(max(0, os.fstat(file.fileno()).st_size - HTTP_BODY_BYTES))        # a script may add lines for years
                raw = file.read(HTTP_BODY_BYTES)
            coding = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}.get(mark, "utf-8")        # Windows' echo 5 >FILE
            lines = [line for line in raw.decode(coding, "replace").lstrip("\ufeff").split("\n") if line.strip()]
            if lines:                   # a file that is being written anew may be empty for a moment
                self.read_line(lines[-1])
        except (OSError, ValueError) as error:
            self.players_unknown(error)

    def read_line(self, line: str) -> None:
        """Announce what it says, or say what is wrong with it; from any thread."""
        try:
            self.update(**read_players(line))
        except ValueError as error:
            self.players_unknown(error)

    def players_unknown(self, error: Exception) -> None:
        """Say why, but not for ever."""
        if self.unreadable.allow("", time.monotonic()):
            log.warning("the players are not known: %s", error)

    # Running

    def open_all(self) -> None:
        announcers = [link.announcer for link in self.links]
        if announcers[0].asked_at is not None:
            port = self.server.port + announcers[0].asked_at
            try:
                self.open("0.0.0.0", port, GamePort(*announcers))
                log.info("masters' queries are answered here, on UDP port %d", port)
                with contextlib.suppress(OSError):          # no IPv6 here
                    self.open("::", port, GamePort(*announcers))
            except OSError as error:
                log.info("masters' queries on UDP port %d are left to the game server: %s", port, error)
        try:
            for link in self.links:
                if isinstance(link.announcer, UdpProtocol):
                    link.datagrams = self.open("0.0.0.0", 0, link.announcer)
        except OSError as error:
            raise StartError("no socket to announce from: %s" % error) from None

    def open(self, address: str, port: int, protocol: UdpProtocol) -> Datagrams:
        sock = bound_socket(socket.AF_INET6 if ":" in address else socket.AF_INET, "udp", address, port)
        datagrams = Datagrams("announce", sock, protocol, self.tally, self.limiter)
        self.sockets.append(datagrams)
        self.selector.register(sock, selectors.EVENT_READ, datagrams.ready)
        return datagrams

    def round(self) -> None:
        now = time.monotonic()
        tick = now >= self.next_tick
        if tick:
            self.next_tick = now + TICK_S
            if self.players_from:
                self.read_file()
        if self.updates:
            with self.life:
                fields, self.updates = self.updates, {}
            if self.apply(fields):
                for link in self.links:
                    link.announcer.changed(now)
        for link in self.links:
            self.advance(link, now, tick)
        if self.give_up and all(link.hopeless for link in self.links):
            self.failure = "; ".join("%s: %s" % (endpoint(link.host, link.port), link.announcer.state) for link in self.links)
            self.stopping = True
            return
        due = min([self.next_tick] + [link.announcer.due for link in self.links if not (link.lost or link.connecting or link.connection)])
        for key, _ in self.selector.select(max(0.0, due - time.monotonic())):
            key.data(time.monotonic())

    def leave(self) -> None:
        now = time.monotonic()
        until = now + GOODBYE_S
        for link in self.links:
            link.announcer.leave(now)
            if link.connecting is not None and link.announcer.due == math.inf:          # there is nothing to sign off from
                self.selector.unregister(link.connecting)
                link.connecting.close()
                link.connecting = None
            if link.connection is not None and link.connection.session.done:
                link.connection.writable(now)
        while now < until and not self.failure and any(link.connection or link.connecting or link.announcer.due <= now for link in self.links):
            self.round()
            now = time.monotonic()

    def advance(self, link: Link, now: float, tick: bool) -> None:
        """Whatever is due for one master."""
        announcer = link.announcer
        if link.connection is not None:
            if tick:
                link.connection.tick(now)
        elif link.connecting is not None:
            if now >= link.deadline:
                self.connected(link, now, errno.ETIMEDOUT)
        elif announcer.due <= now and not link.lost:
            if now >= link.resolve_at and not link.resolving:
                link.resolving = True
                link.names.submit(functools.partial(addresses, link.host, link.datagrams is None), functools.partial(self.found, link))
            elif link.datagrams is not None:
                for data, to in link.datagrams.protocol.tick(now):
                    if not link.datagrams.send(data, to):
                        announcer.failed("no announcement can be sent; is there a network?", now)
            else:
                self.connect(link, now)
        if announcer.state != link.told:
            link.told = announcer.state
            log.log(logging.WARNING if announcer.refused or announcer.failures else logging.INFO,
                    "%s: %s", endpoint(link.host, link.port), announcer.state)

    def woken(self, now: float) -> None:
        super().woken(now)
        for link in self.links:
            link.names.deliver(now)

    def found(self, link: Link, result: Any, now: float) -> None:
        link.resolving = False
        if isinstance(result, list) and ":" in result[0] and link.datagrams is not None:
            result = OSError("it has no IPv4 address, and this game uses no other")
        if isinstance(result, list):
            link.announcer.master, link.unknown = (result[0], link.port), False
            link.others = [address for address in result[1:] if not (link.by_ipv4 and ":" in address)]      # that will lead there again
        elif not link.announcer.master[0]:
            # Not while no name server can be asked: the network may come up after us, and a descriptor or a thread may become free
            link.unknown = isinstance(result, UnicodeError) or getattr(result, "errno", 0) in NO_SUCH_NAME
            link.announcer.failed("the name cannot be resolved: %s" % result, now)
            return
        link.resolve_at = now + (RESOLVE_RETRY_S if ":" in link.announcer.master[0] else RESOLVE_S)         # IPv4 may come up after IPv6

    def connect(self, link: Link, now: float) -> None:
        address, port = link.announcer.master[:2]
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:                    # no IPv6 here, or no descriptors left
            self.no_way(link, error, now)
            return
        sock.setblocking(False)
        link.connecting, link.deadline = sock, now + CONNECT_S
        self.selector.register(sock, selectors.EVENT_WRITE, functools.partial(self.connected, link))
        status = sock.connect_ex((address, port))
        if status not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
            self.connected(link, now, status)

    def connected(self, link: Link, now: float, status: Optional[int] = None) -> None:
        """The attempt has ended: as the socket says, or badly, for the reason in `status`."""
        sock, link.connecting = link.connecting, None
        assert sock is not None
        self.selector.unregister(sock)
        try:
            if status is None:
                status = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if status:
                windows = getattr(socket, "errorTab", {})           # whose strerror() does not know the numbers of its sockets
                raise OSError(status, windows.get(status) or os.strerror(status))
            self.server.address = canonical(sock.getsockname()[0])
            link.by_ipv4 = link.by_ipv4 or sock.family == socket.AF_INET
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            sock.close()
            self.no_way(link, error, now)
            return
        session = link.announcer
        assert isinstance(session, Session)
        link.connection = Connection(self, sock, link.host, session, self.tally, "announce", now)
        link.connection.watch()
        link.connection.call(session.opened, now)

    def no_way(self, link: Link, error: OSError, now: float) -> None:
        if link.others:                             # at once
            link.announcer.master = link.others.pop(0), link.port
            return
        link.resolve_at = now                       # perhaps the master has moved
        link.announcer.failed("no connection: %s" % (error.strerror or error), now)

    def forget(self, connection: Connection) -> None:
        self.watch(connection, 0)
        for link in self.links:
            if link.connection is connection:
                link.connection = None

    def close_all(self) -> None:
        for link in self.links:
            link.names.stop(0.0)
            if link.connection is not None:
                link.connection.close(time.monotonic())
            if link.connecting is not None:
                link.connecting.close()
        for datagrams in self.sockets:
            datagrams.sock.close()


ANNOUNCERS: Dict[str, Callable[..., Announcer]] = {
    "iceball": IceballAnnouncer, "subspace": SubSpaceAnnouncer, "aio": AioAnnouncer, "hyperbol": HyperbolAnnouncer}


def read_players(line: str) -> Dict[str, Any]:
    """`5`, `5/16` or `5/16 map name`: players, their maximum, the map. Raises ValueError."""
    match = re.fullmatch(r"(?P<players>\d{1,5})(?:\s*/\s*(?P<max_players>\d{1,5}))?(?:\s+(?P<map>\S.*))?", line.strip())
    if not match:
        raise ValueError("%r is not PLAYERS, PLAYERS/MAXIMUM or PLAYERS/MAXIMUM MAP" % line.strip()[:60])
    return {name: text if name == "map" else int(text) for name, text in match.groupdict().items() if text}


def command_announce(arguments: argparse.Namespace) -> int:
    """announce: until a signal or the end of standard input; EXIT_FAILED if no master is left."""
    fields = {name: getattr(arguments, name) for name in ANNOUNCED if getattr(arguments, name, None) is not None}
    from_stdin = arguments.players_from == "-"
    try:
        announcement = Announcement(arguments.game, arguments.port, arguments.masters, dialect=arguments.dialect, give_up=True,
                                    players_from="" if from_stdin else arguments.players_from, **fields)
    except ValueError as error:
        raise SettingsError("announce: %s" % error) from None
    start_log(Settings({"server.log_level": "debug" if arguments.verbose else "info"}))

    def take(line: str) -> None:
        if line.strip():
            announcement.read_line(line)
    stop_on_signals(announcement.stop)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:        # as nohup leaves it
        signal.signal(signal.SIGHUP, lambda number, frame: announcement.stop())
    if from_stdin or arguments.exit_with_stdin:
        read_stdin(take if from_stdin else lambda line: None, announcement.stop)
    announcement.run()
    if announcement.failure:
        raise StartError("announce: no master accepts this server: %s" % announcement.failure)
    return EXIT_OK


# --- Asking game servers and masters ---------------------------------------------------------------------------------

# What `ping` and `list` do. Each game has a function in PINGS and in LISTS that gives what it learned, ready for JSON;
# an OSError (TimeoutError, say) or Malformed says in words why there is nothing.

Facts = Dict[str, Any]

ASK_TRIES, ASK_WAIT_S = 3, 2.0      # a lost datagram, and a round trip around the world several times over
FETCH_S = 10.0                      # silence of a list server, after which it has gone
FETCH_BYTES = 64 << 20              # a list of 50,000 servers has 20 MB in its longest form
ASK_TOTAL_S = OUTPUT_TOTAL_S        # for all of it, however it comes: our master gives no reader longer
AIO_TEXT_S = 3.0                    # masters answer text at once; one without that dialect says nothing


class ToolError(Exception):
    """A tool's end: its exit status and a message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def udp_ask(host: str, port: int, question: Callable[[int], bytes], answer: Callable[[bytes], Any]) -> Tuple[Any, float]:
    """Send `question(attempt)` until `answer(data)` takes what comes; its result, and milliseconds. Raises TimeoutError."""
    wrong = ""
    family, _, _, _, place = socket.getaddrinfo(resolved(host, True), port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(place)
        for attempt in range(ASK_TRIES):
            sock.send(question(attempt))
            asked_at = time.monotonic()
            while time.monotonic() < asked_at + ASK_WAIT_S:
                try:
                    sock.settimeout(max(0.001, asked_at + ASK_WAIT_S - time.monotonic()))
                    return answer(sock.recv(POLL_ANSWER_BYTES)), (time.monotonic() - asked_at) * 1000
                except Malformed as error:
                    wrong = "; what came is not an answer: %s" % error
                except socket.timeout:
                    pass
    raise TimeoutError("%s does not answer on UDP port %d%s" % (host, port, wrong))


def ping_subspace(host: str, port: int) -> Facts:
    if port == 65535:
        raise OSError("zones are pinged on the next port, and there is none")
    poll = ZonePoll()
    ping_ms = 0.0
    complete = False
    while not complete:
        nonce = ping_nonce()
        try:
            complete, ping_ms = udp_ask(host, port + 1, functools.partial(poll.question, nonce),
                                        functools.partial(poll.answer, nonce=nonce))
        except TimeoutError:
            if not poll.answered:
                raise
            break
    return dict(poll.fields(), arenas=poll.arenas_text(), ping_ms=round(ping_ms, 1))


def ping_hyperbol(host: str, port: int) -> Facts:
    nonce = CHANCE.getrandbits(32)
    found, ping_ms = udp_ask(host, port, lambda attempt: struct.pack("<BI", 2, nonce), lambda data: hyperbol_info(data, nonce))
    return dict(found, ping_ms=round(ping_ms, 1), **found.pop("details"))


def ping_aio(host: str, port: int) -> Facts:
    found, ping_ms = udp_ask(host, port, lambda attempt: b"\0", aio_info)
    return dict(zip(("name", "description", "players", "max_players", "version"), found), ping_ms=round(ping_ms, 1))


class ListFetch(SubSpaceLink):
    """The player's end of SubSpaceList's exchange: `zones` is the list once it is there."""

    def __init__(self, key: bytes, minimum: int, now: float) -> None:
        super().__init__(now, [b"\1" + struct.pack("<I", minimum)])
        self.key = key
        self.connected = False
        self.connect_at = -math.inf
        self.data = bytearray()
        self.zones: Optional[List[Dict[str, Any]]] = None

    def packet(self, data: bytes, now: float) -> List[bytes]:
        if data[:2] == b"\0\2":
            if data[2:6] != self.key:
                raise Malformed("another key: the master wants encryption")
            self.connected = True
        elif data[:2] == b"\0\x0a" and len(data) > 6:
            total = int.from_bytes(data[2:6], "little")
            if total > FETCH_BYTES or len(self.data) + len(data) - 6 > total:
                raise Malformed("list: more than the %d bytes announced, or too many" % total)
            self.data += data[6:]
            if len(self.data) == total:
                self.zones = zone_entries(bytes(self.data))
        elif data[:1] == b"\1":             # a short list may come in one packet
            self.zones = zone_entries(data)
        else:
            return super().packet(data, now)
        return []

    def send(self, now: float) -> List[bytes]:
        if self.connected:
            return super().send(now)
        if now - self.connect_at < LINK_RESEND_S:
            return []
        self.connect_at = now
        return [b"\0\1" + self.key + b"\1\0"]


def list_subspace(host: str, port: int) -> List[Facts]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(LINK_RESEND_S / 2)
        sock.connect((resolved(host), port))
        now = time.monotonic()
        fetch = ListFetch(os.urandom(3) + b"\0", 0, now)
        out, wrong, heard_at = fetch.tick(now), "", now
        while fetch.zones is None and not fetch.closed and now - heard_at < FETCH_S:
            data = b""
            with contextlib.suppress(socket.timeout):
                for packet in out:
                    sock.send(packet)
                data = sock.recv(MAX_DATAGRAM_BYTES)
            now = time.monotonic()
            try:
                out = fetch.receive(data, now) if data else fetch.tick(now)
                heard_at = now if data else heard_at
            except Malformed as error:
                out, wrong = fetch.tick(now), "; what came is not a list: %s" % error
        with contextlib.suppress(OSError):      # it may have gone
            for packet in out + [b"\0\7", b"\0\7"]:
                sock.send(packet)
    if fetch.zones is None:
        raise TimeoutError("%s sends no list on UDP port %d%s" % (host, port, wrong))
    return fetch.zones


def hyperbol_list(host: str, port: int) -> List[Tuple[str, int, int]]:
    """Address, port and flavor of every server that a master lists. Raises OSError and Malformed."""
    deadline, awaited = time.monotonic() + EXPORT_LIST_S, "answer"
    try:
        with socket.create_connection((host, port), EXPORT_CONNECT_S) as sock, sock.makefile("rb") as file:
            awaited = "greeting"
            begin = file.read(4)
            key, _ = hyperbol_greeting(begin + (file.read(HYPERBOL_GREETING.size - 4) if begin == b"HBSL" else b""))
            sock.sendall(struct.pack("<IB3x", key, 255))        # the document: always 255, for all servers
            data, awaited = b"", "list"
            while len(data) < EXPORT_LIST_BYTES:
                if time.monotonic() > deadline:
                    raise socket.timeout
                part = file.read1(RECV_BYTES)
                if not part:
                    break
                data += part
    except socket.timeout:
        raise socket.timeout("no %s came in time; is that the port of a Hyperbol master?" % awaited) from None
    return hyperbol_entries(data)


def list_hyperbol(host: str, port: int) -> List[Facts]:
    return [dict(zip(("address", "port", "flavor"), entry)) for entry in hyperbol_list(host, port)]


def list_aio(host: str, port: int) -> List[Facts]:
    with contextlib.suppress(socket.timeout, ConnectionResetError, Malformed):      # without the text dialect a master waits for more, or hangs up
        return list_aio_text(host, port)
    return list_aio_framed(host, port)


def list_aio_text(host: str, port: int) -> List[Facts]:
    with socket.create_connection((host, port), AIO_TEXT_S) as sock:
        sock.sendall(b"12#%\n")
        data = b""
        until = time.monotonic() + FETCH_S
        while True:                         # greetings may come before the list
            start = re.search(rb"(?:^|[%\0\r\n])12#", data)          # not a number in one
            if start and data.endswith(b"#%"):
                break
            piece = sock.recv(RECV_BYTES)
            if not piece or len(data) > FETCH_BYTES or time.monotonic() > until:
                raise Malformed("no list came before the end")
            data += piece
    fields = data[start.end():-2].decode("utf-8", "replace").split("#")
    if fields[::5] == [str(index) for index in range(len(fields) // 5)]:    # the document's form: an index before each
        fields = [field for i, field in enumerate(fields) if i % 5]
    texts = [clean(field.replace("<num>", "#").replace("<percent>", "%"), TEXT_CHARACTERS) for field in fields]
    rows = [dict(zip(("name", "description", "address", "port"), texts[i:i + 4])) for i in range(0, len(texts) - 3, 4)]
    for row in rows:
        if not re.fullmatch(r"[0-9]{1,5}", row["port"]):
            raise Malformed("port: %r" % row["port"][:20])
    # Without the document's entry for an empty list
    return [dict(row, port=int(row["port"])) for row in rows
            if not (row["address"] == "127.0.0.1" and row["name"].startswith("No servers currently online"))]


def list_aio_framed(host: str, port: int) -> List[Facts]:
    with socket.create_connection((host, port), FETCH_S) as sock, sock.makefile("rb") as file:
        sock.sendall(aio_frame(b"\2"))
        payload = b""
        while payload[:1] != b"\2":         # the greeting comes first
            head = file.read(4)
            found = aio_unframe(head + file.read(int.from_bytes(head[:3], "little")), 3 + 65535 * 258)
            if found is None:
                raise Malformed("no list came before the end")
            payload, _ = found
    rows = []
    at = 3
    for _ in range(int.from_bytes(payload[1:3], "little")):
        size = payload[at] if at < len(payload) else 0
        if at + 3 + size > len(payload):
            raise Malformed("list: cut off")
        rows.append({"address": clean(payload[at + 1:at + 1 + size].decode("ascii", "replace")),
                     "port": int.from_bytes(payload[at + 1 + size:at + 3 + size], "little")})
        at += 3 + size
    return rows


def list_iceball(host: str, port: int) -> List[Facts]:
    try:
        with contextlib.closing(http.client.HTTPConnection(host, port, timeout=FETCH_S)) as connection:
            connection.request("GET", "/master.json", headers={"Connection": "close"})
            response = connection.getresponse()
            body = response.read(FETCH_BYTES)
    except http.client.HTTPException as error:
        raise Malformed("HTTP: %r" % error) from None
    try:
        return [{"address": clean(str(s["address"])), "port": int(s["port"]), "name": clean(str(s["name"])),
                 "mode": clean(str(s["mode"])), "map": clean(str(s["map"])), "players": int(s["players_current"]),
                 "max_players": int(s["players_max"]), "version": clean(str(s.get("version", "")))}
                for s in json.loads(body.decode("utf-8"))["servers"]]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise Malformed("/master.json: status %d, %r" % (response.status, error)) from None


PINGS: Dict[str, Callable[[str, int], Facts]] = {"subspace": ping_subspace, "hyperbol": ping_hyperbol, "aio": ping_aio}
LISTS: Dict[str, Tuple[Callable[[str, int], List[Facts]], int]] = {     # with the default port
    "iceball": (list_iceball, 27790),
    "subspace": (list_subspace, 4990),
    "hyperbol": (list_hyperbol, 20203),
    "aio": (list_aio, 27011),
}


# --- Command line ----------------------------------------------------------------------------------------------------

def read_place(text: str) -> Tuple[str, Optional[int]]:
    """HOST, HOST:PORT, ADDRESS, [ADDRESS] or [ADDRESS]:PORT."""
    if text and (":" not in text or text.count(":") > 1 and not text.startswith("[") and "/" not in text or re.fullmatch(r"\[.*\]", text)):
        return text.strip("[]"), None
    return read_endpoint(text)


def argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A type for argparse that keeps the reader's words."""
    def read_argument(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return read_argument


def say(text: str) -> None:
    """Write lines to standard output, as far as it can show them. Raises ToolError where it takes none; a pipe whose reader has gone is no
    mistake, and that message is empty."""
    if sys.stdout is None:
        raise ToolError(EXIT_FAILED, "standard output is closed")
    encoding = sys.stdout.encoding or "ascii"
    try:
        sys.stdout.write((text + "\n").encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())     # for what is left, which the interpreter writes at its end
        gone = error.errno in (errno.EPIPE, errno.EINVAL)          # the latter under Windows
        raise ToolError(EXIT_FAILED, "" if gone else "standard output: %s" % error) from None


def reason(error: Exception) -> str:
    """Why nothing came, in words."""
    return "that is not a host name" if isinstance(error, UnicodeError) else getattr(error, "strerror", None) or str(error)


def within(seconds: float, ask: Callable[[], Any]) -> Any:
    """What `ask` gives or raises; TimeoutError if that takes longer: a peer that sends a byte now and then could hold it for ever."""
    ended = threading.Event()
    worker = Worker("ask", ended.set)
    worker.submit(ask, lambda result, now: None)
    worker.stop(0.0)
    until = time.monotonic() + seconds
    while not ended.wait(0.1):          # on Windows nothing interrupts a long wait
        if time.monotonic() > until:
            raise TimeoutError("it was not complete within %g s" % seconds)
    result = worker.results[0][1]
    if isinstance(result, Exception):
        raise result
    return result


def complain(text: str) -> None:
    for handler in log.handlers:                # what led to it comes first
        handler.flush()
    with contextlib.suppress(OSError):          # whatever standard error is, the exit status tells
        if text and sys.stderr is not None:
            print("masterserver.py: %s" % text, file=sys.stderr, flush=True)


def outcome(arguments: argparse.Namespace, ask: Callable[[str, int], Facts], words: Callable[[Facts], Iterable[str]]) -> int:
    """Print what `ask(host, port)` learns, as JSON or in words; the exit status."""
    host, port = arguments.place
    try:
        result = {"game": arguments.game, "address": host, "port": port, **within(ASK_TOTAL_S, lambda: ask(host, port))}
    except (Malformed, OSError, UnicodeError, RuntimeError) as error:           # the last: no thread can be had
        raise ToolError(EXIT_FAILED, "%s: %s" % (endpoint(host, port), reason(error))) from None
    say(json.dumps(result, indent=2) if arguments.json else "\n".join(words(result)))
    return EXIT_OK


def command_ping(arguments: argparse.Namespace) -> int:
    return outcome(arguments, PINGS[arguments.game],
                   lambda found: ("%-12s %s" % item for item in found.items() if item[1] not in (None, "")))


def command_list(arguments: argparse.Namespace) -> int:
    ask, default_port = LISTS[arguments.game]
    arguments.place = arguments.place[0], arguments.place[1] or default_port
    return outcome(arguments, lambda host, port: {"servers": ask(host, port)},
                   lambda found: [list_line(row) for row in found["servers"]] or ["no servers"])


def list_line(row: Facts) -> str:
    players = "%s" % row.get("players", "-") + ("/%s" % row["max_players"] if row.get("max_players") else "")
    return "%7s  %-21s  %s" % (players, endpoint(row["address"], row["port"]), row.get("name", ""))


def arguments_parser() -> argparse.ArgumentParser:
    """Without a command it serves. To add one: a function command_NAME(arguments) -> int, and its part here."""
    parser = argparse.ArgumentParser(prog="masterserver.py", formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXIT_STATUSES,
                                     description="A master server for Iceball, Hyperbol, SubSpace, AIO and others.")
    parser.add_argument("--config", metavar="FILE", help="read the settings from FILE, not from masterserver.ini beside the program")
    parser.add_argument("--set", metavar="SECTION.KEY=VALUE", action="append", default=[], help="set this, whatever the ini says; repeatable")
    parser.add_argument("--check", action="store_true", help="say what is wrong with the settings, or probably wrong on this machine, and exit")
    parser.add_argument("--print-config", action="store_true", help="print every setting with its default and its meaning")
    parser.add_argument("--ready-file", metavar="FILE", help="write what listens where to FILE, as JSON, once everything listens")
    parser.add_argument("--exit-with-stdin", action="store_true", help="exit when standard input is closed, as a child process should")
    parser.add_argument("-v", "--verbose", action="store_true", help="log at debug level")
    parser.add_argument("--version", action="version", version="masterserver.py " + __version__)
    parser.set_defaults(command=command_serve)
    commands = parser.add_subparsers(title="commands; without one it serves", metavar="COMMAND")
    ping = commands.add_parser("ping", help="query a game server")
    ping.add_argument("place", metavar="HOST:PORT", type=argument(read_endpoint),
                      help="the game port, even where another one is queried")
    ping.add_argument("--game", choices=sorted(PINGS), required=True)
    ping.set_defaults(command=command_ping)
    listing = commands.add_parser("list", help="show a master's list")
    listing.add_argument("place", metavar="HOST[:PORT]", type=argument(read_place), help="the master; without a port on its game's default")
    listing.add_argument("--game", choices=sorted(LISTS), required=True)
    listing.set_defaults(command=command_list)
    for command in (ping, listing):
        command.add_argument("--json", action="store_true", help="as JSON")

    export = commands.add_parser("export", help="write a master's list as XML", description=EXPORT_HELP,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
    export.set_defaults(command=command_export)
    export.add_argument("--game", choices=("hyperbol",), default="hyperbol", help="the master's game (hyperbol)")
    export.add_argument("master", metavar="HOST[:PORT]", type=argument(read_place),
                        help="the master; on port %d if none is given" % LISTS["hyperbol"][1])
    export.add_argument("--output", metavar="FILE", default="servers.xml", help="the file to write (servers.xml)")
    export.add_argument("--ftp", metavar="ftp://USER@HOST/PATH/", help="upload it there; see above for the password")
    export.add_argument("--every", metavar="SECONDS", type=argument(read_number(1, 86400, float)),
                        help="repeat, with this long a pause")

    announce = commands.add_parser(
        "announce", help="announce a game server that cannot do it itself", formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXIT_STATUSES, description="Announce a game server to one or several masters, in its game's own protocol, until told to stop. "
        "Start the game server first:\nwhere masters query the game server itself (SubSpace, Hyperbol, framed AIO), "
        "they are answered here if that UDP port is free.")
    announce.add_argument("--game", required=True, metavar="iceball|subspace|aio|hyperbol|NAME",
                          help="any other NAME that the masters list is announced by HTTP")
    announce.add_argument("--port", required=True, type=int, help="where players find the game server")
    announce.add_argument("--name", help="as players see it")
    announce.add_argument("--players", type=int, help="how many there are now")
    announce.add_argument("--max-players", type=int, help="how many there may be")
    announce.add_argument("--map", help="the map being played")
    announce.add_argument("--mode", help="the game mode")
    announce.add_argument("--version", help="of the game; if left out, Iceball's is the default of [iceball] version")
    announce.add_argument("--description", help="a sentence or two (SubSpace, AIO, HTTP)")
    announce.add_argument("--dialect", choices=("text", "framed"), default="", help="of AIO; text if there is a name, which framed does not carry")
    announce.add_argument("--players-from", metavar="FILE|-", default="",
                          help="read PLAYERS, PLAYERS/MAXIMUM or PLAYERS/MAXIMUM MAP from this file's last line whenever it changes, "
                               "or from each line of standard input")
    announce.add_argument("-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help="log at debug level")
    announce.add_argument("masters", nargs="+", metavar="MASTER[:PORT]", help="default ports: iceball 27790, subspace 4990 (announcements "
                          "go to the next one), aio 27011, others 27790")
    announce.add_argument("--exit-with-stdin", action="store_true", default=argparse.SUPPRESS, help="exit when standard input is closed")
    announce.set_defaults(command=command_announce)
    return parser


def program_path() -> str:
    """This file, or the executable or zip archive that it is part of: what is unpacked of that may be gone with the process."""
    if getattr(sys, "frozen", False):               # by PyInstaller, cx_Freeze and the like
        return os.path.abspath(sys.executable)
    return os.path.abspath(getattr(getattr(__spec__, "loader", None), "archive", __file__))


def load_settings(arguments: argparse.Namespace) -> Settings:
    beside = os.path.join(os.path.dirname(program_path()), "masterserver.ini")
    overrides = arguments.set + ["server.log_level=debug"] * arguments.verbose
    return Settings.load(beside if arguments.config is None else arguments.config, overrides, missing_ok=arguments.config is None)


def read_stdin(line: Callable[[str], None], end: Callable[[], None]) -> None:
    """In a thread of its own: each line of standard input, up to 4,096 bytes of it, then `end`.

    From a file of its own: a thread that waits in sys.stdin keeps the interpreter from ending."""
    def read() -> None:
        with contextlib.suppress(OSError), open(0, "rb", closefd=False) as file:       # there is none, or it was taken away: the same as its end
            begins = True
            for text in iter(functools.partial(file.readline, 4096), b""):
                if begins:
                    line(text.decode("utf-8-sig", "replace"))
                begins = text.endswith(b"\n")
                if not begins and len(text) < 4096:         # a terminal tells its end only once
                    break
        log.info("standard input has ended")            # perhaps from the beginning, where a program starts others without one
        end()
    threading.Thread(target=read, name="masterserver stdin", daemon=True).start()


END_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGBREAK") if hasattr(signal, name))


def stop_on_signals(stop: Callable[[], None]) -> None:
    """SIGINT, SIGTERM and Ctrl+Break end the program cleanly."""
    for number in END_SIGNALS:
        signal.signal(number, lambda number, frame: stop())


LOG_FILE_BYTES, LOG_FILES = 10 << 20, 3         # of each, and how many older ones: 40 MB at most
LOG_LINES = 1000                    # wait for the thread that writes them
LOG_RETRY_S = 0.1                   # after a write that failed
LOG_END_S = 1.0                     # for what waits when the program ends


class Log(logging.Handler):
    """Lines for standard error or a file, written by a thread: a terminal in which somebody has selected text, a pipe that nobody reads or a
    full disk keeps nobody else waiting. Lines for which there is no room by then are lost, and counted.

    No buffer of Python's is in between: one that cannot be emptied keeps the interpreter from ending, and repeats what was tried again."""

    def __init__(self, path: str) -> None:
        """`path`: "" for standard error. Raises OSError; io.UnsupportedOperation where that is no file."""
        with contextlib.suppress(OSError):
            # Under Windows no device can be told from another
            if not WINDOWS and is_special(path) and sys.stderr is not None and os.path.samestat(os.stat(path), os.fstat(sys.stderr.fileno())):
                path = ""               # /dev/stderr, which cannot be opened where it is a socket, as under systemd
        self.path, self.limit, self.inode = path, LOG_FILE_BYTES, -1
        self.taken = self.written = self.lost = 0           # lines
        self.faults = Limiter(FAULT_RATE)
        self.file = open(os.devnull if path or sys.stderr is None else os.dup(sys.stderr.fileno()), "wb", 0)
        if path and (os.path.isdir(path) or not is_special(path)):          # to open a pipe or a device may take for ever
            self.follow()
        self.waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()        # a signal handler that logs may interrupt its put()
        super().__init__()
        threading.Thread(target=self.write, name="masterserver log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and not self.faults.allow("", time.monotonic()):
            return
        if self.waiting.qsize() >= LOG_LINES:
            self.lost += 1
            return
        told = "%d lines are missing here\n" % self.lost if self.lost else ""
        self.lost = 0
        self.taken += 1
        self.waiting.put((told + self.format(record) + "\n").encode("utf-8", "backslashreplace"))

    def flush(self) -> None:
        """Wait until everything is written, but not long; the interpreter asks for it at its end."""
        deadline = time.monotonic() + LOG_END_S
        while self.written < self.taken and time.monotonic() < deadline:
            time.sleep(0.01)

    def write(self) -> None:
        """The thread. What cannot be written is tried again: a disk gets room, a pipe another reader."""
        while True:
            line = self.waiting.get()
            while line:
                with contextlib.suppress(OSError):
                    if self.path:
                        self.follow()
                    line = line[self.file.write(line):]         # None: nothing, of what others have made non-blocking
                if line:
                    time.sleep(LOG_RETRY_S)
            self.written += 1

    def follow(self) -> None:
        """Begin a new file if the former is full, or somebody has renamed or removed it. Raises OSError."""
        stamp = file_stamp(self.path)
        if stamp and stamp[1] < self.limit and stamp[2] == self.inode:
            return
        self.inode = -1
        self.file.close()                           # Windows renames no open file
        if stamp and stamp[1] >= self.limit:
            path = os.path.realpath(self.path)      # where a link leads stays the place of the log
            names = [path] + ["%s.%d" % (path, number) for number in range(1, LOG_FILES + 1)]
            try:
                for number in range(LOG_FILES, 0, -1):
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(names[number - 1], names[number])
            except OSError as error:                # it grows, and rotation is tried again when it has grown by as much
                log.warning("the log file cannot be rotated, and grows: %s", error)
        self.file = open(self.path, "ab", 0)
        found = os.fstat(self.file.fileno())
        self.inode, self.limit = found.st_ino, (found.st_size // LOG_FILE_BYTES + 1) * LOG_FILE_BYTES


def start_log(settings: Settings) -> None:
    handler: logging.Handler
    try:
        handler = Log(settings.file("server.log_file"))
    except io.UnsupportedOperation:         # as IDLE's window
        handler = logging.StreamHandler()
    except RuntimeError as error:
        raise StartError("%s: this user or container has as many as it may (ulimit -u, pids.max); six are needed." % error) from None
    except OSError as error:
        raise StartError("the log cannot be written: %s; change [server] log_file." % error) from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(settings["server.log_level"].upper())
    log.propagate = False


def write_file(path: str, data: bytes) -> None:
    """All of it or nothing: readers find the old file or the new one. What is not a plain file (a pipe, a device) is written to directly.
    Raises OSError."""
    if is_special(path):
        with open(path, "wb") as file:
            file.write(data)
        return
    path = os.path.realpath(path)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path + ".new")            # of a crash, or a link that another user has laid in a folder such as /tmp
        with open(path + ".new", "xb") as file:
            file.write(data)
        os.replace(path + ".new", path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(path + ".new")
        raise


def summary(server: MasterServer) -> str:
    """One line for people: what listens where, and the page."""
    places: Dict[str, Dict[str, None]] = {}         # each place once
    for l in server.listeners:
        places.setdefault(l.protocol, {})["%s %d" % (l.transport.upper(), l.port)] = None
    page = next((l for l in server.listeners if l.protocol == "http"), None)
    return "; ".join("%s on %s" % (name, ", ".join(place)) for name, place in places.items()) + (
        "; the page is at http://%s/" % endpoint("localhost" if page.host in ("0.0.0.0", "::", "127.0.0.1", "::1") else page.host, page.port)
        if page else "")


def first_contact(server: MasterServer) -> List[str]:
    """For people: what to put into each game server's settings, and where players look. Each protocol is named with an address that it listens on."""
    public = server.rules.public_address
    hosts: Dict[str, str] = {}
    own = {"0.0.0.0": own_address(), "::": own_address("2001:db8::1")}
    # Without a public one IPv4 comes first, unless this machine has none
    for listener in sorted(server.listeners, key=lambda l: (not public and not own.get(l.host, l.host), (":" in l.host) != (":" in public))):
        if listener.protocol not in hosts:
            bound = own.get(listener.host, listener.host) or "localhost"
            hosts[listener.protocol] = public if public and (":" in public) == (":" in listener.host) else bound
    page = next((l.port for l in server.listeners if l.protocol == "http"), None)
    return ["%s: %s" % (whom, line) for _, whom, line in contact_lines(server.listeners, hosts.__getitem__, server.settings["games"])] + (
        ["Players and browsers: http://%s/" % endpoint(hosts["http"], page)] if page else [])


def unserved(server: MasterServer) -> List[str]:
    """What is switched on but can list nobody: it listens nowhere, or only where none of its servers can be queried."""
    listening = {(l.protocol, ":" in l.host) for l in server.listeners}
    return ["[server] bind: it has no IPv4 address, and %s uses no other; none of its servers can be listed." % name
            for name in server.tallies if (name, False) not in listening and (name in IPV4_LISTS or (name, True) not in listening)]


def writable(path: str) -> bool:
    """Whether this file, or where a link leads, can be written, or made if it is not there; nothing is made."""
    place = path if os.path.exists(path) else os.path.dirname(os.path.realpath(path))
    return os.path.isdir(place) == (place != path) and os.access(place, os.W_OK)


def at_odds(settings: Settings, protocols: Sequence[Any]) -> List[str]:
    """Settings each of which is good, and with which servers cannot be listed, or not for long."""
    warnings: List[str] = []
    iceball, aio = (any(isinstance(protocol, kind) for protocol in protocols) for kind in (Iceball, Aio))
    silence_s = ICEBALL_PERIOD_S - (ICEBALL_BURST - 1) * ICEBALL_GAP_S
    if iceball and settings["iceball.timeout"] <= silence_s:
        warnings.append("[iceball] timeout: it must be longer than the %d s between two bursts, or servers leave the list in each pause." % silence_s)
    if iceball and settings["limits.datagrams"][1] < 2:
        warnings.append("[limits] datagrams: allow 2 at once at least: an Iceball server's handshake follows its announcement within milliseconds.")
    if aio and "text" in settings["aio.dialects"] and len(settings["aio.dialects"]) > 1 and settings["aio.text_greeting_after"] < LINK_RESEND_S:
        warnings.append("[aio] text_greeting_after: it is short: peers of the other dialects that are far away are sent the greeting, and fail.")
    if aio and settings["limits.connections_open"] < settings["limits.servers_per_source"]:
        warnings.append("[limits] connections_open: AIO servers keep one each; no more of a source are listed, whatever servers_per_source says.")
    for port, names in (("http.ports", "games"), ("hyperbol.port", "hyperbol.servers"), ("subspace.port", "subspace.zones")):
        if settings[names] and settings[port] in (None, ()):
            warnings.append("[%s] %s: it is empty, and nothing that %s names is listed." % (*port.split("."), names))
    return warnings


def check(settings: Settings) -> Tuple[List[str], List[str]]:
    """What keeps the server from starting on this machine, and what is probably wrong even if it starts."""
    errors: List[str] = []
    warnings: List[str] = []
    trial = copy.copy(settings)
    trial.values = dict(settings.values, **{"server.database": ""})         # it is only looked at
    server = MasterServer(trial)
    try:
        server.bind()
        warnings += unserved(server)
    except StartError as error:
        errors += str(error).split("\n")
    server.stop()
    path = settings.file("server.database")
    if path and (is_special(path) or not writable(path) or not writable(os.path.realpath(path) + "-wal")):         # SQLite makes files beside it
        (errors if "server.database" in settings.given and not has_content(path) else warnings).append(
            "[server] database: %s cannot be written; the list would not survive a restart." % path)
    path = settings.file("server.log_file")
    if path and not (os.path.basename(path) and writable(path)):           # what ends in a slash is a folder, there or not
        errors.append("[server] log_file: %s cannot be written." % path)
    elif path and not is_special(path) and not writable(os.path.realpath(path) + ".new"):
        warnings.append("[server] log_file: %s cannot be rotated, and would grow; its folder cannot be written." % path)
    bound = settings["server.bind"]
    if any(":" in address for address in bound):
        try:
            bound_socket(socket.AF_INET6, "udp", "::1", 0).close()
        except OSError as error:
            warnings.append("This machine has no IPv6 (%s): players who have only IPv6 cannot reach it." % (error.strerror or error))
    if all(isinstance(protocol, Poller) for protocol in server.protocols):
        warnings.append("Every port is empty: nothing is served.")
    if any(isinstance(protocol, Iceball) for protocol in server.protocols) and not {27790, 27795} & set(settings["http.ports"]):
        warnings.append("[http] ports: Iceball's players ask for the list on port 27790 or 27795.")
    warnings += at_odds(settings, server.protocols)
    public = settings["server.public_address"]
    own = own_address()
    if public and public in LOCAL:
        warnings.append("[server] public_address: %s is private; players outside cannot reach what is listed there." % public)
    left_out = [game for game in IPV4_LISTS if game in server.tallies]
    if ":" in public and left_out:
        warnings.append("[server] public_address: %s is IPv6, for which the lists of %s have no room: they leave out game servers on this machine "
                        "that announce to localhost." % (public, " and ".join(left_out)))
    if not public:
        warnings.append("[server] public_address is empty: game servers on this machine that announce to localhost are listed as 127.0.0.1, "
                        "where no other machine finds them. Set it to the address that players use.")
    if all(is_loopback(address) for address in bound):
        warnings.append("[server] bind: %s can be reached from this machine only." % ", ".join(bound))
    elif not any(ipaddress.ip_address(address).is_unspecified or address not in LOCAL for address in bound):
        warnings.append("[server] bind: %s is private; the router must forward the ports to it for players outside." % ", ".join(bound))
    elif own and own in LOCAL and not public:
        warnings.append("This machine's address %s is private: for players outside, the router must forward the ports to it." % own)
    elif not own:
        warnings.append("This machine has no route to the internet over IPv4.")
    return errors, warnings


def command_check(settings: Settings) -> int:
    errors, warnings = check(settings)
    say("\n".join(["The settings are good." if not errors else "The settings can be read, but the server cannot start:"]
                  + ["error: " + text for text in errors] + ["warning: " + text for text in warnings]))
    return EXIT_FAILED if errors else EXIT_OK


def serve(settings: Settings, arguments: argparse.Namespace) -> int:
    start_log(settings)
    sys.setswitchinterval(SWITCH_S)
    systemd = Systemd()
    server = MasterServer(settings, reload=functools.partial(load_settings, arguments))
    server.tell = systemd.tell
    server.descriptors = descriptor_limit
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, lambda number, frame: setattr(server, "reload_asked", True))
    held = server.wake_out.dup(), server.wake_in.dup()          # as a signal may come after the server has closed its own
    stop_on_signals(server.stop)
    signal.set_wakeup_fd(held[0].fileno(), warn_on_full_buffer=False)
    if hasattr(gc, "set_threshold"):        # PyPy's collector has no such settings
        gc.set_threshold(*GC_THRESHOLDS)
    gc.disable()                            # nothing made before everything listens is garbage
    try:
        server.bind()
        if hasattr(gc, "freeze"):
            gc.freeze()
        gc.enable()
        if arguments.ready_file:            # without the port that nobody contacts first
            ready = json.dumps({"pid": os.getpid(), "listeners": [l._asdict() for l in server.listeners if l.protocol != "poll"]})
            try:
                write_file(arguments.ready_file, ready.encode("utf-8") + b"\n")
            except OSError as error:
                raise StartError("the ready file cannot be written: %s" % error) from None
        log.info("%s", summary(server))
        for line in first_contact(server):
            log.info("%s", line)
        for line in unserved(server):
            log.warning("%s", line)
        if arguments.exit_with_stdin:
            read_stdin(lambda line: None, server.stop)
        server.tell("READY=1")
        server.watchdog_s = watchdog_interval()
        server.run()
    except StartError as error:
        if settings["server.log_file"]:         # standard error is told anyway
            for line in str(error).split("\n"):
                log.error("%s", line)
        raise
    finally:
        signal.set_wakeup_fd(-1)
        server.stop()
        for sock in held:
            sock.close()
        systemd.close()
    for name, tally in server.tallies.items():
        counts = {field: getattr(tally, field) for field in TALLY_HELP}
        log.info("stopped; %s: %s", name, ", ".join("%s %d" % item for item in counts.items() if item[1]) or "nothing")
    return EXIT_OK


def command_serve(arguments: argparse.Namespace) -> int:
    if arguments.print_config:
        say(config_text()[:-1])
        return EXIT_OK
    if arguments.check:
        return command_check(load_settings(arguments))
    if arguments.ready_file and os.path.isfile(arguments.ready_file):           # of an earlier start; one that fails leaves none
        with contextlib.suppress(OSError):                  # then it cannot be written either, which is reported
            os.remove(os.path.realpath(arguments.ready_file))
    return serve(load_settings(arguments), arguments)


# --- Export ----------------------------------------------------------------------------------------------------------

EXPORT_CONNECT_S = 5.0              # the document's script waits so long for the master …
EXPORT_LIST_S = 60.0                # … and this is for the whole list, however slowly it comes
EXPORT_LIST_BYTES = 12 * 65536      # 65,536 servers are more than any master has
EXPORT_ROUND_S = 1.5                # who has not answered is queried once more, and has as long again: the script's 3 s
EXPORT_BURST = 50                   # queries sent between two looks at the answers, so that no buffer overflows
EXPORT_FTP_S = 30.0                 # for each answer of the FTP server, which may have a disk to wake

# The script's own numbers
EXIT_CONNECTION, EXIT_IDENTIFIER, EXIT_EMPTY, EXIT_FILE, EXIT_FTP = 3, 4, 6, 7, 8
EXPORT_HELP = """\
Fetch the list of a Hyperbol master, query every server in it, and write the answers as XML, as the script in
Hyperbol's protocol document does. A server that does not answer has responding="0".

The FTP password is read from the environment variable MASTERSERVER_FTP_PASSWORD or from ~/.netrc. PATH begins in
the user's folder (in the root if it begins with %2F); if it does not end in /, its last part is the file's name.

Exit status: 0 done; 2 wrong usage; 3 no connection to the master, or no answer from it; 4 it is not a Hyperbol master;
6 its list is empty; 7 the file cannot be written; 8 the upload failed. With --every it goes on until a signal or
Ctrl+C, and ends with 0."""


def command_export(arguments: argparse.Namespace) -> int:
    host, port = arguments.master[0], arguments.master[1] or LISTS["hyperbol"][1]
    upload = FtpPlace(arguments.ftp, os.path.basename(arguments.output)) if arguments.ftp else None
    if not arguments.every:
        say(export_once(host, port, arguments.output, upload))
        return EXIT_OK
    stop_on_signals(functools.partial(signal.default_int_handler, signal.SIGINT, None))         # KeyboardInterrupt
    while True:
        try:
            say(export_once(host, port, arguments.output, upload))
        except ToolError as error:          # standard output's as well: the file is what is wanted
            complain(str(error))
        pauses = math.ceil(arguments.every)
        for _ in range(pauses):             # Ctrl+Break interrupts none, and would be heeded at the end of a long one
            time.sleep(arguments.every / pauses)


def export_once(host: str, port: int, path: str, upload: Optional[FtpPlace]) -> str:
    """Fetch, query, write, upload; what was done, in words. Raises ToolError."""
    try:
        entries = within(ASK_TOTAL_S, lambda: hyperbol_list(host, port))            # no signal interrupts the look-up of its name
    except (OSError, UnicodeError, RuntimeError) as error:          # the last: no thread can be had
        raise ToolError(EXIT_CONNECTION, "No list from %s: %s" % (endpoint(host, port), reason(error))) from None
    except Malformed as error:
        raise ToolError(EXIT_IDENTIFIER, "%s is not a Hyperbol master: %s." % (endpoint(host, port), error)) from None
    if not entries:
        raise ToolError(EXIT_EMPTY, "The list of %s is empty; %s is left as it is." % (endpoint(host, port), path))
    try:
        servers = query_hyperbol_servers(entries)
    except OSError as error:
        raise ToolError(EXIT_FAILED, "The servers cannot be queried: %s." % reason(error)) from None
    data = servers_xml(map(server_xml, servers), time.time())
    try:
        write_file(path, data)
    except OSError as error:
        raise ToolError(EXIT_FILE, "%s cannot be written: %s." % (path, error.strerror or error)) from None
    if upload:
        upload.store(data)
    return "%d servers, %d of them responding, %d players: %s written%s." % (
        len(servers), sum(s.responding for s in servers), sum(s.players for s in servers), path,
        " and uploaded to " + upload.host if upload else "")


def query_hyperbol_servers(entries: Iterable[Tuple[str, int, int]]) -> List[Server]:
    """Query all of them at once; those that do not answer have responding False."""
    servers: Dict[Peer, Server] = {}
    for address, port, flavor in entries:
        servers[address, port] = Server("hyperbol", address, port, address, 0.0, 0.0, flavor=flavor, responding=False)
    silent = dict(servers)
    asked: Dict[Tuple[Peer, int], float] = {}           # when, by place and timestamp
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        datagrams = Datagrams("export", sock, UdpProtocol(), Tally(), Limiter(ANSWER_RATE))
        for _ in range(POLL_ATTEMPTS):
            for number, place in enumerate(list(silent)):
                timestamp = CHANCE.getrandbits(32)
                asked[place, timestamp] = time.monotonic()
                with contextlib.suppress(OverflowError):                # no port: it does not answer
                    datagrams.send(struct.pack("<BI", 2, timestamp), place)
                if number % EXPORT_BURST == 0:
                    read_answers(datagrams, asked, silent, 0.01)
            deadline = time.monotonic() + EXPORT_ROUND_S
            while silent and time.monotonic() < deadline:
                read_answers(datagrams, asked, silent, min(0.1, deadline - time.monotonic()))
                progress("%d of %d servers have answered" % (len(servers) - len(silent), len(servers)))
    progress("")
    return list(servers.values())


def read_answers(datagrams: Datagrams, asked: Mapping[Tuple[Peer, int], float], silent: Dict[Peer, Server], wait: float) -> None:
    """Wait for answers, take what there is, and strike their servers off `silent`."""
    select.select([datagrams.sock], [], [], max(0.0, wait))
    now = time.monotonic()
    for data, place in zip(*datagrams.receive()[:2]):
        timestamp = int.from_bytes(data[1:5], "little")
        if place in silent and (place, timestamp) in asked:
            with contextlib.suppress(Malformed):
                fields = hyperbol_info(data, timestamp)
                server = silent.pop(place)
                server.responding, server.ping_ms = True, (now - asked[place, timestamp]) * 1000
                for name, value in fields.items():
                    setattr(server, name, value)


def progress(text: str) -> None:
    """A line that the next one overwrites, if there is somebody to see it."""
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K" + text)
        sys.stderr.flush()


class FtpPlace:
    """Where a file goes by FTP: `ftp://USER@HOST[:PORT]/PATH/`. Raises ToolError."""

    def __init__(self, url: str, name: str) -> None:
        """`name`: of the file, if the URL has none."""
        try:
            parts = urllib.parse.urlsplit(url)
            self.host, self.port = parts.hostname or "", parts.port or ftplib.FTP_PORT
        except ValueError:
            raise ToolError(EXIT_USAGE, "--ftp %s: that is not a URL." % url) from None
        if parts.scheme != "ftp" or not self.host or parts.query or parts.fragment:
            raise ToolError(EXIT_USAGE, "--ftp %s: expected ftp://USER@HOST/PATH/." % url)
        if parts.password is not None:
            raise ToolError(EXIT_USAGE, "--ftp: others can see the command line; put the password into the environment "
                                        "variable MASTERSERVER_FTP_PASSWORD or into ~/.netrc.")
        folder, _, last = parts.path[1:].rpartition("/")
        self.folder, self.name = urllib.parse.unquote(folder), urllib.parse.unquote(last) or name
        self.user = urllib.parse.unquote(parts.username or "")

    def login(self) -> Tuple[str, str]:
        """User and password; a server without either is used as anonymous."""
        password = os.environ.get("MASTERSERVER_FTP_PASSWORD")
        if password is not None:
            return self.user or "anonymous", password
        try:
            found = netrc.netrc().authenticators(self.host)
        except FileNotFoundError:
            found = None
        except (OSError, UnicodeDecodeError, netrc.NetrcParseError) as error:
            raise ToolError(EXIT_FTP, "~/.netrc cannot be used: %s." % error) from None
        if found and (not self.user or found[0] == self.user):
            return found[0], found[2] or ""
        if self.user:
            raise ToolError(EXIT_FTP, "MASTERSERVER_FTP_PASSWORD and ~/.netrc have no password for %s at %s." % (
                self.user, self.host))
        return "anonymous", ""

    def store(self, data: bytes) -> None:
        login = self.login()

        def upload() -> None:
            with contextlib.closing(ftplib.FTP(timeout=EXPORT_FTP_S)) as ftp:
                ftp.encoding = "latin-1"        # of its answers, in which any byte may be …
                ftp.connect(self.host, self.port)
                ftp.encoding = "utf-8"          # … and of names
                ftp.login(*login)
                if self.folder:
                    ftp.cwd(self.folder)
                ftp.storbinary("STOR " + self.name, io.BytesIO(data))
                with contextlib.suppress(*ftplib.all_errors):           # the file is there
                    ftp.quit()
        try:
            within(ASK_TOTAL_S, upload)             # as for the list
        except (ftplib.Error, OSError, EOFError, ValueError, RuntimeError) as error:            # ValueError: a line break in a name
            words = str(error)
            with contextlib.suppress(UnicodeEncodeError):
                words = decode_legacy(words.encode("latin-1"), TEXT_CHARACTERS)
            words = clean(words, TEXT_CHARACTERS) or "it has closed the connection"             # EOFError has none
            raise ToolError(EXIT_FTP, "The upload to %s failed: %s." % (endpoint(self.host, self.port), words)) from None


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = arguments_parser()
    arguments = parser.parse_args(argv)
    lasting = arguments.command in (command_serve, command_announce) or getattr(arguments, "every", None)
    for name in ("config", "set", "check", "print_config", "ready_file", "exit_with_stdin"):
        if (getattr(arguments, name) and arguments.command is not command_serve
                and (name, arguments.command) != ("exit_with_stdin", command_announce)):
            parser.error("--%s is for serving, not for this command" % name.replace("_", "-"))
    try:
        return arguments.command(arguments)
    except KeyboardInterrupt:
        return EXIT_OK if lasting else EXIT_FAILED
    except (SettingsError, StartError, ToolError) as error:
        complain(str(error))
        return error.status if isinstance(error, ToolError) else EXIT_USAGE if isinstance(error, SettingsError) else EXIT_FAILED


if __name__ == "__main__":
    exit_status = main()
    for end_signal in (*END_SIGNALS, getattr(signal, "SIGHUP", signal.SIGINT)):     # one more, while the interpreter ends, would give another status
        signal.signal(end_signal, signal.SIG_IGN)
    sys.exit(exit_status)
