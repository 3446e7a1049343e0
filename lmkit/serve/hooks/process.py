"""One hook: what it declares, and the processes that run it. A call that takes too long ends its process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, Literal, Self

import msgspec

from lmkit.errors import JSON_ERRORS, ConfigError

START_SECONDS = 60.0  # for the imports of a hook
MAX_LINE_BYTES = 1 << 28
Stage = Literal["before", "after"]


class HookError(Exception):
    """A hook that raised, took too long or returned something else than it may."""


class Settings(msgspec.Struct, frozen=True):
    """The attributes of a hook."""

    before: bool
    after: bool
    timeout: Annotated[float, msgspec.Meta(gt=0, le=600)]  # seconds of a call, and of its wait for a free process
    on_failure: Literal["refuse", "pass"]
    sees: Literal["whole", "so_far"]
    processes: Annotated[int, msgspec.Meta(ge=1, le=64)]  # calls that may run at a time


class HookProcesses:
    """The processes of one hook. They start when they are needed, and again after one has ended."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name, self.settings = name, settings
        self._free = asyncio.Semaphore(settings.processes)
        self._idle: list[asyncio.subprocess.Process] = []

    @classmethod
    def load(cls, name: str) -> Self:
        """Import the hook in a process, to learn its settings. Raises ConfigError if it cannot be used."""
        try:
            done = subprocess.run(_command(name), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  timeout=START_SECONDS, check=False)  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ConfigError(f"--hook {name}: its import takes more than {START_SECONDS:g} s") from None
        return cls(name, _settings(name, done.stdout.partition(b"\n")[0]))

    async def close(self) -> None:
        """End the processes that run no call."""
        while self._idle:
            await _end(self._idle.pop())

    async def call(self, stage: Stage, call: dict[str, Any]) -> Any:
        """What the hook returns. Raises HookError."""
        seconds = self.settings.timeout
        async with _within(seconds, "it waited for a free process"):
            await self._free.acquire()
        try:
            process = self._idle.pop() if self._idle else await self._start()
            return await self._call(process, msgspec.json.encode([stage, call]), seconds)
        finally:
            self._free.release()

    async def _call(self, process: asyncio.subprocess.Process, line: bytes, seconds: float) -> Any:
        try:
            async with _within(seconds, "it took"):
                reply = await _exchange(process, line + b"\n")
        except BaseException:  # also a client that leaves: the process is in the middle of its call
            await _end(process)
            raise
        self._idle.append(process)
        if "error" in reply:
            raise HookError(f"it raised {reply['error']}")
        return reply["value"]

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *_command(self.name), stdin=pipe, stdout=pipe, limit=MAX_LINE_BYTES, start_new_session=True
        )
        try:
            async with _within(START_SECONDS, "its import took"):
                await _exchange(process, b"")  # its settings, which are known
        except BaseException:
            await _end(process)
            raise
        return process


def _command(name: str) -> list[str]:
    return [sys.executable, "-m", "lmkit.serve.hooks.worker", name]


def _settings(name: str, line: bytes) -> Settings:
    try:
        found = msgspec.json.decode(line)
        if "error" in found:
            raise ConfigError(f"--hook {name}: {found['error']}")
        settings = msgspec.convert(found, Settings)
    except JSON_ERRORS as error:
        raise ConfigError(f"--hook {name}: {error if line else 'its process ended while it was imported'}") from None
    if not (settings.before or settings.after):
        raise ConfigError(f"--hook {name}: it has neither a function before nor after")
    return settings


@asynccontextmanager
async def _within(seconds: float, what: str) -> AsyncGenerator[None]:
    """Raises HookError if the block takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise HookError(f"{what} more than {seconds:g} s") from None


async def _exchange(process: asyncio.subprocess.Process, line: bytes) -> dict[str, Any]:
    """Send a line and read one. Raises HookError if the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line)
        await process.stdin.drain()
        reply: dict[str, Any] = msgspec.json.decode(await process.stdout.readline())
    except (OSError, ValueError, msgspec.DecodeError):
        raise HookError("its process ended") from None
    return reply


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
