"""Gated delta-rule linear attention as data. No torch: a layer's specification holds one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeltaSpec:
    """A layer that keeps one state for a sequence in place of keys and values (Gated DeltaNet, arXiv 2412.06464).

    Each key head serves `num_value_heads / num_key_heads` neighbouring value heads.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int
    kernel: int  # tokens that the causal convolution sees

    inputs = ("attn.qkvz", "attn.ba")  # the roles of the linears that read the block's input

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Shapes [out, in] of the block's linears, by role."""
        values = self.num_value_heads * self.value_dim
        return {
            "attn.qkvz": (self.channels + values, hidden),
            "attn.ba": (2 * self.num_value_heads, hidden),
            "attn.o": (hidden, values),
        }

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the small parameters, which are never quantized, by role."""
        return {
            "attn.conv": (self.channels, 1, self.kernel),
            "attn.a_log": (self.num_value_heads,),
            "attn.dt_bias": (self.num_value_heads,),
            "attn.delta_norm": (self.value_dim,),
        }

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's state, float32: last inputs of the convolution, and a matrix for each value head."""
        window = self.channels * (self.kernel - 1)
        return 4 * (window + self.num_value_heads * self.key_dim * self.value_dim)
