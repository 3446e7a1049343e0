"""Custom tools of the Responses API, whose input is one text: functions with one argument, `input`."""

from __future__ import annotations

import json
import re
from typing import Any

from lmkit.serve.responses.tool_protocol import CustomTool, Pattern
from lmkit.text.held_schema import held
from lmkit.text.lark_pattern import pattern_of

_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_ESCAPE = r"\\(?:[^u]|u(?![dD][89abAB])[0-9a-fA-F]{4}|u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})"
_WHOLE = re.compile(rf'(?:[^"\\]|{_ESCAPE})*')  # characters of a JSON string; two escapes of a pair stay together


def input_pattern(tool: CustomTool) -> str | None:
    """The pattern of the input; None if any text is one, or if its grammar has no pattern."""
    if not isinstance(tool.format, Pattern):
        return None
    if tool.format.syntax == "regex":
        return f"^(?:{tool.format.definition})$"
    found = pattern_of(tool.format.definition)
    return None if found is None or held({"pattern": found})[1] else f"^{found}$"


def input_schema(tool: CustomTool) -> dict[str, Any]:
    """The schema of the function's arguments."""
    text: dict[str, Any] = {"type": "string"}
    if pattern := input_pattern(tool):
        text["pattern"] = pattern
    return {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}


def arguments_of(text: str) -> str:
    """The arguments of a call with this input."""
    return json.dumps({"input": text}, ensure_ascii=False)


class InputText:
    """The input of a call, from the pieces of its arguments, which may be cut anywhere."""

    def __init__(self) -> None:
        self._held, self._has_begun = "", False

    def feed(self, arguments: str) -> str:
        """The characters of the input that end in this piece."""
        self._held += arguments
        if not self._has_begun:
            if (begin := _BEGIN.match(self._held)) is None:
                return ""
            self._has_begun, self._held = True, self._held[begin.end() :]
        whole = _WHOLE.match(self._held)
        assert whole is not None
        self._held = self._held[whole.end() :]
        return str(json.loads(f'"{whole[0]}"', strict=False))


def input_of(arguments: str) -> str:
    """The input of a call. Arguments that were cut give what there is of it."""
    return InputText().feed(arguments)
