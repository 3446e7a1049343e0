"""Weights beyond memory: layers that are read from the file of packed weights in every step (see stream_plan.py).

    compute   layer 0 (stays) | layer 1: q k v | o | gate up | down | layer 2 (stays) | layer 3: q k v | o ...
    disk      ... layer 1: down | layer 3: q k v | o | gate up | down                 | layer 5: q k v | o ...

The parts of a layer are its linears. A layer whose linears are not computed one after the other in a fixed order, such
as a mixture of experts, is one part. Each part has one place in memory, so captured steps hold addresses in it. Loading
reads the whole file once and checks it.
"""

from __future__ import annotations

import re
import zlib
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from lmkit.errors import CheckpointError, EngineLostError
from lmkit.formats.direct_file import PAGE, DirectFile, Reading, memory_for_reads, span
from lmkit.formats.safetensors_file import DTYPES
from lmkit.kernels.cpu import threads
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.packed_cache import PackedCache, PackedFile
from lmkit.models.resolved import ResolvedModel
from lmkit.models.stream_plan import Forecast, Parts, Streaming, StreamPlan, plan_stream
from lmkit.models.token_time import token_seconds

_PART = re.compile(r"layers\.\d+\..*?\.\d+")  # of a tensor's name: the layer, its linear, and a kernel's weight in that


def unpacked_bytes(model: ResolvedModel, step_tokens: int) -> int:
    """Bytes of the weights that no file of packed weights has: vectors, positions, and the rows of the checkpoint's
    embeddings that a step reads.
    """
    spec = model.spec
    numbers = sum(sum(layer.vectors.values()) + sum(map(prod, layer.matrices.values())) for layer in spec.layers)
    numbers += 2 * spec.hidden_size  # the final norm with its bias
    if spec.first_position is not None:
        numbers += (spec.first_position + spec.max_position) * spec.hidden_size
    numbers += spec.per_layer * (spec.hidden_size + spec.per_layer_vocab)
    rows, width = spec.head_shape[0], spec.hidden_size * model.embed_dtype.itemsize
    is_mapped = model.maps_embeddings and not model.shares_head
    return 4 * numbers + (min(rows * width, step_tokens * (width + PAGE)) if is_mapped else 0)


def forecast(model: ResolvedModel, streaming: Streaming) -> Forecast:
    """The plan for a model, with the measured speeds of its disk and of computing. If its weights are not packed yet,
    sizes are those of the checkpoint, and so is the disk. Raises ConfigError if the memory is too little, and
    CheckpointError.
    """
    file = PackedCache(model, streaming.folder).open()
    seconds = token_seconds(model, file)
    if file is not None:
        return Forecast(_Sections(file, model).plan(model, streaming), DirectFile(file.path).bandwidth(), seconds)
    embedding = 0 if model.shares_head else prod(model.spec.head_shape) * model.embed_dtype.itemsize
    head = model.source.head_bytes(model.embed_dtype.itemsize, model.packing.lm_head)
    linears = max(0, model.weight_bytes() - head - embedding)
    fixed = unpacked_bytes(model, streaming.step_tokens) + head
    fixed += 0 if model.maps_embeddings else embedding

    def sizes(layer: LayerSpec) -> Parts:
        parts = layer.linears.values() if _has_order(layer) else [(layer.num_weights, 1)]
        return tuple(linears * prod(part) // model.spec.num_weights for part in parts)

    folder = model.reader.path
    files = [folder] if folder.is_file() else folder.glob("*.safetensors")
    largest = max(files, key=lambda path: path.stat().st_size)
    plan = plan_stream([sizes(layer) for layer in model.spec.layers], fixed, streaming.memory)
    return Forecast(plan, DirectFile(largest).bandwidth(), seconds)


def _has_order(layer: LayerSpec) -> bool:
    """Whether each step computes the linears of a layer once and in the order of the file."""
    return all(block.in_order for block in layer)


class _Sections:
    """Where a file of packed weights has the parts of layers, the head and the rest.

    Section n is the bytes [bounds[n], bounds[n + 1]) of the file. `layers` has the sections of each layer, and the last
    two sections are the head and the rest. Raises CheckpointError for a file in another order.
    """

    def __init__(self, file: PackedFile, model: ResolvedModel) -> None:
        has_order = [_has_order(layer) for layer in model.spec.layers]
        ends: list[dict[str, int]] = [{} for _ in range(len(has_order) + 2)]  # of each layer's parts, head, rest
        self.bounds = [min(info.start for info in file.infos.values())]
        for name, info in file.infos.items():
            index = int(name.split(".")[1]) if name.startswith("layers.") else len(ends) - 1
            part = _PART.match(name) if index < len(has_order) and has_order[index] else None
            key = part[0] if part else ""
            ends[index][key] = max(ends[index].get(key, 0), info.start + info.nbytes)
        ends[-1] = {"": max(max(parts.values()) for parts in ends if parts)}
        self.layers: list[range] = []
        for parts in ends:
            first = len(self.bounds) - 1
            self.bounds += sorted(parts.values())
            self.layers.append(range(first, len(self.bounds) - 1))
        if self.bounds != sorted(self.bounds):
            raise CheckpointError(f"{file.path}: its layers are not in order")
        self.spans = [span(*bounds) for bounds in pairwise(self.bounds)]
        self.sizes = [end - start for start, end in self.spans]
        *self.layers, self.head, self.rest = self.layers

    def plan(self, model: ResolvedModel, streaming: Streaming) -> StreamPlan:
        layers = [tuple(self.sizes[section] for section in sections) for sections in self.layers]
        fixed = sum(self.sizes[section] for section in (*self.head, *self.rest))
        return plan_stream(layers, unpacked_bytes(model, streaming.step_tokens) + fixed, streaming.memory)


class StreamedFile:
    """A file of packed weights as the loader takes tensors from it: ascending by layer, then the head."""

    def __init__(self, file: PackedFile, streaming: Streaming, model: ResolvedModel) -> None:
        self._packed, self._disk = file, DirectFile(file.path)
        self.kinds, self._sections = file.kinds, _Sections(file, model)
        self._plan = self._sections.plan(model, streaming)
        self._turns = {self._sections.layers[turn.layer][turn.part]: n for n, turn in enumerate(self._plan.turns)}
        self._places = self._placed()
        self._num_read = self._crc = 0
        self._ahead = self._begin(0)
        self._stream = _Stream(self._disk, [self._part(section) for section in self._turns], self._plan.behind)

    def _placed(self) -> list[memoryview]:
        """The memory of each section."""
        sizes, room = self._sections.sizes, self._plan.room
        starts = {section: self._plan.turns[turn].start for section, turn in self._turns.items()}
        end = room
        for section, size in enumerate(sizes):
            if section not in starts:
                starts[section], end = end, end + size
        whole = memory_for_reads(end)
        return [whole[starts[section] :][:size] for section, size in enumerate(sizes)]

    def _part(self, section: int) -> tuple[int, int, memoryview]:
        """Where a section begins and ends in the file, and its memory."""
        return self._sections.bounds[section], self._sections.bounds[section + 1], self._places[section]

    def _begin(self, section: int) -> Reading | None:
        return self._disk.begin(*self._part(section)) if section < len(self._places) else None

    def _read(self, section: int) -> None:
        """Read and sum up everything to the end of this section. The one after it is begun, unless it would be written
        over this one, whose vectors are still to be copied.
        """
        while self._num_read <= section:
            start, end, memory = self._part(self._num_read)
            reading = self._ahead or self._begin(self._num_read)
            assert reading is not None
            reading.wait()
            offset = start - span(start, end)[0]
            self._crc = zlib.crc32(memory[offset : offset + end - start], self._crc)
            self._num_read += 1
            self._ahead = None if self._overlaps_next(self._num_read - 1) else self._begin(self._num_read)

    def _overlaps_next(self, section: int) -> bool:
        """Whether a section and the one after it share memory."""
        turns = [self._turns.get(each) for each in (section, section + 1)]
        own, other = (None if turn is None else self._plan.turns[turn] for turn in turns)
        return own is not None and other is not None and other.overlaps(own)

    def layer_type(self, index: int) -> Callable[..., DecoderLayer]:
        """The class of a layer."""
        sections = self._sections.layers[index]
        turn = self._turns.get(sections[0])
        if turn is None or len(sections) > 1:
            return DecoderLayer
        return partial(_StreamedLayer, partial(self._stream.wait, turn), self._stream.release)

    def stream(self, layer: DecoderLayer) -> None:
        """Let each linear of a streamed layer wait for its weights. They are the file's."""
        sections = self._sections.layers[layer.index]
        if sections[0] not in self._turns or len(sections) == 1:
            return
        turn = self._turns[sections[0]]
        for linear in layer.linears:
            assert linear.packed is not None
            for i, packed in enumerate(linear.packed):
                run = _streamed(packed.implementation.run, partial(self._stream.wait, turn), self._stream.release)
                linear.packed[i] = packed._replace(implementation=replace(packed.implementation, run=run))
                turn += 1

    def take(self, name: str, outline: Tensor) -> Tensor:
        """The tensor `name` in its place. Vectors are copied: they stay, because others are computed from them."""
        info = self._packed.info(name, outline)
        section = bisect_right(self._sections.bounds, info.start, hi=len(self._places)) - 1
        self._read(section)
        start, end, memory = self._part(section)
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
    """Parts that take turns in a room, see StreamPlan. The host's thread of a step calls everything.

    Turns are counted on from step to step. Reads begin in their order, each as soon as its place is free.
    """

    def __init__(self, disk: DirectFile, parts: list[tuple[int, int, memoryview]], behind: list[int]) -> None:
        self._disk, self._parts, self._behind = disk, parts, behind
        self._readings: dict[int, Reading] = {}  # by part
        self._num_begun = self._num_done = 0  # of all turns

    def start(self) -> None:
        """Begin to read all parts whose places are free."""
        count = len(self._parts)
        while self._num_begun < self._num_done + count:
            part = self._num_begun % count
            behind = self._behind[part]
            if self._num_begun - behind >= self._num_done and behind:
                return
            if behind or part not in self._readings:
                self._readings[part] = self._disk.begin(*self._parts[part])
            self._num_begun += 1

    def wait(self, part: int) -> None:
        """Wait until this part is there. Raises EngineLostError if it cannot be read.

        A step that failed, or that computes no logits, left parts out: they are read first.
        """
        try:
            while self._num_done % len(self._parts) != part:
                self._readings[self._num_done % len(self._parts)].wait()
                self.release()
            self._readings[part].wait()
        except CheckpointError as error:
            raise EngineLostError(f"{error}; start the engine again") from None

    def release(self) -> None:
        """The part that was waited for is computed."""
        self._num_done += 1
        self.start()


class _StreamedLayer(DecoderLayer):
    """A layer whose linears are there between the calls `wait` and `release`."""

    def __init__(self, wait: Callable[[], None], release: Callable[[], None], *args: Any) -> None:
        super().__init__(*args)
        self._run = _streamed(super().__call__, wait, release)

    def __call__(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        outputs: tuple[Tensor, Tensor | None] = self._run(*args, **options)
        return outputs


def _streamed(run: Callable[..., Any], wait: Callable[[], None], release: Callable[[], None]) -> Callable[..., Any]:
    """`run`, once its weights are there. Their place is free after it."""

    def streamed(*args: Any, **options: Any) -> Any:
        threads.run_on_host(wait)
        result = run(*args, **options)
        threads.run_on_host(release)
        return result

    return streamed
