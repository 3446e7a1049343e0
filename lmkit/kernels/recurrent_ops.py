"""Ops of recurrent blocks beside the gated delta rule. `rows` int32 [B, 6] has the states of each of B sequences:
lmkit.kernels.recurrent. T tokens in the step.
"""

from __future__ import annotations

from torch import Tensor

from lmkit.kernels.ops import BatchGeometry
from lmkit.kernels.recurrent import RecurrentStates
from lmkit.kernels.registry import op
from lmkit.kernels.short_conv import ConvWeights


@op
def short_conv(
    y: Tensor, weights: ConvWeights, states: RecurrentStates, rows: Tensor, geometry: BatchGeometry
) -> Tensor:
    """y float32 [T, 3 C] -> [T, C]. See kernels.short_conv."""
