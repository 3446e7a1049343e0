"""Tensor and expert parallelism on one machine: rank 0 lies in the engine, every other rank is a process of its own.

    scheduler -> plan -> rank 0 -- pipe: plan, tokens --> rank 1, rank 2, ...
                         rank 0 <== shared memory: sums ==> rank 1, rank 2, ...

Every rank carries out the same plans on its part of the model (models.shard) and of the KV cache. Rank 0 samples, and
sends the tokens. A rank that ends takes the engine with it: the other ranks have parts of a model only.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO

import msgspec
from torch import Tensor

from lmkit.config import EngineConfig
from lmkit.errors import EngineLostError
from lmkit.kernels.cpu.collective import SharedRanks, shared_bytes
from lmkit.models.spec import ModelSpec
from lmkit.turbo.changes import Change
from lmkit.turbo.plan import Chunk, Sampled, SampledToken, StepPlan
from lmkit.turbo.runners.batch import StepRows
from lmkit.turbo.runners.cpu import CpuRunner
from lmkit.turbo.runners.processes import ENDED, Processes, SharedModel, Start, plans, read, without_wishes
from lmkit.turbo.runners.runner import RunnerParts


class Tokens(msgspec.Struct, frozen=True):
    """The tokens that rank 0 has sampled for each chunk of a plan."""

    token_ids: list[list[int]]


def slot_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Bytes that a rank gives the others at once: of a step's activations, or of its part of the logits."""
    rows = min(config.sequences_per_step, config.tokens_per_step)
    widest = max(config.tokens_per_step * spec.hidden_size, rows * -(-spec.vocab_size // config.num_ranks))
    return -(-4 * widest // 64) * 64


class Ranks(Processes):
    """The processes of ranks 1 and on, and the memory that all ranks share."""

    shared: SharedRanks

    @contextmanager
    def _starts(self, model: SharedModel) -> Iterator[list[Start]]:
        config, size, slot = model.config, model.config.num_ranks, slot_bytes(model.config, model.spec)
        num_bytes = shared_bytes(size, slot)
        memory = os.memfd_create("lmkit-ranks")
        try:
            os.ftruncate(memory, num_bytes)
            self.shared = SharedRanks(mmap.mmap(memory, num_bytes), 0, size, slot, model.spec.vocab_size)
            yield [Start(r, model.path, config, [memory], slot, cpus=model.cpus[r]) for r in range(1, size)]
        finally:
            os.close(memory)

    def runner(self, parts: RunnerParts) -> LeadingRunner:
        """See Processes."""
        return LeadingRunner(parts, self)

    def check(self) -> None:
        """Raise EngineLostError if a rank has ended."""
        if self.shared.is_lost:
            raise EngineLostError(ENDED)

    def _ended(self, reason: str) -> None:
        super()._ended(reason)  # first: it names the rank, and the error of a step that is lost does not
        self.shared.lose()
        threading.Event().wait(0.1)
        self.shared.lose()  # for a thread that was about to sleep


class LeadingRunner(CpuRunner):
    """The runner of rank 0."""

    def __init__(self, parts: RunnerParts, ranks: Ranks) -> None:
        parts.decoder.join(ranks.shared, split=parts.config.tp > 1)
        super().__init__(parts)
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

    def tell(self, change: Change) -> None:
        """See Runner. The thread that sends plans and tokens sends it, so it comes between two plans."""
        self.later(partial(self.ranks.send, change))

    def close(self) -> None:
        super().close()
        self.ranks.close()


def joined(start: Start, vocab_size: int) -> SharedRanks:
    """Another rank's view of the ranks."""
    size = start.config.num_ranks
    memory = mmap.mmap(start.files[0], shared_bytes(size, start.slot_bytes))
    return SharedRanks(memory, start.rank, size, start.slot_bytes, vocab_size)


class FollowingRunner(CpuRunner):
    """The runner of another rank. It takes plans and tokens from a pipe."""

    def __init__(self, parts: RunnerParts, shared: SharedRanks, pipe: IO[bytes]) -> None:
        parts.decoder.join(shared, split=parts.config.tp > 1)
        super().__init__(parts)
        self._pipe = pipe

    def run(self, change: Callable[[Change], None]) -> None:
        """Carry out plans, and changes between them, until the pipe ends."""
        for plan in plans(self._pipe, change):
            self.execute(plan)

    def next_tokens(self, logits: Tensor, chunks: list[Chunk], rows: StepRows | None) -> list[list[SampledToken]]:
        """See CpuRunner."""
        return [[SampledToken(token) for token in new] for new in read(self._pipe, Tokens).token_ids]
