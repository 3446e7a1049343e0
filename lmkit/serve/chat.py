"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any, ClassVar

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from lmkit.errors import RequestError
from lmkit.log import get_logger
from lmkit.serve.auth import Owner
from lmkit.serve.body import read_json
from lmkit.serve.collect import Collected
from lmkit.serve.images import ImageSources
from lmkit.serve.next_turn import ahead
from lmkit.serve.parts import ChatChunkChoice, ChatCompletionChunk, ChatLogprob, ChatLogprobs, TopLogprob
from lmkit.serve.protocol import ChatCompletionRequest
from lmkit.serve.response import ResponseBuilder, respond
from lmkit.serve.serving import MIN_LOGPROB, Serving
from lmkit.serve.stored_chats import PREFIX, StoredChats, stored_chats
from lmkit.serve.streaming import DONE, json_parts
from lmkit.serve.to_request import chat_requests, rendered
from lmkit.serve.translated import num_prompt_tokens
from lmkit.text import TokenHistory
from lmkit.text.chat.answer_events import AnswerEvents, Kept, MessageDeltas, message
from lmkit.text.dialects import Event
from lmkit.turbo import request as engine
from lmkit.turbo.transport.output import AssistantTurn, RequestOutput, TextLogprobs, TokenText
from lmkit.turbo.transport.prompt_images import settings_of
from lmkit.web.budget import Share

router = APIRouter()
logger = get_logger(__name__)


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    return await respond(request, ChatCompletionRequest, partial(_ChatResponse, chats=stored_chats(request)))


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
    brings_reasoning: ClassVar[bool] = False  # clients of this API send reasoning back, unless they show otherwise

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
        self._prompt, self._tokens = turn, AssistantTurn(turn)
        is_thinking = style.is_thinking(turn.rest)
        self.answers = [style.answer(self.body, is_thinking=is_thinking) for _ in requests]
        if self.identity is not None or self.body.store:
            self.seed_ids()
        if self._goes_on and len(requests) == 1:
            self.answers[0].kept = Kept()
        return requests

    @property
    def _goes_on(self) -> bool:
        """Whether the next turn can be prepared when this answer has ended."""
        body, server = self.body, self.server
        is_plain = not (body.images or body.continue_final_message or body.truncate_prompt_tokens)
        is_chat = is_plain and body.add_generation_prompt is not False
        return is_chat and server.config.next_turn == "on" and server.engine.config.prefix_cache

    def ended(self) -> None:
        super().ended()
        kept = self.answers[0].kept
        if kept is None or self.last is None or self.last.finish_reason not in ("stop", "length"):
            return
        server, body, session = self.server, self.body, self._session
        answer, earlier = kept.message(), [message for message in body.messages if message.role == "assistant"]
        brings = any(message.thoughts for message in earlier) if earlier else self.brings_reasoning
        if not brings:
            answer |= {"reasoning": None, "reasoning_content": None}
        like = msgspec.structs.replace(self.requests[0], adapter=server.adapter)
        known, render = server.sessions.get(session) if session else None, partial(rendered, style=server.style)

        def encode(text: str) -> list[int]:
            return self._prompt.rendered_anew(text) if known is None else known.encode(server.tokenizer, text).ids

        work = partial(ahead, like, body, answer, render, encode, server.info.max_model_len)
        server.next_turns.add(work, at_once=bool(kept.ids))

    def seed_ids(self) -> None:
        """The ids of calls follow from the answer's own: they are the same at each node, and in the store."""
        for idx, answer in enumerate(self.answers):
            answer.random = random.Random(f"{self.id} {idx}")

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
        top, as_ids = self.num_top(self.body.top_logprobs), bool(self.body.return_tokens_as_token_ids)
        return shown_logprob(entry, top, as_ids=as_ids)


class _ChatResponse(ChatBuilder):
    prefix = PREFIX

    def __init__(
        self, server: Serving, body: ChatCompletionRequest, owner: Owner, share: Share, chats: StoredChats
    ) -> None:
        super().__init__(server, body, owner, share)
        self._chats = chats

    def prepare(self) -> None:
        if self.body.store and not self._chats.store.is_on:
            raise RequestError("unsupported_parameter", "store: this server stores no answers", "store")
        super().prepare()

    @property
    def is_movable(self) -> bool:
        """A stored answer has all log-probabilities."""
        return super().is_movable and not (self.body.store and self.body.logprobs)

    async def whole(self) -> Any:
        collected = await self.collect([""] * len(self.requests))
        events = [answer.take(choice.whole()) for answer, choice in zip(self.answers, collected, strict=True)]
        answer = self._whole(collected, events)
        return await self._keep(answer) if self.body.store else answer

    def _whole(self, collected: list[Collected], events: list[list[Event]]) -> dict[str, Any]:
        choices = list(map(self._choice, range(len(collected)), collected, events))
        answer = {**self.head, "object": "chat.completion", "choices": iter(choices), "usage": self.count.usage()}
        return answer | self.times(collected[0]) | self.about_prompt(0, collected[0])

    async def _keep(self, answer: dict[str, Any]) -> msgspec.Raw:
        """Store an answer with its labels, and return it as JSON."""
        labelled = answer | {"metadata": self.body.metadata or {}}
        data = await asyncio.to_thread(lambda: "".join(json_parts(labelled)).encode())
        self.share.add(len(data))
        if not await self._chats.put(self.id, self.body.messages, data):
            logger.warning("the answer %s was not stored: the store has no room for it", self.id)
        return msgspec.Raw(data)

    @property
    def _echo(self) -> list[Event]:
        """The message that the answer goes on with, if the body asks for it."""
        return [Event("content", self.body.messages[-1].content or "")] if self.body.echo else []

    def _choice(self, index: int, choice: Collected, events: list[Event]) -> dict[str, Any]:
        content = (self.logprob(entry) for entry in choice.answer_logprobs())
        answer = self.answers[index]
        return {
            "index": index,
            "message": message([*self._echo, *events], answer),
            "logprobs": {"content": content, "refusal": None} if self.body.logprobs else None,
            "finish_reason": answer.finish_reason(choice.last),
            "stop_reason": choice.last.end,
        } | self.own_ids(choice)

    async def chunks(self) -> AsyncGenerator[str]:
        """Each choice yields a chunk with the role, chunks with text, and a last chunk with the finish_reason.

        With the usage so far in every chunk, the last text has the finish_reason, as in vLLM: each chunk counts more.
        """
        # Clients read it of every chunk of a model that reasons, and in Python a field that is absent is an error.
        always = {"reasoning_content": None} if self.server.style.thought else {}
        started = [False] * len(self.requests)
        deltas = [MessageDeltas(answer) for answer in self.answers]
        kept = [Collected(self.server.tokenizer, self.share) for _ in self.answers if self.body.store]
        kept_events: list[list[Event]] = [[] for _ in self.answers]
        async with aclosing(self.outputs()) as outputs:
            async for idx, output in outputs:
                if not started[idx]:
                    prompt = None if any(started) else self.prompt_ids(0)
                    started[idx] = True
                    start = ChatChunkChoice(index=idx, delta={"role": "assistant", "content": None} | always)
                    yield self._chunk([start], prompt_token_ids=self.asked(prompt))
                    for event in self._echo:
                        yield self._chunk([ChatChunkChoice(index=idx, delta=always | deltas[idx].of(event))])
                self.note(idx, output)
                for report in self.progress(output):
                    yield self._chunk([ChatChunkChoice(index=idx, delta=always)], prompt_progress=report)
                logprobs = ChatLogprobs(content=list(map(self.logprob, output.logprobs))) if output.logprobs else None
                ids = self.asked(output.token_ids)
                events = self.answers[idx].take(output)
                if kept:
                    kept[idx].add(output)
                    kept_events[idx] += events
                parts = [deltas[idx].of(event) for event in events]
                if not parts and (logprobs or ids):
                    parts = [{"content": ""}]
                if output.finish_reason is not None and not (parts and self.continuous_usage):
                    parts.append({})
                for delta in parts:  # the first has what is known of the output's tokens, the last one how it ended
                    choice = ChatChunkChoice(index=idx, delta=always | delta, logprobs=logprobs, token_ids=ids)
                    if output.finish_reason is not None and delta is parts[-1]:
                        choice.finish_reason = self.answers[idx].finish_reason(output)
                        choice.stop_reason = output.end
                    yield self._chunk([choice])
                    logprobs, ids = None, UNSET
        if kept:
            self.seed_ids()  # those of the calls again
            await self._keep(self._whole(kept, kept_events))
        if self.include_usage:
            yield self._chunk([], last=True)
        yield DONE

    def _chunk(self, choices: list[ChatChunkChoice], *, last: bool = False, **fields: Any) -> str:
        return self.chunk(ChatCompletionChunk(**self.head, choices=choices, **fields), last=last)


def shown_logprob(entry: TextLogprobs, num_top: int, *, as_ids: bool = False) -> ChatLogprob:
    """A token of an answer, with as many of the most likely ones."""
    shown = msgspec.structs.asdict(_token(entry.token, as_ids))
    return ChatLogprob(**shown, top_logprobs=[_token(token, as_ids) for token in entry.top[:num_top]])


def _token(token: TokenText, as_id: bool) -> TopLogprob:
    assert token.logprob is not None
    text = token.as_id if as_id else token.text
    return TopLogprob(token=text, logprob=max(token.logprob, MIN_LOGPROB), bytes=list(token.data))
