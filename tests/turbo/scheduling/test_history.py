"""Draft tokens from a tenant's earlier answers: found within its namespace alone, and bounded."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from lmkit.config import EngineConfig
from lmkit.errors import ConfigError
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.scheduling import history
from lmkit.turbo.scheduling.history import History
from lmkit.turbo.scheduling.ngrams import Ngrams
from lmkit.turbo.sequence import Sequence
from tests.turbo.fakes import request
from tests.turbo.scheduling.test_speculation import Machine

QUESTION, ANSWER = [5, 6, 7, 8, 9, 10, 11, 12, 13], [21, 22, 23, 24, 25, 26]


def ended(prompt: list[int], answer: list[int], **fields: Any) -> Sequence:
    asked = request("r", prompt, **fields)
    return Sequence(asked, 0, 0.0, 0.0, token_ids=array("i", prompt + answer), max_tokens=99, eos_token_ids=())


def history_of(limit: int = 1000) -> History:
    return History(limit, lambda seq: (seq.request.tenant, seq.request.cache_salt))


def drafted(kept: History, text: list[int], count: int = 16, **fields: Any) -> list[int]:
    """The draft tokens after `text`, the prompt of a new sequence."""
    seq = ended(text, [], **fields)
    index = Ngrams(seq.token_ids, lambda: kept.of(seq))
    index.learn()
    return index.draft(count)


def test_an_answer_is_drafted_after_its_question_and_in_its_middle() -> None:
    kept = history_of()
    kept.add(ended([1, 2, *QUESTION], ANSWER))
    kept.add(ended([3, 4], [31, 32, 33, 34]))
    assert drafted(kept, [9, 9, *QUESTION]) == ANSWER
    assert drafted(kept, [9, 9, *QUESTION], 2) == ANSWER[:2]
    assert drafted(kept, [0, *ANSWER[:3]]) == ANSWER[3:]
    assert drafted(kept, [0, *ANSWER]) == [], "behind an answer stands another one, of other text"


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([*ANSWER[:4], 77], [ANSWER[5]]),
        ([*ANSWER[:3], ANSWER[4]], [ANSWER[5]]),
        ([*ANSWER[:5], 77], []),
        ([*ANSWER[:3], ANSWER[5]], []),
        ([*ANSWER[:3], 31], []),
    ],
    ids=["replaced", "deleted", "at the end", "all deleted", "of the next answer"],
)
def test_an_answer_goes_on_behind_an_edit_up_to_its_end(text: list[int], drafts: list[int]) -> None:
    kept = history_of()
    kept.add(ended(QUESTION, ANSWER))
    kept.add(ended([3, 4], [31, 32, 33, 34]))
    seq = ended(QUESTION, [])
    index = Ngrams(seq.token_ids, lambda: kept.of(seq))
    seq.token_ids += array("i", text)
    while index.known < len(seq.token_ids):
        index.learn()
    assert index.draft(9) == drafts


def test_the_longest_agreement_counts() -> None:
    """The own text agrees in three tokens, an answer in eight, a later one in four."""
    kept = history_of()
    kept.add(ended([1], [10, 11, 12, 13, 14, 15, 16, 17, 40]))
    kept.add(ended([1], [14, 15, 16, 17, 41]))
    own = [15, 16, 17, 42, 0]
    assert drafted(kept, [*own, 10, 11, 12, 13, 14, 15, 16, 17], 1) == [40]
    assert drafted(kept, [*own, 9, 14, 15, 16, 17], 1) == [41]
    assert drafted(kept, [*own, 9, 15, 16, 17], 1) == [42]


@pytest.mark.parametrize("other", [{"tenant": "b"}, {"tenant": "a", "cache_salt": "s"}, {"tenant": ""}], ids=str)
def test_no_answer_is_drafted_in_another_namespace(other: dict[str, str]) -> None:
    kept = history_of()
    kept.add(ended(QUESTION, ANSWER, tenant="a"))
    kept.add(ended(QUESTION, [41, 42, 43], **other))
    assert drafted(kept, QUESTION, tenant="a") == ANSWER
    assert drafted(kept, QUESTION, **other) == [41, 42, 43]
    assert drafted(kept, QUESTION, tenant="c") == []


def test_what_was_not_given_for_the_longest_time_is_dropped() -> None:
    """Also across a tenant's salts, whose texts share its limit."""
    kept, often, once = history_of(limit=200), list(range(100, 140)), list(range(200, 240))
    kept.add(ended([1], once))
    for turn in range(10):
        kept.add(ended([1], often, cache_salt=str(turn % 2)))
        assert kept.num_tokens <= 200
        assert drafted(kept, [0, *once[:4]]) == (once[4:20] if turn < 3 else [])
        assert drafted(kept, [0, *often[:4]], cache_salt=str(turn % 2)) == often[4:20]


def test_only_the_last_tenants_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_TENANTS", 2)
    kept = history_of()
    for tenant in "abac":
        kept.add(ended(QUESTION, ANSWER, tenant=tenant))
    assert [drafted(kept, QUESTION, tenant=tenant) for tenant in "abc"] == [ANSWER, [], ANSWER]


@pytest.mark.parametrize("limit", [0, 1, 2, 40])
def test_an_answer_longer_than_its_room_is_cut(limit: int) -> None:
    kept = history_of(limit)
    kept.add(ended([1], list(range(100, 200))))
    kept.add(ended(list(range(50)), []))
    assert kept.num_tokens <= limit
    assert drafted(kept, [0, 100, 101, 102]) == list(range(103, 118) if limit == 40 else [])


def test_the_same_question_again_takes_fewer_steps() -> None:
    """Tokens are checked by `finish`. What the first answer leaves is found by the same tenant alone."""
    num_steps = dict[str, int]()
    engine = Machine(max_draft_tokens=8, draft_history=1000)
    for name, tenant in (("first", "a"), ("other", "b"), ("again", "a")):
        before = engine.num_steps
        engine.finish([request(name, 20, max_tokens=60, tenant=tenant)])
        num_steps[name] = engine.num_steps - before
    assert num_steps["first"] == num_steps["other"] == 60
    assert num_steps["again"] < 20
    assert engine.scheduler.stats().history_tokens == 3 * (20 + 60 + 1)


def test_answers_are_not_kept_without_drafts() -> None:
    with pytest.raises(ConfigError, match="use speculate ngram"):
        Engine("nowhere", EngineConfig(draft_history=1000))
