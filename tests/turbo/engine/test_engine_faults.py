"""An exception in a step, of whatever kind, ends its requests alone. The engine goes on, with the same bits."""

from __future__ import annotations

from contextlib import nullcontext
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lmkit.errors import EngineLostError
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request
from lmkit.turbo.transport.engine_process import EngineLoop
from lmkit.turbo.transport.messages import Event, Outputs
from tests.turbo.engine.test_engine import engine_for, requests_for, run, tokens

PLACES = ("runner.batch.inputs", "runner._logits", "runner.sampler.sample", "runner.append")
KINDS = {"prompts alone": 0, "prompts beside decoding": 3, "decoding": 9}  # calls of the place before it fails


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no overlap"])
def engine(demo_model: Path, request: pytest.FixtureRequest) -> Engine:
    return engine_for(demo_model, overlap=request.param, max_step_tokens=16)


@pytest.fixture(scope="module")
def wanted(demo_model: Path) -> dict[str, list[int]]:
    return {name: tokens(outputs) for name, outputs in run(engine_for(demo_model), requests_for(demo_model)).items()}


def serve(engine: Engine, requests: list[Request]) -> dict[str, list[Any]]:
    """Outputs by request, as the engine process sends them."""
    sent: list[bytes] = []
    sockets = SimpleNamespace(send=sent.append), SimpleNamespace(watching=nullcontext)
    loop = EngineLoop(engine, SimpleNamespace(), *sockets)  # type: ignore[arg-type]
    for request in requests:
        loop._open.add(request.request_id)
        engine.add(request)
    while engine.has_work():
        loop._step()
    events = [msgspec.msgpack.decode(each, type=Event) for each in sent]  # type: ignore[arg-type]
    outputs: dict[str, list[Any]] = {}
    for output in (output for event in events if isinstance(event, Outputs) for output in event.outputs):
        before = outputs.setdefault(output.request_id, [])
        if not before or before[-1].finish_reason is None:  # the front end passes nothing on after the end
            before.append(output)
    return outputs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_in_any_part_of_a_step(
    engine: Engine, wanted: dict[str, list[int]], demo_model: Path, place: str, kind: str
) -> None:
    *path, name = place.split(".")
    owner, calls = reduce(getattr, path, engine), 0
    original = getattr(owner, name)

    def fails(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == KINDS[kind] + 1:
            raise RuntimeError("injected")
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fails)
        got = serve(engine, requests_for(demo_model))
    ends = [outputs[-1].finish_reason for outputs in got.values()]
    assert len(ends) == len(wanted)
    assert "error" in ends
    assert set(ends) <= {"error", "length"}
    assert not any("injected" in (output.error or "") for outputs in got.values() for output in outputs)
    for name, outputs in got.items():  # a request that failed has the tokens up to then
        assert tokens(outputs) == wanted[name][: len(tokens(outputs))]
    engine.check_integrity()
    assert engine.stats().blocks_used == 0
    again = serve(engine, requests_for(demo_model))
    assert {name: tokens(outputs) for name, outputs in again.items()} == wanted


@pytest.mark.parametrize("name", ["schedule", "update"])
def test_a_scheduler_that_fails_ends_the_engine(demo_model: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a plan may be taken in. The process ends and is started again; it would turn in circles for ever."""
    engine = engine_for(demo_model)

    def fails(*_: Any) -> Any:
        raise RuntimeError("injected")

    monkeypatch.setattr(engine.scheduler, name, fails)
    with pytest.raises(EngineLostError, match="the scheduler failed"):
        serve(engine, requests_for(demo_model))
    monkeypatch.undo()
    with pytest.raises(EngineLostError):
        engine.step()
    engine.close()
