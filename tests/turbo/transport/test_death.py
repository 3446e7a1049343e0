"""An engine that the kernel kills for lack of memory: the log and the clients learn why, with figures and options."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from lmkit import ended
from lmkit.errors import LMKitError, RequestError
from lmkit.turbo.request import EngineInfo, EngineStats
from lmkit.turbo.transport import async_engine, death
from tests.turbo.transport.test_async_engine import collect, make, request, run, running, until
from tests.turbo.transport.test_hangs import engines

LACK = "was killed by the kernel for lack of memory: "
INFO = EngineInfo(
    model_path="", vocab_size=1, max_model_len=1, num_blocks=1, block_size=1, kv_dtype="int8",
    memory={"weights": 300 << 20, "kv": 200 << 20},
)  # fmt: skip


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernel's counter, which holds one number."""
    counter = [5]
    monkeypatch.setattr(ended, "_kills", lambda root: counter[0])
    return counter


def test_a_kill_for_memory_is_named(kills: list[int], caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> RequestError:
        async with running() as engine:
            steps = asyncio.create_task(collect(engine, request("SLOW", max_tokens=None)))
            await until(lambda: engine.stats().num_running == 1 and engine.resident > 0)
            kills[0] += 1
            assert engine.engine_pid is not None
            os.kill(engine.engine_pid, signal.SIGKILL)
            with pytest.raises(RequestError) as error:
                await steps
            await until(lambda: engine.state == "ready")
            assert len(await collect(engine, request())) == 8
            return error.value

    found: list[RequestError] = []

    async def keep() -> None:
        found.append(await main())

    run(keep())
    (error,) = found
    assert error.code == "engine_unavailable"
    assert error.message.startswith(f"{async_engine.STOPPED}: the engine process {LACK}")
    (line,) = [record.getMessage() for record in caplog.records if LACK in record.getMessage()]
    assert "it had " in line
    assert "weights 0.0 MiB, KV cache 0.0 MiB of 128.0 MiB), the limit is " in line
    assert line.endswith(death.LESS)
    assert "--kv-memory" in line
    assert "status" not in line


def test_another_kill_is_no_lack_of_memory(kills: list[int], caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with running() as engine:
            assert engine.engine_pid is not None
            os.kill(engine.engine_pid, signal.SIGKILL)
            await until(lambda: engine.state == "restarting")
            await until(lambda: engine.state == "ready")

    run(main())
    assert "the engine process was ended by SIGKILL" in caplog.text
    assert LACK not in caplog.text


def test_a_kill_while_it_loads_is_named(kills: list[int], tmp_path: Path) -> None:
    async def main() -> None:
        starting = asyncio.create_task(make(tmp_path / "slow-to-load").start())
        await until(lambda: len(engines()) == 1)
        kills[0] += 1
        engines()[0].kill()
        with pytest.raises(LMKitError, match=rf"while starting, the engine process {LACK}.*the limit is .*--kv-memory"):
            await starting

    run(main())


def test_the_used_part_of_the_cache_is_told() -> None:
    assert death.kv_used(INFO, EngineStats(blocks_backed=3, blocks_total=10)) == 60 << 20
    assert death.kv_used(INFO, EngineStats()) == 0
