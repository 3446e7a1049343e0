"""The limits of an engine, and the check for requests that can never run in it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lmkit.errors import RequestError
from lmkit.turbo.kv.manager import KVLimits
from lmkit.turbo.request import MAX_LOGPROBS, Request


@dataclass(frozen=True)
class SchedulerLimits:
    """The resources that the scheduler shares out, and the rules by which it does."""

    kv: KVLimits
    max_batch_size: int  # sequences that run at once
    max_step_tokens: int  # token budget of one step, decodes and prompts together
    max_model_len: int  # prompt and output tokens of one sequence
    max_queue: int  # waiting requests; one more is refused
    vocab_size: int
    priority_seconds: float = 10.0  # seconds of waiting that one level of priority is worth
    max_overtakes: int = 8  # how often later sequences with longer cache matches may overtake a sequence
    decode_slowdown: float = 2.0  # the most that prompts may slow down decoding
    request_timeout: float | None = None  # seconds, for requests without a timeout of their own
    max_draft_tokens: int = 0  # draft tokens that a step computes of one sequence; 0 = no speculation
    draft_history: int = 0  # tokens of a tenant's answers that are kept for later draft tokens
    overlaps: bool = True  # plans are made while others run
    whole_texts: bool = False  # a text is computed in one step
    audit: int = 0  # of so many cache hits one is computed again, see turbo.scheduling.audits; 0 = none
    whole_images: bool = False  # the tokens of an image are computed in one step
    num_stages: int = 1  # that carry out plans one after the other: so many are to be under way at once


def check_request(request: Request, limits: SchedulerLimits) -> int:
    """Return the number of tokens, prompt and output, at which the sequence ends.

    Raises RequestError for a request that can never run.
    """
    params, num_prompt = request.params, len(request.prompt_ids)
    params.validate(limits.vocab_size, max(MAX_LOGPROBS, limits.vocab_size))  # the front end has a limit
    if params.temperature > 0 and params.seed is None:
        raise RequestError("invalid_request", "seed=None: sampling needs a seed; draw one", "seed")
    if request.pooling is not None and params.max_tokens != 0:
        raise RequestError("invalid_request", "an embedding needs max_tokens=0: nothing is generated", "max_tokens")
    if request.prompt_logprobs and not 0 <= request.logprobs_start < num_prompt:
        message = f"logprobs_start={request.logprobs_start}: must be the position of a prompt token"
        raise RequestError("invalid_request", message, "logprobs_start")
    if request.timeout is not None and not 0 < request.timeout < math.inf:
        raise RequestError("invalid_request", f"timeout={request.timeout}: must be more than 0 seconds", "timeout")
    if not num_prompt:
        raise RequestError("invalid_request", "the prompt is empty: send at least one token", "prompt")
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= limits.vocab_size:
        wrong = next(t for t in request.prompt_ids if not 0 <= t < limits.vocab_size)
        raise RequestError("invalid_request", f"prompt token id {wrong} is not in [0, {limits.vocab_size})", "prompt")
    check_images_fit(request, limits)
    max_new = limits.max_model_len if params.max_tokens is None else params.max_tokens
    if num_prompt + min(max_new, 1) > limits.max_model_len:
        raise RequestError(
            "context_length_exceeded",
            f"this model's maximum context length is {limits.max_model_len} tokens, and the prompt has {num_prompt}; "
            "there must be room for at least one more: shorten it",
            "prompt",
        )
    max_tokens = min(num_prompt + max_new, limits.max_model_len)
    known = request.known_ids
    if known and not (len(known) < max_tokens - num_prompt and 0 <= min(known) <= max(known) < limits.vocab_size):
        raise RequestError("invalid_request", "the known tokens leave nothing to generate, or are none of the model's")
    blocks = limits.kv.blocks_for(max(num_prompt, max_tokens - 1))  # the last generated token is never computed
    if blocks > limits.kv.num_blocks:
        raise RequestError(
            "context_length_exceeded",
            f"{num_prompt} prompt and {max_tokens - num_prompt} new tokens need {blocks} KV blocks of "
            f"{limits.kv.block_size} tokens, and there are {limits.kv.num_blocks}: ask for fewer new tokens",
            "max_tokens",
        )
    return max_tokens


def check_images_fit(request: Request, limits: SchedulerLimits) -> None:
    """Raise RequestError for an image that must be computed in one step and never can, or frames of a video whose place
    in time lies beyond the context."""
    room = -(-limits.max_step_tokens // limits.num_stages) - limits.max_batch_size + 1
    longest = max((image.num_tokens for image in request.images), default=0)
    if limits.whole_images and longest > room:
        message = (
            f"an image of {longest} tokens is computed in one step, which has room for {room}: raise max_step_tokens"
        )
        raise RequestError("unsupported_parameter", message, "messages")
    latest = max((image.start + image.time for image in request.images if image.time), default=0)
    if latest >= limits.max_model_len:
        message = f"a video is as long as {latest} tokens, and the context has {limits.max_model_len}: shorten it"
        raise RequestError("context_length_exceeded", message, "messages")


def fitted_to_images(request: Request, start: int, count: int, room: int) -> int:
    """The tokens of a chunk of `count` from `start` on that cuts no image of a model that computes images whole: it
    ends before an image, or if it begins with one, after it. 0: the step has no `room` for that."""
    end = start + count
    for image in request.images:
        if image.start < end < image.end:
            count = image.start - start if image.start > start else image.end - start
            return count if count <= room else 0
    return count


def failure_of(request: Request) -> dict[str, str]:
    """What an output says of a request whose next token cannot be chosen: `error`, and its code."""
    if not request.params.grammar:
        return {"error": "what the model computes for this request is not finite numbers"}
    message = "no token may follow in this answer: its grammar has a dead end, or takes too much time or memory"
    return {"error": message, "error_code": "invalid_request"}
