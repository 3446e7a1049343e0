"""Cache hits that are computed again, while nothing else is to be done: the cached KV must have the same bits.

One hit in so many is audited. A piece of its tokens, as many as a short step computes, is computed from the tokens
themselves and from the blocks before them, which were audited a moment ago. Then it is compared with the cache's
blocks. Models with recurrent states have no such beginnings: their prefixes are computed as one piece.

If a block differs, the cache drops it and all that continue it, and the tiers drop everything, because no key says what
else was computed from the block. No request runs meanwhile.

Audits run as next turns do: while no request waits or runs, after the next turns, within what requests may lose
(scheduling.allowance). What differs is an error: bits do not depend on what is computed beside them
(docs/architecture.md).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from lmkit.errors import RequestError
from lmkit.log import get_logger
from lmkit.turbo.kv.origins import whose
from lmkit.turbo.kv.radix_cache import HOLE
from lmkit.turbo.request import Request, SamplingParams
from lmkit.turbo.scheduling.planner import Planner
from lmkit.turbo.sequence import RUNNING, Sequence

MAX_WAITING = 16  # hits; one more is dropped
MAX_KNOWN = 4096  # prefixes that were audited last: of several hits another one is taken
PATIENCE = 0.1  # of an interval, for which such a hit is waited for
COUNTS = ("hits", "done", "dropped", "tokens", "differences", "removed_blocks")

log = get_logger(__name__)


class StoredKV(Protocol):
    """The bytes of the device's blocks, and of its rows of recurrent states."""

    def same_block(self, a: int, b: int) -> bool: ...
    def same_state(self, a: int, b: int) -> bool: ...


@dataclass
class Audit:
    """A hit, and the first tokens of it that were found right."""

    request: Request  # that had it
    ids: list[int]  # of whole blocks, or those after which the state stands
    done: int = 0


class Audits:
    """What waits, and what became of it. `next_turns` runs the sequences that it makes."""

    def __init__(
        self,
        every: int,
        planner: Planner,
        make: Callable[[Request], Sequence],
        stored: StoredKV | None,
    ) -> None:
        """`every`: see SchedulerLimits.audit. `make`: the sequence of a request; it may raise RequestError."""
        self._every = every if stored is not None else 0
        self._planner, self._make, self._stored = planner, make, stored
        self._waiting: deque[Audit] = deque()
        self._known: OrderedDict[int, None] = OrderedDict()
        self._since = 0  # hits since the last one that was taken
        self._running: Sequence | None = None
        self._counts: Counter[str] = Counter()

    def stats(self) -> dict[str, int]:
        """Hits, those of them that were audited to their end or not, tokens computed for it, and what differed."""
        return {name: self._counts[name] for name in COUNTS} if self._every else {}

    # ---- hits

    def note(self, seq: Sequence) -> None:
        """A request begins, with what the cache had of its prompt."""
        size, request = self._planner.kv.block_size, seq.request
        count = seq.cached_tokens or 0
        count = count if self._planner.kv.snapshots is not None else count // size * size
        longest = self._planner.limits.kv.dynamic_length
        is_long = bool(longest) and seq.num_prompt_tokens > longest  # its angles are those of its own length
        if not (self._every and count) or request.images or request.second_start is not None or is_long:
            return
        self._counts["hits"] += 1
        self._since += 1
        if self._since < self._every:
            return
        tokens = seq.cached_as(count)
        name = hash((self._planner.kv.namespace(seq), tokens.tobytes()))
        if name in self._known and self._since < self._every * (1 + PATIENCE):
            return
        self._known[name] = None
        self._known.move_to_end(name)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        self._since = 0
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(Audit(request, tokens.tolist()))
        else:
            self._counts["dropped"] += 1

    # ---- pieces

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def context(self) -> int:
        """The tokens after which the next piece begins."""
        return self._waiting[0].done if self._waiting else 0

    def next(self, num_tokens: Callable[[int], int]) -> Sequence | None:
        """The next piece of the oldest hit. `num_tokens`: of a step after so many tokens of a prompt."""
        kv = self._planner.kv
        while self._waiting:
            audit = self._waiting[0]
            count = max(num_tokens(audit.done) // kv.block_size, 1) * kv.block_size
            end = len(audit.ids) if kv.snapshots is not None else min(audit.done + count, len(audit.ids))
            like = audit.request
            request = Request(
                request_id=f"{like.request_id}-audit",
                prompt_ids=audit.ids[:end],
                params=SamplingParams(max_tokens=0),
                tenant=like.tenant,
                weight=like.weight,
                cache_salt=like.cache_salt,
                adapter=like.adapter,
                is_ahead=True,
                max_cached=audit.done,
            )
            try:
                self._running = self._make(request)
            except RequestError:  # its adapter has gone
                self.drop()
                continue
            return self._running
        return None

    def runs(self, seq: Sequence | None) -> bool:
        """Whether this sequence is the piece that runs."""
        return seq is not None and seq is self._running

    def leave(self) -> None:
        """The piece that runs has ended, or gives way."""
        self._running = None

    def drop(self) -> None:
        """The oldest hit cannot be audited."""
        self._waiting.popleft()
        self._counts["dropped"] += 1
        self._running = None

    def computes(self, seq: Sequence, count: int) -> None:
        """A step has computed `count` tokens of the piece. If it is whole, compare it, before anything is published."""
        self._counts["tokens"] += count
        if seq.num_completed < seq.num_prompt_tokens or seq.status is not RUNNING:
            return
        audit = self._waiting[0]
        index = self._differs(seq)
        if index is not None:
            self._waiting.popleft()
            self._remove(seq, audit, index)
        elif (done := seq.num_prompt_tokens) < len(audit.ids):
            audit.done = done
        else:
            self._waiting.popleft()
            self._counts["done"] += 1

    def _differs(self, seq: Sequence) -> int | None:
        """The first block of tokens whose KV is another in the cache, or the one after which the state is."""
        kv, stored, found = self._planner.kv, self._stored, list[int]()
        assert stored is not None
        tokens = seq.cached_as(seq.num_prompt_tokens)
        for cache, table in zip(kv.caches, seq.tables, strict=True):
            match = cache.match(kv.namespace(seq), tokens)
            for i, (a, b) in enumerate(zip(table.blocks, match.blocks, strict=False)):
                if a != b and HOLE not in (a, b) and not self._same(a, b):
                    found.append(i)
                    break
        if not found and kv.snapshots is not None and (rows := kv.snapshots.rows_after(seq, match)) is not None:
            found += [] if stored.same_state(*rows) else [(seq.num_prompt_tokens - 1) // kv.block_size]
        return min(found, default=None)

    def _same(self, a: int, b: int) -> bool:
        assert self._stored is not None
        pool = self._planner.kv.pool
        return all(map(self._stored.same_block, pool.stripe(a), pool.stripe(b)))

    # ---- what differs

    def _remove(self, seq: Sequence, audit: Audit, index: int) -> None:
        """Drop a block of the sequence's tokens, and whatever was computed from it."""
        kv, size = self._planner.kv, self._planner.kv.block_size
        tokens, namespace = seq.cached_as(seq.num_prompt_tokens), kv.namespace(seq)
        matches = [cache.match(namespace, tokens[: (index + 1) * size]).blocks[index:] for cache in kv.caches]
        origins = sorted({kv.origins.text(block) for match in matches for block in match if block != HOLE})
        nodes = [(cache, cache.derived(namespace, tokens, index)) for cache in kv.caches]
        blocks = [block for _, found in nodes for node in found for block in node.blocks if block != HOLE]
        assert all(map(self.runs, self._planner.slots)), "a request runs beside an audit"
        for cache, found in nodes:
            if found:
                cache.remove(found)
        kv.clear_tiers()
        self._counts["differences"] += 1
        self._counts["removed_blocks"] += len(blocks)
        log.error(
            "cached KV of tokens %d to %d is not what they are computed to: %d blocks are dropped, all tiers emptied. "
            "The block: %s. Found by a hit of %s. Is this machine's memory sound?",
            index * size, (index + 1) * size, len(blocks), "; ".join(origins) or "gone",
            whose(audit.request.request_id, audit.request.tenant),
        )  # fmt: skip
