"""One GGUF file, versions 2 and 3, little-endian: a checked header over mapped memory.

    "GGUF" | version u32 | tensors u64 | pairs u64
    pairs:   key | type u32 | value            string: length u64, UTF-8; array: type u32, count u64, values
    tensors: name | dimensions u32 | sizes u64, the innermost first | type u32 | offset u64
    padding to the alignment | data, each tensor aligned; offsets count from here

Nothing in the file is trusted: counts and lengths are compared with the rest of the file before they are used. Arrays
(the tokenizer's vocabulary) are skipped, and read when they are asked for.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.mapped_file import MappedFile

MAX_TENSORS = MAX_PAIRS = 1 << 17
MAX_NAME_BYTES = 1 << 10
MAX_DIMENSIONS = 4
MAX_SIZE = 1 << 40
MAX_ARRAY = 1 << 24  # values of an array that is read

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Storage:
    """How a type stores its values: `block` consecutive values of a row in `nbytes` bytes."""

    name: str
    block: int
    nbytes: int


STORAGES = {
    0: Storage("F32", 1, 4),
    1: Storage("F16", 1, 2),
    2: Storage("Q4_0", 32, 18),
    3: Storage("Q4_1", 32, 20),
    6: Storage("Q5_0", 32, 22),
    7: Storage("Q5_1", 32, 24),
    8: Storage("Q8_0", 32, 34),
    10: Storage("Q2_K", 256, 84),
    11: Storage("Q3_K", 256, 110),
    12: Storage("Q4_K", 256, 144),
    13: Storage("Q5_K", 256, 176),
    14: Storage("Q6_K", 256, 210),
    16: Storage("IQ2_XXS", 256, 66),
    17: Storage("IQ2_XS", 256, 74),
    18: Storage("IQ3_XXS", 256, 98),
    19: Storage("IQ1_S", 256, 50),
    20: Storage("IQ4_NL", 32, 18),
    21: Storage("IQ3_S", 256, 110),
    22: Storage("IQ2_S", 256, 82),
    23: Storage("IQ4_XS", 256, 136),
    29: Storage("IQ1_M", 256, 56),
    30: Storage("BF16", 1, 2),
    34: Storage("TQ1_0", 256, 54),
    35: Storage("TQ2_0", 256, 66),
    39: Storage("MXFP4", 32, 17),
}


def storage_bits(name: str) -> int:
    """Bits of a type's codes: 4 for Q4_K."""
    return next(int(digits) for digits in re.findall(r"\d+", name))


@dataclass(frozen=True)
class GgufTensor:
    """`shape` has the outermost size first: [out, in] for a matrix. `start` is the first byte's place in the file."""

    storage: Storage
    shape: tuple[int, ...]
    nbytes: int
    start: int


@dataclass(frozen=True)
class _Array:
    kind: int
    count: int
    start: int  # place of the first value in the file
    end: int


class GgufFile(MappedFile):
    """An open file: `.metadata` (numbers, flags and strings by key), `.array` and `.tensors` by name.

    Raises CheckpointError for a damaged file, and UnsupportedError for tensors of another type.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "GGUF", 4)
        cursor = _Cursor(self._map, path)
        counts = _read_start(cursor)
        self.metadata, self._arrays = _read_pairs(cursor, counts[1])
        self.tensors = _read_tensors(cursor, counts[0], self.metadata.get("general.alignment", 32))
        self.header_end = cursor.at

    def raw(self, name: str) -> memoryview:
        """A tensor's bytes: a view of the file."""
        info = self.tensors[name]
        return memoryview(self._map)[info.start : info.start + info.nbytes]

    def array(self, key: str) -> list[Any]:
        """The values (numbers, flags or strings) of a key that holds an array; none without the key.

        Raises CheckpointError for a key that holds a single value, for more than MAX_ARRAY values, and for text that is
        not UTF-8.
        """
        if key in self.metadata:
            raise CheckpointError(f"{self.path}: key {key!r} is {type(self.metadata[key]).__name__}, expected an array")
        if key not in self._arrays:
            return []
        array = self._arrays[key]
        if array.count > MAX_ARRAY:
            raise CheckpointError(f"{self.path}: key {key!r} has {array.count} values, more than {MAX_ARRAY}")
        if array.kind != _STRING:
            return list(struct.unpack(f"<{array.count}{_SCALARS[array.kind][1]}", self._map[array.start : array.end]))
        data, texts, at = self._map[array.start : array.end], [], 0
        try:
            for _ in range(array.count):
                end = at + 8 + _LENGTH.unpack_from(data, at)[0]
                texts.append(data[at + 8 : end].decode())
                at = end
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path}: key {key!r}: value {len(texts)} is not UTF-8 text") from None
        return texts


@dataclass
class _Cursor:
    """A position in the header. Reading past the end of the file raises CheckpointError."""

    data: mmap.mmap
    path: Path
    at: int = 0

    def skip(self, count: int) -> None:
        if not 0 <= count <= len(self.data) - self.at:
            raise self.error(f"truncated: byte {self.at} asks for {count} more, the file has {len(self.data)}")
        self.at += count

    def skip_strings(self, count: int) -> None:
        """A loop without calls: a vocabulary has hundreds of thousands of strings."""
        at, last = self.at, len(self.data) - _LENGTH.size
        for _ in range(count):  # ends at the file's end at the latest: each takes at least eight bytes
            if at > last:
                break
            at += _LENGTH.size + _LENGTH.unpack_from(self.data, at)[0]
        else:
            self.skip(at - self.at)
            return
        raise self.error(f"truncated: a list of {count} strings does not end before the file's {len(self.data)} bytes")

    def take(self, count: int) -> bytes:
        start = self.at
        self.skip(count)
        return self.data[start : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self, limit: int | None = None) -> str:
        length = self.number("<Q")
        if limit is not None and length > limit:
            raise self.error(f"a name of {length} bytes at byte {self.at}, the limit is {limit}")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"not UTF-8 text before byte {self.at}") from None

    def error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem}")


def _read_start(cursor: _Cursor) -> tuple[int, int]:
    """(number of tensors, number of pairs)."""
    if len(cursor.data) < 4 or cursor.take(4) != b"GGUF":
        raise cursor.error("not a GGUF file")
    version = cursor.number("<I")
    if version not in (2, 3):
        order = " (big-endian)" if version >> 16 else ""
        raise UnsupportedError(f"{cursor.path}: GGUF version {version}{order} is not read; versions 2 and 3 are")
    tensors, pairs = cursor.number("<Q"), cursor.number("<Q")
    if tensors > MAX_TENSORS or pairs > MAX_PAIRS:
        raise cursor.error(f"{tensors} tensors and {pairs} pairs are more than {MAX_TENSORS}")
    return tensors, pairs


def _read_pairs(cursor: _Cursor, count: int) -> tuple[dict[str, Any], dict[str, _Array]]:
    """Single values, and where arrays are."""
    metadata: dict[str, Any] = {}
    arrays: dict[str, _Array] = {}
    for _ in range(count):
        key, kind = cursor.string(MAX_NAME_BYTES), cursor.number("<I")
        if key in metadata or key in arrays:
            raise cursor.error(f"key {key!r} is given twice")
        if kind in _SCALARS:
            metadata[key] = cursor.number(_SCALARS[kind])
        elif kind == _STRING:
            metadata[key] = cursor.string()
        elif kind == _ARRAY:
            arrays[key] = _skip_array(cursor, key)
        else:
            raise cursor.error(f"key {key!r} has type {kind}, which there is not")
    return metadata, arrays


def _skip_array(cursor: _Cursor, key: str) -> _Array:
    kind, count, start = cursor.number("<I"), cursor.number("<Q"), cursor.at
    if kind in _SCALARS:
        cursor.skip(count * struct.calcsize(_SCALARS[kind]))
    elif kind == _STRING:
        cursor.skip_strings(count)
    else:
        raise cursor.error(f"key {key!r} is an array of type {kind}, which is not read")
    return _Array(kind, count, start, cursor.at)


def _read_tensors(cursor: _Cursor, count: int, alignment: Any) -> dict[str, GgufTensor]:
    if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment is {alignment!r}, expected a power of two")
    entries: dict[str, tuple[Storage, tuple[int, ...], int]] = {}
    for _ in range(count):
        name = cursor.string(MAX_NAME_BYTES)
        if name in entries or not name.isprintable():
            raise cursor.error(f"tensor {name!r} is given twice, or its name is not printable")
        num_dimensions = cursor.number("<I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise cursor.error(f"tensor {name!r} has {num_dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
        shape = tuple(cursor.number("<Q") for _ in range(num_dimensions))[::-1]
        kind, offset = cursor.number("<I"), cursor.number("<Q")
        if kind not in STORAGES:
            known = ", ".join(storage.name for storage in STORAGES.values())
            raise UnsupportedError(f"{cursor.path}: tensor {name!r} has GGML type {kind}; lmkit reads {known}")
        entries[name] = STORAGES[kind], shape, offset
    begin = -(-cursor.at // alignment) * alignment
    infos = {name: _place(cursor, name, *entry, begin, alignment) for name, entry in entries.items()}
    end = begin
    for name, info in sorted(infos.items(), key=lambda item: item[1].start):
        if info.start < end:
            raise cursor.error(f"tensor {name!r} overlaps the one before it")
        end = info.start + info.nbytes
    if end > len(cursor.data):
        raise cursor.error(f"truncated: its header describes {end} bytes, the file has {len(cursor.data)}")
    return infos


def _place(
    cursor: _Cursor, name: str, storage: Storage, shape: tuple[int, ...], offset: int, begin: int, alignment: int
) -> GgufTensor:
    if not all(1 <= size <= MAX_SIZE for size in shape) or prod(shape) > MAX_SIZE or offset > MAX_SIZE:
        raise cursor.error(f"tensor {name!r} is {list(shape)} at {offset}, which cannot be")
    if shape[-1] % storage.block or offset % alignment:
        raise cursor.error(
            f"tensor {name!r}: rows of {shape[-1]} at {offset} do not fit {storage.name}'s blocks of {storage.block} "
            f"and the alignment {alignment}"
        )
    return GgufTensor(storage, shape, prod(shape) // storage.block * storage.nbytes, begin + offset)
