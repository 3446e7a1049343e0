"""Ops of recurrent blocks beside the gated delta rule. `rows` int32 [B, 6] has the states of each of B sequences:
lmkit.kernels.recurrent. T tokens in the step.
"""

from __future__ import annotations

from torch import Tensor

from lmkit.kernels.ops import BatchGeometry
from lmkit.kernels.recurrent import RecurrentStates
from lmkit.kernels.registry import op
from lmkit.kernels.selective_scan import ScanWeights
from lmkit.kernels.short_conv import ConvWeights


@op
def short_conv(
    y: Tensor, weights: ConvWeights, states: RecurrentStates, rows: Tensor, geometry: BatchGeometry
) -> Tensor:
    """y float32 [T, 3 C] -> [T, C]. See kernels.short_conv."""


@op
def selective_scan(
    y: Tensor, weights: ScanWeights, states: RecurrentStates, rows: Tensor, geometry: BatchGeometry
) -> Tensor:
    """y float32 [T, 2 I + 2 G N + H] -> [T, I]. See kernels.selective_scan."""
