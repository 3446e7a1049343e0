"""An engine process as the front end sees it: its two sockets, its signs of life, and its end. No torch here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec
import zmq
import zmq.asyncio

import lmkit
from lmkit import log
from lmkit.ended import MemoryKills
from lmkit.errors import LMKitError
from lmkit.turbo.transport import messages

SILENT_SECONDS = 20.0  # without a sign of life: the process hangs, and is killed
STARTING_SECONDS = 600.0  # the same while it starts: reading torch's libraries from a slow disk holds Python's lock
STALLED_SECONDS = 5.0  # without a sign of life: /health says so

logger = log.get_logger(__name__)


class EngineProcess:
    """One engine process, its two sockets, and the task that passes its events to `handle` until it has ended.

    Every event is a sign of life. A process that sends none for `silent_seconds` is killed. Silence is counted in turns
    of this process, not read from a clock: if both were stopped (a laptop that slept, a debugger), none has passed.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        held: IO[bytes],
        commands: zmq.Socket,
        events: zmq.asyncio.Socket,
        handle: Callable[[messages.Event], None],
        silent_seconds: float,
    ) -> None:
        self._process, self._held = process, held
        self._commands, self._events = commands, events
        self._handle = handle
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(messages.Event)
        self._unsent: list[messages.Command] = []
        self._silent = 0.0  # seconds since the last event, in turns of this process
        self._silent_seconds = silent_seconds
        self._kills = MemoryKills()
        self.resident = 0  # bytes of memory that the process had at its last sign of life
        self._is_ready = self._is_slow = False
        self.exited = asyncio.ensure_future(process.wait())
        self.listening = asyncio.ensure_future(self._listen())

    @classmethod
    async def spawn(
        cls,
        context: zmq.Context,
        prefix: Path,
        arguments: dict[str, str],
        handle: Callable[[messages.Event], None],
        silent_seconds: float = SILENT_SECONDS,
    ) -> EngineProcess:
        """Start a process. `prefix` is the path prefix of two new sockets in a private folder.

        Raises LMKitError if the system refuses: it may have no more processes, open files or disk.
        """
        addresses = {name: f"ipc://{prefix}.{name}" for name in ("commands", "events")}
        with contextlib.ExitStack() as opened:  # a socket left open would block the end of `context`
            try:
                commands = opened.enter_context(context.socket(zmq.PUSH))
                events = opened.enter_context(zmq.asyncio.Socket(context, zmq.PULL))
                commands.linger = events.linger = 0
                commands.sndhwm = events.rcvhwm = messages.QUEUED_MESSAGES
                commands.bind(addresses["commands"])
                events.bind(addresses["events"])
                process, held = await cls._execute(arguments | addresses)
            except (OSError, zmq.ZMQError) as error:
                raise LMKitError(f"an engine process cannot be started: {error.strerror}") from None
            opened.pop_all()
        return cls(process, held, commands, events, handle, silent_seconds)

    @staticmethod
    async def _execute(arguments: dict[str, str]) -> tuple[asyncio.subprocess.Process, IO[bytes]]:
        """The process, and the end of its stdin that this process holds: the other one ends with it.

        The pipe is not asyncio's: if a process ends before asyncio has connected its pipes, because the start was
        cancelled, nobody is told of its end.
        """
        stdin, held_end = os.pipe()
        held = os.fdopen(held_end, "wb", 0)  # a file may be closed twice; the number may be another file's by then
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "lmkit.turbo.transport.engine_process",
                *(f"--{name}={value}" for name, value in arguments.items()),
                stdin=stdin,
                start_new_session=True,  # the front end handles Ctrl-C in a terminal
                cwd=Path(lmkit.__file__).parents[1],  # `-m` puts it on the path; the process then changes to --cwd
            )
        except BaseException:
            held.close()
            raise
        finally:
            os.close(stdin)
        return process, held

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_stalled(self) -> bool:
        """Whether it has sent no sign of life for a while, or its step takes too long."""
        return self._is_slow or self._silent > min(STALLED_SECONDS, self._silent_seconds / 2)

    def send(self, command: messages.Command) -> bool:
        """Send a command. Returns False if the process is so far behind that the socket is full."""
        try:
            self._commands.send(self._encoder.encode(command), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def send_surely(self, command: messages.Command) -> None:
        """Send a command now, or when the process has sent an event again."""
        if not self.send(command):
            self._unsent.append(command)

    async def _listen(self) -> None:
        receiving, watching = asyncio.ensure_future(self._receive()), asyncio.ensure_future(self._watch())
        await asyncio.wait({receiving, self.exited}, return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        if receiving.done():
            receiving.result()  # it raised: an event that this code does not understand
        receiving.cancel()
        await asyncio.wait({receiving, watching})
        while await self._events.poll(0):
            self._take(await self._events.recv())

    async def _receive(self) -> None:
        while True:
            self._take(await self._events.recv())
            while self._unsent and self.send(self._unsent[0]):
                self._unsent.pop(0)

    def _take(self, message: bytes) -> None:
        self._silent = 0.0
        event = self._decoder.decode(message)
        if isinstance(event, messages.Beat):
            self._is_slow, self.resident = event.is_slow, event.resident
            return
        self._is_ready |= isinstance(event, messages.Ready)
        self._handle(event)

    async def _watch(self) -> None:
        """Kill the process once it has been silent for too long."""
        while self._silent <= (self._silent_seconds if self._is_ready else STARTING_SECONDS):
            await asyncio.sleep(messages.BEAT_SECONDS)
            self._silent += messages.BEAT_SECONDS
        logger.error("the engine process gave no sign of life for %.0f s and is killed", self._silent)
        self.kill()

    @property
    def was_killed_for_memory(self) -> bool:
        """Of a process that has ended."""
        return self._kills.killed(self.exited.result())

    @property
    def ended(self) -> str:
        """How the process ended: `ended with status 3`."""
        return self._kills.ended(self.exited.result())

    async def stop(self, grace: float) -> None:
        """Ask the process to end, kill it after `grace` seconds, and close the sockets."""
        if grace and not self.exited.done() and self.send(messages.Shutdown()):
            await asyncio.wait({self.exited}, timeout=grace)
        self.kill()
        try:
            await asyncio.wait({self.exited, self.listening})
        finally:
            self._held.close()
            self._commands.close()
            self._events.close()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # asyncio may know of the end before `exited` does
            self._process.kill()
