"""When a draft model drafts: where it saves time, by a clock that charges its steps as well."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lmkit.turbo.scheduling import model_speculation
from lmkit.turbo.scheduling.scheduler import Scheduler
from lmkit.turbo.sequence import Sequence
from tests.turbo.fakes import next_token
from tests.turbo.scheduling.test_speculation import Machine, requests


class Model:
    """Drafts right with a chance of `percent` in a hundred, in steps of `seconds`. A draft takes `around` beside."""

    def __init__(self, machine: DraftingMachine, percent: int, seconds: float, around: float) -> None:
        self.machine, self.percent, self.seconds, self.around = machine, percent, seconds, around
        self.forgotten: list[str] = []

    def draft(self, lengths: dict[Sequence, int]) -> tuple[dict[Sequence, list[int]], list[tuple[int, float]]]:
        drafts: dict[Sequence, list[int]] = {}
        for seq, length in lengths.items():
            tokens, drafts[seq] = seq.token_ids.tolist(), []
            for i in range(length):
                right = next_token(tokens, seq.num_outputs + i, seq.request.params, (), 50)
                wrong = hash((seq.num_tokens + i, 3)) % 100 >= self.percent
                drafts[seq].append((right + 1) % 50 if wrong else right)
                tokens.append(drafts[seq][-1])
        count = max(lengths.values())
        self.machine.now += count * self.seconds + self.around
        return drafts, [(len(lengths), self.seconds)] * count

    def follow(self, wanted: bool) -> float:
        return 0.0

    def forget(self, seq: Sequence) -> None:
        self.forgotten.append(seq.request_id)


class DraftingMachine(Machine):
    def __init__(self, percent: int, seconds: float, around: float = 0.0, **changes: Any) -> None:
        super().__init__(max_draft_tokens=8, **changes)
        self.model = Model(self, percent, seconds, around)
        self.scheduler = Scheduler(self.scheduler.limits, (), clock=lambda: self.now, draft_model=self.model)


@pytest.mark.parametrize("count", [1, 4])
def test_a_good_draft_model_saves_time(count: int) -> None:
    plain = Machine().finish(requests(count, 0))
    machine = DraftingMachine(90, 1.0)
    assert machine.finish(requests(count, 0)) < plain / 1.7
    assert sorted(machine.model.forgotten) == [f"r{i}" for i in range(count)]


@pytest.mark.parametrize(("percent", "seconds"), [(0, 1.0), (90, 30.0), (30, 10.0)])
@pytest.mark.parametrize("count", [1, 4, 16])
def test_a_draft_model_never_costs_much(percent: int, seconds: float, count: int) -> None:
    plain = Machine().finish(requests(count, 0))
    machine = DraftingMachine(percent, seconds)
    first = machine.finish(requests(count, 0))
    assert first < 1.1 * plain + 5 * (model_speculation.PROBE_LENGTH * seconds + 20)  # what the first steps learn from


@pytest.mark.parametrize("around", [0.0, 300.0], ids=["short prompts", "long prompts"])
def test_a_draft_model_that_is_never_right_costs_a_small_share(around: float) -> None:
    """What its prompts take is not expected, so it shows only in the account."""
    plain, machine = Machine(), DraftingMachine(0, 10.0, around)
    for turn in range(20):
        texts = [msgspec.structs.replace(r, request_id=f"{turn}") for r in requests(1, 0)]
        plain.finish(texts)
        machine.finish(texts)
    assert machine.now < 1.015 * plain.now + 12 * plain.fixed + 3 * around  # no time is known in the first steps


def test_what_a_draft_takes_beside_its_steps_counts() -> None:
    plain = Machine().finish(requests(1, 0))
    machine = DraftingMachine(90, 1.0, around=200.0)
    first = machine.finish(requests(1, 0))
    assert first < 1.1 * plain + 5 * (model_speculation.PROBE_LENGTH + 200 + 20)


def test_what_pays_no_longer_is_tried_seldom_and_found_again() -> None:
    machine = DraftingMachine(0, 1.0)
    machine.finish(requests(4, 0))
    drafts, tokens = machine.scheduler.stats().drafts, machine.scheduler.stats().generation_tokens
    assert drafts < tokens / 10
    machine.model.percent = 95
    for turn in range(6):
        machine.finish([msgspec.structs.replace(r, request_id=f"again{turn}") for r in requests(1, 0)])
    assert machine.scheduler.stats().drafts > 3 * drafts
