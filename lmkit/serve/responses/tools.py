"""The tools of a Responses request as functions of a chat.

A tool of a namespace is presented as NAMESPACE__NAME. A custom tool is a function with one argument, `input`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lmkit.hints import ignore
from lmkit.serve.responses.custom import input_pattern, input_schema
from lmkit.serve.responses.tool_protocol import AnyTool, CustomTool, FunctionTool, Namespace, Pattern


class Presented(NamedTuple):
    """A tool, and the name under which the model knows it."""

    shown: str
    tool: FunctionTool | CustomTool
    namespace: str | None = None


def presented(tools: Sequence[AnyTool] | None) -> Iterator[Presented]:
    """All tools, those of namespaces one by one."""
    for tool in tools or ():
        if isinstance(tool, Namespace):
            yield from (Presented(shown_name(one.name, tool.name), one, tool.name) for one in tool.tools)
        else:
            yield Presented(tool.name, tool)


def shown_name(name: str, namespace: str | None) -> str:
    """The name of a tool for the model."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def function_of(one: Presented) -> dict[str, Any]:
    """A tool of a chat."""
    tool, description = one.tool, one.tool.description
    schema, strict = (input_schema(tool), True) if isinstance(tool, CustomTool) else (tool.parameters, tool.strict)
    if isinstance(tool, CustomTool) and isinstance(tool.format, Pattern) and tool.format.syntax == "lark":
        strict = None  # the model is told the grammar as well
        if input_pattern(tool) is None:
            ignore("tools.format.lark")  # the text stands in a JSON string, where no grammar with rules in rules holds
        told = f"The input follows this Lark grammar:\n{tool.format.definition}"
        description = f"{description}\n{told}" if description else told
    function = {"name": one.shown, "description": description, "parameters": schema, "strict": strict}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}
