"""Answers of Ollama's API: one object, or a stream with one a line, of which the last has the numbers."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

import msgspec

from lmkit.errors import RequestError
from lmkit.serve.auth import Owner
from lmkit.serve.chat import ChatBuilder, shown_logprob
from lmkit.serve.completions import CompletionResponse
from lmkit.serve.ollama.protocol import NAMES, GenerateBody
from lmkit.serve.protocol import ChatCompletionRequest
from lmkit.serve.response import ResponseBuilder
from lmkit.serve.serving import Serving
from lmkit.serve.streaming import Failed, Wire
from lmkit.serve.to_request import check_ids, check_prompt
from lmkit.serve.translated import renamed
from lmkit.text.dialects import Event
from lmkit.turbo import request as engine
from lmkit.turbo.transport.output import RequestOutput, TextLogprobs
from lmkit.web.budget import Share
from lmkit.web.ollama import LINES, empty_part, line, now

NS = 1_000_000_000


class _Lines(ResponseBuilder[Any]):
    """How both kinds of answers are written."""

    path: str
    name: str  # of the model, as the request gives it
    started: float  # time.monotonic
    loaded: float  # seconds that the model's loading took
    shows_context = False  # the answer ends with its tokens, for `context` of the next request

    def be_asked(self, path: str, name: str, started: float) -> None:
        self.path, self.name, self.started = path, name, started
        self.loaded = time.monotonic() - started
        self._ids: list[int] = []

    @property
    def is_movable(self) -> bool:
        """No line has a place for the notes that another node needs."""
        return False

    @property
    def wire(self) -> Wire:
        return Wire(LINES, self.early)

    @property
    def failed(self) -> Failed:
        return lambda error: line({"error": error.message})

    def early(self) -> str:
        return line(empty_part(self.path, self.name))

    def part(self, text: str = "", *, thinking: str = "", calls: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
        """A part of the answer."""
        shown = empty_part(self.path, self.name)
        added: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if listed := list(calls):
            added["tool_calls"] = listed
        if "message" in shown:
            shown["message"] |= {"content": text} | added
        else:
            shown |= {"response": text} | added
        return shown

    def end(self, output: RequestOutput) -> dict[str, Any]:
        """What the last part, or a whole answer, has."""
        fields: dict[str, Any] = {
            "done": True,
            "done_reason": "length" if output.finish_reason == "length" else "stop",
            "total_duration": round(NS * (time.monotonic() - self.started)),
            "load_duration": round(NS * self.loaded),
            "prompt_eval_count": output.num_prompt_tokens,
            "prompt_eval_duration": round(NS * output.prompt_seconds),
            "eval_count": output.num_output_tokens,
            "eval_duration": round(NS * output.decode_seconds),
        }
        if self.shows_context:
            fields["context"] = [*self.requests[0].prompt_ids, *self._ids]
        return fields

    def noted(self, output: RequestOutput) -> None:
        self.note(0, output)
        self.share.add(8 * len(output.token_ids))
        self._ids += output.token_ids

    def logprobs(self, entries: Iterable[TextLogprobs], top: int) -> dict[str, Any]:
        shown = [shown_logprob(entry, top) for entry in entries]
        return {"logprobs": shown} if shown else {}


class ChatAnswer(_Lines, ChatBuilder):
    """An answer after the model's chat template: of /api/chat, and of a prompt of /api/generate."""

    prefix = "ollama-"
    must_fit = False  # an answer that reaches the end of the context says so

    def __init__(
        self,
        server: Serving,
        body: ChatCompletionRequest,
        owner: Owner,
        share: Share,
        asked: GenerateBody | None = None,
    ) -> None:
        super().__init__(server, body, owner, share)
        self._before = asked.context or [] if asked else []
        self.shows_context = asked is not None and not asked.images

    def make_requests(self) -> list[engine.Request]:
        with renamed(NAMES):
            requests = super().make_requests()
        return [self._behind(request) for request in requests] if self._before else requests

    def _behind(self, request: engine.Request) -> engine.Request:
        """The request after the tokens of earlier turns, which begin with BOS where it must stand."""
        check_ids(self._before, self.server.info.vocab_size, "context")
        start, own = self.server.tokenizer.start, request.prompt_ids
        own = own[len(start) :] if start and own[: len(start)] == start else own
        ids = [*self._before, *own]
        check_prompt(ids, 1, self.server.info, "context")
        return msgspec.structs.replace(request, prompt_ids=ids)

    async def gather(self) -> None:
        with renamed(NAMES):
            await super().gather()

    async def whole(self) -> Any:
        texts: dict[str, list[str]] = {"content": [], "reasoning": []}
        calls: list[dict[str, Any]] = []
        logprobs: list[TextLogprobs] = []
        async with aclosing(self._steps()) as steps:
            async for kind, value, output in steps:
                logprobs += output.logprobs if kind == "output" else []
                if kind == "call":
                    calls.append(value)
                elif kind != "output":
                    texts[kind].append(value)
                    self.share.add(4 * len(value))
        assert self.last is not None
        content, thinking = ("".join(texts[kind]) for kind in ("content", "reasoning"))
        shown = self.part(content, thinking=thinking, calls=calls)
        return shown | self.logprobs(logprobs, self.num_top(self.body.top_logprobs)) | self.end(self.last)

    async def chunks(self) -> AsyncGenerator[str]:
        logprobs: dict[str, Any] = {}  # of an output, which its first part shows
        top = self.num_top(self.body.top_logprobs)
        async with aclosing(self._steps()) as steps:
            async for kind, value, output in steps:
                if kind == "output":
                    logprobs = self.logprobs(output.logprobs, top)
                    continue
                yield line(self._part_of(kind, value) | logprobs)
                logprobs = {}
        assert self.last is not None
        yield line(self.part() | logprobs | self.end(self.last))

    def _part_of(self, kind: str, value: Any) -> dict[str, Any]:
        match kind:
            case "content":
                return self.part(value)
            case "reasoning":
                return self.part(thinking=value)
            case _:
                return self.part(calls=[value])

    async def _steps(self) -> AsyncGenerator[tuple[str, Any, RequestOutput]]:
        """Each output, and then what it adds: content, reasoning, or a call that is whole."""
        calls = _Calls()
        async with aclosing(self.outputs()) as outputs:
            async for _, output in outputs:
                self.noted(output)
                yield "output", None, output
                is_last = output.finish_reason is not None
                for kind, value in calls.of(self.answers[0].take(output), is_last=is_last):
                    yield kind, value, output


class _Calls:
    """Events of an answer, in which the parts of a call become one."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._arguments: list[str] = []
        self._num = 0

    def of(self, events: Iterable[Event], *, is_last: bool) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        for kind, text in events:
            if kind == "arguments":
                self._arguments.append(text)
                continue
            found += self._closed()
            if kind == "call":
                self._name = text
            else:
                found.append((kind, text))
        return found + (self._closed() if is_last else [])

    def _closed(self) -> list[tuple[str, Any]]:
        if self._name is None:
            return []
        name, text, self._name, self._arguments = self._name, "".join(self._arguments), None, []
        try:
            arguments = msgspec.json.decode(text or "{}", type=dict[str, Any])
        except msgspec.DecodeError:  # a limit cut it: no client may take the part for a call
            return [("content", f"{name} {text}")]
        self._num += 1
        return [("call", {"function": {"index": self._num - 1, "name": name, "arguments": arguments}})]


class TextAnswer(_Lines, CompletionResponse):
    """An answer to a prompt as it is."""

    prefix = "ollama-"
    must_fit = False

    def make_requests(self) -> list[engine.Request]:
        with renamed({**NAMES, "prompt_start_ids": "context"}):
            return super().make_requests()

    async def whole(self) -> Any:
        (choice,) = await self.collect([""])
        shown = self.part(choice.text) | self.logprobs(choice.answer_logprobs(), self.body.logprobs or 0)
        return shown | self.end(choice.last)

    async def chunks(self) -> AsyncGenerator[str]:
        async with aclosing(self.outputs()) as outputs:
            async for _, output in outputs:
                self.noted(output)
                logprobs = self.logprobs(output.logprobs, self.body.logprobs or 0)
                if output.text or logprobs:
                    yield line(self.part(output.text) | logprobs)
        assert self.last is not None
        yield line(self.part() | self.end(self.last))


def without_prompt(path: str, name: str, started: float, reason: str) -> dict[str, Any]:
    """The answer to a request that only asks for the model to be there ("load"), or not ("unload")."""
    seconds = time.monotonic() - started
    took = {"total_duration": round(NS * seconds), "load_duration": round(NS * seconds)}
    return empty_part(path, name) | {"created_at": now(), "done": True, "done_reason": reason} | took


def refuse_beside(asked: GenerateBody) -> None:
    """Raises RequestError for fields that do not go with a prompt as it is."""
    wrong = {
        "images": bool(asked.images),
        "system": bool(asked.system),
        "think": bool(asked.think),
    }
    kind = "raw" if asked.raw else "suffix"
    for name, is_given in wrong.items():
        if is_given:
            raise RequestError("invalid_request", f"{name}: it does not go with {kind}; leave one out", name)
    if asked.suffix and asked.context:
        raise RequestError("invalid_request", "context: it does not go with suffix; leave one out", "context")
