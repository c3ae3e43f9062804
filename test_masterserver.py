"""Tests of masterserver.py, in the program's order: python3 test_masterserver.py

Golden packets come from the protocol documents and from captures of deployed programs, never from the program's own encoders.
Protocol time is a number that the test moves; only the scenarios at the end use real sockets, on loopback and free ports.
"""
from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
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
