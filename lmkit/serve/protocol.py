"""The part of OpenAI's wire format that this server supports. Requests are strict: an unknown field is an error.

The `_UNSUPPORTED` tables list OpenAI's fields that this server does not support, each with the values that ask for
nothing. These values are accepted and any other value is refused, so no field is ever ignored.

`prompt_cache_key` asks that requests with the same key use the same cache. A server has one cache, so this holds for
every key, and any key is accepted. As with OpenAI, it does not separate caches; `cache_salt` does.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from lmkit.errors import RequestError
from lmkit.turbo.request import MAX_LOGIT_BIAS, MAX_STOPS

MAX_MESSAGES = 4096
MAX_PROMPTS = 256
MAX_CHOICES = 128  # n
MAX_SEQUENCES = 1024  # prompts times n (or best_of)
MAX_PRIORITY = 1000
MAX_TIMEOUT = 86400.0  # seconds

_NOTHING = (None,)
_UNSUPPORTED_CHAT: dict[str, tuple[Any, ...]] = {
    "audio": _NOTHING,
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "moderation": _NOTHING,
    "parallel_tool_calls": (None, True, False),
    "prediction": _NOTHING,
    "prompt_cache_options": _NOTHING,
    "prompt_cache_retention": _NOTHING,
    "reasoning_effort": _NOTHING,
    "response_format": (None, {"type": "text"}),
    "safety_identifier": _NOTHING,
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None, "medium"),
    "web_search_options": _NOTHING,
}
_UNSUPPORTED_COMPLETION: dict[str, tuple[Any, ...]] = {"suffix": _NOTHING}
# Fields that clients send back with an assistant's message.
_UNSUPPORTED_MESSAGE: dict[str, tuple[Any, ...]] = {
    "annotations": (None, []),
    "audio": _NOTHING,
    "function_call": _NOTHING,
    "refusal": _NOTHING,
    "tool_calls": (None, []),
    "tool_call_id": _NOTHING,
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        """Refuse the first unknown field.

        This runs before pydantic, which would report each of a million unknown fields.
        """
        unknown = (
            next((name for name in data if name not in cls.model_fields), None) if isinstance(data, dict) else None
        )
        if unknown is not None:
            name = unknown[:64]
            raise RequestError("unknown_parameter", f"unknown parameter {name!r}", name)
        return data


def _drop_unsupported(data: dict[str, Any], table: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """`data` without the fields of `table`. Raises RequestError if one of them asks for something."""
    for name in data.keys() & table.keys():
        if not any(type(data[name]) is type(value) and data[name] == value for value in table[name]):
            raise RequestError("unsupported_parameter", f"{name} is not supported by this server", name)
    return {name: value for name, value in data.items() if name not in table}


def _known_message_fields(data: Any) -> Any:
    return _drop_unsupported(data, _UNSUPPORTED_MESSAGE) if isinstance(data, dict) else data


def _joined_parts(content: Any) -> Any:
    """A list of text parts as one text with a line for each part. Parts of other types are refused."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if not (isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text"):
            raise ValueError('only parts {"type": "text", "text": ...} are supported')
        if not isinstance(part["text"], str):
            raise ValueError("a part's text must be a string")
        texts.append(part["text"])
    return "\n".join(texts)


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_joined_parts)]
    name: Annotated[str, Field(max_length=256)] | None = None  # passed to the chat template


Messages = Annotated[
    list[Annotated[ChatMessage, BeforeValidator(_known_message_fields)]],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
]


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None  # OpenAI's padding of chunks; only "off" is possible


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"expected an object of at most {MAX_LOGIT_BIAS} token ids")
    if not all(re.fullmatch(r"[0-9]{1,10}", key) and type(bias) in (int, float) for key, bias in value.items()):
        raise ValueError("expected token ids with numbers")
    return {int(key): float(bias) for key, bias in value.items()}


def _template_variables(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > 32:
        raise ValueError("expected an object of at most 32 variables")
    if not all(item is None or isinstance(item, bool | int | float | str) for item in value.values()):
        raise ValueError("a variable must be a string, a number, a boolean or null")
    return value


class _Sampling(_Strict):
    """Fields of chat and text completions. None means the default. SamplingParams.validate checks the ranges."""

    model: Annotated[str, Field(max_length=1024)]
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    temperature: float | None = None  # default 1; 0 = greedy
    top_p: float | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None  # choice i gets seed + i
    stop: Annotated[list[str], Field(max_length=MAX_STOPS), BeforeValidator(_listed)] | None = None  # or one string
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], PlainValidator(_biases)] | None = None  # JSON has the ids as strings
    user: Annotated[str, Field(max_length=1024)] | None = None  # only for the server's request log
    # not OpenAI's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=1024)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None  # lower is sooner; default 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None  # requests with one salt share KV
    session_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None  # its KV and tokens stay for a lease
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT)] | None = None  # seconds; then 504


class ChatCompletionRequest(_Sampling):
    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None  # any value is accepted, see above
    # not OpenAI's
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], PlainValidator(_template_variables)] | None = None


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """text | texts | token ids | lists of token ids -> texts, or lists of token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [value]
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"at most {MAX_PROMPTS} prompts")
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) and all(type(token) is int for token in item) for item in value):
            return value
    raise ValueError("expected text, a list of texts, a list of token ids, or a list of lists of token ids")


class CompletionRequest(_Sampling):
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None  # 0 with `echo`: score the prompt
    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_prompts)]
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None  # number generated; the best n are returned
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class TokenizeRequest(_Strict):
    """Either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True  # of a prompt; a chat template writes its own
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(_Strict):
    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]
    skip_special_tokens: bool = False


_UNSUPPORTED: dict[type[BaseModel], dict[str, tuple[Any, ...]]] = {
    ChatCompletionRequest: _UNSUPPORTED_CHAT,
    CompletionRequest: _UNSUPPORTED_COMPLETION,
}
M = TypeVar("M", bound=BaseModel)


def validate(data: Any, model: type[M]) -> M:
    """Plain JSON data as a request. Raises RequestError naming the first field at fault."""
    if not isinstance(data, dict):
        raise RequestError("invalid_request", "the body must be a JSON object")
    try:
        return model.model_validate(_drop_unsupported(data, _UNSUPPORTED.get(model, {})))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:64]}" for part in first["loc"]).lstrip(".")
        message = f"{where}: {first['msg'].removeprefix('Value error, ')}"
        raise RequestError("invalid_request", message, str(first["loc"][0]) if first["loc"] else None) from None


# ---- responses


class PromptTokensDetails(BaseModel):
    cached_tokens: int  # prompt tokens whose KV was reused


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]
    refusal: None = None


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None  # the stop string or stop token id; not OpenAI's


class ChatChunkChoice(BaseModel):
    index: int
    delta: dict[str, str]  # role with the first chunk of a choice, then content
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class _Response(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(_Response):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class ChatCompletionChunk(_Response):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Completion(_Response):
    """A whole text completion, or one chunk of a stream; both have the same form."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "lmkit"
    max_model_len: int | None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
