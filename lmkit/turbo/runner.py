"""Carries out a step plan: tensors in, sampled tokens out."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from lmkit.kernels.cpu.workspace import Workspace
from lmkit.layers.batch import BatchInputs, KVLayer
from lmkit.models.decoder import Decoder
from lmkit.turbo.batch import PersistentBatch, StepRows
from lmkit.turbo.graphs import StepGraphs
from lmkit.turbo.plan import Chunk, Sampled, StepPlan
from lmkit.turbo.request import TokenLogprobs
from lmkit.turbo.sampler import Sampler, token_logprobs

SCORED_BYTES = 16 << 20  # of the logits of prompt tokens held at a time, however long the prompt


class Runner:
    """One model, its KV blocks, the persistent batch and the sampler's per-slot state."""

    def __init__(
        self, decoder: Decoder, kv: list[KVLayer], batch: PersistentBatch, sampler: Sampler, workspace_bytes: int
    ) -> None:
        self.decoder = decoder
        self.kv = kv
        self.batch = batch
        self.sampler = sampler
        self._workspace = Workspace(workspace_bytes)
        self._graphs = StepGraphs(decoder, kv, self._workspace)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[Sampled]:
        """One result for each of the plan's chunks, in order."""
        for slot in plan.freed:
            self.sampler.clear(slot)
        for new in plan.new:
            self.batch.enter(new)
            self.sampler.set(new.slot, new)
        if not plan.chunks:
            return []
        inputs, rows = self.batch.inputs(plan)
        if rows is None:
            sampled = self.sampler.sample(self._decode(inputs), [chunk.slot for chunk in plan.chunks])
        else:
            with self._workspace.active():
                delta, residual = self.decoder.hidden(inputs, self.kv)
                scores = [
                    self._score(chunk, span, delta, residual) if span else []
                    for chunk, span in zip(plan.chunks, rows.prompt_rows, strict=True)
                ]  # before the logits: where every row is wanted, the head overwrites the stream
                logits = self.decoder.logits(delta, residual, inputs.logit_rows)
                sampled = self._sample(plan, rows, logits, scores)
        for chunk, result in zip(plan.chunks, sampled, strict=True):
            if chunk.sample and result.token_id >= 0:
                self.batch.append(chunk.slot, result.token_id)
        return sampled

    def _decode(self, inputs: BatchInputs) -> Tensor:
        """Logits float32 [B, vocab] of a step in which every sequence brings one token; valid until the next step."""
        logits = self._graphs(inputs)
        if logits is not None:
            return logits
        with self._workspace.active():
            return self.decoder(inputs, self.kv)

    def _sample(
        self, plan: StepPlan, rows: StepRows, logits: Tensor, scores: list[list[TokenLogprobs]]
    ) -> list[Sampled]:
        slots = [chunk.slot for chunk in plan.chunks if chunk.sample]
        drawn = self.sampler.sample(logits, slots) if slots else []
        results = [Sampled(-1) if row < 0 else drawn[row] for row in rows.sample_row]
        return [
            msgspec.structs.replace(result, prompt_logprobs=scored) if scored else result
            for result, scored in zip(results, scores, strict=True)
        ]

    def _score(self, chunk: Chunk, span: range, delta: Tensor, residual: Tensor) -> list[TokenLogprobs]:
        """What the step's tokens `span` say of the prompt tokens behind them; logits of a part of them at a time."""
        targets = self.batch.prompt_targets(chunk, len(span))
        num_top = max(0, int(self.sampler.num_top[chunk.slot]))
        size = max(1, SCORED_BYTES // (4 * self.decoder.spec.vocab_size))
        scores: list[TokenLogprobs] = []
        for begin in range(span.start, span.stop, size):
            part = slice(begin, min(begin + size, span.stop))
            for logits in self.decoder.head(delta[part], residual[part]).numpy():
                scores.append(token_logprobs(logits, targets[len(scores)], num_top))
        return scores
