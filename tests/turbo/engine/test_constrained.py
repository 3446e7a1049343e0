"""Answers that follow a grammar, from the engine on the demo model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmkit.errors import RequestError
from lmkit.text import Tokenizer
from lmkit.text.grammar import grammar_of, json_schema
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, StepOutput
from lmkit.turbo.scheduling import speculation
from tests.turbo.engine.test_engine import engine_for, propose_drafts, requests_for, run, tokens

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "even": {"enum": [0, 2, 4]}},
    "required": ["name", "even"],
    "additionalProperties": False,
}


def constrained(path: Path, **params: Any) -> list[Request]:
    """Four requests: the first two follow the schema."""
    options = {"ignore_eos": False, "max_tokens": 84, "top_p": 0.95} | params
    free = requests_for(path, **options)
    grammar = json_schema(SCHEMA)
    return [
        msgspec.structs.replace(r, params=msgspec.structs.replace(r.params, grammar=grammar)) for r in free[:2]
    ] + free[2:]


def answers(path: Path, outputs: Iterable[list[StepOutput]]) -> list[Any]:
    tokenizer = Tokenizer.from_pretrained(path)
    return [json.loads(tokenizer.decode(tokens(output))) for output in outputs]


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.3}, {"temperature": 1.0, "frequency_penalty": 0.3, "logprobs": 2}]
)
def test_answers_fit_whatever_runs_beside_them(demo_model: Path, params: dict[str, Any]) -> None:
    requests = constrained(demo_model, **params)
    alone = engine_for(demo_model)
    want = {r.request_id: run(alone, [r])[r.request_id] for r in requests}
    for answer in answers(demo_model, [want["r0"], want["r1"]]):
        assert answer.keys() == {"name", "even"}
        assert answer["even"] in (0, 2, 4)
    assert want["r0"][-1].finish_reason == "stop"
    pool = 8 * 2 * 2 * 64 * 2 * (8 + 84 + max(len(r.prompt_ids) for r in requests))  # of one sequence, and a block
    engines = {
        "together": engine_for(demo_model),
        "without overlap": engine_for(demo_model, overlap=False),
        "three tokens a step": engine_for(demo_model, max_step_tokens=3),
        "preempted": engine_for(demo_model, kv_memory=pool, max_model_len=None),
    }
    for name, engine in engines.items():
        got = run(engine, requests)
        assert {key: tokens(output) for key, output in got.items()} == {
            key: tokens(output) for key, output in want.items()
        }, name
    assert engines["preempted"].stats().preemptions > 0


def test_drafts_are_checked_by_the_grammar(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = constrained(demo_model)[:2]
    want = {key: tokens(output) for key, output in run(engine_for(demo_model), requests).items()}
    engine = engine_for(demo_model, overlap=False)
    lengths = propose_drafts(engine, want, monkeypatch)
    assert {key: tokens(output) for key, output in run(engine, requests).items()} == want
    assert max(lengths) > 0


def test_drafts_follow_the_grammar(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON repeats itself, so there is much to draft."""
    monkeypatch.setattr(speculation, "MARGIN", 0.0)
    monkeypatch.setattr(speculation.StepTimes, "record", lambda self, counts, seconds: None)
    grammar = grammar_of("regex", r'(\{"name": "[a-z]{3}", "size": [0-9]\}, ){6}', "field")
    first = constrained(demo_model)[0]
    params = msgspec.structs.replace(first.params, grammar=grammar, max_tokens=200)
    requests = [msgspec.structs.replace(first, params=params)]
    want = run(engine_for(demo_model), requests)
    engine = engine_for(demo_model, speculate="ngram")
    assert tokens(run(engine, requests)[first.request_id]) == tokens(want[first.request_id])
    assert engine.stats().accepted_tokens > 10


def test_what_a_grammar_forces_is_computed_at_once(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first key is drafted although nothing like it stood before."""
    monkeypatch.setattr(speculation.StepTimes, "record", lambda self, counts, seconds: None)
    first = constrained(demo_model)[0]
    grammar = grammar_of("regex", r'\{"shipping_address_of_the_customer": [0-9]\}', "field")
    params = msgspec.structs.replace(first.params, grammar=grammar, max_tokens=100)
    requests = [msgspec.structs.replace(first, params=params)]
    want = run(engine_for(demo_model), requests)[first.request_id]
    engine = engine_for(demo_model, speculate="ngram")
    got = run(engine, requests)[first.request_id]
    assert tokens(got) == tokens(want)
    assert engine.stats().accepted_tokens > len(tokens(want)) // 2
    assert len(got) < len(want)


LONG_KEYS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "shipping_address_of_the_customer": {
            "type": "object",
            "properties": {
                "größe der Straße, 名前": {"enum": [1, 22, 333]},
                'a "quoted" key \\ 😀': {"const": "a b/c\nd"},
            },
            "required": ["größe der Straße, 名前", 'a "quoted" key \\ 😀'],
            "additionalProperties": False,
        },
        "delivery_instructions_for_the_driver": {"type": "string", "maxLength": 4},
        "is_confirmed_by_the_customer": {"type": "boolean"},
    },
    "required": ["shipping_address_of_the_customer", "delivery_instructions_for_the_driver"],
    "additionalProperties": False,
}


def test_long_keys_are_the_same_when_their_tokens_are_computed_at_once(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choices of two prompts, each sampled in its own way. Letters of several bytes and escapes are cut into tokens as
    the model wants.
    """
    monkeypatch.setattr(speculation.StepTimes, "record", lambda self, counts, seconds: None)
    drawn = {"temperature": 1.0, "logprobs": 2}, {"temperature": 1.3, "frequency_penalty": 0.3}
    requests = [
        msgspec.structs.replace(asked, request_id=f"{asked.request_id} {number}")
        for number, params in enumerate(({"logprobs": 0}, *drawn, {"max_tokens": 30}))
        for asked in requests_for(
            demo_model, **({"ignore_eos": False, "max_tokens": 200, "grammar": json_schema(LONG_KEYS)} | params)
        )[:2]
    ]
    big = {"max_model_len": 512, "max_batch_size": 8}
    plain = engine_for(demo_model, **big)
    want = run(plain, requests)
    for options in ({"draft_history": 4096}, {"overlap": False, "max_draft_tokens": 3}):
        engine = engine_for(demo_model, **big, speculate="ngram", **options)
        got = run(engine, requests)
        for name, outputs in want.items():
            assert tokens(got[name]) == tokens(outputs), name
            assert [x for o in got[name] for x in o.logprobs] == [x for o in outputs for x in o.logprobs]
            assert got[name][-1].finish_reason == outputs[-1].finish_reason
        stats = engine.stats()
        assert stats.accepted_tokens > stats.generation_tokens / 4
        assert stats.steps < plain.stats().steps


def test_a_guide_that_fails_ends_its_request_alone(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut, _, free, _ = constrained(demo_model, max_tokens=3)
    grammar = grammar_of("regex", "x{9}", "field")
    broken = msgspec.structs.replace(
        cut, request_id="broken", params=msgspec.structs.replace(cut.params, grammar=grammar)
    )
    engine = engine_for(demo_model)
    make = engine._guides._guide

    def astray(tenant: str, text: str, token_ids: list[int]) -> Any:
        guide = make(tenant, text, token_ids)
        if text == grammar and threading.current_thread().name.startswith("grammars"):
            guide.advance(Tokenizer.from_pretrained(demo_model).encode("no x"))
        return guide

    monkeypatch.setattr(engine._guides, "_guide", astray)
    outputs = run(engine, [cut, free, broken])
    reasons = {name: output[-1].finish_reason for name, output in outputs.items()}
    assert reasons == {cut.request_id: "length", free.request_id: "length", "broken": "error"}
    assert outputs["broken"][-1].error_code == "invalid_request"  # the client's, and no fault of the engine


def test_an_engine_without_a_tokenizer_refuses_a_grammar(demo_model: Path) -> None:
    engine = Engine.of(engine_for(demo_model).runner.decoder)
    with pytest.raises(RequestError, match="without a tokenizer"):
        engine.add(constrained(demo_model)[0])
