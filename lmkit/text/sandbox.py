"""Work on a stranger's input in a process of its own (`sandbox_process`), with limits of time, memory and stack."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from lmkit.errors import JSON_ERRORS
from lmkit.text.fair_turns import TENANT, FairTurns

WALL_SECONDS = 60.0  # for a process that was stopped, or that waits for a processor
MAX_REPLY_BYTES = 128 << 20
BUFFER_BYTES = 1 << 18
_PROGRAM = Path(__file__).with_name("sandbox_process.py")


class Sandbox:
    """The process of one module. It is started when it is needed, and again after it was ended.

    Safe to use from several threads: one asks, the others wait.
    """

    def __init__(self, module: str, cpu_seconds: float, memory: int) -> None:
        """`module` is a file beside this one with a function `answer`. `cpu_seconds` bounds one answer.

        `memory` is in bytes, beyond what the process has when it starts.
        """
        self._arguments = (str(_PROGRAM.with_name(module)), str(cpu_seconds), str(memory))
        self._lock = threading.Lock()
        self._owner = 0  # the id of the process that started it; a fork of that must not share it

    def ask(self, *request: Any) -> tuple[str, Any]:
        """The module's answer, a pair; ("limit", "") if the process ended over it.

        Raises TypeError or UnicodeEncodeError for a request that JSON cannot hold.
        """
        line = msgspec.json.encode(request) + b"\n"
        with self._lock:
            if self._owner != os.getpid() or self._process.poll() is not None:
                self._start()
            try:
                self._stream.write(line)
                self._stream.flush()
                return msgspec.json.decode(self._stream.readline(MAX_REPLY_BYTES), type=tuple[str, Any])
            except (OSError, *JSON_ERRORS):
                self._end()
                return "limit", ""
            except BaseException:  # the late reply would be taken for that to the next request
                self._end()
                raise

    @property
    def pid(self) -> int:
        """The id of the process, which must have been started."""
        return self._process.pid

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM), *self._arguments],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # the parent handles Ctrl-C in a terminal
            )
            ours.settimeout(WALL_SECONDS)
            self._stream = ours.makefile("rwb", BUFFER_BYTES)  # keeps the socket open
        self._owner = os.getpid()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()


class Sandboxes:
    """Several processes of one module. The tenants of `fair_turns.TENANT` take turns at them."""

    def __init__(self, count: int, module: str, cpu_seconds: float, memory: int) -> None:
        """The last three are those of a `Sandbox`."""
        self._turns = FairTurns(count)
        self._idle = deque(Sandbox(module, cpu_seconds, memory) for _ in range(count))

    def ask(self, name: str, parts: tuple[Any, ...], *value: Any) -> tuple[str, Any]:
        """The answer to ("grammar", name, *value) of a process that has been told ("tokenizer", name, *parts)."""
        with self._turns.turn(TENANT.get()):
            sandbox = self._idle.pop()  # the one that was used last: others are started only where it is busy
            try:
                kind, answer = sandbox.ask("grammar", name, *value)
                if kind == "unknown":
                    sandbox.ask("tokenizer", name, *parts)
                    kind, answer = sandbox.ask("grammar", name, *value)
                return kind, answer
            finally:
                self._idle.append(sandbox)
