"""Drafts of a sequence's next tokens, looked up in known text (prompt lookup decoding): what followed the last tokens
where they stood before. The text is the sequence's own, and other texts that it is given (history.py).

Code that is edited, quoted documents and structured answers repeat long parts of what is there. A draft costs a few
look-ups in dictionaries, and the text is indexed as it grows.

A long run of accepted drafts ends where the text was edited. Its source is not given up: the text goes on after the
next token that both have, or one token further, where one was replaced.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

import numpy as np

LONG, SHORT = 8, 3  # tokens that are looked up: the long ones first
LONGEST = 32  # agreeing tokens that are told apart
RUN = 6  # agreeing tokens after which a rejected draft token is an edit
WINDOW = 16  # tokens of the source, from that draft token on, in which it may go on
MULTIPLIER, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
END = -1  # in token_ids: after a text that others follow


class Index:
    """The places of the n-grams of `token_ids`. A place is the position after the n-gram that came last."""

    def __init__(self, token_ids: array[int]) -> None:
        self.token_ids = token_ids
        self.places: dict[int, dict[int, int]] = {LONG: {}, SHORT: {}}  # by size: places by the n-gram's key
        self.known = 0  # tokens that are indexed

    def extend(self, end: int) -> None:
        """Index the n-grams up to `end`, all at once."""
        factor, one = np.uint64(MULTIPLIER), np.uint64(1)
        for size, places in self.places.items():
            first = max(self.known - size + 1, 0)
            tokens = np.array(self.token_ids[first:end], np.int64).astype(np.uint64)
            count = len(tokens) - size + 1
            if count > 0:
                keys = np.zeros(count, np.uint64)
                for i in range(size):
                    keys = keys * factor + tokens[i : i + count] + one
                places.update(zip(keys.tolist(), range(first + size, end + 1), strict=True))
        self.known = max(end, 0)


class Ngrams:
    """The index of one text, and the place that the text repeats now, in itself or in one of the `others`.

    `place` is the position of the draft for the next token, -1 if there is none. `agreed` is the number of tokens
    before it that agree with the text's last ones, at most LONGEST. After an edit they are counted from there: 0 if the
    last token was replaced, 1 at the first that both texts have.
    """

    def __init__(self, token_ids: array[int], others: Callable[[], Iterable[Index]] = tuple) -> None:
        self._own, self._others = Index(token_ids), others
        self._source = token_ids  # the text of `place`
        self.place, self.agreed = -1, 0
        self._edit = array("i"), 0  # a text, and the place in it where the last long run ended
        self._resumed = False  # whether `place` was found after an edit
        self._own.extend(len(token_ids) - 1)

    @property
    def known(self) -> int:
        """Tokens that are indexed."""
        return self._own.known

    def learn(self) -> tuple[int, bool] | None:
        """Take in the next token of the text. Returns (`agreed` before it, whether the draft for it was right), or None
        if there was no draft token.
        """
        token, place, agreed = self._own.token_ids[self.known], self.place, self.agreed
        self._own.known += 1
        right = place >= 0 and self._source[place] == token
        self.place, self.agreed = -1, 0
        if not right:
            self._resume(token, place, ends_run=agreed >= (SHORT if self._resumed else RUN))
        elif self._source[place + 1] != END:
            self.place, self.agreed = place + 1, min(agreed + 1, LONGEST)
        self._index(self.known)
        return (agreed, right) if place >= 0 else None

    def _resume(self, token: int, wrong: int, *, ends_run: bool) -> None:
        """Go on in the source after an edit, if `token` was inserted, replaced, or follows deleted ones. `wrong` is
        the place of a rejected draft token.
        """
        if ends_run:
            self._edit = self._source, wrong
        source, edit = self._edit
        end = self.known - 1 if source is self._own.token_ids else len(source)
        window = source[edit : min(edit + WINDOW, end)]
        if token in window:
            place, agreed = edit + window.index(token) + 1, 1
        elif ends_run:
            place, agreed = edit + 1, 0
        else:
            return
        if END not in source[edit : place + 1]:
            self._source, self.place, self.agreed, self._resumed = source, place, agreed, True

    def _index(self, end: int) -> None:
        """Index the n-grams that end at `end`. If there is no draft, or few tokens before it agree, look up where they
        stood before.
        """
        for size, places in self._own.places.items():
            if end >= size:
                key = self._key(end, size)
                if self.agreed < SHORT:
                    for index in (self._own, *self._others()):
                        if key in index.places[size]:
                            self._take(index.token_ids, index.places[size][key], end)
                places[key] = end

    def _take(self, source: array[int], place: int, end: int) -> None:
        """Draft what follows at `place`, if the tokens before it agree: two n-grams may have one key. The longest
        agreement counts.
        """
        tokens, agreed = self._own.token_ids, 0
        while agreed < min(place, LONGEST) and source[place - 1 - agreed] == tokens[end - 1 - agreed]:
            agreed += 1
        if agreed >= max(SHORT, self.agreed + 1) and source[place] != END:
            self._source, self.place, self.agreed, self._resumed = source, place, agreed, False

    def _key(self, end: int, size: int) -> int:
        """A sum modulo 2^64."""
        key = 0
        for token in self._own.token_ids[end - size : end]:
            key = (key * MULTIPLIER + token + 1) & MASK
        return key

    def draft(self, count: int) -> list[int]:
        """At most `count` tokens that may come next: what followed at `place`. Where the own text ends they go on from
        `place` again.
        """
        if self.place < 0:
            return []
        found = self._source[self.place : self.place + count].tolist()
        if self._source is not self._own.token_ids:
            return found[: found.index(END)] if END in found else found
        del found[self.known - self.place :]
        while len(found) < count:
            found += found[: count - len(found)]
        return found
