"""Weights beyond memory: layers that are read from the file of packed weights in every step (see stream_plan.py).

    compute   layer 0 | layer 1 (slot 0) | layer 2 | layer 3 (slot 1) | layer 4 | layer 5 (slot 0) | head
    disk      layer 3 -> slot 1          | layer 5 -> slot 0 ...      | layer 3 -> slot 1 of the next step ...

Slots stay where they are, so captured steps hold addresses in them. Loading reads the whole file once and checks it.
"""

from __future__ import annotations

import mmap
import zlib
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from lmkit.errors import CheckpointError, EngineLostError
from lmkit.formats.direct_file import DirectFile, Reading, span
from lmkit.formats.safetensors_file import DTYPES
from lmkit.kernels.cpu import threads
from lmkit.models import roles
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.models.packed_cache import PackedCache, PackedFile
from lmkit.models.resolved import ResolvedModel
from lmkit.models.stream_plan import SLOTS, Streaming, StreamPlan, plan_stream


def unpacked_bytes(model: ResolvedModel) -> int:
    """Bytes of the weights that no file of packed weights has: vectors, positions, and embeddings of the checkpoint."""
    spec = model.spec
    numbers = sum(sum(layer.vectors.values()) + sum(map(prod, layer.matrices.values())) for layer in spec.layers)
    numbers += 2 * spec.hidden_size  # the final norm with its bias
    if spec.first_position is not None:
        numbers += (spec.first_position + spec.max_position) * spec.hidden_size
    numbers += spec.per_layer * (spec.hidden_size + spec.per_layer_vocab)
    is_mapped = model.source.stores(roles.EMBED, model.packing.dtype)
    return 4 * numbers + (prod(spec.head_shape) * model.dtype.itemsize if is_mapped else 0)


def forecast(model: ResolvedModel, streaming: Streaming) -> tuple[StreamPlan, float]:
    """The plan for a model, and the measured bandwidth of its disk. If its weights are not packed yet, sizes are those
    of the checkpoint, and so is the disk. Raises ConfigError if the memory is too little, and CheckpointError.
    """
    file = PackedCache(model, streaming.folder).open()
    if file is not None:
        return _plan(file, streaming, unpacked_bytes(model)), DirectFile(file.path).bandwidth()
    heads = 2 * prod(model.spec.head_shape) * model.dtype.itemsize
    linears = max(0, model.weight_bytes() - heads)
    sizes = [linears * layer.num_weights // model.spec.num_weights for layer in model.spec.layers]
    largest = max(model.reader.path.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    return plan_stream(sizes, heads, streaming.memory), DirectFile(largest).bandwidth()


def _plan(file: PackedFile, streaming: Streaming, unpacked: int) -> StreamPlan:
    spans = [span(*bounds) for bounds in zip(file.bounds, file.bounds[1:], strict=False)]
    *layers, head, rest = [end - start for start, end in spans]
    return plan_stream(layers, unpacked + head + rest, streaming.memory)


class StreamedFile:
    """A file of packed weights as the loader takes tensors from it: ascending by layer, then the head."""

    def __init__(self, file: PackedFile, streaming: Streaming, unpacked: int) -> None:
        self._packed, self._disk = file, DirectFile(file.path)
        self.kinds, self._bounds = file.kinds, file.bounds
        self._plan = _plan(file, streaming, unpacked)
        streaming.planned(self._plan, self._disk.bandwidth())
        self._places = self._placed()
        self._num_read = self._crc = 0
        self._ahead = self._begin(0)
        self._stream = _Stream(self._disk, [self._part(layer) for layer in self._plan.streamed])

    def _placed(self) -> list[memoryview]:
        """The memory of each layer, of the head and of the rest."""
        spans = [span(*bounds) for bounds in zip(self._bounds, self._bounds[1:], strict=False)]
        sizes, streamed = [end - start for start, end in spans], self._plan.streamed
        slots = self._plan.slots
        kept = [index for index in range(len(sizes)) if index not in streamed]
        memory = mmap.mmap(-1, max(1, sum(sizes[index] for index in kept) + sum(slots)))
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole, starts, end = memoryview(memory), dict[int, int](), 0
        for index in kept:
            starts[index], end = end, end + sizes[index]
        for slot in range(SLOTS):
            starts |= dict.fromkeys(streamed[slot::SLOTS], end)
            end += slots[slot]
        return [whole[starts[index] :][:size] for index, size in enumerate(sizes)]

    def _part(self, index: int) -> tuple[int, int, memoryview]:
        """Where a layer, the head or the rest begins and ends in the file, and its memory."""
        return self._bounds[index], self._bounds[index + 1], self._places[index]

    def _begin(self, index: int) -> Reading | None:
        return self._disk.begin(*self._part(index)) if index < len(self._places) else None

    def _read(self, index: int) -> None:
        """Read and sum up everything to the end of this part. The part behind it is begun."""
        while self._num_read <= index:
            start, end, memory = self._part(self._num_read)
            assert self._ahead is not None
            self._ahead.wait()
            self._num_read += 1
            self._ahead = self._begin(self._num_read)
            offset = start - span(start, end)[0]
            self._crc = zlib.crc32(memory[offset : offset + end - start], self._crc)

    def layer_type(self, index: int) -> Callable[..., DecoderLayer]:
        """The class of a layer."""
        if index not in self._plan.streamed:
            return DecoderLayer
        turn = self._plan.streamed.index(index)
        return partial(_StreamedLayer, partial(self._stream.wait, turn), partial(self._stream.release, turn))

    def take(self, name: str, outline: Tensor) -> Tensor:
        """The tensor `name` in its place. Vectors are copied: they stay, because others are computed from them."""
        info = self._packed.info(name, outline)
        index = bisect_right(self._bounds, info.start, hi=len(self._places)) - 1
        self._read(index)
        start, end, memory = self._part(index)
        at = info.start - span(start, end)[0]
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=info.nbytes, offset=at)
        tensor = flat.view(DTYPES[info.dtype]).view(info.shape)
        return tensor.clone() if tensor.ndim == 1 else tensor

    def check(self) -> None:
        """Raise CheckpointError if the data differs from how it was written. Then begin the first step's reads."""
        self._read(len(self._places) - 1)
        self._packed.check_crc32(self._crc)
        self._stream.start()


class _Stream:
    """Layers that take turns in slots. The host's thread of a step calls everything, in the order of the step.

    A step that failed leaves slots as they are: `wait` reads what is not there.
    """

    def __init__(self, disk: DirectFile, parts: list[tuple[int, int, memoryview]]) -> None:
        self._disk, self._parts = disk, parts
        self._readings: dict[int, tuple[int, Reading]] = {}  # by slot: the turn whose layer is there, or comes

    def start(self) -> None:
        """Begin to read the first layers."""
        for turn in range(min(SLOTS, len(self._parts))):
            self._begin(turn)

    def _begin(self, turn: int) -> None:
        self._readings[turn % SLOTS] = turn, self._disk.begin(*self._parts[turn])

    def wait(self, turn: int) -> None:
        """Wait until the layer of this turn is there. Raises EngineLostError if it cannot be read."""
        there, reading = self._readings[turn % SLOTS]
        try:
            if there != turn:
                reading.wait()
                self._begin(turn)
            self._readings[turn % SLOTS][1].wait()
        except CheckpointError as error:
            raise EngineLostError(f"{error}; start the engine again") from None

    def release(self, turn: int) -> None:
        """The layer of this turn is computed: begin to read the next one that takes its slot."""
        after = turn + SLOTS if turn + SLOTS < len(self._parts) else turn % SLOTS
        if after != turn:
            self._begin(after)


class _StreamedLayer(DecoderLayer):
    """A layer whose linears are there between the calls `wait` and `release`."""

    def __init__(self, wait: Callable[[], None], release: Callable[[], None], *args: Any) -> None:
        super().__init__(*args)
        self._wait, self._release = wait, release

    def __call__(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        threads.run_on_host(self._wait)
        outputs = super().__call__(*args, **options)
        threads.run_on_host(self._release)
        return outputs
