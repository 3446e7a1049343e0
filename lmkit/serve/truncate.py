"""Prompts that are cut to a number of tokens, as `truncate_prompt_tokens` says."""

from __future__ import annotations

from lmkit.errors import RequestError
from lmkit.text import Tokenizer


def room(most: int | None, context: int, wanted: int = 0) -> int | None:
    """The number of tokens that a prompt is cut to, so that `wanted` more fit the context at -1. None: it is not cut.

    Raises RequestError if it is more than the context.
    """
    if most is not None and most > context:
        message = f"truncate_prompt_tokens={most}: this model's maximum context length is {context} tokens"
        raise RequestError("invalid_request", message, "truncate_prompt_tokens")
    return max(context - wanted, 1) if most == -1 else most


def cut(ids: list[int], room: int, *, keep_end: bool) -> list[int]:
    return ids[max(0, len(ids) - room) :] if keep_end else ids[:room]


def cut_text(text: str, tokenizer: Tokenizer, room: int, *, special: bool, keep_end: bool) -> list[int]:
    """The tokens of a text. The special tokens around those that are its own stay, if there is room for more."""
    ids = tokenizer.encode(text, special)
    if len(ids) <= room:
        return ids
    plain = tokenizer.encode(text, False)
    num_special = len(ids) - len(plain)
    before = next((n for n in range(num_special + 1) if ids[n : n + len(plain)] == plain), None)
    if before is None or room <= num_special:
        return cut(ids, room, keep_end=keep_end)
    inside = cut(plain, room - num_special, keep_end=keep_end)
    return ids[:before] + inside + ids[before + len(plain) :]
