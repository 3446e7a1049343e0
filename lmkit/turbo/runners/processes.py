"""The other processes of an engine whose model several processes share: they start, get messages, and end with it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, NamedTuple, Protocol, TypeVar

import msgspec

import lmkit
from lmkit.config import EngineConfig
from lmkit.ended import MemoryKills
from lmkit.environment import child_environment
from lmkit.errors import EngineLostError, LMKitError
from lmkit.models.spec import ModelSpec
from lmkit.turbo.adapters import AdapterRead
from lmkit.turbo.changes import Change
from lmkit.turbo.plan import StepPlan
from lmkit.turbo.request import SamplingParams
from lmkit.turbo.runners.runner import Runner, RunnerParts

STOP_SECONDS = 5.0  # for a process to end by itself
PROCESS = "lmkit.turbo.engine.rank_process"
ENDED = "a process of this engine has ended or failed, and its part of the model with it"
ADAPTER = b"adapter "  # begins a line in which a process says AdapterRead
T = TypeVar("T")


class Start(msgspec.Struct, frozen=True):
    """The first message to a process: what it loads, and the files that it inherits."""

    rank: int
    model_path: str
    config: EngineConfig
    files: list[int]  # descriptors: shared memory (runners.ranks), or sockets (runners.stages)
    slot_bytes: int = 0  # of the shared memory
    store: str = ""  # HOST:PORT where ranks on several machines find each other (runners.remote)
    cpus: list[int] = []  # that it is bound to; none: to nothing
    through_host: bool = False  # whether GPUs exchange through host memory (runners.cuda_ranks)
    num_states: int = 0  # recurrent states that process 0 has, those of snapshots among them
    folder: str = msgspec.field(default_factory=os.getcwd)  # in which paths of the configuration are meant


def write(pipe: IO[bytes], message: msgspec.Struct) -> None:
    """Write a message after its length."""
    data = msgspec.msgpack.encode(message)
    pipe.write(len(data).to_bytes(4, "little") + data)
    pipe.flush()


def read(pipe: IO[bytes], kind: type[T]) -> T:
    """Read a message. Raises EOFError at the end of the pipe."""
    return msgspec.msgpack.decode(_data(pipe), type=kind)


def _data(pipe: IO[bytes]) -> bytes:
    if not (length := pipe.read(4)):
        raise EOFError
    return pipe.read(int.from_bytes(length, "little"))


def plans(pipe: IO[bytes], change: Callable[[Change], None]) -> Iterator[StepPlan]:
    """The plans that come, until the pipe ends. Changes that stand between them are carried out there."""
    decoder = msgspec.msgpack.Decoder(StepPlan | Change)
    while True:
        try:
            message = decoder.decode(_data(pipe))
        except EOFError:
            return
        if isinstance(message, StepPlan):
            yield message
        else:
            change(message)


class Process(Protocol):
    """The part of subprocess.Popen that is used."""

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    pid: int

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class SharedModel(NamedTuple):
    """A model that several processes share."""

    path: str
    config: EngineConfig  # of the other processes
    spec: ModelSpec
    cpus: list[list[int]]  # of each process; none: it is bound to nothing
    num_states: int  # recurrent states, see Start


class Processes(ABC):
    """Processes 1 and on, as process 0 sees them."""

    def __init__(self, model: SharedModel, lose: Callable[[str], None]) -> None:
        """Start the processes. `lose` is called, from a thread, when one has ended. Raises LMKitError if one cannot be
        started."""
        self._lose, self._closed = lose, False
        self._kills = MemoryKills()
        self._heard: Callable[[AdapterRead], None] | None = None
        self._processes: list[Process] = []
        with self._starts(model) as starts:
            for start in starts:
                self._processes.append(self._begin(start))
            for process, start in zip(self._processes, starts, strict=True):
                self._send_to(process, msgspec.structs.replace(start, num_states=model.num_states))

    @abstractmethod
    def _starts(self, model: SharedModel) -> AbstractContextManager[Sequence[Start]]:
        """The first message to each process. After it process 0 closes the files that they alone are to hold."""

    @abstractmethod
    def runner(self, parts: RunnerParts) -> Runner:
        """The runner of process 0."""

    def _begin(self, start: Start) -> Process:
        """Start a process."""
        return subprocess.Popen(
            [sys.executable, "-m", PROCESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(**self._variables(start.rank)),
            pass_fds=start.files,
            start_new_session=True,  # Ctrl-C in a terminal is the engine's
            cwd=Path(lmkit.__file__).parents[1],
        )

    def _variables(self, rank: int) -> dict[str, str]:
        """What is added to a process' environment."""
        return {}

    def hear(self, word: str) -> list[str]:
        """What every process says after `word`. Raises LMKitError if one says something else: why it cannot start."""
        found = []
        for rank, process in enumerate(self._processes, 1):
            assert process.stdout is not None
            answer = process.stdout.readline().decode().strip()
            if not answer.startswith(word):
                self.close()
                raise LMKitError(f"rank {rank} of {len(self._processes) + 1}: {answer or 'it ended; its log says why'}")
            found.append(answer.removeprefix(word).strip())
        return found

    def wait_until_ready(self) -> None:
        """Wait until every process has loaded its part. Raises LMKitError if one cannot."""
        self.hear("ready")
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def send(self, message: msgspec.Struct) -> None:
        """Send a message to every process. Raises EngineLostError if one has ended."""
        for process in self._processes:
            self._send_to(process, message)

    def close(self) -> None:
        """End the processes."""
        self._closed = True
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _send_to(self, process: Process, message: msgspec.Struct) -> None:
        assert process.stdin is not None
        try:
            write(process.stdin, message)
        except (BrokenPipeError, ValueError):
            raise EngineLostError(ENDED) from None

    def hear_adapters(self, heard: Callable[[AdapterRead], None]) -> None:
        """Have `heard` called, from threads, with what processes say of adapters."""
        self._heard = heard

    def _watch(self, rank: int, process: Process) -> None:
        assert process.stdout is not None
        with contextlib.suppress(OSError):  # another machine
            for line in process.stdout:
                if line.startswith(ADAPTER) and self._heard is not None:
                    self._heard(msgspec.json.decode(line.removeprefix(ADAPTER), type=AdapterRead))
        status = process.wait()
        if not self._closed:
            self._ended(
                f"rank {rank} of {len(self._processes) + 1} {self._kills.ended(status)}; start the engine again"
            )

    def _ended(self, reason: str) -> None:
        self._lose(reason)


def without_wishes(plan: StepPlan) -> StepPlan:
    """The plan without what only sampling needs."""
    if not plan.new:
        return plan
    plain = SamplingParams()
    new = [msgspec.structs.replace(one, params=plain, eos_token_ids=()) for one in plan.new]
    return msgspec.structs.replace(plan, new=new)
