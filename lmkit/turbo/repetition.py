"""Answers that go round in circles: their last tokens stand in them again and again. No torch."""

from __future__ import annotations

from collections import Counter, deque

import msgspec

from lmkit.errors import RequestError

MAX_NGRAM = MAX_COUNT = 512
COUNT = 3  # unless a rule says another
WINDOW = 1024  # last tokens of an answer in which an n-gram is counted, as in LMDeploy


class RepetitionStop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An answer repeats itself when its last `ngram` tokens stand `count` times among its last 1,024 tokens."""

    ngram: int  # tokens; 0 = never
    count: int = COUNT

    def validate(self) -> None:
        """Raise RequestError for a number out of range."""
        limits = {"ngram": (0, MAX_NGRAM), "count": (2, MAX_COUNT)}
        for name, (least, most) in limits.items():
            if not least <= getattr(self, name) <= most:
                message = f"repetition_stop.{name}: must be in [{least}, {most}]"
                raise RequestError("invalid_request", message, "repetition_stop")


NEVER = RepetitionStop(ngram=0)
LMDEPLOYS = ("repetition_ngram_size", "repetition_ngram_threshold")  # its names for the two numbers
TWO_RULES = f"repetition_stop is one rule with {' and '.join(LMDEPLOYS)}; give one of them"
# Of reasoning that has a budget, unless the request says otherwise.
REASONING = RepetitionStop(ngram=64, count=4)


class Repetitions:
    """Reads the tokens of one answer and says when it repeats itself. A token costs the same wherever it stands."""

    def __init__(self, stop: RepetitionStop, reasoning_end: int = -1) -> None:
        """`reasoning_end`: see SamplingParams. Who ends the reasoning has one token for it before the answer ends."""
        self._stop, self._reasoning_end = stop, reasoning_end
        self._repeats = False
        self._restart()

    def push(self, token_id: int) -> bool:
        """Read the next token. Returns whether the answer is to end."""
        if not self._stop.ngram:
            return False
        if token_id == self._reasoning_end:
            self._restart()
            return False
        repeated_before, self._repeats = self._repeats, self._count(token_id) >= self._stop.count
        return self._repeats if self._reasoning_end < 0 else repeated_before

    @property
    def repeats(self) -> bool:
        """Whether the answer, or its reasoning, repeats itself with its last token."""
        return self._repeats

    def _restart(self) -> None:
        self._repeats = False
        self._last: deque[int] = deque(maxlen=self._stop.ngram)
        self._window: deque[tuple[int, ...]] = deque()  # the n-grams of the last tokens
        self._counts: Counter[tuple[int, ...]] = Counter()  # of these

    def _count(self, token_id: int) -> int:
        """How often the last n-gram stands in the window, with this token."""
        self._last.append(token_id)
        if len(self._last) < self._stop.ngram:
            return 0
        ngram = tuple(self._last)
        self._window.append(ngram)
        self._counts[ngram] += 1
        if len(self._window) > WINDOW - self._stop.ngram + 1:
            oldest = self._window.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
        return self._counts[ngram]
