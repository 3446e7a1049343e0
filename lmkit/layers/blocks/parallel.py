"""Two blocks that read the same input, and add to the stream together. `layers.parallel` computes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from lmkit.attention_spec import AttentionSpec
from lmkit.errors import UnsupportedError
from lmkit.layers.blocks.base import Block, Heads, InnerMLP, Pairs, Shape, ValueHeads
from lmkit.layers.blocks.state import PagedKV, Recurrent, State
from lmkit.layers.rope_spec import RopeSpec


@dataclass(frozen=True)
class ParallelSpec(Block):
    """mixer(x) + beside(x). If both keep something of a sequence, it is keys and values, and a recurrent state."""

    mixer: Block
    beside: Block

    @property
    def members(self) -> tuple[Block, ...]:
        return self.mixer, self.beside

    def having(self, **changes: Any) -> Self:
        return replace(self, mixer=self.mixer.having(**changes))

    def linears(self, hidden: int) -> dict[str, Shape]:
        return self.mixer.linears(hidden) | self.beside.linears(hidden)

    def routers(self, hidden: int) -> dict[str, Shape]:
        return self.mixer.routers(hidden) | self.beside.routers(hidden)

    def vectors(self, hidden: int) -> dict[str, int]:
        return self.mixer.vectors(hidden) | self.beside.vectors(hidden)

    def ends(self, role: str) -> bool:
        return any(member.ends(role) for member in self.members)

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        return self.mixer.matrices | self.beside.matrices

    @property
    def fused(self) -> tuple[tuple[str, ...], ...]:
        return (*self.mixer.fused, *self.beside.fused)

    def has_bias(self, role: str) -> bool:
        """Each role is one part's; the other one is not asked."""
        return (self.mixer if role in self.mixer.linears(1) else self.beside).has_bias(role)

    @property
    def rows_of_heads(self) -> dict[str, int]:
        return self.mixer.rows_of_heads

    @property
    def row_groups(self) -> dict[str, int]:
        return self.mixer.row_groups

    @property
    def value_heads(self) -> Mapping[str, ValueHeads]:
        return self.mixer.value_heads

    @property
    def pair_order(self) -> tuple[int, ...]:
        return self.mixer.pair_order

    @property
    def gguf_names(self) -> Mapping[str, str]:
        return {**self.mixer.gguf_names, **self.beside.gguf_names}

    @property
    def same_input(self) -> tuple[tuple[str, ...], ...]:
        """The first group of each part reads the block's input."""
        (first, *others), (second, *more) = self.mixer.same_input, self.beside.same_input
        return ((*first, *second), *others, *more)

    @property
    def unrounded(self) -> tuple[str, ...]:
        return (*self.mixer.unrounded, *self.beside.unrounded)

    def smooth(self, norm: str) -> Pairs:
        """A scale between the norm and what reads it is that of both parts."""
        pairs = (*self.mixer.smooth(norm), *self.beside.smooth(norm))
        readers = tuple(role for source, roles in pairs if source == norm for role in roles)
        before = ((norm, readers),) if norm else ()
        return (*before, *(pair for pair in pairs if pair[0] != norm))

    @property
    def state(self) -> State:
        kept, beside = (member.state for member in self.members)
        if not isinstance(beside, Recurrent):
            return kept
        assert isinstance(kept, PagedKV)
        return replace(kept, beside=beside)

    @property
    def heads(self) -> Heads | None:
        return self.mixer.heads

    @property
    def rotary(self) -> RopeSpec | None:
        return self.mixer.rotary

    @property
    def scores(self) -> AttentionSpec | None:
        return self.mixer.scores

    @property
    def mlps(self) -> Mapping[str, InnerMLP]:
        return self.beside.mlps

    def active_weights(self, hidden: int) -> int:
        return sum(member.active_weights(hidden) for member in self.members)

    def products(self, context: float) -> float:
        return sum(member.products(context) for member in self.members)

    @property
    def widest_product(self) -> int:
        return max(member.widest_product for member in self.members)

    def inner_bytes(self, *, half: bool = False) -> int:
        return sum(member.inner_bytes(half=half) for member in self.members)

    def expert_bytes(self, hidden: int, *, half: bool = False) -> int:
        return max(member.expert_bytes(hidden, half=half) for member in self.members)

    def places_bytes(self, hidden: int, num_tokens: int, *, half: bool = False) -> int:
        return max(member.places_bytes(hidden, num_tokens, half=half) for member in self.members)

    def prompt_bytes(self, length: int) -> int:
        return max(member.prompt_bytes(length) for member in self.members)

    def check(self) -> None:
        for member in self.members:
            member.check()

    def share(self, rank: int, tp: int, ep: int) -> Self:
        if tp > 1 and self.beside.state is not None:
            raise UnsupportedError(f"tp={tp}: a recurrent block beside attention is not split over processes; use tp=1")
        mixer, beside = (member.share(rank, tp, ep) for member in self.members)
        return type(self)(mixer, beside)
