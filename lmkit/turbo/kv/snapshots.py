"""Snapshots of recurrent state: a prefix whose blocks are cached can be continued where a snapshot stands after it.

    rows of states   0 ..               one for each slot of the batch
                     limits.snapshots   free --a step--> a sequence's --publish--> a cached block's --evict--> free

A snapshot stands after the last token of a full block, or of a partly filled one where what is computed ahead ends. A
step takes it on its way (ops.gated_delta) into a row that the sequence owns. When that block is in the prefix cache,
the row becomes the block's, and it is found with it. A block that leaves the cache takes its snapshot along. If a row
is needed and none is free, a snapshot goes, and its block stays: the one used longest ago of those that were found once
at most, as long as they have a part of the rows.

Of a prompt two snapshots are kept: one after its last full block, and one where it leaves a path that the cache has,
because others will leave it there, too. Beside these a sequence keeps its newest one, which is published when it ends
or is preempted.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any

from lmkit.turbo.kv.block_log import BlockLog
from lmkit.turbo.kv.block_pool import BlockPool
from lmkit.turbo.kv.ledger import Ledger
from lmkit.turbo.kv.prefix import Prefix
from lmkit.turbo.kv.radix_cache import Match
from lmkit.turbo.kv.tiers.keys import state_keys
from lmkit.turbo.kv.tiers.store import TierStore
from lmkit.turbo.plan import Save
from lmkit.turbo.sequence import Sequence, Snapshot, Use

POPULAR_SHARE = 0.75  # of the rows, at most, for snapshots that several sequences have left the same path at


class Snapshots:
    """The rows of a model's snapshots, and the block that each of them stands after."""

    def __init__(self, rows: range, block_size: int, pool: BlockPool, ledger: Ledger, parts: int = 0) -> None:
        """ledger: that of the cache. parts: those of a state that a tier keeps, see turbo.kv.blocks."""
        self.num_evicted = 0  # for other snapshots
        self.log: BlockLog | None = None  # that of the cache
        self._rows, self._block_size, self._pool, self._ledger, self._parts = rows, block_size, pool, ledger, parts
        self._free = list(reversed(rows))
        self._of_block: dict[int, int] = {}  # block -> row
        # The blocks of these, the one used longest ago first, and whether it was found.
        self._new: OrderedDict[int, bool] = OrderedDict()
        self._popular: OrderedDict[int, bool] = OrderedDict()
        self._used: dict[int, int] = {}  # block -> last use, in ticks of the ledger
        self._read: Counter[int] = Counter()  # row -> sequences that begin with it
        self._left: set[int] = set()  # rows that are read, and whose blocks the cache has lost
        pool.on_drop = self._forget

    def stats(self) -> dict[str, Any]:
        """Fields of EngineStats."""
        used, total = len(self._rows) - len(self._free), len(self._rows)
        return {"snapshots_used": used, "snapshots_total": total, "evicted_snapshots": self.num_evicted}

    def reachable(self, prefix: Prefix) -> Prefix:
        """All full blocks of the prefix. Of their tokens those before the last snapshot need not be computed. With a
        snapshot after its tail the prefix itself."""
        (match,), size = prefix.matches, self._block_size
        if match.tail in self._of_block:
            return prefix
        count = next((i for i in range(prefix.num_full, 0, -1) if match.blocks[i - 1] in self._of_block), 0)
        return Prefix((Match(match.blocks, prefix.num_full * size, None),), count * size)

    def find_below(
        self, prefix: Prefix, keys: list[bytes], tiers: TierStore, *, awaited: bool = False
    ) -> tuple[Prefix, list[bytes]]:
        """The first blocks of the prefix, and the keys of what a tier has after them: further blocks, and the parts of
        the last state that stands after one of all these. `keys` are those of the prompt's blocks. Without such a
        state, or a row for it, the whole prefix and no keys. `awaited`: an engine computes all of these blocks."""
        (match,), size = prefix.matches, self._block_size

        def up_to(count: int) -> tuple[Prefix, list[bytes]]:
            held, parts = match.blocks[:count], state_keys(keys[count - 1], self._parts)
            return Prefix((Match(held, len(held) * size, None),), 0), keys[len(held) : count] + parts

        tiers.touch(keys[: prefix.num_full])
        if not (self._free or self._unread()):
            return prefix, []
        if awaited:
            return up_to(len(keys))
        first, most = prefix.num_tokens // size, prefix.num_full + tiers.lookup(keys[prefix.num_full :])
        states = [part for key in keys[first:most] for part in state_keys(key, 1)]
        while found := tiers.last(states):
            parts = state_keys(keys[first + found - 1], self._parts)
            if tiers.lookup(parts) == len(parts):
                return up_to(first + found)
            del states[found - 1 :]
        return prefix, []

    def take_loaded(self, seq: Sequence, num_tokens: int) -> range:
        """The numbers of the parts of a row, into which the state after the sequence's first tokens is loaded."""
        row = self._take(seq)
        seq.snapshots.append(Snapshot(row, num_tokens, Use.PROMPT))
        return self._numbers(row)

    def saves(self, given: list[Snapshot], keys: list[bytes]) -> list[Save]:
        """What lets a tier keep these snapshots of a sequence whose full blocks have these keys."""
        size, parts = self._block_size, self._parts
        of_states = ((state_keys(keys[at // size - 1], parts), row) for row, at, _ in given if not at % size)
        return [save for parts, row in of_states for save in map(Save, parts, self._numbers(row))]

    def begun(self, seq: Sequence) -> list[Snapshot]:
        """The snapshot that the sequence, which computes its first tokens next, begins with."""
        return [Snapshot(seq.state, seq.num_computed, Use.PROMPT)] if seq.state >= 0 else []

    def stands_after(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether the sequence has a snapshot after its first tokens."""
        return any(snapshot.num_tokens == num_tokens for snapshot in seq.snapshots)

    def _numbers(self, row: int) -> range:
        first = self._pool.num_blocks + row * self._parts
        return range(first, first + self._parts)

    def begin(self, seq: Sequence, prefix: Prefix) -> None:
        """Let a sequence go on from the snapshot after its first `num_computed` tokens, which are those of the prefix.

        It gets the blocks after them that the cache has, too. The same bytes are written to them again.
        """
        size, (match,) = self._block_size, prefix.matches
        last = seq.num_tokens - 1
        seq.snapshot_at = {last // size * size: Use.PROMPT}
        if seq.request.is_ahead:  # others go on after its last token; tiers keep states after full blocks alone
            last = seq.num_tokens
            seq.snapshot_at = dict.fromkeys((last, self._parts and last // size * size), Use.PROMPT)
        if (shared := prefix.num_full * size) > seq.num_computed:
            seq.snapshot_at[shared] = Use.SHARED
        if seq.num_computed:
            block = match.blocks[seq.num_computed // size - 1] if match.tail is None else match.tail
            self._found(block)
            seq.state = self._of_block[block]
            self._read[seq.state] += 1

    def fit(self, seq: Sequence, count: int) -> int:
        """Shorten the sequence's next `count` tokens so that there is one wanted snapshot among them at most."""
        inside = sorted(at - seq.num_computed for at in seq.snapshot_at if 0 < at - seq.num_computed <= count)
        return inside[0] if len(inside) > 1 else count

    def of_chunk(self, seq: Sequence, count: int) -> tuple[int, Snapshot]:
        """(the row of states that the sequence's next `count` tokens go on from, the snapshot that they give).

        Row -1 is its own, or none. Accepted draft tokens that the state lacks come before these tokens.
        """
        start, source = seq.num_computed - seq.num_behind, -1
        if seq.has_entered:
            self._let_go(seq)  # the step that reads it is planned
        else:
            source = seq.state
        end = seq.num_computed + count
        wanted = [at for at in seq.snapshot_at if start < at <= end]
        at = wanted[0] if wanted else end // self._block_size * self._block_size
        row = self._take(seq) if at > start else -1
        snapshot = Snapshot(row, at, seq.snapshot_at.get(at, Use.OWN))
        if row >= 0:
            seq.snapshots.append(snapshot)
        return source, snapshot

    def publish(self, seq: Sequence, match: Match, *, ended: bool) -> list[Snapshot]:
        """Give the sequence's snapshots to the blocks of its path in the cache. `ended`: it will take no more. Returns
        those that were given.

        Others may have given these blocks snapshots meanwhile. They are the same.
        """
        last, given = 0, []
        for snapshot in self._completed(seq, match.num_tokens):
            if snapshot.use is Use.OWN and not ended:
                continue
            seq.snapshots.remove(snapshot)
            last = snapshot.num_tokens
            block = self._last_of(match, last)
            if block in self._of_block:
                self._free.append(snapshot.row)
                continue
            self._of_block[block], self._used[block] = snapshot.row, self._ledger.now
            given.append(snapshot)
            if self.log is not None and not last % self._block_size:
                self.log.state_stored(seq, match.blocks[: last // self._block_size])
            order = self._popular if snapshot.use is Use.SHARED else self._new
            order[block] = False
            self._pool.num_changes += 1
        if ended:  # who continues this text begins with its last snapshot
            for block in (self._last_of(match, at) for at in seq.snapshot_at if 0 < at < last):
                if self._new.get(block) is False:
                    self._new.move_to_end(block, last=False)
        return given

    def _last_of(self, match: Match, num_tokens: int) -> int:
        """The block after whose tokens a snapshot stands. One that is not full is the match's last."""
        full, rest = divmod(num_tokens, self._block_size)
        block = match.tail if rest else match.blocks[full - 1]
        assert block is not None, "a snapshot stands after tokens that the cache lacks"
        return block

    def rows_after(self, seq: Sequence, match: Match) -> tuple[int, int] | None:
        """The rows with the state after a prompt: the sequence's own, and the cache's. None if one has none."""
        count = seq.num_prompt_tokens
        own = [taken.row for taken in seq.snapshots if taken.num_tokens == count]
        row = self._of_block.get(self._last_of(match, count)) if match.num_tokens == count else None
        return (own[0], row) if own and row is not None else None

    def drop(self, seq: Sequence) -> None:
        """Free the rows of a sequence that gives up its blocks."""
        self._let_go(seq)
        self._free += [snapshot.row for snapshot in seq.snapshots]
        seq.snapshots = []

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Check that every row is free or has one owner. `holders` are all sequences that hold blocks."""
        held, read = [], Counter[int]()
        for seq in holders:
            held += [snapshot.row for snapshot in seq.snapshots]
            read[seq.state] += seq.state >= 0
        rows = self._free + held + list(self._of_block.values()) + list(self._left)
        assert sorted(rows) == list(self._rows), "a row of states is lost, or has two owners"
        assert +read == +self._read, "a sequence begins with another snapshot"
        assert sorted(self._of_block) == sorted((*self._new, *self._popular)), "out of order"
        assert all(map(self._pool.is_cached, self._of_block)), "a snapshot stands after a block that is not cached"
        assert self._left <= set(+read) <= {*self._of_block.values(), *self._left}, "a snapshot is gone before its use"

    def _completed(self, seq: Sequence, num_tokens: int) -> list[Snapshot]:
        return [snapshot for snapshot in seq.snapshots if snapshot.num_tokens <= num_tokens]

    def _let_go(self, seq: Sequence) -> None:
        if (row := seq.state) >= 0:
            self._read[row] -= 1
            seq.state = -1
            if row in self._left and not self._read[row]:
                self._left.remove(row)
                self._free.append(row)

    def _take(self, seq: Sequence) -> int:
        """A row for the sequence's next snapshot, or -1. It keeps its last completed one until the next is completed,
        too."""
        completed = self._completed(seq, seq.num_completed)
        for snapshot in completed[:-1]:
            if snapshot.use is Use.OWN:
                seq.snapshots.remove(snapshot)
                self._free.append(snapshot.row)
        if not self._free:
            self._evict()
        return self._free.pop() if self._free else -1

    def _found(self, block: int) -> None:
        """A sequence begins with the block's snapshot. When the second does, it is popular."""
        if self._new.get(block):
            self._popular[block] = self._new.pop(block)
        elif block in self._new:
            self._new[block] = True
        (self._popular if block in self._popular else self._new).move_to_end(block)
        self._used[block] = self._ledger.now

    def _evict(self) -> None:
        """Free the row of a snapshot, if possible one whose block no sequence and no lease holds."""
        unread = self._unread()
        idle = (block for block in unread if self._pool.references(block) == 1)
        block = next(idle, unread[0] if unread else None)
        if block is not None:
            self._ledger.lost(self._used[block])
            self._forget((block,))
            self._pool.num_changes += 1
            self.num_evicted += 1

    def _unread(self) -> list[int]:
        """The blocks whose snapshots may be evicted, the first to go first."""
        orders = [self._new, self._popular]
        if len(self._popular) > POPULAR_SHARE * len(self._rows):
            orders.reverse()
        return [block for order in orders for block in order if not self._read[self._of_block[block]]]

    def _forget(self, blocks: Iterable[int]) -> None:
        """The cache has lost these blocks, or their snapshots."""
        for block in blocks:
            if block in self._of_block:
                row = self._of_block.pop(block)
                del self._used[block]
                if self.log is not None:
                    self.log.state_removed(block)
                if self._read[row]:
                    self._left.add(row)
                else:
                    self._free.append(row)
                for order in (self._new, self._popular):
                    order.pop(block, None)
