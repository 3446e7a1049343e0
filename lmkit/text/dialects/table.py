"""The dialects. A family of models has one for calls and one for reasoning; its chat template shows which.

A call consists of

    begin  header  arguments  tail        hermes: <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>

where `header` has the function's name and `tail` closes the call. `again` stands between calls that share one `begin`,
and `close` after the last of them. Patterns end with a fixed text or with a look-ahead, so a match does not depend on
how the text was cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Syntax = Literal["json", "qwen_xml", "glm_xml", "minimax_xml", "gemma", "harmony"]  # of a call's arguments

_NAME = r'"(?P<name>[^"\\]{1,128})"'
_OBJECT = r'\s*\{\s*"name"\s*:\s*' + _NAME + r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[^\s])'
_BARE = r"(?P<name>[^\s<>{}\[\]\"]{1,128})"
_NEVER = r"(?!)"


@dataclass(frozen=True)
class Dialect:
    """How calls of tools are written. `written` and `between` are what a grammar makes the model write.

    `written` is (text before the name, text before the arguments, text after them), with NUMBER for any digits. The
    first call has `opening` before it, further calls have `between`, and the last one `closing` after it.
    """

    name: str
    marks: tuple[str, ...]  # in the chat templates of such models
    begin: str
    header: str
    tail: str
    written: tuple[str, str, str]
    again: str = _NEVER
    close: str = _NEVER
    opening: str = ""
    between: str = ""
    closing: str = ""
    syntax: Syntax = "json"
    in_object: bool = False  # name and arguments are members of one JSON object
    bare: bool = False  # calls of tools that there are may stand in the text without marks (dialects.bare)
    only_first: bool = False  # calls without `begin` may start an answer, if it starts with a JSON object
    specials: tuple[str, ...] = ()  # marks that may be special tokens
    num_id_chars: int = 24  # of a call's id

    @property
    def parallel(self) -> bool:
        """Whether an answer may have several calls."""
        return bool(self.between) or self.again != _NEVER or self.syntax == "gemma"


def _object(name: str, marks: tuple[str, ...], begin: str, end: str, **fields: object) -> Dialect:
    tail = r"\s*\}\s*" + re.escape(end) if end.strip() else r"\s*\}"
    return Dialect(name, marks, begin, _OBJECT, tail, in_object=True, **fields)  # type: ignore[arg-type]


_V3_BEGIN, _V3_CALL, _V3_SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_V3_END, _V3_CLOSE = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
_V3 = {
    "again": r"\s*(?=" + re.escape(_V3_CALL) + ")",
    "close": r"\s*" + re.escape(_V3_CLOSE),
    "opening": _V3_BEGIN,
    "between": "\n",
    "closing": _V3_CLOSE,
    "specials": (_V3_BEGIN, _V3_CALL, _V3_SEP, _V3_END, _V3_CLOSE),
}
_XML = ("<tool_call>", "</tool_call>")

_MINIMAX = ("<minimax:tool_call>", "</minimax:tool_call>")

_ACTION = ("<|START_ACTION|>", "<|END_ACTION|>")
NUMBER = "\0"  # in `written`: digits

_GEMMA = ("<start_function_call>", "<end_function_call>")
ESCAPE = "<escape>"  # Gemma's quotation mark

# In the order in which a template is asked for their marks.
_ALL = (
    Dialect(
        "harmony",
        ("<|channel|>", "<|message|>"),
        "<|channel|>",
        _NEVER,
        _NEVER,
        ("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""),
        syntax="harmony",
        specials=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
    ),
    Dialect(
        "qwen3_coder",
        ("<function=",),
        "<tool_call>",
        r"\s*<function=(?P<name>[^\s<>]{1,128})>",
        r"\s*</function>\s*</tool_call>",
        ("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"),
        between="\n",
        syntax="qwen_xml",
        specials=_XML,
    ),
    Dialect(
        "glm45",
        ("<arg_key>",),
        "<tool_call>",
        r"\s*" + _BARE + r"(?=\s*<)",
        r"\s*</tool_call>",
        ("<tool_call>", "\n", "</tool_call>"),
        between="\n",
        syntax="glm_xml",
        specials=(*_XML, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    Dialect(
        "minimax_m2",
        _MINIMAX[:1],
        _MINIMAX[0],
        r'\s*<invoke name="(?P<name>[^\s"<>]{1,128})">',
        r"\s*</invoke>",
        ('\n<invoke name="', '">\n', "</invoke>"),
        again=r"\s*(?=<invoke\s)",
        close=r"\s*" + re.escape(_MINIMAX[1]),
        opening=_MINIMAX[0],
        closing=f"\n{_MINIMAX[1]}",
        syntax="minimax_xml",
        specials=_MINIMAX,
    ),
    Dialect(
        "functiongemma",
        _GEMMA[:1],
        _GEMMA[0],
        r"\s*call:(?P<name>[^\s<>{}]{1,128})\s*(?=\{)",
        r"\s*" + re.escape(_GEMMA[1]),
        (f"{_GEMMA[0]}call:", "", _GEMMA[1]),
        syntax="gemma",
        specials=(*_GEMMA, ESCAPE),
    ),
    _object(
        "hermes",
        ("<tool_call>",),
        "<tool_call>",
        "</tool_call>",
        written=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
        between="\n",
        bare=True,
        specials=_XML,
    ),
    Dialect(
        "deepseek_v3",
        (_V3_BEGIN, "```json"),
        _V3_BEGIN,
        r"\s*" + re.escape(_V3_CALL) + r"function" + re.escape(_V3_SEP) + _BARE + r"\s*```json\s*(?=\S)",
        r"\s*```\s*" + re.escape(_V3_END),
        (f"{_V3_CALL}function{_V3_SEP}", "\n```json\n", f"\n```{_V3_END}"),
        **_V3,  # type: ignore[arg-type]
    ),
    Dialect(
        "deepseek_v31",
        (_V3_BEGIN,),
        _V3_BEGIN,
        r"\s*" + re.escape(_V3_CALL) + _BARE + re.escape(_V3_SEP) + r"\s*(?=\S)",
        r"\s*" + re.escape(_V3_END),
        (_V3_CALL, _V3_SEP, _V3_END),
        **_V3,  # type: ignore[arg-type]
    ),
    Dialect(
        "mistral",
        ("[TOOL_CALLS]", "[ARGS]"),
        "[TOOL_CALLS]",
        _BARE + r"(?:\[CALL_ID\][a-zA-Z0-9]{1,64})?(?:\[ARGS\])?\s*(?=\{)",
        "",
        ("[TOOL_CALLS]", "[ARGS]", ""),
        between=" ",
        specials=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        num_id_chars=9,  # their templates take no other
    ),
    _object(
        "mistral_list",
        ("[TOOL_CALLS]",),
        "[TOOL_CALLS]",
        "",
        again=r"\s*,(?=\s*\{)",
        close=r"\s*\]",
        opening="[TOOL_CALLS] [",
        between=", ",
        closing="]",
        written=('{"name": "', '", "arguments": ', "}"),
        specials=("[TOOL_CALLS]",),
        num_id_chars=9,
    ),
    Dialect(
        "cohere",
        _ACTION[:1],
        _ACTION[0],
        r'\s*\{\s*(?:"tool_call_id"\s*:\s*"[^"\\]{0,64}"\s*,\s*)?"tool_name"\s*:\s*'
        + _NAME
        + r'\s*,\s*"parameters"\s*:\s*(?=[^\s])',
        r"\s*\}",
        (f'\n    {{"tool_call_id": "{NUMBER}", "tool_name": "', '", "parameters": ', "}"),
        again=r"\s*,(?=\s*\{)",
        close=r"\s*\]\s*" + re.escape(_ACTION[1]),
        opening=f"{_ACTION[0]}[",
        between=",",
        closing=f"\n]{_ACTION[1]}",
        specials=_ACTION,
    ),
    _object(
        "internlm",
        ("<|action_start|>",),
        "<|action_start|><|plugin|>",
        "<|action_end|>",
        written=('<|action_start|><|plugin|>\n{"name": "', '", "parameters": ', "}<|action_end|>"),
        specials=("<|action_start|>", "<|plugin|>", "<|action_end|>", "<|interpreter|>"),
    ),
    _object(
        "llama3",
        ("<|eom_id|>",),
        "<|python_tag|>",
        "",
        again=r"\s*;(?=\s*\{)",
        only_first=True,
        written=('{"name": "', '", "parameters": ', "}"),
        between="; ",
        specials=("<|python_tag|>",),
    ),
)
DIALECTS: Mapping[str, Dialect] = {dialect.name: dialect for dialect in _ALL}
PLAIN = DIALECTS["hermes"]  # of models whose template knows no tools


@dataclass(frozen=True)
class Thought:
    """How reasoning stands before an answer."""

    name: str
    begin: str
    end: str
    around: tuple[str, ...] = ()  # marks that may begin and end the answer itself


THOUGHTS: Mapping[str, Thought] = {
    "think": Thought("think", "<think>", "</think>"),
    "mistral": Thought("mistral", "[THINK]", "[/THINK]"),
    "seed_oss": Thought("seed_oss", "<seed:think>", "</seed:think>"),
    "cohere": Thought(
        "cohere", "<|START_THINKING|>", "<|END_THINKING|>", around=("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
    "harmony": Thought("harmony", "<|channel|>", "<|end|>"),
}


MARKS = frozenset(mark for dialect in _ALL for mark in (dialect.begin, *dialect.specials)) | frozenset(
    mark for thought in THOUGHTS.values() for mark in (thought.begin, thought.end, *thought.around)
)


def dialect_of(template: str) -> Dialect | None:
    """The dialect whose marks a chat template has."""
    marked = (dialect for dialect in _ALL if all(mark in template for mark in dialect.marks))
    found = next(marked, None)
    if found is None and "ipython" in template and '"parameters"' in template:  # Llama 3.2 has no <|eom_id|>
        return DIALECTS["llama3"]
    return found


def thought_of(template: str) -> Thought | None:
    """The reasoning whose marks a chat template has."""
    if (found := dialect_of(template)) is not None and found.syntax == "harmony":
        return THOUGHTS["harmony"]
    return next((thought for thought in THOUGHTS.values() if thought.end in template), None)
