"""The models on this machine that lmkit knows of: the Hub's cache, and folders that it wrote or served. No torch."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmkit.config import environment
from lmkit.errors import LMKitError
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


def remember(folder: Path) -> None:
    """Let `models` find a folder. Nothing happens if the list cannot be written."""
    path = str(folder.resolve())
    if path == str(DEMO_FOLDER) or path in _remembered():
        return
    with contextlib.suppress(OSError):
        _list().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _list().open("a") as file:
            file.write(f"{path}\n")


def models() -> list[Model]:
    """All models that are there, those modified last first."""
    folders = {DEMO: DEMO_FOLDER, **_cached()} | {path: Path(path) for path in _remembered()}
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
        snapshots = sorted(repository.glob("snapshots/*/config.json"), key=lambda path: path.lstat().st_mtime)
        if snapshots:
            found[repository.name.removeprefix("models--").replace("--", "/", 1)] = snapshots[-1].parent
    return found


def _model(name: str, folder: Path) -> Model | None:
    """A checkpoint's facts, without its tensors. None if it is none, or not there any more."""
    try:
        config = read_json(folder / "config.json", 1 << 24)
        sizes = [path.stat().st_size for path in folder.glob(WEIGHTS)]
        modified = max(path.stat().st_mtime for path in folder.glob(WEIGHTS)) if sizes else 0.0
    except (OSError, LMKitError):
        return None
    entry = config.get("quantization_config")
    format, bits = _quantization(entry) if isinstance(entry, dict) else ("dense", _dtype_bits(config))
    return Model(name, str(folder), sum(sizes), format, bits, modified) if sizes else None


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
