"""What ops.gated_delta takes. On a GPU y and the result may have 16 bits. The rows of a token in y and gates
have, with g = Hv / Hk value heads for a key head:

    y       for each key head: q [Dk] | k [Dk] | v [g Dv] | z [g Dv]      if `flat`, q of all heads, then k, v, z
    gates   for each key head: b [g] | a [g]                              if `flat`, b of all heads, then a

A causal convolution over the tokens of a sequence and SiLU replace q, k and v. Then, for each value head with state S:

    q = q / |q| / sqrt(Dk), k = k / |k|, beta = sigmoid(b), decay = exp(-exp(a_log) softplus(a + dt_bias))
    S = decay S,  S = S + k (beta (v - S^T k))^T,  o = S^T q
    result = rms_norm(o) * norm * silu(z)

Tokens are taken one after the other, so a result does not depend on how a sequence is cut into steps.

`rows` int32 [B, 6] has for each sequence:

    its row of the states; on a GPU -1 = a sequence that pads the step, and whose results mean nothing
    the row that its tokens go on from: another one if it begins with a snapshot, -1 if it begins with zeros
    the row that gets a snapshot, -1 = none
    the number of tokens before the snapshot
    the draft tokens of the step before that are taken first
    the draft tokens at the end of its tokens

It is not known yet whether drafts are accepted. Their results are computed, but the state of the sequence stays that in
front of them, and what they give to it is kept (`DeltaStates.drafted`). The next step says how many of them were right.
It takes these first, and their results are not computed again.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

ROW_FIELDS = 6  # of `rows`


@dataclass(frozen=True)
class DeltaWeights:
    """The small parameters of a layer, float32."""

    conv: Tensor  # [C, kernel]; channels: q of all heads, k of all heads, v of all heads
    a_log: Tensor  # [Hv]
    dt_bias: Tensor  # [Hv]
    norm: Tensor  # [Dv]
    eps: float
    flat: bool = False


@dataclass(frozen=True)
class DeltaStates:
    """The states of a layer, float32: a row for each slot, then those of snapshots. Only slots have draft tokens."""

    conv: Tensor  # [rows, C, kernel - 1]: the last inputs of the convolution, the oldest first
    matrix: Tensor  # [rows, Hv, Dk, Dv]
    drafted: Tensor  # [slots, draft tokens, C + 2 Hv]: inputs of the convolution, b of all heads, a of all heads

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """What a state is."""
        return self.conv, self.matrix

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """(Hk, Hv, Dk, Dv)"""
        _, value_heads, key_dim, value_dim = self.matrix.shape
        return (self.conv.shape[1] - value_heads * value_dim) // (2 * key_dim), value_heads, key_dim, value_dim
