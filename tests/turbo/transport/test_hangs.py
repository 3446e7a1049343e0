"""An engine process that hangs or dies at any moment, and a front end that cannot start another one."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from lmkit.errors import LMKitError, RequestError
from lmkit.turbo.transport import heartbeat
from lmkit.turbo.transport.async_engine import AsyncEngine
from lmkit.turbo.transport.spawned import EngineProcess
from tests.turbo.transport.test_async_engine import QUICK, collect, make, request, run, running, until


def pid_of(engine: AsyncEngine) -> int:
    assert engine.engine_pid is not None
    return engine.engine_pid


def endless(request_id: str = "r", **fields: Any) -> Any:
    return request("SLOW", request_id, max_tokens=None, **fields)


async def code_of(steps: asyncio.Task[Any]) -> str:
    with pytest.raises(RequestError) as error:
        await steps
    return error.value.code


def test_a_stopped_engine_is_replaced_and_its_requests_are_told() -> None:
    async def main() -> None:
        async with running(step_timeout=2) as engine:
            steps = asyncio.create_task(collect(engine, endless()))
            await until(lambda: engine.stats().num_running == 1)
            assert engine.health == "ready"
            pid = pid_of(engine)
            os.kill(pid, signal.SIGSTOP)
            await until(lambda: engine.health == "stalled")
            assert engine.state == "ready"
            assert await code_of(steps) == "engine_unavailable"
            await until(lambda: engine.health == "ready")
            assert pid_of(engine) != pid
            assert not psutil.pid_exists(pid)
            assert len(await collect(engine, request())) == 8

    run(main())


def test_an_engine_that_goes_on_in_time_is_kept() -> None:
    async def main() -> None:
        async with running() as engine:
            pid = pid_of(engine)
            steps = asyncio.create_task(collect(engine, request("SLOW", max_tokens=60)))
            await until(lambda: engine.stats().num_running == 1)
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(1)
            os.kill(pid, signal.SIGCONT)
            assert (await steps)[-1].finish_reason == "length"
            assert pid_of(engine) == pid

    run(main())


def test_a_step_that_never_ends_ends_the_process(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with running() as engine:
            steps = asyncio.create_task(collect(engine, request("HANG")))
            await until(lambda: engine.health == "stalled")  # half of the time has passed
            assert await code_of(steps) == "engine_unavailable"
            await until(lambda: engine.health == "ready")
            assert engine.num_starts == 2

    run(main())
    log = capfd.readouterr().err
    assert "a step hangs" in log
    assert "fake_engine.py" in log  # the stack of the thread that hangs
    assert f"status {heartbeat.HUNG}" in caplog.text


def test_a_deadline_holds_though_the_engine_is_silent() -> None:
    async def main() -> None:
        async with running() as engine:
            pid = pid_of(engine)
            wanted = [endless(f"r{i}", timeout=0.5) for i in range(2)]
            steps = [asyncio.create_task(collect(engine, each)) for each in wanted]
            await until(lambda: engine.stats().num_running == 2)
            os.kill(pid, signal.SIGSTOP)
            start = time.monotonic()
            assert [await code_of(each) for each in steps] == ["deadline_exceeded"] * 2
            assert time.monotonic() - start < 5
            assert engine.num_open == 0
            os.kill(pid, signal.SIGCONT)
            await until(lambda: engine.stats().num_running == 0)  # they are aborted there as well
            assert len(await collect(engine, request(timeout=30.0))) == 8
            assert pid_of(engine) == pid

    run(main())


def test_sockets_that_were_removed_are_made_anew() -> None:
    async def main() -> None:
        async with running() as engine:
            assert engine._folder.path is not None
            shutil.rmtree(engine._folder.path)
            assert len(await collect(engine, request())) == 8
            os.kill(pid_of(engine), signal.SIGKILL)
            await until(lambda: engine.state == "restarting")
            await until(lambda: engine.state == "ready")
            assert len(await collect(engine, request())) == 8

    run(main())


@pytest.mark.parametrize("failure", [OSError(24, "Too many open files"), ZeroDivisionError("secret")])
def test_any_exception_is_a_failed_start(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with running() as engine:

            async def fails(*_: Any) -> Any:
                raise failure

            monkeypatch.setattr(EngineProcess, "_execute", fails)
            os.kill(pid_of(engine), signal.SIGKILL)
            await engine.until_dead()
            assert engine.state == engine.health == "dead"
            assert engine.num_starts == 1 + QUICK.max_failures

    run(main())


def test_a_start_without_open_files_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async def fails(*_: Any) -> Any:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(EngineProcess, "_execute", fails)
        with pytest.raises(LMKitError, match="cannot be started: Too many open files"):
            await make().start()

    run(main())


def test_a_supervisor_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with running() as engine:

            async def fails(*_: Any) -> None:
                raise ZeroDivisionError

            monkeypatch.setattr(AsyncEngine, "_lose_process", fails)
            steps = asyncio.create_task(collect(engine, endless()))
            await until(lambda: engine.stats().num_running == 1)
            os.kill(pid_of(engine), signal.SIGKILL)
            await engine.until_dead()
            assert await code_of(steps) == "engine_unavailable"
            assert engine.state == "dead"

    run(main())


def engines() -> list[psutil.Process]:
    """The engine processes of this one. Other tests leave the process of chat templates."""
    living = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in living if any("engine_process" in part for part in child.cmdline())]


@pytest.mark.parametrize(("delay", "signal_number"), [(0.0, signal.SIGKILL), (1.0, signal.SIGSEGV)])
def test_an_engine_killed_while_it_loads(delay: float, signal_number: signal.Signals, tmp_path: Path) -> None:
    async def main() -> None:
        starting = asyncio.create_task(make(tmp_path / "slow-to-load").start())
        await until(lambda: len(engines()) == 1)
        await asyncio.sleep(delay)
        engines()[0].send_signal(signal_number)
        with pytest.raises(
            LMKitError, match=f"while starting, the engine process was ended by {signal_number.name}; its log"
        ):
            await starting

    run(main())


def test_an_engine_killed_while_it_drains() -> None:
    async def main() -> None:
        engine = make()
        await engine.start()
        steps = asyncio.create_task(collect(engine, endless()))
        await until(lambda: engine.stats().num_running == 1)
        stopping = asyncio.create_task(engine.shutdown(30))
        await until(lambda: engine.state == "draining")
        os.kill(pid_of(engine), signal.SIGKILL)
        assert await code_of(steps) == "engine_unavailable"
        await asyncio.wait_for(stopping, 10)
        assert engine.state == "dead"
        assert engine.num_starts == 1

    run(main())
