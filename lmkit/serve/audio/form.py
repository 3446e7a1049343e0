"""A form with an audio file (multipart/form-data) and the fields beside it."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator
from starlette.requests import Request

from lmkit.hints import begin
from lmkit.serve.batches.file_routes import check_origin
from lmkit.serve.body import read_raw
from lmkit.serve.choose import shared
from lmkit.serve.numbers import Temperature
from lmkit.serve.protocol import ModelName, Placed
from lmkit.strict import Schema, validate
from lmkit.web.access_log import note_ignored
from lmkit.web.form import Form

GRANULARITIES = "timestamp_granularities"
Format = Literal["json", "text", "verbose_json", "srt", "vtt"]


SCHEMA: Schema = {  # of the form
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "model": {"type": "string"},
        "language": {"type": "string"},
        "prompt": {"type": "string"},
        "response_format": {"enum": list(get_args(Format))},
        "temperature": {"type": "number"},
        "stream": {"type": "boolean"},
        f"{GRANULARITIES}[]": {"type": "array", "items": {"const": "segment"}},
    },
    "required": ["file"],
}


class AudioRequest(Placed):
    """The fields of OpenAI's forms, and those that say how a request stands among others."""

    absent = {
        "chunking_strategy": (),
        "diarize": (False, "false"),
        "hotwords": ("",),
        "include": ([],),
        "known_speaker_names": ([],),
        "known_speaker_references": ([],),
        "vad_filter": ("false",),
    }

    model: ModelName | None = None  # None: the only one
    language: Annotated[str, Field(max_length=16)] | None = None  # of the audio, as ISO 639-1 has it; None: it is heard
    prompt: str | None = None  # the text before the audio
    response_format: Format = "json"
    temperature: Temperature = 0.0  # 0 = greedy
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stream: bool = False
    timestamp_granularities: list[Literal["segment", "word"]] = []
    user: str | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> AudioRequest:
        if "word" in self.timestamp_granularities:
            raise ValueError(f"{GRANULARITIES}: word is not supported; send segment")
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise ValueError(f"{GRANULARITIES} goes with response_format verbose_json")
        if self.stream and self.response_format not in ("json", "text"):
            raise ValueError("stream goes with response_format json or text")
        return self

    @property
    def times(self) -> bool:
        """Whether the answer has times."""
        return self.response_format in ("verbose_json", "srt", "vtt")


async def read_form(request: Request) -> tuple[AudioRequest, bytes]:
    """The fields and the file's bytes, which count until the request ends. Raises RequestError."""
    server = shared(request)
    check_origin(request, server.config.cors_origins)
    share = request.state.held.enter_context(server.bodies.share())
    form = Form(request.scope["headers"], await read_raw(request, share))
    share.add(len(form.file))
    fields = await server.hooks.before(request.scope["path"], form.fields)
    note_ignored(request.scope, begin(is_strict=server.config.strict_fields, told=server.metrics.ignored))
    return validate(fields, AudioRequest), form.file
