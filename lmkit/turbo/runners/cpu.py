"""Carries out a step plan: tensors in, sampled tokens out. `Runner` is that of a CPU, turbo.cuda_runner has a GPU's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from lmkit.kernels.cpu.workspace import Workspace
from lmkit.layers.batch import BatchInputs, KVLayer
from lmkit.models.decoder import Decoder
from lmkit.turbo.kv.blocks import KVBlocks
from lmkit.turbo.kv.tiers.store import TierStore
from lmkit.turbo.plan import Chunk, NewSequence, Sampled, StepPlan
from lmkit.turbo.request import TokenLogprobs
from lmkit.turbo.runners.batch import PersistentBatch, StepRows
from lmkit.turbo.runners.cpu_graphs import StepGraphs
from lmkit.turbo.runners.sampler import Sampler, token_logprobs

SCORED_BYTES = 16 << 20  # of the logits of prompt tokens held at a time, however long the prompt


class StepResult(NamedTuple):
    """Of a step that has run: its samples, seconds, and those of them in the model."""

    sampled: list[Sampled]
    seconds: float
    kernels: float


class SlotStates(Protocol):
    """A sampler, as far as plans change it."""

    num_top: np.ndarray  # by slot: most likely tokens to report

    def set(self, slot: int, new: NewSequence) -> None: ...
    def clear(self, slot: int) -> None: ...


class PlanRunner:
    """What every device's runner does with a plan: blocks move, sequences enter and leave.

    It has one model, its KV blocks, the persistent batch and the sampler's per-slot state.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: list[KVLayer],
        batch: PersistentBatch,
        states: SlotStates,
        *,
        blocks: KVBlocks,
        tiers: TierStore | None = None,
    ) -> None:
        self.decoder = decoder
        self.kv = kv
        self.batch = batch
        self._states = states
        self._blocks = blocks
        self._tiers = tiers
        self._failed: set[int] = set()  # slots of a step that raised: what a later plan has for them is void

    @contextmanager
    def _begun(self, plan: StepPlan) -> Iterator[list[Chunk]]:
        """The chunks to compute, after all that comes before them. Whatever raises makes the plan's slots void."""
        try:
            self._move(plan)
            for slot in plan.freed:
                self._states.clear(slot)
            for new in plan.new:
                self._failed.discard(new.slot)
                self.batch.enter(new)
                self._states.set(new.slot, new)
            yield [chunk for chunk in plan.chunks if chunk.slot not in self._failed] if self._failed else plan.chunks
        except Exception:
            self._failed.update(chunk.slot for chunk in plan.chunks)
            raise

    @staticmethod
    def for_all(plan: StepPlan, chunks: list[Chunk], sampled: list[Sampled]) -> list[Sampled]:
        """One result for each of the plan's chunks, in order; nothing for those that were not computed."""
        if len(chunks) == len(plan.chunks):
            return sampled
        by_slot = {chunk.slot: result for chunk, result in zip(chunks, sampled, strict=True)}
        return [by_slot.get(chunk.slot, Sampled(-1)) for chunk in plan.chunks]

    def _move(self, plan: StepPlan) -> None:
        """Saves before copies before loads: a block may be saved, given away and written to, all in one plan."""
        try:
            if self._tiers is not None:
                self._tiers.save(plan.saves)
            self._blocks.copy(plan.copies)
        finally:  # loads are not the step's own: whoever waits for one would wait for ever
            if self._tiers is not None:
                for load in plan.loads:
                    self._tiers.load(load)

    def _scores(
        self, chunks: list[Chunk], rows: StepRows, delta: Tensor, residual: Tensor | None
    ) -> list[list[TokenLogprobs]]:
        """Of each chunk's prompt tokens, where they are asked for. To be called before the step's logits are computed:
        where every row is wanted, the head overwrites the stream.
        """
        return [
            self._score(chunk, span, delta, residual) if span else []
            for chunk, span in zip(chunks, rows.prompt_rows, strict=True)
        ]

    def _score(self, chunk: Chunk, span: range, delta: Tensor, residual: Tensor | None) -> list[TokenLogprobs]:
        """What the step's tokens `span` say of the prompt tokens behind them; logits of a part of them at a time."""
        targets = self.batch.prompt_targets(chunk, len(span))
        num_top = max(0, int(self._states.num_top[chunk.slot]))
        size = max(1, SCORED_BYTES // (4 * self.decoder.spec.vocab_size))
        scores: list[TokenLogprobs] = []
        for begin in range(span.start, span.stop, size):
            part = slice(begin, min(begin + size, span.stop))
            for logits in self.decoder.head_part(delta, residual, part).cpu().numpy():
                scores.append(token_logprobs(logits, targets[len(scores)], num_top))
        return scores


def with_scores(rows: StepRows, drawn: list[Sampled], scores: list[list[TokenLogprobs]]) -> list[Sampled]:
    """A result for each chunk, from those of the chunks that sample and the prompt tokens' scores."""
    results = [Sampled(-1) if row < 0 else drawn[row] for row in rows.sample_row]
    return [
        msgspec.structs.replace(result, prompt_logprobs=scored) if scored else result
        for result, scored in zip(results, scores, strict=True)
    ]


class Runner(PlanRunner):
    """On a CPU: a plan's results are there when `execute` returns."""

    def __init__(
        self,
        decoder: Decoder,
        kv: list[KVLayer],
        batch: PersistentBatch,
        sampler: Sampler,
        workspace_bytes: int,
        *,
        blocks: KVBlocks,
        tiers: TierStore | None = None,
    ) -> None:
        super().__init__(decoder, kv, batch, sampler, blocks=blocks, tiers=tiers)
        self.sampler = sampler
        self.kernel_seconds = 0.0  # spent in the model, of all steps
        self._workspace = Workspace(workspace_bytes)
        self._graphs = StepGraphs(decoder, kv, self._workspace)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[Sampled]:
        """One result for each of the plan's chunks, in order."""
        with self._begun(plan) as chunks:
            return self.for_all(plan, chunks, self._compute(chunks))

    def _compute(self, chunks: list[Chunk]) -> list[Sampled]:
        if not chunks:
            return []
        inputs, rows = self.batch.inputs(chunks)
        start = time.perf_counter()
        if rows is not None and any(rows.prompt_rows):
            logits, scores = self._logits_and_scores(chunks, rows, inputs)
        else:
            logits, scores = self._logits(inputs), [[] for _ in chunks]
        self.kernel_seconds += time.perf_counter() - start
        if rows is None:
            sampled = self.sampler.sample(logits, [chunk.slot for chunk in chunks])
        else:
            sampled = self._sample(chunks, rows, logits, scores)
        for chunk, result in zip(chunks, sampled, strict=True):
            if chunk.sample and result.token_id >= 0:
                self.batch.append(chunk.slot, result.token_id)
        return sampled

    def _logits(self, inputs: BatchInputs) -> Tensor:
        """float32 [R, vocab], valid until the next step."""
        logits = self._graphs(inputs)
        if logits is not None:
            return logits
        with self._workspace.active():
            return self.decoder(inputs, self.kv)

    def _logits_and_scores(
        self, chunks: list[Chunk], rows: StepRows, inputs: BatchInputs
    ) -> tuple[Tensor, list[list[TokenLogprobs]]]:
        with self._workspace.active():
            delta, residual = self.decoder.hidden(inputs, self.kv)
            scores = self._scores(chunks, rows, delta, residual)
            return self.decoder.logits(delta, residual, inputs.logit_rows), scores

    def _sample(
        self, chunks: list[Chunk], rows: StepRows, logits: Tensor, scores: list[list[TokenLogprobs]]
    ) -> list[Sampled]:
        slots = [chunk.slot for chunk in chunks if chunk.sample]
        return with_scores(rows, self.sampler.sample(logits, slots) if slots else [], scores)
