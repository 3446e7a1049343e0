"""The part of OpenAI's Responses API that this server supports. What it lacks is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from lmkit import neutral
from lmkit.hints import ignore, without_foreign
from lmkit.serve.numbers import Temperature, TopP
from lmkit.serve.protocol import ChatExtensions, Metadata, ModelName, never_cut
from lmkit.serve.responses.tool_protocol import AllowedTools, AnyTool, NamedTool, client_tools
from lmkit.serve.serving import new_id
from lmkit.strict import LAZY, NULL, No, Nullable, Schema, Strict, given, goes_with
from lmkit.text.chat.conversation import (
    MAX_MESSAGES,
    CalledName,
    Effort,
    arguments_text,
    check_parts,
    word,
)
from lmkit.text.messages import DETAILS, said

Status = Literal["in_progress", "completed", "incomplete"]
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
ItemId = Annotated[str, Field(max_length=256)]


class TextPart(Nullable):
    absent = {
        "annotations": ([],),
        "logprobs": ([],),
        "parsed": (None,),
        "prompt_cache_breakpoint": ({"mode": "explicit"},),  # every prefix is cached
    }

    type: Literal[*TEXTS]  # type: ignore[valid-type]
    text: str


class ImagePart(Nullable):
    absent = {"prompt_cache_breakpoint": ({"mode": "explicit"},)}

    type: Literal["input_image"]
    image_url: str
    detail: Literal[*DETAILS] = "auto"  # type: ignore[valid-type]


def _parts(value: Any) -> Any:
    """A text is a list of one part, a refusal a text. Parts that are no text are refused by their type."""
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    value = list(map(said, value)) if isinstance(value, list) else value
    for part in value if isinstance(value, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in TEXTS:
            raise ValueError(f"parts of type {kind[:64]!r} are not supported: the model reads text")
    return value


def _parts_and_images(value: Any) -> Any:
    """As `_parts`, and images may stand beside the texts."""
    if not isinstance(value, list):
        return _parts(value)
    value = list(map(said, value))
    _parts([part for part in value if not (isinstance(part, dict) and part.get("type") == "input_image")])
    return value


Parts = Annotated[list[TextPart], BeforeValidator(_parts, json_schema_input_type=str | list[TextPart])]
Content = Annotated[TextPart | ImagePart, Field(discriminator="type")]


def _outputs(value: Any) -> Any:
    """As `_parts_and_images`. A client's object is its JSON."""
    return _parts_and_images(json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value)


Contents = Annotated[list[Content], BeforeValidator(_parts_and_images, json_schema_input_type=str | list[Content])]

Outputs = Annotated[list[Content], BeforeValidator(_outputs, json_schema_input_type=str | list[Content])]


class Message(Nullable):
    absent = {"phase": ("commentary", "final_answer")}  # of an answer: templates do not tell them apart
    conditions = ({"anyOf": [  # images belong to the user
        {"properties": {"role": {"const": "user"}}},
        {"properties": {"content": {"items": {"not": {"properties": {"type": {"const": "input_image"}}}}}}},
    ]},)  # fmt: skip

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Contents = []
    id: ItemId | None = None
    status: Status | None = None

    @model_validator(mode="after")
    def _images_of_the_user(self) -> Self:
        if self.role != "user" and any(isinstance(part, ImagePart) for part in self.content):
            raise ValueError("images belong to messages of the user")
        return self


class FunctionCall(Nullable):
    absent = {"caller": ({"type": "direct"},), "async": (False,)}

    type: Literal["function_call"]
    call_id: ItemId
    name: CalledName
    namespace: CalledName | None = None  # of the tool, see tools.presented
    arguments: Annotated[str, BeforeValidator(arguments_text, json_schema_input_type=str | dict[str, Any])] = "{}"
    id: ItemId | None = None
    status: Status | None = None


class FunctionCallOutput(Nullable):
    absent = {"caller": ({"type": "direct"},)}

    type: Literal["function_call_output"]
    call_id: ItemId
    output: Outputs = []
    name: str | None = None
    id: ItemId | None = None
    status: Status | None = None


class CustomCall(Nullable):
    absent = FunctionCall.absent

    type: Literal["custom_tool_call"]
    call_id: ItemId
    name: CalledName
    input: str = ""
    id: ItemId | None = None
    status: Status | None = None


class CustomCallOutput(Nullable):
    absent = FunctionCallOutput.absent

    type: Literal["custom_tool_call_output"]
    call_id: ItemId
    output: Outputs = []
    id: ItemId | None = None
    status: Status | None = None


class ReasoningItem(Nullable):
    type: Literal["reasoning"]
    summary: Parts = []
    content: Parts = []
    encrypted_content: str | None = None
    id: ItemId | None = None
    status: Status | None = None


class ItemReference(Nullable):
    """An item of a stored response, see routes.resolved."""

    type: Literal["item_reference"]
    id: ItemId


Item = Annotated[
    Message | FunctionCall | FunctionCallOutput | CustomCall | CustomCallOutput | ReasoningItem | ItemReference,
    Field(discriminator="type"),
]


_INPUT_IDS = {
    "message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_", "reasoning": "rs_", "item_reference": "",
}  # fmt: skip


def with_id(item: Item) -> dict[str, Any]:
    """An item of the input, as it is stored and listed."""
    fields = item.model_dump(mode="json", exclude_none=True)
    return {"id": new_id(_INPUT_IDS[item.type]), "status": "completed"} | fields


def _item_list(value: Any) -> Any:
    """One text is a message of the user, and an item without a type is a message."""
    check_parts(value)
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    items = [{"type": _kind(item), **item} if isinstance(item, dict) else item for item in value]
    return without_foreign(items, _INPUT_IDS, "input", f"send items of type {', '.join(_INPUT_IDS)}")


def _kind(item: dict[str, Any]) -> str:
    """Of an item that does not say it."""
    return "item_reference" if "id" in item and "role" not in item else "message"


Items = Annotated[
    list[Item],
    Field(max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(_item_list, json_schema_input_type=str | list[Item]),
]


class Text(Nullable):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


Summary = Annotated[Annotated[str, Field(max_length=64)] | None, word("reasoning.summary", 64)]


def _context(value: Any) -> Any:
    """Which earlier reasoning is read: the template decides."""
    return value if value in (None, "auto") or not ignore("reasoning.context") else None


class Reasoning(Nullable):
    absent = {"mode": ("standard",)}

    effort: Effort | None = None
    # There is no summary beside the reasoning itself.
    summary: Summary = None
    generate_summary: Summary = None
    context: Annotated[Literal["auto"] | None, BeforeValidator(_context)] = None


class StreamOptions(Nullable):
    include_obfuscation: No | None = None  # OpenAI's padding of events; only "off" is possible


class ConversationName(Strict):
    id: ItemId


def _conversation(value: Any) -> Any:
    is_named = isinstance(value, dict) and value.keys() == {"id"} and value["id"] is not None
    return value["id"] if is_named else value


class Prompt(ChatExtensions):
    """What decides the prompt: the body of /v1/responses/input_tokens."""

    model_config = LAZY
    conditions: ClassVar[tuple[Schema, ...]] = (
        goes_with("conversation", {"properties": {"previous_response_id": NULL}}),
    )
    absent = {
        **neutral.GENERATION,
        "background": (None, False),
        "context_management": (None, []),
        "personality": (None,),
        "previous_input_messages": (None, []),
        "prompt": (None,),
    }

    model: ModelName | None = None  # None: the only one
    input: Items
    instructions: str | None = None
    previous_response_id: ItemId | None = None
    conversation: Annotated[
        ItemId | None, BeforeValidator(_conversation, json_schema_input_type=ItemId | ConversationName | None)
    ] = None
    tools: Annotated[list[AnyTool] | None, BeforeValidator(client_tools)] = None
    tool_choice: (
        Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, Field(discriminator="type")] | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    truncation: Annotated[Literal["disabled", "auto"], AfterValidator(never_cut)] | None = None


# What an answer may show beside its items. The first two are honoured; the others belong to tools that run in the
# server, of which there are none.
Includable = Literal[
    "reasoning.encrypted_content", "message.output_text.logprobs", "file_search_call.results",
    "web_search_call.results", "web_search_call.action.sources", "message.input_image.image_url",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs",
]  # fmt: skip


def _includable(value: Any) -> Any:
    """Without what a later version of the API may show."""
    if not isinstance(value, list):
        return value
    known = get_args(Includable)
    return [name for name in value if name in known or not isinstance(name, str) or not ignore(f"include.{name}")]


class ResponsesRequest(Prompt):
    """The body of POST /v1/responses."""

    conditions = (
        *Prompt.conditions,
        *(
            goes_with(name, given("stream", stream={"const": True}), (None, False))
            for name in ("timings_per_token", "return_progress", "stream_options")
        ),
    )

    store: bool | None = None  # None: as if true
    background: bool | None = None  # the response is made while no client waits
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = (
        None  # of tools that run in the server, of which there are none
    )
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: Annotated[list[Includable], Field(max_length=64), BeforeValidator(_includable)] | None = None
    metadata: Metadata | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None  # as in chat: any value is accepted
    user: Annotated[str, Field(max_length=1024)] | None = None  # only for the server's request log
    safety_identifier: Annotated[str, Field(max_length=1024)] | None = None  # OpenAI's newer name for it
    # llama.cpp's, in a stream
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    enable_response_messages: bool | None = None  # vLLM's: the answer has the prompt and the model's text as they are


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() else value


class RetrieveQuery(Nullable):
    """Of GET /v1/responses/{id}. Everything is shown in any case; only background responses can be streamed again."""

    absent = {"stream": ("false",), "include_obfuscation": ("false",), "starting_after": ()}

    include: list[Includable] | None = None


class ListQuery(Nullable):
    after: ItemId | None = None
    limit: Annotated[int, Field(ge=1, le=100), BeforeValidator(_number)] = 20
    order: Literal["asc", "desc"] = "desc"
    include: list[Includable] | None = None


# Names of the chat request that this one becomes, in the words of this API.
NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
