"""The size of the KV memory, and how the layers of the model use it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from lmkit.models.kv_layout import KVClass
from lmkit.turbo.kv.radix_tree import Namespace
from lmkit.turbo.sequence import Sequence

RETIRE_ALIGN = 64  # tokens that leave a window together: they are published first, and publishing costs time


@dataclass(frozen=True)
class KVLimits:
    """The size of the KV memory, and how the model uses it."""

    num_blocks: int
    block_size: int  # tokens
    classes: tuple[KVClass, ...] = (KVClass(),)  # of layers
    max_step_tokens: int = 512  # the most tokens that a step adds to one sequence
    prefix_cache: bool = True
    cache_quota: float = 1.0  # share of the blocks that one tenant may keep in the cache
    session_lease: float = 300.0  # seconds
    dynamic_length: int = 0  # longer prompts have other angles, and so another KV; 0 = never
    first_snapshot: int = 0  # row of recurrent states from which on rows hold snapshots
    num_snapshots: int = 0  # such rows; 0 = the model has no states
    long_prompts_agree: bool = False  # they all have the same (LongRoPE), not each length its own (dynamic RoPE)

    @property
    def snapshots(self) -> range:
        """Rows of recurrent states that hold snapshots."""
        return range(self.first_snapshot, self.first_snapshot + self.num_snapshots)

    @property
    def num_groups(self) -> int:
        """The number of blocks that hold the same tokens, as long as all classes see them."""
        return sum(layers.num_groups for layers in self.classes)

    def namespace(self, seq: Sequence) -> Namespace:
        """The namespace of the sequence's blocks. It decides their content besides the tokens, and who may see them."""
        salt, limit = seq.request.cache_salt, self.dynamic_length
        if seq.adapter_digest:
            salt += "\0adapter " + seq.adapter_digest
        if limit and seq.num_prompt_tokens > limit:
            alike = self.long_prompts_agree
            salt += "\0RoPE of " + ("long prompts" if alike else f"{seq.num_prompt_tokens} tokens")
        return seq.request.tenant, salt

    def blocks_for(self, num_tokens: int) -> int:
        """The most blocks that a sequence of `num_tokens` tokens holds at once."""
        return sum(layers.num_groups * self._stripes_for(layers, num_tokens) for layers in self.classes)

    @property
    def longest(self) -> int:
        """Tokens, in whole blocks, of the longest sequence that fits into all blocks; at most `num_blocks` blocks."""
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
        """Tokens, in whole blocks, that all blocks hold if every sequence has `num_tokens` tokens."""
        return self.num_blocks * -(-num_tokens // self.block_size) // self.blocks_for(num_tokens) * self.block_size
