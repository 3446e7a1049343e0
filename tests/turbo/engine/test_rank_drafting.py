"""Draft models, heads and layers for multi-token prediction beside rank 0: the tokens are those of the ranks alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmkit.turbo.engine.engine import Engine
from tests.models import mtp
from tests.turbo.engine.drafts import three_drafts
from tests.turbo.engine.test_drafting import drafter_of, shown
from tests.turbo.engine.test_engine import requests_for, run
from tests.turbo.engine.test_mtp import requests, with_luck
from tests.turbo.engine.test_ranks import engine

__all__ = ["three_drafts"]


@pytest.fixture(scope="module")
def alone(demo_model: Path) -> dict[str, Any]:
    ranks = engine(demo_model, 2)
    found = shown(run(ranks, requests_for(demo_model)))
    ranks.close()
    return found


def assert_drafts(ranks: Engine) -> None:
    stats, drafter = ranks.stats(), drafter_of(ranks)
    assert 0 < stats.accepted_tokens <= stats.draft_tokens
    assert not drafter._has_failed
    assert not drafter._texts
    ranks.check_integrity()


@pytest.mark.parametrize("how", ["draft", "eagle"])
def test_tokens_are_those_of_the_ranks_alone(demo_model: Path, alone: dict[str, Any], how: str) -> None:
    """The head drafts through the model's own head, and each rank has a part of that."""
    ranks = engine(demo_model, 2, speculate=f"{how}={demo_model if how == 'draft' else 'demo'}")
    try:
        for _ in range(2):
            assert shown(run(ranks, requests_for(demo_model))) == alone
        assert_drafts(ranks)
    finally:
        ranks.close()


def test_a_layer_for_multi_token_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank computes the last layer for all tokens of a prompt."""
    mtp.make(tmp_path, "glm4-moe", num_hidden_layers=2)
    made, options = requests(3, max_tokens=12, temperature=0.7), {"max_step_tokens": 32}
    plain = engine(tmp_path, 2, **options)
    want = shown(run(plain, made))
    plain.close()
    ranks = engine(tmp_path, 2, **options, speculate="auto")
    try:
        with_luck(drafter_of(ranks), want, monkeypatch)
        assert shown(run(ranks, made)) == want
        assert_drafts(ranks)
    finally:
        ranks.close()
