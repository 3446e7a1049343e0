"""Where KV blocks came from: of a sequence's tokens for its receipt, of cached blocks for the log."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence as Seq
from typing import NamedTuple

from lmkit.turbo.kv.block_pool import HOLE, BlockPool
from lmkit.turbo.sequence import Sequence

COMPUTED, CACHE = "computed", "cache"  # beside the names of tiers: host, disk, peer


class Origin(NamedTuple):
    """How a cached block was filled."""

    source: str  # COMPUTED, or the tier that it was loaded from
    at: float  # seconds since 1970
    request_id: str
    tenant: str

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.at))
        what = "computed" if self.source == COMPUTED else f"loaded from tier {self.source}"
        return f"{what} at {when} UTC by {whose(self.request_id, self.tenant)}"


def whose(request_id: str, tenant: str) -> str:
    """A request and its tenant as the log names them, whose names may tell more than a log should."""
    return f"request {_digest(request_id)} of tenant {_digest(tenant)}"


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12]


class Origins:
    """The origins of the full blocks that the prefix cache has or had, by block."""

    def __init__(self) -> None:
        self._by_block: dict[int, Origin] = {}

    def note(self, seq: Sequence, blocks: Seq[int], first: int) -> None:
        """The cache got these blocks of a sequence, from index `first` on. HOLEs are not its own."""
        made: dict[str, Origin] = {}
        for i in range(first, len(blocks)):
            if blocks[i] != HOLE:
                source = seq.kv_sources[i] if i < len(seq.kv_sources) else COMPUTED
                if source not in made:
                    made[source] = Origin(source, time.time(), seq.request_id, seq.request.tenant)
                self._by_block[blocks[i]] = made[source]

    def text(self, block: int) -> str:
        return str(self._by_block.get(block, "of unknown origin"))


def tiers_of(rows: Seq[Seq[int]], pool: BlockPool, tiers: Seq[str]) -> list[str]:
    """The tier that each block of tokens was loaded from.

    `rows` are the blocks of each class that were wanted, `tiers` those of the pool's blocks, in the order of tokens.
    """
    found, at = list[str](), 0
    for blocks in zip(*rows, strict=True):
        found += tiers[at : at + 1]
        at += sum(pool.size(block) for block in blocks if block != HOLE)
    return found
