"""Captured steps: the launches of a step are captured once for each size and replayed as one.

Steps are padded to the next size. There are sizes of decode steps, of one token for each sequence, of steps with prompt
tokens (mixed), and of steps with drafts. All values that differ between steps are in buffers that stay where they are
(turbo.runners.staging). The logits and the chosen tokens stay in one place too, and the next step overwrites them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lmkit.errors import ConfigError, EngineLostError
from lmkit.kernels.cuda import gemm_experts, gemm_table, module
from lmkit.kernels.cuda.gemm_experts import ExpertTable
from lmkit.kernels.cuda.gemm_pack import PackedWeight
from lmkit.kernels.cuda.module import Kernel
from lmkit.kernels.cuda.switches import turn_off
from lmkit.kernels.registry import Implementation
from lmkit.kv_dtype import FLOAT32
from lmkit.layers.batch import BatchInputs, KVLayer
from lmkit.layers.blocks.moe import MAX_PLACES
from lmkit.layers.moe import MoE, mixtures_of
from lmkit.log import get_logger
from lmkit.models.decoder import Decoder
from lmkit.turbo.host_memory import gib
from lmkit.turbo.no_memory import missing_memory
from lmkit.turbo.runners.captured_sizes import Size
from lmkit.turbo.runners.gpu import Gpu
from lmkit.turbo.runners.staging import StagedInputs

log = get_logger(__name__)

LESS = "lower max_batch_size, max_step_tokens or kv_memory, or set LMKIT_CUDA=mixed=off"

HALVES = torch.float16, torch.bfloat16
Forward = Callable[[BatchInputs], Tensor]


class Chooser(Protocol):
    """Chooses tokens of logits: see GpuSampler."""

    def argmax(self, logits: Tensor, slots: Tensor, tokens: Tensor, *, counts: bool) -> None: ...
    def draw(self, logits: Tensor, slots: Tensor, tokens: Tensor) -> None: ...


class Replays(NamedTuple):
    """The parts of a captured step."""

    step: Callable[[], None]  # with greedy tokens
    draws: Callable[[], None] | None  # the tokens of rows with a temperature


def obstacle(decoder: Decoder, kv: list[KVLayer]) -> str | None:
    """The reason why steps of this model cannot be captured, or None."""
    if decoder.dtype not in HALVES or any(x.dtype == FLOAT32 for layer in kv for x in (layer.k, layer.v)):
        return "float32 is computed through torch"
    if any(mixture.together(1, decoder.dtype) is None for mixture in mixtures(decoder)):
        return "each expert is called by itself"
    if not all(layer.spec.pre_norms for layer in decoder.layers):
        return "the residual stream is rounded through torch"
    if decoder.spec.dynamic_length:
        return "angles that depend on a prompt's length are found on the host"
    reference = sorted({op for op, impl in chosen(decoder) if not impl.is_kernel})
    return f"{', '.join(reference)} run through torch" if reference else None


def mixtures(decoder: Decoder) -> list[MoE]:
    """The mixtures of experts."""
    return mixtures_of(decoder.blocks)


def capturable(sizes: list[Size], decoder: Decoder) -> list[Size]:
    """The sizes of steps that launch the same kernels whatever their experts are."""
    several = mixtures(decoder)
    return [
        size for size in sizes if all(mixture.together(size.tokens, decoder.dtype) is not None for mixture in several)
    ]


def chosen(decoder: Decoder) -> Iterator[tuple[str, Implementation]]:
    """The implementations of the ops that a step runs, each with the name of its use."""
    yield "embedding", decoder.embedding
    yield from (("angles", rope.angles) for rope in decoder.ropes.values())
    if decoder.softcap is not None:
        yield "logits", decoder.softcap
    for layer in decoder.layers:
        for block in layer.blocks:
            yield from block.captured()
    for linear in decoder.linears:
        for packed in linear.packed or ():
            yield "linears", packed.implementation
        if linear.adapters is not None:
            yield "adapters", linear.adapters.implementation


def linear_kernels(decoder: Decoder, max_tokens: int) -> Iterator[Kernel]:
    """The kernels that the products of the packed weights launch in steps of up to `max_tokens` tokens."""
    for linear in decoder.linears:
        for packed in linear.packed or ():
            if isinstance(packed.weight, PackedWeight):
                yield from gemm_table.kernels(packed.weight, decoder.dtype, max_tokens)
    for mixture in mixtures(decoder):
        places = min(max_tokens * mixture.spec.experts_per_token, MAX_PLACES)
        for linears in mixture.together(1, decoder.dtype) or ():
            if isinstance(linears.table, ExpertTable):
                yield from gemm_experts.kernels(linears.table, decoder.dtype, places)


class CapturedSteps:
    """Steps of a few sizes. `forward` launches a step on the stream and returns its logits. With a `chooser` a step
    also chooses the tokens of the rows that are staged with their slots."""

    def __init__(
        self,
        device: Gpu,
        forward: Forward,
        staged: StagedInputs,
        table_width: int,
        chooser: Chooser | None = None,
    ) -> None:
        self._device, self._forward, self._staged, self.width = device, forward, staged, table_width
        self._chooser = chooser
        # Is entered for launches that are not captured: those that other processes do not make with this one.
        self.rehearsing: Callable[[], AbstractContextManager[None]] = nullcontext
        self._replays: dict[Size, Replays] = {}  # decode steps and others, each ascending
        self._logits = self._tokens = torch.empty(0)

    @property
    def chooses(self) -> bool:
        """Whether steps choose tokens."""
        return self._chooser is not None

    def capture(self, sizes: list[Size], vocab_size: int) -> str:
        """Compile and capture every size. The largest comes first, so that the others find room in its memory.

        Returns which steps are captured. If the forward pass cannot be captured after all, not even with kernels that
        wait for each other, steps run without capture, and the text says why. Raises ConfigError if the graphs find no
        room in memory.
        """
        rows = max(size.rows for size in sizes)
        self._logits = torch.empty(rows, vocab_size, device=self._device.tensors)
        self._tokens = torch.empty(rows, dtype=torch.int64, device=self._device.tensors)
        kinds = {
            "decode": [size for size in sizes if size.is_decode],
            "mixed": [size for size in sizes if not (size.is_decode or size.drafted)],
            "draft": [size for size in sizes if size.drafted],
        }
        return "; ".join(self._capture_all(name, group) for name, group in kinds.items() if group)

    def _capture_all(self, name: str, sizes: list[Size]) -> str:
        start, free = time.perf_counter(), self._device.free_memory()
        try:
            replays = {size: self._capture(size) for size in sorted(sizes, reverse=True)}
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            if why := missing_memory(error):
                raise ConfigError(f"captured {name} steps found no room in memory; {LESS}: {why}") from None
            if self._device.is_lost(error):
                raise EngineLostError(f"the GPU refuses to go on after {name} steps ({reason})") from error
            if self._device.overlaps():
                turn_off("overlap", f"{name} steps could not be captured: {reason}")
                module.load_anew()
                return self._capture_all(name, sizes)
            log.warning("%s steps are not captured: %s", name, reason)
            return f"no {name} steps: {reason}"
        self._device.synchronize()
        self._replays |= dict(sorted(replays.items()))
        seconds, taken = time.perf_counter() - start, free - self._device.free_memory()
        log.info("captured %s steps of %d sizes in %.1f s and %s", name, len(sizes), seconds, gib(taken))
        return f"{name} steps of {len(sizes)} sizes up to {max(sizes).tokens} tokens"

    def _capture(self, size: Size) -> Replays:
        inputs, chosen = self._staged.padding(size, self.width), self._staged.chosen

        def launch() -> None:
            if len(logits := self._forward(inputs)):  # rank 0 alone has some
                self._logits[: size.rows].copy_(logits)
            if self._chooser is not None:
                self._chooser.argmax(self._logits[: size.rows], chosen, self._tokens, counts=not size.drafted)

        if self._chooser is None or size.drafted:
            return Replays(self._launched(launch), None)
        draws = partial(self._chooser.draw, self._logits[: size.rows], chosen, self._tokens[: size.rows])
        return Replays(self._launched(launch), self._launched(draws))

    def _launched(self, launch: Callable[[], None]) -> Callable[[], None]:
        with self.rehearsing():
            launch()  # a first launch outside the capture: it compiles, chooses and allocates
        self._device.synchronize()
        return self._device.capture(launch)

    def size_for(
        self, num_seqs: int, num_tokens: int | None = None, *, adapted: bool = False, drafted: bool = False
    ) -> Size | None:
        """The smallest captured size that holds a decode step of `num_seqs` sequences, or another step of `num_tokens`
        tokens, with or without adapters and drafts; None if there is none."""
        kind, least = (num_tokens is None, adapted, drafted), num_tokens or num_seqs
        of_kind = (size for size in self._replays if (size.is_decode, *size[2:]) == kind)
        return next((size for size in of_kind if size.tokens >= least and size.seqs >= num_seqs), None)

    def replay(self, size: Size) -> tuple[Tensor, Tensor]:
        """Replay a step with the inputs that were staged last, padded to `size`.

        Returns logits [rows, vocab] and tokens [rows], which mean something for greedy rows that were staged with
        slots. The next step overwrites both.
        """
        self._replays[size].step()
        return self._logits[: size.rows], self._tokens[: size.rows]

    def draw(self, size: Size) -> None:
        """After `replay`: choose the tokens of rows with a temperature, too. Steps with drafts have none."""
        draws = self._replays[size].draws
        assert draws is not None
        draws()
