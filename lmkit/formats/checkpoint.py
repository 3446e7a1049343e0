"""A Hugging Face checkpoint folder: config.json, safetensors in one file or in shards, tokenizer and other texts."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from lmkit import small_files
from lmkit.errors import CheckpointError
from lmkit.formats.atomic import atomic_directory, copy_file, sync_directory, write_errors, write_file
from lmkit.formats.hub import resolve_model_path
from lmkit.formats.published import as_read
from lmkit.formats.safetensors_file import DTYPES, MAX_HEADER_BYTES, SafetensorsFile, TensorInfo, write_safetensors
from lmkit.formats.views import View
from lmkit.jsonfile import read_json, to_json

__all__ = ["CheckpointReader", "CheckpointWriter", "TensorInfo", "atomic_directory", "resolve_model_path"]

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
BASE = "model."  # before the names of all tensors but the head's
# A language model beside towers: names of transformers 4, and those of transformers 5.
NESTED = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.vision_model.": "model.vision_tower.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
MAX_CONFIG_BYTES = 10 << 20
MIRRORS = {
    "gptq": "quantize_config.json"
}  # quant_method -> where its readers may look for a copy of config.json's entry

# Files of others that are copied unchanged; saved anew, they would differ.
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tiktoken.model",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
)
# Patterns of more of them: texts of templates, and sentence-transformers' settings and modules with their weights.
COPIED_BELOW = (
    "*.tiktoken",
    "additional_chat_templates/*.jinja",
    "sentence_*_config.json",
    "[0-9]*_*/config.json",
    "[0-9]*_*/model.safetensors",
)


class CheckpointReader:
    """An open checkpoint. Every header is checked at the opening; tensors are mapped, and read when they are used.

    `path` is a folder, or a name that `resolve_model_path` knows. Raises CheckpointError for missing, truncated,
    inconsistent or unsafe content.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = resolve_model_path(path)
        self.config: dict[str, Any] = read_json(_inside(self.path, CONFIG), MAX_CONFIG_BYTES)
        self._files: dict[str, SafetensorsFile] = {}  # by tensor name
        self._views: dict[str, View] = {}
        self._sources: set[str] = set()  # tensors of the files that views stand for
        expected = _weight_map(self.path)
        for file_name in sorted(set(expected.values())) or [SINGLE]:
            file = SafetensorsFile(_inside(self.path, file_name))
            for name in file.infos:
                if name in self._files:
                    raise CheckpointError(f"{file.path}: tensor {name!r} is also in {self._files[name].path.name}")
                self._files[name] = file
        if expected:
            self._check_index(expected)
        self.is_base = "embed_tokens.weight" in self._files  # without its head, as sentence-transformers saves it
        if self.is_base:
            self._rename(BASE.__add__)
        if any(name.startswith(tuple(NESTED)) for name in self._files):
            self._rename(_as_of_5)
        self.config = as_read(self.config, self.path, self._files)

    def _rename(self, name_of: Callable[[str], str]) -> None:
        """Name the tensors of the files otherwise: those of a model without its head as those of a whole one."""
        for file in set(self._files.values()):
            file.infos = {name_of(name): info for name, info in file.infos.items()}
        self._files = {name_of(name): file for name, file in self._files.items()}

    def _check_index(self, expected: dict[str, str]) -> None:
        """Raise CheckpointError unless the index and the shards' headers name the same tensors in the same places."""
        for name, file_name in expected.items():
            if name not in self._files or self._files[name].path.name != file_name:
                raise CheckpointError(f"{self.path / INDEX}: {file_name} has no tensor {name!r}")
        for name, file in self._files.items():
            if name not in expected:
                raise CheckpointError(f"{file.path}: tensor {name!r} is not in {INDEX}")

    def show(self, views: Mapping[str, View]) -> None:
        """Show these tensors instead of their sources."""
        self._views |= views
        self._sources |= {name for view in views.values() for name in (view.source, *view.beside)}

    def narrow(self) -> None:
        """Give weights that the file has in codes, and that nobody keeps so, in config.json's dtype from now on."""

    def names(self) -> list[str]:
        """All tensors, sorted."""
        return sorted((self._files.keys() - self._sources) | self._views.keys())

    def has(self, name: str) -> bool:
        return name in self._views or (name in self._files and name not in self._sources)

    def info(self, name: str) -> TensorInfo:
        if (view := self._views.get(name)) is None:
            return self._file(name).infos[name]
        info = self._file(view.source).infos[view.source]
        return replace(info, shape=view.shape, nbytes=prod(view.shape) * DTYPES[info.dtype].itemsize)

    def tensor(self, name: str) -> Tensor:
        """A view of the file in the file's dtype, which is copied only when written to.

        It stays valid after `close`.
        """
        if (view := self._views.get(name)) is None:
            return self._file(name).tensor(name)
        return view.take(*(self._file(part).tensor(part) for part in (view.source, *view.beside)))

    def nbytes(self, prefix: str = "") -> int:
        """Bytes in the files of all tensors whose names begin with `prefix`."""
        return sum(self.info(name).nbytes for name in self.names() if name.startswith(prefix))

    def content_digest(self) -> str:
        """Changes when config.json or a weight file does; see SafetensorsFile.content_digest."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for file in sorted(set(self._files.values()), key=lambda file: file.path):
            digest.update(f"{file.path.name} {file.content_digest()}".encode())
        return digest.hexdigest()

    def release(self) -> None:
        """Free the memory of the data read so far; see SafetensorsFile.release."""
        for file in set(self._files.values()):
            file.release()

    def close(self) -> None:
        """Release the files. Each is unmapped together with the last of its tensors."""
        self._files = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._files:
            raise CheckpointError(f"{self.path}: tensor {name!r} is missing")
        return self._files[name]


class CheckpointWriter:
    """Writes a checkpoint into an existing folder, usually an `atomic_directory`. `finish` completes it.

    Tensors are held until their shard is full, so memory stays below `max_shard_bytes` plus one tensor. Do not change
    tensors after `add`. `written`: see write_safetensors. The same calls write the same bytes. Raises CheckpointError
    if a file cannot be written.
    """

    def __init__(
        self, out_dir: str | Path, max_shard_bytes: int = 2 << 30, written: Callable[[], None] = lambda: None
    ) -> None:
        self.path = Path(out_dir)
        self.max_shard_bytes = max_shard_bytes
        self._written = written
        self._pending: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []  # names of each shard written
        self._names: set[str] = set()
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        assert name not in self._names, f"tensor {name} is added twice"
        if self._pending and sum(t.nbytes for t in self._pending.values()) + tensor.nbytes > self.max_shard_bytes:
            self.flush()
        self._names.add(name)
        self._pending[name] = tensor
        self._total += tensor.nbytes

    def flush(self) -> None:
        """End the current shard, unless it is empty."""
        if self._pending:
            write_safetensors(self.path / _partial_name(len(self._shards)), self._pending, self._written)
            self._shards.append(list(self._pending))
            self._pending = {}

    def take(self) -> dict[str, Tensor]:
        """Hand over the tensors added since the last `flush`. The caller writes them instead of this writer."""
        tensors, self._pending = self._pending, {}
        return tensors

    def finish(self, config: dict[str, Any], copy_from: Path) -> None:
        """Name the shards, write their index and config.json, copy the text files of the checkpoint `copy_from`, or
        write those that a GGUF file holds."""
        self.flush()
        count = len(self._shards)
        assert count, "a checkpoint without tensors"
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            final = SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            with write_errors(self.path / final):
                os.rename(self.path / _partial_name(number), self.path / final)
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(weight_map.items()))}
            write_file(self.path / INDEX, to_json(index))
        write_file(self.path / CONFIG, to_json(config))
        entry = config.get("quantization_config")
        if isinstance(entry, dict) and (mirror := MIRRORS.get(str(entry.get("quant_method")))):
            write_file(self.path / mirror, to_json(entry))
        if copy_from.is_file():  # GGUF, which holds them
            for name in COPIED:
                if small_files.exists(copy_from / name):
                    (self.path / name).parent.mkdir(exist_ok=True)
                    write_file(self.path / name, small_files.read(copy_from / name, MAX_CONFIG_BYTES))
        for source in _text_files(copy_from) if copy_from.is_dir() else ():
            target = self.path / source.relative_to(copy_from)
            target.parent.mkdir(exist_ok=True)
            copy_file(source, target)
        sync_directory(self.path)


def _as_of_5(name: str) -> str:
    """A tensor's name in transformers 5."""
    old = next((old for old in NESTED if name.startswith(old)), None)
    return name if old is None else NESTED[old] + name.removeprefix(old)


def _partial_name(number: int) -> str:
    return f"shard-{number:05d}.partial"


def _text_files(folder: Path) -> list[Path]:
    found = [path for pattern in ("LICENSE*", *COPIED_BELOW) for path in sorted(folder.glob(pattern))]
    names = dict.fromkeys([*COPIED, *(str(path.relative_to(folder)) for path in found)])
    return [_inside(folder, name) for name in names if (folder / name).is_file()]


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor -> file, from the index. Empty if the checkpoint is a single file."""
    has_single, has_index = (folder / SINGLE).exists(), (folder / INDEX).exists()
    if not has_index:
        if not has_single:
            raise CheckpointError(f"{folder}: has neither {SINGLE} nor {INDEX}")
        return {}
    where = folder / INDEX
    weight_map = read_json(_inside(folder, INDEX), MAX_HEADER_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where}: `weight_map` is missing or empty")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file_name):
            raise CheckpointError(f"{where}: {name!r} is in {file_name!r:.200}, not a .safetensors file of this folder")
    if has_single and SINGLE not in weight_map.values():
        raise CheckpointError(f"{folder}: has both {SINGLE} and {INDEX}; remove the one that is out of date")
    return weight_map


def _inside(folder: Path, name: str) -> Path:
    """`folder / name`. A link that leads out of the folder is refused, except to the Hub cache's ../../blobs."""
    path, root = folder / name, folder.resolve()
    target = Path(os.path.realpath(path))  # no error for links in a circle
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(target.is_relative_to(allowed) for allowed in roots):
        raise CheckpointError(f"{path}: links to a file outside the checkpoint's folder")
    if not os.path.isfile(path):  # os.path: no error for too long names, and a pipe would block
        raise CheckpointError(f"{path}: {'not a regular file' if os.path.lexists(path) else 'no such file'}")
    return path
