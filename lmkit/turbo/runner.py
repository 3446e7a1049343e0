"""Carries out a step plan: tensors in, sampled tokens out."""

from __future__ import annotations

import time

import msgspec
import torch
from torch import Tensor

from lmkit.kernels.cpu.workspace import Workspace
from lmkit.layers.batch import BatchInputs, KVLayer
from lmkit.models.decoder import Decoder
from lmkit.turbo.batch import PersistentBatch, StepRows
from lmkit.turbo.graphs import StepGraphs
from lmkit.turbo.kv_blocks import KVBlocks
from lmkit.turbo.plan import Chunk, Sampled, StepPlan
from lmkit.turbo.request import TokenLogprobs
from lmkit.turbo.sampler import Sampler, token_logprobs
from lmkit.turbo.tiers.store import TierStore

SCORED_BYTES = 16 << 20  # of the logits of prompt tokens held at a time, however long the prompt


class Runner:
    """One model, its KV blocks, the persistent batch and the sampler's per-slot state."""

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
        self.decoder = decoder
        self.kv = kv
        self.batch = batch
        self.sampler = sampler
        self.kernel_seconds = 0.0  # spent in the model, of all steps
        self._blocks = blocks
        self._tiers = tiers
        self._failed: set[int] = set()  # slots of a step that raised: what a later plan has for them is void
        self._workspace = Workspace(workspace_bytes)
        self._graphs = StepGraphs(decoder, kv, self._workspace)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[Sampled]:
        """One result for each of the plan's chunks, in order."""
        chunks = plan.chunks
        try:
            self._move(plan)
            for slot in plan.freed:
                self.sampler.clear(slot)
            for new in plan.new:
                self._failed.discard(new.slot)
                self.batch.enter(new)
                self.sampler.set(new.slot, new)
            if self._failed:
                chunks = [chunk for chunk in chunks if chunk.slot not in self._failed]
            sampled = self._compute(chunks)
        except Exception:
            self._failed.update(chunk.slot for chunk in plan.chunks)
            raise
        if len(chunks) == len(plan.chunks):
            return sampled
        results = iter(sampled)
        return [Sampled(-1) if chunk.slot in self._failed else next(results) for chunk in plan.chunks]

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
            scores = [
                self._score(chunk, span, delta, residual) if span else []
                for chunk, span in zip(chunks, rows.prompt_rows, strict=True)
            ]  # before the logits: where every row is wanted, the head overwrites the stream
            return self.decoder.logits(delta, residual, inputs.logit_rows), scores

    def _sample(
        self, chunks: list[Chunk], rows: StepRows, logits: Tensor, scores: list[list[TokenLogprobs]]
    ) -> list[Sampled]:
        slots = [chunk.slot for chunk in chunks if chunk.sample]
        drawn = self.sampler.sample(logits, slots) if slots else []
        results = [Sampled(-1) if row < 0 else drawn[row] for row in rows.sample_row]
        return [
            msgspec.structs.replace(result, prompt_logprobs=scored) if scored else result
            for result, scored in zip(results, scores, strict=True)
        ]

    def _score(self, chunk: Chunk, span: range, delta: Tensor, residual: Tensor | None) -> list[TokenLogprobs]:
        """What the step's tokens `span` say of the prompt tokens behind them; logits of a part of them at a time."""
        targets = self.batch.prompt_targets(chunk, len(span))
        num_top = max(0, int(self.sampler.num_top[chunk.slot]))
        size = max(1, SCORED_BYTES // (4 * self.decoder.spec.vocab_size))
        scores: list[TokenLogprobs] = []
        for begin in range(span.start, span.stop, size):
            part = slice(begin, min(begin + size, span.stop))
            for logits in self.decoder.head_part(delta, residual, part).numpy():
                scores.append(token_logprobs(logits, targets[len(scores)], num_top))
        return scores
