"""Attention and an MLP that several layers share, before Mamba-2, as one block (Zamba2). See `layers.shared`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from lmkit.attention_spec import AttentionSpec
from lmkit.layers.blocks.attention import SelfAttentionSpec
from lmkit.layers.blocks.base import Block, Borrowed, Heads, Pairs, Shape
from lmkit.layers.blocks.mamba import MambaSpec
from lmkit.layers.blocks.mlp import MLPSpec
from lmkit.layers.blocks.state import PagedKV
from lmkit.layers.rope_spec import RopeSpec


@dataclass(frozen=True)
class SharedSpec(Block):
    """mamba(norm(x + linear(mlp(norm(attention(norm(x, e))))))) of the stream x beside the embeddings e (arXiv
    2411.15242). Nothing but Mamba-2 adds to the stream."""

    attention: SelfAttentionSpec
    mlp: MLPSpec
    mamba: MambaSpec
    layer: int  # the one with which a checkpoint keeps attention and MLP
    use: int  # the number of this use of them, among all layers with attention

    @property
    def members(self) -> tuple[Block, ...]:
        return self.attention, self.mlp, self.mamba

    def having(self, **changes: Any) -> Self:
        return replace(self, attention=self.attention.having(**changes))

    def linears(self, hidden: int) -> dict[str, Shape]:
        attention = self.attention.linears(2 * hidden) | {"attn.o": (hidden, self.attention.q_size)}
        return attention | self.mlp.linears(hidden) | {"shared.out": (hidden, hidden)} | self.mamba.linears(hidden)

    def vectors(self, hidden: int) -> dict[str, int]:
        return {"norm.attn": 2 * hidden, "norm.mlp": hidden, "norm.mamba": hidden} | self.mamba.vectors(hidden)

    @property
    def borrowed(self) -> Borrowed:
        norms = "norm.attn", "norm.mlp"
        return Borrowed(self.layer, self.use, (*norms, *self.attention.linears(1), *self.mlp.linears(1)))

    @property
    def out(self) -> str:
        return self.mamba.out

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        return self.mamba.matrices

    @property
    def fused(self) -> tuple[tuple[str, ...], ...]:
        return (*self.attention.fused, *self.mlp.fused, *self.mamba.fused)

    def smooth(self, norm: str) -> Pairs:
        return (
            *self.attention.smooth("norm.attn"),
            *self.mlp.smooth("norm.mlp"),
            *self.mamba.smooth("norm.mamba"),
        )

    @property
    def state(self) -> PagedKV:
        return replace(self.attention.state, beside=self.mamba.state)

    @property
    def heads(self) -> Heads:
        return self.attention.heads

    @property
    def rotary(self) -> RopeSpec:
        return self.attention.rotary

    @property
    def scores(self) -> AttentionSpec:
        return self.attention.scores

    @property
    def mlps(self) -> dict[str, MLPSpec]:
        return self.mlp.mlps

    @property
    def reads_embeddings(self) -> bool:
        return True

    def products(self, context: float) -> float:
        return self.attention.products(context) + self.mamba.products(context)

    @property
    def widest_product(self) -> int:
        return max(member.widest_product for member in self.members)

    def inner_bytes(self, *, half: bool = False) -> int:
        """The parts are computed one after the other. Beside them: the input, its norm, and results in between."""
        between = 2 * self.attention.q_size + 3 * self.mamba.width
        return max(member.inner_bytes(half=half) for member in self.members) + (2 if half else 4) * between

    @property
    def rows_of_heads(self) -> dict[str, int]:
        return self.attention.rows_of_heads

    def check(self) -> None:
        for member in self.members:
            member.check()

    def share(self, rank: int, tp: int, ep: int) -> Self:
        """Each rank computes all of Mamba-2."""
        return replace(self, attention=self.attention.share(rank, tp, ep), mlp=self.mlp.share(rank, tp, ep))
