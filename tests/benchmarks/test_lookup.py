"""Drafts of known answers, without an engine."""

from __future__ import annotations

from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import given

from benchmarks.lookup import Longest, measure
from lmkit.turbo.scheduling.ngrams import SHORT, Ngrams


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.data())
def test_the_longest_suffix_that_stood_before_is_found(text: list[int], data: st.DataObject) -> None:
    num_prompt = data.draw(st.integers(1, len(text)))
    token_ids = array("i", text[:num_prompt])
    drafter = Longest(token_ids)
    for end in range(num_prompt, len(text) + 1):
        token_ids.extend(text[len(token_ids) : end])
        drafter.learn()
        agreed = {place: _agreement(text, place, end) for place in range(1, end)}
        most = max(agreed.values(), default=0)
        if most >= SHORT:
            assert drafter.agreed == agreed[drafter.place] == most


def _agreement(text: list[int], place: int, end: int) -> int:
    return next((n for n in range(place) if text[place - 1 - n] != text[end - 1 - n]), place)


@pytest.mark.parametrize("proposer", [Ngrams, Longest])
def test_a_copy_takes_few_steps_and_cheap_ones_pay(proposer: type[Ngrams]) -> None:
    text = list(range(200))
    ratio, tokens_a_step = measure([(text + text[:8], text[8:])], proposer, 0.1)
    assert 1 < ratio < tokens_a_step <= 17
    assert measure([(text, list(range(300, 400)))], proposer, 0.1) == (1.0, 1.0)
    assert measure([(text + text[:8], text[8:])], proposer, 1.0) == (1.0, 1.0)
