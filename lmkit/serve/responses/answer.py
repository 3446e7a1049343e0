"""The answer of the Responses API: one response object, or the events that build it up."""

from __future__ import annotations

import time
from array import array
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from lmkit.errors import RequestError
from lmkit.serve.auth import Owner
from lmkit.serve.blocks import Block, BlockBuilder, Step
from lmkit.serve.parts import Timings
from lmkit.serve.protocol import ChatCompletionRequest
from lmkit.serve.response import timings
from lmkit.serve.responses.conversations import Conversations
from lmkit.serve.responses.custom import InputText, input_of
from lmkit.serve.responses.protocol import NAMES, ResponsesRequest, with_id
from lmkit.serve.responses.tool_protocol import CustomTool
from lmkit.serve.responses.tools import presented
from lmkit.serve.serving import Serving
from lmkit.serve.streaming import Failed, event
from lmkit.serve.translated import renamed, sealed
from lmkit.turbo import request as engine
from lmkit.turbo.transport.output import RequestOutput, TextLogprobs
from lmkit.web.budget import Share
from lmkit.web.response_store import ResponseStore, Stored

RAW_TOKEN_BYTES = 16  # of a token in `_raw_messages`: its id, and some bytes of text
_NO_SCHEMA = {"function": {"parameters": None, "strict": None}, "custom": {"format": {"type": "text"}}}
_ECHOED = {"reasoning", "text", "tool_choice", "tools"}


class Exchange(NamedTuple):
    """A request of the Responses API."""

    body: ResponsesRequest
    owner: str  # in the store
    store: ResponseStore

    @property
    def is_stored(self) -> bool:
        return self.body.store is not False and self.store.is_on


class ResponsesAnswer(BlockBuilder):
    prefix = "resp_"
    repeats_logprobs = True
    ids = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}

    def __init__(
        self, server: Serving, chat: ChatCompletionRequest, owner: Owner, share: Share, exchange: Exchange
    ) -> None:
        super().__init__(server, chat, owner, share)
        self._exchange, self._asked = exchange, exchange.body
        self._number = -1  # of the last event
        self._tools = {one.shown: one for one in presented(exchange.body.tools)}
        self._custom = {one.shown for one in self._tools.values() if isinstance(one.tool, CustomTool)}
        self._input = InputText()  # of the custom call that grows
        self._token_ids = array("i")  # of the answer, if they are shown

    async def gather(self) -> None:
        with renamed(NAMES):
            await super().gather()

    def make_requests(self) -> list[engine.Request]:
        with renamed(NAMES):
            return super().make_requests()

    def taken(self, output: RequestOutput) -> Iterator[Step]:
        if self._asked.enable_response_messages:
            self._token_ids.extend(output.token_ids)
        return super().taken(output)

    async def whole(self) -> dict[str, Any]:
        async for _ in self.steps():
            pass
        return await self._end()

    async def chunks(self) -> AsyncGenerator[str]:
        async for step in self.steps():
            if self._number < 0:
                yield self.early()
            for text in self._written(step):
                yield text
        response = await self._end()
        yield self._event(f"response.{response['status']}", response=response, **self._times())

    def early(self) -> str:
        events = ("response.created", "response.in_progress")
        return "".join(self._event(kind, response=self.response("in_progress")) for kind in events)

    def _times(self) -> dict[str, Timings]:
        """llama.cpp's field of an event, if the request asks for it."""
        return {"timings": timings(self.last)} if self.body.timings_per_token else {}

    @property
    def failed(self) -> Failed:
        return self._failure

    def _failure(self, error: RequestError) -> str:
        return self._event("response.failed", response=self.failure(error))

    def failure(self, error: RequestError) -> dict[str, Any]:
        """The response that an error ended."""
        if self.blocks.all:
            self.blocks.all[-1].is_cut = True
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response = self.response("failed", output=list(self._items()))
        return response | {"error": {"code": code, "message": error.message}}

    @property
    def has_begun(self) -> bool:
        """Whether the model has written some of it."""
        return bool(self.blocks.all)

    def _finished(self) -> dict[str, Any]:
        cut = self.last.finish_reason == "length"
        about = {"reason": "max_output_tokens"} if cut else None
        usage = self.count.usage()
        cached, new = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens
        return self.response("incomplete" if cut else "completed", output=list(self._items())) | {
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": about,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                "output_tokens": new,
                "output_tokens_details": usage.completion_tokens_details,
                "total_tokens": usage.total_tokens,
            },
            **self._raw_messages(),
        }

    def _raw_messages(self) -> dict[str, Any]:
        """vLLM's fields of a response, if the request asks for them: what the model read and wrote, with its ids."""
        if not self._asked.enable_response_messages:
            return {}
        shown = {"input_messages": self.requests[0].prompt_ids, "output_messages": self._token_ids.tolist()}
        self.share.add(sum(RAW_TOKEN_BYTES * len(ids) for ids in shown.values()))
        decode = self.server.tokenizer.decode
        return {
            name: [{"type": "raw_message_tokens", "message": decode(ids, skip_special_tokens=False), "tokens": ids}]
            for name, ids in shown.items()
        }

    async def _end(self) -> dict[str, Any]:
        response, exchange = self._finished(), self._exchange
        if (conversation := self._asked.conversation) is not None:
            new = [*self._input_items, *response["output"]]
            await Conversations(exchange.store, exchange.owner).add(conversation, new)
        return await self.keep(response)

    @cached_property
    def _input_items(self) -> list[dict[str, Any]]:
        return list(map(with_id, self._asked.input))

    async def keep(self, response: dict[str, Any]) -> dict[str, Any]:
        """The response, after it was stored if it is to be. It takes the place of an earlier state."""
        if not response["store"]:
            return response
        exchange = self._exchange
        items = msgspec.json.encode(self._input_items)
        stored = Stored(self.id, self._asked.previous_response_id, items, msgspec.json.encode(response))
        return response | {"store": await exchange.store.put(exchange.owner, stored)}

    def response(self, status: str, output: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """The response object in a state."""
        asked, params = self._asked, self.requests[0].params
        fields = asked.model_dump(mode="json", exclude_none=True, include=_ECHOED)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.head["created"],
            "completed_at": None,
            "status": status,
            "background": bool(asked.background),
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": asked.max_tool_calls,
            "metadata": asked.metadata or {},
            "model": self.server.model_name,
            "output": output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "prompt_cache_key": asked.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None} | fields.get("reasoning", {}),
            "service_tier": "default",
            "store": self._exchange.is_stored,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}} | fields.get("text", {}),
            "tool_choice": fields.get("tool_choice", "auto"),
            "tools": [_NO_SCHEMA.get(tool["type"], {}) | tool for tool in fields.get("tools", ())],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": asked.user,
            "safety_identifier": asked.safety_identifier,
        } | ({} if asked.conversation is None else {"conversation": {"id": asked.conversation}})

    def _items(self) -> Iterator[dict[str, Any]]:
        for block in self.blocks.all:
            yield self._item(block, _status(block))

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        is_new = status == "in_progress"
        item: dict[str, Any] = {"id": block.id, "status": status}
        match block.kind:
            case "reasoning":
                item |= {"type": "reasoning", "summary": [], "content": [] if is_new else [self._part(block)]}
                if "reasoning.encrypted_content" in (self._asked.include or ()):
                    item["encrypted_content"] = None if is_new else sealed(block.text)
            case "text":
                item |= {"type": "message", "role": "assistant", "content": [] if is_new else [self._part(block)]}
            case "call" if block.name in self._custom:
                item |= {"type": "custom_tool_call", "call_id": block.call_id, **self._called(block)}
                item["input"] = input_of(block.text)
            case "call":
                item |= {"type": "function_call", "call_id": block.call_id, **self._called(block)}
                item["arguments"] = block.text
        return item

    def _called(self, block: Block) -> dict[str, str]:
        """The tool as the request names it."""
        one = self._tools.get(block.name)
        if one is None or one.namespace is None:
            return {"name": block.name}
        return {"name": one.tool.name, "namespace": one.namespace}

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        logprobs = self._logprobs(block.logprobs)
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, entries: Sequence[TextLogprobs]) -> list[dict[str, Any]]:
        return [msgspec.to_builtins(self.logprob(entry)) for entry in entries]

    def _written(self, step: Step) -> Iterator[str]:
        """The events of a step."""
        what, block, text, logprobs, progress = step
        if progress is not None:
            yield self._event("response.in_progress", response=self.response("in_progress"), prompt_progress=progress)
            return
        at = {"item_id": block.id, "output_index": block.index}
        if block.kind == "call":
            written = self._custom_written if block.name in self._custom else self._call_written
            yield from written(step, at)
            return
        kind = "response.output_text" if block.kind == "text" else "response.reasoning_text"
        inside = at | {"content_index": 0}
        shown = {"logprobs": self._logprobs(logprobs)} if block.kind == "text" else {}
        match what:
            case "open":
                yield self._item_event("added", block, "in_progress")
                yield self._event("response.content_part.added", **inside, part=self._part(block))
            case "grow":
                yield self._event(f"{kind}.delta", **inside, delta=text, **shown, **self._times())
            case "close":
                if shown:
                    shown = {"logprobs": self._logprobs(block.logprobs)}
                yield self._event(f"{kind}.done", **inside, text=block.text, **shown)
                yield self._event("response.content_part.done", **inside, part=self._part(block))
                yield self._item_event("done", block, _status(block))

    def _call_written(self, step: Step, at: dict[str, Any]) -> Iterator[str]:
        kind, block = "response.function_call_arguments", step.block
        match step.what:
            case "open":
                yield self._item_event("added", block, "in_progress")
            case "grow":
                yield self._event(f"{kind}.delta", **at, delta=step.text)
            case "close":
                yield self._event(f"{kind}.done", **at, name=self._called(block)["name"], arguments=block.text)
                yield self._item_event("done", block, _status(block))

    def _custom_written(self, step: Step, at: dict[str, Any]) -> Iterator[str]:
        kind, block = "response.custom_tool_call_input", step.block
        match step.what:
            case "open":
                self._input = InputText()
                yield self._item_event("added", block, "in_progress")
            case "grow":
                if delta := self._input.feed(step.text):
                    yield self._event(f"{kind}.delta", **at, delta=delta)
            case "close":
                yield self._event(f"{kind}.done", **at, input=input_of(block.text))
                yield self._item_event("done", block, _status(block))

    def _item_event(self, what: str, block: Block, status: str) -> str:
        item = self._item(block, status)
        return self._event(f"response.output_item.{what}", output_index=block.index, item=item)

    def _event(self, type: str, **fields: Any) -> str:
        self._number += 1
        data = msgspec.json.encode({"type": type, "sequence_number": self._number, **fields})
        return event(data.decode(), type)


def _status(block: Block) -> str:
    return "incomplete" if block.is_cut else "completed"
