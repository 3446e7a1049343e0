"""Captured steps: the launches of a decode step are captured once for each size and replayed as one.

Decode steps are padded to the next size. All values that differ between steps are in buffers that stay where they are
(turbo.runners.staging). The logits stay in one place too, and the next step overwrites them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lmkit.kernels.cuda import gemm_table
from lmkit.kernels.cuda.gemm_pack import PackedWeight
from lmkit.kernels.cuda.module import Kernel
from lmkit.kernels.registry import Implementation
from lmkit.kv_dtype import FLOAT32
from lmkit.layers.batch import BatchInputs, KVLayer
from lmkit.layers.moe import MoE
from lmkit.log import get_logger
from lmkit.models.decoder import Decoder
from lmkit.turbo.runners.device import CudaDevice
from lmkit.turbo.runners.staging import StagedInputs

log = get_logger(__name__)

HALVES = torch.float16, torch.bfloat16
Forward = Callable[[BatchInputs], Tensor]


def captured_sizes(max_batch_size: int) -> list[int]:
    """Numbers of sequences, ascending: 1, 2, 4, multiples of 8, above 256 multiples of 64, and the largest batch."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_batch_size, 64)]
    return [size for size in sizes if size < max_batch_size] + [max_batch_size]


def obstacle(decoder: Decoder, kv: list[KVLayer]) -> str | None:
    """The reason why steps of this model cannot be captured, or None."""
    if decoder.dtype not in HALVES or any(x.dtype == FLOAT32 for layer in kv for x in (layer.k, layer.v)):
        return "float32 is computed through torch"
    if any(isinstance(layer.mlp, MoE) for layer in decoder.layers):
        return "which experts run depends on the data"
    if not all(layer.spec.pre_norms for layer in decoder.layers):
        return "the residual stream is rounded through torch"
    if decoder.spec.dynamic_length:
        return "angles that depend on a prompt's length are found on the host"
    reference = sorted({op for op, impl in chosen(decoder) if impl.device != "cuda"})
    return f"{', '.join(reference)} run through torch" if reference else None


def chosen(decoder: Decoder) -> Iterator[tuple[str, Implementation]]:
    """The implementations of the ops that a step runs, each with the name of its use."""
    yield "embedding", decoder.embedding
    yield from (("angles", rope.angles) for rope in decoder.ropes.values())
    if decoder.softcap is not None:
        yield "logits", decoder.softcap
    for layer in decoder.layers:
        yield "attention", layer.attention_op
        if layer.spec.qk_norm or layer.spec.post_norms:
            yield "norms", layer.rms_norm
    for linear in (*(linear for layer in decoder.layers for linear in layer.linears), decoder.lm_head):
        for packed in linear.packed or ():
            yield "linears", packed.implementation


def linear_kernels(decoder: Decoder, max_tokens: int) -> Iterator[Kernel]:
    """The kernels that the products of the packed weights launch in steps of up to `max_tokens` tokens."""
    for linear in (*(linear for layer in decoder.layers for linear in layer.linears), decoder.lm_head):
        for packed in linear.packed or ():
            if isinstance(packed.weight, PackedWeight):
                yield from gemm_table.kernels(packed.weight, decoder.dtype, max_tokens)


class CapturedSteps:
    """Decode steps of a few sizes. `forward` launches a step on the stream and returns its logits."""

    def __init__(self, device: CudaDevice, forward: Forward, staged: StagedInputs, table_width: int) -> None:
        self._device, self._forward, self._staged, self._width = device, forward, staged, table_width
        self._replays: dict[int, Callable[[], None]] = {}  # by size, ascending
        self._logits = torch.empty(0)

    def capture(self, sizes: list[int], vocab_size: int) -> str:
        """Compile and capture every size. The largest comes first, so that the others find room in its memory.

        Returns which steps are captured. If the forward pass cannot be captured after all, steps run without capture,
        and the text says why.
        """
        start = time.perf_counter()
        self._logits = torch.empty(max(sizes), vocab_size, device=self._device.tensors)
        try:
            replays = {size: self._capture(size) for size in sorted(sizes, reverse=True)}
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            log.warning("decode steps are not captured: %s", reason)
            return f"none: {reason}"
        self._device.synchronize()
        self._replays = dict(sorted(replays.items()))
        log.info("captured decode steps of %d sizes in %.1f s", len(sizes), time.perf_counter() - start)
        return f"decode steps of {len(sizes)} sizes up to {max(sizes)}"

    def _capture(self, size: int) -> Callable[[], None]:
        inputs = self._staged.padding(size, self._width)

        def launch() -> None:
            self._logits[:size].copy_(self._forward(inputs))

        launch()  # a first launch outside the capture: it compiles, chooses and allocates
        self._device.synchronize()
        return self._device.capture(launch)

    def size_for(self, num_seqs: int) -> int | None:
        """The smallest captured size that holds a decode step of `num_seqs` sequences, or None."""
        return next((size for size in self._replays if size >= num_seqs), None)

    def replay(self, size: int) -> Tensor:
        """Replay a step with the inputs that were staged last, padded to `size`.

        Returns logits [size, vocab]. The next step overwrites them.
        """
        self._replays[size]()
        return self._logits[:size]
