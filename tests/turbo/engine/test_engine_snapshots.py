"""Engines of models with recurrent states: a cached prefix, a preemption and chunks change no bit of an answer."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lmkit.config import EngineConfig
from lmkit.kv_dtype import FLOAT32
from lmkit.models.decoder import Decoder
from lmkit.models.loader import load_model
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from tests.models import tiny

SIZES: dict[str, Any] = {"block_size": 4, "max_step_tokens": 16, "max_model_len": 64, "kv_dtype": "float32"}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path = tmp_path_factory.mktemp("qwen3-next")
    tiny.make(path, "qwen3-next")
    return load_model(path)


def requests(rng: random.Random, count: int) -> list[Request]:
    """Prompts that go on from others' prompts, at any token."""
    texts: list[list[int]] = [[]]
    made = []
    for number in range(count):
        known = rng.choice(texts)
        prompt = known[: rng.randint(0, len(known))] + [rng.randrange(199) for _ in range(rng.choice([1, 3, 15]))]
        texts.append(prompt := prompt[:45])
        params = SamplingParams(
            max_tokens=rng.choice([1, 5, 14]), temperature=rng.choice([0.0, 1.0]), seed=number, logprobs=1,
            ignore_eos=True,
        )  # fmt: skip
        made += [
            Request(request_id=f"{number}.{i}", prompt_ids=prompt, params=params) for i in range(rng.choice([1, 1, 3]))
        ]
    return made


def answers(engine: Engine, made: list[Request], rng: random.Random) -> dict[str, list[Any]]:
    """The answers, with requests that come a few at a time."""
    found: dict[str, list[Any]] = {}
    coming = list(made)
    while coming or engine.has_work():
        for request in (taken := coming[: rng.randint(0, 4)]):
            engine.add(request)
        del coming[: len(taken)]
        for output in engine.step():
            assert output.finish_reason != "error"
            found.setdefault(output.request_id, []).extend(zip(output.token_ids, output.logprobs, strict=True))
        engine.check_integrity()
    return found


def test_snapshots_change_no_bit(decoder: Decoder) -> None:
    rng = random.Random(3)
    made = requests(rng, 30)
    plain = Engine.of(decoder, EngineConfig(**SIZES | {"max_step_tokens": 64}, max_batch_size=1, prefix_cache=False))
    expected = answers(plain, made, rng)
    plain.close()
    memory = 18 * 4 * sum(layer.kv_token_bytes(FLOAT32, FLOAT32) for layer in decoder.spec.layers)
    engine = Engine.of(decoder, EngineConfig(**SIZES, max_batch_size=5, kv_memory=memory))
    for _ in range(2):
        assert answers(engine, made, rng) == expected
    stats = engine.stats()
    engine.close()
    assert stats.preemptions > 3
    assert stats.prefix_hits > 0.3 * stats.prefix_tokens
    assert stats.snapshots_total == 80
    assert 0 < stats.snapshots_used <= 80
