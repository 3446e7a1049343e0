"""Transcriptions over HTTP: what transformers' generate writes, in every form, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from lmkit.serve.audio.segments import cut
from lmkit.wav import FLOAT
from tests.models import speech
from tests.models.speech import IDS
from tests.serve.live import Server
from tests.text.test_audio import wav

PATH = "/v1/audio/transcriptions"
FIRST = IDS["<|0.00|>"]


class Heard:
    """A server, and transformers' model of the same checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.own = speech.make(folder)
        self.extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.server = Server(
            "--max-batch-size", "3", "--no-packed-cache", "--activations", "exact", "--kv-dtype", "float32",
            "--served-model-name", "whisper", model=folder, engine="lmkit.turbo.engine.engine:Engine",
        )  # fmt: skip

    def text(self, ids: list[int]) -> str:
        found: str = self.tokenizer.decode([token for token in ids if token < speech.NUM_BYTES])
        return found

    def generated(self, sound: np.ndarray, **options: Any) -> list[tuple[float, float, str]]:
        """The segments of transformers' generate, of all windows of a long audio: start, end, text."""
        found = self.extractor(sound, sampling_rate=16000, return_tensors="pt", truncation=False, padding="longest",
                               return_attention_mask=True)  # fmt: skip
        if len(sound) <= 2 * 16000:
            found = self.extractor(sound, sampling_rate=16000, return_tensors="pt", return_attention_mask=True)
        with torch.no_grad():
            segments = self.own.generate(**found, task="transcribe", return_segments=True, **options)["segments"][0]
        return [(float(each["start"]), float(each["end"]), self.text(each["tokens"].tolist())) for each in segments]


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Heard]:
    found = Heard(tmp_path_factory.mktemp("whisper"))
    with found.server:
        yield found


@pytest.fixture(scope="module")
def client(heard: Heard) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{heard.server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def file(sound: np.ndarray) -> tuple[str, bytes]:
    return "a.wav", wav(sound.tobytes(), 32, FLOAT)


def test_the_client_gets_what_transformers_writes(heard: Heard, client: openai.OpenAI) -> None:
    sound = speech.sound(3, 1.7)
    answer = client.audio.transcriptions.create(model="whisper", file=file(sound), language="de")
    ((_, _, expected),) = heard.generated(sound, language="de")
    assert answer.text == expected.strip()
    assert answer.usage is not None
    assert answer.usage.type == "tokens"
    assert answer.usage.input_token_details is not None
    assert answer.usage.input_token_details.audio_tokens == 85
    stream = client.audio.transcriptions.create(model="whisper", file=file(sound), language="de", stream=True)
    events = list(stream)
    texts = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert "".join(texts).strip() == expected.strip()
    assert len(texts) > 1
    assert events[-1].type == "transcript.text.done"
    translated = client.audio.translations.create(model="whisper", file=file(sound))
    assert translated.text != answer.text


def test_a_long_audio_is_heard_window_by_window(heard: Heard, client: openai.OpenAI) -> None:
    """As transformers' sequential algorithm, with segments and their times."""
    sound = speech.sound(6, 5.3)
    answer = client.audio.transcriptions.create(
        model="whisper", file=file(sound), language="de", response_format="verbose_json",
        timestamp_granularities=["segment"],
    )  # fmt: skip
    found = [(segment.start, segment.end, segment.text) for segment in answer.segments or []]
    expected = heard.generated(sound, language="de", return_timestamps=True)
    assert [each[2] for each in found] == [each[2] for each in expected]
    assert np.abs(np.array([each[:2] for each in found]) - [each[:2] for each in expected]).max() < 0.01
    assert len({segment.seek for segment in answer.segments or []}) > 1
    assert answer.duration == 5.3
    starts = [segment.start for segment in answer.segments or []]
    assert starts == sorted(starts)
    texts = {
        form: client.audio.transcriptions.create(model="whisper", file=file(sound), language="de", response_format=form)
        for form in ("srt", "vtt", "text")
    }
    assert texts["vtt"].startswith("WEBVTT\n\n00:00:0")
    assert texts["srt"].count(" --> ") == texts["vtt"].count(" --> ") == len(starts)
    assert texts["text"].strip() == answer.text.strip()


def test_the_language_is_heard(heard: Heard, client: openai.OpenAI) -> None:
    sound = speech.sound(4, 1.9)
    answer = client.audio.transcriptions.create(model="whisper", file=file(sound), response_format="verbose_json")
    features = heard.extractor(sound, sampling_rate=16000, return_tensors="pt").input_features
    (token,) = heard.own.detect_language(input_features=features).tolist()
    assert IDS[f"<|{answer.language}|>"] == token


def post(server: Server, path: str = PATH, data: bytes | None = None, **fields: Any) -> httpx.Response:
    content = file(speech.sound(1, 0.3))[1] if data is None else data
    return httpx.post(server.url + path, files={"file": ("a.wav", content)}, data=fields, timeout=60)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"timestamp_granularities[]": "word"}, "word is not supported"),
        ({"timestamp_granularities[]": "segment"}, "goes with response_format verbose_json"),
        ({"stream": "true", "response_format": "srt"}, "stream goes with"),
        ({"language": "xx"}, "this model knows de, en"), ({"response_format": "mp3"}, "response_format"),
        ({"temperature": "warm"}, "temperature"), ({"diarize": "true"}, "diarize"),
        ({"include[]": "logprobs"}, "include"), ({"data": b"RIFF"}, "no WAV file"), ({"model": "other"}, "other"),
        ({"prompt": "<|startoftranscript|>"}, "must not write special tokens"),
    ],
)  # fmt: skip
def test_what_is_refused(heard: Heard, fields: dict[str, Any], reason: str) -> None:
    answer = post(heard.server, **fields)
    assert answer.status_code == (404 if "model" in fields else 400), answer.text
    assert reason in answer.json()["error"]["message"]


def test_bodies_that_are_no_form(heard: Heard) -> None:
    form = {"content-type": "multipart/form-data; boundary=x"}
    for headers, body in (({"content-type": "application/json"}, b"{}"), (form, b"--y\r\nnothing"), (form, b""),
                          ({"content-type": "multipart/form-data"}, b"--x--")):  # fmt: skip
        answer = httpx.post(heard.server.url + PATH, headers=headers, content=body)
        assert answer.status_code == 400, answer.text
    foreign = httpx.post(heard.server.url + PATH, headers={"origin": "http://evil"}, files={"file": b"a"})
    assert foreign.status_code == 403


def test_other_routes_and_models_say_what_they_can(heard: Heard, server: Server) -> None:
    assert heard.server.get("/v1/models").json()["data"][0]["input_modalities"] == ["audio"]
    text = heard.server.post("/v1/completions", {"model": "whisper", "prompt": "a"})
    assert (text.status_code, PATH in text.json()["error"]["message"]) == (400, True)
    deaf = post(server)
    assert (deaf.status_code, deaf.json()["error"]["message"]) == (
        400, "audio is not supported: this model hears no audio")  # fmt: skip


def test_segments_end_at_pairs_of_times() -> None:
    """What stands after the last pair is heard again."""
    ids = [FIRST, 65, FIRST + 10, FIRST + 10, 66, 67, FIRST + 40, FIRST + 40, 68]
    segments, advance = cut(ids, FIRST, 4.0, 2.0)
    assert [(round(each.start, 2), round(each.end, 2)) for each in segments] == [(4.0, 4.2), (4.2, 4.8)]
    assert advance == 0.8
    assert cut([*ids[:-2]], FIRST, 4.0, 2.0)[1] == 2.0, "it ends alone"
    ((start, end, tokens, _, _, _),), advance = cut([FIRST + 5, 65], FIRST, 4.0, 2.0)
    assert (start, round(end, 2), tokens, advance) == (4.0, 4.1, [FIRST + 5, 65], 2.0)


def test_a_stream_says_its_usage(heard: Heard) -> None:
    events = [line for line in post(heard.server, stream="true").text.splitlines() if line.startswith("data: ")]
    assert json.loads(events[-1][6:])["usage"]["output_tokens"] > 0
