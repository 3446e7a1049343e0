"""Share of prompt tokens that the prefix cache finds on a mixed trace, beside a cache that never evicts.

The scheduler is the real one. Nothing is computed: a runner without a model gives the trace's answers.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from benchmarks.kv.common import Row, Setting
from benchmarks.kv.trace import VOCAB, Item, Mix, distinct_blocks, ideal_hits, make_trace
from lmkit.turbo.kv.manager import KVLimits
from lmkit.turbo.plan import Chunk, NewSequence, Sampled, SampledToken, StepPlan
from lmkit.turbo.request import Request, SamplingParams
from lmkit.turbo.scheduling.limits import SchedulerLimits
from lmkit.turbo.scheduling.scheduler import Scheduler

BLOCK_SIZE, CONCURRENCY = 32, 8
POOLS = (1 / 16, 1 / 8, 1 / 4)  # of the blocks that the whole trace fills
# With an eighth, the cache must tell the blocks that are needed again soon from the rest. With a quarter, any order of
# eviction will do. With a sixteenth, running requests take most of the pool.
POOL = 1 / 8
MOST_GAP = 0.02
SNAPSHOTS = 16  # of a model with recurrent states, for each sequence at a time, as engine.memory plans them
MOST_STATE_GAP = 0.05  # to a model without such states
STEP_SECONDS = 0.01
QUICK = Mix(chats=10, few_shot=40, single=20, one_off=10, pause=0.1)


def cases(setting: Setting) -> list[Row]:
    """The gap between the ideal hit rate and the hit rate with a pool of an eighth of the trace's blocks, and between
    this rate and that of a model with recurrent states."""
    trace = make_trace(QUICK if setting.quick else Mix())
    num_prompt, num_blocks = sum(len(item.prompt) for item in trace), distinct_blocks(trace, BLOCK_SIZE)
    ideal = sum(ideal_hits(trace)) / num_prompt
    rates = {share: sum(replay(trace, int(share * num_blocks))) / num_prompt for share in POOLS}
    facts = {
        "ideal": ideal,
        "hit_rates": [{"pool_blocks": int(share * num_blocks), "rate": rate} for share, rate in rates.items()],
        "requests": len(trace),
        "prompt_tokens": num_prompt,
        "blocks": num_blocks,
    }
    recurrent = sum(replay(trace, int(POOL * num_blocks), snapshots=SNAPSHOTS * CONCURRENCY)) / num_prompt
    return [row(ideal, rates[POOL], facts), state_row(rates[POOL], recurrent)]


def row(ideal: float, measured: float, facts: dict[str, Any]) -> Row:
    gap = ideal - measured
    return Row("hit rate within 2 points of the ideal, mixed trace", MOST_GAP / max(gap, 1e-4), 1.0, facts)


def state_row(plain: float, recurrent: float) -> Row:
    gap = plain - recurrent
    facts = {"plain": plain, "recurrent": recurrent, "snapshots": SNAPSHOTS * CONCURRENCY}
    return Row("hit rate with recurrent states within 5 points", MOST_STATE_GAP / max(gap, 1e-4), 1.0, facts)


class TraceRunner:
    """Gives each request the answer of an item of the trace, on a clock of its own. The request's seed is the item's
    number."""

    def __init__(self, trace: list[Item]) -> None:
        self._trace = trace
        self._now = 0.0
        self._slots: dict[int, tuple[Item, int]] = {}  # (item, number of tokens of its answer that were given)

    def execute(self, plan: StepPlan) -> list[Sampled]:
        for new in plan.new:
            self._slots[new.slot] = self._item(new), len(new.token_ids) - new.num_prompt_tokens
        self._now += self.step_seconds(plan)
        return [Sampled(self._tokens(chunk)) for chunk in plan.chunks]

    def step_seconds(self, plan: StepPlan) -> float:
        """Seconds of a step. A token costs a hundredth of the time to read the weights."""
        return STEP_SECONDS * (1 + sum(chunk.num_tokens for chunk in plan.chunks) / 100)

    def clock(self) -> float:
        return self._now

    def _item(self, new: NewSequence) -> Item:
        assert new.params.seed is not None
        return self._trace[new.params.seed]

    def _tokens(self, chunk: Chunk) -> list[SampledToken]:
        item, given = self._slots[chunk.slot]
        end = given + chunk.num_sampled
        self._slots[chunk.slot] = item, end
        return [SampledToken(int(token)) for token in item.answer[given:end]]


def replay(trace: list[Item], num_blocks: int, concurrency: int = CONCURRENCY, *, snapshots: int = 0) -> list[int]:
    """Cached prompt tokens of each item.

    At most `concurrency` requests are in the scheduler at a time. A chat's turn comes when the turn before it was
    answered.
    """
    runner = TraceRunner(trace)
    of_engine = limits(trace, num_blocks, concurrency, snapshots)
    scheduler = Scheduler(of_engine, (), clock=runner.clock)
    coming, hits, unfinished = deque(range(len(trace))), [0] * len(trace), set(range(len(trace)))
    num_inside = 0
    while unfinished:
        while num_inside < concurrency and (index := _next_ready(trace, coming, unfinished)) is not None:
            scheduler.add(request(index, trace[index]))
            num_inside += 1
        plan = scheduler.schedule()
        outputs = (
            scheduler.take_outputs()
            if plan is None
            else scheduler.update(plan, runner.execute(plan), runner.step_seconds(plan))
        )
        for output in outputs:
            hits[int(output.request_id)] += output.cached_tokens
            if output.finish_reason:
                assert output.finish_reason == "length", output
                unfinished.remove(int(output.request_id))
                num_inside -= 1
    return hits


def limits(trace: list[Item], num_blocks: int, concurrency: int, snapshots: int = 0) -> SchedulerLimits:
    """Limits with `num_blocks` blocks, but no fewer than the longest request needs."""
    longest = max(len(item.prompt) + len(item.answer) for item in trace)
    return SchedulerLimits(
        kv=KVLimits(
            max(num_blocks, longest // BLOCK_SIZE + 1),
            BLOCK_SIZE,
            first_snapshot=concurrency,
            num_snapshots=snapshots,
        ),
        max_batch_size=concurrency,
        max_step_tokens=512,
        max_model_len=longest,
        max_queue=concurrency,
        vocab_size=VOCAB,
    )


def _next_ready(trace: list[Item], coming: deque[int], unfinished: set[int]) -> int | None:
    """Take the first item from `coming` that waits for no other."""
    for index in coming:
        if (after := trace[index].after) is None or after not in unfinished:
            coming.remove(index)
            return index
    return None


def request(index: int, item: Item) -> Request:
    params = SamplingParams(max_tokens=len(item.answer), ignore_eos=True, seed=index)
    return Request(request_id=str(index), prompt_ids=item.prompt.tolist(), params=params)
