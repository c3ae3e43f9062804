#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""masterserver.py: where game servers announce themselves and players find them.

    python3 masterserver.py                 serve; the page is at http://localhost:27790/
    python3 masterserver.py --help          everything else that it can do
    python3 masterserver.py --print-config  every setting, with its default and its meaning

One file, standard library only, CPython 3.8 or later or PyPy. Read from the top, each section uses
only what stands above it:

     1  this text                   7  protocols: what they share, and a room for each game
     2  limits                      8  pages: HTML, CSS, JavaScript
     3  settings                    9  web: routes, lists as JSON, XML and pages
     4  wire helpers               10  GAMES, the table of the rooms
     5  registry                   11  event loop, news, other masters
     6  storage                    12  client tools and command line

    game                     transport, default port                  in the program
    Iceball, current         UDP 27790, list by HTTP on TCP 27790     class Iceball
    Iceball, first draft     the same                                 class IceballDraft
    Hyperbol                 TCP 20203, servers polled by UDP         class Hyperbol
    SubSpace                 UDP 4991 (announce, ping), 4990 (list)   SubSpace, SubSpaceList
    AIO, three dialects      TCP 27011                                class Aio
    Quake III, its family    UDP 27950                                class Quake3
    Luanti (Minetest)        HTTP POST /announce, probed by UDP       class Luanti
    DDNet, Teeworlds         HTTP POST /ddnet/15/register             class Ddnet
    Sauerbraten, Red Eclipse TCP 28787, 28800, servers polled by UDP  Sauerbraten, RedEclipse
    any other game           HTTP POST /announce                      post_announce in section 9
    news to webhooks         HTTP POST to them                        News in section 11
    lists of other masters   by each game's protocol                  Upstreams in section 11
    other masters            Redis or Valkey, TCP 6379                Cluster in section 11

Sections 3 to 10 use no socket, no thread, no clock, and no file except the ini and the database. A
protocol is given bytes and the time, and returns bytes; what else it needs, the program does for it
(class Game). So each protocol is tested with recorded packets and a clock that the test moves. To
add a game, see GAMES in section 10.
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
import email.utils
import errno
import ftplib
import functools
import gc
import hashlib
import html
import http.client
import io
import ipaddress
import itertools
import json
import logging
import logging.handlers
import math
import netrc
import operator
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
from typing import (Any, Callable, Dict, FrozenSet, Iterable, Iterator, List, Mapping, NamedTuple,
                    Optional, Sequence, Tuple, Union)

__version__ = "1.0"

try:
    import resource
except ImportError:                 # Windows has no such limits
    pass
try:
    import ssl                      # urllib has loaded it already
except ImportError:                 # a Python without OpenSSL has no HTTPS
    pass
try:
    import ctypes                   # for MessageVector alone
except (ImportError, MemoryError):  # under MemoryDenyWriteExecute, or a Python without it
    pass

log = logging.getLogger("masterserver")

# ================================================================================================
# 2  Limits
#
# Limits that several places use or that tests change, each with its reason or its source. Limits
# that an operator may want to change are settings (section 3).
# ================================================================================================

TICK_S = 1.0                    # between ticks of protocols; their documents count whole seconds
LOOK_S = 0.25                   # between ticks of connections; AIO's greeting is due after 1.2 s
DRAIN_DATAGRAMS = 128           # are read from a socket, in 1 ms, before the others have their turn
MAX_DATAGRAM_BYTES = 2048       # longer ones are truncated; the longest in a document has 520
RECV_BYTES = 65536              # the most that is read from a connection at once
TURNS_S = 0.02                  # connections have their turns, before the datagrams come again
REFUSED_OPEN = 8                # connections over a source's limit are told so, others just closed
# After our last byte, further input of the peer is read and dropped, for a time and up to a number
# of bytes, before the connection is closed. Some clients lose the answer if it is closed at once
LINGER_S = 5.0
LINGER_BYTES = 65536
OUTPUT_TOTAL_S = 120.0          # a client that takes longer to read one answer is disconnected
OUTPUT_BYTES = 48 << 20         # may wait for all readers together: two lists of 50,000 servers
WORKER_JOBS = 64                # of one source, or of a webhook, may wait; others are refused
# Host names of strangers that are looked up. With a slow name server each takes half a minute
LOOKUPS = 64
# Game servers of one source that may wait for the same look-up. With the longest announcement of
# any game, those of all strangers take 80 MB
LOOKUP_WAITERS = 16
STOP_DISK_S = 5.0               # at a stop, a batch that is being written has this long to end
DESCRIPTORS_KEPT = 40           # are kept free for listeners, the database and the log

# The longest record of a server in JSON. Several masters exchange records of all that they list
RECORD_BYTES = 64_000
NAME_CHARACTERS = 128           # Hyperbol's names have 32 bytes, Iceball's 30, AIO's have no limit
# For each character of a text that is kept, so many are read: it may have colours and accents
RAW_CHARACTERS = 4
RAW_BYTES = 4 * RAW_CHARACTERS      # in UTF-8
TEXT_CHARACTERS = 512           # of a description; the longest one in a document has 386 bytes
PLAYERS_MAX = 65535             # in the list with the widest field, a u16

COOKIE_WINDOW_S = 30            # a cookie is valid for one to two; servers return it in a second
COOKIE_MAC_BYTES = 8            # at 100,000 guesses a second, one takes six million years
SITE_SOURCES = 16               # an IPv6 /48, which anybody can have, has as much as 16 sources
LIMITER_SOURCES = 16384         # the sources that one limiter remembers, in about 3 MB
# The bytes that all unproven sources together get beyond what they have sent: (a second, at once).
# Each use of allow_surplus() has as much. It is enough for 200 lists a second, and gives an
# attacker with forged addresses no more than 0.8 Mbit/s
SURPLUS_BYTES = 100_000, 1_000_000
# The rate of answers to the poller: so high that it is never reached. With a real limit, a flood
# with a game server's address could keep out the answers of that game server
ANSWERS_RATE = 1e6, 1e6
ALTERED_SERVERS = 100_000       # may wait for the disk: a full list, and as many that have left
KNOWN_SERVERS = 60_000          # servers that have left, and games, that the disk remembers
KNOWN_AFTER_S = 300.0           # a server that leaves sooner after its first sight is forgotten
# Packets that /check can explain: so many whose senders have proven their addresses, and as many
# others. Either take 26 MB at most
OUTCOMES_KEPT = 32768
OUTCOMES_PER_SOURCE = 64        # two for each of the 32 servers that it may list by default
OUTCOMES_PER_S = 1000           # of those that are not proven: a flood leaves the last half minute
OUTCOME_CHARACTERS = 200        # the longest detail: two lines on the page

HTTP_LINE_BYTES = 4096          # a search for 128 Chinese characters needs 1,200
HTTP_HEAD_BYTES = 16384         # browsers behind proxies send up to 4 kB
# An announcement needs 500 bytes, or 12,500 if all its texts have the greatest length. Luanti's is
# longer, because it has the names of all mods
HTTP_BODY_BYTES = 65536
ANNOUNCED_FIELDS_MAX = 64       # with so many, a body takes 3 ms; Luanti's announcements have 27
HTTP_REQUEST_S = 10.0           # the time from a request's first byte to its last
HTTP_IDLE_S = 30.0              # without a request on a kept connection; the page sends one in 5 s
HTTP_CACHE_BYTES = 16 << 20     # of responses; a list of 50,000 servers is cached by itself
# Longer bodies are not compressed, because that would stop the event loop for too long. The list of
# 10,000 servers has 5 MB
GZIP_MAX_BYTES = 6 << 20
# Nor are those that become longer than this, which is known within 35 ms. The list of 10,000
# servers becomes 150 kB; random text, which is slow to compress, would remain 4 MB
GZIPPED_BYTES = 512 << 10
GZIP_LEVEL = 1                  # level 3 takes up to four times as long and saves 6 %
# What rendering and compressing a list takes, for each server and for each kB, times ten: so much
# time belongs to other work before the list, or another one, is rendered again
RENDER_SERVER_S = 100e-6
RENDER_KB_S = 50e-6
# New entries of a list that are rendered in one turn of a connection. That takes 5 to 20 ms
RENDERED_AT_ONCE = 1000
# Servers whose texts are gathered in one turn of a search. That takes 40 ms if each of them is a
# DDNet server with 64 players, and otherwise less than 10
SEARCHED_AT_ONCE = 200
CACHE_S = 5                     # browsers keep a response for so long; the page asks as often
# If the file with the countries has changed, those of so many servers are looked up in a second.
# That takes 2 ms, or 15 ms with the worst file that somebody could make
COUNTRY_LOOKUPS = 100
PAGE_ROWS = 2000                # the servers on one page; a search finds the others

# ================================================================================================
# 3  Settings
#
# A table of settings. A function reads the text of each setting and returns its value. The ini,
# --set, --print-config, the README's table and the error messages all use this table. A live
# setting takes effect on reload, any other at the next start. The settings of a game stand with it.
# ================================================================================================

MAX_PORT = 65535


class SettingsError(Exception):
    """A setting is wrong. The message names the file and the key, and says what is expected."""


def without_secrets(text):
    """Return a text for the log, with "…" after "://". The URLs of webhooks and of Redis are
    secret, and nobody can tell where a password in them ends."""
    before_url, separator, _ = text.partition("://")
    return before_url + separator + "…" if separator else text


# A reader takes the text of a setting and returns its value, or raises ValueError. The message says
# what is expected, and repeats nothing of the text: Settings.set_text() adds what may be shown

read_text = str.strip


def read_line(text):
    # A further line is probably a setting that was indented by mistake. It would be lost silently
    if "\n" in text.strip():
        raise ValueError("expected one line; an indented line continues the one above")
    return text.strip()


def read_without_url(text):
    # Everybody may see this line, and the URL may be a webhook's that stands in the wrong section
    if "://" in text:
        raise ValueError("a URL cannot stand here")
    return read_line(text)


def choice_reader(choices):
    """`choices` maps each word, in lower case, to its value."""
    def read(text):
        word = text.strip().lower()
        if word not in choices:
            raise ValueError("expected one of %s" % ", ".join(choices))
        return choices[word]

    return read


read_flag = choice_reader(configparser.ConfigParser.BOOLEAN_STATES)
read_log_level = choice_reader({level: level for level in ("debug", "info", "warning", "error")})


def number_reader(low, high, kind=int):
    def read(text):
        try:
            number = kind(text.strip())
        except ValueError:
            raise ValueError("expected a number") from None
        if not low <= number <= high:
            raise ValueError("expected a number from %.12g to %.12g" % (low, high))
        return number

    return read


def read_port(text):
    """Return the port to listen on, 0 for one that the system chooses, None for no listener."""
    # The last port is not allowed, because a room may also listen on the port after this one
    return number_reader(0, MAX_PORT - 1)(text) if text.strip() else None


def list_reader(read_item, separator=","):
    """The reader returns a tuple, without empty items."""
    def read(text):
        items = []
        for number, item in enumerate(text.strip().split(separator), 1):
            try:
                if item.strip():
                    items.append(read_item(item.strip()))
            except ValueError as error:
                raise ValueError("item %d: %s" % (number, error)) from None
        return tuple(items)

    return read


def pattern_reader(pattern, expected):
    """The text has to match the pattern as a whole. `expected` describes such a text."""
    def read(text):
        if not re.fullmatch(pattern, text.strip()):
            raise ValueError("expected " + expected)
        return text.strip()

    return read


read_game_id = pattern_reader("[a-z0-9_-]{1,32}", "1 to 32 characters of a-z, 0-9, - and _")
# Such a name needs no escaping in keys, metrics and JSON
PLAIN_NAME = "[A-Za-z0-9._-]{1,64}"
read_plain_name = pattern_reader("(%s)?" % PLAIN_NAME,
                                 "at most 64 of the characters A-Z, a-z, 0-9, . _ -")


def read_own_game_id(text):
    # The names of sections include the ids of the games that the program knows
    if text in section_names():
        raise ValueError("the id %s is taken" % text)
    return read_game_id(text)


def read_colour(text):
    """Return "#rrggbb", or "" for none."""
    read = pattern_reader("(#?([0-9a-f]{3}|[0-9a-f]{6}))?", "a colour such as #1f4fd8")
    digits = read(text.lower()).lstrip("#")
    if len(digits) == 3:
        digits = "".join(2 * digit for digit in digits)
    return digits and "#" + digits


def read_link(text):
    """Return the place of a link, "head" or "foot", its words and its URL."""
    read = pattern_reader(r"(foot:)?(?!\s*foot:).*\S\s+(https?://[^\s/]|mailto:)\S+",
                          "words, then https://…, http://… or mailto:…")
    words, url = read(text).rsplit(maxsplit=1)
    if words.startswith("foot:"):
        return "foot", words[5:].strip(), url
    return "head", words, url


def read_rate(text):
    """Return (a second, at once). `100` means `100/100`."""
    per_second, _, at_once = text.partition("/")
    read_per_second = number_reader(0.01, 1e6, float)
    read_at_once = number_reader(1, 1e6, float)
    return read_per_second(per_second), read_at_once(at_once or per_second)


def read_pattern(text):
    try:
        return re.compile(text, re.IGNORECASE)
    except (re.error, OverflowError, RecursionError):
        raise ValueError("expected a regular expression") from None


# --- Addresses, and where programs are ------------------------------------------------------------

def parse_address(text):
    """Return the object of ipaddress for an IP address, or raise ValueError. An IPv4-mapped IPv6
    address becomes IPv4."""
    try:
        parsed = ipaddress.ip_address(text)
    except ValueError:
        raise ValueError("expected an IPv4 or IPv6 address") from None
    # Only an IPv6 address has this attribute, and it is None unless the address is IPv4-mapped
    return getattr(parsed, "ipv4_mapped", None) or parsed


def read_address(text):
    """Return an IP address in its usual form, without the brackets that may stand around it."""
    return str(parse_address(text.strip().strip("[]")))


def read_addresses(text):
    return tuple([read_address(part) for part in text.split(",")])


@functools.lru_cache(1024)          # the same address is asked for several times in a row
def is_unicast(address):
    """Return whether this text is an IP address that a game server can have. An address with a
    scope, such as fe80::1%eth0, is not, because the scope means nothing on other hosts."""
    if "%" in address:
        return False
    try:
        parsed = parse_address(address)
    except ValueError:
        return False
    if parsed.version == 6:
        return not (parsed.is_multicast or parsed.is_unspecified)
    # 0.* means "this network" (RFC 1122); 224.* and above are multicast (RFC 1112) or reserved
    first_byte, *_ = parsed.packed
    return 1 <= first_byte < 224


def read_unicast(text):
    address = read_address(text)
    if not is_unicast(address):
        raise ValueError("this cannot be the address of a server")
    return address


def read_public(text):
    return read_unicast(text) if text.strip() else ""


def read_network(text):
    try:
        # strict=False also allows 198.51.100.7/24, an address within the network
        return ipaddress.ip_network(text.strip(), strict=False)
    except ValueError:
        raise ValueError("expected an IPv4 or IPv6 network, such as 198.51.100.0/24") from None


# HOST:PORT. The host is in brackets if it is an IPv6 address
ENDPOINT = re.compile(r"\s*(?:\[([^][/]+)\]|([^][:/]+)):([0-9]{1,5})\s*")


def read_endpoint(text: str) -> Tuple[str, int]:
    """Return (host, port) for HOST:PORT or [ADDRESS]:PORT, with a port from 1 on, or raise
    ValueError."""
    match = ENDPOINT.fullmatch(text)
    if match:
        bracketed_host, host, port = match.groups()
        if 0 < int(port) <= MAX_PORT:
            return bracketed_host or host, int(port)
    raise ValueError("expected ADDRESS:PORT")


def endpoint_text(host, port):
    return ("[%s]:%d" if ":" in host else "%s:%d") % (host, port)


def read_numeric_endpoint(text):
    address, port = read_endpoint(text)
    return read_address(address), port


WEB_PORTS = {"http": 80, "https": 443}


def read_master_place(text, schemes=("https",)):
    """Return (host, port, whether to speak HTTPS) of a master, as the user of a tool or the ini
    names it: HOST, HOST:PORT, ADDRESS, [ADDRESS], [ADDRESS]:PORT or, with one of these schemes of
    WEB_PORTS, SCHEME://HOST[:PORT], also with a list's path. The port is None if it is left out."""
    scheme, separator, place = text.rpartition("://")
    if separator:
        place = re.sub(r"(/list|/.+\.json)?/*$", "", place)
        if scheme not in schemes:
            raise ValueError("expected HOST[:PORT] or, of a web server, https://HOST[:PORT]")
    default_port = WEB_PORTS.get(scheme)
    tls = scheme == "https"
    with contextlib.suppress(ValueError):
        return read_address(place), default_port, tls
    if re.fullmatch("[^:/]+", place):
        return place, default_port, tls
    host, port = read_endpoint(place)
    return host, port, tls


# --- URLs, and other masters ---------------------------------------------------------------------

# The page's URL may not contain a user or a password, because everybody can see it
read_page_url = pattern_reader(r"(https?://[!-?A-~]*[!-.0-?A-~])?",
                               "https://HOST, with no / at its end and no @")
# A webhook's URL may not contain a user or a password: urllib would take them for the host
read_webhook = pattern_reader(
    r"(discord|slack|text|json)\s+https?://[^\s/@]+(/[!-~]*)?",
    "FORMAT URL: discord, slack, text or json, and what begins with https:// or http://")


class EngineAddress(NamedTuple):
    """Where Redis or Valkey is."""

    path: str = ""                      # of a Unix socket; "" if it has a host and a port
    tls: bool = False
    user: str = ""
    password: str = ""
    host: str = ""
    port: int = 6379                    # Redis's own
    database: int = 0


def read_engine(text):
    if not text.strip():
        return None
    unquote = urllib.parse.unquote
    try:
        # Passwords often have such characters as # and ?, which would end the host
        url = urllib.parse.urlsplit(urllib.parse.quote(read_line(text), safe="/:@[]%"))
        if url.scheme == "unix" and not url.netloc and len(url.path) > 1:
            return EngineAddress(path=unquote(url.path))
        if url.scheme not in ("redis", "rediss") or not url.hostname or url.port == 0:
            raise ValueError("no host and port")
        if url.username is not None and url.password is None:
            raise ValueError("a user without a password")
        return EngineAddress(
            tls=url.scheme == "rediss",
            user=unquote(url.username or ""),
            password=unquote(url.password or ""),
            host=unquote(url.hostname),
            port=url.port or EngineAddress().port,
            database=number_reader(0, 65535)(url.path[1:] or "0"))
    except ValueError:
        raise ValueError(
            "expected redis://[[user]:password@]host[:port][/db], rediss://... for TLS or "
            "unix:///path; in a password write %40 for @, %2F for / and %5B for [") from None


# The rooms of the games by their ids. Section 10 fills this table
ROOMS: Dict[str, Any] = {}


class Upstream(NamedTuple):
    """A list of another master, which a line of the setting upstream.masters names."""

    game: str                           # the id of its room
    host: str
    port: int
    tls: bool                           # whether a web server is asked by HTTPS
    name: str                           # the master's: its host, and its port if that is unusual
    label: str                          # for the operator; no two lists have the same
    choice: Tuple[Tuple[str, str], ...]         # names of the room's list_options, and their values


def read_upstreams(text):
    upstreams = list_reader(read_upstream, "\n")(text)
    if len(upstreams) > 20:
        raise ValueError("expected at most 20 lists")
    # The same line twice counts once
    return tuple(dict.fromkeys(upstreams))


def read_upstream(line):
    game, *words = line.split()
    rooms = {game: room for game, room in ROOMS.items() if room.answers_queries}
    if game not in rooms:
        raise ValueError("expected one of %s, and after it a host" % ", ".join(rooms))
    room = rooms[game]
    is_web = room.fetched_over == "http"
    option_names = [option.name for option in room.list_options]
    try:
        place, *choice = words
        host, port, tls = read_master_place(place.lower(), WEB_PORTS if is_web else ())
        if not re.fullmatch("[a-z0-9._:-]{1,253}", host):
            raise ValueError("no host")
        if len(choice) != len(option_names):
            raise ValueError("too many words, or too few")
        for option, word in zip(room.list_options, choice):
            option.read(word)
    except ValueError:
        host_form = "[https://]HOST[:PORT]" if is_web else "HOST[:PORT]"
        words = [game, host_form, *map(str.upper, option_names)]
        raise ValueError("expected " + " ".join(words)) from None
    usual_port = WEB_PORTS["https"] if tls else room.master_port
    port = port or usual_port
    name = host if port == usual_port else endpoint_text(host, port)
    label = " ".join([game, "https://" + name if tls else name, *choice])
    return Upstream(game, host, port, tls, name, label, tuple(zip(option_names, choice)))


# --- Countries ------------------------------------------------------------------------------------

def read_countries(text):
    """Return the names and the continents of countries, each by the code of the country."""
    names = {}
    continents = {}
    for continent_text in text.split(";"):
        continent, _, countries = continent_text.partition(":")
        for country in countries.split(","):
            code, *words = country.split()
            names[code] = " ".join(words)
            continents[code] = continent.strip()
    return names, continents


# The countries of ISO 3166-1 with their usual English names, by continent. Kosovo's code is not in
# the standard, but files have it
COUNTRY_NAMES, CONTINENTS = read_countries("""
af: ao Angola, bf Burkina Faso, bi Burundi, bj Benin, bw Botswana, cd DR Congo, cf Central African
Republic, cg Congo, ci Ivory Coast, cm Cameroon, cv Cape Verde, dj Djibouti, dz Algeria, eg Egypt,
eh Western Sahara, er Eritrea, et Ethiopia, ga Gabon, gh Ghana, gm Gambia, gn Guinea, gq Equatorial
Guinea, gw Guinea-Bissau, ke Kenya, km Comoros, lr Liberia, ls Lesotho, ly Libya, ma Morocco, mg
Madagascar, ml Mali, mr Mauritania, mu Mauritius, mw Malawi, mz Mozambique, na Namibia, ne Niger, ng
Nigeria, re Réunion, rw Rwanda, sc Seychelles, sd Sudan, sh Saint Helena, sl Sierra Leone, sn
Senegal, so Somalia, ss South Sudan, st São Tomé and Príncipe, sz Eswatini, td Chad, tg Togo, tn
Tunisia, tz Tanzania, ug Uganda, yt Mayotte, za South Africa, zm Zambia, zw Zimbabwe;
an: aq Antarctica, bv Bouvet Island, gs South Georgia and the South Sandwich Islands, hm Heard
Island and McDonald Islands, tf French Southern Territories;
as: ae United Arab Emirates, af Afghanistan, am Armenia, az Azerbaijan, bd Bangladesh, bh Bahrain,
bn Brunei, bt Bhutan, cc Cocos Islands, cn China, cx Christmas Island, ge Georgia, hk Hong Kong, id
Indonesia, il Israel, in India, io British Indian Ocean Territory, iq Iraq, ir Iran, jo Jordan, jp
Japan, kg Kyrgyzstan, kh Cambodia, kp North Korea, kr South Korea, kw Kuwait, kz Kazakhstan, la
Laos, lb Lebanon, lk Sri Lanka, mm Myanmar, mn Mongolia, mo Macao, mv Maldives, my Malaysia, np
Nepal, om Oman, ph Philippines, pk Pakistan, ps Palestine, qa Qatar, sa Saudi Arabia, sg Singapore,
sy Syria, th Thailand, tj Tajikistan, tm Turkmenistan, tr Turkey, tw Taiwan, uz Uzbekistan, vn
Vietnam, ye Yemen;
eu: ad Andorra, al Albania, at Austria, ax Åland Islands, ba Bosnia and Herzegovina, be Belgium, bg
Bulgaria, by Belarus, ch Switzerland, cy Cyprus, cz Czechia, de Germany, dk Denmark, ee Estonia, es
Spain, fi Finland, fo Faroe Islands, fr France, gb United Kingdom, gg Guernsey, gi Gibraltar, gr
Greece, hr Croatia, hu Hungary, ie Ireland, im Isle of Man, is Iceland, it Italy, je Jersey, li
Liechtenstein, lt Lithuania, lu Luxembourg, lv Latvia, mc Monaco, md Moldova, me Montenegro, mk
North Macedonia, mt Malta, nl Netherlands, no Norway, pl Poland, pt Portugal, ro Romania, rs Serbia,
ru Russia, se Sweden, si Slovenia, sj Svalbard and Jan Mayen, sk Slovakia, sm San Marino, ua
Ukraine, va Vatican City, xk Kosovo;
na: ag Antigua and Barbuda, ai Anguilla, aw Aruba, bb Barbados, bl Saint Barthélemy, bm Bermuda, bq
Caribbean Netherlands, bs Bahamas, bz Belize, ca Canada, cr Costa Rica, cu Cuba, cw Curaçao, dm
Dominica, do Dominican Republic, gd Grenada, gl Greenland, gp Guadeloupe, gt Guatemala, hn Honduras,
ht Haiti, jm Jamaica, kn Saint Kitts and Nevis, ky Cayman Islands, lc Saint Lucia, mf Saint Martin,
mq Martinique, ms Montserrat, mx Mexico, ni Nicaragua, pa Panama, pm Saint Pierre and Miquelon, pr
Puerto Rico, sv El Salvador, sx Sint Maarten, tc Turks and Caicos Islands, tt Trinidad and Tobago,
us United States, vc Saint Vincent and the Grenadines, vg British Virgin Islands, vi U.S. Virgin
Islands;
oc: as American Samoa, au Australia, ck Cook Islands, fj Fiji, fm Micronesia, gu Guam, ki Kiribati,
mh Marshall Islands, mp Northern Mariana Islands, nc New Caledonia, nf Norfolk Island, nr Nauru, nu
Niue, nz New Zealand, pf French Polynesia, pg Papua New Guinea, pn Pitcairn Islands, pw Palau, sb
Solomon Islands, tk Tokelau, tl Timor-Leste, to Tonga, tv Tuvalu, um U.S. Minor Outlying Islands, vu
Vanuatu, wf Wallis and Futuna, ws Samoa;
sa: ar Argentina, bo Bolivia, br Brazil, cl Chile, co Colombia, ec Ecuador, fk Falkland Islands, gf
French Guiana, gy Guyana, pe Peru, py Paraguay, sr Suriname, uy Uruguay, ve Venezuela""")


def country_name(code):
    return COUNTRY_NAMES.get(code, code.upper())


def read_country(text):
    code = text.strip().lower()
    if code not in COUNTRY_NAMES:
        raise ValueError("expected the two letters of a country, such as de or us")
    return code


def read_country_place(text):
    """Return (address, port) with the port 0 for all servers at the address."""
    try:
        return read_address(text), 0
    except ValueError:
        return read_numeric_endpoint(text)


# --- The table -----------------------------------------------------------------------------------

class Setting(NamedTuple):
    """One setting, or a section of data, whose keys the operator chooses."""

    name: str                       # section.key, or only the section if it is one of data
    default: str                    # for a section of data, an example: key = value
    read: Callable[[str], Any]      # the reader of its values
    help: str                       # one line, which the ini shows as a comment
    live: bool = True               # whether it takes effect on reload
    read_key: Callable[[str], Any] = read_text      # the reader of the keys of a section of data
    secret: bool = False            # whether no message shows its value
    reads_file: bool = False        # whether it names a file that is read with the settings

    @property
    def section(self) -> str:
        section, _, _ = self.name.partition(".")
        return section

    @property
    def key(self) -> str:
        _, _, key = self.name.partition(".")
        return key


# The settings of the program itself. In the ini and in SETTINGS, those of the games stand between
# these two parts
SETTINGS_BEFORE_GAMES = (
    Setting("server.bind", "0.0.0.0, ::", read_addresses,
            "Addresses to listen on. Games whose lists have only IPv4 use only the IPv4 ones.",
            live=False),
    Setting("server.public_address", "", read_public,
            "The address by which players reach game servers on this machine; not 127.0.0.1."),
    Setting("server.database", "masterserver.db", read_without_url,
            "SQLite file for the list and the player history, from the ini's folder; empty: none.",
            live=False),
    Setting("server.refuse_names", "", list_reader(read_pattern, "\n"),
            "Names not to list: regular expressions, one a line. Beware: (a+)+ may take for ever."),
    Setting("server.log_level", "info", read_log_level,
            "How much is logged (debug, info, warning, error); debug reports every bad packet."),
    Setting("server.log_file", "", read_without_url,
            "A file for the log, from the ini's folder, rotated at 10 MB; empty: standard error.",
            live=False),
    Setting("http.ports", "27790, 27795", list_reader(read_port),
            "TCP ports of the page and the lists. Iceball looks for both.", live=False),
    Setting("http.https_ports", "", list_reader(read_port),
            "TCP ports of the page and the lists by HTTPS, such as 443; empty: none.", live=False),
    Setting("http.certificate", "", read_without_url,
            "A PEM file with the certificate for HTTPS and its chain; read again when it changes."),
    Setting("http.key", "", read_without_url,
            "A PEM file with the certificate's key; empty: the key stands in the same file."),
    Setting("http.title", "Game servers", read_without_url, "The page's title."),
    Setting("http.url", "", read_page_url,
            "Where the page is reached from outside, as https://games.example; for links to it."),
    Setting("http.intro", "", read_text, "A sentence or two at the top of the page."),
    Setting("http.accent", "", read_colour,
            "The colour of what stands out, as #1f4fd8; made darker or lighter if it must be."),
    Setting("http.logo", "", read_without_url,
            "An image for the head of every page and the browser's tab: SVG, PNG, JPEG, WebP, GIF.",
            reads_file=True),
    Setting("http.links", "", list_reader(read_link, "\n"),
            "Links at the head of every page, one a line: words, URL; after foot: at its foot."),
    Setting("http.template", "", read_without_url,
            "A file with your own list page; LIST_PAGE in the program explains its placeholders.",
            reads_file=True),
    Setting("http.stylesheet", "", read_without_url, "A CSS file that is added to style.css.",
            reads_file=True),
    Setting("http.countries", "", read_without_url,
            "An MMDB file that knows the countries of addresses; read again when it changes."),
    Setting("http.trusted_proxies", "", list_reader(read_network),
            "Networks of reverse proxies whose X-Forwarded-For header is believed."),
)
SETTINGS_AFTER_GAMES = (
    Setting("games", "mygame = My Game", read_without_url,
            "Games of your own, announced by HTTP: id = Title.", read_key=read_own_game_id),
    Setting("cluster.redis", "", read_engine,
            "Redis or Valkey through which masters share their lists, as redis://:password@host/0.",
            live=False, secret=True),
    Setting("cluster.name", "", read_plain_name,
            "This master's name among others; empty: the host's and a random part.", live=False),
    Setting("cluster.prefix", "masterserver", read_plain_name,
            "What all keys in Redis begin with; masters with another one are not seen.",
            live=False),
    Setting("upstream.masters", "", read_upstreams,
            "Lists of other masters, a line GAME HOST[:PORT] for each; what answers is listed."),
    Setting("upstream.interval", "300", number_reader(10, 86400, float),
            "Seconds between two fetches of one list."),
    Setting("upstream.share", "yes", read_flag,
            "Whether the lists for game clients have these servers; no: only the page has them."),
    Setting("poll.interval", "30", number_reader(5, 3600, float),
            "Seconds between two queries to one game server, of all games that are polled."),
    Setting("poll.rate", "500", number_reader(1, 100000),
            "Queries per second at most, to all servers together; to listed ones first."),
    Setting("notify.players", "2", number_reader(1, PLAYERS_MAX),
            "A server is news when it has this many players, after it had fewer."),
    Setting("notify.again_after", "10800", number_reader(0, 86400),
            "Seconds for which the same server is not news again."),
    Setting("notify.official_only", "no", read_flag, "Send news of official servers only."),
    Setting("notify.games", "", list_reader(read_game_id),
            "Send news of these games only, by their ids such as iceball; empty: all games."),
    Setting("notify.text", "$players of $max_players are playing on $name ($game, map $map) $url",
            read_text, "The text of a message. Of other placeholders there is only $country."),
    Setting("webhooks", "ours = discord https://discord.com/api/webhooks/ID/TOKEN", read_webhook,
            "Receivers of news: NAME = FORMAT URL. FORMAT is discord, slack, text or json.",
            read_key=read_game_id, secret=True),
    Setting("official", "203.0.113.7:20737 = yes", read_flag,
            "Servers marked as official.", read_key=read_numeric_endpoint),
    Setting("country", "203.0.113.7:20737 = de", read_country,
            "Countries of servers, where the file is wrong; without a port: of all at the address.",
            read_key=read_country_place),
    Setting("priority", "203.0.113.7:20737 = 10", number_reader(-1000, 1000),
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
    Setting("limits.exempt", "127.0.0.0/8, ::1", list_reader(read_network),
            "Networks to which no limit per source applies."),
    Setting("limits.datagrams", "100/400", read_rate,
            "Datagrams from one source (an IPv4 address, an IPv6 /64): per second / at once."),
    Setting("limits.requests", "10/50", read_rate,
            "Pings, list and page requests of a source, UDP and TCP apart: per second / at once."),
    Setting("limits.connections", "20/100", read_rate,
            "New connections from one source: per second / at once."),
    Setting("limits.connections_open", "64", number_reader(1, 100000),
            "Open connections of one source."),
    Setting("limits.connections_total", "2000", number_reader(8, 100000),
            "Open connections in all; above that the source with the most loses one.",
            live=False),
    Setting("limits.servers_per_source", "32", number_reader(1, 1000000),
            "Servers of one source that are listed, or queried; of one IPv6 /48, 16 times as "
            "many."),
    Setting("limits.servers", "50000", number_reader(1, 10000000), "Listed servers in all."),
)

# All settings by name, in the order of the ini. Section 10 fills this table
SETTINGS: Dict[str, Setting] = {}
# Settings of earlier versions. An ini that still has one of them causes a warning
REMOVED_SETTINGS = ("aio.dialects", "aio.text_greeting_after")


def section_names():
    return {setting.section for setting in SETTINGS.values()}


class Settings:
    """The values of all settings by name, such as `settings["iceball.port"]`.

    The value of a section of data is a dict, such as `settings["bans"]`. What makes or changes
    Settings raises SettingsError if a name or a text is wrong."""

    def __init__(self, values=None):
        """`values` has the texts of some settings by name, as for --set."""
        self.path = ""                  # of the ini, whether it exists or not
        self.found = False              # whether it exists and is not empty
        # The ini's folder, where relative paths begin. It is None if another program has made these
        # settings: then nothing is kept on disk by default
        self.folder: Optional[str] = None
        self.given = set()              # the names of the settings that somebody has set
        self.warnings = []              # for the log
        self.contents = {}              # of the files that settings name, by these
        self.values: Dict[str, Any] = {}
        for setting in SETTINGS.values():
            # The default of a section of data is only an example
            self.values[setting.name] = setting.read(setting.default) if setting.key else {}
        for name, text in (values or {}).items():
            self.set_text(name, str(text), origin="setting")

    def __getitem__(self, name):
        return self.values[name]

    @classmethod
    def load(cls, path, overrides=(), missing_ok=False):
        """Return the Settings of the ini at `path`, changed by `overrides`, which are texts such as
        `http.title=My servers`. If `missing_ok` is true, a missing file counts as an empty one."""
        settings = cls()
        settings.path = path
        settings.folder = os.path.dirname(os.path.abspath(path))
        parser = read_ini(path, missing_ok)
        settings.found = bool(parser.sections())
        for section in parser.sections():
            for key, text in parser.items(section):
                settings.set_text("%s.%s" % (section, key), text, origin=path)
        for override in overrides:
            name, equals, text = override.partition("=")
            if not equals:
                # The text is not shown, because nobody can tell where a secret begins in it
                raise SettingsError("--set: expected section.key=value")
            settings.set_text(name.strip(), text.strip(), origin="--set")
        return settings

    def set_text(self, name, text, origin):
        """Set the setting `name`, which is section.key, to the value of `text`. `origin` says in
        error messages where the text comes from."""
        section, _, key = without_secrets(name).partition(".")
        label = "%s: [%s] %s" % (origin, section, key)
        if name in REMOVED_SETTINGS:
            self.warnings.append(label + " is no longer a setting and has no effect")
            return
        setting = SETTINGS.get(name) or SETTINGS.get(section)
        if setting is None:
            keys = [setting.key for setting in SETTINGS.values() if setting.section == section]
            problem = "has no key " + key + name_hint(key, keys)
            if not keys:
                problem = "is not a section" + name_hint(section, section_names())
            raise SettingsError("%s: [%s] %s" % (origin, section, problem))
        try:
            # Bytes of the command line that are not UTF-8 have become lone surrogates. encode()
            # raises UnicodeEncodeError for them, which is a ValueError
            (key + text).encode()
            if "\0" in text:            # the system allows no NUL in the name of a file
                raise ValueError("a NUL character is not allowed")
            # The page might show the secret URL of a webhook in the line below another setting
            indented_key = re.search(r"\n\s*([\w.-]+)\s*=\s*(\w+\s+)?\w+://", text)
            if indented_key:
                raise ValueError("the line %s = … below it begins with blanks, so it belongs to "
                                 "this value" % indented_key.group(1))
            value = setting.read(text)
            if setting.key:
                self.values[setting.name] = value
            else:
                self.values[setting.name][setting.read_key(key)] = value
        except ValueError as error:
            shown = " ".join(text.split())
            # A URL in the key was split at a "=" in it: then the text is the rest of the URL
            if setting.secret or "://" in key + text:
                shown = "…"
            raise SettingsError("%s = %s: %s" % (label, shown, error)) from None
        self.given.add(setting.name)

    def file(self, name):
        """Return the path of the file that the setting `name` names, or "" if it names none."""
        path = self.values[name]
        # A program that has made these settings gets no file that it has not asked for
        is_embedded = self.folder is None
        if not path or is_embedded and name not in self.given:
            return ""
        return os.path.join(self.folder or "", path)


def check_is_file(path, max_bytes=math.inf):
    """Raise ValueError if reading from this path might block for ever, as it does with a pipe, or
    if the file is larger."""
    if is_special(path) and path != os.devnull:
        raise ValueError("not a plain file; reading from a pipe may take for ever")
    if os.path.exists(path) and os.path.getsize(path) > max_bytes:
        raise ValueError("larger than %s kB" % format(max_bytes >> 10, ","))


def is_special(path):
    return os.path.exists(path) and not os.path.isfile(path)


def name_hint(name, right_names):
    for similar_name in difflib.get_close_matches(name, right_names, n=1, cutoff=0.5):
        return "; did you mean %s?" % similar_name
    return "; expected one of %s" % ", ".join(sorted(right_names))


def read_ini(path, missing_ok):
    # People append lines to the file. strict=False allows a section or a key to come twice; the
    # last value of a key counts
    parser = configparser.ConfigParser(
        interpolation=None, default_section="", delimiters=("=",), comment_prefixes=("#", ";"),
        strict=False)
    # The parser's own pattern takes "[::1]:27790 = yes" for a section
    parser.SECTCRE = re.compile(r"\[(?P<header>[^]:]+)\]\s*$")  # type: ignore[misc]
    try:
        check_is_file(path, 4 << 20)        # with 100,000 bans
        paths_read = parser.read(path, encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SettingsError("%s: expected UTF-8: %s" % (path, error)) from None
    except configparser.ParsingError as error:
        # The message repeats no line, because a secret may be in it
        details = vars(error)       # some errors have a list of all wrong lines, some only a number
        line_numbers = [number for number, _ in details.get("errors", ())] or [details["lineno"]]
        raise SettingsError(
            "%s: line %s: expected [section] and below it key = value, or an indented line that "
            "continues the one above" % (path, ", ".join(map(str, line_numbers)))) from None
    except ValueError as error:
        raise SettingsError("%s: %s" % (path, error)) from None
    # The parser skips a file that it cannot open, without an error
    if not paths_read and (not missing_ok or os.path.lexists(path)):
        raise SettingsError(
            "%s: cannot be read; is the name right, and may this user read it?" % path)
    return parser


def config_text():
    """Return the text of masterserver.ini."""
    lines = [
        "# masterserver.ini: settings of masterserver.py, each at its default or as an example;",
        "# remove the # to change one. A wrong name or value is an error at start that says where.",
        "# This file is what --print-config prints."]
    section = ""
    for setting in SETTINGS.values():
        if setting.section != section:
            section = setting.section
            lines += ["", "[%s]" % section]
        # For a section of data, the default is a whole line
        line = "#" + setting.default
        if setting.key:
            line = "#%s = %s" % (setting.key, setting.default)
        lines += ["", "# " + setting.help, line.rstrip()]
    return "\n".join(lines) + "\n"


# ================================================================================================
# 4  Wire helpers
#
# Helpers that several protocols share: the exception for bad input, text, numbers, addresses,
# country files, the cookie, and the limits by source. None of them does I/O.
# ================================================================================================

# The sender of a packet as a socket gives it: (address, port), and for IPv6 also flow and scope
Peer = Tuple[Any, ...]
Replies = List[Tuple[bytes, Peer]]
Key = Tuple[str, str, int]          # a server's identity: game, address, port
# A generator of our own, because an embedding program may have seeded that of the module random
RANDOM = random.SystemRandom()


class Malformed(Exception):
    """Raised for bytes that do not follow the protocol's document. The text names the field.
    Decoders raise no other exception, whatever the bytes are."""


class Limited(Exception):
    """Raised for a UDP request that exceeds a limit. It is counted and gets no answer."""


def error_text(error):
    return str(error) or type(error).__name__


class Tally:
    """The counters of one protocol for /metrics. METRICS (section 9) explains each of them."""

    def __init__(self):
        self.received = 0
        self.sent = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.malformed = 0
        self.limited = 0
        self.unsent = 0
        self.errors = 0
        self.connections = 0


# Text

# Escape sequences (ECMA-48)
ESCAPE_SEQUENCE = re.compile("|".join((
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]",                # control sequences such as colours
    "(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])"               # control strings: their start, text and end
    "[^\x07\x1b\x90\x98\x9c-\x9f]*(?:\x07|\x1b\\\\|\x9c)",
    "\x1b[ -/]*[0-~]?")))                               # all others
# Characters that look like spaces. Each run of them becomes one space, so that nobody can imitate
# another name with look-alike spaces.
BLANKS = re.compile("[\t-\r\x85\xa0\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\u2800]+")
INVISIBLE = re.compile("[%s]" % "".join((
    "\0-\x1f\x7f-\x9f",                             # control characters
    "\xad\u034f\u180b-\u180f",                      # soft hyphen, joiners, variation selectors
    "\u115f\u1160\u17b4\u17b5\u3164\uffa0",         # Hangul fillers, Khmer vowels
    "\u061c\u200b-\u200f\u202a-\u202e",             # zero-width and bidirectional characters
    "\u2060-\u206f",                                # invisible operators, bidirectional isolates
    "\ufe00-\ufe0f\ufeff\ufff0-\ufffb",             # variation selectors, byte order mark, specials
    "\ufffe\uffff\ud800-\udfff",                    # no characters; surrogates
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a",   # shorthand and music formatting
    "\U000e0000-\U000e0fff")))                      # tags
ACCENT = "[%s]" % "".join((
    "\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff",      # combining marks
    "\u20d0-\u20ff\ufe20-\ufe2f",                   # for symbols, half marks
    "\u0483-\u0489\u0591-\u05bd\u0e31-\u0e4e"))     # Cyrillic, Hebrew, Thai
# The accents after the third on one letter, because no script uses more than three
EXCESS_ACCENTS = re.compile("(?<=%s{3})%s+" % (ACCENT, ACCENT))


def clean(text, max_characters=NAME_CHARACTERS):
    """Return a text without anything that could harm a list: escape sequences, control characters,
    invisible characters and piled-up accents. Any run of blanks becomes one space."""
    text = text[:RAW_CHARACTERS * max_characters]
    if not (text.isascii() and text.isprintable()):
        text = ESCAPE_SEQUENCE.sub("", text)
        text = BLANKS.sub(" ", text)
        text = INVISIBLE.sub("", text)
        text = EXCESS_ACCENTS.sub("", text)
    return text.strip()[:max_characters].strip()


def decode_utf8(raw: bytes, max_characters: int = NAME_CHARACTERS) -> str:
    """Decode UTF-8 and clean the text. An incomplete character at the end is dropped."""
    text, _ = codecs.utf_8_decode(raw[:RAW_BYTES * max_characters], "replace")
    return clean(text, max_characters)


def decode_legacy(raw: bytes, max_characters: int = NAME_CHARACTERS) -> str:
    """Decode and clean a text in UTF-8 or, if the bytes are not that, in Windows-1252."""
    raw = raw[:RAW_BYTES * max_characters]
    try:
        text, decoded_bytes = codecs.utf_8_decode(raw)      # stops before an incomplete character
    except UnicodeDecodeError:
        text, decoded_bytes = "", 0
    # If everything before it is ASCII, what looks like the first byte of an incomplete character is
    # more probably a letter of Windows-1252
    if decoded_bytes < len(raw) and text.isascii():
        text = raw.decode("cp1252", "replace")
    return clean(text, max_characters)


def c_string(data: bytes) -> bytes:
    text, _, _ = data.partition(b"\0")
    return text


# The encoder is created once. json.dumps() would create one at each call, which takes a quarter of
# the time that it takes to encode a server
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def to_json(value):
    """Return a value as compact JSON in UTF-8, without \\u escapes: the Iceball client fails on
    them, and cleaned text does not need them."""
    return ENCODER.encode(value).encode()


def read_integer(digits):
    # The time of int() grows with the square of their number
    if len(digits) > 400:
        raise ValueError("too many digits")
    return int(digits)


def read_json_object(raw: bytes) -> Dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8-sig"), parse_int=read_integer)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Malformed("not a JSON object in UTF-8")
    return value


# Numbers

def utc_datetime(wall):
    """Return a time of the wall clock, in seconds since 1970, as a datetime in UTC."""
    return datetime.fromtimestamp(wall, timezone.utc)


def count_text(number, noun, plural=""):
    """Return a number with its noun in the right form: "1 server" or "1,003 servers"."""
    return "%s %s" % (format(number, ","), noun if number == 1 else plural or noun + "s")


def clamp(value, high=PLAYERS_MAX):
    return 0 if value < 0 else min(value, high)


# Addresses

def canonical_address(address):
    """Return an IP address as lists and limits use it: IPv4 if it is mapped to IPv6, and without a
    scope."""
    if ":" not in address:
        return address
    parsed = parse_ipv6(address)
    return str(parsed.ipv4_mapped or parsed)


def parse_ipv6(address):
    """Return an IPv6Address without its scope, such as %eth0."""
    without_scope, _, _ = address.partition("%")
    return ipaddress.IPv6Address(without_scope)


def is_loopback(address):
    """Is this a loopback address? It must be written as read_address() and sockets write it."""
    return address.startswith("127.") or address == "::1"


def ipv4_bytes(address):
    return ipaddress.IPv4Address(address).packed


def address_number(address):
    """Return an IP address as a number. For IPv4 this takes a third of the time of ipaddress."""
    if ":" in address:
        # This bit is set so that no IPv6 address has the number of an IPv4 address
        return 1 << 128 | int(parse_ipv6(address))
    a, b, c, d = address.split(".")
    return int(a) << 24 | int(b) << 16 | int(c) << 8 | int(d)


class Networks:
    """A set of networks of the module ipaddress, each with a label or "".

    To find the network of an address takes one look-up for each length of prefix. In a flood it is
    done tens of thousands of times a second."""

    def __init__(self, networks, labels=None):
        labels = labels or {}
        labels_by_bits = collections.defaultdict(dict)
        for network in networks:
            host_bits = network.max_prefixlen - network.prefixlen
            number = address_number(str(network.network_address))
            labels_by_bits[host_bits][number >> host_bits] = labels.get(network, "")
        # Pairs of a number of host bits, and the labels by the other bits of the network's address.
        # The smallest networks come first
        self.by_host_bits = sorted(labels_by_bits.items())

    def find(self, address):
        """Return the label of the smallest network with this address, or None."""
        if not self.by_host_bits:
            return None
        number = address_number(address)
        for host_bits, labels in self.by_host_bits:
            prefix = number >> host_bits
            if prefix in labels:
                return labels[prefix]
        return None

    def __contains__(self, address):
        return self.find(address) is not None


# A game server in one of these networks may announce another address than its own
LOCAL_NETWORKS = Networks(map(ipaddress.ip_network, (
    "127.0.0.0/8", "::1/128",                                   # loopback
    "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16",            # RFC 1918
    "169.254.0.0/16", "fe80::/10", "fc00::/7")))                # link-local, unique local

# Further addresses that do not lead to a machine on the internet, or may lead to a private one
HIDDEN_NETWORKS = Networks(map(ipaddress.ip_network, (
    "100.64.0.0/10",                            # shared by a provider's customers (RFC 6598)
    "192.0.0.0/24",                             # reserved for protocols (RFC 6890)
    "::/96",                                    # IPv4 within IPv6 (RFC 4291)
    "64:ff9b::/96", "64:ff9b:1::/48",           # the same by NAT64 (RFC 6052, RFC 8215)
    "2002::/16",                                # the same by 6to4 (RFC 3056)
    "fec0::/10")))                              # site-local (RFC 3879)


# --- Country files -------------------------------------------------------------------------------
#
# An MMDB file (MaxMind DB File Format Specification 2.0) says for every IP address what is known of
# it. It is a binary tree, whose branches are the bits of the address, then a section with the data
# to which the tree leads, and at the end a section with a description of the file.

MMDB_MARKER = b"\xab\xcd\xefMaxMind.com"        # the description follows the last of these
MMDB_SEPARATOR_BYTES = 16                       # zeros between the tree and the data
# The types of values that are read differently. 0 says that the type is in the next byte, less 7
MMDB_POINTER, MMDB_TEXT, MMDB_MAP, MMDB_ARRAY, MMDB_FLAG = 1, 2, 7, 11, 14
# If the five bits of a size have one of these values, the size stands in the following bytes. Here
# are how many they are, and what has to be added to them
MMDB_LONG_SIZES = {29: (1, 29), 30: (2, 285), 31: (3, 65821)}
# What has to be added to the target of a pointer, by the number of its bytes
MMDB_POINTER_STARTS = {1: 0, 2: 2048, 3: 526336, 4: 0}
# A search for a member passes so many values, in 0.13 ms. To find the country of a city takes 60.
# In a damaged file, where values can lie within each other, they never end
MMDB_VALUES = 200
# Where files have the country: MaxMind's and DB-IP's, and those of @ip-location-db
MMDB_COUNTRIES = (b"country", b"iso_code"), (b"country_code",)
MMDB_NODES_TRIED = 1000         # to know whether a file has countries; in half a second at worst


class MmdbSection:
    """A section of an MMDB file, which consists of values. Positions count from its beginning."""

    def __init__(self, data):
        self.data = data                        # a memoryview
        self.values_left = 0

    def find(self, position, *names):
        """Return the bytes of a text or a number, or the beginning of a long text. It stands in the
        map at a position under the first name, or in a map there under the second, and so on.

        Return b"" if there is none, and raise Malformed if the section is damaged there."""
        self.values_left = MMDB_VALUES
        for name in names:
            kind, count, start = self.pointed_head(position)
            if kind != MMDB_MAP:
                return b""
            position = self.member(start, count, name)
            if position is None:
                return b""
        kind, size, start = self.pointed_head(position)
        if kind in (MMDB_MAP, MMDB_ARRAY, MMDB_FLAG):
            return b""
        return bytes(self.content(start, min(size, NAME_CHARACTERS)))

    def member(self, position, count, name):
        """Return the position of the value with this name, or None. The map has `count` members,
        the first of them at `position`."""
        for _ in range(count):
            value_position = self.skip(position)
            kind, size, start = self.pointed_head(position)
            if kind == MMDB_TEXT and size == len(name) and self.content(start, size) == name:
                return value_position
            position = self.skip(value_position)
        return None

    def skip(self, position):
        """Return the position after a value and all that it contains. What a pointer leads to is
        not read."""
        values = 1
        while values:
            kind, size, position = self.head(position)
            values -= 1
            if kind == MMDB_MAP:
                values += 2 * size              # names and values
            elif kind == MMDB_ARRAY:
                values += size
            elif kind not in (MMDB_POINTER, MMDB_FLAG):
                position += size
        return position

    def pointed_head(self, position):
        """Return the head() of a value, or of the one to which it points."""
        kind, size, start = self.head(position)
        while kind == MMDB_POINTER:
            kind, size, start = self.head(size)
        return kind, size, start

    def head(self, position):
        """Return the type of a value, its size, and the position of its content. The size of a
        pointer is the position to which it leads, and that of a flag is its value."""
        self.values_left -= 1
        if self.values_left < 0:
            raise Malformed("too many values")
        control = self.number(position, 1)
        position += 1
        kind = control >> 5
        size = control & 31
        if kind == MMDB_POINTER:
            size_bytes = (size >> 3) + 1
            target = self.number(position, size_bytes) + MMDB_POINTER_STARTS[size_bytes]
            if size_bytes < 4:
                # The last three bits of the control byte belong to the target
                target += (size & 7) << 8 * size_bytes
            return kind, target, position + size_bytes
        if kind == 0:
            kind = self.number(position, 1) + 7
            position += 1
        if size in MMDB_LONG_SIZES:
            size_bytes, smallest = MMDB_LONG_SIZES[size]
            size = smallest + self.number(position, size_bytes)
            position += size_bytes
        return kind, size, position

    def number(self, start, size):
        return int.from_bytes(self.content(start, size), "big")

    def content(self, start, size):
        end = start + size
        if end > len(self.data):
            raise Malformed("a value beyond the end of the file")
        return self.data[start:end]


class CountryFile:
    """An MMDB file with the countries of IP addresses, in memory. Raise Malformed if the data are
    no such file.

    type        what the file says it is, such as "DBIP-Country-Lite"
    built       when it was made, in seconds since 1970
    trouble     the damage that a look-up has met last, "" if none has met one"""

    trouble = ""

    def __init__(self, data):
        self.data = data
        if data.startswith(b"\x1f\x8b"):
            raise Malformed("it is compressed; unpack it, as with gunzip or tar")
        # The description has 128 kB at most
        data_end = data.rfind(MMDB_MARKER, max(0, len(data) - (128 << 10)))
        if data_end < 0:
            raise Malformed("this is not an MMDB file, or its end is missing")
        description = MmdbSection(memoryview(data)[data_end + len(MMDB_MARKER):])

        def number(name):
            return int.from_bytes(description.find(0, name), "big")

        if number(b"binary_format_major_version") != 2:
            raise Malformed("its format is not version 2")
        self.node_count = number(b"node_count")
        self.record_bits = number(b"record_size")
        self.ip_version = number(b"ip_version")
        self.built = number(b"build_epoch")
        self.type = decode_utf8(description.find(0, b"database_type")) or "no type"
        if self.record_bits not in (24, 28, 32) or self.ip_version not in (4, 6):
            raise Malformed("its records have %d bits, and its addresses version %d"
                            % (self.record_bits, self.ip_version))
        if self.built > 1 << 32:            # the year 2106; Python has no date for 1 << 62
            raise Malformed("it was made in no year that is possible")
        data_start = self.node_count * self.record_bits // 4 + MMDB_SEPARATOR_BYTES
        if not self.node_count or data_start > data_end:
            raise Malformed("its tree has %d nodes, and does not fit into the file"
                            % self.node_count)
        self.records = MmdbSection(memoryview(data)[data_start:data_end])
        # To find the country of a city takes 0.01 ms
        self.country_at = functools.lru_cache(maxsize=4096)(self.read_country)
        # IPv4 addresses stand in the tree of an IPv6 file as ::a.b.c.d
        self.ipv4_root = self.walk(0, 0, 96) if self.ip_version == 6 else 0

    def country(self, address):
        """Return the country of a canonical_address(): two letters in lower case, or "" if the file
        has none for it."""
        if ":" not in address:
            place = self.walk(self.ipv4_root, address_number(address), 32)
        elif self.ip_version == 6:
            place = self.walk(0, address_number(address), 128)
        else:
            return ""
        return self.country_at_place(place)

    def read_country(self, position):
        try:
            if position < 0:
                raise Malformed("a place between the tree and the data")
            for names in MMDB_COUNTRIES:
                code = self.records.find(position, *names)
                if code:
                    break
        except Malformed as error:
            self.trouble = str(error)
            return ""
        if not re.fullmatch(rb"[A-Z]{2}", code):
            return ""
        return code.decode().lower()

    def has_countries(self):
        """Return whether any address has a country, among those of MMDB_NODES_TRIED nodes that lie
        evenly in the tree."""
        step = max(1, self.node_count // MMDB_NODES_TRIED)
        for node in range(0, self.node_count, step):
            for bit in 0, 1:
                if self.country_at_place(self.walk(node, bit, 1)):
                    return True
        return False

    def country_at_place(self, place):
        if place <= self.node_count:            # it leads nowhere
            return ""
        return self.country_at(place - self.node_count - MMDB_SEPARATOR_BYTES)

    def walk(self, node, number, bits):
        """Return the record at which the path ends that begins at this node, and goes on by the
        last `bits` bits of a number: a node, node_count if nothing is known of the address, or a
        place in the data, counted from node_count on."""
        record_bits = self.record_bits
        node_bytes = record_bits // 4
        for shift in range(bits - 1, -1, -1):
            if node >= self.node_count:
                break
            start = node * node_bytes
            records = int.from_bytes(self.data[start:start + node_bytes], "big")
            if number >> shift & 1:
                node = records & (1 << record_bits) - 1
            elif record_bits == 28:
                # Of the byte in the middle, the high bits of the left record come first
                node = (records >> 28 & 15) << 24 | records >> 32
            else:
                node = records >> record_bits
        return node


# --- Limits by source ----------------------------------------------------------------------------
#
# An IPv4 address, also one that is mapped to IPv6, is a source by itself. An IPv6 address belongs
# to the source /64, because one host can have all the addresses in it, and to the site /48, because
# anybody can have one. A site may have SITE_SOURCES times as much as a source.

def source_keys(address):
    """Return the keys under which limits count an address: its source and, for IPv6, its site."""
    return ipv6_source_keys(address) if ":" in address else (address,)


def site_of(address):
    """Return the site of an IPv6 address, and an IPv4 address as it is."""
    return ipv6_source_keys(address)[-1] if ":" in address else address


@functools.lru_cache(maxsize=LIMITER_SOURCES)
def ipv6_source_keys(address):
    parsed = parse_ipv6(address)
    if parsed.ipv4_mapped:
        return (str(parsed.ipv4_mapped),)
    keys = []
    for prefix_bits in (64, 48):
        host_bits = 128 - prefix_bits
        network = ipaddress.IPv6Address(int(parsed) >> host_bits << host_bits)
        keys.append("%s/%d" % (network, prefix_bits))
    return tuple(keys)


class Shares:
    """Counts what sources have so much of as they may: servers, connections, bytes."""

    def __init__(self):
        self.counts = collections.defaultdict(int)      # by source_keys(), without those of 0
        self.total = 0                                  # of all sources together

    def take(self, address, amount=1):
        """Count an amount for an address. A negative one gives it back."""
        self.total += amount
        for key in source_keys(address):
            self.counts[key] += amount
            if not self.counts[key]:
                del self.counts[key]

    def full(self, address, limit, amount=1, site_sources=SITE_SOURCES):
        """Return the source or site that cannot take an amount at this address, or "". `limit`
        holds for a source."""
        for key in source_keys(address):
            if self.counts.get(key, 0) + amount > limit:
                return key
            limit *= site_sources
        return ""


class Turns:
    """A table in which things of strangers wait, and their sources take turns. So whoever adds many
    keeps only himself waiting.

    A source that has as many things as it may loses its own oldest one to a new one. If the table
    is full, the source with the most things loses its oldest, so that nobody pushes out others by
    adding many. An IPv6 site is one source here, which may have SITE_SOURCES times as much:
    otherwise its 65,536 networks, with one thing each, would push out all others."""

    def __init__(self, size=math.inf):
        self.size = size                # the most things that the table holds
        self.things = {}                # by key
        self.sources = {}               # the source of each thing, by key
        self.keys = collections.OrderedDict()       # the keys of each source, the oldest first
        # The sources that have so many things, or have had, by that number
        self.levels = collections.defaultdict(collections.OrderedDict)

    def __len__(self):
        return len(self.things)

    def get(self, key):
        return self.things.get(key)

    def keys_of(self, address):
        """Return the keys of all things of the source of an address, the oldest first."""
        return self.keys.get(site_of(address), ())

    def add(self, address, key, thing, limit=math.inf):
        """Add a thing of an address, or replace the one with the same key. A source may have
        `limit` things. Return the thing that had to leave, or None."""
        source = site_of(address)
        if ":" in source:
            limit *= SITE_SOURCES
        keys = self.keys.get(source, ())
        pushed_out = None
        if key in self.things:
            self.pop(key)
        elif len(keys) >= limit:
            # It takes the place of the source's oldest, so the source has no more than before
            oldest = next(iter(keys))
            del self.sources[oldest], keys[oldest]
            keys[key] = None
            self.levels[len(keys)].move_to_end(source)
            self.things[key] = thing
            self.sources[key] = source
            return self.things.pop(oldest)
        if len(self.things) >= self.size:
            most = max(level for level, sources in self.levels.items() if sources)
            crowded = next(iter(self.levels[most]))
            oldest = next(iter(self.keys[crowded]))
            pushed_out = self.pop(oldest)
        self.things[key] = thing
        self.sources[key] = source
        keys = self.keys.setdefault(source, {})
        self.levels[len(keys)].pop(source, None)
        keys[key] = None
        self.levels[len(keys)][source] = None
        return pushed_out

    def pop(self, key):
        """Remove and return the thing with this key, or return None."""
        if key not in self.things:
            return None
        source = self.sources.pop(key)
        keys = self.keys[source]
        del self.levels[len(keys)][source]
        del keys[key]
        if keys:
            self.levels[len(keys)][source] = None
        else:
            del self.keys[source]
        return self.things.pop(key)

    def in_turns(self):
        """Return all things: first the oldest of each source, then the second of each, and so on.
        The source that has waited longest for its turn is the first."""
        rounds = collections.defaultdict(list)
        for keys in self.keys.values():
            for number, key in enumerate(keys):
                rounds[number].append(self.things[key])
        ordered = []
        for number in sorted(rounds):
            ordered += rounds[number]
        return ordered

    def served(self, key):
        """Note that the source of a thing has had its turn: the other sources come before it."""
        self.keys.move_to_end(self.sources[key])

    def next(self):
        """Remove and return the thing whose turn it is."""
        keys = next(iter(self.keys.values()))
        oldest = next(iter(keys))
        self.served(oldest)
        return self.pop(oldest)


class Cookie:
    """Makes message authentication codes (MACs) that are valid for a limited time.

    A sender that returns a valid MAC has received it, and so does not forge its address. Nothing
    has to be remembered between the two packets of a handshake. The time is divided into windows.
    A MAC is valid in the window in which it was made, and in the next one."""

    def __init__(self, key, size=COOKIE_MAC_BYTES, window_s=COOKIE_WINDOW_S):
        """`key` is a secret of 16 bytes, `size` is the bytes of a MAC."""
        self.key = key
        self.size = size
        self.window_s = window_s
        self.window_ends = -math.inf

    def make(self, message, now):
        if now >= self.window_ends:
            window = int(now // self.window_s)
            self.window_ends = (window + 1.0) * self.window_s
            hashes = []
            for number in (window - 1, window):
                # BLAKE2's own keyed mode would pad the key to a whole block, and so take longer
                key = self.key + struct.pack("<q", number)
                hashes.append(hashlib.blake2b(key, digest_size=self.size))
            self.previous, self.current = hashes
        mac = self.current.copy()
        mac.update(message)
        return mac.digest()

    def is_valid(self, mac, message, now):
        if mac == self.make(message, now):
            return True
        older = self.previous.copy()
        older.update(message)
        return mac == older.digest()


# The verdicts about an address. In a limiter's table the first two replace the time at which a
# bucket is full, so that one look-up finds both: a blocked source's bucket is never full, an exempt
# source's always
EXEMPT, BLOCKED = -math.inf, math.inf
NO_VERDICT = 0.0


class Limiter:
    """Token buckets by source and site, in a bounded table.

    A bucket is stored as one number, the time at which it will be full again (the "generic cell
    rate algorithm"). A source that is not in the table has a full bucket. So a full table does not
    refuse anybody: it forgets the source that was seen longest ago."""

    def __init__(self, rate, verdict=None):
        """`rate` is (tokens a second, tokens at once). `verdict(address)` returns EXEMPT, BLOCKED
        or NO_VERDICT. It is called when an address is seen for the first time."""
        self.verdict = verdict
        self.table = collections.OrderedDict()
        self.refused_at = {}            # the time of the last refusal, by the same keys
        self.set_rate(rate)

    def set_rate(self, rate):
        """Change the rate, fill all buckets, and forget all verdicts."""
        per_second, at_once = rate
        self.cost_s = 1.0 / per_second          # the time in which a token fills in again
        # The time that an empty bucket takes to become full, and a little more, so that a rounding
        # error cannot refuse the last token
        self.depth_s = (at_once + 0.001) / per_second
        self.table.clear()
        self.refused_at.clear()

    def allow(self, address, now, tokens=1.0):
        """Take tokens from the buckets of an address. Return False if one of them has too few."""
        table = self.table
        full_at = table.get(address)
        if full_at is None:
            is_source = "/" in address          # a key of ipv6_source_keys()
            full_at = NO_VERDICT                # the bucket counts as full since the time 0
            if self.verdict and not is_source:
                full_at = self.verdict(address)
            # If there is a verdict, it may be about less than a source
            if ":" in address and full_at == NO_VERDICT and not is_source:
                for key in ipv6_source_keys(address):
                    if not self.allow(key, now, tokens):
                        return False
                    tokens /= SITE_SOURCES
                return True
            if len(table) >= LIMITER_SOURCES:
                forgotten, _ = table.popitem(last=False)
                self.refused_at.pop(forgotten, None)
            table[address] = full_at
        if full_at == EXEMPT:
            return True
        table.move_to_end(address)
        full_at = (full_at if full_at > now else now) + self.cost_s * tokens
        if full_at - now > self.depth_s:
            self.refused_at[address] = now
            return False
        table[address] = full_at
        return True

    def is_nearly_empty(self, address, now):
        """Has the source of this address fewer than two tokens left?"""
        source, *_ = source_keys(address)
        full_at = self.table.get(source, 0.0)
        two_tokens_s = 2 * self.cost_s
        return full_at - now > self.depth_s - two_tokens_s

    def has_refused(self, address, since):
        """Has something of this address been refused since then? If a flood uses the address, its
        owner's own messages may have been among that."""
        return any(self.refused_at.get(key, -math.inf) >= since for key in source_keys(address))


# ================================================================================================
# 5  Registry
#
# The listed servers of all games, the operator's rules for them, and the outcomes of the last
# packets from each source. It knows nothing of protocols, sockets or disks. All times are readings
# of the monotonic clock, passed in by the caller.
# ================================================================================================

class Refused(Exception):
    """Raised for a server that may not be listed. The text gives the reason.

    `outcome` is a key of OUTCOMES (section 9), and `port` the announced port, 0 if it is not known.
    Whoever called the room records both for /check, unless the room has done so."""

    def __init__(self, outcome, reason, port=0):
        super().__init__(reason)
        self.outcome = outcome
        self.port = port


class Rules:
    """The operator's decisions about addresses: public addresses, bans, marks and limits.

    All protocols share the limiters. UDP packets may have a forged source, so UDP and TCP have
    different limiters: a flood of UDP packets with a forged source does not limit what the real
    owner of that address does by TCP.

    datagram_limiter        datagrams
    message_limiter         messages within a TCP connection
    connection_limiter      new TCP connections
    udp_request_limiter     UDP requests that are costly, or whose answer is longer than they are
    request_limiter         requests by TCP
    answer_limiter          answers to the poller; only blocked addresses are refused
    surplus_limiter         bytes that unproven sources get beyond those that they have sent; its
                            buckets are those of the uses that allow_surplus() names"""

    def __init__(self, settings):
        # read() sets the rates that the settings give
        self.datagram_limiter = Limiter(ANSWERS_RATE, self.verdict)
        self.message_limiter = Limiter(ANSWERS_RATE, self.verdict)
        self.connection_limiter = Limiter(ANSWERS_RATE, self.verdict)
        self.udp_request_limiter = Limiter(ANSWERS_RATE, self.verdict)
        self.request_limiter = Limiter(ANSWERS_RATE, self.verdict)
        self.answer_limiter = Limiter(ANSWERS_RATE, self.verdict)
        self.surplus_limiter = Limiter(SURPLUS_BYTES)
        self.country_file: Optional[CountryFile] = None     # the program sets it
        self.read(settings)

    def read(self, settings):
        """Set all rules from Settings, at the start and after a reload.

        All buckets of the limiters are full afterwards, because their verdicts may have changed."""
        self.public_address = settings["server.public_address"]
        self.address_map = settings["address_map"]
        self.official = settings["official"]
        self.priority = settings["priority"]
        self.countries_by_hand = settings["country"]
        self.games = settings["games"]
        self.blocked = Networks(settings["blocked"])
        self.exempt = Networks(settings["limits.exempt"])
        # Blocked networks are banned too, but without a reason, because only the operator may see
        # the reason of a block
        self.bans = Networks({**settings["blocked"], **settings["bans"]}, settings["bans"])
        self.refuse_names = settings["server.refuse_names"]
        # Do the lists for game clients have the servers that other masters' lists have named?
        self.shares_found_servers = settings["upstream.share"]
        self.max_servers = settings["limits.servers"]
        self.max_servers_per_source = settings["limits.servers_per_source"]
        self.datagram_limiter.set_rate(settings["limits.datagrams"])
        self.message_limiter.set_rate(settings["limits.datagrams"])
        self.connection_limiter.set_rate(settings["limits.connections"])
        self.udp_request_limiter.set_rate(settings["limits.requests"])
        self.request_limiter.set_rate(settings["limits.requests"])
        self.answer_limiter.set_rate(ANSWERS_RATE)
        _, self.requests_at_once = settings["limits.requests"]

    def listed_address(self, source, claimed=""):
        """Return the address at which a server is listed.

        `source` is the address that it sends from, `claimed` the address that it has announced, or
        "". The setting address_map may replace the source, and so may public_address, for servers
        on the master's own machine."""
        if claimed and self.believes_claim(source, claimed):
            return canonical_address(claimed)
        if source in self.address_map:
            return self.address_map[source]
        if self.public_address and is_loopback(source):
            return self.public_address
        return source

    def believes_claim(self, source, claimed):
        """May a server at this source announce that it has another address?

        Only a server on a local network may, and the claimed address may not be a loopback one."""
        if source not in LOCAL_NETWORKS or not is_unicast(claimed):
            return False
        return not is_loopback(canonical_address(claimed))

    def verdict(self, address):
        """Return the verdict about an address: BLOCKED, EXEMPT or NO_VERDICT."""
        if self.blocked.find(address) is not None:
            return BLOCKED
        if self.exempt.find(address) is not None:
            return EXEMPT
        return NO_VERDICT

    def exempts(self, address):
        """Is this address exempt from all limits per source?"""
        # Most addresses are in the limiter's table, and a look-up there costs less than verdict()
        verdict = self.datagram_limiter.table.get(address)
        if verdict is None:
            verdict = self.verdict(address)
        return verdict == EXEMPT

    def allow_surplus(self, use, address, size, now):
        """May a source that has not proven its address get `size` bytes more than it has sent?

        All such sources share one bucket, because a limit by source would not stop somebody who
        forges sources. Each `use` has a bucket of its own, so that a flood of pings, for example,
        cannot use up the bytes for lists. Sources that the operator exempts always may."""
        if size <= 0 or self.exempts(address):
            return True
        return self.surplus_limiter.allow(use, now, size)

    def surplus_is_spent(self, use, address, now):
        """Is the bucket of allow_surplus() so empty that even a few bytes would be refused?"""
        return self.surplus_limiter.is_nearly_empty(use, now) and not self.exempts(address)

    def request_tokens(self, tokens):
        """Return the tokens that a client pays for a costly request: at most half a full bucket.

        Without that limit a small bucket would never have enough for it."""
        return min(tokens, max(1.0, self.requests_at_once / 2))

    def ban_reason(self, *addresses):
        """Return the reason why one of these addresses is banned, or "" if none of them is."""
        if not self.bans.by_host_bits:
            return ""
        for address in set(addresses):
            reason = self.bans.find(address)
            if reason is not None:
                return reason or "banned, no reason given"
        return ""

    def check_source_limit(self, shares, source, port):
        """Raise Refused for a server at this source and port if the source has as many servers in
        these Shares as it may have."""
        full = shares.full(source, self.max_servers_per_source)
        if not full or self.exempts(source):
            return
        _, is_network, prefix_bits = full.partition("/")
        limit = self.max_servers_per_source
        if prefix_bits == "48":
            limit *= SITE_SOURCES
        raise Refused("limit", "at most %d servers of one %s are listed" % (
            limit, "/%s network" % prefix_bits if is_network else "address"), port)

    def country_by_hand(self, address, port):
        countries = self.countries_by_hand
        return countries.get((address, port)) or countries.get((address, 0), "")

    def country(self, address, port=0):
        """Return the country of a server, in COUNTRY_NAMES or, from the file, two other letters.

        Return "" if the country is not known. `port` is 0 for an address alone."""
        by_hand = self.country_by_hand(address, port)
        if by_hand or self.country_file is None:
            return by_hand
        return self.country_file.country(address)


# The ways in which a master can verify that a server is there
VERIFICATIONS = "handshake", "query", "connection", "self-reported", "another list"
NO_DETAILS: Mapping[str, Any] = {}


class Server:
    """One listed server. Its identity is (game, address, port). The other attributes have the
    values that it announced last, and what this master knows about it.

    room         the id of the room (section 7) that knows its protocol; "" for the other games,
                 which announce themselves by POST /announce
    source, source_port     the address and UDP port that its packets come from; behind a router
                 they differ from `address` and `port`. The port is 0 if it is not known
    first_seen, last_seen   seconds of the monotonic clock
    answered_at  when it answered a poll that did not set last_seen
    lifetime     seconds that it stays listed after last_seen; infinite if a connection or polls
                 decide when it leaves
    verified     how it is known to be there, one of VERIFICATIONS
    players, max_players    max_players is 0 if it is not known
    playing      players in the game rather than watching; None if that is not known
    ping_ms      milliseconds; None if this master does not query it
    responding   False if the ini names it and it does not answer; game lists leave it out
    confirmed    it was heard since this program started
    pinned       the ini names it, so it stays listed even if it does not answer
    official, priority      the operator's marks
    country      where it is, two letters in lower case; "" if that is not known
    details      further texts by name; its page shows them, except HIDDEN_DETAILS (section 8)
    private      what only its room knows of it, by name; see Private (section 7)
    fingerprint  of the packets that say nothing new about it, or None; see Registry.by_fingerprint
    repeat_answer   the answer to such a datagram; b"" if it gets none
    master       the other master that has heard it; "" if this one has
    found_at     the master in whose list it was found (see Upstream.name); "" if it has announced
                 itself, or if the ini names it
    rank         see ranking(); None after a change
    entry_cache  its rendered entries by list; see cached_entries(); None after a change
    """

    __slots__ = (
        "game", "address", "port", "room", "name", "mode", "map", "version", "players",
        "max_players", "playing", "description", "official", "priority", "verified", "confirmed",
        "pinned", "responding", "ping_ms", "details", "private", "source", "source_port",
        "first_seen", "last_seen", "answered_at", "lifetime", "rank", "entry_cache", "country",
        "fingerprint", "repeat_answer", "master", "found_at")

    def __init__(self, game, address, port, source, now, lifetime, name="", mode="", map="",
                 version="", players=0, max_players=0, verified="self-reported", *, room="",
                 source_port=0, description="", playing=None, responding=True, ping_ms=None,
                 details=NO_DETAILS, private=NO_DETAILS, found_at=""):
        """Describe a server that has just been heard from. `now` becomes first_seen and last_seen.
        The class lists the other parameters, which are attributes of the same names; those without
        a parameter get the values that a new server has."""
        self.game = game
        self.address = address
        self.port = port
        self.room = room
        self.source = source
        self.source_port = source_port
        self.first_seen = self.last_seen = now
        self.answered_at = -math.inf
        self.lifetime = lifetime
        self.name = name
        self.mode = mode
        self.map = map
        self.version = version
        self.players = players
        self.max_players = max_players
        self.playing = playing
        self.description = description
        self.details = details
        self.private = private
        self.verified = verified
        self.responding = responding
        self.ping_ms = ping_ms
        self.found_at = found_at
        self.official = False
        self.priority = 0
        self.country = ""
        self.confirmed = True
        self.pinned = False
        self.master = ""
        self.fingerprint = None
        self.repeat_answer = b""
        self.rank = None
        self.entry_cache = None

    @property
    def key(self) -> Key:
        return self.game, self.address, self.port

    @property
    def endpoint(self) -> str:
        return endpoint_text(self.address, self.port)

    @property
    def seen(self):
        """When it was last heard, on the clock of last_seen, which counts for its lifetime."""
        return max(self.last_seen, self.answered_at)


def ranking(server):
    """Return the sort key of a server, which is cached until the server changes.

    Lists are sorted by the operator's priority, then those with more players come first, and then
    by name and identity."""
    if server.rank is None:
        server.rank = (
            -server.priority,
            -server.players,
            server.name.casefold(),
            server.address,
            server.port,
            server.game,
        )
    return server.rank


class Census(NamedTuple):
    """The numbers of servers of one game that respond, of players on them, and of those playing."""

    servers: int = 0
    players: int = 0
    playing: int = 0


def census_of(servers, now):
    """Return the Census of each game of these servers, by game.

    If a server does not say how many of its players are playing, all of them count."""
    totals = {}
    for server in servers:
        if not server.responding:
            continue
        playing = server.players if server.playing is None else server.playing
        total = totals.get(server.game, Census())
        totals[server.game] = Census(
            total.servers + 1, total.players + server.players, total.playing + playing)
    return totals


class PacketOutcome(NamedTuple):
    """The outcome of one packet: listed, refused, or something else."""

    at: float                           # seconds of the monotonic clock
    outcome: str                        # a key of OUTCOMES (section 9)
    detail: str


class Registry:
    """The listed servers by identity, and a generation number that grows with each change.

    A server that this master has heard is one of its own. Servers that only other masters have
    heard are listed too, but protocols do not deal with them: only Cluster adds, changes and
    removes them.

    `changes` notes what was "listed", has "changed" or is "gone", as pairs of that word and the
    Server. The program hands it to everybody who wants to know once a second, and empties it."""

    master = ""                         # this master's name among several

    def __init__(self, rules):
        self.rules = rules
        self.games = collections.defaultdict(dict)          # servers by game, and then by endpoint
        # The titles that servers give their games: their gamenames, and the source of the server
        # that gave each. Both are dropped with the game's last server
        self.titles = {}
        self.title_sources = {}
        # This master's servers by source: those that announced themselves or that the ini names,
        # and those that were found in other lists. The latter are counted apart, so that they do
        # not keep out one of the same source that announces itself
        self.own = Shares()
        self.found = Shares()
        self.total = 0
        self.generation = 0
        self.changes = []
        self.altered = set()                # keys of this master's servers that are to be saved
        # Nothing could be received before this time, so the silence of a server before it does not
        # count
        self.silence_counts_from = -math.inf
        # The servers by the fingerprints of packets that only repeat what is known. One look-up
        # recognizes such a packet before any limit holds, and it need not be parsed. So a flood in
        # the name of a server does not remove it. A server's fingerprint is forgotten when
        # anything about the server changes
        self.by_fingerprint = {}
        self.render_at = 0.0                # when a list may be rendered again; see RenderedList
        self.heard_masters = {}             # when each other master was heard last, by name
        self.countries_due = iter(())       # keys of servers whose countries are looked up again
        # PacketOutcomes by source, protocol and announced port. They take turns by the address at
        # which the source is listed. Those whose source may be forged are kept apart, so that a
        # flood of them pushes out no other
        self.outcomes = Turns(OUTCOMES_KEPT)
        self.unproven_outcomes = Turns(OUTCOMES_KEPT)
        self.unproven_left = 0              # so many may still be recorded until then
        self.unproven_until = -math.inf
        self.census_cache = RenderedList(self, "", census_of, for_clients=False)

    def get(self, game, address, port):
        """Return the listed server with this identity, or None."""
        return self.games.get(game, {}).get((address, port))

    def has(self, server):
        """Is this Server still in the list?"""
        return self.get(*server.key) is server

    def servers(self, game=""):
        """Return a new list of all servers, or those of a game, in the order of ranking()."""
        tables = [self.games.get(game, {})] if game else self.games.values()
        servers = []
        for table in tables:
            servers += table.values()
        servers.sort(key=ranking)
        return servers

    def count_countries(self, game=""):
        """Return the number of servers in each country that has any, of all games or of one."""
        counts = collections.Counter()
        tables = [self.games.get(game, {})] if game else self.games.values()
        for table in tables:
            for server in table.values():
                counts[server.country] += 1
        del counts[""]                  # those whose country is not known
        return counts

    def for_clients(self, servers):
        """Return those of the servers that the lists for game clients have, in the same order.

        The operator may keep the servers that were found in other masters' lists out of them."""
        if self.rules.shares_found_servers:
            return servers
        return [server for server in servers if not server.found_at]

    def census(self, now):
        """Return the Census of each game, by game. It may be some seconds old."""
        return self.census_cache.get(now)

    def list_or_refresh(self, key: Key, source: str, now: float, lifetime: float,
                        fields: Mapping[str, Any], pinned: bool = False) -> Server:
        """List a server or, if this master has listed it already, refresh it. Return the Server.

        `source` is the address that its packet came from, `lifetime` the seconds that it stays
        listed, and `fields` holds the attributes of Server that it has announced. A server that was
        found in another list is an own one from then on, unless `fields` has `found_at`. `pinned`
        says that the ini names the server. Raise Refused if the rules or a limit forbid it."""
        game, address, port = key
        name = fields.get("name")
        server = self.get(game, address, port)
        is_new = server is None or server.master        # another master's server is new to us
        if is_new:
            found_at = fields.get("found_at", "")
            self.check_admission(key, source, name, pinned, found_at)
            if server is not None:
                # The other master's server is replaced by our own. Nobody is told that it was
                # gone, because players saw it all the time
                self.detach(server)
            fields = clamp_players(fields)
            server = Server(game, address, port, source, now, lifetime, **fields)
            server.pinned = pinned
            self.insert(server)
            return server
        self.check_rules(source, address, port, name)
        server.last_seen = now
        server.lifetime = lifetime
        self.update(server, {
            "found_at": "",
            **fields,
            "source": source,
            "confirmed": True,
            "pinned": pinned,
        })
        return server

    def check_admission(self, key, source, name=None, pinned=False, found_at=""):
        """Raise Refused if a server that is not listed yet may not be listed.

        `name` is None if the name is not known yet. Limits do not hold for a `pinned` server, which
        the ini names. `found_at` is as in Server."""
        game, address, port = key
        if not 0 < port <= MAX_PORT:
            raise Refused("bad packet", "port %d cannot be listed" % port, port)
        if not self.can_be_listed(source, address):
            raise Refused("bad packet", "%s cannot be the address of a server" % address, port)
        self.check_rules(source, address, port, name)
        if pinned:
            return
        max_servers = self.rules.max_servers
        # A server that another master has listed takes no further room if it is listed here too
        if self.total >= max_servers and self.get(game, address, port) is None:
            raise Refused("limit", "this master lists at most %d servers" % max_servers, port)
        shares = self.found if found_at else self.own
        self.rules.check_source_limit(shares, source, port)

    @staticmethod
    def can_be_listed(source, address):
        """Can players reach a server at this address?

        An address from which a packet came exists. But nobody else can reach one that begins with
        0, or a link-local one with a scope."""
        if source.startswith("0.") or "%" in source:
            return False
        return address == source or is_unicast(address)

    def check_rules(self, source, address, port, name):
        """Raise Refused if the source or the address is banned, or the name is refused.

        `name` may be None or "", if it is not known. The address and port of the server, which
        replace a missing name, are always allowed."""
        rules = self.rules
        ban_reason = rules.ban_reason(source, address)
        if ban_reason:
            raise Refused("banned", ban_reason, port)
        for pattern in rules.refuse_names:
            if name and pattern.search(name) and name != endpoint_text(address, port):
                reason = "names matching %s are not listed here" % pattern.pattern
                raise Refused("name", reason, port)

    def insert(self, server):
        """Add a server to the list. The caller has checked that it may be listed."""
        rules = self.rules
        endpoint = server.address, server.port
        server.official = rules.official.get(endpoint, False)
        server.priority = rules.priority.get(endpoint, 0)
        if rules.countries_by_hand or rules.country_file:
            server.country = rules.country(*endpoint)
        self.games[server.game][endpoint] = server
        gamename = server.details.get("gamename")
        if gamename and server.game not in self.titles:
            # Letters of other scripts may look like those of a well-known title. Ids are ASCII
            self.titles[server.game] = gamename if gamename.isascii() else server.game
            self.title_sources[server.game] = server.source
        self.count(server, 1)
        self.total += 1
        self.changed("listed", server)

    def confirm(self, server, now):
        """Note that a server was heard at the time `now`, and that nothing about it has changed."""
        server.last_seen = now
        if not server.confirmed:
            self.update(server, {"confirmed": True})

    def update(self, server, fields):
        """Set attributes of a server, given by name.

        If all of them have the same values as before, cached lists stay valid."""
        fields = clamp_players(fields, server.players, server.max_players, server.playing)
        changed = {}
        for name, value in fields.items():
            if getattr(server, name) != value:
                changed[name] = value
        if not changed:
            return
        self.count(server, -1)
        for name, value in changed.items():
            setattr(server, name, value)
        self.count(server, 1)
        self.changed("changed", server)

    def remove_own(self, server):
        """Remove a server from the list, if this master has heard it.

        Do nothing if it is None, or if only another master has heard it."""
        if server is not None and not server.master:
            self.remove_any(server)

    def remove_any(self, server):
        """Remove a server from the list, whichever master has heard it.

        Do nothing if it is None, or has been removed already."""
        if server is None or not self.has(server):
            return
        self.detach(server)
        is_last_of_game = not self.games[server.game]
        if is_last_of_game and server.game in self.titles:
            del self.games[server.game]
            del self.titles[server.game]
            del self.title_sources[server.game]
        self.changed("gone", server)

    def detach(self, server):
        """Remove a server from all tables, without noting that as a change."""
        del self.games[server.game][server.address, server.port]
        self.count(server, -1)
        self.total -= 1
        self.forget_fingerprint(server)

    def count(self, server, difference):
        """Add 1 or -1 to the servers of a server's source, if this master has heard it."""
        if not server.master:
            shares = self.found if server.found_at else self.own
            shares.take(server.source, difference)

    def changed(self, event, server):
        """Do what follows from every change of a server.

        The generation grows, everything cached for the server is dropped, the server is marked for
        the disk, and the change is noted. `event` is "listed", "changed" or "gone"."""
        self.generation += 1
        server.rank = server.entry_cache = None
        self.forget_fingerprint(server)
        if not server.master and len(self.altered) < ALTERED_SERVERS:
            self.altered.add(server.key)
        self.changes.append((event, server))

    def set_fingerprint(self, server, fingerprint, answer=b""):
        """Set the fingerprint of those packets that tell nothing new about the server, and the
        answer to such a datagram.

        For datagrams it is hash((data, sender)); see UdpProtocol.repeated_from. Among a million
        servers, two fingerprints are the same once in 40 million cases."""
        self.forget_fingerprint(server)
        server.fingerprint = fingerprint
        server.repeat_answer = answer
        self.by_fingerprint[fingerprint] = server

    def forget_fingerprint(self, server):
        if server.fingerprint is not None:
            self.by_fingerprint.pop(server.fingerprint, None)
            server.fingerprint = None

    def apply_rules(self, settings):
        """Apply the rules of new settings to all listed servers.

        A server leaves the list if it is banned now, if its game is not served any more, or if it
        has another public address now. A server that is not banned is listed again at its next
        announcement."""
        old_rules = copy.copy(self.rules)
        self.rules.read(settings)
        self.generation += 1            # the rules say which servers the lists for clients have
        for server in self.servers():
            self.forget_fingerprint(server)
            if self.must_leave(server, old_rules):
                self.remove_any(server)
            else:
                endpoint = server.address, server.port
                official = self.rules.official.get(endpoint, False)
                priority = self.rules.priority.get(endpoint, 0)
                # What the ini says holds at once. What the file says follows in the next seconds
                country = self.rules.country_by_hand(*endpoint) or server.country
                self.update(
                    server, {"official": official, "priority": priority, "country": country})
        self.look_up_countries_again()

    def look_up_countries_again(self):
        self.countries_due = iter([server.key for server in self.servers()])

    def look_up_countries(self):
        for key in itertools.islice(self.countries_due, COUNTRY_LOOKUPS):
            server = self.get(*key)
            if server is not None:
                country = self.rules.country(server.address, server.port)
                self.update(server, {"country": country})

    def must_leave(self, server, old_rules):
        """Must a server that the old rules have admitted leave under the present rules?"""
        rules = self.rules
        if server.game in old_rules.games and server.game not in rules.games:
            return True
        old_address = old_rules.listed_address(server.source)
        new_address = rules.listed_address(server.source)
        if server.address == old_address and old_address != new_address:
            return True
        try:
            self.check_rules(server.source, server.address, server.port, server.name)
        except Refused:
            return True
        return False

    def expire(self, now):
        """Remove every server of this master that has been silent for its lifetime.

        This is called once a second. To look at 50,000 servers takes 5 ms, which is less than it
        would take to keep them sorted while they announce themselves."""
        expired = []
        for table in self.games.values():
            for server in table.values():
                if server.last_seen + server.lifetime <= now:
                    expired.append(server)
        for server in expired:
            if server.master:
                # Masters do not tell each other of servers that only repeat themselves
                heard_at = self.heard_masters.get(server.master, -math.inf)
                server.last_seen = max(server.last_seen, heard_at)
            elif self.is_silent(server.source, server.last_seen, server.lifetime, now):
                self.remove_own(server)

    def is_silent(self, source, heard_at, seconds, now):
        """Has a source been silent for so long that its server has probably gone?

        It was last heard at `heard_at`. `seconds` of silence are needed, or three times as many
        while packets of the source may be lost."""
        if now < max(heard_at, self.silence_counts_from) + seconds:
            return False
        if now >= heard_at + 3 * seconds:
            return True
        # If a flood uses the source's address, the limiter drops the source's own packets too
        return not self.rules.datagram_limiter.has_refused(source, heard_at)

    def forget_entries(self):
        """Drop the cached entries of all servers.

        They depend on something that has changed, such as the titles of games, although no server
        has changed."""
        self.generation += 1
        for server in self.servers():
            server.entry_cache = None

    def record_outcome(self, source, protocol, port, outcome, now, detail=""):
        """Remember the outcome of a packet for the page /check.

        `port` is the announced port, or 0 if it could not be read. `outcome` is a key of OUTCOMES
        (section 9), `detail` the reason in words."""
        key = source, protocol, port
        if key in self.unproven_outcomes.things:
            self.unproven_outcomes.pop(key)
        address = self.rules.listed_address(source)
        if outcome == "listed" and key not in self.outcomes.things:
            limit = OUTCOMES_PER_SOURCE * (SITE_SOURCES if ":" in address else 1)
            if len(self.outcomes.keys_of(address)) >= limit:
                return                  # what the list shows pushes out no refusal
        record = PacketOutcome(now, outcome, detail[:OUTCOME_CHARACTERS])
        self.outcomes.add(address, key, record, OUTCOMES_PER_SOURCE)

    def record_unproven(self, source, protocol, port, outcome, now, detail=""):
        """Do what record_outcome() does, for a datagram whose source may be forged. It never
        replaces or pushes out what is proven. During a flood a part of them is recorded, and all of
        a source that has looked at /check."""
        if now >= self.unproven_until:
            self.unproven_until = now + 1.0
            self.unproven_left = OUTCOMES_PER_S
        self.unproven_left -= 1
        if self.unproven_left >= 0 or (source, "", 0) in self.outcomes.things:
            address = self.rules.listed_address(source)
            if outcome == "announced" and self.get(protocol, address, port):
                return                  # /check goes on showing the server as listed
            record = PacketOutcome(now, outcome, detail[:OUTCOME_CHARACTERS])
            key = source, protocol, port
            self.unproven_outcomes.add(address, key, record, OUTCOMES_PER_SOURCE)

    def outcome(self, source, protocol, port):
        """Return the PacketOutcome of the last packet with these, or None. A later proven one has
        removed the unproven one."""
        key = source, protocol, port
        return self.unproven_outcomes.get(key) or self.outcomes.get(key)


def clamp_players(fields, players=0, max_players=0, playing=None):
    """Return these attributes of Server, with the numbers of players limited to the maximum.

    The other parameters are the present values of those that `fields` may lack."""
    told_players = fields.get("players", players)
    told_playing = fields.get("playing", playing)
    maximum = fields.get("max_players", max_players)
    players = min(told_players, maximum or PLAYERS_MAX)
    players = max(0, players)
    playing = told_playing
    if playing is not None:
        playing = min(playing, players)
        playing = max(0, playing)
    if players == told_players and playing == told_playing:
        return fields
    return {**fields, "players": players, "playing": playing}


class Unfinished(Exception):
    """A response takes more than one turn. The same request is answered in the next one."""


def cached_entries(servers, cache_key, render, at_once=math.inf):
    """Return the entries of these servers in one list, in the same order.

    `render(server)` returns an entry. It is called only if the server has changed since its entry
    was last rendered. `cache_key` stands for the list; it may be any hashable object. Raise
    Unfinished if more than `at_once` calls are needed: what these have returned is kept."""
    entries = []
    for server in servers:
        cache = server.entry_cache
        if cache is None:
            cache = server.entry_cache = {}
        entry = cache.get(cache_key)
        if entry is None:
            if at_once == 0:
                raise Unfinished
            at_once -= 1
            entry = cache[cache_key] = render(server)
        entries.append(entry)
    return entries


class ServerList(NamedTuple):
    """A list: the entry of a server, which servers it has, and how the entries are joined.

    An entry is kept until its server changes. join(entries, now) is called rarely; the entries are
    sorted by ranking()."""

    entry: Callable[[Server], Any]
    wanted: Optional[Callable[[Server], bool]] = None       # None: it has all of them
    join: Callable[[Sequence[Any], float], Any] = lambda entries, now: b"".join(entries)

    def render(self, servers, now, at_once=math.inf):
        if self.wanted:
            servers = [server for server in servers if self.wanted(server)]
        return self.join(cached_entries(servers, self.entry, self.entry, at_once), now)

    def render_in_turns(self, servers, now):
        """Do the same for a request, which is answered in its next turn after Unfinished."""
        return self.render(servers, now, RENDERED_AT_ONCE)


class RenderedList:
    """A list that is rendered rarely and served often.

    It is rendered again after a change, but not before all lists that were rendered have paused, so
    that rendering takes a tenth of the time. One of 2,000 servers or more pauses for a second."""

    def __init__(self, registry, game, render, for_clients=True, ages_s=math.inf):
        """Prepare the list of a game, or of all games if `game` is "".

        `render(servers, now)` returns the rendered list. It is not called before get() is. It is
        given all servers or, if the list is `for_clients`, those of Registry.for_clients(). After
        `ages_s` a list is rendered again though no server has changed, for the times in it."""
        self.registry = registry
        self.ages_s = ages_s
        self.game = game
        self.render = render
        self.for_clients = for_clients
        self.generation = -1
        self.due = 0.0
        self.rendered = None

    def get(self, now):
        """Return the rendered list. Render it first if servers have changed and it is due."""
        registry = self.registry
        is_old = registry.generation != self.generation or now >= self.due + self.ages_s
        if is_old and now >= self.due:
            servers = registry.servers(self.game)
            if self.for_clients:
                servers = registry.for_clients(servers)
            self.rendered = self.render(servers, now)
            self.generation = registry.generation
            pause_s = RENDER_SERVER_S * len(servers) + RENDER_KB_S * (len(self.rendered) >> 10)
            # The pauses of all lists follow each other
            registry.render_at = max(now, registry.render_at) + pause_s
            self.due = max(registry.render_at, now + min(1.0, len(servers) / 2000))
        return self.rendered


# ================================================================================================
# 6  Storage
#
# The list of servers and the history of their player counts, in one SQLite file. SavedList carries
# servers from the registry to the file and back. Database knows only sqlite3 and the name of its
# file. It is given rows and the wall clock (`wall`, in seconds since 1970), and returns rows. Only
# the disk thread calls it, except at the start and at the end of the program.
# ================================================================================================

MINUTE, QUARTER, HOUR, DAY = 60, 900, 3600, 86400
# A month and a year of the greatest length, so that every month and year fits
WEEK, MONTH, YEAR = 7 * DAY, 31 * DAY, 366 * DAY


class BlockForm(NamedTuple):
    """How player counts of one resolution are stored: as blocks, each a row of the table.

    A sample is one number for a minute, and two for longer steps: mean and peak. A number has 16
    bits, little-endian. 0 means that the server was away, n + 1 means n players.

    A block has 120, 384 or 672 bytes. If it were longer than 1,002 bytes, a WITHOUT ROWID table
    would move its end to a page of its own, and most of that page would be empty. That is why a
    block holds a week of hourly samples and not a fortnight. All times are in seconds since
    1970."""

    step: int                           # seconds of one sample
    covers: int                         # seconds of a block
    kept: int                           # seconds for which a block is kept after its end
    sample_size: int                    # the numbers of one sample
    numbers: struct.Struct              # those of a block

    def block_start(self, sample_time):
        return sample_time // self.covers * self.covers

    def oldest_kept(self, wall):
        """Return the start time of the oldest block that must be kept."""
        # An hour longer than series show it, because a series may have ended 16 minutes ago
        return self.block_start(int(wall) - self.kept - HOUR)

    def counts(self, blocks, times):
        """Return the means and the peaks at a range of times, both Counts, from blocks by their
        start times."""
        first_start = self.block_start(times.start)
        no_samples = bytes(self.numbers.size)
        numbers: List[int] = []
        for start in range(first_start, times.stop, self.covers):
            numbers += self.numbers.unpack(blocks.get(start, no_samples))
        skipped_samples = (times.start - first_start) // self.step
        first = skipped_samples * self.sample_size
        end = first + len(times) * self.sample_size
        counts = [number - 1 if number else None for number in numbers[first:end]]
        means = counts[::self.sample_size]
        peaks = counts[self.sample_size - 1::self.sample_size]
        return means, peaks


BLOCK_FORMS = {
    MINUTE: BlockForm(MINUTE, HOUR, DAY, 1, struct.Struct("<60H")),
    QUARTER: BlockForm(QUARTER, DAY, MONTH, 2, struct.Struct("<192H")),
    HOUR: BlockForm(HOUR, WEEK, YEAR, 2, struct.Struct("<336H")),
}
# The series that pages show: the seconds from sample to sample, and the seconds of the whole series
SPANS = {
    "day": (MINUTE, DAY),
    "week": (QUARTER, WEEK),
    "month": (QUARTER, MONTH),
    "year": (HOUR, YEAR),
}

# The table `server` holds every server that was seen in the last year. A row with address '' and
# port 0 stands for all servers of a game together, ALL_GAMES for those of all games. In another row
# with game '', the port is a number that identifies this installation; one with port -1 is of an
# earlier version, and is not used any more.
#
# The table `listed` holds the servers of the list. Its columns change every minute, and are kept
# apart from the long texts in `server`, so that 150 rows share a page and few pages are rewritten.
#
# The table `block` is sorted by time first, so the samples of one minute lie together, and so do
# those that have become too old. AUTOINCREMENT never uses an id twice, so a new server cannot get
# the blocks of a forgotten one. PRAGMA user_version = 1 is the version of the tables and of the
# bytes in a block
SCHEMA = (
    "CREATE TABLE server (id INTEGER PRIMARY KEY AUTOINCREMENT, game TEXT, address TEXT,"
    " port INTEGER, first_seen REAL, last_seen REAL, fields TEXT, UNIQUE (game, address, port))",
    "CREATE TABLE listed (server INTEGER PRIMARY KEY, expires REAL, last_seen REAL)",
    "CREATE TABLE block (step INTEGER, start INTEGER, server INTEGER, samples BLOB,"
    " PRIMARY KEY (step, start, server)) WITHOUT ROWID",
)

ALL_GAMES = "", "", -2          # has a sample for each minute in which this master was there
MOST_PLAYED = 10                # servers of a game that GamePast names

# The attributes of Server in a row of the first version, which stored them as a JSON list
FIRST_FIELDS = (
    "name", "mode", "map", "version", "players", "max_players", "playing", "description", "flavor",
    "verified", "responding", "details", "source", "pinned", "luanti_announcement", "zone_owner",
    "found_at", "ddnet_registration")


class ListedRow(NamedTuple):
    """A listed server as it is stored, and as masters send it to each other. All times are in
    seconds since 1970."""

    game: str
    address: str
    port: int
    expires: float
    first_seen: float
    last_seen: float
    fields: Dict[str, Any]              # values for JSON, by the names of attributes of Server

    @property
    def key(self) -> Key:
        return self.game, self.address, self.port


def read_row(columns: Iterable[Any]) -> ListedRow:
    """Return the ListedRow in these columns, which come from the file or from another master.
    `fields` may be JSON. Raise TypeError or ValueError if a value is of another type: SQLite stores
    any in any column."""
    row = ListedRow(*columns)
    if isinstance(row.fields, str):
        row = row._replace(fields=read_fields(row.fields))
    if tuple(map(type, row)) != (str, str, int, float, float, float, dict):
        raise TypeError("values of another type")
    return row


def read_fields(text: str) -> Dict[str, Any]:
    fields = json.loads(text)
    if isinstance(fields, list):
        fields = dict(zip(FIRST_FIELDS, fields))
    if not isinstance(fields, dict):
        raise TypeError("fields without names")
    return fields


# Player counts. A count is None if the server or this master was away
Counts = List[Optional[int]]
# The exceptions that every method of Database may raise
DISK_ERRORS = sqlite3.Error, OSError
# The classes of exceptions that mean that the file itself is damaged. The first two are SQLite's;
# their subclasses mean other trouble: a lock or a full disk is an OperationalError. The others come
# from values that this program cannot have written. https://www.sqlite.org/rescode.html
DAMAGE_ERRORS = (sqlite3.DatabaseError, sqlite3.IntegrityError, UnicodeDecodeError,
                 json.JSONDecodeError, struct.error, TypeError)
# Two kinds of damage that SQLite reports as OperationalErrors: text that is not UTF-8, and noise in
# the head of the file
DAMAGE_TEXTS = "Could not decode to UTF-8", "unsupported file format"


class Series(NamedTuple):
    """Player counts at regular times."""

    start: int                          # seconds since 1970
    step: int                           # seconds
    means: Counts
    peaks: Counts


class GamePast(NamedTuple):
    """What is stored of a game's players. A number is None if nothing was recorded."""

    peaks: Mapping[str, Optional[int]]      # by "day", "week" and "month"
    means: Mapping[str, Optional[float]]
    week: Sequence[Optional[float]]         # the mean of each two hours of a week
    # The keys of the servers with the most players in the past week, and how many on average
    most_played: Sequence[Tuple[Key, float]]


NO_PAST = GamePast({}, {}, (), ())


class Remembered(NamedTuple):
    """What the database remembers of a server. The times are in seconds since 1970."""

    first_seen: float
    last_seen: float
    name: str


def first_value(rows, otherwise=None):
    """Return the value in the first of these rows, which have one column, or `otherwise`."""
    for value, in rows:
        return value
    return otherwise


def mean_and_peak(numbers):
    """Return the stored mean and peak of some stored numbers, 0 if all of them are 0."""
    present = [number for number in numbers if number != 0]
    if not present:
        return 0, 0
    half = len(present) // 2            # added so that the division rounds to the nearest number
    return (sum(present) + half) // len(present), max(present)


def without_gaps(counts):
    return [count for count in counts if count is not None]


def mean_of(counts):
    present_counts = without_gaps(counts)
    return round(sum(present_counts) / len(present_counts), 1) if present_counts else None


def uptime(first_seen, series, *others):
    """Return the share of the time for which a server was there, from 0 to 1, or None.

    The time before it was first seen does not count, and neither does the time for which this
    master was away: then none of these Series, which have the same times, has a sample."""
    # The sample of the step in which it was first seen may be older than that
    samples_before = max(0, math.ceil((first_seen - series.start) / series.step))
    samples = zip(series.means, *[other.means for other in others])
    samples_there = samples_away = 0
    for own_count, *other_counts in itertools.islice(samples, samples_before, None):
        if own_count is not None:
            samples_there += 1
        elif without_gaps(other_counts):
            samples_away += 1
    recorded = samples_there + samples_away
    return samples_there / recorded if recorded else None


def series_times(step, length, wall):
    """Return the times of a series that lasts `length` seconds, a range. It ends with the last step
    whose sample is certainly stored, so that it never ends with a gap that is filled later."""
    delay_s = MINUTE
    if step > MINUTE:
        # It is computed with the first sample of each quarter of an hour
        delay_s += QUARTER
    end = (int(wall) - delay_s) // step * step + step
    return range(end - length, end, step)


class Database:
    """One SQLite file with the list and the history.

    Every method may raise sqlite3.Error, or OSError if a damaged file cannot be renamed. The next
    call opens the file again, so it finds out whether the trouble has ended. It renames a damaged
    file first, and begins a new one. The call that finds the damage cannot do that, because its
    exception keeps the file open, and Windows does not rename open files."""

    def __init__(self, path):
        # The real path is needed because SQLite's log files stand beside the file to which a link
        # leads. It is read now because a program that embeds this one may change its folder later
        self.path = os.path.realpath(path)
        self._db: Optional[sqlite3.Connection] = None
        self._is_damaged = False
        self._quarter = -1          # the number of the quarter of an hour of the last sample
        self._pasts = {}            # what games_past() has returned last,
        self._pasts_minute = -1.0   # and the minute since 1970 in which that was made

    def close(self):
        if self._db is not None:
            self._db.close()
            self._db = None

    @contextlib.contextmanager
    def _transaction(self):
        try:
            with self._db or self._open() as db:
                yield db
        except Exception as error:
            self.close()
            if type(error) in DAMAGE_ERRORS or str(error).startswith(DAMAGE_TEXTS):
                self._is_damaged = True
                raise sqlite3.DatabaseError("the file is damaged: " + error_text(error)) from None
            raise

    def _open(self):
        if self._is_damaged and os.path.exists(self.path):
            changed = utc_datetime(os.path.getmtime(self.path))
            new_path = self.path + changed.strftime(".damaged-%Y%m%d-%H%M%S")
            # The file itself comes last. If the program dies before that, the next start finds the
            # damaged file again, and not an old log beside a new file
            for suffix in ("-wal", "-shm", "-journal", ""):
                if os.path.lexists(self.path + suffix):
                    os.replace(self.path + suffix, new_path + suffix)
            log.warning("the database was damaged; it has been renamed to %s, and a new one begun",
                        new_path)
        self._is_damaged = False
        # SQLite waits so many seconds for another program's lock. With this isolation level a
        # transaction begins with the first statement that writes
        db = self._db = sqlite3.connect(self.path, timeout=0.2, check_same_thread=False,
                                        isolation_level="IMMEDIATE")
        tables = {sql for sql, in db.execute("SELECT sql FROM sqlite_master")}
        version = first_value(db.execute("PRAGMA user_version"))
        if not tables:
            db.executescript("; ".join(
                ("BEGIN IMMEDIATE", *SCHEMA, "PRAGMA user_version = 1", "COMMIT")))
        elif not tables.issuperset(SCHEMA) or version not in (0, 1):
            # Version 0 is a file restored from a .dump, which does not have the version
            raise sqlite3.OperationalError("it belongs to another program or to a later version of"
                                           " this one; change [server] database")
        # A write-ahead log needs a file system with shared memory. Without it, SQLite's default
        # stays in force, which is slower and just as safe
        with contextlib.suppress(sqlite3.OperationalError):
            # With these two, a commit is a write without fsync. A crash of the program loses
            # nothing. A power cut loses the last seconds, but does not damage the file
            db.execute("PRAGMA journal_mode = WAL").fetchall()
            db.execute("PRAGMA synchronous = NORMAL")
        return db

    # The list

    def load(self):
        """Return the ListedRow of each listed server, as it was passed to save(), but with the time
        at which the server was first seen at all."""
        with self._transaction() as db:
            return [read_row(columns) for columns in db.execute(
                "SELECT game, address, port, expires, first_seen, listed.last_seen, fields"
                " FROM listed JOIN server ON id = server ORDER BY server")]

    def save(self, rows, departed):
        """Store changes of the list in one transaction: `rows` are the ListedRows of new and
        changed servers, `departed` the keys of servers that have left the list. Of those that were
        here for KNOWN_AFTER_S, the name and the times are remembered. To encode 10,000 rows takes
        60 ms."""
        values = [{**row._asdict(), "fields": ENCODER.encode(row.fields)} for row in rows]
        with self._transaction() as db:
            for key in departed:
                row = db.execute(
                    "SELECT id, fields, first_seen, max(server.last_seen, listed.last_seen)"
                    " FROM server JOIN listed ON id = server"
                    " WHERE game = ? AND address = ? AND port = ?", key).fetchone()
                if row is None:
                    continue
                server_id, fields, first_seen, last_seen = row
                db.execute("DELETE FROM listed WHERE server = ?", (server_id,))
                # A stranger could fill the disk: he could have thousands of servers listed, one
                # after the other, each with long texts
                if last_seen - first_seen < KNOWN_AFTER_S:
                    db.execute("DELETE FROM server WHERE id = ?", (server_id,))
                    continue
                name_alone = ENCODER.encode({"name": read_fields(fields).get("name", "")})
                # last_seen never moves back: after a power cut the clock may stand at 1970
                db.execute("UPDATE server SET fields = ?, last_seen = ? WHERE id = ?",
                           (name_alone, last_seen, server_id))
            db.executemany(
                "INSERT INTO server (game, address, port, first_seen, last_seen, fields)"
                " VALUES (:game, :address, :port, :first_seen, :last_seen, :fields)"
                " ON CONFLICT (game, address, port)"
                " DO UPDATE SET fields = excluded.fields WHERE fields IS NOT excluded.fields",
                values)
            db.executemany(
                "INSERT OR REPLACE INTO listed SELECT id, :expires, :last_seen FROM server"
                " WHERE game = :game AND address = :address AND port = :port", values)

    def known(self, game, address, port):
        """Return the Remembered of a server that was listed within the last year, or None."""
        with self._transaction() as db:
            row = db.execute(
                "SELECT first_seen, coalesce(listed.last_seen, server.last_seen), fields"
                " FROM server LEFT JOIN listed ON id = server WHERE fields NOTNULL"
                " AND game = ? AND address = ? AND port = ?", (game, address, port)).fetchone()
            if row is None:
                return None
            first_seen, last_seen, fields = row
            return Remembered(first_seen, last_seen, read_fields(fields).get("name", ""))

    def installation_id(self, proposed):
        """Return the number that identifies this installation: the one in the file or, if the file
        has none yet, the proposed one."""
        with self._transaction() as db:
            db.execute("INSERT INTO server (game, address, port) SELECT '', '', ? WHERE NOT"
                       " EXISTS (SELECT * FROM server WHERE game = '' AND port >= 0)", (proposed,))
            return first_value(db.execute(
                "SELECT port FROM server WHERE game = '' AND port >= 0"))

    # The history

    def add_samples(self, wall, samples):
        """Store the player counts of one minute. `samples` has a tuple (game, address, port,
        players) for each server that responds, one with address "" and port 0 for each game, and
        one of ALL_GAMES.

        If a quarter of an hour has ended, also compute the samples of longer steps, delete old
        ones, and return hourly_players(). Otherwise return None."""
        minute = int(wall) // MINUTE * MINUTE
        # The comparison with != also notices a quarter that the clock has gone back to
        quarter_ended = minute // QUARTER != self._quarter
        with self._transaction() as db:
            if quarter_ended:
                self._roll_up(db, minute)
                self._drop_old(db, minute)
                self._drop_excess(db, minute)
            for game, address, port, players in samples:
                # The table `listed` has the time at which a server was last seen
                db.execute(
                    "INSERT INTO server (game, address, port, first_seen, last_seen)"
                    " VALUES (:game, :address, :port, :wall, :wall)"
                    " ON CONFLICT (game, address, port)"
                    " DO UPDATE SET last_seen = excluded.last_seen WHERE address = ''",
                    {"game": game, "address": address, "port": port, "wall": wall})
                server_id = self._server_id(db, game, address, port)
                number = clamp(players, 65534) + 1
                self._write_samples(db, BLOCK_FORMS[MINUTE], minute, server_id, (number,))
        self._quarter = minute // QUARTER
        return self.hourly_players(wall) if quarter_ended else None

    def history(self, game, address, port, span, wall):
        """Return the Series of a server or, with address "" and port 0, of a game, for one of the
        SPANS. In a series of minutes, means and peaks are the same."""
        step, length = SPANS[span]
        form = BLOCK_FORMS[step]
        times = series_times(step, length, wall)
        first_start = form.block_start(times.start)
        blocks = {}
        with self._transaction() as db:
            server_id = self._server_id(db, game, address, port)
            for start in range(first_start, times.stop, form.covers):
                blocks[start] = self._block(db, form, start, server_id)
            means, peaks = form.counts(blocks, times)
        return Series(times.start, step, means, peaks)

    def hourly_players(self, wall, length=DAY):
        """Return the mean player counts of each hour of the last day, or of another time in
        seconds: lists by key, of all servers that were there, of each game by (game, "", 0), and of
        all games by ALL_GAMES."""
        form = BLOCK_FORMS[HOUR]
        times = series_times(HOUR, length, wall)
        blocks = collections.defaultdict(dict)
        means_by_key = {}
        with self._transaction() as db:
            for game, address, port, start, block in db.execute(
                    "SELECT game, address, port, start, samples FROM block"
                    " JOIN server ON id = server WHERE step = ? AND start >= ? AND start < ?",
                    (HOUR, form.block_start(times.start), times.stop)):
                blocks[game, address, port][start] = block
            for key, blocks_of_key in blocks.items():
                means, _ = form.counts(blocks_of_key, times)
                if any(mean is not None for mean in means):
                    means_by_key[key] = means
        return means_by_key

    def games_past(self, games, wall):
        """Return the GamePast of each of these games, by game; that of the game "" is of all games
        together. It is made once a minute, whoever asks; with 10,000 servers in 0.5 s."""
        if wall // MINUTE == self._pasts_minute:
            return self._pasts
        most_played = self._most_played(wall)
        pasts = {}
        for key in (ALL_GAMES, *[(game, "", 0) for game in games]):
            peaks = {}
            means = {}
            series_by_span = {
                span: self.history(*key, span, wall) for span in ("day", "week", "month")}
            for span, series in series_by_span.items():
                peaks[span] = max(without_gaps(series.peaks), default=None)
                means[span] = mean_of(series.means)
            quarters = series_by_span["week"].means
            week = [mean_of(quarters[at:at + 8]) for at in range(0, len(quarters), 8)]
            game, _, _ = key
            pasts[game] = GamePast(peaks, means, week, most_played[game])
        self._pasts = pasts
        self._pasts_minute = wall // MINUTE
        return pasts

    def _most_played(self, wall):
        """Return GamePast.most_played by game."""
        hours = {}                          # in which something was recorded, by key
        totals = collections.Counter()      # of players, over all hours, by key
        for key, means in self.hourly_players(wall, WEEK).items():
            hourly_means = without_gaps(means)
            hours[key] = len(hourly_means)
            totals[key] = sum(hourly_means)
        most_played = collections.defaultdict(list)
        for key, total in totals.most_common():
            game, address, _ = key
            servers = most_played[game]
            if address and total and len(servers) < MOST_PLAYED:
                servers.append((key, round(total / hours.get((game, "", 0), 1), 1)))
        return most_played

    def _server_id(self, db, game, address, port):
        return first_value(db.execute(
            "SELECT id FROM server WHERE game = ? AND address = ? AND port = ?",
            (game, address, port)))

    def _block(self, db, form, start, server_id):
        return first_value(db.execute(
            "SELECT samples FROM block WHERE step = ? AND start = ? AND server = ?",
            (form.step, start, server_id)), bytes(form.numbers.size))

    def _write_samples(self, db, form, first_time, server_id, numbers):
        """Write the numbers of consecutive samples, the first at `first_time`, into their block."""
        start = form.block_start(first_time)
        block = bytearray(self._block(db, form, start, server_id))
        samples_before = (first_time - start) // form.step
        bytes_before = samples_before * form.sample_size * 2
        struct.pack_into("<%dH" % len(numbers), block, bytes_before, *numbers)
        db.execute("INSERT OR REPLACE INTO block VALUES (?, ?, ?, ?)",
                   (form.step, start, server_id, block))

    def _roll_up(self, db, minute):
        """Compute the samples of quarters and hours from the latest blocks of minutes, without
        those that were written while the clock ran ahead."""
        hour = first_value(db.execute(
            "SELECT max(start) FROM block WHERE step = ? AND start <= ?", (MINUTE, minute)))
        for server_id, block in db.execute(
                "SELECT server, samples FROM block WHERE step = ? AND start = ?",
                (MINUTE, hour)).fetchall():
            minutes = BLOCK_FORMS[MINUTE].numbers.unpack(block)
            quarters: List[int] = []
            for first in range(0, 60, 15):
                quarters += mean_and_peak(minutes[first:first + 15])
            self._write_samples(db, BLOCK_FORMS[QUARTER], hour, server_id, quarters)
            self._write_samples(db, BLOCK_FORMS[HOUR], hour, server_id, mean_and_peak(minutes))

    def _drop_old(self, db, minute):
        """Delete samples that are too old, and servers not seen for a year."""
        # A clock may run two years ahead until NTP sets it. So nothing is deleted unless each of
        # the last 24 hours has a sample
        hour = BLOCK_FORMS[MINUTE].block_start(minute)
        for start in range(hour - DAY, hour, HOUR):
            if not first_value(db.execute(
                    "SELECT 1 FROM block WHERE step = ? AND start = ? LIMIT 1", (MINUTE, start))):
                return
        for form in BLOCK_FORMS.values():
            db.execute("DELETE FROM block WHERE step = ? AND start < ?",
                       (form.step, form.oldest_kept(minute)))
        # The rows of servers and games are kept as long as their last hourly samples
        db.execute("DELETE FROM server WHERE game != '' AND last_seen < ?"
                   " AND id NOT IN (SELECT server FROM listed)",
                   (BLOCK_FORMS[HOUR].oldest_kept(minute),))

    def _drop_excess(self, db, minute):
        """Forget servers that are not listed, and games, if there are too many of them together:
        those first that were here for the shortest time. So a stranger who lists one server after
        another neither drives out old servers nor fills the disk. The samples of those go too, and
        of those that save() has forgotten since the last quarter of an hour."""
        # LIMIT -1 OFFSET n skips the first n rows, which are kept, and returns all others
        excess = db.execute(
            "SELECT id, first_seen FROM server"
            " WHERE game != '' AND id NOT IN (SELECT server FROM listed)"
            " ORDER BY last_seen - first_seen DESC, last_seen DESC LIMIT -1 OFFSET ?",
            (KNOWN_SERVERS,)).fetchall()
        db.executemany("DELETE FROM server WHERE id = ?", [(gone,) for gone, _ in excess])
        # Blocks from before this time cannot belong to the forgotten rows, and most of those rows
        # are recent. A server that save() forgets may have been silent for some hours before
        first_seen = min([first_seen for _, first_seen in excess] + [minute - 4 * HOUR])
        for form in BLOCK_FORMS.values():
            db.execute("DELETE FROM block WHERE step = ? AND start >= ?"
                       " AND server NOT IN (SELECT id FROM server)",
                       (form.step, form.block_start(first_seen)))


# --- The list on disk ----------------------------------------------------------------------------

# After a restart, an AIO server, whose connection has ended, has this long to connect again. A
# server whose protocol is switched off now cannot be heard any more, and leaves after this time too
RESTORED_S = 60.0

# The attributes of Server that are stored, with their types
STORED_FIELDS: Dict[str, type] = {
    **dict.fromkeys(("name", "mode", "map", "version", "description", "verified", "source",
                     "found_at"), str),
    **dict.fromkeys(("players", "max_players", "playing"), int),
    **dict.fromkeys(("responding", "pinned"), bool),
    "details": dict,
}


def listed_row(server, epoch):
    """Return the ListedRow of a server. `epoch` is the wall clock minus the monotonic clock."""
    fields = {name: getattr(server, name) for name in STORED_FIELDS}
    if server.room in ROOMS:
        fields.update(ROOMS[server.room].stored(server))
    last_seen = server.last_seen + epoch
    return ListedRow(
        server.game, server.address, server.port,
        expires=last_seen + min(server.lifetime, DAY),      # a stored time must be finite
        first_seen=server.first_seen + epoch,
        last_seen=last_seen,
        fields=fields)


def restored_server(row, now, wall):
    """Return the Server that a ListedRow describes, marked as unconfirmed, or None if the row has
    impossible values. Raise Malformed if a private attribute of a room has.

    `now` and `wall` are the same moment by the monotonic and by the wall clock. The values are
    cleaned again, because another master may have written them; one of the wrong type is left
    out."""
    fields = {}
    for name, expected_type in STORED_FIELDS.items():
        value = row.fields.get(name)
        if type(value) is not expected_type:
            continue
        if isinstance(value, str):
            value = clean(value, TEXT_CHARACTERS)
        elif isinstance(value, dict):
            value = {clean(key): clean(str(text)) for key, text in value.items()}
        elif expected_type is int:
            value = clamp(value)
        fields[name] = value
    for room in ROOMS.values():
        if room.owns(row.game, fields.get("details", NO_DETAILS)):
            fields["room"] = room.game
            fields["private"] = room.restored(row.fields)
    source = fields.pop("source", row.address)
    pinned = fields.pop("pinned", False)
    if not is_unicast(row.address) or not is_unicast(source):
        return None
    if fields.get("verified") not in VERIFICATIONS:
        return None
    lifetime = row.expires - row.last_seen
    if lifetime > DAY - 1:                  # it was infinite
        lifetime = math.inf if fields["verified"] == "query" else RESTORED_S
    server = Server(row.game, row.address, row.port, source, now, lifetime, **fields)
    server.confirmed = False
    server.pinned = pinned
    # Neither time may lie in the future, even if the wall clock has been put back since
    server.first_seen = min(now, row.first_seen + now - wall)
    server.last_seen = min(now, row.last_seen + now - wall)
    return server


def report(health, where, trouble):
    """Note in MasterServer.health that a part of the program, `where`, does not work. /healthz
    shows `trouble`, a sentence, until the caller removes it. The log gets it once."""
    if where not in health:
        log.error("trouble with the %s: %s", where, trouble)
    health[where] = trouble


class SavedList:
    """Saves the registry's servers to the database, and restores them after a restart.

    One batch is written at a time. If a batch fails, the next one has all servers."""

    def __init__(self, database, registry, disk, health):
        self.database = database
        self.registry = registry
        self.disk = disk                # the WorkerThread that calls the Database
        self.health = health            # that of MasterServer
        self.hourly_players = {}        # the last result of Database.hourly_players()
        self.batch_began: Optional[float] = None    # None if no batch is being written
        self.sampled_minute = -1.0      # the minute since 1970 of the last batch with all servers

    def restore(self, now, wall, rooms):
        """List the servers that were listed before the restart. `rooms` has the games that are
        switched on. If the database cannot be read, the list begins empty."""
        rows = []
        try:
            rows = self.database.load()
            self.hourly_players = self.database.hourly_players(wall)
        except DISK_ERRORS as error:
            report(self.health, "database", error_text(error))
        registry = self.registry
        registry.silence_counts_from = now
        for row in rows:
            # The next batch saves the server again, or deletes it if it is not restored
            registry.altered.add(row.key)
            if wall - row.last_seen > HOUR:         # it has probably gone
                continue
            with contextlib.suppress(Malformed, Refused):
                server = restored_server(row, now, wall)
                # Only servers that the ini names are listed without responding. Those need not be
                # restored, because the poller lists them again anyway
                if server is None or not server.responding:
                    continue
                room = rooms.get(server.room)
                if room is None and server.game not in registry.rules.games:
                    server.lifetime = min(server.lifetime, RESTORED_S)
                registry.check_admission(
                    server.key, server.source, server.name, found_at=server.found_at)
                registry.insert(server)
                if room is not None:
                    room.resume(server)
        if registry.total:
            log.info("%s restored from before the restart, not confirmed until heard again",
                     count_text(registry.total, "server"))

    def tick(self, now, wall):
        """Begin a batch, unless one is being written: of the servers that have changed or, once a
        minute, of all servers, with their player counts. The event loop calls this once a second.
        """
        if self.batch_began is not None:
            # Most batches take milliseconds. Some take seconds, if the disk has to spin up
            if now - self.batch_began >= 10.0:
                report(self.health, "database", "nothing has been written for 10 s or more")
            return
        samples = []
        if wall // MINUTE != self.sampled_minute:
            self.sampled_minute = wall // MINUTE
            players = 0
            for game, servers in self.registry.games.items():
                total = 0
                for server in servers.values():
                    if not server.master:
                        self.registry.altered.add(server.key)       # its times have changed
                    if server.responding:
                        samples.append((*server.key, server.players))
                        total += server.players
                samples.append((game, "", 0, total))
                players += total
            samples.append((*ALL_GAMES, players))
        if samples or self.registry.altered:
            self.save(now, wall, samples)

    def save(self, now, wall, samples):
        """Let the disk thread write the servers that have changed, and `samples`, which are those
        of Database.add_samples(), or empty."""
        changed_keys = self.registry.altered
        self.registry.altered = set()
        rows = []
        departed = set(changed_keys)
        for key in changed_keys:
            server = self.registry.get(*key)
            if server and not server.master:
                rows.append(listed_row(server, wall - now))
                departed.discard(key)
        self.batch_began = now

        def write():
            self.database.save(rows, departed)
            return self.database.add_samples(wall, samples) if samples else None

        self.disk.submit(write, functools.partial(self.on_written, changed_keys))

    def on_written(self, keys, result, now):
        """`result` is the hourly player counts if the batch has computed them, None if it has not,
        and an exception if the batch has failed."""
        self.batch_began = None
        if isinstance(result, Exception):
            # The next batch is to have all servers, and those that left before this one failed
            self.sampled_minute = -1.0
            if len(keys) < ALTERED_SERVERS:
                self.registry.altered |= keys
            report(self.health, "database", error_text(result))
            return
        if result:
            self.hourly_players = result
        if self.health.pop("database", ""):
            log.info("the list is saved again")


# ================================================================================================
# 7  Protocols
#
# First what the games share: ports, sessions, the form of a game, the poller. Then a room for each
# game, with real bytes of its protocol. A protocol is given bytes, the peer that sent them and the
# time, and returns bytes. "The document" is the game's own description of the protocol; the
# docstring of the room gives its title. If the document leaves something open, the room does the
# same as deployed programs. README.md shows how to add a game.
# ================================================================================================

class UdpProtocol:
    """The base class of a protocol on one UDP port.

    Replies are a list of (datagram, peer) pairs, which the event loop sends. If datagram() raises
    Malformed or Refused, the event loop counts that and records it for /check."""

    # The id of the game for /check, "" if it has none
    game = ""
    # True if the game's lists cannot hold IPv6 addresses. The protocol then gets IPv4 sockets only
    ipv4_only = True
    # A longer datagram is truncated to this length
    datagram_bytes = MAX_DATAGRAM_BYTES
    # "address" or "endpoint" if listed servers announce themselves here. A datagram whose bytes and
    # sender, or the sender's address, have a fingerprint in the registry then refreshes its server,
    # and gets the server's `repeat_answer` instead of that of datagram()
    repeated_from = ""

    def datagram(self, data: bytes, peer: Peer, now: float) -> Replies:
        """Read one datagram and return the replies.

        Raise Malformed if the protocol has no such datagram, Refused if its server may not be
        listed, and Limited if a limit forbids an answer."""
        raise NotImplementedError

    def tick(self, now: float) -> Replies:
        """Do the work of each second and return the datagrams to send.

        This is the place for polls, retries, and forgetting what the protocol remembers."""
        return []

    def read(self, settings: Settings) -> None:
        """Read the settings, at the start and after a reload."""


class Session:
    """One TCP connection.

    The bytes that a method returns are sent to the peer, those of each call in one piece. If a
    method raises Malformed, Refused or Limited, the connection is closed, and that is counted or
    recorded for /check."""

    # The id of the game for /check, "" if it has none
    game = ""
    # True if the session will send nothing more. The connection is closed when all is sent
    done = False
    # Received bytes that have not been answered yet
    buffer = b""
    # A long body that other connections share. It is sent after the bytes that a method returned
    body = b""
    # True for the connection of a game server that publishes itself here. If there are too many
    # connections, those of game servers are closed last
    kept = False
    # A function for the disk thread, or None. Its result is passed to resume()
    job: Optional[Callable[[], Any]] = None
    # True if the answer needs a further turn, in which receive() is called with b""
    unfinished = False

    def encrypted(self) -> None:
        """Note that the connection is encrypted by TLS. This comes before all other calls."""

    def opened(self, now: float) -> bytes:
        """Return the bytes that the master sends first on a new connection."""
        return b""

    def receive(self, data: bytes, now: float) -> bytes:
        """Add received bytes to `buffer`, and return the answer to the first message in it.

        Return b"" if the message is not complete yet. Only one message is answered; after the
        answer has been sent, this method is called again with b"", for the next message."""
        return b""

    def ended(self, now: float) -> bytes:
        """Return the last bytes for a peer that has ended its side of the connection.

        The peer sends nothing more, but may still read."""
        return b""

    def resume(self, result: Any, now: float) -> bytes:
        """Return the answer that needed the result of `job`.

        `result` is what the job has returned, or the exception that it has raised."""
        return b""

    def tick(self, now: float) -> bytes:
        """Return bytes that are due now, such as a greeting, and set `done` after a timeout.

        The event loop calls this a few times a second while no output is waiting to be sent."""
        return b""

    def closed(self, now: float) -> None:
        """Clean up after the connection has been closed, by either side."""


class TcpProtocol:
    """The base class of a protocol on one TCP port: it creates a session for each connection."""

    # As in UdpProtocol
    ipv4_only = False
    # False if clients send first. Their first bytes are then read as soon as they connect
    speaks_first = True

    def session(self, address: str, now: float) -> Session:
        """Return the session for a new connection from this address."""
        raise NotImplementedError

    def refusal(self, address: str, now: float) -> Session:
        """Return the session for a new connection that exceeds a limit.

        It has `done` set: the connection is closed after the bytes of opened() have been sent."""
        session = Session()
        session.done = True
        return session

    def plain_refusal(self, address: str, now: float) -> Session:
        """Return the session for a client that does not speak TLS, at a port for TLS.

        As in refusal(), it has `done` set."""
        return self.refusal(address, now)

    def tick(self, now: float) -> None:
        """Do the work of each second."""

    def read(self, settings: Settings) -> None:
        """Read the settings, at the start and after a reload."""


class UpstreamState(NamedTuple):
    """What this master knows about a list of another master, for /healthz and /metrics."""

    fetched: Optional[int] = None       # the last good fetch, in seconds since 1970; None: never
    addresses: int = 0                  # the addresses that it brought
    listed: int = 0                     # the servers that are listed because of this list
    trouble: str = ""                   # why the last fetch failed; "" if it did not


# --- The form of a game --------------------------------------------------------------------------

class Form:
    """A packet of a fixed form, which is read and written by one layout.

    `layout` is that of struct, `names` are its fields. `texts` has those that are texts, with the
    longest one in bytes that is written; a text that is read ends with a NUL or fills its field.
    Texts are written in `encoding`, and read by decode_legacy(), in whatever encoding they are.
    `fixed` values are the same in every packet; a packet with another one is Malformed."""

    def __init__(self, layout, names, texts=NO_DETAILS, encoding="utf-8", **fixed):
        self.struct = struct.Struct(layout)
        self.size = self.struct.size
        self.fields: Any = collections.namedtuple("fields", names)      # type: ignore[misc]
        self.texts = texts
        self.encoding = encoding
        self.fixed = fixed

    def read(self, data):
        """Return the fields at the beginning of the data, by name. Raise Malformed."""
        if len(data) < self.size:
            raise Malformed("length: %d bytes instead of %d" % (len(data), self.size))
        values = self.struct.unpack_from(data)
        fields = self.fields(*values)
        for name, fixed_value in self.fixed.items():
            value = getattr(fields, name)
            if value != fixed_value:
                raise Malformed("%s: %a instead of %a" % (name, value, fixed_value))
        if not self.texts:
            return fields
        texts = {}
        for name in self.texts:
            raw = c_string(getattr(fields, name))
            texts[name] = decode_legacy(raw)
        return fields._replace(**texts)

    def read_whole(self, data):
        """Return the fields of a packet that nothing follows. Raise Malformed."""
        if len(data) > self.size:
            raise Malformed("length: %d bytes instead of %d" % (len(data), self.size))
        return self.read(data)

    def read_all(self, data):
        last = len(data) - self.size
        return [self.read(data[at:at + self.size]) for at in range(0, last + 1, self.size)]

    def write(self, **values):
        """Return the packet with these values; a number without one is 0, a text is empty."""
        ordered = []
        for name in self.fields._fields:
            default = self.fixed.get(name, 0)
            value = values.get(name, default)
            if name in self.texts:
                max_bytes = self.texts[name]
                value = text_field(value or "", max_bytes, self.encoding)
            ordered.append(value)
        return self.struct.pack(*ordered)


def text_field(text, max_bytes, encoding="utf-8"):
    """Encode a text and cut it to at most `max_bytes` bytes, but never within a character.

    Characters that the encoding lacks become "?"."""
    cut = text.encode(encoding, "replace")[:max_bytes]
    return cut.decode(encoding, "ignore").encode(encoding)


class Port(NamedTuple):
    """A port of a room: the one in the setting GAME.port, and `offset` more."""

    transport: str                              # "udp" or "tcp"
    offset: int = 0
    make: Callable[[Any], Any] = lambda room: room      # the protocol on it, made from the room


class Private(NamedTuple):
    """A private attribute of a room's servers, in Server.private by its name.

    `read` checks the stored form, a value of JSON that comes from the disk or from another master.
    It returns the value, and raises Malformed or Refused if it is wrong. Without `read` the
    attribute is not stored."""

    default: Any
    read: Optional[Callable[[Any], Any]] = None
    # True if each of several masters decides it for itself, and none takes it over from another
    is_own: bool = False


def read_names(names):
    """Return the first 500 names of a list, such as those of players, cleaned and without
    repetitions. Raise TypeError or AttributeError if it is not a list of texts."""
    if not isinstance(names, list):
        raise TypeError("not a list")
    # Players' names have up to 20 characters, names of Luanti's mods rarely 30
    cleaned_names = [clean(name, 32) for name in names[:500]]
    return list(dict.fromkeys(cleaned_names))


class Player(NamedTuple):
    """Somebody on a game server, as far as the game tells it."""

    name: str
    clan: str = ""
    score: Optional[int] = None
    best_s: Optional[int] = None        # the best time in a race, in seconds
    is_watching: bool = False


def is_ipv4(server):
    """Can a list for players with four bytes an address have this server?"""
    return server.responding and ":" not in server.address


JSON_TYPE = "application/json; charset=utf-8"
XML_TYPE = "application/xml; charset=utf-8"


class Route(NamedTuple):
    """A path of the web server that answers with a list."""

    list: str                                   # a name in lists()
    media_type: str
    of_any_game: bool = False                   # whether ?game= and other filters may follow


class MasterPlace(NamedTuple):
    """Where game servers reach a master."""

    host: str                           # its name or address
    url: str                            # of its page; "" if it has none


class Contact(NamedTuple):
    """What somebody who runs a game server pastes, to have the server listed here."""

    where: str                          # where the block belongs: the beginning of a sentence
    block: str                          # a %-template with the values in filled(); several lines
    opens: str                          # what the firewall of the game server has to let in
    title: str = ""                     # of the games, if they are not all of the room
    games: Tuple[str, ...] = ()         # their ids, likewise

    @property
    def game(self) -> str:
        """Return the id that stands for all of them in links to the block."""
        game, *_ = self.games
        return game

    def filled(self, room, port, place):
        """Return the Contact with its block for a MasterPlace and the port of the game there."""
        is_secure = place.url.startswith("https:")
        block = self.block % {
            "host": place.host,
            "port": port,
            "endpoint": endpoint_text(place.host, port),
            "url": place.url,
            # `announce` takes a master's page as HOST:PORT or as https://HOST
            "page": place.url if is_secure else place.url.partition("//")[2],
            "insecure": "" if is_secure else "\nhttp_allow_insecure 1",
            "game": room.game}
        return self._replace(block=block, title=self.title or room.title,
                             games=self.games or (room.game,))


ANNOUNCE_COMMAND = """\
python3 masterserver.py announce \\
    --game %(game)s \\
    --port PORT \\
    --name "My server" \\
    %(page)s"""


class Send(NamedTuple):
    """A step of a conversation, which is a generator: what to send, and how long to wait.

    The generator gets what has come: by UDP a datagram, by TCP some bytes (b"" at the end of the
    connection), by HTTP an HttpAnswer, or None after `wait_s`. Without `wait_s` the present wait
    goes on. A conversation lasts as long as its connection. If that fails, the caller begins
    another conversation after a pause, which grows from 1 to 60 s."""

    data: Union[bytes, List[bytes]] = b""       # by UDP one datagram, or a list of them
    wait_s: Optional[float] = None
    path: str = ""                              # by HTTP; a POST if there are data
    state: str = ""                             # for the log and `failure`; "" leaves it as it is
    accepted: bool = False                      # whether the master has said that it lists us


class ListOption(NamedTuple):
    """A parameter of fetch(): an option of `list`, and a word after the host in [upstream]."""

    name: str
    default: str
    read: Callable[[str], str]                  # returns the value; raises ValueError
    help: str


class HttpAnswer(NamedTuple):
    """The answer to a request by HTTP."""

    status: int
    body: bytes


# A refused server is announced again after this time
REFUSED_S = 1800.0


class MasterRefused(Exception):
    """Ends a conversation: the master does not list this server. The text gives its reason."""

    def __init__(self, reason, again_after_s=REFUSED_S):
        super().__init__("refused: " + reason)
        self.again_after_s = again_after_s


# The longest list of another master, in servers, in bytes, and in the time that it may take. A
# master lists 50,000 servers by default, which are 20 MB in their longest form. A megabit a second
# is enough for Luanti's list, which has 3 MB
LIST_SERVERS = 65536
LIST_BYTES = 24 << 20
LIST_S = 30.0


def received_until(is_complete, question=b"", most_bytes=LIST_BYTES, wait_s=LIST_S):
    """Send a question, as a part of a conversation by TCP. Return all bytes that come until
    is_complete(bytes) is true, or until the other side closes the connection.

    They are a bytearray: to copy megabytes in one call would stop all other threads meanwhile."""
    received = bytearray()
    data = yield Send(question, wait_s)
    while data:
        received += data
        if len(received) > most_bytes:
            raise Malformed("more than %d bytes" % most_bytes)
        if is_complete(received):
            return received
        data = yield Send()
    if data is None:
        raise TimeoutError("it was not complete within %g s" % wait_s)
    return received


def received_until_closed(question, most_bytes=LIST_BYTES, wait_s=LIST_S):
    return received_until(lambda data: False, question, most_bytes, wait_s)


def replies(data, wait_s, is_accepted, state=""):
    """Send data to a master, as a part of a conversation by TCP, and wait so long for replies.

    is_accepted(received) says whether the master confirms that it lists us, and raises
    MasterRefused if it does not. Return the last replies. `state` is as in Send."""
    received = b""
    data = yield Send(data, wait_s, state=state)
    while data is not None:
        if not data:
            raise ConnectionError("the master has closed the connection")
        received = (received + data)[-4096:]        # no game's replies have more than 200 bytes
        step = Send()
        if is_accepted(received):
            step = Send(state="announced", accepted=True)
        data = yield step
    return received


# A value in a list in JSON may have this length. The longest entries are DDNet's, with 32 kB
JSON_VALUE_CHARACTERS = 1 << 17
JSON_PIECE_BYTES = 1 << 14          # are decoded at once
JSON_DECODER = json.JSONDecoder(parse_int=read_integer)
# More blanks in a row are an error, because one call that skips megabytes takes too long
JSON_BLANKS: Any = re.compile(r"[ \t\r\n]{0,1000}")


def json_array(data, name):
    """Yield the values of the first array in bytes of JSON that is a member called `name`.

    Raise ValueError if there is none, or if it has more than LIST_SERVERS values. What follows the
    array is not read. The values are decoded one by one; see fetched_json()."""
    starts = range(0, len(data), JSON_PIECE_BYTES)
    pieces = codecs.iterdecode((data[at:at + JSON_PIECE_BYTES] for at in starts), "utf-8")
    head_pattern = re.compile(r'"%s"[ \t\r\n]{0,99}:[ \t\r\n]{0,99}\[' % name)
    text, head = "", None
    for piece in pieces:
        text = text[-256:] + piece      # the head, which is shorter, may begin in the last piece
        head = head_pattern.search(text)
        if head:
            break
    if not head:
        raise ValueError("no array %s" % name)
    mark, position = "[", head.end()
    for _ in range(LIST_SERVERS):
        while len(text) - position < JSON_VALUE_CHARACTERS:
            piece = next(pieces, "")
            if not piece:               # the end of the data
                break
            text, position = text[position:] + piece, 0
        position = JSON_BLANKS.match(text, position).end()
        if mark == "[" and text.startswith("]", position):
            return
        if mark not in ("[", ","):
            raise ValueError("no comma before %a" % text[position:position + 20])
        value, position = JSON_DECODER.raw_decode(text, position)
        yield value
        position = JSON_BLANKS.match(text, position).end()
        mark = text[position:position + 1]
        if mark == "]":
            return
        position += 1
    raise ValueError("more than %d servers" % LIST_SERVERS)


def fetched_json(path, name):
    """Fetch a list in JSON, as a part of a conversation by HTTP.

    Return a generator of the values of its array `name`. It raises Malformed if there is none. It
    decodes one value after the other: to decode megabytes in one call would stop all other threads
    for that time, and with them the event loop."""
    answer = yield Send(wait_s=LIST_S, path=path)
    if answer is None:
        raise TimeoutError("it was not complete within %g s" % LIST_S)
    if answer.status != 200:
        raise Malformed("%s: HTTP status %d" % (path, answer.status))

    def values():
        try:
            yield from json_array(answer.body, name)
        except (RecursionError, ValueError) as error:
            raise Malformed("%s: %s" % (path, error_text(error))) from None

    return values()


def read_entries(entries, read):
    """Yield read(entry) for each entry of another master's list. An entry that is Malformed is left
    out, so that one game server cannot keep all others from being read."""
    for entry in entries:
        with contextlib.suppress(Malformed):
            yield read(entry)


def json_entry(entry, players, max_players):
    """Return one server of a list in JSON as a dict with the keys that other games' lists have.

    `players` and `max_players` name its members with these numbers. Raise Malformed."""
    try:
        server = {}
        for name in ("address", "name", "mode", "map", "version"):
            server[name] = clean(str(entry.get(name, "")))
        server["port"] = int(entry["port"])
        server["players"] = int(entry[players])
        server["max_players"] = int(entry[max_players])
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise Malformed("an entry of the list: %r" % error) from None
    return server


# The attributes that a game server may be announced with besides its game and port
ANNOUNCED_ATTRIBUTES = {
    "name": str, "players": int, "max_players": int, "playing": int, "mode": str, "map": str,
    "version": str, "description": str}
RESPONSE_S = 20.0                   # for an HTTP response
TTL_MIN_S, TTL_MAX_S = 10.0, 3600.0     # a lifetime outside these bounds makes no sense
RETRY_MAX_S = 60.0                  # the longest pause after failures


class Game:
    """What a room says of its game, and the defaults. The tools make a room without a program.

    A room is announced to, queries and lists its servers; the other sections ask it for nothing
    but what stands here. Of `program`, the MasterServer, it uses the attributes settings, registry
    and poller, and the functions

    resolve(host, done, source, like="")   Look up the address of a host name in another thread, and
                call done(address, now) in the event loop; the address is "" if there is none.
                `source` is the address of the client that named the host, or "" if the ini names
                it. Of several addresses, `like` or one of its family is preferred. Raise Refused if
                too many look-ups for clients are waiting
    send(data, (address, port))     send a datagram at once, from the poller's port"""

    game = title = ""
    titles: Mapping[str, str] = {}              # of further ids in the registry
    settings: Tuple[Setting, ...] = ()
    ports: Tuple[Port, ...] = ()
    switch = ""                                 # the setting that switches the game on and off
    master_port = 27790                         # the usual port of its masters
    contacts: Tuple[Contact, ...] = ()
    private: Mapping[str, Private] = {}
    routes: Mapping[str, Route] = {}            # by path; GET and HEAD
    # The name of a method by "GET" or "POST" and path. It gets the HttpRequest, and returns
    # JSON or raises Malformed or Refused
    requests: Mapping[str, str] = {}
    body_bytes = HTTP_BODY_BYTES                # the longest body of a request
    json_field = ""         # its servers POST /announce in a form, with JSON in this field
    # The private attributes that /servers.json has, with their values for servers of other games
    json_fields: Mapping[str, Any] = {}
    ipv4_list = False                           # its players' list cannot hold IPv6 addresses
    announced_by_http = False                   # whether POST /announce takes its servers
    announced_over = "http"                     # what announce() speaks: "udp", "tcp" or "http"
    announce_offset = 0                         # from the master's port to that for announcements
    dialects: Tuple[str, ...] = ()              # of announce() and fetch(), the one to query last
    dialect = ""                                # what they speak; the caller sets it
    epoch = 0.0                                 # wall clock minus monotonic clock; the program sets
    answer: Any = None      # a function of (server, data): what we tell a master's query
    offset = 0                                  # from the players' port to the one that is queried
    fetched_over = ""                           # what fetch() speaks; "": no list can be fetched
    list_options: Tuple[ListOption, ...] = ()   # what fetch() has to be told
    answers_queries = False                     # whether its servers answer question()
    exported = ""                               # the list that `export` writes

    def __init__(self, program=None):
        """lists() and read() are called here. What they need is set before that."""
        self.program = program
        self.rendered_lists = {}        # RenderedLists by name
        if program:
            self.registry = program.registry
            self.rules = program.registry.rules
            self.poller = program.poller
            game = "" if self.titles else self.game     # a family's servers are of several games
            by_http = {route.list for route in self.routes.values()}
            for name, chosen in self.lists().items():
                render = chosen.render_in_turns if name in by_http else chosen.render
                self.rendered_lists[name] = RenderedList(self.registry, game, render)
            self.read(program.settings)

    def read(self, settings):
        """Read the settings, at the start and after a reload."""

    def is_on(self, settings):
        """Do the settings switch the game on? Port 0 means any free port."""
        value = settings[self.switch or self.game + ".port"]
        return value is not None and value is not False

    def tick(self, now):
        """Do the work of each second. Return datagrams to send, with their peers."""
        return []

    def gone(self, server):
        """Forget a server of this room that has left the list within the last second."""

    def resume(self, server):
        """Go on with a server of this room that was listed before a restart."""

    # Lists

    def lists(self):
        """Return the lists of the game: ServerList objects by name."""
        return {}

    def rendered(self, name, now):
        return self.rendered_lists[name].get(now)

    # Pages

    play_link = ""                              # a %-template with the address and port
    # How else players join a server, and what they enter for that: a %-template with the values
    # address, port and endpoint
    join_words = "In the game, enter the address"
    join_line = "%(endpoint)s"

    def mode_text(self, server):
        """Return the name that players use for a server's mode, such as "tournament"."""
        return server.mode

    def facts(self, server):
        """Return further lines of the server's page: pairs of a heading and a text."""
        return []

    def is_at(self, server, address):
        """Do players find a listed server at this address, or do its packets come from there?"""
        return address in (server.address, server.source)

    def looked_at(self, server, now):
        """Note that somebody looks at the page of a listed server."""

    def players(self, server):
        """Return who is on a server, as Player objects, if its game tells it."""
        return []

    @classmethod
    def knows_players(cls, server):
        """Is the number of players on a listed server known already?"""
        return True

    # Announcements

    def announced(self, source, port, fields, now):
        """Take a POST /announce for the server at `source` and `port`. Raise Refused.

        `fields` has the attributes of Server that it announces or, if there is a `json_field`, the
        values of the JSON in it. In this case the result is an HttpAnswer, whose text the game
        server logs."""
        raise NotImplementedError

    def stopped(self, source, port, now):
        """Remove the server at `source` and `port`, which signs off by HTTP.

        Return whether this source has announced such a server."""
        address = self.rules.listed_address(source)
        server = self.registry.get(self.game, address, port)
        if server is None or server.master or server.source != source:
            return False
        self.registry.remove_own(server)
        self.registry.record_outcome(source, self.game, port, "stopped", now)
        return True

    def list_own(self, source, port, fields, now, lifetime, address=""):
        """List or refresh a server that has proven its address, and record that for /check.

        `fields` holds attributes of Server, `address` the address that it claims, or "". Return the
        Server. Raise Refused if the rules or a limit forbid it."""
        listed_address = self.rules.listed_address(source, address)
        key = self.game, listed_address, port
        fields["room"] = self.game
        server = self.registry.list_or_refresh(key, source, now, lifetime, fields)
        self.registry.record_outcome(source, self.game, port, "listed", now)
        return server

    def http_error(self, request, status, hint):
        """Return the JSON of an error in answer to a request for a route of the room.

        Return None if its clients read the same as all others."""

    # What is stored

    @classmethod
    def owns(cls, game, details):
        """Is a server of this room that was stored under this game id, with these details?"""
        return game == cls.game

    @classmethod
    def stored(cls, server):
        """Return the stored form of a server's private attributes, a dict."""
        return {name: server.private.get(name, attribute.default)
                for name, attribute in cls.private.items() if attribute.read}

    @classmethod
    def taken_over(cls, server, remote):
        """Return the private attributes of a server that `remote`, the entry of another master that
        has heard it later, replaces."""
        private = dict(server.private)
        for name, attribute in cls.private.items():
            if attribute.read and not attribute.is_own:
                private[name] = remote.private.get(name, attribute.default)
        return private

    @classmethod
    def restored(cls, stored):
        """Return a server's private attributes, from their stored form, a dict. Raise Malformed."""
        private = {}
        for name, attribute in cls.private.items():
            private[name] = attribute.default
            if attribute.read and stored.get(name):
                try:
                    private[name] = attribute.read(stored[name])
                except (AttributeError, LookupError, TypeError, ValueError, Refused) as error:
                    raise Malformed("%s: %s" % (name, error)) from None
        return private

    # What our own `announce` and `list` speak. This is POST /announce, the way of every game
    # without an announcement of its own

    def announce(self, server):
        """Keep a server announced, in a conversation with a master. Raise MasterRefused."""
        while True:
            answer = yield Send(self.announcement(server), RESPONSE_S, "/announce")
            lifetime_s = announced_lifetime(answer)
            yield Send(wait_s=lifetime_s / 2, state="listed", accepted=True)

    def announcement(self, server, **further):
        fields = {"game": server.game, "port": server.port, **further}
        for name in ANNOUNCED_ATTRIBUTES:
            fields[name] = getattr(server, name)
        return json.dumps(fields).encode()

    def farewell(self, server):
        """Return what a master is sent last, or b""."""
        if self.announced_over != "http":
            return b""
        return self.announcement(server, action="stop")

    def default_dialect(self, fields):
        """Return the dialect in which a server with these attributes is announced."""
        return ""

    def check_announced(self, name, value):
        """Raise ValueError if this value of an attribute cannot be announced."""

    def fetch(self):
        """Fetch the list of another master, in a conversation. Return its servers as dicts.

        Each has at least address and port; the other members are for `list` to show. found() picks
        what is listed here."""
        raise NotImplementedError

    def found(self, entry):
        """Return the attributes of Server that an entry of fetch() gives and that the game server's
        answers lack. Raise Refused if no server could have announced it."""
        return NO_DETAILS


def announced_lifetime(answer):
    """Return the lifetime in seconds that a master grants in its HttpAnswer to POST /announce.

    Raise MasterRefused if the master refuses the server, and OSError if the announcement failed for
    a reason that may end soon."""
    response, lifetime_s = {}, 0.0
    with contextlib.suppress(ValueError, TypeError, OverflowError, RecursionError):
        response = dict(json.loads(answer.body))
        lifetime_s = float(response.get("ttl", 0))
    if response.get("listed") is True:
        # max() is called first because it turns a lifetime of NaN into TTL_MIN_S
        lifetime_s = max(TTL_MIN_S, lifetime_s)
        return min(lifetime_s, TTL_MAX_S)
    status = answer.status
    reason = str(response.get("reason", "HTTP status %d" % status))
    # 408 and 429 mean that the request came too slowly, or too soon after others
    is_temporary = status in (408, 429)
    if 400 <= status < 500 and not is_temporary:
        # The master's operator may lift the refusal at any time
        raise MasterRefused(reason, again_after_s=RETRY_MAX_S)
    raise OSError("not listed yet: " + reason)


def json_number(low, high):
    """Return a reader of a stored whole number, for Private."""
    def read(value):
        if type(value) is not int or not low <= value <= high:
            raise Malformed("expected a number from %d to %d" % (low, high))
        return value
    return read


class MessageSession(Session):
    """A TCP connection with messages.

    A room's session overrides message(), which answers the first message in the buffer, and size(),
    which says how long it is, unless each message ends with `message_end`. `idle_s` is how long the
    peer may be silent."""

    message_end = b""
    message_bytes = 8192                # a longer message is malformed
    messages_a_minute = math.inf        # more of them are malformed, too
    idle_s = 0.0
    # Since the end of the last minute of this connection
    minute_ends, messages = -math.inf, 0

    def __init__(self, room, address, now):
        self.room = room
        self.game = room.game
        self.registry = room.registry
        self.rules = room.rules
        self.address = address
        # When the message in the buffer began to come or, if the buffer is empty, the last one came
        self.message_began = now

    def size(self, now):
        """Return the bytes of the first message in the buffer, or None if that is not known yet.

        Raise Malformed if there is no such message."""
        message, end, _ = self.buffer.partition(self.message_end)
        if not end:
            return None
        return len(message) + len(end)

    def message(self, message, now):
        raise NotImplementedError

    def receive(self, data, now):
        if data and not self.buffer:
            self.message_began = now
        self.buffer += data
        while self.buffer and not self.done:
            size = self.size(now)
            known_size = len(self.buffer) if size is None else size
            if known_size > self.message_bytes:
                raise Malformed("a message of more than %d bytes" % self.message_bytes)
            if size is None or size > len(self.buffer):
                break
            message, self.buffer = self.buffer[:size], self.buffer[size:]
            if not self.rules.message_limiter.allow(self.address, now):
                raise Malformed("too many messages from one address")
            if now >= self.minute_ends:
                self.minute_ends, self.messages = now + MINUTE, 0
            self.messages += 1
            if self.messages > self.messages_a_minute:
                raise Malformed("more than %d messages in a minute" % self.messages_a_minute)
            answer = self.message(message, now)
            self.message_began = now
            if answer:
                return answer
        return b""

    def tick(self, now):
        self.done = now >= self.message_began + self.idle_s
        return b""

    def rendered(self, name, now):
        """Return a list of the room. Raise Malformed if this address asks too often."""
        if not self.rules.request_limiter.allow(self.address, now):
            raise Malformed("too many requests from one address")
        return self.room.rendered(name, now)


# --- Poller --------------------------------------------------------------------------------------
#
# A query is one datagram to a game server. A poll is all the queries that it takes to learn the
# state of the server: usually one, and more if the game needs several or if a datagram is lost.

# A server is gone after this many missed polls in a row
MISSED_POLLS_LIMIT = 3
# Announcements may restart this many polls in a row, because a server that has just started may
# announce itself several times
RESTARTED_POLLS_LIMIT = 5
# At the default rate, this many newcomers are all queried within 4 s, or within 40 s if listed
# servers take nine tenths of the rate. With the longest announcement of any game, they take 160 MB
MAX_NEWCOMERS = 2000
# Listed servers leave one query in ten to newcomers
NEWCOMER_SHARE = 10
# A server that was found in another list stays listed for so many intervals of polls without an
# answer. Three missed polls remove it sooner, unless own servers use the whole rate
FOUND_INTERVALS = 30
# Host names in the ini are looked up again after this long, because home addresses change
RESOLVE_S = 600.0
# A host name without an address is looked up sooner, because our network may just have come up
RESOLVE_RETRY_S = 60.0


class WrongAnswer(Malformed):
    """Raised for a wrong answer that repeats the number of the open query, and closes it. Any other
    may be forged."""


class AnswerGoesOn(Exception):
    """Raised for a datagram of an answer that has more of them. The query stays open for these."""


class FoundServer(NamedTuple):
    """A game server that another master's list names, and that did not announce itself here."""

    address: str
    port: int
    found_at: str                       # see Server.found_at
    # Attributes of Server by name that the list gives, and that the game server's answer lacks
    fields: Mapping[str, Any] = NO_DETAILS


# Why a game server is queried: it has announced itself, the ini names it, or another list does
ANNOUNCED, NAMED, FOUND = "announced", "named", "found"


class Target:
    """One game server that the poller queries, and why.

    room, address, port     the port is the one that players use; queries may go to another one
    why           ANNOUNCED, NAMED (it is queried even if it never answers) or FOUND
    announcement  attributes of Server that it has announced, which its next answer lists; None if
                  no announcement waits for an answer
    lifetime      for how long that announcement lists it, in seconds
    found         the FoundServer, if it is FOUND
    listed_as     the game under which it is listed; a Quake III server's answer names it
    due           the time of the next query or, while a query is open, of giving it up
    asked_at      when the open query was sent; None if no query is open
    nonce         a number that the open query carries and its answer has to repeat
    unanswered    the queries in the current poll that got no answer
    missed        the polls in a row that got no answer
    restarts      the polls that announcements have restarted since the last answer
    trouble       why a datagram that came in this poll is not an answer, or ""
    ping_ms       the round trip of the last answer, in milliseconds
    step          what the room keeps during a poll with several questions
    server        the Server, if it is listed without the target's answers"""

    announcement: Optional[Mapping[str, Any]] = None
    lifetime = math.inf
    found: Optional[FoundServer] = None
    due = 0.0
    asked_at: Optional[float] = None
    nonce = unanswered = missed = restarts = ping_ms = 0
    trouble = ""
    step: Any = None
    server: Optional[Server] = None

    def __init__(self, room, address, port, why):
        self.room = room
        self.address = address
        self.port = port
        self.why = why
        self.listed_as = room.game
        # The part of each interval, from 0 to 1, after which the server is polled. It is random, so
        # that the polls of all servers are spread over the interval
        self.phase = RANDOM.random()

    @property
    def key(self):
        """The identity of the target: the room's id, address, port."""
        return self.room.game, self.address, self.port


class Poller(UdpProtocol):
    """Queries game servers for their state, from one UDP port, evenly over the interval.

    An answer counts only if it comes from the address and port that were queried, and while a
    query to them is open. The poller queries only servers that the ini names, that another master's
    list names, or from whose address a proven packet came. The rooms see to that, because only
    they add targets.

    A newcomer is a target that has announced itself and is not listed yet. Listed servers are
    queried first, and the sources of newcomers take turns, so that servers that never answer do
    not delay the others. Servers that were found in another list come last: what another master
    says must not delay a server that announces itself here."""

    ipv4_only = False

    def __init__(self, settings):
        self.rooms = []                 # those whose servers are queried
        self.targets = {}               # by the room's id, address, and the server's own port
        self.newcomers = Turns(MAX_NEWCOMERS)       # Targets by key
        self.ticked_at = 0.0
        self.read(settings)

    def read(self, settings):
        """Read the interval and the rate, and move waiting polls into the new interval."""
        self.interval = settings["poll.interval"]
        self.rate = settings["poll.rate"]
        next_tick = self.ticked_at + TICK_S
        for target in self.targets.values():
            # A query that is open or due at the next tick keeps its time: its poll has begun
            if target.asked_at is None and target.due > next_tick:
                target.due = next_slot(self.ticked_at, self.interval, target.phase)

    def find(self, room, address, port):
        return self.targets.get((room.game, address, port))

    def add(self, room, address, port, why):
        """Add and return a target, which is queried at the next tick."""
        target = Target(room, address, port, why)
        self.targets[target.key] = target
        return target

    def add_newcomer(self, room, address, port, limit):
        """Add a target that has announced itself and is not listed yet. A source may have `limit`
        of them. Return the target, and the one that had to leave for it, or None."""
        target = self.add(room, address, port, ANNOUNCED)
        pushed_out = self.newcomers.add(address, target.key, target, limit)
        if pushed_out is not None:
            del self.targets[pushed_out.key]
        return target, pushed_out

    def remove(self, target):
        """Remove a target, so that it is not queried any more, unless the ini names it."""
        if target is not None and target.why != NAMED:
            self.newcomers.pop(target.key)
            self.targets.pop(target.key, None)

    def poll_now(self, target, now):
        """Begin a new poll of a target at the next tick.

        A poll that is under way starts again, but only RESTARTED_POLLS_LIMIT times in a row.
        Otherwise a server that announces itself every few seconds, and never answers, would never
        miss a poll."""
        if target.asked_at is not None or target.unanswered:
            if target.restarts >= RESTARTED_POLLS_LIMIT:
                return
            target.restarts += 1
        self.end_poll(target)
        target.due = now

    def poll_once(self, target, now):
        """Begin a new poll of a target that may have left. If it is missed, the server leaves."""
        self.poll_now(target, now)
        target.missed = MISSED_POLLS_LIMIT - 1

    @staticmethod
    def end_poll(target):
        target.asked_at = target.step = None
        target.unanswered = 0
        target.trouble = ""

    def datagram(self, data, peer, now):
        """Pass an answer to the room that waits for it, and return the replies.

        Raise Malformed if no query to this peer is open, or if no room can read the answer."""
        source, source_port = peer[:2]
        address = canonical_address(source)
        trouble = "an answer that nobody asked for"
        # Two games may have targets at the same endpoint, so every room with an open query tries
        # to read the answer
        for room in self.rooms:
            if room.take_players((address, source_port), data):
                return []
            target = self.find(room, address, source_port - room.offset)
            if target is None or target.asked_at is None:
                continue
            try:
                room.check_length(data)
                fields = room.read_answer(target, data)
            except AnswerGoesOn:
                return []
            except (Malformed, Refused) as error:
                target.trouble = trouble = str(error)
                if isinstance(error, WrongAnswer):
                    target.asked_at = None      # the query counts as unanswered
                    target.unanswered += 1
                continue
            target.missed = target.restarts = 0
            target.ping_ms = round((now - target.asked_at) * 1000)
            if fields is None:          # another question follows
                target.asked_at = None
                target.due = now
                return []
            self.end_poll(target)
            target.due = next_slot(now, self.interval, target.phase)
            room.list_polled(target, {"ping_ms": target.ping_ms, **fields}, now)
            goodbye = room.goodbye(data)
            return [(goodbye, peer)] if goodbye else []
        raise Malformed(trouble)

    def tick(self, now):
        """Return the queries of this tick, each with the endpoint that it goes to.

        A query that got no answer in time is sent again, if its poll has attempts left."""
        self.ticked_at = now
        # To look at 10,000 targets takes a millisecond; to keep them sorted would take longer
        due = []
        for target in self.targets.values():
            if target.due <= now:
                due.append(target)
        due.sort(key=lambda target: target.due)
        ready = []
        for target in due:
            if self.is_ready(target, now):
                ready.append(target)
        chosen = self.choose_within_rate(ready)
        return [self.open_query(target, now) for target in chosen]

    def is_ready(self, target, now):
        """Can the next query be sent to a target that is due? If not, its poll was missed, or it
        has left the list."""
        if target.asked_at is not None:
            target.asked_at = None
            target.unanswered += 1
        if target.unanswered >= target.room.attempts:
            fields = target.room.answers_so_far(target)
            if fields is None:
                target.missed += 1
                target.room.poll_missed(target, now)
            else:
                target.room.list_polled(target, {"ping_ms": target.ping_ms or None, **fields}, now)
            self.end_poll(target)
            target.due = next_slot(now, self.interval, target.phase)
            return False
        has_left = target.announcement is None and not target.room.has_listed(target)
        if target.why == ANNOUNCED and has_left:
            self.remove(target)
            return False
        return True

    def choose_within_rate(self, targets):
        """Return those of the targets that the rate allows to query in this tick.

        Listed servers come first, but they leave a share of the rate to newcomers. The sources
        of the newcomers that are chosen go to the end of the queue of sources. Servers that were
        found in other lists get what is left of the rate."""
        ready = {target.key for target in targets}
        newcomers = []
        for target in self.newcomers.in_turns():
            if target.key in ready:
                newcomers.append(target)
        listed = []
        found = []
        for target in targets:
            if target.why == FOUND:
                found.append(target)
            elif self.newcomers.get(target.key) is None:
                listed.append(target)
        # The share is at most half, because a rate of 1 would leave nothing to listed servers
        rate = self.rate
        share = max(1, rate // NEWCOMER_SHARE)
        share = min(share, rate // 2, len(newcomers))
        chosen = listed[:rate - share]
        remaining = rate - len(chosen)
        for target in newcomers[:remaining]:
            self.newcomers.served(target.key)
            chosen.append(target)
        remaining = rate - len(chosen)
        return chosen + found[:remaining]

    def open_query(self, target, now):
        """Open a query to this target. Return its bytes and the endpoint that they go to."""
        room = target.room
        target.nonce = room.nonce()
        target.asked_at = now
        target.due = now + room.timeout_s
        endpoint = target.address, target.port + room.offset
        return room.question(target), endpoint


def next_slot(now, interval, phase):
    """Return the first time after `now` that lies at `phase` within an interval.

    Intervals follow each other from time 0 on. Times are in seconds; `phase` is the part of the
    interval that has passed at the slot, from 0 to 1. Example: with an interval of 30 s and a
    phase of 0.5 the slots are at 15, 45, 75 and 105 s, so next_slot(100.0, 30.0, 0.5) is 105.0."""
    since_last_slot = (now - phase * interval) % interval
    return now + interval - since_last_slot


class PolledGame(Game):
    """A game whose servers are listed for as long as they answer the poller.

    A subclass writes question() and read_answer(). A server becomes a target if it announces itself
    (announced), if the ini names it by address or host name (named_servers), if another master's
    list names it (query_found), or if it was listed before a restart (resume). list_polled() lists
    the servers that answer. poll_missed() removes the servers that do not; a server that the ini
    names is shown as not responding instead."""

    answers_queries = True
    # How long a query waits for its answer, as the script in the Hyperbol document does
    timeout_s = 3.0
    # A poll is missed after so many queries without an answer. A single datagram may get lost
    attempts = 2
    # The longest answer that is read. This is the limit of dpmaster; the infoResponses of Quake III
    # and its kin have at most 1 kB. A datagram of MAX_DATAGRAM_BYTES may have been cut off
    answer_bytes = MAX_DATAGRAM_BYTES - 1
    # For how long an answer lists a server. None: as long as its last announcement says
    answer_lifetime_s: Optional[float] = math.inf
    # Whether its servers stay listed while their connections last (ServerSession), and are polled
    # at the end of these
    is_kept_by_connection = False

    def __init__(self, program=None):
        # The address of each host that the ini names, "" if the host has none
        self.addresses = {}
        self.hosts_being_resolved = set()
        self.resolve_at = -math.inf     # when all hosts are looked up again
        super().__init__(program)
        if program:
            self.poller.rooms.append(self)

    def read(self, settings):
        self.resolve_at = -math.inf

    def tick(self, now):
        self.query_named(now)
        return []

    # What a game server is asked, and what its answer says

    def nonce(self) -> int:
        """Return an unsigned 32-bit number for one query, which its answer has to repeat."""
        return RANDOM.getrandbits(32)

    def question(self, target: Target) -> bytes:
        """Return the bytes of the next query to this target, with `target.nonce` in them."""
        raise NotImplementedError

    def check_length(self, data):
        """Raise Malformed if the data are too long for an answer. Nothing is read of such data."""
        if len(data) > self.answer_bytes:
            raise Malformed("length: more than %d bytes" % self.answer_bytes)

    def read_answer(self, target: Target, data: bytes) -> Optional[Dict[str, Any]]:
        """Return the attributes of Server in an answer to the target's open query.

        Return None if another question follows. Raise AnswerGoesOn if further datagrams of the
        answer do. Raise Malformed if the data are not an answer to this query, and Refused if the
        server may not be listed; the query then stays open. A WrongAnswer closes it."""
        raise NotImplementedError

    def answers_so_far(self, target: Target) -> Optional[Dict[str, Any]]:
        """Return what the target has said, if it may leave the question that it was asked last
        unanswered, or its answer incomplete, and None otherwise."""
        return None

    def take_players(self, endpoint: Tuple[str, int], data: bytes) -> bool:
        """Take the answer to a question of looked_at(). Return whether the data are one."""
        return False

    def goodbye(self, data: bytes) -> bytes:
        """Return what the game server is sent after its last answer, or b""."""
        return b""

    # How a server becomes a target

    def announced(self, source, port, fields, now):
        self.query_announced(source, port, fields, now)

    def query_announced(self, source, port, fields, now, lifetime=math.inf):
        """Query a server that has announced itself. Its answer lists it for `lifetime` seconds.

        `fields` are attributes of Server that its answer lacks. Raise Refused if the server may not
        be queried. Return the target."""
        if self.ipv4_list and ":" in source:
            raise Refused("bad packet", "%s's list has room for IPv4 addresses only; "
                                        "this came from %s" % (self.title, source))
        highest_port = MAX_PORT - self.offset
        if port > highest_port:
            raise Refused("bad packet", "%s lists ports up to %d only" % (self.title, highest_port))
        target = self.poller.find(self, source, port)
        self.check_newcomer(source, port, fields.get("name"), target)
        server = target and self.listed_server(target)
        is_new = target is None or (target.why == FOUND and server is None)
        if is_new:
            self.poller.remove(target)
            target = self.add_newcomer(source, port, now)
        elif target.why == FOUND:
            target.why = ANNOUNCED
        target.announcement = fields
        target.lifetime = lifetime
        self.poller.poll_now(target, now)
        outcome = "announced"
        server = self.listed_server(target)
        if self.has_listed(target) and server.responding:
            outcome = "listed"
        self.report(target, outcome, now)
        return target

    def add_newcomer(self, source, port, now):
        """Add and return the target of a server that has announced itself.

        If that makes too many, one of them leaves, and /check tells it why."""
        limit = self.rules.max_servers_per_source
        if self.rules.exempts(source):
            limit = MAX_NEWCOMERS
        target, pushed_out = self.poller.add_newcomer(self, source, port, limit)
        if pushed_out is not None:
            reason = "too many game servers wait for their first query; try again in a minute"
            pushed_out.room.report(pushed_out, "busy", now, reason)
        return target

    def stopped(self, source, port, now):
        target = self.poller.find(self, source, port)
        if target is not None and target.why != NAMED:
            self.poller.remove(target)
        was_listed = super().stopped(source, port, now)
        if target is not None and not was_listed:
            self.registry.record_outcome(source, self.game, port, "stopped", now)
        return was_listed or target is not None

    def check_newcomer(self, source, port, name, target):
        """Raise Refused if a game server that has announced itself may not be queried.

        `name` is None if it has not announced one; `target` is None if it is no target yet."""
        address = self.rules.listed_address(source)
        server = target and self.listed_server(target)
        is_own = server is not None and not server.master and not server.found_at
        if is_own:
            self.registry.check_rules(source, address, port, name)
        else:
            key = self.game, address, port
            is_named = target is not None and target.why == NAMED
            self.registry.check_admission(key, source, name, is_named)

    def query_found(self, found):
        """Begin to poll a FoundServer. If it answers, it is listed.

        Return the new target, or None if the server is listed or a target already. The target of a
        server that was found at the same master before gets the present texts. Raise Refused if the
        server may not be listed."""
        target = self.poller.find(self, found.address, found.port)
        if target is not None:
            # If two lists name the server, the texts do not change between them at every fetch
            if target.why == FOUND and target.found.found_at == found.found_at:
                target.found = found
            return None
        key = self.game, self.rules.listed_address(found.address), found.port
        if self.registry.get(*key) is not None:
            return None
        name = found.fields.get("name")
        self.registry.check_admission(key, found.address, name, found_at=found.found_at)
        target = self.poller.add(self, found.address, found.port, FOUND)
        target.found = found
        return target

    def resume(self, server):
        target = self.poller.add(self, server.source, server.port, ANNOUNCED)
        target.listed_as = server.game
        if server.pinned:
            target.why = NAMED
        elif server.found_at:
            target.why = FOUND
            target.found = FoundServer(server.source, server.port, server.found_at)

    # Servers that the ini names

    def named_servers(self) -> Mapping[Tuple[str, int], Any]:
        """Return what the ini says of servers, by (host, port)."""
        return {}

    def named_endpoints(self):
        """Return what the ini says of servers, by their present address and port."""
        named = {}
        for (host, port), value in self.named_servers().items():
            if self.addresses.get(host):
                named[self.addresses[host], port] = value
        return named

    def query_named(self, now):
        """Poll the servers that the ini names, at the present addresses of their hosts.

        Servers that the ini named before a reload and does not name now are removed; they may
        announce themselves again."""
        hosts = {host for host, _ in self.named_servers()}
        if now >= self.resolve_at:
            self.resolve_at = now + RESOLVE_S
            for host in hosts - self.hosts_being_resolved:
                if is_unicast(host):
                    self.addresses[host] = canonical_address(host)
                else:
                    self.hosts_being_resolved.add(host)
                    done = functools.partial(self.on_host_resolved, host)
                    self.program.resolve(host, done, source="")
        named = self.named_endpoints()
        for address, port in named:
            target = self.poller.find(self, address, port)
            if target is None:
                self.poller.add(self, address, port, NAMED)
            else:
                self.poller.newcomers.pop(target.key)
                target.why = NAMED
        if hosts <= self.addresses.keys():
            for target in list(self.poller.targets.values()):
                is_ours = target.room is self and target.why == NAMED
                if is_ours and (target.address, target.port) not in named:
                    target.why = ANNOUNCED
                    self.poller.remove(target)
                    self.registry.remove_own(self.listed_server(target))

    def on_host_resolved(self, host, address, now):
        """Remember the address of a host that the ini names.

        `address` is "" if the look-up found none. The last known address then stays in use, and the
        host is looked up again soon."""
        self.hosts_being_resolved.discard(host)
        if is_unicast(address):
            self.addresses[host] = address
            return
        self.resolve_at = min(self.resolve_at, now + RESOLVE_RETRY_S)
        if host not in self.addresses:
            self.addresses[host] = ""
            log.warning("%s: the host name %s in the ini has no address; "
                        "it will be looked up again", self.game, ascii(host))

    # Results of polls

    def listed_server(self, target):
        """Return the listed Server that the target's answers are about, or None. If another list
        has named the target, they are not about one that has announced itself."""
        address = self.rules.listed_address(target.address)
        server = self.registry.get(target.listed_as, address, target.port)
        has_announced_itself = server is not None and not server.found_at
        return None if target.why == FOUND and has_announced_itself else server

    def has_listed(self, target):
        """Is the target's server in the list because this master has heard it?"""
        server = self.listed_server(target)
        return server is not None and not server.master

    def admitted_game(self, source, fields):
        """Return the id of the game under which a server with this answer is listed.

        `source` is the server's address, `fields` holds attributes of Server. Raise Refused if the
        game is not listed here."""
        return self.game

    def list_polled(self, target, fields, now):
        """List the target's server with an answer, or refresh it. Return the Server.

        `fields` holds the attributes of Server in the answer. The announcement that waits for it,
        or the other master's list, says the others. If the rules or a limit refuse the server, it
        leaves the list, and the result is None."""
        server = self.listed_server(target)
        was_responding = server is not None and server.responding
        announced = NO_DETAILS
        lifetime = self.answer_lifetime_s
        if target.announcement is not None:
            announced, lifetime = target.announcement, target.lifetime
            target.announcement = None
        elif target.why == FOUND:
            announced = {**target.found.fields, "found_at": target.found.found_at}
            lifetime = FOUND_INTERVALS * self.poller.interval
        elif target.why == NAMED:
            lifetime = math.inf
        fields = {
            "responding": True, "verified": "query", "room": self.game, **announced, **fields}
        if not fields.get("name") and (server is None or "name" in fields):
            fields["name"] = endpoint_text(self.rules.listed_address(target.address), target.port)
        try:
            if lifetime is None:
                self.confirm_polled(target, server, fields, now)
            else:
                server = self.list_under_named_game(target, server, fields, now, lifetime)
        except Refused as refused:
            self.report(target, refused.outcome, now, str(refused))
            self.registry.remove_own(server)
            self.poller.remove(target)
            return None
        self.poller.newcomers.pop(target.key)
        if server.responding and not was_responding:
            self.report(target, "listed", now)
        return server

    def confirm_polled(self, target, server, fields, now):
        """Update a server that answers, and that stays listed as its last announcement says."""
        if server is None or server.master:
            raise Refused("silent", "it has left, and has not announced itself again")
        self.registry.check_rules(
            server.source, server.address, server.port, fields.get("name"))
        self.registry.update(server, {**fields, "confirmed": True})
        server.answered_at = now
        if server.lifetime == math.inf:     # its announcement lists it as long as it answers
            server.last_seen = now

    def list_under_named_game(self, target, server, fields, now, lifetime):
        """List the target's server, or refresh it, under the game that its answer names.

        `server` is the one that is listed now, or None; it leaves if it is under another game.
        Return the Server. Raise Refused if it may not be listed."""
        source = target.address
        game = self.admitted_game(source, fields)
        if server is not None and server.game != game:
            self.registry.remove_own(server)
        target.listed_as = game
        address = self.rules.listed_address(source)
        key = game, address, target.port
        if target.why == FOUND:
            announced = self.registry.get(*key)
            if announced is not None and not announced.found_at:
                # That entry says more
                raise Refused("busy", "it has announced itself, here or to a master of our group")
        is_pinned = target.why == NAMED
        return self.registry.list_or_refresh(key, source, now, lifetime, fields, is_pinned)

    def poll_missed(self, target, now):
        server = self.listed_server(target)
        is_unlisted = server is None and target.why != NAMED
        is_gone = target.missed >= MISSED_POLLS_LIMIT or is_unlisted
        if server is not None and (server.master or server.source != target.address):
            # It is listed without the target's answers: another master has heard it, or it is
            # behind a router and has announced itself from another address
            if is_gone:
                self.poller.remove(target)
            return
        if is_gone or server is None:
            self.report_silence(target, now)
        if target.why != NAMED:
            if is_gone:
                self.registry.remove_own(server)
                self.poller.remove(target)
        elif server is None:
            self.list_polled(target, {"responding": False}, now)
        elif is_gone:
            # Its next answer brings these values again
            self.registry.update(server, {"responding": False, "players": 0, "ping_ms": None,
                                          "confirmed": True, "details": NO_DETAILS})

    def report_silence(self, target, now):
        """Report why a poll has failed: no datagram came at all, or none that was an answer."""
        port = target.port + self.offset
        if target.trouble:
            reason = "its answer from UDP port %d: %s" % (port, target.trouble)
            self.report(target, "bad packet", now, reason)
        else:
            self.report(target, "silent", now, "no answer from UDP port %d" % port)

    def report(self, target, outcome, now, detail=""):
        """Record for /check what became of a target.

        Nothing is recorded for a server that was found in another list. Its operator has not asked
        for anything, and there may be thousands."""
        if target.why != FOUND:
            self.registry.record_outcome(
                target.address, self.game, target.port, outcome, now, detail)


class ServerSession(MessageSession):
    """A connection of a client, or of a game server that announces itself and is then polled.

    A game server is told once whether it is listed. Its connection may stay open for as long as it
    is. A subclass calls announced(), and writes told()."""

    lifetime_s = 0.0                    # for how long an announcement lists a server
    port = 0                            # the one that has been announced; 0 if it is wrong
    is_waiting = False                  # it has not been told yet

    def told(self, outcome, reason):
        """Return what a game server is told. `outcome` is a key of OUTCOMES (section 9)."""
        raise NotImplementedError

    def announced(self, port, now):
        self.port = port
        self.is_waiting = True
        try:
            self.room.query_announced(self.address, port, NO_DETAILS, now, self.lifetime_s)
        except Refused as refused:
            self.registry.record_outcome(
                self.address, self.game, port, refused.outcome, now, str(refused))

    def target(self):
        room = self.room
        return room.poller.find(room, self.address, self.port)

    def tick(self, now):
        last = self.registry.outcome(self.address, self.game, self.port)
        is_known = last is not None and last.outcome != "announced"
        if self.is_waiting and is_known:
            self.is_waiting = False
            return self.told(last.outcome, last.detail)
        target = self.target()
        if target is None or not self.room.has_listed(target):
            return super().tick(now)
        if self.room.is_kept_by_connection:
            server = self.room.listed_server(target)
            self.registry.confirm(server, now)
        return b""

    def closed(self, now):
        target = self.target()
        if target is not None and self.room.is_kept_by_connection:
            self.room.poller.poll_once(target, now)


# --- Iceball -------------------------------------------------------------------------------------

ICEBALL_HBVERSION = 2
ICEBALL_VERSION = "0.2.1-37"        # of the program from which the captures come; see [iceball]
# The first 4 bytes of a datagram tell its kind
ICEBALL_ANNOUNCE = b"1CEB"
ICEBALL_COOKIE = b"MSOK"
ICEBALL_HANDSHAKE = b"HSHK"
ICEBALL_BAD_VERSION = b"BADV"
ICEBALL_BAD_FORMAT = b"BADF"
# An announcement begins with these three. A BADV has nothing else
ICEBALL_VERSIONS = Form("<4s H I", "kind hbversion version")
ICEBALL_ANNOUNCEMENT = Form("<4s H I H H H 30s 10s 30s",
                            "kind hbversion version port players max_players name mode map")
# Every announcement that can be listed begins with these 6 bytes. The other 80, without the zeros
# at their end, are the "trimmed" announcement, which a cookie carries
ICEBALL_HEAD = ICEBALL_ANNOUNCE + struct.pack("<H", ICEBALL_HBVERSION)
# An MSOK and an HSHK consist of the kind, a MAC and the trimmed announcement. With a trimmed
# announcement of this length, an MSOK is as long as the announcement itself
ICEBALL_TRIMMED_BYTES = ICEBALL_ANNOUNCEMENT.size - len(ICEBALL_COOKIE) - COOKIE_MAC_BYTES
# A listed server that repeats its announcement has nothing to prove, so its MSOK has "same" in
# place of a cookie. The server echoes it like any cookie, and the master ignores the echo
ICEBALL_SAME = ICEBALL_COOKIE + b"same"
ICEBALL_SAME_RETURNED = ICEBALL_HANDSHAKE + b"same"
# Every server has to prove its address again after this many times the setting iceball.timeout
ICEBALL_PROOF_LIFETIMES = 2
# The low bits of a version number are the build. If they are all 0 in a version that the settings
# accept, every build of that version is accepted
ICEBALL_BUILD_BITS = 1023
# The limit of BADV and BADF replies to one source: (a second, in one burst). A server sends a burst
# of five announcements every 40 s, so each of them can be answered
ICEBALL_REJECTIONS = 1 / 8, 5
# So many senders that are none any more are kept, before the table is made anew
ICEBALL_SENDERS_LEFT = 1000
# The pause after each announcement of a burst. In the document a burst has five announcements, 1 s
# apart, and a burst begins every 40 s
ICEBALL_GAPS_S = 1.0, 1.0, 1.0, 1.0, 36.0
# The keys of an entry in /master.json, as in both documents, with the attributes of Server that are
# their values. Each value is text or a number
ICEBALL_FIELDS = {
    "name": "name",
    "address": "address",
    "port": "port",
    "players_current": "players",
    "players_max": "max_players",
    "mode": "mode",
    "map": "map",
    "version": "version",
    "basedir": "mode",
}


# w.x[.y][letter][-z]. The characters { to ~, which follow "z" in ASCII, count as letters too
ICEBALL_VERSION_TEXT = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?([a-~])?(?:-(\d+))?")


def read_iceball_version(text):
    """Return the number that Iceball sends for a version, such as 8421413 for "0.2.1-37".

    A version is written w.x[.y][letter][-z]. From high to low, the number has 5 bits of w, 5 of x,
    7 of y, 5 of the letter (1 for "a", 0 for none) and 10 of z."""
    match = ICEBALL_VERSION_TEXT.fullmatch(text)
    if not match:
        raise ValueError("expected a version such as 0.2.1-37")
    w_text, x_text, y_text, letter, z_text = match.groups("0")
    w = int(w_text)
    x = int(x_text)
    y = int(y_text)
    z = int(z_text)
    letter_number = 0 if letter == "0" else ord(letter) - ord("a") + 1
    if max(w, x) >= 1 << 5 or y >= 1 << 7 or z >= 1 << 10:
        raise ValueError("a part of the version is too large")
    return w << 27 | x << 22 | y << 15 | letter_number << 10 | z


@functools.lru_cache(maxsize=256)
def iceball_version_text(number):
    """Return a version number as text: 8421413 is "0.2.1-37".

    This is the reverse of read_iceball_version(). The cache makes all servers of a version share
    one string."""
    major = number >> 27
    minor = number >> 22 & 31
    patch = number >> 15 & 127
    letter = number >> 10 & 31
    build = number & ICEBALL_BUILD_BITS
    text = "%d.%d" % (major, minor)
    if patch:
        text += ".%d" % patch
    # 1 to 26 stand for "a" to "z". 31 is left out, because it would give a control character
    if 0 < letter < 31:
        text += chr(ord("a") + letter - 1)
    if build:
        text += "-%d" % build
    return text


def iceball_text(field):
    """Return the text in a field of an announcement, cleaned. `field` is the whole field, in bytes.

    The text is in UTF-8. Many game servers encode it twice, because they take the UTF-8 of their
    configuration for Latin-1; such a text is decoded twice. A character that the end of the field
    cuts off is dropped."""
    raw = c_string(field)
    if raw.isascii():
        return clean(raw.decode())
    # Unlike bytes.decode(), codecs.utf_8_decode() drops an incomplete character at the end
    decoded, _ = codecs.utf_8_decode(raw, "replace")
    try:
        decoded_twice, _ = codecs.utf_8_decode(decoded.encode("latin-1"))
    except UnicodeError:
        return clean(decoded)       # the server has encoded it only once
    # A text that was encoded once may end in a letter such as "Ã". The second decoding drops this
    # letter as an incomplete character. If nothing but ASCII is left, although the field had room
    # for a complete character, that has happened here
    is_field_full = len(raw) == len(field)
    if decoded_twice.isascii() and not is_field_full:
        return clean(decoded)
    return clean(decoded_twice)


# A cache for modes and maps, because all servers together have only a few of them
cached_iceball_text = functools.lru_cache(maxsize=4096)(iceball_text)


class Iceball(Game, UdpProtocol):
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

    The server's address is the source of the datagram; its port is in the announcement. The
    same UDP port serves the first draft of the protocol: its packets begin with a byte from 1 to 7,
    which no packet above has.
    """

    game = "iceball"
    title = "Iceball"
    settings = (
        Setting("iceball.port", "27790", read_port, "UDP port for announcements.", live=False),
        Setting("iceball.version", ICEBALL_VERSION, read_iceball_version,
                "The game's current version; players with an older one are told of the update."),
        Setting("iceball.accept_versions", "", list_reader(read_iceball_version),
                "Versions to list, such as 0.2.1 (every build of it) or 0.2.1-37; empty: all."),
        Setting("iceball.timeout", "120", number_reader(1, 86400, float),
                "Seconds of silence after which a server is removed (Iceball itself says 120).",
                live=False),
    )
    ports = (Port("udp"),)
    contacts = (Contact(
        "In svsave/pub/server.json, in place of the same settings",
        '"heartbeat_send": true,\n"heartbeat": [["%(host)s", %(port)d]]',
        "UDP 20737"),)
    routes = {"/master.json": Route("master.json", JSON_TYPE)}
    play_link = "iceball://%s"
    join_words = join_line = ""
    announced_over = "udp"
    fetched_over = "http"
    # A game server that is started again sends the same from another port
    repeated_from = "address"

    def __init__(self, program=None):
        super().__init__(program)
        self.cookie = Cookie(os.urandom(16))
        self.rejection_limiter = Limiter(ICEBALL_REJECTIONS)
        # The servers by the address and UDP port that they sent from; see is_sender()
        self.senders = {}
        self.prove_at = -math.inf       # when all servers have to prove their addresses again
        self.draft = IceballDraft(self)
        if program:
            self.timeout = program.settings["iceball.timeout"]

    def read(self, settings):
        self.version = settings["iceball.version"]
        self.accepted_versions = set(settings["iceball.accept_versions"])

    def tick(self, now):
        """Make every server prove its address again, once in ICEBALL_PROOF_LIFETIMES lifetimes.

        Without this, somebody who repeats a server's announcement with a forged source could keep
        it listed after it has left."""
        if now >= self.prove_at:
            self.prove_at = now + ICEBALL_PROOF_LIFETIMES * self.timeout
            limiter = self.rules.datagram_limiter
            for server in self.registry.games[self.game].values():
                # While a flood uses its address, a server could not prove that, and would leave
                if not limiter.has_refused(server.source, now - self.timeout):
                    # Its next announcement is answered with a cookie
                    self.registry.forget_fingerprint(server)
        listed = len(self.registry.games[self.game])
        if len(self.senders) > 2 * listed + ICEBALL_SENDERS_LEFT:
            self.senders = {sender: server for sender, server in self.senders.items()
                            if self.is_sender(sender, server)}
        self.draft.tick(now)
        return []

    # Datagrams

    def datagram(self, data, peer, now):
        kind = data[:len(ICEBALL_ANNOUNCE)]
        if kind == ICEBALL_ANNOUNCE:
            answer = self.answer_announcement(data, peer, now)
        elif kind == ICEBALL_HANDSHAKE:
            answer = self.accept_handshake(data, peer, now)
        elif kind[:1] in DRAFT_KINDS:
            answer = self.draft.answer(data, peer, now)
        else:
            raise Malformed("neither 1CEB nor HSHK nor a packet of the first draft")
        return [(answer, peer)] if answer else []

    def answer_announcement(self, data, peer, now):
        """Return an MSOK whose cookie carries this announcement, or a rejection.

        The cookie is a MAC over the source and the trimmed announcement, followed by the trimmed
        announcement itself. A rejection is a BADV or a BADF, or b"" if nothing is to be sent."""
        source, _ = peer
        size = len(data)
        form = ICEBALL_VERSIONS
        if size == ICEBALL_ANNOUNCEMENT.size:
            form = ICEBALL_ANNOUNCEMENT
        announced = form.read(data)
        if announced.hbversion != ICEBALL_HBVERSION or self.accepted_versions:
            version_error = self.version_error(announced)
            if version_error:
                return self.reject(source, now, "version", version_error)
        # The length is checked after the version, because it may differ in other versions
        if form is ICEBALL_VERSIONS:
            reason = "length: %d bytes instead of %d" % (size, ICEBALL_ANNOUNCEMENT.size)
            return self.reject(source, now, "bad packet", reason)
        self.registry.record_unproven(source, self.game, announced.port, "announced", now)
        trimmed = data[len(ICEBALL_HEAD):].rstrip(b"\0")
        surplus_bytes = len(trimmed) - ICEBALL_TRIMMED_BYTES
        if surplus_bytes > 0:
            rules = self.rules
            if not rules.allow_surplus("cookie", source, surplus_bytes, now):
                # This cuts off the end of the map's name, the last field. The server sends its
                # announcement again a second later, which may bring the whole name
                trimmed = trimmed[:ICEBALL_TRIMMED_BYTES]
        # The "=" ends the address. Without it, the cookie of an announcement that begins with a
        # digit would also be valid for a longer address that ends in this digit
        message = source.encode() + b"=" + trimmed
        mac = self.cookie.make(message, now)
        return ICEBALL_COOKIE + mac + trimmed

    def version_error(self, versions):
        """Return why the versions in an announcement are refused, or "" if they are accepted.

        The settings may accept all builds of a version, which stands in them without a build."""
        if versions.hbversion != ICEBALL_HBVERSION:
            return "heartbeat version %d instead of %d" % (versions.hbversion, ICEBALL_HBVERSION)
        accepted = self.accepted_versions
        if not accepted.isdisjoint((versions.version, versions.version & ~ICEBALL_BUILD_BITS)):
            return ""
        accepted_text = ", ".join(map(iceball_version_text, sorted(accepted)))
        return "Iceball version %s; accepted: %s" % (
            iceball_version_text(versions.version), accepted_text)

    def reject(self, source, now, outcome, reason):
        """Record for /check why an announcement is rejected; return the answer to `source`.

        The answer is a BADV if `outcome` is "version", a BADF if it is "bad packet", or b"" for no
        answer. A game server that gets one of them stops announcing itself to every master, and
        somebody may forge a bad announcement in its name to achieve that. Therefore a source with
        a listed server gets no answer, and any other source gets few. Packets from loopback
        addresses cannot be forged, so they are always answered."""
        self.registry.record_unproven(source, self.game, 0, outcome, now, reason)
        if not is_loopback(source):
            has_listed_server = source in self.registry.own.counts
            if has_listed_server or not self.rejection_limiter.allow(source, now):
                return b""
        if outcome == "version":
            return ICEBALL_VERSIONS.write(
                kind=ICEBALL_BAD_VERSION, hbversion=ICEBALL_HBVERSION, version=self.version)
        return ICEBALL_BAD_FORMAT

    def accept_handshake(self, data, peer, now):
        """List or update the server whose handshake returns a cookie. An HSHK has no answer.

        Raise Malformed if the cookie did not go to this address, or is too old, and Refused if the
        server may not be listed."""
        if data == ICEBALL_SAME_RETURNED:
            return b""                      # the repeated announcement has refreshed the server
        source, source_port = peer
        returned = data[len(ICEBALL_HANDSHAKE):]
        mac, trimmed = returned[:COOKIE_MAC_BYTES], returned[COOKIE_MAC_BYTES:]
        message = source.encode() + b"=" + trimmed          # as in answer_announcement()
        if not self.cookie.is_valid(mac, message, now):
            raise Malformed("a cookie that went to another address, or is older than %d s"
                            % COOKIE_WINDOW_S)
        packet = (ICEBALL_HEAD + trimmed).ljust(ICEBALL_ANNOUNCEMENT.size, b"\0")
        announced = ICEBALL_ANNOUNCEMENT.read(packet)
        if peer in self.senders:
            self.check_sender(peer, announced.port)
        server = self.list_own(source, announced.port, {
            "verified": "handshake",
            "name": iceball_text(announced.name),
            "mode": cached_iceball_text(announced.mode),
            "map": cached_iceball_text(announced.map),
            "version": iceball_version_text(announced.version),
            "players": announced.players,
            "max_players": announced.max_players,
            "source_port": source_port,
        }, now, self.timeout)
        self.senders[peer] = server
        self.registry.set_fingerprint(server, hash((packet, source)), ICEBALL_SAME)
        return b""

    def is_sender(self, peer, server):
        """Does this server, which may have left, still announce itself from there?"""
        return self.registry.has(server) and (server.source, server.source_port) == peer

    def check_sender(self, peer, port):
        """Raise Refused if the sender of a handshake already announces another game port.

        A game server echoes every MSOK, even one for an announcement that was forged in its name.
        If a sender could announce several game ports, an attacker could thus list more servers at
        its address. A server that is listed already is never refused, and neither is port 0, which
        list_own() refuses with a reason that helps the operator more."""
        server = self.senders[peer]
        source, _ = peer
        if port in (server.port, 0) or not self.is_sender(peer, server):
            return
        if self.rules.exempts(source):
            return
        if self.registry.get(self.game, self.rules.listed_address(source), port) is None:
            raise Refused(
                "owner", "the UDP port that it came from announces another game port", port)

    # The list

    def lists(self):
        return {"master.json": ServerList(self.json_entry, join=self.json_list)}

    @staticmethod
    def json_entry(server):
        fields = {}
        for key, attribute in ICEBALL_FIELDS.items():
            fields[key] = getattr(server, attribute)
        if server.official:             # the client takes any value of it for true
            fields["official"] = True
        return to_json(fields)

    def http_error(self, request, status, hint):
        """A player's client that is refused gets an empty list, as it cannot read anything else."""
        return self.json_list([], request.now) if status in (403, 429) else None

    def json_list(self, entries, now):
        return b'{"version":%d,"iceball_version":%d,"servers":[%s]}' % (
            ICEBALL_HBVERSION, self.version, b",\n".join(entries))

    def fetch(self):
        entries = yield from fetched_json("/master.json", "servers")
        return read_entries(
            entries, lambda entry: json_entry(entry, "players_current", "players_max"))

    # What announces a game server

    def check_announced(self, name, value):
        if name == "version" and value:
            read_iceball_version(value)

    def announce(self, server):
        """Announce in bursts of five packets, and answer each MSOK with a HSHK."""
        while True:
            is_answered = False
            for gap_s in ICEBALL_GAPS_S:
                data = yield Send(self.announcement(server), gap_s)
                while data is not None:
                    reply = self.reply_to_master(data)
                    is_answered = is_answered or bool(reply.data)
                    data = yield reply
            if not is_answered:
                yield Send(wait_s=0.0, state="no answer; are address and port right, and does UDP "
                                             "get through?")

    def announcement(self, server, **further):
        version = server.version or ICEBALL_VERSION
        return ICEBALL_ANNOUNCEMENT.write(
            kind=ICEBALL_ANNOUNCE,
            hbversion=ICEBALL_HBVERSION,
            version=read_iceball_version(version),
            port=server.port,
            players=server.players,
            max_players=server.max_players,
            name=text_field(server.name, 30),
            mode=text_field(server.mode, 10),
            map=text_field(server.map, 30))

    @staticmethod
    def reply_to_master(data):
        """Return the Send that answers a master's packet. Raise MasterRefused for BADF and BADV."""
        kind, cookie = data[:4], data[4:]
        if kind == ICEBALL_COOKIE:
            return Send(ICEBALL_HANDSHAKE + cookie, state="announced", accepted=True)
        if kind == ICEBALL_BAD_FORMAT:
            raise MasterRefused("the master cannot read the announcement")
        if kind == ICEBALL_BAD_VERSION:
            version = ICEBALL_VERSIONS.read(data.ljust(ICEBALL_VERSIONS.size, b"\0")).version
            raise MasterRefused("the master lists Iceball %s and not this version"
                                % iceball_version_text(version))
        return Send()


# The first byte of a packet of the first draft tells its kind
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
DRAFT_HBVERSION = b"\1\0"
# The heads of a request, of its answer, and of a packet with a field. A text or number follows
DRAFT_REQUEST_HEAD = Form("<c 2s H", "kind hbversion port")
DRAFT_ID_HEAD = Form("<c 4s H", "kind identity port")
DRAFT_FIELD_HEAD = Form("<c 4s c", "kind identity field")
DRAFT_VALUE = struct.Struct("<i")
# The attribute of Server that a packet sets, by the kind of the packet and the number of the field
DRAFT_FIELDS = {
    (DRAFT_TEXT, b"\1"): "name",
    (DRAFT_TEXT, b"\2"): "mode",
    (DRAFT_NUMBER, b"\1"): "players",
    (DRAFT_NUMBER, b"\2"): "max_players",
}
# This many requests are kept until their ids come back. Even if 30,000 forged requests came each
# second, more than the program can read, a game server would have 0.3 s to return its id
DRAFT_REQUESTS = 8192


class DraftSession(NamedTuple):
    """The session that a game server of the first draft has requested."""

    identity: bytes             # 4 random bytes, which every further packet of the session repeats
    claimed_address: str        # the address that the game server gives itself, or ""
    port: int                   # the port that players connect to
    ends: float                 # when the request ends, if the id has not come back until then
    server: Optional[Server] = None     # None before the id has come back


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

    The id is random, so a game server that returns it must have received it. The first packet that
    returns the id lists the server. The session lasts for as long as the server is listed and
    announces itself from there: a server has one.
    """

    def __init__(self, iceball):
        self.iceball = iceball
        # DraftSessions by peer: those whose id has not come back yet, and the others. Requests may
        # be forged, and must not push out a session whose id has come back
        self.requests = Turns(DRAFT_REQUESTS)
        self.sessions = {}

    def tick(self, now):
        for peer, session in list(self.sessions.items()):
            if not self.iceball.is_sender(peer, session.server):
                del self.sessions[peer]

    def answer(self, data, peer, now):
        """Return the answer to a packet of the draft, or b"" if it gets none.

        The first byte of `data` is one of the DRAFT_KINDS. Raise Malformed if only masters send
        packets of this kind, or if the contents cannot be read."""
        kind = data[:1]
        if kind == DRAFT_REQUEST:
            return self.answer_request(data, peer, now)
        if kind not in DRAFT_SESSION_KINDS:
            raise Malformed("type %d is sent by masters only" % ord(kind))
        session = self.session_of(peer, data[1:5], now)
        if session is None:
            return DRAFT_NO_SESSION
        name, value = read_draft_field(data)
        server = self.list_session(session, peer, {name: value} if name else {}, now)
        source, _ = peer
        still_here = DRAFT_STILL_HERE + session.identity
        self.iceball.registry.set_fingerprint(server, hash((still_here, source)))
        if not name:
            return b""
        # The answer repeats the packet with the value that is now stored, which may be shorter
        return data[:DRAFT_FIELD_HEAD.size] + draft_value_bytes(getattr(server, name))

    def answer_request(self, data, peer, now):
        """Answer a game server that requests an id: create a session, and return its id.

        Return a DRAFT_WRONG_VERSION packet if the request has another hbversion, or b"" if a limit
        forbids an answer that is longer than the request. Raise Malformed if the request cannot be
        read."""
        if len(data) < 3:
            raise Malformed("a request without a version")
        if data[1:3] != DRAFT_HBVERSION:
            return DRAFT_WRONG_VERSION + DRAFT_HBVERSION
        text = read_draft_text(data[DRAFT_REQUEST_HEAD.size:])
        claimed_address = text.decode("ascii", "replace")
        port = DRAFT_REQUEST_HEAD.read(data).port
        source, _ = peer
        rules = self.iceball.rules
        address = rules.listed_address(source, claimed_address)
        identity = struct.pack("<I", RANDOM.getrandbits(32))
        head = DRAFT_ID_HEAD.write(kind=DRAFT_ID, identity=identity, port=port)
        answer = head + draft_value_bytes(address)
        surplus_bytes = len(answer) - len(data)
        if not rules.allow_surplus("id", source, surplus_bytes, now):
            return b""
        ends = now + self.iceball.timeout
        session = DraftSession(identity, claimed_address, port, ends)
        self.requests.add(source, peer, session, rules.max_servers)
        return answer

    def session_of(self, peer, identity, now):
        """Return this peer's session with this id, or None. A peer may have requested a new session
        while it still has an old one."""
        session = self.sessions.get(peer)
        if (session and session.identity == identity
                and self.iceball.is_sender(peer, session.server)):
            return session
        request = self.requests.get(peer)
        if request and request.identity == identity and now < request.ends:
            return request
        return None

    def list_session(self, session, peer, fields, now):
        """List or refresh the game server of this session, with these attributes of Server.

        Return the Server. Raise Refused if it may not be listed; the session then stays as it
        is."""
        iceball = self.iceball
        source, source_port = peer
        port = session.port
        claimed_address = session.claimed_address
        fields = {"verified": "handshake", "source_port": source_port, **fields}
        if session.server is None:
            # Players see the endpoint until the server sends its name
            address = iceball.rules.listed_address(source, claimed_address)
            fields.setdefault("name", endpoint_text(address, port))
        server = iceball.list_own(source, port, fields, now, iceball.timeout, claimed_address)
        if session.server is None:
            self.requests.pop(peer)
            self.sessions[peer] = session._replace(server=server)
            self.iceball.registry.forget_fingerprint(server)    # they have the former id
        return server


def read_draft_field(data):
    """Return (name, value) for a packet with which a game server describes itself.

    `name` is the attribute of Server that the packet sets. It is "" for a DRAFT_STILL_HERE, which
    sets none, and for a field that is not in DRAFT_FIELDS. Raise Malformed if the value cannot be
    read."""
    kind, field_number, raw_value = data[:1], data[5:6], data[6:]
    if kind == DRAFT_STILL_HERE:
        return "", None
    name = DRAFT_FIELDS.get((kind, field_number), "")
    if kind == DRAFT_TEXT:
        return name, decode_utf8(read_draft_text(raw_value))
    if len(raw_value) != DRAFT_VALUE.size:
        raise Malformed("number: expected 4 bytes")
    number, = DRAFT_VALUE.unpack(raw_value)
    return name, clamp(number)


def read_draft_text(raw):
    """Return the bytes before the NUL that ends a text.

    Raise Malformed if there is no NUL, or if further bytes follow it."""
    text, terminator, surplus = raw.partition(b"\0")
    if not terminator or surplus:
        raise Malformed("text: expected exactly one NUL, at its end")
    return text


def draft_value_bytes(value):
    """Return the bytes that stand for this value, a str or an int, in a packet of the draft."""
    if isinstance(value, str):
        return value.encode() + b"\0"
    return DRAFT_VALUE.pack(value)


# --- Hyperbol ------------------------------------------------------------------------------------

HYPERBOL_GREETING = Form("<4s I I", "magic key players", magic=b"HBSL")
HYPERBOL_REQUEST = Form("<I B 3x", "key filter")
HYPERBOL_FILTER_UNOFFICIAL = 16     # the bit of the filter that asks for unofficial servers as well
HYPERBOL_ENTRY = Form("<4s I B 3x", "address port flavor")
HYPERBOL_UNOFFICIAL = 0             # the flavor of every server that the ini does not name
HYPERBOL_QUERY = Form("<B I", "type timestamp", type=2)
# As the script in the document reads it; padding stands for the fields that are not used here. A
# text may fill its field, and ours leave room for a NUL
HYPERBOL_ANSWER = Form(
    "<B I 32s 32s B B x 64s 21x I I 4x 16s 37x B B B B 3x",
    "type timestamp name mode players max_players map port flags version imf syndicate republic "
    "skill",
    texts={"name": 31, "mode": 31, "map": 63, "version": 15}, type=27)
# The elements of the list in XML, as the script in the document writes them
HYPERBOL_XML_SERVER = """\
<server ip="%(address)s" port="%(port)s" responding="1" servername="%(name)s" gametype="%(mode)s" \
playercount="%(players)s" maxplayercount="%(max_players)s" mapname="%(map)s" version="%(version)s" \
skill="%(skill)s" flavor="%(flavor)s" ping_milliseconds="%(ping)s"/>
"""
HYPERBOL_XML_ATTRIBUTES = (
    "address", "port", "name", "mode", "players", "max_players", "map", "version")
HYPERBOL_XML_SILENT_SERVER = '<server ip="%(address)s" port="%(port)s" responding="0"/>\n'


def read_hyperbol_server(text):
    """Return (host, port, flavor) for `HOST:PORT FLAVOR`. Without a flavor it is 0."""
    endpoint, *flavors = text.split()
    host, port = read_endpoint(endpoint)
    flavor_text = " ".join(flavors) or "0"
    read_flavor = number_reader(0, 255)
    return host, port, read_flavor(flavor_text)


class Hyperbol(PolledGame, TcpProtocol):
    """Serves Hyperbol's list by TCP and queries its game servers by UDP.

    Document: "The master Server Protocol".

        < 4842534c key.u32 players.u32              "HBSL"; players on all servers; one segment
        > key.u32 filter[4]                         10 in the first byte: unofficial ones as well
        < { address[4] port.u32 flavor.u8 000000 }* address in network order; then it is closed

        the master to a game server, and its answer (229 bytes):
        > 02 timestamp.u32
        < 1b timestamp.u32 name[32] gametype[32] players.u8 maximum.u8 00 map[64] address[20] 00
          port.u32 flags.u32 inet[4] version[16] 00×37 factions[3] skill.u8 000000
                                                    texts are NUL-terminated unless full

    The document does not say how game servers register. Here the ini names them, or they announce
    themselves by HTTP. Only the ini can give a server a flavor, so that no server can declare
    itself official.
    """

    game = "hyperbol"
    title = "Hyperbol"
    settings = (
        Setting("hyperbol.port", "20203", read_port, "TCP port of the list.", live=False),
        Setting("hyperbol.servers", "", list_reader(read_hyperbol_server, "\n"),
                "Known servers, one a line: ADDRESS:PORT FLAVOR (0: unofficial; others: "
                "official)."),
    )
    ports = (Port("tcp"),)
    master_port = 20203
    contacts = (Contact(
        "Hyperbol's servers do not announce themselves; run this beside yours",
        ANNOUNCE_COMMAND.replace("PORT", "27888"),
        "UDP 27888"),)
    private = {"flavor": Private(HYPERBOL_UNOFFICIAL, json_number(0, 255))}
    json_fields = {"flavor": HYPERBOL_UNOFFICIAL}
    routes = {"/servers.xml": Route("servers.xml", XML_TYPE, of_any_game=True)}
    exported = "servers.xml"
    announced_by_http = True
    ipv4_list = True
    fetched_over = "tcp"
    answer_bytes = 512
    flavors: Mapping[Any, int] = {}     # of the servers that the ini names, by address and port

    def read(self, settings):
        super().read(settings)
        self.named = {(host, port): flavor for host, port, flavor in settings["hyperbol.servers"]}

    def named_servers(self):
        return self.named

    def tick(self, now):
        """Give each listed server its flavor if the ini has changed, or the address of a host."""
        queries = super().tick(now)
        flavors = {}
        for (address, port), flavor in self.named_endpoints().items():
            flavors[self.rules.listed_address(address), port] = flavor
        if flavors != self.flavors:
            self.flavors = flavors
            for server in self.registry.servers(self.game):
                if not server.master:       # else the other master sets it
                    self.registry.update(server, self.flavored(server.address, server.port))
        return queries

    def flavored(self, address, port):
        """Return the attributes of Server that the ini decides for this listed endpoint."""
        return {"private": {"flavor": self.flavors.get((address, port), HYPERBOL_UNOFFICIAL)}}

    def list_polled(self, target, fields, now):
        address = self.rules.listed_address(target.address)
        return super().list_polled(target, {**fields, **self.flavored(address, target.port)}, now)

    # Its game servers

    def question(self, target):
        return HYPERBOL_QUERY.write(timestamp=target.nonce)

    def read_answer(self, target, data):
        answer = HYPERBOL_ANSWER.read(data)
        if answer.timestamp != target.nonce:
            raise Malformed("timestamp: not that of the open query")
        return {
            "name": answer.name,
            "mode": answer.mode,
            "map": answer.map,
            "version": answer.version,
            "players": answer.players,
            "max_players": answer.max_players,
            "details": {
                "skill": str(answer.skill),
                "flags": "0x%08x" % answer.flags,
                "factions": "IMF %d, Syndicate %d, Republic %d" % (
                    answer.imf, answer.syndicate, answer.republic),
            },
        }

    def answer(self, server, data):
        """Answer a master's query for a server that does not do it itself. Raise Malformed."""
        query = HYPERBOL_QUERY.read_whole(data)
        return HYPERBOL_ANSWER.write(
            timestamp=query.timestamp,
            name=server.name,
            mode=server.mode,
            players=min(server.players, 255),
            max_players=min(server.max_players, 255),
            map=server.map,
            port=server.port,
            version=server.version)

    def announced(self, source, port, fields, now):
        """Query a server that has announced itself by HTTP. What it says of itself is ignored,
        because its answer says that as well."""
        self.query_announced(source, port, NO_DETAILS, now)

    # Its lists

    def lists(self):
        return {
            "all": ServerList(hyperbol_entry, is_ipv4),
            "official": ServerList(hyperbol_entry, is_official_hyperbol),
            "servers.xml": ServerList(hyperbol_xml_entry, join=self.xml_list),
        }

    def session(self, address, now):
        return HyperbolSession(self, address, now)

    def xml_list(self, entries, now):
        rendered_at = utc_datetime(now + self.epoch).replace(microsecond=0)
        local_time = rendered_at.astimezone().isoformat()
        utc_time = rendered_at.isoformat()
        head = '<?xml version="1.0" encoding="UTF-8"?>\n<serverlist localtime="%s" gmtime="%s">\n'
        head %= local_time, utc_time
        return head.encode() + b"".join(entries) + b"</serverlist>\n"

    def fetch(self):
        received = yield from received_until(
            lambda data: len(data) >= HYPERBOL_GREETING.size, wait_s=HyperbolSession.idle_s)
        greeting = HYPERBOL_GREETING.read(received)
        # The document: "always just send a 255 first byte to guarantee that you get all servers"
        request = HYPERBOL_REQUEST.write(key=greeting.key, filter=255)
        most_bytes = HYPERBOL_ENTRY.size * LIST_SERVERS
        data = yield from received_until_closed(request, most_bytes)
        servers = []
        for entry in HYPERBOL_ENTRY.read_all(data):     # a broken connection may cut the last one
            address = ".".join(map(str, entry.address))
            servers.append({"address": address, "port": entry.port, "flavor": entry.flavor})
        return servers


class HyperbolSession(MessageSession):
    """One TCP connection of a player who asks for the list."""

    # The document: "just a few seconds to ask for the full list". Its script waits as long for us
    idle_s = 5.0

    def opened(self, now):
        # The request has to repeat this key, although that proves nothing over TCP
        self.key = RANDOM.getrandbits(32)
        censuses = self.registry.census(now)
        census = censuses.get(self.game, Census())
        return HYPERBOL_GREETING.write(key=self.key, players=census.players)

    def size(self, now):
        return HYPERBOL_REQUEST.size

    def message(self, message, now):
        self.done = True
        request = HYPERBOL_REQUEST.read(message)
        if request.key != self.key:
            raise Malformed("key: %08x instead of %08x" % (request.key, self.key))
        if request.filter & HYPERBOL_FILTER_UNOFFICIAL:
            return self.rendered("all", now)
        return self.rendered("official", now)


def hyperbol_entry(server):
    return HYPERBOL_ENTRY.write(address=ipv4_bytes(server.address), port=server.port,
                                flavor=server.private["flavor"])


def is_official_hyperbol(server):
    return is_ipv4(server) and server.private["flavor"] != HYPERBOL_UNOFFICIAL


def hyperbol_xml_entry(server):
    """Return a server's element in /servers.xml. It may be a server of another game."""
    values: Dict[str, Any] = {}
    for name in HYPERBOL_XML_ATTRIBUTES:
        text = str(getattr(server, name))
        values[name] = html.escape(text)
    skill = server.details.get("skill", "0")
    values["skill"] = html.escape(skill)
    values["flavor"] = server.private.get("flavor", HYPERBOL_UNOFFICIAL)
    values["ping"] = round(server.ping_ms or 0)
    template = HYPERBOL_XML_SILENT_SERVER
    if server.responding:
        template = HYPERBOL_XML_SERVER
    element = template % values
    return element.encode()


# --- SubSpace ------------------------------------------------------------------------------------

# A description follows an announcement and an entry of a list; it ends with a NUL. The numbers of
# scores are flags, of which only the low byte counts
ZONE_ANNOUNCEMENT = Form("<4x H H B x I 32s 48s", "port players scores version name password",
                         texts={"name": 31}, encoding="cp1252")
ZONE_ANNOUNCEMENT_BYTES = 480       # the longest one, with its description
ZONE_ENTRY = Form("<4s H H B x I 64s", "address port players scores version name",
                  texts={"name": 63}, encoding="cp1252")
ZONE_VERSION = 134                  # which every zone announces
ZONE_PASSWORD = b"cane"             # zones announce it unless they have set another password
MAX_ZONE_PORT = 65534               # the zone answers pings on the next port
# Zones announce themselves every 60 s, so a zone has gone after three lost announcements in a row
ZONE_LIFETIME_S = 180.0
# The owner of a zone that was announced by HTTP has this in place of a UDP port
ZONE_HTTP_PORT = "0"
# This many announcements may wait for the answer to a ping; together they take at most 15 MB. A
# flood of 30,000 announcements a second, more than the master can read, needs 0.3 s to push one out
MAX_WAITING_ANNOUNCEMENTS = 8192
PING_SHORT = Form("<I", "timestamp")
PING_TOTAL = Form("<I I", "total timestamp")            # answers a ping of 4 bytes
PING_LONG = Form("<I I", "timestamp options")           # a ping of 8 bytes; begins its answer
PING_SUMMARY = 1                    # the option that asks for the counts of the whole zone
PING_ARENAS = 2                     # the option that asks for the counts of each arena
PING_COUNTS = Form("<I I", "total playing")             # of the zone
PING_ARENA_COUNTS = Form("<H H", "total playing")       # of an arena, after its name


def zone_owner(zone):
    """Return the stored form of the announcer that a zone belongs to; {} if it has none."""
    return zone.private.get("zone_owner", NO_DETAILS) if zone else NO_DETAILS


def zone_owned_by(source_port, password):
    """Return the private attributes of a zone that was announced from this UDP port, with this
    password, in bytes. Only a hash of the password is kept."""
    # `person` makes the hash differ from a plain hash of the same password. With 8 bytes, the
    # chance that two of a million passwords have the same hash is 1 in 40 million
    hashed = hashlib.blake2b(password, digest_size=8, person=b"zone password")
    return {"zone_owner": {"port": str(source_port), "password": hashed.hexdigest()}}


def read_zone_owner(stored):
    return {"port": str(stored["port"]), "password": str(stored["password"])}


class SubSpace(PolledGame, UdpProtocol):
    """Lists zones of SubSpace, and answers pings like a zone in which each game is one arena. This
    is the port for both, one above the list port, which SubSpaceList serves.

        > 00000000 a861 0600 0100 86000000      ip (ignored), port, players, scores, version 134
          4c6f6f706261636b2054657374205a6f6e65 00…          name[32]
          63616e65 00…                                      password[48]
          61207265616c 00                                   description, NUL-terminated
        < e0a11c4b                              a ping to the port after the announced one; its
                                                timestamp is a MAC of that address and port
        > 06000000 e0a11c4b                     the answer from there: the zone gets listed

    Pings, in both directions; document: "ping/information protocol", version 1.0.

        > 11223344              < 06000000 11223344
        > 11223344 03000000     < 11223344 03000000 06000000 04000000
                                  3000 0200 0100 706200 0100 0100 00

    A poll asks the 4-byte question first, because every zone knows it. It is also the only one that
    counts the players of a single zone if one asss program runs several zones as virtual servers.
    The second question asks for options 1 (summary) and 2 (arenas) together. If the answer lacks
    option 2, the list of arenas was too long for it, and the third question asks for option 2
    alone.

    An announcement changes nothing until the zone has answered the ping. One that only repeats the
    listed texts of a zone needs no answer and keeps the zone listed. The answer proves that the
    zone exists, but not that the zone sent the announcement, because zones answer every ping. A
    listed zone therefore belongs to the UDP port and password that have announced it: its private
    attribute `zone_owner`. Others may repeat the listed texts, but cannot change them, until the
    owner has been silent for ZONE_LIFETIME_S. Of a zone with an owner, only the owner's
    announcements set `last_seen`; those of others prolong its `lifetime`. A zone that was announced
    by HTTP stays listed for as long as it answers polls, so its owner never counts as silent.
    """

    game = "subspace"
    title = "SubSpace"
    settings = (
        Setting("subspace.port", "4990", read_port,
                "UDP port of the zone list; announcements and pings use the next port.",
                live=False),
        Setting("subspace.zones", "", list_reader(read_endpoint, "\n"),
                "Known zones, one ADDRESS:PORT a line; pinged even if they never announce "
                "themselves."),
    )
    ports = (Port("udp", 0, lambda room: SubSpaceList(room)), Port("udp", 1))
    master_port = 4990
    contacts = (Contact(
        "For asss, in conf/global.conf",
        "[Directory]\nServer1 = %(host)s\nPort = %(port)d",
        "the zone's UDP port and the next one"),)
    private = {"zone_owner": Private({}, read_zone_owner, is_own=True)}
    ipv4_list = True
    announced_by_http = True
    announced_over = "udp"
    announce_offset = 1
    offset = 1
    fetched_over = "udp"
    repeated_from = "endpoint"
    answer_bytes = 520                  # the document has 512, but one implementation sends 520
    # Announcements say how long a zone stays listed, and its answers do not
    answer_lifetime_s = None

    def __init__(self, program=None):
        super().__init__(program)
        self.cookie = Cookie(os.urandom(16), PING_SHORT.size)
        # Announcements whose zones have not answered a ping yet, by the zone's address and port
        self.waiting = Turns(MAX_WAITING_ANNOUNCEMENTS)

    def read(self, settings):
        super().read(settings)
        self.named = dict.fromkeys(settings["subspace.zones"])

    def named_servers(self):
        return self.named

    def datagram(self, data, peer, now):
        if len(data) not in (PING_SHORT.size, PING_LONG.size):
            return self.take_announcement(data, peer, now)
        source, source_port = peer[:2]
        endpoint = endpoint_text(source, source_port).encode()
        mac = data[-PING_SHORT.size:]
        # Answers to our pings repeat the MAC at their end. They are recognized before the limits
        # apply. Otherwise a flood of pings with the zone's forged address would keep them out
        if not self.cookie.is_valid(mac, endpoint, now):
            answer = self.answer_ping(data, source, now)
            return [(answer, peer)]
        # A shorter datagram is our own ping: a zone was announced at this master's own port
        if len(data) == PING_TOTAL.size:
            players = PING_TOTAL.read(data).total
            self.list_waiting(source, source_port - 1, players, now)
        return []

    def answer_ping(self, ping, source, now):
        """Return the answer to a ping. Raise Limited if a limit forbids one of its size."""
        if not self.rules.udp_request_limiter.allow(source, now):
            raise Limited
        arenas = []
        for game, census in sorted(self.registry.census(now).items()):
            arena = game.encode(), clamp(census.players), clamp(census.playing)
            arenas.append(arena)
        answer = ping_answer(ping, arenas)
        # The sender may be forged, so the bytes beyond the size of the ping are limited
        surplus_bytes = len(answer) - len(ping)
        if not self.rules.allow_surplus("ping", source, surplus_bytes, now):
            raise Limited
        return answer

    # Announcements

    def take_announcement(self, data, peer, now):
        """Keep a zone listed that the announcement only repeats; otherwise return a ping to it.

        Raise Refused if a rule, a limit or another owner of the zone forbids it."""
        source, source_port = peer[:2]
        port, announcement = read_zone_announcement(data, source_port)
        address = self.rules.listed_address(source)
        if not announcement["name"]:
            announcement["name"] = endpoint_text(address, port)
        key = self.game, address, port
        zone = self.registry.get(*key)
        fingerprint = hash((data, peer))
        if zone is not None and self.keep_listed(zone, announcement, now, fingerprint):
            return []
        if zone is None:
            self.registry.check_admission(key, source, announcement["name"])
        self.check_ownership(zone, announcement, now)
        ping_port = port + 1
        if zone is None:
            reason = "no answer yet to a ping on UDP port %d" % ping_port
            self.registry.record_unproven(source, self.game, port, "silent", now, reason)
        limit = self.rules.max_servers_per_source
        self.waiting.add(source, (source, port), announcement, limit)
        endpoint = endpoint_text(source, ping_port)
        ping = self.cookie.make(endpoint.encode(), now)
        return [(ping, (source, ping_port))]

    def keep_listed(self, zone, announcement, now, fingerprint):
        """Keep a zone listed if its announcement only says again what is listed. Return whether it
        does.

        It may come from another port than the owner's, because a router may have changed that. The
        owner's silence goes on then; once that has lasted too long, the result is False."""
        owner = zone_owner(zone)
        announcer = announcement["private"]["zone_owner"]
        if owner.get("password") != announcer["password"]:
            return False
        if zone.details.get("scores") != announcement["details"]["scores"]:
            return False
        for name in "name", "version", "description":
            if getattr(zone, name) != announcement[name]:
                return False
        if announcer != owner:
            if self.is_owner_silent(zone, now):
                return False
            if not zone.master:
                prolonged = now - zone.last_seen + ZONE_LIFETIME_S
                zone.lifetime = max(zone.lifetime, prolonged)
            return True
        if zone.master:
            return False                # it is pinged, so that we list it ourselves
        self.registry.confirm(zone, now)
        self.registry.set_fingerprint(zone, fingerprint)
        return True

    def list_waiting(self, source, port, players, now):
        """List or change the zone at `source` and `port`, which has answered our ping, as the
        announcement says that waits for it, if one does."""
        announcement = self.waiting.pop((source, port))
        if announcement is None:        # the zone has answered twice
            return
        address = self.rules.listed_address(source)
        self.check_name(address, port, announcement)
        target = self.poller.find(self, source, port)
        if target is None:
            target = self.poller.add(self, source, port, ANNOUNCED)
        target.announcement = announcement
        target.lifetime = math.inf
        if target.why != NAMED:
            target.why = ANNOUNCED
            target.lifetime = ZONE_LIFETIME_S
        self.list_polled(target, {"players": clamp(players)}, now)
        # A poll that is under way starts again, because it may have begun before the zone did
        self.poller.poll_now(target, now)

    def announced(self, source, port, fields, now):
        owned = zone_owned_by(ZONE_HTTP_PORT, ZONE_PASSWORD)
        announcement = {"name": "", **fields, "private": owned}
        address = self.rules.listed_address(source)
        zone = self.registry.get(self.game, address, port)
        self.check_ownership(zone, announcement, now)
        self.check_name(address, port, announcement)
        self.query_announced(source, port, announcement, now)

    def stopped(self, source, port, now):
        address = self.rules.listed_address(source)
        zone = self.registry.get(self.game, address, port)
        owner_port = zone_owner(zone).get("port", ZONE_HTTP_PORT)
        is_by_udp = owner_port != ZONE_HTTP_PORT
        if is_by_udp and not self.is_owner_silent(zone, now):
            raise Refused("owner", "it was announced by UDP; it leaves the list when it is silent")
        return super().stopped(source, port, now)

    # Ownership

    def check_ownership(self, zone, announcement, now):
        """Raise Refused if the announced zone belongs to another announcer.

        `zone` is the listed zone at the announced address and port, or None."""
        announcer = announcement["private"]["zone_owner"]
        owner = zone_owner(zone)
        if owner and owner != announcer and not self.is_owner_silent(zone, now):
            if owner["port"] == ZONE_HTTP_PORT:
                raise Refused("owner", "it was announced by HTTP; sign it off there (action=stop)",
                              zone.port)
            if owner["password"] != announcer["password"]:
                raise Refused("password", "wrong password for this zone; a new password is "
                              "accepted once the zone has been silent for %d s" % ZONE_LIFETIME_S,
                              zone.port)
            raise Refused("owner", "another UDP port of this address announces this zone; this "
                          "announcement is accepted once that port has been silent for %d s"
                          % ZONE_LIFETIME_S, zone.port)

    def check_name(self, address, port, announcement):
        """Raise Refused if the announced name belongs to another zone.

        The first password that comes with a name owns the name, while a zone with both is listed
        and answers. All zones are looked at, so by UDP, where announcements may be forged, this
        waits until the announced one has answered."""
        zone = self.registry.get(self.game, address, port)
        name = announcement["name"]
        if zone is not None and zone.name == name:
            return
        password = announcement["private"]["zone_owner"]["password"]
        same_name = name.casefold()
        for other in self.registry.games[self.game].values():
            if other is zone or not other.responding or other.name.casefold() != same_name:
                continue
            if zone_owner(other).get("password", password) != password:
                raise Refused("name", "the name %s belongs to another zone, with another "
                              "password, for as long as that is listed" % other.name, port)

    def is_owner_silent(self, zone, now):
        if zone_owner(zone)["port"] == ZONE_HTTP_PORT:
            return False                # its zone stays listed for as long as it answers
        return self.registry.is_silent(zone.source, zone.last_seen, ZONE_LIFETIME_S, now)

    # Polls

    def nonce(self):
        """Return a timestamp that every zone answers with its player total.

        Some zone programs reply with the total only if `timestamp % 600 < 300`, others only if
        `timestamp % 1000 < 500`. In every 3000 timestamps the first 300 satisfy both."""
        cycles = (1 << 32) // 3000
        return 3000 * RANDOM.randrange(cycles) + RANDOM.randrange(300)

    def question(self, target):
        if target.step is None:
            return PING_SHORT.write(timestamp=target.nonce)
        options = PING_SUMMARY | PING_ARENAS
        if target.step["playing"] is not None:      # the answer had no room for the arenas
            options = PING_ARENAS
        return PING_LONG.write(timestamp=target.nonce, options=options)

    def read_answer(self, target, data):
        is_first = target.step is None
        answer = PING_TOTAL.read_whole(data) if is_first else PING_LONG.read(data)
        if answer.timestamp != target.nonce:
            raise Malformed("timestamp: not that of the open query")
        if is_first:
            players = clamp(answer.total)
            target.step = {"players": players, "playing": None, "details": {"arenas": ""}}
            return None
        fields = dict(target.step)
        blocks = data[PING_LONG.size:]
        if answer.options & PING_SUMMARY and len(blocks) >= PING_COUNTS.size:
            counts = PING_COUNTS.read(blocks)
            # A higher total than in the first answer means that this zone is one of several that
            # run in one program; this answer counts the players of all of them. A difference of
            # two has another cause: players join between two answers
            if counts.total > fields["players"] + 2:
                return fields
            fields["playing"] = counts.playing
            blocks = blocks[PING_COUNTS.size:]
        if answer.options & PING_ARENAS:
            fields["details"] = {"arenas": arenas_text(blocks)}
        elif fields["playing"] != target.step["playing"]:
            target.step = fields
            return None
        return fields

    def answers_so_far(self, target):
        """Old zones know only the first question."""
        return target.step

    def list_polled(self, target, fields, now):
        zone = self.listed_server(target)
        announcement = target.announcement
        if announcement is None and zone is not None and zone.master:
            return zone                 # the master that has listed this zone polls it as well
        # Answers tell the arenas, and announcements the scores
        announced = announcement or NO_DETAILS
        if announcement is None and target.why == FOUND:
            announced = target.found.fields
            fields["verified"] = "another list"     # answers do not tell its texts
        details = dict(zone.details) if zone else {}
        details.update(fields.get("details", NO_DETAILS))
        details.update(announced.get("details", NO_DETAILS))
        fields["details"] = details
        if zone is None or announcement is not None:
            return super().list_polled(target, fields, now)
        heard_at = zone.last_seen
        fingerprint = zone.fingerprint
        listed = super().list_polled(target, fields, now)
        if listed is zone:
            if zone_owner(zone).get("port", ZONE_HTTP_PORT) != ZONE_HTTP_PORT:
                # If a flood uses its address, its announcements are lost; its answers have to do
                is_flooded = self.rules.datagram_limiter.has_refused(zone.source, heard_at)
                zone.last_seen = now if is_flooded else heard_at
            # What an answer has changed is not in the announcement, so that still says nothing new
            if fingerprint is not None:
                self.registry.set_fingerprint(zone, fingerprint)
        return listed

    # Lists, and what announces a zone

    def lists(self):
        return {"zones": ServerList(counted_zone_entry, is_ipv4, join=lambda entries, now: entries)}

    def fetch(self):
        # The clock of the link counts the seconds in which nothing came
        now = 0.0
        link = ZoneListLink(now, [ZONE_LIST_REQUEST + bytes(4)])
        version, _ = LINK_VERSIONS
        connect = LINK_CONNECT + os.urandom(3) + b"\0" + version
        for _ in range(3):
            data = yield Send(connect, 2.0)
            if data is not None:        # any datagram means that the master agrees
                break
        else:
            raise TimeoutError("no answer")
        packets = link.tick(now)
        while len(link.zones) < link.total and not link.is_closed:
            data = yield Send(packets, LINK_SILENCE_S)
            if data is None:
                now += LINK_SILENCE_S
                packets = link.tick(now)
            else:
                packets = link.receive(data, now)
        yield Send(LINK_DISCONNECT, 0.0)
        if len(link.zones) != link.total:
            raise TimeoutError("no list came")
        return read_zone_list(link.zones)

    def found(self, entry):
        return {
            "name": entry["name"],
            "version": str(entry["version"]),
            "description": entry["description"],
            "details": {"scores": "yes" if entry["scores"] else "no"},
        }

    def announce(self, server):
        state = "announced; masters of this game do not answer but ping the next UDP port"
        while True:
            head = ZONE_ANNOUNCEMENT.write(
                port=server.port,
                players=server.players,
                scores=1,
                version=ZONE_VERSION,
                name=server.name,
                password=ZONE_PASSWORD,
            )
            most_bytes = ZONE_ANNOUNCEMENT_BYTES - len(head) - 1
            packet = head + text_field(server.description, most_bytes, "cp1252") + b"\0"
            # If nobody has the port, the system says so within this second. asss announces as often
            for step in Send(packet, 1.0), Send(wait_s=59.0, accepted=True, state=state):
                data = yield step
                while data is not None:
                    data = yield Send()

    def answer(self, server, data):
        """Answer a ping for a zone that does not do it itself. All players are in one arena: the
        one that `map` names, or the public one. Raise Malformed if the data are not a ping."""
        if len(data) not in (PING_SHORT.size, PING_LONG.size):
            raise Malformed("a ping has 4 or 8 bytes")
        playing = server.playing
        if playing is None:             # it is not known how many only watch
            playing = server.players
        name = text_field(server.map, 15, "cp1252") or b"0"
        arena = name, server.players, playing
        return ping_answer(data, [arena])


def read_zone_announcement(data, source_port):
    """Return the announced port and the announced attributes of Server, from a datagram that came
    from the UDP port `source_port`.

    The ip and the players are ignored: the zone's source and its answers tell them. Raise Malformed
    if no zone can have sent this, or if the zone could not be pinged."""
    if not ZONE_ANNOUNCEMENT.size < len(data) <= ZONE_ANNOUNCEMENT_BYTES:
        raise Malformed("length: %d bytes instead of 4, 8 or 95 to 480" % len(data))
    if source_port == 0:
        raise Malformed("source port: a datagram from port 0 is forged")
    head = ZONE_ANNOUNCEMENT.read(data)
    if head.port > MAX_ZONE_PORT:
        raise Malformed("port: 65535 leaves no next one for pings")
    description = c_string(data[ZONE_ANNOUNCEMENT.size:])
    return head.port, {
        "name": head.name,
        "version": str(head.version),
        "description": decode_legacy(description, TEXT_CHARACTERS),
        "details": {"scores": "yes" if head.scores else "no"},
        "private": zone_owned_by(source_port, c_string(head.password)),
    }


def ping_answer(ping, arenas):
    """Return the answer to a ping of 4 or 8 bytes.

    `arenas` has (name, total, playing) of each arena. Once an arena does not fit into the 512 bytes
    of the document, it and all later ones are left out. Raise Malformed if the ping asks for
    nothing: the answer would be such a ping too, and two ports would answer each other for ever."""
    total = sum(arena_total for _, arena_total, _ in arenas)
    if len(ping) == PING_SHORT.size:
        asked = PING_SHORT.read(ping)
        return PING_TOTAL.write(total=total, timestamp=asked.timestamp)
    asked = PING_LONG.read(ping)
    options = asked.options & (PING_SUMMARY | PING_ARENAS)
    if not options:
        raise Malformed("options: none that is known")
    answer = PING_LONG.write(timestamp=asked.timestamp, options=options)
    if options & PING_SUMMARY:
        playing = sum(arena_playing for _, _, arena_playing in arenas)
        answer += PING_COUNTS.write(total=total, playing=playing)
    if not options & PING_ARENAS:
        return answer
    for name, arena_total, arena_playing in arenas:
        block = name + b"\0"
        block += PING_ARENA_COUNTS.write(total=arena_total, playing=arena_playing)
        # One more byte is needed for the NUL at the end
        if len(answer) + len(block) >= 512:
            break
        answer += block
    return answer + b"\0"


def arenas_text(blocks):
    """Return the arenas in an answer as one text, such as "(Public 0) 2/1, duel 1/1".

    There is a block for each arena: the name, a NUL, total and playing. Public arenas have numbers
    as names. An empty name or an incomplete block ends the list."""
    arenas = []
    while True:
        name, _, blocks = blocks.partition(b"\0")
        if not name or len(blocks) < PING_ARENA_COUNTS.size:
            return ", ".join(arenas)
        counts = PING_ARENA_COUNTS.read(blocks)
        blocks = blocks[PING_ARENA_COUNTS.size:]
        shown = decode_legacy(name) or "?"
        if name.isdigit():
            shown = "(Public %s)" % shown
        arenas.append("%s %d/%d" % (shown, counts.total, counts.playing))


def counted_zone_entry(zone):
    version = int(zone.version) if zone.version.isdecimal() else ZONE_VERSION
    head = ZONE_ENTRY.write(
        address=ipv4_bytes(zone.address),
        port=zone.port,
        players=zone.players,
        scores=zone.details.get("scores") == "yes",
        version=clamp(version, 0xFFFFFFFF),
        name=zone.name,
    )
    # Clients accept 480 bytes with the NUL
    return zone.players, head + text_field(zone.description, 479, "cp1252") + b"\0"


def read_zone_list(data):
    """Yield the zones in the list of another master as dicts. Raise Malformed if the data are not a
    list, or if it ends within a zone."""
    if not data.startswith(ZONE_LIST_TYPE):
        raise Malformed("a list begins with 01")
    start = len(ZONE_LIST_TYPE)
    while start < len(data):
        description_start = start + ZONE_ENTRY.size
        entry = ZONE_ENTRY.read(data[start:description_start])
        description_end = data.find(b"\0", description_start)
        if description_end < 0:
            raise Malformed("list: the last zone is cut off")
        description = data[description_start:description_end]
        zone = entry._asdict()
        zone["address"] = ".".join(map(str, entry.address))
        zone["scores"] = bool(entry.scores)
        zone["description"] = decode_legacy(description, TEXT_CHARACTERS)
        yield zone
        start = description_end + 1


# A link is one exchange over the SubSpace core protocol. Its packets begin with one of these types
LINK_CONNECT = b"\0\1"
LINK_CONNECT_ANSWER = b"\0\2"
LINK_RELIABLE = b"\0\3"
LINK_ACKNOWLEDGEMENT = b"\0\4"
LINK_SYNC = b"\0\5"
LINK_SYNC_ANSWER = b"\0\6"
LINK_DISCONNECT = b"\0\7"
LINK_LIST_PIECE = b"\0\x0a"
LINK_CLUSTER = b"\0\x0e"
LINK_VERSIONS = b"\1\0", b"\x11\0"  # end a connect
ZONE_LIST_REQUEST = b"\1"           # begins a request; the rest is minplayers[4]
ZONE_LIST_TYPE = b"\1"              # begins a list
# A packet that is not acknowledged is sent again after the first two of these times, each longer
# than any round trip. After the third one its peer has gone, or has never asked: nothing in the
# exchange proves an address, because a peer can acknowledge a packet that it has not received
LINK_WAITS_S = 0.5, 2.0, 5.0
LINK_IDLE_S = 20.0                  # a peer that has done nothing for this long has gone
LINK_SILENCE_S = 0.25               # after this much silence our own end looks what is due
# Bytes of the list in one packet. With its headers the packet stays below the 512 bytes that
# clients accept
LINK_CHUNK_BYTES = 480
# The IPv4 and UDP headers of a datagram. They are counted because a cluster of many packets has one
# header, but each of the answers to these packets has its own
UDP_HEADER_BYTES = 28
# Of one datagram so many packets are answered, as many as we may have on their way. A cluster has
# room for 74 that would need an answer
LINK_ANSWERS = 4
MAX_LIST_LINKS = 4096               # open exchanges; each takes 1 kB and its packets in flight


class InFlight(NamedTuple):
    """A packet that is to be acknowledged. At `due` it is sent, or given up if no `waits` are left:
    those that follow the next times it is sent."""

    packet: bytes
    waits: Sequence[float]
    due: float


class SubSpaceLink:
    """One end of a connection by the SubSpace core protocol, unencrypted.

    The packets of this protocol begin with 00:

        00 03 seq[4] packet                     reliable: handled in order and acknowledged; sent
                                                again until it is acknowledged
        00 04 seq[4]                            acknowledgement
        00 05 time[4] …                         sync, answered with 00 06 time[4] servertime[4]
        00 07                                   disconnect
        00 0e {len.u8 packet}*                  cluster

    `receive` and `tick` return datagrams for the peer. `payloads` yields the packets to send
    reliably. It is read only as fast as the peer acknowledges them. `is_closed` becomes True if the
    peer disconnects, or is gone.
    """

    def __init__(self, now, payloads=()):
        self.payloads = iter(payloads)
        self.in_flight = {}             # by sequence number
        self.sequence = 0               # the number of our next reliable packet
        self.expected = 0               # the number of the peer's next reliable packet
        self.active_at = now            # when the peer last sent or acknowledged such a packet
        self.is_closed = False

    def on_packet(self, packet, now):
        """Handle a packet whose type is not a part of the core protocol."""

    def allow(self, size, now):
        """May the peer be sent this many bytes more than it has sent itself?"""
        return True

    def receive(self, data, now):
        """Handle a datagram from the peer. Return the datagrams to send to the peer."""
        answers = []
        surplus_bytes = -len(data) - UDP_HEADER_BYTES
        for packet in split_cluster(data):
            answer = self.answer(packet, now)
            if answer and len(answers) < LINK_ANSWERS:
                answers.append(answer)
                surplus_bytes += len(answer) + UDP_HEADER_BYTES
        if not self.allow(surplus_bytes, now):
            answers = []
        return answers + self.tick(now)

    def answer(self, packet, now):
        """Handle a packet that is not a cluster. Return its answer, or b""."""
        kind, argument = packet[:2], packet[2:6]
        number = int.from_bytes(argument, "little")
        if kind == LINK_DISCONNECT:
            self.is_closed = True
        elif kind not in (LINK_RELIABLE, LINK_ACKNOWLEDGEMENT, LINK_SYNC) or len(argument) < 4:
            self.on_packet(packet, now)
        elif kind == LINK_SYNC:
            hundredths = int(now * 100) & 0xFFFFFFFF
            return LINK_SYNC_ANSWER + argument + hundredths.to_bytes(4, "little")
        elif kind == LINK_ACKNOWLEDGEMENT:
            if self.in_flight.pop(number, None):        # it may come twice
                self.active_at = now
        elif number <= self.expected:   # if an earlier packet is missing, this one will come again
            # A packet with a lower number was sent again, because our acknowledgement was lost. It
            # is acknowledged again, and otherwise ignored
            if number == self.expected:
                self.expected += 1
                self.active_at = now
                for carried_packet in split_cluster(packet[6:]):
                    self.on_packet(carried_packet, now)
            return LINK_ACKNOWLEDGEMENT + argument
        return b""

    def tick(self, now):
        """Return the datagrams that are due: packets that were probably lost, and then new ones."""
        if now - self.active_at > LINK_IDLE_S:
            self.is_closed = True
        # The window begins at the oldest packet that is not acknowledged. It has room for a single
        # packet until one has been acknowledged, and then for four, as deployed clients expect
        window = 4 if self.sequence > len(self.in_flight) else 1
        window_end = min(self.in_flight, default=self.sequence) + window
        for payload in itertools.islice(self.payloads, window_end - self.sequence):
            packet = LINK_RELIABLE + struct.pack("<I", self.sequence) + payload
            self.in_flight[self.sequence] = InFlight(packet, LINK_WAITS_S, now)
            self.sequence += 1
        due = []
        for number, flight in self.in_flight.items():
            if now < flight.due:
                continue
            if not flight.waits:
                self.is_closed = True
            if self.is_closed or not self.allow(len(flight.packet) + UDP_HEADER_BYTES, now):
                break
            wait_s, *waits = flight.waits
            self.in_flight[number] = InFlight(flight.packet, waits, now + wait_s)
            due.append(flight.packet)
        return due


def split_cluster(data):
    """Yield the packets in a datagram, in order. A datagram that is not a cluster is one packet."""
    if data[:2] != LINK_CLUSTER:
        yield data
        return
    position = len(LINK_CLUSTER)
    while position < len(data):
        start = position + 1
        position = start + data[position]
        yield data[start:position]


class ZoneListLink(SubSpaceLink):
    """The player's end of the exchange by which SubSpaceList sends its list.

    `zones` holds the bytes of the list received so far, `total` is the size of the whole list."""

    total = LIST_BYTES

    def __init__(self, now, payloads):
        super().__init__(now, payloads)
        self.zones = bytearray()

    def on_packet(self, packet, now):
        if packet[:2] == LINK_LIST_PIECE:
            self.total = min(self.total, int.from_bytes(packet[2:6], "little"))
            self.zones += packet[6:]


class SubSpaceList(UdpProtocol):
    """SubSpace's list port: one exchange with each peer, by the protocol of SubSpaceLink.

        > 00 01 key[4] VV 00                    connect, VV 01 or 11
        < 00 02 key[4]                          the same key: no encryption
        > 00 03 00000000 01 minplayers[4]       request for zones with so many players
        < 00 04 00000000
        < 00 03 seq[4] 00 0a total[4] …         at most 480 bytes of the list; and so on
        > 00 04 seq[4]
        > 00 07                                 disconnect, often twice

    The list is `01` and for each zone
    ip[4] port.u16 players.u16 scores.u16 version.u32 name[64] description NUL.

    Nothing in the exchange proves the peer's address. So all exchanges together share one bucket
    for surplus bytes, that is, those that are sent beyond those that were received.
    """

    datagram_bytes = 520                # no end sends longer ones

    def __init__(self, room):
        self.room = room
        self.links = Turns(MAX_LIST_LINKS)      # ListLinks by peer

    def datagram(self, data, peer, now):
        source, _ = peer
        link = self.links.get(peer)
        if data[:2] == LINK_CONNECT:
            key, version = data[2:6], data[6:]
            if version not in LINK_VERSIONS:
                raise Malformed("connect: not 00 01 key[4] and version 01 or 11")
            link = ListLink(self.room, source, now)
            replies = [LINK_CONNECT_ANSWER + key]
        elif link is None:
            raise Malformed("a packet outside an exchange")
        else:
            replies = link.receive(data, now)
        # The exchange moves to the end, where those are that leave last. As many as 64 players may
        # ask at once from behind one router
        self.links.add(source, peer, link, 64)
        return [(reply, peer) for reply in replies]

    def tick(self, now):
        replies = []
        for peer, link in list(self.links.things.items()):
            for packet in link.tick(now):
                replies.append((packet, peer))
            if link.is_closed:
                self.links.pop(peer)
        return replies


class ListLink(SubSpaceLink):
    """The master's end of a list exchange. It answers list requests: `01 minplayers[4]`."""

    def __init__(self, room, address, now):
        super().__init__(now)
        self.room = room
        self.address = address

    def allow(self, size, now):
        return self.room.rules.allow_surplus("list", self.address, size, now)

    def on_packet(self, packet, now):
        """Begin to send the list, unless one is being sent, or the address asks too often."""
        is_request = packet[:1] == ZONE_LIST_REQUEST and len(packet) == 5
        if not is_request or self.in_flight:
            return
        limiter = self.room.rules.udp_request_limiter
        if limiter.allow(self.address, now):
            min_players = int.from_bytes(packet[1:], "little")
            zones = self.room.rendered("zones", now)
            self.payloads = list_pieces(zones, min_players)


def list_pieces(zones, min_players):
    """Yield the packets with the list of those zones that have so many players.

    Each packet is built when it can be sent, because the lists of thousands of peers would take
    much memory."""
    total = len(ZONE_LIST_TYPE)
    for players, entry in zones:
        if players >= min_players:
            total += len(entry)
    head = LINK_LIST_PIECE + struct.pack("<I", total)
    unsent = ZONE_LIST_TYPE
    for players, entry in zones:
        if players >= min_players:
            unsent += entry
        while len(unsent) > LINK_CHUNK_BYTES:
            yield head + unsent[:LINK_CHUNK_BYTES]
            unsent = unsent[LINK_CHUNK_BYTES:]
    yield head + unsent


# --- AIO -----------------------------------------------------------------------------------------

# CONNECT of the binary dialect, with id 0. It is also the greeting of the framed dialect
AIO_CONNECTED = b"\1\0\0\0\0"
# The text greeting is sent after this time of silence, because clients of that dialect wait for it
AIO_GREETING_S = 1.2
# For the list of another master. Those that speak the text dialect answer at once
AIO_TEXT_S = 5.0
# The master waits this long for a newline after `12#%`, which may come in a packet of its own
AIO_NEWLINE_S = 0.2
# The only entry of a list without servers, as in the document
AIO_NOBODY = Server(
    "aio", "127.0.0.1", 27010, source="", now=0.0, lifetime=0.0,
    name="No servers currently online :pepe:",
    description="There are currently no available servers... Maybe host your own or wait later?:O")


def aio_counted_name(server):
    """Return the name with the number of players, as it is published in the text dialect."""
    if server.players or server.max_players:
        return "%s [%d/%d]" % (server.name, server.players, server.max_players)
    return server.name


def aio_listed_name(server):
    """Return the name in the lists of the older dialects. Framed servers, which have a version,
    publish it without the number of players."""
    return server.name if server.version else aio_counted_name(server)


def aio_escape(text):
    """Replace `#` and `%` in a text, because they end fields and messages of the text dialect."""
    return text.replace("#", "<num>").replace("%", "<percent>")


def aio_unescape(field):
    return field.replace(b"<num>", b"#").replace(b"<percent>", b"%")


# An integer in the binary dialect has one of these forms: size in bytes, lowest value, bits of the
# tag, tag. The difference to the lowest value is shifted left by the bits of the tag, and the tag
# is put there; the lowest byte comes first. So 8080 is 427c, and 27010 is 144801
AIO_INTEGERS = (1, 0, 1, 0b1), (2, 0x80, 2, 0b10), (3, 0x4080, 3, 0b100), (4, 0x204080, 3, 0b000)


def aio_integer(number):
    """Encode an integer, 0 or more, as the binary dialect does."""
    for size, lowest, tag_bits, tag in reversed(AIO_INTEGERS):
        if number >= lowest:
            tagged = ((number - lowest) << tag_bits) | tag
            return tagged.to_bytes(size, "little")
    raise ValueError("a negative integer cannot be encoded")


def read_aio_integer(data):
    """Decode the integer at the beginning of some bytes. Return its value and its size in bytes.

    If there are fewer bytes than that, the integer is incomplete, and the value is wrong."""
    first_byte = int.from_bytes(data[:1], "little")
    for size, lowest, tag_bits, tag in AIO_INTEGERS:
        if first_byte & ((1 << tag_bits) - 1) == tag:   # this is true of exactly one form
            break
    tagged = int.from_bytes(data[:size], "little")
    return lowest + (tagged >> tag_bits), size


def aio_string16(text):
    """Encode a text as a string16: its length in bytes as u16, and the text."""
    encoded = text.encode("utf-8", "replace")
    return struct.pack("<H", len(encoded)) + encoded


def split_string16(data):
    """Return the text of the string16 at the beginning of some bytes, in bytes, and what follows.

    If the data end too early, the text is incomplete."""
    end = 2 + int.from_bytes(data[:2], "little")
    return data[2:end], data[end:]


def inflate(data, limit):
    """Decompress one zlib stream.

    Raise Malformed if the stream is damaged, or if the result would be longer than `limit` bytes. A
    longer one is not decompressed to its end, so that it cannot fill the memory."""
    stream = zlib.decompressobj()
    try:
        # The additional byte lets zlib notice the end of a stream of exactly `limit` bytes
        unpacked = stream.decompress(data, limit + 1)
    except zlib.error as error:
        raise Malformed("zlib: %s" % error) from None
    if not stream.eof:
        raise Malformed("zlib: cut off, or more than %d bytes" % limit)
    return unpacked


AIO_FRAME_HEAD_BYTES = 4


def aio_frame(payload):
    """Return a frame with this payload: length.u24 compression.u8 payload."""
    compression = b"\0"
    if len(payload) > 1200:         # it would not fit one packet
        compression = b"\1"
        payload = zlib.compress(payload, GZIP_LEVEL)
    return len(payload).to_bytes(3, "little") + compression + payload


def aio_frame_bytes(data):
    """Return the size of the frame that begins with these data, which may be fewer."""
    return AIO_FRAME_HEAD_BYTES + int.from_bytes(data[:3], "little")


def aio_payload(frame, most_bytes):
    """Return the payload of a frame, decompressed to at most `most_bytes`. Raise Malformed."""
    head, payload = frame[:AIO_FRAME_HEAD_BYTES], frame[AIO_FRAME_HEAD_BYTES:]
    if head.endswith(b"\0"):
        return payload
    return inflate(payload, most_bytes)


class AioText:
    r"""The text dialect, which clients and servers of 2018 to 2022 speak.

        < %1#5#%                        greeting, after a silence: the peer's id
        > 13#NAME#DESC#27010#%\n        publish, or the document's 13#NAME#DESC#203.0.113.7#27010#%
        < %SUCCESS#13#%                 or nothing, if the server is refused
        > SET_IP#203.0.113.7#%\n        its public address, from a server on this machine or network
        < %SUCCESS#SET_IP#%
        > KEEPALIVE#%\n                 < %SUCCESS#KEEPALIVE#%
        > 12#%\n                        < %12#NAME#DESC#IP#PORT#NAME#...#%
        > 12#%                          < %12#0#NAME#DESC#IP#PORT#1#NAME#...#%
        > NEWS#%\n                      < %NEWS#TEXT#%

    The examples in the document, which have no newline, are answered as they are printed there. The
    `%` before every reply ends what the peer takes for its first message, the five bytes of
    CONNECT. The texts of servers may contain a `%`, so a message ends only at `#%`."""

    end = b"#%"
    confirmation = b"SUCCESS#13#%"
    keepalive = b"KEEPALIVE#%\n"

    def size(self, session, now):
        """As in MessageSession. A newline after `12#%` is a part of the message."""
        session.buffer = session.buffer.lstrip(b"\r\n")
        message, end, following = session.buffer.partition(self.end)
        if not end:
            return None
        size = len(message) + len(end)
        if message != b"12":
            return size
        if following[:1].isspace():
            return size + 1
        no_newline_follows = following or now >= session.message_began + AIO_NEWLINE_S
        return size if no_newline_follows else None

    def answer(self, session, message, now):
        content, _, newline = message.partition(self.end)
        kind, *fields = content.split(b"#")
        if kind == b"12":
            return session.rendered("text" if newline else "document", now)
        if kind == b"13":
            return self.publish(session, fields, now)
        if kind == b"NEWS":
            return session.room.text_news
        if kind == b"SET_IP":
            session.claim_address(b"#".join(fields))
            return b"%SUCCESS#SET_IP#%"
        if kind == b"KEEPALIVE":
            session.keep_alive(now)
            return b"%SUCCESS#KEEPALIVE#%"
        # A line break may mean an HTTP request: a web page can let a browser send any body it likes
        if b"\n" in kind:
            raise Malformed("a line break within a message")
        # These programs send further messages, which are meant for game servers
        return b""

    def publish(self, session, fields, now):
        """Answer a publish. In messages of the document an address precedes the port."""
        if len(fields) not in (3, 4):
            raise Malformed("publish: not name, description, address (may be left out), port")
        *texts, port = map(aio_unescape, fields)
        if not re.fullmatch(rb"[0-9]{1,5}", port):
            raise Malformed("publish: the port is no number")
        reason = session.publish_texts(texts, int(port), now)
        return b"" if reason else b"%SUCCESS#13#%"

    # The lists, whose two forms share the entries of servers

    @staticmethod
    def entry(server):
        # Clients do not replace escapes in names, so full-width characters stand for `#` and `%`
        name = aio_listed_name(server)
        name = name.replace("#", "\uff03").replace("%", "\uff05")
        description = aio_escape(server.description)
        entry = "%s#%s#%s#%d#" % (name, description, server.address, server.port)
        return entry.encode("utf-8")

    def list(self, entries, now):
        return b"%12#" + b"".join(entries or [self.entry(AIO_NOBODY)]) + b"%"

    def document_list(self, entries, now):
        numbered = []
        for number, entry in enumerate(entries or [self.entry(AIO_NOBODY)]):
            numbered += [b"%d#" % number, entry]
        return self.list(numbered, now)

    def fetch(self):
        data = yield from received_until(self.list_in, b"12#%\n", wait_s=AIO_TEXT_S)
        content = self.list_in(data)
        if content is None:
            raise Malformed("no list came before the end")
        if content.count(b"#") >= 4 * LIST_SERVERS:
            raise Malformed("more than %d servers" % LIST_SERVERS)
        fields = content.split(b"#")
        servers = []
        for start in range(0, len(fields) - 3, 4):
            name, description, address, port = map(aio_unescape, fields[start:start + 4])
            if not re.fullmatch(b"[0-9]{1,5}", port) or int(port) > MAX_PORT:
                raise Malformed("port: %a" % port.decode("latin-1"))
            if not name.startswith(b"No servers currently online"):
                servers.append({
                    "name": decode_utf8(name, TEXT_CHARACTERS),
                    "description": decode_utf8(description, TEXT_CHARACTERS),
                    "address": decode_utf8(address),
                    "port": int(port),
                })
        return servers

    @staticmethod
    def list_in(data):
        """Return the entries of the list in what a master has sent, or None if it is incomplete.

        Greetings, which are other numbered messages, may precede the list."""
        head = re.search(rb"(?:^|[%\0\r\n])12#", data)
        if not head or not data.endswith(b"#%"):
            return None
        return data[head.end():-len(b"#%")]

    # What announces a game server

    @staticmethod
    def publication(server):
        fields = "13#"
        for text in aio_counted_name(server), server.description:
            # A "#" separates fields, and a "%" at the beginning of a field ends the message
            text = text.replace("#", "<num>")
            fields += text.lstrip("%") + "#"
        return fields.encode("utf-8") + b"%d#%%\n" % server.port

    def refusal(self, received):
        """Masters of this dialect say nothing if they refuse a server."""
        return ""


class AioBinary:
    r"""The binary dialect, which is the document taken literally.

        < 01 00000000                               CONNECT, id
        > 0c                                        ASKFORSERVERS
        < 0c 0000 "NAME\0" "DESC\0" "203.0.113.7\0" 144801 0100 …
                                                    for each server index.u16, texts, port
        > 0d "NAME\0" "DESC\0" "203.0.113.7\0" 144801
                                                    PUBLISH, port 27010; no answer

    Ports are integers as in AIO_INTEGERS."""

    ask, publish = b"\x0c", b"\x0d"

    def size(self, session, now):
        kind = session.buffer[:1]
        if kind == self.ask:
            return len(kind)
        if kind != self.publish:
            raise Malformed("type %d is neither ASKFORSERVERS nor PUBLISH" % ord(kind))
        *texts, port = session.buffer.split(b"\0", 3)
        if len(texts) < 3:
            return None
        _, port_bytes = read_aio_integer(port)
        return len(session.buffer) - len(port) + port_bytes

    def answer(self, session, message, now):
        if message == self.ask:
            return session.rendered("binary", now)
        *texts, port_bytes = message[1:].split(b"\0", 3)
        port, _ = read_aio_integer(port_bytes)
        session.publish_texts(texts, port, now)
        return b""

    @staticmethod
    def entry(server):
        texts = "%s\0%s\0%s\0" % (aio_listed_name(server), server.description, server.address)
        return texts.encode("utf-8") + aio_integer(server.port)

    def list(self, entries, now):
        numbered = [self.ask]
        for number, entry in enumerate(entries or [self.entry(AIO_NOBODY)]):
            numbered += [number.to_bytes(2, "little"), entry]
        return b"".join(numbered)


# Types of messages of the framed dialect
AIO_NEWS, AIO_LIST, AIO_PUBLISH, AIO_KEEPALIVE, AIO_DONE, AIO_REFUSED = (
    b"\1", b"\2", b"\3", b"\4", b"\5", b"\6")


class AioFramed:
    """The framed dialect, which clients and servers since 2022 speak.

    A frame is length.u24 compression.u8 (0 none, 1 zlib) payload.

        < 01000000 00                   connected
        > 03000000 03 8269              publish, port 27010
        < 02000000 05 03                done, or 06 03 reason.string16
        > 01000000 04                   keepalive
        < 02000000 05 04                or 06 04 reason.string16
        > 01000000 02                   list
        < … 02 n.u16 {ip.string8 port.u16}*
        > 01000000 01                   news
        < … 01 text.string16

    Peers read a frame with one recv(4) and one recv(length), and lose a frame that arrives in two
    pieces. So each frame is written in one call, and a long one is compressed to fit."""

    keepalive = aio_frame(AIO_KEEPALIVE)
    confirmation = aio_frame(AIO_DONE + AIO_PUBLISH)

    def size(self, session, now):
        return aio_frame_bytes(session.buffer)

    def answer(self, session, message, now):
        payload = aio_payload(message, session.message_bytes)
        kind, content = payload[:1], payload[1:]
        if kind == AIO_NEWS:
            return session.room.framed_news
        if kind == AIO_LIST:
            return session.rendered("framed", now)
        if kind == AIO_PUBLISH and len(content) >= 2:
            port = int.from_bytes(content[:2], "little")
            reason = session.publish(port, {}, now)
        elif kind == AIO_KEEPALIVE:
            session.keep_alive(now)
            reason = "" if session.server else "nothing is published on this connection"
        else:
            raise Malformed("type %s, %d bytes" % (kind.hex(), len(payload)))
        if reason:
            return aio_frame(AIO_REFUSED + kind + aio_string16(reason))
        return aio_frame(AIO_DONE + kind)

    @staticmethod
    def entry(server):
        address = server.address.encode("ascii")
        return bytes([len(address)]) + address + struct.pack("<H", server.port)

    @staticmethod
    def list(entries, now):
        return aio_frame(AIO_LIST + struct.pack("<H", len(entries)) + b"".join(entries))

    def fetch(self):
        begin = len(AIO_CONNECTED)      # the greeting

        def is_complete(data):
            head = data[begin:begin + AIO_FRAME_HEAD_BYTES]
            return len(data) >= begin + aio_frame_bytes(head)

        most_bytes = 48 * LIST_SERVERS  # an IPv6 address as text, its length and the port
        data = yield from received_until(is_complete, aio_frame(AIO_LIST), most_bytes)
        if not is_complete(data):
            raise Malformed("no list came before the end")
        payload = aio_payload(data[begin:], most_bytes)
        if payload[:1] != AIO_LIST:
            raise Malformed("type: not a list")
        servers = []
        end = 3
        for _ in range(int.from_bytes(payload[1:end], "little")):
            start = end + 1
            port_at = start + int.from_bytes(payload[end:start], "little")
            end = port_at + 2
            servers.append({
                "address": decode_utf8(payload[start:port_at]),
                "port": int.from_bytes(payload[port_at:end], "little"),
            })
        if end > len(payload):
            raise Malformed("a list that is cut off")
        return servers

    @staticmethod
    def publication(server):
        """Masters query the port by UDP for everything else."""
        return aio_frame(AIO_PUBLISH + struct.pack("<H", server.port))

    def refusal(self, received):
        """Return the reason in what a master has sent, if it refuses the publication, or ""."""
        _, _, refused = received.partition(AIO_REFUSED + AIO_PUBLISH)
        if len(refused) < 2 + int.from_bytes(refused[:2], "little"):
            return ""                   # the rest will come
        reason, _ = split_string16(refused)
        return decode_utf8(reason) or "no reason given"


AIO_TEXT, AIO_BINARY, AIO_FRAMED = AioText(), AioBinary(), AioFramed()


class AioSession(MessageSession):
    """The connection of a game server or a player, in any dialect."""

    idle_s = 330.0                  # without a listed server. Clients send something every 270 s
    dialect: Any = None             # None before the peer's first byte
    is_greeted = False              # in the text dialect
    server: Optional[Server] = None     # the listed server that this connection keeps in the list
    claimed_address = ""            # of the game server, if the rules believe it
    published: Any = None           # the port and attributes of the last publish that was accepted
    kept_alive_at = math.inf        # the time of the last keepalive

    def opened(self, now):
        # Two dialects begin with it, and peers of the text dialect ignore it
        return AIO_CONNECTED

    def size(self, now):
        if self.dialect is None:
            first_byte = self.buffer[:1]
            if first_byte in (AioBinary.ask, AioBinary.publish):
                self.dialect = AIO_BINARY
            elif first_byte.isalnum():
                self.dialect = AIO_TEXT
            # A frame begins with the lowest byte of its length. The messages that a peer can begin
            # with have up to 14 bytes
            elif first_byte < b" ":
                self.dialect = AIO_FRAMED
            else:
                raise Malformed("the first byte, %s, is of no dialect" % first_byte.hex())
        return self.dialect.size(self, now)

    def message(self, message, now):
        return self.dialect.answer(self, message, now)

    def ended(self, now):
        self.message_began -= AIO_NEWLINE_S     # no newline can follow any more
        return self.receive(b"", now)

    def tick(self, now):
        is_waiting = self.dialect is None and not self.is_greeted
        if is_waiting and now >= self.message_began + AIO_GREETING_S:
            self.is_greeted = True
            return b"%1#0#%"
        if self.server and self.registry.has(self.server):
            self.registry.confirm(self.server, now)
            # Keepalives come every 20 to 40 s
            self.done = now >= self.kept_alive_at + 120.0
        else:
            super().tick(now)
        # A `12#%` in the buffer is answered if no newline has come within AIO_NEWLINE_S
        return self.receive(b"", now)

    def closed(self, now):
        self.registry.remove_own(self.server)
        self.room.gone(self.server)

    # Requests in messages

    def claim_address(self, claimed):
        """Note the address, in bytes, that the game server claims to have, if the rules believe it.

        The server is listed there from its next publish or keepalive on."""
        address = claimed.decode("ascii", "replace").strip()
        if self.rules.believes_claim(self.address, address):
            self.claimed_address = address

    def listed_at(self, port):
        return self.game, self.rules.listed_address(self.address, self.claimed_address), port

    def keep_alive(self, now):
        """Note a keepalive. Publish the server again if it is not listed any more: its address may
        have changed, it was banned, or a newer connection has published it and has ended."""
        self.kept_alive_at = now
        if self.published:
            port, fields = self.published
            if self.registry.get(*self.listed_at(port)) is None:
                self.publish(port, fields, now)

    def publish_texts(self, texts, port, now):
        """Publish a server by its name, description and perhaps address, in bytes. As in publish().

        A name may end with the number of players, such as " [3/16]"."""
        name, description, *address = texts
        self.claim_address(b"".join(address))
        published_name = decode_legacy(name)
        players = max_players = 0
        counter = re.search(r"(?:^| )\[([0-9]{1,5})/([0-9]{1,5})\]$", published_name)
        if counter:
            published_name = published_name[:counter.start()]
            players, max_players = map(int, counter.groups())
        fields = {
            "name": published_name,
            "version": "",
            "description": decode_legacy(description, TEXT_CHARACTERS),
            "players": clamp(players),
            "max_players": clamp(max_players),
        }
        return self.publish(port, fields, now)

    def publish(self, port, fields, now):
        """List the game server of this connection at this port, with these attributes of Server.

        If this connection had listed a server at another address or port, that server leaves the
        list. Return "", or the reason why the server is refused."""
        room = self.room
        key = self.listed_at(port)
        listed = self.registry.get(*key)
        if listed is not self.server:
            self.registry.remove_own(self.server)
            room.gone(self.server)
        _, address, _ = key
        name = listed.name if listed else endpoint_text(address, port)
        name = fields.get("name") or name
        try:
            if self.server is None:
                room.check_room(self.address)
            server = room.list_own(
                self.address, port, {**fields, "name": name, "verified": "connection"}, now,
                math.inf, self.claimed_address)
        except Refused as refused:
            self.registry.record_outcome(
                self.address, self.game, port, refused.outcome, now, str(refused))
            return str(refused)
        self.published = port, fields
        if self.server is not server:
            room.gone(server)           # it may have had another connection
            room.sessions[server] = self
            room.shares.take(self.address)
            self.server = server
            self.kept = True
            # If another list names the server, it has been polled until now
            room.poller.remove(room.poller.find(room, self.address, port))
            if self.dialect is AIO_FRAMED:
                # The server is queried at the address that its connection comes from. If it is
                # listed at another address, behind a router, this master may not reach it there
                target = room.poller.add(room, self.address, port, ANNOUNCED)
                target.server = server
        return ""


class Aio(PolledGame, TcpProtocol):
    """AIO, three generations on one port. Documents: "AIO masterserver protocol"; captures of the
    two later generations.

    The master sends CONNECT first and, if the peer stays silent, the text greeting. The first byte
    of the peer tells its dialect: 0c or 0d means the binary one, a digit or a letter the text one,
    and any other control character the framed one. A server is listed for as long as its connection
    lasts. If it connects again, it belongs to the newer connection.

    A framed server is queried for its name and players by UDP on its game port:

        < 00                                            the query
        > zlib of: 00 name.string16 desc.string16 players.u32 max.u32 version.u16

    A framed server that does not answer stays listed, as ADDRESS:PORT, because it is connected.
    Without a connection, only servers that were found in another list are queried and listed.
    The query cannot carry a nonce. So somebody who forges the server's address while a query is
    open can change the shown name until the next answer. This is the one exception to the rule that
    unproven packets do not change what players see."""

    game = "aio"
    title = "AIO"
    settings = (
        Setting("aio.port", "27011", read_port,
                "TCP port for servers and clients of every generation.", live=False),
        Setting("aio.news", "", read_text, "The text that players read under News."),
        Setting("aio.news_file", "", read_without_url,
                "A text file to read the news from instead; read again when it changes.",
                reads_file=True),
    )
    ports = (Port("tcp"),)
    master_port = 27011
    contacts = (Contact(
        "In the settings of the game server, as its master server: host and port",
        "%(host)s\n%(port)d",
        "its UDP port"),)
    announced_over = fetched_over = "tcp"
    dialects = "text", "framed"
    answer_lifetime_s = None            # the connection decides when a server leaves
    answer_numbers = Form("<I I H", "players max_players version")

    def __init__(self, program=None):
        self.sessions = {}              # those that keep servers in the list, by Server
        self.shares = Shares()          # of their addresses
        super().__init__(program)

    def read(self, settings):
        super().read(settings)
        # Half of all connections is for players and browsers. So no server has to leave for them
        connections = settings["limits.connections_total"]
        self.max_servers = max(1, connections // 2)
        news = settings.contents.get("aio.news_file") or settings["aio.news"]
        # A string16 has 65,535 bytes at most, and a character up to 4
        news = news.strip()[:16000]
        text_news = "%%NEWS#%s#%%" % aio_escape(news)
        self.text_news = text_news.encode("utf-8", "replace")
        framed_news = AIO_NEWS + aio_string16(news)
        self.framed_news = aio_frame(framed_news)

    def session(self, address, now):
        return AioSession(self, address, now)

    def lists(self):
        return {
            "text": ServerList(AIO_TEXT.entry, join=AIO_TEXT.list),
            "document": ServerList(AIO_TEXT.entry, join=AIO_TEXT.document_list),
            "binary": ServerList(AIO_BINARY.entry, join=AIO_BINARY.list),
            "framed": ServerList(AIO_FRAMED.entry, join=AIO_FRAMED.list),
        }

    # Connected servers

    def check_room(self, address):
        """Raise Refused if no further connection from this address may keep a server listed. A
        network may have an eighth of them, so that a few networks do not keep out all others."""
        at_most = "this master keeps connections to at most %d servers"
        if len(self.sessions) >= self.max_servers:
            raise Refused("limit", at_most % self.max_servers)
        limit = max(1, self.max_servers // 8)
        if self.shares.full(address, limit, site_sources=1) and not self.rules.exempts(address):
            raise Refused("limit", at_most % limit + " of one network")

    def gone(self, server):
        """Separate a server from its connection, and stop polling it.

        It has left the list, or belongs to a newer connection from now on."""
        session = self.sessions.pop(server, None)
        if session is not None:
            self.shares.take(session.address, -1)
            target = self.poller.find(self, session.address, server.port)
            self.poller.remove(target)
            session.server = None
            session.kept = False

    def resume(self, server):
        if server.found_at:             # the others have to connect again
            super().resume(server)

    @classmethod
    def knows_players(cls, server):
        # A framed server is listed before it is queried
        return bool(server.version or server.max_players)

    # Queries to framed servers

    def question(self, target):
        return b"\0"

    def read_answer(self, target, data):
        # Descriptions have no limit, but only their first TEXT_CHARACTERS are shown
        payload = inflate(data, 16384)
        if payload[:1] != b"\0":
            raise Malformed("type: not an answer")
        name, following = split_string16(payload[1:])
        description, numbers = split_string16(following)
        answer = self.answer_numbers.read(numbers)
        fields = {
            "name": decode_legacy(name),
            "description": decode_legacy(description, TEXT_CHARACTERS),
            "players": clamp(answer.players),
            "max_players": clamp(answer.max_players),
            "version": str(answer.version),
        }
        if self.program:
            # A connected server does not leave because of a name that somebody may have forged
            self.registry.check_rules(target.address, target.address, target.port, fields["name"])
        return fields

    def listed_server(self, target):
        if target.server is None:
            return super().listed_server(target)
        return target.server if self.registry.has(target.server) else None

    def list_polled(self, target, fields, now):
        if target.server is not None:
            fields["verified"] = "connection"
            if not fields["name"]:
                fields["name"] = target.server.name
        return super().list_polled(target, fields, now)

    def poll_missed(self, target, now):
        if target.server is None:
            super().poll_missed(target, now)
        else:                           # it is still connected, and so stays listed and polled
            self.report_silence(target, now)

    # What our own `announce` and `list` speak

    def default_dialect(self, fields):
        return "text" if fields.get("name") else "framed"

    def spoken(self):
        return AIO_TEXT if self.dialect == "text" else AIO_FRAMED

    def fetch(self):
        return self.spoken().fetch()

    def announce(self, server):
        """Keep a server announced over one connection.

        In the text dialect a master that refuses a server does not say so. The reason may end
        later, so the server is published again with each keepalive."""
        dialect = self.spoken()
        keepalive = b""
        state = ""
        while True:
            # Deployed servers send a keepalive every 20 to 40 s, and the master answers each
            publication = keepalive + dialect.publication(server)
            received = yield from replies(publication, 30.0, self.is_accepted, state)
            if not received:
                raise ConnectionError("the master has fallen silent")
            keepalive = dialect.keepalive
            state = ""
            if dialect.confirmation not in received:
                state = ("the master does not confirm it; has it banned this address, refused the "
                         "name, or run out of room?")

    def is_accepted(self, received):
        dialect = self.spoken()
        reason = dialect.refusal(received)
        if reason:
            raise MasterRefused(reason)
        return dialect.confirmation in received

    @property
    def answer(self):
        """What answers masters' queries; None in the text dialect, whose masters do not query."""
        return None if self.dialect == "text" else self.query_answer

    def query_answer(self, server, data):
        if data != self.question(None):
            raise Malformed("a query is the one byte 00")
        version = int(server.version) if server.version.isdecimal() else 0
        numbers = self.answer_numbers.write(
            players=server.players,
            max_players=server.max_players,
            version=clamp(version),
        )
        texts = aio_string16(server.name) + aio_string16(server.description)
        return zlib.compress(b"\0" + texts + numbers)


# --- Quake III -----------------------------------------------------------------------------------

# Every packet of the protocol begins with these bytes
QUAKE3_HEAD = b"\xff\xff\xff\xff"
QUAKE3_HEARTBEAT = QUAKE3_HEAD + b"heartbeat"
QUAKE3_GETINFO = QUAKE3_HEAD + b"getinfo "
QUAKE3_INFO = QUAKE3_HEAD + b"infoResponse\n"
QUAKE3_GETSTATUS = QUAKE3_HEAD + b"getstatus "
QUAKE3_STATUS = QUAKE3_HEAD + b"statusResponse\n"
QUAKE3_GETSERVERS = QUAKE3_HEAD + b"getservers"
QUAKE3_GETSERVERS_EXT = QUAKE3_HEAD + b"getserversExt"
QUAKE3_SERVERS = QUAKE3_HEAD + b"getserversResponse"
QUAKE3_SERVERS_EXT = QUAKE3_HEAD + b"getserversExtResponse"
# In a list, one of these two bytes precedes each address, and tells its size in bytes
QUAKE3_ADDRESS_BYTES = {b"\\": 4, b"/": 16}
QUAKE3_END = b"\\EOT\0\0\0"
QUAKE3_NUMBER = re.compile(rb"-?[0-9]{1,9}")
# The filters of a question that stand for one game type each, with the number of the game type
QUAKE3_GAMETYPES = {b"ffa": "0", b"tourney": "1", b"team": "3", b"ctf": "4"}
# The tags of heartbeats, with the gamename that each stands for. It is "" for DarkPlaces, which
# several games use: their servers give the gamename in the infoResponse. A server that shuts down
# sends a Flatline tag. Such a heartbeat may be forged, like any other, so the server is removed
# only if it no longer answers
QUAKE3_TAGS = {
    "DarkPlaces": "",
    "QuakeArena-1": "Quake3Arena",
    "Wolfenstein-1": "wolfmp",
    "EnemyTerritory-1": "et",
    "WolfFlatline-1": "wolfmp",
    "ETFlatline-1": "et",
}
# Some servers, such as those of Quake III 1.32, do not give their gamename. Their protocol number
# tells which game it is
QUAKE3_GAME_OF_PROTOCOL = {
    "66": "Quake3Arena", "67": "Quake3Arena", "68": "Quake3Arena",
    "50": "wolfmp", "59": "wolfmp", "60": "wolfmp",
    "72": "et", "80": "et", "83": "et", "84": "et"}
# The line of a player in a statusResponse: score, ping, and name. Some games add the team before or
# after the name
QUAKE3_PLAYER = re.compile(rb'^(-?[0-9]{1,9}) [-0-9 ]*"([^"\n]*)"', re.MULTILINE)
# While somebody looks at a server's page, it is asked who plays once in this time. If nobody does
# for twice as long, the answer is forgotten
QUAKE3_STATUS_S = 15.0
# The titles of well-known games, by their ids in the registry
QUAKE3_TITLES = {
    "quake3arena": "Quake III Arena",
    "openarena": "OpenArena",
    "xonotic": "Xonotic",
    "wolfmp": "Return to Castle Wolfenstein",
    "et": "Wolfenstein: Enemy Territory",
    "nexuiz": "Nexuiz",
    "warsow": "Warsow",
}
# What the numbers of game types mean in Quake III Arena and OpenArena
QUAKE3_MODES = {"0": "free for all", "1": "tournament", "3": "team deathmatch",
                "4": "capture the flag"}
# The keys of an infoResponse that are used, each with the text that stands for a missing value, and
# the pattern of a right one. A value of more than 255 bytes counts as missing
QUAKE3_FIELDS = {
    b"protocol": ("", "0|-?[1-9][0-9]{0,8}"),
    b"clients": ("", "-?[0-9]{1,9}"),
    b"sv_maxclients": ("", "0*[1-9][0-9]{0,8}"),
    b"gametype": ("0", r"\S+"),
    # Nobody could ask for a gamename with a blank, because blanks separate the words of a question
    b"gamename": (None, r"\S+"),
    b"hostname": ("", "(?s).*"),
    b"mapname": ("", "(?s).*"),
    b"g_humanplayers": ("", "(?s).*"),
}


def read_quake3_info(data):
    r"""Return the challenge in an infoResponse, and a tuple with the values of QUAKE3_FIELDS, in
    that order.

    The values are bytes, or None for a missing one. An infoResponse consists of `\key\value` pairs;
    if a key occurs several times, its last value counts. Raise Malformed if it is none."""
    if not data.startswith(QUAKE3_INFO):
        raise Malformed("no infoResponse")
    pieces = data.split(b"\\")         # the first one is QUAKE3_INFO
    keys = pieces[1::2]
    pairs = dict(zip(keys, pieces[2::2]))
    challenge = pairs.get(b"challenge", b"")
    return challenge, tuple(map(pairs.get, QUAKE3_FIELDS))


def quake3_name(coloured):
    """Return a name without its colours: "^1" or, in DarkPlaces, "^x" and three hexadecimals."""
    name = re.sub(r"\^(?:x[0-9a-fA-F]{3}|[0-9])", "", coloured)
    return clean(name)                  # now it may begin or end with a blank


# The cache makes a poll's answer that repeats the last one three times as fast. An entry has 2 kB
@functools.lru_cache(maxsize=4096)
def quake3_attributes(values, otherwise):
    """Return the attributes of Server in the values that read_quake3_info() has returned.

    If they do not tell the gamename, the protocol number does, or else it is `otherwise`. Raise
    WrongAnswer if that is "" too, or if a value is wrong."""
    info: Dict[bytes, Any] = {}
    for key, value in zip(QUAKE3_FIELDS, values):
        text, pattern = QUAKE3_FIELDS[key]
        if value is not None and len(value) <= 255:
            text = decode_legacy(value)
        if text is not None and not re.fullmatch(pattern, text):
            raise WrongAnswer("%s: %a" % (key.decode(), text))
        info[key] = text
    protocol = info[b"protocol"]
    gamename = info[b"gamename"] or QUAKE3_GAME_OF_PROTOCOL.get(protocol, otherwise)
    if not gamename:
        raise WrongAnswer(
            "gamename: missing, and protocol %s does not belong to a known game" % protocol)
    return {
        "name": quake3_name(info[b"hostname"]),
        "map": info[b"mapname"],
        "mode": info[b"gametype"],
        "version": protocol,
        "players": int(info[b"clients"]),               # all players, bots included
        "max_players": min(int(info[b"sv_maxclients"]), PLAYERS_MAX),
        "details": {"gamename": gamename, "people": info[b"g_humanplayers"]},
    }


class Quake3Status(NamedTuple):
    """Who plays on a server whose page somebody looks at."""

    server: Server
    asked_at: float                     # seconds of the monotonic clock
    challenge: bytes                    # of the last getstatus; b"" once that is answered
    players: Sequence[Player]


def quake3_game_id(gamename, protocol=""):
    """Return the id of a game in the registry, such as "quake3arena" for "Quake3Arena"."""
    # Ids stand in addresses of pages, so "-" replaces characters that would have to be escaped
    game = re.sub("[^a-z0-9_.-]", "-", gamename.lower())[:32]
    if game == "quake3arena" and protocol == "71":      # it uses the gamename of Quake III
        return "openarena"
    return game


class Quake3Question(NamedTuple):
    """A player's program asks for the servers of a game."""

    is_extended: bool                   # True: a getserversExt, whose answer has IPv6, too
    gamename: str                       # "" if a getservers has no gamename
    protocol: str                       # a number
    gametype: str                       # "" for any
    wants: FrozenSet[bytes]             # of "empty", "full", "ipv4" and "ipv6"


def read_quake3_question(command, words):
    """Return the Quake3Question in a packet, given as its first word and the others, in bytes.

    There are two forms:

        getservers [gamename] protocol [filter ...]
        getserversExt gamename protocol [filter ...]

    Raise Malformed if the packet begins with neither word, or has no protocol number."""
    is_extended = command == QUAKE3_GETSERVERS_EXT
    if not is_extended and command != QUAKE3_GETSERVERS:
        raise Malformed("no heartbeat, infoResponse, getservers or getserversExt")
    gamename = b""
    protocol, *filters = words or [b""]
    if is_extended or not QUAKE3_NUMBER.fullmatch(protocol):
        gamename = protocol
        protocol, *filters = filters or [b""]
    if not QUAKE3_NUMBER.fullmatch(protocol):
        raise Malformed("a question without the number of a protocol")
    gametype = ""                       # the last filter that names one counts
    for word in filters:
        if word.startswith(b"gametype="):
            _, _, number_or_name = word.partition(b"=")
            gametype = decode_legacy(number_or_name)
        elif word in QUAKE3_GAMETYPES:
            gametype = QUAKE3_GAMETYPES[word]
    wants = {b"empty", b"full"}.intersection(filters)
    families = {b"ipv4", b"ipv6"}
    if is_extended:
        wants |= families.intersection(filters) or families
    else:
        wants.add(b"ipv4")              # the answer has no room for IPv6 addresses
    return Quake3Question(
        is_extended, decode_legacy(gamename), protocol.decode(), gametype, frozenset(wants))


class Quake3Entry(NamedTuple):
    """A listed server, reduced to what the answers to questions need."""

    gamename: str
    protocol: str
    gametype: str
    needs: FrozenSet[bytes]             # only questions that want all of these get it
    packed: bytes                       # the address and port as in a list, after "\\" or "/"


def quake3_entry(server):
    gamename = server.details.get("gamename", "")
    address = ipaddress.ip_address(server.address)
    separator, needs = b"\\", {b"ipv4"}
    if address.version == 6:
        separator, needs = b"/", {b"ipv6"}
    # Players of Enemy Territory get empty and full servers even if they do not ask for them
    if gamename != "et":
        if server.players == 0:
            needs.add(b"empty")
        elif server.players == server.max_players:
            needs.add(b"full")
    packed = separator + address.packed + struct.pack(">H", server.port)
    return Quake3Entry(gamename, server.version, server.mode, frozenset(needs), packed)


def quake3_packets(question, entries):
    """Return the packets with those of the Quake3Entry records that pass a question's filters."""
    head = QUAKE3_SERVERS_EXT if question.is_extended else QUAKE3_SERVERS
    pieces = [entry.packed for entry in entries if entry.needs <= question.wants]
    # Only the last packet has this mark, so that players' programs know that the list is complete
    pieces.append(QUAKE3_END)
    packets = []
    packet = head
    for piece in pieces:
        # As in dpmaster. Packets of this size need not be fragmented
        if len(packet) + len(piece) > 1400:
            packets.append(packet)
            packet = head
        packet += piece
    packets.append(packet)
    return packets


def read_quake3_packet(data):
    """Return the servers in one packet of a list, as dicts, and whether it is the last packet."""
    offset = 0
    for head in (QUAKE3_SERVERS_EXT, QUAKE3_SERVERS):
        if data.startswith(head):
            offset = len(head)
    if not offset:
        raise Malformed("a list begins with getserversResponse or getserversExtResponse")
    servers = []
    while offset < len(data) and data[offset:] != QUAKE3_END:
        separator = data[offset:offset + 1]
        if separator not in QUAKE3_ADDRESS_BYTES:
            raise Malformed("a server begins with \\ or /, not with %a" % separator)
        port_offset = offset + 1 + QUAKE3_ADDRESS_BYTES[separator]
        address = data[offset + 1:port_offset]
        offset = port_offset + 2
        if len(data) < offset:
            raise Malformed("a list that is cut off")
        port = int.from_bytes(data[port_offset:offset], "big")
        servers.append({"address": str(ipaddress.ip_address(address)), "port": port})
    is_last = offset < len(data)
    return servers, is_last


class Quake3(PolledGame, UdpProtocol):
    r"""The protocol of Quake III Arena's master, as dpmaster speaks it for the whole family.

        > ffffffff "heartbeat QuakeArena-1\n"           every 5 minutes, and twice at shutdown
        < ffffffff "getinfo AbCdEf-_"                   the challenge: a MAC
        > ffffffff "infoResponse\n" \sv_maxclients\8\clients\0\mapname\oa_dm1\hostname\^1Red
          \protocol\71\gamename\Quake3Arena\challenge\AbCdEf-_
        > ffffffff "getservers 71 empty full\n"         or "getserversExt Xonotic 3 ipv4 ipv6"
        < ffffffff "getserversResponse" \ 7f000001 9060 \ "EOT" 000000
        < ffffffff "getserversExtResponse" { \ address[4] port.u16 | / address[16] port.u16 }*
                                                        numbers in network byte order
        < ffffffff "getstatus abcdef01"                 while somebody looks at the server's page
        > ffffffff "statusResponse\n" \challenge\abcdef01\sv_hostname\^1Red …
          "\n2 0 \"^1Red^7 Bot\"\n3 0 \"Major\"\n"

    A heartbeat may be forged, so the master only answers it with a getinfo. It lists the server
    once an infoResponse with the right challenge has come, and lists only what infoResponses say.

    The poller queries every listed server at the address and port that it sends from. If a listed
    server sends a heartbeat, it is polled at once, and removed if it does not answer, because the
    heartbeat may have been its farewell. It answers such a poll at the poller's own port, so forged
    packets that somebody sends to this port in its name cannot prevent the answer.

    Each gamename is a game of its own in the registry. The poller, /check and Server.room know the
    whole family as "quake3".
    """

    game = "quake3"
    title = "Quake III family"
    titles = QUAKE3_TITLES
    settings = (
        Setting("quake3.port", "27950", read_port,
                "UDP port for the servers and clients of Quake III Arena and its family.",
                live=False),
        Setting("quake3.games", "", list_reader(str.lower),
                "Games to list, such as xonotic, openarena; or !nexuiz for all but it; empty: "
                "all."),
        Setting("quake3.tags", "",
                list_reader(pattern_reader(r"\S+\s*=\s*\S+", "TAG = GAME"), "\n"),
                "Further heartbeat tags, one a line: TAG = GAME, as in Warsow = Warsow."),
        Setting("quake3.timeout", "900", number_reader(1, 86400, float),
                "Seconds without an answer after which a server is removed, or after missed "
                "polls."),
    )
    ports = (Port("udp"),)
    master_port = 27950
    # Only `dedicated 2`, which a server takes on its command line alone, lets it announce itself.
    # The first master is the game's own, which Debian's openarena-server sets itself
    contacts = (
        Contact(
            "Start the server so (Quake III: ioq3ded and another map)",
            "openarena-server \\\n"
            "    +set dedicated 2 \\\n"
            "    +set sv_master2 %(endpoint)s \\\n"
            "    +map oa_dm1",
            "UDP 27960",
            "OpenArena and Quake III",
            ("openarena", "quake3arena", "wolfmp", "et", "quake3")),
        Contact(
            "In server.cfg",
            'sv_public 1\nsv_masterextra1 "%(endpoint)s"',
            "UDP 26000",
            "Xonotic and Nexuiz",
            ("xonotic", "nexuiz", "quake3")))
    join_words = "Open the game's console (Shift+Esc or ~) and enter"
    join_line = "connect %(endpoint)s"
    announced_over = ""
    fetched_over = "udp"
    # Both words stand in a label of /metrics, which has no quotes and no backslashes
    list_options = (
        ListOption("gamename", "Quake3Arena", pattern_reader(r"[!#-\[\]-~]{1,32}", "a gamename"),
                   "such as Xonotic"),
        ListOption("protocol", "68", pattern_reader("0|-?[1-9][0-9]{0,8}", "a number"),
                   "68 is Quake III Arena's, 71 OpenArena's, 3 Xonotic's"),
    )
    ipv4_only = False
    # These values remove a server within 5 s of its farewell
    timeout_s = 1.0
    attempts = 3

    def __init__(self, program=None):
        super().__init__(program)
        self.statuses = {}              # Quake3Status by the address and port that are asked
        # A MAC has only 6 bytes, so that a getinfo, with 20 bytes, is no longer than a heartbeat.
        # At 50,000 guesses a second it would still take 180 years to guess one. It is valid for at
        # least 2 s, and at most twice as long
        self.cookie = Cookie(os.urandom(16), size=6, window_s=2.0)

    def read(self, settings):
        super().read(settings)
        self.answer_lifetime_s = settings["quake3.timeout"]
        self.choices = settings["quake3.games"]
        self.gamenames_by_tag = dict(QUAKE3_TAGS)
        for line in settings["quake3.tags"]:
            tag, _, gamename = line.partition("=")
            self.gamenames_by_tag[tag.strip()] = gamename.strip()
        # Questions without a gamename get the servers of these games. The first is "", which most
        # challenges are made for
        gamenames = dict.fromkeys(self.gamenames_by_tag.values())
        self.anonymous_gamenames = tuple(gamenames)
        # These games can always be listed, even if strangers have invented as many as they may
        self.named_games = {*QUAKE3_TITLES, *self.choices}
        self.named_games.update(map(quake3_game_id, gamenames))
        # A gamename such as "iceball" must not put a server into another game's list. The name of
        # any section of the settings may be the id of a game
        self.other_games = {*section_names(), *settings["games"]}

    @classmethod
    def owns(cls, game, details):
        return "gamename" in details

    # Datagrams

    def datagram(self, data, peer, now):
        if data.startswith(QUAKE3_INFO):
            self.accept_info(data, peer, now)
            return []
        command, *words = data.split() or [b""]
        if command == QUAKE3_HEARTBEAT and len(words) == 1:
            tag, = words
            packets = self.answer_heartbeat(tag.decode("latin-1"), peer, now)
        else:
            packets = self.answer_question(command, words, peer, now)
        source, _ = peer[:2]
        answer_bytes = sum(map(len, packets))
        surplus_bytes = answer_bytes - len(data)
        if not self.rules.allow_surplus(self.game, source, surplus_bytes, now):
            raise Limited
        return [(packet, peer) for packet in packets]

    def answer_heartbeat(self, tag, peer, now):
        """Return [getinfo] for a server, or [] if it is not to be asked now. A listed server is
        also polled at once."""
        if tag not in self.gamenames_by_tag:
            raise Malformed("heartbeat tag %a: not known here, but the operator can add it" % tag)
        source, port = peer[:2]
        target = self.poller.find(self, source, port)
        gamename = ""                   # a listed server has its gamename in the list
        if target is not None and self.listed_server(target) is not None:
            # However many heartbeats come, a listed server is asked at most once a second
            is_last_poll = target.missed == MISSED_POLLS_LIMIT - 1
            if is_last_poll and (target.asked_at is not None or target.due <= now):
                return []
            self.poller.poll_once(target, now)      # the heartbeat may have been a farewell
        else:
            self.check_newcomer(source, port, None, target)
            self.registry.record_unproven(source, self.game, port, "announced", now)
            # The challenge covers the gamename of the tag, so no state is kept for it
            gamename = self.gamenames_by_tag[tag]
        proven = "%s %s %d" % (gamename, source, port)
        mac = self.cookie.make(proven.encode(), now)
        return [QUAKE3_GETINFO + base64.urlsafe_b64encode(mac)]

    def accept_info(self, data, peer, now):
        """List or refresh the server that answers a getinfo of answer_heartbeat()."""
        self.check_length(data)
        challenge, values = read_quake3_info(data)
        try:
            mac = base64.urlsafe_b64decode(challenge)
        except ValueError:
            mac = b""
        # The challenge does not say which gamename its MAC covers, so each of them is tried
        source, port = peer[:2]
        for gamename in self.anonymous_gamenames:
            proven = "%s %s %d" % (gamename, source, port)
            if self.cookie.is_valid(mac, proven.encode(), now):
                break
        else:
            raise Malformed("no infoResponse to a getinfo of the last 2 s")
        target = self.poller.find(self, source, port)
        fingerprint = hash((peer, values))
        server = self.registry.by_fingerprint.get(fingerprint)
        if target is not None and server is not None:
            # Nothing has changed since its last infoResponse
            target.missed = 0
            server.last_seen = now
            return
        attributes = quake3_attributes(values, self.listed_gamename(target) or gamename)
        if target is None:
            target = self.poller.add(self, source, port, ANNOUNCED)
        target.why = ANNOUNCED          # until now, perhaps only another list has named it
        # This proves that the server is there, as the answer to a poll would
        target.missed = 0
        server = self.list_polled(target, attributes, now)
        if server is not None:
            self.registry.set_fingerprint(server, fingerprint)

    def listed_gamename(self, target):
        """Return the gamename of a target's server in the list, or "" if it is not listed."""
        server = target and self.listed_server(target)
        return server.details.get("gamename", "") if server else ""

    def question(self, target):
        return QUAKE3_GETINFO + b"%08x" % target.nonce

    def read_answer(self, target, data):
        challenge, values = read_quake3_info(data)
        if challenge != b"%08x" % target.nonce:
            raise Malformed("challenge: not that of the open query")
        # `ping` shows what the server says, even if nothing tells its game
        otherwise = self.listed_gamename(target) if self.program else "Quake3Arena"
        return quake3_attributes(values, otherwise)

    def admitted_game(self, source, fields):
        gamename = fields["details"]["gamename"]
        game = quake3_game_id(gamename, fields["version"])
        # `xonotic, openarena` allows only these two games, `!nexuiz` all others
        first_choice, *_ = self.choices or ("!",)
        is_allowed = game in self.choices or first_choice.startswith("!")
        is_forbidden = "!" + game in self.choices or game in self.other_games
        if is_forbidden or not is_allowed:
            raise Refused("game", "%a is not listed here" % gamename)
        if game in self.named_games or game in self.registry.titles:
            return game
        # A new game is one that neither the titles, the tags nor the settings name. It counts for
        # the source of its first server
        shares = Shares()
        for listed_game, first_source in self.registry.title_sources.items():
            if listed_game not in self.named_games:
                shares.take(first_source)
        if shares.total >= 64:          # each game has a tab on the page
            raise Refused("limit", "at most 64 games of this family")
        # A machine runs servers of one game, rarely of two. Anybody can have an IPv6 /48
        full = shares.full(source, 4, site_sources=2)
        if full and not self.rules.exempts(source):
            raise Refused("limit", "at most %d new games of one source" % shares.counts[full])
        return game

    # Questions from players' programs

    def lists(self):
        return {"servers": ServerList(
            quake3_entry, lambda server: server.room == self.game, self.grouped)}

    def grouped(self, entries, now):
        """Return the entries by gamename ("" for none), protocol and game type ("" for any), and a
        dict for the answers that are made from them."""
        groups = collections.defaultdict(list)
        for entry in entries:
            protocol = entry.protocol
            gamenames = [entry.gamename]
            if entry.gamename in self.anonymous_gamenames:
                gamenames.append("")
            for gamename in gamenames:
                for gametype in {entry.gametype, ""}:
                    groups[gamename, protocol, gametype].append(entry)
        return dict(groups), {}

    def answer_question(self, command, words, peer, now):
        question = read_quake3_question(command, words)
        source, *_ = peer
        # datagram() would refuse to send the answer, so do not spend time on rendering it
        if self.rules.surplus_is_spent(self.game, source, now):
            raise Limited
        # With the default of the setting, a source gets 5 answers at once, then 1 a second
        tokens = self.rules.request_tokens(10)
        if not self.rules.udp_request_limiter.allow(source, now, tokens):
            raise Limited
        groups, answers = self.rendered("servers", now)
        key = question.gamename, question.protocol, question.gametype
        group = groups.get(key)
        if group is None:               # to keep an answer for each invented game would fill memory
            return quake3_packets(question, ())
        if question not in answers:
            answers[question] = quake3_packets(question, group)
        return answers[question]

    def fetch(self, gamename="Quake3Arena", protocol="68"):
        """Fetch the servers with this gamename and protocol number. A list comes in several
        datagrams, the last one with a mark."""
        question = QUAKE3_GETSERVERS_EXT + (" %s %s empty full" % (gamename, protocol)).encode()
        data = None
        for _ in range(3):              # a datagram may be lost
            if data is None:
                data = yield Send(question, 2.0)
        servers = []
        step = Send(wait_s=LIST_S)      # for all further datagrams together
        while data is not None:
            more_servers, is_last = read_quake3_packet(data)
            servers += more_servers
            if is_last:
                return servers
            if len(servers) > LIST_SERVERS:
                raise Malformed("more than %d servers" % LIST_SERVERS)
            data = yield step
            step = Send()               # the present wait goes on
        raise TimeoutError("timed out: the end of the list did not come")

    # Pages

    def looked_at(self, server, now):
        endpoint = server.source, server.port
        last = self.statuses.get(endpoint)
        if last is None or now >= last.asked_at + QUAKE3_STATUS_S:
            challenge = b"%08x" % self.nonce()
            self.statuses[endpoint] = Quake3Status(server, now, challenge, self.players(server))
            self.program.send(QUAKE3_GETSTATUS + challenge, endpoint)

    def take_players(self, endpoint, data):
        status = self.statuses.get(endpoint)
        if status is None or not status.challenge or not data.startswith(QUAKE3_STATUS):
            return False
        info, _, lines = data[len(QUAKE3_STATUS):].partition(b"\n")
        if b"\\challenge\\%s\\" % status.challenge not in info + b"\\":
            return False
        players = []
        for score, raw_name in QUAKE3_PLAYER.findall(lines):        # without one that is cut off
            name = quake3_name(decode_legacy(raw_name))
            player = Player(name, score=int(score))
            if player.score == -666:            # a spectator in DarkPlaces
                player = Player(name, is_watching=True)
            players.append(player)
        self.statuses[endpoint] = status._replace(challenge=b"", players=players)
        status.server.entry_cache = None        # the search looks for players too
        return True

    def tick(self, now):
        for endpoint, status in list(self.statuses.items()):
            if now >= status.asked_at + 2 * QUAKE3_STATUS_S:
                del self.statuses[endpoint]
                status.server.entry_cache = None
        return super().tick(now)

    def players(self, server):
        status = self.statuses.get((server.source, server.port))
        return status.players if status else ()

    def mode_text(self, server):
        if server.game in ("quake3arena", "openarena"):
            return QUAKE3_MODES.get(server.mode, server.mode)
        return server.mode


# --- Luanti --------------------------------------------------------------------------------------

LUANTI_ID = b"OEt\3"                # begins every packet
LUANTI_PROBE = LUANTI_ID + b"\0\0\0\1"
LUANTI_ANSWER = Form("<6s 5x c 2s", "head kind peer", head=LUANTI_ID + b"\0\1", kind=b"\1")
LUANTI_GOODBYE = Form("<4s 2s 3s", "id peer kind", id=LUANTI_ID, kind=b"\0\0\3")


def read_luanti_address(text):
    """Return the announced address for players to connect to: an IP address, a host name with a
    dot, or "" for the address that the server announces from. Raise ValueError for others."""
    # A host name has at most 253 characters (RFC 1035)
    if not isinstance(text, str) or len(text) > 253:
        raise ValueError("not a text, or too long")
    if ":" in text:
        if "%" in text:
            raise ValueError("a scope means nothing to players")
        # This raises ValueError for anything else, also for a host name with a port
        ipaddress.IPv6Address(text)
    elif not all("!" <= character <= "~" for character in text):
        raise ValueError("a blank, or a letter beyond ASCII")
    # A dot at the beginning does not count, because no host name begins with one
    elif text and "." not in text[1:]:
        raise ValueError("no dot")
    return text


LUANTI_TEXT = functools.partial(clean, max_characters=TEXT_CHARACTERS), "a text"
LUANTI_WORD = clean, "a text"
LUANTI_NAMES = read_names, "a list of texts"
LUANTI_FLAG = read_flag, "true or false"
LUANTI_COUNT = number_reader(0, 10**15), "a number, 0 or more"
LUANTI_FRACTION = number_reader(0, 10**6, float), "a number, 0 or more"
LUANTI_ADDRESS = read_luanti_address, (
    "a name with a dot in it or an IP address; without a port, blanks or letters beyond ASCII")
# The fields of an announcement, and whether each is required. The reader takes the announced value,
# a text or a list, and returns it cleaned. For a wrong value it raises ValueError or, as for a
# dict, what its first step raises. The answer to a wrong announcement quotes what is expected
LUANTI_FIELDS = {
    "name": (*LUANTI_WORD, True),
    "gameid": (*LUANTI_WORD, True),
    "mapgen": (*LUANTI_WORD, False),
    "version": (*LUANTI_WORD, True),
    "description": (*LUANTI_TEXT, True),
    "privs": (*LUANTI_TEXT, False),
    "url": (*LUANTI_TEXT, False),
    "address": (*LUANTI_ADDRESS, False),
    "clients_list": (*LUANTI_NAMES, False),
    "mods": (*LUANTI_NAMES, False),
    "creative": (*LUANTI_FLAG, False),
    "damage": (*LUANTI_FLAG, False),
    "pvp": (*LUANTI_FLAG, False),
    "password": (*LUANTI_FLAG, False),
    "dedicated": (*LUANTI_FLAG, False),
    "rollback": (*LUANTI_FLAG, False),
    "can_see_far_names": (*LUANTI_FLAG, False),
    "clients": (*LUANTI_COUNT, True),
    "clients_max": (*LUANTI_COUNT, True),
    "uptime": (*LUANTI_COUNT, True),
    "game_time": (*LUANTI_COUNT, True),
    "proto_min": (*LUANTI_COUNT, True),
    "proto_max": (*LUANTI_COUNT, True),
    "lag": (*LUANTI_FRACTION, False),
    # The master computes the last three: the most clients that the server has announced, the number
    # of its announcements, and the mean of the announced clients
    "clients_top": (*LUANTI_COUNT, True),
    "updates": (*LUANTI_COUNT, True),
    "pop_v": (*LUANTI_FRACTION, True),
}
LUANTI_COMPUTED = {"clients_top": 0, "updates": 0, "pop_v": 0}


def read_luanti_fields(values):
    """Return those of an announcement's values that are LUANTI_FIELDS, checked and cleaned.

    `values` is a dict that has been received, or stored by an earlier run of the program. Raise
    Refused if a required field is missing or a value is wrong."""
    fields = {}
    for name, (read, expected, is_required) in LUANTI_FIELDS.items():
        if name not in values and not is_required:
            continue
        value = values.get(name)
        if isinstance(value, (int, float)):
            value = str(value)          # old servers send numbers and flags as texts
        try:
            fields[name] = read(value)
        except (AttributeError, LookupError, TypeError, ValueError):
            raise Refused("bad packet", "%s: expected %s" % (name, expected)) from None
    if fields["proto_min"] > fields["proto_max"]:
        raise Refused("bad packet", "proto_min is above proto_max")
    # The count and the list may contradict each other; then the list is right
    if "clients_list" in fields:
        fields["clients"] = len(fields["clients_list"])
    # Every client fetches these names with the list of servers. There is room for 180 players with
    # the longest names, and for 500 mods with names of usual length. The official master allows
    # 8 kB for the whole announcement
    for name, max_bytes in {"clients_list": 4096, "mods": 8192}.items():
        if name in fields:
            fields[name] = first_values(fields[name], max_bytes)
    # Clients open this link, so it must not have another scheme, such as "javascript:"
    if not re.match("https?://", fields.get("url", "")):
        fields.pop("url", None)
    return fields


def first_values(values, max_bytes):
    """Return as many values from the beginning of this list as fit into `max_bytes` of JSON."""
    total_bytes = 0
    for position, value in enumerate(values):
        total_bytes += len(to_json(value)) + len(",")
        if total_bytes > max_bytes:
            return values[:position]
    return values


def luanti_attributes(announcement):
    flags = [flag for flag in ("creative", "damage", "pvp", "password") if announcement.get(flag)]
    return {
        "private": {"luanti_announcement": announcement},
        "verified": "query",
        "name": announcement["name"],
        "mode": announcement["gameid"],
        "map": announcement.get("mapgen", ""),
        "version": announcement["version"],
        "description": announcement["description"],
        "players": announcement["clients"],
        "max_players": clamp(announcement["clients_max"]),
        "details": {"flags": ", ".join(flags)},
    }


class Luanti(PolledGame):
    """Luanti, formerly Minetest, as captured from minetestserver 5.6.1. The rules for announcements
    are those of the official master.

    A game server announces itself by HTTP when it starts, every 300 s, and when it ends:

        > POST /announce, in the field json of a form; see HttpRequest in section 9
          {"action":"start","address":"","clients":0,"clients_list":[],"clients_max":12, …
           "gameid":"minetest","mapgen":"v7","mods":["weather", …],"port":30000,"version":"5.6.1"}

        the master's probe to its port, the answer of 14 bytes, and the goodbye:
        < 4f457403 0000 00 01
        > 4f457403 0001 00 03 ffdc 00 01 peer.u16       bytes 6 to 10 may differ
        < 4f457403 peer.u16 00 00 03

    The server is listed, with the contents of its announcement, once it has answered the probe. It
    is removed when it says that it ends, when it has left three polls unanswered, or when it has
    not announced itself for longer than luanti.timeout. The answer has no room for a nonce, so
    somebody who forges a game server's address can pretend that it is there."""

    game = "luanti"
    title = "Luanti"
    settings = (
        Setting("luanti.enabled", "yes", read_flag,
                "List the Luanti servers that announce themselves on the ports of [http].",
                live=False),
        Setting("luanti.timeout", "330", number_reader(1, 86400),
                "Seconds after its last announcement until a server is removed; one comes every "
                "300."),
    )
    switch = "luanti.enabled"
    contacts = (Contact(
        "In minetest.conf",
        "server_announce = true\nserverlist_url = %(url)s",
        "UDP 30000"),)
    join_words = "In Luanti, choose Join Game and enter its address and port, or run"
    join_line = "luanti --address %(address)s --port %(port)d --go"
    private = {"luanti_announcement": Private(NO_DETAILS, read_luanti_fields)}
    routes = {"/list": Route("list", JSON_TYPE)}
    requests = {"GET /geoip": "geoip"}
    json_field = "json"
    announced_by_http = True
    announced_over = ""
    fetched_over = "http"
    answer_lifetime_s = None            # its last announcement says how long it stays
    answer_bytes = LUANTI_ANSWER.size

    def __init__(self, program=None):
        # The announcements whose address for players is being looked up, by source and port. The
        # limit for look-ups limits their number, too
        self.being_looked_up: Any = {}
        super().__init__(program)

    def read(self, settings):
        super().read(settings)
        self.timeout = settings["luanti.timeout"]

    def is_on(self, settings):
        has_ports = bool(settings["http.ports"] or settings["http.https_ports"])
        return has_ports and super().is_on(settings)

    # Announcements

    def announced(self, source, port, fields, now):
        """Take a "start" or an "update" from a game server, and return the HttpAnswer.

        `fields` are the values of the JSON object in the announcement. A start describes the whole
        server. An update omits some fields, whose values stay as they are. The game server writes
        the text of the answer into its log. So if its last announcement failed, the answer says
        why."""
        self.being_looked_up.pop((source, port), None)      # this announcement replaces it
        action = fields.get("action")
        if action == "delete":
            self.stopped(source, port, now)
            return HttpAnswer(200, b"Removed from the list.\n")
        if action not in ("start", "update"):
            raise Refused("bad packet", "action: expected start, update or delete; Luanti servers "
                                        "announce themselves")
        last_outcome = self.registry.outcome(source, self.game, port)
        previous = NO_DETAILS
        server = self.registry.get(self.game, self.rules.listed_address(source), port)
        if action == "update" and server is not None and not server.found_at:
            previous = self.announcement_of(server)
        announcement = self.completed(fields, previous)
        address = announcement.get("address")
        if previous and address == previous.get("address"):
            # The server has proven this address before
            self.list_own(source, port, luanti_attributes(announcement), now, self.timeout)
            target = self.poller.find(self, source, port)
            if target is not None:
                target.announcement = None      # an older one, which a poll's answer would list
        elif address:
            self.look_up(source, port, announcement, now)
        else:
            attributes = luanti_attributes(announcement)
            self.query_announced(source, port, attributes, now, self.timeout)
        if last_outcome and last_outcome.outcome in ("silent", "address"):
            text = ("Request has been filed. So far it was not listed: %s. The page /check tells "
                    "what to do.\n" % last_outcome.detail)
            return HttpAnswer(409, text.encode())
        return HttpAnswer(202, b"Request has been filed.\n")

    @staticmethod
    def completed(fields, previous):
        """Return a complete announcement, by the names of LUANTI_FIELDS. Fields that the announced
        ones lack are those of `previous`, the server's last announcement, which may be empty."""
        merged = {**previous, **fields}
        for name, first_value in LUANTI_COMPUTED.items():       # a server cannot set them itself
            merged[name] = previous.get(name, first_value)
        announcement = read_luanti_fields(merged)
        clients = announcement["clients"]
        updates = announcement["updates"] + 1
        mean = announcement["pop_v"]
        announcement["updates"] = updates
        announcement["clients_top"] = max(clients, announcement["clients_top"])
        # The mean of all announcements so far, of which this one is the last
        announcement["pop_v"] = mean + (clients - mean) / updates
        return announcement

    def look_up(self, source, port, announcement, now):
        """Look up the announced address for players. on_address() gets the result."""
        target = self.poller.find(self, source, port)
        self.check_newcomer(source, port, announcement["name"], target)
        done = functools.partial(self.on_address, source, port, announcement)
        # Of several addresses, the one at which the server is listed is preferred
        listed_address = self.rules.listed_address(source)
        self.program.resolve(announcement["address"], done, source, like=listed_address)
        self.being_looked_up[source, port] = announcement
        self.registry.record_outcome(source, self.game, port, "announced", now)

    def on_address(self, source, port, announcement, address, now):
        """Query the announced server, unless its host name leads to an address elsewhere.

        `address` is "" if the name has none. A newer announcement may have replaced this one."""
        if self.being_looked_up.get((source, port)) is not announcement:
            return
        del self.being_looked_up[source, port]
        listed_address = self.rules.listed_address(source)
        # An IPv4 and an IPv6 address cannot be compared, and the name is believed: it may have no
        # address of the other kind
        is_other_kind = (":" in address) != (":" in listed_address)
        is_right = address == listed_address or is_other_kind
        is_right = is_right or self.rules.believes_claim(source, address)
        try:
            if not address or not is_right:
                raise Refused("address", "%s leads to %s, not to %s" % (
                    announcement["address"], address or "no address", listed_address))
            attributes = luanti_attributes(announcement)
            self.query_announced(source, port, attributes, now, self.timeout)
        except Refused as refused:
            self.registry.record_outcome(
                source, self.game, port, refused.outcome, now, str(refused))

    # Its game servers

    def question(self, target):
        return LUANTI_PROBE

    def read_answer(self, target, data):
        LUANTI_ANSWER.read_whole(data)
        # It says that the server is there, and no more
        return {"verified": "another list"} if target.why == FOUND else {}

    def goodbye(self, data):
        # In its answer the game server gives us a peer number
        return LUANTI_GOODBYE.write(peer=LUANTI_ANSWER.read(data).peer)

    # Its list

    def lists(self):
        return {"list": ServerList(self.entry, self.announcement_of, self.joined)}

    @staticmethod
    def announcement_of(server):
        return server.private.get("luanti_announcement", NO_DETAILS)

    def entry(self, server):
        """Return a sort key, the entry as JSON, and the number of players.

        Servers with the operator's highest priority come first, and among equals those with the
        highest score. The ping in the entry is in seconds."""
        announcement = self.announcement_of(server)
        ping_s = (server.ping_ms or 0) / 1000
        entry = to_json({
            **announcement,
            "address": announcement.get("address") or server.address,
            "port": server.port,
            "ping": ping_s,
        })
        return -server.priority, -luanti_score(announcement, ping_s), entry, server.players

    @staticmethod
    def joined(entries, now):
        """In the official list, `total_max` has the largest totals that ever occurred. This master
        does not keep them, and repeats the present totals."""
        texts, players = [], 0
        for *_, text, server_players in sorted(entries):
            texts.append(text)
            players += server_players
        total = b'{"clients":%d,"servers":%d}' % (players, len(texts))
        return b'{"list":[%s],"total":%s,"total_max":%s}\n' % (b",\n".join(texts), total, total)

    def geoip(self, request):
        """Return the continent of the player who asks, as the official list does."""
        continent = CONTINENTS.get(self.rules.country(request.address), "")
        return to_json({"continent": continent.upper() or None})

    def players(self, server):
        return list(map(Player, self.announcement_of(server).get("clients_list", ())))

    def fetch(self):
        entries = yield from fetched_json("/list", "list")
        return read_entries(entries, self.read_entry)

    @staticmethod
    def read_entry(entry):
        server = json_entry(entry, "clients", "clients_max")
        # Nothing else is kept: a list of 24 MB can have eight million empty lists
        with contextlib.suppress(Refused):
            server["private"] = read_luanti_fields({**LUANTI_COMPUTED, **entry})
        return server

    def found(self, entry):
        announcement = read_luanti_fields(entry.get("private", NO_DETAILS))
        return {**luanti_attributes(announcement), "verified": "another list"}


def luanti_score(announcement, ping_s):
    """Return the score by which the official list sorts servers; higher is better."""
    clients_max = announcement["clients_max"]
    points = min(announcement["clients"], int(0.8 * clients_max))
    points += min(4, announcement["pop_v"] / 2)             # the average number of players
    points += min(8, announcement["game_time"] / MONTH)     # how long the world has been played
    points -= 8 * max(0, ping_s - 0.4)
    if clients_max > 200:
        points -= 8
    # Such a server spans two incompatible generations
    if announcement["proto_min"] <= 32 and announcement["proto_max"] > 36:
        points *= 0.6
    return points


# --- DDNet ---------------------------------------------------------------------------------------

DDNET_REGISTER = "/ddnet/15/register"       # 15 is the version of the registrations
DDNET_SERVERS = "/ddnet/15/servers.json"
DDNET_SUCCESS = b'{"status":"success"}'
# A Secret is a UUID of 36 characters, a Challenge-Secret a UUID with a suffix, 47 in the capture
DDNET_SECRET = "[!-~]{1,128}", "1 to 128 ASCII characters without blanks"
DDNET_LIFETIME_S = 30.0             # servers register every 15 s
DDNET_ADDRESSES = 4                 # of one server: 0.6 and 0.7, by IPv4 and by IPv6
DDNET_INFO_BYTES = 32 << 10         # the longest info; 64 players with skins have some 16 kB
# Every player downloads all infos with the list. An info usually has 2 kB, and every server may
# have this many bytes. What the infos have beyond that is limited: for the servers of one source,
# so that 32 of them can be full of players, and for all together, of which no site gets more than
# half
DDNET_USUAL_BYTES = 4096
DDNET_SOURCE_LARGE_BYTES = 512 << 10
DDNET_LARGE_BYTES = 16 << 20
# The bytes of new infos that are read of one source: (a second, at once). 32 servers full of
# players have 512 kB, and register every 15 s; to read 256 kB takes 12 ms
DDNET_READ_BYTES = 40_000, 256 << 10
DDNET_HEAD = b"\xff" * 10           # begins a packet without a connection
# What is sent to game servers that other masters list
DDNET_QUESTION = Form("> 2s H 10s B", "mark high head low",
                      mark=b"xe", head=b"\0\0\xff\xff\xff\xffgie3")
# What follows in each kind of answer: texts by these names, and so many of each client, the first
# of which are those in DDNET_CLIENT. Each text ends with a NUL
DDNET_ANSWERS = {
    b"iext": ("token version name map checksum size game_type flags players max_players present "
              "max_clients reserved", 6),
    b"iex+": ("token number reserved", 6),
    b"inf3": ("token version name map game_type flags players max_players reserved max_clients", 5),
}
# How they are read; the others are names and the like
DDNET_READERS: Dict[str, Any] = dict.fromkeys((
    "flags", "players", "max_players", "present", "max_clients", "country", "score"), int)
DDNET_READERS["is_player"] = lambda text: text != b"0"
# The clients of a found server that are listed. These servers have at most half of the list, so
# that each may have twice the usual bytes. 64 clients have some 6 kB
DDNET_FOUND_CLIENTS_BYTES = 2 * DDNET_USUAL_BYTES


class DdnetRequest(NamedTuple):
    """The header fields of a registration, and the address that it comes from."""

    source: str
    address: str                        # the one for players
    port: int                           # the UDP port of the game server
    text: str                           # both as in the list, such as tw-0.6+udp://203.0.113.7:8399
    secret: str                         # the hash of Secret, in hexadecimal digits
    is_delete: bool = False             # true: the other fields are empty
    challenge: bytes = b""              # the challenge up to its token
    token: bytes = b""                  # the token of an earlier challenge, or b""
    serial: int = 0                     # grows with each change of the info


def read_ddnet_request(request, address):
    """Return the DdnetRequest in a request by HTTP, and note the port in it for /check. `address`
    is the one for players."""
    text = ddnet_header(
        request, "Address", r"tw-0\.[67]\+udp://connecting-address\.invalid:[0-9]{1,5}",
        "tw-0.6+udp://connecting-address.invalid:PORT, or tw-0.7+udp")
    protocol, _, endpoint = text.partition("://")
    _, _, digits = endpoint.rpartition(":")
    port = int(digits)
    if not 0 < port <= MAX_PORT:
        raise Malformed("Address: %d is not a port" % port)
    request.announced = "ddnet", port
    secret = ddnet_header(request, "Secret", *DDNET_SECRET)
    digest = hashlib.blake2b(secret.encode(), digest_size=16)
    listed_text = "%s://%s" % (protocol, endpoint_text(address, port))
    fields = DdnetRequest(request.address, address, port, listed_text, digest.hexdigest())
    if ddnet_header(request, "Action", "(delete)?", "delete, or no such field"):
        return fields._replace(is_delete=True)
    head = DDNET_HEAD
    if protocol == "tw-0.7+udp":
        connless_token = ddnet_header(
            request, "Connless-Token", "[0-9a-fA-F]{8}", "eight hexadecimal digits")
        head = b"\x21" + bytes.fromhex(connless_token) + b"\xff" * 8
    challenge_secret = ddnet_header(request, "Challenge-Secret", *DDNET_SECRET)
    token = b""
    with contextlib.suppress(ValueError):
        token = bytes.fromhex(request.header("Challenge-Token").strip())
    serial = ddnet_header(request, "Info-Serial", "[0-9]{1,18}", "a whole number")
    return fields._replace(
        challenge=head + b"chal" + challenge_secret.encode() + b"\0", token=token,
        serial=int(serial))


def ddnet_header(request, name, pattern, expected):
    value = request.header(name).strip()
    if not re.fullmatch(pattern, value):
        raise Malformed("%s: expected %s" % (name, expected))
    return value


def ddnet_endpoint(text):
    """Return the IP address and the port of an address in the list. Raise ValueError."""
    protocol, _, endpoint = text.partition("://")
    if protocol not in ("tw-0.6+udp", "tw-0.7+udp"):
        raise ValueError("not an address of a DDNet server")
    return read_numeric_endpoint(endpoint)


# Which values of JSON a member may have, as a function and in words
DDNET_TEXT = (lambda value: isinstance(value, str), "a text")
DDNET_PLAIN_TEXT = (lambda value: isinstance(value, str) and not re.search("[\0-\x1f]", value),
                    "a text without control characters")
DDNET_FLAG = (lambda value: isinstance(value, bool), "true or false")
DDNET_NUMBER = (lambda value: type(value) is int and -1 << 31 <= value < 1 << 31,
                "a whole number of 32 bits")
DDNET_COUNT = (lambda value: type(value) is int and 0 <= value < 1 << 31,
               "a whole number from 0 to 2147483647")
# The members that the info, its map and each client must have. DDNet's clients do not show a server
# if one is wrong
DDNET_INFO = {
    "max_clients": DDNET_COUNT,
    "max_players": DDNET_COUNT,
    "passworded": DDNET_FLAG,
    "game_type": DDNET_PLAIN_TEXT,
    "name": DDNET_PLAIN_TEXT,
    "map": (lambda value: isinstance(value, dict), "an object"),
    "version": DDNET_PLAIN_TEXT,
    "clients": (lambda value: isinstance(value, list), "a list"),
}
DDNET_CLIENT = {"name": DDNET_TEXT, "clan": DDNET_TEXT, "country": DDNET_NUMBER,
                "score": DDNET_NUMBER, "is_player": DDNET_FLAG}


def read_ddnet_info(raw):
    """Return the info of a server, which is JSON in UTF-8, as compact JSON text.

    Raise Malformed, with the name of the wrong member, if DDNet's clients would not show a server
    with it; or if it is too large, too deep, or has a value that JSON does not have."""
    info = read_json_object(raw)
    check_ddnet_members("", info, DDNET_INFO)
    check_ddnet_members("map.", info["map"], {"name": DDNET_PLAIN_TEXT})
    for number, client in enumerate(info["clients"]):
        check_ddnet_members("clients[%d]." % number, client, DDNET_CLIENT)
    if info["max_players"] > info["max_clients"]:
        raise Malformed("max_players: more than max_clients")
    if len(info["clients"]) > info["max_clients"]:
        raise Malformed("clients: more than max_clients")
    if count_ddnet_players(info) > info["max_players"]:
        raise Malformed("clients: more of them play than max_players")
    # The game has six. Some programs that read the list fail at 128, and then read none of it
    if is_deeper(info, 16):
        raise Malformed("info: more than 16 objects or lists within each other")
    try:
        compact = to_json(info)
    except ValueError:
        # Python reads NaN, infinite numbers and halves of surrogate pairs, but JSON has none
        raise Malformed("info: a number or a text that JSON does not have") from None
    if len(compact) > DDNET_INFO_BYTES:     # longer than it came: Python writes 1e15 in 18 bytes
        raise Malformed("info: more than %d bytes" % DDNET_INFO_BYTES)
    text = compact.decode()
    # A record has it as a text in JSON; its other fields take less than 4 kB
    if len(to_json(text)) > RECORD_BYTES - 4096:
        raise Malformed("info: it has too many quotes and backslashes")
    return text


def check_ddnet_members(where, values, members):
    """Raise Malformed if one of these members is missing or wrong in a value of JSON.

    `where` stands before its name in the reason."""
    if not isinstance(values, dict):
        raise Malformed(where.rstrip(".") + ": expected an object")
    for name, (is_right, expected) in members.items():
        value = values.get(name)
        if not is_right(value):
            raise Malformed("%s%s: expected %s" % (where, name, expected))


def is_deeper(value, levels):
    """Does a value of JSON have more than so many objects and lists within each other?"""
    values = [value]
    for _ in range(levels):
        members = []
        for each in values:
            if isinstance(each, dict):
                members += each.values()
            elif isinstance(each, list):
                members += each
        values = members
    return any(isinstance(each, (dict, list)) for each in values)


def count_ddnet_players(info):
    """Return how many clients play, rather than watch."""
    return sum(client["is_player"] for client in info["clients"])


def read_ddnet_registration(values):
    """Return a server's registration, stored by an earlier run or by another master, checked.

    It is a dict:

    info        the info, as compact JSON
    serial      its Info-Serial
    secret      the hash of Secret, in hexadecimal digits; "" of a server that was found elsewhere
    addresses   the addresses for players, the first of which is the server's identity

    Raise Malformed, or what restored() takes for it, if a value is wrong."""
    info = read_ddnet_info(values["info"].encode())
    serial = values["serial"]
    secret = values["secret"]
    addresses = list(values["addresses"])
    for text in addresses:
        ddnet_endpoint(text)
    has_hash = re.fullmatch("([0-9a-f]{32})?", secret)
    if not has_hash or type(serial) is not int or not 0 < len(addresses) <= DDNET_ADDRESSES:
        raise Malformed("a wrong secret, serial or number of addresses")
    return {"info": info, "serial": serial, "secret": secret, "addresses": addresses}


def ddnet_attributes(info_text):
    """Return the attributes of Server in an info, which read_ddnet_info() has returned."""
    info = json.loads(info_text)
    return {
        "name": clean(info["name"]),
        "mode": clean(info["game_type"]),
        "map": clean(info["map"]["name"]),
        "version": clean(info["version"]),
        "players": clamp(count_ddnet_players(info)),
        "max_players": clamp(info["max_players"]),
        "details": {"flags": "password" if info["passworded"] else ""},
    }


def ddnet_large_bytes(info):
    """Return by how many bytes an info is larger than a usual one."""
    return max(0, len(info.encode()) - DDNET_USUAL_BYTES)


def read_ddnet_answer(kind, data):
    """Return the texts in an answer of this kind, by the names in DDNET_ANSWERS, and its `clients`
    as an info has them. Raise LookupError or ValueError."""
    words, client_texts = DDNET_ANSWERS[kind]
    names = words.split()
    texts = data.split(b"\0")
    if texts.pop():
        raise ValueError("its end is missing")
    answer = read_ddnet_texts(names, texts)
    answer["clients"] = [
        read_ddnet_texts(DDNET_CLIENT, texts[at:at + client_texts])
        for at in range(len(names), len(texts), client_texts)]
    return answer


def read_ddnet_texts(names, texts):
    return {name: DDNET_READERS.get(name, decode_legacy)(text) for name, text in zip(names, texts)}


class DdnetAddress:
    """What the master knows of one address of a server besides what is stored."""

    def __init__(self, source, heard_at):
        self.source = source            # the address that its registrations come from
        self.heard_at = heard_at        # the time of the last registration


class Ddnet(PolledGame):
    """DDNet and its kin, the Teeworlds family, as captured from DDNet-Server 16.4.

    A game server registers by HTTP when it starts, every 15 s, and when it ends:

        > POST /ddnet/15/register
          Address: tw-0.6+udp://connecting-address.invalid:8399
          Secret: 2ffa794f-fcc9-473a-9966-0f2e0593c528
          Challenge-Secret: f5a9746f-b7ed-44bd-938f-7651b76f0227:tw0.6/ipv4
          Info-Serial: 0
          {"max_clients":64,"max_players":64,"passworded":false,"game_type":"TestDDraceNetwork", …
        < {"status":"need_challenge"}

        and by UDP to the port in Address, at the address that the request has come from:
        < ffffffffffffffffffff "chal" Challenge-Secret 00 TOKEN 00      for tw-0.6+udp
        < 21 a37195fe ffffffffffffffff "chal" …                         for tw-0.7+udp

        > the same with Challenge-Token: TOKEN; later without the body, if Info-Serial is the same
        < {"status":"success"}, or {"status":"need_info"} if the body is needed after all

    The token proves that the game server receives what is sent to its port. It is a MAC, so nothing
    is kept before it comes back. A server registers each of its addresses, by 0.6 and 0.7, IPv4 and
    IPv6, with the same Secret. Those with one Secret are one server, which is listed under its
    first address. An address that is silent for DDNET_LIFETIME_S leaves, and with its last address
    the server.

    Only servers that other masters list are queried. Their answers give all that is listed:

        > 7865 1234 0000 ffffffff "gie3" 42     the nonce is 0x123442
        < ffffffffffffffffffff "iext" "1193026" 00 "0.6.4, 16.4" 00 … "player 42" 00 …
        < ffffffffffffffffffff "iex+" "1193026" 00 "1" 00 00 "player 43" 00 …      further clients
        < ffffffffffffffffffff "inf3" "66" 00 …         of a server of another kind; 66 is 0x42"""

    game = "ddnet"
    title = "DDNet"
    settings = (
        Setting("ddnet.enabled", "yes", read_flag,
                "List the DDNet and Teeworlds servers that register on the ports of [http].",
                live=False),
    )
    switch = "ddnet.enabled"
    contacts = (Contact(
        "In myServerconfig.cfg, which autoexec_server.cfg executes",
        "sv_register 1\nsv_register_url %(url)s" + DDNET_REGISTER + "%(insecure)s",
        "UDP 8303"),)
    play_link = "ddnet://%s"
    join_words = "or press F1 in the game and enter"
    join_line = "connect %(endpoint)s"
    # The second is a dict of DdnetAddress objects by address, which change without a change of the
    # list. That of other masters' servers is empty; of a found server it has the addresses that the
    # other list names
    private = {"ddnet_registration": Private(None, read_ddnet_registration),
               "ddnet_addresses": Private(NO_DETAILS)}
    routes = {DDNET_SERVERS: Route("servers.json", JSON_TYPE)}
    requests = {"POST " + DDNET_REGISTER: "register"}
    body_bytes = DDNET_INFO_BYTES
    announced_over = ""
    fetched_over = "http"
    answer_bytes = 1400                 # the longest packet of the game

    def __init__(self, program=None):
        super().__init__(program)
        self.registered = set()         # the addresses of all servers that have registered
        # A MAC of 7 bytes makes a challenge of at most 80 bytes, as the official one. A token is
        # good for two minutes at least, and for four at most
        self.cookie = Cookie(os.urandom(16), size=7, window_s=120.0)
        # This master's servers by the hash of Secret. Some have left within the last second
        self.by_secret = {}
        self.large_bytes = Shares()     # of the infos, beyond DDNET_USUAL_BYTES
        self.body_limiter = Limiter(DDNET_READ_BYTES)

    @staticmethod
    def registration(server):
        return server.private["ddnet_registration"]

    # Registrations

    def register(self, request):
        """Take a game server's request by HTTP, and return the answer in JSON. The game server logs
        the words of what is raised."""
        now = request.now
        asked = read_ddnet_request(request, self.rules.listed_address(request.address))
        source, text, port = asked.source, asked.text, asked.port
        server = self.by_secret.get(asked.secret)
        if server is not None and not self.registry.has(server):
            server = None
        if asked.is_delete:
            if server is not None and text in server.private["ddnet_addresses"]:
                self.drop_addresses(server, [text])
                self.registry.record_outcome(source, self.game, port, "stopped", now)
            return DDNET_SUCCESS
        self.check_request(asked, server)
        # The token proves that whoever has this Secret receives what is sent to this address
        message = ("%s %s %s" % (source, text, asked.secret)).encode()
        if not self.cookie.is_valid(asked.token, message, now):
            token = self.cookie.make(message, now).hex().encode()
            self.program.send(asked.challenge + token + b"\0", (source, port))
            self.registry.record_outcome(source, self.game, port, "challenged", now, str(port))
            return to_json({"status": "need_challenge"})
        registration = {"secret": asked.secret}
        if server is not None:
            registration = self.registration(server)
        if request.body:                # it counts whatever Info-Serial is: it came last
            try:
                info = self.read_body(asked, server, request.body, now)
            except Refused:
                if server is not None:      # it stays, with its old info
                    self.list_address(asked, server, registration, now)
                raise
            registration = {**registration, "info": info, "serial": asked.serial}
        elif server is None or asked.serial > registration["serial"]:
            return to_json({"status": "need_info"})
        server = self.list_address(asked, server, registration, now)
        if request.body:
            self.registry.set_fingerprint(server, hash((asked.secret, request.body)))
        return DDNET_SUCCESS

    def check_request(self, asked, server):
        """Raise Refused if the rules or a limit forbid to list this address.

        A server has one port, and one address of each family. So somebody who has learned its
        Secret cannot add another port, or a second IPv4 address, to it."""
        source, address, port = asked.source, asked.address, asked.port
        if server is None:
            self.registry.check_admission((self.game, address, port), source)
            return
        if not self.registry.can_be_listed(source, address):
            raise Refused("bad packet", "%s cannot be the address of a server" % address)
        self.registry.check_rules(source, address, port, None)
        for text in self.registration(server)["addresses"]:
            listed_address, listed_port = ddnet_endpoint(text)
            is_same_family = (":" in listed_address) == (":" in address)
            is_another = is_same_family and listed_address != address
            if listed_port != port or is_another:
                raise Refused("owner", "Secret: it is that of the server at %s; a server that has "
                                       "moved waits %d s" % (text, DDNET_LIFETIME_S))

    def read_body(self, asked, server, body, now):
        """Return the info in the body of a registration. Raise Malformed or Refused.

        What has not changed is not read again: all addresses of a server bring the same info."""
        if server is not None and server.fingerprint == hash((asked.secret, body)):
            return self.registration(server)["info"]
        source = asked.source
        is_allowed = self.body_limiter.allow(source, now, len(body))
        if not is_allowed and not self.rules.exempts(source):
            raise Refused("limit", "infos: too many bytes of them have changed; wait 15 s")
        info = read_ddnet_info(body)
        self.check_size(source, server, info)
        return info

    def check_size(self, source, server, info):
        """Raise Refused if an info is too large together with those of other servers.

        `server` is the listed server that it is of, or None."""
        more = ddnet_large_bytes(info)
        if server is not None:
            more -= ddnet_large_bytes(self.registration(server)["info"])
            source = server.source      # that of its first address, for which it counts
        is_full = self.large_bytes.total + more > DDNET_LARGE_BYTES
        if self.large_bytes.full(source, DDNET_SOURCE_LARGE_BYTES, more):
            is_full = is_full or not self.rules.exempts(source)
        if more > 0 and is_full:
            raise Refused("limit", "infos: they are too large together; one of at most %d bytes is "
                                   "always accepted" % DDNET_USUAL_BYTES)
        self.large_bytes.take(source, more)         # tick() counts exactly

    def list_address(self, asked, server, registration, now):
        """List a proven address of the `server` with the same Secret or, if that is None, of a new
        one. Return the Server."""
        source = asked.source
        addresses = {}
        if server is not None:
            addresses.update(server.private["ddnet_addresses"])
        address = addresses.setdefault(asked.text, DdnetAddress(source, now))
        listed = self.list_server(server, registration, addresses, now)
        address.source = source
        address.heard_at = now
        self.registry.record_outcome(source, self.game, asked.port, "listed", now)
        return listed

    def list_server(self, server, registration, addresses, now):
        """List a server with this registration at these addresses, or refresh it. Return it, or
        raise Refused.

        `server` is the one that is listed with the same Secret, or None. If its first address is
        another one now, it moves there: the list loses it and gets a new one, whose history begins
        again. If it may not be listed there, it stays where it is."""
        # IPv4 comes first, as most players have it, then 0.6
        ordered = sorted(addresses, key=lambda text: ("[" in text, text))
        registration = {**registration, "addresses": ordered}
        first_address, *_ = ordered
        address, port = ddnet_endpoint(first_address)
        key = self.game, address, port
        source = addresses[first_address].source        # the one that the server counts for
        is_there = server is not None and server.key == key
        if is_there and registration["info"] == self.registration(server)["info"]:
            fields = {"name": server.name}          # the others stay as they are
        else:
            fields = ddnet_attributes(registration["info"])
        if not is_there:
            other = self.registry.get(*key)
            if other is not None and not other.master and not other.found_at:
                # It is probably the same game server before it was started again
                raise Refused("owner", "Secret: %s is listed with another one; a server that was "
                              "started again waits %d s" % (first_address, DDNET_LIFETIME_S))
        if server is not None and not is_there:
            self.registry.check_rules(source, address, port, fields["name"])
            self.rules.check_source_limit(self.registry.own, source, port)
            self.registry.remove_own(server)
        listed = self.registry.list_or_refresh(key, source, now, DDNET_LIFETIME_S, {
            **fields,
            "room": self.game,
            "verified": "handshake",
            "ping_ms": None,            # another list may have named it until now
            "private": {"ddnet_registration": registration, "ddnet_addresses": addresses},
        })
        self.by_secret[registration["secret"]] = listed
        return listed

    @classmethod
    def restored(cls, stored):
        if not stored.get("ddnet_registration"):
            raise Malformed("ddnet_registration: missing")
        return super().restored(stored)

    def resume(self, server):
        if server.found_at:
            super().resume(server)
            return
        registration = self.registration(server)
        addresses = {}
        for text in registration["addresses"]:
            addresses[text] = DdnetAddress(server.source, server.last_seen)
        server.private = {"ddnet_registration": registration, "ddnet_addresses": addresses}
        self.by_secret[registration["secret"]] = server

    # Addresses that leave

    def drop_addresses(self, server, texts):
        """Remove addresses of a listed server. The server leaves with its last one."""
        addresses = dict(server.private["ddnet_addresses"])
        for text in texts:
            del addresses[text]
        if not addresses:
            self.registry.remove_own(server)
            return
        heard_at = max(address.heard_at for address in addresses.values())
        try:
            self.list_server(server, self.registration(server), addresses, heard_at)
        except Refused:
            # At its first remaining address it may not be listed, so it has left
            self.registry.remove_own(server)

    def gone(self, server):
        secret = self.registration(server)["secret"]
        if self.by_secret.get(secret) is server:
            del self.by_secret[secret]

    def tick(self, now):
        """Remove the addresses that have been silent for too long, and count the bytes of infos."""
        self.large_bytes = Shares()
        self.registered = set()
        for server in list(self.registry.games[self.game].values()):
            if server.found_at:
                continue
            self.registered.update(self.registration(server)["addresses"])
            if server.master:
                continue
            large_bytes = ddnet_large_bytes(self.registration(server)["info"])
            if large_bytes:
                self.large_bytes.take(server.source, large_bytes)
            silent = []
            for text, address in server.private["ddnet_addresses"].items():
                heard_at = address.heard_at
                is_late = heard_at + DDNET_LIFETIME_S <= now
                if is_late and self.registry.is_silent(
                        address.source, heard_at, DDNET_LIFETIME_S, now):
                    silent.append(text)
            if silent:
                self.drop_addresses(server, silent)
        return []

    # Servers that other masters list

    def nonce(self):
        return super().nonce() >> 8     # it has 24 bits

    def question(self, target):
        return DDNET_QUESTION.write(high=target.nonce >> 8, low=target.nonce & 0xff)

    def read_answer(self, target, data):
        kind = data[10:14]
        token = target.nonce & 0xff if kind == b"inf3" else target.nonce
        if not data.startswith(b"%s%s%d\0" % (DDNET_HEAD, kind, token)):
            raise Malformed("not an answer to the open query")
        try:
            answer = read_ddnet_answer(kind, data[14:])
            clients = answer["clients"]
            begun = target.step
            if begun and begun["token"] == answer["token"]:
                answer = {**begun, "clients": begun["clients"] + clients}
            fields = self.answered(target, answer)
        except (LookupError, Malformed, ValueError) as error:
            raise WrongAnswer("wrong or incomplete: %s" % error) from None
        target.step = answer
        awaited = min(answer.get("present", 0), 128)        # DDNet's servers have no more clients
        # A server that is asked by many at once leaves out its clients. Our own `ping` needs none
        if self.program and clients and len(answer["clients"]) < awaited:
            raise AnswerGoesOn
        return fields

    def answers_so_far(self, target):
        return target.step and self.answered(target, target.step)

    def answered(self, target, answer):
        """Return the attributes of Server that read_ddnet_answer() has found. Raise Malformed."""
        info = read_ddnet_info(to_json({
            **{name: answer.get(name) for name in DDNET_INFO},
            "passworded": answer["flags"] & 1 == 1,
            "map": {"name": answer["map"]},
            "clients": first_values(answer["clients"], DDNET_FOUND_CLIENTS_BYTES)}))
        address = self.rules.listed_address(target.address) if self.program else target.address
        text = "tw-0.6+udp://" + endpoint_text(address, target.port)
        registration = {"info": info, "serial": 0, "secret": "", "addresses": [text]}
        found = target.found.fields if target.found else NO_DETAILS
        return {
            **ddnet_attributes(info),
            "players": clamp(answer["players"]),
            "private": {**found.get("private", NO_DETAILS), "ddnet_registration": registration}}

    def admitted_game(self, source, fields):
        if not self.registered.isdisjoint(fields["private"].get("ddnet_addresses", ())):
            raise Refused("busy", "it has registered here by another address")
        return self.game

    def http_error(self, request, status, hint):
        if request.route == DDNET_REGISTER:
            return to_json({"status": "error", "message": hint})
        return None

    # The list and the pages

    def lists(self):
        return {"servers.json": ServerList(
            ddnet_entry,
            join=lambda entries, now: b'{"servers":[%s]}\n' % b",\n".join(entries))}

    def is_at(self, server, address):
        end = "://" + endpoint_text(address, server.port)       # all its addresses have this port
        urls = self.registration(server)["addresses"]
        return super().is_at(server, address) or any(url.endswith(end) for url in urls)

    def facts(self, server):
        urls = self.registration(server)["addresses"]
        versions = {url[len("tw-"):url.index("+")] for url in urls}
        endpoints = {endpoint_text(*ddnet_endpoint(url)) for url in urls}
        endpoints.discard(server.endpoint)
        return [("Protocols", " and ".join(sorted(versions))),
                ("Also at", ", ".join(sorted(endpoints)))]

    def players(self, server):
        info = json.loads(self.registration(server)["info"])
        # Older servers do not say what their scores are
        is_race = re.search("race|fastcap", info["game_type"], re.IGNORECASE)
        kind = str(info.get("client_score_kind", "time" if is_race else "points"))
        players = []
        for client in info["clients"]:
            score, best_s = client["score"], None
            if kind.startswith("time"):
                # Older servers send it with a minus, and all send -9999 for none
                best_s = None if score == -9999 else abs(score)
                score = None
            # The game has room for 15 bytes of a name and 11 of a clan
            players.append(Player(clean(client["name"], 32), clean(client["clan"], 12), score,
                                  best_s, not client["is_player"]))
        return players

    def fetch(self):
        entries = yield from fetched_json(DDNET_SERVERS, "servers")
        return read_entries(entries, read_ddnet_entry)

    def found(self, entry):
        return {"private": entry.get("private", NO_DETAILS)}


def ddnet_entry(server):
    """Return the entry of a server in the list, in JSON."""
    registration = server.private["ddnet_registration"]
    location = CONTINENTS.get(server.country)
    if server.country == "cn":
        location = "as:cn"
    member = b""
    if location and location != "an":       # the game knows no Antarctica
        member = b'"location":"%s",' % location.encode()
    return b'{"addresses":%s,%s"info":%s}' % (
        to_json(registration["addresses"]), member, registration["info"].encode())


def read_ddnet_entry(entry):
    """Return one server of another master's list as a dict. It has an IPv4 address if the entry has
    any, and only the clients that play are counted. Raise Malformed."""
    try:
        info = entry["info"]
        addresses = entry["addresses"][:DDNET_ADDRESSES]
        address, port = min(map(ddnet_endpoint, addresses), key=lambda endpoint: ":" in endpoint[0])
        server = {
            **info,
            "address": address,
            "port": port,
            "mode": info["game_type"],
            "map": info["map"]["name"],
            "players": count_ddnet_players(info),
        }
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise Malformed("an entry of the list: %r" % error) from None
    return {**json_entry(server, "players", "max_players"),
            "private": {"ddnet_addresses": addresses}}


# --- Cube 2: Sauerbraten and Red Eclipse ---------------------------------------------------------

CUBE2_QUESTION = Form("<B I", "kind nonce", kind=0x81)
# A number is one signed byte or, after a first byte of these, 2 or 4 bytes
CUBE2_NUMBERS = {0x80: struct.Struct("<Bh"), 0x81: struct.Struct("<Bi")}
CUBE2_SMALL_NUMBER = struct.Struct("<b")
CUBE2_CHARACTERS = (                # by their codes
    "\0ÀÁÂÃÄÅÆÇ\t\n\v\f\rÈÉÊËÌÍÎÏÑÒÓÔÕÖØÙÚÛ" + bytes(range(32, 127)).decode()
    + "ÜÝßàáâãäåæçèéêëìíîïñòóôõöøùúûüýÿĄąĆćČčĎďĘęĚěĞğİıŁłŃńŇňŐőŒœŘřŚśŞşŠšŤťŮůŰűŸŹźŻżŽž"
    "ЄБГДЖЗИЙЛПУФЦЧШЩЪЫЬЭЮЯбвгджзийклмнптфцчшщъыьэюяєҐґ")
CUBE2_CODES: Any = codecs.charmap_build(CUBE2_CHARACTERS)       # type: ignore[attr-defined]
CUBE2_COLOUR = re.compile(r"\f(?:\[[^]]*\]|.?)")
CUBE2_MASTER_MODES = {-1: "auth", 0: "open", 1: "veto", 2: "locked", 3: "private", 4: "password"}
CUBE2_ENTRY = re.compile(rb"addserver ([0-9.]{7,15}) ([0-9]{1,5})\b(.{0,600})")
CUBE2_QUOTED = re.compile(rb'"((?:[^"^]|\^.)*)"')


def cube2_number(number):
    if -127 < number < 128:
        return CUBE2_SMALL_NUMBER.pack(number)
    kind = 0x80 if -0x8000 <= number < 0x8000 else 0x81
    return CUBE2_NUMBERS[kind].pack(kind, number)


def read_cube2_numbers(data):
    numbers: List[int] = []
    at = 0
    while at < len(data):
        form = CUBE2_NUMBERS.get(data[at], CUBE2_SMALL_NUMBER)
        if at + form.size > len(data):
            raise Malformed("the last number is incomplete")
        *_, number = form.unpack_from(data, at)
        numbers.append(number)
        at += form.size
    return numbers


def cube2_bytes(text):
    encoded, _ = codecs.charmap_encode(text, "replace", CUBE2_CODES)
    return encoded


def cube2_text(raw):
    """Decode a text without its colours, and clean it."""
    text, _ = codecs.charmap_decode(raw, "replace", CUBE2_CHARACTERS)
    uncoloured = CUBE2_COLOUR.sub("", text)
    return clean(uncoloured)


def cube2_escaped(text):
    text = text.replace("^", "^^")
    return text.replace('"', '^"')


class Sauerbraten(PolledGame, TcpProtocol):
    r"""Cube 2's protocol in the dialect of Sauerbraten. A game server announces itself by TCP, is
    queried by UDP at the port after its own, and is told whether it is listed. Captured from
    Debian's cube2-server; what its clients send follows the sources.

        > regserv 28785\n           < succreg\ncleargbans\n, or failreg REASON\n; once an hour
        > reqauth ID NAME\n, confauth ID …\n        < failauth ID\n
        > reqserverauth NAME\n      < failserverauth\n
        > list\n                    < addserver 203.0.113.7 28785\n … 00, then it is closed
        < 81 nonce.u32
        > 81 nonce.u32 00 05 800401 03 805802 10 00 "reissen" 00 "My server" 00
                                    players, how many numbers follow, these, and texts. A text has
                                    a number for each character, and 0; \f begins a colour in it
    """

    game = "sauerbraten"
    title = "Sauerbraten"
    settings = (Setting("sauerbraten.port", "28787", read_port,
                        "TCP port for servers and players.", live=False),)
    ports = (Port("tcp"),)
    master_port = 28787
    contacts = (Contact(
        "In server-init.cfg",
        'mastername "%(host)s"\nmasterport %(port)d',
        "UDP 28785 and 28786"),)
    join_words = "In the game, enter"
    join_line = "/connect %(address)s %(port)d"
    ipv4_only = ipv4_list = True
    speaks_first = False
    announced_over = fetched_over = "tcp"
    offset = 1
    answer_lifetime_s = None            # its last announcement says how long it stays
    # An answer: how many numbers it may have, and the names of the first ones and of the texts
    counts: Tuple[int, ...] = 5, 7
    numbers = "protocol mode seconds_left max_players master_mode".split()
    texts = "map description".split()
    version = "%(protocol)d"
    modes = dict(enumerate((
        "demo, ffa, coop edit, teamplay, instagib, insta team, efficiency, effic team, tactics, "
        "tac team, capture, regen capture, ctf, insta ctf, protect, insta protect, hold, "
        "insta hold, effic ctf, effic protect, effic hold, collect, insta collect, "
        "effic collect").split(", "), -1))
    own_numbers = {"protocol": 260}     # of a server that `announce` announces
    # What a game server sends, and what it is told
    server_line = "regserv %(port)d\n"
    accepted, refused = "succreg\ncleargbans\n", "failreg %(reason)s\n"
    answers = {"reqauth": "failauth %(id)s\n", "confauth": "failauth %(id)s\n",
               "reqserverauth": "failserverauth\n"}
    otherwise = ""

    def session(self, address, now):
        return Cube2Session(self, address, now)

    def question(self, target):
        return CUBE2_QUESTION.write(nonce=target.nonce)

    def read_answer(self, target, data):
        question = self.question(target)
        if not data.startswith(question):
            raise Malformed("not an answer to the open query")
        body = data[len(question):]
        numbers = iter(read_cube2_numbers(body))
        players = clamp(next(numbers, 0))
        count = clamp(next(numbers, 0))
        following = list(itertools.islice(numbers, count))
        characters = bytes(number & 255 for number in numbers)
        *raw_texts, unended = characters.split(b"\0")
        is_whole = not unended and len(raw_texts) >= len(self.texts)
        if count not in self.counts or not is_whole:
            raise Malformed("not the numbers and texts of a server of %s" % self.title)
        most_texts = len(self.texts) + min(players, 255)
        texts = [cube2_text(raw) for raw in raw_texts[:most_texts]]
        names = texts[len(self.texts):]
        info: Dict[str, Any] = {"players": players, "player_names": read_names(names)}
        info.update(zip(self.numbers, following))
        info.update(zip(self.texts, texts))
        return self.attributes(info)

    def attributes(self, info):
        """Return the attributes of Server in an answer, whose numbers and texts `info` has."""
        mode = info["mode"]
        master_mode = info["master_mode"]
        return {
            "name": info["description"],
            "mode": self.modes.get(mode, str(mode)),
            "map": info["map"],
            "version": self.version % info,
            "players": info["players"],
            "max_players": clamp(info["max_players"]),
            "details": {
                "master_mode": CUBE2_MASTER_MODES.get(master_mode, str(master_mode)),
                "seconds_left": str(info["seconds_left"]),
            },
        }

    def lists(self):
        return {
            "list": ServerList(self.entry, is_ipv4, self.joined),
        }

    @staticmethod
    def entry(server):
        line = "addserver %s %d\n" % (server.address, server.port)
        return line.encode()

    @staticmethod
    def joined(entries, now):
        return b"".join(entries) + b"\0"

    def answer(self, server, data):
        """Answer a query for a server that does not do it itself. Raise Malformed."""
        if data[:1] in (b"", b"\0"):
            raise Malformed("a query begins with a number that is not 0")
        info = {
            **self.own_numbers,
            "max_players": server.max_players,
            "map": server.map,
            "description": server.name,
        }
        for number, mode in self.modes.items():
            if mode == server.mode:
                info["mode"] = number
        answer = data + cube2_number(server.players)
        answer += cube2_number(len(self.numbers))
        for name in self.numbers:
            answer += cube2_number(info.get(name, 0))
        for name in self.texts:
            answer += cube2_bytes(info.get(name, "")) + b"\0"
        return answer

    def announce(self, server):
        while True:
            name = cube2_escaped(server.name)
            line = self.server_line % {"port": server.port, "name": name}
            yield from replies(cube2_bytes(line), HOUR, self.is_accepted)

    @staticmethod
    def is_accepted(received):
        *lines, _ = received.split(b"\n")
        for line in lines:
            word, _, text = line.partition(b" ")
            if word == b"failreg" or b"not listed" in text or b"not be listed" in text:
                raise MasterRefused(cube2_text(text), RETRY_MAX_S)
            if word == b"succreg" or b"is now listed" in text:
                return True
        return False

    def fetch(self):
        data = yield from received_until_closed(b"list\n", 128 * LIST_SERVERS)
        entries = CUBE2_ENTRY.finditer(data)
        first_entries = itertools.islice(entries, LIST_SERVERS)
        return map(self.read_entry, first_entries)

    @staticmethod
    def read_entry(entry):
        address, port, following = entry.groups()
        server = {"address": address.decode(), "port": int(port)}
        name = CUBE2_QUOTED.search(following)
        if name:
            escaped, = name.groups()
            unescaped = re.sub(rb"\^([^f])", rb"\1", escaped)
            server["name"] = cube2_text(unescaped.replace(b"^f", b"\f"))
        return server


class RedEclipse(Sauerbraten):
    r"""Cube 2's protocol in the dialect of Red Eclipse, captured from its server and master 1.6.0.

        > server 28801 * 160 "" 1 ""\n              < echo "server is now listed"\n
        > update\n          < setversion 160 230\n, the highest of all listed servers, and the list
        > list\n            < clearservers\naddserver 203.0.113.7 28801 0 "NAME" "" "" "BRANCH"\n …
        > 81 nonce.u32 00 0f 80e600 03 00 805802 20 00 808613 00 01 06 00 02 40 00 00
          "futuresport" 00 00 00                    map, name, branch, and the players' names

    The connection stays open. If it ends, the server leaves unless it answers a query at once; it
    comes back at the next full minute."""

    game = "redeclipse"
    title = "Red Eclipse"
    settings = (Setting("redeclipse.port", "28800", read_port,
                        "TCP port for servers and players.", live=False),)
    master_port = 28800
    contacts = (Contact(
        "In servinit.cfg",
        'servertype 2\nservermaster "%(host)s"\nservermasterport %(port)d',
        "UDP 28801 and 28802"),)
    private = {
        "version_number": Private(160, json_number(0, PLAYERS_MAX)),
        "protocol": Private(230, json_number(0, PLAYERS_MAX)),
        "player_names": Private((), read_names),
    }
    is_kept_by_connection = True
    counts = (15,)
    numbers = ("protocol mode mutators seconds_left max_players master_mode variables mods major "
               "minor patch platform bits state state_seconds_left").split()
    texts = "map description branch".split()
    version = "%(major)d.%(minor)d.%(patch)d"
    modes = dict(enumerate((
        "demo, editing, deathmatch, capture the flag, defend the flag, bomber-ball, "
        "race").split(", ")))
    own_numbers = {"protocol": 230, "major": 1, "minor": 6}
    server_line = 'server %(port)d * 160 "%(name)s" 1 ""\n'
    accepted = 'echo "server is now listed"\n'
    refused = 'echo "server is not listed: %(reason)s"\n'
    otherwise = 'error "unknown command %(command)s"\n'

    def attributes(self, info):
        major, minor, patch = info["major"], info["minor"], info["patch"]
        version_number = 100 * major + 10 * minor + patch
        fields = super().attributes(info)
        fields["details"]["branch"] = info["branch"]
        fields["private"] = {
            "version_number": clamp(version_number),
            "protocol": clamp(info["protocol"]),
            "player_names": info["player_names"],
        }
        return fields

    def players(self, server):
        return list(map(Player, server.private["player_names"]))

    def lists(self):
        return {
            "list": ServerList(self.entry, is_ipv4, self.joined),
            "update": ServerList(self.entry, is_ipv4, self.update),
            "version": ServerList(self.entry, is_ipv4, self.versions),
        }

    @staticmethod
    def entry(server):
        name = cube2_escaped(server.name)
        branch = cube2_escaped(server.details.get("branch", ""))
        line = 'addserver %s %d %d "%s" "" "" "%s"\n' % (
            server.address, server.port, server.priority, name, branch)
        private = server.private
        versions = private["version_number"], private["protocol"]
        return versions, cube2_bytes(line)

    @staticmethod
    def joined(entries, now):
        lines = [line for _, line in entries]
        return b"clearservers\n" + b"".join(lines)

    @staticmethod
    def versions(entries, now):
        versions = [versions for versions, _ in entries]
        highest = max(versions, default=(160, 230))
        return b"setversion %d %d\n" % highest

    def update(self, entries, now):
        versions = self.versions(entries, now)
        return versions + self.joined(entries, now)


class Cube2Session(ServerSession):
    """The connection of a game server or a player."""

    message_end = b"\n"
    message_bytes = 512
    messages_a_minute = 32
    idle_s = 60.0
    lifetime_s = 4500.0

    def message(self, message, now):
        text = decode_legacy(message, self.message_bytes)
        command, *words = text.split() or [""]
        word, *_ = words or [""]
        if self.room.server_line.startswith(command + " "):
            port = re.fullmatch("[0-9]{1,5}", word) and int(word)
            self.announced(port or 0, now)
        elif command in self.room.rendered_lists:
            self.done = True
            return self.rendered(command, now)
        elif command:
            answer = self.room.answers.get(command, self.room.otherwise)
            values = {"command": cube2_escaped(command), "id": word}
            return cube2_bytes(answer % values)
        return b""

    def told(self, outcome, reason):
        answer = self.room.refused
        if outcome == "listed":
            answer = self.room.accepted
        values = {"reason": cube2_escaped(reason)}
        return cube2_bytes(answer % values)


# ================================================================================================
# 8  Pages
#
# The pages that people see: a departures board, not a dashboard. The templates, the style sheet and
# the script come first. Below them stand the functions that fill the templates from a Server or a
# Series. Nothing here knows HTTP. The style sheet and the script have addresses of their own and
# are never formatted, so that the Content-Security-Policy needs no exception: there is no style
# attribute, no inline script, and nothing comes from another site. Every page is complete without
# the script.
# ================================================================================================

# --- Templates -----------------------------------------------------------------------------------

# The list page. The operator's own `[http] template` may replace it. Each of these placeholders may
# occur in a template once or not at all:
#   $title    the title in the ini, as text           $intro    the ini's paragraph, may be empty
#   $logo     the ini's image, may be empty           $links    to /games, /add; the ini's own
#   $head     <meta>, style sheet, script, icon       $totals   "312 players on 87 servers"
#   $tabs     the games with their numbers            $search   the form, and how many servers match
#   $table    the list, or a hint if it is empty      $foot     the links to /check, /servers.json
# Any other dollar sign is written $$.
LIST_PLACEHOLDERS = (
    "title", "logo", "intro", "links", "head", "totals", "tabs", "search", "table", "foot")
LIST_PAGE = """\
<!doctype html>
<html lang="en">
<head>
$head</head>
<body>
<header>
<div class="row"><h1>$logo$title</h1>
<nav class="links" aria-label="Site">$links</nav></div>
<div class="row">$intro$totals</div>
</header>
<main>
$tabs$search$table</main>
$foot</body>
</html>
"""

PAGE = """\
<!doctype html>
<html lang="en">
<head>
$head</head>
<body>
<header class="row"><a class="home" href="/">$logo$title</a>
<nav class="links" aria-label="Site"><a href="/">Servers</a>
$links</nav></header>
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
$link<link rel="icon" href="/icon" type="$icon_type">
<link rel="stylesheet" href="/style.css">
<script src="/app.js" defer></script>
"""

LOGO = '<img class="logo" src="/icon" alt="">'
LINKS = """\
<a href="/games">Games</a>
<a href="/add">Add your server</a>
$links"""

FOOT = """\
<footer class="row">
<nav class="links" aria-label="More"><a href="/add">Add your server</a>
<a href="/games">Games</a> <a href="/check">Is my server listed?</a>
$links</nav>
<nav class="links small" aria-label="For programs"><a href="/servers.json">JSON</a>
<a href="/servers.xml">XML</a> <a href="/metrics">Metrics</a></nav>
</footer>
"""

SEARCH = """\
<form id="search" action="/" role="search"$idle>
<input type="hidden" name="game" value="$game">
<input type="search" name="q" value="$text" aria-label="Search" maxlength="128"
 placeholder="Name, map, player, address" autocomplete="off" spellcheck="false">
<details class="filters"><summary>$filters</summary>
<div>$hide<label>Min. players <input type="number" name="players_min" value="$players_min"
 min="0" max="65535"></label>
<details id="countries"$hidden><summary>$summary</summary>
<div class="choice" id="country-boxes" data-live>$boxes</div></details>
</div></details>
<label class="order">Order <select name="sort">$orders</select></label>
<button>Search</button>
<p class="count"><span id="status" role="status">$status</span><span id="clear"$clear> ·
<a href="$all">Clear</a></span></p>
</form>
"""

BOX = '<label><input type="checkbox" name="%s" value="$value"$marked> $words</label>\n'
HIDE = ("empty", "Hide empty"), ("full", "Hide full"), ("password", "Hide locked")
# In which orders a click on each heading sorts, one after the other. A minus sorts the largest
# first; "" is the usual order: that of players, after priorities
SORTS: Dict[str, Tuple[str, ...]] = {
    column: (column, "-" + column, "")
    for column in "name players game mode map country address version seen".split()}
SORTS["players"] = "", "players"
SORTS["seen"] = "-seen", "seen", ""     # latest first
ORDER = '<option value="$value"$marked>$words</option>'

HEADING = '<th role="columnheader" data-sorts="$sorts"$direction><a href="$link">$words</a>'
TABLE = """\
<svg hidden>$symbols</svg>
<table role="table" aria-label="Servers" id="servers" class="$classes"
 data-matching="$matching" data-listed="$listed"$hidden>
<thead role="rowgroup"><tr role="row">$headings</thead>
<tbody role="rowgroup">
$rows</tbody>
</table>
<p class="legend" id="legend" data-live>$legend</p>
<div id="hint" data-live>$hint</div>
"""

# What stands for the words of render_badges() in a row of the list, 12 pixels wide
SIGNS = {
    "official": '<path d="M2 6.5 4.75 9.5 10.25 2.75"/>',
    "unconfirmed": '<circle cx="6" cy="6.25" r="4.25" stroke-dasharray="1.7 1.64"/>',
    "self-reported": '<path d="M1.5 3h3v3L3 9M7 3h3v3L8.5 9"/>',
    "another list": '<path d="M3 9.5 9.25 3.25M4.25 3h5.25v5.25"/>',
    "not responding": '<path d="M2.5 3 9.5 10M9.5 3 2.5 10"/>',
    "password": '<path d="M4 5.75V4a2 2 0 0 1 4 0v1.75M2.5 6h7v4.5h-7z"/>',
}

EMPTY = """\
<section class="hint">
<h2>No servers yet</h2>
<p>The first game server to announce itself appears here.</p>
<div class="blocks">$blocks</div>
<p><a class="play" href="$add">Add your server</a></p>
<p class="note">You have added one already? <a href="/check">Is my server listed?</a> says what
arrived from it.<br>
Is this your master? Name other masters in its settings, as [upstream] masters: the servers in their
lists that answer appear here.</p>
</section>
"""

NO_MATCH = """\
<section class="hint">
<h2>$heading</h2>
<p>$asked</p>
<p><a href="$all">Clear the search</a> to see the $listed.</p>
$others<p class="note">Is one missing? <a href="/check">Is my server listed?</a></p>
</section>
"""
OTHER_MATCHES = '<p>In other games:</p>\n<nav class="tabs" aria-label="Other games">$tabs</nav>\n'

ADD_PAGE = """\
<h1>Add your server</h1>
<p class="lead">Paste your game's lines and restart it. It is in the list a minute later. If not,
<a href="/check">ask why</a>.</p>
$choice<div class="blocks">
$blocks</div>
"""

BLOCK = """\
<section id="add-$game">
<h2>$title</h2>
<p>$where:</p>
<pre><code>$block</code></pre>
<p>Open $opens in the firewall and the router.</p>
</section>
"""

JOIN = """\
<p class="join">$play<span>$words</span> $line</p>
"""

# The explanations of Server.verified
VERIFIED = {
    "handshake": "It answered this master's handshake",
    "query": "It answers this master's queries",
    "connection": "It keeps a connection to this master",
    "self-reported": "Not verified: everything here is what it says of itself",
    "another list": "It answers this master's queries; its name and texts come from another list",
}

SERVER_PAGE = """\
<p class="back"><a href="/">← All servers</a> <a href="$game_link"><bdi>$game</bdi></a></p>
<div id="state" data-live>
<div class="row">
<div><h1><bdi>$name</bdi> $badges</h1>
<p class="lead">$lead</p></div>
<p class="totals">$count</p>
</div>
$join</div>
$history<div class="two">
<section id="players" data-live>$players</section>
<section>
<h2>About</h2>
<dl id="facts" data-live>
$facts</dl>
</section>
</div>
<section>
<details><summary>Banner for other pages</summary>
<p><img src="$image" alt="" width="560" height="95"></p>
<p>In HTML:</p>
<pre><code>&lt;a href="$base$link"&gt;&lt;img src="$base$image"
alt="$address" width="560" height="95"&gt;&lt;/a&gt;</code></pre>
<p>In BBCode, for forums:</p>
<pre><code>[url=$base$link][img]$base$image[/img][/url]</code></pre>
<p>In Markdown:</p>
<pre><code>[![$address]($base$image)]($base$link)</code></pre>
</details>
</section>
"""

# Text that is too long for the picture fades out at its end, because the master cannot know how
# wide a font draws it
BANNER = """\
<svg xmlns="http://www.w3.org/2000/svg" width="560" height="95" viewBox="0 0 560 95" role="img">
<title>$name $players</title>
<style>
svg { --ground: #fcfbf8; --ink: #1d1b18; --soft: #625d55; --line: #e3dfd6; }
@media (prefers-color-scheme: dark) {
  svg { --ground: #131210; --ink: #ece8df; --soft: #a8a195; --line: #2d2a26; }
}
$accent
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
<text class="address" x="16" y="79">$place</text>
</g>
<text class="players" x="544" y="34">$players</text>
<svg x="424" y="42" width="120" height="45">$spark</svg>
</svg>
"""

HISTORY = """\
<section>
<div class="row">
<h2>History</h2>
<nav class="tabs" aria-label="Span">$tabs</nav>
</div>
<div id="history" data-live>
$chart</div>
</section>
"""

GAMES_PAGE = """\
<h1>Games</h1>
<p class="lead">Players now, and at most and on average in the past day, week and month.</p>
<table id="games" data-live>
<thead>
<tr><th>Game<th>Servers<th>Now<th>Peak day<th><span class="unseen">Peak</span> week\
<th><span class="unseen">Peak</span> month<th>Mean day<th><span class="unseen">Mean</span> week\
<th><span class="unseen">Mean</span> month<th>Past week<th>Most played, past week
</thead>
<tbody>
$rows</tbody>
</table>
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
<section id="findings" data-live>
<h2>$verdict</h2>
$findings</section>
"""

FINDINGS = """\
<table class="findings">
<thead><tr><th scope="col">Server<th scope="col">What became of it<th scope="col">When</thead>
<tbody>
$rows</tbody>
</table>
"""

NOTHING_ARRIVED = """\
<p>Nothing has arrived from $endpoint lately. Is the address of this master right in the settings of
the game server, and does its firewall let packets out? Most game servers announce themselves by
IPv4.</p>
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
<g stroke="%s" stroke-width="3" stroke-linecap="round"><path d="M7 9h11M7 16h8M7 23h12"/>\
<path d="M24 9h1M21 16h4M24 23h1" stroke="#ece8df"/></g></svg>
"""

# --- Style sheet and script ----------------------------------------------------------------------

# The colours are custom properties, in one set for light and one for dark. Text has a contrast of
# at least 4.5:1 to its background.
STYLE_CSS = r""":root {
  color-scheme: light dark; --edge: 1.25rem;
  --ground: #fcfbf8; --raised: #f4f1ea; --ink: #1d1b18; --soft: #625d55; --line: #e3dfd6;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #131210; --raised: #1d1b18; --ink: #ece8df; --soft: #a8a195; --line: #2d2a26;
  }
}

* { box-sizing: border-box; }
html {
  -webkit-text-size-adjust: 100%; text-size-adjust: 100%; scrollbar-gutter: stable;
  scroll-padding-top: 2.5rem;       /* the table's head */
}
body {
  margin: 0 auto; padding: 0 var(--edge); max-width: 100rem; background: var(--ground);
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
h2 small { margin-left: .25rem; color: var(--soft); font-size: .875rem; font-weight: 400; }
h3 { margin: 0; font-size: 1rem; font-weight: 650; }
p, dd { margin: 0; }
b { font-weight: 650; }
section { margin-top: 2.5rem; }
code, pre {
  font: .8rem/1.5rem
    ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "Liberation Mono", monospace;
}
[hidden] { display: none !important; }
/* A name that consists of combining marks alone cannot be broken, so it is clipped. The padding
   keeps visible what stands a little outside, such as the ring around a focus */
main { margin: 0 calc(-1 * var(--edge)); padding: 0 var(--edge); overflow-x: clip; }
.unseen {
  position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%);
  white-space: nowrap;
}

header { padding: 1.75rem 0 1.25rem; }
.row {
  display: flex; flex-wrap: wrap; justify-content: space-between; align-items: baseline;
  gap: .25rem 2rem;
}
.row + .row { margin-top: .5rem; }
.row > p:first-child { flex: 1 1 20rem; min-width: 0; max-width: 42rem; }
header p, .lead, .totals { color: var(--soft); overflow-wrap: anywhere; }
.lead { max-width: 52rem; }
.home { color: var(--soft); font-weight: 650; text-decoration: none; }
.logo { height: 2rem; margin-right: .625rem; vertical-align: middle; }
.totals b { color: var(--ink); font-size: 1.625rem; letter-spacing: -.015em; }
.totals svg { width: 4rem; height: 1.5rem; margin-right: .75rem; vertical-align: -.125rem; }
footer { margin: 3rem 0 2rem; padding-top: 1rem; border-top: 1px solid var(--line); }
footer .small { font-size: .75rem; }

/* Tabs and forms */
.row h2 { margin: 0; }
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
input, button, select { font: inherit; color: var(--ink); }
button:hover, summary:hover { color: var(--accent); }
input:not([type=checkbox]), select {
  height: 2rem; padding: 0 .5rem; border: 1px solid var(--line); border-bottom-color: var(--soft);
  border-radius: 3px; background: var(--raised);
}
#search { position: relative; margin: .75rem 0 .5rem; }
.count { margin-left: auto; font-size: .8125rem; }
.idle > :not(.count) { display: none; }
input[type=search] { width: clamp(12rem, 24vw, 20rem); min-width: 0; }
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
@media (max-width: 40rem) {
  .check input { flex: 1; min-width: 0; }
  .check label:first-child { flex: 1 0 100%; }
}
.check input[type=number] { width: 6rem; }
/* What opens lies over the list, so that nothing moves */
summary { min-height: 2rem; padding: .25rem 0; cursor: pointer; white-space: nowrap; }
.filters > div, .choice {
  position: absolute; z-index: 2; padding: .5rem .875rem; border: 1px solid var(--line);
  border-radius: 3px; background: var(--raised);
}
.filters > div { display: flex; flex-wrap: wrap; align-items: center; gap: .25rem 1.25rem; }
.choice { min-width: 14rem; max-width: calc(100vw - 3rem); max-height: 20rem; overflow-y: auto; }
.choice label { display: flex; padding: .25rem 0; }
.choice input { flex: none; }
.choice small { margin-left: auto; padding-left: .75rem; }

/* The board. Its rows are not displayed as those of a table, so that rows out of sight cost no
   layout, and so that a phone can fold them. They reach into the margins, where the stars hang.
   Columns: 1 name, 2 players, 3 game, 4 mode, 5 map, 6 country, 7 address, 8 version, 9 seen */
p#status { margin: .5rem 0 .25rem; color: var(--soft); font-size: .8125rem; }
#status.old { color: var(--ink); font-weight: 650; }
#status:first-child:empty { display: none; }
.board, #games, .board :is(thead, tbody), #games :is(thead, tbody) { display: block; }
.board tr {
  position: relative; display: flex; column-gap: .875rem; align-items: center;
  margin: 0 calc(-1 * var(--edge)); padding: 0 var(--edge);
  background: linear-gradient(var(--line) 0 0) bottom / calc(100% - 2 * var(--edge)) 1px no-repeat;
}
.board thead { position: sticky; top: 0; z-index: 1; background: var(--ground); }
.board tbody tr { height: 2.5rem; content-visibility: auto; contain-intrinsic-height: 2.5rem; }
.board tbody tr:hover { background-color: var(--raised); }
.board :is(th, td), #games :is(th, td) {
  flex: none; width: 5rem; padding: 0; overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap;
}
thead th { color: var(--soft); font-size: .8125rem; font-weight: 400; text-align: left; }
.board th { padding: .25rem 0; }
th a { text-decoration: none; }
.board th[aria-sort] { color: var(--ink); }
th[aria-sort] a::after { content: "\00a0↑"; color: var(--accent); }
th[aria-sort=descending] a::after { content: "\00a0↓"; }
.no-game :is(th, td):nth-child(3), .no-mode :is(th, td):nth-child(4),
.no-map :is(th, td):nth-child(5), .no-country :is(th, td):nth-child(6),
.no-version :is(th, td):nth-child(8) { display: none; }
.board :is(td:first-child, td:nth-child(2), td:nth-child(7)) { display: flex; align-items: center; }
.board td:first-child a { min-width: 0; font-weight: 650; text-decoration: none; }
.board td a:hover { text-decoration: underline; }
/* A name that is too long loses its end, even if it runs from right to left */
.board bdi { display: block; overflow: hidden; text-overflow: ellipsis; text-align: left; }
.board [data-with] td:first-child { order: -2; }
.board [data-with]::after {
  content: "with " attr(data-with); order: -1; max-width: 9rem; overflow: hidden;
  color: var(--soft); text-overflow: ellipsis; white-space: nowrap;
}
.board td:nth-child(n+3), .empty td:nth-child(2), .full td:nth-child(2) { color: var(--soft); }
.empty :is(b, td:first-child a) { font-weight: 400; }
.full td:nth-child(2) :is(svg, meter) { opacity: .5; }
.board td > span { flex: 0 0 4rem; line-height: 1.25rem; }
.board td > svg { flex: none; width: 3.25rem; height: 1.21875rem; margin-left: .625rem; }
.board td > svg, .totals svg, #games svg { fill: var(--accent); opacity: .75; }
meter {
  display: block; width: 100%; height: 2px; appearance: none; -webkit-appearance: none; border: 0;
  background: var(--line);
}
meter::-webkit-meter-inner-element { display: block; }
meter::-webkit-meter-bar { height: 2px; border: 0; border-radius: 0; background: var(--line); }
meter::-webkit-meter-optimum-value { background: var(--accent); }
meter::-moz-meter-bar { background: var(--accent); }
i {
  flex: none; margin-left: .375rem; color: var(--soft); font-size: .75rem; font-style: normal;
  font-weight: 400; letter-spacing: 0; white-space: nowrap;
}
i.official { color: var(--accent); }
i svg {
  width: .75rem; height: .75rem; vertical-align: -.0625rem; fill: none; stroke: currentColor;
  stroke-width: 1.25;
}
.legend {
  display: flex; flex-wrap: wrap; gap: 0 1.5rem; margin-top: 1rem; color: var(--soft);
  font-size: .8125rem;
}
.legend i { margin: 0; }
[hidden] + .legend { display: none; }
.board :is(a, button) { outline-offset: -2px; }
abbr {
  display: inline-block; padding: 0 .25rem; border: 1px solid var(--line); border-radius: 2px;
  font-size: .75rem; line-height: 1rem; vertical-align: .0625rem; text-decoration: none;
  letter-spacing: .05em;
}
.board code { min-width: 0; overflow: hidden; text-overflow: ellipsis; }
.copy, .star {
  position: relative; flex: none; width: 1.5rem; height: 1.5rem; margin-left: .25rem; padding: 0;
  border: 0; background: none; color: var(--soft); vertical-align: top; cursor: pointer;
}
.board .copy { margin-left: auto; }
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
.star::before { content: "☆"; }
.star[aria-pressed=true]::before { content: "★"; color: var(--accent); }
.board .star { position: absolute; left: 0; top: .5rem; width: var(--edge); margin: 0; }
@media (hover: hover) {
  .board tr:not(:hover) .star:not([aria-pressed=true], :focus-visible) { opacity: 0; }
}
.hint { margin: 3rem 0; max-width: 46rem; }
.hint p + p, .hint .note { margin-top: 1rem; }
pre {
  margin: .25rem 0 1rem; padding: .75rem 1rem; border-left: 2px solid var(--accent);
  background: var(--raised); white-space: pre-wrap;
}

/* Every column has a width of its own. The name takes what remains, at least 35 %: as it gets
   narrow, first Seen leaves, then Version, Mode, and Map */
@media (min-width: 54.01rem) {
  .order { display: none !important; }
  .board :is(th, td):first-child { flex: 1; }
  .board :is(th, td):nth-child(2) { width: 8rem; }
  .board :is(th, td):nth-child(3) { width: 6rem; }
  .board :is(th, td):nth-child(4) { width: clamp(6rem, 8vw, 8.5rem); }
  .board :is(th, td):nth-child(5) { width: 8.5rem; }
  .board :is(th, td):nth-child(6) { width: 3.5rem; }
  .board :is(th, td):nth-child(7) { width: 11.75rem; }
}
@media (max-width: 99.99rem) { .board :is(th, td):nth-child(9) { display: none; } }
@media (max-width: 89.99rem) { .board :is(th, td):nth-child(8) { display: none; } }
@media (54rem < width <= 79rem) { .board :is(th, td):nth-child(4) { display: none; } }
@media (54rem < width <= 68rem) { .board:not(.no-game) :is(th, td):nth-child(5) { display: none; } }
/* With room the filters stand in the form. A browser that cannot open them has the button */
@media (min-width: 64rem) {
  @supports selector(::details-content) {
    .filters > summary { display: none; }
    .filters::details-content { content-visibility: visible; }
    .filters > div { position: static; padding: 0; border: 0; background: none; }
  }
}

/* Narrow: every row has two lines, games scroll sideways, filters open over the list */
@media (max-width: 54rem) {
  :root { --edge: 1rem; }
  header { padding: .875rem 0 .5rem; }
  h1 { font-size: 1.375rem; }
  .totals b { font-size: 1.25rem; }
  main > .tabs, header .links {
    flex-wrap: nowrap; margin: 0 calc(-1 * var(--edge)); padding: 0 2.5rem 0 var(--edge);
    overflow-x: auto; scrollbar-width: none; white-space: nowrap;
    mask-image: linear-gradient(
      90deg, transparent, #000 var(--edge) calc(100% - 2.5rem), transparent);
  }
  main > .tabs [aria-current=page] { order: -1; }
  #search { gap: .25rem .875rem; margin: .5rem 0 0; }
  #search input[type=search] { flex: 1 0 min(60%, 22rem); height: 2.25rem; font-size: 1rem; }
  .filters > div { left: 0; right: 0; top: 2.5rem; max-height: 60vh; overflow-y: auto; }
  .choice { position: static; max-height: none; padding: 0 0 0 1rem; border: 0; }
  .order { order: 1; }
  .count { flex: 1 1 auto; }
  .order select { height: 1.75rem; border-color: transparent; background: none; }
  /* The headings are for screen readers, and for those who get there by the keyboard */
  .board thead tr { flex-wrap: wrap; }
  .board thead:not(:focus-within) {
    position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%);
  }
  .board tbody tr {
    display: grid; align-content: center; column-gap: .625rem; height: 4.25rem;
    grid-template: 1.75rem 1.5rem / auto fit-content(6.5rem) minmax(0, 1fr) auto 3.5rem 1.75rem;
    contain-intrinsic-height: 4.25rem;
  }
  .board tbody td { width: auto; grid-row: 2; font-size: .8125rem; }
  .board td:first-child { grid-area: 1 / 1 / 2 / 5; font-size: 1rem; }
  .board [data-with] td:first-child { grid-column: 1 / 4; }
  .board [data-with]::after { grid-area: 1 / 4; }
  .board td:nth-child(2) {
    grid-area: 1 / 5 / 3 / 6; flex-direction: column; font-size: .9375rem;
  }
  .board td > span { flex: none; width: 100%; }
  .board td > svg { width: 100%; height: 1.25rem; margin: .375rem 0 0; }
  .board td:nth-child(5) { grid-column: 3; }
  .board td:nth-child(6) { grid-column: 4; }
  .board td:nth-child(7) { grid-area: 2 / 6; }
  .board code { display: none; }
  .board .star { left: auto; right: .75rem; width: 2rem; font-size: 1.125rem; }
  /* The whole row leads to the server's page */
  .board td:first-child a::after { content: ""; position: absolute; inset: 0; }
}
/* If text is twice as large on a phone, curves and signs are left out */
@media (max-width: 19.99rem) {
  .board tbody tr { column-gap: .375rem; }
  .board :is(td > svg, i) { display: none; }
}

/* The pages of one server, of /check, and of errors */
h1, h3, dt, dd, li, pre, .from { overflow-wrap: anywhere; }
h1 i { margin: 0 .5rem 0 0; vertical-align: .25rem; }
.play {
  display: inline-block; margin-top: 1rem; padding: .25rem .875rem; border: 1px solid var(--accent);
  border-radius: 3px; color: var(--accent); font-weight: 650; text-decoration: none;
}
.play:hover { background: var(--accent); color: var(--ground); }
#state .row { align-items: flex-start; }
#state .row > div { flex: 1 1 20rem; min-width: 0; }
.two { display: flex; flex-wrap: wrap; gap: 0 3rem; }
.two section { flex: 1 1 18rem; min-width: 0; }
.two #players { flex: 2 1 24rem; }
#players:empty { display: none; }
.names { columns: 10rem; margin: 0; padding: 0; list-style: none; }
.names li, dl div, #players td { padding: .25rem 0; border-bottom: 1px solid var(--line); }
#players :is(th, td) { min-width: 4.5rem; padding-inline: 0 1.25rem; overflow-wrap: anywhere; }
#players :is(th, td):last-child { padding-right: 0; text-align: right; white-space: nowrap; }
dl { max-width: 48rem; margin: 0; }
dl div { display: flex; gap: 1.5rem; }
dt { flex: 0 0 8rem; color: var(--soft); font-size: .8125rem; }
dd { min-width: 0; }
img { max-width: 100%; height: auto; }
.findings, #players table { width: 100%; border-collapse: collapse; }
.findings :is(th, td) {
  padding: .75rem 1.5rem .75rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
}
.findings th, #players th { padding-top: 0; }
.findings :is(th, td):first-child { width: 28%; min-width: 14rem; }
.findings td { overflow-wrap: anywhere; }
.findings a { font-weight: 650; }
.findings p { max-width: 48rem; }
.from, figcaption { margin-top: .25rem; color: var(--soft); font-size: .8125rem; }
.findings .from { margin: 0; white-space: nowrap; }
@media (max-width: 54rem) {
  .findings thead { display: none; }
  .findings :is(tbody, tr, td) { display: block; }
  .findings td:first-child { width: auto; }
  .findings td { padding: 0 0 .25rem; border: 0; }
  .findings tr { padding: .75rem 0; border-top: 1px solid var(--line); }
}
.error { padding: 3rem 0; }
.error .status { color: var(--accent); font-size: 3rem; line-height: 3.5rem; font-weight: 650; }
.error .lead { margin: .5rem 0 1.5rem; max-width: 42rem; }

/* Links to other pages, the blocks of /add, and how to join a server */
.links { display: flex; flex-wrap: wrap; gap: .25rem 1.75rem; font-size: .875rem; }
.links a { color: var(--soft); text-decoration: none; }
.links a:hover { color: var(--accent); text-decoration: underline; }
/* A line before the operator's own */
header [href="/add"] + a { padding-left: 1.75rem; border-left: 1px solid var(--line); }
.blocks {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 28rem), 1fr));
  gap: 2rem 3rem; margin-top: 1.5rem;
}
.lead + .tabs { margin-top: 1rem; }
.blocks section { min-width: 0; margin: 0; scroll-margin-top: 1rem; }
.blocks p, .note { color: var(--soft); font-size: .875rem; }
.blocks pre { position: relative; margin: .25rem 0 .5rem; padding-right: 2.5rem; }
.blocks .copy { position: absolute; right: .5rem; top: .75rem; }
.join { margin-top: 1rem; }
.join .play { margin: 0 .75rem 0 0; }
.join span { color: var(--soft); }
.join code { margin-left: .25rem; overflow-wrap: anywhere; }
.join .copy { vertical-align: middle; }

/* In a chart, text keeps its size at every width. Only the curves are stretched. Its numbers stand
   in its margins, where "65,535" has room */
figure { margin: .75rem 0 0; }
.chart {
  display: block; width: calc(100% - 4.5rem); height: 16rem; margin: 0 2.25rem; overflow: visible;
}
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
/* Too long for the margin: it stands above the curve */
.chart .latest.long { text-anchor: end; transform: translate(-8px, -16px); }
.middle { text-anchor: middle; }
.end { text-anchor: end; }
@media (max-width: 40rem) {
  .chart { height: 13rem; }
  .chart .minor { display: none; }
}

/* The page of games. On a phone the means are left out, and the chart and the most played servers
   stand in a second line. Columns: 1 name, 4 peaks, 7 means, 10 chart, 11 most played */
#games { margin-top: 1.5rem; }
#games tr {
  display: flex; flex-wrap: wrap; align-items: center; padding: .375rem 0;
  border-bottom: 1px solid var(--line);
}
#games :is(th, td) { width: 4.5rem; text-align: right; }
#games :is(tbody th, td:nth-child(3)) { font-weight: 650; }
#games td:nth-child(n+7) { color: var(--soft); }
#games thead th, #games td:nth-child(11) { font-size: .8125rem; line-height: 1.25rem; }
#games :is(th, td):first-child { flex: 2 0 0; text-align: left; }
#games :is(th, td):nth-child(10) { width: 10rem; padding-left: 1rem; text-align: left; }
#games :is(th, td):nth-child(11) { flex: 3 0 0; padding-left: 1rem; text-align: left; }
#games a { text-decoration: none; }
#games svg { display: block; width: 100%; }
#games td span { display: flex; gap: .5rem; }
#games td a { overflow: hidden; color: var(--ink); text-overflow: ellipsis; }
@media (max-width: 64rem) {
  #games :is(th, td) { width: 3.1rem; font-size: .875rem; }
  #games thead tr { align-items: end; }
  #games thead th { font-size: .75rem; white-space: normal; }
  #games :is(th:nth-child(n+7), td:is(:nth-child(7), :nth-child(8), :nth-child(9))) {
    display: none;
  }
  #games td:nth-child(10) { order: 1; width: 6.2rem; }
  #games td:nth-child(11) { flex: 1 0 50%; padding: 0; }
}
.back { margin-bottom: 1rem; }
.back a { margin-right: 1rem; text-decoration: none; }

@media print {
  form, .copy, .star, footer { display: none; }
  tr, li, dl div, figure { break-inside: avoid; }
}
"""

APP_JS = r"""'use strict';
// Every page is complete without this script. It adds: search as you type, sorting, favourites,
// copy buttons, and a refresh every five seconds that touches only what has changed.

const COLUMNS = [
  'name', 'players', 'game', 'mode', 'map', 'country', 'address', 'version', 'seen'];
const PLAYERS = 1, MODE = 3, MAP = 4, COUNTRY = 5, ADDRESS = 6, SEEN = 8;
const table = document.querySelector('#servers');
const LIVE = table ? '#servers' : '[data-live]';    // what a refreshed page must have too
const rowsOf = page => [...page.querySelectorAll('#servers tbody tr')];
const make = (tag, properties) => Object.assign(document.createElement(tag), properties);
const put = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};

// ---- Times are shown as ages, with the exact time in the title. They are measured by the master's
// clock, which is known from the Date header of its answers.

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
    put(time, ago((now - Date.parse(time.dateTime || time.title)) / 1000));
}

// Without this script times are UTC. Here they become those of the reader's zone.
function tellZone(root) {
  for (const time of root.querySelectorAll('time'))
    time.title = new Date(time.dateTime).toLocaleString();
  for (const place of root.querySelectorAll('[data-time]')) {
    const time = new Date(place.dataset.time);
    put(place, place.closest('svg')
      ? time.toLocaleTimeString([], {hour: '2-digit', minute: '2-digit', hourCycle: 'h23'})
      : time.toLocaleString([], {dateStyle: 'medium', timeStyle: 'short'}));
  }
  for (const note of root.querySelectorAll('.utc'))
    put(note, root.querySelector('text[data-time]') ? '' : 'Days are those of UTC.');
}

// ---- A copy button beside each <code>. It shows that it has copied, and tells screen readers.

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
  } catch {                         // pages by plain http have no clipboard: copy a selection
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
  }, 1500);                         // long enough to be noticed
});

// ---- The view says how the list is searched and sorted, and which rows are hidden. It is kept in
// the page's address, so that a link leads to the same view.

const linked = new URLSearchParams(location.search);
const view = {
  q: linked.get('q') || linked.get('name') || '',
  players_min: linked.get('players_min') || '',
  country: linked.getAll('country').join().toLowerCase().split(',').filter(Boolean),
  hide: linked.getAll('hide').join().split(',').filter(Boolean),
  sort: linked.get('sort') || '',
};
const collator = new Intl.Collator(undefined, {numeric: true, sensitivity: 'base'});
const players = row => parseInt(row.cells[PLAYERS].textContent);
// ß becomes ss, as with Python's casefold() in the master's search
const fold = text => text.toLowerCase().toUpperCase();
const nameOf = row => row.querySelector('bdi').textContent;
const countryOf = row => row.cells[COUNTRY].textContent.toLowerCase();
const labelOf = element => element.getAttribute('aria-label') || element.getAttribute('href')
  || element.value;
const keyOf = row => row.querySelector('a').getAttribute('href');
let order = [];                                     // the rows in the master's order
let capped = false;         // true: the page lacks some rows, so the master must search

const chooses = () =>
  starredOnly || [view.q, view.players_min, ...view.country, ...view.hide].some(Boolean);

function viewQuery() {
  const query = new URLSearchParams(location.search);
  const players_min = +view.players_min ? view.players_min : '';
  for (const [key, value] of [['name', ''], ['q', view.q], ['players_min', players_min],
                              ['country', view.country.join(',')],
                              ['hide', view.hide.join(',')], ['sort', view.sort]])
    value ? query.set(key, value) : query.delete(key);
  return query;
}

function keepView() {
  const query = viewQuery(), sorting = viewQuery(), search = String(query) && '?' + query;
  const address = search.replaceAll('%2C', ',');
  if (address !== location.search) history.replaceState(null, '', location.pathname + address);
  const by = view.sort.replace('-', '') || 'players';
  const direction = view.sort === by ? 'ascending' : 'descending';
  for (const [index, head] of [...table.tHead.rows[0].cells].entries()) {
    const sorts = head.dataset.sorts.split(',');
    sorting.set('sort', sorts[(sorts.indexOf(view.sort) + 1) % sorts.length]);
    head.firstChild.href = '/?' + sorting;
    if (COLUMNS[index] === by) head.setAttribute('aria-sort', direction);
    else head.removeAttribute('aria-sort');
  }
  for (const choice of document.querySelectorAll('#search select'))
    choice.selectedIndex = COLUMNS.indexOf(by);       // whichever way it is sorted
  for (const link of document.querySelectorAll('#tabs a:not(.starred)')) {
    const game = new URL(link.href).searchParams.get('game');
    game ? query.set('game', game) : query.delete('game');
    link.href = '/?' + query;
  }
}

function textsOf(row) {             // is read once, until the row changes
  const cells = row.cells, address = fold(cells[ADDRESS].textContent);
  const words = [nameOf(row), cells[MODE].textContent, cells[MAP].textContent];
  return {words: fold(words.join('\n')), address, host: address.replace(/^\[|\]?:\d+$/g, '')};
}

function wanted(row, q) {           // the same rule as in the master's ListFilter.matches()
  const {words, address, host} = row.texts || (row.texts = textsOf(row));
  return (!+view.players_min || players(row) >= view.players_min)
    && !view.hide.includes(row.className)
    && !(view.hide.includes('password') && row.querySelector('i.password'))
    && (!view.country.length || view.country.includes(countryOf(row)))
    && (!starredOnly || starred.has(keyOf(row)))
    && (words.includes(q) || (q.includes(':') ? address : host).includes(q)
        || row.hasAttribute('data-with'));
}

// Rows have no names of players, but the master knows who plays where, and what matches elsewhere
async function askMaster() {
  const url = source(true);
  const answer = await fetch(url).catch(() => ({}));
  if (!answer.ok || url !== source(true)) return;
  const page = new DOMParser().parseFromString(await answer.text(), 'text/html');
  const found = new Map(rowsOf(page).map(row => [keyOf(row), row.dataset.with]));
  for (const row of order) if (found.get(keyOf(row))) row.dataset.with = found.get(keyOf(row));
  document.querySelector('#hint').replaceChildren(...page.querySelector('#hint').childNodes);
  show();
}

// ---- Favourites are kept in the browser, by the links of their servers

let starred = new Set(), starredOnly = false;
readStarred();

function readStarred() {
  try {
    starred = new Set(JSON.parse(localStorage.getItem('favourites')));
  } catch {}                        // a browser may keep nothing
}

function addStar(row) {
  const star = make('button', {type: 'button', className: 'star', title: 'Favourite'});
  star.setAttribute('aria-label', 'Favourite ' + nameOf(row));
  star.setAttribute('aria-pressed', starred.has(keyOf(row)));
  row.cells[ADDRESS].append(star);    // which a refresh leaves as it is
}

function tellStarred() {            // a tab of its own, as soon as there is one
  const tabs = document.querySelector('#tabs');
  if (!tabs) return;
  const tab = tabs.querySelector('.starred')
    || make('a', {className: 'starred', href: '#favourites', innerHTML: '★<small></small>'});
  const count = starred.size && order.filter(row => starred.has(keyOf(row))).length;
  if (!tab.isConnected) tabs.insertBefore(tab, tabs.children[1] || null);
  tab.hidden = !count && !starredOnly;
  tab.setAttribute('aria-label', 'Favourites ' + count);
  put(tab.querySelector('small'), String(count));
  const current = linked.get('game') || null;
  for (const other of tabs.children) {
    const game = new URL(other.href).searchParams.get('game');
    const isCurrent = starredOnly ? other === tab : other !== tab && game === current;
    other.setAttribute('aria-current', isCurrent ? 'page' : 'false');
  }
}

document.addEventListener('click', event => {
  const heading = event.target.closest('#servers th a');
  if (!heading || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  view.sort = new URL(heading.href).searchParams.get('sort');
  show();
  keepView();
  if (capped) refresh();            // other rows come first
});

document.addEventListener('click', event => {
  const star = event.target.closest('.star');
  if (star) {
    const pressed = star.getAttribute('aria-pressed') === 'true';
    readStarred();                  // another tab may have changed them
    starred[pressed ? 'delete' : 'add'](keyOf(star.closest('tr')));
    star.setAttribute('aria-pressed', !pressed);
  } else if (event.target.closest('.starred')) {
    event.preventDefault();
    starredOnly = !starredOnly;
  } else return;
  show();
  if (star) localStorage.setItem('favourites', JSON.stringify([...starred]));
});

function sorted(rows) {
  const by = view.sort.replace('-', ''), sign = view.sort.startsWith('-') ? -1 : 1;
  const column = COLUMNS.indexOf(by);
  if (column < 0) return rows;
  const values = {name: nameOf, players, seen: row => Date.parse(row.cells[SEEN].title)};
  // Those without one come last, as by ListFilter.order() of the master
  const value = values[by] || (row => row.cells[column].textContent || 'zzz');
  const compare = ['players', 'seen'].includes(by) ? (a, b) => a - b : collator.compare;
  return rows.map(row => [value(row), row])
    .sort((a, b) => sign * compare(a[0], b[0]))
    .map(pair => pair[1]);
}

function show() {
  // Names have no invisible characters, but keyboards add some to emoji
  const q = fold(view.q.replace(/\p{DI}/gu, '').trim());
  for (const row of order) {
    const player = row.getAttribute('data-with');
    if (player && !(q && fold(player).includes(q))) row.removeAttribute('data-with');
    row.hidden = !wanted(row, q);
  }
  const rows = sorted(order), body = table.tBodies[0];
  let place = body.firstElementChild;
  if (rows.filter((row, index) => body.rows[index] !== row).length > 100) body.append(...rows);
  else for (const row of rows) {    // only a few rows move: the others stay where they are
    if (place && place !== row && place.nextElementSibling === row) place = row;
    if (place === row) place = row.nextElementSibling;
    else body.insertBefore(row, place);
  }
  table.hidden = !order.some(row => !row.hidden);
  if (!table.hidden) document.querySelector('#hint').replaceChildren();
  tellStarred();
  tellStatus();
}

// ---- The refresh

let lastText, lastUrl, lastAnswer = Date.now(), failed = '', asking = false, pause;
const lastParts = new Map();
const number = n => n.toLocaleString('en');

function statusText() {
  const age = new Date(lastAnswer).toLocaleString();
  if (failed) return `${failed} This ${table ? 'list' : 'page'} is from ${age}.`;
  if (!table) return '';
  const visible = order.filter(row => !row.hidden).length;
  const {matching, listed} = table.dataset, total = number(+listed);
  if (matching > order.length)
    return `${number(visible)} of ${number(+matching)} servers. Search to find the others.`;
  const servers = total + (total === '1' ? ' server' : ' servers');
  return total === '0' ? '' : chooses() ? number(visible) + ' of ' + servers : servers;
}

function tellStatus() {
  const status = document.querySelector('#status');
  if (!status) return;              // an operator's own template may have none
  status.classList.toggle('old', failed !== '');
  put(status, statusText());
  const clear = document.querySelector('#clear');
  if (clear) clear.hidden = !chooses();
}

// Returns the URL to fetch. Filters are applied here, unless the page lacks some rows.
function source(search = capped) {
  if (!table) return location.pathname + location.search;
  const query = new URLSearchParams(), now = viewQuery();
  for (const key of search ? ['game', 'q', 'players_min', 'country', 'hide', 'sort'] : ['game'])
    if (now.get(key)) query.set(key, now.get(key));
  return location.pathname + (String(query) && '?' + query);
}

function fade(element) {
  if (matchMedia('(prefers-reduced-motion: reduce)').matches) return;
  const colors = [{backgroundColor: 'var(--glow)'}, {backgroundColor: 'transparent'}];
  element.animate(colors, 1600);                    // ms: long enough to be noticed in passing
}

function patchRow(row, fresh) {
  row.className = fresh.className;
  row.texts = null;
  if (fresh.dataset.with) row.dataset.with = fresh.dataset.with;
  for (const [index, cell] of [...fresh.cells].entries()) {
    const old = row.cells[index];
    // The address never changes, and its cell has a copy button
    if (index === ADDRESS || old.isEqualNode(cell)) continue;
    if (index === SEEN) old.title = cell.title;
    old.replaceChildren(...cell.childNodes);
    if (index !== SEEN) fade(old);                  // the time changes at every refresh
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
    addStar(fresh);
    if (fading) setTimeout(fade, 0, fresh);
    return fresh;
  });
  for (const gone of known.values()) gone.remove();
  const fresh = page.querySelector('#servers');
  Object.assign(table.dataset, fresh.dataset);
  table.className = fresh.className;
}

function patchTable(page, fading) {
  const held = document.activeElement, row = held.closest('#servers tbody tr');
  const inAddress = row && row.cells[ADDRESS].contains(held);
  patchRows(page, fading);
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
    tellZone(fresh);
    const within = part.contains(held);
    const heir = within && [...fresh.querySelectorAll(held.tagName)]
      .find(element => labelOf(element) === labelOf(held));
    if (within && !heir) continue;
    lastParts.set(part.id, text);
    part.replaceChildren(...fresh.childNodes);
    if (heir) heir.focus({preventScroll: true});
  }
}

// The boxes show the view's choice, and not that of the page, which was fetched with all countries.
// The texts are as in render_search() of the master.
function tellFilters() {
  const chosen = view.country, count = chosen.length;
  for (const box of document.querySelectorAll('#countries input'))
    box.checked = chosen.includes(box.value);
  const [filters, countries] = document.querySelectorAll('#search summary');
  if (!filters) return;
  const codes = count > 3 ? count : chosen.join(', ').toUpperCase();
  const filtered = view.hide.length + (+view.players_min > 0) + (count > 0);
  put(filters, filtered ? 'Filters · ' + filtered : 'Filters');
  put(countries, count ? 'Countries: ' + codes : 'Countries');
}

function reading() {                // while text is selected, nothing on the page may move
  const selection = getSelection();
  return !selection.isCollapsed && [...document.querySelectorAll('#servers, [data-live]')]
    .some(part => selection.getRangeAt(0).intersectsNode(part));
}

function takePage(url, text) {
  const page = new DOMParser().parseFromString(text, 'text/html');
  if (!page.querySelector(LIVE)) throw new Error('a page of a proxy, such as one to log in');
  if (url !== source()) return;     // the view has changed since
  if (table && url === source(false))
    capped = +page.querySelector('#servers').dataset.matching > rowsOf(page).length;
  if (url !== source()) return;     // the page lacks some rows: ask the master to search
  patchParts(page);
  const choice = document.querySelector('#countries'), fresh = page.querySelector('#countries');
  const form = document.querySelector('#search');
  if (form) form.className = page.querySelector('#search').className;
  if (choice && fresh) choice.hidden = fresh.hidden && !view.country.length;
  tellFilters();
  if (table) patchTable(page, url === lastUrl);
  [lastText, lastUrl] = [text, url];
}

async function refresh() {
  if (document.hidden || asking || reading()) return;
  asking = true;
  const url = source();
  const late = new AbortController();               // some browsers lack AbortSignal.timeout()
  setTimeout(() => late.abort(), 10000);            // after time to send lost packets again
  try {
    const answer = await fetch(url, {cache: 'no-cache', signal: late.signal});
    if (!answer.ok) throw answer.status;
    const text = await answer.text();
    if (text !== lastText) takePage(url, text);
    skew = Date.parse(answer.headers.get('date')) - Date.now() || 0;
    if (Math.abs(skew) < 2000) skew = 0;            // Date has whole seconds, and travels too
    lastAnswer = Date.now();
    failed = '';
  } catch (error) {
    failed = error === 404 && !table ? 'This server is not listed any more.'
      : error > 0 ? 'The master answers with error ' + error + '.' : 'The master does not answer.';
  }
  asking = false;
  if (!reading()) tellTimes();
  tellStatus();
  if (url !== source()) refresh();                  // the view has changed meanwhile
  if (table) keepView();                            // new tabs need links with the view
}

// ---- Start

for (const part of document.querySelectorAll('[data-live]'))
  lastParts.set(part.id, part.innerHTML);
addCopyButtons(document);
tellZone(document);

function startSearch(form) {
  form.elements.q.value = view.q;                   // a browser may have restored old input
  form.elements.players_min.value = view.players_min;
  tellFilters();
  form.querySelector('button').hidden = true;
  for (const box of form.querySelectorAll('[name=hide]'))
    box.checked = view.hide.includes(box.value);
  for (const choice of form.querySelectorAll('details')) {
    addEventListener('click', event => {
      if (!choice.contains(event.target)) choice.open = false;
    });
    choice.addEventListener('keydown', event => {
      if (event.key !== 'Escape') return;
      choice.open = false;
      choice.querySelector('summary').focus();
    });
  }
  form.addEventListener('submit', event => event.preventDefault());
  form.addEventListener('input', event => {
    const least = Math.ceil(form.elements.players_min.value);
    view.q = form.elements.q.value;
    if (event.target.name === 'sort') view.sort = event.target.value;
    // 65535 is the highest number that the master accepts
    view.players_min = String(Math.min(65535, Math.max(0, least)) || '');
    const chosen = [...form.querySelectorAll(':checked')];
    view.country = chosen.filter(box => box.name === 'country').map(box => box.value).sort();
    view.hide = chosen.filter(box => box.name === 'hide').map(box => box.value);
    tellFilters();
    show();
    clearTimeout(pause);
    // The master limits searches, so it is asked when the typing has paused
    if (capped || view.q || table.hidden) pause = setTimeout(capped ? refresh : askMaster, 300);
    keepView();
  });
}

if (table) {
  order = rowsOf(document);
  order.forEach(addStar);
  capped = +table.dataset.matching > order.length;
  const form = document.querySelector('#search');
  if (form) startSearch(form);      // an operator's own template may have none
  lastParts.set('hint', '');        // a page with all rows leaves what was found elsewhere
  keepView();
  show();
  if (chooses()) refresh();         // the page came filtered: fetch all rows
}

if (document.querySelector(LIVE)) {
  setInterval(refresh, 5000);       // caches keep a page for the same time
  document.addEventListener('visibilitychange', refresh);
}
"""


# --- The accent -----------------------------------------------------------------------------------

# Follows the style sheet and stands in each banner. The other colours are those of STYLE_CSS. The
# icon is dark, and has the accent of the dark
ACCENT_CSS = """\
:root { --accent: %s; --glow: %s; }
@media (prefers-color-scheme: dark) { :root { --accent: %s; --glow: %s; } }
"""
DEFAULT_ACCENT = ("#8a5700", "#fae7bd", "#f2b23a", "#43351a")
# To be readable, a text needs a contrast of 4.5 to what lies behind it (WCAG 2.1, 1.4.3). Tools
# that measure it round the colours in their own ways
LEAST_CONTRAST = 4.6


def accent_of(colour):
    """Return the colours of ACCENT_CSS for a colour, "#rrggbb", or the usual ones for "".

    It is moved towards black, and for the dark towards white, until it can be read."""
    if not colour:
        return DEFAULT_ACCENT
    light = readable(colour, "#000000", "#f4f1ea")
    dark = readable(colour, "#ffffff", "#1d1b18")
    # Behind a row that has changed stands a glow, on which soft text can be read too
    light_glow = readable(mixed("#fcfbf8", light, 0.2), "#fcfbf8", "#625d55")
    dark_glow = readable(mixed("#131210", dark, 0.25), "#131210", "#a8a195")
    return light, light_glow, dark, dark_glow


def readable(colour, target, other):
    """Return the colour, moved towards a target until its contrast to another one is enough."""
    for step in range(101):
        moved = mixed(colour, target, step / 100)
        if contrast(moved, other) >= LEAST_CONTRAST:
            break
    return moved


def mixed(colour, other, part):
    """Return a colour of which this part is another one."""
    pairs = zip(colour_bytes(colour), colour_bytes(other))
    return "#" + bytes([round(a + (b - a) * part) for a, b in pairs]).hex()


def colour_bytes(colour):
    return bytes.fromhex(colour.lstrip("#"))


def contrast(colour, other):
    """Return the contrast of two colours, from 1 to 21, as WCAG 2.1 defines it."""
    low, high = sorted([luminance(colour), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def luminance(colour):
    parts = []
    for value in colour_bytes(colour):
        part = value / 255
        parts.append(part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4)
    red, green, blue = parts
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


# --- Filling templates ---------------------------------------------------------------------------

class Html(str):
    """A string that is HTML already, so fill_template() does not escape it."""


def render_value(value):
    """Return a value of a template as HTML. The items of a list follow each other."""
    if isinstance(value, Html):
        return value
    if isinstance(value, list):
        return "".join(map(render_value, value))
    return html.escape(str(value))


def fill_template(template, **values):
    """Replace each `$name` of a template by the value of that name, escaped. Return Html.

    Raise KeyError if the template names a value that is not given. Surplus values are ignored."""
    rendered = {name: render_value(value) for name, value in values.items()}
    return Html(string.Template(template).substitute(rendered))


class PageContext(NamedTuple):
    """The operator's choices for all pages."""

    title: str                      # the name of the whole site
    intro: str                      # a paragraph at the top of the list page; may be empty
    template: str                   # LIST_PAGE or the operator's own list page
    games: Mapping[str, str]        # the titles of all games, by id
    url: str                        # the address of the pages for other sites, or ""
    rooms: Mapping[str, Game]       # the games of section 10 by their ids
    accent: Tuple[str, ...]         # the colours of ACCENT_CSS
    links: Sequence[Tuple[str, str, str]]       # "head" or "foot", words, URL
    logo: Tuple[str, bytes]         # media type and bytes of an image; empty: there is none

    def room(self, server):
        return self.rooms.get(server.room, PLAIN_GAME)


# The room of the games that announce themselves by POST /announce
PLAIN_GAME = Game()


def check_list_template(text):
    """Raise ValueError if the text is no valid template of the list page."""
    for match in string.Template.pattern.finditer(text):
        name = match["named"] or match["braced"]
        if match["escaped"] or name in LIST_PLACEHOLDERS:
            continue
        line = text.count("\n", 0, match.start()) + 1
        beginning = match.group() if name else text[match.start():match.start() + 10]
        dollar, _, _ = beginning.partition("\n")
        raise ValueError(
            "line %d: '%s' is no placeholder (those are $%s). Write the sign twice: '$%s'"
            % (line, dollar, ", $".join(LIST_PLACEHOLDERS), dollar))


SVG_TYPE = "image/svg+xml"
# The images of browsers, by how they begin. An SVG is shown only if it names its namespace
IMAGES = {
    "image/png": rb"\x89PNG\r\n\x1a\n",
    "image/jpeg": rb"\xff\xd8\xff",
    "image/gif": rb"GIF8[79]a",
    "image/webp": rb"RIFF....WEBP",
    SVG_TYPE: rb"(\xef\xbb\xbf)?\s*<.*http://www\.w3\.org/2000/svg",
}
# Visitors load the logo with their first page: let it be no more than the rest of that
LOGO_BYTES = 64 << 10


def read_logo(data):
    """Return the media type of an image, and its bytes. Raise ValueError if it is none."""
    for media_type, pattern in IMAGES.items():
        if re.match(pattern, data, re.DOTALL):
            return media_type, data
    raise ValueError("expected an image: PNG, JPEG, GIF, WebP, or SVG with xmlns")


# --- Small pieces --------------------------------------------------------------------------------

def age_text(seconds):
    """Return an age in words: "12 s ago". The function ago() of the script has the same rule."""
    if seconds < 1:
        return "now"
    # Each unit with its length in seconds, and the age from which the next unit is used
    for unit, unit_s, limit_s in (("s", 1, 90), ("min", MINUTE, 5400), ("h", HOUR, 129600)):
        if seconds < limit_s:
            return "%d %s ago" % (seconds // unit_s, unit)
    return "%d d ago" % (seconds // DAY)


def iso_time(wall):
    """Return a time of the wall clock in the format of ISO 8601: "2026-11-21T00:59:48Z"."""
    return utc_datetime(wall).strftime("%Y-%m-%dT%H:%M:%SZ")


def minute_text(wall):
    """Return a time of the wall clock, in UTC, to the minute: "2026-11-21 00:59"."""
    return utc_datetime(wall).strftime("%Y-%m-%d %H:%M")


def time_tag(then, wall):
    """Return a <time> element that says how long ago `then` was; `wall` is the present time."""
    return fill_template('<time datetime="$exact" title="$exact">$age</time>',
                         exact=iso_time(then), age=age_text(wall - then))


def server_link(server, path="/server"):
    game = urllib.parse.quote(server.game)
    address = urllib.parse.quote(server.address)
    return "%s?game=%s&address=%s&port=%d" % (path, game, address, server.port)


def is_locked(server):
    return "password" in server.details.get("flags", "").split(", ")


def badges_of(server):
    """Return what marks this server, and why: pairs of words."""
    badges = (
        (server.official, "official", "Marked as official by the operator of this list"),
        (not server.confirmed, "unconfirmed",
         "Listed before its master was restarted, not heard from since"),
        (server.verified == "self-reported", "self-reported",
         "Not verified: this master cannot query it"),
        (server.verified == "another list", "another list",
         "It answers this master; what is shown of it comes from another list"),
        (not server.responding, "not responding",
         "Known to this master, but does not answer its queries"),
        (is_locked(server), "password", "Players need a password"),
    )
    return [(badge, explanation) for applies, badge, explanation in badges if applies]


def render_badges(server):
    return Html("".join([
        f' <i title="{explanation}">{badge}</i>' for badge, explanation in badges_of(server)]))


# Ids have no blanks
SIGN_IDS = {badge: "s-" + badge.replace(" ", "-") for badge in SIGNS}
SYMBOLS = "".join([
    f'<symbol id="{SIGN_IDS[badge]}" viewBox="0 0 12 12">{drawing}</symbol>'
    for badge, drawing in SIGNS.items()])


def render_sign(badge):
    return f'<svg aria-hidden="true"><use href="#{SIGN_IDS[badge]}"/></svg>'


def render_signs(server):
    """Return the badges as pictures, which name themselves to those who do not see them."""
    return "".join([
        f'<i class="{badge}" title="{badge.capitalize()}: {explanation}">{render_sign(badge)}'
        f'<span class="unseen"> {badge}</span></i>'
        for badge, explanation in badges_of(server)])


def render_legend(rows):
    """Return what the signs in these rows mean, for phones, which show no titles."""
    signs = {badge: render_sign(badge) for badge in SIGNS}
    return Html("".join([
        f"<span><i>{sign}</i> {badge}</span>" for badge, sign in signs.items() if sign in rows]))


def render_sparkline(counts, steps=8):
    """Draw player counts, such as those of 24 hours, as a small histogram: an SVG of about 160
    bytes. Its height is `steps` and one more.

    `counts` has None for an hour in which the server was away. Before there are two others, return
    "": a lone bar says nothing."""
    present_counts = without_gaps(counts)
    if len(present_counts) < 2:
        return Html("")
    # The full height stands for at least 4 players, because two must not look like a crowd
    scale = max(4, *present_counts)
    bars = []
    for count in counts:
        # y is 0 at the top. An hour in which the server was away has no height, an hour without
        # players is one step high
        top = steps + 1 if count is None else steps - round(steps * count / scale)
        bars.append("V%dh1" % top)          # up or down to the hour's height, then one step right
    return Html('<svg aria-hidden="true" viewBox="0 0 %d %d"><path d="M0 %d%sV%d"/></svg>'
                % (len(counts), steps + 1, steps + 1, "".join(bars), steps + 1))


def render_page(context, title, template=PAGE, about="", path="", **values):
    """Return a whole page as UTF-8 bytes.

    `title` says what the page is about; it is empty for the list of all games. If a link to
    the page is posted in a chat, the preview shows the sentence `about` and leads to `path`. Either
    may be "". `values` are those that the template needs besides what every page has."""
    full_title = " · ".join(filter(None, [title, context.title]))
    link = ""
    if context.url and path:
        link = fill_template(
            '<meta property="og:url" content="$url">\n', url=context.url + path)
    icon_type, _ = context.logo or (SVG_TYPE, b"")
    head = fill_template(
        HEAD,
        title=full_title,
        about=about or full_title,
        site=context.title,
        link=link,
        icon_type=icon_type)
    links = {"head": [], "foot": []}
    for place, words, url in context.links:
        links[place].append(fill_template('<a href="$url">$words</a>\n', url=url, words=words))
    page = fill_template(
        template,
        title=context.title,
        logo=Html(LOGO if context.logo else ""),
        links=fill_template(LINKS, links=links["head"]),
        head=head,
        foot=fill_template(FOOT, links=links["foot"]),
        **values)
    return page.encode()


# A bracket belongs to the URL if both of the pair stand in it; a full stop at its end does not
URL_IN_TEXT = r"""(https?://(?:[^\s<>"'()]|\([^\s<>"'()]*\))+(?<![.,;:!?]))"""


def render_intro(text):
    """Return the operator's paragraph, in which URLs become links."""
    pieces = []
    for number, piece in enumerate(re.split(URL_IN_TEXT, text)):
        is_url = number % 2
        pieces.append(fill_template('<a href="$url">$url</a>', url=piece) if is_url else piece)
    return fill_template("<p>$pieces</p>\n", pieces=pieces)


def render_tab(link, text, is_current, count=""):
    return fill_template(
        '<a href="$link" aria-current="$current">$text<small>$count</small></a>\n',
        link=link,
        text=text,
        current="page" if is_current else "false",
        count=count)


# --- The list page -------------------------------------------------------------------------------

def list_summary(servers):
    """Return what a chat shows of the link to a list: its totals, and who has players."""
    played = [server for server in servers if server.players]
    players = sum([server.players for server in servers])
    summary = "%s on %d of %s" % (
        count_text(players, "player"), len(played), count_text(len(servers), "server"))
    previews = []
    for server in played[:5]:               # more than a chat shows
        name = server.name or server.endpoint
        previews.append("%s %d" % (name, server.players))
    if previews:
        summary += ": " + ", ".join(previews)
    return summary


def bold_numbers(text):
    return Html(re.sub("[0-9][0-9,]*", r"<b>\g<0></b>", text))


def render_totals(servers, spark):
    """Return the line that says "312 players on 87 servers", after a sparkline.

    Without servers it is empty, and there for the script to fill."""
    players = sum([server.players for server in servers])
    players_text = count_text(players, "player")
    servers_text = count_text(len(servers), "server")
    totals = "%s on %s" % (players_text, servers_text)
    return fill_template(
        '<p class="totals" id="totals" data-live>$spark$totals</p>\n',
        spark=spark if servers else "",
        totals=bold_numbers(totals) if servers else "")


def game_tabs(context, counts, list_filter):
    """Return a tab for each game that has a count of servers, and for "", all games together. It
    leads to those of the servers that a ListFilter chooses."""
    tabs = []
    for game, title in {"": "All games", **context.games}.items():
        if game in counts:
            link, count = list_filter.link(game=game), format(counts[game], ",")
            tabs.append(render_tab(link, title, game == list_filter.game, count))
    return tabs


def render_game_tabs(context, counts, list_filter):
    """Return the game_tabs() of all games together, of the chosen one, and of those that have
    servers, by their numbers in `counts`. With only one game nobody needs a choice."""
    tabs = game_tabs(
        context, {list_filter.game: 0, "": sum(counts.values()), **counts}, list_filter)
    has_choice = len(tabs) > 2
    return fill_template(
        '<nav class="tabs" id="tabs" data-live aria-label="Games">$tabs</nav>\n',
        tabs=tabs if has_choice else "")


def render_choices(template, choices, mark, chosen):
    """Return the template filled with each choice, a value and its words, and a mark if chosen."""
    pieces = []
    for value, words in choices:
        marked = Html(" " + mark) if value in chosen else ""
        pieces.append(fill_template(template, value=value, words=words, marked=marked))
    return pieces


def render_search(list_filter, country_counts, matching, listed):
    """Return the search form with the values of a ListFilter, which `matching` of all `listed`
    servers pass.

    `country_counts` has the number of servers in each country that has any. A chosen country is
    offered even without servers. An empty list has nothing to search."""
    chosen = list_filter.countries
    counts = {**dict.fromkeys(chosen, 0), **country_counts}
    countries = []
    for code in sorted(counts, key=country_name):
        name = html.escape(country_name(code))
        words = f"{name} <small>{counts[code]:,}</small>"
        countries.append((code, Html(words)))
    boxes = render_choices(BOX % "country", countries, "checked", chosen)
    # The function tellFilters() of the script has the same rules
    filters = len(list_filter.hide) + bool(list_filter.players_min) + bool(chosen)
    summary = "Countries"
    if len(chosen) > 3:                     # more codes have no room on a phone
        summary = "Countries: %d" % len(chosen)
    elif chosen:
        summary = "Countries: " + ", ".join(chosen).upper()
    orders = [(sorts[0], column.capitalize()) for column, sorts in SORTS.items()]
    return fill_template(
        SEARCH,
        game=list_filter.game,
        text=list_filter.text or list_filter.name,
        hide=render_choices(BOX % "hide", HIDE, "checked", list_filter.hide),
        players_min=list_filter.players_min or "",
        orders=render_choices(
            ORDER, orders, "selected", SORTS[list_filter.sorted_by()][:1]),
        idle="" if listed else Html(' class="idle"'),
        status=status_text(list_filter, matching, listed),
        all=list_filter.cleared().link(),
        clear="" if list_filter.chooses() else Html(" hidden"),
        filters="Filters · %d" % filters if filters else "Filters",
        hidden="" if boxes else Html(" hidden"),
        summary=summary,
        boxes=boxes)


def status_text(list_filter, matching, listed):
    """Return the line above the table. The function statusText() of the script has its rules."""
    servers = count_text(listed, "server")
    if matching > PAGE_ROWS:
        return "The first %s of %s. Search to find the others." % (
            format(PAGE_ROWS, ","), count_text(matching, "server"))
    if not listed:
        return ""
    return f"{matching:,} of {servers}" if list_filter.chooses() else servers


def left_out_columns(context, servers, game):
    """Return the classes of the table that leave out the columns that these servers do not fill."""
    filled = {
        "game": not game,
        "mode": any(context.room(server).mode_text(server) for server in servers),
        "map": any(server.map for server in servers),
        "country": any(server.country for server in servers),
        "version": any(server.version for server in servers),
    }
    return ["no-" + column for column, is_filled in filled.items() if not is_filled]


def render_headings(list_filter):
    """Return the headings of the table: links that sort by a column, then the other way, and then
    as usual, which is by players."""
    sort = list_filter.sort
    sorted_by = list_filter.sorted_by()
    direction = "ascending" if sort == sorted_by else "descending"
    headings = []
    for column, sorts in SORTS.items():
        place = sorts.index(sort) + 1 if sort in sorts else 0
        headings.append(fill_template(
            HEADING,
            sorts=",".join(sorts),
            direction=Html(' aria-sort="%s"' % direction) if column == sorted_by else "",
            link=list_filter.link(sort=sorts[place % len(sorts)]),
            words=column.capitalize()))
    return headings


def render_table(list_filter, rows, matching, listed, classes, hint):
    """Return the table with these rows of the servers that pass a ListFilter, of all that are
    listed. Without rows the hint says why."""
    return fill_template(
        TABLE,
        symbols=Html(SYMBOLS),
        classes=" ".join(["board", *classes]),
        matching=matching,
        listed=listed,
        hidden="" if rows else Html(" hidden"),
        headings=render_headings(list_filter),
        rows=rows,
        legend=render_legend(rows),
        hint=hint)


def render_hint(context, list_filter, listed, contacts, other_matches):
    """Return why no server is shown. The list is empty: how to get servers into it, with the blocks
    of `contacts`. Or none of the `listed` ones matches: what was asked, and how many of each other
    game match.

    It is left out of a page that has servers. Hiding it by the style sheet would not do, because
    text browsers show hidden elements too."""
    if not listed:
        add = "/add?game=" + urllib.parse.quote(list_filter.game) if contacts else "/add"
        return fill_template(EMPTY, blocks=render_blocks(contacts), add=add)
    title = context.games.get(list_filter.game)
    tabs = game_tabs(context, other_matches, list_filter)
    return fill_template(
        NO_MATCH,
        heading="No %s server matches" % title if title else "No server matches",
        asked=search_text(list_filter),
        all=list_filter.cleared().link(),
        listed=count_text(listed, "server"),
        others=fill_template(OTHER_MATCHES, tabs=tabs) if tabs else "")


def search_text(list_filter):
    """Return a ListFilter in words: "“gctf berlin”, without empty and full servers."."""
    text = list_filter.text or list_filter.name
    parts = ["“%s”" % text] if text else []
    hidden = [words.partition(" ")[2] for word, words in HIDE if word in list_filter.hide]
    if hidden:
        parts.append("without %s servers" % " and ".join(hidden))
    if list_filter.players_min:
        parts.append("with %s or more" % count_text(list_filter.players_min, "player"))
    if list_filter.countries:
        parts.append("in " + " or ".join(map(country_name, list_filter.countries)))
    sentence = ", ".join(parts) + "."
    return sentence[0].upper() + sentence[1:]


def render_rows(context, servers, hourly_players, epoch, wall, text):
    """Return the table rows of these servers as Html.

    `hourly_players` maps a server's key to its player counts of the last 24 hours. `epoch` is the
    difference between `wall` and the monotonic clock, by which servers were last seen. `text` is
    what was searched; a row says which player has it in the name."""
    rows = []
    render_row = functools.partial(render_server_row, context, hourly_players)
    cached_rows = cached_entries(servers, "row", render_row, RENDERED_AT_ONCE)
    all_searched = searched_texts(context, servers) if text else itertools.repeat(None)
    for server, row, searched in zip(servers, cached_rows, all_searched):
        seen = server.seen + epoch
        age = age_text(wall - seen)
        if text:
            row = row.replace("<tr", "<tr" + player_attribute(searched, text), 1)
        rows.append('%s title="%s">%s\n' % (row, iso_time(seen), age))
    return Html("".join(rows))


class Searched(NamedTuple):
    """The texts of a server in which the search box searches."""

    text: str                       # all of them, folded, a line each
    players: str                    # the names of the players, a line each


def searched_texts(context, servers):
    """Return the Searched of each server, kept until it changes: to read the names of 64 players
    takes 0.2 ms. Raise Unfinished if too many are not known yet."""
    def searched_text(server):
        room = context.room(server)
        players = "\n".join([player.name for player in room.players(server)])
        texts = server.name, server.map, room.mode_text(server), players
        return Searched("\n".join(texts).casefold(), players)

    return cached_entries(servers, "searched", searched_text, SEARCHED_AT_ONCE)


def player_attribute(searched, text):
    """Return an attribute of the row that names the first player with this text in the name."""
    for player in searched.players.split("\n"):
        if text.casefold() in player.casefold():
            return ' data-with="%s"' % html.escape(player)
    return ""


def crowd_of(server):
    """Return "empty", "full", or "" for a server that is neither."""
    if not server.players:
        return "empty"
    return "full" if server.players >= server.max_players > 0 else ""


def render_server_row(context, hourly_players, server):
    """Return one row of the list, about 630 bytes of HTML, which are cached: all but the time at
    which the server was last seen, its title and the end. That changes more often."""
    # A page has up to 2,000 rows, and fill_template() would take three times as long as these
    # f-strings, so each value is escaped here. HTML does not need the end tags of cells, so they
    # are left out. The style sheet selects cells by their column, so they need no classes. The
    # roles repeat the meaning of the tags, because some browsers drop it when a style sheet changes
    # how rows are displayed
    escape = html.escape
    room = context.room(server)
    endpoint = escape(server.endpoint)
    name = escape(server.name) or endpoint
    spark = render_sparkline(hourly_players.get(server.key, ()))
    limit = server.max_players
    crowd = crowd_of(server)
    row_class = f' class="{crowd}"' if crowd else ""
    meter = ""
    if limit:                               # with a thin bar that shows how full the server is
        meter = f'/{limit}<meter aria-hidden="true" max="{limit}" value="{server.players}"></meter>'
    country = ""
    if server.country:
        country = '<abbr title="%s">%s</abbr>' % (
            country_name(server.country), server.country.upper())
    if room.play_link:
        link = room.play_link % endpoint
        endpoint = f'<a href="{link}" title="Start the game">{endpoint}</a>'
    return (
        f'<tr role="row"{row_class}>'
        f'<td role="cell"><a href="{escape(server_link(server))}"><bdi>{name}</bdi></a>'
        f'{render_signs(server)}'
        f'<td role="cell"><span><b>{server.players}</b>{meter}</span>{spark}'
        f'<td role="cell">{escape(context.games.get(server.game, server.game))}'
        f'<td role="cell">{escape(room.mode_text(server))}'
        f'<td role="cell">{escape(server.map)}'
        f'<td role="cell">{country}<td role="cell"><code>{endpoint}</code>'
        f'<td role="cell">{escape(server.version)}<td role="cell"')


# --- The page of one server ----------------------------------------------------------------------

# Details that a server's page does not show. Players do not need the gamename, because only
# programs use it in queries. The two others occur only in records that older versions have stored
HIDDEN_DETAILS = "gamename", "tag", "players_online"


def render_server_page(context, server, is_listed, history, base, wall):
    """Return the page of one server as UTF-8 bytes.

    Its times, and the present time `wall`, are in seconds since 1970. If it is not listed, only its
    name and its times are known. `history` is a key of SPANS, the Series of the server's player
    counts, None if no history is kept, and its uptime() or None. `base` is the scheme and host at
    which other sites reach this page."""
    span, series, _ = history
    name = server.name or server.endpoint
    link = server_link(server)
    title = context.games.get(server.game, server.game)
    room = context.room(server)
    badges = count = join = players = players_chart = ""
    if is_listed:
        texts = list(filter(None, [title, room.mode_text(server), server.map]))
        # Each may be written from right to left
        pieces = [fill_template("<bdi>$text</bdi>", text=text) for text in texts]
        lead = Html(" · ".join(pieces))
        if server.description:
            lead = Html(lead + fill_template("<br>$text", text=server.description))
        about = " · ".join([count_text(server.players, "player"), *texts])
        badges = render_badges(server)
        count = render_count(server)
        join = render_join(room, server)
        players = render_players(room, server)
    else:
        seen = time_tag(server.last_seen, wall)
        lead = fill_template('Not listed now. Last seen $seen. <a href="$link">Why?</a>',
                             seen=seen, link=server_link(server, "/check"))
        about = "Not listed now. Last seen %s. " % age_text(wall - server.last_seen)
    if series:
        tabs = [render_tab("%s&span=%s" % (link, choice), choice.capitalize(), choice == span)
                for choice in SPANS]
        players_chart = fill_template(HISTORY, tabs=tabs, chart=render_chart(series, wall))
    facts = [
        fill_template("<div><dt>$name</dt><dd>$value</dd></div>\n", name=fact, value=value)
        for fact, value in server_facts(context, server, is_listed, history, wall) if value]
    main = fill_template(
        SERVER_PAGE,
        game=title,
        game_link="/?game=" + urllib.parse.quote(server.game),
        name=name,
        badges=badges,
        lead=lead,
        count=count,
        join=join,
        history=players_chart,
        players=players,
        link=link,
        image=server_link(server, "/banner.svg"),
        base=base,
        address=server.endpoint,
        facts=facts)
    return render_page(context, name, about=about, path=link, main=main)


def server_facts(context, server, is_listed, history, wall):
    """Return the facts about a server as (name, value) pairs, for render_server_page().

    A value is empty if the server has not announced it. What the page says above is left out."""
    span, _, share = history
    room = context.room(server)
    facts = []
    if not (is_listed and room.join_line):
        address = fill_template("<code>$address</code>", address=server.endpoint)
        facts.append(("Address", address))
    if is_listed:
        facts += [
            ("Version", server.version),
            ("Country", country_name(server.country)),
            ("Ping from here", "%.0f ms" % server.ping_ms if server.ping_ms else ""),
            ("Verified", VERIFIED[server.verified]),
            ("Found at", server.found_at),
        ]
        for key, value in server.details.items():
            if key not in HIDDEN_DETAILS:
                heading = key.replace("_", " ").capitalize()
                facts.append((heading, value))
        facts += room.facts(server)
    if share is not None:
        # Rounded down, so that it is 100 % only if the server was always there
        permille = math.floor(1000 * share)
        facts.append(("Uptime", "%.4g %% of the past %s" % (permille / 10, span)))
    facts.append(("First seen", time_tag(server.first_seen, wall)))
    facts.append(("Last seen", time_tag(server.last_seen, wall)))
    return facts


def render_count(server):
    """Return how many players a server has: "6 of 8 players, 4 playing", the numbers bold."""
    count = count_text(server.players, "player")
    if server.max_players:
        count = f"{server.players:,} of {server.max_players:,} players"
    if server.playing is not None:
        count += ", %d playing" % server.playing
    return bold_numbers(count)


def render_players(room, server):
    """Return who is on a server: a table without the columns that nobody fills, or a list of names
    if the game tells no more. Return "" if nobody is known to be there."""
    players = sorted(room.players(server), key=lambda player: (
        player.is_watching, -(player.score or 0), player.best_s or math.inf,
        player.name.casefold()))
    if not players:
        return ""
    # A long list of names may have been cut off before it came here
    count = ("the first %d" if len(players) < server.players else "%d") % len(players)
    watching = sum([player.is_watching for player in players])
    if watching:
        count += ", of them %d watching" % watching
    columns = {"Name": [], "Clan": [], "Score": [], "Time": []}
    for player in players:
        mark = Html(" <i>watching</i>") if player.is_watching else ""
        name = fill_template("<bdi>$name</bdi>$mark", name=player.name, mark=mark)
        score = "" if player.score is None else player.score
        time = "" if player.best_s is None else "%d:%02d" % divmod(player.best_s, 60)
        for column, text in zip(columns.values(), (name, player.clan, score, time)):
            column.append(text)
    filled = {title: column for title, column in columns.items() if any(map(str, column))}
    if len(filled) == 1:
        body = fill_template('<ul class="names">$names</ul>\n',
                             names=[Html("<li>" + name) for name in filled["Name"]])
    else:
        rows = []
        for row in zip(*filled.values()):
            rows.append(Html("<tr>"))
            rows += [fill_template("<td>$text", text=text) for text in row]
        body = fill_template(
            "<table>\n<thead><tr>$heads</thead>\n<tbody>$rows</tbody>\n</table>\n",
            heads=[Html("<th>" + title) for title in filled], rows=rows)
    return fill_template(
        "<h2>Players now <small>$count</small></h2>\n$body", count=count, body=body)


def render_join(room, server):
    """Return how players join a server: a link, and what they can enter instead."""
    play = line = ""
    if room.play_link:
        play = fill_template('<a class="play" href="$link">Play</a>',
                             link=room.play_link % server.endpoint)
    if room.join_line:
        text = room.join_line % {
            "address": server.address, "port": server.port, "endpoint": server.endpoint}
        line = fill_template("<code>$text</code>", text=text)
    return fill_template(JOIN, play=play, words=room.join_words, line=line)


# --- The page that says how servers are added ----------------------------------------------------

def render_blocks(contacts):
    """Return the blocks to paste of these filled Contacts, each below the title of its games."""
    return [fill_template(BLOCK, game=contact.game, **contact._asdict())
            for contact in contacts]


def render_add_page(context, contacts, is_chosen):
    """Return the page with the blocks of `contacts`, all of them or those of a chosen game."""
    links = [
        fill_template('<a href="#add-$game">$title</a>\n', game=contact.game, title=contact.title)
        for contact in contacts]
    if is_chosen:
        links = [Html('<a href="/add">All games</a>\n')]
    choice = fill_template('<nav class="tabs" aria-label="Games">$links</nav>\n', links=links)
    main = fill_template(ADD_PAGE, choice=choice, blocks=render_blocks(contacts))
    return render_page(context, "Add your server", path="/add", main=main)


# --- The page of games ----------------------------------------------------------------------------

def render_games_page(context, games):
    """Return the page as UTF-8 bytes. `games` are the entries of /games.json."""
    rows = [render_played_game(entry) for entry in games]
    main = fill_template(GAMES_PAGE, rows=rows)
    return render_page(context, "Games", path="/games", main=main)


def render_played_game(entry):
    numbers = [entry["servers"], entry["players"]]
    for values in (entry["peaks"], entry["means"]):
        numbers += [values.get(span) for span in ("day", "week", "month")]
    servers = [
        fill_template('<span><a href="$page"><bdi>$name</bdi></a> $number</span>',
                      number=mean_text(server["mean"]), **server)
        for server in entry["most_played"][:2]]
    return fill_template(
        '<tr><th scope="row"><a href="$link"><bdi>$title</bdi></a>$numbers<td>$chart'
        '<td>$servers\n',
        link="/?game=" + urllib.parse.quote(entry["game"]),
        title=entry["title"],
        numbers=[fill_template("<td>$number", number=mean_text(number)) for number in numbers],
        chart=render_sparkline(entry["week"], steps=20),
        servers=servers)


def mean_text(mean):
    """Return a number of players: "0.4", "12", "1,003", or "" for None."""
    return "" if mean is None else format(round(mean, 1 if mean < 10 else None), ",g")


# --- The page for checks --------------------------------------------------------------------------

class Finding(NamedTuple):
    """What the page says of one server, or of a whole address."""

    endpoint: str
    title: str
    todo: str                       # what to do, in a sentence or more
    game: str = ""                  # its id
    at: float = 0.0                 # when it was seen, in seconds since 1970; 0 for always
    server: Optional[Server] = None         # if it is listed; its times are in seconds since 1970
    is_well: bool = False


def render_check_page(context, address, port, findings, listed, wall):
    """Return the page as UTF-8 bytes.

    `port` is 0 for all ports, `listed` the number of servers at that address that are listed now,
    and `wall` the time in seconds since 1970."""
    endpoint = endpoint_text(address, port) if port else address
    verdict = "Nothing at %s is listed now" % endpoint
    if listed:
        verdict = "Listed now: " + count_text(listed, "server")
    if findings:
        rows = [render_finding(context, finding, wall) for finding in findings]
        finding_table = fill_template(FINDINGS, rows=rows)
    else:
        finding_table = fill_template(NOTHING_ARRIVED, endpoint=endpoint)
    main = fill_template(
        CHECK_PAGE,
        address=address,
        port=port or "",
        verdict=verdict,
        findings=finding_table)
    return render_page(context, "Is my server listed?", main=main)


def render_finding(context, finding, wall):
    """Return a Finding as a row of the table."""
    server = finding.server
    name = arrival = ""
    if server:
        name = fill_template(
            '<a href="$link"><bdi>$name</bdi></a> $badges<br>',
            link=server_link(server),
            name=server.name or server.endpoint,
            badges=render_badges(server))
    if finding.at:
        arrival = fill_template(
            '<p class="from">$when · $game</p>',
            when=time_tag(finding.at, wall),
            game=context.games.get(finding.game, finding.game))
    return fill_template(
        "<tr><td>$name<code>$endpoint</code>\n<td><h3>$title</h3>\n<p>$todo</p>\n<td>$arrival\n",
        name=name,
        endpoint=finding.endpoint,
        title=finding.title,
        todo=finding.todo,
        arrival=arrival)


# --- The chart of a server's players -------------------------------------------------------------

# The plot takes the chart's width from 6 % to 92 %, which leaves margins for numbers at both sides,
# and its height from 14 % to 86 %, which leaves space for the label of the peak above and for times
# below. The browser stretches the plot, while the text around it keeps its size
CHART = """\
<figure>
<svg class="chart" role="img" aria-labelledby="chart-title">\
<title id="chart-title">Players from $start to $end UTC</title>
$axes<svg y="14%" width="100%" height="72%" viewBox="0 0 $points 100" \
preserveAspectRatio="none"><path class="peak" d="$area"/><path class="mean" d="$line"/></svg>
<circle cx="$peak_x" cy="$peak_y" r="3"/>\
<text class="label middle" x="$peak_label_x" y="$peak_y" dy="-9">peak $peak</text>
<text class="label latest$long" x="$latest_x" y="$latest_y" dx="6" dy="5">$latest</text>
</svg>
<figcaption>Peak $peak at <span data-time="$peak_iso">$peak_time</span>. Latest $latest, \
$latest_time. <span class="utc">Times are UTC.</span></figcaption>
</figure>
"""


def render_chart(series, wall):
    """Draw the player counts of a Series as inline SVG, about 13 kB.

    `wall` is the present time in seconds since 1970. Without samples, say so instead."""
    count = len(series.means)
    # At most one point for each day of a year, or about one per pixel of a phone's width
    width = math.ceil(count / 366)
    bars = []
    for start in range(0, count, width):
        # A sample is None if the server was away
        means = without_gaps(series.means[start:start + width])
        peaks = without_gaps(series.peaks[start:start + width])
        if means:
            latest_mean = sum(means) / len(means)
            bars.append((start, latest_mean, max(peaks)))
    if not bars:
        return Html('<p class="lead">No history in this span yet. A sample is taken every minute.'
                    '</p>\n')
    peak = max(bar_peak for _, _, bar_peak in bars)
    peak_index = series.peaks.index(peak)
    peak_share = peak_index / count
    latest_index = max(index for index, mean in enumerate(series.means) if mean is not None)
    latest = mean_text(latest_mean)
    latest_at = series.start + (latest_index + 1) * series.step
    end = series.start + count * series.step
    top, value_axis = render_value_axis(peak)
    line, area = chart_paths(bars, width, top)
    return fill_template(
        CHART,
        start=minute_text(series.start),
        end=minute_text(end),
        axes=value_axis + render_time_axis(series.start, end),
        points=count,
        line=line,
        area=area,
        peak=format(round(peak, 1), ","),
        peak_time=minute_text(series.start + peak_index * series.step),
        peak_iso=iso_time(series.start + peak_index * series.step),
        peak_x=chart_x(peak_share),
        peak_y=chart_y(peak / top),
        peak_label_x=chart_x(min(max(peak_share, .04), .96)),       # so that it stays on the page
        latest=latest,
        latest_time=time_tag(min(wall, latest_at), wall),
        latest_x=chart_x(latest_index / count),
        latest_y=chart_y(latest_mean / top),
        long=" long" if len(latest) > 4 else "")        # see the style sheet


def chart_x(share):
    """Return the position in a chart of a point of the plot; `share` is 0 at the left, up to 1."""
    return "%.5g%%" % (100 * share)


def chart_y(share):
    return "%.4g%%" % (86 - 72 * share)


def render_value_axis(peak):
    """Return the number of players at the top of a plot, and its gridlines with their numbers.

    They are multiples of the smallest of 1, 2, 5, 10, 20, 50 and so on that leads to at most four
    gridlines above 0, so that nobody has to count them."""
    highest_count = max(1, math.ceil(peak))
    power_of_ten = 1
    while 20 * power_of_ten < highest_count:
        power_of_ten *= 10
    step = min(factor * power_of_ten for factor in (1, 2, 5)
               if 4 * factor * power_of_ten >= highest_count)
    ticks = range(0, highest_count + step, step)
    top = max(ticks)
    marks = []
    for tick in ticks:
        marks.append(fill_template(
            '<line class="$kind" x2="100%" y1="$y" y2="$y"/>'
            '<text class="tick end" y="$y" dx="-6" dy="4">$text</text>\n',
            y=chart_y(tick / top),
            text=format(tick, ","),
            kind="grid" if tick else "axis"))
    return top, marks


def render_time_axis(start, end):
    """Return the marks of the time axis at round times, some hours or a month apart.

    `start` and `end` are in seconds since 1970."""
    # The longest chart that has them, the time from mark to mark, and the strftime() format
    for longest_s, step, text_format in (
            (2 * DAY, 3 * HOUR, "%H:%M"), (10 * DAY, DAY, "%a %d"),
            (100 * DAY, 5 * DAY, "%d %b"), (366 * DAY, DAY, "%b")):
        if end - start <= longest_s:
            break
    marks = []
    for tick in range(math.ceil(start / step) * step, math.floor(end) + 1, step):
        tick_datetime = utc_datetime(tick)
        # Months differ in length, so the step is a day, and only the first of a month has a mark
        if text_format == "%b" and tick_datetime.day != 1:
            continue
        marks.append(fill_template(
            '<line class="axis$minor" x1="$x" x2="$x" y1="86%" y2="88%"/>'
            '<text class="middle$minor"$time x="$x" y="95%">$text</text>\n',
            x=chart_x((tick - start) / (end - start)),
            # The script shows hours in the reader's zone. Days stay those of UTC
            time=Html(' data-time="%s"' % iso_time(tick)) if step < DAY else "",
            text=tick_datetime.strftime(text_format),
            minor=" minor" if len(marks) % 2 else ""))  # a phone shows every other text
    return marks


def chart_paths(bars, width, top):
    """Return the SVG paths of the line of the means and of the area of the peaks.

    Each bar is (index of its first sample, mean, peak) of `width` samples. The height of the plot,
    100, stands for `top` players."""
    line = []
    area = []
    next_start = -1
    for start, mean, peak in bars:
        # Where samples are missing, the pen moves (M) to the next point instead of drawing (L)
        command = "L" if start == next_start else "M"
        # Without the tiny step to the right a point that stands alone would not be visible
        line.append("%s%d %.4gh.01" % (command, start, 100 - 100 * mean / top))
        area.append("M%d 100V%.4gh%dV100" % (start, 100 - 100 * peak / top, width))
        next_start = start + width
    return "".join(line), "".join(area)


# ================================================================================================
# 9  Web
#
# The page and the lists over HTTP. One function for each route makes the response. Every response
# carries `Length` beside `Content-Length`, because the Iceball client exits without it. Whoever
# asks for a list gets the same body. What it takes to make it is kept
#
#     a server's entry in a list      in Server.entry_cache, until the server changes
#     a list                          in a RenderedList, until servers change, or for longer
#     the response with a list        in Web.responses, for as long as its list
#     a response with its head        in Web.caches by the bytes of the request, until the next tick
# ================================================================================================

# A client pays a token of [limits] requests for about 4 ms. So long it takes to search so many
# servers, to look at so many for /check, or to draw so many points of a history
SEARCH_SERVERS = 1000
CHECK_SERVERS = 10000
HISTORY_POINTS = 3000
# To read a body of this many bytes takes up to 1 ms, and costs as much as one request
TOKEN_BYTES = 8192

HTML_TYPE = "text/html; charset=utf-8"
TEXT_TYPE = "text/plain; charset=utf-8"

NO_FIELDS: Dict[str, str] = {}
RETRY_AFTER = {"Retry-After": "5"}
# The header fields of every response. A response may replace them by fields of its own
DEFAULT_FIELDS = {
    "Server": "masterserver/" + __version__,
    "Content-Security-Policy":
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
# An image has its style inside it, and runs no script, also where somebody opens it as a page
IMAGE_FIELDS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox"}


class HttpError(Exception):
    """Raised to answer a request with an error.

    The text of the exception tells the client what is wrong. `status` is the HTTP status; `fields`
    are header fields of the response."""

    def __init__(self, status, hint, fields=NO_FIELDS):
        super().__init__(hint)
        self.status = status
        self.fields = fields


class HttpResponse:
    """The response that a route function returns: the body, the status and header fields.

    The fields replace those of DEFAULT_FIELDS. A public response is the same for all clients:
    browsers and proxies may keep it for CACHE_S seconds, and Web keeps it until the next tick."""

    def __init__(self, body, media_type=TEXT_TYPE, status=200, fields=NO_FIELDS, is_public=False):
        self.body = body
        self.status = status
        self.is_public = is_public
        self.fields = {"Content-Type": media_type, "Cache-Control": "no-store", **fields}
        if is_public:
            digest = hashlib.blake2b(body, digest_size=8).hexdigest()
            self.fields["ETag"] = 'W/"%s"' % digest
            self.fields["Vary"] = "Accept-Encoding"
            self.fields["Cache-Control"] = "public, max-age=%d" % CACHE_S

    @functools.cached_property
    def gzipped_body(self):
        """The body in gzip's format, or b"" if it would be longer than GZIPPED_BYTES. It is
        compressed once, even if the response is sent often."""
        gzip_format = 31
        compressor = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, gzip_format)
        gzipped = b""
        for start in range(0, len(self.body), 65536):
            gzipped += compressor.compress(self.body[start:start + 65536])
            if len(gzipped) > GZIPPED_BYTES:
                return b""
        return gzipped + compressor.flush()


class FromDisk(NamedTuple):
    """What a route function returns if its response needs the disk."""

    job: Callable[[], Any]              # is called in the disk thread, where it may read the disk
    respond: Callable[[Any], Any]       # (what the job has returned) -> the HttpResponse


# --- One request ---------------------------------------------------------------------------------

# The empty line that ends the head. A pattern that began with the end of the line before it would
# take 15 times as long
HEAD_END = re.compile(rb"\n\r?\n")
HEADER_LINE = re.compile(r"([!#-'*+.^_`|~0-9A-Za-z-]+):([\t -~\x80-\xff]*)")
# A weight of 0 refuses a coding (RFC 9110, 12.4.2)
GZIP_ACCEPTED = re.compile(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", re.IGNORECASE)


class HttpRequest:
    """One request.

    now, wall      the time of the request, by the monotonic clock and in seconds since 1970
    address        the client's
    scheme         "https" if the connection is encrypted by TLS, otherwise "http"
    page           the path without its query
    route          the path of a route, "other" for a path that has no route, "none" before parse()
    headers        the values of the header fields by their names in lower case
    body_bytes     the length of the body
    announced      the game and the port that the request announces, for the record of a refusal
    json_field     whether it is an announcement in the form of a room with a json_field"""

    route = "none"
    headers: Mapping[str, str] = {}
    body = b""
    body_bytes = 0
    announced = "announce", 0
    json_field = False
    is_paid = False             # its client has paid the tokens in an earlier turn
    # After a malformed head nobody knows where the next request begins
    close_connection = True

    def __init__(self, head, scheme, address):
        self.head = head        # the request line, the header lines, the empty line after them
        self.scheme = scheme
        self.address = address

    def parse(self, routes):
        """Read the head into the attributes. Raise HttpError if it is malformed."""
        request_line, _, header_lines = self.head.partition(b"\n")
        try:
            method, target, version = request_line.split()
        except ValueError:
            raise HttpError(400, "The request line is not METHOD PATH HTTP/1.1.") from None
        if version not in (b"HTTP/1.0", b"HTTP/1.1"):
            raise HttpError(505, "Of HTTP only the versions 1.0 and 1.1 are spoken here.")
        self.method = method.decode("latin-1")
        self.headers = read_header_lines(header_lines)
        # No name of a host has a comma, so a second line would show
        host = self.headers.get("host")
        if version == b"HTTP/1.1" and (host is None or "," in host):
            raise HttpError(400, "Exactly one Host header is required.")

        # A path may also be http://HOST/PATH (RFC 9112, 3.2.2). Tools such as curl send letters
        # such as ß as they were typed
        path = re.sub("^https?://[^/?]*", "", target.decode("utf-8", "replace"))
        page, _, self.query_text = path.partition("?")
        self.page = page or "/"
        self.route = self.page if self.page in routes else "other"
        route = routes.get(self.route)
        has_room = route is not None and route.room is not None
        self.read_length(route.room.body_bytes if has_room else HTTP_BODY_BYTES)
        options = self.header("Connection").lower()         # Perl's clients say "TE, close"
        is_kept = version == b"HTTP/1.1" or "keep-alive" in options
        self.close_connection = not is_kept or "close" in options

    def read_length(self, max_bytes):
        """Set `body_bytes` from Content-Length.

        Raise HttpError if the length is missing, too large or not a number, or if the body comes in
        chunks."""
        text = self.header("Content-Length")
        has_unknown_length = self.method == "POST" and not text
        if "transfer-encoding" in self.headers or has_unknown_length:
            raise HttpError(411, "A body needs a Content-Length; it cannot come in chunks.")
        if not re.fullmatch("[0-9]{0,18}", text):
            raise HttpError(400, "Content-Length is not a number of bytes.")
        self.body_bytes = int(text or 0)
        if self.body_bytes > max_bytes:
            raise HttpError(413, "At most %d bytes are accepted." % max_bytes)

    def header(self, name):
        """Return the value of a header field, or "" if the request does not have it."""
        return self.headers.get(name.lower(), "")

    @functools.cached_property
    def query(self):
        values: Dict[str, str] = {}
        for name, value in urllib.parse.parse_qsl(self.query_text, keep_blank_values=True):
            if name in ("country", "hide") and name in values:
                # The boxes of a form have one name
                value = "%s,%s" % (values[name], value)
            values[name] = value
        return values


def read_header_lines(raw):
    """Return the values of header fields by their names in lower case. Raise HttpError.

    If several lines have one name, their values are joined by commas (RFC 9110, 5.3)."""
    fields: Dict[str, str] = {}
    text = raw.decode("latin-1").replace("\r\n", "\n").rstrip("\n")
    lines = text.split("\n") if text else []
    if len(lines) > 100:                # browsers behind proxies send up to 40
        raise HttpError(431, "There are more than 100 header lines.")
    for line in lines:
        match = HEADER_LINE.fullmatch(line)
        if match is None:
            raise HttpError(400, "A header line is not NAME: VALUE.")
        name, value = match.groups()
        name, value = name.lower(), value.strip(" \t")
        fields[name] = "%s,%s" % (fields[name], value) if name in fields else value
    return fields


# --- One connection ------------------------------------------------------------------------------

# A longer body is not copied behind its head. It exists once, however many wait for it. A shorter
# one is sent with its head in one call, which saves a fifth of the time; 400 servers have this much
SHARED_BODY_BYTES = 65536


class HttpSession(Session):
    """An HTTP/1.0 or 1.1 connection: one request after another, kept alive between them.

    A connection that is refused has a `refusal`, an HttpError. It is answered with that, without
    waiting for a request, and closed."""

    def __init__(self, web, address, now, refusal=None):
        self.web = web
        self.address = address          # the peer's, which may be a proxy
        # The requests of a proxy are not answered from the cache, because each of them counts
        # against the limit of the client that the proxy names
        self.is_proxy = address in web.trusted_proxies
        self.cache = {} if self.is_proxy else web.caches["http"]
        self.scheme = "http"
        self.refusal = refusal
        self.request: Any = None        # the HttpRequest that is being read or answered, or None
        self.respond_later: Any = None  # FromDisk.respond, while the job is done
        self.deadline = now + HTTP_REQUEST_S

    def encrypted(self):
        self.scheme = "https"
        if not self.is_proxy:
            self.cache = self.web.caches["https"]

    def opened(self, now):
        return self.refuse(self.refusal, now) if self.refusal else b""

    def receive(self, data, now):
        """Add data to the buffer and return the response to the first request in it.

        Return b"" if the request is not complete, or waits for the disk. A request whose bytes are
        in the cache gets its response without being parsed. A long body is left in `body`."""
        web = self.web
        if not (self.buffer or self.request or self.done):
            cached = self.cache.get(data)
            if cached and web.rules.request_limiter.allow(self.address, now):
                answer, self.body, self.done, count_key = cached
                web.request_counts[count_key] += 1
                self.deadline = now + HTTP_IDLE_S
                return answer
            # A call without data means that a response was written: the connection is idle now
            self.deadline = now + (HTTP_REQUEST_S if data else HTTP_IDLE_S)
        self.buffer += data
        self.unfinished = False
        if self.done or self.job:
            return b""
        try:
            if not self.read_request(now):
                return b""
            response = web.response_to(self.request)
        except HttpError as error:
            return self.refuse(error, now)
        except Unfinished:
            self.unfinished = self.request.is_paid = True
            return b""
        if isinstance(response, FromDisk):
            self.job, self.respond_later = response
            return b""
        return self.respond(response, now)

    def read_request(self, now):
        """Move the first request in the buffer into `request`. Return whether it is complete.

        The body stays in the buffer until the response. Raise HttpError if the data cannot be a
        request, or if it is malformed."""
        if self.request is None:
            self.buffer = self.buffer.lstrip(b"\r\n")       # some clients send a blank line first
            line, _, _ = self.buffer.partition(b"\n")
            if line and not line[:1].isalpha():
                raise HttpError(400, "This is not an HTTP request; this port speaks HTTP without "
                                     "TLS.")
            if len(line) > HTTP_LINE_BYTES:
                raise HttpError(414, "The request line is longer than %d bytes." % HTTP_LINE_BYTES)
            match = HEAD_END.search(self.buffer)
            head_bytes = match.end() if match else len(self.buffer)
            if head_bytes > HTTP_HEAD_BYTES:
                raise HttpError(431, "The headers are longer than %d bytes." % HTTP_HEAD_BYTES)
            if match is None:
                return False
            self.request = HttpRequest(self.buffer[:head_bytes], self.scheme, self.address)
            self.buffer = self.buffer[head_bytes:]
            self.request.parse(self.web.routes)
        request = self.request
        request.body = self.buffer[:request.body_bytes]
        request.now = now
        request.wall = now + self.web.epoch
        if self.is_proxy:
            request.address = self.web.client_address(
                self.address, request.header("X-Forwarded-For"))
        return len(request.body) == request.body_bytes

    def resume(self, result, now):
        self.job = None
        respond_later, self.respond_later = self.respond_later, None
        try:
            # A RuntimeError says that too many jobs wait; any other exception is a fault of the
            # program
            if isinstance(result, (*DISK_ERRORS, RuntimeError, MemoryError)):
                hint = "The answer cannot be made just now: %s." % error_text(result)
                raise HttpError(503, hint, RETRY_AFTER)
            if isinstance(result, Exception):
                raise result
            return self.respond(respond_later(result), now)
        except HttpError as error:
            return self.refuse(error, now)

    def tick(self, now):
        """End the connection if its deadline has passed.

        Return the bytes to send: 503 if the disk was too slow, 408 if the client was, or b"" if no
        request had begun."""
        if now < self.deadline or self.done:
            return b""
        self.done = True
        if self.job:
            return self.refuse(HttpError(503, "The answer takes too long.", RETRY_AFTER), now)
        if self.buffer or self.request:
            return self.refuse(HttpError(408, "The request did not arrive in time."), now)
        return b""

    def refuse(self, error, now):
        """Return the bytes of the response that tells the client of an HttpError.

        The error is sent in the format that the client reads: what the room says to its clients,
        JSON to those that announce by HTTP, a page to browsers, text to all others. If it came
        before a head was complete, the whole buffer counts as the request."""
        if self.request is None:
            self.request = HttpRequest(self.buffer, self.scheme, self.address)
        request = self.request
        status = error.status
        hint = str(error)
        # An overloaded master, or one whose limit the client exceeds, would refuse the next request
        # too. Other clients of a proxy may still be within their limits
        if status in (408, 503) or (status == 429 and not self.is_proxy):
            request.close_connection = True
        route = self.web.routes.get(request.route)
        body = None
        media_type = JSON_TYPE
        if route and route.room:
            body = route.room.http_error(request, status, hint)
        elif request.route == "/announce" and not request.json_field:
            body = to_json({"listed": False, "reason": hint})
        reason = http.client.responses[status]
        if body is None and "text/html" in request.header("Accept"):
            page = fill_template(ERROR_PAGE, status=status, reason=reason, hint=hint)
            body = render_page(self.web.look, reason, main=page)
            media_type = HTML_TYPE
        elif body is None:
            body = ("%d %s\n%s\n" % (status, reason, hint)).encode()
            media_type = TEXT_TYPE
        return self.respond(HttpResponse(body, media_type, status, error.fields), now)

    def respond(self, response, now):
        """Return the bytes of the HttpResponse to `request`, and get ready for the next request.

        A response to HEAD, or with status 304, has no body, but its head gives the body's length.
        The request is counted. A public response goes into the cache."""
        request = self.request
        web = self.web
        status = response.status
        body = response.body
        fields = {
            "Date": email.utils.formatdate(now + web.epoch, usegmt=True),
            **DEFAULT_FIELDS,
            **web.scheme_fields[self.scheme],
            **response.fields,
        }
        # Shorter bodies fit into one packet with their head anyway
        if 600 <= len(body) <= GZIP_MAX_BYTES:
            is_accepted = GZIP_ACCEPTED.search(request.header("Accept-Encoding"))
            if is_accepted and response.gzipped_body:
                body = response.gzipped_body
                fields["Content-Encoding"] = "gzip"
        fields["Length"] = fields["Content-Length"] = str(len(body))
        fields["Connection"] = "close" if request.close_connection else "keep-alive"
        if request.route.endswith((".json", ".xml")):       # scripts on other sites may read these
            fields["Access-Control-Allow-Origin"] = "*"
        if response.is_public and response.fields["ETag"] in request.header("If-None-Match"):
            status = 304
        if status == 304 or request.head.startswith(b"HEAD "):
            body = b""
        lines = ["HTTP/1.1 %d %s" % (status, http.client.responses[status])]
        for field in fields.items():
            lines.append("%s: %s" % field)
        data = "\r\n".join([*lines, "", ""]).encode("latin-1")
        if len(body) <= SHARED_BODY_BYTES:
            data, body = data + body, b""

        count_key = request.route, status
        web.request_counts[count_key] += 1
        if response.is_public and not self.is_proxy and not request.body:
            size = len(request.head) + len(data)
            if response not in web.responses.values():
                size += len(body)               # nobody else shares it
            if web.cache_bytes + size > HTTP_CACHE_BYTES:
                web.empty_caches()              # they fill again within a second
            web.cache_bytes += size
            self.cache[request.head] = data, body, request.close_connection, count_key
        self.body = body
        self.done = request.close_connection
        self.buffer = self.buffer[request.body_bytes:]
        self.request = None
        self.deadline = now + (HTTP_REQUEST_S if self.buffer else HTTP_IDLE_S)
        return data


# --- All connections -----------------------------------------------------------------------------

class Web(TcpProtocol):
    """The state that all HTTP connections share: the cached responses and lists.

    It calls the function of each request's route."""

    speaks_first = False

    def __init__(self, program):
        self.program = program
        self.settings = program.settings
        self.registry = program.registry
        self.rules = program.registry.rules
        self.epoch = 0.0                # wall clock minus monotonic clock; the event loop sets it
        # By the bytes of a request, the response to it: the head, with the body if that is short; a
        # long body; whether the connection ends; the key in request_counts
        self.caches = {"http": {}, "https": {}}
        self.cache_bytes = 0            # the size of both together, without whole lists
        # By (route, game): RenderedLists that are not a room's, and the responses with whole lists
        self.lists = {}
        self.responses = {}
        # The player counts of the last day, for the sparklines in the rows of the list page
        self.hourly_players = program.hourly_players()
        self.games_past = {}            # the GamePasts by game, as the database has given them last
        self.request_counts = collections.Counter()     # by route and status
        self.rooms = program.rooms
        self.routes = dict(ROUTES)
        for room in program.rooms.values():
            for path, route in room.routes.items():
                get = functools.partial(get_list, room, route)
                self.routes[path] = WebRoute(GET, get, room)
            for request, name in room.requests.items():
                method, path = request.split()
                methods = POST if method == "POST" else GET
                ask = functools.partial(ask_room, room, getattr(room, name))
                self.routes[path] = WebRoute(methods, ask, room)
        self.read(program.settings)

    def session(self, address, now):
        return HttpSession(self, address, now)

    def refusal(self, address, now):
        hint = "Too many connections at once; wait a few seconds."
        return HttpSession(self, address, now, HttpError(429, hint, RETRY_AFTER))

    def plain_refusal(self, address, now):
        error = HttpError(400, "This port speaks HTTPS; write https://.")
        return HttpSession(self, address, now, error)

    def read(self, settings):
        """Read the trusted proxies and the look of the pages from the settings.

        All cached lists and responses are dropped, because they show the old settings."""
        self.trusted_proxies = Networks(settings["http.trusted_proxies"])
        # The games whose servers announce themselves by HTTP, by their ids
        self.announced = {}
        titles = {}
        for room in self.rooms.values():
            titles.update({room.game: room.title, **room.titles})
            if room.announced_by_http and room.is_on(settings):
                self.announced[room.game] = room
        for game, title in settings["games"].items():
            titles[game] = title
            self.announced[game] = OwnGame(self.program, game)
        self.look = PageContext(
            settings["http.title"],
            settings["http.intro"],
            settings.contents.get("http.template") or LIST_PAGE,
            collections.ChainMap(titles, self.registry.titles),
            settings["http.url"],
            self.rooms,
            accent_of(settings["http.accent"]),
            settings["http.links"],
            settings.contents.get("http.logo", ()))
        # The header fields of all responses by HTTP, and by HTTPS
        self.scheme_fields = {"http": NO_FIELDS, "https": NO_FIELDS}
        if settings["http.url"].startswith("https:"):
            # Browsers that have come by HTTPS once use nothing else for a day
            self.scheme_fields["https"] = {"Strict-Transport-Security": "max-age=%d" % DAY}
        self.registry.forget_entries()      # rows of the list contain the titles of games
        self.forget_responses()

    def tick(self, now):
        """Drop the cached responses once a second, and the lists for which nobody asks any more."""
        self.empty_caches()
        for key, listed in list(self.lists.items()):
            if now >= listed.due + MINUTE:
                del self.lists[key]
                self.responses.pop(key, None)
        hourly_players = self.program.hourly_players()
        if hourly_players != self.hourly_players:
            self.hourly_players = hourly_players
            self.registry.forget_entries()      # rows have curves of the last day

    def forget_responses(self):
        self.lists.clear()
        self.empty_caches()

    def empty_caches(self):
        for cache in self.caches.values():
            cache.clear()
        self.cache_bytes = 0

    def client_address(self, peer_address, forwarded_for):
        """Return the IP address of the client that has sent a request.

        That is `peer_address`, the other end of the connection, unless it is a trusted proxy. Each
        proxy appends the address of its own client to the header field X-Forwarded-For, so
        `forwarded_for` is read backwards, past the addresses of trusted proxies. The first other
        address is the client's; everything before it may be forged."""
        client = peer_address
        for text in reversed(forwarded_for.split(",")):
            if client not in self.trusted_proxies:
                break
            without_port = re.sub(r"^([0-9.]+|\[.*\]):[0-9]+$", r"\1", text.strip())
            try:
                client = read_public(without_port) or client
            except ValueError:
                break
        return client

    def response_to(self, request):
        """Return the HttpResponse to a request, or FromDisk, from the function of its route.

        A server that the route refuses is recorded for the page /check. Raise HttpError if the path
        or the method does not exist, if a limit is exceeded, or if the route refuses the request.
        """
        self.charge(request, max(1.0, request.body_bytes / TOKEN_BYTES))
        route = self.routes.get(request.route)
        if route is None:
            raise HttpError(404, "There is no page %s here." % request.page[:100])
        methods = route.methods
        fields = {"Allow": methods, "Access-Control-Allow-Methods": methods}
        if request.method not in methods.split(", "):
            raise HttpError(405, "%s takes %s." % (request.route, methods), fields)
        if request.method == "OPTIONS":
            return HttpResponse(b"", fields=fields)
        try:
            return route.respond(self, request)
        except Malformed as error:
            refused = Refused("bad packet", str(error))
        except Refused as error:
            refused = error
        game, port = request.announced
        self.registry.record_outcome(request.address, game, refused.port or port,
                                     refused.outcome, request.now, str(refused))
        status = {"bad packet": 400, "limit": 429, "busy": 429}.get(refused.outcome, 403)
        raise HttpError(status, str(refused))

    def charge(self, request, tokens):
        """Take tokens for this request from the client's bucket in the request limiter, as many as
        request_tokens() says, if it is the first turn that the request takes.

        Raise HttpError if the bucket has too few, or if the client is blocked. (A blocked client
        gets this far only through a proxy: its own connections are not accepted.)"""
        address = request.address
        limiter = self.rules.request_limiter
        tokens = self.rules.request_tokens(tokens)
        route = self.routes.get(request.route)
        if route and route.room and route.methods == POST:
            # The game servers of one machine may register in the same second, as others announce
            # themselves by UDP. By default 200 tokens are taken at once: enough for 32 servers that
            # start together, each with four addresses, at two tokens a registration
            limiter = self.rules.message_limiter
            _, at_once = self.settings["limits.datagrams"]
            tokens = min(2, at_once)
        if request.is_paid or limiter.allow(address, request.now, tokens):
            return
        if self.rules.verdict(address) == BLOCKED:
            raise HttpError(403, "Requests from %s are not answered here." % address)
        hint = "Too many requests from %s; wait a few seconds." % address
        raise HttpError(429, hint, RETRY_AFTER)

    def list_response(self, request, list_filter, media_type, render):
        """Return the response with the servers that pass a ListFilter.

        `render(servers, now)` returns its body. The whole list, or the whole list of a known game,
        is a RenderedList. The result of a search serves one client only, so the client is charged
        for each server that is searched."""
        game = list_filter.game
        if game in ("", *self.look.games) and list_filter == ListFilter(game):
            key = request.route, game
            if key not in self.lists:
                self.lists[key] = RenderedList(
                    self.registry, game, render, for_clients=False, ages_s=CACHE_S)
            return self.whole_list_response(key, self.lists[key].get(request.now), media_type)
        self.charge(request, self.registry.total / SEARCH_SERVERS)
        servers = self.matching_servers(list_filter)
        if list_filter.sort:
            servers.sort(key=list_filter.order, reverse=list_filter.sort[0] == "-")
        return HttpResponse(render(servers, request.now), media_type, is_public=True)

    def matching_servers(self, list_filter):
        servers = self.registry.servers(list_filter.game)
        all_searched = itertools.repeat(Searched("", ""))
        if list_filter.text:
            all_searched = searched_texts(self.look, servers)
        return [server for server, searched in zip(servers, all_searched)
                if list_filter.matches(server, searched.text)]

    def whole_list_response(self, key, body, media_type):
        response = self.responses.get(key)
        if response is None or response.body is not body:
            response = self.responses[key] = HttpResponse(body, media_type, is_public=True)
        return response


# --- The query of a request ----------------------------------------------------------------------

def query_number(request, name, high):
    """Return the number that a query has by this name, or 0 if it has none. Raise HttpError."""
    text = request.query.get(name, "").strip()
    try:
        return number_reader(0, high)(text) if text else 0
    except ValueError as error:
        raise HttpError(400, "%s: %s." % (name, error)) from None


class ListFilter(NamedTuple):
    """A choice of servers for a list, and their order."""

    game: str                           # "" for all games
    name: str = ""                      # a part of the name or the address; "" for all servers
    players_min: int = 0                # servers with fewer players are left out
    countries: Tuple[str, ...] = ()     # their codes; () for servers in any country or none
    text: str = ""                      # a part of the name, mode, map, address, a player's name
    hide: Tuple[str, ...] = ()          # values in HIDE
    sort: str = ""                      # "" for the order of the list

    def cleared(self):
        """Return the choice of all servers of the game, in the same order."""
        return ListFilter(self.game, sort=self.sort)

    def chooses(self):
        """May the choice leave out a server of the game?"""
        return self != self.cleared()

    def sorted_by(self):
        """Return a key of SORTS."""
        return self.sort.lstrip("-") or "players"

    def link(self, **changes):
        """Return the link to the list page with this choice, in which some fields are changed."""
        choice = self._replace(**changes)
        values = {
            "game": choice.game, "name": choice.name, "q": choice.text,
            "players_min": choice.players_min, "country": ",".join(choice.countries),
            "hide": ",".join(choice.hide), "sort": choice.sort}
        query = {name: value for name, value in values.items() if value}
        return "/?" + urllib.parse.urlencode(query, safe=",") if query else "/"

    def matches(self, server, searched):
        """Does the server belong in the list? `searched` is the text of its Searched.

        The function wanted() of the page's script follows the same rule."""
        if server.players < self.players_min:
            return False
        if self.countries and server.country not in self.countries:
            return False
        if crowd_of(server) in self.hide or ("password" in self.hide and is_locked(server)):
            return False
        name, text = self.name.casefold(), self.text.casefold()
        return ((name in server.name.casefold() or in_address(server, name))
                and (text in searched or in_address(server, text)))

    def order(self, server):
        value = getattr(server, self.sorted_by())
        # Those without one come last
        return value.casefold() or "zzz" if isinstance(value, str) else value


def in_address(server, text):
    """Text with a colon is searched in the address with its port, other text in it alone."""
    return text in (server.endpoint if ":" in text else server.address)


def query_filter(web, request, default_game=""):
    """Return the ListFilter in the query of a request.

    Raise HttpError if a value is wrong, or if the game is unknown. /servers.json is different: for
    an unknown game it gives an empty list, so that programs need no special case."""
    query = request.query
    game = query.get("game", default_game)
    is_known_game = game in ("", *web.look.games)
    if not is_known_game and request.route != "/servers.json":
        raise HttpError(404, "There is no game %s here." % ascii(game[:100]))
    codes = set()
    # As in country=de,nl. A form without the script sends several values, which are joined likewise
    for text in query.get("country", "").lower().split(","):
        code = text.strip()
        if not re.fullmatch("([a-z]{2})?", code):
            raise HttpError(400, "country: expected two letters for each, such as de,nl.")
        codes.add(code)
    codes.discard("")
    sort = query.get("sort", "")
    return ListFilter(
        game,
        name=clean(query.get("name", "")),
        players_min=query_number(request, "players_min", PLAYERS_MAX),
        countries=tuple(sorted(codes)),
        text=clean(query.get("q", "")),
        hide=tuple([word for word, _ in HIDE if word in query.get("hide", "").split(",")]),
        sort=sort if sort.lstrip("-") in SORTS else "")


def query_endpoint(request, default_address=""):
    """Return the address and the port in the query of a request. A missing port is 0.

    The port may stand in `port` or in `address`, as in address=203.0.113.7:20737. Raise HttpError
    if a value is wrong."""
    text = request.query.get("address", "").strip()[:100] or default_address
    port = query_number(request, "port", 65535)
    try:
        if re.search(r"\.[0-9]+:|\]:", text):
            text, port = read_numeric_endpoint(text)
        return canonical_address(read_address(text)), port
    except ValueError:
        hint = "%s is not an IP address, a number such as 203.0.113.7." % ascii(text)
        raise HttpError(400, hint) from None


def query_history(request):
    """Return whose history is asked for, as a key of the database, and a key of SPANS.

    The database has the history of each server, and of all servers of a game together under the
    address "" and port 0. Raise HttpError."""
    game = request.query.get("game", "")
    span = request.query.get("span", "day")
    address, port = "", 0
    if "address" in request.query or "port" in request.query:
        address, port = query_endpoint(request)
    lacks_port = address and not port
    if not game or lacks_port:
        raise HttpError(400, "game is required; for one server address and port as well.")
    if span not in SPANS:
        raise HttpError(400, "span must be one of %s." % ", ".join(SPANS))
    return (game, address, port), span


# --- Lists ---------------------------------------------------------------------------------------

def get_list(room, route, web, request):
    """Return a list of a room. The query of a list of any game is a ListFilter.

    Some clients read in Last-Modified how old a list is."""
    if route.of_any_game:
        chosen = room.lists()[route.list]

        def render(servers, now):
            return chosen.render_in_turns(web.registry.for_clients(servers), now)

        list_filter = query_filter(web, request, room.game)
        return web.list_response(request, list_filter, route.media_type, render)
    body = room.rendered(route.list, request.now)
    response = web.whole_list_response((request.route, room.game), body, route.media_type)
    response.fields["Last-Modified"] = email.utils.formatdate(request.wall, usegmt=True)
    return response


JSON_FIELDS = (
    "game address port name mode map version players max_players playing description official "
    "priority verified responding found_at country").split()
read_json_fields = operator.attrgetter(*JSON_FIELDS)


def server_json(server):
    """Return the beginning of a server's entry in /servers.json, as JSON without its last brace.

    The entry is cached until the server changes. Its times change more often, so with_times() adds
    them later."""
    fields = dict(zip(JSON_FIELDS, read_json_fields(server)))
    fields["unconfirmed"] = not server.confirmed
    fields["ping_ms"] = None
    if server.ping_ms is not None:
        fields["ping_ms"] = round(server.ping_ms, 1)
    for room in ROOMS.values():
        for name, default in room.json_fields.items():
            fields[name] = server.private.get(name, default)
    for name in ("arenas", "factions", "skill", "flags"):
        fields[name] = server.details.get(name, "")
    entry = to_json(fields)
    return entry[:-len("}")]


def with_times(beginning, server, epoch, own_master):
    """Return the whole entry of a server in /servers.json: server_json(), its master and its times.

    `epoch` is the wall clock minus the monotonic clock. `own_master` is this master's name, or ""
    if there are no other masters."""
    master = server.master or own_master
    return b'%s,"master":"%s","first_seen":%d,"last_seen":%d}' % (
        beginning, master.encode(), server.first_seen + epoch, server.seen + epoch)


def get_servers_json(web, request):
    def render(servers, now):
        registry = web.registry
        entries = []
        beginnings = cached_entries(servers, "servers.json", server_json, RENDERED_AT_ONCE)
        for server, beginning in zip(servers, beginnings):
            entries.append(with_times(beginning, server, web.epoch, registry.master))
        return b'{"generated":%d,"generation":%d,"servers":[%s]}\n' % (
            now + web.epoch, registry.generation, b",\n".join(entries))

    list_filter = query_filter(web, request)
    return web.list_response(request, list_filter, JSON_TYPE, render)


# --- Pages ---------------------------------------------------------------------------------------

def contact_blocks(program, place):
    """Return the Contacts of the games that can be announced here, filled for a MasterPlace."""
    settings = program.settings
    ports = {}
    for listener in program.listeners:
        # If a protocol has several ports, the last one takes announcements
        ports[listener.protocol] = listener.port
    rooms = []
    for game, room in program.rooms.items():
        # A room without ports of its own is announced by HTTP
        if ports.get(game) if room.ports else room.is_on(settings):
            rooms.append(room)
    rooms += [OwnGame(None, game, title) for game, title in settings["games"].items()]
    contacts = []
    for room in rooms:
        for contact in room.contacts:
            if place.url or not re.search(r"%\((url|page)\)", contact.block):
                port = ports.get(room.game, room.master_port)
                contacts.append(contact.filled(room, port, place))
    return contacts


def page_url(program, host):
    """Return the URL of this master's page at a host, by HTTPS if a port is open for that.

    Return "" if no port is open for pages."""
    if program.settings["http.url"]:
        return program.settings["http.url"]
    for protocol in "https", "http":
        for listener in program.listeners:
            if listener.protocol == protocol:           # the first has the page
                endpoint = endpoint_text(host, listener.port)
                if listener.port == WEB_PORTS[protocol]:
                    endpoint = endpoint.rpartition(":")[0]
                return "%s://%s" % (protocol, endpoint)
    return ""


# A host name or an address, and perhaps a port
HOST_FIELD = re.compile(r"(?P<host>[\w.-]+|\[[\da-fA-F:.]+\])(:\d+)?", re.ASCII)


def place_for(web, request):
    """Return the MasterPlace of this master by the name under which the client has reached it."""
    field = HOST_FIELD.fullmatch(request.header("Host"))
    host = field["host"].strip("[]") if field else "THIS-HOST"
    url = page_url(web.program, host)
    if field and not url.startswith("https:"):
        # A proxy may have another port
        url = "%s://%s" % (request.scheme, request.header("Host"))
    named_host = urllib.parse.urlsplit(web.settings["http.url"]).hostname
    return MasterPlace(web.settings["server.public_address"] or named_host or host, url)


def get_add(web, request):
    """Return the page with the blocks for game servers; with ?game= that of one game."""
    game = request.query.get("game", "")
    contacts = contact_blocks(web.program, place_for(web, request))
    chosen = [contact for contact in contacts if game in contact.games]
    page = render_add_page(web.look, chosen or contacts, bool(chosen))
    return HttpResponse(page, HTML_TYPE)


def get_page(web, request):
    """Return the response with the list page. Its query is that of /servers.json."""
    list_filter = query_filter(web, request)
    game = list_filter.game
    if game and list_filter == ListFilter(game) and not web.registry.games.get(game):
        # The blocks name the host as the client does, so this page is for no other client
        contacts = [contact for contact in contact_blocks(web.program, place_for(web, request))
                    if game in contact.games]
        return HttpResponse(list_page(web, list_filter, contacts, [], request.now), HTML_TYPE)
    render = functools.partial(list_page, web, list_filter, ())
    return web.list_response(request, list_filter, HTML_TYPE, render)


def list_page(web, list_filter, contacts, servers, now):
    """Return the list page with the servers that pass a ListFilter, as UTF-8 bytes.

    Only the first PAGE_ROWS of them get a row. If there are none, the page has the blocks of these
    filled Contacts."""
    game = list_filter.game
    look = web.look
    counts = {each: len(listed) for each, listed in web.registry.games.items() if listed}
    day = web.hourly_players.get((game, "", 0) if game else ALL_GAMES, ())
    countries = web.registry.count_countries(game)
    # The totals are those of the game, whatever is searched in it
    listed = web.registry.servers(game) if list_filter.chooses() else servers
    shown = servers[:PAGE_ROWS]
    rows = render_rows(look, shown, web.hourly_players, web.epoch, now + web.epoch,
                       list_filter.text)
    hint = ""
    if not servers:
        everywhere = list_filter._replace(game="")
        elsewhere = web.matching_servers(everywhere) if game and listed else ()
        matches = collections.Counter([server.game for server in elsewhere])
        hint = render_hint(look, list_filter, len(listed), contacts, matches)
    return render_page(
        look,
        look.games.get(game),
        look.template,
        about=list_summary(servers),
        path="/?game=" + game if game else "/",
        intro=render_intro(look.intro),
        totals=render_totals(listed, render_sparkline(day)),
        tabs=render_game_tabs(look, counts, list_filter),
        search=render_search(list_filter, countries, len(servers), len(listed)),
        table=render_table(list_filter, rows, len(servers), len(listed),
                           left_out_columns(look, shown, game), hint))


def with_wall_times(server, epoch):
    """Return a copy of a server with times in seconds since 1970 instead of the monotonic clock's.

    `epoch` is the difference between the two."""
    server_copy = copy.copy(server)
    server_copy.first_seen += epoch
    server_copy.last_seen = server.seen + epoch
    return server_copy


def charge_history(web, request, span):
    """Charge the client of a request for the points of this span, a key of SPANS."""
    step, length = SPANS[span]
    web.charge(request, length / step / HISTORY_POINTS)


def get_server(web, request):
    """Return the page of one server. One that has left the list has a page, too, if the database
    remembers it."""
    key, span = query_history(request)
    charge_history(web, request, span)
    database = web.program.database

    def job():
        remembered = database.known(*key)
        # Older versions stored no history of ALL_GAMES. That of the game is the next best
        keys = key, ALL_GAMES, (key[0], "", 0)
        histories = [database.history(*kept, span, request.wall) for kept in keys]
        share = uptime(remembered.first_seen, *histories) if remembered else None
        return remembered, histories[0], share

    def respond(result):
        remembered, series, share = result
        listed = web.registry.get(*key)
        game, address, port = key
        if listed:
            server = with_wall_times(listed, web.epoch)
        elif remembered:
            server = Server(game, address, port, source=address, now=remembered.last_seen,
                            lifetime=0.0, name=remembered.name)
        else:
            endpoint = endpoint_text(address, port)
            raise HttpError(404, "No server %s of %s is known here." % (endpoint, game))
        if remembered:
            # A server that has come back was first seen before its present stay in the list
            server.first_seen = min(server.first_seen, remembered.first_seen)
        base = web.look.url or "%s://%s" % (request.scheme, request.header("Host"))
        is_listed = listed is not None
        page = render_server_page(
            web.look, server, is_listed, (span, series, share), base, request.wall)
        if listed:
            web.look.room(listed).looked_at(listed, request.now)
        return HttpResponse(page, HTML_TYPE)

    return FromDisk(job, respond) if database else respond((None,) * 3)


def played_games(web, servers):
    """Return the entries of /games.json: the games that have servers or a history, the most played
    first, and all games together, with all `servers`."""
    def entry(game, title, listed):
        past = web.games_past.get(game, NO_PAST)
        most_played = []
        for key, mean in past.most_played:
            server = web.registry.get(*key)
            if server:
                name = server.name or server.endpoint
                most_played.append({"name": name, "page": server_link(server), "mean": mean})
        players = sum([server.players for server in listed])
        # What is stored lacks the present minute
        peaks = {span: max(peak or 0, players) for span, peak in past.peaks.items()}
        return {"game": game, "title": title, "servers": len(listed), "players": players,
                **past._asdict(), "peaks": peaks, "most_played": most_played}

    games = []
    for game, title in web.look.games.items():
        played = entry(game, title, web.registry.games.get(game, {}).values())
        if played["servers"] or played["means"].get("month"):
            games.append(played)
    games.sort(key=lambda played: (-played["players"], -(played["means"].get("week") or 0)))
    return [*games, entry("", "Together", servers)]


def get_games(web, request):
    """Return the games that are played here, as a page or as JSON, the same for all who ask."""
    is_json = request.route == "/games.json"
    look = web.look
    database = web.program.database
    charge_history(web, request, "month")

    def render(servers, now):
        games = played_games(web, servers)
        if is_json:
            return to_json({"generated": int(now + web.epoch), "games": games})
        return render_games_page(look, games)

    def respond(pasts):
        web.games_past = pasts
        media_type = JSON_TYPE if is_json else HTML_TYPE
        return web.list_response(request, ListFilter(""), media_type, render)

    if database is None:
        return respond({})
    games = tuple(look.games)
    return FromDisk(lambda: database.games_past(games, request.wall), respond)


def get_banner(web, request):
    """Return a picture of one server for other pages, an SVG of 560 × 95 pixels.

    It is made for unknown servers too, with status 404, because a page that embeds it cannot show a
    text instead."""
    key, _ = query_history(request)
    server = web.registry.get(*key)
    database = web.program.database

    def respond(remembered):
        game, address, port = key
        place = endpoint = endpoint_text(address, port)
        name = players = ""
        status = 200
        if server:
            name = server.name
            state = server.map if server.responding else "not responding"
            players = "%d/%s" % (server.players, server.max_players or "?")
            if server.country:
                place = "%s · %s" % (endpoint, country_name(server.country))
        elif remembered:
            name = remembered.name
            state = "not listed since %s UTC" % minute_text(remembered.last_seen)
        else:
            state = "is not known here"
            status = 404
        svg = fill_template(
            BANNER,
            accent=Html(ACCENT_CSS % web.look.accent),
            name=clean(name) or endpoint,
            state=state,
            players=players,
            game=web.look.games.get(game, clean(game)),
            place=place,
            spark=render_sparkline(web.hourly_players.get(key, ())))
        # Its style is inside it, because an image on another page cannot load a style sheet
        return HttpResponse(svg.encode(), SVG_TYPE, status, {
            **IMAGE_FIELDS,
            "Cache-Control": "public, max-age=60",
            "Vary": "Accept-Encoding",
        })

    if server or not database:
        return respond(None)
    return FromDisk(lambda: database.known(*key), respond)


def get_history_json(web, request):
    key, span = query_history(request)
    game, address, port = key
    database = web.program.database
    if database is None:
        raise HttpError(404, "This master keeps no history ([server] database is empty).")
    charge_history(web, request, span)

    def respond(series):
        body = to_json({
            "game": game,
            "address": address,
            "port": port,
            "span": span,
            "start": series.start,
            "step": series.step,
            "players": series.means,
            "peak": series.peaks,
        })
        return HttpResponse(body, JSON_TYPE)

    return FromDisk(lambda: database.history(*key, span, request.wall), respond)


# --- Announcements by HTTP -----------------------------------------------------------------------

ANNOUNCED_TTL_S = 120               # `announce` repeats an announcement after half of this
FORM_TYPE = "application/x-www-form-urlencoded"


# What an announcement may say: the texts with their greatest lengths, and the numbers with their
# lowest and their highest values
ANNOUNCED_TEXTS = {
    "game": NAME_CHARACTERS, "action": NAME_CHARACTERS, "name": NAME_CHARACTERS,
    "mode": NAME_CHARACTERS, "map": NAME_CHARACTERS, "version": NAME_CHARACTERS,
    "description": TEXT_CHARACTERS}
ANNOUNCED_NUMBERS = {
    "port": (1, MAX_PORT), "players": (0, PLAYERS_MAX), "max_players": (0, PLAYERS_MAX)}
ANNOUNCED_FIELDS = {**ANNOUNCED_TEXTS, **ANNOUNCED_NUMBERS}
TOO_MANY_FIELDS = "an announcement has at most %d fields" % ANNOUNCED_FIELDS_MAX


class OwnGame(Game):
    """A game of the operator's own, in [games]: it has no protocol.

    Its servers announce themselves by POST /announce, and are listed at once."""

    contacts = (Contact(
        "Run this beside the game server, with its port", ANNOUNCE_COMMAND, "the game's port"),)

    def __init__(self, program, game, title=""):
        self.game = game
        self.title = title
        super().__init__(program)

    def announced(self, source, port, fields, now):
        address = self.rules.listed_address(source)
        server = self.registry.get(self.game, address, port)
        if not server or "name" in fields:
            fields["name"] = fields.get("name") or endpoint_text(address, port)
        key = self.game, address, port
        self.registry.list_or_refresh(key, source, now, ANNOUNCED_TTL_S, fields)
        if not server:
            self.registry.record_outcome(source, self.game, port, "listed", now)


def post_announce(web, request):
    """Handle an announcement by HTTP and return the response. Raise HttpError or Refused.

    The announced server has the address from which the request came. If the master can query
    servers of the game, the server is queried first; otherwise it is listed at once."""
    check_no_web_page(request)
    source, now = request.address, request.now
    form_room, values = announced_values(web, request)
    game = announced_game(web, form_room.game if form_room else values.get("game", ""))
    request.announced = game, 0             # for /check, also if the port cannot be read
    port = announced_value("port", values.get("port"))
    request.announced = game, port
    if form_room:
        answer = form_room.announced(source, port, values, now)
        return HttpResponse(answer.body, TEXT_TYPE, answer.status)
    room = web.announced[game]
    fields = {}
    for name in ANNOUNCED_FIELDS:
        if name in values and name not in ("game", "port"):
            fields[name] = announced_value(name, values[name])
    action = fields.pop("action", "")
    result: Dict[str, Any] = {"listed": False, "ttl": ANNOUNCED_TTL_S}
    if action == "stop":
        if not room.stopped(source, port, now):
            raise HttpError(404, "No server from %s on port %d is listed here as %s." % (
                source, port, game))
        result["reason"] = "stopped"
    elif action in ("", "announce"):
        room.announced(source, port, fields, now)
        server = web.registry.get(game, web.rules.listed_address(source), port)
        if server and server.responding:
            result["listed"] = True
        else:
            result["reason"] = ("waiting for its answer to a query on UDP port %d; the page /check "
                                "tells what came of it" % (port + room.offset))
    else:
        raise Refused("bad packet", "action: expected stop, or nothing")
    return HttpResponse(to_json(result), JSON_TYPE)


def ask_room(room, answer_request, web, request):
    """Answer a POST of a game server, or another request for which the room has a method."""
    if request.method == "POST":
        check_no_web_page(request)
    if not room.is_on(web.settings):
        raise HttpError(404, "%s servers are not listed here." % room.title)
    request.announced = room.game, 0
    return HttpResponse(answer_request(request), JSON_TYPE)


def check_no_web_page(request):
    """Raise HttpError if a script of a web page has sent this request from somebody's browser.

    Every browser sends Origin with a POST of a script, and sends Sec-Fetch-Site over HTTPS and to
    its own machine. The Host field would prove nothing, because the owner of a page can let the
    name of his host lead to this master (DNS rebinding)."""
    if request.header("Origin") or request.header("Sec-Fetch-Site") not in ("", "none"):
        raise HttpError(403, "A web page may not announce servers here.")


def announced_values(web, request):
    """Return the room whose game servers announce themselves by such a form, or None, and the
    values of the announcement by name, unchecked.

    Raise HttpError if the body has another media type, and Refused if it is malformed."""
    body = request.body
    for room in web.rooms.values():
        json_text = room.json_field and form_json(body, room.json_field)
        if json_text:
            request.json_field = True
            return room, json_values(json_text)
    content_type, _, _ = (request.header("Content-Type") or FORM_TYPE).partition(";")
    media_type = content_type.strip().lower()
    # `curl -d` declares a form even if it sends a JSON object
    if media_type == "application/json" or body.startswith(b"{"):
        return None, json_values(body)
    if media_type == FORM_TYPE:
        return None, form_values(body)
    raise HttpError(415, "Expected %s or application/json, not %s." % (
        FORM_TYPE, ascii(media_type[:100])))


def form_json(body, field):
    """Return the JSON in a form that has this one field; b"" if the body is not such a form.

    The form is urlencoded or multipart/form-data (RFC 7578)."""
    urlencoded_start = field.encode() + b"="
    if body.startswith(urlencoded_start):
        value = body[len(urlencoded_start):]
        return urllib.parse.unquote_to_bytes(value.replace(b"+", b" "))
    _, _, part = body.partition(b'name="%s"' % field.encode())
    _, _, content = part.partition(b"\r\n\r\n")
    value, _, _ = content.partition(b"\r\n--")
    return value


def json_values(body):
    try:
        members = read_json_object(body)
    except Malformed as error:
        reason = '%s; expected one such as {"game": "hyperbol", "port": 27888}' % error
        raise Refused("bad packet", reason) from None
    if len(members) > ANNOUNCED_FIELDS_MAX:
        raise Refused("bad packet", TOO_MANY_FIELDS)
    return {name: value for name, value in members.items() if value is not None}


def form_values(body):
    """Return the values of an urlencoded form, by the names in ANNOUNCED_FIELDS. Raise Refused.

    If a name occurs twice, its last value counts."""
    pairs = body.split(b"&", ANNOUNCED_FIELDS_MAX)
    if len(pairs) > ANNOUNCED_FIELDS_MAX:
        raise Refused("bad packet", TOO_MANY_FIELDS)
    values = {}
    for pair in pairs:
        # A character of a value takes twelve bytes at most: UTF-8 has up to four bytes for it, and
        # each may be written as three, such as %F0. A character of a field's name takes three
        raw_name, _, raw_value = pair.partition(b"=")
        name = urllib.parse.unquote(raw_name[:3 * len("max_players")].decode("latin-1"))
        if name in ANNOUNCED_FIELDS:
            spaced_value = raw_value[:12 * TEXT_CHARACTERS].replace(b"+", b" ")
            # curl under Windows does not send UTF-8, but the encoding of the console
            values[name] = decode_legacy(
                urllib.parse.unquote_to_bytes(spaced_value), TEXT_CHARACTERS)
    return values


def announced_value(name, value):
    """Return the value of one of ANNOUNCED_FIELDS, a clean text or a number. Raise Refused.

    A text may come as a number of JSON, and a number as a text."""
    if name in ANNOUNCED_TEXTS:
        if isinstance(value, (bool, list, dict)):
            raise Refused("bad packet", name + " is not a text")
        return clean(str(value), ANNOUNCED_TEXTS[name])
    low, high = ANNOUNCED_NUMBERS[name]
    text = "" if isinstance(value, (list, dict)) else str(value)
    match = re.fullmatch(r"\s*([0-9]{1,9})(\.0)?\s*", text)         # Lua writes 27500.0
    number = int(match.group(1)) if match else -1
    if not low <= number <= high:
        raise Refused("bad packet", "%s: expected a number from %d to %d" % (name, low, high))
    return number


def announced_game(web, value):
    """Return the id of the announced game. `value` is the value of the field `game`.

    Raise Refused if the game cannot be announced by HTTP here. The reason names the games that can,
    and says how the operator can add one."""
    game = announced_value("game", value)
    if game in web.announced:
        return game
    reason = "game: expected one of %s, not %s" % (", ".join(web.announced), ascii(game))
    if re.fullmatch("[a-z0-9_-]{1,32}", game) and game not in web.look.games:
        reason += ("; the operator of this master can allow it with a line `%s = %s` under [games]"
                   % (game, game.capitalize()))
    raise Refused("bad packet", reason)


# --- Is my server listed? ------------------------------------------------------------------------

# The title of each outcome on the page /check, and what the operator of the game server can do; %s
# stands for the detail
OUTCOMES = {
    "announced": ("Announced, but the answer did not come back", (
        "This master answered and is waiting for the game server's reply. If that does not change, "
        "a firewall or router between the game server and here lets packets out but not in: open "
        "UDP, or forward the game's port.")),
    "challenged": ("Challenged, but the answer did not come back", (
        "This master sent a challenge to UDP port %s, and the game server has not returned it. "
        "Open that UDP port in the firewall and forward it in the router.")),
    "version": ("Wrong version", (
        "This master does not list %s. Another version of the game server is needed.")),
    "bad packet": ("A packet that cannot be read", (
        "What is wrong with it: %s. If the port is the one for this game, update the game server, "
        "or fix what announces it.")),
    "silent": ("It does not answer queries", (
        "There was %s. Open that UDP port in the firewall and forward it in the router.")),
    "address": ("Another address", (
        "Players would be sent elsewhere: %s. Leave server_address in minetest.conf empty, or set "
        "it to a name of the machine that the game server runs on.")),
    "banned": ("Banned", (
        "The operator of this master has excluded this address: %s. If that is a mistake, ask its "
        "operator.")),
    "limit": ("Over the limit", (
        "It is not listed: %s. Stop one of the others, or ask this master's operator for more.")),
    "busy": ("Try again", (
        "This master could not ask the game server when it announced itself: %s. The game server's "
        "next announcement does that; nothing is wrong with it.")),
    "flood": ("Too many packets", (
        "More than %s packets per second come from this address, and the rest are not read. Does a "
        "game server announce itself in a loop? If many share the address, ask this master's "
        "operator for more.")),
    "name": ("The name is refused", "Not under this name: %s. Give the server another name."),
    "game": ("The game is refused", (
        "It is not listed: %s. Its operator chooses this master's games.")),
    "owner": ("Announced from elsewhere", (
        "It is not accepted: %s. If you know of no other announcer, ask this master's operator.")),
    "password": ("Another password", (
        "It is not accepted: %s. Wait, or set the former password again.")),
    "stopped": ("Signed off", "The game server said that it was stopping."),
    "listed": ("Listed", "All is well: this master lists %s."),
    "found": ("Listed, because another list names it", (
        "This master found it at %s and queries it; it has not announced itself here. If it does, "
        "it no longer depends on that list.")),
    "mute": ("It does not answer now", (
        "This master knows %s, and queries it. Is the game server running? Is its UDP port open?")),
    "private": ("Listed under a private address", (
        "Players elsewhere cannot reach it. This master's operator can name its public address in "
        "[server] public_address or [address_map].")),
    "ipv6": ("Listed under an IPv6 address", (
        "The page shows it, but the list that this game's players get has room for IPv4 addresses "
        "only. Let the game server announce itself by IPv4.")),
    "unconfirmed": ("Not heard since a restart", (
        "It was listed before this master was restarted, and stays for a while. Is the game server "
        "running, and does it still announce itself here?")),
    "gone": ("No longer listed", (
        "It was listed then, and has since fallen silent, or this master's settings no longer "
        "allow it. Is the game server running, and does it still announce itself here?")),
}


def get_check(web, request):
    """Return the page that says what became of the packets of an address, by default the client's
    own, and perhaps of one port."""
    address, port = query_endpoint(request, request.address)
    registry = web.registry
    web.charge(request, registry.total / CHECK_SERVERS)
    listed = []
    for table in registry.games.values():
        for server in table.values():
            is_at = web.look.room(server).is_at
            if port in (0, server.port) and is_at(server, address):
                listed.append(with_wall_times(server, web.epoch))
    listed.sort(key=ranking)
    findings = current_findings(web, request, address, listed)
    findings += recorded_findings(web, address, port, listed)
    findings.sort(key=lambda finding: finding.is_well)
    # From now on, what comes from the client's own address counts as proven
    web.registry.record_outcome(request.address, "", 0, "looked", request.now)
    page = render_check_page(web.look, address, port, findings, len(listed), request.wall)
    return HttpResponse(page, HTML_TYPE)


def current_findings(web, request, address, listed):
    """Return the findings that hold for an address now.

    They say whether the address is banned, whether it has used up the limit of its datagrams, and
    how each server in `listed` stands."""
    rules = web.rules
    findings = []
    ban_reason = rules.ban_reason(address, rules.listed_address(address))
    if ban_reason:
        findings.append(finding("banned", ban_reason, endpoint=address))
    if rules.datagram_limiter.is_nearly_empty(address, request.now):
        datagrams_per_s, _ = web.settings["limits.datagrams"]
        findings.append(finding("flood", "%g" % datagrams_per_s, endpoint=address))
    for server in listed:
        room = web.rooms.get(server.room)
        outcome = "listed"
        detail = server.name or server.endpoint
        if not server.responding:
            outcome = "mute"
        elif not server.confirmed:
            outcome = "unconfirmed"
        elif server.found_at:
            outcome, detail = "found", server.found_at
        elif server.address in LOCAL_NETWORKS:
            outcome = "private"
        elif ":" in server.address and room and room.ipv4_list:
            outcome = "ipv6"
        findings.append(finding(
            outcome, detail, endpoint=server.endpoint, game=server.game, at=server.last_seen,
            server=server))
    return findings


def recorded_findings(web, address, port, listed):
    """Return the findings about an address's packets, the latest first."""
    listed_ports = {server.port: server for server in listed}
    confirmed_ports = {server.port for server in listed if server.confirmed and server.responding}
    findings = []
    registry = web.registry
    listed_address = web.rules.listed_address(address)
    records = [(key, table.get(key)) for table in (registry.outcomes, registry.unproven_outcomes)
               for key in reversed(table.keys_of(listed_address))]
    for (source, protocol, packet_port), record in records:
        is_from_address = address in (source, web.rules.listed_address(source))
        is_for_port = port == 0 or packet_port in (0, port)
        if not is_from_address or not is_for_port:
            continue
        # Of a ban, and of servers that are listed now, current_findings() says more
        is_answered = record.outcome in ("announced", "challenged", "listed")
        is_listed_now = is_answered and packet_port in confirmed_ports
        if is_listed_now or record.outcome in ("banned", "looked"):
            continue
        # A server whose listing was recorded, but that is not listed now, has left the list
        outcome = "gone" if record.outcome == "listed" else record.outcome
        # The page names the address in the query, and not the source, because the address of a
        # machine behind a public address is nobody's business
        endpoint = endpoint_text(address, packet_port) if packet_port else address
        findings.append(finding(
            outcome, record.detail, endpoint=endpoint, game=protocol, at=record.at + web.epoch,
            server=listed_ports.get(packet_port)))
    del findings[100:]                  # the first are proven
    findings.sort(key=lambda finding: finding.at, reverse=True)
    return findings


def finding(outcome, detail, **values):
    """Return the Finding of an outcome with its detail.

    An outcome that is not in OUTCOMES, from a protocol added by somebody else, is its own title."""
    title, advice = OUTCOMES.get(outcome, (outcome, "%s"))
    todo = advice.replace("%s", detail or "nothing more is known")
    return Finding(
        title=title, todo=todo, is_well=outcome in ("listed", "found", "stopped"), **values)


# --- For the operator ----------------------------------------------------------------------------

# The metrics and their help. A metric whose name ends in _total is a counter, any other a gauge
METRICS = {
    "received_total": "Packets and pieces of requests received.",
    "sent_total": "Packets and answers sent.",
    "bytes_in_total": "Bytes received.",
    "bytes_out_total": "Bytes sent.",
    "malformed_total": "Packets and connections that broke their protocol.",
    "limited_total": "Packets, connections and requests turned away by a limit.",
    "unsent_total": "Packets that the system refused to send.",
    "errors_total": "Packets and connections ended by a fault of the program.",
    "connections_total": "Connections accepted.",
    "servers": "Listed servers that respond.",
    "players": "Players on listed servers.",
    "playing": "Players in the game rather than watching.",
    "loop_delay_max_seconds": "The longest round of the event loop in the last minutes.",
    "connections": "Open connections.",
    "http_requests_total": "HTTP requests by route and status.",
    "certificate_expires_seconds": "Seconds until the certificate for HTTPS expires.",
    "news_dropped_total": "News that was not told, as there was too much in that minute.",
    "generation": "How often a list has changed: a number that grows.",
    "cluster_connected": "1 while the link to the other masters works.",
    "cluster_lag_seconds": "How old what is known of their servers may be.",
    "cluster_pending": "Own servers of which they are to be told.",
    "cluster_reconnects_total": "How often the link was made anew.",
    "cluster_servers": "Listed servers by the master that has heard them.",
    "upstream_fetched_seconds": "When another master's list was fetched, in seconds since 1970.",
    "upstream_addresses": "The addresses in it.",
    "upstream_listed": "Servers that are listed because of it.",
    "trouble": "1 while something does not work.",
    "info": "The program.",
}


def get_metrics(web, request):
    program = web.program
    # By the name of the metric, and by its labels, such as '{game="aio"}'; "" for no labels
    values: Any = collections.defaultdict(dict)
    for protocol, tally in program.tallies.items():
        for field, value in vars(tally).items():
            values[field + "_total"]['{protocol="%s"}' % protocol] = value
    for game, census in web.registry.census(request.now).items():
        for field, value in census._asdict().items():
            values[field]['{game="%s"}' % game] = value
    for (route, status), value in web.request_counts.items():
        values["http_requests_total"]['{route="%s",status="%d"}' % (route, status)] = value
    for where in program.health:
        values["trouble"]['{where="%s"}' % where] = 1
    for name, value in program.gauges.items():
        values[name][""] = value
    values["generation"][""] = web.registry.generation
    for name, value in program.cluster.items():
        if isinstance(value, dict):             # servers by master
            for master, count in value.items():
                values["cluster_" + name]['{master="%s"}' % master] = count
        else:
            values["cluster_" + name][""] = float(value)
    for label, state in program.upstream.items():
        labels = '{list="%s"}' % label
        values["upstream_addresses"][labels] = state.addresses
        values["upstream_listed"][labels] = state.listed
        if state.fetched is not None:
            values["upstream_fetched_seconds"][labels] = state.fetched
    values["info"]['{version="%s"}' % __version__] = 1
    lines = []
    for name, help in METRICS.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines.append("# HELP masterserver_%s %s\n" % (name, help))
        lines.append("# TYPE masterserver_%s %s\n" % (name, kind))
        for labels, value in values[name].items():
            lines.append("masterserver_%s%s %r\n" % (name, labels, value))
    return HttpResponse("".join(lines).encode(), "text/plain; version=0.0.4; charset=utf-8")


def get_healthz(web, request):
    """Return the state of this master, as JSON.

    The status of the response is always 200, because the master is able to answer; `trouble` names
    the parts that do not work."""
    health = web.program.health
    body = to_json({
        "status": "trouble" if health else "ok",
        "trouble": dict(health),
        "servers": web.registry.total,
        "version": __version__,
        "cluster": web.program.cluster,
        "upstream": {label: state._asdict() for label, state in web.program.upstream.items()},
    })
    return HttpResponse(body + b"\n", JSON_TYPE)


def get_style_css(web, request):
    own_css = web.settings.contents.get("http.stylesheet", "")
    text = STYLE_CSS + ACCENT_CSS % web.look.accent + own_css
    return HttpResponse(text.encode(), "text/css; charset=utf-8", is_public=True)


def get_icon(web, request):
    """Return the operator's logo, or ICON_SVG."""
    _, _, dark_accent, _ = web.look.accent
    media_type, body = web.look.logo or (SVG_TYPE, (ICON_SVG % dark_accent).encode())
    return HttpResponse(body, media_type, fields=IMAGE_FIELDS, is_public=True)


def text_route(text, media_type):
    """Return the function of a route that serves a text."""
    def get_text(web, request):
        return HttpResponse(text.encode(), media_type, is_public=True)

    return get_text


class WebRoute(NamedTuple):
    """A path of the web server."""

    methods: str                        # GET or POST
    respond: Callable[[Any, Any], Any]  # (web, request) -> the HttpResponse
    room: Any = None                    # whose list or request it is


# The methods of a route, as in the header field Allow
GET = "GET, HEAD, OPTIONS"
POST = "POST, OPTIONS"
# The routes that are not a room's
ROUTES = {
    "/": WebRoute(GET, get_page),
    "/index.html": WebRoute(GET, get_page),
    "/server": WebRoute(GET, get_server),
    "/banner.svg": WebRoute(GET, get_banner),
    "/add": WebRoute(GET, get_add),
    "/games": WebRoute(GET, get_games),
    "/games.json": WebRoute(GET, get_games),
    "/check": WebRoute(GET, get_check),
    "/style.css": WebRoute(GET, get_style_css),
    "/app.js": WebRoute(GET, text_route(APP_JS, "text/javascript; charset=utf-8")),
    "/icon": WebRoute(GET, get_icon),
    "/robots.txt": WebRoute(
        GET, text_route("User-agent: *\nDisallow: /server\nDisallow: /check\n", TEXT_TYPE)),
    "/servers.json": WebRoute(GET, get_servers_json),
    "/history.json": WebRoute(GET, get_history_json),
    "/metrics": WebRoute(GET, get_metrics),
    "/healthz": WebRoute(GET, get_healthz),
    "/announce": WebRoute(POST, post_announce),
}


# --- News ----------------------------------------------------------------------------------------

# Any punctuation mark of ASCII, because each of them has a meaning in some dialect of Markdown
MARK = "[%s]" % re.escape(string.punctuation)
# The pattern of the marks in a name that would change the format of a message, and what replaces it
NEWS_MARKS = {
    # A backslash before each mark, so that Markdown shows the mark itself
    "discord": (MARK, r"\\\g<0>"),
    # Slack's format has no backslash, and other programs that accept it read Markdown. In both, a
    # mark, or run of equal marks, has no effect on a space that follows it, here one without width
    "slack": (r"(%s)\1*" % MARK, "\\g<0>\u200b"),
}


def news_message(message_format, server, titles, settings, entry):
    """Return the media type and the body of a message that fills [notify] text for a server.

    `message_format` is "discord", "slack", "text" or "json". `titles` are those of the games, by
    their ids, `entry` is the server's entry in /servers.json."""
    def escape(text):
        if message_format not in NEWS_MARKS:
            return text
        pattern, replacement = NEWS_MARKS[message_format]
        return re.sub(pattern, replacement, text)

    title = titles.get(server.game)
    if title is None:
        title = server.details.get("gamename", server.game)
    url = settings["http.url"]
    if url:
        url += server_link(server)
    name = server.name or server.endpoint
    text = string.Template(settings["notify.text"]).safe_substitute(
        name=escape(name),
        game=escape(title),
        map=escape(server.map or "?"),
        country=escape(country_name(server.country) or "?"),
        url=url,
        players=server.players,
        max_players=server.max_players or "?").strip()
    if message_format == "discord":
        return JSON_TYPE, to_json({"content": text, "allowed_mentions": {"parse": []}})
    if message_format == "slack":
        return JSON_TYPE, to_json({"text": html.escape(text, quote=False)})
    if message_format == "json":
        return JSON_TYPE, b'{"event":"players","text":%s,"server":%s}' % (to_json(text), entry)
    return TEXT_TYPE, text.encode()


# ================================================================================================
# 10  The games
#
# GAMES is the table of the rooms, from which every other table of games is derived. To add a game,
# write its room in section 7 and name it here; README.md shows how.
# ================================================================================================

GAMES: Tuple[Any, ...] = (
    Iceball, Hyperbol, SubSpace, Aio, Quake3, Luanti, Ddnet, Sauerbraten, RedEclipse)

# All settings, in the order of the ini
SETTINGS.update((setting.name, setting) for setting in (
    *SETTINGS_BEFORE_GAMES, *[row for game in GAMES for row in game.settings],
    *SETTINGS_AFTER_GAMES))
ROOMS.update((game.game, game) for game in GAMES)
GAME_TITLES = {}
for each_game in GAMES:
    GAME_TITLES.update({each_game.game: each_game.title, **each_game.titles})
# These settings name a file that is read with the settings and again when it changes
READ_FILES = [setting.name for setting in SETTINGS.values() if setting.reads_file]
# The settings of all ports, for programs that embed this one. Without a value they open none
PORT_SETTINGS = [name for name in SETTINGS if re.search(r"\.(https_)?ports?$", name)]

# ================================================================================================
# 11  Event loop
#
# Sockets, threads and the clock. One thread, the event loop, serves every listener and connection.
# It alone changes shared data, so nothing needs a lock. All events of one wake-up are handled with
# the same `now`. Calls that may block run in threads of their own: the disk and the log always
# have one; host names, other masters, their lists and each webhook have one only if they are used.
# ================================================================================================

WINDOWS = os.name == "nt"
OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class StartError(Exception):
    """The server cannot start; the text says what to change."""


class Listener(NamedTuple):
    """One bound socket, as the ready file describes it."""

    protocol: str
    transport: str
    host: str
    port: int


# --- Datagrams -----------------------------------------------------------------------------------

class MessageVector:
    """Reads or sends many datagrams of an IPv4 socket in one system call. It calls recvmmsg(2) and
    sendmmsg(2) of 64-bit Linux through ctypes, with buffers that are allocated once.

    Handling an announcement of a listed server costs a tenth to a fifth less than with recvfrom()
    and sendto(). Each datagram has one struct in each of three arrays:

        struct mmsghdr      one datagram: where its address and its iovec are, and its length
        struct iovec        where its data is, and how much room there is
        struct sockaddr_in  its peer's address: family, port, IPv4 address, eight zeros

    receive() returns each peer as such a sockaddr_in of 16 bytes too, and send() takes it back."""

    # struct mmsghdr: pointer to the address, its length, pointer to the iovec, number of iovecs,
    # pointer to control data, its length, flags, length of the datagram
    MMSGHDR = struct.Struct("@PI4xPNPNi4xI4x")
    IOVEC = struct.Struct("@PN")                # pointer to the data, length
    SOCKADDR_BYTES = 16
    # The structs above are right only here: system, Python implementation, bytes of a pointer.
    # PyPy on Linux could use them too, but is faster without
    PLATFORM = ("linux", "cpython", 8)

    @classmethod
    def create(cls):
        """Return a MessageVector, or None if this platform lacks the two calls or refuses them."""
        if (sys.platform, sys.implementation.name, struct.calcsize("P")) != cls.PLATFORM:
            return None
        # This Python may have no ctypes, and the C library may lack a call
        with contextlib.suppress(NameError, AttributeError, OSError):
            library = ctypes.CDLL(None, use_errno=True)
            no_socket, no_headers, no_flags, no_timeout = -1, None, 0, None
            library.recvmmsg(no_socket, no_headers, 0, no_flags, no_timeout)
            # An old kernel or a sandbox refuses the call; others complain about the socket
            if ctypes.get_errno() == errno.EBADF:
                return cls(library.recvmmsg, library.sendmmsg)
        return None

    def __init__(self, receive_call, send_call):
        self.receive_call = receive_call
        self.send_call = send_call
        buffer_bytes = DRAIN_DATAGRAMS * MAX_DATAGRAM_BYTES
        # One buffer holds the received data, and later the data to send
        self.data = ctypes.create_string_buffer(buffer_bytes)
        self.data_starts = range(0, buffer_bytes, MAX_DATAGRAM_BYTES)
        # The structs contain bare pointers to each other. Every array stays referenced here, so
        # that Python does not free it
        self.headers, self.iovecs, self.sockaddrs = self.make_arrays()
        self.out_headers, self.out_iovecs, self.out_sockaddrs = self.make_arrays()
        # Views through which receive() and send() read and write single fields. A mmsghdr is read
        # as 32-bit numbers: the last one is padding, and the datagram's length comes before it
        header_numbers = memoryview(self.headers).cast("B").cast("I")
        numbers_each = self.MMSGHDR.size // 4
        self.lengths = header_numbers[numbers_each - 2::numbers_each]
        self.out_data_bytes = memoryview(self.data).cast("B")
        self.out_sockaddr_bytes = memoryview(self.out_sockaddrs).cast("B")
        iovec_fields = memoryview(self.out_iovecs).cast("B").cast("Q")
        self.out_pointers = iovec_fields[::2]
        self.out_lengths = iovec_fields[1::2]
        # The cache is five times as fast as making the text of an address again
        self.peer_of = functools.lru_cache(LIMITER_SOURCES)(self.read_sockaddr)

    def make_arrays(self):
        """Return an array of mmsghdr, one of iovec and one of sockaddr_in. The structs at the same
        position belong together."""
        headers = ctypes.create_string_buffer(DRAIN_DATAGRAMS * self.MMSGHDR.size)
        iovecs = ctypes.create_string_buffer(DRAIN_DATAGRAMS * self.IOVEC.size)
        sockaddrs = ctypes.create_string_buffer(DRAIN_DATAGRAMS * self.SOCKADDR_BYTES)
        data = ctypes.addressof(self.data)
        sockaddr = ctypes.addressof(sockaddrs)
        iovec = ctypes.addressof(iovecs)
        iovecs_each, no_control, no_flags, received_bytes = 1, (0, 0), 0, 0
        for position in range(DRAIN_DATAGRAMS):
            self.IOVEC.pack_into(
                iovecs, position * self.IOVEC.size,
                data, MAX_DATAGRAM_BYTES)
            self.MMSGHDR.pack_into(
                headers, position * self.MMSGHDR.size,
                sockaddr, self.SOCKADDR_BYTES, iovec, iovecs_each,
                *no_control, no_flags, received_bytes)
            data += MAX_DATAGRAM_BYTES
            sockaddr += self.SOCKADDR_BYTES
            iovec += self.IOVEC.size
        return headers, iovecs, sockaddrs

    @staticmethod
    def read_sockaddr(sockaddr):
        port, address = sockaddr[2:4], sockaddr[4:8]
        return socket.inet_ntoa(address), int.from_bytes(port, "big")

    def receive(self, sock):
        """Read up to DRAIN_DATAGRAMS waiting datagrams from a socket.

        Return three lists of the same length: the data of each datagram, its peer as (address,
        port), and its peer as a sockaddr_in for send(). They are empty if nothing is waiting."""
        no_timeout = None
        count = self.receive_call(sock.fileno(), self.headers, DRAIN_DATAGRAMS,
                                  socket.MSG_DONTWAIT, no_timeout)
        if count <= 0:
            return [], [], []
        data = self.data
        size = self.SOCKADDR_BYTES
        received = self.sockaddrs[:count * size]
        sockaddrs = [received[start:start + size] for start in range(0, count * size, size)]
        peers = list(map(self.peer_of, sockaddrs))
        lengths = self.lengths[:count].tolist()
        packets = [data[start:start + length] for start, length in zip(self.data_starts, lengths)]
        return packets, peers, sockaddrs

    def send(self, sock, answers, tally):
        """Send a list of (data, sockaddr) pairs, which must not be empty."""
        lengths = [len(data) for data, _ in answers]
        total_bytes = sum(lengths)
        count = len(answers)
        if count > DRAIN_DATAGRAMS or total_bytes > len(self.out_data_bytes):
            # The buffers are too small for all of them
            half = count // 2
            self.send(sock, answers[:half], tally)
            self.send(sock, answers[half:], tally)
            return
        # Each datagram starts in the buffer where the one before it ends
        self.out_data_bytes[:total_bytes] = b"".join([data for data, _ in answers])
        pointers = itertools.accumulate([ctypes.addressof(self.data)] + lengths[:-1])
        self.out_pointers[:count] = array.array("Q", pointers)
        self.out_lengths[:count] = array.array("Q", lengths)
        sockaddrs = b"".join([sockaddr for _, sockaddr in answers])
        self.out_sockaddr_bytes[:len(sockaddrs)] = sockaddrs
        position = 0
        while position < count:
            remaining = ctypes.byref(self.out_headers, position * self.MMSGHDR.size)
            sent = self.send_call(sock.fileno(), remaining, count - position, 0)
            if sent > 0:
                tally.sent += sent
                position += sent
            else:
                # The next datagram cannot be sent: the system has no buffer or no route for it, or
                # its port is closed. Skip it; the peer will ask again
                tally.unsent += 1
                total_bytes -= lengths[position]
                position += 1
        tally.bytes_out += total_bytes


def log_failure(error, tally, peer, protocol_name, data):
    """Count and log an exception that was raised while `data` of a peer, a text, was handled. Any
    but Malformed is a bug of this program and is logged with its traceback."""
    if isinstance(error, Malformed):
        tally.malformed += 1
        log.debug("%s %s malformed: %s: %a", peer, protocol_name, error, data[:48])
    else:
        tally.errors += 1
        log.error("%s %s: a fault of the program: %a", peer, protocol_name, data[:600],
                  exc_info=error)


class UdpSocket:
    """A UDP socket and its protocol. It reads and answers through a MessageVector if it has one,
    and otherwise with one system call for each datagram."""

    def __init__(self, name, sock, protocol, tally, limiter, registry, vector=None):
        """`vector` is a MessageVector, or None if the system has none. It is not used if `sock` or
        `protocol` does not fit its buffers."""
        self.name = name                # the protocol's, for the log
        self.sock = sock
        self.protocol = protocol
        self.tally = tally
        self.limiter = limiter
        self.registry = registry
        self.vector = None
        if sock.family == socket.AF_INET and protocol.datagram_bytes == MAX_DATAGRAM_BYTES:
            self.vector = vector

    def on_readable(self, now):
        """Read a batch of the datagrams that are waiting, and answer those that the limiter
        allows. Answers to their senders are sent together, those to others at once."""
        vector, tally = self.vector, self.tally
        # A reply address is a peer in the form that sending takes
        packets, peers, reply_addresses = vector.receive(self.sock) if vector else self.receive()
        tally.received += len(packets)
        tally.bytes_in += sum(map(len, packets))

        # Servers that repeat themselves are refreshed before the limiter counts. Otherwise a flood
        # with a server's forged address would use up its limit, and the server would be delisted
        sources = [peer[0] for peer in peers]
        servers = [None] * len(packets)
        if self.protocol.repeated_from:
            senders = sources if self.protocol.repeated_from == "address" else peers
            # In these short loops the look-ups of a batch follow each other directly, so that their
            # waits for memory overlap: with 100,000 servers an announcement takes only 1.11 times
            # as long as with 100
            fingerprints = list(map(hash, zip(packets, senders)))
            servers = list(map(self.registry.by_fingerprint.get, fingerprints))
            for server in servers:
                if server is not None:
                    server.last_seen = now

        allow = self.limiter.allow
        record_unproven = self.registry.record_unproven
        answers = []
        for packet, peer, source, reply_address, server in zip(
                packets, peers, sources, reply_addresses, servers):
            if not allow(source, now):
                tally.limited += 1
                continue
            if server is not None:
                answer = server.repeat_answer
                if answer:
                    answers.append((answer, reply_address))
                continue
            try:
                for reply, recipient in self.protocol.datagram(packet, peer, now):
                    if recipient is peer:
                        answers.append((reply, reply_address))
                    else:
                        self.send([(reply, recipient)])
            except Limited:
                tally.limited += 1
            except Refused as refused:
                record_unproven(source, self.protocol.game, refused.port, refused.outcome, now,
                                str(refused))
            except Exception as error:
                if isinstance(error, Malformed) and self.protocol.game:
                    record_unproven(source, self.protocol.game, 0, "bad packet", now, str(error))
                log_failure(error, tally, endpoint_text(*peer[:2]), self.name, packet)

        if answers and vector:
            vector.send(self.sock, answers, tally)
        else:
            self.send(answers)

    def receive(self):
        """Do what MessageVector.receive() does, one by one. A reply address is a peer here."""
        packets, peers = [], []
        for _ in range(DRAIN_DATAGRAMS):
            try:
                # With a shorter buffer Windows would drop a long datagram instead of cutting it off
                packet, peer = self.sock.recvfrom(65536)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                # Windows reports here that an earlier answer of ours has met a closed port
                continue
            packets.append(packet[:self.protocol.datagram_bytes])
            peers.append(peer)
        return packets, peers, peers

    def send(self, answers):
        """Send a list of (data, peer) pairs. One that cannot be sent is only counted, because its
        peer will ask again."""
        for data, peer in answers:
            try:
                self.tally.bytes_out += self.sock.sendto(data, peer)
                self.tally.sent += 1
            except (OSError, OverflowError):
                # There is no buffer or no route, or the peer's port is closed or not a valid one
                self.tally.unsent += 1


# --- Connections ---------------------------------------------------------------------------------

NO_EVENTS = 0                       # beside the selector's EVENT_READ and EVENT_WRITE


class TcpConnection:
    """A TCP connection and its session. The memory that it takes and the time for which a slow peer
    can hold it up are bounded.

    It waits for one thing at a time: for input, for room to write `unsent`, or for the session's
    job in the disk thread. It reads nothing while output is waiting or being made, so neither input
    nor output piles up.

    When the session is done and its output is written, the connection lingers: we close our side
    and discard what the peer still sends. Closing a socket with unread input would send a reset,
    and the peer could lose the end of the answer."""

    is_closed = False
    unsent: Any = b""                   # output for which the socket had no room yet
    # When to disconnect a peer that reads too slowly, or that does not close its side
    deadline = math.inf
    linger_bytes = LINGER_BYTES         # how many bytes of further input we still discard
    events = NO_EVENTS                  # what the selector waits for; NO_EVENTS during a job
    # What the session is asked before anything more is read: its method and the arguments; or ()
    due: Tuple[Any, ...] = ()

    def __init__(self, listener, sock, address, session):
        """`listener` is the TcpListener that has accepted the non-blocking `sock`, a socket or a
        TlsSocket, from `address`."""
        self.listener = listener
        self.program = listener.program
        self.tally = listener.tally
        self.sock = sock
        self.address = address
        self.session = session
        self.wait_for(selectors.EVENT_READ)

    @functools.cached_property
    def turn_address(self):
        """The address whose turns it takes. A connection that is exempt takes its own turns."""
        is_exempt = self.program.rules.exempts(self.address)
        return "connection %d" % id(self) if is_exempt else self.address

    def wait_for(self, events):
        """Have the selector wait for EVENT_READ, EVENT_WRITE or NO_EVENTS from now on."""
        if events == self.events:
            return
        selector = self.program.selector
        if self.events != NO_EVENTS:
            selector.unregister(self.sock)
        if events != NO_EVENTS:
            selector.register(self.sock, events, self.on_ready)
        self.events = events

    def on_ready(self, now):
        self.call_in_turn(self.take_turn, now)

    def call_in_turn(self, method, now):
        """Call this method at once, or let it wait if others do, or if this round has been long."""
        # `things` itself, because this is done for each request
        if self.program.turns.things or time.monotonic() >= now + TURNS_S:
            self.wait_for_turn(method)
        else:
            method(now)

    def wait_for_turn(self, method):
        """Have this method called with the time. If it waits already, it keeps its place."""
        if self.program.turns.get(method) is None:
            self.program.turns.add(self.turn_address, method, method)

    def take_turn(self, now):
        """Do one thing: write what waits, or answer one message, or read."""
        if self.events == selectors.EVENT_WRITE:
            self.on_writable(now)
        elif self.due:
            due, self.due = self.due, ()
            self.answer(now, *due)
        elif self.events == selectors.EVENT_READ:
            self.on_readable(now)

    def on_readable(self, now):
        try:
            data = self.sock.recv(RECV_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except NotTls:
            self.sock = self.sock.sock
            self.session = self.listener.protocol.plain_refusal(self.address, now)
            self.answer(now, self.session.opened)
            return
        except (OSError, Malformed) as error:
            self.tally.malformed += isinstance(error, Malformed)
            self.close(now)
            return
        if self.session.done:
            # The connection lingers: these bytes are dropped, but a peer must not send for ever
            self.linger_bytes -= len(data)
            if not data or self.linger_bytes < 0:
                self.close(now)
        elif data:
            self.tally.received += 1
            self.tally.bytes_in += len(data)
            self.program.connections.move_to_end(self)
            self.answer(now, self.session.receive, data)
        else:
            self.answer(now, self.session.ended)
            if not self.unsent:
                self.close(now)
            # If output waits, the end of input is read once more after it has been written

    def answer(self, now, session_method, *arguments):
        """Call `session_method(*arguments, now)` and write the bytes that it returns. A further
        message in the session's buffer waits for the next turn. An exception ends the session."""
        session = self.session
        data = b""
        try:
            data = session_method(*arguments, now)
            if data:
                self.write(data, now)
        except Limited:
            self.tally.limited += 1
            session.done = True
        except Refused as refused:
            self.program.registry.record_outcome(
                self.address, session.game, refused.port, refused.outcome, now, str(refused))
            session.done = True
        except Exception as error:
            if isinstance(error, Malformed) and session.game:
                self.program.registry.record_outcome(
                    self.address, session.game, 0, "bad packet", now, str(error))
            log_failure(error, self.tally, self.address, self.listener.name, session.buffer)
            session.done = True
        if self.is_closed:
            return
        if self.unsent:
            self.wait_for(selectors.EVENT_WRITE)
        elif session.done:
            self.linger(now)
        elif session.job is None:
            self.wait_for(selectors.EVENT_READ)
            if session.unfinished or (data and session.buffer):
                self.due = session.receive, b""
                self.wait_for_turn(self.take_turn)
        elif self.events != NO_EVENTS:
            # The session has just asked for a job. Nothing is read or written until it has finished
            self.wait_for(NO_EVENTS)
            self.program.disk.submit(session.job, self.resume, WORKER_JOBS, self.turn_address)

    def write(self, data, now):
        """Write `data`, and the session's `body` after it. Return True if all of it was written.

        Return False if the socket had too little room, in which case the remainder is kept in
        `unsent`, or if the connection was broken and is now closed."""
        try:
            sent = self.sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.close(now)
            return False
        self.tally.bytes_out += sent
        if sent == len(data):
            if self.unsent:
                self.program.unread.remove(self)
            self.unsent = b""
            self.deadline = math.inf
            if self.session.body:
                body, self.session.body = self.session.body, b""
                return self.write(body, now)
            self.tally.sent += 1
            return True
        waited = self.unsent
        # A view and not a copy: many connections may wait to send the same large answer
        self.unsent = memoryview(data)[sent:]
        if not waited:
            self.deadline = now + OUTPUT_TOTAL_S
            self.program.unread.add(self, now)
        elif sent:
            # A peer that reads slowly is not idle
            self.program.connections.move_to_end(self)
        return False

    def on_writable(self, now):
        if self.write(self.unsent, now):
            if self.session.done:
                self.linger(now)
            else:
                self.answer(now, self.session.receive, b"")

    def linger(self, now):
        """Close our side of the connection, and read until the peer closes the other."""
        self.wait_for(selectors.EVENT_READ)
        self.deadline = now + LINGER_S
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self.close(now)

    def resume(self, result, now):
        # Otherwise it has timed out meanwhile, and has answered 503 already
        if self.events == NO_EVENTS and not self.is_closed:
            self.wait_for(selectors.EVENT_READ)
            self.answer(now, self.session.resume, result)

    def tick(self, now):
        """Close the connection after its deadline. Otherwise let the session send a greeting that
        is due, or time out. This is called every LOOK_S."""
        if now >= self.deadline:
            self.close(now)
        elif not (self.is_closed or self.due or self.unsent or self.session.done):
            self.answer(now, self.session.tick)

    def close(self, now):
        if self.is_closed:
            return
        self.is_closed = True
        self.due = ()
        self.program.turns.pop(self.take_turn)
        self.program.turns.pop(self.tick)
        if self.unsent:
            self.program.unread.remove(self)
        # The selector has to forget the socket while it still has a file descriptor
        self.wait_for(NO_EVENTS)
        self.sock.close()
        del self.program.connections[self]
        self.program.connections_by_source.take(self.address, -1)
        self.program.guarded(self.session.closed, now)


class NotTls(Exception):
    """Raised for a client that does not begin with a TLS handshake."""


class TlsSocket:
    """The TLS layer of an accepted, non-blocking socket, with those methods of a socket that
    TcpConnection uses. It makes the handshake while it reads.

    OpenSSL does not read from the socket itself, because it would read KeyUpdates, in 14 us each,
    for as long as the peer sends them. It gets READ_BYTES at a time, and a peer that sends too
    many bytes without data is closed. Wherever the peer has to be waited for, BlockingIOError is
    raised, as by a socket. Bytes that are not TLS are Malformed."""

    READ_BYTES = WRITE_BYTES = 16384        # are decrypted or encrypted at once
    # A connection may receive so many bytes without data, such as those of the handshake, and so
    # many more for each byte of data. A record with one byte of data has 23 to 30 bytes
    SPARE_BYTES = 32768
    SPARE_PER_BYTE = 32

    def __init__(self, sock, context):
        self.sock = sock
        self.context = context          # an ssl.SSLContext with a certificate
        self.fileno = sock.fileno
        self.tls: Any = None            # an ssl.SSLObject, once the peer has sent something
        self.received = ssl.MemoryBIO()         # what OpenSSL has not decrypted yet
        self.encrypted = ssl.MemoryBIO()        # what OpenSSL has encrypted
        self.unsent = b""               # encrypted bytes for which the socket had no room yet
        self.unsent_data_bytes = 0      # the bytes of data in it, which send() has not counted yet
        self.spare_bytes = self.SPARE_BYTES

    def recv(self, max_bytes):
        """Return at most READ_BYTES of data, whatever `max_bytes` is, or b"" if the peer has ended
        its side. Raise NotTls if it does not begin with a handshake."""
        raw = self.sock.recv(self.READ_BYTES)
        if not raw:
            return b""
        if self.tls is None:
            if not raw.startswith(b"\x16"):         # the type of a handshake's record
                raise NotTls
            self.tls = self.context.wrap_bio(self.received, self.encrypted, server_side=True)
        self.received.write(raw)
        try:
            data = self.decrypt()
        except (ssl.SSLError, RuntimeError) as error:       # PyPy's, if OpenSSL has no text for it
            raise Malformed("TLS: %s" % error) from None
        finally:
            is_all_sent = self.flush()      # the next part of the handshake, or an alert
        self.spare_bytes += self.SPARE_PER_BYTE * len(data) - len(raw)
        self.spare_bytes = min(self.spare_bytes, self.SPARE_BYTES)
        if self.spare_bytes < 0 or not is_all_sent:
            raise Malformed("TLS: too many bytes without data, or a peer that does not read")
        if not data:
            raise BlockingIOError
        return data

    def decrypt(self):
        """Return the data of all records that have come as a whole."""
        data = b""
        with contextlib.suppress(ssl.SSLWantReadError):
            # To look first is cheaper than an exception for each request
            while self.received.pending or self.tls.pending():
                piece = self.tls.read(self.READ_BYTES)
                if not piece:           # a close_notify
                    # The selector now reports the end, and the next call of recv() returns it
                    self.sock.shutdown(socket.SHUT_RD)
                    break
                data += piece
        return data

    def send(self, data):
        """Send as much of the data as the socket has room for, and return the number of bytes. If
        some could not be sent, the next call has to begin with them. Raise OSError before the end
        of the handshake."""
        if self.tls is None:
            raise ConnectionError("nothing has come yet")
        if not self.flush():
            return 0
        sent = self.unsent_data_bytes
        self.unsent_data_bytes = 0
        while sent < len(data):
            try:
                written = self.tls.write(data[sent:sent + self.WRITE_BYTES])
            except RuntimeError as error:       # PyPy's
                raise OSError(str(error)) from None
            if not self.flush():
                self.unsent_data_bytes = written
                break
            sent += written
        return sent

    def flush(self):
        """Send what OpenSSL has encrypted. Return False if the socket has no room for all of it."""
        self.unsent += self.encrypted.read()
        if self.unsent:
            with contextlib.suppress(BlockingIOError, InterruptedError):
                sent = self.sock.send(self.unsent)
                self.unsent = self.unsent[sent:]
        return not self.unsent

    def shutdown(self, how):
        self.notify_close()
        self.sock.shutdown(how)

    def close(self):
        self.notify_close()
        self.sock.close()

    def notify_close(self):
        """Send a close_notify, if there is room for it. The peer need not answer it."""
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            if self.tls is not None:
                self.tls.unwrap()
        with contextlib.suppress(OSError):
            self.flush()


class UnreadOutput:
    """The answers that slow readers have not taken yet. At most OUTPUT_BYTES wait.

    Connections that wait for the same answer share its bytes, which are counted once. If there are
    too many, the source or IPv6 site with the most loses its connections. The bytes of an answer
    are divided among the sources that wait for it, however many connections each of them has."""

    def __init__(self):
        self.answers = {}               # what each connection waits for, by connection
        self.readers = collections.Counter()        # how many wait for an answer, by its id()
        self.total_bytes = 0

    def add(self, connection, now):
        """Count what a connection has to write from now on, and close others if it is too much."""
        self.answers[connection] = connection.unsent.obj, connection.session.body
        for answer in self.answers[connection]:
            if not self.readers[id(answer)]:
                self.total_bytes += len(answer)
            self.readers[id(answer)] += 1
        if self.total_bytes <= OUTPUT_BYTES:
            return
        lengths = {}
        sources = collections.defaultdict(set)      # that wait for an answer, by its id()
        for waiting, answers in self.answers.items():
            for answer in answers:
                lengths[id(answer)] = len(answer)
                sources[id(answer)].add(site_of(waiting.turn_address))
        shares = collections.defaultdict(float)
        for answer_id, sharing in sources.items():
            for source in sharing:
                shares[source] += lengths[answer_id] / len(sharing)

        def of_its_site(waiting):
            return shares[site_of(waiting.turn_address)]

        for waiting in sorted(self.answers, key=of_its_site, reverse=True):
            if self.total_bytes > OUTPUT_BYTES:
                waiting.tally.limited += 1
                waiting.close(now)

    def remove(self, connection):
        for answer in self.answers.pop(connection, ()):
            self.readers[id(answer)] -= 1
            if not self.readers[id(answer)]:
                del self.readers[id(answer)]
                self.total_bytes -= len(answer)


class TcpListener:
    """A listening socket and its protocol. It accepts connections, within the limits."""

    is_paused = False                   # True until the next tick after descriptors ran out

    def __init__(self, program, name, sock, protocol, tally, uses_tls=False):
        self.program = program
        self.name = name                # the protocol's, for the log
        self.sock = sock
        self.protocol = protocol
        self.tally = tally
        self.uses_tls = uses_tls

    def on_readable(self, now):
        health = self.program.health
        for _ in range(64):                     # then the others have their turn
            try:
                sock, peer = self.sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in OUT_OF_DESCRIPTORS:
                    report(health, "descriptors", error.strerror)
                    # Waiting connections stay in the backlog until the next tick. The selector
                    # would report them again at once, in an endless loop
                    self.program.selector.unregister(self.sock)
                    self.is_paused = True
                    return
                # The peer has closed this connection already
                continue
            if not peer:
                # This is how macOS reports a connection that the peer has closed already
                sock.close()
                continue
            health.pop("descriptors", None)
            address, *_ = peer
            if ":" in address:
                address = canonical_address(address)
            self.accept(sock, address, now)

    def tick(self, now):
        if self.is_paused:
            self.program.selector.register(self.sock, selectors.EVENT_READ, self.on_readable)
            self.is_paused = False

    def accept(self, sock, address, now):
        """Start a session on a connection that was just accepted. One over a limit gets the
        protocol's refusal as its session, which says so and ends. A blocked address gets no answer.
        """
        program, protocol = self.program, self.protocol
        is_refused = self.is_over_limit(address, now)           # as a blocked address always is
        if is_refused:
            self.tally.limited += 1
            # By TLS, a refusal in words would cost a handshake, which takes longer than most
            # requests
            most = program.settings["limits.connections_open"] + REFUSED_OPEN
            is_flooding = program.connections_by_source.full(address, most)
            if self.uses_tls or is_flooding or address in program.rules.blocked:
                sock.close()
                return
            session = protocol.refusal(address, now)
        else:
            self.tally.connections += 1
            session = protocol.session(address, now)

        max_connections = min(program.settings["limits.connections_total"],
                              program.max_descriptors - DESCRIPTORS_KEPT)
        if len(program.connections) >= max(1, max_connections):
            self.close_least_needed(now)
        sock.setblocking(False)
        if self.uses_tls:
            sock = TlsSocket(sock, program.certificate.context)
            session.encrypted()
        connection = TcpConnection(self, sock, address, session)
        program.connections[connection] = None
        program.connections_by_source.take(address)
        if is_refused or protocol.speaks_first:
            connection.due = (session.opened,)
        connection.on_ready(now)            # the client's request has usually arrived already

    def is_over_limit(self, address, now):
        """Has this source too many open connections, or opens it them too fast? The call counts as
        an attempt to open one."""
        program = self.program
        rules = program.rules
        max_open = program.settings["limits.connections_open"]
        has_too_many = program.connections_by_source.full(address, max_open)
        if has_too_many and not rules.exempts(address):
            return True
        if not rules.connection_limiter.allow(address, now):
            return True
        # A handshake is as dear as half a request
        return self.uses_tls and not rules.request_limiter.allow(address, now, 0.5)

    def close_least_needed(self, now):
        """Close one connection, or a 64th of a long table, because each call looks at all of them.

        Those that have had their whole answer come first, then those of the sources that have the
        most, of these the one that has been idle for longest. Connections of game servers that
        publish themselves come last."""
        connections = self.program.connections    # the one idle for longest comes first
        shares = collections.Counter()
        ranks = {}
        for connection in reversed(connections):
            session = connection.session
            rank = -math.inf
            if session.done and not connection.unsent:
                rank = math.inf
            elif not session.kept:
                source = site_of(connection.turn_address)
                shares[source] += 1
                rank = shares[source]
            ranks[connection] = rank
        least_needed = sorted(connections, key=ranks.__getitem__, reverse=True)
        for connection in least_needed[:1 + len(connections) // 64]:
            connection.tally.limited += 1
            connection.close(now)


# --- The certificate for HTTPS -------------------------------------------------------------------

# The validity of a certificate in DER (RFC 5280, 4.1.2.5): two times, with two digits for the year
# (from 1950 to 2049) or with four. Python has no public function for a certificate of our own
VALIDITY = re.compile(rb"(?:\x17\x0D\d{12}Z|\x18\x0F\d{14}Z)"
                      rb"(?:\x17\x0D(\d{12})Z|\x18\x0F(\d{14})Z)")


class Certificate(NamedTuple):
    """A certificate with its key, ready for connections."""

    context: Any                        # an ssl.SSLContext
    expires: float                      # seconds since 1970


def load_certificate(settings):
    """Return the Certificate that the settings name.

    Raise SettingsError if they name none, or if its files cannot be used."""
    max_bytes = 1 << 20                 # a chain has some 10 kB
    with setting_file(settings, "http.certificate") as certificate_path:
        if not certificate_path:
            raise SettingsError("[http] https_ports needs a certificate; name its file in [http] "
                                "certificate")
        expires = certificate_expiry(read_file(certificate_path, max_bytes))
    key_setting = "http.key" if settings.file("http.key") else "http.certificate"
    with setting_file(settings, key_setting) as key_path:
        key = read_file(key_path, max_bytes)
        match = re.search(b"-----BEGIN ([A-Z ]*)PRIVATE KEY-----", key)
        if not match:
            raise ValueError("there is no private key in it")
        # The older form of an encrypted key has a header field for that
        if b"ENCRYPTED" in match.group() or b"Proc-Type: 4,ENCRYPTED" in key:
            raise ValueError("its key asks for a password; store it without one")
    with setting_file(settings, "http.certificate"):
        return Certificate(tls_context(certificate_path, key_path), expires)


def certificate_expiry(pem):
    """Return when the first certificate in a PEM file expires, in seconds since 1970.

    Raise ValueError if there is no certificate in it, or a damaged one."""
    _, _, after_begin = pem.partition(b"-----BEGIN CERTIFICATE-----")
    base64_text, end, _ = after_begin.partition(b"-----END CERTIFICATE-----")
    if not end:
        raise ValueError("there is no certificate in it")
    try:
        match = VALIDITY.search(base64.b64decode(base64_text))
        if not match:
            raise ValueError
        two_digit_year, four_digit_year = match.groups()
        century = b"19" if two_digit_year and two_digit_year >= b"50" else b"20"
        text = four_digit_year or century + two_digit_year
        expires = datetime.strptime(text.decode("ascii"), "%Y%m%d%H%M%S")
    except ValueError:
        raise ValueError("the certificate in it is damaged") from None
    return expires.replace(tzinfo=timezone.utc).timestamp()


def tls_context(certificate_path, key_path):
    """Return an ssl.SSLContext for a server with this certificate and key.

    Raise ValueError if they do not fit together or are damaged."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= getattr(ssl, "OP_NO_RENEGOTIATION", 0)       # older versions of PyPy lack it
    context.set_alpn_protocols(["http/1.1"])
    try:
        # With a password, OpenSSL does not ask for one at the terminal
        context.load_cert_chain(certificate_path, key_path, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError("the key in %s does not belong to it" % key_path) from None
        # OpenSSL does not say which of the two files is wrong
        raise ValueError("it, or the key in %s, cannot be used: %s"
                         % (key_path, error.reason or "damaged")) from None
    return context


# --- Threads -------------------------------------------------------------------------------------

class WorkerThread:
    """A thread that makes calls which may block, one after another. It starts with its first
    job."""

    def __init__(self, name, post):
        """`post` is MasterServer.post, through which the thread hands results to the event loop."""
        self.name = name
        self.post = post
        self.jobs = queue.SimpleQueue()
        self.thread: Optional[threading.Thread] = None
        self.strangers = Turns()        # jobs of strangers, as (job, on_result)
        self.has_stranger = False       # True while one of these jobs is in the thread

    def submit(self, job, on_result, max_waiting=math.inf, source=""):
        """Call `job()` in this thread, and then `on_result(result, now)` in the event loop.

        `result` is what the job returned, or the exception that it raised. If `max_waiting` jobs,
        or a stranger's, are waiting already, the job is not done, and the result is a RuntimeError.
        `source` is the stranger's address. Strangers take turns, and one of their jobs is in the
        thread at a time. So the program's own jobs wait for one of them at most."""
        waiting = len(self.strangers.keys_of(source)) if source else self.jobs.qsize()
        if waiting >= max_waiting:
            self.post(on_result, RuntimeError("too many others are waiting"))
        elif source:
            call = job, on_result
            self.strangers.add(source, call, call)
            self.serve_strangers()
        else:
            self.put(job, on_result)

    def serve_strangers(self):
        if self.has_stranger or not self.strangers:
            return
        job, on_result = self.strangers.next()

        def on_end(result, now):
            self.has_stranger = False
            self.serve_strangers()
            on_result(result, now)

        self.has_stranger = True
        self.put(job, on_end)

    def put(self, job, on_result):
        if self.thread is None:
            self.thread = threading.Thread(
                target=self.work, name="masterserver " + self.name, daemon=True)
            self.thread.start()
        self.jobs.put((job, on_result))

    def work(self):
        for job, on_result in iter(self.jobs.get, None):
            try:
                result = job()
            except Exception as error:
                result = error
            self.post(on_result, result)

    def stop(self, timeout):
        """Have the thread end after the jobs that are waiting, and wait `timeout` seconds for that.
        Return False if it is still busy then."""
        if self.thread is None:
            return True
        self.jobs.put(None)             # ends work()
        self.thread.join(timeout)
        return not self.thread.is_alive()


# --- The log ------------------------------------------------------------------------------------

LOG_FILE_BYTES = 10 << 20           # the size at which a log file is rotated
LOG_LINES = 1000                    # how many may wait for the thread that writes them
LOG_END_S = 1.0                     # how long the end of the program waits for these to be written


def complain(text):
    """Print a line to standard error, if possible."""
    with contextlib.suppress(OSError):
        print("masterserver.py:", text, file=sys.stderr, flush=True)


class LogFile(logging.handlers.RotatingFileHandler):
    """The log file. The log's thread alone opens, writes and closes it.

    trouble         why the last line could not be written, "" if it was
    is_outdated     is set to have the next line open the file again, as logrotate expects"""

    failure = trouble = ""
    is_outdated = False

    def _open(self):
        check_is_file(self.baseFilename)        # opening a pipe could take for ever
        return super()._open()

    def emit(self, record):
        if self.is_outdated:
            self.is_outdated = False
            with contextlib.suppress(OSError):      # there may be no room for the last line
                self.close()
        self.failure = ""
        super().emit(record)                        # calls handleError() if that fails
        if self.failure and not self.trouble:
            complain("the log cannot be written: " + self.failure)
        self.trouble = self.failure

    def handleError(self, record):
        _, error, _ = sys.exc_info()
        self.failure = clean(error_text(error), TEXT_CHARACTERS)

    def rotate(self, source, dest):
        # If the folder is not writable, or if another program has the file open on Windows, the
        # file just goes on growing
        with contextlib.suppress(OSError):
            super().rotate(source, dest)


def start_log(settings):
    """Begin to log to the file that the settings name, or else to the terminal.

    A thread writes the lines, so the event loop goes on even if the disk hangs, or if somebody
    selects text in the terminal. Return the LogFile, or None if it is the terminal. Raise
    StartError if the log file cannot be opened."""
    path = settings.file("server.log_file")
    log_file = None
    if path:
        try:
            # With the older files that are kept, a log takes 40 MB
            log_file = LogFile(path, "a", LOG_FILE_BYTES, 3, "utf-8")
        except (OSError, ValueError) as error:
            raise StartError("the log cannot be written; change [server] log_file: %s"
                             % clean(error_text(error), TEXT_CHARACTERS)) from None
    writer: logging.Handler = log_file or logging.StreamHandler()
    writer.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.raiseExceptions = False     # a terminal that is gone would cost a traceback a line
    lines: Any = queue.SimpleQueue()
    traceback_limiter = Limiter((1, 20))        # a fault must not fill the disk

    def has_room(record):
        """Return False for a line that is dropped."""
        if lines.qsize() >= LOG_LINES:
            return False
        all_tracebacks = ""             # one source for the limiter, because they share one limit
        return not record.exc_info or traceback_limiter.allow(all_tracebacks, time.monotonic())

    handler: Any = logging.handlers.QueueHandler(lines)
    handler.addFilter(has_room)
    handler.listener = logging.handlers.QueueListener(lines, writer)
    handler.listener.start()
    log.addHandler(handler)
    log.setLevel(settings["server.log_level"].upper())
    log.propagate = False
    return log_file


def end_log():
    """Stop the logging after the lines that are waiting have been written, or after LOG_END_S."""
    for handler in log.handlers[:]:
        listener = getattr(handler, "listener", None)
        if listener:
            log.removeHandler(handler)
            # stop() waits for all lines, without a timeout; so it runs in a thread
            stopper = threading.Thread(target=listener.stop, daemon=True)
            stopper.start()
            stopper.join(LOG_END_S)


# --- Host names ----------------------------------------------------------------------------------

class HostNames:
    """Looks host names up in a thread, one after another, because each can take half a minute.

    A stranger can delay the names in the ini by one look-up at most. Each source may have only a
    few look-ups at a time, and the sources take turns, so none can keep out the others. Game
    servers on one machine that have the same name and start together share one look-up."""

    def __init__(self, post):
        self.worker = WorkerThread("names", post)
        # The callers that wait for each look-up, by (source, host, like)
        self.waiters = {}
        self.shares = Shares()                          # strangers' look-ups that have not ended

    def resolve(self, host, done, source, like=""):
        """Look up a host name, and later call `done(address, now)`, with "" if it has no address.

        `source` is the address that has sent the name, or "" for a name in the ini, for which there
        are no limits. If the host has several addresses, `like` is preferred, and after that one of
        the same family. Raise Refused if this source, or all strangers together, have too many
        look-ups."""
        key = source, host, like
        waiters = self.waiters.get(key, [])
        if source and len(waiters) >= LOOKUP_WAITERS:
            raise Refused("busy", "%d servers of this source wait for the host name already; try "
                                  "again in a minute" % LOOKUP_WAITERS)
        if source and not waiters:
            # Of each source two, of an IPv6 /48 four, as anybody can have one
            if self.shares.full(source, 2, site_sources=2):
                raise Refused("busy", "too many host names that this source has named are being "
                                      "looked up; try again in a minute")
            if self.shares.total >= LOOKUPS:
                raise Refused("busy", "too many host names are being looked up; try again in a "
                                      "minute")
            self.shares.take(source)
        waiters.append(done)
        if key not in self.waiters:
            self.waiters[key] = waiters
            self.worker.submit(functools.partial(resolve_host, host, like),
                               functools.partial(self.on_result, key), source=source)

    def on_result(self, key, result, now):
        """Pass the result of a look-up, an address or an exception, to its waiters."""
        source, _, _ = key
        if source:
            self.shares.take(source, -1)
        address = result if isinstance(result, str) else ""
        for done in self.waiters.pop(key):
            done(address, now)


# --- Webhooks ------------------------------------------------------------------------------------

WEBHOOK_S = 10.0                    # the timeout of one attempt
WEBHOOK_TRIES = 3                   # how many attempts a message gets
WEBHOOK_RETRY_S = 5.0               # the pause between attempts, unless the answer names another
NEWS_PER_MINUTE = 10                # nobody reads more, and receivers have limits
# How many messages a source gets at once, and again within [notify] again_after. It can list 32
# servers, and claim any number of players for each
NEWS_PER_SOURCE = 2


class AnyStatus(urllib.request.HTTPErrorProcessor):
    """Returns every response, whatever its status. Without it urllib would follow redirects, but
    news must not go to any other host."""

    def http_response(self, request, response):
        return response

    https_response = http_response


def post_url(url, media_type, body):
    """POST a body to a URL, in one attempt. Return the status and the value of Retry-After as text.

    If there was no response, the status is the type of the exception. Its message is never
    returned, because it may contain the URL, which is a secret. Retry-After may be ""."""
    headers = {"Content-Type": media_type, "User-Agent": "masterserver/" + __version__}
    try:
        request = urllib.request.Request(url, body, headers)
        opener = urllib.request.build_opener(AnyStatus)
        with opener.open(request, timeout=WEBHOOK_S) as response:
            return str(response.status), response.headers.get("Retry-After", "")
    except Exception as error:
        # urllib wraps most exceptions in a URLError, whose `reason` says more
        cause = getattr(error, "reason", error)
        return type(cause).__name__, ""


class Webhook(WorkerThread):
    """A URL to which news is sent. It has a thread of its own, so one that hangs does not delay
    another."""

    is_failing = False
    is_dismissed = False

    def __init__(self, name, line):
        """`line` is "FORMAT URL"."""
        # Nothing happens in the event loop after a delivery
        super().__init__("webhook " + name, post=lambda *result: None)
        self.line = line
        self.format, self.url = line.split()

    def dismiss(self):
        """Send nothing more, not even the messages that are waiting."""
        self.is_dismissed = True
        self.stop(0.0)

    def deliver(self, until, media_type, body):
        """Send one message, in at most WEBHOOK_TRIES attempts, before the time `until`.

        The log says when this webhook begins to fail and when it works again."""
        attempts = 0
        while not self.is_dismissed and time.monotonic() < until:
            status, retry_after = post_url(self.url, media_type, body)
            is_failing = not status.startswith("2")
            if is_failing != self.is_failing:
                self.is_failing = is_failing
                log.warning("%s answers: %s", self.name, status)
            if not is_failing:
                return
            if status != "429":         # which only asks for a pause
                attempts += 1
            pause_s = WEBHOOK_RETRY_S
            if re.fullmatch("[1-9][0-9]{0,3}", retry_after):
                pause_s = int(retry_after)
            # Give up now if no further attempt can follow, so that the next message need not wait
            if attempts >= WEBHOOK_TRIES or time.monotonic() + pause_s > until:
                return
            time.sleep(pause_s)


class News:
    """Sends a message to the webhooks when the players on a server reach the number in the ini.

    It follows the servers of all masters by their identity, and remembers which of them had fewer
    players. So a server may move from one master to another without a message too few or too many.
    Every master follows all servers and keeps the same record of messages, but only one master
    sends each of them: if there is a Cluster, it replaces `sender`, `has_sent` and `follows`.

    The event loop treats it like a protocol: it is given new settings, the time and `epoch`."""

    now = 0.0                                       # the time of the last tick
    epoch = 0.0                                     # wall clock minus monotonic clock
    # The name of the master that sends what is due now, "" for this one
    sender = staticmethod(lambda now: "")
    # Has another master sent the message about a server that was due at a time? None: not known yet
    has_sent: Any = staticmethod(lambda sender, server, due_at, now: True)
    # Has this master heard the server without a break, itself or through another master?
    follows = staticmethod(lambda server, now: True)

    def __init__(self, settings, registry, gauges):
        self.gauges = gauges                        # figures for /metrics, by name
        self.registry = registry
        self.hooks = {}                             # Webhooks by name
        self.below_threshold = set()                # keys of servers that had fewer players
        self.sent_at = collections.OrderedDict()    # when the last message about a server was sent
        # Messages of which we do not know yet whether another master has sent them: the arguments
        # of has_sent(), and a function that sends the message
        self.held = []
        self.all_limiter = Limiter((NEWS_PER_MINUTE / MINUTE, NEWS_PER_MINUTE))
        # Keys of servers whose messages wait for that: for a minute at most, as there are no more
        self.waiting = Turns(NEWS_PER_MINUTE)
        gauges["news_dropped_total"] = 0
        self.read(settings)

    def read(self, settings):
        """Apply these settings. A webhook whose line in the ini has not changed keeps its waiting
        messages. The other old webhooks are dismissed."""
        self.settings = settings
        per_second = NEWS_PER_SOURCE / max(1.0, settings["notify.again_after"])
        self.source_limiter = Limiter((per_second, NEWS_PER_SOURCE), self.registry.rules.verdict)
        old_hooks = self.hooks
        self.hooks = {}
        for name, line in settings["webhooks"].items():
            hook = old_hooks.get(name)
            if hook is None or hook.line != line:
                hook = Webhook(name, line)
            self.hooks[name] = hook
        for hook in old_hooks.values():
            if hook not in self.hooks.values():
                hook.dismiss()

    def tick(self, now):
        self.now = now
        held, self.held = self.held, []
        for *message, send in held:
            has_sent = self.has_sent(*message, now)
            if has_sent is None:
                self.held.append((*message, send))
            elif not has_sent and not self.sender(now):
                send()
        self.publish_waiting()

    def note(self, event, server):
        """Remember a server that has fewer players than [notify] players, and publish a message
        when it has so many. `event` is "listed", "changed" or "gone" in the last second."""
        key = server.key
        if event == "gone":
            # Another master may have heard it too. Then it was listed again at once
            if self.registry.get(*key) is None:
                self.below_threshold.discard(key)
            return
        if not server.confirmed or not server.responding:
            # The server may come back with many players, but that is not news
            self.below_threshold.discard(key)
            return
        room = ROOMS.get(server.room)
        if room and not room.knows_players(server):
            return
        if server.players < self.settings["notify.players"]:
            self.below_threshold.add(key)
        elif key in self.below_threshold:
            self.below_threshold.remove(key)
            if self.is_news(server):
                if self.waiting.add(server.source, key, key) is not None:
                    self.gauges["news_dropped_total"] += 1
                self.publish_waiting()

    def is_news(self, server):
        """Return whether there is a message about this server, which has just become popular
        enough."""
        settings, now = self.settings, self.now
        games = settings["notify.games"]
        if not self.hooks or (games and server.game not in games):
            return False
        if settings["notify.official_only"] and not server.official:
            return False
        # If this master could not hear the server's own master, that one has sent the message
        if not self.follows(server, now):
            return False
        never = -math.inf
        if now - self.sent_at.get(server.key, never) < settings["notify.again_after"]:
            return False
        # Otherwise a stranger could list many servers with invented players, and fill the channel
        return self.source_limiter.allow(server.source, now)

    def publish_waiting(self):
        """Publish NEWS_PER_MINUTE of the messages that wait. Their sources take turns."""
        while self.waiting and self.all_limiter.allow("", self.now):
            key = self.waiting.next()
            server = self.registry.get(*key)
            # The players may have left meanwhile
            if server is not None and key not in self.below_threshold:
                self.publish(server)

    def publish(self, server):
        """Record a message about this server, and queue it for every webhook if it is for this
        master to send it."""
        now = self.now
        self.sent_at[server.key] = now
        self.sent_at.move_to_end(server.key)
        if len(self.sent_at) > KNOWN_SERVERS:
            self.sent_at.popitem(last=False)
        # A message that is not delivered by then is dropped: the players may have left again
        until = time.monotonic() + 2 * MINUTE
        sender = self.sender(now)
        entry = server_json(server)
        json_entry = with_times(entry, server, self.epoch, self.registry.master)
        titles = {**GAME_TITLES, **self.settings["games"]}
        for hook in self.hooks.values():
            media_type, body = news_message(
                hook.format, server, titles, self.settings, json_entry)
            delivery = functools.partial(hook.deliver, until, media_type, body)
            send = functools.partial(
                hook.submit, delivery, on_result=None, max_waiting=WORKER_JOBS)
            if sender:
                self.held.append((sender, server, now, send))
            else:
                send()


# --- What is asked of the system -----------------------------------------------------------------

def file_stamps(settings):
    """Return the state of the ini and of the files that it names and that are read again.

    It is a list with a (path, modification time, change time, size) of each file that exists. The
    change time shows that the rights to read a file have changed."""
    stamps = []
    names = (*READ_FILES, "http.certificate", "http.key", "http.countries")
    for path in (settings.path, *map(settings.file, names)):
        with contextlib.suppress(OSError):
            status = os.stat(path)
            stamps.append((path, status.st_mtime_ns, status.st_ctime_ns, status.st_size))
    return stamps


def load_country_file(settings):
    """Return the CountryFile that the settings name, None if they name none. Raise SettingsError if
    it cannot be read. The file is read into memory: were it mapped, the program would crash when
    somebody copies a new file over it."""
    with setting_file(settings, "http.countries") as path:
        if not path:
            return None
        country_file = CountryFile(read_file(path, 200 << 20))      # one with all cities has 60 MB
        if not country_file.has_countries():
            trouble = country_file.trouble or "it is of the type " + country_file.type
            raise Malformed("no address in it has a country; " + trouble)
        return country_file


def country_file_text(country_file):
    """Return what a CountryFile says of itself: "DBIP-Country-Lite of 2026-11-01"."""
    return "%s of %s" % (country_file.type, utc_datetime(country_file.built).date())


def read_files(settings):
    """Read the files that the settings in READ_FILES name into `settings.contents`, as text or the
    logo as read_logo() returns it; "" for a setting that names none. Raise SettingsError if a file
    cannot be read or is not what it must be."""
    for name in READ_FILES:
        content: Any = ""
        with setting_file(settings, name) as path:
            if path and name == "http.logo":
                content = read_logo(read_file(path, LOGO_BYTES))
            elif path:
                content = read_file(path, 1 << 20).decode("utf-8-sig").replace("\r\n", "\n")
            if name == "http.template":
                check_list_template(content)
        settings.contents[name] = content


@contextlib.contextmanager
def setting_file(settings, name):
    """Give the path of the file that a setting names. What goes wrong with it in the block becomes
    a SettingsError that names the setting."""
    path = settings.file(name)
    try:
        yield path
    except (Malformed, OSError, ValueError) as error:
        section, key = name.split(".")
        trouble = getattr(error, "strerror", None) or error_text(error)
        raise SettingsError("[%s] %s = %s: %s" % (section, key, path, trouble)) from None


def read_file(path, max_bytes):
    """Return the bytes of a file. Raise OSError if it cannot be read, and ValueError if it is no
    plain file or has more than `max_bytes`."""
    check_is_file(path, max_bytes)
    with open(path, "rb") as file:
        return file.read(max_bytes)


def adopt_settings(settings, new_settings):
    """Copy from `new_settings` into `settings` what has changed and may change while the program
    runs, also the contents of files. Log for each other change that it needs a restart. Return the
    names of the settings that were copied, as they stand in the ini: "[http] title"."""
    changed_names = []
    for setting in SETTINGS.values():
        name = setting.name
        is_same_file = settings.contents.get(name) == new_settings.contents.get(name)
        if settings[name] == new_settings[name] and is_same_file:
            continue
        if setting.live:
            changed_names.append(" ".join(filter(None, ["[%s]" % setting.section, setting.key])))
            settings.values[name] = new_settings[name]
        else:
            log.warning("[%s] %s has changed; that needs a restart", setting.section, setting.key)
    settings.contents = new_settings.contents
    settings.found = new_settings.found
    return changed_names


def descriptor_limit(raise_to=0):
    """Return the number of files and sockets that this process may have open. If it is below
    `raise_to`, raise it first, as far as the system allows."""
    if WINDOWS:
        return 512                      # select() of Python on Windows takes no more sockets
    limit = 256                         # macOS's, if the system does not tell it
    # A sandbox may forbid to read the limit or to raise it. The limit then stays as it was
    with contextlib.suppress(OSError, ValueError):
        limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        new_limit = min(raise_to, hard_limit)
        if limit < new_limit:
            resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard_limit))
            limit = new_limit
    return limit


DOCUMENTATION_ADDRESS = "192.0.2.1"     # reserved by RFC 5737; stands for any host on the internet
DOCUMENTATION_ADDRESS_IPV6 = "2001:db8::1"      # reserved by RFC 3849


def own_address(destination=DOCUMENTATION_ADDRESS):
    """Return the address from which this machine sends to a destination, or "" if there is no route
    to it. By default the destination is the internet."""
    family = socket.AF_INET6 if ":" in destination else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            # This makes the system choose the address, but does not send anything
            sock.connect((destination, 9))      # any port would do
            address, *_ = sock.getsockname()
            return address
    except OSError:
        return ""


def resolve_host(host, like=""):
    """Look up a host name and return one of its addresses.

    If there are several, prefer `like`, and after that the first one of the same family (IPv4 or
    IPv6) as `like`. Raise OSError if the host is not found."""
    addresses = host_addresses(host)
    if like in addresses:
        return like
    same_family = [address for address in addresses if (":" in address) == (":" in like)]
    first_address, *_ = same_family or addresses
    return first_address


def host_addresses(host):
    """Look up a host and return its addresses, IPv4 first. If this machine has a route to some of
    them, return only those. Raise OSError if the host is not found."""
    addresses = []
    # With a socket type the system returns each address once, and not once for every type
    for _, _, _, _, sockaddr in socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM):
        address, *_ = sockaddr
        addresses.append(canonical_address(str(address)))
    # A dict drops what the hosts file or the name server has twice, and keeps the order
    addresses = sorted(dict.fromkeys(addresses), key=lambda address: ":" in address)
    reachable_addresses = [address for address in addresses if own_address(address)]
    return reachable_addresses or addresses


# Options that accepted connections inherit. Writes are sent at once. A dead peer is found after two
# minutes, also while sent data is unacknowledged (TCP_USER_TIMEOUT, in milliseconds). The default
# send buffer, megabytes, would hide a slow reader. macOS has other names for some, and Windows
# lacks them
TCP_OPTIONS = (("TCP_NODELAY", 1), ("SO_KEEPALIVE", 1), ("SO_SNDBUF", 1 << 18),
               ("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4),
               ("TCP_USER_TIMEOUT", 120_000))
# Ever larger receive buffers are requested; the largest that the system grants stays in force. 8 MB
# hold 20,000 announcements, each of which takes about 800 bytes
UDP_OPTIONS = [("SO_RCVBUF", (8 << 20) >> halvings) for halvings in (5, 3, 2, 1, 0)]


def bound_socket(family, transport, address, port):
    """Return a non-blocking socket that is bound to an address and a port; port 0 means any free
    one. `transport` is "udp" or "tcp"; a TCP socket is listening already. Raise OSError if the
    address cannot be bound."""
    is_tcp = transport == "tcp"
    sock = socket.socket(family, socket.SOCK_STREAM if is_tcp else socket.SOCK_DGRAM)
    try:
        if family == socket.AF_INET6:
            # IPv4 gets a socket of its own
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if WINDOWS:
            # SO_REUSEADDR would let another program take the port there. Only Windows has the
            # constant, so type checkers on other systems do not know it
            exclusive = getattr(socket, "SO_EXCLUSIVEADDRUSE")  # noqa: B009
            sock.setsockopt(socket.SOL_SOCKET, exclusive, 1)
        elif is_tcp:
            # Otherwise a restart would have to wait until old connections have timed out
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        for name, value in TCP_OPTIONS if is_tcp else UDP_OPTIONS:
            level = socket.IPPROTO_TCP if name.startswith("TCP") else socket.SOL_SOCKET
            # This system may lack the option or refuse it
            with contextlib.suppress(AttributeError, OSError):
                sock.setsockopt(level, getattr(socket, name), value)
        if is_tcp:
            sock.listen(1024)           # half a second of 2,000 connections a second may wait
        sock.setblocking(False)
        return sock
    except BaseException:
        sock.close()
        raise


# --- Several masters, one list -------------------------------------------------------------------
#
# Each master keeps the servers that it has heard in Redis or Valkey, the engine: not as a log but
# as a state, one record for each server, ordered by the number of its last change. The keys, with
# P for "PREFIX-state":
#
#     P:STATE     a sorted set of records, each with its number as the score; it expires after 60 s
#                     ["iceball","203.0.113.7",20737,expires,first seen,last seen,{…},confirmed]
#                     ["iceball","203.0.113.7",20737]         this server has left
#                     end                                     behind all others, see below
#     P:NAME      "STATE NUMBER FLOOR", and " news" if the master has webhooks; expires after 10 s
#     P           a set of the NAMEs; expires after 60 s
#
# Each connection of each process has a STATE of its own, so commands of an old connection that
# arrive late, or another process of the same name, cannot mix with it. NUMBER is the last one in
# use. FLOOR is the highest number of a record "has left" that has been removed by now: a reader
# that has not come so far cannot know of it, and begins again.
#
# `end` has a negative score until all servers are written, and then that of the last change. A
# reader that meets it has read everything, and servers that it has not met have left. If the engine
# has lost the set, there is no `end` to move, and the writer begins a new state.

CLUSTER_BATCH = 500         # records in an exchange; to apply them takes the event loop 15 ms
SENT_BYTES = 1 << 18        # are sent at once, and may take ENGINE_ANSWER_S
REPLY_BYTES = 2 * CLUSTER_BATCH * RECORD_BYTES      # a batch of the longest records, and more
REPLY_PART_BYTES = 50       # what Python needs for each part of a reply, besides the part's bytes
CLUSTER_MASTERS = 16        # other masters that are read; operators run two or three
CLUSTER_PACE_S = 0.3        # between two exchanges; a change reaches others in two of them
CLUSTER_RETRY_S = 0.5, 5.0  # the shortest and the longest pause before a connection
CLUSTER_NAME_S = 10         # a master whose name is not renewed for this long has stopped
CLUSTER_STATE_S = 60        # a state outlives the name, because who has a name must have a state
CLUSTER_MARGIN_S = 6.0      # after the name has expired, the next attempt comes up to 5 s later
LEFT_S = 600.0              # for how long a record says that a server has left
# Of the time between two exchanges so much counts at most as time without a master: if the link
# breaks again and again, little is known of the time between
CLUSTER_ABSENT_STEP_S = 1.0
NEWS_SENT_S = 3.0           # a master that lives for this long after a message was due has sent it
# A reply takes a millisecond; an engine that forks or saves to disk may need a second
ENGINE_ANSWER_S = 3.0


class EngineLink:
    """A connection to Redis or Valkey. It blocks, so only the cluster's thread and --check use it.

        > *2 $4 LLEN $1 x                                       each part ended by CRLF
        < +OK   -ERR unknown command   :1000   $5 hello   $-1   *2 $3 foo :7

    The protocol is RESP2: https://redis.io/docs/latest/develop/reference/protocol-spec/. Methods
    raise OSError when the connection fails, and Malformed or ValueError when the engine replies
    with an error or with something that is not RESP2."""

    file: Any = None

    def __init__(self, engine: EngineAddress):
        self.password = engine.password
        if engine.path:
            self.sock = socket.socket(socket.AF_UNIX)
        else:
            self.sock = socket.create_connection((engine.host, engine.port), ENGINE_ANSWER_S)
        try:
            self.sock.settimeout(ENGINE_ANSWER_S)
            if engine.path:
                self.sock.connect(engine.path)
            if engine.tls:
                self.start_tls(engine.host)
            self.file = self.sock.makefile("rb")
            if engine.password:
                user = [engine.user] if engine.user else []
                self.ask("AUTH", *user, engine.password)
            self.ask("SELECT", engine.database)
        except BaseException:
            self.close()
            raise

    def start_tls(self, host):
        context = ssl.create_default_context()
        try:
            self.sock = context.wrap_socket(self.sock, server_hostname=host)
        except OSError as error:
            raise OSError("rediss:// needs TLS at that port: %s" % error) from None

    def close(self):
        if self.file:
            self.file.close()           # an open file would keep the socket open
        self.sock.close()

    def ask(self, *command):
        reply, = self.ask_all([command])
        return reply

    def ask_all(self, commands):
        """Send commands, and return the reply to each.

        A command is its name and its arguments, as bytes, strings or numbers. A reply is bytes, a
        list of replies for an array, or b"" if the engine has no value ($-1). Of a text of more
        than RECORD_BYTES only the beginning is returned."""
        parts = []
        for command in commands:
            parts.append(b"*%d\r\n" % len(command))
            for argument in command:
                value = argument if isinstance(argument, bytes) else str(argument).encode()
                parts.append(b"$%d\r\n%s\r\n" % (len(value), value))
        data = b"".join(parts)
        for start in range(0, len(data), SENT_BYTES):
            self.sock.sendall(data[start:start + SENT_BYTES])
        replies = []
        for _ in commands:
            self.bytes_left = REPLY_BYTES
            replies.append(self.read_reply(arrays=2))
        return replies

    def read_reply(self, arrays):
        """Read one reply, which may have so many arrays in each other, and return it.

        Raise Malformed for an error reply, at the end of the connection, and for a reply that is
        not RESP2 or takes more than `bytes_left`."""
        line = self.file.readline(RECORD_BYTES)
        kind = line[:1]
        value = line[1:].rstrip()
        if kind == b"-":
            error = decode_utf8(value)
            if re.search("^MOVED|^CROSSSLOT|^CLUSTERDOWN|cluster mode", error):
                error = "this is a Redis Cluster, which cannot be used: " + error
            # The engine may repeat our password
            raise Malformed(error.replace(self.password, "...") if self.password else error)
        if kind in (b"+", b":"):                # a status or a number
            return value
        if kind != b"$" and (kind != b"*" or not arrays):
            raise Malformed("it has closed the connection, or is not Redis")
        length = int(value)
        # An array takes more, but so an absurd length is rejected at once
        self.bytes_left -= REPLY_PART_BYTES + max(length, 0)
        if self.bytes_left < 0:
            raise Malformed("a reply that is too long")
        if length < 0:
            return b""
        if kind == b"*":
            return [self.read_reply(arrays - 1) for _ in range(length)]
        text_and_end = self.file.read(length + len(b"\r\n"))
        return text_and_end[:min(length, RECORD_BYTES)]


class NameTaken(Exception):
    """Another process has this master's name."""


class Fetched(NamedTuple):
    """What an exchange has brought of another master."""

    state: str                          # state, number and floor stand in its name
    number: int
    floor: int
    has_webhooks: bool
    # Keys of servers that have changed, with the Servers; None for those that have left
    changes: Sequence[Tuple[Key, Optional[Server]]] = ()
    last_number: int = 0                # of these changes
    is_last: bool = False               # nothing follows, and nothing is missing before them


# STATE NUMBER FLOOR, and whether there are webhooks
MASTER_NAME_VALUE = re.compile(rb"([0-9a-f]{16}-[0-9]{1,9}) ([0-9]{1,15}) ([0-9]{1,15})( news)?")


class OwnState:
    """This master's state in the engine, and the way in which it reads those of others.

    begin() and exchange() are generators, which only the cluster's thread drives. They yield lists
    of commands, and get the replies. They raise NameTaken if another process has our name, and
    Malformed if the engine has lost our records."""

    connections = 0
    epoch = 0.0             # the engine's wall clock, which all masters share, minus our monotonic
    has_older = False       # whether masters of an older version use this engine

    def __init__(self, prefix, name, tally):
        """`tally` counts records that cannot be read or are too long."""
        self.old_prefix = prefix
        self.prefix = prefix + "-state"
        self.name = name
        self.name_key = self.full_key(name)
        self.tally = tally
        self.process = "%016x" % RANDOM.getrandbits(64)
        # The names of all masters, and the keys of those of an older version, at the last exchange
        self.names: List[str] = []
        self.old_keys: List[str] = []

    def full_key(self, text):
        return "%s:%s" % (self.prefix, text)

    def begin(self):
        value, clock = yield [("GET", self.name_key), ("TIME",)]
        self.check_name(value)
        self.set_epoch(clock)
        self.connections += 1
        self.state = "%s-%d" % (self.process, self.connections)
        self.key = self.full_key(self.state)
        self.number = 1                 # of the last change
        self.floor = 0
        self.numbers = {}               # of the record of each server, by its key
        self.left = collections.deque()         # (number, key, when it was written)
        self.value = ""                 # what our name says in the engine
        self.named_at = -math.inf       # when we have last seen or written that
        yield [("MULTI",), ("ZADD", self.key, -self.number, "end"),
               ("EXPIRE", self.key, CLUSTER_STATE_S), ("EXEC",)]

    def check_name(self, value):
        if value and value[:len(self.process)] != self.process.encode():
            raise NameTaken("another master is called %s as well; change its [cluster] name"
                            % self.name)

    def set_epoch(self, clock):
        seconds, microseconds = texts(clock)
        wall = float(seconds) + float(microseconds) / 1e6
        if not 0 < wall < 1 << 32:          # the year 2106
            raise Malformed("a time that is not possible")
        self.epoch = wall - time.monotonic()

    def exchange(self, changes, is_complete, has_webhooks, masters):
        """Write changes, renew our name, and read from the states of other masters. Return a
        Fetched for each that has a name, by name.

        `changes` are pairs of a server's key and its record, None if it has left. `is_complete`
        says whether all our servers are written with them. `masters` are the OtherMasters to read,
        by name."""
        yield from self.write(changes, is_complete, has_webhooks, time.monotonic())
        fetched = yield from self.fetch(masters)
        return fetched

    def write(self, changes, is_complete, has_webhooks, now):
        commands = self.write_changes(changes, now)
        self.number += 1
        score = self.number if is_complete else -self.number
        commands_after = self.remove_left(now)      # the name has the new FLOOR before they go
        value = "%s %d %d%s" % (
            self.state, self.number, self.floor, " news" if has_webhooks else "")
        # A name that may have expired is taken only if nobody has taken it meanwhile
        options = [] if now < self.named_at + CLUSTER_NAME_S / 2 else ["NX"]
        replies = yield [
            *commands,
            ("ZADD", self.key, "XX", "CH", score, "end"),
            ("EXPIRE", self.key, CLUSTER_STATE_S),
            ("GET", self.name_key),
            ("SET", self.name_key, value, "EX", CLUSTER_NAME_S, *options),
            *commands_after,
            ("SADD", self.prefix, self.name),
            ("EXPIRE", self.prefix, CLUSTER_STATE_S)]
        has_moved, _, found, is_set = replies[len(commands):len(commands) + 4]
        if has_moved != b"1":
            raise Malformed("this master's records have disappeared from Redis (restart, flush or "
                            "eviction)")
        self.check_name(found)
        if found and self.value and found != self.value.encode():
            raise Malformed("Redis has gone back to what it had before")
        if is_set:
            self.value = value
        if is_set or found:
            self.named_at = now

    def fetch(self, masters):
        commands = []
        limit = CLUSTER_BATCH // max(1, len(masters))
        for other in masters.values():
            commands.append(("ZRANGEBYSCORE", self.full_key(other.state), "(%d" % other.number,
                             "+inf", "WITHSCORES", "LIMIT", 0, limit))
        # The names are read after the states, because FLOOR has to be
        name_keys = [self.full_key(name) for name in self.names]
        replies = yield [
            *commands,
            ("MGET", self.name_key, *name_keys),
            ("SMEMBERS", self.prefix),
            ("MGET", self.name_key, *self.old_keys),
            ("SMEMBERS", self.old_prefix),
            ("TIME",)]
        *read, values, members, old_values, old_members, clock = map(texts, replies)
        self.set_epoch(clock)
        portions = dict(zip(masters, read))
        fetched = {}
        absent = []
        for name, value in zip(self.names, values[1:]):
            match = MASTER_NAME_VALUE.fullmatch(value)
            if match is None:
                absent.append(name)
            elif name != self.name:
                state, number, floor, news = match.groups()
                changes = ()
                if name in portions:
                    changes = self.read_portion(name, masters[name], portions[name], limit)
                fetched[name] = Fetched(
                    state.decode(), int(number), int(floor), news is not None, *changes)
        if absent:
            yield [("SREM", self.prefix, *absent)]
        self.names = self.plain_names(members)
        self.has_older = any(old_values[1:])
        self.old_keys = [self.old_prefix + ":" + name for name in self.plain_names(old_members)]
        return fetched

    @staticmethod
    def plain_names(members):
        names = map(decode_utf8, members)
        return sorted(name for name in names if re.fullmatch(PLAIN_NAME, name))[:CLUSTER_MASTERS]

    def write_changes(self, changes, now):
        """Return the commands that write these changes, and remove what they replace."""
        added: List[Any] = []           # numbers and records, in turns
        commands = []
        for key, record in changes:
            if record is not None and len(record) > RECORD_BYTES:
                self.tally.malformed += 1
                record = None
            last_number = self.numbers.pop(key, None)
            if record is None and last_number is None:
                continue                # nobody has heard of it
            self.number += 1
            self.numbers[key] = self.number
            if record is None:
                record = to_json(key)
                self.left.append((self.number, key, now))
            added += self.number, record
            if last_number is not None:
                commands.append(("ZREMRANGEBYSCORE", self.key, last_number, last_number))
        if added:
            # First, so that no reader misses a server between two of its records
            commands.insert(0, ("ZADD", self.key, *added))
        return commands

    def remove_left(self, now):
        """Return the commands that remove records of servers that have left long ago."""
        commands = []
        while self.left and now >= self.left[0][-1] + LEFT_S and len(commands) < CLUSTER_BATCH:
            number, key, _ = self.left.popleft()
            if self.numbers.get(key) == number:         # it has not been listed again
                del self.numbers[key]
                self.floor = number
                commands.append(("ZREMRANGEBYSCORE", self.key, number, number))
        return commands

    def read_portion(self, name, other, portion, limit):
        """Return the last three values of a Fetched. `portion` has records and their numbers, in
        turns, at most `limit` of them."""
        changes = []
        number = other.number
        members = portion[::2]
        for member, score in zip(members, portion[1::2]):
            try:
                number = int(float(score))
                if member != b"end":
                    changes.append(read_record(member, name, self.epoch))
            except (ValueError, OverflowError, Malformed) as error:
                log_failure(Malformed(error), self.tally, name, "cluster", member)
        is_last = members[-1:] == [b"end"] and len(members) < limit
        return changes, number, is_last


def texts(reply):
    """Return a reply that has to be a list of texts, or raise Malformed."""
    if not isinstance(reply, list) or not all(isinstance(text, bytes) for text in reply):
        raise Malformed("a reply of another kind")
    return reply


def read_record(record, master, epoch):
    """Return the key and the Server in a record of another master's state, None if it has left or
    is refused here. `epoch` is the engine's. Raise Malformed."""
    now = time.monotonic()
    try:
        values = list(json.loads(record, parse_int=read_integer))
        if len(values) == 3:                    # it has left
            values += 0.0, 0.0, 0.0, {}, True
        *columns, is_confirmed = values
        row = read_row(columns)
        if not re.fullmatch(PLAIN_NAME, row.game):
            raise ValueError("no id of a game")
        if not math.isfinite(row.expires + row.first_seen + row.last_seen):
            raise ValueError("a time that is not finite")
        row = row._replace(address=read_address(row.address))
        server = restored_server(row, now, now + epoch)
    except (ValueError, TypeError, RecursionError, Refused) as error:
        raise Malformed(error) from None
    if server is not None:
        server.master = master
        server.confirmed = is_confirmed is True
        # If its master polls it or is connected to it, nobody does so once that master is silent
        if server.lifetime == math.inf:
            server.lifetime = RESTORED_S
    return row.key, server


HOST_NAME_CHARACTERS = 50           # a master's name has at most 64, 9 of them for "-" and a number


def default_master_name(database):
    """Return a name for this master: the host's name and a number that is kept in the database.

    Without a database (None), or if the database fails, the number changes with each start."""
    number = RANDOM.getrandbits(32)
    if database:
        with contextlib.suppress(*DISK_ERRORS):
            number = database.installation_id(number)       # stores ours if it has none yet
    host = re.sub("[^A-Za-z0-9.-]", "-", socket.gethostname())
    return "%s-%08x" % (host[:HOST_NAME_CHARACTERS], number)


def entry_preference(server):
    """Return a sort key for the entries that several masters have of one server. Entries of masters
    that heard it come after those that found it in a list, and later entries after earlier ones."""
    return not server.found_at, server.last_seen


class OtherMaster:
    """What this master knows about another one.

    servers      that it has heard, by key; of some the registry has another master's entry
    state, number   up to where its state has been read
    start        the number in use when the reading began: what had left before is of no interest
    began_at     when that was
    unseen       keys of servers that it had before, and that have not been met in this state
    is_complete  whether the state has been read to its end; then the unseen servers have left
    is_followed  whether all its changes have come at once since then; the first ones are old
    sign         what its name said last, which changes as long as it lives
    lacks_room   whether our list has had no room for a server of it
    absent_s     for how long its name has been away, without the time without a link"""

    state = ""
    sign = "", 0
    number = start = 0
    absent_s = 0.0
    began_at = -math.inf
    is_complete = is_followed = has_webhooks = lacks_room = False

    def __init__(self):
        self.servers = {}
        self.unseen = set()

    def departed(self, most):
        """Return the keys of up to so many servers that have left, or for which nobody vouches."""
        keys: Iterable[Key] = ()
        if self.is_complete and self.unseen:
            keys = self.unseen
        elif self.absent_s:
            # They stay for as long as without a further announcement
            keys = (key for key, server in self.servers.items()
                    if server.lifetime <= self.absent_s)
        return list(itertools.islice(keys, most))


class Cluster:
    """Shares this master's list with other masters, through Redis or Valkey.

    A thread makes the exchanges, one at a time, because they can block. Everything else is done in
    the event loop. Without a link each master serves the servers that it knows."""

    # The attributes of our own server that an entry of another master replaces, if that master has
    # heard the server later. Each master decides the other stored attributes for itself
    TAKEN_OVER = STORED_FIELDS.keys() - {"source", "pinned", "found_at"}

    link: Any = None                            # the EngineLink, None without a connection
    linked_at = 0.0                             # when the link began to work; 0 without one
    # Since when another process has held this master's name; None if none does
    name_taken_since: Optional[float] = None
    retry_s, _ = CLUSTER_RETRY_S                # the pause before the next connection
    first_list: Iterator[Server] = iter(())     # what is to be written to a new state
    is_complete = False                         # whether all that is written
    is_behind = False                           # whether there is more to read or to drop at once

    def __init__(self, program):
        """Join a MasterServer: its registry, its news and its protocols."""
        settings = program.settings
        self.program = program
        self.registry = program.registry
        self.engine = settings["cluster.redis"]
        self.name = settings["cluster.name"] or default_master_name(program.database)
        self.registry.master = self.name
        self.tally = program.tallies.setdefault("cluster", Tally())
        self.state = OwnState(settings["cluster.prefix"], self.name, self.tally)
        # Keys of our servers that have changed or left, and are to be written. The values are None
        self.pending: Dict[Key, None] = {}
        self.masters: Dict[str, OtherMaster] = {}
        self.exchanged_at = time.monotonic()    # when the last exchange ended, or the start
        self.thread = WorkerThread("cluster", program.post)
        program.news.sender = self.news_sender
        program.news.has_sent = self.has_sent_news
        program.news.follows = self.follows
        program.protocols.append(self)
        self.start_exchange(time.monotonic())

    def close(self):
        """End the thread, and give up name and state, so that the next process of this name can
        take it at once. If the thread does not end in time, it still uses the link."""
        wait_s = ENGINE_ANSWER_S if self.link else 0.0
        if self.thread.stop(wait_s) and self.link:
            with contextlib.suppress(Malformed, OSError, ValueError):
                if self.linked_at:
                    self.link.ask("DEL", self.state.name_key, self.state.key)
            self.link.close()

    # In the thread

    def connect(self):
        # Masters that have lost the engine in one moment do not come back in one moment
        time.sleep(self.retry_s * RANDOM.uniform(0.7, 1.3))
        link = EngineLink(self.engine)
        try:
            self.drive(link, self.state.begin())
        except BaseException:
            link.close()
            raise
        return link

    def exchange(self, pause_s, *arguments):
        time.sleep(pause_s)
        return self.drive(self.link, self.state.exchange(*arguments))

    @staticmethod
    def drive(link, conversation):
        """Drive a generator of OwnState to its end, and return what it returns."""
        replies = None
        while True:
            try:
                commands = conversation.send(replies)
            except StopIteration as end:
                return end.value
            replies = link.ask_all(commands)

    # Exchanges

    def start_exchange(self, now):
        """Let the thread connect, or exchange changes with the engine."""
        if self.link is None:
            self.thread.submit(self.connect, self.on_connected)
            return
        has_more = self.is_behind or not self.is_complete or len(self.pending) >= CLUSTER_BATCH
        keys = list(itertools.islice(self.pending, CLUSTER_BATCH))
        room = CLUSTER_BATCH - len(keys)
        unwritten = list(itertools.islice(self.first_list, room))
        self.is_complete |= len(unwritten) < room
        keys += [server.key for server in unwritten if not server.master]
        changes = []
        for key in keys:
            self.pending.pop(key, None)
            server = self.registry.get(*key)
            record = None
            if server is not None and not server.master:
                record = to_json((*listed_row(server, self.state.epoch), server.confirmed))
            changes.append((key, record))
        # If the exchange fails, nothing is lost: the next state has all servers
        readable = {name: master for name, master in self.masters.items()
                    if master.state and not master.absent_s}
        has_webhooks = bool(self.program.news.hooks)
        exchange = functools.partial(
            self.exchange, 0.0 if has_more else CLUSTER_PACE_S, changes, self.is_complete,
            has_webhooks, readable)
        self.thread.submit(exchange, self.on_exchanged)

    def on_connected(self, result, now):
        if isinstance(result, Exception):
            self.on_broken_link(result, now)
        else:
            self.link = result
            self.pending.clear()
            tables = [list(table.values()) for table in self.registry.games.values()]
            self.first_list = itertools.chain(*tables)
            self.is_complete = False
        self.start_exchange(now)

    def on_exchanged(self, result, now):
        """Apply what an exchange has brought, Fetcheds by name, and start the next one."""
        if isinstance(result, Exception):
            self.on_broken_link(result, now)
        else:
            self.on_working_link(now)
            self.is_behind = False
            for name, fetched in result.items():
                self.take(self.masters.setdefault(name, OtherMaster()), fetched, now)
            self.is_behind |= self.drop_departed(now)
            # The news are told of it before a master that was away counts as followed
            self.program.tell_changes()
            absent_s = min(now - self.exchanged_at, CLUSTER_ABSENT_STEP_S)
            for name, master in self.masters.items():
                master.is_followed &= self.lives(name, now)
                master.absent_s += absent_s
                if name in result:
                    self.note_sign(name, master, result[name], now)
            self.exchanged_at = now
        self.start_exchange(now)

    def on_broken_link(self, error, now):
        """Disconnect, and report in the log and at /healthz why.

        NameTaken is reported only if it lasts longer than a name, because the name may belong to an
        earlier process of this master that was killed."""
        if self.link:
            self.link.close()
        self.link = None
        self.linked_at = 0.0
        self.is_complete = False
        self.retry_s = min(2 * self.retry_s, CLUSTER_RETRY_S[1])
        health = self.program.health
        if not isinstance(error, NameTaken):
            self.name_taken_since = None
            report(health, "cluster", ascii(error_text(error)))
        elif self.name_taken_since is None:
            self.name_taken_since = now
            health.pop("cluster", None)         # the engine replies again
        elif now - self.name_taken_since >= CLUSTER_NAME_S + CLUSTER_MARGIN_S:
            report(health, "cluster", str(error))

    def on_working_link(self, now):
        self.name_taken_since = None
        self.retry_s, _ = CLUSTER_RETRY_S
        if not self.linked_at:
            self.linked_at = now
            self.tally.connections += 1
            self.program.health.pop("cluster", None)
            log.info("linked to the other masters as %s", self.name)

    # Other masters' servers

    def take(self, master, fetched, now):
        """Apply the changes of another master to its servers and to our list, unless they are of
        another state than its present one, or servers have left of which they do not tell."""
        known_number = max(master.number, master.start)
        if master.state != fetched.state or known_number < fetched.floor:
            master.state = fetched.state
            master.number = 0
            master.start = fetched.number
            master.unseen = set(master.servers)
            master.is_complete = False
            master.began_at = now
            self.is_behind = True
            return
        for key, server in fetched.changes:
            master.unseen.discard(key)
            master.servers[key] = server
            if server is None:
                del master.servers[key]
            self.publish_entry(key)
        master.number = fetched.last_number
        if fetched.is_last and not master.is_complete:
            master.is_complete = True
            master.lacks_room &= not self.has_room()
        if fetched.changes and not fetched.is_last:
            self.is_behind = True

    def note_sign(self, name, master, fetched, now):
        """Note what the name of another master says. It changes as long as the master lives."""
        master.absent_s = 0.0
        master.has_webhooks = fetched.has_webhooks
        master.is_followed |= master.is_complete and fetched.is_last
        sign = fetched.state, fetched.number
        if sign != master.sign:
            master.sign = sign
            self.registry.heard_masters[name] = now

    def drop_departed(self, now):
        """Drop up to CLUSTER_BATCH servers of other masters that have left. Return whether there
        may be more of them."""
        room = CLUSTER_BATCH
        for name, master in list(self.masters.items()):
            keys = master.departed(room)
            room -= len(keys)
            for key in keys:
                master.unseen.discard(key)
                master.servers.pop(key, None)
                self.publish_entry(key)
            # What it may have sent is still asked for after its end
            if not master.servers and not self.lives(name, now - CLUSTER_NAME_S):
                del self.masters[name]
                del self.registry.heard_masters[name]
        return room == 0

    def has_room(self):
        return self.registry.total < self.registry.rules.max_servers

    def publish_entry(self, key):
        """Bring one server of our list up to date with what other masters know about it.

        If several other masters know the server, the one that has heard it last counts; those that
        have only found it in a list count after all others. If no other master knows it any more,
        it leaves our list, unless we have heard it ourselves."""
        registry = self.registry
        server = registry.get(*key)
        remote = self.latest_remote_server(key)
        if remote is None:
            if server is not None and server.master:
                registry.remove_any(server)
        elif server is None:
            if self.has_room():
                registry.insert(copy.copy(remote))
            else:
                # tick() has its state read again when there is room
                self.masters[remote.master].lacks_room = True
                del self.masters[remote.master].servers[key]
        elif server.master:
            names = (*STORED_FIELDS, "room", "private", "confirmed", "master")
            registry.update(server, {name: getattr(remote, name) for name in names})
        elif server.found_at and not remote.found_at:
            # We have found the server in a list, but it has announced itself to the other master.
            # When ours is gone, on_registry_event() calls this method again
            registry.remove_own(server)
        elif server.lifetime < math.inf and server.last_seen < remote.last_seen:
            # The other master has heard it later. Without a lifetime, our own connection to the
            # server or our polls decide
            fields = {name: getattr(remote, name) for name in self.TAKEN_OVER}
            if server.room in ROOMS:
                fields["private"] = ROOMS[server.room].taken_over(server, remote)
            registry.update(server, fields)

    def latest_remote_server(self, key):
        """Return the server with this key, as known to the other master that heard from it last.
        Return None if no other master knows it, or if our rules forbid listing it."""
        candidates = [master.servers[key] for master in self.masters.values()
                      if key in master.servers]
        latest = max(candidates, key=entry_preference, default=None)
        if latest is None:
            return None
        try:
            # `pinned` skips the limits: those for a source hold at the master that hears the
            # server, and publish_entry() itself checks the number of servers
            self.registry.check_admission(key, latest.source, latest.name, pinned=True)
        except Refused:
            return None
        return latest

    def on_registry_event(self, event, server):
        """Mark a server of our own for the next exchange.

        `event` says whether it was "listed", has "changed" or is "gone"."""
        if self.link:                           # a new state begins with all servers
            self.pending[server.key] = None
        if event == "gone":
            self.publish_entry(server.key)      # another master may still know the server

    # News

    def lives(self, name, now):
        """Has another master been heard within CLUSTER_NAME_S? Its own view of us is the same, so
        one that has lost the link begins to send news when the others stop to rely on it."""
        return now < self.registry.heard_masters.get(name, now) + CLUSTER_NAME_S

    def news_sender(self, now):
        """Return the name of the master that sends the news that are due now, "" for this one. Of
        several masters with webhooks, the one whose name sorts first sends them."""
        senders = [name for name, master in self.masters.items()
                   if master.has_webhooks and self.lives(name, now)]
        first = min(senders, default=self.name)
        return first if first < self.name else ""

    def has_sent_news(self, sender, server, due_at, now):
        """Has another master sent the message about a server that was due at a time? Return None
        if it may do so yet. It may have been killed before it could."""
        heard_at = self.registry.heard_masters.get(sender, -math.inf)
        if heard_at >= due_at + NEWS_SENT_S:
            return True
        if now < heard_at + CLUSTER_NAME_S:
            return None
        return heard_at > due_at or server.master == sender

    def follows(self, server, now):
        """Has this master heard the server without a break, itself or through another master?"""
        if not server.master:
            return True
        return self.lives(server.master, now) and self.masters[server.master].is_followed

    # The event loop calls these two like those of a protocol

    def read(self, settings):
        """Read the states of all masters again, because the rules may have changed."""
        for master in self.masters.values():
            master.state = ""

    def tick(self, now):
        """Bring the figures of /healthz up to date, once a second. See to it that servers for which
        the list has room again come in, and that servers leave if the engine is away for long."""
        lacks_room = False
        for master in self.masters.values():
            lacks_room |= master.lacks_room
            if master.lacks_room and self.has_room() and now >= master.began_at + MINUTE:
                master.state = ""
            if now >= self.exchanged_at + HOUR:
                master.absent_s += TICK_S
        self.drop_departed(now)
        troubles = {
            "cluster list": lacks_room and "[limits] servers = %d leaves no room for some servers "
                            "of the other masters" % self.registry.rules.max_servers,
            "cluster version": self.state.has_older and "masters of an older version share a list "
                               "of their own in this Redis; upgrade them"}
        for where, trouble in troubles.items():
            if trouble:
                report(self.program.health, where, trouble)
            else:
                self.program.health.pop(where, None)
        own_servers = self.registry.own.total + self.registry.found.total
        counts = {name: len(master.servers) for name, master in sorted(self.masters.items())}
        self.program.cluster.update(
            connected=self.linked_at > 0,
            servers={self.name: own_servers, **counts},
            lag_seconds=round(now - self.exchanged_at, 1),
            pending=len(self.pending) if self.is_complete else own_servers,
            reconnects_total=max(0, self.tally.connections - 1))


# --- Conversations with other masters ------------------------------------------------------------
#
# A conversation is a generator of a room, such as fetch() or announce(). These functions drive it
# over a socket. They block: they run in the thread of Upstreams, and in the commands.

ASK_TRIES = 3                       # datagrams that are sent before a server counts as silent
ASK_WAIT_S = 2.0                    # for each answer: several round trips around the world
CONNECT_S = 10.0                    # for a TCP connection to be established
STEP_S = 0.25                       # a waiting thread looks this often whether it must stop


@contextlib.contextmanager
def udp_socket(host, port):
    """Yield a UDP socket that sends only to this endpoint and receives only from it.

    Raise OSError if the host is not found."""
    address = resolve_host(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((address, port))
        yield sock


def converse(conversation, sock, on_step=bool, is_over=lambda: False):
    """Drive a conversation over TCP or UDP to its end, and return what it returns.

    on_step(step) is told each Send. If is_over() becomes true, the conversation ends, and the
    result is None. Raise OSError if the connection breaks. By UDP that means that nobody has the
    other port at the moment."""
    data = None
    deadline = math.inf
    while not is_over():
        try:
            step = conversation.send(data)
        except StopIteration as stop:
            return stop.value
        on_step(step)
        if step.wait_s is not None:
            deadline = time.monotonic() + step.wait_s
        for piece in step.data if isinstance(step.data, list) else [step.data]:
            if piece:
                sock.sendall(piece)
        data = None
        left_s = deadline - time.monotonic()
        while data is None and left_s > 0 and not is_over():
            sock.settimeout(min(left_s, STEP_S))
            with contextlib.suppress(socket.timeout):
                data = sock.recv(RECV_BYTES)
            left_s = deadline - time.monotonic()
    return None


def converse_by_http(conversation, place, on_step=bool, is_over=lambda: False):
    """Drive a conversation over HTTP, as converse() does. `place` is that of http_answer()."""
    answer = None
    while not is_over():
        try:
            step = conversation.send(answer)
        except StopIteration as stop:
            return stop.value
        on_step(step)
        answer = None
        if step.path:
            answer = http_answer(place, step)
        else:
            pause(step.wait_s or 0.0, is_over)
    return None


def pause(seconds, is_over):
    """Wait for so long, or until is_over() becomes true."""
    waits_until = time.monotonic() + seconds
    while not is_over() and time.monotonic() < waits_until:
        time.sleep(STEP_S)


def http_answer(place, step):
    """Send the request of a step by HTTP or HTTPS. Return the HttpAnswer.

    `place` is the host, the port, whether it is HTTPS, and the address of the host if it is known
    already, or "". Raise OSError if no complete answer comes in time, or if the host's certificate
    is wrong, and Malformed if it is not HTTP."""
    host, port, tls, address = place
    # By HTTP/1.0 the body is not sent in chunks, and ends with the connection
    head = "%s %s HTTP/1.0\r\nHost: %s\r\n" % (
        "POST" if step.data else "GET", step.path, endpoint_text(host, port))
    if step.data:
        head += "Content-Type: application/json\r\nContent-Length: %d\r\n" % len(step.data)
    # A certificate is valid for the name, and not for the address
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(
            socket.create_connection((address or host, port), CONNECT_S))
        if tls:
            import ssl                  # some builds of Python have no OpenSSL
            context = ssl.create_default_context()
            sock = stack.enter_context(context.wrap_socket(sock, server_hostname=host))
        request = head.encode() + b"\r\n" + step.data
        body = converse(received_until_closed(request, wait_s=step.wait_s), sock)
    head, _, _ = body[:HTTP_HEAD_BYTES].partition(b"\r\n\r\n")
    del body[:len(head) + len(b"\r\n\r\n")]
    status = re.match(rb"HTTP/1\.[0-9] ([0-9]{3})\b", head)
    if not status:
        raise Malformed("no answer by HTTP; is that the port of the master's page?")
    return HttpAnswer(int(status.group(1)), body)


def fetch_list(room, host, port, tls=False, address="", **choice):
    """Fetch the list of a master, in the dialect of a room. Return its entries, an iterable of
    dicts, which may raise Malformed.

    `address` is that of the host if it is known already, `choice` has values of room.list_options.
    Raise OSError or Malformed if there is no list."""
    conversation = room.fetch(**choice)
    if room.fetched_over == "http":
        return converse_by_http(conversation, (host, port, tls, address))
    deadline = time.monotonic() + LIST_S
    if room.fetched_over == "udp":
        connected: Any = udp_socket(address or host, port)
    else:
        connected = socket.create_connection((address or host, port), CONNECT_S)
    with connected as sock:
        servers = converse(conversation, sock, is_over=lambda: time.monotonic() > deadline)
    if servers is None:                 # another master may go on and on
        raise TimeoutError("it was not complete within %g s" % LIST_S)
    return servers


# --- What other masters list ---------------------------------------------------------------------
#
# The lists that [upstream] names are fetched in a thread, one after another. What another master
# says is where to ask, and nothing else: each address is given to the poller, and a server is
# listed when it has answered here. It leaves when it no longer answers, whatever the list says.

UPSTREAM_ADDRESSES = 5000           # the most entries of one list that are used
# The most servers of all lists that may be queried before their first answer. With more, none would
# answer sooner: a silent one takes up to 6 s, and the default rate is 500 queries a second
UPSTREAM_UNANSWERED = 1000


def fetched_text(servers, left_out):
    """Return what fetch_upstream() has returned, in words."""
    return "%s in the list, %s left out" % (
        count_text(len(servers), "address", "addresses"),
        count_text(left_out, "other entry", "other entries"))


def fetch_upstream(upstream, own_addresses, looked_up, servers_per_source):
    """Fetch the list of an Upstream. Return its FoundServers, and how many entries are left out.

    This blocks. `own_addresses` are those of this machine, `looked_up` is that of
    look_up_names(). Entries are left out if they are repeated, if no server could have announced
    them, if they may not be queried, or if their source has more than `servers_per_source`. Raise
    OSError, Malformed or another ValueError if there is no list."""
    room = ROOMS[upstream.game]()
    # Of AIO's dialects only the last one has servers that answer queries
    room.dialect = room.dialects[-1] if room.dialects else ""
    upstream_address = resolve_host(upstream.host)
    entries = fetch_list(room, upstream.host, upstream.port, upstream.tls, upstream_address,
                         **dict(upstream.choice))
    entries = list(itertools.islice(with_pauses(entries), UPSTREAM_ADDRESSES))
    # With a low rate the next fetch may come before the last server was queried. In another order
    # each time, all of them get their turn
    RANDOM.shuffle(entries)
    look_up_names([entry["address"] for entry in entries], looked_up)
    servers = {}
    shares = Shares()
    for entry in with_pauses(entries):
        host = entry["address"]
        address = looked_up.get(host, LookedUp(host)).address
        with contextlib.suppress(Refused):
            fields = room.found(entry)
            if may_be_queried(address, upstream_address, own_addresses):
                address, port = canonical_address(address), entry["port"]
                highest_port = MAX_PORT - room.offset
                if 0 < port <= highest_port and not shares.full(address, servers_per_source):
                    shares.take(address)
                    servers[address, port] = FoundServer(address, port, upstream.name, fields)
    return list(servers.values()), len(entries) - len(servers)


def with_pauses(values):
    """Yield these values, with a pause after each ten of them.

    To read ten entries takes up to 2 ms. Only one thread of Python runs at a time, so without
    pauses each datagram that the event loop sends could wait 5 ms for this thread."""
    for count, value in enumerate(values, 1):
        yield value
        if count % 10 == 0:
            time.sleep(0.001)


def may_be_queried(address, upstream_address, own_addresses):
    """May a server be queried at an address that the list of a master at `upstream_address` names?

    A master on the internet must not make us query machines of our own network. Only a master that
    is in such a network, or on this machine, may name addresses there."""
    if not is_unicast(address):
        return False
    is_near = is_near_address(address, own_addresses)
    return not is_near or is_near_address(upstream_address, own_addresses)


def is_near_address(address, own_addresses):
    canonical = canonical_address(address)
    is_private = canonical in LOCAL_NETWORKS or canonical in HIDDEN_NETWORKS
    return is_private or canonical in own_addresses


def find_own_addresses(settings):
    """Return the addresses of this machine, as far as the settings and the system tell them."""
    return {
        settings["server.public_address"],
        *settings["server.bind"],
        own_address(),
        own_address(DOCUMENTATION_ADDRESS_IPV6),
    }


class LookedUp(NamedTuple):
    """The result of the last look-up of a host name in another master's list."""

    address: str = ""                   # "" if the name has none, or its turn has not come yet
    took_s: float = 0.0


def look_up_names(hosts, looked_up):
    """Look up those of the hosts that are names, for at most 10 s. The others follow at the next
    fetch.

    `looked_up` is an OrderedDict with the LookedUp of each name, the one that waits longest first.
    New names wait behind all others, and those that were slow come last of all. So nobody who has
    new names all the time, or slow name servers, keeps other names from their turn. Names that are
    not in `hosts` are removed."""
    names = dict.fromkeys(host for host in hosts if not is_unicast(host))
    for name in list(looked_up):
        if name not in names:
            del looked_up[name]
    for name in names:
        looked_up.setdefault(name, LookedUp())
    deadline = time.monotonic() + 10.0
    for name in sorted(looked_up, key=lambda name: looked_up[name].took_s > 1.0):
        began = time.monotonic()
        if began >= deadline:
            return
        address = looked_up[name].address
        # The system raises a UnicodeError, which is a ValueError, for a text that cannot be a name
        with contextlib.suppress(OSError, ValueError):
            address = resolve_host(name)
        looked_up[name] = LookedUp(address, time.monotonic() - began)
        looked_up.move_to_end(name)


class UpstreamList:
    """One list of another master, and the result of its last fetch."""

    def __init__(self, upstream):
        self.upstream = upstream            # the Upstream in the ini
        self.tried_at = -math.inf           # when the last fetch began
        self.state = UpstreamState()        # tick() counts the listed servers
        # The FoundServers of the last good fetch that have not been given to the poller yet
        self.waiting = collections.deque()
        self.looked_up = collections.OrderedDict()          # see look_up_names()


class Upstreams:
    """Fetches the lists of other masters, and has the servers in them queried.

    A thread makes the fetches, because they block. Everything else is done in the event loop, which
    treats this object like a protocol."""

    def __init__(self, program):
        self.program = program
        self.settings = program.settings
        self.registry = program.registry
        self.poller = program.poller
        self.rooms = program.rooms
        self.lists: List[UpstreamList] = []
        self.is_fetching = False
        self.thread = WorkerThread("upstream", program.post)
        # Before the poller, whose tick then queries the servers that this one's tick has named
        program.protocols.insert(0, self)
        self.read(self.settings)

    def read(self, settings):
        """Read the lists from the settings, at the start and after a reload.

        Servers that were found at a master which the ini does not name any more leave. All lists
        are then fetched anew, so those that another list names are found again at once."""
        lists_before: Dict[Any, Any] = {one.upstream: one for one in self.lists}
        self.lists = []
        for upstream in settings["upstream.masters"]:
            if self.rooms[upstream.game].is_on(settings):
                self.lists.append(lists_before.pop(upstream, None) or UpstreamList(upstream))
            else:
                log.warning("%s: its servers are not queried; the game is switched off here",
                            upstream.label)
        named = {(one.upstream.game, one.upstream.name) for one in self.lists}
        for target in list(self.poller.targets.values()):
            if target.why == FOUND and (target.room.game, target.found.found_at) not in named:
                self.registry.remove_own(target.room.listed_server(target))
                self.poller.remove(target)
        if lists_before:
            for upstream_list in self.lists:
                upstream_list.tried_at = -math.inf

    def tick(self, now):
        """Begin a fetch that is due, query the servers that fetches have brought, and update the
        state that /healthz shows. This is called once a second."""
        self.start_fetch(now)
        self.query_waiting()
        listed = collections.Counter()
        if self.lists:
            for server in self.registry.servers():
                if server.found_at and not server.master:
                    listed[server.room, server.found_at] += 1
        state = self.program.upstream
        state.clear()
        for upstream_list in self.lists:
            upstream = upstream_list.upstream
            state[upstream.label] = upstream_list.state._replace(
                listed=listed[upstream.game, upstream.name])

    def start_fetch(self, now):
        """Let the thread fetch the list that is due for the longest time, if one is."""
        interval = self.settings["upstream.interval"]

        def due_at(upstream_list):
            pause_s = min(interval, MINUTE) if upstream_list.state.trouble else interval
            return upstream_list.tried_at + pause_s

        if self.is_fetching or not self.lists:
            return
        next_list = min(self.lists, key=due_at)
        if due_at(next_list) > now:
            return
        next_list.tried_at = now
        self.is_fetching = True
        fetch = functools.partial(
            fetch_upstream, next_list.upstream, find_own_addresses(self.settings),
            next_list.looked_up, self.registry.rules.max_servers_per_source)
        self.thread.submit(fetch, functools.partial(self.on_fetched, next_list))

    def on_fetched(self, fetched_from, result, now):
        """Take what fetch_upstream() has returned or raised, and begin the next fetch.

        `fetched_from` is the UpstreamList. A failure is logged once, until a fetch succeeds."""
        self.is_fetching = False
        label, state = fetched_from.upstream.label, fetched_from.state
        if fetched_from not in self.lists:
            pass                        # the ini has dropped it since
        elif isinstance(result, Exception):
            reason = clean(error_text(result), OUTCOME_CHARACTERS)
            if not state.trouble:
                log.warning("%s: no list: %a", label, reason)
            fetched_from.state = state._replace(trouble=reason)
        else:
            servers, left_out = result
            if state.fetched is None or state.trouble:
                log.info("%s: %s", label, fetched_text(servers, left_out))
            fetched_from.state = UpstreamState(int(time.time()), addresses=len(servers))
            fetched_from.waiting = collections.deque(servers)
        self.start_fetch(now)

    def query_waiting(self):
        """Have the poller query servers that fetches have brought, as many as there is room for.

        The lists take turns."""
        waiting_lists = [one for one in self.lists if one.waiting]
        if not waiting_lists:
            return
        # Half of the list is for servers that announce themselves
        room_left = self.registry.rules.max_servers // 2 - self.registry.found.total
        room_left = min(room_left, UPSTREAM_UNANSWERED)
        for target in self.poller.targets.values():
            if target.why == FOUND and target.room.listed_server(target) is None:
                room_left -= 1
        # To give 500 servers to the poller takes 10 ms
        for upstream_list in itertools.islice(itertools.cycle(waiting_lists), 500):
            if room_left <= 0 or not upstream_list.waiting:
                continue
            room = self.rooms[upstream_list.upstream.game]
            # A ban or a limit refuses it, as it would refuse a server that announces itself
            with contextlib.suppress(Refused):
                if room.query_found(upstream_list.waiting.popleft()) is not None:
                    room_left -= 1


# --- The running program -------------------------------------------------------------------------

LOGGED_EVENTS = 20                  # lines a second for servers that come and go
ANY_FREE_PORT = 0


class Service(NamedTuple):
    """What listens on the ports of one setting."""

    name: str
    transport: str                  # "udp" or "tcp"
    setting: str                    # its port, or ports; "" for any free port
    protocol: Any                   # a UdpProtocol or a TcpProtocol
    offset: int = 0                 # is added to the port in the setting


class MasterServer:
    """The running program. Another program can embed it:

        with masterserver.MasterServer({"iceball.port": "0"}, on_event=print) as master:
            print(master.listeners, [s.name for s in master.registry.servers()])

    settings   a Settings, or a mapping of names to texts, as for --set; None for the defaults
    on_event   called as on_event(event, server), in the serving thread; the event is "listed",
               "changed" or "gone". It must be quick, must not change anything, and may call stop().
               An exception that it raises is logged.
    reload     called in a thread of its own when the ini or a text file has changed; returns the
               new Settings or raises SettingsError. If it is None, the settings never change.

    run() serves in the calling thread, and start() in a thread of its own, both until stop(). An
    instance runs once. `listeners` has the address and port of every socket. One process can have
    several instances."""

    thread: Optional[threading.Thread] = None       # the thread of start()
    # bind() creates these three. A byte that is sent to `wake_out` wakes the selector
    selector: Any = None
    wake_in: Any = None
    wake_out: Any = None
    link: Optional[Cluster] = None
    upstreams: Optional[Upstreams] = None
    next_connection_tick = next_tick = 0.0
    busy_s = 0.0                    # the longest time that a round took; it fades, see tick()
    is_looking_at_files = False     # True while the disk thread looks whether files have changed
    log_file: Optional[LogFile] = None          # command_serve() sets it
    is_closed = False

    def __init__(self, settings: Union[Settings, Mapping[str, str], None] = None,
                 on_event: Optional[Callable[[str, Server], None]] = None,
                 reload: Optional[Callable[[], Settings]] = None) -> None:
        """Create everything that does not need a socket. Raise SettingsError if a setting is wrong,
        or if a file that the settings name cannot be used."""
        self.settings = settings if isinstance(settings, Settings) else Settings(settings)
        self.read_settings: Any = reload
        self.file_stamps = file_stamps(self.settings)
        read_files(self.settings)
        self.certificate: Any = None        # a Certificate if there is a port for HTTPS
        if self.settings["http.https_ports"]:
            self.certificate = load_certificate(self.settings)
        self.rules = Rules(self.settings)
        self.rules.country_file = load_country_file(self.settings)
        self.registry = Registry(self.rules)
        self.poller = Poller(self.settings)
        self.health = {}                # what does not work, a sentence by part
        self.gauges = {}                # figures for /metrics, by name
        self.tallies = {}               # what the ports have counted, a Tally by protocol
        self.cluster = {}               # figures of the link to other masters, {} without one
        self.upstream: Dict[str, UpstreamState] = {}        # by Upstream.label
        self.listeners: List[Listener] = []
        self.news = News(self.settings, self.registry, self.gauges)
        # What is called once a second, and after a reload
        self.protocols: List[Any] = [self.news]
        self.udp_sockets, self.tcp_listeners = [], []
        # The UdpSocket from which a protocol's tick() sends, by protocol and whether it is IPv6
        self.tick_sockets = {}
        self.connections = collections.OrderedDict()        # the one idle for longest comes first
        self.connections_by_source = Shares()
        self.turns = Turns()            # the methods of connections that are to be called
        self.unread = UnreadOutput()
        # This is not a threading.Event, because stop() may be called in a signal handler, which
        # could interrupt a thread that holds the Event's lock
        self.stopping = False
        self.posted_calls = collections.deque()             # see post()
        self.disk = WorkerThread("disk", self.post)
        self.host_names = HostNames(self.post)
        path = self.settings.file("server.database")
        self.database = Database(path) if path else None
        self.saved_list = None
        if self.database is not None:
            self.saved_list = SavedList(self.database, self.registry, self.disk, self.health)
        self.on_event = on_event
        self.epoch = time.time() - time.monotonic()
        self.resolve = self.host_names.resolve
        self.rooms = {game.game: game(self) for game in GAMES}

    def __enter__(self) -> MasterServer:
        self.start()
        return self

    def __exit__(self, *exception):
        self.stop()

    # Start and stop

    def bind(self):
        """Open all sockets and restore the saved list. A second call does nothing. Raise StartError
        if a socket cannot be bound; then everything is closed again.

        A caller that never calls run() must call close()."""
        if self.selector is not None:
            return
        self.selector = selectors.DefaultSelector()
        self.wake_in, self.wake_out = socket.socketpair()
        self.wake_out.setblocking(False)
        self.selector.register(self.wake_in, selectors.EVENT_READ, self.on_wake)
        self.vector = MessageVector.create()
        self.max_descriptors = descriptor_limit()
        try:
            self.open_protocols()
            self.upstreams = Upstreams(self)
            if self.settings["cluster.redis"]:
                self.link = Cluster(self)
        except BaseException:
            self.close()
            raise

    def run(self):
        """Serve in this thread until stop() is called. Raise StartError if a socket cannot be
        bound, or if start() has been called."""
        if self.thread not in (None, threading.current_thread()):
            raise StartError("This MasterServer already runs in a thread. Create a new one for a "
                             "second run.")
        self.bind()
        try:
            while not self.stopping:
                self.handle_events()
            self.finish_requests()
        finally:
            self.close()

    def start(self):
        """Serve in a thread of its own, and return once all sockets are bound. Raise StartError if
        one cannot be bound, or after stop()."""
        if self.stopping:
            raise StartError("This MasterServer has been stopped. Create a new one.")
        self.bind()
        if self.thread is None:
            self.thread = threading.Thread(target=self.run, name="masterserver", daemon=True)
            self.thread.start()

    def stop(self):
        """End run(), and wait for the thread of start() to end. The last answers and the last write
        to the disk may take some seconds.

        This may be called from any thread, from a callback or from a signal handler."""
        self.stopping = True
        self.wake()                     # run() looks at `stopping` after each round
        if self.thread not in (None, threading.current_thread()):
            self.thread.join()

    def finish_requests(self):
        """Accept no more, and wait up to 2 s for the answers to requests that have arrived
        already. Some clients crash if a reset cuts an answer off."""
        now = time.monotonic()
        deadline = now + 2.0
        for listener in self.tcp_listeners:
            # Closing would reset the connections in the backlog, so they are accepted first
            self.guarded(listener.on_readable, now)
            if not listener.is_paused:          # a paused listener is not in the selector
                self.selector.unregister(listener.sock)
            listener.sock.close()
        self.tcp_listeners.clear()
        if self.connections:
            self.handle_events(now)             # read the requests that are here, without waiting
        # A connection without events has an answer that is still being made
        while now < deadline and (self.turns or any(
                connection.unsent or connection.events == NO_EVENTS
                for connection in self.connections)):
            self.handle_events(deadline)
            now = time.monotonic()

    def close(self):
        """Save the list once more and close everything. A second call does nothing."""
        if self.is_closed:
            return
        self.stopping = self.is_closed = True
        now = time.monotonic()
        # Before the connections are closed: servers that are listed while they are connected stay
        # in the saved list, so that they can come back after a restart
        if self.saved_list and self.registry.altered:
            self.saved_list.save(now, time.time(), samples=[])
        if not self.disk.stop(STOP_DISK_S):
            log.error("the list could not be saved at the end: the disk takes too long")
        elif self.database:
            self.database.close()
        self.host_names.worker.stop(timeout=0.0)        # nobody waits for its look-ups any more
        for hook in self.news.hooks.values():
            hook.dismiss()
        if self.upstreams:
            self.upstreams.thread.stop(timeout=0.0)
        if self.link:
            self.link.close()
        self.run_posted_calls(now)                      # with the results of the threads' last jobs
        for owner in (*self.udp_sockets, *self.tcp_listeners, *self.connections):
            owner.sock.close()
        self.tcp_listeners.clear()
        self.connections.clear()
        if self.selector is not None:
            self.selector.close()
            self.wake_in.close()
            self.wake_out.close()

    # The loop

    def handle_events(self, until=math.inf):
        """Run one round of the loop: wait until a socket is ready, a tick is due or the time
        `until` has come, handle the sockets that are ready, and make the ticks that are due."""
        wait_until = min(until, self.next_connection_tick, self.next_tick)
        waiting = len(self.turns)
        wait_s = 0.0 if waiting else max(0.0, wait_until - time.monotonic())
        ready_sockets = self.selector.select(wait_s)
        now = time.monotonic()
        for key, _ in ready_sockets:
            on_ready = key.data         # the function that the socket was registered with
            self.guarded(on_ready, now)
        if now >= self.next_connection_tick:
            self.next_connection_tick = now + LOOK_S
            for connection in list(self.connections):
                self.guarded(connection.call_in_turn, connection.tick, now)
        if waiting:
            self.take_turns(waiting, now)
        if now >= self.next_tick:
            late_s = now - self.next_tick
            if late_s >= 5.0:
                # The program was stopped and received nothing. So a server's silence until now
                # does not mean that the server has gone
                self.registry.silence_counts_from = now
            self.next_tick = now + TICK_S
            self.tick(now)
        self.busy_s = max(self.busy_s, time.monotonic() - now)

    def take_turns(self, count, now):
        """Let so many connections have their turns, for TURNS_S at most, however long the datagrams
        have taken. The others keep their places."""
        ends = time.monotonic() + TURNS_S
        for _ in range(count):
            if self.turns:                          # a connection may have closed another
                self.guarded(self.turns.next(), now)
            if time.monotonic() >= ends:
                break

    def tick(self, now):
        """Do the work of each second. A fault in one part of it does not stop the others."""
        self.set_epoch()
        self.gauges.update(loop_delay_max_seconds=self.busy_s, connections=len(self.connections))
        self.busy_s *= 0.99             # a long delay is shown for minutes
        if self.certificate:
            self.guarded(self.check_certificate, time.time())
        self.guarded(self.registry.expire, now)
        self.guarded(self.registry.look_up_countries)
        self.tell_changes()
        for listener in self.tcp_listeners:
            self.guarded(listener.tick, now)
        for protocol in self.protocols:
            self.guarded(self.tick_protocol, protocol, now)
        if self.saved_list:
            self.guarded(self.saved_list.tick, now, time.time())
        else:
            self.registry.altered.clear()       # nobody else empties this set
        country_file = self.rules.country_file
        if country_file is not None and country_file.trouble:
            report(self.health, "countries", "the file is damaged: " + country_file.trouble)
        if self.log_file and self.log_file.trouble:
            self.health["log"] = self.log_file.trouble
            # The log has this line once it can be written again
            log.error("lines could not be written: %s", self.log_file.trouble)
        else:
            self.health.pop("log", None)
        if self.read_settings and not self.is_looking_at_files:
            self.is_looking_at_files = True
            self.disk.submit(functools.partial(file_stamps, self.settings), self.on_file_stamps)

    def check_certificate(self, wall):
        """Tell in /metrics when the certificate expires, and warn in time in /healthz and the log.
        """
        expires = self.certificate.expires
        left_s = expires - wall
        self.gauges["certificate_expires_seconds"] = round(left_s)
        # Certificates of the usual sort are renewed 30 days before their end, or 60 of 90 days
        # after their begin. So with 14 days left, something is wrong
        if left_s > 14 * DAY:
            self.health.pop("certificate", None)
        elif left_s > 0:
            report(self.health, "certificate", "the certificate for HTTPS expires on %s; renew "
                   "[http] certificate" % utc_datetime(expires).date())
        else:
            report(self.health, "certificate", "the certificate for HTTPS has expired")

    def tick_protocol(self, protocol, now):
        for data, peer in protocol.tick(now) or ():
            self.send_from(protocol, data, peer)

    def send_from(self, protocol, data, peer):
        """Send a datagram from a protocol's first socket of the peer's address family, or drop it
        if there is none. So an operator who binds several addresses puts the one that can reach all
        peers first."""
        address, *_ = peer
        udp_socket = self.tick_sockets.get((protocol, ":" in address))
        if udp_socket:
            udp_socket.send([(data, peer)])

    def set_epoch(self):
        """Set `epoch`, also of all protocols: wall clock minus monotonic clock, in seconds."""
        self.epoch = time.time() - time.monotonic()
        for protocol in self.protocols:
            protocol.epoch = self.epoch

    def tell_changes(self):
        """Tell everybody who wants to know what has changed in the list since the last tick."""
        changes = self.registry.changes
        self.registry.changes = []
        logged = []
        for event, server in changes:
            self.guarded(self.news.note, event, server)
            if self.link and not server.master:
                self.guarded(self.link.on_registry_event, event, server)
            if event == "gone" and server.room in self.rooms:
                self.guarded(self.rooms[server.room].gone, server)
            if self.on_event:
                self.guarded(self.on_event, event, server)
            # A server that was restored from the disk has not just been listed
            if event == "gone" or (event == "listed" and server.confirmed):
                logged.append((event, server))
        for event, server in logged[:LOGGED_EVENTS]:
            log.info("%s %s %s %a", server.endpoint, server.game, event,
                     server.name)
        if len(logged) > LOGGED_EVENTS:
            log.info("%d more servers listed or removed in the last second",
                     len(logged) - LOGGED_EVENTS)

    def guarded(self, call, *arguments):
        """Call a function with these arguments. An exception is logged as a fault of the program,
        and does not stop the loop."""
        try:
            call(*arguments)
        except Exception:
            # An argument may be another thread's error, with the secret URL of a webhook in it
            description = without_secrets("%s%s" % (call, arguments))
            log.exception("a fault of the program in %s", description)

    def post(self, call, *arguments):
        """Have `call(*arguments, now)` called in the event loop, and return at once. This may be
        called from any thread or from a signal handler."""
        self.posted_calls.append((call, *arguments))
        self.wake()

    def wake(self):
        """Make the selector return. This may be called like post()."""
        if self.wake_out is not None:
            # A full socket wakes the selector anyway. A closed one means that the loop has ended
            with contextlib.suppress(OSError):
                self.wake_out.send(b"\0")

    def on_wake(self, now):
        self.wake_in.recv(4096)
        self.run_posted_calls(now)

    def run_posted_calls(self, now):
        """Make the calls that have been posted so far, not those that these post."""
        for _ in range(len(self.posted_calls)):
            call, *arguments = self.posted_calls.popleft()
            self.guarded(call, *arguments, now)

    # Sockets

    def open_protocols(self):
        """Bind the sockets of the games that the settings switch on, of the web server and of the
        poller, and restore the saved list.

        Raise StartError if ports cannot be bound. It names all of them, because another program
        often holds several."""
        services = []
        rooms = {}
        for room in self.rooms.values():
            if not room.is_on(self.settings):
                continue
            rooms[room.game] = room
            for port in room.ports:
                protocol = port.make(room)
                services.append(Service(
                    room.game, port.transport, room.game + ".port", protocol, port.offset))
                if protocol is not room:
                    self.protocols.append(protocol)
            self.protocols.append(room)
        web = Web(self)
        services.append(Service("http", "tcp", "http.ports", web))
        services.append(Service("https", "tcp", "http.https_ports", web))
        services.append(Service("poll", "udp", "", self.poller))
        # The poller comes last, because its tick then queries servers that the others have named
        self.protocols += [web, self.poller]
        problems = []
        for service in services:
            problems += self.open_sockets(service)
        if problems:
            raise StartError("\n".join(problems))
        self.set_epoch()
        if self.saved_list:
            self.saved_list.restore(time.monotonic(), time.time(), rooms)

    def send(self, data, peer):
        """Send a datagram at once, from the poller's port."""
        self.send_from(self.poller, data, peer)

    def hourly_players(self):
        """Return the last day's hourly player counts, lists by the server's key. Return {} if there
        is no database."""
        return self.saved_list.hourly_players if self.saved_list else {}

    def open_sockets(self, service):
        """Bind a socket for each port of a Service at each address of the setting [server] bind.

        Return a list with an error message for each one that cannot be bound."""
        problems = []
        ports = self.settings[service.setting] if service.setting else ANY_FREE_PORT
        if ports is None:               # the setting is empty, which switches the service off
            ports = ()
        elif not isinstance(ports, tuple):
            ports = (ports,)
        hosts = self.settings["server.bind"]
        for port, host in itertools.product(ports, hosts):
            if service.protocol.ipv4_only and ":" in host:
                continue
            if port != ANY_FREE_PORT:
                port += service.offset
            try:
                self.open_socket(service, host, port)
            except OSError as error:
                # Without IPv6 on this machine, the other addresses are enough
                may_lack_ipv6 = host == "::" and len(hosts) > 1
                if may_lack_ipv6 and error.errno != errno.EADDRINUSE:
                    log.info("%s: no IPv6 on this machine: %s", service.name, error)
                    continue
                section, key = (service.setting or "server.bind").split(".")
                problems.append(
                    "%s cannot listen on %s %s: %s. Change [%s] %s or [server] bind." % (
                        service.name, service.transport.upper(), endpoint_text(host, port),
                        error.strerror or error, section, key))
        return problems

    def open_socket(self, service, host, port):
        """Bind one socket and serve a protocol there. Raise OSError."""
        name, transport, _, protocol, _ = service
        is_ipv6 = ":" in host
        family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
        sock = bound_socket(family, transport, host, port)
        bound_host, bound_port, *_ = sock.getsockname()
        self.listeners.append(Listener(name, transport, bound_host, bound_port))
        tally = self.tallies.setdefault(name, Tally())
        if transport == "tcp":
            owner: Any = TcpListener(self, name, sock, protocol, tally, uses_tls=name == "https")
            self.tcp_listeners.append(owner)
        else:
            limiter = self.rules.datagram_limiter
            if protocol is self.poller:             # it receives answers to our own queries
                limiter = self.rules.answer_limiter
            owner = UdpSocket(name, sock, protocol, tally, limiter, self.registry, self.vector)
            self.udp_sockets.append(owner)
            self.tick_sockets.setdefault((protocol, is_ipv6), owner)
        self.selector.register(sock, selectors.EVENT_READ, owner.on_readable)

    # Settings

    def on_file_stamps(self, stamps, now):
        self.is_looking_at_files = False
        if stamps != self.file_stamps and not isinstance(stamps, Exception):
            self.file_stamps = stamps
            self.reload(now)

    def reload(self, now):
        """Have the disk thread read the settings and the files that they name again."""

        def read():
            new_settings = self.read_settings()
            # Without its file every setting would fall back to its default
            if self.settings.found and not new_settings.found:
                raise SettingsError("%s: it is gone or empty" % new_settings.path)
            read_files(new_settings)
            return new_settings

        self.disk.submit(read, self.on_settings_read)

    def on_settings_read(self, result, now):
        """Apply what has changed in the Settings that the disk thread has read, and have it read
        the certificate and the countries."""
        if isinstance(result, Exception):
            log.error("the old settings stay in force: %s", result)
            self.health["settings"] = "the old ones stay in force: %s" % result
            return
        self.health.pop("settings", None)
        # `file_stamps` has the stamps of the files that the old settings name. If the ini now names
        # another file, the next tick sees a difference and has all read once more
        changed = adopt_settings(self.settings, result)
        log.info("settings read again; %s", (
            "changed: " + ", ".join(changed) if changed else "there is nothing to apply"))
        if changed:
            self.apply_settings(now)
        if self.certificate:
            load = functools.partial(load_certificate, self.settings)
            self.disk.submit(load, self.on_certificate)
        load = functools.partial(load_country_file, self.settings)
        self.disk.submit(load, self.on_country_file)

    def on_certificate(self, result, now):
        if isinstance(result, Exception):
            report(self.health, "new certificate", "the old one stays in force: %s" % result)
            return
        self.health.pop("new certificate", None)
        if result.expires != self.certificate.expires:
            log.info("a new certificate is in force, which expires on %s",
                     utc_datetime(result.expires).date())
        self.certificate = result

    def on_country_file(self, result, now):
        """Use the CountryFile that the disk thread has read, or None if the settings name none."""
        if isinstance(result, Exception):
            report(self.health, "countries", "the old file stays in use: %s" % result)
            return
        self.health.pop("countries", None)
        self.rules.country_file = result
        self.registry.look_up_countries_again()
        if result is not None:
            log.info("file with countries read: %s", country_file_text(result))

    def apply_settings(self, now):
        self.registry.apply_rules(self.settings)
        for connection in list(self.connections):
            if connection.address in self.rules.blocked:
                connection.close(now)
        for protocol in self.protocols:         # the poller is among them
            protocol.read(self.settings)
        if log.handlers:            # a program that embeds this one has a log of its own
            log.setLevel(self.settings["server.log_level"].upper())


# ================================================================================================
# 12  Client tools and command line
#
# The commands: serve, check the settings, announce a game server that cannot do it itself, query
# game servers, and show masters' lists. The tools use the codecs of section 7, and section 11
# fetches the lists. They are ordinary blocking programs that report an error and end. None of them
# uses the event loop; only command_serve() starts it.
# ================================================================================================

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
EXIT_STATUSES = """exit status:
  0  ended as told, by a signal, Ctrl+C or Ctrl+Break, or the end of standard input; or the
     command succeeded
  1  it cannot start, or cannot go on; standard error says why
  2  wrong arguments or settings; standard error says which

Only what was asked for goes to standard output; the log goes to standard error or to
[server] log_file."""


# --- Announcing a game server that cannot do it itself -------------------------------------------

RETRY_S = 1.0                       # the pauses after failures grow: 1, 2, 4 and so on up to 60 s
GOODBYE_S = 3.0                     # stop() waits this long for each master that does not answer


class AnnouncedMaster:
    """A master to which a game server is announced, and how that stands.

    host, port    as the user has named it; the port is that for announcements
    name          host and port as text, for the log
    address       the IP address at which the master was last reached
    state         the success of the last announcement, in words
    was_accepted  True if the master has ever accepted the server, False if it has only refused it,
                  None before its first answer"""

    address = state = ""
    was_accepted: Optional[bool] = None
    pause_s = RETRY_S               # the pause after the next failure

    def __init__(self, host, port, tls):
        self.host = host
        self.port = port
        self.tls = tls
        self.name = endpoint_text(host, port)

    def set_state(self, state, level=logging.WARNING):
        if state != self.state:
            self.state = state
            log.log(level, "%s: %s", self.name, state)

    def web_place(self):
        return self.host, self.port, self.tls, self.address

    def on_step(self, step):
        if step.accepted:
            self.was_accepted = True
            self.pause_s = RETRY_S
        if step.state:
            self.set_state(step.state, logging.INFO if step.accepted else logging.WARNING)


class Announcement:
    """Announces a game server to masters, for games that cannot announce themselves.

        announcement = masterserver.Announcement("iceball", 21737,
                                                 ["master.example", "other.example:27790"],
                                                 name="My server")
        announcement.start()                        # or run() in this thread
        announcement.update(players=5, max_players=16, map="castle")        # whenever it changes
        announcement.stop()                         # signs off if the protocol has a message for it

    game          the id of a game with an announcement of its own, or another name that the masters
                  list; that is announced by HTTP
    port          the game server's port, where players find it
    masters       HOST or HOST:PORT, or a list of them; https://HOST[:PORT] for games that are
                  announced by HTTP
    dialect       for AIO, "text" or "framed"; by default "text" if there is a name
    players_from  a file whose last line gives the players in the format of read_players(); it is
                  read a few times a second
    give_up       if True, run() ends when all masters have only refused; `failure` then says why
    **fields      name, players, max_players, playing, map, mode, version, description

    A wrong argument raises ValueError. Some masters query the game server by UDP. If that port is
    free, the queries are answered here; otherwise the game server has to answer them. An instance
    can run only once. """

    failure = ""
    stopping = False                    # no threading.Event; see MasterServer.stopping
    has_complained = False              # True if the log says already that the players are unknown

    def __init__(self, game: str, port: int, masters: Union[str, Sequence[str]],
                 dialect: str = "", players_from: str = "", give_up: bool = False,
                 **fields: Any) -> None:
        """Check the arguments. Nothing is announced before start() or run() is called."""
        check_is_file(players_from)
        if isinstance(masters, str):
            masters = [masters]
        if not masters:
            raise ValueError("expected a master")
        for room in GAMES:
            if game in (room.game, *room.titles) and not room.announced_over:
                raise ValueError(announces_itself(room, game, masters))
        self.room = ROOMS.get(game, Game)()
        if dialect and dialect not in self.room.dialects:
            raise ValueError("%s has no dialect %s" % (game, dialect))
        self.room.dialect = dialect or self.room.default_dialect(fields)
        # Masters query the port `offset` after it. The number may be given as text
        game_port = number_reader(1, MAX_PORT - self.room.offset)(str(port))
        self.server = Server(
            read_game_id(game), address="", port=game_port, source="", now=0.0, lifetime=math.inf,
            name="%s server" % (self.room.title or game))
        self.update(**fields)
        self.masters = [self.read_master(master) for master in masters]
        self.players_from = players_from
        self.give_up = give_up
        self.surplus_limiter = Limiter(SURPLUS_BYTES)
        self.thread = threading.Thread(target=self.run, daemon=True)

    def read_master(self, text):
        host, named_port, tls = read_master_place(text)
        if tls and self.room.announced_over != "http":
            raise ValueError("%s is not announced by HTTPS" % self.server.game)
        # By HTTP a server is announced at the master's page
        room = Game if self.room.announced_over == "http" else self.room
        port = named_port or room.master_port
        return AnnouncedMaster(
            host.encode("idna").decode("ascii"), port + self.room.announce_offset, tls)

    def update(self, **fields: Any) -> None:
        """Announce these values from now on. Any thread may call this.

        Raise ValueError if a value cannot be announced; then none of them is."""
        for name, value in fields.items():
            is_of_its_type = type(value) is ANNOUNCED_ATTRIBUTES.get(name)
            is_out_of_range = type(value) is int and not 0 <= value <= PLAYERS_MAX
            if not is_of_its_type or is_out_of_range:
                raise ValueError("%s=%r cannot be announced" % (name, value))
            self.room.check_announced(name, value)
        for name, value in fields.items():
            if isinstance(value, str):
                value = clean(value, TEXT_CHARACTERS)
            setattr(self.server, name, value)

    def start(self):
        """Begin to announce in new threads, and return at once. A second call does nothing."""
        if not self.thread.is_alive():
            self.thread.start()

    def stop(self):
        """Sign off from all masters and stop. Any thread and any signal handler may call this.

        Each master that does not answer delays the return by 3 s."""
        self.stopping = True
        if self.thread.is_alive():
            self.thread.join()

    def __enter__(self) -> Announcement:
        self.start()
        return self

    def __exit__(self, *exception):
        self.stop()

    def run(self):
        """Announce until stop() is called or, with give_up, until all masters have refused."""
        # A master may query the server as soon as it is announced
        query_socket = self.open_query_socket()
        threads = []
        for master in self.masters:
            thread = threading.Thread(target=self.keep_announced, args=[master], daemon=True)
            thread.start()
            threads.append(thread)
        while not self.stopping:
            if self.players_from:
                self.update_players_from_file()
            if self.give_up and all(master.was_accepted is False for master in self.masters):
                self.failure = "; ".join(
                    "%s: %s" % (master.name, master.state) for master in self.masters)
                self.stopping = True
            elif query_socket:
                self.answer_query(query_socket)
            else:
                time.sleep(STEP_S)
        for thread in threads:
            thread.join(GOODBYE_S)
        if query_socket:
            query_socket.close()

    def is_over(self):
        return self.stopping

    def keep_announced(self, master):
        """Announce to one master until stop() is called. A thread for each master runs this."""
        while not self.stopping:
            pause_s = 0.0
            try:
                self.talk_to(master)
            except MasterRefused as refused:
                # The state is set first: as soon as all masters have refused, run() may end the
                # program and give this state as its reason
                master.set_state(clean(str(refused), TEXT_CHARACTERS))
                pause_s = refused.again_after_s
                if master.was_accepted is None:
                    master.was_accepted = False
            except (OSError, OverflowError, Malformed) as error:
                master.set_state(clean(error_text(error), TEXT_CHARACTERS))
                pause_s = master.pause_s
                master.pause_s = min(2 * pause_s, RETRY_MAX_S)
            pause(pause_s, self.is_over)
        if self.room.announced_over == "http":
            with contextlib.suppress(OSError, Malformed):
                farewell = Send(self.room.farewell(self.server), RESPONSE_S, "/announce")
                http_answer(master.web_place(), farewell)

    def talk_to(self, master):
        """Announce to one master, in one conversation, until stop() is called.

        By UDP, return after RESOLVE_S, so that the master's name is looked up again. Raise OSError,
        Malformed, or MasterRefused if the master refuses the server."""
        master.address = resolve_host(master.host)
        conversation = self.room.announce(self.server)
        if self.room.announced_over == "http":
            converse_by_http(conversation, master.web_place(), master.on_step, self.is_over)
        elif self.room.announced_over == "tcp":
            endpoint = master.address, master.port
            with socket.create_connection(endpoint, CONNECT_S) as sock:
                converse(conversation, sock, master.on_step, self.is_over)
                self.sign_off(sock)
        else:
            ends = time.monotonic() + RESOLVE_S
            with udp_socket(master.address, master.port) as sock:
                converse(conversation, sock, master.on_step,
                         lambda: self.stopping or time.monotonic() >= ends)
                self.sign_off(sock)

    def sign_off(self, sock):
        farewell = self.room.farewell(self.server)
        if self.stopping and farewell:
            sock.sendall(farewell)

    def open_query_socket(self):
        """Return a socket on the UDP port on which masters query the game server.

        Return None if masters of this game do not query, or if the game server has the port."""
        if self.room.answer is None:
            return None
        port = self.server.port + self.room.offset
        try:
            sock = bound_socket(socket.AF_INET, "udp", "0.0.0.0", port)
        except OSError as error:
            log.info("masters' queries on UDP port %d are left to the game server: %s", port, error)
            return None
        log.info("masters' queries are answered here, on UDP port %d", port)
        sock.settimeout(STEP_S)
        return sock

    def answer_query(self, sock):
        """Wait up to STEP_S for a query, and answer it. Malformed queries are dropped.

        An answer that is not longer is never sent: after one query with a forged source, two ports
        could answer each other for ever. A longer answer could flood a forged source; AIO's has a
        thousand times the bytes of its query. So the surplus is limited: each master has a bucket
        of its own, and all other peers share one."""
        with contextlib.suppress(OSError, Malformed):
            data, (source, port) = sock.recvfrom(MAX_DATAGRAM_BYTES)
            answer = self.room.answer(self.server, data)
            surplus = len(answer) - len(data)
            masters = [master.address for master in self.masters]
            bucket = source if source in masters else ""
            if surplus > 0 and self.surplus_limiter.allow(bucket, time.monotonic(), surplus):
                sock.sendto(answer, (source, port))

    def update_players_from_file(self):
        try:
            with open(self.players_from, encoding="utf-8-sig", errors="replace") as file:
                text = file.read().strip()
        except (OSError, ValueError) as error:
            self.complain_once(error)
            return
        _, _, last_line = text.rpartition("\n")
        self.update_players(last_line)

    def update_players(self, line):
        """Announce what a line says, in the format of read_players(). Any thread may call this."""
        if not line.strip():        # a file that is being written is empty for a moment
            return
        try:
            self.update(**read_players(line))
            self.has_complained = False
        except ValueError as error:
            self.complain_once(error)

    def complain_once(self, error):
        # A script that writes a wrong line may do so every second
        if not self.has_complained:
            log.warning("the players are not known: %s", error)
        self.has_complained = True


def read_players(line):
    """Return the fields of Announcement in a line such as `5`, `5/16` or `5/16 map name`.

    They are players, max_players and map. Raise ValueError for a line in another format."""
    match = re.fullmatch(r"(\d{1,5})(?:\s*/\s*(\d{1,5}))?(?:\s+(.+))?", line.strip())
    if not match:
        raise ValueError("%r is not PLAYERS, PLAYERS/MAXIMUM or PLAYERS/MAXIMUM MAP" % line[:60])
    players, max_players, map = match.groups()
    fields: Dict[str, Union[int, str]] = {"players": int(players)}
    if max_players:
        fields["max_players"] = int(max_players)
    if map:
        fields["map"] = map
    return fields


def announces_itself(room, game, masters):
    """Return the words that tell how a server of this game announces itself to the first master."""
    words = "%s's servers announce themselves." % GAME_TITLES[game]
    host, named_port, tls = read_master_place(masters[0])
    port = named_port or room.master_port
    url = "%s://%s" % ("https" if tls else "http", endpoint_text(host, port))
    for contact in room.contacts:
        block = contact.filled(room, port, MasterPlace(host, url))
        if game in block.games:
            words += "\n\n%s:\n\n%s" % (block.where, block.block)
    return words


def command_announce(arguments):
    fields = {}
    for name in ANNOUNCED_ATTRIBUTES:
        value = getattr(arguments, name, None)
        if value is not None:
            fields[name] = value
    from_stdin = arguments.players_from == "-"
    players_file = "" if from_stdin else arguments.players_from
    try:
        announcement = Announcement(
            arguments.game, arguments.port, arguments.masters, dialect=arguments.dialect,
            give_up=True, players_from=players_file, **fields)
    except ValueError as error:
        raise SettingsError("announce: %s" % error) from None
    start_log(Settings({"server.log_level": "debug" if arguments.verbose else "info"}))
    on_signals(announcement.stop, *STOP_SIGNALS)
    if from_stdin or arguments.exit_with_stdin:
        read_stdin(announcement.update_players, announcement.stop)
    announcement.run()
    if announcement.failure:
        raise StartError("announce: no master accepts this server: %s" % announcement.failure)
    return EXIT_OK


# --- Asking game servers and masters -------------------------------------------------------------

def ping(room, host, port, tries=ASK_TRIES):
    """Query a game server, and return the attributes in its answers, and the ping.

    Raise OSError or Malformed if there is no answer."""
    target = Target(room, resolve_host(host), port, NAMED)
    with udp_socket(target.address, port + room.offset) as sock:
        fields = None
        while fields is None:
            try:
                fields, data, ping_ms = ask(sock, room, target, tries)
            except TimeoutError:
                fields = room.answers_so_far(target)
                if fields is None:
                    raise
        goodbye = room.goodbye(data)
        if goodbye:
            sock.send(goodbye)
    return {**fields, "ping_ms": ping_ms}


def ask(sock, room, target, tries):
    """Send the next question to a target up to `tries` times, until an answer comes.

    Return what the room reads in it, the answer itself, and the milliseconds that it took. Raise
    TimeoutError if none comes, and OSError if nobody has the port."""
    sock.settimeout(ASK_WAIT_S)
    trouble = ""
    for _ in range(tries):
        target.nonce = room.nonce()
        target.asked_at = time.monotonic()
        try:
            sock.send(room.question(target))
            data = sock.recv(MAX_DATAGRAM_BYTES)
            room.check_length(data)
            fields = room.read_answer(target, data)
        except (Malformed, Refused) as error:
            trouble = "; what came is not an answer: %s" % error
        except socket.timeout:
            pass
        else:
            return fields, data, round((time.monotonic() - target.asked_at) * 1000, 1)
    raise TimeoutError("no answer from UDP port %d%s" % (target.port + room.offset, trouble))


def fetch_any_dialect(room, host, port, tls=False, **choice):
    """Fetch a master's list in the first of the room's dialects that it speaks, as fetch_list()."""
    troubles = []
    for dialect in room.dialects or [""]:
        room.dialect = dialect
        try:
            return list(fetch_list(room, host, port or room.master_port, tls, **choice))
        except (TimeoutError, ConnectionResetError, Malformed) as error:
            if not room.dialects:
                raise
            troubles.append("none in the %s dialect (%s)" % (dialect, error_text(error)))
    raise Malformed("no list: " + ", ".join(troubles))


# --- What all commands use -----------------------------------------------------------------------

def argument(read):
    """Return a type for argparse. argparse itself does not show the message of a ValueError."""
    def read_argument(text):
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return read_argument


class ToolError(Exception):
    """Ends a command with one of the EXIT_ statuses and a message for the user."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


@contextlib.contextmanager
def failing_with(status, subject, *errors):
    """Turn these errors into a ToolError with this exit status. Its message is `subject`, a colon,
    and the text of the error."""
    try:
        yield
    except errors as error:
        # The text may come from another machine, so it is cleaned
        text = clean(error_text(error), TEXT_CHARACTERS)
        raise ToolError(status, "%s: %s" % (subject, text)) from None


def say(text):
    """Print a line to standard output. Raise ToolError if that fails, as on a full disk."""
    with failing_with(EXIT_FAILED, "standard output", OSError):
        print(text, flush=True)


def write_file(path, data):
    """Replace the content of a file at once: a reader finds the old or the new content, no mixture.

    A pipe or a device is written to directly. Raise OSError if that fails."""
    path = os.path.realpath(path)       # of a link, the file is replaced and not the link
    new_path = path if is_special(path) else path + ".new"
    with open(new_path, "wb") as file:
        file.write(data)
    if new_path != path:
        os.replace(new_path, path)


def read_stdin(on_line, on_end):
    """Start a thread that calls on_line(text) for each line of standard input, and on_end() when it
    ends."""
    def read():
        # An OSError means that there is no standard input, or no longer: it counts as ended
        with contextlib.suppress(OSError), open(0, "rb", closefd=False) as file:
            for line in file:
                on_line(line.decode("utf-8-sig", "replace"))
        log.info("standard input has ended")
        on_end()

    threading.Thread(target=read, name="masterserver stdin", daemon=True).start()


STOP_SIGNALS = "SIGINT", "SIGTERM", "SIGBREAK"      # the first is Ctrl+C, the last Ctrl+Break


def on_signals(call, *names):
    """Call `call()` whenever one of the signals with these names comes. Windows has no SIGHUP,
    other systems have no SIGBREAK."""
    for name in names:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, frame: call())


# --- Serving ------------------------------------------------------------------------------------

def command_serve(arguments):
    if arguments.print_config:
        say(config_text()[:-len("\n")])
        return EXIT_OK
    settings = load_settings(arguments)
    if arguments.check:
        return check_settings(settings)
    log_file = start_log(settings)

    def reload():
        if log_file:
            log_file.is_outdated = True         # a tool may have rotated it
        return load_settings(arguments)

    descriptor_limit(settings["limits.connections_total"] + DESCRIPTORS_KEPT)
    program = MasterServer(settings, reload=reload)
    program.log_file = log_file
    on_signals(lambda: program.post(program.reload), "SIGHUP")
    on_signals(program.stop, *STOP_SIGNALS)
    try:
        serve(program, arguments)
    except StartError as error:
        if settings["server.log_file"]:         # a scheduled task may have no standard error
            log.error("%s", error)
        raise
    finally:
        program.close()
    log.info("stopped")
    return EXIT_OK


def load_settings(arguments):
    """Return the Settings of the command line and of the ini that --config names, or else of
    masterserver.ini beside the program, if it exists."""
    # PyInstaller and similar programs unpack this file into a temporary folder
    program = sys.executable if getattr(sys, "frozen", False) else __file__
    default_path = os.path.join(os.path.dirname(os.path.abspath(program)), "masterserver.ini")
    overrides = list(arguments.set)
    if arguments.verbose:
        overrides.append("server.log_level=debug")
    return Settings.load(arguments.config or default_path, overrides,
                         missing_ok=not arguments.config)


def serve(program, arguments):
    """Open the ports, log where the master listens, and run until it is stopped."""
    if hasattr(gc, "set_threshold"):            # PyPy's collector has none
        # By default Python looks for reference cycles after every 700 new objects (2,000 from 3.13
        # on). Listed servers have no cycles, and with fewer searches they are listed 4 % faster.
        # Every fifth search is one of up to 50,000 objects, which takes 15 ms. One of all objects
        # would stop the loop for half a second with 100,000 servers, so it is rare
        gc.set_threshold(10_000, 4, 1000)
    program.bind()
    if arguments.ready_file:
        # The poller's port is left out, because other programs only answer it
        listeners = [listener._asdict() for listener in program.listeners
                     if listener.protocol != "poll"]
        ready = json.dumps({"pid": os.getpid(), "listeners": listeners}) + "\n"
        with failing_with(EXIT_FAILED, "the ready file cannot be written", OSError):
            write_file(arguments.ready_file, ready.encode())
    for line in first_contact(program):
        log.info("%s", line)
    for line in program.settings.warnings:
        log.warning("%s", line)
    if arguments.exit_with_stdin:
        read_stdin(lambda line: None, program.stop)
    program.run()


def first_contact(program):
    """Return the lines that the log begins with: the open ports, the lines for game servers'
    settings, and the address of the page."""
    settings = program.settings
    host = settings["server.public_address"] or own_address() or "localhost"
    url = page_url(program, host)
    listeners = {}                              # a port may be open at several addresses
    for protocol, transport, _, port in program.listeners:
        listeners["%s on %s %d" % (protocol, transport.upper(), port)] = None
    lines = ["; ".join(listeners)]
    for contact in contact_blocks(program, MasterPlace(host, url)):
        lines.append("%s. %s:" % (contact.title, contact.where))
        lines += ["    " + line for line in contact.block.splitlines()]
    if url:
        lines.append("Players and browsers: %s/" % url)
    return lines


# --- Checking the settings ----------------------------------------------------------------------

def check_settings(settings):
    """Run --check: print warnings about the settings, and try to open all ports. Raise StartError
    or ToolError if the master cannot start with these settings."""
    for text in settings.warnings + reach_warnings(settings):
        say("warning: " + text)
    for name in "server.log_file", "server.database":
        with setting_file(settings, name) as path:
            check_is_file(path)
    if settings["cluster.redis"]:
        check_engine(settings["cluster.redis"])
    check_upstreams(settings)
    # The trial must not change the database, and other masters must not notice it
    settings.values.update({
        "server.database": "", "cluster.redis": None, "upstream.masters": ()})
    program = MasterServer(settings)
    if program.rules.country_file:
        say("[http] countries: " + country_file_text(program.rules.country_file))
    if is_running(settings):
        say("A master is running on these ports, so they were not tried. The other settings are "
            "right.")
        return EXIT_OK
    try:
        program.bind()
    finally:
        program.close()
    say("The server can start with these settings.")
    return EXIT_OK


def is_running(settings):
    """Return whether a master answers on the first port of the page."""
    host, *_ = settings["server.bind"]
    for port in settings["http.ports"][:1]:
        address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        connection = http.client.HTTPConnection(address, port, timeout=2)
        no_answer = contextlib.suppress(OSError, http.client.HTTPException)
        with contextlib.closing(connection), no_answer:
            connection.request("GET", "/healthz")
            return b'"cluster":' in connection.getresponse().read(RECV_BYTES)
    return False


def reach_warnings(settings):
    """Return warnings about settings that may keep players from reaching listed servers."""
    warnings = []
    public_address = settings["server.public_address"]
    if not public_address:
        warnings.append(
            "[server] public_address is empty: game servers on this machine that announce "
            "to localhost are listed as 127.0.0.1, where no other machine finds them. Set it to "
            "the address that players use.")
    elif public_address in LOCAL_NETWORKS:
        warnings.append("[server] public_address: %s is private; players outside "
                        "cannot reach what is listed there." % public_address)
    bind_addresses = settings["server.bind"]
    if all(map(is_loopback, bind_addresses)):
        warnings.append("[server] bind: %s can be reached from this machine only."
                        % ", ".join(bind_addresses))
    has_list_port = 27790 in settings["http.ports"] or 27795 in settings["http.ports"]
    if settings["iceball.port"] is not None and not has_list_port:
        warnings.append("[http] ports: Iceball's players ask for the list on port 27790 or 27795.")
    return warnings


def check_engine(engine):
    """Try the connection to Redis or Valkey. Raise ToolError if it does not work."""
    # An AttributeError is raised under Windows, where Python has no Unix sockets
    with failing_with(EXIT_FAILED, "[cluster] redis", Malformed, OSError, ValueError,
                      AttributeError):
        with contextlib.closing(EngineLink(engine)) as link:
            info = link.ask("INFO")
        if not re.search(rb"redis_version:([6-9]|\d\d)", info):
            raise Malformed("it is too old; masters need Redis 6 or Valkey")
        if b"policy:noeviction" not in info:
            say("warning: [cluster] redis: its maxmemory-policy may drop what the masters have"
                " written; set noeviction.")


def check_upstreams(settings):
    """Fetch each list that [upstream] names once. One that cannot be fetched is a warning."""
    own_addresses = find_own_addresses(settings)
    for upstream in settings["upstream.masters"]:
        room = ROOMS[upstream.game]()
        if not room.is_on(settings):
            section, _, key = (room.switch or room.game + ".port").partition(".")
            say("warning: [upstream] %s: the game is switched off here, by [%s] %s."
                % (upstream.label, section, key))
            continue
        try:
            servers, left_out = fetch_upstream(
                upstream, own_addresses, collections.OrderedDict(),
                settings["limits.servers_per_source"])
        except (Malformed, OSError, OverflowError, ValueError) as error:
            say("warning: [upstream] %s: no list: %s"
                % (upstream.label, clean(error_text(error), TEXT_CHARACTERS)))
        else:
            say("[upstream] %s: %s" % (upstream.label, fetched_text(servers, left_out)))


# --- A test of the webhooks ----------------------------------------------------------------------

def command_notify(arguments):
    """Post a message about an invented server to the named webhooks or, without names, to all."""
    settings = load_settings(arguments)
    webhooks = settings["webhooks"]
    server = Server("iceball", "203.0.113.7", 20737, source="", now=0.0, lifetime=0.0,
                    name="A test of the news", players=5, max_players=16, map="castle")
    entry = with_times(server_json(server), server, time.time(), "")
    titles = {**GAME_TITLES, **settings["games"]}
    status = EXIT_OK
    for name in arguments.name or webhooks or [""]:
        if name not in webhooks:
            raise ToolError(EXIT_USAGE, "[webhooks] has no such NAME: '%s'" % without_secrets(name))
        format_name, url = webhooks[name].split()
        media_type, body = news_message(format_name, server, titles, settings, entry)
        http_status, _ = post_url(url, media_type, body)
        say("%s: %s" % (name, http_status))
        if not http_status.startswith("2"):
            status = EXIT_FAILED
    return status


# --- list and ping ------------------------------------------------------------------------------

def command_ping(arguments):
    host, port = arguments.endpoint
    with failing_query(host, port):
        result = ping(ROOMS[arguments.game](), host, port)
    result.pop("private", None)
    # The details, which differ by game, are printed like the other fields
    result.update(result.pop("details", NO_DETAILS))
    print_result(arguments, host, port, result)
    return EXIT_OK


def command_list(arguments):
    room = ROOMS[arguments.game]()
    host, port, tls = arguments.endpoint
    port = port or room.master_port
    if tls and room.fetched_over != "http":
        raise ToolError(EXIT_USAGE, "The list of %s is not fetched by HTTPS." % arguments.game)
    choice = {option.name: getattr(arguments, option.name) for option in room.list_options}
    with failing_query(host, port):
        servers = fetch_any_dialect(room, host, port, tls, **choice)
    for server in servers:
        server.pop("private", None)
    print_result(arguments, host, port, {"servers": servers})
    return EXIT_OK


def failing_query(host, port):
    """Return a context manager that turns the errors of a query to this host into a ToolError."""
    return failing_with(EXIT_FAILED, endpoint_text(host, port),
                        Malformed, OSError, OverflowError, ValueError)


def print_result(arguments, host, port, result):
    """Print the result of a query, which is a dict: with --json as JSON, otherwise as text."""
    result = {"game": arguments.game, "address": host, "port": port, **result}
    lines = []
    if arguments.json:
        say(json.dumps(result, indent=2))
        return
    if "servers" in result:
        for server in result["servers"]:
            players = str(server.get("players", "-"))
            if server.get("max_players"):
                players += "/%d" % server["max_players"]
            endpoint = endpoint_text(server["address"], server["port"])
            lines.append("%7s  %-21s  %s" % (players, endpoint, server.get("name", "")))
        say("\n".join(lines) or "no servers")
        return
    for name, value in result.items():
        if value not in (None, ""):
            lines.append("%-12s %s" % (name, value))
    say("\n".join(lines))


# --- Export -------------------------------------------------------------------------------------

EXPORT_TOTAL_S = 60.0               # for all queries; enough for 3,000 servers that do not answer
EXPORT_FTP_S = 30.0                 # for each answer of the FTP server, whose disk may sleep
# The exit statuses of the script in Hyperbol's document
EXIT_CONNECTION, EXIT_IDENTIFIER, EXIT_EMPTY, EXIT_FILE, EXIT_FTP = 3, 4, 6, 7, 8


def command_export(arguments):
    if not arguments.every:
        say(export_once(arguments))
        return EXIT_OK
    # Each of these signals raises KeyboardInterrupt, even in the middle of a query
    on_signals(functools.partial(signal.default_int_handler, signal.SIGINT, None), *STOP_SIGNALS)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            try:
                say(export_once(arguments))
            except ToolError as error:          # the next export may succeed
                complain(str(error))
            time.sleep(arguments.every)
    return EXIT_OK


def export_once(arguments):
    """Fetch a list, query its servers, write the file, and upload it if asked to. Return a sentence
    for the user that sums it up. Raise ToolError if a step fails."""
    room = ROOMS[arguments.game]()
    host, port, _ = arguments.master
    port = port or room.master_port
    master = endpoint_text(host, port)
    path = arguments.output
    with failing_with(EXIT_CONNECTION, "No list from " + master, OSError, ValueError):
        with failing_with(EXIT_IDENTIFIER, master + " is not a Hyperbol master", Malformed):
            entries = list(fetch_list(room, host, port))
    if not entries:
        raise ToolError(EXIT_EMPTY, "The list of %s is empty; %s is left as it is."
                        % (master, path))

    deadline = time.monotonic() + EXPORT_TOTAL_S
    query = functools.partial(queried_server, type(room), deadline=deadline)
    # So many at once, with a socket each. macOS allows a program 256 open files
    with concurrent.futures.ThreadPoolExecutor(200) as pool:
        servers = list(pool.map(query, entries))

    exported = room.lists()[room.exported]
    xml = exported.join(list(map(exported.entry, servers)), time.time())
    with failing_with(EXIT_FILE, path + " cannot be written", OSError):
        write_file(path, xml)
    if arguments.ftp:
        upload(arguments.ftp, os.path.basename(path), xml)
    responding = sum(server.responding for server in servers)
    players = sum(server.players for server in servers)
    return "%s, %d of them responding, %s: %s written." % (
        count_text(len(servers), "server"), responding, count_text(players, "player"), path)


def queried_server(room_class, entry, deadline):
    """Return a Server with the values of its answer. If it does not answer, or if the deadline has
    passed already, it is marked as not responding."""
    address = entry["address"]
    port = entry["port"]
    fields: Dict[str, Any] = {"responding": False}
    if time.monotonic() < deadline:
        # The socket raises OverflowError if the list has a port number above 65535
        with contextlib.suppress(Malformed, OSError, OverflowError):
            # Two queries take up to 4 s; the script in the document waits for 3 s
            fields = ping(room_class(), address, port, tries=2)
    return Server(room_class.game, address, port, source=address, now=0.0, lifetime=0.0,
                  private=entry, **fields)


def read_ftp_url(text):
    """Return the result of urlsplit() for ftp://USER@HOST[:PORT]/PATH/. Raise ValueError for a URL
    of another kind, and for one with a password: others can see the arguments of a program."""
    url = urllib.parse.urlsplit(text)
    is_complete = url.scheme == "ftp" and url.hostname and url.port != 0
    if not is_complete or url.password:
        raise ValueError("expected ftp://USER@HOST/PATH/; the password is read from the environment"
                         " variable MASTERSERVER_FTP_PASSWORD or from ~/.netrc")
    return url


def ftp_login(url):
    """Return the user and the password for an FTP URL. An anonymous login has "" for both."""
    user = urllib.parse.unquote(url.username or "")
    password = os.environ.get("MASTERSERVER_FTP_PASSWORD", "")
    login = None
    if not password:
        with contextlib.suppress(FileNotFoundError):
            login = netrc.netrc().authenticators(url.hostname)
    # ~/.netrc may also give the user
    netrc_user, _, netrc_password = login or ("", "", password)
    return user or netrc_user, netrc_password


def upload(url, file_name, data):
    """Store data at an FTP URL, under `file_name` if the URL ends in a folder. Raise ToolError."""
    # Latin-1 has a character for each byte. So every answer of the FTP server can be decoded, and
    # the bytes of the URL's path are sent unchanged
    encoding = "latin-1"
    path = urllib.parse.unquote(url.path[len("/"):], encoding)
    if not path or path.endswith("/"):
        path += file_name
    with failing_with(EXIT_FTP, "The upload to %s failed" % url.hostname, *ftplib.all_errors,
                      ValueError, netrc.NetrcParseError):
        with ftplib.FTP(timeout=EXPORT_FTP_S) as ftp:
            ftp.encoding = encoding
            ftp.connect(url.hostname, url.port or ftplib.FTP_PORT)
            ftp.login(*ftp_login(url))
            ftp.storbinary("STOR " + path, io.BytesIO(data))


# --- The commands and their arguments ------------------------------------------------------------

class Command(NamedTuple):
    """A command of the program, such as `announce`."""

    run: Callable[[argparse.Namespace], int]            # returns the exit status
    help: str
    options: Tuple[Any, ...]                            # the arguments, each by option()
    epilog: str = ""


def option(*names, **properties):
    """Return an argument of a command: what ArgumentParser.add_argument() is called with."""
    return names, properties


# These arguments choose the settings
SETTINGS_OPTIONS = (
    option("--config", metavar="FILE",
           help="read the settings from FILE, not from masterserver.ini beside the program"),
    option("--set", metavar="SECTION.KEY=VALUE", action="append", default=[],
           help="set this, whatever the ini says; repeatable"),
    option("-v", "--verbose", action="store_true", help="log at debug level"),
)
JSON_OPTION = option("--json", action="store_true", help="as JSON")
EXPORTED_GAMES = [room.game for room in GAMES if room.exported]
ANNOUNCED_GAMES = [room.game for room in GAMES if room.announced_over]
USUAL_PORTS = ["%s %d" % (room.game, room.master_port)
               for room in GAMES if room.announced_over in ("udp", "tcp")]

# To add a command, write a function command_NAME(arguments), and add its entry here. The empty name
# stands for the program without a command
COMMANDS = {
    "": Command(command_serve, """\
A master server for Iceball, Hyperbol, SubSpace, AIO and others. Without a command it serves.

commands, each with a --help of its own:
  announce  announce a game server that cannot do it itself
  ping      query a game server
  list      show a master's list
  export    write a master's list as XML
  notify    tell the webhooks in the settings, as a test""", (
        *SETTINGS_OPTIONS,
        option("--check", action="store_true",
               help="say what is wrong with the settings, or probably wrong on this machine, and "
                    "exit"),
        option("--print-config", action="store_true",
               help="print every setting with its default and its meaning"),
        option("--ready-file", metavar="FILE",
               help="write what listens where to FILE, as JSON, once everything listens"),
        option("--exit-with-stdin", action="store_true",
               help="exit when standard input is closed, as a child process should"),
        option("--version", action="version", version="masterserver.py " + __version__),
    ), EXIT_STATUSES),

    "announce": Command(command_announce, """\
Announce a game server to one or several masters, in its game's own protocol, until told to stop.
Start the game server first: where masters query the game server itself, they are answered here if
that UDP port is free.""", (
        option("--game", required=True, metavar="|".join(ANNOUNCED_GAMES) + "|NAME",
               help="any other NAME that the masters list is announced by HTTP"),
        option("--port", required=True, type=int, help="where players find the game server"),
        option("--players", type=int, help="how many there are now"),
        option("--max-players", type=int, help="how many there may be"),
        option("--name", help="as players see it"),
        option("--map", help="the map being played"),
        option("--mode", help="the game mode"),
        option("--description", help="a sentence or two (SubSpace, AIO, HTTP)"),
        option("--version",
               help="of the game; if left out, Iceball's is the default of [iceball] version"),
        option("--dialect", choices=["text", "framed"], default="",
               help="of AIO; text if there is a name, which framed does not carry"),
        option("--players-from", metavar="FILE|-", default="",
               help="read PLAYERS, PLAYERS/MAXIMUM or PLAYERS/MAXIMUM MAP from this file's last "
                    "line whenever it changes, or from each line of standard input"),
        option("-v", "--verbose", action="store_true", help="log at debug level"),
        option("--exit-with-stdin", action="store_true",
               help="exit when standard input is closed"),
        option("masters", nargs="+", metavar="MASTER[:PORT]",
               help="default ports: %s, others 27790; for others also https://MASTER[:PORT]"
                    % ", ".join(USUAL_PORTS)),
    ), EXIT_STATUSES),

    "ping": Command(command_ping, "Query a game server.", (
        option("endpoint", metavar="HOST:PORT", type=argument(read_endpoint),
               help="the game port, even where another one is queried"),
        option("--game", required=True,
               choices=sorted(room.game for room in GAMES if room.answers_queries)),
        JSON_OPTION,
    )),

    "list": Command(command_list, "Show a master's list.", (
        option("endpoint", metavar="HOST[:PORT]", type=argument(read_master_place),
               help="the master; without a port on its game's default; of iceball and luanti also "
                    "https://HOST[:PORT]"),
        option("--game", choices=sorted(room.game for room in GAMES if room.fetched_over),
               required=True),
        JSON_OPTION,
        *[option("--" + choice.name, default=choice.default, type=argument(choice.read),
                 help="of %s: %s" % (room.game, choice.help))
          for room in GAMES for choice in room.list_options],
    )),

    "export": Command(command_export, """\
Fetch the list of a Hyperbol master, query every server in it, and write the answers as XML, in
the form of Hyperbol's own list. A server that does not answer has responding="0".

The FTP password is read from the environment variable MASTERSERVER_FTP_PASSWORD or from ~/.netrc.
PATH begins in the user's folder (in the root if it begins with %2F); if it does not end in /, its
last part is the file's name.

Exit status: 0 done; 2 wrong usage; 3 no connection to the master, or no answer from it; 4 it is
not a Hyperbol master, or its list has more than 65,536 servers; 6 its list is empty; 7 the file
cannot be written; 8 the upload failed. With --every it goes on until a signal or Ctrl+C, and ends
with 0.""", (
        option("--game", choices=EXPORTED_GAMES, default=EXPORTED_GAMES[0],
               help="the master's game (%s)" % EXPORTED_GAMES[0]),
        option("master", metavar="HOST[:PORT]",
               type=argument(functools.partial(read_master_place, schemes=())),
               help="the master; on the usual port of its game if none is given"),
        option("--output", metavar="FILE", default="servers.xml",
               help="the file to write (servers.xml)"),
        option("--ftp", metavar="ftp://USER@HOST/PATH/", type=argument(read_ftp_url),
               help="upload it there; see above for the password"),
        option("--every", metavar="SECONDS", type=argument(number_reader(1, 86400, float)),
               help="repeat, with this long a pause"),
    )),

    "notify": Command(command_notify, "Tell the webhooks of a server, as a test.", (
        *SETTINGS_OPTIONS,
        option("name", metavar="NAME", nargs="*", help="of a webhook; none: all"),
    ), EXIT_STATUSES),
}


class ArgumentParser(argparse.ArgumentParser):
    """Hides secrets in error messages, which repeat a part of the command line."""

    def error(self, message):
        words = [without_secrets(word) for word in message.split(" ")]
        super().error(" ".join(words))


def main(argv=None):
    """Run the command that the command line names, and return the exit status. `argv` has the
    arguments after the program's name; None means those of the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = ""
    if COMMANDS.keys() & set(arguments[:1]):
        name = arguments.pop(0)
    command = COMMANDS[name]
    parser = ArgumentParser(
        prog=("masterserver.py " + name).strip(), description=command.help, epilog=command.epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    for names, properties in command.options:
        parser.add_argument(*names, **properties)
    try:
        return command.run(parser.parse_args(arguments))
    except KeyboardInterrupt:
        return EXIT_FAILED
    except ToolError as error:
        status, message = error.status, str(error)
    except SettingsError as error:
        status, message = EXIT_USAGE, str(error)
    except StartError as error:
        status, message = EXIT_FAILED, str(error)
    finally:
        end_log()
    complain(message)
    return status


if __name__ == "__main__":
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr,unused-ignore]
    exit_status = main()
    # The program ends at once, without the interpreter's own clean-up. That would wait for a
    # terminal in which somebody selects text, and a signal in that time would change the status
    os._exit(exit_status)
