"""Rows of numbers in a mapped file with a checksum."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

from lmkit.formats.atomic import write_errors, write_file
from lmkit.quant.data.workdir import crc32, damaged


class Buffer:
    """[num_tokens, width] in a file, or in memory if there is no path. An existing file keeps its content.

    Raises CheckpointError if the disk has no room. The blocks of the file are reserved, because a mapping that runs out
    of disk kills the process.
    """

    def __init__(self, num_tokens: int, width: int, path: Path | None, dtype: torch.dtype = torch.float32) -> None:
        size = dtype.itemsize * num_tokens * width
        self._path = path
        if path is None:
            self._map = mmap.mmap(-1, size)
        else:
            with write_errors(path):
                fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
                try:
                    os.posix_fallocate(fd, 0, size)
                    self._map = mmap.mmap(fd, size)
                finally:
                    os.close(fd)
        self.states = torch.frombuffer(self._map, dtype=dtype).view(num_tokens, width)

    def release(self) -> None:
        """Leave the pages that were read or written to the page cache. They are read again on use."""
        if self._path is not None:
            self._map.madvise(mmap.MADV_DONTNEED)

    def seal(self) -> None:
        """Wait until the disk has all that was written, and its checksum."""
        if self._path is None:
            return
        with write_errors(self._path):
            self._map.flush()
        write_file(self._path.with_suffix(".crc32"), str(crc32(self._path)).encode())

    def check(self) -> None:
        """Raise CheckpointError if the file is not as it was sealed."""
        if self._path is None:
            return
        sealed = self._path.with_suffix(".crc32")
        if not sealed.exists() or sealed.read_bytes() != str(crc32(self._path)).encode():
            raise damaged(self._path)
