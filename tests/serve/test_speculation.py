"""Answers and streams with draft tokens are those without, field by field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.live import Server

CODE = "class Queue:\n    def get(self):\n        return self.items.pop()\n\n    def put(self, item):\n        self."
SAID = [{"role": "user", "content": "Write a function `size`. " * 4}]
TEXT_BODIES: list[dict[str, Any]] = [
    {"max_tokens": 3, "logprobs": 2},
    {"max_tokens": 17, "logprobs": 0, "echo": True},
    {"max_tokens": 60, "stop": ["self", "\n\n"], "logprobs": 1},
    {"max_tokens": 60, "stop": ["):"], "include_stop_str_in_output": True},
    {"max_tokens": 40, "n": 3, "temperature": 0.7, "seed": 5, "logprobs": 2},
    {"max_tokens": 40, "min_tokens": 20, "presence_penalty": 0.5, "logit_bias": {"300": -5, "301": 2}},
    {"max_tokens": 40, "return_token_ids": True, "prompt": [CODE, CODE[20:], "x = 1\n" * 12]},
]
CHAT_BODIES: list[dict[str, Any]] = [
    {"max_tokens": 40, "logprobs": True, "top_logprobs": 2, "n": 2, "seed": 3},
    {"max_tokens": 50, "stop": "\n", "temperature": 0},
]
OWN = {"id", "created", "prompt_tokens_details"}  # fields of one answer alone; the last says what the cache had


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = ("--dtype", "float32", "--max-model-len", "512", "--speculate", "ngram", "--draft-history", "4096")
    with Server(*options, engine="tests.serve.drafting_engine:Engine") as running:
        yield running
        assert running.metric("lmkit:spec_decode_num_accepted_tokens_total") > 100


def without(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict):
        return {name: without(inner, names) for name, inner in value.items() if name not in names}
    return [without(inner, names) for inner in value] if isinstance(value, list) else value


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices of a stream: texts and lists are strung together, of all else the last value counts."""
    choices: dict[int, dict[str, Any]] = {}

    def add(whole: dict[str, Any], part: dict[str, Any]) -> None:
        for name, value in part.items():
            if isinstance(value, dict):
                add(whole.setdefault(name, {}), value)
            elif isinstance(value, str | list):
                whole[name] = whole.get(name, type(value)()) + value
            elif value is not None:
                whole[name] = value

    for chunk in chunks:
        for choice in chunk["choices"]:
            add(choices.setdefault(choice["index"], {}), choice)
    return choices


def streamed(server: Server, path: str, body: dict[str, Any]) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """The choices, and the usage."""
    answer = server.post(path, body | {"stream": True, "stream_options": {"include_usage": True}})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    return joined(chunks), without(chunks[-1]["usage"], OWN)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(("/v1/completions", {"prompt": CODE, "temperature": 0} | body) for body in TEXT_BODIES),
        *(("/v1/chat/completions", {"messages": SAID} | body) for body in CHAT_BODIES),
    ],
    ids=str,
)
def test_answers_and_streams_are_those_without_drafts(server: Server, path: str, body: dict[str, Any]) -> None:
    plain = body | {"speculate": False}
    want, want_streamed = server.post(path, plain), streamed(server, path, plain)
    assert want.is_success, want.text
    for _ in range(2):  # the second time, all of the answer is drafted
        assert without(server.post(path, body).json(), OWN) == without(want.json(), OWN)
        assert streamed(server, path, body) == want_streamed
