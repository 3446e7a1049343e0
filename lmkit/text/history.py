"""The tokens of a conversation as they were generated, kept from turn to turn.

A model may write a text with other tokens than the tokenizer does. If the next turn's prompt tokenized the answer anew,
it would differ from the cached KV from the first such token on. So the prompt uses the answer's own tokens:

    rendered   <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello!<|im_end|>\\n<|im_start|>user\\nAnd ...
    turns      |------------------- first: prompt + answer -------------------||--- encoded anew, like any text ---
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from lmkit.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class _Turn:
    """The addition of one turn: the end of its prompt, and its answer without the token that ended it."""

    text: str
    ids: array[int]


@dataclass(frozen=True)
class TokenHistory:
    """The turns of one conversation. Immutable: a fork is the same value.

    Only the text decides which turns are used. A conversation is encoded anew from the place where it was edited, or
    where a template or a stop string changed an answer.
    """

    turns: tuple[_Turn, ...] = ()

    def encode(self, tokenizer: Tokenizer, text: str) -> EncodedTurn:
        """Token ids of a rendered conversation.

        The longest run of turns with which `text` begins contributes its own tokens. The rest must begin with a special
        token. The tokenizer cuts special tokens out first, so no token of the plain encoding could cross the boundary.
        Raises RequestError if `text` is not valid Unicode.
        """
        used: list[_Turn] = []
        num_chars = 0
        for turn in self.turns:
            if not text.startswith(turn.text, num_chars):
                break
            used.append(turn)
            num_chars += len(turn.text)
        while True:
            rest = text[num_chars:]
            ids = tokenizer.encode(rest, add_special_tokens=False)
            if not used or not rest or _begins_with_special(tokenizer, rest, ids):
                known = [token for turn in used for token in turn.ids]
                return EncodedTurn(TokenHistory(tuple(used)), tokenizer, rest, known + ids, len(known))
            num_chars -= len(used.pop().text)  # it began with a special token, or is the first

    @property
    def num_bytes(self) -> int:
        """An upper bound of its memory in bytes."""
        return sum(4 * (len(turn.text) + len(turn.ids)) for turn in self.turns)


@dataclass(frozen=True)
class EncodedTurn:
    """A prompt: `ids` of a whole rendered conversation, and `rest`, the text that was not in its history."""

    history: TokenHistory
    tokenizer: Tokenizer
    rest: str
    ids: list[int]
    num_known: int  # number of ids from the history

    def answered(self, answer_ids: Sequence[int]) -> TokenHistory:
        """The history with this prompt and its answer. The answer comes without the token that ended it.

        An answer that stops in the middle of a character adds nothing, because no rendered text can begin with it.
        """
        try:
            answer = b"".join(map(self.tokenizer.token_bytes, answer_ids)).decode()
        except UnicodeDecodeError:
            return self.history
        if self.tokenizer.min_tokens(answer) > len(answer_ids):
            return self.history  # a decoder that lengthens text; `Tokenizer.min_tokens` must hold for each turn
        ids = array("i", [*self.ids[self.num_known :], *answer_ids])
        return TokenHistory((*self.history.turns, _Turn(self.rest + answer, ids)))

    def rendered_anew(self, text: str) -> list[int]:
        """Token ids of another rendering of the conversation, without any history.

        Only what follows the last special token before which both are equal is encoded: no token crosses it.
        """
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        if self.history.turns:
            return encode(text)
        common = num_common(self.rest, text)
        pieces = filter(None, map(self.tokenizer.id_to_token, self.tokenizer.special_ids))
        cut = max((self.rest.rfind(piece, 0, common) for piece in pieces), default=-1)
        tail = encode(self.rest[cut:]) if cut > 0 else []
        if not tail or self.ids[-len(tail) :] != tail:
            return encode(text)
        return self.ids[: -len(tail)] + encode(text[cut:])


T = TypeVar("T", str, list[int])


def num_common(a: T, b: T) -> int:
    """The number of first characters, or tokens, that are equal. It compares slices: long texts take no time."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _begins_with_special(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> bool:
    piece = tokenizer.id_to_token(ids[0]) if ids and ids[0] in tokenizer.special_ids else None
    return piece is not None and text.startswith(piece)
