"""Structural tags in xgrammar's formats."""

from __future__ import annotations

from typing import Any

import pytest

from lmkit.errors import RequestError
from lmkit.text.grammar import response_format
from tests.text.test_grammar import GRAMMARS, PERSON, accepts

NUMBER = {"type": "regex", "pattern": "[0-9]+/[0-9]+"}
TAG = {"type": "tag", "begin": "<f=a>", "content": {"type": "json_schema", "json_schema": PERSON}, "end": "</f>"}
OTHER = {"begin": "<g>", "content": {"type": "any_text"}, "end": ["</g>", "</h>"]}
CALL = '<f=a>{"name": "x", "age": 3}</f>'
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f", "<g>"], "tags": [TAG, OTHER]}
SEPARATED = {"type": "tags_with_separator", "tags": [TAG, OTHER], "separator": ", "}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (const('a"b/'), ['a"b/'], ["a", ""]),
        (NUMBER, ["12/3"], ["12", "1/"]),
        ({"type": "grammar", "grammar": 'root ::= "a" b\nb ::= "c"*'}, ["a", "acc"], ["c"]),
        ({"type": "any_text", "excludes": ["no"]}, ["", "yes"], ["a no"]),
        (sequence(const("a"), NUMBER, const("b")), ["a1/2b"], ["a1/2", "1/2b"]),
        (sequence({"type": "any_text"}, const("END"), NUMBER), ["some text END1/2", "END1/2"], ["some text", "END"]),
        (sequence(const("> "), {"type": "any_text"}), ["> ", "> anything"], ["anything"]),
        ({"type": "or", "elements": [const("a"), sequence(const("b"), NUMBER)]}, ["a", "b1/2"], ["b", "ab1/2"]),
        (TAG, [CALL], [CALL + CALL, "<f=a>{}</f>", "text"]),
        ({"type": "tag", **OTHER}, ["<g>a < b</g>", "<g></h>"], ["<g>a", "<g>a</g>b"]),
        (TRIGGERED, ["", "text", CALL, f"a {CALL} b <g>c</g>{CALL}"],
         ["<f", "a <f=b>", "<g>c", f"{CALL}<f=a>{{}}</f>"]),
        (TRIGGERED | {"at_least_one": True}, [CALL, f"{CALL} b {CALL} c"], ["", "text", f"a {CALL}"]),
        (TRIGGERED | {"stop_after_first": True}, ["text", f"a {CALL}"], [f"a {CALL} b"]),
        (TRIGGERED | {"stop_after_first": True, "at_least_one": True}, [CALL], ["text", CALL + CALL]),
        (TRIGGERED | {"excludes": ["no"]}, ["text"], ["a no"]),
        (SEPARATED, ["", CALL, f"{CALL}, <g>x</g>"], [CALL + CALL, f"{CALL}, "]),
        (SEPARATED | {"at_least_one": True, "stop_after_first": True}, [CALL], ["", f"{CALL}, {CALL}"]),
    ],
)  # fmt: skip
def test_formats(form: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    grammar = response_format({"type": "structural_tag", "format": form})
    GRAMMARS.check(grammar, "response_format")
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"type": "qwen_xml_parameter", "json_schema": {}}, "expected a format whose type is one of"),
        (const(""), "format.value: expected a text"),
        (const("a") | {"more": 1}, "format: const_string has no field 'more'"),
        (sequence(), "format.elements: expected a list"),
        (sequence({"type": "any_text"}, NUMBER), r"format.elements\[0\]: any_text needs a const_string behind it"),
        (sequence(const("a"), {"type": "regex"}), r"format.elements\[1\]: regex needs pattern"),
        (TAG | {"end": 1}, "format.end: expected a text"),
        (TRIGGERED | {"triggers": ["<f"]}, r"format.tags\[1\].begin: it begins with none"),
        (TRIGGERED | {"at_least_one": 1}, "format.at_least_one: expected a boolean"),
        (SEPARATED | {"tags": [const("a")]}, r"format.tags\[0\]: expected a tag"),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, 'only "json"'),
        ({"type": "grammar", "grammar": "\xd4"}, "Expected ::="),
        (None, "expected a format"),
    ],
)  # fmt: skip
def test_mistakes_are_named(form: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=f"response_format: .*{reason}"):
        response_format({"type": "structural_tag", "format": form})


def test_a_format_may_not_be_too_deep() -> None:
    form: dict[str, Any] = const("a")
    for _ in range(40):
        form = sequence(form)
    with pytest.raises(RequestError, match="16 deep"):
        response_format({"type": "structural_tag", "format": form})
