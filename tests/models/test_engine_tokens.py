"""The engine gives every family's greedy tokens as transformers does: in steps that several sequences share, after a
preemption, and after a prefix that the cache has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lmkit.config import EngineConfig
from lmkit.kv_dtype import FLOAT32
from lmkit.models.loader import load_model
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.engine.memory import RECORD_BYTES
from lmkit.turbo.request import Request, SamplingParams
from tests.models import tiny

PROMPT = torch.randint(0, 199, (30,), generator=torch.Generator().manual_seed(8)).tolist()
SIZES: dict[str, Any] = {"block_size": 8, "max_batch_size": 2, "max_step_tokens": 16, "max_model_len": 48}


def greedy(engine: Engine, prompts: list[list[int]], count: int = 16) -> list[list[int]]:
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        engine.add(Request(request_id=str(number), prompt_ids=prompt, params=params))
    found: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    while engine.has_work():
        for output in engine.step():
            assert not output.error
            found[output.request_id] += output.token_ids
    return list(found.values())


# transformers stretches the angles of llama-dynamic again while an answer grows (test_families.py).
@pytest.mark.parametrize("name", [name for name in tiny.FAMILIES if name != "llama-dynamic"])
def test_tokens_after_preemption_and_behind_a_prefix(tmp_path: Path, name: str) -> None:
    model = tiny.make(tmp_path, name)
    decoder = load_model(tmp_path)
    block = 8 * sum(layer.kv_token_bytes(FLOAT32, FLOAT32) for layer in decoder.spec.layers) or RECORD_BYTES
    prompts = [PROMPT, PROMPT[3:]]
    engine = Engine.of(decoder, EngineConfig(**SIZES, kv_dtype="float32", kv_memory=9 * block))
    together = greedy(engine, prompts)
    assert engine.stats().preemptions  # nine blocks do not hold both
    assert greedy(engine, prompts[:1]) == together[:1]
    engine.close()
    engine = Engine.of(decoder, EngineConfig(**SIZES, kv_dtype="float32", kv_memory=13 * block))
    for _ in range(2):  # what windows still see is kept, too
        assert greedy(engine, prompts[:1]) == together[:1]
    assert engine.stats().prefix_hits
    engine.close()
    for prompt, got in zip(prompts, together, strict=True):
        with torch.no_grad():
            rows = model(torch.tensor([prompt + got])).logits[0, len(prompt) - 1 : -1]
        best = rows.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-4  # else a last bit could decide
        assert got == rows.argmax(-1).tolist()
