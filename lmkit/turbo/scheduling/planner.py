"""Writes a step's plan: who computes how many tokens, who enters, who gives way. See scheduler.py for the rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from lmkit.turbo.decisions import DecisionStats
from lmkit.turbo.kv.manager import KVManager, Prefix
from lmkit.turbo.plan import Chunk, NewSequence
from lmkit.turbo.scheduling import policy
from lmkit.turbo.scheduling.limits import SchedulerLimits
from lmkit.turbo.scheduling.pacing import Pacer
from lmkit.turbo.scheduling.queue import RequestQueue
from lmkit.turbo.scheduling.slots import BatchSlots
from lmkit.turbo.sequence import Sequence, Status


@dataclass
class Step:
    """A plan while it is written."""

    budget: int  # tokens left
    new: dict[int, NewSequence] = field(default_factory=dict)  # by slot
    chunks: dict[int, Chunk] = field(default_factory=dict)  # by slot
    victims: list[Sequence] = field(default_factory=list)


@dataclass
class Planner:
    """Moves sequences between the queue and the batch slots; the scheduler's own parts, which it shares."""

    limits: SchedulerLimits
    kv: KVManager
    waiting: RequestQueue
    slots: BatchSlots
    pacer: Pacer
    decision_stats: DecisionStats
    num_preemptions: int = 0
    prefix_tokens: int = 0  # of prompts that entered
    prefix_hits: int = 0  # of these, found on the device

    def write(self) -> Step:
        """The next step. Its tokens count as computed from now on."""
        step = Step(self.limits.max_step_tokens)
        self._add_decodes(step)
        self._add_prompts(step)
        for victim in step.victims:
            self.waiting.add(victim)
        for slot, chunk in step.chunks.items():
            seq = self.slots[slot]
            seq.in_flight += 1
            seq.num_computed += chunk.num_tokens - len(chunk.draft)
            seq.num_pending += chunk.num_sampled > 0
            seq.num_drafted += len(chunk.draft)
            seq.draft = []
        return step

    def _add_decodes(self, step: Step) -> None:
        """One token of each. If all that run decode and nothing waits, drafts share the rest of the budget."""
        running = sorted(self.slots.running.values(), key=policy.order)
        decoding = [seq for seq in running if seq.num_uncomputed == 1]
        spare = 0 if self.waiting or len(decoding) < len(running) else step.budget - len(running)
        for seq in decoding:
            if self._is_computable(seq, step):
                draft = seq.draft[:spare]
                spare -= len(draft)
                self._compute(seq, step, 1, draft)

    def _add_prompts(self, step: Step) -> None:
        """Prompts under way, then the queue, within what those that decode can bear; who may_preempt a prompt under way
        does not wait until it is computed.
        """
        under_way = sorted((seq for seq in self.slots.running.values() if seq.num_uncomputed > 1), key=policy.order)
        if not under_way and not self.waiting:
            return
        others = max(len(under_way) + len(self.waiting) - 1, 0)
        context = under_way[0].num_computed if under_way else 0
        step.budget = min(step.budget, self.pacer.prompt_tokens(len(step.chunks), others, context))
        for seq in under_way:
            self._add_waiting(step, seq)
            if step.budget and self._is_computable(seq, step):
                self._compute(seq, step, step.budget)
        self._add_waiting(step)

    def _add_waiting(self, step: Step, before: Sequence | None = None) -> None:
        """From the queue, all that there is room for, or all that outrank `before`."""
        while step.budget and self.waiting and not step.victims:  # else it would undo at once what a victim was for
            if before is not None and not policy.may_preempt(self.waiting[0], before):
                return
            if not self._enter_next(step, before):
                return

    def _is_computable(self, seq: Sequence, step: Step) -> bool:
        return seq.status is Status.RUNNING and seq.is_due and seq not in step.victims

    def _compute(self, seq: Sequence, step: Step, budget: int, draft: list[int] | None = None) -> None:
        """Add the sequence's chunk to the step, unless it must wait for a block; the draft, if there are blocks."""
        count = min(seq.num_uncomputed, budget)
        # A whole prompt at once, so that it is not begun in vain; a window needs only what the chunk fills.
        end, whole = seq.num_computed + count, seq.num_computed + seq.num_uncomputed
        # With the blocks that the cache and the tiers gave.
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
            draft, num_sampled = [], int(count == seq.num_uncomputed)
        if entry is not None:
            step.new[seq.slot] = entry
            seq.has_entered = True
        step.budget -= count
        step.chunks[seq.slot] = Chunk(seq.slot, seq.num_computed, count, blocks, num_sampled, draft)

    def _last_running(self) -> Sequence | None:
        return policy.victim(seq for seq in self.slots.running.values() if seq.status is Status.RUNNING)

    def _preempt(self, victim: Sequence, step: Step, why: str) -> None:
        """Take slot and blocks away, the step's own chunk included; what the cache loses of it is computed again."""
        chunk = step.chunks.pop(victim.slot, None)
        step.new.pop(victim.slot, None)
        step.budget += chunk.num_tokens if chunk else 0
        step.victims.append(victim)
        del self.slots.running[victim.request_id]
        self.kv.release(victim)
        self.slots.free(victim)
        victim.status = Status.WAITING
        self.num_preemptions += 1
        self.decision_stats.note(why, victim)

    # ---- the queue

    def _enter_next(self, step: Step, before: Sequence | None) -> bool:
        """Let one sequence in, only such as outrank `before`; False if none can."""
        found: dict[Sequence, Prefix] = {}

        def cached_tokens(seq: Sequence) -> int:
            if seq not in found:
                found[seq] = self.kv.find(seq)
            return found[seq].num_tokens

        candidates = [seq for seq in self.waiting[: 4 * policy.LOOK_AHEAD] if not seq.in_flight]
        ready = [seq for seq in candidates if not self._waits_for_prefix(seq, cached_tokens)]
        if before is not None:
            ready = [seq for seq in ready if policy.may_preempt(seq, before)]
        if not ready:
            return False
        best = policy.next_in(ready, cached_tokens, self.limits.max_overtakes)
        for seq in dict.fromkeys((best, ready[0])):
            cached_tokens(seq)
            if self._enter(seq, found[seq], step):
                self.decision_stats.note(
                    "admitted: first in the queue" if seq is ready[0] else "admitted: best match", seq
                )
                for passed in candidates:
                    passed.overtaken += policy.order(passed) < policy.order(seq)
                return True
        return False

    def _waits_for_prefix(self, seq: Sequence, cached_tokens: Callable[[Sequence], int]) -> bool:
        """Whether a prompt under way is about to compute a good part of what this one would."""
        if not self.limits.kv.prefix_cache or seq.scores_prompt or seq.overtaken >= self.limits.max_overtakes:
            return False
        for other in self.slots.running.values():
            if other.num_completed >= other.num_prompt_tokens or self.kv.namespace(seq) != self.kv.namespace(other):
                continue
            common = _common_prefix(seq, other)
            saved, left = common - cached_tokens(seq), seq.num_tokens - cached_tokens(seq)
            if common > other.num_completed and (saved >= self.limits.kv.block_size or 2 * saved >= left):
                self.decision_stats.decisions["waiting: prefix under way"] += 1
                return True
        return False

    def _enter(self, seq: Sequence, found: Prefix, step: Step) -> bool:
        """Give a waiting sequence a slot and what is cached of it, if there is room for the rest."""
        match = self._make_way(seq, found, step)
        if match is None:
            return False
        full, keys = self.kv.find_below(seq, match)
        if self._is_worth_loading(seq, match, full, keys):
            job = self.kv.acquire_below(seq, full, keys)
            seq.in_flight += 1
            self.slots.loading[job] = seq
        else:
            keys = []
            self.kv.acquire(seq, match)
        if seq.cached_tokens is None:
            seq.cached_tokens = None if keys else seq.num_computed  # of a load one knows when it has ended
            self.prefix_tokens += seq.num_prompt_tokens
            self.prefix_hits += seq.num_computed
        self.waiting.remove(seq)
        self.slots.occupy(seq, Status.LOADING if keys else Status.RUNNING)
        if not keys:
            self._compute(seq, step, step.budget)
        return True

    def _is_worth_loading(self, seq: Sequence, match: Prefix, full: Prefix, keys: list[bytes]) -> bool:
        """Whether to go on from `full`, the match up to its last full block, and the blocks that have `keys`."""
        start, end = match.num_tokens, (full.num_full + len(keys)) * self.limits.kv.block_size
        if not keys or end <= start:
            return False
        load, compute = self.kv.load_seconds(full, keys), self.pacer.prefill_seconds(start, end)
        quicker = load < compute
        self.decision_stats.note(
            "loading: quicker than computing" if quicker else "computing: quicker than loading", seq,
            f"tokens {start} to {end}: {load * 1e3:.1f} ms to load, {compute * 1e3:.1f} ms to compute",
        )  # fmt: skip
        return quicker

    def _make_way(self, seq: Sequence, match: Prefix, step: Step) -> Prefix | None:
        """If there are a slot and room, or would be without those that the sequence may_preempt, which then leave: its
        match, found anew if they did, as their blocks go to the cache and may push out something of it.
        """
        while True:
            running = self.slots.running.values()
            has_slot = self.slots.has_free and len(running) < self.limits.max_step_tokens
            if has_slot and self._has_room(seq, match):
                return match
            outranked = [
                other for other in running if other.status is Status.RUNNING and policy.may_preempt(seq, other)
            ]
            last = policy.victim(outranked)
            if last is None or self.kv.num_for(match, outranked) < self._needed(seq, len(running) - len(outranked)):
                self.decision_stats.decisions["waiting: no blocks" if has_slot else "waiting: no slot"] += 1
                return None
            self._preempt(last, step, "preempted: lower priority")
            match = self.kv.find(seq)

    def _needed(self, seq: Sequence, num_running: int) -> int:
        """Blocks for the sequence, and room to grow for each running one: its growth might throw it out again."""
        return self.limits.kv.blocks_for(seq.num_tokens) + num_running * self.limits.kv.num_groups

    def _has_room(self, seq: Sequence, match: Prefix) -> bool:
        """Whether there are blocks for it, if need be those of leases, which may be those that hold its match."""
        needed = self._needed(seq, len(self.slots.running))
        while self.kv.num_for(match) < needed:
            if not self.kv.end_lease():
                return False
        return True


def _common_prefix(seq: Sequence, other: Sequence) -> int:
    """Tokens that both begin with, as far as the first can use them and the other's prompt goes."""
    count = min(seq.num_tokens - 1, other.num_prompt_tokens)
    differ = np.flatnonzero(seq.tokens(count) != other.tokens(count))
    return int(differ[0]) if len(differ) else count
