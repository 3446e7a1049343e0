"""`Serving`: the state that all routes share, and how engine requests run."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from uuid import uuid4

from msgspec.structs import replace as replace_struct

import lmkit
from lmkit.config import ServerConfig
from lmkit.errors import NotReadyError, RequestError
from lmkit.formats.fingerprint import files_digest
from lmkit.serve.admission import Admission
from lmkit.serve.collect import Backlog
from lmkit.serve.hooks.hooks import Hooks
from lmkit.serve.metrics import Metrics
from lmkit.serve.next_turn import NextTurns
from lmkit.serve.parts import CompletionTokensDetails, PromptTokensDetails, Usage
from lmkit.serve.resume import replayed
from lmkit.serve.sessions import Sessions
from lmkit.serve.text_pool import TextPool
from lmkit.serve.used_prefixes import UsedPrefixes
from lmkit.text import Tokenizer
from lmkit.text.chat.style import Style
from lmkit.turbo.request import EngineInfo, Request, Siblings
from lmkit.turbo.transport.async_engine import AsyncEngine
from lmkit.turbo.transport.output import OutputProcessor, RequestOutput
from lmkit.turbo.transport.shared_scores import SharedScores
from lmkit.turbo.transport.steps import TICK_SECONDS
from lmkit.web.budget import Budget, Share
from lmkit.web.rates import spend
from lmkit.web.resume import Known

# From one output of a choice to its next: the least, longer than a connection's pace, and the most.
REST_SECONDS = TICK_SECONDS, 0.05
OUTPUTS_PER_SECOND = 300  # of all choices together, as far as REST_SECONDS lets them
MIN_LOGPROB = -9999.0  # JSON has no -Infinity; OpenAI writes this


@dataclass(frozen=True)
class Serving:
    """One model behind a front end. All models of a server share its budgets and threads."""

    model_name: str
    engine: AsyncEngine
    tokenizer: Tokenizer
    config: ServerConfig
    metrics: Metrics
    sessions: Sessions
    bodies: Budget
    answers: Budget
    texts: TextPool
    admission: Admission
    hooks: Hooks
    next_turns: NextTurns
    used: UsedPrefixes | None = None  # counts the prefixes that requests find, if the next start is to compute them
    created: int = field(default_factory=lambda: int(time.time()))
    edition: str = ""  # another after each reload
    adapter: str = ""  # the name of the adapter that answers; "" = the model itself
    _aliases: dict[str, Serving] = field(init=False, default_factory=dict)

    def called(self, name: str) -> Serving:
        """The same model under another of its names, which answers then have. It may be an adapter's."""
        if name == self.model_name:
            return self
        if name not in self._aliases:
            adapter = name if name in self.engine.config.adapter_folders else ""
            self._aliases[name] = replace(self, model_name=name, adapter=adapter)
        return self._aliases[name]

    def ended(self, request: Request, last: RequestOutput | None) -> None:
        """An answer is whole."""
        if self.used is not None and last is not None:
            self.used.note(request, last.num_cached_tokens)
        self.next_turns.look()

    @cached_property
    def style(self) -> Style:
        """How the model writes reasoning and calls of tools."""
        return Style(self.tokenizer, self.config.tool_parser, self.config.reasoning_parser)

    @property
    def info(self) -> EngineInfo:
        """The engine's information. Raises RequestError if no engine has started yet."""
        if self.engine.info is None:
            raise NotReadyError(f"the engine is {self.engine.state}")
        return self.engine.info

    @property
    def system_fingerprint(self) -> str:
        """A digest of the model's files, its KV storage, its edition and lmkit's version.

        As long as it stays, the same request gives the same answer.
        """
        folder = self.engine.config.adapter_folders[self.adapter] if self.adapter else None
        return _fingerprint(self.info.model_path, folder, self.info.kv_dtype, self.edition)

    async def run(
        self,
        requests: Sequence[Request],
        choices_per_prompt: int,
        share: Share,
        known: Sequence[Known] = (),
        *,
        shares_scores: bool = False,
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Outputs of all requests as they come, each with its request's index. Raises RequestError if a request fails.

        The `known` ones come first. `shares_scores`: the requests only score, see SharedScores.

        Each `choices_per_prompt` consecutive requests have the same prompt. `share` counts the bytes that wait to be
        fetched. If the iteration ends early, all running requests are aborted.
        """
        if self.adapter:
            requests = [replace_struct(request, adapter=self.adapter) for request in requests]
        with contextlib.ExitStack() as stack:
            with self.metrics.admitting():
                stack.enter_context(self.admission.admit(requests))
            self.metrics.admitted(requests, choices_per_prompt, self.info.max_model_len)
            spend(sum(len(request.prompt_ids) for request in requests[::choices_per_prompt]))
            scores = SharedScores(requests, self.engine.generate) if shares_scores else None
            async with aclosing(self._run(requests, choices_per_prompt, share, known, scores)) as found:
                outputs = self.hooks.after(found, share) if self.hooks.sees_answers else found
                async with aclosing(outputs):
                    async for item in outputs:
                        yield item

    async def _run(
        self,
        requests: Sequence[Request],
        choices_per_prompt: int,
        share: Share,
        known: Sequence[Known],
        scores: SharedScores | None,
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        processors = [OutputProcessor(self.tokenizer, request) for request in requests]
        for item in replayed(processors, known, self.info.vocab_size):
            yield item
        requests = [replace_struct(r, known_ids=_ids(known, idx)) if known else r for idx, r in enumerate(requests)]
        unfinished = [idx for idx in range(len(requests)) if not processors[idx].finished]
        backlog = Backlog(share, len(unfinished))

        async def pump(idx: int, request: Request) -> None:
            # Tasks start in order: the first sends the prompt for its siblings. Resumed ones differ in their tokens.
            is_first = not known and idx % choices_per_prompt == 0
            siblings = Siblings.of(requests[idx : idx + choices_per_prompt]) if is_first else None
            async with aclosing(self._follow(request, processors[idx], siblings, scores)) as outputs:
                async for output in outputs:
                    await backlog.put(idx, output)

        tasks = {asyncio.create_task(pump(idx, requests[idx])) for idx in unfinished}
        for task in tasks:
            task.add_done_callback(backlog.end)
        try:
            async with aclosing(backlog.outputs()) as outputs:
                async for item in outputs:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for request in requests:  # some may have been sent by a sibling and not begun
                self.engine.drop(request.request_id)

    def _rest(self) -> float:
        """Seconds from one output of a choice to the next: many open requests share the time for outputs."""
        least, most = REST_SECONDS
        return min(max(least, self.engine.num_open / OUTPUTS_PER_SECOND), most)

    async def _follow(
        self, request: Request, processor: OutputProcessor, siblings: Siblings | None, scores: SharedScores | None
    ) -> AsyncGenerator[RequestOutput]:
        with self.metrics.track(request) as tracker:
            if siblings is not None and siblings.others:
                self.engine.submit(siblings)
            rest = None if request.params.stop else self._rest  # a stop string is found here, and ends the answer
            following = self.engine.generate(request, rest) if scores is None else scores.steps(request)
            async with aclosing(following) as steps:
                async for step in steps:
                    output = processor.process(step)
                    if output.finish_reason in ("error", "abort"):
                        raise _failure(output)
                    tracker.output(output)
                    spend(len(output.token_ids))
                    yield output
                    if output.finish_reason is not None:
                        return  # after a stop string, closing `steps` aborts the request in the engine


def _failure(output: RequestOutput) -> RequestError:
    """The error that the client gets. It shows the engine's refusals, but not its defects."""
    if output.error is not None and output.error_code != "engine_error":
        return RequestError(output.error_code, output.error)
    return RequestError("engine_error", "the engine failed while it worked on this request")


@lru_cache(maxsize=256)
def _fingerprint(model: str, adapter: str | None, kv_dtype: str, edition: str) -> str:
    parts = (files_digest(Path(model), adapter), kv_dtype, edition, lmkit.__version__)
    return "fp_" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _ids(known: Sequence[Known], idx: int) -> list[int]:
    return [token for entry in known if entry.choice == idx for token in entry.token_ids]


def new_id(prefix: str) -> str:
    return prefix + uuid4().hex


class UsageCount:
    """Adds up tokens over the choices of one response.

    A prompt with several choices counts once. Its cached tokens are those of the first choice.
    """

    def __init__(self, requests: Sequence[Request], choices_per_prompt: int) -> None:
        self._prompt_tokens = sum(len(request.prompt_ids) for request in requests[::choices_per_prompt])
        self._choices = choices_per_prompt
        self.reasoning_tokens: Callable[[], int] = lambda: 0
        self._completion_tokens = [0] * len(requests)
        self._cached_tokens = [0] * len(requests)

    def add(self, idx: int, output: RequestOutput) -> None:
        self._completion_tokens[idx] = output.num_output_tokens
        self._cached_tokens[idx] = output.num_cached_tokens

    def so_far(self) -> tuple[int, int, int]:
        """(tokens of the prompts, those of them that a cache had, tokens of the answers)."""
        return self._prompt_tokens, sum(self._cached_tokens[:: self._choices]), sum(self._completion_tokens)

    def usage(self) -> Usage:
        completion = sum(self._completion_tokens)
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=completion,
            total_tokens=self._prompt_tokens + completion,
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=self.reasoning_tokens()),
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached_tokens[:: self._choices])),
        )
