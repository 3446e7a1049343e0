"""The processes of one quantization."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Comm:
    """One process alone."""

    rank: int = 0
    world_size: int = 1
