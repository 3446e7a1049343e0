"""What the prefix caches of an engine get and lose, as events in the form of vLLM's KV events.

Events tell of full blocks only, by the hash of everything that a block's KV depends on besides the model, the digests
of images among it:

    key of block i = as in turbo.kv.tiers.keys, with a root of tenant and salt alone
    hash           = the last 8 bytes of the key, big-endian

A cache has each block once. A reader therefore has the cache's content as a set of hashes: BlockStored adds some,
BlockRemoved takes some away, AllBlocksCleared takes all.

Recurrent states are a further class of layers. Its blocks are those after whose tokens a state stands: a prefix can be
continued there, and nowhere between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from lmkit.turbo.kv.block_pool import HOLE
from lmkit.turbo.kv.radix_tree import Namespace
from lmkit.turbo.kv.tiers.keys import block_keys, root_key
from lmkit.turbo.sequence import Sequence as Seq

MEDIUM = "GPU"  # the name that readers know for the device's memory
STATES = "mamba"  # the kind that readers know for recurrent states of any form


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks that follow each other. The fields stand in the order that readers expect."""

    block_hashes: list[int]
    parent_block_hash: int | None  # of the block before the first; None at the beginning of a prompt
    token_ids: list[int]  # block_size for each block; of an image those that the prompt has in its place
    block_size: int
    lora_id: int | None = None  # unused: adapters have names
    medium: str = MEDIUM
    lora_name: str | None = None
    extra_keys: list[list[str] | None] | None = None  # for each block: digests of its images, in hexadecimal
    group_idx: int = 0  # the class of layers
    kv_cache_spec_kind: str = "full_attention"  # or sliding_window, or STATES
    kv_cache_spec_sliding_window: int | None = None  # tokens


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    block_hashes: list[int]
    medium: str = MEDIUM
    group_idx: int = 0


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class BlockLog:
    """The events of one cache, in order, appended to a list that all caches of an engine share."""

    def __init__(self, events: list[Event], block_size: int, group: int = 0, window: int = 0) -> None:
        """`group` is the number of the cache's class of layers, `window` their window in tokens; 0 = none."""
        self._events, self._block_size, self._group, self._window = events, block_size, group, window
        self._keys: dict[int, bytes] = {}  # of the full blocks that the cache has, by block

    def stored(
        self, namespace: Namespace, tokens: np.ndarray, blocks: Sequence[int], new: Iterable[int], seq: Seq | None
    ) -> None:
        """The cache got the blocks with the indices `new` of `blocks`, which hold `tokens` (int32 [n]) of `seq`.

        `blocks` has HOLEs where the cache has no block.
        """
        size, digests = self._block_size, {} if seq is None else seq.digests
        for run in runs(new):
            start, end = run.start * size, run.stop * size
            above = self._key(namespace, tokens, blocks, run.start - 1, digests) if run.start else None
            keys: list[bytes] = []
            block_keys(above or root_key(b"", *namespace), tokens[start:end], size, keys, digests)
            self._keys.update(zip(blocks[run.start : run.stop], keys, strict=True))
            kind = "sliding_window" if self._window else "full_attention"
            self._tell(above, keys, tokens[:end], seq, self._group, kind, self._window or None)

    def removed(self, blocks: Iterable[int]) -> None:
        """The cache lost these blocks. Those that were not full have no event."""
        keys = [self._keys.pop(block) for block in blocks if block in self._keys]
        if keys:
            self._events.append(BlockRemoved(list(map(short, keys)), group_idx=self._group))

    def state_stored(self, seq: Seq, blocks: Sequence[int]) -> None:
        """A recurrent state stands after the last of these blocks of the cache, the first ones of `seq`."""
        above = self._keys[blocks[-2]] if len(blocks) > 1 else None
        tokens = seq.cached_as(len(blocks) * self._block_size)
        self._tell(above, [self._keys[blocks[-1]]], tokens, seq, self._group + 1, STATES)

    def state_removed(self, block: int) -> None:
        """The state after this block is gone. One after a block that is not full has no event."""
        if (key := self._keys.get(block)) is not None:
            self._events.append(BlockRemoved([short(key)], group_idx=self._group + 1))

    def _tell(self, above: bytes | None, keys: list[bytes], tokens: np.ndarray, seq: Seq | None, *layers: Any) -> None:
        """Blocks are stored, the last ones of `tokens`. `layers`: number, kind and window of their class."""
        parent, name = None if above is None else short(above), (seq.request.adapter or None) if seq else None
        new, images = tokens[-len(keys) * self._block_size :], None
        if seq is not None and new.min() < 0:
            images = [_images(block, seq.digests) for block in new.reshape(-1, self._block_size)]
            new = seq.tokens(len(tokens))[-len(new) :]
        hashes, size = list(map(short, keys)), self._block_size
        self._events.append(BlockStored(hashes, parent, new.tolist(), size, None, MEDIUM, name, images, *layers))

    def _key(
        self,
        namespace: Namespace,
        tokens: np.ndarray,
        blocks: Sequence[int],
        i: int,
        digests: Mapping[int, bytes],
    ) -> bytes:
        """The key of block `i`. It follows from all tokens up to there if the cache has no block in this place."""
        if blocks[i] != HOLE:
            return self._keys[blocks[i]]
        keys: list[bytes] = []
        block_keys(root_key(b"", *namespace), tokens[: (i + 1) * self._block_size], self._block_size, keys, digests)
        return keys[-1]


def _images(block: np.ndarray, digests: Mapping[int, bytes]) -> list[str] | None:
    """The images that a block has tokens of, in their order. A negative token is minus the number of one."""
    return [digests[number].hex() for number in dict.fromkeys(block[block < 0].tolist())] or None


def runs(indices: Iterable[int]) -> list[range]:
    """The ranges that the indices form."""
    found: list[range] = []
    for i in sorted(indices):
        if found and found[-1].stop == i:
            found[-1] = range(found[-1].start, i + 1)
        else:
            found.append(range(i, i + 1))
    return found


def short(key: bytes) -> int:
    """The hash that events have for a key."""
    return int.from_bytes(key[-8:])
