"""Prompts that are cut to a number of tokens, as `truncate_prompt_tokens` says."""

from __future__ import annotations

from lmkit.errors import RequestError


def room(most: int | None, context: int, wanted: int = 0) -> int | None:
    """The number of tokens that a prompt is cut to, so that `wanted` more fit the context at -1. None: it is not cut.

    Raises RequestError if it is more than the context.
    """
    if most is not None and most > context:
        message = f"truncate_prompt_tokens={most}: this model's maximum context length is {context} tokens"
        raise RequestError("invalid_request", message, "truncate_prompt_tokens")
    return max(context - wanted, 1) if most == -1 else most
