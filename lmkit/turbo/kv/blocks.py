"""A KV block as bytes over the layers of a group, copies of blocks on the device, and the identity of their content.

    block b = for each layer: k.data[b] | k.params[b] | v.data[b] | v.params[b]      (params of coded types only)

Every storage type is copied bit for bit. In this file a block is bytes.

A recurrent state is larger than a block. It is cut into parts of a block's size, which have numbers after those of the
blocks: row * parts + part. Only a CPU moves them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import accumulate

import numba
import numpy as np
import torch
from torch import Tensor

from lmkit import __version__
from lmkit.config import EngineConfig
from lmkit.devices import holding
from lmkit.kernels.cuda.blocks import BlockCopier
from lmkit.kernels.cuda.module import is_available
from lmkit.kernels.cuda.switches import off
from lmkit.layers.batch import KVLayer
from lmkit.models.identity import how_computed, sources_digest
from lmkit.models.resolved import ResolvedModel

SOURCES = (
    "models/families/*.py",
    "models/kv_layout.py",
    "turbo/runners/*.py",
    "turbo/kv/blocks.py",
)  # sources that decide the content of a block


class KVBlocks:
    """The blocks of a model's layers, with the interface that turbo.kv.tiers needs (`BlockBytes`)."""

    def __init__(self, layers: Sequence[KVLayer]) -> None:
        """Layers of a model without keys and values have no blocks: nothing is copied, and there are no tiers."""
        tensors: dict[int, Tensor] = {}  # layers of different groups share them
        self._ends: list[int] = []  # of the parts of each layer
        for layer in layers:
            stored = [tensor for kv in layer.storages for tensor in (kv.data, kv.params) if tensor.numel()]
            tensors |= {tensor.data_ptr(): tensor for tensor in stored}
            self._ends.append(len(tensors))
        self.parts = [_as_bytes(tensor) for tensor in tensors.values()]  # each uint8 [num_blocks, bytes]
        self._at = layers[0].k.data.device
        self._arrays = [part.numpy() for part in self.parts] if self._on_host else []  # the same memory
        self._sizes = [part.shape[1] for part in self.parts]
        self._starts = [0, *accumulate(self._sizes)]
        self._nbytes = self._starts[-1]
        states = [tensor for layer in layers if layer.states is not None for tensor in layer.states.parts]
        self._states = [_as_bytes(tensor).numpy() for tensor in states] if self._on_host else []
        self._state_starts = [0, *accumulate(state.shape[1] for state in self._states)]
        self._num_blocks = len(self.parts[0]) if self.parts else 0
        self._stream: torch.cuda.Stream | None = None  # `_write_beside` writes blocks on it
        self._readers: torch.cuda.Stream | None = None  # `_read_beside` reads them on it
        copies = is_available() and off("copy.cu") is None and self.parts and not self._on_host
        self._copier = BlockCopier(self.parts) if copies else None

    @property
    def _on_host(self) -> bool:
        return not holding(self._at).own_memory

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return self._nbytes

    @property
    def state_parts(self) -> int:
        """Parts of a recurrent state; 0 if there is none."""
        count: int = -(-self._state_starts[-1] // self._nbytes)
        return count

    def _of_state(self, block: int, data: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The pieces of the part of a state: in the layers, and in `data` [nbytes]."""
        row, part = divmod(block - self._num_blocks, self.state_parts)
        first = part * self._nbytes
        for state, start in zip(self._states, self._state_starts, strict=False):
            begin, end = max(start, first), min(start + state.shape[1], first + self._nbytes)
            if begin < end:
                yield state[row, begin - start : end - start], data[begin - first : end - first]

    def read(self, block: int, out: memoryview) -> Callable[[], None] | None:
        """Copy a block to `out` [nbytes]. It must not be written meanwhile, and may be once this returns. A GPU returns
        a function that waits for the copy's end; any thread may call it."""
        if block >= self._num_blocks:
            data = np.frombuffer(out, np.uint8)
            data[:] = 0  # the last part may be shorter
            for stored, piece in self._of_state(block, data):
                piece[:] = stored
            return None
        if self._on_host:
            self._read(block, out, range(len(self.parts)))
            return None
        return self._read_beside(block, np.frombuffer(out, np.uint8))

    def read_layer(self, layer: int, block: int, out: memoryview) -> int:
        """See turbo.kv.tiers.filling.LayerBytes. Layers must not share blocks with those of another group."""
        parts = range(self._ends[layer - 1] if layer else 0, self._ends[layer])
        self._read(block, out, parts)
        return self._starts[parts.stop]

    def _read(self, block: int, out: memoryview, parts: range) -> None:
        target = np.frombuffer(out, np.uint8)
        for part in parts:
            target[self._starts[part] : self._starts[part + 1]] = self._arrays[part][block]

    def _read_beside(self, block: int, target: np.ndarray) -> Callable[[], None]:
        """Gather the block after the work launched so far, and move it to the host on a separate stream, so that steps
        continue meanwhile."""
        device = self.parts[0].device
        if self._readers is None:
            self._readers = torch.cuda.Stream(device)
        gathered = torch.cat([part[block] for part in self.parts])
        pinned, copied = torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()
        self._readers.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._readers):
            pinned.copy_(gathered, non_blocking=True)
            copied.record()
        gathered.record_stream(self._readers)

        def wait() -> None:
            copied.synchronize()
            target[:] = pinned.numpy()

        return wait

    def write(self, block: int, data: memoryview) -> None:
        """Copy `data` [nbytes] to a block. Any thread may call this. The block must not be read meanwhile."""
        source = np.frombuffer(data, np.uint8)
        if block >= self._num_blocks:
            for stored, piece in self._of_state(block, source):
                stored[:] = piece
        elif self._on_host:
            for array, start, size in zip(self._arrays, self._starts, self._sizes, strict=False):
                array[block] = source[start : start + size]
        else:
            self._write_beside(block, torch.from_numpy(source.copy()))

    def _write_beside(self, block: int, source: Tensor) -> None:
        """Write on a separate stream, after all work launched so far: that work may still read the block's old content.

        Steps continue meanwhile. The next reader of the block is planned only after this returns.
        """
        device = self.parts[0].device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.default_stream(device))
        with torch.cuda.stream(self._stream):
            moved = source.to(device)
            for part, piece in zip(self.parts, moved.split(self._sizes), strict=True):
                part[block].copy_(piece)
        self._stream.synchronize()

    def same_block(self, a: int, b: int) -> bool:
        """Whether two blocks hold the same bytes, in all layers."""
        return all(torch.equal(part[a], part[b]) for part in self.parts)

    def same_state(self, a: int, b: int) -> bool:
        """Whether two rows of recurrent states hold the same bytes, in all layers."""
        return all(np.array_equal(state[a], state[b]) for state in self._states)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks on the device, one after the other. A pair is (from, to)."""
        if not pairs:  # nearly every step
            return
        if self._on_host:
            for array in self._arrays:
                for source, target in pairs:
                    array[target] = array[source]
        elif self._copier is not None:
            self._copier.copy(pairs)
        else:
            for part in self.parts:
                for source, target in pairs:
                    part[target].copy_(part[source], non_blocking=True)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a view of `tensor` [num_blocks, ...] as uint8 [num_blocks, bytes of a block]."""
    return tensor.view(torch.uint8).view(tensor.shape[0], -1)


def kv_identity(model: ResolvedModel, config: EngineConfig) -> bytes:
    """Return the sha256 of everything besides the tokens that decides the content of a block.

    It covers the checkpoint, the computation and its software versions, and the storage of KV. A block made under
    another identity is never found.
    """
    storage = [asdict(storage) for storage in model.storages]
    versions = __version__, torch.__version__, numba.__version__, sources_digest(SOURCES)
    shape = config.tokens_per_block, config.attention_sinks
    computed = how_computed(model.reader, model.packing)
    return hashlib.sha256(repr((computed, storage, shape, versions)).encode()).digest()
