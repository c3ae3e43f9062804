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
import time
import tracemalloc
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

# The two servers of document 004's example and its server that publishes; the framed ones and SET_IP are PROTOCOLS, section 5
AIO_OFFICIAL = (b"official AIO v0.2 test server", b"welcome to the official AIO v0.2 test server :O do whatever you like and have fun",
                b"190.123.69.69")
AIO_UNNAMED = b"unnamed AIO server", b"this is an unnamed server", b"37.192.51.67"
AIO_ANSWER = hexa("00") + hexa("0900") + b"My server" + hexa("0400") + b"Fun!" + hexa("03000000 10000000 0700")

# What a peer sends while the document's two servers are listed, and what it gets
AIO_TRACES = (
    ("list, as deployed", b"12#%\n", b"%12#official AIO v0.2 test server#welcome to the official AIO v0.2 test server :O do whatever you like"
     b" and have fun#190.123.69.69#27010#unnamed AIO server#this is an unnamed server#37.192.51.67#27010#%"),
    ("list, document", b"12#%", b"%12#0#official AIO v0.2 test server#welcome to the official AIO v0.2 test server :O do whatever you like"
     b" and have fun#190.123.69.69#27010#1#unnamed AIO server#this is an unnamed server#37.192.51.67#27010#%"),
    ("publish, as deployed", b"13#NAME#DESC#27010#%\n", b"%SUCCESS#13#%"),
    ("publish, document", b"13#best AIO server#please no non-vanilla content pls#185.12.59.68#27010#%", b"%SUCCESS#13#%"),
    ("publish, keepalive, publish", b"13#NAME [0/9]#DESC#27010#%\nKEEPALIVE#%\n13#NAME [1/9]#50% more#27010#%\r\n",
     b"%SUCCESS#13#%%SUCCESS#KEEPALIVE#%%SUCCESS#13#%"),
    ("text news", b"NEWS#%\n", b"%NEWS#50<percent> more <num>1#%"),
    ("list and news", b"NEWS#%\n12#%NEWS#%", b"%NEWS#50<percent> more <num>1#%%12#0#official AIO v0.2 test server#welcome to the official AIO"
     b" v0.2 test server :O do whatever you like and have fun#190.123.69.69#27010#1#unnamed AIO server#this is an unnamed server"
     b"#37.192.51.67#27010#%%NEWS#50<percent> more <num>1#%"),
    ("unknown text", b"HI#x#%", b""),
    ("binary list", hexa("0c"), hexa("0c 0000") + b"\0".join(AIO_OFFICIAL) + hexa("00 144801 0100") + b"\0".join(AIO_UNNAMED)
     + hexa("00 144801")),
    ("binary publish", hexa("0d") + b"best AIO server\0please no non-vanilla content pls\x00185.12.59.68\0" + hexa("144801"), b""),
    ("framed list", hexa("01000000 02"), hexa("22000000 02 0200 0d") + b"190.123.69.69" + hexa("8269 0c") + b"37.192.51.67" + hexa("8269")),
    ("framed publish", hexa("03000000 03 8269"), hexa("02000000 05 03")),
    ("framed publish, keepalive", hexa("03000000 03 8269 01000000 04"), hexa("02000000 05 03 02000000 05 04")),
    ("framed keepalive of a client", hexa("01000000 04"), hexa("2b000000 06 04 2700") + b"nothing is published on this connection"),
    ("framed news", hexa("01000000 01"), hexa("0e000000 01 0b00") + b"50% more #1"),
    ("framed port 0", hexa("03000000 03 0000"), hexa("1b000000 06 03 1700") + b"port 0 cannot be listed"),
)


def aio_ready(**settings: str) -> ms.Aio:
    aio = ms.Aio(make_core(aio__news="50% more #1", **settings))
    for name, description, address in (AIO_OFFICIAL, AIO_UNNAMED):
        aio.session(address.decode(), 0.0).receive(b"13#%s#%s#27010#%%\n" % (name, description), 0.0)
    return aio


def aio_ask(aio: ms.Aio, request: bytes, now: float = 0.0) -> bytes:
    """What a peer of its own gets for this; 0.2 s later if it takes a newline to tell."""
    session = aio.session("198.51.100.7", now)
    return session.receive(request, now) + session.tick(now + ms.AIO_NEWLINE_S)


class AioTest(unittest.TestCase):
    def test_uintv(self) -> None:
        for value, wire in ((0, "01"), (127, "ff"), (128, "0200"), (8080, "427c"), (16512, "040000"), (27010, "144801"), (65535, "fcfb05")):
            self.assertEqual(ms.uintv(value), hexa(wire))
            self.assertEqual(ms.read_uintv(b"?" + hexa(wire), 1), (value, 1 + len(wire) // 2))
        edges = (0, 0x7F, 0x80, 0x407F, 0x4080, 0x20407F, 0x204080, 0x2020407F)     # the last that 32 bits can carry
        for value, size in zip(edges, (1, 1, 2, 2, 3, 3, 4, 4)):
            wire = ms.uintv(value)
            self.assertEqual(len(wire), size)
            self.assertEqual(ms.read_uintv(wire, 0), (value, size))
            for cut in range(size):
                self.assertGreater(ms.read_uintv(wire[:cut], 0)[1], cut)
        self.assertEqual(ms.read_uintv(hexa("f8ffffff"), 0)[0], 0x2020407F)
        self.assertRaises(OverflowError, ms.uintv, 0x20204080)

    def test_traces_whole_and_in_every_split(self) -> None:
        for title, data, answer in AIO_TRACES:
            for size in range(1, len(data) + 1):
                with self.subTest(title, size=size):
                    session = aio_ready().session("185.12.59.68", 0.0)
                    self.assertEqual(feed(session, data, size) + session.tick(0.25), answer)
            for at in range(1, len(data)):
                session = aio_ready().session("185.12.59.68", 0.0)
                self.assertEqual(session.receive(data[:at], 0.0) + session.receive(data[at:], 0.1) + session.tick(0.35), answer, title)

    def test_published_in_one_dialect_and_listed_in_all(self) -> None:
        for data, name, description in ((b"13#best AIO server#100% fun#27010#%\n", b"best AIO server", b"100% fun"),
                                        (b"13#best AIO server#100<percent> fun#10.0.0.1#27010#%", b"best AIO server", b"100% fun"),
                                        (b"\x0dbest AIO server\x00100% fun\0\0\x14\x48\x01", b"best AIO server", b"100% fun"),
                                        (hexa("03000000 03 8269"), b"185.12.59.68:27010", b"")):
            aio = ms.Aio(make_core())
            aio.session("185.12.59.68", 0.0).receive(data, 0.0)
            text = name + b"#" + description.replace(b"%", b"<percent>") + b"#185.12.59.68#27010#%"
            self.assertEqual(aio_ask(aio, b"12#%\n"), b"%12#" + text)
            self.assertEqual(aio_ask(aio, b"12#%"), b"%12#0#" + text)
            self.assertEqual(aio_ask(aio, b"\x0c"), hexa("0c 0000") + name + b"\0" + description + b"\x00185.12.59.68\0" + hexa("144801"))
            self.assertEqual(aio_ask(aio, hexa("01000000 02")), hexa("12000000 02 0100 0c") + b"185.12.59.68" + hexa("8269"))
        aio = ms.Aio(make_core())
        aio.session("2001:db8::9", 0.0).receive(hexa("03000000 03 8269"), 0.0)
        self.assertEqual(aio_ask(aio, b"12#%\n"), b"%12#[2001:db8::9]:27010##2001:db8::9#27010#%")

    def test_empty_lists(self) -> None:
        aio = ms.Aio(make_core())
        text = b"There are currently no available servers... Maybe host your own or wait later?:O"
        self.assertEqual(aio_ask(aio, b"12#%\n"), b"%12#No servers currently online :pepe:#" + text + b"#127.0.0.1#27010#%")
        self.assertEqual(aio_ask(aio, b"12#%"), b"%12#0#No servers currently online :pepe:#" + text + b"#127.0.0.1#27010#%")
        self.assertEqual(aio_ask(aio, b"\x0c"), hexa("0c 0000") + b"No servers currently online :pepe:\0" + text + b"\x00127.0.0.1\0"
                         + hexa("144801"))
        self.assertEqual(aio_ask(aio, hexa("01000000 02")), hexa("03000000 02 0000"))

    def test_greetings(self) -> None:
        session = ms.Aio(make_core()).session("198.51.100.7", 0.0)
        self.assertEqual((session.opened(0.0), session.wake_at), (hexa("01 00000000"), 1.2))
        self.assertEqual((session.tick(1.1), session.tick(1.2), session.tick(1.3)), (b"", b"%1#0#%", b""))
        talking = ms.Aio(make_core()).session("198.51.100.7", 0.0)
        talking.opened(0.0)
        self.assertEqual((talking.receive(b"N", 0.5), talking.tick(1.2)), (b"", b""))
        without = ms.Aio(make_core(aio__dialects="binary, framed")).session("198.51.100.7", 0.0)
        self.assertEqual((without.opened(0.0), without.wake_at, without.tick(5.0)), (hexa("01 00000000"), None, b""))
        self.assertRaisesRegex(ms.Malformed, "first byte, 31", without.receive, b"12#%", 0.0)
        alone = ms.Aio(make_core(aio__dialects="text"))
        self.assertEqual([alone.session("198.51.100.7", 0.0).opened(0.0) for _ in range(2)], [b"%1#0#%", b"%1#1#%"])

    def test_players_and_escapes_in_names(self) -> None:
        aio = ms.Aio(make_core())
        session = aio.session("203.0.113.9", 0.0)
        session.receive("13#100% C<num> [bad] [7/32]#a<num>b#27010#%".encode(), 0.0)
        server = aio.registry.get("aio", "203.0.113.9", 27010)
        self.assertEqual((server.name, server.players, server.max_players, server.description), ("100% C# [bad]", 7, 32, "a#b"))
        self.assertEqual(aio_ask(aio, b"12#%\n"), "%12#100％ C＃ [bad] [7/32]#a<num>b#203.0.113.9#27010#%".encode())
        self.assertIn(b"100% C# [bad] [7/32]\0a#b\0", aio_ask(aio, b"\x0c"))
        session.receive("13#100% C<num> [bad] [8/32]#a<num>b#27010#%".encode(), 1.0)
        self.assertEqual((server.players, len(aio.registry.servers())), (8, 1))
        session.receive(b"13# [1/2]#\xa9 caf\xe9#27010#%", 2.0)
        self.assertEqual((server.players, server.description), (1, "© café"))
        self.assertTrue(server.name)
        session.receive(b"13#%s [3/4]##27010#%%" % (b"x" * 200), 3.0)
        self.assertEqual((server.name, server.packet[-7:], server.players), ("x" * 128, b"x [3/4]", 3))
        session.receive(b"13#n [70000/99999]##27010#%", 4.0)
        self.assertEqual((server.players, server.max_players), (65535, 65535))

    def test_addresses(self) -> None:
        """(source, what it sends, where it is listed)"""
        settings = {"server__public_address": "198.51.100.1", "address_map.192.168.1.5": "198.51.100.2"}
        for source, data, address in (
                ("203.0.113.9", b"13#N#D#198.51.100.66#27010#%", "203.0.113.9"),               # a public source speaks for itself only
                ("203.0.113.9", b"SET_IP#198.51.100.66#%13#N#D#27010#%", "203.0.113.9"),
                ("203.0.113.9", b"\x0dN\0D\x00198.51.100.66\0\x14\x48\x01", "203.0.113.9"),
                ("127.0.0.1", b"13#N#D#27010#%", "198.51.100.1"),
                ("127.0.0.1", b"13#N#D#localhost#27010#%", "198.51.100.1"),
                ("127.0.0.1", b"13#N#D#203.0.113.7\n#27010#%", "203.0.113.7"),                 # icanhazip.com ends it so
                ("127.0.0.1", b"SET_IP#203.0.113.7#%13#N#D#27010#%", "203.0.113.7"),
                ("127.0.0.1", b"13#N#D#27010#%SET_IP#203.0.113.7#%", "203.0.113.7"),           # moves what is published
                ("127.0.0.1", b"SET_IP#fe80::1%eth0#%13#N#D#27010#%", "198.51.100.1"),
                ("127.0.0.1", b"SET_IP#::ffff:203.0.113.7#%13#N#D#27010#%", "203.0.113.7"),
                ("192.168.1.5", b"13#N#D#27010#%", "198.51.100.2"),
                ("10.1.2.3", b"13#N#D#224.0.0.1#27010#%", "10.1.2.3"),
                ("127.0.0.1", hexa("03000000 03 8269"), "198.51.100.1")):
            with self.subTest(source=source, data=data):
                aio = ms.Aio(make_core(**settings))
                aio.session(source, 0.0).receive(data, 0.0)
                self.assertEqual([s.address for s in aio.registry.servers("aio")], [address])
        aio = ms.Aio(make_core())
        here, away = aio.session("127.0.0.1", 0.0), aio.session("203.0.113.9", 0.0)
        self.assertEqual((here.receive(b"SET_IP#203.0.113.7#%\n", 0.0), away.receive(b"SET_IP#203.0.113.7#%\n", 0.0)),
                         (b"%SUCCESS#SET_IP#%", b""))
        here.receive(b"13#N [1/5]#D#27010#%\n", 0.0)
        here.receive(b"SET_IP#203.0.113.8#%\n", 1.0)
        here.receive(b"13#N [2/5]#D#27010#%\n", 2.0)
        self.assertEqual([(s.address, s.players) for s in aio.registry.servers("aio")], [("203.0.113.8", 2)])

    def test_the_newer_connection_has_the_server(self) -> None:
        aio = ms.Aio(make_core())
        listed = aio.registry.servers
        for publish in (b"13#N#D#27010#%", b"\x0dN\0D\0\0\x14\x48\x01", hexa("03000000 03 8269")):
            old, new = aio.session("203.0.113.9", 0.0), aio.session("203.0.113.9", 0.0)
            old.receive(publish, 0.0)
            self.assertTrue(old.kept)
            new.receive(publish, 1.0)
            self.assertFalse(old.kept)
            old.closed(2.0)
            self.assertEqual(len(listed()), 1)
            new.closed(3.0)
            self.assertEqual((len(listed()), aio.owners, aio.poller.targets), (0, {}, {}))
        session = aio.session("203.0.113.9", 4.0)
        session.receive(b"13#N#D#27010#%", 4.0)
        session.receive(b"13#M#D#27011#%", 5.0)                     # it has moved
        self.assertEqual([(s.name, s.port) for s in listed()], [("M", 27011)])
        aio.registry.remove(listed()[0])                            # the operator has banned it, say
        self.assertFalse(session.kept)
        self.assertEqual(session.receive(b"KEEPALIVE#%\n", 6.0), b"%SUCCESS#KEEPALIVE#%")
        session.closed(7.0)

    def test_restored_servers_are_confirmed(self) -> None:
        aio = ms.Aio(make_core())
        server = ms.Server("aio", "203.0.113.9", 27010, "203.0.113.9", 0.0, 60.0)
        server.unconfirmed = True
        aio.registry.insert(server, {"name": "My server"})
        aio.session("203.0.113.9", 1.0).receive(hexa("03000000 03 8269"), 1.0)
        aio.registry.expire(1000.0)
        self.assertEqual([(s.name, s.unconfirmed) for s in aio.registry.servers()], [("My server", False)])

    def test_refusals(self) -> None:
        aio = ms.Aio(make_core(**{"bans.203.0.113.0/24": "fake players", "server__refuse_names": "casino", "limits__servers_per_source": "1"}))
        framed = aio.session("203.0.113.9", 0.0)
        self.assertEqual(framed.receive(hexa("03000000 03 8269"), 0.0), hexa("10000000 06 03 0c00") + b"fake players")
        text = aio.session("198.51.100.9", 0.0)
        self.assertEqual(text.receive(b"13#Casino royale#D#27010#%", 0.0), b"")
        self.assertEqual(text.receive(b"13#N#D#27010#%", 0.0), b"%SUCCESS#13#%")
        self.assertEqual(aio.session("198.51.100.9", 0.0).receive(b"13#N#D#27011#%", 0.0), b"")
        self.assertRaises(ms.Malformed, text.receive, b"13#N#D#port#%", 0.0)
        self.assertEqual(sorted((key[0], heard.outcome) for key, heard in aio.registry.heard.items()),
                         [("198.51.100.9", "bad packet"), ("198.51.100.9", "limit"), ("198.51.100.9", "listed"), ("203.0.113.9", "banned")])

    def test_how_long_a_connection_lasts(self) -> None:
        """(what it sends at 0, when it is still there, when it is not, whether that counts as malformed)"""
        for data, there, gone, malformed in (
                (b"", 19, 20, True),                                # says nothing
                (b"\x03\0", 19, 20, True),                          # half a frame
                (b"13#NAME#", 19, 20, True),
                (b"12#%\n", 329, 330, False),                       # a client
                (hexa("01000000 04"), 329, 330, False),             # a framed client comes again after 270 s
                (b"13#N#D#27010#%", 86400, None, False),
                (b"\x0dN\0D\0\0\x14\x48\x01", 86400, None, False),
                (b"13#N#D#27010#%KEEPALIVE#%\n", 119, 120, False),
                (hexa("03000000 03 8269 01000000 04"), 119, 120, False)):
            with self.subTest(data=data):
                aio = ms.Aio(make_core())
                session = aio.session("203.0.113.9", 0.0)
                session.receive(data, 0.0)
                listed = len(aio.registry.servers())
                session.tick(there)
                self.assertFalse(session.done)
                self.assertEqual(len(aio.registry.servers()), listed)
                if malformed:
                    self.assertRaises(ms.Malformed, session.tick, gone)
                elif gone:
                    session.tick(gone)
                    self.assertTrue(session.done)
                    self.assertEqual(aio.registry.servers(), [])
        aio = ms.Aio(make_core())
        session = aio.session("203.0.113.9", 0.0)
        session.receive(hexa("03000000 03 8269"), 0.0)
        for now in range(0, 400, 40):
            self.assertEqual(session.receive(hexa("01000000 04"), now), hexa("02000000 05 04"))
            session.tick(now + 39)
        self.assertEqual([s.last_seen for s in aio.registry.servers()], [360])

    def test_what_is_no_message(self) -> None:
        bomb = zlib.compress(bytes(100 << 20), 9)
        for data in (b"\xff\xff\xff\0", b"\1\0\xff\0", b"\1\0\0\2\4", b"\0\0\0\0", b"\x16\3\1\2\0", b"\x80", b"%", b"A" * 9000, b"\x0d" + b"A" * 9000,
                     b"13#N#D#%", b"13#N#D#1.2.3.4#5#6#%", b"13#N#D#-1#%", "13#N#D#२७#%".encode(), hexa("01000000 03"),
                     hexa("08000001 789c636060600000"), hexa("05000001 0000000000"), len(bomb).to_bytes(3, "little") + b"\1" + bomb):
            aio = aio_ready()
            session = aio.session("203.0.113.9", 0.0)
            tracemalloc.start()
            with self.subTest(data[:20]):
                self.assertRaises(ms.Malformed, feed, session, data, 4096)
            self.assertLess(tracemalloc.get_traced_memory()[1], 200000)
            tracemalloc.stop()
            self.assertEqual(session.buffer, b"")
        # What came before it is answered first, and a server whose connection ends so is not listed any more
        session = aio.session("203.0.113.9", 0.0)
        self.assertEqual(session.receive(b"13#N#D#27010#%13#%KEEPALIVE#%", 0.0), b"%SUCCESS#13#%")
        self.assertTrue(session.held)
        self.assertEqual(len(aio.registry.servers()), 2)
        self.assertRaises(ms.Malformed, session.receive, b"", 0.0)

    def test_compressed_input(self) -> None:
        for payload, answer in (("03 8269", "02000000 05 03"), ("02", "03000000 02 0000")):
            for level in range(10):
                packed = zlib.compress(hexa(payload), level)
                if packed[:1] == b"x" and len(packed) not in (0x0C, 0x0D):      # as a connection's first byte, those are binary
                    data = len(packed).to_bytes(3, "little") + b"\1" + packed
                    for size in range(1, len(data) + 1):
                        self.assertEqual(feed(ms.Aio(make_core()).session("203.0.113.9", 0.0), data, size), hexa(answer))

    def test_floods(self) -> None:
        aio = aio_ready()
        session = aio.session("203.0.113.9", 0.0)
        whole = session.receive(b"\x0c" * 49, 0.0)
        self.assertFalse(session.held)
        session.receive(b"\x0c" * 10, 0.0)
        self.assertRaisesRegex(ms.Malformed, "too many requests", session.receive, b"", 0.0)
        talker = aio.session("203.0.113.10", 0.0)
        talker.receive(b"HI#%" * 1000, 0.0)
        for _ in range(6):
            talker.receive(b"", 0.0)
        self.assertRaisesRegex(ms.Malformed, "too many messages", talker.receive, b"", 0.0)
        here = aio.session("127.0.0.1", 0.0)                        # has no limits, but its turn
        turns = [here.receive(b"\x0c" * 1000, 0.0)]
        while here.held:
            turns.append(here.receive(b"", 0.0))
        self.assertEqual({len(turn) for turn in turns[:-1]}, {len(whole) // 49 * ms.AIO_TURN_MESSAGES})
        self.assertEqual(sum(map(len, turns)), len(whole) // 49 * 1000)

    def test_query(self) -> None:
        core = make_core()
        aio = ms.Aio(core)
        session = aio.session("203.0.113.9", 0.0)
        session.receive(hexa("03000000 03 8269"), 0.0)
        server = core.registry.get("aio", "203.0.113.9", 27010)
        peer = ("203.0.113.9", 27010)
        self.assertEqual((server.name, server.verified), ("203.0.113.9:27010", "connection"))
        self.assertRaises(ms.Malformed, core.poller.datagram, zlib.compress(AIO_ANSWER), peer, 0.5)         # nobody has asked
        self.assertEqual(core.poller.tick(1.0), [(b"\0", peer)])
        bomb = zlib.compress(bytes(100 << 20), 9)
        for bad in (b"", b"\0", b"x" * 50, zlib.compress(b"\1" + AIO_ANSWER[1:]), zlib.compress(AIO_ANSWER[:-1]), zlib.compress(AIO_ANSWER)[:-1],
                    zlib.compress(b"\0\xff\xff"), bomb):
            tracemalloc.start()
            self.assertRaises(ms.Malformed, core.poller.datagram, bad, peer, 1.0)
            self.assertLess(tracemalloc.get_traced_memory()[1], 200000)
            tracemalloc.stop()
        self.assertRaises(ms.Malformed, core.poller.datagram, zlib.compress(AIO_ANSWER), ("203.0.113.10", 27010), 1.04)
        core.poller.datagram(zlib.compress(AIO_ANSWER), peer, 1.04)
        self.assertEqual((server.name, server.description, server.players, server.max_players, server.version, server.ping_ms),
                         ("My server", "Fun!", 3, 16, "7", 40))
        self.assertEqual(aio_ask(aio, b"12#%\n"), b"%12#My server#Fun!#203.0.113.9#27010#%")
        for now in range(30, 600):                      # silent from now on
            core.poller.tick(float(now))
        self.assertEqual(core.registry.servers(), [server])
        session.closed(600.0)
        self.assertEqual((core.registry.servers(), core.poller.targets), ([], {}))

    def test_query_goes_to_the_source(self) -> None:
        """Not to the address that the lists show: it may be another's, and behind the router the master reaches the server itself."""
        core = make_core(**{"address_map.192.168.1.5": "198.51.100.2", "server__refuse_names": "My"})
        ms.Aio(core).session("192.168.1.5", 0.0).receive(hexa("03000000 03 8269"), 0.0)
        self.assertEqual(core.poller.tick(1.0), [(b"\0", ("192.168.1.5", 27010))])
        core.poller.datagram(zlib.compress(AIO_ANSWER), ("192.168.1.5", 27010), 1.0)
        self.assertEqual([(s.name, s.players) for s in core.registry.servers()], [("198.51.100.2:27010", 3)])       # a name that is refused

    def test_news_file(self) -> None:
        asked: List[Any] = []
        core = make_core(aio__news="old", aio__news_file="news.txt")._replace(read_file=lambda *arguments: asked.append(arguments))
        aio = ms.Aio(core)
        self.assertEqual(asked[0][0], "news.txt")
        aio.tick(100.0)
        self.assertEqual(len(asked), 1)                 # the answer is still to come
        with self.assertLogs("masterserver", "WARNING") as logged:
            for now in (0.0, 3.0):
                asked.pop()[2](OSError("No such file"), now)
                aio.tick(now + ms.AIO_NEWS_S)
        self.assertEqual((len(logged.output), aio_ask(aio, b"NEWS#%")), (1, b"%NEWS#old#%"))
        asked.pop()[2]("\ufeffNew #1\r\n100%\r\n".encode("utf-8"), 6.0)
        self.assertEqual(aio_ask(aio, b"NEWS#%"), b"%NEWS#New <num>1\n100<percent>#%")
        self.assertEqual(aio_ask(aio, hexa("01000000 01")), hexa("0e000000 01 0b00") + b"New #1\n100%")
        with self.assertLogs("masterserver", "WARNING"):
            aio.found_news("news.txt", "é".encode("utf-8") * 8192 + b"x", 9.0)
        frame = aio_ask(aio, hexa("01000000 01"))
        self.assertEqual(zlib.decompress(frame[4:]), b"\1\0\x40" + "é".encode("utf-8") * 8192)

    def test_thousand_publishers(self) -> None:
        core = make_core(limits__servers_per_source="5000")
        aio = ms.Aio(core)
        sessions = [aio.session("10.0.%d.%d" % divmod(i, 250), 0.0) for i in range(1000)]
        tracemalloc.start()
        for i, session in enumerate(sessions):
            session.opened(0.0)
            session.receive((b"13#Server number %d [%d/64]#%s#27010#%%\n" % (i, i % 64, b"text " * 100), b"\x0dN\0%s\0\0\x14\x48\x01" % (b"x" * 500),
                             hexa("03000000 03 8269"))[i % 3], 0.0)
        requests = b"12#%\n", b"12#%", b"\x0c", hexa("01000000 02")
        for request in requests:
            aio_ask(aio, request)
        self.assertLess(tracemalloc.get_traced_memory()[0] / 1000, 20000)
        tracemalloc.stop()
        self.assertEqual(core.registry.total, 1000)
        for turn, request in enumerate(requests, 1):
            spent = []
            for now in range(10 * turn, 10 * turn + 5):
                sessions[0].receive(b"13#Server [%d/64]#text#27010#%%\n" % now, now)
                client = aio.session("127.0.0.1", now)
                began = time.perf_counter()
                answer = client.receive(request, now) or client.tick(now + ms.AIO_NEWLINE_S)
                spent.append(time.perf_counter() - began)
                self.assertGreater(len(answer), 2000)
            self.assertLess(min(spent), 0.005)

    def test_a_long_framed_list_is_one_frame(self) -> None:
        """Clients read it with one recv(4) and one recv(length)."""
        server = ms.MasterServer({"server.bind": "127.0.0.1", "aio.port": "0", **{
            row.setting: "" for row in ms.PROTOCOLS if row.setting not in ("", "aio.port")}})
        for i in range(3000):
            server.registry.hear("aio", "10.%d.%d.7" % divmod(i, 250), 27010, "10.%d.%d.7" % divmod(i, 250), 0.0, float("inf"), {})
        with server, socket.create_connection(("127.0.0.1", next(l.port for l in server.listeners if l.protocol == "aio"))) as client:
            client.settimeout(5)
            self.assertEqual(client.recv(5), hexa("01 00000000"))
            client.sendall(hexa("01000000 02"))
            head = client.recv(4)
            self.assertEqual(head[3], 1)
            payload = zlib.decompress(client.recv(int.from_bytes(head[:3], "little")))
        self.assertEqual(payload[:3], b"\2" + struct.pack("<H", 3000))
        self.assertEqual(payload.count(hexa("8269")), 3000)

    def test_fuzz(self) -> None:
        """Mutated traces of every dialect, and one run into another; only Malformed comes out, and limits hold."""
        chance = random.Random(5)
        traces = [data for _, data, _ in AIO_TRACES] + [b"SET_IP#203.0.113.7#%\n", hexa("0b000001") + zlib.compress(hexa("03 8269"))]
        aio = ms.Aio(make_core(limits__servers="200"))
        sessions: List[ms.AioSession] = []
        for turn in range(5000):
            now = turn / 10
            if not sessions or chance.random() < 0.3:
                sessions.append(aio.session(chance.choice(("127.0.0.1", "10.0.0.%d" % chance.randrange(9))), now))
                sessions[-1].opened(now)
            data = bytearray(chance.choice(traces) + chance.choice((b"", b"", chance.choice(traces))))
            for _ in range(chance.randrange(4)):
                data[chance.randrange(len(data))] = chance.choice((0, 1, 0x23, 0x25, 0x0A, 0x0C, 0x0D, 0xFF, chance.randrange(256)))
            session = chance.choice(sessions)
            try:
                feed(session, bytes(data), chance.randrange(1, len(data) + 1), now)
                chance.choice(sessions).tick(now)
            except ms.Malformed:
                session.done = True
            if session.done or chance.random() < 0.1:
                session.closed(now)
                sessions.remove(session)
            if turn % 50 == 0:
                for target in list(aio.poller.targets.values()):
                    aio.poller.ask(target, now)
                    answer = bytearray(AIO_ANSWER)
                    answer[chance.randrange(len(answer))] = chance.randrange(256)
                    try:
                        aio.poller.datagram(zlib.compress(bytes(answer)), (target.address, target.port), now)
                    except ms.Malformed:
                        pass
                for request in (b"12#%\n", b"\x0c", hexa("01000000 02")):
                    self.assertTrue(aio_ask(aio, request, now))
        for session in sessions:
            session.closed(now)
        self.assertEqual((aio.registry.total, aio.owners, aio.poller.targets), (0, {}, {}))


class AioScenario(unittest.TestCase):
    """Programs of all generations on one running server, over real sockets."""

    def connect(self, greeting: bytes = hexa("01 00000000")) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.server.port("aio")))
        self.addCleanup(sock.close)
        sock.settimeout(5)
        self.assertEqual(self.take(sock, len(greeting)), greeting)
        return sock

    def take(self, sock: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = sock.recv(size - len(data))
            self.assertTrue(piece, data)
            data += piece
        return data

    def until(self, sock: socket.socket, end: bytes) -> bytes:
        data = b""
        while not data.endswith(end):
            piece = sock.recv(65536)
            self.assertTrue(piece, data)
            data += piece
        return data

    def until_end(self, sock: socket.socket) -> bytes:
        return b"".join(iter(lambda: sock.recv(65536), b""))

    def frame(self, sock: socket.socket) -> bytes:
        head = self.take(sock, 4)
        body = self.take(sock, int.from_bytes(head[:3], "little"))
        return zlib.decompress(body) if head[3] else body

    def ports(self) -> Dict[str, List[int]]:
        """Of the listed servers, as a client of each kind sees them, on connections of their own."""
        seen: Dict[str, List[int]] = {}
        with self.connect() as client:
            client.sendall(b"12#%\n")
            seen["text"] = [int(port) for port in self.until(client, b"#%").split(b"#")[4:-1:4]]
        with self.connect() as client:
            client.sendall(b"12#%")
            fields = self.until(client, b"#%").split(b"#")
            self.assertEqual([int(index) for index in fields[1:-1:5]], list(range(len(fields) // 5)))
            seen["document"] = [int(port) for port in fields[5:-1:5]]
        with self.connect() as client:
            client.sendall(b"\x0c")
            client.shutdown(socket.SHUT_WR)
            data = self.until_end(client)
            at, seen["binary"] = 1, []
            while at < len(data):
                self.assertEqual(struct.unpack_from("<H", data, at)[0], len(seen["binary"]))
                at += 2
                for _ in range(3):
                    at = data.index(b"\0", at) + 1
                port, at = ms.read_uintv(data, at)
                seen["binary"].append(port)
        with self.connect() as client:
            client.sendall(hexa("01000000 02"))
            data = self.frame(client)
            at, seen["framed"] = 3, []
            while at < len(data):
                at += 1 + data[at]
                seen["framed"].append(struct.unpack_from("<H", data, at)[0])
                at += 2
        return {name: sorted(ports) for name, ports in seen.items()}

    def test_all_generations_at_once(self) -> None:
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as game:
            news = os.path.join(folder, "news.txt")
            with open(news, "w", encoding="utf-8") as file:
                file.write("Party at #9")
            game.bind(("127.0.0.1", 0))
            game.settimeout(5)
            framed_port = game.getsockname()[1]
            with RunningServer("-v", aio__port="0", aio__text_greeting_after="0.5", aio__news_file=news, aio__news="-") as self.server:
                text, binary, framed = self.connect(hexa("01 00000000") + b"%1#0#%"), self.connect(), self.connect()
                text.sendall(b"13#Text [1/8]#D#1001#%\n")
                self.assertEqual(self.until(text, b"13#%"), b"%SUCCESS#13#%")
                binary.sendall(b"\x0dBinary [2/8]\0D\0\0" + ms.uintv(1002))
                framed.sendall(b"\3\0\0\0\3" + struct.pack("<H", framed_port))
                self.assertEqual(self.frame(framed), b"\5\3")
                placeholder = [27010]
                eventually(lambda: self.ports()["text"] == sorted((1001, 1002, framed_port)))
                self.assertEqual(list(self.ports().values()), [sorted((1001, 1002, framed_port))] * 4)
                question, peer = game.recvfrom(100)
                self.assertEqual(question, b"\0")
                game.sendto(zlib.compress(AIO_ANSWER), peer)
                client = self.connect()
                client.sendall(b"NEWS#%\n")
                self.assertEqual(self.until(client, b"#%"), b"%NEWS#Party at <num>9#%")
                client.sendall(b"12#%\n")
                self.assertIn(b"#My server#Fun!#127.0.0.1#%d#" % framed_port, self.until(client, b"#%").replace(b"%12", b""))
                for leaving, left in ((text, [1002, framed_port]), (framed, [1002]), (binary, placeholder)):
                    leaving.close()
                    eventually(lambda left=left: self.ports()["text"] == left, 1.0)
                    rest = self.ports()
                    self.assertEqual(rest.pop("framed"), [] if left is placeholder else left)
                    self.assertEqual(list(rest.values()), [left] * 3)
                many = self.connect()
                many.sendall(b"\x0c" * 3000)                # one read, many turns; the peer sends no more
                many.shutdown(socket.SHUT_WR)
                self.assertEqual(self.until_end(many).count(b"No servers currently online :pepe:"), 3000)
                stranger = self.connect()
                stranger.sendall(b"\x80")
                self.assertEqual(self.until_end(stranger), b"")
            self.assertRegex(self.server.log, r"127\.0\.0\.1 aio malformed: the first byte, 80, is of no dialect")
            self.assertRegex(self.server.log, r"stopped; .*\n?.*aio: .*malformed 1")



# --- Web -------------------------------------------------------------------------------------------------------------


# --- Event loop and whole program ------------------------------------------------------------------------------------


class PipelineTest(unittest.TestCase):
    def test_requests_behind_a_full_pipeline_get_their_turn(self) -> None:
        """They came in one read and their answers fit the kernel's buffer, so no event of the socket brings their turn about."""
        with RunningServer() as server, socket.create_connection(("127.0.0.1", server.port("http"))) as client:
            client.settimeout(5)
            client.sendall(b"GET /style.css HTTP/1.1\r\nHost: x\r\n\r\n" * 1500)
            answers = b""
            while answers.count(b"HTTP/1.1 200") < 1500:
                answers += client.recv(1 << 20)
            self.assertGreater(len(answers), 2 * ms.HTTP_PIPELINE_BYTES)

# --- Client tools ----------------------------------------------------------------------------------------------------


# --- The project -----------------------------------------------------------------------------------------------------


if __name__ == "__main__":
    unittest.main()
