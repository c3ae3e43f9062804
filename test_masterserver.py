"""Tests of masterserver.py, in the program's order: python3 test_masterserver.py

Golden packets come from the protocol documents and from captures of deployed programs, never from
the program's own encoders. Protocol time is a number that the test moves; only the scenarios use
real sockets, on loopback and free ports.
"""
from __future__ import annotations

import ast
import collections
import contextlib
import ctypes
import dis
import errno
import glob
import functools
import gzip
import html.parser
import http.client
import http.server
import importlib.util
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
import shutil
import signal
import socket
import sqlite3
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
import xml.dom.minidom
import zlib
from types import SimpleNamespace
from unittest import mock
from urllib.parse import parse_qs, urlsplit
from typing import (Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple,
                    Union)

import masterserver as ms

try:
    import tracemalloc
except ImportError:                     # PyPy keeps no such account: there the tests run without it
    tracemalloc = mock.Mock(get_traced_memory=lambda: (0, 0))

HERE = os.path.dirname(os.path.abspath(__file__))
# the interpreter is; the largest counts are smaller there
SLOW = sys.flags.dev_mode or "PyPy" in sys.version
PROGRAM = os.path.join(HERE, "masterserver.py")
# Of a module Python keeps the compiled form, so that it starts in half the time; as a script the
# README's commands start it
PYTHON = [sys.executable, "-W", "error", "-X", "dev"]
START = [*PYTHON, "-m", "masterserver"]
# What it does once a second is done ten times as often, for tests that wait for it
HURRIED = [*PYTHON, "-c", "import sys, masterserver as ms; ms.TICK_S = ms.RENDER_S = 0.1; "
                          "sys.exit(ms.main())"]
os.environ["PYTHONPATH"] = HERE


def hexa(text: str) -> bytes:
    """Wire bytes from hex with spaces."""
    return bytes.fromhex(text.replace(" ", "").replace("\n", ""))


def settings_of(settings: Dict[str, str]) -> ms.Settings:
    """From the names of keyword arguments: iceball__port is [iceball] port."""
    return ms.Settings({name.replace("__", "."): value for name, value in settings.items()})


def make_core(**settings: str) -> ms.Core:
    """What protocols are handed, without sockets: make_core(iceball__timeout="60")."""
    chosen = settings_of(settings)
    registry = ms.Registry(ms.Rules(chosen))
    poller = ms.Poller(chosen, registry.rules)
    return ms.Core(chosen, registry, poller, lambda host, done: done(host, 0.0), {})


def reload(core: ms.Core, *protocols: Any, **settings: str) -> None:
    """What the program does when its ini has changed."""
    chosen = settings_of(settings)
    server = mock.Mock(settings=chosen, rules=core.registry.rules, registry=core.registry,
                       protocols=protocols)
    server.connections.all = {}
    with mock.patch.object(ms, "log"):
        ms.MasterServer.apply(server)


def feed(session: ms.Session, data: bytes, size: int = 1 << 30, now: float = 0.0) -> bytes:
    """Everything that a session answers to data that comes in pieces of `size` bytes."""
    out = b""
    for at in range(0, len(data), size):
        answer = session.receive(data[at:at + size], now)
        while answer:
            out += answer
            answer = b"" if session.done else session.receive(b"", now)
    return out


class RunningServer:
    """The program in a process of its own, on free ports of loopback; whatever it writes to
    standard error is kept in `log`."""

    def __init__(self, *options: str, start: Sequence[str] = START, **settings: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.ready_file = os.path.join(self.folder.name, "ready.json")
        chosen = {row.setting: "" for row in ms.PROTOCOLS if row.setting}
        chosen.update({"server.bind": "127.0.0.1", "iceball.port": "0", "http.ports": "0"})
        chosen.update({name.replace("__", "."): value for name, value in settings.items()})
        self.config = os.path.join(self.folder.name, "masterserver.ini")
        with open(self.config, "w", encoding="utf-8"):
            pass
        command = [*start, "--config", self.config, "--ready-file", self.ready_file, *options]
        if ms.WINDOWS:                  # which has no signal that ends a child cleanly
            command.append("--exit-with-stdin")
        for name, value in chosen.items():
            command += ["--set", "%s=%s" % (name, value)]
        self.stderr = open(os.path.join(self.folder.name, "stderr"), "w+b")
        stdin = subprocess.PIPE if ms.WINDOWS else subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=stdin, stderr=self.stderr)
        deadline = time.monotonic() + 20
        while not os.path.exists(self.ready_file):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise AssertionError("the server did not start: %s" % self.log)
            time.sleep(0.01)
        with open(self.ready_file, encoding="utf-8") as file:
            self.ready = json.load(file)

    def port(self, protocol: str, transport: str = "", index: int = 0) -> int:
        ports = [listener["port"] for listener in self.ready["listeners"]
                 if listener["protocol"] == protocol and transport in ("", listener["transport"])]
        return int(ports[index])

    def logged(self, text: bytes) -> bool:
        """Has the running program written this?"""
        with open(self.stderr.name, "rb") as file:
            return text in file.read()

    def stop(self) -> int:
        """End it as a service manager does, or where that is to kill it, as a parent does; the
        exit status. The log stays."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        elif self.process.poll() is None:
            self.process.terminate()
        status = self.process.wait(20)
        self.stderr.seek(0)
        self.log = self.stderr.read().decode("utf-8", "replace")
        self.stderr.close()
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
    def attempts(self: Any) -> None:
        for left in (2, 1, 0):
            try:
                return test(self)
            except AssertionError:
                if not left:
                    raise
            self.doCleanups()
            self.setUp()
        return None
    attempts.alone = True
    return attempts


def eventually(check: Callable[[], Any], seconds: float = 5.0) -> Any:
    """The first true result of `check`; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        result = check()
        if result:
            return result
        if time.monotonic() > deadline:
            raise AssertionError("it did not happen within %g s" % seconds)
        time.sleep(0.02)


def master(**settings: str) -> ms.MasterServer:
    """In this process, with the protocols named, on free ports; no source is exempt from limits."""
    chosen = {row.setting: "" for row in ms.PROTOCOLS if row.setting}
    chosen.update({"server.bind": "127.0.0.1", "limits.exempt": ""})
    chosen.update({name.replace("__", "."): value for name, value in settings.items()})
    return ms.MasterServer(chosen)


def port_of(server: ms.MasterServer, protocol: str) -> int:
    return next(l.port for l in server.listeners if l.protocol == protocol)


def connect(server: ms.MasterServer, protocol: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port_of(server, protocol)), 5)


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
    with socket.create_connection(("127.0.0.1", port), 5) as client:
        client.sendall("\r\n".join(lines + ["", ""]).encode() + body)
        return split_response(read_all(client))[:3]


def run_program(*options: str, input: str = "",
                timeout: float = 20.0) -> subprocess.CompletedProcess[str]:
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
    def load(self, text: Union[str, bytes], *overrides: str, read: Any = ms.Settings.load) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "some.ini")
            with open(path, "wb") as file:
                file.write(text.encode("utf-8") if isinstance(text, str) else text)
            return read(path, overrides)

    def test_defaults_need_no_file(self) -> None:
        settings = ms.Settings()
        self.assertEqual((settings["server.bind"], settings["iceball.version"], settings["games"]),
                         (("0.0.0.0", "::"), 8421413, {}))
        self.assertEqual((settings.given, settings.warnings, settings.path), (set(), [], ""))
        self.assertEqual(" ".join(row.name for row in ms.SETTINGS if not row.live),
                         "server.bind server.database server.log_file http.ports iceball.port "
                         "iceball.timeout hyperbol.port subspace.port aio.port")

    def test_values(self) -> None:
        for name, text, value in (
                ("http.ports", "8080, 0,", (8080, 0)), ("limits.exempt", "", ()),
                ("aio.port", "", None), ("iceball.port", "65534", 65534),
                ("http.intro", " two\nlines ", "two\nlines"),
                ("server.bind", "::ffff:127.0.0.1, [::1]", ("127.0.0.1", "::1")),
                ("server.public_address", "2001:DB8::0", "2001:db8::"),
                ("server.log_level", " Debug", "debug"),
                ("iceball.accept_versions", "0.2.1, 0.2a-4", (8421376, 8389636)),
                ("hyperbol.servers", "a.example:5\n[::1]:6 3",
                 (("a.example", 5, 0), ("::1", 6, 3))),
                ("subspace.zones", "192.0.2.1:5\n\n b:65535", (("192.0.2.1", 5), ("b", 65535))),
                ("official.[::1]:5", "on", {("::1", 5): True}),
                ("official.192.0.2.1:5", "No", {("192.0.2.1", 5): False}),
                ("priority.192.0.2.1:5", "-1000", {("192.0.2.1", 5): -1000}),
                ("address_map.::ffff:10.0.0.1", "1.2.3.4", {"10.0.0.1": "1.2.3.4"}),
                ("games.my-game_2", "My Game", {"my-game_2": "My Game"}),
                ("limits.requests", "2.5", (2.5, 2.5)), ("limits.requests", "2/9", (2, 9))):
            settings = ms.Settings({name: text})
            row = name if name in settings.values else name.partition(".")[0]
            self.assertEqual((settings[row], settings.given), (value, {row}), name)

    def test_networks_and_patterns(self) -> None:
        settings = self.load("[bans]\n198.51.100.9/24 = fakes: = and # in it\n"
                             "[server]\nrefuse_names = bad, (worse|worst)$\n  ugly\n")
        (network, words), = settings["bans"].items()
        self.assertEqual((str(network), words), ("198.51.100.0/24", "fakes: = and # in it"))
        first, second = settings["server.refuse_names"]
        self.assertTrue(first.search("a BAD, worst") and second.search("uglyfoo"))

    def test_errors_name_file_key_and_nearest(self) -> None:
        for ini, words in (
                ("[icebal]\nport = 1\n", "no section [icebal]; did you mean iceball"),
                ("[DEFAULT]\nport = 1\n", "no section [DEFAULT]"),
                ("[iceball]\nprot = 1\n", "[iceball] has no key prot; did you mean port"),
                ("[aio]\nxyzzy = 1\n", "there are news, news_file, port"),
                ("[iceball]\nport = many\n", "[iceball] port = many: expected a number"),
                ("[iceball]\nport = 65535\n", "from 0 to 65534"),
                ("[poll]\nrate = 3\n", "from 4 to 100000"),
                ("[limits]\nservers = 0\n", "from 1 to 10000000"),
                ("[limits]\ndatagrams = 0/10\n", "from 0.01 to 1000000"),
                ("[priority]\n192.0.2.1:5 = 1001\n", "from -1000 to 1000"),
                ("[official]\nsomewhere = yes\n", "is not ADDRESS:PORT"),
                ("[official]\na.example:5 = yes\n", "'a.example' is not an IP address"),
                ("[official]\n1.2.3.4:5 = perhaps\n", "expected yes or no"),
                ("[address_map]\n192.168.1.5 = 224.0.0.1\n", "cannot be the address"),
                ("[address_map]\n192.168.1.5 =\n", "'' is not an IP address"),
                ("[bans]\n1.2.3.4/33 = x\n", "is not a network"),
                ("[server]\nrefuse_names = (\n", "is not a regular expression"),
                ("[server]\nlog_level = loud\n", "expected one of debug, info, warning, error"),
                ("[server]\nbind =\n", "'' is not an IP address"),
                ("[games]\naio = A\n", "the id aio is taken"),
                ("port = 1\n", "no section headers"),
                ("[bans]\n192.0.2.1\n", "line 2"),
                ("[subspace]\nzones =\n192.0.2.1:5\n", "an indented line that continues"),
                ("[http]\ntitle = T\n\n  [limits]\n  servers = 5\n", "expected one line"),
                (b"[server]\n\xff\xfe", "in UTF-8"),
                ("[server]\n".encode("utf-16"), "in UTF-8")):
            with self.assertRaises(ms.SettingsError, msg=ini) as caught:
                self.load(ini)
            self.assertIn("some.ini: ", str(caught.exception))
            self.assertIn(words, str(caught.exception))

    def test_a_setting_that_was_removed_is_a_warning(self) -> None:
        ini = "[aio]\ndialects = text\ntext_greeting_after = 1\nport = 5\n"
        settings = self.load(ini, "aio.dialects=framed")
        self.assertEqual(settings["aio.port"], 5)
        self.assertEqual([text.partition(": ")[2] for text in settings.warnings], [
            "[aio] %s is no setting any more; it has no effect" % key
            for key in ("dialects", "text_greeting_after", "dialects")])
        self.assertTrue(settings.warnings[2].startswith("--set: "))
        self.assertNotIn("aio.dialects", settings.given)

    def test_lines_added_at_the_end(self) -> None:
        settings = self.load("\ufeff" + ms.config_text() + "[http]\ntitle = Ours\n[games]\na = A\n"
                             "[bans]\n[http]\nTitle = 5 %% of %(x)s\n"
                             "[official]\n[::1]:27790 = yes\n")
        self.assertEqual((settings["http.title"], settings["games"], settings["official"]),
                         ("5 %% of %(x)s", {"a": "A"}, {("::1", 27790): True}))

    def test_missing_file(self) -> None:
        for path in "nowhere.ini", "":
            with self.assertRaisesRegex(ms.SettingsError, "name right, and may this user read it"):
                ms.Settings.load(path)
        settings = ms.Settings.load("nowhere.ini", missing_ok=True)
        self.assertEqual((settings["iceball.port"], settings.found), (27790, False))
        with self.assertRaisesRegex(ms.SettingsError, "cannot be read"):       # it is a folder
            ms.Settings.load(HERE, missing_ok=True)
        self.assertEqual([self.load(ini).found for ini in ("", "[http]\n")], [False, True])

    def test_overrides(self) -> None:
        settings = self.load("[iceball]\nport = 1\n", "iceball.port=", " http.ports = 0 ",
                             "official.1.2.3.4:5=yes")
        self.assertEqual((settings["iceball.port"], settings["http.ports"], settings["official"]),
                         (None, (0,), {("1.2.3.4", 5): True}))
        for wrong, words in (
                ("iceball.port", "expected section.key=value"), ("port=1", r"no section \[port\]"),
                ("iceball.prot=1", "did you mean port"), ("http.title=\udcff", "surrogate")):
            with self.assertRaisesRegex(ms.SettingsError, "--set.*" + words):
                self.load("", wrong)

    def test_paths_begin_in_the_folder_of_the_ini(self) -> None:
        # A program that embeds the server keeps nothing that it was not asked to keep
        for settings, database in (
                (ms.Settings(), ""), (ms.Settings({"server.database": "a.db"}), "a.db")):
            self.assertEqual(settings.file("server.database"), database)
        path = os.path.join(os.path.abspath(os.sep), "etc", "some.ini")
        settings = ms.Settings.load(path, ["server.log_file=log"], missing_ok=True)
        folder = os.path.dirname(path)
        for name, found in (
                ("server.database", os.path.join(folder, "masterserver.db")),
                ("server.log_file", os.path.join(folder, "log")), ("http.template", "")):
            self.assertEqual(settings.file(name), found)

    def test_config_text_is_the_ini_and_changes_nothing(self) -> None:
        with open(os.path.join(HERE, "masterserver.ini"), encoding="utf-8") as file:
            self.assertEqual(file.read(), ms.config_text())
        self.assertEqual(self.load(ms.config_text()).values, ms.Settings().values)
        enabled = self.load(re.sub(r"(?m)^#(?! )", "", ms.config_text()))
        for row in ms.SETTINGS:
            if row.key:
                self.assertEqual(enabled[row.name], ms.Settings()[row.name], row.name)
            else:
                self.assertEqual(len(enabled[row.name]), 1, row.name)
        self.assertEqual(enabled.given, {row.name for row in ms.SETTINGS})

    def test_values_at_their_edges(self) -> None:
        for read, good, bad in (
                (ms.read_endpoint, "1.2.3.4:1 a.example:65535 [::1]:5",
                 "1.2.3.4:0 1.2.3.4:65536 1.2.3.4:x :5 1.2.3.4 2001:db8::1:5 [2001:db8::1:5 "
                 "2001:db8::1]:5 a:\u00b2"),
                (ms.read_known_hyperbol, "1.2.3.4:1 1.2.3.4:1\t255",
                 "1.2.3.4:1\t-1 1.2.3.4:1\t256 1.2.3.4:1\t1\t1"),
                (ms.read_iceball_version, "31.31.127-1023 0.0 0.2a-4",
                 "32.1 0.32 0.2.128 0.2-1024 0 0.2ab 0.2A"),
                (ms.read_own_game_id, "a" * 32 + " my-game_2", "a" * 33 + " A a.b iceball http "),
                (ms.read_public, "1.0.0.0 223.255.255.255 2001:db8::1 ::ffff:1.2.3.4",
                 "0.1.2.3 224.0.0.1 255.255.255.255 :: ff02::1 ::ffff:224.0.0.1 a.example"),
                (ms.read_rate, "0.01/1 1000000", "0.009/1 1000001 1/0.9 1/1000001")):
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
    def test_clean(self) -> None:
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

    def test_decode(self) -> None:
        for raw, wanted in (
                ("Größe".encode()[:-1], "Größ"), ("漢字".encode()[:-1], "漢"),
                ("a😀".encode()[:-2], "a"), ("漢字".encode(), "漢字"), (b"a\xffb", "a\ufffdb"),
                (b" a\0", "a")):
            self.assertEqual(ms.decode_utf8(raw), wanted)
        for raw, wanted in (
                (b"caf\xe9 \x80", "café €"), ("café".encode(), "café"), (b"a\x81b", "a\ufffdb"),
                (b"\xc3\xa9\xe9 x", "Ã©é x"),
                *[("größ😀".encode()[:-cut], "größ") for cut in (1, 2, 3)],    # cut to a field
                *[(text.encode("cp1252"), text) for text in ("José", "été", "Köln »")]):
            self.assertEqual(ms.decode_legacy(raw), wanted)
        self.assertEqual([ms.c_string(raw) for raw in (b"ab\0cd\0", b"ab", b"\0")],
                         [b"ab", b"ab", b""])
        self.assertEqual(list(map(ms.clamp, (-1, 0, 65535, 65536))), [0, 0, 65535, 65535])


class AddressTest(unittest.TestCase):
    def test_forms(self) -> None:
        for call, address, wanted in (
                (ms.canonical, "::ffff:203.0.113.9", "203.0.113.9"),
                (ms.canonical, "fe80::1%eth0", "fe80::1"),
                (ms.canonical, "203.0.113.9", "203.0.113.9"),
                (ms.source_key, "2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
                (ms.source_key, "::ffff:203.0.113.9", "203.0.113.9"),
                (ms.source_keys, "203.0.113.9", ("203.0.113.9",)),
                (ms.source_keys, "2001:db8:1:2:3::4", ("2001:db8:1:2::/64", "2001:db8:1::/48")),
                (ms.ipv4_bytes, "203.0.113.9", b"\xcb\0\x71\x09")):
            self.assertEqual(call(address), wanted, address)
        self.assertEqual([ms.endpoint("2001:db8::1", 5), ms.endpoint("192.0.2.1", 5)],
                         ["[2001:db8::1]:5", "192.0.2.1:5"])
        for address in ("127.0.0.1 127.255.0.9 128.0.0.1 126.0.0.1 ::1 :: ::127 ::1:0:0:1 "
                        "2001:db8::1").split():
            self.assertEqual(ms.is_loopback(address), ipaddress.ip_address(address).is_loopback)

    def test_networks_are_what_ipaddress_says(self) -> None:
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
        self.assertIn("fe80::1%eth0", ms.LOCAL)
        self.assertEqual((bool(ms.Networks([])), bool(ms.LOCAL)), (False, True))

    def test_the_smallest_network_tells(self) -> None:
        words = {ms.read_network(text): text for text in (
            "203.0.113.0/24", "203.0.0.0/8", "203.0.113.9", "2001:db8::/32")}
        known = ms.Networks(words, words)
        for address, text in (
                ("203.1.1.1", "203.0.0.0/8"), ("203.0.113.8", "203.0.113.0/24"),
                ("203.0.113.9", "203.0.113.9"), ("2001:db8::1", "2001:db8::/32"), ("::1", None)):
            self.assertEqual(known.find(ms.address_number(address)), text)

    def test_listed_address(self) -> None:
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


class CountsTest(unittest.TestCase):
    def test_tables(self) -> None:
        counts = {"a": 2}
        ms.uncount(counts, "a")
        self.assertEqual(counts, {"a": 1})
        ms.uncount(counts, "a")
        self.assertEqual(counts, {})
        table: Any = collections.OrderedDict()
        for key in "abac":
            ms.keep_latest(table, key, key.upper(), 2)
        self.assertEqual(list(table.items()), [("a", "A"), ("c", "C")])


class CookieTest(unittest.TestCase):
    def test_windows(self) -> None:
        cookie = ms.Cookie(bytes(16))
        mac = cookie.make(b"message", 29.9)
        self.assertEqual(len(mac), 8)
        for now, message, good in (
                (29.9, b"message", True), (29.9, b"massage", False), (59.9, b"message", True),
                (59.9, b"massage", False), (60.0, b"message", False)):
            self.assertEqual(cookie.good(mac, message, now), good, (now, message))
        self.assertFalse(ms.Cookie(bytes(15) + b"\1").good(mac, b"message", 29.9))
        late = cookie.make(b"message", 1e9)                 # after a long pause
        self.assertTrue(cookie.good(late, b"message", 1e9 + 29.0))
        self.assertEqual(len(ms.Cookie(bytes(16), 4).make(b"", 0.0)), 4)


class LimiterTest(unittest.TestCase):
    def test_exact_bounds(self) -> None:
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
    def test_full_table_refuses_nobody(self) -> None:
        limiter = ms.Limiter((1, 1))
        for name in "abcdefg":
            self.assertTrue(limiter.allow(name, 0.0), name)
        self.assertEqual(list(limiter.table), ["e", "f", "g"])
        self.assertFalse(limiter.allow("e", 0.0))           # now the last to be forgotten
        limiter.allow("h", 0.0)
        self.assertEqual(list(limiter.table), ["g", "e", "h"])

    def test_spent(self) -> None:
        limiter = ms.Limiter((1, 3))
        for address in "192.0.2.1", "2001:db8::1":
            self.assertEqual([(limiter.allow(address, 0.0), limiter.spent(address, 0.0))
                              for _ in range(4)],
                             [(True, False), (True, True), (True, True), (False, True)])
            self.assertFalse(limiter.spent(address, 2.5))

    def test_verdicts_and_prefixes(self) -> None:
        rules = ms.Rules(ms.Settings({"blocked.192.0.2.0/24": "floods",
                                      "limits.exempt": "127.0.0.0/8, 2001:db8:9::/48"}))
        limiter = ms.Limiter((1, 1), rules.verdict)
        for exempt in "127.0.0.1", "2001:db8:9::1":
            self.assertTrue(all(limiter.allow(exempt, 0.0) for _ in range(9)))
        for now in 0.0, 1e9:
            self.assertFalse(limiter.allow("192.0.2.66", now))
        # It is blocked, which is something else
        self.assertFalse(limiter.spent("192.0.2.66", 0.0))
        for address, good in (("2001:db8:1:2::1", True), ("2001:db8:1:2:3::1", False),
                              ("2001:db8:1:3::1", True)):
            self.assertEqual(limiter.allow(address, 0.0), good, address)
# --- Registry ------------------------------------------------------------------------------------

class RegistryTest(unittest.TestCase):
    def setUp(self) -> None:
        self.registry = make_core(limits__servers_per_source="3", limits__servers="5").registry
        self.events: List[Tuple[str, int]] = []
        self.registry.watch(lambda event, server: self.events.append((event, server.port)))

    def hear(self, port: int, source: str = "203.0.113.9", now: float = 0.0,
             lifetime: float = 120.0, **fields: Any) -> ms.Server:
        return self.registry.hear("iceball", source, port, source, now, lifetime, fields)

    def names(self) -> List[str]:
        return [server.name for server in self.registry.servers()]

    def test_listed_changed_gone(self) -> None:
        self.hear(1, name="a", players=1, max_players=8)
        generation = self.registry.generation
        self.hear(1, name="a", players=1, max_players=8, now=50.0)
        self.assertEqual(self.registry.generation, generation)          # refreshed, no list differs
        self.hear(1, name="a", players=2, max_players=8, now=60.0)
        self.assertEqual(self.registry.generation, generation + 1)
        for now, left in (179.9, 1), (180.0, 0):
            self.registry.expire(now)
            self.assertEqual(len(self.registry.servers()), left, now)
        self.assertEqual(self.events, [("listed", 1), ("changed", 1), ("gone", 1)])
        self.assertEqual((self.registry.total, dict(self.registry.sources)), (0, {}))
        self.assertEqual(self.registry.altered, {("iceball", "203.0.113.9", 1)})

    def test_watchers_hear_of_their_game_and_events(self) -> None:
        seen: List[str] = []
        self.registry.watch(lambda event, server: seen.append(event), "iceball", ["gone"])
        self.registry.watch(lambda event, server: seen.append(event), "aio")
        self.registry.remove(self.hear(1))
        self.registry.remove(None)
        self.assertEqual(seen, ["gone"])

    def test_census(self) -> None:
        """No more than there is room for, and nobody where nobody answers."""
        for number, (told, counted) in enumerate((
                ({"players": 3}, (1, 3, 3)),
                ({"players": 70000}, (1, 65535, 65535)),
                ({"players": -1}, (1, 0, 0)),
                ({"players": 9, "max_players": 8}, (1, 8, 8)),
                ({"players": 5, "max_players": 8, "playing": 2}, (1, 5, 2)),
                ({"players": 9, "max_players": 8, "playing": 9}, (1, 8, 8)),
                ({"players": 5, "playing": -1}, (1, 5, 0)),
                ({"players": 5, "responding": False}, (0, 0, 0)))):
            registry = make_core().registry
            place = "203.0.113.9", 1, "203.0.113.9"
            for fields, wanted in (told, counted), ({"players": 1, "max_players": 0,
                                                     "playing": None, "responding": True},
                                                    (1, 1, 1)), (told, counted):
                number += 2
                registry.hear("iceball", *place, float(number), 120.0, fields)
                found = registry.census(float(number)).get("iceball", ms.Census())
                self.assertEqual(found, wanted, fields)
            registry.remove(registry.servers()[0])
            self.assertEqual(registry.census(1000.0), {})

    def test_order(self) -> None:
        rules = self.registry.rules
        rules.official = {("203.0.113.9", 2): True}
        rules.priority = {("203.0.113.9", 3): 1}
        self.hear(1, name="b", players=5)
        self.hear(2, name="c", players=1)
        self.hear(3, name="d")
        self.hear(4, "203.0.113.8", name="Z", players=5)
        self.hear(5, "203.0.113.8", name="a", players=5)
        ports = [server.port for server in self.registry.servers()]
        self.assertEqual(ports, [3, 2, 5, 1, 4])
        self.hear(1, name="b", players=9)
        self.assertEqual([server.port for server in self.registry.servers("iceball")],
                         [3, 2, 1, 5, 4])
        self.assertEqual(self.registry.servers("aio"), [])

    def test_limits_are_exact(self) -> None:
        for port in (1, 2, 3):
            self.hear(port)
        with self.assertRaisesRegex(ms.Refused, "3 servers of one address"):
            self.hear(4)
        self.hear(3)                                        # those that are listed stay welcome
        for port in (1, 2):
            self.hear(port, "127.0.0.1")
        with self.assertRaisesRegex(ms.Refused, "5 servers"):
            self.hear(3, "127.0.0.1")
        self.registry.remove(self.registry.servers()[0])
        self.hear(3, "127.0.0.1")
        self.registry.rules.servers = 99
        for port in range(4, 40):                           # loopback is exempt
            self.hear(port, "127.0.0.1")
        self.registry.hear("iceball", "203.0.113.9", 40, "203.0.113.9", 0.0, 9.0, {}, pinned=True)

    def test_an_ipv6_site_has_sixteen_times_what_one_source_has(self) -> None:
        self.registry.rules.servers = 1000
        for number in range(16 * 3):
            self.hear(number % 3 + 1, "2001:db8:1:%x::1" % (number // 3))
        with self.assertRaisesRegex(ms.Refused, "48 servers of one /48 network"):
            self.hear(1, "2001:db8:1:ff::1")
        self.hear(1, "2001:db8:2::1")

    def test_not_listable(self) -> None:
        for address, port, source in (
                ("203.0.113.9", 0, ""), ("203.0.113.9", 65536, ""), ("0.0.0.0", 5, ""),
                ("224.0.0.1", 5, ""), ("255.255.255.255", 5, ""), ("240.0.0.1", 5, ""),
                ("0.0.0.0", 5, "0.0.0.0"), ("fe80::1%eth0", 5, "fe80::1%eth0")):
            with self.assertRaises(ms.Refused, msg=address):
                source = source or "203.0.113.9"
                self.registry.hear("nogame", address, port, source, 0.0, 120.0, {})
        left = dict(self.registry.games), dict(self.registry.sources), self.registry.total
        self.assertEqual(left, ({}, {}, 0))

    def test_bans_names_and_marks_at_a_reload(self) -> None:
        self.hear(1, name="good")
        self.hear(3, "198.51.100.3", name="Free gold")
        self.hear(88, "198.51.100.4", name="198.51.100.4:88")
        settings = ms.Settings({"bans.203.0.113.0/24": "fakes",
                                "server.refuse_names": "free *gold\nspam$\n88"})
        self.registry.rules.read(settings)
        for port, source, name, why in (
                (2, "203.0.113.9", "x", "fakes"), (2, "198.51.100.1", "FREE  Gold here", "gold"),
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

    def test_a_game_that_leaves_the_ini_and_an_address_that_is_mapped_otherwise(self) -> None:
        first = {"games.mine": "Mine", "address_map.10.0.0.5": "203.0.113.7"}
        self.registry.rules.read(ms.Settings(first))
        self.registry.hear("mine", "203.0.113.1", 1, "203.0.113.1", 0.0, 120.0, {"name": "mine"})
        self.registry.hear("aio", "203.0.113.7", 1, "10.0.0.5", 0.0, 120.0, {"name": "mapped"})
        self.registry.hear("aio", "203.0.113.9", 1, "10.0.0.6", 0.0, 120.0, {"name": "claimed"})
        self.registry.apply_rules(ms.Settings(first))
        self.assertEqual(len(self.names()), 3)
        self.registry.apply_rules(ms.Settings({"address_map.10.0.0.5": "203.0.113.8",
                                               "address_map.10.0.0.6": "203.0.113.8"}))
        self.assertEqual(self.names(), ["claimed"])

    def test_who_is_banned_takes_nothing_over_and_another_source_counts(self) -> None:
        self.hear(1, name="Mine")
        self.registry.rules.read(ms.Settings({"bans.10.0.0.5": "cheats"}))
        with self.assertRaisesRegex(ms.Refused, "cheats"):
            self.registry.hear("iceball", "203.0.113.9", 1, "10.0.0.5", 1.0, 120.0, {"name": "?"})
        self.assertEqual(self.names(), ["Mine"])
        self.registry.hear("iceball", "203.0.113.9", 1, "10.0.0.6", 1.0, 120.0, {})
        self.assertEqual(dict(self.registry.sources), {"10.0.0.6": 1})

    def test_who_is_blocked_and_who_is_not_any_more(self) -> None:
        rules = self.registry.rules
        limiters = [rules.datagrams, rules.messages, rules.answers, rules.connections,
                    rules.udp_requests, rules.requests]
        for settings, allowed in ({}, True), ({"blocked.203.0.113.0/24": "x"}, False), ({}, True):
            rules.read(ms.Settings(settings))
            for number, limiter in enumerate(limiters):
                self.assertEqual(limiter.allow("203.0.113.9", 0.0), allowed, (settings, number))

    def test_unproven_sources_share_what_they_get(self) -> None:
        rules = self.registry.rules
        self.assertTrue(rules.allow_surplus("list", "203.0.113.1", 1_000_000, 0.0))
        self.assertFalse(rules.allow_surplus("list", "203.0.113.2", 500, 0.0))
        self.assertTrue(rules.allow_surplus("ping", "203.0.113.2", 500, 0.0))       # another use
        self.assertTrue(rules.allow_surplus("list", "203.0.113.2", 0, 0.0))
        self.assertTrue(rules.allow_surplus("list", "127.0.0.1", 500, 0.0))         # exempt
        self.assertTrue(rules.allow_surplus("list", "203.0.113.2", 500, 1.0))

    def test_silence_that_proves_nothing(self) -> None:
        """Of the time before a restart or a stop, and where a flood keeps its packets out."""
        self.hear(1)
        self.registry.deaf_until = 100.0
        self.registry.expire(219.9)
        self.assertEqual(len(self.names()), 1)
        for now, left in (220.0, 1), (359.9, 1), (360.0, 0):
            while self.registry.rules.datagrams.allow("203.0.113.9", now):
                pass
            self.registry.expire(now)
            self.assertEqual(len(self.names()), left, now)
        self.hear(1, now=1000.0)
        self.registry.expire(1120.0)
        self.assertEqual(self.names(), [])

    def test_confirmed_once_it_is_heard(self) -> None:
        for hear in (lambda server: self.registry.confirm(server, 60.0), lambda server: self.hear(
                1, now=60.0)):
            server = self.hear(1)
            server.confirmed = False
            generation = self.registry.generation
            hear(server)
            self.assertEqual((server.confirmed, server.last_seen), (True, 60.0))
            self.assertGreater(self.registry.generation, generation)

    def test_a_list_is_made_at_most_once_a_second(self) -> None:
        """Of 12,000 servers; of a hundred, a hundred times a second at the most."""
        for servers, times in ((12000, 3), (100, 200)):
            registry = make_core(limits__servers_per_source="100000").registry
            made: List[int] = []
            for port in range(1, 1 + servers):
                registry.hear("iceball", "203.0.113.9", port, "203.0.113.9", 0.0, 120.0, {})
            rendered = ms.RenderedList(registry, "iceball", lambda servers: made.append(1))
            for number in range(1000):
                server = registry.get("iceball", "203.0.113.9", 1)
                registry.update(server, {"players": number})
                rendered.get(number / 500)
            self.assertTrue(times * 2 // 3 <= len(made) <= times, len(made))

    def test_parts_are_made_again_for_who_has_changed(self) -> None:
        made: List[int] = []
        for port in 1, 2:
            self.hear(port)
        for change in (lambda: None, lambda: self.hear(2, players=1), self.registry.forget_parts):
            change()
            for _ in range(2):
                ms.parts(self.registry.servers(), "x", lambda server: made.append(server.port) or 1)
        self.assertEqual(sorted(made), [1, 1, 2, 2, 2])

    def test_what_was_heard_is_bounded_and_a_flood_is_noted_in_part(self) -> None:
        for i in range(ms.HEARD_SOURCES + 10):
            self.registry.note("203.0.113.%d" % i, "iceball", 1, "announced", float(i))
        self.assertEqual(len(self.registry.heard), ms.HEARD_SOURCES)
        self.assertNotIn(("203.0.113.9", "iceball", 1), self.registry.heard)
        self.assertIn(("203.0.113.10", "iceball", 1), self.registry.heard)
        self.registry.heard.clear()
        for now, ports in (1e6, range(20000)), (1e6 + 1, range(20000, 20001)):
            for port in ports:
                self.registry.note("198.51.100.1", "iceball", port, "announced", now)
        self.assertEqual(len(self.registry.heard), ms.HEARD_PER_S + 1)

    def test_what_waits_for_the_disk_is_bounded(self) -> None:
        with mock.patch.object(ms, "ALTERED_SERVERS", 2):
            for port in 1, 2, 3:
                self.registry.remove(self.hear(port))
        self.assertEqual(len(self.registry.altered), 2)


# --- Storage --------------------------------------------------------------------------------------

T0 = 1_700_006_400          # 2023-11-15 00:00 UTC, a Wednesday
DAMAGED_AT = ".damaged-20231115-000000"


def listed_row(number: int, wall: float = T0, life: float = 100.0, fields: str = "[]") -> Any:
    wall = float(wall)
    return ("iceball", "192.0.2.%d" % (number % 250), 1000 + number, wall + life, wall, wall,
            fields)


def listed_key(number: int) -> Tuple[str, str, int]:
    return listed_row(number)[:3]


class DatabaseCase(unittest.TestCase):
    A = listed_key(1)

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = os.path.realpath(folder.name)
        self.path = os.path.join(self.folder, "master.db")
        for patch in (mock.patch.object(ms, "STORAGE_BUSY_S", 0.02),
                      mock.patch.object(ms.log, "warning")):
            patch.start()
            self.addCleanup(patch.stop)

    def database(self, wall: float = T0) -> ms.Database:
        made = ms.Database(self.path)
        self.addCleanup(made.close)
        made.load(wall)
        return made

    def sql(self, text: str, *values: Any) -> List[Any]:
        with contextlib.closing(sqlite3.connect(self.path, isolation_level=None)) as db:
            return db.execute(text, values).fetchall()

    def put(self, data: bytes) -> None:
        """Have this for the database, and nothing beside it."""
        for name in os.listdir(self.folder):
            os.remove(os.path.join(self.folder, name))
        with open(self.path, "wb") as file:
            file.write(data)

    def sound(self) -> bytes:
        """The bytes of a file of some 30 pages with 60 servers."""
        database = self.database()
        database.save([listed_row(number, fields='["%0400d"]' % number)
                       for number in range(60)], set())
        for wall in (T0 - 60, T0):
            database.sample(wall, [listed_key(number) + (number,) for number in range(60)])
        database.close()
        with open(self.path, "rb") as file:
            return file.read()

    def use(self, database: ms.Database) -> None:
        """Every operation once: nothing is raised, whatever is in the file."""
        for row in database.load(T0):
            self.assertEqual(list(map(type, row))[:6], [str, str, int, float, float, float])
        database.save([listed_row(number) for number in range(0, 90, 3)], {listed_key(2)})
        database.sample(T0 + ms.QUARTER, [listed_key(number) + (1,) for number in range(90)])
        database.recent(T0)
        for number in (0, 59):
            known = database.known(*listed_key(number)) or (0.0, 0.0, "")
            self.assertEqual(list(map(type, known)), [float, float, str])
            for span in ms.SPANS:
                database.history(*listed_key(number), span, T0 + ms.HOUR)


class ListOnDisk(DatabaseCase):
    def test_rows_come_back_as_they_were(self) -> None:
        rows = [listed_row(1, fields='["caf\u00e9"]'), listed_row(2),
                ("aio", "2001:db8::1", 7777, math.inf, T0 + 0.5, T0 + 0.25, "[]")]
        database = self.database()
        database.save(rows, set())
        self.assertEqual(self.database().load(T0), rows)
        # Fields and times are replaced, but for the time of the first sight
        database.save([listed_row(1, T0 + 50, 120.0, '["new"]')], {listed_key(2), listed_key(9)})
        changed = (*self.A, T0 + 170.0, T0, T0 + 50.0, '["new"]')
        self.assertEqual(self.database().load(T0), [changed, rows[2]])
        self.assertIsNone(database.known(*listed_key(9)))

    def test_rows_with_values_of_another_type_are_left_out(self) -> None:
        database = self.database()
        for column in ("game", "address", "port", "first_seen", "last_seen"):
            database.save([listed_row(1), listed_row(2)], set())
            self.sql("UPDATE server SET %s = x'00ff' WHERE id = 1" % column)
            if column == "last_seen":
                self.sql("UPDATE listed SET last_seen = 'then' WHERE server = 1")
            self.assertEqual([row[2] for row in database.load(T0)], [1002], column)
            self.sql("DELETE FROM server")
            self.sql("DELETE FROM sqlite_sequence")
        self.assertEqual(database.set_aside, "")

    def test_who_has_gone_is_known_with_his_first_time(self) -> None:
        database = self.database()
        database.save([listed_row(1, fields='["old"]')], set())
        database.save([listed_row(1, T0 + 50, fields='["old"]')], set())
        for gone in (set(), {self.A}, {self.A}):
            database.save([], gone)
            self.assertEqual(database.known(*self.A), (T0, T0 + 50, "old"))
        self.assertEqual(database.load(T0), [])
        database.save([listed_row(1, T0 + ms.DAY, fields='["new"]')], set())
        self.assertEqual(database.known(*self.A), (T0, T0 + ms.DAY, "new"))
        self.assertIsNone(database.known("aio", *self.A[1:]))
        # On a machine whose clock stands at 1970 after a power cut
        database.save([listed_row(1, 40)], set())
        database.save([], {self.A})
        self.assertEqual(database.known(*self.A)[:2], (T0, T0 + 50))

    def test_noise_is_not_known(self) -> None:
        database = self.database()
        database.save([listed_row(1)], set())
        database.save([], {self.A})
        for column in ("first_seen", "last_seen"):
            for noise in (-1.0, 4e10, math.inf, None, "then", b"\xff"):
                self.sql("UPDATE server SET %s = ?" % column, noise)
                self.assertIsNone(database.known(*self.A), (column, noise))
            self.sql("UPDATE server SET %s = ?" % column, T0)
        for fields, name in (('["S", 5]', "S"), ("[]", ""), ("[5]", "5"), ("{}", ""), ("[", ""),
                             (None, ""), ("[" * 5000, "")):
            self.sql("UPDATE server SET fields = ?", fields)
            self.assertEqual(database.known(*self.A).name, name, fields)

    def test_those_here_for_the_shortest_time_are_forgotten_when_there_are_too_many(self) -> None:
        database = self.database()
        hour = lambda number: T0 + number * ms.HOUR
        total = ("iceball", "", 0, 1)
        database.save([listed_row(0)], set())
        with mock.patch.object(ms, "KNOWN_SERVERS", 100):
            database.save([listed_row(1)], set())
            database.save([listed_row(1, T0 + 500)], set())
            for number in range(1, 151):        # each is here for no time, but the first
                if number > 1:
                    database.save([listed_row(number, T0 + number)], set())
                database.sample(T0 + number, [listed_key(number) + (1,), total])
                database.save([], {listed_key(number)})
            database.sample(hour(1), [total])
            [(count,)] = self.sql("SELECT count(*) FROM server")
            self.assertEqual(count, 95 + 2)     # the one listed, and the sum of the game
            [(count,)] = self.sql("SELECT count(DISTINCT server) FROM block")
            self.assertEqual(count, 95 + 1)     # with their history
        for number, remains in ((0, True), (1, True), (2, False), (56, False), (57, True),
                                (150, True)):
            self.assertEqual(bool(database.known(*listed_key(number))), remains, number)
        self.assertEqual(database.load(T0), [listed_row(0)])

    def test_what_was_saved_outlives_the_process(self) -> None:
        child = ("import os, signal, masterserver as ms; database = ms.Database(%r)\n"
                 "database.load(0)\n"
                 "database.save([('iceball', '192.0.2.1', port, 100.0, 0.0, 0.0, '[]')\n"
                 "               for port in range(1000)], set())\n"
                 "database.sample(60, [('iceball', '192.0.2.1', 1, 5)])\n"
                 "os.kill(os.getpid(), getattr(signal, 'SIGKILL', signal.SIGTERM))" % self.path)
        result = subprocess.run([sys.executable, "-c", child], cwd=HERE)
        self.assertNotEqual(result.returncode, 0)
        database = self.database(120)
        self.assertEqual(len(database.load(120)), 1000)
        series = database.history("iceball", "192.0.2.1", 1, "day", 120)
        self.assertEqual((series.means[-1], database.set_aside), (5, ""))


class HistoryOnDisk(DatabaseCase):
    TOTAL = ("iceball", "", 0)

    def series(self, database: ms.Database, wall: float, span: str = "day") -> Tuple[Any, Any]:
        """Means and peaks by their times, without the gaps."""
        series = database.history(*self.A, span, wall)
        step, length = ms.SPANS[span]
        self.assertEqual((series.step, series.start % step), (step, 0))
        self.assertEqual((len(series.means), len(series.peaks)), (length // step, length // step))
        by_time = [{series.start + step * n: value for n, value in enumerate(values)
                    if value is not None} for values in (series.means, series.peaks)]
        return by_time[0], by_time[1]

    def test_minutes_and_their_bytes(self) -> None:
        database = self.database()
        for minute, players in ((0, 3), (1, 0), (3, 65_534), (4, 99_999), (5, -1)):
            database.sample(T0 + 60 * minute + 7.5, [self.A + (players,)])
        means, peaks = self.series(database, T0 + 600)
        self.assertEqual(means, {T0: 3, T0 + 60: 0, T0 + 180: 65_534, T0 + 240: 65_534,
                                 T0 + 300: 0})
        self.assertEqual(peaks, means)
        # 16 bits, little-endian, one more than the players
        [(blob,)] = self.sql("SELECT samples FROM block WHERE step = 60")
        self.assertEqual(blob, hexa("0400 0100 0000 ffff ffff 0100") + bytes(108))

    def test_a_file_of_the_first_program_that_had_this_format(self) -> None:
        """The statements as they stood in a file then, and the bytes of an hour."""
        hour = hexa("0200 0400") + bytes(4 * 167)           # mean 1, peak 3
        week = T0 // ms.WEEK * ms.WEEK
        with contextlib.closing(sqlite3.connect(self.path)) as db:
            db.executescript(
                "CREATE TABLE server (id INTEGER PRIMARY KEY AUTOINCREMENT, game TEXT, address"
                " TEXT, port INTEGER, first_seen REAL, last_seen REAL, fields TEXT, UNIQUE (game,"
                " address, port)); CREATE TABLE listed (server INTEGER PRIMARY KEY, expires REAL,"
                " last_seen REAL); CREATE TABLE block (step INTEGER, start INTEGER, server INTEGER,"
                " samples BLOB, PRIMARY KEY (step, start, server)) WITHOUT ROWID;"
                " PRAGMA user_version = 1;"
                " INSERT INTO server VALUES (7, 'iceball', '192.0.2.1', 1001, 1e9, 2e9, '[\"S\"]');"
                " INSERT INTO listed VALUES (7, 2000000120.0, 2000000000.0);")
            db.execute("INSERT INTO block VALUES (3600, ?, 7, ?)", (week, hour))
            db.commit()
        database = self.database()
        self.assertEqual(database.load(T0), [(*self.A, 2e9 + 120, 1e9, 2e9, '["S"]')])
        self.assertEqual(self.series(database, T0, "year"), ({week: 1}, {week: 3}))
        self.assertEqual(database.set_aside, "")

    def test_quarters_and_hours_are_made_of_minutes(self) -> None:
        database = self.database()
        for minute in range(61):
            if minute == 20:
                database = self.database()          # and a restart in between
            if not 30 <= minute < 45:
                database.sample(T0 + 60 * minute, [self.A + (minute % 15 * 2,), self.TOTAL + (7,)])
        end = T0 + 2 * ms.HOUR
        # The mean of 0, 2 .. 28
        quarters = {at: 14 for at in (T0, T0 + 900, T0 + 2700)}
        peaks = dict.fromkeys(quarters, 28)
        self.assertEqual(self.series(database, T0 + ms.HOUR + 960, "week"), (quarters, peaks))
        self.assertEqual(self.series(database, end, "month"), (quarters, peaks))
        self.assertEqual(self.series(database, end, "year"), ({T0: 14}, {T0: 28}))
        self.assertEqual(database.history(*self.TOTAL, "year", end).means[-2:], [7, None])

    def test_the_mean_is_of_the_samples_there_are_and_rounds(self) -> None:
        for samples, expected in (([0, 0, 0], (0, 0)), ([0, 1, 0], (1, 1)), ([1, 2], (2, 2)),
                                  ([1, 1, 2, 0], (1, 2)), ([65_535] * 60, (65_535, 65_535))):
            self.assertEqual(ms.mean_and_peak(samples), struct.pack("<HH", *expected), samples)

    def test_series_end_with_the_last_step_that_is_complete(self) -> None:
        database = self.database()
        for minute in range(0, 150):
            database.sample(T0 + 60 * minute, [self.A + (minute,)])
            for second in (1, 59):
                wall = T0 + 60 * minute + second
                for span, (step, length) in ms.SPANS.items():
                    series = database.history(*self.A, span, wall)
                    end = series.start + length
                    self.assertLessEqual(end, wall + step)
                    late = 2 * ms.MINUTE if step == ms.MINUTE else ms.QUARTER + 2 * ms.MINUTE
                    if minute >= 80:
                        self.assertIsNotNone(series.means[-1], (span, minute))
                        self.assertLessEqual(wall - end, late, (span, minute))

    def test_unknown_servers_and_spans(self) -> None:
        database = self.database()
        for span in ms.SPANS:
            self.assertEqual(self.series(database, T0, span), ({}, {}))
        with self.assertRaises(KeyError):
            database.history(*self.A, "decade", T0)

    def test_a_clock_that_is_set(self) -> None:
        database = self.database()
        database.save([listed_row(1)], set())
        # A leap ahead costs the oldest hour of minutes
        for wall, players in ((T0 - 20 * ms.HOUR, 0), (T0, 1), (T0 + 60, 2), (T0, 9),
                              (T0 + 5 * ms.HOUR, 4)):
            database.sample(wall, [self.A + (players,)])
        end = T0 + 6 * ms.HOUR
        # Back it overwrites, forwards it leaves a gap
        minutes = self.series(database, end)[0]
        self.assertEqual(minutes, {T0: 9, T0 + 60: 2, T0 + 5 * ms.HOUR: 4})
        self.assertEqual(self.series(database, end, "year")[0][T0], 6)          # of 5.5
        for wall in (0, 60, T0 + 50 * ms.YEAR):
            database.sample(wall, [self.A + (3,)])
            self.assertEqual(database.history(*self.A, "year", wall).means[-1], None)
        self.assertEqual(self.series(database, end)[0], minutes)

    def test_a_clock_that_was_ahead_costs_no_quarter_at_a_restart(self) -> None:
        database = self.database()
        for minute in (ms.YEAR // 60, 45, 55):
            database.sample(T0 + 60 * minute, [self.A + (3,)])
        self.database().sample(T0 + 65 * 60, [self.A + (5,)])
        self.assertEqual(self.series(database, T0 + 80 * 60, "week")[0], {T0 + 45 * 60: 3})

    def test_an_hour_of_a_clock_that_is_ahead_costs_little(self) -> None:
        database = self.database()
        database.save([listed_row(1)], set())
        for hour in range(40 * 24):
            database.sample(T0 + hour * ms.HOUR, [self.A + (5,), listed_key(2) + (5,)])
        database.save([listed_row(2, T0 + 39 * ms.DAY)], set())
        database.save([], {listed_key(2)})
        end = T0 + 40 * ms.DAY
        count = lambda span: len(self.series(database, end, span)[0])
        before = count("month"), count("year")
        for minute in range(60):
            database.sample(end + ms.YEAR + 60 * minute, [self.A + (5,)])
        self.assertGreater(before[0], 30 * 24)
        self.assertGreaterEqual(count("month"), before[0] - 6 * 24)
        self.assertGreaterEqual(count("year"), before[1] - 6 * 7 * 24)
        self.assertGreater(before[1] - count("year"), 0)        # or nothing was tried
        self.assertIsNotNone(database.known(*listed_key(2)))

    def test_each_span_stays_whole_and_nothing_stays_for_ever(self) -> None:
        database = self.database()
        gone = listed_key(2)
        database.save([listed_row(2)], set())
        database.save([], {gone})
        for step, span in ((ms.MINUTE, "day"), (ms.QUARTER, "month"), (ms.HOUR, "year")):
            covers, kept, _ = ms.BLOCKS[step]
            for wall in (T0, T0 + ms.QUARTER):
                database.sample(wall, [gone + (5,), self.TOTAL + (5,)])
            for late in (kept - ms.HOUR, kept):
                database.sample(T0 + late, [self.A + (1,)])
            wall = T0 + kept + (step != ms.MINUTE) * ms.MINUTE
            self.assertEqual(database.history(*gone, span, wall).means[0], 5, span)
            self.assertIsNotNone(database.known(*gone))
            for quarter in range(12):
                database.sample(T0 + kept + covers + ms.HOUR + quarter * ms.QUARTER,
                                [self.A + (1,)])
            left = self.sql("SELECT * FROM block WHERE server = 1 AND step = ? AND start < ?",
                            step, T0 + ms.QUARTER)
            self.assertEqual(left, [], span)
        self.assertIsNone(database.known(*gone))
        self.assertIsNotNone(database.known(*self.TOTAL))

    def test_sparklines(self) -> None:
        """Across the end of a week, which is the end of a block."""
        database = self.database()
        start = T0 // ms.WEEK * ms.WEEK + ms.WEEK - 5 * ms.HOUR
        fresh = []
        for quarter in range(30 * 4):
            wall = start + quarter * ms.QUARTER
            players = [self.TOTAL + (1,)] + [self.A + (quarter // 4,)] * (quarter < 7 * 4)
            fresh.append(database.sample(wall, players))
            self.assertIsNone(database.sample(wall + 60, players))      # no quarter has ended
        wall = start + 10 * ms.HOUR + 10
        self.assertEqual(database.recent(wall)[self.A],
                         [None] * 14 + [0, 1, 2, 3, 4, 5, 6] + [None] * 3)
        self.assertEqual(fresh[40], database.recent(wall))
        wall = start + 29 * ms.HOUR + ms.QUARTER + ms.MINUTE
        self.assertEqual(database.recent(wall)[self.A][0], 6)
        # Out of sight, and not a row of gaps
        self.assertNotIn(self.A, database.recent(wall + 2 * ms.HOUR))
        self.assertEqual(database.recent(wall)[self.TOTAL], [1] * 24)

    def test_noise_in_a_block_is_a_gap(self) -> None:
        database = self.database()
        noise = (b"", b"xx", bytes(10_000), "text", None, 5)
        for step, span in ((ms.MINUTE, "day"), (ms.HOUR, "year")):
            for samples in noise:
                database.sample(T0, [self.A + (3,)])
                database.sample(T0 + ms.QUARTER, [self.A + (3,)])
                self.sql("UPDATE block SET samples = ? WHERE step = ?", samples, step)
                self.assertEqual(self.series(database, T0 + 2 * ms.HOUR, span), ({}, {}))
                self.assertNotIn(None, database.recent(T0 + 2 * ms.HOUR))
                database.sample(T0 + ms.QUARTER + 60, [self.A + (4,)])
                database._quarter = -1
        self.assertEqual(database.set_aside, "")


class DamageOnDisk(DatabaseCase):
    def assert_begun_anew(self, data: bytes) -> None:
        self.put(data)
        database = self.database()
        self.use(database)
        self.assertEqual(database.set_aside, self.path + DAMAGED_AT)
        self.assertEqual(os.path.getsize(database.set_aside), len(data))
        self.assertEqual(database.known(*listed_key(87)).last_seen, T0)
        database.close()

    def test_what_is_no_database_is_set_aside(self) -> None:
        data = self.sound()
        noise = random.Random(1).getrandbits(80_000).to_bytes(10_000, "big")
        cases = [b"xx", b"<html>" * 1000, bytes(5000), noise]
        cases += [data[:size] for size in (2, 16, 99, 100, 511, 1024, 4095, 4096, 8192, 12_345,
                                           len(data) // 2, len(data) - 4096)]
        # SQLite reports noise in the head as it does a full disk
        cases += [data[:at] + b"\x09" + data[at + 1:] for at in (16, 19, 47)]
        for case in cases:
            with self.subTest(size=len(case), begins=case[:4]):
                self.assert_begun_anew(case)

    def test_noise_anywhere_raises_nothing(self) -> None:
        data, draw = self.sound(), random.Random(3)
        page = draw.getrandbits(8 * 4096).to_bytes(4096, "big")
        cases = [data[:at] + page + data[at + 4096:] for at in range(0, len(data), 4096)]
        for _ in range(int(os.environ.get("NOISE", 30))):
            broken = bytearray(data)
            for _ in range(draw.choice((1, 10, 100))):
                broken[draw.randrange(100, len(broken))] = draw.randrange(256)
            cases.append(bytes(broken))
        for number, case in enumerate(cases):
            with self.subTest(number=number):
                self.put(case)
                database = self.database()
                self.use(database)
                database.close()

    def test_tables_that_are_not_whole_are_set_aside(self) -> None:
        for statement in ("DROP TABLE block", "ALTER TABLE listed RENAME TO mislaid"):
            self.put(b"")
            self.database().close()
            self.sql(statement)
            database = self.database()
            self.assertEqual(database.set_aside, self.path + DAMAGED_AT, statement)
            self.use(database)
            database.close()

    def test_what_belongs_to_others_stays_as_it_is(self) -> None:
        for statement in ("CREATE TABLE mail (text TEXT)", "PRAGMA user_version = 2",
                          "PRAGMA user_version = 20000"):
            self.put(b"")
            if "mail" not in statement:
                self.database().close()
            self.sql(statement)
            before = self.sql("SELECT sql FROM sqlite_master"), self.sql("PRAGMA user_version")
            database = ms.Database(self.path)
            for _ in range(2):
                with self.assertRaisesRegex(sqlite3.OperationalError, "another program or to a l"):
                    database.load(T0)
            after = self.sql("SELECT sql FROM sqlite_master"), self.sql("PRAGMA user_version")
            self.assertEqual((after, database.set_aside), (before, ""), statement)

    def test_empty_files_and_dumps_that_were_read_again_are_sound(self) -> None:
        self.put(b"")
        database = self.database()
        database.save([listed_row(1)], set())
        database.close()
        with contextlib.closing(sqlite3.connect(self.path)) as db:
            dump = "".join(db.iterdump())
        self.put(b"")
        with contextlib.closing(sqlite3.connect(self.path)) as db:
            db.executescript(dump)
        self.assertEqual((database.load(T0), database.set_aside), ([listed_row(1)], ""))

    def test_damage_while_it_runs(self) -> None:
        self.put(self.sound())
        database = self.database()
        database.close()
        with open(self.path, "r+b") as file:
            file.truncate(6000)
        database.save([listed_row(500)], set())
        self.assertEqual(database.set_aside, self.path + DAMAGED_AT)
        self.assertEqual(database.load(T0), [listed_row(500)])
        self.assertIn("it has been renamed", ms.log.warning.call_args[0][0])

    @unittest.skipUnless(sys.platform == "linux" and sys.implementation.name == "cpython",
                         "no /proc, or it is closed some time later")
    def test_it_is_closed_when_it_is_renamed(self) -> None:
        """Windows renames no open file, and what an error holds is open."""
        replace, still_open = os.replace, []

        def renamed(before: str, after: str) -> None:
            files = map(os.path.realpath, glob.glob("/proc/self/fd/*"))
            still_open.extend(path for path in files if path.startswith(self.path))
            replace(before, after)
        self.put(self.sound().replace(b"first_seen", b"fi\xffst_seen"))
        with mock.patch.object(os, "replace", renamed):
            self.database()
        self.assertEqual((still_open, os.path.exists(self.path + DAMAGED_AT)), ([], True))

    def test_its_logs_go_along(self) -> None:
        suffixes = ("", "-wal", "-shm", "-journal")
        database = ms.Database(self.path)
        database._wall = T0
        for suffix in suffixes:
            with open(self.path + suffix, "w") as file:
                file.write(suffix)
        database._rename_damaged()
        for suffix in suffixes:
            with open(self.path + DAMAGED_AT + suffix) as file:
                self.assertEqual(file.read(), suffix)
            self.assertFalse(os.path.exists(self.path + suffix))

    def test_a_damaged_file_that_cannot_be_renamed(self) -> None:
        self.put(b"noise" * 1000)
        database = ms.Database(self.path)
        self.addCleanup(database.close)
        with mock.patch.object(os, "replace", side_effect=PermissionError(13, "denied")):
            self.assertRaises(PermissionError, database.load, T0)
        self.assertEqual(database.set_aside, "")
        self.assertEqual((database.load(T0), database.set_aside), ([], self.path + DAMAGED_AT))

    @unittest.skipIf(os.name == "nt", "links need a privilege there")
    def test_a_link_to_a_damaged_file(self) -> None:
        """The file is set aside and not the link, and the new one is where the link leads."""
        folder = os.path.join(self.folder, "elsewhere")
        os.mkdir(folder)
        os.symlink(os.path.join(folder, "master.db"), self.path)
        with open(self.path, "wb") as file:
            file.write(b"noise" * 1000)
        self.database().close()
        self.assertTrue(os.path.islink(self.path))
        self.assertEqual(sorted(os.listdir(folder)), ["master.db", "master.db" + DAMAGED_AT])


class TroubleOnDisk(DatabaseCase):
    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        def connect(*arguments: Any, connect: Any = sqlite3.connect, **options: Any) -> Any:
            db = connect(*arguments, **options)
            db.execute("PRAGMA max_page_count = 1")         # at most as many pages as there are
            return db
        with mock.patch.object(sqlite3, "connect", connect):
            yield

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        with contextlib.closing(sqlite3.connect(self.path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        def connect(path: str, *, connect: Any = sqlite3.connect, **options: Any) -> Any:
            return connect("file:%s?mode=ro" % path, uri=True, **options)
        with mock.patch.object(sqlite3, "connect", connect):
            yield

    def test_what_cannot_be_written_is_raised_and_ends(self) -> None:
        rows = [listed_row(number, fields="x" * 4000) for number in range(2, 100)]
        for number, (trouble, error) in enumerate((
                (self.full, "full"), (self.locked, "locked"), (self.read_only, "readonly"))):
            with self.subTest(error):
                self.path = os.path.join(self.folder, "%d.db" % number)
                database = self.database()
                database.save([listed_row(1)], set())
                database.close()
                with trouble():
                    for _ in range(2):
                        with self.assertRaisesRegex(sqlite3.OperationalError, error):
                            database.save(rows, {self.A})
                        self.assertEqual(database.load(T0), [listed_row(1)])    # it can be read
                    database.close()
                database.save([listed_row(3)], set())
                self.assertEqual(database.load(T0), [listed_row(1), listed_row(3)])
                database.close()
                self.assertEqual(self.sql("PRAGMA integrity_check"), [("ok",)])
                self.assertEqual(database.set_aside, "")

    def test_what_cannot_be_opened(self) -> None:
        database = ms.Database(self.path)
        self.addCleanup(database.close)
        os.mkdir(self.path)                         # a folder in its place
        for call in (lambda: database.load(T0), lambda: database.save([listed_row(1)], set())):
            with self.assertRaisesRegex(sqlite3.OperationalError, "(unable to|Could not) open"):
                call()
        os.rmdir(self.path)
        database.save([listed_row(1)], set())
        self.assertEqual(database.load(T0), [listed_row(1)])


# --- Poller --------------------------------------------------------------------------------------

class EchoQuerier(ms.Querier):
    """Its question is its nonce; its answer is the nonce, in as many steps as are wanted."""

    game = "test"

    def __init__(self, steps: int = 1) -> None:
        self.steps = steps
        self.answered: List[ms.Target] = []
        self.silent: List[Tuple[str, int]] = []

    def query(self, target: ms.Target) -> bytes:
        return struct.pack("<I", target.nonce)

    def answer(self, target: ms.Target, data: bytes, now: float) -> bool:
        if data != struct.pack("<I", target.nonce):
            raise ms.Malformed("the wrong nonce")
        target.step += 1
        if target.step < self.steps:
            return False
        self.answered.append(target)
        return True

    def missed(self, target: ms.Target, now: float) -> bool:
        self.silent.append((target.address, target.missed))
        return target.missed >= ms.POLL_MISSED


def address_of(number: int) -> str:
    return "198.18.%d.%d" % (number // 250, number % 250 + 1)


class PollerTest(unittest.TestCase):
    def setUp(self) -> None:
        self.poller = make_core().poller
        self.querier = EchoQuerier()

    def run_seconds(self, poller: ms.Poller, seconds: Iterable[int],
                    silent: Sequence[str] = ()) -> List[List[str]]:
        """Who was asked in each second; all but the silent ones answer at once."""
        asked = []
        for second in seconds:
            queries = list(poller.tick(float(second)))
            for data, peer in queries:                  # grows: the next step is asked at once
                if peer[0] not in silent:
                    queries += poller.datagram(data, peer, second + 0.01)
            asked.append([peer[0] for _, peer in queries])
        return asked

    def test_queries_are_spread_over_the_interval(self) -> None:
        for interval, most in (30, 19), (10, 52), (5, 102):
            poller = make_core(poll__interval=str(interval)).poller
            for number in range(500):
                poller.add(self.querier, address_of(number), 5000, in_turn=True)
            asked = self.run_seconds(poller, range(6 * interval))
            for start in range(0, 5 * interval, interval):
                with self.subTest(interval=interval, start=start):
                    turn = asked[start:start + interval + 1]
                    self.assertEqual(len(set(sum(turn, []))), 500)
            self.assertLessEqual(max(map(len, asked[interval:])), most)

    def test_a_new_server_is_asked_at_the_next_tick_however_many_take_their_turn(self) -> None:
        for number in range(500):
            self.poller.add(self.querier, address_of(number), 5000, pinned=True)
        self.poller.tick(0.0)
        self.poller.add(self.querier, "203.0.113.9", 5000)
        asked = [peer for _, peer in self.poller.tick(1.0)]
        self.assertIn(("203.0.113.9", 5000), asked)
        self.assertLess(len(asked), 50)

    def test_the_rate_holds_for_long_answers_too(self) -> None:
        poller, querier = make_core(poll__rate="4").poller, EchoQuerier(steps=3)
        for number in range(20):
            poller.add(querier, address_of(number), 5000)
        asked = self.run_seconds(poller, range(15))
        self.assertEqual([len(second) for second in asked], [4] * 15)
        self.assertEqual({target.address for target in querier.answered},
                         {address_of(number) for number in range(20)})

    def test_an_answer_counts_only_from_where_and_to_what_was_asked(self) -> None:
        target = self.poller.add(self.querier, "203.0.113.9", 5000)
        [(data, peer)] = self.poller.tick(1.0)
        for stray, source in ((data, ("203.0.113.9", 5001)), (data, ("203.0.113.8", 5000)),
                              (b"junk", peer), (b"", peer)):
            with self.assertRaises(ms.Malformed):
                self.poller.datagram(stray, source, 1.1)
        self.assertEqual(self.querier.answered, [])
        mapped = ("::ffff:203.0.113.9", 5000, 0, 0)
        self.assertEqual(self.poller.datagram(data, mapped, 1.25), [])
        self.assertEqual(self.querier.answered, [target])
        self.assertAlmostEqual(target.ping_ms, 250)
        with self.assertRaises(ms.Malformed):                       # the same once more
            self.poller.datagram(data, peer, 1.3)

    def test_two_games_at_one_endpoint(self) -> None:
        other = EchoQuerier()
        other.game, other.offset = "other", 1
        self.poller.add(self.querier, "203.0.113.9", 5001)
        self.poller.add(other, "203.0.113.9", 5000)
        for data, peer in self.poller.tick(1.0):
            self.assertEqual(peer, ("203.0.113.9", 5001))
            self.poller.datagram(data, peer, 1.1)
        self.assertEqual((len(self.querier.answered), len(other.answered)), (1, 1))

    def test_a_lost_answer_is_asked_for_again_with_another_nonce(self) -> None:
        self.poller.add(self.querier, "203.0.113.9", 5000)
        [(first, peer)] = self.poller.tick(1.0)
        self.assertEqual(self.poller.tick(3.9), [])
        [(second, again)] = self.poller.tick(4.0)
        self.assertEqual((again, self.querier.silent), (peer, []))
        with self.assertRaises(ms.Malformed):                       # the first one's, too late
            self.poller.datagram(first, peer, 4.1)
        self.poller.datagram(second, peer, 4.2)
        self.assertEqual(len(self.querier.answered), 1)

    def test_three_missed_polls_in_a_row(self) -> None:
        target = self.poller.add(self.querier, "203.0.113.9", 5000)
        asked = 0
        for second in range(300):
            for data, peer in self.poller.tick(float(second)):
                asked += 1
                if asked == 5:                          # two polls of two questions have gone by
                    self.poller.datagram(data, peer, second + 0.1)
        missed = [("203.0.113.9", number) for number in (1, 2, 1, 2, 3)]
        self.assertEqual((self.querier.silent, asked), (missed, 4 + 1 + 6))
        self.assertEqual((self.poller.targets, self.poller.counts["test"]), ({}, {}))
        self.poller.remove(target)                                  # twice does no harm

    def test_polls_go_on_at_the_interval(self) -> None:
        self.poller.add(self.querier, "203.0.113.9", 5000)
        asked = self.run_seconds(self.poller, range(400))
        times = [second for second, peers in enumerate(asked) if peers]
        gaps = [later - sooner for sooner, later in zip(times[1:], times[2:])]
        self.assertEqual((set(gaps), len(gaps)), ({30}, 12))

    def test_one_source_cannot_have_thousands_asked(self) -> None:
        for port in range(1, 33):
            self.assertEqual(self.poller.crowded(self.querier, "203.0.113.9"), "")
            self.poller.add(self.querier, "203.0.113.9", port)
        for address, crowded in (("203.0.113.9", True), ("203.0.113.8", False)):
            self.assertEqual(bool(self.poller.crowded(self.querier, address)), crowded, address)
        for port in range(1, 40):
            self.poller.add(self.querier, "127.0.0.1", port)
        self.assertEqual(self.poller.crowded(self.querier, "127.0.0.1"), "")        # exempt

    def test_who_is_removed_is_soon_forgotten(self) -> None:
        poller = make_core(poll__interval="3600").poller
        for second in range(1000):
            target = poller.add(self.querier, address_of(second), 5000)
            self.run_seconds(poller, [second])
            poller.remove(target)
        self.assertLess(len(poller.queue), 110)


class EchoGame(EchoQuerier, ms.PolledGame):
    """A game whose servers are listed while they return the nonce."""

    offset = 1

    def __init__(self, core: ms.Core) -> None:
        EchoQuerier.__init__(self)
        ms.PolledGame.__init__(self, core)

    def answer(self, target: ms.Target, data: bytes, now: float) -> bool:
        super().answer(target, data, now)
        self.take(target, {"name": "Echo", "verified": "query", "responding": True}, now)
        return True

    missed = ms.PolledGame.missed


class PolledGameTest(unittest.TestCase):
    def setUp(self) -> None:
        self.lookups: List[Tuple[str, Callable[[str, float], None]]] = []
        self.core = make_core()._replace(
            resolve=lambda host, done: self.lookups.append((host, done)))
        self.game, self.poller = EchoGame(self.core), self.core.poller

    def poll(self, seconds: Iterable[int], silent: Sequence[str] = ()) -> None:
        PollerTest.run_seconds(self, self.poller, seconds, silent)      # type: ignore[arg-type]

    def listed(self) -> List[Tuple[str, int, bool]]:
        return [(server.address, server.port, server.responding)
                for server in self.core.registry.servers("test")]

    def targets(self) -> Set[Tuple[str, int]]:
        return {key[1:] for key in self.poller.targets}

    def test_listed_while_it_answers(self) -> None:
        self.poller.add(self.game, "203.0.113.9", 5000)
        self.poll(range(2))
        self.assertEqual(self.listed(), [("203.0.113.9", 5000, True)])
        heard = self.core.registry.heard["203.0.113.9", "test", 5000]
        self.assertEqual(heard[1], "listed")
        self.poll(range(2, 60), silent=["203.0.113.9"])
        self.assertEqual(len(self.listed()), 1)
        self.poll(range(60, 150), silent=["203.0.113.9"])
        self.assertEqual((self.listed(), self.targets()), ([], set()))
        heard = self.core.registry.heard["203.0.113.9", "test", 5000]
        self.assertEqual(heard[1:], ("silent", "no answer from UDP port 5001"))

    def test_an_answer_that_cannot_be_read_is_told(self) -> None:
        self.poller.add(self.game, "203.0.113.9", 5000)
        for second in range(7):
            for _, peer in self.poller.tick(float(second)):
                self.assertRaises(ms.Malformed, self.poller.datagram, b"junk", peer, second + 0.1)
        self.assertEqual(self.core.registry.heard["203.0.113.9", "test", 5000][1:], (
            "bad packet", "its answer from UDP port 5001: the wrong nonce"))

    def test_who_is_refused_is_asked_no_more(self) -> None:
        self.core.registry.rules.read(ms.Settings({"server.refuse_names": "Echo"}))
        self.poller.add(self.game, "203.0.113.9", 5000)
        self.poll(range(2))
        self.assertEqual((self.listed(), self.targets()), ([], set()))
        self.assertEqual(self.core.registry.heard["203.0.113.9", "test", 5000][1], "name")

    def test_who_leaves_or_stops_is_asked_no_more_and_who_is_restored_is(self) -> None:
        for end in (lambda: self.core.registry.remove(self.core.registry.servers()[0]),
                    lambda: self.assertTrue(self.game.stopped("203.0.113.9", 5000))):
            server = ms.Server("test", "203.0.113.9", 5000, "203.0.113.9", 0.0, math.inf)
            self.core.registry.insert(server)
            self.assertEqual(self.targets(), {("203.0.113.9", 5000)})
            end()
            self.assertEqual(self.targets(), set())
            self.core.registry.remove(server)
        self.assertFalse(self.game.stopped("203.0.113.9", 5000))

    def test_what_the_ini_names_is_shown_as_not_responding(self) -> None:
        self.game.read_pinned([("203.0.113.9", 5000)])
        self.game.resolve_pinned(0.0)
        self.poll(range(40), silent=["203.0.113.9"])
        self.assertEqual(self.listed(), [("203.0.113.9", 5000, False)])
        self.poll(range(40, 80))
        self.assertEqual(self.listed(), [("203.0.113.9", 5000, True)])
        self.assertFalse(self.game.stopped("198.51.100.1", 5000))
        self.assertTrue(self.game.stopped("203.0.113.9", 5000))         # it stays a target
        self.poll(range(80, 250), silent=["203.0.113.9"])
        self.assertEqual(self.listed(), [("203.0.113.9", 5000, False)])
        self.game.read_pinned([])
        self.assertEqual((self.listed(), self.targets()), ([], set()))

    def test_names_are_looked_up_away_from_the_loop_and_again(self) -> None:
        self.game.read_pinned([("a.example", 5000), ("203.0.113.9", 6000)])
        self.game.resolve_pinned(0.0)
        self.assertEqual(self.targets(), {("203.0.113.9", 6000)})       # it waits for no name
        self.lookups[0][1]("203.0.113.1", 1.0)
        self.assertEqual(self.targets(), {("203.0.113.9", 6000), ("203.0.113.1", 5000)})
        self.game.resolve_pinned(59.0)
        self.assertEqual(len(self.lookups), 1)
        for now in (60.0, 659.0, 660.0):
            self.game.resolve_pinned(now)
        self.assertEqual([host for host, _ in self.lookups], ["a.example"] * 3)
        self.lookups[2][1]("203.0.113.2", 661.0)                        # it moved
        self.assertEqual(self.targets(), {("203.0.113.9", 6000), ("203.0.113.2", 5000)})
        self.game.read_pinned([("203.0.113.9", 6000)])
        self.lookups[1][1]("203.0.113.3", 662.0)                        # too late
        self.assertEqual(self.targets(), {("203.0.113.9", 6000)})

    def test_a_name_that_leads_nowhere(self) -> None:
        self.game.read_pinned([("a.example", 5000)])
        with self.assertLogs("masterserver", "WARNING") as logged:
            for number, address in enumerate(("", "0.0.0.0", "")):
                self.game.resolve_pinned(60.0 * number)
                self.assertEqual(len(self.lookups), number + 1)
                self.lookups[-1][1](address, 60.0 * number)
        self.assertEqual((len(logged.records), self.targets()), (1, set()))
        self.game.resolve_pinned(180.0)
        self.lookups[-1][1]("203.0.113.1", 180.0)
        self.assertEqual(self.targets(), {("203.0.113.1", 5000)})

    def test_what_the_ini_named_before_a_restart_goes(self) -> None:
        for number, pinned in (1, True), (2, True), (3, False):
            address = "203.0.113.%d" % number
            server = ms.Server("test", address, 5000, address, 0.0, math.inf)
            server.pinned = pinned
            self.core.registry.insert(server)
        self.game.read_pinned([("a.example", 5000)])
        self.game.resolve_pinned(0.0)
        self.lookups[0][1]("203.0.113.2", 1.0)
        self.assertEqual(len(self.listed()), 3)
        self.game.resolve_pinned(60.0)
        self.assertEqual([address for address, _, _ in self.listed()],
                         ["203.0.113.2", "203.0.113.3"])


# --- Iceball -------------------------------------------------------------------------------------

# A capture of the dedicated server of Iceball 0.2.1-37, game port 21737, 0 of 64 players
# (PROTOCOLS, section 1)
CAPTURED = hexa("31434542 0200 25808000 e954 0000 4000"
                "4963656261 6c6c20536572766572" + "00" * 16 +
                "63746600000000000000" +
                "636c6173736963283531322c35313229" + "00" * 14)


def announcement(port: int = 20737, players: int = 0, maximum: int = 64, name: bytes = b"S",
                 mode: bytes = b"ctf", map: bytes = b"m", hbversion: int = 2,
                 version: int = 8421413) -> bytes:
    """By the document's layout."""
    numbers = struct.pack("<HIHHH", hbversion, version, port, players, maximum)
    texts = name.ljust(30, b"\0") + mode.ljust(10, b"\0") + map.ljust(30, b"\0")
    return b"1CEB" + numbers + texts


def encoded_twice(text: str) -> bytes:
    """As the dedicated server does: its JSON reader takes each byte of its ini for a character."""
    return text.encode().decode("latin-1").encode()


class IceballCase(unittest.TestCase):
    peer = ("203.0.113.9", 40000)

    def setUp(self) -> None:
        self.start()

    def start(self, **settings: str) -> None:
        self.core = make_core(**settings)
        self.registry, self.rules = self.core.registry, self.core.registry.rules
        self.iceball = ms.Iceball(self.core)

    def send(self, data: bytes, now: float = 0.0, peer: Tuple[str, int] = peer) -> bytes:
        """Its answer; b"" for none."""
        answer, = self.repeated([data], now, peer)
        if answer is not None:
            return answer
        replies = self.iceball.datagram(data, peer, now)
        self.assertEqual([to for _, to in replies], [peer] * len(replies))
        return b"".join(reply for reply, _ in replies)

    def repeated(self, data: Sequence[bytes], now: float = 0.0,
                 peer: Tuple[str, int] = peer) -> List[Optional[bytes]]:
        return list(self.iceball.repeated(data, [peer] * len(data), now))

    def shake(self, data: bytes, now: float = 0.0, peer: Tuple[str, int] = peer) -> ms.Server:
        """Announce a server and return the cookie."""
        msok = self.send(data, now, peer)
        self.assertEqual(msok[:4], b"MSOK")
        self.assertEqual(self.send(b"HSHK" + msok[4:], now, peer), b"")
        port = data[10] | data[11] << 8
        server, = [server for server in self.registry.servers() if server.port == port]
        return server

    def outcome(self, port: int = 0, source: str = "203.0.113.9") -> str:
        """What /check says of it."""
        return ": ".join(self.registry.heard[source, "iceball", port][1:])

    def places(self) -> List[Tuple[str, int]]:
        return [(server.address, server.port) for server in self.registry.servers()]


class IceballTest(IceballCase):
    def test_the_capture_gets_listed_by_its_handshake(self) -> None:
        msok = self.send(CAPTURED)
        self.assertEqual((msok[:4], len(msok) <= 86), (b"MSOK", True))
        self.assertEqual((self.places(), self.outcome(21737)), ([], "announced: "))
        self.assertEqual(self.send(b"HSHK" + msok[4:], 0.005), b"")
        server, = self.registry.servers()
        for name, value in (
                ("address", "203.0.113.9"), ("port", 21737), ("name", "Iceball Server"),
                ("players", 0), ("max_players", 64), ("mode", "ctf"), ("map", "classic(512,512)"),
                ("version", "0.2.1-37"), ("verified", "handshake"), ("last_seen", 0.005)):
            self.assertEqual(getattr(server, name), value, name)
        self.assertEqual(self.outcome(21737), "listed: ")

    def test_versions_as_text(self) -> None:
        for number, text in (
                (8421413, "0.2.1-37"), (1 << 27 | 3 << 22, "1.3"), (2 << 22 | 1 << 10, "0.2a"),
                (2 << 22 | 1 << 15 | 30 << 10 | 5, "0.2.1~-5"), (2 << 22 | 7, "0.2-7")):
            self.assertEqual(ms.iceball_version_text(number), text)
            self.assertEqual(ms.read_iceball_version(text), number)
        self.assertEqual(ms.iceball_version_text(31 << 10), "0.0")

    def test_names_as_their_owners_wrote_them(self) -> None:
        for sent, name in (
                (hexa("c383 c29c 6e c383 c2af"), "Ünï"),                        # captured
                (encoded_twice("漢字 Ü x"), "漢字 Ü x"),
                (encoded_twice("x" * 26 + "Ü"), "x" * 26 + "Ü"),                # just fits
                (encoded_twice("x" * 27 + "Ü")[:30], "x" * 27),                 # cut in its middle
                (encoded_twice("x" * 28 + "Ü")[:30], "x" * 28),
                (encoded_twice("x" * 29 + "Ü")[:30], "x" * 29),
                (encoded_twice("x漢漢漢漢漢")[:30], "x漢漢漢漢"),
                (hexa("c383 c29c 6e c383"), "Ün"),
                ("é".encode(), "é"), ("VilÃ".encode(), "VilÃ"), ("Größe".encode(), "Größe"),
                ("é 漢字".encode(), "é 漢字"), (b"Iceball", "Iceball"),
                (("x" * 28 + "漢").encode()[:30], "x" * 28), (b"\xff\xfe<b>", "\ufffd\ufffd<b>"),
                (b"n" * 30, "n" * 30), (b"ab\0garbage", "ab")):
            server = self.shake(announcement(name=sent, map=sent))
            self.assertEqual((server.name, server.map), (name, name), sent)

    def test_fields_at_their_limits(self) -> None:
        server = self.shake(announcement(name=b"N" * 30, mode=b"M" * 10, map=b"P" * 30))
        self.assertEqual((server.name, server.mode, server.map), ("N" * 30, "M" * 10, "P" * 30))
        for players, maximum, listed in (99, 64, 64), (9, 0, 0), (65535, 65535, 65535):
            server = self.shake(announcement(players=players, maximum=maximum))
            self.assertEqual((server.players, server.max_players), (listed, maximum))
        self.send(b"HSHK" + self.send(announcement(port=0))[4:])
        self.assertEqual(self.outcome(), "bad packet: port 0 cannot be listed")

    def test_nothing_unproven_changes_a_listed_server(self) -> None:
        server = self.shake(CAPTURED)
        before = [getattr(server, name) for name in ms.Server.__slots__]
        generation = self.registry.generation
        for at in [*range(6, 10), *range(12, 86)]:              # all but the port
            forged = CAPTURED[:at] + bytes([CAPTURED[at] ^ 1]) + CAPTURED[at + 1:]
            self.assertEqual(self.send(forged, 1.0)[:4], b"MSOK")
        self.send(CAPTURED, 1.0, ("203.0.113.90", 40000))
        self.assertEqual([getattr(server, name) for name in ms.Server.__slots__], before)
        self.assertEqual((self.registry.generation, self.outcome(21737)), (generation, "listed: "))

    def test_a_change_counts_with_its_handshake(self) -> None:
        late = self.send(announcement(players=1))
        server = self.shake(announcement(players=1))
        changed = announcement(players=2, name=b"T")
        msok = self.send(changed, 1.0, ("203.0.113.9", 50123))
        self.assertEqual(server.players, 1)
        self.send(b"HSHK" + msok[4:], 1.0)
        self.assertEqual((server.players, server.name, server.last_seen), (2, "T", 1.0))
        self.assertEqual((len(self.places()), len(self.iceball.known)), (1, 1))
        self.send(b"HSHK" + late[4:], 2.0)              # sets it back until it speaks again
        self.assertEqual((self.repeated([changed]), self.shake(changed).players), ([None], 2))

    def test_what_is_a_repetition_and_what_is_not(self) -> None:
        other, same = announcement(), b"MSOKsame"
        for fingerprint in ms.fingerprint, tuple:           # tuple: as with 32 bits
            with mock.patch.object(ms, "fingerprint", fingerprint):
                self.start()
                self.assertEqual(self.repeated([CAPTURED]), [None])
                captured, server = self.shake(CAPTURED), self.shake(other)
                for data, source in ((other[:-1], "203.0.113.9"), (other + b"\0", "203.0.113.9"),
                                     (other, "203.0.113.90"), (other + b"2", "03.0.113.9")):
                    self.assertEqual(self.repeated([data], 1.0, (source, 40000)), [None])
                self.assertEqual(self.repeated([b"?", other, CAPTURED, other], 3.0),
                                 [None, same, same, same])
                self.assertEqual(self.send(b"HSHKsame", 3.0), b"")
                self.assertEqual(self.repeated([other], 4.0, ("203.0.113.9", 50000)), [same])
                self.assertEqual((captured.last_seen, server.last_seen), (3.0, 4.0))
                self.shake(announcement(players=1), 5.0)
                self.assertEqual(self.repeated([other, announcement(players=1)]), [None, same])
                self.registry.remove(server)
                self.assertEqual(self.repeated([announcement(players=1), CAPTURED]), [None, same])
                self.iceball.read(self.core.settings)
                self.assertEqual(self.repeated([CAPTURED]), [None])

    def test_gone_after_120_s_and_not_before(self) -> None:
        self.shake(CAPTURED, 10.0)
        for now in 11.0, 12.0, 50.0:
            self.assertEqual(self.send(CAPTURED, now), b"MSOKsame")
        for now, listed in (169.9, 1), (170.0, 0):
            self.registry.expire(now)
            self.assertEqual(len(self.places()), listed)
        self.assertEqual(self.repeated([CAPTURED], 171.0), [None])

    def test_who_answers_no_msok_leaves_whatever_is_announced_in_its_name(self) -> None:
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

    def test_what_proves_nothing_lists_nothing(self) -> None:
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
        self.registry.remove(self.registry.servers()[0])
        self.assertRaises(ms.Malformed, self.send, good, 60.0)              # older than two windows
        self.assertEqual(self.places(), [])

    def test_a_cookie_is_none_for_an_address_with_a_digit_more(self) -> None:
        msok = self.send(announcement(version=ord("0")))
        stolen = b"HSHK" + msok[4:12] + msok[13:]               # the version's "0" to the address
        self.assertRaises(ms.Malformed, self.send, stolen, 0.0, ("203.0.113.90", 40000))

    def test_how_long_msok_is(self) -> None:
        for map_bytes, size in (0, 62), (24, 86), (30, 92):
            data = announcement(name=b"N" * 30, mode=b"M" * 10, map=b"P" * map_bytes)
            self.assertLessEqual(len(self.send(data)), size)
        self.rules.surplus.set_rate((0.01, 1))          # a flood has had the few bytes more
        self.assertEqual(len(self.send(data)), 86)
        self.assertEqual((self.shake(data).map, self.repeated([data])), ("P" * 24, [None]))
        self.assertEqual(len(self.send(data)), 92)      # now that one of its address is listed
        self.assertEqual((self.shake(data).map, self.repeated([data])), ("P" * 30, [b"MSOKsame"]))

    def test_which_versions_are_welcome(self) -> None:
        for accepted, version, good in (
                ("", "0.1", True), ("0.2.1", "0.2.1-37", True), ("0.2.1", "0.2.1", True),
                ("0.2.1", "0.2.1a-1", False), ("0.2.1, 0.3-5", "0.3-5", True),
                ("0.3-5", "0.3-50", False), ("0.3-5", "0.3", False)):
            self.start(iceball__accept_versions=accepted)
            answer = self.send(announcement(version=ms.read_iceball_version(version)))
            expected = b"MSOK" if good else b"BADV"
            self.assertEqual(answer[:4], expected, (accepted, version))

    def test_reproaches(self) -> None:
        badv, old = hexa("42414456 0200 25808000"), announcement(version=7)
        for sent, answer, outcome in (
                (announcement(hbversion=3)[:10], badv, "version: heartbeat version 3, only 2"),
                (announcement(hbversion=258), badv, "version: heartbeat version 258, only 2"),
                (old, badv, "version: Iceball version 0.0-7, only 0.2.1"),
                (old[:50], badv, "version: Iceball version 0.0-7, only 0.2.1"),
                (CAPTURED[:-1], b"BADF", "bad packet: length: 85 bytes instead of 86"),
                (CAPTURED + b"\0", b"BADF", "bad packet: length: 87 bytes instead of 86")):
            self.start(iceball__accept_versions="0.2.1")
            self.assertEqual((self.send(sent), self.outcome()), (answer, outcome))
        self.start(iceball__version="0.3")
        self.assertEqual(self.send(old[:50])[:4] + self.send(announcement(hbversion=1)),
                         b"BADF" + hexa("42414456 0200 0000c000"))

    def test_no_reproach_to_a_flood_or_for_whom_a_server_is_listed(self) -> None:
        """A deployed server that gets one stops announcing to every master."""
        bad = announcement(hbversion=7), CAPTURED[:50]
        for source, listed, told in (("127.0.0.1", True, 20), ("203.0.113.77", True, 0),
                                     ("203.0.113.77", False, 5)):
            self.start(limits__exempt="127.0.0.0/8, 203.0.113.0/24")
            if listed:
                self.shake(CAPTURED, 0.0, (source, 1))
            answers = 0
            for number in range(20):
                with contextlib.suppress(ms.Malformed):
                    answers += self.send(bad[number % 2], 0.0, (source, number))[:3] == b"BAD"
            self.assertEqual(answers, told, (source, listed))
            self.assertRegex(self.outcome(0, source), "only 2|length")

    def test_what_cannot_be_read_is_told_at_check(self) -> None:
        for data, why in (
                (b"1CEB", "an announcement too short for its versions"),
                (CAPTURED[:9], "an announcement too short for its versions"),
                (b"HSHK" + bytes(80), "a cookie that went to another address, or is older than"),
                (b"", "neither 1CEB nor HSHK nor a packet of the first draft"),
                (b"\x08\xff", "neither 1CEB nor HSHK nor a packet of the first draft")):
            self.start()
            self.assertRaisesRegex(ms.Malformed, why, self.send, data)
            self.assertIn("bad packet: " + why, self.outcome())

    def test_refused(self) -> None:
        self.start(server__refuse_names="casino", limits__servers="1")
        self.shake(CAPTURED)
        for port, name, outcome in (1, b"S", "limit"), (21737, b"Casino", "name"):
            self.send(b"HSHK" + self.send(announcement(port, name=name))[4:], 1.0)
            self.assertRegex(self.outcome(port), "^" + outcome)
        self.assertEqual([server.name for server in self.registry.servers()], ["Iceball Server"])

    def test_a_reload_is_heeded_by_servers_that_are_listed(self) -> None:
        self.shake(CAPTURED)
        reload(self.core, self.iceball, iceball__accept_versions="0.3")
        self.assertRaisesRegex(ms.Malformed, "version", self.send, CAPTURED)
        reload(self.core, self.iceball, **{"address_map.203.0.113.9": "198.51.100.7"})
        self.shake(CAPTURED)
        self.assertEqual(self.places(), [("198.51.100.7", 21737)])

    def test_two_sources_of_one_listed_address(self) -> None:
        self.rules.address_map = {"192.168.1.5": "203.0.113.9"}
        server = self.shake(announcement(name=b"Mine"), 0.0, ("192.168.1.5", 1))
        self.send(announcement(name=b"Evil"), 1.0)
        self.assertEqual((server.name, server.source), ("Mine", "192.168.1.5"))
        self.assertEqual(self.places(), [("203.0.113.9", 20737)])
        self.shake(announcement(name=b"Moved"), 2.0)
        self.assertEqual((server.name, server.source), ("Moved", "203.0.113.9"))

    def test_a_flood_of_strangers_leaves_nothing_behind(self) -> None:
        counted = getattr(sys, "getallocatedblocks", int)           # PyPy cannot count
        blocks = []
        for number in range(12000):             # after half of them every bounded table is full
            if number % 6000 == 5999:
                blocks.append(counted())
            peer = "61.%d.%d.9" % (number >> 8, number & 255), 1
            self.iceball.datagram(announcement(1 + number), peer, number / 100)
            self.iceball.datagram(hexa("01 0100 0151 00"), peer, number / 100)
        self.assertLess(blocks[1] - blocks[0], 1000, "one in six leaves an object")


class IceballDraftTest(IceballCase):
    """The document's layouts; no released program speaks it."""

    def request(self, now: float = 0.0, peer: Tuple[str, int] = IceballCase.peer,
                claim: bytes = b"") -> bytes:
        reply = self.send(hexa("01 0100 0151") + claim + b"\0", now, peer)
        self.assertEqual((reply[:1], reply[5:7]), (b"\2", hexa("0151")))
        return reply[1:5]

    def open(self, now: float = 0.0, peer: Tuple[str, int] = IceballCase.peer,
             claim: bytes = b"") -> bytes:
        identity = self.request(now, peer, claim)
        self.assertEqual(self.send(b"\5" + identity, now, peer), b"")
        return identity

    def test_a_session(self) -> None:
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

    def test_without_the_id_nothing(self) -> None:
        identity = self.open()
        forged = bytes([identity[0] ^ 1]) + identity[1:]
        for data, peer in ((b"\3" + forged + b"\1Evil\0", self.peer), (b"\5", self.peer),
                           (b"\3" + identity + b"\1Evil\0", ("203.0.113.10", 40000)),
                           (b"\3" + identity + b"\1Evil\0", ("203.0.113.9", 40001))):
            self.assertEqual(self.send(data, 1.0, peer), b"\6")
        server, = self.registry.servers()
        self.assertEqual((server.name, server.last_seen), ("203.0.113.9:20737", 0.0))

    def test_silence_ends_the_session(self) -> None:
        identity = self.open()
        for now in 30.0, 149.0:
            self.assertEqual(self.send(b"\5" + identity, now), b"")
        for now, listed in (268.9, 1), (269.0, 0):
            self.registry.expire(now)
            self.assertEqual(len(self.places()), listed)
        self.assertEqual(self.send(b"\5" + identity, 270.0), b"\6")

    def test_a_new_id_replaces_the_old(self) -> None:
        first, away = self.open(), ("203.0.113.9", 40001)
        self.assertNotEqual(first, self.open(31.0))
        self.assertEqual(self.send(b"\5" + first, 31.0), b"\6")
        self.open(32.0, away)                               # the same server from another port
        self.assertEqual((list(self.iceball.draft.sessions), len(self.places())), ([away], 1))
        self.shake(announcement(20737), 33.0)               # and in the current form
        self.assertEqual((len(self.iceball.draft.sessions), len(self.places())), (0, 1))
        self.open(34.0)
        self.assertEqual(self.repeated([announcement(20737)], 35.0), [None])

    def test_a_flood_of_requests_gets_no_more_than_its_share(self) -> None:
        self.rules.surplus.set_rate((0.01, 1))
        self.assertEqual(self.send(hexa("01 0100 0151 00")), b"")
        self.request(0.0, self.peer, b"a claimed address")          # not longer than the request

    def test_refused(self) -> None:
        self.start(server__refuse_names="casino", limits__servers="1")
        identity = self.open()
        refused, mode = b"\3" + identity + b"\1Casino\0", b"\3" + identity + b"\2casino\0"
        self.assertRaisesRegex(ms.Malformed, "casino", self.send, refused)
        self.assertEqual(self.send(mode), mode)
        self.assertEqual(self.registry.servers()[0].name, "203.0.113.9:20737")
        other = "203.0.113.10", 40000
        self.assertEqual(self.send(b"\5" + self.request(0.0, other), 0.0, other), b"\6")
        self.assertRegex(self.outcome(20737, other[0]), "^limit")

    def test_claimed_address(self) -> None:
        for source, claim, listed in (
                ("203.0.113.9", b"198.51.100.1", "203.0.113.9"),
                ("192.168.1.5", b"198.51.100.1", "198.51.100.1"),
                ("192.168.1.6", b"nonsense", "192.168.1.6")):
            self.start()
            reply = self.send(hexa("01 0100 0151") + claim + b"\0", 0.0, (source, 1))
            self.open(0.0, (source, 40000), claim)
            self.assertEqual(reply[7:], listed.encode() + b"\0")
            self.assertEqual(self.places(), [(listed, 20737)])

    def test_bad_packets(self) -> None:
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


def hyperbol_reply(**changed: bytes) -> bytes:
    """229 bytes by the table of offsets; o5=b"name" puts another value at offset 5."""
    reply = b"".join(changed.get("o%d" % offset, value).ljust(size, b"\0")
                     for offset, size, value in HYPERBOL_REPLY)
    assert len(reply) == 229
    return reply


class HyperbolTest(unittest.TestCase):
    here = "203.0.113.9", 27888

    def start(self, servers: str = "", **settings: str) -> None:
        self.core = make_core(hyperbol__servers=servers, **settings)
        self.registry, self.poller = self.core.registry, self.core.poller
        self.hyperbol = ms.Hyperbol(self.core)
        # Game servers that answer, with what they change in the reply
        self.answers: Dict[Tuple[str, int], Dict[str, bytes]] = {}
        self.now = 0.0

    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.hyperbol.tick(self.now)
            for query, peer in self.poller.tick(self.now):
                self.assertEqual((len(query), query[0]), (5, 2))
                if peer in self.answers:
                    reply = hyperbol_reply(o1=query[1:], **self.answers[peer])
                    self.poller.datagram(reply, peer, self.now + 0.04)

    def announce(self, *places: Tuple[str, int]) -> None:
        for source, port in places:
            self.hyperbol.announced(source, port, {"flavor": 9}, self.now)

    def greeted(self) -> Tuple[ms.Session, bytes]:
        session = self.hyperbol.session("203.0.113.50", self.now)
        return session, session.opened(self.now)

    def get_list(self, filter: str = "ff000000", size: int = 8) -> bytes:
        session, greeting = self.greeted()
        answer = feed(session, greeting[4:8] + hexa(filter), size, self.now)
        self.assertTrue(session.done)
        return answer

    def players(self) -> int:
        return int.from_bytes(self.greeted()[1][8:], "little")

    def listed(self, *names: str) -> List[Any]:
        """These attributes of each server, by address and port."""
        servers = sorted(self.registry.servers("hyperbol"), key=lambda s: (s.address, s.port))
        return [tuple(getattr(server, name) for name in names) for server in servers]

    def outcome(self, source: str = "203.0.113.9", port: int = 27888) -> str:
        return self.registry.heard[source, "hyperbol", port][1]

    def test_reply_by_the_table_of_offsets(self) -> None:
        self.assertEqual(ms.hyperbol_info(hyperbol_reply(), 0x11223344), {
            "name": "Fun & Games", "mode": "Capture the Core", "map": "orbital",
            "version": "1.8a", "players": 5, "max_players": 16,
            "details": {"skill": "9", "flags": "0x8000000d",
                        "factions": "IMF 3, Syndicate 1, Republic 2"}})
        for offset, sent, name, value in (
                (5, b"n" * 32, "name", "n" * 32), (37, b"g" * 32, "mode", "g" * 32),
                (72, b"m" * 64, "map", "m" * 64), (169, b"v" * 16, "version", "v" * 16),
                (5, b"left\0right", "name", "left"), (5, b"caf\xe9", "name", "café"),
                (69, b"\xff", "players", 255), (70, b"\xfe", "max_players", 254)):
            reply = hyperbol_reply(**{"o%d" % offset: sent})
            self.assertEqual(ms.hyperbol_info(reply, 0x11223344)[name], value)
        for none in (b"", hyperbol_reply()[:228], hyperbol_reply(o0=b"\x1a"),
                     hyperbol_reply(o1=b"\x44\x33\x22\x10")):
            self.assertRaises(ms.Malformed, ms.hyperbol_info, none, 0x11223344)

    def test_list_as_the_document_lays_it_out(self) -> None:
        self.start("203.0.113.9:27888 3\n203.0.113.10:1 0\n203.0.113.11:1 5\n[2001:db8::1]:1 5")
        self.answers = {self.here: {}, ("203.0.113.10", 1): {"o69": b"\x04"},
                        ("2001:db8::1", 1): {"o69": b"\x04"}}
        self.pass_time(30)                      # 203.0.113.11 is silent
        official, other = hexa("cb007109 f06c0000 03 000000"), hexa("cb00710a 01000000 00 000000")
        for size in 1, 3, 8:
            for filter, answer in (("00000000", official), ("ef000000", official),
                                   ("10000000", official + other), ("ff000000", official + other)):
                self.assertEqual(self.get_list(filter, size), answer, filter)
        self.assertEqual(self.players(), 13)

    def test_what_the_tools_read(self) -> None:
        greeting = b"HBSL" + hexa("04030201 02010000")
        self.assertEqual(ms.hyperbol_greeting(greeting), (0x01020304, 0x0102))
        for none in b"HBSL" + bytes(7), b"HBSM" + bytes(8):
            self.assertRaises(ms.Malformed, ms.hyperbol_greeting, none)
        entries = hexa("cb007109 f06c0000 03 000000 0a000001 ffff0000 00 eeeeee cb0071")
        self.assertEqual(ms.hyperbol_entries(entries),
                         [("203.0.113.9", 27888, 3), ("10.0.0.1", 65535, 0)])

    def test_sessions_end(self) -> None:
        self.start("203.0.113.9:27888 1", limits__requests="1/2")
        self.answers = {self.here: {}}
        self.pass_time(2)
        session, greeting = self.greeted()
        self.assertEqual((len(greeting), greeting[:4]), (12, b"HBSL"))
        wrong = bytes([greeting[4] ^ 1]) + greeting[5:8] + hexa("ff000000")
        self.assertRaises(ms.Malformed, session.receive, wrong, self.now)
        self.assertTrue(session.done)
        slow, greeting = self.greeted()
        slow.receive(greeting[4:8], self.now)
        for seconds, done in (4.9, False), (5.0, True):
            self.assertEqual((slow.tick(self.now + seconds), slow.done), (b"", done))
        self.assertEqual(slow.receive(hexa("ff000000"), self.now), b"")
        self.assertEqual(len({self.greeted()[1][4:8] for _ in range(20)}), 20)
        lists = [len(self.get_list()) for _ in range(3)]
        self.assertEqual(lists, [12, 12, 0], "limited")

    def test_an_announced_server_is_listed_while_it_answers(self) -> None:
        self.start()
        self.announce(self.here)
        self.assertEqual(self.outcome(), "announced")
        self.pass_time(100)                     # it does not answer
        self.assertEqual((self.listed(), self.poller.targets, self.outcome()), ([], {}, "silent"))
        self.announce(self.here)
        self.answers[self.here] = {}
        self.pass_time(30)
        self.assertEqual(self.listed("name", "verified", "flavor", "ping_ms"),
                         [("Fun & Games", "query", 0, 40)])
        self.announce(self.here)
        self.assertEqual((self.outcome(), self.players()), ("listed", 5))
        self.answers[self.here] = {"o5": b"", "o69": b"\0"}
        self.pass_time(600)
        self.registry.expire(self.now)
        self.assertEqual((self.listed("name"), self.players()), ([("203.0.113.9:27888",)], 0))
        self.answers.clear()
        self.pass_time(100)
        self.assertEqual((self.get_list(), self.listed(), self.poller.targets), (b"", [], {}))

    def test_flavor_comes_from_the_ini_alone(self) -> None:
        self.start("203.0.113.9:27888 7", poll__interval="3600")
        self.announce(self.here, ("203.0.113.8", 27888))
        self.answers = {self.here: {}, ("203.0.113.8", 27888): {}}
        self.pass_time(3600)
        self.assertEqual(self.listed("address", "flavor"), [("203.0.113.8", 0), ("203.0.113.9", 7)])
        self.hyperbol.read(ms.Settings({"hyperbol.servers": "203.0.113.8:27888 4"}))
        self.announce(self.here)
        self.pass_time(2)
        self.assertEqual(self.listed("address", "flavor"), [("203.0.113.8", 4), ("203.0.113.9", 0)])

    def test_flavor_follows_the_ini_to_an_address(self) -> None:
        for ini, source, listed in (
                ("a.example:27888 4", "203.0.113.9", "203.0.113.9"),
                ("203.0.113.9:27888 4", "203.0.113.9", "203.0.113.9"),
                ("[2001:DB8:0:0:0:0:0:1]:27888 4", "2001:db8::1", "2001:db8::1"),
                ("[::ffff:203.0.113.9]:27888 4", "203.0.113.9", "203.0.113.9"),
                ("192.168.1.5:27888 4", "192.168.1.5", "203.0.113.7")):
            with self.subTest(ini):
                self.start(ini)
                self.hyperbol.core = self.core._replace(
                    resolve=lambda host, done: done("203.0.113.9", self.now))
                self.registry.rules.address_map = {"192.168.1.5": "203.0.113.7"}
                self.pass_time(10)
                self.assertEqual(self.listed("responding", "flavor"), [(False, 4)])
                self.answers = {(source, 27888): {}}
                self.pass_time(31)
                self.assertEqual(self.listed("address", "responding", "flavor"),
                                 [(listed, True, 4)])

    def test_named_by_its_public_address_and_announced_from_behind_the_router(self) -> None:
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

    def test_the_ini_knows_no_limit(self) -> None:
        self.start("\n".join("203.0.113.9:%d" % port for port in range(1, 41)))
        self.answers = {("203.0.113.9", port): {} for port in range(1, 41)}
        self.pass_time(31)
        self.assertEqual(len(self.get_list()), 40 * 12)

    def test_refused(self) -> None:
        self.start(server__refuse_names="casino", **{"bans.198.51.100.0/24": "fake players"})
        here = "203.0.113.9", 1
        self.announce(*[("203.0.113.9", port) for port in range(1, 33)], here)
        for source, outcome, words in (
                ("198.51.100.7", "banned", "fake players"),
                ("2001:db8::1", "bad packet", "IPv4 addresses only; this came from 2001:db8::1"),
                ("203.0.113.9", "limit", "at most 32 servers of one address")):
            with self.assertRaisesRegex(ms.Refused, words) as caught:
                self.announce((source, 27888))
            self.assertEqual(caught.exception.outcome, outcome)
        for changed, names in ({}, [("Fun & Games",)]), ({"o5": b"Casino"}, []):
            self.answers[here] = changed
            self.pass_time(31)
            self.assertEqual(self.listed("name"), names)
        self.assertEqual(self.outcome(port=1), "name")
        self.assertNotIn(("hyperbol", *here), self.poller.targets)
        self.registry.rules.servers = 1
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


def zone_packet(name: bytes = b"Loopback Test Zone", password: bytes = b"cane", port: int = 25000,
                players: int = 6, scores: int = 1, version: int = 134,
                description: bytes = b"a real asss on loopback\0") -> bytes:
    return (b"\0\0\0\0" + struct.pack("<HHHI", port, players, scores, version)
            + name.ljust(32, b"\0") + password.ljust(48, b"\0") + description)


def asss(question: bytes) -> Optional[bytes]:
    """How the captured asss answers, whatever the timestamp."""
    if len(question) == 4:
        return SHORT[:4] + question
    return question[:4] + {1: SUMMARY, 2: ARENAS, 3: BOTH}[question[4]][4:]


def old_zone(question: bytes) -> Optional[bytes]:
    return asss(question) if len(question) == 4 else None


class SubSpaceWorld:
    """Both protocols, their poller, and zones that answer: by address and ping port a function
    from a question to the answer."""

    def __init__(self, *answering: str, **settings: str) -> None:
        """`answering`: addresses of zones at ZONE's port."""
        self.core = make_core(**settings)
        self.registry = self.core.registry
        self.ping = ms.SubSpacePing(self.core)
        self.list = ms.SubSpaceList(self.core)
        self.zones: Dict[Any, Callable[[bytes], Optional[bytes]]] = {
            (address, 25001): asss for address in answering}
        self.asked: List[Tuple[bytes, Any]] = []
        self.now = 0.0

    def deliver(self, questions: ms.Replies, to: Callable[..., ms.Replies]) -> None:
        """To the zones, and what they answer, 20 ms later, to the master."""
        now, questions = self.now, list(questions)
        while questions:
            question, place = questions.pop(0)
            self.asked.append((question, place))
            answer = self.zones.get(place, lambda question: None)(question)
            if answer is not None:
                now += 0.02
                questions += to(answer, place, now)

    def announce(self, data: bytes, source: str = ZONE[0]) -> None:
        self.deliver(self.ping.datagram(data, (source, 5000), self.now), self.ping.datagram)

    def by_http(self, source: str = ZONE[0], port: int = ZONE[1], **fields: Any) -> None:
        self.ping.announced(source, port, fields, self.now)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.registry.expire(self.now)
            self.deliver(self.ping.tick(self.now), self.ping.datagram)
            self.deliver(self.core.poller.tick(self.now), self.core.poller.datagram)

    def restarted(self) -> SubSpaceWorld:
        """Another master, with what was listed; the zones are the same."""
        world = SubSpaceWorld()
        world.zones = self.zones
        for server in self.registry.servers():
            row = ms.stored_row(server, 0.0)
            again = ms.restored_server((*row[:6], json.dumps(row[6])), 0.0, self.now)
            assert again is not None
            world.registry.insert(again)
        world.registry.deaf_until = 0.0
        return world

    def names(self) -> List[str]:
        return sorted(server.name for server in self.registry.servers() if server.responding)

    def zone(self, source: str = ZONE[0], port: int = ZONE[1]) -> ms.Server:
        server = self.registry.get("subspace", source, port)
        assert server is not None, (source, port)
        return server

    def outcome(self, source: str = ZONE[0], port: int = ZONE[1]) -> Tuple[str, str]:
        return self.registry.heard[source, "subspace", port][1:]


class SubSpacePingAnswers(unittest.TestCase):
    """This master, as a zone's ping port would answer."""

    def answers(self, counts: Sequence[Tuple[str, int, int]], *questions: str) -> List[bytes]:
        world = SubSpaceWorld()
        for number, (game, players, playing) in enumerate(counts):
            address = "198.51.100.%d" % number
            world.registry.hear(game, address, 1000, address, 0.0, 100.0,
                                {"players": players, "playing": playing})
        peer = ("192.0.2.1", 999)
        out = []
        for question in questions:
            [(answer, to)] = world.ping.datagram(hexa(question), peer, 0.0)
            self.assertEqual(to, peer)
            out.append(answer)
        return out

    def test_captures(self) -> None:
        # The capture has an arena that is not public, and games all are: two registries
        kept = [PING_ANSWERS[row] for row in (0, 1, 2, 4)]
        self.assertEqual(self.answers([("a", 5, 4), ("b", 1, 0)], *[row[0] for row in kept]),
                         [row[1] for row in kept])
        counts = [("duel", 1, 1), ("duel2", 1, 0), ("0", 1, 0), ("0", 1, 1)]
        arenas, both = self.answers(counts, "11223344 02000000", "11223344 03000000")
        blocks = hexa("3000 0200 0100 6475656c00 0100 0100 6475656c3200 0100 0000 00")
        self.assertEqual(arenas, hexa("11223344 02000000") + blocks)
        self.assertEqual(both, hexa("11223344 03000000 04000000 02000000") + blocks)

    def test_other_sizes_get_silence(self) -> None:
        world = SubSpaceWorld()
        for size in [0, 1, 2, 3, 5, 6, 7, *range(9, 95), 481, 600, 4096]:
            with self.assertRaises(ms.Malformed, msg=str(size)):
                world.ping.datagram(bytes(size), ZONE, 0.0)

    def test_at_most_512_bytes_cut_at_an_arena(self) -> None:
        for width in (20, 25, 26, 31):
            names = [("game%02d" % number).ljust(width, "x") for number in range(40)]
            answer, = self.answers([(name, 70000, 1) for name in names], "11223344 03000000")
            fit = (512 - 17) // (width + 5)
            self.assertEqual(answer[16:], b"".join(
                name.encode() + hexa("00 ffff 0100") for name in names[:fit]) + b"\0")

    def test_rates(self) -> None:
        """Requests by source; equal answers, which two ports could go on with, much fewer; and
        what is longer from one account for all sources."""
        rows = ((hexa("11223344"), "192.0.2.1", range(59, 62)),
                (bytes(8), "192.0.2.1", range(5, 7)),
                (hexa("11223344"), "127.0.0.1", range(1000, 1001)))
        for question, source, number in rows:
            ping = SubSpaceWorld().ping
            sent = [ping.datagram(question, (source, 1), n / 1000) for n in range(1000)]
            self.assertIn(sum(map(len, sent)), number, (question, source))
        ping = SubSpaceWorld().ping
        ping.rules.surplus.set_rate((4, 40))
        sent = [ping.datagram(hexa("11223344"), ("192.0.2.%d" % n, 1), 0.0) for n in range(100)]
        self.assertEqual(sum(map(len, sent)), 10)


class SubSpacePolls(unittest.TestCase):
    """This master, reading what zones answer."""

    def poll(self, *steps: Tuple[int, bytes]) -> ms.ZonePoll:
        """Steps: the options that are asked for (0: the 4-byte form), and the answer."""
        poll, complete = ms.ZonePoll(), False
        for options, answer in steps:
            asked = PING_TIME + (struct.pack("<I", options) if options else b"")
            self.assertEqual((poll.question(PING_NONCE), complete), (asked, False))
            complete = poll.answer(answer, PING_NONCE)
        self.assertTrue(complete and poll.answered)
        return poll

    def test_answers(self) -> None:
        playing = hexa("11223344 03000000 06000000 07000000 00")
        virtual = hexa("11223344 03000000 32000000 04000000") + ARENA_BLOCKS
        entered = hexa("11223344 03000000 08000000 04000000") + ARENA_BLOCKS
        cases = (
            ("the captures", [(3, BOTH)], 4, ARENAS_TEXT),
            ("too long a list", [(3, SUMMARY), (2, ARENAS)], 4, ARENAS_TEXT),
            ("no arenas: the option is left out", [(3, SUMMARY), (2, PING_ANSWERS[1][1])], 4, ""),
            ("more play than are there", [(3, playing)], None, ""),
            ("one of several on a server", [(3, virtual)], None, ""),
            ("two came between the questions", [(3, entered)], 4, ARENAS_TEXT),
            ("a name of no text", [(3, BOTH[:16] + hexa("01000200 0000 00"))], 4, "? 2/0"))
        for case, steps, playing_count, arenas in cases:
            poll = self.poll((0, SHORT), *steps)
            self.assertEqual((poll.fields(), poll.arenas_text()),
                             ({"players": 6, "playing": playing_count}, arenas), case)
        huge = self.poll((0, hexa("ffffffff") + PING_TIME), (3, BOTH))
        self.assertEqual(huge.fields()["players"], 65535)

    def test_lists_that_are_cut_off(self) -> None:
        for cut, arenas in ((1, 4), (2, 3), (4, 3), (11, 3), (12, 2), (30, 0)):
            self.assertEqual(len(ms.arena_blocks(ARENA_BLOCKS[:-cut])), arenas, cut)
        longest = BOTH[:16] + b"x\0\1\0\1\0" * 84
        self.assertEqual((len(longest), len(self.poll((0, SHORT), (3, longest)).arenas)), (520, 84))

    def test_wrong_answers(self) -> None:
        first = b"", PING_TIME, hexa("06000000 11223345"), hexa("11223344 06000000"), SHORT + b"\0"
        second = SHORT, b"", hexa("11223345") + BOTH[4:], PING_TIME, BOTH + bytes(480)
        for steps, answers in (((), first), (((0, SHORT),), second)):
            for answer in answers:
                poll = ms.ZonePoll()
                for _, before in steps:
                    poll.answer(before, PING_NONCE)
                with self.assertRaises(ms.Malformed, msg=answer.hex()):
                    poll.answer(answer, PING_NONCE)
                self.assertEqual((poll.step, poll.answered), (len(steps), bool(steps)))

    def test_timestamps_ask_for_the_total(self) -> None:
        nonces = {ms.ping_nonce() for _ in range(2000)}
        for nonce in nonces:
            self.assertTrue(0 <= nonce < 1 << 32 and nonce % 600 < 300 and nonce % 1000 < 500)
        self.assertGreater(len(nonces), 1990)           # which nobody guesses
        self.assertIs(ms.SubSpacePing.nonce, ms.ping_nonce)


class SubSpaceAnnouncements(unittest.TestCase):

    def test_the_capture_is_listed_once_it_answers(self) -> None:
        self.assertEqual((len(ZONE_PACKET), zone_packet()), (118, ZONE_PACKET))
        world = SubSpaceWorld()
        world.announce(ZONE_PACKET)
        self.assertEqual(world.outcome(), ("silent", "no answer yet to a ping on UDP port 25001"))
        world.run(100)
        self.assertEqual((world.names(), world.core.poller.targets), ([], {}))
        world.zones[ZONE[0], 25001] = asss
        world.announce(ZONE_PACKET)
        zone = world.zone()
        self.assertEqual((zone.name, zone.description, zone.players, zone.version, zone.details),
                         ("Loopback Test Zone", "a real asss on loopback", 6, "134",
                          {"scores": "yes"}))
        self.assertEqual((zone.verified, zone.lifetime, world.outcome()[0]),
                         ("query", 180.0, "listed"))
        world.run(31)
        self.assertEqual((zone.playing, zone.ping_ms, zone.details),
                         (4, 20, {"scores": "yes", "arenas": ARENAS_TEXT}))
        self.assertEqual({place for _, place in world.asked}, {(ZONE[0], 25001)})
        self.assertEqual([len(question) for question, _ in world.asked][:4],
                         [4, 4, 4, 8])

    def test_texts_and_scores(self) -> None:
        """Of the scores only the low byte tells."""
        for packet, name, description, scores in (
                (zone_packet(b"Caf\xe9", description="Żółw\0".encode()), "Café", "Żółw", "yes"),
                (zone_packet(b"n" * 32, scores=0x0100, description=b"d"), "n" * 32, "d", "no"),
                (zone_packet(b"a\x1b[1mb\0junk", scores=0x0301, description=b"d" * 386), "ab",
                 "d" * 386, "yes")):
            fields = ms.zone_announcement(packet).fields
            self.assertEqual(
                (fields["name"], fields["description"], fields["details"]["scores"]),
                (name, description, scores))

    def test_what_cannot_be_read(self) -> None:
        world = SubSpaceWorld(ZONE[0])
        for packet, field in (
                (ZONE_PACKET[:94], "length"), (zone_packet(description=bytes(387)), "length"),
                (zone_packet(b""), "name"), (zone_packet(b"\x1b[1m \0x"), "name"),
                (zone_packet(port=65535), "port")):
            with self.assertRaisesRegex(ms.Malformed, field):
                world.announce(packet)
            self.assertEqual(world.outcome(port=0)[0], "bad packet")
            self.assertIn(field, world.outcome(port=0)[1])
        self.assertEqual(world.asked, [])

    def test_what_proves_a_zone(self) -> None:
        place, window = (ZONE[0], 25001), ms.COOKIE_WINDOW_S
        cases = (
            ("its answer", lambda mac: SHORT[:4] + mac, place, window, True),
            ("too late", lambda mac: SHORT[:4] + mac, place, 2 * window, False),
            ("from another address", lambda mac: SHORT[:4] + mac, ("203.0.113.8", 25001), 0, False),
            ("from another port", lambda mac: SHORT[:4] + mac, ZONE, 0, False),
            ("the other way round", lambda mac: mac + SHORT[:4], place, 0, False),
            ("without its players", lambda mac: mac, place, 0, False),
            ("a guess", lambda mac: SHORT[:4] + PING_TIME, place, 0, False))
        for case, answer, peer, later, listed in cases:
            world = SubSpaceWorld()
            [(mac, to)] = world.ping.datagram(ZONE_PACKET, (ZONE[0], 5000), 0.0)
            self.assertEqual((len(mac), to), (4, place))
            world.ping.datagram(answer(mac), peer, float(later))
            self.assertEqual(bool(world.names()), listed, case)

    def test_nothing_unproven_changes_a_listed_zone(self) -> None:
        world = SubSpaceWorld(ZONE[0])
        world.announce(ZONE_PACKET)
        world.run(31)
        zone, generation = world.zone(), world.registry.generation
        world.zones.clear()                 # it answers no ping that forged announcements cause
        for number in range(2000):
            text = b"%d" % number
            for forged in (zone_packet(b"Fake" + text), zone_packet(description=text + b"\0"),
                           zone_packet(scores=0, version=number), zone_packet(password=text)):
                world.announce(forged)
        self.assertEqual(world.registry.generation, generation)
        self.assertEqual((world.outcome()[0], len(world.ping.claims)), ("listed", 1))
        # What it repeats refreshes it at once; its players are those of its answers
        del world.asked[:]
        world.announce(zone_packet(players=99))
        self.assertEqual((zone.players, zone.last_seen, world.asked), (6, world.now, []))
        world.zones[ZONE[0], 25001] = asss
        world.announce(zone_packet(b"New name", scores=0))
        self.assertEqual((world.names(), zone.details["scores"]), (["New name"], "no"))
        self.assertIs(world.zone(), zone)

    def test_it_lives_by_its_announcements(self) -> None:
        world = SubSpaceWorld(ZONE[0])
        for seconds in (100, 179):
            world.announce(ZONE_PACKET)
            world.run(seconds)
            self.assertEqual(len(world.names()), 1)
        world.run(2)                        # its answers do not prolong it
        self.assertEqual((world.names(), world.core.poller.targets), ([], {}))
        self.assertGreater(len(world.asked), 10)

    def test_it_goes_after_three_silent_polls(self) -> None:
        """However it announces itself, and whoever does so in its name."""
        world = SubSpaceWorld(ZONE[0])
        world.announce(ZONE_PACKET)
        world.run(31)
        world.zones.clear()
        for minute, listed in (0, 1), (1, 0), (2, 0):
            world.announce(ZONE_PACKET)
            world.run(60 if minute else 50)
            self.assertEqual(len(world.names()), listed, minute)
        self.assertEqual((world.outcome()[0], world.core.poller.targets), ("silent", {}))

    def test_an_old_zone_knows_the_short_form_alone(self) -> None:
        world = SubSpaceWorld()
        world.zones[ZONE[0], 25001] = old_zone
        for _ in range(4):
            world.announce(zone_packet(players=99))
            world.run(60)
        zone = world.zone()
        self.assertEqual((zone.players, zone.playing, zone.details), (6, None, {"scores": "yes"}))
        world.zones.clear()
        world.run(50)
        self.assertEqual(len(world.names()), 1)     # no poll was missed before these

    def test_several_zones_of_one_source_port(self) -> None:
        world = SubSpaceWorld()
        for port in (2000, 3000):
            world.zones[ZONE[0], port + 1] = asss
            world.announce(zone_packet(b"Zone %d" % port, port=port))
        self.assertEqual(world.names(), ["Zone 2000", "Zone 3000"])

    def test_names_belong_to_a_password(self) -> None:
        first, second, third = sources = "203.0.113.1", "203.0.113.2", "203.0.113.3"
        taken = "the name Chaos belongs to another zone, with another password, for as long as"
        steps = (
            (first, b"Chaos", b"secret", "listed"), (second, b"Chaos", b"cane", "name"),
            (second, b"CHAOS", b"", "name"), (second, b"Chaos \xa0 ", b"cane", "name"),
            (second, b"Chaos 2", b"cane", "listed"), (second, b"Chaos", b"cane", "name"),
            (third, b"chaos", b"secret", "listed"),         # one network's zones share both
            (first, b"Chaos", b"other", "password"), (first, b"Forged", b"cane", "password"),
            (first, b"Order", b"secret", "listed"), (second, b"Chaos", b"cane", "name"),
            (third, b"Peace", b"secret", "listed"), (second, b"Chaos", b"cane", "listed"),
            (third, b"Chaos", b"secret", "name"),
            (first, b"My  Order", b"secret", "listed"), (second, b"my order", b"cane", "name"))
        world = SubSpaceWorld(*sources)
        for number, (source, name, password, outcome) in enumerate(steps):
            world.announce(zone_packet(name, password), source)
            self.assertEqual(world.outcome(source)[0], outcome, (number, name))
            if number == 1:
                self.assertTrue(world.outcome(source)[1].startswith(taken))
        self.assertEqual(world.names(), ["Chaos", "My  Order", "Peace"])

    def test_a_name_is_free_when_its_zone_has_gone(self) -> None:
        world = SubSpaceWorld(ZONE[0], "203.0.113.2")
        world.announce(zone_packet(b"Mine", b"secret"))
        world.run(181)
        world.announce(zone_packet(b"Mine", b"other"))              # its own new password too
        self.assertEqual(world.outcome()[0], "listed")
        passwords = [server.packet.password for server in world.registry.servers()]
        self.assertEqual(passwords, [b"other"])

    def test_a_name_is_not_kept_by_who_does_not_answer(self) -> None:
        world = SubSpaceWorld(ZONE[0], "203.0.113.8", subspace__zones="203.0.113.9:25000")
        world.announce(zone_packet(b"Mine", b"secret"))
        world.run(31)
        del world.zones[ZONE[0], 25001]
        for minute, outcome in (0, "name"), (3, "listed"):
            world.run(60 * minute)
            world.announce(zone_packet(b"Mine", b"thief"), "203.0.113.8")
            self.assertEqual(world.outcome("203.0.113.8")[0], outcome)

    def test_after_a_restart(self) -> None:
        """The password is its who proves the zone first; until then nobody else has the name."""
        before = SubSpaceWorld(ZONE[0], "203.0.113.8", "203.0.113.7")
        for source in (ZONE[0], "203.0.113.8"):
            before.announce(zone_packet(b"Mine", b"secret"), source)
        before.run(60)
        world = before.restarted()
        self.assertFalse(world.zone().confirmed)
        world.announce(zone_packet(b"Mine", b"secret"), "203.0.113.7")
        self.assertEqual(world.outcome("203.0.113.7")[0], "name")
        world.run(31)
        self.assertEqual((world.zone().confirmed, world.zone().last_seen),
                         (True, before.zone().last_seen - 60.0))
        for source in (ZONE[0], "203.0.113.8", "203.0.113.7"):
            world.announce(zone_packet(b"Mine", b"secret"), source)
            self.assertEqual(world.outcome(source)[0], "listed")
        world.announce(zone_packet(b"Mine", b"thief"))
        self.assertEqual(world.outcome()[0], "password")
        silent = before.restarted()
        silent.run(179)
        self.assertEqual(silent.names(), ["Mine", "Mine"])
        silent.run(1)
        self.assertEqual(silent.names(), [])

    def test_announced_by_http(self) -> None:
        """It stays for as long as it answers, across a restart too."""
        world = SubSpaceWorld(ZONE[0])
        world.by_http(name="Web Zone", players=50, description="d")
        self.assertEqual((world.names(), world.outcome()[0]), ([], "silent"))
        world.run(1)
        self.assertEqual((world.names(), world.ping.tick(1.0)), (["Web Zone"], []))
        for announce, name in (
                (lambda: world.by_http(name="Other", players=9), "Other"),
                (lambda: world.by_http(), "Other"), (lambda: world.announce(ZONE_PACKET),
                                                     "Loopback Test Zone")):
            announce()
            world.run(600)
            zone = world.zone()
            self.assertEqual((zone.name, zone.players, zone.lifetime), (name, 6, math.inf))
        self.assertGreater(zone.last_seen, world.now - 31)
        world = world.restarted()
        world.run(600)
        self.assertTrue(world.zone().confirmed)
        world.zones.clear()
        world.run(120)
        self.assertEqual(world.names(), [])
        world.by_http()
        world.zones[ZONE[0], 25001] = asss
        world.run(1)
        self.assertEqual(world.names(), ["203.0.113.9:25000"])

    def test_refusals(self) -> None:
        """By HTTP at once; who announces himself by UDP is asked first."""
        rows = (
            ({"bans.203.0.113.0/24": "fake players"}, "Zone", ("banned", "fake players")),
            ({"server.refuse_names": "viagra"}, "Buy Viagra", ("name", "viagra")),
            ({"limits.servers": "1"}, "Zone", ("limit", "at most 1 servers")),
            ({"limits.servers_per_source": "1"}, "Zone", ("limit", "at most 1 servers of one")))
        for settings, name, (outcome, words) in rows:
            world = SubSpaceWorld(ZONE[0])
            world.registry.hear("other", ZONE[0], 1, ZONE[0], 0.0, 1e9, {})
            world.registry.rules.read(ms.Settings(settings))
            world.announce(zone_packet(name.encode()))
            self.assertEqual((world.outcome()[0], words in world.outcome()[1]), (outcome, True))
            with self.assertRaisesRegex(ms.Refused, words):
                world.by_http(name=name)
            self.assertEqual((world.registry.total, world.core.poller.targets), (1, {}))
        world = SubSpaceWorld("203.0.113.8")
        world.announce(zone_packet(b"Mine", b"secret"), "203.0.113.8")
        for source, port, words in (("2001:db8::1", 25000, r"IPv4.*\[2001:db8::1\]:25000"),
                                    (ZONE[0], 65535, "up to 65534"), (ZONE[0], 0, "port 0"),
                                    (ZONE[0], 25000, "belongs to another")):
            with self.assertRaisesRegex(ms.Refused, words):
                world.by_http(source, port, name="Mine")
        self.assertEqual(world.ping.tick(1.0), [])

    def test_a_refused_name_is_not_taken_later(self) -> None:
        world = SubSpaceWorld(ZONE[0], server__refuse_names="casino")
        for name, outcome in (b"Zone", "listed"), (b"Casino", "name"):
            world.announce(zone_packet(name))
            self.assertEqual((world.outcome()[0], world.names()), (outcome, ["Zone"]))

    def test_zones_of_the_ini(self) -> None:
        world = SubSpaceWorld(ZONE[0], subspace__zones="203.0.113.9:25000")
        world.run(31)
        zone = world.zone()
        self.assertEqual((zone.name, zone.players, zone.playing, zone.details, zone.responding),
                         ("203.0.113.9:25000", 6, 4, {"arenas": ARENAS_TEXT}, True))
        world.announce(ZONE_PACKET)
        world.run(300)                      # no announcement is needed
        self.assertEqual((zone.name, zone.details["arenas"]), ("Loopback Test Zone", ARENAS_TEXT))
        world.zones.clear()
        world.run(130)
        self.assertEqual((zone.responding, zone.players, zone.ping_ms, zone.details),
                         (False, 0, None, {}))
        self.assertEqual(world.outcome(), ("silent", "no answer from UDP port 25001"))
        self.assertEqual(fetch_all(world), [])
        world.zones[ZONE[0], 25001] = asss
        world.announce(ZONE_PACKET)
        world.run(31)
        self.assertEqual((zone.responding, zone.players, zone.details),
                         (True, 6, {"scores": "yes", "arenas": ARENAS_TEXT}))
        reload(world.core, world.ping, world.list)
        self.assertEqual((world.names(), world.core.poller.targets), ([], {}))
        world.announce(ZONE_PACKET)
        self.assertEqual((world.names(), world.zone().lifetime), (["Loopback Test Zone"], 180.0))

    def test_public_addresses(self) -> None:
        """A zone beside the master, which the ini may name by its public address as well."""
        for zones in ("", "198.51.100.9:25000"):
            world = SubSpaceWorld("127.0.0.1", "198.51.100.9", subspace__zones=zones,
                                  server__public_address="198.51.100.9")
            for _ in range(15):
                world.announce(ZONE_PACKET, "127.0.0.1")
                world.run(60)
                self.assertEqual([server.address for server in world.registry.servers()],
                                 ["198.51.100.9"])
                self.assertEqual(world.names(), ["Loopback Test Zone"])
        world = SubSpaceWorld("127.0.0.1", "198.51.100.9", server__public_address="198.51.100.9")
        world.by_http("127.0.0.1")
        world.run(1)
        world.by_http("198.51.100.9", name="Moved")         # from then on it is queried there
        del world.zones["127.0.0.1", 25001]
        for answers in True, False:
            world.run(200)
            self.assertEqual(world.names(), ["Moved"] * answers)
            world.zones.clear()

    def test_the_master_does_not_list_itself(self) -> None:
        world, own = SubSpaceWorld(), ("127.0.0.1", 4991)
        world.zones[own] = lambda question: b"".join(
            answer for answer, _ in world.ping.datagram(question, own, world.now)) or None
        world.announce(zone_packet(port=4990), "127.0.0.1")
        self.assertEqual((len(world.asked), world.names()), (1, []))

    def test_a_flood_of_false_claims(self) -> None:
        """It takes bounded room, keeps no zone out and takes none out; each is asked once."""
        world = SubSpaceWorld(ZONE[0])
        world.announce(zone_packet(b"Listed"))
        waiting: ms.Replies = []
        for second in range(60):
            for number in range(200):
                world.announce(ZONE_PACKET, "10.%d.%d.7" % (second, number))
            if second == 30:
                waiting = world.ping.datagram(zone_packet(b"New"), ("203.0.113.8", 1), world.now)
            world.run(1)
            if second == 31:
                world.zones["203.0.113.8", 25001] = asss
                world.deliver(waiting, world.ping.datagram)
        self.assertEqual(world.names(), ["Listed", "New"])
        self.assertEqual(len(world.ping.claims), ms.ZONE_CLAIMS)
        self.assertEqual(len(world.core.poller.targets), 2)
        asked = [place for _, place in world.asked]
        self.assertEqual(asked.count(("10.7.7.7", 25001)), 1)
        self.assertNotIn(("10.0.0.7", 25000), world.ping.claims)        # the oldest goes


KEY = hexa("aabbccdd")
CONNECT = b"\0\1" + KEY + b"\1\0"
REQUEST = hexa("0003 00000000 01 00000000")
PLAYER = ("192.0.2.1", 777)


def acknowledge(packet: bytes) -> bytes:
    return b"\0\4" + packet[2:6]


class Player(ms.SubSpaceLink):
    """Asks for a list; `zones` once it is there."""

    def __init__(self, minimum: int = 0, now: float = 0.0) -> None:
        super().__init__(now, [b"\1" + struct.pack("<I", minimum)])
        self.data = b""
        self.zones: Optional[List[Dict[str, Any]]] = None

    def packet(self, data: bytes, now: float) -> List[bytes]:
        if data[:2] != hexa("000a"):
            return super().packet(data, now)
        self.data += data[6:]
        if len(self.data) == int.from_bytes(data[2:6], "little"):
            self.zones = ms.zone_entries(self.data)
        return []


def fetch_all(world: SubSpaceWorld, minimum: int = 0) -> List[Dict[str, Any]]:
    """The list, over a network that loses nothing."""
    player, now = Player(minimum, world.now), world.now
    player.heard_at = now
    world.list.datagram(CONNECT, PLAYER, now)
    out = player.tick(now)
    for _ in range(5000):
        out = [reply for data in out for answer, _ in world.list.datagram(data, PLAYER, now)
               for reply in player.receive(answer, now)]
        if player.zones is not None:
            world.list.datagram(hexa("0007"), PLAYER, now)
            return player.zones
    raise AssertionError("no list came")


class SubSpaceLists(unittest.TestCase):

    def world(self, zones: int, **settings: str) -> SubSpaceWorld:
        world = SubSpaceWorld(limits__servers_per_source="100000", **settings)
        for number in range(zones):
            world.registry.hear(
                "subspace", "198.51.100.%d" % (number % 250), 1000 + number, "198.51.100.1", 0.0,
                1e9, {"name": "Zone %d" % number, "players": number, "version": "134",
                      "description": "d" * 100, "details": {"scores": "yes"}})
        return world

    def say(self, world: SubSpaceWorld, *packets: bytes, peer: Any = PLAYER, now: float = 0.0
            ) -> List[bytes]:
        """What the last of these packets is answered."""
        out: List[bytes] = []
        for packet in packets:
            replies = world.list.datagram(packet, peer, now)
            self.assertTrue(all(to == peer for _, to in replies))
            out = [data for data, _ in replies]
        return out

    def test_exchange(self) -> None:
        world = self.world(0)
        world.registry.hear("subspace", "203.0.113.9", 25000, "203.0.113.9", 0.0, 1e9, {
            "name": "Żółw Café", "players": 6, "version": "134", "description": "naïve ☃",
            "details": {"scores": "yes"}})
        entry = (hexa("cb007109 a861 0600 0100 86000000") + b"?\xf3?w Caf\xe9".ljust(64, b"\0")
                 + b"na\xefve ?\0")
        for packet, answers in (
                (CONNECT, [hexa("0002 aabbccdd")]),
                (hexa("0005 01020304 0000"), [hexa("0006 01020304 64000000")]),
                (hexa("0006 01020304 64000000"), []),
                (REQUEST, [hexa("0004 00000000"), hexa("0003 00000000 000a 57000000 01") + entry]),
                (hexa("0004 00000000"), []),
                (REQUEST, [hexa("0004 00000000")]),         # its acknowledgement was lost
                (hexa("0007"), []), (hexa("0007"), [])):
            self.assertEqual(self.say(world, packet, now=1.0), answers, packet.hex())
        self.assertFalse(world.list.links)
        with self.assertRaises(ms.Malformed):
            self.say(world, REQUEST)

    def test_connects(self) -> None:
        """Repeated, also with an empty list or 11 for a version, and by who wants another list."""
        world = self.world(0)
        version_11, other_key = b"\0\1" + KEY + b"\x11\0", b"\0\1" + bytes(4) + b"\1\0"
        empty = hexa("0003 00000000 000a 01000000 01")
        self.assertEqual(self.say(world, version_11), [hexa("0002 aabbccdd")])
        self.assertEqual(self.say(world, REQUEST), [hexa("0004 00000000"), empty])
        self.assertEqual(self.say(world, version_11), [hexa("0002 aabbccdd")])
        self.assertEqual(self.say(world, REQUEST), [hexa("0004 00000000")])     # under way already
        self.say(world, hexa("0004 00000000"))
        for connect, answer in (version_11, "0002 aabbccdd"), (other_key, "0002 00000000"):
            self.assertEqual(self.say(world, connect), [hexa(answer)])
            self.assertEqual(self.say(world, REQUEST, now=1.0)[1:], [empty])
        for bad in (b"\0\1" + KEY + b"\2\0", CONNECT + b"\0", CONNECT[:7], b"\0\1"):
            with self.assertRaisesRegex(ms.Malformed, "connect"):
                self.say(world, bad)

    def test_who_announces_himself_here_is_told(self) -> None:
        world = self.world(0)
        for packet, told in (bytes(10), False), (ZONE_PACKET, True):
            with self.assertRaises(ms.Malformed):
                self.say(world, packet, peer=ZONE)
            self.assertEqual((ZONE[0], "subspace", 0) in world.registry.heard, told)
        self.assertIn("next one", world.outcome(port=0)[1])

    def test_texts_are_cut_to_their_fields(self) -> None:
        server = ms.Server("subspace", *ZONE, ZONE[0], 0.0, 1.0, "n" * 90, version="135",
                           description="d" * 600)
        entry = ms.zone_entry(server)
        self.assertEqual((entry[10:14], entry[14:78], entry[78:]),
                         (hexa("87000000"), b"n" * 63 + b"\0", b"d" * 479 + b"\0"))
        server.version = "1.0"
        self.assertEqual(ms.zone_entry(server)[10:14], hexa("86000000"))

    def test_who_is_in_the_list(self) -> None:
        world = self.world(100)
        for address, fields in (("2001:db8::1", {}), ("203.0.113.9", {"responding": False})):
            world.registry.hear("subspace", address, 9, address, 0.0, 1e9, fields)
        world.registry.hear("other", "203.0.113.9", 9, "203.0.113.9", 0.0, 1e9, {"players": 99})
        for minimum, players in (0, range(99, -1, -1)), (90, range(99, 89, -1)), (1000, []):
            world.now += 10.0
            self.assertEqual([zone["players"] for zone in fetch_all(world, minimum)], list(players))

    def test_clusters(self) -> None:
        """Clusters and reliable packets are taken apart in order; a bad part spoils no other."""
        sync = "06 0005 01020304"
        request = "0b 0003 00000000 01 00000000"
        cases = (
            ("several", "000e" + sync + request, ["0006", "0004", "0003"]),
            ("not known, and cut off", "000e 03 051234" + request + "07 0005 0102",
             ["0004", "0003"]),
            ("empty", "000e 00" + request + "ff", ["0004", "0003"]),
            ("a cluster in a cluster", "000e 0e 000e" + request, ["0004", "0003"]),
            ("in a reliable packet", "0003 00000000 000e 05 01 00000000", ["0004", "0003"]),
            ("eight answers at most", "000e" + sync * 60, ["0006"] * 8))
        for case, packet, kinds in cases:
            out = self.say(self.world(1), CONNECT, hexa(packet))
            self.assertEqual([answer[:2] for answer in out], list(map(hexa, kinds)), case)
        got: List[bytes] = []
        link = ms.SubSpaceLink(0.0)
        with mock.patch.object(link, "packet", lambda data, now: got.append(data) or []):
            link.receive(hexa("000e 0a 0003 00000000 000e 01 41 07 0003 01000000 42"), 0.0)
        self.assertEqual(got, [b"A", b"B"])
        deep = hexa("0005 01020304")
        for _ in range(60):
            deep = b"\0\x0e" + bytes([len(deep)]) + deep
        self.assertEqual(self.say(self.world(1), CONNECT, deep)[0][:2], hexa("0006"))

    def test_packets_that_are_cut_off_or_not_known(self) -> None:
        for bad in ("00", "0003", "0003 0000", "0004 000000", "0005 010203", "01 000000", "05",
                    "01 00000000 00", "02 00000000", "0009 00000000", "", "0002 aabbccdd"):
            with self.assertRaises(ms.Malformed, msg=bad):
                self.say(self.world(1), CONNECT, hexa(bad))

    def test_reliable_packets_are_taken_in_order(self) -> None:
        """All are acknowledged but those too far ahead, also if they come again."""
        got: List[bytes] = []
        link = ms.SubSpaceLink(0.0)
        with mock.patch.object(link, "packet", lambda data, now: got.append(data) or []):
            for number, answered, taken in ((1, 1, b""), (15, 1, b""), (16, 0, b""), (0, 1, b"01"),
                                            (1, 1, b"01"), (3, 1, b"01"), (2, 1, b"0123")):
                head = struct.pack("<I", number)
                out = link.receive(hexa("0003") + head + b"%x" % number, 0.0)
                self.assertEqual((out, b"".join(got)), ([hexa("0004") + head] * answered, taken))

    def test_windows_and_resends(self) -> None:
        """One packet in flight before the first acknowledgement, then four, each again after half
        a second; no more than sixteen beyond one that is missing."""
        link = ms.SubSpaceLink(0.0, [b"%d" % number for number in range(40)])
        sent = lambda packets: [int.from_bytes(packet[2:6], "little") for packet in packets]
        say = lambda now, *numbers: [number for acked in numbers for number in sent(
            link.receive(hexa("0004") + struct.pack("<I", acked), now))]
        self.assertEqual(link.tick(0.0), [hexa("0003 00000000 30")])
        for now, resent in (0.4, []), (0.5, [0]), (0.9, []), (1.0, [0]):
            self.assertEqual(sent(link.tick(now)), resent, now)
        self.assertEqual(say(1.1, 0), [1, 2, 3, 4])
        self.assertEqual(say(1.2, 0, 9), [])                # once more, and one that never was
        self.assertEqual(say(1.3, 2, 3, 4), [5, 6, 7])
        self.assertEqual(sent(link.tick(1.7)), [1])
        self.assertEqual(say(1.75, *range(5, 16)), [*range(8, 17)])
        self.assertEqual(say(1.76, 16, 1), [17, 18, 19, 20])

    def test_chunks_are_small(self) -> None:
        world, data = self.world(40), b""
        flying = self.say(world, CONNECT, REQUEST)[1:]
        self.assertEqual(len(flying[0]), 480 + 12)
        while flying:
            packet = flying.pop(0)
            self.assertLessEqual(len(packet), 492)
            data += packet[12:]
            flying += self.say(world, acknowledge(packet))
        self.assertEqual(len(data), 1 + 40 * (78 + 101))

    def test_a_second_request_on_a_link_is_served_after_the_first(self) -> None:
        world = self.world(2)
        first = self.say(world, CONNECT, REQUEST)[1]
        second = hexa("0003 01000000 01 02000000")
        self.assertEqual(self.say(world, second), [hexa("0004 01000000")])      # not before
        self.say(world, acknowledge(first))
        answer = self.say(world, hexa("0003 02000000 01 02000000"))[1]
        self.assertEqual(answer, hexa("0003 01000000 000a 01000000 01"))

    def test_400_zones_over_a_bad_network(self) -> None:
        """A fifth of all packets is lost, some come twice, and none in order."""
        for seed in range(4):
            world, rng, player = self.world(400), random.Random(seed), Player()

            def arrived(packets: List[bytes]) -> List[bytes]:
                rng.shuffle(packets)
                return [packet for packet in packets for _ in range(rng.choice((0, 1, 1, 1, 2)))]
            self.say(world, CONNECT)
            out: List[bytes] = []
            for step in range(600):                 # a tenth of a second each, half a round trip
                now = step / 10
                out += player.tick(now)
                back = [answer for packet in arrived(out)
                        for answer in self.say(world, packet, now=now)]
                if step % 10 == 0:
                    back += [packet for packet, _ in world.list.tick(now)]
                out = [answer for packet in arrived(back)
                       for answer in player.receive(packet, now)]
            assert player.zones is not None
            self.assertEqual([zone["name"] for zone in player.zones],
                             ["Zone %d" % number for number in range(399, -1, -1)])
            world.list.tick(now + ms.LINK_IDLE_S + 1.0)
            self.assertFalse(world.list.links)

    def test_an_exchange_nobody_acknowledges_ends(self) -> None:
        for also in [], [REQUEST], [hexa("0005 01020304")]:
            world = self.world(400)
            sent = self.say(world, CONNECT, REQUEST)[1:]
            for second in range(1, 2 * ms.LINK_TRIES):
                for packet in also if world.list.links else ():
                    sent += self.say(world, packet, now=second - 0.5)
                sent += [data for data, _ in world.list.tick(float(second))]
            chunks = [data for data in sent if len(data) > 20]
            self.assertEqual((len(set(chunks)), len(chunks)), (1, ms.LINK_TRIES))
            self.assertEqual((ms.LINK_TRIES < 17, len(world.list.links)), (True, 0))

    def test_false_addresses_get_little(self) -> None:
        """One address, many ports and keys, for ten seconds: a slow trickle for who lives there.
        Many addresses: what all together get is bounded."""
        for addresses, least, most in (1, 5_000, 50_000), (4000, 90_000, 200_000):
            world = self.world(400)
            world.registry.rules.surplus.set_rate((10_000, 100_000))
            chunks = 0
            for number in range(5000):
                peer, now = ("60.%d.%d.1" % divmod(number % addresses, 250), number), number / 500
                key = struct.pack("<I", number)
                out = self.say(world, b"\0\1" + key + b"\1\0", REQUEST, peer=peer, now=now)
                if number % 500 == 0:
                    out += [data for data, _ in world.list.tick(now)]
                chunks += sum(len(data) for data in out if len(data) > 6)
            self.assertTrue(least < chunks < most, (addresses, chunks))
            self.assertEqual(len(world.list.links), ms.LIST_LINKS)

    def test_requests_are_limited(self) -> None:
        """One link after another, or many requests on one."""
        for links, exempt, served in (20, "", 3), (1, "", 5), (20, "192.0.2.1", 20):
            world = self.world(1, limits__requests="1/6", limits__exempt=exempt)
            lists = 0
            for number in range(20):
                peer = ("192.0.2.1", 777 + number % links)
                if number < links:
                    self.say(world, CONNECT, peer=peer)
                sequence = struct.pack("<I", 0 if links > 1 else number)
                for packet in self.say(world, hexa("0003") + sequence + REQUEST[6:], peer=peer):
                    if packet[:2] == hexa("0003"):
                        lists += 1
                        self.say(world, acknowledge(packet), peer=peer)
            self.assertEqual(lists, served)

    def test_lists_are_bounded_in_bytes(self) -> None:
        """To one address and to all; what is held back has not been tried, and comes later."""
        for setting, players in (("limiter", 1), ("limiter_in_all", 10)):
            world = self.world(400)
            getattr(world.list, setting).set_rate((30_000, 30_000))
            waiting: Dict[Any, Set[bytes]] = {
                ("203.0.113.%d" % number, 777): set() for number in range(players)}
            arrived: ms.Replies = []
            for peer in waiting:
                for packet in CONNECT, REQUEST:
                    arrived += world.list.datagram(packet, peer, 0.0)
            for second in range(60):
                size = 0
                while arrived:
                    data, peer = arrived.pop()
                    size += len(data)
                    if data[:2] == hexa("0003"):
                        waiting[peer].add(data[12:])
                        arrived += world.list.datagram(acknowledge(data), peer, float(second))
                self.assertLess(size, 75_000 if second == 0 else 32_000)
                arrived = list(world.list.tick(second + 1.0))
                if second == 0:
                    self.assertLess(max(sum(map(len, seen)) for seen in waiting.values()), 40_000)
            self.assertEqual({sum(map(len, seen)) for seen in waiting.values()}, {1 + 400 * 179})

    def test_who_is_blocked_meanwhile_gets_no_list(self) -> None:
        world = self.world(400)
        self.say(world, CONNECT)
        world.registry.rules.read(ms.Settings({"blocked.192.0.2.0/24": "floods"}))
        self.assertEqual(self.say(world, REQUEST), [hexa("0004 00000000")])

    def test_strangers_push_nobody_out(self) -> None:
        """A player 200 ms away asks amid 10,000 connects a second; the oldest links go."""
        world = self.world(1)
        self.say(world, CONNECT)
        for number in range(6000):
            self.say(world, CONNECT, peer=("60.%d.%d.1" % divmod(number, 250), 777))
            if number % 2000 == 1999:
                self.say(world, hexa("0005 01020304"))
        self.assertEqual(len(self.say(world, REQUEST)), 2)
        self.assertEqual(len(world.list.links), ms.LIST_LINKS)

    def test_idle_links_end(self) -> None:
        world = self.world(1)
        self.say(world, CONNECT)
        self.say(world, hexa("0005 01020304"), now=20.0)
        for now, links in (20.0 + ms.LINK_IDLE_S, 1), (21.0 + ms.LINK_IDLE_S, 0):
            world.list.tick(now)
            self.assertEqual(len(world.list.links), links)

    def test_zones_of_a_list(self) -> None:
        entry = (hexa("cb007109 a861 0600 0103 86000000") + b"Caf\xe9".ljust(64, b"\0") + b"d\0")
        self.assertEqual(ms.zone_entries(b"\1" + entry), [{
            "address": "203.0.113.9", "port": 25000, "name": "Café", "players": 6, "scores": True,
            "version": 134, "description": "d"}])
        for wrong in (b"\1" + bytes(50), b"\1" + bytes(78), b"\1" + b"x" * 90,
                      b"\1" + entry + b"x" * 90, b"\2" + entry, b"\2", b""):
            with self.assertRaises(ms.Malformed, msg=wrong):
                ms.zone_entries(wrong)


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
    ("line ends first", b"\n\r\n12#%\n", AIO_DEPLOYED_LIST),
    ("publish, as deployed", b"13#NAME#DESC#27010#%\n", b"%SUCCESS#13#%"),
    ("publish, document",
     b"13#best AIO server#please no non-vanilla content pls#185.12.59.68#27010#%",
     b"%SUCCESS#13#%"),
    ("publish, keepalive, publish",
     b"13#NAME [0/9]#DESC#27010#%\nKEEPALIVE#%\n13#NAME [1/9]#50% more#27010#%\r\n",
     b"%SUCCESS#13#%%SUCCESS#KEEPALIVE#%%SUCCESS#13#%"),
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
    ("framed unknown", hexa("02000000 09 00"),
     hexa("23000000 06 09 1f00") + b"this master knows no request 09"),
)


def aio_ready(**settings: str) -> ms.Aio:
    """With the document's two servers."""
    aio = ms.Aio(make_core(aio__news="50% more #1", **settings))
    for name, description, address in (AIO_OFFICIAL, AIO_UNNAMED):
        aio_peer(aio, b"13#%s#%s#27010#%%\n" % (name, description), address.decode())
    return aio


def aio_peer(aio: ms.Aio, data: bytes, address: str = "203.0.113.9", now: float = 0.0
             ) -> ms.AioSession:
    """A connection that has sent this."""
    session = aio.session(address, now)
    feed(session, data, now=now)
    return session


def aio_ask(aio: ms.Aio, request: bytes, now: float = 0.0) -> bytes:
    """What a peer of its own gets for this; 0.2 s later if it takes a newline to tell."""
    session = aio.session("198.51.100.7", now)
    return feed(session, request, now=now) + session.tick(now + 0.2)


class AioTest(unittest.TestCase):
    def listed(self, aio: ms.Aio, *names: str) -> List[Any]:
        """These attributes of the listed servers."""
        return [tuple(getattr(server, name) for name in names) if names[1:]
                else getattr(server, names[0]) for server in aio.registry.servers("aio")]

    def test_uintv(self) -> None:
        for value, wire in ((0, "01"), (127, "ff"), (128, "0200"), (8080, "427c"),
                            (0x407F, "feff"), (16512, "040000"), (27010, "144801"),
                            (65535, "fcfb05"), (0x20407F, "fcffff"), (0x204080, "00000000"),
                            (0x2020407F, "f8ffffff")):
            with self.subTest(value):
                data = hexa(wire)
                self.assertEqual(ms.uintv(value), data)
                self.assertEqual(ms.read_uintv(b"?" + data + b"?", 1), (value, 1 + len(data)))
                for cut in range(len(data)):
                    self.assertGreater(ms.read_uintv(data[:cut], 0)[1], cut)

    def test_traces_whole_and_in_every_split(self) -> None:
        for title, data, answer in AIO_TRACES:
            for size in range(1, len(data) + 1):
                with self.subTest(title, size=size):
                    session = aio_ready().session("185.12.59.68", 0.0)
                    self.assertEqual(feed(session, data, size) + session.tick(0.25), answer)
            for at in range(1, len(data)):
                session = aio_ready().session("185.12.59.68", 0.0)
                found = feed(session, data[:at]) + feed(session, data[at:], now=0.1)
                self.assertEqual(found + session.tick(0.35), answer, title)

    def test_one_answer_at_a_time(self) -> None:
        """The rest waits until the peer has taken it; what has no answer stops nothing."""
        for data, answers in (
                (b"\x0c\x0c" + AIO_BINARY + b"\x0c", 3), (b"HI#%NEWS#%HI#%NEWS#%", 2),
                (AIO_FRAMED + AIO_KEEPALIVE * 3, 4)):
            session = aio_ready().session("37.192.51.67", 0.0)
            found = [session.receive(data, 0.0)]
            while found[-1]:
                found.append(session.receive(b"", 0.0))
            self.assertEqual(len(found) - 1, answers, data)

    def test_a_newline_tells_the_two_lists_apart(self) -> None:
        def session() -> ms.AioSession:
            made = aio_ready().session("198.51.100.7", 0.0)
            self.assertEqual(made.receive(b"12#%", 5.0), b"")
            return made

        self.assertEqual(session().tick(5.1), b"")
        self.assertEqual(session().tick(5.2), AIO_DOCUMENT_LIST)
        self.assertEqual(session().receive(b"\n", 5.1), AIO_DEPLOYED_LIST)
        self.assertEqual(session().receive(b"NEWS#%", 5.1), AIO_DOCUMENT_LIST)
        half_closed = session()                 # no newline can follow
        self.assertEqual(half_closed.ended(5.1), AIO_DOCUMENT_LIST)
        self.assertEqual(half_closed.receive(b"", 5.1), b"")

    def test_greetings(self) -> None:
        aio = ms.Aio(make_core())
        for number in b"0", b"1":               # ids count up
            silent = aio.session("198.51.100.7", 0.0)
            self.assertEqual(silent.opened(0.0), hexa("01 00000000"))
            self.assertEqual([silent.tick(now) for now in (1.1, 1.2, 1.3)],
                             [b"", b"%1#" + number + b"#%", b""])
            self.assertEqual(feed(silent, b"KEEPALIVE#%", now=2.0), b"%SUCCESS#KEEPALIVE#%")
        for data in b"N", b"\x0d", b"\3":
            talking = aio.session("198.51.100.7", 0.0)
            talking.opened(0.0)
            self.assertEqual((talking.receive(data, 0.5), talking.tick(1.2)), (b"", b""))

    def test_published_in_one_dialect_and_listed_in_all(self) -> None:
        best, fun = b"best AIO server", b"100% fun"
        for data, name, description in (
                (b"13#best AIO server#100% fun#27010#%\n", best, fun),
                (b"13#best AIO server#100<percent> fun#10.0.0.1#27010#%", best, fun),
                (b"\x0dbest AIO server\x00100% fun\0\0\x14\x48\x01", best, fun),
                (AIO_FRAMED, b"203.0.113.9:27010", b"")):
            aio = ms.Aio(make_core())
            aio_peer(aio, data)
            text = name + b"#" + description.replace(b"%", b"<percent>") + b"#203.0.113.9#27010#%"
            binary = b"\0".join((name, description, b"203.0.113.9", b"\x14\x48\x01"))
            framed = hexa("11000000 02 0100 0b") + b"203.0.113.9" + hexa("8269")
            self.assertEqual([aio_ask(aio, request) for request in AIO_LISTS], [
                b"%12#" + text, b"%12#0#" + text, hexa("0c 0000") + binary, framed])
        aio = ms.Aio(make_core())
        aio_peer(aio, AIO_FRAMED, "2001:db8::9")
        self.assertEqual(aio_ask(aio, b"12#%\n"),
                         b"%12#[2001:db8::9]:27010##2001:db8::9#27010#%")

    def test_empty_lists(self) -> None:
        entry = (b"No servers currently online :pepe:", b"There are currently no available"
                 b" servers... Maybe host your own or wait later?:O", b"127.0.0.1")
        text = b"#".join(entry) + b"#27010#%"
        aio = ms.Aio(make_core())
        self.assertEqual([aio_ask(aio, request) for request in AIO_LISTS], [
            b"%12#" + text, b"%12#0#" + text,
            hexa("0c 0000") + b"\0".join(entry) + hexa("00 144801"), hexa("03000000 02 0000")])

    def test_lists_number_their_servers(self) -> None:
        aio = ms.Aio(make_core())
        for number in range(300):
            address = address_of(number)
            aio.registry.hear("aio", address, 27010, address, 0.0, math.inf, {"name": str(number)})
        with mock.patch.object(ms, "AIO_SERVERS", 257):         # no more than have a number
            deployed, document, binary, framed = [aio_ask(aio, request) for request in AIO_LISTS]
        numbers = list(range(257))
        self.assertEqual(deployed.count(b"#27010#"), 257)
        self.assertEqual(list(map(int, document.split(b"#")[1::5][:-1])), numbers)
        entries = binary[1:].split(hexa("144801"))[:-1]
        self.assertEqual([int.from_bytes(entry[:2], "little") for entry in entries], numbers)
        # A long frame is compressed; peers read it with one recv(4) and one recv(length)
        self.assertEqual((len(framed) - 4, framed[3]), (int.from_bytes(framed[:3], "little"), 1))
        payload = zlib.decompress(framed[4:])
        self.assertEqual((payload[:3], payload.count(hexa("8269"))), (hexa("02 0101"), 257))
        self.assertLess(ms.AIO_SERVERS, 1 << 16)
        made = aio_ask(aio, b"\x0c", 5.0), aio.lists[ms.aio_binary_list].made
        self.assertEqual(aio_ask(aio, b"\x0c", 5.0), made[0])
        self.assertIs(aio.lists[ms.aio_binary_list].made, made[1])                  # made once

    def test_names_and_players(self) -> None:
        """(published, name, players, maximum, in the text list, in the binary one)"""
        hundred = "100％ C＃ [bad] [7/32]".encode()
        for name, *facts, text, binary in (
                (b"100% C<num> [bad] [7/32]", "100% C# [bad]", 7, 32, hundred,
                 b"100% C# [bad] [7/32]"),
                (b"[1/2]", "203.0.113.9:27010", 1, 2, b"[1/2]", b"[1/2]"),
                (b"n [70000/99999]", "n", 65535, 65535, b"n [70000/99999]", b"n [70000/99999]"),
                (b"n [9/8]", "n", 8, 8, b"n [9/8]", b"n [9/8]"),
                (b"n[1/2]", "n[1/2]", 0, 0, b"n[1/2]", b"n[1/2]"),
                (b"n [1/2] x", "n [1/2] x", 0, 0, b"n [1/2] x", b"n [1/2] x"),
                (b"x" * 200, "x" * 128, 0, 0, b"x" * 128, b"x" * 128),
                (b"caf\xe9", "café", 0, 0, "café".encode(), "café".encode())):
            with self.subTest(name):
                aio = ms.Aio(make_core())
                session = aio_peer(aio, b"13#" + name + b"#a<num>b \xa9#27010#%")
                self.assertEqual(self.listed(aio, "name", "players", "max_players", "description"),
                                 [(*facts, "a#b ©")])
                self.assertIn(b"#" + text + "#a<num>b ©#".encode(), aio_ask(aio, b"12#%\n"))
                self.assertIn(b"\0" + binary + "\0a#b ©\0".encode(), aio_ask(aio, b"\x0c"))
        feed(session, b"13#K [2/9]#D#27010#%", now=1.0)         # somebody joined
        self.assertEqual(self.listed(aio, "name", "players"), [("K", 2)])

    def test_addresses(self) -> None:
        """(source, what it sends, where it is listed)"""
        settings = {"server__public_address": "198.51.100.1",
                    "address_map.192.168.1.5": "198.51.100.2"}
        for source, data, address in (
                # A public source speaks for itself only
                ("203.0.113.9", b"13#N#D#198.51.100.66#27010#%", "203.0.113.9"),
                ("203.0.113.9", b"SET_IP#198.51.100.66#%" + AIO_TEXT, "203.0.113.9"),
                ("203.0.113.9", b"\x0dN\0D\x00198.51.100.66\0\x14\x48\x01", "203.0.113.9"),
                ("127.0.0.1", AIO_TEXT, "198.51.100.1"),
                ("127.0.0.1", AIO_FRAMED, "198.51.100.1"),
                # icanhazip.com ends it so
                ("127.0.0.1", b"13#N#D#203.0.113.7\n#27010#%", "203.0.113.7"),
                ("127.0.0.1", b"\x0dN\0D\x00203.0.113.7\0\x14\x48\x01", "203.0.113.7"),
                ("127.0.0.1", b"SET_IP#203.0.113.7#%" + AIO_TEXT, "203.0.113.7"),
                ("127.0.0.1", AIO_TEXT + b"SET_IP#203.0.113.7#%", "203.0.113.7"),   # it moves
                ("127.0.0.1", b"SET_IP#203.0.113.7#%13#N [1/2]#D#2#%13#N#D#127.0.0.1#27010#%",
                 "203.0.113.7"),
                ("127.0.0.1", b"SET_IP#fe80::1%eth0#%" + AIO_TEXT, "198.51.100.1"),
                ("127.0.0.1", b"SET_IP#::ffff:203.0.113.7#%" + AIO_TEXT, "203.0.113.7"),
                ("127.0.0.1", b"13#N#D#203.0.113.7#27010#%SET_IP#203.0.113.8#%", "203.0.113.8"),
                ("192.168.1.5", AIO_TEXT, "198.51.100.2"),
                ("10.1.2.3", b"13#N#D#203.0.113.7#27010#%", "203.0.113.7")):
            with self.subTest(source=source, data=data):
                aio = ms.Aio(make_core(**settings))
                aio_peer(aio, data, source)
                self.assertEqual(self.listed(aio, "address", "port"), [(address, 27010)])
        for source, answer in ("127.0.0.1", b"%SUCCESS#SET_IP#%"), ("203.0.113.9", b""):
            session = aio.session(source, 0.0)
            self.assertEqual(feed(session, b"SET_IP#203.0.113.7#%\n"), answer)
            self.assertEqual(feed(session, b"SET_IP#%\n"), b"")

    def test_the_newer_connection_has_the_server(self) -> None:
        for publish in AIO_TEXT, AIO_BINARY, AIO_FRAMED:
            aio = ms.Aio(make_core())
            old = aio_peer(aio, publish)
            self.assertTrue(old.kept)
            new = aio_peer(aio, publish)
            self.assertEqual((old.kept, new.kept), (False, True))
            old.closed(2.0)
            self.assertEqual(self.listed(aio, "port"), [27010])
            self.assertEqual(len(aio.poller.targets), publish is AIO_FRAMED)
            new.closed(3.0)
            self.assertEqual((aio.registry.total, aio.owners, aio.poller.targets), (0, {}, {}))
        aio_peer(aio, b"13#N [1/2]#D#27010#%")
        aio_peer(aio, AIO_FRAMED)               # the text generation's name is no more
        self.assertIn(b"%12#N#D#", aio_ask(aio, b"12#%\n"))
        session = aio_peer(aio, AIO_TEXT)
        feed(session, b"13#M#D#27011#%")                        # it has another port now
        self.assertEqual(self.listed(aio, "name", "port"), [("M", 27011)])

    def test_restored_servers(self) -> None:
        """They leave unless they publish again; framed ones do not send the name they had."""
        for publish, name in ((AIO_FRAMED, "My server"), (AIO_TEXT, "N")):
            aio = ms.Aio(make_core())
            for port in 27010, 27011:
                server = ms.Server("aio", "203.0.113.9", port, "203.0.113.9", 0.0, 60.0,
                                   "My server")
                server.confirmed = False
                aio.registry.insert(server)
            self.assertEqual(aio_ask(aio, b"12#%\n").count(b"#My server#"), 2)
            aio_peer(aio, publish, now=1.0)
            aio.registry.expire(1000.0)
            self.assertEqual(self.listed(aio, "name", "confirmed", "verified"),
                             [(name, True, "connection")])

    def test_refusals(self) -> None:
        """(source, what it sends, the answer, what /check says of which port)"""
        aio = ms.Aio(make_core(**{
            "bans.203.0.113.0/24": "fake players", "server__refuse_names": "casino",
            "limits__servers_per_source": "1"}))
        self.addCleanup(aio_peer(aio, AIO_TEXT, "198.51.100.9").closed, 0.0)
        for source, data, answer, outcome, port in (
                ("203.0.113.9", AIO_FRAMED, hexa("10000000 06 03 0c00") + b"fake players",
                 "banned", 27010),
                ("203.0.113.9", AIO_TEXT, b"", "banned", 27010),
                ("198.51.100.8", b"13#Casino royale#D#27010#%", b"", "name", 27010),
                ("198.51.100.9", b"13#N#D#27011#%", b"", "limit", 27011),
                ("198.51.100.8", b"13#N#D#99999#%", b"", "bad packet", 99999),
                ("198.51.100.8", b"\x0dN\0D\0\0\0\0\0\0", b"", "bad packet", 0x204080)):
            with self.subTest(data):
                session = aio.session(source, 0.0)
                self.assertEqual(feed(session, data), answer)
                self.assertEqual(aio.registry.heard[source, "aio", port][1], outcome)
                self.assertFalse(session.kept)
        self.assertEqual(self.listed(aio, "source", "port"), [("198.51.100.9", 27010)])
        self.assertEqual(aio.registry.heard["198.51.100.9", "aio", 27010][1], "listed")
        aio = ms.Aio(make_core(server__refuse_names="evil"))    # the one that is listed stays
        aio_peer(aio, b"13#Good#d#1000#%13#evil#d#1000#%")
        self.assertEqual(self.listed(aio, "name"), ["Good"])

    def test_how_long_a_connection_lasts(self) -> None:
        """(what it sends at 0, when it is still there, when it is not, whether it is malformed)"""
        text_keepalive = AIO_TEXT + b"KEEPALIVE#%\n"
        for data, there, gone, malformed in (
                (b"", 19.9, 20, True),                          # says nothing
                (b"\3\0", 19.9, 20, True),
                (b"13#NAME#", 19.9, 20, True),
                (AIO_TEXT + b"13#NAME#", 19.9, 20, True),
                (b"12#%\n", 329, 330, False),                   # a client
                (AIO_KEEPALIVE, 329, 330, False),               # it comes again after 270 s
                (text_keepalive, 119, 120, False),
                (AIO_FRAMED + AIO_KEEPALIVE, 119, 120, False),
                (AIO_TEXT, 86400, None, False),
                (AIO_BINARY, 86400, None, False)):
            with self.subTest(data):
                aio = ms.Aio(make_core())
                session = aio_peer(aio, data)
                listed = aio.registry.total
                session.tick(there)
                self.assertFalse(session.done)
                self.assertEqual(self.listed(aio, "last_seen"), [there] * listed)
                if malformed:
                    self.assertRaises(ms.Malformed, session.tick, gone)
                    self.assertEqual(aio.registry.heard["203.0.113.9", "aio", 0][1:],
                                     ("bad packet", "no whole message in 20 s"))
                elif gone:
                    session.tick(gone)
                    self.assertTrue(session.done)
                session.closed(gone or there)
                self.assertEqual(aio.registry.total, 0)
        # Each message has its own time, though the next one began with its end
        session = aio.session("203.0.113.8", 0.0)
        for now in range(0, 60, 15):
            feed(session, b"#%KEEPALIVE" if now else b"KEEPALIVE", now=now)
            session.tick(now + 14)
        self.assertRaises(ms.Malformed, session.tick, 65)
        session = aio_peer(aio, b"12#%\n")      # from its first byte; more of them change nothing
        session.receive(b"13#N", 100.0)
        session.receive(b"#", 119.0)
        self.assertRaises(ms.Malformed, session.receive, b"D", 120.0)

    def test_only_keepalives_keep_who_sends_them(self) -> None:
        for publish, more, lives in (
                (AIO_TEXT, b"KEEPALIVE#%\n", True), (AIO_FRAMED, AIO_KEEPALIVE, True),
                (AIO_TEXT, b"12#%\n", False), (AIO_FRAMED, hexa("01000000 02"), False)):
            first = b"KEEPALIVE#%" if publish is AIO_TEXT else AIO_KEEPALIVE
            session = aio_peer(ms.Aio(make_core()), publish + first)
            for now in range(40, 161, 40):
                session.tick(float(now))
                if not session.done:
                    self.assertNotEqual(feed(session, more, now=float(now)), b"")
            self.assertEqual(not session.done, lives, more)

    def test_what_is_no_message(self) -> None:
        bomb = zlib.compress(bytes(100 << 20), 9)
        http = b"POST / HTTP/1.1\r\nHost: x\r\n\r\n#%"       # of a browser, with any body
        for data in (
                b"\x80", b"%", b"\0\0\0\0", b"\x16\3\1\2\0",
                b"\x0c\x0e", b"A" * 9000, b"\x0d" + b"A" * 9000, b"HI#" + b"A" * 9000 + b"#%",
                b"\1\0\xff\0", AIO_KEEPALIVE + bytes(4), hexa("01000000 04 01200000") + bytes(8193),
                b"13#N#D#%", b"13#N#D#1.2.3.4#5#6#%", b"13#N#D#-1#%", "13#N#D#२७#%".encode(),
                b"13#N#D#270100#%", hexa("02000000 03 82"), http + AIO_TEXT,
                hexa("01000002 04"), hexa("08000001 789c636060600000"),
                hexa("05000001 0000000000"), hexa("01000000 04 401f0001") + bomb[:8000]):
            aio = aio_ready()
            session = aio.session("203.0.113.9", 0.0)
            with self.subTest(data[:20]):
                tracemalloc.start()
                self.assertRaises(ms.Malformed, feed, session, data, 4096)
                self.assertLess(tracemalloc.get_traced_memory()[1], 200_000)
                tracemalloc.stop()
                self.assertEqual((session.buffer, aio.registry.total), (b"", 2))
                self.assertEqual(aio.registry.heard["203.0.113.9", "aio", 0][1], "bad packet")
        # What came before it is answered; then the connection ends, and its server leaves
        session = aio.session("203.0.113.9", 0.0)
        self.assertEqual(session.receive(AIO_TEXT + b"13#%KEEPALIVE#%", 0.0), b"%SUCCESS#13#%")
        self.assertRaises(ms.Malformed, session.receive, b"", 0.0)
        session.closed(0.0)
        self.assertEqual(aio.registry.total, 2)

    def test_limits(self) -> None:
        """(what it sends again and again, how often it may)"""
        settings = {"limits__requests": "1/3", "limits__datagrams": "1/5"}
        for data, most, words in (
                (b"\x0c", 3, "requests"), (b"NEWS#%", 3, "requests"), (b"12#%\n", 3, "requests"),
                (b"HI#%", 5, "messages"), (AIO_TEXT, 5, "messages"), (AIO_BINARY, 5, "messages"),
                (AIO_FRAMED, 5, "messages")):
            with self.subTest(data):
                aio = aio_ready(**settings)
                session = aio.session("203.0.113.9", 0.0)
                for _ in range(most):
                    feed(session, data)
                self.assertRaisesRegex(ms.Malformed, "too many " + words, feed, session, data)
                exempt = aio.session("127.0.0.1", 0.0)
                feed(exempt, data * 100)
        for data in hexa("01000000 02"), hexa("01000000 01"):   # this dialect has words for it
            session = aio_ready(**settings).session("203.0.113.9", 0.0)
            answers = [feed(session, data) for _ in range(5)]
            self.assertEqual([answer[4] for answer in answers], [data[4]] * 3 + [6] * 2)
            self.assertIn(b"too many requests", answers[3])

    def test_query(self) -> None:
        core = make_core(**{"address_map.192.168.1.5": "198.51.100.2"})
        aio, peer = ms.Aio(core), ("192.168.1.5", 27010)
        session = aio_peer(aio, AIO_FRAMED, peer[0])
        good = zlib.compress(AIO_ANSWER)
        self.assertEqual(self.listed(aio, "name", "verified"),
                         [("198.51.100.2:27010", "connection")])
        self.assertRaises(ms.Malformed, core.poller.datagram, good, peer, 0.5)      # unasked
        # To the source: what the lists show may lead elsewhere from behind the router
        self.assertEqual(core.poller.tick(1.0), [(b"\0", peer)])
        for bad in (b"", b"\0", b"x" * 50, zlib.compress(b"\1" + AIO_ANSWER[1:]), good[:-1],
                    zlib.compress(AIO_ANSWER[:-1]), zlib.compress(b"\0\xff\xff"),
                    zlib.compress(bytes(100 << 20), 9)):
            tracemalloc.start()
            self.assertRaises(ms.Malformed, core.poller.datagram, bad, peer, 1.0)
            self.assertLess(tracemalloc.get_traced_memory()[1], 200_000)
            tracemalloc.stop()
        self.assertRaises(ms.Malformed, core.poller.datagram, good, ("192.168.1.6", 27010), 1.04)
        self.assertEqual(core.poller.datagram(good, peer, 1.04), [])
        facts = ("name", "description", "players", "max_players", "version", "ping_ms")
        self.assertEqual(self.listed(aio, *facts), [("My server", "Fun!", 3, 16, "7", 40)])
        self.assertIn(b"#My server#Fun!#198.51.100.2#27010#", aio_ask(aio, b"12#%\n"))
        for now in range(30, 600):              # silent from now on; its connection is there
            core.poller.tick(float(now))
        self.assertEqual(self.listed(aio, *facts), [("My server", "Fun!", 3, 16, "7", 40)])
        self.assertEqual(len(core.poller.targets), 1)
        self.assertEqual(core.registry.heard[(peer[0], "aio", 27010)][1:],
                         ("silent", "no answer from UDP port 27010"))
        session.closed(600.0)
        self.assertEqual((core.registry.total, core.poller.targets), (0, {}))

    def test_names_in_answers(self) -> None:
        """(name and description in the answer, as they are listed)"""
        place = "203.0.113.9:27010"
        for name, description, listed in (
                (b"", b"", (place, "")), (b"EVIL", b"d", (place, "")),
                (b"n" * 600, b"\xe9" * 600, ("n" * 128, "é" * 512))):
            core = make_core(server__refuse_names="(?i)evil")
            aio = ms.Aio(core)
            aio_peer(aio, AIO_FRAMED)
            core.poller.tick(1.0)
            packet = zlib.compress(b"\0" + struct.pack("<H", len(name)) + name + struct.pack(
                "<H", len(description)) + description + struct.pack("<IIH", 1 << 31, 70000, 7))
            with contextlib.suppress(ms.Malformed):
                core.poller.datagram(packet, ("203.0.113.9", 27010), 1.0)
            self.assertEqual(self.listed(aio, "name", "description"), [listed])
            self.assertEqual(self.listed(aio, "players"), [0 if name == b"EVIL" else 65535])

    def test_news(self) -> None:
        """(file, setting, as text, framed)"""
        aio = ms.Aio(make_core())
        for file, setting, text, framed in (
                ("", "", "", ""), ("", "old", "old", "old"),
                ("\n one \n two % # \n", "old", "one \n two <percent> <num>", "one \n two % #"),
                ("x" + "é" * 40000, "", "x" + "é" * 32499, "x" + "é" * 32499)):     # whole ones
            settings = settings_of({"aio__news": setting})
            settings.texts["aio.news_file"] = file
            aio.read(settings)
            self.assertEqual(aio_ask(aio, b"NEWS#%"), b"%NEWS#" + text.encode() + b"#%")
            payload, rest = ms.aio_unframe(aio_ask(aio, hexa("01000000 01")), 1 << 16)
            words = framed.encode()
            self.assertEqual(payload, b"\1" + struct.pack("<H", len(words)) + words)
            self.assertEqual(rest, b"")

    def test_what_is_listed_again(self) -> None:
        """At the next keepalive or publish, once its address or a ban has changed, or the newer
        connection that had it has ended."""
        for data, again in ((b"13#K [3/9]#D#2#%\n", b"KEEPALIVE#%\n"),
                            (hexa("03000000 03 0200"), AIO_KEEPALIVE),
                            (b"13#K [3/9]#D#2#%\n", b"13#K [3/9]#D#2#%\n")):
            with self.subTest(again):
                core = make_core()
                aio = ms.Aio(core)
                session = aio_peer(aio, data, "127.0.0.1")
                framed = session.dialect is ms.aio_framed
                steps = (({"server__public_address": "203.0.113.5"}, "203.0.113.5"),
                         ({"bans.127.0.0.1": "test"}, None), ({}, "127.0.0.1"))
                for now, (settings, address) in enumerate(steps, 1):
                    reload(core, aio, **settings)
                    self.assertEqual((core.registry.total, session.kept), (0, False))
                    self.assertEqual(core.poller.targets, {})
                    feed(session, again, now=float(now))
                    places = [(address, 2)] if address else []
                    self.assertEqual(self.listed(aio, "address", "port"), places)
                    self.assertEqual(session.kept, bool(address))
                    self.assertEqual(len(core.poller.targets), framed and bool(address))
        aio = ms.Aio(make_core())
        first, second = (aio_peer(aio, b"13#J#D#1#%13#K#D#2#%\n") for _ in range(2))
        feed(first, b"KEEPALIVE#%\n", now=1.0)              # that takes nothing from the newer one
        self.assertEqual((first.kept, second.kept), (False, True))
        second.closed(2.0)
        feed(first, b"KEEPALIVE#%\n", now=3.0)
        self.assertEqual((first.kept, self.listed(aio, "name")), (True, ["K"]))


class AioScenario(unittest.TestCase):
    """Programs of all generations on one running server, over real sockets."""

    def connect(self, greeting: bytes = hexa("01 00000000")) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.server.port("aio")), 5)
        self.addCleanup(sock.close)
        self.take(sock, greeting)
        return sock

    def take(self, sock: socket.socket, wanted: bytes) -> None:
        data = b""
        while len(data) < len(wanted):
            data += sock.recv(len(wanted) - len(data)) or b"the end"
        self.assertEqual(data, wanted)

    def ask(self, request: bytes) -> bytes:
        """All that a peer gets who sends this and no more."""
        with self.connect() as sock:
            sock.sendall(request)
            sock.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: sock.recv(65536), b""))

    def test_all_generations_at_once(self) -> None:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            game = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            game.bind(("127.0.0.1", 0))
            game.settimeout(5)
            port = game.getsockname()[1]
            news = os.path.join(folder, "news.txt")
            with open(news, "w", encoding="utf-8") as file:
                file.write("Party at #9")
            self.server = stack.enter_context(RunningServer(
                "-v", start=HURRIED, aio__port="0", aio__news_file=news))
            text = self.connect(hexa("01 00000000") + b"%1#0#%")
            text.sendall(b"13#Text [1/8]#D#1001#%\n")
            self.take(text, b"%SUCCESS#13#%")
            binary, framed = self.connect(), self.connect()
            binary.sendall(b"\x0dBinary\0D\0\0" + hexa("aa0d"))
            framed.sendall(hexa("03000000 03") + struct.pack("<H", port))
            self.take(framed, AIO_DONE)
            question, peer = game.recvfrom(100)
            self.assertEqual(question, b"\0")
            game.sendto(zlib.compress(AIO_ANSWER), peer)
            parts = [b"My server#Fun!#127.0.0.1#%d#" % port, b"Text [1/8]#D#127.0.0.1#1001#",
                     b"Binary#D#127.0.0.1#1002#"]
            eventually(lambda: self.ask(b"12#%\n") == b"%12#" + b"".join(parts) + b"%")
            for request in AIO_LISTS:
                self.assertEqual(self.ask(request).count(b"127.0.0.1"), 3, request)
            self.assertEqual(self.ask(b"NEWS#%\n"), b"%NEWS#Party at <num>9#%")
            self.assertEqual(self.ask(b"\x80"), b"")
            many = self.ask(b"\x0c" * 1000)     # one read; the peer sends no more
            self.assertEqual(many.count(b"My server"), 1000)
            for leaving, part in zip((framed, text, binary), parts):
                leaving.close()
                eventually(lambda part=part: part not in self.ask(b"12#%\n"))
            self.assertIn(b"#127.0.0.1#27010#", self.ask(b"12#%"))          # the placeholder
        self.assertRegex(self.server.log, "aio malformed: the first byte, 80, is of no dialect")




# --- Pages ------------------------------------------------------------------------------------

CHROMIUM = next(filter(None, map(shutil.which, (
    "chromium", "chromium-browser", "google-chrome", "chrome"))), None)
POLICY = ("default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; "
          "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'")
WALL = 1_795_222_800.0          # 2026-11-21 01:00 UTC
TITLES = {"iceball": "Iceball", "hyperbol": "Hyperbol", "subspace": "SubSpace", "aio": "AIO"}
LOOK = ms.Look("Open Game Masters", "Every public server of four small games.", None)
HOSTILE = [
    "<img src=x onerror=alert(1)>", "\"><script>alert(2)</script>", "javascript:alert(3)",
    "' onmouseover='alert(4)", "\u202egnp.exe right to left \u202e\u2067", "שרת המשחקים הגדול",
    "Z" + "\u0301\u0335\u0489" * 1667, "W" * 3000, "&lt;b&gt; &amp; ${title} $rows %s <rows>",
    "</table></body><style>*{display:none}</style>"]
SPAN_STEPS = {"day": (1440, 60), "week": (672, 900), "month": (2976, 900), "year": (8784, 3600)}


def make_server(**values):
    server = dict(
        game="iceball", address="192.0.2.1", port=27790, name="Iceball Server", mode="CTF",
        map="mesa", version="0.2.1-37", players=3, max_players=32, playing=None, description="",
        official=False, verified="handshake", confirmed=True, responding=True, ping_ms=None,
        first_seen=WALL - 90 * 86400, last_seen=WALL - 12, details={})
    return SimpleNamespace(**dict(server, **values))


def make_servers(count):
    """Names and crowds as in the real lists: most servers empty, a few full."""
    chance = random.Random(1)
    words = "Ice Fort Polar Frost Nordic Zone Pub Trench Lazy Golden Old Club [EU] #1 24/7".split()
    servers = []
    for index in range(count):
        address = "2001:db8:1234::%x" if index % 20 == 7 else "198.18.%d.9"
        servers.append(make_server(
            game=chance.choice(list(TITLES)), address=address % index, port=1024 + index,
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
    return SimpleNamespace(start=WALL - count * step, step=step, means=means,
                           peaks=[mean and mean + 3 for mean in means])


def row_of(server):
    before, after = ms.server_row(server, ms.sparkline(range(24)), TITLES.get(server.game, "?"))
    return (before + ms.seen_cell(server.last_seen, WALL) + after).decode("utf-8")


def render_list(servers, look=LOOK, game="", name="", players_min=""):
    """The list page as the program answers this query."""
    counts = {key: sum(server.game == key for server in servers) for key in TITLES}
    titles = {key: title for key, title in TITLES.items() if counts[key] or key == game}
    least = int(players_min or 0)
    found = [server for server in servers if game in ("", server.game) and server.players >= least
             and ms.is_called(server, ms.clean(name).casefold())]
    rows = [row_of(server).encode("utf-8") for server in found[:ms.PAGE_ROWS]]
    return ms.list_page(titles, counts, game, rows, len(found), sum(s.players for s in found), look,
                        name, least, ms.Html("<pre><code>127.0.0.1 27790</code></pre>"),
                        ms.sparkline(range(24))).decode("utf-8")


def server_page(server, known=None, span="day"):
    return ms.server_page(server, known, make_series(span), span, WALL, LOOK, "Iceball")


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
    def holds(self, text, *parts):
        for part in parts:
            self.assertIn(part, text)

    def test_fill_escapes_everything_but_html(self):
        text = ms.fill("$a|$b|$c|$d", a="<\"'&>", b=ms.Html("<b>"), c=1, d=["<", ms.Html("<i>")])
        self.assertEqual(text, "&lt;&quot;&#x27;&amp;&gt;|<b>|1|&lt;<i>")

    def test_hostile_text_makes_no_tag_and_no_attribute(self):
        servers = hostile_servers()
        pages = [render_list(servers), render_list(servers, game="aio", name=HOSTILE[1])]
        for text, server in zip(HOSTILE, servers):
            look, findings = ms.Look(text, text, None), [(WALL, text, text, 1, text, text)]
            pages += [
                server_page(server), server_page(None, server),
                ms.error_page(404, text, text, look),
                ms.check_page(text, 0, [(text, text)], findings, servers, WALL, look)]
        for page in pages:
            for tag, attributes in Outline(page).tags:
                self.assertNotIn(tag, ("img", "iframe", "object", "rows"))
                self.assertTrue(tag != "script" or attributes == {"src": "/app.js", "defer": None})
                for name, value in attributes.items():
                    self.assertFalse(name.startswith("on") or name == "style", attributes)
                    if name in ("href", "src", "action"):
                        self.assertRegex(value, "^(/|iceball://)")

    def test_row(self):
        for server, *parts in (
                (make_server(), '<tr role="row"><td', 'href="iceball://192.0.2.1:27790"', ">CTF<",
                 '<b>3</b>/32<meter aria-hidden="true" max="32" value="3">', ">mesa<", ">Iceball<",
                 ' title="2026-11-21T00:59:48Z">12 s ago<', ">0.2.1-37<", "<svg",
                 "<bdi>Iceball Server</bdi>"),
                (make_server(players=32), 'class="full"'),
                (make_server(players=0, max_players=0), 'class="empty"', "<b>0</b></span>"),
                (make_server(name=""), "<bdi>192.0.2.1:27790</bdi>"),
                (make_server(address="2001:db8::1", game="my game&x"),
                 "/server?game=my%20game%26x&amp;address=2001%3Adb8%3A%3A1&amp;port=27790",
                 "<code>[2001:db8::1]:27790</code>\n")):
            self.holds(row_of(server), *parts)

    def test_ago(self):
        for seconds, words in (
                (-5, "now"), (0.9, "now"), (12.7, "12 s ago"), (89, "89 s ago"), (90, "1 min ago"),
                (5399, "89 min ago"), (5400, "1 h ago"), (129600, "1 d ago"), (864000, "10 d ago")):
            self.assertEqual(ms.ago(seconds), words)

    def test_sparkline(self):
        self.assertEqual(ms.sparkline([None] * 24), "")
        self.holds(ms.sparkline([None, 0, 2, 4]), 'd="M0 9V9h1V8h1V4h1V0h1V9"')
        for values, path in (([1, 16], "V8h1V0h1V9"), ([1], "V6h1V9")):
            self.holds(ms.sparkline(values), 'd="M0 9%s"' % path)

    def test_ticks(self):
        for top, ticks in ((0, [0, 1]), (1, [0, 1]), (3, [0, 1, 2, 3]), (7.2, [0, 2, 4, 6, 8]),
                           (43, [0, 20, 40, 60]), (100, [0, 50, 100])):
            self.assertEqual(ms.value_ticks(top), ticks)
        for days, first, count in ((1, "03:00", 8), (7, "Sun 15", 7), (31, "24 Oct", 6),
                                   (366, "Dec", 12)):
            found = ms.time_ticks(WALL - days * 86400 + 60, WALL - 60)
            self.assertEqual((found[0][1], len(found)), (first, count))

    def test_chart_leaves_gaps_and_names_peak_and_latest(self):
        means = [1, 2, None, None, 7, None, 3, 3, None, 4]
        series = SimpleNamespace(start=WALL - 600, step=60, means=means,
                                 peaks=means[:7] + [5, None, 4])
        chart = ms.chart(series, WALL + 12)
        # Four stretches; one of 8 players is 12.5 % of the height
        self.holds(
            chart,
            'class="mean" d="M0 87.5h.01L1 75h.01M4 12.5h.01M6 62.5h.01L7 62.5h.01M9 50h.01"',
            'd="M0 100V87.5h1V100M1 100V75h1V100M4 100V12.5h1V100M6 100V62.5h1V100M7 100V37.5h1V',
            '<circle cx="40.4%" cy="23%"', ">peak 7<",
            'latest" x="83.4%" y="50%" dx="6" dy="5">4<',
            "Peak 7 at 2026-11-21 00:54. Latest 4, " + ms.time_tag(WALL, WALL + 12))
        ticks = r'class="(\w+)"[^>]*/><text class="tick end"[^>]*>(\d+)<'
        self.assertEqual(re.findall(ticks, chart),
                         [("axis", "0")] + [("grid", tick) for tick in "2468"])
        day, year = [ms.chart(make_series(span), WALL) for span in ("day", "year")]
        self.assertEqual(re.findall(r'<text class="middle[^>]*>([^<]+)<', day),
                         "03:00 06:00 09:00 12:00 15:00 18:00 21:00 00:00".split())
        self.assertLess(len(re.findall("h.01", year)), ms.CHART_POINTS)         # not one an hour
        series = make_series()
        series.peaks[101] = 40
        self.holds(ms.chart(series, WALL), "V0h4V100")
        series.means = series.peaks = [None] * 10
        self.holds(ms.chart(series, WALL), "No history in this span yet")

    def test_server_page(self):
        server = make_server(mode="\u05de", map="<m>", players=1200, playing=3, ping_ms=23.4,
                             description="Builders welcome.", details={"free_slots": "none"})
        fact = '<div class="%s"><dt>%s</dt><dd>%s</dd></div>'
        self.holds(
            server_page(server),
            # Each part of the lead has its own direction
            "<bdi>Iceball</bdi> · <bdi>\u05de</bdi> · <bdi>&lt;m&gt;</bdi>",
            'href="iceball://192.0.2.1:27790">Play', '<svg class="chart"', "94.9 % of the time",
            'aria-current="page">Day<', 'span=week" aria-current="false">Week<',
            "1200 of 32, 3 of them playing", "<code>192.0.2.1:27790</code>",
            "It answered this master&#x27;s handshake", ms.time_tag(WALL - 12, WALL),
            *[fact % (key, key, value) for key, value in (
                ("Ping from this master", "23 ms"), ("Free slots", "none"),
                ("Description", "Builders welcome."))])
        for first_seen, words in ((WALL - 3600, ">100 % of"), (WALL - 72000, ">93.9 % of")):
            self.holds(server_page(make_server(first_seen=first_seen)), words)
        page = server_page(None, make_server(name="Gone <fishing>", last_seen=WALL - 7200))
        self.holds(page, "Gone &lt;fishing&gt;", "Not listed now. Last seen <time",
                   '<svg class="chart"', "/check?game=iceball&amp;address=192.0.2.1&amp;port=27790")
        for part in "Play<", "Mode", "Verified":
            self.assertNotIn(part, page)
        server.game = "aio"
        page = ms.server_page(server, None, None, "day", WALL, LOOK)
        for part in "Play<", "chart":               # no history is kept
            self.assertNotIn(part, page)

    def test_badges(self):
        server = make_server(name="Once", official=True, confirmed=False, responding=False,
                             verified="self-reported")
        self.assertEqual(ms.badges(make_server()), "")
        words = re.findall(r'<i title="[^"]{20,}">([a-z -]+)</i>', ms.badges(server))
        self.assertEqual(words, ["official", "unconfirmed", "self-reported", "not responding"])
        for text in row_of(server), server_page(server):
            self.holds(" ".join(Outline(text).text.split()), "Once official unconfirmed")

    def test_check_page(self):
        findings = [(WALL - 40, "Iceball", "192.0.2.1", 0, "Bad packet", "Update it."),
                    (WALL - 50, "AIO", "192.0.2.1", 7, "Silence", "Wait.")]
        self.holds(
            ms.check_page("192.0.2.1", 5, [("Banned: spam", "Ask.")], findings, [make_server()],
                          WALL, LOOK),
            'name="address" value="192.0.2.1"', 'name="port" value="5"', " data-live", "40 s ago",
            "Listed now: 1 server<", "<h3>Banned: spam</h3>\n<p>Ask.</p>", "Iceball Server</bdi>",
            "<h3>Bad packet</h3>\n<p>Update it.</p>", "· Iceball from <code>192.0.2.1</code>",
            "· AIO from <code>192.0.2.1:7</code>")
        page = ms.check_page("2001:db8::1", 5, [], [], [], 0.0, LOOK, "in the last 9 s")
        self.holds(page, "Nothing at [2001:db8::1]:5 is listed now",
                   "Nothing has arrived from [2001:db8::1]:5 in the last 9 s.")
        self.assertNotIn("data-live", page)

    def test_list_page(self):
        self.holds(ms.list_page(TITLES, {}, "", [], 3104, 1, LOOK).decode(), 'data-total="3104"',
                   "The first 2,000 of 3,104 servers. Search by name to find the others.",
                   "<b>1</b> player on <b>3,104</b> servers")
        self.holds(render_list([]), "No servers yet", " hidden>", "<code>127.0.0.1 27790</code>")
        self.holds(render_list([make_server()], game="aio"), 'class="one-game"',
                   "<title>AIO · Open Game Masters</title>",
                   '<a href="/" aria-current="false">All games<small>1</small>',
                   '<a href="/?game=aio" aria-current="page">AIO<small>0</small>')
        nobody = render_list([], name="nobody", players_min="7")
        self.holds(nobody, "No server matches.", 'value="nobody"', 'value="7"')
        for text in nobody, render_list(make_servers(1)):
            # A browser for text shows what is hidden
            self.assertNotIn("No servers yet", text)

    def test_own_template(self):
        own = ms.list_template("<title>$title</title> $$5 $table")
        page = render_list(make_servers(3), ms.Look("A & B", "", own))
        self.assertTrue(page.startswith("<title>A &amp; B</title> $5 <p id"))
        for text, reason in (("$nonsense", r"unknown placeholder \$nonsense .*head, totals"),
                             ("100 $ a line", "line 1")):
            with self.assertRaisesRegex(ValueError, reason):
                ms.list_template(text)


class Exchange(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"                   # Chromium believes no ETag of HTTP/1.0

    def do_GET(self):
        kind, text = self.server.answer(urlsplit(self.path))
        tag = '"%08x"' % zlib.crc32(text.encode("utf-8"))
        known = self.headers.get("If-None-Match") == tag
        status = 503 if self.server.down else 304 if known else 200
        body = b"" if known else text.encode("utf-8")
        if kind == "text/html":
            self.server.asked.append((self.path, status))
        self.send_response(status)
        for name, value in (("Content-Type", kind + "; charset=utf-8"), ("ETag", tag),
                            ("Content-Security-Policy", POLICY), ("Content-Length", len(body))):
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


class Site(http.server.ThreadingHTTPServer):
    """The pages over HTTP from `servers`, which a test may change."""

    daemon_threads = True
    servers, asked, down, look = [], [], False, LOOK

    def answer(self, target):
        query = {key: values[-1] for key, values in parse_qs(target.query).items()}
        address = query.pop("address", "127.0.0.1")
        found = [server for server in self.servers if server.address == address]
        files = {"/style.css": ("text/css", ms.STYLE_CSS),
                 "/app.js": ("text/javascript", ms.APP_JS),
                 "/icon.svg": ("image/svg+xml", ms.ICON_SVG)}
        if target.path in files:
            return files[target.path]
        text = ms.error_page(404, "Nothing here", "No page has this address.", LOOK)
        if target.path == "/":
            text = render_list(self.servers, self.look, **{
                key: query[key] for key in ("game", "name", "players_min") if key in query})
        elif target.path == "/server":
            text = server_page(found[0], None, query.get("span", "day"))
        elif target.path == "/check":
            findings = [(WALL - 40, "Iceball", address, 5, "The handshake failed", "Wait.")]
            text = ms.check_page(address, 0, [], findings[:len(found)], found, WALL, LOOK)
        return "text/html", text


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
        self.errors, self.loaded = [], set()

    def start(self):
        tab = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.call(
            "Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]}
        for method in "Page.enable", "Runtime.enable", "Log.enable":
            self.call(method)
        self.call("Page.setLifecycleEventsEnabled", enabled=True)
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def end(self):
        """Leave nothing behind, whether it has started or not: without its pipes it ends."""
        os.close(self.pipe_in)
        os.close(self.pipe_out)
        self.process.wait(20)
        shutil.rmtree(self.profile, ignore_errors=True)

    def send(self, method, **params):
        self.last_id += 1
        message = dict(self.session, id=self.last_id, method=method, params=params)
        os.write(self.pipe_in, json.dumps(message).encode() + b"\0")

    def receive(self):
        while b"\0" not in self.buffer:
            data = os.read(self.pipe_out, 65536)
            assert data, "Chromium has ended"
            self.buffer += data
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message.decode("utf-8"))

    def call(self, method, **params):
        """The result of one command. Errors of the page that arrive meanwhile are kept."""
        self.send(method, **params)
        wanted = self.last_id
        while True:
            message = self.receive()
            if message.get("id") == wanted:
                return message.get("result", {"result": {}})
            event, details = message.get("method"), message.get("params")
            if event == "Page.lifecycleEvent" and details["name"] == "load":
                self.loaded.add(details["loaderId"])
            elif event == "Page.javascriptDialogOpening":
                self.errors.append("dialog: " + details["message"])
                self.send("Page.handleJavaScriptDialog", accept=True)
            elif event == "Runtime.exceptionThrown" or (
                    event == "Log.entryAdded" and details["entry"]["level"] == "error"):
                self.errors.append(str(details))

    def navigate(self, url):
        loader = self.call("Page.navigate", url=url)["loaderId"]
        eventually(lambda: self.evaluate("1") and loader in self.loaded, 15)

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

    def setUp(self):
        self.site.servers, self.site.down, self.site.look = make_servers(60), False, LOOK
        self.browser.resize(1280)
        self.browser.page_errors()

    def tearDown(self):
        self.assertEqual(self.browser.page_errors(), [])

    def open(self, target="/"):
        self.browser.navigate("http://127.0.0.1:%d%s" % (self.site.server_port, target))
        self.site.asked.clear()

    def js(self, script):
        return self.browser.evaluate(script)

    def of(self, selector, part="textContent"):
        return self.js("document.querySelector(%r)?.%s" % (selector, part))

    def css(self, selector, name):
        return self.js("getComputedStyle(document.querySelector(%r)).%s" % (selector, name))

    def names(self):
        return self.js(ROWS + ".map(row => row.querySelector('bdi').textContent)")

    def expect(self, wanted=lambda server: True):
        """The page shows the names of these servers, in this order, soon."""
        names = [server.name for server in self.site.servers if wanted(server)]
        self.assertTrue(names)
        eventually(lambda: self.names() == names)

    def says(self, text):
        """The status line has this text, soon."""
        eventually(lambda: text in self.of("#status") if text else not self.of("#status"))

    def type(self, selector, text):
        self.js("""{const box = document.querySelector(%r); box.focus(); box.value = %s;
            box.dispatchEvent(new Event('input', {bubbles: true}))}""" % (
                selector, json.dumps(text)))

    def refresh(self):
        """A refresh now, as when the tab comes to the front; to its end."""
        self.js("document.dispatchEvent(new Event('visibilitychange'))")
        eventually(lambda: not self.js("asking"))


class BrowserTest(BrowserCase):
    """What the script adds."""

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
                self.type("[name=name]", text)
                self.expect(lambda server: server is self.site.servers[at])
            self.site.asked.clear()
            for text in "n", "no", "nobody":
                self.type("[name=name]", text)
            self.says("No server matches.")
        eventually(lambda: self.site.asked)
        self.assertEqual(self.site.asked, [("/?name=nobody", 200)])        # once, when typing ended
        self.type("[name=name]", "")
        self.says("50 of 63 servers. Search by name to find the others.")
        self.site.servers = make_servers(40)            # it is capped no longer than it is long
        self.refresh()
        self.says("40 servers")
        self.assertFalse(self.js("capped"))
        self.type("[name=name]", "lazy")
        self.expect(lambda server: "Lazy" in server.name)
        self.says("%d of 40 servers shown" % len(self.names()))

    def test_sort(self):
        self.open()
        players = [server.players for server in self.site.servers]
        heads = "[...document.querySelectorAll('th')].map(head => head.getAttribute('aria-sort'))"
        for shown, head, search in (
                (sorted(players, reverse=True), "descending", "?sort=-players"),
                (sorted(players), "ascending", "?sort=players"), (players, None, "")):
            self.js("document.querySelectorAll('th button')[4].click()")
            found = self.js(ROWS + ".map(row => parseInt(row.cells[4].textContent))")
            self.assertEqual((found, self.js(heads)[4], self.js("location.search")),
                             (shown, head, search))
        self.js("document.querySelectorAll('th button')[7].focus()")
        for sign in 1, -1:
            self.browser.press("Enter", 13, "\r")
            found = self.js(ROWS + ".map(row => row.querySelector('code').textContent)")
            numbers = [int(text.split(".")[2]) for text in found if text[0] != "["]
            self.assertEqual(numbers, sorted(numbers, reverse=sign < 0))

    def test_hide_and_minimum(self):
        self.open()
        self.js("document.querySelector('[value=empty]').click()")
        self.expect(lambda server: server.players)
        self.js("document.querySelector('[value=full]').click()")
        self.expect(lambda server: server.players and server.players != server.max_players)
        for typed, kept in (("1.5", "&players_min=2"), ("-3", ""), ("70000", "&players_min=65535"),
                            ("1e1", "&players_min=10")):
            self.type("[name=players_min]", typed)
            self.assertEqual(self.js("location.search").partition("&")[::2][1], kept[1:], typed)
        self.expect(lambda server: server.players > 9 and server.players != server.max_players)

    def test_link_reproduces_the_view(self):
        self.open("/?game=subspace")
        self.type("[name=name]", "e")
        self.js("document.querySelector('[value=empty]').click()")
        self.js("document.querySelectorAll('th button')[0].click()")
        names, link = self.names(), self.js("location.pathname + location.search")
        self.assertEqual(names, sorted(names, key=str.lower))
        self.assertEqual(link, "/?game=subspace&name=e&hide=empty&sort=name")
        self.assertIn("name=e&hide=empty&sort=name&game=aio", self.of("#tabs a:last-child", "href"))
        self.open("/check")
        self.open(link)
        self.assertEqual(self.names(), names)
        self.assertEqual(self.js("[...document.querySelectorAll('[name=name], :checked')]"
                                 ".map(box => box.value)"), ["e", "empty"])
        self.type("[name=name]", "")                    # the others are fetched at once
        eventually(lambda: len(self.names()) == sum(
            server.game == "subspace" and server.players > 0 for server in self.site.servers), 3)

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
        self.site.servers[20].last_seen = WALL - 1
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
        self.assertEqual(self.of("tbody tr:nth-child(11) td:nth-child(5) b"), "77")
        self.assertEqual(self.js("document.querySelectorAll('tbody tr .copy').length"), 60)

    def test_an_own_template_of_the_table_alone_is_refreshed_by_itself(self):
        script = self.browser.call("Page.addScriptToEvaluateOnNewDocument", source="""
            const every = setInterval; window.setInterval = (call, ms) => every(call, ms / 20)""")
        self.addCleanup(self.browser.call, "Page.removeScriptToEvaluateOnNewDocument", **script)
        self.site.look = ms.Look("", "", ms.list_template("<!doctype html>$head$table"))
        self.open()
        self.site.servers = self.site.servers[:3]
        self.expect()

    def test_live_update_keeps_search_sort_and_selection(self):
        self.open("/?sort=-players")
        self.type("[name=name]", "a")
        server = self.site.servers[1]
        server.name, server.players = "Aaa", 1000
        self.refresh()
        self.assertEqual(self.names()[0], "Aaa")
        self.assertEqual(self.js("document.activeElement.name"), "name")
        for target, part, mode in (("", "tbody code", "New"), ("/server", "#facts dd", "Newer")):
            if target:
                self.open(target + "?address=" + server.address)
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
        self.assertEqual(self.js("document.querySelectorAll('#facts .copy').length"), 1)

    def test_tabs_and_the_empty_state_come_and_go(self):
        one, other = make_server(), make_server(game="aio", address="192.0.2.2")
        self.site.servers = []
        self.open()
        for servers, tabs in (([], ""), ([one], ""), ([one, other], "All games2 Iceball1 AIO1"),
                              ([one], ""), ([], "")):
            self.site.servers = servers
            self.refresh()
            self.assertEqual(" ".join(self.of("#tabs", "innerText").split()), tabs)
            self.assertEqual(self.of("#tabs", "offsetHeight") > 0, bool(tabs))
            self.assertEqual((self.of("#servers", "hidden"), len(self.names())),
                             (not servers, len(servers)))
            self.assertEqual("No servers yet" in self.of("main", "innerText"), not servers)
        self.assertEqual(self.js("document.querySelectorAll('#empty .copy').length"), 1)

    def test_master_away(self):
        address = "address=" + self.site.servers[7].address
        for target, page in (("/", "list"), ("/check?" + address, "page"),
                             ("/server?" + address, "page")):
            self.open(target)
            self.assertEqual(self.of("#status", "offsetHeight") > 0, page == "list")
            self.js("document.querySelector('td:nth-child(7), time').textContent = 'old'")
            self.site.down = True                       # it answers with an error
            self.refresh()
            self.says("The master answers with error 503. This %s is from" % page)
            self.assertNotEqual(self.of("td:nth-child(7), time"), "old")
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
        address = ms.endpoint(server.address, server.port)
        for without in "", "navigator.clipboard.writeText = undefined":       # as with plain http
            self.js("navigator.clipboard.writeText('')")
            self.js(without)
            self.js("document.querySelectorAll('.copy')[3].click()")
            eventually(lambda: self.of(".unseen") == "Copied " + address)
            self.assertEqual(self.js("navigator.clipboard.readText()"), address)
            self.assertEqual(self.of("body :focus", "title"), "Copy" if without else None)
            self.js("document.querySelector('.unseen').textContent = ''")

    def test_check_form(self):
        self.open("/check?address=%s" % self.site.servers[0].address)
        self.assertEqual(self.of("h3"), "The handshake failed")
        self.js("document.querySelector('[name=address]').value = '203.0.113.5'")
        self.js("document.querySelector('form button').click()")
        eventually(lambda: "Nothing has arrived from 203.0.113.5" in (self.of("main") or ""))


class LayoutTest(BrowserCase):
    """What the page is without it, and how it looks."""

    def test_complete_without_the_script(self):
        self.browser.call("Emulation.setScriptExecutionDisabled", value=True)
        self.addCleanup(self.browser.call, "Emulation.setScriptExecutionDisabled", value=False)
        self.open("/?game=subspace&name=e")
        self.expect(lambda server: server.game == "subspace" and "e" in server.name.lower())
        self.assertEqual(self.js("document.querySelectorAll('th button, .copy').length"), 0)
        fields = self.js("[...new FormData(document.querySelector('#search'))].map(String)")
        self.assertEqual(fields, ["game,subspace", "name,e", "players_min,"])
        self.assertGreater(self.of("#search button", "offsetHeight"), 0)

    def test_the_board_looks_like_one(self):
        """The name heaviest, figures in columns, full servers dimmed, empty ones lighter."""
        self.site.servers = [make_server(players=players) for players in (3, 32, 0)]
        self.browser.resize(2560)
        self.open()
        self.assertLessEqual(self.of("#servers", "offsetWidth"), 1200)
        rows = ["tbody tr:nth-child(%d) " % number for number in (1, 2, 3)]
        self.assertEqual(self.css(rows[0], "fontVariantNumeric"), "tabular-nums")
        self.assertIn("monospace", self.css(rows[0] + "code", "fontFamily"))
        self.assertEqual([self.css(row + "a", "fontWeight") for row in rows], ["650", "650", "400"])
        soft = self.css("footer", "color")
        self.assertEqual([self.css(row + "td:nth-child(5)", "color") == soft for row in rows],
                         [False, True, True])
        self.browser.resize(390, dark=True)
        self.assertEqual((self.css("body", "backgroundColor"), self.css("body", "color")),
                         ("rgb(19, 18, 16)", "rgb(236, 232, 223)"))
        tops = self.js("""[...document.querySelector('tbody tr').cells]
            .filter(cell => cell.offsetWidth).map(cell => cell.getBoundingClientRect().top)""")
        self.assertEqual([round((top - tops[0]) / 32) for top in tops], [0, 1, 1, 1, 0, 1],
                         "two lines: name and players, the rest")

    def test_nothing_stands_out(self):
        self.site.servers[5:5] = hostile_servers()
        for target in ("/", "/?game=iceball", "/check?address=192.0.2.3", "/nowhere", "/check",
                       *["/server?address=192.0.2.%d" % index for index in range(10)],
                       *["/server?address=192.0.2.9&span=" + span for span in ms.SPANS]):
            self.open(target)
            for width in 320, 390, 600, 768, 1000, 1280, 1920:
                self.browser.resize(width)
                self.assertLessEqual(self.of("html", "scrollWidth"), width, target)
                cut = self.js("""[...document.querySelectorAll('h1, dd, li, p')]
                    .filter(box => box.scrollWidth > box.clientWidth).length""")
                # Combining marks alone have nowhere to break
                self.assertTrue(not cut or target.endswith("2.6"), (target, width))
                # Where the main part ends, Safari cuts off: it has no overflow-clip-margin
                main, *texts = self.js(EDGES % "main, .chart text")
                self.assertEqual(len(texts) > 6, "server?" in target)
                for left, right, height in texts:
                    self.assertTrue(main[0] <= left and right <= main[1] and height >= 12,
                                    (target, width, main, left, right, height))
                if target == "/":
                    self.assertEqual(self.names()[5:15], HOSTILE)
                    heights = self.js(ROWS + ".map(row => row.offsetHeight)")
                    self.assertEqual(set(heights), {64 if width < 641 else 40})
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

    def test_keyboard_and_screen_reader(self):
        self.browser.resize(1280, 400)
        self.open()
        self.js("document.querySelectorAll('tbody tr')[30].querySelector('a').focus()")
        for _ in range(20):                             # the focus is never behind the head
            self.browser.press("Tab", 9, shift=True)
            self.assertTrue(self.js("""document.activeElement.getBoundingClientRect().top
                >= document.querySelector('thead').getBoundingClientRect().bottom"""))
        for width, columns in (390, 6), (1280, 8):
            self.browser.resize(width)
            nodes = self.browser.call("Accessibility.getFullAXTree")["nodes"]
            roles = [node["role"]["value"] for node in nodes if not node["ignored"]]
            self.assertEqual([roles.count(role) for role in (
                "table", "row", "meter", "search", "columnheader")], [1, 61, 0, 1, columns])
# --- It holds against noise ----------------------------------------------------------------------

NASTY_BYTES = b"\0\1\x7f\x80\xff\r\n #%&=:;/[]{}\"'<>0-"


def game_server_answers(packet: bytes) -> List[bytes]:
    """What game servers send back to what a master sends them."""
    identity = packet[1:5]
    if packet[:4] == b"MSOK":
        return [b"HSHK" + packet[4:]]
    if packet == b"\0":
        return [zlib.compress(AIO_ANSWER)]
    if packet[:1] == b"\2" and len(packet) > 5:
        return [b"\3" + identity + b"\1My server\0", b"\4" + identity + b"\1\5\0\0\0",
                b"\5" + identity]
    if packet[:1] == b"\2" and len(packet) == 5:
        return [hyperbol_reply(o1=identity)]
    return [asss(packet)] if len(packet) == 4 or packet[4:] in ms.PING_FORMS[1:] else []


FULL_TEXTS = announcement(name=b"n" * 30, mode=b"m" * 10, map=b"p" * 30)


class FuzzTest(unittest.TestCase):
    """But for Malformed no exception escapes, whatever comes, whole or in pieces."""

    SAMPLES = {
        "iceball": (CAPTURED, FULL_TEXTS, hexa("4853484b 8a850c03"), hexa("01 0100 0151 00"),
                    hexa("06")),
        "ping": (ZONE_PACKET, zone_packet(name=b"\x80" * 32), PING_TIME, BOTH),
        "list": (CONNECT, REQUEST, hexa("0004 00000000"), hexa("0005 01020304 0000"),
                 hexa("0007"), hexa("000e 06 0005 01020304 06 0004 00000000"),
                 hexa("0003 00000000 000a 20000000 01") + bytes(31)),
        "poller": (hyperbol_reply(), SHORT, BOTH, zlib.compress(AIO_ANSWER)),
        "hyperbol": (b"KEY!" + hexa("10000000"), b"KEY!" + bytes(4)),
        "aio": (AIO_TEXT, AIO_TEXT + b"\n12#%KEEPALIVE#%NEWS#%", AIO_FRAMED, AIO_BINARY,
                b"13#Name [3/8]#D#203.0.113.7#27010#%12#%", b"SET_IP#203.0.113.7#%\n",
                AIO_FRAMED + AIO_KEEPALIVE + hexa("01000000 02 01000000 01"),
                hexa("0b000001 789c636eca0400017900ef"), *AIO_LISTS),
        "web": (b"GET /master.json HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\n\r\n",
                b"GET /?name=a%FFb&players_min=3 HTTP/1.0\r\n\r\n",
                b'GET /servers.json HTTP/1.1\r\nHost: x\r\nIf-None-Match: "x", W/"y"\r\n\r\n',
                b"GET /check?address=203.0.113.9&port=4000 HTTP/1.1\r\nHost: x\r\n\r\n" * 2,
                b"GET http://[::1]/server?game=aio&address=%5B::1%5D&port=1 HTTP/1.0\r\n\r\n",
                b"GET /history.json?game=iceball&span=day HTTP/1.0\r\n\r\n",
                b"OPTIONS /announce HTTP/1.1\r\nHost: x\r\n\r\n")}
    # A type and a body for POST /announce; most are to be read, so only the body is spoilt
    ANNOUNCEMENTS = (
        ("x-www-form-urlencoded", b"game=mygame&port=4000&name=M%20%C3%BC&players=3&max_players=9"),
        ("x-www-form-urlencoded", b"game=mygame&port=4000&action=stop"),
        ("json", b'{"game":"hyperbol","port":27888,"name":"\\ud83d\\u0000","version":1.5e3}'),
        ("json", b'{"game":"subspace","port":5000,"name":"Z\\ud800","description":"d"}'))
    ROWS = (
        b'["S\\ud800","m","map","1",70000,9,-3,"d",999,"x",false,{"skill":[1]},"nowhere",true]',
        b'["S","m","map","134",1,9,null,"d",1,"query",true,{"arenas":"x"},"203.0.113.9",false]',
        b"[" * 4000)

    def setUp(self) -> None:
        self.chance = random.Random(20)
        self.core = core = make_core(
            games__mygame="My Game", limits__requests="100000", limits__datagrams="100000",
            limits__servers="300")
        self.protocols: Dict[str, Any] = {
            "iceball": ms.Iceball(core), "ping": ms.SubSpacePing(core),
            "list": ms.SubSpaceList(core), "poller": core.poller, "hyperbol": ms.Hyperbol(core),
            "aio": ms.Aio(core), "web": ms.Web(core)}
        self.sessions: List[ms.Session] = []
        self.games: Set[str] = set()
        core.registry.watch(lambda event, server: self.games.add(server.game), events=["listed"])
        self.now = 0.0
        self.here: Any = None           # whose input it is; None: nobody is there any more

    def mutated(self, data: bytes) -> bytes:
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

    def datagram(self, name: str, data: bytes, peer: Any, depth: int = 3) -> None:
        """One datagram, and what its sender answers to the answers."""
        with contextlib.suppress(ms.Malformed):
            replies = self.protocols[name].datagram(data, peer, self.now)
            for packet, place in replies if depth else ():
                for answer in game_server_answers(packet):
                    answer = self.chance.choice((answer, self.mutated(answer)))
                    self.datagram(name, answer, place, depth - 1)

    def connection(self, name: str, data: bytes) -> None:
        """One connection, which stays open for a while."""
        session = self.protocols[name].session(self.here[0], self.now)
        greeting = session.opened(self.now)
        out = b""
        try:
            data = data.replace(b"KEY!", greeting[4:8])
            out += feed(session, data, self.chance.choice((1, 7, 1 << 30)), self.now)
            if self.chance.random() < 0.3:
                out += session.ended(self.now)
            if name == "web":
                out += session.tick(self.now + 60.0)
                self.assertTrue(session.done)
        except ms.Malformed:
            session.done = True
        while name == "web" and out and not data.startswith(b"HEAD"):
            out = split_response(out)[3]            # each is whole
        self.sessions.append(session)
        if len(self.sessions) > 20 or session.done:
            self.sessions.pop(0).closed(self.now)

    def announcement(self) -> bytes:
        type, body = self.chance.choice(self.ANNOUNCEMENTS)
        body = self.mutated(body)
        return http_request("/announce", "Content-Type: application/" + type,
                            "Content-Length: %d" % len(body), method="POST", body=body)

    def row(self) -> None:
        """What noise in the database makes of a listed server."""
        text = self.mutated(self.chance.choice(self.ROWS)).decode("utf-8", "replace")
        row = ("mygame", self.chance.choice((self.here[0], "2001:db8::1", "nowhere", "")),
               self.chance.choice((1, 65535, 0, -5, 1 << 40)), 99.0, 0.0, 9.0, text)
        server, registry = ms.restored_server(row, self.now, 10.0), self.core.registry
        with contextlib.suppress(ms.Refused):
            if server is not None and registry.get(*server.key) is None:
                registry.admit(*server.key, server.source, server.name)
                registry.insert(server)
                json.dumps(ms.stored_row(server, 0.0)[-1])

    def settings(self) -> None:
        lines = ["[%s]\n%s = %s\n" % (row.section, row.key or row.default.partition(" = ")[0],
                                      row.default.rpartition(" = ")[2])
                 for row in self.chance.sample(ms.SETTINGS, 3)]
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "fuzz.ini")
            with open(path, "wb") as file:
                file.write(self.mutated("".join(lines).encode()))
            with contextlib.suppress(ms.SettingsError):
                ms.Settings.load(path)

    def tick(self) -> None:
        self.now += 1.0
        self.core.registry.expire(self.now)
        for name, protocol in self.protocols.items():
            for packet, place in protocol.tick(self.now) or ():
                for answer in game_server_answers(packet) if self.here else ():
                    answer = self.chance.choice((answer, self.mutated(answer)))
                    self.datagram(name, answer, place)
        for session in self.sessions:
            with contextlib.suppress(ms.Malformed):
                session.tick(self.now)

    def render(self) -> None:
        """Whatever got in, every list can be made of it."""
        for path in ("/master.json", "/servers.json", "/servers.xml", "/", "/metrics",
                     "/check?address=203.0.113.9"):
            session = self.protocols["web"].session("192.0.2.1", self.now)
            status, _, body, _ = split_response(feed(session, http_request(path), now=self.now))
            self.assertEqual(status, 200, path)
            if path.endswith("json"):
                json.loads(body.decode("utf-8"))
            elif path.endswith("xml"):
                xml.dom.minidom.parseString(body)
        b"".join(self.protocols["list"].chunks(0, self.now))
        for rendered in self.protocols["aio"].lists.values():
            rendered.get(self.now)
        self.protocols["hyperbol"].everything.get(self.now)

    def test_noise(self) -> None:
        for number in range(3000 if SLOW else 12000):
            self.now += 0.05
            address = "203.0.113.%d" % self.chance.randrange(1, 40)
            self.here = address, 4000 + self.chance.randrange(3)
            name = self.chance.choice([*self.SAMPLES, "announcement", "row"])
            data = self.mutated(self.chance.choice(self.SAMPLES.get(name, (b"",))))
            if name == "announcement":
                self.connection("web", self.announcement())
            elif name == "row":
                self.row()
            elif isinstance(self.protocols[name], ms.UdpProtocol):
                self.datagram(name, data, self.here)
            else:
                self.connection(name, data)
            for decode in ms.zone_entries, ms.hyperbol_entries, ms.hyperbol_greeting, ms.aio_info:
                with contextlib.suppress(ms.Malformed):
                    decode(data)
            if number % 100 == 0:
                self.settings()
                self.tick()
            if number % 2000 == 0:
                self.render()
        self.assertEqual(self.games, {"iceball", "hyperbol", "subspace", "aio", "mygame"})
        self.assert_nothing_is_left()

    def assert_nothing_is_left(self) -> None:
        """When everybody has gone."""
        self.here = None
        for session in self.sessions:
            session.closed(self.now)
        self.sessions.clear()
        for _ in range(600):
            self.tick()
        aio, iceball = self.protocols["aio"], self.protocols["iceball"]
        left = [server.key for server in self.core.registry.servers()]
        self.assertEqual((left, aio.owners, self.core.poller.targets, iceball.known,
                          self.protocols["list"].links), ([], {}, {}, {}, {}))
        self.assertFalse(self.core.registry.sources)


class AmplificationTest(unittest.TestCase):
    """Towards a source that has proven nothing, no more bytes go out than came in, but for what
    the documents demand; and that is bounded, by source and in all."""

    PEER = "203.0.113.9", 5000
    LIST_BYTES = ms.LINK_TRIES * (ms.LINK_CHUNK_BYTES + 12)     # before anything is acknowledged
    # Of every type that any document has: a name, the port, the datagrams that make the request,
    # and how many bytes more than it has the answers may have, and do have
    REQUESTS = (
        ("announcement", "iceball", [CAPTURED], 0),
        ("all texts full", "iceball", [FULL_TEXTS], 7),
        ("heartbeat version", "iceball", [announcement(hbversion=3)], 0),
        ("its shortest", "iceball", [announcement(hbversion=3)[:10]], 0),
        ("length", "iceball", [CAPTURED + b"x"], 0),
        ("no versions", "iceball", [b"1CEB\2"], 0),
        ("forged cookie", "iceball", [b"HSHK" + bytes(80)], 0),
        ("request id", "iceball", [hexa("01 0100 0151 00")], 13),
        ("request id, version", "iceball", [hexa("01 0200")], 0),
        ("fields", "iceball", [hexa("03 01020304 01 4100"), hexa("04 01020304 01 05000000"),
                               hexa("05 01020304")], 0),
        ("other types", "iceball", [hexa("02 01020304"), hexa("06"), b"\xff"], 0),
        ("ping of 4", "ping", [PING_TIME], 4),
        ("ping of 8", "ping", [PING_TIME + bytes(4)], 0),
        ("ping, total", "ping", [PING_TIME + hexa("01000000")], 8),
        ("ping, arenas", "ping", [PING_TIME + hexa("02000000")], 504),
        ("other sizes", "ping", [b"", b"x", bytes(6), bytes(94), bytes(481)], 0),
        ("zone", "ping", [ZONE_PACKET], 0),
        ("shortest zone", "ping", [zone_packet(name=b"Z", description=b"\0")], 0),
        ("connect", "list", [CONNECT] * 20, 0),
        ("list", "list", [CONNECT, REQUEST], LIST_BYTES),
        ("list, again and again", "list", [CONNECT, REQUEST] * 20, LIST_BYTES),
        ("no connect", "list", [REQUEST, hexa("0007")], 0),
        ("sync", "list", [CONNECT, hexa("0005 01020304")], 4),
        ("an answer nobody asked for", "poller", [bytes(8), hyperbol_reply()], 0))

    def start(self) -> None:
        self.core = core = make_core()
        for number in range(60):
            address = "198.51.100.%d" % number
            core.registry.hear(("iceball", "hyperbol", "subspace", "aio")[number % 4], address,
                               1000, address, 0.0, 1e6,
                               {"name": "A listed server", "description": "x" * 80, "players": 9})
        self.protocols = {"iceball": ms.Iceball(core), "ping": ms.SubSpacePing(core),
                          "list": ms.SubSpaceList(core), "poller": core.poller}

    def surplus(self, name: str, packets: List[bytes], peer: Tuple[str, int] = PEER,
                seconds: int = 60) -> int:
        """How many bytes more go to the source than came from it, repetitions and queries of the
        next minute too."""
        sent: ms.Replies = []
        for data in packets:
            with contextlib.suppress(ms.Malformed):
                sent += self.protocols[name].datagram(data, peer, 10.0)
        for second in range(seconds):
            for protocol in self.protocols.values():
                sent += protocol.tick(11.0 + second)
        return sum(len(data) for data, place in sent if place[0] == peer[0]) - sum(
            map(len, packets))

    def test_every_type_of_request(self) -> None:
        for name, port, packets, most in self.REQUESTS:
            self.start()
            surplus = self.surplus(port, packets)
            self.assertLessEqual(surplus, most, name)
            self.assertEqual(surplus > 0, most > 0, name)

    def test_from_one_source(self) -> None:
        for name, port, packets, most in self.REQUESTS:
            self.start()
            surplus = sum(self.surplus(port, packets, (self.PEER[0], number), 0)
                          for number in range(1000) if most)
            self.assertLessEqual(surplus, 50 * 512, name)               # a burst of requests

    def test_from_all_sources_together(self) -> None:
        rate, burst = 1000, 3000        # less than the program has: it takes as many sources
        with mock.patch.object(ms, "SURPLUS_BYTES", (rate, burst)):
            for name, port, packets, most in self.REQUESTS:
                self.start()
                for number in range(600 if most > 4 else 0):
                    peer = "%d.%d.113.9" % (60 + number // 250, number % 250), 5000
                    most -= max(0, self.surplus(port, packets, peer, 0))
                self.assertGreaterEqual(most + burst, 0, name)

    def test_a_bucket_that_is_empty_keeps_nobody_else_out(self) -> None:
        """Those who need no surplus are served, and each use has a bucket of its own."""
        with mock.patch.object(ms, "SURPLUS_BYTES", (1000, 3000)):
            self.start()
        for use in "cookie", "ping":
            self.core.registry.rules.allow_surplus(use, "60.0.0.1", 3000, 10.0)
        answer, = self.protocols["iceball"].datagram(CAPTURED, self.PEER, 10.0)
        self.protocols["iceball"].datagram(b"HSHK" + answer[0][4:], self.PEER, 10.0)
        self.assertIsNotNone(self.core.registry.get("iceball", self.PEER[0], 21737))
        for address, answers in ((self.PEER[0], 0), ("127.0.0.1", 1)):      # this one is exempt
            self.assertEqual(len(self.protocols["ping"].datagram(
                PING_TIME, (address, 1), 10.0)), answers)
        self.assertGreater(self.surplus("list", [CONNECT, REQUEST], seconds=0), 400)

    def test_no_two_ports_answer_each_other_for_ever(self) -> None:
        """A request forged in the name of another master's port."""
        places: Dict[Any, ms.UdpProtocol] = {}
        for number in range(2):
            self.start()
            for protocol in self.protocols.values():
                places["203.0.113.%d" % number, 5000 + len(places)] = protocol
        now = 0.0
        for (name, _, packets, _), source, place in itertools.product(
                self.REQUESTS, places, places):
            now += 60.0
            talk = collections.deque((data, source, place) for data in packets)
            for _ in range(200):
                if not talk:
                    break
                data, sender, receiver = talk.popleft()
                now += 0.25                         # slow enough for every other limit
                with contextlib.suppress(ms.Malformed):
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


def http_request(path: str, *lines: str, method: str = "GET", body: bytes = b"") -> bytes:
    head = ["%s %s HTTP/1.1" % (method, path), "Host: x", *lines, "", ""]
    return "\r\n".join(head).encode("latin-1") + body


def undated(response: bytes) -> bytes:
    return re.sub(rb"Date: [^\r]*\r\n", b"", response)


def answered(session: ms.Session, data: bytes, now: float = 0.0) -> bytes:
    """Everything that a session answers, its jobs done at once."""
    out = feed(session, data, now=now)
    while session.job is not None:
        try:
            result = session.job()
        except Exception as error:
            result = error
        answer = session.resume(result, now)
        while answer:
            out += answer
            answer = b"" if session.done else session.receive(b"", now)
    return out


class WebCase(unittest.TestCase):
    settings: Dict[str, str] = {}

    def setUp(self):
        self.core = make_core(**self.settings)
        self.registry = self.core.registry
        self.web = ms.Web(self.core)

    def session(self, address: str = "127.0.0.1", now: float = 0.0) -> ms.HttpSession:
        return self.web.session(address, now)

    def exchange(self, request: bytes, address: str = "127.0.0.1", now: float = 0.0) -> bytes:
        return answered(self.session(address, now), request, now)

    def get(self, path: str, *lines: str, method: str = "GET", address: str = "127.0.0.1",
            now: float = 0.0) -> Tuple[int, Dict[str, str], bytes]:
        data = self.exchange(http_request(path, *lines, method=method), address, now)
        status, headers, body, rest = split_response(data)
        self.assertEqual(rest, b"")
        return status, headers, body

    def servers(self, path: str = "/servers.json", now: float = 0.0) -> Any:
        return json.loads(self.get(path, now=now)[2].decode("utf-8"))["servers"]

    def list(self, port: int = 1, address: str = "203.0.113.9", game: str = "iceball",
             source: str = "", **fields: Any) -> ms.Server:
        return self.registry.hear(
            game, address, port, source or address, 0.0, 120.0, {"name": "S", **fields})


class HttpTest(WebCase):
    """Requests, connections, and what is the same for every route."""

    # What cannot be read as a request, or whose body stays unread, ends the connection
    UNREADABLE = (
        (b"\x16\x03\x01\x02\x00\x01", 400, "TLS"),
        (b"GARBAGE\r\n\r\n", 400, "syntax"),
        (b"GET / HTTP/x\r\n\r\n", 400, "version"),
        (b"GET / HTTP/1.1\rHost: x\r\n\r\n", 400, "version"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "Host"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400, "Host"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n", 400, "header"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n", 400, "header"),
        (b"GET / HTTP/1.1\r\nFrom me\r\nHost: x\r\n\r\n", 400, "header"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHo st: y\r\n\r\n", 400, "header"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: a\rContent-Length: 3\r\n\r\n", 400, "header"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: a\0b\r\n\r\n", 400, "header"),
        (b"POST / HTTP/1.0\r\nContent-Length: -1\r\n\r\n", 400, "Content-Length"),
        (b"POST / HTTP/1.0\r\nContent-Length: \xa01\r\n\r\n", 400, "Content-Length"),
        (b"GET / HTTP/1.0\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, "Length"),
        (b"POST / HTTP/1.0\r\n\r\n", 411, "Content-Length"),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411, "chunks"),
        (b"GET / HTTP/1.0\r\nContent-Length: 5\r\nTransfer-Encoding: x\r\n\r\n", 411, "chunks"),
        (b"POST / HTTP/1.0\r\nContent-Length: 16385\r\n\r\n", 413, "16384"),
        (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n", 414, "4096"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 17000, 431, "16384"),
        (b"GET / HTTP/1.0\r\nA: " + b"b" * 17000 + b"\r\n\r\n", 431, "16384"),
        (b"GET / HTTP/1.0\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431, "headers"),
        (b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n", 501, "BREW"),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505, "version"),
        (b"GET / HTTP/0.9\r\nHost: x\r\n\r\n", 505, "version"),
        (b"GET /\r\n\r\n", 505, "version"),
    )
    REFUSED = (
        (b"GET /?players_min=x", 400, "players_min"),
        (b"GET /nope", 404, "/nope"),
        (b"GET /%00", 404, "no page"),
        (b"GET /?game=nope", 404, "game"),
        (b"GET /servers.xml?game=nope", 404, "game"),
        (b"GET /server?game=iceball&address=192.0.2.1&port=1", 404, "192.0.2.1:1"),
        (b"GET /server?game=iceball&address=x&port=1", 400, "address"),
        (b"GET /server?game=iceball&address=192.0.2.1", 400, "port"),
        (b"GET /server?game=x&address=192.0.2.1&port=1&span=x", 400, "week"),
        (b"GET /check?address=play.example.org", 400, "203.0.113.7"),
        (b"GET /history.json?game=iceball", 404, "no history"),
        (b"DELETE /", 405, "GET"),
        (b"GET /announce", 405, "POST"),
    )

    def readable_by_iceball(self, data: bytes) -> bytes:
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
        self.web.trusted = ms.Networks([ms.read_network("127.0.0.1")])
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
            wanted = undated(feed(self.session(), request))
            self.assertTrue(wanted)
            for size in (1, 2, 7):
                self.assertEqual(undated(feed(self.session(), request, size)), wanted, request)

    def test_one_request_after_another(self):
        session = self.session()
        requests = ICEBALL_REQUEST * 3 + http_request("/nope") + ICEBALL_REQUEST
        found = []
        data = session.receive(requests, 0.0)
        while data:
            status, _, _, rest = split_response(data)
            self.assertEqual(rest, b"", "one answer a call bounds what waits for a slow reader")
            found.append(status)
            data = session.receive(b"", 0.0)
        self.assertEqual(found, [200, 200, 200, 404, 200])

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
                ([(0.0, post[:20]), (8.0, post[20:])], 18.0, b"408"),       # the body has its own
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
        self.assertEqual(self.web.requests["none", 429], 1)
        self.assertFalse(self.web.speaks_first)

    def test_the_body_of_an_error_is_what_its_reader_expects(self):
        browser, json_type = "Accept: text/html,*/*", "application/json; charset=utf-8"
        html_type, text_type = "text/html; charset=utf-8", "text/plain; charset=utf-8"
        for path, line, status, type, begins in (
                ("/nope", browser, 404, html_type, b"<!"),
                ("/nope", "Accept: */*", 404, text_type, b"404 Not Found\nThere is no page"),
                ("/?players_min=x", browser, 400, html_type, b"<!"),
                ("/announce", browser, 405, json_type, b'{"listed":false,"reason":"/announce'),
                ("/master.json", "Content-Length: x", 400, text_type, b"400 Bad")):
            found, headers, body = self.get(path, line)
            self.assertEqual((found, headers["Content-Type"]), (status, type), path)
            self.assertTrue(body.lower().startswith(begins.lower()), body[:80])
        self.assertEqual(self.get("/announce")[1]["Allow"], "POST, OPTIONS")

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
        for path in ("/healthz", "/check", "/nope"):
            headers = self.get(path, 'If-None-Match: none, "", *')[1]
            self.assertEqual(("ETag" in headers, headers["Cache-Control"]), (False, "no-store"))

    def test_who_takes_gzip(self):
        plain = self.get("/style.css")[2]
        for value, takes in (
                ("gzip", True), ("br, gzip;q=0.5", True), ("GZIP", True), ("br", False),
                ("", False), ("gzip;q=0", False), ("gzip; q=0.000, br", False)):
            _, headers, body = self.get("/style.css", "Accept-Encoding: " + value)
            self.assertEqual(headers.get("Content-Encoding"), "gzip" if takes else None, value)
            self.assertEqual(gzip.decompress(body) if takes else body, plain)
            self.assertEqual(headers["Vary"], "Accept-Encoding")
        lines = "Accept-Encoding: br", "Accept-Encoding: gzip"
        self.assertIn("Content-Encoding", self.get("/style.css", *lines)[1])
        self.assertNotIn("Content-Encoding", self.get("/robots.txt", *lines)[1], "too short")

    def test_scripts_of_other_sites_may_read_the_data(self):
        for path, readable in (
                ("/servers.json", "*"), ("/servers.json?players_min=x", "*"),
                ("/servers.xml?game=x", "*"), ("/history.json", "*"), ("/master.json", "*"),
                ("/", None), ("/check", None), ("/nope", None), ("/announce", None)):
            for method in ("GET", "OPTIONS"):
                headers = self.get(path, method=method)[1]
                self.assertEqual(headers.get("Access-Control-Allow-Origin"), readable, path)
        for path, methods in (("/", "GET, HEAD, OPTIONS"), ("/announce", "POST, OPTIONS")):
            self.assertEqual(self.get(path, method="OPTIONS")[1]["Allow"], methods)

    def test_every_page_has_the_strict_policy(self):
        for path in ("/", "/check", "/style.css", "/app.js", "/icon.svg", "/nope"):
            headers = self.get(path)[1]
            self.assertEqual(
                [headers[name] for name in ("Content-Security-Policy", "X-Content-Type-Options",
                                            "Referrer-Policy")], [POLICY, "nosniff", "no-referrer"])

    # The cache

    def test_the_same_bytes_have_the_same_answer_until_the_next_tick(self):
        first = self.exchange(ICEBALL_REQUEST)
        self.list()
        with mock.patch.object(ms.HttpRequest, "parse", side_effect=AssertionError):
            self.assertEqual(self.exchange(ICEBALL_REQUEST, now=0.9), first)
        self.web.tick(1.0)
        self.assertEqual(len(self.servers("/master.json")), 1)
        self.assertEqual(self.web.requests["/master.json", 200], 3)

    def test_what_is_one_client_s_is_not_cached(self):
        for request in (http_request("/check"), http_request("/nope"), http_request("/healthz"),
                        http_request("/robots.txt", "Content-Length: 1", body=b"x")):
            self.exchange(request)
        self.assertEqual(self.web.cache, {})

    def test_the_cache_is_bounded(self):
        for most, count in ((2000, 3), (300, 1)):           # one that is longer is there alone
            with mock.patch.object(ms, "HTTP_MEMO_BYTES", most):
                for number in range(9):
                    self.get("/robots.txt?%d" % number)
                    self.assertTrue(0 < len(self.web.cache) <= count, len(self.web.cache))

    # Limits

    def test_who_asks_too_much_is_told_so_and_the_connection_ends(self):
        for path in ("/nope", "/robots.txt"):       # the second from the cache
            session = self.session("203.0.113.8")
            self.registry.rules.requests.table.clear()
            out = b"".join(answered(session, http_request(path)) for _ in range(60))
            self.assertEqual((out.count(b"HTTP/1.1 429"), out.count(b"HTTP/1.1 ")), (1, 51))
            refused = split_response(out[out.index(b"HTTP/1.1 429"):])[1]
            self.assertEqual((refused["Retry-After"], refused["Connection"]), ("5", "close"))
            self.assertTrue(session.done)
        self.assertEqual(self.get("/robots.txt", address="203.0.113.9")[0], 200)
        self.assertEqual(self.get("/robots.txt", address="203.0.113.8", now=1.0)[0], 200)

    def trust(self, *networks: str) -> None:
        self.web.trusted = ms.Networks(map(ms.read_network, networks))

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
        self.assertEqual([key for key in self.web.cache if b"203.0.113.6" in key], [])

    def test_a_search_costs_more_the_more_servers_there_are(self):
        for port in range(1, 41):
            self.list(port, "203.0.113.%d" % port)
        with mock.patch.object(ms, "SEARCH_SERVERS", 10):           # 1 + 4 of 50
            for path, limit in (("/servers.json?x=%d", 50), ("/servers.json?name=s&x=%d", 10),
                                ("/?players_min=0&name=x&x=%d", 10)):
                self.registry.rules.requests.table.clear()
                found = [self.get(path % number, address="192.0.2.1")[0] for number in range(60)]
                self.assertEqual(found, [200] * limit + [429] * (60 - limit), path)
        with mock.patch.object(ms, "SEARCH_SERVERS", 0.01):         # half of the burst at most
            self.assertEqual(self.get("/servers.json?name=s", address="192.0.2.2")[0], 200)

    # What needs the disk

    def database(self, **more: Any) -> mock.Mock:
        database = mock.Mock(**more)
        self.web = ms.Web(self.core._replace(database=database))
        return database

    def test_what_the_disk_cannot_tell_is_no_fault_of_the_client(self):
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
        self.assertEqual(session.resume(ms.Series(0, 60, [], []), 12.0), b"")

    def test_requests_behind_one_for_the_disk_wait(self):
        self.database(history=mock.Mock(return_value=ms.Series(60, 60, [1], [2])),
                      known=mock.Mock(return_value=None))
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
        self.assertEqual(self.web.requests["/server", 404], 1)


class ListsTest(WebCase):
    """What the routes for the lists and pages tell."""

    settings = {"games__mygame": "My Game"}

    def test_every_field_of_a_server(self):
        self.web.epoch = 1.7e9
        self.registry.rules.official = {("203.0.113.9", 1): True}
        self.registry.rules.priority = {("203.0.113.9", 1): 7}
        server = self.list(mode="ctf", map="m", version="1", players=3, max_players=8, playing=2,
                           description="D", flavor=4, verified="query", ping_ms=41.26,
                           details={"skill": "9", "arenas": "a"})
        self.registry.confirm(server, 60.5)
        self.list(2, responding=False).confirmed = False
        self.assertEqual(self.get("/servers.json", now=70.0)[2].decode(), '''\
{"generated":1700000070,"generation":%d,"servers":[{"game":"iceball","address":"203.0.113.9",\
"port":1,"name":"S","mode":"ctf","map":"m","version":"1","players":3,"max_players":8,"playing":2,\
"description":"D","official":true,"priority":7,"flavor":4,"verified":"query","responding":true,\
"unconfirmed":false,"ping_ms":41.3,"arenas":"a","factions":"","skill":"9","flags":"",\
"first_seen":1700000000,"last_seen":1700000060},
{"game":"iceball","address":"203.0.113.9","port":2,"name":"S","mode":"","map":"","version":"",\
"players":0,"max_players":0,"playing":null,"description":"","official":false,"priority":0,\
"flavor":0,"verified":"self-reported","responding":false,"unconfirmed":true,"ping_ms":null,\
"arenas":"","factions":"","skill":"","flags":"","first_seen":1700000000,"last_seen":1700000000}]}
''' % self.registry.generation)

    def test_lists_are_made_once_between_two_ticks(self):
        """However many ask for them, in whatever words; and each server's part only when it has
        changed."""
        servers = [self.list(port, max_players=9) for port in range(1, 4)]
        for path, function in (("/?x=%d", "server_row"), ("/master.json?%d", "iceball_json"),
                               ("/servers.json?%d", "server_json"),
                               ("/servers.xml?game=iceball&x=%d", "server_xml")):
            listed = mock.Mock(wraps=self.registry.servers)
            made = mock.Mock(wraps=getattr(ms, function))
            with mock.patch.object(self.registry, "servers", listed), \
                    mock.patch.object(ms, function, made):
                for number in range(5):
                    self.get(path % number)
                self.assertEqual((listed.call_count, made.call_count), (1, 3), path)
                self.registry.update(servers[1], {"players": servers[1].players + 1})
                self.web.tick(1.0)
                self.get(path % 0)
                self.assertEqual((listed.call_count, made.call_count), (2, 4), path)

    def test_compressed_once_for_all_who_ask(self):
        for port in range(1, 20):
            self.list(port)
        with mock.patch.object(ms.gzip, "compress", wraps=gzip.compress) as compress:
            for number in range(3):
                body = self.get("/servers.json?x=%d" % number, "Accept-Encoding: gzip")[2]
                self.assertEqual(len(json.loads(gzip.decompress(body).decode())["servers"]), 19)
        self.assertEqual(compress.call_count, 1)

    def test_the_times_in_a_list_move_with_the_tick(self):
        server = self.list()
        for now, epoch in ((10.0, 0.0), (20.0, 0.0), (30.0, 1.7e9), (40.0, 1.6e9)):     # it was set
            self.registry.confirm(server, now - 1.0)
            self.web.epoch = epoch
            self.web.tick(now)
            listed, = self.servers(now=now)
            self.assertEqual((listed["first_seen"], listed["last_seen"]), (epoch, epoch + now - 1))
            self.assertIn(ms.seen_cell(epoch + now - 1, epoch + now), self.get("/", now=now)[2])

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
        for path in ("/", "/server?game=hyperbol&address=203.0.113.9&port=1", "/?name=<script>"):
            page = self.get(path)[2]
            self.assertNotIn(b"<script>alert", page)
            self.assertIn(b"&lt;script&gt;", page)

    def test_a_text_that_no_protocol_has_cleaned_is_a_fault(self):
        self.list(name="\ud800")
        for path in ("/servers.json", "/", "/master.json"):
            self.assertRaises(UnicodeEncodeError, self.get, path)

    def test_servers_xml(self):
        self.web.epoch = 1.7e9
        self.list(27888, "203.0.113.7", "hyperbol", name="Fun & \"Games\"", mode="Core", players=5,
                  max_players=16, map="orbital", version="1.8a", flavor=3, ping_ms=41.2,
                  details={"skill": "9"})
        self.list(27888, "203.0.113.8", "hyperbol", responding=False)
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

    def test_a_long_page_ends(self):
        for port in range(1, 8):
            self.list(port, players=2, max_players=9)
        with mock.patch.object(ms, "PAGE_ROWS", 5):
            page = self.get("/")[2].decode()
        self.assertEqual(page.count("<tr"), 1 + 5)
        self.assertIn("<b>14</b> players on <b>7</b> servers", page)
        self.assertIn("The first 5 of 7 servers", page)

    def test_the_day_s_player_counts(self):
        days: List[Dict[ms.Key, Any]] = [{}]
        self.web = ms.Web(self.core._replace(recent=lambda: days[-1]))
        server = self.list(players=3, max_players=8)
        for hour in range(3):
            day, total = [None, 2, hour], [None, 41, hour]
            days.append({server.key: day, ("iceball", "", 0): total})
            self.web.tick(0.0)
            for path, shown in (("/", True), ("/?name=s", False)):
                page = self.get(path)[2].decode()
                self.assertIn("</span>%s<td" % ms.sparkline(day), page)
                self.assertEqual(ms.sparkline(total) in page, shown, "a search has no total")
        total = ms.day_total({("a", "", 0): [1, None, None], ("b", "", 0): [2, 3, None],
                              ("c", "", 0): [9, 9, 9]}, ["a", "b", "x"])
        self.assertEqual(total, [3, 3, None])

    def test_a_reload_shows_at_once(self):
        self.list(game="mygame")
        self.assertIn(b">My Game<", self.get("/")[2])
        before = self.get("/master.json")[1]["ETag"]
        values, texts = self.core.settings.values, self.core.settings.texts
        values["games"] = {"mygame": "Second title"}
        values["iceball.version"] += 1
        texts["http.template"] = "<p>Our own page $table"
        texts["http.stylesheet"] = "p { color: red }"
        self.web.read(self.core.settings)
        page = self.get("/")[2]
        self.assertEqual([words in page for words in (
            b"My Game", b">Second title<", b"Our own page")], [False, True, True])
        self.assertEqual(self.get("/style.css")[2], b"p { color: red }")
        self.assertEqual(self.get("/master.json", "If-None-Match: " + before)[0], 200)

    def test_an_empty_list_says_what_to_do(self):
        listeners = [SimpleNamespace(protocol=protocol, port=port) for port, protocol in enumerate(
            ("iceball", "subspace", "subspace", "aio", "hyperbol", "http", "http"), 1)]
        self.web = ms.Web(self.core._replace(listeners=listeners))
        for public in ("198.51.100.1", ""):
            self.core.settings.values["server.public_address"] = public
            self.web.tick(0.0)
            page = html.unescape(self.get("/")[2].decode())
            for words in ('[["%s", 1]]', "Server1 = %s, port 3", "server %s, port 4",
                          "announce --game hyperbol --port PORT %s:6",
                          "announce --game mygame --port PORT %s:6"):
                self.assertIn(words % (public or "THIS-HOST"), page)
        page = html.unescape(self.get("/?game=mygame")[2].decode())
        self.assertEqual(("announce --game mygame" in page, "Server1" in page), (True, False))
        self.assertEqual(ms.contact_lines(listeners[3:4], str, {"mygame": "My Game"}),
                         [("aio", "AIO servers", "master server aio, port 4")])

    # One server

    def test_a_server_where_no_history_is_kept(self):
        self.list(players=3, max_players=8, map="mesa")
        page = self.get("/server?game=iceball&address=203.0.113.9&port=1")[2]
        for words in (b"<dd>3 of 8</dd>", b"<dd>mesa</dd>", b"Iceball"):
            self.assertIn(words, page)

    def test_first_seen_is_the_first_time_ever(self):
        """Here or gone: the page of a server tells what the disk knows of it as well."""
        database = mock.Mock()
        database.known.return_value = ms.Remembered(1_700_000_000.0, 1_700_050_000.0, "Was <here>")
        database.history.return_value = ms.Series(1_700_000_000, 60, [1], [1])
        self.web = ms.Web(self.core._replace(database=database))
        self.web.epoch = 1_700_180_000.0
        path = "/server?game=iceball&address=::ffff:203.0.113.9&port=1&span=week"
        for words in ("Was &lt;here&gt;.*Not listed now", "Back"):
            page = self.get(path, now=5.0)[2].decode()
            self.assertRegex(page, "(?s)" + words)
            self.assertRegex(page, r"<dt>First seen</dt><dd><time[^>]*>2 d")
            key = "iceball", "203.0.113.9", 1
            database.known.assert_called_with(*key)
            database.history.assert_called_with(*key, "week", 1_700_180_005.0)
            server = self.list(name="Back")
        self.assertEqual(server.first_seen, 0.0)

    def test_history(self):
        database = mock.Mock()
        database.history.return_value = ms.Series(1_700_000_040, 60, [1, None], [2, None])
        self.web = ms.Web(self.core._replace(database=database))
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
        self.web = ms.Web(self.core._replace(
            gauges=dict.fromkeys(ms.GAUGE_HELP, 1), health={"database": "full"},
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
        health: Dict[str, str] = {}
        self.web = ms.Web(self.core._replace(health=health))
        self.list()
        for status in ("ok", "trouble"):
            self.assertEqual(json.loads(self.get("/healthz")[2]), {
                "status": status, "trouble": health, "servers": 1, "version": ms.__version__})
            health["database"] = "the disk is full"


class CheckTest(WebCase):
    """Is my server listed?"""

    def titles(self, query: str = "address=203.0.113.9", now: float = 1.0) -> List[str]:
        page = self.get("/check?" + query, now=now)[2].decode()
        return re.findall("<h3>(.*?)</h3>", page)

    def note(self, outcome: str, source: str = "203.0.113.9", port: int = 1, now: float = 0.0,
             detail: str = "") -> None:
        self.registry.note(source, "iceball", port, outcome, now, detail)

    def test_what_is_listed_is_told_from_what_was(self):
        self.note("announced")
        self.assertEqual(self.titles(), ["Announced, but the answer did not come back"])
        self.list()
        self.note("listed")
        self.assertEqual(self.titles(), ["Listed"])
        self.registry.expire(122.0)
        self.assertEqual(self.titles(now=122.0), ["No longer listed"])
        self.note("stopped", now=123.0)
        self.assertEqual(self.titles(now=124.0), ["Signed off"])

    def test_who_is_listed_and_not_well(self):
        for game, address, title in (
                ("iceball", "203.0.113.9", "Listed"), ("aio", "2001:db8::9", "Listed"),
                ("hyperbol", "2001:db8::8", "Listed under an IPv6 address"),
                ("subspace", "2001:db8::7", "Listed under an IPv6 address"),
                ("mygame", "192.168.1.5", "Listed under a private address"),
                ("mygame", "127.0.0.1", "Listed under a private address")):
            server = self.list(1, address, game)
            self.registry.note(address, game, 1, "announced", 0.0)
            for confirmed, titles in ((True, [title]), (False, [
                    "Not heard since a restart", "Announced, but the answer did not come back"])):
                server.confirmed = confirmed
                self.assertEqual(sorted(self.titles("address=" + address)), sorted(titles), game)
        self.registry.update(server, {"responding": False})
        self.assertEqual(self.titles("address=127.0.0.1"),
                         ["Announced, but the answer did not come back"])

    def test_every_outcome_says_what_to_do(self):
        for outcome, detail, todo in (
                ("announced", "", "open UDP"),
                ("version", "version 0.3", "does not list version 0.3. Another"),
                ("bad packet", "85 bytes", "wrong with it: 85 bytes. If the port is the one"),
                ("silent", "no answer", "was no answer. Open that UDP port"),
                ("limit", "at most 32", "at most 32. Stop one"), ("name", "x", "another name"),
                ("password", "the name x", "the name x. Wait"), ("bad packet", "", "nothing more")):
            self.registry.heard.clear()
            self.note(outcome, detail=detail)
            self.assertIn(todo, self.get("/check?address=203.0.113.9")[2].decode(), outcome)
            self.assertEqual(self.titles(), [ms.OUTCOMES[outcome][0]])
        for title, advice in ms.OUTCOMES.values():
            self.assertTrue(title[0].isupper() and advice[0].isupper() and advice[-1] in ".?")

    def test_a_ban_is_told_as_it_is_now(self):
        self.note("banned", detail="an old reason")
        self.assertEqual(self.titles(), [])
        network = ms.read_network("203.0.113.0/24")
        self.registry.rules.bans = ms.Networks([network], {network: "fake players"})
        self.assertEqual(self.titles(), ["Banned"])
        self.assertIn(b"this address: fake players.", self.get("/check?address=203.0.113.9")[2])
        self.registry.rules.address_map = {"10.0.0.5": "203.0.113.9"}
        self.assertEqual(self.titles("address=10.0.0.5"), ["Banned"])

    def test_who_sends_too_much(self):
        for _ in range(500):
            self.registry.rules.datagrams.allow("203.0.113.9", 0.0)
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
                ("address=203.0.113.9", ["Ours", "Ours as well"], 3),
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
            self.registry.note(source, "aio", port, "silent", 3.0)
        for address, told, titles in (("203.0.113.9", set(), 3), ("10.0.0.5", {"10.0.0.5"}, 2)):
            page = self.get("/check?address=" + address, now=4.0)[2].decode()
            self.assertEqual(set(re.findall(r"10\.0\.0\.\d", page)), told)
            self.assertEqual(len(self.titles("address=" + address)), titles)

    def test_the_latest_are_shown(self):
        for port in range(1, 301):
            self.note("announced", port=port, now=port / 100)
        page = self.get("/check?address=203.0.113.9", now=4.0)[2]
        self.assertEqual((page.count(b"<h3>"), page.count(b"203.0.113.9:300<"),
                          page.count(b"203.0.113.9:200<")), (ms.CHECK_FINDINGS, 1, 0))
        self.assertEqual(len(self.titles("address=203.0.113.9&port=1")), 1)

    def test_an_address_as_the_list_has_it(self):
        for address, shown in (("203.0.113.9", "203.0.113.9"), ("2001:DB8::9", "2001:db8::9"),
                               ("::ffff:203.0.113.7", "203.0.113.7"),
                               ("2001:db8::203.0.113.7", "2001:db8::cb00:7107")):
            for asked, port in ((address, ""), (ms.endpoint(address, 27790), "27790")):
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
        self.hyperbol = ms.Hyperbol(self.core)

    def post(self, body: Any, *lines: str, address: str = "203.0.113.9",
             now: float = 0.0) -> Tuple[int, Dict[str, Any]]:
        if isinstance(body, dict):
            body, lines = json.dumps(body).encode(), ("Content-Type: application/json",)
        request = http_request("/announce", "Content-Length: %d" % len(body), *lines,
                               method="POST", body=body)
        status, headers, body, _ = split_response(self.exchange(request, address, now))
        self.assertEqual((headers["Content-Type"], headers["Cache-Control"]),
                         ("application/json; charset=utf-8", "no-store"))
        return status, json.loads(body)

    def answer_query(self, now: float) -> None:
        (query, peer), = self.core.poller.tick(now)
        self.core.poller.datagram(hyperbol_reply(o1=query[1:]), peer, now + 0.1)

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
        self.assertEqual(self.registry.heard["203.0.113.9", "mygame", 4000][1], "listed")
        for name in ({}, {"name": ""}):
            self.post({"game": "mygame", "port": 4000, **name}, address="2001:db8::1")
            self.assertEqual(self.registry.servers()[0].name, "[2001:db8::1]:4000")

    def test_forms_and_json(self):
        for body, type, name in (
                (b'{"game":"mygame","port":4000,"name":"N"}', "", "N"),     # as curl -d sends it
                (b'{"game":"mygame","port":"4000","name":5}', "application/json; x=y", "5"),
                (b"game=mygame&port=4000&name=K\xf6ln \x80", "", "Köln €"),     # from Windows
                (b"game=mygame&port=4000&name=K%F6ln", "", "Köln"),
                ("game=mygame&port=4000&name=Köln €".encode(), "", "Köln €"),
                (b"game=mygame&port=+4000&name=K%C3%B6ln",
                 "application/x-www-form-urlencoded", "Köln"),
                (b"game=mygame&port=4000&name=\x81", "", "\ufffd")):
            self.registry.remove(self.registry.get("mygame", "203.0.113.9", 4000))
            lines = ["Content-Type: " + type] if type else []
            self.assertEqual(self.post(body, *lines)[0], 200, body)
            self.assertEqual(self.registry.servers("mygame")[0].name, name)

    def test_numbers_as_lua_and_javascript_write_them(self):
        json_type = "Content-Type: application/json"
        body = b'{"game":"mygame","port":27500.0,"players":3.0,"max_players":1.6e1}'
        self.assertEqual(self.post(body, json_type)[0], 200)
        server, = self.registry.servers("mygame")
        self.assertEqual(repr((server.port, server.players, server.max_players)), "(27500, 3, 16)")
        for port in (b"27500.5", b"1e300", b"1e999", b"NaN", b"true", b'"1e3"', b"0", b"65536",
                     b"-1", b"[1]", b"9" * 4000):
            status, answer = self.post(b'{"game":"mygame","port":%s}' % port, json_type)
            self.assertEqual((status, "from 1 to 65535" in answer["reason"]), (400, True), port)

    def test_every_text_may_be_as_long_as_what_is_kept_of_it(self):
        fields: Dict[str, Any] = {"game": "mygame", "port": 4000, "players": 9, "max_players": 9}
        fields["description"] = "\U0001f600" * ms.TEXT_CHARACTERS
        for name in ("name", "mode", "map", "version"):
            fields[name] = "\U0001f600" * ms.NAME_CHARACTERS
        for body in (fields, urllib.parse.urlencode(fields).encode()):
            self.assertEqual(self.post(body)[0], 200)
            server, = self.registry.servers()
            self.assertEqual({name: getattr(server, name) for name in fields}, fields)
        self.post({**fields, "name": "n" * 999, "description": "d" * 999})
        self.assertEqual((len(server.name), len(server.description)), (128, 512))

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
            self.assertEqual(self.registry.total + len(self.core.poller.targets), 1)
            self.assertEqual(self.post(stop, address=source),
                             (200, {"listed": False, "ttl": 120, "reason": "stopped"}))
            self.assertEqual((self.registry.total, self.core.poller.targets), (0, {}))
            self.assertEqual(self.registry.heard[source, game, 4000][1], "stopped")

    def test_stop_of_one_that_is_queried(self):
        """It leaves; one that the ini names is back with its next answer."""
        stop = {"game": "hyperbol", "port": 27888, "action": "stop"}
        for pinned in (False, True):
            self.post({"game": "hyperbol", "port": 27888})
            if pinned:
                self.hyperbol.read_pinned([("203.0.113.9", 27888)])
                self.hyperbol.resolve_pinned(0.0)
            self.answer_query(1.0 + 100 * pinned)
            self.assertEqual(self.registry.total, 1)
            self.assertEqual(self.post(stop, now=2.0)[0], 200)
            self.assertEqual((self.registry.total, len(self.core.poller.targets)), (0, pinned))
        self.answer_query(200.0)
        self.assertEqual(self.registry.total, 1)

    def test_errors_in_words(self):
        json_type = "Content-Type: application/json"
        for body, status, words in (
                (b"", 400, "hyperbol, mygame, other, not ''"),
                (b"game=iceball&port=1", 400, "not 'iceball'"),
                (b"game=mygame", 400, "port: expected a number from 1 to 65535"),
                (b"game=mygame&port=1e3", 400, "port"),
                (b'{"game":"mygame","port":1,"players":-1}', 400, "players"),
                (b'{"game":"mygame","port":1,"max_players":65536}', 400, "max_players"),
                (b'{"game":"mygame","port":1,"name":["x"]}', 400, "name is not a text"),
                (b'{"game":"mygame","port":1,"name":true}', 400, "name is not a text"),
                (b'{"game":"mygame","port":1,"action":"jump"}', 400, "action"),
                (b'["game"]', 400, "object"), (b'{"game":', 400, "JSON"),
                (b"\xff\xfe{}", 400, "JSON"), (b"[" * 16000, 400, "JSON")):
            with self.subTest(body=body[:60]):
                found, answer = self.post(body, *[] if b"=" in body or not body else [json_type])
                self.assertEqual((found, answer["listed"]), (status, False))
                self.assertIn(words, answer["reason"])
        self.assertEqual(self.registry.total, 0)
        self.assertEqual(self.registry.heard["203.0.113.9", "mygame", 1][1], "bad packet")
        self.assertEqual(self.registry.heard["203.0.113.9", "announce", 0][1], "bad packet")

    def test_a_game_that_is_not_in_the_ini(self):
        allow = "the operator of this master can allow it with a line `%s = %s` under [games]"
        for game, hint in (("luanti", allow % ("luanti", "Luanti")), ("iceball", ""), ("", ""),
                           ("My Game", ""), ("x" * 40, "")):
            status, answer = self.post({"game": game, "port": 30000})
            self.assertEqual(status, 400)
            if hint:
                self.assertIn(hint, answer["reason"])
            else:
                self.assertNotIn("operator", answer["reason"])

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

    def test_pages_of_other_sites_announce_nothing(self):
        form = b"game=mygame&port=4000"
        for line, status in (
                ("Sec-Fetch-Site: cross-site", 403), ("Sec-Fetch-Site: same-site", 403),
                ("Origin: http://other.example", 403), ("Origin: null", 403),
                ("Origin: http://x:1", 403), ("Origin: http://x", 200),
                ("Sec-Fetch-Site: none", 200), ("Sec-Fetch-Site: same-origin", 200)):
            self.registry.remove(self.registry.get("mygame", "203.0.113.9", 4000))
            found, answer = self.post(form, line)
            self.assertEqual((found, "page" in answer.get("reason", "")), (status, status == 403))
            self.assertEqual(len(self.registry.servers()), status == 200)

    def test_fuzz(self):
        chance = random.Random(4)
        seeds = ((b"game=mygame&port=4000&name=My+server%20%C3%BC&players=3&action=stop", ""),
                 (b'{"game":"hyperbol","port":27888,"players":5,"name":"\\ud83d\\ude00\\u0000",'
                  b'"version":1.5e3}', "application/json"))
        for number in range(2000):
            seed, type = seeds[number % 2]
            data = bytearray(seed)
            for _ in range(chance.randrange(4)):
                data[chance.randrange(len(data))] = chance.choice(b'\0"{}[],:=&%\\+eE-0129\xff')
            status, answer = self.post(bytes(data), "Content-Type: " + type if type else "X: y")
            self.assertIn(status, (200, 400, 404, 429))
            self.assertIn("listed", answer)


# --- Event loop ----------------------------------------------------------------------------------

class MirrorProtocol(ms.UdpProtocol):
    """As many answers as the first byte says, each as it came; without a byte it fails."""

    def datagram(self, data: bytes, peer: ms.Peer, now: float) -> ms.Replies:
        return [(data, (peer[0], peer[1]) if len(data) % 2 else peer)] * data[0]


class UdpSocketTest(unittest.TestCase):
    """Both ways to read and answer, over real sockets: a system call each, and one for many."""

    def make(self, vector: Optional[ms.MessageVector]) -> ms.UdpSocket:
        sock = ms.bound_socket(socket.AF_INET, "udp", "127.0.0.1", 0)
        self.addCleanup(sock.close)
        return ms.UdpSocket("mirror", sock, MirrorProtocol(), ms.Tally(), ms.Limiter((1e6, 1e6)),
                            vector)

    def ways(self) -> Iterable[ms.UdpSocket]:
        for vector in (None, ms.MessageVector.make()):
            with self.subTest(way=vector):
                yield self.make(vector)

    def game(self, host: str = "127.0.0.1") -> socket.socket:
        game = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.addCleanup(game.close)
        game.bind((host, 0))
        game.settimeout(5)
        return game

    def test_there_is_a_vector(self) -> None:
        wanted = (sys.platform == "linux" and sys.maxsize > 1 << 32
                  and sys.implementation.name == "cpython")
        self.assertEqual(ms.MessageVector.make() is not None, wanted)

    def test_a_system_without_the_vector_gets_along(self) -> None:
        refusing = SimpleNamespace(
            recvmmsg=lambda *arguments: ctypes.set_errno(errno.ENOSYS), sendmmsg=None)
        for library in (refusing, SimpleNamespace()):
            found = mock.Mock(return_value=library)
            with mock.patch.object(ctypes, "CDLL", found):
                self.assertIsNone(ms.MessageVector.make())

    def test_each_peer_gets_its_own_answers(self) -> None:
        rng = random.Random(7)
        for place in self.ways():
            wanted: Dict[socket.socket, List[bytes]] = {}
            linux = sys.platform == "linux"             # which has the whole of 127.0.0.0/8
            games = [self.game("127.0.0.%d" % (number + 1) if linux else "127.0.0.1")
                     for number in range(30)]
            for _ in range(3):
                for game, _ in itertools.product(games, range(5)):
                    size = rng.choice((1, 85, 86, 1499))
                    data = bytes([rng.choice((0, 1, 1, 2)), *rng.choices(range(256), k=size)])
                    game.sendto(data, place.sock.getsockname())
                    wanted.setdefault(game, []).extend([data] * data[0])
                for _ in range(3):                      # 150 are more than it reads at once
                    place.ready(0.0)
            for game, answers in wanted.items():
                self.assertEqual(sorted(game.recv(4096) for _ in answers), sorted(answers))
                game.setblocking(False)
                self.assertRaises(BlockingIOError, game.recv, 4096)
            sent = [data for answers in wanted.values() for data in answers]
            tally = place.tally
            self.assertEqual((tally.received, tally.sent, tally.unsent, tally.errors),
                             (450, len(sent), 0, 0))
            self.assertEqual(tally.bytes_out, sum(map(len, sent)))

    def test_a_long_datagram_is_cut_and_a_fault_ends_only_its_own(self) -> None:
        for place in self.ways():
            game = self.game()
            with self.assertLogs("masterserver") as logs:
                for data in (b"\1" * 5000, b"", b"\1x"):
                    game.sendto(data, place.sock.getsockname())
                place.ready(0.0)
            self.assertEqual((game.recv(8000), game.recv(8000)),
                             (b"\1" * ms.MAX_DATAGRAM_BYTES, b"\1x"))
            self.assertIn("IndexError", logs.output[0])         # of the mirror, which wants a byte
            self.assertEqual((place.tally.received, place.tally.errors), (3, 1))

    def test_what_is_limited_is_not_heard(self) -> None:
        for place in self.ways():
            place.limiter = ms.Limiter((0.001, 3))
            game = self.game()
            for number in range(5):
                game.sendto(b"\1%d" % number, place.sock.getsockname())
            place.ready(0.0)
            self.assertEqual([game.recv(100) for _ in range(3)], [b"\0010", b"\0011", b"\0012"])
            self.assertEqual((place.tally.limited, place.tally.sent), (2, 3))

    def test_who_cannot_be_answered_keeps_nobody_else_waiting(self) -> None:
        for place in self.ways():
            game = self.game()
            peers = [("127.0.0.1", 0), None, ("255.255.255.255", 9), ("127.0.0.1", 0), None]
            place.protocol.datagram = lambda data, peer, now: [     # type: ignore[method-assign]
                (data, to or peer) for to in peers]
            game.sendto(b"x" * 100, place.sock.getsockname())
            place.ready(0.0)
            self.assertEqual([game.recv(1000) for _ in range(2)], [b"x" * 100] * 2)
            self.assertEqual((place.tally.sent, place.tally.unsent), (2, 3))

    def test_more_answers_than_fit_at_once(self) -> None:
        for place in self.ways():
            game = self.game()
            game.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            place.protocol.datagram = lambda data, peer, now: [     # type: ignore[method-assign]
                (data * 10, peer)] * 8
            for _ in range(20):                         # 160 answers, 2.4 MB
                game.sendto(b"x" * 1500, place.sock.getsockname())
            place.ready(0.0)
            self.assertEqual(game.recv(60000), b"x" * 15000)
            self.assertEqual(place.tally.bytes_out, 160 * 15000)

    def test_a_bad_packet_is_counted_and_told_at_debug_alone(self) -> None:
        for place in self.ways():
            place.protocol = make_core().poller
            game = self.game()
            with self.assertLogs("masterserver", "DEBUG") as logged:
                game.sendto(b"\n\xe2\x80\xa8", place.sock.getsockname())
                place.ready(0.0)
            self.assertRegex(logged.output[0], r"^DEBUG:masterserver:127\.0\.0\.1:\d+ mirror "
                             r"malformed: an answer that nobody asked for: b'\\n\\xe2\\x80\\xa8'$")
            self.assertEqual((place.tally.malformed, place.tally.errors), (1, 0))

    def test_windows(self) -> None:
        """A closed port is told where the next datagram is read; a long datagram is an error; a
        port is nobody else's; select() serves 512 sockets."""
        place = self.make(None)
        reads = itertools.chain([ConnectionResetError()],
                                itertools.repeat((b"\1" * 5000, ("203.0.113.9", 1)), 9999))
        place.sock = mock.Mock(recvfrom=mock.Mock(side_effect=reads))
        with mock.patch.object(ms, "WINDOWS", True):
            data, _, _ = place.receive()
            self.assertEqual([len(packet) for packet in data],
                             [ms.MAX_DATAGRAM_BYTES] * (ms.DRAIN_DATAGRAMS - 1))
            self.assertEqual(place.sock.recvfrom.call_args, mock.call(1 << 16))
            with mock.patch.object(socket, "SO_EXCLUSIVEADDRUSE", -5, create=True), \
                    mock.patch.object(socket, "socket") as made:
                ms.bound_socket(socket.AF_INET, "tcp", "127.0.0.1", 0)
            self.assertEqual(ms.descriptor_limit(100_000), 512)
        options = [call[0][:2] for call in made.return_value.setsockopt.call_args_list]
        self.assertIn((socket.SOL_SOCKET, -5), options)
        self.assertNotIn((socket.SOL_SOCKET, socket.SO_REUSEADDR), options)

    def test_a_system_that_refuses_a_large_buffer(self) -> None:
        """The BSDs do; others grant as much as they allow."""
        granted: List[int] = []

        def refuse(level: int, option: int, value: int) -> None:
            if value > 1_860_000:
                raise OSError(errno.ENOBUFS, "no room")
            granted.append(value)
        ms.enlarge_buffer(mock.Mock(setsockopt=refuse))
        self.assertEqual(granted, [1 << 20])


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
    def make(self, session: ms.Session, source: str = "203.0.113.9",
             server: Optional[ms.MasterServer] = None) -> Tuple[ms.TcpConnection, socket.socket]:
        if server is None:
            server = master()
            self.addCleanup(server.stop)
        ours, theirs = socket.socketpair()
        self.addCleanup(theirs.close)
        self.addCleanup(ours.close)
        for sock in ours, theirs:                   # a pair by way of TCP has room for megabytes
            for option in socket.SO_SNDBUF, socket.SO_RCVBUF:
                sock.setsockopt(socket.SOL_SOCKET, option, 1 << 14)
        ours.setblocking(False)
        theirs.settimeout(5)
        listener = mock.Mock(tally=ms.Tally())
        listener.name = "test"
        connection = ms.TcpConnection(server, ours, source, session, listener)
        server.connections.all[connection] = None
        server.connections.by_source[connection.source] += 1
        connection.watch()
        return connection, theirs

    def closed(self, connection: ms.TcpConnection) -> bool:
        return connection.sock.fileno() < 0

    def test_all_that_came_is_answered_one_by_one(self) -> None:
        connection, peer = self.make(OneAnswer(3))
        peer.sendall(b"abc.d")
        connection.read(0.0)
        self.assertEqual(peer.recv(100), b"aaabbbccc...")
        self.assertEqual(read_all(peer), b"")
        self.assertEqual((connection.tally.received, connection.tally.bytes_out), (1, 12))

    def test_nothing_is_read_or_made_while_an_answer_waits(self) -> None:
        session = OneAnswer(1 << 20)
        connection, peer = self.make(session)
        peer.sendall(b"ab")
        connection.read(0.0)
        self.assertEqual((session.calls, connection.events), (1, selectors.EVENT_WRITE))
        got = 0
        while got < 2 << 20:
            got += len(peer.recv(1 << 16))
            if connection.events == selectors.EVENT_WRITE:
                connection.writable(1.0)
        self.assertEqual((session.calls, connection.events), (3, selectors.EVENT_READ))

    def test_who_takes_nothing_or_too_little_is_cut_off(self) -> None:
        for reads, closed_at in (0, ms.OUTPUT_STALL_S), (1, ms.OUTPUT_TOTAL_S):
            connection, peer = self.make(OneAnswer(8 << 20))
            peer.sendall(b"a")
            connection.read(0.0)
            for second in range(1, 200):
                if reads:
                    peer.recv(1 << 12)
                    connection.writable(float(second))
                connection.tick(float(second))
                if self.closed(connection):
                    break
            self.assertEqual(second, closed_at)

    def test_a_fault_or_bad_input_ends_it_and_says_so(self) -> None:
        for data, errors, malformed in (b"a!b", 1, 0), (b"a?b", 0, 1):
            connection, peer = self.make(OneAnswer())
            with self.assertLogs("masterserver", "DEBUG"):
                peer.sendall(data)
                connection.read(0.0)
            self.assertEqual(read_all(peer), b"a")
            self.assertEqual((connection.tally.errors, connection.tally.malformed),
                             (errors, malformed))

    def test_it_ends_without_a_reset(self) -> None:
        """What still comes is read away, up to a bound in bytes and time."""
        for size, now, closed in ((9, 0.1, False), (9, ms.LINGER_S, True),
                                  (ms.LINGER_BYTES + 1, 0.1, True)):
            connection, peer = self.make(OneAnswer())
            peer.sendall(b".")
            connection.read(0.0)
            self.assertEqual(read_all(peer), b".")
            for _ in range(0, size, 8192):
                with contextlib.suppress(OSError):
                    peer.sendall(b"x" * min(size, 8192))
                if not self.closed(connection):
                    connection.read(now)
            connection.tick(now)
            self.assertEqual(self.closed(connection), closed, (size, now))
        connection, peer = self.make(OneAnswer())
        peer.sendall(b".")
        connection.read(0.0)
        peer.close()
        connection.read(0.1)
        self.assertTrue(self.closed(connection))

    def test_a_peer_that_sends_no_more_still_gets_its_answers(self) -> None:
        session = OneAnswer()
        session.ended = lambda now: b"bye"          # type: ignore[method-assign]
        connection, peer = self.make(session)
        peer.sendall(b"a")
        peer.shutdown(socket.SHUT_WR)
        connection.read(0.0)
        connection.read(0.0)
        self.assertEqual(read_all(peer), b"abye")
        self.assertTrue(self.closed(connection))

    def test_a_job_for_the_disk(self) -> None:
        """Nothing is read until its result is there; who has gone gets none."""
        for gone in False, True:
            session = OneAnswer()
            session.resume = lambda result, now: b"made " + result  # type: ignore[method-assign]
            connection, peer = self.make(session)
            session.job = lambda: b"it"
            with mock.patch.object(connection.server.disk, "submit") as submit:
                peer.sendall(b"a")
                connection.read(0.0)
                connection.tick(0.1)
            (job, done), = (call[0] for call in submit.call_args_list)
            self.assertEqual((connection.events, job()), (0, b"it"))
            session.job = None
            if gone:
                connection.close(0.2)
            done(b"it", 1.0)
            if not gone:
                self.assertEqual((peer.recv(100), connection.events),
                                 (b"amade it", selectors.EVENT_READ))

    def test_sessions_are_ticked_a_few_times_a_second(self) -> None:
        session = OneAnswer()
        session.tick = mock.Mock(side_effect=[b"tock", b""])    # type: ignore[method-assign]
        connection, peer = self.make(session)
        connection.server.next_tick = math.inf
        for _ in range(2):
            connection.server.round(time.monotonic() + 1)
        self.assertEqual(session.tick.call_count, 2)
        self.assertEqual(peer.recv(100), b"tock")

    def test_what_waits_for_slow_readers_is_bounded_in_all(self) -> None:
        """The longest wait is closed first; an answer that many wait for counts once."""
        server, shared = master(), bytes(3 << 20)
        self.addCleanup(server.stop)
        asked = []
        for number in range(12):
            session = OneAnswer(3 << 20)
            if number >= 8:
                session.receive = lambda data, now: shared if data else b""     # type: ignore
            connection, _ = self.make(session, "203.0.113.%d" % number, server)
            connection.answer(session.receive, b"x", float(number))
            asked.append(connection)
        for limit, left in ((18 << 20, range(3, 12)), (2 << 20, range(8, 12))):
            with mock.patch.object(ms, "OUTPUT_BYTES", limit):
                server.connections.bound_output(19.0)
            self.assertEqual([number for number, connection in enumerate(asked)
                              if not self.closed(connection)], list(left))

    def test_a_peer_that_has_vanished_is_found_though_data_is_on_its_way(self) -> None:
        if not hasattr(socket, "TCP_USER_TIMEOUT"):
            self.skipTest("the system has no such option")
        with master(hyperbol__port="0") as server, connect(server, "hyperbol"):
            connection = eventually(lambda: next(iter(server.connections.all), None))
            option = connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            self.assertEqual(option, 120_000)


class LimitsOnTheWireTest(unittest.TestCase):
    def test_open_connections_of_one_source(self) -> None:
        """One over the limit is told so or closed, without a reset; one that left makes room."""
        with master(http__ports="0", aio__port="0", limits__connections_open="3") as server, \
                contextlib.ExitStack() as stack:
            held = [stack.enter_context(connect(server, "aio")) for _ in range(3)]
            for client in held:
                self.assertEqual(client.recv(5), b"\1\0\0\0\0")
            for _ in range(5):
                with connect(server, "http") as over:
                    over.sendall(b"GET /master.json HTTP/1.1\r\nHost: x\r\n\r\n")
                    status, headers, _, _ = split_response(read_all(over))
                    self.assertEqual((status, headers["Connection"]), (429, "close"))
            with connect(server, "aio") as over:
                over.sendall(b"12#%\n" * 100)
                self.assertEqual(read_all(over), b"")
            self.assertEqual(server.tallies["aio"].limited, 1)
            for client in held:
                client.close()
            eventually(lambda: not server.connections.by_source)
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
            with master(http__ports="0", iceball__port="0", **chosen) as server:
                with connect(server, "http") as client:
                    heard = b""
                    with contextlib.suppress(OSError):          # it may be closed already
                        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
                        heard = client.recv(12)
                    self.assertEqual(heard, b"HTTP/1.1 200" if answered else b"")
                    self.assertEqual(server.tallies["http"].limited, int(not answered))
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as game:
                    game.connect(("127.0.0.1", port_of(server, "iceball")))
                    game.settimeout(5.0 if answered else 0.2)
                    game.send(CAPTURED)
                    with contextlib.nullcontext() if answered else self.assertRaises(
                            socket.timeout):
                        game.recv(4096)

    def test_total_closes_those_answered_then_the_idlest_and_servers_last(self) -> None:
        with master(aio__port="0", http__ports="0", limits__connections_total="8",
                    limits__connections_open="100") as server, contextlib.ExitStack() as stack:
            def client() -> socket.socket:
                sock = stack.enter_context(connect(server, "aio"))
                self.assertEqual(sock.recv(5), b"\1\0\0\0\0")
                return sock
            clients = [client() for _ in range(7)]
            clients[0].sendall(b"13#A server#D#27010#%")        # published: kept, though the oldest
            self.assertEqual(clients[0].recv(100), b"%SUCCESS#13#%")
            answered = stack.enter_context(connect(server, "http"))
            answered.sendall(b"GET / HTTP/1.0\r\n\r\n")
            read_all(answered)
            clients.append(client())                            # in the place of who was answered
            clients[1].sendall(b"12")                           # not idle any more
            newest = list(server.connections.all)[1]
            eventually(lambda: list(server.connections.all)[-1] is not newest and b"12" in [
                getattr(one.session, "buffer", b"") for one in server.connections.all])
            client()
            self.assertEqual(read_all(clients[2]), b"")
            clients[1].sendall(b"#%\n")
            self.assertEqual(clients[1].recv(4), b"%12#")
            self.assertEqual((len(server.connections.all), server.registry.total), (8, 1))

    def test_datagrams(self) -> None:
        with master(iceball__port="0", limits__datagrams="0.01/20") as server, \
                socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as game:
            game.connect(("127.0.0.1", port_of(server, "iceball")))
            for _ in range(30):
                game.send(CAPTURED)
            tally = server.tallies["iceball"]
            eventually(lambda: tally.received == 30)
            self.assertEqual((tally.sent, tally.limited), (20, 10))

    def test_out_of_descriptors(self) -> None:
        """Accepting rests for a second, said once, and goes on; readiness does not spin."""
        server = master(hyperbol__port="0")
        self.addCleanup(server.stop)
        server.bind()
        listener, = server.sockets.tcp
        listener.sock, sock = mock.Mock(wraps=listener.sock, fileno=listener.sock.fileno), \
            listener.sock
        server.selector.unregister(sock)
        server.selector.register(listener.sock, selectors.EVENT_READ, (1, listener.ready))
        with connect(server, "hyperbol") as client, self.assertLogs("masterserver") as logged:
            listener.sock.accept.side_effect = OSError(errno.EMFILE, "too many")
            for now in (0.5, 1.0):
                listener.ready(now)
                self.assertEqual((server.health, listener.paused_until),
                                 ({"descriptors": "too many"}, now + 1.0))
                listener.tick(now + 0.9)
                self.assertTrue(listener.paused_until)
                listener.tick(now + 1.0)
                self.assertFalse(listener.paused_until)
            listener.sock.accept.side_effect = sock.accept
            listener.ready(3.0)
            self.assertEqual((len(client.recv(12)), server.health), (12, {}))
        self.assertEqual(len(logged.records), 2)

    def test_no_more_connections_than_descriptors(self) -> None:
        with mock.patch.object(ms, "descriptor_limit", lambda: 3 + ms.DESCRIPTORS_KEPT + 2):
            with master(hyperbol__port="0") as server, contextlib.ExitStack() as stack:
                for _ in range(9):
                    client = stack.enter_context(connect(server, "hyperbol"))
                    self.assertEqual(len(client.recv(12)), 12)
                self.assertLessEqual(len(server.connections.all), 3)


class MasterServerTest(unittest.TestCase):
    def test_an_iceball_server_is_listed_and_shown(self) -> None:
        with RunningServer() as server:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as game:
                game.settimeout(5)
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

    def test_a_port_in_use_says_which_and_what_to_change(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.bind(("127.0.0.1", 0))
            port = other.getsockname()[1]
            result = run_program("--set", "server.bind=127.0.0.1",
                                 "--set", "iceball.port=%d" % port)
        self.assertEqual(result.returncode, 1)
        for word in ("iceball", str(port), "[iceball] port"):
            self.assertIn(word, result.stderr)
        self.assertNotIn("Traceback", result.stderr)

    def test_what_to_do_where_a_port_cannot_be_had(self) -> None:
        server = master()
        self.addCleanup(server.stop)
        hyperbol, poll = (next(row for row in ms.PROTOCOLS if row.name == name)
                          for name in ("hyperbol", "poll"))
        for row, status, words in (
                (hyperbol, errno.EMFILE, "ulimit -n"), (poll, errno.EADDRINUSE, "bind"),
                (hyperbol, errno.EADDRNOTAVAIL, "bind"),
                (hyperbol, errno.EADDRINUSE, r"another program .*\[hyperbol\] port")):
            self.assertRegex(server.sockets.way_out(row, status), words)

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
            with self.assertRaisesRegex(ms.StartError, "Change .server. bind"):
                master(http__ports="0", server__bind="::").bind()

    def test_which_socket_a_poll_leaves_by(self) -> None:
        """The first of the peer's family that the protocol has."""
        server = master()
        self.addCleanup(server.stop)
        places = []
        for protocol, family in ((None, socket.AF_INET), (server.poller, socket.AF_INET6),
                                 (server.poller, socket.AF_INET), (server.poller, socket.AF_INET)):
            place = mock.Mock(protocol=protocol, tally=ms.Tally())
            place.sock.family, place.send_all.return_value = family, (1, 1)
            places.append(place)
        server.sockets.udp += places
        server.poller.tick = mock.Mock(return_value=[       # type: ignore[method-assign]
            (b"4", ("203.0.113.9", 1)), (b"6", ("2001:db8::1", 2))])
        server.tick_protocol(server.poller, 0.0)
        self.assertEqual([[data for data, _ in place.send_all.call_args[0][0]]
                          if place.send_all.called else [] for place in places],
                         [[], [b"6"], [b"4"], []])

    def test_work_for_connections_is_done_in_turns(self) -> None:
        """After 10 ms of it datagrams are looked at again; connections are not forgotten."""
        server = master(iceball__port="0", hyperbol__port="0", http__ports="0", aio__port="0")
        self.addCleanup(server.stop)
        server.bind()
        clock, order = [time.monotonic()], []

        def work(listener: ms.TcpListener, now: float) -> None:
            order.append(listener.name)
            listener.sock.accept()[0].close()
            clock[0] += 0.006
        with contextlib.ExitStack() as stack:
            for name in ("hyperbol", "http", "aio"):
                stack.enter_context(connect(server, name))
            game = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            stack.enter_context(mock.patch.object(time, "monotonic", lambda: clock[0]))
            for listener in server.sockets.tcp:
                server.selector.modify(listener.sock, selectors.EVENT_READ, (
                    1, functools.partial(work, listener)))
            place, = (place for place in server.sockets.udp if place.name == "iceball")
            server.selector.modify(place.sock, selectors.EVENT_READ, (
                0, lambda now: (order.append("iceball"), place.receive())))
            for _ in range(2):
                game.sendto(CAPTURED, place.sock.getsockname())
                server.round(clock[0])
        self.assertEqual((order[0], order[3]), ("iceball", "iceball"))
        self.assertEqual(sorted(order[1:3] + order[4:]), ["aio", "http", "hyperbol"])

    def test_who_announced_while_the_program_was_stopped_is_not_silent(self) -> None:
        """Ctrl+Z and fg, or docker pause, of minutes."""
        server = master(iceball__port="0")
        self.addCleanup(server.stop)
        server.bind()
        server.registry.hear("iceball", "203.0.113.9", 1, "203.0.113.9", time.monotonic(), 120.0,
                             {})
        for seconds, late, total in ((600.0, 599.0, 1), (719.0, 0.0, 1), (720.5, 0.0, 0)):
            now = time.monotonic() + seconds
            server.next_tick = server.next_look = now - late
            with mock.patch.object(ms, "time", mock.Mock(wraps=time, monotonic=lambda: now)):
                server.round(0.0)
            self.assertEqual(server.registry.total, total, seconds)

    def test_a_slow_reader_gets_everything(self) -> None:
        server = master(http__ports="0", limits__servers_per_source="3000")
        for port in range(1, 3001):
            server.registry.hear("iceball", "127.0.0.1", port, "127.0.0.1", time.monotonic(),
                                 120.0, {"name": "n" * 30, "map": "m" * 30})
        with server, socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port_of(server, "http")))
            client.settimeout(5)
            client.sendall(b"GET /master.json HTTP/1.0\r\n\r\n")
            body = split_response(read_all(client, 4095))[2]
        self.assertEqual(len(json.loads(body.decode())["servers"]), 3000)

    def test_a_pause_of_half_a_second_loses_no_announcement(self) -> None:
        """At 10,000 a second, or as many as the buffer holds that the system allows."""
        if not hasattr(signal, "SIGSTOP"):
            self.skipTest("a process is stopped by a signal")
        with ms.bound_socket(socket.AF_INET, "udp", "127.0.0.1", 0) as like:
            room = like.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        count = min(5000, room // 1024)             # what an announcement costs the kernel
        with RunningServer() as server, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as game:
            game.connect(("127.0.0.1", server.port("iceball")))
            server.process.send_signal(signal.SIGSTOP)
            try:
                for number in range(count):
                    game.send(CAPTURED)
            finally:
                server.process.send_signal(signal.SIGCONT)
            told = b'masterserver_received_total{protocol="iceball"} %d\n' % count
            eventually(lambda: told in fetch(server.port("http"), "/metrics")[2])

    def test_a_fault_in_one_place_ends_nothing_else(self) -> None:
        server = master(http__ports="0", iceball__port="0")
        self.addCleanup(server.stop)
        server.bind()
        fail = mock.Mock(side_effect=ZeroDivisionError)
        with mock.patch.multiple(server.registry, expire=fail), self.assertLogs() as logged:
            with mock.patch.multiple(ms.Web, tick=fail), mock.patch.multiple(ms.Iceball, tick=fail):
                server.tick(1.0)
        self.assertEqual((fail.call_count, len(logged.records)), (3, 3))
        self.assertEqual(fetch_here(server, "/healthz")[0], 200)

    def test_it_ends_with_the_answers_that_were_asked_for(self) -> None:
        """Nobody is accepted any more; what was sent before is answered, and nobody gets a reset.
        """
        server = master(http__ports="0", limits__servers_per_source="3000")
        for port in range(1, 3001):
            server.registry.hear("iceball", "127.0.0.1", port, "127.0.0.1", time.monotonic(),
                                 120.0, {"name": "n" * 30})
        server.start()
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(connect(server, "http")) for _ in range(3)]
            for client in clients[:2]:
                client.sendall(b"GET /master.json HTTP/1.1\r\nHost: x\r\n\r\n")
            stopping = threading.Thread(target=server.stop)
            stopping.start()
            for client in clients[:2]:
                self.assertEqual(split_response(read_all(client))[0], 200)
            self.assertEqual(read_all(clients[2]), b"")
            stopping.join(5)
        self.assertFalse(stopping.is_alive())
        self.assertRaises(OSError, socket.create_connection, ("127.0.0.1", port_of(server, "http")))

    def test_host_names_are_looked_up_in_a_thread_of_their_own(self) -> None:
        with mock.patch.object(ms, "addresses", lambda host: {"a": ["203.0.113.9"]}[host]):
            with master() as server:
                found: List[Tuple[str, bool]] = []
                for host in "a", "b":
                    server.resolve(host, lambda address, now: found.append(
                        (address, threading.current_thread() is server.thread)))
                eventually(lambda: len(found) == 2)
        self.assertEqual(found, [("203.0.113.9", True), ("", True)])

    def test_addresses_of_a_host(self) -> None:
        entries = [(socket.AF_INET6, 0, 0, "", ("2001:db8::1", 0)),
                   (socket.AF_INET, 0, 0, "", ("203.0.113.9", 0)),
                   (socket.AF_INET, 0, 0, "", ("203.0.113.9", 0))]
        for reached, wanted in (lambda far: "x", ["203.0.113.9", "2001:db8::1"]), (
                lambda far: "x" if ":" in far else "", ["2001:db8::1"]), (
                lambda far: "", ["203.0.113.9", "2001:db8::1"]):
            with mock.patch.object(socket, "getaddrinfo", return_value=entries), \
                    mock.patch.object(ms, "own_address", reached):
                self.assertEqual(ms.addresses("host"), wanted)


def fetch_here(server: ms.MasterServer, path: str) -> Tuple[int, Dict[str, str], bytes]:
    """One request to a server whose loop this thread drives."""
    with connect(server, "http") as client:
        client.sendall(b"GET %s HTTP/1.0\r\n\r\n" % path.encode())
        for _ in range(5):
            server.round(time.monotonic() + 0.05)
        return split_response(read_all(client))[:3]


class WorkerTest(unittest.TestCase):
    def test_results_and_faults_are_delivered_where_they_are_asked_for(self) -> None:
        woken = threading.Event()
        worker, results = ms.Worker("test", woken.set), []
        for job in (lambda: 5, lambda: 1 // 0):
            worker.submit(job, lambda result, now: results.append((str(result), now)))
        self.assertTrue(worker.stop(5.0))
        self.assertTrue(woken.is_set())
        self.assertEqual(results, [])
        worker.deliver(7.0)
        self.assertEqual([now for _, now in results], [7.0, 7.0])
        self.assertEqual(results[0][0], "5")
        self.assertIn("zero", results[1][0])

    def test_too_many_wait_and_one_that_hangs(self) -> None:
        worker, hangs, results = ms.Worker("test", lambda: None), threading.Event(), []
        for _ in range(ms.WORKER_JOBS + 3):
            worker.submit(hangs.wait, lambda result, now: results.append(result))
        self.assertFalse(worker.stop(0.01))
        worker.deliver(0.0)
        self.assertTrue(results)
        self.assertIn("too many", str(results[0]))
        hangs.set()
        self.assertTrue(worker.stop(5.0))

    def test_a_fault_after_a_job_is_told(self) -> None:
        worker = ms.Worker("test", lambda: None)
        worker.submit(lambda: 1, lambda result, now: 1 // 0)
        worker.stop(5.0)
        with self.assertLogs("masterserver", "ERROR"):
            worker.deliver(0.0)


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
        self.addCleanup(server.stop)
        return server

    def test_errors_change_nothing_and_good_settings_hold(self) -> None:
        server, now = self.server(), 100.0
        protocol = mock.Mock(spec=ms.UdpProtocol, tick=mock.Mock(return_value=[]))
        server.protocols.append(protocol)
        for text, words, banned in (
                ("[bans]\n203.0.113.9 = cheats\n", "changed: bans", "cheats"),
                ("[bans]\nnonsense = x\n", "old settings stay in force: .*nonsense", "cheats"),
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
            self.assertEqual(server.rules.ban("203.0.113.9"), banned, text)
        self.assertEqual(protocol.read.call_count, 2)
        self.assertEqual(server.settings["iceball.timeout"], 120)

    def test_an_ini_or_a_text_file_that_comes_later(self) -> None:
        os.remove(self.path)
        server = self.server()
        self.write("masterserver.ini", "[http]\nstylesheet = my.css\ntitle = Mine\n")
        with self.assertLogs("masterserver") as logged:
            server.reload()
            self.assertEqual(server.settings["http.title"], "Game servers")
            self.write("my.css", "b {}")
            server.reload()
        self.assertIn("my.css", logged.output[0])
        self.assertEqual((server.settings["http.title"], server.settings.texts["http.stylesheet"]),
                         ("Mine", "b {}"))
        self.write("my.css", "i {} ")
        self.assertTrue(server.files.changed(100.0))
        self.assertFalse(server.files.changed(100.1))

    def test_text_files_that_cannot_be_read(self) -> None:
        self.write("long.css", "x" * 1001)
        self.write("bad.html", "$unknown")
        rows = [("http.stylesheet", "long.css", "more than 1000"), ("http.template", "bad.html",
                "unknown"), ("http.stylesheet", "none.css", "none.css")]
        if hasattr(os, "mkfifo"):
            os.mkfifo(os.path.join(self.folder, "pipe"))
            rows.append(("aio.news_file", "pipe", "not a plain file"))
        for name, file, words in rows:
            settings = ms.Settings({name: os.path.join(self.folder, file)})
            with mock.patch.object(ms, "TEXT_FILE_CHARACTERS", 1000):
                self.assertRaisesRegex(ms.SettingsError, words, ms.read_text_files, settings)

    def test_asked_for_from_another_thread(self) -> None:
        server = self.server()
        server.sockets.hosts = ("127.0.0.1",)
        server.settings.values.update({row.setting: None for row in ms.PROTOCOLS if row.setting})
        server.settings.values["http.ports"] = ()
        with server, self.assertLogs("masterserver") as logged:
            server.ask_reload()
            eventually(lambda: logged.records)

    def test_who_is_blocked_from_now_on_is_cut_off(self) -> None:
        with master(http__ports="0") as server, connect(server, "http") as client:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            self.assertEqual(split_response(client.recv(65536))[0], 200)
            server.settings.values["blocked"] = {ms.read_network("127.0.0.0/8"): ""}
            server.names.submit(lambda: None, lambda result, now: server.apply())
            self.assertEqual(client.recv(65536), b"")


class EventLogTest(unittest.TestCase):
    def test_who_comes_and_goes_is_told_unless_they_are_many(self) -> None:
        registry = make_core(limits__servers_per_source="9999").registry
        events = ms.EventLog(registry)
        with self.assertLogs("masterserver", "INFO") as logged:
            server = registry.hear("aio", "203.0.113.9", 1, "203.0.113.9", 0.0, 9.0, {"name": "Ü"})
            registry.update(server, {"players": 5})
            registry.remove(server)
            events.tell()
            for port in range(100):
                registry.hear("aio", "203.0.113.9", port + 1, "203.0.113.9", 0.0, 9.0, {})
            events.tell()
            events.tell()
        self.assertEqual([line.partition("server:")[2] for line in logged.output[:2]],
                         ["203.0.113.9:1 aio listed '\\xdc'", "203.0.113.9:1 aio gone '\\xdc'"])
        self.assertEqual(len(logged.output), 2 + 20 + 1)
        self.assertIn("80 more", logged.output[-1])


# --- The list on disk -----------------------------------------------------------------------------

class DiskThread:
    """A worker without a thread: works at once, or when the test says so."""

    def __init__(self) -> None:
        self.at_once = True
        self.jobs: List[Any] = []

    def submit(self, job: Callable[[], Any], done: Callable[[Any, float], None]) -> None:
        self.jobs.append((job, done))
        if self.at_once:
            self.work()

    def work(self) -> None:
        job, done = self.jobs.pop(0)
        try:
            result = job()
        except Exception as error:
            result = error
        done(result, 0.0)


class SavedListTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.path = os.path.join(folder.name, "master.db")
        info = mock.patch.object(ms.log, "info")
        info.start()
        self.addCleanup(info.stop)

    def start(self, now: float = 0.0, wall: float = T0, needed: bool = False,
              **settings: str) -> ms.SavedList:
        database = ms.Database(self.path)
        self.addCleanup(database.close)
        saved = ms.SavedList(database, make_core(**settings).registry, DiskThread(), {})
        saved.restore(now, wall, needed)
        return saved

    def restart(self, saved: ms.SavedList, wall: float = T0 + 5, **settings: str) -> ms.SavedList:
        """Killed after a batch, and started again on a machine that has started anew."""
        saved.tick(2.0, T0 + 2)
        saved.database.close()
        return self.start(1000.0, wall, **settings)

    def hear(self, saved: ms.SavedList, port: int, now: float = 0.0, lifetime: float = 120.0,
             game: str = "iceball", address: str = "203.0.113.9", **fields: Any) -> ms.Server:
        return saved.registry.hear(game, address, port, address, now, lifetime, fields)

    def on_disk(self) -> List[int]:
        """The ports that are listed, as another program would read them."""
        with contextlib.closing(sqlite3.connect(self.path)) as db:
            return [port for port, in db.execute(
                "SELECT port FROM server JOIN listed ON id = server ORDER BY port")]

    def failing(self, saved: ms.SavedList, error: Any) -> Any:
        return mock.patch.object(saved.database, "save", side_effect=error)

    # A restart

    def test_a_restart_has_the_whole_list_at_once(self) -> None:
        told = dict(name="caf\u00e9", mode="ctf", map="mesa", version="1.2", players=3,
                    max_players=8, playing=2, description="a text", flavor=5,
                    verified="handshake", details={"mod": "x"})
        saved = self.start()
        self.hear(saved, 1, **told)
        self.hear(saved, 2, game="aio", address="2001:db8::1", lifetime=math.inf)
        local = saved.registry.hear("iceball", "203.0.113.8", 3, "192.168.1.5", 0.0, 120.0, {})
        saved = self.restart(saved, T0 + 60)
        found = {server.port: server for server in saved.registry.servers()}
        self.assertEqual({port: (server.game, server.address, server.source, server.confirmed)
                          for port, server in found.items()},
                         {1: ("iceball", "203.0.113.9", "203.0.113.9", False),
                          2: ("aio", "2001:db8::1", "2001:db8::1", False),
                          3: ("iceball", "203.0.113.8", "192.168.1.5", False)})
        self.assertEqual({name: getattr(found[1], name) for name in told}, told)
        self.assertEqual((found[2].name, found[2].playing, found[2].details), ("", None, {}))
        self.assertEqual((found[1].first_seen, found[1].last_seen), (940.0, 940.0))
        self.assertEqual(found[3].key, local.key)

    def test_lifetimes_after_a_restart(self) -> None:
        """They begin with it."""
        saved = self.start()
        for port, (game, verified, lifetime) in enumerate((
                ("iceball", "handshake", 120.0), ("hyperbol", "query", math.inf),
                ("aio", "connection", math.inf), ("aio", "self-reported", math.inf)), 1):
            self.hear(saved, port, game=game, verified=verified, lifetime=lifetime)
        saved = self.restart(saved, T0 + 600)
        registry = saved.registry
        for now, expected in ((1059.9, [1, 2, 3, 4]), (1060.1, [1, 2]), (1119.9, [1, 2]),
                              (1120.1, [2]), (9e9, [2])):
            registry.expire(now)
            ports = sorted(server.port for server in registry.servers())
            self.assertEqual(ports, expected, now)

    def test_who_is_not_listed_again_leaves_the_file(self) -> None:
        saved = self.start()
        for port in range(1, 6):
            self.hear(saved, port, address="203.0.113.%d" % port, name="old %d" % port)
        saved.registry.update(saved.registry.get("iceball", "203.0.113.5", 5),
                              {"responding": False})            # only the ini names it
        self.hear(saved, 6, now=-3600.0)                        # too long ago
        self.hear(saved, 7, name="late", now=-3595.0)
        saved = self.restart(saved, T0 + 4, **{
            "bans__203.0.113.1": "cheats", "server__refuse_names": "old 2"})
        ports = sorted(server.port for server in saved.registry.servers())
        self.assertEqual(ports, [3, 4, 7])
        self.assertEqual(self.on_disk(), [1, 2, 3, 4, 5, 6, 7])
        saved.tick(1001.0, T0 + 6)
        self.assertEqual(self.on_disk(), ports)
        saved = self.restart(saved, T0 + 7, limits__servers="2")
        self.assertEqual(saved.registry.total, 2)

    def test_a_clock_that_was_set_between(self) -> None:
        """Nobody lives longer for it; from ahead by more than an hour, the list is not shown."""
        for number, (step, listed) in enumerate((
                (86400.0, 0), (3e8, 0), (600.0, 1), (-86400.0, 1), (-1.6e9, 1))):
            self.path = os.path.join(self.folder, "%d.db" % number)
            saved = self.start()
            self.hear(saved, 1)
            saved = self.restart(saved, T0 + 5 + step)
            self.assertEqual(saved.registry.total, listed, step)
            for server in saved.registry.servers():
                self.assertLessEqual(server.last_seen, 1000.0)
            saved.registry.expire(1120.1)
            self.assertEqual(saved.registry.total, 0, step)

    def test_rows_of_the_program_before(self) -> None:
        """Their texts had three fields more; infinite lifetimes were written as a day."""
        text = ('["S","ctf","m","1",%d,9,null,"d",1,"%s",true,{"a":"b"},"203.0.113.9",%s,'
                'false,true]')
        for verified, lasting, life, lifetime in (
                ("handshake", "false", 100.0, 100.0), ("connection", "true", 86400.0, 60.0),
                ("query", "true", 86400.0, math.inf), ("query", "false", 180.0, 180.0)):
            row = ("x", "203.0.113.9", 1, T0 + life, T0 - 9.0, T0 - 0.0,
                   text % (3, verified, lasting))
            server = ms.restored_server(row, 0.0, T0)
            self.assertEqual(
                (server.name, server.players, server.max_players, server.playing, server.flavor,
                 server.verified, server.details, server.lifetime, server.first_seen),
                ("S", 3, 9, None, 1, verified, {"a": "b"}, lifetime, -9.0), verified)

    def test_noise_in_the_fields(self) -> None:
        plain = dict(name="", players=0, playing=None, verified="self-reported", details={},
                     source="203.0.113.9", responding=True, flavor=0)
        for text, expected in (
                ("", {}), ("[]", {}), ("null", {}), ("{}", {}), ("[", {}), ("[" * 5000, {}),
                ("[5, [], null, {}, true, 0, 1.5, null, null, 1, 0, [], 5]", {}),
                ('["\\u001b[0m\\u202eX\\n",1,2,3,-4,99999,70000,7,999,"?",5,[],"nowhere"]',
                 {"name": "X", "max_players": 65535, "playing": 65535, "flavor": 255}),
                ('["%s"]' % ("x" * 2000), {"name": "x" * ms.TEXT_CHARACTERS}),
                ('["","","","",0,0,null,"",0,"",true,{"a\\u0000":"b\\u202e","c":5}]',
                 {"details": {"a": "b", "c": "5"}})):
            row = ("iceball", "203.0.113.9", 1, T0 + 100.0, T0 - 0.0, T0 - 0.0, text)
            server = ms.restored_server(row, 0.0, T0)
            for name, value in {**plain, **expected}.items():
                self.assertEqual(getattr(server, name), value, (text[:40], name))

    def test_rows_of_noise_cost_only_themselves(self) -> None:
        saved = self.start()
        self.hear(saved, 1)
        saved.tick(2.0, T0 + 2)
        rows = [("iceball", address, port, T0 + 99.0, T0 - 0.0, T0 - 0.0, "[]")
                for address, port in (("nowhere", 2), ("a:b", 2), ("0.0.0.0", 2), ("", 2),
                                      ("203.0.113.8", 0), ("203.0.113.8", 65536))]
        rows += [("iceball", "203.0.113.7", 11, -math.inf, T0 - 0.0, T0 - 0.0, "[]"),
                 ("iceball", "203.0.113.7", 12, T0 + 99.0, T0 - 0.0, -math.inf, "[]"),
                 ("iceball", "203.0.113.7", 13, 1e300, T0 - 0.0, T0 - 0.0, "[]"),
                 ("iceball", "203.0.113.7", 14, math.inf, T0 - 0.0, math.inf, "[]"),
                 ("iceball", "203.0.113.7", 15, T0 + 99.0, -math.inf, T0 - 0.0, "[]")]
        saved.database.save(rows, set())
        saved.database.close()
        saved = self.start(1000.0)
        registry = saved.registry
        registry.expire(1000.1)
        for server in registry.servers():
            self.assertTrue(server.address == "203.0.113.9" or server.port == 13, server.key)
            self.assertTrue(0 <= 1000.0 - server.last_seen <= 5, server.key)
            self.assertLess(abs(server.first_seen), 1e10)
        registry.expire(1000.0 + ms.DAY)
        self.assertEqual(registry.total, 0)

    def test_a_file_that_cannot_be_used(self) -> None:
        """It is an error only if it is asked for, and not there."""
        error = sqlite3.OperationalError("database or disk is full")
        for exists, needed, raised in ((False, False, False), (False, True, True),
                                       (True, False, False), (True, True, False)):
            self.path = os.path.join(self.folder, "%d%d.db" % (exists, needed))
            if exists:
                self.start().database.close()
            with mock.patch.object(ms.Database, "load", side_effect=error), \
                    mock.patch.object(ms.log, "warning") as warning:
                if raised:
                    self.assertRaises(sqlite3.Error, self.start, needed=True)
                    continue
                saved = self.start(needed=needed)
            self.assertIn("cannot be used", warning.call_args[0][0])
            self.assertEqual(saved.health, {"database": "database or disk is full"})
            # What is heard is saved as soon as it can be
            self.hear(saved, 1)
            saved.tick(1.0, T0 + 1)
            self.assertEqual((saved.health, self.on_disk()), ({}, [1]))

    def test_a_damaged_file_that_cannot_be_renamed_stops_no_start(self) -> None:
        with open(self.path, "wb") as file:
            file.write(b"noise" * 1000)
        with mock.patch.object(os, "replace", side_effect=PermissionError(13, "denied")), \
                self.assertLogs("masterserver", "WARNING"):
            saved = self.start(needed=True)
        self.assertIn("denied", saved.health["database"])

    # While it serves

    def test_a_batch_is_what_is_new(self) -> None:
        saved = self.start()
        registry = saved.registry
        one, two, three = (self.hear(saved, port, players=port) for port in (1, 2, 3))
        with mock.patch.object(saved.database, "save", wraps=saved.database.save) as save, \
                mock.patch.object(saved.database, "sample", wraps=saved.database.sample) as sample:
            def saves(now: float) -> Any:
                """The ports of the rows, of those gone, and the sample."""
                save.reset_mock(), sample.reset_mock()
                saved.tick(now, T0 + now)
                if not save.called:
                    return None
                rows, gone = save.call_args[0]
                players = sample.call_args[0][1] if sample.called else ()
                return (sorted(row[2] for row in rows), sorted(key[2] for key in gone),
                        {port or address: count for _, address, port, count in players})
            # Everybody once a minute, with the sum of the game
            self.assertEqual(saves(0.0), ([1, 2, 3], [], {"": 6, 1: 1, 2: 2, 3: 3}))
            self.assertIsNone(saves(1.0))
            registry.confirm(one, 2.0)
            self.assertIsNone(saves(2.0))
            registry.update(two, {"players": 5})
            registry.remove(three)
            self.hear(saved, 4)
            self.assertEqual(saves(3.0), ([2, 4], [3], {}))
            registry.update(two, {"responding": False})
            self.assertEqual(saves(60.0), ([1, 2, 4], [], {"": 1, 1: 1, 4: 0}))
            for server in registry.servers():
                registry.remove(server)
            self.assertEqual(saves(61.0), ([], [1, 2, 4], {}))
            self.assertEqual(saves(120.0), ([], [], {"": 0}))
        self.assertEqual(saved.database.known(*one.key)[:2], (T0, T0 + 2.0))

    def test_sparklines_come_with_the_samples(self) -> None:
        saved = self.start()
        self.hear(saved, 1, players=3)
        for now in (0.0, 900.0, 960.0, 4500.0, 4560.0):
            saved.tick(now, T0 + now)
        self.assertEqual(saved.recent["iceball", "203.0.113.9", 1][-1], 3)
        self.assertEqual(self.start(wall=T0 + 4550).recent, saved.recent)

    def test_one_batch_at_a_time_and_a_disk_that_hangs_is_told(self) -> None:
        saved = self.start()
        saved.worker.at_once = False
        with self.assertLogs("masterserver", "ERROR") as logged:
            for second in range(30):
                self.hear(saved, 1 + second)
                saved.tick(float(second), T0 + second)
                self.assertEqual(list(saved.health), ["database"] if second >= 10 else [])
                self.assertEqual(len(saved.worker.jobs), 1)
        self.assertEqual(len(logged.output), 1)
        self.assertIn("10 s or more", logged.output[0])
        saved.worker.work()
        self.assertEqual((saved.health, self.on_disk()), ({}, [1]))
        saved.worker.at_once = True
        saved.tick(30.0, T0 + 30)
        self.assertEqual(self.on_disk(), list(range(1, 31)))
        self.assertIn("saved again", ms.log.info.call_args[0][0])

    def test_what_fails_is_told_once_and_tried_again(self) -> None:
        for error in (sqlite3.OperationalError("disk is full"), MemoryError(), OSError("gone")):
            self.path = os.path.join(self.folder, type(error).__name__)
            saved = self.start()
            gone = self.hear(saved, 1, players=1)
            saved.tick(0.0, T0)
            saved.registry.remove(gone)
            self.hear(saved, 2, players=2)
            with self.failing(saved, error), self.assertLogs("masterserver", "ERROR") as logged:
                for second in (61, 62, 63):
                    saved.tick(float(second), T0 + second)
                    self.hear(saved, second)
            self.assertEqual((len(logged.output), self.on_disk()), (1, [1]))
            self.assertEqual(saved.health, {"database": ms.error_text(error)})
            self.assertTrue(saved.health["database"])
            saved.tick(64.0, T0 + 64)
            self.assertEqual((saved.health, self.on_disk()), ({}, [2, 61, 62, 63]))
            # The minute has its sample
            series = saved.database.history("iceball", "203.0.113.9", 2, "day", T0 + 120)
            self.assertEqual(series.means[-1], 2)

    def test_a_change_while_a_batch_is_written_is_in_the_next(self) -> None:
        saved = self.start()
        saved.worker.at_once = False
        server = self.hear(saved, 1)
        saved.tick(0.0, T0)
        saved.registry.remove(server)
        self.hear(saved, 2)
        for now in (1.0, 2.0):
            saved.worker.work()
            saved.tick(now, T0 + now)
        self.assertEqual(self.on_disk(), [2])

    def test_while_the_disk_takes_nothing_little_piles_up(self) -> None:
        saved = self.start()
        saved.worker.at_once = False
        with mock.patch.object(ms, "ALTERED_SERVERS", 50), mock.patch.object(ms.log, "error"), \
                self.failing(saved, sqlite3.OperationalError("full")):
            for number in range(400):
                for port in range(1, 41):
                    saved.registry.remove(self.hear(saved, 40 * number + port))
                saved.tick(float(number), T0 + number)
                if number % 2:
                    saved.worker.work()             # a batch fails while others leave
                self.assertLessEqual(len(saved.registry.altered), 100)
        saved.worker.at_once = True
        if saved.worker.jobs:
            saved.worker.work()
        self.hear(saved, 1)
        saved.tick(500.0, T0 + 500)
        self.assertEqual(self.on_disk(), [1])

    def test_after_damage_everybody_is_in_the_new_file(self) -> None:
        saved = self.start()
        for port in range(1, 20):
            self.hear(saved, port, description="x" * 500)
        saved.tick(0.0, T0)
        saved.database.close()
        with open(self.path, "r+b") as file:
            file.write(b"noise" * 1000)
        self.hear(saved, 20)
        with self.assertLogs("masterserver", "WARNING") as logged:
            saved.tick(1.0, T0 + 1)
        self.assertIn("it has been renamed to " + saved.database.set_aside, logged.output[0])
        self.assertEqual((saved.health, self.on_disk()), ({}, [20]))
        saved.tick(2.0, T0 + 2)
        self.assertEqual(self.on_disk(), list(range(1, 21)))

    def test_the_end(self) -> None:
        saved = self.start()
        self.hear(saved, 1)
        saved.close(0.5, T0 + 0.5)
        self.assertEqual(self.on_disk(), [1])
        self.assertIsNone(saved.database._db)
        for error in (sqlite3.OperationalError("full"), MemoryError(), OverflowError()):
            saved = self.start()
            self.hear(saved, 2)
            with self.failing(saved, error), self.assertLogs("masterserver", "ERROR") as logged:
                saved.close(1.0, T0 + 1)
            self.assertIn(ms.error_text(error), logged.output[0])
            self.assertIsNone(saved.database._db)

    @timing
    def test_ten_thousand_servers_hold_nobody_up(self) -> None:
        saved = self.start(limits__servers="20000")
        for number in range(10_000):
            self.hear(saved, 1 + number, address="203.0.%d.%d" % (number >> 6, 1 + number % 64),
                      name="Server %d" % number, description="a text of a server's own")
        start = time.process_time()
        rows, gone = saved.batch(T0)
        took = time.process_time() - start
        self.assertEqual((len(rows), gone), (10_000, set()))
        self.assertLess(took, 0.5 if SLOW else 0.06)
        saved.write(rows, gone, T0, [])
        saved.database.close()
        start = time.process_time()
        saved = self.start(limits__servers="20000")
        took = time.process_time() - start
        self.assertEqual(saved.registry.total, 10_000)
        self.assertLess(took, 3.0 if SLOW else 0.3)


class DiskOfTheProgramTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "master.db")

    def listed(self) -> int:
        """How many the file has, read as another program would."""
        if not os.path.exists(self.path):
            return 0
        with contextlib.closing(sqlite3.connect(self.path)) as db:
            try:
                return int(db.execute("SELECT count(*) FROM listed").fetchone()[0])
            except sqlite3.Error:
                return 0

    def test_killed_and_started_again(self) -> None:
        server = RunningServer(start=HURRIED, server__database=self.path)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as game:
            game.settimeout(5)
            game.connect(("127.0.0.1", server.port("iceball")))
            game.send(CAPTURED)
            game.send(b"HSHK" + game.recv(4096)[4:])
        eventually(lambda: self.listed() == 1, 10)
        server.process.kill()
        server.stop()
        with RunningServer(server__database=self.path) as server:
            listed = fetch(server.port("http"), "/master.json")[2]
        self.assertIn(b"Iceball Server", listed)

    def test_a_stop_does_not_wait_for_a_disk_that_hangs(self) -> None:
        go_on = threading.Event()
        server = master(http__ports="0", server__database=self.path)
        self.addCleanup(server.database.close)
        self.addCleanup(server.disk.stop, 20.0)
        self.addCleanup(go_on.set)
        server.start()
        server.disk.submit(lambda: go_on.wait(20), lambda result, now: None)
        with mock.patch.object(ms, "STOP_DISK_S", 0.1), \
                mock.patch.object(server.saved, "close") as close, \
                self.assertLogs("masterserver", "ERROR") as logged:
            server.stop()
        self.assertIn("the disk takes too long", logged.output[0])
        close.assert_not_called()               # whoever touched the file would wait, too

    def test_where_none_can_be_made(self) -> None:
        """Unasked for, it is a warning; asked for, the program does not start."""
        missing = os.path.join(os.path.dirname(self.path), "missing", "master.db")
        with self.assertRaisesRegex(ms.StartError, "cannot be created.*.server. database"):
            master(http__ports="0", server__database=missing).start()
        server = master(http__ports="0", server__database=missing)
        server.settings.given.discard("server.database")
        with self.assertLogs("masterserver", "WARNING") as logged, server:
            health = json.loads(fetch(port_of(server, "http"), "/healthz")[2].decode())
            metrics = fetch(port_of(server, "http"), "/metrics")[2]
        self.assertEqual((health["status"], list(health["trouble"])), ("trouble", ["database"]))
        self.assertIn(b'masterserver_trouble{where="database"} 1', metrics)
        self.assertIn("will not survive a restart", logged.output[0])


# --- announce ------------------------------------------------------------------------------------

ICEBALL_CAPTURE = hexa("31434542 0200 25808000 e954 0000 4000"
                       "4963656261 6c6c20536572766572" + "00" * 16 + "63746600000000000000"
                       "636c6173736963283531322c35313229" + "00" * 14)
SUBSPACE_CAPTURE = (hexa("00000000 a861 0600 0100 86000000")
                    + b"Loopback Test Zone".ljust(32, b"\0") + b"cane".ljust(48, b"\0")
                    + b"a real asss on loopback\0")


def announced(game: str, port: int, **fields: Any) -> ms.Server:
    return ms.Server(game, "", port, "", 0.0, math.inf, **fields)


def times_sent(announcer: ms.Announcer, begin: float, end: float) -> List[float]:
    """When it sends something; ten times a second it is asked."""
    times = [tenth / 10 for tenth in range(int(begin * 10), int(end * 10))]
    return [now for now in times if announcer.tick(now)]


@mock.patch.object(ms, "log", mock.Mock())
class IceballAnnouncing(unittest.TestCase):

    def setUp(self) -> None:
        self.server = announced("iceball", 21737, name="Iceball Server", mode="ctf",
                                map="classic(512,512)", max_players=64)
        self.announcer = ms.IceballAnnouncer(self.server)

    def test_the_announcement(self) -> None:
        self.assertEqual(self.announcer.tick(0.0), ICEBALL_CAPTURE)
        self.server.name, self.server.mode = "a" + "ä" * 20, "a" + "ä" * 10
        self.server.version = "0.2.1"
        packet = self.announcer.tick(1.0)
        self.assertEqual((len(packet), packet[6:10], packet[16:46], packet[46:56]),
                         (86, hexa("00808000"), b"a" + b"\xc3\xa4" * 14 + b"\0",
                          b"a" + b"\xc3\xa4" * 4 + b"\0"))

    def test_bursts_of_five_every_forty_seconds(self) -> None:
        self.assertEqual(times_sent(self.announcer, 0, 100),
                         [0, 1, 2, 3, 4, 40, 41, 42, 43, 44, 80, 81, 82, 83, 84])
        # After the machine has slept none is made up for
        self.assertLessEqual(len(times_sent(self.announcer, 1000, 1003)), 4)

    def test_every_cookie_comes_back(self) -> None:
        for cookie in (b"", hexa("8a850c03"), b"\0" * 4000):
            self.assertEqual(self.announcer.receive(b"MSOK" + cookie, 1.0), b"HSHK" + cookie)
        self.assertEqual((self.announcer.state, self.announcer.taken), ("announced", True))

    def test_silence_for_thirty_minutes_after_a_refusal(self) -> None:
        for packet, words in ((b"BADF", "cannot read"), (b"BADV", "lists Iceball"),
                              (hexa("42414456 0200 25808000"), "lists Iceball 0.2.1-37 and not")):
            announcer = ms.IceballAnnouncer(self.server)
            announcer.tick(0.0)
            self.assertEqual(announcer.receive(b"MSNO", 0.4) + announcer.receive(packet, 0.5), b"")
            self.assertTrue(announcer.refused)
            self.assertIn(words, announcer.state)
            self.assertEqual(times_sent(announcer, 0.5, 1807), [1800.5 + n for n in range(5)])

    def test_a_master_that_does_not_answer_is_mentioned(self) -> None:
        for answered, state in (((), "no answer"), ((2,), "announced"), ((2, 41), "announced"),
                                ((2, None), "no answer")):
            announcer = ms.IceballAnnouncer(self.server)
            for second in range(46 if len(answered) == 2 else 6):
                announcer.tick(float(second))
                if second in answered:
                    announcer.receive(b"MSOK", second + 0.5)
            self.assertIn(state, announcer.state, answered)


class SubSpaceAnnouncing(unittest.TestCase):

    def setUp(self) -> None:
        self.server = announced("subspace", 25000, name="Loopback Test Zone",
                                description="a real asss on loopback", players=6)
        self.announcer = ms.SubSpaceAnnouncer(self.server)

    def test_the_captured_announcement_every_minute(self) -> None:
        self.assertEqual(self.announcer.tick(0.0), SUBSPACE_CAPTURE)
        self.assertEqual(times_sent(self.announcer, 0, 150), [60, 120])
        self.assertEqual(len(times_sent(self.announcer, 9000, 9059)), 2)        # after a sleep
        self.assertIn("they ping UDP port 25001", self.announcer.state)

    def test_longest_texts(self) -> None:
        self.server.name, self.server.description = "é" * 40, "x" * 400
        packet = self.announcer.tick(0.0)
        self.assertEqual((len(packet), packet[14:46], packet[94:]),
                         (480, b"\xe9" * 31 + b"\0", b"x" * 385 + b"\0"))
        self.server.name = "\u4e2d" * 40
        self.assertEqual(self.announcer.tick(60.0)[14:46], "\u4e2d".encode() * 10 + b"\0\0")

    def test_pings_are_answered_as_the_document_says(self) -> None:
        self.server.playing = 4
        for question, answer in (
                ("11223344", "06000000 11223344"), ("1122334400000000", "1122334400000000"),
                ("1122334401000000", "1122334401000000 06000000 04000000"),
                ("1122334402000000", "1122334402000000 3000 0600 0400 00"),
                ("11223344fcffffff", "1122334400000000")):
            self.assertEqual(self.announcer.answer(hexa(question)), hexa(answer), question)
        for size in (0, 1, 3, 5, 7, 9, 100):
            self.assertRaises(ms.Malformed, self.announcer.answer, bytes(size))
        self.server.playing, self.server.map = None, "pb"
        self.assertEqual(self.announcer.answer(hexa("1122334403000000"))[8:],
                         hexa("06000000 06000000 706200 0600 0600 00"))


@mock.patch.object(ms, "log", mock.Mock())
class AioAnnouncing(unittest.TestCase):

    def court(self, framed: bool = False, **fields: Any) -> ms.Announcer:
        kind = ms.FramedAioAnnouncer if framed else ms.AioAnnouncer
        return kind(announced("aio", 27010, **fields))

    def say(self, announcer: ms.Announcer, data: bytes, now: float) -> None:
        """The master, byte by byte."""
        for byte in data:
            self.assertEqual(announcer.receive(bytes([byte]), now), b"")

    def test_what_is_published(self) -> None:
        for framed, fields, packet in (
                (False, {"name": "best AIO server", "description": "no #1 content"},
                 b"13#best AIO server#no <num>1 content#27010#%\n"),
                (False, {"name": "court", "max_players": 16}, b"13#court [0/16]##27010#%\n"),
                (False, {"name": "%50%", "description": "#"}, b"13#50%#<num>#27010#%\n"),
                (True, {"name": "court"}, hexa("03000000 03 8269"))):
            self.assertEqual(self.court(framed, **fields).opened(0.0), packet)

    def test_keepalives(self) -> None:
        """The server is published with each, as a text master has no word for a refusal, which
        may end."""
        for framed, confirmation, alive, answer in (
                (False, b"\1\0\0\0\0%SUCCESS#13#%", b"KEEPALIVE#%\n", b"%SUCCESS#KEEPALIVE#%"),
                (True, hexa("01000000 00 02000000 05 03"), hexa("01000000 04"),
                 hexa("02000000 05 04"))):
            announcer = self.court(framed, name="court")
            published = announcer.opened(0.0)
            self.say(announcer, confirmation, 0.5)
            self.assertEqual((announcer.state, announcer.taken), ("announced", True))
            for second in range(1, 100):
                due = second in (30, 60, 90)
                self.assertEqual(announcer.tick(float(second)), (alive + published) * due, second)
                self.say(announcer, answer, second + 0.1)
                state = "the master does not confirm it" if second >= 60 else "announced"
                self.assertIn(state, announcer.state, second)
            self.say(announcer, confirmation, 100.0)
            self.assertEqual(announcer.state, "announced")

    def test_players_stand_in_the_name_and_are_published_at_once(self) -> None:
        announcer = self.court(name="court", max_players=16)
        announcer.opened(0.0)
        announcer.server.players, announcer.stale = 5, True
        self.assertEqual([announcer.tick(1.0), announcer.tick(2.0), announcer.tick(30.0)],
                         [b"13#court [5/16]##27010#%\n", b"", b""])

    def test_a_framed_refusal(self) -> None:
        for payload, words in ((b"\6\3\6\0banned", "banned"), (b"\6\3\0\0", "no reason given")):
            packed = zlib.compress(payload)
            for data in (ms.aio_frame(payload), bytes([len(packed), 0, 0, 1]) + packed):
                announcer = self.court(framed=True)
                announcer.opened(0.0)
                self.say(announcer, data, 60.0)
                self.assertEqual((announcer.state, announcer.refused, announcer.done,
                                  announcer.due), ("refused: " + words, True, True, 1860.0))
        # Of the former connection nothing is left
        announcer.receive(b"\1", 70.0)
        announcer.opened(71.0)
        self.say(announcer, hexa("02000000 05 03"), 71.0)
        self.assertEqual(announcer.state, "announced")
        with self.assertRaises(ms.Malformed):
            announcer.receive(b"HTTP/1.1 400 Bad Request\r\n", 72.0)

    def test_a_text_without_end_takes_no_memory(self) -> None:
        announcer = self.court()
        for _ in range(20):
            announcer.receive(bytes(1000), 0.0)
        self.assertLessEqual(len(announcer.buffer), ms.AIO_MASTER_BYTES + 1000)

    def test_silence_ends_the_connection(self) -> None:
        announcer = self.court(framed=True)
        announcer.opened(0.0)
        announcer.receive(b"", 1.0)
        for now, done in ((100.0, False), (101.0, True)):
            announcer.tick(now)
            self.assertEqual(announcer.done, done)
        self.assertEqual(announcer.state, "no answer for 100 s")
        self.assertGreater(announcer.due, 101.5)

    def test_pauses_grow_until_the_master_takes_the_server(self) -> None:
        announcer = self.court()
        for most in (1, 2, 4, 8, 16, 32, 60, 60, 60):
            announcer.failed("no connection", 100.0)
            self.assertTrue(0.8 * most <= announcer.due - 100.0 <= most, most)
        announcer.accepted("announced")
        announcer.failed("no connection", 100.0)
        self.assertLessEqual(announcer.due, 101.0)

    def test_queries_on_the_game_port(self) -> None:
        announcer = self.court(True, name="né", description="d", players=3, max_players=16,
                               version="7")
        for version, number in (("7", "0700"), ("\u00b2", "0000"), ("70000", "ffff")):
            announcer.server.version = version
            self.assertEqual(zlib.decompress(announcer.answer(b"\0")), hexa(
                "00 0300 6ec3a9 0100 64 03000000 10000000" + number))
        for query in (b"", b"\1", b"\0\0"):
            self.assertRaises(ms.Malformed, announcer.answer, query)


@mock.patch.object(ms, "log", mock.Mock())
class HttpAnnouncing(unittest.TestCase):

    def setUp(self) -> None:
        self.announcer = ms.HttpAnnouncer(announced("mygame", 4000, name="Ünter", players=1))

    def answered(self, status: int, body: Any, now: float = 0.0) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.announcer.answered(status, data, now)

    def test_what_is_posted(self) -> None:
        told = self.announcer.fields()
        self.assertEqual({name: value for name, value in told.items() if value},
                         {"game": "mygame", "port": 4000, "name": "Ünter", "players": 1})
        self.announcer.leaving = True
        self.assertEqual(self.announcer.fields(),
                         {"game": "mygame", "port": 4000, "action": "stop"})
        self.answered(200, {"listed": False, "reason": "stopped"})
        self.assertEqual(self.announcer.state, "")

    def test_again_after_half_its_time(self) -> None:
        for ttl, due in ((b"120", 61.0), (b"NaN", 6.0), (b"-1", 6.0), (b"1e999", 1801.0),
                         (b"1" * 400, 1801.0), (b"null", 6.0), (b'"soon"', 6.0)):
            self.answered(200, b'{"listed":true,"ttl":' + ttl + b"}", 1.0)
            self.assertEqual((self.announcer.state, self.announcer.due), ("listed", due), ttl)

    def test_refusals_and_failures(self) -> None:
        for status, body, refused, words in (
                (403, {"listed": False, "reason": "banned:\nfake"}, True, "refused: banned: fake"),
                (404, b"<html>", True, "refused: HTTP status 404"),
                (408, b"", False, "HTTP status 408"), (429, b"wait", False, "HTTP status 429"),
                (502, b"<html>", False, "not listed yet: HTTP status 502"),
                (200, {"listed": False, "reason": "waiting"}, False, "not listed yet: waiting"),
                (200, {"listed": 1}, False, "not listed"), (200, [1], False, "not listed"),
                (200, {"reason": [[1]]}, False, "[[1]]"), (200, b"\xff", False, "not listed"),
                (500, {"listed": True}, False, "not listed")):
            self.setUp()
            self.answered(status, body)
            self.assertEqual(self.announcer.refused, refused, body)
            self.assertIn(words, self.announcer.state)
            self.assertEqual(self.announcer.due > 1.0, refused, body)
            self.assertGreater(self.announcer.due, 0.5, body)

    def test_who_was_listed_before_a_refusal_asks_again_soon(self) -> None:
        """A proxy in front may have no master for a moment."""
        for listed, pause in ((False, ms.REFUSED_S), (True, ms.RETRY_MAX_S)):
            self.answered(200, {"listed": listed})
            self.answered(404, b"", 1.0)
            self.assertEqual(self.announcer.due, 1.0 + pause)

    def test_hyperbol_answers_by_the_offsets_of_the_document(self) -> None:
        announcer = ms.HyperbolAnnouncer(announced(
            "hyperbol", 20000, name="n" * 40, mode="m" * 40, players=300, max_players=16,
            map="Arena", version="1.8a"))
        answer = announcer.answer(hexa("02 01020304"))
        self.assertEqual(len(answer), 229)
        for offset, value in ((0, hexa("1b 01020304")), (5, b"n" * 31 + b"\0"),
                              (37, b"m" * 31 + b"\0"), (69, b"\xff\x10\0"), (72, b"Arena\0"),
                              (157, hexa("204e0000")), (169, b"1.8a\0"), (222, bytes(7))):
            self.assertEqual(answer[offset:offset + len(value)], value, offset)
        for question in (b"", b"\2", hexa("03 01020304"), hexa("02 0102030405")):
            self.assertRaises(ms.Malformed, announcer.answer, question)


@mock.patch.object(ms, "log", mock.Mock())
class AnnouncersHoldAgainstGarbage(unittest.TestCase):

    def test_only_malformed_escapes(self) -> None:
        chance = random.Random(9)
        packed = zlib.compress(b"\6\3\6\0banned")
        seeds = [b"MSOK1234", hexa("42414456 0200 25808000"), b"%SUCCESS#13#%",
                 hexa("08000000 06 03 0400") + b"gone", bytes([len(packed), 0, 0, 1]) + packed,
                 hexa("02 01020304"), b"\0", b'{"listed": true, "ttl": 120}']
        kinds = [*ms.ANNOUNCERS.values(), ms.HttpAnnouncer]
        for turn in range(6000):
            data = bytearray(chance.choice(seeds))
            for _ in range(chance.randrange(4)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            announcer = chance.choice(kinds)(announced("x", 1000))
            with contextlib.suppress(ms.Malformed):
                if isinstance(announcer, ms.HttpAnnouncer):
                    announcer.answered(200 + turn % 300, bytes(data), 0.0)
                announcer.receive(bytes(data), 0.0)
            if announcer.query_offset is not None:
                with contextlib.suppress(ms.Malformed):
                    announcer.answer(bytes(data))


class Announcing(unittest.TestCase):
    """With real sockets, in this process and as a command."""

    def setUp(self) -> None:
        hurry = mock.patch.multiple(ms, STEP_S=0.02, GOODBYE_S=0.3)
        hurry.start()
        self.addCleanup(hurry.stop)

    def thread(self, game: str, **fields: Any) -> ms.AnnouncerThread:
        link, = ms.Announcement(game, 27010, "master.example", **fields).links
        return link

    def listening(self, kind: int) -> Tuple[socket.socket, str]:
        """A master's socket, and where it is."""
        sock = socket.socket(socket.AF_INET, kind)
        self.addCleanup(sock.close)
        sock.bind(("127.0.0.1", 0))
        sock.settimeout(5)
        if kind == socket.SOCK_STREAM:
            sock.listen(5)
        return sock, "127.0.0.1:%d" % sock.getsockname()[1]

    def accept(self, sock: socket.socket) -> socket.socket:
        connection, _ = sock.accept()
        self.addCleanup(connection.close)
        connection.settimeout(5)
        return connection

    @mock.patch.multiple(ms, ICEBALL_GAP_S=0.05, ICEBALL_PERIOD_S=0.4)
    def test_as_a_class(self) -> None:
        with self.assertLogs("masterserver") as logs, tempfile.TemporaryDirectory() as folder, \
                master(iceball__port="0", server__public_address="203.0.113.5") as server:
            path = os.path.join(folder, "players")
            with open(path, "w", encoding="utf-8") as file:
                file.write("1/8\n2/8 pit\n\n")
            place = "127.0.0.1:%d" % port_of(server, "iceball")
            announcement = ms.Announcement("iceball", 21737, [place, "::1"], players_from=path,
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
            self.assertRaises(ms.StartError, announcement.start)
        self.assertFalse([thread for thread in announcement.links if thread.is_alive()])
        self.assertIn("no connection: it has no IPv4 address", "".join(logs.output))
        self.assertEqual(len([line for line in logs.output if line.endswith(": announced")]), 1)

    @mock.patch.object(ms, "TICK_S", 0.1)
    def test_each_game_is_listed_by_this_program(self) -> None:
        fields: Dict[str, Any] = {"name": "Name", "players": 3, "max_players": 9}
        with mock.patch.object(ms, "log"), contextlib.ExitStack() as stack, \
                master(iceball__port="0", subspace__port="0", aio__port="0", http__ports="0",
                       hyperbol__port="0", games__mygame="Mine") as server:
            ports = {listener.protocol: listener.port for listener in server.listeners}
            rows = []
            for game, protocol, offset, dialect in (
                    ("iceball", "iceball", 0, ""), ("subspace", "subspace", -1, ""),
                    ("hyperbol", "http", 0, ""), ("mygame", "http", 0, ""),
                    ("aio", "aio", 0, "text"), ("aio", "aio", 0, "framed")):
                place = "127.0.0.1:%d" % (ports[protocol] + offset)
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
                    free.bind(("0.0.0.0", 0))
                    port = free.getsockname()[1]
                stack.enter_context(ms.Announcement(game, port, place, dialect, **fields))
                rows.append((game, port, "Name", 3))
            eventually(lambda: sorted(
                (found.game, found.port, found.name, found.players)
                for found in server.registry.servers()) == sorted(rows), 10)
            stack.close()
            # Who has a way to sign off has done so
            eventually(lambda: {found.game for found in server.registry.servers()}
                       == {"iceball", "subspace"})

    def test_wrong_arguments(self) -> None:
        usual: Dict[str, Any] = {"game": "iceball", "port": 1, "masters": "m"}
        for wrong in (
                {"port": 0}, {"port": 65536}, {"port": "1"}, {"port": 1.0}, {"masters": []},
                {"masters": "m:x"}, {"masters": ["http://m:27790/"]}, {"game": "Ice Ball"},
                {"game": "subspace", "port": 65535}, {"game": "subspace", "masters": "m:65535"},
                {"players": "5"}, {"players": -1}, {"players": 65536}, {"players": True},
                {"player": 7}, {"name": 5}, {"version": "new"}, {"dialect": "text"},
                {"game": "aio", "dialect": "x"}, {"players_from": HERE}):
            with self.assertRaises(ValueError, msg=wrong):
                ms.Announcement(**{**usual, **wrong})

    def test_which_announcer_master_and_name(self) -> None:
        for game, fields, kind, port, name in (
                ("iceball", {}, ms.IceballAnnouncer, 27790, "Iceball server"),
                ("subspace", {}, ms.SubSpaceAnnouncer, 4991, "SubSpace server"),
                ("hyperbol", {}, ms.HyperbolAnnouncer, 27790, "Hyperbol server"),
                ("mygame", {}, ms.HttpAnnouncer, 27790, "mygame server"),
                ("aio", {}, ms.FramedAioAnnouncer, 27011, "AIO server"),
                ("aio", {"name": "Court"}, ms.AioAnnouncer, 27011, "Court"),
                ("aio", {"dialect": "text"}, ms.AioAnnouncer, 27011, "AIO server"),
                ("aio", {"name": "Court", "dialect": "framed"}, ms.FramedAioAnnouncer, 27011,
                 "Court")):
            link = self.thread(game, **fields)
            self.assertEqual(
                (type(link.announcer), link.host, link.port, link.announcer.server.name),
                (kind, "master.example", port, name))
        link, = ms.Announcement("subspace", 1, "[::1]:70").links
        self.assertEqual((link.host, link.port, link.announcer.master), ("::1", 71, "[::1]:71"))

    def test_an_update_that_changes_nothing_is_none(self) -> None:
        announcement = ms.Announcement("aio", 27010, "master.example", name="Court")
        announcer = announcement.links[0].announcer
        for fields, stale in (({"players": 0}, False), ({"players": 5}, True),
                              ({"players": 5, "name": "Court "}, False), ({"map": "x"}, True)):
            announcer.stale = False
            announcement.update(**fields)
            self.assertEqual(announcer.stale, stale, fields)
        self.assertRaises(ValueError, announcement.update, map="y", players=-1)
        self.assertEqual(announcer.server.map, "x")

    def test_players_as_they_are_written(self) -> None:
        for line, fields in (
                ("5", {"players": 5}), (" 5 / 16\r", {"players": 5, "max_players": 16}),
                ("5/16 my map", {"players": 5, "max_players": 16, "map": "my map"}),
                ("0 pit", {"players": 0, "map": "pit"})):
            self.assertEqual(ms.read_players(line), fields)
        for line in ("", "x", "-1", "5/", "5/x", "123456", "5,16"):
            self.assertRaises(ValueError, ms.read_players, line)

    def test_a_file_of_players(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "players")
            announcement = ms.Announcement("iceball", 1, "master.example", players_from=path)
            for data, players in ((b"1/16\n" * 4000 + b"7/16 pit\n\n", 7), (b"", 7), (b"\n", 7),
                                  (b"\xef\xbb\xbf8", 8), (b"9/16 H\xf6hle\r\n", 9)):
                with open(path, "wb") as file:
                    file.write(data)
                announcement.read_file()
                self.assertEqual(announcement.server.players, players)

    def test_players_that_cannot_be_read_are_mentioned_once(self) -> None:
        announcement = ms.Announcement("iceball", 1, "master.example", players_from="/no/such")
        with self.assertLogs("masterserver", "WARNING") as logs:
            for line, count in (("error 1", 1), ("error 2", 1), ("", 1), ("99999", 1), ("5", 1),
                                ("error 3", 2), ("5", 2)):
                announcement.read_line(line)
                self.assertEqual(len(logs.output), count, line)
            for _ in range(2):
                announcement.read_file()
        self.assertEqual((len(logs.output), announcement.server.players), (3, 5))

    def test_a_name_that_cannot_be_looked_up(self) -> None:
        """While no name server can be asked it is tried again: the network may come up later."""
        link = self.thread("iceball")
        for error, unknown in (
                (socket.gaierror(socket.EAI_AGAIN, "Temporary failure"), False),
                (socket.gaierror(socket.EAI_NONAME, "no"), True),
                (OSError(errno.EMFILE, "Too many open files"), False),
                (UnicodeError("label too long"), True)):
            with mock.patch.object(ms, "addresses", side_effect=error), \
                    self.assertRaisesRegex(OSError, "the name cannot be resolved"):
                link.connect()
            self.assertEqual((link.unknown, link.hopeless), (unknown, unknown))
        with mock.patch.object(ms, "addresses", return_value=["127.0.0.1"]):
            link.connect().close()
        self.assertFalse(link.unknown)

    def test_a_refusal_is_final_only_at_the_beginning(self) -> None:
        """A proxy may answer in the master's place for a moment, and anybody may forge a BADV."""
        link = self.thread("iceball")
        with mock.patch.object(ms, "log"):
            for data, hopeless in ((b"BADF", True), (b"MSOKabcd", False), (b"BADF", False)):
                link.announcer.receive(data, 0.0)
                self.assertEqual(link.hopeless, hopeless)

    def test_which_address_of_a_name(self) -> None:
        """The first that can be reached; by IPv6 a game whose list has IPv4 alone is refused."""
        found = ["203.0.113.1", "2001:db8::1", "203.0.113.2", "203.0.113.3"]
        for game, tried in (("hyperbol", [found[0], found[2]]), ("iceball", [found[0], found[2]]),
                            ("aio", found[:3]), ("mygame", found[:3])):
            way = mock.Mock(side_effect=[OSError(9, "Refused")] * (len(tried) - 1) + ["way"])
            with mock.patch.multiple(ms, addresses=lambda host: found, connected_socket=way):
                self.assertEqual(self.thread(game).connect(), "way")
                self.assertEqual([call[0][0] for call in way.call_args_list], tried, game)
                way.side_effect = OSError(9, "Refused")
                self.assertRaisesRegex(OSError, "connection: Refused", self.thread(game).connect)

    def test_a_master_that_is_silent_keeps_no_other_waiting(self) -> None:
        sock, place = self.listening(socket.SOCK_DGRAM)
        told = threading.Event()

        def addresses(host: str) -> List[str]:
            if host == "no.example":
                raise OSError("no such name")
            if host == "silent.example":
                told.wait(20)
            return ["127.0.0.1"]
        with mock.patch.object(ms, "addresses", addresses), mock.patch.object(ms, "log"), \
                ms.Announcement("iceball", 21737, ["silent.example", "no.example", place],
                                give_up=True) as announcement:
            data, peer = sock.recvfrom(1000)
            self.assertEqual(data[:4], b"1CEB")
            stranger, _ = self.listening(socket.SOCK_DGRAM)
            stranger.sendto(b"MSOKfalse", peer)
            sock.sendto(b"MSOKtrue", peer)
            answers = iter(lambda: sock.recv(1000), None)
            answer = next(data for data in answers if data[:4] != b"1CEB")
            self.assertEqual(answer, b"HSHKtrue")
            eventually(lambda: announcement.links[1].hopeless)
            time.sleep(5 * ms.STEP_S)
            self.assertEqual(announcement.failure, "")
            began = time.monotonic()
        self.assertLess(time.monotonic() - began, ms.GOODBYE_S + 1.0)
        told.set()

    def test_datagrams_to_a_closed_port_go_on(self) -> None:
        sock, place = self.listening(socket.SOCK_DGRAM)
        port = sock.getsockname()[1]
        sock.close()
        with mock.patch.object(ms, "ICEBALL_GAP_S", 0.05), mock.patch.object(ms, "log"), \
                ms.Announcement("iceball", 21737, place) as announcement:
            eventually(lambda: announcement.links[0].announcer.sent >= 2)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as again:
                again.bind(("127.0.0.1", port))
                again.settimeout(5)
                self.assertEqual(len(again.recv(1000)), 86)
            self.assertEqual(announcement.links[0].announcer.failures, 0)

    def test_a_connection_that_ends_is_made_again(self) -> None:
        sock, place = self.listening(socket.SOCK_STREAM)
        with mock.patch.object(ms, "RETRY_S", 0.05), self.assertLogs("masterserver") as logs:
            with ms.Announcement("aio", 27010, place, dialect="framed"):
                for words in (b"", b"HTTP/1.1 400 Bad Request\r\n"):
                    connection = self.accept(sock)
                    self.assertEqual(connection.recv(100), hexa("03000000 03 8269"))
                    connection.sendall(words or hexa("02000000 05 03"))
                    if not words:
                        eventually(lambda: "announced" in logs.output[-1])
                        connection.close()
                connection = self.accept(sock)
                connection.recv(100)
            self.assertEqual(connection.recv(100), b"")         # it signs off
        self.assertRegex("".join(logs.output), "(?s)announced.*the master has closed the connection"
                                               ".*length: a frame of")

    def test_masters_are_asked_again_where_they_are(self) -> None:
        """Datagrams tell nobody that the master has moved."""
        sock, place = self.listening(socket.SOCK_DGRAM)
        with mock.patch.object(ms, "RESOLVE_S", 0.1), mock.patch.object(ms, "log"), \
                mock.patch.object(ms, "SUBSPACE_PERIOD_S", 0.1), \
                mock.patch.object(ms, "addresses", return_value=["127.0.0.1"]) as addresses, \
                ms.Announcement("subspace", 25000, "127.0.0.1:%d" % (sock.getsockname()[1] - 1)):
            eventually(lambda: addresses.call_count >= 3)
            self.assertEqual(len(sock.recv(1000)), 95)

    def test_over_http(self) -> None:
        """An announcement, an answer that nobody can read, one that is fine, and the farewell."""
        sock, place = self.listening(socket.SOCK_STREAM)
        bodies = []
        stopping = None
        with mock.patch.object(ms, "RETRY_S", 0.01), self.assertLogs("masterserver") as logs:
            announcement = ms.Announcement("mygame", 4000, place, name="Ü")
            announcement.start()
            for answer in (b"SSH-2.0-\x1b[31mred\r\n", b"",
                           b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
                           b"19\r\n{\"listed\":true,\"ttl\":120}\r\n0\r\n\r\n", b""):
                connection = self.accept(sock)
                head, _, body = connection.recv(4096).partition(b"\r\n\r\n")
                while not body.endswith(b"}"):
                    body += connection.recv(4096)
                self.assertIn(b"POST /announce HTTP/1.1\r\nHost: %s\r\n" % place.encode(), head)
                self.assertIn(b"\r\nContent-Type: application/json", head)
                connection.sendall(answer)
                connection.close()
                bodies.append(json.loads(body))
                if len(bodies) == 3:
                    eventually(lambda: announcement.links[0].announcer.state == "listed")
                    stopping = threading.Thread(target=announcement.stop)
                    stopping.start()
            stopping.join(5)
        self.assertEqual((bodies[0]["name"], bodies[2]), ("Ü", bodies[0]))
        self.assertEqual(bodies[3], {"game": "mygame", "port": 4000, "action": "stop"})
        self.assertRegex(logs.output[0], "no answer that can be read; is that the port of the "
                                         "master's page[?] [ -~]{3,512}$")

    def test_an_http_master_that_hangs(self) -> None:
        sock, place = self.listening(socket.SOCK_STREAM)
        with mock.patch.object(ms, "RESPONSE_S", 0.1), self.assertLogs("masterserver") as logs, \
                ms.Announcement("mygame", 4000, place):
            self.accept(sock)
            eventually(lambda: logs.output)
            self.assertIn("no answer that can be read", logs.output[0])

    def test_queries_are_answered_where_the_port_is_free(self) -> None:
        game, place = self.listening(socket.SOCK_DGRAM)
        port = game.getsockname()[1]
        query = hexa("02 01020304")
        with self.assertLogs("masterserver", "INFO") as logs:
            with ms.Announcement("hyperbol", port, "127.0.0.1:1"):
                eventually(lambda: "left to the game server" in "".join(logs.output))
            game.close()
            with ms.Announcement("hyperbol", port, "127.0.0.1:1"), \
                    socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
                eventually(lambda: "are answered here" in "".join(logs.output))
                asking.settimeout(5)
                asking.connect(("127.0.0.1", port))
                asking.send(b"?")
                asking.send(query)
                self.assertEqual(asking.recv(1000)[:5], b"\x1b" + query[1:])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as again:
            again.bind(("0.0.0.0", port))               # it is free again

    def test_how_much_is_answered(self) -> None:
        """Only what the master asks has a limit of its own: other addresses may be made up."""
        with mock.patch.object(ms, "SURPLUS_BYTES", (100, 10000)):
            announcement = ms.Announcement("aio", 27010, "m", dialect="framed", description="x")
        announcement.links[0].address = "192.0.2.1"
        size = len(announcement.answer(b"\0", "192.0.2.9", 0.0)) - 1

        def answered(source: str) -> int:
            with contextlib.suppress(ms.Malformed):
                for number in range(10 ** 4):
                    announcement.answer(b"\0", source, 0.0)
            return number
        at_once = 10000 // size
        self.assertEqual([answered(source) for source in ("192.0.2.8", "192.0.2.7", "192.0.2.1")],
                         [at_once - 1, 0, at_once])
        zone = ms.Announcement("subspace", 25000, "m")
        self.assertEqual(len(zone.answer(bytes(4), "192.0.2.8", 0.0)), 8)
        # Two that answer this would go on for ever after one forged query
        self.assertRaises(ms.Malformed, zone.answer, bytes(8), "192.0.2.8", 0.0)

    def command(self, *arguments: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([*START, "announce", *arguments], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.addCleanup(process.__exit__, None, None, None)         # closes its pipes and waits
        self.addCleanup(process.kill)
        return process

    def test_command_with_players_from_standard_input(self) -> None:
        with master(iceball__port="0") as server:
            process = self.command(
                "--game", "iceball", "--port", "21737", "--name", "Küche", "--players-from", "-",
                "127.0.0.1:%d" % port_of(server, "iceball"))
            process.stdin.write("nonsense\n\n5/16 Höhle\n".encode())
            process.stdin.flush()
            try:
                eventually(lambda: [found for found in server.registry.servers() if (
                    found.name, found.players, found.map) == ("Küche", 5, "Höhle")], 20)
            finally:
                out, err = process.communicate(timeout=20)
        self.assertEqual((process.returncode, out), (0, b""), err)
        self.assertIn(b"nonsense", err)
        self.assertNotIn(b"Traceback", err)

    def test_command_when_no_master_is_left(self) -> None:
        sock, place = self.listening(socket.SOCK_DGRAM)
        sock.settimeout(20)
        process = self.command("--game", "iceball", "--port", "21737", place, "no..name")
        data, peer = sock.recvfrom(1000)
        sock.sendto(b"BADF", peer)
        out, err = process.communicate(timeout=20)
        self.assertEqual((process.returncode, out, len(data)), (1, b"", 86), err)
        self.assertRegex(err, b"no master accepts this server: %s: refused: the master cannot read "
                              b"the announcement; no..name:27790: the name cannot be resolved"
                              % place.encode())
        self.assertNotIn(b"Traceback", err)

    @unittest.skipIf(ms.WINDOWS, "Windows has no such signals for a child")
    def test_command_signs_off_on_a_signal(self) -> None:
        with master(http__ports="0", games__mygame="Mine") as server:
            process = self.command("--game", "mygame", "--port", "4000",
                                   "127.0.0.1:%d" % port_of(server, "http"))
            eventually(server.registry.servers, 20)
            process.terminate()
            out, err = process.communicate(timeout=20)
            self.assertEqual((process.returncode, out), (0, b""), err)
            self.assertEqual(server.registry.servers(), [])

    def test_command_with_wrong_arguments(self) -> None:
        status, out, err = command("announce", "--game", "iceball", "--port", "21737",
                                   "--version", "new", "127.0.0.1")
        self.assertEqual((status, out), (2, ""))
        self.assertIn("announce: expected a version such as", err)


# --- list and ping -------------------------------------------------------------------------------

class FakeServer(threading.Thread):
    """Answers datagrams on one loopback port with `answer(data)`, a list of datagrams, or serves
    one TCP connection after another with `serve(sock)`."""

    def __init__(self, answer: Optional[Callable[[bytes], List[bytes]]] = None,
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
        while not self.stopping:
            with contextlib.suppress(OSError):
                if self.answer:
                    data, peer = self.sock.recvfrom(4096)
                    for packet in self.answer(data):
                        self.sock.sendto(packet, peer)
                elif self.serve:
                    with self.sock.accept()[0] as sock:
                        sock.settimeout(5)
                        self.serve(sock)

    def __enter__(self) -> FakeServer:
        self.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.stopping = True
        self.join()
        self.sock.close()


def zone_answer(question: bytes) -> List[bytes]:
    """As the captured asss does, whatever the timestamp (PROTOCOLS, section 4)."""
    if len(question) == 4:
        return [hexa("06000000") + question]
    options, arenas = question[4], hexa("3000 0200 0100 706200 0100 0100 00")
    return [question[:4] + bytes([options, 0, 0, 0]) + hexa("06000000 04000000") * (options & 1)
            + arenas * (options >> 1)]


def scripted(greeting: bytes, question: bytes, answer: bytes) -> Callable[[socket.socket], None]:
    """A master that sends the answer to this question alone."""
    def serve(sock: socket.socket) -> None:
        sock.sendall(greeting)
        if question in sock.recv(1000):
            sock.sendall(answer)
    return serve


class ClientTools(unittest.TestCase):

    def setUp(self) -> None:
        hurry = mock.patch.multiple(ms, ASK_WAIT_S=0.05, AIO_TEXT_S=0.1)
        hurry.start()
        self.addCleanup(hurry.stop)

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

    def test_ping(self) -> None:
        hyperbol = (b"Arena of Doom".ljust(32, b"\0") + b"Deathmatch".ljust(32, b"\0")
                    + hexa("031000") + b"Station".ljust(64, b"\0") + b"192.0.2.1".ljust(21, b"\0")
                    + struct.pack("<II", 30001, 5) + bytes(4) + b"1.8a".ljust(16, b"\0")
                    + bytes(37) + hexa("01020007000000"))
        aio = zlib.compress(hexa("00 0400") + b"Cafe\2\0hi" + hexa("02000000 10000000 0300"))
        for game, offset, answer, facts in (
                ("subspace", 1, zone_answer,
                 {"players": 6, "playing": 4, "arenas": "(Public 0) 2/1, pb 1/1"}),
                ("subspace", 1, lambda data: zone_answer(data) if len(data) == 4 else [b"?"],
                 {"players": 6, "playing": None, "arenas": ""}),
                ("hyperbol", 0, lambda data: [b"none", b"\x1b" + data[1:] + hyperbol],
                 {"name": "Arena of Doom", "mode": "Deathmatch", "map": "Station", "players": 3,
                  "max_players": 16, "version": "1.8a", "flags": "0x00000005", "skill": "7",
                  "factions": "IMF 1, Syndicate 2, Republic 0"}),
                ("aio", 0, lambda data: [aio] * (data == b"\0"),
                 {"name": "Cafe", "description": "hi", "players": 2, "max_players": 16,
                  "version": 3})):
            with FakeServer(answer) as server:
                port = server.port - offset
                place = "127.0.0.1:%d" % port
                self.assertEqual(self.ask("ping", place, "--game", game),
                                 dict(facts, game=game, address="127.0.0.1", port=port))
                words = command("ping", place, "--game", game)[1]
            self.assertRegex(words, r"(?m)^players +%d$" % facts["players"])

    def test_a_lost_datagram_is_asked_again(self) -> None:
        questions: List[bytes] = []

        def third(data: bytes) -> List[bytes]:
            questions.append(data)
            return [zlib.compress(bytes(15))] * (len(questions) == 3)
        with FakeServer(third) as server:
            self.ask("ping", server.place, "--game", "aio")
        with FakeServer(lambda data: questions.append(data) or []) as server:   # type: ignore
            self.failing("ping", server.place, "--game", "aio")
        self.assertEqual(len(questions), 3 + ms.ASK_TRIES)

    def test_nothing_that_can_be_used(self) -> None:
        answer = zlib.compress(bytes(15))
        for bad in (answer[:-5], b"x", zlib.compress(bytes(300000)), zlib.compress(b"\0\xff\xff"),
                    zlib.compress(b"")):
            with FakeServer(lambda data: [bad]) as server:
                self.assertIn("what came is not an answer",
                              self.failing("ping", server.place, "--game", "aio"))
        with FakeServer(lambda data: []) as server:
            for words in (("ping", "127.0.0.1:%d" % (server.port - 1)), ("list", server.place)):
                self.assertIn("no answer from UDP port %d" % server.port,
                              self.failing(*words, "--game", "subspace"))
            self.failing("list", server.place, "--game", "iceball")         # refused
        self.assertIn("there is none",
                      self.failing("ping", "127.0.0.1:65535", "--game", "subspace"))

    def test_what_is_no_host_name(self) -> None:
        for host in ("a..b", "x" * 64 + ".example"):
            for words in ([("list", "--game", game, host) for game in ms.LISTS]
                          + [("ping", "--game", game, host + ":5") for game in ms.PINGS]):
                status, out, err = command(*words)
                self.assertEqual((status, out), (1, ""), words)
                self.assertIn(host, err)

    def test_lists_by_tcp(self) -> None:
        greeting = hexa("01000000 00")
        court = {"name": "A#1", "description": "50% off", "address": "203.0.113.9", "port": 27010}
        other = {"name": "B", "description": "", "address": "127.0.0.1", "port": 27011}
        text = b"A<num>1#50<percent> off#203.0.113.9#27010#"
        packed = zlib.compress(hexa("02 0200 0b") + b"203.0.113.9" + hexa("8269 0b")
                               + b"203.0.113.8" + hexa("8369"))
        iceball = {"address": "203.0.113.9", "port": 5, "name": "I\x1b[1m", "mode": "ctf",
                   "map": "m", "players_current": "3", "players_max": 9, "version": "0.2.1"}
        http_list = json.dumps({"servers": [iceball]}).encode()
        rows = [
            ("hyperbol", b"HBSL" + hexa("01020304 07000000"), hexa("01020304 ff000000"),
             hexa("cb007109 31750000 02 000000 c6336401 32750000 00 000000 cb00"),
             [{"address": "203.0.113.9", "port": 30001, "flavor": 2},
              {"address": "198.51.100.1", "port": 30002, "flavor": 0}]),
            ("aio", greeting, hexa("01000000 02"),
             len(packed).to_bytes(3, "little") + b"\1" + packed,
             [{"address": "203.0.113.9", "port": 27010},
              {"address": "203.0.113.8", "port": 27011}]),
            ("iceball", b"", b"GET /master.json HTTP/1.1\r\n",
             b"HTTP/1.1 200 OK\r\nLength: %d\r\n\r\n" % len(http_list) + http_list,
             [{"address": "203.0.113.9", "port": 5, "name": "I", "mode": "ctf", "map": "m",
               "players": 3, "max_players": 9, "version": "0.2.1"}])]
        for answer, servers in (
                (b"%12#" + text + b"B##127.0.0.1#27011#%", [court, other]),
                (b"%1#12#%%1#abc12#%%12#" + text + b"%", [court]),  # greeted as the twelfth
                (b"12#0#" + text + b"1#B##127.0.0.1#27011#%", [court, other]),     # the document
                (b"12#No servers currently online :pepe:#There are none#127.0.0.1#27010#%", []),
                (b"12#%", [])):
            rows.append(("aio", greeting, b"12#%\n", answer, servers))
        for game, hello, question, answer, servers in rows:
            with FakeServer(serve=scripted(hello, question, answer)) as server:
                found = self.ask("list", server.place, "--game", game)["servers"]
                self.assertEqual(found, servers, answer)
        with FakeServer(serve=scripted(greeting, b"12#%\n", b"12#%")) as server:
            self.assertEqual(command("list", server.place, "--game", "aio")[1], "no servers\n")

    def test_lists_that_are_none(self) -> None:
        head = b"HTTP/1.1 %d OK\r\nContent-Length: %d\r\n\r\n"
        for fetch, answer in (
                (ms.list_aio_text, b""), (ms.list_aio_text, b"12#Court#D#203.0.113.9#port#%"),
                (ms.list_aio_framed, b"\1\0\0\0\0"), (ms.list_aio_framed, hexa("03000000 020100")),
                (ms.list_aio_framed, hexa("0a000000 020100 05") + b"1.2.3\1"),
                (ms.list_aio_framed, hexa("00000000")), (ms.hyperbol_list, b"SSH-2.0-OpenSSH"),
                (ms.hyperbol_list, b"HBSL"), (ms.list_iceball, head % (404, 2) + b"{}"),
                (ms.list_iceball, head % (200, 2) + b"[]"), (ms.list_iceball, b"SSH-2.0\r\n"),
                (ms.list_iceball, head % (200, 15) + b'{"servers":[5]}'),
                (ms.list_iceball, head % (200, 9) + b"{")):
            with FakeServer(serve=scripted(b"", b"", answer)) as server, \
                    self.assertRaises(ms.Malformed, msg=answer):
                if fetch is ms.hyperbol_list:
                    server.serve = lambda sock: sock.sendall(answer)
                fetch("127.0.0.1", server.port)

    def test_a_master_that_comes_to_no_end(self) -> None:
        over = threading.Event()
        self.addCleanup(over.set)

        def drip(first: bytes, more: bytes) -> Callable[[socket.socket], None]:
            def serve(sock: socket.socket) -> None:
                sock.sendall(first)
                while not over.wait(0.02):
                    sock.sendall(more)
            return serve
        with mock.patch.object(ms, "ASK_TOTAL_S", 0.2):
            for game, first, more in (("iceball", b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
                                      ("iceball", b"HTTP/1.1 200 OK\r\n\r\n", b" "),
                                      ("hyperbol", b"HBSL" + bytes(8), b"\0"),
                                      ("aio", b"", hexa("01000000 00"))):
                with FakeServer(serve=drip(first, more)) as server:
                    self.assertIn("not complete within 0.2 s",
                                  self.failing("list", "--game", game, server.place))
        with mock.patch.object(ms, "HYPERBOL_LIST_BYTES", 1200), \
                FakeServer(serve=scripted(b"HBSL" + bytes(8), b"", bytes(5000))) as server:
            self.assertEqual(len(ms.hyperbol_list("127.0.0.1", server.port)), 100)
        with mock.patch.object(ms, "FETCH_BYTES", 1000), \
                FakeServer(serve=drip(bytes(5000), b"x")) as server:
            self.assertRaises(ms.Malformed, ms.list_aio_text, "127.0.0.1", server.port)
            over.set()

    def test_a_list_of_zones(self) -> None:
        """It comes among other things, in pieces and twice, and the master goes at the end."""
        listing = (b"\1" + hexa("cb007109 a861 0600 0100 86000000") + b"Chaos".ljust(64, b"\0")
                   + b"A zone\0")
        total = struct.pack("<I", len(listing))
        first = hexa("0003 00000000 000a") + total + listing[:40]
        second = hexa("0003 01000000 000a") + total + listing[40:]
        told: List[bytes] = []

        def answer(data: bytes) -> List[bytes]:
            told.append(data)
            if data == hexa("0004 01000000"):
                server.sock.close()
            return [hexa("0012 0000"), b"\x0bhello", bytes(600)] + {
                hexa("0001"): [hexa("0002") + data[2:6]],
                hexa("0003"): [hexa("0004 00000000"), first, first, second]}.get(data[:2], [])
        with FakeServer(answer) as server:
            zone, = self.ask("list", server.place, "--game", "subspace")["servers"]
        self.assertEqual((zone["name"], zone["address"], zone["port"], zone["players"]),
                         ("Chaos", "203.0.113.9", 25000, 6))
        self.assertEqual((told[0][:2], told[0][6:], told[1]),
                         (hexa("0001"), hexa("0100"), hexa("0003 00000000 01 00000000")))

    def test_a_list_of_zones_that_is_none(self) -> None:
        for key, packets, seconds in ((b"\0\2abcd", [], 0.3), (None, [], 0.3),
                                      (None, [b"\0\7"], 20.0)):
            def answer(data: bytes) -> List[bytes]:
                if data[:2] == b"\0\1":
                    return [key or b"\0\2" + data[2:6]]
                return packets
            began = time.monotonic()
            with FakeServer(answer) as server, mock.patch.object(ms, "ASK_TOTAL_S", seconds):
                words = self.failing("list", server.place, "--game", "subspace")
            self.assertIn("wants encryption" if key else "no list from UDP port", words)
            self.assertLess(time.monotonic() - began, 4.0)
        with self.assertRaises(ms.Malformed):
            ms.ZoneListLink(0.0).packet(hexa("000a ffffffff 01"), 0.0)


class SubSpaceOnTheWire(unittest.TestCase):
    """The program, a zone and a player, on loopback."""

    def test_a_zone_is_listed(self) -> None:
        with RunningServer(start=HURRIED, subspace__port="0") as server, \
                FakeServer(zone_answer) as zone, \
                socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            ports = server.port("subspace"), server.port("subspace", index=1)
            game_port = zone.port - 1
            sock.sendto(SUBSPACE_CAPTURE[:4] + struct.pack("<H", game_port) + SUBSPACE_CAPTURE[6:],
                        ("127.0.0.1", ports[1]))
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


# --- Command line: the log, files, serving, --check ---------------------------------------------

class LogTest(unittest.TestCase):
    """Nobody waits for the log, what is lost is counted, and a file rotates and opens anew."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "log")

    def start(self, stderr: Any = None, **settings: str) -> logging.Handler:
        """A log of the program, but not its own one."""
        for patch in (mock.patch.object(ms, "log", logging.Logger("masterserver")),
                      mock.patch.object(sys, "stderr", stderr)):
            patch.start()
            self.addCleanup(patch.stop)
        self.addCleanup(ms.end_log)
        return ms.start_log(settings_of(settings))

    def written(self, name: str = "") -> List[str]:
        with open(self.path + name, encoding="utf-8") as file:
            return file.read().splitlines()

    def test_who_does_not_read_stops_nothing(self) -> None:
        """Lines for which there is no room are counted where they are missing, the others come."""
        reading, writing = os.pipe()
        with open(reading, "rb") as reader, open(writing, "w", encoding="utf-8") as writer:
            began = time.monotonic()
            self.start(writer)
            for number in range(3000):
                ms.log.info("line %d %s", number, "x" * 600)
            self.assertLess(time.monotonic() - began, 5)
            threads = threading.active_count()
            data: List[bytes] = []
            reads = threading.Thread(target=lambda: data.extend(reader))
            reads.start()
            eventually(lambda: not ms.log.handlers[0].queue.qsize())
            ms.log.info("the last")
            ms.end_log()
            self.assertEqual(threading.active_count(), threads)         # one less, and the reader
            writer.close()
            reads.join()
        text = b"".join(data).decode()
        numbers = [int(number) for number in re.findall(r"line (\d+) x", text)]
        missing = [int(number) for number in re.findall(r"ERROR (\d+) lines of the log are", text)]
        self.assertEqual((numbers, len(numbers) + sum(missing)), (sorted(set(numbers)), 3000))
        self.assertGreaterEqual(len(numbers), ms.LOG_LINES)
        self.assertRegex(text, r"missing here\n.* INFO the last\n$")

    def test_the_end_does_not_wait_for_long(self) -> None:
        reads, read = threading.Event(), []
        writer = mock.Mock(write=lambda text: (reads.wait(20), read.append(text)))
        self.start(writer)
        for number in range(5):
            ms.log.info("line")
        began = time.monotonic()
        with mock.patch.object(ms, "LOG_END_S", 0.2):
            ms.end_log()
        self.assertTrue(0.15 < time.monotonic() - began < 5)            # for what waits
        reads.set()
        eventually(lambda: len(read) == 5)

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
            self.assertLess(time.monotonic() - began, 10)

    def test_a_file_rotates(self) -> None:
        with mock.patch.object(ms, "LOG_FILE_BYTES", 1000):
            self.start(server__log_file=self.path)
        for number in range(55):
            ms.log.info("%d %s", number, "x" * 60)                      # nine or ten a file
        ms.end_log()
        found = [re.findall(r"INFO (\d+)", "\n".join(self.written(name)))
                 for name in (".3", ".2", ".1", "")]
        last = [number for numbers in found for number in numbers]
        self.assertEqual(last, [str(number) for number in range(55 - len(last), 55)])
        self.assertTrue(all(found) and 30 < len(last) < 45, found)
        self.assertFalse(os.path.exists(self.path + ".4"))

    def test_a_file_that_cannot_be_rotated_grows(self) -> None:
        with mock.patch.object(ms, "LOG_FILE_BYTES", 1000):
            self.start(server__log_file=self.path)
        with mock.patch.object(os, "rename", side_effect=PermissionError(13, "denied")):
            for number in range(55):
                ms.log.info("%d %s", number, "x" * 60)
            ms.end_log()
        self.assertEqual(len(self.written()), 55)

    @unittest.skipUnless(hasattr(signal, "SIGHUP"), "reload by signal")
    def test_a_file_opens_anew_at_a_reload(self) -> None:
        """Beside the ini, wherever the program was started; as logrotate wants it."""
        with RunningServer(server__log_file="log") as server:
            self.path = os.path.join(server.folder.name, "log")
            eventually(lambda: "Players and browsers" in "".join(self.written()))
            os.rename(self.path, self.path + ".old")
            server.process.send_signal(signal.SIGHUP)
            eventually(lambda: os.path.exists(self.path) and self.written())
            self.assertIn("settings read again", self.written()[0])
            self.assertFalse(server.logged(b"INFO"))

    def test_where_it_cannot_be(self) -> None:
        for path in os.path.dirname(self.path), os.path.join(self.path, "x"):
            with self.assertRaisesRegex(ms.StartError, r"change \[server\] log_file"):
                self.start(server__log_file=path)
            self.assertEqual(ms.log.handlers, [])
        self.start(None)                        # as of pythonw
        ms.log.info("to nobody")

    def test_levels_and_last_words(self) -> None:
        stderr = io.StringIO()
        self.start(stderr, server__log_level="warning")
        ms.log.info("too low")
        ms.log.warning("told %s", ascii("ü"))
        ms.complain("the end")
        self.assertRegex(stderr.getvalue(), r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING told "
                                            r"'\\xfc'\nmasterserver.py: the end\n$")

    def test_tracebacks_do_not_fill_the_disk(self) -> None:
        stderr = io.StringIO()
        self.start(stderr)
        for number in range(200):
            try:
                raise ValueError("a fault")
            except ValueError:
                ms.log.exception("by a packet")
            ms.log.info("an event")
        ms.end_log()
        text = stderr.getvalue()
        self.assertEqual(text.count("INFO an event"), 200)
        self.assertIn(text.count("ValueError: a fault"), range(20, 30))

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
        options = {row.setting: "" for row in ms.PROTOCOLS if row.setting}
        options.update({"server.bind": "127.0.0.1", "server.public_address": "203.0.113.5",
                        "iceball.port": "0", "http.ports": "0", "server.database": ""})
        words = [*START, "--exit-with-stdin", "--ready-file", self.path]
        for name, value in options.items():
            words += ["--set", "%s=%s" % (name, value)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) as process:
            self.addCleanup(process.kill)
            eventually(lambda: process.poll() is not None or os.path.exists(self.path), 20)
            self.assertIsNone(process.poll())
            with open(self.path, encoding="utf-8") as file:
                ready = json.load(file)
            out, err = process.communicate(b"anything\n", timeout=20)
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

    def test_which_address_people_are_told(self) -> None:
        for public, own, told in (("", "192.0.2.9", "192.0.2.9"), ("", "", "localhost"),
                                  ("203.0.113.5", "192.0.2.9", "203.0.113.5"),
                                  ("2001:db8::7", "192.0.2.9", "[2001:db8::7]")):
            server = mock.Mock(settings=ms.Settings({"server.public_address": public}), listeners=[
                ms.Listener("http", "tcp", "0.0.0.0", 27790),
                ms.Listener("http", "tcp", "::", 27790), ms.Listener("http", "tcp", "::", 27795)])
            with mock.patch.object(ms, "own_address", return_value=own):
                self.assertEqual(ms.first_contact(server)[-1],
                                 "Players and browsers: http://%s:27790/" % told)
            self.assertEqual(ms.summary(server), "http on TCP 27790; http on TCP 27795")
        server.listeners = []
        self.assertEqual(ms.first_contact(server), [])

    @unittest.skipIf(ms.WINDOWS, "Windows has no such signals for a child")
    def test_signals(self) -> None:
        """A reload loses no connection; what is wrong in the ini is told, and what went as well."""
        for stop in signal.SIGINT, signal.SIGTERM:
            with RunningServer("--set", "aio.dialects=text") as server:
                eventually(lambda: server.logged(b"WARNING --set: [aio] dialects"))
                place = "127.0.0.1", server.port("http")
                with socket.create_connection(place, 5) as client:
                    for title, told in (("[http]\ntitle = New", b"changed: http.title"),
                                        ("[bans]\nx = y", b"old settings stay in force")):
                        with open(server.config, "w", encoding="utf-8") as file:
                            file.write(title)
                        server.process.send_signal(signal.SIGHUP)
                        eventually(lambda: server.logged(told))
                        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                        data = b""
                        while b"</html>" not in data:
                            data += client.recv(65536)
                        self.assertIn(b"<title>New", data)
                server.process.send_signal(stop)
                self.assertEqual(server.process.wait(20), 0)

    def test_ready_files(self) -> None:
        """A start that fails leaves none, --check leaves it alone, and one that cannot be written
        is an error."""
        for status, *more in ((1, "server.bind=203.0.113.77"), (2, "http.portz=1")):
            ms.write_file(self.path, b"{}")
            words = "--ready-file", self.path, "--set", "server.database=", "--set", *more
            self.assertEqual(command("--check", *words)[0], status)
            self.assertTrue(os.path.exists(self.path))
            self.assertEqual(run_program(*words).returncode, status)
            self.assertFalse(os.path.exists(self.path))
        with self.assertRaisesRegex(AssertionError, "the ready file cannot be written"):
            RunningServer("--ready-file", os.path.join(self.path, "none"))

    def test_settings_beside_the_program(self) -> None:
        def load(**arguments: Any) -> ms.Settings:
            found = dict({"config": None, "set": [], "verbose": False}, **arguments)
            return ms.load_settings(SimpleNamespace(**found))
        self.assertEqual(load().path, os.path.join(HERE, "masterserver.ini"))
        with mock.patch.object(sys, "frozen", True, create=True), \
                mock.patch.object(sys, "executable", os.path.abspath("a game/server")):
            self.assertEqual(load().file("server.database"),
                             os.path.abspath("a game/masterserver.db"))
        self.assertEqual(load(verbose=True)["server.log_level"], "debug")
        self.assertEqual(load(set=["iceball.port=5"])["iceball.port"], 5)
        self.assertRaises(ms.SettingsError, load, config=self.path)

    def test_usage(self) -> None:
        for words, told in (
                (["ping", "127.0.0.1", "--game", "aio"], "is not ADDRESS:PORT"),
                (["ping", "127.0.0.1:1", "--game", "chess"], "invalid choice: 'chess'"),
                (["list", "::1:x:y", "--game", "aio"], "is not ADDRESS:PORT"),
                (["list", "localhost"], "required: --game"), (["frob"], "invalid choice: 'frob'"),
                (["--check", "list", "--game", "aio", "x"], "--check is for serving"),
                (["--print-config", "export", "x"], "--print-config is for serving"),
                (["--set", "a.b=c", "ping", "--game", "aio", "x:1"], "--set is for serving"),
                (["--config", "x"], "x: cannot be read"), (["--set", "x"], "section.key=value"),
                (["announce", "--game", "aio", "--port", "x", "y"], "invalid int")):
            status, out, err = command(*words)
            self.assertEqual((status, out), (2, ""), words)
            self.assertIn(told, err)
        self.assertEqual(command("--version"), (0, "masterserver.py %s\n" % ms.__version__, ""))
        self.assertEqual(command("--print-config"), (0, ms.config_text(), ""))

    def test_places(self) -> None:
        for text, place in (("a.example", ("a.example", None)), ("a.example:7", ("a.example", 7)),
                            ("192.0.2.1", ("192.0.2.1", None)), ("::1", ("::1", None)),
                            ("[::1]:7", ("::1", 7)), ("[::1]", ("::1", None))):
            self.assertEqual(ms.read_place(text), place)
        self.assertRaises(ValueError, ms.read_place, "")

    @unittest.skipUnless(os.path.exists("/dev/full"), "no full device here")
    def test_where_standard_output_takes_nothing(self) -> None:
        reading, gone = os.pipe()
        os.close(reading)
        with open("/dev/full", "wb") as full, open(gone, "wb") as pipe:
            for out, told in (full, b"masterserver.py: standard output: "), (pipe, b""):
                done = subprocess.run([*START, "--print-config"], stdout=out, timeout=20,
                                      stderr=subprocess.PIPE)
                self.assertEqual((done.returncode, done.stderr[:34]), (1, told))

    def test_a_terminal_that_cannot_show_it(self) -> None:
        done = subprocess.run(
            [*START, "--check", "--set", "server.database=/no/\u0416/x"], capture_output=True,
            env=dict(os.environ, PYTHONIOENCODING="cp1252"), timeout=20)
        self.assertEqual((done.returncode, done.stderr), (1, b""))
        self.assertIn(b"/no/?/x", done.stdout)


class WritingFiles(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.path = os.path.join(folder.name, "file")

    def read(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def test_all_or_nothing(self) -> None:
        ms.write_file(self.path, b"one")
        with mock.patch.object(os, "replace", side_effect=OSError):
            self.assertRaises(OSError, ms.write_file, self.path, b"two")
        self.assertEqual(self.read(self.path), b"one")
        ms.write_file(self.path, b"three")
        self.assertEqual((self.read(self.path), os.listdir(self.folder)), (b"three", ["file"]))
        self.assertRaises(OSError, ms.write_file, self.folder, b"a folder")

    @unittest.skipIf(ms.WINDOWS, "links and pipes are others there")
    def test_what_is_no_regular_file(self) -> None:
        link, pipe = (os.path.join(self.folder, name) for name in ("link", "pipe"))
        os.symlink(self.path, link)
        os.mkfifo(pipe)
        ms.write_file(link, b"one")
        self.assertEqual((self.read(self.path), os.path.islink(link)), (b"one", True))
        found: List[bytes] = []
        reader = threading.Thread(target=lambda: found.append(self.read(pipe)))
        reader.start()
        ms.write_file(pipe, b"two")
        reader.join(5)
        self.assertEqual(found, [b"two"])
        # nor is it taken for an earlier start's ready file
        self.assertEqual(command("--ready-file", pipe, "--set", "http.portz=1")[0], 2)
        self.assertEqual(sorted(os.listdir(self.folder)), ["file", "link", "pipe"])


class Checking(unittest.TestCase):
    def check(self, **settings: str) -> Tuple[str, str]:
        chosen = {row.setting: "" for row in ms.PROTOCOLS if row.setting}
        chosen.update({"server.bind": "127.0.0.1", "server.public_address": "203.0.113.5"})
        chosen.update({name.replace("__", "."): value for name, value in settings.items()})
        errors, warnings = ms.check(ms.Settings(chosen))
        return "\n".join(errors), "\n".join(warnings)

    def test_ports_that_are_taken(self) -> None:
        """All of them are told, and what the trial has opened is closed."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp, socket.socket() as tcp:
            udp.bind(("127.0.0.1", 0))
            tcp.bind(("127.0.0.1", 0))
            tcp.listen(1)
            ports = {"iceball__port": str(udp.getsockname()[1]),
                     "http__ports": str(tcp.getsockname()[1])}
            errors = self.check(**ports)[0].split("\n")
        for error, place in zip(errors, ("iceball cannot listen on UDP", "http cannot listen on")):
            self.assertIn(place, error)
        self.assertEqual(len(errors), 2)
        for _ in range(2):
            self.assertEqual(self.check(**ports)[0], "")

    def test_warnings(self) -> None:
        """Each is given where it is right, and only there."""
        rows: Tuple[Tuple[str, Dict[str, str]], ...] = (
            ("public_address is empty", {"server__public_address": ""}),
            ("192.168.1.5 is private", {"server__public_address": "192.168.1.5"}),
            ("2001:db8::7 is IPv6", {"server__public_address": "2001:db8::7"}),
            ("127.0.0.1 can be reached from this machine only", {}),
            ("27790 or 27795", {"iceball__port": "0", "http__ports": "0"}),
            ("[iceball] timeout: ", {"iceball__port": "0", "iceball__timeout": "36"}),
            ("[aio] dialects", {"aio__dialects": "text"}))
        for told, settings in rows:
            for others in rows:
                errors, warnings = self.check(**settings)
                self.assertEqual(errors, "")
                expected = others[0] == told or others[0].startswith("127.0.0.1") or (
                    "iceball__timeout" in settings and others[0].startswith("27790"))
                self.assertEqual(others[0] in warnings, expected, (others[0], settings))

    def test_no_warnings(self) -> None:
        for settings, told in (({"iceball__port": "", "iceball__timeout": "36"}, "iceball"),
                               ({"iceball__port": "0", "iceball__timeout": "37"}, "timeout"),
                               ({"iceball__port": "", "http__ports": "0"}, "27795"),
                               ({"server__bind": "0.0.0.0"}, "from this machine"),
                               ({"server__bind": "127.0.0.1, ::1"}, "no IPv4 address")):
            self.assertNotIn(told, self.check(**settings)[1])
        for name, text, told, expected in (
                ("server.bind", "::", "no IPv4 address", True),
                ("server.bind", "0.0.0.0, ::", "no IPv4 address", False),
                ("http.ports", "27790", "27790", False), ("http.ports", "27795", "27790", False)):
            warnings = ms.check_reach(ms.Settings({name: text}))
            self.assertEqual(told in "\n".join(warnings), expected, (name, text))

    def test_files_that_cannot_be_written(self) -> None:
        """Nothing is made to find out."""
        with tempfile.TemporaryDirectory() as folder:
            good, none = (os.path.join(folder, name) for name in ("file", "none/file"))
            with open(os.path.join(folder, "taken"), "wb"):
                pass
            rows = [(good, True), (none, False), (folder, False),
                    (os.path.join(folder, "taken", "x"), False)]
            for name in "server__log_file", "server__database":
                for path, fine in rows:
                    self.assertEqual(self.check(**{name: path})[0], "" if fine else
                                     "[server] %s: %s, or its folder, cannot be written." % (
                                         name[8:], path))
                for part in folder + os.sep, good:
                    with open(good, "wb"), mock.patch.object(os, "access",
                                                             lambda path, mode: path != part):
                        self.assertIn(good, self.check(**{name: good})[0])
                    os.remove(good)
            self.assertEqual(os.listdir(folder), ["taken"])
        with mock.patch.object(ms, "writable", return_value=False):
            settings = ms.Settings({"server.bind": "203.0.113.77"})
            settings.folder = "/srv"                        # of the ini: a database by default
            errors, warnings = ms.check(settings)
            self.assertIn("[server] database: ", warnings[-1])
            self.assertNotIn("database", "".join(errors))

    def test_exit_statuses(self) -> None:
        quiet = [word for row in ms.PROTOCOLS if row.setting
                 for word in ("--set", row.setting + "=")]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
            taken.bind(("127.0.0.1", 0))
            port = "iceball.port=%d" % taken.getsockname()[1]
            for more, status, told in (
                    ([], 0, "The settings are good.\nwarning: [server] public_address"),
                    (["--set", port], 1, "not used as they are:\nerror: iceball cannot listen"),
                    (["--set", "iceball.prt=1"], 2, "")):
                done = command("--check", "--set", "server.bind=127.0.0.1",
                               "--set", "server.database=", *quiet, *more)
                self.assertEqual((done[0], done[2] == ""), (status, status != 2), done)
                self.assertIn(told, done[1])
# --- export -------------------------------------------------------------------------------------

# What a game server answers, by the offsets in the document: kind, timestamp, name, mode, players
# and their maximum, map, version, players of each faction, skill
HYPERBOL_ANSWER = ((0, b"\x1b"), (37, b"Capture the Core"), (69, b"\5\x10"), (72, b"orbital"),
                   (169, b"1.8a"), (222, b"\3\1\2"), (225, b"\x09"))


class GameServers:
    """Hyperbol game servers on loopback, in a thread: each answers under its name from the query
    number that stands with it on; to the others it is silent, or answers another query."""

    def __init__(self, rows: Sequence[Tuple[bytes, int]]) -> None:
        self.rows = {}
        for row in rows:
            sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            sock.bind(("127.0.0.1", 0))
            self.rows[sock] = row
        self.ports = [sock.getsockname()[1] for sock in self.rows]
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        queries: Dict[socket.socket, int] = dict.fromkeys(self.rows, 0)
        while not self.ended.is_set():
            for sock in select.select(list(self.rows), [], [], 0.05)[0]:
                query, peer = sock.recvfrom(64)
                queries[sock] += 1
                name, number = self.rows[sock]
                if len(query) == 5 and query[0] == 2 and queries[sock] >= number:
                    answer = bytearray(229)
                    for offset, value in HYPERBOL_ANSWER + ((1, query[1:]), (5, name)):
                        answer[offset:offset + len(value)] = value
                    sock.sendto(answer, peer)
                elif number < 9:
                    sock.sendto(b"\x1bnone" + bytes(224), peer)

    def __enter__(self) -> GameServers:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.ended.set()
        self.thread.join()
        for sock in self.rows:
            sock.close()


class MasterOf:
    """A master that writes fixed bytes to one client: a greeting, and a list if the key comes."""

    def __init__(self, listing: bytes = b"", greeting: bytes = b"HBSL" + hexa("efbeadde 07000000"),
                 ) -> None:
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.place = "127.0.0.1:%d" % self.sock.getsockname()[1]
        self.greeting, self.listing, self.request = greeting, listing, b""
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        with self.sock, self.sock.accept()[0] as sock:          # one client
            sock.sendall(self.greeting)
            with contextlib.suppress(ConnectionResetError):     # who does not like the greeting
                self.request = sock.recv(64)
            if self.request:
                sock.sendall(self.listing)

    def __enter__(self) -> MasterOf:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.thread.join(10)
        self.sock.close()


class FtpServer:
    """For one client, on loopback: its answers to some words, what it was told and sent."""

    def __init__(self, answers: Dict[bytes, bytes]) -> None:
        self.answers, self.told = answers, []
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.url = "ftp://user@127.0.0.1:%d" % self.sock.getsockname()[1]
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        usual = {b"USER": b"331 f\xfcr?\r\n", b"STOR": b"150 now\r\n"}
        with contextlib.suppress(ConnectionError), self.sock.accept()[0] as sock, \
                sock.makefile("rb") as lines:
            for line in itertools.chain([b"CONNECT"], lines):
                word = line.split()[0]
                self.told.append(line.strip())
                if word == b"PASV":
                    data = socket.create_server(("127.0.0.1", 0))
                    port = divmod(data.getsockname()[1], 256)
                    sock.sendall(b"227 (127,0,0,1,%d,%d)\r\n" % port)
                    continue
                sock.sendall(self.answers.get(word, usual.get(word, b"230 f\xfcr\r\n")))
                if self.answers.get(word) == b"":
                    return
                if word == b"STOR":
                    with data, data.accept()[0] as file:
                        self.told.append(file.makefile("rb").read())
                    sock.sendall(b"226 done\r\n")

    def __enter__(self) -> FtpServer:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.thread.join(10)
        self.sock.close()


def entry(address: str, port: int, flavor: int = 1) -> bytes:
    return bytes(map(int, address.split("."))) + struct.pack("<IB", port, flavor) + bytes(3)


NOBODY = entry("127.0.0.1", 70000)          # that is no port: it is listed, and does not answer


class ExportTest(unittest.TestCase):

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.output = os.path.join(folder.name, "servers.xml")
        patch = mock.patch.object(ms, "EXPORT_ROUND_S", 0.05)
        patch.start()
        self.addCleanup(patch.stop)

    def export(self, *words: str) -> Tuple[int, str, str]:
        return command("export", *words, "--output", self.output)

    def exported(self) -> List[Dict[str, str]]:
        with open(self.output, "rb") as file:
            found = xml.dom.minidom.parse(file).getElementsByTagName("server")
        return [dict(server.attributes.items()) for server in found]

    @timing
    def test_all_are_asked_at_once_and_those_who_are_silent_once_more(self) -> None:
        rows = [(b"<%d>" % number, 1 if number % 10 else 9) for number in range(60)]
        rows[7] = b"second", 2
        with GameServers(rows) as game:
            listing = b"".join(entry("127.0.0.1", port) for port in game.ports)
            with MasterOf(listing + NOBODY) as hyperbol, \
                    mock.patch.object(ms, "EXPORT_ROUND_S", 0.25):
                began = time.monotonic()
                status, out, err = self.export("--game", "hyperbol", hyperbol.place)
                took = time.monotonic() - began
        self.assertEqual((status, out, err), (
            0, "61 servers, 54 of them responding, 270 players: %s written.\n" % self.output, ""))
        self.assertTrue(0.48 < took < 1.0, took)            # two rounds, for those who are late
        for server, (name, number) in zip(self.exported(), rows):
            self.assertEqual((server["responding"], server.get("servername", "").encode()),
                             ("1", name) if number < 9 else ("0", b""))

    def test_what_is_written(self) -> None:
        with GameServers([(b"Fun & Games", 1)]) as game:
            listing = (entry("127.0.0.1", game.ports[0], 3) + NOBODY
                       + entry("255.255.255.255", 5) + b"\1\2\3")
            with MasterOf(listing) as hyperbol:
                self.assertEqual(self.export(hyperbol.place)[0], 0)
        self.assertEqual(hyperbol.request, hexa("efbeadde ff000000"))
        first, *others = self.exported()
        self.assertLess(int(first.pop("ping_milliseconds")), 250)
        self.assertEqual(first, {
            "ip": "127.0.0.1", "port": str(game.ports[0]), "responding": "1", "flavor": "3",
            "servername": "Fun & Games", "gametype": "Capture the Core", "mapname": "orbital",
            "playercount": "5", "maxplayercount": "16", "version": "1.8a", "skill": "9"})
        self.assertEqual(others, [{"ip": "127.0.0.1", "port": "70000", "responding": "0"},
                                  {"ip": "255.255.255.255", "port": "5", "responding": "0"}])
        self.assertEqual(os.listdir(self.folder), ["servers.xml"])

    def test_strangers_do_not_hold_it_up(self) -> None:
        """Neither those who send for ever nor those who answer in another's name."""
        place, stranger, began = ("203.0.113.9", 1), ("203.0.113.8", 1), time.monotonic()
        server = ms.Server("hyperbol", *place, "203.0.113.9", 0.0, 0.0, responding=False)
        answer = b"\x1b" + struct.pack("<I", 7) + bytes(224)
        for data, source in ((answer, stranger), (b"\x1b" + bytes(228), stranger),
                             (b"\x1b" + bytes(228), place), (answer[:-1], place), (b"", place)):
            sock = mock.Mock(recvfrom=lambda size: (time.sleep(0.001), (data, source))[1])
            ms.read_answers(sock, {place: (7, 0.0)}, {place: server}, 0.05)
            self.assertFalse(server.responding)
        self.assertTrue(0.25 <= time.monotonic() - began < 3)
        sock = mock.Mock(recvfrom=lambda size: (answer, place))
        ms.read_answers(sock, {place: (7, time.monotonic() - 0.5)}, {place: server}, 60.0)
        self.assertTrue(server.responding and 500 <= server.ping_ms < 5000)

    def test_failures_leave_the_old_file(self) -> None:
        with open(self.output, "wb") as file:
            file.write(b"old")
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            place = "127.0.0.1:%d" % closed.getsockname()[1]
            for words, told in ((place, "No list from " + place), ("a..b", "No list from a..b:20")):
                status, out, err = self.export(words)
                self.assertEqual((status, out), (3, ""))
                self.assertIn(told, err)
        for listing, greeting, expected, told in (
                (b"", b"SSH-2.0-x\r\n\r\n", 4, "is not a Hyperbol master"),
                (b"", b"HBSL", 3, "No list from 127.0.0.1:"),
                (b"", b"HBSL" + bytes(8), 6, "is empty; %s is left as it is" % self.output)):
            with MasterOf(listing, greeting) as hyperbol, \
                    mock.patch.object(ms, "HYPERBOL_LIST_S", 0.3):
                status, out, err = self.export(hyperbol.place)
            self.assertEqual((status, out), (expected, ""))
            self.assertIn(told, err)
        with open(self.output, "rb") as file:
            self.assertEqual(file.read(), b"old")
        self.output = self.folder
        with MasterOf(NOBODY) as hyperbol:
            status, out, err = self.export(hyperbol.place)
        self.assertEqual((status, out), (7, ""))
        self.assertIn(" cannot be written: ", err)

    def test_usage(self) -> None:
        for words, told in (
                (["a:b"], "ADDRESS:PORT"), (["x", "--every", "soon"], "expected a number"),
                (["x", "--every", "0"], "from 1 to 86400"), ([], "HOST[:PORT]"),
                (["x", "--ftp", "ftp://u:secret@h/"], "MASTERSERVER_FTP_PASSWORD"),
                (["x", "--ftp", "http://h/"], "expected ftp://"),
                (["x", "--ftp", "ftp://h:port/"], "--ftp"),
                (["x", "--ftp", "ftp:///folder/"], "expected ftp://")):
            status, out, err = self.export(*words)
            self.assertEqual((status, out), (2, ""), words)
            self.assertIn(told, err)

    def test_every(self) -> None:
        """A round that fails does not end it; a signal does."""
        for number in signal.SIGINT, signal.SIGTERM:
            self.addCleanup(signal.signal, number, signal.getsignal(number))

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 2:
                signal.raise_signal(signal.SIGTERM)
        slept: List[float] = []
        with MasterOf(NOBODY) as hyperbol, mock.patch.object(ms.time, "sleep", sleep):
            status, out, err = self.export(hyperbol.place, "--every", "300")
        self.assertEqual((status, slept), (0, [300.0, 300.0]))
        self.assertIn("1 servers, 0 of them responding", out)
        self.assertIn("No list from", err)

    def test_passwords(self) -> None:
        path = os.path.join(self.folder, ".netrc")
        with open(path, "w", encoding="ascii") as file:
            file.write("machine h.example login user password secret\n")
        os.chmod(path, 0o600)
        rows = (("", "ftp://user@h.example/", ("user", "secret")),
                ("", "ftp://h.example/", ("user", "secret")),
                ("", "ftp://else.example/", ("", "")), ("", "ftp://b%40c@h.example/", ("b@c", "")),
                ("more", "ftp://user@h.example/", ("user", "more")),
                ("more", "ftp://h.example/", ("", "more")))
        for password, url, expected in rows:
            with mock.patch.dict(os.environ, HOME=self.folder, USERPROFILE=self.folder):
                os.environ.pop("MASTERSERVER_FTP_PASSWORD", None)
                if password:
                    os.environ["MASTERSERVER_FTP_PASSWORD"] = password
                self.assertEqual(ms.ftp_login(ms.read_ftp_url(url)), expected, (url, password))
        with mock.patch.dict(os.environ, HOME=os.path.join(self.folder, "none"), USERPROFILE="/-"):
            os.environ.pop("MASTERSERVER_FTP_PASSWORD", None)
            self.assertEqual(ms.ftp_login(ms.read_ftp_url("ftp://u@h/")), ("u", ""))

    def upload(self, path: str, answers: Dict[bytes, bytes]) -> Tuple[int, str, List[bytes]]:
        """Status and words of an export, and what an FTP server with these answers was told."""
        with FtpServer(answers) as server, MasterOf(NOBODY) as hyperbol, \
                mock.patch.dict(os.environ, MASTERSERVER_FTP_PASSWORD="secret"):
            status, out, err = self.export(hyperbol.place, "--ftp", server.url + path)
        return status, out + err, server.told

    def test_what_is_uploaded(self) -> None:
        for path, told in (
                ("/a%20b/%C3%BC.xml", [b"USER user", b"PASS secret", b"CWD a b", b"TYPE I",
                                       b"PASV", b"STOR \xc3\xbc.xml"]),
                ("/%2Fsrv/lists/", [b"USER user", b"PASS secret", b"CWD /srv/lists", b"TYPE I",
                                    b"PASV", b"STOR servers.xml"]),
                ("", [b"USER user", b"PASS secret", b"TYPE I", b"PASV", b"STOR servers.xml"])):
            status, words, found = self.upload(path, {})
            self.assertEqual((status, found[1:-2]), (0, told))
            self.assertIn(b'<server ip="127.0.0.1" port="70000" responding="0"/>', found[-2])
            self.assertIn("servers.xml written and uploaded to 127.0.0.1.\n", words)

    def test_what_is_not_uploaded(self) -> None:
        """The reason is told, in whatever words; a server that is silent is not waited for."""
        for path, answers, reason in (
                ("/a/", {b"CWD": b"550 \x1b]0;title\x07\x1b[2JGo away.\r\n"}, "550 Go away."),
                ("/", {b"PASS": b"530 f\xfcr niemand\r\n"}, "530 für niemand"),
                ("/", {b"USER": b""}, "EOFError"), ("/a%0Ab", {}, "illegal newline"),
                ("/", {b"TYPE": b"2"}, "timed out"), ("/", {b"CONNECT": b"\r"}, "timed out")):
            with mock.patch.object(ms, "EXPORT_FTP_S", 0.3 if reason == "timed out" else 10.0):
                status, words, found = self.upload(path, answers)
            self.assertEqual(status, 8, words)
            self.assertIn("The upload to 127.0.0.1 failed: ", words)
            self.assertIn(reason, words)
            self.assertFalse([line for line in found if b"<server" in line])


def python2() -> str:
    """A Python 2 that runs, or nothing."""
    pyenv = os.path.expanduser("~/.pyenv/versions/2.7*/bin/python")
    for name in ["python2.7", "python2", *glob.glob(pyenv)]:
        with contextlib.suppress(OSError):
            if subprocess.run([name, "-c", ""], stderr=subprocess.DEVNULL).returncode == 0:
                return name
    return ""


class HyperbolProgramTest(unittest.TestCase):
    """The program with game servers that it queries, and both scripts that read its list."""

    def test_announced_over_http_and_exported(self) -> None:
        with GameServers([(b"Fun & Games", 1)]) as game, \
                RunningServer(start=HURRIED, hyperbol__port="0") as server:
            body = b"game=hyperbol&port=%d" % game.ports[0]

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
        host = "127.0.0.203"        # its port is written into the script: the address is our own
        script = self.script(host)
        names = b"Fun & Games", b"<b>", b"\xc3\xa9t\xc3\xa9 \"'", b"four"
        with GameServers([(name, 1) for name in names]) as game, RunningServer(
                start=HURRIED, server__bind=host, hyperbol__port="20203",
                hyperbol__servers="\n".join("127.0.0.1:%d %d" % (port, number) for number, port
                                            in enumerate(game.ports))) as server:
            eventually(lambda: len(ms.hyperbol_list(host, 20203)) == 4, 10.0)
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
            {(port, "1", str(number)) for number, port in enumerate(game.ports)})
# --- Embedding -----------------------------------------------------------------------------------

NO_PORTS = {"server.bind": "127.0.0.1", **{row.setting: "" for row in ms.PROTOCOLS if row.setting}}


def announce_iceball(server: ms.MasterServer, *ports: int) -> None:
    """List game servers on these ports of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as game:
        game.settimeout(5)
        game.connect(("127.0.0.1", port_of(server, "iceball")))
        for port in ports:
            game.send(announcement(port))
            game.send(b"HSHK" + game.recv(100)[4:])
    eventually(lambda: all(server.registry.get("iceball", "127.0.0.1", port) for port in ports))


class Embedded(unittest.TestCase):
    """MasterServer as a class of somebody else's program."""

    def assert_closed(self, server: ms.MasterServer) -> None:
        """Nothing of it is open, and it starts no more."""
        places = [place.sock for place in (*server.sockets.udp, *server.sockets.tcp)]
        self.assertEqual({sock.fileno() for sock in (server.wake_in, server.wake_out, *places)},
                         {-1})
        self.assertFalse(server.thread is not None and server.thread.is_alive())
        server.run()                                # returns at once
        self.assertRaisesRegex(ms.StartError, "make a new one", server.start)

    def test_started_twice_and_stopped_twice(self) -> None:
        state = random.getstate()                   # the other program may have seeded it
        server = master(iceball__port="0", http__ports="0", hyperbol__port="0", subspace__port="0")
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
        for begin in (lambda server: None, ms.MasterServer.bind):
            server = master(iceball__port="0")
            begin(server)
            server.stop()
            self.assert_closed(server)

    def test_stopped_while_it_binds(self) -> None:
        """As by Ctrl+C."""
        server = master(iceball__port="0", http__ports="0")
        attach = server.sockets.attach

        def interrupted(*arguments: Any) -> None:
            attach(*arguments)
            server.stop()
        with mock.patch.object(server.sockets, "attach", interrupted):
            with contextlib.suppress(ms.StartError):
                server.run()
        self.assert_closed(server)

    def test_run_ends_by_a_callback_a_signal_or_another_thread(self) -> None:
        previous = signal.getsignal(signal.SIGINT)
        self.addCleanup(signal.signal, signal.SIGINT, previous)
        for stop in (
                lambda server: server.stop(),
                lambda server: signal.raise_signal(signal.SIGINT),
                lambda server: threading.Thread(target=server.stop).start()):
            server = master(iceball__port="0")
            signal.signal(signal.SIGINT, lambda number, frame: server.stop())
            server.registry.watch(lambda event, listed: stop(server))
            server.bind()
            announcing = threading.Thread(target=announce_iceball, args=(server, 1000))
            announcing.start()
            server.run()
            announcing.join()
            self.assert_closed(server)

    @mock.patch.object(ms, "TICK_S", 0.05)
    def test_events_come_in_the_serving_thread(self) -> None:
        events: List[Tuple[str, int, Any]] = []
        server = ms.MasterServer(
            {**NO_PORTS, "iceball.port": "0", "iceball.timeout": "1"},
            lambda event, listed: events.append((event, listed.port, threading.current_thread())))
        with server:
            announce_iceball(server, 1000)
            eventually(lambda: len(events) == 2)
        self.assertEqual(events, [(event, 1000, server.thread) for event in ("listed", "gone")])

    def test_an_error_in_a_callback_is_logged_and_no_more(self) -> None:
        fail = mock.Mock(side_effect=KeyError("mine"))
        with self.assertLogs("masterserver", "ERROR") as logs:
            settings = ms.Settings({**NO_PORTS, "iceball.port": "0"})
            with ms.MasterServer(settings, fail) as server:
                announce_iceball(server, 1000, 1001)
        self.assertRegex(logs.output[0], "(?s)Mock.*KeyError: 'mine'")
        self.assertEqual([call[0][0] for call in fail.call_args_list], ["listed"] * 2)

    def test_what_cannot_start_says_so_and_leaves_nothing_open(self) -> None:
        with master(iceball__port="0", http__ports="0") as first:
            iceball, http = port_of(first, "iceball"), port_of(first, "http")
            second = master(iceball__port=str(iceball), http__ports="0, %d" % http)
            words = "(?s)UDP 127.0.0.1:%d: .*TCP 127.0.0.1:%d: " % (iceball, http)
            self.assertRaisesRegex(ms.StartError, words, second.start)
        self.assert_closed(second)
        for values, words in (
                ({"iceball.prot": "1"}, "no key prot; did you mean port"),
                ({"http.ports": "x"}, "ports = x: expected a number"),
                ({"http.template": "/nowhere/page.html"}, "template = /nowhere/page.html: ")):
            self.assertRaisesRegex(ms.SettingsError, words, ms.MasterServer, values)

    def test_several_in_one_process(self) -> None:
        with master(iceball__port="0") as one, master(iceball__port="0") as two:
            announce_iceball(one, 1, 2, 3)
            announce_iceball(two, 4)
            self.assertEqual((one.registry.total, two.registry.total), (3, 1))

    def test_nothing_is_kept_unless_a_file_is_named(self) -> None:
        """Nor do servers whose connections end with the program leave the list."""
        unnamed = master()
        self.addCleanup(unnamed.stop)
        self.assertIsNone(unnamed.database)
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
        server = master(http__ports="0")
        self.addCleanup(server.stop)
        server.bind()
        web, = (protocol for protocol in server.protocols if isinstance(protocol, ms.Web))
        with mock.patch.object(time, "time", return_value=4e9):
            server.tick(time.monotonic())
        self.assertAlmostEqual(web.epoch + time.monotonic(), 4e9, delta=5.0)

    def test_import_starts_nothing_and_nothing_is_left(self) -> None:
        script = """if True:
            import contextlib, logging, os, signal, sys, threading, time
            with contextlib.suppress(ImportError):
                import ctypes                           # libffi may keep its own file open
            def state():
                files = "/proc/self/fd"
                return (threading.active_count(), signal.getsignal(signal.SIGINT), sys.path[:],
                        [(log.handlers[:], log.level) for log in map(
                            logging.getLogger, ("", "masterserver"))],
                        len(os.listdir(files)) if os.path.isdir(files) else 0)
            before = state()
            import masterserver as ms
            assert state() == before, state()
            settings = {row.setting: "" for row in ms.PROTOCOLS if row.setting}
            settings.update({"server.bind": "127.0.0.1", "iceball.port": "0", "http.ports": "0"})
            ms.MasterServer(settings).stop()
            with ms.MasterServer(settings), ms.MasterServer(settings):
                announcement = ms.Announcement("iceball", 21737, ["127.0.0.1:1"])
                announcement.start()
                announcement.stop()
            ms.Announcement("aio", 21737, ["127.0.0.1:1"], name="n").stop()
            deadline = time.monotonic() + 5
            while state() != before and time.monotonic() < deadline:
                time.sleep(0.01)
            assert state() == before, (state(), before)
            """
        done = subprocess.run([*PYTHON, "-c", script], cwd=HERE, timeout=30,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.assertEqual((done.returncode, done.stdout), (0, b""))


# --- The project itself --------------------------------------------------------------------------

def text_of(name: str) -> str:
    with open(os.path.join(HERE, name), encoding="utf-8") as file:
        return file.read()


class ProjectTest(unittest.TestCase):
    """The house's own rules, which stand at the head of masterserver.py."""

    IO = set("socket selectors select time open print input threading queue subprocess signal "
             "ctypes ftplib".split())

    def setUp(self) -> None:
        self.source = text_of("masterserver.py")
        self.tree = ast.parse(self.source, feature_version=(3, 8))
        self.sections = [(self.source[:match.start()].count("\n") + 1, int(match.group(1)))
                         for match in re.finditer(r"^# =+\n# (\d+)  ", self.source, re.M)]

    def section(self, line: int) -> int:
        return max((number for start, number in self.sections if start <= line), default=1)

    def uses(self) -> Iterator[Tuple[int, str]]:
        """The section and the name of each global that is used, as compiled: no local of the same
        name hides one, and annotations are texts."""
        codes = [compile(self.source, PROGRAM, "exec")]
        for code in codes:
            codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
            lines, line = dict(dis.findlinestarts(code)), code.co_firstlineno
            for instruction in dis.get_instructions(code):
                line = lines.get(instruction.offset) or line
                if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                    yield self.section(line), instruction.argval

    def test_a_section_uses_only_what_stands_above_it(self) -> None:
        self.assertEqual([number for _, number in self.sections], list(range(2, 13)))
        defined = {}
        for statement in self.tree.body:
            names = [node.id for node in ast.walk(statement)
                     if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                names = [statement.name]
            defined.update(dict.fromkeys(names, self.section(statement.lineno)))
        self.assertEqual({(section, name) for section, name in self.uses()
                          if defined.get(name, 0) > section}, set())

    def test_only_the_event_loop_and_the_tools_do_io(self) -> None:
        uses = set(self.uses())
        self.assertEqual({(section, name) for section, name in uses
                          if name in self.IO and section in range(3, 11)}, set())
        self.assertEqual({section for section, name in uses if name == "sqlite3"}, {6})

    def test_standard_library_only(self) -> None:
        known = getattr(sys, "stdlib_module_names", None)           # Python 3.10
        imported = {alias.name.partition(".")[0] for node in ast.walk(self.tree)
                    if isinstance(node, ast.Import) for alias in node.names}
        self.assertEqual(imported - (known or imported), set())

    def test_a_game_has_one_word_and_a_title(self) -> None:
        """So that `[games]` cannot have another game by it, and every list finds it."""
        for row in ms.PROTOCOLS:
            game = getattr(row.make(make_core()), "game", None)
            if game is not None:
                self.assertEqual((row.name, row.setting.partition(".")[0]), (game, game))
                self.assertIn(game, ms.GAME_TITLES)
                self.assertRaises(ValueError, ms.read_own_game_id, game)

    def test_the_ini_is_what_the_program_prints(self) -> None:
        self.assertEqual(text_of("masterserver.ini"), ms.config_text())

    def test_lines_fit(self) -> None:
        for name in "masterserver.py test_masterserver.py masterserver.ini README.md".split():
            for number, line in enumerate(text_of(name).splitlines(), 1):
                aside = name == "README.md" and re.match(r"\||.*(\]\(|://)", line)
                self.assertTrue(aside or len(line) <= 100, "%s:%d" % (name, number))


def settings_table() -> str:
    """The README's table of settings."""
    lines = ["| section | key | default | meaning | takes effect |",
             "| --- | --- | --- | --- | --- |"]
    for row in ms.SETTINGS:
        key = "`%s`" % row.key if row.key else "such as `%s`" % row.default
        default = "`%s`" % row.default if row.key and row.default else ""
        lines.append("| %s | %s | %s | %s | %s |" % (
            row.section, key, default, row.help, "at once" if row.live else "at a restart"))
    return "\n".join(lines) + "\n"


class ReadmeTest(unittest.TestCase):
    """README.md is held to the program: its tables, and every example that can run here.

    A comment before a fenced block says how it is treated: `runs`, `runs: status 0 or 1`,
    `runs: until stopped`, `runs: the server`, `runs: these tests`, `pasted above: TEXT`,
    `pasted after: TEXT`, `systemd-analyze verify`, `does not run in the tests: WHY`."""

    maxDiff = None
    TREATMENT = (r"runs(: (status 0 or 1|until stopped|the server|these tests))?|"
                 r"pasted (above|after): .+|systemd-analyze verify|does not run in the tests: .+")

    def setUp(self) -> None:
        self.text = text_of("README.md")
        self.blocks = re.findall(r"(?:^<!-- ([^\n]*) -->\n)?^```(\w+)\n(.*?)^```\n", self.text,
                                 re.S | re.M)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def write(self, text: str, *names: str) -> str:
        """The path of a new file."""
        path = os.path.join(self.folder, *names)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def marked(self, comment: str) -> str:
        """What stands between `<!-- comment -->` and the comment that ends it."""
        return self.text.split("<!-- %s -->\n" % comment)[1].partition("<!-- /")[0]

    def table(self, comment: str) -> List[List[str]]:
        return [[cell.strip().strip("`") for cell in line.split("|")[1:-1]]
                for line in self.marked(comment).splitlines()[2:]]

    def test_settings_and_routes(self) -> None:
        self.assertEqual(self.marked("settings"), settings_table())
        self.assertEqual({path: methods for path, methods, _ in self.table("routes")},
                         {path: ", ".join(route.methods) for path, route in ms.ROUTES.items()})

    def test_fields(self) -> None:
        """Those of real answers are in the tables, and nothing else."""
        with master(http__ports="0", games__mygame="My Game",
                    server__database=os.path.join(self.folder, "db")) as server:
            port = port_of(server, "http")
            answer = fetch(port, "/announce", method="POST", body=b"game=mygame&port=27500")[2]
            self.assertEqual(json.loads(answer), {"listed": True, "ttl": 120})
            answer = json.loads(fetch(port, "/servers.json")[2])
            self.assertEqual(list(answer), "generated generation servers".split())
            history = json.loads(fetch(port, "/history.json?game=mygame")[2])
            for path, found in (("servers", answer["servers"][0]), ("history", history)):
                table = self.table("fields of /%s.json" % path)
                self.assertEqual([field for field, _, _ in table], list(found))
            example = re.findall(r"`(\{\"status.*?\})`", self.text)[0]
            self.assertEqual(list(json.loads(fetch(port, "/healthz")[2])),
                             list(json.loads(example)))

    def test_links_lead_somewhere(self) -> None:
        titles = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
                  for title in re.findall(r"^#+ (.*)$", self.text, re.M)}
        for link in re.findall(r"\]\(([^)]*)\)", self.text):
            if link.startswith("#"):
                self.assertIn(link[1:], titles)
            elif os.path.exists(os.path.join(HERE, ".github")):     # the four files are enough
                self.assertTrue(os.path.exists(os.path.join(HERE, link)), link)

    def test_every_block_is_accounted_for(self) -> None:
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
    def test_unit(self) -> None:
        unit, = (block for how, _, block in self.blocks if how == "systemd-analyze verify")
        done = subprocess.run(
            ["systemd-analyze", "verify", self.write(unit, "masterserver.service")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
        self.assertEqual((done.returncode, done.stdout), (0, b""))

    @unittest.skipIf(ms.WINDOWS or not shutil.which("curl"), "no curl or no shell here")
    def test_commands(self) -> None:
        """In a folder with a copy of the program and an ini, on the default ports; the first
        command is the server that the others ask."""
        folder = os.path.join(self.folder, "a new folder, ä")
        os.mkdir(folder)
        shutil.copy(PROGRAM, folder)
        games, = (block for _, _, block in self.blocks if block.startswith("[games]"))
        self.write("[server]\nbind = 127.0.0.1\n" + games, folder, "masterserver.ini")
        os.chmod(self.write('#!/bin/sh\nexec "%s" "$@"\n' % sys.executable, "python3"), 0o755)
        place: Any = {"cwd": folder, "stdin": subprocess.DEVNULL, "env": dict(
            os.environ, PATH=self.folder + os.pathsep + os.environ["PATH"],
            PYTHONDONTWRITEBYTECODE="1")}
        log = self.write("", "log")
        running: List[subprocess.Popen[bytes]] = []

        def start(kind: str) -> None:
            for how, _, block in self.blocks:
                if how == kind:
                    with open(log, "ab") as file:
                        running.append(subprocess.Popen(
                            ["sh", "-ec", "exec " + block], stdout=file, stderr=file, **place))

        def stop() -> Set[int]:
            for process in running:
                process.terminate()
            return {process.wait(20) for process in running}

        def names() -> List[str]:
            return sorted(server["name"] for server in json.loads(
                fetch(27790, "/servers.json")[2])["servers"])

        self.addCleanup(stop)
        start("runs: the server")
        eventually(lambda: "Players and browsers" in text_of(log) or running[0].poll(), 20)
        if running[0].poll():
            self.assertIn("cannot listen on", text_of(log))
            self.skipTest("the default ports are taken: " + text_of(log))
        start("runs: until stopped")
        eventually(lambda: names() == ["My court", "My sanctuary", "My server", "My zone"], 20)
        for how, language, block in self.blocks:
            if how not in ("runs", "runs: status 0 or 1"):
                continue
            command = [sys.executable, "-W", "error", "-c"] if language == "python" else [
                "sh", "-ec"]
            done = subprocess.run([*command, block], stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, timeout=60, **place)
            output = done.stdout.decode("utf-8")
            self.assertIn(done.returncode, (0, 1) if how[4:] else (0,), (block, done.stderr))
            self.assertNotRegex(output, r'(?m)^[45][0-9][0-9] [A-Z]|"listed":false,"reason"')
            if "My own server" in block:
                self.assertEqual(re.findall(r"^The answer is `(\{.*\})`", self.text, re.M),
                                 [output])
        self.assertEqual(stop(), {0}, text_of(log))
        self.assertNotIn("Traceback", text_of(log))

    def module_with_tag(self) -> Any:
        """The program with the game of the section "Adding a protocol"."""
        source = text_of("masterserver.py")
        for how, _, block in self.blocks:
            where, _, anchor = how.partition(": ")
            if where in ("pasted above", "pasted after"):
                self.assertEqual(source.count(anchor), 1, anchor)
                pasted = block + "\n\n" + anchor if where[7:] == "above" else anchor + "\n" + block
                source = source.replace(anchor, pasted)
        spec = importlib.util.spec_from_file_location(
            "masterserver_with_tag", self.write(source, "masterserver_with_tag.py"))
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def test_the_example_protocol(self) -> None:
        module = self.module_with_tag()
        settings = {row.setting: "" for row in ms.PROTOCOLS if row.setting}
        settings.update({"server.bind": "127.0.0.1", "tag.port": "0", "http.ports": "0"})
        told = hexa("d46c 05 10") + b"Playground"
        with module.MasterServer(settings) as server, socket.socket(
                socket.AF_INET, socket.SOCK_DGRAM) as game:
            game.connect(("127.0.0.1", port_of(server, "tag")))
            game.settimeout(10)
            game.send(b"TAG!" + bytes(8) + told)
            answer = game.recv(100)
            self.assertEqual((answer[:4], len(answer), server.registry.total), (b"OK!!", 12, 0))
            game.send(b"TAG!" + answer[4:] + told)
            game.recv(100)
            body = fetch(port_of(server, "http"), "/servers.json?game=tag")[2]
        found, = json.loads(body)["servers"]
        self.assertEqual(
            [found[field] for field in "address port name players max_players verified".split()],
            ["127.0.0.1", 27860, "Playground", 5, 16, "handshake"])

        registry = module.Registry(module.Rules(module.Settings()))
        tag, peer = module.Tag(SimpleNamespace(registry=registry)), ("203.0.113.9", 4000)
        proof = tag.datagram(b"TAG!" + bytes(12), peer, 0.0)[0][0][4:]
        tag.datagram(b"TAG!" + proof + told, ("203.0.113.10", 4000), 1.0)     # another's proof
        self.assertEqual(registry.total, 0)
        tag.datagram(b"TAG!" + proof + told[:4], peer, 1.0)
        self.assertEqual([server.name for server in registry.servers()], ["203.0.113.9:27860"])
        for now, listed in ((60.9, 1), (61.0, 0)):
            registry.expire(now)
            self.assertEqual(registry.total, listed)
        for data in (b"", b"TAG!" + bytes(11), b"TAG?" + bytes(12), b"TAG!" + bytes(77)):
            registry.heard.clear()
            self.assertRaises(module.Malformed, tag.datagram, data, peer, 70.0)
            self.assertEqual([outcome for _, outcome, _ in registry.heard.values()],
                             ["bad packet"])


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

SETTINGS = (
    "server.bind=127.0.0.1",
    "server.database=",
    "iceball.port=0",
    "http.ports=0",
    "hyperbol.port=0",
    "subspace.port=",
    "aio.port=",
)
ROOM = "limits.servers=200000"

ROUNDS = 9  # a median of nine forgives four disturbed rounds
ROUND_SECONDS = 0.6  # long beside a scheduler tick, short beside a machine's change of mind
PATIENCE = 45  # seconds; a part that is older than this without a new task ends by itself

WINDOW = 192  # datagrams under way: fewer than the 277 that Linux's default receive buffer holds
BATCH = 32  # datagrams handed over in one system call
# datagrams a flood goes through before it begins again, at least: what it reads displaces what
# the server has in a
PREPARED = 100000
# cache that they share, so that a yardstick with few servers is to have a load that reads as much
NAP = 0.0002  # seconds a load sleeps between two looks, far less than a server needs for its window
STALL_SECONDS = (
    5  # without any answer, something was lost; the bounded windows leave no excuse for that
)
LOST_SECONDS = (
    1  # a flood, though, forgives as many as its window if a machine that pauses loses them
)
CONNECTIONS = 16  # the issue's number
CHANGE_SECONDS = 0.05  # between two changes of a player count while lists are fetched
UDP_SEGMENT = 103  # linux/udp.h: the kernel cuts one send into datagrams of this size
ACCEPTED = b"MSOK"
ICEBALL_VERSION = 8421413  # 0.2.1-37


def numbered_announcement(number, addresses, players=7):
    """The 86 bytes in which server `number` announces itself; it speaks from 127.0.1.(1 + number
    % addresses)."""
    return struct.pack(
        "<4sHIHHH30s10s30s",
        b"1CEB",
        2,
        ICEBALL_VERSION,
        1024 + number // addresses,
        players,
        32,
        b"Server %d of the community" % number,
        b"ctf",
        b"classic(512,512)",
    )


def source_socket(number, port):
    """A non-blocking socket on 127.0.1.(1 + number), connected to the server."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(
        socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20
    )  # room for a whole window of answers
    sock.bind(("127.0.1.%d" % (1 + number), 0))
    sock.connect(("127.0.0.1", port))
    sock.setblocking(False)
    return sock


# ---- loads: called once with their arguments, they return what runs one round and tells how many
# operations it was


def load_flood(port, servers, addresses=1):
    """Announcements in a fixed random order, an operation is one answer. For so many seconds; 0:
    each server once, in another order, as the one that servers are known in would be kinder to the
    processor's cache than life is.
    """
    sockets = [source_socket(address, port) for address in range(addresses)]

    def batches_of(order):
        numbers = random.Random(order).sample(range(servers), servers)
        queue = []
        for address, sock in enumerate(sockets):
            own = [
                numbered_announcement(number, addresses)
                for number in numbers
                if number % addresses == address
            ]
            own *= -(-PREPARED // servers)
            queue.append(
                [(sock, b"".join(own[at : at + BATCH])) for at in range(0, len(own), BATCH)]
            )
        return itertools.cycle(
            [batch for row in itertools.zip_longest(*queue) for batch in row if batch]
        )

    first, then = batches_of(7), batches_of(8)
    segment = [(socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("=H", 86))]
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
                    sock.sendmsg([data], segment)
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
                assert answer[:4] == ACCEPTED, bytes(answer[:16])
                progress = now
            elif now - progress > LOST_SECONDS:
                lost += sent - answered
                sent = answered
                if lost > WINDOW:
                    sys.exit("%d answers are missing" % lost)
            time.sleep(NAP)

    return flood


def load_handshake(port, addresses=1):
    """Announcement, MSOK, HSHK from 64 sources at a time, each round new servers. For so many
    servers."""
    sockets = {}
    epoll = select.epoll()
    upcoming = [itertools.count(address, addresses) for address in range(addresses)]
    for slot in range(64):
        sock = source_socket(slot % addresses, port)
        sockets[sock.fileno()] = sock, upcoming[slot % addresses]
        epoll.register(sock, select.EPOLLIN)
    segment = [(socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("=H", 86))]

    def handshake(count):
        begun = answered = 0
        progress = time.perf_counter()
        for sock, numbers in itertools.islice(sockets.values(), count):
            sock.send(numbered_announcement(next(numbers), addresses))
            begun += 1
        while answered < count:
            events = epoll.poll(0)
            for fd, _ in events:
                sock, numbers = sockets[fd]
                answer = sock.recv(2048)
                assert answer[:4] == ACCEPTED and len(answer) <= 86, answer
                answered += 1
                if begun < count:  # two datagrams; the last may be the shorter one
                    begun += 1
                    sock.sendmsg(
                        [numbered_announcement(next(numbers), addresses), b"HSHK", answer[4:]],
                        segment,
                    )
                else:
                    sock.send(b"HSHK" + answer[4:])
            now = time.perf_counter()
            if events:
                progress = now
            elif now - progress > STALL_SECONDS:
                sys.exit("%d answers are missing" % (begun - answered))
            time.sleep(NAP)
        return count

    return handshake


def changing(port):
    """A function of the time: now and then it announces server 0 to `port` with another player
    count."""
    sock = port and source_socket(0, port)
    players = itertools.cycle(range(32))
    due = 0.0

    def change(now):
        nonlocal due
        if sock and now >= due:
            due = now + CHANGE_SECONDS
            sock.send(numbered_announcement(0, 1, next(players)))

    return change


def load_lists(port, kind, changes=None):
    """Lists, 16 at a time, while a server changes; an operation is one list. `kind`: keep, close
    or hyperbol."""
    request = (
        b"GET /master.json HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\nConnection: %s\r\n\r\n"
        % (b"keep-alive" if kind == "keep" else b"close")
    )
    length_field = re.compile(rb"\nContent-Length: (\d+)\r\n", re.IGNORECASE)
    buffer = bytearray(1 << 20)
    table = {}  # descriptor: [socket, bytes read, bytes of the whole answer if they tell its end]
    epoll = select.epoll()
    change = changing(changes)

    def connect():
        sock = socket.socket()  # blocking, but without a timeout: that would cost a poll() a call
        sock.connect(("127.0.0.1", port))
        table[sock.fileno()] = [sock, 0, None]
        epoll.register(sock, select.EPOLLIN)
        if kind != "hyperbol":
            sock.send(request)

    def lists(seconds):
        done = 0
        until = time.perf_counter() + seconds
        for _ in range(CONNECTIONS):
            connect()
        while table:
            now = time.perf_counter()
            change(now)
            for fd, _ in epoll.poll(STALL_SECONDS) or sys.exit("no answer"):
                entry = table[fd]
                sock, read, whole = entry
                size = sock.recv_into(buffer)
                if not read and kind == "hyperbol":
                    assert size == 12, bytes(buffer[:size])
                    sock.send(buffer[4:8] + b"\xff\0\0\0")  # the key back; unofficial servers too
                elif not read and kind == "keep":
                    entry[2] = whole = (
                        buffer.index(b"\r\n\r\n", 0, size)
                        + 4
                        + int(length_field.search(buffer, 0, size)[1])
                    )
                entry[1] = read = read + size
                if size and read != whole:
                    continue
                assert read > 2000 and (size or kind != "keep"), bytes(
                    buffer[:200]
                )  # 200 servers fill 2,400 bytes
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
    sockets = [source_socket(address, port) for address in range(addresses)]
    for sock in sockets:
        sock.settimeout(STALL_SECONDS)
    numbers = itertools.cycle(range(servers))
    turn = itertools.count()

    def changes(seconds):
        delays, began = [], time.perf_counter()
        while time.perf_counter() < began + seconds:
            number = next(numbers)
            sock = sockets[number % addresses]
            sent = time.perf_counter()
            sock.send(numbered_announcement(number, addresses, next(turn) % 33))
            answer = sock.recv(2048)
            delays.append(time.perf_counter() - sent)
            assert answer[:4] == ACCEPTED, answer
            sock.send(b"HSHK" + answer[4:])
            time.sleep(max(0.0, began + len(delays) / 2000 - time.perf_counter()))
        delays.sort()
        return {
            "answers": len(delays),
            "p99": 1000 * delays[len(delays) * 99 // 100],
            "worst": 1000 * delays[-1],
        }

    return changes


def load_pages(port, paths):
    """Every page and list, compressed, each on a connection of its own, all the time."""

    def pages(seconds):
        until, done = time.perf_counter() + seconds, []

        def fetch_again(path):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            while time.perf_counter() < until:
                connection.request("GET", path, headers={"Accept-Encoding": "gzip"})
                response = connection.getresponse()
                assert response.status == 200 and response.read(), response.status
                done.append(path)
            connection.close()

        threads = [threading.Thread(target=fetch_again, args=(path,)) for path in paths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(done)

    return pages


# ---- yardsticks and the other side's servers: they say their port and serve until they are ended


def tell_ready(**answer):
    print(json.dumps(answer), flush=True)


def serve_echo():
    """The barest loop: drain a non-blocking UDP socket, answer each datagram with 8 constant
    bytes."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    sock.setblocking(False)
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    tell_ready(port=sock.getsockname()[1])
    while True:
        poll.poll()
        try:
            while True:
                _, peer = sock.recvfrom(2048)
                sock.sendto(b"MSOK\0\0\0\0", peer)
        except BlockingIOError:
            pass


def serve_list(size):
    """The barest selectors loop: accept, greet with 12 bytes, read 8, send `size` constant bytes,
    close."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    listener.setblocking(False)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    tell_ready(port=listener.getsockname()[1])
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


def serve_files(directory):
    """http.server as the standard library has it, connections kept alive, without its log."""

    class Files(http.server.SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = (
            True  # or each answer would wait 40 ms for a delayed acknowledgement
        )

        def __init__(self, *arguments):
            super().__init__(*arguments, directory=directory)

        def log_message(self, *arguments):
            pass

    http.server.ThreadingHTTPServer.request_queue_size = (
        CONNECTIONS  # its 5 would make the others wait a second
    )
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files)
    tell_ready(port=server.server_port)
    server.serve_forever()


def serve_games(count):
    """`count` Hyperbol game servers, each on a port of its own, that answer the query."""
    selector = selectors.DefaultSelector()
    for _ in range(count):
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind(("127.0.0.1", 0))
        selector.register(sock, selectors.EVENT_READ)
    info = struct.pack(
        "<32s32sBBB64s20sxIIBBBB16s44x",
        b"Arena",
        b"Deathmatch",
        3,
        16,
        0,
        b"Foundry",
        b"127.0.0.1",
        28000,
        0,
        127,
        0,
        0,
        1,
        b"1.8a",
    )
    assert len(info) == 224
    tell_ready(ports=[key.fileobj.getsockname()[1] for key in selector.get_map().values()])
    while True:
        for key, _ in selector.select():
            query, peer = key.fileobj.recvfrom(2048)
            key.fileobj.sendto(b"\x1b" + query[1:5] + info, peer)


def part_main(name, arguments):
    """What a helper process does: serve for ever, or run a round for every line that comes in."""
    limit = getattr(
        signal, "alarm", lambda seconds: None
    )  # whoever started this may be gone without a word
    limit(4 * PATIENCE)
    part = globals()[name](**json.loads(arguments))
    tell_ready()
    for line in sys.stdin:
        limit(PATIENCE)
        began, cpu = time.perf_counter(), time.process_time()
        count = part(json.loads(line))
        tell_ready(count=count, seconds=time.perf_counter() - began, cpu=time.process_time() - cpu)


# ---- processes, seen from the bench


class Part:
    """This script again as a helper process; `said` is the first thing it said."""

    def __init__(self, name, **arguments):
        command = [
            sys.executable,
            os.path.abspath(__file__),
            "--bench-part",
            name,
            json.dumps(arguments),
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, universal_newlines=True
        )
        self.pid, self.name = self.process.pid, name
        self.said = self.hear()

    def hear(self):
        line = self.process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError("%s ended early, status %s" % (self.name, self.process.returncode))
        return json.loads(line)

    def run(self, amount):
        self.process.stdin.write("%s\n" % amount)
        self.process.stdin.flush()
        return self.hear()

    def close(self):
        end_process(self.process)
        self.process.stdin.close()
        self.process.stdout.close()


def end_process(process):
    """SIGTERM, so that the server under test saves; 10 s is far more than any of them needs."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Contender:
    """The program under test, ready: its `pid`, the `port` of each protocol, and the seconds that
    its start took."""

    def __init__(self, *settings, python=sys.executable, bytecode=""):
        """`bytecode`: a folder where Python keeps the program's compiled form, as it does for a
        module."""
        self.home = tempfile.mkdtemp()
        ini, ready_file, log = (
            os.path.join(self.home, name) for name in ("empty.ini", "ready", "log")
        )
        open(ini, "w").close()
        environment = {
            key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"
        }
        environment["PYTHONPYCACHEPREFIX"] = bytecode
        command = (
            [python]
            + (["-m", "masterserver"] if bytecode else [PROGRAM])
            + ["--config", ini, "--ready-file", ready_file]
        )
        for setting in SETTINGS + settings:
            command += ["--set", setting]
        with open(log, "w") as output:
            began = time.perf_counter()
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, cwd=os.path.dirname(PROGRAM), env=environment
            )
        while True:
            with contextlib.suppress(OSError, ValueError):  # not there yet, or not whole
                with open(ready_file) as file:
                    listeners = json.load(file)["listeners"]
                break
            if self.process.poll() is not None or time.perf_counter() - began > PATIENCE:
                self.process.kill()
                with open(log) as file:
                    said = file.read().strip().splitlines()[-1:]
                shutil.rmtree(self.home)
                raise RuntimeError("masterserver.py did not start: %s" % " ".join(said))
            time.sleep(0.0005)
        self.start_seconds = time.perf_counter() - began
        self.pid = self.process.pid
        self.listeners = listeners
        self.port = {listener["protocol"]: listener["port"] for listener in listeners}

    def master_json(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port["http"], timeout=10)
        connection.request("GET", "/master.json")
        body = connection.getresponse().read()
        connection.close()
        return body

    def await_listed(self, count, seconds=5):
        """Every announced server is in the list: what was measured was real."""
        end_of_patience = time.perf_counter() + seconds
        while True:
            listed = self.master_json().count(b'"address"')
            if listed == count:
                return
            if time.perf_counter() > end_of_patience:
                raise RuntimeError("%d servers listed instead of %d" % (listed, count))
            time.sleep(0.2)  # lists are rendered once a second

    def close(self):
        end_process(self.process)
        shutil.rmtree(self.home, ignore_errors=True)


@contextlib.contextmanager
def nginx(directory):
    """One nginx worker with `directory` as its root: (pid, port), or None where nginx is not
    installed."""
    program = shutil.which("nginx", path=os.environ.get("PATH", "") + os.pathsep + "/usr/sbin")
    if not program:
        yield None
        return
    with tempfile.TemporaryDirectory() as home:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        paths = "".join(
            "%s_temp_path %s;" % (name, home)
            for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        with open(os.path.join(home, "nginx.conf"), "w") as file:
            file.write(
                "daemon off; master_process off; worker_processes 1; pid %s/pid;"
                " error_log stderr crit; events {} http { access_log off; sendfile on;"
                " tcp_nopush on; keepalive_requests 1000000000; %s"
                " server { listen 127.0.0.1:%d; root %s; } }" % (home, paths, port, directory)
            )
        process = subprocess.Popen([program, "-p", home, "-c", file.name, "-e", "stderr"])
        try:
            for _ in range(200):
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                time.sleep(0.01)
            yield process.pid, port
        finally:
            end_process(process)


def processor_seconds(pid):
    """Processor time of all the threads of a process, ended ones too, to the nanosecond. Linux
    alone has this clock."""
    return time.clock_gettime(
        ~pid << 3 | 2
    )  # as clock_getcpuclockid(3) makes it: CPUCLOCK_SCHED of the process


def resident_bytes(pid):
    with open("/proc/%d/statm" % pid) as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- rounds and rows

# What is compared: whose processor time, under which load, how much load a round, how many
# answers make an operation
Side = collections.namedtuple("Side", "pid load amount answers", defaults=(ROUND_SECONDS, 1))


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
            results.append(
                {
                    "rate": count / seconds,
                    "cpu": cpu / count * 1e6,
                    "busy": cpu / seconds,
                    "load_busy": said["cpu"] / seconds,
                }
            )
    return [
        dict(
            {key: statistics.median(result[key] for result in results) for key in results[0]},
            rounds=results,
        )
        for results in table
    ]


def ratio(ours, theirs, key):
    """The median of the rounds' ratios."""
    return statistics.median(
        mine[key] / other[key] for mine, other in zip(ours["rounds"], theirs["rounds"])
    )


def result_row(name, yardstick, value, bar, at_most=False, **more):
    """A row of the table; `value` is what the bar judges, None where nothing is asked."""
    passed = None if bar is None else value <= bar if at_most else value >= bar
    return dict(
        more, name=name, yardstick=yardstick, value=value, bar=bar, at_most=at_most, passed=passed
    )


def throughput(name, yardstick, bar, ours, theirs):
    """The row for two results of `race`."""
    value = ratio(ours, theirs, "rate")
    return result_row(
        name,
        yardstick,
        value,
        bar,
        judge="rate",
        ratio=value,
        cpu_ratio=ratio(theirs, ours, "cpu"),
        ours=ours,
        theirs=theirs,
    )


class Bench(contextlib.ExitStack):
    """The processes of one benchmark, all ended with it."""

    def part(self, name, **arguments):
        return self.enter_context(contextlib.closing(Part(name, **arguments)))

    def server(self, *settings, servers=0, addresses=1, **more):
        server = self.enter_context(contextlib.closing(Contender(*settings, **more)))
        if servers:
            self.part("load_handshake", port=server.port["iceball"], addresses=addresses).run(
                servers
            )
            server.await_listed(servers)
        return server

    def flood(self, pid, port, servers, addresses=1, once=True):
        """The side that answers announcements; `once`: every server has been heard before the
        first round."""
        load = self.part("load_flood", port=port, servers=servers, addresses=addresses)
        if once:
            load.run(0)
        return Side(pid, load)

    def listed(self, servers, addresses, *settings, **more):
        """The side that is the program with so many servers listed, under their announcements."""
        server = self.server(*settings, servers=servers, addresses=addresses, **more)
        return self.flood(server.pid, server.port["iceball"], servers, addresses)

    def echo(self, answers=1):
        echo = self.part("serve_echo")
        return self.flood(echo.pid, echo.said["port"], 10000, 4)._replace(answers=answers)

    def against_web_servers(self, name, kind, nginx_bar, threading_bar=None):
        """The rows for a list of 200 servers that changes, beside web servers that read the same
        bytes from a file."""
        server = self.server(servers=200)
        directory = self.enter_context(tempfile.TemporaryDirectory())
        with open(os.path.join(directory, "master.json"), "wb") as file:
            file.write(server.master_json())
        yardsticks = []
        worker = self.enter_context(nginx(directory))
        if worker:
            yardsticks.append(("nginx", nginx_bar) + worker)
        else:
            yield left_out(name, "nginx is not installed: left out")
        if threading_bar:
            files = self.part("serve_files", directory=directory)
            yardsticks.append(("ThreadingHTTPServer", threading_bar, files.pid, files.said["port"]))
        ports = server.port
        sides = [
            Side(
                server.pid,
                self.part("load_lists", kind=kind, port=ports["http"], changes=ports["iceball"]),
            )
        ]
        sides += [
            Side(pid, self.part("load_lists", kind=kind, port=port))
            for _, _, pid, port in yardsticks
        ]
        ours, *theirs = race(*sides)
        for (yardstick, bar, _, _), result in zip(yardsticks, theirs):
            yield throughput(name, yardstick, bar, ours, result)


def left_out(name, why):
    return {"name": name, "note": why, "passed": None}


# ---- the benchmarks; the first line says what an operation is, the numbers are the bars


def bench_announce_1(bench, name):
    """an announcement of the one listed server, answered"""
    yield throughput(name, "echo loop", 0.95, *race(bench.listed(1, 1), bench.echo()))


def bench_announce_10000(bench, name):
    """an announcement of one of 10,000 listed servers, answered"""
    yield throughput(name, "echo loop", 0.95, *race(bench.listed(10000, 4), bench.echo()))


def bench_handshake(bench, name):
    """first announcement, MSOK, HSHK, listed; the echo loop answers two datagrams"""
    server = bench.server()
    load = bench.part("load_handshake", port=server.port["iceball"], addresses=4)
    yield throughput(
        name, "echo loop", 0.55, *race(Side(server.pid, load, 5000), bench.echo(answers=2))
    )
    server.await_listed(5000 * ROUNDS)


def bench_spoofed(bench, name):
    """a first announcement, answered with MSOK, of a server that never says more"""
    server = bench.server()
    spoofed = bench.flood(
        server.pid, server.port["iceball"], 400000, 8, once=False
    )  # 5 s do not get through them
    yield throughput(name, "echo loop", 0.75, *race(spoofed, bench.echo()))
    server.await_listed(0)


def bench_json_keepalive(bench, name):
    """GET /master.json: 200 servers, one changing; 16 connections kept alive"""
    yield from bench.against_web_servers(name, "keep", 1.0, 10)


def bench_json_connect(bench, name):
    """GET /master.json: 200 servers, one changing; a connection a request"""
    yield from bench.against_web_servers(name, "close", 0.85)


def bench_hyperbol(bench, name):
    """a Hyperbol list of 200 servers, a connection each"""
    games = bench.part("serve_games", count=200)
    server = bench.server(
        "hyperbol.servers=" + "\n".join("127.0.0.1:%d 1" % port for port in games.said["ports"])
    )
    began, listed = time.perf_counter(), 0
    while listed < 200:
        if time.perf_counter() - began > PATIENCE:
            raise RuntimeError("%d of 200 servers listed" % listed)
        time.sleep(0.5)
        with socket.create_connection(
            ("127.0.0.1", server.port["hyperbol"]), 10
        ) as sock, sock.makefile("rb") as file:
            sock.send(file.read(12)[4:8] + b"\xff\0\0\0")
            listed = len(file.read()) // 12
    bare = bench.part("serve_list", size=200 * 12)
    sides = [
        Side(pid, bench.part("load_lists", port=port, kind="hyperbol"))
        for pid, port in ((server.pid, server.port["hyperbol"]), (bare.pid, bare.said["port"]))
    ]
    yield throughput(name, "selectors loop", 0.85, *race(*sides))


def bench_busy(bench, name):
    """the delay of 99 % of the announcements of 10,000 servers that change, while all pages and
    lists are fetched compressed all the time"""
    server = bench.server(servers=10000, addresses=4)
    paths = ["/", "/?game=iceball", "/master.json", "/servers.json", "/servers.xml?game=iceball"]
    pages = bench.part("load_pages", port=server.port["http"], paths=paths)
    changes = bench.part("load_changes", port=server.port["iceball"], servers=10000, addresses=4)
    reader = threading.Thread(target=pages.run, args=(10,))
    reader.start()
    said = changes.run(9)["count"]
    reader.join()
    note = "%d answers, the worst after %.0f ms" % (said["answers"], said["worst"])
    yield result_row(name, None, said["p99"], 50, True, judge="ms", note=note)


def bench_growth(bench, name):
    """an announcement with 100,000 servers listed; processor time against the same with 100"""
    # What other tenants of the machine leave of the caches counts here, and changes from round to
    # round
    many, few = race(bench.listed(100000, 2, ROOM), bench.listed(100, 2), rounds=2 * ROUNDS - 1)
    yield result_row(
        name,
        "100 servers",
        ratio(many, few, "cpu"),
        1.15,
        True,
        judge="cost",
        ours=many,
        theirs=few,
        ratio=ratio(many, few, "rate"),
        cpu_ratio=ratio(few, many, "cpu"),
    )


def bench_memory(bench, name):
    """resident bytes for each of 100,000 listed servers"""
    server = bench.server(ROOM)
    empty = resident_bytes(server.pid)
    bench.part("load_handshake", port=server.port["iceball"], addresses=2).run(100000)
    bench.part("load_flood", port=server.port["iceball"], servers=100000, addresses=2).run(0)
    listed = (resident_bytes(server.pid) - empty) / 100000
    server.await_listed(100000)
    fetched = (resident_bytes(server.pid) - empty) / 100000
    yield result_row(
        name, None, listed, 1000, True, judge="bytes", note="%.0f after GET /master.json" % fetched
    )


def bench_start(bench, name):
    """from the process's start to ready: an empty database, 10,000 servers to restore, and
    started as a module"""
    home = bench.enter_context(tempfile.TemporaryDirectory())
    saved, database = os.path.join(home, "saved"), os.path.join(home, "database")
    server = bench.server("server.database=" + saved, servers=10000, addresses=2)
    server.close()
    with open(PROGRAM, encoding="utf-8") as file:
        text = file.read()
    nodes = [
        inner
        for node in ast.parse(text).body
        for inner in (node.body if isinstance(node, ast.Try) else [node])
    ]
    imports = "\n".join(
        ast.get_source_segment(text, node)
        for node in nodes
        if isinstance(node, (ast.Import, ast.ImportFrom))
    )
    bytecode = os.path.join(home, "bytecode")
    Contender(bytecode=bytecode).close()
    rounds = []
    for _ in range(7):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", imports], check=True)
        milliseconds = [(time.perf_counter() - began) * 1000]
        for servers, kept in ((0, ""), (10000, ""), (0, bytecode)):
            if servers:
                shutil.copyfile(saved, database)
            with contextlib.closing(
                Contender("server.database=" + database, bytecode=kept)
            ) as server:
                milliseconds.append(server.start_seconds * 1000)
                if not rounds:
                    server.await_listed(servers)
            for leftover in glob.glob(database + "*"):
                os.remove(leftover)
        rounds.append(milliseconds)
    bare, empty, restored, module = map(statistics.median, zip(*rounds))
    figures = "%.0f ms empty, %.0f ms with 10,000, %.0f ms for the imports" % (
        empty,
        restored,
        bare,
    )
    yield result_row(
        name,
        "same imports",
        statistics.median(round[1] / round[0] for round in rounds),
        2.3,
        True,
        judge="time",
        note=figures,
        rounds=rounds,
    )
    yield result_row(
        name,
        "same imports",
        statistics.median(round[3] / round[0] for round in rounds),
        1.2,
        True,
        judge="time",
        note="as python3 -m masterserver, which keeps the compiled form: %.0f ms" % module,
    )
    yield result_row(
        name,
        "empty database",
        statistics.median(round[2] - round[1] for round in rounds),
        150,
        True,
        judge="ms more",
        note=figures,
    )


def bench_pypy(bench, name):
    """an announcement of one of 10,000 listed servers, answered by the program on PyPy; and a
    server listed by it"""
    pypy = shutil.which("pypy3")
    if not pypy or platform.python_implementation() == "PyPy":
        yield left_out(name, "this is PyPy" if pypy else "pypy3 is not installed: left out")
        return
    sides = race(bench.listed(10000, 4, python=pypy), bench.listed(10000, 4))
    yield throughput(name, "this Python", None, *sides)
    servers = [bench.server(python=python) for python in (pypy, sys.executable)]
    loads = [
        bench.part("load_handshake", port=server.port["iceball"], addresses=4) for server in servers
    ]
    loads[0].run(5000)  # what PyPy has to see before it compiles it
    yield throughput(
        name,
        "this, listing",
        None,
        *race(*(Side(server.pid, load, 4000) for server, load in zip(servers, loads)))
    )


BENCHMARKS = {
    name[len("bench_") :].replace("_", "-"): function
    for name, function in list(globals().items())
    if name.startswith("bench_")
}
COLUMNS = "{:14} {:>9} {:>9} {:19} {:>6} {:>6}  {:14} {:8} {:>15} {:>11}  {}"


def table_line(result):
    """A row as a line of the table."""

    def figure(number, form="%.2f"):
        return "-" if number is None else form % number

    ours, theirs = result.get("ours", {}), result.get("theirs", {})
    pairs = [
        "%s / %s" % (figure(ours.get(key), form), figure(theirs.get(key), form))
        for key, form in (("cpu", "%.1f"), ("busy", "%.2f"))
    ]
    value = result.get("value")
    judged = (
        "-"
        if value is None
        else "%s %s" % (figure(value, "%.0f" if value >= 50 else "%.2f"), result["judge"])
    )
    bar = (
        "-"
        if result.get("bar") is None
        else "%s %g" % ("≤" if result["at_most"] else "≥", result["bar"])
    )
    verdict = {True: "pass", False: "MISS", None: "-"}[result["passed"]]
    return COLUMNS.format(
        result["name"],
        figure(ours.get("rate"), "%.0f"),
        figure(theirs.get("rate"), "%.0f"),
        result.get("yardstick") or "-",
        figure(result.get("ratio")),
        figure(result.get("cpu_ratio")),
        judged,
        bar,
        *pairs,
        " ".join(filter(None, (verdict, result.get("note"))))
    )


def bench_main(arguments):
    """`--bench [NAME ...] [--json]`: prints the table, or all that was measured; status 1 if a
    bar was missed."""
    names = [argument for argument in arguments if not argument.startswith("-")] or list(BENCHMARKS)
    unknown = sorted(set(names) - set(BENCHMARKS))
    if unknown:
        sys.exit("no benchmark %s; there are %s" % (", ".join(unknown), ", ".join(BENCHMARKS)))
    machine = "%s %s, %s %s, %d cores, %s" % (
        platform.python_implementation(),
        platform.python_version(),
        platform.system(),
        platform.machine(),
        os.cpu_count(),
        time.strftime("%Y-%m-%d"),
    )
    tell = (lambda line: None) if "--json" in arguments else (lambda line: print(line, flush=True))
    tell(
        machine
        + "\n"
        + COLUMNS.format(
            "name",
            "ours/s",
            "theirs/s",
            "yardstick",
            "ratio",
            "cpu",
            "judged",
            "bar",
            "cpu µs/op",
            "busy cores",
            "",
        )
    )
    results = []
    for name in names:
        rows = []
        try:
            with Bench() as bench:
                for result in BENCHMARKS[name](bench, name):
                    rows.append(result)
        except (
            OSError,
            RuntimeError,
            LookupError,
            AttributeError,
        ) as error:  # elsewhere no epoll, 127.0.1.1 or /proc
            rows.append(
                dict(left_out(name, "%s: %s" % (type(error).__name__, error)), passed=False)
            )
        for result in rows:
            tell(table_line(result))
            results.append(dict(result, what=BENCHMARKS[name].__doc__))
    if "--json" in arguments:
        print(json.dumps({"machine": machine, "rows": results}, indent=1))
    return int(any(result["passed"] is False for result in results))
class Told(str):
    """The name of a test that another process ran."""

    def shortDescription(self) -> None:
        return None


class InTwo(unittest.TestSuite):
    """Every test of this file, for one report: this process takes the classes from the first on, a
    second one from the last on, until they meet, so that two cores have work; then what measures
    time runs alone."""

    def run(self, result: unittest.TestResult, debug: bool = False) -> unittest.TestResult:
        with tempfile.TemporaryDirectory() as folder:
            flags = ["-W" + option for option in sys.warnoptions or ["default"]] + [
                "-X",
                "dev",
            ] * sys.flags.dev_mode
            with subprocess.Popen(
                [sys.executable, *flags, os.path.abspath(__file__), "--share", folder]
            ) as other:
                share(folder, 1, result)
            for case in all_cases():
                suite_of(case, True)(result)
            told = {
                "errors": [
                    (
                        "the second process",
                        "It ended with status %d, and told nothing." % other.returncode,
                    )
                ]
            }
            with contextlib.suppress(FileNotFoundError), open(
                os.path.join(folder, "told"), encoding="utf-8"
            ) as file:
                told = json.load(file)
        result.testsRun += told.pop("run", 0)
        for outcome, tests in told.items():
            getattr(result, outcome).extend((Told(name), text) for name, text in tests)
        return result


def all_cases() -> List[type]:
    return [
        case
        for case in list(globals().values())
        if isinstance(case, type) and issubclass(case, unittest.TestCase)
    ]


def suite_of(case: type, alone: bool) -> unittest.TestSuite:
    names = unittest.defaultTestLoader.getTestCaseNames(case)
    return unittest.TestSuite(
        case(name) for name in names if hasattr(getattr(case, name), "alone") == alone
    )


def share(folder: str, step: int, result: unittest.TestResult) -> None:
    """Run each class, in this order (1) or the other (-1), of which no process has left a file in
    the folder yet."""
    parent = os.getppid()
    for case in all_cases()[::step]:
        if (
            step < 0 and os.getppid() != parent
        ):  # the first process was killed, and nobody waits for this one
            return
        try:
            open(os.path.join(folder, case.__name__), "x").close()
        except FileExistsError:
            continue
        suite_of(case, False)(result)


def share_main(folder: str) -> None:
    result = unittest.TextTestResult(sys.stderr, False, 1)
    share(folder, -1, result)
    told: Dict[str, Any] = {
        outcome: [(str(test), text) for test, text in getattr(result, outcome)]
        for outcome in ("errors", "failures", "skipped")
    }
    with open(os.path.join(folder, "told"), "w", encoding="utf-8") as file:
        json.dump(dict(told, run=result.testsRun), file)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--bench"]:
        sys.exit(bench_main(sys.argv[2:]))
    if sys.argv[1:2] == ["--bench-part"]:
        part_main(*sys.argv[2:])
    elif sys.argv[1:2] == ["--share"]:
        share_main(sys.argv[2])
    elif sys.argv[1:]:
        unittest.main()
    else:
        runner = unittest.TextTestRunner(warnings=None if sys.warnoptions else "default")
        sys.exit(not runner.run(InTwo()).wasSuccessful())
