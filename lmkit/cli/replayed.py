"""Who computes the answer of a receipt again: an engine in this process, or a server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

import httpx
import msgspec

from lmkit.config import EngineConfig, parse
from lmkit.errors import JSON_ERRORS, ConfigError, LMKitError
from lmkit.formats.fingerprint import content_digest
from lmkit.formats.hub import resolve_model_path
from lmkit.serve.auth import NOBODY
from lmkit.serve.generate import completion_fields
from lmkit.serve.protocol import ChatCompletionRequest, CompletionRequest
from lmkit.serve.receipts import commit_to_images, commitments
from lmkit.serve.to_request import chat_requests, completion_requests, with_numbers
from lmkit.strict import validate
from lmkit.text import TokenHistory, Tokenizer
from lmkit.text.chat.style import Style
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.engine.info import BITS
from lmkit.turbo.request import MAX_LOGPROBS, EngineInfo, Request, SamplingParams
from lmkit.web.client import client_options
from lmkit.web.receipt import HEADER, HIDDEN, Choice, Record, commit

ADAPTER = "adapter"  # the name of the only one
TokenIds = list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]]


def requests_of(data: bytes, record: Record, tokenizer: Tokenizer, info: EngineInfo) -> list[Request]:
    """The requests of a prompt's file: those of a request's body, or of tokens or a text, with their own sampling.

    Raises ConfigError.
    """
    try:
        body = msgspec.json.decode(data)
    except JSON_ERRORS:
        body = None
    try:
        if isinstance(body, dict):
            return _of_body(body, record, tokenizer, info)
        ids = msgspec.convert(body, TokenIds) if isinstance(body, list) else tokenizer.encode(data.decode())
    except (LMKitError, *JSON_ERRORS) as error:
        raise ConfigError(f"the prompt's file: {error}") from None
    return [Request(request_id="", prompt_ids=ids, params=SamplingParams()) for _ in record.choices]


def _of_body(body: dict[str, Any], record: Record, tokenizer: Tokenizer, info: EngineInfo) -> list[Request]:
    if unknown := {"input", "options"} & body.keys():  # of Responses, and of Ollama's routes
        raise ConfigError(f"a body with {min(unknown)!r} is none of chat or completions; give its list of token ids")
    if "messages" in body:
        chat = with_numbers(validate(body, ChatCompletionRequest), MAX_LOGPROBS, info.vocab_size)
        style = Style(tokenizer, None, None)
        made, _ = chat_requests(chat, tokenizer, info, record.id, owner=NOBODY, history=TokenHistory(), style=style)
        return made
    fields = completion_fields({"model": record.model, **body})
    text = with_numbers(validate(fields, CompletionRequest), MAX_LOGPROBS, info.vocab_size)
    return completion_requests(text, tokenizer, info, record.id, owner=NOBODY)


def sampled_as(choice: Choice, request: Request, salt: bytes, name: str) -> Request:
    """The request with a choice's sampling. Parts of texts are those of the request, and must be what the record
    commits to. Raises ConfigError."""
    if commit(salt, request.prompt_ids) != choice.prompt:
        count = len(request.prompt_ids)
        raise ConfigError(
            f"this is another prompt: it has {count} tokens, and the answer's had {choice.prompt_tokens}, or others"
        )
    if choice.images is not msgspec.UNSET and not request.images:
        raise ConfigError("the prompt shows images: give the request's body, with them as data: URLs, and --model")
    if commit_to_images(salt, request.images) != choice.images:
        raise ConfigError(
            "this is another prompt: it shows other images, or this version of Pillow reads them otherwise"
        )
    own = msgspec.to_builtins(request.params)
    hidden = {name: own[name] for name in HIDDEN}
    if commitments(salt, request.params) != {n: v for n, v in choice.sampling.items() if n in HIDDEN}:
        raise ConfigError(
            f"the prompt's file must be the request's body: the answer had {', '.join(HIDDEN)} of its own"
        )
    # Stop strings end an answer in the front end. What remains is how many tokens there are.
    plain = {n: v for n, v in choice.sampling.items() if n not in HIDDEN}
    params = msgspec.convert(plain | hidden | {"stop": [], "max_tokens": choice.answer_tokens}, SamplingParams)
    return msgspec.structs.replace(request, request_id=name, params=params, tells_kv=False)


def _other(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs, as NAME: NOW, and THEN in the receipt."""
    found = []
    for name in sorted({*then, *now}):
        a, b = then.get(name), now.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _other(a, b)
        elif a != b:
            found.append(f"{name}: {b}, and {a} in the receipt")
    return found


class Here:
    """An engine in this process, with the options that the receipt names."""

    def __init__(self, model: str, record: Record, adapter: str | None) -> None:
        """Raises ConfigError, CheckpointError or UnsupportedError."""
        self._record, self._adapter = record, adapter
        self._path = resolve_model_path(model)
        told = parse(record.computed.get("options", {}), dict[str, Any], "the receipt's options")
        options = {name: value for name, value in told.items() if name in BITS}  # no other is a receipt's to choose
        config = msgspec.structs.replace(
            parse(options, EngineConfig, "the receipt's options"),
            adapters=(f"{ADAPTER}={adapter}",) if adapter else (), audit=0, prefix_cache=False, max_batch_size=1,
        )  # fmt: skip
        self._engine = Engine(str(self._path), config)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.close()

    def requests(self, data: bytes, salt: bytes) -> list[Request]:
        made = requests_of(data, self._record, self._engine.tokenizer, self._engine.info)
        return _sampled(self._record.choices, made, salt)

    def differences(self) -> list[str]:
        """What decides bits and is not as the receipt has it."""
        weights, adapter = content_digest(self._path), content_digest(Path(self._adapter)) if self._adapter else ""
        then = {"weights": self._record.weights, "adapter": self._record.choices[0].adapter, **self._record.computed}
        return _other(then, {"weights": weights, "adapter": adapter, **self._engine.info.computed})

    def answer(self, request: Request, choice: Choice) -> list[int]:
        """The tokens that the request gives."""
        if not choice.answer_tokens:
            return []
        self._engine.add(msgspec.structs.replace(request, adapter=ADAPTER if self._adapter else ""))
        ids: list[int] = []
        while self._engine.has_work():
            for output in self._engine.step():
                if output.error is not None:
                    raise ConfigError(f"replay: {output.error}")
                ids += output.token_ids
        return ids


class There:
    """A server. It gets the prompt's tokens, and a receipt of its own says what it computes with."""

    def __init__(self, url: str, record: Record, api_key: str | None) -> None:
        self._record = record
        self._http = httpx.Client(**client_options(url, api_key, timeout=600))
        self._computed: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def requests(self, data: bytes, salt: bytes) -> list[Request]:
        try:
            ids = msgspec.json.decode(data, type=TokenIds)
        except JSON_ERRORS:
            raise ConfigError("--server: the prompt's file must be a JSON list of token ids") from None
        made = [Request(request_id="", prompt_ids=ids, params=SamplingParams()) for _ in self._record.choices]
        return _sampled(self._record.choices, made, salt)

    def differences(self) -> list[str]:
        self._ask([0], SamplingParams(max_tokens=1, seed=0))
        then = {"weights": self._record.weights, "adapter": self._record.choices[0].adapter, **self._record.computed}
        return _other(then, self._computed)

    def answer(self, request: Request, choice: Choice) -> list[int]:
        return self._ask(request.prompt_ids, request.params) if choice.answer_tokens else []

    def _ask(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """The tokens of an answer. Raises ConfigError."""
        plain, given = msgspec.to_builtins(SamplingParams()), msgspec.to_builtins(params)
        changed = {name: value for name, value in given.items() if value != plain[name] and name not in LEFT_OUT}
        greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}  # where the checkpoint has other defaults
        body = {"model": self._record.model, "input_ids": list(prompt_ids), **greedy, **changed}
        body["max_tokens"] = params.max_tokens
        try:
            answer = self._http.post("/generate", json=body, headers={HEADER: "1"})
            receipt = self._http.get(f"/receipts/{answer.headers.get(HEADER, '')}")
            if answer.status_code != 200 or receipt.status_code != 200:
                wrong = answer if answer.status_code != 200 else receipt
                raise ConfigError(f"the server: {wrong.text[:300]}")
            found = receipt.json()
            record = (found["parts"][0] if "parts" in found else found)["record"]
            weights = {"weights": record["weights"], "adapter": record["choices"][0]["adapter"]}
            self._computed = {**weights, **record["computed"]}
            return list(answer.json()["output_ids"])
        except (httpx.HTTPError, KeyError, ValueError) as error:
            raise ConfigError(f"the server: {error}") from None


LEFT_OUT = ("shown_special_ids", "reasoning_end", "prompt_top", "logprobs", "logprob_token_ids", "grammar")


def _sampled(choices: Sequence[Choice], made: Sequence[Request], salt: bytes) -> list[Request]:
    if len(made) != len(choices):
        raise ConfigError(f"the prompt's file asks for {len(made)} answers, and the receipt has {len(choices)}")
    pairs = zip(choices, made, strict=True)
    return [sampled_as(choice, request, salt, f"{i}") for i, (choice, request) in enumerate(pairs)]
