"""`pipeline(model)`: an engine in this process, with text in and text out.

    with pipeline("demo") as pipe:
        print(pipe("import os\\n", GenerationConfig(max_new_tokens=32)).text)

It uses the same requests, scheduler and output processing as the server. Only the transport differs.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

from lmkit.api.generation import GenConfigs, GenerationConfig
from lmkit.api.progress import progress_bar
from lmkit.api.prompts import CallOptions, Prompt, names_ours
from lmkit.api.requests import Batch, RequestMaker, embedding_of, engine_config, mean_nll, open_session
from lmkit.api.response import Response, Session, failed, refused
from lmkit.config import EngineConfig
from lmkit.errors import EngineLostError, RequestError
from lmkit.log import get_logger, setup
from lmkit.other_names import missing
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, StepOutput
from lmkit.turbo.transport.output import OutputProcessor, RequestOutput
from lmkit.turbo.transport.vectors import matrix

if TYPE_CHECKING:
    from lmkit.turbo.transport.vectors import Vectors

log = get_logger(__name__)


@names_ours
def pipeline(
    model: str | os.PathLike[str],
    backend_config: EngineConfig | None = None,
    *,
    log_level: str | None = None,
    **options: Any,
) -> Pipeline:
    """Load `model` (a checkpoint's folder, or "demo") and return a Pipeline; `options` are fields of EngineConfig.

    The application's logging decides what is logged. With `log_level`, lmkit writes its own records to stderr. Raises
    ConfigError, CheckpointError or UnsupportedError before any weight is loaded.
    """
    config = engine_config(model, backend_config, options)
    if log_level is not None:
        setup(log_level, libraries=False)
    return Pipeline(os.fspath(model), config)


class Pipeline:
    """Calls, streams, chats and scores. Several threads may use one pipeline; their requests share its batches."""

    def __init__(self, model: str, config: EngineConfig) -> None:
        self.engine = Engine(model, config)
        self.engine.info.sampling.announce(log)
        try:
            self.tokenizer = self.engine.tokenizer
        except BaseException:
            self.engine.close()
            raise
        self.maker = RequestMaker(self.tokenizer, self.engine.info)
        self._outputs: dict[str, deque[StepOutput]] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a list of messages is one prompt
        self,
        prompts: Prompt,
        gen_config: GenConfigs = None,
        *,
        progress: bool = False,
        use_tqdm: bool = False,
        **options: Unpack[CallOptions],
    ) -> Response: ...

    @overload
    def __call__(
        self,
        prompts: Iterable[Prompt],
        gen_config: GenConfigs = None,
        *,
        progress: bool = False,
        use_tqdm: bool = False,
        **options: Unpack[CallOptions],
    ) -> list[Response]: ...

    @names_ours
    def __call__(
        self,
        prompts: Prompt | Iterable[Prompt],
        gen_config: GenConfigs = None,
        *,
        progress: bool = False,
        use_tqdm: bool = False,
        **options: Unpack[CallOptions],
    ) -> Any:
        """A Response for one prompt, or a list of Responses for several.

        A prompt is a text, a message, or a list of messages. A text is given to the model as a user's message. With
        `do_preprocess` off, or without a chat template, the model continues the text itself. A prompt that cannot run
        gives a Response with finish_reason "error"; the other prompts run. `priority` (lower is sooner) and `timeout`
        (seconds after the engine takes the prompt) apply to each prompt. `progress` shows a progress bar on stderr;
        `use_tqdm` is another name for it. `adapter_name` is one of EngineConfig.adapters.

        `tools`, `tool_choice` and `parallel_tool_calls` are OpenAI's: the answers may call these functions, and a
        grammar holds the calls. With tools, or with `separate_reasoning`, an answer has its reasoning apart from its
        text. `chat_template_kwargs` are variables of the chat template. Raises ConfigError or RequestError for
        arguments of wrong types.
        """
        batch = self._batch(prompts, gen_config, **options)
        with progress_bar(len(batch.responses), progress or use_tqdm) as advance:
            for part in self._parts(batch):
                batch.add(part)
                advance(part)
        return batch.result()

    infer = __call__

    @names_ours
    def stream_infer(
        self,
        prompts: Prompt | Iterable[Prompt],
        gen_config: GenConfigs = None,
        **options: Unpack[CallOptions],
    ) -> Generator[Response, None, None]:
        """Parts of the answers as they are generated. The last part of each answer has its finish_reason."""
        return self._parts(self._batch(prompts, gen_config, **options))

    @overload
    def chat(
        self,
        prompt: str,
        session: Session | None = None,
        gen_config: GenerationConfig | None = None,
        *,
        stream_response: Literal[False] = False,
    ) -> Session: ...

    @overload
    def chat(
        self,
        prompt: str,
        session: Session | None = None,
        gen_config: GenerationConfig | None = None,
        *,
        stream_response: Literal[True],
    ) -> Generator[Response, None, None]: ...

    @names_ours
    def chat(
        self,
        prompt: str,
        session: Session | None = None,
        gen_config: GenerationConfig | None = None,
        *,
        stream_response: bool = False,
    ) -> Any:
        """One turn of a conversation: the Session with its new answer, or with `stream_response` an iterator of parts.

        A failed turn leaves the session's history unchanged; the Response shows the error.
        """
        self._check_open()
        session = open_session(prompt, session)
        parts = self._chat_parts(prompt, session, gen_config)
        if stream_response:
            return parts
        for _ in parts:
            pass
        return session

    def session(self) -> Session:
        return Session()

    def ppl(self, inputs: str | Sequence[int] | Iterable[str | Sequence[int]]) -> list[float]:
        """Perplexity, exp(mean negative log-likelihood), of each text or list of token ids, except the first token.

        Raises RequestError for an input of fewer than two tokens, or of more tokens than the context holds.
        """
        return [math.exp(value) for value in self.get_ppl(inputs)]

    def get_ppl(self, input_ids: str | Sequence[int] | Iterable[str | Sequence[int]]) -> list[float]:
        """The mean negative log-likelihood (cross-entropy) of each text or list of ids, as in LMDeploy.

        `ppl` is its exponential.
        """
        self._check_open()
        requests = self.maker.scoring(input_ids)
        values = {out.request_id: mean_nll(out) for out in self.steps(deque(requests)) if out.finish_reason is not None}
        return [values[request.request_id] for request in requests]

    def embed(
        self, inputs: str | Sequence[int] | Iterable[str | Sequence[int]], prompt_name: str | None = None
    ) -> Vectors:
        """Embeddings of unit length, float32 [inputs, size], of each text or list of token ids.

        `prompt_name` is one of the checkpoint's prompts for texts, which stands before each. Raises RequestError for
        another name, and for an input without tokens, or of more tokens than the context holds.
        """
        self._check_open()
        requests = self.maker.embedding(inputs, prompt_name)
        ends = (out for out in self.steps(deque(requests)) if out.finish_reason is not None)
        rows = {out.request_id: embedding_of(out) for out in ends}
        found = [rows[request.request_id] for request in requests]
        return matrix(found, layers=self.maker.vector_layers)

    def close(self) -> None:
        """Abort running requests. The pipeline cannot be used afterwards."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for request_id in self._outputs:
                self.engine.abort(request_id)
            with suppress(EngineLostError):
                while self.engine.has_work():
                    self.engine.step()
            self._outputs.clear()
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing(self, name)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RequestError("engine_unavailable", "this pipeline is closed; open another one")

    def _batch(self, prompts: Any, gen_config: Any, **options: Any) -> Batch:
        self._check_open()
        return self.maker.batch(prompts, gen_config, **options)

    def _parts(self, batch: Batch) -> Generator[Response, None, None]:
        yield from batch.refused
        for index, output in self._run(batch.requests):
            yield batch.part(index, output)

    def _run(self, requests: Mapping[int, Request]) -> Iterator[tuple[int, RequestOutput]]:
        """Outputs of `requests` as they arrive, each with the index of its request."""
        processors = {r.request_id: (i, OutputProcessor(self.tokenizer, r)) for i, r in requests.items()}
        for step in self.steps(deque(requests.values())):
            index, processor = processors[step.request_id]
            if processor.finished:
                continue
            output = processor.process(step)
            if output.abort_engine:
                self.abort(step.request_id)
            yield index, output

    def steps(self, waiting: deque[Request]) -> Iterator[StepOutput]:
        """Run requests of `maker` to completion and yield their outputs. Several such loops share the engine's steps.

        Requests that do not fit the engine's queue stay in `waiting`, to which others may add more. If the loop is left
        early, the rest are aborted.
        """
        open_ids: set[str] = set()
        try:
            while waiting or open_ids:
                ready: list[StepOutput] = []
                with self._lock:
                    self._check_open()
                    self._admit(waiting, open_ids, ready)
                    if not any(self._outputs[name] for name in open_ids):
                        for output in self.engine.step():
                            self._outputs[output.request_id].append(output)
                    for name in open_ids:
                        ready.extend(self._outputs[name])
                        self._outputs[name].clear()
                for output in ready:
                    if output.finish_reason is not None:
                        self._forget(output.request_id, open_ids)
                    yield output
        finally:
            with self._lock:
                for name in open_ids:
                    self.engine.abort(name)

    def abort(self, request_id: str) -> None:
        """End a request that `steps` runs. Its last output still comes. An unknown id is ignored."""
        with self._lock:
            self.engine.abort(request_id)

    def _admit(self, waiting: deque[Request], open_ids: set[str], ready: list[StepOutput]) -> None:
        while waiting:
            try:
                self.engine.add(waiting[0])
            except RequestError as error:
                if error.code == "queue_full" and open_ids:
                    return
                name = waiting.popleft().request_id
                ready.append(failed(name, error))
                continue
            name = waiting.popleft().request_id
            self._outputs[name] = deque()
            open_ids.add(name)

    def _forget(self, name: str, open_ids: set[str]) -> None:
        open_ids.discard(name)
        self._outputs.pop(name, None)

    def _chat_parts(self, prompt: str, session: Session, gen_config: Any) -> Generator[Response, None, None]:
        try:
            turn = self.maker.turn(prompt, session, gen_config)
        except RequestError as error:
            session.response = refused(0, error)
            yield session.response
            return
        for _, output in self._run({0: turn.request}):
            yield turn.take(output)
        turn.end()
