"""/openapi.json describes the routes that the server has, with the models that check their bodies."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
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
    assert not schema["additionalProperties"]
    assert set(schema.get("required", ())) <= SAMPLES[path].keys()


def test_inputs_that_are_made_uniform_are_described_as_they_may_be_sent(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    stop, prompt = schemas["ChatCompletionRequest"]["properties"]["stop"], schemas["CompletionRequest"]["properties"]
    assert {"type": "string"} in stop["anyOf"]
    assert {"type": "string"} in prompt["prompt"]["anyOf"]
    assert {"type": "array", "items": {"type": "integer"}, "minItems": 1} in prompt["prompt"]["anyOf"]
    assert prompt["logit_bias"]["anyOf"][0] == {"type": "object", "additionalProperties": {"type": "number"}}


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
