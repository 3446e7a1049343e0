"""Parsers of answers: any cut of the text gives the same events, no text is lost, and the work is linear."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable

import pytest

from lmkit.text.dialects import DIALECTS, THOUGHTS, Dialect, Event, Parser, collected, dialect_of, thought_of
from tests.text.dialects.answers import CALLS, SCHEMAS, content, thinking, thought_for, written

EVERY = list(DIALECTS.values())
ids = [dialect.name for dialect in EVERY]


def parsed(dialect: Dialect, pieces: Iterable[str]) -> list[Event]:
    parser = Parser(dialect, thought_for(dialect), parameters=SCHEMAS)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return collected(events + parser.end())


def calls_of(events: list[Event]) -> list[tuple[str, object]]:
    names = [i for i, event in enumerate(events) if event.kind == "call"]
    return [(events[i].text, json.loads(events[i + 1].text)) for i in names]


@pytest.mark.parametrize("dialect", EVERY, ids=ids)
def test_reasoning_text_and_calls(dialect: Dialect) -> None:
    calls = CALLS if dialect.parallel else CALLS[:1]
    before = "" if dialect.starts or dialect.name == "harmony" else "I look.\n"
    events = parsed(dialect, [thinking(dialect, "So.\nYes.") + before + written(dialect, calls)])
    assert events[0] == Event("reasoning", "So.\nYes.")
    assert [event.text for event in events if event.kind == "content"] == ([before.strip()] if before else [])
    assert calls_of(events) == calls


@pytest.mark.parametrize("dialect", EVERY, ids=ids)
def test_text_alone(dialect: Dialect) -> None:
    text = "\n Two  lines\n\n of < text {1} [2] \n"
    if dialect.name == "harmony":
        assert parsed(dialect, [content(dialect, "Hi <x")]) == [Event("content", "Hi <x")]
    assert parsed(dialect, [text]) == [Event("content", text)]


@pytest.mark.parametrize("dialect", EVERY, ids=ids)
def test_any_cut_gives_the_same_events(dialect: Dialect) -> None:
    rng = random.Random(0)
    whole = thinking(dialect, "So.") + written(dialect, CALLS if dialect.parallel else CALLS[:1])
    junk = whole.replace('"name"', '"nam"').replace("=", "") + "<tool_call>{<tool_call> a } [TOOL_CALLS] x <|chan"
    for text in [
        whole,
        junk,
        *(whole[:end] for end in range(0, len(whole), 3)),
        *(junk[at:] for at in range(0, len(junk), 3)),
    ]:
        expected = parsed(dialect, [text])
        assert parsed(dialect, text) == expected
        for _ in range(2):
            cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(0, 9))))
            pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            assert parsed(dialect, pieces) == expected, text


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n{nonsense} and more\n</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call> x',
        '<tool_call>{"nam": "f", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f"',
        "<tool_call>",
        "a <tool_call> b <tool_cal",
        "<tool_call>" + "x" * 3000 + "</tool_call>",
        '<tool_call>{"name": "' + "f" * 200 + '", "arguments": {}}</tool_call>',
    ],
)
def test_a_malformed_call_is_content_and_loses_nothing(text: str) -> None:
    events = parsed(DIALECTS["hermes"], [text])
    assert {event.kind for event in events} == {"content"}
    assert "".join("".join(event.text for event in events).split()) == "".join(text.split())


def test_what_follows_a_call_that_breaks_its_form_is_content() -> None:
    events = parsed(DIALECTS["hermes"], ['<tool_call>{"name": "f", "arguments": {"a": 1}, "x": 2}</tool_call> end'])
    assert events == [
        Event("call", "f"), Event("arguments", '{"a": 1}'), Event("content", ', "x": 2}</tool_call> end'),
    ]  # fmt: skip


def test_a_call_that_is_cut_shows_what_came() -> None:
    events = parsed(DIALECTS["hermes"], ['<tool_call>{"name": "f", "arguments": {"a": [1, '])
    assert events == [Event("call", "f"), Event("arguments", '{"a": [1, ')]


def test_arguments_before_the_name() -> None:
    text = '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>'
    assert parsed(DIALECTS["hermes"], [text]) == [Event("call", "f"), Event("arguments", '{"a": 1}')]


def test_values_written_as_text_have_the_types_of_the_schema() -> None:
    text = "<tool_call><function=f><parameter=a>3</parameter><parameter=s>3</parameter></function></tool_call>"
    assert parsed(DIALECTS["qwen3_coder"], [text])[1].text == '{"a": 3, "s": "3"}'


def test_reasoning_that_the_prompt_begins() -> None:
    parser = Parser(None, THOUGHTS["think"], is_thinking=True)
    events = [*parser.feed("So.\n</thi"), *parser.feed("nk>\n\nYes <think> no"), *parser.end()]
    assert collected(events) == [Event("reasoning", "So."), Event("content", "Yes <think> no")]


@pytest.mark.parametrize("dialect", EVERY, ids=ids)
def test_parsing_is_linear(dialect: Dialect) -> None:
    whole = written(dialect, CALLS if dialect.parallel else CALLS[:1])
    header = dialect.opening + dialect.written[0]
    for unit in (whole, whole[: len(whole) // 2], header, dialect.begin, '{"name": "', "{", "\n", "<"):
        short, long = (_work(dialect, unit, size) for size in (4_000, 8_000))
        assert long < 2.5 * short + 10_000, repr(unit)  # four times, if it were quadratic


def _work(dialect: Dialect, unit: str, size: int) -> int:
    """Calls of functions, and characters that are held back and looked at again with each piece."""
    text, work = (unit * (size // len(unit) + 1))[:size], 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal work
        work += event in ("call", "c_call")

    parser = Parser(dialect, thought_for(dialect), parameters=SCHEMAS)
    sys.setprofile(count)
    try:
        for at in range(0, size, 8):
            parser.feed(text[at : at + 8])
            work += len(parser._text)
        parser.end()
    finally:
        sys.setprofile(None)
    return work


@pytest.mark.parametrize(
    ("template", "name", "thought"),
    [
        ("<tool_call>\n{'name'", "hermes", None),
        ("<tool_call><function=x><parameter=y> </think>", "qwen3_coder", "think"),
        ("<tool_call>{}<arg_key></think>", "glm45", "think"),
        ("[TOOL_CALLS]", "mistral_list", None),
        ("[TOOL_CALLS][ARGS] [/THINK]", "mistral", "mistral"),
        ("<|action_start|><|plugin|>", "internlm", None),
        ("<|START_THINKING|><|END_THINKING|><|START_ACTION|>[", "cohere", "cohere"),
        ('Environment: ipython {"name": x, "parameters": y}', "llama3", None),
        ("<｜tool▁calls▁begin｜> ```json </think>", "deepseek_v3", "think"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31", None),
        ("<|start|><|channel|><|message|>", "harmony", "harmony"),
        ("<minimax:tool_call> </think>", "minimax_m2", "think"),
        ("<start_function_call>call:", "functiongemma", None),
        ("<|im_start|>", None, None),
    ],
)
def test_a_template_shows_its_dialect(template: str, name: str | None, thought: str | None) -> None:
    dialect, reasoning = dialect_of(template), thought_of(template)
    assert (dialect and dialect.name, reasoning and reasoning.name) == (name, thought)


@pytest.mark.parametrize("call_id", ['"tool_call_id": "0", ', ""])
def test_cohere_s_marks_of_an_answer_are_not_shown(call_id: str) -> None:
    cohere = DIALECTS["cohere"]
    answer = "<|START_THINKING|>So.<|END_THINKING|><|START_RESPONSE|>It is 3.<|END_RESPONSE|>"
    assert parsed(cohere, answer) == [Event("reasoning", "So."), Event("content", "It is 3.")]
    calls = f'<|START_ACTION|>[\n    {{{call_id}"tool_name": "f", "parameters": {{"a": 3}}}}\n]<|END_ACTION|>'
    assert calls_of(parsed(cohere, calls)) == [("f", {"a": 3})]
    assert parsed(cohere, calls.replace("tool_name", "tool"))[0].kind == "content"


CALL = '{"name": "f", "arguments": {"a": 1}}'
F = [("f", {"a": 1})]


@pytest.mark.parametrize(
    ("text", "calls", "said"),
    [
        (CALL, F, ""),
        (f"```json\n{CALL}\n```", F, ""),
        (f"```\n{CALL}\n```\nDone.", F, "Done."),
        (f"Sure:\n```json\n{CALL}\n```", F, "Sure:"),
        (f"Sure:\n{CALL}\n{CALL}", F * 2, "Sure:"),
        (f"{CALL}\n</tool_call>", F, ""),
        ('{\n "name": "f",\n "parameters": {"a": "}"}\n}', [("f", {"a": "}"})], ""),
        *((text, [], text) for text in (
            CALL.replace('"f"', '"Bob"'), '{"name": "f", "age": 3}', '```json\n{"name": "x"}\n```', '{"a": {"b": 1}}',
            "```python\nx = {}\n```", 'x\n{"name": 1}', '{"name": "f"', "x\n{\n}\n```\n{\n```",
        )),
    ],
)  # fmt: skip
def test_calls_without_marks_are_calls_of_the_tools_that_there_are(text: str, calls: object, said: str) -> None:
    found = [
        [event for piece in pieces for event in parser.feed(piece)] + parser.end()
        for pieces in (text, [text], [text[i : i + 5] for i in range(0, len(text), 5)])
        for parser in [Parser(DIALECTS["hermes"], None, parameters={"f": {}, "g": None})]
    ]
    events = collected(found[0])
    assert all(collected(other) == events for other in found)
    assert calls_of(events) == calls
    assert "".join(event.text for event in events if event.kind == "content") == said
