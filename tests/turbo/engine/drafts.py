"""What a drafting head drafts, seen from tests."""

from __future__ import annotations

from typing import Any

import pytest

from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.runners.draft_head_runner import DraftHeadRunner
from lmkit.turbo.scheduling.model_speculation import ModelSpeculation
from lmkit.turbo.sequence import Sequence


@pytest.fixture(autouse=True)
def three_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What drafts beside the model drafts three tokens of each sequence in every step, whatever that costs."""

    def lengths(self: ModelSpeculation, sequences: list[Sequence], budget: int, rate: float) -> dict[Sequence, int]:
        wanted = {seq: min(3, self._longest_draft(seq)) for seq in sequences}
        return {seq: length for seq, length in wanted.items() if length > 0}

    monkeypatch.setattr(ModelSpeculation, "_model_lengths", lengths)


Seen = list[tuple[list[int], int, list[int]]]  # tokens of a text, the first whose stream is kept, drafts after them


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """A list that gets all draft tokens of the engine's head from now on."""
    drafter, seen = engine._drafter, Seen()
    assert isinstance(drafter, DraftHeadRunner)
    draft = drafter.draft

    def watched(lengths: dict[Any, int]) -> Any:
        found = draft(lengths)
        seen.extend((seq.token_ids.tolist(), drafter._texts[seq].start, drafts) for seq, drafts in found[0].items())
        return found

    monkeypatch.setattr(drafter, "draft", watched)
    return seen
