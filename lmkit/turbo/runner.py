"""Carries out a step plan: tensors in, sampled tokens out."""

from __future__ import annotations

import torch
from torch import Tensor

from lmkit.kernels.cpu.workspace import Workspace
from lmkit.layers.batch import BatchInputs, KVLayer
from lmkit.models.decoder import Decoder
from lmkit.turbo.batch import PersistentBatch, StepRows
from lmkit.turbo.graphs import StepGraphs
from lmkit.turbo.plan import Sampled, StepPlan
from lmkit.turbo.sampler import Sampler


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
                sampled = self._sample(plan, rows, self.decoder(inputs, self.kv))
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

    def _sample(self, plan: StepPlan, rows: StepRows, logits: Tensor) -> list[Sampled]:
        samples = [(i, row) for i, row in enumerate(rows.sample_row) if row >= 0]
        results = [Sampled(-1)] * len(plan.chunks)
        if samples:
            wanted = [row for _, row in samples]
            picked = logits if len(wanted) == len(logits) else logits[wanted]
            drawn = self.sampler.sample(picked, [plan.chunks[i].slot for i, _ in samples])
            for (i, _), result in zip(samples, drawn, strict=True):
                results[i] = result
        for i, (chunk, span) in enumerate(zip(plan.chunks, rows.prompt_rows, strict=True)):
            if span:
                targets = self.batch.prompt_targets(chunk, len(span)).to(logits.device)
                scores = logits[span.start : span.stop].log_softmax(-1).gather(1, targets[:, None])[:, 0]
                result = results[i]
                results[i] = Sampled(result.token_id, result.logprob, result.top, scores.tolist())
        return results
