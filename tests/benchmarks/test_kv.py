"""The parts of the KV benchmark that compute figures, on small inputs; and its runs without a model."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.kv import __main__ as kv
from benchmarks.kv import capacity, chat, history, hit_rate, interference, overhead, planning
from benchmarks.kv.common import Row, Setting, Timing, geometric_mean, percentile
from benchmarks.kv.trace import InfiniteCache, Item, Mix, distinct_blocks, ideal_hits, make_trace

SMALL = Mix(chats=4, few_shot=12, single=8, one_off=4, systems=2, templates=3, pause=0.1)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_percentile_and_mean() -> None:
    values = [float(n) for n in range(1, 201)]
    assert percentile(values, 0.99) == 198
    assert percentile(values, 0.5) == 100
    assert percentile([3.0], 0.99) == 3.0
    assert geometric_mean([2, 8]) == pytest.approx(4)


def test_infinite_cache_finds_the_longest_common_prefix() -> None:
    generator, cache = np.random.default_rng(0), InfiniteCache()
    known: list[np.ndarray] = []
    for _ in range(200):
        tokens = generator.integers(0, 3, generator.integers(1, 12), dtype=np.int32)
        expected = 0
        for other in known:
            shorter = min(len(tokens), len(other))
            differ = np.nonzero(tokens[:shorter] != other[:shorter])[0]
            expected = max(expected, int(differ[0]) if len(differ) else shorter)
        assert cache.match(tokens) == expected
        cache.insert(tokens)
        known.append(tokens)


def test_tokens_sort_by_value_and_not_by_their_bytes() -> None:
    cache = InfiniteCache()
    for tokens in (ids(1, 256), ids(1, 2), ids(1, 65536, 7)):
        cache.insert(tokens)
    assert cache.match(ids(1, 65536, 8)) == 2
    assert cache.match(ids(2)) == 0


def test_ideal_hits() -> None:
    trace = [
        Item(ids(1, 2, 3, 4), ids(5, 6)),
        Item(ids(1, 2, 3, 4), ids(5, 6)),  # all but the last token, which is computed for its logits
        Item(ids(1, 2, 3, 4, 5, 6, 7), ids(8), after=1),  # token 6 was given, but never computed
        Item(ids(1, 2, 9), ids(5)),
        Item(ids(7, 7, 7), ids(5)),
    ]
    assert ideal_hits(trace) == [0, 3, 5, 2, 0]
    # 5 of the first, none of the second, 6 and 7 of the third, 9, and three 7s.
    assert distinct_blocks(trace, 1) == 5 + 0 + 2 + 1 + 3


def test_trace_is_seeded_and_in_order() -> None:
    trace, again, other = make_trace(SMALL), make_trace(SMALL), make_trace(SMALL, seed=1)
    assert [item.prompt.tolist() for item in trace] == [item.prompt.tolist() for item in again]
    assert [item.prompt.tolist() for item in trace] != [item.prompt.tolist() for item in other]
    turns = [(index, item) for index, item in enumerate(trace) if item.after is not None]
    assert turns
    for index, item in turns:
        assert item.after is not None
        before = trace[item.after]
        assert item.after < index
        history_ = np.concatenate([before.prompt, before.answer])
        assert item.prompt[: len(history_)].tolist() == history_.tolist()


def test_a_pool_for_everything_gives_the_ideal_and_a_small_one_less() -> None:
    trace = make_trace(SMALL)
    everything = 2 * sum(len(item.prompt) + len(item.answer) for item in trace) // hit_rate.BLOCK_SIZE
    assert hit_rate.replay(trace, everything, concurrency=1) == ideal_hits(trace)
    assert sum(hit_rate.replay(trace, 1)) < sum(ideal_hits(trace))


def test_turns_wait_for_the_answer_before() -> None:
    trace = [Item(ids(*range(2, 80)), ids(5, 6, 7))]
    trace.append(Item(np.concatenate([trace[0].prompt, trace[0].answer, ids(9)]), ids(5), after=0))
    assert hit_rate.replay(trace, 100, concurrency=2) == [0, len(trace[0].prompt) + 2]


def test_hit_rate_row() -> None:
    assert hit_rate.row(0.8, 0.78, {}).ratio == pytest.approx(1)
    assert hit_rate.row(0.8, 0.76, {}).ratio == pytest.approx(0.5)
    assert hit_rate.row(0.8, 0.8, {}).reached
    assert hit_rate.state_row(0.8, 0.75).ratio == pytest.approx(1)


def test_chat_row_leaves_the_first_turn_out() -> None:
    def turn(without: float, cached: float) -> dict[bool, Timing]:
        return {False: Timing(without, [], 0), True: Timing(cached, [], 7)}

    row = chat.row([turn(1, 1), turn(2, 1), turn(8, 1)])
    assert row.ratio == pytest.approx(4)
    assert row.facts["slowest"] == 2


def test_history_row() -> None:
    row = history.row("x", Timing(26, [1], 0), Timing(2, [1], 9), start_seconds=1.0)
    assert row.ratio == 13
    assert row.reached
    assert row.facts["cached_tokens"] == 9


def test_interference_row() -> None:
    assert interference.row([0.01] * 100, [0.02] * 100).ratio == pytest.approx(1)
    assert not interference.row([0.01] * 100, [0.02] * 90 + [0.1] * 10).reached
    assert interference.row([0.01] * 100, [0.02] * 200 + [9.0]).reached  # one of more than a hundred


def test_stopwatch_counts_nested_calls_once() -> None:
    class Thing:
        def outer(self) -> int:
            time.sleep(0.01)
            return self.inner()

        def inner(self) -> int:
            time.sleep(0.01)
            return 3

        def other(self) -> None:
            time.sleep(0.05)

    thing, stopwatch = Thing(), overhead.Stopwatch()
    stopwatch.watch(thing, "outer", "inner")
    begin = time.perf_counter()
    assert thing.outer() == 3
    elapsed = time.perf_counter() - begin
    thing.other()
    assert 0.02 <= stopwatch.seconds <= elapsed
    with pytest.raises(AttributeError):
        stopwatch.watch(thing, "missing")


def test_overhead_row() -> None:
    row = overhead.row(0.05, {True: [5.0, 5.0], False: [4.0, 5.0]}, 3)
    assert row.ratio == pytest.approx(2)
    assert row.facts["time_with_by_without"] == pytest.approx(5 / 4.5)


def test_lookups_are_of_the_whole_history() -> None:
    assert overhead.match_seconds(1_000, rounds=3) > 0
    assert overhead.admission_seconds(1_000, rounds=2) > 0


def test_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = capacity.cases(Setting(Path("unused"), 1))
    assert [row.ratio for row in rows] == pytest.approx([256 / 132, 256 / 68], rel=2e-3)
    assert all(row.reached for row in rows)
    monkeypatch.setattr(capacity, "plan_memory", _generous)
    with pytest.raises(RuntimeError, match="are allocated"):
        capacity.tokens_in("int8")


def test_planning_ends_every_request_and_takes_every_seat() -> None:
    assert planning.admissions_per_second(50, 8) > 0
    assert planning.planning_seconds(20, 8, steps=3) > 0


def _generous(*args: object, **kwargs: object) -> object:
    class Plan:
        num_blocks, max_model_len = 1 + capacity.BUDGET // (8 * 32 * 2 * 132 * 4), 8192

    return Plan


def test_main_writes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "CASES", {"one": lambda setting: [Row("a case", 2.0, 1.0, {"more": setting.threads})]})
    monkeypatch.setattr(sys, "argv", ["kv", "--json", str(tmp_path / "kv.json"), "--threads", "1"])
    kv.main()
    document = json.loads((tmp_path / "kv.json").read_text())
    assert document["benchmark"] == "kv"
    assert document["rows"] == [{"case": "a case", "ratio": 2.0, "goal": 1.0, "reached": True, "more": 1}]


def test_main_says_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(setting: Setting) -> list[Row]:
        raise RuntimeError("the answers differ")

    monkeypatch.setattr(kv, "CASES", {"one": fail})
    monkeypatch.setattr(sys, "argv", ["kv", "--threads", "1"])
    with pytest.raises(SystemExit, match="the answers differ"):
        kv.main()
