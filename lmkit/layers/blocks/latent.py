"""Latent attention as a block: all heads share one row of the KV cache for each token. `layers.latent` computes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from lmkit.attention_spec import AttentionSpec
from lmkit.layers.blocks.base import Block, Heads, Pairs, Shape, check_limits, check_rope, check_split
from lmkit.layers.blocks.state import PagedKV
from lmkit.layers.rope_spec import RopeSpec

EPS = 1e-6  # of the norms inside latent attention, whatever config.json says of the others
LIMITS = {"num_heads": 1 << 12, "row_dim": 1 << 10}
UNSCALED, PLAIN = AttentionSpec(1.0), RopeSpec()
SCRATCH_BYTES = 256 << 20  # of a layer: expanded rows, of as many heads at a time as fit


@dataclass(frozen=True)
class LatentSpec(Block):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). The sizes are named as in config.json.

    A row has a key part that RoPE has turned, and a latent from which a linear, kv_b, makes the rest of each head's key
    and its value. The attention op sees one KV head, whose row is both key and value.
    """

    kv_lora_rank: int  # the latent
    qk_rope_head_dim: int
    qk_nope_head_dim: int  # the part of a query head that is not turned
    v_head_dim: int
    q_lora_rank: int = 0  # queries have a latent of their own; 0: they have none
    num_heads: int = 1
    attention: AttentionSpec = UNSCALED
    rope: RopeSpec = PLAIN
    attn_bias: bool = False  # on q_a and kv_a
    o_bias: bool = False

    @property
    def query_dim(self) -> int:
        """Width of a query head, as the linears make it."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def row_dim(self) -> int:
        """Width of a token's row in the KV cache."""
        return self.qk_rope_head_dim + self.kv_lora_rank

    @property
    def inputs(self) -> tuple[str, str]:
        """The roles of the linears that read the block's input."""
        return ("attn.q_a" if self.q_lora_rank else "attn.q"), "attn.kv_a"

    @property
    def out(self) -> str:
        return "attn.o"

    def linears(self, hidden: int) -> dict[str, Shape]:
        queries = self.num_heads * self.query_dim
        own = {"attn.q_a": (self.q_lora_rank, hidden), "attn.q_b": (queries, self.q_lora_rank)}
        shapes = own if self.q_lora_rank else {"attn.q": (queries, hidden)}
        return shapes | {"attn.kv_a": (self.row_dim, hidden), "attn.o": (hidden, self.num_heads * self.v_head_dim)}

    def vectors(self, hidden: int) -> dict[str, int]:
        return ({"attn.q_a_norm": self.q_lora_rank} if self.q_lora_rank else {}) | {"attn.kv_a_norm": self.kv_lora_rank}

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        """kv_b is no linear of the forward: attention multiplies with parts of it."""
        return {"attn.kv_b": (self.num_heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank)}

    @property
    def fused(self) -> tuple[tuple[str, ...], ...]:
        return (self.inputs,)

    def has_bias(self, role: str) -> bool:
        if role in ("attn.q", "attn.q_b", "attn.kv_b"):
            return False
        return self.o_bias if role == "attn.o" else self.attn_bias

    @property
    def rows_of_heads(self) -> dict[str, int]:
        queries = "attn.q_b" if self.q_lora_rank else "attn.q"
        return {queries: self.query_dim, "attn.kv_b": self.qk_nope_head_dim + self.v_head_dim}

    def smooth(self, norm: str) -> Pairs:
        return ((norm, self.inputs),) if norm else ()

    @property
    def state(self) -> PagedKV:
        return PagedKV(1, self.row_dim, True, None, self.attention.window, self.attention.sinks)

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, 1, self.row_dim)

    @property
    def rotary(self) -> RopeSpec:
        return self.rope

    @property
    def scores(self) -> AttentionSpec:
        return self.attention

    def products(self, context: float) -> float:
        return 2 * self.num_heads * self.row_dim * context

    @property
    def widest_product(self) -> int:
        return self.num_heads * self.row_dim + 2 * self.row_dim

    def inner_bytes(self, *, half: bool = False) -> int:
        queries = self.num_heads * self.row_dim
        if half:
            return 2 * (3 * queries + 2 * self.row_dim)
        return 4 * max(3 * queries + 4 * self.row_dim, 2 * self.widest_product)

    def prompt_bytes(self, length: int) -> int:
        """See layers.latent_cost: rows, and plain keys and values of each head."""
        return min(SCRATCH_BYTES, 2 * length * (self.row_dim + self.num_heads * (self.query_dim + self.v_head_dim)))

    def check(self) -> None:
        check_limits(self, LIMITS)
        check_rope(self.rope, self.row_dim)

    def share(self, rank: int, tp: int, ep: int) -> Self:
        """Each rank keeps all rows."""
        check_split(tp, self.num_heads, 1)
        return replace(self, num_heads=self.num_heads // tp)
