"""A layer of a transformers module as a block: its linears by their names, and what it keeps of a sequence.

No torch here: `lmkit inspect` and the memory plan read it.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmkit.attention_spec import AttentionSpec
from lmkit.errors import CheckpointError
from lmkit.layers.blocks.base import Block, Heads, Shape
from lmkit.layers.blocks.state import State


@dataclass(frozen=True)
class ForeignBlock(Block):
    """A role is the name of a linear inside the layer, `self_attn.q_proj` for example."""

    shapes: tuple[tuple[str, Shape], ...] = ()
    biased: frozenset[str] = frozenset()
    of_heads: Heads | None = None
    attention: AttentionSpec | None = None
    kept: State = None
    shared: tuple[tuple[str, ...], ...] = ()  # linears that read the same input

    def linears(self, hidden: int) -> dict[str, Shape]:
        return dict(self.shapes)

    @property
    def fused(self) -> tuple[tuple[str, ...], ...]:
        """Other engines may compute them together, so they have one scheme."""
        return self.shared

    def has_bias(self, role: str) -> bool:
        return role in self.biased

    @property
    def state(self) -> State:
        return self.kept

    @property
    def heads(self) -> Heads | None:
        return self.of_heads

    @property
    def scores(self) -> AttentionSpec | None:
        return self.attention

    def products(self, context: float) -> float:
        """Each token sees `context` keys, or fewer with a window: scores and values."""
        if self.of_heads is None or self.attention is None:
            return 0.0
        seen = min(context, self.attention.window) if self.attention.window else context
        return 2 * self.of_heads.queries * self.of_heads.dim * seen

    @property
    def widest_product(self) -> int:
        return max((rows for _, (rows, _) in self.shapes), default=0)

    def inner_bytes(self, *, half: bool = False) -> int:
        """transformers keeps the results of some linears at a time, and copies of queries, keys and values."""
        heads = self.of_heads or Heads(0, 0, 0)
        return 4 * (4 * self.widest_product + 4 * heads.dim * (heads.queries + 2 * heads.kv))

    def check(self) -> None:
        if self.of_heads is not None and self.of_heads.queries % self.of_heads.kv:
            raise CheckpointError(f"config.json: {self.of_heads} cannot share key-value heads evenly")
