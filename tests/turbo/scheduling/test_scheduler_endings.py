"""What the scheduler refuses at the door, and how requests end early: aborts, failed steps, unusable logits."""

from __future__ import annotations

import pytest

from lmkit.errors import RequestError
from lmkit.turbo.request import Request
from lmkit.turbo.sequence import FAILED_TOKEN
from tests.turbo.fakes import LIMITS, FakeEngine, limits, request, sampled, solo


@pytest.mark.parametrize(
    ("req", "code", "numbers"),
    [
        (request("x", 64), "context_length_exceeded", ["64", "64"]),
        (request("x", 100), "context_length_exceeded", ["100", "64"]),
        (request("x", []), "invalid_request", ["empty"]),
        (request("x", [3, 50]), "invalid_request", ["50"]),
        (request("x", [3, -1]), "invalid_request", ["-1", "50"]),
        (request("x", 3, stop_token_ids=(50,)), "invalid_request", ["stop_token_ids"]),
        (request("x", 3, temperature=1.0, seed=None), "invalid_request", ["seed"]),
        (request("a", 3), "invalid_request", ["'a'", "in use"]),
    ],
)
def test_what_can_never_run_is_refused(req: Request, code: str, numbers: list[str]) -> None:
    engine = FakeEngine()
    engine.add(request("a", 3))
    with pytest.raises(RequestError) as caught:
        engine.scheduler.add(req)
    assert caught.value.code == code
    assert all(number in caught.value.message for number in numbers)
    engine.run()
    assert list(engine.outputs) == ["a"]


def test_a_request_beyond_the_whole_pool_is_refused_with_numbers() -> None:
    engine = FakeEngine(limits(num_blocks=4))
    with pytest.raises(
        RequestError, match="10 prompt and 8 new tokens need 5 KV blocks of 4 tokens, and there are 4"
    ) as e:
        engine.scheduler.add(request("x", 10, max_tokens=8))
    assert e.value.code == "context_length_exceeded"
    engine.add(request("y", 10, max_tokens=7))  # the last token is never computed
    engine.run()
    assert len(engine.tokens("y")) == 7


def test_a_full_queue_refuses_and_recovers() -> None:
    engine = FakeEngine(limits(max_queue=2))
    engine.add(request("a", 3), request("b", 3))
    with pytest.raises(RequestError) as caught:
        engine.scheduler.add(request("c", 3))
    assert caught.value.code == "queue_full"
    engine.step()
    engine.add(request("c", 3))
    engine.run()


def test_an_id_may_be_used_again_once_its_request_ended() -> None:
    engine = FakeEngine()
    engine.add(request("a", 3))
    engine.run()
    engine.add(request("a", 4))
    engine.run()
    assert engine.tokens("a") == solo(request("a", 4), LIMITS)[0]


def test_abort_while_waiting() -> None:
    engine = FakeEngine()
    engine.add(request("a", 3))
    engine.scheduler.abort("a")
    engine.scheduler.abort("a")
    engine.scheduler.abort("nobody")
    assert engine.scheduler.has_work()
    assert engine.scheduler.schedule() is None
    (output,) = engine.scheduler.take_outputs()
    assert (output.request_id, output.finish_reason, output.token_ids) == ("a", "abort", [])
    assert not engine.scheduler.has_work()
    assert engine.scheduler.take_outputs() == []


def test_abort_while_running_frees_at_once() -> None:
    engine = FakeEngine()
    engine.add(request("a", 3), request("b", 9))
    engine.step()
    assert engine.scheduler.stats().blocks_used == 4
    engine.scheduler.abort("b")
    assert engine.scheduler.stats().blocks_used == 1
    plan = engine.step()
    assert plan is not None
    assert plan.freed == [1]
    assert engine.reason("b") == "abort"
    engine.run()
    assert len(engine.tokens("b")) == 1
    assert engine.tokens("a") == solo(request("a", 3), LIMITS)[0]


def test_abort_between_schedule_and_update_keeps_the_blocks_until_the_step_has_landed() -> None:
    engine = FakeEngine()
    engine.add(request("a", 3), request("b", 9))
    plan = engine.scheduler.schedule()
    assert plan is not None
    engine.scheduler.abort("b")
    engine.scheduler.abort("b")
    assert engine.scheduler.stats().blocks_used == 4
    engine.scheduler.check_integrity()
    engine.add(request("c", 3))
    engine.collect(engine.scheduler.update(plan, engine.runner.execute(plan)))
    assert engine.scheduler.stats().blocks_used == 1
    assert [(o.finish_reason, o.token_ids) for o in engine.outputs["b"]] == [("abort", [])]
    engine.run()
    assert engine.tokens("c") == solo(request("c", 3), LIMITS)[0]


def test_abort_of_the_only_request_mid_step() -> None:
    engine = FakeEngine()
    engine.add(request("a", 3))
    plan = engine.scheduler.schedule()
    assert plan is not None
    engine.scheduler.abort("a")
    engine.collect(engine.scheduler.update(plan, engine.runner.execute(plan)))
    assert engine.reason("a") == "abort"
    engine.run()


def test_a_failed_step_ends_its_own_requests_only() -> None:
    engine = FakeEngine(limits(max_batch_size=2))
    engine.add(*(request(name, 3) for name in "abc"))
    engine.step()
    plan = engine.scheduler.schedule()
    assert plan is not None
    engine.scheduler.abort("b")
    engine.collect(engine.scheduler.fail(plan, "it broke"))
    assert [(o.finish_reason, o.error) for o in engine.outputs["a"][1:]] == [("error", "it broke")]
    assert [o.finish_reason for o in engine.outputs["b"][1:]] == ["abort"]
    engine.run()
    assert engine.tokens("c") == solo(request("c", 3), LIMITS)[0]


def test_slots_freed_by_a_failed_plan_are_freed_again_by_the_next() -> None:
    engine = FakeEngine()
    engine.add(request("a", 3, max_tokens=1), request("b", 3))
    engine.step()
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert plan.freed == [0]
    engine.collect(engine.scheduler.fail(plan, "it broke before it began"))
    engine.add(request("c", 3))
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert plan.freed == [0, 1]


def test_unusable_logits_end_one_request() -> None:
    engine = FakeEngine()
    engine.add(request("a", 3), request("b", 3))
    plan = engine.scheduler.schedule()
    assert plan is not None
    results = engine.runner.execute(plan)
    engine.collect(engine.scheduler.update(plan, [sampled(FAILED_TOKEN), results[1]]))
    (output,) = engine.outputs["a"]
    assert (output.finish_reason, output.token_ids) == ("error", [])
    assert output.error is not None
    assert "not finite" in output.error
    engine.run()
    assert engine.tokens("b") == solo(request("b", 3), LIMITS)[0]
