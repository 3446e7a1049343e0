"""The memory of KV blocks on a CPU. The system gives a page when it is first written; here pages go back to it."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

_DONTNEED = 4  # MADV_DONTNEED: the pages are free, and zeros when they are used again


def give_back(parts: Iterable[Tensor], blocks: Sequence[int]) -> int:
    """Give the pages that lie within these blocks back to the system. Their content is lost.

    parts: uint8 [num_blocks, bytes] on the CPU. blocks: ascending. Returns the bytes that were given back. A system
    that refuses keeps its pages.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    given = 0
    for part in parts:
        for first, end in _runs(blocks):
            size = part.shape[1]
            start, stop = _pages(part.data_ptr() + first * size, part.data_ptr() + end * size)
            if start < stop and not madvise(start, stop - start, _DONTNEED):
                given += stop - start
    return given


def _pages(start: int, stop: int) -> tuple[int, int]:
    """The addresses of the whole pages within these."""
    return -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as ranges: 1 2 3 7 -> (1, 4) (7, 8)."""
    first = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i] != blocks[i - 1] + 1:
            yield blocks[first], blocks[i - 1] + 1
            first = i
