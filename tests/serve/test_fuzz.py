"""Mutated bodies: each gets an answer or an error of the client's in OpenAI's form, and the server lives on."""

from __future__ import annotations

import json
from typing import Any

import psutil
import pytest
from hypothesis import given, settings

from tests.mutation import mutated
from tests.serve.live import Server

SAMPLING = {"model": "demo", "max_tokens": 2, "temperature": 0.5, "top_k": 3, "stop": ["x"], "logit_bias": {"5": 1.5}}
CHAT = {"messages": [{"role": "user", "content": "Hi 日本"}], "chat_template_kwargs": {"enable_thinking": True}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": SAMPLING | CHAT | {"logprobs": True, "top_logprobs": 2},
    "/v1/completions": SAMPLING | {"prompt": [[5, 6, 7], [8]], "n": 2, "best_of": 2, "echo": True, "logprobs": 1},
    "/tokenize": {"prompt": "some text", "return_token_strs": True, "add_special_tokens": False},
    "/detokenize": {"tokens": [5, 6, 7], "skip_special_tokens": True},
    "/v1/encode": {"input": ["a", "b"], "do_preprocess": True},
}


def answered(server: Server, path: str, num_examples: int) -> None:
    whole = json.dumps(BODIES[path], ensure_ascii=False).encode()

    @settings(deadline=None, max_examples=num_examples)
    @given(data=mutated(whole))
    def try_one(data: bytes) -> None:
        answer = server.post(path, content=data, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
        if answer.status_code != 200:
            assert answer.json()["error"].keys() == {"message", "type", "param", "code"}

    process = psutil.Process(server.process.pid)
    assert server.post(path, content=whole, headers={"Content-Type": "application/json"}).status_code == 200
    before = process.memory_info().rss
    try_one()
    assert server.get("/health").status_code == 200
    assert process.memory_info().rss - before < 256 << 20


@pytest.mark.parametrize("path", BODIES)
def test_t10_mutated_bodies(server: Server, path: str) -> None:
    answered(server, path, 40)


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", BODIES)
def test_t10_many_mutated_bodies(server: Server, path: str) -> None:
    answered(server, path, 2000)
