"""Tests of masterserver.py, in the program's order: python3 test_masterserver.py

Golden packets come from the protocol documents and from captures of deployed programs, never from the program's own encoders.
Protocol time is a number that the test moves; only the scenarios at the end use real sockets, on loopback and free ports.
"""
from __future__ import annotations

import json
import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import zlib
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
    return ms.Core(chosen, registry, ms.Poller(chosen, seed=1), lambda host, done: done(host, 0.0))


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


# --- Iceball ---------------------------------------------------------------------------------------------------------


# --- Hyperbol --------------------------------------------------------------------------------------------------------


# --- SubSpace --------------------------------------------------------------------------------------------------------


# --- AIO -------------------------------------------------------------------------------------------------------------


# --- Web -------------------------------------------------------------------------------------------------------------


# --- Event loop and whole program ------------------------------------------------------------------------------------


# --- Client tools ----------------------------------------------------------------------------------------------------

MASTER = ("203.0.113.1", 27790)
ICEBALL_CAPTURE = hexa("""31434542 0200 25808000 e954 0000 4000 4963656261 6c6c20536572766572 00000000000000000000000000000000
                          63746600000000000000 636c6173736963283531322c35313229 0000000000000000000000000000""")
SUBSPACE_CAPTURE = hexa("00000000 a861 0600 0100 86000000") + b"Loopback Test Zone".ljust(32, b"\0") + b"cane".ljust(
    48, b"\0") + b"a real asss on loopback\0"


def announced(game: str, port: int, **fields: Any) -> ms.Server:
    server = ms.Server(game, "", port, "", 0.0, float("inf"))
    for name, value in fields.items():
        setattr(server, name, value)
    return server


class IceballAnnouncing(unittest.TestCase):
    def setUp(self) -> None:
        self.server = announced("iceball", 21737, name="Iceball Server", mode="ctf", map="classic(512,512)", max_players=64)
        self.announcer = ms.IceballAnnouncer(self.server)
        self.announcer.master = MASTER

    def test_captured_announcement(self) -> None:
        self.assertEqual(self.announcer.tick(0.0), [(ICEBALL_CAPTURE, MASTER)])

    def test_fields_that_are_too_long_end_with_a_whole_character(self) -> None:
        self.server.name, self.server.mode = "ä" * 20, "a" + "ä" * 10
        packet = self.announcer.announcement()
        self.assertEqual((len(packet), packet[16:46], packet[46:56]), (86, "ä".encode() * 15, ("a" + "ä" * 4).encode() + b"\0"))

    def test_bursts_of_five_every_forty_seconds(self) -> None:
        times = [tenth / 10 for tenth in range(1000) for _ in self.announcer.tick(tenth / 10)]
        self.assertEqual(times, [0, 1, 2, 3, 4, 40, 41, 42, 43, 44, 80, 81, 82, 83, 84])

    def test_no_burst_is_made_up_for_after_a_sleep(self) -> None:
        self.announcer.tick(0.0)
        self.assertEqual([len(self.announcer.tick(1000 + second)) for second in (0, 0.1, 0.5, 1.0)], [1, 0, 0, 1])

    def test_every_cookie_comes_back(self) -> None:
        for cookie in (b"", hexa("8a850c03"), b"\0" * 4000):
            self.assertEqual(self.announcer.datagram(b"MSOK" + cookie, MASTER, 1.0), [(b"HSHK" + cookie, MASTER)])
        self.assertEqual(self.announcer.state, "announced")

    def test_strangers_are_not_heeded(self) -> None:
        for peer in (("203.0.113.2", 27790), ("203.0.113.1", 27791)):
            for packet in (b"MSOK1234", b"BADF"):
                with self.assertRaises(ms.Malformed):
                    self.announcer.datagram(packet, peer, 1.0)
        self.assertFalse(self.announcer.refused)

    def test_silence_for_thirty_minutes_after_a_refusal(self) -> None:
        for packet, words in ((b"BADF", "cannot read"), (hexa("42414456 0200 25808000"), "it expects heartbeat version 2 and Iceball 0.2.1-37"),
                              (b"BADV", "does not list Iceball 0.2.1-37")):
            announcer = ms.IceballAnnouncer(self.server)
            announcer.master = MASTER
            announcer.tick(0.0)
            self.assertEqual(announcer.datagram(packet, MASTER, 0.5), [])
            self.assertTrue(announcer.refused)
            self.assertIn(words, announcer.state)
            self.assertEqual([t for t in range(1, 1806) for _ in announcer.tick(float(t))], [1801, 1802, 1803, 1804, 1805])

    def test_a_master_that_does_not_answer_is_mentioned(self) -> None:
        for second in range(41):
            self.announcer.tick(float(second))
        self.assertIn("no answer", self.announcer.state)


class SubSpaceAnnouncing(unittest.TestCase):
    def setUp(self) -> None:
        self.server = announced("subspace", 25000, name="Loopback Test Zone", description="a real asss on loopback", players=6)
        self.announcer = ms.SubSpaceAnnouncer(self.server)
        self.announcer.master = MASTER

    def test_captured_announcement_every_minute(self) -> None:
        sent = [(t, replies) for t in range(150) for replies in [self.announcer.tick(float(t))] if replies]
        self.assertEqual(sent, [(t, [(SUBSPACE_CAPTURE, MASTER)]) for t in (0, 60, 120)])

    def test_longest_texts(self) -> None:
        self.server.name, self.server.description = "é" * 40, "x" * 400
        packet = self.announcer.announcement()
        self.assertEqual((len(packet), packet[14:46], packet[94:]), (480, b"\xe9" * 31 + b"\0", b"x" * 385 + b"\0"))
        self.server.name = "\u4e2d" * 40
        self.assertEqual(self.announcer.announcement()[14:46], "\u4e2d".encode() * 10 + b"\0\0")

    def test_pings_are_answered_as_the_document_says(self) -> None:
        self.server.playing = 4
        for question, answer in (("11223344", "06000000 11223344"), ("1122334400000000", "1122334400000000"),
                                 ("1122334401000000", "1122334401000000 06000000 04000000"),
                                 ("1122334402000000", "1122334402000000 3000 0600 0400 00"),
                                 ("11223344fcffffff", "1122334400000000")):
            self.assertEqual(self.announcer.answer(hexa(question)).hex(), hexa(answer).hex())
        for size in (0, 1, 3, 5, 7, 9, 100):
            with self.assertRaises(ms.Malformed):
                self.announcer.answer(bytes(size))


class AioAnnouncing(unittest.TestCase):
    def test_text_dialect(self) -> None:
        announcer = ms.AioAnnouncer(announced("aio", 27010, name="best AIO server", description="no #1 content"))
        self.assertEqual(announcer.opened(0.0), b"13#best AIO server#no <num>1 content#27010#%\n")
        for byte in b"\1\0\0\0\0%SUCCESS#13#%":
            self.assertEqual(announcer.receive(bytes([byte]), 0.1), b"")
        self.assertEqual(announcer.state, "announced")
        sent = []
        for second in range(1, 100):
            sent += [(second, data) for data in [announcer.tick(float(second))] if data]
            announcer.receive(b"%SUCCESS#KEEPALIVE#%", float(second))
        self.assertEqual(sent, [(t, b"KEEPALIVE#%\n") for t in (30, 60, 90)])

    def test_players_stand_in_the_name_and_are_published_again(self) -> None:
        server = announced("aio", 27010, name="%#court", max_players=16)
        announcer = ms.AioAnnouncer(server)
        self.assertEqual(announcer.opened(0.0), b"13#<percent><num>court [0/16]##27010#%\n")
        server.players = 5
        announcer.changed(1.0)
        self.assertEqual([announcer.tick(1.0), announcer.tick(2.0)], [b"13#<percent><num>court [5/16]##27010#%\n", b""])

    def test_framed_dialect(self) -> None:
        announcer = ms.AioAnnouncer(announced("aio", 27010), framed=True)
        self.assertEqual(announcer.opened(0.0), hexa("03000000 03 8269"))
        for byte in hexa("01000000 00 02000000 05 03"):
            self.assertEqual(announcer.receive(bytes([byte]), 0.1), b"")
        self.assertEqual(announcer.state, "announced")
        self.assertEqual(announcer.tick(30.0), hexa("01000000 04"))
        self.assertEqual(announcer.receive(hexa("02000000 05 04"), 30.1), b"")
        self.assertEqual(announcer.receive(hexa("08000000 06 04 0400") + b"gone", 60.1), hexa("03000000 03 8269"))
        compressed = zlib.compress(b"\6\3\6\0banned")
        announcer.receive(bytes([len(compressed), 0, 0, 1]) + compressed, 60.2)
        self.assertEqual((announcer.state, announcer.refused, announcer.done, announcer.due), ("refused: banned", True, True, 1860.2))

    def test_silence_and_closing_lead_to_growing_pauses(self) -> None:
        announcer = ms.AioAnnouncer(announced("aio", 27010), framed=True)
        announcer.opened(0.0)
        announcer.tick(99.0)
        self.assertFalse(announcer.done)
        announcer.tick(100.0)
        self.assertTrue(announcer.done)
        announcer.closed(100.0)
        pauses = []
        for _ in range(8):
            now = announcer.due
            announcer.opened(now)
            announcer.closed(now)
            pauses.append(announcer.due - now)
        for pause, most in zip(pauses, (2, 4, 8, 16, 32, 60, 60, 60)):
            self.assertTrue(0.8 * most <= pause <= most, pauses)
        now = announcer.due
        announcer.opened(now)
        announcer.receive(hexa("02000000 05 03"), now)
        announcer.closed(now)
        self.assertLessEqual(announcer.due, now + 1)

    def test_garbage_leads_to_a_pause_as_well(self) -> None:
        announcer = ms.AioAnnouncer(announced("aio", 27010), framed=True)
        announcer.opened(5.0)
        with self.assertRaises(ms.Malformed):
            announcer.receive(b"HTTP/1.1 400 Bad Request\r\n", 5.0)
        announcer.done = True               # as Connection does
        announcer.closed(5.0)
        self.assertGreater(announcer.due, 5.7)

    def test_questions_on_the_game_port(self) -> None:
        announcer = ms.AioAnnouncer(announced("aio", 27010, name="né", description="d", players=3, max_players=16, version="7"), framed=True)
        self.assertEqual(zlib.decompress(announcer.answer(b"\0")), hexa("00 0300 6ec3a9 0100 64 03000000 10000000 0700"))
        with self.assertRaises(ms.Malformed):
            announcer.answer(b"\1")


class HttpAnnouncing(unittest.TestCase):
    def setUp(self) -> None:
        self.server = announced("mygame", 4000, name="Ünter", players=1, max_players=4)
        self.announcer = ms.HttpAnnouncer(self.server)
        self.announcer.host = "master.example:27790"

    def answered(self, now: float, response: bytes) -> None:
        self.announcer.opened(now)
        for i in range(len(response)):
            self.announcer.receive(response[i:i + 1], now)
        self.announcer.closed(now)

    def json_answer(self, status: str, **told: Any) -> bytes:
        body = json.dumps(told).encode()
        return b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (status.encode(), len(body), body)

    def test_request(self) -> None:
        head, _, body = self.announcer.opened(0.0).partition(b"\r\n\r\n")
        self.assertEqual(head.split(b"\r\n"), [
            b"POST /announce HTTP/1.1", b"Host: master.example:27790", b"Content-Type: application/json",
            b"Content-Length: %d" % len(body), b"Connection: close"])
        self.assertEqual(json.loads(body.decode()), {"game": "mygame", "port": 4000, "name": "Ünter", "players": 1, "max_players": 4})

    def test_again_after_half_its_time_and_soon_after_a_change(self) -> None:
        self.answered(0.0, self.json_answer("200 OK", listed=True, ttl=120))
        self.assertEqual((self.announcer.state, self.announcer.due), ("listed", 60.0))
        self.announcer.changed(2.0)
        self.assertEqual(self.announcer.due, 5.0)
        self.announcer.changed(30.0)
        self.assertEqual(self.announcer.due, 5.0)

    def test_lifetimes_that_make_no_sense(self) -> None:
        for ttl, due in ((b"NaN", 5.0), (b"-1", 5.0), (b"1e999", 1800.0), (b"1" * 400, 1800.0), (b"null", 5.0)):
            self.answered(0.0, b'HTTP/1.1 200 OK\r\n\r\n{"listed":true,"ttl":' + ttl + b"}")
            self.assertEqual(self.announcer.due, due, ttl)

    def test_chunked_as_proxies_send_it(self) -> None:
        self.answered(0.0, b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\n{"listed":true, \r\n9\r\n"ttl":30}\r\n0\r\n\r\n')
        self.assertEqual((self.announcer.state, self.announcer.due), ("listed", 15.0))

    def test_refusals_and_failures(self) -> None:
        for response, refused, words in (
                (self.json_answer("403 Forbidden", listed=False, reason="banned: fake players"), True, "banned: fake players"),
                (b"HTTP/1.0 404 Not Found\r\n\r\n", True, "404"), (b"HTTP/1.1 429 Too Many Requests\r\n\r\nwait", False, "wait"),
                (self.json_answer("200 OK", listed=False, reason="waiting for its answer"), False, "not listed yet: waiting"),
                (b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html>", False, "html"), (b"", False, "cannot be read"), (b"\0\0garbage", False, "cannot be read"),
                (b"HTTP/1.1 200 OK\r\n\r\n[1]", False, "not listed"), (self.json_answer("200 OK", listed=True, ttl="soon"), False, "listed")):
            self.announcer = ms.HttpAnnouncer(self.server)
            self.answered(0.0, response)
            self.assertEqual(self.announcer.refused, refused, response)
            self.assertIn(words, self.announcer.state)
            self.assertGreater(self.announcer.due, 0.5)

    def test_no_answer(self) -> None:
        self.announcer.opened(0.0)
        self.announcer.tick(19.0)
        self.assertFalse(self.announcer.done)
        self.announcer.tick(20.0)
        self.assertTrue(self.announcer.done)
        self.announcer.closed(20.0)
        self.assertGreater(self.announcer.due, 20.5)

    def test_goodbye(self) -> None:
        self.answered(0.0, self.json_answer("200 OK", listed=True, ttl=120))
        self.announcer.leave(10.0)
        self.assertEqual(self.announcer.due, 10.0)
        body = self.announcer.opened(10.0).partition(b"\r\n\r\n")[2]
        self.assertEqual(json.loads(body.decode()), {"game": "mygame", "port": 4000, "action": "stop"})
        self.announcer.closed(10.1)
        self.assertEqual(self.announcer.due, float("inf"))

    def test_goodbye_follows_an_announcement_on_its_way(self) -> None:
        self.announcer.opened(0.0)
        self.announcer.leave(0.1)
        self.announcer.closed(0.2)
        self.assertEqual(self.announcer.due, 0.2)

    def test_hyperbol_answer_by_the_document_s_offsets(self) -> None:
        server = announced("hyperbol", 20000, name="n" * 40, mode="Deathmatch", players=3, max_players=300, map="Arena", version="1.8a")
        server.address = "192.0.2.7"
        answer = ms.HyperbolAnnouncer(server).answer(hexa("02 01020304"))
        self.assertEqual(len(answer), 229)
        for offset, value in ((0, hexa("1b 01020304")), (5, b"n" * 31 + b"\0"), (37, b"Deathmatch\0"), (69, b"\3"), (70, b"\xff"),
                              (72, b"Arena\0"), (136, b"192.0.2.7\0"), (157, hexa("204e0000")), (161, bytes(4)), (165, hexa("c0000207")),
                              (169, b"1.8a\0"), (222, bytes(3)), (225, b"\0")):
            self.assertEqual(answer[offset:offset + len(value)], value, offset)
        for question in (b"", b"\2", hexa("03 01020304"), hexa("02 0102030405")):
            with self.assertRaises(ms.Malformed):
                ms.HyperbolAnnouncer(server).answer(question)


class AnnouncersHoldAgainstGarbage(unittest.TestCase):
    def test_only_malformed_escapes(self) -> None:
        randomly = random.Random(9)
        seeds = [b"MSOK1234", hexa("42414456 0200 25808000"), hexa("08000000 06 04 0400") + b"gone", hexa("02000000 05 03"),
                 bytes([20, 0, 0, 1]) + zlib.compress(b"\6\3\6\0banned"), b"%SUCCESS#13#%", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{}}"]
        makers = [ms.IceballAnnouncer, ms.AioAnnouncer, lambda server: ms.AioAnnouncer(server, framed=True), ms.HttpAnnouncer,
                  ms.SubSpaceAnnouncer, ms.HyperbolAnnouncer]
        for turn in range(6000):
            data = bytearray(randomly.choice(seeds))
            for _ in range(randomly.randrange(4)):
                data[randomly.randrange(len(data))] = randomly.randrange(256)
            data = data[:randomly.randrange(len(data) + 1)] if turn % 3 else data
            announcer: Any = randomly.choice(makers)(announced("x", 1000))      # type: ignore[operator]
            try:
                announcer.master = MASTER
                if announcer.transport == "udp":
                    announcer.datagram(bytes(data), MASTER, 0.0)
                else:
                    announcer.opened(0.0)
                    announcer.receive(bytes(data), 0.0)
                    announcer.closed(0.0)
            except ms.Malformed:
                pass
            try:
                announcer.answer(bytes(data))
            except ms.Malformed:
                pass


class FaceToFace:
    """An announcer and this program's protocols on one clock, without sockets; one call of step() is one second."""

    ADDRESS = "203.0.113.9"

    def __init__(self, announcer: ms.Announcer, setting: str, **settings: str) -> None:
        self.announcer, self.setting, self.settings = announcer, setting, settings
        self.announcer.master = MASTER
        self.now = 0.0
        self.session: Optional[ms.Session] = None
        self.begin()

    def begin(self) -> None:
        self.core = make_core(**self.settings)
        made = {row: row.make(self.core) for row in ms.PROTOCOLS}
        self.protocols = list(made.values())
        self.protocol: Any = next(p for row, p in made.items()
                                  if row.setting == self.setting and row.offset == self.announcer.port_offset)

    def restart(self) -> None:
        if self.session is not None:
            assert isinstance(self.announcer, ms.TcpAnnouncer)
            self.announcer.closed(self.now)
            self.session = None
        self.begin()

    def step(self) -> List[ms.Server]:
        announcer, now = self.announcer, self.now
        if isinstance(announcer, ms.UdpProtocol):
            self.deliver(announcer.tick(now))
        else:
            self.converse()
        for data, peer in self.core.poller.tick(now):
            assert announcer.asked_at is not None and peer == (self.ADDRESS, announcer.server.port + announcer.asked_at), peer
            queue = [announcer.answer(data)]
            while queue:
                queue += [announcer.answer(more) for more, _ in self.core.poller.datagram(queue.pop(), peer, now)]
        for protocol in self.protocols:
            if protocol is not self.core.poller:
                protocol.tick(now)
        self.core.registry.expire(now)
        self.now += 1.0
        return self.core.registry.servers()

    def deliver(self, datagrams: ms.Replies) -> None:
        for data, _ in datagrams:
            for reply, _ in self.protocol.datagram(data, (self.ADDRESS, 40000), self.now):
                self.deliver(self.announcer.datagram(reply, MASTER, self.now))      # type: ignore[attr-defined]

    def converse(self) -> None:
        announcer, now = self.announcer, self.now
        assert isinstance(announcer, ms.TcpAnnouncer)
        if self.session is None:
            if announcer.due > now:
                return
            self.session = self.protocol.session(self.ADDRESS, now)
            out, back = announcer.opened(now), self.session.opened(now)
        else:
            out, back = announcer.tick(now), self.session.tick(now)
        while out or back:
            back = back + self.session.receive(out, now) if out else back
            while self.session.job is not None:
                back += self.session.resume(self.session.job(), now)
            out, back = announcer.receive(back, now) if back else b"", b""
        if self.session.done or announcer.done:
            self.session.closed(now)
            self.session = None
            announcer.closed(now)


class TenMinutesAndARestart(unittest.TestCase):
    """The announcer of each game against this program's own protocol, where this copy of the program has it."""

    def lives(self, announcer: ms.Announcer, setting: str, **settings: str) -> None:
        if not any(row.setting == setting for row in ms.PROTOCOLS) or setting == "http.ports" and "/announce" not in ms.ROUTES:
            self.skipTest("not in this copy of the program")
        pair = FaceToFace(announcer, setting, **settings)
        missing = []
        for second in range(600):
            if second == 300:
                pair.restart()
            found = [s for s in pair.step() if (s.game, s.address, s.port) == (announcer.server.game, pair.ADDRESS, announcer.server.port)]
            if not found:
                missing.append(second)
            elif second == 299 or second == 599:
                self.assertEqual((found[0].name, found[0].players), (announcer.server.name, announcer.server.players))
        self.assertLess(len([s for s in missing if s < 300]), 10, missing)
        self.assertLess(len([s for s in missing if s >= 300]), 70, missing)

    def test_iceball(self) -> None:
        self.lives(ms.IceballAnnouncer(announced("iceball", 21737, name="Ice", players=3, max_players=9)), "iceball.port")

    def test_subspace(self) -> None:
        self.lives(ms.SubSpaceAnnouncer(announced("subspace", 25000, name="Zone", players=3)), "subspace.port")

    def test_aio_text(self) -> None:
        self.lives(ms.AioAnnouncer(announced("aio", 27010, name="Court", players=3, max_players=9)), "aio.port")

    def test_aio_framed(self) -> None:
        self.lives(ms.AioAnnouncer(announced("aio", 27010, name="Court", players=3, max_players=9), framed=True), "aio.port")

    def test_hyperbol(self) -> None:
        self.lives(ms.HyperbolAnnouncer(announced("hyperbol", 20000, name="Hyper", players=3, max_players=9)), "http.ports")

    def test_a_game_of_one_s_own(self) -> None:
        self.lives(ms.HttpAnnouncer(announced("mygame", 4000, name="Mine", players=3, max_players=9)), "http.ports", games__mygame="My Game")

    def test_iceball_is_gone_after_its_time_without_an_announcer(self) -> None:
        pair = FaceToFace(ms.IceballAnnouncer(announced("iceball", 21737)), "iceball.port")
        pair.step()
        pair.announcer.leave(pair.now)
        listed = [bool(pair.step()) for _ in range(200)]
        self.assertEqual((listed.index(False), any(listed[119:])), (119, False))


LOOPBACK = {"server.bind": "127.0.0.1", "server.public_address": "203.0.113.5", "http.ports": "", "iceball.port": "0",
            "hyperbol.port": "", "subspace.port": "", "aio.port": ""}


def port_of(server: ms.MasterServer, protocol: str) -> int:
    return next(l.port for l in server.listeners if l.protocol == protocol)


class Announcing(unittest.TestCase):
    """With real sockets, in this process and as a command."""

    def test_as_a_class(self) -> None:
        with self.assertLogs("masterserver") as logs, ms.MasterServer(LOOPBACK) as master, tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "players")
            with open(path, "w", encoding="utf-8") as file:
                file.write("1/8\n2/8 pit\n\n")
            place = "127.0.0.1:%d" % port_of(master, "iceball")
            with ms.Announcement("iceball", 21737, [place, "[::1]"], name="A bundle", players_from=path) as announcement:
                announcement.start()
                server = eventually(master.registry.servers)[0]
                self.assertEqual((server.address, server.port, server.name, server.map), ("203.0.113.5", 21737, "A bundle", "pit"))
                announcement.update(players=7, map="castle")
                eventually(lambda: (server.players, server.max_players, server.map) == (7, 8, "castle"))
                with self.assertRaises(ValueError):
                    announcement.update(player=7)
            announcement.stop()
            with self.assertRaises(ms.StartError):
                announcement.start()
        self.assertNotIn("masterserver", [thread.name for thread in threading.enumerate()])
        self.assertIn("no IPv4 address", "".join(logs.output))

    def test_wrong_arguments(self) -> None:
        for arguments, fields in ((("iceball", 0, ["m"]), {}), (("iceball", 1, []), {}), (("iceball", 1, ["m:x"]), {}), (("Ice Ball", 1, ["m"]), {}),
                                  (("iceball", 1, ["m"]), {"players": "5"}), (("iceball", 1, ["m"]), {"players": -1}),
                                  (("iceball", 1, ["m"]), {"version": "new"}), (("iceball", 1, ["m"]), {"dialect": "text"}),
                                  (("aio", 1, ["m"]), {"dialect": "binary"})):
            with self.assertRaises(ValueError):
                ms.Announcement(*arguments, **fields)           # type: ignore[arg-type, unused-ignore]

    def test_masters_and_players_as_they_are_written(self) -> None:
        for text, place in (("m", ("m", 0)), ("m.example:1", ("m.example", 1)), ("::1", ("::1", 0)), ("[::1]", ("::1", 0)),
                            ("[::1]:27790", ("::1", 27790)), ("192.0.2.1:5", ("192.0.2.1", 5))):
            self.assertEqual(ms.read_master(text), place)
        for line, fields in (("5", {"players": 5}), (" 5 / 16\r", {"players": 5, "max_players": 16}),
                             ("5/16 my map", {"players": 5, "max_players": 16, "map": "my map"}), ("0 pit", {"players": 0, "map": "pit"})):
            self.assertEqual(ms.read_players(line), fields)
        for line in ("", "x", "-1", "5/", "5/x", "123456", "5,16"):
            with self.assertRaises(ValueError):
                ms.read_players(line)

    def test_questions_are_answered_where_the_port_is_free(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as game, self.assertLogs("masterserver", "INFO") as logs:
            game.bind(("0.0.0.0", 0))
            port = game.getsockname()[1]
            with ms.Announcement("hyperbol", port, ["127.0.0.1:1"]) as announcement:
                self.assertEqual(announcement.sockets, [])
            self.assertIn("left to the game server", logs.output[0])
            game.close()
            with ms.Announcement("hyperbol", port, ["127.0.0.1:1"]), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as master:
                master.settimeout(5)
                master.sendto(hexa("02 01020304"), ("127.0.0.1", port))
                self.assertEqual(len(master.recv(1000)), 229)

    def test_goodbye_over_http(self) -> None:
        with socket.socket() as master:
            master.bind(("127.0.0.1", 0))
            master.listen(5)
            master.settimeout(5)
            announcement = ms.Announcement("mygame", 4000, ["127.0.0.1:%d" % master.getsockname()[1]])
            announcement.start()
            bodies = []
            for _ in range(2):
                connection, _ = master.accept()
                with connection:
                    connection.settimeout(5)
                    data = b""
                    while not data.endswith(b"}"):
                        data += connection.recv(4096)
                    connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 25\r\n\r\n{"listed":true,"ttl":120}')
                bodies.append(json.loads(data.partition(b"\r\n\r\n")[2].decode()))
                if len(bodies) == 1:
                    eventually(lambda: announcement.links[0].announcer.state == "listed")
                    stopping = threading.Thread(target=announcement.stop)
                    stopping.start()
            stopping.join(5)
            self.assertEqual(bodies[1], {"game": "mygame", "port": 4000, "action": "stop"})

    def command(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-W", "error", "-X", "dev", PROGRAM, "announce", *arguments],
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)

    def test_command_with_players_from_standard_input(self) -> None:
        with ms.MasterServer(LOOPBACK) as master:
            process = self.command("--game", "iceball", "--port", "21737", "--name", "Küche", "--players-from", "-",
                                   "127.0.0.1:%d" % port_of(master, "iceball"))
            assert process.stdin is not None
            try:
                process.stdin.write(b"nonsense\n5/16 cas")
                process.stdin.write(b"tle\n")
                process.stdin.flush()
                eventually(lambda: [s for s in master.registry.servers() if (s.name, s.players, s.map) == ("Küche", 5, "castle")], 20)
            finally:
                out, err = process.communicate(timeout=20)
        self.assertEqual((process.returncode, out), (0, b""), err)
        self.assertIn(b"nonsense", err)
        self.assertNotIn(b"Traceback", err)

    def test_command_when_no_master_is_left(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as master:
            master.bind(("127.0.0.1", 0))
            master.settimeout(20)
            process = self.command("--game", "iceball", "--port", "21737", "127.0.0.1:%d" % master.getsockname()[1], "no..name")
            data, peer = master.recvfrom(1000)
            master.sendto(b"BADF", peer)
            out, err = process.communicate(timeout=20)
        self.assertEqual((process.returncode, out, len(data)), (1, b"", 86), err)
        self.assertIn(b"refused: the master cannot read the announcement", err)
        self.assertIn(b"cannot be resolved", err)
        self.assertNotIn(b"Traceback", err)

    @unittest.skipIf(ms.WINDOWS, "Windows has no such signals for a child")
    def test_command_ends_on_a_signal(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as master:
            master.bind(("127.0.0.1", 0))
            master.settimeout(20)
            process = self.command("--game", "subspace", "--port", "25000", "127.0.0.1:%d" % (master.getsockname()[1] - 1))
            self.assertEqual(len(master.recv(1000)), 95)
            process.terminate()
            out, err = process.communicate(timeout=20)
        self.assertEqual((process.returncode, out), (0, b""), err)

    def test_command_with_wrong_arguments(self) -> None:
        process = self.command("--game", "iceball", "--port", "21737", "--version", "new", "127.0.0.1")
        out, err = process.communicate(timeout=20)
        self.assertEqual((process.returncode, out), (2, b""))
        self.assertIn(b"a version such as", err)


class Embedded(unittest.TestCase):
    """MasterServer as a class of somebody else's program."""

    def test_life(self) -> None:
        server = ms.MasterServer(LOOPBACK)
        server.start()
        server.start()
        self.assertTrue(server.listeners)
        with self.assertRaises(ms.StartError):
            server.run()
        server.stop()
        server.stop()
        self.assertFalse(server.thread is not None and server.thread.is_alive())
        with self.assertRaises(ms.StartError):
            server.start()

    def test_stop_before_start_and_before_run(self) -> None:
        for begin in (lambda server: None, ms.MasterServer.bind):
            server = ms.MasterServer(LOOPBACK)
            begin(server)
            server.stop()
            self.assertEqual(server.wake_out.fileno(), -1)
            self.assertTrue(all(source.sock.fileno() < 0 for source in server.endpoints))
            server.run()
            with self.assertRaises(ms.StartError):
                server.start()

    def test_a_failed_start_leaves_nothing_open(self) -> None:
        with ms.MasterServer(LOOPBACK) as first:
            port = port_of(first, "iceball")
            second = ms.MasterServer(dict(LOOPBACK, **{"iceball.port": str(port)}))
            with self.assertRaisesRegex(ms.StartError, "iceball cannot listen on UDP 127.0.0.1:%d" % port):
                second.start()
            self.assertEqual(second.wake_out.fileno(), -1)
            second.stop()

    def announce(self, server: ms.MasterServer, count: int = 1) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.settimeout(5)
            for i in range(count):
                sock.sendto(ICEBALL_CAPTURE[:10] + struct.pack("<H", 1000 + i) + ICEBALL_CAPTURE[12:], ("127.0.0.1", port_of(server, "iceball")))
                cookie, peer = sock.recvfrom(1000)
                sock.sendto(b"HSHK" + cookie[4:], peer)

    def test_callbacks(self) -> None:
        events: List[Tuple[str, str, int]] = []
        with ms.MasterServer(dict(LOOPBACK, **{"iceball.timeout": "1"}), lambda event, s: events.append((event, s.name, s.port))) as server:
            self.announce(server)
            eventually(lambda: len(events) == 2)
        self.assertEqual(events, [("listed", "Iceball Server", 1000), ("gone", "Iceball Server", 1000)])

    def test_an_error_in_a_callback_is_logged_and_no_more(self) -> None:
        def fail(event: str, server: ms.Server) -> None:
            raise KeyError(event)
        with self.assertLogs("masterserver", "ERROR") as logs, ms.MasterServer(LOOPBACK, fail) as server:
            self.announce(server, 2)
            eventually(lambda: len(server.registry.servers()) == 2)
            self.assertEqual(sum(tally.errors for tally in server.tallies.values()), 0)
        self.assertIn("on_event('listed'", logs.output[0])

    def test_stop_from_a_callback(self) -> None:
        server = ms.MasterServer(LOOPBACK, lambda event, listed: server.stop())
        server.start()
        self.announce(server)
        assert server.thread is not None
        server.thread.join(5)
        self.assertFalse(server.thread.is_alive())
        self.assertEqual(server.wake_out.fileno(), -1)

    def test_several_in_one_process(self) -> None:
        with ms.MasterServer(LOOPBACK) as one, ms.MasterServer(LOOPBACK) as two:
            self.assertNotEqual(port_of(one, "iceball"), port_of(two, "iceball"))
            self.announce(one, 3)
            self.announce(two, 1)
            eventually(lambda: (len(one.registry.servers()), len(two.registry.servers())) == (3, 1))

    def test_the_registry_is_read_from_another_thread_while_it_changes(self) -> None:
        registry = make_core().registry
        errors: List[BaseException] = []
        done = threading.Event()

        def read() -> None:
            try:
                while not done.is_set():
                    for game in ("", "iceball", "game3", "none"):
                        servers = registry.servers(game)
                        assert len(set(servers)) == len(servers) and None not in servers
            except BaseException as error:
                errors.append(error)
        readers = [threading.Thread(target=read) for _ in range(2)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            for reader in readers:
                reader.start()
            for i in range(1500):
                game = ("iceball", "game%d" % (i // 100))[i % 2]
                registry.hear(game, "203.0.113.%d" % (i % 200), 1 + i % 31, "127.0.0.1", i / 100, 5.0, {"players": i % 7, "name": "n%d" % i})
                registry.expire(i / 100)
        finally:
            done.set()
            for reader in readers:
                reader.join()
            sys.setswitchinterval(interval)
        self.assertEqual(errors, [])
        self.assertNotIn("none", registry.games)
        self.assertEqual({s.key for s in registry.servers()}, {s.key for game in list(registry.games) for s in registry.games[game].values()})

    def test_import_starts_nothing_and_nothing_is_left(self) -> None:
        script = """if True:
            import logging, os, signal, sys, threading, time
            def state():
                return (threading.active_count(), [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)], list(sys.path),
                        logging.getLogger().handlers[:], logging.getLogger().level, logging.getLogger("masterserver").handlers[:],
                        logging.getLogger("masterserver").level, len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0)
            before = state()
            import masterserver
            assert state() == before, state()
            settings = %r
            masterserver.MasterServer(settings).stop()
            with masterserver.MasterServer(settings) as one, masterserver.MasterServer(settings) as two:
                announcement = masterserver.Announcement("iceball", 21737, ["localhost:1"])
                announcement.start()
            announcement.stop()
            masterserver.Announcement("aio", 21737, ["127.0.0.1:1"], name="n").stop()
            deadline = time.monotonic() + 5             # the thread that resolves names is told to end, not waited for
            while state() != before and time.monotonic() < deadline:
                time.sleep(0.01)
            assert state() == before, (state(), before)
            """ % LOOPBACK
        result = subprocess.run([sys.executable, "-W", "error", "-X", "dev", "-c", script], cwd=HERE, capture_output=True, timeout=30)
        self.assertEqual((result.returncode, result.stdout, result.stderr), (0, b"", b""))


class ChildProcess(unittest.TestCase):
    def test_ends_with_standard_input_and_writes_nothing_to_standard_output(self) -> None:
        options = [word for name, value in LOOPBACK.items() for word in ("--set", "%s=%s" % (name, value))]
        with tempfile.TemporaryDirectory() as folder:
            ready_file = os.path.join(folder, "ready")
            process = subprocess.Popen([sys.executable, "-W", "error", "-X", "dev", PROGRAM, "--exit-with-stdin", "--ready-file", ready_file, *options,
                                        "--set", "http.ports=0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            eventually(lambda: process.poll() is not None or os.path.exists(ready_file), 20)
            self.assertIsNone(process.poll())
            with open(ready_file, encoding="utf-8") as file:
                ports = {l["protocol"]: l["port"] for l in json.load(file)["listeners"]}
            out, err = process.communicate(b"anything\n", timeout=20)
        self.assertEqual((process.returncode, out), (0, b""), err)
        self.assertNotIn(b"Traceback", err)
        self.assertIn(b'svsave/pub/server.json: "heartbeat_send": true, "heartbeat": [["203.0.113.5", %d]]' % ports["iceball"], err)
        self.assertIn(b"http://203.0.113.5:%d/" % ports["http"], err)


class Checking(unittest.TestCase):
    def check(self, **settings: str) -> Tuple[str, str]:
        errors, warnings = ms.check(ms.Settings(dict(LOOPBACK, **{name.replace("__", "."): value for name, value in settings.items()})))
        return "\n".join(errors), "\n".join(warnings)

    def test_a_port_that_is_taken_and_by_whom(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp, socket.socket() as tcp:
            udp.bind(("127.0.0.1", 0))
            tcp.bind(("127.0.0.1", 0))
            tcp.listen(1)
            port = udp.getsockname()[1]
            errors, _ = self.check(iceball__port=str(port), http__ports=str(tcp.getsockname()[1]))
        self.assertIn("iceball cannot listen on UDP 127.0.0.1:%d" % port, errors)
        self.assertIn("http cannot listen on TCP", errors)
        self.assertEqual(errors.count("(process %d)" % os.getpid()), 2 if sys.platform == "linux" else 0, errors)

    def test_an_address_that_this_machine_does_not_have(self) -> None:
        self.assertIn("[server] bind", self.check(server__bind="203.0.113.77")[0])

    def test_a_log_that_cannot_be_written(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for path in (folder, os.path.join(folder, "none", "log")):
                self.assertIn("[server] log_file", self.check(server__log_file=path)[0])
            self.assertEqual(self.check(server__log_file=os.path.join(folder, "log"))[0], "")
            self.assertEqual(os.listdir(folder), [])

    def test_addresses_that_players_cannot_use(self) -> None:
        self.assertIn("from this machine alone", self.check()[1])
        self.assertIn("public_address is empty", self.check(server__public_address="")[1])
        self.assertIn("192.168.1.5 is private", self.check(server__public_address="192.168.1.5")[1])
        self.assertIn("10.1.2.3 is private", self.check(server__bind="10.1.2.3")[1])

    def test_exit_statuses(self) -> None:
        options = [word for name, value in LOOPBACK.items() for word in ("--set", "%s=%s" % (name, value))]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
            taken.bind(("127.0.0.1", 0))
            for more, status, words in (([], 0, b"warning: [server] bind"), (["--set", "iceball.port=%d" % taken.getsockname()[1]], 1, b"error: iceball"),
                                        (["--set", "iceball.prt=1"], 2, b"")):
                result = subprocess.run([sys.executable, "-W", "error", "-X", "dev", PROGRAM, "--check", *options, *more], capture_output=True, timeout=20)
                self.assertEqual(result.returncode, status, result)
                self.assertIn(words, result.stdout)
                self.assertEqual(result.stderr == b"", status != 2, result)


# --- The project -----------------------------------------------------------------------------------------------------


if __name__ == "__main__":
    unittest.main()
