"""A checkpoint's small files: JSON and texts beside the weights.

A model that is one file has them inside, under names as if the file were a folder: MODEL.gguf/tokenizer_config.json is
what MODEL.gguf says of its tokenizer.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any

from lmkit.errors import CheckpointError

# Suffix of a file with a model -> the module whose `content` makes its small files, and whose `has` tells if it could.
# It is imported when one is asked for: it stands on a higher floor.
INSIDE = {".gguf": "lmkit.formats.gguf_texts"}
PART = re.compile(r"-\d{5}-of-\d{5}$")  # of a model in several files
DEPTH = 2  # folders inside: 1_Pooling/config.json


def exists(path: Path) -> bool:
    """Whether there is such a file, or a link to nothing."""
    model = _model(path)
    if model is None:
        return os.path.lexists(path)
    found: bool = _inside(model).has(model, str(path.relative_to(model)))
    return found


def read(path: Path, limit: int) -> bytes:
    """The content of a file of at most `limit` bytes. Raises CheckpointError, also for one that is missing."""
    if (model := _model(path)) is not None:
        data: bytes | None = _inside(model).content(model, str(path.relative_to(model)))
        if data is None:
            raise CheckpointError(f"{path}: the file has nothing for it")
        return data
    if path.exists() and not path.is_file():  # opening a pipe would wait for ever
        raise CheckpointError(f"{path}: not a regular file")
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    if len(data) > limit:
        raise CheckpointError(f"{path}: larger than the limit of {limit} bytes")
    return data


def model_name(model: str) -> str:
    """What a model is called by default: its folder's name, its file's without the ending, or what was given."""
    path = Path(model)
    if path.is_dir():
        return path.resolve().name
    return PART.sub("", path.stem) if path.suffix in INSIDE and path.exists() else model


def _model(path: Path) -> Path | None:
    """The file that has `path` inside; None for a path of the file system."""
    found = (parent for parent in list(path.parents)[:DEPTH] if parent.suffix in INSIDE)
    return next((parent for parent in found if parent.is_file()), None)


def _inside(model: Path) -> Any:
    return importlib.import_module(INSIDE[model.suffix])
