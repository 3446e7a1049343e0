"""Ollama's API: captured requests of its clients, in the forms that these read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from lmkit.config import ServerConfig
from lmkit.text import ChatTemplate, Tokenizer
from lmkit.text.dialects import DIALECTS
from tests.serve import in_process
from tests.serve.in_process import TOKENIZER, App, ScriptedEngine
from tests.serve.live import Server
from tests.serve.test_pool import Setting, run, until
from tests.serve.test_tools import TEMPLATE
from tests.text.dialects.answers import CALLS, with_marks, written

CHAT, GENERATE = "/api/chat", "/api/generate"
ASKED = [{"role": "user", "content": "Hi"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
# as the Python client writes the tools that it makes of functions, without a kind; the second as LangChain does
TOOLS = [{"function": {"name": "f", "parameters": PARAMETERS}}, {"type": "function", "function": {"name": "g"}}]
END = {"done", "done_reason", "total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration",
       "eval_count", "eval_duration"}  # fmt: skip


def answering(text: str, tokenizer: Tokenizer = TOKENIZER, **options: Any) -> tuple[App, ScriptedEngine]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    engine = ScriptedEngine(lambda request: [*ids, tokenizer.eos_token_ids[0]], finish_reason="stop")
    assert engine.info is not None
    engine.info = msgspec.structs.replace(engine.info, vocab_size=tokenizer.vocab_size)
    return App(engine, ServerConfig(**options)), engine


def ask(app: App, path: str = CHAT, **fields: Any) -> Any:
    answer = app.post(path, {"model": "model:latest", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def parts(app: App, path: str = CHAT, **fields: Any) -> list[dict[str, Any]]:
    """The lines of a stream, which is the default."""
    answer = app.post(path, {"model": "model", **fields})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson"), answer.text
    return [json.loads(line) for line in answer.text.removesuffix("\n").split("\n")]


def refusal(app: App, path: str, **fields: Any) -> tuple[int, str]:
    answer = app.post(path, {"model": "model", **fields})
    assert list(answer.json()) == ["error"]
    return answer.status_code, answer.json()["error"]


def test_a_chat_whole_and_streamed() -> None:
    app, engine = answering("Hello there")
    whole = ask(app, messages=ASKED, stream=False)
    assert whole.keys() == END | {"model", "created_at", "message"}
    assert (whole["model"], whole["done"], whole["done_reason"]) == ("model:latest", True, "stop")
    assert whole["message"] == {"role": "assistant", "content": "Hello there"}
    assert whole["prompt_eval_count"] == len(engine.requests[0].prompt_ids)
    *texts, last = parts(app, messages=ASKED)
    assert "".join(part["message"]["content"] for part in texts) == "Hello there"
    assert len(texts) > 1
    assert not any(part["done"] for part in texts)
    assert last.keys() == whole.keys()
    assert last["eval_count"] == whole["eval_count"] == len(TOKENIZER.encode("Hello there", False)) + 1


def test_options_are_those_of_the_engine_and_hints_are_named() -> None:
    """Open WebUI's request: options of the machine and the time in memory change no answer."""
    app, engine = answering("x")
    options = {"num_predict": 7, "temperature": 0.5, "top_k": 0, "top_p": 0.5, "min_p": 0.1, "seed": 3, "stop": ["a"],
               "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25, "num_ctx": 8192,
               "num_gpu": 99, "mirostat": 0}  # fmt: skip
    body = {"model": "model", "messages": ASKED, "stream": False, "options": options, "keep_alive": "30m"}
    answer = app.post(CHAT, body)
    assert set(answer.headers["x-lmkit-ignored"].split(",")) == {"options.num_ctx", "options.num_gpu", "keep_alive"}
    params = engine.requests[-1].params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (7, 0.5, 0, 0.5)
    assert (params.min_p, params.seed, params.stop, params.repetition_penalty) == (0.1, 3, ("a",), 1.5)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, 0.25)
    ask(app, messages=ASKED, stream=False, options={"num_predict": -2})
    assert engine.requests[-1].params.max_tokens is None
    strict, _ = answering("x", strict_fields=True)
    assert "num_ctx" in refusal(strict, CHAT, messages=ASKED, options={"num_ctx": 1})[1]


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (CHAT, {"messages": ASKED, "options": {"mirostat": 2}}, "mirostat"),
        (CHAT, {"messages": ASKED, "options": {"temperature": -1}}, "options.temperature"),
        (CHAT, {"messages": ASKED, "options": {"tempeature": 1}}, "tempeature"),
        (CHAT, {"messages": ASKED, "options": {"num_predict": 0}}, "options.num_predict"),
        (CHAT, {"messages": ASKED, "format": {"type": 5}}, "format"),
        (CHAT, {"messages": [{"role": "user", "content": "Hi", "images": ["aGk="]}]}, "images"),
        (GENERATE, {"prompt": "Hi", "template": "{{ .Prompt }}"}, "template"),
        (GENERATE, {"prompt": "Hi", "suffix": "x"}, "suffix"),
        (GENERATE, {"prompt": "Hi", "raw": True, "system": "x"}, "system"),
        (GENERATE, {"prompt": "Hi", "context": [1 << 20]}, "context"),
        (CHAT, {"model": "other", "messages": ASKED}, "other"),
        ("/api/pull", {"model": "llama3.2"}, "lmkit pull"),
        ("/api/create", {}, "/api/create"),
    ],
)
def test_what_would_change_an_answer_is_refused_by_name(path: str, fields: dict[str, Any], named: str) -> None:
    app, engine = answering("x")
    status, error = refusal(app, path, **fields)
    assert status in (400, 404)
    assert named in error
    assert not engine.requests


def test_calls_are_objects_and_their_results_find_them() -> None:
    """The Python client's loop: it sends the message back, and a result that only names its tool."""
    app, engine = answering("I look.\n" + written(DIALECTS["hermes"], CALLS))
    message = ask(app, messages=ASKED, tools=TOOLS, stream=False)["message"]
    assert message["content"] == "I look."
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert calls == CALLS
    streamed = parts(app, messages=ASKED, tools=TOOLS)
    made = [call for part in streamed for call in part["message"].get("tool_calls", ())]
    assert made == message["tool_calls"]
    assert streamed[-1]["done_reason"] == "stop"
    results = [{"role": "tool", "content": "42", "tool_name": name} for name, _ in CALLS]
    ask(app, messages=[*ASKED, message, *results], tools=TOOLS, stream=False)
    assert "42" in TOKENIZER.decode(engine.requests[-1].prompt_ids)


def test_a_call_that_a_limit_cut_is_text() -> None:
    ids = TOKENIZER.encode(written(DIALECTS["hermes"], CALLS[:1]), False)[:-9]
    app = App(ScriptedEngine(lambda request: ids, finish_reason="length"))
    answer = ask(app, messages=ASKED, tools=TOOLS, stream=False)
    assert "tool_calls" not in answer["message"]
    assert answer["done_reason"] == "length"


def test_thinking_stands_beside_the_content(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = with_marks(DIALECTS["hermes"])
    tokenizer.chat_template = ChatTemplate(TEMPLATE)
    monkeypatch.setattr(in_process, "TOKENIZER", tokenizer)
    app, engine = answering("Hm.\n</think>\n\nYes.", tokenizer)
    message = ask(app, messages=ASKED, think=True, stream=False)["message"]
    assert (message["thinking"].strip(), message["content"].strip()) == ("Hm.", "Yes.")
    streamed = parts(app, GENERATE, prompt="Hi", think="high")
    assert "".join(part.get("thinking", "") for part in streamed).strip() == "Hm."
    assert "".join(part["response"] for part in streamed).strip() == "Yes."
    ask(app, messages=ASKED, think=False, stream=False)
    assert not tokenizer.decode(engine.requests[-1].prompt_ids).endswith("<think>\n")
    assert ask(app, "/api/show")["capabilities"] == ["completion", "tools", "thinking"]


def test_generate_with_a_template_raw_and_behind_an_earlier_answer() -> None:
    app, engine = answering("Hello")
    first = ask(app, GENERATE, prompt="Hi", system="Be brief.", stream=False)
    assert first["response"] == "Hello"
    prompt = engine.requests[-1].prompt_ids
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert prompt == TOKENIZER.encode_chat(asked)
    assert first["context"][: len(prompt)] == prompt
    ask(app, GENERATE, prompt="More", context=first["context"], stream=False)
    own = TOKENIZER.encode_chat([{"role": "user", "content": "More"}])
    assert engine.requests[-1].prompt_ids == [*first["context"], *own]
    *texts, last = parts(app, GENERATE, prompt="Hi", raw=True)
    assert engine.requests[-1].prompt_ids == TOKENIZER.encode("Hi")
    assert "".join(part["response"] for part in texts) == "Hello"
    assert engine.requests[-1].params.max_tokens is None
    assert last["done_reason"] == "stop"
    beyond = ask(app, GENERATE, prompt="Hi", raw=True, options={"num_predict": 1 << 20}, stream=False)
    assert beyond["response"] == "Hello"
    count = len(engine.requests)
    assert ask(app, GENERATE, stream=False)["done_reason"] == "load"
    assert parts(app, messages=[])[0]["done_reason"] == "load"
    assert len(engine.requests) == count


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"a": {"type": "integer"}}}])
def test_a_format_is_a_grammar(form: Any) -> None:
    app, engine = answering('{"a": 1}')
    ask(app, messages=ASKED, format=form, stream=False)
    ask(app, GENERATE, prompt="Hi", format=form, raw=True, stream=False)
    assert all(request.params.grammar for request in engine.requests)
    ask(app, messages=ASKED, format="", stream=False)
    assert not engine.requests[-1].params.grammar


def test_log_probabilities() -> None:
    app, _ = answering("Hello")
    for path, fields in ((CHAT, {"messages": ASKED}), (GENERATE, {"prompt": "Hi", "raw": True})):
        whole = ask(app, path, logprobs=True, stream=False, **fields)
        assert whole["logprobs"][0] == {"token": "Hello", "logprob": -1.0, "bytes": list(b"Hello"), "top_logprobs": []}
        streamed = [entry for part in parts(app, path, logprobs=True, **fields) for entry in part.get("logprobs", ())]
        assert streamed == whole["logprobs"]


def test_lists_of_models() -> None:
    app, _ = answering("x")
    (listed,) = app.request("GET", "/api/tags").json()["models"]
    assert (listed["name"], listed["model"]) == ("model:latest", "model:latest")
    assert listed["size"] > 1000
    (running,) = app.request("GET", "/api/ps").json()["models"]
    assert running["context_length"] == 4096
    shown = ask(app, "/api/show", verbose=True)
    assert shown["model_info"]["llama.context_length"] == 4096
    assert shown["model_info"]["general.architecture"] == "llama"
    assert shown["capabilities"] == ["completion", "tools"]
    assert ".Suffix" not in shown["template"]
    older = app.post("/api/show", {"name": "model"})
    assert older.json() == shown
    assert app.request("GET", "/api/version").json()["version"]
    assert app.post("/api/pull", {"model": "model", "stream": False}).json() == {"status": "success"}


def test_an_error_in_a_stream_is_its_last_line() -> None:
    app = App(in_process.StubEngine(RuntimeError("secret")))
    lines = app.post(CHAT, {"model": "model", "messages": ASKED}).text.splitlines()
    assert json.loads(lines[-1]) == {"error": "internal server error"}


def test_embeddings_are_those_of_openais_route(server: Server) -> None:
    texts = ["Hello", "Good morning"]
    ours = [item["embedding"] for item in server.post("/v1/embeddings", {"input": texts}).json()["data"]]
    answer = server.post("/api/embed", {"model": "demo:latest", "input": texts}).json()
    assert answer["embeddings"] == ours
    assert answer["prompt_eval_count"] > 1
    assert server.post("/api/embed", {"model": "demo", "input": "Hello"}).json()["embeddings"] == ours[:1]
    one = server.post("/api/embeddings", {"model": "demo", "prompt": "Hello", "options": {"num_ctx": 9}})
    assert one.json()["embedding"] == ours[0]
    assert one.headers["x-lmkit-ignored"] == "options.num_ctx"
    short = server.post("/api/embed", {"model": "demo", "input": texts, "dimensions": 3}).json()
    assert [len(vector) for vector in short["embeddings"]] == [3, 3]
    refused = server.post("/api/embed", {"model": "demo", "input": "a " * 100_000, "truncate": False})
    assert (refused.status_code, "context length" in refused.json()["error"]) == (400, True)
    assert server.post("/api/embed", {"model": "demo", "input": []}).json()["embeddings"] == []


@pytest.mark.parametrize(
    ("config", "headers", "obeyed"),
    [
        ({}, {}, True),
        ({"api_keys": ("user", "boss role=admin")}, {"authorization": "Bearer boss"}, True),
        ({"api_keys": ("user", "boss role=admin")}, {"authorization": "Bearer user"}, False),
        ({}, {"via": "1.1 lmkit-0123456789abcdef"}, False),
    ],
    ids=["no keys", "admin", "user", "proxy"],
)
def test_keep_alive_0_is_an_operators_order_to_sleep(
    config: dict[str, Any], headers: dict[str, str], obeyed: bool
) -> None:
    async def main() -> None:
        here = Setting(room=3, config=ServerConfig(**config))
        model, engine = here.pool.find("a"), here.engines["a"]

        async def ask(prompt: str, keep_alive: Any) -> Any:
            body = {"model": "a:latest", "prompt": prompt, "raw": True, "stream": False, "keep_alive": keep_alive}
            answer = await here.client.post(GENERATE, json=body, headers=headers)
            assert answer.headers.get("x-lmkit-ignored") == (None if obeyed and keep_alive != "5m" else "keep_alive")
            return answer.json()["done_reason"]

        assert await ask("", 0) == ("unload" if obeyed else "load")
        assert here.log == ["wake a"] * (not obeyed), "nothing is loaded to be unloaded"
        engine.answers.clear()
        asked = [asyncio.ensure_future(ask("Hi", "0s")) for _ in range(2)]
        await until(lambda: model.users == 2)
        await here.pool.let_go(model)
        assert here.log == ["wake a"], "a model with requests stays"
        engine.answers.set()
        assert await asyncio.gather(*asked) == ["length"] * 2
        tending = asyncio.ensure_future(here.pool.tend())
        await until(lambda: here.log == ["wake a", "sleep a"])
        tending.cancel()
        assert await ask("Hi", 0) == "length"
        assert model.is_done is obeyed
        assert await ask("Hi", "5m") == "length"
        assert not model.is_done, "it stays for whoever comes later"

    run(main())
