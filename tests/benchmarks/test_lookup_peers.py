"""A model that counts, and what prompt lookup drafts of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cpu_peers import SIZES
from benchmarks.lookup_peers import CONTEXT, NUM_TOKENS, prompts
from benchmarks.peers.lmkit_engine import LmkitEngine, prepare
from benchmarks.peers.protocol import Options, follow
from benchmarks.random_llama import make_checkpoint
from lmkit.turbo.scheduling import speculation


@pytest.mark.slow
def test_a_model_counts_and_its_copies_are_drafted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation.StepTimes, "record", lambda self, counts, seconds: None)  # draft tokens pay
    shape = SIZES["tiny"]
    make_checkpoint(tmp_path / "checkpoint", shape, counts=True)
    prepare(tmp_path / "checkpoint", tmp_path / "awq")
    engine = LmkitEngine(Options(tmp_path / "awq", 1, 1, CONTEXT, shape.vocab, drafts=10))
    accepted = {}
    for kind, prompt in prompts(shape.vocab).items():
        before = engine.engine.stats().accepted_tokens
        found = follow(engine, prompt, NUM_TOKENS)
        assert found["ids"] == list(range(prompt[-1] + 1, prompt[-1] + 1 + NUM_TOKENS)), kind
        accepted[kind] = engine.engine.stats().accepted_tokens - before
    assert accepted["copy"] > accepted["edit"] > accepted["fresh"] == 0
