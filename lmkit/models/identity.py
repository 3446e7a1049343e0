"""What a result depends on besides its input: files made from a model under one identity do not fit another."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from lmkit.config import Activations
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.kernels.cpu import isa

PACKAGE = Path(__file__).parents[1]
SOURCES = (
    "qtensor.py",
    "kernels/**/*.py",
    "kernels/cuda/csrc/*",
    "layers/*.py",
    "formats/*.py",
    "models/*.py",
)  # what computes and packs


@dataclass(frozen=True)
class Packing:
    """How a checkpoint is loaded: all that decides the packed weights besides the checkpoint and the machine."""

    device: str
    dtype: str  # of dense weights
    activations: str  # what `resolve_activations` says
    lm_head: str


def resolve_activations(asked: Activations, device: str) -> Activations:
    """auto is another word for int8 on a CPU; elsewhere each weight's format decides (layers.linear)."""
    return "int8" if asked == "auto" and device == "cpu" else asked


def checkpoint_identity(reader: CheckpointReader) -> str:
    """Hex digest of the weights, config.json and the sources that make a model of them."""
    return hashlib.sha256((reader.content_digest() + sources_digest(SOURCES)).encode()).hexdigest()


def packing_identity(packing: Packing) -> str:
    """Hex digest of how a checkpoint is loaded and of the machine's instruction set."""
    return hashlib.sha256(f"{asdict(packing)} {isa.host().name}".encode()).hexdigest()


def how_computed(reader: CheckpointReader, packing: Packing) -> str:
    """Both, as one word."""
    return checkpoint_identity(reader) + packing_identity(packing)


@cache
def sources_digest(patterns: tuple[str, ...]) -> str:
    """Of the code itself: it has no version number that could be forgotten. Every pattern matches a file, so that a
    rename cannot drop one."""
    digest, paths = hashlib.sha256(), []
    for pattern in patterns:
        matched = list(PACKAGE.glob(pattern))
        assert matched, f"no source file matches {pattern}"
        paths += matched
    for path in sorted(set(paths)):
        digest.update(path.read_bytes())
    return digest.hexdigest()
