"""Tests of masterserver.py, in the program's order: python3 test_masterserver.py

Golden packets come from the protocol documents and from captures of deployed programs, never from the program's own encoders.
Protocol time is a number that the test moves; only the scenarios at the end use real sockets, on loopback and free ports.
"""
from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock
import urllib.request
import xml.dom.minidom
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import masterserver as ms

HERE = os.path.dirname(os.path.abspath(__file__))
PROGRAM = os.path.join(HERE, "masterserver.py")


def hexa(text: str) -> bytes:
    """Wire bytes from hex with spaces."""
    return bytes.fromhex(text.replace(" ", "").replace("\n", ""))


def make_core(**settings: str) -> ms.Core:
    """What protocols are handed, without sockets: make_core(iceball__timeout="60")."""
    chosen = ms.Settings({name.replace("__", "."): value for name, value in settings.items()})
    registry = ms.Registry(ms.Rules(chosen))
    return ms.Core(chosen, registry, ms.Poller(chosen), lambda host, done: done(host, 0.0), {})


def feed(session: ms.Session, data: bytes, size: int, now: float = 0.0) -> bytes:
    """Everything that a session answers to data that comes in pieces of `size` bytes."""
    return b"".join(session.receive(data[i:i + size], now) for i in range(0, len(data), size))


class RunningServer:
    """The program as its users start it, on free ports of loopback; whatever it writes to standard error is kept in `log`."""

    def __init__(self, *options: str, **settings: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.ready_file = os.path.join(self.folder.name, "ready.json")
        chosen = {"server.bind": "127.0.0.1", "iceball.port": "0", "http.ports": "0"}
        chosen.update({row.setting: "" for row in ms.PROTOCOLS if row.setting and row.setting not in chosen})
        chosen.update({name.replace("__", "."): value for name, value in settings.items()})
        config = os.path.join(self.folder.name, "masterserver.ini")
        with open(config, "w", encoding="utf-8"):
            pass
        command = [sys.executable, "-W", "error", "-X", "dev", PROGRAM, "--config", config, "--ready-file", self.ready_file, *options]
        for name, value in chosen.items():
            command += ["--set", "%s=%s" % (name, value)]
        self.stderr = open(os.path.join(self.folder.name, "stderr"), "w+b")
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=self.stderr)
        deadline = time.monotonic() + 20
        while not os.path.exists(self.ready_file):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise AssertionError("the server did not start: %s" % self.log)
            time.sleep(0.01)
        with open(self.ready_file, encoding="utf-8") as file:
            self.ready = json.load(file)

    def port(self, protocol: str, transport: str = "", index: int = 0) -> int:
        return [l["port"] for l in self.ready["listeners"] if l["protocol"] == protocol and transport in ("", l["transport"])][index]

    def stop(self) -> int:
        """End it as a service manager does; the exit status. The log stays."""
        if self.process.poll() is None:
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


# --- Settings --------------------------------------------------------------------------------------------------------


# --- Wire helpers ----------------------------------------------------------------------------------------------------


# --- Registry --------------------------------------------------------------------------------------------------------


# --- Storage ---------------------------------------------------------------------------------------------------------


# --- Poller ----------------------------------------------------------------------------------------------------------

class Asked(ms.Querier):
    """A querier whose question is its timestamp, and whose answer is the timestamp and the steps still to come."""

    game = "test"

    def __init__(self, steps: int = 1) -> None:
        self.steps = steps
        self.answered: List[ms.Target] = []
        self.silent: List[Tuple[str, int]] = []

    def query(self, target: ms.Target) -> bytes:
        return struct.pack("<I", target.nonce)

    def answer(self, target: ms.Target, data: bytes, now: float) -> bool:
        if data != struct.pack("<I", target.nonce):
            raise ms.Malformed("the wrong timestamp")
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
        self.poller = ms.Poller(ms.Settings())
        self.querier = Asked()

    def test_a_new_server_is_asked_at_the_next_tick_however_many_wait(self) -> None:
        for number in range(500):
            self.poller.add(self.querier, address_of(number), 5000, known=True)
        self.poller.tick(0.0)
        self.poller.add(self.querier, "203.0.113.9", 5000)
        self.assertIn(("203.0.113.9", 5000), [peer for _, peer in self.poller.tick(1.0)])

    def test_queries_are_spread_over_the_interval(self) -> None:
        for number in range(500):
            self.poller.add(self.querier, address_of(number), 5000, known=True)
        asked: List[List[Tuple[str, int]]] = []
        for second in range(180):
            queries = self.poller.tick(float(second))
            asked.append([peer for _, peer in queries])
            for data, peer in queries:
                self.assertEqual(self.poller.datagram(data, peer, second + 0.1), [])
        self.assertLessEqual(max(map(len, asked)), 50)
        self.assertEqual(len(set(sum(asked[:30], []))), 500)
        for start in range(30, 150, 30):
            self.assertEqual(len(set(sum(asked[start:start + 31], []))), 500)
        self.assertEqual({len(peers) for peers in asked[60:]} - {15, 16, 17, 18, 19}, set())       # 500 / 30 = 16.7

    def test_an_answer_counts_only_from_where_and_to_what_was_asked(self) -> None:
        target = self.poller.add(self.querier, "203.0.113.9", 5000)
        [(data, peer)] = self.poller.tick(1.0)
        for stray, source in (
            (data, ("203.0.113.9", 5001)),
            (data, ("203.0.113.8", 5000)),
            (b"junk", peer),
            (b"", peer),
        ):
            with self.assertRaises(ms.Malformed):
                self.poller.datagram(stray, source, 1.1)
        self.assertEqual(self.querier.answered, [])
        self.assertEqual(self.poller.datagram(data, ("::ffff:203.0.113.9", 5000, 0, 0), 1.25), [])
        self.assertEqual(self.querier.answered, [target])
        self.assertAlmostEqual(target.ping_ms, 250)
        with self.assertRaises(ms.Malformed):                       # the same once more
            self.poller.datagram(data, peer, 1.3)

    def test_a_lost_answer_is_asked_for_again_with_another_timestamp(self) -> None:
        self.poller.add(self.querier, "203.0.113.9", 5000)
        [(first, peer)] = self.poller.tick(1.0)
        self.assertEqual(self.poller.tick(3.9), [])
        [(second, again)] = self.poller.tick(4.0)
        self.assertEqual((again, len(self.querier.silent)), (peer, 0))
        with self.assertRaises(ms.Malformed):                       # the first question's answer, too late
            self.poller.datagram(first, peer, 4.1)
        self.poller.datagram(second, peer, 4.2)
        self.assertEqual(len(self.querier.answered), 1)

    def test_three_missed_polls_in_a_row(self) -> None:
        target = self.poller.add(self.querier, "203.0.113.9", 5000)
        asked = answered = 0
        for second in range(300):
            for data, peer in self.poller.tick(float(second)):
                asked += 1
                if asked == 5:                                      # two polls of two questions have gone by
                    self.poller.datagram(data, peer, second + 0.1)
                    answered = second
        missed = [("203.0.113.9", number) for number in (1, 2, 1, 2, 3)]
        self.assertEqual((self.querier.silent, asked), (missed, 4 + 1 + 6))
        self.assertEqual((self.poller.targets, dict(self.poller.sources)), ({}, {}))
        self.assertGreater(answered, 0)
        self.poller.remove(target)                                  # twice does no harm

    def test_polls_go_on_at_the_interval(self) -> None:
        self.poller.add(self.querier, "203.0.113.9", 5000)
        times = []
        for second in range(400):
            for data, peer in self.poller.tick(float(second)):
                times.append(second)
                self.poller.datagram(data, peer, second + 0.05)
        gaps = [later - sooner for sooner, later in zip(times[1:], times[2:])]
        self.assertEqual((set(gaps), len(gaps)), ({30}, 12))

    def test_rate_in_all(self) -> None:
        poller = ms.Poller(ms.Settings({"poll.rate": "3"}))
        querier = Asked(steps=3)
        for number in range(20):
            poller.add(querier, address_of(number), 5000)
        for second in range(40):
            queries = poller.tick(float(second))
            for data, peer in queries:  # grows: the next step is asked at once, within the rate
                queries += poller.datagram(data, peer, second + 0.01)
            self.assertLessEqual(len(queries), 3)
            if len(querier.answered) < 20:
                self.assertEqual(len(queries), 3)
        self.assertEqual({target.address for target in querier.answered}, {address_of(number) for number in range(20)})

    def test_one_source_cannot_have_thousands_asked(self) -> None:
        for port in range(1, 33):
            self.assertFalse(self.poller.crowded("203.0.113.9"))
            self.poller.add(self.querier, "203.0.113.9", port)
        self.assertTrue(self.poller.crowded("203.0.113.9"))
        self.assertFalse(self.poller.crowded("203.0.113.8"))
        for port in range(1, 40):
            self.poller.add(self.querier, "127.0.0.1", port)
        self.assertFalse(self.poller.crowded("127.0.0.1"))          # exempt


class KnownTest(unittest.TestCase):

    def setUp(self) -> None:
        self.lookups: List[Tuple[str, Callable[[str, float], None]]] = []
        self.core = make_core()._replace(resolve=lambda host, done: self.lookups.append((host, done)))
        self.querier = Asked()
        self.known = ms.Known(self.core, self.querier, offset=1)

    def test_names_are_looked_up_away_from_the_loop_and_again(self) -> None:
        self.known.read([("a.example", 5000), ("203.0.113.9", 6000)])
        self.known.tick(0.0)
        self.assertEqual(list(self.core.poller.targets), [("203.0.113.9", 6001)])       # does not wait for the name
        self.known.tick(1000.0)
        self.assertEqual([host for host, _ in self.lookups], ["a.example"])             # not twice while it is slow
        self.lookups[0][1]("203.0.113.1", 1000.0)
        target = self.core.poller.targets["203.0.113.1", 5001]
        self.assertEqual((target.server_port, target.known), (5000, True))
        self.known.tick(1001.0)
        self.lookups[1][1]("203.0.113.2", 1002.0)                                       # it moved
        self.assertEqual(set(self.core.poller.targets), {("203.0.113.2", 5001), ("203.0.113.9", 6001)})
        self.assertEqual(
            self.known.places,
            {("203.0.113.2", 5000): ("a.example", 5000), ("203.0.113.9", 6000): ("203.0.113.9", 6000)},
        )

    def test_a_name_that_leads_nowhere(self) -> None:
        self.known.read([("a.example", 5000)])
        with self.assertLogs("masterserver", "WARNING") as logged:
            for number, now in enumerate((0.0, 60.0, 120.0)):
                self.known.tick(now)
                self.assertEqual(len(self.lookups), number + 1)
                self.lookups[-1][1](("", "0.0.0.0", "")[number], now)
        self.assertEqual((len(logged.records), self.core.poller.targets), (1, {}))
        self.known.tick(180.0)
        self.lookups[-1][1]("203.0.113.1", 180.0)
        self.assertEqual(list(self.core.poller.targets), [("203.0.113.1", 5001)])

    def test_a_line_that_goes_from_the_ini(self) -> None:
        self.known.read([("203.0.113.1", 5000), ("203.0.113.2", 5000)])
        self.known.tick(0.0)
        for address in "203.0.113.1", "203.0.113.2":
            self.core.registry.hear("test", address, 5000, address, 0.0, float("inf"), {})
        self.core.poller.add(self.querier, "203.0.113.2", 5001, 5000)                   # it announced itself as well
        self.known.read([])
        self.assertEqual([server.address for server in self.core.registry.servers("test")], ["203.0.113.2"])
        self.assertEqual([target.known for target in self.core.poller.targets.values()], [False])


# --- Iceball ---------------------------------------------------------------------------------------------------------


# --- Hyperbol --------------------------------------------------------------------------------------------------------

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
    (185, 4, b"\xee" * 4),
    (189, 4, b"\xee" * 4),
    (193, 4, b"\xee" * 4),
    (197, 4, b"\xee" * 4),
    (201, 1, b"\xee"),
    (202, 20, b"\xee" * 20),
    (222, 3, b"\x03\x01\x02"),
    (225, 1, b"\x09"),
    (226, 1, b"\xee"),
    (227, 1, b"\xee"),
    (228, 1, b"\xee"),
)


def hyperbol_reply(**changed: bytes) -> bytes:
    """229 bytes by the table of offsets; o5=b"name" puts another value at offset 5."""
    reply = bytearray(229)
    for offset, size, value in HYPERBOL_REPLY:
        value = changed.get("o%d" % offset, value)
        reply[offset:offset + size] = value.ljust(size, b"\0")
    assert len(reply) == 229
    return bytes(reply)


class HyperbolTest(unittest.TestCase):

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
                    self.poller.datagram(hyperbol_reply(o1=query[1:], **self.answers[peer]), peer, self.now + 0.04)

    def get_list(self, filter: str = "ff000000", size: int = 8) -> bytes:
        session = self.hyperbol.session("203.0.113.50", self.now)
        greeting = session.opened(self.now)
        self.assertEqual((len(greeting), greeting[:4]), (12, b"HBSL"))
        answer = feed(session, greeting[4:8] + hexa(filter), size, self.now)
        self.assertTrue(session.done)
        return answer

    def players(self) -> int:
        return int.from_bytes(self.hyperbol.session("203.0.113.50", self.now).opened(self.now)[8:], "little")

    def test_reply_by_the_table_of_offsets(self) -> None:
        self.assertEqual(sum(size for _, size, _ in HYPERBOL_REPLY), 229)
        fields = ms.hyperbol_info(hyperbol_reply(), 0x11223344)
        self.assertEqual(
            fields,
            {
                "name": "Fun & Games",
                "mode": "Capture the Core",
                "map": "orbital",
                "version": "1.8a",
                "players": 5,
                "max_players": 16,
                "details": {"skill": "9", "flags": "0x8000000d", "factions": "IMF 3, Syndicate 1, Republic 2"},
            },
        )
        full = ms.hyperbol_info(hyperbol_reply(o5=b"n" * 32, o37=b"g" * 32, o72=b"m" * 64, o169=b"v" * 16), 0x11223344)
        self.assertEqual(
            [full[name] for name in ("name", "mode", "map", "version")], ["n" * 32, "g" * 32, "m" * 64, "v" * 16]
        )
        cut = ms.hyperbol_info(hyperbol_reply(o5=b"left\0right", o69=b"\xff", o70=b"\xfe"), 0x11223344)
        self.assertEqual((cut["name"], cut["players"], cut["max_players"]), ("left", 255, 254))

    def test_replies_that_are_none(self) -> None:
        for reply in (b"", hyperbol_reply()[:228], hyperbol_reply(o0=b"\x1a"), hyperbol_reply(o1=b"\x44\x33\x22\x10")):
            with self.assertRaises(ms.Malformed):
                ms.hyperbol_info(reply, 0x11223344)

    def test_list_as_the_document_lays_it_out(self) -> None:
        self.start("203.0.113.9:27888 3\n203.0.113.10:1 0")
        self.answers = {("203.0.113.9", 27888): {}, ("203.0.113.10", 1): {}}
        self.pass_time(1)
        official, other = hexa("cb007109 f06c0000 03 000000"), hexa("cb00710a 01000000 00 000000")
        for size in 1, 3, 8:
            self.assertEqual(self.get_list("00000000", size), official)
            self.assertEqual(self.get_list("ef000000", size), official)
            self.assertEqual(
                sorted([self.get_list("10000000", size)[:12], self.get_list("10000000", size)[12:]]),
                sorted([official, other]),
            )
            self.assertEqual(self.get_list("ff000000", size), self.get_list("10000000", size))
        self.assertEqual(self.players(), 10)

    def test_sessions_end(self) -> None:
        self.start()
        session = self.hyperbol.session("203.0.113.50", 0.0)
        greeting = session.opened(0.0)
        with self.assertRaises(ms.Malformed):
            session.receive(bytes([greeting[4] ^ 1]) + greeting[5:8] + hexa("ff000000"), 0.0)
        slow = self.hyperbol.session("203.0.113.50", 10.0)
        greeting = slow.opened(10.0)
        self.assertEqual(slow.wake_at, 15.0)
        slow.receive(greeting[4:8], 14.0)
        self.assertEqual((slow.tick(14.9), slow.done), (b"", False))
        self.assertEqual((slow.tick(15.0), slow.done), (b"", True))
        self.assertEqual(slow.receive(hexa("ff000000"), 15.1), b"")
        keys = {self.hyperbol.session("203.0.113.50", 0.0).opened(0.0)[4:8] for _ in range(20)}
        self.assertEqual(len(keys), 20)

    def test_an_announced_server_is_listed_while_it_answers(self) -> None:
        self.start()
        self.hyperbol.announce("203.0.113.9", 27888, {}, self.now)
        self.assertEqual(self.registry.heard["203.0.113.9", "hyperbol", 27888].outcome, "announced")
        self.pass_time(5)
        self.assertEqual(self.get_list(), b"")
        self.answers["203.0.113.9", 27888] = {}
        self.pass_time(30)
        [server] = self.registry.servers("hyperbol")
        self.assertEqual(
            (server.name, server.players, server.max_players, server.verified, server.flavor, server.ping_ms),
            ("Fun & Games", 5, 16, "query", 0, 40),
        )
        self.assertEqual(self.registry.heard["203.0.113.9", "hyperbol", 27888].outcome, "listed")
        self.answers["203.0.113.9", 27888] = {"o5": b"New name", "o69": b"\0"}
        self.pass_time(600)
        self.registry.expire(self.now)
        self.assertEqual((server.name, self.players(), len(self.registry.servers("hyperbol"))), ("New name", 0, 1))
        self.answers.clear()
        self.pass_time(60)                  # at most two polls have gone unanswered
        self.assertEqual(len(self.get_list()), 12)
        self.pass_time(40)
        self.assertEqual((self.get_list(), self.registry.servers("hyperbol"), self.poller.targets), (b"", [], {}))
        self.assertEqual(self.registry.heard["203.0.113.9", "hyperbol", 27888].outcome, "silent")

    def test_flavor_comes_from_the_ini_alone(self) -> None:
        self.start("203.0.113.9:27888 7")
        self.hyperbol.announce("203.0.113.9", 27888, {"flavor": 9}, self.now)
        self.hyperbol.announce("203.0.113.8", 27888, {"flavor": 9}, self.now)
        self.answers = {("203.0.113.9", 27888): {}, ("203.0.113.8", 27888): {}}
        self.pass_time(2)
        self.assertEqual({server.address: server.flavor for server in self.registry.servers("hyperbol")},
                         {"203.0.113.9": 7, "203.0.113.8": 0})
        self.hyperbol.read(ms.Settings({"hyperbol.servers": "203.0.113.8:27888 4"}))
        self.pass_time(31)
        self.assertEqual({server.address: server.flavor for server in self.registry.servers("hyperbol")},
                         {"203.0.113.9": 0, "203.0.113.8": 4})

    def test_a_known_server_that_does_not_answer(self) -> None:
        self.start("203.0.113.9:27888 1")
        self.pass_time(8)
        [server] = self.registry.servers("hyperbol")
        self.assertEqual((server.responding, server.name, server.flavor), (False, "203.0.113.9:27888", 1))
        self.assertEqual((self.get_list(), self.registry.census["hyperbol"]), (b"", [0, 0, 0]))
        self.assertEqual(self.registry.heard["203.0.113.9", "hyperbol", 27888].outcome, "silent")
        self.answers["203.0.113.9", 27888] = {}
        self.pass_time(40)
        self.assertEqual((server.responding, self.players(), self.registry.census["hyperbol"]), (True, 5, [1, 5, 5]))
        self.answers.clear()
        self.pass_time(150)
        self.assertEqual(
            (server.responding, self.players(), self.get_list(), self.registry.census["hyperbol"]),
            (False, 0, b"", [0, 0, 0]),
        )
        self.assertEqual(server.name, "Fun & Games")

    def test_the_ini_knows_no_limit(self) -> None:
        self.start("\n".join("203.0.113.9:%d" % port for port in range(1, 41)))
        self.answers = {("203.0.113.9", port): {} for port in range(1, 41)}
        self.pass_time(10)
        self.assertEqual(len(self.get_list()), 40 * 12)

    def test_refused(self) -> None:
        self.start(server__refuse_names="casino")
        self.registry.rules.bans.update({ms.read_network("198.51.100.0/24"): "fake players"})
        for source, outcome in (("198.51.100.7", "banned"), ("2001:db8::1", "bad packet")):
            with self.assertRaises(ms.Refused) as caught:
                self.hyperbol.announce(source, 27888, {}, 0.0)
            self.assertEqual(caught.exception.outcome, outcome)
        for port in range(1, 33):
            self.hyperbol.announce("203.0.113.9", port, {}, 0.0)
        self.hyperbol.announce("203.0.113.9", 32, {}, 0.0)
        with self.assertRaises(ms.Refused) as caught:
            self.hyperbol.announce("203.0.113.9", 33, {}, 0.0)
        self.assertEqual(caught.exception.outcome, "limit")
        self.answers["203.0.113.9", 1] = {}
        self.pass_time(30)
        self.answers["203.0.113.9", 1] = {"o5": b"Casino"}
        self.pass_time(60)
        self.assertEqual(
            (self.registry.servers(), self.registry.heard["203.0.113.9", "hyperbol", 1].outcome), ([], "name")
        )
        self.assertNotIn(("203.0.113.9", 1), self.poller.targets)

    def test_behind_the_same_router(self) -> None:
        self.start("198.51.100.1:27888 5")
        self.registry.rules.address_map["192.168.1.5"] = "198.51.100.1"
        self.hyperbol.announce("192.168.1.5", 27888, {}, 0.0)
        self.answers["192.168.1.5", 27888] = {}
        self.pass_time(2)
        self.assertEqual(self.get_list(), hexa("c6336401 f06c0000 05 000000"))

    def test_a_restored_server_is_polled_again(self) -> None:
        self.start()
        server = ms.Server("hyperbol", "203.0.113.9", 27888, "203.0.113.9", 0.0, 60.0)
        server.unconfirmed = True
        self.registry.insert(server, {"name": "Restored"})
        self.answers["203.0.113.9", 27888] = {}
        self.pass_time(2)
        self.assertEqual((server.name, server.unconfirmed, server.lifetime), ("Fun & Games", False, float("inf")))

    def test_500_servers_of_which_150_are_no_good(self) -> None:
        places = [(address_of(number), 20000 + number) for number in range(500)]
        silent, garbage, late, elsewhere = places[:100], places[100:120], places[120:135], places[135:150]
        self.start("\n".join("%s:%d %d" % (address, port, number % 3) for number, (address, port) in enumerate(places)))
        strays: List[Tuple[float, bytes, Tuple[str, int]]] = []
        rejected = 0
        for second in range(1, 31):
            self.now = float(second)
            self.hyperbol.tick(self.now)
            queries = self.poller.tick(self.now)
            self.assertLessEqual(len(queries), 50)
            for query, peer in queries:
                number = places.index(peer)
                reply = hyperbol_reply(o1=query[1:], o5=b"Server %d" % number, o69=bytes([number % 17]))
                if peer in garbage:
                    reply = (b"", b"\x1b", reply[:100], reply[:1] + b"\0\0\0\0" + reply[5:], bytes(229))[number % 5]
                if peer in late:
                    strays.append((self.now + 9.0, reply, peer))
                elif peer in elsewhere:
                    strays.append((self.now, reply, (peer[0], peer[1] + 1)))
                elif peer not in silent:
                    strays.append((self.now, reply, peer))
            for when, reply, peer in strays:
                if when <= self.now:
                    try:
                        self.poller.datagram(reply, peer, self.now + 0.001 * (peer[1] - 20000))
                    except ms.Malformed:
                        rejected += 1
            strays = [stray for stray in strays if stray[0] > self.now]
        self.assertGreaterEqual(rejected, 50)
        listed = [server for server in self.registry.servers("hyperbol") if server.responding]
        self.assertEqual({(server.address, server.port) for server in listed}, set(places[150:]))
        self.assertEqual(len(self.registry.servers("hyperbol")), 500)
        self.assertEqual(len(self.get_list()), 350 * 12)
        self.assertEqual(self.players(), sum(number % 17 for number in range(150, 500)))
        for server in listed:
            number = server.port - 20000
            self.assertEqual(
                (server.name, server.players, server.flavor), ("Server %d" % number, min(number % 17, 16), number % 3)
            )
            self.assertAlmostEqual(server.ping_ms or 0, number, delta=1)
        self.pass_time(150)                                         # now all of them are silent
        self.assertEqual((self.get_list(), self.players()), (b"", 0))

    def test_fuzz(self) -> None:
        self.start("203.0.113.9:27888 1")
        chance = random.Random(3)
        self.pass_time(1)
        target = self.poller.targets["203.0.113.9", 27888]
        for number in range(6000):
            self.poller.ask(target, self.now)
            seed = (
                hyperbol_reply(o1=struct.pack("<I", target.nonce)),
                b"HBSL" + bytes(8),
                hexa("cb007109 f06c0000 03 000000"),
            )[number % 3]
            data = bytearray(seed)
            for _ in range(chance.randrange(4)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            cut = chance.random() < 0.3
            data = data[:chance.randrange(len(data) + 1)] if cut else data + bytes(chance.randrange(3))
            session = self.hyperbol.session("203.0.113.50", self.now)
            session.opened(self.now)
            packet = bytes(data)
            for entry, arguments in ((self.poller.datagram, (packet, ("203.0.113.9", 27888), self.now)),
                                     (session.receive, (packet, self.now)),
                                     (ms.hyperbol_greeting, (packet,)), (ms.hyperbol_entries, (packet,))):
                try:
                    entry(*arguments)
                except ms.Malformed:
                    pass


# --- SubSpace --------------------------------------------------------------------------------------------------------


# --- AIO -------------------------------------------------------------------------------------------------------------


# --- Web -------------------------------------------------------------------------------------------------------------

NASTY_NAMES = (
    "<script>alert(1)</script>",
    "]]><server/>",
    "\"'&amp;&lt;",
    "\x00\x01\x0b\x1f\x7f\x85\ufffe\uffff",
    "\ud800 lone",
    "\u202egnp.exe",
    "a\\u0000\\",
    "😀 ünï",
    "--><!--",
    "%s%n{}$name",
)


class AnnounceTest(unittest.TestCase):

    def setUp(self) -> None:
        self.core = make_core(games__mygame="My Game", games__other="Other", limits__requests="1000000")
        self.registry = self.core.registry
        self.hyperbol = ms.Hyperbol(self.core)
        self.web = ms.Web(self.core)
        self.web.epoch = 1.7e9

    def request(
        self, head: str, body: bytes = b"", address: str = "203.0.113.9", now: float = 0.0
    ) -> Tuple[int, Dict[str, str], bytes]:
        session = self.web.session(address, now)
        response = session.receive(head.replace("\n", "\r\n").encode() + b"\r\nHost: x\r\n\r\n" + body, now)
        top, _, rest = response.partition(b"\r\n\r\n")
        lines = top.decode("ascii").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:])
        self.assertEqual(headers["Length"], str(len(rest)))
        return int(lines[0].split()[1]), headers, rest

    def post(
        self, body: Any, type: str = "", address: str = "203.0.113.9", now: float = 0.0
    ) -> Tuple[int, Dict[str, Any]]:
        if isinstance(body, dict):
            body, type = json.dumps(body).encode(), "application/json"
        status, headers, rest = self.request("POST /announce HTTP/1.1\nContent-Length: %d\nContent-Type: %s" % (
            len(body), type or "application/x-www-form-urlencoded"), body, address, now)
        self.assertEqual(headers["Content-Type"], "application/json; charset=utf-8")
        self.assertEqual(headers["Cache-Control"], "no-store")
        return status, json.loads(rest)

    def test_an_own_game(self) -> None:
        form = b"game=mygame&port=4000&name=My+server&players=3&max_players=8&mode=duel&map=m1&version=2&description=Hi"
        self.assertEqual(self.post(form), (200, {"listed": True, "ttl": 120}))
        [server] = self.registry.servers("mygame")
        told = "address", "port", "name", "players", "max_players", "mode", "map", "version", "description", "verified"
        self.assertEqual(
            tuple(getattr(server, name) for name in told),
            ("203.0.113.9", 4000, "My server", 3, 8, "duel", "m1", "2", "Hi", "self-reported"),
        )
        self.assertEqual(self.post({"game": "mygame", "port": 4000, "players": 4, "version": 3}, now=100.0)[0], 200)
        self.assertEqual((server.name, server.players, server.version), ("My server", 4, "3"))
        self.registry.expire(219.0)
        self.assertEqual(len(self.registry.servers("mygame")), 1)
        self.registry.expire(220.0)
        self.assertEqual(self.registry.servers("mygame"), [])
        self.post({"game": "mygame", "port": 4000}, address="2001:db8::1", now=220.0)
        self.assertEqual(self.registry.servers("mygame")[0].name, "[2001:db8::1]:4000")

    def test_hyperbol_waits_for_its_answer(self) -> None:
        status, answer = self.post({"game": "hyperbol", "port": 27888, "name": "claimed", "flavor": 5})
        self.assertEqual((status, answer), (200, {"listed": False, "ttl": 120,
                                                  "reason": "waiting for its answer to a query on UDP port 27888"}))
        [(query, peer)] = self.core.poller.tick(1.0)
        self.assertEqual((query[:1], len(query), peer), (b"\2", 5, ("203.0.113.9", 27888)))
        self.core.poller.datagram(hyperbol_reply(o1=query[1:]), peer, 1.1)
        self.assertEqual(self.post({"game": "hyperbol", "port": 27888})[1], {"listed": True, "ttl": 120})
        self.assertEqual(self.registry.servers("hyperbol")[0].name, "Fun & Games")

    def test_stop_only_from_the_same_address(self) -> None:
        for game, port in (("mygame", 4000), ("hyperbol", 27888)):
            self.post({"game": game, "port": port})
            self.assertEqual(self.post({"game": game, "port": port, "action": "stop"}, address="203.0.113.8")[0], 404)
        self.assertEqual(len(self.registry.servers("mygame")), 1)
        self.assertEqual(
            self.post(b"game=mygame&port=4000&action=stop"), (200, {"listed": False, "ttl": 120, "reason": "stopped"})
        )
        self.assertEqual(self.registry.servers(), [])
        self.assertEqual(self.post(b"game=hyperbol&port=27888&action=stop")[0], 200)        # not listed yet
        self.assertEqual(self.core.poller.tick(1.0), [])
        self.post({"game": "hyperbol", "port": 27888}, now=1.0)
        [(query, peer)] = self.core.poller.tick(2.0)
        self.core.poller.datagram(hyperbol_reply(o1=query[1:]), peer, 2.1)
        self.assertEqual(len(self.registry.servers("hyperbol")), 1)
        self.assertEqual(self.post(b"game=hyperbol&port=27888&action=stop", now=3.0)[0], 200)
        self.assertEqual((self.registry.servers("hyperbol"), self.core.poller.targets), ([], {}))

    def test_stop_does_not_reach_behind_a_router(self) -> None:
        self.registry.rules.address_map["192.168.1.5"] = "203.0.113.9"
        self.post({"game": "mygame", "port": 4000}, address="192.168.1.5")
        self.assertEqual(self.post(b"game=mygame&port=4000&action=stop", address="203.0.113.9")[0], 404)
        self.assertEqual([server.address for server in self.registry.servers("mygame")], ["203.0.113.9"])
        self.assertEqual(self.post(b"game=mygame&port=4000&action=stop", address="192.168.1.5")[0], 200)

    def test_errors_in_words(self) -> None:
        for body, type, status, words in (
                (b"", "", 400, "game: one of hyperbol, mygame, other is wanted, not ''"),
                (b"game=iceball&port=1", "", 400, "not 'iceball'"),
                (b"game=mygame", "", 400, "port: a number from 1 to 65535"),
                (b"game=mygame&port=0", "", 400, "port"),
                (b"game=mygame&port=65536", "", 400, "port"),
                (b"game=mygame&port=1e3", "", 400, "port"),
                (b'{"game":"mygame","port":true}', "application/json", 400, "port"),
                (b'{"game":"mygame","port":1,"players":-1}', "application/json", 400, "players"),
                (b'{"game":"mygame","port":1,"name":["x"]}', "application/json", 400, "name is not a text"),
                (b'{"game":"mygame","port":1,"action":"jump"}', "application/json", 400, "action"),
                (b'["game"]', "application/json", 400, "object"),
                (b'{"game":', "application/json; charset=utf-8", 400, "JSON"),
                (b"\xff\xfe{}", "application/json", 400, "JSON"),
                (b"[" * 16000, "application/json", 400, "JSON"),
                (b'{"port":' + b"9" * 16000 + b"}", "application/json", 400, ""),
                (b"&".join(b"a=1" for _ in range(60)), "", 400, "form"),
                (b"<x/>", "text/xml", 415, "application/json"),
                (b"x", "multipart/form-data; boundary=x", 415, "form")):
            with self.subTest(body=body[:60]):
                found, answer = self.post(body, type)
                self.assertEqual((found, answer["listed"]), (status, False))
                self.assertIn(words, answer["reason"])
        self.assertEqual(self.registry.servers(), [])
        self.assertEqual(self.registry.heard["203.0.113.9", "mygame", 1].outcome, "bad packet")

    def test_refused_with_the_right_status(self) -> None:
        self.registry.rules.bans[ms.read_network("198.51.100.0/24")] = "fake players"
        self.registry.rules.refuse_names = (ms.read_pattern("casino"),)
        for game in "mygame", "hyperbol":
            self.assertEqual(
                self.post({"game": game, "port": 1}, address="198.51.100.1"),
                (403, {"listed": False, "reason": "fake players"}),
            )
        self.assertEqual(self.post({"game": "mygame", "port": 1, "name": "A Casino"})[0], 403)
        for port in range(1, 33):
            self.assertEqual(self.post({"game": "mygame", "port": port})[0], 200)
        self.assertEqual(self.post({"game": "mygame", "port": 33})[0], 429)

    def test_methods_and_sizes(self) -> None:
        for head, status in (
            ("GET /announce HTTP/1.1", 405),
            ("HEAD /announce HTTP/1.1", 405),
            ("PUT /announce HTTP/1.1\nContent-Length: 0", 405),
            ("POST /announce HTTP/1.1", 411),
            ("POST /announce HTTP/1.1\nContent-Length: 16385", 413),
            ("POST /announce HTTP/1.1\nContent-Length: 2\nContent-Encoding: gzip", 415),
        ):
            with self.subTest(head=head):
                if head.startswith("HEAD"):
                    session = self.web.session("203.0.113.9", 0.0)
                    self.assertIn(b" 405 ", session.receive(b"HEAD /announce HTTP/1.1\r\nHost: x\r\n\r\n", 0.0))
                    continue
                found, headers, body = self.request(head, b"{}" if "gzip" in head else b"")
                self.assertEqual(found, status)
                self.assertTrue(body.strip())
                if status == 405:
                    self.assertEqual(headers["Allow"], "POST, OPTIONS")

    def test_names_made_to_break_things(self) -> None:
        for number, name in enumerate(NASTY_NAMES):
            self.assertEqual(self.post({"game": "mygame", "port": 100 + number, "name": name, "map": name})[0], 200)
            self.registry.hear("hyperbol", "203.0.113.7", 100 + number, "127.0.0.1", 0.0, float("inf"),
                               ms.hyperbol_info(hyperbol_reply(o5=name.encode("utf-8", "replace")[:32]), 0x11223344))
            self.registry.hear(
                "iceball", "203.0.113.7", 100 + number, "127.0.0.1", 0.0, 120.0, {"name": ms.clean(name)}
            )
        for path in (
            "/servers.xml",
            "/servers.xml?game=hyperbol",
            "/servers.xml?game=mygame",
            "/servers.xml?game=iceball",
        ):
            status, headers, body = self.request("GET %s HTTP/1.1" % path, now=1.0)
            self.assertEqual((status, headers["Content-Type"]), (200, "application/xml; charset=utf-8"))
            servers = xml.dom.minidom.parseString(body).getElementsByTagName("server")
            self.assertEqual(len(servers), len(NASTY_NAMES))
            names = {server.getAttribute("servername") for server in servers}
            self.assertTrue(
                {"<script>alert(1)</script>", "]]><server/>", "\"'&amp;&lt;", "😀 ünï", "--><!--"} <= names, names
            )
            self.assertFalse(set(body.decode("utf-8")) & set("\0\1\x0b\x1f\x7f\x85\ufffe\uffff\u202e"))
        self.assertEqual(
            len(json.loads(self.request("GET /master.json HTTP/1.1", now=1.0)[2])["servers"]), len(NASTY_NAMES)
        )
        page = self.request("GET / HTTP/1.1", now=1.0)[2]
        self.assertNotIn(b"<script>alert", page)
        self.assertIn(b"&lt;script&gt;alert(1)", page)

    def test_servers_xml(self) -> None:
        self.registry.hear("hyperbol", "203.0.113.7", 27888, "203.0.113.7", 0.0, float("inf"), dict(
            ms.hyperbol_info(hyperbol_reply(), 0x11223344), flavor=3, ping_ms=41))
        self.registry.hear(
            "hyperbol", "203.0.113.8", 27888, "203.0.113.8", 0.0, float("inf"), {"name": "x", "responding": False}
        )
        body = self.request("GET /servers.xml HTTP/1.1", now=1.0)[2]
        root = xml.dom.minidom.parseString(body).documentElement
        self.assertEqual((root.tagName, sorted(root.attributes.keys()), root.getAttribute("gmtime")),
                         ("serverlist", ["gmtime", "localtime"], "2023-11-14T22:13:21+00:00"))
        self.assertEqual(
            [dict(server.attributes.items()) for server in root.getElementsByTagName("server")],
            [
                {
                    "ip": "203.0.113.7",
                    "port": "27888",
                    "responding": "1",
                    "servername": "Fun & Games",
                    "gametype": "Capture the Core",
                    "playercount": "5",
                    "maxplayercount": "16",
                    "mapname": "orbital",
                    "version": "1.8a",
                    "skill": "9",
                    "flavor": "3",
                    "ping_milliseconds": "41",
                },
                {"ip": "203.0.113.8", "port": "27888", "responding": "0"},
            ],
        )
        self.assertEqual(self.request("GET /servers.xml?game=nothing HTTP/1.1", now=1.0)[0], 404)

    def test_fuzz(self) -> None:
        chance = random.Random(4)
        seeds = (
            (
                b"game=mygame&port=4000&name=My+server%20%C3%BC&players=3&action=stop",
                "application/x-www-form-urlencoded",
            ),
            (
                b'{"game":"hyperbol","port":27888,"players":5,"name":"\\ud83d\\ude00\\u0000","version":1.5e3}',
                "application/json",
            ),
        )
        for number in range(4000):
            seed, type = seeds[number % 2]
            data = bytearray(seed)
            for _ in range(chance.randrange(4)):
                data[chance.randrange(len(data))] = chance.choice(b'\0"{}[],:=&%\\+eE-0129\xff')
            status, answer = self.post(bytes(data), type)
            self.assertIn(status, (200, 400, 404, 429))
            self.assertIn("listed", answer)


# --- Event loop and whole program ------------------------------------------------------------------------------------


# --- Client tools ----------------------------------------------------------------------------------------------------

class GameServers:
    """Hyperbol game servers on loopback, in a thread: each answers as `replies` says, by its port; None is silent."""

    def __init__(self, replies: Sequence[Optional[Dict[str, bytes]]]) -> None:
        self.sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in replies]
        self.replies = {}
        for sock, reply in zip(self.sockets, replies):
            sock.bind(("127.0.0.1", 0))
            self.replies[sock] = reply
        self.ports = [sock.getsockname()[1] for sock in self.sockets]
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while not self.ended.is_set():
            for sock in select.select(self.sockets, [], [], 0.05)[0]:
                query, peer = sock.recvfrom(64)
                if len(query) == 5 and query[0] == 2 and self.replies[sock] is not None:
                    sock.sendto(hyperbol_reply(o1=query[1:], **self.replies[sock]), peer)

    def __enter__(self) -> GameServers:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.ended.set()
        self.thread.join()
        for sock in self.sockets:
            sock.close()


class MasterOf:
    """A master that writes fixed bytes to one client: a greeting, and a list if the key comes back."""

    def __init__(self, greeting: bytes, listing: bytes = b"") -> None:
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.place = "127.0.0.1:%d" % self.sock.getsockname()[1]
        self.greeting, self.listing = greeting, listing
        self.request = b""
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        with self.sock.accept()[0] as sock:
            sock.sendall(self.greeting)
            self.request = sock.recv(64)
            if self.request:
                sock.sendall(self.listing)

    def __enter__(self) -> MasterOf:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.thread.join(10)
        self.sock.close()


def entry(address: str, port: int, flavor: int) -> bytes:
    return bytes(map(int, address.split("."))) + struct.pack("<IB", port, flavor) + bytes(3)


class ExportTest(unittest.TestCase):

    greeting = b"HBSL" + hexa("efbeadde 07000000")

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.output = os.path.join(folder.name, "servers.xml")
        patch = unittest.mock.patch.object(ms, "EXPORT_ROUND_S", 0.05)
        patch.start()
        self.addCleanup(patch.stop)

    def export(self, *arguments: str) -> Tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = ms.main(["export", *arguments, "--output", self.output])
            except SystemExit as ended:
                status = int(ended.code or 0)
        return status, out.getvalue(), err.getvalue()

    def exported(self) -> List[Dict[str, str]]:
        with open(self.output, "rb") as file:
            root = xml.dom.minidom.parse(file).documentElement
        return [dict(server.attributes.items()) for server in root.getElementsByTagName("server")]

    def test_list_queries_file(self) -> None:
        replies = [None if number % 10 == 0 else {"o5": b"<%d>" % number} for number in range(60)]
        with GameServers(replies) as game:
            listing = b"".join(entry("127.0.0.1", port, number % 4) for number, port in enumerate(game.ports))
            listing += entry("127.0.0.1", 70000, 1) + entry("255.255.255.255", 5, 1) + b"\1\2\3"
            with MasterOf(self.greeting, listing) as master:
                began = time.monotonic()
                with unittest.mock.patch.object(ms, "EXPORT_ROUND_S", 0.5):
                    status, out, err = self.export("--game", "hyperbol", master.place)
                took = time.monotonic() - began
            self.assertEqual((status, err, master.request), (0, "", hexa("efbeadde ff000000")))
        self.assertEqual(out, "62 servers, 54 of them responding, 270 players: %s written.\n" % self.output)
        self.assertLess(took, 3.0)  # one after the other, the silent ones alone take 8 rounds
        servers = self.exported()
        self.assertEqual([server["port"] for server in servers], [str(port) for port in game.ports] + ["70000", "5"])
        self.assertEqual(servers[10], {"ip": "127.0.0.1", "port": str(game.ports[10]), "responding": "0"})
        self.assertEqual(
            {name: servers[11][name] for name in ("servername", "skill", "flavor", "mapname", "responding")},
            {"servername": "<11>", "skill": "9", "flavor": "3", "mapname": "orbital", "responding": "1"},
        )
        self.assertLess(int(servers[11]["ping_milliseconds"]), 500)
        self.assertEqual(os.listdir(self.folder), ["servers.xml"])

    def test_failures(self) -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            status, _, err = self.export("127.0.0.1:%d" % closed.getsockname()[1])
        self.assertEqual(status, 3)
        self.assertIn("No list from 127.0.0.1", err)
        for greeting in b"SSH-2.0-x\r\n\r\n", b"HBSL", b"":
            with MasterOf(greeting, b"") as master:
                if len(greeting) < 12:
                    master.sock.settimeout(5)
                    with unittest.mock.patch.object(ms, "EXPORT_CONNECT_S", 0.2):
                        status, _, err = self.export(master.place)
                    self.assertEqual(status, 3)
                else:
                    status, _, err = self.export(master.place)
                    self.assertEqual(status, 4)
                    self.assertIn("is not a Hyperbol master", err)
        with MasterOf(self.greeting) as master:
            status, _, err = self.export(master.place)
        self.assertEqual(status, 6)
        self.assertIn("is empty", err)
        self.assertFalse(os.path.exists(self.output))
        os.mkdir(self.output)
        with MasterOf(self.greeting, entry("127.0.0.1", 70000, 1)) as master:
            status, _, err = self.export(master.place)
        self.assertEqual(status, 7)
        self.assertIn("servers.xml cannot be written", err)
        self.assertEqual(os.listdir(self.folder), ["servers.xml"])

    def test_usage(self) -> None:
        for arguments, words in (
            (["a:b"], "HOST:PORT"),
            (["x", "--every", "soon"], "a number is wanted"),
            ([], "HOST[:PORT]"),
            (["x", "--ftp", "ftp://u:secret@h/"], "MASTERSERVER_FTP_PASSWORD"),
            (["x", "--ftp", "http://h/"], "--ftp"),
            (["x", "--ftp", "ftp://h:port/"], "--ftp"),
        ):
            with self.subTest(arguments=arguments):
                status, _, err = self.export(*arguments)
                self.assertEqual(status, 2)
                self.assertIn(words, err)

    def test_password_from_netrc(self) -> None:
        place = ms.FtpPlace("ftp://user@h.example:2121/a/b%20c/", "servers.xml")
        self.assertEqual(
            (place.host, place.port, place.folder, place.name, place.user),
            ("h.example", 2121, "a/b c", "servers.xml", "user"),
        )
        self.assertEqual(ms.FtpPlace("ftp://h.example/%2Fsrv/list.xml", "x").folder, "/srv")
        path = os.path.join(self.folder, ".netrc")
        with open(path, "w", encoding="ascii") as file:
            file.write("machine h.example login user password secret\n")
        os.chmod(path, 0o600)
        home = {"HOME": self.folder, "USERPROFILE": self.folder}
        with unittest.mock.patch.dict(os.environ, home):
            os.environ.pop("MASTERSERVER_FTP_PASSWORD", None)
            self.assertEqual(place.login(), ("user", "secret"))
            self.assertEqual(ms.FtpPlace("ftp://h.example/", "x").login(), ("user", "secret"))
            self.assertEqual(ms.FtpPlace("ftp://else.example/", "x").login(), ("anonymous", ""))
            with self.assertRaises(ms.ToolError):
                ms.FtpPlace("ftp://other@h.example/", "x").login()
            os.environ["MASTERSERVER_FTP_PASSWORD"] = "more"
            self.assertEqual(place.login(), ("user", "more"))

    def test_every(self) -> None:
        with MasterOf(self.greeting, entry("127.0.0.1", 70000, 1)) as master, \
                unittest.mock.patch.object(ms.time, "sleep") as sleep:
            sleep.side_effect = [None, KeyboardInterrupt]  # the second round finds no master, and that does not end it
            with unittest.mock.patch.object(ms, "EXPORT_CONNECT_S", 0.2):
                status, out, err = self.export(master.place, "--every", "300")
        self.assertEqual((status, sleep.call_count, sleep.call_args[0]), (0, 2, (300.0,)))
        self.assertIn("1 servers, 0 of them responding", out)
        self.assertIn("No list from", err)

    def upload(self, command: Sequence[str], port: int, cases: Sequence[Tuple[str, str, int]]) -> None:
        """Start an FTP server, export to each URL with each password, and compare the exit status."""
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            def answers() -> bool:
                with socket.socket() as sock:
                    return sock.connect_ex(("127.0.0.1", port)) == 0
            eventually(answers, 10.0)
            for password, url, expected in cases:
                environment = {name: value for name, value in os.environ.items() if name != "MASTERSERVER_FTP_PASSWORD"}
                environment.update(
                    {"MASTERSERVER_FTP_PASSWORD": password} if password else {},
                    HOME=self.folder,
                    USERPROFILE=self.folder,
                )
                with MasterOf(self.greeting, entry("127.0.0.1", 70000, 1)) as master, \
                        unittest.mock.patch.dict(os.environ, environment, clear=True):
                    status, out, err = self.export(master.place, "--ftp", url % port)
                self.assertEqual(status, expected, err)
                self.assertIn("uploaded to 127.0.0.1" if expected == 0 else "The upload to 127.0.0.1", out + err)
        finally:
            server.terminate()
            server.wait(10)
        with open(os.path.join(self.folder, "ftp", "lists", "servers.xml"), "rb") as file:
            self.assertIn(b'<server ip="127.0.0.1" port="70000" responding="0"/>', file.read())

    def ftp_folder(self) -> Tuple[str, int]:
        """A folder for an FTP server to serve, and a port that is free."""
        root = os.path.join(self.folder, "ftp")
        os.makedirs(os.path.join(root, "lists"))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return root, free.getsockname()[1]

    @unittest.skipUnless(importlib.util.find_spec("pyftpdlib"), "pyftpdlib is not installed")
    def test_upload_to_pyftpdlib(self) -> None:
        root, port = self.ftp_folder()
        # Without its three seconds of thought after a wrong password
        program = """if True:
            from pyftpdlib import authorizers, handlers, servers
            handlers.FTPHandler.auth_failed_timeout = 0
            handlers.FTPHandler.authorizer = authorizers.DummyAuthorizer()
            handlers.FTPHandler.authorizer.add_user("user", "secret", %r, perm="elradfmwMT")
            servers.FTPServer(("127.0.0.1", %d), handlers.FTPHandler).serve_forever()""" % (root, port)
        self.upload([sys.executable, "-W", "ignore", "-c", program], port, (
            ("secret", "ftp://user@127.0.0.1:%d/lists/", 0), ("wrong", "ftp://user@127.0.0.1:%d/lists/", 8),
            ("secret", "ftp://user@127.0.0.1:%d/nowhere/", 8), ("secret", "ftp://user@127.0.0.1:%d/a%%0Ab", 8)))

    @unittest.skipUnless(
        shutil.which("vsftpd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin"),
        "vsftpd is not installed",
    )
    def test_upload_to_vsftpd(self) -> None:
        root, port = self.ftp_folder()
        config = os.path.join(self.folder, "vsftpd.conf")
        with open(config, "w", encoding="ascii") as file:
            file.write(
                "listen=YES\nlisten_address=127.0.0.1\nlisten_port=%d\nbackground=NO\nrun_as_launching_user=YES\n"
                "seccomp_sandbox=NO\nanonymous_enable=YES\nlocal_enable=NO\nwrite_enable=YES\n"
                "anon_upload_enable=YES\nanon_other_write_enable=YES\n"
                "connect_from_port_20=NO\nanon_root=%s\n" % (port, root)
            )
        program = shutil.which("vsftpd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin") or ""
        self.upload(
            [program, config],
            port,
            (
                ("", "ftp://127.0.0.1:%d/lists/", 0),
                ("", "ftp://127.0.0.1:%d/lists/servers.xml", 0),
                ("", "ftp://127.0.0.1:%d/nowhere/", 8),
                ("x", "ftp://user@127.0.0.1:%d/lists/", 8),
            ),
        )


def python2() -> str:
    """A Python 2 that runs, or nothing."""
    pyenv = os.path.expanduser("~/.pyenv/versions")
    versions = sorted(name for name in os.listdir(pyenv) if name.startswith("2.7")) if os.path.isdir(pyenv) else []
    for name in ["python2.7", "python2"] + [os.path.join(pyenv, version, "bin", "python") for version in versions]:
        try:
            if subprocess.run([name, "-c", ""], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0:
                return name
        except OSError:
            pass
    return ""


class HyperbolProgramTest(unittest.TestCase):
    """The list over real sockets, as deployed clients fetch it."""

    def test_2000_servers_through_a_slow_reader(self) -> None:
        server = ms.MasterServer(
            {"server.bind": "127.0.0.1", "hyperbol.port": "0", "iceball.port": "", "http.ports": ""}
        )
        server.bind()
        for number in range(2000):
            server.registry.hear(
                "hyperbol",
                "10.1.%d.%d" % (number // 250, number % 250 + 1),
                27888,
                "127.0.0.1",
                0.0,
                float("inf"),
                {"name": "Server %d" % number, "players": 2, "flavor": number % 2},
            )
        with server:
            port = next(listener.port for listener in server.listeners if listener.protocol == "hyperbol")
            for filter, count in ((b"\0\0\0\0", 1000), (b"\x10\0\0\0", 2000), (b"\xff\0\0\0", 2000)):
                with socket.socket() as sock:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                    sock.settimeout(10)
                    sock.connect(("127.0.0.1", port))
                    greeting = sock.recv(12)
                    self.assertEqual((greeting[:4], greeting[8:]), (b"HBSL", struct.pack("<I", 4000)))
                    sock.sendall(greeting[4:8] + filter)
                    data = b""
                    while True:
                        part = sock.recv(256)
                        if not part:
                            break
                        data += part
                addresses = {data[i:i + 4] for i in range(0, len(data), 12)}
                self.assertEqual((len(data), len(addresses)), (count * 12, count))

    def test_a_protocol_on_several_sockets_polls_once_and_both_families(self) -> None:
        try:
            there = [ms.bound_socket(family, "udp", address, 0)
                     for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))]
        except OSError as error:
            self.skipTest("no IPv6 here: %s" % error)
        known = "127.0.0.1:%d\n[::1]:%d" % (there[0].getsockname()[1], there[1].getsockname()[1])
        server = ms.MasterServer(
            {
                "server.bind": "127.0.0.1, 127.0.0.1, ::1",
                "hyperbol.port": "0",
                "iceball.port": "",
                "http.ports": "",
                "hyperbol.servers": known,
            }
        )
        server.bind()
        self.addCleanup(server.close)
        server.tick(0.0)
        for sock in there:
            query, _ = sock.recvfrom(64)
            self.assertEqual((len(query), query[0]), (5, 2))
            with self.assertRaises(BlockingIOError):
                sock.recvfrom(64)
            sock.close()

    def test_the_script_in_the_document(self) -> None:
        document = os.path.join(HERE, "..", "shared", "seeds", "001_6d526d683ba8a068.txt")
        if not os.path.exists(document):
            self.skipTest("the protocol document is not here")
        python = python2()
        if not python:
            self.skipTest("there is no Python 2 here")
        with open(document, encoding="utf-8") as file:
            text = file.read()
        script = text[text.index("import socket\nimport sys"):text.index("\nMaster Server Protocol (last edited")]
        host = "127.0.0.203"  # its port is written into the script, so the address is our own
        try:
            ms.bound_socket(socket.AF_INET, "tcp", host, 20203).close()
        except OSError as error:
            self.skipTest("%s port 20203 cannot be had: %s" % (host, error))
        names = [b"Fun & Games", b"<b>", b"\xe9t\xe9 \"'"[:5].decode("cp1252").encode("utf-8"), b"four"]
        with GameServers([{"o5": name} for name in names]) as game, tempfile.TemporaryDirectory() as folder:
            known = "\n".join("127.0.0.1:%d %d" % (port, number) for number, port in enumerate(game.ports))
            with RunningServer(server__bind=host, hyperbol__port="20203", hyperbol__servers=known):
                def listed() -> bool:
                    with socket.create_connection((host, 20203), 5) as sock:
                        sock.sendall(sock.recv(12)[4:8] + b"\xff\0\0\0")
                        return len(sock.recv(65536)) == 48
                eventually(listed, 10.0)
                path = os.path.join(folder, "script.py")
                with open(path, "w", encoding="utf-8") as file:
                    file.write(
                        "# -*- coding: utf-8 -*-\n"
                        + script.replace("HOST = 'hbms.datavertex.com'", "HOST = '%s'" % host)
                    )
                process = subprocess.Popen(
                    [python, "-u", path], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
                assert process.stdout is not None
                output = []
                try:
                    for line in process.stdout:
                        output.append(line)
                        if line.startswith(b"Waiting for 5 minutes"):
                            break
                finally:
                    process.kill()
                    process.wait()
                    process.stdout.close()
            self.assertIn(b"Players Playing: 20\n", output)
            with open(os.path.join(folder, "servers.xml"), "rb") as result:
                servers = xml.dom.minidom.parse(result).getElementsByTagName("server")
            self.assertEqual(
                sorted(
                    (int(server.getAttribute("port")), server.getAttribute("responding"), server.getAttribute("flavor"))
                    for server in servers
                ),
                sorted((port, "1", str(number)) for number, port in enumerate(game.ports)),
            )

    def test_announced_over_http_and_polled(self) -> None:
        with GameServers([{}]) as game, RunningServer(hyperbol__port="0", games__mygame="My Game") as server:
            def post(body: str) -> Tuple[int, Dict[str, Any]]:
                request = urllib.request.Request("http://127.0.0.1:%d/announce" % server.port("http"), body.encode())
                with urllib.request.urlopen(request, timeout=5) as response:
                    return response.status, json.load(response)
            began = time.monotonic()
            self.assertIs(post("game=hyperbol&port=%d" % game.ports[0])[1]["listed"], False)
            eventually(lambda: post("game=hyperbol&port=%d" % game.ports[0])[1]["listed"])
            self.assertLess(time.monotonic() - began, 2.5)
            self.assertIs(post("game=mygame&port=99")[1]["listed"], True)
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "out.xml")
                done = subprocess.run(
                    [
                        sys.executable,
                        "-W",
                        "error",
                        "-X",
                        "dev",
                        PROGRAM,
                        "export",
                        "127.0.0.1:%d" % server.port("hyperbol"),
                        "--output",
                        path,
                    ],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
                self.assertEqual((done.returncode, done.stderr), (0, b""))
                with open(path, "rb") as file:
                    self.assertIn(b'servername="Fun &amp; Games"', file.read())


# --- The project -----------------------------------------------------------------------------------------------------


if __name__ == "__main__":
    unittest.main()
