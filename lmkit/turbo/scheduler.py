"""Decides what each step computes: continuous batching with chunked prefill, and preemption by recompute.

There are no phases. A running sequence has tokens left to compute (one, when it decodes); in the policy's order each is
given as many as the step's token budget still allows. What keeps it free of starvation:

- A sequence enters only if the running ones leave a token of the budget. So no more ever run than the budget has
  tokens, and the only one whose prompt is under way is the last that entered: decodes never wait behind a prompt.
- A sequence enters only if all its known tokens fit the free blocks, with one block to spare for each running
  sequence; from then on it grows by one token at a time.
- A sequence that finds no block preempts the last arrived; the last arrived itself waits a step and keeps what it has.
  So the oldest always advances, and no request that `add` accepted needs more than the whole pool.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from lmkit.errors import RequestError
from lmkit.turbo import policy
from lmkit.turbo.kv_manager import KVManager
from lmkit.turbo.plan import Chunk, NewSequence, Sampled, StepPlan
from lmkit.turbo.request import EngineStats, FinishReason, Request, StepOutput, TokenLogprobs
from lmkit.turbo.sequence import FAILED_TOKEN, Sequence, Status


@dataclass(frozen=True)
class SchedulerLimits:
    """What the scheduler shares out."""

    num_blocks: int
    block_size: int  # tokens per block
    max_batch_size: int  # sequences that run at once
    max_step_tokens: int  # token budget of one step, decodes and prompts together
    max_model_len: int  # prompt and output tokens of one sequence
    max_queue: int  # waiting requests; one more is refused
    vocab_size: int


@dataclass
class _Step:
    """A plan while it is written."""

    budget: int
    new: dict[int, NewSequence] = field(default_factory=dict)  # by slot
    chunks: dict[int, Chunk] = field(default_factory=dict)  # by slot
    victims: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Owns every sequence from `add` to its last output.

    One plan is under way at a time: `schedule`, then `update` or `fail`. `add` and `abort` may come at any moment.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        eos_token_ids: tuple[int, ...],
        *,
        order: policy.Order = policy.fcfs,
        victim: policy.Victim = policy.last_arrived,
    ) -> None:
        self.limits = limits
        self._eos_token_ids = eos_token_ids
        self._order = order
        self._victim = victim
        self._kv = KVManager(limits.num_blocks, limits.block_size)
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()  # in order of arrival, the preempted in front
        self._running: dict[str, Sequence] = {}
        self._slots: list[Sequence | None] = [None] * limits.max_batch_size
        self._free_slots = list(range(limits.max_batch_size - 1, -1, -1))
        self._freed: set[int] = set()  # slots vacated since the last plan
        self._outputs: list[StepOutput] = []
        self._arrivals = self._preemptions = self._prompt_tokens = self._generation_tokens = self._steps = 0

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it is malformed, can never run, or the queue is full."""
        max_tokens = self._check(request)
        if len(self._waiting) >= self.limits.max_queue:
            raise RequestError("queue_full", f"{len(self._waiting)} requests wait already, the limit: try again later")
        eos = () if request.params.ignore_eos else self._eos_token_ids
        seq = Sequence(request, self._arrivals, list(request.prompt_ids), max_tokens, eos)
        self._arrivals += 1
        self._waiting[request.request_id] = seq

    def abort(self, request_id: str) -> None:
        """End a request now; its last output follows with the next ones. An unknown id is ignored."""
        seq = self._running.get(request_id) or self._waiting.get(request_id)
        if seq is not None:
            self._finish(seq, "abort")

    def has_work(self) -> bool:
        """Whether a request is unfinished or an output not taken."""
        return self._has_sequences() or bool(self._outputs)

    def _has_sequences(self) -> bool:
        return bool(self._running or self._waiting)

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute."""
        step = _Step(self.limits.max_step_tokens)
        for seq in self._order(list(self._running.values()), self._waiting.values()):
            assert not seq.in_flight, "a plan is scheduled before the last one is updated"
            if step.budget == 0:
                break
            if seq in step.victims:
                continue
            if seq.status is Status.WAITING and not self._enter(seq, step):
                break  # whoever comes after it waits too: to be overtaken again and again is to starve
            self._compute(seq, step)
        self._settle(step)
        if not step.chunks:
            assert not self._has_sequences(), "requests wait and none can be computed"
            return None
        self._steps += 1
        plan = StepPlan(sorted(self._freed), list(step.new.values()), list(step.chunks.values()))
        self._freed.clear()
        return plan

    def update(self, plan: StepPlan, sampled: list[Sampled]) -> list[StepOutput]:
        """Take in a step's results, one for each of the plan's chunks; the outputs that are ready."""
        for chunk, result in zip(plan.chunks, sampled, strict=True):
            seq = self._land(chunk)
            if seq is not None:
                self._advance(seq, chunk, result)
        return self.take_outputs()

    def fail(self, plan: StepPlan, message: str) -> list[StepOutput]:
        """The step raised: its sequences end with finish_reason "error", all others go on."""
        for chunk in plan.chunks:
            seq = self._land(chunk)
            if seq is not None:
                self._finish(seq, "error", error=message)
        # How far the runner got is unknown: tell it again.
        self._freed.update(slot for slot in plan.freed if self._slots[slot] is None)
        return self.take_outputs()

    def take_outputs(self) -> list[StepOutput]:
        """Outputs not yet returned: after `schedule` gave None there may be some, of requests aborted meanwhile."""
        outputs, self._outputs = self._outputs, []
        if not self._has_sequences():
            self.check_integrity()
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            blocks_used=self.limits.num_blocks - self._kv.num_free,
            blocks_total=self.limits.num_blocks,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            steps=self._steps,
        )

    def check_integrity(self) -> None:
        """Every slot and block is free or has its owner; raises AssertionError where our own books are wrong."""
        seated = [seq for seq in self._slots if seq is not None]
        assert all(self._slots[seq.slot] is seq for seq in seated), "a sequence sits in another's slot"
        free = set(self._free_slots)
        assert len(free) == len(self._free_slots) == len(self._slots) - len(seated), "a slot leaked"
        assert all(self._slots[slot] is None for slot in free), "a free slot is taken"
        running = {seq for seq in seated if seq.status is Status.RUNNING}
        assert running == set(self._running.values()), "a running sequence has no slot"
        assert all(seq.in_flight for seq in seated if seq not in running), "a finished sequence kept its slot"
        assert not any(seq.block_table for seq in self._waiting.values()), "a waiting sequence holds blocks"
        self._kv.check_integrity(seated)

    def _check(self, request: Request) -> int:
        """Refuse what can never run; the tokens, prompt and output, at which the sequence ends."""
        limits, params, num_prompt = self.limits, request.params, len(request.prompt_ids)
        params.validate(limits.vocab_size)
        if params.temperature > 0 and params.seed is None:
            raise RequestError("invalid_request", "seed=None: sampling needs a seed; draw one", "seed")
        if request.request_id in self._running or request.request_id in self._waiting:
            raise RequestError("invalid_request", f"request_id {request.request_id!r} is already in use", "request_id")
        if not num_prompt:
            raise RequestError("invalid_request", "the prompt is empty: send at least one token", "prompt")
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= limits.vocab_size:
            wrong = next(t for t in request.prompt_ids if not 0 <= t < limits.vocab_size)
            raise RequestError(
                "invalid_request", f"prompt token id {wrong} is not in [0, {limits.vocab_size})", "prompt"
            )
        max_new = limits.max_model_len if params.max_new_tokens is None else params.max_new_tokens
        if num_prompt + min(max_new, 1) > limits.max_model_len:
            raise RequestError(
                "context_length_exceeded",
                f"the prompt has {num_prompt} tokens; the context of {limits.max_model_len} tokens must hold it and at "
                "least one more: shorten it",
                "prompt",
            )
        max_tokens = min(num_prompt + max_new, limits.max_model_len)
        blocks = self._kv.blocks_for(max(num_prompt, max_tokens - 1))  # the last generated token is never computed
        if blocks > limits.num_blocks:
            raise RequestError(
                "context_length_exceeded",
                f"{num_prompt} prompt and {max_tokens - num_prompt} new tokens need {blocks} KV blocks of "
                f"{limits.block_size} tokens, and there are {limits.num_blocks}: ask for fewer new tokens",
                "max_new_tokens",
            )
        return max_tokens

    def _enter(self, seq: Sequence, step: _Step) -> bool:
        """Give a waiting sequence a slot, if there is room. Not in a step that preempts: it would undo that at once."""
        # One block to spare for each running sequence, or its next growth might throw this one out again.
        needed = self._kv.blocks_for(seq.num_tokens) + len(self._running)
        if step.victims or not self._free_slots or needed > self._kv.num_free:
            return False
        seq.slot = self._free_slots.pop()
        seq.status = Status.RUNNING
        self._slots[seq.slot] = seq
        self._running[seq.request_id] = seq
        step.new[seq.slot] = seq.entry()
        return True

    def _compute(self, seq: Sequence, step: _Step) -> None:
        """Add the sequence's chunk to the step, unless it must wait for a block."""
        while (blocks := self._kv.reserve(seq, seq.num_tokens)) is None:
            victim = self._victim(self._running.values())
            if victim is seq:
                return
            self._preempt(victim, step)
        count = min(seq.num_uncomputed, step.budget)
        step.budget -= count
        step.chunks[seq.slot] = Chunk(seq.slot, seq.num_computed, count, blocks, count == seq.num_uncomputed)

    def _preempt(self, victim: Sequence, step: _Step) -> None:
        """Take slot and blocks away, the step's own chunk included; its tokens are computed again later."""
        chunk = step.chunks.pop(victim.slot, None)
        step.budget += chunk.num_tokens if chunk else 0
        step.victims.append(victim)
        del self._running[victim.request_id]
        self._vacate(victim)
        victim.status = Status.WAITING
        victim.num_computed = 0
        self._preemptions += 1

    def _settle(self, step: _Step) -> None:
        """Move sequences between the queue and the running, now that nobody iterates over the queue."""
        for slot in step.new:
            seq = self._slots[slot]
            assert seq is not None
            del self._waiting[seq.request_id]
        for victim in step.victims:  # the last arrived first, so the queue stays in order of arrival
            self._waiting[victim.request_id] = victim
            self._waiting.move_to_end(victim.request_id, last=False)
        for slot in step.chunks:
            seq = self._slots[slot]
            assert seq is not None
            seq.in_flight = True

    def _land(self, chunk: Chunk) -> Sequence | None:
        """The chunk's sequence after its step, or None (and its slot vacated) if it was aborted meanwhile."""
        seq = self._slots[chunk.slot]
        assert seq is not None, f"slot {chunk.slot} is empty"
        assert seq.in_flight, f"no step is under way in slot {chunk.slot}"
        seq.in_flight = False
        if seq.status is Status.RUNNING:
            return seq
        self._vacate(seq)
        return None

    def _advance(self, seq: Sequence, chunk: Chunk, result: Sampled) -> None:
        seq.num_computed += chunk.num_tokens
        seq.gather_prompt_logprobs(chunk.start, result.prompt_logprobs)
        if not chunk.sample:
            return
        if result.token_id == FAILED_TOKEN:
            self._finish(seq, "error", error="the model's logits for this request are not finite numbers")
            return
        first = not seq.num_outputs
        self._prompt_tokens += seq.num_prompt_tokens if first else 0
        if seq.num_tokens == seq.max_tokens:  # no new tokens were wanted
            self._finish(seq, "length", prompt_logprobs=seq.prompt_logprobs)
            return
        token = result.token_id
        assert 0 <= token < self.limits.vocab_size, f"token {token} sampled"
        reason = seq.append(token)
        self._generation_tokens += 1
        output = StepOutput(
            request_id=seq.request_id,
            token_ids=[token],
            finish_reason=reason,
            logprobs=[] if seq.request.params.logprobs is None else [TokenLogprobs(token, result.logprob, result.top)],
            prompt_logprobs=seq.prompt_logprobs if first else [],
            stop_token=token if reason == "stop" else None,
        )
        if reason is None:
            self._outputs.append(output)
        else:
            self._end(seq, output)

    def _finish(self, seq: Sequence, reason: FinishReason, **fields: Any) -> None:
        self._end(seq, StepOutput(request_id=seq.request_id, token_ids=[], finish_reason=reason, **fields))

    def _end(self, seq: Sequence, output: StepOutput) -> None:
        """Give the last output. A step under way still writes to the blocks: they are released when it lands."""
        queue = self._running if seq.status is Status.RUNNING else self._waiting
        del queue[seq.request_id]
        seq.status = Status.FINISHED
        self._outputs.append(output)
        if seq.slot >= 0 and not seq.in_flight:
            self._vacate(seq)

    def _vacate(self, seq: Sequence) -> None:
        """Give slot and blocks back."""
        self._kv.release(seq)
        self._slots[seq.slot] = None
        self._free_slots.append(seq.slot)
        self._freed.add(seq.slot)
        seq.slot = -1
