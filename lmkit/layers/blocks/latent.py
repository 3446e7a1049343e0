"""Latent attention as a block: all heads share one row of the KV cache for each token. `layers.latent` computes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from lmkit.attention_spec import AttentionSpec
from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.layers.blocks.base import Block, Heads, Pairs, Shape, check_limits, check_rope, check_split
from lmkit.layers.blocks.state import PagedKV
from lmkit.layers.rope_spec import RopeSpec

EPS = 1e-6  # of the norms inside latent attention, whatever config.json says of the others
LIMITS = {"num_heads": 1 << 12, "row_dim": 1 << 10}
INDEX_LIMITS = {"num_heads": 1 << 10, "head_dim": 1 << 10, "top_k": 1 << 20}
UNSCALED, PLAIN = AttentionSpec(1.0), RopeSpec()
SCRATCH_BYTES = 256 << 20  # of a layer: expanded rows, of as many heads at a time as fit


@dataclass(frozen=True)
class IndexerSpec:
    """What chooses the keys that a query sees (DeepSeek-V3.2, arXiv 2512.02556; layers.sparse_latent). Each token has
    one key more, which meets queries of several small heads."""

    num_heads: int
    head_dim: int
    top_k: int  # keys that a query sees at most
    interleaved: bool = False  # pairs that RoPE turns are neighbours
    shared: bool = False  # there is none of this layer's own: it sees what the last one before it has chosen


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
    indexer: IndexerSpec | None = None  # None: queries see all keys
    gated: bool = False  # each head's output is multiplied by the sigmoid of one number

    @property
    def query_dim(self) -> int:
        """Width of a query head, as the linears make it."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def row_dim(self) -> int:
        """Width of a token's row in the KV cache."""
        return self.qk_rope_head_dim + self.kv_lora_rank

    @property
    def own_indexer(self) -> IndexerSpec | None:
        """The indexer, if its weights are this layer's."""
        return None if self.indexer is None or self.indexer.shared else self.indexer

    @property
    def inputs(self) -> tuple[str, ...]:
        """The roles of the linears that read the block's input."""
        index = ("attn.index_k", "attn.index_weights") if self.own_indexer else ()
        gate = ("attn.gate",) if self.gated else ()
        return ("attn.q_a" if self.q_lora_rank else "attn.q"), "attn.kv_a", *index, *gate

    @property
    def query_inputs(self) -> tuple[str, ...]:
        """The roles of the linears that read the latent of queries."""
        if not self.q_lora_rank:
            return ()
        return ("attn.q_b", "attn.index_q") if self.own_indexer else ("attn.q_b",)

    @property
    def out(self) -> str:
        return "attn.o"

    def linears(self, hidden: int) -> dict[str, Shape]:
        queries = self.num_heads * self.query_dim
        own = {"attn.q_a": (self.q_lora_rank, hidden), "attn.q_b": (queries, self.q_lora_rank)}
        shapes = own if self.q_lora_rank else {"attn.q": (queries, hidden)}
        shapes |= {"attn.kv_a": (self.row_dim, hidden), "attn.o": (hidden, self.num_heads * self.v_head_dim)}
        if (index := self.own_indexer) is not None:
            shapes |= {"attn.index_q": (index.num_heads * index.head_dim, self.q_lora_rank)}
            shapes |= {"attn.index_k": (index.head_dim, hidden), "attn.index_weights": (index.num_heads, hidden)}
        return shapes | ({"attn.gate": (self.num_heads, hidden)} if self.gated else {})

    def vectors(self, hidden: int) -> dict[str, int]:
        sizes = {"attn.kv_a_norm": self.kv_lora_rank}
        if self.q_lora_rank:
            sizes = {"attn.q_a_norm": self.q_lora_rank} | sizes
        if (index := self.own_indexer) is not None:
            sizes |= {"attn.index_k_norm": index.head_dim, "attn.index_k_norm.bias": index.head_dim}
        return sizes

    @property
    def unrounded(self) -> tuple[str, ...]:
        """An indexer is small, and decides what is seen. A gate has a number for each head."""
        index = ("attn.index_q", "attn.index_k", "attn.index_weights") if self.own_indexer else ()
        return (*index, "attn.gate") if self.gated else index

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        """kv_b is no linear of the forward: attention multiplies with parts of it."""
        return {"attn.kv_b": (self.num_heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank)}

    @property
    def fused(self) -> tuple[tuple[str, ...], ...]:
        return (self.inputs,) if len(self.query_inputs) < 2 else (self.inputs, self.query_inputs)

    def has_bias(self, role: str) -> bool:
        if role in ("attn.q", "attn.q_b", "attn.kv_b", *self.unrounded):
            return False
        return self.o_bias if role == "attn.o" else self.attn_bias

    @property
    def rows_of_heads(self) -> dict[str, int]:
        queries = "attn.q_b" if self.q_lora_rank else "attn.q"
        return {queries: self.query_dim, "attn.kv_b": self.qk_nope_head_dim + self.v_head_dim, "attn.gate": 1}

    def smooth(self, norm: str) -> Pairs:
        return ((norm, self.inputs),) if norm else ()

    @property
    def state(self) -> PagedKV:
        index_dim = self.own_indexer.head_dim if self.own_indexer else 0
        return PagedKV(1, self.row_dim, True, None, self.attention.window, self.attention.sinks, index_dim)

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
        index, seen = self.own_indexer, context if self.indexer is None else min(context, self.indexer.top_k)
        scores = index.num_heads * index.head_dim * context if index else 0
        return 2 * self.num_heads * self.row_dim * seen + scores

    @property
    def widest_product(self) -> int:
        return self.num_heads * (self.row_dim + self.gated) + 2 * self.row_dim + self._index_width

    @property
    def _index_width(self) -> int:
        """Numbers of a token that its indexer reads."""
        index = self.own_indexer
        return 0 if index is None else (index.num_heads + 1) * index.head_dim + index.num_heads

    def inner_bytes(self, *, half: bool = False) -> int:
        queries = self.num_heads * self.row_dim
        if half:
            return 2 * (3 * queries + 2 * self.row_dim)
        chosen = 0 if self.indexer is None else 4 * self.indexer.top_k + 8 * self._index_width
        return 4 * max(3 * queries + 4 * self.row_dim, 2 * self.widest_product) + chosen

    @property
    def chosen_keys(self) -> int:
        return 0 if self.indexer is None else self.indexer.top_k

    @property
    def follows(self) -> bool:
        return self.indexer is not None and self.indexer.shared

    def whole(self) -> Self:
        return replace(self, indexer=None)

    def choice_bytes(self, length: int) -> int:
        """Keys of a context in float32, and twice as much while they are read."""
        return 12 * self.own_indexer.head_dim * length if self.own_indexer else 0

    def prompt_bytes(self, length: int) -> int:
        """See layers.latent_cost: rows, and plain keys and values of each head."""
        return min(SCRATCH_BYTES, 2 * length * (self.row_dim + self.num_heads * (self.query_dim + self.v_head_dim)))

    def check(self) -> None:
        check_limits(self, LIMITS)
        check_rope(self.rope, self.row_dim)
        if self.indexer is not None:
            if self.gated:
                raise UnsupportedError("config.json: gated latent attention with an indexer is not supported")
            check_limits(self.indexer, INDEX_LIMITS, "indexer: ")
            check_rope(self.rope, self.indexer.head_dim)
            if not self.q_lora_rank:
                raise CheckpointError(
                    "config.json: an indexer reads the latent of queries; q_lora_rank must be positive"
                )

    def share(self, rank: int, tp: int, ep: int) -> Self:
        """Each rank keeps all rows."""
        check_split(tp, self.num_heads, 1)
        return replace(self, num_heads=self.num_heads // tp)
