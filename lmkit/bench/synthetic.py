"""Random text that a tokenizer reads back as an exact number of tokens.

The text consists of tokens that are a space and a word. Pre-tokenizers split before the space, so such tokens do not
merge with their neighbours. The tokens that the tokenizer or a chat template adds around the text are part of the
length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from lmkit.errors import ConfigError
from lmkit.text import Tokenizer

_SPACE_AND_WORD = re.compile(r" [A-Za-z]{2,}")
_PRINTABLE = re.compile(r"[!-~]+")
_ATTEMPTS = 16


class TextMaker:
    """Draws texts of exact lengths. The same generator state gives the same texts."""

    def __init__(self, tokenizer: Tokenizer, rng: np.random.Generator) -> None:
        self._rng = rng
        self._pieces = _stable_pieces(tokenizer)

    def text(self, num_tokens: int, measure: Callable[[str], int]) -> str:
        """A text for which `measure` gives `num_tokens`. Raises ConfigError if there is none."""
        least = measure("")
        if num_tokens <= least and num_tokens:
            raise ConfigError(f"a prompt of {num_tokens} tokens: {least} tokens surround any text; ask for more")
        pieces = self._draw(num_tokens - least)
        for _ in range(_ATTEMPTS):
            text = "".join(pieces)
            missing = num_tokens - measure(text)
            if missing == 0:
                return text
            pieces = pieces + self._draw(missing) if missing > 0 else pieces[:missing]
        raise ConfigError(f"found no text that this tokenizer reads as exactly {num_tokens} tokens")

    def _draw(self, count: int) -> list[str]:
        return [self._pieces[i] for i in self._rng.integers(len(self._pieces), size=count)]


def _stable_pieces(tokenizer: Tokenizer) -> list[str]:
    """Texts of single tokens that read back as that token, also between others. Words are preferred."""
    ids = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids]
    texts = [tokenizer.token_text(i) for i in ids]
    for pattern in (_SPACE_AND_WORD, _PRINTABLE):
        pieces = _reread(tokenizer, [text for text in texts if pattern.fullmatch(text)])
        if pieces:
            return pieces
    raise ConfigError("this tokenizer has no token that could make up random text; use --dataset")


def _reread(tokenizer: Tokenizer, texts: Sequence[str]) -> list[str]:
    """The pieces for which three in a row after another text add exactly three tokens."""
    texts = sorted(set(texts))
    rows = ["x", *("x" + 3 * text for text in texts)]
    encoded = tokenizer.backend.encode_batch_fast(rows, add_special_tokens=False)
    least = len(encoded[0].ids)
    return [text for text, row in zip(texts, encoded[1:], strict=True) if len(row.ids) == least + 3]


def length_range(mean: int, ratio: float) -> tuple[int, int]:
    """(shortest, longest) length of a uniform draw around `mean`: at most `ratio` of it away, at least 1."""
    return max(1, round(mean * (1 - ratio))), max(1, round(mean * (1 + ratio)))
