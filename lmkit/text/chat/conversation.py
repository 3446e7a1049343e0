"""The messages and tools of a chat."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)

from lmkit import neutral
from lmkit.hints import ignore, without_foreign
from lmkit.strict import OF_MODEL, Nullable, Schema, Strict
from lmkit.text.chat import given
from lmkit.text.messages import (
    MAX_NAME_CHARS,
    ImagePart,
    Role,
    has_images,
    joined_parts,
    message_parts,
)

MAX_MESSAGES = 4096
MAX_CALLS = 256  # of one message
MAX_TOOLS = 1024
MAX_PARTS = 8192  # items and their parts, where an API has them


def check_parts(items: Any) -> Any:
    """Raise ValueError if items have too many parts, before a model looks at each for microseconds."""
    number, lists = 0, [items]
    while lists:
        found = lists.pop()
        for item in found if isinstance(found, list) else ():
            number += 1
            if isinstance(item, dict):
                lists += [item.get(name) for name in ("content", "output", "summary")]
        if number > MAX_PARTS:
            raise ValueError(f"at most {MAX_PARTS} items and parts in all")
    return items


def _message_list(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def arguments_text(value: Any) -> Any:
    """Arguments of a call as a JSON text. Clients that keep them as an object send that."""
    if value is None:
        return "{}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


THOUGHT_PARTS = ("thinking", "reasoning", "redacted_thinking")  # of the assistant's content


def _with_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """A message of the assistant whose reasoning is not among the parts of its content."""
    content = message.get("content")
    if not isinstance(content, list) or not any(_is_thought(part) for part in content):
        return message
    told = "".join(_thought(part) for part in content if _is_thought(part))
    kept = {"content": [part for part in content if not _is_thought(part)]}
    if message.get("reasoning") or message.get("reasoning_content") or not told:
        return message | kept if ignore("content.thinking") else message
    return message | kept | {"reasoning_content": told}


def _is_thought(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in THOUGHT_PARTS


def _thought(part: dict[str, Any]) -> str:
    """The text of a part with reasoning. Mistral's has a list of parts for it; an encrypted one has none."""
    told = next((part[name] for name in ("thinking", "reasoning", "text") if part.get(name) is not None), "")
    items = told if isinstance(told, list) else [told]
    texts = [item.get("text") if isinstance(item, dict) else item for item in items]
    return "".join(text for text in texts if isinstance(text, str))


def _reasoning(value: Any) -> Any:
    """The text of reasoning that a client keeps as an object, or as a list of parts."""
    if isinstance(value, dict):
        value = [{"text": value.get("text", value.get("content"))}]
    return _thought({"text": value}) if isinstance(value, list) else value


Reasoning = Annotated[str | None, BeforeValidator(_reasoning, json_schema_input_type=str | None)]


CalledName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class CalledFunction(Strict):
    name: CalledName
    arguments: Annotated[str, BeforeValidator(arguments_text, json_schema_input_type=str | dict[str, Any])] = "{}"


class ToolCall(Nullable):
    id: Annotated[str, Field(max_length=MAX_NAME_CHARS)] = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # in a stream's delta; clients send it back


class ChatMessage(Strict):
    absent = neutral.MESSAGE
    conditions: ClassVar[tuple[Schema, ...]] = (given.MESSAGE,)

    role: Role | Literal["tool"]
    content: Annotated[str | None, BeforeValidator(joined_parts), WithJsonSchema(given.CONTENT)] = None
    name: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None  # passed to the chat template
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None  # of the call that a tool answers
    reasoning: Reasoning = None
    reasoning_content: Reasoning = None  # another name for it
    _parts: tuple[str | ImagePart, ...] = PrivateAttr(default=())

    @model_validator(mode="wrap")
    @classmethod
    def _keep_images(cls, data: Any, handler: ModelWrapValidatorHandler[ChatMessage]) -> ChatMessage:
        """`content` is the text alone."""
        message = handler(data)
        if isinstance(data, dict) and has_images(data.get("content")):
            if message.role not in ("user", "tool"):
                raise ValueError("images belong to messages of the user, and to results of tools")
            message._parts = tuple(message_parts(data["content"]))
        return message

    @model_validator(mode="before")
    @classmethod
    def _of_the_role(cls, data: Any) -> Any:
        """Without notes that another role's messages have, and with a refusal as the text that it was."""
        if not isinstance(data, dict):
            return data
        data = _with_thoughts(data) if data.get("role") == "assistant" else data
        role, given = data.get("role"), {name for name, value in data.items() if value not in (None, "", [])}
        for name in given & {"reasoning", "reasoning_content", "tool_call_id"}:
            if role != ("tool" if name == "tool_call_id" else "assistant") and ignore(name):
                data = {other: value for other, value in data.items() if other != name}
        if role == "assistant" and "content" not in given and isinstance(data.get("refusal"), str):
            data = data | {"content": data["refusal"], "refusal": None}
        return data

    @model_validator(mode="after")
    def _fits_the_role(self) -> ChatMessage:
        if self.role != "assistant" and (self.tool_calls or self.thoughts):
            raise ValueError("tool_calls and reasoning belong to the assistant's messages")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError("tool_call_id belongs to messages of role tool")
        return self

    @property
    def parts(self) -> tuple[str | ImagePart, ...]:
        """Texts and images of a message with images."""
        return self._parts

    @property
    def thoughts(self) -> str:
        return self.reasoning or self.reasoning_content or ""

    @property
    def num_chars(self) -> int:
        calls = sum(len(call.function.arguments) for call in self.tool_calls or ())
        calls += sum(len(part.source) for part in self.parts if isinstance(part, ImagePart) and _is_text(part.source))
        return len(self.content or "") + len(self.thoughts) + calls


def _is_text(source: Any) -> bool:
    return isinstance(source, str)


GivenMessages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
Messages = Annotated[
    list[ChatMessage],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(
        _message_list, json_schema_input_type=str | GivenMessages
    ),  # one text is one message of the user, as in LMDeploy's API
]


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


def _schema(value: Any) -> Any:
    """PHP writes an object without fields as a list."""
    return {} if value == [] else value


class Function(Nullable):
    name: ToolName
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, BeforeValidator(_schema)] = None  # a JSON schema
    strict: bool | None = None  # a schema that cannot be held is refused


class Tool(Strict):
    type: Literal["function"]
    function: Function


class _Name(Strict):
    name: Annotated[str, Field(max_length=MAX_NAME_CHARS)]


class NamedFunction(Strict):
    type: Literal["function"]
    function: _Name


class _Allowed(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Strict):
    type: Literal["allowed_tools"]
    allowed_tools: _Allowed


def _choice(value: Any) -> Any:
    """Mistral's word for `required` as OpenAI's."""
    return "required" if value == "any" else value


def _functions(value: Any) -> Any:
    """Tools without those that another server would run by itself. Raises ValueError where they are no hints."""
    own = ("function", "custom")
    return without_foreign(value, own, "tools", "send functions") if isinstance(value, list) else value


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | Annotated[NamedFunction | AllowedTools, Field(discriminator="type")],
    BeforeValidator(_choice),
]


def _template_variables(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > 32:
        raise ValueError("expected an object of at most 32 variables")
    if not all(item is None or isinstance(item, bool | int | float | str) for item in value.values()):
        raise ValueError("a variable must be a string, a number, a boolean or null")
    return value


_VARIABLES: Schema = {"type": "object", "additionalProperties": {"type": ["boolean", "number", "string", "null"]}}
TemplateVariables = Annotated[
    dict[str, Any], PlainValidator(_template_variables), WithJsonSchema(_VARIABLES | {OF_MODEL: "variables"})
]


class ToolOptions(Strict):
    """The tools of a chat, and how an answer may call them. None means the default."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), BeforeValidator(_functions)] | None = None
    tool_choice: ToolChoice | None = None  # default auto
    parallel_tool_calls: bool | None = None  # default true, and false for a function by name


MAX_EFFORT = 16  # characters


def word(name: str, most: int) -> BeforeValidator:
    """Leaves out what is no text of at most so many characters: a hint of this name, which nothing here knows."""

    def known(value: Any) -> Any:
        is_word = value is None or (isinstance(value, str) and len(value) <= most)
        return value if is_word or not ignore(name) else None

    return BeforeValidator(known, json_schema_input_type=str | None)


# a variable of the chat template; see EFFORTS
Effort = Annotated[Annotated[str, Field(max_length=MAX_EFFORT)] | None, word("reasoning_effort", MAX_EFFORT)]
_GROQ = {"parsed": "auto", "raw": "none"}


class Chat(ToolOptions):
    """A conversation, and what its answer may have. None means the default."""

    messages: Messages
    reasoning_effort: Effort | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # medium = the model's own way
    thinking_token_budget: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None  # vLLM's: tokens of reasoning
    include_reasoning: bool | None = None  # false: the answer leaves the reasoning out
    separate_reasoning: bool | None = None  # SGLang's; false: it stays in the content, with its marks
    # llama.cpp's; "none": the same. Groq's words are others
    reasoning_format: (
        Annotated[Literal["none", "auto", "deepseek"], BeforeValidator(lambda value: _GROQ.get(value, value))] | None
    ) = None
    # not OpenAI's
    add_generation_prompt: bool | None = None  # default true
    continue_final_message: bool | None = None  # vLLM's: the answer goes on with the last message

    @property
    def images(self) -> list[ImagePart]:
        """The images of all messages, in order."""
        return [part for message in self.messages for part in message.parts if isinstance(part, ImagePart)]
