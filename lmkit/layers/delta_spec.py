"""Gated delta-rule linear attention as data. No torch: a layer's specification holds one."""

from __future__ import annotations

from dataclasses import dataclass

from lmkit.layers.blocks.state import Recurrent


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

    flat: bool = False  # heads lie in one tensor for each part, as in Qwen3.5, not all parts for each key head

    @property
    def inputs(self) -> tuple[str, ...]:
        """The roles of the linears that read the block's input and give queries, keys, values and output gates."""
        return ("attn.qkv", "attn.z") if self.flat else ("attn.qkvz",)

    @property
    def gates(self) -> tuple[str, ...]:
        """The roles of those that give how much of a state changes, and how much decays. They are small."""
        return ("attn.b", "attn.a") if self.flat else ("attn.ba",)

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Shapes [out, in] of the block's linears, by role."""
        values = self.num_value_heads * self.value_dim
        sizes = (self.channels, values) if self.flat else (self.channels + values,)
        small = dict.fromkeys(self.gates, (2 * self.num_value_heads // len(self.gates), hidden))
        wide = {role: (size, hidden) for role, size in zip(self.inputs, sizes, strict=True)}
        return wide | small | {"attn.o": (hidden, values)}

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
    def gpu_bytes(self) -> int:
        """Bytes of a token on a GPU: what the linears give, channels behind the convolution, gates before and after
        their functions, and the results of the states and of the block."""
        values = self.num_value_heads * self.value_dim
        return 2 * (self.channels + values) + 4 * (self.channels + 4 * self.num_value_heads) + (4 + 2) * values

    @property
    def state(self) -> Recurrent:
        """The last inputs of the convolution, and a matrix for each value head. A draft token keeps its inputs of the
        convolution and its gates."""
        matrix = self.num_value_heads, self.key_dim, self.value_dim
        return Recurrent((self.channels, self.kernel - 1), matrix, self.channels + 2 * self.num_value_heads)
