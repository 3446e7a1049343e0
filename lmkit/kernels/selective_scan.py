"""What recurrent_ops.selective_scan takes: the recurrence of Mamba-2 (arXiv 2405.21060). H heads of P values, G groups
of N rows of a state, K taps; I = H P, C = I + 2 G N channels.

    y       z [I] | x [I] | B [G N] | C [G N] | dt [H]; on a GPU y and the result may have 16 bits

A causal convolution over the tokens of a sequence and SiLU replace x, B and C. Then, for each head h with state S, of
group h // (H / G):

    dt = clamp(softplus(dt + dt_bias), *limits)
    S = exp(-exp(a_log) dt) S + B (dt x)^T,  o = S^T C + d x
    result = o silu(z) over the root of its mean square in each of the G parts of I, times norm

The states are those of kernels.recurrent: conv [rows, C, K - 1], matrix [rows, H, N, P], drafted [slots, draft tokens,
C + H]: inputs of the convolution, dt of all heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lmkit.kernels.short_conv import ConvWeights


@dataclass(frozen=True)
class ScanWeights:
    """The small parameters of a layer, float32."""

    taps: ConvWeights  # of C channels
    a_log: Tensor  # [H]
    dt_bias: Tensor  # [H]
    d: Tensor  # [H]
    norm: Tensor  # [I]
    eps: float
    groups: int
    limits: tuple[float, float] = (0.0, float("inf"))
