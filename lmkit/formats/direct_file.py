"""Large reads of a file past the page cache, into memory of the caller, and the number of requests to disks.

A read is cut into pieces, and a few threads read them with O_DIRECT at once, so that the disk always has several large
requests. A file system without O_DIRECT is read through the page cache, which forgets each piece at once.

KV tiers share the disk with weights that are read in every step. `REQUESTS` bounds what both have under way.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from lmkit.errors import CheckpointError

PAGE = 4096  # reads begin and end at multiples of it, in the file and in memory
_PIECE = 4 << 20  # bytes of one request
_READERS = 4
REQUESTS = threading.BoundedSemaphore(_READERS)  # to disks, of all threads of this process
_SAMPLE_SECONDS, _SAMPLE_BYTES = 1.0, 512 << 20  # of a measurement, at most


def span(start: int, end: int) -> tuple[int, int]:
    """The whole pages of a file that hold its bytes [start, end)."""
    return start // PAGE * PAGE, -(-end // PAGE) * PAGE


def memory_for_reads(num_bytes: int) -> memoryview:
    """Memory of zeros that begins on a page, in huge pages if the kernel has some.

    A request to a disk names a limited number of pieces of memory, so pages of 4 KiB cut large reads into small
    requests: a virtual disk read 1.3 GB/s into them, and 3.9 GB/s into huge pages. Private memory alone gets these.
    """
    memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:num_bytes]


class Reading:
    """A read under way."""

    def __init__(self, pieces: list[Future[None]]) -> None:
        self._pieces = pieces

    def wait(self) -> None:
        """Wait until the bytes are there. Raises CheckpointError if they cannot be read."""
        for piece in self._pieces:
            piece.result()


class DirectFile:
    """A file open for large reads. Raises CheckpointError if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor, self.is_direct = _open(path)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from None
        weakref.finalize(self, os.close, self._descriptor)
        self._readers = ThreadPoolExecutor(_READERS, "read-file")

    def begin(self, start: int, end: int, into: memoryview) -> Reading:
        """Begin to read the pages of the bytes [start, end) into `into`, which has their size and lies on a page."""
        first, last = span(start, end)
        assert len(into) == last - first
        pieces = range(first, last, _PIECE)
        return Reading([self._readers.submit(self._read, at, end, into[at - first :][:_PIECE]) for at in pieces])

    def _read(self, at: int, end: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `at`. Those after `end`, in its last page, may lie after the file's end."""
        try:
            with REQUESTS:
                count = os.preadv(self._descriptor, [into], at)
            if not self.is_direct:
                os.posix_fadvise(self._descriptor, at, len(into), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from None
        if count < min(len(into), end - at):
            raise CheckpointError(f"{self.path}: ends at byte {at + count}, but {end} bytes were there before")

    def bandwidth(self) -> float:
        """Bytes a second of a short measurement, with all readers busy. Raises CheckpointError."""
        size = min(os.fstat(self._descriptor).st_size // PAGE * PAGE, _SAMPLE_BYTES)
        memory, before, done = memory_for_reads(_READERS * _PIECE), time.perf_counter(), 0
        places = [(at, min(_PIECE, size - at)) for at in range(0, size, _PIECE)]
        pieces = [self._readers.submit(self._read, at, size, memory[at % len(memory) :][:n]) for at, n in places]
        for (_, num_bytes), piece in zip(places, pieces, strict=True):
            if time.perf_counter() - before < _SAMPLE_SECONDS or not piece.cancel():
                piece.result()
                done += num_bytes
        return done / (time.perf_counter() - before)


def _open(path: Path) -> tuple[int, bool]:
    """A descriptor, and whether its reads go past the page cache."""
    with suppress(OSError):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT), True
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC), False
