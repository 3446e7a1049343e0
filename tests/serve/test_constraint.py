"""Fields that ask for an answer of a certain form: what reaches the engine, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.in_process import CHAT, CHAT_PATH, TEXT, TEXT_PATH, TOKENIZER, App, ScriptedEngine

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OPENAI = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": OPENAI},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"json_schema": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA, "regex": None, "json_object": False}},
    ],
)
def test_one_schema_under_all_names(engine: ScriptedEngine, fields: dict[str, Any]) -> None:
    for path, body in ((CHAT_PATH, CHAT), (TEXT_PATH, TEXT)):
        assert App(engine).post(path, body | fields).status_code == 200
        guide = TOKENIZER.grammars(4096).guide(engine.requests[-1].params.grammar)
        for token in TOKENIZER.encode('{"a": 3}', add_special_tokens=False):
            assert guide.allowed[token // 32] >> (token % 32) & 1
            guide.advance([token])


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"guided_json_object": True},
        {"guided_regex": "a+"},
        {"regex": "a+"},
        {"structured_outputs": {"regex": "a+"}},
        {"guided_choice": ["a", "b"]},
        {"guided_grammar": 'root ::= "a"'},
        {"ebnf": 'root ::= "a"'},
        {"grammar": 'root ::= "a"'},
        {"structured_outputs": {"structural_tag": {"structures": [{"begin": "<", "schema": {}, "end": ">"}],
                                                   "triggers": ["<"]}}},
    ],
)  # fmt: skip
def test_other_servers_names_are_honoured(engine: ScriptedEngine, fields: dict[str, Any]) -> None:
    assert App(engine).post(CHAT_PATH, CHAT | {"n": 2} | fields).status_code == 200
    assert all(request.params.grammar for request in engine.requests)


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"guided_regex": ""}, {"guided_choice": []}]
)
def test_no_constraint(engine: ScriptedEngine, fields: dict[str, Any]) -> None:
    assert App(engine).post(CHAT_PATH, CHAT | fields).status_code == 200
    assert engine.requests[0].params.grammar == ""


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"grammar": "\xd4\xa2\xbb"}, "grammar", "Expected ::="),
        ({"ebnf": "#\xfa"}, "ebnf", "root"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}, "strict": True}}},
            "response_format",
            "not",
        ),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"guided_json": "{"}, "guided_json", "Expecting"),
        ({"guided_regex": "a("}, "guided_regex", "unclosed"),
        ({"guided_choice": [""]}, "guided_choice", "text"),
        ({"structured_outputs": {}}, "structured_outputs", "choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs", "one of"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "only one"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "schema or grammar"),
        ({"guided_regex": "a", "min_tokens": 3}, "min_tokens", "schema or grammar"),
    ],
)
def test_what_cannot_be_held_is_a_400(engine: ScriptedEngine, fields: dict[str, Any], param: str, named: str) -> None:
    answer = App(engine).post(CHAT_PATH, CHAT | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert named in error["message"]
    assert not engine.requests


def test_bad_words_and_allowed_tokens(engine: ScriptedEngine) -> None:
    def guide(**fields: Any) -> Any:
        assert App(engine).post(CHAT_PATH, CHAT | fields).status_code == 200
        return TOKENIZER.grammars(4096).guide(engine.requests[-1].params.grammar)

    def allowed(guide: Any) -> set[int]:
        return {token for token in range(4096) if guide.allowed[token // 32] >> (token % 32) & 1}

    end = TOKENIZER.eos_token_ids[0]
    only = guide(allowed_token_ids=[9, 7, 9])
    only.advance([7])
    assert allowed(only) == {7, 9}
    single = guide(allowed_token_ids=[9])  # forced without an end
    for _ in range(40):
        assert allowed(single) == {9}
        single.advance([9])
    assert allowed(guide(allowed_token_ids=[7, end])) == {7, *TOKENIZER.eos_token_ids}
    assert allowed(guide(allowed_token_ids=[end])) == {*TOKENIZER.eos_token_ids}
    without = guide(bad_words=["lists", "b/d"])
    without.advance(TOKENIZER.encode("a list", add_special_tokens=False))
    assert not {token for token in allowed(without) if TOKENIZER.token_text(token).startswith("s")}
    assert end in allowed(without)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"allowed_token_ids": [4096]}, "4096 is not in"),
        ({"allowed_token_ids": [-1]}, "greater than or equal to 0"),
        ({"bad_words": [""]}, "bad_words[0]: String should have at least 1 character"),
        ({"bad_words": ["a"], "regex": "b"}, "only one of"),
    ],
)
def test_wrong_words_and_tokens(engine: ScriptedEngine, fields: dict[str, Any], named: str) -> None:
    answer = App(engine).post(CHAT_PATH, CHAT | fields)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]
