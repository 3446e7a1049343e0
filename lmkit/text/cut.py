"""Token ids and texts, cut to a number of tokens."""

from __future__ import annotations

from lmkit.text.tokenizer import Tokenizer


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
