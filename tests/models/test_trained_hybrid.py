"""The trained hybrid predicts text, and so does its layer for multi-token prediction."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmkit.config import EngineConfig
from lmkit.quant.report.evaluate import HELDOUT_TEXT, encode_text, evaluate
from lmkit.text import Tokenizer
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from tests.turbo.engine.drafts import watch
from tests.turbo.engine.test_drafting import drafts_always_pay, shown
from tests.turbo.engine.test_engine import run

__all__ = ["drafts_always_pay"]
TRAINED_HYBRID = Path(__file__).parents[1] / "data" / "qwen3_5"


def test_it_predicts_held_out_text() -> None:
    found = evaluate(TRAINED_HYBRID, encode_text(TRAINED_HYBRID), seq_len=256, limit=2048)
    assert found.perplexity < 30  # of 4,096 tokens


def test_its_layer_drafts_what_it_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the tokens are those without draft tokens, also after prefixes that the cache has."""
    text = Tokenizer.from_pretrained(TRAINED_HYBRID).encode(HELDOUT_TEXT.read_text()[:12_000])
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    requests = [
        Request(request_id=f"{length}", prompt_ids=text[start : start + length], params=params)
        for start, length in ((0, 200), (500, 130), (1000, 64), (1500, 90))
    ]
    sizes = {"max_batch_size": 4, "max_model_len": 512, "block_size": 16, "kv_memory": 64 << 20}
    plain = Engine(str(TRAINED_HYBRID), EngineConfig(**sizes))
    want = shown(run(plain, requests))
    plain.close()
    engine = Engine(str(TRAINED_HYBRID), EngineConfig(**sizes, speculate="mtp", max_draft_tokens=1))
    seen = watch(engine, monkeypatch)
    for _ in range(2):
        assert shown(run(engine, requests)) == want
    assert engine.stats().prefix_hits
    engine.close()
    whole = {tuple(request.prompt_ids): [*request.prompt_ids, *want[request.request_id][0]] for request in requests}
    right = wrong = 0
    for tokens, _, drafts in seen:
        answer = next(text for prompt, text in whole.items() if tuple(tokens[: len(prompt)]) == prompt)
        for draft, token in zip(drafts, answer[len(tokens) :], strict=False):
            right, wrong = right + (draft == token), wrong + (draft != token)
    assert right > 0.5 * (right + wrong)
