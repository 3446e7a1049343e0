"""lmkit's commands as child processes: their options, their lines and their ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import msgspec
import psutil

from lmkit.cluster.gpus import least_used, num_gpus, visible_gpus
from lmkit.ended import MemoryKills
from lmkit.environment import child_environment
from lmkit.errors import ConfigError
from lmkit.log import get_logger

Say = Callable[[str, str], None]  # (id of the replica, a line that it wrote)
_LINE_BYTES = 1 << 20

log = get_logger(__name__)


def check_options(options: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError, which starts with `where`, for options that `lmkit serve` refuses."""
    checked = subprocess.run(
        [sys.executable, "-m", "lmkit", "serve", "--config", "/dev/stdin", "--print-config"],
        input=msgspec.json.encode(options),
        env=child_environment(),
        capture_output=True,
        check=False,
    )
    if checked.returncode:
        *_, line = checked.stderr.decode(errors="replace").strip().splitlines() or [""]
        raise ConfigError(f"{where}: {re.sub(r'^lmkit: |/dev/stdin:1: ', '', line)}")


class Replica(Protocol):
    """A started `lmkit serve`."""

    @property
    def ended(self) -> str:
        """How it ended, or an empty text while it runs."""

    def drain(self) -> None:
        """Let it finish its requests and end."""

    def kill(self) -> None: ...


class Launcher(Protocol):
    """Starts replicas."""

    host: str  # on which they listen

    async def start(self, id: str, options: Mapping[str, Any], cores: int | None) -> Replica:
        """Start `lmkit serve` with these options. Raises LMKitError if it cannot be started."""

    async def close(self) -> None: ...


class Child:
    """One process. It ends if this process ends, after a drain."""

    def __init__(self, process: asyncio.subprocess.Process, id: str, say: Say) -> None:
        self._process, self._id, self._say = process, id, say
        self._kills = MemoryKills()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls, id: str, arguments: list[str], say: Say, *, options: Mapping[str, Any] | None = None, **variables: str
    ) -> Child:
        """`options` are read from stdin by `--config /dev/stdin`: keys do not belong on a command line."""
        read_end, write_end = os.pipe()  # an event loop may make a socket of it, and /dev/stdin cannot be one
        with open(read_end, "rb") as stdin, open(write_end, "wb") as written:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "lmkit.cluster.child", str(os.getpid()), *arguments),
                stdin=stdin,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in a terminal is this process'
                env=child_environment(**variables),
                limit=_LINE_BYTES,
            )
            written.write(msgspec.json.encode(options or {}))
        return cls(process, id, say)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # longer than the limit
                continue
            if not line:
                return
            self._say(self._id, line.decode(errors="replace").rstrip("\n"))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> str:
        code = self._process.returncode
        return "" if code is None else self._kills.ended(code)

    def drain(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """With all that it started: an engine that is stopped would not notice that its front end has ended."""
        with suppress(psutil.Error):
            for process in psutil.Process(self.pid).children(recursive=True):
                process.kill()
        self._signal(signal.SIGKILL)

    def reload(self) -> None:
        self._signal(signal.SIGHUP)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def wait(self) -> None:
        await self._process.wait()
        with suppress(TimeoutError):  # a grandchild may hold the pipe
            await asyncio.wait_for(self._reading, 1)


class LocalLauncher:
    """Replicas as processes of this machine, each with the GPUs that the fewest others have."""

    def __init__(self, host: str, say: Say) -> None:
        self.host, self._say = host, say
        self._gpus = visible_gpus()
        self._placed: list[tuple[Child, list[str]]] = []

    async def start(self, id: str, options: Mapping[str, Any], cores: int | None) -> Child:
        variables = {"LMKIT_NUM_THREADS": str(cores)} if cores else {}
        if gpus := self._free_gpus(id, num_gpus(options)):
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        child = await Child.start(
            id, ["serve", "--config", "/dev/stdin"], self._say, options={**options, "host": self.host}, **variables
        )
        self._placed.append((child, gpus))
        return child

    def _free_gpus(self, id: str, count: int) -> list[str]:
        """Fewer than `count`, if there are not so many: the replica itself refuses them."""
        self._placed = [(child, gpus) for child, gpus in self._placed if not child.ended]
        used = [gpu for _, gpus in self._placed for gpu in gpus]
        chosen = least_used(self._gpus, used, count)
        if shared := sorted(set(chosen).intersection(used)):
            log.warning("%s shares GPU %s with other replicas: there are too few GPUs", id, ", ".join(shared))
        return chosen

    async def close(self) -> None:
        pass
