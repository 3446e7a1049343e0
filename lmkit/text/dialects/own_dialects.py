"""The dialects that write arguments in a syntax of their own."""

from __future__ import annotations

import re
from typing import Any

from lmkit.text.dialects.dialect import BARE_NAME, Dialect
from lmkit.text.dialects.rules import LINE, NUMBER
from lmkit.text.dialects.syntaxes.gemma import Gemma
from lmkit.text.dialects.syntaxes.members import KIND, Members
from lmkit.text.dialects.syntaxes.pythonic import Pythonic
from lmkit.text.dialects.syntaxes.tags import Tags

_PARAMETER = Members("<parameter=", ">\n", "\n</parameter>", "\n", on_lines=True)
_FUNCTION = r"\s*<function=(?P<name>[^\s<>]{1,128})>"


def _qwen(name: str, marks: tuple[str, ...], tag: str, syntax: Members) -> Dialect:
    begin, end = f"<{tag}>", f"</{tag}>"
    return Dialect(
        name,
        marks,
        begin,
        _FUNCTION,
        rf"\s*</function>\s*{re.escape(end)}",
        (f"{begin}\n<function=", ">\n", f"</function>\n{end}"),
        between=LINE,
        syntax=syntax,
        specials=(begin, end),
    )


QWEN = (
    _qwen("seed_oss", ("<seed:tool_call>",), "seed:tool_call",
          Members("<parameter=", ">", "</parameter>", "\n", on_lines=True)),
    _qwen("qwen3_coder", ("<function=", "<parameter="), "tool_call", _PARAMETER),
)  # fmt: skip


def _glm(name: str, marks: tuple[str, ...], suffix: str, sep: str, **fields: Any) -> Dialect:
    """`suffix` ends the name of each tag. `sep` stands after the function's name."""
    call, end = f"<tool_call{suffix}>", f"</tool_call{suffix}>"
    key, value = (f"<arg_key{suffix}>", f"</arg_key{suffix}>"), (f"<arg_value{suffix}>", f"</arg_value{suffix}>")
    own: dict[str, Any] = {
        "begin": call,
        "header": r"\s*" + BARE_NAME + (re.escape(sep) if sep else r"(?=\s*<)"),
        "tail": r"\s*" + re.escape(end),
        "written": (call, f"{sep}{LINE}", f"{LINE}{end}"),
        "between": LINE,
        "syntax": Members(key[0], f"{key[1]}{LINE}{value[0]}", value[1], LINE),
        "specials": (call, end, *key, *value),
    }
    return Dialect(name, marks, **own | fields)


_HY3 = ("<tool_calls:opensource>", "</tool_calls:opensource>")
GLM = (
    _glm(
        "hy3",
        ("HYTK = ':opensource'",),
        ":opensource",
        "<tool_sep:opensource>",
        begin=_HY3[0],
        header=r"\s*<tool_call:opensource>" + BARE_NAME + "<tool_sep:opensource>",
        again=r"\s*(?=<tool_call:opensource>)",
        close=r"\s*" + re.escape(_HY3[1]),
        opening=f"{_HY3[0]}\n",
        between="\n",
        closing=f"\n{_HY3[1]}",
        specials=(*_HY3, "<tool_call:opensource>", "</tool_call:opensource>", "<tool_sep:opensource>",
                  *(f"<{end}arg_{part}:opensource>" for part in ("key", "value") for end in ("", "/"))),
    ),
    _glm("glm45", ("<arg_key>",), "", ""),
)  # fmt: skip


def _invoked(name: str, marks: tuple[str, ...], block: str, prefix: str, syntax: Members, **fields: Any) -> Dialect:
    """Calls <invoke name="..."> in a block. `prefix` begins the name of each tag in it."""
    own: dict[str, Any] = {
        "begin": f"<{block}>",
        "header": rf'\s*<{prefix}invoke name="(?P<name>[^\s"<>]{{1,128}})">',
        "tail": rf"\s*</{prefix}invoke>",
        "written": (f'<{prefix}invoke name="', '">\n', f"{LINE}</{prefix}invoke>"),
        "again": rf"\s*(?=<{prefix}invoke\s)",
        "close": rf"\s*</{block}>",
        "opening": f"<{block}>\n",
        "between": "\n",
        "closing": f"\n</{block}>",
        "syntax": syntax,
    }
    return Dialect(name, marks, **own | fields)


_DSML = "｜DSML｜"
_TYPED = Members(
    f'<{_DSML}parameter name="',
    f'" string="{KIND}">',
    f"</{_DSML}parameter>",
    "\n",
    kinds={"string": "true", "": "false"},
)
_STEP = (
    "<｜tool_calls_begin｜>",
    "<｜tool_call_begin｜>",
    "<｜tool_sep｜>",
    "<｜tool_call_end｜>",
    "<｜tool_calls_end｜>",
)
INVOKED = (
    _invoked("deepseek_v4", (_DSML, "tool_calls>"), f"{_DSML}tool_calls", _DSML, _TYPED, specials=(_DSML,)),
    _invoked("deepseek_v32", (_DSML,), f"{_DSML}function_calls", _DSML, _TYPED, specials=(_DSML,)),
    _invoked(
        "minimax_m2",
        ("<minimax:tool_call>",),
        "minimax:tool_call",
        "",
        Members('<parameter name="', '">', "</parameter>", "\n"),
        specials=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    _invoked(
        "step3",
        ("<steptml:invoke",),
        "steptml",
        "steptml:",
        Members('<steptml:parameter name="', '">', "</steptml:parameter>"),
        begin=_STEP[0],
        header=rf'\s*{_STEP[1]}\s*function\s*{_STEP[2]}\s*<steptml:invoke name="(?P<name>[^\s"<>]{{1,128}})">',
        tail=rf"\s*</steptml:invoke>\s*{_STEP[3]}",
        written=(f'{_STEP[1]}function{_STEP[2]}<steptml:invoke name="', '">', f"</steptml:invoke>{_STEP[3]}"),
        again=rf"\s*(?={_STEP[1]})",
        close=rf"\s*{_STEP[4]}",
        opening=_STEP[0],
        closing=_STEP[4],
        specials=_STEP,
    ),
)

MINICPM5 = Dialect(
    "minicpm5",
    ('<function name="', '<param name="'),
    '<function name="',
    r'(?P<name>[^\s"<>]{1,128})">',
    r"\s*</function>",
    ('<function name="', '">', "</function>"),
    between=LINE,
    syntax=Members('<param name="', '">', "</param>", quotes=("<![CDATA[", "]]>")),
)

_M3 = "]<]minimax[>["  # before each tag
_OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"
MINIMAX_M3 = Dialect(
    "minimax_m3",
    (_M3,),
    f"{_M3}<tool_call>",
    rf'\s*{re.escape(_M3)}<invoke name="(?P<name>[^\s"<>]{{1,128}})">',
    rf"\s*{re.escape(_M3)}</invoke>",
    (f'{_M3}<invoke name="', '">', f"{_M3}</invoke>\n"),
    again=rf"\s*(?={re.escape(_M3)}<invoke\s)",
    close=rf"\s*{re.escape(_M3)}</tool_call>",
    opening=f"{_M3}<tool_call>\n",
    closing=f"{_M3}</tool_call>",
    syntax=Tags(_M3),
    specials=(_M3,),
)
KIMI_K3 = Dialect(
    "kimi_k3",
    (_OPEN, "open_tag('tools'"),
    f"{_OPEN}tools{_SEP}",
    rf'\s*{re.escape(_OPEN)}call tool="(?P<name>[^\s"<>]{{1,128}})"(?: index="\d{{1,10}}")?{re.escape(_SEP)}',
    rf"\s*{re.escape(f'{_CLOSE}call{_SEP}')}",
    (f'{_OPEN}call tool="', f'" index="{NUMBER}"{_SEP}', f"{_CLOSE}call{_SEP}"),
    again=rf"\s*(?={re.escape(_OPEN)}call\s)",
    close=rf"\s*{re.escape(f'{_CLOSE}tools{_SEP}')}",
    opening=f"{_OPEN}tools{_SEP}",
    closing=f"{_CLOSE}tools{_SEP}",
    syntax=Members(
        f'{_OPEN}argument key="',
        f'" type="{KIND}"{_SEP}',
        f"{_CLOSE}argument{_SEP}",
        kinds={"string": "string", "integer": "number"},
    ),
    specials=(_OPEN, _CLOSE, _SEP),
)


def _gemma(name: str, begin: str, end: str, mark: str) -> Dialect:
    return Dialect(
        name,
        (begin,),
        begin,
        r"\s*call:(?P<name>[^\s<>{}]{1,128})\s*(?=\{)",
        r"\s*" + re.escape(end),
        (f"{begin}call:", "", end),
        syntax=Gemma(mark),
        specials=(begin, end, mark),
    )


GEMMA = (
    _gemma("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>'),
    _gemma("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>"),
)

_NAME = r"[a-zA-Z_][a-zA-Z0-9_.-]{0,127}"


def _python(name: str, marks: tuple[str, ...], begin: str, end: str, **fields: Any) -> Dialect:
    own: dict[str, Any] = {
        "open": r"\s*\[",
        "again": rf"\s*,\s*(?={_NAME}\s*\()",
        "close": r"\s*\]" + (r"\s*" + re.escape(end) if end else ""),
        "opening": f"{begin}[",
        "between": ", ",
        "closing": f"]{end}",
        "specials": tuple(mark for mark in (begin, end) if mark),
    }
    header = rf"\s*(?P<name>{_NAME})\s*(?=\()"
    return Dialect(name, marks, begin, header, "", ("", "", ""), syntax=Pythonic(), **own | fields)


PYTHONIC = (
    _python("lfm2", ("List of tools: ",), "<|tool_call_start|>", "<|tool_call_end|>"),
    _python(
        "olmo3",
        ("<function_calls>", "<functions>"),
        "<function_calls>",
        "</function_calls>",
        open="",
        again=rf"\s*(?={_NAME}\s*\()",
        close=r"\s*</function_calls>",
        opening="<function_calls>",
        between="\n",
        closing="</function_calls>",
    ),
    _python(
        "pythonic",
        ("[func_name1(",),
        "<|python_start|>",
        "",
        opening="[",
        starts=(r"\[", r"\s*", "[a-zA-Z_]", "[a-zA-Z0-9_.-]*", r"\("),
    ),
)
