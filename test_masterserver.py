"""Tests of masterserver.py, in the program's order: python3 test_masterserver.py

Golden packets come from the protocol documents and from captures of deployed programs, never from
the program's own encoders. Protocol time is a number that the test moves; only the scenarios use
real sockets, on loopback and free ports.
"""
from __future__ import annotations

import ast
import collections
import concurrent.futures
import contextlib
import ctypes
import dis
import errno
import glob
import functools
import gc
import gzip
import html
import html.parser
import http.client
import http.server
import io
import ipaddress
import itertools
import json
import logging
import math
import os
import platform
import random
import re
import select
import selectors
import shlex
import shutil
import signal
import socket
import socketserver
import sqlite3
import ssl
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
import unittest
import unittest.mock
import urllib.request
import warnings
import xml.dom.minidom
import zlib
from types import SimpleNamespace
from unittest import mock
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import masterserver as ms

try:
    import tracemalloc
except ImportError:                     # PyPy keeps no such account: there the tests run without it
    tracemalloc = mock.Mock(get_traced_memory=lambda: (0, 0))

HERE = os.path.dirname(os.path.abspath(__file__))
PROGRAM = os.path.join(HERE, "masterserver.py")
# The interpreter is: the largest counts are smaller there
SLOW = sys.flags.dev_mode or "PyPy" in sys.version
PYTHON = [sys.executable, "-W", "error", "-X", "dev"]
# Python keeps a module's compiled form, so that it starts in half the time; the README's commands
# start the script
START = [*PYTHON, "-m", "masterserver"]
# What it does once a second is done ten times as often, for tests that wait for it
HURRIED = [*PYTHON, "-c", "import sys, masterserver as ms; ms.TICK_S = 0.1; sys.exit(ms.main())"]
os.environ["PYTHONPATH"] = HERE
# Settings of a program that nobody outside reaches, and that opens no port
NO_PORTS = {"server.bind": "127.0.0.1",
            **dict.fromkeys(ms.PORT_SETTINGS, "")}
# How long a test waits for what happens at once on a quiet machine, and much later on a busy one:
# nobody waits so long when all goes well
SOON_S = 30.0
# Pairs of ports that no system hands out for port 0, in an order of this process
PORTS = iter(random.SystemRandom().sample(range(10000, 20000, 2), 5000))
hexa = bytes.fromhex                    # wire bytes from hex with spaces


def setting_names(arguments: Dict[str, str]) -> Dict[str, str]:
    """From keyword arguments: iceball__port is [iceball] port."""
    return {name.replace("__", "."): value for name, value in arguments.items()}


def settings_of(arguments: Dict[str, str]) -> ms.Settings:
    return ms.Settings(setting_names(arguments))


class FakeMaster(SimpleNamespace):
    """The parts of the program that rooms and the web server are handed, without sockets."""

    def _replace(self, **changed: Any) -> FakeMaster:
        return FakeMaster(**{**vars(self), **changed})


def make_core(**settings: str) -> FakeMaster:
    """What rooms are handed, without sockets: make_core(iceball__timeout="60")."""
    chosen = settings_of(settings)
    return FakeMaster(
        settings=chosen, registry=ms.Registry(ms.Rules(chosen)), poller=ms.Poller(chosen), rooms={},
        resolve=lambda host, done, source, like="": done(host, 0.0), send=lambda data, peer: None,
        epoch=0.0, database=None, tallies={}, health={}, listeners=[], gauges={}, cluster={},
        upstream={}, hourly_players=dict)


def with_rooms(core: FakeMaster) -> FakeMaster:
    """Put the rooms of all games into it."""
    for game in ms.GAMES:
        core.rooms[game.game] = game(core)
    return core


def changes_of(registry: ms.Registry) -> List[Tuple[str, ms.Server]]:
    """What has changed in the list since the last call."""
    noted, registry.changes = registry.changes, []
    return noted


def deliver(protocol: Any, data: bytes, peer: Tuple[str, int], now: float = 0.0) -> ms.Replies:
    """What the event loop does with a datagram at a room's port. Return the replies."""
    registry = protocol.registry
    sender = peer[0] if protocol.repeated_from == "address" else peer
    server = registry.by_fingerprint.get(hash((data, sender)))
    if server is not None and protocol.repeated_from:
        server.last_seen = now
        return [(server.repeat_answer, peer)] if server.repeat_answer else []
    try:
        return protocol.datagram(data, peer, now)
    except ms.Refused as refused:
        registry.record_unproven(
            peer[0], protocol.game, refused.port, refused.outcome, now, str(refused))
        return []
    except ms.Malformed as error:
        registry.record_unproven(peer[0], protocol.game, 0, "bad packet", now, str(error))
        raise


def reload(core: Any, *protocols: Any, **settings: str) -> None:
    """What the program does when its ini has changed."""
    chosen = settings_of(settings)
    server = mock.Mock(settings=chosen, rules=core.registry.rules, registry=core.registry,
                       protocols=protocols)
    server.connections = {}
    with mock.patch.object(ms, "log"):
        ms.MasterServer.apply_settings(server, 0.0)


def converse(conversation: Any, *received: Any) -> Tuple[List[ms.Send], Any]:
    """Give these data to a conversation. Return its steps, and what it has returned."""
    steps = [next(conversation)]
    try:
        for data in received:
            steps.append(conversation.send(data))
    except StopIteration as stop:
        return steps, stop.value
    return steps, None


def feed(session: ms.Session, data: bytes, size: int = 1 << 30, now: float = 0.0) -> bytes:
    """Everything that a session answers to data that comes in pieces of `size` bytes."""
    out = b""
    for at in range(0, len(data), size):
        answer = session.receive(data[at:at + size], now)
        while answer or session.unfinished:
            out += sent(session, answer)
            answer = b"" if session.done else session.receive(b"", now)
    return out


def sent(session: ms.Session, answer: bytes) -> bytes:
    """What a connection sends for the answer of a session: a long body follows it."""
    body, session.body = session.body, b""
    return answer + body


class RunningServer:
    """The program in a process of its own, on free ports of loopback. `log` is what it has written
    to standard error, once it has stopped; `start_s` are the seconds until it was ready."""

    def __init__(self, *options: str, start: Sequence[str] = START, **settings: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        ready, self.config, self.stderr = (os.path.join(self.folder.name, name) for name in (
            "ready.json", "masterserver.ini", "stderr"))
        open(self.config, "w").close()
        command = [*start, "--config", self.config, "--ready-file", ready, *options]
        if ms.WINDOWS:                  # which has no signal that ends a child cleanly
            command.append("--exit-with-stdin")
        for setting in {**NO_PORTS, "iceball.port": "0", "http.ports": "0",
                        **setting_names(settings)}.items():
            command += ["--set", "%s=%s" % setting]
        with open(self.stderr, "wb") as stderr:
            began = time.monotonic()
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE if ms.WINDOWS else subprocess.DEVNULL, stderr=stderr)
        while not os.path.exists(ready):
            if self.process.poll() is not None or time.monotonic() > began + SOON_S:
                self.stop()
                raise AssertionError("the server did not start: " + self.log)
            time.sleep(0.0005)
        self.start_s = time.monotonic() - began
        with open(ready, encoding="utf-8") as file:
            self.listeners = json.load(file)["listeners"]

    def port(self, protocol: str, transport: str = "", index: int = 0) -> int:
        return [listener["port"] for listener in self.listeners if listener["protocol"] == protocol
                and transport in ("", listener["transport"])][index]

    def logged(self, text: bytes = b"") -> bool:
        """Has the program written this?"""
        with open(self.stderr, "rb") as file:
            self.log = file.read().decode("utf-8", "replace")
        return text.decode() in self.log

    def stop(self) -> int:
        """End it as a service manager does, or where that is to kill it, as a parent does; the
        exit status. The log stays."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        elif self.process.poll() is None:
            self.process.terminate()
        status = self.process.wait(SOON_S)
        self.logged()
        self.folder.cleanup()
        return status

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *exception: Any) -> None:
        status = self.stop()
        if exception[0] is None:
            assert status == 0, (status, self.log)
            assert "Traceback" not in self.log and "Warning" not in self.log, self.log


def timing(test: Callable[[Any], None]) -> Callable[[Any], None]:
    """For a test that measures time: whatever else the machine does only adds to it, so the best
    of three attempts counts, and it runs alone."""
    @functools.wraps(test)
    def attempts(self):
        for left in (2, 1, 0):
            try:
                return test(self)
            except AssertionError:
                if not left:
                    raise
            self.doCleanups()
            self.setUp()
    attempts.alone = True
    return attempts


def eventually(check: Callable[[], Any], seconds: float = SOON_S) -> Any:
    """The first true result of `check`; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        result = check()
        if result:
            return result
        if time.monotonic() > deadline:
            raise AssertionError("it did not happen within %g s" % seconds)
        time.sleep(0.02)


def free_port() -> int:
    """A port that is free, as is the next one, by UDP and TCP. For what is bound later, or anew:
    one that the system had handed out could be somebody else's by then."""
    for port in PORTS:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for kind in socket.SOCK_DGRAM, socket.SOCK_STREAM:
                for place in port, port + 1:
                    sock = stack.enter_context(socket.socket(socket.AF_INET, kind))
                    sock.bind(("0.0.0.0", place))
            return port
    raise AssertionError("there is no free port")


def master(**settings: str) -> ms.MasterServer:
    """In this process, with the protocols named, on free ports; no source is exempt from limits."""
    return ms.MasterServer({**NO_PORTS, "limits.exempt": "", **setting_names(settings)})


def bound_master(test: unittest.TestCase, **settings: str) -> ms.MasterServer:
    """One whose loop the test drives itself."""
    server = master(**settings)
    test.addCleanup(server.close)
    server.bind()
    return server


def block_of(server: ms.MasterServer, game: str) -> str:
    """What somebody pastes to have a server of this game listed here."""
    place = ms.MasterPlace("127.0.0.1", ms.page_url(server, "127.0.0.1"))
    block, = [contact.block for contact in ms.contact_blocks(server, place)
              if game in contact.games]
    return block


def port_of(server: ms.MasterServer, protocol: str) -> int:
    return next(l.port for l in server.listeners if l.protocol == protocol)


def connect(server: ms.MasterServer, protocol: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port_of(server, protocol)), SOON_S)


def read_all(client: socket.socket, size: int = 65536) -> bytes:
    return b"".join(iter(lambda: client.recv(size), b""))


def split_response(data: bytes) -> Tuple[int, Dict[str, str], bytes, bytes]:
    """Status, headers, body as long as Length says, and what follows."""
    head, _, rest = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert headers["Length"] == headers["Content-Length"], headers
    length = int(headers["Length"])
    return int(first.split()[1]), headers, rest[:length], rest[length:]


def fetch(port: int, path: str, *headers: str, method: str = "GET",
          body: bytes = b"") -> Tuple[int, Dict[str, str], bytes]:
    """One request on a connection of its own."""
    lines = ["%s %s HTTP/1.1" % (method, path), "Host: 127.0.0.1", "Connection: close", *headers]
    if body:
        lines.append("Content-Length: %d" % len(body))
    with socket.create_connection(("127.0.0.1", port), SOON_S) as client:
        client.sendall("\r\n".join(lines + ["", ""]).encode() + body)
        return split_response(read_all(client))[:3]


needs_openssl = unittest.skipUnless(shutil.which("openssl"),
                                    "there is no openssl to make a certificate")


def openssl(*words: str) -> str:
    """The output of the command openssl."""
    return subprocess.run(["openssl", *words], check=True, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, encoding="utf-8").stdout


def make_certificate(folder: str, name: str, days: int = 30) -> Tuple[str, str]:
    """The paths of a certificate for a host of this name and of its key, made by openssl."""
    certificate, key = (os.path.join(folder, end) for end in ("certificate.pem", "key.pem"))
    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
            "-days", str(days), "-subj", "/CN=" + name, "-addext", "subjectAltName=DNS:" + name,
            "-keyout", key, "-out", certificate)
    return certificate, key


needs_forged_sources = unittest.skipUnless(
    sys.platform == "linux" and os.geteuid() == 0, "a forged source needs root's rights on Linux")


def send_forged(source: Tuple[str, int], place: Tuple[str, int], data: bytes) -> None:
    """A datagram from whatever source, as root: with an IPv4 header of our own."""
    udp = struct.pack(">HHHH", source[1], place[1], 8 + len(data), 0)       # 0: no checksum
    # Version 4 and 5 words of header; 64 hops. The system fills in length and checksum
    ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 0, 0, 0, 64, socket.IPPROTO_UDP, 0,
                     socket.inet_aton(source[0]), socket.inet_aton(place[0]))
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
        sock.sendto(ip + udp + data, (place[0], 0))


def run_program(*options: str, input: str = "",
                timeout: float = SOON_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*START, *options], input=input, timeout=timeout, encoding="utf-8",
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def command(*words: str) -> Tuple[int, str, str]:
    """Status, output and errors of a command, run in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = ms.main(words)
        except SystemExit as end:
            status = int(end.code or 0)
    return status, out.getvalue(), err.getvalue()


# --- Settings ---------------------------------------------------------------------------------

class SettingsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "some.ini")

    def load(self, text, *overrides):
        with open(self.path, "wb") as file:
            file.write(text.encode("utf-8") if isinstance(text, str) else text)
        return ms.Settings.load(self.path, overrides)

    def refused(self, text, *overrides):
        """What the error of this ini says; "" if it is none."""
        try:
            self.load(text, *overrides)
        except ms.SettingsError as error:
            self.assertNotIn("\n", str(error))
            return str(error)
        return ""

    def test_values(self):
        for name, text, value in (
                ("http.ports", "8080, 0,", (8080, 0)), ("limits.exempt", "", ()),
                ("aio.port", "", None), ("iceball.port", "65534", 65534),
                ("http.intro", " two\nlines ", "two\nlines"),
                ("http.intro", "Hello\n  see https://h.example/a=b",
                 "Hello\n  see https://h.example/a=b"),
                ("http.intro", 'x\n  <a href="https://h/">', 'x\n  <a href="https://h/">'),
                ("http.intro", "x\n a = b c d://", "x\n a = b c d://"),
                ("http.accent", " #1F4fd8", "#1f4fd8"), ("http.accent", "#48c", "#4488cc"),
                ("http.accent", "1f4fd8", "#1f4fd8"), ("http.accent", "", ""),
                ("http.links", "\n Rules  https://h.example/i\nfoot:Write to us mailto:a@b.example",
                 (("head", "Rules", "https://h.example/i"),
                  ("foot", "Write to us", "mailto:a@b.example"))),
                ("server.bind", "::ffff:127.0.0.1, [::1]", ("127.0.0.1", "::1")),
                ("server.public_address", "2001:DB8::0", "2001:db8::"),
                ("server.log_level", " Debug", "debug"),
                ("server.refuse_names", "\nA|b$\n ug", (re.compile("A|b$", re.I),
                                                        re.compile("ug", re.I))),
                ("iceball.accept_versions", "0.2.1, 0.2a-4", (8421376, 8389636)),
                ("hyperbol.servers", "a.example:5\n[::1]:6 3",
                 (("a.example", 5, 0), ("::1", 6, 3))),
                ("subspace.zones", "192.0.2.1:5\n\n b:65535", (("192.0.2.1", 5), ("b", 65535))),
                ("quake3.tags", "Warsow = Warsow\n\nA=b", ("Warsow = Warsow", "A=b")),
                ("quake3.games", "Xonotic, !Nexuiz", ("xonotic", "!nexuiz")),
                ("official.[::1]:5", "No", {("::1", 5): False}),
                ("priority.192.0.2.1:5", "-1000", {("192.0.2.1", 5): -1000}),
                ("address_map.::ffff:10.0.0.1", "1.2.3.4", {"10.0.0.1": "1.2.3.4"}),
                ("bans.198.51.100.9/24", "fakes: = and #",
                 {ipaddress.ip_network("198.51.100.0/24"): "fakes: = and #"}),
                ("games.my-game_2", "My Game", {"my-game_2": "My Game"}),
                ("country.203.0.113.7:20737", " DE ", {("203.0.113.7", 20737): "de"}),
                ("country.2001:DB8::1", "us", {("2001:db8::1", 0): "us"}),
                ("limits.requests", "2.5", (2.5, 2.5)), ("limits.requests", "2/9", (2, 9))):
            settings = ms.Settings({name: text})
            row = name if name in settings.values else name.partition(".")[0]
            self.assertEqual((settings[row], settings.given), (value, {row}), name)

    def test_errors_name_file_key_and_nearest(self):
        for ini, words in (
                ("[icebal]\nport = 1\n", "[icebal] is not a section; did you mean iceball"),
                ("[DEFAULT]\nport = 1\n", "[DEFAULT] is not a section"),
                ("[iceball]\nprot = 1\n", "[iceball] has no key prot; did you mean port"),
                ("[aio]\nxyzzy = 1\n", "expected one of news, news_file, port"),
                ("[iceball]\nport = many\n", "[iceball] port = many: expected a number"),
                ("[iceball]\nport = 65535\n", "from 0 to 65534"),
                ("[official]\na.example:5 = yes\n", "= yes: expected an IPv4 or IPv6 address"),
                ("[official]\n1.2.3.4:5 = perhaps\n", "expected one of 1, yes, true, on, 0, no"),
                ("[address_map]\n192.168.1.5 = 224.0.0.1\n", "cannot be the address"),
                ("[bans]\n1.2.3.4/33 = x\n", "expected an IPv4 or IPv6 network"),
                ("[server]\nrefuse_names = good\n (\n", "good (: item 2: expected a regular"),
                ("[server]\ndatabase = a\0b\n", "a NUL character is not allowed"),
                ("[server]\nlog_level = loud\n", "expected one of debug, info, warning, error"),
                ("[http]\nlinks = foot: https://h.example/\n", "item 1: expected words, then http"),
                ("[http]\nlinks =\n A http://b/\n B javascript:x\n", "item 2: expected words"),
                ("[games]\naio = A\n", "the id aio is taken"),
                ("[quake3]\ntags = Warsow\n", "tags = Warsow: item 1: expected TAG = GAME"),
                ("port = 1\n", "line 1: expected [section]"),
                ("[bans]\n192.0.2.1\n", "line 2"),
                ("[subspace]\nzones =\n192.0.2.1:5\n", "an indented line that continues"),
                ("[http]\ntitle = T\n\n  [limits]\n  servers = 5\n", "expected one line"),
                (b"[server]\n\xff\xfe", "expected UTF-8: 'utf-8' codec can't decode byte 0xff in"),
                ("[server]\n".encode("utf-16"), "expected UTF-8")):
            error = self.refused(ini)
            self.assertIn("some.ini: " if "that is" not in words else "", error)
            self.assertIn(words, error)
        for path in "nowhere.ini", "":
            with self.assertRaisesRegex(ms.SettingsError, "name right, and may this user read it"):
                ms.Settings.load(path)
        with self.assertRaisesRegex(ms.SettingsError, "not a plain file"):
            ms.Settings.load(HERE, missing_ok=True)         # a folder
        with self.assertRaisesRegex(ms.SettingsError, "larger than 4,096 kB"):
            self.load("# a line\n" * 500_000)
        settings = ms.Settings.load("nowhere.ini", missing_ok=True)
        self.assertEqual((settings["iceball.port"], settings.found), (27790, False))
        self.assertEqual([self.load(ini).found for ini in ("", "[http]\n")], [False, True])

    def test_lists_of_other_masters(self):
        """(the line, the list's name, the port)"""
        for line, label, port in (
                ("quake3 DP.example Xonotic 3", "quake3 dp.example Xonotic 3", 27950),
                ("quake3  192.0.2.1:5  Q3-x_! -2", "quake3 192.0.2.1:5 Q3-x_! -2", 5),
                ("hyperbol [2001:DB8::1]", "hyperbol 2001:db8::1", 20203),
                ("subspace [2001:db8::1]:5", "subspace [2001:db8::1]:5", 5),
                ("aio a_b.example", "aio a_b.example", 27011),
                ("luanti a.example", "luanti a.example", 27790),
                ("luanti http://a.example", "luanti a.example:80", 80),
                ("luanti https://a.example/list", "luanti https://a.example", 443),
                ("ddnet https://a.example/ddnet/15/servers.json", "ddnet https://a.example", 443),
                ("luanti https://a.example:5/", "luanti https://a.example:5", 5)):
            found, = ms.Settings({"upstream.masters": "\n%s\n\n%s\n" % (line, line)})[
                "upstream.masters"]
            game, place, *words = label.split()
            self.assertEqual((found.label, found.port), (label, port))
            self.assertEqual((found.game, found.name), (game, place.replace("https://", "")))
            self.assertEqual([word for _, word in found.choice], words)
        for words, lines in (
                ("expected one of hyperbol, subspace, aio, quake3, luanti",
                 ("iceball a.example", "doom a.example", "a.example")),
                (r"expected quake3 HOST\[:PORT\] GAMENAME PROTOCOL", (
                    "quake3 a.example", "quake3 a.example 71", "quake3 a.example X 3 4",
                    "quake3 a.example X three", "quake3 a.example X 03",
                    'quake3 a.example X"{ 3')),
                (r"expected (aio|hyperbol) HOST\[:PORT\]", (
                    "hyperbol", "hyperbol a.example X 3", "aio https://a.example",
                    "aio a.example:0", "aio a.example:70000", "aio caf\xe9.example")),
                (r"expected luanti \[https://\]HOST\[:PORT\]", (
                    "luanti ftp://a.example", "luanti http://a.example/x",
                    "luanti https://me:TOKEN@a.example"))):
            for line in lines:
                error = self.refused("[upstream]\nmasters =\n  aio b.example\n  " + line)
                self.assertRegex(error, ": item 2: " + words)
                self.assertNotIn("TOKEN", error)
        lists = "\n ".join("aio a%d.example" % number for number in range(21))
        self.assertIn("at most 20", self.refused("[upstream]\nmasters = " + lists))

    # A webhook and what else is secret, as an operator may write it; TOKEN is nowhere to be seen
    SECRET_LINES = (
        "ours = discord https://h.example/api/TOKEN", "ours=text https://h.example/?a=TOKEN",
        "ours = slack https://me:TOKEN@h.example/", "ours = redis://:TOK/EN@TOKEN@h.example:1/0",
        "redis = redis://:TOKEN@h.example:6379/0", "redis = rediss://me:TOKEN TOKEN@h.example",
        "redis = redis://:TOKEN", "discord https://h.example/?a=TOKEN",
        "discord https://h.example/TOKEN?a=b", "https://h.example/TOKEN/?a=b&c=TOKEN",
        "redis://:TOKEN=TOKEN@h.example/0", "discord https://h.example/TOKEN",
        "203.0.113.7:5 = https://h.example/TOKEN", "203.0.113.7 https://h.example/TOKEN = yes")

    def test_no_error_shows_a_secret_wherever_its_line_stands(self):
        """Under each header, in the wrong one, below a value, in none, and by --set."""
        # Where they are right: a blank in a password is one
        right = [("webhooks", line) for line in self.SECRET_LINES[:2]]
        right += [("cluster", line) for line in self.SECRET_LINES[4:6]]
        rows = {row.section: row for row in ms.SETTINGS.values()}
        for line in self.SECRET_LINES:
            self.assertNotIn("TOKEN", self.refused(line) + self.refused("", line), line)
            for section, row in rows.items():
                error = self.refused("[%s]\n%s\n" % (section, line))
                self.assertNotIn("TOKEN", error, (section, line))
                self.assertEqual(not error, (section, line) in right, (section, line))
                above = "%s = %s" % (row.key, row.default) if row.key else row.default
                error = self.refused("[%s]\n%s\n  %s\n" % (section, above, line))
                self.assertNotIn("TOKEN", error, (row.name, line))
            for item in ("http.title.", "http.title=", "webhooks.", "nothing.here="):
                self.assertNotIn("TOKEN", self.refused("", item + line), item)
        for words in (("--set", "cluster.redis", "redis://:SECRET@h/0"),
                      ("--redis=redis://:SECRET@h/0",), ("list", "--game", "x://h/SECRET", "h")):
            status, out, err = command(*words)
            self.assertEqual((status, "SECRET" in out + err), (2, False), words)
            self.assertIn("://…", err)

    def test_the_page_shows_no_url_of_a_webhook_that_stands_in_the_wrong_place(self):
        """Neither an indented line below another text nor a line in another section."""
        for section, above in (
                ("http", "intro = Hello"), ("aio", "news = Hello"), ("quake3", "tags = A = B"),
                ("bans", "203.0.113.0/24 = fakes"), ("webhooks", "a = text https://h.example/")):
            for line in "ours = discord https://h/TOKEN", "ours=https://h", "url = redis://:a@h":
                error = self.refused("[%s]\n%s\n  %s\n" % (section, above, line))
                self.assertIn("[%s] %s = …: the line %s = … below it begins with blanks" % (
                    section, above.partition(" =")[0], line.partition("=")[0].strip()), error)
        for name in "http.title", "games.mygame", "http.template", "server.log_file":
            with self.assertRaisesRegex(ms.SettingsError, "= …: a URL cannot"):
                ms.Settings({name: "discord https://h/TOKEN"})

    def test_a_setting_that_was_removed_is_a_warning(self):
        settings = self.load("[aio]\ndialects = text\nport = 5\n")
        self.assertEqual((settings["aio.port"], settings.given), (5, {"aio.port"}))
        self.assertIn("some.ini: [aio] dialects is no longer a setting", *settings.warnings)

    def test_overrides(self):
        settings = self.load("[iceball]\nport = 1\n", "iceball.port=", " http.ports = 0 ")
        self.assertEqual((settings["iceball.port"], settings["http.ports"]), (None, (0,)))
        for wrong, words in (
                ("iceball.port", "expected section.key=value"), ("port=1", r"\[port\] is not a"),
                ("iceball.prot=1", "did you mean port"), ("http.title=\udcff", "surrogate")):
            self.assertRegex(self.refused("", wrong), "--set.*" + words)

    def test_paths_begin_in_the_folder_of_the_ini(self):
        folder = os.path.join(os.path.abspath(os.sep), "etc")
        path = os.path.join(folder, "some.ini")
        loaded = ms.Settings.load(path, ["server.log_file=log"], missing_ok=True)
        for settings, name, found in (
                # A program that embeds the server keeps nothing that it was not asked to keep
                (ms.Settings(), "server.database", ""),
                (ms.Settings({"server.database": "a.db"}), "server.database", "a.db"),
                (loaded, "server.database", os.path.join(folder, "masterserver.db")),
                (loaded, "server.log_file", os.path.join(folder, "log")),
                (loaded, "http.template", "")):
            self.assertEqual(settings.file(name), found)

    def test_config_text_changes_nothing_and_lines_may_follow_it(self):
        defaults = ms.Settings()
        self.assertEqual(self.load(ms.config_text()).values, defaults.values)
        self.assertEqual((defaults["server.bind"], defaults["iceball.version"], defaults["games"]),
                         (("0.0.0.0", "::"), 8421413, {}))
        enabled = self.load(re.sub(r"(?m)^#(?! )", "", ms.config_text()))
        self.assertEqual(enabled.given, set(ms.SETTINGS))
        for row in ms.SETTINGS.values():
            default = defaults[row.name] if row.key else enabled[row.name] or "an example"
            self.assertEqual(enabled[row.name], default, row.name)
        settings = self.load("\ufeff" + ms.config_text() + "[http]\ntitle = Ours\n[games]\na = A\n"
                             "[bans]\n[http]\nTitle = 5 %% of %(x)s\n"
                             "[official]\n[::1]:27790 = yes\n")
        self.assertEqual((settings["http.title"], settings["games"], settings["official"]),
                         ("5 %% of %(x)s", {"a": "A"}, {("::1", 27790): True}))

    def test_values_at_their_edges(self):
        for read, good, bad in (
                (ms.read_endpoint, "1.2.3.4:1 a.example:65535 [::1]:5",
                 "1.2.3.4:0 1.2.3.4:65536 1.2.3.4:x :5 1.2.3.4 2001:db8::1:5 [2001:db8::1:5 "
                 "2001:db8::1]:5 a:\u00b2"),
                (ms.read_hyperbol_server, "1.2.3.4:1 1.2.3.4:1\t255",
                 "1.2.3.4:1\t-1 1.2.3.4:1\t256 1.2.3.4:1\t1\t1"),
                (ms.read_iceball_version, "31.31.127-1023 0.0 0.2a-4",
                 "32.1 0.32 0.2.128 0.2-1024 0 0.2ab 0.2A"),
                (ms.read_own_game_id, "a" * 32 + " my-game_2", "a" * 33 + " A a.b iceball http "),
                (ms.read_page_url, "https://h http://h:5/a", "https://h/ https://u:p@h https://"),
                (ms.read_public, "1.0.0.0 223.255.255.255 2001:db8::1 ::ffff:1.2.3.4",
                 "0.1.2.3 224.0.0.1 255.255.255.255 :: ff02::1 ::ffff:224.0.0.1 a.example"),
                (ms.read_rate, "0.01/1 1000000", "0.009/1 1000001 1/0.9 1/1000001"),
                (ms.read_pattern, "(a|b)", "( a{99999999999}"),
                (ms.read_country, "de DE", " d deu Germany zz"),
                (ms.read_country_place, "203.0.113.7:20737 203.0.113.7 2001:DB8::1 [2001:db8::1]:5",
                 "a.example 203.0.113.7: 203.0.113.7:70000 203.0.113.0/24")):
            for text in good.split(" "):
                read(text)
            for text in bad.split(" "):
                self.assertRaises(ValueError, read, text)
        for address in "127.0.0.1", "::1":
            self.assertTrue(ms.is_unicast(address), address)
        for address in " 1.2.3.4", "[::1]", "fe80::1%eth0", "::ffff:1.2.3.4%eth0":
            self.assertFalse(ms.is_unicast(address), address)


# --- Wire helpers -----------------------------------------------------------------------------

class TextTest(unittest.TestCase):
    def test_only_the_beginning_of_a_long_text_is_read(self):
        """Four times as much as is kept; the patterns get no more, however long the text is."""
        for unit, kept in ("a\u200b", "a" * 128), ("\u200b" * 3 + "a", "a" * 128), ("\x1b[", ""):
            pattern = mock.Mock(wraps=ms.ESCAPE_SEQUENCE)
            with mock.patch.object(ms, "ESCAPE_SEQUENCE", pattern):
                self.assertEqual(ms.clean(unit * 9000), kept)
            (_, text), = [call[0] for call in pattern.sub.call_args_list]
            self.assertEqual(len(text), 4 * 128)

    def test_clean(self):
        for dirty, wanted in (
                ("  plain ", "plain"), ("a\x00b\x07c\x7fd\x9fe", "abcde"), ("a" * 500, "a" * 128),
                ("line\r\nbreak\u2028and\u2029more", "line break and more"),
                ("\x1b[31;1mred\x1b[0m", "red"), ("\x9b31mcsi", "csi"), ("\x1bcreset", "reset"),
                ("\x1b]0;title", "0;title"), ("\x1b]0;evil\x07title", "title"),
                ("\x1b]8;;x\x1b\\link\x1b(B\x1b[m", "link"), ("\x90" * 99 + "x\x9cy", "y"),
                ("a\u202eb\u2066c\u200bd\u200ee\ufefff\xadg", "abcdefg"), ("x\ud800y", "xy"),
                ("\u3164\u200b \u2060", ""), ("\u2800 \u2800", ""),
                ("\U0001bca0\U0001bca3\U000e0041", ""),
                ("Our\xa0own\u2007 \u3000server", "Our own   server"),
                ("e" + "\u0301" * 5000, "e" + "\u0301" * 3),
                ("na\u00efve \u6f22\u5b57 \U0001f600", "na\u00efve \u6f22\u5b57 \U0001f600")):
            self.assertEqual(ms.clean(dirty), wanted, ascii(dirty))
        self.assertEqual(ms.clean("ab cd", 3), "ab")

    def test_decode(self):
        for raw, wanted in (
                ("Größe".encode()[:-1], "Größ"), ("漢字".encode()[:-1], "漢"),
                (b"a\xffb", "a\ufffdb"), (b" a\0", "a")):
            self.assertEqual(ms.decode_utf8(raw), wanted)
        for raw, wanted in (
                (b"caf\xe9 \x80", "café €"), (b"a\x81b", "a\ufffdb"),
                (b"\xc3\xa9\xe9 x", "Ã©é x"),
                *[("größ😀".encode()[:-cut], "größ") for cut in (1, 2, 3)],    # cut to a field
                *[(text.encode("cp1252"), text) for text in ("José", "été", "Köln »")]):
            self.assertEqual(ms.decode_legacy(raw), wanted)
        self.assertEqual([ms.c_string(raw) for raw in (b"ab\0cd\0", b"ab", b"\0")],
                         [b"ab", b"ab", b""])
        self.assertEqual(list(map(ms.clamp, (-1, 0, 65535, 65536))), [0, 0, 65535, 65535])


class AddressTest(unittest.TestCase):
    def test_forms(self):
        for call, address, wanted in (
                (ms.canonical_address, "::ffff:203.0.113.9", "203.0.113.9"),
                (ms.canonical_address, "fe80::1%eth0", "fe80::1"),
                (ms.canonical_address, "203.0.113.9", "203.0.113.9"),
                (ms.source_keys, "::ffff:203.0.113.9", ("203.0.113.9",)),
                (ms.source_keys, "203.0.113.9", ("203.0.113.9",)),
                (ms.source_keys, "2001:db8:1:2:3::4", ("2001:db8:1:2::/64", "2001:db8:1::/48")),
                (ms.ipv4_bytes, "203.0.113.9", b"\xcb\0\x71\x09")):
            self.assertEqual(call(address), wanted, address)
        self.assertEqual([ms.endpoint_text("2001:db8::1", 5), ms.endpoint_text("192.0.2.1", 5)],
                         ["[2001:db8::1]:5", "192.0.2.1:5"])
        for address in ("127.0.0.1 127.255.0.9 128.0.0.1 126.0.0.1 ::1 :: ::127 ::1:0:0:1 "
                        "2001:db8::1").split():
            self.assertEqual(ms.is_loopback(address), ipaddress.ip_address(address).is_loopback)

    def test_networks_are_what_ipaddress_says(self):
        networks = "127.0.0.0/8 ::1 192.0.2.7 198.51.100.64/27 2001:db8:1::/48 0.0.0.0/1 ::/0"
        addresses = (
            "0.0.0.0 127.255.255.255 128.0.0.0 192.0.2.6 192.0.2.7 198.51.100.63 198.51.100.64 "
            "198.51.100.95 198.51.100.96 :: ::1 2001:db8:1:: 2001:db8:1:ffff:ffff:ffff:ffff:ffff "
            "2001:db8:2::")
        for network in map(ms.read_network, networks.split()):
            known = ms.Networks([network])
            for address in addresses.split():
                inside = ipaddress.ip_address(address) in network
                self.assertEqual(address in known, inside, (network, address))
        self.assertIn("fe80::1%eth0", ms.LOCAL_NETWORKS)
        self.assertNotIn("::1", ms.Networks([]))
        # The smallest one tells
        words = {ms.read_network(text): text for text in (
            "203.0.113.0/24", "203.0.0.0/8", "203.0.113.9", "2001:db8::/32")}
        known = ms.Networks(words, words)
        for address, text in (
                ("203.1.1.1", "203.0.0.0/8"), ("203.0.113.8", "203.0.113.0/24"),
                ("203.0.113.9", "203.0.113.9"), ("2001:db8::1", "2001:db8::/32"), ("::1", None)):
            self.assertEqual(known.find(address), text)

    def test_listed_address(self):
        rules = ms.Rules(ms.Settings({"server.public_address": "203.0.113.1",
                                      "address_map.192.168.1.5": "203.0.113.7"}))
        for source, claims, listed in (
                ("198.51.100.2", "- 203.0.113.9", "198.51.100.2"),      # speaks for itself alone
                ("192.168.1.9", "203.0.113.9 ::ffff:203.0.113.9", "203.0.113.9"),
                ("192.168.1.5", "203.0.113.9", "203.0.113.9"),
                ("192.168.1.5", "- name.example", "203.0.113.7"),
                ("192.168.1.9", "- ::1", "192.168.1.9"),                # loopback is nobody's
                ("127.0.0.1", "- 224.0.0.1 0.0.0.0 240.0.0.1 127.0.0.1 ::ffff:203.0.113.9%eth0 "
                 "::ffff:127.0.0.1", "203.0.113.1"),
                ("10.1.2.3", "0.1.2.3", "10.1.2.3"), ("fd00::5", "2001:db8::5", "2001:db8::5"),
                ("2001:db8::6", "2001:db8::5", "2001:db8::6")):
            for claim in claims.split():
                found = rules.listed_address(source, claim.strip("-"))
                self.assertEqual(found, listed, (source, claim))


class CookieTest(unittest.TestCase):
    def test_windows(self):
        for start in 29.9, 1e9 + 19.9:                      # the second after a long pause
            cookie = ms.Cookie(bytes(16))
            cookie.make(b"", 0.0)
            mac = cookie.make(b"message", start)
            self.assertEqual(len(mac), 8)
            for later, message, good in (
                    (0.0, b"message", True), (0.0, b"massage", False), (30.0, b"message", True),
                    (30.0, b"massage", False), (30.1, b"message", False)):
                self.assertEqual(cookie.is_valid(mac, message, start + later), good,
                                 (later, message))
        self.assertFalse(ms.Cookie(bytes(15) + b"\1").is_valid(mac, b"message", start))
        self.assertEqual(len(ms.Cookie(bytes(16), 4).make(b"", 0.0)), 4)


class LimitsTest(unittest.TestCase):
    def test_exact_bounds(self):
        for rate, burst in ((100, 400), (10, 50), (1 / 40, 1), (3, 7), (1000, 3000)):
            limiter = ms.Limiter((rate, burst))
            for start in (0.0, 1e6):
                allowed = sum(limiter.allow("a", start) for _ in range(int(burst) + 50))
                self.assertEqual(allowed, burst)
                for later, good in ((0.99, False), (1.001, True), (1.002, False)):
                    self.assertEqual(limiter.allow("a", start + later / rate), good, (rate, later))
        limiter.set_rate((1, 10))                           # every bucket is full again
        self.assertEqual([limiter.allow("a", 1e6, tokens) for tokens in (4, 7, 6, 1)],
                         [True, False, True, False])

    @mock.patch.object(ms, "LIMITER_SOURCES", 3)
    def test_full_table_refuses_nobody(self):
        limiter = ms.Limiter((1, 1))
        for name in "abcdefg":
            self.assertTrue(limiter.allow(name, 0.0), name)
        self.assertEqual(list(limiter.table), ["e", "f", "g"])
        self.assertFalse(limiter.allow("e", 0.0))           # now the last to be forgotten
        limiter.allow("h", 0.0)
        self.assertEqual(list(limiter.table), ["g", "e", "h"])

    def test_spent(self):
        limiter = ms.Limiter((1, 3))
        for address in "192.0.2.1", "2001:db8::1":
            self.assertEqual([(limiter.allow(address, 0.0), limiter.is_nearly_empty(address, 0.0))
                              for _ in range(4)],
                             [(True, False), (True, True), (True, True), (False, True)])
            self.assertFalse(limiter.is_nearly_empty(address, 2.5))
            self.assertEqual([limiter.has_refused(address, since) for since in (0.0, 0.1)],
                             [True, False])
        with mock.patch.object(ms, "LIMITER_SOURCES", 2):
            for name in "abc":
                limiter.allow(name, 1.0, 9)
        self.assertEqual({*limiter.refused_at} - {*limiter.table}, set())

    def test_verdicts_sources_and_sites(self):
        rules = ms.Rules(ms.Settings({
            "blocked.192.0.2.0/24": "floods", "blocked.2001:db8:5::5": "floods",
            "limits.exempt": "127.0.0.0/8, 2001:db8:9::/48"}))
        limiter = ms.Limiter((1, 1), rules.verdict)
        for address, allowed in (
                ("127.0.0.1", 9), ("2001:db8:9::1", 9), ("192.0.2.66", 0), ("2001:db8:5::5", 0),
                ("2001:db8:5::6", 1), ("2001:db8:5::7", 0), ("2001:db8:5:1::7", 1)):
            self.assertEqual(sum(limiter.allow(address, 1e9) for _ in range(9)), allowed, address)
        allowed = sum(limiter.allow("2001:db8:1:%x::1" % number, 0.0) for number in range(100))
        self.assertEqual(allowed, 16)

    def test_shares(self):
        shares = ms.Shares()
        for address in "192.0.2.1", "192.0.2.1", "2001:db8:1:2::1", "2001:db8:1:2::2":
            self.assertEqual(shares.full(address, 2), "")
            shares.take(address)
        for address, full in (("192.0.2.1", "192.0.2.1"), ("192.0.2.2", ""),
                              ("2001:db8:1:2::3", "2001:db8:1:2::/64"), ("2001:db8:1:3::1", "")):
            self.assertEqual(shares.full(address, 2), full)
        for number in range(3, 18):
            shares.take("2001:db8:1:%x::1" % number, 2)
        self.assertEqual(shares.full("2001:db8:1:ffff::1", 2), "2001:db8:1::/48")
        self.assertEqual(shares.total, 34)
        shares.take("192.0.2.1", -2)
        self.assertNotIn("192.0.2.1", shares.counts)

    def test_who_has_most_makes_room(self):
        turns = ms.Turns(4)
        for address, key in (("a", 1), ("b", 2), ("b", 3), ("c", 4)):
            self.assertIsNone(turns.add(address, key, "%s%d" % (address, key), limit=2))
        self.assertEqual(turns.in_turns(), ["a1", "b2", "c4", "b3"])
        for address, key, pushed_out in (("b", 5, "b2"), ("d", 6, "b3"), ("e", 7, "a1")):
            self.assertEqual(turns.add(address, key, address + str(key), limit=2), pushed_out)
        self.assertEqual(turns.in_turns(), ["b5", "c4", "d6", "e7"])
        turns.served(4)
        self.assertEqual(turns.in_turns(), ["b5", "d6", "e7", "c4"])
        self.assertEqual((turns.get(4), turns.pop(4), turns.pop(4), len(turns)),
                         ("c4", "c4", None, 3))
        for thing in "one", "two":              # a replaced thing stays one
            self.assertIsNone(turns.add("a", 1, thing, limit=1))
        self.assertEqual((turns.in_turns(), len(turns)), (["b5", "d6", "e7", "two"], 4))

    def test_a_site_takes_its_turns_as_one(self):
        """Whoever has an IPv6 /48, which has 65,536 networks, pushes out nobody else."""
        turns = ms.Turns(20)
        for number in range(10):
            turns.add("192.0.2.%d" % number, number, number, limit=2)
        for number in range(100):
            turns.add("2001:db8:1:%x::1" % number, 100 + number, 100 + number, limit=2)
        self.assertEqual(sorted(turns.in_turns()), [*range(10), *range(190, 200)])
        self.assertEqual(turns.in_turns()[:11], [*range(10), 190])
        turns = ms.Turns(1000)
        for number in range(100):
            turns.add("2001:db8:1:%x::1" % number, number, number, limit=2)
        self.assertEqual(len(turns), 32)


# --- Registry ------------------------------------------------------------------------------------

class RegistryTest(unittest.TestCase):
    def setUp(self):
        self.registry = make_core(limits__servers_per_source="3", limits__servers="5").registry

    def hear(self, port, source="203.0.113.9", now=0.0, lifetime=120.0, **fields):
        return self.registry.list_or_refresh(("iceball", source, port), source, now, lifetime,
                                             fields)

    def names(self):
        return [server.name for server in self.registry.servers()]

    def test_listed_changed_gone(self):
        for now, players, changes in (
                (0.0, 1, 1), (50.0, 1, 0), (55.0, 9, 1), (56.0, 9, 0), (60.0, 2, 1)):
            generation = self.registry.generation
            self.hear(1, name="a", players=players, max_players=8, now=now)
            self.assertEqual(self.registry.generation, generation + changes, now)
        for now, left in (179.9, 1), (180.0, 0):
            self.registry.expire(now)
            self.assertEqual(len(self.registry.servers()), left, now)
        self.assertEqual([event for event, _ in changes_of(self.registry)],
                         ["listed", "changed", "changed", "gone"])
        self.assertEqual((self.registry.total, self.registry.own.counts), (0, {}))
        self.assertEqual(self.registry.altered, {("iceball", "203.0.113.9", 1)})

    def test_a_server_that_another_list_named_is_an_own_one_once_it_announces_itself(self):
        self.hear(1, found_at="up.example", name="a")
        self.hear(2, name="b")
        server = self.registry.get("iceball", "203.0.113.9", 1)
        for shares, names in ("yes", "ab"), ("no", "b"):
            generation = self.registry.generation
            self.registry.apply_rules(settings_of({"upstream__share": shares}))
            self.assertGreater(self.registry.generation, generation)
            self.assertEqual([one.name for one in self.registry.for_clients(
                self.registry.servers())], list(names))
        self.hear(1, found_at="up.example", players=3)
        self.assertEqual((server.found_at, server.players), ("up.example", 3))
        self.hear(1)
        self.assertEqual((server.found_at, len(self.registry.for_clients(
            self.registry.servers()))), ("", 2))

    def test_found_servers_keep_out_none_of_their_source_that_announces_itself(self):
        for port in 1, 2, 3:
            self.hear(port, found_at="up.example")
        self.assertRaises(ms.Refused, self.hear, 4, found_at="up.example")
        self.hear(1)                    # it is an own one now
        self.assertEqual((self.registry.own.counts, self.registry.found.counts),
                         ({"203.0.113.9": 1}, {"203.0.113.9": 2}))
        self.hear(5)
        self.hear(6)
        self.assertRaisesRegex(ms.Refused, "5 servers", self.hear, 7)
        for server in self.registry.servers():
            self.registry.remove_any(server)
        self.assertEqual((self.registry.own.counts, self.registry.found.counts), ({}, {}))

    def test_census(self):
        """No more than there is room for, and nobody where nobody answers."""
        plain = {"players": 1, "max_players": 0, "playing": None, "responding": True}
        for told, counted in (
                ({"players": 70000}, (1, 65535, 65535)),
                ({"players": -1}, (1, 0, 0)), ({"players": 9, "max_players": 8}, (1, 8, 8)),
                ({"players": 5, "max_players": 8, "playing": 2}, (1, 5, 2)),
                ({"players": 5, "playing": -1}, (1, 5, 0)),
                ({"players": 5, "responding": False}, (0, 0, 0))):
            self.setUp()
            for now, (fields, wanted) in enumerate((
                    (told, counted), (plain, (1, 1, 1)), (told, counted))):
                server = self.hear(1, now=float(now), **fields)
                found = self.registry.census(float(now)).get("iceball", ms.Census())
                self.assertEqual(found, wanted, fields)
            self.registry.remove_own(server)
            self.assertEqual(self.registry.census(1000.0), {})

    def test_order(self):
        rules = self.registry.rules
        rules.official = {("203.0.113.9", 2): True}
        rules.priority = {("203.0.113.9", 3): 1}
        for port, name, players in (1, "b", 5), (2, "c", 1), (3, "d", 0):
            self.hear(port, name=name, players=players)
        for port, name in (4, "Z"), (5, "a"):
            self.hear(port, "203.0.113.8", name=name, players=5)
        ports = lambda game: [server.port for server in self.registry.servers(game)]
        self.assertEqual(ports(""), [3, 5, 1, 4, 2])
        self.hear(1, name="b", players=9)
        self.assertEqual((ports("iceball"), ports("aio")), ([3, 1, 5, 4, 2], []))

    def test_limits_are_exact(self):
        for port in (1, 2, 3):
            self.hear(port)
        with self.assertRaisesRegex(ms.Refused, "3 servers of one address"):
            self.hear(4)
        self.hear(3)                                        # those that are listed stay welcome
        for port in (1, 2):
            self.hear(port, "127.0.0.1")
        with self.assertRaisesRegex(ms.Refused, "5 servers"):
            self.hear(3, "127.0.0.1")
        self.registry.remove_own(self.registry.servers()[0])
        self.hear(3, "127.0.0.1")
        self.registry.rules.max_servers = 99
        for port in range(4, 40):                           # loopback is exempt
            self.hear(port, "127.0.0.1")
        self.registry.list_or_refresh(("iceball", "203.0.113.9", 40), "203.0.113.9", 0.0, 9.0,
                                      {}, pinned=True)
        # An IPv6 /48 has sixteen times what a /64 has
        for number in range(16 * 3):
            self.hear(number % 3 + 1, "2001:db8:1:%x::1" % (number // 3))
        with self.assertRaisesRegex(ms.Refused, "48 servers of one /48 network"):
            self.hear(1, "2001:db8:1:ff::1")
        self.hear(1, "2001:db8:2::1")

    def test_another_master_s_server_that_is_heard_here_never_leaves(self):
        """Not even where the list is full; own watchers are told of it as of a new one."""
        for port in range(1, 6):
            server = self.hear(port, "198.51.100.%d" % port, players=port)
        self.registry.count(server, -1)                 # as if another master had heard it
        server.master = "b"
        changes_of(self.registry)
        self.hear(5, "198.51.100.5", now=1.0, players=9)
        self.assertEqual([(event, server.master) for event, server in changes_of(self.registry)],
                         [("listed", "")])
        self.assertEqual((self.registry.total, self.registry.own.counts["198.51.100.5"]), (5, 1))
        with self.assertRaisesRegex(ms.Refused, "5 servers"):
            self.hear(6, "198.51.100.6")

    def test_not_listable(self):
        for address, port, source in (
                ("203.0.113.9", 0, ""), ("203.0.113.9", 65536, ""), ("0.0.0.0", 5, ""),
                ("224.0.0.1", 5, ""),
                ("0.0.0.0", 5, "0.0.0.0"), ("fe80::1%eth0", 5, "fe80::1%eth0")):
            with self.assertRaises(ms.Refused, msg=address):
                source = source or "203.0.113.9"
                self.registry.list_or_refresh(("nogame", address, port), source, 0.0, 120.0, {})
        self.assertFalse(self.registry.games or self.registry.own.counts or self.registry.total)

    def test_bans_names_and_marks_at_a_reload(self):
        self.hear(1, name="good")
        self.hear(3, "198.51.100.3", name="Free gold")
        self.hear(88, "198.51.100.4", name="198.51.100.4:88")
        settings = ms.Settings({"bans.203.0.113.0/24": "fakes", "blocked.198.51.100.9": "secret",
                                "server.refuse_names": "free *gold\nspam$\n88"})
        self.registry.rules.read(settings)
        for port, source, name, why in (
                (2, "203.0.113.9", "x", "fakes"), (2, "198.51.100.9", "x", "no reason given"),
                (2, "198.51.100.1", "FREE  Gold here", "gold"),
                (88, "198.51.100.4", "number 88", "88"), (3, "198.51.100.3", "best spam", "spam")):
            with self.assertRaisesRegex(ms.Refused, why):
                self.hear(port, source, name=name)
        self.hear(2, "198.51.100.1", name="spam of the best")
        self.registry.apply_rules(settings)                 # whoever is banned now leaves
        self.assertEqual(sorted(self.names()), ["198.51.100.4:88", "spam of the best"])
        self.registry.apply_rules(ms.Settings({"official.198.51.100.1:2": "yes",
                                               "priority.198.51.100.4:88": "-2"}))
        self.assertEqual([(server.port, server.official, server.priority)
                          for server in self.registry.servers()], [(2, True, 0), (88, False, -2)])

    def test_a_game_that_leaves_the_ini_and_an_address_that_is_mapped_otherwise(self):
        first = {"games.mine": "Mine", "address_map.10.0.0.5": "203.0.113.7"}
        self.registry.rules.read(ms.Settings(first))
        for game, address, source in (
                ("mine", "203.0.113.1", "203.0.113.1"), ("aio", "203.0.113.7", "10.0.0.5"),
                ("aio", "203.0.113.9", "10.0.0.6")):        # the last one says so itself
            self.registry.list_or_refresh((game, address, 1), source, 0.0, 120.0, {"name": source})
        second = dict.fromkeys(("address_map.10.0.0.5", "address_map.10.0.0.6"), "203.0.113.8")
        for settings, left in ((first, ["10.0.0.5", "10.0.0.6", "203.0.113.1"]),
                               (second, ["10.0.0.6"])):
            self.registry.apply_rules(ms.Settings(settings))
            self.assertEqual(self.names(), left)

    def test_a_banned_source_takes_nothing_over_and_another_source_counts(self):
        self.hear(1, name="Mine")
        self.registry.rules.read(ms.Settings({"bans.10.0.0.5": "cheats"}))
        takeover = lambda source: self.registry.list_or_refresh(
            ("iceball", "203.0.113.9", 1), source, 1.0, 120.0, {"name": "Yours"})
        with self.assertRaisesRegex(ms.Refused, "cheats"):
            takeover("10.0.0.5")
        self.assertEqual(self.names(), ["Mine"])
        takeover("10.0.0.6")
        self.assertEqual((self.names(), self.registry.own.counts), (["Yours"], {"10.0.0.6": 1}))

    def test_blocked_addresses_get_nothing_until_they_are_unblocked(self):
        rules = self.registry.rules
        for settings, allowed in ({}, True), ({"blocked.203.0.113.0/24": "x"}, False), ({}, True):
            rules.read(ms.Settings(settings))
            for name in "datagram message answer connection udp_request request".split():
                allow = getattr(rules, name + "_limiter").allow
                self.assertEqual(allow("203.0.113.9", 0.0), allowed, (settings, name))

    def test_the_limiters_have_the_rates_of_their_settings(self):
        rules = ms.Rules(ms.Settings({"limits.datagrams": "1/2", "limits.connections": "1/3",
                                      "limits.requests": "1/4"}))
        for name, burst in (
                ("datagram_limiter", 2), ("message_limiter", 2), ("connection_limiter", 3),
                ("udp_request_limiter", 4), ("request_limiter", 4), ("answer_limiter", 9)):
            allow = getattr(rules, name).allow
            self.assertEqual(sum(allow("203.0.113.9", 0.0) for _ in range(9)), burst, name)

    def test_unproven_sources_share_what_they_get(self):
        for use, address, size, now, allowed in (
                ("list", "203.0.113.1", 1_000_000, 0.0, True),
                ("list", "203.0.113.2", 500, 0.0, False),
                ("ping", "203.0.113.2", 500, 0.0, True),        # another use
                ("list", "203.0.113.2", 0, 0.0, True),
                ("list", "127.0.0.1", 500, 0.0, True),          # exempt
                ("list", "203.0.113.2", 500, 1.0, True)):
            found = self.registry.rules.allow_surplus(use, address, size, now)
            self.assertEqual(found, allowed, (use, address, size, now))

    def test_silence_that_proves_nothing(self):
        """Of the time before a restart or a stop, and where a flood keeps its packets out."""
        self.hear(1)
        self.registry.silence_counts_from = 100.0
        for now, flooded, left in ((219.9, False, 1), (220.0, True, 1), (359.9, True, 1),
                                   (360.0, True, 0)):
            while flooded and self.registry.rules.datagram_limiter.allow("203.0.113.9", now):
                pass
            self.registry.expire(now)
            self.assertEqual(len(self.names()), left, now)
        self.hear(1, now=1000.0)
        self.registry.expire(1120.0)
        self.assertEqual(self.names(), [])

    def test_confirmed_once_it_is_heard(self):
        for hear in (lambda server: self.registry.confirm(server, 60.0),
                     lambda server: self.hear(1, now=60.0)):
            server = self.hear(1)
            server.confirmed = False
            generation = self.registry.generation
            hear(server)
            self.assertEqual((server.confirmed, server.last_seen), (True, 60.0))
            self.assertGreater(self.registry.generation, generation)

    def test_lists_are_made_in_a_tenth_of_the_time(self):
        """One of 2,000 servers or more once a second; one of a hundred, twenty times a second at
        most; eight of them, each so much more rarely, as well as those that are short and large."""
        for servers, size, lists, times in (
                (12000, 0, 1, 3), (2000, 0, 1, 2), (100, 0, 1, 40), (12000, 0, 8, 10),
                (1, 8 << 20, 8, 13)):
            registry = make_core(limits__servers_per_source="100000").registry
            made = []
            place = "203.0.113.9"
            for port in range(1, 1 + servers):
                server = registry.list_or_refresh(("iceball", place, port), place, 0.0, 120.0, {})

            def render(servers, now):
                made.append(now)
                return bytes(size)

            rendered = [ms.RenderedList(registry, "iceball", render) for _ in range(lists)]
            for number in range(1000):
                registry.update(server, {"players": number})
                for one in rendered:
                    one.get(number / 500)
            self.assertTrue(times * 2 // 3 <= len(made) <= times, (servers, len(made)))

    def test_a_list_that_has_not_changed_is_made_again_for_its_times_alone(self):
        for ages_s, times in ((math.inf, 1), (5.0, 4)):
            render = mock.Mock(return_value=b"")
            self.hear(1)
            rendered = ms.RenderedList(self.registry, "", render, ages_s=ages_s)
            for number in range(1000):
                rendered.get(number / 50)
            self.assertEqual(render.call_count, times)

    def test_parts_are_made_again_for_who_has_changed(self):
        made = []
        for change in (lambda: (self.hear(1), self.hear(2)), lambda: self.hear(2, players=1),
                       self.registry.forget_entries):
            change()
            for _ in range(2):
                ms.cached_entries(self.registry.servers(), "x",
                                  lambda server: made.append(server.port) or 1)
        self.assertEqual(sorted(made), [1, 1, 2, 2, 2])

    def test_a_room_forgets_only_the_fingerprints_of_its_own(self):
        core = with_rooms(make_core())
        for game in core.rooms:
            server = core.registry.list_or_refresh(
                (game, "203.0.113.9", 5), "203.0.113.9", 0.0, 1e9, {"room": game, "private": {
                    "ddnet_registration": {"info": "{}"}, "ddnet_addresses": {}, "flavor": 0}})
            core.registry.set_fingerprint(server, game)
        core.rooms["iceball"].tick(0.0)
        self.assertEqual({*core.registry.by_fingerprint}, {*core.rooms} - {"iceball"})

    def test_values_beyond_the_maximum_do_not_change_at_each_poll(self):
        for fields in ({"players": 9, "max_players": 8}, {"players": -1}, {"players": 70000},
                       {"players": 3, "playing": 5}):
            server = self.hear(1, **fields)
            generation = self.registry.generation
            self.registry.update(server, fields)
            self.assertEqual(self.registry.generation, generation, fields)
            self.registry.remove_own(server)

    def test_outcomes_are_bounded_in_sum_by_source_and_in_length(self):
        things, note = self.registry.outcomes.things, self.registry.record_outcome
        for number in range(ms.OUTCOMES_KEPT + 10):
            note(address_of(number), "iceball", 1, "announced", float(number))
        self.assertEqual(len(things), ms.OUTCOMES_KEPT)
        self.assertIsNone(self.registry.outcome(address_of(9), "iceball", 1))
        self.assertIsNotNone(self.registry.outcome(address_of(10), "iceball", 1))
        # Who has the most loses his own, and nobody else does
        for port in range(1, 2001):
            note("198.51.100.1", "iceball", port, "announced", 1e5 + port)
        own = [port for source, _, port in things if source == "198.51.100.1"]
        self.assertEqual(own, [1999, 2000])
        note("198.51.100.1", "quake3", 5, "bad packet", 2e5, "x" * 5000)
        self.assertEqual(self.registry.outcome("198.51.100.1", "quake3", 5).detail, "x" * 200)

    def test_a_listing_pushes_out_no_refusal_of_its_source(self):
        for source, room in ("198.51.100.2", 64), ("2001:db8::1", 64 * ms.SITE_SOURCES):
            for port in range(room):
                self.registry.record_outcome(source, "iceball", port, "name", 0.0)
            for port in room, 5:
                self.registry.record_outcome(source, "iceball", port, "listed", 1.0)
            kept = [self.registry.outcome(source, "iceball", port) for port in (0, 5, room)]
            self.assertEqual([record and record.outcome for record in kept],
                             ["name", "listed", None], source)

    def test_a_flood_pushes_out_no_outcome_of_others(self):
        registry = self.registry
        registry.record_outcome("203.0.113.1", "hyperbol", 5, "silent", 0.0)
        registry.record_outcome("203.0.113.2", "", 0, "looked", 0.0)
        honest = [("198.51.100.%d" % number, "iceball", 6) for number in range(20)]
        for number in range(30 * 500):          # half a minute
            now = number / 500
            if number < 20 * 25 and number % 25 == 0:
                registry.record_unproven(*honest[number // 25], "announced", now)
            registry.record_unproven(address_of(number), "subspace", 1, "silent", now)
        explained = [registry.outcome(*key) for key in honest]
        self.assertNotIn(None, explained)
        # Of a heavier one a part is noted
        for number in range(2000):
            registry.record_unproven(address_of(number), "aio", 1, "silent", 50.0)
        self.assertEqual(len(registry.unproven_outcomes), 30 * 500 + 20 + 1000)
        registry.record_unproven("198.51.100.1", "aio", 7, "announced", 50.0)
        registry.record_unproven("203.0.113.2", "aio", 7, "announced", 50.0)
        self.assertIsNone(registry.outcome("198.51.100.1", "aio", 7))
        self.assertIsNotNone(registry.outcome("203.0.113.2", "aio", 7))
        self.assertIsNotNone(registry.outcome("203.0.113.1", "hyperbol", 5))
        # In the name of an address, they push out nothing that it has proven, nor replace it
        registry.record_outcome("203.0.113.1", "", 0, "looked", 50.0)
        for port in range(ms.OUTCOMES_PER_SOURCE + 1):
            registry.record_unproven("203.0.113.1", "hyperbol", port, "announced", 50.0)
        self.assertEqual(registry.outcomes.get(("203.0.113.1", "hyperbol", 5)).outcome, "silent")
        # What proves itself afterwards is told once
        registry.record_outcome(*honest[3], "listed", 64.0)
        self.assertIsNone(registry.unproven_outcomes.get(honest[3]))
        self.assertEqual(registry.outcome(*honest[3]).outcome, "listed")

    def test_a_change_from_anywhere_ends_the_shortcut(self):
        changes = (
            lambda server: self.registry.update(server, {"players": 5}),
            lambda server: self.hear(1, players=6),
            lambda server: self.registry.apply_rules(ms.Settings()),
            lambda server: self.registry.remove_own(server))
        for change in changes:
            server = self.hear(1, players=1)
            for fingerprint in 77, 99:
                self.registry.set_fingerprint(server, fingerprint)
            self.assertEqual(self.registry.by_fingerprint, {99: server})
            change(server)
            self.assertEqual((self.registry.by_fingerprint, server.fingerprint), ({}, None))

    def test_the_changes_that_wait_for_the_disk_are_bounded(self):
        with mock.patch.object(ms, "ALTERED_SERVERS", 2):
            for port in 1, 2, 3:
                self.registry.remove_own(self.hear(port))
        self.assertEqual(len(self.registry.altered), 2)


# --- Storage --------------------------------------------------------------------------------------

T0 = 1_700_006_400          # 2023-11-15 00:00 UTC, a Wednesday


def listed_row(number, wall=T0, life=100.0, name="S", **fields):
    wall = float(wall)
    return ms.ListedRow("iceball", "192.0.2.%d" % (number % 250), 1000 + number, wall + life,
                        wall, wall, {"name": name, **fields})


def listed_key(number):
    return listed_row(number).key


class DatabaseCase(unittest.TestCase):
    A = listed_key(1)
    TOTAL = ("iceball", "", 0)

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = os.path.realpath(folder.name)
        self.path = os.path.join(self.folder, "master.db")
        warning = mock.patch.object(ms.log, "warning")
        warning.start()
        self.addCleanup(warning.stop)

    def database(self):
        """An open database, after the call that a damaged one fails."""
        made = ms.Database(self.path)
        self.addCleanup(made.close)
        with contextlib.suppress(sqlite3.DatabaseError):
            made.load()
        return made

    def sql(self, text, *values):
        with contextlib.closing(sqlite3.connect(self.path, isolation_level=None)) as db:
            return db.execute(text, values).fetchall()

    def put(self, data):
        """Have this for the database, and nothing beside it."""
        for name in os.listdir(self.folder):
            os.remove(os.path.join(self.folder, name))
        with open(self.path, "wb") as file:
            file.write(data)

    def set_aside(self, folder=""):
        """The names of the damaged files, without the times in them."""
        return sorted(re.sub("-[0-9]{8}-[0-9]{6}", "", name)
                      for name in os.listdir(folder or self.folder) if ".damaged" in name)

    def sound(self):
        """The bytes of a file of some 30 pages with 60 servers."""
        self.put(b"")
        database = self.database()
        database.save([listed_row(number, name="%0400d" % number) for number in range(60)], set())
        for wall in (T0 - 60, T0):
            database.add_samples(wall, [listed_key(number) + (number,) for number in range(60)])
        database.close()
        with open(self.path, "rb") as file:
            return file.read()

    def use(self, database):
        """Every operation. One may fail for the damage that it finds, and works afterwards."""
        key = listed_key(59)
        samples = [listed_key(number) + (1,) for number in range(90)]
        steps = [(database.load,),
                 (database.save, [listed_row(number) for number in range(0, 90, 3)],
                  {listed_key(2)}),
                 (database.add_samples, T0 + ms.QUARTER, samples),
                 (database.hourly_players, T0), (database.known, *key)]
        steps += [(database.history, *key, span, T0 + ms.HOUR) for span in ms.SPANS]
        for step, *arguments in steps:
            try:
                step(*arguments)
            except sqlite3.DatabaseError as error:
                self.assertIn("the file is damaged", str(error))
                step(*arguments)


class ListOnDisk(DatabaseCase):
    def test_rows_come_back_as_they_were(self):
        rows = [listed_row(1, name="caf\u00e9", details={"a": "b"}, players=3), listed_row(2),
                ms.ListedRow("aio", "2001:db8::1", 7777, math.inf, T0 + 0.5, T0 + 0.25, {})]
        database = self.database()
        database.save(rows, set())
        self.assertEqual(self.database().load(), rows)
        # Fields and times are replaced, but for the time of the first sight
        database.save([listed_row(1, T0 + 50, 120.0, "new")], {listed_key(2), listed_key(9)})
        changed = (*self.A, T0 + 170.0, T0, T0 + 50.0, {"name": "new"})
        self.assertEqual(self.database().load(), [changed, rows[2]])

    def test_of_a_server_that_has_left_the_name_and_the_times_stay(self):
        """A stranger lists one after another, each with as many texts as it may have."""
        database = self.database()
        for wall in (T0, T0 + 400):
            database.save([listed_row(1, wall, name="old", map="x" * 20000), listed_row(2)], set())
        for gone in (set(), {self.A, listed_key(9)}, {self.A}):
            database.save([], gone)
            self.assertEqual(database.known(*self.A), (T0, T0 + 400, "old"))
        self.assertEqual(self.sql("SELECT fields FROM server WHERE fields NOTNULL ORDER BY id"),
                         [('{"name":"old"}',), ('{"name":"S"}',)])
        self.assertEqual(database.load(), [listed_row(2)])
        back = listed_row(1, T0 + ms.DAY, name="new")
        database.save([back], set())
        self.assertEqual(database.load(), [back._replace(first_seen=T0), listed_row(2)])
        self.assertEqual(database.known(*self.A), (T0, T0 + ms.DAY, "new"))
        # On a machine whose clock stands at 1970 after a power cut
        database.save([], {self.A})
        database.save([listed_row(1, 40)], set())
        database.save([], {self.A})
        self.assertEqual(database.known(*self.A)[:2], (T0, T0 + ms.DAY))
        database.add_samples(T0, [self.TOTAL + (1,)])
        for nobody in (("aio", *self.A[1:]), listed_key(9), self.TOTAL):
            self.assertIsNone(database.known(*nobody))

    def test_who_stays_for_less_than_a_few_minutes_leaves_nothing(self):
        """Whoever lists one server after another for as long as he likes does not fill the disk."""
        database = self.database()
        stays = [listed_row(0, T0 + 300), listed_row(1, T0 + 299)]
        database.save([listed_row(0), listed_row(1)], set())
        database.save(stays, set())
        sizes = []
        for minute in range(90):
            wall = T0 + 300 + 60 * minute
            listed = [listed_row(5000 + 60 * minute + number, wall, name="x" * 500)
                      for number in range(60)]
            database.save(listed, set())
            database.add_samples(wall, [row.key + (1,) for row in listed] + [self.TOTAL + (60,)])
            database.save([], {row.key for row in listed})
            [(pages,)] = self.sql("PRAGMA page_count")
            sizes.append(pages)
        self.assertEqual(max(sizes[:30]), max(sizes))
        database.save([], {row.key for row in stays})
        self.assertEqual([database.known(*listed_key(number)) for number in range(2)],
                         [(T0, T0 + 300, "S"), None])
        database.save([listed_row(0, T0 + 9000)], set())
        database.save([], {listed_key(0)})              # who has been here longer is not forgotten
        self.assertEqual(database.known(*listed_key(0)), (T0, T0 + 9000, "S"))
        database.add_samples(T0 + 9000, [self.TOTAL + (0,)])
        self.assertEqual(self.sql("SELECT game, address FROM server ORDER BY address"),
                         [self.TOTAL[:2], listed_key(0)[:2]])
        self.assertEqual(self.sql("SELECT DISTINCT address FROM block LEFT JOIN server"
                                  " ON id = server"), [("",)])

    def test_those_here_for_the_shortest_time_are_forgotten_when_there_are_too_many(self):
        """With their history: servers that are not listed, and games, whatever their age is."""
        database = self.database()
        number = database.installation_id(77)
        for wall in T0, T0 + 300:
            database.save([listed_row(number, wall + number) for number in range(30)], set())
        database.save([listed_row(1, T0 + 500)], set())     # all others were here for 300 s
        servers = [listed_key(number) + (1,) for number in range(30)]
        database.add_samples(T0, servers + [self.TOTAL + (1,)])
        database.save([], {listed_key(number) for number in range(1, 30)})
        with mock.patch.object(ms, "KNOWN_SERVERS", 20):
            database.add_samples(T0 + 600, [self.TOTAL + (7,)])
            database.add_samples(T0 + 30 * 60, [self.TOTAL + (7,)])
            known = [number for number in range(30) if database.known(*listed_key(number))]
            self.assertEqual(known, [0, 1, *range(12, 30)])     # the listed one is not counted
            for minute in range(31, 76):
                renamed = [("renamed-%d-%d" % (minute, one), "", 0, 1) for one in range(30)]
                database.add_samples(T0 + 60 * minute, renamed + [self.TOTAL + (7,)])
        self.assertEqual(database.load(), [listed_row(0, T0 + 300)._replace(first_seen=T0)])
        self.assertIsNotNone(database.known(*self.A))
        games = {game for game, in self.sql("SELECT game FROM server WHERE address = ''")}
        self.assertIn("iceball", games)
        self.assertLessEqual(len(games), 1 + 20 + 30)
        [(rows,)] = self.sql("SELECT count(*) FROM server WHERE game != ''")
        self.assertEqual(self.sql("SELECT count(DISTINCT server) FROM block"), [(rows,)])
        self.assertEqual(database.installation_id(78), number)

    def test_a_file_of_the_program_before(self):
        """As 8ee9a3a wrote it: the attributes without names, a row with port -1 for the clock."""
        with contextlib.closing(sqlite3.connect(self.path)) as db:
            db.executescript(
                "CREATE TABLE server (id INTEGER PRIMARY KEY AUTOINCREMENT, game TEXT, address"
                " TEXT, port INTEGER, first_seen REAL, last_seen REAL, fields TEXT, UNIQUE (game,"
                " address, port)); CREATE TABLE listed (server INTEGER PRIMARY KEY, expires REAL,"
                " last_seen REAL); CREATE TABLE block (step INTEGER, start INTEGER, server INTEGER,"
                " samples BLOB, PRIMARY KEY (step, start, server)) WITHOUT ROWID;"
                """PRAGMA user_version = 1;
                INSERT INTO server VALUES (1, '', '', 77, NULL, NULL, NULL),
                    (2, 'iceball', '192.0.2.1', 1001, 1700006400.0, 1700006400.0, '["caf\u00e9",
                     "ctf","","",3,8,2,"",5,"handshake",true,{"mod":"x"},"192.0.2.1",false,{},{},
                     "",{}]'),
                    (3, 'aio', '2001:db8::1', 7777, 1700006400.0, 1700006400.0, '["Gone"]'),
                    (4, 'subspace', '192.0.2.2', 2000, 1700006400.0, 1700006400.0, '["Zone","","",
                     "",0,0,null,"",0,"query",true,{},"192.0.2.2",false,{},
                     {"port":"5","password":"ab"},"",{}]'),
                    (5, '', '', -1, 1700006400.0, 1700007300.0, NULL),
                    (7, 'iceball', '', 0, 1700006400.0, 1700007300.0, NULL);
                INSERT INTO listed VALUES (2, 1700006520.0, 1700006400.0),
                    (4, 1700093200.0, 1700006800.0);""")
            for step, start, size, samples in (
                    (60, T0, 120, hexa("0400") * 16), (900, T0, 384, hexa("0400 0500")),
                    (3600, T0 - 6 * ms.DAY, 672, bytes(4 * 144) + hexa("0400 0500"))):
                for server in 2, 7:
                    db.execute("INSERT INTO block VALUES (?, ?, ?, ?)",
                               (step, start, server, samples.ljust(size, b"\0")))
            db.commit()
        database = self.database()
        iceball, zone = [ms.restored_server(row, 0.0, T0)
                         for row in database.load()]
        self.assertEqual(
            (*iceball.key, iceball.name, iceball.mode, iceball.playing, iceball.room,
             iceball.verified, iceball.details, iceball.lifetime),
            (*self.A, "caf\u00e9", "ctf", 2, "iceball", "handshake", {"mod": "x"}, 120.0))
        self.assertEqual((zone.name, zone.playing, zone.lifetime), ("Zone", None, math.inf))
        self.assertEqual(database.known("aio", "2001:db8::1", 7777), (T0, T0, "Gone"))
        self.assertEqual(database.installation_id(78), 77)
        for key, (span, count, peak) in itertools.product((self.A, self.TOTAL), (
                ("day", 16, 3), ("week", 1, 4), ("month", 1, 4), ("year", 1, 4))):
            series = database.history(*key, span, T0 + 2 * ms.HOUR)
            self.assertEqual(([mean for mean in series.means if mean is not None],
                              max(filter(None, series.peaks))), ([3] * count, peak), span)
        database.save([listed_row(1, name="new")], {zone.key})
        self.assertEqual(database.load(), [listed_row(1, name="new")])
        self.assertEqual(database.known(*zone.key), (T0, T0 + 400, "Zone"))
        self.sql("PRAGMA user_version = 0")         # restored from a dump, which does not tell it
        self.assertEqual((len(self.database().load()), self.set_aside()), (1, []))


class HistoryOnDisk(DatabaseCase):
    def series(self, database, wall, span="day"):
        """Means and peaks by their times, without the gaps."""
        series = database.history(*self.A, span, wall)
        step, length = ms.SPANS[span]
        self.assertEqual((series.step, series.start % step, len(series.means), len(series.peaks)),
                         (step, 0, length // step, length // step))
        return tuple({series.start + step * n: value for n, value in enumerate(values)
                      if value is not None} for values in (series.means, series.peaks))

    def test_minutes_and_their_bytes(self):
        database = self.database()
        for minute, players in ((0, 3), (1, 0), (3, 65_534), (4, 99_999), (5, -1)):
            database.add_samples(T0 + 60 * minute + 7.5, [self.A + (players,)])
        means, peaks = self.series(database, T0 + 600)
        self.assertEqual(means, {T0: 3, T0 + 60: 0, T0 + 180: 65_534, T0 + 240: 65_534,
                                 T0 + 300: 0})
        self.assertEqual(peaks, means)
        # 16 bits, little-endian, one more than the players
        [(blob,)] = self.sql("SELECT samples FROM block WHERE step = 60")
        self.assertEqual(blob, hexa("0400 0100 0000 ffff ffff 0100") + bytes(108))

    def test_quarters_and_hours_are_made_of_minutes(self):
        database = self.database()
        for minute in range(61):
            if minute == 20:
                database = self.database()          # and a restart in between
            if not 30 <= minute < 45:
                database.add_samples(T0 + 60 * minute, [self.A + (minute % 15 * 2,),
                                                        self.TOTAL + (7,)])
        end = T0 + 2 * ms.HOUR
        # The mean of 0, 2 .. 28
        quarters = {at: 14 for at in (T0, T0 + 900, T0 + 2700)}
        peaks = dict.fromkeys(quarters, 28)
        self.assertEqual(self.series(database, T0 + ms.HOUR + 960, "week"), (quarters, peaks))
        self.assertEqual(self.series(database, end, "year"), ({T0: 14}, {T0: 28}))
        self.assertEqual(database.history(*self.TOTAL, "year", end).means[-2:], [7, None])
        # Nothing is known of others, and there is no other span
        self.assertEqual(set(database.history(*listed_key(9), "year", end).peaks), {None})
        with self.assertRaises(KeyError):
            database.history(*self.A, "decade", T0)

    def test_what_is_stored_of_games(self):
        """Two hours: one server with 4 players, a second one with 10 in the first half hour, and
        another game with one player. Of 7 whole quarters two have 14 players and five have 4."""
        database = self.database()
        b, c, older = listed_key(2), ("aio", "192.0.2.1", 1), ("aio", "192.0.2.1", 2)
        database.add_samples(T0 + ms.HOUR - ms.WEEK, [older + (500,)])
        for minute in range(121):
            others = 10 if minute < 30 else 0
            samples = [self.A + (4,), c + (1,), self.TOTAL + (4 + others,), ("aio", "", 0, 1),
                       ms.ALL_GAMES + (5 + others,)]
            database.add_samples(T0 + 60 * minute, samples + [b + (10,)] * (minute < 30))
        pasts = database.games_past(("iceball", "aio", "luanti"), T0 + 7259)
        for game, peaks, means, most_played in (
                ("iceball", (14, 14, 14), (6.5, 6.9, 6.9), [(b, 5.0), (self.A, 4.0)]),
                ("aio", (1, 1, 1), (1.0, 1.0, 1.0), [(c, 1.0)]),
                ("luanti", (None,) * 3, (None,) * 3, []),
                ("", (15, 15, 15), (7.5, 7.9, 7.9), [])):
            past = pasts[game]
            spans = dict.fromkeys(("day", "week", "month"))
            self.assertEqual(past.peaks, dict(zip(spans, peaks)), game)
            self.assertEqual(past.means, dict(zip(spans, means)), game)
            self.assertEqual(past.week, [None] * 83 + [means[1]], game)
            self.assertEqual(past.most_played, most_played, game)
        # It is made once a minute for all who ask
        database.add_samples(T0 + 7260, [self.TOTAL + (50,)])
        self.assertIs(database.games_past(("aio",), T0 + 7260 - 1), pasts)
        later = database.games_past(("iceball",), T0 + 7320)["iceball"]
        self.assertEqual(later.peaks, {"day": 50, "week": 14, "month": 14})
        with mock.patch.object(ms, "MOST_PLAYED", 1):
            later = database.games_past(("iceball",), T0 + 7380)["iceball"]
        self.assertEqual(later.most_played, [(b, 5.0)])

    def test_uptime(self):
        """From the first time a server was seen, and while this master was there."""
        there, gone = [1, 0, 3, 4], [None] * 4
        for first_seen, server, everybody, game, share in (
                (-5, there, there, gone, 1.0), (-5, [1, None, 1, 1], there, there, 0.75),
                (0, [None, None, 1, 1], there, gone, 0.5),
                (120, [None, None, 1, 1], there, gone, 1.0),
                (61, [None, None, 1, 1], there, gone, 1.0), (181, [None] * 4, there, gone, None),
                (0, [1, None, None, 1], [5, None, 5, 5], gone, 2 / 3),      # this master was away
                (0, [1, None, None, 1], gone, [5, None, 5, 5], 2 / 3),      # an older version's
                (0, gone, there, there, 0.0), (0, gone, gone, gone, None),
                (240, gone, there, there, None)):
            series = [ms.Series(0, 60, counts, counts) for counts in (server, everybody, game)]
            self.assertEqual(ms.uptime(first_seen, *series), share, (first_seen, server))

    def test_the_mean_is_of_the_samples_there_are_and_rounds(self):
        for samples, expected in (([0, 0, 0], (0, 0)), ([1, 2], (2, 2)),
                                  ([1, 1, 2, 0], (1, 2)), ([65_535] * 60, (65_535, 65_535))):
            self.assertEqual(ms.mean_and_peak(samples), expected, samples)

    def test_series_end_with_the_last_step_that_is_complete(self):
        database = self.database()
        for minute in range(150):
            database.add_samples(T0 + 60 * minute, [self.A + (minute,)])
            for span, (step, length) in ms.SPANS.items() if minute >= 80 else ():
                wall = T0 + 60 * minute + 1 + 58 * (minute % 2)
                series = database.history(*self.A, span, wall)
                late = 2 * ms.MINUTE if step == ms.MINUTE else ms.QUARTER + 2 * ms.MINUTE
                self.assertIsNotNone(series.means[-1], (span, minute))
                self.assertTrue(-step <= wall - series.start - length <= late, (span, minute))

    def test_a_clock_that_is_set(self):
        database = self.database()
        for wall, players in ((T0 - 20 * ms.HOUR, 0), (T0, 1), (T0 + 60, 2), (T0, 9),
                              (T0 + 5 * ms.HOUR, 4)):
            database.add_samples(wall, [self.A + (players,)])
        end = T0 + 6 * ms.HOUR
        # Back it overwrites, forwards it leaves a gap
        minutes = self.series(database, end)[0]
        self.assertEqual(minutes, {T0: 9, T0 + 60: 2, T0 + 5 * ms.HOUR: 4})
        self.assertEqual(self.series(database, end, "year")[0][T0], 6)          # of 5.5
        # One that was ahead costs no quarter at a restart
        database.add_samples(T0 + ms.YEAR, [self.A + (3,)])
        database.add_samples(end, [self.A + (3,)])
        self.database().add_samples(end + ms.HOUR, [self.A + (5,)])
        self.assertEqual(self.series(database, end + ms.HOUR, "week")[0][end], 3)

    def test_each_span_stays_whole_and_nothing_stays_for_ever(self):
        database = self.database()
        gone = listed_key(2)
        for wall in T0, T0 + ms.QUARTER:
            database.save([listed_row(2, wall)], set())
        database.save([], {gone})
        for step, span in ((ms.MINUTE, "day"), (ms.QUARTER, "month"), (ms.HOUR, "year")):
            covers, kept = ms.BLOCK_FORMS[step].covers, ms.BLOCK_FORMS[step].kept
            for wall in (T0, T0 + ms.QUARTER):
                database.add_samples(wall, [gone + (5,), self.TOTAL + (5,)])
            self.sample_steadily(database, T0 + kept - ms.DAY)
            wall = T0 + kept + (step != ms.MINUTE) * ms.MINUTE
            for key in gone, self.TOTAL:
                self.assertEqual(database.history(*key, span, wall).means[0], 5, span)
            self.assertIsNotNone(database.known(*gone))
            self.sample_steadily(database, T0 + kept + covers + ms.HOUR)
            [(oldest,)] = self.sql("SELECT min(start) FROM block WHERE step = ?", step)
            self.assertGreater(oldest, T0 + ms.QUARTER, span)
        self.assertEqual(self.sql("SELECT game, address FROM server WHERE game != ''"),
                         [("iceball", "192.0.2.1")])

    def sample_steadily(self, database, wall, seconds=ms.DAY):
        """A sample an hour, as many as it takes until the clock is believed."""
        for late in range(0, seconds + 1, ms.HOUR):
            database.add_samples(wall + late, [self.A + (1,)])

    def test_a_clock_that_jumps_erases_nothing(self):
        """Years ahead or back, for a sample or for a day with a gap; each after a restart."""
        year = list(range(T0, T0 + 5 * ms.HOUR, ms.HOUR))
        hours = [2 * ms.YEAR + late for late in range(0, 29 * ms.HOUR, ms.HOUR)]
        for walls, believed in (
                ([-T0, 2 * ms.YEAR, 3 * ms.YEAR], False),
                (hours[:20] + hours[21:], False), (hours, True)):
            self.put(b"")
            database = self.database()
            for wall in T0, year[-1]:
                database.save([listed_row(2, wall)], set())
            for wall in year:
                database.add_samples(wall, [self.A + (7,), self.TOTAL + (7,)])
            database.save([], {listed_key(2)})
            for number, wall in enumerate(walls):
                if number % 10 == 0:
                    database.close()
                    database = self.database()
                database.add_samples(T0 + wall, [self.A + (1,)])
            end = T0 + 6 * ms.HOUR
            database.add_samples(end, [self.A + (1,)])
            kept = [] if believed else year
            self.assertEqual(list(self.series(database, end + ms.HOUR, "year")[0]), kept, walls)
            self.assertEqual(database.history(*self.TOTAL, "year", end).means[-6:-1],
                             [None if believed else 7] * 5)
            self.assertEqual(database.known(*listed_key(2)) is None, believed)
            database.close()

    def test_sparklines(self):
        """Across the end of a week, which is the end of a block."""
        database = self.database()
        start = T0 // ms.WEEK * ms.WEEK + ms.WEEK - 5 * ms.HOUR
        fresh = []
        for quarter in range(30 * 4):
            wall = start + quarter * ms.QUARTER
            players = [self.TOTAL + (1,)] + [self.A + (quarter // 4,)] * (quarter < 7 * 4)
            fresh.append(database.add_samples(wall, players))
            self.assertIsNone(database.add_samples(wall + 60, players))      # no quarter has ended
        at = lambda hours, key: database.hourly_players(start + int(hours * ms.HOUR)).get(key)
        self.assertEqual(at(10.01, self.A), [None] * 14 + [0, 1, 2, 3, 4, 5, 6] + [None] * 3)
        self.assertEqual(fresh[40][self.A], at(10.01, self.A))
        self.assertEqual(at(29.27, self.A)[0], 6)
        self.assertIsNone(at(31.27, self.A))        # out of sight, and not a row of gaps
        self.assertEqual(at(29.27, self.TOTAL), [1] * 24)


class DamageOnDisk(DatabaseCase):
    def test_noise_is_damage(self):
        """Whatever it is, and wherever in the file: no call fails for it twice."""
        data, draw = self.sound(), random.Random(3)
        noise = draw.getrandbits(8 * 10_000).to_bytes(10_000, "big")
        certain = [b"xx", b"<html>" * 1000, bytes(5000), noise]
        certain += [data[:size] for size in (2, 99, 100, 4095, 4096, 12_345, len(data) - 4096)]
        # SQLite reports noise in the head as it does a full disk
        certain += [data[:at] + b"\x09" + data[at + 1:] for at in (16, 19, 47)]
        certain.append(data.replace(b"192.0.2.7", b"192.0.2.\xff"))
        perhaps = [data[:at] + noise[:4096] + data[at + 4096:]
                   for at in range(4096, len(data), 4096)]
        for _ in range(int(os.environ.get("NOISE", 30))):
            broken = bytearray(data)
            for _ in range(draw.choice((1, 10, 100))):
                broken[draw.randrange(4096, len(broken))] = draw.randrange(256)
            perhaps.append(bytes(broken))
        for number, case in enumerate(certain + perhaps):
            with self.subTest(number=number, size=len(case), begins=case[:4]):
                self.put(case)
                database = self.database()
                self.use(database)
                if number < len(certain):
                    self.assertEqual(self.set_aside(), ["master.db.damaged"])
                    old_file, = glob.glob(self.path + ".damaged*")
                    self.assertEqual(os.path.getsize(old_file), len(case))
                    self.assertEqual(database.known(*listed_key(87)).last_seen, T0)
                database.close()

    def test_values_that_nobody_wrote_are_damage(self):
        data = self.sound()
        for change in ("server SET port = 'x'", "server SET first_seen = 'then'",
                       "server SET fields = '['", "server SET fields = '5'",
                       "listed SET expires = NULL", "block SET samples = 'x'",
                       "block SET samples = x'0000'"):
            self.put(data)
            self.sql("UPDATE " + change)
            database = self.database()
            self.use(database)
            self.assertEqual(len(self.set_aside()), 1, change)
            database.close()

    def test_files_of_other_programs_stay_as_they_are(self):
        for statement in ("CREATE TABLE mail (text TEXT)", "PRAGMA user_version = 2",
                          "DROP TABLE block"):
            self.put(b"")
            if "mail" not in statement:
                self.database().close()
            self.sql(statement)
            before = self.sql("SELECT sql FROM sqlite_master"), self.sql("PRAGMA user_version")
            database = ms.Database(self.path)
            for _ in range(2):
                with self.assertRaisesRegex(sqlite3.OperationalError, "another program or to a l"):
                    database.load()
            after = self.sql("SELECT sql FROM sqlite_master"), self.sql("PRAGMA user_version")
            self.assertEqual((after, self.set_aside()), (before, []), statement)

    def test_damage_while_it_runs(self):
        """With the logs of the file, which are damaged with it."""
        self.sound()
        database = self.database()
        database.close()
        os.truncate(self.path, 6000)
        self.assertRaisesRegex(sqlite3.DatabaseError, "the file is damaged", database.load)
        for suffix in "-journal", "-shm", "-wal":
            with open(self.path + suffix, "w"):
                pass
        with mock.patch.object(os, "replace", side_effect=PermissionError(13, "denied")):
            self.assertRaises(PermissionError, database.load)
        self.assertEqual(self.set_aside(), [])
        database.save([listed_row(500)], set())
        self.assertEqual(self.set_aside(), [
            "master.db.damaged" + suffix for suffix in ("", "-journal", "-shm", "-wal")])
        self.assertEqual(database.load(), [listed_row(500)])
        self.assertIn("it has been renamed", ms.log.warning.call_args[0][0])

    @unittest.skipUnless(sys.platform == "linux" and sys.implementation.name == "cpython",
                         "no /proc, or it is closed some time later")
    def test_a_damaged_file_is_closed_and_renamed_where_a_link_leads(self):
        """Windows renames no open file, and what an error holds is open."""
        data = self.sound().replace(b"first_seen", b"fi\xffst_seen")
        folder = os.path.join(self.folder, "elsewhere")
        os.mkdir(folder)
        with open(os.path.join(folder, "master.db"), "wb") as file:
            file.write(data)
        os.remove(self.path)
        os.symlink(file.name, self.path)
        replace, still_open = os.replace, []

        def renamed(before, after):
            files = map(os.path.realpath, glob.glob("/proc/self/fd/*"))
            still_open.extend(path for path in files if path.startswith(folder))
            replace(before, after)
        with mock.patch.object(os, "replace", renamed):
            self.database().load()
        self.assertEqual((still_open, os.path.islink(self.path)), ([], True))
        self.assertEqual((self.set_aside(), self.set_aside(folder)), ([], ["master.db.damaged"]))


class TroubleOnDisk(DatabaseCase):
    def with_pragma(self, pragma):
        def connect(*arguments, connect=sqlite3.connect, **options):
            db = connect(*arguments, **options)
            db.execute("PRAGMA " + pragma)
            return db
        return mock.patch.object(sqlite3, "connect", connect)

    @contextlib.contextmanager
    def locked(self):
        with contextlib.closing(sqlite3.connect(self.path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield

    def test_write_errors_are_raised_and_end(self):
        rows = [listed_row(number, name="%4000d" % 0) for number in range(2, 100)]
        full = self.with_pragma("max_page_count = 1")           # as many as there are
        read_only = self.with_pragma("query_only = 1")
        for trouble, error in ((full, "full"), (self.locked(), "locked"), (read_only, "readonly")):
            with self.subTest(error):
                self.path = os.path.join(self.folder, error + ".db")
                database = self.database()
                database.save([listed_row(1)], set())
                database.close()
                with trouble:
                    for _ in range(2):
                        with self.assertRaisesRegex(sqlite3.OperationalError, error):
                            database.save(rows, {self.A})
                        self.assertEqual(database.load(), [listed_row(1)])    # it can be read
                    database.close()
                database.save([listed_row(3)], set())
                self.assertEqual(database.load(), [listed_row(1), listed_row(3)])
                database.close()
                self.assertEqual(self.sql("PRAGMA integrity_check"), [("ok",)])
                self.assertEqual(self.set_aside(), [])

    def test_files_that_cannot_be_opened(self):
        database = ms.Database(self.path)
        self.addCleanup(database.close)
        os.mkdir(self.path)                         # a folder in its place
        for _ in range(2):
            with self.assertRaisesRegex(sqlite3.OperationalError, "(unable to|Could not) open"):
                database.load()
        os.rmdir(self.path)
        database.save([listed_row(1)], set())
        self.assertEqual(database.load(), [listed_row(1)])


# --- Poller --------------------------------------------------------------------------------------

def address_of(number):
    return "198.18.%d.%d" % (number // 250, number % 250 + 1)


class Echo(ms.PolledGame):
    """Its question is its nonce; its answer is the nonce, to as many questions as are wanted."""

    game = "test"

    def __init__(self, core, questions=1):
        super().__init__(core)
        self.questions = questions
        self.answered = []
        self.silent = []
        self.named = {}

    def named_servers(self):
        return self.named

    def question(self, target):
        return struct.pack("<I", target.nonce)

    def read_answer(self, target, data):
        if data != self.question(target):
            raise ms.Malformed("the wrong nonce")
        self.answered.append(target)
        if self.answered.count(target) % self.questions:
            return None
        return {"name": "Echo", "players": 3}


class EchoTarget(Echo):
    """It lists nothing, and is asked for ever, until three polls in a row are missed."""

    def has_listed(self, target):
        return True

    def list_polled(self, target, fields, now):
        self.poller.newcomers.pop(target.key)

    def poll_missed(self, target, now):
        self.silent.append(target.missed)
        if target.missed >= ms.MISSED_POLLS_LIMIT or self.poller.newcomers.get(target.key):
            self.poller.remove(target)


def run_poller(poller, seconds, silent=()):
    """Who was asked in each second; all but the silent ones answer at once."""
    asked = []
    for second in seconds:
        queries = poller.tick(float(second))
        for data, peer in queries:
            if peer[0] not in silent:
                poller.datagram(data, peer, second + 0.01)
        asked.append([peer[0] for _, peer in queries])
    return asked


def read_answer(room, target, data):
    """As the poller and `ping` read it."""
    room.check_length(data)
    return room.read_answer(target, data)


class PollerTest(unittest.TestCase):
    here = "203.0.113.9"

    def setUp(self):
        self.start()

    def start(self, questions=1, **settings):
        core = make_core(**settings)
        self.game, self.poller = EchoTarget(core, questions), core.poller

    def add(self, number):
        for each in range(number):
            self.ask(address_of(each))

    def ask(self, address):
        """A listed server."""
        return self.poller.add(self.game, address, 5000, ms.ANNOUNCED)

    def test_queries_are_spread_over_the_interval(self):
        for interval, most in (30, 45), (10, 95), (5, 165):
            self.start(poll__interval=str(interval))
            self.add(500)
            asked = run_poller(self.poller, range(6 * interval))
            for start in range(0, 5 * interval, interval):
                with self.subTest(interval=interval, start=start):
                    turn = asked[start:start + interval + 1]
                    self.assertEqual(len(set(sum(turn, []))), 500)
            self.assertLessEqual(max(map(len, asked[interval:])), most)

    def test_the_rate_holds_and_who_waits_longest_is_first(self):
        self.start(questions=3, poll__rate="4")
        self.add(20)
        asked = run_poller(self.poller, range(15))
        self.assertEqual([len(second) for second in asked], [4] * 15)
        self.assertEqual([len(set(sum(asked[at:at + 5], []))) for at in (0, 5, 10)], [20] * 3)

    def test_what_another_list_names_comes_last(self):
        """Its servers get what the others leave."""
        self.start(poll__rate="4")
        for number in range(10, 40):
            self.poller.add(self.game, address_of(number), 5000, ms.FOUND)
        self.add(3)
        self.assertEqual([place[0] in map(address_of, range(3))
                          for _, place in self.poller.tick(1.0)], [True] * 3 + [False])
        self.poller.add_newcomer(self.game, self.here, 5001, 9)
        self.assertEqual([place for _, place in self.poller.tick(2.0)][0], (self.here, 5001))

    def test_an_answer_counts_only_from_where_and_to_what_was_asked(self):
        target = self.ask(self.here)
        [(data, peer)] = self.poller.tick(1.0)
        for stray, source in ((data, (self.here, 5001)), (data, ("203.0.113.8", 5000)),
                              (b"junk", peer), (b"", peer)):
            self.assertRaises(ms.Malformed, self.poller.datagram, stray, source, 1.1)
        self.assertEqual(self.game.answered, [])
        mapped = ("::ffff:203.0.113.9", 5000, 0, 0)
        self.assertEqual(self.poller.datagram(data, mapped, 1.25), [])
        self.assertEqual(self.game.answered, [target])
        self.assertRaises(ms.Malformed, self.poller.datagram, data, peer, 1.3)  # once more

    def test_a_wrong_answer_closes_a_query(self):
        """Only one that repeats its number, as others may be forged. The poll is missed as if
        nothing had come, and /check still knows why."""
        target = self.ask(self.here)
        missed = []
        wrong = ms.WrongAnswer("far too many players")
        for now in (1.0, 4.0, 7.0):
            for data, peer in self.poller.tick(now):
                for _ in range(100):
                    self.assertRaises(ms.Malformed, self.poller.datagram, b"junk", peer, now)
                self.assertIsNotNone(target.asked_at)
                with mock.patch.object(self.game, "read_answer", side_effect=wrong) as read:
                    for _ in range(100):
                        self.assertRaises(ms.Malformed, self.poller.datagram, data, peer, now)
                self.assertEqual(read.call_count, 1)
                self.assertRaisesRegex(
                    ms.Malformed, "nobody asked", self.poller.datagram, data, peer, now)
                missed.append((now, target.trouble))
        self.assertEqual(missed, [(1.0, "far too many players"), (4.0, "far too many players")])
        self.assertEqual((self.game.silent, self.game.answered), ([1], []))

    def test_two_games_at_one_endpoint(self):
        other = EchoTarget(SimpleNamespace(**{**vars(make_core()), "poller": self.poller}))
        other.game, other.offset = "other", 1
        self.poller.add(self.game, self.here, 5001, ms.ANNOUNCED)
        self.poller.add(other, self.here, 5000, ms.ANNOUNCED)
        self.assertEqual(run_poller(self.poller, [1]), [[self.here] * 2])
        self.assertEqual((len(self.game.answered), len(other.answered)), (1, 1))

    def test_a_lost_answer_is_asked_for_again_with_another_nonce(self):
        self.ask(self.here)
        [(first, peer)] = self.poller.tick(1.0)
        self.assertEqual(self.poller.tick(3.9), [])
        [(second, again)] = self.poller.tick(4.0)
        self.assertEqual((again, self.game.silent), (peer, []))
        self.assertRaises(ms.Malformed, self.poller.datagram, first, peer, 4.1)     # too late
        self.poller.datagram(second, peer, 4.2)
        self.assertEqual(len(self.game.answered), 1)

    def test_three_missed_polls_in_a_row(self):
        target = self.ask(self.here)
        asked = 0
        for second in range(300):
            for data, peer in self.poller.tick(float(second)):
                asked += 1
                if asked == 5:                          # two polls of two questions have gone by
                    self.poller.datagram(data, peer, second + 0.1)
        self.assertEqual((self.game.silent, asked), ([1, 2, 1, 2, 3], 4 + 1 + 6))
        self.assertEqual(self.poller.targets, {})
        self.poller.remove(target)                                  # twice does no harm

    def test_polls_go_on_at_the_interval(self):
        self.ask(self.here)
        asked = run_poller(self.poller, range(400))
        times = [second for second, peers in enumerate(asked) if peers]
        self.assertEqual(times[0], 0)
        gaps = [later - sooner for sooner, later in zip(times[1:], times[2:])]
        self.assertEqual((set(gaps), len(gaps) > 11), ({30}, True))

    def test_the_next_slot(self):
        for now, interval, phase, due in (
                (100.0, 30.0, 0.5, 105.0), (104.9, 30.0, 0.5, 105.0), (105.0, 30.0, 0.5, 135.0),
                (0.0, 30.0, 0.0, 30.0), (1.0, 5.0, 0.9, 4.5), (3600.0, 3600.0, 0.25, 4500.0)):
            self.assertAlmostEqual(ms.next_slot(now, interval, phase), due)

    def test_another_interval_counts_at_once(self):
        """Every target is asked once in the new interval, at its place in it."""
        for before, after in ("3600", 10), ("5", 50):
            self.start(poll__interval=before)
            self.add(60)
            run_poller(self.poller, range(100))
            self.poller.read(ms.Settings({"poll.interval": str(after)}))
            asked = run_poller(self.poller, range(100, 100 + after + 1))
            # At the first tick come those whose place in the old interval was within its second
            self.assertEqual(len(set(sum(asked, []))), 60)
            self.assertLess(max(map(len, asked)), 30)
            self.assertGreater(len([second for second in asked if second]), after // 3)

    def test_another_interval_delays_no_poll_that_has_begun(self):
        self.add(3)
        run_poller(self.poller, range(5))
        waiting, begun, asked = self.poller.targets.values()
        waiting.due = 4000.0
        self.poller.poll_now(begun, 4.5)
        self.poller.poll_now(asked, 4.0)
        asked.asked_at, asked.due = 4.0, 7.0
        self.poller.read(ms.Settings({"poll.interval": "3600"}))
        self.assertEqual((begun.due, asked.due), (4.5, 7.0))
        self.assertAlmostEqual(waiting.due, ms.next_slot(4.0, 3600.0, waiting.phase))

    def test_a_poll_begins_anew(self):
        """Also where one is open: nothing of that one counts."""
        target = self.ask(self.here)
        [(first, peer)] = self.poller.tick(1.0)
        self.poller.poll_now(target, 1.5)
        self.assertRaises(ms.Malformed, self.poller.datagram, first, peer, 1.6)
        [(second, peer)] = self.poller.tick(2.0)
        self.assertEqual((target.unanswered, self.poller.tick(3.0)), (0, []))
        self.poller.datagram(second, peer, 3.1)
        self.assertEqual((self.game.answered, target.restarts), ([target], 0))

    def test_announcements_do_not_put_off_the_end_for_ever(self):
        """A listed server that answers nothing and announces itself every five seconds."""
        target = self.ask(self.here)
        for now in range(200):
            if now % 5 == 0:
                self.poller.poll_now(target, now + 0.5)
            self.poller.tick(float(now))
        self.assertEqual(self.poller.find(self.game, self.here, 5000) is target, False)

    def add_newcomers(self, sources, each=1):
        for source in sources:
            for port in range(each):
                self.poller.add_newcomer(self.game, source, 5000 + port, 99)

    def test_listed_servers_first_and_a_share_for_newcomers(self):
        for rate, listed, newcomers, asked in (
                (50, 0, 9, (0, 9)), (50, 60, 0, (50, 0)), (50, 20, 60, (20, 30)),
                (50, 60, 60, (45, 5)), (50, 48, 60, (45, 5)), (50, 60, 2, (48, 2)),
                (5, 60, 60, (4, 1)), (1, 60, 60, (1, 0)), (1, 0, 60, (0, 1))):
            self.start(poll__rate=str(rate))
            self.add_newcomers(["192.0.2.%d" % number for number in range(newcomers)])
            self.add(listed)
            queries = self.poller.tick(1.0)
            new = [peer for _, peer in queries if peer[0].startswith("192.0.2.")]
            self.assertEqual((len(queries) - len(new), len(new)), asked, (rate, listed, newcomers))

    def test_the_sources_of_newcomers_take_turns(self):
        """Nine addresses, or the networks of nine hosts, with 32 newcomers each that never answer,
        and announce themselves at once when they have left."""
        for sources in (["192.0.2.%d" % number for number in range(9)],
                        ["2001:db8:0:%x::1" % number for number in range(9)]):
            for listed in 0, 300:
                self.start(poll__rate="60")
                self.add(listed)
                silent = [address_of(number) for number in range(300)]
                waited = []
                for second in range(60):
                    for source in sources:
                        for port in range(5000, 5032):
                            if self.poller.find(self.game, source, port) is None:
                                self.poller.add_newcomer(self.game, source, port, 32)
                    if second % 10 == 5:
                        self.add_newcomers([self.here])
                        since = second
                    asked, = run_poller(self.poller, [float(second)], {*sources, *silent})
                    if self.here in asked:
                        waited.append(second - since)
                        self.poller.remove(self.poller.find(self.game, self.here, 5000))
                self.assertEqual(len(waited), 6)
                self.assertLessEqual(max(waited), 2, (sources[0], listed))


class EchoGame(Echo):
    """A game whose servers are listed while they return the nonce."""

    offset = 1


class PolledGameTest(unittest.TestCase):
    here = "203.0.113.9", 5000

    def setUp(self):
        self.lookups = []
        self.program = make_core()
        self.program.resolve = lambda host, done, source: self.lookups.append((host, done))
        self.registry, self.poller = self.program.registry, self.program.poller
        self.game = EchoGame(self.program)

    def run_game(self, seconds, silent=()):
        for second in seconds:
            self.game.tick(float(second))
            run_poller(self.poller, [second], silent)

    def name(self, *places):
        """Have the ini name these."""
        self.game.named = dict.fromkeys(places)
        self.game.read(self.program.settings)

    def listed(self):
        """With the players of those who respond."""
        return [(server.address, server.port, server.responding and server.players)
                for server in self.registry.servers("test")]

    def targets(self):
        return {key[1:] for key in self.poller.targets}

    def outcome(self):
        return self.registry.outcome("203.0.113.9", "test", 5000)[1:]

    def test_an_answer_that_cannot_be_read_is_told(self):
        self.ask(self.here[0])
        _, peer = self.poller.tick(0.0)[0]
        self.assertRaises(ms.Malformed, self.poller.datagram, b"junk", peer, 0.1)
        self.run_game((3, 6), self.here)
        self.assertEqual(self.outcome(),
                         ("bad packet", "its answer from UDP port 5001: the wrong nonce"))

    def find(self, *places, **fields):
        """Another list names these; whether each is asked, or why not."""
        told = []
        for place in places:
            try:
                told.append(self.game.query_found(
                    ms.FoundServer(*place, "up.example", fields)) is not None)
            except ms.Refused as refused:
                told.append(refused.outcome)
        return told

    def test_found_in_another_list_and_not_allowed(self):
        self.program.registry.rules.read(settings_of({
            "bans.198.51.100.0/24": "fakes", "blocked.192.0.2.0/24": "floods",
            "limits__servers_per_source": "2", "server__refuse_names": "Fake"}))
        self.assertEqual(self.find(("198.51.100.7", 1), ("192.0.2.7", 1)), ["banned"] * 2)
        self.assertEqual(self.find(("203.0.113.8", 0), ("0.0.0.1", 1)), ["bad packet"] * 2)
        self.assertEqual(self.find(("203.0.113.8", 1), name="A Fake"), ["name"])
        self.assertEqual(self.find(("203.0.113.8", 1), ("203.0.113.8", 2)), [True, True])
        self.run_game(range(3))
        self.assertEqual(self.find(("203.0.113.8", 3)), ["limit"])
        # Its own announcement counts apart
        for port in 4, 1:
            self.game.announced("203.0.113.8", port, {}, 0.0)
        self.assertEqual(self.poller.find(self.game, "203.0.113.8", 1).why, ms.ANNOUNCED)

    def test_found_in_another_list_and_refused_when_it_announces_itself(self):
        """It stays as it was."""
        self.program.registry.rules.read(settings_of({"limits__servers_per_source": "1"}))
        self.find(self.here)
        self.run_game(range(3))
        self.game.announced(self.here[0], 6000, {}, 3.0)
        self.run_game(range(3, 6), ())
        self.assertRaises(ms.Refused, self.game.announced, *self.here, {}, 6.0)
        target = self.poller.find(self.game, *self.here)
        self.assertEqual((target.why, target.found.found_at), (ms.FOUND, "up.example"))
        self.assertEqual(self.registry.get("test", *self.here).found_at, "up.example")

    def test_found_in_another_list_and_then_announced_or_named(self):
        """Before it has answered, and after that. Without the list it stays."""
        for seconds_before, announce in itertools.product((0, 5), (
                lambda now: self.game.announced(*self.here, {}, now),
                lambda now: self.name(self.here))):
            self.setUp()
            self.find(self.here)
            self.run_game(range(seconds_before))
            announce(float(seconds_before))
            self.run_game(range(seconds_before, 45))
            server, = self.registry.servers()
            target, = self.poller.targets.values()
            self.assertEqual((server.found_at, target.why != ms.FOUND), ("", True))

    def test_found_in_another_list_and_listed_by_another_master(self):
        """Its announcement there says more."""
        for found_at, master in ("", "other"), ("up.example", ""):
            self.setUp()
            self.find(self.here)
            server = ms.Server("test", *self.here, self.here[0], 0.0, 60.0, found_at=found_at)
            server.master = "other"
            self.registry.insert(server)
            self.run_game(range(3))
            self.assertEqual([one.master for one in self.registry.servers()], [master])

    def test_a_refused_server_is_polled_no_more_unless_pinned(self):
        for pinned in False, True:
            self.setUp()
            self.name(*[self.here] * pinned)
            self.ask(self.here[0])
            self.run_game(range(2))
            self.assertEqual(len(self.listed()), 1)
            self.registry.rules.read(ms.Settings({"server.refuse_names": "Echo"}))
            self.run_game(range(2, 40))
            self.assertEqual((self.listed(), len(self.targets())), ([], pinned))
            self.assertEqual(self.outcome()[0], "name")

    def test_departed_servers_are_polled_no_more_and_restored_ones_are(self):
        server = ms.Server("test", *self.here, self.here[0], 0.0, math.inf)
        self.registry.insert(server)
        self.game.resume(server)
        self.assertEqual(self.targets(), {self.here})
        self.registry.remove_own(server)
        self.run_game(range(40))
        self.assertEqual((self.listed(), self.targets()), ([], set()))

    def test_a_silent_pinned_server_is_shown_as_not_responding(self):
        self.name(self.here)
        self.run_game(range(40), self.here)
        self.assertEqual(self.listed(), [(*self.here, False)])
        self.run_game(range(40, 80))
        self.assertEqual(self.listed(), [(*self.here, 3)])
        self.poller.remove(self.poller.find(self.game, *self.here))         # it stays a target
        self.run_game(range(80, 250), self.here)
        self.assertEqual(self.listed(), [(*self.here, False)])
        self.assertEqual(self.registry.servers()[0].players, 0)
        self.name()
        self.run_game([250])
        self.assertEqual((self.listed(), self.targets()), ([], set()))

    def test_names_are_looked_up_away_from_the_loop_and_again(self):
        other = "203.0.113.9", 6000
        self.name(("a.example", 5000), ("a.example", 7000), other)
        for now, found, lookups, leads in (
                (0, None, 1, []),                       # nobody waits for a name
                (1, "203.0.113.1", 1, ["203.0.113.1"]), (599, None, 1, ["203.0.113.1"]),
                (600, None, 2, ["203.0.113.1"]),        # a name server that fails moves nobody
                (601, "", 2, ["203.0.113.1"]), (660, None, 2, ["203.0.113.1"]),
                (661, None, 3, ["203.0.113.1"]), (662, "203.0.113.2", 3, ["203.0.113.2"])):
            if found is not None:
                self.lookups[-1][1](found, now)
            self.game.tick(now)
            self.assertEqual([host for host, _ in self.lookups], ["a.example"] * lookups, now)
            places = {(address, port) for address in leads for port in (5000, 7000)}
            self.assertEqual(self.targets(), {other} | places, now)
        self.name(other)
        self.lookups[1][1]("203.0.113.3", 662.0)                        # too late
        self.game.tick(662.0)
        self.assertEqual(self.targets(), {other})

    def test_a_name_that_leads_nowhere(self):
        self.name(("a.example", 5000))
        with self.assertLogs("masterserver", "WARNING") as logged:
            for number, address in enumerate(("", "0.0.0.0", "", "203.0.113.1")):
                self.assertEqual(self.targets(), set())
                self.game.tick(60.0 * number)
                self.assertEqual(len(self.lookups), number + 1)
                self.lookups[-1][1](address, 60.0 * number)
        self.game.tick(181.0)
        self.assertEqual((len(logged.records), self.targets()), (1, {("203.0.113.1", 5000)}))

    def test_a_name_is_not_looked_up_twice_at_a_time(self):
        """However long its name server takes, and however often the ini is read."""
        self.name(("a.example", 5000))
        for now in 0, 600, 1200:
            self.game.tick(float(now))
            self.game.read(self.program.settings)
        self.assertEqual(len(self.lookups), 1)
        self.lookups[0][1]("203.0.113.1", 1201.0)
        self.game.tick(1202.0)
        self.assertEqual(len(self.lookups), 2)

    def ask(self, *sources, port=5000, now=0.0):
        for source in sources:
            self.game.announced(source, port, {}, now)

    def test_newcomers_are_bounded_by_source_and_lose_their_own_oldest(self):
        self.registry.rules.max_servers_per_source = 3
        for port in 5000, 5001, 5002, 5000, 5003:
            self.ask(self.here[0], port=port)
        self.ask("203.0.113.8")
        self.assertEqual(self.targets(), {
            ("203.0.113.8", 5000), *[(self.here[0], port) for port in (5001, 5002, 5003)]})
        self.assertEqual(self.outcome()[0], "busy")

    def test_a_newcomer_leaves_after_its_first_missed_poll(self):
        for listed, pinned, seconds in (False, False, 6), (True, False, 66), (False, True, None):
            self.setUp()
            self.name(*[self.here] * pinned)
            self.game.tick(0.0)
            self.ask(self.here[0])
            if listed:
                self.run_game([0])
                self.assertEqual(self.listed(), [(*self.here, 3)])
            left = None
            for second in range(1, 200):
                self.run_game([second], self.here)
                if not self.targets() and left is None:
                    left = second
            self.assertEqual(self.outcome(), ("silent", "no answer from UDP port 5001"))
            if seconds is None:
                self.assertIsNone(left)
            else:
                self.assertTrue(seconds <= left <= seconds + 31, (left, seconds))

    def test_listed_behind_a_router_it_is_no_newcomer(self):
        """It is listed by its public address already when it announces itself from its own."""
        inside = "192.168.1.5"
        self.registry.rules.address_map[inside] = self.here[0]
        self.ask(self.here[0])
        self.run_game([0])
        self.ask(inside)
        self.assertEqual(len(self.poller.newcomers), 1)
        self.run_game([1])
        self.assertEqual((len(self.listed()), len(self.poller.newcomers)), (1, 0))

    def test_a_server_that_may_not_be_listed_is_not_polled(self):
        rules = self.registry.rules
        network = ms.read_network("203.0.113.9")
        rules.bans = ms.Networks([network], {network: "fakes"})
        self.assertRaisesRegex(ms.Refused, "fakes", self.ask, self.here[0])
        self.assertRaisesRegex(ms.Refused, "port 0", self.ask, "203.0.113.8", port=0)
        rules.max_servers = 0
        self.assertRaisesRegex(ms.Refused, "at most 0 servers", self.ask, "203.0.113.8")
        self.assertEqual((self.targets(), len(self.poller.newcomers)), (set(), 0))

    def test_a_server_that_the_ini_no_longer_names_leaves_at_a_restart(self):
        for number, pinned in (1, True), (2, True), (3, False):
            address = "203.0.113.%d" % number
            server = ms.Server("test", address, 5000, address, 0.0, math.inf)
            server.pinned = pinned
            self.registry.insert(server)
            self.game.resume(server)
        self.name(("a.example", 5000))
        self.game.tick(0.0)
        self.assertEqual(len(self.listed()), 3)             # until it is known where that leads
        self.lookups[0][1]("203.0.113.2", 1.0)
        self.game.tick(1.0)
        self.assertEqual([address for address, _, _ in self.listed()],
                         ["203.0.113.2", "203.0.113.3"])


# --- Iceball -------------------------------------------------------------------------------------

# A capture of the dedicated server of Iceball 0.2.1-37, game port 21737, 0 of 64 players
# (PROTOCOLS, section 1)
CAPTURED = hexa("31434542 0200 25808000 e954 0000 4000"
                "4963656261 6c6c20536572766572" + "00" * 16 +
                "63746600000000000000" +
                "636c6173736963283531322c35313229" + "00" * 14)


def announcement(port=20737, players=0, maximum=64, name=b"S", mode=b"ctf", map=b"m",
                 hbversion=2, version=8421413):
    """By the document's layout."""
    numbers = struct.pack("<HIHHH", hbversion, version, port, players, maximum)
    texts = name.ljust(30, b"\0") + mode.ljust(10, b"\0") + map.ljust(30, b"\0")
    return b"1CEB" + numbers + texts


def encoded_twice(text):
    """As the dedicated server does: its JSON reader takes each byte of its ini for a character."""
    return text.encode().decode("latin-1").encode()


class IceballCase(unittest.TestCase):
    peer = ("203.0.113.9", 40000)

    def setUp(self):
        self.start()

    def start(self, **settings):
        self.program = make_core(**settings)
        self.registry, self.rules = self.program.registry, self.program.registry.rules
        self.iceball = ms.Iceball(self.program)

    def send(self, data, now=0.0, peer=peer):
        """Its answer; b"" for none."""
        replies = deliver(self.iceball, data, peer, now)
        self.assertEqual([to for _, to in replies], [peer] * len(replies))
        return b"".join(reply for reply, _ in replies)

    def is_repeat(self, data, peer=peer):
        return hash((data, peer[0])) in self.registry.by_fingerprint

    def shake(self, data, now=0.0, peer=peer):
        """A server that announces itself and answers."""
        msok = self.send(data, now, peer)
        self.assertEqual(msok[:4], b"MSOK")
        self.assertEqual(self.send(b"HSHK" + msok[4:], now, peer), b"")
        port = data[10] | data[11] << 8
        server, = [server for server in self.registry.servers() if server.port == port]
        return server

    def outcome(self, port=0, source="203.0.113.9"):
        """What /check says of it."""
        return ": ".join(self.registry.outcome(source, "iceball", port)[1:])

    def places(self):
        return [(server.address, server.port) for server in self.registry.servers()]


class IceballTest(IceballCase):
    def test_the_capture_gets_listed_by_its_handshake(self):
        msok = self.send(CAPTURED)
        self.assertEqual((msok[:4], len(msok) <= 86), (b"MSOK", True))
        self.assertEqual((self.places(), self.outcome(21737)), ([], "announced: "))
        self.assertEqual(self.send(b"HSHK" + msok[4:], 0.005), b"")
        server, = self.registry.servers()
        self.assertEqual((server.last_seen, self.outcome(21737)), (0.005, "listed: "))

    def test_versions_as_text(self):
        for number, text in (
                (8421413, "0.2.1-37"), (1 << 27 | 3 << 22, "1.3"), (2 << 22 | 1 << 10, "0.2a"),
                (2 << 22 | 1 << 15 | 30 << 10 | 5, "0.2.1~-5"), (2 << 22 | 7, "0.2-7")):
            self.assertEqual(ms.iceball_version_text(number), text)
            self.assertEqual(ms.read_iceball_version(text), number)
        self.assertEqual(ms.iceball_version_text(31 << 10), "0.0")

    def test_names_as_their_owners_wrote_them(self):
        for sent, name in (
                (hexa("c383 c29c 6e c383 c2af"), "Ünï"),                        # captured
                (encoded_twice("漢字 Ü x"), "漢字 Ü x"),
                (encoded_twice("x" * 27 + "Ü")[:30], "x" * 27),                 # cut in its middle
                (encoded_twice("x" * 29 + "Ü")[:30], "x" * 29),
                (encoded_twice("x漢漢漢漢漢")[:30], "x漢漢漢漢"),
                (hexa("c383 c29c 6e c383"), "Ün"),
                ("VilÃ".encode(), "VilÃ"), ("Größe".encode(), "Größe"),
                ("é 漢字".encode(), "é 漢字"),
                (("x" * 28 + "漢").encode()[:30], "x" * 28), (b"\xff\xfe<b>", "\ufffd\ufffd<b>"),
                (b"n" * 30, "n" * 30), (b"ab\0garbage", "ab")):
            server = self.shake(announcement(name=sent, map=sent))
            self.assertEqual((server.name, server.map), (name, name), sent)

    def test_fields_at_their_limits(self):
        server = self.shake(announcement(name=b"N" * 30, mode=b"M" * 10, map=b"P" * 30))
        self.assertEqual((server.name, server.mode, server.map), ("N" * 30, "M" * 10, "P" * 30))
        server = self.shake(announcement(players=65535, maximum=64))
        self.assertEqual((server.players, server.max_players), (64, 64))
        self.send(b"HSHK" + self.send(announcement(port=0))[4:])
        self.assertEqual(self.outcome(), "bad packet: port 0 cannot be listed")

    def test_a_game_server_s_socket_announces_one_game_port(self):
        """It echoes any MSOK, also one for an announcement that was forged in its name."""
        def fakes(now, peer):
            for port in range(1, 41):
                forged = announcement(port, name=b"Fake")
                self.send(b"HSHK" + self.send(forged, now, peer)[4:], now, peer)

        server = self.shake(CAPTURED)
        fakes(1.0, self.peer)
        self.assertEqual(self.places(), [("203.0.113.9", 21737)])
        self.assertEqual(self.outcome(1), "owner: the UDP port that it came from announces another "
                                          "game port")
        self.iceball.tick(1e6)                              # it was started again, …
        self.shake(CAPTURED, 2.0, ("203.0.113.9", 40001))   # … and has proven itself since
        fakes(3.0, ("203.0.113.9", 40001))
        self.assertEqual(self.places(), [("203.0.113.9", 21737)])
        self.shake(announcement(5), 4.0)                    # the former port is free again
        # A server that is listed is not turned away, though a fake one sends from its port
        again = "203.0.113.9", 40001
        self.registry.get("iceball", "203.0.113.9", 5).source_port = 40001
        self.iceball.senders[again] = self.registry.get("iceball", "203.0.113.9", 5)
        self.shake(announcement(21737, players=3), 4.5, again)
        self.assertEqual((server.players, self.iceball.senders[again]), (3, server))
        for listed in self.registry.servers():
            self.registry.remove_own(listed)
        with mock.patch.object(ms, "ICEBALL_SENDERS_LEFT", 0):
            self.iceball.tick(1e7)
        self.assertEqual((self.iceball.senders, self.registry.total), ({}, 0))
        self.rules.exempt = ms.Networks([ms.read_network("203.0.113.0/24")])
        self.rules.datagram_limiter.table.clear()
        fakes(5.0, self.peer)
        self.assertEqual(self.registry.total, 40)

    def test_nothing_unproven_changes_a_listed_server(self):
        server = self.shake(CAPTURED)
        before = [getattr(server, name) for name in ms.Server.__slots__]
        generation = self.registry.generation
        for at in [*range(6, 10), *range(12, 86)]:              # all but the port
            forged = CAPTURED[:at] + bytes([CAPTURED[at] ^ 1]) + CAPTURED[at + 1:]
            self.assertEqual(self.send(forged, 1.0)[:4], b"MSOK")
        self.send(CAPTURED, 1.0, ("203.0.113.90", 40000))
        self.assertEqual([getattr(server, name) for name in ms.Server.__slots__], before)
        self.assertEqual((self.registry.generation, self.outcome(21737)), (generation, "listed: "))

    def test_a_change_counts_with_its_handshake(self):
        server = self.shake(announcement(players=1))
        changed = announcement(players=2, name=b"T")
        msok = self.send(changed, 1.0, ("203.0.113.9", 50123))
        self.assertEqual(server.players, 1)
        self.send(b"HSHK" + msok[4:], 1.0)
        self.assertEqual((server.players, server.name, server.last_seen), (2, "T", 1.0))
        self.assertEqual((len(self.places()), len(self.iceball.registry.by_fingerprint)), (1, 1))

    def test_repetitions_and_changes(self):
        other, away = announcement(), ("203.0.113.9", 50000)
        captured, server = self.shake(CAPTURED, 0.0, ("203.0.113.9", 1)), self.shake(other)
        for data, peer in ((other[:-1], self.peer), (other + b"\0", self.peer),
                           (other, ("203.0.113.90", 40000))):
            self.assertFalse(self.is_repeat(data, peer))
        self.assertTrue(self.is_repeat(other, away), "it was started again")
        for data, peer in (other, self.peer), (CAPTURED, ("203.0.113.9", 1)), (other, self.peer):
            self.assertEqual(self.send(data, 3.0, peer), b"MSOKsame")
        self.assertEqual(self.send(b"HSHKsame", 4.0), b"")
        self.assertEqual((captured.last_seen, server.last_seen), (3.0, 3.0))
        self.shake(announcement(players=1), 5.0)
        self.assertEqual([self.is_repeat(other), self.is_repeat(announcement(players=1))],
                         [False, True])
        self.registry.remove_own(server)
        self.assertFalse(self.is_repeat(announcement(players=1)))

    def test_gone_after_120_s_and_not_before(self):
        self.shake(CAPTURED, 10.0)
        for now in 11.0, 12.0, 50.0:
            self.assertEqual(self.send(CAPTURED, now), b"MSOKsame")
        for now, listed in (169.9, 1), (170.0, 0):
            self.registry.expire(now)
            self.assertEqual(len(self.places()), listed)
        self.assertFalse(self.is_repeat(CAPTURED))

    def test_without_handshakes_forged_announcements_keep_no_server(self):
        for answers in True, False:
            self.start()
            self.iceball.tick(0.0)
            self.shake(CAPTURED)
            left = math.inf
            for now in map(float, range(1, 1000)):
                if now % 40 < 5 and self.places():
                    msok = self.send(CAPTURED, now)
                    if answers:
                        self.send(b"HSHK" + msok[4:], now)
                self.iceball.tick(now)
                self.registry.expire(now)
                left = left if self.places() else min(left, now)
            self.assertEqual(240 < left <= 360, not answers, left)

    def test_unproven_packets_list_nothing(self):
        msok = self.send(CAPTURED, 29.0)
        good = b"HSHK" + msok[4:]
        forged = [good[:at] + bytes([good[at] ^ 1]) + good[at + 1:] for at in range(4, len(good))]
        for data in forged + [good[:-1], good + b"\0", good[:13], b"HSHK", b"HSHKsame!"]:
            self.assertRaises(ms.Malformed, self.send, data, 29.0)
        for source in "203.0.113.10", "203.0.113.90", "03.0.113.9":
            self.assertRaises(ms.Malformed, self.send, good, 29.0, (source, 40000))
        self.assertEqual(self.places(), [])
        self.send(good, 59.9)
        self.assertEqual(len(self.places()), 1)
        self.assertRaises(ms.Malformed, self.send, good, 60.0)              # older than two windows

    def test_a_cookie_is_none_for_an_address_with_a_digit_more(self):
        msok = self.send(announcement(version=ord("0")))
        stolen = b"HSHK" + msok[4:12] + msok[13:]               # the version's "0" to the address
        self.assertRaises(ms.Malformed, self.send, stolen, 0.0, ("203.0.113.90", 40000))

    def test_how_long_msok_is(self):
        for map_bytes, size in (0, 62), (24, 86), (30, 92):
            data = announcement(name=b"N" * 30, mode=b"M" * 10, map=b"P" * map_bytes)
            self.assertLessEqual(len(self.send(data)), size)
        self.rules.surplus_limiter.set_rate((0.01, 1))          # a flood has had the few bytes more
        self.assertEqual(len(self.send(data)), 86)
        self.assertEqual((self.shake(data).map, self.is_repeat(data)), ("P" * 24, False))
        self.rules.surplus_limiter.set_rate((6, 10))
        self.assertEqual((self.shake(data).map, self.is_repeat(data)), ("P" * 30, True))

    def test_accepted_versions(self):
        for accepted, version, good in (
                ("", "0.1", True), ("0.2.1", "0.2.1-37", True), ("0.2.1", "0.2.1a-1", False),
                ("0.2.1, 0.3-5", "0.3-5", True), ("0.3-5", "0.3-50", False)):
            self.start(iceball__accept_versions=accepted)
            answer = self.send(announcement(version=ms.read_iceball_version(version)))
            expected = b"MSOK" if good else b"BADV"
            self.assertEqual(answer[:4], expected, (accepted, version))

    def test_rejections(self):
        badv, old = hexa("42414456 0200 25808000"), announcement(version=7)
        for sent, answer, outcome in (
                (announcement(hbversion=3)[:10], badv, "version: heartbeat version 3 instead of 2"),
                (announcement(hbversion=258), badv, "version: heartbeat version 258 instead of 2"),
                (old, badv, "version: Iceball version 0.0-7; accepted: 0.2.1"),
                (old[:50], badv, "version: Iceball version 0.0-7; accepted: 0.2.1"),
                (CAPTURED[:-1], b"BADF", "bad packet: length: 85 bytes instead of 86"),
                (CAPTURED + b"\0", b"BADF", "bad packet: length: 87 bytes instead of 86")):
            self.start(iceball__accept_versions="0.2.1")
            self.assertEqual((self.send(sent), self.outcome()), (answer, outcome))
        self.start(iceball__version="0.3")
        self.assertEqual(self.send(old[:50])[:4] + self.send(announcement(hbversion=1)),
                         b"BADF" + hexa("42414456 0200 0000c000"))

    def test_no_rejection_to_a_flood_or_for_whom_a_server_is_listed(self):
        """A deployed server that gets one stops announcing to every master."""
        bad = announcement(hbversion=7), CAPTURED[:50]
        for source, listed, told in (("127.0.0.1", True, 20), ("203.0.113.77", True, 0),
                                     ("203.0.113.77", False, 5)):
            self.start(limits__exempt="127.0.0.0/8, 203.0.113.0/24")
            if listed:
                self.shake(CAPTURED, 0.0, (source, 1))
            answers = [self.send(bad[number % 2], 0.0, (source, number)) for number in range(20)]
            self.assertEqual(sum(map(bool, answers)), told, (source, listed))
            self.assertRegex(self.outcome(0, source), "version 7 instead of 2|length")

    def test_malformed_packets_are_explained_at_check(self):
        for data, why in (
                (b"1CEB", "length: 4 bytes instead of 10"),
                (CAPTURED[:9], "length: 9 bytes instead of 10"),
                (b"HSHK" + bytes(80), "a cookie that went to another address, or is older than"),
                (b"", "neither 1CEB nor HSHK nor a packet of the first draft"),
                (b"\x08\xff", "neither 1CEB nor HSHK nor a packet of the first draft")):
            self.start()
            self.assertRaisesRegex(ms.Malformed, why, self.send, data)
            self.assertIn("bad packet: " + why, self.outcome())

    def test_a_reload_is_heeded_by_servers_that_are_listed(self):
        self.shake(CAPTURED)
        reload(self.program, self.iceball, iceball__accept_versions="0.3")
        self.assertEqual((self.send(CAPTURED), self.outcome()[:7]), (b"", "version"))
        reload(self.program, self.iceball, **{"address_map.203.0.113.9": "198.51.100.7"})
        self.shake(CAPTURED)
        self.assertEqual(self.places(), [("198.51.100.7", 21737)])

    def test_two_sources_of_one_listed_address(self):
        self.rules.address_map = {"192.168.1.5": "203.0.113.9"}
        server = self.shake(announcement(name=b"Mine"), 0.0, ("192.168.1.5", 1))
        self.send(announcement(name=b"Evil"), 1.0)
        self.assertEqual((server.name, server.source), ("Mine", "192.168.1.5"))
        self.assertEqual(self.places(), [("203.0.113.9", 20737)])
        self.shake(announcement(name=b"Moved"), 2.0)
        self.assertEqual((server.name, server.source), ("Moved", "203.0.113.9"))

    @mock.patch.object(ms, "DRAFT_REQUESTS", 1024)
    @mock.patch.object(ms, "OUTCOMES_KEPT", 4096)
    def test_a_flood_of_strangers_leaves_nothing_behind(self):
        self.start()
        counted = getattr(sys, "getallocatedblocks", int)           # PyPy cannot count
        blocks = []
        for number in range(12000):             # after half of them every bounded table is full
            if number % 6000 == 5999:
                blocks.append(counted())
            peer = "61.%d.%d.9" % (number >> 8, number & 255), 1
            deliver(self.iceball, announcement(1 + number), peer, number / 100)
            deliver(self.iceball, hexa("01 0100 0151 00"), peer, number / 100)
        self.assertLess(blocks[1] - blocks[0], 1000, "one in six leaves an object")


class IceballDraftTest(IceballCase):
    """The document's layouts; no released program speaks it."""

    def request(self, now=0.0, peer=IceballCase.peer, claim=b""):
        reply = self.send(hexa("01 0100 0151") + claim + b"\0", now, peer)
        self.assertEqual((reply[:1], reply[5:7]), (b"\2", hexa("0151")))
        return reply[1:5]

    def open(self, now=0.0, peer=IceballCase.peer, claim=b""):
        identity = self.request(now, peer, claim)
        self.assertEqual(self.send(b"\5" + identity, now, peer), b"")
        return identity

    def test_a_session(self):
        reply = self.send(hexa("01 0100 0151 00"))
        self.assertEqual(reply[:1] + reply[5:], hexa("02 0151") + b"203.0.113.9\0")
        self.assertEqual((self.places(), self.send(b"\5" + reply[1:5])), ([], b""))
        server, = self.registry.servers()
        self.assertEqual((server.key, server.name, server.verified),
                         (("iceball", "203.0.113.9", 20737), "203.0.113.9:20737", "handshake"))
        self.assertEqual(self.outcome(20737), "listed: ")
        for kind, field, stored, name, value in (
                (b"\3", b"\1My server\0", b"\1My server\0", "name", "My server"),
                (b"\3", b"\1a\x01b\0", b"\1ab\0", "name", "ab"),
                (b"\3", b"\2ctf\0", b"\2ctf\0", "mode", "ctf"),
                (b"\4", hexa("02 ffffffff"), hexa("02 00000000"), "max_players", 0),
                (b"\4", hexa("02 10000000"), hexa("02 10000000"), "max_players", 16),
                (b"\4", hexa("01 63000000"), hexa("01 10000000"), "players", 16)):
            head = kind + reply[1:5]
            self.assertEqual(self.send(head + field), head + stored)
            self.assertEqual(getattr(server, name), value)
        for unknown in b"\3" + reply[1:5] + b"\7x\0", b"\4" + reply[1:5] + hexa("09 01000000"):
            self.assertEqual(self.send(unknown), b"")

    def test_without_the_id_nothing(self):
        identity = self.open()
        forged = bytes([identity[0] ^ 1]) + identity[1:]
        for data, peer in ((b"\3" + forged + b"\1Evil\0", self.peer), (b"\5", self.peer),
                           (b"\3" + identity + b"\1Evil\0", ("203.0.113.10", 40000)),
                           (b"\3" + identity + b"\1Evil\0", ("203.0.113.9", 40001))):
            self.assertEqual(self.send(data, 1.0, peer), b"\6")
        server, = self.registry.servers()
        self.assertEqual((server.name, server.last_seen), ("203.0.113.9:20737", 0.0))

    def test_silence_ends_the_session(self):
        identity = self.open()
        self.send(b"\5" + identity, 119.0)
        self.assertEqual(self.send(b"\5" + identity, 149.0), b"")
        for now, listed in (268.9, 1), (269.0, 0):
            self.registry.expire(now)
            self.assertEqual(len(self.places()), listed)
        self.assertEqual(self.send(b"\5" + identity, 270.0), b"\6")

    def test_a_new_id_replaces_the_old(self):
        first, away = self.open(), ("203.0.113.9", 40001)
        self.open(31.0)
        self.assertEqual(self.send(b"\5" + first, 31.0), b"\6")
        self.open(32.0, away)                               # the same server from another port
        self.shake(announcement(20737), 33.0)               # and in the current form
        self.assertEqual(len(self.places()), 1)

    def test_a_flood_of_forged_requests_ends_no_session(self):
        with mock.patch.object(ms, "DRAFT_REQUESTS", 10):
            self.start()
            identity = self.open()
            self.request(1.0)                               # in the game server's own name
            for number in range(100):
                self.request(1.0, ("198.51.100.%d" % number, 1))
        self.assertEqual(len(self.iceball.draft.requests), 10)
        self.assertEqual(self.send(b"\5" + identity, 2.0), b"")
        self.assertEqual(self.registry.servers()[0].last_seen, 2.0)

    def test_sessions_end_with_their_servers(self):
        self.open()
        self.registry.expire(120.0)
        self.iceball.tick(121.0)
        self.assertEqual(self.iceball.draft.sessions, {})

    def test_a_server_has_one_session(self):
        identities = [self.open(number / 10, ("203.0.113.9", 40000 + number))
                      for number in range(50)]
        self.iceball.tick(5.0)
        last = "203.0.113.9", 40049
        self.assertEqual((len(self.places()), list(self.iceball.draft.sessions)), (1, [last]))
        self.assertEqual(self.send(b"\5" + identities[0], 5.0), b"\6")
        self.assertEqual(self.send(b"\5" + identities[-1], 5.0, last), b"")
        self.open(6.0)                                      # before the next second
        self.assertEqual(self.send(b"\5" + identities[-1], 6.0, last), b"\6")

    def test_a_flood_in_its_name_does_not_remove_it(self):
        """While the limit drops what comes from its address, what it repeats is recognized."""
        identity = self.open()
        self.assertTrue(self.is_repeat(b"\5" + identity))
        for now in range(1, 1000, 60):
            self.assertEqual(self.send(b"\5" + identity, float(now)), b"")
            self.registry.expire(now + 59.0)
            self.assertEqual(len(self.places()), 1)

    def test_a_flood_of_requests_gets_no_more_than_its_share(self):
        self.rules.surplus_limiter.set_rate((0.01, 1))
        self.assertEqual(self.send(hexa("01 0100 0151 00")), b"")
        self.request(0.0, self.peer, b"a claimed address")          # not longer than the request

    def test_refused(self):
        self.start(server__refuse_names="casino", limits__servers="1")
        identity = self.open()
        name, mode = b"\3" + identity + b"\1Casino\0", b"\3" + identity + b"\2casino\0"
        self.assertEqual((self.send(name), self.send(mode)), (b"", mode))
        self.assertEqual(self.registry.servers()[0].name, "203.0.113.9:20737")
        other = "203.0.113.10", 40000
        self.assertEqual(self.send(b"\5" + self.request(0.0, other), 0.0, other), b"")
        self.assertRegex(self.outcome(20737, other[0]), "^limit")

    def test_claimed_address(self):
        for source, claim, listed in (
                ("203.0.113.9", b"198.51.100.1", "203.0.113.9"),
                ("192.168.1.5", b"198.51.100.1", "198.51.100.1"),
                ("192.168.1.6", b"nonsense", "192.168.1.6")):
            self.start()
            reply = self.send(hexa("01 0100 0151") + claim + b"\0", 0.0, (source, 1))
            self.open(0.0, (source, 40000), claim)
            self.assertEqual(reply[7:], listed.encode() + b"\0")
            self.assertEqual(self.places(), [(listed, 20737)])

    def test_bad_packets(self):
        self.assertEqual(self.send(hexa("01 0200 0151 00")), hexa("07 0100"))
        identity = self.open()
        for bad in (b"\1", b"\1\1", hexa("01 0100 0151"), hexa("01 0100 0151 41"),
                    hexa("01 0100 0151 0000"), b"\2" + identity + b"\1\0\0\0\0", b"\6", b"\7\1\0",
                    b"\3" + identity, b"\3" + identity + b"\1", b"\3" + identity + b"\1a",
                    b"\3" + identity + b"\1a\0b\0", b"\4" + identity + b"\1\0\0\0",
                    b"\4" + identity + b"\1\0\0\0\0\0"):
            self.assertRaises(ms.Malformed, self.send, bad)


# --- Hyperbol ------------------------------------------------------------------------------------

# The reply's fields at the offsets of the document's table: offset, size, value
HYPERBOL_REPLY = (
    (0, 1, b"\x1b"),
    (1, 4, b"\x44\x33\x22\x11"),
    (5, 32, b"Fun & Games"),
    (37, 32, b"Capture the Core"),
    (69, 1, b"\x05"),
    (70, 1, b"\x10"),
    (71, 1, b"\xee"),
    (72, 64, b"orbital"),
    (136, 20, b"10.0.0.7"),
    (156, 1, b"\xee"),
    (157, 4, b"\xf0\x6c\x00\x00"),
    (161, 4, b"\x0d\x00\x00\x80"),
    (165, 4, b"\x0a\x00\x00\x07"),
    (169, 16, b"1.8a"),
    (185, 37, b"\xee" * 37),
    (222, 3, b"\x03\x01\x02"),
    (225, 1, b"\x09"),
    (226, 3, b"\xee" * 3),
)


HBSL = b"HBSL" + hexa("efbeadde 07000000")          # key, and the players on all servers


def hyperbol_reply(**changed):
    """229 bytes by the table of offsets; o5=b"name" puts another value at offset 5."""
    reply = b"".join(changed.get("o%d" % offset, value).ljust(size, b"\0")
                     for offset, size, value in HYPERBOL_REPLY)
    assert len(reply) == 229
    return reply


class HyperbolTest(unittest.TestCase):
    here = "203.0.113.9", 27888

    def start(self, servers="", **settings):
        self.program = make_core(hyperbol__servers=servers, **settings)
        self.registry, self.poller = self.program.registry, self.program.poller
        self.hyperbol = ms.Hyperbol(self.program)
        # Game servers that answer, with what they change in the reply
        self.answers = {}
        self.now = 0.0

    def pass_time(self, seconds):
        for _ in range(seconds):
            self.now += 1.0
            self.hyperbol.tick(self.now)
            for query, peer in self.poller.tick(self.now):
                self.assertEqual((len(query), query[0]), (5, 2))
                if peer in self.answers:
                    reply = hyperbol_reply(o1=query[1:], **self.answers[peer])
                    self.poller.datagram(reply, peer, self.now + 0.04)

    def announce(self, *places):
        for source, port in places:
            fields = {"name": "No", "private": {"flavor": 9}}
            self.hyperbol.announced(source, port, fields, self.now)

    def greeted(self):
        session = self.hyperbol.session("203.0.113.50", self.now)
        return session, session.opened(self.now)

    def get_list(self, filter="ff000000", size=8):
        session, greeting = self.greeted()
        answer = feed(session, greeting[4:8] + hexa(filter), size, self.now)
        self.assertTrue(session.done)
        return answer

    def players(self):
        return int.from_bytes(self.greeted()[1][8:], "little")

    def listed(self, *names):
        """These attributes of each server, by address and port."""
        servers = sorted(self.registry.servers("hyperbol"), key=lambda s: (s.address, s.port))
        return [tuple(server.private["flavor"] if name == "flavor" else getattr(server, name)
                      for name in names) for server in servers]

    def outcome(self, source="203.0.113.9", port=27888):
        return self.registry.outcome(source, "hyperbol", port).outcome

    def read(self, data, timestamp=0x11223344):
        target = SimpleNamespace(nonce=timestamp, address="203.0.113.9", port=27888)
        return ms.Hyperbol().read_answer(target, data)

    def test_reply_by_the_table_of_offsets(self):
        self.assertEqual(self.read(hyperbol_reply()), {
            "name": "Fun & Games", "mode": "Capture the Core", "map": "orbital",
            "version": "1.8a", "players": 5, "max_players": 16,
            "details": {"skill": "9", "flags": "0x8000000d",
                        "factions": "IMF 3, Syndicate 1, Republic 2"}})
        for offset, sent, name, value in (
                (5, b"n" * 32, "name", "n" * 32), (37, b"g" * 32, "mode", "g" * 32),
                (72, b"m" * 64, "map", "m" * 64), (169, b"v" * 16, "version", "v" * 16),
                (5, b"left\0right", "name", "left"), (5, b"caf\xe9", "name", "café"),
                (69, b"\xff", "players", 255)):
            reply = hyperbol_reply(**{"o%d" % offset: sent})
            self.assertEqual(self.read(reply)[name], value)
        for none in (b"", hyperbol_reply()[:228], hyperbol_reply(o0=b"\x1a"),
                     hyperbol_reply(o1=b"\x44\x33\x22\x10")):
            self.assertRaises(ms.Malformed, self.read, none)

    def test_list_as_the_document_lays_it_out(self):
        self.start("203.0.113.9:27888 3\n203.0.113.10:1 0\n203.0.113.11:1 5\n[2001:db8::1]:1 5",
                   limits__servers="1")         # of which the ini is free
        self.answers = {self.here: {}, ("203.0.113.10", 1): {"o69": b"\x04"},
                        ("2001:db8::1", 1): {"o69": b"\x04"}}
        self.pass_time(30)                      # 203.0.113.11 is silent
        official, other = hexa("cb007109 f06c0000 03 000000"), hexa("cb00710a 01000000 00 000000")
        for size in 1, 3, 8:
            for filter, answer in (("00000000", official), ("ef000000", official),
                                   ("10000000", official + other), ("ff000000", official + other)):
                self.assertEqual(self.get_list(filter, size), answer, filter)
        self.assertEqual(self.players(), 13)

    def test_the_list_of_another_master(self):
        greeting = b"HBSL" + hexa("04030201 02010000")
        entries = hexa("cb007109 f06c0000 03 000000 0a000001 ffff0000 00 eeeeee cb0071")
        steps, servers = converse(ms.Hyperbol().fetch(), greeting[:5], greeting[5:], entries[:7],
                                  entries[7:], b"")
        self.assertEqual([step.data for step in steps if step.data], [hexa("04030201 ff000000")])
        self.assertEqual([tuple(server.values()) for server in servers],
                         [("203.0.113.9", 27888, 3), ("10.0.0.1", 65535, 0)])
        for none in (b"HBSL" + bytes(7), b""), (b"HBSM" + bytes(8),):
            self.assertRaises(ms.Malformed, converse, ms.Hyperbol().fetch(), *none)

    def test_sessions_end(self):
        self.start("203.0.113.9:27888 1", limits__requests="1/2")
        self.answers = {self.here: {}}
        self.pass_time(2)
        session, greeting = self.greeted()
        self.assertEqual((len(greeting), greeting[:4]), (12, b"HBSL"))
        wrong = bytes([greeting[4] ^ 1]) + greeting[5:8] + hexa("ff000000")
        self.assertRaises(ms.Malformed, session.receive, wrong, self.now)
        slow, greeting = self.greeted()
        slow.receive(greeting[4:8], self.now)
        for seconds, done in (4.9, False), (5.0, True):
            self.assertEqual((slow.tick(self.now + seconds), slow.done), (b"", done))
        self.assertEqual(slow.receive(hexa("ff000000"), self.now), b"")
        self.assertEqual(len({self.greeted()[1][4:8] for _ in range(20)}), 20)
        self.assertEqual([len(self.get_list()) for _ in range(2)], [12, 12])
        self.assertRaisesRegex(ms.Malformed, "too many requests", self.get_list)

    def test_a_server_without_a_name(self):
        self.start()
        self.announce(self.here)
        self.answers[self.here] = {"o5": b"", "o69": b"\0"}
        self.pass_time(2)
        self.assertEqual((self.listed("name", "flavor", "ping_ms"), self.players()),
                         ([("203.0.113.9:27888", 0, 40)], 0))

    def test_an_announcement_begins_a_new_poll(self):
        """Of one that has not answered yet, of a listed one between two polls, and of one whose
        first query is lost."""
        self.start(poll__interval="3600")
        self.announce(self.here)
        for answers in False, False, True, True:
            self.answers = {self.here: {}} if answers else {}
            self.announce(self.here)
            self.now += 1.0
            (query, peer), = self.poller.tick(self.now)
            if answers:
                self.poller.datagram(hyperbol_reply(o1=query[1:]), peer, self.now + 0.04)
            self.assertEqual(len(self.listed()), answers)
            target, = self.poller.targets.values()
            self.assertEqual((target.unanswered, target.missed), (0, 0))

    def test_flavor_comes_from_the_ini_alone(self):
        self.start("203.0.113.9:27888 7", poll__interval="3600")
        self.announce(self.here, ("203.0.113.8", 27888))
        self.answers = {self.here: {}, ("203.0.113.8", 27888): {}}
        self.pass_time(3600)
        self.assertEqual(self.listed("address", "flavor"), [("203.0.113.8", 0), ("203.0.113.9", 7)])
        self.hyperbol.read(ms.Settings({"hyperbol.servers": "203.0.113.8:27888 4"}))
        self.pass_time(1)
        self.assertEqual(self.listed("address", "flavor"), [("203.0.113.8", 4)])

    def test_flavor_follows_the_ini_to_an_address(self):
        for ini, source, listed in (
                ("a.example:27888 4", "203.0.113.9", "203.0.113.9"),
                ("203.0.113.9:27888 4", "203.0.113.9", "203.0.113.9"),
                ("[2001:DB8:0:0:0:0:0:1]:27888 4", "2001:db8::1", "2001:db8::1"),
                ("[::ffff:203.0.113.9]:27888 4", "203.0.113.9", "203.0.113.9"),
                ("192.168.1.5:27888 4", "192.168.1.5", "203.0.113.7")):
            with self.subTest(ini):
                self.start(ini)
                self.program.resolve = lambda host, done, source: done("203.0.113.9", self.now)
                self.registry.rules.address_map = {"192.168.1.5": "203.0.113.7"}
                self.pass_time(10)
                self.assertEqual(self.listed("responding", "flavor"), [(False, 4)])
                self.answers = {(source, 27888): {}}
                self.pass_time(31)
                self.assertEqual(self.listed("address", "responding", "flavor"),
                                 [(listed, True, 4)])

    def test_named_by_its_public_address_and_announced_from_behind_the_router(self):
        """At the public address nobody answers, as routers seldom lead back; or the server does."""
        inside, outside = ("192.168.1.5", 27888), ("203.0.113.7", 27888)
        for answers in False, True:
            self.start("203.0.113.7:27888 4")
            self.registry.rules.address_map = {"192.168.1.5": "203.0.113.7"}
            self.answers = {inside: {}, **({outside: {}} if answers else {})}
            self.announce(inside)
            self.pass_time(40)
            for _ in range(200):
                self.pass_time(1)
                self.assertEqual(self.listed("responding", "flavor"), [(True, 4)])
            del self.answers[inside]
            self.pass_time(300)
            self.assertEqual(self.listed("responding"), [(answers,)])
            self.assertEqual(list(self.poller.targets), [("hyperbol", *outside)])

    def test_refused(self):
        self.start(server__refuse_names="casino", **{"bans.198.51.100.0/24": "fake players"})
        here = "203.0.113.9", 1
        self.announce(here)
        for source, outcome, words in (
                ("198.51.100.7", "banned", "fake players"),
                ("2001:db8::1", "bad packet", "IPv4 addresses only; this came from 2001:db8::1")):
            with self.assertRaisesRegex(ms.Refused, words) as caught:
                self.announce((source, 27888))
            self.assertEqual(caught.exception.outcome, outcome)
        for changed, names in ({}, [("Fun & Games",)]), ({"o5": b"Casino"}, []):
            self.answers[here] = changed
            self.pass_time(31)
            self.assertEqual(self.listed("name"), names)
        self.assertEqual((self.outcome(port=1), self.poller.targets), ("name", {}))
        self.registry.rules.max_servers = 1
        self.answers["203.0.113.8", 1] = {}
        for _ in range(2):                      # who is listed counts no second time
            self.announce(("203.0.113.8", 1))
            self.pass_time(2)
        self.assertRaisesRegex(ms.Refused, "lists at most 1", self.announce, ("203.0.113.7", 1))


# --- SubSpace ------------------------------------------------------------------------------------

# Captures of a deployed asss 1.6.2 (PROTOCOLS, section 4)
ZONE_PACKET = (hexa("00000000 a861 0600 0100 86000000") + b"Loopback Test Zone".ljust(32, b"\0")
               + b"cane".ljust(48, b"\0") + b"a real asss on loopback\0")
PING_TIME, PING_NONCE = hexa("11223344"), 0x44332211
ARENA_BLOCKS = hexa("3000 0200 0100 706200 0100 0100 6475656c00 0100 0100 6475656c3200 "
                    "0100 0000 00")
PING_ANSWERS = (
    ("11223344", hexa("06000000 11223344")),
    ("11223344 00000000", hexa("11223344 00000000")),
    ("11223344 01000000", hexa("11223344 01000000 06000000 04000000")),
    ("11223344 02000000", hexa("11223344 02000000") + ARENA_BLOCKS),
    ("11223344 fcffffff", hexa("11223344 00000000")),
)
SHORT, SUMMARY, ARENAS = PING_ANSWERS[0][1], PING_ANSWERS[2][1], PING_ANSWERS[3][1]
BOTH = hexa("11223344 03000000 06000000 04000000") + ARENA_BLOCKS
ARENAS_TEXT = "(Public 0) 2/1, pb 1/1, duel 1/1, duel2 1/0"
ZONE = ("203.0.113.9", 25000)
NEIGHBOUR = "203.0.113.8"


def zone_packet(name=b"Loopback Test Zone", password=b"cane", port=25000,
                players=6, scores=1, version=134,
                description=b"a real asss on loopback\0"):
    return (b"\0\0\0\0" + struct.pack("<HHHI", port, players, scores, version)
            + name.ljust(32, b"\0") + password.ljust(48, b"\0") + description)


def asss(question):
    """How the captured asss answers, whatever the timestamp."""
    if len(question) == 4:
        return SHORT[:4] + question
    return question[:4] + {1: SUMMARY, 2: ARENAS, 3: BOTH}[question[4]][4:]


class SubSpaceWorld:
    """Both ports, the poller, and zones that answer: by address and ping port a function from a
    question to the answer."""

    def __init__(self, *answering, **settings):
        """`answering`: addresses of zones at ZONE's port."""
        self.program = make_core(**settings)
        self.registry, self.poller = self.program.registry, self.program.poller
        self.room = ms.SubSpace(self.program)
        self.list = ms.SubSpaceList(self.room)
        self.zones = {(address, 25001): asss for address in answering}
        self.asked = []
        self.now = 0.0

    def answer(self, questions, protocol=None):
        """Give these to the zones, and what they answer, 20 ms later, to the ping port."""
        now, questions = self.now, list(questions)
        while questions:
            question, place = questions.pop(0)
            self.asked.append((question, place))
            answer = self.zones.get(place, lambda question: None)(question)
            if answer is not None:
                now += 0.02
                questions += deliver(self.room, answer, place, now) if protocol is None else (
                    protocol.datagram(answer, place, now))

    def ping(self, data=ZONE_PACKET, source=ZONE[0], source_port=5000):
        """What the master sends for an announcement."""
        return deliver(self.room, data, (source, source_port), self.now)

    def announce(self, data=ZONE_PACKET, source=ZONE[0], source_port=5000):
        self.answer(self.ping(data, source, source_port))

    def by_http(self, source=ZONE[0], port=ZONE[1], **fields):
        self.room.announced(source, port, fields, self.now)

    def run(self, seconds):
        for _ in range(seconds):
            self.now += 1.0
            self.registry.expire(self.now)
            self.answer(self.room.tick(self.now))
            self.answer(self.poller.tick(self.now), self.poller)

    def restarted(self):
        """The master after a restart, with what was listed; the zones are the same."""
        world = SubSpaceWorld()
        world.zones = self.zones
        for server in self.registry.servers():
            row = ms.listed_row(server, 0.0)
            again = ms.restored_server(row, 0.0, self.now)
            world.registry.insert(again)
            world.room.resume(again)
        world.registry.silence_counts_from = 0.0
        return world

    def names(self):
        return sorted(server.name for server in self.registry.servers() if server.responding)

    def zone(self, source=ZONE[0], port=ZONE[1]):
        return self.registry.get("subspace", source, port)

    def outcome(self, source=ZONE[0], port=ZONE[1]):
        """The outcome of the last packet and its reason."""
        _, outcome, reason = self.registry.outcome(source, "subspace", port) or (0.0, None, "")
        return outcome, reason


class SubSpacePings(unittest.TestCase):
    """This master, as a zone's ping port would answer, and reading what zones answer."""

    def answers(self, counts, *questions):
        world = SubSpaceWorld()
        for number, (game, players, playing) in enumerate(counts):
            address = "198.51.100.%d" % number
            world.registry.list_or_refresh((game, address, 1000), address, 0.0, 100.0,
                                           {"players": players, "playing": playing})
        replies = []
        for question in questions:
            replies += world.room.datagram(hexa(question), PLAYER, 0.0)
        self.assertEqual({peer for _, peer in replies}, {PLAYER})
        return [answer for answer, _ in replies]

    def test_answers_of_the_master(self):
        # The capture has an arena that is not public, and games all are: two registries
        kept = [PING_ANSWERS[row] for row in (0, 2)]
        self.assertEqual(self.answers([("a", 5, 4), ("b", 1, 0)], *[row[0] for row in kept]),
                         [row[1] for row in kept])
        counts = [("duel", 1, 1), ("duel2", 1, 0), ("0", 1, 0), ("0", 1, 1)]
        arenas, both = self.answers(counts, "11223344 02000000", "11223344 03000000")
        blocks = hexa("3000 0200 0100 6475656c00 0100 0100 6475656c3200 0100 0000 00")
        self.assertEqual(arenas, hexa("11223344 02000000") + blocks)
        self.assertEqual(both, hexa("11223344 03000000 04000000 02000000") + blocks)
        for width in (20, 25, 26, 31):          # at most 512 bytes, cut at an arena
            names = [("game%02d" % number).ljust(width, "x") for number in range(40)]
            answer, = self.answers([(name, 70000, 1) for name in names], "11223344 03000000")
            fit = (512 - 17) // (width + 5)
            self.assertEqual(answer[16:], b"".join(
                name.encode() + hexa("00 ffff 0100") for name in names[:fit]) + b"\0")
        for nothing in "11223344 00000000", "11223344 fcffffff":
            self.assertRaises(ms.Malformed, self.answers, counts, nothing)

    def served(self, room, sources):
        """How many of a thousand pings in a second are answered; the others are limited."""
        answers = 0
        for number in range(1000):
            with contextlib.suppress(ms.Limited):
                answers += len(room.datagram(PING_TIME, (sources(number), 1), number / 1000))
        return answers

    def test_rates(self):
        """Requests by source, and what is longer from one account for all sources."""
        for source, number in ("192.0.2.1", range(59, 62)), ("127.0.0.1", range(1000, 1001)):
            self.assertIn(self.served(SubSpaceWorld().room, lambda number: source), number)
        room = SubSpaceWorld().room
        room.rules.surplus_limiter.set_rate((4, 40))
        self.assertIn(self.served(room, lambda number: "192.0.%d.%d" % divmod(number, 250)),
                      range(10, 12))
        # What a zone answers to our ping is no request: forged ones in its name spend nothing of it
        world = SubSpaceWorld(ZONE[0])
        self.served(world.room, lambda number: ZONE[0])
        world.now = 1.0
        world.announce()
        self.assertEqual(world.names(), ["Loopback Test Zone"])

    def poll(self, *steps):
        """Steps: the options that are asked for (0: the 4-byte form), and the answer."""
        room, target = ms.SubSpace(), SimpleNamespace(nonce=PING_NONCE, step=None)
        fields = None
        for options, answer in steps:
            asked = PING_TIME + (struct.pack("<I", options) if options else b"")
            self.assertEqual((room.question(target), fields), (asked, None))
            fields = room.read_answer(target, answer)
        return fields["players"], fields["playing"], fields["details"]["arenas"]

    def test_answers_of_zones(self):
        virtual = hexa("11223344 03000000 32000000 04000000") + ARENA_BLOCKS
        entered = hexa("11223344 03000000 08000000 04000000") + ARENA_BLOCKS
        rows = [
            ("the captures", [(3, BOTH)], 4, ARENAS_TEXT),
            ("too long a list", [(3, SUMMARY), (2, ARENAS)], 4, ARENAS_TEXT),
            ("no arenas: the option is left out", [(3, SUMMARY), (2, PING_ANSWERS[1][1])], 4, ""),
            ("one of several on a server", [(3, virtual)], None, ""),
            ("two came between the questions", [(3, entered)], 4, ARENAS_TEXT),
            ("a name of no text", [(3, BOTH[:16] + hexa("01000200 0000 00"))], 4, "? 2/0"),
            ("as long as any", [(3, BOTH[:16] + b"x\0\1\0\1\0" * 84)], 4,
             ", ".join(["x 1/1"] * 84))]
        for cut, count in ((1, 4), (2, 3), (4, 3), (11, 3), (12, 2), (30, 0)):
            rows.append(("cut off: %d" % cut, [(3, BOTH[:-cut])], 4,
                         ", ".join(ARENAS_TEXT.split(", ")[:count])))
        for case, steps, playing, arenas in rows:
            self.assertEqual(self.poll((0, SHORT), *steps), (6, playing, arenas), case)
        huge = hexa("ffffffff") + PING_TIME
        self.assertEqual(self.poll((0, huge), (3, BOTH))[0], 65535)

    def test_wrong_answers_to_the_second_question(self):
        room, target = ms.SubSpace(), SimpleNamespace(nonce=PING_NONCE, step=None)
        room.read_answer(target, SHORT)
        step = target.step
        for wrong in SHORT, b"", hexa("11223345") + BOTH[4:], PING_TIME, BOTH + bytes(480):
            self.assertRaises(ms.Malformed, read_answer, room, target, wrong)
            self.assertIs(target.step, step)

    def test_timestamps_ask_for_the_total(self):
        nonces = {ms.SubSpace().nonce() for _ in range(2000)}
        for nonce in nonces:
            self.assertTrue(0 <= nonce < 1 << 32 and nonce % 600 < 300 and nonce % 1000 < 500)
        self.assertGreater(len(nonces), 1990)           # which nobody guesses


class SubSpaceAnnouncements(unittest.TestCase):

    def test_other_zones_are_looked_at_when_it_has_answered(self):
        """An announcement that may be forged costs the same however many zones are listed."""
        world = SubSpaceWorld(ZONE[0])
        with mock.patch.object(world.room, "check_name", wraps=world.room.check_name) as check:
            for number in range(9):
                pings = world.ping(zone_packet(name=b"N%d" % number))
                self.assertEqual((len(pings), check.call_count), (1, 0))
            world.answer(pings)
            self.assertEqual((check.call_count, world.names()), (1, ["N8"]))

    def test_the_capture_is_listed_once_it_answers(self):
        self.assertEqual((len(ZONE_PACKET), zone_packet()), (118, ZONE_PACKET))
        world = SubSpaceWorld()
        world.announce()
        self.assertEqual(world.outcome(), ("silent", "no answer yet to a ping on UDP port 25001"))
        world.zones[ZONE[0], 25001] = asss
        world.announce()
        zone = world.zone()
        self.assertEqual((zone.players, zone.lifetime, zone.details), (6, 180.0, {"scores": "yes"}))
        world.run(31)
        self.assertEqual((zone.playing, zone.ping_ms, zone.details),
                         (4, 20, {"scores": "yes", "arenas": ARENAS_TEXT}))
        self.assertEqual([len(question) for question, _ in world.asked][:4], [4, 4, 4, 8])

    def test_texts_and_scores(self):
        """Of the scores only the low byte tells."""
        for packet, *shown in (
                (zone_packet(b"Caf\xe9", description="Żółw\0".encode()), "Café", "Żółw", "yes"),
                (zone_packet(b"n" * 32, scores=0x0100, description=b"d"), "n" * 32, "d", "no"),
                (zone_packet(b"a\x1b[1mb\0junk", scores=0x0301, description=b"d" * 386), "ab",
                 "d" * 386, "yes"),
                (zone_packet(b"\x1b[1m \0x", description=b"\0"), "203.0.113.9:25000", "", "yes")):
            world = SubSpaceWorld(ZONE[0])
            world.announce(packet)
            zone = world.zone()
            self.assertEqual([zone.name, zone.description, zone.details["scores"]], shown)

    def test_malformed_packets(self):
        world = SubSpaceWorld(ZONE[0])
        rows = [(bytes(size), 5000, "length") for size in (0, 1, 3, 5, 7, 9, 94, 481, 2048)]
        rows += [(zone_packet(port=65535), 5000, "port"),
                 (ZONE_PACKET, 0, "source port: a datagram from port 0")]
        for packet, source_port, words in rows:
            with self.assertRaisesRegex(ms.Malformed, words):
                world.announce(packet, source_port=source_port)
            outcome, reason = world.outcome(port=0)
            self.assertEqual((outcome, words in reason), ("bad packet", True))
        self.assertEqual(world.asked, [])

    def test_answers_that_prove_a_zone(self):
        place, window = (ZONE[0], 25001), ms.COOKIE_WINDOW_S
        for case, answer, peer, later, listed in (
                ("its answer", lambda mac: SHORT[:4] + mac, place, window, True),
                ("too late", lambda mac: SHORT[:4] + mac, place, 2 * window, False),
                ("another address", lambda mac: SHORT[:4] + mac, (NEIGHBOUR, 25001), 0, False),
                ("another port", lambda mac: SHORT[:4] + mac, ZONE, 0, False),
                ("the other way round", lambda mac: mac + SHORT[:4], place, 0, False),
                ("without its players", lambda mac: mac, place, 0, False),
                ("a guess", lambda mac: SHORT[:4] + PING_TIME, place, 0, False)):
            world = SubSpaceWorld()
            [(mac, to)] = world.ping()
            self.assertEqual((len(mac), to), (4, place))
            with contextlib.suppress(ms.Malformed):     # a ping that asks for nothing
                world.room.datagram(answer(mac), peer, float(later))
            self.assertEqual(bool(world.names()), listed, case)

    def test_nothing_unproven_changes_a_listed_zone(self):
        world = SubSpaceWorld(ZONE[0])
        world.announce()
        world.run(31)
        zone, generation = world.zone(), world.registry.generation
        world.zones.clear()                 # it answers no ping that forged announcements cause
        for number in range(500):
            text = b"%d" % number
            for forged in (zone_packet(b"Fake" + text), zone_packet(description=text + b"\0"),
                           zone_packet(scores=0, version=number), zone_packet(password=text)):
                world.announce(forged)
        self.assertEqual(world.registry.generation, generation)
        self.assertEqual((world.outcome()[0], len(world.room.waiting)), ("password", 1))
        # What it repeats refreshes it at once; its players are those of its answers
        del world.asked[:]
        world.announce(zone_packet(players=99))
        self.assertEqual((zone.players, zone.last_seen, world.asked), (6, world.now, []))
        world.zones[ZONE[0], 25001] = asss
        world.announce(zone_packet(b"New name", scores=0))
        self.assertEqual((world.names(), zone.details["scores"]), (["New name"], "no"))

    def test_it_lives_by_its_announcements(self):
        """Its answers do not prolong that; but three silent polls end it, however it announces
        itself, and whoever does so in its name."""
        world = SubSpaceWorld(ZONE[0])
        for seconds, listed in (100, 1), (179, 1), (181, 0):
            world.announce()
            world.run(seconds)
            self.assertEqual(len(world.names()), listed)
        world.announce()
        world.run(31)
        world.zones.clear()
        for seconds, listed in (50, 1), (60, 0), (60, 0):
            world.announce()
            world.run(seconds)
            self.assertEqual(len(world.names()), listed)
        self.assertEqual((world.outcome()[0], world.poller.targets), ("silent", {}))

    def test_an_old_zone_knows_the_short_form_alone(self):
        world = SubSpaceWorld()
        world.zones[ZONE[0], 25001] = lambda question: (
            asss(question) if len(question) == 4 else None)
        for _ in range(4):
            world.announce()
            world.run(60)
        zone = world.zone()
        self.assertEqual((zone.players, zone.playing, zone.ping_ms, zone.details),
                         (6, None, 20, {"scores": "yes", "arenas": ""}))

    def test_names_belong_to_a_password(self):
        """(source, name, password, what it is refused for)"""
        first, second, third = sources = "203.0.113.1", "203.0.113.2", "203.0.113.3"
        world = SubSpaceWorld(*sources)
        for source, name, password, refused in (
                (first, b"Chaos", b"secret", None), (second, b"Chaos", b"cane", "name"),
                (second, b"CHAOS", b"", "name"), (second, b"Chaos \xa0 ", b"cane", "name"),
                (second, b"Chaos 2", b"cane", None), (second, b"Chaos", b"cane", "name"),
                (third, b"chaos", b"secret", None),             # one network's zones share both
                (first, b"Chaos", b"other", "password"), (first, b"Forged", b"cane", "password"),
                (first, b"Order", b"secret", None), (second, b"Chaos", b"cane", "name"),
                (third, b"Peace", b"secret", None), (second, b"Chaos", b"cane", None),
                (third, b"Chaos", b"secret", "name")):
            world.registry.outcomes = ms.Turns(9)
            world.registry.unproven_outcomes = ms.Turns(9)
            world.announce(zone_packet(name, password), source)
            outcome, _ = world.outcome(source)
            self.assertEqual(outcome, refused or outcome, (source, name))
            self.assertIn(outcome, (refused, None, "listed"), (source, name))
        self.assertEqual(world.names(), ["Chaos", "Order", "Peace"])

    def test_when_a_name_is_free(self):
        """When its zone announces itself no more or, if it is named in the ini, does not answer."""
        for zones in "", "203.0.113.9:25000":
            world = SubSpaceWorld(ZONE[0], NEIGHBOUR, subspace__zones=zones)
            world.announce(zone_packet(b"Mine", b"secret"))
            world.run(31)
            if zones:
                del world.zones[ZONE[0], 25001]
            for seconds, outcome in (0, "name"), (180, "listed"):
                world.run(seconds)
                world.announce(zone_packet(b"Mine", b"other"), NEIGHBOUR)
                self.assertEqual(world.outcome(NEIGHBOUR)[0], outcome)

    def test_after_a_restart(self):
        """Names and zones belong to the same passwords as before."""
        before = SubSpaceWorld(ZONE[0], "203.0.113.7", NEIGHBOUR)
        for source in ZONE[0], NEIGHBOUR:
            before.announce(zone_packet(b"Mine", b"secret"), source)
        before.run(60)
        world = before.restarted()
        world.run(31)
        for source, password, outcome in (
                ("203.0.113.7", b"cane", "name"), (ZONE[0], b"thief", "password"),
                (NEIGHBOUR, b"secret", None), ("203.0.113.7", b"secret", "listed")):
            world.announce(zone_packet(b"Mine", password), source)
            self.assertEqual(world.outcome(source)[0], outcome)

    def test_announced_by_http(self):
        """It stays for as long as it answers, across a restart too, and belongs to who announces it
        by HTTP."""
        world = SubSpaceWorld(ZONE[0])
        world.by_http(name="Web Zone", players=50, description="d")
        self.assertEqual((world.names(), world.outcome()[0]), ([], "announced"))
        for fields, name in ({"name": "Other", "players": 9}, "Other"), ({}, "203.0.113.9:25000"):
            world.by_http(**fields)
            world.run(600)
            zone = world.zone()
            self.assertEqual((zone.name, zone.players, zone.lifetime), (name, 6, math.inf))
        world = world.restarted()
        world.run(600)
        world.announce()
        self.assertEqual(world.outcome(), (
            "owner", "it was announced by HTTP; sign it off there (action=stop)"))
        world.registry.remove_own(world.zone())
        world.announce()                        # it lives by these
        self.assertRaisesRegex(ms.Refused, "announced by UDP", world.room.stopped, *ZONE, world.now)
        self.assertRaisesRegex(ms.Refused, "another UDP port .* once that port has been silent",
                               world.by_http, name="Web Zone")
        world.run(181)                          # it is silent
        world.by_http(name="Web Zone")
        world.run(2)
        self.assertEqual((world.names(), world.zone().lifetime), (["Web Zone"], math.inf))

    def test_refused_by_http(self):
        world = SubSpaceWorld(NEIGHBOUR, server__refuse_names="viagra", **{
            "bans.203.0.113.7": "fake players"})
        world.announce(zone_packet(b"Mine", b"secret"), NEIGHBOUR)
        for source, port, name, words in (
                ("2001:db8::1", 25000, "Other", "IPv4 addresses only"),
                (ZONE[0], 65535, "Other", "up to 65534"), (ZONE[0], 0, "Other", "port 0"),
                (ZONE[0], 25000, "Mine", "belongs to another"),
                (ZONE[0], 25000, "Buy viagra", "viagra"),
                ("203.0.113.7", 25000, "Other", "fake players")):
            self.assertRaisesRegex(ms.Refused, words, world.by_http, source, port, name=name)
        self.assertEqual((world.names(), len(world.poller.targets)), (["Mine"], 1))

    def test_zones_of_the_ini(self):
        """They need no announcement, and belong to who makes the first one."""
        world = SubSpaceWorld(ZONE[0], subspace__zones="203.0.113.9:25000")
        world.run(64)                       # the second poll tells of the arenas
        zone = world.zone()
        self.assertEqual((zone.name, zone.players, zone.playing, zone.details, zone.private),
                         ("203.0.113.9:25000", 6, 4, {"arenas": ARENAS_TEXT}, {}))
        world.announce()
        world.announce(zone_packet(b"Forged"), source_port=6000)
        self.assertEqual((world.outcome()[0], zone.lifetime), ("owner", math.inf))
        world.run(300)
        self.assertEqual((zone.name, zone.details["arenas"]), ("Loopback Test Zone", ARENAS_TEXT))
        world.zones.clear()
        world.run(130)
        self.assertEqual((zone.responding, zone.details, zones_in_list(world)), (False, {}, []))
        world.zones[ZONE[0], 25001] = asss
        world.announce()
        self.assertTrue(zone.responding)
        world.run(2)
        self.assertEqual(zone.details, {"scores": "yes", "arenas": ARENAS_TEXT})

    def test_the_master_does_not_list_itself(self):
        world, own = SubSpaceWorld(), ("127.0.0.1", 4991)
        world.zones[own] = lambda question: b"".join(
            answer for answer, _ in world.room.datagram(question, own, world.now)) or None
        world.announce(zone_packet(port=4990), "127.0.0.1")
        self.assertEqual((len(world.asked), world.names()), (1, []))

    def test_a_flood_of_false_claims(self):
        """It takes bounded room, keeps no zone out and takes none out; each is asked once. (Two
        zones of one source port.)"""
        world = SubSpaceWorld(ZONE[0])
        world.room.waiting.size = 100
        world.announce(zone_packet(b"Listed"))
        for number in range(1000):
            world.announce(source="10.0.%d.%d" % divmod(number, 250))
            if number == 950:
                waiting = world.ping(zone_packet(b"New", port=3000))
        world.zones[ZONE[0], 3001] = asss
        world.answer(waiting)
        world.run(1)
        self.assertEqual(world.names(), ["Listed", "New"])
        self.assertEqual((len(world.room.waiting), len(world.poller.targets)), (99, 2))
        asked = [place for _, place in world.asked]
        self.assertEqual(asked.count(("10.0.0.7", 25001)), 1)

    def test_a_flood_in_the_name_of_a_zone(self):
        """5,000 datagrams from its address before each of its announcements: the limits drop those
        as well. But a zone that repeats itself is known by its fingerprint, although its answers
        change all the time, and stays. One that announces other players each time stays for as
        long as it answers polls."""
        for repeats, minutes in (True, 15), (False, 15):
            world = SubSpaceWorld()
            world.zones[ZONE[0], 25001] = lambda question: (
                struct.pack("<I", int(world.now)) + question if len(question) == 4 else None)
            arrived = collections.deque()

            def receive(size):
                if not arrived:
                    raise BlockingIOError
                return arrived.popleft()
            sock = mock.Mock(family=socket.AF_INET, recvfrom=receive, sendto=lambda *sent: 0)
            limiter = world.registry.rules.datagram_limiter
            udp_socket = ms.UdpSocket(
                "subspace", sock, world.room, ms.Tally(), limiter, world.registry)
            for _ in range(2):
                world.announce()
                world.run(1)
            for minute in range(minutes):
                world.run(59)
                arrived += [(zone_packet(b"Forged"), (ZONE[0], port)) for port in range(5000)]
                arrived.append((zone_packet(players=6 if repeats else minute), (ZONE[0], 5000)))
                while arrived:
                    udp_socket.on_readable(world.now)
                world.run(1)
            self.assertEqual(world.names(), ["Loopback Test Zone"])
            self.assertGreater(udp_socket.tally.limited, minutes * 4000)
            world.zones.clear()
            world.run(120)
            self.assertEqual(world.names(), [])


class SubSpaceOwners(unittest.TestCase):
    """A zone answers every ping, so its answer proves no announcement: a listed zone belongs to the
    port and password that announce it."""

    OWNER, STRANGER = 5000, 6000                    # source ports
    CHANGES = (
        ("name", dict(name=b"Forged"), "owner"),
        ("description", dict(description=b"forged\0"), "owner"),
        ("version", dict(version=1), "owner"), ("scores", dict(scores=0), "owner"),
        ("password", dict(password=b"secret"), "password"),
        ("name and password", dict(name=b"Forged", password=b"secret"), "password"))

    def listed(self, **settings):
        world = SubSpaceWorld(ZONE[0], **settings)
        world.announce()
        world.run(60)
        return world

    def foreign(self):
        """A master that knows the zone from another one."""
        world = SubSpaceWorld(ZONE[0])
        zone = ms.Server(
            "subspace", *ZONE, ZONE[0], 0.0, 180.0, name="Loopback Test Zone", version="134",
            players=6, verified="query", description="a real asss on loopback",
            details={"scores": "yes"}, private=ms.zone_owned_by(self.OWNER, b"cane"))
        zone.master = "b"
        world.registry.insert(zone)
        return world

    def shown(self, world):
        zone = world.zone()
        return zone.name, zone.description, zone.version, zone.details["scores"], zone.private

    def test_another_port_changes_nothing(self):
        """Neither at once nor after a restart, which forgets neither port nor password, nor if only
        another master has heard the zone."""
        for world in self.listed(), self.listed().restarted(), self.foreign():
            before, master = self.shown(world), world.zone().master
            for second in range(110):
                world.run(1)
                case, change, outcome = self.CHANGES[second % len(self.CHANGES)]
                world.announce(zone_packet(**change), source_port=self.STRANGER)
                self.assertEqual((world.outcome()[0], self.shown(world)), (outcome, before),
                                 (case, second, master))
            # The page /check tells it to anybody: the port that can be forged is not named there
            self.assertNotIn(str(self.OWNER), world.outcome()[1])
            world.announce(source_port=self.STRANGER)               # nothing new
            self.assertEqual(world.zone().master, master)
            world.announce()                    # the owner: it is heard here as well
            self.assertEqual((world.zone().master, self.shown(world)), ("", before))

    def test_another_port_may_repeat_what_is_listed(self):
        """A router may give a zone another port: it stays listed, and once nothing comes from the
        former port the zone belongs to the new one."""
        for world in self.listed(), self.listed().restarted():
            first = world.zone()
            heard_at = first.last_seen
            for _ in range(2):
                world.run(60)
                asked = len(world.asked)
                world.announce(source_port=self.STRANGER)
                self.assertEqual((first.last_seen, len(world.asked)), (heard_at, asked))
                self.assertAlmostEqual(first.last_seen + first.lifetime, world.now + 180.0)
            world.run(60)
            world.announce(source_port=self.STRANGER)
            self.assertIs(world.zone(), first)
            world.announce(zone_packet(b"Other"), source_port=self.OWNER)
            self.assertEqual((world.outcome()[0], world.names()), ("owner", ["Loopback Test Zone"]))
            world.announce(zone_packet(b"Other"), source_port=self.STRANGER)
            self.assertEqual(world.names(), ["Other"])

    def test_a_silent_owner_loses_the_zone_to_who_is_proven(self):
        """Others' repetitions do not prolong its right; an announcement that a ping does not
        confirm takes nothing."""
        world = self.listed(subspace__zones="203.0.113.9:25000")
        world.announce(source_port=self.STRANGER)
        world.run(130)                              # this zone stays without announcements
        for answering, name in ({}, "Loopback Test Zone"), ({(ZONE[0], 25001): asss}, "Other"):
            world.zones = answering
            world.run(4)
            world.announce(zone_packet(b"Other", b"secret"), source_port=self.STRANGER)
            self.assertEqual(world.names(), [name])
        world.announce()
        self.assertEqual((world.outcome()[0], world.names()), ("password", ["Other"]))

    def test_the_password_is_not_kept(self):
        claim = self.listed().zone().private["zone_owner"]
        self.assertEqual(claim, {"port": "5000", "password": mock.ANY})
        self.assertRegex(claim["password"], "^[0-9a-f]{16}$")

    def test_the_last_of_the_claims_that_wait_is_listed(self):
        world = SubSpaceWorld(ZONE[0])
        pings = world.ping(zone_packet(b"Former")) + world.ping(source_port=self.STRANGER)
        world.answer(pings)
        self.assertEqual(world.names(), ["Loopback Test Zone"])
        self.assertEqual(world.zone().private["zone_owner"]["port"], str(self.STRANGER))

    def test_claims_that_wait_are_counted_by_source(self):
        """A source that announces without end pushes out its own."""
        world = SubSpaceWorld(limits__servers_per_source="5")
        pings = world.ping(source=NEIGHBOUR)
        for port in range(1, 110):
            world.announce(zone_packet(port=port))
        self.assertEqual(len(world.room.waiting), 5 + 1)
        world.zones[NEIGHBOUR, 25001] = asss
        world.answer(pings)
        self.assertEqual((world.names(), len(world.room.waiting)), (["Loopback Test Zone"], 5))

    def test_an_announcement_replaces_another_master_s_fields(self):
        """It is known by its fingerprint, until the fields change."""
        world = self.listed()
        before = self.shown(world)
        for change in {"name": "Old name"}, {"description": ""}, {"version": "1"}, {"details": {}}:
            world.announce()
            world.registry.update(world.zone(), change)
            world.announce()
            self.assertEqual(self.shown(world), before, change)

    def test_a_poll_takes_no_name_from_another_masters_zone(self):
        """Named in the ini here, and announced there."""
        world = self.foreign()
        before = self.shown(world)
        world.room.read(settings_of({"subspace__zones": "203.0.113.9:25000"}))
        world.run(100)
        self.assertEqual((self.shown(world), world.zone().master), (before, "b"))
        world.registry.remove_any(world.zone())
        world.run(40)
        self.assertEqual(world.names(), ["203.0.113.9:25000"])


KEY = hexa("aabbccdd")
CONNECT = b"\0\1" + KEY + b"\1\0"
REQUEST = hexa("0003 00000000 01 00000000")
PLAYER = ("192.0.2.1", 777)
WIRE_ENTRY = hexa("cb007109 a861 0600 0103 86000000") + b"Caf\xe9".ljust(64, b"\0") + b"d\0"


def acknowledge(packet):
    return b"\0\4" + packet[2:6]


def zones_in_list(world, minimum=0):
    """The list for a player who asks for zones with so many players."""
    zones = world.room.rendered("zones", world.now)
    data = b"".join(piece[6:] for piece in ms.list_pieces(zones, minimum))
    return list(ms.read_zone_list(data))


class SubSpaceLists(unittest.TestCase):

    def world(self, zones, **settings):
        world = SubSpaceWorld(limits__servers_per_source="100000", **settings)
        for number in range(zones):
            world.registry.list_or_refresh(
                ("subspace", "198.51.100.%d" % (number % 250), 1000 + number), "198.51.100.1", 0.0,
                1e9, {"name": "Zone %d" % number, "players": number, "version": "134",
                      "description": "d" * 100, "details": {"scores": "yes"}})
        return world

    def say(self, world, *packets, peer=PLAYER, now=0.0):
        """What the last of these packets is answered."""
        out = []
        for packet in packets:
            replies = world.list.datagram(packet, peer, now)
            self.assertTrue(all(to == peer for _, to in replies))
            out = [data for data, _ in replies]
        return out

    def test_exchange(self):
        world = self.world(0)
        world.registry.list_or_refresh(("subspace", *ZONE), ZONE[0], 0.0, 1e9, {
            "name": "Żółw Café", "players": 6, "version": "134", "description": "naïve ☃",
            "details": {"scores": "yes"}})
        entry = (hexa("cb007109 a861 0600 0100 86000000") + b"?\xf3?w Caf\xe9".ljust(64, b"\0")
                 + b"na\xefve ?\0")
        piece = hexa("0003 00000000 000a 57000000 01") + entry
        for packet, *answers in (
                (CONNECT, b"\0\2" + KEY),
                (hexa("0005 01020304 0000"), hexa("0006 01020304 64000000")),
                (hexa("0006 01020304 64000000"),), (REQUEST, acknowledge(REQUEST), piece),
                (acknowledge(piece),), (REQUEST, acknowledge(REQUEST)),     # that was lost
                (hexa("0007"),), (hexa("0007"),)):
            self.assertEqual(self.say(world, packet, now=1.0), answers, packet.hex())
        self.assertEqual((world.list.tick(1.0), len(world.list.links)), ([], 0))
        for outside in REQUEST, ZONE_PACKET, hexa("0007"):
            self.assertRaises(ms.Malformed, self.say, world, outside)

    def test_connects(self):
        """Each begins an exchange; a second request in one is served after the first."""
        world = self.world(0)
        empty = hexa("0003 00000000 000a 01000000 01")
        for connect, answer in (
                (CONNECT, "0002 aabbccdd"), (b"\0\1" + KEY + b"\x11\0", "0002 aabbccdd"),
                (b"\0\1" + bytes(4) + b"\1\0", "0002 00000000")):
            self.assertEqual(self.say(world, connect), [hexa(answer)])
            self.assertEqual(self.say(world, REQUEST), [hexa("0004 00000000"), empty])
        self.assertEqual(self.say(world, hexa("0003 01000000 01 02000000"))[1:], [])
        self.say(world, acknowledge(empty))
        answer = self.say(world, hexa("0003 02000000 01 02000000"))[1]
        self.assertEqual(answer, hexa("0003 01000000 000a 01000000 01"))
        for bad in (b"\0\1" + KEY + b"\2\0", CONNECT + b"\0", CONNECT[:7], b"\0\1"):
            self.assertRaisesRegex(ms.Malformed, "connect", self.say, world, bad)

    def test_zones_in_the_list(self):
        world = self.world(100)
        for address, fields in (("2001:db8::1", {}), (ZONE[0], {"responding": False})):
            world.registry.list_or_refresh(("subspace", address, 9), address, 0.0, 1e9, fields)
        world.registry.list_or_refresh(("other", ZONE[0], 9), ZONE[0], 0.0, 1e9, {"players": 99})
        for minimum, players in (0, range(99, -1, -1)), (90, range(99, 89, -1)), (1000, []):
            world.now += 10.0
            listed = zones_in_list(world, minimum)
            self.assertEqual([zone["players"] for zone in listed], list(players))
        server = ms.Server("subspace", *ZONE, ZONE[0], 0.0, 1.0, "n" * 90, version="135",
                           description="d" * 600)
        _, entry = ms.counted_zone_entry(server)
        self.assertEqual((entry[10:14], entry[14:78], entry[78:]),
                         (hexa("87000000"), b"n" * 63 + b"\0", b"d" * 479 + b"\0"))
        server.version = "1.0"
        self.assertEqual(ms.counted_zone_entry(server)[1][10:14], hexa("86000000"))

    def test_clusters(self):
        """Clusters and reliable packets are taken apart in order; what is not known or cut off is
        ignored."""
        sync = "06 0005 01020304"
        request = "0b 0003 00000000 01 00000000"
        for case, packet, kinds in (
                ("several", "000e" + sync + request, ["0006", "0004", "0003"]),
                ("not known, and cut off", "000e 03 051234" + request + "07 0005 0102",
                 ["0004", "0003"]),
                ("empty", "000e 00" + request + "ff", ["0004", "0003"]),
                ("many", "000e" + 70 * sync, 4 * ["0006"]),
                ("in a cluster", "000e 0e 000e" + request + sync, ["0006"]),
                ("in a reliable packet", "0003 00000000 000e 05 01 00000000", ["0004", "0003"]),
                *[("no packet", packet, []) for packet in (
                    "", "00", "0003", "0003 0000", "0005 010203", "01 000000", "000e",
                    "01 00000000 00", "0009 00000000", "0002 aabbccdd")]):
            out = self.say(self.world(1), CONNECT, hexa(packet))
            self.assertEqual([answer[:2] for answer in out], list(map(hexa, kinds)),
                             (case, packet))

    def test_reliable_packets_are_taken_in_order(self):
        """One that comes too early is not acknowledged, so it comes again; an old one is."""
        got = []
        link = ms.SubSpaceLink(0.0)
        with mock.patch.object(link, "on_packet", lambda data, now: got.append(data)):
            for number, payload, answered, taken in (
                    (1, "41", 0, b""), (0, "000e 01 41 01 42", 1, b"AB"), (0, "41", 1, b"AB"),
                    (2, "43", 0, b"AB"), (1, "43", 1, b"ABC"), (0, "41", 1, b"ABC"),
                    (2, "44", 1, b"ABCD")):
                head = struct.pack("<I", number)
                out = link.receive(hexa("0003") + head + hexa(payload), 0.0)
                self.assertEqual((out, b"".join(got)), ([hexa("0004") + head] * answered, taken))

    def test_windows_and_resends(self):
        """One packet in flight before the first acknowledgement, then four, each again twice, and
        none beyond those four while one is missing."""
        link = ms.SubSpaceLink(0.0, [b"%d" % number for number in range(40)])

        def sent(now, *acknowledged):
            """The numbers of the packets that are sent then, or for these acknowledgements."""
            packets = [] if acknowledged else link.tick(now)
            for number in acknowledged:
                packets += link.receive(hexa("0004") + struct.pack("<I", number), now)
            return [int.from_bytes(packet[2:6], "little") for packet in packets]
        for now, acknowledged, numbers in (
                (0.0, [], [0]), (0.4, [], []), (0.5, [], [0]), (2.4, [], []), (2.5, [], [0]),
                (3.0, [], []), (3.1, [0], [1, 2, 3, 4]),
                (3.2, [0, 9], []),              # once more, and one that never was
                (3.3, [2, 3, 4], []), (3.7, [], [1]), (3.75, [1], [5, 6, 7, 8]),
                (3.76, [6, 5], [9, 10]), (4.5, [], [7, 8, 9, 10]), (7.0, [], [7, 8, 9, 10])):
            self.assertEqual((sent(now, *acknowledged), link.is_closed), (numbers, False), now)
        self.assertEqual((sent(12.0), link.is_closed), ([], True))

    def test_100_zones_over_a_bad_network(self):
        """A fiftieth of all packets is lost, some come twice, and some not in order."""
        for seed in range(4):
            world, rng = self.world(100), random.Random(seed)
            player = ms.ZoneListLink(0.0, [REQUEST[6:]])

            def arrived(packets):
                if rng.random() < 0.03:
                    rng.shuffle(packets)
                return [packet for packet in packets
                        for _ in range(rng.choice([0] + [1] * 40 + [2] * 9))]
            self.say(world, CONNECT)
            out, now = [], 0.0
            while len(player.zones) < player.total and now < 60.0:
                now += 0.1                          # half a round trip
                out += player.tick(now)
                back = [packet for packet, _ in world.list.tick(now)]
                for packet in arrived(out):
                    back += self.say(world, packet, now=now)
                out = []
                for packet in arrived(back):
                    out += player.receive(packet, now)
            self.assertEqual([zone["name"] for zone in ms.read_zone_list(bytes(player.zones))],
                             ["Zone %d" % number for number in range(99, -1, -1)])

    def test_an_exchange_nobody_acknowledges_ends(self):
        """After three times; and one in which nothing happens. What was seen before, or proves
        nothing, prolongs nothing."""
        for also in [], [REQUEST], [hexa("0005 01020304")]:
            world = self.world(400)
            sent = self.say(world, CONNECT, REQUEST)[1:]
            for second in range(1, 10):
                if len(world.list.links):
                    sent += self.say(world, *also, now=second - 0.5)
                sent += [data for data, _ in world.list.tick(float(second))]
            chunks = [data for data in sent if len(data) > 20]
            self.assertEqual((len(set(chunks)), len(chunks), len(world.list.links)), (1, 3, 0))
        self.say(world, CONNECT, now=60.0)
        for now, links in (80.0, 1), (80.1, 0):
            world.list.tick(now)
            self.assertEqual(len(world.list.links), links)

    def test_requests_are_limited(self):
        world = self.world(1, limits__requests="1/6")
        self.say(world, CONNECT)
        lists = 0
        for number in range(20):
            request = hexa("0003") + struct.pack("<I", number) + REQUEST[6:]
            for packet in self.say(world, request)[1:]:
                lists += 1
                self.say(world, acknowledge(packet))
        self.assertEqual(lists, 6)

    def test_lists_are_bounded_in_bytes(self):
        """To all together; what is held back has not been tried, and comes later."""
        world = self.world(400)
        world.registry.rules.surplus_limiter.set_rate((30_000, 30_000))
        received = {("203.0.113.%d" % number, 777): set() for number in range(5)}
        arrived = []
        for peer, packet in itertools.product(received, (CONNECT, REQUEST)):
            arrived += world.list.datagram(packet, peer, 0.0)
        for second in range(30):
            while arrived:
                data, peer = arrived.pop()
                if data[:2] == hexa("0003"):
                    received[peer].add(data[12:])
                    arrived += world.list.datagram(acknowledge(data), peer, float(second))
            total = sum(len(piece) for pieces in received.values() for piece in pieces)
            self.assertLess(total, 60_500 + 32_000 * second)
            arrived = list(world.list.tick(second + 1.0))
        self.assertEqual({sum(map(len, pieces)) for pieces in received.values()}, {1 + 400 * 179})

    def test_strangers_push_nobody_out(self):
        """A player asks amid many connects; the oldest links go. One address pushes out its own."""
        for addresses in 6000, 1:
            world = self.world(1)
            self.say(world, CONNECT)
            for number in range(6000):
                address = "60.%d.%d.1" % divmod(number % addresses, 250)
                self.say(world, CONNECT, peer=(address, number))
                if number % 2000 == 1999:
                    self.say(world, hexa("0005 01020304"))
            self.assertEqual(len(self.say(world, REQUEST)), 2)
            self.assertEqual(len(world.list.links), min(addresses * 64 + 1, ms.MAX_LIST_LINKS))

    def test_the_list_of_another_master(self):
        """Fetched from our own list port, in several packets."""
        world = self.world(30)
        conversation = ms.SubSpace().fetch()
        received = []
        with self.assertRaises(StopIteration) as end:
            step = next(conversation)
            while True:
                for packet in step.data if isinstance(step.data, list) else [step.data]:
                    received += self.say(world, packet)
                step = conversation.send(received.pop(0) if received else None)
        self.assertEqual([zone["players"] for zone in end.exception.value],
                         list(range(29, -1, -1)))

    def test_lists_that_do_not_come(self):
        for answers, words in ([None] * 3, "no answer"), ([b"\0\2"] + [None] * 40, "no list came"):
            self.assertRaisesRegex(TimeoutError, words, converse, ms.SubSpace().fetch(), *answers)
        for wrong in (b"\1" + bytes(50), b"\1" + bytes(78), b"\1" + b"x" * 90,
                      b"\1" + WIRE_ENTRY + b"x" * 90, b"\2" + WIRE_ENTRY, b"\2", b""):
            self.assertRaises(ms.Malformed, list, ms.read_zone_list(wrong))
        # What nobody takes is not read: 24 MB have room for 300,000 zones
        first = next(ms.read_zone_list(b"\1" + WIRE_ENTRY + b"x" * 90))
        self.assertEqual(first["port"], next(ms.read_zone_list(b"\1" + WIRE_ENTRY))["port"])


class SubSpaceAnnouncing(unittest.TestCase):
    """What announces a zone that cannot do it itself."""

    def setUp(self):
        self.server = ms.Server(
            "subspace", "", 25000, "", 0.0, math.inf, name="Loopback Test Zone",
            description="a real asss on loopback", players=6)

    def test_the_captured_announcement_every_minute(self):
        steps, _ = converse(ms.SubSpace().announce(self.server), b"noise", None, None)
        self.assertEqual([(step.data, step.wait_s, step.accepted) for step in steps], [
            (ZONE_PACKET, 1.0, False), (b"", None, False), (b"", 59.0, True),
            (ZONE_PACKET, 1.0, False)])
        self.assertIn("ping the next UDP port", steps[2].state)
        self.server.name, self.server.description = "\u4e2d" + "é" * 40, "x" * 400
        packet = next(ms.SubSpace().announce(self.server)).data
        self.assertEqual((len(packet), packet[14:46], packet[94:]),
                         (480, b"?" + b"\xe9" * 30 + b"\0", b"x" * 385 + b"\0"))

    def test_pings_are_answered_as_the_document_says(self):
        for playing, map, question, answer in (
                (4, "", "11223344", "06000000 11223344"),
                (4, "", "1122334401000000", "1122334401000000 06000000 04000000"),
                (4, "", "1122334402000000", "1122334402000000 3000 0600 0400 00"),
                (None, "pb", "1122334403000000",
                 "1122334403000000 06000000 06000000 706200 0600 0600 00")):
            self.server.playing, self.server.map = playing, map
            self.assertEqual(ms.SubSpace().answer(self.server, hexa(question)), hexa(answer))
        for size in (0, 1, 3, 5, 7, 8, 9, 100):
            self.assertRaises(ms.Malformed, ms.SubSpace().answer, self.server, bytes(size))


# --- AIO -----------------------------------------------------------------------------------------

# The two servers of the document's example; the framed bytes and SET_IP are PROTOCOLS, section 5
AIO_OFFICIAL = (
    b"official AIO v0.2 test server",
    b"welcome to the official AIO v0.2 test server :O do whatever you like and have fun",
    b"190.123.69.69")
AIO_UNNAMED = b"unnamed AIO server", b"this is an unnamed server", b"37.192.51.67"
AIO_DEPLOYED_LIST = (
    b"%12#official AIO v0.2 test server#welcome to the official AIO v0.2 test server :O do whatever"
    b" you like and have fun#190.123.69.69#27010#unnamed AIO server#this is an unnamed server"
    b"#37.192.51.67#27010#%")
AIO_DOCUMENT_LIST = (
    b"%12#0#official AIO v0.2 test server#welcome to the official AIO v0.2 test server :O do"
    b" whatever you like and have fun#190.123.69.69#27010#1#unnamed AIO server#this is an unnamed"
    b" server#37.192.51.67#27010#%")
AIO_BINARY_LIST = (
    hexa("0c 0000") + b"\0".join(AIO_OFFICIAL) + hexa("00 144801 0100") + b"\0".join(AIO_UNNAMED)
    + hexa("00 144801"))
AIO_FRAMED_LIST = (
    hexa("22000000 02 0200 0d") + b"190.123.69.69" + hexa("8269 0c") + b"37.192.51.67"
    + hexa("8269"))
AIO_ANSWER = (
    hexa("00 0900") + b"My server" + hexa("0400") + b"Fun!" + hexa("03000000 10000000 0700"))

AIO_GREETING = hexa("01 00000000")
AIO_TEXT = b"13#N#D#27010#%"
AIO_BINARY = b"\x0dN\0D\0\0\x14\x48\x01"
AIO_FRAMED = hexa("03000000 03 8269")
AIO_KEEPALIVE = hexa("01000000 04")
AIO_DONE = hexa("02000000 05 03")
AIO_LISTS = b"12#%\n", b"12#%", b"\x0c", hexa("01000000 02")

# What a peer sends while the document's two servers are listed, and what it gets
AIO_TRACES = (
    ("list, as deployed", b"12#%\n", AIO_DEPLOYED_LIST),
    ("list, as deployed, CR LF", b"12#%\r\n", AIO_DEPLOYED_LIST),
    ("list, document", b"12#%", AIO_DOCUMENT_LIST),
    ("line ends between", b"HI#%\n\r\n12#%\n", AIO_DEPLOYED_LIST),
    ("publish, as deployed", b"13#NAME#DESC#27010#%\n", b"%SUCCESS#13#%"),
    ("publish, document",
     b"13#best AIO server#please no non-vanilla content pls#185.12.59.68#27010#%",
     b"%SUCCESS#13#%"),
    ("publish, keepalive, publish",
     b"13#NAME [0/9]#DESC#27010#%\nKEEPALIVE#%\n13#NAME [1/9]#50% more#27010#%\r\n",
     b"%SUCCESS#13#%%SUCCESS#KEEPALIVE#%%SUCCESS#13#%"),
    ("address", b"SET_IP#203.0.113.7#%\n", b"%SUCCESS#SET_IP#%"),
    ("text news", b"NEWS#%\n", b"%NEWS#50<percent> more <num>1#%"),
    ("list and news", b"NEWS#%\n12#%NEWS#%", b"%NEWS#50<percent> more <num>1#%"
     + AIO_DOCUMENT_LIST + b"%NEWS#50<percent> more <num>1#%"),
    ("unknown text", b"HI#x#%", b""),
    ("binary list", hexa("0c"), AIO_BINARY_LIST),
    ("binary publish", b"\x0dbest AIO server\0please no non-vanilla content pls\x00185.12.59.68\0"
     + hexa("144801"), b""),
    ("binary list and half a publish", b"\x0c" + AIO_BINARY[:-1], AIO_BINARY_LIST),
    ("framed list", hexa("01000000 02"), AIO_FRAMED_LIST),
    ("framed publish", AIO_FRAMED, AIO_DONE),
    ("framed publish, zlib", hexa("0b000001 789c636eca0400017900ef"), AIO_DONE),
    ("framed publish, keepalive", AIO_FRAMED + AIO_KEEPALIVE, AIO_DONE + hexa("02000000 05 04")),
    ("framed keepalive of a client", AIO_KEEPALIVE,
     hexa("2b000000 06 04 2700") + b"nothing is published on this connection"),
    ("framed news", hexa("01000000 01"), hexa("0e000000 01 0b00") + b"50% more #1"),
    ("framed port 0", hexa("03000000 03 0000"),
     hexa("1b000000 06 03 1700") + b"port 0 cannot be listed"),
)


class AioWorld:
    """The room, its peers, and a framed game server that answers queries."""

    game = ms.Aio
    place = "203.0.113.9", 27010
    question, answer = b"\0", zlib.compress(AIO_ANSWER)
    answered = {"name": "My server", "description": "Fun!", "players": 3, "max_players": 16,
                "version": "7"}
    wrong_answers = (
        b"", b"\0", b"x" * 50, zlib.compress(b"\1" + AIO_ANSWER[1:]), answer[:-1],
        zlib.compress(AIO_ANSWER[:-1]), zlib.compress(b"\0\xff\xff"),
        zlib.compress(bytes(100 << 20), 9))

    def __init__(self, servers=(), **settings):
        self.program = make_core(**{"aio__news": "50% more #1", **settings})
        self.registry, self.poller = self.program.registry, self.program.poller
        self.room = ms.Aio(self.program)
        for name, description, address in servers:
            self.peer(b"13#%s#%s#27010#%%\n" % (name, description), address.decode())

    def peer(self, data, address="203.0.113.9", now=0.0):
        """A connection that has sent this."""
        session = self.room.session(address, now)
        feed(session, data, now=now)
        return session

    def ask(self, request):
        """What a peer of its own gets for this; 0.2 s later if it takes a newline to tell."""
        session = self.room.session("198.51.100.7", 0.0)
        return feed(session, request) + session.tick(0.2)

    def listed(self, *names):
        """These attributes of the listed servers."""
        return [tuple(getattr(server, name) for name in names)
                for server in self.registry.servers("aio")]

    def outcome(self, source, port=27010):
        return self.registry.outcome(source, "aio", port)[1:]


def document_world():
    return AioWorld((AIO_OFFICIAL, AIO_UNNAMED))


class AioTest(unittest.TestCase):

    def test_integers_of_the_binary_dialect(self):
        for value, wire in ((0, "01"), (127, "ff"), (128, "0200"), (8080, "427c"),
                            (0x407F, "feff"), (16512, "040000"), (27010, "144801"),
                            (65535, "fcfb05"), (0x204080, "00000000"), (0x2020407F, "f8ffffff")):
            data = hexa(wire)
            self.assertEqual(ms.aio_integer(value), data)
            self.assertEqual(ms.read_aio_integer(data + b"?"), (value, len(data)))
            for cut in range(len(data)):
                self.assertGreater(ms.read_aio_integer(data[:cut])[1], cut)

    def test_traces_whole_and_in_every_split(self):
        for title, data, answer in AIO_TRACES:
            pieces = [[data[at:at + size] for at in range(0, len(data), size)]
                      for size in range(1, len(data) + 1)]
            pieces += [[data[:at], data[at:]] for at in range(1, len(data))]
            for split in pieces:
                session = document_world().room.session("185.12.59.68", 0.0)
                answers = [feed(session, piece, now=0.01 * number)
                           for number, piece in enumerate(split)]
                answers.append(session.tick(0.25 + 0.01 * len(split)))
                self.assertEqual(b"".join(answers), answer, (title, split))

    def test_a_newline_tells_the_two_lists_apart(self):
        for method, *arguments, answer in (
                ("tick", 5.1, b""), ("tick", 5.2, AIO_DOCUMENT_LIST),
                ("receive", b"\n", 5.1, AIO_DEPLOYED_LIST),
                ("receive", b"NEWS#%", 5.1, AIO_DOCUMENT_LIST),
                ("ended", 5.1, AIO_DOCUMENT_LIST)):         # no newline can follow
            session = document_world().room.session("198.51.100.7", 0.0)
            session.receive(b"HI#%\n", 0.0)     # its newline is none of the next message
            self.assertEqual(session.receive(b"12#%", 5.0), b"")
            self.assertEqual(getattr(session, method)(*arguments), answer)

    def test_greetings(self):
        aio = AioWorld()
        silent = aio.room.session("198.51.100.7", 0.0)
        self.assertEqual(silent.opened(0.0), AIO_GREETING)
        self.assertEqual([silent.tick(now) for now in (1.1, 1.2, 1.3)], [b"", b"%1#0#%", b""])
        self.assertEqual(feed(silent, b"KEEPALIVE#%", now=2.0), b"%SUCCESS#KEEPALIVE#%")
        for data in b"N", b"\x0d", b"\3":
            self.assertEqual(aio.peer(data).tick(1.2), b"")

    def test_lists(self):
        """(what is published from where, and how it is listed; the last is the placeholder)"""
        best = b"best AIO server", b"100% fun"
        nobody = (b"No servers currently online :pepe:", b"There are currently no available"
                  b" servers... Maybe host your own or wait later?:O")
        for data, source, (name, description) in (
                (b"13#best AIO server#100<percent> fun#10.0.0.1#27010#%", "203.0.113.9", best),
                (AIO_FRAMED, "2001:db8::9", (b"[2001:db8::9]:27010", b"")),
                (b"", "127.0.0.1", nobody)):
            aio, address = AioWorld(), source.encode()
            aio.peer(data, source)
            text = b"#".join((name, description.replace(b"%", b"<percent>"), address, b"27010#%"))
            framed = hexa("11000000 02 0100 0b") + address + hexa("8269")
            self.assertEqual([aio.ask(request) for request in AIO_LISTS], [
                b"%12#" + text, b"%12#0#" + text,
                hexa("0c 0000") + b"\0".join((name, description, address, b"\x14\x48\x01")),
                framed if data else hexa("03000000 02 0000")])

    def test_long_lists(self):
        """They number their servers; peers read a frame with one recv(4) and one recv(length)."""
        aio = AioWorld()
        for number in range(300):
            address = address_of(number)
            aio.registry.list_or_refresh(("aio", address, 27010), address, 0.0, math.inf,
                                         {"name": str(number)})
        _, document, binary, framed = [aio.ask(request) for request in AIO_LISTS]
        self.assertTrue(document.endswith(b"#27010#299#99##198.18.0.100#27010#%"), document[-50:])
        self.assertIn(hexa("144801 2b01") + b"99\0", binary)
        self.assertEqual(framed[:4], (len(framed) - 4).to_bytes(3, "little") + b"\1")
        payload = zlib.decompress(framed[4:])
        self.assertEqual((payload[:3], payload.count(hexa("8269"))), (hexa("02 2c01"), 300))

    def test_names_and_players(self):
        """(published, name, players, maximum, in this game's lists)"""
        for published, *facts, shown in (
                (b"100% C<num> [bad] [7/32]", "100% C# [bad]", 7, 32, "100% C# [bad] [7/32]"),
                (b"[1/2]", "203.0.113.9:27010", 1, 2, "203.0.113.9:27010 [1/2]"),
                (b"n [70000/99999]", "n", 65535, 65535, "n [65535/65535]"),
                (b"n [9/8]", "n", 8, 8, "n [8/8]"), (b"n[1/2]", "n[1/2]", 0, 0, "n[1/2]"),
                (b"x" * 200, "x" * 128, 0, 0, "x" * 128), (b"caf\xe9", "café", 0, 0, "café")):
            aio = AioWorld()
            aio.peer(b"13#" + published + b"#a<num>b \xa9#27010#%")
            self.assertEqual(aio.listed("name", "players", "max_players", "description"),
                             [(*facts, "a#b ©")])
            text = shown.replace("#", "＃").replace("%", "％")
            self.assertIn(("#%s#a<num>b ©#" % text).encode(), aio.ask(b"12#%\n"))
            self.assertIn(("\0%s\0a#b ©\0" % shown).encode(), aio.ask(b"\x0c"))

    def test_addresses(self):
        """(source, what it sends, where it is listed)"""
        for source, data, address in (
                # A public source speaks for itself only
                ("203.0.113.9", b"13#N#D#198.51.100.66#27010#%", "203.0.113.9"),
                ("203.0.113.9", b"SET_IP#198.51.100.66#%" + AIO_TEXT, "203.0.113.9"),
                ("127.0.0.1", AIO_FRAMED, "198.51.100.1"),
                # icanhazip.com ends it so
                ("127.0.0.1", b"13#N#D#203.0.113.7\n#27010#%", "203.0.113.7"),
                ("127.0.0.1", b"\x0dN\0D\x00203.0.113.7\0\x14\x48\x01", "203.0.113.7"),
                # With the next keepalive it moves
                ("127.0.0.1", AIO_TEXT + b"SET_IP#203.0.113.7#%KEEPALIVE#%", "203.0.113.7"),
                ("127.0.0.1", b"SET_IP#203.0.113.7#%13#N [1/2]#D#2#%13#N#D#127.0.0.1#27010#%",
                 "203.0.113.7"),
                ("127.0.0.1", b"SET_IP#fe80::1%eth0#%" + AIO_TEXT, "198.51.100.1"),
                ("192.168.1.5", AIO_TEXT, "198.51.100.2")):
            aio = AioWorld(server__public_address="198.51.100.1",
                           **{"address_map.192.168.1.5": "198.51.100.2"})
            aio.peer(data, source)
            self.assertEqual(aio.listed("address", "port"), [(address, 27010)], data)

    def test_the_newer_connection_has_the_server(self):
        for publish in AIO_TEXT, AIO_BINARY, AIO_FRAMED:
            aio = AioWorld()
            old, new = aio.peer(publish), aio.peer(publish)
            feed(old, b"KEEPALIVE#%" if publish is AIO_TEXT else b"")       # that takes nothing
            self.assertEqual((old.kept, new.kept), (False, True))
            old.closed(2.0)
            self.assertEqual(aio.listed("port"), [(27010,)])
            self.assertEqual(len(aio.poller.targets), publish is AIO_FRAMED)
            new.closed(3.0)
            self.assertEqual((aio.registry.total, aio.room.sessions, aio.poller.targets),
                             (0, {}, {}))
        feed(aio.peer(AIO_TEXT), b"13#M#D#27011#%")             # it has another port now
        aio.peer(hexa("03000000 03 8369"))                      # this does not say its name
        self.assertEqual(aio.listed("name", "port"), [("M", 27011)])

    def test_refusals(self):
        """(source, what it sends, the answer, what /check says of which port)"""
        aio = AioWorld(server__refuse_names="casino", limits__servers_per_source="1",
                       **{"bans.203.0.113.0/24": "fake players"})
        session = aio.peer(AIO_TEXT, "198.51.100.9")
        for source, data, answer, outcome, port in (
                ("203.0.113.9", AIO_FRAMED, hexa("10000000 06 03 0c00") + b"fake players",
                 "banned", 27010),
                ("198.51.100.8", b"13#Casino royale#D#27010#%", b"", "name", 27010),
                ("198.51.100.9", b"13#N#D#27011#%", b"", "limit", 27011),
                ("198.51.100.8", b"\x0dN\0D\0\0\0\0\0\0", b"", "bad packet", 0x204080)):
            refused = aio.room.session(source, 0.0)
            self.assertEqual(feed(refused, data), answer)
            self.assertEqual((aio.outcome(source, port)[0], refused.kept), (outcome, False), data)
        feed(session, b"13#Casino#D#27010#%")       # the one that is listed stays as it is
        self.assertEqual(aio.listed("source", "name"), [("198.51.100.9", "N")])

    def test_how_long_a_connection_lasts(self):
        """(what it sends at 0, what at 100, when it is still there, when it is not)"""
        keepalive = b"KEEPALIVE#%\n"
        for data, more, there, gone in (
                (b"", b"", 329, 330), (b"13#NAME#", b"", 329, 330),
                (b"12#%\n", b"12#%\n", 429, 430), (AIO_KEEPALIVE, b"", 329, 330),
                (AIO_FRAMED + AIO_KEEPALIVE, b"", 119, 120),
                (AIO_TEXT + keepalive, keepalive, 219, 220),
                (AIO_TEXT + keepalive, b"NEWS#%\n", 119, 120),      # only keepalives keep it
                (AIO_TEXT, b"", 86400, 0), (AIO_BINARY, b"", 86400, 0)):
            aio = AioWorld()
            session = aio.peer(data)
            feed(session, more, now=100.0)
            for now in there, gone:
                session.tick(now)
                self.assertEqual(session.done, now == gone > 0, (data, more))
            self.assertEqual(aio.listed("last_seen"), [(gone,)] * aio.registry.total)
            session.closed(gone)
            self.assertEqual(aio.registry.total, 0)

    def test_malformed_messages(self):
        bomb = zlib.compress(bytes(100 << 20), 9)
        http = b"POST / HTTP/1.1\r\nHost: x\r\n\r\n#%"       # of a browser, with any body
        for data in (
                b"\x80", b"%", b"\0\0\0\0", b"\x16\3\1\2\0", hexa("02000000 09 00"),
                b"\x0c\x0e", b"A" * 9000, b"\x0d" + b"A" * 9000, b"HI#" + b"A" * 9000 + b"#%",
                b"\1\0\xff\0", AIO_KEEPALIVE + bytes(4), hexa("01000000 04 01200000") + bytes(8193),
                b"13#%", b"13#N#D#%", b"13#N#D#1.2.3.4#5#6#%", b"13#N#D#-1#%",
                "13#N#D#२७#%".encode(), b"13#N#D#270100#%", hexa("02000000 03 82"),
                http + AIO_TEXT, hexa("01000002 04"), hexa("08000001 789c636060600000"),
                hexa("05000001 0000000000"), hexa("01000000 04 401f0001") + bomb[:8000],
                AIO_TEXT + b"13#%KEEPALIVE#%"):         # its server leaves
            session = document_world().room.session("203.0.113.9", 0.0)
            with self.subTest(data[:20]):
                tracemalloc.start()
                self.assertRaises(ms.Malformed, feed, session, data, 4096)
                self.assertLess(tracemalloc.get_traced_memory()[1], 200_000)
                tracemalloc.stop()
                session.closed(0.0)
                self.assertEqual((session.registry.total, session.game), (2, "aio"))

    def test_limits(self):
        """(what it sends again and again, how often it may)"""
        for data, most, words in (
                (b"12#%\n", 3, "requests"), (b"HI#%", 5, "messages"), (AIO_FRAMED, 5, "messages")):
            aio = AioWorld(limits__requests="1/3", limits__datagrams="1/5")
            session = aio.peer(data * most)
            self.assertRaisesRegex(ms.Malformed, "too many " + words, feed, session, data)

    def test_query(self):
        """It goes to the source: what the lists show may lead elsewhere from behind the router."""
        aio = AioWorld(**{"address_map.192.168.1.5": "198.51.100.2"})
        peer = "192.168.1.5", 27010
        aio.peer(AIO_FRAMED, peer[0])
        self.assertEqual(aio.listed("name"), [("198.51.100.2:27010",)])
        self.assertEqual(aio.poller.tick(1.0), [(aio.question, peer)])
        tracemalloc.start()
        for bad in aio.wrong_answers:
            self.assertRaises(ms.Malformed, aio.poller.datagram, bad, peer, 1.0)
        self.assertLess(tracemalloc.get_traced_memory()[1], 200_000)
        tracemalloc.stop()
        aio.poller.datagram(aio.answer, peer, 1.04)
        for now in range(30, 600):              # silent from now on; its connection is there
            aio.poller.tick(float(now))
        self.assertEqual(aio.listed(*aio.answered, "address", "ping_ms", "verified"),
                         [(*aio.answered.values(), "198.51.100.2", 40, "connection")])
        self.assertEqual(aio.outcome(peer[0]), ("silent", "no answer from UDP port 27010"))

    def test_names_in_answers(self):
        """(name and description in the answer, as they are listed)"""
        for source, name, description, listed in (
                ("203.0.113.9", "", "", ("203.0.113.9:27010", "", 65535)),
                ("127.0.0.1", "", "", ("203.0.113.7:27010", "", 65535)),        # as it claims
                ("203.0.113.9", "EVIL", "d", ("203.0.113.9:27010", "", 0)),
                ("203.0.113.9", "n" * 600, "é" * 600, ("n" * 128, "é" * 512, 65535))):
            aio = AioWorld(server__refuse_names="(?i)evil")
            session = aio.room.session(source, 0.0)
            session.claim_address(b"203.0.113.7")
            feed(session, AIO_FRAMED)
            aio.poller.tick(1.0)
            texts = ms.aio_string16(name) + ms.aio_string16(description)
            packet = zlib.compress(b"\0" + texts + struct.pack("<IIH", 1 << 31, 70000, 7))
            with contextlib.suppress(ms.Malformed):
                aio.poller.datagram(packet, (source, 27010), 1.0)
            self.assertEqual(aio.listed("name", "description", "players"), [listed])

    def test_news(self):
        """(file, setting, as text, framed)"""
        aio = AioWorld()
        for file, setting, text, framed in (
                ("", "old", "old", "old"),
                ("\n one \n two % # \n", "old", "one \n two <percent> <num>", "one \n two % #"),
                ("€" * 40000, "", "€" * 16000, "€" * 16000)):
            settings = settings_of({"aio__news": setting})
            settings.contents["aio.news_file"] = file
            aio.room.read(settings)
            self.assertEqual(aio.ask(b"NEWS#%"), b"%NEWS#" + text.encode() + b"#%")
            self.assertEqual(ms.aio_payload(aio.ask(hexa("01000000 01")), 1 << 16),
                             b"\1" + ms.aio_string16(framed))

    def test_servers_that_are_listed_again(self):
        """At the next keepalive or publish, once its address or a ban has changed, or the newer
        connection that had it has ended."""
        text = b"13#K [3/9]#D#2#%\n"
        for data, again in ((text, b"KEEPALIVE#%\n"), (text, text),
                            (hexa("03000000 03 0200"), AIO_KEEPALIVE)):
            aio = AioWorld()
            session = aio.peer(data, "127.0.0.1")
            for settings, places in (
                    ({"server__public_address": "203.0.113.5"}, [("203.0.113.5", 2)]),
                    ({"bans.127.0.0.1": "test"}, []), ({}, [("127.0.0.1", 2)])):
                reload(aio.program, aio.room, **settings)
                self.assertEqual(aio.registry.total, 0)
                session.tick(1.0)
                feed(session, again, now=1.0)
                for event, server in changes_of(aio.registry):  # the program reads them later
                    if event == "gone":
                        aio.room.gone(server)
                self.assertEqual((aio.listed("address", "port"), session.kept),
                                 (places, bool(places)))
                is_polled = places and session.dialect is ms.AIO_FRAMED
                self.assertEqual(len(aio.poller.targets), bool(is_polled))
        first, second = aio.peer(b"13#J#D#1#%13#K#D#2#%\n"), aio.peer(b"13#K#D#2#%\n")
        second.closed(2.0)
        self.assertFalse(first.kept)
        feed(first, b"KEEPALIVE#%\n", now=3.0)
        self.assertTrue(first.kept)

    def test_a_network_has_an_eighth_of_the_connections(self):
        for address, exempt, listed in (
                ("2001:db8:1:%x::1", "", 2), ("203.0.113.9", "", 2), ("203.0.113.%d", "", 3),
                ("2001:db8:1:%x::1", "2001:db8:1::/48", 3)):
            aio = AioWorld(limits__connections_total="32", limits__exempt=exempt)
            first, *_, last = [
                aio.room.session(address % number if "%" in address else address, 0.0)
                for number in range(3)]
            for port, session in enumerate((first, _[0], last), 1):
                feed(session, b"13#J#D#%d#%%" % port)
            self.assertEqual(len(aio.listed("address", "port")), listed, address)
            feed(aio.room.session("198.51.100.9", 0.0), b"13#J#D#9#%")
            self.assertEqual(len(aio.listed("address", "port")), listed + 1, address)
            if listed == 2:
                self.assertEqual(aio.outcome(last.address, 3), (
                    "limit", "this master keeps connections to at most 2 servers of one network"))
            first.closed(1.0)
            feed(last, b"13#J#D#3#%")
            self.assertEqual(len(aio.listed("address", "port")), 3, address)
            self.assertEqual(aio.room.shares.total, len(aio.room.sessions))

    def test_servers_leave_connections_to_others(self):
        """Half of all connections; a listed server never has to make room for a new one."""
        aio = AioWorld(limits__connections_total="8")
        first, *_, last = sessions = [
            aio.room.session("198.51.100.%d" % number, 0.0) for number in range(5)]
        self.assertEqual([feed(session, AIO_FRAMED)[4:6] for session in sessions],
                         [AIO_DONE[4:]] * 4 + [hexa("0603")])
        self.assertEqual(aio.outcome("198.51.100.4"), (
            "limit", "this master keeps connections to at most 4 servers"))
        self.assertEqual(feed(first, AIO_FRAMED), AIO_DONE)
        first.closed(1.0)
        self.assertEqual(feed(last, AIO_FRAMED), AIO_DONE)


class AioTools(unittest.TestCase):
    """What `announce` and `list` say to a master, whose words come byte by byte."""

    @staticmethod
    def conversation(dialect, server=None):
        """One that has begun, and its first step; without a server that of `list`."""
        room = ms.Aio()
        room.dialect = dialect
        conversation = room.announce(server) if server else room.fetch()
        return conversation, next(conversation)

    @staticmethod
    def server(name="court", version="", **fields):
        return ms.Server("aio", "", 27010, "", 0.0, math.inf, name, version=version, **fields)

    @staticmethod
    def steps(conversation, data):
        """What a conversation does after each of these bytes."""
        return [conversation.send(data[at:at + 1]) for at in range(len(data))]

    def test_published_with_each_keepalive(self):
        """A text master has no word for a refusal, which may end. One that is silent has gone."""
        text = AIO_GREETING + b"%SUCCESS#13#%", b"KEEPALIVE#%\n", b"%SUCCESS#KEEPALIVE#%"
        framed = AIO_GREETING + AIO_DONE, AIO_KEEPALIVE, hexa("02000000 05 04")
        for dialect, fields, published, (confirmation, alive, answer) in (
                ("text", {"name": "best AIO server", "description": "no #1 content"},
                 b"13#best AIO server#no <num>1 content#27010#%\n", text),
                ("text", {"max_players": 16}, b"13#court [0/16]##27010#%\n", text),
                ("text", {"name": "%50%", "description": "#"}, b"13#50%#<num>#27010#%\n", text),
                ("framed", {}, AIO_FRAMED, framed)):
            conversation, step = self.conversation(dialect, self.server(**fields))
            self.assertEqual(step, ms.Send(published, 30.0))
            for words in confirmation, answer, confirmation:
                confirms = words is confirmation
                steps = [step for step in self.steps(conversation, words) if step != ms.Send()]
                self.assertEqual(steps, [ms.Send(state="announced", accepted=True)] * confirms)
                step = conversation.send(None)
                self.assertEqual(step[:2], (alive + published, 30.0))
                self.assertEqual("does not confirm" in step.state, not confirms)
            self.assertRaisesRegex(ConnectionError, "fallen silent", conversation.send, None)

    def test_refused_by_a_frame(self):
        for frame, words in (
                (hexa("0a000000 06 03 0600") + b"banned", "^refused: banned$"),
                (hexa("04000000 06 03 0000"), "^refused: no reason given$")):
            conversation, _ = self.conversation("framed", self.server())
            with self.assertRaisesRegex(ms.MasterRefused, words):
                self.steps(conversation, AIO_GREETING + frame)

    def test_queries_on_the_game_port(self):
        room = ms.Aio()
        for version, number in (("7", "0700"), ("\u00b2", "0000"), ("70000", "ffff")):
            server = self.server("né", version, players=3, max_players=16, description="d")
            self.assertEqual(zlib.decompress(room.answer(server, b"\0")), hexa(
                "00 0300 6ec3a9 0100 64 03000000 10000000" + number))
        for query in (b"", b"\1", b"\0\0"):
            self.assertRaises(ms.Malformed, room.answer, server, query)

    def fetch(self, dialect, data):
        conversation, _ = self.conversation(dialect)
        try:
            self.steps(conversation, AIO_GREETING + data)
            conversation.send(b"")
        except StopIteration as stop:
            return stop.value

    def test_fetched_lists(self):
        court = {"name": "A#1", "description": "50% off", "address": "203.0.113.9", "port": 27010}
        text = b"A<num>1#50<percent> off#203.0.113.9#27010#"
        framed = [{"address": "190.123.69.69", "port": 27010},
                  {"address": "37.192.51.67", "port": 27010}]
        packed = zlib.compress(AIO_FRAMED_LIST[4:])
        bomb = zlib.compress(b"\2\0\0" + bytes(97))
        for dialect, data, servers in (
                ("text", b"%1#12#%%1#abc12#%%12#" + text * 2 + b"%", [court] * 2),  # the twelfth
                ("text", b"12#No servers currently online :pepe:#There are none#127.0.0.1#27010#%",
                 []),
                ("text", b"12#%", []), ("framed", AIO_FRAMED_LIST, framed),
                ("framed", bytes([len(packed), 0, 0, 1]) + packed, framed)):
            self.assertEqual(self.fetch(dialect, data), servers)
        for dialect, data in (
                *(("text", b"12#Court#D#203.0.113.9#%s#%%" % port)
                  for port in (b"port", b"", b"-1", b"70000", b"123456")),
                ("text", b""), ("text", b"12#" + b"S##203.0.113.9#5#" * 3 + b"%"),
                ("framed", b""), ("framed", AIO_GREETING), ("framed", hexa("00000000")),
                ("framed", AIO_FRAMED_LIST[:-1]), ("framed", hexa("03000000 020100")),
                ("framed", hexa("0a000000 020100 05") + b"1.2.3\1"),
                # More than two of the longest entries have
                ("framed", hexa("64000000 020000") + bytes(97)),
                ("framed", bytes([len(bomb), 0, 0, 1]) + bomb)):
            with mock.patch.object(ms, "LIST_SERVERS", 2):
                self.assertRaises(ms.Malformed, self.fetch, dialect, data)


# --- Quake III -----------------------------------------------------------------------------------

OUT = hexa("ffffffff")                  # every packet begins so
HEARTBEAT = OUT + b"heartbeat QuakeArena-1\n"
# Captured, as PROTOCOLS.md has it (section 7); the challenge is put in where %s stands
OPENARENA_INFO = (
    OUT + b"infoResponse\n" + rb"\voip\opus\g_needpass\0\pure\1\gametype\0\sv_maxclients\8"
    rb"\g_humanplayers\0\clients\0\mapname\oa_dm1\hostname\^1Red ^7Test  q \protocol\71"
    rb"\gamename\Quake3Arena\challenge\%s")
# Captured from Debian's openarena-server with three bots, which have been added by
# `addbot sarge 4 free 0 "^1Red^7 Bot"` and the like. Its gamename is that of the infoResponse not
OPENARENA_STATUS = (
    OUT + b"statusResponse\n" + rb"\challenge\%s\com_protocol\71\sv_hostname\^1Red ^7Test"
    rb"\g_lms_mode\0\elimination_roundtime\120\g_delagHitscan\0\g_voteMinFraglimit\0"
    rb"\g_voteMaxFraglimit\0\g_voteMinTimelimit\0\g_voteMaxTimelimit\1000"
    rb"\g_voteGametypes\/0/1/3/4/5/6/7/8/9/10/11/12/\g_allowVote\1\g_doWarmup\0\capturelimit\8"
    rb"\videoflags\7\g_maxGameClients\0\sv_floodProtect\1\sv_maxPing\0\sv_minPing\0\sv_dlRate\100"
    rb"\sv_maxRate\0\sv_minRate\0\sv_maxclients\8\timelimit\0\fraglimit\20\dmflags\0"
    rb"\version\ioq3 1.36+u20221123.70d07d9+dfsg-1/Debian linux-x86_64 Jan  8 2023"
    rb"\com_gamename\Quake3Arena\g_gametype\0\mapname\oa_dm1\sv_privateClients\0"
    rb"\sv_allowDownload\0\bot_minplayers\0\gamename\baseoa\elimflags\0\voteflags\767\g_needpass\0"
    rb"\g_obeliskRespawnDelay\10\g_enableDust\0\g_enableBreath\0\g_rockets\0\g_instantgib\0"
    rb"\g_altExcellent\0\g_timestamp\2026-11-27 10:35:24"
    b'\n2 0 "^1Red^7 Bot"\n3 0 "Major"\n0 0 "M.ller x"\n')
QUAKE3_LIST_HEAD, QUAKE3_EXT_HEAD = OUT + b"getserversResponse", OUT + b"getserversExtResponse"
QUAKE3_EOT = b"\\EOT" + bytes(3)
OPENARENA_SERVER = "/usr/games/openarena-server"


def info(challenge=b"%s", **changed):
    """The captured infoResponse with other values; None: without that key."""
    data = OPENARENA_INFO
    for key, value in changed.items():
        new = b"" if value is None else b"\\%s\\%s" % (key.encode(), value)
        if b"\\%s\\" % key.encode() not in data:
            data = data.replace(b"\\challenge", new + b"\\challenge")
        data = re.sub(rb"\\%s\\[^\\]*" % key.encode(), lambda match: new, data)
    return data.replace(b"%s", challenge)


class Quake3World:
    """The captured packets, and a server that announces itself, answers, is listed."""

    game = ms.Quake3
    place = "203.0.113.9", 36960
    nonce, question = 0xabcdef01, OUT + b"getinfo abcdef01"
    answer = info(b"abcdef01")
    listed = {"name": "Red Test  q", "map": "oa_dm1", "mode": "0", "version": "71", "players": 0,
              "max_players": 8, "details": {"gamename": "Quake3Arena", "people": "0"}}
    wrong_answers = (
        b"", OUT, b"\xff", info(b"abcdef02"), info(b"abcdef01")[1:], info(b"abcdef01 "),
        OUT + b"statusResponse\n" + answer[17:], answer + b"\\" + b"x" * 2048)
    # What a player asks, and the list that he gets
    list_question = OUT + b"getservers 71 empty full\n"
    list_answer = QUAKE3_LIST_HEAD + b"\\" + hexa("cb007109 9060") + QUAKE3_EOT
    # Datagrams of a list, their servers, and whether they are the last ones
    list_packets = (
        (list_answer, [("203.0.113.9", 36960)], True),
        (QUAKE3_LIST_HEAD + b"\\" + hexa("454f5400 0001"), [("69.79.84.0", 1)], False),
        (QUAKE3_EXT_HEAD + QUAKE3_EOT, [], True),
        (QUAKE3_LIST_HEAD, [], False),
        (QUAKE3_EXT_HEAD + b"\\" + hexa("7f000001 9060") + b"/"
         + hexa("20010db8 00000000 00000000 00000009 000a"),
         [("127.0.0.1", 36960), ("2001:db8::9", 10)], False))

    def reply(self, question):
        """The game server: repeat the challenge of the getinfo."""
        return info(question[12:])

    def announce(self, room, now, place=place):
        for getinfo, peer in room.datagram(HEARTBEAT, place, now):
            room.datagram(self.reply(getinfo), peer, now)


class Quake3Test(unittest.TestCase):
    world = Quake3World()
    place = world.place

    def setUp(self):
        self.start()

    def start(self, **settings):
        self.program = make_core(**settings)
        self.registry, self.poller = self.program.registry, self.program.poller
        self.quake3 = ms.Quake3(self.program)
        self.program.rooms["quake3"] = self.quake3

    def reload(self, **settings):
        self.program.settings = settings_of(settings)
        self.registry.apply_rules(self.program.settings)
        self.quake3.read(self.program.settings)

    def send(self, data, now=0.0, place=place):
        """The datagrams that come back, or why there are none."""
        try:
            replies = self.quake3.datagram(data, place, now)
        except (ms.Malformed, ms.Refused, ms.Limited) as error:
            self.assertIn(getattr(error, "port", place[1]), (place[1], 0))
            return getattr(error, "outcome", type(error).__name__) + ": " + str(error)
        self.assertEqual({to for _, to in replies} - {place}, set())
        return [reply for reply, _ in replies]

    def challenge(self, tag=b"QuakeArena-1", now=0.0, place=place):
        getinfo, = self.send(OUT + b"heartbeat %s\n" % tag, now, place)
        self.assertRegex(getinfo, rb'\A\xff{4}getinfo [!#-$&-:<-\[\]-~]+\Z')
        return getinfo[12:]

    def shake(self, tag=b"QuakeArena-1", now=0.0, place=place, **changed):
        """A server sends a heartbeat and answers; what is listed there then, or why it is not."""
        said = self.send(info(self.challenge(tag, now, place), **changed), now, place)
        for server in self.registry.servers():
            if (server.source, server.port) == place:
                return server
        return said or self.outcome(place)

    def outcome(self, place=place):
        return ": ".join(self.registry.outcome(place[0], "quake3", place[1])[1:])

    def ask(self, question, now=0.0, place=("192.0.2.1", 5000)):
        """The ports in the list, sorted; the whole of it is checked. No limit counts."""
        self.registry.rules.read(self.program.settings)
        packets = self.send(OUT + question, now, place)
        head = QUAKE3_EXT_HEAD if b"Ext" in question else QUAKE3_LIST_HEAD
        ports = []
        for number, packet in enumerate(packets, 1):
            self.assertLessEqual(len(packet), 1400)
            self.assertTrue(packet.startswith(head))
            self.assertEqual(packet.endswith(QUAKE3_EOT), number == len(packets))
            servers, is_last = ms.read_quake3_packet(packet)
            self.assertEqual(is_last, number == len(packets))
            ports += [server["port"] for server in servers]
        return sorted(ports)

    def poll(self, seconds, answer=None):
        """Polls of these seconds, each answered with what `answer(challenge)` gives. How many."""
        count = 0
        for now in seconds:
            for query, place in self.poller.tick(float(now)):
                self.assertEqual(query[:12], OUT + b"getinfo ")
                count += 1
                if answer:
                    with contextlib.suppress(ms.Malformed):
                        self.poller.datagram(answer(query[12:]), place, now + 0.05)
        return count

    def test_the_capture_is_listed(self):
        challenge = self.challenge()
        self.assertEqual((self.registry.total, self.outcome()), (0, "announced: "))
        self.assertLessEqual(len(OUT + b"getinfo " + challenge), len(OUT + b"heartbeat Warsow\n"))
        self.assertEqual(self.send(info(challenge), 0.1), [])
        server, = self.registry.servers()
        self.assertEqual((server.lifetime, server.last_seen, self.quake3.mode_text(server)),
                         (900.0, 0.1, "free for all"))

    def test_an_answer_that_nothing_tells_the_game_of(self):
        """The poller does not take it, and `ping`, whose room has no master, shows it."""
        nameless = info(b"abcdef01", gamename=None, protocol=b"99")
        target = ms.Target(self.quake3, *self.place, ms.ANNOUNCED)
        target.nonce = self.world.nonce
        self.assertRaisesRegex(ms.Malformed, "gamename", self.quake3.read_answer, target, nameless)
        self.assertEqual(ms.Quake3().read_answer(target, nameless)["name"], "Red Test  q")

    def test_the_list_of_another_master(self):
        for data, servers, is_last in self.world.list_packets:
            found = [{"address": address, "port": port} for address, port in servers]
            self.assertEqual(ms.read_quake3_packet(data), (found, is_last))
        *_, (long, _, _) = self.world.list_packets
        for wrong in (b"", OUT, long[1:], long[:-1], long[:-18], long + b"x", long + b"\\EOT"):
            self.assertRaises(ms.Malformed, ms.read_quake3_packet, wrong)
        sent, servers = converse(ms.Quake3().fetch("Xonotic", "3"), None, long,
                                 self.world.list_answer)
        question = OUT + b"getserversExt Xonotic 3 empty full", 2.0
        self.assertEqual([(step.data, step.wait_s) for step in sent],
                         [question, question, (b"", ms.LIST_S)])
        self.assertEqual([server["port"] for server in servers], [36960, 10, 36960])
        for error, *replies in (
                (TimeoutError, None, None, None), (TimeoutError, long, None),
                (ms.Malformed, long, b"x"), (ms.Malformed, *[long] * 5)):
            with mock.patch.object(ms, "LIST_SERVERS", 9), self.assertRaises(error):
                converse(ms.Quake3().fetch(), *replies)

    def test_fields(self):
        for number, (changed, name, value) in enumerate((
                ({"hostname": b"^x0f3S^9m^1al^l ^xzz"}, "name", "Smal^l ^xzz"),
                ({"hostname": b"\xe9t\xe9"}, "name", "\xe9t\xe9"),
                ({"hostname": "漢字".encode()}, "name", "漢字"),
                ({"hostname": None}, "name", "198.51.100.7:1003"),
                ({"protocol": b"0"}, "version", "0"), ({"protocol": b"-5"}, "version", "-5"),
                ({"gametype": b"CA-x"}, "mode", "CA-x"), ({"gametype": None}, "mode", "0"),
                ({"gametype": b"7" * 256}, "mode", "0"), ({"mapname": b"m" * 256}, "map", ""),
                ({"mapname": b"m" * 255}, "map", "m" * 128), ({"k" * 256: b"1"}, "players", 0),
                ({"clients": b"9"}, "players", 8), ({"clients": b"-1"}, "players", 0),
                ({"clients": b"3", "g_humanplayers": None}, "players", 3))):
            server = self.shake(place=("198.51.100.7", 1000 + number), **changed)
            self.assertEqual(getattr(server, name), value, changed)
        # A value may read like a key, and of a key that comes twice the last value counts
        self.send(info(self.challenge() + rb"\hostname\challenge\protocol\70\protocol\71",
                       hostname=None, protocol=None))
        server = self.registry.get("openarena", *self.place)
        self.assertEqual((server.name, server.version), ("challenge", "71"))

    def test_refused_servers_and_the_reasons(self):
        self.start(quake3__games="!Nexuiz", quake3__tags="Warsow = Warsow", games__mine="Mine",
                   server__refuse_names="badword", **{"bans.198.51.100.0/24": "cheats"})
        for changed, why in (
                ({"clients": None}, "WrongAnswer: clients: ''"),
                ({"clients": b"x"}, "WrongAnswer: clients: 'x'"),
                ({"sv_maxclients": b"0"}, "WrongAnswer: sv_maxclients: '0'"),
                ({"sv_maxclients": b"-2"}, "WrongAnswer: sv_maxclients: '-2'"),
                ({"protocol": b"6.8"}, "WrongAnswer: protocol: '6.8'"),
                ({"protocol": b"7" * 256}, "WrongAnswer: protocol: ''"),
                ({"gametype": b"a b"}, "WrongAnswer: gametype: 'a b'"),
                ({"x": b"y" * 2048}, "Malformed: length: more than 2047 bytes"),
                ({"gamename": None},
                 "WrongAnswer: gamename: missing, and protocol 71 does not belong to a known game"),
                ({"gamename": b" ", "protocol": b"68"}, "WrongAnswer: gamename: ''"),
                ({"gamename": b"a\xa0b"}, "WrongAnswer: gamename: 'a b'"),
                ({"gamename": b"Nexuiz"}, "game: 'Nexuiz' is not listed here"),
                ({"gamename": b"IceBall"}, "game: 'IceBall' is not listed here"),
                ({"gamename": b"mine"}, "game: 'mine' is not listed here"),
                ({"hostname": b"b^1adword"}, "name: names matching badword are not listed here")):
            self.assertEqual(self.shake(b"DarkPlaces", **changed), why)
            self.assertEqual(self.poller.targets, {}, "an answer that lists nothing leaves nothing")
        self.assertEqual(self.send(HEARTBEAT, place=("198.51.100.1", 1)), "banned: cheats")
        self.assertIn("heartbeat tag 'Unknown-1'", self.send(OUT + b"heartbeat Unknown-1\n"))
        for data in (b"heartbeat QuakeArena-1\n", OUT + b"heartbeat \n", OUT, b"",
                     OUT + b"infoResponse\n", OUT + b"getserversResponse\\"):
            self.assertIn("Malformed", self.send(data), data)
        self.assertEqual(self.registry.total, 0)

    def test_games_by_gamename_then_by_protocol_then_by_tag(self):
        self.start(quake3__tags="Warsow = Warsow\nQFusion = Warsow")
        for port, (tag, gamename, protocol, game) in enumerate((
                (b"Wolfenstein-1", b"Quake3Arena", b"68", "quake3arena"),
                (b"QuakeArena-1", b"Quake3Arena", b"71", "openarena"),
                (b"EnemyTerritory-1", b"et", b"84", "et"), (b"Warsow", b"Xonotic", b"3", "xonotic"),
                (b"QFusion", b"Warsow", b"23", "warsow"), (b"Warsow", None, b"22", "warsow"),
                (b"QuakeArena-1", None, b"60", "wolfmp"), (b"DarkPlaces", None, b"50", "wolfmp"),
                (b"DarkPlaces", None, b"67", "quake3arena"), (b"Warsow", None, b"84", "et"),
                (b"Wolfenstein-1", None, b"85", "wolfmp"),
                (b"DarkPlaces", b"My_Game.2/\xc3\xa9!", b"3", "my_game.2---"),
                (b"DarkPlaces", b"g" * 40, b"3", "g" * 32)), 1000):
            server = self.shake(tag, place=(self.place[0], port), gamename=gamename,
                                protocol=protocol)
            self.assertEqual((server.game, self.quake3.owns(server.game, server.details)),
                             (game, True))

    def test_the_only_games(self):
        self.start(quake3__games="Xonotic, openarena")
        for gamename, listed in (
                (b"Quake3Arena", ["openarena"]), (b"xonotic", ["xonotic"]), (b"Other", []),
                (b"Quake3Arena", ["openarena"])):
            self.shake(b"DarkPlaces", gamename=gamename)
            self.assertEqual([server.game for server in self.registry.servers()], listed)
        self.reload(quake3__games="!openarena")
        self.poll([1], info)
        self.assertEqual((self.registry.total, self.poller.targets, self.outcome()),
                         (0, {}, "game: 'Quake3Arena' is not listed here"))

    def test_new_games(self):
        """At most 64, and of one source 4; of an IPv6 /48 twice as many."""
        self.start(quake3__tags="Q = Tagged", limits__exempt="192.0.2.0/24")

        def bring(address, port, game):
            return self.shake(b"DarkPlaces", place=(address, port), gamename=game)

        for source, address, most, why in (
                ("a", lambda number: "203.0.113.9", 4, "at most 4 new games of one source"),
                ("b", lambda number: "198.51.100.7", 4, "at most 4 new games of one source"),
                ("c", lambda number: "2001:db8::%x" % (number + 1), 4, "at most 4 new games"),
                ("d", lambda number: "2001:db8:1:%x::1" % number, 8, "at most 8 new games"),
                ("e", lambda number: "192.0.2.1", 64 - 3 * 4 - 8, "at most 64 games")):
            for number in range(most + 1):
                server = bring(address(number), 1 + number, b"%s-%d" % (source.encode(), number))
                if number < most:
                    self.assertEqual(server.game, "%s-%d" % (source, number))
            self.assertIn("limit: " + why, server)
        # Neither limit is for games of its neighbours, nor for those that have a name here
        for number, game in enumerate((b"a-0", b"A-1", b"Xonotic", b"Tagged", b"wolfmp"), 20):
            self.assertEqual(bring("198.51.100.7", number, game).name, "Red Test  q")
        self.registry.remove_own(self.registry.get("a-2", "203.0.113.9", 3))
        self.assertEqual(bring("203.0.113.9", 30, b"new").game, "new")
        self.start(quake3__games="g0, g1, g2, g3, g4, g5")
        for number in range(6):
            self.assertEqual(bring("203.0.113.9", 1 + number, b"g%d" % number).port, 1 + number)

    def test_the_first_title_of_a_game_stays(self):
        first = self.shake(b"DarkPlaces", gamename=b"Smokin-Guns")
        titles = {"smokin-guns": "Smokin-Guns"}
        for title in "Smokin-Guns", "smokin-guns":          # the first, and if there is none before
            second = self.shake(b"DarkPlaces", place=("198.51.100.7", 1),
                                gamename="sMoKiN☠gUnS".encode())
            self.registry.remove_own(first)
            self.assertEqual(self.registry.titles, {second.game: title}, titles)
            self.registry.remove_own(second)
            self.assertEqual((self.registry.titles, self.registry.title_sources), ({}, {}))

    def test_a_forged_heartbeat_of_another_game_changes_nothing(self):
        """It comes when the server's info has changed, before the next poll."""
        self.start(quake3__tags="Warsow = Warsow")
        for tag, told, game in (
                (b"QuakeArena-1", {}, "openarena"),
                (b"QuakeArena-1", {"gamename": None, "protocol": b"99"}, "quake3arena"),
                (b"Warsow", {"gamename": None, "protocol": b"22"}, "warsow"),
                (b"DarkPlaces", {"gamename": b"Xonotic", "protocol": b"3"}, "xonotic")):
            for forged in b"Wolfenstein-1", b"DarkPlaces", b"QuakeArena-1", b"Warsow":
                server = self.shake(tag, **told)
                self.poll([1], lambda challenge: info(challenge, **told))
                changes_of(self.registry)
                self.assertIs(self.shake(forged, 40.0, mapname=b"new", **told), server, forged)
                self.poll([41], lambda challenge: info(challenge, **told))
                self.assertIs(self.shake(tag, 42.0, **told), server)
                self.assertEqual((server.game, server.map, {*changes_of(self.registry)}),
                                 (game, "oa_dm1", {("changed", server)}), (tag, forged))
                self.registry.remove_own(server)

    def test_anonymous_is_every_game_of_a_tag_whatever_tag_came(self):
        for port, (tag, gamename) in enumerate((
                (b"DarkPlaces", b"Quake3Arena"), (b"QuakeArena-1", b"wolfmp"),
                (b"QuakeArena-1", b"Warsow"), (b"DarkPlaces", b"Xonotic")), 1):
            self.shake(tag, place=(self.place[0], port), protocol=b"9", gamename=gamename)
        for now, (tags, ports) in enumerate((
                ("", [1, 2]), ("Q=Warsow\nX = Xonotic", [1, 2, 3, 4]), ("Q = Warsow", [1, 2, 3]),
                ("", [1, 2])), 1):
            self.reload(quake3__tags=tags)
            self.assertEqual(self.ask(b"getservers 9 empty", now), ports)
            self.assertEqual(self.ask(b"getservers Warsow 9 empty", now), [3])

    def test_a_heartbeat_begins_a_new_poll(self):
        """The server was away, and is back while a poll is open or before the next one."""
        for due, silent_until, missed in (2.0, 4.0, 0), (30.0, 40.0, 1), (30.0, 70.0, 2), (
                30.0, 72.0, 2):
            self.start()
            self.shake()
            target = self.poller.find(self.quake3, *self.place)
            target.phase, target.due = 0.0, due             # polled at 30, 60, 90
            self.poll(second / 2 for second in range(2, int(silent_until * 2) + 1))
            now = silent_until + 0.5
            self.assertEqual((target.missed, self.registry.total), (missed, 1))
            self.assertEqual([len(self.send(HEARTBEAT, now)) for _ in range(2)], [1, 0])
            self.assertEqual(self.poll([now + 1.0, now + 2.0]), 2)
            self.assertEqual((self.poll([now + 3.0], info), self.poll([now + 4.0])), (1, 0))
            self.assertEqual((target.missed, self.registry.total), (0, 1))

    def test_only_the_right_challenge_from_the_same_place_in_time(self):
        good = info(self.challenge(now=10.0))
        for data, now, place in (
                *((info(wrong), 10.0, self.place) for wrong in (
                    b"AAAAAAAA", b"", b"A", b"\xff" * 8)),
                (good, 10.0, ("203.0.113.9", 36961)), (good, 10.0, ("203.0.113.8", 36960)),
                (good[:-1], 10.0, self.place), (good + b"x", 10.0, self.place),
                (info(self.challenge(now=10.0)), 14.1, self.place)):
            self.assertIn("no infoResponse to a getinfo of", self.send(data, now, place))
        server = self.shake(now=20.0)
        self.assertEqual(self.send(info(self.challenge(now=26.0)), 27.9), [])
        before = [getattr(server, name) for name in ms.Server.__slots__]
        for forged in info(b"AAAAAAAA"), info(b"AAAAAAAA", hostname=b"x"), info(b"-" * 8):
            self.assertIn("Malformed", self.send(forged, 28.0))
        self.assertEqual([getattr(server, name) for name in ms.Server.__slots__], before)

    def test_a_listed_server_that_changes_or_repeats_itself(self):
        server = self.shake()
        generation = self.registry.generation
        same = info(self.challenge(now=300.0))
        for end in (lambda: self.registry.update(server, {"map": "x"}), self.reload):
            with mock.patch.object(ms, "quake3_attributes", side_effect=ZeroDivisionError):
                self.assertEqual(self.send(same, 301.0), [])
                self.assertEqual((server.last_seen, self.registry.generation), (301.0, generation))
                end()                                       # now it is read again
                self.assertRaises(ZeroDivisionError, self.send, same, 301.0)
            self.send(same, 300.0)
            self.assertEqual((server.map, server.last_seen), ("oa_dm1", 300.0))
            generation = self.registry.generation
        for now, told, game in (                            # by a poll, then by a heartbeat
                (310.0, {"gamename": b"Xonotic"}, "xonotic"),
                (320.0, {"gamename": None, "protocol": b"99"}, "xonotic"),      # none is told
                (330.0, {"gamename": None, "protocol": b"60", "clients": b"5"}, "wolfmp"),
                (340.0, {"gamename": b"Quake3Arena", "protocol": b"71"}, "openarena")):
            self.poll([now], lambda challenge: info(challenge, **told))
            self.shake(b"EnemyTerritory-1", now + 2.0, **told)
            server, = self.registry.servers()
            self.assertEqual((server.game, server.players), (game, 5 if "clients" in told else 0))
        for now, total in ((1241.9, 1), (1242.0, 0)):
            self.registry.expire(now)
            self.assertEqual(self.registry.total, total)
        self.poll([1243])
        self.assertEqual((self.poller.targets, self.registry.titles), ({}, {}))

    def test_a_farewell(self):
        for tag in b"QuakeArena-1", b"WolfFlatline-1", b"ETFlatline-1":
            self.start()
            self.shake()
            self.poll(range(1, 4), info)
            for _ in range(2):
                self.send(OUT + b"heartbeat %s\n" % tag, 60.5)
            self.assertEqual((self.poll([61, 62, 63]), self.registry.total), (3, 1))
            self.assertEqual((self.poll([64]), self.registry.total), (0, 0), tag)

    def test_a_heartbeat_that_is_no_farewell(self):
        """Forged, say, and its flood does not go on to the server."""
        server = self.shake()
        self.poll(range(1, 4), info)
        for second in range(60, 120):
            sent = [self.send(HEARTBEAT, second + 0.5) for _ in range(100)]
            self.assertLessEqual(sum(map(len, sent)), 1)
            self.poll([second + 1.0], info)
        self.send(info(self.challenge(now=130.0)), 130.0)   # or its own answer comes first
        self.poll(range(131, 136))
        self.assertEqual(self.registry.servers(), [server])

    def test_questions(self):
        self.start(quake3__tags="Warsow = Warsow")
        quake, territory, darkplaces = b"QuakeArena-1", b"EnemyTerritory-1", b"DarkPlaces"
        for port, (tag, gamename, protocol, players, further) in enumerate((
                (quake, b"Quake3Arena", b"68", b"1", {}), (quake, b"Quake3Arena", b"68", b"0", {}),
                (quake, b"Quake3Arena", b"68", b"8", {"gametype": b"4"}),
                (quake, b"Quake3Arena", b"71", b"1", {"gametype": b"1"}),
                (territory, b"et", b"84", b"0", {}), (territory, b"et", b"84", b"8", {}),
                (darkplaces, b"0ad", b"68", b"1", {}), (darkplaces, b"1942", b"-3", b"1", {}),
                (b"Warsow", None, b"22", b"1", {}), (quake, b"Quake3Arena", b"68", b"2", {}),
                (darkplaces, "Größe".encode(), b"7", b"1", {})), 1):
            place = "2001:db8::9" if port == 10 else "203.0.113.9", port
            self.shake(tag, place=place, gamename=gamename, protocol=protocol, clients=players,
                       **further)
        for question, ports in (
                (b"getservers 68", [1]), (b"getservers\t68  empty", [1, 2]),
                (b"getservers 68 full", [1, 3]), (b"getservers 68 empty full\n", [1, 2, 3]),
                (b"getservers 68 full ctf", [3]), (b"getservers 68 full gametype=4 x\n", [3]),
                (b"getservers 68 empty full ffa", [1, 2]), (b"getservers 68 full team", []),
                (b"getservers 68 empty full ffa ctf", [3]), (b"getservers 71 tourney", [4]),
                (b"getservers 71 gametype=tourney", []), (b"getservers 84", [5, 6]),
                (b"getservers 68 nonempty fullx ipv6", [1]), (b"getservers et 84", [5, 6]),
                (b"getservers 0ad 68", [7]), (b"getservers Quake3Arena 68", [1]),
                (b"getservers quake3arena 68", []), (b"getservers 22", [9]),
                (b"getservers Warsow 22", [9]), (b"getservers -3", []),
                (b"getserversExt 1942 -3", [8]), (b"getserversExt Quake3Arena 68", [1, 10]),
                (b"getserversExt Quake3Arena 68 ipv4 ipv6 empty full", [1, 2, 3, 10]),
                (b"getserversExt Quake3Arena 68 ipv4", [1]),
                (b"getserversExt Quake3Arena 68 full ipv6", [10]),
                ("getservers Größe 7".encode(), [11]),
                ("getserversExt Größe 7".encode("latin-1"), [11])):
            for _ in range(2):          # made, and kept
                self.assertEqual(self.ask(question), ports, question)
        for question in (b"getservers", b"getservers ", b"getservers 6x", b"getservers et",
                         b"getserversExt 71", b"getserversExt 1942 empty", b"getserversX 71"):
            self.assertIn("Malformed", self.send(OUT + question), question)

    def test_only_the_fields_that_are_used_are_decoded(self):
        """A listed server sends as many infoResponses at once as a batch has, each another one and
        with 460 pairs; and as many with the right number and a wrong value to the poller."""
        self.shake()
        pairs = b"".join(b"\\%c%c\\\xe9" % (0xc0 + number % 60, 0xc0 + number // 60)
                         for number in range(330))
        challenge = self.challenge(now=1.0)
        with mock.patch.object(ms, "decode_legacy", wraps=ms.decode_legacy) as decode:
            for number in range(ms.DRAIN_DATAGRAMS):
                self.send(info(challenge, mapname=b"m%d" % number) + pairs, 1.0)
            self.assertLessEqual(decode.call_count, len(ms.QUAKE3_FIELDS) * ms.DRAIN_DATAGRAMS)
            server, = self.registry.servers()
            self.assertEqual(server.map, "m%d" % (ms.DRAIN_DATAGRAMS - 1))
            decode.reset_mock()
            [(query, peer)] = self.poller.tick(2.0)
            for number in range(ms.DRAIN_DATAGRAMS):
                wrong = info(query[12:], gamename=b"my game %d" % number) + pairs
                self.assertRaises(ms.Malformed, self.poller.datagram, wrong, peer, 2.1)
            self.assertLessEqual(decode.call_count, len(ms.QUAKE3_FIELDS))

    def test_long_lists_and_what_is_kept(self):
        for number in range(1000):
            self.shake(place=("198.18.%d.%d" % divmod(number, 250), number + 1), clients=b"1")
        packets = self.send(OUT + b"getservers 71")
        self.assertEqual((self.ask(b"getservers 71"), len(packets)), ([*range(1, 1001)], 6))
        self.assertIs(self.send(OUT + b"getservers 71 x")[0], packets[0])
        for number in range(100):           # nothing is kept for what nobody has
            for asked in b"x%d 71", b"%d", b"Quake3Arena 71 gametype=x%d":
                self.assertEqual(self.ask(b"getservers " + asked % (1000 + number)), [])
        _, answers = self.quake3.rendered("servers", 0.0)
        self.assertEqual(len(answers), 1)
        with mock.patch.object(ms, "quake3_packets", wraps=ms.quake3_packets) as rendered:
            for number in range(100):       # and no server is looked at
                self.ask(b"getserversExt Quake3Arena 71 gametype=y%d empty full" % number)
        self.assertEqual({len(call[0][1]) for call in rendered.call_args_list}, {0})
        self.registry.remove_own(self.registry.servers()[0])
        self.assertEqual(len(self.ask(b"getservers 71", 10.0)), 999)

    def look(self, now, server):
        """The challenge of the getstatus that the poller's port sends, None if it sends none."""
        self.program.send = mock.Mock()
        self.quake3.looked_at(server, now)
        if not self.program.send.called:
            return None
        [((data, peer), _)] = self.program.send.call_args_list
        self.assertEqual((data[:14], peer), (OUT + b"getstatus ", self.place))
        return data[14:]

    def players(self, server):
        return [(player.name, player.score) for player in self.quake3.players(server)]

    def test_who_plays_is_asked_while_somebody_looks(self):
        """Once in 15 s; half a minute after the last look it is forgotten."""
        server = self.shake()
        self.poll([1.0], info)
        challenge = self.look(10.0, server)
        self.assertEqual((self.players(server), self.look(24.9, server)), ([], None))
        data = OPENARENA_STATUS.replace(b"%s", challenge)
        other = OPENARENA_STATUS.replace(b"%s", b"0" * 8)
        for wrong, place in (
                (OPENARENA_STATUS.replace(b"%s", b""), self.place), (other, self.place),
                (data, ("203.0.113.9", 36961)), (data, ("203.0.113.8", 36960)),
                (data.replace(b"status", b"info"), self.place), (data[:-1] * 3, ("192.0.2.1", 1)),
                (OUT + b"statusResponse\n" + challenge, self.place)):
            with self.assertRaisesRegex(ms.Malformed, "nobody asked for"):
                self.poller.datagram(wrong, place, 25.0)
            self.assertIn("Malformed", self.send(wrong, 25.0, place))
        self.assertEqual(self.players(server), [])
        look = ms.Web(self.program).look

        def found():
            [searched] = ms.searched_texts(look, [server])
            return searched.text
        before = [getattr(server, name) for name in ms.Server.__slots__ if name != "entry_cache"]
        changes_of(self.registry)
        bots = [("Red Bot", 2), ("Major", 3), ("M.ller x", 0)]
        data, now = OPENARENA_STATUS, 25.0
        for told, players in (
                (data, bots), (data[:-2], bots[:2]), (data[:-20], bots[:1]), (data[:-40], []),
                (data.replace(b"3 0 ", b"-7 250 1 "), [bots[0], ("Major", -7), bots[2]]),
                (data.replace(b'Major"', b'Major" 2'), bots),
                (data.replace(b"3 0 ", b"-666 0 "), [bots[0], ("Major", None), bots[2]]),
                (data.replace(b"Major", b"^x0f3'\xe9\\\x1b[1m^9' "),
                 [bots[0], ("'\xe9\\'", 3), bots[2]]),
                (data.replace(b"3 0 ", b"x 0 ") + b'1"x"\n\n1 1 x\n', bots[::2]),
                (data + b'1 1 "x"\n' * 100, bots + [("x", 1)] * 100), (data, bots)):
            server.entry_cache = {}
            told = told.replace(b"%s", challenge)
            self.assertEqual(self.poller.datagram(told, self.place, now), [])
            self.assertEqual((self.players(server), server.entry_cache), (players, None), told)
            with self.assertRaises(ms.Malformed):
                self.poller.datagram(told, self.place, now)         # one answer to a question
            now += 15.0
            challenge = self.look(now, server)
        self.assertIn("major", found())
        self.assertEqual([before, changes_of(self.registry)], [
            [getattr(server, name) for name in ms.Server.__slots__ if name != "entry_cache"], []])
        self.assertRaises(ms.Malformed, self.poller.datagram, told, self.place, now)
        server.entry_cache = {}
        for later, players in (14.9, bots), (29.9, bots), (30.0, []):
            self.quake3.tick(now + later)
            self.assertEqual((self.players(server), len(self.quake3.statuses)),
                             (players, len(players) // 3))
        self.assertIsNone(server.entry_cache)

    def test_an_answer_about_players_is_none_of_a_poll(self):
        """Whichever comes first, each is read, and the query stays open for its own."""
        server = self.shake()
        [(query, place)] = self.poller.tick(1.0)
        told = OPENARENA_STATUS.replace(b"%s", self.look(1.0, server))
        target = self.poller.find(self.quake3, *self.place)
        self.poller.datagram(told, place, 1.1)
        self.assertEqual((len(self.players(server)), target.asked_at, target.trouble), (3, 1.0, ""))
        self.poller.datagram(info(query[12:], mapname=b"x"), place, 1.2)
        self.assertEqual((server.map, len(self.players(server))), ("x", 3))

    def test_noise_in_an_answer_about_players(self):
        server, chance = self.shake(), random.Random(7)
        data = OPENARENA_STATUS.replace(b"%s", self.look(1.0, server))
        for _ in range(2000):
            noisy = bytearray(data)
            for _ in range(chance.randrange(1, 9)):
                at = chance.choice((chance.randrange(len(noisy)), chance.randrange(-60, 0)))
                noisy[at:at + chance.choice((0, 1, 9))] = bytes(
                    chance.choice(b'\n\\" 0-^x\xff\0\x1b') for _ in range(chance.randrange(3)))
            with contextlib.suppress(ms.Malformed):
                self.poller.datagram(bytes(noisy), self.place, 1.1)
            for player in self.quake3.players(server):
                self.assertEqual(player.name, ms.clean(player.name))
            ms.render_players(self.quake3, server)

    def test_requests_over_a_limit(self):
        """A source gets a few lists, and then one now and then; all together get so many bytes."""
        question, asker = OUT + b"getservers 71", ("192.0.2.1", 5)
        for limits, answered, later in (
                ({}, 5, 29), ({"limits__requests": "5/9"}, 2, 33),
                ({"limits__requests": "1/1"}, 1, 29)):
            self.start(**limits)
            answers = [self.send(question, second / 10, asker) != "Limited: "
                       for second in range(300)]
            self.assertEqual(answers[:answered + 1], [True] * answered + [False], limits)
            self.assertAlmostEqual(sum(answers[answered:]), later, delta=2)
        self.start(quake3__tags="Q = Quake3Arena")
        _, most = ms.SURPLUS_BYTES
        self.registry.rules.allow_surplus("quake3", "192.0.2.9", most, 1.0)
        with mock.patch.object(ms, "quake3_packets") as rendered:
            for data in question, OUT + b"heartbeat Q\n":
                self.assertEqual(self.send(data, 1.0, asker), "Limited: ")
        rendered.assert_not_called()


@needs_forged_sources
class Quake3Forged(unittest.TestCase):
    def test_a_heartbeat_in_the_name_of_a_listed_server(self):
        """It gets in before the poll that would show the server's new map."""
        told = {"mapname": b"first"}
        with master(quake3__port="0", poll__interval="3600") as server, FakeServer(
                lambda data: [info(data[12:], **told)]) as game:
            place, here = ("127.0.0.1", port_of(server, "quake3")), ("127.0.0.1", game.port)
            game.sock.sendto(HEARTBEAT, place)
            eventually(lambda: server.registry.total
                       and server.registry.servers()[0].ping_ms is not None)
            listed, = server.registry.servers()
            told["mapname"] = b"new"
            send_forged(here, place, OUT + b"heartbeat Wolfenstein-1\n")
            eventually(lambda: listed.map == "new")
            self.assertEqual((server.registry.servers(), listed.game), ([listed], "openarena"))
            eventually(lambda: server.poller.targets[("quake3", *here)].missed == 0)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as player:
                player.settimeout(5)
                player.sendto(OUT + b"getservers 71 empty full", place)
                self.assertEqual(player.recv(2048), QUAKE3_LIST_HEAD + b"\\" + socket.inet_aton(
                    here[0]) + struct.pack(">H", here[1]) + QUAKE3_EOT)


@unittest.skipUnless(os.path.exists(OPENARENA_SERVER) and shutil.which("quakestat"),
                     "no openarena-server or no quakestat here")
class OpenArenaTest(unittest.TestCase):
    def test_a_real_server_and_a_real_client(self):
        with tempfile.TemporaryDirectory() as home, master(
                quake3__port="0", http__ports="0", limits__exempt="127.0.0.0/8") as server:
            place = "127.0.0.1:%d" % port_of(server, "quake3")
            program, *pasted = shlex.split(block_of(server, "openarena"))
            self.assertEqual(program, os.path.basename(OPENARENA_SERVER))
            words = ["net_ip", "127.0.0.1", "com_hunkmegs", "128", "net_port", str(free_port()),
                     "sv_hostname", "^1Red", "bot_enable", "1"]
            words += [word for number in "1345" for word in ("sv_master" + number, "")]
            game = subprocess.Popen(
                [OPENARENA_SERVER, *itertools.chain.from_iterable(
                    ("+set", *pair) for pair in zip(words[::2], words[1::2])), *pasted,
                 "+addbot", "sarge"],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env=dict(os.environ, HOME=home))
            try:
                eventually(lambda: server.registry.total, 2 * SOON_S)
                found, = server.registry.servers()
                self.assertEqual((found.game, found.name, found.map, found.version),
                                 ("openarena", "Red", "oa_dm1", "71"))

                def seen():             # it waits for all of 2 s, but for the game server only 1 s
                    return subprocess.run(
                        ["quakestat", "-nh", "-raw", ",", "-retry", "1", "-mi", "1", "-q3m,71",
                         place], stdout=subprocess.PIPE, timeout=SOON_S).stdout.decode()
                eventually(lambda: "Q3S,127.0.0.1:%d,Red" % found.port in seen())
                page = ms.server_link(found)
                with mock.patch.object(ms, "QUAKE3_STATUS_S", 2.0):         # bots come late
                    eventually(lambda: re.search(
                        b"Name<th>Score</thead>\n<tbody><tr><td><bdi>[A-Z]",
                        fetch(port_of(server, "http"), page)[2]))
                game.terminate()
                eventually(lambda: not server.registry.total)
            finally:
                game.kill()
                game.wait()


# --- Pages ------------------------------------------------------------------------------------

CHROMIUM = next(filter(None, map(shutil.which, (
    "chromium", "chromium-browser", "google-chrome", "chrome"))), None)
POLICY = ("default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; "
          "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'")
WALL = 1_795_222_800.0          # 2026-11-21 01:00 UTC
HOSTILE = [
    "<img src=x onerror=alert(1)>", "\"><script>alert(2)</script>", "javascript:alert(3)",
    "' onmouseover='alert(4)", "\u202egnp.exe right to left \u202e\u2067", "שרת המשחקים הגדול",
    "Z" + "\u0301\u0335\u0489" * 1667, "W" * 3000, "&lt;b&gt; &amp; ${title} $rows %s <rows>",
    "</table></body><style>*{display:none}</style>"]
SPAN_STEPS = {"day": (1440, 60), "week": (672, 900), "month": (2976, 900), "year": (8784, 3600)}


def make_server(game="iceball", address="192.0.2.1", **values):
    server = ms.Server(game, address, 27790, address, -12.0, math.inf, "Iceball Server", "CTF",
                       "mesa", "0.2.1-37", 3, 32, "handshake")
    server.first_seen = -90.0 * 86400
    for name, value in values.items():
        setattr(server, name, value)
    return server


def make_servers(count):
    """Names and crowds as in the real lists: most servers empty, a few full."""
    chance = random.Random(1)
    words = "Ice Fort Polar Frost Nordic Zone Pub Trench Lazy Golden Old Club [EU] #1 24/7".split()
    servers = []
    for index in range(count):
        address = "2001:db8:1234::%x" if index % 20 == 7 else "198.18.%d.9"
        servers.append(make_server(
            chance.choice(["iceball", "hyperbol", "subspace", "aio"]), address % index,
            port=1024 + index,
            name="%s %d" % (" ".join(chance.sample(words, 3)), index), official=index % 25 == 2,
            players=chance.choice([0, 0, 0, 1, 5, 12, 31, 64]), confirmed=index % 40 != 5,
            max_players=chance.choice([64, 64, 99, 0])))
    return servers


def hostile_servers():
    return [make_server(name=text, mode=text, map=text, version=text, description=text,
                        details={text[:40]: text}, address="192.0.2.%d" % index)
            for index, text in enumerate(HOSTILE)]


def make_series(span="day"):
    """An evening and a night, with two gaps."""
    count, step = SPAN_STEPS[span]
    means = [round(18 + 14 * math.sin(index * step / 86400 * 6.283)) for index in range(count)]
    means[count // 4:count // 4 + 72] = [None] * 72
    means[count // 2] = None
    return ms.Series(int(WALL) - count * step, step, means, [mean and mean + 3 for mean in means])


def web_of(servers, known=None, template=ms.LIST_PAGE, pasts=None):
    """What serves these servers, in this order and whatever they tell; `known`: of the others, and
    of one that has been here before; `pasts`: of games."""
    core = with_rooms(make_core(http__title="Open Game Masters"))
    for server in servers:
        core.registry.games[server.game][server.address, server.port] = server
        server.rank, server.entry_cache = (servers.index(server),), None
        for room in core.rooms.values():
            if room.owns(server.game, server.details):
                server.room = room.game

    def history(game, address, port, span, wall):
        series = make_series(span)
        return series if address else series._replace(means=[0] * len(series.means))

    database = mock.Mock(known=lambda *key: known, history=history,
                         games_past=lambda games, wall: pasts or {})
    web = ms.Web(core._replace(
        database=database, listeners=[SimpleNamespace(protocol="aio", port=27011)],
        hourly_players=lambda: {server.key: range(24) for server in servers}))
    web.epoch, web.look = WALL, web.look._replace(template=template)
    return web


def page_of(web, path="/", encrypted=False):
    session = web.session("127.0.0.1", 0.0)
    if encrypted:
        session.encrypted()
    request = http_request(path, "Accept: text/html")
    return split_response(answered(session, request))[2].decode("utf-8")


def link_to(server):
    return html.unescape(ms.server_link(server))


class Outline(html.parser.HTMLParser):
    """Every tag with its attributes, and the text."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


class PagesTest(unittest.TestCase):
    def holds(self, text, *parts, lacks=()):
        for part in parts:
            self.assertIn(part, text)
        for part in lacks:
            self.assertNotIn(part, text)

    def test_fill_escapes_everything_but_html(self):
        text = ms.fill_template("$a|$b|$c|$d", a="<\"'&>", b=ms.Html("<b>"), c=1,
                                d=["<", ms.Html("<i>")])
        self.assertEqual(text, "&lt;&quot;&#x27;&amp;&gt;|<b>|1|&lt;<i>")

    def test_hostile_text_makes_no_tag_and_no_attribute(self):
        servers = hostile_servers()
        most_played = [(server.key, 1.0) for server in servers]
        web = web_of(servers, pasts={"iceball": ms.GamePast({}, {}, (), most_played)})
        pages = [page_of(web)]
        for text, server in zip(HOSTILE, servers):
            quoted = urllib.parse.quote(text[:300])
            web.registry.record_outcome(server.address, text, 1, text, 0.0, text)
            gone = web_of([], ms.Remembered(0.0, 0.0, text))
            url = "https://h.example/" + text
            gone.look = gone.look._replace(
                title=text, intro=text + url, links=[("head", text, url), ("foot", text, url)])
            for shown, path in (
                    (web, link_to(server)), (web, "/?game=aio&name=" + quoted), (web, "/games"),
                    (web, "/check?address=" + server.address), (gone, link_to(server)),
                    (gone, "/"), (gone, "/" + quoted)):
                pages.append(page_of(shown, path))
        for tag, attributes in [tag for page in pages for tag in Outline(page).tags]:
            self.assertNotIn(tag, ("iframe", "object", "rows"))
            if tag == "img":
                self.assertTrue(attributes["src"].startswith("/banner.svg?game="))
            if tag == "script":
                self.assertEqual(attributes, {"src": "/app.js", "defer": None})
            for name, value in attributes.items():
                self.assertFalse(name.startswith("on") or name == "style", attributes)
                if name in ("href", "src", "action"):
                    self.assertRegex(value, "^(/|#s-|iceball://|https?://[hx])")

    def test_row(self):
        for server, *parts in (
                (make_server(), '<tr role="row"><td', 'href="iceball://192.0.2.1:27790"', ">CTF<",
                 '<b>3</b>/32<meter aria-hidden="true" max="32" value="3">', ">mesa<", ">Iceball<",
                 ' title="2026-11-21T00:59:48Z">12 s ago\n', ">0.2.1-37<", "<svg",
                 "<bdi>Iceball Server</bdi>"),
                (make_server(players=32), 'class="full"'),
                (make_server(players=0, max_players=0), 'class="empty"', "<b>0</b></span>"),
                (make_server(name=""), "<bdi>192.0.2.1:27790</bdi>"),
                (make_server("my game&x", "2001:db8::1"), ">my game&amp;x<",
                 "/server?game=my%20game%26x&amp;address=2001%3Adb8%3A%3A1&amp;port=27790",
                 "<code>[2001:db8::1]:27790</code><td")):
            self.holds(page_of(web_of([server])), *parts)

    def test_ago(self):
        for seconds, words in (
                (-5, "now"), (0.9, "now"), (12.7, "12 s ago"), (89, "89 s ago"), (90, "1 min ago"),
                (5399, "89 min ago"), (5400, "1 h ago"), (129600, "1 d ago"), (864000, "10 d ago")):
            self.assertEqual(ms.age_text(seconds), words)

    def test_sparkline(self):
        for values, path in (([None, 0, 2, 4], "M0 9V9h1V8h1V4h1V0h1V9"), ([None] * 24, None),
                             ([1, 16], "M0 9V8h1V0h1V9"), ([1], None),
                             ([None, 3, None], None)):
            drawn = re.search(' d="(.*)"', ms.render_sparkline(values))
            self.assertEqual(drawn and drawn.group(1), path)

    def test_the_axes_of_a_chart(self):
        for peak, ticks in ((0, "0 1"), (1, "0 1"), (3, "0 1 2 3"), (7.2, "0 2 4 6 8"),
                            (43, "0 20 40 60"), (100, "0 50 100"),
                            (1999, "0 500 1,000 1,500 2,000")):
            with self.subTest(peak=peak):
                chart = ms.render_chart(ms.Series(0, 60, [peak], [peak]), WALL)
                marks = re.findall(
                    r'="(\w+)"[^>]*/><text class="tick end"[^>]*>([0-9,]+)<', chart)
                self.assertEqual(" ".join(text for _, text in marks), ticks)
                self.assertEqual([kind for kind, _ in marks[:2]], ["axis", "grid"])
        for span, first, count in (("day", "03:00", 8), ("week", "Sun 15", 7),
                                   ("month", "24 Oct", 6), ("year", "Dec", 12)):
            with self.subTest(span=span):
                series = make_series(span)
                chart = ms.render_chart(series._replace(start=series.start + 60), WALL)
                texts = re.findall(r'<text class="middle( minor)?"[^>]*>([^<]+)<', chart)
                self.assertEqual((texts[0][1], len(texts)), (first, count))
                self.assertEqual([minor for minor, _ in texts[:3]], ["", " minor", ""])

    def test_chart_leaves_gaps_and_names_peak_and_latest(self):
        means = [1, 2, None, None, 7, None, 3, 3, None, 4]
        peaks = [1, 2, None, None, 7, None, 3, 5, None, 4]
        # Four stretches; one of 8 players is 12.5 % of the height
        self.holds(
            ms.render_chart(ms.Series(WALL - 600, 60, means, peaks), WALL + 12),
            'class="mean" d="M0 87.5h.01L1 75h.01M4 12.5h.01M6 62.5h.01L7 62.5h.01M9 50h.01"',
            'd="M0 100V87.5h1V100M1 100V75h1V100M4 100V12.5h1V100M6 100V62.5h1V100M7 100V37.5h1V',
            '<circle cx="40%" cy="23%"', 'x="40%" y="23%" dy="-9">peak 7<',
            'latest" x="90%" y="50%" dx="6" dy="5">4<',
            'Peak 7 at <span data-time="2026-11-21T00:54:00Z">2026-11-21 00:54</span>. Latest 4, '
            + ms.time_tag(WALL, WALL + 12), "Times are UTC.")
        year = ms.render_chart(make_series("year"), WALL)
        self.assertLess(len(re.findall("h.01", year)), 366)         # not one an hour
        self.holds(year, "h.01L24 ")
        series = make_series()
        series.peaks[101] = 40
        self.holds(ms.render_chart(series, WALL), "V0h4V100")
        for means, part in (([9, 1], 'x="4%" y="21.2%" dy="-9"'),
                            ([1003], 'latest long" x="0%"'), ([999], 'latest" x="0%"'),
                            ([None], "No history in this span yet")):
            self.holds(ms.render_chart(ms.Series(0, 60, means, means), WALL), part)

    def test_server_page(self):
        server = make_server(mode="\u05de", map="<m>", players=1200, playing=3, ping_ms=23.4,
                             description="Builders welcome.", details={"free_slots": "none"})
        link = link_to(server)
        fact = "<div><dt>%s</dt><dd>%s</dd></div>"
        self.holds(
            page_of(web_of([server], ms.Remembered(WALL - 8e6, WALL, "Before")), link),
            # Each part of the lead has its own direction
            "<bdi>Iceball</bdi> · <bdi>\u05de</bdi> · <bdi>&lt;m&gt;</bdi><br>Builders welcome.<",
            'href="iceball://192.0.2.1:27790">Play', '<svg class="chart"', "94.9 % of the past day",
            'aria-current="page">Day<', 'span=week" aria-current="false">Week<',
            '<p class="totals"><b>1,200</b> of <b>32</b> players, <b>3</b> playing</p>',
            fact % ("Address", "<code>192.0.2.1:27790</code>"),
            "It answered this master&#x27;s handshake", ms.time_tag(WALL - 12, WALL),
            fact % ("Ping from here", "23 ms"), fact % ("Free slots", "none"),
            '<p class="back"><a href="/">← All servers</a> <a href="/?game=iceball"><bdi>Iceball<',
            "<details><summary>Banner",
            # What stands above the chart, and who plays if the game does not tell it
            lacks=("<dt>Game<", "<dt>Mode<", "<dt>Map<", "<dt>Desc", "<dt>Players", "Players now"))
        for age, words in ((3600, ">100 % of"), (72000, ">93.9 % of")):
            known = ms.Remembered(WALL - age, WALL, "")
            self.holds(page_of(web_of([server], known), link), words)
        gone = web_of([], ms.Remembered(WALL - 9000, WALL - 7200, "Gone <fishing>"))
        self.holds(
            page_of(gone, link), "Gone &lt;fishing&gt;", "Not listed now. Last seen <time",
            '<svg class="chart"', "/check?game=iceball&amp;address=192.0.2.1&amp;port=27790",
            lacks=("Play<", "Mode", "Verified", "<i title"))
        server.game = "aio"
        web = web_of([server])
        web.program = web.program._replace(database=None)         # no history is kept
        # How to join says the address
        self.holds(page_of(web, link_to(server)), "<code>192.0.2.1:27790</code></p>",
                   lacks=("Play<", "chart", "<dt>Address"))

    def test_who_plays(self):
        """In a table with the columns that a game fills, or names alone; who watches comes last."""
        names = ["Zed", "Bob", "<ann>"]
        player = ms.Player
        room = mock.Mock()
        for players, more, count, heads, texts in (
                ([], 0, None, [], []), ([], 5, None, [], []),
                (map(player, names), 0, "3", [], ["<ann>", "Bob", "Zed"]),
                (map(player, names), 1, "the first 3", [], ["<ann>", "Bob", "Zed"]),
                ([player("a", is_watching=True), player("b")], 0, "2, of them 1 watching", [],
                 ["b", "a watching"]),
                ([player("a", score=-5), player("b", score=0), player("c", "<C&A>", 12),
                  player("d", "", 99, None, True)], 0, "4, of them 1 watching",
                 ["Name", "Clan", "Score"],
                 ["c", "<C&A>", "12", "b", "", "0", "a", "", "-5", "d watching", "", "99"]),
                ([player("a"), player("b", best_s=3599), player("c", best_s=61)], 0, "3",
                 ["Name", "Time"], ["c", "1:01", "b", "59:59", "a", ""])):
            room.players.return_value = players = list(players)
            page = ms.render_players(room, make_server(players=len(players) + more))
            self.assertEqual(re.findall(r"<small>(.*)</small>", page), [count] if count else [])
            self.assertEqual(re.findall("<th>([^<]*)", page), heads)
            cells = re.findall(r"<(?:td|li)>(.*?)(?=<td|<li|<tr|</tbody|</ul)", page)
            self.assertEqual([html.unescape(re.sub("<[^>]*>", "", cell)) for cell in cells], texts)

    def test_a_server_is_asked_who_plays(self):
        """Its page shows who plays when the answer is there; another's page asks nobody."""
        openarena = make_server("openarena", players=2, details={"gamename": "Quake3Arena"})
        nobody = make_server("openarena", port=5, details={"gamename": "Quake3Arena"}, players=0)
        web = web_of([openarena, nobody, make_server()], ms.Remembered(0.0, 0.0, "Gone"))
        web.program.rooms["quake3"].program.send = sent = mock.Mock()
        for server in nobody, make_server(), make_server("openarena", "192.0.2.9"):
            self.holds(page_of(web, link_to(server)), lacks=["Players now"])
        sent.reset_mock()
        for _ in range(3):
            self.holds(page_of(web, link_to(openarena)), lacks=["Players now"])
        [((data, place), _)] = sent.call_args_list
        self.assertEqual(place, ("192.0.2.1", 27790))
        web.program.poller.datagram(OPENARENA_STATUS.replace(b"%s", data[14:]), place, 0.1)
        self.holds(page_of(web, link_to(openarena)), "Players now <small>3<",
                   "<tr><td><bdi>Major</bdi><td>3<tr><td><bdi>Red Bot</bdi><td>2")
        self.holds(page_of(web, "/?q=red+bot"), '<tr data-with="Red Bot" role="row">')
        with mock.patch.object(ms.Quake3, "players", side_effect=AssertionError("read again")):
            self.holds(page_of(web, "/?q=major"), '<tr data-with="Major" role="row">')
        sent.assert_called_once()

    def test_games_page(self):
        """The numbers of now come from the list, the others from the database. Servers that have
        left the list are not named."""
        a = make_server(name="<A> & co", players=1200)
        b = make_server(address="192.0.2.2", name="", players=3)
        c = make_server("aio", address="192.0.2.3", players=1300)
        spans = "day", "week", "month"
        past = ms.GamePast(
            dict(zip(spans, (14, 1500, 2000))), dict(zip(spans, (0.4, 6.9, 12.0))), [None, 3, 6],
            [(("iceball", "192.0.2.9", 1), 9.5), (a.key, 7.25), (b.key, 0.5)])
        kept = {"iceball": past, "luanti": past._replace(most_played=[])}
        web = web_of([a, b, c], pasts=kept)
        rows = re.findall(r"<tr><th scope.*", page_of(web, "/games"))
        shown = [[cell.rstrip() for cell in re.split("<[^>]*>", row) if cell.strip()]
                 for row in rows]
        means = ["0.4", "6.9", "12"]
        self.assertEqual(shown, [
            ["AIO", "1", "1,300"],
            ["Iceball", "2", "1,203", "1,203", "1,500", "2,000", *means, "&lt;A&gt; &amp; co",
             " 7.2", "192.0.2.2:27790", " 0.5"],
            ["Luanti", "0", "0", "14", "1,500", "2,000", *means],
            ["Together", "3", "2,503"]])
        self.holds(rows[1], '<a href="/?game=iceball">', ms.html.escape(ms.server_link(a)),
                   '<svg aria-hidden="true" viewBox="0 0 3 21"><path d="M0 21V21h1V10h1V0h1V21"/>')
        answer = json.loads(page_of(web, "/games.json"))
        self.assertEqual([entry["game"] for entry in answer["games"]],
                         ["aio", "iceball", "luanti", ""])
        self.assertEqual(answer["games"][1], {
            "game": "iceball", "title": "Iceball", "servers": 2, "players": 1203,
            "peaks": {**past.peaks, "day": 1203}, "means": past.means, "week": [None, 3, 6],
            "most_played": [{"name": "<A> & co", "page": link_to(a), "mean": 7.25},
                            {"name": "192.0.2.2:27790", "page": link_to(b), "mean": 0.5}]})
        # Without a database there is only now
        web.program = web.program._replace(database=None)
        web.forget_responses()
        rows = re.findall(r"<tr><th scope.*", page_of(web, "/games"))
        self.assertEqual(len(rows), 3)
        self.holds(rows[1], "<td>1,203<td><td><td><td><td><td><td><td>")

    def test_one_answer_about_games_is_made_for_all(self):
        """Whoever asks within a second gets the body from the cache; later it comes from the disk
        thread, and is rendered again after CACHE_S at the earliest."""
        web = web_of([make_server()])
        for now, renderings in ((0.0, 1), (0.5, 0), (3.0, 0), (ms.CACHE_S + 1.0, 1)):
            web.tick(now)
            with mock.patch.object(ms, "played_games", wraps=ms.played_games) as made:
                for client in range(3):
                    session = web.session("192.0.2.%d" % client, now)
                    request = http_request("/games?x=%d" % client)
                    data = session.receive(request, now)
                    if session.job:
                        data = session.resume(session.job(), now)
                    self.assertEqual(split_response(data)[0], 200)
            self.assertEqual(made.call_count, renderings, now)

    def test_modes_in_words_and_what_is_not_shown(self):
        details = {"gamename": "Hidden3Arena", "tag": "Hidden-1", "people": "2"}
        for game, mode, words in (
                ("quake3arena", "0", "free for all"), ("openarena", "4", "capture the flag"),
                ("openarena", "7", "7"), ("openarena", "CA", "CA"), ("xonotic", "0", "0")):
            server = make_server(game=game, mode=mode, details=details, version="71")
            web = web_of([server])
            self.holds(page_of(web, link_to(server)), "· <bdi>%s</bdi> ·" % words,
                       "players · %s · %s · " % (web.look.games[game], words),
                       "<dt>People</dt><dd>2</dd>", lacks=("Hidden", "Tag<", "Gamename<"))
            self.holds(page_of(web, "/"), '<td role="cell">%s<td' % words)
            self.holds(page_of(web, "/servers.json"), '"mode":"%s"' % mode)

    def test_badges(self):
        server = make_server(name="Once", official=True, confirmed=False, responding=False,
                             verified="self-reported", details={"flags": "password"})
        found = make_server(verified="another list", found_at="up.example")
        for marked, badges in (
                (make_server(), []), (found, ["another list"]),
                (server, ["official", "unconfirmed", "self-reported", "not responding",
                          "password"])):
            rendered = ms.render_badges(marked)
            self.assertEqual(re.findall(r'<i title="[^"]{20,}">([a-z -]+)</i>', rendered), badges)
        self.holds(page_of(web_of([found]), link_to(found)),
                   "<dt>Found at</dt><dd>up.example</dd>",
                   "its name and texts come from another list</dd>")
        for path in "/", link_to(server), "/check?address=192.0.2.1":
            text = Outline(page_of(web_of([server]), path)).text
            self.holds(" ".join(text.split()), "Once official unconfirmed")

    def test_list_page(self):
        with mock.patch.object(ms, "PAGE_ROWS", 2):
            self.holds(page_of(web_of(make_servers(1003))), 'data-matching="1003"',
                       "The first 2 of 1,003 servers. Search to find the others.",
                       "players on <b>1,003</b> servers")
            self.assertEqual(page_of(web_of(make_servers(5))).count("<tr"), 1 + 2)
        one = [make_server(players=1)]
        for servers, path, parts, lacks in (
                ([], "/", ["No servers yet", " hidden>"], []),
                (one, "/?game=aio", [
                    'class="board no-game no-mode no-map no-country no-version"',
                    "<title>AIO · Open Game Masters</title>",
                    '<a href="/" aria-current="false">All games<small>1</small>',
                    '<a href="/?game=aio" aria-current="page">AIO<small>0</small>'], []),
                # A browser for text shows what is hidden
                (one, "/", ["<b>1</b> player on <b>1</b> server<", 'id="tabs" data-live'],
                 ["All games", "No servers yet", "Clear the search"]),
                ([], "/?name=nobody&players_min=7", [
                    "No servers yet", 'class="idle"', 'value="nobody"', 'value="7"'],
                 ["No server matches", "</b> players on"])):
            self.holds(page_of(web_of(servers), path), *parts, lacks=lacks)

    def test_the_accent_can_be_read(self):
        """As WCAG 2.1 counts, by hand: on both grounds, and soft text on the glow."""
        def light_of(colour):
            shares = [int(colour[at:at + 2], 16) / 255 for at in (1, 3, 5)]
            linear = [((share + .055) / 1.055) ** 2.4 if share > .03928 else share / 12.92
                      for share in shares]
            return .2126 * linear[0] + .7152 * linear[1] + .0722 * linear[2] + .05

        def contrast_of(*colours):
            low, high = sorted(map(light_of, colours))
            return high / low

        self.assertAlmostEqual(contrast_of("#777777", "#ffffff"), 4.48, 2)      # in its examples
        chance = random.Random(63)
        colours = ["", "#1f4fd8", "#ffd400", "#000000", "#ffffff", "#808080", "#00ff00"]
        for colour in colours + ["#%06x" % chance.getrandbits(24) for _ in range(100)]:
            accent = light, light_glow, dark, dark_glow = ms.accent_of(colour)
            self.assertEqual(re.findall("#[0-9a-f]{6}", ms.ACCENT_CSS % accent), list(accent))
            for pair in ((light, "#fcfbf8"), (light, "#f4f1ea"), (dark, "#131210"),
                         (dark, "#1d1b18"), (light_glow, "#625d55"), (dark_glow, "#a8a195")):
                self.assertGreaterEqual(contrast_of(*pair), 4.5, (colour, pair))
        for colour, light, dark in (("#1f4fd8", "#1f4fd8", "#5e80e3"), ("#00a86b", "", "#00a86b"),
                                    ("#101010", "#101010", ""), ("#ffffff", "", "#ffffff")):
            got = ms.accent_of(colour)[::2]
            self.assertEqual(got, (light or got[0], dark or got[1]))

    def test_the_operator_s_look_is_on_every_page(self):
        web = web_of(make_servers(1))
        web.look = web.look._replace(
            accent=ms.accent_of("#1f4fd8"), logo=("image/png", b"\x89PNG"),
            links=[("foot", "Imprint", "https://h.example/i?a&b"), ("head", "Rules", "https://r/"),
                   ("head", "Forum", "https://f/")],
            intro="See https://h.example/x_(y), or (http://b.example/a?b=<c>).")
        accent = ms.ACCENT_CSS % web.look.accent
        server, = web.registry.servers()
        for path in "/", "/check", "/nowhere", "/add", "/games", link_to(server):
            self.holds(page_of(web, path), (
                'Add your server</a>\n<a href="https://r/">Rules</a>\n'
                '<a href="https://f/">Forum</a>\n</nav>'), (
                'Is my server listed?</a>\n<a href="https://h.example/i?a&amp;b">Imprint</a>\n'
                '</nav>'), '<img class="logo" src="/icon" alt="">Open Game Masters</',
                '<link rel="icon" href="/icon" type="image/png">')
        self.holds(page_of(web, "/check"), '<a href="/">Servers</a>\n<a href="/games">Games</a>')
        self.holds(page_of(web),
                   'See <a href="https://h.example/x_(y)">https://h.example/x_(y)</a>, or '
                   '(<a href="http://b.example/a?b=">http://b.example/a?b=</a>&lt;c&gt;).</p>')
        for path in "/style.css", link_to(server).replace("/server", "/banner.svg"):
            self.holds(page_of(web, path), accent)
        web.look = web.look._replace(links=(), logo=())
        self.holds(page_of(web, "/check"), 'href="/icon" type="image/svg+xml"',
                   'Is my server listed?</a>\n</nav>', lacks=["<img"])
        self.holds(page_of(web, "/icon"), 'stroke="#5e80e3"')

    def test_columns_and_signs_are_those_that_servers_fill(self):
        plain = dict(mode="", map="", version="")
        for servers, classes, legend in (
                ([make_server()], "board no-country", ""),
                ([make_server(**plain, official=True)],
                 "board no-mode no-map no-country no-version", "official"),
                ([make_server(**plain, country="de", details={"flags": "password"}),
                  make_server(port=1, map="m", version="")], "board no-version", "password")):
            page = page_of(web_of(servers))
            self.holds(page, 'class="%s"' % classes)
            shown = re.search('id="legend" data-live>(.*)</p>', page).group(1)
            self.assertEqual(re.findall('</i> (.*?)</span>', shown),
                             legend.split())
            for sign in re.findall('href="#(s-.*?)"', page):
                self.holds(page, '<symbol id="%s"' % sign)

    def test_one_box_searches_all_that_a_row_says_and_who_plays(self):
        servers = [
            make_server(name="Straße", port=1, players=0, last_seen=3.0),
            make_server("luanti", port=2, name="B", mode="", map="", players=5, private={
                "luanti_announcement": {"clients_list": ["<Ann>", "STRASSER"]}}),
            make_server("openarena", port=3, name="A", mode="4", map="dm17", players=32,
                        details={"flags": "password", "gamename": "Quake3Arena"})]
        for query, ports in (
                ("q=strasse", [1, 2]), ("q=capture", [3]), ("q=DM17", [3]), ("q=:2", [2]),
                ("q=192.0.2", [1, 2, 3]), ("q=%3Cann", [2]), ("name=strasse", [1]),
                ("q=strasse&players_min=1", [2]), ("hide=empty&hide=full", [2]),
                ("hide=password", [1, 2]), ("sort=name", [3, 2, 1]), ("sort=-players", [3, 2, 1]),
                ("sort=-seen", [1, 2, 3]), ("sort=country", [1, 2, 3]), ("q=nobody", []),
                ("sort=map", [3, 1, 2]),                # without a map it comes last
                ("sort=__class__", [1, 2, 3])):
            entries = json.loads(page_of(web_of(servers), "/servers.json?" + query))["servers"]
            self.assertEqual([entry["port"] for entry in entries], ports, query)
            page = page_of(web_of(servers), "/?" + query)
            found = re.findall(r"<code>(?:<a [^>]*>)?192.0.2.1:(\d+)", page)
            self.assertEqual(list(map(int, found)), ports, query)
        self.holds(page_of(web_of(servers), "/?q=ann"), 'value="ann"',
                   '<tr data-with="&lt;Ann&gt;" role="row">')
        self.holds(page_of(web_of(servers), "/?hide=full&sort=seen"), 'value="full" checked>',
                   lacks=['"empty" checked', "Clear the search"])
        for sort, order in (("", "Players"), ("players", "Players"), ("-seen", "Seen"),
                            ("seen", "Seen"), ("-mode", "Mode")):
            page = page_of(web_of(servers), "/?sort=" + sort)
            self.assertEqual(re.findall("selected>(.*?)</option>", page), [order])

    def test_the_page_says_what_is_chosen(self):
        """How many filters there are, and how many servers pass them of how many."""
        servers = make_servers(60)
        few = [server for server in servers if server.players > 30]
        for query, filters, status, clear in (
                ("", "", "60 servers", None), ("sort=name", "", "60 servers", None),
                ("players_min=31", " · 1", "%d of 60 servers" % len(few), "/"),
                ("hide=empty,password&players_min=65&country=de,nl&sort=map", " · 4",
                 "0 of 60 servers", "/?sort=map"),
                ("game=aio&q=nobody", "", "0 of %d servers" % sum(
                    server.game == "aio" for server in servers), "/?game=aio")):
            page = page_of(web_of(servers), "/?" + query)
            self.holds(page, "<summary>Filters%s</summary>" % filters,
                       'role="status">%s</span><span id="clear"%s>' % (
                           status, "" if clear else " hidden"),
                       '<a href="%s">Clear</a>' % (clear or "/?" * bool(query) + query or "/"),
                       "players on <b>%s</b>" % status.split()[-2])

    def test_no_match_says_what_was_asked_and_where_else_to_look(self):
        servers = [make_server(name="Berlin"), make_server("aio", name="Berlin", players=32),
                   make_server("luanti", name="Berlin", private={"luanti_announcement": {}}),
                   make_server("luanti", name="berlin 2", port=2, country="de",
                               private={"luanti_announcement": {}})]
        for query, heading, asked, clear, others in (
                ("q=nobody", "No server matches", "“nobody”.", "/", []),
                ("game=subspace&q=x", "No servers yet", "", "", []),
                ("game=aio&q=berlin&hide=full&hide=empty", "No AIO server matches",
                 "“berlin”, without empty and full servers.", "/?game=aio",
                 [("/?game=iceball&q=berlin&hide=empty,full", "Iceball", "1"),
                  ("/?game=luanti&q=berlin&hide=empty,full", "Luanti", "2")]),
                ("game=aio&country=de,us&sort=name", "No AIO server matches",
                 "In Germany or United States.", "/?game=aio&sort=name",
                 [("/?game=luanti&country=de,us&sort=name", "Luanti", "1")]),
                ("name=<b>&players_min=1&hide=password", "No server matches",
                 "“<b>”, without locked servers, with 1 player or more.", "/", [])):
            page = page_of(web_of(servers), "/?" + urllib.parse.quote(query, "=&"))
            hint = page.partition('<section class="hint">')[2].partition("</section>")[0]
            words = ["<p>%s</p>" % asked, '"%s">Clear the search</a> to see the ' % clear]
            self.holds(html.unescape(hint), "<h2>%s</h2>" % heading, *words * bool(asked))
            self.assertEqual(re.findall(
                '<a href="([^"]*)" aria-current="false">(.*?)<small>(.*?)<', html.unescape(hint)),
                others)

    def test_headings_sort(self):
        """Each leads to one order, the reverse, and the order of the list, which is by players."""
        def headings(query):
            page = page_of(web_of([make_server()]), "/?" + query)
            rows = re.findall('<th [^>]*?"( aria-sort=".*?")?><a href="(.*?)">(.*?)</a>', page)
            return {words: (html.unescape(link), sort) for sort, link, words in rows}

        up, down = ' aria-sort="ascending"', ' aria-sort="descending"'
        for query, heading, link, direction in (
                ("", "Players", "/?sort=players", down), ("sort=players", "Players", "/", up),
                ("sort=-players", "Players", "/", down), ("sort=name", "Players", "/", ""),
                ("", "Name", "/?sort=name", ""), ("sort=name", "Name", "/?sort=-name", up),
                ("sort=-name", "Name", "/", down), ("", "Seen", "/?sort=-seen", ""),
                ("sort=-seen", "Seen", "/?sort=seen", down), ("sort=seen", "Seen", "/", up),
                ("game=iceball&q=a+b&hide=full&hide=empty&country=nl,de&players_min=2&sort=-map",
                 "Map", "/?game=iceball&q=a+b&players_min=2&country=de,nl&hide=empty,full", down)):
            self.assertEqual(headings(query)[heading], (link, direction), (query, heading))
            self.assertEqual(sum(bool(sort) for _, sort in headings(query).values()), 1)

    def test_own_template(self):
        own = "<title>$title</title> $$5 $table"
        page = page_of(web_of(make_servers(3), template=own))
        self.assertTrue(page.startswith("<title>Open Game Masters</title> $5 <svg hidden>"))
        ms.check_list_template(own)
        for text, reason in (("$nonsense",
                              r"line 1: '\$nonsense' is no placeholder .*'\$\$nonsense'"),
                             ("$$ $table\n<b>5 $/h", r"line 2: '\$/h' is .* '\$\$/h'"),
                             ("\n${x}", r"line 2: '\$\{x\}' is no"), ("$", "line 1"),
                             ("100 $ a line", "line 1")):
            with self.assertRaisesRegex(ValueError, reason):
                ms.check_list_template(text)


class Exchange(socketserver.BaseRequestHandler):
    def handle(self):
        for data in iter(lambda: self.request.recv(65536), b""):
            self.request.sendall(self.server.answer(data))


class Site(socketserver.ThreadingTCPServer):
    """The pages over HTTP from `servers`, which a test may change."""

    daemon_threads = True
    servers, asked, down, template, look = [], [], False, ms.LIST_PAGE, {}

    def answer(self, data):
        web = web_of(self.servers, template=self.template)
        web.look = web.look._replace(**self.look)
        if self.down:
            web.response_to = mock.Mock(side_effect=ms.HttpError(503, "It is down."))
        out = answered(web.session("127.0.0.1", 0.0), data)
        if b"Content-Type: text/html" in out:
            self.asked.append((data.split()[1].decode(), int(out[9:12])))
        # The browser would keep a page over the next test
        return out.replace(b"max-age=%d" % ms.CACHE_S, b"max-age=0")


class Browser:
    """Headless Chromium, spoken to in its DevTools protocol: JSON over two pipes."""

    def __init__(self):
        self.profile = tempfile.mkdtemp()
        child_in, self.pipe_in = os.pipe()
        self.pipe_out, child_out = os.pipe()
        options = ("headless no-sandbox disable-gpu disable-quic no-first-run disable-sync "
                   "disable-background-networking disable-component-update disable-dev-shm-usage "
                   "remote-debugging-pipe user-data-dir=" + self.profile)
        # It reads from descriptor 3 and writes to 4
        self.process = subprocess.Popen(
            ["sh", "-c", 'exec "$0" "$@" 3<&%d 4>&%d' % (child_in, child_out), CHROMIUM,
             *["--" + option for option in options.split(" ")], "about:blank"],
            pass_fds=(child_in, child_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(child_in)
        os.close(child_out)
        self.last_id, self.buffer, self.session = 0, b"", {}
        self.errors = []

    def start(self):
        tab = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=tab, flatten=True)
        self.session = {"sessionId": attached["sessionId"]}
        for method in "Page.enable", "Runtime.enable", "Log.enable":
            self.call(method)
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def end(self):
        """Leave nothing behind, whether it has started or not: without its pipes it ends."""
        os.close(self.pipe_in)
        os.close(self.pipe_out)
        self.process.wait(SOON_S)
        shutil.rmtree(self.profile, ignore_errors=True)

    def send(self, method, **params):
        self.last_id += 1
        message = dict(self.session, id=self.last_id, method=method, params=params)
        os.write(self.pipe_in, json.dumps(message).encode() + b"\0")
        return self.last_id

    def call(self, method, **params):
        """The result of one command. Errors of the page that arrive meanwhile are kept."""
        wanted = self.send(method, **params)
        while True:
            while b"\0" not in self.buffer:
                data = os.read(self.pipe_out, 65536)
                assert data, "Chromium has ended"
                self.buffer += data
            line, _, self.buffer = self.buffer.partition(b"\0")
            message = json.loads(line.decode("utf-8"))
            if message.get("id") == wanted:
                return message.get("result", {"result": {}})
            event, details = message.get("method"), message.get("params")
            if event == "Page.javascriptDialogOpening":
                self.errors.append("dialog: " + details["message"])
                self.send("Page.handleJavaScriptDialog", accept=True)
            elif event == "Runtime.exceptionThrown" or (
                    event == "Log.entryAdded" and details["entry"]["level"] == "error"):
                self.errors.append(str(details))

    def navigate(self, url):
        self.evaluate("window.isOld = true")
        self.call("Page.navigate", url=url)
        eventually(lambda: self.evaluate("!window.isOld && document.readyState === 'complete'"))

    def evaluate(self, script):
        """The value of an expression, as JSON has it; a promise is waited for. None also while
        one page makes way for the next."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True,
                           awaitPromise=True, userGesture=True)
        assert "exceptionDetails" not in result, (script, result)
        return result["result"].get("value")

    def resize(self, width, height=844, dark=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def press(self, key, code, text="", shift=False):
        for kind in "keyDown", "keyUp":
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, modifiers=8 * shift,
                      windowsVirtualKeyCode=code, text=text if kind == "keyDown" else "")

    def page_errors(self):
        self.evaluate("0")                          # whatever was on its way has arrived after this
        errors, self.errors = self.errors, []
        return errors


ROWS = "[...document.querySelectorAll('tbody tr:not([hidden])')]"
EDGES = """[...document.querySelectorAll(%r)].filter(part => part.getClientRects().length)
    .map(part => part.getBoundingClientRect()).map(box => [box.left, box.right, box.height])"""


# A logo whose script must not run, and whose style must hold
SVG = ('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 60 20" onload="alert(1)">'
       '<style>rect { fill: red }</style><script>document.documentElement.id = "ran"</script>'
       '<rect width="60" height="20"/></svg>')


class BrowserCase(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not CHROMIUM or ms.WINDOWS:
            raise unittest.SkipTest("no Chromium on PATH")
        cls.site = Site(("127.0.0.1", 0), Exchange)
        cls.addClassCleanup(cls.site.server_close)
        threading.Thread(target=cls.site.serve_forever, args=(.05,), daemon=True).start()
        cls.addClassCleanup(cls.site.shutdown)
        cls.browser = Browser()
        cls.addClassCleanup(cls.browser.end)
        cls.browser.start()
        # A page refreshes when a test wants it, and not after five seconds as well
        cls.browser.call("Page.addScriptToEvaluateOnNewDocument", source="""
            window.every = setInterval; window.setInterval = () => 0""")

    def setUp(self):
        self.site.servers, self.site.down = make_servers(60), False
        self.browser.resize(1280)
        self.browser.page_errors()

    def tearDown(self):
        self.assertEqual(self.browser.page_errors(), [])

    def open(self, target="/"):
        self.browser.navigate("http://127.0.0.1:%d%s" % (self.site.server_address[1], target))
        self.site.asked.clear()

    def js(self, script):
        return self.browser.evaluate(script)

    def of(self, selector, part="textContent"):
        return self.js("document.querySelector(%r)?.%s" % (selector, part))

    def all(self, selector, part="textContent"):
        return self.js("[...document.querySelectorAll(%r)].map(it => it.%s)" % (selector, part))

    def cells(self, column):
        """What the visible rows have in a column."""
        return self.js(ROWS + ".map(row => row.cells[%d].textContent.trim())" % column)

    def css(self, selector, name):
        return self.js("getComputedStyle(document.querySelector(%r)).%s" % (selector, name))

    def click(self, selector, index=0):
        self.js("document.querySelectorAll(%r)[%d].click()" % (selector, index))

    def names(self):
        # While a page comes in, its last row may have no name yet
        return self.js(ROWS + ".map(row => row.querySelector('bdi')?.textContent)")

    def link(self):
        return self.js("location.pathname + location.search")

    def expect(self, wanted=lambda server: True):
        """The page shows the names of these servers, in this order, soon."""
        names = [server.name for server in self.site.servers if wanted(server)]
        self.assertTrue(names)
        eventually(lambda: self.names() == names)

    def says(self, text):
        """The status line has this text, soon."""
        eventually(lambda: text in self.of("#status") if text else not self.of("#status"))

    def type(self, selector, *texts):
        """Have these in the box, one after the other with no pause between them."""
        self.js("""{const box = document.querySelector(%r); box.focus();
            for (box.value of %s) box.dispatchEvent(new Event('input', {bubbles: true}))}""" % (
                selector, json.dumps(texts)))

    def refresh(self):
        """A refresh now, as when the tab comes to the front; to its end."""
        self.js("document.dispatchEvent(new Event('visibilitychange'))")
        eventually(lambda: not self.js("asking"))


class BrowserTest(BrowserCase):
    """What the script adds."""

    def test_times_are_those_of_the_reader(self):
        """In New York it is five hours earlier in November than at Greenwich."""
        zone = functools.partial(self.browser.call, "Emulation.setTimezoneOverride")
        self.addCleanup(zone, timezoneId="")
        link = link_to(self.site.servers[0])
        for name, first, caption in (
                ("UTC", "03:00", "Peak 35 at Nov 20, 2026, 5:59 AM. Latest 18, "),
                ("America/New_York", "22:00", "Peak 35 at Nov 20, 2026, 12:59 AM. Latest 18, ")):
            zone(timezoneId=name)
            self.open(link)
            self.assertEqual(self.all("text[data-time]")[0], first)
            self.assertIn(caption, self.of("figcaption").replace("\u202f", " "))
            self.assertNotIn("UTC", self.of("figcaption"))
            self.js("lastText = lastParts.clear()")       # as if the chart had changed
            self.refresh()
            self.assertEqual(self.all("text[data-time]")[0], first)
        self.assertIn("11/20/2026, 7:59:48", self.all("#facts time", "title")[-1])
        self.open(link + "&span=week")
        self.assertEqual(self.all("text.middle:not(.label)")[0], "Sun 15")
        self.assertIn("Days are those of UTC.", self.of("figcaption"))

    def test_search_finds_what_the_master_finds(self):
        """By name or address, in whatever case, here and where the master has to search."""
        for most in 2000, 50:
            self.addCleanup(setattr, ms, "PAGE_ROWS", 2000)
            ms.PAGE_ROWS = most
            self.site.servers = make_servers(60) + [
                make_server(name="Straße ❤ 👨👩", address="198.51.100.77"),
                make_server(name="ΣΊΣΥΦΟΣ", address="2001:db8::5"),
                make_server(name="İzmir", address="198.51.100.78")]
            self.open()
            for text, at in (("STRASSE", -3), ("σίσυφος", -2), ("i̇ZM", -1), ("198.51.100.77", -3),
                             ("198.51.100.78:27790", -1), ("[2001:DB8::5]:", -2),
                             ("❤\ufe0f 👨\u200d", -3)):         # as keyboards write them
                self.type("[name=q]", text)
                self.expect(lambda server: server is self.site.servers[at])
            self.site.asked.clear()
            self.type("[name=q]", "n", "no", "nobody")
            self.says("0 of 63 servers")
            eventually(lambda: self.of("#hint h2") == "No server matches")
        eventually(lambda: self.site.asked)
        self.assertEqual([asked for asked, _ in self.site.asked], ["/?q=nobody"],
                         "once, when typing ended")
        self.type("[name=q]", "")
        self.says("50 of 63 servers. Search to find the others.")
        self.site.servers = make_servers(40)            # it is capped no longer than it is long
        self.refresh()
        self.says("40 servers")
        self.assertFalse(self.js("capped"))
        self.type("[name=q]", "lazy")
        self.expect(lambda server: "Lazy" in server.name)
        self.says("%d of 40 servers" % len(self.names()))

    def test_sort(self):
        self.open()
        players = [server.players for server in self.site.servers]
        for shown, head, link in (
                (sorted(players), "ascending", "/?sort=players"), (players, "descending", "/")):
            self.click("th a", 1)
            found = [int(re.match("[0-9]+", text).group()) for text in self.cells(1)]
            heads = self.all("th", "getAttribute('aria-sort')")
            self.assertEqual((found, heads[1], self.link()), (shown, head, link))
        self.addCleanup(setattr, ms, "PAGE_ROWS", 2000)
        ms.PAGE_ROWS = 10                               # of all servers, not of those in the page
        names = sorted([server.name for server in self.site.servers], key=str.lower)
        self.open()
        self.click("th a")
        eventually(lambda: self.names() == names[:10])
        self.assertEqual(self.of("select", "value"), "name")
        self.click("th a")                              # the choice has no order for the reverse
        self.assertEqual((self.link(), self.of("select", "value")), ("/?sort=-name", "name"))
        self.assertIn("sort=-name&game=aio", self.of("#tabs a:last-child", "href"))
        ms.PAGE_ROWS = 2000
        self.site.servers[0].map = ""
        self.open()
        self.click("th a", 4)
        self.assertEqual(self.cells(4).index(""), 59, "as the master sorts")
        self.js("window.stays = true; document.querySelectorAll('th a')[6].focus()")
        for sign in 1, -1:
            self.browser.press("Enter", 13, "\r")
            self.assertTrue(self.js("window.stays"))
            numbers = [int(text.split(".")[2]) for text in self.cells(6) if text[0] != "["]
            self.assertEqual(numbers, sorted(numbers, reverse=sign < 0))

    def test_hide_and_minimum(self):
        self.open()
        self.click("[value=empty]")
        self.expect(lambda server: server.players)
        self.click("[value=full]")
        self.expect(lambda server: server.players and server.players != server.max_players)
        for typed, kept in (("1.5", "players_min=2"), ("-3", ""), ("70000", "players_min=65535"),
                            ("1e1", "players_min=10")):
            self.type("[name=players_min]", typed)
            self.assertEqual(self.js("location.search").partition("&")[2], kept, typed)
        self.expect(lambda server: server.players > 9 and server.players != server.max_players)

    def test_countries(self):
        """Chosen by boxes, sorted by, kept in the address and by a refresh and the back button."""
        for index, server in enumerate(self.site.servers):
            server.country = ("de", "nl", "", "us")[index % 4]
        self.open()
        self.assertGreater(self.of("td:nth-child(6)", "offsetWidth"), 0)
        self.assertEqual(self.all("#countries label", "textContent.trim()"),
                         ["Germany 15", "Netherlands 15", "United States 15"])
        self.assertEqual(self.of("#countries summary"), "Countries")
        self.click("#countries summary")
        for codes, summary in (("nl", "NL"), ("de", "DE, NL"), ("us de nl", "US")):
            for code in codes.split():
                self.click("[value=%s]" % code)
            self.assertEqual(self.of("#countries summary"), "Countries: " + summary)
            chosen = summary.lower().split(", ")
            self.expect(lambda server: server.country in chosen)
            self.assertEqual(self.link(), "/?country=" + ",".join(chosen))
        self.js("view.country = ['a', 'b', 'c', 'd']; tellFilters(); 0")
        self.assertEqual(self.of("#countries summary"), "Countries: 4")
        self.js("view.country = ['de', 'nl']; tellFilters(); show(); keepView()")
        self.site.servers[0].country, self.site.servers[1].country = "fr", "de"
        self.js("document.querySelector('[value=nl]').focus()")
        self.refresh()
        self.expect(lambda server: server.country in ("de", "nl"))
        self.assertEqual(self.all("#countries :checked", "value"), ["de", "nl"])
        self.assertEqual(self.js("document.activeElement.value"), "nl")
        self.assertIn("France 1", self.of("#countries"))
        self.click("h1")
        self.assertFalse(self.of("#countries", "open"))
        self.click("th a", 5)
        self.assertEqual(self.cells(5), sorted(self.cells(5)))
        self.click("[value=de]")
        self.click("[value=nl]")
        self.assertEqual((len(self.names()), self.cells(5)[-15:]), (60, [""] * 15))

    def test_link_and_back_button_reproduce_the_view(self):
        for server in self.site.servers[::2]:
            server.country = "nl"
        self.open("/?game=subspace&country=nl")
        self.type("[name=q]", "e")
        self.click("[value=empty]")
        self.click("th a", 0)
        names, link = self.names(), self.link()
        self.assertEqual(names, sorted(names, key=str.lower))
        self.assertEqual(link, "/?game=subspace&country=nl&q=e&hide=empty&sort=name")
        self.assertIn("country=nl&q=e&hide=empty&sort=name&game=aio",
                      self.of("#tabs a:last-child", "href"))
        for way in "history.back()", "location = %r" % link:
            self.open("/check")
            self.js(way + "; 0")
            # The script hides the button as soon as it listens to the boxes
            eventually(lambda: self.link() == link and self.names() == names
                       and self.of("#search button", "hidden"))
            self.assertEqual(self.all("[name=q], input:checked", "value"),
                             ["e", "empty", "nl"])
        self.click("[value=nl]")                        # the others are fetched at once
        self.type("[name=q]", "")
        eventually(lambda: len(self.names()) == sum(
            server.game == "subspace" and server.players > 0 for server in self.site.servers))

    def test_a_player_is_found_and_no_match_offers_to_clear(self):
        player = make_server("luanti", "192.0.2.9", name="Somewhere", private={
            "luanti_announcement": {"clients_list": ["CTFanny"]}})
        for most in 2000, 50:
            self.addCleanup(setattr, ms, "PAGE_ROWS", 2000)
            ms.PAGE_ROWS = most
            self.site.servers = make_servers(60) + [player]
            self.open("/?game=luanti" if most == 2000 else "/")
            self.type("[name=q]", "ctfanny")
            eventually(lambda: self.names() == ["Somewhere"])
            self.assertEqual(self.of("tbody tr:not([hidden])", "dataset.with"), "CTFanny")
            self.refresh()
            self.assertEqual(self.names(), ["Somewhere"])
            for text, heading in ("nobody", "“nobody”."), ("nobod", "“nobod”."):
                self.type("[name=q]", text)
                eventually(lambda: self.of("#hint p") == heading)
                self.assertEqual(self.all("#servers, .legend", "checkVisibility()"), [False] * 2)
            self.refresh()
            self.assertEqual(self.of("#hint p"), heading)
            self.type("[name=q]", "somewhere")
            eventually(lambda: self.names() == ["Somewhere"] and self.of("#hint *") is None)
            self.type("[name=q]", "nobody")
            eventually(lambda: self.of("#hint p") == "“nobody”.")
            if most == 2000:
                self.type("[name=q]", "")
                self.assertIsNone(self.of("#hint *"))
                self.type("[name=q]", "nobody")
            for clear in "#clear a", "#hint a":
                self.open(self.link())
                self.says("0 of ")
                self.assertGreater(self.of(clear, "offsetHeight"), 0)
                link = self.link()
                self.click(clear)
                eventually(lambda: self.names() and self.of("[name=q]", "value") == "")
                self.assertEqual(self.of("#clear", "offsetHeight"), 0)
                self.open(link)

    def test_filters_are_counted_and_no_match_leads_to_other_games(self):
        """As the master itself says it of the same choice."""
        for server in self.site.servers[::2]:
            server.country = "nl"
        self.site.servers[3].name, game = "Only here", self.site.servers[3].game
        other = "aio" if game != "aio" else "iceball"
        self.open("/?game=" + other)
        self.click("[value=password]")
        self.click("[value=nl]")
        self.click("[value=nl]")
        self.type("[name=players_min]", "1")
        self.type("[name=q]", "only here")
        texts = "['.filters summary', '#status', '#hint'].map(it => document.querySelector(it)"
        eventually(lambda: "In other games" in self.of("#hint"))
        by_script = self.js(texts + ".textContent)")
        self.assertEqual(by_script[0], "Filters · 2")
        self.assertTrue(self.of("#clear", "checkVisibility()"))
        self.assertEqual(self.all("#hint .tabs a", "getAttribute('href')"), [
            "/?game=%s&q=only+here&players_min=1&hide=password" % game])
        self.browser.call("Emulation.setScriptExecutionDisabled", value=True)
        self.addCleanup(self.browser.call, "Emulation.setScriptExecutionDisabled", value=False)
        self.open(self.link())
        self.assertEqual(self.js(texts + ".textContent)"), by_script)
        self.click("#hint .tabs a")
        self.expect(lambda server: server.name == "Only here")

    def test_favourites_and_order(self):
        self.open()
        self.assertEqual(self.of(".starred", "offsetHeight"), 0)
        for index in 3, 7, 9:
            self.click(".star", index)
        self.click(".star", 9)
        chosen = [self.site.servers[3].name, self.site.servers[7].name]
        self.assertEqual(self.of(".starred", "innerText").split(), ["★2"])
        self.open()                                     # it is kept
        self.refresh()
        self.click(".starred")
        self.assertEqual(self.names(), chosen)
        self.assertEqual(self.all("#tabs [aria-current=page]", "className"), ["starred"])
        self.refresh()
        self.assertEqual(self.names(), chosen)
        self.click(".starred")
        self.expect()
        self.browser.resize(390)
        self.js("{const order = document.querySelector('[name=sort]'); order.value = 'game';"
                "order.dispatchEvent(new Event('input', {bubbles: true}))}")
        self.assertEqual(self.cells(2), sorted(self.cells(2)))
        self.assertEqual(self.link(), "/?sort=game")
        # Another tab has changed them
        self.js("localStorage.setItem('favourites', JSON.stringify(['/server?elsewhere']))")
        self.click(".star", 9)
        self.assertIn("/server?elsewhere", self.js("localStorage.getItem('favourites')"))
        self.assertEqual(self.of(".starred", "innerText").split(), ["★1"])
        for text in "{", "{}", "5", "[[1], null]", "[" * 5000:      # nothing that the page has kept
            self.js("localStorage.setItem('favourites', %r)" % text)
            self.open()
            self.expect()
            self.click(".star")
            self.assertEqual(self.of(".starred", "innerText").split(), ["★1"])
        self.js("localStorage.clear()")

    def test_live_update_keeps_focus_and_scroll(self):
        self.open()
        # Far down, with the focus on a link in a row whose name changes
        self.js("""window.mark = document.querySelectorAll('tbody tr')[40]; window.faded = [];
            Element.prototype.animate = function() { faded.push(this); };
            mark.querySelector('a').focus()""")
        self.refresh()
        place = "[scrollY, mark.getBoundingClientRect().top]"
        before = self.js(place)
        self.assertGreater(before[0], 0)
        self.site.servers.pop(50)
        self.site.servers[40].name, self.site.servers[10].players = "Renamed", 77
        self.site.servers[20].last_seen = -1.0
        self.site.servers.append(make_server(name="Brand new", address="198.51.100.9"))
        for status in 200, 304:                         # what has not changed costs next to nothing
            self.site.asked.clear()
            self.refresh()
            self.expect()
            self.assertEqual(self.site.asked, [("/", status)])
            eventually(lambda: self.js("faded.length") >= 3)
            self.assertEqual(self.js("faded.length"), 3)           # two cells and a row, no time
        self.assertEqual(self.js(place), before)
        self.assertEqual(self.js("document.activeElement.textContent"), "Renamed")
        self.assertTrue(self.js("document.querySelectorAll('tbody tr')[40] === mark"))
        self.assertEqual(self.of("tbody tr:nth-child(11) td:nth-child(2) b"), "77")
        self.assertEqual(len(self.all("tbody tr .copy")), 60)

    def test_an_own_template_of_the_table_alone_is_refreshed_by_itself(self):
        script = self.browser.call("Page.addScriptToEvaluateOnNewDocument", source="""
            window.setInterval = (call, ms) => every(call, ms / 20)""")
        self.addCleanup(self.browser.call, "Page.removeScriptToEvaluateOnNewDocument", **script)
        self.site.template = "<!doctype html>$head$table"
        self.addCleanup(delattr, self.site, "template")
        self.open()
        self.site.servers = self.site.servers[:3]
        self.expect()

    def test_live_update_keeps_search_sort_and_selection(self):
        self.open("/?sort=-players")
        self.type("[name=q]", "a")
        server = self.site.servers[1]
        server.name, server.players = "Aaa", 1000
        self.refresh()
        self.assertEqual(self.names()[0], "Aaa")
        self.assertEqual(self.js("document.activeElement.name"), "q")
        for target, part, mode in (("", "tbody code", "New"), ("/server", "#facts dd", "Newer")):
            if target:
                self.open(link_to(server))
                self.js("document.querySelector('#facts .copy').focus()")      # as if clicked
            self.js("getSelection().selectAllChildren(document.querySelector(%r))" % part)
            selected, server.mode = self.js("String(getSelection())"), mode
            self.site.asked.clear()
            self.refresh()
            self.assertEqual((self.js("String(getSelection())"), self.site.asked), (selected, []))
            self.js("getSelection().removeAllRanges()")
            self.refresh()
            self.assertIn(mode, self.of("main"))
        self.assertEqual(self.js("document.activeElement.className"), "copy")
        self.assertEqual(len(self.all("#facts .copy")), 1)

    def test_players_come_and_go(self):
        playing = {"clients_list": []}
        server = make_server("luanti", private={"luanti_announcement": playing})
        self.site.servers = [server]
        self.open(link_to(server))
        for names in [], ["Ann", "Bob"], ["Bob"], []:
            playing["clients_list"] = names
            self.refresh()
            self.assertEqual(self.all("#players li"), names)
            self.assertEqual(self.of("#players", "offsetHeight") > 0, names != [])

    def test_tabs_countries_and_the_empty_state_come_and_go(self):
        one, other = make_server(country="de"), make_server(game="aio", address="192.0.2.2")
        self.site.servers = []
        self.open()
        for servers, tabs in (([], ""), ([other], ""), ([one, other], "All games2 Iceball1 AIO1"),
                              ([one], ""), ([], "")):
            self.site.servers = servers
            self.refresh()
            self.assertEqual(" ".join(self.of("#tabs", "innerText").split()), tabs)
            self.assertEqual(len(self.names()), len(servers))
            self.assertEqual("No servers yet" in self.of("main", "innerText"), not servers)
            for selector, is_shown in (("#tabs", tabs), ("#servers", servers),
                                       ("#countries", one in servers),
                                       ("th:nth-child(6)", one in servers)):
                self.assertEqual(self.of(selector, "offsetHeight") > 0, bool(is_shown), selector)
        self.assertEqual(self.all("#hint .play"), ["Add your server"])

    def test_master_away(self):
        server = self.site.servers[8]
        for target, page in (("/", "list"), ("/check?address=" + server.address, "page"),
                             (link_to(server), "page")):
            self.open(target)
            self.assertEqual(self.of("#status", "offsetHeight") > 0, page == "list")
            self.js("document.querySelector('td:nth-child(9), time').textContent = 'old'")
            self.site.down = True                       # it answers with an error
            self.refresh()
            self.says("The master answers with error 503. This %s is from" % page)
            self.assertNotEqual(self.of("td:nth-child(9), time"), "old")
            self.site.down = False
            self.refresh()
            self.says("60 servers" if page == "list" else "")
            since = self.js("lastAnswer")
            for reply in (                              # none, a log-in page of a network, silence
                    "fetch = () => Promise.reject(new TypeError())",
                    "fetch = async () => new Response('<h1>Log in</h1>')", """
                    window.later = setTimeout; setTimeout = call => later(call, 10);
                    fetch = (url, {signal}) => new Promise((_, fail) =>
                        signal.addEventListener('abort', () => fail(signal.reason)))"""):
                self.js("failed = ''; %s; 0" % reply)
                self.refresh()
                self.says("The master does not answer. This %s is from" % page)
            self.assertEqual(self.js("lastAnswer"), since, "since when the page is old")
        self.js("fetch = async () => ({ok: false, status: 404}); 0")
        self.refresh()
        self.says("This server is not listed any more. This page is from")
        self.browser.page_errors()

    def test_copy(self):
        self.browser.call("Browser.grantPermissions", permissions=[
            "clipboardReadWrite", "clipboardSanitizedWrite"])
        self.open()
        server = self.site.servers[3]
        address = ms.endpoint_text(server.address, server.port)
        for without in "", "navigator.clipboard.writeText = undefined":       # as with plain http
            self.js("setTimeout = () => 0")             # what it says does not pass
            self.js("navigator.clipboard.writeText('')")
            self.js(without)
            self.click(".copy", 3)
            eventually(lambda: self.of("body > .unseen") == "Copied " + address)
            self.assertEqual(self.js("navigator.clipboard.readText()"), address)
            self.assertEqual(self.of("body :focus", "title"), "Copy" if without else None)
            self.js("document.querySelector('body > .unseen').textContent = ''")

    def test_blocks_are_copied_exactly(self):
        self.browser.call("Browser.grantPermissions", permissions=[
            "clipboardReadWrite", "clipboardSanitizedWrite"])
        for width, dark in (1280, False), (390, True):
            self.browser.resize(width, dark=dark)
            self.open("/add")
            self.assertLessEqual(self.of("html", "scrollWidth"), width)
            blocks = self.all("pre code")
            self.assertEqual(len(self.all("pre .copy")), len(blocks))
            self.assertIn("server_announce = true\nserverlist_url = http://127.0.0.1:%d"
                          % self.site.server_address[1], blocks)
            for index, block in enumerate(blocks):
                self.click("pre .copy", index)
                eventually(lambda: self.js("navigator.clipboard.readText()") == block)
            edges = self.js(EDGES % "pre, pre .copy")
            self.assertGreaterEqual(min(left for left, _, _ in edges), 0)
            self.assertLessEqual(max(right for _, right, _ in edges), width)


class LayoutTest(BrowserCase):
    """What the page is without it, and how it looks."""

    def test_the_games_fit(self):
        """On a phone the means are left out, and the servers stand below the numbers."""
        servers = self.site.servers[:3]
        servers[0].name = "The Very Long-Named Courtroom of Attorney Reenactments, Season 7"
        spans = dict.fromkeys(("day", "week", "month"), 65535)
        pasts = {"": ms.GamePast(spans, spans, [1] * 84, [])}
        for server in servers:
            most_played = [(one.key, 64.0) for one in servers if one.game == server.game]
            pasts[server.game] = pasts[""]._replace(most_played=most_played)
        web = functools.partial(web_of, pasts=pasts)
        with mock.patch.dict(globals(), web_of=web):
            for width, shown in ((1920, True), (1280, True), (1025, True), (1024, False),
                                 (390, False), (320, False)):
                self.browser.resize(width)
                self.open("/games")
                self.assertLessEqual(self.js("document.documentElement.scrollWidth"), width)
                self.assertEqual(self.css("#games td:nth-child(7)", "display") != "none", shown)
                self.assertEqual(self.css("#games td a", "textOverflow"), "ellipsis")
                boxes = self.js("""[...document.querySelectorAll('#games tbody tr')].map(row =>
                    [...row.cells].map(cell => cell.getBoundingClientRect()).filter(it => it.width)
                    .map(({left, right, top, bottom}) => ({left, right, top, bottom})))""")
                for row in boxes:
                    self.assertLessEqual(max(box["right"] for box in row), width)
                    for one, other in itertools.combinations(row, 2):
                        self.assertTrue(one["right"] <= other["left"] + .5
                                        or other["right"] <= one["left"] + .5
                                        or one["bottom"] <= other["top"] + .5
                                        or other["bottom"] <= one["top"] + .5, (width, one, other))

    def test_complete_without_the_script(self):
        self.browser.call("Emulation.setScriptExecutionDisabled", value=True)
        self.addCleanup(self.browser.call, "Emulation.setScriptExecutionDisabled", value=False)
        for index, server in enumerate(self.site.servers):
            server.country = ("de", "nl", "us")[index % 3]
        self.open("/?game=subspace&name=e")
        self.expect(lambda server: server.game == "subspace" and "e" in server.name.lower())
        self.assertEqual(self.all("th button, .copy"), [])
        fields = self.js("[...new FormData(document.querySelector('#search'))].map(String)")
        self.assertEqual(fields, ["game,subspace", "q,e", "players_min,", "sort,"])
        self.assertGreater(self.of("#search button", "offsetHeight"), 0)
        self.open("/?country=us")
        self.expect(lambda server: server.country == "us")
        self.js("document.querySelector('[value=de]').checked = true")
        self.click("#search button")
        eventually(lambda: "country=de&country=us" in self.link())
        self.expect(lambda server: server.country in ("de", "us"))

    def test_the_board_looks_like_one(self):
        """The name heaviest, figures in columns, full servers dimmed, empty ones lighter."""
        self.site.servers = [make_server(players=n, port=n + 1) for n in (3, 32, 0)]
        self.browser.resize(2560)
        self.open()
        self.assertLessEqual(self.of("#servers", "offsetWidth"), 1600)
        self.assertEqual(self.css("tbody tr", "fontVariantNumeric"), "tabular-nums")
        self.assertIn("monospace", self.css("tbody code", "fontFamily"))
        soft = self.css("footer a", "color")
        for number, weight, is_soft in ((1, "650", False), (2, "650", True), (3, "400", True)):
            row = "tbody tr:nth-child(%d) " % number
            self.assertEqual(self.css(row + "a", "fontWeight"), weight)
            self.assertEqual(self.css(row + "td:nth-child(2)", "color") == soft, is_soft)
        self.browser.resize(390, dark=True)
        self.assertEqual((self.css("body", "backgroundColor"), self.css("body", "color")),
                         ("rgb(19, 18, 16)", "rgb(236, 232, 223)"))
        tops = self.js("""[...document.querySelector('tbody tr').cells]
            .filter(cell => cell.offsetWidth).map(cell => cell.getBoundingClientRect().top)""")
        self.assertEqual([round((top - tops[0]) / 32) for top in tops], [0, 0, 1, 1, 1, 1],
                         "two lines: name and players, the rest")

    def test_the_name_has_what_is_left(self):
        """A third of the board at any width: the columns leave one after the other."""
        games = "iceball hyperbol subspace aio luanti openarena xonotic mygame".split()
        for index, server in enumerate(make_servers(60)):
            self.site.servers[index] = make_server(
                games[index % 8], server.address, name="Very long name " * 4, port=server.port,
                country="de", details={"flags": "password"}, verified="self-reported")
        row = "document.querySelector('tbody tr')"
        columns = list(ms.SORTS)
        for width, height, left in (
                (1920, 900, None), (1599, 900, "seen"), (1439, 900, "version"), (1280, 900, None),
                (1264, 900, "mode"), (1088, 900, "map"), (865, 900, None), (390, 844, "all")):
            if left in columns:
                columns.remove(left)
            for dark in False, True:
                self.browser.resize(width, height, dark)
                self.open()
                shown = self.all("thead th", "offsetWidth && it.textContent.toLowerCase()")
                if left != "all":
                    self.assertEqual(list(filter(None, shown)), columns, width)
                share = self.js("%s.cells[0].offsetWidth / %s.offsetWidth" % (
                    row, "document.querySelector('#servers')"))
                self.assertGreaterEqual(share, 0.35, width)
                self.assertLessEqual(self.of("html", "scrollWidth"), width)
                self.assertGreater(self.js(row + ".querySelector('bdi').offsetWidth"), width / 5)

    def test_on_a_phone(self):
        """The first row is near the top, games stand in one row, and filters open on demand."""
        self.browser.resize(390)
        self.open()
        first = self.of("tbody tr", "getBoundingClientRect().top")
        self.assertLessEqual(first, 330 - 46, "room for two lines of the operator's")
        self.assertEqual(self.of("[value=empty]", "checkVisibility()"), False)
        self.click(".filters summary")
        self.assertEqual(self.of("[value=empty]", "checkVisibility()"), True)
        self.open("/?game=aio")
        boxes = self.js("""[...document.querySelectorAll('#tabs a:not([hidden])')].map(tab =>
            [tab.getBoundingClientRect(), tab.textContent]).map(([{top, left}, text]) =>
            [left, top, text])""")
        self.assertEqual(len({top for _, top, _ in boxes}), 1)
        self.assertIn("AIO", min(boxes)[2])
        # The row leads to the server's page, but its buttons do what they say
        for selector, target in ("tbody b", "A"), (".star", "star"), (".copy", "copy"):
            self.assertIn(target, self.js("""{
                const box = document.querySelector(%r).getBoundingClientRect();
                const hit = document.elementFromPoint(
                    box.left + box.width / 2, box.top + box.height / 2);
                [hit.tagName, hit.className]}""" % selector))

    def test_a_server_s_page(self):
        """The number at the right of the title, the chart as wide as the page, players beside the
        facts; on a phone one below the other. Hostile names stay within."""
        names = [ms.clean(text, 32) for text in HOSTILE]
        clients = [ddnet_client(name, clan=name, score=-(1 << 31) + 1, is_player=index > 0)
                   for index, name in enumerate(names * 3)]
        registration = {"info": ddnet_info(clients=clients, game_type="CTF").decode(),
                        "addresses": ["tw-0.6+udp://192.0.2.1:27790"]}
        table = make_server("ddnet", players=65_535, max_players=65_535,
                            private={"ddnet_registration": registration})
        names_alone = make_server(
            "luanti", private={"luanti_announcement": {"clients_list": names}})
        self.site.servers = [table, names_alone, make_server()]
        for server, width in itertools.product(self.site.servers, (320, 390, 768, 1280, 1920)):
            self.browser.resize(width, dark=width == 1280)
            if width == 320:
                self.open(link_to(server))
            self.assertLessEqual(self.of("html", "scrollWidth"), width)
            boxes = self.js("""['main', 'h1', '.totals', '.chart .grid', '#players', '#facts']
                .map(part => document.querySelector(part).getBoundingClientRect())
                .map(({left, right, top, bottom}) => ({left, right, top, bottom}))""")
            main, title, count, grid, players, facts = boxes
            is_wide = width >= 768
            self.assertEqual(count["left"] > title["right"], is_wide, width)
            self.assertLessEqual(count["right"], main["right"])
            self.assertGreater(grid["right"] - grid["left"], main["right"] - main["left"] - 120)
            if server is self.site.servers[-1]:
                self.assertEqual(players["right"], 0, "nobody is known to play")
                continue
            self.assertEqual(facts["left"] > players["right"], is_wide)
            self.assertEqual(facts["top"] > players["bottom"], not is_wide)
            for left, right, height in self.js(EDGES % "#players :is(th, td, li)"):
                self.assertTrue(0 <= left < right <= width and height < 300, (width, left, right))
            self.assertFalse(any(self.all("#players :is(td, li)", "scrollWidth > it.clientWidth")))

    def test_banner_on_its_page_and_alone(self):
        server = self.site.servers[0]
        self.open(link_to(server))
        eventually(lambda: self.js("document.images[0].naturalWidth") == 560)
        for dark, ground in ((False, "rgb(252, 251, 248)"), (True, "rgb(19, 18, 16)")):
            self.browser.resize(1280, dark=dark)
            self.open(ms.server_link(server, "/banner.svg"))
            self.assertEqual(self.css(".card", "fill"), ground)

    def test_an_operator_s_look(self):
        """The logo is an image on every page, and alone; its script runs nowhere. On a phone many
        links scroll sideways; the first row keeps its place."""
        self.site.look = {
            "logo": ("image/svg+xml", SVG.encode()), "intro": "Every Friday. " * 5,
            "links": [("head", "Link %d" % number, "https://h.example/") for number in range(9)]}
        self.addCleanup(setattr, self.site, "look", {})
        for target in "/", "/check", "/nowhere", link_to(self.site.servers[0]):
            for width in 320, 390, 1280:
                self.browser.resize(width)
                self.open(target)
                eventually(lambda: self.js("document.images[0].naturalWidth"))
                self.assertEqual(self.of(".logo", "offsetHeight"), 32)
                self.assertLessEqual(self.of("html", "scrollWidth"), width)
                self.assertEqual(len(set(self.all(
                    "header .links a", "getBoundingClientRect().top"))), 1, (target, width))
            self.browser.resize(390)
            if target == "/":
                top = self.js("document.querySelector('tbody tr').getBoundingClientRect().top")
                self.assertLessEqual(top, 330)
        self.browser.page_errors()                      # of the page that is nowhere
        self.open("/icon")
        self.assertEqual((self.css("rect", "fill"), self.of("#ran")), ("rgb(255, 0, 0)", None))
        errors = self.browser.page_errors()
        self.assertEqual({"Blocked script execution" in error for error in errors}, {True}, errors)

    def test_nothing_stands_out(self):
        self.site.servers[5:5] = hostile_servers()
        for server in self.site.servers[::2]:
            server.country = "gs"
        for target in ("/", "/?game=iceball", "/check?address=192.0.2.3", "/nowhere", "/check",
                       "/add", "/add?game=luanti",
                       *map(link_to, hostile_servers()),
                       *[link_to(make_server(address="192.0.2.9")) + "&span=" + span
                         for span in ms.SPANS]):
            self.open(target)
            for width in 320, 390, 600, 768, 1000, 1280, 1920:
                self.browser.resize(width)
                self.assertLessEqual(self.of("html", "scrollWidth"), width, target)
                is_cut = any(self.all("h1, dd, li, p", "scrollWidth > it.clientWidth"))
                # Combining marks alone have nowhere to break
                self.assertTrue(not is_cut or "2.6&" in target, (target, width))
                # Where the main part ends, Safari cuts off: it has no overflow-clip-margin
                main, *texts = self.js(EDGES % "main, .chart text")
                self.assertEqual(len(texts) > 6, "server?" in target)
                for left, right, height in texts:
                    self.assertTrue(main[0] <= left and right <= main[1] and height >= 12,
                                    (target, width, main, left, right, height))
                if target == "/":
                    self.assertEqual(self.names()[5:15], HOSTILE)
                    heights = self.js(ROWS + ".map(row => row.offsetHeight)")
                    self.assertEqual(set(heights), {68 if width <= 864 else 40})
        self.browser.page_errors()                      # of the page that is nowhere

    def test_text_twice_as_large(self):
        for target in "/", "/check":
            self.open(target)
            self.browser.resize(390)
            self.js("document.documentElement.style.fontSize = '200%'")
            for _, right, _ in self.js(EDGES % "input:not([type=hidden])"):
                self.assertLessEqual(right, 390 - 32, target)
        self.browser.resize(195)                        # a phone's width in such text
        self.open()
        for left, right, _ in self.js(EDGES % "bdi"):
            self.assertGreater(right - left, 60, "px of the name")

    @unittest.skipUnless(shutil.which("npm"), "no npm on PATH")
    def test_axe_finds_no_violation(self):
        """axe-core, as `npm install -g axe-core` brings it."""
        root = subprocess.check_output(["npm", "root", "-g"], text=True).strip()
        path = os.path.join(root, "axe-core", "axe.min.js")
        if not os.path.exists(path):
            self.skipTest("no axe-core of npm")
        with open(path, encoding="utf-8") as file:
            axe = file.read()
        self.site.servers = servers = [
            make_server(players=players, port=port, country="de", verified=verified, official=True,
                        details={"flags": "password"}, confirmed=False, responding=port == 1)
            for port, (players, verified) in enumerate(
                ((32, "query"), (3, "self-reported"), (0, "another list")), 1)]
        servers.append(make_server("luanti", name="Another game", private={
            "luanti_announcement": {"clients_list": ["Ann", "Bob"]}}))
        for listed, pages in (
                (servers, ("/", "/?game=aio", "/?q=a&hide=full&country=de&sort=name",
                           "/?game=iceball&q=ann", *map(link_to, servers[2:]), "/add",
                           "/games", "/check", "/check?address=192.0.2.3", "/nowhere")),
                ([], ("/", "/?game=luanti", "/?game=luanti&q=a", link_to(servers[0]), "/games"))):
            self.site.servers = listed
            for page in pages:
                self.open(page)
                self.js(axe + "; for (const one of document.querySelectorAll('details'))"
                        " one.open = true")
                for width, dark in (1280, False), (390, True):
                    self.browser.resize(width, dark=dark)
                    found = self.js("axe.run().then(it => it.violations.map(rule => ["
                                    "rule.id, rule.nodes.map(node => node.failureSummary)]))")
                    self.assertEqual(found, [], (page, width, len(listed)))
        self.js("document.querySelector('h1').append(new Image())")
        ids = self.js("axe.run().then(it => it.violations.map(rule => rule.id))")
        self.assertIn("image-alt", ids)
        self.browser.page_errors()                      # of pages that are nowhere

    def test_keyboard_and_screen_reader(self):
        self.browser.resize(1280, 400)
        self.open()
        self.js("document.querySelectorAll('tbody tr')[30].querySelector('a').focus()")
        for _ in range(20):                             # the focus is never behind the head
            self.browser.press("Tab", 9, shift=True)
            self.assertTrue(self.js("""document.activeElement.getBoundingClientRect().top
                >= document.querySelector('thead').getBoundingClientRect().bottom"""))
        for width, columns in (390, 6), (1280, 6), (1920, 8):     # no country is known
            self.browser.resize(width)
            nodes = self.browser.call("Accessibility.getFullAXTree")["nodes"]
            roles = [node["role"]["value"] for node in nodes if not node["ignored"]]
            self.assertEqual([roles.count(role) for role in (
                "table", "row", "meter", "search", "columnheader")], [1, 61, 0, 1, columns])


# --- Luanti, whose tests stand with those of the web ---------------------------------------------

# Captured from minetestserver 5.6.1: curl's head and body, what a server says at its start, 300 s
# later (but for its name, and who plays) and at its end, the master's probe and its answer
LUANTI_HEAD = (b"POST /announce HTTP/1.1\r\nHost: 127.0.0.1:27901\r\n"
               b"User-Agent: Minetest/5.6.1 (Linux/6.18.44-fc-v669 x86_64)\r\nAccept: */*\r\n"
               b"Accept-Encoding: gzip\r\nContent-Length: %d\r\nContent-Type: multipart/form-data; "
               b"boundary=------------------------17ae9aef32ac335a\r\n\r\n")
LUANTI_START = (
    b'{"action":"start","address":"","can_see_far_names":true,"clients":0,"clients_list":[],'
    b'"clients_max":15,"creative":false,"damage":true,"dedicated":true,"description":'
    b'"A description","game_time":21,"gameid":"minetest","mapgen":"v7","mods":["weather","sfinv",'
    b'"mtg_craftguide","sethome","screwdriver","player_api","default","walls","stairs","keys",'
    b'"give_initial_stuff","flowers","butterflies","fire","tnt","env_sounds","dungeon_loot",'
    b'"vessels","fireflies","carts","bucket","doors","xpanes","creative","bones","boats",'
    b'"binoculars","game_commands","dye","wool","farming","beds","spawn","map"],'
    b'"name":"Test \\"world\\" <b> \\u00fcn\\u00ef","password":false,"port":36302,'
    b'"privs":"interact, shout","proto_max":41,"proto_min":37,"pvp":true,"rollback":false,'
    b'"uptime":0,"url":"","version":"5.6.1"}')
LUANTI_UPDATE = (
    b'{"action":"update","address":"","clients":3,"clients_list":["ann","bob","ann"],'
    b'"clients_max":15,"creative":false,"damage":true,"description":"A description",'
    b'"game_time":300,"gameid":"minetest","lag":0.090900003910064697,"name":"Test",'
    b'"password":false,"port":36302,"proto_max":41,"proto_min":37,"pvp":true,"uptime":300,'
    b'"url":"https://example.org","version":"5.6.1"}')
LUANTI_DELETE = b'{"action":"delete","address":"","port":36302}'
LUANTI_PROBE, LUANTI_PROBED = hexa("4f457403 0000 0001"), hexa("4f457403 0001 0003 ffdc 0001 0002")
LUANTI_STORED = LUANTI_START[:-1] + b',"clients_top":9,"updates":2,"pop_v":4.5}'


def luanti_body(text):
    return (b'--------------------------17ae9aef32ac335a\r\nContent-Disposition: form-data; '
            b'name="json"\r\n\r\n%s\r\n--------------------------17ae9aef32ac335a--\r\n' % text)


def luanti_request(text):
    body = luanti_body(text)
    return LUANTI_HEAD % len(body) + body


# Captured from DDNet-Server 16.4: header fields of registrations, the same but for the address, and
# an info. Challenge-Token follows Challenge-Secret
DDNET_REGISTER = """\
POST /ddnet/15/register HTTP/1.1\r
Host: 127.0.0.1:27790\r
User-Agent: DDNet 16.4 (linux; amd64)\r
Accept: */*\r
Accept-Encoding: deflate, gzip, br, zstd\r
"""
DDNET_0_6 = """\
Address: tw-0.6+udp://connecting-address.invalid:8399\r
Secret: 2ffa794f-fcc9-473a-9966-0f2e0593c528\r
Challenge-Secret: f5a9746f-b7ed-44bd-938f-7651b76f0227:tw0.6/ipv4\r
Info-Serial: 0\r
"""
DDNET_0_7 = """\
Address: tw-0.7+udp://connecting-address.invalid:8399\r
Secret: 2ffa794f-fcc9-473a-9966-0f2e0593c528\r
Connless-Token: a37195fe\r
Challenge-Secret: f5a9746f-b7ed-44bd-938f-7651b76f0227:tw0.7/ipv4\r
Info-Serial: 0\r
"""
DDNET_DELETE_0_6 = """\
Action: delete\r
Address: tw-0.6+udp://connecting-address.invalid:8399\r
Secret: 2ffa794f-fcc9-473a-9966-0f2e0593c528\r
"""
DDNET_DELETE_0_7 = DDNET_DELETE_0_6.replace("tw-0.6", "tw-0.7")
DDNET_INFO = (
    b'{"max_clients":64,"max_players":64,"passworded":false,"game_type":"TestDDraceNetwork",'
    b'"name":"Te st \\"\xc3\xbc\\" <b>","map":{"name":"Tutorial",'
    b'"sha256":"0dafbba301084aebbf439575e36a44bfb65a4f15e606e9eec3814e2e0e28d953",'
    b'"size":1082711},"version":"0.6.4, 16.4","clients":[]}')
# Without a token, as in the captured packets; what follows it is the token and a NUL
DDNET_CHALLENGE_0_6 = (hexa("ffffffffffffffffffff") + b"chal"
                       b"f5a9746f-b7ed-44bd-938f-7651b76f0227:tw0.6/ipv4\0")
DDNET_CHALLENGE_0_7 = (hexa("21 a37195fe ffffffffffffffff") + b"chal"
                       b"f5a9746f-b7ed-44bd-938f-7651b76f0227:tw0.7/ipv4\0")
def ddnet_answer(kind: bytes, texts: bytes) -> bytes:
    """A datagram of a DDNet server, with | for each NUL."""
    return hexa("ffffffffffffffffffff") + kind + texts.replace(b"|", b"\0")


# Captured from DDNet-Server 16.4, with no, three and 62 clients; it cuts the game type. The last is
# the answer to the query of servers that are not DDNet's, which ends with the same byte
DDNET_QUERY, DDNET_NONCE = hexa("7865 1234 0000 ffffffff 67696533 42"), 0x123442
DDNET_NAMED = (b'1193026|0.6.4, 16.4|Te st "\xc3\xbc" <b>|Tutorial|-1924373370|1082711|'
               b'TestDDraceNetwor|0|%d|62|%d|64||')
DDNET_TWO = b"nameless tee||-1|-9999|1||\xc3\x84nn\xc3\xa4 <b>|C&A|276|-9999|1||"
DDNET_MORE = [b"player %d|clan %d|%d|-9999|1||" % (number, number, number)
              for number in range(2, 62)]
DDNET_EMPTY = ddnet_answer(b"iext", DDNET_NAMED % (0, 0))
DDNET_THREE = ddnet_answer(b"iext", DDNET_NAMED % (3, 3) + DDNET_TWO + DDNET_MORE[0])
DDNET_FULL = (
    ddnet_answer(b"iext", DDNET_NAMED % (62, 62) + DDNET_TWO + b"".join(DDNET_MORE[:41])),
    ddnet_answer(b"iex+", b"1193026|1||" + b"".join(DDNET_MORE[41:])))
DDNET_OLD = ddnet_answer(
    b"inf3", b'66|0.6.4, 16.4|Te st "\xc3\xbc" <b> [3/64]|Tutorial|TestDDraceNetwor|0|3|16|3|16|'
    b"nameless tee||-1|-9999|1|\xc3\x84nn\xc3\xa4 <b>|C&A|276|-9999|1|player 2|clan 2|2|-9999|1|")


def ddnet_request(fields: str, body: bytes = b"") -> bytes:
    """A request with these header fields, each with its end of line."""
    content = "Content-Type: application/json\r\n" if body else ""
    head = "%s%s%sContent-Length: %d\r\n\r\n" % (DDNET_REGISTER, fields, content, len(body))
    return head.encode() + body


def ddnet_info(**changed: Any) -> bytes:
    """The captured info with other members."""
    return json.dumps({**json.loads(DDNET_INFO), **changed}, ensure_ascii=False).encode()


def ddnet_client(name: str = "nameless tee", **changed: Any) -> Dict[str, Any]:
    """A client in an info, as its server describes it."""
    return {"name": name, "clan": "", "country": -1, "score": -9999, "is_player": True,
            "skin": {"name": "default"}, "afk": False, "team": 0, **changed}


# --- A world for each game, and what holds in all of them -----------------------------------------

class World:
    """The program without sockets, with a game server that speaks the game's protocol.

    A subclass has the packets that were captured, or that follow the document, and says how the
    game server announces itself and answers. The tests of all worlds are in EveryGame."""

    room: Any                           # the class of the room
    game = ""                           # under which the server is listed, if it is not the room's
    place: Tuple[str, int]              # where players find the server
    stranger: Any = ("192.0.2.1", 5000)
    packets: Any = ()                   # (the Form, a packet, its values)
    question, nonce = b"", 0            # of the poller
    answered: Dict[str, Any] = {}       # what the game server's answers say
    wrong_answers: Any = ()
    listed: Dict[str, Any] = {}         # attributes of the listed server
    lists: Any = ()                     # (what a player asks, the list of this one server)
    fetched: Any = ()                   # (dialect, what comes from another master with that list)
    named: Dict[str, str] = {}          # the setting that names the server
    private: Dict[str, Any] = {}        # stored private attributes
    bad_private: Any = ()
    unheard = "silent"                  # the outcome if the server does not answer
    blocks: Any = ()                    # what operators paste, from the master at m.example
    page_words: Any = ()                # on the server's page
    # What strangers send: (a name, datagrams, how many bytes more than these may be sent back)
    requests: Any = ()
    connections: Any = ()               # by TCP; KEY! stands for the key of the greeting
    bodies: Dict[str, Any] = {}         # of POST /announce, by their type

    def __init__(self, **settings):
        self.program = with_rooms(make_core(**settings))
        self.registry, self.poller = self.program.registry, self.program.poller
        self.program.send = self.sent = mock.Mock()
        self.web = ms.Web(self.program)
        self.here = self.program.rooms[self.room.game]
        self.id = self.game or self.room.game
        self.now, self.is_there = 0.0, True

    # The game server

    def announce(self):
        """What the game server does to be listed."""
        raise NotImplementedError

    def reply(self, packet):
        """Its answer to a packet of the master."""
        return b""

    def leave(self):
        self.is_there = False

    # What the event loop does

    def deliver(self, packet, peer):
        """A packet of the game server, the answers to it and so on."""
        for answer, to in deliver(self.here, packet, peer, self.now):
            reply = self.reply(answer)
            if reply and self.is_there:
                self.deliver(reply, to)

    def post(self, body, content_type="application/json", path="/announce"):
        """The answer to a request of the game server."""
        request = http_request(path, "Content-Length: %d" % len(body),
                               "Content-Type: " + content_type, method="POST", body=body)
        status, _, answer, _ = split_response(self.by_http(request, self.place[0]))
        return ms.HttpAnswer(status, answer)

    def by_http(self, request, source="192.0.2.1", size=1 << 30):
        return feed(self.web.session(source, self.now), request, size, self.now)

    def get(self, path, size=1 << 30):
        self.web.forget_responses()
        return split_response(self.by_http(http_request(path), size=size))[2]

    def ask(self, question, size):
        """The list that a player gets who asks in pieces of this size."""
        return self.get(question, size)

    def run(self, seconds):
        for _ in range(seconds):
            self.now += 1.0
            self.registry.expire(self.now)
            for event, server in changes_of(self.registry):
                if event == "gone":
                    self.here.gone(server)
            for packet, to in self.here.tick(self.now):
                if self.is_there:
                    self.deliver(self.reply(packet), to)
            for packet, to in self.poller.tick(self.now):
                if self.is_there:
                    with contextlib.suppress(ms.Malformed):
                        self.poller.datagram(self.reply(packet), to, self.now + 0.02)

    def find(self, **fields):
        """Another master's list names the server."""
        found = {**self.found_fields(), **fields}
        return self.here.query_found(ms.FoundServer(*self.place, "up.example", found))

    def found_fields(self):
        return self.here.found({})

    def servers(self):
        return self.registry.servers(self.id)

    def values(self):
        """These attributes of the one listed server."""
        server, = self.servers()
        return {name: getattr(server, name) for name in self.listed}

    def outcome(self):
        outcome = self.registry.outcome(self.place[0], self.room.game, self.place[1])
        return outcome and outcome.outcome


class IceballWorld(World):
    room, place, unheard = ms.Iceball, ("203.0.113.9", 21737), "announced"
    packets = (
        (ms.ICEBALL_ANNOUNCEMENT, CAPTURED, {
            "kind": b"1CEB", "hbversion": 2, "version": 8421413, "port": 21737, "players": 0,
            "max_players": 64, "name": b"Iceball Server".ljust(30, b"\0"),
            "mode": b"ctf".ljust(10, b"\0"), "map": b"classic(512,512)".ljust(30, b"\0")}),
        (ms.ICEBALL_VERSIONS, hexa("42414456 0200 25808000"),
         {"kind": b"BADV", "hbversion": 2, "version": 8421413}),
        (ms.DRAFT_REQUEST_HEAD, hexa("01 0100 0151"),
         {"kind": b"\1", "hbversion": b"\1\0", "port": 20737}))
    listed = {"name": "Iceball Server", "mode": "ctf", "map": "classic(512,512)", "players": 0,
              "max_players": 64, "version": "0.2.1-37", "verified": "handshake"}
    lists = (("/master.json", b'{"version":2,"iceball_version":8421413,"servers":[{"name":"Iceball '
              b'Server","address":"203.0.113.9","port":21737,"players_current":0,"players_max":64,'
              b'"mode":"ctf","map":"classic(512,512)","version":"0.2.1-37","basedir":"ctf"}]}'),)
    fetched = (("", [ms.HttpAnswer(200, lists[0][1])]),)
    blocks = ['"heartbeat_send": true,\n"heartbeat": [["m.example", 27790]]']
    page_words = ("classic(512,512)", "0.2.1-37")
    requests = (
        ("announcement", [CAPTURED], 0),
        ("all texts full", [announcement(name=b"n" * 30, mode=b"m" * 10, map=b"p" * 30)], 7),
        ("heartbeat version", [announcement(hbversion=3)], 0),
        ("its shortest", [announcement(hbversion=3)[:10]], 0),
        ("length", [CAPTURED + b"x"], 0), ("no versions", [b"1CEB\2"], 0),
        ("forged cookie", [b"HSHK" + bytes(80), hexa("4853484b 8a850c03")], 0),
        ("request id", [hexa("01 0100 0151 00")], 13),
        ("request id, version", [hexa("01 0200")], 0),
        ("fields", [hexa("03 01020304 01 4100"), hexa("04 01020304 01 05000000"),
                    hexa("05 01020304")], 0),
        ("other types", [hexa("02 01020304"), hexa("06"), b"\xff"], 0))

    def announce(self):
        self.deliver(CAPTURED, (self.place[0], 40000))

    def reply(self, packet):
        if packet[:4] == b"MSOK":
            return b"HSHK" + packet[4:]
        if packet[:1] == b"\2":                     # the first draft
            identity = packet[1:5]
            return b"\3" + identity + b"\1My server\0"
        return b""


class HyperbolWorld(World):
    room, place = ms.Hyperbol, ("203.0.113.9", 27888)
    nonce, question = 0x11223344, hexa("02 44332211")
    packets = (
        (ms.HYPERBOL_GREETING, hexa("4842534c 04030201 05000000"),
         {"key": 0x01020304, "players": 5}),
        (ms.HYPERBOL_REQUEST, hexa("04030201 ff000000"), {"key": 0x01020304, "filter": 255}),
        (ms.HYPERBOL_ENTRY, hexa("cb007109 f06c0000 03 000000"),
         {"address": hexa("cb007109"), "port": 27888, "flavor": 3}),
        (ms.HYPERBOL_QUERY, question, {"timestamp": nonce}))
    answered = {"name": "Fun & Games", "mode": "Capture the Core", "map": "orbital",
                "version": "1.8a", "players": 5, "max_players": 16,
                "details": {"skill": "9", "flags": "0x8000000d",
                            "factions": "IMF 3, Syndicate 1, Republic 2"}}
    wrong_answers = (b"", hyperbol_reply()[:228], hyperbol_reply(o0=b"\x1a"),
                     hyperbol_reply(o1=b"\x44\x33\x22\x10"))
    listed = {**answered, "verified": "query"}
    lists = (("ff000000", hexa("cb007109 f06c0000 00 000000")), ("00000000", b""))
    fetched = (("", [HBSL, lists[0][1], b""]),)
    named = {"hyperbol__servers": "203.0.113.9:27888 3"}
    private = {"flavor": 3}
    bad_private = ({"flavor": 256}, {"flavor": "3"}, {"flavor": True})
    blocks = ['python3 masterserver.py announce \\\n    --game hyperbol \\\n'
              '    --port 27888 \\\n    --name "My server" \\\n    m.example:8000']
    page_words = ("IMF 3, Syndicate 1, Republic 2",)
    connections = (b"KEY!" + hexa("10000000"), b"KEY!" + bytes(4))

    def announce(self):
        self.post(b'{"game":"hyperbol","port":27888}')

    def reply(self, packet):
        return hyperbol_reply(o1=packet[1:5])

    def ask(self, question, size):
        session = self.here.session("192.0.2.1", self.now)
        return feed(session, session.opened(self.now)[4:8] + hexa(question), size, self.now)


class ZoneWorld(World):
    room, place = ms.SubSpace, ZONE
    # The first question has 4 bytes, and 8 bytes have further ones
    nonce, question = PING_NONCE, PING_TIME
    packets = (
        (ms.PING_SHORT, PING_TIME, {"timestamp": PING_NONCE}),
        (ms.PING_LONG, PING_TIME + hexa("03000000"), {"timestamp": PING_NONCE, "options": 3}))
    answered = {"players": 6, "playing": 4, "details": {"arenas": ARENAS_TEXT}}
    wrong_answers = (b"", PING_TIME, hexa("06000000 11223345"), SHORT + b"\0")
    listed = {"name": "Loopback Test Zone", "description": "a real asss on loopback",
              "version": "134", "players": 6, "playing": 4, "verified": "query"}
    lists = (("list", b"\1" + hexa("cb007109 a861 0600 0100 86000000")
              + b"Loopback Test Zone".ljust(64, b"\0") + b"a real asss on loopback\0"),)
    fetched = (("", [b"\0\2" + KEY, hexa("0003 00000000 000a") + struct.pack("<I", len(lists[0][1]))
                     + lists[0][1], None]),)
    named = {"subspace__zones": "203.0.113.9:25000"}
    private = {"zone_owner": {"port": "5000", "password": "0123456789abcdef"}}
    bad_private = ({"zone_owner": 5}, {"zone_owner": {"port": "5000"}})
    blocks = ["[Directory]\nServer1 = m.example\nPort = 4990"]
    page_words = (ARENAS_TEXT, "a real asss on loopback")
    requests = (
        ("ping of 4", [PING_TIME], 4), ("ping for nothing", [PING_TIME + bytes(4)], 0),
        ("ping, total", [PING_TIME + hexa("01000000")], 8),
        ("ping, arenas", [PING_TIME + hexa("02000000")], 504),
        ("other sizes", [b"", b"x", bytes(6), bytes(94), bytes(481)], 0),
        ("zone", [ZONE_PACKET], 0),
        ("shortest zone", [zone_packet(name=b"Z", description=b"\0")], 0))

    def announce(self):
        self.deliver(ZONE_PACKET, (self.place[0], 5000))

    def reply(self, packet):
        return asss(packet) if len(packet) == 4 or packet[4:] in (
            b"\1\0\0\0", b"\2\0\0\0", b"\3\0\0\0") else b""

    def ask(self, question, size):
        """The player acknowledges nothing, and this list has one packet."""
        port = ms.SubSpaceList(self.here)
        replies = [reply for data in (CONNECT, REQUEST)
                   for reply in port.datagram(data, self.stranger, self.now)]
        replies += port.tick(self.now + 1.0)
        return next(data[12:] for data, _ in replies if data[:2] == b"\0\3")

    def found_fields(self):
        return self.here.found({"name": "Its zone", "version": 134, "description": "Far away",
                                "scores": True})


class FramedAioWorld(World):
    room, place = ms.Aio, AioWorld.place
    question, answered = AioWorld.question, AioWorld.answered
    wrong_answers = AioWorld.wrong_answers
    listed = {**answered, "verified": "connection"}
    lists = (
        (b"12#%\n", b"%12#My server#Fun!#203.0.113.9#27010#%"),
        (b"12#%", b"%12#0#My server#Fun!#203.0.113.9#27010#%"),
        (b"\x0c", hexa("0c 0000") + b"My server\0Fun!\x00203.0.113.9" + hexa("00 144801")),
        (hexa("01000000 02"), hexa("11000000 02 0100 0b") + b"203.0.113.9" + hexa("8269")))
    fetched = (("text", [AIO_GREETING, lists[0][1]]), ("framed", [AIO_GREETING, lists[3][1]]))
    blocks = ["m.example\n27011"]
    page_words = ("Fun!",)
    connections = (
        AIO_TEXT, AIO_TEXT + b"\n12#%KEEPALIVE#%NEWS#%", AIO_FRAMED, AIO_BINARY,
        b"13#Name [3/8]#D#203.0.113.7#27010#%12#%", b"SET_IP#203.0.113.7#%\n",
        AIO_FRAMED + AIO_KEEPALIVE + hexa("01000000 02 01000000 01"),
        hexa("0b000001 789c636eca0400017900ef"), *AIO_LISTS)
    session: Any = None

    def announce(self):
        """Publish again on the connection, or on a new one."""
        if self.session is None or self.session.done:
            self.session = self.here.session(self.place[0], self.now)
        feed(self.session, AIO_FRAMED, now=self.now)

    def leave(self):
        super().leave()
        if self.session is not None:
            self.session.closed(self.now)

    def reply(self, packet):
        return AioWorld.answer

    def ask(self, question, size):
        session = self.here.session("198.51.100.7", self.now)
        return feed(session, question, size, self.now) + session.tick(self.now + 0.2)


class OpenArenaWorld(World):
    room, game, place = ms.Quake3, "openarena", Quake3World.place
    unheard = "announced"
    nonce, question = Quake3World.nonce, Quake3World.question
    answered, wrong_answers = Quake3World.listed, Quake3World.wrong_answers
    listed = {**answered, "verified": "query", "room": "quake3"}
    lists = ((Quake3World.list_question, Quake3World.list_answer),)
    fetched = (("", [Quake3World.list_answer]),)
    blocks = ["openarena-server \\\n    +set dedicated 2 \\\n"
              "    +set sv_master2 m.example:27950 \\\n    +map oa_dm1",
              'sv_public 1\nsv_masterextra1 "m.example:27950"']
    page_words = ("oa_dm1",)
    requests = (
        ("heartbeat", [HEARTBEAT], 0), ("getstatus", [OUT + b"getstatus"], 0),
        ("heartbeat that is listed", [OUT + b"heartbeat DarkPlaces\n"] * 20, 0),
        ("unknown tag", [OUT + b"heartbeat x\n"], 0), ("infoResponse", [info(b"AbCdEf-_")], 0),
        ("getservers", [OUT + b"getservers 71 empty\n"], 114),
        ("getserversExt", [OUT + b"getserversExt Quake3Arena 71 empty full"], 94))

    def announce(self):
        self.deliver(HEARTBEAT, self.place)

    def reply(self, packet):
        return info(packet[12:]) if packet[:12] == OUT + b"getinfo " else b""

    def ask(self, question, size):
        return b"".join(data for data, _ in self.here.datagram(question, self.stranger, self.now))


class LuantiWorld(World):
    room, place = ms.Luanti, ("203.0.113.9", 36302)
    question = LUANTI_PROBE
    packets = ((ms.LUANTI_GOODBYE, hexa("4f457403 0002 0000 03"),
                {"peer": hexa("0002")}),)
    answered: Dict[str, Any] = {}
    wrong_answers = (
        b"", LUANTI_PROBED[:13], LUANTI_PROBED + b"\0", b"\0" + LUANTI_PROBED[1:], LUANTI_PROBE,
        hexa("4f457403 0001 0003 ffdc 0002 0002"), hexa("4f457403 0002 0003 ffdc 0001 0002"))
    listed = {"name": json.loads(LUANTI_START)["name"], "description": "A description",
              "players": 0, "max_players": 15, "version": "5.6.1", "verified": "query"}
    bad_private = ({"luanti_announcement": 5}, {"luanti_announcement": {"clients": "x"}})
    private = {"luanti_announcement": json.loads(LUANTI_STORED)}
    fetched = (("", [ms.HttpAnswer(200, b'{"list":[%s]}' % LUANTI_STORED.replace(
        b'"address":""', b'"address":"203.0.113.9"'))]),)
    blocks = ["server_announce = true\nserverlist_url = http://m.example:8000"]
    page_words = ("A description", "damage, pvp")
    bodies = {"multipart/form-data": [
        luanti_body(text) for text in (LUANTI_START, LUANTI_UPDATE, LUANTI_DELETE)]}

    def announce(self):
        self.by_http(luanti_request(LUANTI_START), self.place[0])

    def reply(self, packet):
        return LUANTI_PROBED if packet == LUANTI_PROBE else b""

    def found_fields(self):
        return self.here.found({"private": json.loads(LUANTI_STORED)})


DDNET_STORED = {
    "info": DDNET_INFO.decode(), "serial": 0, "secret": "0123456789abcdef" * 2,
    "addresses": ["tw-0.6+udp://203.0.113.9:8399"]}
DDNET_WRONG = [
    {"ddnet_registration": {**DDNET_STORED, name: value}} for name, values in {
        "info": ("", "{}", 5, None, ddnet_info(x="y" * 32_768).decode()),
        "serial": (1.5, None, True, "1"),
        "secret": (None, "0" * 31, "0" * 33, "g" * 32, 5),
        "addresses": ([], None, [5], ["tw-0.6+udp://x:1"], ["tw-0.6+udp://203.0.113.9:1"] * 5,
                      ["http://203.0.113.9:8399"], "tw", {"a": 1})}.items() for value in values]


def ddnet_reply(query: bytes, answer: bytes) -> bytes:
    """This captured answer with the token of a query, or b"" if the query is cut off."""
    if len(query) < 15:
        return b""
    token = int.from_bytes(query[2:4] + query[14:], "big")
    answer = answer.replace(b"1193026\0", b"%d\0" % token)
    return answer.replace(b"inf366\0", b"inf3%d\0" % query[14])


class DdnetWorld(World):
    room, place, unheard = ms.Ddnet, ("203.0.113.9", 8399), "challenged"
    nonce, question = DDNET_NONCE, DDNET_QUERY
    answered = {
        "name": 'Te st "\u00fc" <b>', "mode": "TestDDraceNetwor", "map": "Tutorial",
        "version": "0.6.4, 16.4", "players": 3, "max_players": 62, "details": {"flags": ""},
        "private": {"ddnet_registration": {
            "serial": 0, "secret": "", "addresses": ["tw-0.6+udp://203.0.113.9:8399"],
            "info": '{"max_clients":64,"max_players":62,"passworded":false,'
                    '"game_type":"TestDDraceNetwor","name":"Te st \\"\u00fc\\" <b>",'
                    '"map":{"name":"Tutorial"},"version":"0.6.4, 16.4","clients":['
                    '{"name":"nameless tee","clan":"","country":-1,"score":-9999,"is_player":true},'
                    '{"name":"\u00c4nn\u00e4 <b>","clan":"C&A","country":276,"score":-9999,'
                    '"is_player":true},{"name":"player 2","clan":"clan 2","country":2,'
                    '"score":-9999,"is_player":true}]}'}}}
    wrong_answers = (
        b"", DDNET_QUERY, DDNET_THREE[1:], DDNET_THREE[:-2], DDNET_THREE + b"x", DDNET_THREE[:60],
        DDNET_THREE + b"a\0b\0", DDNET_FULL[1], DDNET_OLD.replace(b"66", b"67", 1),
        DDNET_OLD.replace(b"66", b"1193026", 1), DDNET_THREE.replace(b"iext", b"dtsf"),
        *(DDNET_THREE.replace(b"\0%s\0" % old, b"\0%s\0" % new, 1) for old, new in (
            (b"62", b"65"), (b"62", b""), (b"62", b"2"), (b"64", b"-64"), (b"64", b"64.0"),
            (b"0", b"x"), (b"276", b"9999999999"), (b"64", b"9" * 1300), (b"3", b"\xb3"))),
        DDNET_THREE.replace(b"1193026", b"66"), DDNET_THREE.replace(b"1193026", b"-1193026"))
    listed = {"name": 'Te st "\u00fc" <b>', "mode": "TestDDraceNetwork", "map": "Tutorial",
              "version": "0.6.4, 16.4", "players": 0, "max_players": 64, "verified": "handshake"}
    lists = ((ms.DDNET_SERVERS, b'{"servers":[{"addresses":["tw-0.6+udp://203.0.113.9:8399"],'
              b'"info":%s}]}\n' % DDNET_INFO),)
    fetched = (("", [ms.HttpAnswer(200, lists[0][1])]),)
    private = {"ddnet_registration": DDNET_STORED}
    bad_private = ({}, {"ddnet_registration": 5}, {"ddnet_registration": {}}, *DDNET_WRONG)
    blocks = ["sv_register 1\nsv_register_url http://m.example:8000/ddnet/15/register\n"
              "http_allow_insecure 1"]
    page_words = ("203.0.113.9:8399",)

    def announce(self):
        """Register, with the token that has come by UDP."""
        for fields in DDNET_0_6, DDNET_0_6 + "Challenge-Token: %s\r\n":
            if "%s" in fields:
                if not self.sent.call_args or not self.is_there:
                    return
                fields %= self.sent.call_args[0][0].split(b"\0")[-2].decode()
            self.by_http(ddnet_request(fields, DDNET_INFO), self.place[0])

    def reply(self, packet):
        return ddnet_reply(packet, DDNET_THREE) if packet[:2] == b"xe" else b""


# PROTOCOLS, section 10. Red Eclipse's bytes are captures of redeclipse-server 1.6.0
RED_ECLIPSE_INFO = hexa("00 0f 80e600 03 00 805802 20 00 808613 00 01 06 00 02 40 00 00") + (
    b"futuresport\0\0\0")
RED_ECLIPSE_NAMED = hexa("02 0f 80e600 02 80 0001 805802 20 02 808613 00 01 06 00 02 40 00 00") + (
    b'ubik\0\x0c7My "server" \x0cs\x0c[0xFF0000]red\x0cS ^ caf\x8b\0\0\x0c3Ann\0Bob\0')
SAUERBRATEN_INFO = hexa("03 05 800401 0b 805602 10 01") + b"reissen\0\x0c3My \x0c7server\0"


class SauerbratenWorld(World):
    room, place = ms.Sauerbraten, ("203.0.113.9", 28785)
    nonce, question = 0x78563412, hexa("81 12345678")
    packets = ((ms.CUBE2_QUESTION, question, {"nonce": nonce}),)
    line, info = b"regserv 28785\n", SAUERBRATEN_INFO
    answered = {"name": "My server", "mode": "ctf", "map": "reissen", "version": "260",
                "players": 3, "max_players": 16,
                "details": {"master_mode": "veto", "seconds_left": "598"}}
    wrong_answers: Any = (
        b"", question, info, hexa("81 12345679") + info, question + info[:-1], question + b"\x80\1",
        question + hexa("03 05 800401 0b 805602"), question + info[:11] + b"reissen\0",
        question + info + b"x", question + RED_ECLIPSE_INFO, question + b"\3\6" + info[2:])
    listed = {**answered, "verified": "query"}
    lists: Any = ((b"list\n", b"addserver 203.0.113.9 28785\n\0"),
                  (b"\nlist\r\n", b"addserver 203.0.113.9 28785\n\0"))
    fetched: Any = (("", [lists[0][1][:10], lists[0][1][10:], b""]),)
    blocks = ['mastername "m.example"\nmasterport 28787']
    page_words: Any = ("ctf", "veto", "598")
    # What is answered at once
    asked: Any = ((b"reqauth 5 me\n", b"failauth 5\n"), (b"confauth 5 abcd\n", b"failauth 5\n"),
                  (b"reqserverauth me\n", b"failserverauth\n"), (b"hello world\n", b""),
                  (b"\n", b""))
    # What the game server is told
    listed_words, refused_words = b"succreg\ncleargbans\n", b"failreg %s\n"
    session: Any = None

    @classmethod
    def samples(cls):
        return (cls.line, *(line for line, _ in cls.asked + cls.lists), cls.line * 40, b"x" * 600)

    def announce(self):
        if self.session is None or self.session.done:
            self.session = self.here.session(self.place[0], self.now)
        feed(self.session, self.line, now=self.now)

    def leave(self):
        super().leave()
        if self.session is not None:
            self.session.closed(self.now)

    def told(self):
        return self.session.tick(self.now)

    def reply(self, packet):
        return packet + self.info if packet[:1] == b"\x81" else b""

    def ask(self, question, size):
        session = self.here.session("198.51.100.7", self.now)
        answer = feed(session, question, size, self.now)
        assert session.done
        return answer


SauerbratenWorld.connections = SauerbratenWorld.samples()


class RedEclipseWorld(SauerbratenWorld):
    room, place = ms.RedEclipse, ("203.0.113.9", 28801)
    question = SauerbratenWorld.question
    line, info = b'server 28801 * 160 "" 1 ""\n', RED_ECLIPSE_NAMED
    answered = {"name": 'My "server" red ^ caf\u00e9', "mode": "deathmatch", "map": "ubik",
                "version": "1.6.0", "players": 2, "max_players": 32,
                "details": {"master_mode": "locked", "seconds_left": "600", "branch": ""}}
    wrong_answers = (
        b"", question, info, hexa("81 12345679") + info, question + info[:-1],
        question + hexa("02 0f 80e600"), question + SAUERBRATEN_INFO)
    listed = {**answered, "verified": "query"}
    private = {"version_number": 160, "protocol": 230, "player_names": ["Ann", "Bob"]}
    answered = {**answered, "private": private}
    entry = b'addserver 203.0.113.9 28801 0 "My ^"server^" red ^^ caf\x8b" "" "" ""\n'
    lists = ((b"list\n", b"clearservers\n" + entry),
             (b"update\n", b"setversion 160 230\nclearservers\n" + entry),
             (b"version\n", b"setversion 160 230\n"))
    fetched = (("", [
        b'clearservers\naddserver 203.0.113.9 28801 0 "^f7My ^"server^" ^fs^f[0xFF0000]red^fS ^^ '
        b'caf\x8b" "" "" "?"\n', b""]),)
    bad_private = ({"protocol": "230"}, {"version_number": -1}, {"player_names": "Ann"},
                   {"player_names": [5]})
    blocks = ['servertype 2\nservermaster "m.example"\nservermasterport 28800']
    page_words = ("deathmatch", "locked", "<li><bdi>Ann</bdi><li><bdi>Bob</bdi>")
    asked = (*SauerbratenWorld.asked[:3], (b"hello world\n", b'error "unknown command hello"\n'),
             (b'he"l^lo\n', b'error "unknown command he^"l^^lo"\n'), (b"\n", b""))
    listed_words = b'echo "server is now listed"\n'
    refused_words = b'echo "server is not listed: %s"\n'


RedEclipseWorld.connections = RedEclipseWorld.samples()
CUBE2_WORLDS = SauerbratenWorld, RedEclipseWorld


WORLDS = (IceballWorld, HyperbolWorld, ZoneWorld, FramedAioWorld, OpenArenaWorld, LuantiWorld,
          DdnetWorld, SauerbratenWorld, RedEclipseWorld)
POLLED = [world for world in WORLDS if world.room.answers_queries]


def in_each(worlds: Any) -> Any:
    """For a test that is made in each of these worlds."""
    def decorate(test):
        @functools.wraps(test)
        def run(self):
            for world in worlds:
                with self.subTest(world.__name__):
                    test(self, world)
        return run
    return decorate


class EveryGame(unittest.TestCase):
    """What holds for the game server of each game."""

    def test_every_game_has_its_world(self):
        self.assertEqual([world.room for world in WORLDS], [*ms.GAMES])

    @in_each(WORLDS)
    def test_packets(self, world):
        """Each is read, and written from its values."""
        for form, packet, values in world.packets:
            self.assertEqual(form.write(**values), packet)
            fields = form.read_whole(packet)
            self.assertEqual({name: getattr(fields, name) for name in values}, values)
            self.assertRaises(ms.Malformed, form.read, packet[:-1])
            self.assertRaises(ms.Malformed, form.read_whole, packet + b"x")

    @in_each(POLLED)
    def test_question_and_answer(self, world):
        """Of the poller, and of `ping`, whose room has no master."""
        for room in world().here, world.room():
            target = ms.Target(room, *world.place, ms.NAMED)
            target.nonce = world.nonce
            self.assertEqual(room.question(target), world.question)
            for wrong in world.wrong_answers:
                self.assertRaises(ms.Malformed, read_answer, room, target, wrong)
            fields = None
            for _ in range(3):
                if fields is None:
                    question = room.question(target)
                    fields = room.read_answer(target, world().reply(question))
            self.assertEqual(fields, world.answered)

    @in_each(POLLED)
    def test_a_long_answer_is_not_read(self, make):
        """The room says how long one may be; nothing longer costs more than a look at its length,
        and the query stays open for the answer."""
        world = make()
        target = world.poller.add(world.here, *world.place, ms.NAMED)
        [(_, peer)] = world.poller.tick(1.0)
        longest = world.here.answer_bytes
        self.assertLess(longest, world.poller.datagram_bytes)       # what is longer was cut off
        self.assertLessEqual(len(world.reply(world.question)), longest)
        with mock.patch.object(world.here, "read_answer", side_effect=ms.Malformed("x")) as read:
            for size, times in (longest + 1, 0), (ms.MAX_DATAGRAM_BYTES, 0), (longest, 1):
                self.assertRaises(
                    ms.Malformed, world.poller.datagram, bytes(size), peer, 1.1)
                self.assertEqual(read.call_count, times, size)
        self.assertEqual(target.asked_at, 1.0)

    @in_each(WORLDS)
    def test_listed_while_it_is_there(self, make):
        world = make()
        world.leave()
        world.announce()
        world.run(100)
        if make is not FramedAioWorld:          # it is there as long as its connection
            self.assertEqual((world.servers(), world.poller.targets), ([], {}))
            self.assertEqual(world.outcome(), make.unheard)
        world = make()
        world.announce()
        for _ in range(10):
            world.run(20)
            world.announce()
            self.assertEqual(world.values(), world.listed)
            server, = world.servers()
            self.assertEqual((server.address, server.port), world.place)
            self.assertEqual((server.room, world.outcome()), (world.room.game, "listed"))
        world.leave()
        world.run(400)
        self.assertEqual((world.servers(), world.poller.targets), ([], {}))

    @in_each(WORLDS)
    def test_its_list_whole_and_in_pieces(self, make):
        world = make()
        world.announce()
        world.run(2)
        for question, answer in world.lists:
            for size in 1, 3, 1 << 30:
                self.assertEqual(world.ask(question, size), answer, question)

    @in_each(WORLDS)
    def test_the_list_of_another_master(self, world):
        """It is fetched, and what it names is found."""
        for dialect, received in world.fetched:
            room = world.room()
            room.dialect = dialect
            _, entries = converse(room.fetch(), *received)
            entry, = entries
            self.assertEqual((entry["address"], entry["port"]), world.place)
            for name in world.listed.keys() & entry.keys():
                self.assertEqual(str(entry[name]), str(world.listed[name]), name)
            if world.room.answers_queries:
                found = room.found(entry)
                for name in world.listed.keys() & found.keys() - {"verified"}:
                    self.assertEqual(found[name], world.listed[name], name)

    @in_each(POLLED)
    def test_found_servers_are_listed_while_they_answer(self, make):
        world = make()
        self.assertIsNotNone(world.find())
        world.leave()
        world.run(20)
        self.assertEqual((world.servers(), world.poller.targets), ([], {}))
        world.is_there = True
        self.assertIsNotNone(world.find())
        world.run(3)
        server, = world.servers()
        self.assertEqual(server.found_at, "up.example")
        self.assertEqual(server.verified == "another list", make in (ZoneWorld, LuantiWorld))
        world.run(300)
        self.assertEqual(world.servers(), [server])
        world.leave()
        world.run(110)
        self.assertEqual((world.servers(), world.poller.targets,
                          list(world.registry.outcomes.things)), ([], {}, []))

    @in_each(POLLED)
    def test_found_servers_that_announce_themselves(self, make):
        """Before they were asked, before they have answered, and while they are listed."""
        for seconds, answers in itertools.product((0, 1, 8), (False, True)):
            world = make()
            world.is_there = answers
            world.find()
            world.run(seconds)
            world.is_there = True
            world.run(1)
            for _ in range(4):
                world.announce()
                world.run(20)
                server, = world.servers()
                self.assertEqual(server.found_at, "")
                self.assertIsNone(world.find())
            # DDNet's servers are not queried when they register
            whys = [target.why for target in world.poller.targets.values()]
            self.assertEqual(whys, [] if make is DdnetWorld else [ms.ANNOUNCED])
            self.assertEqual(world.registry.found.counts, {})

    @in_each((ZoneWorld, LuantiWorld))
    def test_later_texts_of_the_other_list(self, make):
        world = make()
        world.find()
        world.run(3)
        world.find(name="Another name")
        world.run(35)
        server, = world.servers()
        self.assertEqual((server.name, server.verified, server.found_at),
                         ("Another name", "another list", "up.example"))

    def restart(self, before, as_row=False):
        """The world after a restart, with what was listed."""
        after = type(before)()
        server, = before.servers()
        row = ms.listed_row(server, 0.0)
        fields = dict(row.fields)
        if as_row:                      # as the first version stored them
            fields = [fields.get(name) for name in ms.FIRST_FIELDS]
        row = ms.read_row(row._replace(fields=json.dumps(fields)))
        restored = ms.restored_server(row, 0.0, before.now)
        self.assertFalse(restored.confirmed)
        after.registry.insert(restored)
        after.here.resume(restored)
        return after

    @in_each(WORLDS)
    def test_after_a_restart(self, make):
        """Who was listed stays if it is still there, whether it has announced itself or not."""
        for is_found, as_row in itertools.product((False, True), (False, True)):
            before = make()
            if is_found and not make.room.answers_queries:
                continue
            if as_row and not {*make.room.private} <= {*ms.FIRST_FIELDS}:
                continue                # the first version did not have this game
            before.find() if is_found else before.announce()
            before.run(3)
            (server,), values = before.servers(), before.values()
            after = self.restart(before, as_row)
            restored, = after.servers()
            self.assertEqual((after.values(), restored.found_at, restored.room),
                             (values, server.found_at, server.room))
            self.assertEqual(make.room.stored(restored), make.room.stored(server))
            for _ in range(5):
                if not is_found:
                    after.announce()
                after.run(10)
            restored, = after.servers()
            self.assertTrue(restored.confirmed)
            self.assertEqual(after.values(), values)
            after.leave()
            after.run(400)
            self.assertEqual(after.servers(), [])

    @in_each(WORLDS)
    def test_stored_values(self, world):
        restored = world.room.restored(json.loads(json.dumps(world.private)))
        stored = world.room.stored(SimpleNamespace(private=restored))
        again = world.room.restored(json.loads(json.dumps(stored)))
        for name, value in world.private.items():
            self.assertTrue(stored[name])
            self.assertEqual(again[name], restored[name])
        for bad in world.bad_private:
            self.assertRaises(ms.Malformed, world.room.restored, bad)
        for value in 5, None, [], "x", {"port": []}:
            for name in world.private:
                with contextlib.suppress(ms.Malformed):
                    world.room.restored({name: value})

    @in_each(WORLDS)
    def test_from_another_master_of_the_group(self, world):
        """What that one has heard later replaces what this one knew."""
        new = SimpleNamespace(private=world.room.restored(world.private))
        old = SimpleNamespace(private={
            name: attribute.default for name, attribute in world.room.private.items()})
        taken = world.room.taken_over(old, new)
        for name, attribute in world.room.private.items():
            from_whom = new if attribute.read and not attribute.is_own else old
            self.assertEqual(taken[name], from_whom.private[name], name)

    @in_each(WORLDS)
    def test_refused(self, make):
        """A ban, a name, a full list or a full source: it is not listed, and /check says why."""
        name = make.listed["name"]
        for outcome, settings, other in (
                ("banned", {"bans__203.0.113.0/24": "cheats"}, "198.51.100.1"),
                ("name", {"server__refuse_names": re.escape(name)}, "198.51.100.1"),
                ("limit", {"limits__servers": "1"}, "198.51.100.1"),
                ("limit", {"limits__servers_per_source": "1"}, "203.0.113.9")):
            world = make(**settings)
            if outcome == "limit":
                world.registry.list_or_refresh(("mygame", other, 5), other, 0.0, 1e6, {})
            for _ in range(3):
                world.announce()
                world.run(2)
            listed = [server.name for server in world.servers()]
            if make is FramedAioWorld and outcome == "name":
                # A connected server does not leave because of what somebody may have forged
                self.assertEqual(listed, ["203.0.113.9:27010"])
                continue
            self.assertEqual((outcome, listed), (outcome, []))
            self.assertEqual(world.outcome(), outcome)

    @in_each([world for world in WORLDS if world.named])
    def test_named_in_the_ini(self, make):
        world = make(**make.named)
        world.run(40)
        server, = world.servers()
        self.assertEqual((server.responding, server.pinned), (True, True))
        world.leave()
        world.run(200)
        server, = world.servers()
        self.assertEqual((server.responding, server.players), (False, 0))

    @in_each([world for world in WORLDS if world.room.announced_over])
    def test_announced_by_this_program(self, make):
        """Until it says farewell; and not where it is banned."""
        for dialect, banned in itertools.product(make.room.dialects or ("",), (False, True)):
            world = make(**({"bans__203.0.113.0/24": "cheats"} if banned else {}))
            self.keep_announced(world, dialect, banned)

    def keep_announced(self, world, dialect, banned):
        address, port = world.place
        room = world.room()
        room.dialect = dialect
        server = ms.Server(world.room.game, "", port, "", 0.0, math.inf, name="Name", players=3,
                           max_players=9)
        if room.answer:
            world.reply = lambda packet: room.answer(server, packet)
        session = world.here.session(address, world.now) if room.announced_over == "tcp" else None

        def received_for(step):
            """What comes back; a query is answered as on the game server's port."""
            if room.announced_over == "http":
                return [world.post(step.data, path=step.path)] if step.data else []
            if session:
                return [feed(session, step.data, now=world.now)]
            received = []
            for data, to in deliver(world.here, step.data, (address, 40000), world.now):
                if room.answer:
                    world.deliver(room.answer(server, data), to)
                else:
                    received.append(data)
            return received

        accepted, refused = False, ""
        for _ in range(3):              # a conversation ends if the server is not listed yet
            conversation = room.announce(server)
            step = next(conversation)
            try:
                for _ in range(4):
                    for data in received_for(step) if step.data else [None]:
                        step = conversation.send(data or None)
                        accepted = accepted or step.accepted
                    world.run(5)
            except OSError:
                world.run(5)
            except ms.MasterRefused as error:
                refused = str(error)
        listed = [(one.name, one.port, one.players) for one in world.servers()]
        if banned:
            self.assertEqual((listed, accepted and room.announced_over != "udp"), ([], False))
            return
        self.assertEqual((refused, listed), ("", [("Name", port, 3)]))
        if room.announced_over == "http":
            world.post(room.farewell(server))
            self.assertEqual(world.servers(), [])

    @in_each(WORLDS)
    def test_pages(self, make):
        """The list, the server's page with its facts, /check, and the line for operators."""
        world = make()
        world.announce()
        world.run(3)
        entry, = json.loads(world.get("/servers.json?game=" + world.id))["servers"]
        address, port = world.place
        for name, value in make.listed.items():
            if name in entry and name != "room":
                self.assertEqual(entry[name], value, name)
        self.assertEqual((entry["game"], entry["address"], entry["port"]),
                         (world.id, address, port))
        name = make.listed["name"]
        place = "game=%s&address=%s&port=%d" % (world.id, address, port)
        for path, words in (("/", (name,)), ("/server?" + place, (name, *make.page_words)),
                            ("/check?address=%s" % address, (str(port),))):
            page = html.unescape(world.get(path).decode())
            for word in words:
                self.assertIn(word, page, path)
        if entry["verified"] == "query":        # then its answers count, too
            world.run(40)
            server, = world.servers()
            entry, = json.loads(world.get("/servers.json?game=" + world.id))["servers"]
            self.assertEqual(entry["last_seen"], int(server.seen + world.web.epoch))
            self.assertLess(world.now - server.seen, 31.0)
        place = ms.MasterPlace("m.example", "http://m.example:8000")
        self.assertEqual([contact.filled(make.room, make.room.master_port, place).block
                          for contact in make.room.contacts], make.blocks)
        self.assertEqual(ms.GAME_TITLES[make.room.game], make.room.title)

    @in_each(WORLDS)
    def test_settings(self, world):
        """Each is in the ini, under the game's own section."""
        text = ms.config_text()
        self.assertTrue(world.room.settings)
        for setting in world.room.settings:
            section, _, key = setting.name.partition(".")
            self.assertEqual(section, world.room.game)
            _, _, rows = text.partition("\n[%s]\n" % section)
            rows, _, _ = rows.partition("\n[")
            self.assertIn("\n#%s =" % key, rows)


class FoundServersTest(unittest.TestCase):
    """What holds for some games alone."""

    def test_an_update_of_a_luanti_server_that_only_another_list_has_named(self):
        """It cannot build on what that list said, nor be believed without a probe."""
        world = LuantiWorld()
        world.find()
        world.run(3)
        update = json.loads(LUANTI_UPDATE)
        with self.assertRaises(ms.Refused):
            world.here.announced(
                *world.place, {"action": "update", "port": 36302, "clients": 1}, world.now)
        world.here.announced(*world.place, {**update, "name": "New"}, world.now)
        self.assertEqual(world.values()["name"], world.listed["name"])
        world.run(3)
        server, = world.servers()
        self.assertEqual((server.name, server.verified, server.found_at), ("New", "query", ""))

    def test_a_server_behind_our_router_that_is_found_at_its_public_address(self):
        """It is one server, and its own."""
        world = HyperbolWorld(**{"address_map__192.168.1.5": HyperbolWorld.place[0]})
        world.find()
        world.run(3)
        world.here.announced("192.168.1.5", world.place[1], {}, world.now)
        world.run(80)
        server, = world.servers()
        self.assertEqual((server.source, server.found_at), ("192.168.1.5", ""))
        target, = world.poller.targets.values()
        self.assertEqual((target.address, target.why), ("192.168.1.5", ms.ANNOUNCED))

    def test_the_details_of_a_zone(self):
        """Some come from the list, others from its answers."""
        world = ZoneWorld()
        world.find()
        world.run(40)
        server, = world.servers()
        self.assertEqual(server.details, {"scores": "yes", "arenas": ARENAS_TEXT})

    def test_a_text_of_aio_that_takes_over_is_polled_no_more(self):
        world = FramedAioWorld()
        world.find()
        world.run(3)
        feed(world.here.session(world.place[0], world.now), AIO_TEXT)
        server, = world.servers()
        self.assertEqual((server.name, server.verified, server.found_at, world.poller.targets),
                         ("N", "connection", "", {}))


# --- Cube 2, beyond what holds in every world ----------------------------------------------------

class Cube2Test(unittest.TestCase):
    @in_each(CUBE2_WORLDS)
    def test_what_is_answered_at_once(self, make):
        """Each line whole and in pieces, after others, and with its line end alone later."""
        room = make().here
        for asked, answer in make.asked:
            for size in 1, 3, 1 << 30:
                session = room.session("198.51.100.7", 0.0)
                self.assertEqual(feed(session, asked * 2, size), answer * 2, asked)
                self.assertEqual(feed(session, asked[:-1]) + feed(session, b"\n"), answer, asked)
                self.assertFalse(session.done)

    @in_each(CUBE2_WORLDS)
    def test_what_a_game_server_is_told(self, make):
        """Once for each announcement, as soon as it is known. Who is not listed is disconnected."""
        word = make.line.split()[0]
        port = make.place[1] + 1
        for settings, line, reason in (
                ({}, make.line, ""), ({}, make.line[:-1] + b"\r\n", ""),
                ({}, None, "no answer from UDP port %d" % port),
                ({"bans__203.0.113.0/24": "a cheat"}, make.line, "a cheat"),
                ({"server__refuse_names": "My"}, make.line,
                 "names matching My are not listed here"),
                ({}, word + b" 65535 *\n", make.room.title + " lists ports up to 65534 only"),
                ({}, word + b" x\n", "port 0 cannot be listed"),
                ({}, word + b" \n", "port 0 cannot be listed"),
                ({}, word + b" -5\n", "port 0 cannot be listed")):
            world = make(**settings)
            world.line, world.is_there = line or make.line, line is not None
            world.announce()
            told = b""
            while world.now < 80.0 and not world.session.done:
                world.run(1)
                told += world.told()
            words = make.refused_words % reason.encode() if reason else make.listed_words
            self.assertEqual(told, words, line)
            self.assertEqual((world.session.done, len(world.servers())), (bool(reason), not reason))
            if not reason:              # the next announcement
                world.announce()
                self.assertEqual(world.told() + world.told(), words)
        session = make().here.session("2001:db8::1", 0.0)
        feed(session, make.line)
        self.assertIn(b"IPv4 addresses only", session.tick(0.0))

    def test_how_long_it_stays(self):
        """A Red Eclipse server as long as it is connected. 75 minutes after that, or after the last
        announcement, neither is listed, even if it answers."""
        for make in CUBE2_WORLDS:
            world = make()
            world.announce()
            for minute in range(76):
                self.assertEqual(len(world.servers()), minute > 0)
                world.run(60)
                world.told()
            self.assertEqual(len(world.servers()), make is RedEclipseWorld)
            world.session.closed(world.now)
            self.assertEqual(len(world.servers()), make is RedEclipseWorld)
            world.run(74 * 60)
            self.assertEqual(len(world.servers()), make is RedEclipseWorld)
            world.run(120)
            self.assertEqual((world.servers(), world.poller.targets), ([], {}))

    def test_the_end_of_a_connection(self):
        """A silent Red Eclipse server leaves within 15 s; a stranger's end changes nothing."""
        for make in CUBE2_WORLDS:
            world = make()
            world.announce()
            world.run(31)
            stranger = world.here.session(world.place[0], world.now)
            feed(stranger, world.line, now=world.now)
            stranger.closed(world.now)
            other = world.here.session("203.0.113.8", world.now)
            feed(other, world.line, now=world.now)
            other.closed(world.now)
            world.run(40)
            self.assertEqual(len(world.servers()), 2)       # the world answers for both
            world.leave()
            world.run(15)
            self.assertEqual([server.address for server in world.servers()],
                             ["203.0.113.8"] + ["203.0.113.9"] * (make is SauerbratenWorld))

    @in_each(CUBE2_WORLDS)
    def test_bounds(self, make):
        room = make().here
        for data in b"x" * 513, b"x" * 512 + b"\n", b"\n" * 33, b"hello\n" * 33:
            for size in 1, 1 << 30:
                session = room.session("198.51.100.7", 0.0)
                with self.assertRaises(ms.Malformed):
                    feed(session, data, size)
        session = room.session("198.51.100.7", 0.0)
        for minute in range(3):
            feed(session, b"x" * 511 + b"\n" + b"\n" * 31, now=60.0 * minute)
        for now, done in (179.9, False), (180.0, True):
            session.tick(now)
            self.assertEqual(session.done, done)

    def test_lists(self):
        sauerbraten, red_eclipse = (make() for make in CUBE2_WORLDS)
        self.assertEqual(sauerbraten.ask(b"list\n", 5), b"\0")
        self.assertEqual(red_eclipse.ask(b"update\n", 6), b"setversion 160 230\nclearservers\n")
        for world in sauerbraten, red_eclipse:
            for number, (address, version, name) in enumerate((
                    ("203.0.113.7", 158, "B"), ("2001:db8::1", 999, "C"),
                    ("203.0.113.8", 161, "\u0416 \u4e2d"))):
                private = {"version_number": version, "protocol": 231 - number, "player_names": []}
                server = world.registry.list_or_refresh(
                    (world.id, address, 5), address, 0.0, 1e6, {"name": name, "private": private,
                                                                "details": {"branch": 'a"b'}})
            world.registry.update(server, {"priority": -3})
            world.now = 10.0
        self.assertEqual(sauerbraten.ask(b"list\n", 5),
                         b"addserver 203.0.113.7 5\naddserver 203.0.113.8 5\n\0")
        self.assertEqual(
            red_eclipse.ask(b"update\n", 7), b"setversion 161 229\nclearservers\n"
            b'addserver 203.0.113.7 5 0 "B" "" "" "a^"b"\n'
            b'addserver 203.0.113.8 5 -3 "\xd2 ?" "" "" "a^"b"\n')

    def test_the_longest_list(self):
        for make in CUBE2_WORLDS:
            with mock.patch.object(ms, "LIST_SERVERS", 4):
                _, entries = converse(
                    make.room().fetch(), b"addserver 203.0.113.9 5\nx\n" * 9, b"")
                self.assertEqual(len(list(entries)), 4)
                self.assertRaisesRegex(ms.Malformed, "more than 512 bytes", converse,
                                       make.room().fetch(), bytes(513))

    def test_modes_and_texts(self):
        for make, rows in (
                (SauerbratenWorld, {255: "demo", 0: "ffa", 22: "effic collect", 23: "23"}),
                (RedEclipseWorld, {0: "demo", 3: "capture the flag", 6: "race", 7: "7"})):
            room, target = make.room(), SimpleNamespace(nonce=make.nonce)
            for number, mode in rows.items():
                info = bytearray(make.info)
                info[5] = number
                fields = room.read_answer(target, make.question + bytes(info))
                self.assertEqual(fields["mode"], mode)
        for raw, text in (
                (b"a\x0cb\x0c", "a"), (b"\x0c[12]a\x0c[b", "ab"), (b"\x01\x11\x7f\xff", "ÀËÜґ"),
                (b"a\tb\nc", "a b c")):
            self.assertEqual(ms.cube2_text(raw), text, raw)
        self.assertEqual([ms.cube2_number(number).hex() for number in (
            0, 127, -126, -127, -128, 128, -32768, 32767, 32768, -32769)], [
                "00", "7f", "82", "8081ff", "8080ff", "808000", "800080", "80ff7f", "8100800000",
                "81ff7fffff"])
        for data in b"\x80", b"\x80\1", b"\x81\1\2\3", b"\0\x81":
            self.assertRaises(ms.Malformed, ms.read_cube2_numbers, data)

    def test_captured_answers(self):
        for make, info, name, mode, place, players, version in (
                (SauerbratenWorld, hexa("00 05 800401 00 00 08 00 00") + b"\x0c3My \x0c7server "
                 b"caf\x8b\0", "My server caf\u00e9", "ffa", "", 8, "260"),
                (RedEclipseWorld, hexa("00 0f 80e600 03 00 805802 20 00 808613 00 01 06 00 02 40 00"
                                       " 00") + b"futuresport\0\0\0", "", "capture the flag",
                 "futuresport", 32, "1.6.0")):
            fields = make.room().read_answer(
                SimpleNamespace(nonce=make.nonce), make.question + info)
            self.assertEqual((fields["name"], fields["mode"], fields["map"], fields["max_players"],
                              fields["version"]), (name, mode, place, players, version))

    def test_the_seven_numbers_of_newer_servers(self):
        """The map follows whether the game is paused, and its speed."""
        info = SAUERBRATEN_INFO
        info = info[:1] + b"\7" + info[2:11] + b"\1\x64" + info[11:]
        target = SimpleNamespace(nonce=SauerbratenWorld.nonce)
        self.assertEqual(ms.Sauerbraten().read_answer(target, SauerbratenWorld.question + info),
                         SauerbratenWorld.answered)

    def test_announcing(self):
        """Red Eclipse's replies are captures of its master."""
        for game, line, accepted, refused in (
                ("sauerbraten", b"regserv 28785\n", [b"succ", b"reg\ncleargbans\n"],
                 [b"failreg ", b"no room\n"]),
                ("redeclipse", b'server 28785 * 160 "N ^"^^" 1 ""\n', [
                    b'echo "server registered (port 28785), sending ping request (on port 28786)',
                    b'"\necho "ping reply confirmed (on port 28786), server is now listed"\n'],
                 [b'error "ping attempts failed (tried 5 times on port 28786), server will not be ',
                  b'listed"\n'])):
            room, server = ms.ROOMS[game](), announced_server(game, 28785, name='N "^')
            steps, _ = converse(room.announce(server), *accepted)
            self.assertEqual([(step.data, step.accepted) for step in steps],
                             [(line, False), (b"", False), (b"", True)])
            self.assertRaisesRegex(ms.MasterRefused, "no room|ping attempts failed", converse,
                                   room.announce(server), *refused)
            words = (room.refused % {"reason": "no room"}).encode()
            self.assertRaisesRegex(ms.MasterRefused, "no room", converse, room.announce(server),
                                   words)
            self.assertRaises(ConnectionError, converse, room.announce(server), b"")
            steps, _ = converse(room.announce(server), *accepted, None)
            self.assertEqual(steps[-1].data, line)          # after an hour

    def test_answers_of_announce(self):
        server = announced_server("redeclipse", 28801, name="Caf\u00e9 \u4e2d", mode="race",
                                  players=3, max_players=300, map="ubik")
        question = hexa("81 12345678")
        self.assertEqual(ms.RedEclipse().answer(server, question), question + hexa(
            "03 0f 80e600 06 00 00 802c01 00 00 00 01 06 00 00 00 00 00") + b"ubik\0Caf\x8b ?\0\0")
        server.mode = "ctf"
        self.assertEqual(ms.Sauerbraten().answer(server, b"\5"), b"\5" + hexa(
            "03 05 800401 0b 00 802c01 00") + b"ubik\0Caf\x8b ?\0")
        for question in b"", b"\0\1":
            self.assertRaises(ms.Malformed, ms.Sauerbraten().answer, server, question)


def game_server(name):
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/games")


class Cube2OnTheWire(unittest.TestCase):
    """With Debian's cube2-server, which is Sauerbraten's, and redeclipse-server."""

    PROGRAMS = {
        "sauerbraten": ("cube2-server", "-q", "server-init.cfg",
                        'serverport %d; serverdesc "%s"; ',
                        b"master server registration succeeded"),
        "redeclipse": ("redeclipse-server", "-h", "servinit.cfg",
                       'serverport %d; sv_serverdesc "%s"; ',
                       b"master server reply: server is now listed")}

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        hurry = mock.patch.object(ms, "TICK_S", 0.1)
        hurry.start()
        self.addCleanup(hurry.stop)

    def start_game(self, game, name, *options, config=""):
        """A real server, whose home has its name; "" if it is not here."""
        program, home_option, file_name, _, _ = self.PROGRAMS[game]
        if not game_server(program):
            self.skipTest("no %s here" % program)
        home = os.path.join(self.folder, name)
        os.mkdir(home)
        with open(os.path.join(home, file_name), "w") as file:
            file.write(config)
        with open(home + ".log", "wb") as output:
            process = subprocess.Popen([game_server(program), home_option + home, *options],
                                       stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def logged(self, name, text):
        with open(os.path.join(self.folder, name + ".log"), "rb") as file:
            return text in file.read()

    def test_sauerbraten(self):
        self.real_servers(ms.Sauerbraten, "260", 8)

    def test_red_eclipse(self):
        self.real_servers(ms.RedEclipse, "1.6.0", 32)

    def real_servers(self, room, version, max_players):
        """Two of them: listed, told so, kept by a restart of the master, gone when killed."""
        *_, config, told = self.PROGRAMS[room.game]
        port = free_port()
        database = os.path.join(self.folder, "db")

        def start_master():
            server = master(**{room.game + "__port": str(port)}, server__database=database,
                            limits__exempt="127.0.0.0/8")
            server.bind()
            server.poller.interval = 0.5        # before the first poll
            server.start()
            self.addCleanup(server.stop)
            return server
        server = start_master()
        pasted = block_of(server, room.game)
        places = {name: free_port() for name in ("one", "two")}
        games = [self.start_game(room.game, name, config=config % (place, name) + pasted + "\n")
                 for name, place in places.items()]
        eventually(lambda: server.registry.total == 2)
        for one, (name, place) in zip(server.registry.servers(), places.items()):
            self.assertEqual(
                (one.name, one.port, one.players, one.max_players, one.version, bool(one.mode)),
                (name, place, 0, max_players, version, True))
            eventually(lambda: self.logged(one.name, told))
        place = "127.0.0.1:%d" % port
        status, out, _ = command("list", "--game", room.game, place)
        self.assertEqual((status, [line.split()[1] for line in out.splitlines()]), (
            0, ["127.0.0.1:%d" % place for place in places.values()]))
        status, out, _ = command("ping", "--game", room.game, "127.0.0.1:%d" % places["one"])
        self.assertEqual((status, "one" in out), (0, True))
        server.stop()
        server = start_master()
        self.assertEqual(server.registry.total, 2)
        eventually(lambda: all(one.confirmed for one in server.registry.servers()))
        for game in games:
            game.kill()
        with mock.patch.object(room, "timeout_s", 0.2):
            eventually(lambda: not server.registry.total)

    def test_gone_when_its_connection_ends(self):
        with master(redeclipse__port="0", limits__exempt="127.0.0.0/8") as server:
            game = self.start_game("redeclipse", "game", "-ss2", "-sp%d" % free_port(),
                                   "-sm127.0.0.1", "-sa%d" % port_of(server, "redeclipse"))
            eventually(lambda: server.registry.total)
            with mock.patch.object(ms.RedEclipse, "timeout_s", 0.2):
                game.kill()
                eventually(lambda: not server.registry.total)

    def test_the_real_master(self):
        """It lists what `announce` announces, and `list` reads its list."""
        port = free_port()
        self.start_game("redeclipse", "master", "-ms1", "-mi127.0.0.1", "-mp%d" % port, "-ss1",
                        "-sp%d" % free_port())
        eventually(lambda: self.logged("master", b"master server started"))
        game = free_port()
        announcement = ms.Announcement(
            "redeclipse", game, ["127.0.0.1:%d" % port], name='The "one"', map="ubik")
        with announcement:
            eventually(lambda: announcement.masters[0].was_accepted)
            status, out, _ = command("list", "--game", "redeclipse", "127.0.0.1:%d" % port)
            self.assertEqual((status, out.split()), (
                0, ["-", "127.0.0.1:%d" % game, "The", '"one"']))


# --- It holds against noise ----------------------------------------------------------------------

NASTY_BYTES = b"\0\1\x7f\x80\xff\r\n #%&=:;/[]{}\"'<>0-"
NOT_LISTED = ms.Malformed, ms.Refused, ms.Limited      # what the event loop takes from a protocol
# SubSpace's list port: what players send
ZONE_LIST_PACKETS = (
    CONNECT, REQUEST, hexa("0004 00000000"), hexa("0005 01020304 0000"), hexa("0007"),
    hexa("000e 06 0005 01020304 06 0004 00000000"),
    hexa("0003 00000000 000a 20000000 01") + bytes(31))


def protocols_of(core):
    """All that the program has, by the names of their classes; rooms first."""
    with_rooms(core)
    ports = [port.make(room) for room in core.rooms.values() for port in room.ports]
    return {type(protocol).__name__: protocol
            for protocol in [*core.rooms.values(), *ports, ms.Web(core), core.poller]}


class FuzzTest(unittest.TestCase):
    """But for Malformed, Refused and Limited no exception escapes, whatever comes, whole or in
    pieces."""

    # By what reads them: a protocol, a type of body for POST /announce, or the database
    SAMPLES: Dict[str, Any] = {
        **{world.room.__name__: tuple(itertools.chain.from_iterable(
            packets for _, packets, _ in world.requests)) for world in WORLDS if world.requests},
        **{world.room.__name__: world.connections for world in WORLDS if world.connections},
        **{kind: bodies for world in WORLDS for kind, bodies in world.bodies.items()},
        "SubSpaceList": ZONE_LIST_PACKETS,
        "Poller": tuple(world().reply(world.question) for world in POLLED),
        "Web": (b"GET /master.json HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\n\r\n",
                b"GET /?name=a%FFb&players_min=3 HTTP/1.0\r\n\r\n",
                b'GET /servers.json HTTP/1.1\r\nHost: x\r\nIf-None-Match: "x", W/"y"\r\n\r\n',
                b"GET /check?address=203.0.113.9&port=4000 HTTP/1.1\r\nHost: x\r\n\r\n" * 2,
                b"GET http://[::1]/server?game=aio&address=%5B::1%5D&port=1 HTTP/1.0\r\n\r\n",
                b"GET /history.json?game=iceball&span=day HTTP/1.0\r\n\r\n",
                b"OPTIONS /announce HTTP/1.1\r\nHost: x\r\n\r\n"),
        "Ddnet": (ddnet_request(DDNET_0_6, DDNET_INFO), ddnet_request(DDNET_0_7, DDNET_INFO),
                  ddnet_request(DDNET_0_6 + "Challenge-Token: TOKEN!\r\n", DDNET_INFO),
                  ddnet_request(DDNET_0_6 + "Challenge-Token: TOKEN!\r\n"),
                  ddnet_request(DDNET_DELETE_0_6)),
        "application/x-www-form-urlencoded": (
            b"game=mygame&port=4000&name=M%20%C3%BC&players=3&max_players=9",
            b"game=mygame&port=4000&action=stop"),
        "application/json": (
            b'{"game":"hyperbol","port":27888,"name":"\\ud83d\\u0000","version":1.5e3}',
            b'{"game":"subspace","port":5000,"name":"Z\\ud800","description":"d"}'),
        "a stored row": (
            *(json.dumps({"name": "S", "verified": "query", "source": "203.0.113.9",
                          **world.private}).encode() for world in WORLDS),
            b'["S\\ud800","m","map","1",70000,9,-3,"d",999,"x",false,{"skill":[1]},"nowhere",true]',
            b'["S","m","map","134",1,9,null,"d",1,"query",true,{"arenas":"x"},"203.0.113.9",false]',
            b"[" * 4000)}
    # One for each route, list or game; what the disk thread takes; senders, up to a number
    MAY_STAY = {("Web", "request_counts"), ("Web", "responses"), ("Registry", "games"),
                ("Registry", "altered"), ("Iceball", "senders")}

    def setUp(self):
        self.chance = random.Random(20)
        self.tokens = {}                # of the last challenge to each address
        self.program = make_core(games__mygame="My Game", limits__requests="100000",
                              limits__datagrams="100000", limits__servers="300")
        self.program.send = lambda data, peer: self.tokens.update({peer[0]: data.split(b"\0")[-2]})
        self.protocols = protocols_of(self.program)
        self.sizes_at_start = self.sizes()
        self.worlds = {world.room.__name__: world() for world in WORLDS}
        self.sessions = []
        self.now = 0.0
        self.here = None                # whose input it is; None: nobody is there any more

    def sizes(self):
        """Of what protocols and the registry keep."""
        return {(type(thing).__name__, name): len(value)
                for thing in (*self.protocols.values(), self.program.registry)
                for name, value in vars(thing).items() if isinstance(value, (dict, list, set))}

    def mutated(self, data):
        """Cut, repeated, with noise in it."""
        chance, out = self.chance, bytearray(data)
        for _ in range(chance.choice((0, 1, 1, 2, 4, 16))):
            at, size = chance.randrange(len(out) + 1), chance.choice((1, 1, 2, 40))
            noise = chance.choice((
                b"", bytes((chance.choice(NASTY_BYTES),)) * size, bytes(out[at // 2:][:size]),
                chance.getrandbits(8 * size).to_bytes(size, "little")))
            out[at:at + chance.choice((0, size))] = noise
        if chance.random() < 0.15:
            del out[chance.randrange(len(out) + 1):]
        return bytes(out[:ms.MAX_DATAGRAM_BYTES])

    def datagrams(self, name, replies, depth=3):
        """What the receivers of a protocol's replies answer, and so on."""
        worlds = [self.worlds[name]] if name in self.worlds else self.worlds.values()
        for packet, place in replies if depth and self.here else ():
            for world in worlds:
                answer = world.reply(packet)
                answer = self.chance.choice((answer, self.mutated(answer)))
                self.datagram(name, answer, place, depth - 1)

    def datagram(self, name, data, peer, depth=3):
        with contextlib.suppress(*NOT_LISTED):
            replies = self.protocols[name].datagram(data, peer, self.now)
            self.datagrams(name, replies, depth)

    def connection(self, name, data):
        """One connection, which stays open for a while."""
        session, out = self.protocols[name].session(self.here[0], self.now), b""
        greeting = session.opened(self.now) if self.protocols[name].speaks_first else b""
        try:
            data = data.replace(b"KEY!", greeting[4:8])
            data = data.replace(b"TOKEN!", self.tokens.get(self.here[0], b"00"))
            out = feed(session, data, self.chance.choice((1, 7, 1 << 30)), self.now)
            if self.chance.random() < 0.3:
                out += session.ended(self.now)
            if name == "Web":
                out += session.tick(self.now + 60.0)
                self.assertTrue(session.done)
        except NOT_LISTED:
            session.done = True
        while name == "Web" and out and not data.startswith(b"HEAD"):
            out = split_response(out)[3]            # each is whole
        self.sessions.append(session)
        if len(self.sessions) > 20 or session.done:
            self.sessions.pop(0).closed(self.now)

    def stored_row(self, data):
        """What noise in the database makes of a listed server."""
        row = (self.chance.choice(("mygame", "openarena", *self.program.rooms)),
               self.chance.choice((self.here[0], "2001:db8::1", "nowhere", "")),
               self.chance.choice((1, 65535, 0, -5, 1 << 40)), 99.0, 0.0, 9.0,
               data.decode("utf-8", "replace"))
        registry = self.program.registry
        with contextlib.suppress(*NOT_LISTED, TypeError, ValueError, RecursionError):
            row = ms.read_row(row)
            server = ms.restored_server(row, self.now, 10.0)
            if server is not None and registry.get(*server.key) is None:
                registry.check_admission(server.key, server.source, server.name)
                json.dumps(ms.listed_row(server, 0.0).fields)
                if server.game == "mygame":
                    registry.insert(server)

    def settings(self, path):
        lines = ["[%s]\n%s = %s\n" % (row.section, row.key or row.default.partition(" = ")[0],
                                      row.default.rpartition(" = ")[2])
                 for row in self.chance.sample([*ms.SETTINGS.values()], 3)]
        with open(path, "wb") as file:
            file.write(self.mutated("".join(lines).encode()))
        with contextlib.suppress(ms.SettingsError), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)      # of a pattern such as "[[a]"
            ms.Settings.load(path)

    def tick(self):
        self.now += 1.0
        self.program.registry.expire(self.now)
        for event, server in changes_of(self.program.registry):
            if event == "gone" and server.room in self.program.rooms:
                self.program.rooms[server.room].gone(server)
        for name, protocol in self.protocols.items():
            self.datagrams(name, protocol.tick(self.now) or ())
        for session in self.sessions:
            with contextlib.suppress(ms.Malformed):
                session.tick(self.now)

    def lists(self):
        """Whatever got in, every list can be made of it."""
        for path in ("/master.json", "/servers.json", "/servers.xml", "/", "/metrics", "/list",
                     ms.DDNET_SERVERS, "/check?address=203.0.113.9"):
            session = self.protocols["Web"].session("192.0.2.1", self.now)
            status, _, body, _ = split_response(feed(session, http_request(path), now=self.now))
            self.assertEqual(status, 200, path)
            if path.endswith(("json", "list")):
                json.loads(body.decode("utf-8"))
            elif path.endswith("xml"):
                xml.dom.minidom.parseString(body)
        for room in self.program.rooms.values():
            for name in room.lists():
                room.rendered(name, self.now)

    def test_noise(self):
        self.assertLessEqual({*self.protocols} - {"Luanti"}, {*self.SAMPLES})   # that is by HTTP
        games, all_games = set(), {"mygame", *self.program.rooms}
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        steps = 3000 if SLOW else 12000
        for number in range(4 * steps):
            # The cookies of each run differ, and so chance decides when each game has been listed
            if number >= steps and games == all_games:
                break
            self.now += 0.05
            self.here = ("203.0.113.%d" % self.chance.randrange(1, 40),
                         4000 + self.chance.randrange(3))
            name = self.chance.choice([*self.SAMPLES])
            data = self.mutated(self.chance.choice(self.SAMPLES[name]))
            if name == "a stored row":
                self.stored_row(data)
            elif "/" in name:
                self.connection("Web", http_request(
                    "/announce", "Content-Type: " + name, "Content-Length: %d" % len(data),
                    method="POST", body=data))
            elif name == "Ddnet":       # it has no socket of its own; each source has its Secret
                pieces = [data]
                if self.chance.random() < 0.2:          # a whole exchange without noise
                    pieces = self.SAMPLES["Ddnet"][0], self.SAMPLES["Ddnet"][2]
                for piece in pieces:
                    self.connection("Web", piece.replace(b"2ffa794f", self.here[0].encode()))
            elif hasattr(self.protocols[name], "session"):
                self.connection(name, data)
            else:
                self.datagram(name, data, self.here)
            for world, packet in itertools.product(POLLED, (data, zlib.compress(data))):
                target = ms.Target(world.room(), *self.here, ms.NAMED)
                with contextlib.suppress(ms.Malformed):
                    target.room.question(target)
                    target.room.read_answer(target, packet)
            if number % 100 == 0:
                self.settings(os.path.join(folder.name, "fuzz.ini"))
                self.tick()
                servers = self.program.registry.servers()
                games.update(server.room or server.game for server in servers)
            if number % 2000 == 0:
                self.lists()
        self.assertEqual(games, all_games)
        self.here = None                                # everybody goes
        for session in self.sessions:
            session.closed(self.now)
        self.sessions.clear()
        for _ in range(600):
            self.tick()
        self.assertEqual(self.program.registry.servers(), [])
        self.assertEqual({name for name, size in self.sizes().items()
                          if size > self.sizes_at_start.get(name, 0)} - self.MAY_STAY, set())


class AmplificationTest(unittest.TestCase):
    """Towards a source that has proven nothing, no more bytes go out than came in, but for what
    the documents demand; and that is bounded, by source and in all."""

    PEER = "203.0.113.9", 5000
    # Before anything is acknowledged
    LIST_BYTES = int(ms.LINK_IDLE_S + 1) * (ms.LINK_CHUNK_BYTES + 12)
    # Of every type that any document has: a name, the port, the datagrams that make the request,
    # and how many bytes more than it has the answers may have, and do have
    REQUESTS = (
        *((name, world.room.__name__, packets, most)
          for world in WORLDS for name, packets, most in world.requests),
        ("connect", "SubSpaceList", [CONNECT] * 20, 0),
        ("list", "SubSpaceList", [CONNECT, REQUEST], LIST_BYTES),
        ("list, again and again", "SubSpaceList", [CONNECT, REQUEST] * 15, LIST_BYTES),
        ("no connect", "SubSpaceList", [REQUEST, hexa("0007")], 0),
        ("sync", "SubSpaceList", [CONNECT, hexa("0005 01020304")], 4),
        ("cluster", "SubSpaceList", [CONNECT, hexa("000e") + hexa("06 0005 01020304") * 74], 0),
        *(("an answer to " + world.__name__, "Poller", [world().reply(world.question)], 0)
          for world in POLLED))

    def start(self):
        self.program = make_core()
        self.protocols = {name: protocol for name, protocol in protocols_of(self.program).items()
                          if hasattr(protocol, "datagram")}
        for number in range(75):
            room = list(self.program.rooms.values())[number % 5]
            address = "198.51.100.%d" % number
            fields = {"name": "A listed server", "description": "x" * 80, "players": 9,
                      "room": room.game,
                      "private": {name: one.default for name, one in room.private.items()}}
            game = room.game
            if game == "quake3":
                game = "openarena"
                fields.update(version="71", details={"gamename": "Quake3Arena"})
            self.program.registry.list_or_refresh((game, address, 1000), address, 0.0, 1e6, fields)

    def surplus(self, name, packets, peer=PEER, seconds=0):
        """How many bytes more go to the source than came from it, repetitions and queries of the
        next seconds too."""
        sent = []
        for data in packets:
            with contextlib.suppress(*NOT_LISTED):
                sent += self.protocols[name].datagram(data, peer, 10.0)
        for second in range(seconds):
            for protocol in self.protocols.values():
                sent += protocol.tick(11.0 + second)
        return sum(len(data) for data, place in sent if place[0] == peer[0]) - sum(
            map(len, packets))

    def test_every_type_of_request(self):
        for name, protocol, packets, most in self.REQUESTS:
            self.start()
            surplus = self.surplus(protocol, packets, seconds=60)
            self.assertLessEqual(surplus, most, name)
            self.assertEqual(surplus > 0, most > 0, name)
            # What /check explains is not pushed out either
            self.assertEqual(len(self.program.registry.outcomes), 0, name)
        self.assertEqual({protocol for _, protocol, _, _ in self.REQUESTS}, {*self.protocols})

    def test_many_requests(self):
        """From one source, and from as many as exhaust what there is for all of them together."""
        rate, burst = 1000, 3000        # less than the program has: it takes as many sources
        for name, protocol, packets, most in self.REQUESTS:
            if most:
                self.start()
                surplus = sum(self.surplus(protocol, packets, (self.PEER[0], port))
                              for port in range(1000))
                self.assertLessEqual(surplus, 50 * 512, name)           # a burst of requests
            if most > 4:
                with mock.patch.object(ms, "SURPLUS_BYTES", (rate, burst)):
                    self.start()
                surplus = sum(max(0, self.surplus(protocol, packets, (
                    "%d.%d.113.9" % (60 + number // 250, number % 250), 5000)))
                    for number in range(600))
                self.assertLessEqual(surplus, burst + most, name)

    def test_a_bucket_that_is_empty_keeps_nobody_else_out(self):
        """Those who need no surplus are served, and each use has a bucket of its own."""
        with mock.patch.object(ms, "SURPLUS_BYTES", (1000, 3000)):
            self.start()
        for use in "cookie", "ping":
            self.program.registry.rules.allow_surplus(use, "60.0.0.1", 3000, 10.0)
        answer, = self.protocols["Iceball"].datagram(CAPTURED, self.PEER, 10.0)
        self.protocols["Iceball"].datagram(b"HSHK" + answer[0][4:], self.PEER, 10.0)
        self.assertIsNotNone(self.program.registry.get("iceball", self.PEER[0], 21737))
        with self.assertRaises(ms.Limited):
            self.protocols["SubSpace"].datagram(PING_TIME, self.PEER, 10.0)
        self.assertEqual(len(self.protocols["SubSpace"].datagram(
            PING_TIME, ("127.0.0.1", 1), 10.0)), 1)         # this one is exempt
        self.assertGreater(self.surplus("SubSpaceList", [CONNECT, REQUEST]), 400)

    def test_no_two_ports_answer_each_other_for_ever(self):
        """A request forged in the name of another master's port."""
        places = {}
        for number in range(2):
            self.start()
            for protocol in self.protocols.values():
                places["203.0.113.%d" % number, 5000 + len(places)] = protocol
        now = 0.0
        for (name, _, packets, _), source, place in itertools.product(
                self.REQUESTS, places, places):
            now += 60.0
            talk = collections.deque((data, source, place) for data in packets)
            for _ in range(1000):
                if not talk:
                    break
                data, sender, receiver = talk.popleft()
                now += 0.25                         # slow enough for every other limit
                with contextlib.suppress(*NOT_LISTED):
                    talk.extend((reply, receiver, to) for reply, to in places[receiver].datagram(
                        data, sender, now) if to in places)
            self.assertFalse(talk, (name, source, place))


# --- Web -----------------------------------------------------------------------------------------

# As Iceball 0.2.1-37 sends it (PROTOCOLS.md, section 1)
ICEBALL_REQUEST = (b"GET /master.json HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\n"
                   b"User-Agent: IceballQuery/1.0\r\n\r\n")
NASTY_NAMES = (
    "<script>alert(1)</script>", "]]><server/>", "\"'&amp;&lt;", "\ud800 lone", "\u202egnp.exe",
    "\x00\x01\x0b\x1f\x7f\x85\ufffe\uffff", "a\\u0000\\", "😀 ünï", "--><!--", "%s%n{}$name",
    "new\nline", "\u2028sep")


def http_request(path, *lines, method="GET", body=b""):
    head = ["%s %s HTTP/1.1" % (method, path), "Host: x", *lines, "", ""]
    return "\r\n".join(head).encode("latin-1") + body


def answered(session, data, now=0.0):
    """Everything that a session answers, its jobs done at once, in as many turns as it takes."""
    out = feed(session, data, now=now)
    while session.job is not None:
        try:
            result = session.job()
        except Exception as error:
            result = error
        answer = session.resume(result, now)
        while answer or session.unfinished:
            out += sent(session, answer)
            answer = b"" if session.done else session.receive(b"", now)
    return out


class WebCase(unittest.TestCase):
    settings = {}

    def setUp(self):
        self.program = with_rooms(make_core(**self.settings))
        self.registry = self.program.registry
        self.web = ms.Web(self.program)

    def session(self, address="127.0.0.1", now=0.0):
        return self.web.session(address, now)

    def exchange(self, request, address="127.0.0.1", now=0.0):
        return answered(self.session(address, now), request, now)

    def get(self, path, *lines, method="GET", address="127.0.0.1", now=0.0):
        data = self.exchange(http_request(path, *lines, method=method), address, now)
        status, headers, body, rest = split_response(data)
        self.assertEqual(rest, b"")
        return status, headers, body

    def servers(self, path="/servers.json", now=0.0):
        return json.loads(self.get(path, now=now)[2].decode("utf-8"))["servers"]

    def list(self, port=1, address="203.0.113.9", game="iceball", source="", **fields):
        return self.registry.list_or_refresh(
            (game, address, port), source or address, 0.0, 120.0,
            {"name": "S", "room": game if game in self.program.rooms else "", **fields})


TEXT, HTML = "text/plain; charset=utf-8", "text/html; charset=utf-8"
JSON, POST_ALONE = "application/json; charset=utf-8", "POST, OPTIONS"
GZIPPED = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
PLAIN = {"Content-Encoding": None, "Vary": "Accept-Encoding"}
READABLE = {"Access-Control-Allow-Origin": "*"}
UNCACHED = {"ETag": None, "Cache-Control": "no-store"}


class HttpTest(WebCase):
    """Requests, connections, and what is the same for every route."""

    # What cannot be read as a request, or whose body stays unread, ends the connection
    UNREADABLE = (
        (b"\x16\x03\x01\x02\x00\x01", 400, "TLS"),
        (b"GARBAGE\r\n\r\n", 400, "METHOD PATH"),
        (b"GET / HTTP/1.1\rHost: x\r\n\r\n", 400, "METHOD PATH"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "Host"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400, "Host"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n", 400, "header"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n", 400, "header"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHo st: y\r\n\r\n", 400, "header"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: a\rContent-Length: 3\r\n\r\n", 400, "header"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: a\0b\r\n\r\n", 400, "header"),
        (b"POST / HTTP/1.0\r\nContent-Length: -1\r\n\r\n", 400, "Content-Length"),
        (b"POST / HTTP/1.0\r\nContent-Length: \xa01\r\n\r\n", 400, "Content-Length"),
        (b"GET / HTTP/1.0\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, "Length"),
        (b"POST / HTTP/1.0\r\n\r\n", 411, "Content-Length"),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411, "chunks"),
        (b"GET / HTTP/1.0\r\nContent-Length: 5\r\nTransfer-Encoding: x\r\n\r\n", 411, "chunks"),
        (b"POST / HTTP/1.0\r\nContent-Length: 65537\r\n\r\n", 413, "65536"),
        (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n", 414, "4096"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 17000, 431, "16384"),
        (b"GET / HTTP/1.0\r\n" + b"a: b\r\n" * 101 + b"\r\n", 431, "100"),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505, "version"),
        (b"GET / HTTP/0.9\r\nHost: x\r\n\r\n", 505, "version"),
        (b"GET /\r\n\r\n", 400, "METHOD PATH"),
    )
    REFUSED = (
        (b"GET /?players_min=x", 400, "players_min"),
        (b"GET /nope", 404, "/nope"),
        (b"GET /?game=nope", 404, "game"),
        (b"GET /servers.xml?game=nope", 404, "game"),
        (b"GET /server?game=iceball&address=192.0.2.1&port=1", 404, "192.0.2.1:1"),
        (b"GET /server?game=iceball&address=x&port=1", 400, "address"),
        (b"GET /server?game=iceball&address=192.0.2.1", 400, "port"),
        (b"GET /server?game=x&address=192.0.2.1&port=1&span=x", 400, "week"),
        (b"GET /check?address=play.example.org", 400, "203.0.113.7"),
        (b"GET /history.json?game=iceball", 404, "no history"),
        (b"DELETE /", 405, "GET"), (b"BREW /", 405, "GET"),
        (b"GET /announce", 405, "POST"),
    )

    def readable_by_iceball(self, data):
        """The client of the game exits, fails or hangs at anything else; the body."""
        head, separator, rest = data.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        self.assertTrue(separator, data)
        self.assertRegex(first, rb"^HTTP/1\.[01] [2345]\d\d .+$")
        self.assertNotIn(b"\n", b"".join(lines))
        for line in lines:
            self.assertRegex(line, rb"^[A-Za-z-]+: \S.*$")
        self.assertEqual([line for line in lines if line.startswith(b"Length: ")],
                         [b"Length: %d" % len(rest)])
        self.assertIn(b"Content-Length: %d" % len(rest), lines)
        self.assertNotIn(b"Transfer-Encoding", head)
        for field in (POLICY, "X-Content-Type-Options: nosniff", "Referrer-Policy: no-referrer"):
            self.assertIn(field.encode() + b"\r\n", head)
        return rest

    def test_every_refusal_is_complete_and_says_why(self):
        host = b" HTTP/1.1\r\nHost: x\r\n\r\n"
        refused = [(line + host, *more) for line, *more in self.REFUSED]
        for request, status, words in [*self.UNREADABLE, *refused]:
            with self.subTest(request=request[:70]):
                session = self.session()
                data = answered(session, request)
                found, headers, _, _ = split_response(data)
                self.assertIn(words, self.readable_by_iceball(data).decode())
                ends = (request, status, words) in self.UNREADABLE
                self.assertEqual((found, headers["Connection"], session.done),
                                 (status, "close" if ends else "keep-alive", ends))
                self.assertEqual(session.receive(ICEBALL_REQUEST, 0.0) == b"", ends)

    def test_the_list_that_iceball_reads(self):
        empty = b'{"version":2,"iceball_version":8421413,"servers":[]}'
        for _ in range(2):                          # the second from the cache
            self.assertEqual(self.readable_by_iceball(self.exchange(ICEBALL_REQUEST)), empty)
        self.web.tick(1.0)
        self.registry.rules.official = {("203.0.113.9", 20737): True}
        self.list(20737, mode="ctf", map="m", version="0.2.1-37", players=1, max_players=8)
        self.list(5, "203.0.113.10", name="Ünï")
        self.list(6, game="mygame")
        body = self.readable_by_iceball(self.exchange(ICEBALL_REQUEST))
        # `official` counts as true whatever it is; an escape fails the whole list
        self.assertEqual(body.decode(), '''{"version":2,"iceball_version":8421413,"servers":[\
{"name":"S","address":"203.0.113.9","port":20737,"players_current":1,"players_max":8,\
"mode":"ctf","map":"m","version":"0.2.1-37","basedir":"ctf","official":true},
{"name":"Ünï","address":"203.0.113.10","port":5,"players_current":0,"players_max":0,\
"mode":"","map":"","version":"","basedir":""}]}''')

    def test_iceball_gets_an_empty_list_for_a_refusal(self):
        self.list()
        self.registry.rules.blocked = ms.Networks([ms.read_network("192.0.2.66")])
        self.web.trusted_proxies = ms.Networks([ms.read_network("127.0.0.1")])
        for client, times, status in (("192.0.2.5", 51, 429), ("192.0.2.66", 1, 403)):
            request = http_request("/master.json", "X-Forwarded-For: " + client)
            for _ in range(times):
                data = self.exchange(request)
            self.assertEqual(split_response(data)[0], status)
            body = json.loads(self.readable_by_iceball(data).decode())
            self.assertEqual(body, {"version": 2, "iceball_version": 8421413, "servers": []})

    def test_nobody_is_told_to_continue(self):
        head = http_request("/announce", "Content-Length: 2", "Expect: 100-continue", method="POST")
        session = self.session()
        self.assertEqual(session.receive(head, 0.0), b"")
        self.assertEqual(split_response(session.receive(b"{}", 0.0))[0], 400)

    def test_any_split_gives_the_same_answers(self):
        self.list()
        post = http_request("/announce", "Content-Length: 5", method="POST", body=b"hello")
        for request in (ICEBALL_REQUEST, b"\r\n" + ICEBALL_REQUEST * 2, post + ICEBALL_REQUEST,
                        b"GET /nowhere HTTP/1.0\r\n\r\n", b"HEAD / HTTP/1.1\nHost: x\n\n",
                        b"\x16\x03\1" + bytes(5000)):
            wanted = feed(self.session(), request)
            self.assertEqual(wanted.count(b'"servers":'), request.count(ICEBALL_REQUEST), wanted)
            for size in (1, 2, 7):
                self.assertEqual(feed(self.session(), request, size), wanted, request)

    def test_one_request_after_another(self):
        """One answer a call bounds what waits for a slow reader."""
        session = self.session()
        data = session.receive(ICEBALL_REQUEST + http_request("/nope") + ICEBALL_REQUEST, 0.0)
        for status in 200, 404, 200:
            found, _, _, rest = split_response(data)
            self.assertEqual((found, rest), (status, b""))
            data = session.receive(b"", 0.0)

    def test_keep_alive(self):
        for request, done in (
                (ICEBALL_REQUEST, False), (b"GET / HTTP/1.0\r\n\r\n", True),
                (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", False),
                (http_request("/", "Connection: close"), True),
                (http_request("/", "Connection: TE, close"), True),
                (http_request("/", "Connection: TE", "Connection: close"), True),
                (b"\r\n" + ICEBALL_REQUEST, False),
                (b"GET http://x/master.json HTTP/1.1\r\nHost: x\r\n\r\n", False)):
            for _ in range(2):                      # the second from the cache
                session = self.session()
                status, headers, _, _ = split_response(session.receive(request, 0.0))
                self.assertEqual((status, session.done, headers["Connection"]),
                                 (200, done, "close" if done else "keep-alive"), request)

    def test_slow_requests_end(self):
        post = b"POST /announce HTTP/1.0\r\nContent-Length: 9\r\n\r\n"
        healthz = http_request("/healthz")
        for sent, ends, status in (
                ([], 10.0, b""),                    # silent from the first
                ([(1.0, b"G")], 11.0, b"408"), ([(1.0, ICEBALL_REQUEST[:-1])], 11.0, b"408"),
                ([(second, b"G") for second in range(10)], 10.0, b"408"),   # bytes buy no time
                ([(1.0, post + b"game")], 11.0, b"408"),
                ([(0.0, post[:20]), (8.0, post[20:])], 10.0, b"408"),
                ([(1.0, ICEBALL_REQUEST)], 31.0, b""), ([(1.0, healthz)], 31.0, b""),     # idle
                ([(1.0, healthz + b"GET /mas")], 11.0, b"408"),
                # The event loop: a slow reader has the last of it
                ([(0.0, ICEBALL_REQUEST), (50.0, b"")], 80.0, b"")):
            session = self.session()
            for now, data in sent:
                feed(session, data, now=now)
                session.receive(b"", now)
            self.assertEqual((session.tick(ends - 0.1), session.done), (b"", False), sent)
            data = session.tick(ends)
            self.assertEqual((session.done, data[9:12]), (True, status), sent)
            if data:
                self.readable_by_iceball(data)

    def test_a_connection_over_a_limit_is_told_so(self):
        session = self.web.refusal("203.0.113.5", 0.0)
        data = session.opened(0.0)
        status, headers, body, _ = split_response(data)
        self.assertEqual((status, headers["Connection"], headers["Retry-After"], session.done),
                         (429, "close", "5", True))
        self.assertIn(b"connections", self.readable_by_iceball(data))
        self.assertEqual(self.web.request_counts["none", 429], 1)
        self.assertFalse(self.web.speaks_first)

    FIELDS = (
        # The body of an error is what its reader expects
        ("GET /nope", "Accept: text/html,*/*", 404, {"Content-Type": HTML}, b"<!doctype"),
        ("GET /nope", "Accept: */*", 404, {"Content-Type": TEXT}, b"404 Not Found\nThere is no pa"),
        ("GET /?players_min=x", "Accept: text/html,*/*", 400, {"Content-Type": HTML}, b"<!doctype"),
        ("GET /announce", "Accept: text/html", 405, {"Content-Type": JSON, "Allow": POST_ALONE},
         b'{"listed":false,"reason":"/announce'),
        ("GET /master.json", "Content-Length: x", 400, {"Content-Type": TEXT}, b"400 Bad"),
        ("OPTIONS /", "", 200, {"Allow": "GET, HEAD, OPTIONS"}, b""),
        # gzip, for those who take it
        ("GET /style.css", "Accept-Encoding: gzip", 200, GZIPPED, b"\x1f\x8b"),
        ("GET /style.css", "Accept-Encoding: br, gzip;q=0.5", 200, GZIPPED, b"\x1f\x8b"),
        ("GET /style.css", "Accept-Encoding: br\r\nAccept-Encoding: GZIP", 200, GZIPPED, b"\x1f"),
        ("GET /style.css", "Accept-Encoding: br", 200, PLAIN, b""),
        ("GET /style.css", "Accept-Encoding: gzip;q=0", 200, PLAIN, b""),
        ("GET /style.css", "Accept-Encoding: gzip ; q=0.0, br", 200, PLAIN, b""),
        ("GET /style.css", "Accept-Encoding: ", 200, PLAIN, b""),
        ("GET /robots.txt", "Accept-Encoding: gzip", 200, PLAIN, b"User-agent"),        # too short
        # Scripts of other sites may read the data
        ("GET /servers.json", "", 200, READABLE, b""),
        ("OPTIONS /servers.json", "", 200, READABLE, b""),
        ("GET /servers.xml?game=x", "", 404, READABLE, b""),
        ("GET /", "", 200, {"Access-Control-Allow-Origin": None}, b""),
        ("GET /check", "If-None-Match: *", 200, UNCACHED, b""),
        ("GET /healthz", 'If-None-Match: none, ""', 200, UNCACHED, b""),
        ("GET /nope", "", 404, UNCACHED, b""),
    )

    def test_the_fields_of_the_answer(self):
        plain = self.get("/style.css")[2]
        for request, lines, status, fields, begin in self.FIELDS:
            with self.subTest(request=request, lines=lines):
                method, path = request.split()
                found, headers, body = self.get(path, *[lines] if lines else [], method=method)
                self.assertEqual((found, {name: headers.get(name) for name in fields}),
                                 (status, fields))
                self.assertTrue(body.lower().startswith(begin.lower()), body[:80])
                if fields is GZIPPED:
                    self.assertEqual(gzip.decompress(body), plain)
        self.web.forget_responses()
        with mock.patch.object(ms, "GZIP_MAX_BYTES", 1000):
            headers = self.get("/style.css", "Accept-Encoding: gzip")[1]
            self.assertNotIn("Content-Encoding", headers, "too long")

    def test_a_head_alone(self):
        for path in ("/", "/master.json", "/index.html", "/style.css", "/nope"):
            body = self.get(path)[2]
            head = self.exchange(http_request(path, method="HEAD"))
            self.assertTrue(head.endswith(b"\r\n\r\n"))
            self.assertIn(b"\r\nLength: %d\r\n" % len(body), head)
        for request, status in ((b"HEAD / HTTP/2.0\r\n\r\n", b"505"),
                                (b"HEAD / HTTP/1.1\r\n\r\n", b"400"),
                                (b"HEAD / HTTP/1.0\r\nX: " + b"x" * 17000, b"431")):
            head, _, body = self.exchange(request).partition(b"\r\n\r\n")
            self.assertEqual((head[9:12], body), (status, b""))

    def test_an_unchanged_list_is_not_sent_again(self):
        self.list()
        for path in ("/master.json", "/style.css", "/?name=s"):
            for coding in ("identity", "gzip"):
                accept = "Accept-Encoding: " + coding
                whole = self.get(path, accept)[1]
                self.assertEqual(whole["Cache-Control"], "public, max-age=5")
                for known in ("If-None-Match: %s", 'If-None-Match: "x", %s'):
                    data = self.exchange(http_request(path, accept, known % whole["ETag"]))
                    head, _, body = data.partition(b"\r\n\r\n")
                    self.assertEqual((head[9:25], body), (b"304 Not Modified", b""))
                    self.assertIn(b"\r\nLength: %s\r\n" % whole["Length"].encode(), head)
        known = "If-None-Match: " + self.get("/master.json")[1]["ETag"]
        self.web.tick(1.0)
        self.assertIn(b" 304 ", self.exchange(http_request("/master.json", known), now=1.0)[:20])
        self.list(2)
        self.web.tick(2.0)
        self.assertEqual(self.get("/master.json", known, now=2.0)[0], 200)

    # The cache

    def test_the_same_bytes_have_the_same_answer_until_the_next_tick(self):
        first = self.exchange(ICEBALL_REQUEST)
        self.list()
        with mock.patch.object(ms.HttpRequest, "parse", side_effect=AssertionError):
            session = self.session()
            self.assertEqual([session.receive(ICEBALL_REQUEST, now) for now in (0.9, 9.0)],
                             [first, first])
        self.assertEqual((session.tick(38.9), session.done), (b"", False), "it is in use")
        self.web.tick(1.0)
        self.assertEqual(len(self.servers("/master.json")), 1)
        self.assertEqual(self.web.request_counts["/master.json", 200], 4)

    def test_what_is_cached(self):
        cache = self.web.caches["http"]
        for request in (http_request("/check"), http_request("/nope"), http_request("/healthz"),
                        http_request("/robots.txt", "Content-Length: 1", body=b"x")):
            self.exchange(request)
        self.assertEqual(cache, {}, "not what is for one client")
        for most, count in ((2000, 3), (300, 1)):           # one that is longer is there alone
            with mock.patch.object(ms, "HTTP_CACHE_BYTES", most):
                for number in range(9):
                    self.get("/robots.txt?%d" % number)
                    self.assertIn(len(cache), range(1, count + 1))

    # Limits

    def test_too_many_requests_get_a_429_and_end_the_connection(self):
        for path in ("/nope", "/robots.txt"):       # the second from the cache
            session = self.session("203.0.113.8")
            self.registry.rules.request_limiter.table.clear()
            out = b"".join(answered(session, http_request(path)) for _ in range(60))
            self.assertEqual((out.count(b"HTTP/1.1 429"), out.count(b"HTTP/1.1 ")), (1, 51))
            refused = split_response(out[out.index(b"HTTP/1.1 429"):])[1]
            self.assertEqual((refused["Retry-After"], refused["Connection"]), ("5", "close"))
            self.assertTrue(session.done)
        self.assertEqual(self.get("/robots.txt", address="203.0.113.9")[0], 200)
        self.assertEqual(self.get("/robots.txt", address="203.0.113.8", now=1.0)[0], 200)

    def trust(self, *networks):
        self.web.trusted_proxies = ms.Networks(map(ms.read_network, networks))

    def test_whose_request_it_is_behind_a_proxy(self):
        self.trust("127.0.0.0/8", "2001:db8:1::/48")
        for lines, client in (
                (["203.0.113.66", "198.51.100.77"], "198.51.100.77"),
                (["198.51.100.77, 2001:db8:1::1", "127.0.0.2"], "198.51.100.77"),
                (["198.51.100.4:5555"], "198.51.100.4"), (["[2001:db8::5]:77"], "2001:db8::5"),
                (["2001:db8::5"], "2001:db8::5"), (["::ffff:198.51.100.4"], "198.51.100.4"),
                (["198.51.100.4, "], "198.51.100.4"), (["198.51.100.4, unknown"], "127.0.0.1"),
                (["198.51.100.4, 0.0.0.0"], "127.0.0.1"), (["ff02::1"], "127.0.0.1"),
                ([], "127.0.0.1")):
            page = self.get("/check", *["X-Forwarded-For: " + line for line in lines])[2]
            self.assertIn(b"Nothing at %s is" % client.encode(), page, lines)
        page = self.get("/check", "X-Forwarded-For: 198.51.100.4", address="203.0.113.1")[2]
        self.assertIn(b"Nothing at 203.0.113.1 is", page)

    def test_limits_behind_a_proxy_are_each_client_s(self):
        self.trust("127.0.0.1")
        request = http_request("/master.json", "X-Forwarded-For: 203.0.113.5")
        self.exchange(request, "203.0.113.7")       # no proxy's: cached
        session = self.session()
        for client in ("203.0.113.5", "203.0.113.6"):
            request = http_request("/master.json", "X-Forwarded-For: " + client)
            found = [split_response(answered(session, request))[0] for _ in range(60)]
            self.assertEqual(found, [200] * 50 + [429] * 10, client)
        self.assertFalse(session.done, "it is not this client's alone")
        self.assertEqual([key for key in self.web.caches["http"] if b"203.0.113.6" in key], [])

    def test_a_search_costs_more_the_more_servers_there_are(self):
        for port in range(1, 41):
            self.list(port, "203.0.113.%d" % port)
        with mock.patch.object(ms, "SEARCH_SERVERS", 10):           # 1 + 4 of 50
            for path, limit in (("/servers.json?x=%d", 50), ("/servers.json?name=s&x=%d", 10),
                                ("/?players_min=0&name=x&x=%d", 10)):
                self.registry.rules.request_limiter.table.clear()
                found = [self.get(path % number, address="192.0.2.1")[0] for number in range(60)]
                self.assertEqual(found, [200] * limit + [429] * (60 - limit), path)
        with mock.patch.object(ms, "SEARCH_SERVERS", 0.01):         # half of the burst at most
            self.assertEqual(self.get("/servers.json?name=s", address="192.0.2.2")[0], 200)

    def test_a_request_costs_what_it_makes_the_master_do(self):
        """In tokens of its source; registrations in those of messages."""
        self.database(history=mock.Mock(return_value=ms.Series(60, 60, [1], [2])),
                      known=mock.Mock(return_value=None),
                      games_past=mock.Mock(return_value={}))
        for port in range(1, 41):
            self.list(port, "203.0.113.%d" % port)
        spent = []

        def allow(address, now, tokens=1.0):
            spent.append(tokens)
            return True

        one = "address=203.0.113.1&port=1&game=iceball"
        with mock.patch.multiple(ms, SEARCH_SERVERS=10, CHECK_SERVERS=20), \
                mock.patch.object(self.registry.rules.request_limiter, "allow", allow), \
                mock.patch.object(self.registry.rules.message_limiter, "allow", allow):
            for request, tokens in (
                    (http_request("/"), 1), (http_request("/"), 1),             # from the cache
                    (http_request("/servers.json?name=s"), 5), (http_request("/check"), 3),
                    (http_request("/history.json?game=iceball"), 1.48),
                    (http_request("/history.json?game=iceball&span=year"), 3.93),
                    (http_request("/games"), 1.99), (http_request("/games.json"), 1.99),
                    (http_request("/server?%s" % one), 1.48),
                    (http_request("/server?%s&span=year" % one), 3.93),
                    (http_request("/banner.svg?%s" % one), 1),
                    (http_request(ms.DDNET_REGISTER, "Content-Length: 0", method="POST"), 2)):
                spent.clear()
                self.exchange(request)
                self.assertAlmostEqual(sum(spent), tokens, 2, request[:60])

    def test_who_looks_at_the_page_is_never_refused(self):
        """With 10,000 servers: he searches, opens the page of a server with all its charts, asks
        what became of his own, and leaves the page open, which refreshes itself."""
        self.database(history=mock.Mock(return_value=ms.Series(60, 60, [1], [2])),
                      known=mock.Mock(return_value=None))
        self.list(1)
        self.registry.total = 10000
        now, files = 0.0, ("/style.css", "/app.js", "/icon")
        server = "/server?address=203.0.113.9&port=1&game=iceball&span="
        for pause, path in (
                (0, "/"), (1, "/?name=s"), *[(1, server + span) for span in ms.SPANS],
                (1, "/check"), (1, "/check"),
                *[(5, "/?name=s&x=%d" % number) for number in range(20)]):
            now += pause
            self.web.tick(now)
            for file in (path, *files):
                self.assertEqual(self.get(file, now=now, address="192.0.2.1")[0], 200, (path, now))

    def test_what_is_made_for_one_is_not_kept_without_bound(self):
        """The results of searches count with their bodies, unlike a list that all share."""
        for number in range(1, 1000):
            self.list(number, "203.0.%d.9" % (number // 20))
        cache = self.web.caches["http"]
        with mock.patch.object(ms, "HTTP_CACHE_BYTES", 1 << 20):
            for path, most in (("/servers.json?name=s&x=%d", 2), ("/servers.json?x=%d", 20)):
                self.web.empty_caches()
                for number in range(20):
                    self.get(path % number, address="192.0.2.%d" % number)
                    self.assertLessEqual(len(cache), most)
                self.assertGreaterEqual(len(cache), most // 2)

    # What needs the disk

    def database(self, **more):
        database = mock.Mock(**more)
        self.web = ms.Web(self.program._replace(database=database))
        return database

    def test_disk_errors_are_no_fault_of_the_client(self):
        self.database(history=mock.Mock(side_effect=[
            sqlite3.OperationalError("disk I/O error"), MemoryError(), OSError("gone"),
            RuntimeError("too many others are waiting"), KeyError("x")]))
        for words in (b"disk I/O error", b"MemoryError", b"gone", b"too many"):
            status, headers, body = self.get("/history.json?game=iceball")
            self.assertEqual((status, words in body, headers["Retry-After"]), (503, True, "5"))
        with self.assertRaises(KeyError):           # a fault of the program: it is logged as one
            self.get("/history.json?game=iceball")

    def test_a_disk_that_hangs(self):
        database = self.database()
        session = self.session()
        self.assertEqual(session.receive(http_request("/history.json?game=iceball"), 1.0), b"")
        self.assertIsNotNone(session.job)
        self.assertFalse(database.history.called, "in the event loop")
        self.assertEqual(session.tick(10.9), b"")
        self.assertEqual(split_response(session.tick(11.0))[0], 503)
        self.assertTrue(session.done)

    def test_requests_behind_one_for_the_disk_wait(self):
        self.database(history=mock.Mock(return_value=ms.Series(60, 60, [1], [2])),
                      known=mock.Mock(return_value=None))
        self.web.charge = mock.Mock()
        session = self.session()
        requests = (http_request("/history.json?game=iceball") + ICEBALL_REQUEST
                    + http_request("/server?game=iceball&address=192.0.2.1&port=1"))
        self.assertEqual(session.receive(requests, 0.0), b"")
        self.assertEqual(session.receive(ICEBALL_REQUEST, 0.0), b"")
        found, data = [], answered(session, b"")
        while data:
            status, _, _, data = split_response(data)
            found.append(status)
        self.assertEqual((found, session.job, session.done), ([200, 200, 404, 200], None, False))
        self.assertEqual(self.web.charge.call_count, 6, "each once, and twice for a history")
        self.assertEqual(self.web.request_counts["/server", 404], 1)


class ListsTest(WebCase):
    """What the routes for the lists and pages tell."""

    settings = {"games__mygame": "My Game"}

    def test_every_field_of_a_server(self):
        self.web.epoch = 1.7e9
        self.registry.rules.official = {("203.0.113.9", 1): True}
        self.registry.rules.priority = {("203.0.113.9", 1): 7}
        server = self.list(mode="ctf", map="m", version="1", players=3, max_players=8, playing=2,
                           description="D", private={"flavor": 4}, verified="query", ping_ms=41.26,
                           details={"skill": "9", "arenas": "a"}, found_at="up.example")
        self.registry.confirm(server, 60.5)
        self.list(2, responding=False).confirmed = False
        self.assertEqual(self.get("/servers.json", now=70.0)[2].decode(), '''\
{"generated":1700000070,"generation":%d,"servers":[{"game":"iceball","address":"203.0.113.9",\
"port":1,"name":"S","mode":"ctf","map":"m","version":"1","players":3,"max_players":8,"playing":2,\
"description":"D","official":true,"priority":7,"verified":"query","responding":true,\
"found_at":"up.example","country":"","unconfirmed":false,"ping_ms":41.3,"flavor":4,"arenas":"a",\
"factions":"","skill":"9","flags":"",\
"master":"","first_seen":1700000000,"last_seen":1700000060},
{"game":"iceball","address":"203.0.113.9","port":2,"name":"S","mode":"","map":"","version":"",\
"players":0,"max_players":0,"playing":null,"description":"","official":false,"priority":0,\
"verified":"self-reported","responding":false,"found_at":"","country":"",\
"unconfirmed":true,"ping_ms":null,"flavor":0,\
"arenas":"","factions":"","skill":"","flags":"","master":"","first_seen":1700000000,\
"last_seen":1700000000}]}
''' % self.registry.generation)

    def test_lists_are_made_once_for_all(self):
        """However many ask for them, in whatever words; and each server's part only when it has
        changed. A list stays until then; one that tells times, for 5 s at most."""
        servers = [self.list(port, max_players=9) for port in range(1, 4)]
        for path, function, has_times in (
                ("/?x=%d", "render_server_row", 1), ("/servers.json?%d", "server_json", 1),
                ("/servers.xml?game=iceball&x=%d", None, 1), ("/master.json?%d", None, 0)):
            self.registry.render_at = 0.0
            listed = mock.Mock(wraps=self.registry.servers)
            made = mock.Mock(wraps=getattr(ms, function or "endpoint_text"))
            with mock.patch.object(self.registry, "servers", listed), \
                    mock.patch.object(ms, function or "endpoint_text", made):
                for now, lists, entries in (1.0, 1, 3), (2.0, 1, 3), (7.0, 1 + has_times, 3):
                    self.web.tick(now)
                    for number in range(5):
                        self.get(path % number, now=now)
                    self.assertEqual(listed.call_count, lists, path)
                    self.assertEqual(made.call_count, entries if function else 0, path)
                self.registry.update(servers[1], {"players": servers[1].players + 1})
                self.web.tick(8.0)
                self.get(path % 0, now=8.0)
                self.assertEqual(listed.call_count, 2 + has_times, path)
                self.assertEqual(made.call_count, 4 if function else 0, path)
        self.assertTrue(self.web.lists)
        self.web.tick(100.0)                    # nobody has asked for a minute
        self.assertEqual(self.web.lists, {})

    def test_a_long_body_is_there_once(self):
        for number in range(1, 1000):
            self.list(number, "203.0.%d.9" % (number // 20))
        bodies = []
        for line in ("X: 1", "X: 2", "X: 2"):               # the third from the cache
            session = self.session()
            head = session.receive(http_request("/master.json", line), 0.0)
            self.assertEqual((head[-4:], len(head) < 1000), (b"\r\n\r\n", True))
            bodies.append(session.body)
        self.assertEqual({id(body) for body in bodies}, {id(bodies[0])})
        self.assertEqual(len(json.loads(bodies[0].decode())["servers"]), 999)

    def test_compressed_once_for_all_who_ask(self):
        for port in range(1, 20):
            self.list(port)
        with mock.patch.object(ms.zlib, "compressobj", wraps=zlib.compressobj) as compress:
            for number in range(3):
                body = self.get("/servers.json?x=%d" % number, "Accept-Encoding: gzip")[2]
                self.assertEqual(len(json.loads(gzip.decompress(body).decode())["servers"]), 19)
        self.assertEqual(compress.call_count, 1)

    def test_text_that_cannot_be_compressed_is_sent_as_it_is(self):
        """This is known soon, and is not tried again while the list stays as it is."""
        noise = random.Random(5)
        for number in range(1, 1000):
            self.list(number, "203.0.%d.9" % (number // 20),
                      description="%0500x" % noise.getrandbits(2000))
        whole = len(self.get("/servers.json")[2])
        compressor = mock.Mock(wraps=zlib.compressobj(ms.GZIP_LEVEL))
        with mock.patch.object(ms.zlib, "compressobj", return_value=compressor), \
                mock.patch.object(ms, "GZIPPED_BYTES", 100000):
            for number in range(3):
                _, headers, body = self.get(
                    "/servers.json?x=%d" % number, "Accept-Encoding: gzip")
                self.assertEqual((headers.get("Content-Encoding"), len(body)), (None, whole))
        read = sum(len(call[0][0]) for call in compressor.compress.call_args_list)
        self.assertTrue(100000 < read < 500000 < whole, (read, whole))

    def test_the_times_in_a_list_move_with_the_tick(self):
        server = self.list()
        for now, epoch in ((10.0, 0.0), (20.0, 0.0), (30.0, 1.7e9), (40.0, 1.6e9)):     # it was set
            self.registry.confirm(server, now - 1.0)
            self.web.epoch = epoch
            self.web.tick(now)
            listed, = self.servers(now=now)
            self.assertEqual((listed["first_seen"], listed["last_seen"]), (epoch, epoch + now - 1))
            self.assertIn('title="%s">1 s ago\n' % ms.iso_time(epoch + now - 1),
                          self.get("/", now=now)[2].decode())

    def test_a_search(self):
        self.list(27790, name="Straße 12", players=2)
        self.list(27791, "2001:db8::5", name="Two", game="mygame")
        for query, ports in (
                ("name=STRASSE", [27790]), ("name=203.0.113.", [27790]), ("name=277", []),
                ("name=203.0.113.9:27790", [27790]), ("name=203.0.113.9:27791", []),
                ("name=[2001:DB8::5]:27791", [27791]), ("name=2001:db8:", [27791]),
                ("name=t", [27790, 27791]), ("name=t&game=mygame", [27791]), ("name=three", []),
                ("players_min=2", [27790]), ("players_min=3", []),
                ("players_min=0", [27790, 27791]), ("name=%20", [27790, 27791]),
                ("game=mygame", [27791]), ("game=nope", []),
                ("name=stra\xc3\x9fe", [27790])):            # as a shell sends it
            found = self.servers("/servers.json?" + query)
            self.assertEqual([server["port"] for server in found], ports, query)
            if "game=nope" not in query:
                page = self.get("/?" + query)[2].decode()
                self.assertEqual(page.count("<tr"), 1 + len(ports), query)
        self.assertEqual({game for _, game in self.web.lists}, {"", "mygame"})
        self.assertEqual(set(self.registry.games), {"iceball", "mygame"})

    def test_hostile_names(self):
        for port, name in enumerate(NASTY_NAMES, 1):
            self.list(port, name=ms.clean(name))
            self.list(port, name=ms.clean(name), map=ms.clean(name), game="hyperbol")
        clean = {ms.clean(name) for name in NASTY_NAMES}
        for path in ("/master.json", "/servers.json?game=hyperbol"):
            body = self.get(path)[2]
            # Of which Iceball fails; one name has a backslash and a u in it
            self.assertNotIn(b"\\u", body.replace(b"a\\\\u0000\\\\", b""))
            self.assertEqual({s["name"] for s in json.loads(body.decode())["servers"]}, clean)
        body = self.get("/servers.xml")[2]
        servers = xml.dom.minidom.parseString(body).getElementsByTagName("server")
        self.assertEqual({server.getAttribute("servername") for server in servers}, clean)

    def test_servers_xml(self):
        self.web.epoch = self.program.rooms["hyperbol"].epoch = 1.7e9
        self.list(27888, "203.0.113.7", "hyperbol", name="Fun & \"Games\"", mode="Core", players=5,
                  max_players=16, map="orbital", version="1.8a", ping_ms=41.2,
                  private={"flavor": 3}, details={"skill": "9"})
        self.list(27888, "203.0.113.8", "hyperbol", responding=False)
        self.list()
        status, headers, body = self.get("/servers.xml", now=1.0)
        self.assertEqual(headers["Content-Type"], "application/xml; charset=utf-8")
        # As the script in the document writes it; the first time is this machine's own
        self.assertEqual(re.sub(r'localtime="[0-9T:+-]{25}"', "", body.decode()), '''\
<?xml version="1.0" encoding="UTF-8"?>
<serverlist  gmtime="2023-11-14T22:13:21+00:00">
<server ip="203.0.113.7" port="27888" responding="1" servername="Fun &amp; &quot;Games&quot;" \
gametype="Core" playercount="5" maxplayercount="16" mapname="orbital" version="1.8a" skill="9" \
flavor="3" ping_milliseconds="41"/>
<server ip="203.0.113.8" port="27888" responding="0"/>
</serverlist>
''')
        self.assertNotIn(b"<server ", self.get("/servers.xml?game=mygame")[2])

    def test_the_day_s_player_counts(self):
        days = [{}]
        self.web = ms.Web(self.program._replace(hourly_players=lambda: days[-1]))
        server = self.list(players=3, max_players=8)
        for hour in range(3):
            day, total, of_all = [None, 2, hour], [None, 41, hour], [None, 57, hour]
            days.append({server.key: day, ("iceball", "", 0): total, ms.ALL_GAMES: of_all})
            self.web.tick(float(hour))
            for path, counts in (("/", of_all), ("/?name=s", of_all), ("/?game=iceball", total)):
                page = self.get(path, now=float(hour))[2].decode()
                self.assertIn("</span>%s<td" % ms.render_sparkline(day), page)
                self.assertIn(ms.render_sparkline(counts), page)

    def test_a_reload_shows_at_once(self):
        self.list(game="mygame")
        self.assertIn(b">My Game<", self.get("/")[2])
        before = self.get("/master.json")[1]["ETag"]
        values, contents = self.program.settings.values, self.program.settings.contents
        values["games"] = {"mygame": "Second title"}
        values["iceball.version"] += 1
        contents["http.template"] = "<p>Our own page $table"
        contents["http.stylesheet"] = "p { color: red }"
        contents["http.logo"] = ("image/svg+xml", SVG.encode())
        self.web.read(self.program.settings)
        page = self.get("/")[2]
        self.assertEqual([words in page for words in (
            b"My Game", b">Second title<", b"Our own page")], [False, True, True])
        style = self.get("/style.css")[2].decode()
        self.assertTrue(style.startswith(ms.STYLE_CSS) and style.endswith("p { color: red }"))
        status, headers, icon = self.get("/icon")
        self.assertEqual((icon.decode(), headers["Content-Type"], headers["Cache-Control"],
                          headers["Content-Security-Policy"]),
                         (SVG, "image/svg+xml", "public, max-age=5",
                          "default-src 'none'; style-src 'unsafe-inline'; sandbox"))
        self.program.rooms["iceball"].read(self.program.settings)
        self.assertEqual(self.get("/master.json", "If-None-Match: " + before, now=1.0)[0], 200)

    def blocks(self, path, host):
        """What the page at this host gives to be pasted."""
        request = http_request(path).replace(b"Host: x", b"Host: " + host.encode())
        page = split_response(self.exchange(request))[2].decode()
        return [html.unescape(block)
                for block in re.findall("(?s)<pre><code>(.*?)</code></pre>", page)]

    def test_an_empty_list_says_what_to_do(self):
        listeners = [SimpleNamespace(protocol=protocol, port=port) for port, protocol in enumerate(
            ("iceball", "subspace", "subspace", "aio", "hyperbol", "http", "http"), 1)]
        self.web = ms.Web(self.program._replace(listeners=listeners))
        def add(query="", host="games.example:8000", path="/add"):
            return self.blocks(path + query, host)

        announce = ("python3 masterserver.py announce \\\n    --game mygame \\\n"
                    '    --port PORT \\\n    --name "My server" \\\n    %s')
        self.assertEqual(add(), [
            '"heartbeat_send": true,\n"heartbeat": [["games.example", 1]]',
            announce.replace("mygame", "hyperbol").replace("PORT", "27888")
            % "games.example:8000",
            "[Directory]\nServer1 = games.example\nPort = 3",
            "games.example\n4",
            "server_announce = true\nserverlist_url = http://games.example:8000",
            "sv_register 1\nsv_register_url http://games.example:8000/ddnet/15/register\n"
            "http_allow_insecure 1",
            announce % "games.example:8000"])
        mine = [announce % "games.example:8000"]
        for query, path in (("?game=mygame", "/add"), ("?game=mygame", "/")):
            self.assertEqual(add(query, path=path), mine)
        self.assertEqual(add(path="/"), [])
        self.assertIn('class="play" href="/add"', self.get("/")[2].decode())
        self.assertEqual(add("?game=nobody's"), add())
        for host, named in (("[2001:db8::7]", "2001:db8::7\n4"), ("", "THIS-HOST\n4"),
                            ('"><script>', "THIS-HOST\n4"), ("a]", "THIS-HOST\n4")):
            self.assertEqual(add("?game=aio", host), [named])
        self.program.settings.values["server.public_address"] = "198.51.100.1"
        self.assertEqual(add("?game=aio"), ["198.51.100.1\n4"])
        self.program.settings.values.update({"luanti.enabled": False, "ddnet.enabled": False})
        self.assertEqual(len(add()), 5)
        program = self.program._replace(listeners=listeners[3:4])
        self.assertEqual([contact.games for contact in ms.contact_blocks(
            program, ms.MasterPlace("host", ms.page_url(program, "host")))], [("aio",)])

    def test_blocks_say_https_once_it_is_there(self):
        secure = ["server_announce = true\nserverlist_url = %s",
                  "sv_register 1\nsv_register_url %s/ddnet/15/register"]
        for url, ports, told in (
                ("https://games.example", [("http", 80)], "https://games.example"),
                ("", [("http", 80), ("https", 443)], "https://m.example"),
                ("", [("http", 80), ("https", 8443), ("https", 443)], "https://m.example:8443")):
            self.program.settings.values["http.url"] = url
            self.web = ms.Web(self.program._replace(listeners=[
                SimpleNamespace(protocol=protocol, port=port) for protocol, port in ports]))
            *blocks, mine = self.blocks("/add", "m.example")
            self.assertEqual(blocks, [block % told for block in secure])
            self.assertTrue(mine.endswith("    " + told))

    def test_every_page_leads_to_add(self):
        self.list(name="One")
        place = "?game=iceball&address=203.0.113.9&port=1"
        for path in "/", "/add", "/check", "/server" + place, "/nothing":
            self.assertEqual(self.get(path, "Accept: text/html")[2].count(
                b'<a href="/add">Add your server</a>'), 2, path)

    def test_how_to_join(self):
        rows = (("iceball", 'href="iceball://203.0.113.9:5">Play</a><span></span> </p>'),
                ("ddnet", 'href="ddnet://203.0.113.9:5">Play</a><span>or press F1 in the game and '
                          "enter</span> <code>connect 203.0.113.9:5</code>"),
                ("quake3", "<code>connect 203.0.113.9:5</code>"),
                ("luanti", "<code>luanti --address 203.0.113.9 --port 5 --go</code>"),
                ("sauerbraten", "<code>/connect 203.0.113.9 5</code>"),
                ("redeclipse", "<code>/connect 203.0.113.9 5</code>"),
                ("subspace", "<code>203.0.113.9:5</code>"))
        for game, words in rows:
            server = make_server(game, "203.0.113.9", port=5)
            self.assertIn(words, ms.render_join(ms.ROOMS[game], server))
        self.list(name="One")
        page = self.get("/server?game=iceball&address=203.0.113.9&port=1")[2].decode()
        self.assertIn('<p class="join"><a class="play" href="iceball://203.0.113.9:1">', page)

    # One server

    def test_first_seen_is_the_first_time_ever(self):
        """Here or gone: the page of a server tells what the disk knows of it as well."""
        database = mock.Mock()
        database.known.return_value = ms.Remembered(1_700_000_000.0, 1_700_050_000.0, "Was <here>")
        database.history.return_value = ms.Series(1_700_000_000, 60, [1], [1])
        self.web = ms.Web(self.program._replace(database=database))
        self.web.epoch = 1_700_180_000.0
        path = "/server?game=iceball&address=::ffff:203.0.113.9&port=1&span=week"
        for words in ("Was &lt;here&gt;.*Not listed now", "Back"):
            page = self.get(path, now=5.0)[2].decode()
            self.assertRegex(page, "(?s)" + words)
            self.assertRegex(page, r"<dt>First seen</dt><dd><time[^>]*>2 d")
            key = "iceball", "203.0.113.9", 1
            database.known.assert_called_with(*key)
            database.history.assert_any_call(*key, "week", 1_700_180_005.0)
            server = self.list(name="Back")
        self.assertEqual(server.first_seen, 0.0)

    def test_history(self):
        database = mock.Mock()
        database.history.return_value = ms.Series(1_700_000_040, 60, [1, None], [2, None])
        self.web = ms.Web(self.program._replace(database=database))
        self.web.epoch = 1.7e9
        path = "/history.json?game=iceball&address=203.0.113.9&port=5&span=year"
        self.assertEqual(self.get(path, now=9.0)[2].decode(), (
            '{"game":"iceball","address":"203.0.113.9","port":5,"span":"year","start":1700000040,'
            '"step":60,"players":[1,null],"peak":[2,null]}'))
        database.history.assert_called_with("iceball", "203.0.113.9", 5, "year", 1.7e9 + 9)
        self.get("/history.json?game=iceball")
        database.history.assert_called_with("iceball", "", 0, "day", 1.7e9)
        for query in ("", "game=&span=week", "game=iceball&port=5", "game=iceball&address=x",
                      "game=iceball&span=x"):
            self.assertEqual(self.get("/history.json?" + query)[0], 400, query)

    # For the operator

    def test_metrics_by_the_rules_of_their_format(self):
        """https://prometheus.io/docs/instrumenting/exposition_formats/"""
        tally = ms.Tally()
        tally.received = 7
        self.web = ms.Web(self.program._replace(
            gauges={"connections": 1, "loop_delay_seconds": 1}, health={"database": "full"},
            tallies={"iceball": tally}))
        self.list(players=3, max_players=8, playing=2)
        for path in ("/nope", "/style.css", "/style.css"):
            etag = self.get(path)[1].get("ETag", "none")
        self.get("/style.css", "If-None-Match: " + etag)
        status, headers, body = self.get("/metrics")
        self.assertEqual(headers["Content-Type"], "text/plain; version=0.0.4; charset=utf-8")
        label = r'[a-z]+="[^"\\\n]*"'
        self.assertRegex(
            body.decode(), r"^(# HELP ([a-z_]+) .+\.\n# TYPE \2 (counter|gauge)\n"
                           r"(\2(\{%s(,%s)*\})? [0-9.]+\n)*)+$" % (label, label))
        lines = body.decode().splitlines()
        self.assertEqual(len(set(lines)), len(lines))
        for line in (
                'players{game="iceball"} 3', 'playing{game="iceball"} 2', "connections 1",
                'servers{game="iceball"} 1', 'received_total{protocol="iceball"} 7',
                'http_requests_total{route="/style.css",status="200"} 2',
                'http_requests_total{route="/style.css",status="304"} 1',
                'http_requests_total{route="other",status="404"} 1',
                'trouble{where="database"} 1', "generation %d" % self.registry.generation,
                'info{version="%s"} 1' % ms.__version__):
            self.assertIn("masterserver_" + line, lines)
        for name in vars(tally):
            self.assertIn("# TYPE masterserver_%s_total counter" % name, lines)

    def test_health(self):
        upstream = {"hyperbol up.example": ms.UpstreamState(1700000000, 20, 3, ""),
                    "quake3 up.example X 3": ms.UpstreamState(None, 0, 0, "timed out")}
        health = {}
        self.web = ms.Web(self.program._replace(health=health, upstream=upstream))
        self.list()
        for status in ("ok", "trouble"):
            self.assertEqual(json.loads(self.get("/healthz")[2]), {
                "status": status, "trouble": health, "servers": 1, "version": ms.__version__,
                "cluster": {}, "upstream": {
                    "hyperbol up.example": {
                        "fetched": 1700000000, "addresses": 20, "listed": 3, "trouble": ""},
                    "quake3 up.example X 3": {
                        "fetched": None, "addresses": 0, "listed": 0, "trouble": "timed out"}}})
            health["database"] = "the disk is full"
        self.assertEqual(re.findall("(?m)^masterserver_upstream_(.*)$",
                                    self.get("/metrics")[2].decode()), [
            'fetched_seconds{list="hyperbol up.example"} 1700000000',
            'addresses{list="hyperbol up.example"} 20',
            'addresses{list="quake3 up.example X 3"} 0',
            'listed{list="hyperbol up.example"} 3', 'listed{list="quake3 up.example X 3"} 0'])

    def test_what_another_list_named_is_left_out_of_the_lists_for_games_if_that_is_wanted(self):
        luanti = {"name": "Found", "clients": 0, "clients_max": 5, "game_time": 0, "pop_v": 0.0,
                  "proto_min": 37, "proto_max": 41}
        for game in "iceball", "luanti", "hyperbol":
            self.registry.list_or_refresh((game, "203.0.113.9", 1), "203.0.113.9", 0.0, 60.0, {
                "name": "Found", "found_at": "up.example", "room": game,
                "private": {"luanti_announcement": luanti} if game == "luanti" else {}})
        for now, shares in (1.0, "yes"), (2.0, "no"):
            reload(self.program, self.web, upstream__share=shares)
            for path in "/master.json", "/list", "/servers.xml":
                self.assertEqual(b"Found" in self.get(path, now=now)[2], shares == "yes", path)
            for path in "/servers.json", "/":
                self.assertGreaterEqual(self.get(path)[2].count(b"Found"), 3, path)


class CheckTest(WebCase):
    """Is my server listed?"""

    def titles(self, query="address=203.0.113.9", now=1.0):
        page = self.get("/check?" + query, now=now)[2].decode()
        return re.findall("<h3>(.*?)</h3>", page)

    def note(self, outcome, source="203.0.113.9", port=1, now=0.0, detail=""):
        self.registry.record_outcome(source, "iceball", port, outcome, now, detail)

    def test_listed_servers_and_former_ones(self):
        self.note("announced")
        self.assertEqual(self.titles(), ["Announced, but the answer did not come back"])
        self.list()
        self.note("listed")
        self.assertEqual(self.titles(), ["Listed"])
        self.registry.expire(122.0)
        self.assertEqual(self.titles(now=122.0), ["No longer listed"])
        self.note("stopped", now=123.0)
        self.assertEqual(self.titles(now=124.0), ["Signed off"])

    def test_how_a_listed_server_stands(self):
        asked = "Announced, but the answer did not come back"
        for game, address, title, found_at in (
                ("iceball", "203.0.113.9", "Listed", ""), ("aio", "2001:db8::9", "Listed", ""),
                ("hyperbol", "2001:db8::8", "Listed under an IPv6 address", ""),
                ("subspace", "2001:db8::7", "Listed under an IPv6 address", ""),
                ("mygame", "192.168.1.5", "Listed under a private address", ""),
                ("mygame", "203.0.113.8", "Listed, because another list names it", "up.example"),
                ("mygame", "127.0.0.1", "Listed under a private address", "")):
            server = self.list(1, address, game, found_at=found_at)
            self.registry.record_outcome(address, game, 1, "announced", 0.0)
            if found_at:
                self.assertIn(b"found it at up.example", self.get("/check?address=" + address)[2])
            for confirmed, titles in (True, [title]), (False, ["Not heard since a restart", asked]):
                server.confirmed = confirmed
                self.assertEqual(self.titles("address=" + address), titles, game)
        self.registry.update(server, {"responding": False})
        self.assertEqual(self.titles("address=127.0.0.1"), ["It does not answer now", asked])

    def test_what_failed_comes_first(self):
        """A row has the name of the server, if it is listed, and its port."""
        self.list(5, name="<b>Ours")
        self.list(6, name="Not heard").confirmed = False
        self.note("stopped", port=9, now=0.7)
        self.note("bad packet", port=5, now=0.5, detail="8 bytes")
        self.note("silent", port=7, now=0.6, detail="no answer")
        page = self.get("/check?address=203.0.113.9", now=1.0)[2].decode()
        rows = [re.sub("<[^>]*>|\n", " ", row).split() for row in page.split("<tr>")[2:]]
        for row, begin in itertools.zip_longest(rows, (
                "Not heard unconfirmed self-reported 203.0.113.9:6 Not heard since a restart",
                "203.0.113.9:7 It does not answer queries There was no answer.",
                "&lt;b&gt;Ours self-reported 203.0.113.9:5 A packet that cannot be read",
                "&lt;b&gt;Ours self-reported 203.0.113.9:5 Listed All is well: "
                "this master lists &lt;b&gt;Ours.",
                "203.0.113.9:9 Signed off")):
            self.assertTrue(" ".join(row).startswith(begin), (row, begin))

    def test_every_outcome_says_what_to_do(self):
        for outcome, detail, todo in (
                ("announced", "", "open UDP"),
                ("bad packet", "85 bytes", "wrong with it: 85 bytes. If the port is the one"),
                ("bad packet", "", "nothing more")):
            self.registry.outcomes = ms.Turns(ms.OUTCOMES_KEPT)
            self.note(outcome, detail=detail)
            self.assertIn(todo, self.get("/check?address=203.0.113.9")[2].decode(), outcome)
            self.assertEqual(self.titles(), [ms.OUTCOMES[outcome][0]])
        for title, advice in ms.OUTCOMES.values():
            self.assertTrue(title[0].isupper() and advice[0].isupper() and advice[-1] in ".?")

    def test_who_looks_is_told_what_comes_in_a_flood(self):
        self.titles(now=5.0)                    # another address looks, which is not its own
        for looks in 0, 1:
            now = 6.0 + looks
            for number in range(1000):
                self.registry.record_unproven(address_of(number), "iceball", 1, "announced", now)
            self.registry.record_unproven("203.0.113.9", "iceball", 1, "announced", now)
            page = self.exchange(http_request("/check"), "203.0.113.9", now)
            self.assertEqual(page.count(b"Announced, but"), looks)
            self.assertNotIn(b"looked at", page)

    def test_what_is_not_proven_stands_beside_what_is(self):
        self.note("silent", now=1.0)
        for port in range(ms.OUTCOMES_PER_SOURCE + 1):
            self.registry.record_unproven("203.0.113.9", "iceball", port, "announced", 2.0)
        title, _ = ms.OUTCOMES["silent"]
        self.assertEqual(self.titles(now=3.0).count(title), 1)
        self.assertEqual(len(self.titles(now=3.0)), 65)
        self.note("silent", "2001:db8::9", now=1.0)
        for port in range(200):
            self.registry.record_unproven("2001:db8::9", "iceball", port, "announced", 2.0)
        titles = self.titles("address=2001:db8::9", now=3.0)
        self.assertEqual((titles.count(title), len(titles)), (1, 100))

    def test_a_ban_is_told_as_it_is_now(self):
        self.note("banned", detail="an old reason")
        self.assertEqual(self.titles(), [])
        network = ms.read_network("203.0.113.0/24")
        self.registry.rules.bans = ms.Networks([network], {network: "fake players"})
        self.assertEqual(self.titles(), ["Banned"])
        self.assertIn(b"this address: fake players.", self.get("/check?address=203.0.113.9")[2])
        self.registry.rules.address_map = {"10.0.0.5": "203.0.113.9"}
        self.assertEqual(self.titles("address=10.0.0.5"), ["Banned"])

    def test_a_source_that_sends_too_much(self):
        for _ in range(500):
            self.registry.rules.datagram_limiter.allow("203.0.113.9", 0.0)
        self.assertEqual([self.titles(now=0.0), self.titles("address=203.0.113.8"), self.titles()],
                         [["Too many packets"], [], []])
        page = self.get("/check?address=203.0.113.9")[2]
        self.assertIn(b"More than 100 packets per second", page)

    def test_it_is_about_one_address_and_one_port(self):
        self.list(5, name="Ours")
        self.list(6, name="Ours as well")
        self.list(5, "203.0.113.10", name="Theirs")
        self.note("name", port=0)
        self.note("silent", port=7)
        self.note("silent", source="203.0.113.10")
        for query, names, titles in (
                ("address=203.0.113.9", ["Ours", "Ours as well"], 4),
                ("address=203.0.113.9&port=5", ["Ours"], 2),
                ("address=203.0.113.9:5", ["Ours"], 2),
                ("address=203.0.113.9&port=7", [], 2), ("address=203.0.113.9&port=8", [], 1)):
            page = self.get("/check?" + query, now=1.0)[2].decode()
            self.assertEqual(re.findall("<bdi>(.*?)</bdi>", page), names, query)
            self.assertEqual(len(self.titles(query)), titles, query)
        page = self.get("/check?address=203.0.113.9")[2].decode()
        self.assertEqual(("203.0.113.9:7" in page, "203.0.113.9:0" in page), (True, False))

    def test_a_neighbour_s_own_address_is_not_told(self):
        self.registry.rules.address_map = {"10.0.0.5": "203.0.113.9", "10.0.0.6": "203.0.113.9"}
        for port, source in enumerate(("10.0.0.5", "10.0.0.6"), 1):
            self.list(port, source=source)
            self.registry.record_outcome(source, "aio", port, "silent", 3.0)
        for address, told, titles in (("203.0.113.9", set(), 3), ("10.0.0.5", {"10.0.0.5"}, 2)):
            titles += address == "203.0.113.9"          # both of its servers are listed
            page = self.get("/check?address=" + address, now=4.0)[2].decode()
            self.assertEqual(set(re.findall(r"10\.0\.0\.\d", page)), told)
            self.assertEqual(len(self.titles("address=" + address)), titles)

    def test_the_latest_are_shown(self):
        for port in range(1, 301):
            self.note("announced", port=port, now=port / 100)
        page = self.get("/check?address=203.0.113.9", now=4.0)[2]
        self.assertEqual((page.count(b"<h3>"), page.count(b"203.0.113.9:300<"),
                          page.count(b"203.0.113.9:236<")), (ms.OUTCOMES_PER_SOURCE, 1, 0))
        self.assertEqual(len(self.titles("address=203.0.113.9&port=237")), 1)

    def test_an_address_as_the_list_has_it(self):
        for address, shown in (("203.0.113.9", "203.0.113.9"), ("2001:DB8::9", "2001:db8::9"),
                               ("::ffff:203.0.113.7", "203.0.113.7"),
                               ("2001:db8::203.0.113.7", "2001:db8::cb00:7107")):
            for asked, port in ((address, ""), (ms.endpoint_text(address, 27790), "27790")):
                page = self.get("/check?address=" + asked)[2].decode()
                self.assertIn('name="address" value="%s"' % shown, page, asked)
                self.assertIn('name="port" value="%s"' % port, page, asked)
        for asked in ("203.0.113.9:", "203.0.113.9:70000", "[2001:db8::9]:x", "example.org", '"<'):
            status, _, body = self.get("/check?address=" + asked)
            self.assertEqual((status, b"is not an IP address" in body), (400, True), asked)
        page = self.get("/check", address="203.0.113.4")[2]
        self.assertIn(b"Nothing has arrived from 203.0.113.4", page)

class AnnounceTest(WebCase):
    settings = {"games__mygame": "My Game", "games__other": "Other", "limits__requests": "1000000"}

    def setUp(self):
        super().setUp()
        self.hyperbol = self.program.rooms["hyperbol"]

    def post(self, body, *lines, address="203.0.113.9", now=0.0):
        if isinstance(body, dict):
            body, lines = json.dumps(body).encode(), ("Content-Type: application/json",)
        request = http_request("/announce", "Content-Length: %d" % len(body), *lines,
                               method="POST", body=body)
        status, headers, body, _ = split_response(self.exchange(request, address, now))
        self.assertEqual((headers["Content-Type"], headers["Cache-Control"]),
                         ("application/json; charset=utf-8", "no-store"))
        return status, json.loads(body)

    def answer_query(self, now):
        (query, peer), = self.program.poller.tick(now)
        self.program.poller.datagram(hyperbol_reply(o1=query[1:]), peer, now + 0.1)

    def test_an_own_game(self):
        form = (b"game=mygame&port=4000&name=My+server&players=3&max_players=8&mode=duel&map=m1"
                b"&version=2&description=Hi")
        self.assertEqual(self.post(form), (200, {"listed": True, "ttl": 120}))
        server, = self.registry.servers("mygame")
        told = "address port name players max_players mode map version description verified"
        self.assertEqual("|".join(str(getattr(server, name)) for name in told.split()),
                         "203.0.113.9|4000|My server|3|8|duel|m1|2|Hi|self-reported")
        again = {"game": "mygame", "port": 4000, "players": 4, "version": 3, "map": None}
        self.assertEqual(self.post(again, now=100.0)[0], 200)
        self.assertEqual((server.name, server.players, server.version, server.map),
                         ("My server", 4, "3", "m1"))
        for now, count in ((219.0, 1), (220.0, 0)):
            self.registry.expire(now)
            self.assertEqual(self.registry.total, count)
        self.assertEqual(self.registry.outcome("203.0.113.9", "mygame", 4000).outcome,
                         "listed")
        for name in ({}, {"name": ""}):
            self.post({"game": "mygame", "port": 4000, **name}, address="2001:db8::1")
            self.assertEqual(self.registry.servers()[0].name, "[2001:db8::1]:4000")

    # What follows game=mygame and port=4000, or all of a JSON object; and what is listed then
    FORMS = (
        (b"&name=K\xf6ln \x80", {"name": "Köln €"}),                    # from Windows
        (b"&name=K%F6ln", {"name": "Köln"}),
        ("&name=Köln €".encode(), {"name": "Köln €"}),
        (b"&name=K%C3%B6ln", {"name": "Köln"}),
        (b"&name=\x81", {"name": "\ufffd"}),
        (b"&port=+4000&name=P", {"name": "P"}),
        # The last one of a name counts; names may be encoded, values empty or missing
        (b"&players=3&players=4&name=N", {"players": 4, "name": "N"}),
        (b"&player%73=5&name=", {"players": 5, "name": "203.0.113.9:4000"}),
        (b"&players=6&name", {"players": 6, "name": "203.0.113.9:4000"}),
        (b"&players=7&name=a%26b=c&&", {"players": 7, "name": "a&b=c"}),
        (b"&players=8&name=" + b"%F0%9F%98%80" * 600, {"name": "\U0001f600" * 128}),
    )
    JSONS = (
        ({"port": "4000", "name": 5}, {"name": "5"}),
        ({"players": 4, "version": 3, "map": None}, {"players": 4, "version": "3", "map": ""}),
        ({"name": "n" * 999, "description": "d" * 999},
         {"name": "n" * 128, "description": "d" * 512}),
    )

    def announced(self, body, *lines):
        """The server that this announcement lists, anew."""
        self.registry.remove_own(self.registry.get("mygame", "203.0.113.9", 4000))
        self.assertEqual(self.post(body, *lines)[0], 200, body)
        server, = self.registry.servers("mygame")
        return server

    def test_forms_and_json(self):
        # Every text may be as long as what is kept of it
        longest = {"players": 9, "max_players": 9, "description": "\U0001f600" * 512}
        for name in ("name", "mode", "map", "version"):
            longest[name] = "\U0001f600" * 128
        form = b"&" + urllib.parse.urlencode(longest).encode()
        for rest, listed in (*self.FORMS, (form, longest)):
            for lines in (), ["Content-Type: application/x-www-form-urlencoded; x=y"]:
                server = self.announced(b"game=mygame&port=4000" + rest, *lines)
                self.assertEqual({name: getattr(server, name) for name in listed}, listed)
        for rest, listed in (*self.JSONS, (longest, longest)):
            body = json.dumps({"game": "mygame", "port": 4000, **rest}).encode()
            for line in "application/json; x=y", ms.FORM_TYPE:              # as curl -d sends it
                server = self.announced(body, "Content-Type: " + line)
                self.assertEqual({name: getattr(server, name) for name in listed}, listed)

    def test_numbers_as_lua_and_javascript_write_them(self):
        server = self.announced(
            b'{"game":"mygame","port":4000.0,"players":3.0,"max_players":1.6e1}')
        self.assertEqual(repr((server.port, server.players, server.max_players)), "(4000, 3, 16)")
        for port in (b"27500.5", b"1e300", b"1e999", b"NaN", b"true", b'"1e3"', b"0", b"65536",
                     b"-1", b"[1]", b"9" * 400):
            status, answer = self.post(b'{"game":"mygame","port":%s}' % port)
            self.assertEqual((status, "from 1 to 65535" in answer["reason"]), (400, True), port)

    def test_hyperbol_waits_for_its_answer(self):
        announced = {"game": "hyperbol", "port": 27888, "name": "claimed"}
        status, answer = self.post(announced)
        self.assertEqual((status, answer["listed"], answer["ttl"]), (200, False, 120))
        self.assertIn("waiting for its answer to a query on UDP port 27888", answer["reason"])
        self.assertEqual(self.registry.servers(), [])
        self.answer_query(1.0)
        self.assertEqual(self.post(announced)[1], {"listed": True, "ttl": 120})
        self.assertEqual(self.registry.servers("hyperbol")[0].name, "Fun & Games")

    def test_stop_only_from_the_same_address(self):
        self.registry.rules.address_map["192.168.1.5"] = "203.0.113.9"
        for game, source, stranger in (("mygame", "203.0.113.9", "203.0.113.8"),
                                       ("hyperbol", "203.0.113.9", "203.0.113.8"),
                                       ("mygame", "192.168.1.5", "203.0.113.9")):
            server = {"game": game, "port": 4000}
            stop = {**server, "action": "stop"}
            self.post(server, address=source)
            self.assertEqual(self.post(stop, address=stranger)[0], 404)
            self.assertEqual(self.registry.total + len(self.program.poller.targets), 1)
            self.assertEqual(self.post(stop, address=source),
                             (200, {"listed": False, "ttl": 120, "reason": "stopped"}))
            self.assertEqual((self.registry.total, self.program.poller.targets), (0, {}))
            self.assertEqual(self.registry.outcome(source, game, 4000).outcome, "stopped")
        self.list(4000, game="mygame").master = "b"
        self.assertEqual((self.post(stop)[0], self.registry.total), (404, 1))

    def test_stop_of_one_that_is_queried(self):
        """It leaves; one that the ini names is back with its next answer."""
        stop = {"game": "hyperbol", "port": 27888, "action": "stop"}
        for pinned in (False, True):
            self.post({"game": "hyperbol", "port": 27888})
            if pinned:
                self.hyperbol.named = {("203.0.113.9", 27888): 1}
                self.hyperbol.tick(0.0)
            self.answer_query(1.0 + 100 * pinned)
            self.assertEqual(self.registry.total, 1)
            self.assertEqual(self.post(stop, now=2.0)[0], 200)
            self.assertEqual((self.registry.total, len(self.program.poller.targets)), (0, pinned))
        self.answer_query(200.0)
        self.assertEqual(self.registry.total, 1)

    def test_long_bodies_cost_more(self):
        """By default a source has 50 requests at once, with bodies of 8 kB each."""
        for size, most in (300, 50), (ms.TOKEN_BYTES, 50), (ms.HTTP_BODY_BYTES, 6):
            for settings, most_here in ({}, most), ({"limits__requests": "1/1"}, 1):
                self.program = make_core(games__mygame="My Game", limits__exempt="", **settings)
                self.web = ms.Web(self.program)
                fields = {"game": "mygame", "port": 4000, "x": ""}
                fields["x"] = "y" * (size - len(json.dumps(fields)))
                answers = [self.post(fields)[0] for _ in range(60)]
                self.assertEqual(answers, [200] * most_here + [429] * (60 - most_here), size)

    def test_at_most_64_fields(self):
        for most, status in (64, 200), (65, 400):
            fields = {"game": "mygame", "port": 4000, "name": "N"}
            fields.update(("x%d" % number, "y") for number in range(most - 3))
            for body in (fields, urllib.parse.urlencode(fields).encode(),
                         b"&" * (most - 3) + b"game=mygame&port=4000&name=N"):
                found, answer = self.post(body)
                self.assertEqual((found, "at most 64 fields" in answer.get("reason", "")),
                                 (status, status == 400), body)

    def long_bodies(self):
        """Bodies of 64 KiB, each of which was dear once or could be; with their type."""
        most = ms.HTTP_BODY_BYTES
        start = b'{"game":"mygame","port":1,"%s":'

        def filled(begin, unit, end=b""):
            return begin + unit * ((most - len(begin) - len(end)) // len(unit)) + end

        for unit in b"a&", b"a=b&", b"&":
            yield filled(b"", unit), ms.FORM_TYPE
        for unit in (b"%41", b"%ff", b"+", b"\x1b[", "e\u0301\u0301\u0301\u0301".encode(),
                     "a\u200b".encode()):
            yield filled(b"game=mygame&port=1&description=", unit), ms.FORM_TYPE
            yield filled(b"json=", unit), ms.FORM_TYPE
            name = urllib.parse.unquote_to_bytes(unit).replace(b"\x1b", b"\\u001b")
            yield filled(start % b"name" + b'"', name, b'"}'), "application/json"
        for unit in b"[", b'{"a":', b"9", b"9.", b"1e9", b"-":
            yield filled(start % b"players", unit), "application/json"
        for item in (b"1", b"1.5", b"9" * 400, b'""', b"{}", b"[]", b'{"":0}',
                     b"[" * 400 + b"]" * 400, b"null", b"1e99"):
            for field in b"players", b"mods":
                begin = start % field + b"["
                yield filled(begin, item + b",", item + b"]}"), "application/json"
        yield filled(b"{", b'"":0,', b'"":1}'), "application/json"
        yield b"{%s}" % b",".join(b'"%d":0' % number for number in range(7000)), "application/json"
        luanti = json.loads(LUANTI_START)
        for field, value in (
                ("mods", ["m%d\u0301" % number for number in range(4000)]),
                ("mods", ["%d\u200b" % number + "\u0301" * 48 for number in range(500)]),
                ("clients_list", ["e\u0301\u0301\u0301\u0301"] * 4900),
                ("name", "\x1b[" * 8000), ("description", "e\u0301\u0301\u0301\u0301" * 6500),
                ("uptime", "9" * 60000), ("uptime", "9_" * 30000 + "9"), ("lag", "9" * 60000),
                ("uptime", "\u0669" * 30000), ("address", "a." * 30000), ("address", ":" * 60000),
                ("pvp", " " * 60000), ("x", [[]] * 15000)):
            text = json.dumps({**luanti, field: value}, ensure_ascii=False).encode()
            yield luanti_body(text), "multipart/form-data"
        yield filled(b"", b'name="json"\r\n\r\n'), "multipart/form-data"

    def long_requests(self):
        """Each body, with a session that is handed its request by feed()."""
        ms.Luanti(self.program)
        for body, kind in self.long_bodies():
            self.assertLessEqual(len(body), ms.HTTP_BODY_BYTES, body[:60])
            request = http_request("/announce", "Content-Type: " + kind,
                                   "Content-Length: %d" % len(body), method="POST", body=body)
            yield self.session("203.0.113.9"), request, (body[:60], kind)

    @unittest.skipUnless(sys.implementation.name == "cpython", "others compile while they run")
    @timing
    def test_no_body_takes_long(self):
        """Processor time of this thread, against that of what takes Python 2.5 ms where this was
        written; 32,767 fields took eight times as long."""
        gc.disable()                    # it would look through all that the tests have made
        self.addCleanup(gc.enable)
        yardsticks = []
        for _ in range(3):
            began = time.thread_time()
            urllib.parse.unquote_to_bytes(b"%41" * (ms.HTTP_BODY_BYTES // 3))
            yardsticks.append(time.thread_time() - began)
        for session, request, body in self.long_requests():
            began = time.thread_time()
            answer = feed(session, request)
            self.assertLess(time.thread_time() - began, 4 * min(yardsticks), body)
            self.assertIn(answer[9:12], (b"200", b"202", b"400", b"415", b"429"), body)

    def test_errors_in_words(self):
        allow = "the operator of this master can allow it with a line `%s` under [games]"
        for body, words in (
                (b"", "hyperbol, subspace, luanti, mygame, other, not ''"),
                (b"game=iceball&port=1", "not 'iceball'"), (b"game=luanti&port=1", "Luanti"),
                (b"game=teeworlds&port=1", allow % "teeworlds = Teeworlds"),
                (b"game=My+Game&port=1", "not 'My Game'"), (b"game=" + b"x" * 40, "not 'xxx"),
                (b"game=mygame", "port: expected a number from 1 to 65535"),
                (b"game=mygame&port=1e3", "port"), (b'{"game":7}', allow % "7 = 7"),
                (b'{"game":["mygame"]}', "game is not a text"),
                (b'{"game":"mygame","port":1,"players":-1}', "players: expected a number from 0"),
                (b'{"game":"mygame","port":1,"max_players":65536}', "max_players"),
                (b'{"game":"mygame","port":1,"name":["x"]}', "name is not a text"),
                (b'{"game":"mygame","port":1,"name":true}', "name is not a text"),
                (b'{"game":"mygame","port":1,"action":"jump"}', "action"),
                (b'["game"]', "object"), (b'{"game":', "JSON"),
                # int() would take the square of their length, where Python does not refuse them
                (b'{"game":"mygame","port":[-%s]}' % (b"9" * 4000), "JSON"),
                (b"\xff\xfe{}", "JSON"), (b"[" * 16000, "JSON")):
            with self.subTest(body=body[:60]):
                is_form = b"=" in body or not body
                status, answer = self.post(
                    body, *[] if is_form else ["Content-Type: application/json"])
                self.assertEqual((status, answer["listed"]), (400, False))
                self.assertIn(words, answer["reason"])
                self.assertEqual("operator" in words, "operator" in answer["reason"])
        self.assertEqual(self.registry.total, 0)
        for game, port in ("mygame", 1), ("mygame", 0), ("announce", 0):
            note = self.registry.outcome("203.0.113.9", game, port)
            self.assertEqual(note.outcome, "bad packet")

    def test_refused_with_the_right_status(self):
        network = ms.read_network("198.51.100.0/24")
        self.registry.rules.bans = ms.Networks([network], {network: "fake players"})
        self.registry.rules.refuse_names = (ms.read_pattern("casino"),)
        for game in ("mygame", "hyperbol"):
            answer = self.post({"game": game, "port": 1}, address="198.51.100.1")
            self.assertEqual(answer, (403, {"listed": False, "reason": "fake players"}))
        self.assertEqual(self.post({"game": "mygame", "port": 1, "name": "A Casino"})[0], 403)
        for port, status in [(port, 200) for port in range(1, 33)] + [(33, 429)]:
            self.assertEqual(self.post({"game": "mygame", "port": port})[0], status)

    def test_web_pages_announce_nothing(self):
        """Not even those that seem to be ours: a name of somebody else's may lead here."""
        form = b"game=mygame&port=4000"
        for line, status in (
                ("Sec-Fetch-Site: cross-site", 403), ("Sec-Fetch-Site: same-site", 403),
                ("Origin: http://other.example", 403), ("Origin: null", 403),
                ("Origin: http://x:1", 403), ("Origin: http://x", 403),
                ("Sec-Fetch-Site: none", 200), ("Sec-Fetch-Site: same-origin", 403)):
            self.registry.remove_own(self.registry.get("mygame", "203.0.113.9", 4000))
            found, answer = self.post(form, line)
            self.assertEqual((found, "page" in answer.get("reason", "")), (status, status == 403))
            self.assertEqual(len(self.registry.servers()), status == 200)


class LuantiTest(WebCase):
    settings = {"limits__requests": "1000000"}
    HERE = "203.0.113.9"
    FILED = 202, "Request has been filed.\n"

    def setUp(self):
        super().setUp()
        self.now = 0.0
        self.looked_up = {}             # the addresses of host names
        self.look_ups = []
        self.program.resolve = lambda host, done, source, like: self.look_ups.append((host, done))
        self.luanti = self.program.rooms["luanti"] = ms.Luanti(self.program)
        self.later = itertools.count(10000)         # the list is rendered once a second

    def send(self, request, source=HERE, size=1 << 30):
        """Status and words."""
        status, headers, body, _ = split_response(
            feed(self.session(source, self.now), request, size, self.now))
        self.assertEqual((headers["Content-Type"], body[-1:]), (ms.TEXT_TYPE, b"\n"))
        return status, body.decode()

    def say(self, text=LUANTI_START, source=HERE, without="", **fields):
        announcement = {**json.loads(text), **fields}
        announcement.pop(without, None)
        answer = self.send(luanti_request(json.dumps(announcement).encode()), source)
        while self.look_ups:
            host, done = self.look_ups.pop()
            done(self.looked_up.get(host, ""), self.now)
        return answer

    def poll(self, seconds=1, answers=True):
        """Let time pass. Return who was asked."""
        asked = []
        for _ in range(seconds):
            self.now += 1.0
            self.registry.expire(self.now)
            for data, peer in self.program.poller.tick(self.now):
                self.assertEqual(data, LUANTI_PROBE)
                asked.append(peer)
                if answers:
                    self.assertEqual(
                        self.program.poller.datagram(LUANTI_PROBED, peer, self.now + 0.25),
                        [(hexa("4f457403 0002 0000 03"), peer)])
        return asked

    def found(self):
        self.web.forget_responses()
        answer = self.get("/list?proto_version_min=37", now=float(next(self.later)))
        return json.loads(answer[2].decode("utf-8"))

    def names(self):
        return [entry["name"] for entry in self.found()["list"]]

    def outcome(self, port=36302):
        return self.registry.outcome(self.HERE, "luanti", port)[1:]

    def test_the_captured_exchange(self):
        """Whole and in pieces."""
        for size in (1, 2, 7, 100, 1 << 30):
            self.setUp()
            self.assertEqual(self.send(luanti_request(LUANTI_START), size=size), self.FILED)
            self.assertEqual((self.found()["list"], self.outcome()[0]), ([], "announced"))
            self.assertEqual(self.poll(), [(self.HERE, 36302)])
            expected = json.loads(LUANTI_START)
            del expected["action"], expected["url"]
            expected.update(address=self.HERE, ping=0.25, clients_top=0, pop_v=0.0, updates=1)
            self.assertEqual(self.found()["list"], [expected])
            self.assertEqual(self.send(luanti_request(LUANTI_UPDATE), size=size), self.FILED)
            expected.update(json.loads(LUANTI_UPDATE), clients=2, clients_list=["ann", "bob"],
                            address=self.HERE, clients_top=2, pop_v=1.0, updates=2)
            del expected["action"]
            self.assertEqual((self.found()["list"], self.outcome()[0]), ([expected], "listed"))
            for _ in range(2):
                self.assertEqual(self.send(luanti_request(LUANTI_DELETE), size=size),
                                 (200, "Removed from the list.\n"))
                self.assertEqual((self.registry.total, self.program.poller.targets), (0, {}))
        self.assertEqual(self.get("/geoip")[2], b'{"continent":null}')

    def test_long_lists_of_names_are_cut(self):
        """What one server carries is short, wherever it goes; all of its players count."""
        for letter, name_bytes in ("x", 35), ("\\", 3 + 2 * 29 + 3), (chr(0x1F600), 3 + 4 * 29 + 3):
            self.setUp()
            names = ["%03d%s" % (number, letter * 29) for number in range(500)]
            more = [name + "x" * 20 for name in names] + ["n%d" % each for each in range(400)]
            fields = {**json.loads(LUANTI_START), "clients_list": more, "mods": more, "clients": 0}
            self.luanti.announced(self.HERE, 36302, {**fields, "clients_max": 600}, 0.0)
            self.poll()
            entry, = self.found()["list"]
            self.assertEqual(entry["clients"], 500)
            for key, most in ("clients_list", 4096), ("mods", 8192):
                self.assertEqual(entry[key], names[:most // name_bytes])
            server, = self.registry.servers()
            record = ms.to_json((*ms.listed_row(server, 0.0), True))
            self.assertLess(len(ms.to_json(entry)), 14_000)
            self.assertLess(len(record), 30_000)
        page = self.get("/server?game=luanti&address=%s&port=36302" % self.HERE)[2].decode()
        self.assertIn("Players now <small>the first", page)

    def test_forms_and_texts(self):
        """As newer servers send it, and as old ones did; an update is a start."""
        texts = {name: str(value) if isinstance(value, int) else value
                 for name, value in json.loads(LUANTI_UPDATE).items()}
        texts["clients_top"] = 99                       # the master's to say
        form = urllib.parse.urlencode({"json": json.dumps(texts)}).encode()
        for kind in "application/x-www-form-urlencoded", "":
            self.assertEqual(self.send(http_request(
                "/announce", "Content-Type: " + kind, "Content-Length: %d" % len(form),
                method="POST", body=form))[0], 202)
        self.poll()
        entry, = self.found()["list"]
        self.assertEqual([entry[name] for name in (
            "creative", "pvp", "clients_max", "uptime", "clients_top")], [False, True, 15, 300, 2])

    def test_refusals_in_words(self):
        number, name_or_ip = "expected a number", "address: expected a name with a dot in it"
        right = json.loads(LUANTI_START)
        rows = [(words, {**right, name: value}) for words, name, values in (
            ("action: expected start, update or delete", "action", ("stop", ["start"])),
            ("port: expected", "port", (0,)), ("clients: " + number, "clients", (-1,)),
            ("uptime: " + number, "uptime", ("soon",)),
            ("game_time: " + number, "game_time", ([[]],)),
            ("clients_max: " + number, "clients_max", (1e300, True)),
            ("lag: " + number, "lag", (math.nan,)),
            ("pvp: expected true or false", "pvp", ("perhaps",)),
            ("mods: expected a list of texts", "mods", (5, [5])),
            ("description: expected a text", "description", ({},)),
            ("proto_min is above proto_max", "proto_min", (42,)),
            (name_or_ip, "address", (
                "localhost", "example.org:30000", "192.0.2.1:30000", "a b.org", "fe80::1%eth0",
                "1:2:3", "::g", ".", ".example", "b\u00fccher.example", "x" * 300 + ".example",
                ":" * 300, [5]))) for value in values]
        for name in ("port", "clients", "clients_max", "uptime", "game_time", "version",
                     "proto_min", "proto_max", "gameid", "name", "description"):
            rows.append((name + ": expected", {**right, name: None}))
            rows.append((name + ": expected", {key: right[key] for key in right if key != name}))
        for words, announcement in rows:
            status, answer = self.send(luanti_request(json.dumps(announcement).encode()))
            self.assertEqual((status, words in answer), (400, True), (announcement, answer))
        for text in (b"[]", b"5", b"{", b'{"action":"start",\xff}', b"[" * 60000):
            self.assertIn(self.send(luanti_request(text))[0], (400, 415), text[:9])
        form = http_request("/announce", "Content-Length: 23", method="POST",
                            body=b"game=luanti&port=30000&")
        self.assertIn(b"announce themselves", self.exchange(form, self.HERE))
        entry = {"private": {**json.loads(LUANTI_STORED), "clients": -1}}       # of another list
        self.assertRaisesRegex(ms.Refused, "clients: " + number, self.luanti.found, entry)
        self.assertEqual((self.registry.total, self.program.poller.targets), (0, {}))
        for address in "", "a.example", "a.example.", "..", "192.0.2.1", "2001:db8::1", "::":
            self.assertEqual(ms.read_luanti_address(address), address)

    def test_how_long_it_stays(self):
        """Answers to polls alone do not keep it, nor announcements without them."""
        for now, answers, stays in ((300, True, 630), (0, True, 330), (0, False, 100)):
            self.setUp()
            self.say()
            self.poll()
            if now:
                self.poll(now)
                self.say(LUANTI_UPDATE)
            while self.registry.total and self.now < 700:
                self.poll(1, answers)
            self.assertTrue(stays - 40 <= self.now <= stays + 2, (self.now, stays))

    def test_a_probe_that_fails_is_told_at_the_next_announcement(self):
        self.say()
        self.poll(8, answers=False)
        self.assertIn("Open that UDP port", self.get("/check?address=" + self.HERE)[2].decode())
        status, answer = self.say(LUANTI_UPDATE)
        self.assertEqual(status, 409)
        self.assertRegex(answer, "has been filed.*no answer from UDP port 36302.*/check")
        self.poll(40)
        self.assertEqual(self.names(), ["Test"])
        for uptime, status in ((400, 202), (-1, 400), (500, 202)):
            self.assertEqual(self.say(LUANTI_UPDATE, uptime=uptime)[0], status)

    def test_other_answers_to_a_probe(self):
        """The numbers in between may differ; the goodbye repeats the last one."""
        answer = hexa("4f457403 0001 09 0a0b0c 0d 01 beef")
        self.assertEqual(self.luanti.read_answer(mock.Mock(why=ms.ANNOUNCED), answer), {})
        self.assertEqual(self.luanti.goodbye(answer), hexa("4f457403 beef 0000 03"))

    def test_the_address_for_players(self):
        self.looked_up = {"here.example": self.HERE, "six.example": "2001:db8::1",
                          "far.example": "198.51.100.1", "mapped.example": "203.0.113.7"}
        self.program.registry.rules.address_map["192.168.1.5"] = "203.0.113.7"
        for source, address, why in (
                (self.HERE, "here.example", ""),
                (self.HERE, "six.example", ""),         # no IPv4 to compare
                ("2001:db8::2", "here.example", ""),
                (self.HERE, "far.example", "far.example leads to 198.51.100.1, not to 203."),
                ("2001:db8::2", "six.example", "leads to 2001:db8::1, not to 2001:db8::2"),
                (self.HERE, "none.example", "none.example leads to no address, not to 203."),
                ("192.168.1.5", "mapped.example", ""),
                ("192.168.1.6", "far.example", "")):    # as a local one may say
            self.assertEqual(self.say(source=source, address=address)[0], 202)
            self.poll()
            shown = [] if why else [address]
            self.assertEqual([entry["address"] for entry in self.found()["list"]], shown)
            status, answer = self.say(LUANTI_UPDATE, source)
            self.assertEqual((status, why in answer), (409 if why else 202, True), answer)
            self.say(LUANTI_DELETE, source)

    def test_a_new_address_for_players(self):
        """It is proven before it is shown, and is known then."""
        self.say()
        self.poll()
        for name, leads, shown in (
                ("A", "", self.HERE), ("B", self.HERE, "a.example"), ("C", "", "a.example")):
            self.looked_up["a.example"] = leads
            self.say(LUANTI_UPDATE, address="a.example", name=name)
            if name != "C":
                self.poll(40)
            self.assertEqual(self.found()["list"][0]["address"], shown)
        self.assertEqual(self.names(), ["C"])

    def test_refused_announcements(self):
        rules = self.registry.rules
        rules.max_servers_per_source, rules.refuse_names = 1, (ms.read_pattern("casino"),)
        self.assertEqual(self.say(name="Casino")[0], 403)
        self.say()
        self.poll()
        self.assertEqual(self.say(port=1)[0], 429)
        for _ in range(2):                      # nobody else can remove it
            self.say(LUANTI_DELETE, source="203.0.113.8")
            rules.address_map["203.0.113.8"] = self.HERE
        self.assertEqual(self.registry.total, 1)

    def test_switched_on_with_a_port_for_http(self):
        for settings, is_on in (({"luanti.enabled": "no"}, False), ({"http.ports": ""}, False),
                                ({"http.ports": "", "http.https_ports": "1"}, True), ({}, True)):
            self.assertEqual(self.luanti.is_on(ms.Settings(settings)), is_on)

    def test_the_latest_word_counts(self):
        """Of announcements that wait for an answer, also if a poll is open meanwhile and the next
        one is missed."""
        self.say()
        self.poll()
        self.say(name="two")
        self.assertEqual(self.poll(answers=False), [(self.HERE, 36302)])
        self.say(LUANTI_UPDATE, name="three")
        self.poll(8)
        self.assertEqual(self.names(), ["three"])
        target, = self.program.poller.targets.values()
        target.due = self.now
        (_, peer), = self.program.poller.tick(self.now)
        self.say(name="Restarted")
        # It is not known whether this is the answer of the old one or the new one
        self.assertRaises(ms.Malformed, self.program.poller.datagram, LUANTI_PROBED, peer, self.now)
        self.poll(8, answers=False)
        self.assertEqual((target.missed, self.names()), (1, ["three"]))
        self.poll(31)
        self.assertEqual((self.names(), target.announcement), (["Restarted"], None))

    def test_the_latest_look_up_counts(self):
        for later in {"name": "Later"}, {"name": "Later", "address": "fast.example"}:
            self.setUp()
            look_ups = []
            self.program.resolve = lambda host, done, source, like: look_ups.append((source, done))
            self.say(name="Sooner", address="slow.example")
            self.say(**later)
            for source, done in reversed(look_ups):
                self.assertEqual(source, self.HERE)
                done(self.HERE, 1.0)
            self.poll()
            self.assertEqual((self.names(), self.luanti.being_looked_up), (["Later"], {}))

    def test_too_many_names_are_being_looked_up(self):
        """Two of a source, and so many in all. Nobody is told then that his name leads nowhere."""
        names = ms.HostNames(lambda *posted: None)
        jobs = []
        names.worker.put = lambda job, done: jobs.append(done)
        self.program.resolve = names.resolve
        for port, status in (1, 202), (2, 202), (3, 429):
            answered, words = self.say(port=port, address="slow%d.example" % port)
            self.assertEqual((answered, "try again" in words), (status, status == 429))
        for number in range(ms.LOOKUPS):
            self.say(source="192.0.2.%d" % number, address="slow.example")
        for _ in range(2):                              # never 409: nothing is wrong with it
            status, words = self.say(source="198.51.100.1", address="honest.example")
            self.assertEqual((status, "try again" in words, "no address" in words),
                             (429, True, False))
        self.assertIn("Try again", self.get("/check?address=198.51.100.1")[2].decode())
        while jobs:
            jobs.pop()("", 1.0)
        self.assertEqual(self.luanti.being_looked_up, {})
        self.assertEqual(self.say(source="198.51.100.1", address="honest.example")[0], 202)

    def test_the_order_and_the_totals(self):
        """By the operator's priority, then the score: 12 players, 9 of them counted, and so on."""
        self.program.registry.rules.priority[self.HERE, 1] = 1
        month = 31 * 86400
        for port, fields in enumerate((
                {"name": "first", "clients": 0},
                {"name": "9 + 4", "clients": 12, "clients_max": 12},
                {"name": "10 + 4", "clients": 10},
                {"name": "8", "clients": 0, "game_time": 9 * month},
                {"name": "7.2", "clients": 8, "proto_min": 32},
                {"name": "6 + 3 - 8", "clients": 6, "clients_max": 201},
                {"name": "0", "clients": 0}), 1):
            players = ["p%d" % number for number in range(fields["clients"])]
            self.say(port=port, **{"clients_list": players, "game_time": 0, **fields})
        self.poll()
        self.assertEqual(self.names(), "first|10 + 4|9 + 4|8|7.2|6 + 3 - 8|0".split("|"))
        self.assertEqual(self.found()["total"], {"clients": 36, "servers": 7})
        slow = self.registry.get("luanti", self.HERE, 2)
        self.registry.update(slow, {"ping_ms": 1200})                   # -6.4
        self.assertEqual(self.names()[:5], ["first", "10 + 4", "8", "7.2", "9 + 4"])
        self.registry.remove_own(slow)
        self.assertEqual(self.found()["total_max"], {"clients": 24, "servers": 6})


MINETEST = shutil.which("minetestserver", path=os.environ.get("PATH", "") + ":/usr/games")


@unittest.skipUnless(MINETEST, "no minetestserver here")
class LuantiOnTheWire(unittest.TestCase):
    def test_a_real_server(self):
        """Listed, kept by a restart of the master, gone when stopped, gone when killed."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        config, database = (os.path.join(folder.name, name) for name in ("minetest.conf", "db"))
        hurry = mock.patch.object(ms, "TICK_S", 0.1)
        hurry.start()
        self.addCleanup(hurry.stop)

        def start_master():
            server = master(http__ports=str(port), server__database=database)
            server.bind()
            server.poller.interval = 0.5        # before the first poll
            server.start()
            self.addCleanup(server.stop)
            return server

        def start_game():
            game = subprocess.Popen(
                [MINETEST, "--world", os.path.join(folder.name, "world"), "--gameid", "minetest",
                 "--config", config, "--port", str(free_port()), "--quiet"],
                env={**os.environ, "HOME": folder.name}, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL)
            self.addCleanup(game.wait)
            self.addCleanup(game.kill)
            return game

        def listed(server, count):
            return eventually(lambda: server.registry.total == count, 2 * SOON_S)

        port = free_port()                  # the second master has that of the first one
        server = start_master()
        with open(config, "w") as file:
            file.write(block_of(server, "luanti")
                       + "\nbind_address = 127.0.0.1\nserver_name = A real one\n")
        game = start_game()
        listed(server, 1)
        server.stop()
        server = start_master()
        self.assertEqual(server.registry.total, 1)
        eventually(lambda: [found for found in server.registry.servers() if found.confirmed])
        entry, = json.loads(fetch(port, "/list")[2])["list"]
        self.assertEqual((entry["name"], entry["mapgen"], entry["address"]),
                         ("A real one", "v7", "127.0.0.1"))
        game.send_signal(signal.SIGINT)
        listed(server, 0)
        note = server.registry.outcome("127.0.0.1", "luanti", entry["port"])
        self.assertEqual(note.outcome, "stopped")
        game = start_game()
        listed(server, 1)
        game.kill()
        with mock.patch.object(ms.Luanti, "timeout_s", 0.2):    # now that it does not answer
            listed(server, 0)


class DdnetTest(WebCase):
    settings = {"limits__requests": "1000000", "limits__exempt": ""}
    HERE = "203.0.113.9"
    HERE_6 = "2001:db8::9"
    URLS = ["tw-0.6+udp://203.0.113.9:8399", "tw-0.7+udp://203.0.113.9:8399",
            "tw-0.6+udp://[2001:db8::9]:8399", "tw-0.7+udp://[2001:db8::9]:8399"]

    def setUp(self):
        super().setUp()
        self.start()

    def start(self, **settings):
        self.program = make_core(**self.settings, **settings)
        self.registry = self.program.registry
        self.sent = []
        self.program.send = lambda data, peer: self.sent.append((data, peer))
        self.ddnet = self.program.rooms["ddnet"] = ms.Ddnet(self.program)
        self.web = ms.Web(self.program)

    def send(self, request, source=HERE, now=0.0, size=1 << 30):
        """The status of the response, and what its JSON tells."""
        status, headers, body, rest = split_response(
            feed(self.session(source, now), request, size, now))
        self.assertEqual((headers["Content-Type"], rest), (ms.JSON_TYPE, b""))
        answer = json.loads(body.decode())
        return status, answer.pop("message", answer["status"])

    def token(self):
        """The token of the last challenge."""
        return self.sent[-1][0].split(b"\0")[-2].decode()

    def register(self, fields=DDNET_0_6, body=DDNET_INFO, source=HERE, now=0.0):
        """Register with a token that is asked for first; the answer, and the header fields."""
        self.assertEqual(self.send(ddnet_request(fields, body), source, now),
                         (200, "need_challenge"))
        fields += "Challenge-Token: %s\r\n" % self.token()
        return self.send(ddnet_request(fields, body), source, now), fields

    def all_four(self, now=0.0):
        """Register by 0.6 and 0.7, IPv4 and IPv6; the header fields and source of each."""
        places = []
        for source, fields in itertools.product((self.HERE, self.HERE_6), (DDNET_0_6, DDNET_0_7)):
            answer, with_token = self.register(fields, source=source, now=now)
            self.assertEqual(answer, (200, "success"))
            places.append((with_token, source))
        return places

    def assert_told(self, request, status, words, source=HERE, now=0.0):
        told_status, message = self.send(request, source, now)
        self.assertEqual((told_status, words in message), (status, True), message)

    @staticmethod
    def other(port, fields=DDNET_0_6):
        """The header fields of another server, on this port."""
        return fields.replace("8399", str(port)).replace("2ffa", str(port))

    def entries(self, now=0.0):
        self.web.forget_responses()
        self.ddnet.rendered_lists["servers.json"].due = 0.0
        return json.loads(self.get(ms.DDNET_SERVERS, now=now)[2].decode())["servers"]

    def addresses(self, now=0.0):
        return [entry["addresses"] for entry in self.entries(now)]

    def outcome(self):
        return self.registry.outcome(self.HERE, "ddnet", 8399)[1:]

    def tick(self, now):
        self.registry.expire(now)
        self.ddnet.tick(now)
        for event, server in changes_of(self.registry):
            if event == "gone":
                self.ddnet.gone(server)

    def test_the_captured_exchange(self):
        """Whole and in pieces, by 0.6 and 0.7: one server with two addresses."""
        for size in (1, 7, 1 << 30):
            self.start()
            tokens = []
            for fields, challenge in ((DDNET_0_6, DDNET_CHALLENGE_0_6),
                                      (DDNET_0_7, DDNET_CHALLENGE_0_7)):
                request = ddnet_request(fields, DDNET_INFO)
                self.assertEqual(self.send(request, size=size), (200, "need_challenge"))
                data, peer = self.sent.pop()
                self.assertEqual((data[:len(challenge)], data[-1:], peer),
                                 (challenge, b"\0", (self.HERE, 8399)))
                self.assertTrue(70 <= len(data) <= 80 and len(data) < len(request) / 4)
                tokens.append("Challenge-Token: %s\r\n" % data[len(challenge):-1].decode())
            self.assertEqual((self.entries(), self.outcome()[0]), ([], "challenged"))
            for now, body in ((0.0, DDNET_INFO), (15.0, b""), (30.0, b"")):
                for fields, token in zip((DDNET_0_6, DDNET_0_7), tokens):
                    self.assertEqual(self.send(ddnet_request(fields + token, body), now=now,
                                               size=size), (200, "success"))
            self.assertEqual(self.entries(), [
                {"addresses": self.URLS[:2], "info": json.loads(DDNET_INFO)}])
            server, = self.registry.servers()
            self.assertEqual((server.last_seen, self.outcome()), (30.0, ("listed", "")))
            for fields, left in ((DDNET_DELETE_0_6, [[self.URLS[1]]]), (DDNET_DELETE_0_7, []),
                                 (DDNET_DELETE_0_7, [])):
                self.assertEqual(self.send(ddnet_request(fields), now=31.0, size=size),
                                 (200, "success"))
                self.assertEqual(self.addresses(), left)
            self.tick(31.0)
            self.assertEqual((self.outcome()[0], self.ddnet.by_secret), ("stopped", {}))

    def test_the_list_by_head_and_how_old_it_is(self):
        self.register()
        self.web.epoch = 86400.0            # the wall clock; the header Date is the present time
        for method, is_empty in (("HEAD", True), ("GET", False)):
            data = self.exchange(http_request(ms.DDNET_SERVERS, method=method), now=1.0)
            head, _, body = data.partition(b"\r\n\r\n")
            for line in (b"HTTP/1.1 200 OK", b"Last-Modified: Fri, 02 Jan 1970 00:00:01 GMT",
                         b"Date: Fri, 02 Jan 1970 00:00:01 GMT", b"Access-Control-Allow-Origin: *"):
                self.assertIn(line, head.split(b"\r\n"))
            self.assertEqual((b"Age:" in head, not body), (False, is_empty))

    def test_four_addresses_are_one_server(self):
        """Its players are counted once. It stands where IPv4 leads, whichever comes first, and
        takes the room of one."""
        body = ddnet_info(clients=[ddnet_client(), ddnet_client(is_player=False)])
        for order in itertools.permutations(itertools.product(
                (DDNET_0_6, DDNET_0_7), (self.HERE, self.HERE_6))):
            self.start(limits__servers="1")
            for fields, source in order:
                self.assertEqual(self.register(fields, body, source)[0], (200, "success"))
            server, = self.registry.servers()
            self.assertEqual((self.addresses(), server.address), ([self.URLS], self.HERE))
            self.assertEqual((self.registry.census(1.0)["ddnet"].players,
                              dict(self.registry.own.counts)), (1, {self.HERE: 1}))
        self.assertEqual(self.ddnet.facts(server), [
            ("Protocols", "0.6 and 0.7"), ("Also at", "[2001:db8::9]:8399")])
        for place in self.HERE, self.HERE_6, self.HERE_6 + "&port=8399":
            page = self.get("/check?address=" + place)[2].decode()
            self.assertIn("Listed now: 1 server", page)
            self.assertEqual(re.findall("<h3>(.*?)</h3>", page), ["Listed"])

    def test_addresses_leave_one_by_one(self):
        """Each after 30 s or when it is deleted, the server with its last one; it moves to what it
        has left."""
        for heard in itertools.product((False, True), repeat=4):
            self.start()
            left = []
            for is_heard, url, (fields, source) in zip(heard, self.URLS, self.all_four()):
                if is_heard:
                    left.append(url)
                    self.send(ddnet_request(fields), source, 20.0)
            for now, addresses in (29.9, self.URLS), (30.0, left), (49.9, left), (50.0, []):
                self.tick(now)
                self.assertEqual(self.addresses(now), [addresses] if addresses else [])
        self.start()
        self.all_four()
        for fields in DDNET_DELETE_0_6, DDNET_DELETE_0_7:
            self.assertEqual(self.send(ddnet_request(fields)), (200, "success"))
        server, = self.registry.servers()
        self.assertEqual((server.address, self.addresses()), (self.HERE_6, [self.URLS[2:]]))

    def test_what_has_not_changed_is_not_read(self):
        """Each address of a server brings the same info; it is read once, until another comes."""
        with mock.patch.object(ms, "read_ddnet_info", wraps=ms.read_ddnet_info) as read:
            places = self.all_four()
            self.assertEqual(read.call_count, 1)
            for number, body in enumerate((ddnet_info(name="B"), DDNET_INFO, ddnet_info(name="B"))):
                for fields, source in places:
                    self.assertEqual(self.send(ddnet_request(fields, body), source, 15.0),
                                     (200, "success"))
                self.assertEqual(read.call_count, 2 + number)
                entry, = self.entries(15.0 + number)
                self.assertEqual(entry["info"], json.loads(body))
            server, = self.registry.servers()
            # Another master has heard the server with another info since
            registration = {**self.ddnet.registration(server), "info": DDNET_INFO.decode()}
            self.registry.update(
                server, {"private": {**server.private, "ddnet_registration": registration}})
            self.send(ddnet_request(places[0][0], body), now=20.0)
            self.assertEqual((read.call_count, server.name), (5, "B"))

    def test_new_infos_are_read_within_a_limit(self):
        """By the bytes of one source. A listed server stays, with its last info that was read."""
        answer, fields = self.register()
        with mock.patch.object(ms, "read_ddnet_info", wraps=ms.read_ddnet_info) as read:
            answers = collections.Counter()
            for number in range(500):           # in 10 s
                now = number / 50
                body = ddnet_info(name="N%d" % number, x="y" * 31_000)
                self.registry.rules.message_limiter.table.clear()       # that of requests
                status, message = self.send(ddnet_request(fields, body), now=now)
                answers[status] += 1
                self.tick(now)
        a_second, at_once = ms.DDNET_READ_BYTES
        self.assertAlmostEqual(read.call_count, (at_once + 10 * a_second) / len(body), delta=2)
        self.assertEqual(answers, {200: read.call_count, 429: 500 - read.call_count})
        self.assertIn("too many bytes", message)
        server, = self.registry.servers()
        (last, ), _ = read.call_args
        self.assertEqual((server.last_seen, server.name), (now, json.loads(last)["name"]))
        answer, _ = self.register(self.other(8400), ddnet_info(x="y" * 9), "203.0.113.10", now)
        self.assertEqual(answer, (200, "success"))      # others do not pay for it
        with mock.patch.dict(self.settings, limits__exempt=self.HERE):
            self.start()
        for number in range(40):
            answer, _ = self.register(body=ddnet_info(x=number, y="z" * 31_000))
            self.assertEqual(answer, (200, "success"))

    def test_no_record_is_too_long_for_another_master(self):
        """Each quote and backslash of an info takes another byte in it. A reply has a thousand."""
        sizes = []
        for unit in ("y", "\\", '"', "\1", "\x7f", "\xe9", "\U0001f600", ["\\"], {"\\": "\\"},
                     [[]], 1e15):
            self.start()
            units = unit if isinstance(unit, str) else [unit]
            body = b""
            for count in range(0, 1 << 15, 256):         # the longest body of this kind
                longer = ddnet_info(name="\U0001f600" * 128, x=units * count)
                with contextlib.suppress(ms.Malformed):
                    if len(longer) <= ms.DDNET_INFO_BYTES and ms.read_ddnet_info(longer):
                        body = longer
                        continue
                break
            for fields, source in itertools.product(
                    (DDNET_0_6, DDNET_0_7), (self.HERE, "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff")):
                self.assertEqual(self.register(fields, body, source)[0], (200, "success"))
            server, = self.registry.servers()
            record = ms.to_json((*ms.listed_row(server, 0.0), True))
            self.assertLessEqual(len(record), ms.RECORD_BYTES)
            sizes.append(len(record))
            row = ms.read_row(json.loads(record)[:len(ms.ListedRow._fields)])
            self.assertIsNotNone(ms.restored_server(row, 0.0, 0.0))
        self.assertGreater(max(sizes), 0.9 * ms.RECORD_BYTES)
        batch = ms.CLUSTER_BATCH * (ms.RECORD_BYTES + len("$64000\r\n") + ms.REPLY_PART_BYTES)
        self.assertLess(batch, ms.REPLY_BYTES)
        for unit in "\\", '"':
            body = ddnet_info(x=unit * 16_000)
            self.assertLess(len(body), ms.DDNET_INFO_BYTES)
            (status, message), _ = self.register(self.other(8400), body)
            self.assertEqual((status, "quotes and backslashes" in message), (400, True))

    def test_when_the_info_is_needed(self):
        self.assertEqual(self.register(body=b"")[0], (200, "need_info"))
        answer, fields = self.register()
        for serial, name, expected in (
                (0, "", "success"), (1, "", "need_info"), (1, "B", "success"), (1, "", "success"),
                (0, "", "success"), (3, "", "need_info"), (3, "C", "success"), (3, "", "success")):
            body = ddnet_info(name=name) if name else b""
            request = ddnet_request(fields.replace("Serial: 0", "Serial: %d" % serial), body)
            self.assertEqual(self.send(request), (200, expected))
        self.assertEqual([server.name for server in self.registry.servers()], ["C"])

    def test_header_fields_in_words(self):
        address = "tw-0.6+udp://connecting-address.invalid"
        for name, values, words in (
                ("Address", ("", "tw-0.6+udp://203.0.113.9:8399", "tw-0.6+udp://localhost:8399",
                             "tw-0.5" + address[6:] + ":8399", address, "8399",
                             address + ":8399/", address + ":x"), "expected tw-0.6+udp://"),
                ("Address", (address + ":0", address + ":65536"), "is not a port"),
                ("Secret", ("", "x" * 129, "a b", "\xfc"), "expected 1 to 128"),
                ("Challenge-Secret", ("", "x" * 129, "a b"), "expected 1 to 128"),
                ("Info-Serial", ("", "-1", "1.5", "x", "9" * 19), "expected a whole number"),
                ("Connless-Token", ("", "a37195f", "a37195fe0", "a37195fg"), "expected eight"),
                ("Action", ("insert", "Delete"), "expected delete")):
            without = re.sub("(?m)^%s: .*\r\n" % name, "", DDNET_0_7)
            for value in values:
                fields = without + ("%s: %s\r\n" % (name, value) if value else "")
                self.assert_told(ddnet_request(fields, DDNET_INFO), 400, words)
        self.assert_told(ddnet_request(DDNET_0_6 + DDNET_0_6, DDNET_INFO), 400, "")
        self.assertEqual((self.sent, self.registry.total, self.outcome()[0]),
                         ([], 0, "bad packet"))

    def test_an_info_that_clients_would_not_show(self):
        """It is refused by the name of its field, and nothing changes."""
        def nested(levels):
            return [nested(levels - 1)] if levels else 5

        client, no_json = ddnet_client(), "info: a number or a text that JSON"
        rows = [(words, ddnet_info(**{name: value})) for name, words, values in (
            ("max_clients", "max_clients: expected a whole number",
             (64.0, True, -1, 1 << 31, "64", None)),
            ("name", "name: expected a text without control", (["x"], "a\nb")),
            ("game_type", "game_type: expected a text without control", (None, "\x1b[0m")),
            ("version", "version: expected a text without control", ("\0",)),
            ("max_players", "max_players: expected a whole number", ("64",)),
            ("max_players", "max_players: more than max_clients", (65,)),
            ("passworded", "passworded: expected true or false", (0,)),
            ("map", "map: expected an object", ("Tutorial",)),
            ("map", "map.name: expected a text without control", ({}, {"name": "\t"})),
            ("clients", "clients: expected a list", ({},)),
            ("clients", "clients[0]: expected an object", (["x"],)),
            ("clients", "clients[0].clan: expected a text", ([{"name": "x"}],)),
            ("clients", "clients: more than max_clients", ([client] * 65,)),
            ("x", "info: more than 16 objects or lists", (nested(16), nested(300))),
            ("x", no_json, (math.nan, math.inf))) for value in values]
        rows += [("clients[1].%s: expected" % name,
                  ddnet_info(clients=[client, {**client, name: value}])) for name, value in (
            ("name", 5), ("country", 1.0), ("score", 1 << 31), ("is_player", 1))]
        rows += [("not a JSON object", body) for body in (
            b"[]", b"{", b'{"max_clients":64,\xff}', b"[" * 30000, DDNET_INFO + b"x")]
        rows += [
            ("max_clients", b"{}"), (no_json, DDNET_INFO.replace(b"Tutorial", b"\\ud800")),
            (no_json, DDNET_INFO.replace(b"1082711", b"1e999")),
            ("clients: more of them play", ddnet_info(clients=[client] * 9, max_players=8)),
            # Each of these takes 18 characters when Python writes it
            ("info: more than 32768", DDNET_INFO.replace(b"1082711", b"[%s1]" % (b"1e15," * 3000)))]
        for words, body in rows:
            self.start()
            (status, message), fields = self.register(body=body)
            self.assertEqual((status, message[:len(words)]), (400, words), message)
            self.assertEqual((self.entries(), self.outcome()), ([], ("bad packet", message)))
            self.send(ddnet_request(fields, DDNET_INFO))
            self.assert_told(ddnet_request(fields, body), 400, words)
            self.assertEqual(self.entries()[0]["info"], json.loads(DDNET_INFO))

    def test_what_clients_are_given(self):
        """The info is what the server has sent, with all that this master does not know."""
        for changed in (
                {"max_clients": 0, "max_players": 0}, {"name": "", "game_type": ""},
                {"clients": [ddnet_client("\u200bé\U0001F600", clan="\x7f")] * 64},
                {"further": [None, {"deep": [1.5, -7, "\u2028"]}], "client_score_kind": "time"},
                {"clients": [ddnet_client(score=-(1 << 31), country=(1 << 31) - 1)]}):
            self.start()
            self.assertEqual(self.register(body=ddnet_info(**changed))[0], (200, "success"))
            self.assertEqual(self.entries()[0]["info"], json.loads(ddnet_info(**changed)))
        server, = self.registry.servers()
        for country, location in (("de", "eu"), ("cn", "as:cn"), ("aq", None), ("", None)):
            self.registry.update(server, {"country": country})
            self.assertEqual(self.entries()[0].get("location"), location)

    def test_tokens_that_prove_nothing(self):
        """For another port, protocol, address or Secret, wrong or too old: nothing changes."""
        answer, fields = self.register()
        before = self.entries(), self.registry.generation
        other_secret, token = fields.replace("2ffa", "0000"), self.token()
        by_0_7 = fields.replace("tw-0.6", "tw-0.7") + "Connless-Token: 00000000\r\n"
        for forged, source, now in (
                (other_secret.replace(":8399", ":8400"), self.HERE, 1.0),
                (other_secret, self.HERE, 1.0), (other_secret, "203.0.113.10", 1.0),
                (other_secret, self.HERE_6, 1.0), (fields, self.HERE_6, 1.0),
                (by_0_7, self.HERE, 1.0),
                *((fields.replace(token, wrong), self.HERE, 1.0)
                  for wrong in ("", "x" * 16, "0" * 16, token[:-2])),
                (fields, self.HERE, 240.0), (fields, self.HERE, 3600.0)):
            for body in ddnet_info(name="Forged"), b"":
                self.assert_told(ddnet_request(forged, body), 200, "need_challenge", source, now)
            self.assertEqual((self.entries(), self.registry.generation), before)
        # It is good for two minutes at least, whenever it was made
        for made_at in (0.0, 119.9, 120.0):
            self.start()
            answer, fields = self.register(now=made_at)
            for now in (made_at + 60.0, made_at + 120.0):
                self.assert_told(ddnet_request(fields), 200, "success", now=now)

    def test_a_secret_that_belongs_to_another(self):
        """Who has learned it, but has another address or port, changes nothing; nor does somebody
        without it."""
        self.register(DDNET_0_6, ddnet_info(name="Right"))
        self.assertEqual(self.register(self.other(8400))[0], (200, "success"))
        before = self.entries()
        owner, impossible = "it is that of the server at", "cannot be the address of a server"
        for forged, source, status, words in (
                (DDNET_0_6, "203.0.113.10", 403, owner),
                (DDNET_0_6.replace("8399", "8401"), self.HERE, 403, owner),
                (DDNET_0_6.replace("8399", "8400"), self.HERE, 403, owner),
                (DDNET_0_6.replace("8399", "8401"), self.HERE_6, 403, owner),
                (DDNET_0_7, "fe80::1%eth0", 400, impossible),
                (DDNET_0_7, "0.0.0.9", 400, impossible),
                (DDNET_DELETE_0_6.replace("2ffa", "0000"), self.HERE, 200, "success"),
                (DDNET_DELETE_0_6.replace("8399", "8400"), self.HERE, 200, "success"),
                (DDNET_DELETE_0_6, "203.0.113.10", 200, "success"),
                (DDNET_DELETE_0_7, self.HERE, 200, "success")):
            self.assert_told(ddnet_request(forged, ddnet_info(name="Forged")), status, words,
                             source)
            self.assertEqual(self.entries(), before)

    def test_a_game_server_that_starts_again(self):
        """After a crash it has a new Secret. It is listed once its former life has left, which
        cannot come back then."""
        former, again = self.all_four(), DDNET_0_6.replace("2ffa", "0000")
        (status, message), with_token = self.register(again, now=15.0)
        self.assertEqual((status, "was started again waits 30 s" in message), (403, True))
        self.assertEqual(self.addresses(), [self.URLS])
        self.tick(30.0)
        for now in (30.0, 45.0):
            self.assert_told(ddnet_request(with_token, DDNET_INFO), 200, "success", now=now)
        for fields, source in former[:2]:
            self.assert_told(ddnet_request(fields, DDNET_INFO), 403, "another one", source, 45.0)
        self.assertEqual(self.addresses(), [self.URLS[:1]])

    def test_a_server_does_not_move_to_where_another_one_is_listed(self):
        self.all_four()
        again = DDNET_0_6.replace("2ffa", "0000")
        self.assertEqual(self.register(again, source=self.HERE_6)[0], (200, "success"))
        for fields in DDNET_DELETE_0_6, DDNET_DELETE_0_7:
            self.assert_told(ddnet_request(fields), 200, "success")
        self.assertEqual(self.addresses(), [self.URLS[2:3]])

    def test_many_servers_of_one_machine_at_once(self):
        for now, port in itertools.product((0.0, 15.0, 30.0), range(9000, 9032)):
            self.assertEqual(self.register(self.other(port), now=now)[0], (200, "success"))
        for _ in range(200):
            self.send(ddnet_request(DDNET_0_6), now=30.0)
        self.assert_told(ddnet_request(DDNET_0_6), 429, "Too many requests", now=30.0)
        self.start(limits__datagrams="100/1")           # a registration usually costs two tokens
        self.assert_told(ddnet_request(DDNET_0_6), 200, "need_challenge", now=1.0)

    def test_rules_and_limits(self):
        """Each is answered in words that the game server logs."""
        self.start(server__refuse_names="casino", limits__servers_per_source="1",
                   **{"bans.198.51.100.0/24": "fake players"})
        self.assertEqual(self.register(body=ddnet_info(name="A Casino"))[0][0], 403)
        self.assertEqual(self.register(self.other(9000))[0], (200, "success"))
        right, page = ddnet_request(DDNET_0_6, DDNET_INFO), "Origin: http://a.example\r\n"
        for request, source, status, words in (
                (right, "198.51.100.1", 403, "fake players"),
                (right, self.HERE, 429, "at most 1 servers"),
                (ddnet_request(DDNET_0_6, b"x" * 32769), self.HERE, 413, "At most 32768 bytes are"),
                (http_request(ms.DDNET_REGISTER), self.HERE, 405, "takes POST, OPTIONS."),
                (ddnet_request(DDNET_0_6 + page), self.HERE, 403, "A web page may not announce")):
            self.assert_told(request, status, words, source)
        self.start(ddnet__enabled="no")
        self.assert_told(right, 404, "DDNet servers are not listed here.")

    def test_a_server_that_cannot_move_stays(self):
        """IPv4 comes second, and there its source has too many servers already."""
        self.start(limits__servers_per_source="1")
        self.register(source=self.HERE_6)
        self.register(self.other(8400))
        before = self.addresses(), self.registry.generation
        for fields in DDNET_0_6, DDNET_0_7:
            (status, message), _ = self.register(fields)
            self.assertEqual((status, "at most 1 servers" in message), (429, True))
            self.assertEqual((self.addresses(), self.registry.generation), before)

    def test_large_infos_are_counted(self):
        """By source and in all. Who is listed stays, with his old info; small ones always fit."""
        large = ddnet_info(x="y" * 32_000)
        self.ddnet.body_limiter = mock.Mock()
        for port in range(9000, 9018):      # 512 kB, with 28 kB beyond the usual 4 kB
            self.register(self.other(port), large)
        for port, body, source, now, status in (
                (9000, large, self.HERE, 10.0, 200),            # instead of one as large
                (9100, large, self.HERE, 10.0, 429), (9101, DDNET_INFO, self.HERE, 10.0, 200),
                (9101, large, self.HERE_6, 10.0, 429),          # it counts for the same source
                (9102, large, "203.0.113.10", 10.0, 200), (9101, large, self.HERE, 20.0, 429),
                # A smaller info gives its bytes back
                (9000, DDNET_INFO, self.HERE, 20.0, 200), (9101, large, self.HERE, 21.0, 200),
                (9000, large, self.HERE, 21.0, 429), (9103, large, "203.0.113.11", 22.0, 429),
                (9103, DDNET_INFO, "203.0.113.11", 22.0, 200)):
            self.tick(now)
            if now == 21.0 and port == 9101:
                server = self.registry.get("ddnet", self.HERE, 9101)
                self.assertEqual((server.last_seen, self.ddnet.registration(server)["info"]),
                                 (20.0, ms.read_ddnet_info(DDNET_INFO)))
            if now == 22.0:
                self.ddnet.large_bytes.total = ms.DDNET_LARGE_BYTES
            (told_status, message), _ = self.register(self.other(port), body, source, now)
            self.assertEqual((told_status, "too large together" in message),
                             (status, status == 429), port)

    def test_behind_a_proxy_and_at_another_address(self):
        """The client's address counts."""
        self.start(http__trusted_proxies="127.0.0.1", **{"address_map.10.0.0.5": "203.0.113.77"})
        forwarded = DDNET_0_6 + "X-Forwarded-For: %s\r\n" % self.HERE
        answer, fields = self.register(forwarded, source="127.0.0.1")
        self.assertEqual((answer, self.sent[-1][1]), ((200, "success"), (self.HERE, 8399)))
        self.assert_told(ddnet_request(fields), 200, "success", "127.0.0.1", 1.0)
        self.assert_told(ddnet_request(fields), 403, "", "127.0.0.2", 3.0)
        self.assertEqual(self.register(self.other(9000), source="10.0.0.5")[0], (200, "success"))
        self.assertEqual(self.sent[-1][1], ("10.0.0.5", 9000))
        self.assertCountEqual(self.addresses(),
                              [self.URLS[:1], ["tw-0.6+udp://203.0.113.77:9000"]])

    def test_after_a_restart_of_the_master(self):
        """All addresses are back. Who does not register within 30 s leaves."""
        self.all_four()
        server, = self.registry.servers()
        self.start()
        again = ms.restored_server(ms.listed_row(server, 1000.0), 10.0, 1010.0)
        self.registry.silence_counts_from = 10.0
        self.registry.insert(again)
        self.ddnet.resume(again)
        self.assertEqual(self.register(DDNET_0_6, b"", now=20.0)[0], (200, "success"))
        for now, addresses in (39.9, [self.URLS]), (40.0, [self.URLS[:1]]), (50.0, []):
            self.tick(now)
            self.assertEqual(self.addresses(), addresses)

    def test_pages(self):
        """Why it is not listed; who plays, and what the scores are there."""
        clients = [ddnet_client("<ann>", clan="C&A", score=-61), ddnet_client("bob"),
                   ddnet_client("eve", is_player=False)]
        right = ddnet_info(clients=clients, passworded=True, name="\u200bA\u2003b")
        self.send(ddnet_request(DDNET_0_6, DDNET_INFO))
        for words, body in (
                ("a challenge to UDP port 8399, and the game server has not returned", b""),
                ("passworded: expected true or false", ddnet_info(passworded=0)),
                ("All is well", right)):
            if body:
                self.register(body=body)
            self.assertIn(words, self.get("/check?address=%s&port=8399" % self.HERE)[2].decode())
        server, = self.registry.servers()
        self.assertEqual((server.name, server.players, server.max_players, server.details),
                         ("A b", 2, 64, {"flags": "password"}))
        player = ms.Player
        times = [player("<ann>", "C&A", None, 61), player("bob"), player("eve", is_watching=True)]
        points = [player("<ann>", "C&A", -61), player("bob", score=-9999),
                  player("eve", score=-9999, is_watching=True)]
        for changed, players in (
                ({}, times), ({"game_type": "CTF"}, points), ({"game_type": "fastCap"}, times),
                ({"client_score_kind": "points"}, points),
                ({"client_score_kind": ["time"]}, points),
                ({"game_type": "CTF", "client_score_kind": "time_backcompat"}, times)):
            told = ddnet_info(**{**json.loads(right), **changed}).decode()
            server.private["ddnet_registration"]["info"] = told
            self.assertEqual(self.ddnet.players(server), players, changed)

    def test_entries_of_another_master(self):
        """Those who play are counted."""
        entry = {"addresses": self.URLS[2:], "location": "eu", "info": json.loads(ddnet_info(
            clients=[ddnet_client(), ddnet_client(is_player=False)]))}
        server = ms.read_ddnet_entry(entry)
        self.assertEqual((server["address"], server["players"]), (self.HERE_6, 1))
        for wrong in ("x", {}, {**entry, "addresses": []}, {**entry, "addresses": ["x"]},
                      {**entry, "info": {}}, {**entry, "info": {**entry["info"], "clients": 5}}):
            self.assertRaises(ms.Malformed, ms.read_ddnet_entry, wrong)


class DdnetFound(unittest.TestCase):
    """Servers that another master lists."""

    HERE, HERE_6 = DdnetTest.HERE, DdnetTest.HERE_6
    URLS = DdnetTest.URLS

    def setUp(self):
        self.world = DdnetWorld(poll__interval="10")

    def find(self, *addresses, at=HERE):
        fields = self.world.here.found({"private": {"ddnet_addresses": addresses}})
        return self.world.here.query_found(ms.FoundServer(at, 8399, "up.example", fields))

    def query(self):
        """The queries of the next second, with the peers that get them."""
        self.world.now += 1.0
        self.world.here.tick(self.world.now)
        return self.world.poller.tick(self.world.now)

    def answer(self, queries, *answers):
        """Deliver the datagrams of an answer to each query; why they are Malformed."""
        reasons = []
        for (query, peer), answer in itertools.product(queries, answers):
            try:
                self.world.poller.datagram(
                    ddnet_reply(query, answer), peer, self.world.now + 0.02)
            except ms.Malformed as error:
                reasons.append(str(error))
        return reasons

    def listed(self):
        """(found at, addresses, players, listed clients) of each server."""
        listed = []
        for server in self.world.servers():
            registration = self.world.here.registration(server)
            listed.append((server.found_at, registration["addresses"], server.players,
                           len(json.loads(registration["info"])["clients"])))
        return listed

    def register(self, source=HERE, fields=DDNET_0_6):
        self.world.place = source, 8399
        self.world.announce()

    def test_answers(self):
        """(the datagrams, how many queries it takes, players, listed clients, wrong datagrams)"""
        flooded = ddnet_answer(b"iext", DDNET_NAMED % (62, 62))
        first, second = DDNET_FULL
        unasked = "an answer that nobody asked for"
        early = ["wrong or incomplete: 'flags'"]
        for answers, queries, players, clients, reasons in (
                ([DDNET_EMPTY], 1, 0, 0, []), ([DDNET_THREE], 1, 3, 3, []),
                ([DDNET_THREE] * 2, 1, 3, 3, [unasked]), (DDNET_FULL, 1, 62, 62, []),
                ([first, second, second], 1, 62, 62, [unasked]), ([DDNET_OLD], 1, 3, 3, []),
                ([flooded], 1, 62, 0, []), ([first], 2, 62, 43, []),
                ([second, first], 2, None, 0, (early + [unasked]) * 2),
                ([second], 2, None, 0, early * 2), ([], 2, None, 0, [])):
            self.setUp()
            self.find(self.URLS[0]).phase = 0.9
            told, count = [], 0
            for _ in range(8):
                asked = self.query()
                count += len(asked)
                told += self.answer(asked, *answers)
            row = answers, queries
            self.assertEqual((count, told), (queries, reasons), row)
            self.assertEqual(self.listed(), [] if players is None else [
                ("up.example", self.URLS[:1], players, clients)], row)
            for server in self.world.servers():
                self.assertEqual(server.ping_ms, None if queries == 2 else 20)

    def test_forged_answers(self):
        """Those from another place, with another token or to an older query; they are counted."""
        self.find(self.URLS[0])
        (query, peer), = self.query()
        stale = ddnet_reply(b"xe" + bytes(13), DDNET_THREE)
        for data, place in ((stale, peer), (DDNET_THREE, ("203.0.113.10", 8399)),
                            (ddnet_reply(query, DDNET_THREE), (self.HERE, 8400))):
            self.assertRaises(ms.Malformed, self.world.poller.datagram, data, place, 1.1)
        self.assertEqual(self.listed(), [])
        self.assertEqual(self.answer([(query, peer)], DDNET_THREE), [])
        self.assertEqual(len(self.listed()), 1)

    def test_what_a_server_may_claim(self):
        """128 clients are waited for, some 8 kB of them are listed; all texts are cleaned."""
        for present, client, datagrams, listed in (
                (2_000_000_000, b"n|c|0|0|1||", 2, 130), (128, b'"n|c|0|0|1||', 2, 126),
                (128, b"\xf0\x9f\x98\x80\x1b[1m" * 25 + b"|c\x01|0|0|1||", 22, 50)):
            self.setUp()
            self.find(self.URLS[0])
            head = b"1193026|0.6|\xff\x1b[1mN\r\n|a\tb|0|0|\x7f|1|%d|%d|%d|%d||" % ((present,) * 4)
            count = 1280 // len(client)
            answers = [ddnet_answer(b"iext", head + client * count)]
            answers += [ddnet_answer(b"iex+", b"1193026|1||" + client * count)] * (datagrams - 1)
            queries = self.query()
            self.answer(queries, *answers[:-1])
            self.assertEqual(self.listed(), [])
            self.assertEqual(self.answer(queries, answers[-1]), [])
            server, = self.world.servers()
            info = self.world.here.registration(server)["info"]
            self.assertEqual((len(json.loads(info)["clients"]), len(info.encode()) <= 8400),
                             (listed, True))
            self.assertEqual((server.name, server.map, server.mode, server.details),
                             ("\u00ffN", "a b", "", {"flags": "password"}))

    def test_behind_our_router(self):
        """It is listed at its public address."""
        self.world = DdnetWorld(**{"address_map__192.168.1.5": self.HERE})
        self.find(at="192.168.1.5")
        self.answer(self.query(), DDNET_EMPTY)
        self.assertEqual(self.listed(), [("up.example", self.URLS[:1], 0, 0)])

    def test_registered_here_and_found_elsewhere(self):
        """It is listed once, and its own registration wins, by whichever addresses; when that ends,
        the server is found again."""
        both = self.HERE, self.HERE_6
        for (sources, at, addresses), is_found_first in itertools.product((
                (both[:1], self.HERE, self.URLS[:1]), (both[:1], self.HERE, self.URLS),
                (both[1:], self.HERE, self.URLS), (both[1:], self.HERE_6, self.URLS[2:]),
                (both, self.HERE, self.URLS), (both, self.HERE_6, self.URLS[2:])), (False, True)):
            row = sources, at, addresses, is_found_first
            self.setUp()

            def fetch_and_poll():
                self.find(*addresses, at=at)
                for _ in range(12):
                    self.answer(self.query(), DDNET_THREE)
                return [found_at for found_at, *_ in self.listed()]

            if is_found_first:
                self.assertEqual(fetch_and_poll(), ["up.example"])
            for source in sources:
                self.register(source)
            self.assertEqual(fetch_and_poll(), [""], row)
            server, = self.world.servers()
            self.assertEqual((server.ping_ms, server.verified, server.address),
                             (None, "handshake", sources[0]))
            self.assertEqual(self.world.poller.targets, {})
            for event, server in self.leave():
                self.world.here.gone(server)
            self.assertEqual((self.listed(), fetch_and_poll()), ([], ["up.example"]), row)

    def leave(self):
        changes_of(self.world.registry)
        for server in self.world.servers():
            self.world.registry.remove_own(server)
        return changes_of(self.world.registry)


DDNET_SERVER = "/usr/games/DDNet-Server"


@unittest.skipUnless(os.path.exists(DDNET_SERVER), "no DDNet-Server here")
class DdnetOnTheWire(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def start_master(self, port, **settings):
        server = master(http__ports=str(port), limits__exempt="127.0.0.0/8", **settings)
        server.start()
        self.addCleanup(server.stop)
        return server

    def start_game(self, server, port):
        """A game server on this port that registers with a master."""
        game = subprocess.Popen(
            [DDNET_SERVER, "sv_port %d" % port, "sv_name A real one",
             *block_of(server, "ddnet").splitlines()],
            cwd=self.folder, env={**os.environ, "HOME": self.folder}, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)
        self.addCleanup(game.wait)
        self.addCleanup(game.kill)
        return game

    def test_a_real_server(self):
        """Listed with two addresses, kept by a restart of the master, gone when stopped."""
        def entries():
            return json.loads(fetch(port, ms.DDNET_SERVERS)[2].decode())["servers"]

        database = os.path.join(self.folder, "db")
        port = free_port()                  # the second master has that of the first one
        game_port = free_port()
        server = self.start_master(port, server__database=database)
        game = self.start_game(server, game_port)
        addresses = ["tw-0.%d+udp://127.0.0.1:%d" % (version, game_port) for version in (6, 7)]
        eventually(lambda: [entry["addresses"] for entry in entries()] == [addresses])
        self.assertEqual(entries()[0]["info"]["name"], "A real one")
        server.stop()
        server = self.start_master(port, server__database=database)
        self.assertEqual([entry["addresses"] for entry in entries()], [addresses])
        restored, = server.registry.servers()
        self.assertFalse(restored.confirmed)
        game.send_signal(signal.SIGINT)
        eventually(lambda: entries() == [])

    def test_a_real_server_that_another_master_lists(self):
        """The second master lists it when it has answered, until it does not."""
        game_port = free_port()
        hurry = mock.patch.object(ms, "TICK_S", 0.1)
        hurry.start()
        self.addCleanup(hurry.stop)
        first = self.start_master(0)
        game = self.start_game(first, game_port)
        eventually(lambda: first.registry.total == 1)
        place = "127.0.0.1:%d" % port_of(first, "http")
        second = self.start_master(0, upstream__masters="ddnet " + place)
        second.poller.interval = 0.5
        eventually(lambda: second.registry.total == 1)
        entry, = json.loads(fetch(port_of(second, "http"), ms.DDNET_SERVERS)[2].decode())["servers"]
        self.assertEqual(entry["addresses"], ["tw-0.6+udp://127.0.0.1:%d" % game_port])
        self.assertEqual((entry["info"]["name"], entry["info"]["max_clients"]), ("A real one", 64))
        found, = second.registry.servers()
        self.assertEqual((found.verified, found.found_at), ("query", place))
        status, out, err = command("ping", "--game", "ddnet", "127.0.0.1:%d" % game_port)
        self.assertRegex(out, "(?m)^name +A real one$")
        self.assertEqual((status, err), (0, ""))
        game.kill()
        with mock.patch.object(ms.Ddnet, "timeout_s", 0.2):     # now that it does not answer
            eventually(lambda: second.registry.total == 0)


# --- Countries -----------------------------------------------------------------------------------

def mmdb_head(kind: int, size: int) -> bytes:
    """The first bytes of a value of an MMDB file, as its specification describes them."""
    extended = b"" if kind < 8 else bytes((kind - 7,))
    if size >= 65821:
        more, size = (size - 65821).to_bytes(3, "big"), 31
    elif size >= 285:
        more, size = (size - 285).to_bytes(2, "big"), 30
    elif size >= 29:
        more, size = (size - 29).to_bytes(1, "big"), 29
    else:
        more = b""
    return bytes(((kind if kind < 8 else 0) << 5 | size,)) + extended + more


def mmdb_value(value: Any) -> bytes:
    """A value of an MMDB file. A tuple is (a type's number, its bytes); bytes stay as they are."""
    if isinstance(value, dict):
        return mmdb_head(7, len(value)) + b"".join(
            mmdb_value(key) + mmdb_value(item) for key, item in value.items())
    if isinstance(value, list):
        return mmdb_head(11, len(value)) + b"".join(map(mmdb_value, value))
    if isinstance(value, bool):
        return mmdb_head(14, value)
    if isinstance(value, int):
        raw = value.to_bytes((value.bit_length() + 7) // 8, "big")
        return mmdb_head(9, len(raw)) + raw
    if isinstance(value, tuple):
        return mmdb_head(value[0], len(value[1])) + value[1]
    if isinstance(value, bytes):
        return value
    return mmdb_head(2, len(value.encode())) + value.encode()


def mmdb_pointer(target: int, size: int) -> bytes:
    """A pointer of 1 to 4 bytes to a position in the data. One of 4 bytes has no high bits."""
    target -= (0, 2048, 526336, 0)[size - 1]
    high = target >> 8 * size if size < 4 else 7
    return bytes((1 << 5 | (size - 1) << 3 | high,)) + (target & (1 << 8 * size) - 1).to_bytes(
        size, "big")


def mmdb_file(places: Dict[str, int], data: bytes, record_bits: int = 24, ip_version: int = 6,
              **changed: Any) -> bytes:
    """A file in which these networks lead to these positions in the data."""
    nodes: List[List[Any]] = [[None, None]]
    for text, position in places.items():
        network = ipaddress.ip_network(text)
        number, bits = int(network.network_address), network.prefixlen
        if network.version == 4 and ip_version == 6:
            bits += 96
        length = 128 if ip_version == 6 else 32
        node = 0
        for depth in range(bits):
            side = number >> length - 1 - depth & 1
            if depth == bits - 1:
                nodes[node][side] = ("data", position)
            elif not isinstance(nodes[node][side], int):
                nodes.append([nodes[node][side]] * 2)   # what held for all holds for both halves
                nodes[node][side] = node = len(nodes) - 1
            else:
                node = nodes[node][side]
    count = len(nodes)

    def record(item):
        return count if item is None else item if isinstance(item, int) else count + 16 + item[1]

    tree = b""
    for left, right in (map(record, node) for node in nodes):
        if record_bits == 28:
            middle = bytes((left >> 24 << 4 | right >> 24,))
            tree += (left & 0xffffff).to_bytes(3, "big") + middle
            tree += (right & 0xffffff).to_bytes(3, "big")
        else:
            tree += left.to_bytes(record_bits // 8, "big") + right.to_bytes(record_bits // 8, "big")
    uint16, uint32 = 5, 6
    description = {
        "node_count": (uint32, count.to_bytes(4, "big")),
        "record_size": (uint16, bytes((record_bits,))),
        "ip_version": (uint16, bytes((ip_version,))), "database_type": "Test-Country",
        "languages": ["en"], "binary_format_major_version": (uint16, b"\2"),
        "binary_format_minor_version": (uint16, b""), "build_epoch": 1_782_864_000,
        "description": {"en": "For tests"}, **changed}
    return tree + bytes(16) + data + b"\xab\xcd\xefMaxMind.com" + mmdb_value(description)


def simple_country_file(countries: Dict[str, str], **options: Any) -> bytes:
    """A file with the country of each network."""
    data, places = b"", {}
    for network, code in countries.items():
        places[network] = len(data)
        data += mmdb_value({"country": {"iso_code": code}})
    return mmdb_file(places, data, **options)


try:
    import maxminddb
except ImportError:
    maxminddb = None


class CountryFileTest(unittest.TestCase):
    NETWORKS = {"203.0.113.0/24": "DE", "198.51.100.0/25": "NL", "198.51.100.128/25": "FR",
                "192.0.2.7/32": "US", "2001:db8::/32": "BR", "2001:db8:5::1/128": "AU"}
    EXPECTED = (("203.0.113.0", "de"), ("203.0.113.255", "de"), ("203.0.114.0", ""),
                ("198.51.100.127", "nl"), ("198.51.100.128", "fr"), ("192.0.2.7", "us"),
                ("192.0.2.6", ""), ("2001:db8::1", "br"), ("2001:db8:5::1", "au"),
                ("2001:db8:5::2", "br"), ("2001:db9::1", ""), ("::1", ""), ("127.0.0.1", ""))

    def test_record_sizes_and_versions(self):
        for record_bits, version in itertools.product((24, 28, 32), (4, 6)):
            networks = {text: code for text, code in self.NETWORKS.items()
                        if version == 6 or ":" not in text}
            file = ms.CountryFile(simple_country_file(
                networks, record_bits=record_bits, ip_version=version))
            self.assertEqual((file.type, file.built), ("Test-Country", 1_782_864_000))
            for address, country in self.EXPECTED:
                if version == 4 and ":" in address:
                    country = ""
                self.assertEqual(file.country(address), country, (address, record_bits, version))
        # Records beyond 24 bits, in the halves of the byte that two records of 28 bits share
        padding = mmdb_value((4, bytes((1 << 24) + 5)))
        data = padding + mmdb_value({"country": {"iso_code": "DE"}})
        for record_bits, (network, inside, outside) in itertools.product((28, 32), (
                ("0.0.0.0/1", "1.0.0.1", "128.0.0.1"), ("128.0.0.0/1", "128.0.0.1", "1.0.0.1"))):
            file = ms.CountryFile(mmdb_file({network: len(padding)}, data, record_bits, 4))
            self.assertEqual((file.country(inside), file.country(outside)), ("de", ""))

    def test_every_type_and_pointers_of_every_size(self):
        """What stands before the country is skipped, whatever it is."""
        before = {
            "text": "x" * 28, "longer": "x" * 29, "long": "x" * 285, "very long": "x" * 65821,
            "double": (3, bytes(8)), "bytes": (4, b"\xff" * 300), "uint16": (5, b"\1\2"),
            "uint32": (6, b""), "int32": (8, b"\xff\xff\xff\xff"), "uint64": 1 << 63,
            "uint128": (10, b"\xff" * 16), "array": [1, ["x", {"y": True}], []], "flag": False,
            "float": (15, b"\0\0\0\0"), "empty": {}, "many": dict.fromkeys(map(str, range(40)), 1)}
        file = mmdb_file({"203.0.113.0/24": 0}, mmdb_value({**before, "country": {
            "before": [1, {"x": [2]}], "iso_code": "DE"}}))
        self.assertEqual(ms.CountryFile(file).country("203.0.113.9"), "de")
        for size, filling in ((1, 300), (2, 100_000), (3, 530_000), (4, 1000)):
            data = mmdb_value((4, bytes(filling)))
            code_at, code = len(data), mmdb_value("DE")
            name_at, name = code_at + len(code), mmdb_value("iso_code")
            inner_at = name_at + len(name)
            inner = mmdb_head(7, 1) + mmdb_pointer(name_at, size) + mmdb_pointer(code_at, size)
            record_at = inner_at + len(inner)
            record = mmdb_value({"continent": mmdb_pointer(inner_at, size),
                                 "country": mmdb_pointer(inner_at, size)})
            file = mmdb_file({"203.0.113.0/24": record_at}, data + code + name + inner + record)
            self.assertEqual(ms.CountryFile(file).country("203.0.113.9"), "de", size)

    def test_where_the_country_stands(self):
        """And whether any address has one, in files with few countries, many and none."""
        for record, country in (
                ({"country": {"iso_code": "DE"}}, "de"),            # MaxMind, DB-IP
                ({"country_code": "NL"}, "nl"),                     # @ip-location-db
                ({"city": "Bonn", "country_code": "DE", "state1": ""}, "de"),
                ({"country": {"iso_code": ""}, "country_code": "FR"}, "fr"),
                ({"country_code": "", "x": 1}, ""), ({"country_code": "DEU"}, ""),
                ({"autonomous_system_number": 64500}, "")):
            file = ms.CountryFile(mmdb_file({"203.0.113.0/24": 0}, mmdb_value(record)))
            self.assertEqual((file.country("203.0.113.9"), file.has_countries()),
                             (country, country != ""), record)

    def test_the_look_for_countries_is_bounded(self):
        networks = {"10.%d.%d.0/24" % divmod(number, 256): "DE" for number in range(4000)}
        for code, most in ("DE", 8), ("-", 2 * ms.MMDB_NODES_TRIED + 4):
            file = ms.CountryFile(simple_country_file(dict.fromkeys(networks, code)))
            self.assertGreater(file.node_count, 3 * ms.MMDB_NODES_TRIED)
            with mock.patch.object(file, "read_country", side_effect=file.read_country) as read:
                file.country_at = read
                self.assertEqual(file.has_countries(), code == "DE")
            self.assertLessEqual(read.call_count, most)

    def test_files_that_are_none(self):
        right = simple_country_file(self.NETWORKS)
        for raw, words in (
                (b"", "not an MMDB file"), (b"x" * 1000, "not an MMDB file"),
                (gzip.compress(right), "it is compressed"),
                (right[:-400], "not an MMDB file"), (right[:-30], "beyond the end"),
                (right + bytes(200_000), "not an MMDB file"),
                (simple_country_file({}, binary_format_major_version=3), "not version 2"),
                (simple_country_file({}, record_size=20), "20 bits"),
                (simple_country_file({}, ip_version=5), "version 5"),
                (simple_country_file({}, node_count=0), "0 nodes"),
                (simple_country_file({}, node_count=10_000), "does not fit"),
                (simple_country_file({}, node_count=(9, b"\xff" * 8)), "does not fit"),
                (simple_country_file({}, node_count={}), "0 nodes"),
                (simple_country_file({}, build_epoch=1 << 62), "was made in no year")):
            with self.subTest(words=words), self.assertRaisesRegex(ms.Malformed, words):
                ms.CountryFile(raw)

    def test_broken_data(self):
        """Pointers in a circle, deep nesting, sizes beyond the end: trouble within 10 ms."""
        nested = b"".join(mmdb_head(7, 1) + mmdb_value("x") for _ in range(20_000))
        de = mmdb_value("DE")
        for data, words in (
                (mmdb_pointer(0, 1), "too many values"),
                (mmdb_head(7, 2) + mmdb_pointer(9999, 2), "beyond the end"),
                (mmdb_head(7, 16_000_000) + de, "beyond the end"),
                (mmdb_head(7, 2) + de + mmdb_head(2, 16_000_000), "beyond the end"),
                (b"\xff\xff", "beyond the end"), (nested, "too many values"),
                # Each of a hundred members has as many values as one look-up may read
                (mmdb_head(7, 100) + (de + mmdb_value([1] * 190)) * 100, "too many values"),
                # Each name is a pointer to megabytes
                (mmdb_head(7, 9000) + (mmdb_pointer(30_000, 2) + b"\xa0") * 9000 + bytes(3000)
                 + mmdb_value("x" * 10_000_000), "too many values"),
                # No country, or no such member
                (mmdb_head(7, 1) + mmdb_value({}) + mmdb_value(5), ""),
                (mmdb_value({"country": mmdb_pointer(0, 1)}), ""),          # it is its own country
                *((mmdb_value(record), "") for record in (
                    "DE", {}, {"city": {"names": {"en": "Bonn"}}}, {"country": {}},
                    {"country": "DE"}, {"country": {"iso_code": 5}},
                    {"country": {"iso_code": "-"}}, {"country": {"iso_code": "DEU"}},
                    {"country": {"iso_code": ""}}, {"country": {"names": {"en": "Germany"}}},
                    {"country": {"iso_code": ["DE"]}}, {"country": {"iso_code": True}},
                    {"registered_country": {"iso_code": "DE"}}))):
            file = ms.CountryFile(mmdb_file({"203.0.113.0/24": 0}, data))
            began = time.process_time()
            for _ in range(10):
                self.assertEqual(file.country("203.0.113.9"), "", data[:20])
            self.assertLess(time.process_time() - began, 0.5, data[:20])
            self.assertRegex(file.trouble, words or "^$", data[:20])
        # A place in the zeros between the tree and the data
        file = ms.CountryFile(mmdb_file({"203.0.113.0/24": -5}, b""))
        self.assertEqual(file.country("203.0.113.9"), "")
        self.assertIn("between the tree and the data", file.trouble)

    def test_the_work_of_a_look_up(self):
        """Records that point into each other, or have hundreds of members: 200 values are read, and
        those of a damaged record once. What a pointer leads to is not read on the way."""
        country = mmdb_value({"country": {"iso_code": "DE"}})[1:]
        far = mmdb_value({"y": [1] * 500})
        for data, country_code, heads in (
                (mmdb_value({"a": mmdb_pointer(0, 1), "b": mmdb_pointer(0, 1)}), "", 14),
                (mmdb_value({str(name): name for name in range(900)}), "", 201),
                (mmdb_head(7, 41) + b"".join(
                    mmdb_value("x") + mmdb_pointer(300, 1) for _ in range(40)) + country
                 + bytes(300), "de", 127)):
            file = ms.CountryFile(mmdb_file({"203.0.113.0/24": 0}, data + far))
            with mock.patch.object(ms.MmdbSection, "head", autospec=True,
                                   side_effect=ms.MmdbSection.head) as head:
                for _ in range(2):
                    self.assertEqual(file.country("203.0.113.9"), country_code)
            self.assertEqual(head.call_count, heads)

    def test_mutations(self):
        chance = random.Random(51)
        right = simple_country_file(self.NETWORKS)
        for _ in range(1000):
            raw = bytearray(right)
            for _ in range(chance.choice((1, 1, 2, 5))):
                at = chance.choice((chance.randrange(len(raw)), -chance.randrange(1, 500)))
                raw[at] = chance.randrange(256)
            with contextlib.suppress(ms.Malformed):
                file = ms.CountryFile(bytes(raw[:chance.choice((len(raw), -5))]))
                for address, _ in self.EXPECTED:
                    self.assertRegex(file.country(address), "^([a-z]{2})?$")

    @unittest.skipUnless(maxminddb, "there is no maxminddb to compare with")
    def test_the_same_as_the_reference(self):
        """In a real file with cities, and in files of every record size."""
        chance = random.Random(200)
        networks = {}
        # In this order, as a network may not be cut into by one that comes before it
        for bits in sorted(chance.randrange(8, 33) for _ in range(1000)):
            number = chance.getrandbits(bits) << 32 - bits
            for network in (number, bits), (0x20 << 120 | number << 88, bits + 8):
                networks[str(ipaddress.ip_network(network))] = chance.choice(("DE", "NL", "FR"))
        files = [simple_country_file(networks, record_bits=bits) for bits in (24, 28, 32)]
        with contextlib.suppress(ImportError):
            import _maxminddb_geolite2
            folder = os.path.dirname(_maxminddb_geolite2.__file__)
            with open(os.path.join(folder, "GeoLite2-City.mmdb"), "rb") as file:
                files.append(file.read())
        for raw in files:
            ours = ms.CountryFile(raw)
            reference = maxminddb.open_database(io.BytesIO(raw), maxminddb.MODE_FD)
            found = 0
            for _ in range(10_000):
                address = str(ipaddress.IPv4Address(chance.getrandbits(32)))
                if chance.random() < 0.5:
                    address = str(ipaddress.IPv6Address(2 << 124 | chance.getrandbits(124)))
                record = reference.get(address) or {}
                country = record.get("country", {}).get("iso_code", "").lower()
                self.assertEqual(ours.country(address), country, (len(raw), address))
                found += bool(country)
            self.assertGreater(found, 100, len(raw))


class CountriesTest(WebCase):
    """Where servers are, as the registry, the lists and the pages tell it."""

    settings = {"limits__requests": "1000000"}

    def setUp(self):
        super().setUp()
        self.rules = self.registry.rules
        self.rules.country_file = ms.CountryFile(simple_country_file(
            {"203.0.113.0/24": "DE", "198.51.100.0/24": "NL", "192.0.2.0/24": "CN",
             "2001:db8::/32": "BR"}))

    def test_names_and_continents(self):
        self.assertEqual(len(ms.COUNTRY_NAMES), 250)
        for code, name, continent in (
                ("de", "Germany", "eu"), ("st", "São Tomé and Príncipe", "af"),
                ("gs", "South Georgia and the South Sandwich Islands", "an"), ("zz", "ZZ", "")):
            self.assertEqual((ms.country_name(code), ms.CONTINENTS.get(code, "")),
                             (name, continent))

    def test_looked_up_once_when_listed(self):
        for number, (address, country) in enumerate((
                ("203.0.113.9", "de"), ("198.51.100.9", "nl"), ("2001:db8::9", "br"),
                ("8.8.8.8", ""))):
            self.assertEqual(self.list(number + 1, address).country, country)
        file = ms.CountryFile(mmdb_file({"203.0.113.0/24": 0}, mmdb_head(7, 5)))
        self.rules.country_file = file
        self.list(1, players=5, max_players=9)
        self.assertEqual([entry["country"] for entry in self.servers()], ["de", "nl", "br", ""])
        self.assertEqual(file.trouble, "")
        self.assertEqual(self.list(9).country, "")          # the file is damaged there
        self.assertEqual(file.trouble, "a value beyond the end of the file")

    def test_without_a_file(self):
        self.rules.country_file = None
        self.assertEqual(self.list().country, "")
        page = self.get("/")[2].decode()
        self.assertRegex(page, 'class="board [^"]*no-country')
        self.assertIn('<details id="countries" hidden>', page)
        self.assertEqual(self.get("/geoip")[2], b'{"continent":null}')

    def test_by_hand(self):
        """It wins over the file, at once after a reload; what has gone from the ini soon does."""
        servers = [self.list(port) for port in (1, 2)]
        address = "203.0.113.9"
        for by_hand, at_once, later in (
                ({(address, 1): "fr"}, ["fr", "de"], ["fr", "de"]),
                ({(address, 0): "us"}, ["us", "us"], ["us", "us"]),
                ({(address, 0): "us", (address, 2): "fr"}, ["us", "fr"], ["us", "fr"]),
                ({}, ["us", "fr"], ["de", "de"])):
            self.program.settings.values["country"] = by_hand
            self.registry.apply_rules(self.program.settings)
            self.assertEqual([server.country for server in servers], at_once)
            self.registry.look_up_countries()
            self.assertEqual([server.country for server in servers], later)

    def test_a_new_file(self):
        """Servers are looked up again in steps, those of other masters too."""
        for port in range(1, 181):
            server = ms.Server("aio", "203.0.113.%d" % (port % 256), port, "203.0.113.9", 0.0, 99.0)
            server.master = "other" if port % 2 else ""
            self.registry.insert(server)
        generation = self.registry.generation
        self.rules.country_file = ms.CountryFile(simple_country_file({"203.0.113.0/24": "PL"}))
        self.registry.look_up_countries_again()
        self.registry.remove_any(self.registry.servers()[0])
        for counts in ({"pl": 99, "de": 80}, {"pl": 179}, {"pl": 179}):
            self.registry.look_up_countries()
            self.assertEqual({country: count for country, count
                              in self.registry.count_countries("aio").items()
                              if country}, counts)
        self.assertEqual(self.registry.generation, generation + 180)

    def test_filters(self):
        for number, address in enumerate(("203.0.113.9", "198.51.100.9", "2001:db8::9", "8.8.8.8")):
            self.list(number + 1, address, name="Server %d" % number)
        for query, names in (("country=de", "0"), ("country=de,nl", "01"), ("country=NL", "1"),
                             ("country=de&country=nl", "01"), ("country=fr", ""),
                             ("country=de, br", "02"), ("country=", "0123"),
                             ("country=,", "0123"), ("country=de&name=9", "0"),
                             ("game=aio&country=de", "")):
            for path in "/servers.json?", "/?":
                status, _, body = self.get(path + query.replace(" ", "%20"))
                found = "".join(sorted(set(re.findall("Server ([0-9])", body.decode()))))
                self.assertEqual((status, found), (200, names), (path, query))
        for query in "country=x", "country=deu", "country=d%FC", "country=de;nl":
            self.assertEqual(self.get("/servers.json?" + query)[0], 400)

    def test_the_continent_of_a_player(self):
        """As Luanti asks for it: of the address that a proxy names, and kept by nobody."""
        reload(self.program, self.web, http__trusted_proxies="127.0.0.1",
               limits__requests="1000000")
        for source, line, body in (
                ("203.0.113.9", "X: y", b'{"continent":"EU"}'),
                ("203.0.113.9", "X-Forwarded-For: 2001:db8::1", b'{"continent":"EU"}'),
                ("127.0.0.1", "X-Forwarded-For: 2001:db8::1", b'{"continent":"SA"}'),
                ("127.0.0.1", "X: y", b'{"continent":null}')):
            _, headers, found = self.get("/geoip", line, address=source)
            self.assertEqual((found, headers["Cache-Control"]), (body, "no-store"))
            self.assertNotIn("ETag", headers)
        self.program.settings.values["country"] = {("127.0.0.1", 0): "jp"}
        self.registry.apply_rules(self.program.settings)
        self.assertEqual(self.get("/geoip", address="127.0.0.1")[2], b'{"continent":"AS"}')

    def test_locations_of_ddnet_servers(self):
        registration = {"info": DDNET_INFO.decode(), "serial": 0, "secret": "0" * 32,
                        "addresses": ["tw-0.6+udp://203.0.113.9:1"]}
        for address, location in (("203.0.113.9", "eu"), ("192.0.2.9", "as:cn"), ("8.8.8.8", None)):
            server = self.list(1, address, "ddnet", private={"ddnet_registration": registration})
            entry = json.loads(ms.ddnet_entry(server))
            self.assertEqual((entry.get("location"), sorted(entry)[:2]),
                             (location, ["addresses", "info"]))
        for server.country, location in ("aq", None), ("jp", "as"), ("us", "na"), ("", None):
            self.assertEqual(json.loads(ms.ddnet_entry(server)).get("location"), location)

    def test_pages(self):
        self.list(name="Here")
        self.list(2, "198.51.100.9", name="There")
        self.list(3, "8.8.8.8", game="aio", name="Nowhere")
        page = self.get("/")[2].decode()
        self.assertIn('<td role="cell"><abbr title="Germany">DE</abbr><td role="cell"><code>', page)
        self.assertIn('<td role="cell"><td role="cell"><code>8.8.8.8:3', page)
        self.assertNotIn("no-country", page)
        boxes = re.findall('value="(..)"( checked)?> ([^<]*) <small>([0-9]+)<', page)
        self.assertEqual(boxes, [("de", "", "Germany", "1"), ("nl", "", "Netherlands", "1")])
        page = self.get("/?country=nl,pl")[2].decode()
        boxes = re.findall('value="(..)"( checked)?> ([^<]*) <small>([0-9]+)<', page)
        self.assertEqual(boxes, [("de", "", "Germany", "1"), ("nl", " checked", "Netherlands", "1"),
                                 ("pl", " checked", "Poland", "0")])
        self.assertEqual(("There" in page, "Here" in page), (True, False))
        self.assertIn("<p>In Poland.</p>", self.get("/?country=pl")[2].decode())
        for query, summary in (("", "Countries"), ("?country=nl,de", "Countries: DE, NL"),
                               ("?country=nl,de,pl,fr", "Countries: 4")):
            self.assertIn("<summary>%s</summary>" % summary, self.get("/" + query)[2].decode())
        page = self.get("/?game=aio")[2].decode()
        self.assertRegex(page, 'class="board no-game [^"]*no-country')
        link = "/server?game=iceball&address=203.0.113.9&port=1"
        self.assertIn("<dt>Country</dt><dd>Germany</dd>", self.get(link)[2].decode())
        self.assertIn("203.0.113.9:1 · Germany</text>",
                      self.get(link.replace("/server", "/banner.svg"))[2].decode())

    def test_news(self):
        self.program.settings.values["notify.text"] = "$name in $country"
        for address, text in (("203.0.113.9", "S in Germany"), ("8.8.8.8", "S in ?")):
            _, body = ms.news_message(
                "text", self.list(1, address), {}, self.program.settings, b"")
            self.assertEqual(body.decode(), text)


class CountryFileOfTheProgram(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "countries.mmdb")
        self.ini = os.path.join(folder.name, "masterserver.ini")
        self.write_ini("[http]\ncountries = countries.mmdb\n")

    def write_ini(self, text):
        with open(self.ini, "w", encoding="utf-8") as file:
            file.write("[server]\ndatabase =\n" + text)

    def write(self, raw):
        with open(self.path, "wb") as file:
            file.write(raw)

    def load(self):
        return ms.Settings.load(self.ini)

    def test_at_the_start(self):
        with self.assertRaisesRegex(ms.SettingsError, r"^\[http\] countries = .*No such file"):
            ms.MasterServer(self.load())
        self.write(b"x" * 5000)
        with self.assertRaisesRegex(ms.SettingsError, "not an MMDB file"):
            ms.MasterServer(self.load())
        self.write(simple_country_file({"203.0.113.0/24": "DE"}))
        self.assertEqual(ms.MasterServer(self.load()).rules.country("203.0.113.9"), "de")
        settings = self.load()
        with mock.patch.object(os.path, "getsize", return_value=201 << 20):
            self.assertRaisesRegex(ms.SettingsError, "larger than", ms.MasterServer, settings)

    def test_checked(self):
        options = []
        for setting in {**NO_PORTS, "http.countries": self.path}.items():
            options += ["--set", "%s=%s" % setting]
        for raw, status, words in (
                (simple_country_file({"203.0.113.0/24": "DE"}), 0,
                 "[http] countries: Test-Country of 2026-07-01\n"),
                (simple_country_file({}, database_type="ASN"), 2,
                 "no address in it has a country; it is of the type ASN"),
                (b"nonsense", 2, "this is not an MMDB file")):
            self.write(raw)
            result, out, err = command("--check", *options)
            self.assertEqual((result, words in out + err), (status, True), out + err)

    def test_replaced(self):
        """A good file holds soon; of one that cannot be read the log and /healthz tell, once."""
        self.write(simple_country_file({"203.0.113.0/24": "DE"}))
        server = ms.MasterServer(self.load(), reload=self.load)
        server.disk = DiskThread()
        listed = server.registry.list_or_refresh(
            ("aio", "203.0.113.9", 1), "203.0.113.9", 0.0, 1e9, {"name": "S"})
        changes_of(server.registry)
        no_trouble = ""
        damaged = mmdb_pointer(0, 1)            # to itself
        for now, (raw, country, line, trouble) in enumerate((
                (simple_country_file({"203.0.113.0/24": "NL"}), "nl", "countries read", no_trouble),
                (b"nonsense", "nl", "the old file stays in use: .* not an MMDB file", "old file"),
                (mmdb_file({"203.0.113.0/24": 0, "192.0.2.0/24": len(damaged)},
                           damaged + mmdb_value({"country_code": "BR"})), "",
                 "is damaged: too many", "the file is damaged: too many"),
                (simple_country_file({"203.0.113.0/24": "PL"}), "pl", "countries read",
                 no_trouble),
                (mmdb_file({"203.0.113.0/24": 0}, mmdb_value({"asn": 5})), "pl",
                 "old file stays in use: .* no address in it has a country", "of the type Test-"))):
            self.write(raw)
            with self.assertLogs("masterserver") as logged:
                for later in 10, 11, 20, 21:
                    server.tick(30.0 * now + later)
            self.assertEqual((listed.country, "countries" in server.health),
                             (country, trouble != no_trouble))
            self.assertEqual(len([text for text in logged.output if re.search(line, text)]), 1)
            self.assertIn(trouble, server.health.get("countries", ""))
        # What could not be read is tried again at a reload, though the file is the same
        self.write(simple_country_file({"203.0.113.0/24": "FR"}))
        with self.assertLogs("masterserver"):
            with mock.patch.object(ms, "read_file", side_effect=OSError("not allowed")):
                server.tick(200.0)
                server.tick(201.0)
            self.assertEqual((listed.country, "countries" in server.health), ("pl", True))
            server.reload(202.0)
            server.tick(210.0)
            server.tick(211.0)
        self.assertEqual((listed.country, "countries" in server.health), ("fr", False))

    def test_trouble_ends_when_the_setting_is_taken_out(self):
        """Also if there never was a file that could be used."""
        self.write(b"nonsense")
        with_countries = self.load()
        self.write_ini("")
        server = ms.MasterServer(self.load())
        server.disk = DiskThread()
        for reload, expected in (lambda: with_countries, True), (self.load, False):
            server.read_settings = reload
            with self.assertLogs("masterserver"):
                server.reload(0.0)
            self.assertEqual("countries" in server.health, expected)


# --- Banners and previews ------------------------------------------------------------------------

class BannerTest(unittest.TestCase):
    def banner(self, web, server):
        """Its status and its texts: the name, what is below it, the address, players."""
        request = http_request(ms.server_link(server, "/banner.svg"))
        status, headers, body, _ = split_response(answered(web.session("127.0.0.1", 0.0), request))
        fields = "Content-Type", "Cache-Control", "Vary", "Content-Security-Policy"
        self.assertEqual([headers[name] for name in fields], [
            "image/svg+xml", "public, max-age=60", "Accept-Encoding",
            "default-src 'none'; style-src 'unsafe-inline'; sandbox"])
        document = xml.dom.minidom.parseString(body).documentElement
        self.assertEqual(document.getAttribute("viewBox"), "0 0 560 95")
        self.assertNotRegex(body, b"<(script|image|foreignObject|use)|href|on[a-z]+=|url\\([^#]")
        self.assertEqual(b"<path" in body, server.key in web.hourly_players)
        texts = re.findall("<text .*?>(.*?)</text>", body.decode())
        return [status, *[html.unescape(re.sub("</?tspan>", "", text)) for text in texts]]

    def test_the_text_of_a_message(self):
        place, name = "192.0.2.1:27790", "Iceball Server"
        for server, *texts in (
                (make_server(), name, "Iceball mesa", place, "3/32"),
                (make_server(country="de"), name, "Iceball mesa", place + " · Germany", "3/32"),
                (make_server(players=32), name, "Iceball mesa", place, "32/32"),
                (make_server(players=0, max_players=0, map=""), name, "Iceball ", place, "0/?"),
                (make_server(responding=False, name=""), place, "Iceball not responding", place,
                 "3/32"),
                (make_server("x", "2001:db8::1", name="日" * 30), "日" * 30, "x mesa",
                 "[2001:db8::1]:27790", "3/32"),
                (make_server(name="<b a='&\">"), "<b a='&\">", "Iceball mesa", place, "3/32")):
            self.assertEqual(self.banner(web_of([server]), server), [200, *texts])
        gone = ms.Remembered(0.0, WALL - 9000, "Was\0 here")
        for web, server, *answer in (
                (web_of([], gone), make_server(), 200, "Was here",
                 "Iceball not listed since 2026-11-20 22:30 UTC", place, ""),
                (web_of([]), make_server(), 404, place, "Iceball is not known here", place, ""),
                (ms.Web(make_core()), make_server("\1<x>"), 404, place, "<x> is not known here",
                 place, "")):
            self.assertEqual(self.banner(web, server), answer)

    def test_the_lines_to_copy(self):
        server = make_server("my game", "2001:db8::1")
        query = "game=my%20game&address=2001%3Adb8%3A%3A1&port=27790"
        for url, encrypted, base in (
                ("", False, "http://x"), ("", True, "https://x"),
                ("https://games.example", False, "https://games.example")):
            web = web_of([server])
            web.look = web.look._replace(url=url)
            outline = Outline(page_of(web, link_to(server), encrypted))
            link, banner = base + "/server?" + query, base + "/banner.svg?" + query
            for line in ("[url=%s][img]%s[/img][/url]" % (link, banner),
                         "[![[2001:db8::1]:27790](%s)](%s)" % (banner, link),
                         '<a href="%s"><img src="%s"\nalt="[2001:db8::1]:27790" width="560" '
                         'height="95"></a>' % (link, banner)):
                self.assertIn(line, outline.text)
            self.assertIn(("img", {"src": "/banner.svg?" + query, "alt": "", "width": "560",
                                   "height": "95"}), outline.tags)

    def test_previews(self):
        servers = [make_server(name="Castle siege", players=5),
                   make_server(name="\"><b>", address="192.0.2.2", players=2),
                   *[make_server(address="192.0.2.%d" % index, players=0)
                     for index in range(3, 15)]]
        nine = [make_server(address="192.0.2.%d" % index, players=1) for index in range(1, 10)]
        title, gone = "Open Game Masters", ms.Remembered(0.0, WALL - 9000, "Old")
        own = link_to(servers[0])
        for web, path, name, about, is_linked in (
                (web_of(servers), "/", "",
                 '7 players on 2 of 14 servers: Castle siege 5, "><b> 2', True),
                (web_of([make_server(name="", players=1)]), "/?game=iceball", "Iceball · ",
                 "1 player on 1 of 1 server: 192.0.2.1:27790 1", True),
                (web_of([]), "/", "", "0 players on 0 of 0 servers", True),
                (web_of(nine), "/", "",
                 "9 players on 9 of 9 servers: " + ", ".join(["Iceball Server 1"] * 5), True),
                (web_of(servers), own, "Castle siege · ", "5 players · Iceball · CTF · mesa", True),
                (web_of([], gone), own, "Old · ", "Not listed now. Last seen 2 h ago. ", True),
                (web_of([]), "/check", "Is my server listed? · ",
                 "Is my server listed? · " + title, False)):
            for url in "", "https://games.example":
                web.look = web.look._replace(url=url)
                web.forget_responses()
                found = {attributes.get("property") or attributes.get("name"):
                         attributes["content"] for tag, attributes in
                         Outline(page_of(web, path)).tags if "content" in attributes}
                wanted = {"description": about, "og:description": about,
                          "og:title": name + title, "og:site_name": title}
                if url and is_linked:
                    wanted["og:url"] = url + path
                del found["viewport"], found["color-scheme"]
                self.assertEqual(found, wanted, path)


# --- News ----------------------------------------------------------------------------------------

class NewsTest(unittest.TestCase):
    """With a clock that the tests move. No thread is started: what webhooks are to be told waits
    in `jobs`."""

    def news(self, **settings):
        self.program = make_core(**{"webhooks__ours": "json https://h.example/SECRET", **settings})
        self.registry, self.now, self.gauges = self.program.registry, 1e6, {}
        patch = mock.patch.object(threading.Thread, "start")
        patch.start()
        self.addCleanup(patch.stop)
        self.told = news = ms.News(self.program.settings, self.registry, self.gauges)
        self.tick(news)
        return news

    def note(self, news):
        for event, server in changes_of(self.registry):
            news.note(event, server)

    def tick(self, news):
        self.note(news)
        news.tick(self.now)

    def hear(self, *counts, port=1, game="mygame", address="203.0.113.9", **fields):
        """A server with so many players, one count after another."""
        for players in counts:
            server = self.registry.list_or_refresh(
                (game, address, port), address, self.now, 1e9,
                {"name": "S", "players": players, **fields})
            for event, changed in changes_of(self.registry):
                self.told.note(event, changed)
        return server

    def messages(self, news, seconds=1.0):
        """How many messages wait now; then time passes, as the news are told."""
        self.note(news)
        waiting = [hook.jobs.get() for hook in news.hooks.values()
                   for _ in range(hook.jobs.qsize())]
        self.now += seconds
        self.tick(news)
        return len(waiting)

    def test_servers_that_come_to_have_many_players(self):
        """The players that are heard one after another, or that another master has heard, None if
        the server leaves; after which of it there is a message."""
        for wanted, *steps in (
                ("3", 0, 1, 2, 3), ("2", 0, 65535), ("", 2, 2, 3), ("3", 5, 1, 5), ("", 0, 1, 1, 0),
                ("2", ("b", 0), ("b", 2)), ("", ("b", 5), 5), ("", 5, ("b", 5), 6),
                ("2", ("b", 0), 2),                             # taken over without a "gone"
                ("4", ("b", 5), 5, 0, ("b", 5)),                # and given back
                ("", 0, None, ("b", 2))):                       # a tick later it is a new one
            news, found, key = self.news(), "", ("mygame", "203.0.113.9", 1)
            for number, step in enumerate(steps, 1):
                master, players = step if isinstance(step, tuple) else ("", step)
                server = self.registry.get(*key)
                if players is None:
                    self.registry.remove_any(server)
                elif not master:
                    self.hear(players)
                elif server and server.master:
                    self.registry.update(server, {"players": players})
                else:
                    self.registry.remove_own(server)
                    server = ms.Server(*key, "203.0.113.9", self.now, 1e9, players=players)
                    server.master = master
                    self.registry.insert(server)
                found += str(number) * self.messages(news)
            self.assertEqual(found, wanted, steps)

    def test_not_again_before_its_time(self):
        news = self.news(notify__again_after="100")
        for counts, seconds, told in (((1, 2), 50, 1), ((1, 2), 49, 0), ((1,), 1, 0), ((2,), 1, 1)):
            self.hear(*counts)
            self.assertEqual(self.messages(news, seconds), told)
        # A server that leaves is not forgotten
        self.registry.remove_own(self.registry.get("mygame", "203.0.113.9", 1))
        self.hear(1, 2)
        self.assertEqual(self.messages(news), 0)
        # What another master sends stands in the account of this one as well, which may go on alone
        news, alone = self.news(notify__again_after="100"), True
        news.sender = lambda now: "" if alone else "a"
        for alone, seconds, sent in (False, 50, 0), (True, 60, 0), (True, 1, 1):
            self.hear(0, 2)
            self.assertEqual(self.messages(news, seconds), sent)

    def test_one_source_has_two_messages(self):
        """The addresses that crowd, how many of their messages are sent, while another one's is as
        well; how many more the first of them has then, and how many later."""
        for addresses, sent, more, more_later, settings in (
                (["203.0.113.9"] * 9, 2, 0, 1, {}),
                (["2001:db8::%x" % host for host in range(1, 10)], 2, 0, 1, {}),
                (["2001:db8:0:%x::1" % network for network in range(1, 9)], 8, 1, 1, {}),
                (["203.0.113.9"] * 9, 9, 3, 3, {"limits__exempt": "203.0.113.9"})):
            news = self.news(notify__again_after="1000", **settings)
            for port, address in enumerate(addresses, 1):       # takes the next port each time
                self.registry.remove_own(self.hear(0, 9, port=port, address=address))
            self.hear(0, 2, address="198.51.100.1")
            self.assertEqual(self.messages(news, 400), sent + 1, addresses)
            for first_port, expected in (101, more), (201, more_later):
                for port in range(first_port, first_port + 3):
                    self.registry.remove_own(self.hear(0, 9, port=port, address=addresses[0]))
                self.assertEqual(self.messages(news, 200), expected, addresses)

    def test_players_that_were_not_known_before_are_no_news(self):
        """A restart, a server that answers again, AIO's framed ones before they are asked."""
        for restored in 0, 5:
            news = self.news()
            server = ms.Server("mygame", "203.0.113.9", 1, "203.0.113.9", 0.0, 1e9,
                               players=restored)
            server.confirmed = False
            self.registry.insert(server)
            self.hear(5)
            self.assertEqual(self.messages(news), 0)
        answers = self.hear(0, port=2, responding=False)
        framed = self.hear(0, port=3, game="aio", room="aio")
        for server, told, fields in (
                (answers, 0, {"responding": True, "players": 5}), (answers, 0, {"players": 1}),
                (answers, 1, {"players": 2}), (framed, 0, {"players": 5, "version": "134"}),
                (framed, 0, {"players": 0}), (framed, 1, {"players": 5}),
                (framed, 0, {"players": 0})):
            self.registry.update(server, fields)
            self.assertEqual(self.messages(news), told)
        for server in self.registry.servers():
            self.registry.remove_own(server)
        self.tick(news)
        # nothing is kept of them
        self.assertEqual(news.below_threshold, set())

    def test_only_what_the_ini_wants(self):
        for settings, wanted in (
                ({}, "123"), ({"notify__games": "iceball, b"}, "13"),
                ({"notify__players": "4"}, ""),
                ({"notify__official_only": "yes", "official__198.18.0.2:2": "yes"}, "2"),
                ({"webhooks__two": "text http://b/"}, "123")):
            news = self.news(**settings)
            for port, game in (1, "iceball"), (2, "aio"), (3, "b"):
                self.hear(0, 3, port=port, game=game, address="198.18.0.%d" % port,
                          room=game, max_players=8)
            found = "".join(sorted(str(port) for _, _, port in news.sent_at))
            self.assertEqual({hook.jobs.qsize() for hook in news.hooks.values()}, {len(wanted)})
            self.assertEqual(found, wanted, settings)
        with mock.patch.object(threading.Thread, "join"):
            reload(self.program, news)
        self.hear(0, 3, port=9)
        self.assertEqual((news.hooks, len(news.sent_at)), ({}, 3))

    def test_sources_take_turns(self):
        """A /48 makes news before an honest server does. The one that waits and loses its players
        is no news."""
        for players, told in (5, True), (0, False):
            news = self.news()
            for host in range(12):
                self.hear(0, 5, address="2001:db8:9:%x::1" % host)
            self.hear(0, 5, players, address="198.51.100.9")
            self.assertEqual(self.messages(news, 13), 10)
            self.assertEqual((("mygame", "198.51.100.9", 1) in news.sent_at,
                              self.gauges["news_dropped_total"]), (told, 0))

    def test_a_flood_is_ten_messages_and_bounded(self):
        news = self.news(notify__again_after="60")
        sent = 0
        with mock.patch.object(ms, "KNOWN_SERVERS", 5):
            for _ in range(3):                          # minutes
                for players, host in itertools.product((0, 2), range(1000)):
                    self.hear(players, address="198.18.%d.%d" % divmod(host, 250))
                sent += self.messages(news, 60)
        self.assertEqual((sent, self.gauges["news_dropped_total"]), (30, 2950))
        self.assertEqual((news.below_threshold, len(news.sent_at)), (set(), 5))

    NAMES = ("@everyone @here", "<@&1> <!channel> &lt; &", "[a](http://b) http://c www.d.e",
             "**x**", "`x` ``` ~~x~~ _x_ __", '" \\" $name %s', "日本 # 1. > -",
             "||x|| :smile: <t:1:R> #general")

    def test_the_bodies(self):
        for name in self.NAMES:
            server = make_server(name=name, map=name, players=7)
            settings = ms.Settings({"http.url": "https://games.example"})
            text = "7 of 32 are playing on %s (Iceball, map %s) https://games.example%s" % (
                name, name, ms.server_link(server))
            entry = ms.with_times(ms.server_json(server), server, WALL, "")
            bodies = {}
            titles = {"iceball": "Iceball"}
            for format in "discord", "slack", "text", "json":
                type, body = ms.news_message(format, server, titles, settings, entry)
                bodies[format] = body.decode("utf-8")
                self.assertEqual(type, "text/plain; charset=utf-8" if format == "text" else
                                 "application/json; charset=utf-8")
            self.assertEqual(bodies["text"], text)
            row = json.loads(entry)
            self.assertEqual(json.loads(bodies["json"]),
                             {"event": "players", "text": text, "server": row})
            self.assertEqual((row["name"], row["last_seen"]), (name, int(WALL) - 12))
            discord, slack = json.loads(bodies["discord"]), json.loads(bodies["slack"])
            self.assertEqual(discord["allowed_mentions"], {"parse": []})
            # Read as CommonMark reads it, every mark is text
            self.assertEqual(re.sub(r"\\([!-/:-@[-`{-~])", r"\1", discord["content"]), text)
            names = discord["content"].partition("https")[0]
            self.assertNotRegex(re.sub(r"\\.", "", names).replace("(Iceball, map ", ""),
                                r"[!-'*-/:-@[-`{-~]")
            self.assertEqual(html.unescape(slack["text"]).replace("\u200b", ""), text)
            self.assertNotRegex(slack["text"].partition("https")[0],
                                r"[<>]|@\w|\]\(|:[/\w]|\.\w|#\w|\*\u200b\*|&(?!lt;|gt;|amp;)")
        empty = make_server(name="", map="", max_players=0, game="own")
        for text, settings in (
                ("3 of ? are playing on 192.0.2.1:27790 (own, map ?)", {}),
                ("3 Mine $x", {"notify.text": "$players $game $x", "games.own": "Mine"})):
            settings = ms.Settings(settings)
            self.assertEqual(ms.news_message("text", empty, settings["games"], settings, b""),
                             ("text/plain; charset=utf-8", text.encode()))

    def test_failures_are_tried_again_and_told_once(self):
        """Statuses, the seconds that are left, the pauses and what is logged: a webhook does not
        wait for a time at which the message is no news any more."""
        for answers, left_s, pauses, lines in (
                ((("500", ""), ("204", "")), math.inf, [5], ["500", "204"]),
                ((("404", ""), ("timeout", ""), ("302", "")), math.inf, [5, 5], ["404"]),
                ((("429", "7"), ("429", "2"), ("429", ""), ("429", "x"), ("200", "")), math.inf,
                 [7, 2, 5, 5], ["429", "200"]),
                ((("429", "99999"), ("429", "0"), ("503", "60"), ("204", "")), math.inf,
                 [5, 5, 60], ["429", "204"]),
                ((("429", "999"),), 120.0, [], ["429"])):
            hook = ms.Webhook("ours", "json https://h.example/SECRET")
            with self.assertLogs("masterserver", "WARNING") as logged, \
                    mock.patch.object(ms, "post_url", side_effect=answers) as posted, \
                    mock.patch.object(ms.time, "sleep") as slept:
                hook.deliver(time.monotonic() + left_s, "text/plain", b"b")
            self.assertEqual(posted.mock_calls, len(answers) * [
                mock.call("https://h.example/SECRET", "text/plain", b"b")])
            self.assertEqual(slept.mock_calls, [mock.call(pause) for pause in pauses])
            self.assertEqual([line.rpartition(": ")[2] for line in logged.output], lines)
            self.assertNotIn("SECRET", str(logged.output))
            self.assertIn("webhook ours", logged.output[0])
        with mock.patch.object(ms, "post_url") as posted:
            hook.deliver(time.monotonic(), "text/plain", b"old")
        posted.assert_not_called()

    def test_a_full_queue(self):
        news = self.news(webhooks__hangs="text http://hangs/", notify__again_after="0")
        for _ in range(ms.WORKER_JOBS + 9):             # nothing of it is taken
            self.hear(0, 2)
            self.now += 6.0
            self.tick(news)
        old = list(news.hooks.values())
        self.assertEqual([hook.jobs.qsize() for hook in old], [ms.WORKER_JOBS] * 2)
        with mock.patch.object(threading.Thread, "join"):
            reload(self.program, news, webhooks__third="text http://third/")
        with mock.patch.object(ms, "post_url") as posted:
            for hook in old:
                hook.work()                             # ends, and tells what waits to nobody
        posted.assert_not_called()
        self.hear(0, 2, address="198.51.100.1")
        self.assertEqual(self.messages(news), 1)

    def test_a_reload_stops_nothing_that_stays(self):
        """A message that is tried again when the settings are read: by the line of its webhook
        then, how often it is posted in all."""
        ours = "json https://h.example/SECRET"
        for lines, tries in (({"ours": ours}, 3), ({"ours": ours, "new": "text http://n/"}, 3),
                             ({"ours": "text http://elsewhere/"}, 1), ({"other": ours}, 1),
                             ({}, 1)):
            news = self.news()
            self.hear(0, 2)
            settings = {"webhooks__" + name: line for name, line in lines.items()}

            def read_settings(seconds, news=news, settings=settings):
                reload(self.program, news, **settings)
            with mock.patch.object(ms.log, "warning"), \
                    mock.patch.object(threading.Thread, "join"), \
                    mock.patch.object(ms, "post_url", return_value=("500", "")) as posted, \
                    mock.patch.object(ms.time, "sleep", side_effect=read_settings):
                tell, _ = news.hooks["ours"].jobs.get()
                tell()
            self.assertEqual(posted.call_count, tries, lines)
            self.assertEqual({name: hook.line for name, hook in news.hooks.items()}, lines)


class Receiver(http.server.ThreadingHTTPServer):
    """Takes webhooks; the path says what it answers. `got`: path, body, type and time of each."""

    daemon_threads, request_queue_size = True, 64

    def __init__(self):
        super().__init__(("127.0.0.1", 0), ReceiverHandler)
        self.got, self.works = [], threading.Event()
        self.url = "http://127.0.0.1:%d" % self.server_address[1]
        threading.Thread(target=self.serve_forever, args=(.05,), daemon=True).start()

    def close(self):
        self.works.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        pass                            # TLS that fails, a client that has gone


class ReceiverHandler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.got.append((self.command + " " + self.path, body.decode("utf-8"),
                                self.headers["Content-Type"], time.monotonic()))
        what = self.path.split("/")[1]
        if what == "hang" and not self.server.works.is_set():
            self.server.works.wait(2 * SOON_S)
            return
        self.send_response(204 if not what.isdigit() or self.server.works.is_set() else int(what))
        self.send_header("Location", self.server.url + "/elsewhere")
        if what == "429":
            self.send_header("Retry-After", "2")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *arguments):
        pass


CLOSED = "http://127.0.0.1:1/SECRET"        # nobody listens there


class WebhookTest(unittest.TestCase):
    """Over real sockets, to a receiver of our own."""

    def setUp(self):
        self.receiver = Receiver()
        self.addCleanup(self.receiver.close)
        patch = mock.patch.object(ms, "WEBHOOK_S", SOON_S)
        patch.start()
        self.addCleanup(patch.stop)

    def test_what_a_url_answers(self):
        for url, answer in (
                (self.receiver.url + "/ok", ("204", "")),
                (self.receiver.url + "/429", ("429", "2")),
                (self.receiver.url + "/302", ("302", "")),      # which is not followed
                (CLOSED, ("ConnectionRefusedError", "")), ("SECRET", ("ValueError", "")),
                ("http://no.invalid/", ("gaierror", "")),
                ("http://127.0.0.1:1x/", ("InvalidURL", ""))):
            self.assertEqual(ms.post_url(url, "text/plain", b"b"), answer)
        self.assertEqual([got[0] for got in self.receiver.got],
                         ["POST /ok", "POST /429", "POST /302"])

    @needs_openssl
    def test_a_bad_certificate(self):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.TemporaryDirectory() as folder:
            context.load_cert_chain(*make_certificate(folder, "localhost"))
        self.receiver.socket = context.wrap_socket(self.receiver.socket, server_side=True)
        url = self.receiver.url.replace("http:", "https:") + "/SECRET"
        self.assertEqual(ms.post_url(url, "text/plain", b"b"), ("SSLCertVerificationError", ""))
        self.assertEqual(self.receiver.got, [])

    def test_in_the_program(self):
        """Announcements are answered and good webhooks told at once, though others hang or fail.
        The log has one line of each that fails, and one when it works again."""
        hooks = {"ours": "discord %s/ok", "hang": "text %s/hang/SECRET",
                 "down": "text %s/404/SECRET", "busy": "json %s/429/SECRET"}
        settings = {"webhooks__" + name: hook % self.receiver.url for name, hook in hooks.items()}
        with mock.patch.multiple(ms, WEBHOOK_RETRY_S=0.1, TICK_S=0.1), \
                self.assertLogs("masterserver", "WARNING") as logged, \
                master(http__ports="0", games__mygame="My Game", limits__requests="1000",
                       notify__text="$players on $name", **settings) as server:
            def announce(players):
                body = b"game=mygame&port=5&name=A+name&players=%d" % players
                answer = fetch(port_of(server, "http"), "/announce", method="POST", body=body)
                self.assertEqual(answer[0], 200)
                eventually(lambda: not server.registry.changes)

            def told(path):
                return [got for got in self.receiver.got if got[0].startswith("POST " + path)]

            for players in 0, 2, 3, 4:
                announce(players)
            eventually(lambda: told("/ok") and len(told("/404")) == 3 and told("/hang"))
            self.assertEqual(json.loads(told("/ok")[0][1])["content"], "2 on A name")
            self.assertEqual((len(told("/ok")), len(told("/hang"))), (1, 1))
            self.assertIn(b"masterserver_news_dropped_total 0\n",
                          fetch(port_of(server, "http"), "/metrics")[2])
            eventually(lambda: told("/429"))
            self.receiver.works.set()
            eventually(lambda: "busy answers: 204" in "".join(logged.output))
        eventually(lambda: "masterserver webhook ours" not in
                   [thread.name for thread in threading.enumerate()])
        lines = "\n".join(logged.output)
        for secret in "SECRET", "127.0.0.1:%d" % self.receiver.server_address[1]:
            self.assertNotIn(secret, lines)
        self.assertEqual([lines.count(words) for words in (
            "ours answers", "down answers: 404", "busy answers: 429")], [0, 1, 1])

    def test_the_command(self):
        good, bad = self.receiver.url + "/ok", self.receiver.url + "/404/SECRET"

        def run(*words):
            return command("notify", "--config", os.devnull, "--set", "webhooks.good=slack " + good,
                           "--set", "webhooks.bad=text " + bad, *words)
        self.assertEqual(run("good"), (0, "good: 204\n", ""))
        self.assertEqual(json.loads(self.receiver.got[-1][1]),
                         {"text": "5 of 16 are playing on A test of the news (Iceball, map "
                                  "castle)"})
        self.assertEqual(run(), (1, "good: 204\nbad: 404\n", ""))
        for words in (run("other"), run(bad), command("notify", "--config", os.devnull)):
            self.assertEqual(words[:2], (2, ""))
            self.assertIn("[webhooks] has no such NAME", words[2])
            self.assertNotIn("SECRET", words[2])

    def test_no_error_tells_a_url(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "some.ini")
            for line, words in (
                    ("ours = discordd https://h/SECRET", r"\[webhooks\] ours = …: expected FORMAT"),
                    ("ours = discord h/SECRET", "begins with https://"),
                    ("ours = text ftp://h/SECRET", "begins with https://"),
                    ("ours = text https://me:SECRET@h/", "begins with https://"),
                    ("ours = text https://h/a\n  SECRET", "begins with https://"),
                    ("my hook = text https://h/SECRET", r"\[webhooks\] my hook = …: expected 1 to"),
                    ("discord https://h/SECRET?a=b", r"] discord https://… = …: expected FORMAT"),
                    ("ours discord https://h/SECRET", "line 2")):
                with open(path, "w", encoding="utf-8") as file:
                    file.write("[webhooks]\n%s\n" % line)
                status, out, err = command("--config", path, "--check")
                self.assertEqual((status, out), (2, ""), line)
                self.assertRegex(err, "some.ini.*" + words)
                self.assertNotIn("SECRET", err)
            with open(path, "w", encoding="utf-8") as file:
                file.write("ours = text https://h/SECRET")
            self.assertNotIn("SECRET", command("--config", path, "--check")[2])
        self.assertNotIn("SECRET", command("--set", "webhooks.ours text https://h/SECRET")[2])


# --- Event loop ----------------------------------------------------------------------------------

class MirrorProtocol(ms.UdpProtocol):
    """As many answers as the first byte says, each as it came; without a byte it fails."""

    def datagram(self, data: bytes, peer: ms.Peer, now: float) -> ms.Replies:
        if data == b"\n\xe2":
            raise ms.Malformed("no mirror image")
        return [(data, (peer[0], peer[1]) if len(data) % 2 else peer)] * data[0]


class UdpSocketTest(unittest.TestCase):
    """Both ways to read and answer, over real sockets: a system call each, and one for many."""

    def make(self, vector: Optional[ms.MessageVector]) -> ms.UdpSocket:
        sock = ms.bound_socket(socket.AF_INET, "udp", "127.0.0.1", 0)
        self.addCleanup(sock.close)
        return ms.UdpSocket("mirror", sock, MirrorProtocol(), ms.Tally(), ms.Limiter((1e6, 1e6)),
                            make_core().registry, vector)

    def ways(self) -> Iterable[ms.UdpSocket]:
        for vector in (None, ms.MessageVector.create()):
            with self.subTest(way=vector):
                yield self.make(vector)

    def read(self, place: ms.UdpSocket, number: int) -> None:
        """Have it read until it has received so many datagrams: a busy system delivers late."""
        def all_received() -> bool:
            place.on_readable(0.0)
            return place.tally.received >= number
        eventually(all_received)

    def game(self, host: str = "127.0.0.1") -> socket.socket:
        game = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.addCleanup(game.close)
        game.bind((host, 0))
        game.settimeout(SOON_S)
        return game

    def send(self, place: ms.UdpSocket, *packets: bytes) -> socket.socket:
        """Have it read these packets of a game server; its socket, for the answers."""
        game = self.game()
        for data in packets:
            game.sendto(data, place.sock.getsockname())
        self.read(place, len(packets))
        return game

    def test_the_systems_that_have_a_vector(self) -> None:
        wanted = (sys.platform == "linux" and sys.maxsize > 1 << 32
                  and sys.implementation.name == "cpython")
        self.assertEqual(ms.MessageVector.create() is not None, wanted)
        refusing = SimpleNamespace(
            recvmmsg=lambda *arguments: ctypes.set_errno(errno.ENOSYS), sendmmsg=None)
        for library in (refusing, SimpleNamespace()):
            with mock.patch.object(ctypes, "CDLL", mock.Mock(return_value=library)):
                self.assertIsNone(ms.MessageVector.create())

    def test_each_peer_gets_its_own_answers(self) -> None:
        rng = random.Random(7)
        for place in self.ways():
            wanted: Dict[socket.socket, List[bytes]] = {}
            linux = sys.platform == "linux"             # which has the whole of 127.0.0.0/8
            games = [self.game("127.0.0.%d" % (number + 1) if linux else "127.0.0.1")
                     for number in range(30)]
            for turn in range(3):
                for game, _ in itertools.product(games, range(5)):
                    size = rng.choice((1, 85, 86, 1499))
                    data = bytes([rng.choice((0, 1, 1, 2)), *rng.choices(range(256), k=size)])
                    game.sendto(data, place.sock.getsockname())
                    wanted.setdefault(game, []).extend([data] * data[0])
                self.read(place, 150 * (turn + 1))      # 150 are more than it reads at once
            for game, answers in wanted.items():
                self.assertEqual(sorted(game.recv(4096) for _ in answers), sorted(answers))
                game.setblocking(False)
                self.assertRaises(BlockingIOError, game.recv, 4096)
            sent = [data for answers in wanted.values() for data in answers]
            tally = place.tally
            self.assertEqual((tally.received, tally.sent, tally.unsent, tally.errors),
                             (450, len(sent), 0, 0))
            self.assertEqual(tally.bytes_out, sum(map(len, sent)))

    def test_a_long_datagram_is_cut_and_a_bad_one_costs_itself_alone(self) -> None:
        for place in self.ways():
            with self.assertLogs("masterserver", "DEBUG") as logs:
                game = self.send(place, b"\1" * 5000, b"", b"\n\xe2", b"\1x")
            self.assertEqual((game.recv(8000), game.recv(8000)),
                             (b"\1" * ms.MAX_DATAGRAM_BYTES, b"\1x"))
            self.assertIn("IndexError", logs.output[0])         # of the mirror, which wants a byte
            self.assertRegex(logs.output[1], r"^DEBUG:masterserver:127\.0\.0\.1:\d+ mirror "
                             r"malformed: no mirror image: b'\\n\\xe2'$")
            self.assertEqual((place.tally.received, place.tally.errors, place.tally.malformed),
                             (4, 1, 1))

    def test_a_flood_in_its_name_does_not_keep_out_what_a_server_repeats(self) -> None:
        for place in self.ways():
            core = make_core(limits__exempt="")
            place.protocol, place.limiter = ms.Iceball(core), ms.Limiter((0.001, 2))
            place.registry = core.registry
            game = self.game()
            peer = game.getsockname()
            (msok, _), = deliver(place.protocol, CAPTURED, peer)
            deliver(place.protocol, b"HSHK" + msok[4:], peer)
            deliver(place.protocol, CAPTURED, peer)
            listed, = core.registry.servers()
            for number in range(5):
                game.sendto(b"x", place.sock.getsockname())
            game.sendto(CAPTURED, place.sock.getsockname())
            listed.last_seen = -100.0
            self.read(place, 6)
            self.assertEqual((place.tally.limited, listed.last_seen), (4, 0.0))

    def test_what_a_stranger_sends_counts_as_unproven(self) -> None:
        for place in self.ways():
            core = make_core()
            place.protocol, place.registry = ms.Iceball(core), core.registry
            game = self.game()
            game.sendto(b"x", place.sock.getsockname())
            self.read(place, 1)
            self.assertEqual((len(core.registry.outcomes), *core.registry.unproven_outcomes.things),
                             (0, ("127.0.0.1", "iceball", 0)))

    def test_a_peer_that_cannot_be_answered_delays_no_other(self) -> None:
        for place in self.ways():
            game = self.game()
            game.sendto(b"x", place.sock.getsockname())
            self.assertTrue(select.select([place.sock], [], [], SOON_S)[0])
            if place.vector:
                _, _, (good,) = place.vector.receive(place.sock)
                answers = [(b"y", good[:2] + bytes(2) + good[4:]), (b"y", good)] * 2    # port 0
                place.vector.send(place.sock, answers, place.tally)
            else:
                _, _, (good,) = place.receive()
                place.send([(b"y", to) for to in (("127.0.0.1", 0), good, ("", 1 << 16), good)])
            self.assertEqual([game.recv(9) for _ in range(2)], [b"y"] * 2)
            tally = place.tally
            self.assertEqual((tally.sent, tally.unsent, tally.bytes_out), (2, 2, 2))

    def test_more_answers_than_fit_at_once(self) -> None:
        for place in self.ways():
            place.protocol.datagram = lambda data, peer, now: [     # type: ignore[method-assign]
                (data * 10, peer)] * 8
            game = self.send(place, *[b"x" * 1500] * 20)            # 160 answers, 2.4 MB
            self.assertEqual(game.recv(60000), b"x" * 15000)
            self.assertEqual(place.tally.bytes_out, 160 * 15000)

    def test_what_other_systems_do(self) -> None:
        """Windows tells of a closed port where the next datagram is read; a port there is nobody
        else's, and select() serves 512 sockets. The BSDs refuse a large buffer."""
        place = self.make(None)
        reads = itertools.chain([ConnectionResetError()],
                                itertools.repeat((b"\1" * 5000, ("203.0.113.9", 1)), 9999))
        place.sock = mock.Mock(recvfrom=mock.Mock(side_effect=reads))
        data, _, _ = place.receive()
        self.assertEqual([len(packet) for packet in data],
                         [ms.MAX_DATAGRAM_BYTES] * (ms.DRAIN_DATAGRAMS - 1))
        with mock.patch.object(ms, "WINDOWS", True), mock.patch.object(
                socket, "SO_EXCLUSIVEADDRUSE", -5, create=True):
            options = self.options("tcp")
            self.assertEqual(ms.descriptor_limit(100_000), 512)
        self.assertIn((socket.SOL_SOCKET, -5, 1), options)
        self.assertNotIn((socket.SOL_SOCKET, socket.SO_REUSEADDR, 1), options)
        self.assertEqual(self.options("udp")[-1], (socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20))

    def options(self, transport: str) -> List[Tuple[int, int, int]]:
        """What a socket is given by a system that refuses large buffers, as the BSDs do."""
        given: List[Tuple[int, int, int]] = []

        def setsockopt(*option: int) -> None:
            if option[2] > 1_860_000:
                raise OSError(errno.ENOBUFS, "no room")
            given.append(option)        # type: ignore[arg-type]
        with mock.patch.object(socket, "socket") as made:
            made.return_value.setsockopt = setsockopt
            ms.bound_socket(socket.AF_INET, transport, "127.0.0.1", 0)
        return given


class FloodedWire:
    """A socket without a system: what has arrived, and what was sent."""

    family = socket.AF_INET6

    def __init__(self) -> None:
        self.arrived: Any = collections.deque()
        self.sent: Any = collections.deque()

    def recvfrom(self, size: int) -> Any:
        if not self.arrived:
            raise BlockingIOError
        return self.arrived.popleft()

    def sendto(self, data: bytes, peer: ms.Peer) -> int:
        self.sent.append((data, peer))
        return len(data)


class FloodTest(unittest.TestCase):
    """Forged datagrams in the name of a listed server, so many each second that the limiter drops
    nearly all of its own. It stays for as long as it goes on, and leaves when it ends."""

    sender = ZONE[0], 40000
    identity = b""                      # of a server of Iceball's first draft

    def zone(self, second: int, players: int) -> List[bytes]:
        return [zone_packet(players=players)] if second % 60 == 0 else []

    def draft(self, second: int, players: int) -> List[bytes]:
        if second == 0:
            return [hexa("01 0100 0151 00")]
        number = b"\4" + self.identity + b"\1" + struct.pack("<I", players)
        return [number, b"\5" + self.identity] if second % 30 == 1 else []

    def iceball(self, second: int, players: int) -> List[bytes]:
        return [announcement(players=players)] if second % 40 < 5 else []

    def reply(self, packet: bytes) -> bytes:
        """What the game server answers at the port that it was asked at."""
        if packet.startswith(b"MSOK"):
            return b"HSHK" + packet[4:]
        if packet.startswith(b"\2"):
            self.identity = packet[1:5]
            return b"\5" + self.identity
        return asss(packet) if len(packet) in (4, 8) and packet[:1] != b"\4" else b""

    def arrive(self, now: float, *packets: bytes) -> None:
        self.wire.arrived += [(packet, self.sender) for packet in packets]
        while self.wire.arrived:
            self.place.on_readable(now)
            while self.wire.sent:
                data, peer = self.wire.sent.popleft()
                answer = self.reply(data)
                if answer:
                    self.wire.arrived.append((answer, peer))

    def run_for(self, seconds: Iterable[int], is_there: bool, forged: int) -> None:
        for second in seconds:
            now = float(second)
            self.registry.expire(now)
            self.room.tick(now)
            for query, peer in self.poller.tick(now):
                if is_there:
                    self.poller.datagram(asss(query), peer, now)
            self.arrive(now, *[b"forged"] * forged)
            players = second // 30 if self.is_changing else 0
            if is_there:
                self.arrive(now, *self.announced(second, players))

    def test_a_server_stays_through_a_flood(self) -> None:
        for make, announced, is_changing in (
                (ms.SubSpace, self.zone, False), (ms.SubSpace, self.zone, True),
                (ms.Iceball, self.draft, False), (ms.Iceball, self.draft, True),
                (ms.Iceball, self.iceball, False)):
            with self.subTest(announced=announced.__name__, is_changing=is_changing):
                core = make_core(limits__datagrams="5/20")
                self.registry, self.poller, self.room = core.registry, core.poller, make(core)
                self.announced, self.is_changing, self.wire = announced, is_changing, FloodedWire()
                wire: Any = self.wire
                self.place = ms.UdpSocket("flooded", wire, self.room, ms.Tally(),
                                          core.registry.rules.datagram_limiter, core.registry)
                self.run_for(range(100), True, 0)
                server, = self.registry.servers()
                self.run_for(range(100, 2000), True, 50)
                self.assertEqual(self.registry.servers(), [server])
                self.run_for(range(2000, 3000), False, 50)
                self.assertEqual(self.registry.servers(), [])


class OneAnswer(ms.Session):
    """Answers each byte with so many times itself; "." ends it, "!" fails, "?" cannot be read."""

    def __init__(self, size: int = 1) -> None:
        self.size, self.buffer, self.calls = size, b"", 0

    def opened(self, now: float) -> bytes:
        return b"hello"

    def receive(self, data: bytes, now: float) -> bytes:
        self.calls += 1
        self.buffer += data
        first, self.buffer = self.buffer[:1], self.buffer[1:]
        self.done = self.done or first == b"."
        if first == b"!":
            raise ZeroDivisionError
        if first == b"?":
            raise ms.Malformed("a question mark")
        return first * self.size


class ConnectionTest(unittest.TestCase):
    def make(self, session: ms.Session, server: Optional[ms.MasterServer] = None,
             data: bytes = b"", address: str = "203.0.113.9",
             ) -> Tuple[ms.TcpConnection, socket.socket]:
        """A connection that has read these data, and its peer."""
        if server is None:
            server = bound_master(self)
        ours, theirs = socket.socketpair()
        self.addCleanup(theirs.close)
        self.addCleanup(ours.close)
        for sock in ours, theirs:                   # a pair by way of TCP has room for megabytes
            for option in socket.SO_SNDBUF, socket.SO_RCVBUF:
                sock.setsockopt(socket.SOL_SOCKET, option, 1 << 14)
        ours.setblocking(False)
        theirs.settimeout(SOON_S)
        listener = ms.TcpListener(server, "test", None, None, ms.Tally())
        connection = ms.TcpConnection(listener, ours, address, session)
        server.connections[connection] = None
        server.connections_by_source.take(address)
        if data:
            theirs.sendall(data)
            connection.on_readable(0.0)
            self.all_turns(server, 0.0)
        return connection, theirs

    def all_turns(self, server: ms.MasterServer, now: float) -> None:
        while server.turns:
            server.take_turns(len(server.turns), now)

    def test_all_that_came_is_answered_one_by_one(self) -> None:
        connection, peer = self.make(OneAnswer(3), data=b"abc.d")
        self.assertEqual(peer.recv(100), b"aaabbbccc...")
        self.assertEqual(read_all(peer), b"")
        self.assertEqual((connection.tally.received, connection.tally.bytes_out), (1, 12))

    def test_nothing_is_read_or_made_while_an_answer_waits(self) -> None:
        session = OneAnswer(1 << 20)
        connection, peer = self.make(session, data=b"ab")
        self.assertEqual((session.calls, connection.events), (1, selectors.EVENT_WRITE))
        idle, _ = self.make(OneAnswer(), connection.program)
        got = 0
        while got < 2 << 20:
            got += len(peer.recv(1 << 16))
            if connection.events == selectors.EVENT_WRITE:
                connection.on_writable(1.0)
            self.all_turns(connection.program, 1.0)
        self.assertEqual((session.calls, connection.events), (3, selectors.EVENT_READ))
        # who reads slowly acts
        self.assertIs(next(iter(connection.program.connections)), idle)

    def test_a_reader_that_takes_too_long_is_disconnected(self) -> None:
        for taken in 0, 1 << 12:
            connection, peer = self.make(OneAnswer(8 << 20), data=b"a")
            for second in 1.0, ms.OUTPUT_TOTAL_S - 1:
                peer.recv(taken)
                connection.on_writable(second)
                connection.tick(second)
                self.assertFalse(connection.is_closed)
            connection.tick(ms.OUTPUT_TOTAL_S)
            self.assertTrue(connection.is_closed)

    def test_a_fault_or_bad_input_ends_it_and_says_so(self) -> None:
        """The log has the beginning of what is left of its bytes."""
        for data, counts, logged_bytes in (b"a!", (1, 0), 600), (b"a?", (0, 1), 48):
            with self.assertLogs("masterserver", "DEBUG") as logged:
                connection, peer = self.make(OneAnswer(), data=data + b"b" * 999)
            self.assertRegex(logged.output[0], ": b'b{%d}'(\n|$)" % logged_bytes)
            self.assertEqual(read_all(peer), b"a")
            self.assertEqual((connection.tally.errors, connection.tally.malformed), counts)

    def test_it_ends_without_a_reset(self) -> None:
        """What still comes is read away, up to a bound in bytes and time."""
        for size, now, closed in ((9, 0.1, False), (9, ms.LINGER_S, True),
                                  (ms.LINGER_BYTES + 1, 0.1, True)):
            connection, peer = self.make(OneAnswer(), data=b".")
            self.assertEqual(read_all(peer), b".")
            for _ in range(0, size, 8192):
                with contextlib.suppress(OSError):
                    peer.sendall(b"x" * min(size, 8192))
                if not connection.is_closed:
                    connection.on_readable(now)
            connection.tick(now)
            self.assertEqual(connection.is_closed, closed, (size, now))
        connection, peer = self.make(OneAnswer(), data=b".")
        peer.close()
        connection.on_readable(0.1)
        self.assertTrue(connection.is_closed)

    def test_a_peer_that_sends_no_more_still_gets_its_answers(self) -> None:
        session = OneAnswer()
        session.ended = lambda now: b"bye"          # type: ignore[method-assign]
        connection, peer = self.make(session, data=b"a")
        peer.shutdown(socket.SHUT_WR)
        connection.on_readable(0.0)
        self.assertEqual(read_all(peer), b"abye")
        self.assertTrue(connection.is_closed)

    def test_a_job_for_the_disk(self) -> None:
        """Nothing is read until its result is there, which may need another job; who has gone
        gets none."""
        for gone, again in (False, False), (True, False), (False, True):
            session = OneAnswer()

            def resume(result: bytes, now: float) -> bytes:
                session.job = (lambda: b"more") if again else None
                return b"made " + result

            session.resume = resume                     # type: ignore[method-assign]
            connection, peer = self.make(session)
            session.job = lambda: b"it"
            with mock.patch.object(connection.program.disk, "submit") as submit:
                peer.sendall(b"a")
                connection.on_readable(0.0)
                connection.tick(0.1)
                (job, done, *_), = (call[0] for call in submit.call_args_list)
                self.assertEqual((connection.events, job()), (0, b"it"))
                if gone:
                    connection.close(0.2)
                done(b"it", 1.0)
                self.assertEqual(submit.call_count, 1 + again)
            if not gone:
                self.assertEqual((peer.recv(100), connection.events),
                                 (b"amade it", 0 if again else selectors.EVENT_READ))

    def test_output_for_slow_readers_is_bounded_in_sum(self) -> None:
        """As soon as it waits. An answer that many wait for counts once. Whoever has the most to
        read gives way, and not one who has waited longer for less."""
        honest, other, size = "192.0.2.1", "192.0.2.2", 1 << 20
        sources = ["198.51.100.%d" % number for number in range(4)]
        site = ["2001:db8:5:%d::1" % number for number in range(4)]
        for readers, most, left in (
                ([honest] + sources[:1] * 8, 9, [honest] + sources[:1] * 8),
                ([honest] + sources[:1] * 8, 3, [honest] + sources[:1] * 2),
                ([honest] * 2 + sources[:1] * 8, 5, [honest] * 2 + sources[:1] * 3),
                ([honest] + sources * 3, 5, [honest] + sources),
                ([honest, other] + site, 4, [honest, other] + site[2:])):
            server, connections = bound_master(self), []
            with mock.patch.object(ms, "OUTPUT_BYTES", most * size):
                for number, address in enumerate(readers):
                    has_read = size // 8 if address in (honest, other) else 0
                    connection, _ = self.make(OneAnswer(size - has_read), server, address=address)
                    connections.append(connection)
                    connection.answer(float(number), connection.session.receive, b"x")
                    self.assertLessEqual(server.unread.total_bytes, most * size)
            self.assertEqual(sorted(connection.address for connection in server.connections),
                             sorted(left))
            shared = bytes(size)
            for connection in connections:
                connection.close(9.0)
            self.assertEqual((server.unread.total_bytes, server.unread.readers), (0, {}))
            with mock.patch.object(ms, "OUTPUT_BYTES", size):
                for address in readers:
                    session = OneAnswer()
                    session.receive = lambda data, now: shared      # type: ignore[method-assign]
                    connection, _ = self.make(session, server, address=address)
                    connection.answer(9.0, session.receive, b"x")
                self.assertEqual(len(server.connections), len(readers))

    def test_sources_that_wait_for_the_same_answer_share_its_bytes(self) -> None:
        """Many readers of the list in a school, and of one address, are not who holds the most."""
        school, single = "192.0.2.1", "192.0.2.2"
        attackers = ["198.51.100.%d" % number for number in range(4)]
        shared, own = bytes(3 << 20), 1 << 20
        server = bound_master(self)
        with mock.patch.object(ms, "OUTPUT_BYTES", len(shared) + 5 * own):
            for address in [school] * 6 + [single] + attackers * 3:
                session = OneAnswer(own)
                if address in (school, single):
                    session.receive = lambda data, now: shared      # type: ignore[method-assign]
                connection, _ = self.make(session, server, address=address)
                connection.answer(0.0, session.receive, b"x")
        left = collections.Counter(connection.address for connection in server.connections)
        self.assertEqual((left[school], left[single]), (6, 1))
        self.assertLessEqual(sum(left[address] for address in attackers), 5)

    def test_the_source_with_the_most_makes_room(self) -> None:
        """The connections, the idlest first, and the order in which they make room: by their
        places, those that have had their answers (".") first, and game servers ("+") last."""
        site = ["2001:db8:5:%d::1" % number for number in range(3)]
        for addresses, order in (
                ("a a a", "012"), ("h a a a", "1203"), ("a h a b a b", "023145"),
                ("h+ h+ h+ a b", "34012"), ("h a a a.", "3102"), ("h e e e a a", "401235"),
                (" ".join(["h", *site]), "1203")):
            server = bound_master(self, limits__exempt="192.0.2.5")
            made = []
            for address in addresses.split():
                session = OneAnswer()
                session.kept, session.done = address.endswith("+"), address.endswith(".")
                name = address.strip("+.")
                connection, _ = self.make(session, server, address=name if ":" in name else
                                          "192.0.2.%d" % (ord(name) - ord("`")))
                made.append(connection)
            closed = ""
            while server.connections:
                connection.listener.close_least_needed(0.0)
                closed += "".join(str(place) for place, one in enumerate(made)
                                  if one.is_closed and str(place) not in closed)
            self.assertEqual(closed, order, addresses)

    def test_a_closed_connection_has_no_turn(self) -> None:
        connection, _ = self.make(OneAnswer())
        for method in connection.take_turn, connection.tick:
            connection.wait_for_turn(method)
        connection.close(0.0)
        self.assertEqual(len(connection.program.turns), 0)

    def test_turns_have_their_time_however_late_it_is(self) -> None:
        """The datagrams of a round do not use it up."""
        server = bound_master(self)
        calls: List[float] = []
        for number in range(5):
            server.turns.add("192.0.2.1", number, calls.append)
        with mock.patch.object(ms, "TURNS_S", 60.0):
            server.take_turns(5, time.monotonic() - 120.0)
        self.assertEqual(len(calls), 5)

    def test_a_round_is_short_and_sources_take_turns(self) -> None:
        """Of many messages in a packet one is answered, then it is the others' turn, one source
        after another: an IPv6 site is one, and an exempt address waits for none of its own."""
        honest, exempt = "192.0.2.1", "127.0.0.1"
        site = ["2001:db8:5:%d::1" % number for number in range(3)]
        for addresses, order in (
                (["198.51.100.1"] * 3 + [honest], "adbdcdadbdcd"), (site + [honest], "adbdcdad"),
                ([exempt] * 2 + [honest], "abcabc")):
            server = bound_master(self, limits__exempt="127.0.0.0/8")
            answered: List[str] = []
            for name, address in zip("abcd", addresses):
                session = OneAnswer()
                connection, peer = self.make(session, server, address=address)

                def receive(data: bytes, now: float, session: ms.Session = session,
                            name: str = name, receive: Any = session.receive) -> bytes:
                    answered.append(name)
                    return receive(data, now)

                session.receive = receive                   # type: ignore[method-assign]
                peer.sendall(b"x" * 45)
            with mock.patch.object(ms, "TURNS_S", 0.0):
                server.next_connection_tick = math.inf
                for number in range(len(order) + 1):                # first they get in line
                    server.handle_events(0.0)
                    self.assertEqual("".join(answered), order[:number])

    def test_connections_that_come_at_once_wait_for_their_turn(self) -> None:
        """So do those that are spoken to first, and those whose time is over."""
        for protocol in "http", "hyperbol":
            server = bound_master(self, **{protocol + ("__ports" if protocol == "http" else
                                                       "__port"): "0"})
            clients = [connect(server, protocol) for _ in range(5)]
            for client in clients:
                self.addCleanup(client.close)
                if protocol == "http":
                    client.sendall(http_request("/healthz"))
            tally = server.tallies[protocol]
            with mock.patch.object(ms, "TURNS_S", 0.0):
                server.next_connection_tick = math.inf
                for most in range(1, 5):
                    server.handle_events(0.0)
                    self.assertLessEqual(tally.sent, most)
            eventually(lambda: server.handle_events(0.0) or tally.sent == 5)
            with mock.patch.object(ms, "TURNS_S", 0.0):
                server.next_connection_tick = 0.0
                with mock.patch.object(ms.TcpConnection, "tick") as tick:
                    server.handle_events(0.0)
                    self.assertLessEqual(tick.call_count, 1)

    def test_a_list_is_rendered_in_turns_and_paid_for_once(self) -> None:
        """With eight new servers, one at a turn: others are answered meanwhile, and one token is
        enough."""
        for path in "/servers.json", "/?sort=name", "/", "/master.json", "/?q=s8":
            server = bound_master(self, http__ports="0", limits__exempt="", limits__requests="1/60",
                                  iceball__port="0")
            for port in range(1, 9):
                server.registry.list_or_refresh(("iceball", "192.0.2.1", port), "192.0.2.1",
                                                time.monotonic(), 60.0, {"name": "S%d" % port})
            client, other = connect(server, "http"), connect(server, "http")
            for one in client, other:
                self.addCleanup(one.close)
            eventually(lambda: server.handle_events(0.0) or len(server.connections) == 2)
            tally = server.tallies["http"]
            with mock.patch.object(ms, "RENDERED_AT_ONCE", 1), \
                    mock.patch.object(ms, "SEARCHED_AT_ONCE", 1), \
                    mock.patch.object(ms, "TURNS_S", 60.0):         # a round gives it one turn
                client.sendall(http_request(path, "Connection: close"))
                eventually(lambda: server.handle_events(0.0) or server.turns.things)
                server.handle_events(0.0)
                self.assertEqual(tally.sent, 0)
                other.sendall(http_request("/healthz"))
                eventually(lambda: server.handle_events(0.0) or tally.sent)
                self.assertIn(b"200 OK", other.recv(65536))
                eventually(lambda: server.handle_events(0.0) or tally.sent == 2)
            status, _, body, _ = split_response(read_all(client))
            self.assertEqual((status, body.count(b"S8")), (200, 1))
            limiter = server.registry.rules.request_limiter
            self.assertAlmostEqual(limiter.table["127.0.0.1"] - time.monotonic(), 2.0, delta=0.9)

    def test_a_peer_that_has_vanished_is_found_though_data_is_on_its_way(self) -> None:
        if not hasattr(socket, "TCP_USER_TIMEOUT"):
            self.skipTest("the system has no such option")
        with master(hyperbol__port="0") as server, connect(server, "hyperbol"):
            connection = eventually(lambda: next(iter(server.connections), None))
            option = connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            self.assertEqual(option, 120_000)


@mock.patch.object(ms, "AIO_GREETING_S", 999.0)     # whoever is slow to speak is not greeted
# --- HTTPS ---------------------------------------------------------------------------------------

@needs_openssl
class HttpsTest(unittest.TestCase):
    """A master in this process, with a certificate that openssl has made."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.certificate, cls.key = cls.pair(cls.addClassCleanup)

    @staticmethod
    def pair(clean_up: Callable[..., Any], days: int = 30) -> Tuple[str, str]:
        """The paths of a new certificate and its key."""
        folder = tempfile.TemporaryDirectory()
        clean_up(folder.cleanup)
        return make_certificate(folder.name, "localhost", days)

    def start(self, **settings: str) -> ms.MasterServer:
        server = master(**{
            "http__https_ports": "0", "http__ports": "0", "http__certificate": self.certificate,
            "http__key": self.key, "limits__exempt": "127.0.0.0/8",
            "games__mygame": "My Game", **settings})
        self.addCleanup(server.stop)
        server.start()
        return server

    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.certificate)

    def connect(self, server: ms.MasterServer, context: Any = None) -> ssl.SSLSocket:
        client = (context or self.context()).wrap_socket(
            connect(server, "https"), server_hostname="localhost")
        self.addCleanup(client.close)
        return client

    def ask(self, server: ms.MasterServer, data: bytes) -> Tuple[int, Dict[str, str], bytes]:
        with self.connect(server) as client:
            client.sendall(data)
            return split_response(read_all(client))[:3]

    ANNOUNCEMENT = (b"POST /announce HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"
                    b"Content-Length: 21\r\n\r\ngame=mygame&port=2750")

    def request(self, path: str) -> bytes:
        return b"GET %s HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n" % path.encode()

    def test_the_same_as_by_http(self) -> None:
        server = self.start(http__url="https://a.example")
        status, _, body = self.ask(server, self.ANNOUNCEMENT)
        self.assertEqual((status, json.loads(body)["listed"]), (200, True))
        plain_port = port_of(server, "http")
        for path in ms.Web(with_rooms(make_core())).routes:
            if path in ("/announce", "/metrics", ms.DDNET_REGISTER):
                continue
            with self.subTest(path):
                for _ in range(2):              # the second one comes from the cache
                    plain, encrypted = fetch(plain_port, path), self.ask(server, self.request(path))
                    self.assertEqual(encrypted[1].pop("Strict-Transport-Security"), "max-age=86400")
                    self.assertEqual((plain[0], plain[1].keys()),
                                     (encrypted[0], encrypted[1].keys()))
        self.assertEqual(encrypted[2], plain[2])
        without = self.start()
        self.assertNotIn("Strict-Transport-Security", self.ask(without, self.request("/"))[1])

    def test_the_tools_by_https(self) -> None:
        """`list` and `announce`, which trust what the system trusts."""
        server = self.start()
        place = "https://localhost:%d" % port_of(server, "https")
        with mock.patch.dict(os.environ, SSL_CERT_FILE=self.certificate):
            with ms.Announcement("mygame", 2750, place, name="By HTTPS"):
                eventually(lambda: server.registry.total)
            eventually(lambda: not server.registry.total)       # it has signed off
            for game in "iceball", "luanti":
                self.assertEqual(command("list", "--game", game, place), (0, "no servers\n", ""))
        status, _, err = command("list", "--game", "luanti", place)
        self.assertEqual(status, 1)
        self.assertIn("CERTIFICATE_VERIFY_FAILED", err)
        status, _, err = command("list", "--game", "aio", place)
        self.assertEqual((status, "not fetched by HTTPS" in err), (2, True))
        self.assertRaisesRegex(ValueError, "not announced by HTTPS", ms.Announcement, "iceball", 5,
                               place)

    def test_versions_and_protocols(self) -> None:
        server = self.start()
        versions = ssl.TLSVersion
        for lowest, highest, name in ((versions.TLSv1_2, versions.TLSv1_2, "TLSv1.2"),
                                      (versions.TLSv1_3, versions.TLSv1_3, "TLSv1.3"),
                                      (versions.TLSv1, versions.TLSv1_1, "")):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")     # Python says that the last ones are old
                context = self.context()
                context.minimum_version, context.maximum_version = lowest, highest
                context.set_alpn_protocols(["h2", "http/1.1"])
                if not name:
                    self.assertRaises(OSError, self.connect, server, context)
                    continue
                client = self.connect(server, context)
                self.assertEqual((client.version(), client.selected_alpn_protocol()),
                                 (name, "http/1.1"))

    def test_who_speaks_no_tls(self) -> None:
        server = self.start()
        plain = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
        for data in plain, b"\x16", b"\x16\x03\x01\xff\xff" + bytes(100), b"\x16" + bytes(20000):
            with connect(server, "https") as client:
                with contextlib.suppress(OSError):      # it may be closed already
                    client.sendall(data)
                    client.shutdown(socket.SHUT_WR)
                    answer = read_all(client)
            if data == plain:
                status, _, body, rest = split_response(answer)
                self.assertEqual((status, rest), (400, b""))
                self.assertIn(b"This port speaks HTTPS", body)
        self.assertEqual(self.ask(server, self.request("/healthz"))[0], 200)
        eventually(lambda: not server.connections)

    def test_handshakes_that_do_not_end(self) -> None:
        """They are closed in time; others are served meanwhile."""
        hello = ssl.MemoryBIO()
        session = self.context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost")
        self.assertRaises(ssl.SSLWantReadError, session.do_handshake)
        first = hello.read()
        with mock.patch.object(ms, "LINGER_S", 0.1):
            with mock.patch.object(ms, "HTTP_REQUEST_S", 1.0):      # for these alone
                server = self.start(limits__connections_open="500")
                stalled = [connect(server, "https") for _ in range(60)]
                eventually(lambda: server.tallies["https"].connections == len(stalled))
            for number, client in enumerate(stalled):
                self.addCleanup(client.close)
                with contextlib.suppress(OSError):          # on a busy machine it is closed already
                    client.sendall(first[:number * 10 % len(first)])
            self.assertEqual(self.ask(server, self.request("/healthz"))[0], 200)
            for client in stalled:
                with contextlib.suppress(ConnectionResetError):
                    read_all(client)
            eventually(lambda: not server.connections)

    def test_a_limit_of_its_source(self) -> None:
        server = self.start(limits__exempt="", limits__connections_open="2")
        first = [self.connect(server) for _ in range(2)]
        self.assertRaises(OSError, self.connect, server)
        first[0].close()
        eventually(lambda: server.connections_by_source.total < 2)
        self.connect(server)

    def test_records_of_every_size(self) -> None:
        """Two kilobytes byte by byte, many requests in one record, and what follows a request."""
        server = self.start()
        client = self.connect(server)
        request = self.request("/healthz?" + "x" * 2000)
        for at in range(len(request)):
            client.sendall(request[at:at + 1])
        self.assertEqual(split_response(read_all(client))[0], 200)
        client = self.connect(server)
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n" * 20
                       + self.request("/healthz"))
        self.assertEqual(read_all(client).count(b"HTTP/1.1 200"), 21)
        client = self.connect(server)
        client.sendall(self.request("/healthz") + b"x" * 100000)
        self.assertEqual(split_response(client.recv(65536))[0], 200)

    def test_a_slow_reader_of_a_long_list(self) -> None:
        server = self.start(limits__servers_per_source="100000")

        def fill(now: float) -> None:
            for number in range(1, 9001):
                server.registry.list_or_refresh(
                    ("mygame", "203.0.113.9", number), "203.0.113.9", now, 600.0,
                    {"name": "A server %d" % number, "map": "m" * 60, "description": "d" * 100})
        server.post(fill)
        eventually(lambda: server.registry.total >= 9000)
        client = self.connect(server)
        client.sendall(self.request("/servers.json"))
        pieces = [client.recv(1 << 20)]
        while pieces[-1]:
            time.sleep(0.002 if len(pieces) < 60 else 0)
            pieces.append(client.recv(1 << 20))
        status, _, body, rest = split_response(b"".join(pieces))
        self.assertEqual((status, rest, len(json.loads(body)["servers"])), (200, b"", 9000))

    def test_clients_that_end_in_their_own_way(self) -> None:
        """With close_notify or without it, before and after an answer."""
        server = self.start()
        for request, ends in itertools.product(
                (b"", b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n", b"GET /heal"), range(3)):
            client = self.connect(server)
            client.sendall(request)
            if request.endswith(b"\r\n\r\n"):
                self.assertIn(b"HTTP/1.1 200", client.recv(65536))
            if ends == 0:
                client.settimeout(SOON_S)
                client.unwrap()
            elif ends == 1:
                socket.socket.shutdown(client, socket.SHUT_WR)
            client.close()
        reset = struct.pack("ii", 1, 0)
        for data in (b"", b"\x16", b"\x16\3\1\0\5hello", b"GET / HTTP/1.1\r\n") * 20:
            client_socket = connect(server, "https")
            client_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            client_socket.sendall(data)
            client_socket.close()
        eventually(lambda: not server.connections)
        self.assertEqual(server.tallies["https"].errors, 0)
        self.assertEqual(server.connections_by_source.counts, {})

    def test_a_renewed_certificate(self) -> None:
        """It is taken up by itself; a pair that does not fit leaves the old one in force."""
        paths, new_paths = self.pair(self.addCleanup), self.pair(self.addCleanup, days=40)
        settings = ms.Settings({
            **NO_PORTS, "http.https_ports": "0", "http.certificate": paths[0],
            "http.key": paths[1], "limits.exempt": "127.0.0.0/8"})
        settings.found = True
        server = ms.MasterServer(settings, reload=lambda: settings)
        self.addCleanup(server.stop)
        server.start()

        def is_served(path: str) -> bool:
            """Is this the certificate that a client trusts?"""
            try:
                self.connect(server, ssl.create_default_context(cafile=path)).close()
            except OSError:
                return False
            return True

        def replace(path: str, new_path: str) -> None:
            """Nobody finds the file half written, of which the log would tell instead."""
            shutil.copy(new_path, path + ".new")
            os.replace(path + ".new", path)
        with self.assertLogs("masterserver", "ERROR") as logged:
            replace(paths[0], new_paths[0])
            eventually(lambda: "does not belong to it" in "".join(logged.output))
        self.assertFalse(is_served(new_paths[0]))
        eventually(lambda: "does not belong to it" in server.health.get("new certificate", ""))
        with self.assertLogs("masterserver", "INFO") as logged:
            replace(paths[1], new_paths[1])
            eventually(lambda: is_served(new_paths[0]))
        self.assertIn("a new certificate is in force, which expires on 2", "".join(logged.output))

    def test_files_that_cannot_be_used(self) -> None:
        other, other_key = self.pair(self.addCleanup)
        folder = os.path.dirname(other)

        def write(name: str, data: bytes) -> str:
            path = os.path.join(folder, name)
            with open(path, "wb") as file:
                file.write(data)
            return path
        with open(self.certificate, "rb") as certificate_file, open(self.key, "rb") as key_file:
            certificate, key = certificate_file.read(), key_file.read()
        locked, old_locked = os.path.join(folder, "l"), os.path.join(folder, "o")
        openssl("pkcs8", "-topk8", "-in", self.key, "-out", locked, "-passout", "pass:x")
        openssl("ec", "-in", self.key, "-aes128", "-passout", "pass:x", "-out", old_locked)
        both = write("both", key + certificate)
        self.assertIsNotNone(ms.load_certificate(self.settings(both, "")))
        for certificate_path, key_path, words in (
                ("", "", "https_ports needs a certificate"),
                ("/nowhere/c", self.key, "[http] certificate = /nowhere/c: No such file"),
                (self.certificate, "/nowhere/k", "[http] key = /nowhere/k: No such file"),
                (folder, self.key, "not a plain file"),
                (self.certificate, "", "[http] certificate = %s: there is no private key in it"
                 % self.certificate),
                (self.key, self.certificate, "there is no certificate in it"),
                (self.certificate, other_key, "does not belong to it"),
                (self.certificate, locked, "its key asks for a password"),
                (self.certificate, old_locked, "its key asks for a password"),
                (write("cut", certificate[:300] + b"\n-----END CERTIFICATE-----\n"), self.key,
                 "cannot be used"),
                (write("bad", certificate.replace(b"MII", b"AAA")), self.key, "cannot be used"),
                (write("short", certificate[:80] + b"\n-----END CERTIFICATE-----\n"), self.key,
                 "in it is damaged"),
                (write("hostile", b"-----BEGIN CERTIFICATE-----" * 38000), self.key,
                 "there is no certificate in it"),
                (write("large", bytes(1 + (1 << 20))), self.key, "larger than 1,024 kB"),
                (self.certificate, write("badkey", key[:100] + key[110:]), "cannot be used")):
            with self.subTest(words):
                self.assertRaisesRegex(
                    ms.SettingsError, re.escape(words), ms.load_certificate,
                    self.settings(certificate_path, key_path))

    def settings(self, certificate: str, key: str) -> ms.Settings:
        return ms.Settings({"http.https_ports": "0", "http.certificate": certificate,
                            "http.key": key})

    def test_when_a_certificate_expires(self) -> None:
        for days in 1, 5, 400, 20000:
            path, key = self.pair(self.addCleanup, days)
            end = openssl("x509", "-in", path, "-noout", "-enddate").strip()
            self.assertEqual(ms.load_certificate(self.settings(path, key)).expires,
                             ssl.cert_time_to_seconds(end.replace("notAfter=", "")))
        server = master()
        self.addCleanup(server.close)
        day = 86400.0
        server.certificate = ms.Certificate(None, 1000 * day)
        with mock.patch.object(ms, "log") as log:
            for wall, trouble, told in (
                    (985 * day, "", 0), (986 * day, "expires on 1972-09-27", 1),
                    (999.5 * day, "expires on 1972-09-27", 1), (1001 * day, "has expired", 1),
                    (980 * day, "", 1)):
                server.check_certificate(wall)
                self.assertIn(trouble, server.health.get("certificate", ""))
                self.assertEqual((bool(trouble), log.error.call_count),
                                 ("certificate" in server.health, told))
                self.assertEqual(server.gauges["certificate_expires_seconds"], 1000 * day - wall)

    def test_records_without_data_are_bounded(self) -> None:
        """A peer that sends nothing else is closed, as one who sends KeyUpdates is: here by a
        ClientHello of 96 kB, which OpenSSL would wait for."""
        server = self.start()
        hello = hexa("01 018000") + bytes(98304)
        with connect(server, "https") as client, contextlib.suppress(OSError):
            for at in range(0, 48000, 16000):
                client.sendall(hexa("16 0301 3e80") + hello[at:at + 16000])
            eventually(lambda: server.tallies["https"].malformed)
        self.assertEqual((server.tallies["https"].malformed, len(server.connections)), (1, 0))

    def test_mutated_records(self) -> None:
        """No fault, and nothing in the log above debug."""
        server = self.start(limits__connections_open="5000")
        chance = random.Random(49)
        with mock.patch.object(ms, "log") as log:
            for _ in range(150):
                to_server = ssl.MemoryBIO()
                from_server = ssl.MemoryBIO()
                session = self.context().wrap_bio(from_server, to_server,
                                                  server_hostname="localhost")
                with connect(server, "https") as client:
                    client.settimeout(0.01)
                    for _ in range(chance.randrange(1, 5)):
                        with contextlib.suppress(OSError):
                            session.do_handshake()
                            session.write(self.request("/healthz"))
                        data = bytearray(to_server.read() or bytes(5))
                        for _ in range(chance.randrange(4)):
                            data[chance.randrange(len(data))] = chance.randrange(256)
                        with contextlib.suppress(OSError):
                            client.sendall(data[:chance.randrange(1, len(data) + 1)]
                                           if chance.random() < 0.2 else data)
                            from_server.write(client.recv(65536))
            self.assertEqual({name for name, *_ in log.method_calls} - {"debug"}, set())
        self.assertEqual(server.tallies["https"].errors, 0)
        self.assertEqual(self.ask(server, self.request("/healthz"))[0], 200)


class LimitsOnTheWireTest(unittest.TestCase):
    def test_open_connections_of_one_source(self) -> None:
        """One over the limit is told so or closed, without a reset; one that left makes room."""
        with master(http__ports="0", aio__port="0", limits__connections_open="3") as server, \
                contextlib.ExitStack() as stack:
            held = [stack.enter_context(connect(server, "aio")) for _ in range(3)]
            for client in held:
                self.assertEqual(client.recv(5), b"\1\0\0\0\0")
            status, headers, _ = fetch(port_of(server, "http"), "/master.json")
            self.assertEqual((status, headers["Connection"]), (429, "close"))
            with connect(server, "aio") as over:
                over.sendall(b"12#%\n" * 100)
                self.assertEqual(read_all(over), b"")
            self.assertEqual(server.tallies["aio"].limited, 1)
            for client in held:
                client.close()
            eventually(lambda: not server.connections_by_source.total)
            self.assertEqual(fetch(port_of(server, "http"), "/")[0], 200)

    def test_rate_of_connections(self) -> None:
        with master(hyperbol__port="0", http__ports="0", limits__connections="0.01/5") as server:
            greeted = 0
            for _ in range(8):
                with connect(server, "hyperbol") as client:
                    greeted += len(client.recv(12)) == 12
            self.assertEqual(greeted, 5)
            self.assertEqual(fetch(port_of(server, "http"), "/")[0], 429)

    def test_blocked_sources_hear_nothing_and_others_do(self) -> None:
        for blocked, answered in ("127.0.0.1", False), ("127.0.0.2", True):
            chosen = {"blocked__" + blocked: "floods"}
            with master(http__ports="0", iceball__port="0", **chosen) as server, \
                    connect(server, "http") as client, \
                    socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as game:
                heard = b""
                with contextlib.suppress(OSError):          # it may be closed already
                    client.sendall(b"GET / HTTP/1.0\r\n\r\n")
                    heard = client.recv(12)
                self.assertEqual(heard, b"HTTP/1.1 200" if answered else b"")
                self.assertEqual(server.tallies["http"].limited, int(not answered))
                game.connect(("127.0.0.1", port_of(server, "iceball")))
                game.settimeout(SOON_S if answered else 0.2)
                game.send(CAPTURED)
                with contextlib.nullcontext() if answered else self.assertRaises(socket.timeout):
                    game.recv(4096)

    def test_total_closes_the_idlest_and_servers_last(self) -> None:
        """The total is that of the settings, or what the system's descriptors allow."""
        def client() -> socket.socket:
            sock = stack.enter_context(connect(server, "aio"))
            self.assertEqual(sock.recv(5), b"\1\0\0\0\0")
            return sock
        for total, descriptors in (8, 999), (999, 8):
            limit = mock.Mock(return_value=ms.DESCRIPTORS_KEPT + descriptors)
            with contextlib.ExitStack() as stack, mock.patch.object(
                    ms, "descriptor_limit", limit), master(
                    aio__port="0", limits__connections_total=str(total),
                    limits__connections_open="100") as server:
                clients = [client() for _ in range(8)]
                clients[0].sendall(b"13#A server#D#27010#%")    # published: kept, though the oldest
                self.assertEqual(clients[0].recv(100), b"%SUCCESS#13#%")
                clients[1].sendall(b"12#%\n")                   # not idle any more
                self.assertEqual(clients[1].recv(4), b"%12#")
                client()
                self.assertEqual(read_all(clients[2]), b"")
                clients[1].sendall(b"12#%\n")
                self.assertTrue(clients[1].recv(4))
                self.assertEqual((len(server.connections), server.registry.total), (8, 1))

    def test_a_handshake_costs_as_much_as_half_a_request(self) -> None:
        """A source that is refused is not remembered among those with connections."""
        server = bound_master(self, http__ports="0", limits__connections="500/500")
        listener, = server.tcp_listeners
        for listener.uses_tls, address, accepted in (
                (True, "192.0.2.1", 100), (False, "192.0.2.2", 500), (True, "2001:db8:5::1", 100)):
            refused = [listener.is_over_limit(address, 0.0) for _ in range(600)]
            self.assertEqual(refused, [False] * accepted + [True] * (600 - accepted))
        self.assertEqual(server.connections_by_source.counts, {})

    def test_connections_over_a_limit_push_nobody_out(self) -> None:
        with master(aio__port="0", limits__exempt="", limits__connections_total="8",
                    limits__connections_open="3") as server, contextlib.ExitStack() as stack:
            clients = [stack.enter_context(connect(server, "aio")) for _ in range(3)]
            for _ in range(20):
                stack.enter_context(socket.create_connection(
                    ("127.0.0.1", port_of(server, "aio")), SOON_S, ("127.0.0.2", 0)))
            for client in clients:
                client.sendall(b"12#%\n")
                self.assertEqual(client.recv(5), b"\1\0\0\0\0")
                self.assertEqual(client.recv(4), b"%12#")

    def test_few_connections_over_a_limit_are_told_so(self) -> None:
        """The others of the same source are closed without a word."""
        limits = {"limits__exempt": "", "limits__connections_open": "3"}
        for rate, accepted in ("1000/1000", 3), ("1/1", 1):
            server = bound_master(self, http__ports="0", limits__connections=rate, **limits)
            listener, = server.tcp_listeners
            for number in range(50):
                ours, theirs = socket.socketpair()
                self.addCleanup(theirs.close)
                listener.accept(ours, "192.0.2.1", 0.0)
                self.assertEqual(ours.fileno() < 0, number >= 3 + ms.REFUSED_OPEN)
            self.assertEqual(server.tallies["http"].connections, accepted)
            self.assertEqual(len(server.connections), 3 + ms.REFUSED_OPEN)
            ours, theirs = socket.socketpair()
            self.addCleanup(theirs.close)
            listener.accept(ours, "192.0.2.2", 0.0)
            self.assertEqual(server.tallies["http"].connections, accepted + 1)

    def test_out_of_descriptors(self) -> None:
        """Accepting rests until the next tick, said once, and goes on; it does not spin."""
        server = bound_master(self, hyperbol__port="0")
        listener, = server.tcp_listeners
        sock = listener.sock
        accept = mock.Mock(side_effect=OSError(errno.EMFILE, "too many"))
        with connect(server, "hyperbol") as client, self.assertLogs("masterserver") as logged:
            self.assertTrue(select.select([sock], [], [], SOON_S)[0])
            listener.sock = mock.Mock(wraps=sock, accept=accept, fileno=sock.fileno)
            for _ in range(2):
                listener.on_readable(0.0)
                self.assertNotIn(sock.fileno(), server.selector.get_map())
                self.assertEqual(server.health, {"descriptors": "too many"})
                listener.tick(1.0)
                self.assertIn(sock.fileno(), server.selector.get_map())
            accept.side_effect = sock.accept
            listener.on_readable(2.0)
            server.take_turns(len(server.turns), 2.0)
            self.assertEqual((len(client.recv(12)), server.health), (12, {}))
        self.assertEqual((accept.call_count, len(logged.records)), (4, 1))


class MasterServerTest(unittest.TestCase):
    def test_an_iceball_server_is_listed_and_shown(self) -> None:
        with RunningServer() as server:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as game:
                game.settimeout(SOON_S)
                game.connect(("127.0.0.1", server.port("iceball")))
                game.send(CAPTURED)
                game.send(b"HSHK" + game.recv(4096)[4:])
                page = eventually(lambda: [text for text in [fetch(
                    server.port("http"), "/")[2]] if b"Iceball Server" in text])
                self.assertTrue(page)
            threads = 0
            if sys.platform == "linux":
                threads = len(os.listdir("/proc/%d/task" % server.process.pid))
        self.assertLessEqual(threads, 3)
        self.assertRegex(server.log, "Players and browsers: http://.*:%d/" % server.port("http"))
        self.assertIn("INFO stopped", server.log)

    def test_no_ipv6_on_this_machine(self) -> None:
        bound = ms.bound_socket

        def refuse(family: int, *place: Any) -> socket.socket:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "no such family")
            return bound(family, *place)
        with mock.patch.object(ms, "bound_socket", refuse):
            with self.assertLogs("masterserver", "INFO"), master(
                    http__ports="0", server__bind="0.0.0.0, ::") as server:
                self.assertEqual({":" in listener.host for listener in server.listeners}, {False})
            with self.assertRaisesRegex(ms.StartError, r"\[http\] ports or \[server\] bind"):
                master(http__ports="0", server__bind="::").bind()

    def test_the_socket_by_which_a_poll_leaves(self) -> None:
        """The first of the peer's family that the protocol has."""
        server = bound_master(self, server__bind="127.0.0.1, ::, 0.0.0.0", hyperbol__port="0")
        sent: List[Tuple[str, bytes]] = []
        for place in server.udp_sockets:
            place.send = lambda answers, host=place.sock.getsockname()[0]: sent.append(
                (host, answers[0][0]))
        for protocol in server.protocols:       # only the poller has a way to send
            protocol.tick = mock.Mock(return_value=[
                (b"4", ("203.0.113.9", 1)), (b"6", ("2001:db8::1", 2))])
        server.tick(0.0)
        self.assertEqual(sent, [("127.0.0.1", b"4"), ("::", b"6")][:len(server.udp_sockets) - 1])

    def test_servers_are_not_silent_while_the_program_was_stopped(self) -> None:
        """Ctrl+Z and fg, or docker pause, of minutes."""
        server = bound_master(self, iceball__port="0")
        server.handle_events(0.0)
        now = time.monotonic()
        server.registry.list_or_refresh(("iceball", "203.0.113.9", 1), "203.0.113.9", now, 120.0,
                                        {})
        for seconds, late, total in ((600.0, 599.0, 1), (719.0, 0.0, 1), (720.5, 0.0, 0)):
            server.next_tick = server.next_connection_tick = now + seconds - late
            with mock.patch.object(time, "monotonic", lambda: now + seconds):
                server.handle_events(0.0)
            self.assertEqual(server.registry.total, total, seconds)

    def test_a_fault_in_one_place_ends_nothing_else(self) -> None:
        server = bound_master(self, http__ports="0", iceball__port="0")
        fail = mock.Mock(side_effect=ZeroDivisionError)
        with mock.patch.multiple(server.registry, expire=fail), self.assertLogs() as logged:
            with mock.patch.multiple(ms.Web, tick=fail), mock.patch.multiple(ms.Iceball, tick=fail):
                server.tick(1.0)
        self.assertEqual((fail.call_count, len(logged.records)), (3, 3))
        self.assertEqual(fetch_here(server, "/healthz")[0], 200)
        with self.assertLogs() as logged:               # which shows no secret
            server.guarded(fail, ValueError("https://h.example/TOKEN"), 5.0)
        self.assertIn("ValueError('https://…", logged.output[0])
        self.assertIn("ZeroDivisionError", logged.output[0])
        self.assertNotIn("TOKEN", logged.output[0])

    @mock.patch.multiple(ms, LOOK_S=99.0, TICK_S=99.0)
    def test_it_ends_with_the_answers_that_were_asked_for(self) -> None:
        """Nobody is accepted any more; what was sent before is answered, and nobody gets a reset.
        """
        held, hold = threading.Event(), threading.Event()
        port = free_port()
        with master(http__ports=str(port)) as server, contextlib.ExitStack() as stack:
            server.post(lambda now: held.set() or hold.wait(2 * SOON_S))
            self.assertTrue(held.wait(SOON_S))
            clients = [stack.enter_context(connect(server, "http")) for _ in range(3)]
            for client in clients[:2]:
                client.sendall(b"GET /master.json HTTP/1.1\r\nHost: x\r\n\r\n")
            server.stopping = True
            hold.set()
            for client in clients[:2]:
                self.assertEqual(split_response(read_all(client))[0], 200)
            self.assertEqual(read_all(clients[2]), b"")
        self.assertRaises(OSError, socket.create_connection, ("127.0.0.1", port))
        began = time.monotonic()
        with master() as server:
            eventually(lambda: server.next_tick)            # it waits, and hears at once
        self.assertLess(time.monotonic() - began, 2 * SOON_S)

    def test_addresses_of_a_host(self) -> None:
        entries = [(socket.AF_INET6, 0, 0, "", ("2001:db8::1", 0)),
                   (socket.AF_INET, 0, 0, "", ("203.0.113.9", 0)),
                   (socket.AF_INET, 0, 0, "", ("203.0.113.9", 0))]
        for reached, wanted in (lambda far: "x", ["203.0.113.9", "2001:db8::1"]), (
                lambda far: "x" if ":" in far else "", ["2001:db8::1"]), (
                lambda far: "", ["203.0.113.9", "2001:db8::1"]):
            with mock.patch.object(socket, "getaddrinfo", return_value=entries), \
                    mock.patch.object(ms, "own_address", reached):
                self.assertEqual(ms.host_addresses("host"), wanted)


def fetch_here(server: ms.MasterServer, path: str) -> Tuple[int, Dict[str, str], bytes]:
    """One request to a server whose loop this thread drives."""
    with connect(server, "http") as client:
        client.sendall(b"GET %s HTTP/1.0\r\n\r\n" % path.encode())
        answer = [b""]
        while answer[-1] or len(answer) == 1:           # until it ends the connection
            server.handle_events(time.monotonic() + 0.05)
            if select.select([client], [], [], 0)[0]:
                answer.append(client.recv(65536))
        return split_response(b"".join(answer))[:3]


class WorkerTest(unittest.TestCase):
    def test_results_faults_and_jobs_beyond_the_limit(self) -> None:
        results: List[Tuple[Any, str]] = []
        hangs = threading.Event()
        worker = ms.WorkerThread("test", lambda done, result: results.append((done, str(result))))
        self.assertTrue(worker.stop(0.0))                       # it has not begun
        worker.submit(lambda: hangs.wait(2 * SOON_S), "hangs")
        worker.submit(lambda: {}[6], "fails")
        for _ in range(ms.WORKER_JOBS + 1):
            worker.submit(lambda: 5, "one", ms.WORKER_JOBS)
        worker.submit(lambda: 6, "the program's own")       # strangers cannot keep it out
        self.assertFalse(worker.stop(0.01))
        self.assertEqual({done for done, _ in results}, {"one"})
        self.assertIn("too many others are waiting", results[0][1])
        hangs.set()
        self.assertTrue(worker.stop(SOON_S))
        self.assertEqual([result for result in results if "too many" not in result[1]][:3],
                         [("hangs", "True"), ("fails", "6"), ("one", "5")])
        self.assertEqual(results[-1], ("the program's own", "6"))


    def test_strangers_take_turns_and_keep_nobody_else_waiting(self) -> None:
        done: List[Any] = []
        posted: List[Any] = []
        worker = ms.WorkerThread("test", lambda call, result: posted.append((call, result)))
        with mock.patch.object(ms.threading, "Thread"):
            for name in ["a"] * (ms.WORKER_JOBS + 3) + ["b", "c", "own"]:
                worker.submit(functools.partial(str, name),
                              lambda result, now: done.append(str(result)),
                              ms.WORKER_JOBS, "" if name == "own" else name)
        refused = [str(result) for _, result in posted]
        self.assertEqual(refused, ["too many others are waiting"] * 2)
        posted.clear()
        while worker.jobs.qsize():
            worker.jobs.put(None)               # the thread ends with the jobs that are there
            worker.work()
            while posted:
                call, result = posted.pop(0)
                call(result, 0.0)
        self.assertEqual(done, ["a", "own", "a", "b", "c"] + ["a"] * (ms.WORKER_JOBS - 1))


class HostNamesTest(unittest.TestCase):
    def setUp(self) -> None:
        self.names = ms.HostNames(lambda *posted: None)
        self.jobs: List[Any] = []
        self.names.worker.put = lambda job, done: self.jobs.append((job, done))     # type: ignore
        self.answers: List[Tuple[str, str]] = []

    def ask(self, host: str, source: str = "") -> None:
        self.names.resolve(host, lambda address, now: self.answers.append((host, address)), source)

    def answer(self, result: Any) -> str:
        """The thread has looked one up; which one."""
        job, done = self.jobs.pop(0)
        done(result, 0.0)
        host, _ = job.args
        return host

    def test_one_after_another_those_of_the_ini_in_front(self) -> None:
        for number in range(4):
            self.ask("slow%d.example" % number, "192.0.2.%d" % number)
        self.ask("a.example")
        self.ask("b.example")
        self.assertEqual(len(self.jobs), 3)
        order = [self.answer("203.0.113.9") for _ in range(6)]
        self.assertEqual(order, ["slow0.example", "a.example", "b.example", "slow1.example",
                                 "slow2.example", "slow3.example"])
        self.assertEqual(self.answers, [(host, "203.0.113.9") for host in order])
        self.ask("none.example")
        self.answer(OSError("no such host"))
        self.assertEqual(self.answers[-1], ("none.example", ""))
        self.assertEqual((self.jobs, self.names.waiters, self.names.shares.counts), ([], {}, {}))

    def test_sources_take_turns(self) -> None:
        for host, number in (
                ("slow.example", 0), ("a.example", 1), ("b.example", 1), ("c.example", 2)):
            self.ask(host, "192.0.2.%d" % number)
        order = [self.answer("") for _ in range(4)]
        self.assertEqual(order, ["slow.example", "a.example", "c.example", "b.example"])

    def test_a_source_and_a_network_have_few_at_a_time(self) -> None:
        """Those that are taken, one that is refused then, and one of somebody else."""
        for taken, refused, other in (
                (["192.0.2.1"] * 2, "192.0.2.1", "192.0.2.2"),
                (["2001:db8::1", "2001:db8::2"], "2001:db8::3", "2001:db8:0:1::1"),
                (["2001:db8:1:%x::1" % number for number in range(4)], "2001:db8:1:4::1",
                 "2001:db8:2::1")):
            self.setUp()
            for number, source in enumerate(taken):
                self.ask("%d.example" % number, source)
            with self.assertRaisesRegex(ms.Refused, "host names that this source .* try again"):
                self.ask("more.example", refused)
            self.ask("honest.example", other)
            self.answer("")
            self.ask("more.example", refused)           # one of them is through

    def test_game_servers_of_one_source_and_name_wait_together(self) -> None:
        for _ in range(ms.LOOKUP_WAITERS):
            self.ask("one.example", "192.0.2.1")
        self.ask("one.example", "192.0.2.2")
        with self.assertRaisesRegex(ms.Refused, "try again"):
            self.ask("one.example", "192.0.2.1")
        for waiters in ms.LOOKUP_WAITERS, 1:
            self.answers.clear()
            self.answer("203.0.113.9")
            self.assertEqual(self.answers, [("one.example", "203.0.113.9")] * waiters)
        for number in range(500):                       # of the ini, as many as there are
            self.ask("one.example")
        self.answer("203.0.113.9")
        self.assertEqual(len(self.answers), 501)

    def test_strangers_have_so_many_and_the_ini_always_finds_room(self) -> None:
        for number in range(ms.LOOKUPS):
            self.ask("slow%d.example" % number, "192.0.2.%d" % (number // 2))
        with self.assertRaisesRegex(ms.Refused, "too many host names .* try again"):
            self.ask("honest.example", "198.51.100.1")
        for number in range(500):
            self.ask("%d.example" % number)
        self.answer("")
        self.assertEqual([self.answer("") for _ in range(500)],
                         ["%d.example" % number for number in range(500)])
        self.ask("honest.example", "198.51.100.1")

    def test_the_nearest_of_a_name_s_addresses(self):
        addresses = ["192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8::2"]
        with mock.patch.object(ms, "host_addresses", return_value=addresses):
            for like, nearest in (("", 0), ("192.0.2.2", 1), ("192.0.2.9", 0), ("2001:db8::2", 3),
                                  ("2001:db8::9", 2)):
                self.assertEqual(ms.resolve_host("a.example", like), addresses[nearest])


class ReloadTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.path = self.write("masterserver.ini", "[server]\ndatabase =\n")

    def write(self, name: str, text: str) -> str:
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def server(self) -> ms.MasterServer:
        def load() -> ms.Settings:
            return ms.Settings.load(self.path, ["server.database="], missing_ok=True)
        server = ms.MasterServer(load(), reload=load)
        server.disk = DiskThread()
        return server

    def test_errors_change_nothing_and_good_settings_hold(self) -> None:
        server, now = self.server(), 100.0
        protocol = mock.Mock(spec=ms.UdpProtocol, tick=mock.Mock(return_value=[]))
        server.protocols.append(protocol)
        for text, words, banned in (
                ("[bans]\n203.0.113.9 = cheats\n", r"changed: \[bans\]", "cheats"),
                ("[bans]\nnonsense = x\n", "old settings stay in force: .*nonsense", "cheats"),
                ("[bans]\nours = text https://h.example/TOKEN\n",
                 "old settings stay in force: (?!.*TOKEN)", "cheats"),
                ("[server\n", "old settings stay in force", "cheats"),
                ("", "gone or empty", "cheats"),
                ("[bans]\n203.0.113.9 = x\n[limits]\nrequests = x\n", "requests", "cheats"),
                ("[iceball]\ntimeout = 60\n", "timeout has changed; that needs a restart", "")):
            self.write("masterserver.ini", text)
            now += 10.0
            with self.assertLogs("masterserver") as logged:
                server.tick(now)
                server.tick(now + 5.0)                  # a change is read once
            self.assertRegex(logged.output[0], words)
            self.assertEqual(server.rules.ban_reason("203.0.113.9"), banned, text)
        self.assertEqual(protocol.read.call_count, 2)
        self.assertEqual(server.settings["iceball.timeout"], 120)

    def test_a_disk_that_hangs_holds_nobody_up(self) -> None:
        """The loop goes on; the disk thread is not asked again until it has answered."""
        server = self.server()
        server.disk.at_once = False
        self.write("masterserver.ini", "[http]\ntitle = Mine\n")
        for now in 1.0, 2.0:
            server.tick(now)
        with self.assertLogs("masterserver"):
            while server.disk.jobs:
                server.disk.work()
        self.assertEqual(server.settings["http.title"], "Mine")
        server.tick(3.0)
        self.assertEqual(len(server.disk.jobs), 1)

    def test_an_ini_or_a_text_file_that_comes_later(self) -> None:
        os.remove(self.path)
        server = self.server()
        self.write("masterserver.ini", "[http]\nstylesheet = my.css\ntitle = Mine\n")
        with self.assertLogs("masterserver") as logged:
            server.reload(0.0)
            self.assertEqual(server.settings["http.title"], "Game servers")
            self.write("my.css", "b {}")
            server.reload(0.0)
            self.write("my.css", "i {} ")
            server.tick(0.0)
        self.assertIn("my.css", logged.output[0])
        settings = server.settings
        self.assertEqual((settings["http.title"], settings.contents["http.stylesheet"]),
                         ("Mine", "i {} "))

    def test_files_that_cannot_be_read(self) -> None:
        self.write("bad.html", "$unknown")
        self.write("big.svg", SVG + " " * (65537 - len(SVG)))
        self.write("page.svg", "<svg>")
        rows = [("http.template", "bad.html", "unknown"),
                ("http.stylesheet", "none.css", "none.css"),
                ("http.logo", "none.png", "none.png: No such file"),
                ("http.logo", "big.svg", "big.svg: larger than 64 kB"),
                ("http.logo", "page.svg", "page.svg: expected an image: PNG, .* SVG with xmlns")]
        if hasattr(os, "mkfifo"):
            os.mkfifo(os.path.join(self.folder, "pipe"))
            rows.append(("aio.news_file", "pipe", "not a plain file"))
        for name, file, words in rows:
            settings = ms.Settings({name: os.path.join(self.folder, file)})
            self.assertRaisesRegex(ms.SettingsError, words, ms.read_files, settings)

    def test_the_logo_s_type_is_that_of_its_bytes(self) -> None:
        """As the beginnings stand in the documents of the formats."""
        for data, media_type in (
                (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "image/png"),
                (b"\xff\xd8\xff\xe0\0\x10JFIF\0", "image/jpeg"),
                (b"GIF87a\1\0", "image/gif"), (b"GIF89a\1\0", "image/gif"),
                (b"RIFF\x1a\n\0\0WEBPVP8 ", "image/webp"), (SVG.encode(), "image/svg+xml"),
                (b"\xef\xbb\xbf\n<?xml version='1.0'?>\n" + SVG.encode(), "image/svg+xml"),
                (b"", ""), (b"\x89PNG", ""), (b"RIFF\x1a\n\0\0WAVEfmt ", ""), (b"<svg></svg>", ""),
                (b"http://www.w3.org/2000/svg", ""), (b"BM\x1a\n\0\0", "")):
            try:
                self.assertEqual(ms.read_logo(data), (media_type, data))
            except ValueError:
                self.assertEqual(media_type, "", data)

    def test_a_logo_that_changes(self) -> None:
        """A good one is shown; a bad one is told at /healthz, until it is right again."""
        server = self.server()
        text = "[http]\nlogo = logo.svg\n"
        for logo, words, trouble in (
                (SVG, r"changed: \[http\] logo$", ()),
                ("nonsense", "the old settings stay in force: .*logo.svg: expected an image",
                 ("settings",)),
                (SVG + "\n", r"changed: \[http\] logo$", ())):
            self.write("logo.svg", logo)
            self.write("masterserver.ini", text)
            with self.assertLogs("masterserver") as logged:
                server.reload(0.0)
            self.assertRegex(logged.output[0], words)
            self.assertEqual(tuple(server.health), trouble)
        self.assertEqual(server.settings.contents["http.logo"],
                         ("image/svg+xml", SVG.encode() + b"\n"))

    @unittest.skipUnless(hasattr(os, "mkfifo"), "pipes that have names")
    def test_a_pipe_in_place_of_the_ini(self) -> None:
        """The disk thread refuses it, instead of waiting for somebody who writes into it."""
        server = self.server()
        os.remove(self.path)
        os.mkfifo(self.path)
        with self.assertLogs("masterserver") as logged:
            server.tick(0.0)
        self.assertRegex(logged.output[0], "old settings stay in force: .*: not a plain file")

    def test_newly_blocked_clients_are_disconnected(self) -> None:
        with master(http__ports="0") as server, connect(server, "http") as client:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            self.assertEqual(split_response(client.recv(65536))[0], 200)
            server.settings.values["blocked"] = {ms.read_network("127.0.0.0/8"): ""}
            server.post(server.apply_settings)
            self.assertEqual(client.recv(65536), b"")


class EventLogTest(unittest.TestCase):
    def test_arrivals_and_departures_are_logged_unless_they_are_many(self) -> None:
        server = bound_master(self, limits__servers_per_source="9999")
        with self.assertLogs("masterserver", "INFO") as logged:
            for ports in range(1, 2), range(2, 102), range(102, 103):
                for port in ports:
                    one = server.registry.list_or_refresh(
                        ("aio", "203.0.113.9", port), "203.0.113.9", 0.0, 1e9, {"name": "\xdc"})
                server.registry.update(one, {"players": 5})
                server.tick(0.0)
            server.registry.remove_own(one)
            server.tick(0.0)
        told = [line.partition("server:")[2] for line in logged.output]
        self.assertEqual((told[0], len(told)), ("203.0.113.9:1 aio listed '\\xdc'", 1 + 20 + 1 + 2))
        self.assertEqual(told[21:], ["80 more servers listed or removed in the last second",
                                     "203.0.113.9:102 aio listed '\\xdc'",
                                     "203.0.113.9:102 aio gone '\\xdc'"])


# --- The list on disk -----------------------------------------------------------------------------

class DiskThread:
    """A worker without a thread: works at once, or when the test says so."""

    def __init__(self) -> None:
        self.at_once = True
        self.jobs: List[Any] = []

    def submit(self, job: Callable[[], Any], done: Callable[[Any, float], None],
               max_waiting: float = math.inf, source: str = "") -> None:
        self.jobs.append((job, done))
        if self.at_once:
            self.work()

    def work(self) -> None:
        job, done = self.jobs.pop(0)
        try:
            result = job()
        except Exception as error:
            result = error
        done(result, self.now())

    def now(self) -> float:
        return 0.0

    def stop(self, seconds: float) -> bool:
        return True


class SavedListTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.path = os.path.join(folder.name, "master.db")
        info = mock.patch.object(ms.log, "info")
        info.start()
        self.addCleanup(info.stop)

    def start(self, now: float = 0.0, wall: float = T0, **settings: str) -> ms.SavedList:
        database = ms.Database(self.path)
        self.addCleanup(database.close)
        saved = ms.SavedList(database, make_core(**settings).registry, DiskThread(), {})
        saved.restore(now, wall, {room.game: mock.Mock() for room in ms.GAMES})
        return saved

    def restart(self, saved: ms.SavedList, wall: float = T0 + 5, **settings: str) -> ms.SavedList:
        """Killed after a batch, and started again on a machine that has started anew."""
        saved.tick(2.0, T0 + 2)
        saved.database.close()
        return self.start(1000.0, wall, **settings)

    def hear(self, saved: ms.SavedList, port: int, now: float = 0.0, lifetime: float = 120.0,
             game: str = "iceball", address: str = "203.0.113.9", **fields: Any) -> ms.Server:
        return saved.registry.list_or_refresh((game, address, port), address, now, lifetime, fields)

    def ports(self, saved: ms.SavedList) -> List[int]:
        return sorted(server.port for server in saved.registry.servers())

    def on_disk(self) -> List[int]:
        """The ports that are listed, as another program would read them."""
        with contextlib.closing(sqlite3.connect(self.path)) as db:
            return [port for port, in db.execute(
                "SELECT port FROM server JOIN listed ON id = server ORDER BY port")]

    # A restart

    def test_a_restart_has_the_whole_list_at_once(self) -> None:
        """Lifetimes begin with it."""
        saved = self.start()
        self.hear(saved, 1, verified="handshake", players=3, playing=2, details={"mod": "x"})
        self.hear(saved, 2, verified="query", lifetime=math.inf)
        self.hear(saved, 3, game="aio", address="2001:db8::1", verified="connection",
                  lifetime=math.inf)
        saved.registry.list_or_refresh(("iceball", "203.0.113.8", 4), "192.168.1.5", 0.0, 120.0,
                                       {"verified": "self-reported"})
        saved = self.restart(saved, T0 + 600)
        found = {server.port: server for server in saved.registry.servers()}
        self.assertEqual((found[4].address, found[4].source), ("203.0.113.8", "192.168.1.5"))
        self.assertEqual((found[1].playing, found[1].details, found[1].confirmed,
                          found[1].first_seen, found[1].last_seen),
                         (2, {"mod": "x"}, False, 400.0, 400.0))
        for now, expected in ((1059.9, [1, 2, 3, 4]), (1060.1, [1, 2, 4]), (1119.9, [1, 2, 4]),
                              (1120.1, [2]), (9e9, [2])):
            saved.registry.expire(now)
            self.assertEqual(self.ports(saved), expected, now)

    def test_a_server_that_is_not_restored_leaves_the_file(self) -> None:
        saved = self.start()
        for port in range(1, 6):
            self.hear(saved, port, address="203.0.113.%d" % port, name="old %d" % port)
        saved.registry.update(saved.registry.get("iceball", "203.0.113.5", 5),
                              {"responding": False})            # only the ini names it
        self.hear(saved, 6, now=-3600.0)                        # too long ago
        self.hear(saved, 7, name="late", now=-3595.0)
        saved = self.restart(saved, T0 + 4, **{
            "bans__203.0.113.1": "cheats", "server__refuse_names": "old 2"})
        self.assertEqual(self.ports(saved), [3, 4, 7])
        self.assertEqual(self.on_disk(), [1, 2, 3, 4, 5, 6, 7])
        saved.tick(1001.0, T0 + 6)
        self.assertEqual(self.on_disk(), [3, 4, 7])
        saved = self.restart(saved, T0 + 7, limits__servers="2")
        self.assertEqual(saved.registry.total, 2)

    def test_a_clock_that_was_set_between(self) -> None:
        """Nobody lives longer for it; from ahead by more than an hour, the list is not shown."""
        for step, listed in ((86400.0, 0), (3e8, 0), (600.0, 1), (-86400.0, 1), (-1.6e9, 1)):
            self.path = os.path.join(self.folder, str(step))
            saved = self.start()
            self.hear(saved, 1)
            saved = self.restart(saved, T0 + 5 + step)
            self.assertEqual(saved.registry.total, listed, step)
            for server in saved.registry.servers():
                self.assertLessEqual(max(server.first_seen, server.last_seen), 1000.0)
            saved.registry.expire(1120.1)
            self.assertEqual(saved.registry.total, 0, step)

    def test_noise_in_a_row_costs_it_alone(self) -> None:
        """What cannot be read is dropped, and no list gets what it has no room for."""
        for stored, expected in (
                ({"verified": "?"}, None), ({"verified": 5}, None),
                ({"source": "203.0.113"}, None),
                ({"name": 5, "mode": [], "players": "0", "playing": 1.5, "responding": 0,
                  "details": [], "source": 5, "later": {"a": "b"}},
                 {"name": "", "mode": "", "players": 0, "playing": None, "responding": True,
                  "details": {}, "source": "203.0.113.9"}),
                ({"name": "\x1b[0m\u202eX\n", "players": -4, "max_players": 99999,
                  "playing": 70000},
                 {"name": "X", "max_players": 65535, "playing": 65535}),
                ({"name": "x" * 2000}, {"name": "x" * ms.TEXT_CHARACTERS}),
                ({"details": {"a\0": "b\u202e", "c": 5}}, {"details": {"a": "b", "c": "5"}})):
            row = ms.ListedRow("iceball", "203.0.113.9", 1, T0 + 9.0, T0 - 9.0, T0 - 0.0,
                               {"verified": "query", **stored})
            server = ms.restored_server(row, 0.0, T0)
            self.assertEqual(server and {name: getattr(server, name) for name in expected or ()},
                             expected, stored)
        database = self.start().database
        database.save([
            ms.ListedRow("iceball", address, port, expires, T0 - 0.0, T0 - 0.0,
                         {"verified": "query"})
            for address, port, expires in (
                ("203.0.113.9", 1, T0 + 99.0), ("nowhere", 2, T0 + 99.0),
                ("0.0.0.0", 2, T0 + 99.0), ("203.0.113.8", 0, T0 + 99.0),
                ("203.0.113.8", 65536, T0 + 99.0), ("203.0.113.7", 11, -math.inf),
                ("203.0.113.7", 13, 1e300))], set())
        saved = self.start()
        saved.registry.expire(0.1)
        self.assertEqual(self.ports(saved), [1, 13])

    def test_a_file_that_cannot_be_used(self) -> None:
        """What is heard is saved as soon as it can be. A damaged history does not cost the list."""
        with open(self.path, "wb") as file:
            file.write(b"noise" * 1000)
        with self.assertLogs("masterserver", "ERROR") as logged:
            saved = self.start()
        self.assertIn("trouble with the database: the file is damaged", logged.output[0])
        self.hear(saved, 1)
        with mock.patch.object(os, "replace", side_effect=PermissionError(13, "denied")):
            saved.tick(1.0, T0 + 1)
        self.assertIn("denied", saved.health["database"])
        with self.assertLogs("masterserver", "WARNING"):        # the old file is set aside
            saved.tick(2.0, T0 + 2)
        self.assertEqual((self.on_disk(), saved.health), ([1], {}))
        saved.database.close()
        with contextlib.closing(sqlite3.connect(self.path, isolation_level=None)) as db:
            db.execute("INSERT INTO block SELECT 3600, ?, id, x'00' FROM server",
                       (T0 // ms.WEEK * ms.WEEK,))
        with self.assertLogs("masterserver", "ERROR"):
            saved = self.start()
        with self.assertLogs("masterserver", "WARNING"):
            saved.tick(2.0, T0 + 2)
        self.assertEqual((self.ports(saved), self.on_disk(), saved.health), ([1], [1], {}))

    # While it serves

    def batch(self, saved: ms.SavedList, now: float) -> Any:
        """The ports of the rows that are saved now, of those gone, and the sample."""
        with mock.patch.object(saved.database, "save", wraps=saved.database.save) as save, \
                mock.patch.object(saved.database, "add_samples", return_value=None) as sample:
            saved.tick(now, T0 + now)
        if not save.called:
            return None
        rows, gone = save.call_args[0]
        players = sample.call_args[0][1] if sample.called else ()
        return (sorted(row.port for row in rows), sorted(port for _, _, port in gone),
                {port or address: count for _, address, port, count in players})

    def test_a_batch_is_what_is_new(self) -> None:
        """Everybody once a minute, with the sum of the game and that of all games."""
        saved = self.start()
        registry = saved.registry
        one, two, three = (self.hear(saved, port, players=port) for port in (1, 2, 3))
        self.assertEqual(self.batch(saved, 0.0), ([1, 2, 3], [], {"": 6, 1: 1, 2: 2, 3: 3, -2: 6}))
        self.assertIsNone(self.batch(saved, 1.0))
        registry.confirm(one, 2.0)
        self.assertIsNone(self.batch(saved, 2.0))
        registry.update(two, {"players": 5})
        registry.remove_own(three)
        self.hear(saved, 4)
        self.assertEqual(self.batch(saved, 3.0), ([2, 4], [3], {}))
        registry.update(two, {"responding": False})
        self.assertEqual(self.batch(saved, 60.0), ([1, 2, 4], [], {"": 1, 1: 1, 4: 0, -2: 1}))
        for server in registry.servers():
            registry.remove_own(server)
        with mock.patch.object(ms, "KNOWN_AFTER_S", 2.0):
            self.assertEqual(self.batch(saved, 61.0), ([], [1, 2, 4], {}))
        self.assertEqual(saved.database.known(*one.key)[:2], (T0, T0 + 2.0))

    def test_sparklines_come_with_the_samples(self) -> None:
        saved = self.start()
        self.hear(saved, 1, players=3)
        for now in (0.0, 900.0, 960.0, 4500.0, 4560.0):
            saved.tick(now, T0 + now)
        self.assertEqual(saved.hourly_players["iceball", "203.0.113.9", 1][-1], 3)
        self.assertEqual(self.start(wall=T0 + 4550).hourly_players, saved.hourly_players)

    def test_one_batch_at_a_time_and_a_disk_that_hangs_is_told(self) -> None:
        saved = self.start()
        saved.disk.at_once = False
        with self.assertLogs("masterserver", "ERROR") as logged:
            for second in range(30):
                self.hear(saved, 1 + second)
                saved.tick(100.0 + second, T0 + second)
                self.assertEqual(list(saved.health), ["database"] if second >= 10 else [])
                self.assertEqual(len(saved.disk.jobs), 1)
        self.assertEqual(len(logged.output), 1)
        self.assertIn("10 s or more", logged.output[0])
        saved.disk.work()
        self.assertEqual((saved.health, self.on_disk()), ({}, [1]))
        self.assertIn("saved again", ms.log.info.call_args[0][0])

    def test_a_failed_batch_is_reported_once_and_tried_again(self) -> None:
        saved = self.start()
        gone = self.hear(saved, 1, players=1)
        saved.tick(0.0, T0)
        saved.registry.remove_own(gone)
        self.hear(saved, 2, players=2)
        error = sqlite3.OperationalError("disk is full")
        with mock.patch.object(saved.database, "save", side_effect=error), \
                self.assertLogs("masterserver", "ERROR") as logged:
            for second in (61, 62, 63):
                saved.tick(float(second), T0 + second)
                self.hear(saved, second)
        self.assertEqual((len(logged.output), self.on_disk()), (1, [1]))
        self.assertEqual(saved.health, {"database": "disk is full"})
        saved.tick(64.0, T0 + 64)
        self.assertEqual((saved.health, self.on_disk()), ({}, [2, 61, 62, 63]))
        # The minute has its sample
        series = saved.database.history("iceball", "203.0.113.9", 2, "day", T0 + 120)
        self.assertEqual(series.means[-1], 2)
        # Those that come and go while the disk takes nothing do not pile up
        with mock.patch.object(ms, "ALTERED_SERVERS", 50), mock.patch.object(ms.log, "error"), \
                mock.patch.object(saved.database, "save", side_effect=error):
            for number in range(65, 105):
                for port in range(40):
                    saved.registry.remove_own(self.hear(saved, 40 * number + port))
                saved.tick(float(number), T0 + number)
                self.assertLessEqual(len(saved.registry.altered), 100)


class DiskOfTheProgramTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "master.db")

    def test_servers_of_a_switched_off_game_stay_for_a_minute(self):
        """Those of AIO in any case: they live as long as their connection."""
        private = {"luanti_announcement": json.loads(LUANTI_STORED)}
        rows = []
        for game, room, fields in (
                ("iceball", "iceball", {}), ("subspace", "subspace", {}),
                ("hyperbol", "hyperbol", {}), ("mygame", "", {}),
                ("aio", "aio", {"verified": "connection"}),
                ("luanti", "luanti", {"private": private}),
                ("xonotic", "quake3", {"details": {"gamename": "Xonotic"}})):
            server = ms.Server(game, "203.0.113.9", 1000, "203.0.113.9", 0.0, math.inf,
                               **{"verified": "query", "room": room, **fields})
            rows.append(ms.listed_row(server, time.time()))
        games = {row.game for row in rows}
        some = {"iceball.port": "", "luanti.enabled": "no"}
        for settings, leave in (
                ({"games.mygame": "Mine"}, {"aio"}), (some, {"aio", "iceball", "luanti", "mygame"}),
                (NO_PORTS, games)):
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.path)
            database = ms.Database(self.path)
            database.save(rows, set())
            database.close()
            free_ports = {name: port or "0" for name, port in NO_PORTS.items()
                          if name != "http.https_ports"}
            with ms.MasterServer(
                    {**free_ports, **settings, "server.database": self.path}) as server:
                registry = server.registry
                self.assertEqual({one.game for one in registry.servers()}, games)
                registry.expire(time.monotonic() + 61.0)
                self.assertEqual(games - {one.game for one in registry.servers()}, leave)

    def listed(self) -> int:
        """How many the file has, read as another program would."""
        with contextlib.closing(sqlite3.connect(self.path)) as db, \
                contextlib.suppress(sqlite3.Error):
            return int(db.execute("SELECT count(*) FROM listed").fetchone()[0])
        return 0

    def test_killed_and_started_again(self) -> None:
        server = RunningServer(start=HURRIED, server__database=self.path)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as game:
            game.settimeout(SOON_S)
            game.connect(("127.0.0.1", server.port("iceball")))
            game.send(CAPTURED)
            game.send(b"HSHK" + game.recv(4096)[4:])
        eventually(lambda: self.listed() == 1)
        server.process.kill()
        server.stop()
        with RunningServer(server__database=self.path) as server:
            listed = fetch(server.port("http"), "/master.json")[2]
        self.assertIn(b"Iceball Server", listed)

    def test_the_last_batch(self) -> None:
        """It is written at the end; a failure is told; a disk that hangs is not waited for."""
        go_on = threading.Event()
        for save, stop_s, told in (
                (None, SOON_S, ""),
                (sqlite3.OperationalError("full"), SOON_S, "the database: full"),
                (lambda *rows: go_on.wait(2 * SOON_S), 0.3, "the disk takes too long")):
            server = master(http__ports="0", server__database=self.path)
            self.addCleanup(server.database.close)
            self.addCleanup(server.disk.stop, SOON_S)
            self.addCleanup(go_on.set)
            server.bind()
            server.registry.list_or_refresh(("iceball", "203.0.113.9", 1 + bool(save)),
                                            "203.0.113.9", time.monotonic(), 120.0, {})
            with mock.patch.object(ms, "STOP_DISK_S", stop_s), \
                    mock.patch.object(server.database, "save", side_effect=save,
                                      wraps=server.database.save), \
                    self.assertLogs("masterserver") as logged:
                ms.log.info("")
                server.close()
                server.close()                          # waits for nothing again
            self.assertIn(told, logged.output[-1])
            self.assertEqual(len(logged.output), 1 + bool(told))
            self.assertEqual(self.listed(), 1)

    def test_a_database_in_a_missing_folder(self) -> None:
        missing = os.path.join(os.path.dirname(self.path), "missing", "master.db")
        server = master(http__ports="0", server__database=missing)
        with self.assertLogs("masterserver", "ERROR") as logged, server:
            health = json.loads(fetch(port_of(server, "http"), "/healthz")[2].decode())
            metrics = fetch(port_of(server, "http"), "/metrics")[2]
        self.assertEqual((health["status"], list(health["trouble"])), ("trouble", ["database"]))
        self.assertIn(b'masterserver_trouble{where="database"} 1', metrics)
        self.assertIn("trouble with the database: ", logged.output[0])


# --- Several masters, one list -------------------------------------------------------------------

REDIS = shutil.which("redis-server") or shutil.which("valkey-server")


class EngineInMemory:
    """The commands that masters use, on a clock that the test moves; each answers as Redis does."""

    def __init__(self, clock: Any) -> None:
        self.clock, self.here, self.queued = clock, True, None
        self.commands: collections.Counter[str] = collections.Counter()
        self.flush()

    def flush(self) -> None:
        # A text is bytes, a set is a set, a sorted set is a dict of scores by member
        self.values: Dict[str, Any] = {}
        self.ends: Dict[str, float] = {}

    def close(self) -> None:
        pass

    def ask_all(self, commands: Iterable[Any]) -> List[Any]:
        return [self.ask(*command) for command in commands]

    def ask(self, command: str, *parts: Any) -> Any:
        if not self.here:
            raise ConnectionRefusedError("refused")
        self.commands[command] += 1
        now = self.clock.monotonic()
        for key in [key for key, end in self.ends.items() if end <= now]:
            del self.ends[key], self.values[key]
        return self.DEL(*parts) if command == "DEL" else getattr(self, command.lower())(*parts)

    def own(self, key: str, empty: Any) -> Any:
        """The value of a key, which exists from now on."""
        return self.values.setdefault(key, empty)

    def drop_empty(self, key: str) -> None:
        if not self.values.get(key):
            self.values.pop(key, None)
            self.ends.pop(key, None)

    def multi(self) -> bytes:
        return b"OK"

    def exec(self) -> List[Any]:
        return []

    def time(self) -> List[bytes]:
        wall = self.clock.time()
        return [b"%d" % wall, b"%d" % (wall % 1 * 1e6)]

    def get(self, key: str) -> bytes:
        return self.values.get(key, b"")

    def mget(self, *keys: str) -> List[bytes]:
        return [self.get(key) for key in keys]

    def set(self, key: str, value: str, ex: str, seconds: int, *options: str) -> bytes:
        if options and key in self.values:
            return b""
        self.values[key] = value.encode()
        self.ends[key] = self.clock.monotonic() + seconds
        return b"OK"

    def DEL(self, *keys: str) -> bytes:
        for key in keys:
            self.values.pop(key, None)
            self.ends.pop(key, None)
        return b"1"

    def expire(self, key: str, seconds: int) -> bytes:
        if key in self.values:
            self.ends[key] = self.clock.monotonic() + seconds
        return b"1"

    def zadd(self, key: str, *parts: Any) -> bytes:
        if parts[0] == "XX":
            _, _, score, member = parts
            scores = self.values.get(key, {})
            if scores.get(member.encode(), score) == score:
                return b"0"
            scores[member.encode()] = score
            return b"1"
        for score, member in zip(parts[::2], parts[1::2]):
            self.own(key, {})[member.encode() if isinstance(member, str) else member] = score
        return b"1"

    def zremrangebyscore(self, key: str, low: int, high: int) -> bytes:
        scores = self.values.get(key, {})
        for member in [member for member, score in scores.items() if low <= score <= high]:
            del scores[member]
        self.drop_empty(key)
        return b"1"

    def zrangebyscore(self, key: str, low: str, high: str, withscores: str, limit: str,
                      offset: int, count: int) -> List[bytes]:
        after = int(low[1:])
        found = sorted((score, member) for member, score in self.values.get(key, {}).items()
                       if score > after)
        return [part for score, member in found[:count] for part in (member, b"%d" % score)]

    def sadd(self, key: str, name: str) -> bytes:
        self.own(key, set()).add(name.encode())
        return b"1"

    def srem(self, key: str, *names: str) -> bytes:
        self.values.get(key, set()).difference_update(name.encode() for name in names)
        self.drop_empty(key)
        return b"1"

    def smembers(self, key: str) -> List[bytes]:
        return list(self.values.get(key, ()))


ENGINE_LINK: Any = ms.EngineLink


class ClusterCase(unittest.TestCase):
    """Masters that share an engine, without sockets, threads or the time."""

    def setUp(self) -> None:
        self.now, self.masters, self.cut_off = 1000.0, {}, set()
        self.clock = SimpleNamespace(time=lambda: T0 + self.now, sleep=lambda seconds: None,
                                     monotonic=lambda: self.now)
        self.engine = EngineInMemory(self.clock)
        for patch in (mock.patch.object(ms, "time", self.clock),
                      mock.patch.object(ms, "EngineLink", self.connect),
                      mock.patch.object(ms, "WorkerThread", lambda name, post: DiskThread()),
                      mock.patch.object(threading.Thread, "start"),
                      mock.patch.object(threading.Thread, "join"),
                      mock.patch.object(ms, "log")):
            self.log = patch.start()
            self.addCleanup(patch.stop)

    def connect(self, parts: Any) -> EngineInMemory:
        self.engine.ask("GET", "")
        return self.engine

    def start(self, name: str, **settings: str) -> Any:
        chosen = settings_of({"cluster__redis": "redis://x", "cluster__name": name,
                              "games__mygame": "My Game", **settings})
        registry = ms.Registry(ms.Rules(chosen))
        server = SimpleNamespace(settings=chosen, registry=registry, tallies={}, cluster={},
                                 health={}, database=None, protocols=[], post=None,
                                 news=ms.News(chosen, registry, {}))
        server.tell_changes = functools.partial(self.tell, server)
        with mock.patch.object(DiskThread, "work"):
            server.link = ms.Cluster(server)
        server.link.thread.at_once = False
        self.masters[name] = server
        return server

    def tell(self, server: Any) -> None:
        """What the program does with what has changed in the list."""
        for event, one in changes_of(server.registry):
            server.news.note(event, one)
            if not one.master:
                server.link.on_registry_event(event, one)

    def run_for(self, seconds: float, every: Callable[[], Any] = lambda: None) -> None:
        for step in range(int(seconds * 2)):
            self.now += 0.5
            for name, server in list(self.masters.items()):
                self.tell(server)
                job, done = server.link.thread.jobs.pop()
                reachable = self.engine.here and name not in self.cut_off
                with mock.patch.object(self.engine, "here", reachable):
                    try:
                        result = job()
                    except Exception as error:
                        result = error
                done(result, self.now)
                if step % 2:
                    server.registry.expire(self.now)
                    server.link.tick(self.now)
                    server.news.tick(self.now)
            every()

    def hear(self, server: Any, port: int = 1, lifetime: float = 120.0, game: str = "iceball",
             **fields: Any) -> ms.Server:
        return server.registry.list_or_refresh((game, "203.0.113.9", port), "203.0.113.9",
                                               self.now, lifetime, {
            "name": "S%d" % port, "verified": "handshake", **fields})

    def shown(self, server: Any) -> Dict[int, Tuple[str, str, int]]:
        """By port: the master that has heard it, its name and players."""
        return {one.port: (one.master, one.name, one.players) for one in server.registry.servers()}


    def sent(self) -> Dict[str, int]:
        """By master: how many messages it has sent since this was asked last."""
        sent: Dict[str, int] = collections.Counter()
        for name, server in self.masters.items():
            for hook in server.news.hooks.values():
                while hook.jobs.qsize():
                    hook.jobs.get()
                    sent[name] += 1
        return dict(sent)


class ClusterTest(ClusterCase):
    def test_a_zone_comes_with_its_owner(self) -> None:
        """What the master that hears it remembers of the announcer, the others know as well."""
        a, b = map(self.start, "ab")
        owner = {"port": "5000", "password": "0123456789abcdef"}
        zone = self.hear(a, game="subspace", room="subspace", private={"zone_owner": owner})
        self.run_for(3)
        known = b.registry.get(*zone.key)
        self.assertEqual((known.master, known.private), ("a", {"zone_owner": owner}))

    def test_what_one_has_found_in_a_list_and_another_has_heard(self) -> None:
        """The announcement counts more, at every master."""
        a, b, c = map(self.start, "abc")
        self.hear(a, lifetime=math.inf, name="A", found_at="up.example")
        self.run_for(3)
        self.assertEqual([one.found_at for one in c.registry.servers()], ["up.example"])
        self.hear(b, lifetime=math.inf, name="B")
        self.run_for(3)
        for server in a, b, c:
            self.assertEqual([(one.found_at, one.name, one.master or "b")
                              for one in server.registry.servers()], [("", "B", "b")])
        entries = [ms.Server("iceball", "203.0.113.9", 1, "", seen, 60.0, found_at=found_at)
                   for seen, found_at in ((1.0, ""), (2.0, ""), (3.0, "up.example"))]
        self.assertEqual(max(entries, key=ms.entry_preference).last_seen, 2.0)

    def test_listed_changed_and_gone(self) -> None:
        a, b, c = map(self.start, "abc")
        told = {"mode": "ctf", "map": "m", "version": "1", "players": 3, "max_players": 8,
                "playing": 2, "description": "D", "verified": "query",
                "responding": True, "details": {"arenas": "x"}}
        server = self.hear(a, **told)
        self.run_for(2)
        for other in b, c:
            found = other.registry.get("iceball", "203.0.113.9", 1)
            self.assertEqual({name: getattr(found, name) for name in told}, told)
            self.assertEqual((found.master, found.confirmed, found.first_seen), ("a", True, 1000.0))
        written = self.engine.commands["ZADD"] / self.engine.commands["SET"]
        for _ in range(9):
            self.now += 40
            a.registry.confirm(server, self.now)            # heartbeats alone are not told
            self.run_for(2)
        self.assertLessEqual(self.engine.commands["ZADD"] / self.engine.commands["SET"], written)
        self.assertGreater(found.last_seen, self.now - 120)
        self.hear(a, players=5)
        self.run_for(1)
        self.assertEqual(self.shown(c), {1: ("a", "S1", 5)})
        a.registry.remove_own(server)
        self.run_for(1)
        self.assertEqual(self.shown(b), {})

    def test_both_know_a_server(self) -> None:
        """The later word counts; who has heard it keeps it when the other loses it."""
        a, b, c = map(self.start, "abc")
        self.hear(a, name="first")
        self.run_for(2)
        self.assertEqual((self.shown(b), b.registry.own.counts), ({1: ("a", "first", 0)}, {}))
        self.hear(b, name="second")
        self.assertEqual(b.registry.own.counts, {"203.0.113.9": 1})
        self.run_for(2)
        for server, master in (a, ""), (b, ""), (c, "b"):
            self.assertEqual(self.shown(server), {1: (master, "second", 0)})
        own = a.registry.get("iceball", "203.0.113.9", 1)
        a.registry.remove_own(own)
        self.tell(a)
        self.assertEqual(self.shown(a), {1: ("b", "second", 0)}, "no more than a second without it")
        self.run_for(2)
        self.assertEqual(self.shown(b), {1: ("", "second", 0)})
        a.registry.remove_own(a.registry.get("iceball", "203.0.113.9", 1))      # not its own
        self.assertEqual(len(self.shown(a)), 1)
        connected = self.hear(a, name="third", lifetime=math.inf)
        self.now += 1
        self.hear(b, name="fourth")
        self.run_for(2)
        self.assertEqual((connected.name, self.shown(c)[1][1]), ("third", "fourth"))

    def test_the_quake_iii_family_of_others(self) -> None:
        """It has a title, stands in the game's own list and is not polled; a master of an older
        version tells a tag as well."""
        a, b = map(self.start, "ab")
        core = make_core()._replace(registry=b.registry)
        quake3 = ms.Quake3(core)
        for port, details in (1, {"gamename": "Xonotic", "tag": "DarkPlaces"}), (
                2, {"gamename": "Xonotic"}):
            self.hear(a, port, game="xonotic", version="3", players=1, details=details)
        self.run_for(2)
        (answer, _), = quake3.datagram(b"\xff\xff\xff\xffgetservers Xonotic 3", (
            "192.0.2.1", 5), self.now)
        self.assertEqual(answer.count(b"\\\xcb\0\x71\x09\0"), 2)
        self.assertEqual((b.registry.titles, core.poller.targets), ({"xonotic": "Xonotic"}, {}))
        for port in 1, 2:
            a.registry.remove_own(a.registry.get("xonotic", "203.0.113.9", port))
        self.run_for(2)
        self.assertEqual(b.registry.titles, {})

    def test_a_master_that_has_gone(self) -> None:
        a, b = map(self.start, "ab")
        for port, lifetime in (1, 120.0), (2, math.inf), (3, 120.0):
            self.hear(a, port, lifetime, verified="query")
        self.hear(b, 3)
        self.run_for(2)
        died, self.masters = self.now, {"b": b}
        gone: Dict[int, float] = {}

        def look() -> None:
            self.hear(b, 3)
            for port in {1, 2, 3} - self.shown(b).keys():
                gone.setdefault(port, self.now - died)
        self.run_for(150, look)
        self.assertEqual(gone.keys(), {1, 2})
        for port, lifetime in (1, 120), (2, 60):
            self.assertTrue(lifetime <= gone[port] <= lifetime + 14, gone)
        self.assertNotIn("a", b.cluster["servers"])
        self.assertEqual(self.engine.values["masterserver-state"], {b"b"})
        again = self.start("a")
        self.hear(again, 1)
        self.run_for(3)
        self.assertEqual(self.shown(again), {1: ("", "S1", 0), 3: ("b", "S3", 0)})
        self.assertEqual(self.shown(b), {1: ("a", "S1", 0), 3: ("", "S3", 0)})

    def test_a_link_that_breaks_again_and_again(self) -> None:
        """The servers of a master that has stopped leave all the same within their lifetime."""
        a, b = map(self.start, "ab")
        self.hear(a, 1, 120.0)
        self.hear(a, 2, 300.0)
        self.run_for(3)
        died, self.masters = self.now, {"b": b}
        gone: Dict[int, float] = {}

        def look() -> None:
            if self.now % 20 == 0:
                b.link.on_broken_link(OSError("cut"), self.now)
            for port in {1, 2} - self.shown(b).keys():
                gone.setdefault(port, self.now - died)
        self.run_for(600, look)
        for port, lifetime in (1, 120), (2, 300):
            self.assertTrue(lifetime <= gone[port] <= 1.1 * lifetime + 14, gone)

    def test_the_engine_goes_and_comes_back_empty(self) -> None:
        a, b = map(self.start, "ab")
        self.hear(a, 1, math.inf)
        self.hear(b, 2, math.inf)
        self.run_for(3)
        self.engine.here = False
        self.engine.flush()
        self.run_for(300, lambda: self.assertEqual(
            self.shown(a).keys() & self.shown(b).keys(), {1, 2}))
        self.assertEqual((a.cluster["connected"], a.cluster["pending"], a.cluster["lag_seconds"]),
                         (False, 1, 300.0))
        self.assertEqual(a.health, {"cluster": "'refused'"})
        for port in range(10, 500):                         # who comes and goes leaves no mark
            a.registry.remove_own(self.hear(a, port))
        self.hear(a, 3, math.inf)
        self.run_for(1)
        self.assertLess(len(a.link.pending), 10)
        self.assertEqual(sorted(self.shown(b)), [1, 2])
        a.registry.remove_own(self.hear(a, 1))
        self.hear(a, 1, math.inf)
        self.hear(b, 5, math.inf)
        self.engine.here = True
        self.run_for(3, lambda: self.assertEqual({1, 2} - self.shown(b).keys(), set()))
        self.assertEqual(sorted(self.shown(a)), [1, 2, 3, 5])
        self.engine.here = False
        self.run_for(1)
        b.registry.remove_own(b.registry.get("iceball", "203.0.113.9", 5))
        self.run_for(1)                                     # its next state does not have it
        self.engine.here = True
        self.run_for(3)
        self.assertEqual((sorted(self.shown(a)), sorted(self.shown(b)), a.health),
                         ([1, 2, 3], [1, 2, 3], {}))
        self.assertEqual((a.cluster["reconnects_total"], a.cluster["servers"]),
                         (2, {"a": 2, "b": 1}))
        self.engine.flush()                                 # while they are linked
        self.run_for(4, lambda: self.assertEqual(len(self.shown(b)), 3))
        self.assertEqual(a.cluster["reconnects_total"], 3)
        self.hear(a, 4)
        self.run_for(1)
        self.assertEqual(len(self.shown(b)), 4)
        self.engine.here = False
        self.run_for(3600 + 130)
        self.assertEqual(sorted(self.shown(b)), [2], "nobody knows of the others any more")

    def test_two_of_one_name(self) -> None:
        """The second one keeps out from the first moment, and says so when it can be no process
        of its own before any more."""
        one, two, other = self.start("a"), self.start("a"), self.start("b")
        self.hear(one, 1, 1e6)
        self.hear(two, 2, 1e6)
        self.masters = {"one": one, "two": two, "b": other}     # begin in the same moment
        gone: List[Any] = []
        note = other.news.note
        other.news.note = lambda event, server: (note(event, server),
                                                 event == "gone" and gone.append(event))
        self.run_for(11)
        self.assertEqual((one.health, two.health, self.log.error.mock_calls), ({}, {}, []))
        self.run_for(300)
        name_taken = "another master is called a as well; change its [cluster] name"
        self.assertEqual(two.health, {"cluster": name_taken})
        self.log.error.assert_called_once_with(
            "trouble with the %s: %s", "cluster", name_taken)
        self.assertEqual((one.health, other.health, gone, one.cluster["reconnects_total"]),
                         ({}, {}, [], 0))
        self.assertEqual([self.shown(server) for server in (one, two, other)], [
            {1: ("", "S1", 0)}, {2: ("", "S2", 0)}, {1: ("a", "S1", 0)}])
        del self.masters["one"]                         # when it has gone, the other has the name
        self.run_for(20)
        self.assertEqual((two.health, self.shown(other)[2]), ({}, ("a", "S2", 0)))

    def test_a_master_that_keeps_out_costs_little(self) -> None:
        one, two = self.start("a"), self.start("a")
        for port in range(1, 30):
            self.hear(two, port)
        self.masters = {"one": one}
        self.run_for(3)
        self.masters = {"two": two}
        self.engine.values["masterserver-state:a"] = b"another process-1 5 0"
        self.engine.ends.pop("masterserver-state:a")
        self.engine.commands.clear()
        self.run_for(60)
        self.assertEqual(self.engine.commands.keys(), {"GET", "TIME"})

    def test_it_was_killed_or_stopped_and_is_back(self) -> None:
        """Seconds until it shares again, with nothing to say of that."""
        for stopped, longest in (True, 2), (False, 13):
            a, b = map(self.start, "ab")
            self.hear(a)
            self.run_for(3)
            if stopped:
                a.link.close()
            again, began = self.start("a"), self.now
            self.hear(again, 2)
            while 2 not in self.shown(b):
                self.run_for(1)
                self.assertEqual((again.health, b.health), ({}, {}))
            self.assertLessEqual(self.now - began, longest)
            self.log.error.assert_not_called()
            for server in again, b:
                server.link.close()
            self.engine.flush()

    def test_a_process_that_was_held_up_has_lost_its_name(self) -> None:
        """Another one of its name came while it was: it keeps out, and takes no lease away."""
        one, two, other = self.start("a"), self.start("a"), self.start("b")
        self.hear(one)
        self.hear(two, 2)
        self.masters = {"one": one, "b": other}
        self.run_for(3)
        self.masters = {"two": two, "b": other}
        self.run_for(20)
        self.masters = {"one": one, "two": two, "b": other}
        self.run_for(60)
        self.assertEqual((one.cluster["connected"], two.health), (False, {}))
        self.assertIn("another master is called a as well", one.health["cluster"])
        one.link.close()                           # it gives up nothing that it has not
        self.run_for(2)
        self.assertEqual((two.health, two.cluster["connected"]), ({}, True))

    def test_when_records_have_disappeared(self) -> None:
        """The log says so once, and the master begins a new state. One that was held up for so long
        that its name has ended takes it again, with nothing to say."""
        a = self.start("a")
        self.run_for(3)
        self.now += 20
        self.run_for(3)
        self.assertEqual((a.cluster["reconnects_total"], self.log.error.mock_calls), (0, []))
        self.engine.flush()
        self.run_for(5)
        [(_, logged, _)] = self.log.error.mock_calls
        self.assertIn("disappeared from Redis (restart, flush or eviction)", logged[2])
        self.assertEqual((a.cluster["reconnects_total"], a.health), (1, {}))

    def test_a_master_that_was_held_up(self) -> None:
        """Its log has expired, and the others have given it up."""
        a, b = map(self.start, "ab")
        self.hear(a, 1, math.inf)
        self.run_for(2)
        self.masters.pop("a")
        self.run_for(100)
        self.assertEqual(self.shown(b), {})
        self.masters["a"] = a
        self.run_for(4)
        self.assertEqual(self.shown(b), {1: ("a", "S1", 0)})
        # as MasterServer.round tells
        b.registry.silence_counts_from = self.now = self.now + 500
        b.link.tick(self.now)
        self.assertEqual(len(self.shown(b)), 1)

    def test_the_rules_of_each_master(self) -> None:
        a, b = self.start("a", games__other="Other"), self.start("b", limits__servers="3")
        for port, fields in (1, {}), (2, {"name": "bad"}), (3, {"game": "mygame"}), (
                4, {"game": "other"}):
            self.hear(a, port, **fields)
        self.run_for(2)
        self.assertEqual(sorted(self.shown(b)), [1, 2, 3])
        for settings, ports in (({"server__refuse_names": "bad"}, [1, 3, 4]),
                                ({"bans__203.0.113.0/24": ""}, []), ({}, [1, 2, 3, 4])):
            b.registry.apply_rules(settings_of({"games__mygame": "My Game", **settings}))
            b.link.read(None)
            self.run_for(3)
            self.assertEqual(sorted(self.shown(b)), ports, settings)
        b.registry.rules.max_servers = 3
        self.hear(self.start("c"), 5)
        self.run_for(2)
        self.assertEqual(len(self.shown(b)), 4)
        with self.assertRaises(ms.Refused):
            self.hear(b, 6)

    def test_a_full_list_catches_up(self) -> None:
        """What has no room is not remembered, and is read again within a minute when there is some.
        """
        a, b = self.start("a"), self.start("b", limits__servers="3")
        for port in 1, 2, 3, 4, 5:
            self.hear(a, port)
        self.hear(b, 9, 1e6)
        self.run_for(3)
        self.assertEqual((len(self.shown(b)), len(b.link.masters["a"].servers)), (3, 2))
        trouble = {"cluster list": "[limits] servers = 3 leaves no room for some servers of the "
                                   "other masters"}
        self.assertEqual((b.health, a.health), (trouble, {}))
        self.run_for(100, lambda: self.assertEqual(b.health, trouble))
        self.log.error.assert_called_once()
        for port in 1, 2, 3, 4, 5:
            self.hear(a, port, 1e6)
        b.registry.remove_own(b.registry.get("iceball", "203.0.113.9", 9))
        self.run_for(61)
        self.assertEqual((len(self.shown(b)), b.health), (3, trouble))
        b.registry.apply_rules(settings_of({"limits__servers": "99"}))
        self.run_for(61)                                    # without Cluster.read()
        self.assertEqual((self.shown(b).keys(), b.health), ({1, 2, 3, 4, 5}, {}))

    def test_many_leave_little_by_little(self) -> None:
        """Of a master that has stopped, and those that it has lost while it was away."""
        with mock.patch.object(ms, "CLUSTER_BATCH", 20):
            a, b = self.start("a"), self.start("b")
            a.registry.rules.max_servers_per_source = 100
            for port in range(1, 61):
                self.hear(a, port)
            self.run_for(10)
            counts = []
            for server in a.registry.servers():
                a.registry.remove_own(server)
            a.link.on_broken_link(OSError("cut"), self.now)
            self.run_for(8, lambda: counts.append(len(self.shown(b))))
            steps = {before - after for before, after in zip(counts, counts[1:])}
        self.assertEqual((counts[0], counts[-1]), (60, 0))
        self.assertLessEqual(max(steps), 40)                # by an exchange and a tick

    def test_others_servers_are_no_business_of_protocols_and_disk(self) -> None:
        a, b = map(self.start, "ab")
        core = make_core()._replace(registry=b.registry)
        hyperbol = ms.Hyperbol(core)
        saved = ms.SavedList(mock.Mock(), b.registry, mock.Mock(), {})
        for port in range(1, 60):                       # more than one source may have
            a.registry.rules.max_servers_per_source = 100
            self.hear(a, port, math.inf, "hyperbol", room="hyperbol", private={"flavor": 3})
        self.hear(b, 99)
        self.run_for(2)
        hyperbol.tick(self.now)
        self.assertEqual((core.poller.targets, b.registry.own.counts), ({}, {"203.0.113.9": 1}))
        self.assertEqual(b.registry.get("hyperbol", "203.0.113.9", 7).private, {"flavor": 3})
        saved.tick(self.now, T0 + self.now)
        write = saved.disk.submit.call_args[0][0]
        write()
        (rows, gone), _ = saved.database.save.call_args
        self.assertEqual(([row[2] for row in rows], gone), ([99], set()))
        self.assertEqual(len(saved.database.add_samples.call_args[0][1]), 60 + 2 + 1)
        own = self.hear(b, 7, math.inf, "hyperbol")
        b.registry.remove_own(own)                          # as others have it, it is shown
        self.tell(b)
        saved.batch_began = None
        saved.tick(self.now, T0 + self.now)
        saved.disk.submit.call_args[0][0]()
        (rows, gone), _ = saved.database.save.call_args
        self.assertEqual((rows, {key[2] for key in gone}), ([], {7}))
        # Named by the ini, does not answer
        target = core.poller.add(hyperbol, "203.0.113.9", 8, ms.NAMED)
        target.missed = ms.MISSED_POLLS_LIMIT
        hyperbol.poll_missed(target, self.now)
        self.assertTrue(b.registry.get("hyperbol", "203.0.113.9", 8).responding)

    def test_a_server_says_again_what_another_master_has_changed(self) -> None:
        """It tells two masters, the later word counts; what it told one of them before is no
        reason to take it for known. And a server that came from elsewhere tells what it told."""
        for make, say, port in ((ms.Iceball, self.iceball_says, 20737),
                                (ms.Quake3, self.quake3_says, 27960)):
            a, b = map(self.start, "ab")
            cores = [make_core()._replace(registry=server.registry) for server in (a, b)]
            at_a, at_b = [(core, make(core)) for core in cores]
            for place, players in (at_a, 0), (at_a, 0), (at_b, 1), (at_a, 0), (at_b, 0), (at_b, 7):
                say(*place, players)
                self.run_for(2)
                self.assertEqual([self.shown(server)[port][2] for server in (a, b)],
                                 [players, players], make)
            for server in a, b:
                server.link.close()
            self.masters.clear()
            self.engine.flush()

    def iceball_says(self, core: Any, iceball: ms.Iceball, players: int) -> None:
        """A game server announces, and returns what it is told unless that is known already."""
        packet, peer = announcement(players=players), ("203.0.113.9", 40000)
        for answer, _ in deliver(iceball, packet, peer, self.now):
            deliver(iceball, b"HSHK" + answer[4:], peer, self.now)

    def quake3_says(self, core: Any, quake3: ms.Quake3, players: int) -> None:
        """A game server sends a heartbeat, and answers every getinfo."""
        place = "203.0.113.9", 27960
        for getinfo, _ in quake3.datagram(HEARTBEAT, place, self.now):
            quake3.datagram(info(getinfo[12:], clients=b"%d" % players), place, self.now)
        for getinfo, _ in core.poller.tick(self.now):
            core.poller.datagram(info(getinfo[12:], clients=b"%d" % players), place, self.now)

    def test_the_attributes_that_an_own_server_takes_from_another_master(self) -> None:
        """Who owns a zone is this master's own business, as is what its ini names."""
        def zone(server: Any, name: str, port: int) -> ms.Server:
            owner = {"port": str(port), "password": "0" * 16}
            return self.hear(server, name=name, room="subspace", game="subspace",
                             private={"zone_owner": owner})

        def shown(server: ms.Server) -> Tuple[str, str]:
            return server.name, server.private["zone_owner"]["port"]
        a, b, c = map(self.start, "abc")
        own = zone(a, "old", 1)
        self.now += 1
        zone(b, "new", 2)
        self.run_for(3)
        self.assertEqual(shown(own), ("new", "1"))
        foreign = c.registry.get("subspace", "203.0.113.9", 1)
        self.assertEqual(shown(foreign), ("new", "2"))
        zone(b, "newer", 3)
        self.run_for(3)
        self.assertEqual(shown(foreign), ("newer", "3"))

    GOOD = ("iceball", "203.0.113.9", 1, 9e9, T0 - 0.0, T0 - 0.0,
            {"name": "S", "players": 3, "max_players": 8, "verified": "query"}, True)
    RECORD = json.dumps(GOOD).encode()

    def test_records_that_are_strange_or_broken(self) -> None:
        b = self.start("b")
        fields = self.GOOD[6]
        rows: Any = (
            ({}, 3), ({6: {**fields, "later": {"more": 5}}}, 3), ({4: T0 - 1e9, 5: 9e11}, 3),
            ({1: "::ffff:203.0.113.9"}, 3), ({6: {**fields, "max_players": "256"}}, 3),
            ({7: False}, 3), ({7: "x"}, 3),
            *(({number: value}, None) for number, value in (
                (3, math.nan), (3, -math.inf), (3, 5), (1, "203.0.113"), (1, "239.0.0.1"),
                (1, None), (2, 65536), (2, -1), (2, True), (0, "no such"), (0, ""), (6, 5),
                (6, {}), (6, "{}"), (6, "[" * 9999), (7, []))))
        gone = json.dumps(self.GOOD[:3]).encode()
        for changed, players in rows:
            row = {**dict(enumerate(self.GOOD)), **changed}
            self.say(b, json.dumps(list(row.values())).encode())
            found = b.registry.get("iceball", "203.0.113.9", 1)
            expected = 3 if changed == {7: []} else players
            self.assertEqual(found and found.players, expected, row)
            self.say(b, gone)
            self.assertEqual(self.shown(b), {})
        self.say(b, self.RECORD)
        for noise in (b"", b"[]", b"{}", b"5", b'"x"', b"\xff", b"[" * 9999, b"9" * 9999,
                      self.RECORD[:-9], json.dumps(self.GOOD[:5]).encode(),
                      json.dumps([*self.GOOD, "later"]).encode()):
            self.say(b, noise)
        self.assertEqual(len(self.shown(b)), 1)
        self.assertGreater(b.tallies["cluster"].malformed, 15)
        seeded = random.Random(41)
        for _ in range(2000):
            noise = bytearray(self.RECORD)
            for _ in range(seeded.randrange(1, 5)):
                noise[seeded.randrange(len(noise))] = seeded.choice(NASTY_BYTES)
            self.say(b, bytes(noise))
        self.run_for(1)
        for one in b.registry.servers():
            self.assertEqual(one.name, ms.clean(one.name))

    def say(self, server: Any, record: bytes) -> None:
        """What another master has written."""
        other = server.link.masters.setdefault("a", ms.OtherMaster())
        number = other.number + 1
        changes = server.link.state.read_portion("a", other, [record, b"%d" % number], 9)
        self.assertEqual(changes[1], number)
        fetched = ms.Fetched("", number, 0, False, *changes)
        server.link.on_exchanged({"a": fetched}, self.now)
        del server.link.thread.jobs[1:]

    def test_a_portion_that_is_full_is_not_the_last(self) -> None:
        """A record behind `end` may replace one that was before it, and is removed already."""
        state = self.start("b").link.state
        portion = [self.RECORD, b"1", b"end", b"2"]
        for limit, is_last in (2, False), (3, True):
            changes, number, found = state.read_portion("a", ms.OtherMaster(), portion, limit)
            self.assertEqual((len(changes), number, found), (1, 2, is_last))

    def test_mutated_replies(self) -> None:
        """Whatever the engine sends, it is refused in words, and counted if it is a record."""
        a, b = map(self.start, "ab")
        for port in 1, 2, 3:
            self.hear(a, port)
        self.run_for(4)
        state, masters = b.link.state, {"a": b.link.masters["a"]}
        masters["a"].number = 0
        replies = self.engine.ask_all(next(state.fetch(masters)))
        self.assertGreater(len(replies[0]), 6)
        seeded = random.Random(61)
        link = ENGINE_LINK.__new__(ENGINE_LINK)
        for _ in range(3000):
            noise = bytearray(b"".join(map(self.resp, replies)))
            for _ in range(seeded.randrange(1, 4)):
                noise[seeded.randrange(len(noise))] = seeded.choice(NASTY_BYTES)
            link.file, link.password, link.bytes_left = io.BytesIO(noise), "", 1 << 20
            steps = state.fetch(masters)
            next(steps)
            with contextlib.suppress(ms.Malformed, ValueError, StopIteration):
                steps.send([link.read_reply(2) for _ in replies])
        self.assertGreater(b.tallies["cluster"].malformed, 500)

    def resp(self, reply: Any) -> bytes:
        """A reply as Redis writes it."""
        if isinstance(reply, list):
            return b"*%d\r\n%s" % (len(reply), b"".join(map(self.resp, reply)))
        return b"$%d\r\n%s\r\n" % (len(reply), reply)

    def test_names_and_masters_of_no_sense(self) -> None:
        b = self.start("b")
        record = self.RECORD
        names = self.engine.own("masterserver-state", set())
        for name in (b"\xff\n", b'a"', b"x" * 65, b"", b"good", b"late"):
            names.add(name)
            state = "0123456789abcdef-1"
            value = b"0123456789abcdef-1 1 0" if name == b"good" else b"%s x 0" % state.encode()
            self.engine.values["masterserver-state:" + name.decode("latin-1")] = value
            self.engine.values["masterserver-state:" + state] = {record: 1}
        names.update(b"n%d" % number for number in range(500))
        self.run_for(60)
        self.assertEqual((b.cluster["servers"], b.health), ({"b": 0, "good": 1}, {}))


class ClusterStepsTest(ClusterCase):
    """Masters that take turns at random between single commands, while the engine, their links and
    they themselves break. In the end all lists are equal, and until then nobody drops a server that
    its own master has listed all the time."""

    # 43 finds a reader that does not look at FLOOR, 62 an `end` that counts too early
    SEEDS = (*range(10), 43, 62)

    def setUp(self) -> None:
        super().setUp()
        for patch in (mock.patch.object(ms.Cluster, "drive", self.keep),
                      mock.patch.multiple(ms, CLUSTER_BATCH=6, LEFT_S=2.0)):
            patch.start()
            self.addCleanup(patch.stop)

    def keep(self, link: Any, conversation: Any) -> Any:
        self.conversation = conversation
        return conversation

    def join(self, name: str, registry: Any = None) -> None:
        """Begin a master, or begin it again with the servers that it has restored."""
        server = self.start(name)
        self.steps[name] = self.steps_of(server)
        for own in registry.servers() if registry else ():
            if not own.master:
                own.entry_cache = own.rank = None
                server.registry.insert(own)
        changes_of(server.registry)

    def steps_of(self, server: Any) -> Iterator[None]:
        """The exchanges of a master, a command at a time."""
        while True:
            job, done = server.link.thread.jobs.pop()
            replies: Any = None
            try:
                result = job()
                steps = self.conversation
                while True:
                    commands = steps.send(replies)
                    replies = []
                    for command in commands:
                        if commands[0] != ("MULTI",) or command == ("MULTI",):
                            yield
                        if server.link.name in self.cut_off:
                            raise OSError("cut off")
                        replies.append(self.engine.ask(*command))
            except StopIteration as stop:
                if result is steps:
                    result = stop.value
            except Exception as error:
                result = error
            yield
            self.tell(server)
            done(result, self.now)

    def tell(self, server: Any) -> None:
        for event, one in server.registry.changes:
            owner = self.masters.get(one.master)
            listed = event == "gone" and owner and owner.registry.get(*one.key)
            if listed and abs(listed.first_seen - one.first_seen) < 1e-3:
                self.flaps.append((server.link.name, one.key))
        super().tell(server)

    def test_at_random(self) -> None:
        for seed in self.SEEDS:
            self.run_seed(seed)

    def run_seed(self, seed: int) -> None:
        seeded = random.Random(seed)
        self.engine.flush()
        self.engine.here = True
        self.masters, self.steps, self.flaps = {}, {}, []
        self.cut_off = set()
        for name in "abc":
            self.join(name)
        for _ in range(3000):
            self.take_step(seeded)
            if seeded.random() < 0.02:
                self.disturb(seeded)
        self.cut_off.clear()
        for _ in range(9000):
            self.take_step(seeded)
        expected = {one.port: one.name for server in self.masters.values()
                    for one in server.registry.servers() if not one.master}
        for server in self.masters.values():
            shown = {one.port: one.name for one in server.registry.servers()}
            self.assertEqual(shown, expected, "seed %d" % seed)
        self.assertEqual(self.flaps, [], "seed %d" % seed)

    def take_step(self, seeded: random.Random) -> None:
        next(self.steps[seeded.choice("abc")])
        before = self.now
        self.now += seeded.random() * 0.02
        if int(before) != int(self.now):
            for server in self.masters.values():
                self.tell(server)
                server.link.tick(self.now)

    def disturb(self, seeded: random.Random) -> None:
        name = seeded.choice("abc")
        server = self.masters[name]
        event = seeded.randrange(100)
        port = seeded.randrange(12) * 3 + "abc".index(name) + 1         # each has its own
        if event < 70:
            listed = server.registry.get("iceball", "203.0.113.9", port)
            if listed and seeded.random() < 0.4:
                server.registry.remove_own(listed)
            else:
                self.hear(server, port, 1e6, name="%x" % seeded.getrandbits(40))
        elif event < 74:
            self.engine.flush()
        elif event < 80:
            keys = sorted(self.engine.values)
            if keys:
                self.engine.DEL(seeded.choice(keys))
        elif event < 86:
            self.engine.DEL("masterserver-state:" + name)
        elif event < 92:
            self.cut_off ^= {name}
        elif event < 96:
            self.now += 2.5
        else:
            self.join(name, server.registry)


class ClusterNewsTest(ClusterCase):
    """Messages to webhooks: a crossing is seen at every master, and one of them sends."""

    HOOK = "text http://hook.example/"

    def start_with_hooks(self, names: str, at: str) -> None:
        """Masters of these names; those in `at` have webhooks."""
        for name in names:
            hooks = {"webhooks__ours": self.HOOK} if name in at else {}
            self.start(name, **hooks)
        self.run_for(3)

    def clear(self) -> None:
        for server in self.masters.values():
            server.link.close()
        self.masters.clear()
        self.cut_off.clear()
        self.engine.flush()

    def test_one_master_sends_each_message(self) -> None:
        """Which masters have webhooks, which of them hears how many players, who sends."""
        for at, heard, wanted in (
                ("abc", "c0 c2", "a"), ("bc", "c0 c2", "b"), ("b", "a0 a5", "b"),
                ("b", "b0 b5", "b"), ("c", "a0 b0 a5 b5", "c"), ("ab", "a0 b0 b5 a5", "a"),
                ("ab", "b0 a5", "a"), ("b", "b0 a5", "b"), ("ab", "a0 b5", "a"),
                ("ab", "a5", ""), ("ab", "b5 a5", ""), ("ab", "b5 a5 b6", ""),
                ("", "a0 a5", "")):
            self.start_with_hooks("abc", at)
            for name, players in heard.split():
                self.hear(self.masters[name], players=int(players))
                self.run_for(2)
            self.assertEqual(self.sent(), {wanted: 1} if wanted else {}, (at, heard))
            self.clear()

    def test_a_body_names_the_master_that_has_heard_the_server(self) -> None:
        self.start_with_hooks("ab", "a")
        self.masters["a"].news.read(settings_of({"webhooks__ours": "json http://h/"}))
        for name, port in zip("ab", (1, 2)):
            for players in 0, 2:
                self.hear(self.masters[name], port, players=players)
                self.run_for(2)
            tell, _ = self.masters["a"].news.hooks["ours"].jobs.get()
            self.assertEqual(json.loads(tell.args[2])["server"]["master"], name)

    def test_a_restart_is_no_news_elsewhere_either(self) -> None:
        for name in "az":
            self.start_with_hooks("b" + name, "b" + name)
            self.hear(self.masters[name], players=0)
            self.run_for(2)
            self.masters[name].link.close()
            again = self.start(name, webhooks__ours=self.HOOK)
            restored = ms.Server("iceball", "203.0.113.9", 1, "203.0.113.9", self.now, 120.0, "S1")
            restored.confirmed = False
            again.registry.insert(restored)
            self.run_for(3)
            shown = self.masters["b"].registry.get(*restored.key)
            self.assertEqual((shown.master, shown.confirmed), (name, False))
            self.hear(again, players=5)
            self.run_for(2)
            self.assertEqual((self.sent(), shown.confirmed, shown.players), ({}, True, 5))
            self.hear(again, players=0)
            self.run_for(2)
            self.hear(again, players=5)
            self.run_for(2)
            self.assertEqual(self.sent(), {min("b", name): 1})
            self.clear()

    def test_without_a_link(self) -> None:
        """The master that is cut off, the one that hears the server, seconds of the cut before
        the server's players come and after that; who sends, once."""
        for cut_off, hears, before, after, wanted in (
                ("a", "a", 15, 5, "a"), ("b", "b", 15, 5, "b"), ("a", "b", 15, 5, "b"),
                ("b", "a", 15, 5, "a"), ("b", "b", 3, 2, "a"), ("a", "b", 3, 2, "a"),
                ("a", "a", 3, 2, "a"), ("b", "a", 3, 2, "a"), ("ab", "b", 15, 600, "b"),
                ("ab", "a", 600, 15, "a")):
            self.start_with_hooks("ab", "ab")
            self.hear(self.masters[hears], lifetime=1e6)
            self.run_for(3)
            self.cut_off = set(cut_off)
            self.run_for(before)
            self.hear(self.masters[hears], lifetime=1e6, players=5)
            self.run_for(after)
            self.cut_off.clear()
            self.run_for(20)
            self.assertEqual(self.sent(), {wanted: 1}, (cut_off, hears, before))
            self.clear()

    def test_another_takes_over(self) -> None:
        """When the first master stops, is killed, or has no webhooks any more, the next one sends
        what is due after that, within the time that a name lasts, and nothing twice."""
        for end in "stop", "kill", "reload":
            self.start_with_hooks("abc", "ab")
            a, c = self.masters["a"], self.masters["c"]
            for port in 1, 2:
                self.hear(c, port, 1e6)
            self.run_for(2)
            self.hear(c, 1, 1e6, players=5)
            self.run_for(2)
            self.assertEqual(self.sent(), {"a": 1})
            if end == "reload":
                a.news.read(settings_of({}))
                self.run_for(1)
            else:
                del self.masters["a"]
            if end == "stop":
                a.link.close()
            self.hear(c, 1, 1e6)
            self.tell(c)
            for port in 1, 2:
                self.hear(c, port, 1e6, players=5)
            self.run_for(13)
            self.assertEqual(self.sent(), {"b": 1}, end)
            self.clear()

    def test_a_master_is_killed_while_a_message_is_due(self) -> None:
        """A master that was alive after that may have sent it. It is not sent twice."""
        for lived_s, hears, wanted in ((0, "c", {"b": 1}), (0, "b", {"b": 1}), (1.5, "c", {"a": 1}),
                                       (5, "c", {"a": 1}), (2, "a", {"a": 1})):
            self.start_with_hooks("abc", "ab")
            a = self.masters["a"]
            self.hear(self.masters[hears], 1, 1e6)
            self.run_for(3)
            if not lived_s:
                del self.masters["a"]
            self.hear(self.masters[hears], 1, 1e6, players=5)
            self.run_for(lived_s)
            sent = self.sent()
            self.masters.pop("a", None)
            self.run_for(30)
            for name, count in self.sent().items():
                sent[name] = sent.get(name, 0) + count
            self.assertEqual(sent, wanted, (lived_s, hears))
            self.masters["a"] = a
            self.clear()


# --- What other masters list ---------------------------------------------------------------------

class UpstreamsTest(unittest.TestCase):
    """Without sockets, threads or the time: a fetch gives what the test says."""

    def setUp(self) -> None:
        self.now = 1000.0
        self.lists: Dict[str, Any] = {}         # by host: what it names, or the error of a fetch
        self.fetched: List[str] = []
        self.silent: List[str] = []
        clock = SimpleNamespace(time=lambda: T0 + self.now, monotonic=lambda: self.now,
                                sleep=lambda seconds: None)
        for patch in (mock.patch.object(ms, "time", clock),
                      mock.patch.object(ms, "WorkerThread", lambda name, post: DiskThread()),
                      mock.patch.object(DiskThread, "now", lambda thread: self.now),
                      mock.patch.object(ms, "resolve_host", self.resolve),
                      mock.patch.object(ms, "own_address", lambda place="": "192.0.2.50"),
                      mock.patch.object(ms, "fetch_list", self.fetch),
                      mock.patch.object(ms, "log")):
            self.log = patch.start()
            self.addCleanup(patch.stop)

    def resolve(self, host: str, like: str = "") -> str:
        if not host.endswith(".example"):
            raise OSError(host)
        return "192.0.2.1"

    def fetch(self, room: Any, host: str, *place: Any, **choice: str) -> List[Dict[str, Any]]:
        self.fetched.append(host)
        result = self.lists.get(host, [])
        if isinstance(result, Exception):
            raise result
        return [{"address": address, "port": port} for address, port in result]

    def start(self, *lines: str, **settings: str) -> None:
        chosen = settings_of({"upstream__masters": "\n".join(lines), **settings})
        rules = ms.Rules(chosen)
        self.server = SimpleNamespace(
            settings=chosen, rules=rules, registry=ms.Registry(rules), poller=ms.Poller(chosen),
            protocols=[], post=None, upstream={}, connections={})
        core = make_core()._replace(settings=chosen, registry=self.server.registry,
                                    poller=self.server.poller)
        self.server.rooms = core.rooms
        core.rooms.update((room.game, room(core))
                          for room in (ms.Hyperbol, ms.Quake3, ms.Luanti, ms.SubSpace))
        self.server.protocols += core.rooms.values()
        self.server.upstreams = ms.Upstreams(self.server)

    def reload(self, *lines: str, **settings: str) -> None:
        chosen = settings_of({"upstream__masters": "\n".join(lines), **settings})
        self.server.settings.values = chosen.values
        ms.MasterServer.apply_settings(self.server, self.now)

    def run_for(self, seconds: int) -> List[str]:
        """Seconds pass; the addresses that were asked."""
        asked = []
        poller = self.server.poller
        for _ in range(seconds):
            self.now += 1.0
            self.server.registry.expire(self.now)
            self.server.upstreams.tick(self.now)
            for query, peer in poller.tick(self.now):
                asked.append(peer[0])
                if peer[0] not in self.silent:
                    if query.startswith(OUT):
                        reply = info(query[12:], gamename=b"Xonotic", protocol=b"3")
                    else:
                        reply = hyperbol_reply(o1=query[1:])
                    poller.datagram(reply, peer, self.now + 0.02)
        return asked

    def listed(self) -> List[Tuple[str, str]]:
        return sorted((server.address, server.found_at)
                      for server in self.server.registry.servers())

    def told(self) -> List[str]:
        """What the log got since this was asked last."""
        lines = [call[1][0] % call[1][1:] for call in self.log.method_calls]
        self.log.reset_mock()
        return lines

    def test_ports_that_cannot_be_asked(self) -> None:
        """A zone is asked at the port after its own, and 65535 has none."""
        self.lists = {"a.example": [("203.0.113.9", 65535), ("203.0.113.9", 0)]}
        for line, asked in (("subspace a.example", []),
                            ("quake3 a.example Xonotic 3", ["203.0.113.9"])):
            self.start(line)
            with mock.patch.object(ms.SubSpace, "found", return_value={}):
                self.assertEqual(self.run_for(9)[:1], asked)

    def test_listed_with_where_it_was_found(self) -> None:
        self.lists = {"a.example": [("203.0.113.9", 5), ("203.0.113.8", 5)],
                      "b.example": [("203.0.113.7", 5)]}
        self.silent = ["203.0.113.8"]
        self.start("hyperbol a.example", "quake3 b.example:99 Xonotic 3")
        self.run_for(20)
        self.assertEqual(self.listed(), [
            ("203.0.113.7", "b.example:99"), ("203.0.113.9", "a.example")])
        wall = T0 + 1001
        self.assertEqual(self.server.upstream, {
            "hyperbol a.example": (wall, 2, 1, ""),
            "quake3 b.example:99 Xonotic 3": (wall, 1, 1, "")})
        self.assertEqual(self.told(), [
            "hyperbol a.example: 2 addresses in the list, 0 other entries left out",
            "quake3 b.example:99 Xonotic 3: 1 address in the list, 0 other entries left out"])
        self.silent.append("203.0.113.9")
        self.run_for(100)
        self.assertEqual(self.listed(), [("203.0.113.7", "b.example:99")])
        self.assertEqual(self.fetched, ["a.example", "b.example"])

    def test_which_addresses_are_asked(self) -> None:
        """(the address of the master, the addresses that it names, those that are asked)"""
        outside = ["203.0.113.9", "2001:db8::9"]
        near = ["10.1.1.1", "127.0.0.1", "192.168.1.5", "169.254.1.1", "100.64.1.1", "172.16.0.1",
                "192.0.0.8", "::1", "fc00::1", "fe80::1", "fec0::1", "::ffff:10.9.9.9",
                "::10.1.2.3", "64:ff9b::a01:203", "64:ff9b:1::1", "2002:a01:203::1", "192.0.2.50",
                "203.0.113.77"]
        never = ["224.0.0.1", "0.0.0.0", "255.255.255.255", "::", "ff02::1", "fe80::1%eth0", "a b",
                 "", "10.1", "203.0.113.9:5", "no.name", "[::1]"]
        own = {"203.0.113.77", "192.0.2.50"}
        for master, asked in (
                ("198.51.100.1", outside), ("2001:db8::1", outside), ("10.0.0.9", outside + near),
                ("::1", outside + near), ("192.0.2.50", outside + near),
                ("100.127.255.1", outside + near)):
            self.assertEqual([address for address in outside + near + never
                              if ms.may_be_queried(address, master, own)], asked, master)
        self.lists = {"a.example": [(address, 5) for address in outside + near + never]
                      + [("203.0.113.9", 0), ("203.0.113.9", 65536), ("203.0.113.9", 5)]}
        self.start("hyperbol a.example", server__public_address="203.0.113.77")
        result = ms.fetch_upstream(self.server.settings["upstream.masters"][0],
                                   ms.find_own_addresses(self.server.settings),
                                   collections.OrderedDict(), 5)
        servers, left_out = result
        self.assertEqual({server.address for server in servers}, set(outside))
        self.assertEqual(left_out, len(near + never) + 3)

    def test_bounds(self) -> None:
        """Of one list 5,000 addresses are used; all lists together fill half of the list; few wait
        for their first answer at a time; the lists take turns."""
        many = [(address_of(number), 5) for number in range(6000)]
        self.lists = {"a.example": many, "b.example": [("203.0.113.9", 5)]}
        self.start("hyperbol a.example", "hyperbol b.example", limits__servers="200",
                   poll__rate="50")
        self.run_for(1)
        self.assertEqual(self.server.upstream["hyperbol a.example"], (T0 + 1001, 5000, 0, ""))
        self.run_for(30)
        self.assertEqual(len(self.listed()), 100)
        self.assertIn(("203.0.113.9", "b.example"), self.listed())
        self.start("hyperbol a.example")
        self.silent = [address for address, _ in many]
        for _ in range(10):
            self.run_for(1)
            self.assertLessEqual(len(self.server.poller.targets), ms.UPSTREAM_UNANSWERED)
        self.assertGreater(len(self.server.poller.targets), ms.UPSTREAM_UNANSWERED / 2)

    def test_a_server_in_two_lists(self) -> None:
        """The first one counts, at every fetch."""
        self.lists = {host: [(address_of(number), 5) for number in range(20)]
                      for host in ("a.example", "b.example")}
        self.start("hyperbol a.example", "hyperbol b.example", limits__servers="20",
                   upstream__interval="10")
        self.run_for(25)
        masters = self.listed()
        self.assertEqual(len(masters), 10)
        self.run_for(25)
        self.assertEqual(self.listed(), masters)

    def test_own_servers_are_asked_in_time_beside_a_silent_list(self) -> None:
        self.lists = {"a.example": [(address_of(number), 5) for number in range(5000)]}
        self.silent = [address for address, _ in self.lists["a.example"]]
        self.start("hyperbol a.example")
        poller = self.server.poller
        for number in range(100):
            poller.add(self.server.rooms["hyperbol"], "203.0.113.%d" % number, 5, ms.ANNOUNCED)
        latest: List[float] = []
        choose = poller.choose_within_rate

        def measured(targets: Any) -> Any:
            chosen = choose(targets)
            for target in set(targets) - set(chosen):
                if target.found is None:
                    latest.append(target.due)
            return chosen
        with mock.patch.object(poller, "choose_within_rate", measured):
            self.assertEqual(len(self.run_for(60)) - 500 > 60 * 150, True)
        self.assertEqual(latest, [])

    def test_a_list_that_cannot_be_fetched(self) -> None:
        """It is told once, and once when it works again; what was found there stays."""
        self.lists = {"a.example": [("203.0.113.9", 5)]}
        self.start("hyperbol a.example", upstream__interval="100")
        self.run_for(10)
        self.told()
        for error in OSError("no route"), ms.Malformed("no list\n"), ValueError("\x1b[1mx"):
            self.lists["a.example"] = error
            self.run_for(300)
        state = self.server.upstream["hyperbol a.example"]
        self.assertEqual(state, (T0 + 1001, 1, 1, "x"))
        self.assertEqual(self.told(), ["hyperbol a.example: no list: 'no route'"])
        # Sooner than after the interval, but not at once
        self.assertEqual(len(self.fetched), 2 + 800 // 60)
        self.lists["a.example"] = [("203.0.113.8", 5)]
        self.run_for(100)
        self.assertEqual(self.told(),
                         ["hyperbol a.example: 1 address in the list, 0 other entries left out"])
        self.assertEqual([address for address, _ in self.listed()], ["203.0.113.8", "203.0.113.9"])
        self.assertEqual(self.server.upstream["hyperbol a.example"].trouble, "")

    def test_reload(self) -> None:
        """What only a former list has named leaves at once, unless it has announced itself."""
        self.lists = {"a.example": [("203.0.113.9", 5), ("203.0.113.8", 5), ("203.0.113.6", 5)],
                      "b.example": [("203.0.113.7", 5)], "c.example": [("203.0.113.5", 5)]}
        self.silent = ["203.0.113.6"]
        self.start("hyperbol a.example", "quake3 b.example Xonotic 3")
        self.run_for(3)
        self.server.rooms["hyperbol"].announced("203.0.113.8", 5, {}, self.now)
        self.run_for(3)
        self.reload("quake3 b.example Xonotic 3", "hyperbol c.example")
        self.assertEqual(self.listed(), [("203.0.113.7", "b.example"), ("203.0.113.8", "")])
        self.assertEqual({target.address for target in self.server.poller.targets.values()},
                         {"203.0.113.7", "203.0.113.8"})
        self.run_for(3)
        self.assertEqual(self.listed()[0], ("203.0.113.5", "c.example"))
        self.assertEqual(self.fetched[-2:], ["b.example", "c.example"])
        self.reload("hyperbol c.example")
        self.assertEqual(self.listed(), [("203.0.113.5", "c.example"), ("203.0.113.8", "")])
        # What another list names as well is found there at once
        self.lists["d.example"] = [("203.0.113.5", 5)]
        self.reload("hyperbol c.example", "hyperbol d.example")
        self.run_for(3)
        self.reload("hyperbol d.example")
        self.run_for(3)
        for _ in range(2):
            self.assertEqual(self.listed(), [("203.0.113.5", "d.example"), ("203.0.113.8", "")])
            self.run_for(40)
        self.reload()
        self.run_for(400)
        self.assertEqual((self.listed(), self.server.upstream), ([("203.0.113.8", "")], {}))

    def test_a_server_that_says_another_game_or_has_left_its_list(self) -> None:
        """It stays when other settings change, and after a restart, for as long as it answers."""
        self.lists = {"a.example": [("203.0.113.9", 5), ("203.0.113.8", 5)]}
        lines = ["quake3 a.example Nexuiz 7"]
        self.start(*lines, upstream__interval="10")
        self.run_for(3)
        self.lists["a.example"] = [("203.0.113.9", 5)]
        self.run_for(20)
        for change in (lambda: self.reload(*lines, poll__interval="20"),
                       lambda: ms.Upstreams(self.server)):
            change()
            self.assertEqual(self.listed(), [
                ("203.0.113.8", "a.example"), ("203.0.113.9", "a.example")])
        self.assertEqual(self.server.upstream["quake3 a.example Nexuiz 7"].listed, 2)

    def test_a_fetch_that_ends_after_its_line_has_gone(self) -> None:
        self.lists = {"a.example": [("203.0.113.9", 5)]}
        self.start("hyperbol a.example")
        thread: Any = self.server.upstreams.thread
        thread.at_once = False
        self.run_for(3)
        self.reload("hyperbol b.example")
        thread.at_once = True
        thread.work()
        self.run_for(3)
        self.assertEqual((self.listed(), self.fetched), ([], ["a.example", "b.example"]))
        self.assertNotIn("a.example", "".join(self.told()))

    def test_a_game_that_is_switched_off(self) -> None:
        for off in {"hyperbol__port": ""}, {"luanti__enabled": "no"}:
            game = "luanti" if "luanti__enabled" in off else "hyperbol"
            self.start("%s a.example" % game, **off)
            self.run_for(3)
            self.assertEqual((self.fetched, self.told()), ([], [
                "%s a.example: its servers are not queried; the game is switched off here"
                % game]))

    def test_servers_of_a_list_that_is_named_no_more_after_a_restart(self) -> None:
        self.start("hyperbol a.example")
        for number, found_at in ((9, "a.example"), (8, "gone.example"), (7, "")):
            address = "203.0.113.%d" % number
            server = ms.Server("hyperbol", address, 5, address, self.now, 900.0, found_at=found_at,
                               room="hyperbol")
            self.server.registry.insert(server)
            self.server.rooms["hyperbol"].resume(server)
        self.server.upstreams = ms.Upstreams(self.server)
        self.assertEqual(self.listed(), [("203.0.113.7", ""), ("203.0.113.9", "a.example")])

    def look_up(self, known: Any, *hosts: str) -> List[str]:
        """Let a fetch look up the names of a list; return those whose turn came, in order."""
        asked: List[str] = []

        def resolve(host: str, like: str = "") -> str:
            asked.append(host)
            self.now += 12.0 if host.startswith("slow") else 0.1
            if host == "none.example":
                raise OSError
            return "203.0.113.%d" % len(asked)
        with mock.patch.object(ms, "resolve_host", resolve):
            ms.look_up_names(hosts, known)
        return asked

    def test_host_names_in_a_list(self) -> None:
        """They take turns: the one whose last look-up is the oldest first, new ones after them."""
        known: Any = collections.OrderedDict()
        self.assertEqual(self.look_up(known, "a.example", "198.51.100.1", "none.example"),
                         ["a.example", "none.example"])
        self.assertEqual(self.look_up(known, "b.example", "none.example", "a.example"),
                         ["a.example", "none.example", "b.example"])
        self.assertEqual({name: one.address for name, one in known.items()},
                         {"a.example": "203.0.113.1", "none.example": "",
                          "b.example": "203.0.113.3"})
        self.look_up(known, "b.example")
        self.assertEqual(list(known), ["b.example"])

    def test_slow_host_names_in_a_list(self) -> None:
        """They keep no other name waiting for more than a fetch each, new ones for one at all."""
        good = ["good%d.example" % number for number in range(12)]
        for new, kept, fetches in ((1, 0, 2), (9, 0, 2), (1, 3, 5)):
            known: Any = collections.OrderedDict()
            kept_names = ["slow-%d.example" % number for number in range(kept)]
            for fetch in range(fetches + 3):
                slow = ["slow-%d-%d.example" % (fetch, number) for number in range(new)]
                asked = self.look_up(known, *slow, *kept_names, *good)
                if fetch >= fetches - 1:
                    self.assertEqual(set(good) - set(known), set())
                    self.assertTrue(all(known[name].address for name in good), (new, kept, fetch))
                if fetch >= fetches:        # all of them are looked up again at each fetch
                    self.assertEqual(asked[:12], good)


class RedisCase(unittest.TestCase):
    """With a real engine."""

    def setUp(self) -> None:
        if not REDIS:
            self.skipTest("no redis-server here")
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.path = os.path.join(self.folder, "redis.sock")
        self.port = free_port()
        # An engine that takes its time is no trouble, and masters that do are not gone
        patch = mock.patch.multiple(ms, ENGINE_ANSWER_S=SOON_S, CLUSTER_NAME_S=int(2 * SOON_S))
        patch.start()
        self.addCleanup(patch.stop)

    def engine(self, *options: str) -> subprocess.Popen[bytes]:
        engine = subprocess.Popen(
            [REDIS, "--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", self.path,
             "--save", "", "--appendonly", "no", "--dir", self.folder, *options],
            stdout=subprocess.DEVNULL)
        self.addCleanup(engine.wait)
        self.addCleanup(engine.kill)
        eventually(lambda: os.path.exists(self.path))
        return engine


class RedisTest(RedisCase):
    def test_three_masters(self) -> None:
        urls = ("redis://:p%%40ss@127.0.0.1:%d/3" % self.port,
                "redis://default:p%%40ss@localhost:%d/3" % self.port)
        engine = self.engine("--requirepass", "p@ss")
        masters = [master(cluster__redis=url, cluster__name=name, http__ports="0")
                   for name, url in zip("abc", (urls * 2))]
        patch = mock.patch.object(ms.log, "error")
        trouble = patch.start()
        self.addCleanup(patch.stop)
        for one in masters:
            one.start()
            self.addCleanup(one.stop)
        seen = functools.partial(self.everybody_shows, masters)

        def hear(one: ms.MasterServer, port: int, **fields: Any) -> None:
            one.post(lambda now: one.registry.list_or_refresh(("iceball", "203.0.113.9", port),
                                                              "203.0.113.9",
                                                   now, 120, {"name": "S", **fields}))
        hear(masters[0], 1)
        eventually(lambda: seen({1: 0}))
        for players in 1, 2, 3:
            hear(masters[1], 2, players=players, max_players=9)
            eventually(lambda: seen({1: 0, 2: players}))
        told = json.loads(fetch(port_of(masters[2], "http"), "/servers.json")[2])["servers"]
        self.assertEqual({one["port"]: one["master"] for one in told}, {1: "a", 2: "b"})
        engine.kill()
        engine.wait()
        os.unlink(self.path)
        eventually(lambda: "cluster" in masters[2].health)
        hear(masters[0], 3)
        self.engine("--requirepass", "p@ss")
        eventually(lambda: self.assertTrue(all(len(one.registry.servers()) >= 2 for one in masters))
                   or seen({1: 0, 2: 3, 3: 0}))
        eventually(lambda: b'"servers":{"c":0,"a":2,"b":1}'
                   in fetch(port_of(masters[2], "http"), "/healthz")[2])
        self.assertIn(b'\nmasterserver_cluster_servers{master="a"} 2\n',
                      fetch(port_of(masters[2], "http"), "/metrics")[2])
        self.assertEqual((trouble.call_count, masters[2].health), (3, {}))

    def test_two_from_one_image(self) -> None:
        """The same database and the same host name: the first one shares, the second one keeps
        out. One that was killed is back under its name when its lease has ended, one that was
        stopped has given it up, and nobody has anything to say of that."""
        self.engine()
        image = os.path.join(self.folder, "image.db")
        database = ms.Database(image)
        database.installation_id(7)
        database.close()

        def start(number: int) -> ms.MasterServer:
            path = os.path.join(self.folder, "%d.db" % number)
            if not os.path.exists(path):
                shutil.copy(image, path)
            one = master(cluster__redis="unix://" + self.path, server__database=path,
                         http__ports="0")
            one.start()
            self.addCleanup(one.stop)
            return one

        def connected(one: ms.MasterServer) -> Any:
            return one.cluster.get("connected")

        def kill(one: ms.MasterServer) -> None:
            one.link.linked_at = 0.0                    # so it does not give its name up
            one.stop()

        def lease(one: ms.MasterServer) -> Any:
            with contextlib.closing(ms.EngineLink(one.link.engine)) as link:
                return link.ask("GET", "masterserver-state:" + one.link.name)

        for name, value in (("CLUSTER_NAME_S", 3), ("CLUSTER_MARGIN_S", 0.5), ("TICK_S", 0.1),
                            ("CLUSTER_RETRY_S", (0.2, 0.2)), ("CLUSTER_PACE_S", 0.1)):
            patch = mock.patch.object(ms, name, value)
            patch.start()
            self.addCleanup(patch.stop)
        with mock.patch.object(ms.log, "error") as error:
            first = start(1)
            eventually(lambda: connected(first))
            second = start(2)
            eventually(lambda: second.health)
            self.assertIn("another master is called " + first.link.name, second.health["cluster"])
            self.assertEqual((first.link.name, connected(second), first.health),
                             (second.link.name, False, {}))
            self.assertEqual((first.cluster["reconnects_total"], error.call_count), (0, 1))
            second.stop()
            self.assertTrue(lease(first))                   # which was not the second one's
            kill(first)
            again = start(1)
            eventually(lambda: connected(again))
            self.assertEqual((again.health, error.call_count), ({}, 1))
            again.stop()
            self.assertEqual((lease(again), error.call_count), (b"", 1))

    def everybody_shows(self, masters: List[ms.MasterServer], expected: Dict[int, int]) -> bool:
        return all({server.port: server.players for server in one.registry.servers()} == expected
                   for one in masters)

    def test_the_output_of_check(self) -> None:
        self.engine("--requirepass", "secret", "--maxmemory", "99mb",
                    "--maxmemory-policy", "allkeys-lru")
        answers = {"is not Redis": b"HTTP/1.1 400 Bad Request\r\n\r\n",
                   "too old": b"+OK\r\n+OK\r\n$20\r\nredis_version:5.0.14\r\n",
                   "with '...'": b"-ERR unknown command 'AUTH' with 'secret'\r\n"}
        place = "127.0.0.1:%d"
        for url, status, words in (
                ("redis://:secret@" + place % self.port, 0, "may drop what"),
                ("unix://" + self.path, 1, "NOAUTH"),
                ("redis://:secrets@" + place % self.port, 1, "WRONGPASS"),
                ("redis://127.0.0.1:1", 1, "refused"),
                *(("redis://:secret@%s", 1, words) for words in answers)):
            with contextlib.ExitStack() as stack:
                if "%s" in url:
                    url %= place % stack.enter_context(self.answering(answers[words]))
                status_found, told, errors = command("--check", *itertools.chain.from_iterable(
                    ("--set", "%s=%s" % setting) for setting in {
                        **NO_PORTS, "http.ports": "0", "cluster.redis": url}.items()))
            self.assertEqual(status_found, status, (url, told, errors))
            self.assertIn(words, told + errors, url)
            self.assertNotIn("secret", told + errors)

    @contextlib.contextmanager
    def answering(self, data: bytes) -> Any:
        """A port where everybody gets these bytes."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            def serve() -> None:
                client = listener.accept()[0]
                with client:
                    client.settimeout(SOON_S)
                    client.sendall(data)
                    read_all(client)                    # until it is closed
            thread = threading.Thread(target=serve)
            thread.start()
            yield listener.getsockname()[1]
            thread.join()


class EngineLinkTest(unittest.TestCase):
    # https://redis.io/docs/latest/develop/reference/protocol-spec/
    REPLIES = (
        (b"+OK\r\n", b"OK"), (b":1000\r\n", b"1000"), (b"$5\r\nhello\r\n", b"hello"),
        (b"$0\r\n\r\n", b""), (b"$-1\r\n", b""), (b"*0\r\n", []), (b"*-1\r\n", b""),
        (b"*2\r\n$5\r\nhello\r\n$5\r\nworld\r\n", [b"hello", b"world"]),
        (b"*3\r\n$5\r\nhello\r\n$-1\r\n$5\r\nworld\r\n", [b"hello", b"", b"world"]),
        (b"*2\r\n*2\r\n:1\r\n+a\r\n$4\r\n\r\n\r\n\r\n", [[b"1", b"a"], b"\r\n\r\n"]),
        (b"-ERR unknown command 'asdf'\r\n", "unknown command"), (b"", "closed the connection"),
        (b"HTTP/1.1 400 Bad Request\r\n", "is not Redis"), (b"$99999999999\r\n", "too long"),
        (b"*99999999\r\n", "too long"), (b"*2\r\n:1\r\n", "closed"), (b"$x\r\n", "invalid"))

    def link(self, data: bytes, size: int) -> Any:
        ours, theirs = socket.socketpair()
        self.addCleanup(ours.close)
        with theirs:
            for at in range(0, len(data), size):
                theirs.send(data[at:at + size])
        link: Any = ms.EngineLink.__new__(ms.EngineLink)
        link.sock, link.file, link.password = mock.Mock(), ours.makefile("rb", size), ""
        self.addCleanup(link.file.close)
        return link

    def test_replies(self) -> None:
        for data, expected in self.REPLIES:
            for size in 1, 1 << 16:
                link = self.link(data, size)
                if isinstance(expected, str):
                    with self.assertRaisesRegex((ms.Malformed, ValueError), expected):
                        link.ask("PING")
                else:
                    self.assertEqual(link.ask("PING"), expected)

    def test_commands(self) -> None:
        link = self.link(b":0\r\n", 9)
        link.ask("LLEN", "mylist")
        link.sock.sendall.assert_called_with(b"*2\r\n$4\r\nLLEN\r\n$6\r\nmylist\r\n")

    def test_urls(self) -> None:
        address = ms.EngineAddress
        for url, expected in (
                ("redis://h", address(host="h")),
                (" redis://:p%40@h:7/3", address(password="p@", host="h", port=7, database=3)),
                ("redis://:a#b?c:d%5Be@h", address(password="a#b?c:d[e", host="h")),
                ("rediss://u:p@[::1]", address(tls=True, user="u", password="p", host="::1")),
                ("redis://[::1]:7/", address(host="::1", port=7)),
                ("unix:///run/r.sock", address(path="/run/r.sock")), ("", None)):
            self.assertEqual(ms.read_engine(url), expected)
        for url in ("redis:/:secret@h", "redis://:secret@h:x", "redis://:sec/ret@h", "unix://",
                    "redis://:secret@", "http://secret", "redis://:secret@h/x", "secret",
                    "redis://:secret@h:0", "redis://:secret@h:99999", "redis://secret@h",
                    "redis://:secret@h\n  x", "redis://:secret@h/-1"):
            with self.assertRaises(ms.SettingsError) as raised:
                ms.Settings({"cluster.redis": url})
            self.assertNotRegex(str(raised.exception), "secret|sec/")
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "x.ini")
            with open(path, "w") as file:
                file.write("[cluster]\nredis redis://:secret@h\n")
            with self.assertRaisesRegex(ms.SettingsError, "line.*2(?!.*secret)"):
                ms.Settings.load(path)
        for name in "a b", "\xe4", "x" * 65, "a:b":
            self.assertRaises(ms.SettingsError, ms.Settings, {"cluster.name": name})

    def test_the_name_stays_with_the_database(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            names = set()
            for path in "one", "one", "two":
                database = ms.Database(os.path.join(folder, path))
                names.add(database.installation_id(len(names) + 7))
                self.assertEqual(database.load(), [])
                database.close()
        self.assertEqual(names, {7, 8})


# --- announce ------------------------------------------------------------------------------------

def announced_server(game, port, **fields):
    return ms.Server(game, "", port, "", 0.0, math.inf, **fields)


def posted(status, body):
    """What comes of a POST /announce that gets this answer: the next step, or the error."""
    conversation = ms.Game().announce(announced_server("mygame", 4000))
    next(conversation)
    return conversation.send(ms.HttpAnswer(status, body))


class AnnouncersInGeneral(unittest.TestCase):
    LISTED = ms.Send(state="listed", accepted=True)

    def keep(self, *outcomes):
        """The times at which conversations with a master begin that end in these ways: the error,
        or the last step. And the master, to which a farewell was sent."""
        announcement = ms.Announcement("mygame", 4000, "master.example")
        master, = announcement.masters
        began = []
        clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
        clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)

        def talk_to(talking_to):
            self.assertIs(talking_to, master)
            began.append(clock.now)
            if len(began) > len(outcomes):
                announcement.stopping = True
            elif isinstance(outcomes[len(began) - 1], Exception):
                raise outcomes[len(began) - 1]
            else:
                master.on_step(outcomes[len(began) - 1])
                raise OSError("lost")
        with mock.patch.object(ms, "time", clock), \
                mock.patch.object(ms, "http_answer") as answers, \
                mock.patch.object(announcement, "talk_to", talk_to):
            announcement.keep_announced(master)
        (place, step), = (call[0] for call in answers.call_args_list)
        self.assertEqual(place, ("master.example", 27790, False, ""))
        self.assertEqual(json.loads(step.data)["action"], "stop")
        return began, master

    def test_pauses_grow_until_the_master_takes_the_server(self):
        """Each change of its state is logged, and nothing twice."""
        with self.assertLogs("masterserver") as logs:
            began, _ = self.keep(*[OSError("no \x1b[31mway")] * 8, self.LISTED, OSError("lost"))
        pauses = [after - before for before, after in zip(began, began[1:])]
        self.assertEqual(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 1, 2])
        self.assertEqual([line.partition(":")[2] for line in logs.output], [
            "masterserver:master.example:27790: " + state for state in (
                "no way", "listed", "lost")])

    @mock.patch.object(ms, "log", mock.Mock())
    def test_a_refusal_is_final_only_at_the_beginning(self):
        """A proxy may answer in the master's place for a moment, and anybody may forge a BADV."""
        refused = ms.MasterRefused("no", again_after_s=60.0)
        for outcomes, taken, times in (
                ([OSError("lost")], None, [0, 1]), ([refused], False, [0, 60]),
                ([OSError("lost"), ms.MasterRefused("no")], False, [0, 1, 1801]),
                ([self.LISTED, refused], True, [0, 1, 61])):
            began, master = self.keep(*outcomes)
            self.assertEqual((master.was_accepted, began), (taken, times))

    def test_only_malformed_escapes_from_garbage(self):
        """Whatever a master says to `announce` and to `list`, and asks."""
        chance = random.Random(9)
        packed = zlib.compress(b"\6\3\6\0banned")
        seeds = [b"MSOK1234", hexa("42414456 0200 25808000"), b"%SUCCESS#13#%", AIO_DEPLOYED_LIST,
                 hexa("08000000 06 03 0400") + b"gone", bytes([len(packed), 0, 0, 1]) + packed,
                 HBSL, hexa("02 01020304"), b"\0", b'{"listed": true, "ttl": 120}',
                 QUAKE3_EXT_HEAD + b"\\" + hexa("cb007109 6982") + QUAKE3_EOT,
                 b'{"servers":[{"address":"203.0.113.9","port":5}]}']
        for turn in range(6000):
            room = chance.choice([*ms.GAMES, ms.Game])()
            room.dialect = chance.choice(room.dialects or [""])
            server = announced_server("x", 1000)
            conversations = []
            if room.announced_over:
                conversations.append((room.announced_over, room.announce(server)))
            if room.fetched_over:
                conversations.append((room.fetched_over, room.fetch()))
            for transport, conversation in conversations:
                with contextlib.suppress(ms.Malformed, ms.MasterRefused, OSError, StopIteration):
                    next(conversation)
                    for _ in range(4):
                        data = bytearray(chance.choice(seeds))
                        for _ in range(chance.randrange(4)):
                            data[chance.randrange(len(data))] = chance.randrange(256)
                        answer = bytes(data[:chance.choice((1, 4, 99, 1 << 20))])
                        if transport == "http":
                            answer = ms.HttpAnswer(200 + turn % 300, answer)
                        conversation.send(answer)
            if room.answer:
                with contextlib.suppress(ms.Malformed):
                    room.answer(server, bytes(data))


class IceballAnnouncing(unittest.TestCase):

    def setUp(self):
        self.server = announced_server("iceball", 21737, name="Iceball Server", mode="ctf",
                                       map="classic(512,512)", max_players=64)

    def announce(self, *received):
        steps, _ = converse(ms.Iceball().announce(self.server), *received)
        return steps

    def test_the_announcement(self):
        self.assertEqual(ms.Iceball().announcement(self.server), CAPTURED)
        self.server.name, self.server.mode = "a" + "ä" * 20, "a" + "ä" * 10
        self.server.version = "0.2.1"
        packet = ms.Iceball().announcement(self.server)
        self.assertEqual((len(packet), packet[6:10], packet[16:46], packet[46:56]),
                         (86, hexa("00808000"), b"a" + b"\xc3\xa4" * 14 + b"\0",
                          b"a" + b"\xc3\xa4" * 4 + b"\0"))

    def test_bursts_of_five_every_forty_seconds(self):
        """A master that does not answer to a whole burst is mentioned."""
        steps = self.announce(*[None] * 6)
        self.assertEqual([(step.data == CAPTURED, step.wait_s) for step in steps], [
            (True, 1), (True, 1), (True, 1), (True, 1), (True, 36), (False, 0), (True, 1)])
        self.assertEqual([step.state[:9] for step in steps if step.state], ["no answer"])
        steps = self.announce(None, b"MSOK", None, None, None, None)
        self.assertEqual([step.state for step in steps if step.state], ["announced"])

    def test_every_cookie_comes_back(self):
        for cookie in (b"", hexa("8a850c03"), b"\0" * 4000):
            _, step = self.announce(b"MSOK" + cookie)
            self.assertEqual(step, ms.Send(b"HSHK" + cookie, state="announced", accepted=True))

    def test_silence_for_thirty_minutes_after_a_refusal(self):
        for packet, words in ((b"BADF", "cannot read"), (b"BADV", "lists Iceball"),
                              (hexa("42414456 0200 25808000"), "lists Iceball 0.2.1-37 and not")):
            with self.assertRaisesRegex(ms.MasterRefused, words) as refused:
                self.announce(b"MSNO", packet)
            self.assertEqual(refused.exception.again_after_s, 1800.0)


class HttpAnnouncing(unittest.TestCase):

    def test_the_posted_fields(self):
        server = announced_server("mygame", 4000, name="Ünter", players=1)
        step = next(ms.Game().announce(server))
        self.assertEqual((step.path, step.wait_s), ("/announce", 20.0))
        self.assertEqual({name: value for name, value in json.loads(step.data).items() if value},
                         {"game": "mygame", "port": 4000, "name": "Ünter", "players": 1})

    def test_again_after_half_its_time(self):
        for ttl, wait_s in (("120", 60.0), ("NaN", 5.0), ("-1", 5.0), ("1e999", 1800.0),
                            ("1" * 400, 5.0), ("null", 5.0), ('"soon"', 5.0)):
            step = posted(200, b'{"listed":true,"ttl":%s}' % ttl.encode())
            self.assertEqual(step, ms.Send(wait_s=wait_s, state="listed", accepted=True), ttl)

    def test_refusals_and_failures(self):
        for status, body, error, words in (
                (403, b'{"listed":false,"reason":"banned"}', ms.MasterRefused, "refused: banned"),
                (404, b"<html>", ms.MasterRefused, "refused: HTTP status 404"),
                (408, b"", OSError, "HTTP status 408"), (429, b"wait", OSError, "HTTP status 429"),
                (502, b"<html>", OSError, "not listed yet: HTTP status 502"),
                (200, b'{"listed":false,"reason":"waiting"}', OSError, "not listed yet: waiting"),
                (200, b'{"listed":1}', OSError, "not listed"), (200, b"[1]", OSError, "not listed"),
                (200, b'{"reason":[[1]]}', OSError, "1"), (200, b"\xff", OSError, "not listed")):
            with self.assertRaisesRegex(error, words, msg=body):
                posted(status, body)

    def test_hyperbol_answers_by_the_offsets_of_the_document(self):
        server = announced_server("hyperbol", 20000, name="n" * 40, mode="m" * 40, players=300,
                                  max_players=16, map="Arena", version="1.8a")
        answer = ms.Hyperbol().answer(server, hexa("02 01020304"))
        self.assertEqual(len(answer), 229)
        for offset, value in ((0, hexa("1b 01020304")), (5, b"n" * 31 + b"\0"),
                              (37, b"m" * 31 + b"\0"), (69, b"\xff\x10\0"), (72, b"Arena\0"),
                              (157, hexa("204e0000")), (169, b"1.8a\0"), (222, bytes(7))):
            self.assertEqual(answer[offset:offset + len(value)], value, offset)
        for question in (b"", b"\2", hexa("03 01020304"), hexa("02 0102030405")):
            self.assertRaises(ms.Malformed, ms.Hyperbol().answer, server, question)


class Announcing(unittest.TestCase):
    """With real sockets, in this process and as a command."""

    def setUp(self):
        hurry = mock.patch.multiple(ms, STEP_S=0.02, GOODBYE_S=SOON_S)
        hurry.start()
        self.addCleanup(hurry.stop)

    def listening(self, kind, port=0):
        """A master's socket, and where it is."""
        sock = socket.socket(socket.AF_INET, kind)
        self.addCleanup(sock.close)
        sock.bind(("127.0.0.1", port))
        sock.settimeout(SOON_S)
        if kind == socket.SOCK_STREAM:
            sock.listen(5)
        return sock, "127.0.0.1:%d" % sock.getsockname()[1]

    def accept(self, sock):
        connection, _ = sock.accept()
        self.addCleanup(connection.close)
        connection.settimeout(SOON_S)
        return connection

    # A burst so long that a slow answer comes before its end
    @mock.patch.object(ms, "ICEBALL_GAPS_S", (0.05,) * 999)
    def test_as_a_class(self):
        before = set(threading.enumerate())
        with self.assertLogs("masterserver") as logs, tempfile.TemporaryDirectory() as folder:
            with master(iceball__port="0", server__public_address="203.0.113.5") as server:
                path = os.path.join(folder, "players")
                with open(path, "w", encoding="utf-8") as file:
                    file.write("1/8\n2/8 pit\n\n")
                place = "127.0.0.1:%d" % port_of(server, "iceball")
                announcement = ms.Announcement("iceball", 21737, place, players_from=path,
                                               name="A \x07bundle")
                with announcement:
                    announcement.start()
                    listed = eventually(server.registry.servers)[0]
                    self.assertEqual((listed.address, listed.port, listed.name),
                                     ("203.0.113.5", 21737, "A bundle"))
                    with open(path, "w", encoding="utf-8") as file:
                        file.write("7/8 castle\n")
                    eventually(lambda: (listed.players, listed.max_players, listed.map)
                               == (7, 8, "castle"))
                    announcement.update(mode="ctf")
                    eventually(lambda: listed.mode == "ctf")
                announcement.stop()
                self.assertRaises(RuntimeError, announcement.start)
        eventually(lambda: before.issuperset(threading.enumerate()))
        self.assertEqual(len([line for line in logs.output if line.endswith(": announced")]), 1)

    def test_wrong_arguments(self):
        usual = {"game": "iceball", "port": 1, "masters": "m"}
        for wrong in (
                {"port": 0}, {"port": 65536}, {"port": 1.0}, {"masters": []}, {"masters": "m:x"},
                {"masters": "no..name"}, {"masters": ["http://m:27790/"]}, {"game": "Ice Ball"},
                {"players": "5"}, {"players": -1}, {"players": 65536}, {"players": True},
                {"player": 7}, {"name": 5}, {"version": "new"}, {"dialect": "text"},
                {"game": "aio", "dialect": "x"}, {"players_from": HERE}):
            with self.assertRaises(ValueError, msg=wrong):
                ms.Announcement(**{**usual, **wrong})
        announcement = ms.Announcement(**usual)
        self.assertRaises(ValueError, announcement.update, map="y", players=-1)
        self.assertEqual(announcement.server.map, "")

    def test_the_dialect_the_master_and_the_name(self):
        for game, fields, dialect, port, name in (
                ("iceball", {}, "", 27790, "Iceball server"),
                ("subspace", {}, "", 4991, "SubSpace server"),
                ("hyperbol", {}, "", 27790, "Hyperbol server"),
                ("mygame", {}, "", 27790, "mygame server"),
                ("aio", {}, "framed", 27011, "AIO server"),
                ("aio", {"name": "Court\x07"}, "text", 27011, "Court"),
                ("aio", {"dialect": "text"}, "text", 27011, "AIO server"),
                ("aio", {"name": "Court", "dialect": "framed"}, "framed", 27011, "Court")):
            with self.subTest(game, **fields):
                announcement = ms.Announcement(game, 27010, "master.example", **fields)
                master, = announcement.masters
                self.assertEqual(
                    (announcement.room.dialect, master.name, announcement.server.name),
                    (dialect, "master.example:%d" % port, name))
        master, = ms.Announcement("subspace", 1, ["[::1]:70"]).masters
        self.assertEqual((master.host, master.port, master.name), ("::1", 71, "[::1]:71"))

    def test_players_as_they_are_written(self):
        for line, fields in (
                ("5", {"players": 5}), (" 5 / 16\r", {"players": 5, "max_players": 16}),
                ("5/16 my map", {"players": 5, "max_players": 16, "map": "my map"}),
                ("0 pit", {"players": 0, "map": "pit"})):
            self.assertEqual(ms.read_players(line), fields)
        for line in ("", "x", "-1", "5/", "5/x", "123456", "5,16"):
            self.assertRaises(ValueError, ms.read_players, line)

    def test_a_file_of_players(self):
        """What is wrong with it is logged once, until it can be read again."""
        with tempfile.TemporaryDirectory() as folder, self.assertLogs("masterserver") as logs:
            path = os.path.join(folder, "players")
            announcement = ms.Announcement("iceball", 1, "master.example", players_from=path)
            for data, players, lines in (
                    (None, 0, 1), (b"1/16\n\n7/16 pit\n\n", 7, 1), (b"", 7, 1), (b"\n", 7, 1),
                    (b"\xef\xbb\xbf8", 8, 1), (b"9/16 H\xf6hle\r\n", 9, 1), (b"error 1", 9, 2),
                    (b"99999", 9, 2), (b"5", 5, 2), (b"error 3", 5, 3)):
                if data is not None:
                    with open(path, "wb") as file:
                        file.write(data)
                announcement.update_players_from_file()
                self.assertEqual((announcement.server.players, len(logs.output)), (players, lines))
            announcement.update_players("6\n")
            self.assertEqual(announcement.server.players, 6)

    def test_a_master_that_is_silent_keeps_no_other_waiting(self):
        sock, place = self.listening(socket.SOCK_DGRAM)
        refusing, refusing_place = self.listening(socket.SOCK_DGRAM)
        told = threading.Event()

        def addresses(host):
            if host == "no.example":
                raise OSError("no such name")
            if host == "silent.example":
                told.wait(4 * SOON_S)
            return ["127.0.0.1"]
        self.addCleanup(told.set)
        with mock.patch.object(ms, "host_addresses", addresses), mock.patch.object(ms, "log"), \
                mock.patch.object(ms, "GOODBYE_S", 0.3), \
                ms.Announcement("iceball", 21737, [
                    "silent.example", "no.example", refusing_place, place],
                    give_up=True) as announcement:
            refusing.sendto(b"BADF", refusing.recvfrom(1000)[1])
            data, peer = sock.recvfrom(1000)
            self.assertEqual(data[:4], b"1CEB")
            refusing.sendto(b"MSOKfalse", peer)
            sock.sendto(b"MSOKtrue", peer)
            answers = iter(lambda: sock.recv(1000), None)
            answer = next(data for data in answers if data[:4] != b"1CEB")
            self.assertEqual(answer, b"HSHKtrue")
            eventually(lambda: [master.state for master in announcement.masters] == [
                "", "no such name", "refused: the master cannot read the announcement",
                "announced"])
            time.sleep(5 * ms.STEP_S)
            self.assertEqual(announcement.failure, "")
            began = time.monotonic()
        self.assertLess(time.monotonic() - began, 2 * SOON_S)

    def test_datagrams_to_a_closed_port_go_on(self):
        port = free_port()
        with mock.patch.object(ms, "RETRY_MAX_S", 0.1), mock.patch.object(ms, "log"), \
                mock.patch.object(ms, "RETRY_S", 0.1), \
                ms.Announcement("iceball", 21737, "127.0.0.1:%d" % port) as announcement:
            eventually(lambda: announcement.masters[0].state)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as again:
                again.bind(("127.0.0.1", port))
                again.settimeout(SOON_S)
                self.assertEqual(len(again.recv(1000)), 86)

    def test_a_connection_that_ends_is_made_again(self):
        sock, place = self.listening(socket.SOCK_STREAM)
        with mock.patch.object(ms, "RETRY_S", 0.05), self.assertLogs("masterserver") as logs:
            with ms.Announcement("aio", 27010, place, dialect="framed"):
                connection = self.accept(sock)
                self.assertEqual(connection.recv(100), hexa("03000000 03 8269"))
                connection.sendall(hexa("02000000 05 03"))
                eventually(lambda: "announced" in "".join(logs.output))
                connection.close()
                connection = self.accept(sock)
                connection.recv(100)
            self.assertEqual(connection.recv(100), b"")         # it signs off
        self.assertRegex("".join(logs.output),
                         "(?s)announced.*the master has closed the connection")

    def test_masters_are_asked_again_where_they_are(self):
        """Datagrams tell nobody that the master has moved."""
        sock, place = self.listening(socket.SOCK_DGRAM)
        with mock.patch.object(ms, "RESOLVE_S", 0.1), mock.patch.object(ms, "log"), \
                mock.patch.object(ms, "host_addresses", return_value=["127.0.0.1"]) as addresses, \
                ms.Announcement("subspace", 25000, "127.0.0.1:%d" % (sock.getsockname()[1] - 1)):
            eventually(lambda: addresses.call_count >= 3)
            self.assertEqual(len(sock.recv(1000)), 95)

    def test_over_http(self):
        """An announcement, an answer that nobody can read, one that is fine, and the farewell."""
        sock, place = self.listening(socket.SOCK_STREAM)
        place = place.replace("127.0.0.1", "master.example")
        bodies = []
        with mock.patch.object(ms, "RETRY_S", 0.01), self.assertLogs("masterserver") as logs, \
                mock.patch.object(ms, "host_addresses", return_value=["127.0.0.1", "::1"]):
            announcement = ms.Announcement("mygame", 4000, place, name="Ü")
            announcement.start()
            for answer in (b"SSH-2.0-\x1b[31mred\r\n", b"",
                           b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
                           b"{\"listed\":true,\"ttl\":120}", b""):
                connection = self.accept(sock)
                request = b""
                while not request.endswith(b"}"):
                    request += connection.recv(4096) or b"the end}"
                head, _, body = request.partition(b"\r\n\r\n")
                self.assertTrue(head.startswith(b"POST /announce HTTP/1.0\r\n"))
                self.assertIn(b"\r\nHost: %s\r\n" % place.encode(), head)
                self.assertIn(b"\r\nContent-Type: application/json", head)
                connection.sendall(answer)
                connection.close()
                bodies.append(json.loads(body))
                if len(bodies) == 3:
                    eventually(lambda: announcement.masters[0].state == "listed")
                    stopping = threading.Thread(target=announcement.stop)
                    stopping.start()
            stopping.join(SOON_S)
        self.assertEqual((bodies[0]["name"], bodies[2]), ("Ü", bodies[0]))
        self.assertEqual(bodies[3], dict(bodies[0], action="stop"))
        self.assertRegex(logs.output[0], "no answer by HTTP; is that the port of the master's "
                                         "page[?]$")

    def test_an_http_master_that_hangs(self):
        sock, place = self.listening(socket.SOCK_STREAM)
        with mock.patch.object(ms, "RESPONSE_S", 0.1), self.assertLogs("masterserver") as logs, \
                ms.Announcement("mygame", 4000, place):
            self.accept(sock)
            eventually(lambda: logs.output)
            self.assertIn("not complete within 0.1 s", logs.output[0])

    def test_queries_are_answered_where_the_port_is_free(self):
        """All but the masters share a bound, as their addresses may be made up."""
        port = free_port()
        game, _ = self.listening(socket.SOCK_DGRAM, port)
        with self.assertLogs("masterserver", "INFO") as logs, \
                mock.patch.object(ms, "resolve_host", side_effect=OSError("no such name")), \
                mock.patch.object(ms, "SURPLUS_BYTES", (0.001, 16)):
            with ms.Announcement("subspace", port - 1, "m"):
                eventually(lambda: "left to the game server" in "".join(logs.output))
            game.close()
            with ms.Announcement("subspace", port - 1, "m") as announcement, \
                    socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
                eventually(lambda: "are answered here" in "".join(logs.output))
                asking.connect(("127.0.0.1", port))
                # Two that answer what is as long would go on for ever after one forged query
                asking.send(b"?")
                asking.send(bytes(8))
                for known in ("", "127.0.0.1"):
                    announcement.masters[0].address = known
                    asking.settimeout(SOON_S)
                    for number in range(4):
                        asking.send(bytes([number] * 4))
                        self.assertEqual(asking.recv(1000), bytes([0] * 4 + [number] * 4))
                    asking.settimeout(0.2)
                    asking.send(b"more")
                    self.assertRaises(socket.timeout, asking.recv, 1000)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as again:
            again.bind(("0.0.0.0", port))               # it is free again

    def command(self, *arguments):
        process = subprocess.Popen([*START, "announce", *arguments], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.addCleanup(process.__exit__, None, None, None)         # closes its pipes and waits
        self.addCleanup(process.kill)
        return process

    def test_command_with_players_from_standard_input(self):
        with master(iceball__port="0") as server:
            process = self.command(
                "--game", "iceball", "--port", "21737", "--name", "Küche", "--players-from", "-",
                "127.0.0.1:%d" % port_of(server, "iceball"))
            process.stdin.write("nonsense\n\n5/16 Höhle\n".encode())
            process.stdin.flush()
            try:
                eventually(lambda: [found for found in server.registry.servers() if (
                    found.name, found.players, found.map) == ("Küche", 5, "Höhle")])
            finally:
                out, err = process.communicate(timeout=SOON_S)
        self.assertEqual((process.returncode, out), (0, b""), err)
        self.assertIn(b"nonsense", err)
        self.assertNotIn(b"Traceback", err)

    def test_command_when_no_master_is_left(self):
        sock, place = self.listening(socket.SOCK_DGRAM)
        sock.settimeout(SOON_S)
        process = self.command("--game", "iceball", "--port", "21737", place)
        data, peer = sock.recvfrom(1000)
        sock.sendto(b"BADF", peer)
        out, err = process.communicate(timeout=SOON_S)
        self.assertEqual((process.returncode, out, len(data)), (1, b"", 86), err)
        self.assertRegex(err, b"no master accepts this server: %s: refused: the master cannot read "
                              b"the announcement" % place.encode())
        self.assertNotIn(b"Traceback", err)

    @unittest.skipIf(ms.WINDOWS, "Windows has no such signals for a child")
    def test_command_signs_off_on_a_signal(self):
        with master(http__ports="0", games__mygame="Mine") as server:
            process = self.command("--game", "mygame", "--port", "4000",
                                   "127.0.0.1:%d" % port_of(server, "http"))
            eventually(server.registry.servers)
            process.terminate()
            out, err = process.communicate(timeout=SOON_S)
            self.assertEqual((process.returncode, out), (0, b""), err)
            self.assertEqual(server.registry.servers(), [])     # it has waited for the answer

    def test_command_with_wrong_arguments(self):
        status, out, err = command("announce", "--game", "iceball", "--port", "21737",
                                   "--version", "new", "127.0.0.1")
        self.assertEqual((status, out), (2, ""))
        self.assertIn("announce: expected a version such as", err)


# --- list and ping -------------------------------------------------------------------------------

class FakeServer(threading.Thread):
    """Answers datagrams on one loopback port with `answer(data)`, a list of datagrams, or serves
    one TCP connection after another with `serve(sock)`. At its end it has seen all that came."""

    def __init__(self, answer: Optional[Callable[[bytes], Iterable[bytes]]] = None,
                 serve: Optional[Callable[[socket.socket], Any]] = None) -> None:
        super().__init__(daemon=True)
        self.answer, self.serve = answer, serve
        kind = socket.SOCK_DGRAM if answer else socket.SOCK_STREAM
        self.sock = socket.socket(socket.AF_INET, kind)
        self.sock.bind(("127.0.0.1", 0))
        self.sock.settimeout(0.05)
        if serve:
            self.sock.listen(5)
        self.port = self.sock.getsockname()[1]
        self.place = "127.0.0.1:%d" % self.port
        self.stopping = False

    def run(self) -> None:
        while self.sock.fileno() >= 0:
            if not select.select([self.sock], [], [], 0.02)[0]:
                if self.stopping:
                    return
                continue
            with contextlib.suppress(OSError):
                if self.answer:
                    data, peer = self.sock.recvfrom(4096)
                    for packet in self.answer(data):
                        self.sock.sendto(packet, peer)
                elif self.serve:
                    with self.sock.accept()[0] as sock:
                        sock.settimeout(SOON_S)
                        self.serve(sock)

    def __enter__(self) -> FakeServer:
        self.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.stopping = True
        self.join()
        self.sock.close()


def zone_answer(question: bytes) -> List[bytes]:
    return [asss(question)]


def scripted(greeting: bytes, question: bytes, answer: bytes) -> Callable[[socket.socket], None]:
    """A master that sends the answer to this question alone."""
    def serve(sock: socket.socket) -> None:
        sock.sendall(greeting)
        if question in sock.recv(1000):
            sock.sendall(answer)
    return serve


def hyperbol_game(name: bytes, first: int = 1) -> Callable[[bytes], List[bytes]]:
    """A game server that answers queries under this name, from this one on."""
    queries: List[bytes] = []

    def answer(query: bytes) -> List[bytes]:
        queries.append(query)
        if len(query) != 5 or query[0] != 2 or len(queries) < first:
            return [b"\x1bnone" + bytes(224)]           # to another's query
        return [hyperbol_reply(o1=query[1:], o5=name)]
    return answer


class ClientTools(unittest.TestCase):

    def setUp(self) -> None:
        patience = mock.patch.multiple(ms, ASK_WAIT_S=SOON_S, AIO_TEXT_S=SOON_S)
        patience.start()
        self.addCleanup(patience.stop)

    def ask(self, *words: str) -> Dict[str, Any]:
        """What a command prints, without what depends on the moment."""
        status, out, err = command(*words, "--json")
        self.assertEqual((status, err), (0, ""))
        found = json.loads(out)
        if words[0] == "ping":
            self.assertGreaterEqual(found.pop("ping_ms"), 0)
        return found

    def failing(self, *words: str) -> str:
        status, out, err = command(*words)
        self.assertEqual((status, out), (1, ""), words)
        self.assertTrue(err.startswith("masterserver.py: 127.0.0.1:"), err)
        return err

    @in_each(POLLED)
    def test_ping(self, world: Any) -> None:
        heard: List[bytes] = []

        def answer(question: bytes) -> List[bytes]:
            """The first question is asked again."""
            heard.append(question)
            return [b"?"] if len(heard) == 1 else [world().reply(question)]
        with FakeServer(answer) as server:
            port, game = server.port - world.room.offset, world.room.game
            place = "127.0.0.1:%d" % port
            facts = {**world.answered, **world.answered.get("details", {})}
            for name in "details", "private":
                facts.pop(name, None)
            self.assertEqual(self.ask("ping", place, "--game", game),
                             dict(facts, game=game, address="127.0.0.1", port=port))
            words = command("ping", place, "--game", game)[1]
            goodbye = world.room().goodbye(world().reply(world.question))
            eventually(lambda: not goodbye or goodbye in heard)
        if facts:
            self.assertRegex(words, r"(?m)^players +%d$" % facts["players"])

    def test_ping_of_a_zone_that_knows_one_question(self) -> None:
        with FakeServer(lambda data: zone_answer(data) if len(data) == 4 else [b"?"]) as server:
            found = self.ask("ping", "127.0.0.1:%d" % (server.port - 1), "--game", "subspace")
        self.assertEqual(found["players"], 6)

    def test_nothing_that_can_be_used(self) -> None:
        """Each question is asked three times."""
        questions: List[bytes] = []
        with FakeServer(lambda data: questions.append(data) or [b"x"]) as server:
            self.assertIn("what came is not an answer",
                          self.failing("ping", server.place, "--game", "aio"))
        self.assertEqual(len(questions), 3)
        with FakeServer(lambda data: []) as server, mock.patch.object(ms, "ASK_WAIT_S", 0.05):
            self.assertIn("no answer from UDP port %d" % server.port, self.failing(
                "ping", "127.0.0.1:%d" % (server.port - 1), "--game", "subspace"))
        self.failing("list", "127.0.0.1:1", "--game", "iceball")            # refused
        self.failing("ping", "127.0.0.1:65535", "--game", "subspace")       # there is no next one

    def test_texts_that_are_no_host_name(self) -> None:
        for host in ("a..b", "x" * 64 + ".example"):
            for words in ([("list", "--game", room.game, host) for room in ms.GAMES]
                          + [("ping", "--game", room.game, host + ":5") for room in ms.GAMES
                             if room.answers_queries]):
                status, out, err = command(*words)
                self.assertEqual((status, out), (1, ""), words)
                self.assertIn(host, err)

    @in_each(WORLDS)
    def test_lists(self, world: Any) -> None:
        """As the conversation reads them, that game by game is tested without sockets."""
        for dialect, received in world.fetched:
            room = world.room()
            room.dialect = dialect
            steps, servers = converse(room.fetch(), *received)
            question = next(step.data for step in steps if step.data or step.path)
            if room.fetched_over == "http":
                response = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + received[0].body
                request = b"GET %s HTTP/1.0\r\nHost: 127.0.0.1:" % steps[0].path.encode()
                server: Dict[str, Any] = {"serve": scripted(b"", request, response)}
            elif room.fetched_over == "tcp":
                greeting, answer, *_ = received
                server = {"serve": scripted(greeting, question, answer)}
            else:
                answers = [data for data in received if data]
                server = {"answer": lambda data, answers=answers: answers and [answers.pop(0)]}
            with FakeServer(**server) as fake:
                found = self.ask("list", fake.place, "--game", room.game)["servers"]
                expected = json.loads(json.dumps(list(servers)))
                for entry in expected:
                    entry.pop("private", None)
                self.assertEqual(found, expected)
                if "serve" in server:
                    words = command("list", fake.place, "--game", room.game)[1]
                    self.assertIn("%s:%d" % world.place, words)

    def test_an_empty_list(self) -> None:
        with FakeServer(serve=scripted(AIO_GREETING, b"12#%\n", b"12#%")) as server:
            self.assertEqual(command("list", server.place, "--game", "aio")[1], "no servers\n")

    def test_a_text_list_that_cannot_be_read(self) -> None:
        """Then the framed form is asked; if that comes to nothing too, both are told."""
        def serve(sock: socket.socket) -> None:
            if sock.recv(1000).startswith(b"12#"):
                sock.sendall(b"12#Court#D#203.0.113.9#port#%")
            else:
                sock.sendall(AIO_GREETING + answer)
        for answer in AIO_FRAMED_LIST, b"":
            with FakeServer(serve=serve) as server:
                if answer:
                    found = self.ask("list", server.place, "--game", "aio")["servers"]
                    self.assertEqual([entry["port"] for entry in found], [27010, 27010])
                else:
                    self.assertRegex(
                        self.failing("list", server.place, "--game", "aio"),
                        r"none in the text dialect \(port: .*\), none in the framed dialect "
                        r"\(no list came")

    def test_a_list_that_is_too_long(self) -> None:
        serve = scripted(HBSL, b"", entry("127.0.0.1", 5) * 3)
        with mock.patch.object(ms, "LIST_SERVERS", 2), FakeServer(serve=serve) as server:
            self.assertIn("more than 24 bytes",
                          self.failing("list", "--game", "hyperbol", server.place))

    def test_a_quake3_list_that_never_ends(self) -> None:
        """Datagram after datagram, each in time, for longer than any list takes."""
        over = threading.Event()
        self.addCleanup(over.set)
        packet = QUAKE3_EXT_HEAD + b"\\" + hexa("cb007109 9060")

        def drip(data: bytes) -> Iterable[bytes]:
            while not over.wait(0.005):
                yield packet
        with mock.patch.object(ms, "LIST_S", 0.2), FakeServer(drip) as server:
            told = self.failing("list", "--game", "quake3", server.place)
            over.set()
        self.assertIn("not complete within 0.2 s", told)

    def test_lists_that_are_none(self) -> None:
        ok = b"HTTP/1.1 200 OK\r\n\r\n"
        for game, answer in (
                ("hyperbol", b"SSH-2.0-OpenSSH"), ("hyperbol", b"HBSL"),
                *(("iceball", answer) for answer in (
                    b"HTTP/1.1 404 Not Found\r\n\r\n{}", b"SSH-2.0\r\n", ok + b"[]",
                    b'HTTP/1.1 301 Moved\r\n\r\n{"servers":[]}', ok + b"{"))):
            with FakeServer(serve=scripted(answer, b"", b"")) as server:
                self.failing("list", server.place, "--game", game)

    def test_arrays_in_json(self) -> None:
        """They are read value by value, and end where json.loads() would end them."""
        long = json.dumps("x" * (ms.JSON_VALUE_CHARACTERS - 2))
        for text, expected in (
                ('{"list":[]}', []), (' {"a" : {"list":3} ,\n"list" :\t[ ] , "b":1}', []),
                ('{"list":[1,"]",{"a":[2]},null , [],-2.5e3]',
                 [1, "]", {"a": [2]}, None, [], -2500]),
                ('{"total":{"clients":3},"list":[{"port":1}, {"port":2}]}',
                 [{"port": 1}, {"port": 2}]), ('{"list":[%s]}' % long, [json.loads(long)]),
                ('{%s"list":["\u2603%s",1]}' % (ms.JSON_PIECE_BYTES * " ", "\U0001f600" * 9000),
                 ["\u2603" + "\U0001f600" * 9000, 1])):
            self.assertEqual(list(ms.json_array(text.encode(), "list")), expected, text[:40])
        for text in ("", "{", "{}", "[]", "5", '{"list"}', '{"list":5}', '{"list":[', '{"list":[1',
                     '{"list":[1 2]}', '{"list":[1,]}', '{"list":[,]}', '{"lists":[1]}',
                     '{"list":[%s]}' % (5000 * " "),
                     '{"list":["%s%s]}' % ("x" * ms.JSON_PIECE_BYTES, long[1:]), '{"list":[}]',
                     '{"list":[%s]}' % ",".join("1" * (ms.LIST_SERVERS + 1))):
            self.assertRaises(ValueError, list, ms.json_array(text.encode(), "list"))
        self.assertRaises((RecursionError, ValueError), list,
                          ms.json_array(b'{"list":[' + 50000 * b"[", "list"))

    def test_long_lists_are_read_piece_by_piece(self) -> None:
        """No call takes more than some milliseconds, in which all other threads would stand."""
        class Pieces(bytes):
            lengths: List[int] = []

            def __getitem__(self, part: Any) -> Any:
                piece = super().__getitem__(part)
                self.lengths.append(len(piece))
                return piece
        values = [{"name": "\U0001f600" * 99}] * 9000
        data = Pieces(json.dumps({"list": values}, ensure_ascii=False).encode())
        read = ms.json_array(data, "list")
        self.assertEqual(next(read), values[0])
        before_value = sum(data.lengths)
        self.assertLess(before_value, 5 * ms.JSON_VALUE_CHARACTERS)
        self.assertEqual(len(list(read)), 8999)
        self.assertEqual((max(data.lengths), sum(data.lengths)), (ms.JSON_PIECE_BYTES, len(data)))
        self.assertEqual([ms.clean("\x7f" * 20000 + "x"), ms.decode_utf8(b"\0" * 20000 + b"x"),
                          ms.decode_legacy(b"\0" * 20000 + b"x")], ["", "", ""])

    def test_of_a_list_only_what_is_checked_is_kept(self) -> None:
        right = {**json.loads(LUANTI_STORED), "address": "192.0.2.1", "port": 1, "else": [[]] * 9}
        entries = [right, {**right, "mods": [[]] * 9}]
        fetch = ms.Luanti().fetch()
        next(fetch)
        with self.assertRaises(StopIteration) as end:
            fetch.send(ms.HttpAnswer(200, json.dumps({"list": entries}).encode()))
        first, second = end.exception.value
        self.assertEqual((set(first["private"]) - set(ms.LUANTI_FIELDS), "private" in second),
                         (set(), False))

    def test_a_master_that_comes_to_no_end(self) -> None:
        over = threading.Event()
        self.addCleanup(over.set)
        first = b""

        def drip(sock: socket.socket) -> None:
            sock.sendall(first)
            while not over.wait(0.02):
                sock.sendall(b"\0\0\0")
        for game, first in (("iceball", b"HTTP/1.1 200 OK\r\n\r\n"), ("hyperbol", HBSL),
                            ("aio", hexa("01000000 00 ff0000 00"))):
            with mock.patch.object(ms, "LIST_S", 0.2), FakeServer(serve=drip) as server:
                self.assertIn("not complete within 0.2 s",
                              self.failing("list", "--game", game, server.place))
        for most, data in (3, (b"ab", b"cd")), (0, (b"a",)):
            self.assertRaisesRegex(ms.Malformed, "more than %d bytes" % most, converse,
                                   ms.received_until_closed(b"question", most), *data)

    def test_a_list_of_one_game_of_the_family(self) -> None:
        told: List[bytes] = []
        with FakeServer(lambda data: told.append(data) or [Quake3World.list_answer]) as server:
            self.ask("list", server.place, "--game", "quake3", "--gamename", "Xonotic",
                     "--protocol", "3")
        self.assertEqual(told, [OUT + b"getserversExt Xonotic 3 empty full"])


LUANTI_LISTED = LUANTI_STORED.replace(b'"address":""', b'"address":"203.0.113.9"')


class OtherMastersLists(unittest.TestCase):
    """What each game's list says of where to ask, and of what servers do not tell."""

    def setUp(self) -> None:
        patience = mock.patch.multiple(ms, ASK_WAIT_S=SOON_S)
        patience.start()
        self.addCleanup(patience.stop)

    def luanti(self, *entries: bytes) -> List[ms.FoundServer]:
        """What is found in a list with these entries."""
        answer = b'HTTP/1.0 200 OK\r\n\r\n{"total":{},"list":[%s]}' % b",".join(entries)
        return self.found("luanti", b"/list", answer)

    def found(self, game: str, path: bytes, answer: bytes) -> List[ms.FoundServer]:
        serve = scripted(b"", b"GET %s HTTP/1.0\r\nHost: " % path, answer)
        with FakeServer(serve=serve) as fake:
            upstream, = ms.read_upstreams("%s http://%s%s" % (game, fake.place, path.decode()))
            servers, _ = ms.fetch_upstream(upstream, set(), collections.OrderedDict(), 100)
            self.assertEqual({server.found_at for server in servers} - {fake.place}, set())
            return servers

    def test_luanti_servers_with_their_announcements(self) -> None:
        """Those that no server could have announced are left out."""
        known, = self.luanti(LUANTI_LISTED)
        self.assertEqual((known.address, known.port, known.fields["name"],
                          known.fields["private"]["luanti_announcement"]["mods"][:2]),
                         ("203.0.113.9", 36302, json.loads(LUANTI_START)["name"],
                          ["weather", "sfinv"]))
        whole = json.loads(LUANTI_LISTED)
        bad = [b"5", b"null", b"[]", b'"x"', b"{}"] + [
            json.dumps({**whole, **changed}).encode() for changed in (
                {"address": 5}, {"address": ["x"]}, {"port": "x"}, {"port": None}, {"port": 1e999},
                {"name": None}, {"clients": "x"}, {"proto_min": 50}, {"clients_list": 5})]
        bad += [json.dumps({key: whole[key] for key in whole if key != missing}).encode()
                for missing in ("address", "port", "name", "clients_max")]
        # The official list lacks what our own adds
        less = json.dumps({key: whole[key] for key in whole if key not in ms.LUANTI_COMPUTED})
        self.assertEqual([server.port for server in self.luanti(*bad, less.encode())], [36302])

    def test_ddnet_servers(self) -> None:
        """Of each entry one address is asked, IPv4 if it has any. What is wrong is left out."""
        def listed(*entries: Any) -> List[Tuple[Any, ...]]:
            answer = b'HTTP/1.0 200 OK\r\n\r\n{"servers":%s}' % json.dumps(entries).encode()
            found = self.found("ddnet", ms.DDNET_SERVERS.encode(), answer)
            return sorted((server.address, server.port, server.fields) for server in found)

        urls, info = DdnetTest.URLS, json.loads(DDNET_INFO)
        for addresses, address in ((urls[:1], DdnetTest.HERE), (urls[2:], DdnetTest.HERE_6),
                                   (urls[::-1], DdnetTest.HERE), (urls * 2, DdnetTest.HERE)):
            (found_address, port, fields), = listed({"addresses": addresses, "info": info})
            self.assertEqual((found_address, port), (address, 8399))
            # Nothing else of the entry is used: the game server's answer says it
            self.assertEqual(fields, {"private": {"ddnet_addresses": addresses[:4]}})
        wrong = [5, None, [], "x", {}, {"addresses": urls}, {"info": info}]
        wrong += [{"addresses": addresses, "info": info} for addresses in (
            5, None, [], {}, "tw", urls[0], [5], [urls], [None, urls[0]],
            ["tw-0.8+udp" + urls[0][10:]],
            *([urls[0].replace("8399", port)] for port in ("0", "65536", "-1", "x", "")),
            *([urls[0].replace(DdnetTest.HERE, host)] for host in (
                "", "a.example", "203.0.113.256", "0.0.0.0", "224.0.0.1", "255.255.255.255",
                "[::]", "[ff02::1]", "2001:db8::9", "x" * 9999)))]
        wrong += [{"addresses": urls, "info": value} for value in (5, None, [], "x", {
            **info, "clients": 5}, {**info, "map": "x"}, {**info, "max_players": []})]
        self.assertEqual(len(listed(*wrong, {"addresses": urls, "info": info})), 1)
    @needs_openssl
    def test_by_https(self) -> None:
        """Only from a host whose certificate is right."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        certificate, key = make_certificate(folder.name, "localhost")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        answer = b'HTTP/1.1 200 OK\r\n\r\n{"list":[%s]}' % LUANTI_LISTED

        def serve(sock: socket.socket) -> None:
            with contextlib.suppress(OSError), context.wrap_socket(sock, server_side=True) as tls:
                scripted(b"", b"GET /list ", answer)(tls)
        for host, trusted, words in (("localhost", certificate, ""),
                                     ("127.0.0.1", certificate, "CERTIFICATE_VERIFY_FAILED"),
                                     ("localhost", os.devnull, "CERTIFICATE_VERIFY_FAILED")):
            with FakeServer(serve=serve) as server, mock.patch.dict(
                    os.environ, SSL_CERT_FILE=trusted, SSL_CERT_DIR=folder.name):
                upstream = ms.read_upstream("luanti https://%s:%d" % (host, server.port))
                told = ""
                try:
                    found, _ = ms.fetch_upstream(upstream, set(), collections.OrderedDict(), 5)
                    self.assertEqual([one.address for one in found], ["203.0.113.9"])
                except OSError as error:
                    told = str(error)
                self.assertEqual(words in told, True, (host, told))
                self.assertEqual(bool(words), bool(told))

    def test_two_masters(self) -> None:
        """What the ini of the first one names is on the second one's page, and in its list."""
        with FakeServer(hyperbol_game(b"Arena of Doom")) as game, \
                RunningServer(start=HURRIED, hyperbol__port="0",
                              hyperbol__servers=game.place) as first, \
                RunningServer(start=HURRIED, hyperbol__port="0", upstream__masters=(
                    "hyperbol 127.0.0.1:%d" % first.port("hyperbol")),
                    upstream__interval="10") as second:
            listed = eventually(lambda: json.loads(
                fetch(second.port("http"), "/servers.json")[2])["servers"])
            self.assertEqual([(server["name"], server["port"], server["found_at"])
                              for server in listed],
                             [("Arena of Doom", game.port,
                               "127.0.0.1:%d" % first.port("hyperbol"))])
            place = "127.0.0.1:%d" % second.port("hyperbol")
            status, out, err = command("list", "--game", "hyperbol", place)
            self.assertEqual((status, game.place in out, err), (0, True, ""))


@mock.patch.object(ms, "ASK_WAIT_S", SOON_S)
class SubSpaceOnTheWire(unittest.TestCase):
    """The program, a zone and a player, on loopback."""

    def test_a_zone_is_listed(self) -> None:
        with RunningServer(start=HURRIED, subspace__port="0") as server, \
                FakeServer(zone_answer) as zone, \
                socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            ports = server.port("subspace"), server.port("subspace", index=1)
            game_port = zone.port - 1
            sock.sendto(zone_packet(port=game_port), ("127.0.0.1", ports[1]))
            words = ["list", "127.0.0.1:%d" % ports[0], "--game", "subspace"]
            listed = eventually(lambda: json.loads(command(*words, "--json")[1])["servers"])
            self.assertEqual(listed, [{
                "address": "127.0.0.1", "port": game_port, "name": "Loopback Test Zone",
                "players": 6, "scores": True, "version": 134,
                "description": "a real asss on loopback"}])
            ping = ["ping", "127.0.0.1:%d" % (ports[1] - 1), "--game", "subspace", "--json"]
            eventually(lambda: json.loads(command(*ping)[1])["arenas"] == "subspace 6/4")
            self.assertRegex(command(*words)[1],
                             r"^ +6  127\.0\.0\.1:%d +Loopback" % game_port)

    def test_a_list_that_does_not_come(self) -> None:
        """The master goes on talking, and sends no list."""
        with FakeServer(lambda data: [hexa("0005 01020304")]) as server, \
                mock.patch.object(ms, "LIST_S", 0.5):
            status, _, err = command("list", server.place, "--game", "subspace")
        self.assertEqual((status, "not complete within 0.5 s" in err), (1, True), err)


# --- Command line: the log, files, serving, --check ---------------------------------------------

class LogTest(unittest.TestCase):
    """Nobody waits for the log; a file rotates and opens anew."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "log")

    def start(self, stderr: Any = None, **settings: str) -> Any:
        """A log of the program, but not its own one."""
        for patch in (mock.patch.object(ms, "log", logging.Logger("masterserver")),
                      mock.patch.object(ms, "LOG_END_S", SOON_S),
                      mock.patch.object(sys, "stderr", stderr)):
            patch.start()
            self.addCleanup(patch.stop)
        self.addCleanup(ms.end_log)
        log_file = ms.start_log(settings_of(settings))
        if log_file:
            self.addCleanup(log_file.close)
        return log_file

    def written(self, name: str = "") -> List[str]:
        with open(self.path + name, encoding="utf-8") as file:
            return file.read().splitlines()

    def test_a_log_that_nobody_reads_stops_nothing(self) -> None:
        """Lines for which there is no room are lost; the end waits for the others, not for long."""
        writing, reads, read = threading.Event(), threading.Event(), []

        def write(text: str) -> None:
            writing.set()
            reads.wait(2 * SOON_S)
            read.append(text)
        self.start(mock.Mock(write=write))
        self.addCleanup(reads.set)
        began = time.monotonic()
        ms.log.info("line 0")
        self.assertTrue(writing.wait(SOON_S))       # from here on nothing more is taken
        for number in range(1, 3000):
            ms.log.info("line %d", number)
        with mock.patch.object(ms, "LOG_END_S", 0.2):
            ms.end_log()
        self.assertTrue(0.15 < time.monotonic() - began < SOON_S)
        reads.set()
        eventually(lambda: len(read) > ms.LOG_LINES)
        numbers = re.findall(r"INFO line (\d+)\n", "".join(read))
        self.assertEqual(numbers, [str(number) for number in range(len(numbers))])
        self.assertLess(len(numbers), ms.LOG_LINES + 5)

    @unittest.skipUnless(hasattr(os, "mkfifo"), "pipes that have names")
    def test_the_program_serves_and_ends_though_nobody_reads(self) -> None:
        os.mkfifo(self.path)
        with open(os.open(self.path, os.O_RDWR | os.O_NONBLOCK), "wb", 0) as pipe:
            for size in 4096, 1:
                while pipe.write(b"x" * size):
                    pass
            server = RunningServer("--verbose", start=[
                "sh", "-c", 'exec "$@" 2>%s' % self.path, "sh", *START])
            self.assertEqual(fetch(server.port("http"), "/healthz")[0], 200)
            began = time.monotonic()
            self.assertEqual(server.stop(), 0)
            self.assertLess(time.monotonic() - began, SOON_S)

    def test_a_file_rotates(self) -> None:
        """Three older ones are kept; where that cannot be, the file grows."""
        for fault, files in ((None, 4), (PermissionError(13, "denied"), 1)):
            with mock.patch.object(ms, "LOG_FILE_BYTES", 1000):
                self.start(server__log_file=self.path)
            with mock.patch.object(os, "rename", side_effect=fault, wraps=os.rename):
                for number in range(55):
                    ms.log.info("%d %s", number, "x" * 60)              # nine or ten a file
                ms.end_log()
            names = (".3", ".2", ".1", "")[-files:]
            last = re.findall(r"INFO (\d+)", "\n".join(sum(map(self.written, names), [])))
            self.assertEqual(last, [str(number) for number in range(55 - len(last), 55)])
            self.assertTrue(len(last) == 55 if fault else 30 < len(last) < 45, last)
            self.assertEqual(len(glob.glob(self.path + "*")), files)
            for name in names:
                os.remove(self.path + name)

    @unittest.skipUnless(hasattr(signal, "SIGHUP"), "reload by signal")
    def test_a_file_opens_anew_at_a_reload(self) -> None:
        """Beside the ini, wherever the program was started; as logrotate wants it."""
        with RunningServer(server__log_file="log") as server:
            self.path = os.path.join(server.folder.name, "log")
            eventually(lambda: "Players and browsers" in "".join(self.written()))
            os.rename(self.path, self.path + ".old")

            def reopened() -> bool:
                server.process.send_signal(signal.SIGHUP)
                return os.path.exists(self.path)
            eventually(reopened)
            eventually(lambda: "settings read again" in "".join(self.written()))
            self.assertFalse(server.logged(b"INFO"))

    def test_a_log_that_cannot_be_opened(self) -> None:
        paths = [os.path.dirname(self.path), os.path.join(self.path, "x")]
        if hasattr(os, "mkfifo"):
            paths.append(self.path + ".pipe")
            os.mkfifo(paths[-1])
        for path in paths:
            with self.assertRaisesRegex(ms.StartError, r"change \[server\] log_file"):
                self.start(server__log_file=path)
            self.assertEqual(ms.log.handlers, [])
        self.start(None)                        # as of pythonw
        ms.log.info("to nobody")

    def test_the_written_lines(self) -> None:
        """At its level, and few tracebacks: a fault must not fill the disk."""
        stderr = io.StringIO()
        self.start(stderr, server__log_level="warning")
        ms.log.info("too low")
        for number in range(200):
            ms.log.error("by a packet", exc_info=ValueError("a fault"))
            ms.log.warning("told %s", ascii("\xfc"))
        ms.end_log()
        text = stderr.getvalue()
        self.assertEqual(len(re.findall(r"(?m)^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING told "
                                        r"'\\xfc'$", text)), 200)
        self.assertIn(text.count("ValueError: a fault"), range(20, 30))
        self.assertNotIn("too low", text)

    def test_a_file_on_a_full_disk(self) -> None:
        """Standard error has one line, /healthz tells it, and the file goes on when there is room.
        """
        class Disk(io.FileIO):
            is_full = False

            def write(self, data: Any) -> int:
                if Disk.is_full:
                    raise OSError(errno.ENOSPC, "no space left")
                return super().write(data)

        def reopen(log_file: Any) -> io.TextIOWrapper:
            ms.check_is_file(log_file.baseFilename)
            return io.TextIOWrapper(io.BufferedWriter(Disk(log_file.baseFilename, "a")), "utf-8")
        stderr = io.StringIO()
        server = master()
        self.addCleanup(server.close)
        with mock.patch.object(ms.LogFile, "_open", reopen):
            server.log_file = log_file = self.start(stderr, server__log_file=self.path)
            for is_full, is_read_again in (
                    (False, False), (True, False), (False, False), (True, True), (False, True)):
                Disk.is_full = is_full
                log_file.is_outdated = is_read_again
                server.tick(0.0)                # tries a line if the last one was lost
                for number in range(300):
                    ms.log.warning("line %d %s", number, is_full)
                trouble = "[Errno 28] no space left" if is_full else ""
                eventually(lambda: ms.log.handlers[0].queue.empty()
                           and log_file.trouble == trouble)
                server.tick(0.0)
                self.assertEqual(server.health, {"log": trouble} if is_full else {})
            ms.end_log()
        lines = "\n".join(self.written())
        self.assertEqual(lines.count("line 299 False"), 3)
        self.assertIn("ERROR lines could not be written: [Errno 28] no space left", lines)
        self.assertEqual(stderr.getvalue(), 2 * (
            "masterserver.py: the log cannot be written: [Errno 28] no space left\n"))

    @unittest.skipUnless(hasattr(os, "mkfifo"), "pipes that have names")
    def test_a_pipe_in_place_of_the_file(self) -> None:
        """Nobody waits until somebody reads from it."""
        log_file = self.start(io.StringIO(), server__log_file=self.path)
        os.remove(self.path)
        os.mkfifo(self.path)
        log_file.is_outdated = True
        ms.log.warning("lost")
        eventually(lambda: "not a plain file" in log_file.trouble)

    def test_a_full_disk_is_not_told_by_tracebacks(self) -> None:
        write = mock.Mock(side_effect=OSError(errno.ENOSPC, "no space left"))
        with mock.patch.object(logging, "raiseExceptions", True):
            self.start(mock.Mock(write=write))
            for number in range(3):
                ms.log.warning("line %d", number)
            ms.end_log()
        self.assertEqual(write.call_count, 3)

    def test_a_start_that_fails_is_told_in_the_file_too(self) -> None:
        done = run_program("--set", "server.bind=203.0.113.77", "--set", "server.database=",
                           "--set", "server.log_file=" + self.path)
        self.assertEqual(done.returncode, 1)
        for text in "\n".join(self.written()), done.stderr:
            self.assertGreater(text.count(" cannot listen on "), 3)


class ServingTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "ready")

    def test_a_child_process(self) -> None:
        """It tells what listens where, and ends with its standard input."""
        options = {**NO_PORTS, "server.public_address": "203.0.113.5",
                   "iceball.port": "0", "http.ports": "0", "server.database": ""}
        words = [*START, "--exit-with-stdin", "--ready-file", self.path]
        for name, value in options.items():
            words += ["--set", "%s=%s" % (name, value)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) as process:
            self.addCleanup(process.kill)
            eventually(lambda: process.poll() is not None or os.path.exists(self.path))
            self.assertIsNone(process.poll())
            with open(self.path, encoding="utf-8") as file:
                ready = json.load(file)
            out, err = process.communicate(b"anything\n", timeout=SOON_S)
        self.assertEqual((process.returncode, out, ready["pid"]), (0, b"", process.pid), err)
        iceball, http = (listener["port"] for listener in ready["listeners"])
        self.assertEqual(ready["listeners"], [
            {"protocol": "iceball", "transport": "udp", "host": "127.0.0.1", "port": iceball},
            {"protocol": "http", "transport": "tcp", "host": "127.0.0.1", "port": http}])
        for words in (b"INFO iceball on UDP %d; http on TCP %d; poll on UDP " % (iceball, http),
                      b'"heartbeat": [["203.0.113.5", %d]]' % iceball,
                      b"Players and browsers: http://203.0.113.5:%d/" % http,
                      b"standard input has ended", b"stopped"):
            self.assertIn(words, err)

    def test_announce_tells_what_announces_itself(self) -> None:
        for game, place, words in (
                ("openarena", "m.example:1", "OpenArena's servers announce themselves.\n\n"
                 "Start the server so (Quake III: ioq3ded and another map):\n\n"
                 "openarena-server \\\n    +set dedicated 2 \\\n"
                 "    +set sv_master2 m.example:1 \\\n    +map oa_dm1"),
                ("xonotic", "m.example", "Xonotic's servers announce themselves.\n\n"
                 "In server.cfg:\n\nsv_public 1\nsv_masterextra1 \"m.example:27950\""),
                ("luanti", "m.example", "Luanti's servers announce themselves.\n\n"
                 "In minetest.conf:\n\nserver_announce = true\n"
                 "serverlist_url = http://m.example:27790"),
                ("ddnet", "https://m.example", "DDNet's servers announce themselves.\n\n"
                 "In myServerconfig.cfg, which autoexec_server.cfg executes:\n\n"
                 "sv_register 1\nsv_register_url https://m.example:443/ddnet/15/register")):
            status, out, err = command("announce", "--game", game, "--port", "5", place)
            self.assertEqual((status, out), (2, ""))
            self.assertEqual(err, "masterserver.py: announce: %s\n" % words)
        _, _, err = command("announce", "--game", "quake3", "--port", "5", "m.example")
        self.assertEqual([words in err for words in ("dedicated 2", "sv_masterextra1")], [True] * 2)

    def test_the_address_in_the_first_lines(self) -> None:
        for public, own, told in (("", "192.0.2.9", "192.0.2.9"), ("", "", "localhost"),
                                  ("203.0.113.5", "192.0.2.9", "203.0.113.5"),
                                  ("2001:db8::7", "192.0.2.9", "[2001:db8::7]")):
            core = with_rooms(make_core(server__public_address=public))
            core.listeners = [ms.Listener("http", "tcp", host, 27790) for host in ("0.0.0.0", "::")]
            with mock.patch.object(ms, "own_address", return_value=own):
                ports, *blocks, page = ms.first_contact(core)
            self.assertEqual((ports, page), ("http on TCP 27790",
                                             "Players and browsers: http://%s:27790/" % told))
            self.assertEqual(blocks, [
                "Luanti. In minetest.conf:", "    server_announce = true",
                "    serverlist_url = http://%s:27790" % told,
                "DDNet. In myServerconfig.cfg, which autoexec_server.cfg executes:",
                "    sv_register 1",
                "    sv_register_url http://%s:27790/ddnet/15/register" % told,
                "    http_allow_insecure 1"])
        core = with_rooms(make_core(http__url="https://games.example"))
        core.listeners = [ms.Listener("http", "tcp", "0.0.0.0", 27790)]
        self.assertEqual(ms.first_contact(core)[-2:], [
            "    sv_register_url https://games.example/ddnet/15/register",
            "Players and browsers: https://games.example/"])

    @unittest.skipIf(ms.WINDOWS, "Windows has no such signals for a child")
    def test_signals(self) -> None:
        """A reload loses no connection; what is wrong in the ini is told, and what went as well."""
        for stop in signal.SIGINT, signal.SIGTERM:
            with RunningServer("--set", "aio.dialects=text") as server:
                eventually(lambda: server.logged(b"WARNING --set: [aio] dialects"))
                place = "127.0.0.1", server.port("http")
                with socket.create_connection(place, SOON_S) as client:
                    for title, told in (("[http]\ntitle = New", b"changed: [http] title"),
                                        ("[bans]\nx = y", b"old settings stay in force")):
                        with open(server.config, "w", encoding="utf-8") as file:
                            file.write(title)
                        server.process.send_signal(signal.SIGHUP)
                        eventually(lambda: server.logged(told))
                        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                        data = b""
                        while b"</html>" not in data:
                            data += client.recv(65536) or b"</html> did not come"
                        self.assertIn(b"<title>New", data)
                server.process.send_signal(stop)
                self.assertEqual(server.process.wait(SOON_S), 0)

    def test_settings_beside_the_program(self) -> None:
        def load(**arguments: Any) -> ms.Settings:
            usual = {"config": None, "set": [], "verbose": False}
            return ms.load_settings(SimpleNamespace(**{**usual, **arguments}))
        self.assertEqual(load().path, os.path.join(HERE, "masterserver.ini"))
        with mock.patch.object(sys, "frozen", True, create=True), \
                mock.patch.object(sys, "executable", os.path.abspath("a game/server")):
            self.assertEqual(load().file("server.database"),
                             os.path.abspath("a game/masterserver.db"))
        settings = load(verbose=True, set=["iceball.port=5"])
        self.assertEqual((settings["server.log_level"], settings["iceball.port"]), ("debug", 5))
        self.assertRaises(ms.SettingsError, load, config=self.path)
        with self.assertRaisesRegex(AssertionError, "the ready file cannot be written"):
            RunningServer("--ready-file", os.path.join(self.path, "none"))

    def test_usage(self) -> None:
        for line, told in (
                ("ping 127.0.0.1 --game aio", "expected ADDRESS:PORT"),
                ("ping 127.0.0.1:1 --game chess", "invalid choice: 'chess'"),
                ("list ::1:x:y --game aio", "expected ADDRESS:PORT"),
                ("list localhost", "required: --game"), ("frob", "unrecognized arguments: frob"),
                ("--check list --game aio x", "unrecognized arguments: list"),
                ("ping --check --game aio x:1", "unrecognized arguments: --check"),
                ("--config x", "x: cannot be read"), ("--set x", "section.key=value"),
                ("announce --game aio --port x y", "invalid int"),
                ("export a:b", "ADDRESS:PORT"), ("export", "HOST[:PORT]"),
                ("export x --every soon", "expected a number"),
                ("export x --every 0", "from 1 to 86400"),
                ("export x --ftp ftp://u:secret@h/", "MASTERSERVER_FTP_PASSWORD"),
                ("export x --ftp http://h/", "expected ftp://"),
                ("export x --ftp ftp://h:port/", "--ftp"),
                ("export x --ftp ftp:///folder/", "expected ftp://")):
            words = line.split()
            status, out, err = command(*words)
            self.assertEqual((status, out), (2, ""), words)
            self.assertIn(told, err)
            self.assertNotIn("secret", err)
        for name in filter(None, ms.COMMANDS):
            status, out, err = command(name, "--help")
            self.assertEqual((status, out[:24 + len(name)], err),
                             (0, "usage: masterserver.py %s " % name, ""))
            self.assertIn("  %s " % name, command("--help")[1])
        self.assertEqual(command("--version"), (0, "masterserver.py %s\n" % ms.__version__, ""))
        self.assertEqual(command("--print-config"), (0, ms.config_text(), ""))

    def test_places(self) -> None:
        for text, place in (("a.example", ("a.example", None)), ("a.example:7", ("a.example", 7)),
                            ("192.0.2.1", ("192.0.2.1", None)), ("::1", ("::1", None)),
                            ("[::1]:7", ("::1", 7)), ("[::1]", ("::1", None)),
                            ("https://a.example", ("a.example", 443)),
                            ("https://[::1]:5/", ("::1", 5))):
            self.assertEqual(ms.read_master_place(text), (*place, text.startswith("https")))
        for text in ("", "http://a.example", "https://", "https://a.example/x", "a/b",
                     "ftp://a.example:5"):
            self.assertRaises(ValueError, ms.read_master_place, text)

    @unittest.skipUnless(os.path.exists("/dev/full"), "no full device here")
    def test_a_standard_output_that_takes_nothing(self) -> None:
        with open("/dev/full", "wb") as full:
            done = subprocess.run([*START, "--print-config"], stdout=full, timeout=SOON_S,
                                  stderr=subprocess.PIPE)
        self.assertEqual((done.returncode, done.stderr[:34]),
                         (1, b"masterserver.py: standard output: "))

    def test_a_terminal_that_cannot_show_it(self) -> None:
        answer = "12#\u0416#D#127.0.0.1#5#%".encode()
        with FakeServer(serve=scripted(b"", b"12#%\n", answer)) as server:
            done = subprocess.run(
                [*START, "list", "--game", "aio", server.place], capture_output=True,
                env=dict(os.environ, PYTHONIOENCODING="cp1252"), timeout=SOON_S)
        self.assertEqual((done.returncode, done.stderr), (0, b""))
        self.assertRegex(done.stdout, rb"^ +-  127.0.0.1:5 +\?\r?\n$")


class WritingFiles(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.path = os.path.join(folder.name, "file")

    def assert_file(self, data: bytes) -> None:
        with open(self.path, "rb") as file:
            self.assertEqual(file.read(), data)

    def test_all_or_nothing(self) -> None:
        ms.write_file(self.path, b"one")
        with mock.patch.object(os, "replace", side_effect=OSError):
            self.assertRaises(OSError, ms.write_file, self.path, b"two")
        self.assert_file(b"one")
        ms.write_file(self.path, b"three")
        self.assert_file(b"three")
        self.assertEqual(os.listdir(self.folder), ["file"])
        self.assertRaises(OSError, ms.write_file, self.folder, b"a folder")

    @unittest.skipIf(ms.WINDOWS, "links and pipes are others there")
    def test_paths_that_are_no_regular_file(self) -> None:
        link, pipe = (os.path.join(self.folder, name) for name in ("link", "pipe"))
        os.symlink(self.path, link)
        os.mkfifo(pipe)
        ms.write_file(link, b"one")
        self.assert_file(b"one")
        with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
            ms.write_file(pipe, b"two")
            self.assertEqual(reader.read(), b"two")
        self.assertTrue(os.path.islink(link))
        self.assertEqual(sorted(os.listdir(self.folder)), ["file", "link", "pipe"])


class Checking(unittest.TestCase):
    def check(self, **settings: str) -> Tuple[int, str]:
        """Exit status and words of --check on free ports of loopback."""
        chosen = {**NO_PORTS, "server.public_address": "203.0.113.5", "server.database": "",
                  **setting_names(settings)}
        options = ["--set=%s=%s" % setting for setting in chosen.items()]
        status, out, err = command("--check", *options)
        return status, out + err

    def test_ports_that_are_taken(self) -> None:
        """All of them are told, what the trial has opened is closed, the database is not made."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp, socket.socket() as tcp:
            ports = {"iceball__port": str(free_port()), "http__ports": str(free_port())}
            udp.bind(("127.0.0.1", int(ports["iceball__port"])))
            tcp.bind(("127.0.0.1", int(ports["http__ports"])))
            tcp.listen(1)
            status, words = self.check(**ports)
        self.assertRegex(words, "\nmasterserver.py: iceball cannot listen .*\nhttp cannot listen ")
        self.assertEqual((status, words.count(" cannot listen on ")), (1, 2))
        close = ms.MasterServer.close
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(
                ms.MasterServer, "close", autospec=True, side_effect=close) as closed:
            path = os.path.join(folder, "database")
            self.assertEqual(self.check(server__database=path, **ports)[0], 0)
            closed.assert_called_once()
            self.assertEqual(os.listdir(folder), [])

    def test_beside_a_running_master(self) -> None:
        """It says so in one line; another program on the port is told as such."""
        running = ms.MasterServer({**NO_PORTS, "http.ports": "0", "server.database": ""})
        running.start()
        self.addCleanup(running.stop)
        status, words = self.check(http__ports=str(running.listeners[0].port))
        self.assertEqual((status, words.count("cannot listen")), (0, 0))
        self.assertIn("\nA master is running on these ports, so they were not tried. ", words)
        with FakeServer(serve=scripted(b"", b"GET", b"HTTP/1.0 200 OK\r\n\r\n{}")) as other:
            status, words = self.check(http__ports=str(other.port))
        self.assertEqual((status, words.count("cannot listen")), (1, 1), words)

    def test_files_that_are_none(self) -> None:
        for name in "log_file", "database":
            status, words = self.check(**{"server__" + name: HERE})
            self.assertEqual(status, 2)
            self.assertIn("[server] %s = %s: not a plain file" % (name, HERE), words)

    def test_lists_of_other_masters(self) -> None:
        """Each is fetched once; what is wrong with one does not keep the master from starting."""
        answer = scripted(HBSL, hexa("efbeadde ff000000"), entry("203.0.113.9", 5)
                          + entry("10.0.0.1", 5) + entry("127.0.0.1", 5))
        with FakeServer(serve=answer) as server:
            status, words = self.check(hyperbol__port="0", upstream__masters="\n".join((
                "hyperbol " + server.place, "hyperbol 127.0.0.1:1", "aio a.example")))
        self.assertEqual(status, 0)
        self.assertIn("[upstream] hyperbol %s: 3 addresses in the list, 0 other entries left out\n"
                      % server.place, words)
        self.assertRegex(words, r"warning: \[upstream\] hyperbol 127.0.0.1:1: no list: .*refused")
        self.assertIn("warning: [upstream] aio a.example: the game is switched off here, by "
                      "[aio] port.\n", words)

    def test_warnings(self) -> None:
        """Each is given where it is right, and only there."""
        rows: Tuple[Tuple[str, Dict[str, str]], ...] = (
            ("public_address is empty", {"server__public_address": ""}),
            ("192.168.1.5 is private", {"server__public_address": "192.168.1.5"}),
            ("127.0.0.1 can be reached from this machine only", {}),
            ("27790 or 27795", {"iceball__port": "0", "http__ports": "0"}),
            ("[aio] dialects", {"aio__dialects": "text"}))
        for told, settings in rows:
            status, words = self.check(**settings)
            self.assertRegex(words, "^warning: (?s:.*)\nThe server can start with these ")
            for other, _ in rows:
                self.assertEqual("warning: " in words and other in words,
                                 other == told or other.startswith("127.0.0.1"), (other, settings))
        for settings, told in (({"iceball__port": "", "http__ports": "0"}, "27795"),
                               ({"server__bind": "127.0.0.1, 0.0.0.0"}, "from this machine")):
            self.assertNotIn(told, self.check(**settings)[1])
        for port in "27790", "27795":
            self.assertNotIn("27790 or", "".join(ms.reach_warnings(ms.Settings(
                {"http.ports": port}))))


# --- export -------------------------------------------------------------------------------------

def ftp_server(told: List[bytes], answers: Dict[bytes, bytes]) -> Callable[[socket.socket], None]:
    """An FTP server with these answers to some words; `told`: what it was told and sent."""
    def serve(sock: socket.socket) -> None:
        with sock.makefile("rb") as lines, socket.create_server(("127.0.0.1", 0)) as data:
            passive = b"227 (127,0,0,1,%d,%d)\r\n" % divmod(data.getsockname()[1], 256)
            usual = {b"USER": b"331 f\xfcr?\r\n", b"STOR": b"150 now\r\n", b"PASV": passive}
            for line in itertools.chain([b"CONNECT"], lines):
                word = line.split()[0]
                told.append(line.strip())
                answer = answers.get(word, usual.get(word, b"230 f\xfcr\r\n"))
                sock.sendall(answer)
                if not answer:
                    return
                if answer == usual[b"STOR"]:
                    with data.accept()[0] as file, file.makefile("rb") as sent:
                        told.append(sent.read())
                    sock.sendall(b"226 done\r\n")
    return serve


def entry(address: str, port: int, flavor: int = 1) -> bytes:
    return bytes(map(int, address.split("."))) + struct.pack("<IB", port, flavor) + bytes(3)


NOBODY = entry("127.0.0.1", 70000)          # that is no port: it is listed, and does not answer


class ExportTest(unittest.TestCase):

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.output = os.path.join(folder.name, "servers.xml")
        patch = mock.patch.multiple(ms, ASK_WAIT_S=SOON_S, LIST_S=SOON_S)
        patch.start()
        self.addCleanup(patch.stop)

    def export(self, *words: str, listing: bytes = NOBODY, greeting: bytes = HBSL,
               ) -> Tuple[int, str, str]:
        """Of a master with this list."""
        master_of = scripted(greeting, hexa("efbeadde ff000000"), listing)
        with FakeServer(serve=master_of) as hyperbol:
            return command("export", hyperbol.place, *words, "--output", self.output)

    def test_the_written_file(self) -> None:
        """Who does not answer is queried once more; what is no place is listed, and not queried."""
        with FakeServer(hyperbol_game(b"Fun & Games", 2)) as game, \
                FakeServer(hyperbol_game(b"", 9)) as silent:
            began = time.monotonic()
            done = self.export("--game", "hyperbol", listing=(
                entry("127.0.0.1", game.port, 3) + entry("127.0.0.1", silent.port) + NOBODY
                + entry("255.255.255.255", 5) + b"\1\2\3"))
            took_ms = (time.monotonic() - began) * 1000
        self.assertEqual(done, (0, "4 servers, 1 of them responding, 5 players: %s written.\n"
                                % self.output, ""))
        servers = xml.dom.minidom.parse(self.output).getElementsByTagName("server")
        first, *others = (dict(server.attributes.items()) for server in servers)
        self.assertIn(int(first.pop("ping_milliseconds")), range(int(took_ms) + 1))
        self.assertEqual(first, {
            "ip": "127.0.0.1", "port": str(game.port), "responding": "1", "flavor": "3",
            "servername": "Fun & Games", "gametype": "Capture the Core", "mapname": "orbital",
            "playercount": "5", "maxplayercount": "16", "version": "1.8a", "skill": "9"})
        self.assertEqual(others, [
            {"ip": address, "port": port, "responding": "0"} for address, port in (
                ("127.0.0.1", str(silent.port)), ("127.0.0.1", "70000"), ("255.255.255.255", "5"))])
        self.assertEqual(os.listdir(self.folder), ["servers.xml"])

    def test_many_are_asked_at_once_and_not_for_ever(self) -> None:
        everybody = threading.Barrier(100)
        pings: List[Any] = []           # a mock's count is wrong if two threads call it at once

        def ping(*arguments: Any, tries: int) -> None:
            pings.append(arguments)
            everybody.wait(SOON_S)          # it fails if fewer are asked at once
            raise socket.timeout
        for total_s, asked in (60.0, 100), (0.0, 0):
            pings.clear()
            with mock.patch.multiple(ms, ping=ping, EXPORT_TOTAL_S=total_s):
                status, out, _ = self.export(listing=NOBODY * 100)
            self.assertEqual((status, out[:29], len(pings)),
                             (0, "100 servers, 0 of them respond"[:29], asked))

    def test_failures_leave_the_old_file(self) -> None:
        """And no server is queried."""
        with open(self.output, "wb") as file:
            file.write(b"old")
        for patience_s, greeting, listing, expected, told in (
                (SOON_S, b"SSH-2.0-x\r\n\r\n", b"", 4, "is not a Hyperbol master"),
                (SOON_S, HBSL, NOBODY * 3, 4, "is not a Hyperbol master: more than 24 bytes"),
                (0.3, b"", b"", 3, "No list from 127.0.0.1:"),
                (SOON_S, HBSL, b"", 6, "is empty; %s is left as it is" % self.output)):
            with mock.patch.multiple(ms, LIST_S=patience_s, LIST_SERVERS=2), \
                    mock.patch.object(ms, "queried_server") as queried:
                status, out, err = self.export(listing=listing, greeting=greeting)
            self.assertEqual((status, out, queried.called), (expected, "", False))
            self.assertIn(told, err)
        for place in "127.0.0.1:1", "a..b":
            status, out, err = command("export", place, "--output", self.output)
            self.assertEqual((status, out), (3, ""))
            self.assertIn("No list from " + place, err)
        with open(self.output, "rb") as file:
            self.assertEqual(file.read(), b"old")
        self.assertEqual(ms.LIST_SERVERS, 65536)
        self.output = self.folder
        status, out, err = self.export()
        self.assertEqual((status, out), (7, ""))
        self.assertIn(" cannot be written: ", err)

    def test_every(self) -> None:
        """A round that fails does not end it; a signal does."""
        for number in signal.SIGINT, signal.SIGTERM:
            self.addCleanup(signal.signal, number, signal.getsignal(number))
        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 2:
                signal.raise_signal(signal.SIGTERM)
        slept: List[float] = []
        with mock.patch.object(ms.time, "sleep", sleep), \
                mock.patch.object(ms, "fetch_list", side_effect=[OSError("gone"), []]):
            status, out, err = command("export", "x", "--every", "300", "--output", self.output)
        self.assertEqual((status, slept), (0, [300.0, 300.0]))
        self.assertRegex(err, "No list from x:20203: gone\n.*The list of x:20203 is empty")

    def test_passwords(self) -> None:
        path = os.path.join(self.folder, ".netrc")
        with open(path, "w", encoding="ascii") as file:
            file.write("machine h.example login user password secret\n")
        os.chmod(path, 0o600)
        none = os.path.join(self.folder, "none")
        rows = ((self.folder, "", "ftp://user@h.example/", ("user", "secret")),
                (self.folder, "", "ftp://h.example/", ("user", "secret")),
                (self.folder, "", "ftp://else.example/", ("", "")),
                (self.folder, "", "ftp://b%40c@else.example/", ("b@c", "")),
                (self.folder, "more", "ftp://user@h.example/", ("user", "more")),
                (self.folder, "more", "ftp://h.example/", ("", "more")),
                (none, "", "ftp://u@h/", ("u", "")))
        for home, password, url, expected in rows:
            with mock.patch.dict(os.environ, HOME=home, USERPROFILE=home,
                                 MASTERSERVER_FTP_PASSWORD=password):
                self.assertEqual(ms.ftp_login(ms.read_ftp_url(url)), expected, (url, password))

    def test_uploads(self) -> None:
        """The reason of a failure is told, in whatever words; who is silent is not waited for."""
        for path, answers, stored, reason in (
                ("/a%20b/%C3%BC.xml", {}, b"a b/\xc3\xbc.xml", ""), ("", {}, b"servers.xml", ""),
                ("/%2Fsrv/lists/", {}, b"/srv/lists/servers.xml", ""),
                ("/a/", {b"STOR": b"550 \x1b]0;title\x07\x1b[2JGo away.\r\n"}, b"", "550 Go away."),
                ("/", {b"PASS": b"530 f\xfcr niemand\r\n"}, b"", "530 f\xfcr niemand"),
                ("/", {b"USER": b""}, b"", "EOFError"), ("/a%0Ab", {}, b"", "illegal newline"),
                ("/", {b"CONNECT": b"\r"}, b"", "timed out")):
            told: List[bytes] = []
            with FakeServer(serve=ftp_server(told, answers)) as server, \
                    mock.patch.dict(os.environ, MASTERSERVER_FTP_PASSWORD="secret"), \
                    mock.patch.object(ms, "EXPORT_FTP_S", 0.3 if "timed" in reason else SOON_S):
                status, _, err = self.export("--ftp", "ftp://user@%s%s" % (server.place, path))
            if reason:
                self.assertEqual((status, [line for line in told if b"<server" in line]), (8, []))
                self.assertRegex(err, "The upload to 127.0.0.1 failed: .*" + reason)
                continue
            *steps, data, _ = told
            self.assertEqual((status, steps[1:]), (0, [
                b"USER user", b"PASS secret", b"TYPE I", b"PASV", b"STOR " + stored]))
            self.assertIn(b'<server ip="127.0.0.1" port="70000" responding="0"/>', data)


def python2() -> str:
    """A Python 2 that runs, or nothing."""
    pyenv = os.path.expanduser("~/.pyenv/versions/2.7*/bin/python")
    for name in ["python2.7", "python2", *glob.glob(pyenv)]:
        with contextlib.suppress(OSError):
            if subprocess.run([name, "-c", ""], stderr=subprocess.DEVNULL).returncode == 0:
                return name
    return ""


@mock.patch.multiple(ms, ASK_WAIT_S=SOON_S, LIST_S=SOON_S)
class HyperbolProgramTest(unittest.TestCase):
    """The program with game servers that it queries, and both scripts that read its list."""

    def test_announced_over_http_and_exported(self) -> None:
        with FakeServer(hyperbol_game(b"Fun & Games")) as game, \
                RunningServer(start=HURRIED, hyperbol__port="0") as server:
            body = b"game=hyperbol&port=%d" % game.port

            def listed() -> bool:
                answer = fetch(server.port("http"), "/announce", "Content-Type: application/"
                               "x-www-form-urlencoded", method="POST", body=body)[2]
                return bool(json.loads(answer)["listed"])
            self.assertFalse(listed())
            eventually(listed)
            path = os.path.join(server.folder.name, "out.xml")
            place = "127.0.0.1:%d" % server.port("hyperbol")
            eventually(lambda: command("export", place, "--output", path)[0] == 0)     # not 6
            with open(path, "rb") as file:
                self.assertIn(b'servername="Fun &amp; Games"', file.read())

    def script(self, host: str) -> str:
        """The script in the document, that asks this host."""
        document = os.path.join(HERE, "..", "shared", "seeds", "001_6d526d683ba8a068.txt")
        try:
            with open(document, encoding="utf-8") as file:
                text = file.read()
            ms.bound_socket(socket.AF_INET, "tcp", host, 20203).close()
        except OSError as error:
            self.skipTest("the protocol document or the port is not here: %s" % error)
        begin = text.index("import socket\nimport sys")
        script = text[begin:text.index("\nMaster Server Protocol (last edited")]
        return "# -*- coding: utf-8 -*-\n" + script.replace(
            "HOST = 'hbms.datavertex.com'", "HOST = '%s'" % host)

    def test_the_script_in_the_document(self) -> None:
        python = python2()
        if not python:
            self.skipTest("there is no Python 2 here")
        # Its port is written into the script: the address is this process's own
        host = "127.%d.%d.203" % divmod(os.getpid() % 65536, 256)
        script = self.script(host)
        names = b"Fun & Games", b"<b>", b"\xc3\xa9t\xc3\xa9 \"'", b"four"
        with contextlib.ExitStack() as stack:
            ports = [stack.enter_context(FakeServer(hyperbol_game(name))).port for name in names]
            known = ("127.0.0.1:%d %d" % (port, number) for number, port in enumerate(ports))
            server = stack.enter_context(RunningServer(
                start=HURRIED, server__bind=host, hyperbol__port="20203",
                hyperbol__servers="\n".join(known)))
            eventually(lambda: len(ms.fetch_list(ms.Hyperbol(), host, 20203)) == 4)
            path = os.path.join(server.folder.name, "script.py")
            ms.write_file(path, script.encode())
            with subprocess.Popen([python, "-u", path], cwd=server.folder.name,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
                assert process.stdout is not None
                output = list(itertools.takewhile(
                    lambda line: not line.startswith(b"Waiting for 5"), process.stdout))
                process.kill()
            with open(os.path.join(server.folder.name, "servers.xml"), "rb") as result:
                servers = xml.dom.minidom.parse(result).getElementsByTagName("server")
        self.assertIn(b"Players Playing: 20\n", output)
        self.assertEqual(
            {(int(server.getAttribute("port")), server.getAttribute("responding"),
              server.getAttribute("flavor")) for server in servers},
            {(port, "1", str(number)) for number, port in enumerate(ports)})


# --- Embedding -----------------------------------------------------------------------------------

def handshake_iceball(server: ms.MasterServer, *ports: int) -> None:
    """Announce game servers on these ports of this machine; they will be listed soon."""
    for port in ports:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as game:
            game.settimeout(SOON_S)
            game.connect(("127.0.0.1", port_of(server, "iceball")))
            game.send(announcement(port))
            game.send(b"HSHK" + game.recv(100)[4:])


class Embedded(unittest.TestCase):
    """MasterServer as a class of somebody else's program."""

    def ports(self, *settings: str) -> Dict[str, str]:
        """Ports for these settings, that assert_closed can bind again."""
        return {setting: str(free_port()) for setting in settings}

    def assert_closed(self, server: ms.MasterServer) -> None:
        """Nothing of it is open, and it starts no more."""
        for listener in server.listeners:
            ms.bound_socket(socket.AF_INET, *listener[1:]).close()
        self.assertTrue(server.selector is None or server.wake_in.fileno() < 0)
        self.assertFalse(server.thread is not None and server.thread.is_alive())
        if server.thread is None:
            server.run()                            # returns at once
        else:
            self.assertRaisesRegex(ms.StartError, "already runs", server.run)
        self.assertRaisesRegex(ms.StartError, "Create a new one", server.start)

    def test_started_twice_and_stopped_twice(self) -> None:
        state = random.getstate()                   # the other program may have seeded it
        server = master(**self.ports("iceball__port", "http__ports", "hyperbol__port",
                                     "subspace__port"))
        server.start()
        thread = server.thread
        server.start()
        self.assertIs(server.thread, thread)
        self.assertEqual(fetch(port_of(server, "http"), "/healthz")[0], 200)
        server.stop()
        server.stop()
        self.assertEqual(random.getstate(), state)
        self.assert_closed(server)

    def test_stopped_before_it_serves(self) -> None:
        def stop_while_it_binds(server: ms.MasterServer) -> None:
            open_socket = server.open_socket

            def interrupted(*arguments: Any) -> None:
                open_socket(*arguments)
                server.stop()
            with mock.patch.object(server, "open_socket", interrupted), \
                    contextlib.suppress(ms.StartError):
                server.run()
        for begin in lambda server: None, ms.MasterServer.bind, stop_while_it_binds:
            server = master(**self.ports("iceball__port", "http__ports"))
            begin(server)
            server.stop()
            server.run()
            self.assert_closed(server)

    def test_run_ends_by_a_callback_a_signal_or_another_thread(self) -> None:
        self.addCleanup(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
        for stop in (
                lambda server: server.stop(),
                lambda server: signal.raise_signal(signal.SIGINT),
                lambda server: threading.Thread(target=server.stop).start()):
            server = master(**self.ports("iceball__port"))
            signal.signal(signal.SIGINT, lambda number, frame: server.stop())
            server.on_event = lambda event, listed: stop(server)
            server.bind()
            announcing = threading.Thread(target=handshake_iceball, args=(server, 1000))
            announcing.start()
            server.run()
            announcing.join()
            self.assert_closed(server)

    @mock.patch.object(ms, "TICK_S", 0.05)
    def test_events_come_in_the_serving_thread_and_their_errors_are_logged(self) -> None:
        """Those of one of several masters in a process."""
        events: List[Tuple[str, int, Any]] = []

        def subscriber(event: str, listed: ms.Server) -> None:
            events.append((event, listed.port, threading.current_thread()))
            raise KeyError("mine")
        settings = {**NO_PORTS, "iceball.port": "0", "iceball.timeout": "1"}
        with self.assertLogs("masterserver", "ERROR") as logs, \
                ms.MasterServer(settings, subscriber) as server, \
                ms.MasterServer(settings) as other:
            handshake_iceball(server, 1000)         # who looks late finds it gone already
            eventually(lambda: len(events) == 2)
            self.assertEqual((server.registry.total, other.registry.total), (0, 0))
            handshake_iceball(other, 4)
            eventually(lambda: other.registry.total)
        self.assertEqual(events, [(event, 1000, server.thread) for event in ("listed", "gone")])
        self.assertRegex(logs.output[0], "(?s)subscriber.*KeyError: 'mine'")

    def test_a_failed_start_says_why_and_leaves_nothing_open(self) -> None:
        with master(iceball__port="0", http__ports="0") as first:
            iceball, http = port_of(first, "iceball"), port_of(first, "http")
            second = master(iceball__port=str(iceball),
                            http__ports="%d, %d" % (free_port(), http))
            words = "(?s)UDP 127.0.0.1:%d: .*TCP 127.0.0.1:%d: " % (iceball, http)
            self.assertRaisesRegex(ms.StartError, words, second.start)
        self.assert_closed(second)
        for values, words in (
                ({"iceball.prot": "1"}, "no key prot; did you mean port"),
                ({"http.ports": "x"}, "ports = x: item 1: expected a number"),
                ({"http.template": "/nowhere/page.html"}, "template = /nowhere/page.html: ")):
            self.assertRaisesRegex(ms.SettingsError, words, ms.MasterServer, values)

    def test_servers_whose_connections_end_with_the_program_stay_in_the_saved_list(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            settings = {"server__database": os.path.join(folder, "db"), "aio__port": "0"}
            with master(**settings) as server, connect(server, "aio") as game:
                game.sendall(AIO_TEXT)
                eventually(lambda: server.registry.total)
                server.stop()
            with master(**settings) as server:
                self.assertEqual([(found.name, found.confirmed)
                                  for found in server.registry.servers()], [("N", False)])

    def test_a_clock_that_was_put_right_is_told_to_the_pages(self) -> None:
        server = bound_master(self, http__ports="0")
        web, = (protocol for protocol in server.protocols if isinstance(protocol, ms.Web))
        with mock.patch.object(time, "time", return_value=4e9):
            server.tick(time.monotonic())
        self.assertAlmostEqual(web.epoch + time.monotonic(), 4e9, delta=SOON_S)

    def test_import_starts_nothing_and_nothing_is_left(self) -> None:
        script = """if True:
            import contextlib, logging, os, signal, sys, threading, time
            with contextlib.suppress(ImportError):
                import ctypes                           # libffi may keep its own file open
            def state():
                files = "/proc/self/fd"
                loggers = logging.getLogger(), logging.getLogger("masterserver")
                return (threading.active_count(), signal.getsignal(signal.SIGINT), sys.path[:],
                        [(log.handlers[:], log.level) for log in loggers],
                        len(os.listdir(files)) if os.path.isdir(files) else 0)
            before = state()
            import masterserver as ms
            assert state() == before, state()
            settings = {name: "" for name in ms.SETTINGS if name.endswith((".port", ".ports"))}
            settings.update({"server.bind": "127.0.0.1", "iceball.port": "0", "http.ports": "0"})
            logging.disable(logging.WARNING)            # nobody has port 1, as may be said or not
            ms.MasterServer(settings).stop()
            with ms.MasterServer(settings), ms.MasterServer(settings):
                announcement = ms.Announcement("iceball", 21737, ["127.0.0.1:1"])
                announcement.start()
                announcement.stop()
            ms.Announcement("aio", 21737, ["127.0.0.1:1"], name="n").stop()
            deadline = time.monotonic() + 30
            while state() != before and time.monotonic() < deadline:
                time.sleep(0.01)
            assert state() == before, (state(), before)
            """
        done = subprocess.run([*PYTHON, "-c", script], cwd=HERE, timeout=2 * SOON_S,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.assertEqual((done.returncode, done.stdout), (0, b""))


# --- The project itself --------------------------------------------------------------------------

def text_of(name):
    with open(os.path.join(HERE, name), encoding="utf-8") as file:
        return file.read()


# Someone may have the four files alone
WITHOUT_GITHUB = not os.path.exists(os.path.join(HERE, ".github"))


class ProjectTest(unittest.TestCase):
    """The house's own rules, which stand at the head of masterserver.py."""

    IO = set("socket selectors select time open print input threading queue subprocess signal "
             "ctypes ftplib".split())

    def setUp(self):
        self.source = text_of("masterserver.py")
        self.tree = ast.parse(self.source, feature_version=(3, 8))
        self.sections = [(self.source[:match.start()].count("\n") + 1, int(match.group(1)))
                         for match in re.finditer(r"^# =+\n# (\d+)  ", self.source, re.M)]

    def section(self, line):
        return max((number for start, number in self.sections if start <= line), default=1)

    def uses(self):
        """The section and the name of each global that is used, as compiled: no local of the same
        name hides one, and annotations are texts."""
        found, codes = set(), [compile(self.source, PROGRAM, "exec")]
        for code in codes:
            codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
            lines, line = dict(dis.findlinestarts(code)), code.co_firstlineno
            for instruction in dis.get_instructions(code):
                line = lines.get(instruction.offset) or line
                if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                    found.add((self.section(line), instruction.argval))
        return found

    def test_a_section_uses_only_what_stands_above_it(self):
        self.assertEqual([number for _, number in self.sections], list(range(2, 13)))
        defined = {}
        for statement in self.tree.body:
            names = [node.id for node in ast.walk(statement)
                     if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                names = [statement.name]
            defined.update(dict.fromkeys(names, self.section(statement.lineno)))
        self.assertEqual([(section, name) for section, name in self.uses()
                          if defined.get(name, 0) > section], [])

    def test_only_the_event_loop_and_the_tools_do_io(self):
        self.assertEqual([(section, name) for section, name in self.uses()
                          if name in self.IO and section in range(3, 11)
                          or name == "sqlite3" and section != 6], [])

    def test_standard_library_only(self):
        known = getattr(sys, "stdlib_module_names", None)           # Python 3.10
        imported = {(getattr(node, "module", None) or node.names[0].name).partition(".")[0]
                    for node in ast.walk(self.tree)
                    if isinstance(node, (ast.Import, ast.ImportFrom))}
        self.assertEqual(imported - (known or imported), set())

    def test_a_game_has_one_word_and_a_title(self):
        """So that `[games]` cannot have another game by it, and every list finds it."""
        for room in ms.GAMES:
            self.assertEqual(ms.GAME_TITLES[room.game], room.title)
            self.assertRaises(ValueError, ms.read_own_game_id, room.game)

    def test_the_readme_names_what_rooms_have(self):
        _, _, table = text_of("README.md").partition("| of the room |")
        table, _, _ = table.partition("\n\n")
        rows = [row.split("|")[1] for row in table.splitlines()[2:]]
        names = re.findall(r"`(\w+)`", " ".join(rows))
        self.assertGreater(len(names), 30)
        for name in names:
            self.assertTrue(any(hasattr(room, name) for room in ms.GAMES), name)

    # Sections and texts, or beginnings of sentences, that may name a game
    MAY_NAME_A_GAME = (
        (3, "TCP ports of the page and the lists. Iceball looks"),      # help
        (3, "Send news of these games only, by their ids"),
        (3, "aio.text_greeting_after"), (3, "aio.dialects"),            # former settings
        (6, "luanti_announcement"), (6, "ddnet_registration"),      # of the first form of the file
        (9, "%s; expected one such as"),                # an example for who wants to announce
        (12, "iceball.port"), (12, "[http] ports: Iceball's players"),  # --check: its second port
        (12, "iceball"),                                # the game of the webhook's test message
        (12, " is not a Hyperbol master"))              # `export` is for Hyperbol alone

    def test_what_knows_a_game_stands_in_its_room(self):
        """A game is named by its room, in section 10 and in the help of the commands, and nowhere
        else but in comments and docstrings."""
        heads = [(self.source[:match.start()].count("\n") + 1, match.group(1))
                 for match in re.finditer(r"^# (?:---|\d+) +(.*?)(?: -+)?$", self.source, re.M)]
        rooms = {room.game: room.title.replace(" family", "") for room in ms.GAMES}
        game = re.compile("(?<![a-z])(%s)(?![a-z])" % "|".join(rooms), re.I)
        docstrings = {id(node.body[0].value) for node in ast.walk(self.tree)
                      if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
                      and isinstance(node.body[0], ast.Expr)}
        misplaced = []
        for node in ast.walk(self.tree):
            words = [getattr(node, name) for name in ("name", "id", "attr", "arg", "value")
                     if isinstance(getattr(node, name, None), (str, bytes))]
            if id(node) in docstrings or not words or not hasattr(node, "lineno"):
                continue
            text = words[0] if isinstance(words[0], str) else words[0].decode("latin-1")
            section = self.section(node.lineno)
            is_help = section == 12 and (" " in text or "|" in text)
            is_excepted = any(
                section == where and (text == begin or " " in begin and text.startswith(begin))
                for where, begin in self.MAY_NAME_A_GAME)
            head = [head for line, head in heads if line <= node.lineno][-1:]
            for name in game.findall(text):
                is_in_room = head and rooms[name.lower()] in head[0]
                if not (section == 10 or is_help or is_excepted or is_in_room):
                    misplaced.append((node.lineno, text))
        self.assertEqual(misplaced, [])

    def test_the_ini_is_what_the_program_prints(self):
        self.assertEqual(text_of("masterserver.ini"), ms.config_text())

    @unittest.skipIf(WITHOUT_GITHUB, "no .github here")
    def test_the_workflow_runs_the_command_of_the_readme(self):
        workflow = text_of(os.path.join(".github", "workflows", "tests.yml"))
        self.assertEqual(re.findall(r"\brun: (.*)", workflow),
                         re.findall(r"these tests -->\n```sh\n(.*)\n```", text_of("README.md")))

    def test_lines_fit(self):
        for name in "masterserver.py test_masterserver.py masterserver.ini README.md".split():
            for number, line in enumerate(text_of(name).splitlines(), 1):
                aside = name == "README.md" and re.match(r"\||.*(\]\(|://)", line)
                self.assertTrue(aside or len(line) <= 100, "%s:%d" % (name, number))


class ReadmeTest(unittest.TestCase):
    """README.md is held to the program: its tables, and every example that can run here.

    A comment before a fenced block says how it is treated: `runs`, `runs: until stopped`,
    `runs: the server`, `runs: these tests`, `systemd-analyze verify`,
    `does not run in the tests: WHY`."""

    maxDiff = None
    TREATMENT = (r"runs(: (until stopped|the server|these tests))?|systemd-analyze verify|"
                 r"does not run in the tests: .+")

    def setUp(self):
        self.text = text_of("README.md")
        self.blocks = re.findall(r"(?:^<!-- ([^\n]*) -->\n)?^```(\w+)\n(.*?)^```\n", self.text,
                                 re.S | re.M)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def write(self, text, *names):
        """The path of a new file."""
        path = os.path.join(self.folder, *names)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def marked(self, comment):
        """What stands between `<!-- comment -->` and the comment that ends it."""
        return self.text.split("<!-- %s -->\n" % comment)[1].partition("<!-- /")[0]

    def table(self, comment):
        """The rows of a table. The first cell may have several names, each with a row here."""
        rows = []
        for line in self.marked(comment).splitlines()[2:]:
            _, names, *cells, _ = line.split("|")
            for name in re.findall(r"`(.*?)`", names):
                rows.append([name, *cells])
        return rows

    def test_settings(self):
        """It says which ones need a restart, and speaks of none that does not exist."""
        self.assertEqual(re.findall(r"`(.*?)`", self.marked("at a restart")),
                         [setting.name for setting in ms.SETTINGS.values() if not setting.live])
        for section, key in re.findall(r"`\[(\w+)\] (\w+)", self.text):
            self.assertIn(section + "." + key, ms.SETTINGS)

    def test_routes(self):
        routes = {}
        for path, what in self.table("routes"):
            takes_post = what.startswith(" POST: ")
            routes[path] = "POST, OPTIONS" if takes_post else "GET, HEAD, OPTIONS"
        web = ms.Web(with_rooms(make_core()))
        self.assertEqual(routes, {path: route.methods for path, route in web.routes.items()})

    def test_fields(self):
        """Those of real answers are in the tables, and nothing else."""
        with master(http__ports="0", games__mygame="My Game",
                    server__database=os.path.join(self.folder, "db")) as server:
            def answer(path, **request):
                return json.loads(fetch(port_of(server, "http"), path, **request)[2])
            self.assertEqual(answer("/announce", method="POST", body=b"game=mygame&port=27500"),
                             {"listed": True, "ttl": 120})
            for path, found in (
                    ("/servers.json", answer("/servers.json")["servers"][0]),
                    ("/history.json", answer("/history.json?game=mygame"))):
                self.assertEqual([field for field, *_ in self.table("fields of " + path)],
                                 list(found))
            example, = re.findall(r"`(\{\"status.*?\})`", self.text)
            self.assertEqual(list(answer("/healthz")), list(json.loads(example)))

    def test_links_lead_somewhere(self):
        titles = {"#" + re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
                  for title in re.findall(r"^#+ (.*)$", self.text, re.M)}
        for link in re.findall(r"\]\(([^)]*)\)", self.text):
            self.assertTrue(link in titles or WITHOUT_GITHUB
                            or os.path.exists(os.path.join(HERE, link)), link)

    def test_every_block_is_accounted_for(self):
        for how, language, block in self.blocks:
            if language == "json":
                json.loads(block)
            elif language == "ini":                     # it may be added at the end
                ms.Settings.load(self.write(ms.config_text() + block, "example.ini"))
            elif language in ("sh", "python", "systemd"):
                self.assertIsNotNone(re.fullmatch(self.TREATMENT, how), (how, block))
            else:
                self.assertIn(language, "text nginx dockerfile powershell".split())
        self.assertIn(("runs: these tests", "sh", "python3 test_masterserver.py\n"), self.blocks)

    @unittest.skipUnless(shutil.which("systemd-analyze") and os.path.exists("/usr/bin/python3"),
                         "no systemd here")
    def test_unit(self):
        unit, = (block for how, _, block in self.blocks if how == "systemd-analyze verify")
        done = subprocess.run(
            ["systemd-analyze", "verify", self.write(unit, "masterserver.service")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
        self.assertEqual((done.returncode, done.stdout), (0, b""))

    @unittest.skipIf(ms.WINDOWS or not shutil.which("curl"), "no curl or no shell here")
    def test_commands(self):
        """In a folder with a copy of the program and an ini, on the default ports; the first
        command is the server that the others ask."""
        folder = os.path.join(self.folder, "a new folder, ä")
        os.mkdir(folder)
        shutil.copy(PROGRAM, folder)
        games, = (block for _, _, block in self.blocks if block.startswith("[games]"))
        self.write("[server]\nbind = 127.0.0.1\n" + games, folder, "masterserver.ini")
        os.chmod(self.write('#!/bin/sh\nexec "%s" "$@"\n' % sys.executable, "python3"), 0o755)
        place = {"cwd": folder, "stdin": subprocess.DEVNULL, "env": dict(
            os.environ, PATH=self.folder + os.pathsep + os.environ["PATH"],
            PYTHONDONTWRITEBYTECODE="1")}
        log = self.write("", "log")
        running = []

        def start(kind):
            for how, _, block in self.blocks:
                if how == kind:
                    with open(log, "ab") as file:
                        running.append(subprocess.Popen(
                            ["sh", "-ec", "exec " + block], stdout=file, stderr=file, **place))

        def stop():
            for process in running:
                process.terminate()
            return {process.wait(SOON_S) for process in running}

        def names():
            return sorted(server["name"] for server in json.loads(
                fetch(27790, "/servers.json")[2])["servers"])

        self.addCleanup(stop)
        start("runs: the server")
        eventually(lambda: "Players and browsers" in text_of(log) or running[0].poll())
        if running[0].poll():
            self.assertIn("cannot listen on", text_of(log))
            self.skipTest("the default ports are taken: " + text_of(log))
        start("runs: until stopped")
        eventually(lambda: names() == ["My sanctuary", "My server"])
        for how, language, block in self.blocks:
            if how != "runs":
                continue
            shell = [sys.executable, "-W", "error", "-c"] if language == "python" else ["sh", "-ec"]
            done = subprocess.run([*shell, block], stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, timeout=60, **place)
            output = done.stdout.decode("utf-8")
            self.assertEqual(done.returncode, 0, (block, done.stderr))
            self.assertNotRegex(output, r'(?m)^[45][0-9][0-9] [A-Z]|"listed":false,"reason"')
            if "My own server" in block:
                self.assertEqual(re.findall(r"^The answer is `(\{.*\})`", self.text, re.M),
                                 [output])
        self.assertEqual(stop(), {0}, text_of(log))
        self.assertNotIn("Traceback", text_of(log))


# ================================================================================================
# Benchmarks: python3 test_masterserver.py --bench [NAME ...] [--json]
#
# Ratios against yardsticks that run in the same minutes on the same machine, round by round in
# turn; medians count. The server under test, the yardsticks and the loads are processes of their
# own, on loopback. Every load is a closed loop with a bounded window, so nothing piles up. Two
# ratios are printed: of rates, which judges, and of processor time per operation of the serving
# process, both so that more is better. Each round is compared with the yardstick's right after
# it, as a shared machine is twice as fast in one minute as in the next; the median is that of the
# rounds' ratios. Where a serving process was not busy all the time, the load or the machine was
# the limit: then the second ratio says more.
# ================================================================================================

ROUNDS = 9                  # a median of nine forgives four disturbed rounds
ROUND_S = 0.6               # long beside a scheduler tick, short beside a machine's change of mind
PATIENCE_S = 45             # a part that has no new task for so long ends by itself
WINDOW = 192                # datagrams under way: Linux's default receive buffer holds 277
BATCH = 32                  # datagrams handed over in one system call
# Datagrams that a flood goes through before it begins again, at least. What it reads displaces what
# the server has in the cache that they share, so a yardstick with few servers reads as much
PREPARED = 100000
NAP_S = 0.0002              # between two looks of a load; a server needs far longer for its window
LOST_S = 1                  # without an answer: a machine that pauses has lost what is under way
CONNECTIONS = 16            # that fetch lists at the same time
CHANGE_S = 0.05             # between two changes of a player count while lists are fetched
UDP_SEGMENT = 103           # linux/udp.h: the kernel cuts one send into datagrams of this size
SEGMENTS = [(socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("=H", 86))]
NGINX = shutil.which("nginx", path=os.environ.get("PATH", "") + os.pathsep + "/usr/sbin")


def numbered_announcement(number, addresses, players=7):
    """The 86 bytes in which server `number` announces itself, of version 0.2.1-37; it speaks from
    127.0.1.(1 + number % addresses)."""
    return struct.pack(
        "<4sHIHHH30s10s30s", b"1CEB", 2, 8421413, 1024 + number // addresses, players, 32,
        b"Server %d of the community" % number, b"ctf", b"classic(512,512)")


def source_sockets(port, addresses, count):
    """`count` non-blocking sockets on 127.0.1.1 and the addresses after it, connected to the
    server."""
    sockets = []
    for number in range(count):
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)   # a whole window of answers
        sock.bind(("127.0.1.%d" % (1 + number % addresses), 0))
        sock.connect(("127.0.0.1", port))
        sock.setblocking(False)
        sockets.append(sock)
    return sockets


# --- Loads: called with their arguments, they return what runs a round and counts its operations

def load_flood(port, servers, addresses):
    """Announcements in a fixed random order, an operation is one answer. For so many seconds; 0:
    each server once, in another order, as the one that servers are known in would be kinder to the
    processor's cache than life is."""
    sockets = source_sockets(port, addresses, addresses)

    def batches_of(order):
        numbers = random.Random(order).sample(range(servers), servers)
        queues = []
        for address, sock in enumerate(sockets):
            own = [numbered_announcement(number, addresses) for number in numbers
                   if number % addresses == address] * -(-PREPARED // servers)
            queues.append([(sock, b"".join(own[at:at + BATCH]))
                           for at in range(0, len(own), BATCH)])
        return itertools.cycle([batch for row in itertools.zip_longest(*queues)
                                for batch in row if batch])

    first, then = batches_of(7), batches_of(8)
    answer = bytearray(2048)

    def flood(seconds):
        batches = then if seconds else first
        sent = answered = lost = 0
        progress = time.perf_counter()
        until = progress + seconds
        while True:
            now = time.perf_counter()
            if now < until or not seconds and sent < servers:
                while sent - answered <= WINDOW - BATCH:
                    sock, data = next(batches)
                    sock.sendmsg([data], SEGMENTS)
                    sent += len(data) // 86
            elif sent == answered:
                return answered
            before = answered
            for sock in sockets:
                receive = sock.recv_into
                with contextlib.suppress(BlockingIOError):
                    while True:
                        receive(answer)
                        answered += 1
            if answered > before:
                assert answer[:4] == b"MSOK", answer[:16]
                progress = now
            elif now - progress > LOST_S:
                lost += sent - answered
                sent = answered
                assert lost <= WINDOW, "%d answers are missing" % lost
            time.sleep(NAP_S)

    return flood


def load_handshake(port, addresses):
    """Announcement, MSOK, HSHK from 64 sources at a time, each round new servers. For so many
    servers."""
    epoll = select.epoll()
    upcoming = [itertools.count(address, addresses) for address in range(addresses)]
    sockets = {sock.fileno(): (sock, upcoming[slot % addresses])
               for slot, sock in enumerate(source_sockets(port, addresses, 64))}
    for fd in sockets:
        epoll.register(fd, select.EPOLLIN)

    def handshake(count):
        answered = 0
        begun = min(count, len(sockets))
        for sock, numbers in list(sockets.values())[:begun]:
            sock.send(numbered_announcement(next(numbers), addresses))
        while answered < count:
            for fd, _ in epoll.poll(0):
                sock, numbers = sockets[fd]
                answer = sock.recv(2048)
                assert answer[:4] == b"MSOK" and len(answer) <= 86, answer
                answered += 1
                if begun < count:           # two datagrams; the last may be the shorter one
                    begun += 1
                    sock.sendmsg([numbered_announcement(next(numbers), addresses), b"HSHK",
                                  answer[4:]], SEGMENTS)
                else:
                    sock.send(b"HSHK" + answer[4:])
            time.sleep(NAP_S)
        return count

    return handshake


def load_quake3(port, question="", packets=1):
    """64 game servers that send a heartbeat and answer getinfo, again and again; with a `question`
    as many clients, each answered with so many packets. For so many heartbeats or questions."""
    epoll, told, asked = select.epoll(), info(b""), question.encode("latin-1") or HEARTBEAT
    sockets = {sock.fileno(): sock for sock in source_sockets(port, 4, 64)}
    for fd in sockets:
        epoll.register(fd, select.EPOLLIN)

    def exchanges(count):
        begun, answered, missing = len(sockets), 0, dict.fromkeys(sockets, packets)
        for sock in sockets.values():
            sock.send(asked)
        while answered < count:
            for fd, _ in epoll.poll(0):
                sock = sockets[fd]
                answer = sock.recv(2048)
                missing[fd] -= 1
                if missing[fd]:
                    continue
                answered += 1
                if not question:
                    sock.send(told + answer[12:])
                missing[fd] = packets
                if begun < count:
                    begun += 1
                    sock.send(asked)
            time.sleep(NAP_S)
        return count

    return exchanges


def load_lists(port, connection, changes=None, path="/master.json", accepts="identity",
               question=""):
    """Lists, 16 at a time, an operation is one list: of Hyperbol, or with a `connection` of HTTP,
    `keep-alive` or `close`, or with another `question`. `changes`: the port where a server
    announces other players now and then."""
    request = (question or "GET %s HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\nAccept-Encoding: "
               "%s\r\nConnection: %s\r\n\r\n" % (path, accepts, connection)).encode()
    length_field = re.compile(rb"\nContent-Length: (\d+)\r\n", re.IGNORECASE)
    buffer = bytearray(1 << 20)
    table = {}          # descriptor: [socket, bytes read, bytes in all if they tell the end]
    epoll = select.epoll()
    players = itertools.cycle(range(32))
    changing = source_sockets(changes, 1, 1) if changes else []

    def connect():
        sock = socket.socket()      # blocking, but without a timeout, which costs a poll() a call
        sock.connect(("127.0.0.1", port))
        table[sock.fileno()] = [sock, 0, None]
        epoll.register(sock, select.EPOLLIN)
        if connection:
            sock.send(request)

    def lists(seconds):
        done, due = 0, 0.0
        until = time.perf_counter() + seconds
        for _ in range(CONNECTIONS):
            connect()
        while table:
            now = time.perf_counter()
            if now >= due:
                due = now + CHANGE_S
                for sock in changing:
                    sock.send(numbered_announcement(0, 1, next(players)))
            for fd, _ in epoll.poll():
                entry = table[fd]
                sock, read, whole = entry
                size = sock.recv_into(buffer)
                if not read and not connection:
                    assert size == 12, buffer[:size]
                    sock.send(buffer[4:8] + b"\xff\0\0\0")      # the key; unofficial servers too
                elif not read and connection == "keep-alive":
                    entry[2] = whole = (buffer.index(b"\r\n\r\n", 0, size) + 4
                                        + int(length_field.search(buffer, 0, size)[1]))
                entry[1] = read = read + size
                if size and read != whole:
                    continue
                # 200 servers fill 2,400 bytes
                assert read > 2000 and (size or connection != "keep-alive"), buffer[:200]
                done += 1
                if size and now < until:
                    entry[1:] = 0, None
                    sock.send(request)
                    continue
                sock.close()
                del table[fd]
                if now < until:
                    connect()
        return done

    return lists


def load_changes(port, servers, addresses):
    """`servers` listed servers that announce other players each time and return each cookie, 2,000
    a second. For so many seconds; tells the delay in ms that 99 % of the answers have at most."""
    sockets = source_sockets(port, addresses, addresses)
    for sock in sockets:
        sock.setblocking(True)

    def changes(seconds):
        delays, began = [], time.perf_counter()
        while time.perf_counter() < began + seconds:
            number = len(delays) % servers
            sock = sockets[number % addresses]
            sent = time.perf_counter()
            sock.send(numbered_announcement(number, addresses, len(delays) % 33))
            answer = sock.recv(2048)
            delays.append(time.perf_counter() - sent)
            assert answer[:4] == b"MSOK", answer
            sock.send(b"HSHK" + answer[4:])
            time.sleep(max(0.0, began + len(delays) / 2000 - time.perf_counter()))
        delays.sort()
        return {"answers": len(delays), "p99": 1000 * delays[len(delays) * 99 // 100],
                "worst": 1000 * delays[-1]}

    return changes


def load_pages(port, paths):
    """Every page and list, compressed, each on a connection of its own, all the time."""
    def pages(seconds):
        until = time.perf_counter() + seconds

        def fetch_again(path):
            connection, done = http.client.HTTPConnection("127.0.0.1", port), 0
            while time.perf_counter() < until:
                connection.request("GET", path, headers={"Accept-Encoding": "gzip"})
                response = connection.getresponse()
                assert response.read() and response.status == 200, response.status
                done += 1
            connection.close()
            return done

        with concurrent.futures.ThreadPoolExecutor(len(paths)) as pool:
            return sum(pool.map(fetch_again, paths))

    return pages


# --- Yardsticks and the other side's servers: they tell their port and serve until they are ended

def tell(**answer):
    print(json.dumps(answer), flush=True)


def serve_echo(packets=("4d534f4b00000000",)):
    """The barest loop: drain a non-blocking UDP socket, answer each datagram with 8 constant
    bytes, or with these packets."""
    answers = list(map(hexa, packets))
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    sock.setblocking(False)
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    tell(port=sock.getsockname()[1])
    while True:
        poll.poll()
        try:
            while True:
                _, peer = sock.recvfrom(2048)
                for answer in answers:
                    sock.sendto(answer, peer)
        except BlockingIOError:
            pass


def serve_list(size):
    """The barest selectors loop: accept, greet with 12 bytes, read 8, send `size` constant bytes,
    close."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    listener.setblocking(False)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    tell(port=listener.getsockname()[1])
    body = bytes(size)
    while True:
        for key, _ in selector.select():
            sock = key.fileobj
            if sock is listener:
                sock, _ = listener.accept()
                sock.setblocking(False)
                sock.send(b"HBSL\1\2\3\4\0\0\0\0")
                selector.register(sock, selectors.EVENT_READ)
            else:
                if len(sock.recv(8)) == 8:
                    sock.send(body)
                selector.unregister(sock)
                sock.close()


class Files(http.server.SimpleHTTPRequestHandler):
    """As the standard library has it, but connections are kept alive, and it keeps no log."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True      # or each answer would wait 40 ms for an acknowledgement

    def log_message(self, *arguments):
        pass


def serve_files(directory):
    http.server.ThreadingHTTPServer.request_queue_size = CONNECTIONS    # with 5 others wait 1 s
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Files, directory=directory))
    tell(port=server.server_port)
    server.serve_forever()


def serve_nginx(directory):
    """One nginx worker in place of this process, with `directory` as its root and for its files."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    paths = "".join("%s_temp_path %s;" % (name, directory)
                    for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    with open(os.path.join(directory, "nginx.conf"), "w") as file:
        file.write("daemon off; master_process off; worker_processes 1; pid %s/pid;"
                   " error_log stderr crit; events {} http { access_log off; sendfile on;"
                   " tcp_nopush on; keepalive_requests 1000000000; %s"
                   " server { listen 127.0.0.1:%d; root %s; } }"
                   % (directory, paths, port, directory))
    tell(port=port)
    os.execv(NGINX, [NGINX, "-p", directory, "-c", file.name, "-e", "stderr"])


def serve_games(count):
    """`count` Hyperbol game servers, each on a port of its own, that answer the query."""
    selector = selectors.DefaultSelector()
    for _ in range(count):
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind(("127.0.0.1", 0))
        selector.register(sock, selectors.EVENT_READ)
    tell(ports=[key.fileobj.getsockname()[1] for key in selector.get_map().values()])
    while True:
        for key, _ in selector.select():
            query, peer = key.fileobj.recvfrom(2048)
            key.fileobj.sendto(hyperbol_reply(o1=query[1:5]), peer)


def serve_cube2(port, count):
    """`count` Red Eclipse game servers, each on a port of its own, that announce themselves."""
    selector = selectors.DefaultSelector()
    connections = []
    for _ in range(count):
        game = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        game.bind(("127.0.0.1", 0))
        selector.register(game, selectors.EVENT_READ)
        connections.append(socket.create_connection(("127.0.0.1", port)))
        connections[-1].sendall(b'server %d * 160 "" 1 ""\n' % (game.getsockname()[1] - 1))
    tell()
    while True:
        for key, _ in selector.select():
            question, peer = key.fileobj.recvfrom(2048)
            key.fileobj.sendto(question + RED_ECLIPSE_NAMED, peer)


def part_main(name, arguments):
    """What a part does: serve for ever, or run a round for every line that comes in."""
    signal.alarm(4 * PATIENCE_S)        # whoever started this may be gone without a word
    load = globals()[name](**json.loads(arguments))
    tell()
    for line in sys.stdin:
        signal.alarm(PATIENCE_S)
        began, cpu = time.perf_counter(), time.process_time()
        count = load(json.loads(line))
        tell(count=count, seconds=time.perf_counter() - began, cpu=time.process_time() - cpu)


# --- The bench: processes, rounds and rows

class Part(subprocess.Popen):
    """This script again as a load or a yardstick; `said` is the first thing it said."""

    def __init__(self, name, **arguments):
        super().__init__(
            [sys.executable, __file__, "--bench-part", name, json.dumps(arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, universal_newlines=True)
        self.said = self.hear()

    def hear(self):
        line = self.stdout.readline()
        if not line:
            raise RuntimeError("%s ended early" % self.args[-2])
        return json.loads(line)

    def begin(self, amount):
        print(amount, file=self.stdin, flush=True)

    def run(self, amount):
        self.begin(amount)
        return self.hear()

    def __exit__(self, *exception):
        self.terminate()
        super().__exit__(*exception)


def processor_seconds(pid):
    """Processor time of all the threads of a process, ended ones too, to the nanosecond; the clock
    is CPUCLOCK_SCHED of clock_getcpuclockid(3), which Linux alone has."""
    return time.clock_gettime(~pid << 3 | 2)


def resident_bytes(server):
    with open("/proc/%d/statm" % server.process.pid) as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def listening(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True


def await_listed(server, count, path="/master.json"):
    """The list, when every announced server is in it: what was measured was real."""
    def whole_list():
        body = fetch(server.port("http"), path)[2]
        return body if body.count(b'"address"') == count else None
    return eventually(whole_list, PATIENCE_S)


# What is compared: whose processor time, under which load, how much load a round, how many
# answers make an operation
Side = collections.namedtuple("Side", "pid load amount answers", defaults=(ROUND_S, 1))


def race(*sides, rounds=ROUNDS):
    """Every side in turn, round by round. Medians for each: operations a second, µs an operation,
    share of a core."""
    table = [[] for _ in sides]
    for _ in range(rounds):
        for side, results in zip(sides, table):
            before = processor_seconds(side.pid)
            said = side.load.run(side.amount)
            cpu = processor_seconds(side.pid) - before
            count, seconds = said["count"] / side.answers, said["seconds"]
            results.append({"rate": count / seconds, "cpu": cpu / count * 1e6,
                            "busy": cpu / seconds, "load_busy": said["cpu"] / seconds})
    return [dict({key: statistics.median(result[key] for result in results) for key in results[0]},
                 rounds=results) for results in table]


def table_row(judge="", value=None, bar=None, yardstick="-", note="", **more):
    """`value` is what the bar judges, None where nothing is asked: a rate has it at least, all else
    at most."""
    passed = None if bar is None else value >= bar if judge == "rate" else value <= bar
    return dict(more, judge=judge, value=value, bar=bar, yardstick=yardstick, note=note,
                passed=passed)


def compared(yardstick, bar, ours, theirs, judge="rate"):
    """The row for two results of `race`: medians of the rounds' ratios."""
    def ratio(key):
        return statistics.median(mine[key] / other[key]
                                 for mine, other in zip(ours["rounds"], theirs["rounds"]))
    return table_row(judge, ratio("rate" if judge == "rate" else "cpu"), bar, yardstick, ours=ours,
                     theirs=theirs, ratio=ratio("rate"), cpu_ratio=1 / ratio("cpu"))


class Bench(contextlib.ExitStack):
    """The processes of one benchmark, all ended with it."""

    def part(self, name, **arguments):
        return self.enter_context(Part(name, **arguments))

    def server(self, servers=0, addresses=1, python=sys.executable, **settings):
        """The program, with so many servers listed."""
        settings = {"hyperbol__port": "0", "server__database": "", **settings}
        server = self.enter_context(RunningServer(start=[python, PROGRAM], **settings))
        if servers:
            self.handshakes(server, addresses).load.run(servers)
            await_listed(server, servers)
        return server

    def handshakes(self, server, addresses, amount=0):
        load = self.part("load_handshake", port=server.port("iceball"), addresses=addresses)
        return Side(server.process.pid, load, amount)

    def flood(self, pid, port, servers, addresses, once=True):
        """Who answers announcements; `once`: every server has been heard before the first round."""
        load = self.part("load_flood", port=port, servers=servers, addresses=addresses)
        if once:
            load.run(0)
        return Side(pid, load)

    def listed(self, servers, addresses, **more):
        """The program with so many servers listed, under their announcements."""
        server = self.server(servers, addresses, **more)
        return self.flood(server.process.pid, server.port("iceball"), servers, addresses)

    def echo(self, answers=1):
        echo = self.part("serve_echo")
        return self.flood(echo.pid, echo.said["port"], 10000, 4)._replace(answers=answers)

    def lists(self, pid, port, connection="", changes=None, **more):
        return Side(pid, self.part("load_lists", port=port, connection=connection, changes=changes,
                                   **more))


# --- The benchmarks; their numbers are the bars

def bench_announcements(bench, servers, addresses):
    yield compared("echo loop", 0.95, *race(bench.listed(servers, addresses), bench.echo()))


def bench_handshake(bench):
    server = bench.server()
    sides = bench.handshakes(server, 4, 5000), bench.echo(answers=2)
    yield compared("echo loop", 0.55, *race(*sides))
    await_listed(server, 5000 * ROUNDS)


def bench_quake3(bench):
    server = bench.server(quake3__port="0")
    load = bench.part("load_quake3", port=server.port("quake3"))
    yield compared("echo loop", 0.5, *race(Side(server.process.pid, load, 5000),
                                           bench.echo(answers=2)))
    await_listed(server, 64, "/servers.json")


def bench_quake3_list(bench):
    """The yardstick sends the same packets. Nobody answers the one poll that there is."""
    server, question = bench.server(quake3__port="0", poll__interval="3600"), OUT + b"getservers 71"
    port, packets = server.port("quake3"), []
    with contextlib.ExitStack() as stack:
        for game in source_sockets(port, 50, 1000):
            stack.enter_context(game).setblocking(True)
            game.send(HEARTBEAT)
            game.send(info(game.recv(100)[12:], clients=b"3"))
    await_listed(server, 1000, "/servers.json")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.sendto(question, ("127.0.0.1", port))
        while not packets or not packets[-1].endswith(QUAKE3_EOT):
            packets.append(client.recv(2048))
    assert sum(map(len, packets)) == 7000 + 7 + len(QUAKE3_LIST_HEAD) * len(packets)
    bare = bench.part("serve_echo", packets=[packet.hex() for packet in packets])
    yield compared("same packets", 0.7, *race(*(
        Side(pid, bench.part("load_quake3", port=port, packets=len(packets),
                             question=question.decode("latin-1")), 5000)
        for pid, port in ((server.process.pid, port), (bare.pid, bare.said["port"])))))


def bench_spoofed(bench):
    server = bench.server()
    # More servers than are heard in 5 s
    spoofed = bench.flood(server.process.pid, server.port("iceball"), 400000, 8, once=False)
    yield compared("echo loop", 0.75, *race(spoofed, bench.echo()))
    await_listed(server, 0)


def bench_json(bench, connection, yardsticks):
    """Beside web servers that read the same bytes from a file."""
    server = bench.server(servers=200)
    directory = bench.enter_context(tempfile.TemporaryDirectory())
    with open(os.path.join(directory, "master.json"), "wb") as file:
        file.write(await_listed(server, 200))
    sides = [bench.lists(server.process.pid, server.port("http"), connection,
                         server.port("iceball"))]
    if not NGINX:
        yield table_row(note="nginx is not installed: left out")
        yardsticks = yardsticks[1:]
    for _, part, _ in yardsticks:
        files = bench.part(part, directory=directory)
        port = files.said["port"]
        eventually(lambda port=port: listening(port))
        sides.append(bench.lists(files.pid, port, connection))
    ours, *theirs = race(*sides)
    for (yardstick, _, bar), result in zip(yardsticks, theirs):
        yield compared(yardstick, bar, ours, result)


def bench_luanti(bench, accepts):
    """Beside nginx with the same bytes, as Luanti's client asks and as a script does."""
    directory = bench.enter_context(tempfile.TemporaryDirectory())
    path, wall = os.path.join(directory, "db"), time.time()
    chance, told, rows = random.Random(39), json.loads(LUANTI_STORED), []
    for number in range(1000):
        name = "%s's server %d" % (chance.choice(HOSTILE), number)
        mods = ["mod_%d" % chance.randrange(500) for _ in range(chance.randrange(20))]
        rows.append(ms.listed_row(ms.Server(
            "luanti", "127.0.%d.1" % (number % 100), 1024 + number, "127.0.0.1", 0.0, 1e6,
            room="luanti", **ms.luanti_attributes({
                **told, "name": ms.clean(name), "mods": told["mods"] + mods})), wall))
    database = ms.Database(path)
    database.save(rows, [])
    database.close()
    server = bench.server(server__database=path, poll__interval="3600")
    await_listed(server, 1000, "/list")
    with open(os.path.join(directory, "list"), "wb") as file:
        file.write(fetch(server.port("http"), "/list", "Accept-Encoding: " + accepts)[2])
    if not NGINX:
        yield table_row(note="nginx is not installed: left out")
        return
    nginx = bench.part("serve_nginx", directory=directory)
    eventually(lambda: listening(nginx.said["port"]))
    yield compared("nginx", 1.0, *race(*(
        bench.lists(pid, port, "keep-alive", path="/list", accepts=accepts) for pid, port in (
            (server.process.pid, server.port("http")), (nginx.pid, nginx.said["port"])))))


def bench_hyperbol(bench):
    games = bench.part("serve_games", count=200).said["ports"]
    server = bench.server(hyperbol__servers="\n".join("127.0.0.1:%d 1" % port for port in games))
    await_listed(server, 200, "/servers.json")
    bare = bench.part("serve_list", size=200 * 12)
    yield compared("selectors loop", 0.85, *race(
        bench.lists(server.process.pid, server.port("hyperbol")),
        bench.lists(bare.pid, bare.said["port"])))


def bench_cube2(bench):
    games = bench.part("serve_games", count=200).said["ports"]
    server = bench.server(redeclipse__port="0", hyperbol__servers="\n".join(
        "127.0.0.1:%d 1" % port for port in games))
    bench.part("serve_cube2", port=server.port("redeclipse"), count=200)
    await_listed(server, 400, "/servers.json")
    yield compared("Hyperbol's list", 0.8, *race(
        bench.lists(server.process.pid, server.port("redeclipse"), "close", question="update\n"),
        bench.lists(server.process.pid, server.port("hyperbol"))))


def bench_busy(bench):
    server = bench.server(10000, 4)
    pages = bench.part("load_pages", port=server.port("http"), paths=[
        "/", "/?game=iceball", "/master.json", "/servers.json", "/servers.xml?game=iceball"])
    changes = bench.part("load_changes", port=server.port("iceball"), servers=10000, addresses=4)
    pages.begin(10)
    said = changes.run(9)["count"]
    pages.hear()
    yield table_row("ms", said["p99"], 50,
                    note="%(answers)d answers, the worst after %(worst).0f ms" % said)


def bench_growth(bench):
    # What other tenants of the machine leave of the caches counts here, and changes from round to
    # round
    many = bench.listed(100000, 2, limits__servers="200000")
    yield compared("100 servers", 1.15, *race(many, bench.listed(100, 2), rounds=2 * ROUNDS - 1),
                   judge="cost")


def bench_memory(bench):
    server, count = bench.server(limits__servers="200000"), 100000
    empty = resident_bytes(server)
    bench.handshakes(server, 2).load.run(count)
    bench.flood(server.process.pid, server.port("iceball"), count, 2)
    listed = resident_bytes(server)
    await_listed(server, count)
    yield table_row("bytes", (listed - empty) / count, 1000, note=(
        "%.0f after GET /master.json" % ((resident_bytes(server) - empty) / count)))


def bench_start(bench):
    home = bench.enter_context(tempfile.TemporaryDirectory())
    saved, database, bytecode = (os.path.join(home, name) for name in ("saved", "db", "bytecode"))
    with Bench() as before:
        before.server(10000, 2, server__database=saved)
    source = text_of("masterserver.py")
    imports = "\n".join(
        ast.get_source_segment(source, part) for node in ast.parse(source).body
        for part in (node.body if isinstance(node, ast.Try) else [node])
        if isinstance(part, (ast.Import, ast.ImportFrom)))

    def start(servers, *program, bytecode=""):
        if servers:
            shutil.copyfile(saved, database)
        with mock.patch.dict(os.environ, PYTHONPYCACHEPREFIX=bytecode, PYTHONDONTWRITEBYTECODE=""):
            with RunningServer(start=[sys.executable, *program], server__database=database,
                               hyperbol__port="0") as server:
                await_listed(server, servers)
        for leftover in glob.glob(database + "*"):
            os.remove(leftover)
        return server.start_s

    def module():
        return start(0, "-m", "masterserver", bytecode=bytecode)

    module()                                        # Python keeps its compiled form from now on
    rounds = []
    for _ in range(7):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", imports], check=True)
        rounds.append([1000 * seconds for seconds in (
            time.perf_counter() - began, start(0, PROGRAM), start(10000, PROGRAM), module())])
    figures = ("%.0f ms for the imports, %.0f ms empty, %.0f ms with 10,000, %.0f ms as a module"
               % tuple(map(statistics.median, zip(*rounds))))
    asked = (("time", 2.3, "same imports"), ("time", 1.2, "same imports"),
             ("ms more", 150, "empty database"))
    values = zip(*((empty / bare, as_module / bare, restored - empty)
                   for bare, empty, restored, as_module in rounds))
    for (judge, bar, yardstick), found in zip(asked, values):
        yield table_row(judge, statistics.median(found), bar, yardstick, figures, rounds=rounds)


def bench_pypy(bench):
    pypy = shutil.which("pypy3")
    if not pypy or "PyPy" in sys.version:
        yield table_row(note="this is PyPy" if pypy else "pypy3 is not installed: left out")
        return
    yield compared("this Python", None, *race(*(
        bench.listed(10000, 4, python=python) for python in (pypy, sys.executable))))
    sides = [bench.handshakes(bench.server(python=python), 4, 4000)
             for python in (pypy, sys.executable)]
    sides[0].load.run(5000)             # what PyPy has to see before it compiles it
    yield compared("this, listing", None, *race(*sides))


# By name: what an operation is, and what measures it with which arguments
BENCHMARKS = {
    "announce-1": (
        "an announcement of the one listed server, answered", bench_announcements, 1, 1),
    "announce-10000": (
        "an announcement of one of 10,000 listed servers, answered", bench_announcements, 10000, 4),
    "handshake": (
        "first announcement, MSOK, HSHK, listed; the echo loop answers two datagrams",
        bench_handshake),
    "quake3": ("heartbeat, getinfo, infoResponse of 64 listed servers; the echo loop answers two "
               "datagrams", bench_quake3),
    "quake3-list": ("getservers with 1,000 servers", bench_quake3_list),
    "spoofed": (
        "a first announcement, answered with MSOK, of a server that never says more",
        bench_spoofed),
    "json-keepalive": (
        "GET /master.json: 200 servers, one changing; 16 connections kept alive",
        bench_json, "keep-alive",
        [("nginx", "serve_nginx", 1.0), ("ThreadingHTTPServer", "serve_files", 10)]),
    "json-connect": (
        "GET /master.json: 200 servers, one changing; a connection a request",
        bench_json, "close", [("nginx", "serve_nginx", 0.85)]),
    "luanti": ("GET /list: 1,000 Luanti servers, compressed as its client asks for; 16 connections "
               "kept alive", bench_luanti, "gzip"),
    "luanti-plain": ("the same, not compressed", bench_luanti, "identity"),
    "hyperbol": ("a Hyperbol list of 200 servers, a connection each", bench_hyperbol),
    "redeclipse": (
        "a Red Eclipse list of 200 servers, five times as long, a connection each", bench_cube2),
    "busy": (
        "the delay of 99 % of the announcements of 10,000 servers that change, while all pages and "
        "lists are fetched compressed all the time", bench_busy),
    "growth": (
        "an announcement with 100,000 servers listed; processor time against the same with 100",
        bench_growth),
    "memory": ("resident bytes for each of 100,000 listed servers", bench_memory),
    "start": (
        "from the process's start to ready: an empty database, started as a module, and 10,000 "
        "servers to restore", bench_start),
    "pypy": (
        "an announcement of one of 10,000 listed servers, answered by the program on PyPy; and a "
        "server listed by it", bench_pypy),
}
COLUMNS = "{:14} {:>9} {:>9} {:19} {:>6} {:>6}  {:14} {:8} {:>15} {:>11}  {}"
TITLES_OF_COLUMNS = ("name", "ours/s", "theirs/s", "yardstick", "ratio", "cpu", "judged", "bar",
                     "cpu µs/op", "busy cores", "")


def table_line(name, row):
    def figures(form, *numbers):
        return " / ".join("-" if number is None else form % number for number in numbers)

    ours, theirs, value = row.get("ours", {}), row.get("theirs", {}), row["value"]
    return COLUMNS.format(
        name, figures("%.0f", ours.get("rate")), figures("%.0f", theirs.get("rate")),
        row["yardstick"], figures("%.2f", row.get("ratio")), figures("%.2f", row.get("cpu_ratio")),
        figures("%.0f" if value and value >= 50 else "%.2f", value) + " " + row["judge"],
        figures("≥ %g" if row["judge"] == "rate" else "≤ %g", row["bar"]),
        figures("%.1f", ours.get("cpu"), theirs.get("cpu")),
        figures("%.2f", ours.get("busy"), theirs.get("busy")),
        {True: "pass", False: "MISS", None: "-"}[row["passed"]] + " " + row["note"])


def bench_main(*words):
    """`--bench [NAME ...] [--json]`: prints the table, or all that was measured; status 1 if a
    bar was missed."""
    names = [word for word in words if word != "--json"] or list(BENCHMARKS)
    unknown = ", ".join(sorted({*names} - {*BENCHMARKS}))
    if unknown:
        sys.exit("no benchmark %s; there are %s" % (unknown, ", ".join(BENCHMARKS)))
    machine = "%s %s, %s %s, %d cores, %s" % (
        platform.python_implementation(), platform.python_version(), platform.system(),
        platform.machine(), os.cpu_count(), time.strftime("%Y-%m-%d"))
    as_json, rows = "--json" in words, []
    with contextlib.redirect_stdout(io.StringIO() if as_json else sys.stdout):
        print(machine, COLUMNS.format(*TITLES_OF_COLUMNS), sep="\n", flush=True)
        for name in names:
            what, function, *arguments = BENCHMARKS[name]
            found = []
            try:
                with Bench() as bench:
                    found.extend(function(bench, *arguments))
            except Exception as error:          # elsewhere no epoll, 127.0.1.1 or /proc
                found.append(dict(table_row(note=repr(error)), passed=False))
            for row in found:
                print(table_line(name, row), flush=True)
                rows.append(dict(row, name=name, what=what))
    if as_json:
        print(json.dumps({"machine": machine, "rows": rows}, indent=1))
    return int(any(row["passed"] is False for row in rows))


# --- The runner: two processes

class Told(str):
    """The name of a test that the other process ran."""

    def shortDescription(self):
        return None


class InParallel(unittest.TestSuite):
    """Every test of this file, for one report: this process takes the classes from the first on, a
    second one from the last on, a third from the middle on, until none is left. Many tests wait, so
    that three processes fit on two cores. Then what measures time runs alone."""

    def run(self, result, debug=False):
        flags = ["-W" + option for option in sys.warnoptions or ["default"]]
        flags += ["-X", "dev"] * sys.flags.dev_mode
        others = {}
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            for start in SHARES:
                others[start] = stack.enter_context(subprocess.Popen(
                    [sys.executable, *flags, __file__, "--share", folder, start]))
            run_share(folder, all_cases(), result)
            for start, other in others.items():
                other.wait()
                self.add_share(result, start, other.returncode, os.path.join(folder, start))
        for case in all_cases():
            suite_of(case, True)(result)
        return result

    @staticmethod
    def add_share(result, start, status, path):
        """Add what another process has told to the report."""
        told = {"errors": [("the process that begins with the %s" % start,
                            "It ended with status %d, and told nothing." % status)]}
        with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
            told = json.load(file)
        result.testsRun += told.pop("run", 0)
        for outcome, tests in told.items():
            getattr(result, outcome).extend((Told(name), text) for name, text in tests)


def all_cases():
    return [case for case in globals().values()
            if isinstance(case, type) and issubclass(case, unittest.TestCase)]


def suite_of(case, alone):
    names = unittest.defaultTestLoader.getTestCaseNames(case)
    return unittest.TestSuite(case(name) for name in names
                              if hasattr(getattr(case, name), "alone") == alone)


def run_share(folder, cases, result):
    """Those classes that no process has begun; each that has leaves a file in the folder."""
    for case in cases:
        with contextlib.suppress(FileExistsError):
            open(os.path.join(folder, case.__name__), "x").close()
            suite_of(case, False)(result)


# Where the other processes begin
SHARES = {"last": lambda cases: cases[::-1],
          "middle": lambda cases: cases[len(cases) // 2:] + cases[:len(cases) // 2]}


def share_main(folder, start):
    result = unittest.TextTestResult(sys.stderr, False, 1)
    run_share(folder, SHARES[start](all_cases()), result)
    told = {outcome: [(str(test), text) for test, text in getattr(result, outcome)]
            for outcome in ("errors", "failures", "skipped")}
    with open(os.path.join(folder, start), "w", encoding="utf-8") as file:
        json.dump(dict(told, run=result.testsRun), file)


MODES = {"--bench": bench_main, "--bench-part": part_main, "--share": share_main}

if __name__ == "__main__":
    mode, *words = sys.argv[1:] or [""]
    if mode in MODES:
        sys.exit(MODES[mode](*words))
    if mode:
        unittest.main()
    runner = unittest.TextTestRunner(warnings=None if sys.warnoptions else "default")
    sys.exit(not runner.run(InParallel()).wasSuccessful())
