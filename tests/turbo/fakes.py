"""A runner without a model. It simulates KV memory and checks every plan. Its tokens depend on the request alone."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lmkit.turbo.kv.manager import KVLimits
from lmkit.turbo.plan import Chunk, NewSequence, Sampled, SampledToken, StepPlan
from lmkit.turbo.request import FinishReason, Request, SamplingParams, StepOutput, TokenLogprobs
from lmkit.turbo.scheduling.limits import SchedulerLimits
from lmkit.turbo.scheduling.scheduler import Scheduler

EOS = (0, 1)
KV = KVLimits(num_blocks=16, block_size=4, max_step_tokens=16, prefix_cache=False)
LIMITS = SchedulerLimits(
    kv=KV, max_batch_size=4, max_step_tokens=16, max_model_len=64, max_queue=100, vocab_size=50,
    decode_slowdown=math.inf,
)  # fmt: skip


def limits(**changes: Any) -> SchedulerLimits:
    """LIMITS with other values, of its own fields or of its KVLimits. There is no prefix cache unless asked for."""
    steps = {"max_step_tokens": changes["max_step_tokens"]} if "max_step_tokens" in changes else {}
    of_kv = {name: changes.pop(name) for name in list(changes) if hasattr(KV, name) and name != "max_step_tokens"}
    return replace(LIMITS, kv=replace(KV, **of_kv, **steps), **changes)


def request(name: str, prompt: list[int] | int, **params: Any) -> Request:
    """A request. `prompt` may be a length. The answer has no eos and 4 tokens unless `params` says otherwise. `params`
    may have fields of Request."""
    ids = [(7 * i + 3) % 48 + 2 for i in range(prompt)] if isinstance(prompt, int) else prompt
    fields = {key: params.pop(key) for key in list(params) if key in Request.__struct_fields__}
    config = SamplingParams(**({"max_tokens": 4, "ignore_eos": True, "seed": 1} | params))
    return Request(request_id=name, prompt_ids=ids, params=config, **fields)


def next_token(prefix: list[int], num_outputs: int, params: SamplingParams, eos: tuple[int, ...], vocab: int) -> int:
    """A pure function of the request and its tokens so far. It holds back eos and stop ids as a sampler would."""
    held_back = set(eos + params.stop_token_ids) if num_outputs < params.min_tokens else set()
    return next(t for i in range(1000) if (t := hash((params.seed, i, *prefix)) % vocab) not in held_back)


def prompt_logprob(prefix: list[int]) -> TokenLogprobs:
    """The log-probability of the last token of `prefix`, given the others."""
    return TokenLogprobs(prefix[-1], -float(hash(tuple(prefix)) % 1000), [(len(prefix), -1.0)])


def solo(req: Request, limits: SchedulerLimits) -> tuple[list[int], FinishReason]:
    """The tokens and the finish reason that a request must give, computed without a scheduler."""
    params, ids, n = req.params, list(req.prompt_ids), len(req.prompt_ids)
    eos = () if params.ignore_eos else EOS
    if params.max_tokens == 0:
        return [], "length"
    while True:
        ids.append(next_token(ids, len(ids) - n, params, eos, limits.vocab_size))
        if ids[-1] in eos + params.stop_token_ids and len(ids) - n > params.min_tokens:
            return ids[n:], "stop"
        if len(ids) - n == params.max_tokens or len(ids) == limits.max_model_len:
            return ids[n:], "length"


def sampled(*token_ids: int) -> Sampled:
    """A chunk's result without log-probabilities."""
    return Sampled([SampledToken(token) for token in token_ids])


@dataclass
class FakeSlot:
    new: NewSequence
    token_ids: list[int]
    num_computed: int
    tables: list[list[int]] = field(default_factory=list)  # of each group
    contents: list[int] = field(default_factory=list)

    def content(self, count: int) -> list[int]:
        """The content that KV memory must hold for the first `count` tokens: for each token, a hash of all up to it."""
        for token in self.token_ids[len(self.contents) : count]:
            self.contents.append(hash((self.contents[-1] if self.contents else 0, token)))
        return self.contents[:count]


class FakeRunner:
    """Asserts that plans can be carried out, and that each sequence finds its whole context intact in its blocks.

    The value written for a token is a hash of all tokens up to it, as real KV depends on all of them. A reader can
    therefore tell whether it was computed for the same text. A block is bytes, so that tiers can carry it.
    """

    def __init__(self, limits: SchedulerLimits, tiers: Any = None) -> None:
        self.limits = limits
        self.tiers = tiers
        self.memory = np.zeros((limits.kv.num_blocks, limits.kv.block_size), np.int64)
        self.slots: dict[int, FakeSlot] = {}
        self.failed: set[int] = set()
        self.states: dict[int, int] = {}  # by row, of a model that has any: the content of the last token
        self.num_computed = 0  # tokens of all sequences

    @property
    def nbytes(self) -> int:
        return self.memory[0].nbytes

    @property
    def state_parts(self) -> int:
        return 2

    def read(self, block: int, out: memoryview) -> None:
        row = (block - len(self.memory)) // self.state_parts
        out[:] = self.memory[block].tobytes() if row < 0 else np.full_like(self.memory[0], self.states[row]).tobytes()

    def write(self, block: int, data: memoryview) -> None:
        row, part = divmod(block - len(self.memory), self.state_parts)
        content = np.frombuffer(data, np.int64)
        if row < 0:
            self.memory[block] = content
        else:  # the whole state is there with the last part
            self.states[row] = int(content[0]) if part and self.states.get(~row) == content[0] else 0
            self.states[~row] = int(content[0])

    def same_block(self, a: int, b: int) -> bool:
        return bool((self.memory[a] == self.memory[b]).all())

    def same_state(self, a: int, b: int) -> bool:
        return self.states[a] == self.states[b]

    def execute(self, plan: StepPlan) -> list[Sampled]:
        assert self.tiers is not None or not plan.loads + plan.saves
        for slot in plan.freed:
            self.slots.pop(slot, None)
        if self.tiers is not None:
            self.tiers.save(plan.saves)
        for source, target in plan.copies:
            self.memory[target] = self.memory[source]
        for load in plan.loads:
            self.tiers.load(load)
        for new in plan.new:
            assert new.slot not in self.slots, "the slot is taken"
            assert 0 <= new.slot < self.limits.max_batch_size
            self.failed.discard(new.slot)
            (chunk,) = (chunk for chunk in plan.chunks if chunk.slot == new.slot)
            self.slots[new.slot] = FakeSlot(new, list(new.token_ids), chunk.start, self._tables(new))
        assert plan.chunks or plan.loads or plan.saves, "an empty step"
        chunks = [chunk for chunk in plan.chunks if chunk.slot not in self.failed]
        assert sum(c.num_tokens for c in chunks) <= self.limits.max_step_tokens
        assert len({c.slot for c in chunks}) == len(chunks), "two chunks of one sequence"
        if self.limits.kv.snapshots:
            self._advance_states(chunks)
        for chunk in chunks:
            self._write(self.slots[chunk.slot], chunk)
        # All writes come first, as in a forward pass. So a block with two writers shows even if the later one does the
        # damage.
        results = {chunk.slot: self._result(self.slots[chunk.slot], chunk) for chunk in chunks}
        return [results.get(chunk.slot, Sampled()) for chunk in plan.chunks]

    def _advance_states(self, chunks: list[Chunk]) -> None:
        """All are read before any is written, or one that is read is written: sequences advance at the same time."""
        written: list[int] = []
        for chunk in chunks:
            seq, rows = self.slots[chunk.slot], self.limits.kv.snapshots
            contents, behind = [0, *seq.content(chunk.start)], chunk.start - chunk.replayed
            source = chunk.source if chunk.source >= 0 else chunk.slot
            assert source == chunk.slot or source in rows
            assert not behind or self.states[source] == contents[behind], "the state of another text"
            assert source not in written, "a state is read and written in one step"
            written.append(chunk.slot)
            if chunk.snapshot >= 0:
                assert chunk.snapshot in rows
                assert chunk.snapshot not in written, "two snapshots in one place"
                written.append(chunk.snapshot)
        for chunk in chunks:
            end, first = chunk.start + chunk.num_tokens - len(chunk.draft), chunk.start - chunk.replayed
            contents = [0, *self.slots[chunk.slot].content(end)]
            assert chunk.source < 0 or chunk.source not in written, "a state is read and written in one step"
            self.states[chunk.slot] = contents[-1]
            if chunk.snapshot >= 0:
                assert 0 < chunk.snapshot_after <= end - first
                self.states[chunk.snapshot] = contents[first + chunk.snapshot_after]

    def _tables(self, new: NewSequence) -> list[list[int]]:
        assert len(new.block_tables) == self.limits.kv.num_groups
        return [list(table) for table in new.block_tables]

    def fail(self, plan: StepPlan) -> None:
        """The step breaks before it has moved or computed anything. Its saves and loads still happen: they do not
        belong to the step."""
        if self.tiers is not None:
            self.tiers.save(plan.saves)
        for load in plan.loads:
            self.tiers.load(load)
        for slot in plan.freed:
            self.slots.pop(slot, None)
        self.failed.update(chunk.slot for chunk in plan.chunks)

    def _write(self, seq: FakeSlot, chunk: Chunk) -> None:
        end = chunk.start + chunk.num_tokens
        known = end - len(chunk.draft)
        assert chunk.start == seq.num_computed, "a gap, or computed twice"
        assert known > chunk.start
        assert known <= len(seq.token_ids) <= self.limits.max_model_len
        assert chunk.num_sampled == (1 + len(chunk.draft) if known == len(seq.token_ids) else 0)
        assert all(0 <= block < self.limits.kv.num_blocks for blocks in chunk.new_blocks for block in blocks)
        assert len(chunk.new_blocks) in (0, len(seq.tables))
        for table, blocks in zip(seq.tables, chunk.new_blocks, strict=False):
            table += blocks
        positions = np.arange(chunk.start, end)
        computed = FakeSlot(seq.new, seq.token_ids[:known] + chunk.draft, end) if chunk.draft else seq
        for group, table in enumerate(seq.tables):  # groups hold different bytes for the same tokens
            self.memory[self._cells(table, positions)] = np.array(computed.content(end)[chunk.start :]) + group
        seq.num_computed = known
        self.num_computed += chunk.num_tokens

    def _cells(self, table: list[int], positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        index, offset = np.divmod(positions, self.limits.kv.block_size)
        return np.array(table, np.int64)[index], offset

    def _check_context(self, seq: FakeSlot, chunk: Chunk) -> None:
        group = 0
        for layers in self.limits.kv.classes:
            seen = np.arange(seq.num_computed)  # positions that the chunk's first token sees
            if layers.window:
                seen = seen[(seen > chunk.start - layers.window) | (seen < layers.sinks)]
            wanted = np.array(seq.content(seq.num_computed))[seen]
            for table in seq.tables[group : group + layers.num_groups]:
                wrong = self.memory[self._cells(table, seen)] != wanted + group
                assert not wrong.any(), f"positions {seen[wrong].tolist()} of group {group} hold something else"
                group += 1

    def _result(self, seq: FakeSlot, chunk: Chunk) -> Sampled:
        self._check_context(seq, chunk)
        last_scored = min(seq.num_computed, seq.new.num_prompt_tokens - 1)
        scores = [
            prompt_logprob(seq.token_ids[: p + 2]) for p in range(max(chunk.start, seq.new.logprobs_start), last_scored)
        ]
        if not seq.new.prompt_logprobs:
            scores = []
        tokens: list[SampledToken] = []
        while len(tokens) < chunk.num_sampled:
            num_outputs, new = len(seq.token_ids) - seq.new.num_prompt_tokens, seq.new
            token = next_token(seq.token_ids, num_outputs, new.params, new.eos_token_ids, self.limits.vocab_size)
            seq.token_ids.append(token)
            tokens.append(SampledToken(token, -float(token), [(token, -float(token))]))
            if chunk.draft[len(tokens) - 1 : len(tokens)] != [token]:
                break
            seq.num_computed += 1
        return Sampled(tokens, scores)


class FakeEngine:
    """Runs Scheduler and FakeRunner in step and collects outputs by request. `depth` plans are in flight at a time."""

    def __init__(
        self,
        limits: SchedulerLimits = LIMITS,
        *,
        depth: int = 1,
        tiers: Callable[[FakeRunner], Any] | None = None,
        clock: Callable[[], float] | None = None,
        seconds: Callable[[StepPlan], float] = lambda plan: 0.0,
    ) -> None:
        """`seconds`: the time of a step as the scheduler sees it."""
        self.runner = FakeRunner(limits)
        self.runner.tiers = tiers(self.runner) if tiers else None
        now = itertools.count()
        clock = clock or (lambda: float(next(now)))
        self.scheduler = Scheduler(limits, EOS, tiers=self.runner.tiers, clock=clock, stored=self.runner)
        self.outputs: dict[str, list[StepOutput]] = {}
        self.num_steps = 0
        self.seconds = seconds
        self.depth = depth
        self.plans: deque[StepPlan] = deque()  # in flight

    def add(self, *requests: Request) -> None:
        for req in requests:
            self.scheduler.add(req)
            self.outputs[req.request_id] = []

    def collect(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            previous = self.outputs[output.request_id]
            assert not (previous and previous[-1].finish_reason), f"{output.request_id}: an output after the last one"
            previous.append(output)

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
        return plan

    def step(self) -> StepPlan | None:
        """Make a plan. Carry out the oldest plan in flight if there are enough."""
        plan = self.schedule()
        if self.plans and (plan is None or len(self.plans) >= self.depth):
            self.land()
        elif not self.plans:
            self.collect(self.scheduler.take_outputs())
            self.scheduler.wait(0.01)
        return plan

    def land(self) -> None:
        oldest = self.plans.popleft()
        self.num_steps += bool(oldest.chunks)
        self.collect(self.scheduler.update(oldest, self.runner.execute(oldest), self.seconds(oldest)))

    def run(self) -> None:
        self.run_until_idle()
        self.check_idle()

    def run_until_idle(self) -> None:
        """Run until there is no work. Leases stay."""
        while self.scheduler.has_work():
            self.step()

    def check_idle(self) -> None:
        """Assert that only the cache and leases hold blocks."""
        self.scheduler.check_integrity()
        self.scheduler.kv.leases.expire(math.inf)
        assert self.scheduler.stats().blocks_used == 0
        self.scheduler.check_integrity()

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.token_ids]

    def reason(self, name: str) -> FinishReason | None:
        return self.outputs[name][-1].finish_reason
