"""Attention to what an encoder made of another input, an audio for example, as a block. `layers.cross` computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from lmkit.errors import CheckpointError
from lmkit.layers.blocks.base import Block, Pairs, Shape, check_limits
from lmkit.layers.blocks.state import Memory

HEARS = "this model writes what it hears, and text comes without an audio"
KV = ("cross.k", "cross.v")
LIMITS = {"num_heads": 1 << 12, "head_dim": 1 << 10, "length": 1 << 16}


@dataclass(frozen=True)
class CrossAttentionSpec(Block):
    """Queries of the stream see all keys of a sequence's memory, which are written once, when it enters a slot."""

    num_heads: int
    head_dim: int
    length: int  # states of the encoder

    @property
    def size(self) -> int:
        """Width of all heads, which is that of the encoder's states too."""
        return self.num_heads * self.head_dim

    @property
    def memory(self) -> Memory:
        return Memory(self.length, self.num_heads, self.head_dim)

    @property
    def out(self) -> str:
        return "cross.o"

    def linears(self, hidden: int) -> dict[str, Shape]:
        own = {"cross.q": (self.size, hidden), "cross.k": (self.size, hidden), "cross.v": (self.size, hidden)}
        return own | {"cross.o": (hidden, self.size)}

    @property
    def fused(self) -> tuple[tuple[str, ...], ...]:
        return (KV,)

    def has_bias(self, role: str) -> bool:
        return role != "cross.k"

    def smooth(self, norm: str) -> Pairs:
        return ((norm, ("cross.q",)), ("cross.v", ("cross.o",)))

    def active_weights(self, hidden: int) -> int:
        """Keys and values are computed once for a sequence, not for each token."""
        return 2 * self.size * hidden

    def products(self, context: float) -> float:
        return 2 * self.size * self.length

    @property
    def widest_product(self) -> int:
        return 2 * self.size

    def inner_bytes(self, *, half: bool = False) -> int:
        return 4 * 3 * self.size

    def check(self) -> None:
        check_limits(self, LIMITS)
        if self.head_dim % 2:
            raise CheckpointError(f"config.json: heads of {self.head_dim} are not even")

    def share(self, rank: int, tp: int, ep: int) -> Self:
        """lmkit.conflicts refuses several ranks."""
        return self
