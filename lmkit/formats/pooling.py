"""Which hidden states are a text's embedding: sentence-transformers' `modules.json` and `1_Pooling/config.json`.

    modules.json            [{"type": "sentence_transformers.models.Transformer", "path": ""}, {"type": "...Pooling",
                              "path": "1_Pooling"}, {"type": "...Normalize", "path": "2_Normalize"}]
    1_Pooling/config.json   {"pooling_mode_lasttoken": true, "pooling_mode_mean_tokens": false, ...}, or
                            {"pooling_mode": "lasttoken"}

Embeddings are always normalized, so a Normalize module changes nothing. No torch here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.jsonfile import read_json, read_list

MODULES, CONFIG = "modules.json", "config.json"
MAX_BYTES = 1 << 20
KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
Kind = Literal["last", "mean", "cls"]
KINDS: dict[str, Kind] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls"}
REMEDY = "choose with --pooling last, mean or cls"


def read_pooling(folder: Path, usual: Kind = "last") -> Kind:
    """The pooling of the checkpoint in `folder`, the `usual` one if it names none.

    Raises UnsupportedError for modules and poolings that lmkit does not compute, and CheckpointError for broken files.
    """
    if not (folder / MODULES).exists():
        return usual
    pooling = usual
    for module in read_list(folder / MODULES, MAX_BYTES):
        kind, path = _fields(module, folder / MODULES)
        if kind not in KNOWN_MODULES:
            raise UnsupportedError(
                f"{folder / MODULES}: module {kind[:64]!r} is not supported; {REMEDY} to leave it out"
            )
        if kind == "Pooling":
            file = folder / path / CONFIG
            pooling = _pooling(read_json(file, MAX_BYTES), file)
    return pooling


def read_dimensions(folder: Path) -> tuple[int, ...]:
    """The sizes that the checkpoint's embeddings were trained to be cut to (Matryoshka, arXiv 2205.13147), ascending.

    They stand in config.json as `matryoshka_dimensions`, or are empty. Raises CheckpointError for any other value.
    """
    file = folder / CONFIG
    named = read_json(file, MAX_BYTES).get("matryoshka_dimensions") if file.exists() else None
    if named is None:
        return ()
    if not (isinstance(named, list) and named and all(type(size) is int and size > 0 for size in named)):
        raise CheckpointError(f"{file}: matryoshka_dimensions: expected a list of whole numbers above zero")
    return tuple(sorted(named))


def _fields(module: Any, file: Path) -> tuple[str, str]:
    """The last part of a module's type, and the name of its folder in the checkpoint."""
    kind, path = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
    if not (isinstance(kind, str) and isinstance(path, str) and path != ".." and "/" not in path.rstrip("/")):
        raise CheckpointError(f"{file}: expected modules with a type and a path inside the checkpoint; {REMEDY}")
    return kind.rpartition(".")[2], path.rstrip("/")


def _pooling(config: dict[str, Any], file: Path) -> Kind:
    prefix = "pooling_mode"
    named = config.get(prefix)
    asked = [named] if named is not None else [name.removeprefix(f"{prefix}_") for name in config
                                               if name.startswith(f"{prefix}_") and config[name] is True]  # fmt: skip
    if len(asked) != 1 or not isinstance(asked[0], str) or asked[0] not in KINDS:
        shown = ", ".join(map(str, asked))[:64] or "none"
        raise UnsupportedError(f"{file}: pooling {shown} is not supported, only lasttoken, mean and cls; {REMEDY}")
    return KINDS[asked[0]]
