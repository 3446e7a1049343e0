"""AsyncPipeline gives what Pipeline gives, for many tasks at once, and a cancelled task leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from lmkit import AsyncPipeline, GenerationConfig, Pipeline, RequestError
from lmkit.errors import CheckpointError, ConfigError

SHORT = GenerationConfig(max_new_tokens=12)
LONG = GenerationConfig(max_new_tokens=400, ignore_eos=True)
PROMPTS = [f"def f{i}(" for i in range(6)]
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_batch_size": 8, "max_queue": 2}


def opened(demo_model: Path, use: Callable[[AsyncPipeline], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with AsyncPipeline(demo_model, **OPTIONS) as pipe:
            await use(pipe)
            assert pipe._engine is not None
            assert not pipe._engine.num_open

    asyncio.run(main())


def test_it_gives_what_a_pipeline_gives(demo_model: Path, pipe: Pipeline) -> None:
    stop = GenerationConfig(stop="e", max_new_tokens=60)

    async def use(other: AsyncPipeline) -> None:
        want = pipe(PROMPTS, SHORT)
        assert [r.text for r in await other(PROMPTS, SHORT)] == [r.text for r in want], "more than the queue holds"
        each = await asyncio.gather(*(other(prompt, SHORT) for prompt in PROMPTS))
        assert [r.text for r in each] == [r.text for r in want]
        parts = [part async for part in other.stream_infer(PROMPTS[:2], SHORT)]
        assert "".join(p.text for p in parts if p.index == 1) == want[1].text
        assert (await other("hi", stop)).text == pipe("hi", stop).text
        assert (await other(["x " * 2000, [{"role": "bot"}]], SHORT))[0].error_code == "context_length_exceeded"
        assert (await other.embed(["import os", [5, 6]]) == pipe.embed(["import os", [5, 6]])).all()
        assert await other.ppl(["import os\nimport sys", [1, 2, 3]]) == pytest.approx(
            pipe.ppl(["import os\nimport sys", [1, 2, 3]])
        )
        session, same = await other.chat("hi", gen_config=SHORT), pipe.chat("hi", gen_config=SHORT)
        streamed = [part.text async for part in other.stream_chat("again", session, SHORT)]
        assert session.history == pipe.chat("again", same, SHORT).history
        assert "".join(streamed) == session.response.text
        assert session.response.cached_token_len > 0
        for call, message in ((lambda: other(None), "got None"), (lambda: other.chat("x", 3), "a Session")):
            with pytest.raises((ConfigError, RequestError), match=message):
                await call()
        with pytest.raises(AttributeError, match="has no generate: use pipe"):
            other.generate("hi")

    opened(demo_model, use)


def test_a_cancelled_task_aborts_its_requests(demo_model: Path) -> None:
    async def use(pipe: AsyncPipeline) -> None:
        async def taken() -> None:
            async for _ in pipe.stream_infer(PROMPTS, LONG):
                started.set()

        engine, started = pipe._engine, asyncio.Event()
        assert engine is not None
        task = asyncio.create_task(taken())
        await started.wait()
        assert engine.num_open
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not engine.num_open
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await pipe(PROMPTS, LONG)
        assert not engine.num_open
        assert (await pipe("hi", SHORT)).finish_reason in ("stop", "length"), "the slots are free again"

    opened(demo_model, use)


def test_before_and_after(demo_model: Path, tmp_path: Path) -> None:
    async def main() -> None:
        pipe = AsyncPipeline(demo_model, **OPTIONS)
        with pytest.raises(RequestError, match="not started; use `async with`"):
            await pipe("hi")
        await pipe.close()
        with pytest.raises(CheckpointError, match=str(tmp_path)):
            await AsyncPipeline(tmp_path).start()
        with pytest.raises(ConfigError, match="use dp of `lmkit serve`"):
            AsyncPipeline("demo", dp=2)
        async with AsyncPipeline(demo_model, **OPTIONS) as pipe:
            running = asyncio.create_task(pipe("hi", LONG))
            await asyncio.sleep(0.1)
        assert (await running).finish_reason == "error"
        with pytest.raises(RequestError, match="this pipeline is closed"):
            await pipe("hi")

    asyncio.run(main())
