"""Gives sequences the KV blocks they need, and takes them back into the prefix cache, where later sequences find them.

    free --reserve--> a sequence's --publish--> also the cache's --release--> the cache's alone (idle) --evict--> free
                                                      ^------------ find, acquire -------------'

References (BlockPool) count the owners of a block: sequences, the cache, and leases of sessions. An idle block is owned
by the cache alone and is as good as free.

Every class of layers (models.kv_layout) has its own tables and its own cache. All classes take their blocks from one
pool. A class with several groups takes stripes, with one block for each group. A table names a stripe by its first
block.
"""

from __future__ import annotations

from collections.abc import Iterable

from lmkit.turbo.decisions import DecisionStats
from lmkit.turbo.kv.block_pool import BlockPool
from lmkit.turbo.kv.class_tables import ClassTables, seen_below
from lmkit.turbo.kv.growth import Growth
from lmkit.turbo.kv.integrity import check_owners
from lmkit.turbo.kv.leases import Leases
from lmkit.turbo.kv.ledger import Ledger
from lmkit.turbo.kv.limits import KVLimits as KVLimits
from lmkit.turbo.kv.origins import CACHE, Origins, tiers_of
from lmkit.turbo.kv.prefix import Prefix as Prefix
from lmkit.turbo.kv.radix_cache import HOLE, Match, Namespace, RadixCache
from lmkit.turbo.kv.snapshots import Snapshots
from lmkit.turbo.kv.tiers.keys import block_keys, group_keys, root_key
from lmkit.turbo.kv.tiers.store import Loaded, TierStore
from lmkit.turbo.plan import Load, Save
from lmkit.turbo.sequence import BlockTable, Sequence, Status


class KVManager:
    """The only writer of `Sequence.tables`. Stripe i of a table holds the tokens from i * block_size on."""

    def __init__(
        self, limits: KVLimits, decision_stats: DecisionStats, tiers: TierStore | None = None, kv_identity: bytes = b""
    ) -> None:
        """kv_identity: a digest of everything that decides the content of a block, besides tokens, tenant and salt."""
        self.limits = limits
        self.decision_stats = decision_stats
        self.pool = BlockPool(limits.num_blocks)
        self.block_size = limits.block_size
        self.leases = Leases(limits.session_lease, self.pool)
        self.copies: list[tuple[int, int]] = []  # for the next plan, as are loads and saves
        self.loads: list[Load] = []
        self.saves: list[Save] = []
        quota = max(1, int(limits.cache_quota * limits.num_blocks)) if limits.cache_quota < 1 else None
        self._ledger = Ledger(quota)
        self.growth = Growth(self.pool, self._ledger)
        self._classes = ClassTables.of(limits, self.pool, self._ledger)
        self._has_windows = any(layers.window for layers in self._classes)
        self._nothing = Prefix((Match([], 0, None),) * len(limits.classes), 0)
        self._tiers = tiers if limits.prefix_cache else None
        self.state_parts = self._tiers.blocks.state_parts if self._tiers is not None and limits.snapshots else 0
        rows = limits.snapshots
        self.snapshots = Snapshots(rows, limits.block_size, self.pool, self._ledger, self.state_parts) if rows else None
        self._kv_identity = kv_identity
        self._num_loads, self.origins = 0, Origins()

    @property
    def caches(self) -> list[RadixCache]:
        """The cache of each class; empty if the prefix cache is off."""
        return [layers.cache for layers in self._classes if layers.cache is not None]

    @property
    def num_available(self) -> int:
        """Blocks that `reserve` can give: free and idle ones."""
        return self.pool.num_free + self.pool.num_idle

    def num_for(self, prefix: Prefix, without: Iterable[Sequence] = ()) -> int:
        """How many blocks a sequence with this prefix could have if the sequences `without` released theirs."""
        return self.num_available + prefix.num_freed(self.pool, without)

    def wait(self, seconds: float) -> None:
        if self._tiers is not None:
            self._tiers.wait(seconds)

    def kept_since(self, now: float) -> float | None:
        """See Ledger. None: a lower tier may have what a cache lost, or there is no cache."""
        return self._ledger.kept_since(now) if self._tiers is None and self.caches else None

    def tier_stats(self) -> dict[str, int]:
        return self._tiers.stats() if self._tiers is not None else {}

    def namespace(self, seq: Sequence) -> Namespace:
        """The namespace of the sequence's blocks. It decides their content besides the tokens, and who may see them."""
        return self.limits.namespace(seq)

    # ---- finding

    def find(self, seq: Sequence) -> Prefix:
        """Look up the cached prefix of a sequence that holds no blocks.

        It covers at most all tokens but the last, which must be computed for its logits.
        """
        if not self.limits.prefix_cache or seq.max_cached < 1:
            return self._nothing
        prefix = self._match(seq, seq.max_cached)
        return prefix if self.snapshots is None else self.snapshots.reachable(prefix)

    def _match(self, seq: Sequence, count: int) -> Prefix:
        """The longest prefix of at most `count` tokens from which every class can continue."""
        namespace, caches = self.namespace(seq), self.caches
        matches = [cache.match(namespace, seq.cached_as(count)) for cache in caches]
        while (count := min(match.num_tokens for match in matches)) < max(match.num_tokens for match in matches):
            matches = [  # with a window, a match for more tokens need not be valid for fewer
                match if match.num_tokens == count else cache.match(namespace, seq.cached_as(count))
                for match, cache in zip(matches, caches, strict=True)
            ]
        return Prefix(tuple(matches), matches[0].num_tokens)

    def find_below(self, seq: Sequence, prefix: Prefix) -> tuple[Prefix, list[bytes]]:
        """Return the prefix up to its last full block, and the keys of the next full blocks that a lower tier has, and
        those of the parts of a recurrent state."""
        full = seq.max_cached // self.block_size
        if self._tiers is None or not full:
            return prefix, []
        awaited = bool(seq.kv_from) and self._tiers.can_await  # the other engine computes the prompt
        if self.snapshots is not None:
            return self.snapshots.find_below(prefix, self.keys(seq, full), self._tiers, awaited=awaited)
        prefix = self._without_tail(seq, prefix)
        keys, found = self.keys(seq, full), prefix.num_full
        self._tiers.touch(self._of_groups(keys[:found]))
        if awaited:
            return prefix, keys[found : seq.num_prompt_tokens // self.block_size]
        count = self._tiers.lookup(self._of_groups(keys[found:])) // self.limits.num_groups
        return prefix, keys[found : found + count]

    def _without_tail(self, seq: Sequence, prefix: Prefix) -> Prefix:
        count = prefix.num_full * self.block_size
        if self._has_windows and count < prefix.num_tokens:
            return self._match(seq, count)
        return Prefix(tuple(Match(match.blocks, count, None) for match in prefix.matches), count)

    def load_seconds(self, prefix: Prefix, keys: list[bytes]) -> float:
        """The expected time to load the blocks with `keys`, which follow the prefix."""
        assert self._tiers is not None
        start = prefix.num_full
        wanted = seen_below(self._classes, range(start, start + len(keys)), self.block_size)
        return self._tiers.load_seconds([key for i, c in wanted for key in self._of_groups([keys[i - start]], c)])

    # ---- giving

    def end_lease(self) -> bool:
        """End the lease that would end first because blocks are needed. Returns False if there is no lease."""
        if not len(self.leases):
            return False
        self.decision_stats.decisions["lease ended: blocks needed"] += 1
        self.leases.end_first()
        return True

    def acquire(self, seq: Sequence, prefix: Prefix) -> None:
        """Start the tables with the prefix that was just found. The tails need room for one block in each group."""
        assert not seq.tables, "the sequence holds blocks already"
        full = prefix.num_full * self.block_size
        seq.num_computed, seq.num_completed = prefix.num_tokens, min(full, prefix.num_tokens)
        seq.num_found, seq.kv_sources = prefix.num_tokens, [CACHE] * (prefix.num_tokens // self.block_size)
        if self.snapshots is not None:
            self.snapshots.begin(seq, prefix)
        seq.tables = [BlockTable(list(match.blocks), num_published=len(match.blocks)) for match in prefix.matches]
        for table in seq.tables:
            self.pool.share_all(table.blocks)
        tails = [match.tail for match in prefix.matches if match.tail is not None]
        self.pool.share_all(tails)  # no other class may write to them before they are copied
        for layers, table, tail in zip(self._classes, seq.tables, tails, strict=False):
            sources = self.pool.stripe(tail)
            self.pool.free(tail)  # it may be evicted for its own copy: its content is still there when the copy is made
            (block,) = self._allocate(1, len(layers.groups))
            self.copies += zip(sources, self.pool.stripe(block), strict=True)
            table.blocks.append(block)
        if seq.request.gives_kv and self._tiers is not None:  # the tiers may have lost what the device still has
            for layers, table in zip(self._classes, seq.tables, strict=True):
                self._save(seq, layers, table.blocks[: prefix.num_full], 0)
            if self.snapshots is not None:
                self.saves += self.snapshots.saves(self.snapshots.begun(seq), self.keys(seq, prefix.num_full))

    def acquire_below(self, seq: Sequence, prefix: Prefix, keys: list[bytes], seconds: float = 0.0) -> int:
        """Start the tables with a prefix that has no tail, followed by the blocks with `keys`.

        There must be room for them. Returns the job that loads them. An engine that computes them gets `seconds`.
        """
        self.acquire(seq, prefix)
        keys, parts = keys[: len(keys) - self.state_parts], keys[len(keys) - self.state_parts :]
        start, end = prefix.num_full, prefix.num_full + len(keys)
        wanted = seen_below(self._classes, range(start, end), self.block_size)
        for c, (layers, table) in enumerate(zip(self._classes, seq.tables, strict=True)):
            layers.punch(table, layers.unseen(range(start), end * self.block_size))
            indices = [i for i, wanted_class in wanted if wanted_class == c]
            table.blocks += [HOLE] * len(keys)
            for i, block in zip(indices, self._allocate(len(indices), len(layers.groups)), strict=True):
                table.blocks[i] = block
        load = Load(self._num_loads + 1, [], [], seq.kv_from, seconds)
        if seq.kv_from:
            seq.kv_from, seq.load_job = "", load.job
        for i, c in wanted:
            load.keys.extend(self._of_groups([keys[i - start]], c))
            load.blocks.extend(self.pool.stripe(seq.tables[c].blocks[i]))
        if self.snapshots is not None:
            load.keys.extend(parts)
            load.blocks.extend(self.snapshots.take_loaded(seq, end * self.block_size))
        self._num_loads += 1
        self.loads.append(load)
        return load.job

    def take_loaded(self, seq: Sequence, done: Loaded) -> int:
        """Take in the sequence's load, which has ended: loaded blocks count as computed, the other blocks are returned.

        Returns the number of loaded tokens.
        """
        if self.snapshots is not None:
            return self._take_state(seq, done)
        first = seq.num_computed // self.block_size
        rows = [table.blocks[first:] for table in seq.tables]
        if done.num_blocks == sum(self.pool.size(block) for row in rows for block in row if block != HOLE):
            count = len(rows[0])
        elif any(HOLE in table.blocks for table in seq.tables):  # with a window a partial load is useless
            self._drop(seq)
            self.acquire(seq, self._without_tail(seq, self.find(seq)))
            return 0
        else:
            count = done.num_blocks // self.limits.num_groups
        for table in seq.tables:
            self.pool.free_all(table.blocks[first + count :])
            del table.blocks[first + count :]
        seq.kv_sources[first:] = tiers_of(rows, self.pool, done.tiers)[:count]
        seq.num_computed += count * self.block_size
        seq.num_completed = seq.num_found = seq.num_computed
        self.publish(seq, seq.num_completed)
        return count * self.block_size

    def _take_state(self, seq: Sequence, done: Loaded) -> int:
        """As `take_loaded`. The cache gets it, and the sequence begins with what is found: blocks need the state."""
        (table,), (state,) = seq.tables, seq.snapshots
        wanted = table.blocks[table.num_published :]
        if is_whole := done.num_blocks == len(wanted) + self.state_parts:
            seq.num_completed = state.num_tokens
            seq.kv_sources = [CACHE] * table.num_published + tiers_of([wanted], self.pool, done.tiers)
            self.publish(seq, seq.num_completed)
        self._drop(seq)
        self.acquire(seq, self.find(seq))
        return state.num_tokens if is_whole else 0

    def reserve(self, seq: Sequence, num_tokens: int, whole: int = 0) -> list[list[int]] | None:
        """Make the tables hold those of the first `num_tokens` tokens that are seen from now on.

        Classes that see everything also hold the first `whole` tokens. Returns the new blocks of each group ([] if
        there are none). If there are too few blocks, it allocates none and returns None.
        """
        if not seq.tables:
            seq.tables = [BlockTable([]) for _ in self._classes]
        if not self._has_windows and max(num_tokens, whole) <= len(seq.tables[0].blocks) * self.block_size:
            return []  # nearly every decoding sequence; without windows all tables are equally long
        missing, needed = [], 0
        for layers, table in zip(self._classes, seq.tables, strict=True):
            if gone := layers.leaving(table, seq.num_computed):
                if table.blocks[gone[-1]] != HOLE and (gone[-1] + 1) * self.block_size <= seq.num_completed:
                    self._publish(seq, layers, table, seq.num_completed)
                layers.punch(table, gone)
            end = num_tokens if layers.window else max(num_tokens, whole)
            count = max(-(-end // self.block_size) - len(table.blocks), 0)
            missing.append(count)
            needed += count * len(layers.groups)
        if not needed:
            return []
        while self.num_available < needed:
            if not self.end_lease():
                return None
        new = []
        for layers, table, count in zip(self._classes, seq.tables, missing, strict=True):
            blocks = self._allocate(count, len(layers.groups))
            table.blocks += blocks
            new += layers.by_group(blocks)
        return new

    def block_tables(self, seq: Sequence) -> list[list[int]]:
        """The sequence's block table of each group."""
        pairs = zip(self._classes, seq.tables, strict=True)
        return [row for layers, table in pairs for row in layers.by_group(table.blocks)]

    def _allocate(self, count: int, size: int) -> list[int]:
        short = self.growth.lacking(count * size)
        if short > 0 and self.limits.prefix_cache:
            self._ledger.evict(short)
        return self.pool.allocate(count, size)

    # ---- taking back

    def publish(self, seq: Sequence, num_tokens: int, *, partial: bool = False, running: bool = True) -> None:
        """Let others find the KV of the first `num_tokens` tokens, which completed steps have computed.

        Full blocks are published. With `partial` the content of a partly filled last block is published too.
        """
        partial = partial and (self.snapshots is None or self.snapshots.stands_after(seq, num_tokens))
        for layers, table in zip(self._classes, seq.tables, strict=False):
            self._publish(seq, layers, table, num_tokens, partial=partial, running=running)
        if self.snapshots is not None and any(taken.num_tokens <= num_tokens for taken in seq.snapshots):
            (match,) = self._match(seq, num_tokens).matches
            given = self.snapshots.publish(seq, match, ended=not running or seq.status is Status.FINISHED)
            if self._tiers is not None:
                self.saves += self.snapshots.saves(given, self.keys(seq, num_tokens // self.block_size))

    def _publish(
        self,
        seq: Sequence,
        layers: ClassTables,
        table: BlockTable,
        num_tokens: int,
        *,
        partial: bool = False,
        running: bool = True,
    ) -> None:
        """Publish the blocks of one class."""
        full = num_tokens // self.block_size
        count = num_tokens if partial else full * self.block_size
        if layers.cache is None or not count or (full <= table.num_published and not partial):
            return
        blocks = table.blocks[: -(-count // self.block_size)]
        if running and layers.has_twin(self.namespace(seq), seq.cached_as(full * self.block_size), blocks[:full]):
            return
        kept = layers.cache.insert(self.namespace(seq), seq.cached_as(count).copy(), blocks, seq)
        own = [block if block == found else HOLE for block, found in zip(blocks, kept, strict=False)]
        self.origins.note(seq, own[:full], table.num_published)
        if self._tiers is not None:
            self._save(seq, layers, own[:full], table.num_published)
        table.num_published = max(table.num_published, full)

    def _save(self, seq: Sequence, layers: ClassTables, blocks: list[int], first: int) -> None:
        """Let the tiers keep these blocks of a class, the first of its sequence, from `first` on."""
        keys = self.keys(seq, len(blocks))
        for i in range(first, len(blocks)):
            if blocks[i] != HOLE:
                named = self._of_groups(keys[i : i + 1], self._classes.index(layers))
                self.saves += map(Save, named, self.pool.stripe(blocks[i]))

    def release(self, seq: Sequence, now: float = 0.0, *, lease: bool = False) -> None:
        """Drop the whole tables. The computed KV stays in the cache; with `lease` its session gets a lease on it."""
        self.publish(seq, seq.num_completed, partial=True, running=False)
        if lease:
            self.hold(seq, seq.num_completed, now)
        self._drop(seq)

    def hold(self, seq: Sequence, num_tokens: int, now: float) -> None:
        """Give the sequence's session a lease on what the cache has of its first `num_tokens` tokens."""
        session = seq.request.session_id
        if self.limits.prefix_cache and session is not None and num_tokens:
            self.leases.begin((seq.request.tenant, session), self._match(seq, num_tokens).matches, now)

    def _drop(self, seq: Sequence) -> None:
        for table in seq.tables:  # tail first, so that free blocks are handed out again in their old order
            self.pool.free_all(reversed(table.blocks))
        seq.tables = []
        if self.snapshots is not None:
            self.snapshots.drop(seq)
        seq.num_computed = seq.num_completed = seq.num_behind = 0

    # ---- lower tiers

    def keys(self, seq: Sequence, count: int) -> list[bytes]:
        """The keys of the sequence's first blocks."""
        if len(seq.keys) < count:
            root = root_key(self._kv_identity, *self.namespace(seq))
            block_keys(root, seq.cached_as(count * self.block_size), self.block_size, seq.keys, seq.digests)
        return seq.keys[:count]

    def _of_groups(self, keys: list[bytes], c: int | None = None) -> list[bytes]:
        """The keys of the blocks of all groups, or of the groups of class `c`, ordered by tokens first."""
        count = self.limits.num_groups
        return keys if count == 1 else group_keys(keys, range(count) if c is None else self._classes[c].groups)

    def clear_tiers(self) -> None:
        """Forget what lower tiers have, and what is to be saved."""
        self.saves = []
        if self._tiers is not None:
            self._tiers.clear()

    def cancel(self, seq: Sequence) -> None:
        """End its load soon if that waits for another engine."""
        if self._tiers is not None and seq.load_job:
            self._tiers.cancel(seq.load_job)

    def take_finished(self) -> list[Loaded]:
        """Loads that have ended since the last call."""
        return self._tiers.finished() if self._tiers is not None else []

    def check_idle(self) -> None:
        """Check that no block is lost while no sequence holds blocks. It is cheap enough for every pause."""
        missing = self.limits.num_blocks - self.num_available
        leased = sum(self.pool.size(block) for lease in self.leases for block in lease.blocks if block != HOLE)
        assert 0 <= missing <= leased, f"{missing} blocks are held, leases have {leased}"  # they may share blocks

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Check that every reference of the pool has its owner. `holders` are all sequences that hold blocks."""
        holders = list(holders)
        if self.snapshots is not None:
            self.snapshots.check_integrity(holders)
        check_owners(self.pool, self.caches, self.leases, holders)
