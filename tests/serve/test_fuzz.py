"""Mutated bodies: each gets an answer or an error of the client's in OpenAI's form, and the server lives on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings

from lmkit.serve.batches.batch import check_file
from tests.mutation import mutated
from tests.serve.live import Server

SAMPLING = {"model": "demo", "max_tokens": 2, "temperature": 0.5, "top_k": 3, "stop": ["x"], "logit_bias": {"5": 1.5}}
CHAT = {"messages": [{"role": "user", "content": "Hi 日本"}], "chat_template_kwargs": {"enable_thinking": True}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": SAMPLING | CHAT | {"logprobs": True, "top_logprobs": 2},
    "/v1/completions": SAMPLING | {"prompt": [[5, 6, 7], [8]], "n": 2, "best_of": 2, "echo": True, "logprobs": 1},
    "/generate": {
        "input_ids": [[5, 6, 7], [8]],
        "sampling_params": {"max_new_tokens": 2, "n": 2, "stop": ["x"], "no_stop_trim": True, "logit_bias": {"5": 1.5}},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "logprob_start_len": 0,
    },
    "/tokenize": {"prompt": "some text", "return_token_strs": True, "add_special_tokens": False},
    "/detokenize": {"tokens": [5, 6, 7], "skip_special_tokens": True},
    "/apply-template": {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "add_generation_prompt": False,
    },
    "/v1/responses": {
        "model": "demo",
        "max_output_tokens": 2,
        "instructions": "Be brief",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi 日本"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
        ],
        "text": {"format": {"type": "text"}},
        "metadata": {"a": "b"},
        "tool_choice": "auto",
    },
    "/v1/messages": {
        "model": "demo",
        "max_tokens": 2,
        "system": [{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "Hi 日本"},
            {"role": "assistant", "content": [{"type": "text", "text": "x"}]},
            {"role": "user", "content": [{"type": "text", "text": "More"}]},
        ],
        "stop_sequences": ["x"],
        "thinking": {"type": "adaptive"},
    },
    "/api/chat": {
        "model": "demo",
        "messages": [
            {"role": "user", "content": "Hi 日本"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
            {"role": "tool", "content": "x", "tool_name": "f"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "options": {"num_predict": 2, "stop": ["x"], "num_ctx": 9},
        "keep_alive": "5m",
        "think": False,
    },
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
            if path.startswith("/api/"):
                assert isinstance(answer.json()["error"], str)
                return
            known = {"message", "type"} if path == "/v1/messages" else {"message", "type", "param", "code"}
            assert answer.json()["error"].keys() == known

    process = psutil.Process(server.process.pid)
    assert server.post(path, content=whole, headers={"Content-Type": "application/json"}).status_code == 200
    before = process.memory_info().rss
    try_one()
    assert server.get("/health").status_code == 200
    assert process.memory_info().rss - before < 256 << 20


@pytest.mark.parametrize("path", BODIES)
def test_mutated_bodies(server: Server, path: str) -> None:
    answered(server, path, 40)


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", BODIES)
def test_many_mutated_bodies(server: Server, path: str) -> None:
    answered(server, path, 2000)


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    b'Content-Disposition: form-data; name="file"; filename="in.jsonl"\r\nContent-Type: text/plain\r\n\r\n'
    b'{"a": 1}\n\r\n'
    b'--b\r\nContent-Disposition: form-data; name="expires_after[seconds]"\r\n\r\n3600\r\n--b--\r\n'
)
LINE = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}
LINES = b"".join(json.dumps({"custom_id": name, **LINE}).encode() + b"\n" for name in ("a", "b", "c"))


@settings(deadline=None, max_examples=40)
@given(data=mutated(FORM))
def test_mutated_forms(server: Server, data: bytes) -> None:
    answer = server.post("/v1/files", content=data, headers={"Content-Type": "multipart/form-data; boundary=b"})
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=mutated(LINES))
def test_mutated_files_of_batches(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    total, errors = check_file(path, "/v1/completions", 1000)
    assert 0 <= total <= 3 + len(data.splitlines())
    assert all(error["message"] and error["line"] != 0 for error in errors)
