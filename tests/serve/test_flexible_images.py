"""Images over HTTP to a model that transformers computes: every API gives transformers' greedy answer."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from PIL import Image

from benchmarks.families.sweep import ANSWER
from benchmarks.families.tiny_images import save_tiny
from lmkit.text.tokenizer import Tokenizer
from tests.flexible.test_images import content, data_url, expected
from tests.serve.live import Server

pytestmark = pytest.mark.slow

PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
EXACT = ("--activations", "exact", "--kv-dtype", "float32", "--no-packed-cache", "--max-model-len", "256")
CELLS = 16  # tokens of an image
BEFORE = 3  # tokens before the first image


class Served(NamedTuple):
    server: Server
    seeing: tuple[Any, Path]  # transformers' model, and the checkpoint
    tokenizer: Tokenizer

    def answer(self, text: str, *numbers: int) -> str:
        """That of transformers."""
        return self.tokenizer.decode(expected(self.seeing, text, *numbers))

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = self.server.post(path, {"model": "llava", "temperature": 0} | body, timeout=120)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    def chat(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        return self.post("/v1/chat/completions", {"messages": messages, "max_tokens": ANSWER} | fields)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served") / "llava"
    seeing = save_tiny("llava", folder)[0], folder
    with Server(*EXACT, model=folder, engine="lmkit.turbo.engine.engine:Engine") as server:
        assert "images are refused" not in server.log
        yield Served(server, seeing, Tokenizer.from_pretrained(folder))


def asked(text: str, *numbers: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content(text, *numbers)}]


def text_of(reply: dict[str, Any]) -> str:
    return str(reply["choices"][0]["message"]["content"])


def test_turns_and_the_cache(served: Served) -> None:
    """Two images, another image after the same text, a second turn with an image, and none."""
    first = served.chat(asked("what", 0), logprobs=True, top_logprobs=2)
    assert text_of(first) == served.answer(PROMPT.format("Mwhat"), 0)
    assert len(first["choices"][0]["logprobs"]["content"]) == ANSWER
    other = served.chat(asked("what", 1))
    assert text_of(other) == served.answer(PROMPT.format("Mwhat"), 1) != text_of(first)
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] <= BEFORE
    both = served.chat(asked("what", 0, 1))
    assert text_of(both) == served.answer(PROMPT.format("MMwhat"), 0, 1)
    assert both["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"] + CELLS
    turns = [*asked("what", 0), {"role": "assistant", "content": "a dog"}, *asked("and", 2)]
    second = served.chat(turns)
    text = PROMPT.format("Mwhat") + "a dog<|im_end|>\n" + PROMPT.format("Mand")
    assert text_of(second) == served.answer(text, 0, 2)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > CELLS
    assert text_of(served.chat(asked("what"))) == served.answer(PROMPT.format("what"))


def test_all_apis_and_a_stream(served: Served) -> None:
    wanted, bare = served.answer(PROMPT.format("Mwhat"), 0), data_url(0).partition(",")[2]
    body = {"model": "llava", "messages": asked("what", 0), "max_tokens": ANSWER, "temperature": 0, "stream": True}
    with httpx.stream("POST", served.server.url + "/v1/chat/completions", json=body, timeout=120) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == wanted
    parts = [{"type": "input_image", "image_url": data_url(0)}, {"type": "input_text", "text": "what"}]
    given = {"input": [{"role": "user", "content": parts}], "max_output_tokens": ANSWER, "store": False}
    assert served.post("/v1/responses", given)["output"][0]["content"][0]["text"] == wanted
    source = {"type": "base64", "media_type": "image/png", "data": bare}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "what"}]
    given = {"messages": [{"role": "user", "content": blocks}], "max_tokens": ANSWER}
    assert served.post("/v1/messages", given)["content"][0]["text"] == wanted
    options = {"stream": False, "options": {"num_predict": ANSWER, "temperature": 0}}
    told = {"messages": [{"role": "user", "content": "what", "images": [bare]}]}
    assert served.post("/api/chat", options | told)["message"]["content"] == wanted
    assert served.post("/api/generate", options | {"prompt": "what", "images": [bare]})["response"] == wanted


def huge() -> str:
    file = io.BytesIO()
    Image.new("1", (9000, 9000)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (data_url(0)[: len("data:image/png;base64,") + 200], "no image that can be read"),
        (huge(), "9000 x 9000 pixels: at most 50,000,000 in all"),
    ],
    ids=["broken", "huge"],
)
def test_broken_and_huge_images_are_refused(served: Served, url: str, message: str) -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    reply = served.server.post("/v1/chat/completions", {"model": "llava", "messages": messages}, timeout=120)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]
