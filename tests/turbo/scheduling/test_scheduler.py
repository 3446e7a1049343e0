"""Who is computed when, one promise a test; test_scheduler_fuzz.py holds the scheduler to all of them at once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lmkit.errors import RequestError
from lmkit.turbo.request import ImageInput, Request, SamplingParams
from tests.turbo.fakes import EOS, LIMITS, FakeEngine, limits, prompt_logprob, request, sampled, solo


def shape(engine: FakeEngine) -> list[tuple[int, int]]:
    """(start, num_tokens) of the next step's chunks."""
    plan = engine.step()
    return [(c.start, c.num_tokens) for c in plan.chunks] if plan else []


def test_prefill_then_decode() -> None:
    engine = FakeEngine()
    engine.add(request("a", 5, max_tokens=3))
    assert [shape(engine) for _ in range(4)] == [[(0, 5)], [(5, 1)], [(6, 1)], []]
    assert engine.tokens("a") == solo(request("a", 5, max_tokens=3), LIMITS)[0]
    assert [o.finish_reason for o in engine.outputs["a"]] == [None, None, "length"]
    assert not engine.scheduler.has_work()


def test_a_long_prompt_is_computed_in_chunks() -> None:
    engine = FakeEngine()
    engine.add(request("a", 40, max_tokens=1))
    assert [shape(engine) for _ in range(3)] == [[(0, 16)], [(16, 16)], [(32, 8)]]
    assert [o.finish_reason for o in engine.outputs["a"]] == ["length"]


def pictured(name: str, prompt: int, *images: tuple[int, int], **fields: Any) -> Request:
    """A request with images of (start, tokens)."""
    placed = tuple(ImageInput(start, 1, count, bytes(32), number=i + 1) for i, (start, count) in enumerate(images))
    return msgspec.structs.replace(request(name, prompt, **fields), images=placed)


def test_chunks_cut_no_image_of_a_model_that_computes_images_whole() -> None:
    """A chunk ends before an image, or holds all of it, although the pacer would allow less. An image waits for a step
    that has room for it."""
    engine = FakeEngine(limits(whole_images=True, max_batch_size=3))
    engine.add(pictured("a", 45, (10, 12), (22, 14), max_tokens=1))
    assert [shape(engine) for _ in range(4)] == [[(0, 10)], [(10, 12)], [(22, 16)], [(38, 7)]]
    engine = FakeEngine(limits(whole_images=True, max_batch_size=3, decode_slowdown=1.0))
    engine.add(request("b", 3, max_tokens=30))
    first = engine.step()
    assert first
    engine.add(pictured("a", 40, (10, 14), max_tokens=1))
    chunks = [c for plan in iter(engine.step, None) for c in plan.chunks if c.slot != first.chunks[0].slot]
    assert [c.start for c in chunks if c.start < 24 <= c.start + c.num_tokens] == [10]
    assert min(c.num_tokens for c in chunks) < 10, "the pacer allows less"


def test_an_image_that_no_step_has_room_for_is_refused() -> None:
    engine = FakeEngine(limits(whole_images=True, max_batch_size=3))
    with pytest.raises(RequestError, match="15 tokens is computed in one step, which has room for 14"):
        engine.add(pictured("a", 40, (10, 15)))
    FakeEngine(limits(max_batch_size=3)).add(pictured("a", 40, (10, 15)))


def test_prompt_tokens_count_chunk_by_chunk() -> None:
    engine = FakeEngine()
    engine.add(request("a", 40, max_tokens=2))
    counts = []
    while engine.step():
        counts.append(engine.scheduler.stats().prompt_tokens)
    assert counts == [16, 32, 40, 40]


def test_a_prompt_on_its_way_is_told_on_request() -> None:
    engine = FakeEngine()
    engine.add(msgspec.structs.replace(request("a", 40, max_tokens=2), progress=True))
    engine.add(request("b", 40, max_tokens=2))
    while engine.step():
        pass
    told = [output.num_computed for output in engine.outputs["a"]]
    assert told[-2:] == [None, None]
    assert len(told) > 3
    assert told[:-2] == sorted(set(told[:-2]))
    assert told[-3] < 40
    assert [output.token_ids for output in engine.outputs["a"]][:-2] == [[]] * (len(told) - 2)
    assert [output.num_computed for output in engine.outputs["b"]] == [None, None]
    assert engine.tokens("a") == solo(request("a", 40, max_tokens=2), LIMITS)[0]


def test_max_tokens_is_clipped_at_the_context() -> None:
    for wanted in (None, 1000):
        engine = FakeEngine()
        engine.add(request("a", 60, max_tokens=wanted))
        engine.run()
        assert (len(engine.tokens("a")), engine.reason("a")) == (4, "length")


def first_stop(prompt: int, ids: tuple[int, ...], **params: Any) -> list[int]:
    return solo(request("a", prompt, max_tokens=50, stop_token_ids=ids, **params), LIMITS)[0]


def test_eos_and_stop_ids_end_a_request_and_are_reported() -> None:
    for params in ({"ignore_eos": False, "seed": 3}, {"stop_token_ids": tuple(range(0, 50, 6))}):
        engine = FakeEngine()
        engine.add(request("a", 3, max_tokens=50, **params))
        engine.run()
        want, reason = solo(request("a", 3, max_tokens=50, **params), LIMITS)
        assert (engine.tokens("a"), engine.reason("a"), reason) == (want, "stop", "stop")
        assert [o.stop_token for o in engine.outputs["a"]] == [None] * (len(want) - 1) + [want[-1]]


def test_a_stop_id_at_the_last_allowed_token_is_a_stop() -> None:
    ids = tuple(range(0, 50, 6))
    count = len(first_stop(3, ids))
    engine = FakeEngine()
    engine.add(request("a", 3, max_tokens=count, stop_token_ids=ids))
    engine.run()
    assert engine.reason("a") == "stop"


def test_min_tokens_holds_stops_back() -> None:
    ids = tuple(range(0, 50, 2))
    engine = FakeEngine()
    engine.add(request("a", 3, max_tokens=50, min_tokens=9, stop_token_ids=ids))
    plan = engine.scheduler.schedule()
    assert plan is not None
    # Even if a runner samples one: it is a token like any other until nine are generated.
    engine.scheduler.update(plan, [sampled(ids[0])])
    for expected in [None] * 8 + ["stop"]:
        plan = engine.scheduler.schedule()
        assert plan is not None
        (output,) = engine.scheduler.update(plan, [sampled(ids[0])])
        assert output.finish_reason == expected


def test_ignore_eos_leaves_stop_ids_in_force() -> None:
    engine = FakeEngine()
    engine.add(request("a", 3, ignore_eos=True, stop_token_ids=(9,)), request("b", 3, ignore_eos=False))
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert [new.eos_token_ids for new in plan.new] == [(), EOS]
    outputs = engine.scheduler.update(plan, [sampled(EOS[0]), sampled(EOS[0])])
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("a", None), ("b", "stop")]
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert [o.stop_token for o in engine.scheduler.update(plan, [sampled(9)])] == [9]


def test_logprobs_are_passed_on_only_if_asked_for() -> None:
    engine = FakeEngine()
    engine.add(request("a", 3, logprobs=1), request("b", 3))
    engine.run()
    for output in engine.outputs["a"]:
        (entry,) = output.logprobs
        assert (entry.token_id, entry.logprob, entry.top) == (
            output.token_ids[0],
            -float(entry.token_id),
            [(entry.token_id, entry.logprob)],
        )
    assert all(o.logprobs == [] for o in engine.outputs["b"])


def test_decodes_never_wait_behind_a_long_prompt() -> None:
    engine = FakeEngine()
    engine.add(request("a", 2, max_tokens=9), request("b", 3, max_tokens=9))
    assert shape(engine) == [(0, 2), (0, 3)]
    engine.add(request("long", 40))
    assert [shape(engine) for _ in range(4)] == [
        [(2, 1), (3, 1), (0, 14)],
        [(3, 1), (4, 1), (14, 14)],
        [(4, 1), (5, 1), (28, 12)],
        [(5, 1), (6, 1), (40, 1)],
    ]


def test_an_older_prompt_does_not_delay_a_younger_decode() -> None:
    engine = FakeEngine(limits(max_step_tokens=8))
    engine.add(request("long", 40), request("b", 1))
    assert shape(engine) == [(0, 8)]
    engine = FakeEngine(limits(max_step_tokens=8))
    engine.add(request("long", 13), request("b", 1, max_tokens=9), request("c", 20))
    assert [shape(engine) for _ in range(3)] == [[(0, 8)], [(8, 5), (0, 1), (0, 2)], [(13, 1), (1, 1), (2, 6)]]


@pytest.mark.parametrize(
    ("limit", "prompt", "chunks"),
    [
        (256, 256, [256]),
        (256, 257, [192, 65]),
        (256, 319, [192, 127]),
        (256, 320, [256, 64]),
        (256, 513, [256, 192, 65]),
        (100, 101, [100, 1]),  # such steps are short themselves
    ],
)
def test_a_prompt_leaves_no_few_tokens_to_its_last_step(limit: int, prompt: int, chunks: list[int]) -> None:
    engine = FakeEngine(limits(max_step_tokens=limit, num_blocks=300, max_model_len=600))
    engine.add(request("a", prompt, max_tokens=1))
    starts = [sum(chunks[:i]) for i in range(len(chunks))]
    assert [shape(engine) for _ in chunks] == [[pair] for pair in zip(starts, chunks, strict=True)]


def test_no_more_run_than_there_are_slots_and_slots_are_reused() -> None:
    engine = FakeEngine()
    engine.add(*(request(str(i), 2, max_tokens=i + 1) for i in range(6)))
    plan = engine.step()
    assert plan is not None
    assert (plan.freed, [new.slot for new in plan.new]) == ([], [0, 1, 2, 3])
    plan = engine.step()  # request 0 has ended
    assert plan is not None
    assert (plan.freed, [new.slot for new in plan.new]) == ([0], [0])
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (3, 1)
    engine.run()


def test_a_budget_below_the_batch_size_still_serves_the_oldest() -> None:
    engine = FakeEngine(limits(max_step_tokens=3))
    engine.add(request("b", 1, max_tokens=30), request("c", 1, max_tokens=30))
    engine.step()
    engine.add(request("long", 20), request("d", 1))
    for position in range(10):
        assert shape(engine)[-1] == (position, 1)
    assert engine.scheduler.stats().num_running == 3  # whoever ran beside them would find no budget


def test_the_last_arrived_gives_way_and_nothing_changes_for_anyone() -> None:
    few = limits(num_blocks=8)
    requests = [request(name, 6, max_tokens=20, seed=i, prompt_logprobs=True) for i, name in enumerate("abc")]
    engine = FakeEngine(few)
    engine.add(*requests)
    finished: list[str] = []
    while engine.scheduler.has_work():
        engine.step()
        finished += [n for n in "abc" if engine.outputs[n] and engine.reason(n) and n not in finished]
    assert engine.scheduler.stats().preemptions >= 1
    assert finished == ["a", "b", "c"]
    for req in requests:
        assert engine.tokens(req.request_id) == solo(req, few)[0]
        ids = req.prompt_ids
        want = [prompt_logprob(ids[:n]) for n in range(2, 7)]
        scores = [o.prompt_logprobs for o in engine.outputs[req.request_id]]
        assert scores == [want] + [[]] * 19


def test_prompt_logprobs_survive_a_preemption_between_chunks() -> None:
    engine = FakeEngine(limits(num_blocks=9, max_step_tokens=3, max_batch_size=3))
    engine.add(request("a", 3, max_tokens=30), request("b", 26, max_tokens=2, prompt_logprobs=True))
    while not engine.scheduler.stats().preemptions:
        engine.step()
    assert engine.outputs["b"] == []
    engine.run()
    assert engine.outputs["b"][0].prompt_logprobs == [
        prompt_logprob(request("", 26).prompt_ids[:n]) for n in range(2, 27)
    ]


def test_a_victim_leaves_the_step_it_was_already_part_of() -> None:
    engine = FakeEngine(limits(num_blocks=4))
    engine.add(request("a", 7, max_tokens=9, priority=1))
    assert shape(engine) == [(0, 7)]
    engine.add(request("b", 6, max_tokens=9))
    plan = engine.step()  # a had its decode in the step before b took its blocks
    assert plan is not None
    assert [(c.start, c.num_tokens) for c in plan.chunks] == [(0, 6)]
    assert engine.scheduler.stats().preemptions == 1
    engine.run()
    for name, prompt in (("a", 7), ("b", 6)):
        assert engine.tokens(name) == solo(request(name, prompt, max_tokens=9), LIMITS)[0]


def test_the_last_arrived_waits_for_a_block_rather_than_lose_its_own() -> None:
    engine = FakeEngine(limits(num_blocks=4))
    engine.add(request("a", 6, max_tokens=3), request("b", 4, max_tokens=4))
    engine.step()
    taken = engine.scheduler.kv.pool.allocate(1)
    assert shape(engine) == [(6, 1)]
    assert engine.scheduler.stats().num_running == 2
    engine.scheduler.kv.pool.free(taken[0])
    assert shape(engine) == [(7, 1), (4, 1)]
    engine.run()
    assert engine.scheduler.stats().preemptions == 0


def test_a_request_waits_until_an_entry_would_not_be_undone_at_once() -> None:
    engine = FakeEngine(limits(num_blocks=4))
    engine.add(request("a", 4, max_tokens=9), request("b", 9, max_tokens=3))
    assert shape(engine) == [(0, 4)]  # three blocks are free and b needs three, but a is about to need one
    engine.run()
    assert engine.scheduler.stats().preemptions == 0


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    engine = FakeEngine(limits(num_blocks=8))
    engine.add(request("a", 12, max_tokens=3), request("big", 20, max_tokens=3), request("small", 1))
    assert [shape(engine) for _ in range(5)] == [
        [(0, 12)], [(12, 1)], [(13, 1)],  # small would fit beside a, big does not
        [(0, 16)], [(16, 4), (0, 1)],
    ]  # fmt: skip


def test_stats_count() -> None:
    engine = FakeEngine(limits(max_batch_size=1))
    engine.add(request("a", 20, max_tokens=3), request("b", 5, max_tokens=2))
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.blocks_used, stats.blocks_total) == (1, 1, 5, 16)
    assert stats.prompt_tokens == 16
    engine.run()
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.blocks_used, stats.steps) == (0, 0, 0, 6)
    assert (stats.prompt_tokens, stats.generation_tokens, stats.preemptions) == (25, 5, 0)


def test_a_leak_is_noticed_when_the_engine_becomes_idle() -> None:
    engine = FakeEngine()
    engine.add(request("a", 3, max_tokens=1))
    engine.scheduler.kv.pool.allocate(1)
    with pytest.raises(AssertionError, match="1 blocks are held"):
        engine.run()


def test_a_request_is_not_changed_by_running_it() -> None:
    req = Request(request_id="a", prompt_ids=[5, 6], params=SamplingParams(max_tokens=3, seed=1))
    engine = FakeEngine()
    engine.add(req)
    engine.run()
    assert req.prompt_ids == [5, 6]
