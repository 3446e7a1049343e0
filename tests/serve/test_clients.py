"""Bodies that GuideLLM 0.8.1, LMDeploy's APIClient 0.16 and litellm 1.106 send, word for word."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.in_process import CHAT_PATH, TEXT_PATH, App, ScriptedEngine

APP = App(ScriptedEngine(lambda request: [70] * min(request.params.max_tokens or 8, 8)))
LMDEPLOY = {
    "model": "model", "temperature": 0.7, "n": 1, "stop": None, "stream": False, "top_p": 1.0, "top_k": 40,
    "user": None, "repetition_penalty": 1.0, "ignore_eos": False, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "stream_options": None, "kwargs": {},
}  # fmt: skip
LMDEPLOY_CHAT = LMDEPLOY | {
    "messages": [{"role": "user", "content": "Say this is a test!"}], "logprobs": False, "top_logprobs": 0,
    "max_completion_tokens": None, "max_tokens": 8, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "min_new_tokens": None, "min_p": 0.0, "logit_bias": None,
}  # fmt: skip
LMDEPLOY_TEXT = LMDEPLOY | {"prompt": "Once upon", "suffix": None, "max_completion_tokens": 16, "max_tokens": 16}
GUIDELLM = {
    "model": "model", "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "ignore_eos": True,
}  # fmt: skip
GUIDELLM_CHAT = GUIDELLM | {
    "max_completion_tokens": 16, "messages": [{"role": "user", "content": [{"type": "text", "text": "1 0 m0 Finish"}]}],
}  # fmt: skip
GUIDELLM_TEXT = GUIDELLM | {"max_tokens": 16, "prompt": "1 1 m0 Generation energy environmental body"}
LITELLM = {"messages": [{"role": "user", "content": "Hi"}], "model": "model", "max_tokens": 8}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT_PATH, LMDEPLOY_CHAT),
        (CHAT_PATH, LMDEPLOY_CHAT | {"messages": "Hi"}),
        (CHAT_PATH, LMDEPLOY_CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
        (TEXT_PATH, LMDEPLOY_TEXT),
        (TEXT_PATH, LMDEPLOY_TEXT | {"prompt": ["a", "b"]}),
        (TEXT_PATH, LMDEPLOY_TEXT | {"stream": True}),
        (CHAT_PATH, GUIDELLM_CHAT),
        (TEXT_PATH, GUIDELLM_TEXT),
        (CHAT_PATH, LITELLM),
        (CHAT_PATH, LITELLM | {"stream": True, "stream_options": {"include_usage": True}}),
        (TEXT_PATH, {"model": "model", "prompt": "Hi", "max_tokens": 4}),
        ("/v1/encode", {"input": "Hello there", "do_preprocess": False, "add_bos": True}),
    ],
)
def test_their_requests_are_answered(path: str, body: dict[str, Any]) -> None:
    answer = APP.post(path, body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, GUIDELLM_CHAT), (TEXT_PATH, GUIDELLM_TEXT)])
def test_guidellm_counts_tokens_by_the_usage_of_each_chunk(path: str, body: dict[str, Any]) -> None:
    lines = APP.post(path, body).text.split("\n\n")
    usages = [json.loads(line.removeprefix("data: "))["usage"] for line in lines if line.startswith("data: {")]
    assert all(usages)
    assert usages[-1]["completion_tokens"] == 8


def test_litellm_finds_an_overflow_by_its_words() -> None:
    answer = APP.post(CHAT_PATH, LITELLM | {"messages": [{"role": "user", "content": "word " * 6000}]})
    assert answer.status_code == 400
    assert "this model's maximum context length is" in answer.json()["error"]["message"]
