"""The most tokens that the prompts of a request may have, because a proxy has set so many aside for them.

A proxy bounds a prompt by the bytes of its body. Only a node knows what its template and its normalizer make of them,
so the node refuses what would be more.
"""

from __future__ import annotations

from contextvars import ContextVar

from lmkit.errors import RequestError

HEADER = b"x-lmkit-prompt-tokens"
_MOST: ContextVar[int | None] = ContextVar("prompt_tokens", default=None)


def limit_prompts(headers: list[tuple[bytes, bytes]]) -> None:
    """Take the limit of a request's headers for this task and those that it starts. Raises RequestError."""
    limits = [value for name, value in headers if name == HEADER]
    if not all(value.isdigit() and len(value) < 16 for value in limits):
        raise RequestError("invalid_request", f"{HEADER.decode()}: expected a whole number")
    _MOST.set(min(map(int, limits), default=None))


def check_prompts(num_tokens: int) -> None:
    """Raise RequestError if the prompts of this task's request have more tokens than its limit."""
    if (most := _MOST.get()) is not None and num_tokens > most:
        message = (
            f"the prompt has {num_tokens} tokens, and {most} are set aside for a text of its length: the model's "
            "template or normalizer makes it longer than keys with limits may send; shorten or rewrite it"
        )
        raise RequestError("context_length_exceeded", message, n_prompt_tokens=num_tokens, n_ctx=most)
