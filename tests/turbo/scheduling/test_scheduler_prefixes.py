"""Who finds what in the prefix cache, and that nothing is computed that somebody else computes or has computed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lmkit.errors import RequestError
from lmkit.models.kv_layout import KVClass
from tests.turbo.fakes import FakeEngine, FakeRunner, limits, prompt_logprob, request, solo
from tests.turbo.kv.fake_tiers import ChanceTiers

CACHE = limits(prefix_cache=True, num_blocks=64, max_batch_size=8)


def text(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 50) for _ in range(count)]


def cached(engine: FakeEngine, name: str) -> int:
    return engine.outputs[name][0].cached_tokens


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("count", [7, 8, 40, 50])
def test_siblings_compute_their_prompt_once(count: int, depth: int) -> None:
    engine = FakeEngine(CACHE, depth=depth)
    prompt = text(1, count)
    engine.add(*(request(f"r{i}", prompt, seed=i, max_tokens=1) for i in range(5)))
    engine.run()
    assert engine.runner.num_computed == count + 4  # the last token of each, whose logits it needs
    assert [cached(engine, f"r{i}") for i in range(5)] == [0] + 4 * [count - 1]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("count", [5, 8, 21])
def test_the_next_turn_finds_every_token_of_a_turn_that_a_stop_token_ended(count: int, depth: int) -> None:
    """With two steps in flight one computes the stop token while the next turn arrives."""
    engine = FakeEngine(CACHE, depth=depth)
    prompt, known = text(1, count), 0
    for turn in range(3):
        free = solo(request("x", prompt, max_tokens=9), CACHE)[0]
        stop = next(token for i, token in enumerate(free) if i > 3 and token not in free[:i])
        engine.add(request(f"r{turn}", prompt, max_tokens=20, stop_token_ids=(stop,), session_id="s"))
        while not (engine.outputs[f"r{turn}"] and engine.reason(f"r{turn}")):
            engine.step()
        assert engine.reason(f"r{turn}") == "stop"
        assert cached(engine, f"r{turn}") == known
        known = len(prompt) + len(engine.tokens(f"r{turn}")) - 1
        prompt = prompt + engine.tokens(f"r{turn}") + text(turn + 2, 3)
    engine.run()


def test_siblings_go_on_each_in_its_own_way() -> None:
    engine = FakeEngine(CACHE)
    requests = [request(f"r{i}", text(1, 21), seed=i, max_tokens=15) for i in range(6)]
    engine.add(*requests)
    engine.run()
    assert engine.runner.num_computed == 21 + 5 + 6 * 14
    for req in requests:
        assert engine.tokens(req.request_id) == solo(req, CACHE)[0]


@pytest.mark.parametrize("arrival", [0, 1, 2])
def test_a_prompt_under_way_is_not_computed_again_by_others_that_begin_with_it(arrival: int) -> None:
    engine = FakeEngine(CACHE)
    shared = text(1, 40)
    engine.add(request("a", [*shared, 7], max_tokens=1))
    for _ in range(arrival):
        engine.step()
    engine.add(*(request(f"r{i}", shared + text(i + 2, 5), max_tokens=1) for i in range(3)))
    engine.run()
    assert engine.runner.num_computed == 41 + 3 * 5
    assert [cached(engine, f"r{i}") for i in range(3)] == [40] * 3


def test_nobody_waits_for_a_prompt_of_another_kind() -> None:
    engine = FakeEngine(CACHE)
    engine.add(request("a", text(1, 40), max_tokens=1), request("b", text(2, 3), max_tokens=1))
    engine.add(request("c", text(1, 40), cache_salt="x", max_tokens=1))
    for _ in range(3):
        engine.step()
    assert engine.outputs["b"]
    assert engine.scheduler.stats().num_waiting == 0


def test_a_conversation_computes_its_new_tokens_only() -> None:
    engine = FakeEngine(CACHE)
    history: list[int] = []
    for turn in range(4):
        history += text(turn, 7)
        found = max(len(history) - 7 - 1, 0)  # the last token of an answer was never computed
        engine.add(request(f"t{turn}", history, max_tokens=5, session_id="s"))
        engine.run_until_idle()
        assert cached(engine, f"t{turn}") == found
        history = history + engine.tokens(f"t{turn}")
    assert engine.runner.num_computed == len(history) - 1


@pytest.mark.parametrize("at_once", [False, True])
def test_tenants_and_salts_find_nothing_of_each_other(at_once: bool) -> None:
    engine = FakeEngine(CACHE)
    owners = [("", ""), ("x", ""), ("", "x"), ("x", "x"), ("xx", ""), ("", "xx")]
    for i, (tenant, salt) in enumerate(owners):
        engine.add(request(f"r{i}", text(1, 30), tenant=tenant, cache_salt=salt, max_tokens=1, session_id="s"))
        if not at_once:
            engine.run_until_idle()
    engine.run_until_idle()
    assert engine.runner.num_computed == 30 * len(owners)
    assert engine.scheduler.stats().sessions == 3  # one of each tenant
    engine.add(request("again", text(1, 30), tenant="x", cache_salt="x", max_tokens=1))
    engine.run()
    assert cached(engine, "again") == 29


def test_a_scored_prompt_uses_nothing_and_is_found_by_others() -> None:
    engine = FakeEngine(CACHE)
    prompt = text(1, 30)
    for name, scored, found in (("a", False, 0), ("b", True, 0), ("c", False, 29)):
        engine.add(request(name, prompt, prompt_logprobs=scored, max_tokens=1))
        engine.run()
        assert cached(engine, name) == found
    assert engine.outputs["b"][0].prompt_logprobs == [prompt_logprob(prompt[:n]) for n in range(2, 31)]
    other = FakeEngine(CACHE)
    other.add(request("b", prompt, prompt_logprobs=True, max_tokens=1))
    other.run()
    other.add(request("c", prompt, max_tokens=1))
    other.run()
    assert cached(other, "c") == 29


def test_scores_behind_a_start_use_the_prefix_before_it() -> None:
    engine = FakeEngine(CACHE)
    prompt = text(1, 30)
    engine.add(request("a", prompt[:22], max_tokens=1))
    engine.run()
    choices = [prompt[:22] + text(seed, 5) for seed in (2, 3)]
    for name, ids in zip("bc", choices, strict=True):
        engine.add(request(name, ids, prompt_logprobs=True, logprobs_start=21, max_tokens=0))
    engine.run()
    for name, ids in zip("bc", choices, strict=True):
        assert cached(engine, name) == 21
        assert engine.outputs[name][0].prompt_logprobs == [prompt_logprob(ids[:n]) for n in range(23, 28)]
    with pytest.raises(RequestError, match="logprobs_start=27"):
        engine.add(request("d", choices[0], prompt_logprobs=True, logprobs_start=27))


def test_what_an_aborted_prompt_computed_is_found() -> None:
    engine = FakeEngine(CACHE)
    engine.add(request("a", text(1, 40)))
    engine.step()
    engine.scheduler.abort("a")
    engine.add(request("b", text(1, 40)))
    engine.run()
    assert cached(engine, "b") == 16


def test_what_a_failed_step_was_to_compute_is_not_found() -> None:
    engine = FakeEngine(CACHE)
    engine.add(request("a", text(1, 40)))
    engine.step()
    plan = engine.scheduler.schedule()
    assert plan is not None
    engine.runner.fail(plan)
    engine.collect(engine.scheduler.fail(plan, "injected"))
    engine.add(request("b", text(1, 40)))
    engine.run()
    assert cached(engine, "b") == 16  # the step before it
    assert engine.tokens("b") == solo(request("b", text(1, 40)), CACHE)[0]


@pytest.mark.parametrize("window", [0, 20])
def test_nothing_is_computed_twice_after_preemptions_where_nothing_was_evicted(window: int) -> None:
    small = limits(
        prefix_cache=True, num_blocks=200, max_batch_size=2, priority_seconds=1e6, classes=(KVClass(window),)
    )
    engine = FakeEngine(small)
    requests = [request(f"r{i}", [i + 2, *text(i, 19)], max_tokens=12, priority=-i) for i in range(8)]
    for req in requests:  # each is better than all before it
        engine.add(req)
        for _ in range(3):
            engine.step()
    engine.run()
    assert engine.scheduler.stats().preemptions >= 6
    assert engine.scheduler.stats().evicted_blocks == 0
    assert engine.runner.num_computed == 8 * (20 + 11)
    for req in requests:
        assert engine.tokens(req.request_id) == solo(req, small)[0]


class Willing(ChanceTiers):
    """Loads are always worth their time, and end at once."""

    def __init__(self, runner: FakeRunner, folder: Path | None) -> None:
        rng = random.Random(0)
        rng.random = lambda: 0.0  # type: ignore[method-assign]
        super().__init__(runner, rng, folder, 0 if folder else 100, 100)


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_was_evicted_is_loaded_and_counts_as_cached(on_disk: bool, tmp_path: Path) -> None:
    engine = FakeEngine(CACHE, tiers=lambda runner: Willing(runner, tmp_path if on_disk else None))
    engine.add(request("a", text(1, 40), max_tokens=5))
    engine.run()
    engine.scheduler.kv.caches[0].clear()
    engine.add(request("b", text(1, 40), max_tokens=5))
    engine.run()
    assert cached(engine, "b") == 36  # its last block is wanted as well, for the logits of its last token
    assert engine.scheduler.stats().tier_hits == {"disk" if on_disk else "host": 36}
    assert engine.runner.num_computed == 44 + (44 - 36)
    engine.runner.tiers.close()


def test_what_a_request_has_computed_itself_does_not_count_as_cached() -> None:
    engine = FakeEngine(limits(prefix_cache=True, num_blocks=64, max_batch_size=1), tiers=lambda r: Willing(r, None))
    engine.add(request("low", text(1, 60), max_tokens=1, priority=1))
    engine.step()
    engine.step()
    engine.add(request("high", text(2, 5), max_tokens=3))
    engine.step()
    engine.scheduler.kv.caches[0].clear()  # of what low computed, a tier has 32 tokens
    engine.run()
    assert engine.scheduler.stats().tier_hits == {"host": 32}
    assert cached(engine, "low") == 0
    assert engine.runner.num_computed == 60 + 7
    engine.runner.tiers.close()


def test_the_time_since_which_nothing_was_lost_is_in_the_stats() -> None:
    now = [10.0]
    engine = FakeEngine(limits(prefix_cache=True, num_blocks=8), clock=lambda: now[0])
    since = []
    for i in range(5):  # each takes four of the blocks
        engine.add(request(f"r{i}", [20 + i] * 12))
        engine.run()
        since.append(engine.scheduler.stats().kept_since)
        now[0] += 10
    assert since == [10.0, 10.0, 10.0, 20.0, 30.0], "two are there, and the one before them was used at that time"


@pytest.mark.parametrize("again", range(4))
def test_a_lost_snapshot_is_a_lost_prefix(again: int) -> None:
    """Blocks without the state after them are computed again, so a proxy must not count on them."""
    now, since = [10.0], []
    engine = FakeEngine(
        limits(prefix_cache=True, num_blocks=40, first_snapshot=8, num_snapshots=2), clock=lambda: now[0]
    )
    for i in range(4):  # each leaves one snapshot
        engine.add(request(f"r{i}", [20 + i] * 12, max_tokens=1))
        engine.run()
        since.append(engine.scheduler.stats().kept_since)
        now[0] += 10
    assert since == [10.0, 10.0, 10.0, 20.0]
    engine.add(request("again", [20 + again] * 12, max_tokens=1))
    engine.run()
    assert bool(cached(engine, "again")) == (10.0 + 10 * again > since[-1])
