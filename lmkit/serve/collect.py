"""What is held of an answer: parts that the client has not read yet, and whole answers until their end.

A whole answer with log-probabilities is kept as arrays, 12 bytes for each token that it names. As objects they would
take 200, and as JSON 65.
"""

from __future__ import annotations

import asyncio
import io
import math
from array import array
from collections.abc import AsyncGenerator, Iterator, Sequence

import msgspec

from lmkit.errors import RequestError
from lmkit.log import get_logger
from lmkit.text import Tokenizer
from lmkit.turbo.request import EngineInfo, Request
from lmkit.turbo.transport.output import RequestOutput, TextLogprobs, TokenText, token_text
from lmkit.web.budget import Share

TOKEN_BYTES = 36  # of a token in a whole answer: its id, and its text with four bytes a character
ENTRY_BYTES = 12  # of a token and its log-probability in a whole answer
OBJECT_BYTES = 220  # of the same as a TokenText

logger = get_logger(__name__)


class Backlog:
    """Outputs on their way to the client. Those of one choice that it does not fetch in time become one output."""

    def __init__(self, share: Share, num_choices: int) -> None:
        """`share` counts the bytes of outputs that wait. If it is refused, the answer ends with that error."""
        self._share = share
        self._num_running = num_choices
        self._waiting: dict[int, RequestOutput] = {}  # by choice; the first has waited longest
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        share.on_refusal = self._drop

    async def put(self, idx: int, output: RequestOutput) -> None:
        """Raises RequestError if the share is refused."""
        before = self._waiting.get(idx)
        self._waiting[idx] = output if before is None else joined(before, output)
        self._changed.set()
        self._share.add(num_bytes(output))
        if before is not None:  # many steps may have come at once: `outputs` gets a turn before the next one
            await asyncio.sleep(0)

    def _drop(self) -> None:
        logger.warning("an answer ends before its client has read it: %s", self._share.refusal)
        self._waiting.clear()
        self._changed.set()

    def end(self, task: asyncio.Task[None]) -> None:
        """The outputs of a choice have ended, well or badly."""
        self._num_running -= 1
        if not task.cancelled():
            self._error = self._error or task.exception()
        self._changed.set()

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """The outputs until all choices have ended. Raises the first error of a choice, after what came before it."""
        while True:
            while self._waiting:
                idx = next(iter(self._waiting))
                output = self._waiting.pop(idx)
                self._share.add(-num_bytes(output))
                yield idx, output
            self._share.check()
            if self._error is not None:
                raise self._error
            if not self._num_running:
                self._share.on_refusal = None  # it is complete
                return
            self._changed.clear()
            await self._changed.wait()


def joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two outputs that follow each other as one. The lists of the first become its own."""
    first.token_ids.extend(second.token_ids)
    first.logprobs.extend(second.logprobs)
    return msgspec.structs.replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids,
        logprobs=first.logprobs,
        prompt_logprobs=first.prompt_logprobs,
        queue_seconds=max(first.queue_seconds, second.queue_seconds),  # one of a choice's outputs has it
    )


def num_bytes(output: RequestOutput) -> int:
    """About what an output holds. It is linear: the bytes of joined outputs are the sum of theirs."""
    entries = sum(1 + len(entry.top) for entries in (output.logprobs, output.prompt_logprobs) for entry in entries)
    return 4 * len(output.text) + 8 * len(output.token_ids) + len(output.embedding) + OBJECT_BYTES * entries


class Collected:
    """One choice of an answer that is sent whole."""

    def __init__(self, tokenizer: Tokenizer, share: Share, prompt: str = "") -> None:
        """`prompt` stands before the answer (`echo`)."""
        self._tokenizer, self._share = tokenizer, share
        self._text = io.StringIO()
        self._text.write(prompt)
        self._num_prompt_chars, self._num_prompt_tokens = len(prompt), 0
        self._ids, self._logprobs = array("i"), array("d")  # of each position: its token, then the most likely ones
        self._num_top, self._offsets = array("I"), array("q")  # of each position
        self.token_ids = array("i")  # of the answer
        self.last: RequestOutput

    @property
    def text(self) -> str:
        return self._text.getvalue()

    def add(self, output: RequestOutput) -> None:
        """Raises RequestError if the budget is used up."""
        num_entries = len(self._ids)
        self.token_ids.extend(output.token_ids)
        self._text.write(output.text)
        self._num_prompt_tokens += len(output.prompt_logprobs)
        for entries, shift in ((output.prompt_logprobs, 0), (output.logprobs, self._num_prompt_chars)):
            for entry in entries:
                for token in (entry.token, *entry.top):
                    self._ids.append(token.token_id)
                    self._logprobs.append(math.nan if token.logprob is None else token.logprob)
                self._num_top.append(len(entry.top))
                self._offsets.append(entry.text_offset + shift)
        self.last = msgspec.structs.replace(output, text="", token_ids=[], logprobs=[], prompt_logprobs=[])
        num_entries = len(self._ids) - num_entries
        self._share.add(4 * (len(output.text) + len(output.token_ids)) + ENTRY_BYTES * num_entries)

    def whole(self) -> RequestOutput:
        """All outputs as one, without log-probabilities."""
        return msgspec.structs.replace(self.last, text=self.text, token_ids=self.token_ids.tolist())

    @property
    def mean_logprob(self) -> float:
        """Of the answer's tokens."""
        own = [entry.token.logprob or 0.0 for entry in self.answer_logprobs()]
        return math.fsum(own) / max(len(own), 1)

    def logprobs(self) -> Iterator[TextLogprobs]:
        """The positions of the prompt, if the request asked for them, and of the answer."""
        return self._positions(0, len(self._num_top))

    def prompt_logprobs(self) -> Iterator[TextLogprobs]:
        return self._positions(0, self._num_prompt_tokens)

    def answer_logprobs(self) -> Iterator[TextLogprobs]:
        return self._positions(self._num_prompt_tokens, len(self._num_top))

    def _positions(self, start: int, stop: int) -> Iterator[TextLogprobs]:
        at = start + sum(self._num_top[:start])
        for idx in range(start, stop):
            token, *top = map(self._token, range(at, at + 1 + self._num_top[idx]))
            at += 1 + self._num_top[idx]
            yield TextLogprobs(token, top, self._offsets[idx])

    def _token(self, at: int) -> TokenText:
        logprob = self._logprobs[at]
        return token_text(self._tokenizer, self._ids[at], None if math.isnan(logprob) else logprob)


def check_output(
    requests: Sequence[Request], choices_per_prompt: int, info: EngineInfo, *, stream: bool, limit: int
) -> None:
    """Raise RequestError if an answer to these requests could hold more than `limit` bytes.

    A stream holds nothing, but the log-probabilities of a prompt come all at once.
    """
    params = requests[0].params
    shown = len(params.logprob_token_ids) + 1 if params.logprob_token_ids else params.logprobs
    num_entries = 0 if params.logprobs is None else 1 + (shown or 0)
    prompt_entries = 1 + params.prompt_top
    most = info.max_model_len if params.max_tokens is None else params.max_tokens
    new = sum(min(most, info.max_model_len - len(request.prompt_ids)) for request in requests)
    scored = [len(r.prompt_ids) - r.logprobs_start for r in requests] if requests[0].prompt_logprobs else [0]
    prompt, at_once = sum(scored), choices_per_prompt * max(scored)
    needed = at_once * prompt_entries * OBJECT_BYTES
    if not stream:
        needed += new * (TOKEN_BYTES + num_entries * ENTRY_BYTES)
        needed += prompt * (TOKEN_BYTES + prompt_entries * ENTRY_BYTES)
    if needed > limit:
        message = (
            f"the answer could take {needed >> 20} MiB, and the limit is {limit >> 20} MiB; lower n, max_tokens or the "
            "number of log-probabilities" + ("" if stream else ", or stream the answer")
        )
        raise RequestError("invalid_request", message, "max_tokens" if len(requests) == 1 else "n")
