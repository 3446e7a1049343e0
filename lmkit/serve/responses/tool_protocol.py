"""The tools of the Responses API that the client runs, and how an answer may call them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from lmkit.hints import without_foreign
from lmkit.strict import Nullable
from lmkit.text.chat.conversation import MAX_TOOLS, ToolName
from lmkit.text.messages import MAX_NAME_CHARS

OURS = ("function", "custom", "namespace")  # kinds of tools that the client runs


def client_tools(tools: Any) -> Any:
    if isinstance(tools, list) and len(tools) > MAX_TOOLS:
        raise ValueError(f"at most {MAX_TOOLS} tools")
    if not isinstance(tools, list):
        return tools
    return without_foreign(tools, OURS, "tools", "send functions or custom tools, which the client runs")


class FunctionTool(Nullable):
    absent = {"defer_loading": (False,), "allowed_callers": (["direct"],), "async": (False,)}

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AnyText(Nullable):
    type: Literal["text"]


class Pattern(Nullable):
    """Which texts a custom tool takes, see tools.function_of. A grammar of Lark is held where one regex says it."""

    type: Literal["grammar"]
    syntax: Literal["regex", "lark"]
    definition: Annotated[str, Field(max_length=1 << 16)]


class CustomTool(Nullable):
    """A tool whose input is one text. `format` says which texts it takes; none = any."""

    absent = FunctionTool.absent

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: Annotated[AnyText | Pattern, Field(discriminator="type")] | None = None


def _ones(tools: Any) -> Any:
    """The functions and custom tools among those of a namespace, or of a choice."""
    if not isinstance(tools, list):
        return tools
    return without_foreign(tools, ("function", "custom"), "tools", "send functions or custom tools")


OneTool = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]


class Namespace(Nullable):
    """Tools of one source. Their calls carry its name."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[OneTool], Field(max_length=MAX_TOOLS), BeforeValidator(_ones)] = []


AnyTool = Annotated[FunctionTool | CustomTool | Namespace, Field(discriminator="type")]


class NamedTool(Nullable):
    type: Literal["function", "custom"]
    name: Annotated[str, Field(max_length=MAX_NAME_CHARS)]
    namespace: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None


class AllowedTools(Nullable):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS), BeforeValidator(_ones)]
