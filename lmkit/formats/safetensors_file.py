"""One .safetensors file: a checked header over mapped memory, and a writer.

    8 bytes, little-endian: header length | JSON header {name: {dtype, shape, data_offsets}} | tensor bytes

Nothing in the file is trusted. The tensors must fill the rest of the file exactly, without gap or overlap, each with
the bytes of its dtype and shape. Otherwise the header is refused. Allocations are then bounded by the file's size.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from os import fsync
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmkit.errors import CheckpointError
from lmkit.formats.atomic import write_errors
from lmkit.formats.mapped_file import MappedFile
from lmkit.jsonfile import parse_json

MAX_HEADER_BYTES = 16 << 20  # some 100,000 tensors; parsed, hostile JSON of this size stays below half a gigabyte
MAX_NUMEL = 1 << 62
WRITE_BYTES = 16 << 20  # bytes of a tensor in one call

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """A header's entry for a tensor. `start` is its first byte's place in the file."""

    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]
    nbytes: int
    start: int


_CRC_BYTES = 64 << 20  # of one call, after which a program may end


class SafetensorsFile(MappedFile):
    """An open file: `.infos` by name, `.metadata`, tensors as views of the mapping. Raises CheckpointError.

    A tensor takes no memory until it is written to; see MappedFile.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "safetensors", 8)
        self.infos, self.metadata = _parse_header(self._map, path)
        self.header_end = 8 + int.from_bytes(self._map[:8], "little")

    def tensor(self, name: str) -> Tensor:
        info = self.infos[name]
        dtype = DTYPES[info.dtype]
        if not info.nbytes:
            return torch.empty(info.shape, dtype=dtype)
        if info.start % dtype.itemsize:  # legal in a file, but not in memory
            data = bytearray(self._map[info.start : info.start + info.nbytes])
            return torch.frombuffer(data, dtype=dtype).reshape(info.shape)
        count = info.nbytes // dtype.itemsize
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=info.start).reshape(info.shape)

    def data_crc32(self) -> int | None:
        """Of all bytes after the header. Other Python threads run meanwhile. None if the program ends before."""
        start, crc = min((info.start for info in self.infos.values()), default=len(self._map)), 0
        with memoryview(self._map) as whole, whole[start:] as data:
            for at in range(0, len(data), _CRC_BYTES):
                if not threading.main_thread().is_alive():
                    return None
                crc = zlib.crc32(data[at : at + _CRC_BYTES], crc)
        return crc


def read_single_pages(tensor: Tensor) -> None:
    """Let a fault in a mapped tensor read its page alone. Otherwise the kernel reads the megabytes around it, which is
    waste if rows are used in no order and memory is too short to keep them.
    """
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    num_bytes = tensor.data_ptr() + tensor.nbytes - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), mmap.MADV_RANDOM)


def write_safetensors(path: Path, tensors: dict[str, Tensor], written: Callable[[], None] = lambda: None) -> None:
    """Write a new file, with equal bytes for equal tensors, and wait until the disk has it.

    Wide dtypes come first, then names in order, so that every tensor is aligned. `written` is called after every
    WRITE_BYTES. If tensors are views of other files, it may free the memory of the data read so far. Raises
    CheckpointError if the file cannot be written.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it transformers refuses the file
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    with write_errors(path), path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            flat = tensors[name].detach().cpu().contiguous().reshape(-1)
            for part in flat.view(torch.uint8).split(WRITE_BYTES):
                file.write(part.numpy().data)
                written()
        file.flush()
        fsync(file.fileno())


def _parse_header(data: mmap.mmap, path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: header of {length} bytes, the limit is {MAX_HEADER_BYTES}; not a safetensors file?"
        )
    if 8 + length > len(data):
        raise CheckpointError(f"{path}: truncated: its header ends at byte {8 + length}, the file has {len(data)}")
    header = parse_json(data[8 : 8 + length], f"{path}: header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map names to strings")
    infos = {name: _parse_entry(name, entry, 8 + length, path) for name, entry in header.items()}
    _check_layout(infos, 8 + length, len(data), path)
    return infos, metadata


def _parse_entry(name: str, entry: Any, data_start: int, path: Path) -> TensorInfo:
    where = f"{path}: tensor {name!r}"
    if not name.isprintable():
        raise CheckpointError(f"{where}: a name must be printable")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: expected dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where}: dtype {dtype!r:.40} is not one of {', '.join(DTYPES)}")
    if not _is_sizes(shape) or len(shape) > 8 or prod(size or 1 for size in shape) > MAX_NUMEL:
        raise CheckpointError(f"{where}: shape {shape!r:.80} is not a list of at most 8 sizes")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets {offsets!r:.80} are not [begin, end]")
    nbytes = prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(
            f"{where}: {dtype} {shape} takes {nbytes} bytes, its data_offsets hold {offsets[1] - offsets[0]}"
        )
    return TensorInfo(dtype, tuple(shape), nbytes, data_start + offsets[0])


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size <= MAX_NUMEL for size in value)


def _check_layout(infos: dict[str, TensorInfo], data_start: int, size: int, path: Path) -> None:
    """Raise CheckpointError unless the tensors fill the file from the header's end without gap or overlap."""
    end = data_start
    for name, info in sorted(infos.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if info.start != end:
            problem = "overlaps the one before it" if info.start < end else "leaves a gap before it"
            raise CheckpointError(f"{path}: tensor {name!r} {problem} (byte {info.start}, expected {end})")
        end += info.nbytes
    if end != size:
        problem = "truncated" if end > size else "bytes after the last tensor"
        raise CheckpointError(f"{path}: {problem}: its header describes {end} bytes, the file has {size}")
