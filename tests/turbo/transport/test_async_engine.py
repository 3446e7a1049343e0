"""The front end's engine handle with a real process that runs a torch-free fake engine."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from lmkit.config import EngineConfig
from lmkit.errors import CheckpointError, ConfigError, LMKitError, RequestError
from lmkit.text import Tokenizer
from lmkit.turbo.request import Request, SamplingParams, Siblings, StepOutput
from lmkit.turbo.transport import engine_process, messages
from lmkit.turbo.transport.async_engine import AsyncEngine, RestartPolicy
from lmkit.turbo.transport.spawned import EngineProcess
from tests.serve.fake_engine import DEMO, PHRASE

FAKE = "tests.serve.fake_engine:FakeEngine"
TOKENIZER = Tokenizer.from_pretrained(DEMO)
QUICK = RestartPolicy(max_failures=2, first_delay=0.02, max_delay=0.05)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


def make(
    model: str | Path = "model", restart: RestartPolicy = QUICK, step_timeout: float | None = None, **config: Any
) -> AsyncEngine:
    return AsyncEngine(model, EngineConfig(**config), engine=FAKE, restart=restart, step_timeout=step_timeout)


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[AsyncEngine]:
    engine = make(**options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.shutdown()


def request(prompt: str = "Hi", request_id: str = "r", timeout: float | None = None, **params: Any) -> Request:
    config = SamplingParams(**{"seed": 0, "max_tokens": 8} | params)
    return Request(request_id=request_id, prompt_ids=TOKENIZER.encode(prompt), params=config, timeout=timeout)


async def collect(engine: AsyncEngine, wanted: Request) -> list[StepOutput]:
    return [output async for output in engine.generate(wanted)]


async def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.01)


def test_generates_in_another_process_and_leaves_nothing() -> None:
    async def main() -> None:
        engine = make()
        with pytest.raises(RequestError, match="is asleep") as error:
            await collect(engine, request())
        assert error.value.code == "engine_unavailable"
        await engine.start()
        assert engine.info is not None
        assert engine.info.vocab_size == 4096
        folder = engine._folder.path
        assert folder is not None
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        pid = engine.engine_pid
        assert pid is not None
        assert pid != os.getpid()

        outputs = await collect(engine, request(max_tokens=8))
        assert [i for output in outputs for i in output.token_ids] == TOKENIZER.encode(PHRASE)[:8]
        assert [output.finish_reason for output in outputs] == [None] * 7 + ["length"]
        await until(lambda: engine.stats().generation_tokens == 8)
        assert engine.num_open == 0

        await engine.shutdown()
        assert engine.state == "dead"
        assert not folder.exists()
        assert not psutil.pid_exists(pid)

    run(main())


def test_many_requests_at_once_keep_their_own_tokens() -> None:
    async def main() -> None:
        async with running() as engine:
            jobs = [collect(engine, request(request_id=f"r{i}", seed=i, max_tokens=5)) for i in range(40)]
            phrase = TOKENIZER.encode(PHRASE)
            for i, outputs in enumerate(await asyncio.gather(*jobs)):
                got = [token for output in outputs for token in output.token_ids]
                assert got == [phrase[(i + k) % len(phrase)] for k in range(5)]

    run(main())


def test_every_field_survives_the_trip() -> None:
    params = SamplingParams(seed=3, stop=("a", "b"), logit_bias={5: -1.5}, stop_token_ids=(1,), logprobs=2, top_p=0.5)
    wanted = Request(request_id="r", prompt_ids=[1, 2], params=params, prompt_logprobs=True)
    command = msgspec.msgpack.decode(msgspec.msgpack.encode(messages.Add(Siblings(wanted))), type=messages.Command)
    assert command == messages.Add(Siblings(wanted))


def test_a_prompt_crosses_once_for_all_its_siblings() -> None:
    async def main() -> None:
        async with running() as engine:
            assert engine._process is not None
            wire: list[bytes] = []
            encode = engine._process._encoder.encode
            engine._process._encoder = SimpleNamespace(encode=lambda it: (wire.append(encode(it)), wire[-1])[1])
            first = request("Hi " * 500, request_id="r-0", max_tokens=5)
            others = [
                msgspec.structs.replace(
                    first, request_id=f"r-{i}", params=msgspec.structs.replace(first.params, seed=i)
                )
                for i in range(1, 9)
            ]
            engine.submit(Siblings.of([first, *others]))
            phrase = TOKENIZER.encode(PHRASE)
            for i, outputs in enumerate(await asyncio.gather(*(collect(engine, each) for each in [first, *others]))):
                got = [token for output in outputs for token in output.token_ids]
                assert got == [phrase[(i + k) % len(phrase)] for k in range(5)]
            (message,) = wire
            alone = len(encode(messages.Add(Siblings(first))))
            assert alone > 500
            assert len(message) <= alone + 8 * len(b"\x92\xa3r-1\x01") + 2

    run(main())


def test_a_sibling_that_nobody_follows_is_dropped() -> None:
    async def main() -> None:
        async with running(max_queue=1, max_batch_size=2) as engine:
            first, other, third, fourth = (request("SLOW", request_id=f"r{i}", max_tokens=None) for i in range(4))
            with pytest.raises(RequestError, match="too many requests"):
                engine.submit(Siblings(first, [(each.request_id, 1) for each in (other, third, fourth)]))
            assert engine.num_open == 0
            engine.submit(Siblings(first, [(other.request_id, 1)]))
            task = asyncio.create_task(collect(engine, first))
            await until(lambda: engine.stats().num_running == 2)
            engine.drop(other.request_id)
            engine.drop("unknown")
            await until(lambda: engine.stats().num_running == 1)
            task.cancel()
            await until(lambda: engine.stats().num_running == 0)

    run(main())


def test_an_abandoned_iterator_frees_the_engine() -> None:
    async def main() -> None:
        async with running() as engine:
            steps = engine.generate(request("SLOW", max_tokens=None))
            await anext(steps)
            await until(lambda: engine.stats().num_running == 1)
            await steps.aclose()  # type: ignore[attr-defined]
            await until(lambda: engine.stats().num_running == 0)
            assert engine.num_open == 0
            assert engine.stats().generation_tokens < 1000

            task = asyncio.create_task(collect(engine, request("SLOW", max_tokens=None)))
            await until(lambda: engine.stats().num_running == 1)
            task.cancel()
            await until(lambda: engine.stats().num_running == 0)

    run(main())


def test_abort_ends_the_iteration() -> None:
    async def main() -> None:
        async with running() as engine:
            task = asyncio.create_task(collect(engine, request("SLOW", max_tokens=None)))
            await until(lambda: engine.stats().num_running == 1)
            await engine.abort("r")
            assert (await task)[-1].finish_reason == "abort"
            await until(lambda: engine.stats().num_running == 0)
            await engine.abort("unknown")

    run(main())


def test_refusals_reach_the_caller() -> None:
    async def main() -> None:
        async with running() as engine:
            with pytest.raises(RequestError) as error:
                await collect(engine, request("REFUSE"))
            assert (error.value.code, error.value.status) == ("queue_full", 503)
            assert engine.num_open == 0

    run(main())


def test_the_number_of_open_requests_is_bounded() -> None:
    async def main() -> None:
        async with running(max_queue=2, max_batch_size=1) as engine:
            open_ = [engine.generate(request("SLOW", request_id=f"r{i}", max_tokens=None)) for i in range(3)]
            for steps in open_:
                await anext(steps)
            with pytest.raises(RequestError) as error:
                await collect(engine, request(request_id="more"))
            assert error.value.code == "queue_full"
            for steps in open_:
                await steps.aclose()  # type: ignore[attr-defined]

    run(main())


def test_a_failed_step_fails_its_requests_and_the_engine_goes_on() -> None:
    async def main() -> None:
        async with running() as engine:
            pid = engine.engine_pid
            for expected in (1, 2):
                outputs = await collect(engine, request("CRASH"))
                assert outputs[-1].finish_reason == "error"
                assert "secret" not in (outputs[-1].error or "")
                assert len(await collect(engine, request(max_tokens=3))) == 3
                await until(lambda expected=expected: engine.num_failures == expected)  # type: ignore[misc]
            assert (await collect(engine, request("BROKEN")))[-1].finish_reason == "error"
            assert (engine.state, engine.engine_pid) == ("ready", pid)

    run(main())


def test_an_engine_that_fails_every_step_is_replaced() -> None:
    async def main() -> None:
        async with running() as engine:
            pid = engine.engine_pid
            for _ in range(engine_process.MAX_FAILED_STEPS - 1):
                assert (await collect(engine, request("CRASH")))[-1].finish_reason == "error"
            with pytest.raises(RequestError):
                await collect(engine, request("CRASH"))
            await until(lambda: engine.state == "ready" and engine.engine_pid != pid)

    run(main())


def test_a_killed_process_fails_open_requests_and_comes_back() -> None:
    async def main() -> None:
        async with running() as engine:
            open_ = [asyncio.create_task(collect(engine, request("SLOW", f"r{i}", max_tokens=None))) for i in (1, 2)]
            await until(lambda: engine.stats().num_running == 2)
            assert engine.engine_pid is not None
            os.kill(engine.engine_pid, signal.SIGKILL)
            for task in open_:
                with pytest.raises(RequestError) as error:
                    await task
                assert error.value.code == "engine_unavailable"
            assert engine.state == "restarting"
            with pytest.raises(RequestError) as error:
                await collect(engine, request())
            assert error.value.status == 503
            await until(lambda: engine.state == "ready")
            assert engine.stats().num_running == 0
            assert len(await collect(engine, request())) == 8
            assert engine.num_starts == 2

    run(main())


def test_a_process_that_has_ended_is_stopped_as_often_as_one_likes() -> None:
    """asyncio knows of the end before `exited` does, and then refuses to kill."""

    async def main() -> None:
        async with running() as engine:
            process = engine._process
            assert process is not None
            os.kill(process.pid, signal.SIGKILL)
            await process.exited
            process.exited = asyncio.ensure_future(asyncio.sleep(0.05, -9))
            for _ in range(2):
                await process.stop(0)

    run(main())


def test_it_gives_up_after_quick_failures(tmp_path: Path) -> None:
    async def main() -> None:
        model = tmp_path / "exits-second-time"
        model.mkdir()
        async with running(model=model) as engine:
            assert engine.engine_pid is not None
            os.kill(engine.engine_pid, signal.SIGKILL)
            await until(lambda: engine.state == "dead")
            assert engine.num_starts == 1 + QUICK.max_failures
            with pytest.raises(RequestError) as error:
                await collect(engine, request())
            assert error.value.code == "engine_unavailable"

    run(main())


def test_a_start_that_is_cancelled_ends_with_its_process() -> None:
    """At any moment, even if the process ends while asyncio would connect its pipes."""

    async def main() -> None:
        loop, before = asyncio.get_running_loop(), psutil.Process().children()
        connect = loop.connect_write_pipe

        async def connected(*args: Any) -> Any:
            found = await connect(*args)
            await asyncio.sleep(1)
            return found

        loop.connect_write_pipe = connected  # type: ignore[method-assign]
        for turns in range(8):
            start = asyncio.create_task(make().start())
            for _ in range(turns):
                await asyncio.sleep(0)
            start.cancel()
            await asyncio.wait({start}, timeout=20)
            assert start.cancelled()
        assert psutil.Process().children() == before

    run(main())


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [("bad-checkpoint", CheckpointError, "truncated"), ("exits", LMKitError, "status 7")],
)
def test_start_up_errors_reach_the_caller(model: str, kind: type[LMKitError], message: str) -> None:
    async def main() -> None:
        engine = make(model)
        with pytest.raises(kind, match=message):
            await engine.start()
        assert engine.state == "dead"
        assert engine._folder.path is not None
        assert not engine._folder.path.exists()

    run(main())


def test_a_socket_path_that_is_too_long_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))

    async def main() -> None:
        with pytest.raises(ConfigError, match="TMPDIR"):
            await make().start()

    run(main())
    assert list(long.iterdir()) == []


def test_shutdown_drains_and_then_ends_the_rest() -> None:
    async def main() -> None:
        engine = make()
        await engine.start()
        short = asyncio.create_task(collect(engine, request("SLOW", "short", max_tokens=10)))
        endless = asyncio.create_task(collect(engine, request("SLOW", "endless", max_tokens=None)))
        await until(lambda: engine.num_open == 2)
        stopping = asyncio.create_task(engine.shutdown(1.5))
        await until(lambda: engine.state == "draining")
        with pytest.raises(RequestError) as error:
            await collect(engine, request())
        assert error.value.code == "shutting_down"
        assert (await short)[-1].finish_reason == "length"
        with pytest.raises(RequestError) as error:
            await endless
        assert error.value.code == "shutting_down"
        await stopping

    run(main())


@pytest.mark.timeout(60)  # a socket left open would block the loop, and wait_for with it
@pytest.mark.parametrize("delay", [0, 0.001, 0.01, 0.1])
def test_shutdown_right_after_the_process_died(delay: float) -> None:
    async def main() -> None:
        engine = make()
        await engine.start()
        assert engine.engine_pid is not None
        os.kill(engine.engine_pid, signal.SIGKILL)
        await asyncio.sleep(delay)
        await engine.shutdown()
        assert engine.state == "dead"
        assert engine._folder.path is not None
        assert not engine._folder.path.exists()

    run(main())


@pytest.mark.parametrize("signals", [(signal.SIGINT, signal.SIGTERM)])
def test_the_process_leaves_signals_to_its_parent(signals: tuple[signal.Signals, ...]) -> None:
    async def main() -> None:
        async with running() as engine:
            assert engine.engine_pid is not None
            for number in signals:
                os.kill(engine.engine_pid, number)
            assert len(await collect(engine, request())) == 8

    run(main())


@pytest.mark.parametrize("busy", [False, True])
def test_the_process_dies_with_its_parent(busy: bool) -> None:
    """The parent is killed hard, so it cannot say goodbye; a process inside a long step must go all the same."""
    script = textwrap.dedent(
        f"""
        import asyncio
        from tests.turbo.transport.test_async_engine import collect, make, request, until

        async def main():
            engine = make()
            await engine.start()
            if {busy}:
                asyncio.ensure_future(collect(engine, request("HANG")))
                await asyncio.sleep(0.3)
            print(engine.engine_pid, engine._folder.path, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().split()
        process = psutil.Process(int(pid))
    finally:
        parent.kill()
        parent.wait()
    process.wait(timeout=3)
    assert not Path(folder).exists()


def test_no_torch_in_the_front_end() -> None:
    script = (
        "import sys, lmkit.turbo.transport.async_engine, lmkit.turbo.transport.output; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_delays_double_up_to_a_limit() -> None:
    policy = RestartPolicy(first_delay=0.5, max_delay=3.0)
    assert [policy.delay(n) for n in (1, 2, 3, 4, 9)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_an_engine_that_slept_answers_as_before() -> None:
    async def main() -> None:
        async with running() as engine:
            before = [step.token_ids async for step in engine.generate(request())]
            pid = engine.engine_pid
            open_request = asyncio.ensure_future(tokens(engine, request("SLOW", request_id="open", max_tokens=1000)))
            await asyncio.sleep(0.1)
            await engine.sleep()
            assert engine.state == "asleep"
            assert engine.engine_pid == pid
            with pytest.raises(RequestError, match="put to sleep"):
                await open_request
            with pytest.raises(RequestError, match="asleep"):
                engine.submit(Siblings(request()))
            await engine.sleep()  # once more changes nothing
            await engine.wake()
            assert engine.engine_pid == pid
            assert [step.token_ids async for step in engine.generate(request())] == before
            await engine.sleep(keep_process=False)
            assert engine.engine_pid is None
            await engine.wake()
            assert engine.engine_pid != pid
            assert [step.token_ids async for step in engine.generate(request())] == before

    run(main())


def test_a_process_that_ends_asleep_is_replaced_when_the_engine_wakes() -> None:
    async def main() -> None:
        async with running() as engine:
            await engine.sleep()
            assert engine.engine_pid is not None
            os.kill(engine.engine_pid, signal.SIGKILL)
            while engine.engine_pid is not None:
                await asyncio.sleep(0.01)
            assert engine.state == "asleep"
            await engine.wake()
            assert engine.state == "ready"
            assert len(await tokens(engine, request())) == 8

    run(main())


def test_an_engine_wakes_once_while_the_end_of_its_process_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that ended asleep is not replaced by a second one beside that of the wake."""
    stop = EngineProcess.stop

    async def long(self: EngineProcess, grace: float) -> None:
        await stop(self, grace)
        await asyncio.sleep(0.2)

    async def main() -> None:
        async with running() as engine:
            await engine.sleep()
            assert engine.engine_pid is not None
            monkeypatch.setattr(EngineProcess, "stop", long)
            os.kill(engine.engine_pid, signal.SIGKILL)
            while engine.engine_pid is not None:
                await asyncio.sleep(0.01)
            await engine.wake()
            assert len(await tokens(engine, request())) == 8
            await asyncio.sleep(0.5)  # a second process would be under way
            assert engine.num_starts == 2

    run(main())


def test_an_engine_that_cannot_wake_sleeps_on(tmp_path: Path) -> None:
    async def main() -> None:
        (model := tmp_path / "exits-second-time").mkdir()
        async with running(model=model) as engine:
            await engine.sleep()
            with pytest.raises(LMKitError, match="ended with status 7"):
                await engine.wake()
            assert engine.state == "asleep"
            assert engine.engine_pid is None
            (model / "started").unlink()
            await engine.wake()
            assert len(await tokens(engine, request())) == 8

    run(main())


async def tokens(engine: AsyncEngine, asked: Request) -> list[int]:
    return [token async for step in engine.generate(asked) for token in step.token_ids]
