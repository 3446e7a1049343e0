"""The part of OpenAI's wire format that this server supports. Requests are strict: an unknown field is an error.

`lmkit.neutral` lists the fields of other servers that this one does not have, with the values that ask for nothing.

`prompt_cache_key` asks that requests with the same key use the same cache. A server has one cache, so this holds for
every key, and any key is accepted. As with OpenAI, it does not separate caches; `cache_salt` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    WithJsonSchema,
    model_validator,
)

from lmkit import neutral
from lmkit.config import MAX_TIMEOUT
from lmkit.errors import RequestError
from lmkit.hints import ignore
from lmkit.serve.numbers import Biases, Penalty, Repetition, Share, Temperature, TokenId, TopK, TopP
from lmkit.strict import NEVER, NULL, OF_MODEL, No, Schema, Strict, Yes, exactly_one, given, goes_with
from lmkit.text.chat.conversation import MAX_TOOLS, Chat, Messages, TemplateVariables, Tool
from lmkit.turbo.repetition import COUNT, MAX_COUNT, MAX_NGRAM
from lmkit.turbo.request import MAX_LOGPROBS, MAX_STOPS

MAX_PROMPTS = 256
MAX_CHOICES = 128  # n
MAX_SEQUENCES = 1024  # prompts times n (or best_of)
MAX_PRIORITY = 1000
MAX_SHOWN = 128  # logprob_token_ids
_TOP: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS, OF_MODEL: "logprobs"}
NumTop = Annotated[int, Field(ge=-1, lt=1 << 31), WithJsonSchema(_TOP)]  # -1 = all; the server has a limit


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's, with include_usage: every chunk has the usage so far
    include_obfuscation: No | None = None  # OpenAI's padding of chunks; only "off" is possible


def _not_zero(value: int | None) -> int | None:
    if value == 0:
        raise ValueError("expected a number of tokens, or -1 for the model's context")
    return value


# vLLM's: a longer prompt is cut to so many tokens; -1 = to what the model's context holds
_CUT: Schema = {"type": "integer", "minimum": -1, "maximum": (1 << 31) - 1, "not": {"const": 0}, OF_MODEL: "cut"}
CutTo = Annotated[int, Field(ge=-1, lt=1 << 31), AfterValidator(_not_zero), WithJsonSchema(_CUT)]
ModelName = Annotated[str, Field(max_length=1024)]


def switch(value: Any) -> Any:
    """A boolean that a client writes as a text, as LMDeploy's take it."""
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


MAX_METADATA = 16
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=MAX_METADATA)
]
NewTokens = Annotated[int, Field(ge=-1, lt=1 << 31)]  # -1 = until the context is full


class Placed(Strict):
    """Fields that say how a request stands among others. None means the default."""

    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None  # lower is sooner; default 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None  # requests with one salt share KV
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT)] | None = None  # seconds; then 504


def _text(value: Any) -> Any:
    return str(value) if type(value) is int and value >= 0 else value


SessionId = Annotated[  # LMDeploy's are numbers
    str, Field(min_length=1, max_length=256), BeforeValidator(_text, json_schema_input_type=str | int)
]


class RepetitionRule(Strict):
    """See lmkit.turbo.repetition."""

    ngram: Annotated[int, Field(ge=0, le=MAX_NGRAM)]  # tokens; 0 = never
    count: Annotated[int, Field(ge=2, le=MAX_COUNT)] = COUNT


class Extensions(Placed):
    """Fields of every route that generates, also where its own API lacks them. None means the default."""

    aliases = {"min_new_tokens": "min_tokens", "repeat_penalty": "repetition_penalty"}

    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None  # choice i gets seed + i
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    repetition_penalty: Repetition | None = None
    repetition_stop: RepetitionRule | None = None  # ends an answer that goes round in circles
    repetition_ngram_size: Annotated[int, Field(ge=0, le=MAX_NGRAM)] | None = None  # LMDeploy's names for its two
    repetition_ngram_threshold: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    session_id: SessionId | None = None  # its KV and tokens stay for a lease
    speculate: bool | None = None  # false: no drafts of this answer's tokens, where the server drafts


def never_cut(value: str) -> str:
    """OpenAI's `truncation`: "auto" would leave out items of a conversation that is too long. Raises ValueError."""
    if value == "auto" and not ignore("truncation"):
        raise ValueError("auto is not supported: a conversation that is too long is refused")
    return value


class ChatExtensions(Extensions):
    """Fields of every route with messages."""

    chat_template_kwargs: TemplateVariables | None = None
    enable_thinking: bool | None = None  # the template's variable of that name, if it has one


class _Sampling(Extensions):
    """Fields of chat and text completions. None means the default. SamplingParams.validate checks the ranges."""

    model: ModelName | None = None  # None: the only one
    max_tokens: NewTokens | None = None
    max_completion_tokens: NewTokens | None = None  # another name for max_tokens
    n_predict: NewTokens | None = None  # llama.cpp's name for it
    temperature: Temperature | None = None  # default 1; 0 = greedy
    top_p: TopP | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: (
        Annotated[
            list[str],
            Field(max_length=MAX_STOPS),
            BeforeValidator(_listed, json_schema_input_type=Annotated[list[str], Field(max_length=MAX_STOPS)] | str),
        ]
        | None
    ) = None
    stream: Annotated[bool, BeforeValidator(switch, json_schema_input_type=bool)] | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None  # only for the server's request log
    safety_identifier: Annotated[str, Field(max_length=1024)] | None = None  # OpenAI's newer name for it
    return_token_ids: bool | None = None  # vLLM's: the answer has the ids of the prompt and of each choice
    prompt_logprobs: NumTop | None = None  # vLLM's; not in a stream
    # vLLM's, with logprobs: these tokens and the chosen one are shown instead of the most likely ones
    logprob_token_ids: Annotated[list[TokenId], Field(max_length=MAX_SHOWN)] | None = None
    truncate_prompt_tokens: CutTo | None = None
    truncation_side: Literal["left", "right"] | None = None  # of the prompt, where it is cut; default left
    return_tokens_as_token_ids: bool | None = None  # vLLM's: the tokens of logprobs are shown as "token_id:5"
    timings_per_token: bool | None = None  # llama.cpp's: the answer and each chunk with text have `timings`
    return_progress: bool | None = None  # llama.cpp's, in a stream: chunks with `prompt_progress` before the answer
    # the answer follows a schema, a pattern or a grammar, see serve.constraint: OpenAI's field, then others' names
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_json_object: Yes | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    # vLLM's: texts that the answer has not
    bad_words: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=1024)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(max_length=32768)] | None = None  # vLLM's: no other tokens


_ON: Schema = {"const": True}
_OFF: Schema = {"enum": [None, False]}
# There is a text to go on with. It may still be one of which the template shows nothing.
_CONTINUED = goes_with("continue_final_message", {"properties": {"messages": {"minLength": 1}}}, (None, False))
# One alternative for each way to answer: testers multiply the alternatives of all conditions.
_STREAMED_OR_WHOLE: Schema = {"anyOf": [
    given("stream", stream=_ON, prompt_logprobs=NULL),
    {"properties": {"stream": _OFF, "return_progress": _OFF, "stream_options": NULL}},
]}  # fmt: skip


_SWITCH = {"disabled": False, "enabled": True, "adaptive": True, "auto": True}
_BUDGET: tuple[str, dict[Any, Any]] = ("thinking_token_budget", {})
# OpenRouter's and Anthropic's ways to ask for reasoning, which agents send in chats: ours, and ours of their values.
_THOUGHTS: Mapping[str, Mapping[str, tuple[str, dict[Any, Any]]]] = {
    "reasoning": {
        "effort": ("reasoning_effort", {}),
        "max_tokens": _BUDGET,
        "enabled": ("enable_thinking", {}),
        "exclude": ("include_reasoning", {True: False, False: True}),
    },
    "thinking": {"type": ("enable_thinking", _SWITCH), "budget_tokens": _BUDGET},
}


def _own_thoughts(data: dict[str, Any]) -> dict[str, Any]:
    """A body with our fields for those of _THOUGHTS. Raises RequestError if it has both, and they differ."""
    for name in [name for name in _THOUGHTS if isinstance(data.get(name), dict)]:
        asked, data = data[name], {other: value for other, value in data.items() if other != name}
        for key, value in asked.items():
            own, values = _THOUGHTS[name].get(key, ("", {}))
            if own and value is not None:
                value = values.get(value, value) if isinstance(value, str | bool) else value
                if data.get(own) not in (None, value):
                    message = f"{name}.{key} differs from {own}; send one"
                    raise RequestError("invalid_request", message, name)
                data[own] = value
            elif not own and not ignore(f"{name}.{key}"):
                raise RequestError("unknown_parameter", f"{name}: unknown field {key[:64]!r}", name)
    return data


class ChatCompletionRequest(_Sampling, ChatExtensions, Chat):
    absent = {**neutral.GENERATION, **neutral.CHAT}
    conditions = (
        _STREAMED_OR_WHOLE,
        {"anyOf": [
            given("continue_final_message", continue_final_message=_ON, add_generation_prompt=_OFF),
            {"properties": {"continue_final_message": _OFF, "echo": _OFF}},
        ]},
        {"anyOf": [
            given("logprobs", logprobs=_ON),
            {"properties": {"top_logprobs": {"enum": [None, 0]}, "logprob_token_ids": {"enum": [None, []]}}},
        ]},
        _CONTINUED,
        goes_with("tool_choice", given("tools", tools={"minItems": 1}), (None, "none", "auto")),
    )  # fmt: skip

    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    truncation_side: Literal["left"] | None = None  # at its right is where the answer begins
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None  # any value is accepted, see above
    store: bool | None = None
    metadata: Metadata | None = None  # labels of a stored answer
    echo: bool | None = None  # vLLM's, with continue_final_message: the answer begins with the text of that message

    @model_validator(mode="before")
    @classmethod
    def _in_our_words(cls, data: Any) -> Any:
        return _own_thoughts(data) if isinstance(data, dict) else data

    @property
    def num_chars(self) -> int:
        """About the length of the prompt."""
        tools = sum(len(str(tool.function.parameters)) for tool in self.tools or ())
        return tools + sum(message.num_chars for message in self.messages)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def prompts(value: Any, most: int = MAX_PROMPTS, are_tokens: Callable[[Any], bool] = _are_ids) -> list[Any]:
    """text | token ids | a list of texts and lists of token ids -> this list. `are_tokens` knows one of its lists."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if are_tokens(value):
            return [value]
        if len(value) > most:
            raise ValueError(f"at most {most} prompts")
        if all(isinstance(item, str) or are_tokens(item) for item in value):
            return value
    raise ValueError("expected text, a list of texts, a list of token ids, or a list of lists of token ids")


_SOME = Field(min_length=1)
GivenText = Annotated[str, WithJsonSchema({"type": "string", OF_MODEL: "text"})]  # one with tokens
GivenTokens = Annotated[list[TokenId], _SOME]
GivenPrompts: TypeAlias = GivenText | Annotated[list[GivenText | GivenTokens], _SOME] | GivenTokens


class CompletionRequest(_Sampling):
    absent = {**neutral.GENERATION, **neutral.COMPLETION}
    conditions = (
        _STREAMED_OR_WHOLE,
        goes_with("logprob_token_ids", given("logprobs", prompt_logprobs=NULL, echo=_OFF), (None, [])),
    )

    prompt: Annotated[list[str | list[int]], BeforeValidator(prompts, json_schema_input_type=GivenPrompts)]
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None  # number generated; the best n are returned
    echo: bool | None = None
    logprobs: NumTop | None = None
    suffix: str | None = None  # the text after the answer; the model must have tokens for filling in
    # not OpenAI's
    add_special_tokens: bool | None = None  # vLLM's, of prompts that are texts; default true
    prompt_start_ids: list[int] | None = None  # token ids with which each prompt begins; its text follows
    logprob_start_len: Annotated[int, Field(ge=0)] | None = None  # SGLang's: prompt_logprobs begin after this token
    # texts that may follow the prompt: nothing is generated, and each is an answer with its own log-probabilities
    endings: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)] | None = None


class TemplateRequest(Strict):
    """llama.cpp's: a conversation that the chat template is to write."""

    absent = {**neutral.GENERATION, "chat_template": (None,)}
    conditions: ClassVar[tuple[Schema, ...]] = (given("messages"), _CONTINUED)

    model: str | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None  # default true
    continue_final_message: bool = False
    chat_template_kwargs: TemplateVariables | None = None

    @property
    def num_chars(self) -> int:
        tools = sum(len(str(tool.function.parameters)) for tool in self.tools or ())
        return tools + sum(message.num_chars for message in self.messages or ())


class TokenizeRequest(TemplateRequest):
    """vLLM's with a prompt or messages, llama.cpp's with content."""

    absent = {**TemplateRequest.absent, "parse_special": (None, True)}
    conditions = (
        exactly_one("prompt", "content", "messages"),
        *(goes_with(name, given("messages"), (None, [])) for name in ("tools",)),
        # each switch, whatever it says, goes with its own text
        {"anyOf": [given("content", add_special_tokens=NEVER), given("prompt", add_special=NEVER),
                   given("messages", add_special=NEVER)]},
    )  # fmt: skip

    prompt: str | None = None
    add_special_tokens: bool | None = None  # default true of a prompt; false of messages, whose template writes its own
    return_token_strs: bool = False
    content: str | None = None
    add_special: bool = False  # of content
    with_pieces: bool = False  # each token is an object with its text


class EncodeRequest(Strict):
    """LMDeploy's."""

    model: str | None = None
    input: str | Annotated[list[str], Field(max_length=MAX_PROMPTS)]
    do_preprocess: bool = False  # apply the chat template: each text is a message of the user
    add_bos: bool = True


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
    skip_special_tokens: bool = False
