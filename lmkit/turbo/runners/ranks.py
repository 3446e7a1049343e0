"""Tensor parallelism on one machine: rank 0 lies in the engine, every other rank is a process of its own.

    scheduler -> plan -> rank 0 -- pipe: plan, tokens --> rank 1, rank 2, ...
                         rank 0 <== shared memory: sums ==> rank 1, rank 2, ...

Every rank carries out the same plans on its part of the model (models.shard) and of the KV cache. Rank 0 samples, and
sends the tokens. A rank that ends takes the engine with it: the other ranks have parts of a model only.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, TypeVar

import msgspec
from torch import Tensor

import lmkit
from lmkit import log
from lmkit.config import EngineConfig
from lmkit.errors import EngineLostError, LMKitError
from lmkit.kernels.cpu.collective import SharedRanks, shared_bytes
from lmkit.models.spec import ModelSpec
from lmkit.turbo.plan import Chunk, Sampled, SampledToken, StepPlan
from lmkit.turbo.request import SamplingParams
from lmkit.turbo.runners.batch import StepRows
from lmkit.turbo.runners.cpu import CpuRunner
from lmkit.turbo.runners.device import CpuDevice
from lmkit.turbo.runners.runner import RunnerParts

STOP_SECONDS = 5.0  # for a rank to end by itself
PROCESS = "lmkit.turbo.engine.rank_process"
T = TypeVar("T")
logger = log.get_logger(__name__)


class Start(msgspec.Struct, frozen=True):
    """The first message to a rank: what it loads, and the memory that it shares."""

    rank: int
    model_path: str
    folder: str  # in which paths of the configuration are meant
    config: EngineConfig
    memory: int  # file descriptor
    slot_bytes: int


class Tokens(msgspec.Struct, frozen=True):
    """The tokens that rank 0 has sampled for each chunk of a plan."""

    token_ids: list[list[int]]


def write(pipe: IO[bytes], message: msgspec.Struct) -> None:
    """Write a message behind its length."""
    data = msgspec.msgpack.encode(message)
    pipe.write(len(data).to_bytes(4, "little") + data)
    pipe.flush()


def read(pipe: IO[bytes], kind: type[T]) -> T:
    """Read a message. Raises EOFError at the end of the pipe."""
    if not (length := pipe.read(4)):
        raise EOFError
    return msgspec.msgpack.decode(pipe.read(int.from_bytes(length, "little")), type=kind)


class Ranks:
    """The processes of ranks 1 and on, as rank 0 sees them."""

    def __init__(self, model_path: str, config: EngineConfig, spec: ModelSpec, lose: Callable[[str], None]) -> None:
        """Start the processes. `config` is theirs; `lose` is called, from a thread, when one has ended."""
        rows = min(config.max_batch_size, config.tokens_per_step)
        widest = max(config.tokens_per_step * spec.hidden_size, rows * -(-spec.vocab_size // config.tp))
        slot = -(-4 * widest // 64) * 64
        num_bytes = shared_bytes(config.tp, slot)
        self._lose, self._closed = lose, False
        memory = os.memfd_create("lmkit-ranks")
        try:
            os.ftruncate(memory, num_bytes)
            self.shared = SharedRanks(mmap.mmap(memory, num_bytes), 0, config.tp, slot, spec.vocab_size)
            self._processes = [_spawn(memory) for _ in range(1, config.tp)]
            for rank, process in enumerate(self._processes, 1):
                self._send_to(process, Start(rank, model_path, os.getcwd(), config, memory, slot))
        finally:
            os.close(memory)

    def wait_until_ready(self) -> None:
        """Wait until every rank has loaded its part. Raises LMKitError if one cannot."""
        for rank, process in enumerate(self._processes, 1):
            assert process.stdout is not None
            answer = process.stdout.readline().decode().strip()
            if answer != "ready":
                self.close()
                raise LMKitError(f"rank {rank} of {len(self._processes) + 1}: {answer or 'it ended; its log says why'}")
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def send(self, message: StepPlan | Tokens) -> None:
        """Send a message to every rank. Raises EngineLostError if one has ended."""
        for process in self._processes:
            self._send_to(process, message)

    def check(self) -> None:
        """Raise EngineLostError if a rank has ended."""
        if self.shared.is_lost:
            raise EngineLostError("a process of this engine has ended or failed, and its part of the model with it")

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

    def _send_to(self, process: subprocess.Popen[bytes], message: msgspec.Struct) -> None:
        assert process.stdin is not None
        try:
            write(process.stdin, message)
        except (BrokenPipeError, ValueError):
            self.shared.lose()
            self.check()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if self._closed:
            return
        self.shared.lose()
        self._lose(f"rank {rank} of {len(self._processes) + 1} has ended with status {status}; start the engine again")
        threading.Event().wait(0.1)
        self.shared.lose()  # for a thread that was about to sleep


def _spawn(memory: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", PROCESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(memory,),
        start_new_session=True,  # Ctrl-C in a terminal is the engine's
        cwd=Path(lmkit.__file__).parents[1],
    )


def without_wishes(plan: StepPlan) -> StepPlan:
    """The plan without what only sampling needs."""
    if not plan.new:
        return plan
    plain = SamplingParams()
    new = [msgspec.structs.replace(one, params=plain, eos_token_ids=()) for one in plan.new]
    return msgspec.structs.replace(plan, new=new)


class LeadingRunner(CpuRunner):
    """The runner of rank 0."""

    def __init__(self, device: CpuDevice, parts: RunnerParts, ranks: Ranks) -> None:
        parts.decoder.join(ranks.shared)
        super().__init__(device, parts)
        self.ranks = ranks

    def execute(self, plan: StepPlan) -> list[Sampled]:
        """See CpuRunner. After a failure the ranks may disagree, so no step follows it."""
        self.ranks.check()
        try:
            self.ranks.send(without_wishes(plan))
            sampled = super().execute(plan)
            self.ranks.check()
        except Exception:
            self.ranks.shared.lose()
            raise
        return sampled

    def next_tokens(self, logits: Tensor, chunks: list[Chunk], rows: StepRows | None) -> list[list[SampledToken]]:
        """See CpuRunner."""
        self.ranks.check()
        tokens = super().next_tokens(logits, chunks, rows)
        self.ranks.send(Tokens([[token.token_id for token in new] for new in tokens]))
        return tokens

    def close(self) -> None:
        super().close()
        self.ranks.close()


class FollowingRunner(CpuRunner):
    """The runner of another rank. It takes plans and tokens from a pipe."""

    def __init__(self, device: CpuDevice, parts: RunnerParts, ranks: SharedRanks, pipe: IO[bytes]) -> None:
        parts.decoder.join(ranks)
        super().__init__(device, parts)
        self._pipe = pipe

    def run(self) -> None:
        """Carry out plans until the pipe ends."""
        while True:
            try:
                plan = read(self._pipe, StepPlan)
            except EOFError:
                return
            self.execute(plan)

    def next_tokens(self, logits: Tensor, chunks: list[Chunk], rows: StepRows | None) -> list[list[SampledToken]]:
        """See CpuRunner."""
        return [[SampledToken(token) for token in new] for new in read(self._pipe, Tokens).token_ids]
