"""The memory that engines would take, found before any is started.

    python -m lmkit.turbo.engine.sizes < query.json

Opening a checkpoint imports torch, so the front end asks a process that ends with its answer.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from lmkit.config import EngineConfig
from lmkit.ended import MemoryKills
from lmkit.errors import CheckpointError, ConfigError, LMKitError, UnsupportedError
from lmkit.turbo.host_memory import gib

_ERRORS = {kind.__name__: kind for kind in (ConfigError, CheckpointError, UnsupportedError)}


class Query(msgspec.Struct, frozen=True):
    models: list[tuple[str, str, EngineConfig]]  # name, path, configuration
    budget: int | None  # bytes for all; None = what is free


class Sizes(msgspec.Struct, frozen=True, tag=True):
    budget: int
    engines: list[tuple[int, int]]  # of each model: bytes of the whole engine, and of these the KV cache


class Failed(msgspec.Struct, frozen=True, tag=True):
    kind: str  # class name of the LMKitError
    message: str


async def sizes(models: Sequence[tuple[str, str, EngineConfig]], budget: int | None) -> Sizes:
    """Raises the LMKitError of opening a checkpoint, and ConfigError for a model that does not fit the budget."""
    pipe, kills = asyncio.subprocess.PIPE, MemoryKills()
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", __name__, stdin=pipe, stdout=pipe)
    try:
        answer, _ = await process.communicate(msgspec.json.encode(Query(list(models), budget)))
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            process.kill()
        raise
    if process.returncode != 0:
        how = kills.ended(process.returncode or 0)
        raise LMKitError(f"the memory of the models cannot be planned: the process {how}; its log says why")
    found = msgspec.json.decode(answer, type=Sizes | Failed)
    if isinstance(found, Failed):
        raise _ERRORS.get(found.kind, LMKitError)(found.message)
    return found


def _sizes(query: Query) -> Sizes:
    from lmkit import conflicts
    from lmkit.models.resolved import resolved
    from lmkit.turbo.engine import copies
    from lmkit.turbo.engine.loading import load_options
    from lmkit.turbo.engine.memory import loaded_bytes, plan_memory
    from lmkit.turbo.runners.devices import resolve_device

    budget, found = query.budget, []
    for name, path, config in query.models:
        device = resolve_device(config)
        free = device.free_memory()
        config = config.on(device.name, free)
        budget = free if budget is None else budget
        conflicts.check(config, *device.traits)
        with resolved(path, **load_options(config)) as model:
            model.check_cut()
            weights = loaded_bytes(model, config)
            shares = config.num_shares
            dtypes = [storage.dtypes for storage in model.storages]
            try:
                share, copied = budget // shares, copies.planned_bytes(model, config)
                plan = plan_memory(model.spec, config, dtypes, weights, share, copied)
            except ConfigError as error:
                raise ConfigError(f"{name} does not fit a memory budget of {gib(budget)}: {error}") from None
        parts = plan.as_dict() | ({"host": 0} if device.facts.own_memory else {})
        found.append((shares * sum(parts.values()), shares * plan.kv))
    assert budget is not None
    return Sizes(budget, found)


def main() -> None:
    answer: Sizes | Failed
    try:
        answer = _sizes(msgspec.json.decode(sys.stdin.buffer.read(), type=Query))
    except LMKitError as error:
        answer = Failed(type(error).__name__, str(error))
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
