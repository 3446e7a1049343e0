"""Requests of Open WebUI and of Continue, as their sources write them: lists, chats, titles, embeddings, code between.

Open WebUI speaks Ollama's API or OpenAI's to a server, Continue those two and llama.cpp's.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tests.serve import in_process
from tests.serve.in_process import App, ScriptedEngine
from tests.serve.live import Server
from tests.serve.test_fill_in import MARKS, with_tokens

TOKENIZER = with_tokens(*MARKS)
WORDS = ("content", "response", "text")  # fields with the text of an answer
SYSTEM, HI = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOL = {"type": "function", "function": {"name": "read", "description": "Read a file.", "parameters": SCHEMA}}
STOPS = ["<|endoftext|>", "<|fim_prefix|>", "/src/", "\n\n"]
FILLED = "<|fim_prefix|>def f():\n<|fim_suffix|>f()\n<|fim_middle|>"
# of Ollama's API
CALL = {"index": 0, "id": "c1", "function": {"name": "read", "arguments": {"path": "a"}}}
TURNS = [HI, {"role": "assistant", "tool_calls": [CALL], "content": ""},
         {"role": "tool", "tool_call_id": "c1", "content": "RESULT"}]  # fmt: skip
WEBUI_OPTIONS = {"temperature": 0.8, "mirostat": 0, "num_ctx": 8192, "repeat_last_n": 64, "use_mmap": True, "stop": []}
CONTINUE_OPTIONS = {"temperature": 0.01, "num_predict": 256, "stop": STOPS, "num_ctx": 4096, "num_thread": 8}
WEBUI = {"model": "model:latest", "options": WEBUI_OPTIONS, "keep_alive": "5m"}
CONTINUE = {"model": "model", "options": CONTINUE_OPTIONS, "keep_alive": 1800, "stream": True}
# of OpenAI's
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
OPENAI_CALL = {"id": "c1", "index": 0, "type": "function", "function": {"name": "read", "arguments": '{"path":"a"}'}}
OPENAI_TURNS = [HI, {"role": "assistant", "content": "", "tool_calls": [OPENAI_CALL]}, TURNS[2]]
MACHINE = {"keep_alive", "options.num_ctx"}

THREADS = MACHINE | {"options.num_thread"}
OLLAMA = {"model": "model:latest", "messages": [HI], "stream": False}
OPENAI = {"model": "model", "messages": [SYSTEM, HI]}
OPENAI_TOOLS = {"messages": OPENAI_TURNS, "tools": [TOOL]}
BETWEEN = {"model": "model", "prompt": FILLED, "stop": STOPS, "stream": True, "temperature": 0.01}

REQUESTS: dict[str, tuple[str, dict[str, Any], set[str]]] = {  # path, body, what is left out
    "webui-chat": ("/api/chat", WEBUI | {"messages": [SYSTEM, HI], "stream": True}, MACHINE | {"options.use_mmap"}),
    "webui-tools": ("/api/chat", OLLAMA | {"messages": TURNS, "stream": True, "tools": [TOOL]}, set()),
    "webui-title": ("/api/chat", OLLAMA | {"num_predict": 1000}, set()),
    "webui-think": ("/api/chat", OLLAMA | {"stream": True, "think": False, "options": {}}, set()),
    "webui-format": ("/api/chat", OLLAMA | {"format": SCHEMA}, set()),
    "webui-openai": ("/v1/chat/completions", USAGE | OPENAI, set()),
    "webui-openai-tools": ("/v1/chat/completions", USAGE | OPENAI | OPENAI_TOOLS, set()),
    "webui-openai-title": ("/v1/chat/completions", OPENAI | {"stream": False, "max_completion_tokens": 1000}, set()),
    "continue-chat": ("/api/chat", CONTINUE | {"messages": [SYSTEM, HI], "tools": [TOOL]}, THREADS),
    "continue-openai": ("/v1/chat/completions", USAGE | OPENAI | {"tools": [TOOL], "max_tokens": 256}, set()),
    "continue-fim": ("/api/generate", CONTINUE | {"prompt": "def f():\n", "suffix": "f()\n"}, THREADS),
    "continue-fim-raw": ("/api/generate", CONTINUE | {"prompt": FILLED, "raw": True}, THREADS),
    "continue-fim-openai": ("/v1/completions", BETWEEN | {"max_tokens": 256}, set()),
    "continue-fim-llama": ("/completion", BETWEEN | {"n_predict": 256}, set()),
}  # fmt: skip


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> tuple[App, ScriptedEngine]:
    """A model that fills in, and says Hello."""
    monkeypatch.setattr(in_process, "TOKENIZER", TOKENIZER)
    ids = [*TOKENIZER.encode("Hello", False), TOKENIZER.eos_token_ids[0]]
    engine = ScriptedEngine(lambda request: ids, finish_reason="stop")
    assert engine.info is not None
    engine.info = msgspec.structs.replace(engine.info, vocab_size=TOKENIZER.vocab_size)
    return App(engine), engine


def said(value: Any) -> str:
    """The text of an answer, whole or in parts, of any API."""
    if isinstance(value, list):
        return "".join(map(said, value))
    found = value.items() if isinstance(value, dict) else ()
    return "".join(item if name in WORDS and isinstance(item, str) else said(item) for name, item in found)


def parts(text: str, kind: str) -> list[Any]:
    if kind.startswith("text/event-stream"):
        return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_is_answered_with_its_limits(name: str, served: tuple[App, ScriptedEngine]) -> None:
    path, body, ignored = REQUESTS[name]
    app, engine = served
    answer = app.post(path, body)
    assert answer.status_code == 200, answer.text
    assert said(parts(answer.text, answer.headers["content-type"])) == "Hello"
    assert set(filter(None, answer.headers.get("x-lmkit-ignored", "").split(","))) == ignored
    (request,) = engine.requests
    limits = {"title": 1000, "continue": 256}
    assert request.params.max_tokens == next((limit for word, limit in limits.items() if word in name), None)
    prompt = TOKENIZER.decode(request.prompt_ids, False)
    if "fim" in name:
        assert prompt == FILLED
    if "tools" in body:
        assert '"read"' in prompt
    assert ("RESULT" in prompt) == ("messages" in body and body["messages"][-1]["role"] == "tool")


def test_what_they_ask_of_a_model(served: tuple[App, ScriptedEngine]) -> None:
    app, engine = served
    assert [model["id"] for model in app.request("GET", "/v1/models").json()["data"]] == ["model"]
    for path in ("/api/tags", "/api/ps"):  # Open WebUI takes the names of both for the same
        assert [model["name"] for model in app.request("GET", path).json()["models"]] == ["model:latest"]
    version = app.request("GET", "/api/version").json()["version"]
    assert all(part.isdigit() for part in version.split("."))
    shown = app.post("/api/show", {"name": "model"}).json()
    assert "insert" in shown["capabilities"]
    assert ".Suffix" in shown["template"], "Continue asks models without it for no code between"
    assert dict(line.split() for line in shown["parameters"].splitlines())["num_ctx"] == "4096"
    assert not engine.requests


def test_their_embeddings(server: Server) -> None:
    texts = ["Hello", "Good morning"]
    ours = [one["embedding"] for one in server.post("/v1/embeddings", {"model": "demo", "input": texts}).json()["data"]]
    for body in ({"input": texts}, {"input": texts, "truncate": True}):
        answer = server.post("/api/embed", {"model": "demo:latest", **body})
        assert (answer.json()["embeddings"], "x-lmkit-ignored" in answer.headers) == (ours, False)
    both = server.post("/api/embeddings", {"model": "demo:latest", "input": texts[:1], "prompt": texts[0]})
    assert both.json()["embedding"] == ours[0]
    plain = {"model": "demo", "input": texts, "encoding_format": "float"}
    assert [one["embedding"] for one in server.post("/v1/embeddings", plain).json()["data"]] == ours
