"""Grammars of answers with calls: what they let through, for marks of one token and of several."""

from __future__ import annotations

import pytest

from lmkit.text import Tokenizer
from lmkit.text.dialects import DIALECTS, Dialect
from lmkit.text.dialects.grammar import Form, grammar
from lmkit.text.grammar import json_schema, regex
from tests.text.dialects.answers import (
    DEMO_TOKENIZER,
    SCHEMA,
    TOOLS,
    content,
    thinking,
    thought_for,
    with_marks,
    written,
)


class Case:
    def __init__(self, dialect: Dialect, tokenizer: Tokenizer) -> None:
        self.dialect, self.tokenizer = dialect, tokenizer
        self.one = written(dialect, [("f", {"a": 3, "s": "x"})])
        self.two = written(dialect, [("f", {"a": 3}), ("g", {})])
        self.bad = written(dialect, [("f", {"a": "x"})])
        self.unknown = written(dialect, [("h", {})])
        self.text = content(dialect, "hello")

    def allows(self, form: Form, text: str) -> bool:
        grammars = self.tokenizer.grammars(self.tokenizer.vocab_size)
        rules = grammar(form, self.tokenizer)
        grammars.check(rules, "tools")
        guide = grammars.guide(rules)
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            if not guide.allowed[token // 32] >> (token % 32) & 1:
                return False
            guide.advance([token])
        return any(guide.allowed[end // 32] >> (end % 32) & 1 for end in self.tokenizer.eos_token_ids)


@pytest.fixture(params=["text", "added", "special"])
def marks(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=DIALECTS.values(), ids=DIALECTS.keys())
def case(request: pytest.FixtureRequest, marks: str) -> Case:
    dialect: Dialect = request.param
    tokenizer = DEMO_TOKENIZER if marks == "text" else with_marks(dialect, special=marks == "special")
    return Case(dialect, tokenizer)


def test_required_calls(case: Case) -> None:
    form = Form(TOOLS, case.dialect, must_call=True)
    assert case.allows(form, case.one)
    assert case.allows(form, case.two) is case.dialect.parallel
    for wrong in (case.bad, case.unknown, case.text, "", case.one[: len(case.one) // 2]):
        assert not case.allows(form, wrong), wrong


def test_one_call_at_a_time(case: Case) -> None:
    form = Form(TOOLS, case.dialect, must_call=True, parallel=False)
    assert case.allows(form, case.one)
    assert not case.allows(form, case.two) or not case.dialect.parallel


def test_a_call_that_begins_holds(case: Case) -> None:
    form = Form(TOOLS, case.dialect)
    assert case.allows(form, case.text)
    assert case.allows(form, case.one)
    for wrong in (case.bad, case.unknown):
        assert not case.allows(form, wrong)
    if not case.dialect.starts and case.dialect.name != "harmony":
        assert case.allows(form, "hello\n" + case.one)
        assert not case.allows(form, "hello\n" + case.bad)


def test_reasoning_comes_first(case: Case) -> None:
    form = Form(TOOLS, case.dialect, must_call=True, thought=thought_for(case.dialect))
    assert case.allows(form, thinking(case.dialect, "hm") + case.one)
    assert case.allows(form, case.one)
    assert not case.allows(form, thinking(case.dialect, "hm") + case.bad)
    assert not case.allows(form, thinking(case.dialect, "hm") + case.text)


def test_a_schema_holds_behind_the_reasoning(case: Case) -> None:
    for grammar_, good in ((json_schema(SCHEMA), '{"a": 1}'), (regex("a+"), "aaa")):
        form = Form(thought=thought_for(case.dialect), content=grammar_)
        assert case.allows(form, thinking(case.dialect, "hm") + content(case.dialect, good))
        assert not case.allows(form, thinking(case.dialect, "hm") + case.text)


def test_a_budget_ends_the_reasoning(case: Case, marks: str) -> None:
    if marks == "text":
        return  # such models are refused
    form = Form(thought=thought_for(case.dialect), thinking_budget=4)
    assert case.allows(form, thinking(case.dialect, "") + case.text)
    assert not case.allows(form, thinking(case.dialect, "a b c d e f g") + case.text)
    none = Form(thought=thought_for(case.dialect), thinking_budget=0, is_thinking=True)
    end = "<|end|><|start|>assistant" if case.dialect.name == "harmony" else thought_for(case.dialect).end
    assert case.allows(none, end + case.text)
    assert not case.allows(none, "a" + end + case.text)


def test_cohere_may_write_its_marks_around_an_answer(marks: str) -> None:
    dialect = DIALECTS["cohere"]
    case = Case(dialect, DEMO_TOKENIZER if marks == "text" else with_marks(dialect, special=marks == "special"))
    (begin, _), (end, _) = thought_for(dialect).before, thought_for(dialect).after
    for form, text in (
        (Form(TOOLS, dialect, thought=thought_for(dialect)), "hello"),
        (Form(thought=thought_for(dialect), content=json_schema(SCHEMA)), '{"a": 3}'),
    ):
        for answer in (text, begin + text + end, thinking(dialect, "So.").strip() + begin + text + end):
            assert case.allows(form, answer), answer
