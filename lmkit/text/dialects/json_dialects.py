"""The dialects whose arguments are JSON."""

from __future__ import annotations

import re
from typing import Any

from lmkit.text.dialects.dialect import BARE_NAME, NAME, NEVER, Dialect, listed, single
from lmkit.text.dialects.rules import ID, LINE, NUMBER, SPACE

_TOOL_CALL = ("<tool_call>", "</tool_call>")

HARMONY = Dialect(
    "harmony",
    ("<|channel|>", "<|message|>"),
    "<|channel|>",
    NEVER,
    NEVER,
    ("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""),
    parallel=False,
    specials=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
)
PLAIN = single(  # and of models whose template knows no tools
    "hermes",
    _TOOL_CALL[:1],
    *_TOOL_CALL,
    written=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    between=LINE,
    bare=True,
)

_V3_BEGIN, _V3_CALL, _V3_SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_V3_END, _V3_CLOSE = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
_V3: dict[str, Any] = {
    "again": r"\s*(?=" + re.escape(_V3_CALL) + ")",
    "close": r"\s*" + re.escape(_V3_CLOSE),
    "opening": _V3_BEGIN,
    "between": LINE,
    "closing": _V3_CLOSE,
    "specials": (_V3_BEGIN, _V3_CALL, _V3_SEP, _V3_END, _V3_CLOSE),
}
DEEPSEEK = (
    Dialect(
        "deepseek_v3",
        (_V3_BEGIN, "```json"),
        _V3_BEGIN,
        r"\s*" + re.escape(_V3_CALL) + r"function" + re.escape(_V3_SEP) + BARE_NAME + r"\s*```json\s*(?=\S)",
        r"\s*```\s*" + re.escape(_V3_END),
        (f"{_V3_CALL}function{_V3_SEP}", "\n```json\n", f"\n```{_V3_END}"),
        **_V3,
    ),
    Dialect(
        "deepseek_v31",
        (_V3_BEGIN,),
        _V3_BEGIN,
        r"\s*" + re.escape(_V3_CALL) + BARE_NAME + re.escape(_V3_SEP) + r"\s*(?=\S)",
        r"\s*" + re.escape(_V3_END),
        (_V3_CALL, _V3_SEP, _V3_END),
        **_V3,
    ),
)

_K2 = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_K2_CALL, _K2_ARGUMENTS, _K2_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
KIMI_K2 = Dialect(
    "kimi_k2",
    _K2[:1],
    _K2[0],
    rf"\s*{re.escape(_K2_CALL)}\s*(?:functions\.)?(?P<name>[^\s<>{{}}\[\]\":]{{1,128}})(?::\d{{1,10}})?\s*"
    + re.escape(_K2_ARGUMENTS) + r"\s*(?=\S)",
    r"\s*" + re.escape(_K2_END),
    (f"{_K2_CALL}functions.", f":{NUMBER}{_K2_ARGUMENTS}", _K2_END),
    again=r"\s*(?=" + re.escape(_K2_CALL) + ")",
    close=r"\s*" + re.escape(_K2[1]),
    opening=_K2[0],
    closing=_K2[1],
    specials=(*_K2, _K2_CALL, _K2_ARGUMENTS, _K2_END),
    id_form="functions.{name}:{number}",  # some of their templates show ids, and models count on
)  # fmt: skip


def _mistral(name: str, marks: tuple[str, ...], call_id: str) -> Dialect:
    return Dialect(
        name,
        ("[TOOL_CALLS]", "[ARGS]", *marks),
        "[TOOL_CALLS]",
        BARE_NAME + r"(?:\[CALL_ID\][a-zA-Z0-9]{1,64})?(?:\[ARGS\])?\s*(?=\{)",
        "",
        ("[TOOL_CALLS]", f"{call_id}[ARGS]", ""),
        between=SPACE,
        specials=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        num_id_chars=9,  # their templates take no other
    )


MISTRAL = (
    _mistral("mistral_ids", ("[CALL_ID]",), f"[CALL_ID]{ID}"),
    _mistral("mistral", (), ""),
    listed(
        "mistral_list",
        ("[TOOL_CALLS]",),
        "[TOOL_CALLS]",
        tail=r'\s*(?:,\s*"id"\s*:\s*"[^"\\]{0,64}"\s*)?\}',
        opening=f"[TOOL_CALLS]{SPACE}[",
        num_id_chars=9,
    ),
)

_ACTION = ("<|START_ACTION|>", "<|END_ACTION|>")
_TOOL_CALLS = ("<tool_calls>", "</tool_calls>")
_APERTUS = ("<|tools_prefix|>", "<|tools_suffix|>")
LISTED = (
    listed("granite", ("<|tool_call|>",), "<|tool_call|>"),
    listed("nemotron", ("<TOOLCALL>",), "<TOOLCALL>", "</TOOLCALL>"),
    listed("tool_calls", ("<tool_calls>[",), *_TOOL_CALLS),
    listed(
        "minimax_m1",
        _TOOL_CALLS[:1],
        *_TOOL_CALLS,
        open=r"\s*\[(?=\s*\{)",
        again=r"\s*,?(?=\s*\{)",
        close=r"\s*\]?\s*</tool_calls>",
        opening="<tool_calls>\n",
        between="\n",
        closing="\n</tool_calls>",
    ),
    Dialect(
        "apertus",
        _APERTUS[:1],
        _APERTUS[0],
        r"\s*\{\s*" + NAME + r"\s*:\s*(?=\S)",
        r"\s*\}",
        ('{"', '": ', "}"),
        open=r"\s*\[(?=\s*\{)",
        again=r"\s*,(?=\s*\{)",
        close=r"\s*\]\s*" + re.escape(_APERTUS[1]),
        opening=f"{_APERTUS[0]}[",
        between=", ",
        closing=f"]{_APERTUS[1]}",
        specials=_APERTUS,
    ),
    Dialect(
        "cohere",
        _ACTION[:1],
        _ACTION[0],
        r'\s*\{\s*(?:"tool_call_id"\s*:\s*"[^"\\]{0,64}"\s*,\s*)?"tool_name"\s*:\s*'
        + NAME
        + r'\s*,\s*"parameters"\s*:\s*(?=[^\s])',
        r"\s*\}",
        (f'\n    {{"tool_call_id": "{NUMBER}", "tool_name": "', '", "parameters": ', "}"),
        open=r"\s*\[(?=\s*\{)",
        again=r"\s*,(?=\s*\{)",
        close=r"\s*\]\s*" + re.escape(_ACTION[1]),
        opening=f"{_ACTION[0]}[",
        between=",",
        closing=f"\n]{_ACTION[1]}",
        specials=_ACTION,
    ),
    listed("phi4_mini", (), "functools", specials=()),
    listed(
        "xlam",
        (),
        "[TOOL_CALLS]",
        opening="[",
        starts=(r"\[", r"\s*", r"\{", r"\s*", '"'),
    ),
)

_GIGA = "<|message_sep|>\n\nfunction call<|role_sep|>"
_SOLAR = ("<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>")
SINGLE = (
    single(
        "internlm",
        ("<|action_start|>",),
        "<|action_start|><|plugin|>",
        "<|action_end|>",
        written=('<|action_start|><|plugin|>\n{"name": "', '", "parameters": ', "}<|action_end|>"),
        parallel=False,
        specials=("<|action_start|>", "<|plugin|>", "<|action_end|>", "<|interpreter|>"),
    ),
    single(
        "longcat",
        ("<longcat_tool_call>",),
        "<longcat_tool_call>",
        "</longcat_tool_call>",
        written=('<longcat_tool_call>\n{"name": "', '", "arguments": ', "}\n</longcat_tool_call>"),
        between=LINE,
    ),
    single(
        "granite_20b",
        ("<function_call>",),
        "<function_call>",
        "",
        written=('<function_call> {"name": "', '", "arguments": ', "}"),
        between=" ",
    ),
    single(
        "gigachat31",
        ("<|function_call|>",),
        "<|function_call|>",
        "",
        written=('<|function_call|>{"name": "', '", "arguments": ', "}"),
        parallel=False,
    ),
    single(
        "gigachat3",
        ("function call", "<|role_sep|>"),
        _GIGA,
        "",
        written=(f'{_GIGA}\n{{"name": "', '", "arguments": ', "}"),
        parallel=False,
        specials=("<|message_sep|>", "<|role_sep|>"),
    ),
    Dialect(
        "functionary",
        ("<function=", "</function>"),
        "<function=",
        r"(?P<name>[^\s<>{}\"]{1,128})>\s*(?=\S)",
        r"\s*</function>",
        ("<function=", ">", "</function>"),
    ),
    Dialect(
        "solar",
        ("<|tool_calls|>", _SOLAR[0]),
        "<|tool_calls|>",
        rf"\s*{re.escape(_SOLAR[0])}[^<>\s]{{0,64}}{re.escape(_SOLAR[1])}{BARE_NAME}{re.escape(_SOLAR[2])}\s*(?=\S)",
        r"\s*" + re.escape(_SOLAR[3]),
        (f"{_SOLAR[0]}{ID}{_SOLAR[1]}", _SOLAR[2], _SOLAR[3]),
        again=r"\s*(?=" + re.escape(_SOLAR[0]) + ")",
        close=r"\s*<\|calls\|>",
        opening="<|tool_calls|>",
        closing="<|calls|>",
        specials=("<|tool_calls|>", *_SOLAR, "<|calls|>"),
    ),
    single(
        "llama3",
        ("<|eom_id|>",),
        "<|python_tag|>",
        "",
        again=r"\s*;(?=\s*\{)",
        starts=(r"\{",),
        written=('{"name": "', '", "parameters": ', "}"),
        between="; ",
    ),
)
