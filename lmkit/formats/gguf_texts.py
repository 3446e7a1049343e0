"""The small files of a checkpoint, made of a GGUF file's metadata. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.gguf_config import make_config
from lmkit.formats.gguf_model import GgufModel
from lmkit.formats.gguf_tokenizer import generation_config, tokenizer_config, tokenizer_json
from lmkit.formats.gguf_vocabulary import has_tokenizer
from lmkit.jsonfile import to_json

POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}  # pooling_type, see sentence-transformers; 0: the file names none
RANK = 4
TOKENIZER = "tokenizer.json"
Version = tuple[Path, int, int]  # a model, and the time of its last change and its size
BESIDE = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def content(model: Path, name: str) -> bytes | None:
    """The file of this name; None if the metadata say nothing of it. Raises CheckpointError and UnsupportedError.

    A file without a tokenizer has the texts that lie beside it.
    """
    if name not in _FILES and name not in BESIDE:
        return None
    version = _version(model)
    if (beside := _beside(model, name, version)) is not None:
        return beside.read_bytes() if beside.is_file() else None
    if name == TOKENIZER:
        return tokenizer_json(_opened(*version).first).encode()
    return _made(name, version)


def has(model: Path, name: str) -> bool:
    """Whether there is a file of this name. Raises as `content`, whose work it does not do for a tokenizer."""
    if name != TOKENIZER:
        return content(model, name) is not None
    beside = _beside(model, name, _version(model))
    return beside is None or beside.is_file()


def _version(model: Path) -> Version:
    status = model.stat()
    return model, status.st_mtime_ns, status.st_size


def _beside(model: Path, name: str, version: Version) -> Path | None:
    """Where the text is if the model has no tokenizer; None if it is inside."""
    return model.parent / name if name in BESIDE and not has_tokenizer(_opened(*version).first) else None


@lru_cache(maxsize=2)
def _opened(model: Path, modified: int, size: int) -> GgufModel:
    """Opened once for a model's files: a vocabulary takes a while to walk through."""
    return GgufModel(model)


@lru_cache(maxsize=2 * 8)
def _made(name: str, version: Version) -> bytes | None:
    """A file that is short, and asked for several times. Most of them need the whole vocabulary."""
    value = _FILES[name](_opened(*version)) if name in _FILES else None
    return None if value is None else to_json(value)


def _pooling(file: GgufModel) -> str | None:
    kind = file.metadata.get(f"{file.metadata.get('general.architecture')}.pooling_type", 0)
    if kind == RANK:
        raise UnsupportedError(f"{file.path}: a model that ranks (pooling_type {RANK}) is not read from GGUF")
    if kind not in (0, *POOLINGS):
        raise CheckpointError(f"{file.path}: pooling_type is {kind!r}, expected 0 to {RANK}")
    return POOLINGS.get(kind)


def _modules(file: GgufModel) -> list[dict[str, str]] | None:
    """modules.json of sentence-transformers."""
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}  # as llama.cpp's server does
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds.items()]
    return modules if _pooling(file) else None


_FILES: dict[str, Callable[[GgufModel], Any]] = {
    "config.json": make_config,
    "tokenizer_config.json": lambda file: tokenizer_config(file.first),
    "generation_config.json": lambda file: generation_config(file.first),
    "modules.json": _modules,
    "1_Pooling/config.json": lambda file: {"pooling_mode": kind} if (kind := _pooling(file)) else None,
}
