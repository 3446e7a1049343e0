"""What attention computes, whatever the batch. No torch: a model's description holds it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionSpec:
    """Scores are q . k * scale. lmkit.kernels.ops.paged_attention has the formulas."""

    scale: float
    window: int = 0  # keys that a query sees, itself included; 0 = all
    sinks: int = 0  # first keys, which a window leaves visible
    softcap: float = 0.0  # c > 0: a score s becomes c * tanh(s / c) before masking; 0 = none
