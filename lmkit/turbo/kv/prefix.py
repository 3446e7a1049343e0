"""What the prefix caches of all classes of layers have of a prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from lmkit.turbo.kv.block_pool import HOLE, BlockPool
from lmkit.turbo.kv.radix_cache import Match
from lmkit.turbo.sequence import Sequence


@dataclass(frozen=True)
class Prefix:
    """The longest prefix of a prompt that the caches of all classes have."""

    matches: tuple[Match, ...]  # one for each class, each of `num_tokens` tokens
    num_tokens: int  # fewer than those of the matches' blocks if no recurrent state is kept after these

    @property
    def num_full(self) -> int:
        """Full blocks of each class, HOLEs included."""
        return len(self.matches[0].blocks)

    def num_freed(self, pool: BlockPool, without: Iterable[Sequence]) -> int:
        """Blocks that become available to a sequence with this prefix if the sequences `without` release theirs: those,
        and blocks of the prefix that others hold."""
        tables = [table for seq in without for table in seq.tables]
        given = Counter(block for table in tables for block in table.blocks if block != HOLE)

        def is_held(block: int) -> bool:
            return pool.references(block) - pool.is_cached(block) > given[block]

        found = [block for match in self.matches for block in match.blocks if block != HOLE and is_held(block)]
        freed = [block for block in given if not is_held(block)]
        return sum(map(pool.size, found + freed))
