"""Latent attention as data. No torch: a layer's specification holds one."""

from __future__ import annotations

from dataclasses import dataclass

EPS = 1e-6  # of the norms inside latent attention, whatever config.json says of the others


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). The sizes are named as in config.json.

    All heads share one row of the KV cache for each token: a key part that RoPE has turned, and a latent from which a
    linear, kv_b, makes the rest of each head's key and its value.
    """

    kv_lora_rank: int  # the latent
    qk_rope_head_dim: int
    qk_nope_head_dim: int  # the part of a query head that is not turned
    v_head_dim: int
    q_lora_rank: int = 0  # queries have a latent of their own; 0: they have none

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

    def linears(self, hidden: int, heads: int) -> dict[str, tuple[int, int]]:
        """Shapes [out, in] of the linears of attention, by role."""
        queries = heads * self.query_dim
        own = {"attn.q_a": (self.q_lora_rank, hidden), "attn.q_b": (queries, self.q_lora_rank)}
        shapes = own if self.q_lora_rank else {"attn.q": (queries, hidden)}
        return shapes | {"attn.kv_a": (self.row_dim, hidden), "attn.o": (hidden, heads * self.v_head_dim)}

    @property
    def rows_of_heads(self) -> dict[str, int]:
        """Rows of a head in the weights that have some for each head, by role."""
        queries = "attn.q_b" if self.q_lora_rank else "attn.q"
        return {queries: self.query_dim, "attn.kv_b": self.qk_nope_head_dim + self.v_head_dim}

    def matrices(self, heads: int) -> dict[str, tuple[int, int]]:
        """The shape of kv_b. It is no linear of the forward: attention multiplies with parts of it."""
        return {"attn.kv_b": (heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank)}

    @property
    def vectors(self) -> dict[str, int]:
        """Sizes of the norms' weights, by role."""
        return ({"attn.q_a_norm": self.q_lora_rank} if self.q_lora_rank else {}) | {"attn.kv_a_norm": self.kv_lora_rank}
