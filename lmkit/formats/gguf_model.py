"""A model in one GGUF file, or split into several: NAME-00001-of-00003.gguf and so on. No torch here."""

from __future__ import annotations

import hashlib
import re
import struct
from functools import cached_property
from pathlib import Path
from typing import Any

from lmkit.errors import CheckpointError
from lmkit.formats.gguf_file import GgufFile, GgufTensor

SUFFIX = ".gguf"
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
BESIDE = ("mmproj", "imatrix")  # what lies beside models and is none
MAX_PARTS = 1 << 12
MAX_DIVISORS = 1 << 12
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GgufModel:
    """An open model: `.metadata` and arrays of its first file, `.tensors` of all. `.path` is the first file.

    Raises CheckpointError for a damaged or missing part, and UnsupportedError for tensors of unknown types.
    """

    def __init__(self, path: Path) -> None:
        self.files = _open_parts(path)
        self.path, self.first = self.files[0].path, self.files[0]
        self.metadata = self.first.metadata
        self.tensors: dict[str, GgufTensor] = {}
        self._places: dict[str, GgufFile] = {}
        for file in self.files:
            for name, info in file.tensors.items():
                if name in self.tensors:
                    raise CheckpointError(f"{file.path}: tensor {name!r} is also in {self._places[name].path.name}")
                self.tensors[name], self._places[name] = info, file
        total = self.metadata.get("split.tensors.count", len(self.tensors))
        if len(self.files) > 1 and total != len(self.tensors):
            raise CheckpointError(f"{self.path}: its parts have {len(self.tensors)} tensors, not {total}")

    def array(self, key: str) -> list[Any]:
        """See GgufFile.array; [] also for a key with a single value."""
        return [] if key in self.metadata else self.first.array(key)

    def raw(self, name: str) -> memoryview:
        """A tensor's bytes: a view of its file."""
        return self._places[name].raw(name)

    def floats(self, name: str) -> list[float]:
        """The numbers of a small tensor of float32; [] if it is missing. Raises CheckpointError for another one."""
        info = self.tensors.get(name)
        if info is None:
            return []
        if info.storage.name != "F32" or len(info.shape) != 1 or info.shape[0] > MAX_DIVISORS:
            raise CheckpointError(f"{self.path}: {name} is {info.storage.name} {list(info.shape)}, expected some F32")
        return [float(f"{x:.7g}") for x in struct.unpack(f"<{info.shape[0]}f", self.raw(name))]

    @cached_property
    def parts_of_layers(self) -> frozenset[str]:
        """The ends of the tensors' names in layers: attn_q.weight."""
        return frozenset(name.split(".", 2)[2] for name in self.tensors if re.match(r"blk\.\d+\.", name))

    @cached_property
    def float_type(self) -> str:
        """The type of dense weights when the model is served: the file's, or float16 for what is quantized."""
        kinds = {info.storage.name for info in self.tensors.values() if len(info.shape) > 1}
        if kinds <= {"F32"}:
            return "float32"
        return "bfloat16" if "BF16" in kinds and "F16" not in kinds else "float16"

    def content_digest(self) -> str:
        """Changes when a file does; see MappedFile.content_digest."""
        return hashlib.sha256("".join(file.content_digest() for file in self.files).encode()).hexdigest()

    def release(self) -> None:
        """Free the memory of the data read so far; see MappedFile.release."""
        for file in self.files:
            file.release()


def find_gguf(path: Path) -> Path:
    """The first file of the model that `path` is or holds. Raises CheckpointError if there is none, or several."""
    if not path.is_dir():
        return _part(path, 1)
    files = {_part(file, 1) for file in path.glob("*" + SUFFIX) if not file.name.startswith(BESIDE)}
    if len(files) != 1:
        names = ", ".join(sorted(file.name for file in files)[:8])
        raise CheckpointError(f"{path}: {len(files)} .gguf models; give one of them: {names or 'a file'}")
    return files.pop()


def is_gguf(model: str | Path) -> bool:
    """Whether `model` names a GGUF file, or a folder that holds one and no safetensors."""
    path = Path(model)
    if path.is_dir():
        return any(path.glob("*" + SUFFIX)) and not any(path.glob("*.safetensors"))
    return path.suffix == SUFFIX and path.is_file()


def parts_of(path: Path) -> list[Path]:
    """All files of the model that `path` is a part of, by their names."""
    match = PART.fullmatch(path.name)
    return [_part(path, number) for number in range(1, min(int(match[3]), MAX_PARTS) + 1)] if match else [path]


def _part(path: Path, number: int) -> Path:
    """The part of this number beside a part of a split model; the path itself if the model is whole."""
    match = PART.fullmatch(path.name)
    return path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}{SUFFIX}") if match else path


def _open_parts(path: Path) -> list[GgufFile]:
    path = find_gguf(path)
    match = PART.fullmatch(path.name)
    named = int(match[3]) if match else 1
    first = GgufFile(_existing(path, named))
    count = first.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= MAX_PARTS:
        raise CheckpointError(f"{path}: split.count is {count!r}, expected a number of parts")
    count = max(count, 1)
    if count > 1 and named != count:
        number = first.metadata.get("split.no", 0)
        raise CheckpointError(
            f"{path}: is part {number + 1 if type(number) is int else '?'} of {count} of a model; name the parts "
            f"NAME-00001-of-{count:05d}{SUFFIX} and so on, as they were written"
        )
    files = [first, *(GgufFile(_existing(_part(path, number), count)) for number in range(2, count + 1))]
    for number, file in enumerate(files):
        own = file.metadata.get("split.count", 1), file.metadata.get("split.no", 0)
        if count > 1 and own != (count, number):
            raise CheckpointError(f"{file.path}: says that it is part {own[1]!r} (from 0) of {own[0]!r}")
    return files


def _existing(path: Path, count: int) -> Path:
    if count > 1 and not path.exists():
        raise CheckpointError(f"{path}: is missing: it is one of the {count} parts of this model")
    return path
