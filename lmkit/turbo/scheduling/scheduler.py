"""Decides what each step computes: continuous batching with chunked prefill, a prefix cache, and preemption into it.

There are no phases. A running sequence has tokens left to compute, and a sequence that decodes has one. A step takes,
in this order:

- One token of every sequence that decodes. Decoding never waits for a prompt.
- Tokens of running prompts, by priority key (scheduling.policy), as many as the pacer allows beside decoding. A waiting
  sequence that may preempt one of them is admitted before it.
- Sequences from the queue. Each needs a slot, a token of the budget, and room for all its known tokens with one block
  to spare for each running sequence. It reuses its cache match. Blocks of a lower tier are loaded in the background if
  that is faster than computing them. A sequence that shares a prefix with a running prompt waits for it.

Between tenants, shares decide who is next, and whose sequence is preempted (scheduling.fairness).
A sequence that finds no block preempts the last sequence by priority key of the tenant with the most seats for its
weight. If that is the sequence itself, it waits a step and keeps its blocks. The first by priority key is never
preempted for a block, and no request that `add` accepted needs more than the whole pool. The computed KV of a preempted
sequence goes to the cache.

Plans are carried out in the order in which they are made. A plan may be made while the last one runs: the number of its
computed tokens is known, and the runner fills in the tokens that it samples. Blocks may change owners at once, but only
completed KV (its step has run) is published.
"""

from __future__ import annotations

import itertools
import math
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from lmkit.errors import RequestError
from lmkit.turbo.adapters import LoadedAdapter
from lmkit.turbo.decisions import DecisionStats
from lmkit.turbo.kv.manager import KVManager
from lmkit.turbo.kv.tiers.store import TierStore
from lmkit.turbo.plan import Chunk, Sampled, SampledToken, StepPlan
from lmkit.turbo.request import EngineStats, FinishReason, Request, StepOutput
from lmkit.turbo.scheduling.audits import StoredKV
from lmkit.turbo.scheduling.deadlines import Deadlines
from lmkit.turbo.scheduling.fairness import Shares
from lmkit.turbo.scheduling.history import History
from lmkit.turbo.scheduling.limits import SchedulerLimits, check_request, failure_of
from lmkit.turbo.scheduling.model_speculation import DraftModel, ModelSpeculation
from lmkit.turbo.scheduling.next_turns import NextTurns
from lmkit.turbo.scheduling.pacing import Pacer
from lmkit.turbo.scheduling.planner import Planner
from lmkit.turbo.scheduling.queue import RequestQueue
from lmkit.turbo.scheduling.slots import BatchSlots
from lmkit.turbo.scheduling.speculation import Speculation
from lmkit.turbo.sequence import FAILED_TOKEN, FINISHED, RUNNING, Sequence, Status, UnderWay

PACED_STEPS = 8  # one in so many pure decode steps is recorded: they are alike, and recording takes time


class Scheduler:
    """Owns every sequence from `add` to its last output.

    `schedule` makes plans. `update` or `fail` takes their results in the same order. One plan may be made while another
    is under way. `add` and `abort` may be called at any moment. `clock` counts seconds.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        eos_token_ids: tuple[int, ...],
        *,
        tiers: TierStore | None = None,
        kv_identity: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
        forced: Callable[[int], list[int]] = lambda slot: [],
        adapters: Mapping[str, LoadedAdapter] | None = None,
        draft_model: DraftModel | None = None,
        stored: StoredKV | None = None,
    ) -> None:
        """`forced`: the next tokens of a slot's sequence, where its grammar leaves no choice. `adapters`: by name.
        `stored`: what audits compare."""
        self.limits = limits
        self._eos_token_ids = eos_token_ids
        self._adapters = {} if adapters is None else adapters
        self._clock = clock
        self._decision_stats = DecisionStats()
        self.kv = KVManager(limits.kv, self._decision_stats, tiers, kv_identity)
        self._waiting = RequestQueue()
        self._slots = BatchSlots(limits.max_batch_size)
        self._pacer = Pacer(limits.decode_slowdown, limits.max_step_tokens)
        shares = Shares(limits.priority_seconds)
        self._planner = Planner(limits, self.kv, self._waiting, self._slots, self._pacer, shares, self._decision_stats)
        self._under_way: deque[UnderWay] = deque()
        self._deadlines, self._next_turns = Deadlines(), NextTurns(self._planner, self._sequence, stored)
        self._outputs: list[StepOutput] = []
        self._tier_hits: Counter[str] = Counter()
        longest, history = limits.max_draft_tokens, History(limits.draft_history, self.kv.namespace)
        self._speculation: Speculation | None = None
        if longest and draft_model is not None:
            self._speculation = ModelSpeculation(longest, forced, history, clock, draft_model, overlaps=limits.overlaps)
        elif longest:
            self._speculation = Speculation(longest, forced, history, clock, overlaps=limits.overlaps)
        self._arrivals = self._prompt_tokens = self._generation_tokens = self._steps = 0

    # ---- requests

    def add(self, request: Request) -> None:
        """Queue a request; NextTurns has one that `is_ahead`. Raises RequestError if it can never run or none fits."""
        seq = self._sequence(request)
        if self._next_turns.takes(seq):
            return
        if request.request_id in self._slots.running or request.request_id in self._waiting:
            raise RequestError("invalid_request", f"request_id {request.request_id!r} is already in use", "request_id")
        if len(self._waiting) >= self.limits.max_queue:
            raise RequestError("queue_full", f"{len(self._waiting)} requests wait already, the limit: try again later")
        self._waiting.add(seq)
        self._deadlines.add(seq, len(self._slots.running) + len(self._waiting))

    def _sequence(self, request: Request) -> Sequence:
        """Raises RequestError if the request can never run."""
        max_tokens = check_request(request, self.limits)
        adapter = self._adapters.get(request.adapter)
        if request.adapter and adapter is None:
            raise RequestError("model_not_found", f"no adapter {request.adapter[:64]!r} is loaded", "model")
        now = self._clock()
        timeout = self.limits.request_timeout if request.timeout is None else request.timeout
        self._arrivals += 1
        return Sequence(
            request,
            arrival=self._arrivals - 1,
            arrived=now,
            priority_key=now + request.priority * self.limits.priority_seconds,
            deadline=math.inf if timeout is None else now + timeout,
            token_ids=array("i", request.prompt_ids + request.known_ids),
            max_tokens=max_tokens,
            eos_token_ids=() if request.params.ignore_eos else self._eos_token_ids,
            adapter=-1 if adapter is None else adapter.number,
            adapter_digest="" if adapter is None else adapter.digest,
        )

    def abort(self, request_id: str) -> None:
        """End a request now. Its last output comes with the next outputs. An unknown id is ignored."""
        seq = self._slots.running.get(request_id) or self._waiting.get(request_id)
        if seq is not None:
            self._finish(seq, "abort")

    def uses_adapter(self, number: int) -> bool:
        """Whether a sequence has this adapter, also one whose last step is under way."""
        return any(seq.adapter == number for seq in itertools.chain(self._slots, self._waiting))

    def has_work(self) -> bool:
        """Whether a request is unfinished, an output not taken, a next turn not prepared, a step or save not done."""
        return self._has_sequences() or bool(self._outputs or self._under_way or self.kv.saves or self._next_turns)

    def _has_sequences(self) -> bool:
        return bool(self._slots.running or self._waiting)

    # ---- a step

    def schedule(self) -> StepPlan | None:
        """Plan the next step. Returns None if nothing can be done before a running step completes or a load ends."""
        now = self._clock()
        self.kv.leases.expire(now)
        self._expire(now)
        self._take_loads()
        if self._next_turns.is_under_way or (self._speculation is not None and self._awaits_tokens(self._speculation)):
            return None
        step = self._planner.write(now, self._next_turns.turn(now))
        self._next_turns.planned(step)
        kv, chunks, new = self.kv, list(step.chunks.values()), list(step.new.values())
        if not (chunks or kv.loads or kv.saves):
            stuck = self._has_sequences() and not (self._under_way or self._slots.loading)
            assert not stuck, "requests wait and none can be computed"
            return None
        plan = StepPlan(self._slots.take_freed(), new, chunks, kv.copies, kv.loads, kv.saves)
        kv.copies, kv.loads, kv.saves = [], [], []
        self._steps += bool(chunks)
        self._under_way.append(UnderWay(plan, list(step.chunks), waited=not self._under_way))
        return plan

    def _awaits_tokens(self, speculation: Speculation) -> bool:
        """Whether no step is to begin before the tokens of the step under way are known.

        If they are and every sequence decodes, drafts are proposed. All sequences stay in one step: those without a
        draft wait for those with one.
        """
        running = list(self._slots.running.values())
        if any(seq.num_drafted for seq in running):
            return True
        if not running or self._waiting or any(seq.num_uncomputed != 1 for seq in running):
            return False
        return speculation.propose(running, self.limits.max_step_tokens - len(running))

    def _expire(self, now: float) -> None:
        for seq in self._deadlines.over(now):
            self._decision_stats.note("ended: deadline", seq)
            self._finish(seq, "error", error="its time was up", error_code="deadline_exceeded")

    def _take_loads(self) -> None:
        for done in self.kv.take_finished():
            seq = self._slots.loading.pop(done.job)
            seq.in_flight -= 1
            if seq.status is FINISHED:
                self._free_slot(seq)
                continue
            num_tokens = self.kv.take_loaded(seq, done)
            seq.status = RUNNING
            for tier, blocks in done.hits.items():
                self._tier_hits[tier] += blocks * num_tokens // done.num_blocks
            if seq.cached_tokens is None:  # otherwise it ran before, and computed some of these itself
                seq.cached_tokens = seq.num_computed
            self._decision_stats.note("loaded: as planned", seq)

    # ---- results

    def update(self, plan: StepPlan, sampled: list[Sampled], seconds: float = 0.0) -> list[StepOutput]:
        """Take in a step's results, one for each chunk of its plan, and its time. Returns outputs that are ready."""
        under_way = self._next_under_way(plan)
        self._pace(plan, seconds)
        self._next_turns.ran(under_way.sequences, seconds, self._clock)
        for seq, chunk, result in zip(under_way.sequences, plan.chunks, sampled, strict=True):
            if self._land(seq, chunk):
                self._advance(seq, chunk, result)
        if self._speculation is not None:
            goes_on = bool(self._slots.running)
            self._speculation.record(plan, sampled, self._clock(), waited=under_way.waited, goes_on=goes_on)
        return self.take_outputs()

    def fail(self, plan: StepPlan, message: str) -> list[StepOutput]:
        """Take in a step that raised: its sequences end with finish_reason "error", and all others go on."""
        for seq, chunk in zip(self._next_under_way(plan).sequences, plan.chunks, strict=True):
            seq.num_completed = 0  # its first copies may not have been made, so none of its KV is kept
            if self._land(seq, chunk) and seq.status is RUNNING:
                seq.num_completed = 0
                self._finish(seq, "error", error=message)
        # Nobody knows how far the runner got, so the next plan frees the slots again.
        self._slots.restore_freed(plan.freed)
        return self.take_outputs()

    def _next_under_way(self, plan: StepPlan) -> UnderWay:
        under_way = self._under_way.popleft()
        assert under_way.plan is plan, "results come in another order than plans"
        return under_way

    def _land(self, seq: Sequence, chunk: Chunk) -> bool:
        """Count a step of the sequence as completed. Returns whether its result is still wanted."""
        assert seq.in_flight, f"{seq.request_id}: no step is under way"
        num_drafted = len(chunk.draft)
        seq.in_flight -= 1
        seq.num_pending -= chunk.num_sampled > 0
        seq.num_drafted -= num_drafted
        if seq.status is RUNNING:
            seq.num_completed = chunk.start + chunk.num_tokens - num_drafted
        elif seq.status is FINISHED:
            if not seq.in_flight and seq.slot >= 0:
                self._free_slot(seq)
            return False
        return True  # also if it was preempted meanwhile: the token is the same as it would be later

    def _pace(self, plan: StepPlan, seconds: float) -> None:
        prompts = [chunk for chunk in plan.chunks if chunk.num_tokens > chunk.num_sampled]
        if prompts or (self._steps % PACED_STEPS == 0 and plan.chunks and not any(c.draft for c in plan.chunks)):
            context = max((chunk.start + chunk.num_tokens for chunk in prompts), default=0)
            num_prompt = sum(chunk.num_tokens for chunk in prompts)
            self._pacer.record(len(plan.chunks) - len(prompts), num_prompt, context, seconds)

    def _advance(self, seq: Sequence, chunk: Chunk, result: Sampled) -> None:
        if chunk.start < seq.num_prompt_tokens:
            count = min(chunk.num_tokens, seq.num_prompt_tokens - chunk.start)
            self._prompt_tokens += 0 if self._next_turns.computes(seq, chunk.start, count) else count
            if result.prompt_logprobs:
                seq.gather_prompt_logprobs(chunk.start, result.prompt_logprobs)
            if seq.status is RUNNING:
                self.kv.publish(seq, min(seq.num_completed, seq.num_prompt_tokens), partial=chunk.num_sampled > 0)
        if not (tokens := result.tokens):
            self._outputs += seq.progress()
            return
        has_failed = tokens[-1].token_id == FAILED_TOKEN or (seq.request.pooling is not None and not result.embedding)
        if has_failed:
            tokens = tokens[:-1]
        if tokens:
            self._extend(seq, tokens, result.embedding)
        if has_failed and seq.status is not FINISHED:
            self._finish(seq, "error", **failure_of(seq.request))

    def _extend(self, seq: Sequence, tokens: list[SampledToken], embedding: bytes) -> None:
        """Append the tokens that one step sampled, up to the token that ends the sequence."""
        num_known, params = len(seq.token_ids), seq.request.params
        first = num_known == seq.num_prompt_tokens + len(seq.request.known_ids)
        wants_logprobs = params.logprobs is not None
        if num_known == seq.max_tokens:  # the request asked for no new tokens
            chosen = [token.scored for token in tokens] if wants_logprobs and params.logprob_token_ids else []
            shown = {"prompt_logprobs": seq.prompt_logprobs, "embedding": embedding, "logprobs": chosen}
            self._finish(seq, "length", **shown, **seq.admission(self.kv.block_size))
            return
        reason, new = None, list[int]()
        for token in tokens:
            assert 0 <= token.token_id < self.limits.vocab_size, f"token {token.token_id} sampled"
            new.append(token.token_id)
            reason = seq.append(token.token_id)
            if reason is not None:
                break
        if len(new) > 1 and seq.status is RUNNING:  # all but the last were computed as a draft
            seq.keep_drafts(len(new) - 1, has_states=self.kv.snapshots is not None)
        self._generation_tokens += len(new)
        if not (first or wants_logprobs or reason):  # nearly every output
            self._outputs.append(StepOutput(request_id=seq.request_id, token_ids=new))
            return
        output = StepOutput(
            request_id=seq.request_id,
            token_ids=new,
            finish_reason=reason,
            logprobs=[token.scored for token in tokens[: len(new)]] if wants_logprobs else [],
            prompt_logprobs=seq.prompt_logprobs if first else [],
            stop_token=new[-1] if reason == "stop" else None,
            **(seq.admission(self.kv.block_size) if first else {}),
        )
        if reason is None:
            self._outputs.append(output)
        else:
            self._end(seq, output)

    def take_outputs(self) -> list[StepOutput]:
        """Return the pending outputs. Aborted requests may leave some even if `schedule` returned None."""
        outputs, self._outputs = self._outputs, []
        if not (self._waiting or self._under_way or any(self._slots)):
            self._slots.check_integrity()
            self.kv.check_idle()
        return outputs

    def _finish(self, seq: Sequence, reason: FinishReason, **fields: Any) -> None:
        self._end(seq, StepOutput(request_id=seq.request_id, token_ids=[], finish_reason=reason, **fields))

    def _end(self, seq: Sequence, output: StepOutput) -> None:
        """Give the last output. Steps and loads under way still write to the blocks, which are released after them.

        Those steps write after the completed KV, which the cache has before the next turn of a conversation looks.
        """
        if seq.status is Status.WAITING:
            self._waiting.remove(seq)
        else:
            del self._slots.running[seq.request_id]
        if self._speculation is not None:
            self._speculation.forget(seq)
        seq.status = FINISHED
        self.kv.cancel(seq)
        if not self._next_turns.ends(seq, self._clock()):
            self._outputs.append(seq.last(output))
        if seq.slot >= 0 and not seq.in_flight:
            self._free_slot(seq)
        elif seq.num_completed:
            self.kv.publish(seq, seq.num_completed, partial=True)

    def _free_slot(self, seq: Sequence) -> None:
        """Release the sequence's slot and blocks."""
        self.kv.release(seq, self._clock(), lease=True)
        self._slots.free(seq)

    def wait(self, seconds: float) -> None:
        """Wait until a load ends, or for `seconds`, or a moment if no request waits for it: one may arrive."""
        self.kv.wait(seconds if len(self._slots.running) + len(self._waiting) > self._next_turns.num_running else 1e-3)

    def stats(self) -> EngineStats:
        kv, drafts, now = self.kv, self._speculation, self._clock()
        kv.leases.expire(now)  # nothing else does while there is no work
        return EngineStats(
            num_running=len(self._slots.running) - self._next_turns.num_running,
            num_waiting=len(self._waiting),
            blocks_used=self.limits.kv.num_blocks - kv.num_available,
            blocks_total=self.limits.kv.num_blocks,
            blocks_backed=kv.pool.num_backed,
            preemptions=self._planner.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            steps=self._steps,
            blocks_cached=kv.pool.num_cached,
            prefix_tokens=self._planner.prefix_tokens,
            prefix_hits=self._planner.prefix_hits,
            tier_hits=dict(self._tier_hits),
            evicted_blocks=sum(cache.num_evicted * cache.stripe for cache in kv.caches),
            **(kv.snapshots.stats() if kv.snapshots else {}),
            sessions=len(kv.leases),
            kept_since=kv.kept_since(now),
            decisions=dict(self._decision_stats.decisions),
            tiers=kv.tier_stats(),
            next_turns=self._next_turns.stats(),
            ahead_waited=self._next_turns.allowance.waited,
            audits=self._next_turns.audits.stats(),
            **(drafts.stats() if drafts else {}),
        )

    def check_integrity(self) -> None:
        """Check that every slot and block is free or has its owner. Raises AssertionError if a record is wrong."""
        self._slots.check_integrity()
        assert not any(seq.tables for seq in self._waiting), "a waiting sequence holds blocks"
        self.kv.check_integrity(self._slots)
