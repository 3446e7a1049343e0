"""The parameters of attention that do not depend on the batch. No torch: a model's specification holds them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Growth:
    """A query at position p is multiplied with 1 + rate * ln(1 + floor((p + shift) / length)): scores stay as sharp
    among many keys as among few (arXiv 2501.19399)."""

    rate: float
    length: int  # positions before queries grow
    shift: int = 0


@dataclass(frozen=True)
class AttentionSpec:
    """Scores are q . k * scale. lmkit.kernels.ops.paged_attention has the formulas."""

    scale: float
    window: int = 0  # keys that a query sees, including its own; 0 = all
    sinks: int = 0  # first keys, which stay visible outside of the window
    softcap: float = 0.0  # c > 0: a score s becomes c * tanh(s / c) before masking; 0 = none
