"""Digests of everything that a result depends on besides its input.

A file that was made from a model under one identity does not fit a model with another.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import cast

from lmkit.config import Activations
from lmkit.devices import named
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.kernels.cpu import isa

PACKAGE = Path(__file__).parents[1]
SOURCES = (
    "codes.py",
    "scales.py",
    "qtensor.py",
    "kv_dtype.py",
    "attention_spec.py",
    "devices.py",
    "kernels/**/*.py",
    "kernels/cuda/csrc/*",
    "layers/**/*.py",
    "formats/*.py",
    "models/*.py",
)  # the sources that compute and pack


@dataclass(frozen=True)
class Packing:
    """How a checkpoint is loaded: everything besides the checkpoint and the machine that decides the packed weights."""

    device: str
    dtype: str  # of dense weights
    activations: str  # the result of `resolve_activations`
    lm_head: str
    rank: int = 0
    tp: int = 1  # ranks of tensor parallelism
    ep: int = 1  # ranks of expert parallelism
    quantize: str = "none"
    as_stored: bool = False  # each dense weight keeps its own dtype


def resolve_activations(asked: Activations, device: str) -> Activations:
    """auto means int8 on a CPU. On other devices each weight's format decides (layers.linear)."""
    return cast("Activations", named(device).activations) if asked == "auto" else asked


def checkpoint_identity(reader: CheckpointReader) -> str:
    """Hex digest of the weights, config.json and the sources that make a model from them."""
    return hashlib.sha256((reader.content_digest() + sources_digest(SOURCES)).encode()).hexdigest()


def packing_identity(packing: Packing) -> str:
    """Hex digest of how a checkpoint is loaded and of the layout that the machine's instruction set wants."""
    level = isa.host()
    return hashlib.sha256(f"{asdict(packing)} {level.layout or level.name}".encode()).hexdigest()


def how_computed(reader: CheckpointReader, packing: Packing) -> str:
    """The checkpoint's and the packing's identity as one string."""
    return checkpoint_identity(reader) + packing_identity(packing)


@cache
def sources_digest(patterns: tuple[str, ...]) -> str:
    """Hex digest of the code itself, which has no version number that could be forgotten. Every pattern must match a
    file, so that a rename cannot drop one."""
    digest, paths = hashlib.sha256(), []
    for pattern in patterns:
        matched = list(PACKAGE.glob(pattern))
        assert matched, f"no source file matches {pattern}"
        paths += matched
    for path in sorted(set(paths)):
        digest.update(path.read_bytes())
    return digest.hexdigest()
