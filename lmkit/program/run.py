"""Running programs: asyncio functions of a Branch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from lmkit.errors import ConfigError
from lmkit.program.branch import Branch, OnPart
from lmkit.program.local import Driver, Local
from lmkit.program.model import Model
from lmkit.program.remote import Server
from lmkit.program.trace import Trace

if TYPE_CHECKING:
    from lmkit.api.async_pipeline import AsyncPipeline
    from lmkit.api.in_process import Pipeline

    Source = Pipeline | AsyncPipeline | Server

P = ParamSpec("P")
T = TypeVar("T")
AT_ONCE = 256


def run(
    model: Pipeline | Server,
    program: Callable[Concatenate[Branch, ...], Awaitable[T]],
    *arguments: Any,
    on_part: OnPart | None = None,
    trace: Trace | None = None,
) -> T:
    """Run one program and return its result.

    `program` is an asyncio function. It gets an empty Branch and the arguments. `on_part` gets text while it is
    generated, and `trace` what was done. Raises what the program raises, and ConfigError inside a running event loop.
    """
    return _result(lambda: start(model, program, *arguments, on_part=on_part, trace=trace))


def run_batch(
    model: Pipeline | Server,
    program: Callable[Concatenate[Branch, ...], Awaitable[T]],
    rows: Iterable[tuple[Any, ...]],
    *,
    at_once: int = AT_ONCE,
    on_part: OnPart | None = None,
    trace: Trace | None = None,
) -> list[T]:
    """Run the program for each row of arguments, `at_once` of them at the same time. Returns the results in order.

    The first error ends all of them and is raised.
    """
    if at_once < 1:
        raise ConfigError(f"at_once={at_once}: expected at least 1")

    async def all_rows() -> list[T]:
        places = asyncio.Semaphore(at_once)
        async with opened(model) as live:

            async def one(row: tuple[Any, ...], branch: Branch) -> T:
                async with places:
                    return await program(branch, *row)

            branches = ((row, _branch(live, on_part, trace)) for row in rows)
            tasks = [asyncio.ensure_future(one(row, branch)) for row, branch in branches]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                await _cancelled(tasks)

    return _result(all_rows)


async def start(
    model: Source,
    program: Callable[Concatenate[Branch, ...], Awaitable[T]],
    *arguments: Any,
    on_part: OnPart | None = None,
    trace: Trace | None = None,
) -> T:
    """`run` for programs that use asyncio themselves. The model may also be an AsyncPipeline."""
    async with opened(model) as live:
        return await program(_branch(live, on_part, trace), *arguments)


@asynccontextmanager
async def opened(model: Source) -> AsyncGenerator[Model, None]:
    """What branches call, for as long as the context lasts. Raises ConfigError."""
    if isinstance(model, Server):
        async with model.connected() as remote:
            yield remote
        return
    from lmkit.api.async_pipeline import AsyncPipeline

    if isinstance(model, AsyncPipeline):
        yield Local(model, model.steps)
        return
    from lmkit.api.in_process import Pipeline  # it imports torch

    if not isinstance(model, Pipeline):
        raise ConfigError(f"expected a Pipeline, an AsyncPipeline or a Server, got {type(model).__name__}")
    yield Local(model, Driver(model).steps)


def _branch(model: Model, on_part: OnPart | None, trace: Trace | None) -> Branch:
    return Branch(model, (trace or Trace()).program(), on_part)


async def _cancelled(tasks: Sequence[asyncio.Future[T]]) -> None:
    """Cancel what still runs, and wait for its end: it may abort requests."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _result(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    raise ConfigError("an event loop runs already; use `await start(model, program, ...)`")
