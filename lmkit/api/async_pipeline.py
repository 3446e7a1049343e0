"""AsyncPipeline: an engine in a process of its own, for asyncio. No torch here."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

from lmkit.api.generation import GenConfigs, GenerationConfig
from lmkit.api.progress import progress_bar
from lmkit.api.prompts import CallOptions, Prompt, names_ours
from lmkit.api.requests import Batch, RequestMaker, embedding_of, engine_config, mean_nll, open_session
from lmkit.api.response import Response, Session, failed, refused
from lmkit.config import EngineConfig, checked_level
from lmkit.errors import RequestError
from lmkit.formats.hub import resolve_model_path
from lmkit.log import get_logger
from lmkit.other_names import missing
from lmkit.text import Tokenizer
from lmkit.turbo.request import Request, StepOutput
from lmkit.turbo.transport.async_engine import AsyncEngine
from lmkit.turbo.transport.output import OutputProcessor, RequestOutput
from lmkit.turbo.transport.vectors import matrix

if TYPE_CHECKING:
    from lmkit.turbo.transport.vectors import Vectors

log = get_logger(__name__)
Queue = asyncio.Queue[tuple[int, RequestOutput] | None]


class AsyncPipeline:
    """The calls of Pipeline for asyncio.

        async with AsyncPipeline("demo") as pipe:
            response = await pipe("import os\\n")
            async for part in pipe.stream_infer("import os\\n"):
                print(part.text, end="")

    The engine computes in a process of its own, so the event loop stays free. Tasks that run at the same time share its
    batches. A task that is cancelled aborts its requests.

    `options` are fields of EngineConfig. Use it in `async with`, or call `start` first and `close` at the end. One
    AsyncPipeline belongs to one event loop. The engine's process writes its records of `log_level` and above to stderr.
    """

    @names_ours
    def __init__(
        self,
        model: str | os.PathLike[str],
        backend_config: EngineConfig | None = None,
        *,
        log_level: str = "WARNING",
        **options: Any,
    ) -> None:
        """Raises ConfigError. Nothing is read or started yet."""
        self._config = engine_config(model, backend_config, options)
        self._model, self._log_level = os.fspath(model), checked_level(log_level)
        self._engine: AsyncEngine | None = None
        self._slots = asyncio.Semaphore(self._config.max_queue)  # the engine takes so many requests at once

    async def start(self) -> Self:
        """Load the model. Raises CheckpointError, ConfigError or UnsupportedError if it cannot run."""
        path = await asyncio.to_thread(resolve_model_path, self._model)
        tokenizer = await asyncio.to_thread(Tokenizer.from_pretrained, path, self._config.chat_template)
        engine = AsyncEngine(path, self._config, log_level=self._log_level)
        await engine.start()
        assert engine.info is not None
        engine.info.sampling.announce(log)
        self.tokenizer, self._engine = tokenizer, engine
        self._maker = RequestMaker(tokenizer, engine.info)
        return self

    async def close(self) -> None:
        """End running requests with an error, and the engine's process."""
        if self._engine is not None:
            await self._engine.shutdown()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @overload
    async def __call__(  # type: ignore[overload-overlap]  # a list of messages is one prompt
        self,
        prompts: Prompt,
        gen_config: GenConfigs = None,
        *,
        progress: bool = False,
        use_tqdm: bool = False,
        **options: Unpack[CallOptions],
    ) -> Response: ...

    @overload
    async def __call__(
        self,
        prompts: Iterable[Prompt],
        gen_config: GenConfigs = None,
        *,
        progress: bool = False,
        use_tqdm: bool = False,
        **options: Unpack[CallOptions],
    ) -> list[Response]: ...

    @names_ours
    async def __call__(
        self,
        prompts: Prompt | Iterable[Prompt],
        gen_config: GenConfigs = None,
        *,
        progress: bool = False,
        use_tqdm: bool = False,
        **options: Unpack[CallOptions],
    ) -> Any:
        """A Response for one prompt, or a list of Responses for several, as Pipeline gives them."""
        batch = await self._batch(prompts, gen_config, **options)
        with progress_bar(len(batch.responses), progress or use_tqdm) as advance:
            async with aclosing(self._parts(batch)) as parts:
                async for part in parts:
                    batch.add(part)
                    advance(part)
        return batch.result()

    infer = __call__

    @names_ours
    async def stream_infer(
        self,
        prompts: Prompt | Iterable[Prompt],
        gen_config: GenConfigs = None,
        **options: Unpack[CallOptions],
    ) -> AsyncGenerator[Response, None]:
        """Parts of the answers as they are generated. The last part of each answer has its finish_reason."""
        batch = await self._batch(prompts, gen_config, **options)
        async with aclosing(self._parts(batch)) as parts:
            async for part in parts:
                yield part

    @names_ours
    async def chat(
        self, prompt: str, session: Session | None = None, gen_config: GenerationConfig | None = None
    ) -> Session:
        """One turn of a conversation: the Session with its new answer. A failed turn leaves its history unchanged."""
        session = open_session(prompt, session)
        async with aclosing(self.stream_chat(prompt, session, gen_config)) as parts:
            async for _ in parts:
                pass
        return session

    @names_ours
    async def stream_chat(
        self, prompt: str, session: Session, gen_config: GenerationConfig | None = None
    ) -> AsyncGenerator[Response, None]:
        """The parts of one turn of a conversation. The session has the turn when the iteration has ended."""
        session, maker = open_session(prompt, session), self.maker
        try:
            turn = await asyncio.to_thread(maker.turn, prompt, session, gen_config)
        except RequestError as error:
            session.response = refused(0, error)
            yield session.response
            return
        async with aclosing(self._run({0: turn.request})) as outputs:
            async for _, output in outputs:
                yield turn.take(output)
        turn.end()

    def session(self) -> Session:
        return Session()

    async def ppl(self, inputs: str | Sequence[int] | Iterable[str | Sequence[int]]) -> list[float]:
        """As Pipeline.ppl."""
        return [math.exp(value) for value in await self.get_ppl(inputs)]

    async def get_ppl(self, input_ids: str | Sequence[int] | Iterable[str | Sequence[int]]) -> list[float]:
        """As Pipeline.get_ppl."""
        requests = await asyncio.to_thread(self.maker.scoring, input_ids)
        return [mean_nll(last) for last in await self._ends(requests)]

    async def embed(
        self, inputs: str | Sequence[int] | Iterable[str | Sequence[int]], prompt_name: str | None = None
    ) -> Vectors:
        """As Pipeline.embed."""
        requests = await asyncio.to_thread(self.maker.embedding, inputs, prompt_name)
        rows = [embedding_of(last) for last in await self._ends(requests)]
        return matrix(rows, layers=self.maker.vector_layers)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing(self, name)

    @property
    def maker(self) -> RequestMaker:
        """What makes its requests. Raises RequestError before the start and after the end."""
        if self._engine is None:
            raise RequestError("engine_unavailable", "this pipeline is not started; use `async with`, or await start()")
        if self._engine.state in ("draining", "dead"):
            raise RequestError("engine_unavailable", "this pipeline is closed; open another one")
        return self._maker

    async def _batch(self, prompts: Any, gen_config: Any, **options: Any) -> Batch:
        return await asyncio.to_thread(self.maker.batch, prompts, gen_config, **options)

    async def _parts(self, batch: Batch) -> AsyncGenerator[Response, None]:
        for part in batch.refused:
            yield part
        async with aclosing(self._run(batch.requests)) as outputs:
            async for index, output in outputs:
                yield batch.part(index, output)

    async def _run(self, requests: Mapping[int, Request]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Outputs of `requests` as they arrive, each with the index of its request.

        Ending the iteration early aborts the rest.
        """
        queue: Queue = asyncio.Queue()
        tasks = [asyncio.create_task(self._follow(index, request, queue)) for index, request in requests.items()]
        try:
            num_open = len(tasks)
            while num_open:
                item = await queue.get()
                if item is None:
                    num_open -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in filter(None, ended):
            raise error

    async def _follow(self, index: int, request: Request, queue: Queue) -> None:
        """Put the outputs of a request into the queue, and None after the last one."""
        processor = OutputProcessor(self.tokenizer, request)
        try:
            async with aclosing(self.steps(request)) as steps:
                async for step in steps:
                    queue.put_nowait((index, processor.process(step)))
                    if processor.finished:  # a stop string ends it here; leaving the iteration aborts it in the engine
                        break
        finally:
            queue.put_nowait(None)

    async def steps(self, request: Request) -> AsyncGenerator[StepOutput, None]:
        """The steps of a request, once the engine has room for it. A refusal is its last step."""
        assert self._engine is not None
        async with self._slots:
            try:
                async with aclosing(self._engine.generate(request)) as steps:
                    async for step in steps:
                        yield step
            except RequestError as error:
                yield failed(request.request_id, error)

    async def _ends(self, requests: list[Request]) -> list[StepOutput]:
        """The last step of each request."""

        async def end(request: Request) -> StepOutput:
            async with aclosing(self.steps(request)) as steps:
                return [step async for step in steps][-1]

        return list(await asyncio.gather(*map(end, requests)))
