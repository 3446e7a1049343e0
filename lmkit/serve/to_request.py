"""A request body -> engine requests. A request that this model cannot serve is refused here.

These refusals concern the chat template, the tokens, fields that do not go together, and the context length. Other
modules refuse earlier: `auth` the key, `body` the size and the JSON, `protocol` the types of fields, and `serving` the
model's name. The engine refuses later: when its queue is full, when it is not ready, and after a deadline.

Templates and tokenizing take time: call these functions in a thread (`text_pool`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from lmkit.errors import RequestError
from lmkit.formats.generation_config import RANGES
from lmkit.serve.auth import NOBODY, Owner
from lmkit.serve.constraint import constraint
from lmkit.serve.protocol import MAX_SEQUENCES, ChatCompletionRequest, CompletionRequest, Extensions, Placed
from lmkit.serve.truncate import room
from lmkit.text import EncodedTurn, TokenHistory, Tokenizer
from lmkit.text.chat.style import Style, called_tools
from lmkit.text.cut import cut, cut_text
from lmkit.text.images import data_url
from lmkit.turbo.repetition import NEVER, TWO_RULES, RepetitionStop
from lmkit.turbo.request import MAX_LOGPROBS, EngineInfo, Request, SamplingParams
from lmkit.turbo.transport.prompt_images import Shown, read_images, with_frames, with_images

B = TypeVar("B", ChatCompletionRequest, CompletionRequest)
DEFAULT_TEMPERATURE = 1.0
DEFAULT_COMPLETION_TOKENS = 16  # as in OpenAI's /v1/completions; chat has no limit
NO_LIMIT = -1  # of new tokens: until the context is full
LIMITS = ("max_tokens", "max_completion_tokens", "n_predict")  # names of one limit


def chat_requests(
    body: ChatCompletionRequest,
    tokenizer: Tokenizer,
    info: EngineInfo,
    request_id: str,
    *,
    owner: Owner = NOBODY,
    history: TokenHistory | None = None,
    style: Style | None = None,
    must_fit: bool = True,
    load: Callable[[Any], bytes] = data_url,
) -> tuple[list[Request], EncodedTurn]:
    """One engine request for each of the `n` choices, and their prompt, which continues where `history` ends.

    Unless `must_fit`, a limit beyond the context is no mistake: the answer ends where the context does. `load` gives
    the bytes of an image.
    """
    asked = _asked_tokens(body)
    if asked == 0:
        raise _invalid("max_tokens: at least 1 in a chat", "max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise _invalid("top_logprobs needs logprobs: true", "top_logprobs")
    if body.echo and not (body.continue_final_message and body.messages[-1].role == "assistant"):
        rule = "it shows the assistant's message that the answer goes on with, so it needs continue_final_message"
        raise _invalid(f"echo: {rule}", "echo")
    style = style or Style(tokenizer)
    images = read_images(body.images, info, load)
    tools = called_tools(body)
    content = constraint(body, tokenizer, info.vocab_size)
    wanted = (_limit(asked) or 1) if must_fit else 1
    most = prompt_room(body, info, wanted)
    turn = chat_prompt(body, tokenizer, info, history, style, images, may_be_long=most is not None)
    params = sampling_params(
        body,
        info,
        max_tokens=_limit(_or(asked, info.sampling.max_new_tokens)),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        shown_special_ids=style.special_ids(bool(tools)),
        grammar=style.grammar(body, content, info.vocab_size, is_thinking=style.is_thinking(turn.rest)),
        reasoning_end=style.reasoning_end(body),
    )
    like = _request(body, params, request_id, owner, prompt_logprobs=body.prompt_logprobs is not None)
    ids = turn.ids if most is None else cut(turn.ids, most, keep_end=True)
    if images and most is not None:
        raise _invalid("truncate_prompt_tokens does not go with images", "truncate_prompt_tokens")
    ids, placed = with_images(ids, images, info)
    like = msgspec.structs.replace(like, images=placed)
    return _fan_out([ids], like, _or(body.n, 1), info, "messages", wanted), turn


def chat_prompt(
    body: ChatCompletionRequest,
    tokenizer: Tokenizer,
    info: EngineInfo,
    history: TokenHistory | None = None,
    style: Style | None = None,
    shown: Sequence[Shown] = (),
    *,
    may_be_long: bool = False,
) -> EncodedTurn:
    """The prompt of a chat that shows these images, which continues where `history` ends. Raises RequestError if it
    cannot fit the context."""
    text = with_frames(rendered(body, style or Style(tokenizer)), shown, info)
    if not may_be_long:
        tokenizer.check_length(text, info.max_model_len, "messages")
    return (history or TokenHistory()).encode(tokenizer, text)


def rendered(body: ChatCompletionRequest, style: Style) -> str:
    """The text of a chat's prompt. Raises RequestError."""
    return style.render(body, _variables(body))


def completion_requests(
    body: CompletionRequest, tokenizer: Tokenizer, info: EngineInfo, request_id: str, *, owner: Owner = NOBODY
) -> list[Request]:
    """`choices_per_prompt` engine requests for each prompt, in the order of the prompts."""
    choices = _checked_choices(body)
    select = choices > _or(body.n, 1)  # by log-probability, so the engine must return it
    asked = _asked_tokens(body)
    params = sampling_params(
        body,
        info,
        max_tokens=_limit(_or(asked, info.sampling.max_new_tokens or DEFAULT_COMPLETION_TOKENS)),
        logprobs=0 if select and body.logprobs is None else body.logprobs,
        grammar=constraint(body, tokenizer, info.vocab_size),
    )
    wanted = _or(_limit(asked), 1)
    prompts = _prompts(body, tokenizer, info, prompt_room(body, info, wanted))
    if body.endings is not None:
        return _endings(body, prompts, tokenizer, info, _request(body, params, request_id, owner, prompt_logprobs=True))
    echo_logprobs = bool(body.echo) and body.logprobs is not None
    scored = echo_logprobs or body.prompt_logprobs is not None
    start = _or(body.logprob_start_len, 0)
    if start and (body.echo or not scored or start >= min(map(len, prompts))):
        rule = "goes with prompt_logprobs, without echo, and is the position of a token of each prompt"
        raise _invalid(f"logprob_start_len={start}: it {rule}", "logprob_start_len")
    like = _request(body, params, request_id, owner, prompt_logprobs=scored, logprobs_start=start)
    return _fan_out(prompts, like, choices, info, "prompt", wanted)


def prompt_room(body: ChatCompletionRequest | CompletionRequest, info: EngineInfo, wanted: int) -> int | None:
    """The number of tokens that the prompts are cut to; None: they are not cut."""
    if body.truncate_prompt_tokens is None:
        if body.truncation_side is not None:
            raise _invalid("truncation_side needs truncate_prompt_tokens", "truncation_side")
    elif body.session_id is not None:
        rule = "truncate_prompt_tokens does not go with session_id, whose next prompt goes on behind this one"
        raise _invalid(rule, "truncate_prompt_tokens")
    return room(body.truncate_prompt_tokens, info.max_model_len, wanted)


def _prompts(body: CompletionRequest, tokenizer: Tokenizer, info: EngineInfo, most: int | None) -> list[list[int]]:
    start = body.prompt_start_ids
    if start is not None:
        if body.echo:
            raise _invalid("echo shows a prompt's text; it does not go with prompt_start_ids", "echo")
        check_ids(start, info.vocab_size, "prompt_start_ids")
    special, keep_end = _or(body.add_special_tokens, True), body.truncation_side != "right"

    def encoded(prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return [*(start or ()), *prompt]
        if most is None:
            tokenizer.check_length(prompt, info.max_model_len, "prompt")
        elif not start:
            return cut_text(prompt, tokenizer, most, special=special, keep_end=keep_end)
        return tokenizer.encode_behind(start, prompt) if start else tokenizer.encode(prompt, special)

    prompts = map(encoded, body.prompt)
    return list(prompts) if most is None else [cut(ids, most, keep_end=keep_end) for ids in prompts]


def _endings(
    body: CompletionRequest, prompts: list[list[int]], tokenizer: Tokenizer, info: EngineInfo, like: Request
) -> list[Request]:
    """A request for each ending of one prompt. It scores the tokens after the prompt."""
    others = body.echo or choices_per_prompt(body) > 1 or body.logprob_start_len or body.session_id
    others = others or body.truncate_prompt_tokens
    if others or len(prompts) > 1 or not prompts[0] or body.prompt_logprobs is None or _asked_tokens(body) != 0:
        rule = "they go with one prompt that is not empty, prompt_logprobs and max_tokens of 0; without n, best_of, "
        rule += "echo, logprob_start_len, session_id and truncate_prompt_tokens"
        raise _invalid(f"endings: {rule}", "endings")
    (before,) = prompts
    requests = []
    for text in body.endings or ():
        tokenizer.check_length(text, info.max_model_len, "endings")
        ids, same = tokenizer.encode_ending(before, text)
        start = msgspec.structs.replace(like, logprobs_start=max(same - 1, 0))
        requests += _fan_out([ids], start, 1, info, "endings", 0)
    return [msgspec.structs.replace(request, request_id=f"{like.request_id}-{i}") for i, request in enumerate(requests)]


def _prompt_top(body: ChatCompletionRequest | CompletionRequest) -> int:
    """How many of the most likely tokens the engine is to return at each position of a prompt that it scores."""
    if body.prompt_logprobs is not None and body.stream:
        raise _invalid("prompt_logprobs cannot be streamed; leave stream out", "prompt_logprobs")
    echoed = body.logprobs if body.echo and isinstance(body, CompletionRequest) else None
    return max(body.prompt_logprobs or 0, echoed or 0)


def _shown_ids(body: ChatCompletionRequest | CompletionRequest, info: EngineInfo) -> tuple[int, ...]:
    """The tokens whose log-probabilities are asked for."""
    ids = tuple(body.logprob_token_ids or ())
    asked = body.logprobs is not None and body.logprobs is not False
    if ids and (not asked or body.prompt_logprobs is not None or body.echo):
        rule = "needs logprobs, and does not go with prompt_logprobs or echo"
        raise _invalid(f"logprob_token_ids {rule}", "logprob_token_ids")
    check_ids(ids, info.vocab_size, "logprob_token_ids")
    return ids


def with_numbers(body: B, most: int, vocab_size: int) -> B:
    """`body`, whose numbers of tokens with log-probabilities are at most the vocabulary's, also in the place of -1.

    Raises RequestError for more than the `most` of the server; -1 = it has no limit.
    """
    asked = {name: getattr(body, name, None) for name in ("logprobs", "top_logprobs", "prompt_logprobs")}
    numbers = {name: value for name, value in asked.items() if type(value) is int}  # in chat, logprobs is a switch
    for name, value in numbers.items():
        numbers[name] = number = vocab_size if value == -1 else min(value, vocab_size)
        if number > most != -1:
            raise _invalid(f"{name}={value}: at most {most} tokens; --max-logprobs of the server sets this limit", name)
    return body.model_copy(update=numbers) if numbers else body


def choices_per_prompt(body: CompletionRequest) -> int:
    """The number of sequences that are generated for a prompt."""
    return body.best_of or body.n or 1


def _asked_tokens(body: ChatCompletionRequest | CompletionRequest) -> int | None:
    """The least of the limits that the request names, which may be NO_LIMIT; None if it names none."""
    limits = [n for name in LIMITS if (n := getattr(body, name)) is not None]
    return min((n for n in limits if n != NO_LIMIT), default=NO_LIMIT if limits else None)


def _limit(tokens: int | None) -> int | None:
    """The engine's limit: None until the context is full."""
    return None if tokens == NO_LIMIT else tokens


def _variables(body: ChatCompletionRequest) -> dict[str, Any]:
    """The variables of the chat template that the request sets."""
    variables = dict(body.chat_template_kwargs or {})
    if body.enable_thinking is not None:
        if variables.get("enable_thinking", body.enable_thinking) is not body.enable_thinking:
            raise _invalid("enable_thinking differs from that of chat_template_kwargs; send one", "enable_thinking")
        variables["enable_thinking"] = body.enable_thinking
    return variables


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise RequestError unless all `ids` are tokens of the model."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise _invalid(f"{param}: token id {str(wrong)[:20]} is not in [0, {vocab_size}): out of vocabulary", param)


def sampling_params(body: ChatCompletionRequest | CompletionRequest, info: EngineInfo, **fields: Any) -> SamplingParams:
    """The request's parameters: given, else the checkpoint's default, else OpenAI's."""
    if body.stream_options is not None and not body.stream:  # as OpenAI's and vLLM's servers
        raise _invalid("stream_options needs stream: true", "stream_options")
    params = SamplingParams(
        **_sampling(body, info),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=body.logit_bias or {},
        seed=_or(body.seed, secrets.randbits(63)),
        repetition_stop=repetition_stop(body),
        stop=tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        min_tokens=_or(body.min_tokens, 0),
        ignore_eos=bool(body.ignore_eos),
        skip_special_tokens=_or(body.skip_special_tokens, True),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        logprob_token_ids=_shown_ids(body, info),
        prompt_top=_prompt_top(body),
        **fields,
    )
    params.validate(info.vocab_size, max(MAX_LOGPROBS, info.vocab_size))  # see with_numbers
    return params


def repetition_stop(body: Extensions) -> RepetitionStop | None:
    """The request's rule for answers that go round in circles. Raises RequestError if it has two."""
    ngram, count = body.repetition_ngram_size, body.repetition_ngram_threshold
    if body.repetition_stop is not None:
        if ngram is not None or count is not None:
            raise _invalid(TWO_RULES, "repetition_stop")
        return RepetitionStop(ngram=body.repetition_stop.ngram, count=body.repetition_stop.count)
    if ngram is None and count is None:
        return None
    return RepetitionStop(ngram=ngram, count=count) if ngram and count else NEVER


def _sampling(body: ChatCompletionRequest | CompletionRequest, info: EngineInfo) -> dict[str, Any]:
    given = {name: value for name in RANGES if (value := getattr(body, name)) is not None}
    return {"temperature": DEFAULT_TEMPERATURE} | info.sampling.sampling() | given


def _checked_choices(body: CompletionRequest) -> int:
    """`choices_per_prompt`. Raises RequestError if the fields do not go together."""
    n, choices = _or(body.n, 1), choices_per_prompt(body)
    if choices < n:
        raise _invalid(f"best_of={choices}: at least n={n}", "best_of")
    if choices > n and body.stream:
        raise _invalid("best_of cannot be streamed: which choices are best is known at the end", "best_of")
    if choices > n and _asked_tokens(body) == 0:
        raise _invalid("best_of needs max_tokens of at least 1", "best_of")
    if len(body.prompt) * choices > MAX_SEQUENCES:
        raise _invalid(f"prompts times n or best_of: at most {MAX_SEQUENCES}", "n" if choices == n else "best_of")
    if body.session_id is not None and len(body.prompt) > 1:
        raise _invalid("session_id goes with a single prompt", "session_id")
    return choices


def _request(
    body: ChatCompletionRequest | CompletionRequest,
    params: SamplingParams,
    request_id: str,
    owner: Owner,
    *,
    prompt_logprobs: bool = False,
    logprobs_start: int = 0,
) -> Request:
    """A request without a prompt: the part that all prompts and choices share."""
    return Request(
        request_id=request_id,
        prompt_ids=[],
        params=params,
        prompt_logprobs=prompt_logprobs,
        logprobs_start=logprobs_start,
        session_id=body.session_id and owner.own(body.session_id),
        speculate=_or(body.speculate, True),
        progress=bool(body.return_progress),
        **placement(body, owner),
    )


def placement(body: Placed, owner: Owner) -> dict[str, Any]:
    """The fields of an engine request that say whose it is, and how it stands among others. Raises RequestError."""
    priority = _or(body.priority, 0)
    if priority < owner.min_priority:
        message = f"priority={priority}: this API key may ask for {owner.min_priority} and more (lower is sooner)"
        raise RequestError("permission_denied", message, "priority")
    return {
        "tenant": owner.tenant,
        "weight": owner.weight,
        "cache_salt": owner.own(_or(body.cache_salt, "")),
        "priority": priority,
        "timeout": body.timeout,
    }


def _fan_out(
    prompts: Sequence[list[int]], like: Request, choices: int, info: EngineInfo, param: str, wanted: int
) -> list[Request]:
    """Requests in the order of their choices; choice i of a prompt draws with seed + i.

    A prompt and the `wanted` tokens must fit the context. A default length is cut to what fits.
    """
    seed = like.params.seed
    assert seed is not None
    each = [msgspec.structs.replace(like.params, seed=(seed + i) % (1 << 64)) for i in range(choices)]
    requests: list[Request] = []
    for ids in prompts:
        check_prompt(ids, wanted, info, param)
        for params in each:
            request_id = f"{like.request_id}-{len(requests)}"
            requests.append(msgspec.structs.replace(like, request_id=request_id, prompt_ids=ids, params=params))
    return requests


def check_prompt(ids: Sequence[int], wanted: int, info: EngineInfo, param: str) -> None:
    """Raise RequestError unless a prompt and as many new tokens as are `wanted` fit the context."""
    if not ids:
        raise _invalid(f"{param}: no tokens; the prompt is empty", param)
    check_ids(ids, info.vocab_size, param)
    if len(ids) + wanted > info.max_model_len:
        message = (  # clients that retry with a larger model look for the first words, which are OpenAI's
            f"this model's maximum context length is {info.max_model_len} tokens, but {len(ids) + wanted} are "
            f"requested: {len(ids)} in the {param} and {wanted} to generate; shorten the {param} or lower max_tokens"
        )
        raise RequestError(
            "context_length_exceeded", message, param, n_prompt_tokens=len(ids), n_ctx=info.max_model_len
        )


def _invalid(message: str, param: str) -> RequestError:
    return RequestError("invalid_request", message, param)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
