"""A line of the log every ten seconds while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager

from lmkit.log import get_logger
from lmkit.turbo.request import EngineStats

PERIOD = 10.0  # seconds

log = get_logger(__name__)


@asynccontextmanager
async def load_logged(models: Mapping[str, Callable[[], EngineStats]]) -> AsyncGenerator[None]:
    """Write lines about each model while the block runs."""
    tasks = [asyncio.create_task(log_load(name, stats)) for name, stats in models.items()]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def log_load(name: str, stats: Callable[[], EngineStats], period: float = PERIOD) -> None:
    """Write the load of a model until cancelled."""
    before = stats()
    while True:
        await asyncio.sleep(period)
        now = stats()
        if line := load_line(before, now, period):
            log.info("load of %s: %s", name, line)
        before = now


def load_line(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """What an engine did between two looks at its figures; an empty text if it did nothing."""
    if now.steps < before.steps:  # it was started again
        before = EngineStats()
    if now.steps == before.steps and not now.num_waiting:
        return ""
    prompts = (now.prompt_tokens - before.prompt_tokens) / seconds
    answers = (now.generation_tokens - before.generation_tokens) / seconds
    queried = now.prefix_tokens - before.prefix_tokens
    found = now.prefix_hits - before.prefix_hits
    usage = now.blocks_used / now.blocks_total if now.blocks_total else 0.0
    line = (
        f"{now.num_running} running, {now.num_waiting} waiting, {prompts:.0f} prompt tokens/s, "
        f"{answers:.0f} tokens/s, {usage:.0%} of the KV blocks in use"
    )
    return line + (f", {found / queried:.0%} of prompt tokens cached" if queried else "")
