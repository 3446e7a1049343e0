"""Linear attention by the gated delta rule as a block. `layers.delta` computes it, `kernels.delta` has the formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from lmkit.errors import CheckpointError
from lmkit.layers.blocks.base import Block, Pairs, Shape, ValueHeads, check_limits
from lmkit.layers.blocks.state import Recurrent

QKV, CONVS = ("attn.q", "attn.k", "attn.v"), ("attn.q_conv", "attn.k_conv", "attn.v_conv")
# Linears of the block's input to few numbers, and from these to the decays and to the output gates.
LOW, HIGH = ("attn.a_low", "attn.z_low"), ("attn.a", "attn.z")

LIMITS = dict.fromkeys(("num_key_heads", "num_value_heads", "key_dim", "value_dim"), 1 << 12) | {"kernel": 1 << 6}


@dataclass(frozen=True)
class DeltaSpec(Block):
    """One state for a sequence in place of keys and values (Gated DeltaNet, arXiv 2412.06464).

    Each key head serves `num_value_heads / num_key_heads` neighbouring value heads.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int
    kernel: int  # tokens that the causal convolution sees
    flat: bool = False  # heads lie in one tensor for each part, as in Qwen3.5, not all parts for each key head
    apart: bool = False  # flat, and q, k and v have a linear and a convolution each
    rate: float = 1.0  # what a state changes at most, see kernels.delta
    norm_eps: float | None = None  # of the norm inside; None = that of the layer
    by_row: bool = False  # each row of a state decays by itself (Kimi Delta Attention, arXiv 2510.26692); apart
    floor: float = 0.0  # of the logarithm of such a decay; 0 = there is none
    rank: int = 0  # decays and output gates come from two linears each, through so few numbers; 0 = from one

    @property
    def inputs(self) -> tuple[str, ...]:
        """The roles of the linears that read the block's input and give queries, keys, values and output gates."""
        if self.apart:
            return (*QKV, "attn.z") if not self.rank else QKV
        return ("attn.qkv", "attn.z") if self.flat else ("attn.qkvz",)

    @property
    def gates(self) -> tuple[str, ...]:
        """The roles of those that give how much of a state changes, and how much decays. They are small."""
        if self.rank:
            return ("attn.b", *LOW)
        return ("attn.b", "attn.a") if self.flat else ("attn.ba",)

    @property
    def decays(self) -> int:
        """Decays of a head."""
        return self.key_dim if self.by_row else 1

    @property
    def num_keys(self) -> int:
        """Width of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_keys + self.num_values

    @property
    def num_values(self) -> int:
        """Width of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def out(self) -> str:
        return "attn.o"

    def linears(self, hidden: int) -> dict[str, Shape]:
        keys, values, heads = self.num_keys, self.num_values, self.num_value_heads
        parts = {"attn.q": keys, "attn.k": keys, "attn.v": values, "attn.z": values, "attn.qkv": 2 * keys + values}
        parts |= {"attn.qkvz": 2 * keys + 2 * values, "attn.ba": 2 * heads, "attn.b": heads}
        parts |= {"attn.a": heads * self.decays} | dict.fromkeys(LOW, self.rank)
        shapes = {role: (parts[role], hidden) for role in self.inputs + self.gates}
        shapes |= {role: (parts[role], self.rank) for role in HIGH} if self.rank else {}
        return shapes | {"attn.o": (hidden, values)}

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        sizes = {"attn.conv": self.channels}
        if self.apart:
            sizes = dict(zip(CONVS, (self.num_keys, self.num_keys, self.num_values), strict=True))
        return {
            **{role: (size, 1, self.kernel) for role, size in sizes.items()},
            "attn.a_log": (self.num_value_heads,),
            "attn.dt_bias": (self.num_value_heads * self.decays,),
            "attn.delta_norm": (self.value_dim,),
        }

    @property
    def fused(self) -> tuple[tuple[str, ...], ...]:
        return (self.inputs + self.gates,)

    @property
    def unrounded(self) -> tuple[str, ...]:
        return self.gates + HIGH if self.rank else self.gates

    @property
    def row_groups(self) -> dict[str, int]:
        """For each key head: b, a."""
        return dict.fromkeys(self.gates, self.num_key_heads) if self.flat and not self.apart else {}

    @property
    def value_heads(self) -> Mapping[str, ValueHeads]:
        groups, dim, keys = self.num_key_heads, self.value_dim, 2 * self.num_keys
        numbers = dict.fromkeys(("attn.b", "attn.a", "attn.a_log", "attn.dt_bias"), ValueHeads(groups, 1))
        values = dict.fromkeys(("attn.qkv", "attn.conv"), ValueHeads(groups, dim, keys))
        return numbers | values | {"attn.z": ValueHeads(groups, dim), "attn.o": ValueHeads(groups, dim, inputs=True)}

    @property
    def gguf_names(self) -> Mapping[str, str]:
        if not self.by_row:
            return {"attn.o": "ssm_out"}
        end = "b" if self.rank else "a"
        return {"attn.a": f"ssm_f_{end}", "attn.z": f"ssm_g_{end}"}

    def smooth(self, norm: str) -> Pairs:
        return ((norm, self.inputs + self.gates),) if norm else ()

    @property
    def state(self) -> Recurrent:
        """The last inputs of the convolution, and a matrix for each value head. A draft token keeps its inputs of the
        convolution and its gates."""
        matrix = self.num_value_heads, self.key_dim, self.value_dim
        drafted = self.channels + (1 + self.decays) * self.num_value_heads
        return Recurrent((self.channels, self.kernel - 1), matrix, drafted)

    def products(self, context: float) -> float:
        """Three products with each matrix, whatever the context is."""
        return 3 * self.num_value_heads * self.key_dim * self.value_dim

    @property
    def widest_product(self) -> int:
        return self.channels + self.num_values

    def inner_bytes(self, *, half: bool = False) -> int:
        """What the linears give, channels after the convolution, gates before and after their functions, and the
        results of the states and of the block."""
        channels, values, heads = self.channels, self.num_values, self.num_value_heads * (1 + self.decays) // 2
        if half:
            return 2 * (channels + values) + 4 * (channels + 4 * heads) + (4 + 2) * values
        return 4 * (2 * self.widest_product + 4 * heads)

    def check(self) -> None:
        check_limits(self, LIMITS, "linear attention: ")
        if self.num_value_heads % self.num_key_heads:
            raise CheckpointError(f"config.json: {self.num_key_heads} key heads cannot serve {self.num_value_heads}")

    def share(self, rank: int, tp: int, ep: int) -> Self:
        """Each rank computes all of it."""
        return self
