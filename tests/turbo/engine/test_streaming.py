"""The batch of streamed weights: computing takes as long as reading, as far as the memory suffices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmkit.config import EngineConfig
from lmkit.errors import ConfigError
from lmkit.models.stream_plan import Forecast, plan_stream
from lmkit.turbo.engine.streaming import with_batch

PLAN = plan_stream([(100,)] * 10, 0, 500)


def sizes(seconds: float, tokens: int = 1 << 20, most: int = 4096, **options: Any) -> tuple[int, int]:
    """Batch and step for so many seconds of reading and 1 ms a token. The memory has so many tokens of KV, and a plan
    of more sequences than `most` is refused."""

    def plan(config: EngineConfig) -> Any:
        if config.sequences_per_step > most:
            raise ConfigError("too large")
        return SimpleNamespace(num_tokens=tokens)

    config = EngineConfig(weights_memory=500, **options).on("cpu")
    chosen = with_batch(config, Forecast(PLAN, PLAN.step_bytes / seconds, 0.001), plan)
    return chosen.sequences_per_step, chosen.tokens_per_step


def test_reading_decides() -> None:
    assert sizes(0.001) == sizes(0.0635) == (64, 512)
    assert sizes(0.0995) == (100, 512)
    assert sizes(0.2995) == (300, 600)
    assert sizes(100.0) == (4096, 8192)


def test_memory_bounds_it() -> None:
    assert sizes(0.2995, tokens=200 * 256) == (200, 512)
    assert sizes(0.2995, tokens=10) == (64, 512)
    assert sizes(0.2995, most=260) == (260, 520)


def test_what_was_asked_for_stays() -> None:
    assert sizes(0.2995, max_batch_size=7) == (7, 512)
    assert sizes(0.2995, max_step_tokens=100) == (100, 100)
    assert sizes(0.2995, max_step_tokens=1000) == (300, 1000)
    assert sizes(0.2995, speculate="ngram") == (64, 512)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_weights_in_memory_have_the_default(device: Any) -> None:
    config = EngineConfig().on(device)
    assert (config.sequences_per_step, config.tokens_per_step) == (64, {"cpu": 512, "cuda": 4096}[device])
