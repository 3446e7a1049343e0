"""The answer of the Messages API: one message, or the events that build it up."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec

from lmkit.serve.auth import Owner
from lmkit.serve.blocks import Block, BlockBuilder, Step
from lmkit.serve.messages.protocol import NAMES, MessagesRequest
from lmkit.serve.protocol import ChatCompletionRequest
from lmkit.serve.serving import Serving
from lmkit.serve.streaming import event
from lmkit.serve.translated import renamed, sealed
from lmkit.turbo import request as engine
from lmkit.web.budget import Share

SIGNATURE = "lmkit"  # clients want one, and hand it back


class MessagesAnswer(BlockBuilder):
    prefix = "msg_"
    ids = {"reasoning": "thinking_", "text": "text_", "call": "toolu_"}
    must_fit = False  # as in the API: an answer that reaches the end of the context says so

    def __init__(
        self, server: Serving, chat: ChatCompletionRequest, owner: Owner, share: Share, asked: MessagesRequest
    ) -> None:
        super().__init__(server, chat, owner, share)
        self._has_begun = False  # the stream
        self._hides = asked.thinking is not None and asked.thinking.display == "omitted"

    async def gather(self) -> None:
        with renamed(NAMES):
            await super().gather()

    def make_requests(self) -> list[engine.Request]:
        with renamed(NAMES):
            return super().make_requests()

    async def whole(self) -> dict[str, Any]:
        async for _ in self.steps():
            pass
        return self._message(list(map(self._block, self.blocks.all))) | self._ended() | {"usage": self._usage()}

    async def chunks(self) -> AsyncGenerator[str]:
        async for step in self.steps():
            if not self._has_begun:
                yield self.early()
            for text in self._written(step):
                yield text
        yield _event("message_delta", delta=self._ended(), usage=self._usage())
        yield _event("message_stop")

    def early(self) -> str:
        self._has_begun = True
        usage = self._usage() | {"output_tokens": 0}  # none was sent yet; message_delta has their number
        return _event("message_start", message=self._message([]) | {"usage": usage})

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.server.model_name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _ended(self) -> dict[str, Any]:
        output = self.last
        sequence = output.stop_reason if isinstance(output.stop_reason, str) else None
        if sequence is not None:
            reason = "stop_sequence"
        elif output.finish_reason == "length":
            is_full = output.num_prompt_tokens + output.num_output_tokens >= self.server.info.max_model_len
            short = output.num_output_tokens < (self.requests[0].params.max_tokens or 1 << 31)
            reason = "model_context_window_exceeded" if is_full and short else "max_tokens"
        else:
            reason = "tool_use" if any(block.kind == "call" for block in self.blocks.all) else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> dict[str, Any]:
        usage = self.count.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self.answers[0].reasoning_tokens},
            "service_tier": "standard",
        }

    def _block(self, block: Block) -> dict[str, Any]:
        match block.kind:
            case "reasoning":
                thinking = "" if self._hides else block.text
                return {"type": "thinking", "thinking": thinking, "signature": self._signature(block)}
            case "call":
                try:
                    arguments = msgspec.json.decode(block.text or "{}", type=dict[str, Any])
                except msgspec.DecodeError:  # a limit cut it: no client may take the part for a call
                    return {"type": "text", "text": f"{block.name} {block.text}"}
                return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}
            case _:
                return {"type": "text", "text": block.text}

    def _signature(self, block: Block) -> str:
        """Thinking that the client does not see is in its signature."""
        return sealed(block.text) if self._hides else SIGNATURE

    def _written(self, step: Step) -> Iterator[str]:
        what, block, text, *_ = step
        match what, block.kind:
            case "open", "reasoning":
                yield self._opens(block, {"type": "thinking", "thinking": "", "signature": ""})
            case "open", "text":
                yield self._opens(block, {"type": "text", "text": ""})
            case "open", "call":
                yield self._opens(block, {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}})
            case "grow", "reasoning" if not self._hides:
                yield self._grows(block, {"type": "thinking_delta", "thinking": text})
            case "grow", "text" if text:
                yield self._grows(block, {"type": "text_delta", "text": text})
            case "grow", "call":
                yield self._grows(block, {"type": "input_json_delta", "partial_json": text})
            case "close", kind:
                if kind == "reasoning":
                    yield self._grows(block, {"type": "signature_delta", "signature": self._signature(block)})
                yield _event("content_block_stop", index=block.index)

    @staticmethod
    def _opens(block: Block, content: dict[str, Any]) -> str:
        return _event("content_block_start", index=block.index, content_block=content)

    @staticmethod
    def _grows(block: Block, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=block.index, delta=delta)


def _event(type: str, **fields: Any) -> str:
    return event(msgspec.json.encode({"type": type, **fields}).decode(), type)
