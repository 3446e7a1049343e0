"""POST /v1/chat/completions."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, ClassVar

import msgspec
from fastapi import APIRouter, Request, Response

from lmkit.serve.auth import Owner
from lmkit.serve.body import read_json
from lmkit.serve.collect import Collected
from lmkit.serve.images import ImageSources
from lmkit.serve.protocol import (
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatLogprob,
    ChatLogprobs,
    TopLogprob,
)
from lmkit.serve.response import ResponseBuilder, respond, token_name
from lmkit.serve.serving import MIN_LOGPROB, Serving
from lmkit.serve.streaming import DONE
from lmkit.serve.to_request import chat_requests
from lmkit.serve.translated import num_prompt_tokens
from lmkit.text import TokenHistory
from lmkit.text.chat.answer_events import AnswerEvents, MessageDeltas, message
from lmkit.text.dialects import Event
from lmkit.turbo import request as engine
from lmkit.turbo.transport.output import AssistantTurn, RequestOutput, TextLogprobs, TokenText
from lmkit.turbo.transport.prompt_images import settings_of
from lmkit.web.budget import Share

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    return await respond(request, ChatCompletionRequest, _ChatResponse)


@router.post("/v1/chat/completions/input_tokens")
async def input_tokens(request: Request) -> Response:
    """llama.cpp's: how many tokens the prompt of such a request has."""
    chat = await read_json(request, ChatCompletionRequest)
    number = await num_prompt_tokens(request, chat, {})
    return Response(msgspec.json.encode({"input_tokens": number}), media_type="application/json")


class ChatBuilder(ResponseBuilder[ChatCompletionRequest]):
    """An answer to a chat, whatever API it is for."""

    answers: list[AnswerEvents]  # of each choice
    must_fit: ClassVar[bool] = True  # max_tokens that goes beyond the context is refused

    def __init__(self, server: Serving, body: ChatCompletionRequest, owner: Owner, share: Share) -> None:
        super().__init__(server, body, owner, share)
        self._session = (owner.tenant, owner.own(body.session_id)) if body.session_id is not None else None
        self._images = ImageSources(server.config)
        self._history = server.sessions.get(self._session) if self._session else TokenHistory()

    async def gather(self) -> None:
        """See ResponseBuilder."""
        if images := self.body.images:
            settings_of(self.server.info)
            await self._images.fetch(images)

    def make_requests(self) -> list[engine.Request]:
        style = self.server.style
        requests, turn = chat_requests(
            self.body,
            self.server.tokenizer,
            self.server.info,
            self.id,
            owner=self.owner,
            history=self._history,
            style=style,
            must_fit=self.must_fit,
            load=self._images.load,
        )
        self._tokens = AssistantTurn(turn)
        is_thinking = style.is_thinking(turn.rest)
        self.answers = [style.answer(self.body, is_thinking=is_thinking) for _ in requests]
        if self.identity is not None:  # ids of calls are the same at each node
            for idx, answer in enumerate(self.answers):
                answer.random = random.Random(f"{self.id} {idx}")
        return requests

    def prepare(self) -> None:
        super().prepare()
        if self.server.style.thought is not None:
            self.count.reasoning_tokens = lambda: sum(answer.reasoning_tokens for answer in self.answers)

    @property
    def num_chars(self) -> int:
        return self.body.num_chars

    def note(self, idx: int, output: RequestOutput) -> None:
        """Also remember the tokens of a session's answer.

        Of several choices none is remembered, because the client continues one of them.
        """
        super().note(idx, output)
        if self._session and len(self.requests) == 1 and (history := self._tokens.add(output)):
            self.server.sessions.put(self._session, history)

    def logprob(self, entry: TextLogprobs) -> ChatLogprob:
        top = entry.top[: self.num_top(self.body.top_logprobs)]
        as_ids = bool(self.body.return_tokens_as_token_ids)
        shown = msgspec.structs.asdict(_token(entry.token, as_ids))
        return ChatLogprob(**shown, top_logprobs=[_token(token, as_ids) for token in top])


class _ChatResponse(ChatBuilder):
    prefix = "chatcmpl-"

    async def whole(self) -> dict[str, Any]:
        collected = await self.collect([""] * len(self.requests))
        choices = list(map(self._choice, range(len(collected)), collected))
        answer = {**self.head, "object": "chat.completion", "choices": iter(choices), "usage": self.count.usage()}
        return answer | self.timings(collected[0]) | self.about_prompt(0, collected[0])

    @property
    def _echo(self) -> list[Event]:
        """The message that the answer goes on with, if the body asks for it."""
        return [Event("content", self.body.messages[-1].content or "")] if self.body.echo else []

    def _choice(self, index: int, choice: Collected) -> dict[str, Any]:
        content = (self.logprob(entry) for entry in choice.answer_logprobs())
        answer = self.answers[index]
        return {
            "index": index,
            "message": message([*self._echo, *answer.take(choice.whole())], answer),
            "logprobs": {"content": content, "refusal": None} if self.body.logprobs else None,
            "finish_reason": answer.finish_reason(choice.last),
            "stop_reason": choice.last.stop_reason,
        } | self.own_ids(choice)

    async def chunks(self) -> AsyncGenerator[str]:
        """Each choice yields a chunk with the role, chunks with text, and a last chunk with the finish_reason."""
        started = [False] * len(self.requests)
        deltas = [MessageDeltas(answer) for answer in self.answers]
        async with aclosing(self.outputs()) as outputs:
            async for idx, output in outputs:
                if not started[idx]:
                    prompt = None if any(started) else self.prompt_ids(0)
                    started[idx] = True
                    start = ChatChunkChoice(index=idx, delta={"role": "assistant", "content": ""})
                    yield self._chunk([start], prompt_token_ids=self.asked(prompt))
                    for event in self._echo:
                        yield self._chunk([ChatChunkChoice(index=idx, delta=deltas[idx].of(event))])
                self.note(idx, output)
                for report in self.progress(output):
                    yield self._chunk([ChatChunkChoice(index=idx, delta={})], prompt_progress=report)
                logprobs = ChatLogprobs(content=list(map(self.logprob, output.logprobs))) if output.logprobs else None
                ids = output.token_ids if self.body.return_token_ids else None
                events = self.answers[idx].take(output)
                parts = [deltas[idx].of(event) for event in events]
                if not parts and (logprobs or ids):
                    parts = [{"content": ""}]
                for delta in parts:  # the first has what is known of the output's tokens
                    choice = ChatChunkChoice(index=idx, delta=delta, logprobs=logprobs, token_ids=self.asked(ids))
                    yield self._chunk([choice])
                    logprobs = ids = None
                if output.finish_reason is not None:
                    end = ChatChunkChoice(
                        index=idx,
                        delta={},
                        finish_reason=self.answers[idx].finish_reason(output),
                        stop_reason=output.stop_reason,
                    )
                    yield self._chunk([end])
        if self.include_usage:
            yield self._chunk([], last=True)
        yield DONE

    def _chunk(self, choices: list[ChatChunkChoice], *, last: bool = False, **fields: Any) -> str:
        return self.chunk(ChatCompletionChunk(**self.head, choices=choices, **fields), last=last)


def _token(token: TokenText, as_id: bool) -> TopLogprob:
    assert token.logprob is not None
    text = token_name(token) if as_id else token.text
    return TopLogprob(token=text, logprob=max(token.logprob, MIN_LOGPROB), bytes=list(token.data))
