"""Drafts from a text itself: they follow the place whose tokens agree, also after an edit, and a prompt is indexed
as an answer is.
"""

from __future__ import annotations

from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lmkit.turbo.scheduling import ngrams
from lmkit.turbo.scheduling.ngrams import LONGEST, RUN, SHORT, WINDOW, Ngrams

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=80)


def learned(text: list[int], num_prompt: int) -> Ngrams:
    """The index of a text whose tokens come one by one after the prompt."""
    token_ids = array("i", text[:num_prompt])
    index = Ngrams(token_ids)
    index.learn()
    for token in text[num_prompt:]:
        token_ids.append(token)
        index.learn()
    return index


@given(TEXTS, st.data())
def test_the_tokens_before_a_draft_agree(text: list[int], data: st.DataObject) -> None:
    index = learned(text, data.draw(st.integers(1, len(text))))
    assert index.known == len(text)
    if index.place >= 0:
        count = index.agreed
        assert count <= LONGEST
        assert text[index.place - count : index.place] == text[len(text) - count :]
        assert index.draft(1) == [text[index.place]]


@given(st.lists(st.integers(0, 9), min_size=SHORT, max_size=30), st.data())
def test_few_tokens_agree_only_if_no_more_do(text: list[int], data: st.DataObject) -> None:
    """The text comes again with edits. Wherever its last tokens stood before, at least so many agree."""
    for _ in range(3):
        at = data.draw(st.integers(0, len(text)))
        text += (
            text[:at] + data.draw(st.lists(st.integers(0, 9), max_size=3)) + text[at + data.draw(st.integers(0, 3)) :]
        )
        text = text[-200:]
    ends = [text[end - SHORT : end] for end in range(SHORT, len(text))]
    assert (learned(text, SHORT).agreed >= SHORT) == (text[-SHORT:] in ends)


@pytest.mark.parametrize(
    ("edited", "drafts", "agreed"),
    [
        ([-2], [RUN + 1, RUN + 2, RUN + 3], 0),
        ([-2, RUN + 1], [RUN + 2, RUN + 3, RUN + 4], 1),
        ([-2, -3], [], 0),
        ([-2, -3, RUN], [RUN + 1, RUN + 2, RUN + 3], 1),
        ([RUN + 4], [RUN + 5, RUN + 6, RUN + 7], 1),
        ([RUN + WINDOW - 1], [RUN + WINDOW, RUN + WINDOW + 1, RUN + WINDOW + 2], 1),
        ([-2, RUN + WINDOW], [], 0),
    ],
    ids=["replaced", "one more", "another inserted", "inserted", "deleted", "many deleted", "too many deleted"],
)
def test_a_text_goes_on_behind_an_edit(edited: list[int], drafts: list[int], agreed: int) -> None:
    source = list(range(100))
    index = learned([*source, *range(RUN), *edited], len(source))
    assert (index.draft(3), index.agreed) == (drafts, agreed)


def test_a_short_run_is_no_edit() -> None:
    source = list(range(100))
    assert learned([*source, *range(RUN - 1), -2], len(source)).draft(3) == []


@given(TEXTS)
def test_a_repeated_end_is_found(text: list[int]) -> None:
    """Whatever stood before, three tokens that come a second time lead to what followed them."""
    index = learned([*text, 7, 8, 9, 5, 7, 8, 9], len(text))
    assert index.draft(3) == [5, 7, 8]
    assert index.draft(9) == [5, 7, 8, 9] * 2 + [5]


@given(TEXTS, st.data())
def test_a_prompt_is_indexed_as_an_answer_is(text: list[int], data: st.DataObject) -> None:
    whole, parts = learned(text, len(text)), learned(text, data.draw(st.integers(1, len(text))))
    assert whole._own.places == parts._own.places


def test_each_token_judges_the_draft_of_it() -> None:
    token_ids = array("i", [1, 2, 3, 4, 5, 1, 2, 3])
    index = Ngrams(token_ids)
    assert index.learn() is None
    assert (index.place, index.agreed) == (3, 3)
    token_ids.append(4)
    assert index.learn() == (3, True)
    token_ids.append(9)
    assert index.learn() == (4, False)
    assert index.draft(4) == []


def test_texts_with_one_key_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngrams, "MULTIPLIER", 0)  # the key is the last token alone
    assert learned([1, 2, 3, 4, 9, 9, 3], 3).draft(2) == []
    assert learned([1, 2, 3, 4, 1, 2, 3], 3).draft(2) == [4, 1]
