"""A request that does not say how to sample is sampled as the checkpoint's authors recommend."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lmkit.formats.generation_config import SamplingDefaults
from lmkit.turbo.request import SamplingParams
from tests.serve.in_process import CHAT, CHAT_PATH, TEXT, TEXT_PATH, App, ScriptedEngine

DEFAULTS = SamplingDefaults(
    temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.1, max_new_tokens=48
)
FIELDS = DEFAULTS.sampling()
OTHER = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def asked(path: str, body: dict[str, Any], sampling: SamplingDefaults = DEFAULTS) -> SamplingParams:
    """What the engine is asked to do."""
    engine = ScriptedEngine(max_model_len=64)
    assert engine.info is not None
    engine.info = msgspec.structs.replace(engine.info, sampling=sampling)
    response = App(engine).post(path, body)
    assert response.status_code == 200, response.text
    return engine.requests[0].params


def sampled(params: SamplingParams) -> dict[str, float]:
    return {name: getattr(params, name) for name in FIELDS}


@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), (TEXT_PATH, TEXT)])
def test_fields_that_are_not_set(path: str, body: dict[str, Any]) -> None:
    assert sampled(asked(path, body)) == FIELDS
    assert sampled(asked(path, body | dict.fromkeys(FIELDS))) == FIELDS
    assert sampled(asked(path, body | {"temperature": 0, "top_p": 0.5})) == FIELDS | {"temperature": 0.0, "top_p": 0.5}
    assert sampled(asked(path, body | OTHER)) == OTHER, "a neutral value that is set wins too"
    assert sampled(asked(path, body, SamplingDefaults())) == OTHER | {"temperature": 1.0}, "OpenAI's defaults"
    assert sampled(asked(path, body, SamplingDefaults(temperature=0.0)))["temperature"] == 0.0


def test_the_length_is_a_default_and_no_limit() -> None:
    assert asked(CHAT_PATH, CHAT).max_tokens == asked(TEXT_PATH, TEXT).max_tokens == 48
    assert asked(CHAT_PATH, CHAT | {"max_tokens": 50}).max_tokens == 50
    assert asked(TEXT_PATH, TEXT | {"max_tokens": 50}).max_tokens == 50
    assert asked(CHAT_PATH, CHAT, SamplingDefaults()).max_tokens is None
    assert asked(TEXT_PATH, TEXT, SamplingDefaults()).max_tokens == 16


def test_a_default_length_refuses_no_prompt() -> None:
    """The context is 64 tokens: this prompt leaves less room than the default asks for."""
    prompt = list(range(70, 120))
    assert asked(TEXT_PATH, TEXT | {"prompt": prompt}).max_tokens == 48  # the engine stops at the context's end
    engine = ScriptedEngine(max_model_len=64)
    assert App(engine).post(TEXT_PATH, TEXT | {"prompt": prompt, "max_tokens": 48}).status_code == 400
