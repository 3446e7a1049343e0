"""/openapi.json describes the routes that the server has, with the models that check their bodies."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from lmkit.config import ServerConfig
from lmkit.errors import RequestError
from lmkit.serve import body, openapi
from tests.serve.in_process import CHAT, CHAT_PATH, App, ScriptedEngine
from tests.serve.test_fuzz import BODIES as SAMPLES


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return App(ScriptedEngine()).request("GET", "/openapi.json").json()  # type: ignore[no-any-return]


def resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    return document["components"]["schemas"][schema["$ref"].removeprefix(openapi.REF)]  # type: ignore[no-any-return]


def test_it_has_every_route(document: dict[str, Any]) -> None:
    routes = App(ScriptedEngine()).app.state.routes
    assert document["paths"].keys() == {route.partition(" ")[2] for route in routes}
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations) > 40
    for path, methods in document["paths"].items():
        takes_body = "post" in methods and not path.endswith("/cancel")
        assert ("requestBody" in methods.get("post", {})) == takes_body, path


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    names = re.findall(rf'"{openapi.REF}([^"]+)"', json.dumps(document))
    assert set(names) <= document["components"]["schemas"].keys()
    assert {"ChatCompletionRequest", "ChatMessage", "ChatCompletionChunk", "Error"} <= set(names)


def test_each_body_is_the_one_that_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[type[BaseModel]] = []

    def validate(data: Any, model: type[BaseModel]) -> Any:
        checked.append(model)
        raise RequestError("invalid_request", "stop here")

    monkeypatch.setattr(body, "validate", validate)
    app = App(ScriptedEngine())
    for path, model in openapi.BODIES.items():
        answer = app.request("POST", path, json={}, headers={"anthropic-version": "2023-06-01"})
        assert answer.status_code == 400, (path, answer.text)
        assert checked.pop() is model, path


@pytest.mark.parametrize("path", SAMPLES)
def test_bodies_that_are_taken_are_described(document: dict[str, Any], path: str) -> None:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    if path == "/generate":  # it takes the names of several servers
        assert "additionalProperties" not in schema
        return
    schema = resolved(document, schema)
    assert SAMPLES[path].keys() <= schema["properties"].keys()
    assert "additionalProperties" not in schema  # hints of clients
    assert set(schema.get("required", ())) <= SAMPLES[path].keys()


def test_inputs_that_are_made_uniform_are_described_as_they_may_be_sent(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    stop, prompt = schemas["ChatCompletionRequest"]["properties"]["stop"], schemas["CompletionRequest"]["properties"]
    assert {"type": "string"} in stop["anyOf"]
    token = {"type": "integer", "minimum": 0, "maximum": 4095}  # of the model
    assert {"type": "string", "minLength": 1} in prompt["prompt"]["anyOf"]
    assert {"type": "array", "items": token, "minItems": 1} in prompt["prompt"]["anyOf"]
    assert prompt["logit_bias"]["anyOf"][0]["patternProperties"] == {
        "^[0-9]{1,10}$": {"type": "number", "minimum": -100, "maximum": 100}
    }


@pytest.mark.parametrize("value", [0, 0.0, 1, "false"])
def test_a_number_is_no_boolean(value: Any) -> None:
    app = App(ScriptedEngine())
    for path, given in ((CHAT_PATH, CHAT), ("/v1/responses", {"input": "a", "model": "model"})):
        fields = {"stream": True, "stream_options": {"include_obfuscation": value}}
        assert app.post(path, given | fields).status_code == 400
    assert app.post(CHAT_PATH, CHAT | {"guided_json_object": value}).status_code == 400


def test_it_needs_a_key_where_others_do() -> None:
    app = App(ScriptedEngine(), ServerConfig(api_keys=("secret",)))
    assert app.request("GET", "/openapi.json").status_code == 401
    described = app.request("GET", "/openapi.json", headers={"Authorization": "Bearer secret"}).json()
    assert described["security"] == [{"key": []}]
    assert described["paths"]["/health"]["get"]["security"] == []


MESSAGE = {"role": "user", "content": "Hi"}
THOUGHT = {"type": "thinking", "thinking": "a"}
PARTS = [{"type": "text", "text": "a"}]
IMAGE = {"type": "input_image", "image_url": "data:,"}
SWITCH = "add_generation_prompt"
BATCH = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": "file-none"}


@pytest.mark.parametrize(
    ("path", "base", "right", "wrong"),
    [
        (
            "/v1/rerank", {"query": "a"},
            [{"documents": ["a"]}, {"texts": "a", "return_text": True}, {"documents": ["a"], "texts": None}],
            [{}, {"documents": None, "texts": None}, {"documents": ["a"], "texts": ["a"]},
             {"documents": ["a"], "return_text": True}, {"texts": ["a"], "return_documents": False},
             {"documents": ["a"], "instruction": "b"}, {"documents": ["a", ""]}],
        ),
        (
            "/v1/embeddings", {},
            [{"input": "a"}, {"messages": [MESSAGE], SWITCH: True}, {"input": "a", "messages": None, SWITCH: False},
             {"input": "a", "encoding_format": "bytes", "embed_dtype": "float16"}, {"input": [1.0, 2]},
             {"input": "a", "normalize": True, "use_activation": True}],
            [{}, {"input": "a", "messages": [MESSAGE]}, {"input": "a", SWITCH: True}, {"input": ""},
             {"input": [[], "a"]}, {"input": [5, 4096]}, {"input": [["a"], [5, "a"]]},
             {"input": "a", "dimensions": 1 << 20}, {"input": "a", "truncate_prompt_tokens": 0},
             {"input": "a", "truncation_side": "left"}, {"input": "a", "embed_dtype": "float16"},
             {"input": "a", "normalize": True, "use_activation": False}],
        ),
        (
            "/v1/score", {},
            [{"text_1": "a", "text_2": ["b"]}, {"queries": "a", "items": ["b"]}],
            [{"text_1": "a"}, {"text_1": "a", "queries": "a", "text_2": "b"},
             {"text_1": "a", "items": "b", "data_2": "b"}],
        ),
        (
            "/tokenize", {},
            [{"prompt": "a", "add_special_tokens": True}, {"content": "a", "add_special": True}, {"messages": "a"}],
            [{}, {"prompt": None}, {"prompt": "a", "content": "a"}, {"prompt": "a", "add_special": False},
             {"content": "a", "add_special_tokens": None}],
        ),
        (
            "/apply-template", {},
            [{"messages": "a", "chat_template_kwargs": {"enable_thinking": True, "b": None}}],
            [{}, {"messages": None}, {"messages": "a", "chat_template_kwargs": {"b": 1}}],
        ),
        (
            "/detokenize", {},
            [{"tokens": [1, 2.0]}, {"tokens": []}], [{"tokens": [-1]}, {"tokens": [1.5]}, {"tokens": [4096]}],
        ),
        (
            CHAT_PATH, CHAT,
            [{"seed": -1}, {"guided_json_object": False}, {"max_tokens": 2.0, "temperature": 1}, {"json_schema": {}},
             {"messages": [MESSAGE, {"role": "assistant", "content": None, "reasoning": "a"}]},
             {"messages": [MESSAGE | {"tool_calls": []}]},
             {"messages": [{"role": "system", "content": PARTS}, MESSAGE | {"content": PARTS}]},
             {"messages": [MESSAGE, {"role": "tool", "content": "a", "tool_call_id": "b"}]},
             {"logprobs": True, "top_logprobs": 2}, {"tool_choice": "auto", "tools": []},
             {"logit_bias": {"5": 1}}, {"stream": False, "prompt_logprobs": 1}],
            [{"continue_final_message": True, "messages": ""},
             {"seed": -2}, {"guided_json_object": 0}, {"max_tokens": 2.5}, {"temperature": -1}, {"top_p": 0},
             {"messages": [MESSAGE | {"content": ["a"]}]},
             {"top_logprobs": 2}, {"stream_options": {"include_usage": True}}, {"return_progress": True},
             {"echo": True}, {"tool_choice": "required"}, {"tool_choice": "required", "tools": []},
             {"logit_bias": {"a": 1}}, {"stream": True, "prompt_logprobs": 1},
             {"presence_penalty": 101}, {"repetition_penalty": 9e-8}, {"repetition_penalty": 5e-324}],
        ),
        (
            "/v1/messages", {"model": "model", "max_tokens": 2, "messages": [MESSAGE]},
            [{"thinking": {"type": "enabled", "budget_tokens": 1}}, {"thinking": {"type": "enabled"}}, {"system": None},
             {"messages": [MESSAGE, {"role": "assistant", "content": [THOUGHT, *PARTS]}]}],
            [{"tool_choice": {"type": "tool"}}, {"tool_choice": {"type": "auto", "name": "a"}},
             {"thinking": {"type": "disabled", "budget_tokens": 1}},
             {"messages": [{"role": "user", "content": [THOUGHT]}]}, {"tools": [{"name": "", "input_schema": {}}]}],
        ),
        (
            "/v1/responses", {"input": "a"},
            [{"input": [MESSAGE]}, {"seed": -1}],
            [{"return_progress": True}, {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
             {"input": [{"role": "robot", "content": "a"}]}, {"top_p": 2}],
        ),
        (
            "/v1/responses/input_tokens", {"input": "a"},
            [{}],
            [{"repetition_penalty": 0}, {"presence_penalty": 101}, {"conversation": {"id": None}}],
        ),
        (
            "/v1/chat/completions/input_tokens", CHAT,
            [{"logprobs": True, "top_logprobs": 20}],
            [{"logprobs": True, "top_logprobs": -1}, {"allowed_token_ids": [4096]},
             {"truncate_prompt_tokens": 1 << 30}],
        ),
        (
            "/v1/conversations", {},
            [{}, {"items": "a"}, {"metadata": None}, {"other": None}],
            [{"items": [{"role": "assistant", "content": [IMAGE]}]},
             {"items": [{"type": "function_call", "call_id": "a", "name": "", "arguments": "{}"}]}],
        ),
        (
            "/generate", {},
            [{"text": "a"}, {"text": ["a", "b"]}, {"text": "", "input_ids": [1]},
             {"input_ids": [[1], [2]], "text": None}],
            [{}, {"text": "a", "input_ids": [[1]]}, {"text": "a", "sampling_params": False}, {"text": ""},
             {"text": [1]}, {"input_ids": "a"}, {"input_ids": ["a"]}, {"text": ["a", [1]]}],
        ),
        (
            "/v1/batches", {},
            [],
            [BATCH | {"endpoint": "/v1/rerank"}, BATCH | {"completion_window": "400h"},
             BATCH | {"metadata": {"a": "b" * 513}},
             BATCH | {"output_expires_after": {"anchor": "created_at", "seconds": 1}}],
        ),
    ],
)  # fmt: skip
def test_what_is_described_is_what_is_taken(
    document: dict[str, Any], path: str, base: dict[str, Any], right: list[Any], wrong: list[Any]
) -> None:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    valid = Draft202012Validator(schema | {"components": document["components"]}).is_valid
    app = App(ScriptedEngine())
    for given, is_right in [(given, True) for given in right] + [(given, False) for given in wrong]:
        answer = app.request("POST", path, json=base | given, headers={"anthropic-version": "2023-06-01"})
        assert valid(base | given) == is_right, given
        assert answer.status_code == (200 if is_right else 400), (given, answer.text)


def test_what_is_made_is_linked_to_the_routes_that_take_its_id(document: dict[str, Any]) -> None:
    links = document["paths"]["/v1/files"]["post"]["responses"]["200"]["links"]
    assert links["get_v1_files_file_id_content"]["parameters"] == {"file_id": "$response.body#/id"}
    operations = {operation["operationId"] for path in document["paths"].values() for operation in path.values()}
    assert links.keys() < operations


def test_allow_names_the_methods_of_the_route_itself() -> None:
    app = App(ScriptedEngine())
    assert app.request("OPTIONS", "/v1/responses/input_tokens").headers["allow"] == "POST"
    assert app.request("PUT", "/v1/responses/resp_1").headers["allow"] == "DELETE, GET"
