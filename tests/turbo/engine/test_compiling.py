"""Requests that wait for their grammar: who is served next, and how they end."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import pytest

from lmkit.errors import RequestError
from lmkit.turbo.engine.compiling import Compiling
from lmkit.turbo.request import Request, SamplingParams
from lmkit.turbo.runners.guides import Guides
from tests.turbo.fakes import LIMITS


class FakeGuides:
    """Grammars that are compiled when the test says so."""

    def __init__(self) -> None:
        self.compiled: set[tuple[str, str]] = set()
        self.under_way: list[tuple[str, str, Future[None]]] = []

    def has(self, tenant: str, grammar: str) -> bool:
        return (tenant, grammar) in self.compiled

    def compile(self, tenant: str, grammar: str) -> Future[None]:
        self.under_way.append((tenant, grammar, Future()))
        return self.under_way[-1][2]

    def finish(self, error: Exception | None = None) -> str:
        tenant, grammar, done = self.under_way.pop(0)
        if error is not None:
            done.set_exception(error)
        else:
            self.compiled.add((tenant, grammar))
            done.set_result(None)
        return f"{tenant} {grammar}"


@pytest.fixture
def world() -> tuple[FakeGuides, Compiling, list[str]]:
    guides, admitted = FakeGuides(), list[str]()
    limits: Any = LIMITS
    compiling = Compiling(cast(Guides, guides), limits, lambda r: admitted.append(r.request_id), clock=lambda: 0.0)
    return guides, compiling, admitted


def request(name: str, tenant: str, grammar: str, **fields: Any) -> Request:
    params = SamplingParams(grammar=grammar, seed=0)
    return Request(request_id=name, prompt_ids=[1, 2], params=params, tenant=tenant, **fields)


def test_tenants_take_turns_and_only_new_grammars_wait(world: tuple[FakeGuides, Compiling, list[str]]) -> None:
    guides, compiling, admitted = world
    for number in range(4):
        compiling.add(request(f"g{number}", "greedy", f"g{number % 3}"))
    compiling.add(request("s", "small", "g0"))
    compiling.add(request("free", "greedy", ""))
    assert admitted == ["free"]
    order = []
    while compiling.has_work():
        order.append(guides.finish())
        assert not guides.under_way
        assert compiling.advance() == []
    assert order == ["greedy g0", "small g0", "greedy g1", "greedy g2"]
    assert admitted == ["free", "g0", "g3", "s", "g1", "g2"]
    compiling.add(request("again", "small", "g0"))
    assert admitted[-1] == "again"


def test_a_grammar_that_fails_is_the_error_of_its_requests(world: tuple[FakeGuides, Compiling, list[str]]) -> None:
    guides, compiling, admitted = world
    for name, grammar in (("bad", "a"), ("gone", "b"), ("late", "c"), ("good", "d")):
        compiling.add(request(name, "", grammar, timeout=None if name != "late" else 1e-9))
    compiling.abort("gone")
    guides.finish(MemoryError())
    compiling._clock = lambda: 1.0
    ends = {end.request_id: (end.finish_reason, end.error_code) for end in compiling.advance()}
    assert ends == {
        "bad": ("error", "invalid_request"), "gone": ("abort", "engine_error"), "late": ("error", "deadline_exceeded"),
    }  # fmt: skip
    guides.finish()
    compiling.advance()
    assert admitted == ["good"]
    with pytest.raises(RequestError, match="empty"):
        compiling.add(Request(request_id="x", prompt_ids=[], params=SamplingParams(grammar="x", seed=0)))
