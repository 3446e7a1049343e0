"""Prefixes that are known before the first request are computed when the server has started: `--warm FILE|LAST`.

A line of FILE is a chat as /v1/chat/completions takes it, whose messages and tools begin other chats, or {"text": ...}.
LAST are the prefixes that requests found most often, see `used_prefixes`. The engine computes them while nothing else
is to be done, after next turns (turbo.scheduling.next_turns), so requests are served at once. Each lies in the cache of
its tenant: a line is computed for each of the server's keys.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from lmkit.config import ServerConfig
from lmkit.errors import ConfigError, LMKitError
from lmkit.log import get_logger
from lmkit.serve.auth import Owner, owners
from lmkit.serve.next_turn import PROBES, beginning
from lmkit.serve.pool import ModelPool, PooledModel
from lmkit.serve.protocol import ChatCompletionRequest
from lmkit.serve.serving import Serving
from lmkit.serve.to_request import rendered
from lmkit.serve.used_prefixes import UsedPrefixes
from lmkit.strict import validate
from lmkit.text import TokenHistory
from lmkit.text.chat.conversation import ChatMessage
from lmkit.text.history import num_common
from lmkit.turbo.request import Request, SamplingParams
from lmkit.turbo.transport.async_engine import AsyncEngine

LAST = "LAST"
MAX_FILE = 64 << 20  # bytes

logger = get_logger(__name__)


def used_prefixes(config: ServerConfig, engine: AsyncEngine) -> UsedPrefixes | None:
    """Of a server that computes the prefixes used last. Raises ConfigError."""
    if config.warm != LAST:
        return None
    if (folder := engine.config.kv_disk_path) is None:
        raise ConfigError("--warm LAST keeps its figures beside the KV on disk: name a folder with --kv-disk-path")
    return UsedPrefixes.of(folder, engine.model_path, engine.config.tokens_per_block)


class Line(msgspec.Struct, frozen=True):
    """One prefix of the file."""

    where: str
    model: str | None
    text: str | None
    body: ChatCompletionRequest | None  # where there is no text
    salt: str | None


def read_lines(config: ServerConfig) -> list[Line]:
    """The prefixes of the file, none if there is no file. Raises ConfigError, with the number of the line."""
    if config.warm in (None, LAST):
        return []
    path = Path(config.warm)
    try:
        if path.stat().st_size > MAX_FILE:
            raise ConfigError(f"--warm {path}: larger than {MAX_FILE >> 20} MiB")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"--warm {path}: cannot be read: {why}") from None
    lines = [(f"--warm {path}: line {number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"--warm {path}: has no prefix")
    return [_line(where, line) for where, line in lines]


def _line(where: str, text: str) -> Line:
    try:
        row = json.loads(text)
        msgspec.json.encode(row)  # raises for half of a character, which no tokenizer takes
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: expected an object with messages or a text")
        if "text" not in row:
            body = validate({"messages": [], **row}, ChatCompletionRequest)
            if body.images:
                raise ConfigError(f"{where}: images are not computed ahead")
            return Line(where, body.model, None, body, body.cache_salt)
        plain = msgspec.convert(row, _Text)
        return Line(where, plain.model, plain.text, None, plain.cache_salt)
    except (ValueError, RecursionError, OverflowError, LMKitError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"{where}: {error}") from None


class _Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str
    model: str | None = None
    cache_salt: str | None = None


def prefix_ids(line: Line, server: Serving) -> list[int]:
    """The tokens with which all prompts begin that have this prefix. Raises LMKitError."""
    if line.body is None:
        assert line.text is not None
        first, second = (server.tokenizer.encode(line.text + probe) for probe in PROBES)
        return first[: num_common(first, second)]

    def follows(probe: str) -> list[ChatMessage]:
        return [ChatMessage(role="user", content=probe)]

    def encode(text: str) -> list[int]:
        return TokenHistory().encode(server.tokenizer, text).ids

    return beginning(line.body, follows, partial(rendered, style=server.style), encode)


def requests_of(model: PooledModel, lines: list[Line], to: list[Owner]) -> Iterator[Request]:
    """The requests of a file's lines for one model, or those of LAST if there is no file."""
    server = model.serving
    if server.used is not None:
        for prefix in server.used.best():
            if max(ids := array("i", prefix.ids).tolist()) < server.info.vocab_size and min(ids) >= 0:
                yield _ahead(ids, tenant=prefix.tenant)
        return
    for line in lines:
        if line.model is not None and line.model not in model.names:
            continue
        try:
            named = server.called(line.model) if line.model is not None else server
            ids = prefix_ids(line, named)
        except LMKitError as error:  # the template refuses it
            logger.warning("%s: is not computed: %s", line.where, error)
            continue
        for owner in to:
            salt = owner.own(line.salt or "")
            yield _ahead(ids, tenant=owner.tenant, weight=owner.weight, cache_salt=salt, adapter=named.adapter)


def _ahead(ids: list[int], **fields: Any) -> Request:
    return Request(request_id="", prompt_ids=ids, params=SamplingParams(max_tokens=0), is_ahead=True, **fields)


@asynccontextmanager
async def warmed(models: ModelPool, config: ServerConfig, lines: list[Line]) -> AsyncGenerator[None]:
    """Send the engines what is known, beside serving. At the end keep what was used."""
    task = asyncio.create_task(_send(models, config, lines)) if config.warm else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for model in models.models:
            if model.serving.used is not None:
                model.serving.used.save()


async def _send(models: ModelPool, config: ServerConfig, lines: list[Line]) -> None:
    for model in models.models:
        if model.engine.state != "ready":  # it is loaded when a request comes
            continue
        left, num_sent, num_left_out = config.warm_tokens, 0, 0
        requests = requests_of(model, lines, owners(config))
        while (request := await asyncio.to_thread(next, requests, None)) is not None:
            size = len(request.prompt_ids)
            if not 0 < size < model.serving.info.max_model_len or size > left:
                num_left_out += 1
                continue
            left, num_sent = left - size, num_sent + 1
            name = f"warm-{num_sent}"
            sent = msgspec.structs.replace(request, request_id=name, is_known=True, timeout=config.warm_seconds)
            model.engine.prepare(sent)
        logger.info(
            "warm: %d prefixes of %d tokens are computed ahead, %d left out by length or --warm-tokens",
            num_sent, config.warm_tokens - left, num_left_out,
        )  # fmt: skip
