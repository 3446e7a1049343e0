"""Carries out step plans on a GPU. Its stream runs behind the host.

    host    launch 1 | launch 2 | result of 1 | update, plan and launch 3 | result of 2 ...
    stream           step 1 ..........| step 2 ..........| step 3 ...

A step is launched before the tokens of the previous step are known. The host has -1 - slot for such a token, and the
step itself takes the token that was sampled last in that slot (ops.known_tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lmkit.errors import EngineLostError
from lmkit.kernels import ops
from lmkit.kernels.cuda.append import append_kernel
from lmkit.kernels.cuda.gemm_table import LatentKey, table
from lmkit.kernels.cuda.latent import rows_kernel
from lmkit.kernels.cuda.module import Kernel
from lmkit.kernels.cuda.prefill import variant
from lmkit.kernels.cuda.switches import ASKED, off, switches, turned_off
from lmkit.kv_dtype import FLOAT32, dense_kv_dtype
from lmkit.layers import latent_prompts
from lmkit.layers.batch import BatchInputs, KVLayer
from lmkit.layers.latent_cost import Prompt, chunks_of
from lmkit.layers.latent_prompts import PlainHeads
from lmkit.layers.prompts import Prompts
from lmkit.log import get_logger
from lmkit.models.decoder import Decoder
from lmkit.turbo.plan import Chunk, Sampled, SampledToken, StepPlan
from lmkit.turbo.runners import images, invariant
from lmkit.turbo.runners.batch import Expected, StepRows
from lmkit.turbo.runners.captured_sizes import Size, decode_sizes, draft_sizes, mixed_sizes
from lmkit.turbo.runners.cuda_captured import CapturedSteps, Chooser, capturable, linear_kernels, obstacle
from lmkit.turbo.runners.device import Event
from lmkit.turbo.runners.gpu import Gpu
from lmkit.turbo.runners.gpu_sampler import GpuSampler
from lmkit.turbo.runners.guides import Guides
from lmkit.turbo.runners.runner import (
    PlanRunner,
    RunnerParts,
    Shown,
    SlotStates,
    StepResult,
    Ticket,
    rows_of,
    sample_chunks,
)
from lmkit.turbo.runners.sampler import Sampler
from lmkit.turbo.runners.staging import StagedInputs

log = get_logger(__name__)


class Pending(Protocol):
    """Tokens that are being sampled."""

    def result(self) -> list[SampledToken]:
        """Wait for the stream. Returns one token for each row of logits."""


class DeviceSampler(SlotStates, Protocol):
    """Samples on the stream."""

    last_token: Tensor  # int64 [slots] on the device: the token that was sampled last

    def sample(self, logits: Tensor, slots: Sequence[int]) -> Pending: ...
    def resume(self, num_outputs: dict[int, int]) -> None: ...


@dataclass(frozen=True)
class Drawn:
    tokens: list[SampledToken]

    def result(self) -> list[SampledToken]:
        return self.tokens


class HostSampler:
    """The CPU's sampler on a GPU's logits. Each step waits for the logits."""

    def __init__(self, num_slots: int, vocab_size: int, device: str, guides: Guides) -> None:
        self._sampler = Sampler(num_slots, vocab_size, guides)
        self.last_token = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.set, self.clear, self.resume = self._sampler.set, self._sampler.clear, self._sampler.resume

    def sample(self, logits: Tensor, slots: Sequence[int]) -> Pending:
        sampled = self._sampler.sample(logits.cpu(), slots)
        tokens = torch.tensor([token.token_id for token in sampled], device=self.last_token.device)
        self.last_token[torch.tensor(slots, device=self.last_token.device)] = tokens
        return Drawn(sampled)


class Computed(NamedTuple):
    """A step's results on the device, valid until the next step's place in the stream."""

    logits: Tensor  # float32 [R, vocab]
    shown: list[Shown]
    drawn: Pending | None = None  # one token for each row of logits, if the step has chosen them


@dataclass(frozen=True)
class Times:
    """Events around a step's launches: before the model, after it, and after the sampling."""

    begin: Event
    model: Event
    end: Event

    def seconds(self) -> tuple[float, float]:
        """Seconds of the step and of its model, on the device."""
        self.end.synchronize()
        return self.begin.elapsed_time(self.end) / 1e3, self.begin.elapsed_time(self.model) / 1e3


@dataclass(frozen=True)
class Launched:
    """A step on its way."""

    plan: StepPlan
    chunks: list[Chunk]  # the chunks that are computed
    shown: list[Shown]
    tokens: list[list[SampledToken]] | None  # set if the launch waited for the tokens
    pending: Pending  # otherwise one token of each chunk that samples
    expected: Expected | None  # tokens that the batch waits for
    times: Times | None


def plain_heads(decoder: Decoder, kv: list[KVLayer]) -> PlainHeads | None:
    """That of the layers with latent attention, all alike, if kernels compute it; None otherwise."""
    found = latent_prompts.plain_heads(decoder.blocks)
    if not switches().plain_heads or found is None or not found.runs or any(x.k.dtype == FLOAT32 for x in kv):
        return None
    return found


def latent_key(heads: PlainHeads) -> LatentKey:
    """The key of what was measured for these layers."""
    spec = heads.latent.spec
    return LatentKey(heads.latent.num_heads, spec.row_dim, spec.kv_lora_rank, spec.query_dim, spec.v_head_dim)


def plain_kernels(heads: PlainHeads, kv: list[KVLayer], device: str) -> Iterator[Kernel]:
    """The kernels that these layers launch for prompts only."""
    spec, dtype = heads.latent.spec, heads.latent.dtype
    half, bf16 = dense_kv_dtype(dtype), dtype == torch.bfloat16
    for stored in {each.k.dtype for each in kv}:
        yield rows_kernel(spec.row_dim, stored, bf16)
        yield append_kernel(spec.query_dim, stored, stored, bf16)
    yield variant(bf16, (spec.query_dim, spec.v_head_dim), (half, half), 0, device, capped=False)[0]


class CudaRunner(PlanRunner):
    """`launch` returns when the step is on the stream. A step with drafts is sampled before it returns."""

    runs_ahead = True

    def __init__(self, device: Gpu, parts: RunnerParts) -> None:
        self._sampler = self._make_sampler(device, parts)
        super().__init__(parts, self._sampler)
        self._device, self._deterministic = device, parts.config.deterministic
        self._num_draft_tokens = parts.config.num_draft_tokens
        if self._deterministic:
            invariant.refuse(self.decoder, self.kv)
            # Inputs of a linear are rounded elsewhere if it has adapters, so what others use may not decide that.
            self.batch.always_adapted = self.decoder.step_adapters.count > 0
        num_groups, num_slots, width = self.batch.block_tables.shape
        max_tokens = max(self.batch.max_step_tokens, num_slots)
        self._staged = StagedInputs(device, max_tokens, num_slots, width, num_groups, has_states=self.batch.has_states)
        self._known_tokens = ops.known_tokens.select(device.name)
        self.captured = CapturedSteps(device, self._forward, self._staged, width, self._chooser())
        self._plain_heads = found = plain_heads(self.decoder, self.kv)
        self._plain_gain = table(device.tensors).latent_gains.get(latent_key(found), 1.0) if found else 1.0

    def _make_sampler(self, device: Gpu, parts: RunnerParts) -> DeviceSampler:
        samples = device.has_kernels and off("sampling.cu", "edit_logits.cu") is None
        sampler = GpuSampler if samples else HostSampler
        return sampler(parts.config.sequences_per_step, parts.decoder.spec.vocab_size, device.tensors, parts.guides)

    def _chooser(self) -> Chooser | None:
        """What chooses tokens inside of captured steps, or None."""
        return self._sampler if isinstance(self._sampler, GpuSampler) and switches().argmax else None

    @torch.inference_mode()
    def warm_up(self) -> str:
        """Compile the kernels of steps. Capture decode steps of every size if this model's steps can be captured."""
        if self._device.has_kernels:
            self._device.compile(linear_kernels(self.decoder, self.batch.max_step_tokens))
        if self._plain_heads is not None:
            self._device.compile(plain_kernels(self._plain_heads, self.kv, self._device.tensors))
        reason = None if switches().capture else f"capture is turned off: {turned_off().get('capture', ASKED)}"
        if (reason := reason or off("tokens.cu") or obstacle(self.decoder, self.kv)) is not None:
            log.info("steps are not captured: %s", reason)
            return f"no steps: {reason}"
        num_slots = self.batch.block_tables.shape[1]
        sizes, most = decode_sizes(num_slots), self.batch.max_step_tokens
        attends = off("prefill_attention.cu") is None  # several tokens of a sequence, by a kernel
        if switches().mixed and attends:
            sizes += mixed_sizes(num_slots, most)
        if switches().drafts and attends:
            sizes += draft_sizes(num_slots, most, self._num_draft_tokens)
        sizes = capturable(sizes, self.decoder)
        if self.decoder.step_adapters.count:
            adapted = [size._replace(adapted=True) for size in sizes]
            sizes = adapted if self.batch.always_adapted else sizes + adapted
        before = invariant.fallbacks()
        captured = self.captured.capture(sizes, self.decoder.spec.vocab_size)
        if self._deterministic:
            invariant.refuse_fallbacks(before)
        return captured

    def launch(self, plan: StepPlan) -> Ticket:
        """Put a plan on the stream, after the plans before it."""
        return partial(self._result, self._launch(plan))

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for the stream. Raises the GPU's error of this step or of a step before it."""
        try:
            return ticket()
        except RuntimeError as error:
            if self._device.is_lost(error):
                reason = str(error).partition("\n")[0]
                raise EngineLostError(f"the GPU refuses to go on ({reason}); start the engine again") from error
            raise

    def resume(self, num_outputs: dict[int, int]) -> None:
        """See Sampler."""
        self._sampler.resume(num_outputs)

    def call(self, work: Callable[[], Any]) -> Any:
        """Carry out `work`, whose launches follow those of the steps so far."""
        return work()

    def close(self) -> None:
        """Do nothing: the stream has no thread."""

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> Launched:
        with self._begun(plan) as chunks:
            if not chunks:
                return Launched(plan, chunks, [], None, Drawn([]), None, None)
            times = Times(*(self._device.event() for _ in range(3)))
            inputs, rows = self.batch.inputs(chunks)
            times.begin.record()
            logits, shown, drawn = computed = self._logits(chunks, inputs, rows)
            if self.streams is not None:
                self.streams.keep(chunks)
            times.model.record()
            tokens: list[list[SampledToken]] | None = None
            pending: Pending = Drawn([])
            expected: Expected | None = None
            if rows is not None and any(chunk.draft for chunk in chunks):
                tokens = self._sample_now(computed, chunks, rows)
                self.append(chunks, tokens)
            elif slots := [chunk.slot for chunk in chunks if chunk.num_sampled]:
                pending = self._sampler.sample(logits, slots) if drawn is None else drawn
                expected = self.batch.expect(slots)
            times.end.record()
            return Launched(plan, chunks, shown, tokens, pending, expected, times)

    def _sample_now(self, computed: Computed, chunks: list[Chunk], rows: StepRows) -> list[list[SampledToken]]:
        """The tokens of each chunk, some of which have drafts. If all are greedy, the device is waited for once."""
        sampler, (logits, _, drawn) = self._sampler, computed
        if drawn is None and isinstance(sampler, GpuSampler) and sampler.is_greedy([chunk.slot for chunk in chunks]):
            drawn = sampler.most_likely(logits)
        if drawn is not None:
            known = drawn.result()
            return sample_chunks(lambda these, _: [known[row] for row in these], chunks, rows)
        return sample_chunks(lambda these, slots: sampler.sample(rows_of(logits, these), slots).result(), chunks, rows)

    def _result(self, launched: Launched) -> StepResult:
        drawn = launched.pending.result()
        if launched.expected is not None:
            self.batch.learn(launched.expected, np.array([token.token_id for token in drawn]))
        tokens = launched.tokens
        if tokens is None:
            one_by_one = iter(drawn)
            tokens = [[next(one_by_one)] if chunk.num_sampled else [] for chunk in launched.chunks]
        results = [Sampled(new, *also) for new, also in zip(tokens, launched.shown, strict=True)]
        seconds, kernels = launched.times.seconds() if launched.times is not None else (0.0, 0.0)
        return StepResult(self.for_all(launched.plan, launched.chunks, results), seconds, kernels)

    def _logits(self, chunks: list[Chunk], inputs: BatchInputs, rows: StepRows | None) -> Computed:
        prompts = self._prompts(inputs, rows)
        if not prompts and (size := self._captured_size(chunks, inputs, rows)) is not None:
            return self._replay(size, chunks, inputs)
        nothing = [Shown()] * len(chunks)
        on_device = images.on_device(inputs, self._staged.put(inputs, keeps_tables=self.batch.keeps_tables))
        if prompts:
            starts = inputs.geometries[0].query_start.tolist()
            on_device = replace(on_device, prompts=Prompts.of(prompts, starts, on_device.geometries))
        if rows is None or not rows.wants_hidden:
            return Computed(self._forward(on_device), nothing)
        self._know(on_device.token_ids)
        return Computed(*self._with_hidden(chunks, rows, on_device))

    def _prompts(self, inputs: BatchInputs, rows: StepRows | None) -> list[Prompt]:
        """The chunks that latent attention computes over plain heads."""
        if self._plain_heads is None or rows is None:  # rows None: each sequence has one token
            return []
        latent, geometry = self._plain_heads.latent, inputs.geometries[0]
        starts, lengths = geometry.query_start.tolist(), geometry.context_lens.tolist()
        return chunks_of(starts, lengths, latent.spec, latent.num_heads, self._plain_gain)

    def _captured_size(self, chunks: list[Chunk], inputs: BatchInputs, rows: StepRows | None) -> Size | None:
        """The size of the captured step that computes these chunks, or None: those with rows of images have none."""
        if inputs.places is not None:
            return None
        if rows is None:
            return self.captured.size_for(len(chunks), adapted=inputs.adapters is not None)
        num_rows, drafted = len(inputs.logit_rows), any(chunk.draft for chunk in chunks)
        if rows.wants_hidden or not num_rows or (drafted and not inputs.wants_all):
            return None
        adapted = inputs.adapters is not None
        return self.captured.size_for(len(chunks), len(inputs.token_ids), adapted=adapted, drafted=drafted)

    def _replay(self, size: Size, chunks: list[Chunk], inputs: BatchInputs) -> Computed:
        slots = [chunk.slot for chunk in chunks for _ in range(chunk.num_sampled)]  # of the logit rows
        sampler = self._sampler
        chosen = draws = False
        if isinstance(sampler, GpuSampler) and self.captured.chooses:
            draws = not (greedy := sampler.is_greedy(slots)) and not size.drafted and sampler.is_drawn(slots)
            chosen = greedy or draws
        self._staged.copy(
            inputs,
            size,
            width=self.captured.width,
            keeps_tables=self.batch.keeps_tables,
            chosen=slots if chosen else (),
        )
        logits, tokens = self.captured.replay(size)
        if draws:
            self.captured.draw(size)
        drawn = sampler.chosen(tokens[: len(slots)]) if chosen and isinstance(sampler, GpuSampler) else None
        return Computed(logits[: len(slots)], [Shown()] * len(chunks), drawn)

    def _forward(self, inputs: BatchInputs) -> Tensor:
        self._know(inputs.token_ids)
        return self.decoder(inputs, self.kv)

    def _know(self, token_ids: Tensor) -> None:
        """Fill in the tokens that the host did not know."""
        self._known_tokens(token_ids, self._sampler.last_token)
