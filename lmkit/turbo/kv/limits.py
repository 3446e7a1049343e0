"""What KV memory there is, and how the layers of the model look at it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from lmkit.models.kv_layout import KVClass

RETIRE_ALIGN = 64  # tokens that leave a window together: what leaves is published first, which has its price


@dataclass(frozen=True)
class KVLimits:
    """What there is, and how the model looks at it."""

    num_blocks: int
    block_size: int  # tokens
    classes: tuple[KVClass, ...] = (KVClass(),)  # of layers
    max_step_tokens: int = 512  # most tokens of one sequence that a step adds
    prefix_cache: bool = True
    cache_quota: float = 1.0  # share of the blocks that one tenant may keep in the cache
    session_lease: float = 300.0  # seconds
    dynamic_length: int = 0  # KV of longer prompts depends on their length (dynamic RoPE); 0 = never

    @property
    def num_groups(self) -> int:
        """Blocks that hold the same tokens, as long as all classes see them."""
        return sum(layers.num_groups for layers in self.classes)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens holds at once, at most."""
        return sum(layers.num_groups * self._stripes_for(layers, num_tokens) for layers in self.classes)

    @property
    def longest(self) -> int:
        """Tokens, in whole blocks, of the longest sequence that all blocks hold; no more than there are blocks."""
        sizes = range(self.num_blocks + 1)
        return self.block_size * (
            bisect_right(sizes, self.num_blocks, key=lambda n: self.blocks_for(n * self.block_size)) - 1
        )

    def _stripes_for(self, layers: KVClass, num_tokens: int) -> int:
        stripes = -(-num_tokens // self.block_size)
        if not layers.window:
            return stripes
        span = layers.window + self.max_step_tokens + RETIRE_ALIGN
        return min(stripes, -(-layers.sinks // self.block_size) + -(-span // self.block_size) + 2)

    def capacity(self, num_tokens: int) -> int:
        """Tokens of sequences of so many tokens that all blocks hold, in whole blocks."""
        return self.num_blocks * -(-num_tokens // self.block_size) // self.blocks_for(num_tokens) * self.block_size
