"""Programs on a pipeline. One thread runs the engine's steps, and all programs wait for their outputs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from lmkit.api.generation import GenerationConfig
from lmkit.errors import RequestError
from lmkit.program.model import Answer, Messages, Prompt, Score
from lmkit.turbo.request import Request, StepOutput
from lmkit.turbo.transport.output import OutputProcessor, RequestOutput
from lmkit.turbo.transport.shared_scores import SharedScores, Steps

if TYPE_CHECKING:
    from lmkit.api.async_pipeline import AsyncPipeline
    from lmkit.api.in_process import Pipeline


class Local:
    """A model of a pipeline. `steps` are those of one request; a request that is left early is aborted."""

    def __init__(self, pipe: Pipeline | AsyncPipeline, steps: Steps) -> None:
        self._maker, self._steps = pipe.maker, steps  # the maker raises if the pipeline is not open
        self._tokenizer = pipe.tokenizer

    async def render(self, messages: Messages) -> str:
        return await asyncio.to_thread(self._tokenizer.render_chat, messages)

    def _encode(self, prompt: Prompt) -> list[int]:
        if prompt.ids:
            return self._tokenizer.encode_behind(prompt.ids, prompt.text)
        return self._tokenizer.encode(prompt.text, add_special_tokens=not prompt.is_chat)

    async def generate(self, prompt: Prompt, config: GenerationConfig, on_text: Callable[[str], None] | None) -> Answer:
        if config.response_format is None:
            request = self._maker.request(self._encode(prompt), config)
        else:  # a grammar is compiled
            request = await asyncio.to_thread(lambda: self._maker.request(self._encode(prompt), config))
        text, ids, last = "", [], None
        async for last in self._outputs(request, self._steps):
            text += last.text
            ids += last.token_ids
            if on_text is not None and last.text:
                on_text(last.text)
        assert last is not None, "a request has a last output"
        kept = None if isinstance(last.stop_reason, str) else tuple(ids[:-1] if last.finish_reason == "stop" else ids)
        return Answer(tuple(request.prompt_ids), kept, text, len(ids), last.num_steps, last.num_cached_tokens)

    async def score(self, prompt: Prompt, texts: Sequence[str]) -> list[Score]:
        before, config = self._encode(prompt), GenerationConfig(max_new_tokens=0)
        requests = []
        for text in texts:
            ids, same = self._tokenizer.encode_ending(before, text)
            requests.append(self._maker.request(ids, config, prompt_logprobs=True, logprobs_start=max(same - 1, 0)))
        shared = SharedScores(requests, self._steps)
        return await asyncio.gather(*(self._score(request, shared) for request in requests))

    async def _score(self, request: Request, shared: SharedScores) -> Score:
        (output,) = [output async for output in self._outputs(request, shared.steps)]
        scored = tuple(entry.token.logprob or 0.0 for entry in output.prompt_logprobs[1:])
        return Score(tuple(request.prompt_ids), scored, output.num_cached_tokens)

    async def _outputs(self, request: Request, run: Steps) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a request. Raises RequestError if it fails."""
        processor = OutputProcessor(self._tokenizer, request)
        async with aclosing(run(request)) as steps:
            async for step in steps:
                output = processor.process(step)
                if output.error is not None:
                    raise RequestError(output.error_code, output.error)
                yield output
                if processor.finished:
                    return


class Driver:
    """Runs the steps of a Pipeline in a thread, for requests of one event loop."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe, self._loop = pipe, asyncio.get_running_loop()
        self._waiting: deque[Request] = deque()
        self._queues: dict[str, asyncio.Queue[StepOutput | BaseException]] = {}
        self._thread: asyncio.Future[None] | None = None  # while there is work

    async def steps(self, request: Request) -> AsyncGenerator[StepOutput, None]:
        queue = self._queues[request.request_id] = asyncio.Queue()
        self._waiting.append(request)
        if self._thread is None:
            self._start()
        has_ended = False
        try:
            while not has_ended:
                step = await queue.get()
                if isinstance(step, BaseException):
                    raise step
                has_ended = step.finish_reason is not None
                yield step
        finally:  # if it has not ended, the thread aborts it
            del self._queues[request.request_id]

    def _start(self) -> None:
        self._thread = self._loop.run_in_executor(None, self._run)
        self._thread.add_done_callback(self._ended)

    def _run(self) -> None:
        for step in self._pipe.steps(self._waiting):
            if step.request_id in self._queues:
                self._loop.call_soon_threadsafe(self._give, step)
            elif step.finish_reason is None:
                self._pipe.abort(step.request_id)

    def _give(self, step: StepOutput) -> None:
        if step.request_id in self._queues:
            self._queues[step.request_id].put_nowait(step)

    def _ended(self, thread: asyncio.Future[None]) -> None:
        """The engine has no work left, or it failed."""
        self._thread = None
        if thread.cancelled():
            return
        if error := thread.exception():
            for queue in self._queues.values():
                queue.put_nowait(error)
        elif self._waiting:  # it came while the thread ended
            self._start()
