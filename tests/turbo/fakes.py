"""A runner without a model: it simulates KV memory, checks every plan, and its tokens depend on the request alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lmkit.turbo.plan import Chunk, NewSequence, Sampled, StepPlan
from lmkit.turbo.policy import Order, fcfs
from lmkit.turbo.request import FinishReason, GenerationConfig, Request, StepOutput, TokenLogprobs
from lmkit.turbo.scheduler import Scheduler, SchedulerLimits

EOS = (0, 1)
LIMITS = SchedulerLimits(
    num_blocks=16, block_size=4, max_batch_size=4, max_step_tokens=16, max_model_len=64, max_queue=100, vocab_size=50
)


def request(name: str, prompt: list[int] | int, **params: Any) -> Request:
    """`prompt` may be a length. No eos and 4 tokens unless `params` says otherwise."""
    ids = [(7 * i + 3) % 48 + 2 for i in range(prompt)] if isinstance(prompt, int) else prompt
    scored = params.pop("prompt_logprobs", False)
    config = GenerationConfig(**({"max_new_tokens": 4, "ignore_eos": True, "seed": 1} | params))
    return Request(request_id=name, prompt_ids=ids, params=config, prompt_logprobs=scored)


def next_token(prefix: list[int], num_outputs: int, params: GenerationConfig, eos: tuple[int, ...], vocab: int) -> int:
    """A pure function of the request and its tokens so far; eos and stop ids are held back as a sampler would."""
    held_back = set(eos + params.stop_token_ids) if num_outputs < params.min_new_tokens else set()
    return next(t for i in range(1000) if (t := hash((params.seed, i, *prefix)) % vocab) not in held_back)


def prompt_logprob(prefix: list[int]) -> TokenLogprobs:
    """Of the last token of `prefix`, given the others."""
    return TokenLogprobs(prefix[-1], -float(hash(tuple(prefix)) % 1000), [(len(prefix), -1.0)])


def solo(req: Request, limits: SchedulerLimits) -> tuple[list[int], FinishReason]:
    """What a request must give, worked out without any scheduler."""
    params, ids, n = req.params, list(req.prompt_ids), len(req.prompt_ids)
    eos = () if params.ignore_eos else EOS
    if params.max_new_tokens == 0:
        return [], "length"
    while True:
        ids.append(next_token(ids, len(ids) - n, params, eos, limits.vocab_size))
        if ids[-1] in eos + params.stop_token_ids and len(ids) - n > params.min_new_tokens:
            return ids[n:], "stop"
        if len(ids) - n == params.max_new_tokens or len(ids) == limits.max_model_len:
            return ids[n:], "length"


@dataclass
class FakeSlot:
    owner: int  # unique per entry: what another sequence, or an earlier life of this one, wrote is told apart
    new: NewSequence
    token_ids: list[int]
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)


class FakeRunner:
    """Asserts that plans can be carried out, and that each sequence finds its whole context intact in its blocks."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.memory: dict[int, tuple[int, int, int]] = {}  # block * block_size + offset -> (owner, token, position)
        self.slots: dict[int, FakeSlot] = {}
        self.entries = 0

    def execute(self, plan: StepPlan) -> list[Sampled]:
        for slot in plan.freed:
            self.slots.pop(slot, None)
        for new in plan.new:
            assert new.slot not in self.slots, "the slot is taken"
            assert 0 <= new.slot < self.limits.max_batch_size
            self.slots[new.slot] = FakeSlot(self.entries, new, list(new.token_ids))
            self.entries += 1
        assert plan.chunks, "an empty step"
        assert sum(c.num_tokens for c in plan.chunks) <= self.limits.max_step_tokens
        assert len({c.slot for c in plan.chunks}) == len(plan.chunks), "two chunks of one sequence"
        for chunk in plan.chunks:
            self._write(self.slots[chunk.slot], chunk)
        # All writes first, as in a forward pass: a block with two owners shows even if the later one does the damage.
        return [self._result(self.slots[chunk.slot], chunk) for chunk in plan.chunks]

    def _write(self, seq: FakeSlot, chunk: Chunk) -> None:
        end = chunk.start + chunk.num_tokens
        assert chunk.start == seq.num_computed, "a gap, or computed twice"
        assert chunk.num_tokens > 0
        assert end <= len(seq.token_ids) <= self.limits.max_model_len
        assert chunk.sample == (end == len(seq.token_ids))
        assert all(0 <= block < self.limits.num_blocks for block in chunk.new_blocks)
        seq.blocks += chunk.new_blocks
        for position in range(chunk.start, end):
            self.memory[self._address(seq, position)] = (seq.owner, seq.token_ids[position], position)
        seq.num_computed = end

    def _address(self, seq: FakeSlot, position: int) -> int:
        block, offset = divmod(position, self.limits.block_size)
        return seq.blocks[block] * self.limits.block_size + offset

    def _result(self, seq: FakeSlot, chunk: Chunk) -> Sampled:
        prefix = []
        for position in range(seq.num_computed):
            owner, token, where = self.memory[self._address(seq, position)]
            assert (owner, where) == (seq.owner, position), f"position {position} was overwritten"
            prefix.append(token)
        assert prefix == seq.token_ids[: seq.num_computed]
        last_scored = min(seq.num_computed, seq.new.num_prompt_tokens - 1)
        scores = [prompt_logprob(seq.token_ids[: p + 2]) for p in range(chunk.start, last_scored)]
        if not seq.new.prompt_logprobs:
            scores = []
        if not chunk.sample:
            return Sampled(-1, prompt_logprobs=scores)
        num_outputs = len(seq.token_ids) - seq.new.num_prompt_tokens
        token = next_token(prefix, num_outputs, seq.new.params, seq.new.eos_token_ids, self.limits.vocab_size)
        seq.token_ids.append(token)
        return Sampled(token, -float(token), [(token, -float(token))], scores)


class FakeEngine:
    """Scheduler and FakeRunner in step; collects outputs by request."""

    def __init__(self, limits: SchedulerLimits = LIMITS, order: Order = fcfs) -> None:
        self.scheduler = Scheduler(limits, EOS, order=order)
        self.runner = FakeRunner(limits)
        self.outputs: dict[str, list[StepOutput]] = {}
        self.num_steps = 0

    def add(self, *requests: Request) -> None:
        for req in requests:
            self.scheduler.add(req)
            self.outputs[req.request_id] = []

    def collect(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            previous = self.outputs[output.request_id]
            assert not (previous and previous[-1].finish_reason), f"{output.request_id}: an output after the last one"
            previous.append(output)

    def step(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is None:
            self.collect(self.scheduler.take_outputs())
        else:
            self.num_steps += 1
            self.collect(self.scheduler.update(plan, self.runner.execute(plan)))
        return plan

    def run(self) -> None:
        while self.scheduler.has_work():
            self.step()
        self.scheduler.check_integrity()
        assert self.scheduler.stats().blocks_used == 0

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.token_ids]

    def reason(self, name: str) -> FinishReason | None:
        return self.outputs[name][-1].finish_reason
