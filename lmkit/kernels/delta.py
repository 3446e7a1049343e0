"""What ops.gated_delta takes. On a GPU y and the result may have 16 bits. The rows of a token in y and gates
have, with g = Hv / Hk value heads for a key head:

    y       for each key head: q [Dk] | k [Dk] | v [g Dv] | z [g Dv]      if `flat`, q of all heads, then k, v, z
    gates   for each key head: b [g] | a [g]                              if `flat`, b of all heads, then a [Hv, D]

A causal convolution over the tokens of a sequence and SiLU replace q, k and v. Then, for each value head with state S:

    q = q / |q| / sqrt(Dk), k = k / |k|, beta = rate sigmoid(b), decay = exp(-exp(a_log) softplus(a + dt_bias))
    S = decay S,  S = S + k (beta (v - S^T k))^T,  o = S^T q
    result = rms_norm(o) * norm * silu(z)

A head has one decay, or, if `flat`, one for each of the Dk rows of its state (Kimi Delta Attention, arXiv 2510.26692):
D = 1 or Dk. With a `floor` below 0, decay = exp(floor sigmoid(exp(a_log) (a + dt_bias))).

The states are those of kernels.recurrent: matrix [rows, Hv, Dk, Dv], drafted [slots, draft tokens, C + (1 + D) Hv]:
inputs of the convolution, b of all heads, a of all heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lmkit.kernels.recurrent import RecurrentStates


@dataclass(frozen=True)
class DeltaWeights:
    """The small parameters of a layer, float32."""

    conv: Tensor  # [C, kernel]; channels: q of all heads, k of all heads, v of all heads
    a_log: Tensor  # [Hv]
    dt_bias: Tensor  # [Hv D]
    norm: Tensor  # [Dv]
    eps: float
    flat: bool = False
    rate: float = 1.0  # 2: a state may be reflected, not only forgotten (arXiv 2411.12537)
    floor: float = 0.0  # of the logarithm of a decay; 0 = there is none
    sigmoid: bool = False  # the result is gated with sigmoid(z)

    @property
    def decays(self) -> int:
        """D: how many a head has."""
        return self.dt_bias.numel() // self.a_log.numel()


def heads_of(states: RecurrentStates) -> tuple[int, int, int, int]:
    """(Hk, Hv, Dk, Dv)"""
    _, value_heads, key_dim, value_dim = states.matrix.shape
    return (states.conv.shape[1] - value_heads * value_dim) // (2 * key_dim), value_heads, key_dim, value_dim
