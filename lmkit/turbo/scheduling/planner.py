"""Writes the plan of a step: each sequence's tokens, admissions and preemptions. See scheduler.py for the rules."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from lmkit.turbo.decisions import DecisionStats
from lmkit.turbo.kv.manager import KVManager, Prefix
from lmkit.turbo.plan import DRAFTED_TOKENS, Chunk, NewSequence, Save
from lmkit.turbo.scheduling import fairness, policy
from lmkit.turbo.scheduling.fairness import Rank, Shares
from lmkit.turbo.scheduling.limits import SchedulerLimits, fitted_to_images
from lmkit.turbo.scheduling.pacing import Pacer
from lmkit.turbo.scheduling.queue import RequestQueue
from lmkit.turbo.scheduling.slots import BatchSlots
from lmkit.turbo.scheduling.under_way import PromptsUnderWay
from lmkit.turbo.sequence import RUNNING, WAITING, Sequence, Status

# If a chunk would leave fewer tokens of its prompt than these, it leaves as many more: a step of few tokens takes as
# long as reading the weights. From 48 tokens on, a CPU with AVX512-VNNI needs the same time for each token.
REST = 64
PATIENCE = 1.0, 4.0  # seconds, and times of computing them here, that another engine may take for blocks


@dataclass
class Step:
    """A plan that is being written."""

    budget: int  # tokens left
    room: int  # tokens left but for the pacer
    now: float
    is_contended: bool  # sequences wait: tokens are charged to their tenants
    new: dict[int, NewSequence] = field(default_factory=dict)  # by slot
    chunks: dict[Sequence, Chunk] = field(default_factory=dict)
    victims: list[Sequence] = field(default_factory=list)
    under_way: PromptsUnderWay | None = None  # None until needed; no look-up follows a preemption
    ranks: list[Rank] | None = None  # of the tenants that wait; None until needed, or since a counter changed
    found: dict[Sequence, tuple[int, Prefix]] = field(default_factory=dict)  # pool.num_changes, cached prefix


@dataclass
class Planner:
    """Moves sequences between the queue and the batch slots. It shares these parts with the scheduler."""

    limits: SchedulerLimits
    kv: KVManager
    waiting: RequestQueue
    slots: BatchSlots
    pacer: Pacer
    shares: Shares
    decision_stats: DecisionStats
    num_preemptions: int = 0
    prefix_tokens: int = 0  # prompt tokens of admitted sequences
    prefix_hits: int = 0  # prompt tokens among these that were cached on the device

    def write(self, now: float, ahead: int | None = None) -> Step:
        """Write the next step. Its tokens count as computed from now on.

        `ahead`: its tokens at most, where all are computed ahead. They are charged to nobody.
        """
        stages = self.limits.num_stages
        most = -(-self.limits.max_step_tokens // stages)
        step = Step(most, most, now, bool(self.waiting) and ahead is None)
        step.budget = step.budget if ahead is None else min(step.budget, ahead)
        if not self.waiting:
            self.shares.settle()
        running = list(self.slots.running.values())
        decoding, prompts = [], []
        for seq in running:
            if (count := seq.num_due) == 1:
                decoding.append(seq)
            elif count > 1:
                prompts.append(seq)
        if stages > 1:  # equal parts in turns: one waits for its tokens while another is computed
            decoding = [seq for seq in decoding if not seq.num_pending][: -(-len(decoding) // stages)]
        # If all running sequences decode and the queue is empty, drafts share the rest of the budget.
        most = min(step.budget, DRAFTED_TOKENS) - len(running)
        drafts = 0 if self.waiting or len(decoding) < len(running) else most
        self._add_decodes(step, decoding, drafts)
        self._add_prompts(step, [seq for seq in prompts if seq.status is not WAITING])
        for victim in step.victims:
            self.waiting.add(victim)
        for seq, chunk in step.chunks.items():
            seq.in_flight += 1
            seq.num_computed = chunk.start + chunk.num_tokens
            seq.num_pending += chunk.num_sampled > 0
            if seq.draft:
                seq.num_computed -= len(chunk.draft)
                seq.num_drafted += len(chunk.draft)
                seq.draft = []
        return step

    def _add_decodes(self, step: Step, decoding: list[Sequence], spare: int) -> None:
        """Add one token of each decoding sequence, and `spare` tokens of drafts."""
        for seq in decoding:
            if seq.status is RUNNING:
                draft = seq.draft[:spare] if seq.draft else None
                spare -= len(draft or ())
                self._compute(seq, step, 1, draft)

    def _add_prompts(self, step: Step, under_way: list[Sequence]) -> None:
        """Add tokens of prompts under way, then sequences from the queue, as many as the pacer allows beside decoding.

        A waiting sequence that may preempt a prompt under way is admitted before that prompt's tokens are added.
        """
        if not under_way and not self.waiting:
            return
        under_way.sort(key=lambda seq: (self.shares.counter(seq.request.tenant), policy.order(seq)))
        others = max(len(under_way) + len(self.waiting) - 1, 0)
        context = under_way[0].num_computed if under_way else 0
        step.budget = min(step.budget, self.pacer.prompt_tokens(len(step.chunks), others, context))
        for seq in under_way:
            self._add_waiting(step, seq)
            if step.budget and seq.status is RUNNING:
                self._compute(seq, step, step.budget)
                step.ranks = None
        self._add_waiting(step)

    def _add_waiting(self, step: Step, before: Sequence | None = None) -> None:
        """Admit sequences while there is room; if `before` is given, only those that go before this running prompt."""
        while step.budget and self.waiting and not step.victims:  # an admission could undo a preemption at once
            if not self._enter_next(step, before):
                return

    def _compute(self, seq: Sequence, step: Step, budget: int, draft: list[int] | None = None) -> None:
        """Add the sequence's chunk to the step unless it must wait for a block, or for a step with room for the whole
        text. Add its draft if blocks suffice."""
        start, uncomputed, snapshots = seq.num_computed, seq.num_uncomputed, self.kv.snapshots
        count = uncomputed
        if count > budget:
            count = budget
            if self.limits.whole_texts:
                return
            if uncomputed - count < REST <= count // 2:
                count -= REST
        if snapshots is not None:
            count = snapshots.fit(seq, count)
        if self.limits.whole_images and not (count := fitted_to_images(seq.request, start, count, step.room)):
            return
        # Reserve the whole prompt at once, so that it is not begun in vain. A window needs only the chunk's blocks.
        end, whole = start + count, start + uncomputed
        # The entry includes the blocks from the cache and the tiers.
        entry = None if seq.has_entered else seq.entry(self.kv.block_tables(seq))
        while (blocks := self.kv.reserve(seq, end, whole)) is None:
            victim = self._last_running()
            if victim is None or victim is seq:
                return
            self._preempt(victim, step, "preempted: no block for one before it")
        if draft and (more := self.kv.reserve(seq, whole + len(draft))) is not None:
            blocks = [a + b for a, b in zip(blocks, more, strict=True)] if blocks and more else blocks or more
            count, num_sampled = count + len(draft), 1 + len(draft)
        else:
            draft, num_sampled = [], int(count == uncomputed)
        source, taken, after = -1, -1, 0
        if snapshots is not None:
            source, (taken, at, _) = snapshots.of_chunk(seq, count - len(draft))
            after = at - start + seq.num_behind
        if entry is not None:
            step.new[seq.slot] = entry
            seq.has_entered = True
        step.budget, step.room = max(step.budget - count, 0), step.room - count
        if step.is_contended:
            self.shares.charge(seq, count)
        gives = self._gives(seq, start, min(end, seq.num_prompt_tokens)) if seq.request.gives_kv else []
        step.chunks[seq] = Chunk(
            seq.slot, start, count, blocks, num_sampled, draft, source, taken, after, seq.num_behind, gives
        )
        seq.num_behind = 0

    def _gives(self, seq: Sequence, start: int, end: int) -> list[Save]:
        """The blocks that the tokens from `start` to `end` fill. With several groups a step gives none: a block has
        layers of all of them."""
        if self.limits.kv.num_groups > 1:
            return []
        first, full = start // self.kv.block_size, end // self.kv.block_size
        return list(map(Save, self.kv.keys(seq, full)[first:], seq.tables[0].blocks[first:full]))

    def _last_running(self) -> Sequence | None:
        return fairness.victim(seq for seq in self.slots.running.values() if seq.status is RUNNING)

    def _preempt(self, victim: Sequence, step: Step, why: str) -> None:
        """Take away the victim's slot, its blocks and its chunk of this step.

        KV that the cache loses is computed again.
        """
        chunk = step.chunks.pop(victim, None)
        step.new.pop(victim.slot, None)
        if chunk is not None:
            step.budget, step.room = step.budget + chunk.num_tokens, step.room + chunk.num_tokens
            if step.is_contended:
                self.shares.charge(victim, -chunk.num_tokens)
        step.victims.append(victim)
        self.take_back(victim)
        self.num_preemptions += 1
        victim.num_preemptions += 1
        self.decision_stats.note(why, victim)

    def take_back(self, seq: Sequence) -> None:
        """Take a running sequence's slot and blocks. It waits again, and is in no queue."""
        del self.slots.running[seq.request_id]
        self.kv.release(seq)
        self.slots.free(seq)
        seq.status = WAITING

    # ---- the queue

    def _enter_next(self, step: Step, before: Sequence | None) -> bool:
        """Admit one sequence; if `before` is given, only one that goes before it. Returns False if none is admitted.

        The tenants are asked by rank. One whose sequences all wait for a prefix is passed over, but none is passed over
        because its sequence needs more room.
        """
        if step.ranks is None:
            step.ranks = self.shares.ranks(self.waiting.heads(), step.now)
        for i, rank in enumerate(step.ranks):
            if before is not None and not self._goes_before(self.waiting.of(rank.tenant)[0], before, step):
                continue
            entered = self._enter_of(rank.tenant, step, before)
            if entered:
                del step.ranks[i]
                if row := self.waiting.of(rank.tenant):
                    insort(step.ranks, self.shares.rank(row[0], step.now))
            if entered is not None:
                return entered
        return False

    def _goes_before(self, seq: Sequence, other: Sequence, step: Step) -> bool:
        return fairness.may_preempt(seq, other, step.now) or self.shares.comes_before(seq, other)

    def _enter_of(self, tenant: str, step: Step, before: Sequence | None) -> bool | None:
        """Admit one sequence of the tenant. Returns False if there is no room for it, None if none is ready."""

        def is_ready(seq: Sequence) -> bool:
            return not self._waits_for_prefix(seq, step) and (before is None or self._goes_before(seq, before, step))

        candidates = [seq for seq in self.waiting.of(tenant)[: 4 * policy.LOOK_AHEAD] if not seq.in_flight]
        ready = list(islice(filter(is_ready, candidates), policy.LOOK_AHEAD))
        if not ready:
            return None
        best = policy.next_in(ready, partial(self._cached_tokens, step), self.limits.max_overtakes)
        for seq in dict.fromkeys((best, ready[0])):
            if self._enter(seq, self._find(seq, step), step):
                self.decision_stats.note(
                    "admitted: first in the queue" if seq is ready[0] else "admitted: best match", seq
                )
                for passed in candidates[: candidates.index(seq)]:
                    passed.overtaken += 1
                return True
        return False

    def _find(self, seq: Sequence, step: Step) -> Prefix:
        """The cached prefix of a waiting sequence. It is looked up once a step, and again if the cache has changed."""
        num_changes, found = step.found.get(seq, (-1, None))
        if found is None or num_changes != self.kv.pool.num_changes:
            found = self.kv.find(seq)
            step.found[seq] = self.kv.pool.num_changes, found
        return found

    def _cached_tokens(self, step: Step, seq: Sequence) -> int:
        return self._find(seq, step).num_tokens

    def _waits_for_prefix(self, seq: Sequence, step: Step) -> bool:
        """Whether a prompt under way will soon compute a good part of this sequence's tokens: a block, or half."""
        if not (self.limits.kv.prefix_cache and seq.max_cached) or seq.overtaken >= self.limits.max_overtakes:
            return False
        if step.under_way is None:
            step.under_way = PromptsUnderWay((self.kv.namespace(seq), seq) for seq in self.slots.running.values())
        namespace = self.kv.namespace(seq)
        if namespace not in step.under_way:
            return False
        cached = self._cached_tokens(step, seq)
        least = cached + min(self.limits.kv.block_size, (seq.max_cached - cached) // 2 + 1)
        if waits := step.under_way.will_compute(namespace, seq, least):
            self.decision_stats.decisions["waiting: prefix under way"] += 1
        return waits

    def _enter(self, seq: Sequence, found: Prefix, step: Step) -> bool:
        """Give a waiting sequence a slot and its cached blocks, if there is room for the rest."""
        match = self._make_way(seq, found, step)
        if match is None:
            return False
        full, keys = self.kv.find_below(seq, match)
        if self._is_worth_loading(seq, match, full, keys):
            least, factor = PATIENCE
            compute = self.pacer.prefill_seconds(match.num_tokens, seq.num_prompt_tokens)
            job = self.kv.acquire_below(seq, full, keys, least + factor * compute)
            seq.in_flight += 1
            self.slots.loading[job] = seq
        else:
            keys = []
            self.kv.acquire(seq, match)
        if seq.cached_tokens is None:
            seq.cached_tokens = None if keys else seq.num_computed  # known only when a load has ended
            if not seq.request.is_ahead:
                self.prefix_tokens += seq.num_prompt_tokens
                self.prefix_hits += seq.num_computed
        if seq.queue_seconds is None:
            seq.queue_seconds = step.now - seq.arrived
        self.waiting.remove(seq)
        self.slots.occupy(seq, Status.LOADING if keys else RUNNING)
        if step.under_way is not None:
            step.under_way.add(self.kv.namespace(seq), seq)
        if not keys:
            self._compute(seq, step, step.budget)
        return True

    def _is_worth_loading(self, seq: Sequence, match: Prefix, full: Prefix, keys: list[bytes]) -> bool:
        """Whether to load the blocks with `keys` after `full`, the match up to its last full block."""
        start = match.num_tokens
        end = (full.num_full + len(keys) - self.kv.state_parts) * self.limits.kv.block_size
        if not keys or end <= start:
            return False
        if seq.kv_from:
            self.decision_stats.note("loading: computed elsewhere", seq)
            return True
        load, compute = self.kv.load_seconds(full, keys), self.pacer.prefill_seconds(start, end)
        quicker = load < compute
        self.decision_stats.note(
            "loading: quicker than computing" if quicker else "computing: quicker than loading", seq,
            f"tokens {start} to {end}: {load * 1e3:.1f} ms to load, {compute * 1e3:.1f} ms to compute",
        )  # fmt: skip
        return quicker

    def _make_way(self, seq: Sequence, match: Prefix, step: Step) -> Prefix | None:
        """Return the cache match if the sequence can be admitted, otherwise None.

        It needs a free slot and enough blocks, after preempting sequences that it may preempt. The blocks of preempted
        sequences go to the cache, which may evict a part of the match. The match is then looked up again.
        """
        why = "preempted: lower priority"
        while True:
            running = [other for other in self.slots.running.values() if other.status is RUNNING]
            num_active = len(self.slots.running)
            has_slot = self.slots.has_free and num_active < self.limits.max_step_tokens
            if has_slot and self._has_room(seq, match):
                return match
            outranked = [other for other in running if fairness.may_preempt(seq, other, step.now)]
            if not outranked:
                outranked, why = list(fairness.over_share(seq, running)), "preempted: over its share"
            last = max(outranked, key=policy.order, default=None)
            if last is None or self.kv.num_for(match, outranked) < self._needed(seq, num_active - len(outranked)):
                self.decision_stats.decisions["waiting: no blocks" if has_slot else "waiting: no slot"] += 1
                return None
            self._preempt(last, step, why)
            match = self.kv.find(seq)

    def _needed(self, seq: Sequence, num_running: int) -> int:
        """Blocks for the sequence, and one block a group for each running one, whose growth might preempt it again."""
        return self.limits.kv.blocks_for(seq.num_tokens) + num_running * self.limits.kv.num_groups

    def _has_room(self, seq: Sequence, match: Prefix) -> bool:
        """Whether there are enough blocks for the sequence.

        If needed, leases are ended. They may be the ones that hold its match. What is computed ahead ends none.
        """
        needed = self._needed(seq, len(self.slots.running))
        while self.kv.num_for(match) < needed:
            if seq.request.is_ahead or not self.kv.end_lease():
                return False
        return True
