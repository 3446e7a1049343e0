"""Attention over keys and values of each head as a block: queries, keys and values, one output linear."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from lmkit.attention_spec import AttentionSpec, Growth
from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.layers.blocks.base import Block, Heads, Pairs, Shape, check_limits, check_rope, check_split
from lmkit.layers.blocks.state import PagedKV
from lmkit.layers.rope_spec import RopeSpec

LIMITS = {"num_heads": 1 << 12, "num_kv_heads": 1 << 12, "head_dim": 1 << 10}
QKV = ("attn.q", "attn.k", "attn.v")


@dataclass(frozen=True)
class SelfAttentionSpec(Block):
    """Each of `num_kv_heads` heads of keys and values serves `num_heads / num_kv_heads` neighbouring query heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention: AttentionSpec
    rope: RopeSpec
    attn_bias: bool = False  # on q, k and v
    unbiased_keys: bool = False  # attn_bias is not on k
    o_bias: bool = False
    has_sinks: bool = False  # a learned score for each head of a key whose value is 0: ops.paged_attention
    qk_norm: bool = False  # RMSNorm over head_dim on q and k, before RoPE
    late_qk_norm: bool = False  # qk_norm stands after RoPE
    joint_qk_norm: bool = False  # the norm of q is over all heads together, and so is that of k
    unit_qk_norm: bool = False  # as qk_norm, without factors. It may stand after RoPE as well, which keeps lengths
    gated: bool = False  # the output of attention is multiplied with the sigmoid of one more linear, attn.gate
    growth: Growth | None = None  # queries grow with their position
    value_norm: bool = False  # RMSNorm over head_dim on v, without a factor
    key_is_value: bool = False  # v is k before its norm and RoPE: there is no attn.v
    kv_from: int | None = None  # the layer whose keys and values this one reads; it has none of its own
    value_dim: int | None = None  # of a head of v; None = head_dim. Values are stored with zeros up to head_dim

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def v_dim(self) -> int:
        """Width of a head of v."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def v_size(self) -> int:
        """Width of all heads of v."""
        return self.num_kv_heads * self.v_dim

    @property
    def inputs(self) -> tuple[str, ...]:
        """The roles of the linears that read the block's input."""
        if self.kv_from is not None:
            return QKV[:1]
        if self.key_is_value:
            return QKV[:2]
        return (*QKV, "attn.gate") if self.gated else QKV

    @property
    def out(self) -> str:
        return "attn.o"

    def linears(self, hidden: int) -> dict[str, Shape]:
        q, kv = self.q_size, self.kv_size
        every = {
            "attn.q": (q, hidden),
            "attn.k": (kv, hidden),
            "attn.v": (self.v_size, hidden),
            "attn.gate": (q, hidden),
        }
        return {role: every[role] for role in self.inputs} | {"attn.o": (hidden, self.num_heads * self.v_dim)}

    def vectors(self, hidden: int) -> dict[str, int]:
        sizes: dict[str, int] = {}
        if self.qk_norm:
            q, k = (self.q_size, self.kv_size) if self.joint_qk_norm else (self.head_dim, self.head_dim)
            sizes = {"attn.q_norm": q} | ({"attn.k_norm": k} if self.kv_from is None else {})
        return sizes | ({"attn.sinks": self.num_heads} if self.has_sinks else {})

    @property
    def fused(self) -> tuple[tuple[str, ...], ...]:
        return (self.inputs,)

    def has_bias(self, role: str) -> bool:
        if role == "attn.o":
            return self.o_bias
        return self.attn_bias and not (self.unbiased_keys and role == "attn.k")

    @property
    def rows_of_heads(self) -> dict[str, int]:
        return dict.fromkeys((*QKV, "attn.gate"), self.head_dim) | {"attn.v": self.v_dim}

    @property
    def row_groups(self) -> dict[str, int]:
        """For each head: q, gate."""
        return dict.fromkeys(("attn.q", "attn.gate"), self.num_heads) if self.gated else {}

    @property
    def pair_order(self) -> tuple[int, ...]:
        if not self.rope.interleaved:
            return ()
        size = self.rope.rotary_dim
        return (*range(0, size, 2), *range(1, size, 2), *range(size, self.head_dim))

    def smooth(self, norm: str) -> Pairs:
        before = ((norm, self.inputs),) if norm else ()
        values = () if self.value_norm else (("attn.v", ("attn.o",)),)  # a norm in between would undo a scale
        return (*before, *values)

    @property
    def state(self) -> PagedKV:
        attention = self.attention
        return PagedKV(self.num_kv_heads, self.head_dim, False, self.kv_from, attention.window, attention.sinks)

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def rotary(self) -> RopeSpec:
        return self.rope

    @property
    def scores(self) -> AttentionSpec:
        return self.attention

    @property
    def in_order(self) -> bool:
        return True

    def products(self, context: float) -> float:
        """Each token sees `context` keys, or fewer with a window: scores and values."""
        seen = min(context, self.attention.window + self.attention.sinks) if self.attention.window else context
        return 2 * self.q_size * seen

    @property
    def widest_product(self) -> int:
        return self.q_size * (2 if self.gated else 1) + 2 * self.kv_size

    def inner_bytes(self, *, half: bool = False) -> int:
        if half:
            return 2 * (3 * self.q_size + 2 * self.kv_size)
        return 4 * max(3 * self.q_size + 4 * self.kv_size, 2 * self.widest_product)

    def check(self) -> None:
        check_limits(self, LIMITS)
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"config.json: {self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads evenly"
            )
        check_rope(self.rope, self.head_dim)
        if not 1 <= self.v_dim <= self.head_dim:
            raise CheckpointError(f"config.json: v_head_dim {self.v_dim} is not in 1 .. head_dim {self.head_dim}")
        if self.growth is not None and not 1 <= self.growth.length < 1 << 31:
            raise CheckpointError(f"config.json: queries that grow by {self.growth} cannot be")

    def share(self, rank: int, tp: int, ep: int) -> Self:
        if tp == 1:
            return self
        check_split(tp, self.num_heads, self.num_kv_heads)
        if self.joint_qk_norm:
            raise UnsupportedError(f"tp={tp}: this model normalizes all heads together; use tp=1")
        return replace(self, num_heads=self.num_heads // tp, num_kv_heads=max(1, self.num_kv_heads // tp))


def fitted_kv(blocks: Iterable[Block]) -> SelfAttentionSpec | None:
    """The block that has keys and values of its own to which a transform can be fitted (quant.kv.fit)."""
    every = (part for block in blocks for part in block.members)
    own = (part for part in every if isinstance(part, SelfAttentionSpec) and part.kv_from is None)
    return next((part for part in own if part.v_dim == part.head_dim), None)
