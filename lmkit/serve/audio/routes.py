"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from lmkit.errors import RequestError
from lmkit.serve.audio.form import AudioRequest, read_form
from lmkit.serve.audio.listener import Listener
from lmkit.serve.audio.segments import Segment
from lmkit.serve.choose import choose
from lmkit.serve.response import is_forwarded
from lmkit.serve.streaming import COMMENT, EventStream, counted, event
from lmkit.text.audio import read_wav
from lmkit.web.counts import ANSWER
from lmkit.web.receive import while_connected

MAX_SECONDS = 3600.0  # of one audio
router = APIRouter()


@router.post("/v1/audio/transcriptions")
async def transcriptions(request: Request) -> Response:
    return await _heard(request, "transcribe")


@router.post("/v1/audio/translations")
async def translations(request: Request) -> Response:
    """The text is English, whatever the language of the audio."""
    return await _heard(request, "translate")


async def _heard(request: Request, task: str) -> Response:
    body, data = await read_form(request)
    request.state.user = body.user
    server = await choose(request, body.model, body.timeout)
    if isinstance(why := server.info.audio, str):
        raise RequestError("unsupported_parameter", f"audio is not supported: {why}", "model")
    samples = await server.texts.run(request.receive, len(data), partial(read_wav, data, MAX_SECONDS))
    request.state.held.enter_context(server.bodies.share()).add(samples.nbytes)
    listener = Listener(request, server, body, samples, task)
    if body.stream:
        early = None if is_forwarded(request.headers) else lambda: COMMENT
        return await EventStream.open(
            request.receive, counted(_events(listener), listener.so_far, request.headers), early=early
        )
    segments = await while_connected(request.receive, _collected(listener))
    answer = _whole(listener, body, segments, task)
    answer.headers[ANSWER.decode()] = " ".join(map(str, listener.so_far()))
    return answer


async def _collected(listener: Listener) -> list[Segment]:
    async with aclosing(listener.segments()) as parts:
        return [segment async for _, segments in parts for segment in segments]


async def _events(listener: Listener) -> AsyncGenerator[str]:
    """OpenAI's events of a transcript."""
    texts = list[str]()
    async with aclosing(listener.segments()) as parts:
        async for text, _ in parts:
            text = text if texts else text.lstrip()
            if text:
                texts.append(text)
                yield _event({"type": "transcript.text.delta", "delta": text})
    done = {"type": "transcript.text.done", "text": "".join(texts), "usage": listener.usage()}
    yield _event(done)


def _event(value: dict[str, Any]) -> str:
    return event(msgspec.json.encode(value).decode())


def _whole(listener: Listener, body: AudioRequest, segments: Sequence[Segment], task: str) -> Response:
    text = "".join(each.text for each in segments).strip()
    match body.response_format:
        case "text":
            return Response(text + "\n", media_type="text/plain")
        case "srt":
            return Response(_srt(segments), media_type="application/x-subrip")
        case "vtt":
            return Response(_vtt(segments), media_type="text/vtt")
        case "json":
            return _json({"text": text, "usage": listener.usage()})
    seconds = {"type": "duration", "seconds": math.ceil(listener.seconds)}
    shown = [_shown(number, each, body.temperature) for number, each in enumerate(segments)]
    head = {"task": task, "language": listener.language, "duration": round(listener.seconds, 2), "text": text}
    return _json(head | {"segments": shown, "usage": listener.usage() | seconds})


def _json(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _shown(number: int, segment: Segment, temperature: float) -> dict[str, Any]:
    return {
        "id": number,
        "seek": round(100 * segment.seek),  # frames of the spectrogram
        "start": round(segment.start, 2),
        "end": round(segment.end, 2),
        "text": segment.text,
        "tokens": segment.token_ids,
        "temperature": temperature,
        "avg_logprob": segment.logprob,
        "compression_ratio": segment.compression,
        "no_speech_prob": None,  # it is not computed
    }


def _srt(segments: Sequence[Segment]) -> str:
    parts = (
        f"{number}\n{_time(each.start, ',')} --> {_time(each.end, ',')}\n{_line(each)}\n\n"
        for number, each in enumerate(segments, 1)
    )
    return "".join(parts)


def _vtt(segments: Sequence[Segment]) -> str:
    parts = (f"{_time(each.start, '.')} --> {_time(each.end, '.')}\n{_line(each)}\n\n" for each in segments)
    return "WEBVTT\n\n" + "".join(parts)


def _line(segment: Segment) -> str:
    """The text in one line, which holds no arrow: that would be another cue."""
    return " ".join(segment.text.split()).replace("-->", "->")


def _time(seconds: float, point: str) -> str:
    milliseconds = round(1000 * seconds)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
