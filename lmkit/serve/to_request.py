"""A request body -> engine requests. Every refusal that needs the model is here: template, tokens, limits, context.

Tokenizing takes time: call these in a thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from lmkit.errors import RequestError
from lmkit.serve.protocol import MAX_SEQUENCES, ChatCompletionRequest, ChatMessage, CompletionRequest
from lmkit.text import Tokenizer
from lmkit.turbo.request import EngineInfo, GenerationConfig, Request

DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's /v1/completions; chat goes on until the context is full
_PUBLIC_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


def chat_requests(
    body: ChatCompletionRequest, tokenizer: Tokenizer, info: EngineInfo, request_id: str
) -> list[Request]:
    """One engine request for each of the `n` choices."""
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise _invalid("max_tokens and max_completion_tokens differ; send one of them", "max_completion_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise _invalid("top_logprobs needs logprobs: true", "top_logprobs")
    params = _params(
        body,
        info,
        max_new_tokens=limits.pop() if limits else None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    generation_prompt = _or(body.add_generation_prompt, True)
    ids = chat_tokens(body.messages, tokenizer, generation_prompt, body.chat_template_kwargs or {})
    return _fan_out([ids], params, body.n, info, request_id, "messages")


def completion_requests(
    body: CompletionRequest, tokenizer: Tokenizer, info: EngineInfo, request_id: str
) -> list[Request]:
    """`n` engine requests for each prompt, in the order of the prompts."""
    if body.best_of is not None and body.best_of != _or(body.n, 1):
        raise RequestError("unsupported_parameter", "best_of other than n is not supported by this server", "best_of")
    max_new_tokens = _or(body.max_tokens, DEFAULT_COMPLETION_TOKENS)
    params = _params(body, info, max_new_tokens=max_new_tokens, logprobs=body.logprobs)
    if len(body.prompt) * _or(body.n, 1) > MAX_SEQUENCES:
        raise _invalid(f"prompts times n: at most {MAX_SEQUENCES}", "n")
    prompts = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompt]
    echo_logprobs = bool(body.echo) and body.logprobs is not None
    return _fan_out(prompts, params, body.n, info, request_id, "prompt", prompt_logprobs=echo_logprobs)


def chat_tokens(
    messages: Sequence[ChatMessage], tokenizer: Tokenizer, add_generation_prompt: bool, variables: dict[str, Any]
) -> list[int]:
    """Token ids of a rendered conversation."""
    plain = [message.model_dump(exclude_none=True) for message in messages]
    return tokenizer.encode_chat(plain, add_generation_prompt=add_generation_prompt, variables=variables)


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise RequestError unless all `ids` are tokens of the model."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise _invalid(f"{param}: a token id is not in [0, {vocab_size})", param)


def _params(body: ChatCompletionRequest | CompletionRequest, info: EngineInfo, **fields: Any) -> GenerationConfig:
    """The sampling fields, with OpenAI's defaults."""
    if body.stream_options is not None and not body.stream:
        raise _invalid("stream_options needs stream: true", "stream_options")
    params = GenerationConfig(
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=_or(body.top_k, 0),
        min_p=_or(body.min_p, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=body.logit_bias or {},
        seed=_or(body.seed, secrets.randbits(63)),
        stop=tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        min_new_tokens=_or(body.min_tokens, 0),
        ignore_eos=bool(body.ignore_eos),
        skip_special_tokens=_or(body.skip_special_tokens, True),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        **fields,
    )
    try:
        params.validate(info.vocab_size)
    except RequestError as error:
        message = error.message
        for private, public in _PUBLIC_NAMES.items():
            message = message.replace(private, public)
        raise RequestError(error.code, message, _PUBLIC_NAMES.get(error.param or "", error.param)) from None
    return params


def _fan_out(
    prompts: Sequence[list[int]],
    params: GenerationConfig,
    n: int | None,
    info: EngineInfo,
    request_id: str,
    param: str,
    *,
    prompt_logprobs: bool = False,
) -> list[Request]:
    """Requests in the order of their choices; choice i of a prompt draws with seed + i."""
    requests: list[Request] = []
    for ids in prompts:
        _check_prompt(ids, params, info, param)
        for i in range(_or(n, 1)):
            assert params.seed is not None
            requests.append(
                Request(
                    request_id=f"{request_id}-{len(requests)}",
                    prompt_ids=ids,
                    params=msgspec.structs.replace(params, seed=(params.seed + i) % (1 << 64)),
                    prompt_logprobs=prompt_logprobs,
                )
            )
    return requests


def _check_prompt(ids: Sequence[int], params: GenerationConfig, info: EngineInfo, param: str) -> None:
    if not ids:
        raise _invalid(f"{param}: no tokens; the prompt is empty", param)
    check_ids(ids, info.vocab_size, param)
    wanted = 1 if params.max_new_tokens is None else params.max_new_tokens
    if len(ids) + wanted > info.max_model_len:
        message = (
            f"the context of this model is {info.max_model_len} tokens, but {len(ids)} are in the {param} "
            f"and {wanted} are to be generated"
        )
        raise RequestError("context_length_exceeded", message, param)


def _invalid(message: str, param: str) -> RequestError:
    return RequestError("invalid_request", message, param)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
