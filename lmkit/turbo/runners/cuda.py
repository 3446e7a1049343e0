"""Carries out step plans on a GPU, whose stream runs behind the host.

    host    launch 1 | launch 2 | result of 1 | update, plan and launch 3 | result of 2 ...
    stream           step 1 ..........| step 2 ..........| step 3 ...

A step is launched before the tokens of the one before it are known: where the host has -1 - slot for a token, the step
itself takes the token that was sampled last in that slot (ops.known_tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.layers.batch import BatchInputs, KVLayer
from lmkit.log import get_logger
from lmkit.models.decoder import Decoder
from lmkit.turbo.kv.blocks import KVBlocks
from lmkit.turbo.kv.tiers.store import TierStore
from lmkit.turbo.plan import Chunk, Sampled, StepPlan
from lmkit.turbo.request import TokenLogprobs
from lmkit.turbo.runners.batch import Expected, PersistentBatch, StepRows
from lmkit.turbo.runners.cpu import PlanRunner, SlotStates, StepResult, with_scores
from lmkit.turbo.runners.cuda_graphs import CudaGraphs, graph_sizes, linear_kernels, obstacle
from lmkit.turbo.runners.device import CudaDevice, Event
from lmkit.turbo.runners.sampler import Sampler
from lmkit.turbo.runners.staging import StagedInputs

log = get_logger(__name__)


class Pending(Protocol):
    """Tokens that are being sampled."""

    def result(self) -> list[Sampled]:
        """One for each row of logits; waits for the stream."""


class DeviceSampler(SlotStates, Protocol):
    """Samples on the stream."""

    last_token: Tensor  # int64 [slots] on the device: what was sampled last

    def sample(self, logits: Tensor, slots: Sequence[int]) -> Pending: ...


@dataclass(frozen=True)
class _Drawn:
    sampled: list[Sampled]

    def result(self) -> list[Sampled]:
        return self.sampled


class HostSampler:
    """The CPU's sampler on a GPU's logits: each step waits for them."""

    def __init__(self, num_slots: int, vocab_size: int, device: str) -> None:
        self._sampler = Sampler(num_slots, vocab_size)
        self.num_top = self._sampler.num_top
        self.last_token = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.set, self.clear = self._sampler.set, self._sampler.clear

    def sample(self, logits: Tensor, slots: Sequence[int]) -> Pending:
        sampled = self._sampler.sample(logits.cpu(), slots)
        tokens = torch.tensor([result.token_id for result in sampled], device=self.last_token.device)
        self.last_token[torch.tensor(slots, device=self.last_token.device)] = tokens
        return _Drawn(sampled)


@dataclass(frozen=True)
class _Times:
    """Events around a step's launches: its model, and the sampling behind it."""

    begin: Event
    model: Event
    end: Event

    def seconds(self) -> tuple[float, float]:
        """Of the step and of its model, on the device."""
        self.end.synchronize()
        return self.begin.elapsed_time(self.end) / 1e3, self.begin.elapsed_time(self.model) / 1e3


@dataclass(frozen=True)
class Launched:
    """A step on its way. `expected`: the tokens that the batch waits for, by chunk."""

    runner: CudaRunner
    plan: StepPlan
    chunks: list[Chunk]
    rows: StepRows
    scores: list[list[TokenLogprobs]]
    pending: Pending
    expected: list[Expected]
    times: _Times | None

    def result(self) -> StepResult:
        """Waits for the stream. Raises what the GPU says of this step or one before it."""
        drawn = self.pending.result()
        for expected, sampled in zip(self.expected, drawn, strict=True):
            if sampled.token_id >= 0:
                self.runner.batch.learn(expected, sampled.token_id)
        results = with_scores(self.rows, drawn, self.scores)
        seconds, kernels = self.times.seconds() if self.times is not None else (0.0, 0.0)
        return StepResult(self.runner.for_all(self.plan, self.chunks, results), seconds, kernels)


class CudaRunner(PlanRunner):
    """`launch` returns when the step is on the stream; `capture` before the first one makes decode steps cheap."""

    def __init__(
        self,
        device: CudaDevice,
        decoder: Decoder,
        kv: list[KVLayer],
        batch: PersistentBatch,
        sampler: DeviceSampler,
        *,
        blocks: KVBlocks,
        tiers: TierStore | None = None,
    ) -> None:
        super().__init__(decoder, kv, batch, sampler, blocks=blocks, tiers=tiers)
        self._device, self._sampler = device, sampler
        num_groups, num_slots, width = batch.block_tables.shape
        max_tokens = max(batch.max_step_tokens, num_slots)
        self._staged = StagedInputs(device, max_tokens, num_slots, width, num_groups)
        self._known_tokens = ops.known_tokens.select(device.name)
        self.graphs = CudaGraphs(device, self._forward, self._staged, width)

    @torch.inference_mode()
    def capture(self) -> None:
        """Compile what steps launch, and capture decode steps of every size, if this model's can be captured."""
        if self._device.has_kernels:
            self._device.compile(linear_kernels(self.decoder, self.batch.max_step_tokens))
        if (reason := obstacle(self.decoder, self.kv)) is not None:
            log.info("steps are not captured: %s", reason)
            return
        self.graphs.capture(graph_sizes(self.batch.block_tables.shape[1]), self.decoder.spec.vocab_size)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Put a plan on the stream, behind those before it."""
        with self._begun(plan) as chunks:
            if not chunks:
                return Launched(self, plan, chunks, StepRows([], []), [], _Drawn([]), [], None)
            times = _Times(*(self._device.event() for _ in range(3)))
            inputs, rows = self.batch.inputs(chunks)
            times.begin.record()
            logits, scores = self._logits(chunks, inputs, rows)
            times.model.record()
            sampling = [chunk.slot for chunk in chunks if chunk.sample]
            pending = self._sampler.sample(logits, sampling) if sampling else _Drawn([])
            times.end.record()
            if rows is None:
                rows = StepRows(list(range(len(chunks))), [])
            expected = [self.batch.expect(slot) for slot in sampling]
            return Launched(self, plan, chunks, rows, scores, pending, expected, times)

    def _logits(
        self, chunks: list[Chunk], inputs: BatchInputs, rows: StepRows | None
    ) -> tuple[Tensor, list[list[TokenLogprobs]]]:
        """float32 [R, vocab], valid until the next step's place in the stream, and the scores of prompt tokens."""
        no_scores: list[list[TokenLogprobs]] = [[] for _ in chunks]
        if rows is None and (size := self.graphs.size_for(len(chunks))) is not None:
            self._staged.put(inputs, size, keeps_tables=self.batch.keeps_tables)
            return self.graphs.replay(size)[: len(chunks)], no_scores
        on_device = self._staged.put(inputs, keeps_tables=self.batch.keeps_tables)
        if rows is None or not any(rows.prompt_rows):
            return self._forward(on_device), no_scores
        self._known_tokens(on_device.token_ids, self._sampler.last_token)
        delta, residual = self.decoder.hidden(on_device, self.kv)
        scores = self._scores(chunks, rows, delta, residual)
        return self.decoder.logits(delta, residual, on_device.logit_rows), scores

    def _forward(self, inputs: BatchInputs) -> Tensor:
        self._known_tokens(inputs.token_ids, self._sampler.last_token)
        return self.decoder(inputs, self.kv)
