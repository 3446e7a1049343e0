"""Whisper in the engine, against transformers: logits, greedy transcripts, and what sequences hear in any company."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from lmkit.config import EngineConfig
from lmkit.errors import ConfigError, RequestError, UnsupportedError
from lmkit.quant.recipe import parse_recipe
from lmkit.quant.run import prepare
from lmkit.text.audio import AudioSettings, heard
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import ImageInput, Request, SamplingParams
from lmkit.turbo.speech import SpeechRules
from tests.models import speech
from tests.models.speech import IDS

OPTIONS: dict[str, Any] = {"block_size": 8, "max_batch_size": 3, "max_step_tokens": 16, "kv_dtype": "float32",
                           "packed_cache": False, "activations": "exact", "audit": 0}  # fmt: skip
PROMPT = [IDS[f"<|{name}|>"] for name in ("startoftranscript", "de", "transcribe", "notimestamps")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.WhisperForConditionalGeneration]:
    path = tmp_path_factory.mktemp("whisper")
    return path, speech.make(path)


@pytest.fixture(scope="module")
def engine(model: tuple[Path, Any]) -> Iterator[Engine]:
    engine = Engine(str(model[0]), EngineConfig(**OPTIONS))
    yield engine
    engine.close()


def request(name: str, sound: np.ndarray, prompt: list[int] = PROMPT, count: int = 20, **params: Any) -> Request:
    read = heard(sound, prompt[0])
    chosen = SamplingParams(max_tokens=count, **params)
    return Request(request_id=name, prompt_ids=prompt, params=chosen, images=(ImageInput(0, *read),))


def run(engine: Engine, *requests: Request) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for each in requests:
        engine.add(each)
    while engine.has_work():
        for output in engine.step():
            assert not output.error, output
            found.setdefault(output.request_id, []).extend(output.token_ids)
    return found


def features(path: Path, sound: np.ndarray) -> torch.Tensor:
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(path)
    found: torch.Tensor = extractor(sound, sampling_rate=16000, return_tensors="pt").input_features
    return found


def test_logprobs_are_those_of_transformers(model: tuple[Path, Any], engine: Engine) -> None:
    path, own = model
    sound = speech.sound(1, 1.4)
    engine.add(request("a", sound, logprobs=20, ignore_eos=True))
    outputs = [output for _ in range(200) if engine.has_work() for output in engine.step()]
    scored = [each for output in outputs for each in output.logprobs]
    ids = [each.token_id for each in scored]
    assert len(ids) == 20
    with torch.no_grad():
        logits = own(input_features=features(path, sound), decoder_input_ids=torch.tensor([PROMPT + ids])).logits[0]
    expected = logits[len(PROMPT) - 1 : -1].log_softmax(-1)
    for row, each in zip(expected, scored, strict=True):
        for token, logprob in each.top:
            assert abs(float(row[token]) - logprob) < 1e-4
        assert int(row.argmax()) == each.token_id


def rules(settings: AudioSettings, *, timestamps: bool) -> SpeechRules:
    return SpeechRules(
        suppress=settings.suppress, begin_suppress=settings.begin_suppress, timestamps=timestamps, end=settings.end,
        no_timestamps=settings.no_timestamps, max_initial=settings.max_initial,
    )  # fmt: skip


def generated(own: Any, heard: torch.Tensor, prompt: list[int], count: int, *, timestamps: bool) -> list[int]:
    """The greedy tokens of transformers' generate for one window, with its rules."""
    config, first = own.generation_config, len(prompt)
    chosen = [
        SuppressTokensLogitsProcessor(config.suppress_tokens, "cpu"),
        SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, first, "cpu"),
        *([WhisperTimeStampLogitsProcessor(config, begin_index=first)] if timestamps else []),
    ]
    plain = transformers.GenerationConfig(eos_token_id=config.eos_token_id, max_new_tokens=count, do_sample=False)
    with torch.no_grad():
        ids = transformers.GenerationMixin.generate(
            own, heard, generation_config=plain, decoder_input_ids=torch.tensor([prompt]),
            logits_processor=transformers.LogitsProcessorList(chosen),
        )  # fmt: skip
    found: list[int] = ids[0, first:].tolist()
    return found


@pytest.mark.parametrize("timestamps", [False, True])
def test_transcripts_are_those_of_generate(model: tuple[Path, Any], engine: Engine, timestamps: bool) -> None:
    """In steps that sequences of other lengths and other audios share."""
    path, own = model
    settings = engine.info.audio
    assert isinstance(settings, AudioSettings)
    sounds = [speech.sound(seed, 2 - seed / 5) for seed in range(5)]
    chosen = rules(settings, timestamps=timestamps)
    prompt = PROMPT[: 3 if timestamps else 4]
    asked = [request(str(i), sound, prompt, 16 + 5 * i, speech=chosen) for i, sound in enumerate(sounds)]
    found = run(engine, *asked)
    for i, sound in enumerate(sounds):
        assert found[str(i)] == generated(own, features(path, sound), prompt, 16 + 5 * i, timestamps=timestamps), i
    assert len(set(map(tuple, found.values()))) == 5, "sequences hear different audios"


def test_a_preempted_sequence_hears_its_audio_again(model: tuple[Path, Any], engine: Engine) -> None:
    sounds = [speech.sound(seed) for seed in (7, 8, 9)]
    asked = [request(str(i), sound, count=40, ignore_eos=True) for i, sound in enumerate(sounds)]
    alone = {each.request_id: run(engine, each)[each.request_id] for each in asked}
    block = engine.info.memory["kv"] // engine.info.num_blocks
    small = Engine(str(model[0]), EngineConfig(**OPTIONS, kv_memory=9 * block))
    assert run(small, *asked) == alone
    assert small.stats().preemptions
    small.close()


def test_the_prefix_cache_tells_audios_apart(engine: Engine) -> None:
    one, other = speech.sound(11), speech.sound(12)
    long = [IDS["<|startofprev|>"], *range(40, 70), *PROMPT]
    first = run(engine, request("a", one, long))
    hits = engine.stats().prefix_hits
    assert run(engine, request("b", other, long))["b"] != first["a"]
    assert engine.stats().prefix_hits == hits
    assert run(engine, request("c", one, long))["c"] == first["a"]
    assert engine.stats().prefix_hits > hits
    assert engine.stats().images["reused"]


def test_a_decoder_is_quantized_and_its_encoder_stays(model: tuple[Path, Any], engine: Engine, tmp_path: Path) -> None:
    plain = {"scheme": {"bits": 8, "group_size": "channel", "symmetric": True}, "steps": [{"step": "rtn"}],
             "format": "compressed-tensors", "calibration": {"dataset": "none"}}  # fmt: skip
    report = prepare(model[0], parse_recipe(plain, "recipe")).run(tmp_path / "rounded")
    assert len([linear for layer in report.layers for linear in layer.linears]) == 3 * 10
    rounded = Engine(str(tmp_path / "rounded"), EngineConfig(**OPTIONS))
    asked = request("a", speech.sound(1), count=1, logprobs=1)
    (exact,), (near,) = (first_logprobs(each, asked) for each in (engine, rounded))
    assert 0 < abs(exact - near) < 0.1
    rounded.close()
    calibrated = plain | {"calibration": {"dataset": "demo"}}
    with pytest.raises(UnsupportedError, match="writes what it hears"):
        prepare(model[0], parse_recipe(calibrated, "recipe"))


def first_logprobs(engine: Engine, asked: Request) -> list[float]:
    engine.add(asked)
    outputs = [output for _ in range(100) if engine.has_work() for output in engine.step()]
    return [each.logprob for output in outputs for each in output.logprobs]


def test_what_cannot_be_heard_is_refused(model: tuple[Path, Any], engine: Engine) -> None:
    with pytest.raises(RequestError, match="/v1/audio/transcriptions"):
        engine.add(Request(request_id="a", prompt_ids=PROMPT, params=SamplingParams()))
    with pytest.raises(RequestError, match="at most 2 s"):
        engine.add(request("b", speech.sound(1, 2.1)))
    for options in ({"tp": 3}, {"kv_events": "tcp://127.0.0.1:5999"}, {"speculate": f"draft={model[0]}"}):
        with pytest.raises(ConfigError, match="WhisperForConditionalGeneration attends to an audio"):
            Engine(str(model[0]), EngineConfig(**OPTIONS, **options))
