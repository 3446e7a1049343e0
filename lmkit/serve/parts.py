"""The parts of answers: what chunks and whole answers have in common, in OpenAI's form with other servers' fields."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

T = TypeVar("T")
Asked: TypeAlias = T | UnsetType  # a field that stays away from an answer whose request does not ask for it


class _Part(msgspec.Struct):
    """A part of an answer. It is made for each token, and a model of pydantic would take ten times longer."""


class PromptTokensDetails(_Part):
    cached_tokens: int  # prompt tokens whose KV was reused


class CompletionTokensDetails(_Part):
    reasoning_tokens: int


class Usage(_Part):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Timings(_Part):
    """llama.cpp's. The first token comes at the end of the prompt's time, so a rate of tokens does not count it."""

    cache_n: int  # tokens of the prompt whose KV was reused
    prompt_n: int  # tokens of the prompt that were computed
    prompt_ms: float  # from the request's admission, behind the queue, to its first token
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int  # tokens of the answer so far
    predicted_ms: float  # from the first to the last of them
    predicted_per_token_ms: float
    predicted_per_second: float


class RequestMetrics(_Part):
    """vLLM's, of an answer with one choice."""

    time_to_first_token_ms: float  # since the request's admission, behind the queue
    generation_time_ms: float  # from the first token to the last
    queue_time_ms: float
    tokens_per_second: float  # of the whole time behind the queue
    mean_itl_ms: Asked[float] = UNSET  # from a token to the next; not of a single token


class PromptProgress(_Part):
    """llama.cpp's."""

    total: int  # tokens of the prompt
    cache: int  # of them, those whose KV was reused
    processed: int  # of them, those whose KV is there
    time_ms: int  # since the request's admission, behind the queue


class TopLogprob(_Part):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Part):
    content: list[ChatLogprob]
    refusal: None = None


class ChatChunkChoice(_Part, kw_only=True):
    index: int
    delta: dict[str, Any]  # role with the first chunk of a choice, then content, reasoning and calls
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: Asked[list[int] | None] = UNSET


class CompletionLogprobs(_Part):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Part, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: Asked[list[int] | None] = UNSET
    prompt_token_ids: Asked[list[int] | None] = UNSET  # with the first chunk of a choice


class _Response(_Part):
    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletionChunk(_Response, kw_only=True):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Asked[Usage | None] = UNSET
    timings: Asked[Timings] = UNSET
    metrics: Asked[RequestMetrics] = UNSET
    prompt_progress: Asked[PromptProgress] = UNSET
    prompt_token_ids: Asked[list[int] | None] = UNSET  # with the first chunk


class Completion(_Response, kw_only=True):
    """One chunk of a stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Asked[Usage | None] = UNSET
    timings: Asked[Timings] = UNSET
    metrics: Asked[RequestMetrics] = UNSET
    prompt_progress: Asked[PromptProgress] = UNSET
