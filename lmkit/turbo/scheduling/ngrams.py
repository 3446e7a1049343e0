"""Guesses at a sequence's next tokens, looked up in its own text (prompt lookup decoding): what followed the last
tokens where they stood before.

Code that is edited, quoted documents and structured answers repeat long parts of what is there. A guess costs two
look-ups in a dictionary, and the text is indexed as it grows.
"""

from __future__ import annotations

from array import array

import numpy as np

LONG, SHORT = 8, 3  # tokens that are looked up: the long ones first
LONGEST = 32  # agreeing tokens that are told apart
MULTIPLIER, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


class Ngrams:
    """The index of one text, and the place in it that the text repeats now.

    `place` is the position of the guess at the next token, -1 if there is none. `agreed` is the number of tokens before
    it that agree with the text's last ones, at most LONGEST.
    """

    def __init__(self, token_ids: array[int]) -> None:
        self._token_ids = token_ids
        self._places: dict[int, dict[int, int]] = {LONG: {}, SHORT: {}}  # of an n-gram's key: the position behind it
        self.known = 0  # tokens that are indexed
        self.place, self.agreed = -1, 0
        self._index_prompt()

    def _index_prompt(self) -> None:
        """Index all but the last token at once."""
        tokens = np.array(self._token_ids[:-1], np.uint64)
        factor, one = np.uint64(MULTIPLIER), np.uint64(1)
        for size, places in self._places.items():
            count = len(tokens) - size + 1
            if count > 0:
                keys = np.zeros(count, np.uint64)
                for i in range(size):
                    keys = keys * factor + tokens[i : i + count] + one
                places.update(zip(keys.tolist(), range(size, size + count), strict=True))
        self.known = len(tokens)

    def learn(self) -> tuple[int, bool] | None:
        """Take in the next token of the text. Returns (`agreed` before it, whether the guess at it was right), or None
        if there was no guess.
        """
        at, self.known = self.known, self.known + 1
        judged = None
        if self.place >= 0:
            judged = self.agreed, self._token_ids[self.place] == self._token_ids[at]
            self.place, self.agreed = (self.place + 1, min(self.agreed + 1, LONGEST)) if judged[1] else (-1, 0)
        self._index(at + 1)
        return judged

    def _index(self, end: int) -> None:
        """Index the n-grams that end at `end`. If there is no guess, look up where they stood before."""
        for size, places in self._places.items():
            if end >= size:
                key = self._key(end, size)
                if self.place < 0 and key in places:
                    self._take(places[key], end)
                places[key] = end

    def _take(self, place: int, end: int) -> None:
        """Guess what follows at `place`, if the tokens before it agree: two n-grams may have one key."""
        tokens, agreed = self._token_ids, 0
        while agreed < min(place, LONGEST) and tokens[place - 1 - agreed] == tokens[end - 1 - agreed]:
            agreed += 1
        if agreed >= SHORT:
            self.place, self.agreed = place, agreed

    def _key(self, end: int, size: int) -> int:
        """A sum modulo 2^64."""
        key = 0
        for token in self._token_ids[end - size : end]:
            key = (key * MULTIPLIER + token + 1) & MASK
        return key

    def guess(self, count: int) -> list[int]:
        """At most `count` tokens that may come next: what followed at `place`, over and over if the text ends there."""
        if self.place < 0:
            return []
        found = self._token_ids[self.place : min(self.place + count, self.known)].tolist()
        while found and len(found) < count:
            found += found[: count - len(found)]
        return found
