#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""masterserver.py: where game servers announce themselves and players find them.

    python3 masterserver.py                 serve; the page is at http://localhost:27790/
    python3 masterserver.py --help          every other thing it can do
    python3 masterserver.py --print-config  every setting, with its default and its meaning

One file, standard library only, CPython 3.8 or later or PyPy. Read from the top, each section uses only what stands above it:

     1  this text                   7  protocols: Iceball, poller, Hyperbol, SubSpace, AIO
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

Sections 3 to 10 do no I/O and read no clock: a protocol takes bytes and the time and gives bytes back, so every one of them is
tested with recorded packets and a clock that the test moves. To add a game, see PROTOCOLS in section 10.

Licence: MIT, see the end of README.md.
"""
from __future__ import annotations

import argparse
import collections
import configparser
import difflib
import errno
import functools
import gzip
import hashlib
import heapq
import html
import http.server
import io
import ipaddress
import itertools
import json
import logging
import logging.handlers
import os
import queue
import random
import re
import selectors
import signal
import socket
import string
import struct
import sys
import threading
import time
import urllib.parse
import zlib
from datetime import datetime, timezone
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

__version__ = "1.0"

log = logging.getLogger("masterserver")

# =====================================================================================================================
# 2  Limits
#
# Every number that bounds something, with its reason or its source. What an operator may want to change is a setting
# (section 3); these are the rest.
# =====================================================================================================================

TICK_S = 1.0                        # protocols are ticked this often; their documents count in whole seconds
DRAIN_DATAGRAMS = 64                # datagrams read from one socket before the others get their turn
DRAIN_ACCEPTS = 64                  # the same for new connections
MAX_DATAGRAM_BYTES = 4096           # no document has a datagram over 520 bytes; a longer one is cut and found malformed
UDP_BUFFER_BYTES = 8 << 20          # 5,000 announcements (half a second at 10,000/s) cost about 4 MB of kernel memory
RECV_BYTES = 65536                  # one read from a connection
LINGER_S = 5.0                      # how long what a peer still sends is read away after our last byte …
LINGER_BYTES = 65536                # … and how much of it; then the connection is closed whatever comes
OUTPUT_STALL_S = 20.0               # a reader that takes nothing for so long has gone
OUTPUT_TOTAL_S = 120.0              # and one that takes longer than this for one answer is not reading it
ACCEPT_PAUSE_S = 1.0                # out of descriptors: accept() would fail at once again, so the listener rests

NAME_CHARACTERS = 128               # Hyperbol has 32, Iceball 30, SubSpace 32 bytes; AIO sets none
TEXT_CHARACTERS = 512               # a description; SubSpace's 386 bytes are the longest in a document
PLAYERS_MAX = 65535                 # the widest field in a list (Iceball, SubSpace: u16)

COOKIE_WINDOW_S = 30                # a cookie lives one to two windows; deployed servers return it within a second
COOKIE_MAC_BYTES = 8                # 2**64 guesses: a forger at 100,000 packets a second needs six million years
LIMITER_SOURCES = 16384             # sources remembered by one limiter, about 3 MB
HEARD_SOURCES = 4096                # what became of the last packets, for /check, about 2 MB

HTTP_LINE_BYTES = 4096              # the longest request line; a /check address needs 60
HTTP_HEAD_BYTES = 16384             # line and headers; browsers behind proxies send up to 4 kB
HTTP_BODY_BYTES = 16384             # an announcement needs 500
HTTP_HEAD_S = 10.0                  # from a request's first byte to the end of its head
HTTP_BODY_S = 10.0                  # and from there to the end of its body
HTTP_IDLE_S = 30.0                  # a kept connection without a request; the page asks every 5 s
HTTP_PIPELINE_BYTES = 1 << 18       # answers made ahead of a reader; the requests behind them wait
HTTP_MEMO_BYTES = 16 << 20          # answers remembered, all together
HTTP_MEMO_REQUEST_BYTES = 2048      # a longer request is not worth remembering
GZIP_MIN_BYTES = 600                # below this the header costs more than it saves
GZIP_INLINE_BYTES = 65536           # compressed in the event loop (1 ms); more is done in the worker
GZIP_LEVEL = 5                      # within 3 % of level 9 on lists, at a third of its time
RENDER_S = 1.0                      # a list is made anew at most so often, however many ask and however fast it changes
RENDER_STALE_S = 15.0               # and at least so often, for the times in it
CACHE_S = 5                         # what a cache in front may keep: the page refreshes every 5 s
PAGE_ROWS = 2000                    # rows on one page; a search finds the others

# =====================================================================================================================
# 3  Settings
#
# One row a setting, with its type as the function that reads it. The ini, --set, --print-config, the README's table and
# the errors all come from this table. A setting marked live takes effect on reload, the others at the next start.
# =====================================================================================================================


class SettingsError(Exception):
    """A setting that cannot be used; the text names file, key and the nearest right name."""


def read_text(text: str) -> str:
    return text.strip()


def read_flag(text: str) -> bool:
    value = configparser.ConfigParser.BOOLEAN_STATES.get(text.strip().lower())
    if value is None:
        raise ValueError("yes or no is wanted")
    return value


def read_number(low: float, high: float, kind: Callable[[str], Any] = int) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            value = kind(text.strip())
        except ValueError:
            raise ValueError("a number is wanted") from None
        if not low <= value <= high:
            raise ValueError("a number from %g to %g is wanted" % (low, high))
        return value
    return read


def read_port(text: str) -> Optional[int]:
    """A port; empty switches the listener off, 0 takes a free one."""
    return read_number(0, 65535)(text) if text.strip() else None


def read_list(read: Callable[[str], Any], separator: str = ",") -> Callable[[str], Tuple[Any, ...]]:
    def read_all(text: str) -> Tuple[Any, ...]:
        return tuple(read(part.strip()) for part in text.split(separator) if part.strip())
    return read_all


def read_address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text.strip().strip("[]")))
    except ValueError:
        raise ValueError("%r is not an IP address" % text.strip()) from None


def read_unicast(text: str) -> str:
    """An address that a list may carry, or nothing."""
    if not text.strip():
        return ""
    if not is_unicast(read_address(text)):
        raise ValueError("%s cannot be the address of a server" % text.strip())
    return read_address(text)


def read_network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text.strip(), strict=False)
    except ValueError:
        raise ValueError("%r is not a network such as 203.0.113.0/24 or an address" % text.strip()) from None


def read_endpoint(text: str) -> Tuple[str, int]:
    """`ADDRESS:PORT` or `[ADDRESS]:PORT`; the address may be a host name."""
    host, _, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or not port.isdigit() or not 0 < int(port) <= 65535 or (":" in host and not bracketed):
        raise ValueError("%r is not ADDRESS:PORT" % text.strip())
    return host.strip("[]"), int(port)


def read_numeric_endpoint(text: str) -> Tuple[str, int]:
    host, port = read_endpoint(text)
    return read_address(host), port


def read_known_hyperbol(text: str) -> Tuple[str, int, int]:
    """`ADDRESS:PORT FLAVOR`; the address may be a host name."""
    place, _, flavor = text.partition(" ")
    return read_endpoint(place) + (read_number(0, 255)(flavor or "0"),)


def read_pattern(text: str) -> Pattern:
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise ValueError("%r is not a regular expression: %s" % (text, error)) from None


def read_choice(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.strip().lower() not in choices:
            raise ValueError("one of %s is wanted" % ", ".join(choices))
        return text.strip().lower()
    return read


def read_game_id(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9_-]{1,32}", text):
        raise ValueError("a game's id has 1 to 32 of a-z, 0-9, - and _")
    return text


def read_rate(text: str) -> Tuple[float, float]:
    """`100/400`: 100 a second, 400 at once."""
    rate, _, burst = text.partition("/")
    return read_number(0.01, 1e6, float)(rate), read_number(1, 1e6, float)(burst or rate)


def read_version(text: str) -> int:
    return iceball_version_number(text.strip())


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
    Setting("server", "bind", "0.0.0.0, ::", read_list(read_address),
            "Addresses to listen on. Games whose lists carry 4-byte addresses use the IPv4 ones."),
    Setting("server", "public_address", "", read_unicast,
            "The address that players use for game servers on this machine (127.0.0.1 means nothing to them).", live=True),
    Setting("server", "refuse_names", "", read_list(read_pattern, "\n"),
            "Names that are not listed: regular expressions, one a line, found anywhere, upper or lower case.", live=True),
    Setting("server", "log_level", "info", read_choice("debug", "info", "warning", "error"),
            "How much is logged; debug tells of every bad packet.", live=True),
    Setting("server", "log_file", "", read_text, "A file for the log, rotated at 10 MB; empty: standard error."),
    Setting("http", "ports", "27790, 27795", read_list(read_port),
            "TCP ports of the page and the lists. Iceball looks for both."),
    Setting("iceball", "port", "27790", read_port, "UDP port for announcements."),
    Setting("iceball", "version", "0.2.1-37", read_version,
            "The current version of the game: players with an older one are told of an update.", live=True),
    Setting("iceball", "accept_versions", "", read_list(read_text),
            "Versions that may be listed, such as 0.2.1 (every build of it) or 0.2.1-37; empty: all.", live=True),
    Setting("iceball", "timeout", "120", read_number(1, 86400, float),
            "Seconds after which a silent server goes from the list (the document's 120)."),
    Setting("hyperbol", "port", "20203", read_port, "TCP port of the list."),
    Setting("hyperbol", "servers", "", read_list(read_known_hyperbol, "\n"),
            "Known game servers, one a line: ADDRESS:PORT FLAVOR (0: unofficial; others: official, by kind of game).", live=True),
    Setting("subspace", "port", "4990", read_port, "UDP port of the zone list; announcements and pings come to the port after it."),
    Setting("subspace", "zones", "", read_list(read_endpoint, "\n"),
            "Known zones, one ADDRESS:PORT a line; they are pinged without announcing themselves.", live=True),
    Setting("aio", "port", "27011", read_port, "TCP port for servers and clients of every generation."),
    Setting("aio", "dialects", "text, binary, framed", read_list(read_choice("text", "binary", "framed")),
            "The dialects that are spoken on the port."),
    Setting("aio", "text_greeting_after", "1.2", read_number(0, 4, float),
            "Seconds of silence before the greeting that text clients wait for."),
    Setting("aio", "news", "", read_text, "What players read under News.", live=True),
    Setting("aio", "news_file", "", read_text, "A text file with the news instead; read again when it changes.", live=True),
    Setting("games", "", "", read_text, "Games of your own, announced by HTTP: id = Title.", live=True,
            read_key=read_game_id, example="mygame = My Game"),
    Setting("poll", "interval", "30", read_number(5, 3600, float),
            "Seconds between two questions to a game server that answers questions (Hyperbol, SubSpace, AIO).", live=True),
    Setting("poll", "rate", "500", read_number(1, 100000), "Questions a second at the most, to all servers together.", live=True),
    Setting("official", "", "", read_flag, "Servers marked as official.", live=True,
            read_key=read_numeric_endpoint, example="203.0.113.7:20737 = yes"),
    Setting("priority", "", "", read_number(-1000, 1000), "Servers that stand first (or, below 0, last) in every list.", live=True,
            read_key=read_numeric_endpoint, example="203.0.113.7:20737 = 10"),
    Setting("address_map", "", "", read_unicast,
            "Public addresses of game servers behind the same router as this master.", live=True,
            read_key=read_address, example="192.168.1.5 = 203.0.113.7"),
    Setting("bans", "", "", read_text, "Networks that may not announce, with the reason they are told.", live=True,
            read_key=read_network, example="198.51.100.0/24 = fake players"),
    Setting("blocked", "", "", read_text, "Networks that get no answer at all, with a reason for the operator.", live=True,
            read_key=read_network, example="192.0.2.66 = floods"),
    Setting("limits", "exempt", "127.0.0.0/8, ::1", read_list(read_network), "Networks without limits by source.", live=True),
    Setting("limits", "datagrams", "100/400", read_rate,
            "Datagrams from one source (an IPv4 address, an IPv6 /64): a second / at once. 32 busy servers send 32 at once.", live=True),
    Setting("limits", "requests", "10/50", read_rate,
            "Pings, list and page requests from one source: a second / at once.", live=True),
    Setting("limits", "connections", "20/100", read_rate, "New connections from one source: a second / at once.", live=True),
    Setting("limits", "connections_open", "64", read_number(1, 100000), "Open connections of one source.", live=True),
    Setting("limits", "connections_total", "2000", read_number(8, 100000),
            "Open connections in all; above it the one idle for longest makes room.", live=True),
    Setting("limits", "servers_per_source", "32", read_number(1, 1000000), "Listed servers of one source.", live=True),
    Setting("limits", "servers", "50000", read_number(1, 10000000), "Listed servers in all.", live=True),
)


class Settings:
    """Values by name: `settings["iceball.port"]`, and for a section of data a dict: `settings["official"]`."""

    def __init__(self, values: Optional[Mapping[str, str]] = None) -> None:
        """`values`: texts by name as for --set; anything wrong raises SettingsError."""
        self.path = ""
        self.values: Dict[str, Any] = {s.name: s.read(s.default) if s.key else {} for s in SETTINGS}
        for name, text in (values or {}).items():
            section, _, key = name.partition(".")
            self.put(section, key, str(text), "setting")

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def put(self, section: str, key: str, text: str, where: str) -> None:
        sections = {s.section for s in SETTINGS}
        if section not in sections:
            raise SettingsError("%s: no section [%s]%s" % (where, section, nearest(section, sections)))
        rows = {s.key: s for s in SETTINGS if s.section == section}
        row = rows.get(key) or rows.get("")
        if row is None:
            raise SettingsError("%s: [%s] has no key %s%s" % (where, section, key, nearest(key, rows)))
        try:
            if row.key:
                self.values[row.name] = row.read(text)
            else:
                self.values[row.name][row.read_key(key)] = row.read(text)
        except ValueError as error:
            raise SettingsError("%s: [%s] %s = %s: %s" % (where, section, key, text, error)) from None

    @classmethod
    def load(cls, path: str, overrides: Sequence[str] = (), missing_ok: bool = False) -> Settings:
        """Read the ini at `path`, then the overrides (`section.key=value`)."""
        self = cls()
        parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#", ";"))
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        # The parser's own pattern takes "[::1]:27790 = yes" for a section.
        parser.SECTCRE = re.compile(r"\[(?P<header>[^]:]+)\]\s*$")  # type: ignore[misc]
        try:
            found = parser.read(path, encoding="utf-8-sig")
        except configparser.Error as error:
            raise SettingsError("%s: %s" % (path, " ".join(str(error).split()))) from None
        except UnicodeDecodeError as error:
            raise SettingsError("%s: not UTF-8 text: %s" % (path, error)) from None
        if not found and not missing_ok:
            raise SettingsError("%s: cannot be read; is the name right?" % path)
        self.path = path if found else ""
        for section in parser.sections():
            if section not in {s.section for s in SETTINGS}:
                self.put(section, "", "", path)
            for key, text in parser.items(section):
                self.put(section, key, text, path)
        for item in overrides:
            name, equals, text = item.partition("=")
            section, dot, key = name.strip().partition(".")
            if not equals or not dot:
                raise SettingsError("--set %s: section.key=value is wanted" % item)
            self.put(section, key.strip(), text.strip(), "--set")
        return self

    def different(self, other: Settings) -> List[Setting]:
        return [s for s in SETTINGS if self.values[s.name] != other.values[s.name]]


def nearest(word: str, words: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, [w for w in words if w], 1, 0.5)
    return "; did you mean %s?" % close[0] if close else "; there are %s" % ", ".join(sorted(w for w in words if w))


def config_text() -> str:
    """masterserver.ini: every setting commented out at its default, with its help."""
    lines = ["# masterserver.ini: settings of masterserver.py. Every line here shows the default; remove the # to change one.",
             "# A wrong name or value is an error at start that says where. This file is what --print-config prints."]
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

Network = Union[ipaddress.IPv4Network, ipaddress.IPv6Network]
Pattern = Any                       # re.Pattern[str], which Python 3.8 cannot subscript
Peer = Tuple[Any, ...]              # as the socket gives it: (address, port) or (address, port, flow, scope)
Replies = List[Tuple[bytes, Peer]]


class Malformed(Exception):
    """Bytes that are not what the protocol's document says; the text names the field. The only exception of a decoder."""


def c_string(data: bytes) -> bytes:
    """Up to the first NUL; a field filled to its end has none."""
    return data.partition(b"\0")[0]


ANSI = re.compile("\x1b(?:\\[[0-?]*[ -/]*[@-~]|[@-_])?")
BREAKS = re.compile("[\t-\r\x85\u2028\u2029]+")
# Control, soft hyphen, bidirectional, zero-width, interlinear, tag characters, lone surrogates, non-characters
INVISIBLE = re.compile("[\0-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
                       "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff\ud800-\udfff\U000e0000-\U000e0fff]")
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
    for cut in range(1, 4):         # a lead byte within the last three whose character needs more than is there
        lead = raw[-cut] if cut <= len(raw) else 0
        if lead >= 0xC0:
            if cut < (2 if lead < 0xE0 else 3 if lead < 0xF0 else 4):
                raw = raw[:-cut]
            break
    return clean(raw.decode("utf-8", "replace"), characters)


def decode_legacy(raw: bytes, characters: int = NAME_CHARACTERS) -> str:
    """UTF-8 if valid, else Windows-1252 (whose five unassigned bytes become U+FFFD), cleaned."""
    try:
        return clean(raw.decode("utf-8"), characters)
    except UnicodeDecodeError:
        return clean(raw.decode("cp1252", "replace"), characters)


def clamp(value: int, high: int = PLAYERS_MAX) -> int:
    return 0 if value < 0 else high if value > high else value


LOCAL_NETWORKS = tuple(ipaddress.ip_network(n) for n in (
    "127.0.0.0/8", "::1/128",                                   # loopback
    "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16",            # RFC 1918
    "169.254.0.0/16", "fe80::/10", "fc00::/7"))                 # link-local, unique local


def canonical(address: str) -> str:
    """The address as lists and limits know it: no scope, IPv4-mapped IPv6 as IPv4."""
    if ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address.partition("%")[0])
    return str(parsed.ipv4_mapped or parsed)


def is_local(address: str) -> bool:
    """Loopback, private or link-local: may name another address for itself."""
    return in_networks(address, LOCAL_NETWORKS)


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def is_unicast(address: str) -> bool:
    if "%" in address:              # a scope means nothing to another machine
        return False
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return not (parsed.is_multicast or parsed.is_unspecified or str(parsed) == "255.255.255.255"
                or parsed.version == 4 and parsed in THIS_NETWORK)


THIS_NETWORK = ipaddress.ip_network("0.0.0.0/8")                # RFC 1122: "this network", never a destination


def in_networks(address: str, networks: Iterable[Network]) -> bool:
    parsed = ipaddress.ip_address(address)
    return any(parsed.version == n.version and parsed in n for n in networks)


def source_key(address: str) -> str:
    """What a limit by source counts: an IPv4 address, an IPv6 /64 (a host has all of it)."""
    if ":" not in address:
        return address
    address = canonical(address)
    return address if ":" not in address else str(ipaddress.ip_network(address + "/64", strict=False))


def endpoint(address: str, port: int) -> str:
    return "[%s]:%d" % (address, port) if ":" in address else "%s:%d" % (address, port)


def ipv4_bytes(address: str) -> bytes:
    return ipaddress.IPv4Address(address).packed


class Cookie:
    """A keyed MAC with a lifetime, so that a handshake needs no memory: what comes back proves that it went out.

    `make` gives COOKIE_MAC_BYTES over the message and the window of `now`; `good` accepts this window's and the previous one's.
    """

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.windows: Dict[int, Any] = {}

    def make(self, message: bytes, now: float, back: int = 0) -> bytes:
        window = int(now // COOKIE_WINDOW_S) - back
        keyed = self.windows.get(window)
        if keyed is None:
            self.windows = {w: h for w, h in self.windows.items() if w + 1 >= window}
            keyed = self.windows[window] = hashlib.blake2b(
                window.to_bytes(8, "little", signed=True), key=self.key, digest_size=COOKIE_MAC_BYTES)
        mac = keyed.copy()
        mac.update(message)
        return mac.digest()

    def good(self, mac: bytes, message: bytes, now: float) -> bool:
        return mac == self.make(message, now) or mac == self.make(message, now, 1)


EXEMPT, BLOCKED = float("-inf"), float("inf")


class Limiter:
    """Token buckets by source in a bounded table: `rate` a second, `burst` at once.

    A bucket is one number, the time at which it will be full again (the "generic cell rate algorithm"). An unknown source has a full
    bucket, so a full table forgets the least recently used one and refuses nobody. `verdict(address)` says once, when a source
    is first seen, whether it is EXEMPT or BLOCKED; else 0.
    """

    def __init__(self, rate: float, burst: float, verdict: Callable[[str], float] = lambda address: 0.0,
                 sources: int = LIMITER_SOURCES) -> None:
        self.verdict = verdict
        self.sources = sources
        self.table: collections.OrderedDict[str, float] = collections.OrderedDict()
        self.set_rate(rate, burst)

    def set_rate(self, rate: float, burst: float) -> None:
        self.cost_s = 1.0 / rate
        self.depth_s = (burst + 0.001) / rate       # a thousandth of a token, so that sums of fractions come out exact
        self.table.clear()

    def allow(self, address: str, now: float) -> bool:
        table = self.table
        full_at = table.get(address)
        if full_at == EXEMPT:
            return True
        if full_at is None:
            if ":" in address:
                address = source_key(address)
                full_at = table.get(address)
            if full_at is None:
                if len(table) >= self.sources:
                    table.popitem(last=False)
                full_at = table[address] = self.verdict(address.partition("/")[0])
                if full_at == EXEMPT:
                    return True
        table.move_to_end(address)
        full_at = (full_at if full_at > now else now) + self.cost_s
        if full_at - now > self.depth_s:
            return False
        table[address] = full_at
        return True


class Tally:
    """What one protocol has seen, for /metrics and the last line of the log."""

    __slots__ = ("received", "sent", "bytes_in", "bytes_out", "malformed", "limited", "unsent", "errors", "connections")

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)

    def items(self) -> List[Tuple[str, int]]:
        return [(name, getattr(self, name)) for name in self.__slots__]


# =====================================================================================================================
# 5  Registry
#
# The listed servers of all games, the rules that the operator has set for them, and what was heard last from whom. It
# knows nothing of protocols, sockets or disks. Times are those of the monotonic clock that is handed in.
# =====================================================================================================================

class Refused(Exception):
    """A server that is not to be listed: `outcome` as in Heard, and the reason in words."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


class Rules:
    """What the operator has decided about addresses: public ones, bans, marks, limits. Read anew on reload."""

    def __init__(self, settings: Settings) -> None:
        self.read(settings)

    def read(self, settings: Settings) -> None:
        self.public_address: str = settings["server.public_address"]
        self.address_map: Dict[str, str] = settings["address_map"]
        self.official: Dict[Tuple[str, int], bool] = settings["official"]
        self.priority: Dict[Tuple[str, int], int] = settings["priority"]
        self.bans: Dict[Network, str] = settings["bans"]
        self.blocks: Dict[Network, str] = settings["blocked"]
        self.exempt: Tuple[Network, ...] = settings["limits.exempt"]
        self.refuse_names: Tuple[Pattern, ...] = settings["server.refuse_names"]
        self.servers: int = settings["limits.servers"]
        self.servers_per_source: int = settings["limits.servers_per_source"]

    def listed_address(self, source: str, claimed: str = "") -> str:
        """Where players find a server whose packets come from `source` and which says of itself `claimed`."""
        if claimed and is_local(source) and is_unicast(claimed):
            return canonical(claimed)
        if source in self.address_map:
            return self.address_map[source]
        if self.public_address and is_loopback(source):
            return self.public_address
        return source

    def verdict(self, address: str) -> float:
        """For the limiters: BLOCKED, EXEMPT or 0."""
        if in_networks(address, self.blocks):
            return BLOCKED
        return EXEMPT if in_networks(address, self.exempt) else 0.0

    def ban(self, *addresses: str) -> str:
        """Why none of these addresses may announce, or ""."""
        for network, reason in list(self.bans.items()) + list(self.blocks.items()):
            if any(in_networks(address, (network,)) for address in addresses):
                return reason or "no reason given"
        return ""

    def refused_name(self, name: str) -> str:
        return next((pattern.pattern for pattern in self.refuse_names if pattern.search(name)), "")


class Server:
    """One listed server. Identity is (game, address, port); the rest is what it told last.

    verified   how it is known to be there: handshake, query, connection, or self-reported
    source     the address that its packets come from (differs from `address` behind a router)
    lifetime   seconds that it stays listed after last_seen; infinite where a connection or the poller decides
    """

    __slots__ = ("game", "address", "port", "name", "mode", "map", "version", "players", "max_players", "playing", "description",
                 "official", "priority", "flavor", "verified", "unconfirmed", "responding", "ping_ms", "details",
                 "source", "first_seen", "last_seen", "lifetime", "rank", "parts", "packet")

    game: str
    address: str
    port: int
    rank: Tuple[Any, ...]

    def __init__(self, game: str, address: str, port: int, source: str, now: float, lifetime: float) -> None:
        self.game, self.address, self.port, self.source = game, address, port, source
        self.name = self.mode = self.map = self.version = self.description = ""
        self.players = self.max_players = self.priority = self.flavor = 0
        self.playing: Optional[int] = None          # in ships, on the field; None: the protocol does not say
        self.official = self.unconfirmed = False
        self.responding = True
        self.verified = "self-reported"
        self.ping_ms: Optional[float] = None
        self.details: Dict[str, str] = NO_DETAILS
        self.first_seen = self.last_seen = now
        self.lifetime = lifetime
        self.parts: Optional[Dict[str, bytes]] = None       # its part of each list, as rendered last
        self.packet = b""                                   # the announcement heard last, for protocols that repeat it

    @property
    def key(self) -> Tuple[str, str, int]:
        return self.game, self.address, self.port

    def set_rank(self) -> None:
        """The order of every list: the operator's priority, then official, then players, then name."""
        self.rank = (-self.priority, not self.official, -self.players, self.name.casefold())


NO_DETAILS: Dict[str, str] = {}
MEASURED = ("name", "mode", "map", "version", "players", "max_players", "playing", "description", "flavor", "verified",
            "responding", "ping_ms", "details")
STORED = ("name", "mode", "map", "version", "players", "max_players", "playing", "description", "flavor", "verified",
          "responding", "details", "source")


class Heard(NamedTuple):
    """What became of the last packet about one server, for /check."""

    at: float
    protocol: str
    port: int                       # the announced port; 0 if it could not be read
    outcome: str                    # a key of OUTCOMES in section 9
    detail: str


class Registry:
    """The servers, by game and by identity, their expiry, and a generation number that moves whenever a list changes."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.games: Dict[str, Dict[Tuple[str, int], Server]] = collections.defaultdict(dict)
        self.census: Dict[str, List[int]] = collections.defaultdict(lambda: [0, 0, 0])     # servers, players, playing
        self.sources: Dict[str, int] = {}
        self.total = 0
        self.generation = 0
        self.watchers: List[Callable[[str, Server], None]] = []        # called with listed, changed or gone
        self.heard: collections.OrderedDict[Tuple[str, str, int], Heard] = collections.OrderedDict()
        # Servers by the second in which their lifetime may end. A server that was heard from since moves on when its
        # second comes: one move in a lifetime, however often it announces.
        self.endings: Dict[int, List[Server]] = {}
        self.ordered: Dict[str, Tuple[int, List[Server]]] = {}
        # What storage has not been told yet
        self.seen: Set[Server] = set()
        self.altered: Set[Server] = set()
        self.left: Set[Tuple[str, str, int]] = set()

    def get(self, game: str, address: str, port: int) -> Optional[Server]:
        return self.games[game].get((address, port)) if game in self.games else None

    def admit(self, game: str, address: str, port: int, source: str, name: str = "") -> None:
        """Raise Refused if a server that is not listed yet may not be."""
        if not 0 < port <= 65535:
            raise Refused("bad packet", "port %d cannot be listed" % port)
        if not is_unicast(address):
            raise Refused("bad packet", "%s cannot be the address of a server" % address)
        ban = self.rules.ban(source, address)
        if ban:
            raise Refused("banned", ban)
        self.admit_name(name)
        if self.total >= self.rules.servers:
            raise Refused("limit", "this master lists %d servers at the most" % self.rules.servers)
        if (self.sources.get(source_key(source), 0) >= self.rules.servers_per_source
                and not in_networks(source, self.rules.exempt)):
            raise Refused("limit", "%d servers of one address are listed at the most" % self.rules.servers_per_source)

    def admit_name(self, name: str) -> None:
        pattern = self.rules.refused_name(name)
        if pattern:
            raise Refused("name", "names matching %s are not listed here" % pattern)

    def hear(self, game: str, address: str, port: int, source: str, now: float, lifetime: float, fields: Mapping[str, Any]) -> Server:
        """List a server, or refresh it, with what it told; raises Refused. Fields are names in MEASURED."""
        server = self.get(game, address, port)
        if server is None:
            self.admit(game, address, port, source, fields.get("name", ""))
            server = Server(game, address, port, source, now, lifetime)
            self.insert(server, fields)
        else:
            self.admit_name(fields.get("name", ""))
            server.lifetime = lifetime
            self.move_source(server, source)
            self.refresh(server, now)
            self.update(server, fields)
        return server

    def insert(self, server: Server, fields: Mapping[str, Any]) -> None:
        """A new server, admitted or restored, into every index."""
        for name, value in fields.items():
            setattr(server, name, value)
        self.mark(server)
        self.fit_players(server)
        server.set_rank()
        self.games[server.game][server.address, server.port] = server
        key = source_key(server.source)
        self.sources[key] = self.sources.get(key, 0) + 1
        self.total += 1
        self.count(server, 1)
        self.schedule(server)
        self.changed("listed", server)

    def refresh(self, server: Server, now: float) -> None:
        """The server was heard from."""
        server.last_seen = now
        self.seen.add(server)
        if server.unconfirmed:
            server.unconfirmed = False
            self.schedule(server)           # its lifetime may be shorter than the one it was restored with
            self.changed("changed", server)

    def update(self, server: Server, fields: Mapping[str, Any]) -> None:
        """Take over what the server told; the lists change only if something did."""
        different = [(name, value) for name, value in fields.items() if getattr(server, name) != value]
        if not different:
            return
        self.count(server, -1)
        for name, value in different:
            setattr(server, name, value)
        self.fit_players(server)
        self.count(server, 1)
        server.set_rank()
        self.changed("changed", server)

    def move_source(self, server: Server, source: str) -> None:
        if server.source != source:
            self.uncount_source(server)
            server.source = source
            key = source_key(source)
            self.sources[key] = self.sources.get(key, 0) + 1
            self.altered.add(server)

    def uncount_source(self, server: Server) -> None:
        key = source_key(server.source)
        self.sources[key] -= 1
        if not self.sources[key]:
            del self.sources[key]

    def remove(self, server: Server) -> None:
        if self.games[server.game].pop((server.address, server.port), None) is not server:
            return
        self.count(server, -1)
        self.uncount_source(server)
        self.total -= 1
        self.changed("gone", server)

    def fit_players(self, server: Server) -> None:
        server.players = clamp(server.players, server.max_players or PLAYERS_MAX)
        if server.playing is not None:
            server.playing = clamp(server.playing, server.players)

    def count(self, server: Server, sign: int) -> None:
        census = self.census[server.game]
        census[0] += sign
        census[1] += sign * server.players
        census[2] += sign * (server.players if server.playing is None else server.playing)

    def changed(self, event: str, server: Server) -> None:
        self.generation += 1
        server.parts = None
        if event == "gone":
            self.left.add(server.key)
            self.altered.discard(server)
            self.seen.discard(server)
        else:
            self.left.discard(server.key)
            self.altered.add(server)
        for watcher in self.watchers:
            watcher(event, server)

    def mark(self, server: Server) -> None:
        server.official = self.rules.official.get((server.address, server.port), False)
        server.priority = self.rules.priority.get((server.address, server.port), 0)

    def apply_rules(self) -> None:
        """After a reload: marks as the rules have them now, and those out who are banned since."""
        for server in self.servers():
            if self.rules.ban(server.source, server.address) or self.rules.refused_name(server.name):
                self.remove(server)
                continue
            before = server.official, server.priority
            self.mark(server)
            if before != (server.official, server.priority):
                server.set_rank()
                self.changed("changed", server)

    def schedule(self, server: Server) -> None:
        ends = server.last_seen + server.lifetime
        if ends != float("inf"):
            self.endings.setdefault(int(ends), []).append(server)

    def expire(self, now: float) -> None:
        """Drop every server that was silent for its lifetime; called once a second."""
        for second in sorted(s for s in self.endings if s <= now):
            for server in self.endings.pop(second):
                if self.games[server.game].get((server.address, server.port)) is not server:
                    continue
                if server.last_seen + server.lifetime <= now:
                    self.remove(server)
                else:
                    self.schedule(server)

    def servers(self, game: str = "") -> List[Server]:
        """All servers, or those of a game, in the master's order. The list is the caller's. Safe from any thread."""
        return list(self.in_order(game))

    def in_order(self, game: str = "") -> List[Server]:
        """The same, shared and not to be changed: sorted once a generation, from the order that was, so mostly sorted already."""
        generation, order = self.ordered.get(game, (-1, []))
        if generation != self.generation:
            generation = self.generation
            listed = [self.games[game]] if game else list(self.games.values())
            members = {server for servers in listed for server in list(servers.values())}
            order = [server for server in order if server in members]
            order += members.difference(order)
            order.sort(key=rank_of)
            self.ordered[game] = generation, order
        return order

    def note(self, source: str, protocol: str, port: int, outcome: str, now: float, detail: str = "") -> None:
        """Remember what became of a packet, for the operator of that server."""
        key = (source, protocol, port)
        self.heard[key] = Heard(now, protocol, port, outcome, detail)
        self.heard.move_to_end(key)
        if len(self.heard) > HEARD_SOURCES:
            self.heard.popitem(last=False)


def rank_of(server: Server) -> Tuple[Any, ...]:
    return server.rank


def parts(servers: Iterable[Server], name: str, render: Callable[[Server], bytes]) -> List[bytes]:
    """Each server's part of the list `name`, rendered when the server has changed since."""
    out = []
    for server in servers:
        made = server.parts
        if made is None:
            made = server.parts = {}
        part = made.get(name)
        if part is None:
            part = made[name] = render(server)
        out.append(part)
    return out


# =====================================================================================================================
# 6  Storage
# =====================================================================================================================


# =====================================================================================================================
# 7  Protocols
#
# Each game is one class (or two) with its real bytes in the docstring. A protocol gets bytes, the peer and the time and
# gives bytes back; it keeps what it knows in the registry, and raises Malformed for anything that its document does not have.
# =====================================================================================================================

class UdpProtocol:
    """One UDP port. `replies` are [(datagram, peer), …]."""

    ipv4_only = True                # its lists carry 4-byte addresses

    def datagram(self, data: bytes, peer: Peer, now: float) -> Replies:
        raise NotImplementedError

    def tick(self, now: float) -> Replies:
        """Once a second: polls, retries, expiry of what the protocol itself remembers."""
        return []


class Session:
    """One TCP connection. What a method returns is written, each return in one piece."""

    done = False                    # True: write what is out, then close gracefully
    kept = False                    # True: a connection worth keeping when room must be made (a publishing server)
    held = False                    # True: input waits for its turn, so that one peer does not keep the loop from the others
    wake_at: Optional[float] = None         # set by any method: tick() is called at this time as well
    job: Optional[Callable[[], Any]] = None         # work for a thread; its result comes to resume()

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

    def closed(self, now: float) -> None:
        """The connection has ended, whoever ended it."""


class TcpProtocol:
    """One TCP port: makes a session for each connection."""

    ipv4_only = False
    speaks_first = True             # False: the client does, and the kernel may hold a connection back until it has

    def session(self, address: str, now: float) -> Session:
        raise NotImplementedError

    def tick(self, now: float) -> None:
        """Once a second."""


# --- Poller ----------------------------------------------------------------------------------------------------------

POLL_TIMEOUT_S = 3.0                # the Hyperbol document's script waits so long
POLL_ATTEMPTS = 2                   # a lost datagram is not a missed poll
POLL_MISSED = 3                     # polls without an answer after which a server is gone (PROTOCOLS)
POLL_SHARE = 12                     # at most a twelfth of all targets is asked in one second: no volleys
POLL_MIN_PER_S = 10                 # but so many always, so that a few new servers do not wait for each other


class Target:
    """One game server to be asked. `step` and `scratch` belong to its querier."""

    __slots__ = ("querier", "address", "port", "server_port", "due", "nonce", "asked_at", "attempt", "step", "missed", "ping_ms",
                 "scratch", "known")

    def __init__(self, querier: Querier, address: str, port: int, server_port: int, known: bool) -> None:
        self.querier, self.address, self.port, self.server_port = querier, address, port, server_port
        self.due = 0.0
        self.nonce = 0
        self.asked_at: Optional[float] = None           # None: no question is open
        self.attempt = self.step = self.missed = 0
        self.ping_ms: Optional[float] = None            # round trip of the last answer
        self.scratch: Any = None
        self.known = known                              # named in the ini: polled however long it is silent

    def __repr__(self) -> str:
        return endpoint(self.address, self.port)


class Querier:
    """A protocol whose game servers answer questions. The poller asks; the querier knows the bytes."""

    attempts = POLL_ATTEMPTS

    def nonce(self) -> int:
        """What a question carries and its answer must: an unsigned 32-bit integer."""
        return random.SystemRandom().getrandbits(32)

    def query(self, target: Target) -> bytes:
        raise NotImplementedError

    def answer(self, target: Target, data: bytes, now: float) -> bool:
        """Take an answer. True: the poll is complete. False: ask again at once (`target.step` says what).

        Raises Malformed if it is none, or not to this question (`target.nonce`)."""
        raise NotImplementedError

    def missed(self, target: Target, now: float) -> bool:
        """A poll went unanswered, the `target.missed`th in a row. True: ask no more."""
        raise NotImplementedError


class Poller(UdpProtocol):
    """Asks game servers what they really are, from one UDP socket, evenly over the interval.

    An answer counts only from the address and port that were asked, while a question is open there. Nobody is asked whom neither the
    ini nor a packet from that address named; that is for the protocols to see to, as they alone call `add`.
    """

    ipv4_only = False

    def __init__(self, settings: Settings, seed: Optional[int] = None) -> None:
        self.random = random.Random(seed)
        self.targets: Dict[Tuple[str, int], Target] = {}
        self.fresh: collections.deque[Target] = collections.deque()
        self.open: collections.OrderedDict[Tuple[str, int], Target] = collections.OrderedDict()
        self.waiting: List[Tuple[float, int, Target]] = []              # a heap by the time at which each is due
        self.count = 0
        self.read(settings)

    def read(self, settings: Settings) -> None:
        self.interval: float = settings["poll.interval"]
        self.rate: int = settings["poll.rate"]

    def add(self, querier: Querier, address: str, port: int, server_port: int = 0, known: bool = False) -> Target:
        """Poll this endpoint from now on; asked within 2 s. `server_port`: the game's port where it differs."""
        target = self.targets.get((address, port))
        if target is None or target.querier is not querier:
            target = self.targets[address, port] = Target(querier, address, port, server_port or port, known)
            self.fresh.append(target)
        target.known = target.known or known
        return target

    def remove(self, target: Target) -> None:
        if self.targets.get((target.address, target.port)) is target:
            del self.targets[target.address, target.port]
            self.open.pop((target.address, target.port), None)

    def datagram(self, data: bytes, peer: Peer, now: float) -> Replies:
        address = canonical(peer[0])
        target = self.open.get((address, peer[1]))
        if target is None or target.asked_at is None:
            raise Malformed("an answer that nobody asked for")
        complete = target.querier.answer(target, data, now)
        target.ping_ms = (now - target.asked_at) * 1000
        if not complete:
            return self.ask(target, now)
        target.missed = 0
        self.rest(target, now)
        return []

    def ask(self, target: Target, now: float) -> Replies:
        target.nonce = target.querier.nonce()
        target.asked_at = now
        self.open[target.address, target.port] = target
        self.open.move_to_end((target.address, target.port))
        return [(target.querier.query(target), (target.address, target.port))]

    def rest(self, target: Target, now: float) -> None:
        """The poll is over; the next one comes an interval later, give or take a tenth so that no volley builds up."""
        self.open.pop((target.address, target.port), None)
        target.asked_at = None
        target.attempt = target.step = 0
        self.count += 1
        heapq.heappush(self.waiting, (now + self.interval * self.random.uniform(0.9, 1.0), self.count, target))

    def tick(self, now: float) -> Replies:
        out: Replies = []
        budget = min(self.rate, max(POLL_MIN_PER_S, len(self.targets) // POLL_SHARE))
        while self.open:
            target = next(iter(self.open.values()))
            assert target.asked_at is not None
            if now - target.asked_at < POLL_TIMEOUT_S or len(out) >= budget:
                break
            target.attempt += 1
            if target.attempt < target.querier.attempts:
                out += self.ask(target, now)
                continue
            target.missed += 1
            self.rest(target, now)
            if target.querier.missed(target, now):
                self.remove(target)
        while self.waiting and self.waiting[0][0] <= now and len(out) < budget:
            out += self.ask_if_current(heapq.heappop(self.waiting)[2], now)
        while self.fresh and len(out) < budget:
            out += self.ask_if_current(self.fresh.popleft(), now)
        return out

    def ask_if_current(self, target: Target, now: float) -> Replies:
        return self.ask(target, now) if self.targets.get((target.address, target.port)) is target else []


class Core(NamedTuple):
    """What every protocol is handed."""

    settings: Settings
    registry: Registry
    poller: Poller
    resolve: Callable[[str, Callable[[str, float], None]], None]        # (host, done): done(address or "", now) follows later
    # (path, bytes, done): done(the first bytes of the file, or an OSError, now) follows later
    read_file: Callable[[str, int, Callable[[Any, float], None]], None] = lambda path, size, done: None


RESOLVE_S = 600.0                   # host names in the ini are looked up anew: dynamic addresses change daily


class Known:
    """The game servers that the ini names, kept among the poller's targets wherever their host names lead."""

    def __init__(self, core: Core, querier: Querier, offset: int = 0) -> None:
        """`offset`: from a server's port to the one that answers questions."""
        self.core, self.querier, self.offset = core, querier, offset
        self.targets: Dict[Tuple[str, int], Optional[Target]] = {}      # by host and port as the ini has them
        self.due = float("-inf")

    def read(self, endpoints: Iterable[Tuple[str, int]]) -> None:
        before = self.targets
        self.targets = {place: before.get(place) for place in endpoints}
        for place, target in before.items():
            if target is not None and place not in self.targets:
                target.known = False        # from now on it goes when it falls silent, as others do
        self.due = float("-inf")

    def tick(self, now: float) -> None:
        if now >= self.due:
            self.due = now + RESOLVE_S
            for host, port in self.targets:
                self.core.resolve(host, functools.partial(self.found, host, port))

    def found(self, host: str, port: int, address: str, now: float) -> None:
        if not address or (host, port) not in self.targets:
            return
        before = self.targets[host, port]
        if before is not None and before.address != address:
            before.known = False
        self.targets[host, port] = self.core.poller.add(self.querier, address, port + self.offset, port, known=True)


# --- Iceball ---------------------------------------------------------------------------------------------------------

def iceball_version_text(number: int) -> str:
    """8421413 -> "0.2.1-37": w.5 x.5 y.7 a.5 z.10 from high to low bits (PROTOCOLS, section 1)."""
    w, x, y, a, z = number >> 27, number >> 22 & 31, number >> 15 & 127, number >> 10 & 31, number & 1023
    return "%d.%d%s%s%s" % (w, x, ".%d" % y if y else "", chr(96 + a) if a else "", "-%d" % z if z else "")


def iceball_version_number(text: str) -> int:
    """The way back; ValueError if it is none."""
    match = re.fullmatch(r"(\d+)\.(\d+)(?:\.(\d+))?([a-z\x7b-\x7f])?(?:-(\d+))?", text)
    if not match:
        raise ValueError("a version such as 0.2.1-37 is wanted")
    w, x, y, z = (int(part or 0) for part in match.group(1, 2, 3, 5))
    a = ord(match.group(4)) - 96 if match.group(4) else 0
    if w > 31 or x > 31 or y > 127 or z > 1023:
        raise ValueError("a part of %s is too large" % text)
    return w << 27 | x << 22 | y << 15 | a << 10 | z


ICEBALL_HBVERSION = 2
ICEBALL_ANNOUNCEMENT = struct.Struct("<4sHIHHH30s10s30s")           # 86 bytes
ICEBALL_NUMBERS = struct.Struct("<IHHH")                            # of it: version, port, players, maximum
ICEBALL_REPROACHES = 1 / 40, 1      # BADV or BADF by source: one a burst; its receiver falls silent for 30 minutes anyway


class Iceball(UdpProtocol):
    """Iceball's heartbeat protocol, current form (hbversion 2); document 003.

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

    def __init__(self, core: Core) -> None:
        self.registry = core.registry
        self.cookie = Cookie(random.SystemRandom().getrandbits(128).to_bytes(16, "little"))
        self.draft = IceballDraft(core, self.cookie)
        self.timeout: float = core.settings["iceball.timeout"]
        self.known: Dict[Tuple[str, bytes], Server] = {}        # (source address, whole datagram) of each listed server
        # A listed server's announcement proves nothing that is not known, so its cookie can be the same for all
        self.thanks = b"MSOK" + random.SystemRandom().getrandbits(32).to_bytes(4, "little")
        self.reproaches = Limiter(*ICEBALL_REPROACHES)
        self.registry.watchers.append(self.watch)
        self.read(core.settings)

    def read(self, settings: Settings) -> None:
        self.version: int = settings["iceball.version"]
        self.accepted: Tuple[str, ...] = settings["iceball.accept_versions"]

    def datagram(self, data: bytes, peer: Peer, now: float) -> Replies:
        server = self.known.get((peer[0], data))
        if server is not None:                      # nothing has changed: the common case by far
            server.last_seen = now
            self.registry.seen.add(server)
            return [(self.thanks, peer)]
        head = data[:4]
        if head == b"1CEB":
            return self.announcement(data, peer, now)
        if head == b"HSHK":
            return self.handshake(data, peer, now)
        if head[:1] in DRAFT_TYPES:
            return self.draft.datagram(data, peer, now)
        raise Malformed("neither 1CEB nor HSHK nor a packet of the first draft")

    def announcement(self, data: bytes, peer: Peer, now: float) -> Replies:
        if len(data) < 10:
            raise Malformed("an announcement without its versions")
        source = peer[0]
        hbversion, version = struct.unpack_from("<HI", data, 4)
        if hbversion != ICEBALL_HBVERSION or self.accepted and not self.accepts(version):
            wrong = ("heartbeat version %d" % hbversion if hbversion != ICEBALL_HBVERSION
                     else "Iceball version %s" % iceball_version_text(version))
            self.registry.note(source, "iceball", 0, "version", now, wrong)
            return self.reproach(b"BADV" + struct.pack("<HI", ICEBALL_HBVERSION, self.version), peer, now, wrong)
        if len(data) != ICEBALL_ANNOUNCEMENT.size:
            wrong = "length: %d bytes instead of %d" % (len(data), ICEBALL_ANNOUNCEMENT.size)
            self.registry.note(source, "iceball", 0, "bad packet", now, wrong)
            return self.reproach(b"BADF", peer, now, wrong)
        port = data[10] | data[11] << 8
        server = self.registry.get("iceball", self.registry.rules.listed_address(source), port)
        if server is not None and server.source == source:
            self.list_server(source, now, ICEBALL_NUMBERS.unpack_from(data, 6), data[16:46], data[46:56], data[56:86], data)
            return [(self.thanks, peer)]
        self.registry.note(source, "iceball", port, "announced", now)
        packed = iceball_pack(data)
        return [(b"MSOK" + self.cookie.make(source.encode() + packed, now) + packed, peer)]

    def handshake(self, data: bytes, peer: Peer, now: float) -> Replies:
        if len(data) <= len(self.thanks):           # of a server that is listed already
            return []
        mac, packed = data[4:4 + COOKIE_MAC_BYTES], data[4 + COOKIE_MAC_BYTES:]
        if not self.cookie.good(mac, peer[0].encode() + packed, now):
            raise Malformed("a cookie that is forged or older than %d s" % COOKIE_WINDOW_S)
        self.list_server(peer[0], now, *iceball_unpack(packed))
        return []

    def list_server(self, source: str, now: float, numbers: Tuple[int, ...], name: bytes, mode: bytes, map: bytes,
                    packet: bytes = b"") -> None:
        version, port, players, max_players = numbers
        fields = {"name": decode_utf8(c_string(name)), "mode": decode_utf8(c_string(mode)), "map": decode_utf8(c_string(map)),
                  "version": iceball_version_text(version), "players": min(players, max_players), "max_players": max_players,
                  "verified": "handshake"}
        address = self.registry.rules.listed_address(source)
        before = self.registry.get("iceball", address, port)
        if before is not None:
            self.known.pop((before.source, before.packet), None)
        try:
            server = self.registry.hear("iceball", address, port, source, now, self.timeout, fields)
        except Refused as refused:
            self.registry.note(source, "iceball", port, refused.outcome, now, str(refused))
            return
        if packet:
            self.known[source, packet] = server
            server.packet = packet

    def accepts(self, version: int) -> bool:
        text = iceball_version_text(version)
        return any(text == name or text.startswith(name + "-") for name in self.accepted)

    def reproach(self, packet: bytes, peer: Peer, now: float, wrong: str) -> Replies:
        """BADV or BADF: its receiver stops announcing to every master, so a source that has a listed server does not get one (the
        packet may be forged to silence it), and no source gets many."""
        if source_key(peer[0]) in self.registry.sources or not self.reproaches.allow(peer[0], now):
            raise Malformed(wrong)
        return [(packet, peer)]

    def watch(self, event: str, server: Server) -> None:
        if event == "gone" and server.game == "iceball":
            self.known.pop((server.source, server.packet), None)


def iceball_pack(announcement: bytes) -> bytes:
    """What a cookie carries of an announcement: its numbers, and the texts without their padding.

    Of its texts 64 bytes at the most, so that MSOK is no longer than the 86 bytes it answers, except for texts that fill all 70 bytes of their
    fields, which are kept whole (94 bytes). Between the two the end of the map is lost until the next announcement."""
    name, mode, map = announcement[16:46], announcement[46:56], announcement[56:]
    text = map.partition(b"\0")[0]
    for field in (mode, name):
        text = (field if b"\0" not in field else field.partition(b"\0")[0] + b"\0") + text
    whole = len(text) == 70 and b"\0" not in text
    return announcement[6:16] + (text if whole else text[:ICEBALL_ANNOUNCEMENT.size - 4 - COOKIE_MAC_BYTES - 10])


def iceball_unpack(packed: bytes) -> Tuple[Tuple[int, ...], bytes, bytes, bytes]:
    """The way back, of bytes whose MAC was good: numbers, name, mode, map."""
    rest = packed[10:]
    fields = []
    for width in (30, 10):
        field, nul, _ = rest[:width].partition(b"\0")
        fields.append(field)
        rest = rest[len(field) + len(nul):]
    return ICEBALL_NUMBERS.unpack_from(packed), fields[0], fields[1], rest


DRAFT_TYPES = (b"\1", b"\2", b"\3", b"\4", b"\5", b"\6", b"\7")
DRAFT_HBVERSION = 1
DRAFT_SESSION_S = 120.0             # the document: "terminate your session after 120 seconds of inactivity"
DRAFT_GUESSES = 1 / 10, 10          # wrong ids by source: half of an id is the port, so only 16 bits are secret
DRAFT_CLAIMS = 256                  # addresses named by servers on the local network, until they return their id
DRAFT_NO_SESSION = b"\6"


class IceballDraft:
    """Iceball's first heartbeat protocol (hbversion 1); document 000. Shares the UDP port with the current one.

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

    def __init__(self, core: Core, cookie: Cookie) -> None:
        self.registry = core.registry
        self.cookie = cookie
        self.sessions: Dict[Peer, Tuple[int, Server]] = {}
        self.peers: Dict[Server, Peer] = {}
        self.claims: collections.OrderedDict[Peer, str] = collections.OrderedDict()
        self.guesses = Limiter(*DRAFT_GUESSES)
        self.registry.watchers.append(self.watch)

    def datagram(self, data: bytes, peer: Peer, now: float) -> Replies:
        kind = data[0]
        if kind == 1:
            return self.request(data, peer, now)
        if kind not in (3, 4, 5):
            raise Malformed("type %d is the master's to send" % kind)
        if len(data) < 5:
            raise Malformed("no room for an id")
        identity = int.from_bytes(data[1:5], "little")
        server = self.session(identity, peer, now)
        if server is None:
            return [(DRAFT_NO_SESSION, peer)] if self.guesses.allow(peer[0], now) else []
        if kind == 5:
            return []
        return self.set_text(data, server, peer) if kind == 3 else self.set_number(data, server, peer)

    def request(self, data: bytes, peer: Peer, now: float) -> Replies:
        if len(data) < 3:
            raise Malformed("a request without a version")
        if data[1:3] != struct.pack("<H", DRAFT_HBVERSION):
            return [(b"\7" + struct.pack("<H", DRAFT_HBVERSION), peer)]
        if len(data) < 6 or data[-1] or b"\0" in data[5:-1]:
            raise Malformed("address: one text with a NUL at its end is wanted")
        port = data[3] | data[4] << 8
        claim = data[5:-1].decode("ascii", "replace")
        self.claims.pop(peer, None)
        if claim and is_local(peer[0]) and is_unicast(claim):
            self.claims[peer] = claim
            if len(self.claims) > DRAFT_CLAIMS:
                self.claims.popitem(last=False)
        self.registry.note(peer[0], "iceball", port, "announced", now)
        address = self.registry.rules.listed_address(peer[0], claim)
        return [(b"\2" + struct.pack("<IH", self.identity(port, peer, now), port) + address.encode() + b"\0", peer)]

    def identity(self, port: int, peer: Peer, now: float, back: int = 0) -> int:
        mac = self.cookie.make(b"draft %s %d %d" % (peer[0].encode(), peer[1], port), now, back)
        return port << 16 | mac[0] << 8 | mac[1]

    def session(self, identity: int, peer: Peer, now: float) -> Optional[Server]:
        """The server behind this id, listed now if it is returned for the first time; None: there is none."""
        known, server = self.sessions.get(peer, (None, None))
        if known != identity:
            port = identity >> 16
            if identity not in (self.identity(port, peer, now), self.identity(port, peer, now, 1)):
                return None
            if not self.guesses.allow(peer[0], now):
                return None
            address = self.registry.rules.listed_address(peer[0], self.claims.get(peer, ""))
            fields = {"verified": "handshake"}
            if self.registry.get("iceball", address, port) is None:
                fields["name"] = endpoint(address, port)
            try:
                server = self.registry.hear("iceball", address, port, peer[0], now, DRAFT_SESSION_S, fields)
            except Refused as refused:
                self.registry.note(peer[0], "iceball", port, refused.outcome, now, str(refused))
                return None
            self.forget(server)
            old = self.sessions.get(peer)
            if old:
                self.forget(old[1])
            self.sessions[peer] = identity, server
            self.peers[server] = peer
        assert server is not None
        self.registry.refresh(server, now)
        return server

    def set_text(self, data: bytes, server: Server, peer: Peer) -> Replies:
        if len(data) < 7 or data[-1] or b"\0" in data[6:-1]:
            raise Malformed("text field: one text with a NUL at its end is wanted")
        name = {1: "name", 2: "mode"}.get(data[5])
        if name is None:
            return []
        value = decode_utf8(data[6:-1])
        if name == "name":
            try:
                self.registry.admit_name(value)
            except Refused as refused:
                raise Malformed(str(refused)) from None
        self.registry.update(server, {name: value})
        return [(data[:6] + value.encode() + b"\0", peer)]

    def set_number(self, data: bytes, server: Server, peer: Peer) -> Replies:
        if len(data) != 10:
            raise Malformed("number field: 10 bytes are wanted")
        name = {1: "players", 2: "max_players"}.get(data[5])
        if name is None:
            return []
        value = clamp(struct.unpack_from("<i", data, 6)[0])
        self.registry.update(server, {name: value})
        return [(data[:6] + struct.pack("<i", getattr(server, name)), peer)]

    def forget(self, server: Server) -> None:
        peer = self.peers.pop(server, None)
        if peer is not None:
            self.sessions.pop(peer, None)

    def watch(self, event: str, server: Server) -> None:
        if event == "gone":
            self.forget(server)


# --- Hyperbol --------------------------------------------------------------------------------------------------------


# --- SubSpace --------------------------------------------------------------------------------------------------------


# --- AIO -------------------------------------------------------------------------------------------------------------

AIO_CONNECTED = b"\1\0\0\0\0"       # the document's CONNECT with id 0, and the framed dialect's greeting as well
AIO_PLACEHOLDER = (
    "No servers currently online :pepe:",
    "There are currently no available servers... Maybe host your own or wait later?:O", "127.0.0.1", 27010)
AIO_MESSAGE_S = 20.0                # from the greeting to the first byte, and from a message's first byte to its last
AIO_IDLE_S = 330.0                  # a peer that publishes nothing; a framed client's keepalive comes after about 270 s
AIO_KEEPALIVE_S = 120.0             # a published peer that has sent a keepalive and then nothing (PROTOCOLS)
AIO_NEWLINE_S = 0.2                 # between `12#%` and its newline, if a network parted what was written as one
AIO_MESSAGE_BYTES = 8192            # a name and a description at their longest, four bytes a character, are 2,600
AIO_FRAME_BYTES = 31                # a publish has 3, or 14 in zlib; a longer frame could begin like a text
AIO_ANSWER_BYTES = 16384            # the answer to a query, unpacked; the longest that a list can show has 2,600
AIO_ZLIB_BYTES = 1200               # a longer frame is compressed: then it does not fit one packet
AIO_SERVERS = 65535                 # a list's index and count are u16
AIO_NEWS_BYTES = 16384              # several screens; a string16 could carry 65,535
AIO_NEWS_S = 3.0                    # the news file is read so often
AIO_TURN_MESSAGES = 64              # answered in one go (3 ms); then the other connections have their turn …
AIO_TURN_BYTES = 1 << 18            # … and the peer takes the answers
AIO_SEEN_S = 60.0                   # a connection that says nothing is a sign of life so often
AIO_NAME_HASH, AIO_NAME_PERCENT = "\uff03".encode(), "\uff05".encode()       # text clients unescape nothing in names
AIO_COUNTER = re.compile(r"(?:^| )\[([0-9]{1,5})/([0-9]{1,5})\]$")


def uintv(value: int) -> bytes:
    """The variable-size integer of AIO's binary dialect, 1 to 4 bytes; OverflowError above 0x2020407f, the last it has.

    PROTOCOLS, section 5: 0 = 01, 127 = ff, 128 = 0200, 8080 = 427c, 16512 = 040000, 27010 = 144801, 65535 = fcfb05."""
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


def aio_frame(payload: bytes) -> bytes:
    """length.u24 compression.u8 payload; zlib where it pays."""
    packed = zlib.compress(payload, GZIP_LEVEL) if len(payload) > AIO_ZLIB_BYTES else payload
    if len(packed) < len(payload):
        return len(packed).to_bytes(3, "little") + b"\1" + packed
    return len(payload).to_bytes(3, "little") + b"\0" + payload


def aio_string16(text: bytes) -> bytes:
    return struct.pack("<H", len(text)) + text


def aio_fields(name: bytes, description: bytes) -> Dict[str, Any]:
    """What a publish of the text and the binary dialect tells. A ` [n/max]` at the end of a name is the player count;
    lists of this game carry the name as published, which is kept in `packet`."""
    published = decode_legacy(name, TEXT_CHARACTERS)
    counter = AIO_COUNTER.search(published)
    text = published[:counter.start() if counter else NAME_CHARACTERS][:NAME_CHARACTERS].strip()
    players, max_players = map(int, counter.groups()) if counter else (0, 0)
    return {"name": text, "description": decode_legacy(description, TEXT_CHARACTERS), "players": clamp(players),
            "max_players": clamp(max_players), "version": "", "ping_ms": None,
            "packet": (text + counter.group() if counter else text).encode("utf-8")}


def aio_published_name(server: Server) -> bytes:
    return server.packet or server.name.encode("utf-8")


# The lists, as bytes. The two text forms share their parts.

def aio_escape(text: str) -> bytes:
    return text.encode("utf-8").replace(b"#", b"<num>").replace(b"%", b"<percent>")


def aio_text_part(server: Server) -> bytes:
    name = aio_published_name(server).replace(b"#", AIO_NAME_HASH).replace(b"%", AIO_NAME_PERCENT)
    return b"%s#%s#%s#%d#" % (name, aio_escape(server.description), server.address.encode("ascii"), server.port)


def aio_text_parts(servers: Iterable[Server]) -> List[bytes]:
    return parts(servers, "aio text", aio_text_part) or [("%s#%s#%s#%d#" % AIO_PLACEHOLDER).encode("ascii")]


def aio_text_list(servers: Iterable[Server]) -> bytes:
    return b"%12#" + b"".join(aio_text_parts(servers)) + b"%"


def aio_document_list(servers: Iterable[Server]) -> bytes:
    return b"%12#" + b"".join(b"%d#%s" % entry for entry in enumerate(aio_text_parts(servers))) + b"%"


def aio_binary_part(server: Server) -> bytes:
    return b"%s\0%s\0%s\0%s" % (aio_published_name(server), server.description.encode("utf-8"),
                                server.address.encode("ascii"), uintv(server.port))


def aio_binary_list(servers: Iterable[Server]) -> bytes:
    entries = parts(servers, "aio binary", aio_binary_part) or [
        ("%s\0%s\0%s\0" % AIO_PLACEHOLDER[:3]).encode("ascii") + uintv(AIO_PLACEHOLDER[3])]
    return b"\x0c" + b"".join(struct.pack("<H", index) + entry for index, entry in enumerate(entries))


def aio_framed_part(server: Server) -> bytes:
    return bytes((len(server.address),)) + server.address.encode("ascii") + struct.pack("<H", server.port)


def aio_framed_list(servers: Iterable[Server]) -> bytes:
    entries = parts(servers, "aio framed", aio_framed_part)
    return aio_frame(b"\2" + struct.pack("<H", len(entries)) + b"".join(entries))


class AioText:
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

    def __init__(self, aio: Aio) -> None:
        self.aio = aio

    def take(self, session: AioSession, now: float) -> Optional[bytes]:
        """Take one message from the session's buffer and answer it; None: it is not whole yet."""
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
            return self.aio.rendered(aio_text_list if rest[:1] in (b"\r", b"\n") else aio_document_list, session, now)
        if header == b"NEWS":
            return self.aio.news_for(session, now)[0]
        if header == b"13":
            return b"%SUCCESS#13#%" if self.publish(fields, session, now) else b""
        if header == b"SET_IP":
            return b"%SUCCESS#SET_IP#%" if fields and session.claim(fields[0], now) else b""
        if header == b"KEEPALIVE":
            session.keepalive(now)
            return b"%SUCCESS#KEEPALIVE#%"
        return b""                      # what else these programs say is meant for game servers, and harmless

    def publish(self, fields: List[bytes], session: AioSession, now: float) -> bool:
        if len(fields) not in (3, 4):
            raise Malformed("publish: %d fields instead of name, description, perhaps an address, port" % len(fields))
        port = fields.pop()
        if not re.fullmatch(rb"[0-9]{1,5}", port):
            raise Malformed("port: %s is not a number" % ascii(port[:16]))
        name, description, *claim = (field.replace(b"<num>", b"#").replace(b"<percent>", b"%") for field in fields)
        return session.publish(name, description, b"".join(claim), int(port), now)


class AioBinary:
    """The document, literally.

        < 01 00000000                               CONNECT, id
        > 0c                                        ASKFORSERVERS
        < 0c 0000 "NAME\\0" "DESC\\0" "203.0.113.7\\0" 144801 0100 …     of each server index.u16, texts, port.uintv
        > 0d "NAME\\0" "DESC\\0" "203.0.113.7\\0" 144801                 PUBLISH, port 27010; no answer
    """

    def __init__(self, aio: Aio) -> None:
        self.aio = aio

    def take(self, session: AioSession, now: float) -> Optional[bytes]:
        data = session.buffer
        if data[0] == 0x0C:
            session.buffer = data[1:]
            return self.aio.rendered(aio_binary_list, session, now)
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


class AioFramed:
    """Clients and servers since 2022. length.u24 compression.u8 (0 none, 1 zlib) payload, written in one piece:

        < 01000000 00                               connected
        > 03000000 03 8269                          publish, port 27010     < 02000000 05 03, or 06 03 reason.string16
        > 01000000 04                               keepalive               < 02000000 05 04, or 06 04 reason.string16
        > 01000000 02                               list                    < … 02 n.u16 {ip.string8 port.u16}*
        > 01000000 01                               news                    < … 01 text.string16

    Peers read a frame with one recv(4) and one recv(length), hence zlib for a long one.
    """

    def __init__(self, aio: Aio) -> None:
        self.aio = aio

    def take(self, session: AioSession, now: float) -> Optional[bytes]:
        data = session.buffer
        length = int.from_bytes(data[:3], "little")
        if len(data) < 4:
            return None
        if not 0 < length <= AIO_FRAME_BYTES:
            raise Malformed("length: a frame of %d bytes" % length)
        if data[3] > 1:
            raise Malformed("compression %d" % data[3])
        if len(data) < 4 + length:
            return None
        payload = inflate(data[4:4 + length], AIO_FRAME_BYTES) if data[3] else data[4:4 + length]
        if not payload:
            raise Malformed("an empty frame")
        kind = payload[0]
        if kind == 3 and len(payload) < 3:
            raise Malformed("port: two bytes are wanted")
        session.buffer = data[4 + length:]
        if kind == 1:
            return self.aio.news_for(session, now)[1]
        if kind == 2:
            return self.aio.rendered(aio_framed_list, session, now)
        reason = "this master knows no request %d" % kind
        if kind == 3:
            reason = self.publish(session, payload[1] | payload[2] << 8, now)
        elif kind == 4:
            session.keepalive(now)
            reason = "" if session.server else "nothing is published on this connection"
        return aio_frame(bytes((6, kind)) + aio_string16(reason.encode("utf-8")) if reason else bytes((5, kind)))

    def publish(self, session: AioSession, port: int, now: float) -> str:
        """Why not, or "". Name and players are asked for by UDP, at the address that the connection comes from."""
        try:
            server = self.aio.publish(session, "", port, {"packet": b""}, now)
        except Refused as refused:
            return str(refused)
        session.target = self.aio.poller.add(self.aio, session.address, port)
        session.target.scratch = server
        return ""


class AioSession(Session):
    """One peer of whatever dialect; its first byte tells which."""

    def __init__(self, aio: Aio, address: str, number: int, now: float) -> None:
        self.aio, self.address, self.number = aio, address, number
        self.dialect: Union[AioText, AioBinary, AioFramed, None] = None
        self.buffer = b""
        self.server: Optional[Server] = None            # published by this connection
        self.target: Optional[Target] = None            # of a framed server
        self.claimed = ""                               # SET_IP
        self.keeps_alive = False
        self.half_closed = False
        self.wrong: Optional[Malformed] = None          # raised once the answers before it are written
        self.greet_at: Optional[float] = None           # the text greeting is due
        self.since = now                                # when the message in the buffer began, or the connection
        self.heard_at = self.message_at = now           # the last byte, the last whole message

    def opened(self, now: float) -> bytes:
        if list(self.aio.dialects) == ["text"]:
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
        self.half_closed = True
        return self.work(now)

    def settled(self, now: float) -> bool:
        """Whether the buffer has all that the peer has written; while that is open, tick() comes when it is known."""
        settled_at = self.heard_at + AIO_NEWLINE_S
        if self.half_closed or now >= settled_at:
            return True
        self.wake_at = settled_at
        return False

    def work(self, now: float) -> bytes:
        """Answer the messages in the buffer, as many as fit one turn."""
        if self.wrong is not None:
            raise self.wrong
        out: List[bytes] = []
        self.held = False
        while self.buffer and not self.done:
            if len(out) >= AIO_TURN_MESSAGES or sum(map(len, out)) >= AIO_TURN_BYTES:
                self.held = True
                break
            try:
                if self.dialect is None:
                    self.dialect = self.aio.dialect(self.buffer[0])
                answer = self.dialect.take(self, now)
                if answer is not None and not self.aio.messages.allow(self.address, now):
                    raise Malformed("too many messages from one address")
            except Malformed as error:
                self.buffer = b""
                self.closed(now)
                self.aio.registry.note(self.address, "aio", 0, "bad packet", now, str(error))
                if not out:
                    raise
                self.wrong, self.held = error, True
                break
            if answer is None:
                break
            out.append(answer)
            self.since = self.message_at = now
        return b"".join(out)

    def publish(self, name: bytes, description: bytes, claim: bytes, port: int, now: float) -> bool:
        """List what a text or binary server tells of itself; these dialects have no words for a refusal."""
        try:
            self.aio.publish(self, claim.decode("ascii", "replace").strip(), port, aio_fields(name, description), now)
        except Refused:
            return False
        return True

    def claim(self, text: bytes, now: float) -> bool:
        """SET_IP: True if the peer may say so. What is published already moves to that address."""
        address = text.decode("ascii", "replace").strip()
        if not (is_local(self.address) and is_unicast(address)):
            return False
        self.claimed = address
        server = self.server
        if server is not None:
            try:
                self.aio.publish(self, "", server.port, {name: getattr(server, name) for name in AIO_TOLD}, now)
            except Refused:
                return False
        return True

    def keepalive(self, now: float) -> None:
        self.keeps_alive = True
        if self.server is not None:
            self.aio.registry.refresh(self.server, now)

    def own(self, server: Optional[Server]) -> None:
        """Publish this server from now on, or nothing."""
        self.server = server
        self.kept = server is not None
        if self.target is not None:
            self.aio.poller.remove(self.target)
            self.target = None

    def tick(self, now: float) -> bytes:
        if self.greet_at is not None and now >= self.greet_at:
            self.greet_at = None
            if self.dialect is None:
                return self.greeting()
        out = self.work(now)                    # a list that was asked for without a newline
        if out or self.held:
            return out
        if self.dialect is None or self.buffer:
            if now - self.since >= AIO_MESSAGE_S:
                self.closed(now)
                raise Malformed("%s in %d s" % ("half a message" if self.buffer else "not a byte", AIO_MESSAGE_S))
        elif self.server is None:
            self.done = now - self.message_at >= AIO_IDLE_S
        elif self.keeps_alive and now - self.message_at >= AIO_KEEPALIVE_S:
            self.done = True
            self.closed(now)
        elif not self.keeps_alive and now - self.server.last_seen >= AIO_SEEN_S:
            self.aio.registry.refresh(self.server, now)
        return b""

    def closed(self, now: float) -> None:
        if self.server is not None:
            self.aio.registry.remove(self.server)


AIO_PARTS = ("aio text", aio_text_part), ("aio binary", aio_binary_part), ("aio framed", aio_framed_part)
AIO_TOLD = ("name", "description", "players", "max_players", "packet")


class Aio(TcpProtocol, Querier):
    """AIO, three generations of it on one port; document 004 and what its programs became (PROTOCOLS, section 5).

    The master speaks first: AIO_CONNECTED, and after a silence the text greeting. The first byte of the peer tells its
    dialect: 0c or 0d the binary one, a digit or a letter text, other control characters a frame. A server
    is listed for as long as its connection lasts; if it connects again, the newer connection has it.

    The name of a framed server is asked for by UDP on its game port:

        < 00                                                                                 the question
        > zlib of: 00 name.string16 desc.string16 players.u32 max.u32 version.u16            the answer

    The question has no room for a nonce: an answer counts only from the endpoint that was asked, while the question is
    open. A server that leaves it unanswered stays listed, as ADDRESS:PORT: it is connected.
    """

    def __init__(self, core: Core) -> None:
        self.core, self.registry, self.poller = core, core.registry, core.poller
        self.greeting_after: float = core.settings["aio.text_greeting_after"]
        spoken: Dict[str, Union[AioText, AioBinary, AioFramed]] = {
            "text": AioText(self), "binary": AioBinary(self), "framed": AioFramed(self)}
        self.dialects = {name: spoken[name] for name in core.settings["aio.dialects"]}
        self.numbers = itertools.count()
        self.owners: Dict[Server, AioSession] = {}
        # By what makes it: the registry's generation, when it was made, the bytes
        self.lists: Dict[Callable[[Iterable[Server]], bytes], Tuple[int, float, bytes]] = {}
        self.messages = Limiter(1, 1, self.registry.rules.verdict)      # read() sets their rates
        self.requests = Limiter(1, 1, self.registry.rules.verdict)
        self.registry.watchers.append(self.watch)
        self.read(core.settings)

    def read(self, settings: Settings) -> None:
        self.messages.set_rate(*settings["limits.datagrams"])
        self.requests.set_rate(*settings["limits.requests"])
        self.news_file: str = settings["aio.news_file"]
        self.news_trouble = ""
        self.set_news(settings["aio.news"])
        self.look_for_news()

    def session(self, address: str, now: float) -> AioSession:
        return AioSession(self, address, next(self.numbers), now)

    def tick(self, now: float) -> None:
        if now >= self.news_due:
            self.look_for_news()

    def dialect(self, first: int) -> Union[AioText, AioBinary, AioFramed]:
        name = ("binary" if first in (0x0C, 0x0D) else "framed" if 0 < first <= AIO_FRAME_BYTES
                else "text" if first < 0x80 and chr(first).isalnum() else "")
        if name not in self.dialects:
            raise Malformed("the first byte, %02x, is of no dialect spoken here" % first)
        return self.dialects[name]

    # Servers

    def publish(self, session: AioSession, claim: str, port: int, fields: Dict[str, Any], now: float) -> Server:
        """List the server of this connection, or refresh it; raises Refused. Without a name it keeps the one it had."""
        claim = claim if is_unicast(claim) else session.claimed
        address = self.registry.rules.listed_address(session.address, claim)
        if session.server is not None and (session.server.address, session.server.port) != (address, port):
            self.registry.remove(session.server)
        known = self.registry.get("aio", address, port)
        name = fields.get("name") or (known.name if known else endpoint(address, port))
        try:
            server = self.registry.hear("aio", address, port, session.address, now, float("inf"),
                                        {**fields, "name": name, "verified": "connection"})
        except Refused as refused:
            self.registry.note(session.address, "aio", clamp(port), refused.outcome, now, str(refused))
            raise
        for form, part in AIO_PARTS:            # made now, so that the first list of many new servers is quick
            parts((server,), form, part)
        self.registry.note(session.address, "aio", port, "listed", now)
        before = self.owners.get(server)
        if before is not session:
            if before is not None:
                before.own(None)
            self.owners[server] = session
            session.own(server)
        return server

    def watch(self, event: str, server: Server) -> None:
        if event == "gone":
            owner = self.owners.pop(server, None)
            if owner is not None:
                owner.own(None)

    # Lists and news

    def rendered(self, make: Callable[[Iterable[Server]], bytes], session: AioSession, now: float) -> bytes:
        """A list, made anew if a server has changed; of a long list no more than a tenth of the time goes into that."""
        self.allow(session, now)
        generation, made_at, body = self.lists.get(make, (-1, float("-inf"), b""))
        rest_s = min(RENDER_S / 2, len(self.registry.games["aio"]) // 100 * 0.01)      # 10 µs a server, measured
        if generation != self.registry.generation and now - made_at >= rest_s:
            body = make(self.registry.in_order("aio")[:AIO_SERVERS])
            self.lists[make] = self.registry.generation, now, body
        return body

    def news_for(self, session: AioSession, now: float) -> Tuple[bytes, bytes]:
        """The news as text and framed."""
        self.allow(session, now)
        return self.news

    def allow(self, session: AioSession, now: float) -> None:
        if not self.requests.allow(session.address, now):
            raise Malformed("too many requests from one address")

    def set_news(self, text: str) -> None:
        raw = "\n".join(text.strip().splitlines()).encode("utf-8", "replace")[:AIO_NEWS_BYTES]
        text = raw.decode("utf-8", "ignore")            # without a character that was cut
        self.news = (b"%%NEWS#%s#%%" % aio_escape(text),
                     aio_frame(b"\1" + aio_string16(text.encode("utf-8"))))

    def look_for_news(self) -> None:
        self.news_due = float("inf")
        if self.news_file:
            self.core.read_file(self.news_file, AIO_NEWS_BYTES + 1, functools.partial(self.found_news, self.news_file))

    def found_news(self, path: str, found: Union[bytes, Exception], now: float) -> None:
        if path != self.news_file:
            return
        self.news_due = now + AIO_NEWS_S
        trouble = ""
        if isinstance(found, Exception):
            trouble = "cannot be read: %s" % found
        else:
            self.set_news(found.decode("utf-8-sig", "replace"))
            if len(found) > AIO_NEWS_BYTES:
                trouble = "is cut after %d bytes" % AIO_NEWS_BYTES
        if trouble and trouble != self.news_trouble:
            log.warning("the news file %s %s", path, trouble)
        self.news_trouble = trouble

    # Questions to framed servers

    def nonce(self) -> int:
        return 0

    def query(self, target: Target) -> bytes:
        return b"\0"

    def answer(self, target: Target, data: bytes, now: float) -> bool:
        payload = inflate(data, AIO_ANSWER_BYTES)
        if payload[:1] != b"\0":
            raise Malformed("type: not an answer")
        texts = []
        at = 1
        for _ in range(2):
            size = int.from_bytes(payload[at:at + 2], "little")
            texts.append(decode_legacy(payload[at + 2:at + 2 + size], TEXT_CHARACTERS))
            at += 2 + size
        if len(payload) < at + 10:
            raise Malformed("length: %d bytes instead of %d" % (len(payload), at + 10))
        players, max_players, version = struct.unpack_from("<IIH", payload, at)
        server: Server = target.scratch
        name = texts[0][:NAME_CHARACTERS].strip() or endpoint(server.address, server.port)
        try:
            self.registry.admit_name(name)
        except Refused as refused:
            self.registry.note(server.source, "aio", server.port, refused.outcome, now, str(refused))
            name = endpoint(server.address, server.port)
        assert target.asked_at is not None
        self.registry.refresh(server, now)
        self.registry.update(server, {
            "name": name, "description": texts[1], "players": clamp(players), "max_players": clamp(max_players),
            "version": str(version), "ping_ms": round((now - target.asked_at) * 1000)})
        return True

    def missed(self, target: Target, now: float) -> bool:
        return False


# =====================================================================================================================
# 8  Pages
# =====================================================================================================================

class Html(str):
    """Text that is HTML already; everything else is escaped by fill()."""


def fill(template: string.Template, **values: Any) -> Html:
    return Html(template.substitute({name: value if isinstance(value, Html) else html.escape(str(value))
                                     for name, value in values.items()}))


LIST_PAGE = string.Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>$title</title><link rel="stylesheet" href="/style.css">
<h1>$title</h1>
<table><tr><th>Name<th>Mode<th>Map<th>Players<th>Version<th>Address</tr>
$rows</table>
""")
ROW = string.Template("""<tr><td>$name<td>$mode<td>$map<td>$players/$max_players<td>$version<td>$address</tr>
""")
ERROR_PAGE = string.Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>$status $reason</title><link rel="stylesheet" href="/style.css">
<h1>$status $reason</h1>
<p>$hint</p>
""")
STYLE_CSS = "body { font: 1rem system-ui, sans-serif }\n"


# =====================================================================================================================
# 9  Web
#
# The page and the lists over HTTP. http.server parses the request and formats the answer, over bytes in memory. Every answer
# carries `Length` beside `Content-Length`: the Iceball client exits without it (PROTOCOLS, section 1). The same request bytes
# have the same answer until a list changes, so the common request is one look-up.
# =====================================================================================================================

GAME_TITLES = {"iceball": "Iceball", "hyperbol": "Hyperbol", "subspace": "SubSpace", "aio": "AIO"}

SECURITY_HEADERS = (
    ("Content-Security-Policy", "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; connect-src 'self'; "
                                "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
)

JSON_TYPE, HTML_TYPE, TEXT_TYPE = "application/json; charset=utf-8", "text/html; charset=utf-8", "text/plain; charset=utf-8"
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
    etag: str = ""
    shared: bool = False            # the same for everybody until a list changes: may be remembered, and kept by a cache


class Later(NamedTuple):
    """An answer that takes too long for the event loop: `job` runs in the worker, `then(result)` makes the answer of it."""

    job: Callable[[], Any]
    then: Callable[[Any], Answer]


class Exchange(http.server.BaseHTTPRequestHandler):
    """One request and its answer, over bytes instead of a socket."""

    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"
    request_version = "HTTP/1.1"
    command = "GET"

    def __init__(self, head: bytes = b"") -> None:
        """`head`: request line and headers with the empty line; raises HttpError. Without one: for an answer to no request."""
        self.rfile = io.BytesIO(head)
        self.wfile = io.BytesIO()
        self.close_connection = True
        if not head:
            return
        self.raw_requestline = self.rfile.readline()
        words = self.raw_requestline.split()
        if len(words) != 3:
            raise HttpError(400, "The request line is not METHOD PATH HTTP/VERSION.")
        self.parse_request()
        if self.headers.defects or any(not re.fullmatch(r"[!#-'*+.^_`|~0-9A-Za-z-]+", name) for name in self.headers):
            raise HttpError(400, "A header line is not NAME: VALUE.")
        if self.request_version >= "HTTP/1.1" and "Host" not in self.headers:
            raise HttpError(400, "HTTP/1.1 asks for a Host header.")
        if self.command not in METHODS_KNOWN:
            raise HttpError(501, "The method %s is not known." % self.command[:32])
        if "Transfer-Encoding" in self.headers:
            raise HttpError(501, "Transfer-Encoding is not supported; send Content-Length.")

    def body_length(self) -> int:
        lengths = set(self.headers.get_all("Content-Length", []))
        if not lengths:
            if self.command in ("POST", "PUT", "PATCH"):
                raise HttpError(411, "A %s needs a Content-Length." % self.command)
            return 0
        text = lengths.pop()
        if lengths or not re.fullmatch(r"[0-9]{1,18}", text.strip()):
            raise HttpError(400, "Content-Length is not a number.")
        if int(text) > HTTP_BODY_BYTES:
            raise HttpError(413, "At most %d bytes are taken." % HTTP_BODY_BYTES)
        return int(text)

    def handle_expect_100(self) -> bool:
        return True                 # the Iceball client exits on "100 Continue"; others send the body anyway

    def send_error(self, code: int, message: Optional[str] = None, explain: Optional[str] = None) -> None:
        raise HttpError(code, "%s." % message if message else "")

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        pass

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
        for name, value in answer.headers + SECURITY_HEADERS:
            self.send_header(name, value)
        if answer.etag:
            self.send_header("ETag", answer.etag)
        if not any(name == "Cache-Control" for name, _ in answer.headers):
            self.send_header("Cache-Control", "public, max-age=%d" % CACHE_S if answer.shared else "no-store")
        self.send_header("Connection", "close" if self.close_connection else "keep-alive")
        self.end_headers()
        if self.command != "HEAD" and answer.status != 304:
            self.wfile.write(answer.body)
        return self.wfile.getvalue()

    def matches(self, etag: str) -> bool:
        wanted = self.headers.get("If-None-Match", "") if self.command in ("GET", "HEAD") else ""
        return wanted.strip() == "*" or etag in re.findall(r'"[^"]*"', wanted)

    def takes_gzip(self) -> bool:
        for coding in self.headers.get("Accept-Encoding", "").lower().split(","):
            name, _, weight = coding.partition(";")
            if name.strip() in ("gzip", "x-gzip", "*"):
                return not re.fullmatch(r"\s*q\s*=\s*0(\.0*)?\s*", weight)
        return False


class Route(NamedTuple):
    answer: Callable[..., Union[Answer, Later]]     # (web, request) -> answer
    methods: Tuple[str, ...] = ("GET", "HEAD", "OPTIONS")


class Request(NamedTuple):
    """What a route gets to see."""

    path: str
    query: Dict[str, str]
    body: bytes
    exchange: Exchange
    address: str
    now: float


class HttpSession(Session):
    """One connection: HTTP/1.0 and 1.1, keep-alive, pipelining, one answer after another."""

    def __init__(self, web: Web, address: str, now: float) -> None:
        self.web = web
        self.address = address
        self.buffer = b""
        self.exchange: Optional[Exchange] = None            # its head is read, its body not yet
        self.request_bytes = b""
        self.body_bytes = 0
        self.then: Optional[Callable[[Any], Answer]] = None
        self.deadline = now + HTTP_HEAD_S

    def receive(self, data: bytes, now: float) -> bytes:
        web = self.web
        if not self.buffer and self.job is None and not self.done:
            remembered = web.remembered(data, now)
            if remembered is not None and web.allow(self.address, now):
                self.done = remembered[1]
                self.deadline = now + HTTP_IDLE_S
                return remembered[0]
        if self.done:
            return b""
        if data and not self.buffer and self.exchange is None:
            self.deadline = now + HTTP_HEAD_S
        self.buffer += data
        return self.work(now)

    def work(self, now: float) -> bytes:
        out: List[bytes] = []
        self.held = False
        while self.buffer or self.exchange:
            self.held = sum(map(len, out)) >= HTTP_PIPELINE_BYTES
            if self.done or self.job or self.held:
                break
            try:
                piece = self.step(now)
            except HttpError as error:
                self.web.count("", error.status)
                piece = self.refuse(error)
            if piece is None:
                break
            out.append(piece)
        return b"".join(out)

    def step(self, now: float) -> Optional[bytes]:
        """Read one request and answer it; None: it is not whole yet, or its answer comes later."""
        if self.exchange is None:
            self.buffer = self.buffer.lstrip(b"\r\n")
            if not self.buffer:
                return None
            end = self.head_end()
            if end is None:
                return None
            head, self.request_bytes = self.buffer[:end], self.buffer[:end]
            self.buffer = self.buffer[end:]
            exchange = Exchange(head)
            self.body_bytes = exchange.body_length()
            self.exchange = exchange
            self.deadline = now + HTTP_BODY_S
        if len(self.buffer) < self.body_bytes:
            return None
        exchange, self.exchange = self.exchange, None
        body, self.buffer = self.buffer[:self.body_bytes], self.buffer[self.body_bytes:]
        self.request_bytes += body
        self.deadline = now + HTTP_IDLE_S
        answer = self.web.answer(exchange, body, self.address, now)
        if isinstance(answer, Later):
            self.job, self.then, self.waiting = answer.job, answer.then, exchange
            return None
        return self.respond(exchange, answer)

    def respond(self, exchange: Exchange, answer: Answer) -> bytes:
        response = exchange.response(answer)
        self.done = exchange.close_connection
        if answer.shared and exchange.command in ("GET", "HEAD"):
            self.web.remember(self.request_bytes, response, self.done)
        return response

    def resume(self, result: Any, now: float) -> bytes:
        self.job = None
        assert self.then is not None
        self.deadline = now + HTTP_IDLE_S
        try:
            answer = self.web.finish(self.waiting, self.then(result))
        except HttpError as error:
            return self.refuse(error)
        if isinstance(answer, Later):
            self.job, self.then = answer.job, answer.then
            return b""
        return self.respond(self.waiting, answer) + self.work(now)

    def head_end(self) -> Optional[int]:
        """Where the body begins; None: not there yet. Raises HttpError for what cannot become a request."""
        line_end = self.buffer.find(b"\n")
        line = self.buffer if line_end < 0 else self.buffer[:line_end]
        if len(line) > HTTP_LINE_BYTES:
            raise HttpError(414, "The request line is longer than %d bytes." % HTTP_LINE_BYTES)
        if not re.match(rb"[A-Za-z]", line):
            raise HttpError(400, "This is not an HTTP request; this port speaks HTTP without TLS.")
        if line_end >= 0 and len(line.split()) != 3:
            raise HttpError(400, "The request line is not METHOD PATH HTTP/VERSION.")
        match = HEAD_END.search(self.buffer)
        if (match.end() if match else len(self.buffer)) > HTTP_HEAD_BYTES:
            raise HttpError(431, "The headers are longer than %d bytes." % HTTP_HEAD_BYTES)
        return match.end() if match else None

    def refuse(self, error: HttpError) -> bytes:
        """An error after which the connection ends: what follows in it cannot be trusted to be a request."""
        self.done = True
        self.buffer, self.exchange = b"", None
        return Exchange().response(self.web.error(error))

    def tick(self, now: float) -> bytes:
        if now < self.deadline or self.job or self.done:
            return b""
        if self.buffer or self.exchange:
            self.web.count("", 408)
            return self.refuse(HttpError(408, "The request did not arrive in time."))
        self.done = True
        return b""


HEAD_END = re.compile(rb"\r?\n\r?\n")


class Rendering:
    """One list as bytes, made once an edition if anybody asks for it."""

    def __init__(self, type: str, make: Callable[[float], bytes]) -> None:
        self.type = type
        self.make = make
        self.edition = 0
        self.number = 0             # moves only when the bytes do
        self.body = b""
        self.gzipped: Optional[bytes] = None

    def refresh(self, edition: int, now: float) -> None:
        if edition != self.edition:
            self.edition = edition
            body = self.make(now)
            if body != self.body or not self.number:
                self.body, self.gzipped = body, None
                self.number += 1


def to_json(value: Any) -> bytes:
    """Compact, raw UTF-8: the Iceball client fails on any \\u escape. Texts are clean, so none is needed."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8")


def iceball_json(server: Server) -> bytes:
    """A server in /master.json: both documents' keys, all of them texts or numbers; `official` only if true."""
    fields: Dict[str, Any] = {
        "name": server.name, "address": server.address, "port": server.port, "players_current": server.players,
        "players_max": server.max_players, "mode": server.mode, "map": server.map, "version": server.version, "basedir": server.mode}
    if server.official:
        fields["official"] = True
    return to_json(fields)


class Web(TcpProtocol):
    """The HTTP side: routes, renderings, and what is remembered of both."""

    speaks_first = False

    def __init__(self, core: Core) -> None:
        self.settings = core.settings
        self.registry = core.registry
        self.epoch = 0.0            # wall clock minus monotonic clock, told by the event loop
        self.start_tag = "%x" % random.SystemRandom().getrandbits(32)       # numbers in ETags start over with the program
        # All lists change together, from one edition to the next: when a server has changed, but at most once in RENDER_S,
        # and after RENDER_STALE_S anyway. What is remembered is of this edition.
        self.edition = 1
        self.edition_at = float("-inf")
        self.edition_generation = -1
        self.memo: Dict[bytes, Tuple[bytes, bool]] = {}
        self.memo_bytes = 0
        self.renderings: Dict[Tuple[str, str], Rendering] = {}
        self.requests: collections.Counter[Tuple[str, int]] = collections.Counter()         # by route and status
        self.limiter = Limiter(*core.settings["limits.requests"], verdict=core.registry.rules.verdict)

    def session(self, address: str, now: float) -> HttpSession:
        return HttpSession(self, address, now)

    def allow(self, address: str, now: float) -> bool:
        return self.limiter.allow(address, now)

    # What is remembered

    def turn(self, now: float) -> None:
        """Begin a new edition if it is time."""
        age = now - self.edition_at
        if age >= RENDER_S and self.edition_generation != self.registry.generation or age >= RENDER_STALE_S:
            self.edition += 1
            self.edition_at = now
            self.edition_generation = self.registry.generation
            self.memo.clear()
            self.memo_bytes = 0

    def remembered(self, request: bytes, now: float) -> Optional[Tuple[bytes, bool]]:
        self.turn(now)
        found = self.memo.get(request)
        if found:
            self.requests["remembered", 200] += 1
        return found

    def remember(self, request: bytes, response: bytes, close: bool) -> None:
        if len(request) > HTTP_MEMO_REQUEST_BYTES:
            return
        self.memo_bytes += len(request) + len(response)
        if self.memo_bytes > HTTP_MEMO_BYTES:
            self.memo.clear()
            self.memo_bytes = len(request) + len(response)
        self.memo[request] = response, close

    # Answers

    def answer(self, exchange: Exchange, body: bytes, address: str, now: float) -> Union[Answer, Later]:
        parsed = urllib.parse.urlsplit(exchange.path)
        route = ROUTES.get(parsed.path)
        name = parsed.path if route else "other"
        try:
            if not self.allow(address, now):
                raise HttpError(429, "Too many requests from %s; wait a few seconds." % address, (("Retry-After", "5"),))
            if route is None:
                raise HttpError(404, "There is no page %s here." % parsed.path[:100])
            if exchange.command not in route.methods:
                raise HttpError(405, "%s takes %s." % (name, ", ".join(route.methods)), (("Allow", ", ".join(route.methods)),))
            if exchange.command == "OPTIONS":
                answer: Union[Answer, Later] = Answer(b"", headers=(
                    ("Allow", ", ".join(route.methods)), ("Access-Control-Allow-Origin", "*"),
                    ("Access-Control-Allow-Methods", ", ".join(route.methods)), ("Access-Control-Max-Age", "86400")))
            else:
                query = dict(urllib.parse.parse_qsl(parsed.query, keep_blank_values=True, errors="replace", max_num_fields=50))
                answer = self.finish(exchange, route.answer(self, Request(parsed.path, query, body, exchange, address, now)))
        except HttpError as error:
            answer = self.error(error, "text/html" in exchange.headers.get("Accept", ""))
            if parsed.path == "/master.json" and error.status == 429:
                answer = answer._replace(body=self.master_json_frame([]), type=JSON_TYPE)
        except ValueError as error:
            answer = self.error(HttpError(400, "The query cannot be read: %s." % error))
        self.count(name, answer.status if isinstance(answer, Answer) else 200)
        return answer

    def finish(self, exchange: Exchange, answer: Union[Answer, Later]) -> Union[Answer, Later]:
        """Compress where the client takes it and it pays."""
        return answer

    def count(self, route: str, status: int) -> None:
        self.requests[route, status] += 1

    def error(self, error: HttpError, as_html: bool = False) -> Answer:
        reason = http.server.BaseHTTPRequestHandler.responses.get(error.status, ("Error", ""))[0]
        hint = error.hint or reason
        body = fill(ERROR_PAGE, status=error.status, reason=reason, hint=hint) if as_html else "%d %s\n%s\n" % (error.status, reason, hint)
        return Answer(body.encode("utf-8"), HTML_TYPE if as_html else TEXT_TYPE, error.status, error.headers)

    def rendered(self, name: str, game: str, request: Request, type: str, make: Callable[[float], bytes]) -> Answer:
        rendering = self.renderings.get((name, game))
        if rendering is None:
            rendering = self.renderings[name, game] = Rendering(type, make)
        self.turn(request.now)
        rendering.refresh(self.edition, request.now)
        etag = '"%s-%s-%s-%d"' % (self.start_tag, name, game, rendering.number)
        return Answer(rendering.body, type, etag=etag, shared=True, headers=(("Access-Control-Allow-Origin", "*"),))

    def master_json(self, request: Request) -> Answer:
        return self.rendered("master.json", "iceball", request, JSON_TYPE, lambda now: self.master_json_frame(
            parts(self.registry.in_order("iceball"), "master.json", iceball_json)))

    def master_json_frame(self, servers: List[bytes]) -> bytes:
        return b'{"version":%d,"iceball_version":%d,"servers":[%s]}' % (
            ICEBALL_HBVERSION, self.settings["iceball.version"], b",\n".join(servers))

    def page(self, request: Request) -> Answer:
        return self.rendered("page", "", request, HTML_TYPE, lambda now: fill(
            LIST_PAGE, title="Servers", rows=Html("".join(
                fill(ROW, name=s.name, mode=s.mode, map=s.map, players=s.players, max_players=s.max_players, version=s.version,
                     address=endpoint(s.address, s.port)) for s in self.registry.in_order()))).encode("utf-8"))

    def style(self, request: Request) -> Answer:
        return Answer(STYLE_CSS.encode("utf-8"), "text/css; charset=utf-8", shared=True)


ROUTES = {
    "/": Route(Web.page),
    "/index.html": Route(Web.page),
    "/style.css": Route(Web.style),
    "/master.json": Route(Web.master_json),
}

# =====================================================================================================================
# 10  The table of protocols
#
# In order to add a game: write its class in section 7, add a row here and its settings in section 3, put its packets into
# the tests. The listener's port is the setting plus `offset`; where the setting is empty, the row is left out.
# =====================================================================================================================

class Row(NamedTuple):
    name: str
    transport: str                  # udp or tcp
    setting: str                    # its port, or ports; "" stands for any free port
    offset: int
    make: Callable[[Core], Union[UdpProtocol, TcpProtocol]]


PROTOCOLS = (
    Row("poll", "udp", "", 0, lambda core: core.poller),
    Row("iceball", "udp", "iceball.port", 0, Iceball),
    Row("aio", "tcp", "aio.port", 0, Aio),
    Row("http", "tcp", "http.ports", 0, Web),
)

# =====================================================================================================================
# 11  Event loop
#
# The only place with sockets and a clock. One thread serves every listener and connection; the clock is read once a wake-up. Two
# more threads do what can block: one the disk and compression, one the resolution of names.
# =====================================================================================================================

WINDOWS = os.name == "nt"
SO_RCVBUFFORCE = 33                 # Linux, for a privileged process: past net.core.rmem_max; Python has no name for it
KEEP_ALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))     # a dead peer is found after two minutes
DESCRIPTORS_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class StartError(Exception):
    """The server cannot start; the text says what to change."""


class Listener(NamedTuple):
    """One bound socket, as in the ready file."""

    protocol: str
    transport: str
    host: str
    port: int


class Datagrams:
    """A UDP socket and its protocol."""

    def __init__(self, name: str, sock: socket.socket, protocol: UdpProtocol, tally: Tally, limiter: Limiter) -> None:
        self.name, self.sock, self.protocol, self.tally, self.limiter = name, sock, protocol, tally, limiter
        self.mapped = sock.family == socket.AF_INET6

    def ready(self, mask: int, now: float) -> None:
        tally = self.tally
        receive, send, handle, allow = self.sock.recvfrom, self.sock.sendto, self.protocol.datagram, self.limiter.allow
        for _ in range(DRAIN_DATAGRAMS):
            try:
                data, peer = receive(MAX_DATAGRAM_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:         # Windows: an earlier answer met a closed port (ConnectionResetError)
                continue
            tally.received += 1
            tally.bytes_in += len(data)
            if not allow(peer[0], now):
                tally.limited += 1
                continue
            try:
                replies = handle(data, peer, now)
            except Malformed as error:
                tally.malformed += 1
                if log.isEnabledFor(logging.DEBUG):
                    log.debug("%s %s malformed: %s: %s", endpoint(peer[0], peer[1]), self.name, error, ascii(data[:48]))
                continue
            except Exception:
                tally.errors += 1
                log.exception("%s %s: a packet ended in an error of the program: %s",
                              endpoint(peer[0], peer[1]), self.name, ascii(data[:600]))
                continue
            for reply, to in replies:
                try:
                    send(reply, to)
                except OSError:     # no room, no route: the peer asks again
                    tally.unsent += 1
                else:
                    tally.sent += 1
                    tally.bytes_out += len(reply)

    def send(self, replies: Replies) -> None:
        for reply, to in replies:
            if self.mapped and ":" not in to[0]:
                to = ("::ffff:" + to[0],) + to[1:]
            try:
                self.sock.sendto(reply, to)
            except OSError:
                self.tally.unsent += 1
            else:
                self.tally.sent += 1
                self.tally.bytes_out += len(reply)

    def tick(self, now: float) -> None:
        self.send(self.protocol.tick(now))


class Connection:
    """A TCP connection and its session: bounded in what it may hold, how long it may stall, and never ended by a reset."""

    __slots__ = ("loop", "sock", "address", "session", "tally", "name", "out", "out_since", "progress_at", "writing", "linger_until",
                 "linger_bytes", "working", "eof", "source")

    def __init__(self, loop: MasterServer, sock: socket.socket, address: str, session: Session, tally: Tally, name: str, now: float) -> None:
        self.loop, self.sock, self.address, self.session, self.tally, self.name = loop, sock, address, session, tally, name
        self.source = source_key(address)
        self.out: Union[bytes, memoryview] = b""
        self.out_since = self.progress_at = now
        self.writing = False                # the selector watches for room to write
        self.working = False                # the session's job is with the worker
        self.eof = False                    # the peer sends no more
        self.linger_until = 0.0             # not 0: our last byte is out, what comes is read away until then
        self.linger_bytes = LINGER_BYTES

    def ready(self, mask: int, now: float) -> None:
        if mask & selectors.EVENT_WRITE:
            self.write(now)
        if mask & selectors.EVENT_READ and self.sock.fileno() >= 0:
            self.read(now)

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
            if not self.out and not self.working and not self.session.held:
                self.close(now)
            return
        self.tally.received += 1
        self.tally.bytes_in += len(data)
        self.call(self.session.receive, data, now)

    def call(self, method: Callable[..., bytes], *arguments: Any) -> None:
        """Let the session work, then write what it gives."""
        now = arguments[-1]
        self.progress_at = now
        try:
            data = method(*arguments)
        except Malformed as error:
            self.tally.malformed += 1
            log.debug("%s %s malformed: %s", self.address, self.name, error)
            data = b""
            self.session.done = True
        except Exception:
            self.tally.errors += 1
            log.exception("%s %s: a connection ended in an error of the program", self.address, self.name)
            data = b""
            self.session.done = True
        if self.session.job is not None and not self.working:
            self.working = True
            self.loop.disk.submit(self.session.job, self.resumed)
        if data:
            if not self.out:
                self.out_since = now
            self.out = bytes(self.out) + data if self.out else data
        if self.session.wake_at is not None:
            self.loop.wake_at(self.session.wake_at, self)
            self.session.wake_at = None
        if data or self.session.done or self.session.held:
            self.write(now)

    def resumed(self, result: Any, now: float) -> None:
        self.working = False
        if self.sock.fileno() >= 0:
            self.call(self.session.resume, result, now)
            if self.eof and not self.out and not self.working and self.sock.fileno() >= 0:
                self.close(now)

    def write(self, now: float) -> None:
        while self.out:
            try:
                sent = self.sock.send(self.out)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self.close(now)
                return
            self.progress_at = now
            self.tally.bytes_out += sent
            if sent == len(self.out):
                self.out = b""
                self.tally.sent += 1
            else:
                self.out = memoryview(self.out)[sent:]
        if self.out:
            if not self.writing:
                self.watch()
            return
        if self.writing:                # a later round of the loop than the one in which this was to be written
            self.writing = False
            if not self.session.done:
                self.call(self.session.receive, b"", now)       # what was held back while the output was full
                if self.writing or self.sock.fileno() < 0:
                    return
            self.watch()
        if self.linger_until:
            return
        if self.session.done:
            self.finish(now)
        elif self.session.held:
            self.watch()
        elif self.eof and not self.working:
            self.close(now)

    def watch(self) -> None:
        """Tell the selector what to wait for. Nothing is read while output waits: that bounds both."""
        self.writing = bool(self.out) or self.session.held and not self.session.done
        self.loop.watch(self, selectors.EVENT_WRITE if self.writing else 0 if self.eof else selectors.EVENT_READ)

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
        self.read(now)

    def tick(self, now: float) -> None:
        if self.linger_until:
            if now >= self.linger_until:
                self.close(now)
        elif self.out:
            if now - self.progress_at >= OUTPUT_STALL_S or now - self.out_since >= OUTPUT_TOTAL_S:
                self.close(now)
        elif not self.working:
            progress_at = self.progress_at
            self.call(self.session.tick, now)
            if not self.out:
                self.progress_at = progress_at          # a tick is no sign of life

    def close(self, now: float) -> None:
        if self.sock.fileno() < 0:
            return
        self.loop.forget(self)
        self.sock.close()
        try:
            self.session.closed(now)
        except Exception:
            self.tally.errors += 1
            log.exception("%s %s: an error of the program at the end of a connection", self.address, self.name)


class Acceptor:
    """A listening socket and its protocol."""

    def __init__(self, loop: MasterServer, name: str, sock: socket.socket, protocol: TcpProtocol, tally: Tally) -> None:
        self.loop, self.name, self.sock, self.protocol, self.tally = loop, name, sock, protocol, tally
        self.paused_until = 0.0

    def ready(self, mask: int, now: float) -> None:
        for _ in range(DRAIN_ACCEPTS):
            try:
                sock, peer = self.sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in DESCRIPTORS_SHORT:
                    self.pause(now, error)
                    return
                continue            # the peer has gone already
            self.loop.accepted(self, sock, canonical(peer[0]), now)

    def pause(self, now: float, error: OSError) -> None:
        """Out of descriptors: what waits stays in the backlog, and readiness would spin the loop."""
        log.warning("%s: no new connections for a second: %s", self.name, error.strerror)
        self.paused_until = now + ACCEPT_PAUSE_S
        self.loop.selector.unregister(self.sock)

    def tick(self, now: float) -> None:
        if self.paused_until and now >= self.paused_until:
            self.paused_until = 0.0
            self.loop.selector.register(self.sock, selectors.EVENT_READ, self.ready)


class Worker:
    """A thread for what can block. `done(result, now)` is called in the event loop; the result may be an exception."""

    def __init__(self, name: str, wake: Callable[[], None]) -> None:
        self.name = name
        self.wake = wake
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.results: collections.deque[Any] = collections.deque()
        self.thread: Optional[threading.Thread] = None

    def submit(self, job: Callable[[], Any], done: Callable[[Any, float], None]) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self.work, name="masterserver " + self.name, daemon=True)
            self.thread.start()
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
            self.wake()

    def deliver(self, now: float) -> None:
        while self.results:
            done, result = self.results.popleft()
            done(result, now)

    def stop(self, timeout: float) -> None:
        if self.thread is not None:
            self.jobs.put(None)
            self.thread.join(timeout)


class MasterServer:
    """The running program. `run()` serves in this thread, `start()` in one of its own; either until `stop()`.

    `settings`: a Settings, or texts by name such as {"iceball.port": "0"}. `on_event(event, server)` is called in the serving thread
    with "listed", "changed" or "gone".
    """

    def __init__(self, settings: Union[Settings, Mapping[str, str], None] = None,
                 on_event: Optional[Callable[[str, Server], None]] = None) -> None:
        self.settings = settings if isinstance(settings, Settings) else Settings(settings)
        self.rules = Rules(self.settings)
        self.registry = Registry(self.rules)
        self.poller = Poller(self.settings)
        self.core = Core(self.settings, self.registry, self.poller, self.resolve, self.read_file)
        self.tallies: Dict[str, Tally] = {}
        self.listeners: List[Listener] = []
        self.protocols: List[Union[UdpProtocol, TcpProtocol]] = []
        self.endpoints: List[Union[Datagrams, Acceptor]] = []
        self.connections: collections.OrderedDict[Connection, None] = collections.OrderedDict()
        self.connections_by_source: collections.Counter[str] = collections.Counter()
        self.timers: List[Tuple[float, int, Connection]] = []
        self.timer_numbers = itertools.count()
        self.selector = selectors.DefaultSelector()
        self.stopping = False
        self.thread: Optional[threading.Thread] = None
        self.wake_in, self.wake_out = socket.socketpair()
        self.wake_in.setblocking(False)
        self.wake_out.setblocking(False)
        self.selector.register(self.wake_in, selectors.EVENT_READ, self.woken)
        self.disk = Worker("disk", self.wake)
        self.names = Worker("names", self.wake)
        self.loop_delay_s = 0.0             # the longest that a ready socket waited, since the last look
        self.registry.watchers.append(self.log_event)
        if on_event is not None:
            self.registry.watchers.append(on_event)
        self.datagram_limiter = Limiter(*self.settings["limits.datagrams"], verdict=self.rules.verdict)
        self.connection_limiter = Limiter(*self.settings["limits.connections"], verdict=self.rules.verdict)

    # Sockets

    def bind(self) -> None:
        """Open every listener of the settings; raises StartError."""
        if self.listeners:
            return
        try:
            for row in PROTOCOLS:
                ports = self.settings[row.setting] if row.setting else 0
                if not isinstance(ports, tuple):
                    ports = (ports,)
                if any(port is not None for port in ports):
                    protocol = row.make(self.core)
                    self.protocols.append(protocol)
                    for port in ports:
                        if port is not None:
                            self.open(row, protocol, port)
        except BaseException:
            self.close()
            raise

    def open(self, row: Row, protocol: Union[UdpProtocol, TcpProtocol], port: int) -> None:
        tally = self.tallies.setdefault(row.name, Tally())
        optional_ipv6 = self.settings["server.bind"] == read_list(read_address)("0.0.0.0, ::")
        for address in self.settings["server.bind"]:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            if protocol.ipv4_only and family == socket.AF_INET6:
                continue
            wanted = port + row.offset if port else 0
            if wanted == 0:                 # one free port for all addresses if that can be had
                wanted = next((l.port for l in self.listeners if l.protocol == row.name and l.transport == row.transport
                               and (":" in l.host) != (":" in address)), 0)
            try:
                sock = bound_socket(family, row.transport, address, wanted)
            except OSError as error:
                if family == socket.AF_INET6 and optional_ipv6 and error.errno != errno.EADDRINUSE:
                    log.info("%s: no IPv6 on this machine: %s", row.name, error)
                    continue
                raise StartError("%s cannot listen on %s %s: %s. %s" % (
                    row.name, row.transport.upper(), endpoint(address, wanted), error.strerror or error,
                    "Is another master server running? Change it with [%s] %s (--set %s=PORT)." % (
                        *row.setting.split("."), row.setting))) from None
            host, bound_port = sock.getsockname()[:2]
            self.listeners.append(Listener(row.name, row.transport, host, bound_port))
            if isinstance(protocol, UdpProtocol):
                source: Union[Datagrams, Acceptor] = Datagrams(row.name, sock, protocol, tally, self.datagram_limiter)
            else:
                source = Acceptor(self, row.name, sock, protocol, tally)
            self.endpoints.append(source)
            self.selector.register(sock, selectors.EVENT_READ, source.ready)

    def accepted(self, acceptor: Acceptor, sock: socket.socket, address: str, now: float) -> None:
        source = source_key(address)
        exempt = self.rules.verdict(address)
        if (exempt == BLOCKED or not self.connection_limiter.allow(address, now)
                or exempt != EXEMPT and self.connections_by_source[source] >= self.settings["limits.connections_open"]):
            acceptor.tally.limited += 1
            sock.close()
            return
        if len(self.connections) >= self.settings["limits.connections_total"]:
            self.make_room(now)
        sock.setblocking(False)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            pass
        session = acceptor.protocol.session(address, now)
        connection = Connection(self, sock, address, session, acceptor.tally, acceptor.name, now)
        acceptor.tally.connections += 1
        self.connections[connection] = None
        self.connections_by_source[source] += 1
        self.selector.register(sock, selectors.EVENT_READ, connection.ready)
        connection.call(session.opened, now)
        if not acceptor.protocol.speaks_first and sock.fileno() >= 0:
            connection.read(now)            # its request is usually here already

    def wake_at(self, at: float, connection: Connection) -> None:
        heapq.heappush(self.timers, (at, next(self.timer_numbers), connection))

    def make_room(self, now: float) -> None:
        """Close the connection that has been idle for longest, publishing servers last."""
        idle = min(self.connections, key=lambda c: (c.session.kept, c.progress_at))
        idle.tally.limited += 1
        idle.close(now)

    def watch(self, connection: Connection, events: int) -> None:
        try:
            self.selector.unregister(connection.sock)
        except KeyError:
            pass
        if events:
            self.selector.register(connection.sock, events, connection.ready)

    def forget(self, connection: Connection) -> None:
        try:
            self.selector.unregister(connection.sock)
        except KeyError:
            pass
        self.connections.pop(connection, None)
        self.connections_by_source[connection.source] -= 1
        if self.connections_by_source[connection.source] <= 0:
            del self.connections_by_source[connection.source]

    # Running

    def run(self) -> None:
        """Serve until stop(); opens the listeners if bind() has not."""
        self.bind()
        next_tick = time.monotonic() + TICK_S
        try:
            while not self.stopping:
                wait = min(next_tick, self.timers[0][0] if self.timers else next_tick) - time.monotonic()
                events = self.selector.select(max(0.0, wait))
                now = time.monotonic()
                for key, mask in events:
                    key.data(mask, now)
                while self.timers and self.timers[0][0] <= now:
                    connection = heapq.heappop(self.timers)[2]
                    if connection.sock.fileno() >= 0:
                        connection.tick(now)
                if now >= next_tick:
                    next_tick = now + TICK_S
                    self.tick(now)
                self.loop_delay_s = max(self.loop_delay_s, time.monotonic() - now)
        finally:
            self.close()

    def tick(self, now: float) -> None:
        epoch = time.time() - now
        for protocol in self.protocols:
            if isinstance(protocol, Web):
                protocol.epoch = epoch
        self.registry.expire(now)
        for source in self.endpoints:
            self.guarded(source.tick, now)
        for protocol in self.protocols:
            if isinstance(protocol, TcpProtocol):
                self.guarded(protocol.tick, now)
        for connection in list(self.connections):
            connection.tick(now)
        self.save(now)

    def guarded(self, tick: Callable[[float], None], now: float) -> None:
        try:
            tick(now)
        except Exception:
            log.exception("an error of the program in the tick of %s", tick)

    def save(self, now: float) -> None:
        self.registry.seen, self.registry.altered, self.registry.left = set(), set(), set()

    def wake(self) -> None:
        """Make select() return; from any thread."""
        try:
            self.wake_out.send(b"\0")
        except OSError:
            pass

    def woken(self, mask: int, now: float) -> None:
        try:
            self.wake_in.recv(4096)
        except OSError:
            pass
        self.disk.deliver(now)
        self.names.deliver(now)

    def resolve(self, host: str, done: Callable[[str, float], None]) -> None:
        """Look a host name up in a thread of its own; a lookup can take half a minute."""
        self.names.submit(functools.partial(resolved, host),
                          lambda result, now: done(result if isinstance(result, str) else "", now))

    def read_file(self, path: str, size: int, done: Callable[[Any, float], None]) -> None:
        """Read the first `size` bytes of a file in the worker; a disk can take its time."""
        self.disk.submit(functools.partial(read_head, path, size), done)

    def start(self) -> None:
        """Serve in a thread; returns once every listener is bound."""
        self.bind()
        self.thread = threading.Thread(target=self.run, name="masterserver", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """End run(), from any thread or a signal handler, and wait for the thread if there is one."""
        self.stopping = True
        self.wake()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join()
        elif self.thread is None:
            pass

    def close(self) -> None:
        now = time.monotonic()
        for connection in list(self.connections):
            connection.close(now)
        for source in self.endpoints:
            source.sock.close()
        self.disk.stop(5.0)
        self.names.stop(0.0)
        self.selector.close()
        self.wake_in.close()
        self.wake_out.close()

    def __enter__(self) -> MasterServer:
        self.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.stop()

    def log_event(self, event: str, server: Server) -> None:
        if event != "changed":
            log.info("%s %s %s %s", endpoint(server.address, server.port), server.game, event, ascii(server.name))


def resolved(host: str) -> str:
    """The first address of a host, IPv4 if it has one; raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    return canonical(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def keep_alive(sock: socket.socket) -> None:
    """Let the kernel find peers that vanished without a word; the connections of a listener inherit it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE:
        if hasattr(socket, name):
            try:
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            except OSError:             # an older Windows: two hours instead of two minutes
                pass


def read_head(path: str, size: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(size)


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
            for option in (SO_RCVBUFFORCE, socket.SO_RCVBUF) if sys.platform == "linux" else (socket.SO_RCVBUF,):
                try:
                    sock.setsockopt(socket.SOL_SOCKET, option, UDP_BUFFER_BYTES)
                    break
                except OSError:         # not privileged, or more than the system allows
                    pass
        sock.bind((address, port))
        if transport == "tcp":
            keep_alive(sock)
            sock.listen(1024)
        sock.setblocking(False)
        return sock
    except BaseException:
        sock.close()
        raise


# =====================================================================================================================
# 12  Client tools and command line
# =====================================================================================================================

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


def arguments_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="masterserver.py", description="A master server for Iceball, Hyperbol, SubSpace, AIO and others.")
    parser.add_argument("--config", metavar="FILE", help="settings; masterserver.ini beside the program if it is there")
    parser.add_argument("--set", metavar="SECTION.KEY=VALUE", action="append", default=[], help="a setting that overrides the ini; repeatable")
    parser.add_argument("--check", action="store_true", help="look at the settings, say what is wrong with them, and end")
    parser.add_argument("--print-config", action="store_true", help="print every setting with its default and its meaning")
    parser.add_argument("--ready-file", metavar="FILE", help="write what listens where, as JSON, once it does")
    parser.add_argument("-v", "--verbose", action="store_true", help="log at debug level")
    parser.add_argument("--version", action="version", version="masterserver.py " + __version__)
    return parser


def load_settings(arguments: argparse.Namespace) -> Settings:
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "masterserver.ini")
    return Settings.load(arguments.config or beside, arguments.set, missing_ok=not arguments.config)


def start_log(settings: Settings, verbose: bool) -> None:
    handler: logging.Handler
    if settings["server.log_file"]:
        try:
            handler = logging.handlers.RotatingFileHandler(settings["server.log_file"], maxBytes=10 << 20, backupCount=3, encoding="utf-8")
        except OSError as error:
            raise StartError("the log cannot be written: %s; change [server] log_file." % error) from None
    else:
        handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.DEBUG if verbose else settings["server.log_level"].upper())
    log.propagate = False


def write_ready_file(path: str, listeners: Sequence[Listener]) -> None:
    text = json.dumps({"pid": os.getpid(), "listeners": [l._asdict() for l in listeners]})
    try:
        with open(path + ".new", "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.replace(path + ".new", path)
    except OSError as error:
        raise StartError("the ready file cannot be written: %s" % error) from None


def summary(server: MasterServer) -> str:
    """One line for people: what listens where, and the page."""
    places: Dict[str, List[str]] = {}
    for listener in server.listeners:
        place = places.setdefault(listener.protocol, [])
        text = "%s %d" % (listener.transport.upper(), listener.port)
        if text not in place:
            place.append(text)
    page = next((l for l in server.listeners if l.protocol == "http"), None)
    return "; ".join("%s on %s" % (name, ", ".join(place)) for name, place in places.items()) + (
        "; the page is at http://%s/" % endpoint("localhost" if page.host in ("0.0.0.0", "::", "127.0.0.1", "::1") else page.host, page.port)
        if page else "")


def serve(settings: Settings, arguments: argparse.Namespace) -> int:
    start_log(settings, arguments.verbose)
    server = MasterServer(settings)
    for name in ("SIGINT", "SIGTERM", "SIGBREAK"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, frame: server.stop())
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(server.wake_out.fileno(), warn_on_full_buffer=False)
    try:
        server.bind()
        log.info("%s", summary(server))
        if arguments.ready_file:
            write_ready_file(arguments.ready_file, server.listeners)
        server.run()
    finally:
        signal.set_wakeup_fd(-1)
    for name, tally in server.tallies.items():
        log.info("stopped; %s: %s", name, ", ".join("%s %d" % item for item in tally.items() if item[1]) or "nothing")
    return EXIT_OK


def main(argv: Optional[Sequence[str]] = None) -> int:
    arguments = arguments_parser().parse_args(argv)
    try:
        if arguments.print_config:
            sys.stdout.write(config_text())
            return EXIT_OK
        settings = load_settings(arguments)
        if arguments.check:
            print("The settings are good.")
            return EXIT_OK
        return serve(settings, arguments)
    except SettingsError as error:
        print("masterserver.py: %s" % error, file=sys.stderr)
        return EXIT_USAGE
    except StartError as error:
        print("masterserver.py: %s" % error, file=sys.stderr)
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
