"""Answers that go round in circles."""

from __future__ import annotations

import numpy as np
import pytest

from lmkit.errors import RequestError
from lmkit.turbo.repetition import WINDOW, Repetitions, RepetitionStop


def first(tokens: list[int], stop: RepetitionStop, reasoning_end: int = -1) -> int | None:
    """The number of tokens after which an answer of these tokens is to end."""
    reader = Repetitions(stop, reasoning_end)
    return next((count for count, token in enumerate(tokens, 1) if reader.push(token)), None)


def counted(tokens: list[int], stop: RepetitionStop) -> int | None:
    """The same by the definition."""
    for end in range(stop.ngram, len(tokens) + 1):
        window, last = tokens[max(0, end - WINDOW) : end], tokens[end - stop.ngram : end]
        starts = range(len(window) - stop.ngram + 1)
        if sum(window[start : start + stop.ngram] == last for start in starts) >= stop.count:
            return end
    return None


@pytest.mark.parametrize("seed", range(20))
def test_an_answer_ends_where_the_definition_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stop = RepetitionStop(ngram=int(rng.integers(1, 6)), count=int(rng.integers(2, 6)))
    tokens = rng.integers(0, int(rng.integers(2, 40)), 400).tolist()
    assert first(tokens, stop) == counted(tokens, stop)


def test_what_left_the_window_does_not_count() -> None:
    stop = RepetitionStop(ngram=2, count=2)
    far = [1, 2, *range(10, 10 + WINDOW), 1, 2]
    near = [1, 2, *range(10, 6 + WINDOW), 1, 2]
    assert first(far, stop) is None
    assert first(near, stop) == counted(near, stop) == len(near)


def test_the_memory_of_a_long_answer_is_bounded() -> None:
    reader = Repetitions(RepetitionStop(ngram=3, count=5))
    assert not any(map(reader.push, range(5 * WINDOW)))
    assert len(reader._counts) == len(reader._window) < WINDOW


def test_without_an_ngram_nothing_repeats() -> None:
    assert first([7] * 100, RepetitionStop(ngram=0, count=0)) is None


def test_reasoning_may_be_ended_instead_of_the_answer() -> None:
    stop, end = RepetitionStop(ngram=2, count=3), 99
    assert first([1, 1, 1, 1, end, 5, 6, 7], stop, end) is None
    assert first([1, 1, 1, 1, 1, end], stop, end) == 5
    assert first([end, 1, 1, 1, 1, 1], stop, end) == 6


@pytest.mark.parametrize("rule", [(513, 2), (-1, 2), (4, 1), (4, 513)])
def test_numbers_out_of_range_are_refused(rule: tuple[int, int]) -> None:
    with pytest.raises(RequestError, match="repetition_stop"):
        RepetitionStop(ngram=rule[0], count=rule[1]).validate()
