"""The part of Anthropic's Messages API that this server supports. What it lacks is refused by name.

`cache_control` asks that a prefix be cached, for some minutes. The server caches every prefix, as long as there is
room, so any place and time is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from lmkit import neutral
from lmkit.errors import RequestError
from lmkit.hints import ignore, without_foreign
from lmkit.serve.numbers import Temperature, TopP
from lmkit.serve.protocol import ChatExtensions
from lmkit.strict import LAZY, NULL, Nullable, given
from lmkit.text.chat.conversation import MAX_MESSAGES, MAX_TOOLS, CalledName, Effort, ToolName, check_parts
from lmkit.turbo.request import MAX_STOPS

Id = Annotated[str, Field(max_length=256)]


class CacheControl(Nullable):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: Annotated[str, Field(max_length=64)] | None = None  # who else may use it: tenants stay apart in any case


class _Block(Nullable):
    cache_control: CacheControl | None = None


class Text(_Block):
    absent = {"citations": ([],)}

    type: Literal["text"]
    text: str = ""


class Thinking(_Block):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinking(_Block):
    type: Literal["redacted_thinking"]
    data: str


class ToolUse(_Block):
    absent = {"caller": ({"type": "direct"},)}

    type: Literal["tool_use"]
    id: Id
    name: CalledName
    input: dict[str, Any] = {}


def _told(block: Any) -> list[Any]:
    """A block; as texts, if it is a search's result or a document that is one. Their notes are left out."""
    match block:
        case {"type": "search_result", "content": list(inside), **about}:
            head = "\n".join(str(about[name]) for name in ("title", "source") if about.get(name))
            return [{"type": "text", "text": head}] * bool(head) + inside
        case {"type": "document", "source": {"type": "text", "data": str(text)}, **about}:
            return [{"type": "text", "text": f"{about['title']}\n{text}" if about.get("title") else text}]
        case {"type": "document", "source": {"type": "content", "content": list(inside)}}:
            return inside
    return [block]


def _texts(value: Any) -> Any:
    """A text is a list of one block. Blocks of other media are refused by their type."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    for block in value if isinstance(value, list) else ():
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in ("image", "document", "search_result", "container_upload"):
            raise ValueError(f"blocks of type {kind!r} are not supported: the model reads text")
    return _ours(value) if isinstance(value, list) else value


def _ours(blocks: list[Any]) -> list[Any]:
    """Without what another server's own tools did, and marks for them."""
    return without_foreign(blocks, _KINDS, "messages", f"send blocks of type {', '.join(_KINDS)}")


class Base64Source(Nullable):
    type: Literal["base64"]
    media_type: Annotated[str, Field(pattern=r"^image/[a-z0-9.+-]{1,32}$")]
    data: str


class UrlSource(Nullable):
    type: Literal["url"]
    url: str


class Image(_Block):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]

    @property
    def url(self) -> str:
        source = self.source
        return source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"


def _blocks(value: Any) -> Any:
    """As `_texts`, and images may stand beside the texts."""
    if not isinstance(value, list):
        return _texts(value)
    value = [part for block in value for part in _told(block)]
    _texts([block for block in value if not (isinstance(block, dict) and block.get("type") == "image")])
    return _ours(value)


class ToolResult(_Block):
    type: Literal["tool_result"]
    tool_use_id: Id
    content: Annotated[
        list[Annotated[Text | Image, Field(discriminator="type")]],
        BeforeValidator(_blocks, json_schema_input_type=str | list[Text | Image]),
    ] = []
    is_error: bool | None = None


Block = Annotated[Text | Image | Thinking | RedactedThinking | ToolUse | ToolResult, Field(discriminator="type")]


_KINDS = ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result")
BLOCKS_OF: Mapping[str, tuple[str, ...]] = {
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "user": ("text", "image", "tool_result"),
    "system": ("text",),
}


class Message(Nullable):
    conditions = ({"anyOf": [
        {"properties": {"role": {"const": role}, "content": {"anyOf": [
            {"type": "string"}, {"type": "array", "items": {"properties": {"type": {"enum": list(kinds)}}}},
        ]}}}
        for role, kinds in BLOCKS_OF.items()
    ]},)  # fmt: skip

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], BeforeValidator(_blocks, json_schema_input_type=str | list[Block])] = []

    @model_validator(mode="after")
    def _fits_the_role(self) -> Message:
        if wrong := next((block.type for block in self.content if block.type not in BLOCKS_OF[self.role]), None):
            raise ValueError(f"blocks of type {wrong} do not belong to messages of role {self.role}")
        return self


class Tool(_Block):
    absent = {
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "eager_input_streaming": (True, False),  # a call's input is streamed as it comes
        "input_examples": ([],),
    }

    type: Literal["custom"] = "custom"
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


def _client_tools(tools: Any) -> Any:
    if isinstance(tools, list) and len(tools) > MAX_TOOLS:
        raise ValueError(f"at most {MAX_TOOLS} tools")
    if not isinstance(tools, list):
        return tools
    return without_foreign(tools, ("custom",), "tools", "send tools with an input_schema")


class ToolChoice(Nullable):
    conditions = ({"anyOf": [
        given("name", type={"const": "tool"}),
        {"properties": {"type": {"enum": ["auto", "any", "none"]}, "name": NULL}},
    ]},)  # fmt: skip

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_a_tool(self) -> ToolChoice:
        if (self.name is None) == (self.type == "tool"):
            raise ValueError("name goes with type tool, which needs it")
        return self


def _thinking_kind(value: Any) -> Any:
    """A kind that is not known asks for some thinking."""
    is_known = not isinstance(value, str) or value in ("enabled", "disabled", "adaptive")
    return value if is_known or not ignore("thinking.type") else "adaptive"


class ThinkingConfig(Nullable):
    conditions = ({"anyOf": [
        {"properties": {"type": {"const": "enabled"}}},
        {"properties": {"type": {"enum": ["disabled", "adaptive"]}, "budget_tokens": NULL}},
    ]},)  # fmt: skip

    type: Annotated[Literal["enabled", "disabled", "adaptive"], BeforeValidator(_thinking_kind)]
    budget_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _has_its_budget(self) -> ThinkingConfig:
        if self.budget_tokens is not None and self.type != "enabled":
            raise ValueError("budget_tokens goes with type enabled")
        if self.budget_tokens is None and self.type == "enabled" and not ignore("thinking.budget_tokens"):
            raise ValueError("type enabled needs budget_tokens")
        return self


class OutputConfig(Nullable):
    effort: Effort | None = None
    format: dict[str, Any] | None = None


class Metadata(Nullable):
    user_id: Annotated[str, Field(max_length=1024)] | None = None  # only for the server's request log


def _no_thread(value: Any) -> None:
    """Raises RequestError in the form that tells Anthropic's clients to send the whole conversation instead."""
    if value is not None:
        message = "thread is not supported by this server: send the whole conversation"
        details: dict[str, Any] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        raise RequestError("unsupported_parameter", message, "thread", **details)


class Prompt(ChatExtensions):
    """What decides the prompt: the body of /v1/messages/count_tokens."""

    model_config = LAZY
    absent = {
        **neutral.GENERATION,
        "container": (None,),
        # Edits of the conversation. Those that keep everything ask for nothing.
        "context_management": (
            None,
            {},
            {"edits": []},
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        ),
        "diagnostics": (None,),
        "inference_geo": (None,),
        "mcp_servers": (None, []),
        "speed": (None, "standard"),
        "user_profile_id": (None,),
        "workspace_id": (None,),
    }

    model: Annotated[str, Field(max_length=1024)]
    messages: Annotated[
        list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), BeforeValidator(check_parts)
    ]
    system: Annotated[
        list[Text] | None,
        BeforeValidator(_texts, json_schema_input_type=str | list[Text] | None),
        BeforeValidator(check_parts),
    ] = None
    tools: Annotated[list[Tool] | None, BeforeValidator(_client_tools)] = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # the place of output_config.format in a beta
    cache_control: CacheControl | None = None
    thread: Annotated[None, BeforeValidator(_no_thread)] = None


class MessagesRequest(Prompt):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)]
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    metadata: Metadata | None = None
    service_tier: Annotated[str, Field(max_length=64)] | None = None  # there is one tier


# Names of the chat request that this one becomes, in the words of this API.
NAMES: Mapping[str, str] = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
