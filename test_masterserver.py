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

ICEBALL_CAPTURE = hexa("""31434542 0200 25808000 e954 0000 4000 4963656261 6c6c20536572766572 00000000000000000000000000000000
                          63746600000000000000 636c6173736963283531322c35313229 0000000000000000000000000000""")


LOOPBACK = {"server.bind": "127.0.0.1", "server.public_address": "203.0.113.5", "http.ports": "", "iceball.port": "0",
            "hyperbol.port": "", "subspace.port": "", "aio.port": ""}


def port_of(server: ms.MasterServer, protocol: str) -> int:
    return next(l.port for l in server.listeners if l.protocol == protocol)


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
                pass
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
