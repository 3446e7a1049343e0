"""Turns engine steps into the user's output: text, log-probabilities with token text, stop strings. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from lmkit.text import EncodedTurn, IncrementalDetokenizer, TokenHistory, Tokenizer
from lmkit.turbo.repetition import NEVER, Repetitions
from lmkit.turbo.request import FinishReason, Request, StepOutput, TokenLogprobs


class TokenText(msgspec.Struct, frozen=True):
    """A token as shown beside its log-probability."""

    token_id: int
    text: str  # incomplete UTF-8 shows as U+FFFD
    data: bytes
    logprob: float | None  # natural log; None for the first token of a prompt, or the first one asked for

    @property
    def as_id(self) -> str:
        """As `return_tokens_as_token_ids` shows it."""
        return f"token_id:{self.token_id}"


class TextLogprobs(msgspec.Struct, frozen=True):
    """One position: its token, the most likely tokens (best first), and the offset of the token's text."""

    token: TokenText
    top: list[TokenText]
    text_offset: int  # characters decoded before it, in the prompt for prompt tokens, else in the output


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a request's output that one step added. `finish_reason` is set on the last one."""

    request_id: str
    text: str  # new text; stop strings are cut off unless the request asks for them
    token_ids: list[int]  # new tokens, including an eos or stop id at the end
    logprobs: list[TextLogprobs] = []  # one for each of token_ids, on request
    prompt_logprobs: list[TextLogprobs] = []  # with the first output, on request: one for each prompt token
    embedding: bytes = b""  # with the last output, on request
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop_token_ids entry that ended it; None for an eos
    repeats: bool = False  # it was cut because it repeated itself; its finish_reason is "length"
    num_prompt_tokens: int
    kv: list[tuple[int, str]] = []  # as StepOutput has it, known from the first output on
    num_cached_tokens: int = 0  # prompt tokens found in the cache, known from the first output on
    num_computed: int | None = None  # of the prompt's tokens, in an output before the first token, on request
    num_output_tokens: int  # so far
    num_steps: int = 0  # so far: steps that gave tokens; fewer than tokens if draft tokens were right
    num_preemptions: int = 0  # with the last output: times that the request lost its KV blocks
    queue_seconds: float = 0.0  # with the first output: that the request waited in the engine's queue
    prompt_seconds: float = 0.0  # from the end of that wait to the first output
    decode_seconds: float = 0.0  # from the first output to the last token so far
    abort_engine: bool = False  # a stop string or a repetition ended it here: the engine must be told to abort it
    error: str | None = None
    error_code: str = "engine_error"  # the code of `error`

    @property
    def end(self) -> str | int | None:
        """What ended the answer, as APIs show it: "repetition", or the `stop_reason`."""
        return "repetition" if self.repeats else self.stop_reason


def token_text(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> TokenText:
    data = tokenizer.token_bytes(token_id)
    return TokenText(token_id, data.decode(errors="replace"), data, logprob)


class AssistantTurn:
    """Collects the tokens of an assistant's turn for the next turn of the conversation."""

    def __init__(self, turn: EncodedTurn) -> None:
        self._turn = turn
        self._ids: list[int] = []

    def add(self, output: RequestOutput) -> TokenHistory | None:
        """Return the history with this answer once it is complete, otherwise None.

        None is also returned if the answer failed or a stop string cut it: the conversation does not go on with all of
        its tokens.
        """
        self._ids += output.token_ids
        if output.finish_reason not in ("stop", "length") or isinstance(output.stop_reason, str):
            return None
        ended = output.finish_reason == "stop"  # the last token ended it and is no text of the answer
        return self._turn.answered(self._ids[: -1 if ended else None])


class OutputProcessor:
    """Follows one request from its first step to its last. It is stateful: `process` takes the steps in order."""

    def __init__(self, tokenizer: Tokenizer, request: Request, clock: Callable[[], float] = time.monotonic) -> None:
        params = request.params
        self._clock, self._start = clock, clock()
        self._prompt_seconds = self._decode_seconds = 0.0
        self._tokenizer = tokenizer
        self._request = request
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            shown_special_ids=params.shown_special_ids,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
        )
        self._repetitions = Repetitions(params.repetition_stop or NEVER, params.reasoning_end)
        self._num_tokens = self._num_cached = self._num_steps = 0
        self._kv: list[tuple[int, str]] = []
        self._first = True
        self.finished = False

    def process(self, step: StepOutput) -> RequestOutput:
        """Return the output of one step. A step after the last one was already on its way; it adds nothing."""
        if step.num_computed is not None:
            return self._on_the_way(step)
        texts: list[str] = []
        logprobs: list[TextLogprobs] = []
        first_token, repeats = self._num_tokens, False
        token_ids = [] if self.finished else step.token_ids
        self._num_steps += step.num_steps if token_ids else 0
        self._time(step, is_later=bool(token_ids))
        for idx, token_id in enumerate(token_ids):
            if step.logprobs:
                logprobs.append(self._entry(step.logprobs[idx], self._detokenizer.num_chars))
            self._num_tokens += 1
            ends = step.stop_token is not None and idx == len(token_ids) - 1
            texts.append("" if ends else self._detokenizer.push([token_id], armed=self._armed))
            repeats = not ends and self._repetitions.push(token_id) and self._armed
            if self._detokenizer.matched is not None or repeats:
                break
        if (step.finish_reason is not None or repeats) and not self.finished:
            texts.append(self._detokenizer.finish(armed=self._armed))
        prompt_logprobs = self._prompt_entries(step.prompt_logprobs) if self._first else []
        self._num_cached = step.cached_tokens if self._first else self._num_cached
        self._kv = step.kv or self._kv  # known outputs of another node came before this engine's first
        self._first = False

        matched = self._detokenizer.matched
        repeats = repeats and matched is None
        finish_reason: FinishReason | None = "stop" if matched is not None else step.finish_reason
        finish_reason = "length" if repeats else finish_reason
        abort_engine = finish_reason is not None and step.finish_reason is None and not self.finished
        self.finished = self.finished or finish_reason is not None
        return RequestOutput(
            request_id=self._request.request_id,
            text="".join(texts),
            token_ids=token_ids[: self._num_tokens - first_token],
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            embedding=step.embedding,
            finish_reason=finish_reason,
            stop_reason=matched if matched is not None else self._stop_id(step),
            repeats=repeats,
            num_prompt_tokens=len(self._request.prompt_ids),
            num_cached_tokens=self._num_cached,
            kv=self._kv,
            num_output_tokens=self._num_tokens,
            num_steps=self._num_steps,
            abort_engine=abort_engine,
            num_preemptions=step.num_preemptions,
            queue_seconds=step.queue_seconds,
            prompt_seconds=self._prompt_seconds,
            decode_seconds=self._decode_seconds,
            error=step.error,
            error_code=step.error_code,
        )

    def _on_the_way(self, step: StepOutput) -> RequestOutput:
        """An output before the first token."""
        return RequestOutput(
            request_id=self._request.request_id,
            text="",
            token_ids=[],
            num_prompt_tokens=len(self._request.prompt_ids),
            num_cached_tokens=step.cached_tokens,
            num_computed=step.num_computed,
            num_output_tokens=0,
            prompt_seconds=max(0.0, self._clock() - self._start - step.queue_seconds),
        )

    def _time(self, step: StepOutput, *, is_later: bool) -> None:
        """Take the time of the first output, and of each one `is_later` that has tokens."""
        if self._first:
            arrived, self._start = self._start, self._clock()
            self._prompt_seconds = max(0.0, self._start - arrived - step.queue_seconds)
        elif is_later:
            self._decode_seconds = self._clock() - self._start

    @property
    def _armed(self) -> bool:
        return self._num_tokens >= self._request.params.min_tokens

    def _stop_id(self, step: StepOutput) -> int | None:
        last = step.token_ids[-1] if step.stop_token is not None else None
        return last if last in self._request.params.stop_token_ids else None

    def _entry(self, position: TokenLogprobs, text_offset: int) -> TextLogprobs:
        top = [token_text(self._tokenizer, token_id, logprob) for token_id, logprob in position.top]
        return TextLogprobs(token_text(self._tokenizer, position.token_id, position.logprob), top, text_offset)

    def _prompt_entries(self, logprobs: list[TokenLogprobs]) -> list[TextLogprobs]:
        start = self._request.logprobs_start
        ids = self._request.prompt_ids[start:]
        if not self._request.prompt_logprobs or len(logprobs) != len(ids) - 1:  # it ended before they were computed
            return []
        plain = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=self._request.params.skip_special_tokens)
        entries = [TextLogprobs(token_text(self._tokenizer, ids[0], None), [], plain.num_chars)]
        for before, position in zip(ids, logprobs, strict=False):
            plain.push([before])
            entries.append(self._entry(position, plain.num_chars))
        return entries
