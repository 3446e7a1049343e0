"""GET /openapi.json: the routes, and the fields of their bodies as the models that check them say.

Bodies come from pydantic's models, chunks of streams from msgspec's structs. Whole answers are those of OpenAI's,
Anthropic's, vLLM's and llama.cpp's APIs, and are not described again.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from lmkit import __version__
from lmkit.serve import llama_cpp, stored_chats
from lmkit.serve.audio.form import SCHEMA as AUDIO
from lmkit.serve.auth import OPEN_PATHS
from lmkit.serve.batches.batch_routes import BatchRequest
from lmkit.serve.batches.file_routes import ANCHOR, LIMIT, SECONDS
from lmkit.serve.choose import pool, shared
from lmkit.serve.commands import AdapterCommand, LoadAdapterCommand, ModelCommand, SleepCommand
from lmkit.serve.embeddings.protocol import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from lmkit.serve.invocations import ROUTES
from lmkit.serve.messages import protocol as anthropic
from lmkit.serve.ollama import protocol as ollama
from lmkit.serve.openapi_model import fitted, limits
from lmkit.serve.parts import ChatCompletionChunk, Completion
from lmkit.serve.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EncodeRequest,
    TemplateRequest,
    TokenizeRequest,
)
from lmkit.serve.responses import conversations
from lmkit.serve.responses import protocol as openai
from lmkit.strict import NULL, OF_MODEL, given
from lmkit.web.ollama import LINES
from lmkit.web.ollama import PREFIX as OLLAMA_ROUTES
from lmkit.web.ollama import STREAMS as OLLAMA_STREAMS

router = APIRouter()
REF = "#/components/schemas/"
TEXT = {"type": "string"}
PROMPT = {"not": NULL, OF_MODEL: "text"}  # text, or texts
TOKEN = {"type": "integer", "minimum": 0, OF_MODEL: "token"}

BODIES: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/chat/completions/input_tokens": ChatCompletionRequest,
    stored_chats.PATH: stored_chats.UpdateRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": openai.ResponsesRequest,
    "/v1/responses/input_tokens": openai.Prompt,
    conversations.PATH: conversations.CreateRequest,
    f"{conversations.PATH}/{{id}}": conversations.UpdateRequest,
    f"{conversations.PATH}/{{id}}/items": conversations.AddRequest,
    "/v1/messages": anthropic.MessagesRequest,
    "/v1/messages/count_tokens": anthropic.Prompt,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/rerank": RerankRequest,
    "/v2/rerank": RerankRequest,
    "/rerank": RerankRequest,
    "/v1/score": ScoreRequest,
    "/score": ScoreRequest,
    "/v1/classify": ClassifyRequest,
    "/classify": ClassifyRequest,
    "/v1/batches": BatchRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/encode": EncodeRequest,
    "/apply-template": TemplateRequest,
    "/api/chat": ollama.ChatBody,
    "/api/generate": ollama.GenerateBody,
    "/api/embed": ollama.EmbedBody,
    "/api/embeddings": ollama.EmbeddingsBody,
    "/api/show": ollama.ShowBody,
    "/api/pull": ollama.PullBody,
    "/completion": llama_cpp.NativeRequest,
    "/infill": llama_cpp.InfillRequest,
    "/v1/load_lora_adapter": LoadAdapterCommand,
    "/v1/unload_lora_adapter": AdapterCommand,
    "/sleep": SleepCommand,
    "/wake_up": ModelCommand,
    "/reload": ModelCommand,
}
# Bodies that no model describes: a form with a file, and a body that is translated before it is checked.
OTHER_BODIES: Mapping[str, dict[str, Any]] = {
    **{f"/v1/audio/{name}": {"multipart/form-data": {"schema": AUDIO}} for name in ("transcriptions", "translations")},
    "/v1/files": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"const": "batch"},
                    "expires_after[anchor]": ANCHOR,
                    "expires_after[seconds]": SECONDS,
                },
                "required": ["file", "purpose"],
                "dependentRequired": {
                    "expires_after[anchor]": ["expires_after[seconds]"],
                    "expires_after[seconds]": ["expires_after[anchor]"],
                },
                "additionalProperties": False,
            }
        }
    },
    # as the fields tell, see serve.invocations
    "/invocations": {
        "application/json": {
            "schema": {
                "anyOf": [{"$ref": REF + name} for name in sorted({BODIES[path].__name__ for _, path, _ in ROUTES})]
            }
        }
    },
    "/generate": {
        "application/json": {
            "schema": {
                "type": "object",
                "properties": {
                    # a prompt, or several; token ids, or several lists of them, or those before a text
                    "text": {"anyOf": [TEXT, {"type": "array", "items": TEXT, "minItems": 1}, NULL]},
                    "input_ids": {
                        "anyOf": [
                            {"type": "array", "items": TOKEN, "minItems": 1},
                            {"type": "array", "items": {"type": "array", "items": TOKEN, "minItems": 1}, "minItems": 1},
                            NULL,
                        ]
                    },
                    "sampling_params": {"type": ["object", "null"]},
                    "stream": {"type": ["boolean", "null"]},
                },
                "anyOf": [
                    given("text", text=PROMPT | {"items": PROMPT}, input_ids=NULL),
                    given("text", "input_ids", input_ids={"type": "array", "items": TOKEN}),
                    given("input_ids", text=NULL),
                ],
            }
        }
    },
}
CHUNKS = {"/v1/chat/completions": ChatCompletionChunk, "/v1/completions": Completion}
STREAMS = {*CHUNKS, "/v1/responses", "/v1/messages", "/generate", "/invocations", "/completion", "/infill"}
BYTES = {"/v1/embeddings", "/invocations"}  # with encoding_format
PAGE: dict[str, dict[str, Any]] = {"limit": {"type": "integer", "minimum": 1, "maximum": 100}, "after": TEXT}
ORDER: dict[str, dict[str, Any]] = {"order": {"enum": ["asc", "desc"]}}
QUERIES: Mapping[str, dict[str, dict[str, Any]]] = {
    "/v1/responses/{id}/input_items": PAGE | ORDER,
    f"{conversations.PATH}/{{id}}/items": PAGE | ORDER,
    stored_chats.LIST_PATH: PAGE | ORDER | {"model": TEXT},
    f"{stored_chats.PATH}/messages": PAGE | ORDER,
    "/v1/batches": PAGE,
    "/v1/files": PAGE | ORDER | {"limit": {"type": "integer", "minimum": 1, "maximum": LIMIT}, "purpose": TEXT},
}
ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"message": TEXT, "type": TEXT, "param": {}, "code": {}},
            "required": ["message", "type"],
        }
    },
    "required": ["error"],
}

ERROR_TEXT = {"type": "object", "properties": {"error": TEXT}, "required": ["error"]}  # Ollama's


@router.get("/openapi.json")
async def openapi_json(request: Request) -> Response:
    state, config, only = request.app.state, shared(request).config, pool(request).only
    found = await asyncio.to_thread(limits, only.serving) if only is not None and only.engine.info else {}
    if not hasattr(state, "openapi") or state.openapi[0] != found:
        has_keys = bool(config.api_keys or config.api_key_file)
        whole = await asyncio.to_thread(lambda: fitted(document(state.api_routes, has_keys=has_keys), found))
        if config.root_path:
            whole["servers"] = [{"url": config.root_path}]
        state.openapi = found, msgspec.json.encode(whole)
    return Response(state.openapi[1], media_type="application/json")


def document(routes: list[APIRoute], *, has_keys: bool) -> dict[str, Any]:
    """OpenAPI 3.1 of these routes."""
    models = [(model, "validation") for model in dict.fromkeys(BODIES.values())]
    bodies, defined = models_json_schema(models, ref_template=REF + "{model}")  # type: ignore[arg-type]
    _, chunks = msgspec.json.schema_components(CHUNKS.values(), ref_template=REF + "{name}")
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        model = BODIES.get(route.path_format)
        body = None if model is None else bodies[model, "validation"]
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(route.path_format, {})[method.lower()] = _operation(route, method, body)
    _link(paths)
    components: dict[str, Any] = {"schemas": {"Error": ERROR} | defined["$defs"] | chunks}
    about = {"title": "lmkit", "version": __version__}
    whole: dict[str, Any] = {"openapi": "3.1.0", "info": about, "paths": paths, "components": components}
    if has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        whole["security"] = [{"key": []}]
    return whole


def _operation(route: APIRoute, method: str, body: dict[str, Any] | None) -> dict[str, Any]:
    """What a method of a route takes and gives. `body` is the schema of its JSON."""
    path = route.path_format
    found: dict[str, Any] = {"application/json": {}}
    if method == "POST" and path in STREAMS:
        found["text/event-stream"] = {"schema": _event(path)} if path in CHUNKS else {}
    if path in OLLAMA_STREAMS:
        found[LINES] = {}
    if path in BYTES:
        found["application/octet-stream"] = {}
    if path == "/metrics":
        found = {"text/plain": {}}
    if path.endswith("/content"):
        found = {"application/octet-stream": {}}
    wrong = ERROR_TEXT if path.startswith(OLLAMA_ROUTES) else {"$ref": REF + "Error"}
    error = {"description": "An error", "content": {"application/json": {"schema": wrong}}}
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method}{path}".lower()).strip("_"),
        "parameters": list(_parameters(route, method)),
        "responses": {"200": {"description": "The answer", "content": found}, "4XX": error, "5XX": error},
    }
    if text := inspect.getdoc(route.endpoint):
        operation["summary"] = text.partition("\n")[0]
    if method == "POST" and body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    elif method == "POST" and path in OTHER_BODIES:
        operation["requestBody"] = {"required": True, "content": OTHER_BODIES[path]}
    if path in OPEN_PATHS:
        operation["security"] = []
    return operation


def _link(paths: dict[str, dict[str, Any]]) -> None:
    """Say where the `id` of what a POST makes stands in other paths: `POST /v1/files` and `GET /v1/files/{file_id}`."""
    for path, methods in paths.items():
        links = {
            operation["operationId"]: {
                "operationId": operation["operationId"],
                "parameters": {name[1]: "$response.body#/id"},
            }
            for other, operations in paths.items()
            if (name := re.match(re.escape(path) + r"/{(\w+)}", other))
            for operation in operations.values()
        }
        if links and "post" in methods and "{" not in path:
            methods["post"]["responses"]["200"]["links"] = links


def _event(path: str) -> dict[str, Any]:
    """An event of a stream. Its data is a chunk, or `[DONE]` at the end."""
    chunk = {"contentMediaType": "application/json", "contentSchema": {"$ref": REF + CHUNKS[path].__name__}}
    data = {"anyOf": [TEXT | chunk, {"const": "[DONE]"}]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _parameters(route: APIRoute, method: str) -> Iterator[dict[str, Any]]:
    path = route.path_format
    for name in re.findall(r"{(\w+)}", path):
        yield {"name": name, "in": "path", "required": True, "schema": TEXT}
    if method == "GET":
        plain = {field.name: TEXT for field in route.dependant.query_params}
        for name, schema in (plain | QUERIES.get(path, {})).items():
            yield {"name": name, "in": "query", "required": False, "schema": schema}
