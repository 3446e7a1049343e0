"""Gives sequences the KV blocks they need, and takes them back: into the prefix cache, where the next one finds them.

    free --reserve--> a sequence's --publish--> also the cache's --release--> the cache's alone (idle) --evict--> free
                                                      ^------------ find, acquire -------------'

References (BlockPool) say who has a block: sequences, the cache, leases of sessions. An idle block, which the cache
alone has, is as good as free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from lmkit.turbo.decisions import DecisionStats
from lmkit.turbo.kv.block_pool import BlockPool
from lmkit.turbo.kv.leases import Leases
from lmkit.turbo.kv.radix_cache import HOLE, Match, Namespace, RadixCache
from lmkit.turbo.kv.tiers.keys import block_keys, root_key
from lmkit.turbo.kv.tiers.store import Loaded, TierStore
from lmkit.turbo.plan import Load, Save
from lmkit.turbo.sequence import Sequence

RETIRE_ALIGN = 64  # tokens that leave a window together: what leaves is published first, which has its price
NOTHING = Match([], 0, None)


@dataclass(frozen=True)
class KVLimits:
    """What there is, and how the model looks at it."""

    num_blocks: int
    block_size: int  # tokens
    window: int = 0  # of all layers; 0 = some layer sees everything
    sinks: int = 0  # first tokens that a window does not leave behind
    max_step_tokens: int = 512  # most tokens of one sequence that a step adds
    prefix_cache: bool = True
    cache_quota: float = 1.0  # share of the blocks that one tenant may keep in the cache
    session_lease: float = 300.0  # seconds
    dynamic_length: int = 0  # KV of longer prompts depends on their length (dynamic RoPE); 0 = never

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens holds at once, at most."""
        blocks = -(-num_tokens // self.block_size)
        if not self.window:
            return blocks
        span = self.window + self.max_step_tokens + RETIRE_ALIGN
        return min(blocks, -(-self.sinks // self.block_size) + -(-span // self.block_size) + 2)


class KVManager:
    """The only writer of `Sequence.block_table`: block i of a table holds tokens i * block_size and on."""

    def __init__(
        self, limits: KVLimits, decision_stats: DecisionStats, tiers: TierStore | None = None, kv_identity: bytes = b""
    ) -> None:
        """`kv_identity`: of all that decides what is in a block, beside tokens, tenant and salt."""
        self.limits = limits
        self.decision_stats = decision_stats
        self.pool = BlockPool(limits.num_blocks)
        self.block_size = limits.block_size
        self.leases = Leases(limits.session_lease)
        self.copies: list[tuple[int, int]] = []  # for the next plan, as are loads and saves
        self.loads: list[Load] = []
        self.saves: list[Save] = []
        self.cache: RadixCache | None = None
        if limits.prefix_cache:
            quota = max(1, int(limits.cache_quota * limits.num_blocks)) if limits.cache_quota < 1 else None
            self.cache = RadixCache(self.pool, self.block_size, window=limits.window, sinks=limits.sinks, quota=quota)
        self._tiers = tiers if limits.prefix_cache else None
        self._kv_identity = kv_identity
        self._num_loads = 0

    @property
    def num_available(self) -> int:
        """Blocks that `reserve` can give."""
        return self.pool.num_free + self.pool.num_idle

    def num_for(self, match: Match, without: Iterable[Sequence] = ()) -> int:
        """Blocks that a sequence with this match could have: what is available, and what others hold of the match; if
        the sequences `without` gave back theirs.
        """
        given = Counter(block for seq in without for block in seq.block_table if block != HOLE)

        def is_held(block: int) -> bool:
            return self.pool.references(block) - self.pool.is_cached(block) > given[block]

        shared = sum(is_held(block) for block in match.blocks if block != HOLE)
        return self.num_available + sum(not is_held(block) for block in given) + shared

    def wait(self, seconds: float) -> None:
        if self._tiers is not None:
            self._tiers.wait(seconds)

    def tier_stats(self) -> dict[str, int]:
        return self._tiers.stats() if self._tiers is not None else {}

    def namespace(self, seq: Sequence) -> Namespace:
        """What, besides tokens, decides what is in a block, and who may see it."""
        salt, limit = seq.request.cache_salt, self.limits.dynamic_length
        if limit and seq.num_prompt_tokens > limit:
            salt += f"\0RoPE of {seq.num_prompt_tokens} tokens"
        return seq.request.tenant, salt

    # ---- finding

    def find(self, seq: Sequence) -> Match:
        """What the cache has of a sequence that holds nothing: at most all but the last token, for its logits."""
        if self.cache is None or seq.scores_prompt or seq.num_tokens < 2:
            return NOTHING
        return self.cache.match(self.namespace(seq), seq.tokens(seq.num_tokens - 1))

    def find_below(self, seq: Sequence, match: Match) -> list[bytes]:
        """Keys of the full blocks behind the match that a lower tier has."""
        if self._tiers is None or seq.scores_prompt:
            return []
        full = (seq.num_tokens - 1) // self.block_size
        keys, found = self._keys(seq, full), len(match.blocks)
        self._tiers.touch(keys[:found])
        return keys[found : found + self._tiers.lookup(keys[found:])]

    def load_seconds(self, keys: list[bytes]) -> float:
        assert self._tiers is not None
        return self._tiers.load_seconds(keys)

    # ---- giving

    def end_lease(self) -> bool:
        """End the lease that would end first, since blocks are needed; False if there is none."""
        if not len(self.leases):
            return False
        self.decision_stats.decisions["lease ended: blocks needed"] += 1
        self.pool.free_all(self.leases.pop_first())
        return True

    def acquire(self, seq: Sequence, match: Match) -> None:
        """Begin the table of a sequence with a match that was just found; a room of one block suffices for its tail."""
        assert not seq.block_table, "the sequence holds blocks already"
        self.pool.share_all(match.blocks)
        seq.block_table[:] = match.blocks
        if match.tail is not None:  # may be evicted for its own copy: what it holds is still there when that is made
            (block,) = self._allocate(1)
            self.copies.append((match.tail, block))
            seq.block_table.append(block)
        seq.num_computed, seq.num_completed = match.num_tokens, len(match.blocks) * self.block_size
        seq.num_published = len(match.blocks)

    def acquire_below(self, seq: Sequence, match: Match, keys: list[bytes]) -> int:
        """Begin the table with the full blocks of a match, and those behind them that have `keys`: the job that loads
        these. There must be room for them.
        """
        size, start = self.block_size, len(match.blocks)
        self.acquire(seq, Match(match.blocks, start * size, None))
        needed = [i for i in range(start, start + len(keys)) if self._is_seen(i, (start + len(keys)) * size)]
        blocks = self._allocate(len(needed))
        seq.block_table += [HOLE] * len(keys)
        for index, block in zip(needed, blocks, strict=True):
            seq.block_table[index] = block
        self._num_loads += 1
        self.loads.append(Load(self._num_loads, [keys[i - start] for i in needed], blocks))
        return self._num_loads

    def take_loaded(self, seq: Sequence, done: Loaded) -> None:
        """The sequence's load has ended: what came in is as good as computed, the rest of the room is given back."""
        first = seq.num_computed // self.block_size
        wanted = [block for block in seq.block_table[first:] if block != HOLE]
        if done.num_blocks == len(wanted):
            count = len(seq.block_table) - first
        else:  # of a window nothing but the whole will do
            count = done.num_blocks if HOLE not in seq.block_table[first:] else 0
        self.pool.free_all(seq.block_table[first + count :])
        del seq.block_table[first + count :]
        seq.num_computed += count * self.block_size
        seq.num_completed = seq.num_computed
        self.publish(seq, seq.num_completed)

    def reserve(self, seq: Sequence, num_tokens: int) -> list[int] | None:
        """Make the table hold the first `num_tokens` tokens, as far as they are seen from now on.

        Its new blocks ([] if it already does), or None and no change if there are too few.
        """
        self._retire(seq)
        missing = max(-(-num_tokens // self.block_size) - len(seq.block_table), 0)
        while self.num_available < missing:
            if not self.end_lease():
                return None
        blocks = self._allocate(missing)
        seq.block_table += blocks
        return blocks

    def _allocate(self, count: int) -> list[int]:
        short = count - self.pool.num_free
        if short > 0 and self.cache is not None:
            self.cache.evict(short)
        return self.pool.allocate(count)

    def _is_seen(self, index: int, position: int) -> bool:
        """Whether a table's block is kept for a token at `position` or later: all that it sees, and a little more."""
        if not self.limits.window or index * self.block_size < self.limits.sinks:
            return True
        first = max(position - self.limits.window + 1, 0) // RETIRE_ALIGN * RETIRE_ALIGN
        return (index + 1) * self.block_size > first

    def _retire(self, seq: Sequence) -> None:
        """Give back what has left the window: with that the blocks of a sequence go round in a circle."""
        if not self.limits.window:
            return
        end = seq.num_retired
        while end < len(seq.block_table) and (
            end * self.block_size < self.limits.sinks or not self._is_seen(end, seq.num_computed)
        ):
            end += 1
        gone = [i for i in range(seq.num_retired, end) if i * self.block_size >= self.limits.sinks]
        if gone and seq.block_table[gone[-1]] != HOLE and (gone[-1] + 1) * self.block_size <= seq.num_completed:
            self.publish(seq, seq.num_completed)
        self.pool.free_all([seq.block_table[i] for i in gone])
        for i in gone:
            seq.block_table[i] = HOLE
        seq.num_retired = end

    # ---- taking back

    def publish(self, seq: Sequence, num_tokens: int, *, partial: bool = False, running: bool = True) -> None:
        """Let others find the first `num_tokens` tokens, which steps that have run computed: full blocks, and with
        `partial` what is in the last one.
        """
        full = num_tokens // self.block_size
        count = num_tokens if partial else full * self.block_size
        if self.cache is None or not count or (full == seq.num_published and not partial):
            return
        blocks = seq.block_table[: -(-count // self.block_size)]
        if running and self._is_twin(seq, blocks[:full]):
            return
        kept = self.cache.insert(self.namespace(seq), seq.tokens(count).copy(), blocks)
        if self._tiers is not None:
            keys = self._keys(seq, full)
            new = (i for i in range(seq.num_published, full) if kept[i] == blocks[i] != HOLE)
            self.saves += [Save(keys[i], blocks[i]) for i in new]
        seq.num_published = full

    def _is_twin(self, seq: Sequence, blocks: list[int]) -> bool:
        """Whether the cache has other blocks for the same tokens: what followed on ours could not be evicted in order.

        Such a sequence publishes when it ends.
        """
        assert self.cache is not None
        match = self.cache.match(self.namespace(seq), seq.tokens(len(blocks) * self.block_size))
        return any(
            own != cached for own, cached in zip(blocks, match.blocks, strict=False) if HOLE not in (own, cached)
        )

    def release(self, seq: Sequence, now: float = 0.0, *, lease: bool = False) -> None:
        """Drop the whole table; what has been computed stays in the cache, with a lease for its session."""
        self.publish(seq, seq.num_completed, partial=True, running=False)
        if lease and self.cache is not None and seq.request.session_id is not None and seq.num_completed:
            match = self.cache.match(self.namespace(seq), seq.tokens(seq.num_completed))
            blocks = match.blocks + ([] if match.tail is None else [match.tail])
            self.pool.share_all(blocks)
            self.pool.free_all(self.leases.begin((seq.request.tenant, seq.request.session_id), blocks, now))
        # Tail first, so that free blocks are handed out again in their old order.
        self.pool.free_all(reversed(seq.block_table))
        seq.block_table.clear()
        seq.num_computed = seq.num_completed = seq.num_retired = seq.num_published = 0

    def expire_leases(self, now: float) -> None:
        self.pool.free_all(self.leases.expired(now))

    # ---- lower tiers

    def _keys(self, seq: Sequence, count: int) -> list[bytes]:
        assert self._tiers is not None
        if len(seq.keys) < count:
            root = root_key(self._kv_identity, *self.namespace(seq))
            block_keys(root, seq.tokens(count * self.block_size), self.block_size, seq.keys)
        return seq.keys[:count]

    def take_finished(self) -> list[Loaded]:
        """Loads that have ended since the last call."""
        return self._tiers.finished() if self._tiers is not None else []

    def check_idle(self) -> None:
        """While no sequence holds blocks, none is lost. Constant time for each lease: cheap enough for every pause."""
        missing = self.limits.num_blocks - self.num_available
        leased = sum(len(lease.blocks) for lease in self.leases)  # leases may share blocks
        assert 0 <= missing <= leased, f"{missing} blocks are held, leases have {leased}"

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Every reference of the pool has its owner; `holders` are all sequences that hold blocks."""
        self.pool.check_integrity()
        if self.cache is not None:
            self.cache.check_integrity()
        held: Counter[int] = Counter()
        for lease in self.leases:
            held.update(block for block in lease.blocks if block != HOLE)
        for seq in holders:
            own = [block for block in seq.block_table if block != HOLE]
            assert len(set(own)) == len(own), f"{seq.request_id}: a block is in its table twice"
            held.update(own)
        for block in range(self.pool.num_blocks):
            count = held[block] + self.pool.is_cached(block)
            assert self.pool.references(block) == count, f"block {block}: {count} owners, another count in the pool"
