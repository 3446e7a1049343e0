"""Answers as models of each family write them: the parser finds the calls, and the grammar lets them through."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lmkit.text.dialects import DIALECTS, THOUGHTS, Event, Parser, collected, dialect_of, thought_of
from lmkit.text.dialects.grammar import Called, Form
from tests.text.dialects.answers import DEMO_TOKENIZER
from tests.text.dialects.test_dialect_grammar import Case

SCHEMAS: dict[str, Any] = {
    "f": {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}},
    "g": {"type": "object", "properties": {}, "additionalProperties": False},
}
F = ("f", {"n": 3, "s": "a b"})
BOTH = [F, ("g", {})]
ONE = '{"n": 3, "s": "a b"}'
LISTED = f'[{{"name": "f", "arguments": {ONE}}}, {{"name": "g", "arguments": {{}}}}]'
M3 = "]<]minimax[>["
FORMS = [
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
     f"{ONE}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
     "<|tool_calls_section_end|>", BOTH),
    ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="n" type="number"'
     '<|sep|>3<|close|>argument<|sep|><|open|>argument key="s" type="string"<|sep|>a b<|close|>argument<|sep|>'
     '<|close|>call'
     '<|sep|><|open|>call tool="g" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>', BOTH),
    ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="n" string="false">3'
     '</｜DSML｜parameter>\n<｜DSML｜parameter name="s" string="true">a b</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
     '<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>', BOTH),
    ("deepseek_v4", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
     BOTH[1:]),
    ("gemma4", '<|tool_call>call:f{n:3,s:<|"|>a b<|"|>}<tool_call|><|tool_call>call:g{}<tool_call|>', BOTH),
    ("lfm2", '<|tool_call_start|>[f(n=3, s="a b"), g()]<|tool_call_end|>', BOTH),
    ("lfm2", "<|tool_call_start|>[f(n=3, s='a b')]<|tool_call_end|>", [F]),
    ("pythonic", '[f(n=3, s="a b"), g()]', BOTH),
    ("olmo3", '<function_calls>f(n=3, s="a b")\ng()</function_calls>', BOTH),
    ("glm45", "<tool_call>f<arg_key>n</arg_key><arg_value>3</arg_value><arg_key>s</arg_key><arg_value>a b</arg_value>"
     "</tool_call><tool_call>g</tool_call>", BOTH),
    ("hy3", "<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>\n<arg_key:opensource>n"
     "</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n<arg_key:opensource>s</arg_key:opensource>"
     "\n<arg_value:opensource>a b</arg_value:opensource>\n</tool_call:opensource>\n<tool_call:opensource>g"
     "<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>", BOTH),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="n">3</parameter>\n<parameter name="s">a b'
     '</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>', BOTH),
    ("minimax_m3", f'{M3}<tool_call>\n{M3}<invoke name="f">{M3}<n>3{M3}</n>{M3}<s>a b{M3}</s>{M3}</invoke>\n'
     f'{M3}<invoke name="g">{M3}</invoke>\n{M3}</tool_call>', BOTH),
    ("minimax_m1", f'<tool_calls>\n{{"name": "f", "arguments": {ONE}}}\n{{"name": "g", "arguments": {{}}}}\n'
     "</tool_calls>", BOTH),
    ("seed_oss", "<seed:tool_call>\n<function=f>\n<parameter=n>3</parameter>\n<parameter=s>a b</parameter>\n"
     "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=g>\n</function>\n</seed:tool_call>", BOTH),
    ("step3", "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
     '<steptml:invoke name="f"><steptml:parameter name="n">3</steptml:parameter><steptml:parameter name="s">a b'
     "</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>", [F]),
    ("minicpm5", '<function name="f"><param name="n">3</param><param name="s">a b</param></function>\n'
     '<function name="g"></function>', BOTH),
    ("granite", f"<|tool_call|>{LISTED}", BOTH),
    ("granite_20b", f'<function_call> {{"name": "f", "arguments": {ONE}}}', [F]),
    ("nemotron", f"<TOOLCALL>{LISTED}</TOOLCALL>", BOTH),
    ("tool_calls", f"<tool_calls>{LISTED}</tool_calls>", BOTH),
    ("phi4_mini", f"functools{LISTED}", BOTH),
    ("xlam", LISTED, BOTH),
    ("apertus", f'<|tools_prefix|>[{{"f": {ONE}}}, {{"g": {{}}}}]<|tools_suffix|>', BOTH),
    ("longcat", f'<longcat_tool_call>\n{{"name": "f", "arguments": {ONE}}}\n</longcat_tool_call>', [F]),
    ("gigachat3", f'<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "f", "arguments": {ONE}}}', [F]),
    ("gigachat31", f'<|function_call|>{{"name": "f", "arguments": {ONE}}}', [F]),
    ("functionary", f"<function=f>{ONE}</function><function=g>{{}}</function>", BOTH),
    ("solar", f"<|tool_calls|><|tool_call:begin|>c1<|tool_call:name|>f<|tool_call:args|>{ONE}<|tool_call:end|>"
     "<|tool_call:begin|>c2<|tool_call:name|>g<|tool_call:args|>{}<|tool_call:end|><|calls|>", BOTH),
    ("mistral_ids", f"[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{ONE}[TOOL_CALLS]g[CALL_ID]abcdefgh2[ARGS]{{}}", BOTH),
    ("mistral_list", f"[TOOL_CALLS]{LISTED}", BOTH),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n<parameter=s>\na b\n</parameter>\n"
     "</function>\n</tool_call><tool_call>\n<function=g>\n</function>\n</tool_call>", BOTH),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "calls"), FORMS)
def test_calls_as_models_write_them(name: str, text: str, calls: list[tuple[str, Any]]) -> None:
    dialect = DIALECTS[name]
    parser = Parser(dialect, None, parameters=SCHEMAS)
    events = collected([*parser.feed(text), *parser.end()])
    found = [(event.text, json.loads(events[at + 1].text)) for at, event in enumerate(events) if event.kind == "call"]
    assert found == calls
    assert {event.kind for event in events} == {"call", "arguments"}
    form = Form([Called(*item) for item in SCHEMAS.items()], dialect, must_call=True)
    assert Case(dialect, DEMO_TOKENIZER).allows(form, text)


@pytest.mark.parametrize(
    ("name", "is_thinking", "text"),
    [
        ("gemma4", False, "<|channel>thought\nSo.\n<channel|>It is 3."),
        ("minimax_m3", False, "<mm:think>So.</mm:think>It is 3."),
        ("kimi_k3", True, "So.<|close|>think<|sep|><|open|>response<|sep|>It is 3.<|close|>response<|sep|>"
         "<|close|>message<|sep|>"),
        ("hy3", True, "So.</think:opensource>It is 3."),
        ("response", False, "<think>So.</think>\n<response>It is 3.</response>"),
        ("granite", False, "Here is my thought process: So. Here is my response: It is 3."),
        ("apriel", True, "So.\n[BEGIN FINAL RESPONSE]\nIt is 3.\n[END FINAL RESPONSE]"),
        ("solar", False, "<|think|>So.<|end|><|begin|>assistant<|content|>It is 3."),
        ("cohere", True, "So.<|END_THINKING|><|START_TEXT|>It is 3.<|END_TEXT|>"),
    ],
)  # fmt: skip
def test_reasoning_as_models_write_it(name: str, is_thinking: bool, text: str) -> None:
    for pieces in ([text], list(text)):
        parser = Parser(None, THOUGHTS[name], is_thinking=is_thinking)
        events = collected([*(event for piece in pieces for event in parser.feed(piece)), *parser.end()])
        assert events == [Event("reasoning", "So."), Event("content", "It is 3.")]


def test_an_answer_without_reasoning_is_shown_at_once() -> None:
    """Nothing waits for a mark that cannot come any more."""
    parser = Parser(DIALECTS["pythonic"], THOUGHTS["think"])
    assert parser.feed("<thin") == []
    assert collected(parser.feed("gs are")) == [Event("content", "<things are")]
    assert parser.feed(" [1]") == [Event("content", " [1]")]


@pytest.mark.parametrize(
    ("template", "name", "thought"),
    [
        ("<|tool_calls_section_begin|>", "kimi_k2", None),
        ("<|open|> open_tag('tools') open_tag('think' if", "kimi_k3", "kimi_k3"),
        ("'｜DSML｜' function_calls> </think>", "deepseek_v32", "think"),
        ("'｜DSML｜' + 'tool_calls> </think>", "deepseek_v4", "think"),
        ("<|tool_call>call: <|channel>thought <channel|>", "gemma4", "gemma4"),
        ("List of tools: [", "lfm2", None),
        ("<tool_call> ]<]minimax[>[ </mm:think>", "minimax_m3", "minimax_m3"),
        ("HYTK = ':opensource'", "hy3", "hy3"),
        ("[func_name1(params_name1=", "pythonic", None),
        ("<|tool_call|> </think> <response></response>", "granite", "response"),
        ("<tool_calls>[ [BEGIN FINAL RESPONSE] <|end|>", "tool_calls", "apriel"),
        ("<tool_calls>\n", "minimax_m1", None),
        ("<TOOLCALL>[", "nemotron", None),
        ("<seed:tool_call> <function= <parameter=", "seed_oss", None),
        ("<function=x></function>", "functionary", None),
        ("[TOOL_CALLS] [ARGS] [CALL_ID]", "mistral_ids", None),
        ("<|user|> <|end|>", None, None),
    ],
)
def test_a_template_shows_its_family(template: str, name: str | None, thought: str | None) -> None:
    dialect, reasoning = dialect_of(template), thought_of(template)
    assert (dialect and dialect.name, reasoning and reasoning.name) == (name, thought)
