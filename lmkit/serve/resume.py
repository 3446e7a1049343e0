"""Answers that another node can take over: the comments that tell a proxy how, and the replay of what it knows.

See web.resume for what is sent. Outputs, and not single tokens, are replayed: what a parser shows of an answer may
depend on where its parts were cut.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request

from lmkit.errors import JSON_ERRORS, RequestError
from lmkit.turbo import request as engine
from lmkit.turbo.transport.output import OutputProcessor, RequestOutput
from lmkit.web.resume import END, ERROR, STREAM_HEADER, WHOLE_HEADER, Identity, Known

NOTE_SECONDS = 0.2  # between the comments of an answer that is no stream
MOVABLE = frozenset({"engine_unavailable", "engine_error", "shutting_down"})  # errors that another node may not have
Outputs = AsyncGenerator[tuple[int, RequestOutput]]
_ENDS = {"": None, "length": "length", "token": "stop", "string": None}


class Resumption:
    """One answer that may go on elsewhere, or that goes on here."""

    is_stream = True  # or an answer of comments and one event

    def __init__(self, identity: Identity, known: Sequence[Known], *, takes_whole: bool) -> None:
        """`takes_whole`: the proxy also takes an answer that is no stream."""
        self.identity, self.known, self.takes_whole = identity, known, takes_whole
        self._ready: asyncio.Queue[str | None] = asyncio.Queue(1)  # the texts of one output each
        self._texts: list[str] = []

    async def noted(self, outputs: Outputs) -> Outputs:
        """`outputs`. After the events of each, which are complete when the next is asked for, comes its comment."""
        left, held, due = len(self.known), "", 0.0
        async with aclosing(outputs):
            async for idx, output in outputs:
                known = Known(idx, list(output.token_ids), _end(output), output.num_cached_tokens)
                yield idx, output
                texts, self._texts = self._texts, []
                if left:
                    left -= 1  # the client has these
                else:
                    held += "".join(texts) + f": lmkit {msgspec.json.encode(known).decode()}\n\n"
                    if self.is_stream or time.monotonic() >= due:
                        due = time.monotonic() + NOTE_SECONDS
                        await self._ready.put(held)
                        held = ""
        self._texts.insert(0, held)

    async def events(self, chunks: AsyncGenerator[str]) -> AsyncGenerator[str]:
        """The chunks that are made of `noted` outputs: those of one output in one piece, with its comment."""
        making = asyncio.create_task(self._make(chunks))
        begun = False
        try:
            while (text := await self._ready.get()) is not None:
                begun = True
                yield text
            await making
        except RequestError as error:
            if begun and error.code not in MOVABLE:
                yield ERROR
            raise
        finally:
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)

    async def _make(self, chunks: AsyncGenerator[str]) -> None:
        try:
            async with aclosing(chunks):
                async for text in chunks:
                    self._texts.append(text)
        except Exception:
            await self._ready.put(None)
            raise
        await self._ready.put("".join(self._texts) + END)
        await self._ready.put(None)


def resumption(request: Request, raw: bytes) -> tuple[Resumption | None, bytes]:
    """What a proxy says about the stream, and the body without it. Raises RequestError.

    Only a proxy may say it, by its key: the known tokens choose what the answer seems to be.
    """
    value = request.headers.get(STREAM_HEADER.decode())
    if value is None:
        return None, raw
    identity = Identity.read(value)
    if not getattr(request.state, "is_proxy", False):
        if identity.fingerprint:
            raise RequestError("permission_denied", "only a key with the role proxy may resume a stream")
        return None, raw
    try:
        known = msgspec.json.decode(raw[: identity.num_bytes] or b"[]", type=list[Known])
    except JSON_ERRORS:
        raise RequestError("invalid_request", "the known outputs of the stream are malformed") from None
    takes_whole = WHOLE_HEADER.decode() in request.headers
    return Resumption(identity, known, takes_whole=takes_whole), raw[identity.num_bytes :]


def replayed(processors: Sequence[OutputProcessor], known: Sequence[Known], vocab_size: int) -> list[tuple[int, Any]]:
    """The known outputs again, without log-probabilities. The processors go on after them. Raises RequestError."""
    outputs = []
    for entry in known:
        if not (0 <= entry.choice < len(processors) and all(0 <= token < vocab_size for token in entry.token_ids)):
            raise RequestError("invalid_request", "the known outputs of the stream do not fit the request")
        step = engine.StepOutput(
            request_id="",
            token_ids=entry.token_ids,
            finish_reason=_ENDS[entry.end],  # type: ignore[arg-type]
            stop_token=entry.token_ids[-1] if entry.end == "token" and entry.token_ids else None,
            cached_tokens=entry.cached_tokens,
        )
        outputs.append((entry.choice, processors[entry.choice].process(step)))
    return outputs


def _end(output: RequestOutput) -> Any:
    if output.finish_reason == "stop":
        return "string" if isinstance(output.stop_reason, str) else "token"
    return "length" if output.finish_reason == "length" else ""
