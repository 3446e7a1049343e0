"""A .safetensors file that is written one tensor at a time, so that at most one is in memory.

The header comes first in the file and is known last. Space is reserved for it, and the rest of that space is blank.
Every tensor starts at a multiple of 64 bytes, for vector loads directly from the mapped file. The format allows no
gaps, so small tensors named padding.N fill them.
"""

from __future__ import annotations

import json
import zlib
from contextlib import suppress
from os import fsync
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from lmkit.errors import CheckpointError
from lmkit.formats.atomic import write_errors
from lmkit.formats.safetensors_file import MAX_HEADER_BYTES, NAMES, TensorInfo

ALIGNMENT = 64


class SafetensorsStream:
    """A new file at `path`; `add` tensors, then `finish`. Raises CheckpointError if it cannot be written.

    `header_bytes` is the space of the header: about 100 bytes and the name for each tensor, and the metadata.
    """

    def __init__(self, path: Path, header_bytes: int) -> None:
        self.path = path
        self._data_start = -(-(8 + min(header_bytes, MAX_HEADER_BYTES - 4096)) // 4096) * 4096
        self.infos: dict[str, TensorInfo] = {}
        self.data_crc32 = 0  # of all bytes after the header's space
        self._end = self._data_start
        with write_errors(path):
            self._file = path.open("xb")
            self._file.seek(self._data_start)

    def add(self, name: str, tensor: Tensor) -> None:
        if missing := -self._end % ALIGNMENT:
            self._write(f"padding.{len(self.infos)}", torch.zeros(missing, dtype=torch.uint8))
        self._write(name, tensor)

    def _write(self, name: str, tensor: Tensor) -> None:
        assert name not in self.infos, f"tensor {name} is added twice"
        assert tensor.is_contiguous(), name
        self.infos[name] = TensorInfo(NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes, self._end)
        self._end += tensor.nbytes
        data = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
        self.data_crc32 = zlib.crc32(data, self.data_crc32)
        with write_errors(self.path):
            self._file.write(data)

    def finish(self, metadata: dict[str, str]) -> None:
        """Write the header and wait until the disk has the file."""
        header: dict[str, Any] = {"__metadata__": metadata}
        for name, info in self.infos.items():
            begin = info.start - self._data_start
            header[name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": [begin, begin + info.nbytes]}
        text = json.dumps(header, separators=(",", ":")).encode("ascii")
        room = self._data_start - 8
        if len(text) > room:
            raise CheckpointError(f"{self.path}: cannot be written: its header takes {len(text)} bytes, not {room}")
        with write_errors(self.path):
            self._file.seek(0)
            self._file.write(room.to_bytes(8, "little") + text.ljust(room))
            self._file.flush()
            fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # `finish` has written everything; without it there is no file
            self._file.close()
