"""Memory for the tensors of one step: one region, used again by every step and by every captured program.

New pages cost a fault each, and an allocator returns large pieces to the system at once. A step that allocates its
activations anew therefore spends a good part of its time on faults. The region's pages are taken when first used,
lowest first.
"""

from __future__ import annotations

import bisect
import functools
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch
from torch import Tensor

from lmkit.kernels.cpu import threads

ALIGN = 64
_ACTIVE: ContextVar[Workspace | None] = ContextVar("workspace", default=None)


class Workspace:
    """A region of `num_bytes`. A piece is free again when no tensor refers to it."""

    def __init__(self, num_bytes: int) -> None:
        whole = np.empty(num_bytes + ALIGN, np.uint8)
        skip = -whole.ctypes.data % ALIGN
        self._region = whole[skip : skip + num_bytes]
        self._free = [(0, num_bytes)]  # (start, end), ascending, never adjacent
        self._taken: dict[int, weakref.ref[np.ndarray]] = {}  # by start

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, `empty` takes memory from this workspace."""
        token = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(token)

    def take(self, num_bytes: int) -> Tensor | None:
        """uint8 [num_bytes] from the first gap that holds it; None if there is none."""
        size = -(-max(num_bytes, 1) // ALIGN) * ALIGN
        for i, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[i : i + 1] = [(start + size, end)] if end - start > size else []
                piece = self._region[start : start + num_bytes]
                self._taken[start] = weakref.ref(piece, functools.partial(self._release, start, start + size))
                return torch.from_numpy(piece)
        return None

    def _release(self, start: int, end: int, piece: object) -> None:
        del self._taken[start]
        at = bisect.bisect(self._free, (start, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == start:
            at -= 1
            start = self._free.pop(at)[0]
        self._free.insert(at, (start, end))

    def alias(self, tensor: Tensor) -> Tensor | None:
        """The same memory without holding it, valid until the next computation. None if it lies elsewhere."""
        start = tensor.data_ptr() - self._region.ctypes.data
        if not 0 <= start < len(self._region):
            return None
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n)
        piece = torch.from_numpy(self._region[start : start + (last + 1) * tensor.itemsize])
        return piece.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """torch.empty, from the active workspace if there is one with room."""
    workspace = _ACTIVE.get()
    piece = workspace.take(math.prod(shape) * dtype.itemsize) if workspace is not None else None
    return threads.keep(torch.empty(shape, dtype=dtype)) if piece is None else piece.view(dtype).view(shape)
