"""Options of weights that are read in every step, and the batch whose computing takes as long as reading."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path

import msgspec

from lmkit.config import BATCH_SIZE, MAX_BATCH_SIZE, EngineConfig
from lmkit.errors import ConfigError
from lmkit.models.stream_plan import Forecast, Streaming
from lmkit.turbo.engine.memory import MemoryPlan

_SEQUENCE = 256  # tokens of KV that there must be for each sequence of a batch beyond BATCH_SIZE


def streaming_of(config: EngineConfig) -> Streaming | None:
    """How the engine streams weights, if it does."""
    if config.weights_memory is None:
        return None
    folder = Path(config.weights_path) if config.weights_path else None
    return Streaming(config.weights_memory, folder, config.tokens_per_step)


def with_batch(config: EngineConfig, forecast: Forecast, plan: Callable[[EngineConfig], MemoryPlan]) -> EngineConfig:
    """`config` with a batch whose computing takes as long as reading the layers of a step.

    A batch that was asked for stays. Otherwise it is BATCH_SIZE, or more if reading takes longer than that and the KV
    cache has _SEQUENCE tokens for each sequence. Draft tokens fill a step too, so with speculation it is BATCH_SIZE.
    Half of the largest step is left for prompts. `plan` makes the memory plan of a configuration, or raises
    ConfigError.
    """

    def of(batch_size: int) -> EngineConfig:
        step_tokens = config.max_step_tokens or max(config.tokens_per_step, 2 * batch_size)
        return msgspec.structs.replace(config, max_batch_size=batch_size, max_step_tokens=step_tokens)

    def is_too_large(batch_size: int) -> bool:
        try:
            return plan(of(batch_size)).num_tokens < _SEQUENCE * batch_size
        except ConfigError:
            return True

    if config.max_batch_size is not None:
        return config
    most = min(forecast.hiding, MAX_BATCH_SIZE, config.max_step_tokens or MAX_BATCH_SIZE)
    larger = range(BATCH_SIZE + 1, most + 1 if config.speculate == "off" else 0)
    return of(BATCH_SIZE + bisect_left(larger, True, key=is_too_large))
