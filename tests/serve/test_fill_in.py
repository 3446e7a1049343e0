"""Texts between two texts: `suffix`, /infill, and llama.cpp's other routes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import tokenizers

from lmkit.text import Tokenizer
from lmkit.text.infill import TEXTS, find_marks
from tests.serve import in_process
from tests.serve.in_process import TOKENIZER, App, ScriptedEngine

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")
# as llama.vscode and llama.vim write it
EDITOR: dict[str, Any] = {
    "input_prefix": "def f():\n", "input_suffix": "\nf()\n", "input_extra": [{"filename": "a.py", "text": "A = 1"}],
    "prompt": "    ", "n_predict": 5, "top_k": 40, "top_p": 0.9, "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "n_indent": 4, "stream": False,
    "response_fields": ["content"], "id_slot": 0,
}  # fmt: skip


def with_tokens(*texts: str, named: dict[str, str] | None = None) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(TOKENIZER.backend.to_str())
    backend.add_tokens([tokenizers.AddedToken(text, special=True) for text in texts])
    return Tokenizer(
        backend, eos_token_ids=TOKENIZER.eos_token_ids, named_tokens=named, chat_template=TOKENIZER.chat_template
    )


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> tuple[App, ScriptedEngine, Tokenizer]:
    tokenizer = with_tokens(*MARKS)
    monkeypatch.setattr(in_process, "TOKENIZER", tokenizer)
    ids = [*tokenizer.encode("return 1", False), tokenizer.eos_token_ids[0]]
    engine = ScriptedEngine(lambda request: ids, finish_reason="stop")
    assert engine.info is not None
    engine.info = msgspec.structs.replace(engine.info, vocab_size=tokenizer.vocab_size)
    return App(engine), engine, tokenizer


@pytest.mark.parametrize("texts", TEXTS)
def test_each_family_of_marks_is_found(texts: tuple[str, str, str]) -> None:
    tokenizer = with_tokens(*filter(None, texts))
    found, to_id = find_marks(tokenizer), tokenizer.backend.token_to_id
    assert found is not None
    ids = found.prompt([0], [10], [20])
    prefix, suffix = to_id(texts[0]), to_id(texts[1])
    middle = [prefix, 10, suffix, 20, to_id(texts[2])] if texts[2] else [suffix, 20, prefix, 10]
    assert ids == [0, *middle]
    assert {prefix, suffix} <= set(found.ends)
    assert find_marks(TOKENIZER) is None


@pytest.mark.parametrize(
    "names", ["fim_pre_token fim_suf_token fim_mid_token", "prefix_token suffix_token middle_token"]
)
def test_names_of_files_come_first(names: str) -> None:
    tokenizer = with_tokens(*MARKS, "x1", "x2", "x3", named=dict(zip(names.split(), ("x1", "x2", "x3"), strict=True)))
    found = find_marks(tokenizer)
    assert found is not None
    assert [found.prefix, found.suffix, found.middle] == list(map(tokenizer.backend.token_to_id, ("x1", "x2", "x3")))


def test_suffix_of_both_apis(served: tuple[App, ScriptedEngine, Tokenizer]) -> None:
    app, engine, tokenizer = served
    text = "<|fim_prefix|>def f():<|fim_suffix|>f()<|fim_middle|>"
    body = {"model": "model", "prompt": "def f():", "suffix": "f()"}
    answer = app.post("/v1/completions", body)
    assert answer.json()["choices"][0]["text"] == "return 1"
    assert app.post("/api/generate", body | {"stream": False}).json()["response"] == "return 1"
    for request in engine.requests:
        assert request.prompt_ids == tokenizer.encode(text, False)
        assert tokenizer.backend.token_to_id("<|file_sep|>") in request.params.stop_token_ids
    assert app.post("/v1/completions", body | {"echo": True}).json()["error"]["param"] == "echo"
    assert app.post("/v1/completions", body | {"suffix": ""}).status_code == 200
    assert engine.requests[-1].prompt_ids == tokenizer.encode("def f():")


def test_an_editors_infill(served: tuple[App, ScriptedEngine, Tokenizer]) -> None:
    app, engine, tokenizer = served
    answer = app.post("/infill", EDITOR)
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"content": "return 1"}, "the one field that it asks for"
    text = "<|file_sep|>a.py\nA = 1\n<|fim_prefix|>def f():\n<|fim_suffix|>\nf()\n<|fim_middle|>    "
    assert tokenizer.decode(engine.requests[0].prompt_ids, skip_special_tokens=False) == text
    assert engine.requests[0].params.max_tokens == 5
    assert "samplers" in answer.headers["x-lmkit-ignored"]


def test_a_native_completion_whole_and_streamed(served: tuple[App, ScriptedEngine, Tokenizer]) -> None:
    app, engine, tokenizer = served
    body = {"prompt": "Hi", "n_probs": 1, "return_tokens": True}
    whole = app.post("/completion", body).json()
    assert (whole["content"], whole["stop"], whole["stop_type"]) == ("return 1", True, "eos")
    assert (whole["tokens_evaluated"], whole["tokens_predicted"]) == (len(tokenizer.encode("Hi")), len(whole["tokens"]))
    assert [entry["id"] for entry in whole["completion_probabilities"]] == whole["tokens"]
    assert engine.requests[0].params.max_tokens is None
    lines = app.post("/completion", body | {"stream": True}).text.removesuffix("\n\n").split("\n\n")
    *texts, last = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(part["content"] for part in texts) == "return 1"
    assert (last["stop"], last["stop_type"], last["timings"]["predicted_n"]) == (True, "eos", len(whole["tokens"]))
    assert not any(part["stop"] for part in texts)


def test_llama_cpps_forms_of_a_native_completion(served: tuple[App, ScriptedEngine, Tokenizer]) -> None:
    app, engine, tokenizer = served
    fields = ["content", "generation_settings/n_predict", "prompt", "no/such"]
    body = {"prompt": {"prompt_string": "Hi"}, "n_predict": 9, "logit_bias": [[5, -2], [7, False]], "ignore_eos": True}
    shown = app.post("/completion", body | {"response_fields": fields}).json()
    assert shown == {"content": "return 1", "generation_settings/n_predict": 9, "prompt": "Hi"}
    assert engine.requests[0].params.logit_bias == {5: -2.0, 7: -100.0}
    whole = app.post("/completion", body).json()
    assert (whole["tokens"], whole["has_new_line"]) == ([], False)
    biases = {entry["token"]: entry["bias"] for entry in whole["generation_settings"]["logit_bias"]}
    assert biases == {5: -2.0, 7: -100.0} | dict.fromkeys(tokenizer.eos_token_ids)
    several = app.post("/completion", {"prompt": ["Hi", {"prompt_string": "Hi"}]}).json()
    assert [answer["content"] for answer in several] == ["return 1"] * 2
    biased = {"prompt": [5, "Hi", 7], "logit_bias": [[" Hi", -2], [7, 1]]}
    assert app.post("/completion", biased).json()["content"] == "return 1", "one prompt"
    assert engine.requests[-1].prompt_ids == [5, *tokenizer.encode("Hi", False), 7]
    told = dict.fromkeys(tokenizer.encode(" Hi", False), -2.0) | {7: 1.0}
    assert engine.requests[-1].params.logit_bias == told
    app.post("/completion", {"prompt": "Hi", "logit_bias": {" Hi": -2, "7": 1}})
    assert engine.requests[-1].params.logit_bias == told
    for wrong in ([["Hi", True]], [[-1, 1]], [[1]], "Hi", {"a" * 300: 1}):
        assert app.post("/completion", {"prompt": "Hi", "logit_bias": wrong}).status_code == 400
    image = app.post("/completion", {"prompt": {"prompt_string": "Hi", "multimodal_data": ["x"]}})
    assert (image.status_code, image.json()["error"]["param"]) == (400, "prompt")
    nested: Any = "Hi"
    for _ in range(700):
        nested = [nested]
    assert app.post("/completion", {"prompt": nested}).status_code == 400


def test_a_model_without_marks_refuses_by_name() -> None:
    app = App(ScriptedEngine())
    for path, body, param in (
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
    ):
        error = app.post(path, {"model": "model", **body}).json()["error"]
        assert (error["param"], error["code"]) == (param, "unsupported_parameter")


def test_props_and_slots() -> None:
    app = App(ScriptedEngine(max_model_len=77))
    props = app.request("GET", "/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 77
    assert "<|im_start|>" in props["chat_template"]
    slots = app.request("GET", "/slots").json()
    assert len(slots) == props["total_slots"]
    assert not any(slot["is_processing"] for slot in slots)
