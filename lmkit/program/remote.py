"""Programs on a server: one request of POST /generate for each call of a branch."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from lmkit.api.generation import GenerationConfig
from lmkit.errors import HTTP_STATUS, LMKitError, RequestError
from lmkit.program.model import Answer, Messages, Prompt, Score
from lmkit.web.sse import EventData

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True)
class Server:
    """An lmkit server. `model` is needed if it serves several, and `api_key` if it asks for one."""

    url: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 600.0  # seconds without a sign of the server

    @asynccontextmanager
    async def connected(self) -> AsyncGenerator[Remote, None]:
        """Raises ConfigError if the URL is none."""
        import httpx

        from lmkit.web.client import client_options

        options = client_options(self.url, self.api_key, self.timeout)
        async with httpx.AsyncClient(**options, limits=httpx.Limits(max_connections=None)) as client:
            yield Remote(client, {} if self.model is None else {"model": self.model})


class Remote:
    """A model of a server."""

    def __init__(self, client: httpx.AsyncClient, common: dict[str, Any]) -> None:
        self._client, self._common = client, common

    async def render(self, messages: Messages) -> str:
        return str((await self._post("/apply-template", {"messages": list(messages)}))["prompt"])

    async def generate(self, prompt: Prompt, config: GenerationConfig, on_text: Callable[[str], None] | None) -> Answer:
        body = _prompt(prompt) | fields_of(config) | {"return_token_ids": True}
        if on_text is None:
            parts = [await self._post("/generate", body)]
        else:
            parts = [part async for part in self._events("/generate", body, on_text)]
        ids = [token for part in parts for token in part["output_ids"]]
        about = parts[-1]["meta_info"]
        ended = about["finish_reason"]
        kept = None if isinstance(ended.get("matched"), str) else tuple(ids[:-1] if ended["type"] == "stop" else ids)
        text = "".join(part["text"] for part in parts)
        prompt_ids = tuple(parts[0]["prompt_token_ids"])
        return Answer(prompt_ids, kept, text, len(ids), about["steps"], about["cached_tokens"])

    async def score(self, prompt: Prompt, texts: Sequence[str]) -> list[Score]:
        body = _prompt(prompt) | {"endings": list(texts), "max_new_tokens": 0, "prompt_logprobs": 0}
        answers = await self._post("/generate", body | {"return_token_ids": True})
        return [_score(answer) for answer in (answers if isinstance(answers, list) else [answers])]

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        import httpx

        try:
            response = await self._client.post(path, json=self._common | body)
            if not response.is_success:
                raise _refusal(response)
            return response.json()
        except httpx.HTTPError as error:
            raise _unreachable(self._client, error) from None
        except ValueError:
            raise LMKitError(f"{self._client.base_url} does not answer as an lmkit server does") from None

    async def _events(
        self, path: str, body: dict[str, Any], on_text: Callable[[str], None]
    ) -> AsyncGenerator[dict[str, Any], None]:
        import httpx

        events = EventData()
        try:
            async with self._client.stream("POST", path, json=self._common | body | {"stream": True}) as response:
                if not response.is_success:
                    await response.aread()
                    raise _refusal(response)
                async for piece in response.aiter_bytes():
                    for data in events.feed(piece):
                        if data == b"[DONE]":
                            return
                        part = json.loads(data)
                        if error := part.get("error"):
                            raise _error(error)
                        if part["text"]:
                            on_text(part["text"])
                        yield part
        except httpx.HTTPError as error:
            raise _unreachable(self._client, error) from None
        raise LMKitError("the server broke off in the middle of its answer")


def _prompt(prompt: Prompt) -> dict[str, Any]:
    if prompt.ids:
        return {"input_ids": prompt.ids, "text": prompt.text}
    return {"text": prompt.text} | ({"add_special_tokens": False} if prompt.is_chat else {})


def fields_of(config: GenerationConfig) -> dict[str, Any]:
    """The fields of a request: those that differ from the defaults. -1 new tokens: until the context is full."""
    defaults = msgspec.structs.asdict(GenerationConfig())
    fields = {name: value for name, value in msgspec.structs.asdict(config).items() if value != defaults[name]}
    return fields | ({"max_new_tokens": -1} if config.max_new_tokens is None else {})


def _score(answer: dict[str, Any]) -> Score:
    about = answer["meta_info"]
    logprobs = tuple(entry[0] for entry in about["input_token_logprobs"][1:])
    return Score(tuple(answer["prompt_token_ids"]), logprobs, about["cached_tokens"])


def _refusal(response: httpx.Response) -> RequestError:
    try:
        return _error(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return RequestError("engine_error", f"the server answers with status {response.status_code}")


def _error(error: dict[str, Any]) -> RequestError:
    """The server's own words."""
    code = str(error["code"])
    return RequestError(code if code in HTTP_STATUS else "engine_error", str(error["message"]))


def _unreachable(client: httpx.AsyncClient, error: Exception) -> LMKitError:
    return LMKitError(f"{client.base_url}: the server does not answer: {error or type(error).__name__}")
