"""What a layer keeps of a sequence between steps: all that memory plan, allocation, snapshots and tiers know of it.

No torch: a layer's specification holds one. `layers.batch.allocate_state` makes the tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lmkit.kv_dtype import INT8, KVDtype


@dataclass(frozen=True)
class PagedKV:
    """A key and a value of each token, in the blocks of the KV pool."""

    num_heads: int
    head_dim: int
    shared: bool = False  # one row is both key and value, as in latent attention
    source: int | None = None  # the layer whose keys and values are read; there are none of this layer's own
    window: int = 0  # a token at position p reads keys > p - window; 0 = all before it
    sinks: int = 0  # first tokens that the window does not leave behind
    index_dim: int = 0  # width of the key by which an indexer chooses the token (layers.sparse_latent); 0 = none
    beside: Recurrent | None = None  # the state of a block that reads the same input

    @staticmethod
    def index_dtype(k: KVDtype) -> KVDtype:
        """The storage type of an indexer's keys beside keys in `k`: 8 bits at least, as they decide what is seen."""
        return INT8 if k.coded and k.bits < INT8.bits else k

    def token_bytes(self, k: KVDtype, v: KVDtype) -> int:
        """Bytes of a token's key and value in these storage types, with their parameters."""
        if self.source is not None:
            return 0
        index = self.index_dtype(k).row_bytes(self.index_dim) if self.index_dim else 0
        rows = k.row_bytes(self.head_dim) + (0 if self.shared else v.row_bytes(self.head_dim))
        return self.num_heads * rows + index


@dataclass(frozen=True)
class Recurrent:
    """One state for each sequence, float32, whose size does not grow. It has no blocks: snapshots of it are cached."""

    window: tuple[int, int]  # (channels, tokens): the last inputs of a causal convolution
    matrix: tuple[int, int, int]  # (heads, rows, columns)
    draft_width: int  # numbers that a draft token keeps until it is accepted, see kernels.recurrent

    @property
    def num_bytes(self) -> int:
        """Bytes of a sequence's state."""
        return 4 * (math.prod(self.window) + math.prod(self.matrix))

    @property
    def draft_bytes(self) -> int:
        """Bytes that a draft token keeps."""
        return 4 * self.draft_width


@dataclass(frozen=True)
class Memory:
    """Keys and values of an encoder's states for each sequence, in blocks of its slot. No token adds to them."""

    length: int  # states
    num_heads: int
    head_dim: int

    def blocks(self, block_size: int) -> int:
        """Blocks of a sequence."""
        return -(-self.length // block_size)

    def num_bytes(self, block_size: int, k: KVDtype, v: KVDtype) -> int:
        """Bytes of a sequence's keys and values in these storage types."""
        rows = self.blocks(block_size) * block_size * self.num_heads
        return rows * (k.row_bytes(self.head_dim) + v.row_bytes(self.head_dim))


State = PagedKV | Recurrent | None
