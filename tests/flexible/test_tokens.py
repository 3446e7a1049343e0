"""The engine gives transformers' greedy tokens of architectures that lmkit has no family for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lmkit.config import EngineConfig
from lmkit.kv_dtype import FLOAT32
from lmkit.models.loader import load_model
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from tests.flexible import tiny
from tests.models.test_engine_tokens import greedy

PROMPT = torch.randint(3, 199, (30,), generator=torch.Generator().manual_seed(8)).tolist()
SIZES: dict[str, Any] = {
    "block_size": 8, "max_batch_size": 2, "max_step_tokens": 16, "max_model_len": 48, "num_threads": 1,
}  # fmt: skip


def check(model: torch.nn.Module, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """Each token is the likeliest one, and not by so little that a last bit could decide."""
    for prompt, got in zip(prompts, answers, strict=True):
        with torch.no_grad():
            rows = model(input_ids=torch.tensor([prompt + got]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        best = rows.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-4
        assert got == rows.argmax(-1).tolist()


@pytest.mark.parametrize("name", tiny.ALL)
def test_tokens_in_chunks_in_batches_and_behind_a_prefix(tmp_path: Path, name: str) -> None:
    model = tiny.make(tmp_path, name)
    engine = Engine.of(load_model(tmp_path, model_impl="flexible"), EngineConfig(**SIZES))
    prompts = [PROMPT, PROMPT[3:], PROMPT[:1]]
    together = greedy(engine, prompts, 10)
    again = greedy(engine, prompts[:1], 10)
    hits = engine.stats().prefix_hits
    engine.close()
    check(model, prompts, together)
    assert again == together[:1]
    assert bool(hits) == (name not in tiny.OWN)


@pytest.mark.parametrize("name", ["stablelm", "jamba", "bloom"])
def test_tokens_after_a_preemption(tmp_path: Path, name: str) -> None:
    model = tiny.make(tmp_path, name)
    decoder = load_model(tmp_path, model_impl="flexible")
    block = 8 * sum(layer.kv_token_bytes(FLOAT32, FLOAT32) for layer in decoder.spec.layers)
    engine = Engine.of(decoder, EngineConfig(**SIZES, kv_memory=9 * block))
    prompts = [PROMPT, PROMPT[3:]]
    answers = greedy(engine, prompts, 16)
    assert engine.stats().preemptions  # nine blocks do not hold both
    engine.close()
    check(model, prompts, answers)


@pytest.mark.parametrize("name", ["olmo", "cohere2", "jamba"])
def test_draft_tokens_change_nothing(tmp_path: Path, name: str) -> None:
    model = tiny.make(tmp_path, name)
    config = EngineConfig(**SIZES, speculate="ngram", max_draft_tokens=3)
    engine = Engine.of(load_model(tmp_path, model_impl="flexible"), config)
    prompts = [(PROMPT[:5] * 6)[:24], PROMPT[:8] * 3]
    answers = greedy(engine, prompts, 16)
    engine.close()
    check(model, prompts, answers)


@pytest.mark.parametrize(("name", "kv_dtype"), [("stablelm", "int8"), ("bloom", "int4"), ("stablelm", "fp8")])
def test_rounded_keys_and_values_are_close(tmp_path: Path, name: str, kv_dtype: Any) -> None:
    model = tiny.make(tmp_path, name)
    engine = Engine.of(load_model(tmp_path, model_impl="flexible"), EngineConfig(**SIZES, kv_dtype=kv_dtype))
    answers = greedy(engine, [PROMPT], 10)
    engine.close()
    with torch.no_grad():
        rows = model(input_ids=torch.tensor([PROMPT + answers[0]]), use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    chosen = rows.gather(1, torch.tensor(answers[0])[:, None])[:, 0]
    assert (rows.amax(-1) - chosen).max() < 0.1 * rows.std()


def test_scores_of_prompts_are_those_of_transformers(tmp_path: Path) -> None:
    model = tiny.make(tmp_path, "gpt_neox")
    engine = Engine.of(load_model(tmp_path, model_impl="flexible"), EngineConfig(**SIZES))
    params = SamplingParams(max_tokens=1)
    engine.add(Request(request_id="0", prompt_ids=PROMPT, params=params, prompt_logprobs=True))
    scores = list[float]()
    while engine.has_work():
        for output in engine.step():
            scores += [each.logprob for each in output.prompt_logprobs]
    engine.close()
    with torch.no_grad():
        rows = model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0].log_softmax(-1)
    wanted = rows[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(scores), wanted, atol=1e-4, rtol=0)
