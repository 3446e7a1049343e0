"""`pipeline(model)`: an engine in this process, with text in and text out.

    with pipeline("demo") as pipe:
        print(pipe("import os\\n", GenerationConfig(max_new_tokens=32)).text)

It uses the same requests, scheduler and output processing as the server. Only the transport differs.
"""

from __future__ import annotations

import copy
import itertools
import math
import secrets
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self
from uuid import uuid4

import msgspec

from lmkit import log as logging
from lmkit.config import EngineConfig, parse
from lmkit.errors import ConfigError, RequestError
from lmkit.formats.generation_config import SamplingDefaults
from lmkit.text import TokenHistory, Tokenizer
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, Sampling, SamplingParams, StepOutput
from lmkit.turbo.transport.output import AssistantTurn, OutputProcessor, RequestOutput, TextLogprobs

log = logging.get_logger(__name__)

Messages = list[dict[str, Any]]
Prompt = str | Messages
DEFAULT_NEW_TOKENS = 512


class GenerationConfig(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to continue a prompt; the names are LMDeploy's.

    A field that is not given takes the default of the checkpoint's generation_config.json. Where that has none,
    decoding is greedy, up to 512 tokens.
    """

    MAX, MIN = "max_new_tokens", "min_new_tokens"

    max_new_tokens: int | Literal["auto"] | None = "auto"  # None = until the context is full; 0 = only prefill
    min_new_tokens: int = 0  # eos, stop ids and stop strings are suppressed before that many tokens

    def filled(self, defaults: SamplingDefaults) -> GenerationConfig:
        """This configuration with `defaults` in the fields that are not given."""
        fields: dict[str, Any] = {n: value for n, value in defaults.sampling().items() if getattr(self, n) is None}
        if self.max_new_tokens == "auto":
            fields[self.MAX] = defaults.max_new_tokens or DEFAULT_NEW_TOKENS
        return msgspec.structs.replace(self, **fields)

    def params(self) -> SamplingParams:
        """The settings as the engine's SamplingParams, with a random seed if none was given."""
        fields = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        lengths = {"max_tokens": fields.pop(self.MAX, None), "min_tokens": fields.pop(self.MIN)}
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return SamplingParams(**(fields | lengths | {"seed": seed}))


GenConfigs = GenerationConfig | Sequence[GenerationConfig] | None


@dataclass
class Response:
    """An answer, or the new part of it in a stream. `index` is the index of its prompt."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    input_token_len: int = 0
    generate_token_len: int = 0
    cached_token_len: int = 0  # input tokens reused from the KV cache
    finish_reason: str | None = None  # stop, length, abort or error; None before the end
    logprobs: list[TextLogprobs] = field(default_factory=list)
    index: int = 0
    error_code: str | None = None
    error_message: str | None = None


@dataclass
class Session:
    """A conversation: `history` holds its messages, `response` the last answer.

    The engine keeps the session's KV for a lease (EngineConfig.session_lease). `tokens` are the tokens of its turns as
    they were generated, so that a new turn prefills only its own. If `history` was changed, the tokens from that place
    on are not used.
    """

    history: Messages = field(default_factory=list)
    response: Response | None = None
    id: str = field(default_factory=lambda: uuid4().hex)
    tokens: TokenHistory = field(default_factory=TokenHistory)

    def fork(self) -> Session:
        """An independent copy. The common part of both is computed and kept once."""
        return Session(copy.deepcopy(self.history), copy.deepcopy(self.response), tokens=self.tokens)

    def reset(self) -> None:
        self.history.clear()
        self.response = None
        self.tokens = TokenHistory()


def pipeline(
    model: str, backend_config: EngineConfig | None = None, *, log_level: str = "WARNING", **options: Any
) -> Pipeline:
    """Load `model` (a checkpoint's folder, or "demo") and return a Pipeline; `options` are fields of EngineConfig.

    Raises ConfigError, CheckpointError or UnsupportedError before any weight is loaded.
    """
    if backend_config is not None and options:
        raise ConfigError("pipeline: give backend_config or its fields as keywords, not both")
    logging.setup(log_level)
    return Pipeline(model, backend_config or parse(options, EngineConfig, "pipeline"))


class Pipeline:
    """Calls, streams, chats and scores. Several threads may use one pipeline; their requests share its batches."""

    def __init__(self, model: str, config: EngineConfig) -> None:
        self.engine = Engine(model, config)
        self.engine.info.sampling.announce(log)
        self.tokenizer = Tokenizer.from_pretrained(self.engine.info.model_path)
        self._outputs: dict[str, deque[StepOutput]] = {}
        self._ids = itertools.count()
        self._lock = threading.Lock()

    def __call__(
        self,
        prompts: Prompt | Sequence[Prompt],
        gen_config: GenConfigs = None,
        *,
        do_preprocess: bool = True,
        priority: int = 0,
        timeout: float | None = None,
    ) -> Any:
        """A Response for one prompt (text, or a list of messages), or a list of Responses for a list of prompts.

        A text is given to the model as a user's message. With `do_preprocess` off, or without a chat template, the
        model continues the text itself. A prompt that cannot run gives a Response with finish_reason "error"; the other
        prompts run. `priority` (lower is sooner) and `timeout` (seconds after the engine takes the prompt) apply to
        each prompt.
        """
        responses = [Response(index=i) for i in range(1 if _is_single(prompts) else len(prompts))]
        parts = self.stream_infer(prompts, gen_config, do_preprocess=do_preprocess, priority=priority, timeout=timeout)
        for part in parts:
            _extend(responses[part.index], part)
        return responses[0] if _is_single(prompts) else responses

    infer = __call__

    def stream_infer(
        self,
        prompts: Prompt | Sequence[Prompt],
        gen_config: GenConfigs = None,
        *,
        do_preprocess: bool = True,
        priority: int = 0,
        timeout: float | None = None,
    ) -> Iterator[Response]:
        """Parts of the answers as they are generated. The last part of each answer has its finish_reason."""
        if timeout is not None and not 0 < timeout < math.inf:
            raise ConfigError(f"timeout={timeout!r}: expected a number of seconds, more than 0")
        items: list[Any] = [prompts] if _is_single(prompts) else list(prompts)
        requests: dict[int, Request] = {}
        for index, (prompt, params) in enumerate(zip(items, _configs(gen_config, len(items)), strict=True)):
            try:
                ids = self.tokenizer.encode(*self._text(prompt, do_preprocess))
                requests[index] = self._request(ids, params, priority=priority, timeout=timeout)
            except RequestError as error:
                yield _refused(index, error)
        for index, output in self._run(requests):
            yield _response(index, output)

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
        session = session or self.session()
        parts = self._chat_parts(prompt, session, gen_config)
        if stream_response:
            return parts
        for _ in parts:
            pass
        return session

    def session(self) -> Session:
        return Session()

    def ppl(self, inputs: str | list[int] | Sequence[str | list[int]]) -> list[float]:
        """Perplexity, exp(mean negative log-likelihood), of each text or list of token ids, except the first token.

        Raises RequestError for an input of fewer than two tokens, or of more tokens than the context holds.
        """
        one = isinstance(inputs, str) or (len(inputs) > 0 and isinstance(inputs[0], int))
        items: list[Any] = [inputs] if one else list(inputs)
        rows = [self.tokenizer.encode(item) if isinstance(item, str) else item for item in items]
        params = GenerationConfig(max_new_tokens=0)
        requests = []
        for row in rows:
            if len(row) < 2:
                raise RequestError("invalid_request", "perplexity needs at least two tokens")
            requests.append(self._request(row, params, prompt_logprobs=True))
        scores: dict[str, list[float]] = {}
        for output in self._steps(requests):
            if output.error is not None:
                raise RequestError("engine_error", output.error)
            if output.prompt_logprobs:
                scores[output.request_id] = [position.logprob for position in output.prompt_logprobs]
        return [math.exp(-math.fsum(scores[r.request_id]) / len(scores[r.request_id])) for r in requests]

    def close(self) -> None:
        """Abort running requests. The pipeline cannot be used afterwards."""
        with self._lock:
            for request_id in self._outputs:
                self.engine.abort(request_id)
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

    def _text(self, prompt: Prompt, do_preprocess: bool = True) -> tuple[str, bool]:
        """(the text to continue, whether the tokenizer adds special tokens: a chat template writes its own)."""
        if isinstance(prompt, str):
            if not do_preprocess or self.tokenizer.chat_template is None:
                return prompt, True
            prompt = [{"role": "user", "content": prompt}]
        for message in prompt:
            if message.keys() - {"role", "content"} or not all(
                isinstance(message.get(k), str) for k in ("role", "content")
            ):
                raise RequestError("invalid_request", "a message is {'role': text, 'content': text}", "messages")
        return self.tokenizer.render_chat(prompt), False

    def _request(self, prompt_ids: list[int], config: GenerationConfig, **fields: Any) -> Request:
        config = config.filled(self.engine.info.sampling)
        config.validate(self.engine.info.vocab_size)
        name = f"pipeline-{next(self._ids)}"
        return Request(request_id=name, prompt_ids=prompt_ids, params=config.params(), **fields)

    def _run(self, requests: Mapping[int, Request]) -> Iterator[tuple[int, RequestOutput]]:
        """Outputs of `requests` as they arrive, each with the index of its request."""
        processors = {r.request_id: (i, OutputProcessor(self.tokenizer, r)) for i, r in requests.items()}
        for step in self._steps(list(requests.values())):
            index, processor = processors[step.request_id]
            if processor.finished:
                continue
            output = processor.process(step)
            if output.abort_engine:
                self.engine.abort(step.request_id)
            yield index, output

    def _steps(self, requests: list[Request]) -> Iterator[StepOutput]:
        """Run requests to completion and yield their outputs. Several such loops share the engine's steps.

        Requests that do not fit the engine's queue wait here. If the loop is left early, the rest are aborted.
        """
        waiting = deque(requests)
        open_ids: set[str] = set()
        try:
            while waiting or open_ids:
                ready: list[StepOutput] = []
                with self._lock:
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

    def _admit(self, waiting: deque[Request], open_ids: set[str], ready: list[StepOutput]) -> None:
        while waiting:
            try:
                self.engine.add(waiting[0])
            except RequestError as error:
                if error.code == "queue_full" and open_ids:
                    return
                name = waiting.popleft().request_id
                ready.append(_failed(name, error))
                continue
            name = waiting.popleft().request_id
            self._outputs[name] = deque()
            open_ids.add(name)

    def _forget(self, name: str, open_ids: set[str]) -> None:
        open_ids.discard(name)
        self._outputs.pop(name, None)

    def _chat_parts(self, prompt: str, session: Session, gen_config: GenerationConfig | None) -> Iterator[Response]:
        messages = [*session.history, {"role": "user", "content": prompt}]
        try:
            turn = session.tokens.encode(self.tokenizer, self._text(messages)[0])
            request = self._request(turn.ids, gen_config or GenerationConfig(), session_id=session.id)
        except RequestError as error:
            session.response = _refused(0, error)
            yield _refused(0, error)
            return
        answer, tokens = Response(), AssistantTurn(turn)
        for _, output in self._run({0: request}):
            part = _response(0, output)
            _extend(answer, part)
            session.tokens = tokens.add(output) or session.tokens
            yield part
        session.response = answer
        if answer.finish_reason in ("stop", "length"):
            session.history[:] = [*messages, {"role": "assistant", "content": answer.text}]


def _is_single(prompts: Any) -> bool:
    """A text, or a conversation: a list whose first item is a message."""
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], dict))


def _configs(gen_config: GenConfigs, count: int) -> list[GenerationConfig]:
    if gen_config is None or isinstance(gen_config, GenerationConfig):
        return [gen_config or GenerationConfig()] * count
    if len(gen_config) != count:
        raise ConfigError(f"{len(gen_config)} generation configs for {count} prompts; give one, or one for each")
    return list(gen_config)


def _refused(index: int, error: RequestError) -> Response:
    return Response(index=index, finish_reason="error", error_code=error.code, error_message=error.message)


def _failed(request_id: str, error: RequestError) -> StepOutput:
    return StepOutput(
        request_id=request_id, token_ids=[], finish_reason="error", error=error.message, error_code=error.code
    )


def _response(index: int, output: RequestOutput) -> Response:
    return Response(
        text=output.text,
        token_ids=output.token_ids,
        input_token_len=output.num_prompt_tokens,
        generate_token_len=len(output.token_ids),
        cached_token_len=output.num_cached_tokens,
        finish_reason=output.finish_reason,
        logprobs=output.logprobs,
        index=index,
        error_code=output.error_code if output.error else None,
        error_message=output.error,
    )


def _extend(whole: Response, part: Response) -> None:
    """Append a part of a stream to the whole."""
    whole.text += part.text
    whole.token_ids += part.token_ids
    whole.logprobs += part.logprobs
    whole.generate_token_len += part.generate_token_len
    whole.input_token_len, whole.cached_token_len = part.input_token_len, part.cached_token_len
    whole.finish_reason = part.finish_reason
    whole.error_code, whole.error_message = part.error_code, part.error_message
