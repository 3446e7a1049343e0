"""Which model a checkpoint is, wherever its folder lies. No torch here."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from lmkit.formats.gguf_model import parts_of

SAMPLE_BYTES = 1 << 20
_FILES = (".json", ".safetensors", ".gguf", ".jinja", ".model", ".txt")


@cache
def fingerprint(folder: Path) -> str:
    """A digest of a checkpoint's files: names, sizes, and the beginning and end of each. It reads no whole weights.

    If the files are gone, it is a digest of the folder's name.
    """
    digest = hashlib.sha256()
    try:
        for path in _files(Path(folder)):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                digest.update(file.read(SAMPLE_BYTES))
                if size > SAMPLE_BYTES:
                    file.seek(-min(SAMPLE_BYTES, size - SAMPLE_BYTES), 2)
                    digest.update(file.read())
    except OSError:
        digest = hashlib.sha256(str(folder).encode())
    return digest.hexdigest()[:32]


def _files(checkpoint: Path) -> list[Path]:
    """The files of a folder, or of a model in GGUF."""
    if checkpoint.is_file():
        return parts_of(checkpoint)
    return sorted(path for path in checkpoint.iterdir() if path.suffix in _FILES)


def files_digest(model: Path, adapter: str | Path | None) -> str:
    """`fingerprint` of a checkpoint, or of a checkpoint with an adapter's folder."""
    if adapter is None:
        return fingerprint(model)
    return hashlib.sha256(f"{fingerprint(model)} {fingerprint(Path(adapter))}".encode()).hexdigest()[:32]
