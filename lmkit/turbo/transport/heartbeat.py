"""Signs of life of the engine process, and the end of a process whose step never ends.

A thread beside the engine's loop sends a beat while the loop loads, compiles or computes. All of these let other
threads run. It also counts the beats during one call of the engine. A call that takes longer than the engine expects of
its step at worst ends the process: the front end then starts another one. Time is counted in beats, not read from a
clock. A process that was stopped (a laptop that slept, a debugger) therefore has not lost time.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec
import zmq

from lmkit import log
from lmkit.turbo.host_memory import resident_memory
from lmkit.turbo.transport.messages import BEAT_SECONDS, Beat

HUNG = 70  # exit status

logger = log.get_logger(__name__)


class Heartbeat:
    """Sends beats to the socket at `address` from now until `stop`."""

    def __init__(self, context: zmq.Context, address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.linger = 0
        self._socket.connect(address)
        self._ended = threading.Event()
        self._call: Callable[[], float] | None = None  # the limit of the call under way
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    @contextmanager
    def watching(self, limit: Callable[[], float]) -> Iterator[None]:
        """Inside is one call of the engine. `limit`, a new function for each call, says how long it may take."""
        self._call = limit
        try:
            yield
        finally:
            self._call = None

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        self._socket.close()

    def _beat(self) -> None:
        encode = msgspec.msgpack.Encoder().encode
        before, seconds, is_slow = None, 0.0, False
        while True:
            with suppress(zmq.Again):  # the front end is far behind: it has signs of life in plenty
                self._socket.send(encode(Beat(is_slow, resident_memory())), zmq.NOBLOCK)
            if self._ended.wait(BEAT_SECONDS):
                return
            call = self._call
            seconds = seconds + BEAT_SECONDS if call is before and call is not None else 0.0
            before, limit = call, call() if call is not None else 0.0
            if seconds > limit:
                _end(seconds, limit)
            is_slow = seconds > limit / 2


def _end(seconds: float, limit: float) -> None:
    """End the process and leave the stacks of all threads in its log."""
    hangs = "a step hangs: it has run for %.1f s and may take %.1f s; the engine ends. Its threads:"
    logger.critical(hangs, seconds, limit)
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    os._exit(HUNG)
