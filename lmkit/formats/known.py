"""The models on this machine that lmkit knows of: the Hub's cache, folders and files that it wrote or served, and GGUF
files of the current folder. No torch."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from lmkit.environment import environment
from lmkit.errors import LMKitError
from lmkit.formats.gguf_file import storage_bits
from lmkit.formats.gguf_model import BESIDE, SUFFIX, GgufModel, parts_of
from lmkit.formats.hub import DEMO, DEMO_FOLDER, WEIGHTS
from lmkit.jsonfile import read_json

_DTYPE_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}


@dataclass(frozen=True)
class Model:
    """A checkpoint. `name` is what `lmkit serve` takes."""

    name: str
    path: str
    num_bytes: int  # of the weights
    format: str
    bits: float | None  # of a weight, as config.json has it; None if it does not say
    modified: float  # seconds since 1970

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def remember(model: Path) -> None:
    """Let `models` find a folder, or a GGUF file. Nothing happens if the list cannot be written."""
    path = str(model.resolve())
    if path == str(DEMO_FOLDER) or path in _remembered():
        return
    with contextlib.suppress(OSError):
        _list().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _list().open("a") as file:
            file.write(f"{path}\n")


def models() -> list[Model]:
    """All models that are there, those modified last first."""
    folders = {DEMO: DEMO_FOLDER, **_cached()} | {path: Path(path) for path in _remembered()}
    files = {str(file): file for folder in (Path(), *folders.values()) for file in _gguf_files(folder)}
    known = {path.resolve() for path in folders.values()}
    folders |= {name: file for name, file in files.items() if file.resolve() not in known}
    found = [model for name, folder in folders.items() if (model := _model(name, folder)) is not None]
    return sorted(found, key=lambda model: model.modified, reverse=True)


def _list() -> Path:
    return environment().state_dir / "models"


def _remembered() -> list[str]:
    try:
        return _list().read_text(errors="replace").splitlines()
    except OSError:
        return []


def _cached() -> dict[str, Path]:
    """Name -> newest snapshot of every model in the Hub's cache, which lmkit reads only if its library is there."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return {}
    found = {}
    for repository in Path(constants.HF_HUB_CACHE).glob("models--*"):
        snapshots = [*repository.glob("snapshots/*/config.json"), *repository.glob(f"snapshots/*/*{SUFFIX}")]
        if snapshots:
            newest = max(snapshots, key=lambda path: path.lstat().st_mtime)
            found[repository.name.removeprefix("models--").replace("--", "/", 1)] = newest.parent
    return found


def _gguf_files(folder: Path) -> list[Path]:
    """The first file of each GGUF model in a folder."""
    try:
        files = [file for file in folder.iterdir() if file.suffix == SUFFIX and not file.name.startswith(BESIDE)]
    except OSError:
        return []
    return sorted({parts_of(file)[0] for file in files})


def _model(name: str, folder: Path) -> Model | None:
    """A checkpoint's facts, without its tensors. None if it is none, or not there any more."""
    if folder.suffix == SUFFIX and folder.is_file():
        return _gguf_model(name, folder)
    try:
        config = read_json(folder / "config.json", 1 << 24)
        sizes = [path.stat().st_size for path in folder.glob(WEIGHTS)]
        modified = max(path.stat().st_mtime for path in folder.glob(WEIGHTS)) if sizes else 0.0
    except (OSError, LMKitError):
        return None
    entry = config.get("quantization_config")
    format, bits = _quantization(entry) if isinstance(entry, dict) else ("dense", _dtype_bits(config))
    return Model(name, str(folder), sum(sizes), format, bits, modified) if sizes else None


def _gguf_model(name: str, path: Path) -> Model | None:
    try:
        model = GgufModel(path)
        sizes = [file.path.stat().st_size for file in model.files]
        modified = path.stat().st_mtime
    except (OSError, LMKitError):
        return None
    weights = Counter[str]()
    for info in model.tensors.values():
        weights[info.storage.name] += prod(info.shape) if len(info.shape) > 1 else 0
    most = weights.most_common(1)
    return Model(name, str(path), sum(sizes), "gguf", storage_bits(most[0][0]) if most else None, modified)


def _quantization(entry: dict[str, Any]) -> tuple[str, int | None]:
    format = str(entry.get("quant_method", "?"))
    candidates = [entry.get("bits"), entry.get("w_bit"), 8 if format == "fp8" else None]
    groups = entry.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        candidates.append(weights.get("num_bits") if isinstance(weights, dict) else None)
    return format, next((bits for bits in candidates if isinstance(bits, int)), None)


def _dtype_bits(config: dict[str, Any]) -> int | None:
    return _DTYPE_BITS.get(str(config.get("dtype", config.get("torch_dtype"))))
