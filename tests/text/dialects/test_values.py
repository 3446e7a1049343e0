"""Values of arguments that a dialect writes as text: strings of a schema, and FunctionGemma's nested values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lmkit.text.dialects import DIALECTS, Dialect, Event, Parser, collected
from lmkit.text.dialects.grammar import Called, Form
from lmkit.text.dialects.schemas import patterns, types_of
from tests.text.dialects.answers import DEMO_TOKENIZER, thinking, thought_for, with_marks, written
from tests.text.dialects.test_dialect_grammar import Case

NESTING = [DIALECTS[name] for name in ("functiongemma", "lfm2")]
AS_TEXT = [
    *(DIALECTS[name] for name in ("qwen3_coder", "glm45", "deepseek_v32", "minimax_m3")),
    *NESTING,
]
OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
Fits = list[tuple[dict[str, Any], list[Any], list[Any]]]
STRINGS: Fits = [  # a schema, values that fit it, and others
    ({"type": "string", "enum": ["a", "b"]}, ["a", "b"], ["c", ""]),
    ({"const": "a"}, ["a"], ["b"]),
    ({"type": "string", "pattern": "^[a-c]{2}$"}, ["ab"], ["abc", "xab", "a"]),
    ({"type": "string", "pattern": "x/"}, ["ax/b", "x/"], ["ab"]),
    ({"type": "string", "pattern": "^a|b$"}, ["ax", "xb"], ["x"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "a\nb"], ["a", "abcd"]),
    ({"type": "string", "minLength": 2, "pattern": "a"}, ["xa"], ["a", "xx"]),
    ({"type": "string", "format": "date"}, ["2026-11-24"], ["today"]),
    ({"$ref": "#/$defs/day"}, ["mon"], ["sun"]),
    ({"type": "string"}, ["anything <at> all", ""], []),
]


@pytest.fixture(params=AS_TEXT, ids=[dialect.name for dialect in AS_TEXT])
def dialect(request: pytest.FixtureRequest) -> Dialect:
    found: Dialect = request.param
    return found


def case_of(dialect: Dialect, marks: str = "text") -> Case:
    tokenizer = DEMO_TOKENIZER if marks == "text" else with_marks(dialect, special=True)
    return Case(dialect, tokenizer)


def form_of(dialect: Dialect, about: Any) -> tuple[Form, dict[str, Any]]:
    schema = {
        "type": "object", "properties": {"v": about}, "required": ["v"],
        "$defs": {"day": {"enum": ["mon", "tue"]}, "tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    }  # fmt: skip
    return Form([Called("f", schema)], dialect, must_call=True), schema


def arguments_of(dialect: Dialect, text: str, schema: dict[str, Any]) -> Any:
    parser = Parser(dialect, None, parameters={"f": schema})
    events = collected([*parser.feed(text), *parser.end()])
    assert [event.kind for event in events] == ["call", "arguments"], events
    return json.loads(events[1].text)


@pytest.mark.parametrize("marks", ["text", "special"])
def test_strings_follow_their_schema(dialect: Dialect, marks: str) -> None:
    case = case_of(dialect, marks)
    for about, good, bad in STRINGS:
        form, schema = form_of(dialect, about)
        for value in good:
            text = written(dialect, [("f", {"v": value})])
            assert case.allows(form, text), (about, value)
            assert arguments_of(dialect, text, schema) == {"v": value}
        for value in bad:
            assert not case.allows(form, written(dialect, [("f", {"v": value})])), (about, value)


def test_a_string_or_null_needs_no_quotes() -> None:
    dialect = DIALECTS["qwen3_coder"]
    form, schema = form_of(dialect, OPTIONAL)
    for text, value in (("null", None), ("3", "3"), ('"a"', '"a"'), ("nul", "nul")):
        call = written(dialect, [("f", {"v": text})])
        assert case_of(dialect).allows(form, call)
        assert arguments_of(dialect, call, schema) == {"v": value}
    form, _ = form_of(dialect, {"type": ["string", "null"], "maxLength": 1})
    assert [case_of(dialect).allows(form, written(dialect, [("f", {"v": text})])) for text in ("null", "a", "ab")] == [
        True, True, False,
    ]  # fmt: skip


def test_a_schema_without_members_takes_any(dialect: Dialect) -> None:
    """Such as that of a tool whose own schema no grammar holds."""
    form = Form([Called("f", {"type": "object"})], dialect, must_call=True)
    for arguments in ({}, {"a": "x"}, {"a": "x", "b_c": "y z"}):
        assert case_of(dialect).allows(form, written(dialect, [("f", arguments)])), arguments


NESTED: Fits = [
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3]]),
    ({"type": "array", "items": {"$ref": "#/$defs/tree"}}, [[], [[], [[]]]], []),
    (
        {"type": "object", "properties": {"b": {"type": "boolean"}, "a": {"type": "string"}}},
        [{}, {"b": True, "a": "x}"}],
        [{"a": 1}, {"c": "x"}],
    ),
    ({}, [{"k": [1, {"l": "m,n"}], "o": None}, "x", 1.5], []),
    (OPTIONAL, ["x", None], [1]),
]  # fmt: skip


@pytest.mark.parametrize("nesting", NESTING, ids=[dialect.name for dialect in NESTING])
def test_a_notation_nests_values(nesting: Dialect) -> None:
    for marks in ("text", "special"):
        case = case_of(nesting, marks)
        for about, good, bad in NESTED:
            form, schema = form_of(nesting, about)
            for value in good:
                text = written(nesting, [("f", {"v": value})])
                assert case.allows(form, text), (about, value)
                assert arguments_of(nesting, text, schema) == {"v": value}
            for value in bad:
                assert not case.allows(form, written(nesting, [("f", {"v": value})])), (about, value)


def test_tags_nest_values_that_the_schema_tells() -> None:
    dialect = DIALECTS["minimax_m3"]
    tree = {
        "type": "object",
        "properties": {"k": {"type": "array", "items": {"type": "string"}}, "b": {"type": "null"}},
    }
    rows: Fits = [
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1}, [[1], [1, 2]], [[], ["x"]]),
        (tree, [{}, {"k": []}, {"k": ["<x>", "]"]}], [{"c": 1}]),
        ({"type": "array", "items": tree}, [[], [{"k": ["1"]}, {}]], []),
    ]
    free: Fits = [({"type": "object"}, [{"k": [1, {"l": 2}], "item": 1.5}, {}], [])]  # held if the mark is a token
    for marks, given in (("text", rows), ("special", rows + free)):
        for about, good, bad in given:
            form, schema = form_of(dialect, about)
            for value in good:
                text = written(dialect, [("f", {"v": value})])
                assert case_of(dialect, marks).allows(form, text), (about, value)
                assert arguments_of(dialect, text, schema) == {"v": value}
            for value in bad:
                assert not case_of(dialect, marks).allows(form, written(dialect, [("f", {"v": value})])), value


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("(a='it\\'s', b=\"x\\n\\u00e9\\x41\\\\\")", {"a": "it's", "b": "x\né" + "A\\"}),
        ("(a='it's \"so\"', b=True)", {"a": 'it\'s "so"', "b": True}),  # as a template writes that escapes nothing
        ("(a={'k': [1, None, -2.5e3]}, b={\"l\": false, \"m\": null}, c=[])",
         {"a": {"k": [1, None, -2500.0]}, "b": {"l": False, "m": None}, "c": []}),
        ("( a = 1 ,\n b = 'x' )", {"a": 1, "b": "x"}),
        ("(a='\\U0001F600', b='\\ud83d\\ude00', c='\\d')", {"a": "😀", "b": "😀", "c": "\\d"}),
        ("()", {}),
    ],
)  # fmt: skip
def test_arguments_of_python(text: str, arguments: dict[str, Any]) -> None:
    whole = f"<|tool_call_start|>[f{text}]<|tool_call_end|>"
    for pieces in ([whole], list(whole)):
        parser = Parser(DIALECTS["lfm2"], None)
        events = collected([*(event for piece in pieces for event in parser.feed(piece)), *parser.end()])
        assert [event.kind for event in events] == ["call", "arguments"], events
        assert json.loads(events[1].text) == arguments


def test_words_of_python_have_the_types_of_the_schema() -> None:
    """Qwen3-Coder's template shows earlier arguments so, and models write what they see."""
    types = ("boolean", "object", "null", "string")
    schema = {"type": "object", "properties": {kind: {"type": kind} for kind in types}}
    text = written(
        DIALECTS["qwen3_coder"],
        [("f", {"boolean": "True", "object": "{'a': [None, 'x']}", "null": "None", "string": "None"})],
    )
    found = arguments_of(DIALECTS["qwen3_coder"], text, schema)
    assert found == {"boolean": True, "object": {"a": [None, "x"]}, "null": None, "string": "None"}


@pytest.mark.parametrize("broken", ["{a}", "{a:1]", "{a:,}", "{:1}", "{a:1 {", "[1"])
def test_gemma_s_broken_values_lose_no_text(broken: str) -> None:
    parser = Parser(DIALECTS["functiongemma"], None)
    text = f"<start_function_call>call:f{broken}<end_function_call> end"
    events = collected([*parser.feed(text), *parser.end()])
    assert events[-1] == Event("content", events[-1].text)
    assert events[-1].text.endswith("end")


def test_behind_plain_thoughts_a_call_that_begins_holds() -> None:
    dialect = DIALECTS["llama3"]
    case = case_of(dialect)
    form = Form([Called("f", {"type": "object", "properties": {}})], dialect, thought=thought_for(dialect))
    thought = thinking(dialect, "hm")
    assert case.allows(form, thought + case.text)
    assert case.allows(form, thought + written(dialect, [("f", {})]))
    assert case.allows(form, "hello")
    assert not case.allows(form, thought + '{"name": "h"}')


def test_types_of_a_schema() -> None:
    assert types_of({"enum": ["a", 1, True, None, 1.5]}, {}) == ("string", "integer", "boolean", "null", "number")
    assert types_of({"oneOf": [{"type": "string"}, {}]}, {}) == ()
    assert types_of({"$ref": "#"}, {"$ref": "#"}) == ()
    assert types_of({"$ref": "elsewhere"}, {}) == ()
    assert patterns({"type": "string", "pattern": r"a\$"}) == [r"(.|\n)*(a\$)(.|\n)*"]
