"""Real KV that is computed again has the same bits, however it came about; a flipped bit is found wherever it lies."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lmkit.config import EngineConfig
from lmkit.kv_dtype import KV_DTYPES
from lmkit.models.loader import load_model
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.kv.radix_cache import HOLE
from lmkit.turbo.kv.tiers import record
from lmkit.turbo.request import Request, SamplingParams
from tests.models import tiny
from tests.turbo.engine.test_engine import engine_for, run, tokens
from tests.turbo.engine.test_engine_cache import always_load, settle

PROMPT = list(range(100, 229))


def ask(engine: Engine, name: str, prompt: list[int], count: int = 1, **fields: Any) -> list[int]:
    params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.7, seed=1)
    return tokens(run(engine, [Request(request_id=name, prompt_ids=prompt, params=params, **fields)])[name])


def audited(engine: Engine, name: str, prompt: list[int], **fields: Any) -> tuple[int, int]:
    """(audits that ended well, those that found a difference), after hits of this prompt."""
    for i in range(2):  # the first may be passed over, because the prompt was audited last
        ask(engine, f"{name}{i}", prompt, **fields)
    turns = engine.scheduler._next_turns
    while turns.audits:
        turns.allowance._left = 1.0
        engine.step()
    engine.check_integrity()
    stats = engine.stats().audits
    return stats["done"], stats["differences"]


def blocks_of(engine: Engine, prompt: list[int], tenant: str = "") -> list[int]:
    found = [cache.match((tenant, ""), np.array(prompt, np.int32)).blocks for cache in engine.scheduler.kv.caches]
    return [block for blocks in found for block in blocks if block != HOLE]


def flip(engine: Engine, block: int) -> None:
    part = engine.runner._blocks.parts[-1]  # type: ignore[attr-defined]
    part[block, 5] ^= 4


@pytest.mark.parametrize("kv_dtype", [*KV_DTYPES])
def test_every_storage_repeats_its_bits(demo_model: Path, kv_dtype: Any) -> None:
    """Of a prompt in odd chunks beside others, of decoded tokens, and of drafted ones."""
    engine = engine_for(demo_model, kv_dtype=kv_dtype, audit=1, max_step_tokens=37, block_size=8, speculate="ngram")
    beside = [Request(request_id=f"x{i}", prompt_ids=[7 + i] * 20, params=SamplingParams(max_tokens=30, seed=0))
              for i in range(2)]  # fmt: skip
    wanted = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0, seed=1)
    answer = tokens(run(engine, [*beside, Request(request_id="a", prompt_ids=PROMPT, params=wanted)])["a"])
    assert audited(engine, "b", [*PROMPT, *answer, 5]) == (1, 0)
    flip(engine, blocks_of(engine, [*PROMPT, *answer])[12])
    assert audited(engine, "c", [*PROMPT, *answer, 5])[1] == 1
    assert audited(engine, "d", [*PROMPT, *answer, 5])[1] == 1
    engine.close()


FAMILIES = ["qwen2-window", "gemma3", "deepseek-v3", "qwen3-next", "lfm2", "mamba2", "falcon-h1"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_layer_repeats_its_bits(family: str, tmp_path: Path) -> None:
    tiny.make(tmp_path, family)
    sizes: dict[str, Any] = {"block_size": 4, "max_step_tokens": 16, "max_model_len": 64, "kv_memory": 8 << 20}
    engine = Engine.of(load_model(tmp_path), EngineConfig(audit=1, **sizes))
    prompt = [(7 * i + 3) % 190 for i in range(33)]
    answer = ask(engine, "a", prompt, 9)
    done, differences = audited(engine, "b", [*prompt, *answer, 5])
    assert (done >= 1, differences) == (True, 0)
    if engine.runner._blocks.parts:  # type: ignore[attr-defined]
        flip(engine, blocks_of(engine, [*prompt, *answer])[-1])
        assert audited(engine, "c", [*prompt, *answer, 5])[1] == 1
    engine.close()


def test_a_flipped_state_is_found(tmp_path: Path) -> None:
    tiny.make(tmp_path, "qwen3-next")
    sizes: dict[str, Any] = {"block_size": 4, "max_step_tokens": 16, "max_model_len": 64, "kv_memory": 8 << 20}
    engine = Engine.of(load_model(tmp_path), EngineConfig(audit=1, **sizes))
    prompt = [(7 * i + 3) % 190 for i in range(33)]
    ask(engine, "a", prompt)
    snapshots = engine.scheduler.kv.snapshots
    assert snapshots is not None
    for row in snapshots._of_block.values():
        engine.runner._blocks._states[0][row, 3] ^= 1  # type: ignore[attr-defined]
    assert audited(engine, "b", prompt) == (0, 1)
    assert audited(engine, "c", prompt)[1] == 1
    engine.close()


def in_host(engine: Engine) -> None:
    """Host memory whose checksum fits: the copy was wrong when it was made."""
    assert engine._tiers is not None
    host = engine._tiers._host
    assert host is not None
    key, block = list(host._blocks.items())[3]
    data = bytearray(block.data)
    data[77] ^= 1
    host._blocks[key] = block._replace(data=memoryview(data), crc=record.checksum(key, memoryview(data)))


def on_disk(engine: Engine) -> None:
    """A file whose checksum fits."""
    assert engine._tiers is not None
    disk = engine._tiers._disk
    assert disk is not None
    key = sorted(disk._index)[3]
    data = bytearray(engine._tiers.blocks.nbytes)
    assert disk.read(key, memoryview(data)) is not None
    data[99] ^= 2
    assert disk.write(key, memoryview(data), record.checksum(key, memoryview(data)))


@pytest.mark.parametrize(
    ("options", "plant", "source"),
    [({"kv_host_memory": 64 << 20}, in_host, "tier host"), ({"kv_disk_path": "kv"}, on_disk, "tier disk")],
)
def test_a_flipped_bit_below_is_found(
    demo_model: Path,
    tmp_path: Path,
    options: dict[str, Any],
    plant: Callable[[Engine], None],
    source: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = {name: str(tmp_path / value) if isinstance(value, str) else value for name, value in options.items()}
    engine = engine_for(demo_model, audit=1, **options)
    always_load(engine)
    ask(engine, "a", PROMPT)
    settle(engine)
    plant(engine)
    for cache in engine.scheduler.kv.caches:
        cache.clear()
    assert audited(engine, "b", PROMPT)[1] == 1
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert f"loaded from {source}" in line
    settle(engine)
    for cache in engine.scheduler.kv.caches:
        cache.clear()
    assert audited(engine, "c", PROMPT)[1] == 1  # what the tiers have now is right
    engine.close()


def test_a_bit_that_flips_on_its_way_from_another_node_is_found(
    demo_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = tmp_path / "kv.key"
    key.touch(0o600)
    key.write_text("0123456789abcdef" * 2)
    first = engine_for(demo_model, kv_host_memory=64 << 20, kv_listen="127.0.0.1:0", kv_key_file=str(key))
    ask(first, "a", PROMPT)
    settle(first)
    assert first._block_server is not None
    peer = f"127.0.0.1:{first._block_server.address[1]}"
    second = engine_for(demo_model, audit=1, kv_peer=peer, kv_key_file=str(key))
    always_load(second)
    tiers, seen = second._tiers, list[bytes]()
    assert tiers is not None
    arrived = tiers._arrived

    def flipped(name: bytes, block: int, data: memoryview) -> None:
        seen.append(name)
        if len(seen) == 4:  # behind the checks of the connection
            data = memoryview(bytearray(data))
            data[50] ^= 8
        arrived(name, block, data)

    tiers._arrived = flipped  # type: ignore
    assert audited(second, "b", PROMPT)[1] == 1
    assert len(seen) >= 16
    assert "loaded from tier peer" in caplog.text
    first.close()
    second.close()


def test_swapped_blocks_of_two_tenants_are_found(demo_model: Path) -> None:
    engine = engine_for(demo_model, audit=1)
    other = PROMPT[::-1]
    right = {tenant: ask(engine, tenant, prompt, 8, tenant=tenant) for tenant, prompt in (("t", PROMPT), ("u", other))}
    a, b = blocks_of(engine, PROMPT, "t")[6], blocks_of(engine, other, "u")[6]
    for part in engine.runner._blocks.parts:  # type: ignore[attr-defined]
        part[[a, b]] = part[[b, a]]
    audited(engine, "v", PROMPT, tenant="t")
    assert audited(engine, "w", other, tenant="u")[1] == 2
    assert {tenant: ask(engine, tenant, prompt, 8, tenant=tenant) for tenant, prompt in (("t", PROMPT), ("u", other))
            } == right  # fmt: skip
    engine.close()


def test_adapters_and_salts_are_audited_as_such(demo_model: Path) -> None:
    engine = engine_for(demo_model, audit=1)
    ask(engine, "a", PROMPT, cache_salt="s", tenant="t")
    assert audited(engine, "b", PROMPT, cache_salt="s", tenant="t") == (1, 0)
    engine.close()


def test_what_gives_other_bits_is_not_audited(demo_model: Path) -> None:
    shared = EngineConfig(tp=2)
    assert not shared.is_invariant
    assert msgspec.structs.replace(shared, deterministic=True).is_invariant
    assert not EngineConfig().on("cuda").is_invariant
