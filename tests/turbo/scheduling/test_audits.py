"""Cache hits that are computed again: what differs is dropped, with all that was computed from it."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import pytest

from lmkit.models.kv_layout import KVClass
from lmkit.turbo.kv.radix_cache import HOLE
from lmkit.turbo.kv.tiers.store import TierStore
from lmkit.turbo.scheduling.audits import MAX_WAITING
from lmkit.turbo.scheduling.next_turns import STEP_SECONDS
from tests.turbo.fakes import FakeEngine, limits, request
from tests.turbo.scheduling.test_scheduler_prefixes import cached, text


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


def engine(every: int = 1, **changes: Any) -> FakeEngine:
    sizes = {"prefix_cache": True, "num_blocks": 300, "block_size": 8, "max_batch_size": 8, "max_step_tokens": 64}
    tiers = changes.pop("tiers", None)
    sizes["max_model_len"] = 800
    made = FakeEngine(limits(audit=every, **sizes | changes), tiers=tiers, clock=Clock())
    made.scheduler._pacer.tokens_within = lambda *_, **__: 32  # type: ignore[method-assign]
    return made


def audits(made: FakeEngine) -> dict[str, int]:
    return made.scheduler.stats().audits


def idle(made: FakeEngine) -> None:
    """Let everything that waits be audited."""
    made.run_until_idle()
    assert not made.scheduler._next_turns.audits
    made.scheduler.check_integrity()


def ask(made: FakeEngine, name: str, prompt: list[int], **fields: Any) -> list[int]:
    made.add(request(name, prompt, **fields))
    while not (made.outputs[name] and made.reason(name)):
        made.step()
    return made.tokens(name)


def blocks_of(made: FakeEngine, prompt: list[int], tenant: str = "") -> list[int]:
    (cache,) = made.scheduler.kv.caches
    return cache.match((tenant, ""), np.array(prompt, np.int32)).blocks


def damage(made: FakeEngine, block: int) -> None:
    made.runner.memory[block, 3] ^= 1


def test_right_blocks_are_found_right_piece_by_piece() -> None:
    made = engine()
    ask(made, "a", text(1, 100), max_tokens=1)
    ask(made, "b", text(1, 100) + text(2, 5), max_tokens=1)
    computed = made.runner.num_computed
    idle(made)
    assert audits(made) == {
        "hits": 1, "done": 1, "dropped": 0, "tokens": 96, "differences": 0, "removed_blocks": 0
    }  # fmt: skip
    assert made.runner.num_computed == computed + 96  # each piece begins with the blocks before it
    assert made.scheduler.stats().next_turns == {"prepared": 0, "used": 0, "wasted": 0}


def test_pieces_are_shorter_than_steps_of_next_turns() -> None:
    made = engine()
    made.scheduler._pacer.tokens_within = lambda seconds, *_, **__: 8 if seconds < STEP_SECONDS else 64  # type: ignore[method-assign]
    ask(made, "a", text(1, 32), max_tokens=1)
    ask(made, "b", [*text(1, 32), 1], max_tokens=1)
    pieces = []
    while (plan := made.step()) is not None:
        pieces += [chunk.num_tokens for chunk in plan.chunks]
    assert pieces == [8] * 4


@pytest.mark.parametrize("index", [0, 4, 11])
def test_a_block_that_differs_is_dropped_with_all_that_continue_it(
    index: int, caplog: pytest.LogCaptureFixture
) -> None:
    made = engine()
    prompt = text(1, 96)
    ask(made, "a", prompt, max_tokens=1, tenant="t")
    other = ask(made, "other", prompt[: 8 * index] + text(3, 40), max_tokens=1, tenant="t")
    idle(made)
    assert not audits(made)["differences"]
    damage(made, blocks_of(made, prompt, "t")[index])
    made.runner._check_context = lambda *_: None  # type: ignore[method-assign]
    ask(made, "b", prompt + text(2, 40), max_tokens=1, tenant="t")  # computed from what is wrong
    with caplog.at_level(logging.ERROR):
        idle(made)
    assert audits(made)["differences"] == 1
    assert audits(made)["removed_blocks"] == 12 - index + 5
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"tokens {8 * index} to {8 * index + 8}" in line
    assert "computed at" in line
    assert "tenant" in line
    assert "request a" not in line
    del made.runner._check_context
    assert ask(made, "c", prompt + text(2, 41), max_tokens=2, tenant="t")
    assert cached(made, "c") <= 8 * (index + 4)  # not more than what the audit computed
    assert ask(made, "d", prompt[: 8 * index] + text(3, 40), max_tokens=1, tenant="t") == other
    assert cached(made, "d") == 8 * index + 39  # what does not continue it stays
    idle(made)
    assert audits(made)["differences"] == 1


def test_swapped_blocks_of_two_tenants_are_found() -> None:
    made = engine()
    prompts = {"t": text(1, 64), "u": text(2, 64)}
    for tenant, prompt in prompts.items():
        ask(made, tenant, prompt, max_tokens=1, tenant=tenant)
    a, b = (blocks_of(made, prompt, tenant)[5] for tenant, prompt in prompts.items())
    made.runner.memory[[a, b]] = made.runner.memory[[b, a]]
    made.runner._check_context = lambda *_: None  # type: ignore[method-assign]
    for tenant, prompt in prompts.items():
        ask(made, f"{tenant}2", [*prompt, 7], max_tokens=1, tenant=tenant)
    idle(made)
    assert audits(made)["differences"] == 2
    assert [len(blocks_of(made, prompt, tenant)) for tenant, prompt in prompts.items()] == [8, 8]  # computed anew


def test_one_hit_in_so_many_and_not_the_same_again() -> None:
    made = engine(every=10)
    for name, seed in (("a", 1), ("b", 2)):
        ask(made, name, text(seed, 40), max_tokens=1)
    for i in range(9):
        ask(made, f"a{i}", [*text(1, 40), i], max_tokens=1)
    assert not made.scheduler._next_turns.audits._waiting
    ask(made, "a9", [*text(1, 40), 9], max_tokens=1)
    idle(made)
    assert audits(made)["done"] == 1
    for i in range(10, 20):
        ask(made, f"a{i}", [*text(1, 40), i], max_tokens=1)
    ask(made, "b1", [*text(2, 40), 1], max_tokens=1)
    (waiting,) = made.scheduler._next_turns.audits._waiting
    assert waiting.ids == text(2, 40)


def test_requests_come_first_and_a_piece_that_is_planned_is_compared() -> None:
    made = engine()
    made.depth = 2
    prompt = text(1, 96)
    ask(made, "a", prompt, max_tokens=1)
    ask(made, "b", [*prompt, 1], max_tokens=1)
    plan = made.schedule()
    assert plan is not None
    assert [chunk.num_tokens for chunk in plan.chunks] == [32]
    made.add(request("c", text(5, 30), max_tokens=3))
    assert made.step() is None  # the audit's step ends first
    plan = made.step()
    assert plan is not None
    assert [chunk.num_tokens for chunk in plan.chunks] == [30]  # beside nothing else
    while not (made.outputs["c"] and made.reason("c")):
        plan = made.step()
        assert plan is None or all(chunk.num_tokens < 32 for chunk in plan.chunks)
    assert made.scheduler._next_turns.audits._waiting[0].done == 32
    idle(made)
    assert audits(made)["done"] == 1
    assert audits(made)["tokens"] == 96


def test_no_more_than_requests_may_lose() -> None:
    made = engine()
    ask(made, "a", text(1, 64), max_tokens=1)
    ask(made, "b", [*text(1, 64), 1], max_tokens=1)
    made.scheduler._next_turns.allowance._left = 0.0
    assert not made.scheduler.has_work()
    made.scheduler._next_turns.allowance._left = 0.1
    assert made.scheduler.has_work()
    idle(made)
    assert audits(made)["done"] == 1


def test_what_began_with_a_copy_of_a_wrong_block_is_dropped_too() -> None:
    made = engine()
    prompt = text(1, 64)
    ask(made, "a", prompt, max_tokens=1)
    damage(made, blocks_of(made, prompt)[5])
    made.runner._check_context = lambda *_: None  # type: ignore[method-assign]
    ask(made, "b", [*prompt[:44], *text(3, 30)], max_tokens=1)
    assert cached(made, "b") == 44
    ask(made, "c", [*prompt, 1], max_tokens=1)
    idle(made)
    assert audits(made)["differences"] == 1
    del made.runner._check_context
    ask(made, "d", [*prompt[:44], *text(3, 31)], max_tokens=1)  # the runner checks what it finds
    assert cached(made, "d") <= 44


@pytest.mark.parametrize("classes", [(KVClass(20, 4),), (KVClass(), KVClass(20, 0, 2))])
def test_windows(classes: tuple[KVClass, ...]) -> None:
    made = engine(classes=classes)
    prompt = text(1, 96)
    ask(made, "a", prompt, max_tokens=1)
    ask(made, "b", [*prompt, 2], max_tokens=1)
    idle(made)
    assert audits(made)["done"] == 1
    assert not audits(made)["differences"]
    cache = made.scheduler.kv.caches[-1]
    seen = [b for b in cache.match(("", ""), np.array(prompt, np.int32)).blocks if b != HOLE]
    damage(made, made.scheduler.kv.pool.stripe(seen[-1])[-1])
    made.runner._check_context = lambda *_: None  # type: ignore[method-assign]
    for name in "cd":  # the first is passed over: it was audited last
        ask(made, name, [*prompt, 3], max_tokens=1)
    idle(made)
    assert audits(made)["differences"] == 1


def test_recurrent_states() -> None:
    made = engine(first_snapshot=8, num_snapshots=20)
    prompt = text(1, 96)
    ask(made, "a", prompt, max_tokens=1)
    ask(made, "b", [*prompt, 2], max_tokens=1)
    idle(made)
    assert (audits(made)["done"], audits(made)["tokens"], audits(made)["differences"]) == (1, 88, 0)
    snapshots = made.scheduler.kv.snapshots
    assert snapshots is not None
    made.runner.states[snapshots._of_block[blocks_of(made, prompt)[11]]] += 1
    made.runner._check_context = lambda *_: None  # type: ignore[method-assign]
    made.runner._advance_states = lambda *_: None  # type: ignore[method-assign]
    for name in "cd":
        ask(made, name, [*prompt, 3], max_tokens=1)
    del made.runner._advance_states
    idle(made)
    assert audits(made)["differences"] == 1
    assert audits(made)["removed_blocks"] >= 1


def test_the_tiers_forget_what_may_come_from_a_wrong_block() -> None:
    made = engine(tiers=lambda runner: TierStore(runner, host_bytes=1 << 20))
    prompt = text(1, 64)
    ask(made, "a", prompt, max_tokens=1)
    idle(made)
    store = made.runner.tiers

    def saved() -> int:
        while len(store._saver):
            time.sleep(0.001)
        return int(store.stats()["host_blocks"])

    assert saved() == 8
    damage(made, blocks_of(made, prompt)[2])
    made.runner._check_context = lambda *_: None  # type: ignore[method-assign]
    ask(made, "b", [*prompt, *text(9, 30)], max_tokens=1)
    idle(made)
    assert audits(made)["differences"] == 1
    assert saved() == 2  # that the audit computed
    del made.runner._check_context
    ask(made, "c", [*prompt, *text(9, 31)], max_tokens=1)  # the runner checks what it finds
    store.close()


def test_too_many_hits_are_dropped() -> None:
    made = engine()
    for i in range(MAX_WAITING + 3):
        made.add(request(f"a{i}", text(i, 24), max_tokens=1))
    while any(not made.outputs[f"a{i}"] for i in range(MAX_WAITING + 3)):
        made.step()
    for i in range(MAX_WAITING + 3):
        made.add(request(f"b{i}", [*text(i, 24), 1], max_tokens=1))
    idle(made)
    assert audits(made)["hits"] == MAX_WAITING + 3
    assert audits(made)["done"] + audits(made)["dropped"] == MAX_WAITING + 3
    assert audits(made)["dropped"] == 3


def test_off() -> None:
    made = engine(every=0)
    ask(made, "a", text(1, 64), max_tokens=1)
    ask(made, "b", [*text(1, 64), 1], max_tokens=1)
    idle(made)
    assert audits(made) == {}
