"""The pacer against simulated machines: what it allows, how soon, and that noise and garbage do not lead it astray."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest

from lmkit.turbo.scheduling.pacing import SMALL_EVERY, Pacer

MAX_TOKENS = 512


@dataclass
class Machine:
    """Seconds of a step; `noise` multiplies what is measured, one step in a hundred is four times as long."""

    step: float = 8e-3
    decode: float = 5e-4
    mixed: float = 0.0
    prompt: float = 5e-4
    attend: float = 1e-8
    noise: float = 0.05
    outliers: float = 0.01
    speed: float = 1.0

    def __post_init__(self) -> None:
        self.random = random.Random(0)

    def seconds(self, num_decodes: int, num_prompt: int, context: int) -> float:
        attended = num_prompt * (context - num_prompt / 2)
        mixed = self.mixed if num_decodes and num_prompt else 0.0
        total = self.step + self.decode * num_decodes + mixed + self.prompt * num_prompt + self.attend * attended
        return total / self.speed

    def measured(self, num_decodes: int, num_prompt: int, context: int) -> float:
        outlier = 4 if self.random.random() < self.outliers else 1
        noise = self.random.lognormvariate(0, self.noise)
        return self.seconds(num_decodes, num_prompt, context) * noise * outlier


@dataclass
class Run:
    ratios: list[float]  # of each step's true time to that of a decode step
    chunks: list[int]

    @property
    def p99(self) -> float:
        return sorted(self.ratios)[math.ceil(0.99 * len(self.ratios)) - 1]

    @property
    def extra(self) -> float:
        """Mean time for the prompt, in decode steps."""
        return sum(self.ratios) / len(self.ratios) - 1


def decode(pacer: Pacer, machine: Machine, steps: int = 20, num_decodes: int = 4) -> None:
    for _ in range(steps):
        pacer.record(num_decodes, 0, 0, machine.measured(num_decodes, 0, 0))


def prefill(
    pacer: Pacer, machine: Machine, length: int, *, num_decodes: int = 4, waiting: int = 0, most: int = 20_000
) -> Run:
    """Compute a prompt beside decodes, at most `most` steps of it."""
    run, context = Run([], []), 0
    while context < length and len(run.chunks) < most:
        chunk = min(pacer.prompt_tokens(num_decodes, waiting), length - context)
        context += chunk
        run.chunks.append(chunk)
        decoding = machine.seconds(num_decodes, 0, 0)
        run.ratios.append(machine.seconds(num_decodes, chunk, context) / decoding)
        pacer.record(num_decodes, chunk, context, machine.measured(num_decodes, chunk, context))
    return run


def known(machine: Machine, slowdown: float = 2.0) -> Pacer:
    """A pacer that has seen a few short prompts come and go."""
    pacer = Pacer(slowdown, MAX_TOKENS)
    for _ in range(4):
        decode(pacer, machine)
        prefill(pacer, machine, 200)
    decode(pacer, machine)
    return pacer


CPU = Machine()
GPU = Machine(decode=5e-5, prompt=2e-5, attend=5e-10)


@pytest.mark.parametrize(
    ("machine", "share"),
    [
        (CPU, 0.8),
        (Machine(noise=0.1), 0.7),
        (Machine(prompt=2e-3), 0.8),
        (Machine(mixed=2e-3), 0.8),
        (GPU, 0.6),
    ],
    ids=["cpu", "noisy", "expensive prompt", "mixing costs", "gpu"],
)
def test_a_long_prompt_takes_its_time_and_no_more(machine: Machine, share: float) -> None:
    run = prefill(known(machine), machine, 8_192)
    assert run.p99 <= 2.1
    # Of the steps that are not small on purpose.
    full = sorted(run.ratios)[len(run.ratios) // SMALL_EVERY :]
    assert sum(full) / len(full) - 1 >= share


def test_the_first_prompt_begins_small_beside_decodes_and_soon_has_its_time() -> None:
    pacer = Pacer(2.0, MAX_TOKENS)
    assert pacer.prompt_tokens(4, 0) <= 16
    decode(pacer, CPU)
    run = prefill(pacer, CPU, 16_384)
    assert max(run.ratios) <= 2.2
    assert sum(run.ratios[8:40]) / 32 - 1 >= 0.75


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e3])
def test_nothing_depends_on_the_unit_of_time(scale: float) -> None:
    def chunks(speed: float) -> list[int]:
        machine = Machine(speed=speed)
        return prefill(known(machine), machine, 2000).chunks

    ours, reference = chunks(scale), chunks(1.0)
    assert sum(ours) == sum(reference) == 2000
    assert abs(len(ours) - len(reference)) <= 0.1 * len(reference)


def test_a_slow_phase_of_the_machine_leaves_the_chunk_alone() -> None:
    machine = Machine()
    pacer = known(machine)
    before = prefill(pacer, machine, 10_000, most=200)
    machine.speed = 1 / 3
    during = prefill(pacer, machine, 10_000, most=200)
    machine.speed = 1.0
    after = prefill(pacer, machine, 10_000, most=200)
    for run in (before, during, after):
        assert run.p99 <= 2.2
        assert run.extra >= 0.7


def test_attention_to_a_long_context_makes_chunks_smaller() -> None:
    machine = Machine(attend=1e-7)
    run = prefill(known(machine), machine, 16_384)
    assert sum(run.chunks[-64:]) < sum(run.chunks[:64]) / 2
    assert run.p99 <= 2.2


def test_the_given_context_overrides_the_last_one() -> None:
    machine = Machine(attend=1e-7)
    pacer = known(machine)
    prefill(pacer, machine, 16_384)
    assert pacer.prompt_tokens(4, 0, context=0) > 2 * pacer.prompt_tokens(4, 0)
    assert pacer.prompt_tokens(4, 0, context=16_384) == pacer.prompt_tokens(4, 0)


def test_those_who_wait_buy_the_prompt_more_time() -> None:
    extras = [prefill(known(CPU), CPU, 16_384, waiting=waiting).extra for waiting in (0, 1, 2)]
    assert extras[1] == pytest.approx(8 * extras[0], rel=0.25)
    assert extras[2] == pytest.approx(27 * extras[0], rel=0.25)


def test_a_short_prompt_is_not_cut_into_pieces_that_are_all_overhead() -> None:
    machine = Machine(step=3e-3, decode=2e-4, mixed=6e-3, prompt=6e-4)
    pacer = known(machine)
    assert 20 <= pacer.prompt_tokens(4, 0, context=0) <= 60, "about four times mixing's 10 tokens"
    assert pacer.prompt_tokens(4, 0, context=MAX_TOKENS) <= 8, "a long prompt goes on with what is bearable"


def test_a_smaller_slowdown_gives_the_prompt_less() -> None:
    run = prefill(known(CPU, slowdown=1.5), CPU, 8_192)
    assert run.p99 <= 1.6
    assert run.extra >= 0.3


def test_more_decodes_that_take_longer_leave_more_time() -> None:
    pacer = known(CPU)
    for count in (1, 8, 32, 1, 8, 32):
        decode(pacer, CPU, num_decodes=count)
    assert pacer.prompt_tokens(1, 0) < pacer.prompt_tokens(32, 0)


def test_where_mixing_costs_more_than_is_allowed_the_chunk_is_worth_it() -> None:
    machine = Machine(step=3e-3, decode=2e-4, mixed=6e-3, prompt=6e-4)
    run = prefill(known(machine), machine, 4_096)
    assert 3 <= sum(run.chunks) / len(run.chunks) <= 8


def test_bounds() -> None:
    pacer = known(CPU)
    assert pacer.prompt_tokens(0, 0) == pacer.prompt_tokens(0, 9) == MAX_TOKENS
    assert pacer.prompt_tokens(MAX_TOKENS - 1, 0) == 1
    assert pacer.prompt_tokens(MAX_TOKENS, 0) == 0
    assert pacer.prompt_tokens(4, 10**6) == MAX_TOKENS - 4
    assert known(Machine(prompt=0.02)).prompt_tokens(4, 0) == 1


@pytest.mark.parametrize("garbage", [0.0, -1.0, math.nan, math.inf, 1e-300, 1e300, 1e-6, 100.0])
def test_garbage_is_survived(garbage: float) -> None:
    """Times that no step can take are left out; those that a suspended machine may show are lived down."""
    machine = Machine()
    pacer = known(machine)
    for _ in range(2):
        pacer.record(4, 8, 1000, garbage)
        pacer.record(4, 0, 0, garbage)
        pacer.record(0, MAX_TOKENS, 1000, garbage)
    pacer.record(0, 0, 0, 1.0)
    decode(pacer, machine)
    most = 3.2 if garbage in (100.0, 1e-6) else 2.1
    for _ in range(2):
        assert prefill(pacer, machine, 16_384).p99 <= most
    assert math.isfinite(pacer.prefill_seconds(0, 1000))


def test_price_of_a_prefill() -> None:
    machine, pacer, context = Machine(attend=1e-7), Pacer(2.0, MAX_TOKENS), 0
    assert pacer.prefill_seconds(0, 1000) == pytest.approx(1.0, rel=0.2)  # what is assumed
    assert pacer.prefill_seconds(7, 7) == 0.0
    for _ in range(4):
        for context in range(MAX_TOKENS, 16_384 + 1, MAX_TOKENS):
            pacer.record(0, MAX_TOKENS, context, machine.measured(0, MAX_TOKENS, context))

    def true(start: int, end: int) -> float:
        return sum(machine.seconds(0, MAX_TOKENS, e) for e in range(start + MAX_TOKENS, end + 1, MAX_TOKENS))

    for start, end in ((0, 16_384), (8_192, 16_384), (0, 1024)):
        assert pacer.prefill_seconds(start, end) == pytest.approx(true(start, end), rel=0.25)


def test_a_prefill_has_a_price_where_prompts_were_only_computed_beside_decodes() -> None:
    pacer = known(CPU)
    prefill(pacer, CPU, 8_192)
    true = sum(CPU.seconds(0, MAX_TOKENS, end) for end in range(MAX_TOKENS, 8_193, MAX_TOKENS))
    assert pacer.prefill_seconds(0, 8_192) == pytest.approx(true, rel=0.4)


def test_the_same_records_give_the_same_chunks() -> None:
    def chunks() -> list[int]:
        machine = Machine()
        return prefill(known(machine), machine, 2000).chunks

    assert chunks() == chunks()
