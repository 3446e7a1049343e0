"""A file of weights mapped into memory. No torch here."""

from __future__ import annotations

import hashlib
import mmap
from contextlib import suppress
from os import fstat
from pathlib import Path

from lmkit.errors import CheckpointError

SAMPLES, SAMPLE_BYTES = 16, 4096  # of a file's data in its content digest

# Python 3.11 has no name for it. This is its value in Linux on x86-64 and arm64.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class MappedFile:
    """An open file. Raises CheckpointError if it cannot be opened, or has less than `smallest` bytes.

    The mapping is private: writing to it does not change the file, and takes memory only then. It lives until the last
    view of it is gone. If another process truncates the file during that time, this process is killed (SIGBUS), as with
    any mapped file.
    """

    def __init__(self, path: Path, kind: str, smallest: int) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                status = fstat(file.fileno())
                size, self._modified = status.st_size, status.st_mtime_ns
                if size < smallest:
                    raise CheckpointError(f"{path}: truncated: {size} bytes, a {kind} file has at least {smallest}")
                # Without NORESERVE the kernel may refuse to map a file larger than the machine's memory.
                flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
                self._map = mmap.mmap(file.fileno(), size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from None
        self.header_end = smallest

    def content_digest(self) -> str:
        """Changes with the file's size, time of modification, header, or a sample of its data."""
        size = len(self._map)
        digest = hashlib.sha256(f"{size} {self._modified}".encode() + self._map[: self.header_end])
        for i in range(SAMPLES):
            start = max(0, size - SAMPLE_BYTES) * i // (SAMPLES - 1)
            digest.update(self._map[start : start + SAMPLE_BYTES])
        return digest.hexdigest()

    def read_ahead(self) -> None:
        """Ask the kernel to fetch the whole file from the disk in the background, into huge pages if it can."""
        with suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._map.madvise(mmap.MADV_WILLNEED)

    def release(self) -> None:
        """Free the memory of the data read so far.

        What is used later is read again; changes are lost.
        """
        self._map.madvise(mmap.MADV_DONTNEED)
