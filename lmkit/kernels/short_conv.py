"""What recurrent_ops.short_conv takes: the gated short convolution of LFM2 (arXiv 2511.23404). K is the number of taps.

    y       b [C] | g [C] | x [C]; on a GPU y and the result may have 16 bits
    u       b * x
    result  g * (bias + sum over j of conv[:, j] * u of the token K - 1 - j before)

The states are those of kernels.recurrent: conv [rows, C, K - 1] has the last u, and no matrix has elements. A draft
token keeps its u [C].
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ConvWeights:
    """The taps of each channel, float32."""

    conv: Tensor  # [C, K]
    bias: Tensor | None = None  # [C]
