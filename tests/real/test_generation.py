"""Models that generate, as their GGUF files are: tokens, greedy answers, a server, calls of tools."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lmkit import GenerationConfig, pipeline
from tests.real.conftest import Record
from tests.real.packages import SMOLLM2, Published
from tests.serve.live import Server

PROMPTS = [
    "What is the capital of France?",
    "Write a short poem about rain.",
    "Explain what a hash table is.",
    "Translate into Spanish: The cat sleeps.",
    "Was ist ein Fahrrad?",
    "Что такое вода?",
    "2 + 2 =",
    "def add(a, b):",
]
NEW_TOKENS = 12
ENGINE = "lmkit.turbo.engine.engine:Engine"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
            "required": ["city", "days"],
        },
    },
}


@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers(generator: Published, reference: Any, record: Record) -> None:
    """Each token is the most likely one of float32 transformers, after the same tokens."""
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    with pipeline(str(generator.path), kv_dtype="float32") as pipe:
        prompts = [pipe.tokenizer.encode(text) for text in PROMPTS]  # not every model has a chat template
        answers = [list(answer.token_ids) for answer in pipe(PROMPTS, config, do_preprocess=False)]
    right = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        right += int((logits.argmax(-1) == torch.tensor(answer)).sum())
    total = NEW_TOKENS * len(PROMPTS)
    record(generator, "greedy tokens that are transformers' (float32)", f"{right} of {total}")
    assert right >= 0.97 * total  # 8-bit heads and 4-bit linears round their inputs; a tie may fall otherwise


@pytest.mark.slow
def test_the_file_alone_is_served(generator: Published, tmp_path: Path, record: Record) -> None:
    """In a folder with nothing else: an answer and a stream of the same text."""
    shutil.copy(generator.path, tmp_path)
    with Server("--max-model-len", "2048", model=tmp_path / generator.name, engine=ENGINE) as server:
        asked = {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
        text = server.post("/v1/completions", asked).json()["choices"][0]["text"]
        assert text.strip()
        lines = server.post("/v1/completions", asked | {"stream": True}).text.splitlines()
        parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "".join(part["choices"][0]["text"] for part in parts if part["choices"]) == text
    record(generator, "served alone: answer and stream", "right")


@pytest.mark.slow
def test_chats_and_calls(smollm2: Path, record: Record) -> None:
    """An answer by the file's chat template, and a forced call that fits its schema."""
    with Server("--max-model-len", "2048", model=smollm2, engine=ENGINE) as server:
        asked = {"messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 16, "temperature": 0}
        text = server.post("/v1/chat/completions", asked).json()["choices"][0]["message"]["content"]
        assert "Paris" in text
        named = {"type": "function", "function": {"name": "get_weather"}}
        call = {"tools": [WEATHER], "tool_choice": named, "max_tokens": 100, "temperature": 0}
        message = server.post("/v1/chat/completions", asked | call).json()["choices"][0]["message"]
        arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
        assert isinstance(arguments["city"], str)
        assert 1 <= arguments["days"] <= 7
    record(SMOLLM2, "chat and forced call", "right")
