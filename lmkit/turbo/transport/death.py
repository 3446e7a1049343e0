"""Why an engine process ended, in one line for the log and for clients."""

from __future__ import annotations

from lmkit.turbo.host_memory import gib, memory_limit
from lmkit.turbo.request import EngineInfo, EngineStats
from lmkit.turbo.transport.spawned import EngineProcess

LESS = "use a smaller --kv-memory, --max-batch-size or --max-step-tokens, a quantized model, or more memory"


def how_ended(lost: EngineProcess, info: EngineInfo | None, stats: EngineStats) -> str:
    """`the engine process ended with status 3`. A kill for lack of memory has its figures and what helps.

    info, stats: the last of the process; None if it has not been ready.
    """
    how = f"the engine process {lost.ended}"
    if not lost.was_killed_for_memory:
        return how if info is not None else f"{how}; its log says why"
    parts = "" if info is None else f" ({_parts(info, stats)})"
    had = f"it had {gib(lost.resident)}{parts}, " if lost.resident else ""
    return f"{how}: {had}the limit is {gib(memory_limit())}; {LESS}"


def _parts(info: EngineInfo, stats: EngineStats) -> str:
    """`weights 257.0 MiB, KV cache 0.80 of 1.20 GiB`"""
    return f"weights {gib(info.memory.get('weights', 0))}, KV cache {gib(kv_used(info, stats))} of {gib(_kv(info))}"


def kv_used(info: EngineInfo, stats: EngineStats) -> int:
    """Bytes of the KV cache that have been taken from the system."""
    return _kv(info) * stats.blocks_backed // stats.blocks_total if stats.blocks_total else 0


def _kv(info: EngineInfo) -> int:
    return info.memory.get("kv", 0)
