"""Which model a checkpoint is, wherever its folder lies. No torch here."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec

from lmkit.environment import environment
from lmkit.errors import JSON_ERRORS
from lmkit.formats.gguf_model import parts_of
from lmkit.private_folder import make_private

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


def content_digest(folder: Path) -> str:
    """SHA-256 of all files of a checkpoint: their names and whole contents. Digests of large files are kept beside the
    compiled kernels and are not computed again while size, times and place of the file stay. Raises OSError."""
    digest = hashlib.sha256()
    for path in _files(Path(folder)):
        digest.update(f"{path.name} {_file_digest(path)}\n".encode())
    return digest.hexdigest()


def _file_digest(path: Path) -> str:
    state = path.stat()
    seen = [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino, state.st_dev]
    kept = environment().cache_dir / "digests" / hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:32]
    if state.st_size > SAMPLE_BYTES:
        with suppress(OSError, *JSON_ERRORS):
            os.close(make_private(kept.parent))
            known = msgspec.json.decode(kept.read_bytes())
            if known[:-1] == seen:
                return str(known[-1])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if state.st_size > SAMPLE_BYTES:
        with suppress(OSError):
            partial = kept.with_suffix(f".{os.getpid()}")
            partial.write_bytes(msgspec.json.encode([*seen, digest]))
            partial.rename(kept)
    return digest


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
