"""The application in this process, in front of scripted engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
from fastapi import FastAPI

from lmkit.config import EngineConfig, ServerConfig
from lmkit.serve.app import create_app
from lmkit.serve.pool import ModelPool, PooledModel
from lmkit.serve.serving import Serving
from lmkit.text import Tokenizer
from lmkit.turbo.request import EngineInfo, EngineStats, FinishReason, Request, Siblings, StepOutput, TokenLogprobs
from lmkit.turbo.transport.async_engine import AsyncEngine
from lmkit.turbo.transport.steps import Rest
from tests.serve.fake_engine import DEMO

TOKENIZER = Tokenizer.from_pretrained(DEMO)
INFO = EngineInfo(
    model_path="demo", vocab_size=4096, max_model_len=64, num_blocks=8, block_size=16, kv_dtype="float32",
    memory={"kv": 4096}, reserved=9000,
)  # fmt: skip
CHAT: dict[str, Any] = {"model": "model", "messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"model": "model", "prompt": "Hi"}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"


class StubEngine(AsyncEngine):
    """Answers with one token, then fails with `failure`."""

    def __init__(self, failure: Exception | None = None, *, at_once: bool = False) -> None:
        super().__init__(DEMO, EngineConfig())
        self.state, self.info = "ready", INFO
        self._failure, self._at_once = failure, at_once

    def submit(self, siblings: Siblings) -> None:
        """Do nothing: `generate` answers each request by itself."""

    async def generate(self, request: Request, rest: Rest = None) -> AsyncGenerator[StepOutput]:
        if self._failure and self._at_once:
            raise self._failure
        yield StepOutput(request_id=request.request_id, token_ids=[70])
        await asyncio.sleep(0)
        if self._failure:
            raise self._failure
        yield StepOutput(request_id=request.request_id, token_ids=[71], finish_reason="length")


class ScriptedEngine(AsyncEngine):
    """Records requests, answers each with `answer(request)` one token a step, and keeps every token that it has seen.

    A token's log-probability is `logprob(request)`. The engine reports as cached the tokens that the prefix cache of
    another engine could have: the longest prefix of the prompt that was computed for a tenant with the same salt.
    """

    def __init__(
        self,
        answer: Callable[[Request], list[int]] = lambda request: [70, 71],
        logprob: Callable[[Request], float] = lambda request: -1.0,
        finish_reason: FinishReason = "length",
        max_model_len: int = 4096,
    ) -> None:
        super().__init__(DEMO, EngineConfig(session_lease=60))
        self.state, self.info = "ready", EngineInfo(**{**_fields(INFO), "max_model_len": max_model_len})
        self.requests: list[Request] = []
        self.submitted: list[Siblings] = []
        self.figures = EngineStats()
        self._answer, self._logprob, self._finish_reason = answer, logprob, finish_reason
        self._computed: dict[tuple[str, str], list[list[int]]] = {}

    def stats(self) -> EngineStats:
        return self.figures

    def submit(self, siblings: Siblings) -> None:
        self.submitted.append(siblings)

    async def generate(self, request: Request, rest: Rest = None) -> AsyncGenerator[StepOutput]:
        self.requests.append(request)
        known = self._computed.setdefault((request.tenant, request.cache_salt), [])
        cached = max((_common(ids, request.prompt_ids[:-1]) for ids in known), default=0)
        answer = self._answer(request)
        known.append(request.prompt_ids + answer)
        for i, token in enumerate(answer):
            last = i == len(answer) - 1
            entry = TokenLogprobs(token, self._logprob(request), [])
            yield StepOutput(
                request_id=request.request_id,
                token_ids=[token],
                logprobs=[entry] if request.params.logprobs is not None else [],
                cached_tokens=0 if i else cached,
                finish_reason=self._finish_reason if last else None,
                stop_token=token if last and self._finish_reason == "stop" else None,
            )
            await asyncio.sleep(0)


def _fields(info: EngineInfo) -> dict[str, Any]:
    return {name: getattr(info, name) for name in info.__struct_fields__}


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def one_model(engine: AsyncEngine, config: ServerConfig | None = None) -> ModelPool:
    """A pool of one model, under its served name."""
    name, *aliases = (config.served_model_name if config else ()) or (engine.model_path.name,)
    return ModelPool([PooledModel(name, engine, tuple(aliases))])


def app_of(engine: AsyncEngine, config: ServerConfig) -> FastAPI:
    """An application for one engine."""
    return create_app(one_model(engine, config), [TOKENIZER], config)


def serving_of(app: FastAPI) -> Serving:
    serving: Serving = app.state.pool.models[0].serving
    return serving


class App:
    """One application that lives for several requests."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig | None = None) -> None:
        self.app = app_of(engine, config or ServerConfig())
        self.serving = serving_of(self.app)
        self._transport = httpx.ASGITransport(self.app)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def main() -> httpx.Response:
            async with httpx.AsyncClient(transport=self._transport, base_url="http://localhost") as client:
                return await client.request(method, path, **options)

        return asyncio.run(main())

    def post(self, path: str, json: Any, key: str | None = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return self.request("POST", path, json=json, headers=headers)


def send(
    engine: AsyncEngine, *, path: str = CHAT_PATH, config: ServerConfig | None = None, **options: Any
) -> httpx.Response:
    return App(engine, config).request("POST", path, **options)
