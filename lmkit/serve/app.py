"""The HTTP application: routes after authentication, and the edge that turns failures into error responses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from lmkit.config import ServerConfig
from lmkit.errors import RequestError
from lmkit.serve import (
    adapters,
    chat,
    completions,
    generate,
    health,
    invocations,
    llama_cpp,
    metrics,
    models,
    openapi,
    receipts,
    sleep,
    stored_chats,
    tokenize,
)
from lmkit.serve.admission import Admission
from lmkit.serve.audio import routes as audio
from lmkit.serve.auth import ApiKeys
from lmkit.serve.batches import batch_routes, file_routes
from lmkit.serve.batches.runner import Batches
from lmkit.serve.embeddings import classify
from lmkit.serve.embeddings import routes as embeddings
from lmkit.serve.errors import Edge, handle_http_exception, handle_request_error
from lmkit.serve.hooks.hooks import Hooks
from lmkit.serve.messages import routes as messages
from lmkit.serve.metrics import Metrics
from lmkit.serve.next_turn import NextTurns
from lmkit.serve.ollama import routes as ollama
from lmkit.serve.pool import ModelPool
from lmkit.serve.responses import conversations
from lmkit.serve.responses import routes as responses
from lmkit.serve.responses.background import Background
from lmkit.serve.serving import Serving
from lmkit.serve.sessions import Sessions
from lmkit.serve.text_pool import TextPool
from lmkit.serve.warm import used_prefixes
from lmkit.text import Tokenizer
from lmkit.web.access_log import AccessLog
from lmkit.web.budget import Budget
from lmkit.web.chat_page import ChatPage
from lmkit.web.cors import with_cors
from lmkit.web.data_folder import DataFolder
from lmkit.web.hosts import Hosts
from lmkit.web.response_store import ResponseStore
from lmkit.web.resumable import Resumable
from lmkit.web.routes import WithV1
from lmkit.web.tracing import Traced

ANSWER_PARTS = 8  # one answer may hold this part of the memory for all
ROOMS = (
    chat, stored_chats, completions, responses, conversations, messages, generate, embeddings, classify, audio, models,
    adapters, sleep, tokenize, file_routes, batch_routes, metrics, health, openapi, invocations, receipts,
    ollama, llama_cpp,
)  # fmt: skip
ROUTERS = [module.router for module in ROOMS]


def create_app(models: ModelPool, tokenizers: Sequence[Tokenizer], config: ServerConfig) -> FastAPI:
    """An application that serves these models, each with its tokenizer. The caller starts and stops the engines."""
    app = FastAPI(title="lmkit", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.data = DataFolder(config.data_dir)
    app.state.responses = ResponseStore(
        lambda: app.state.data.folder("responses"), max_bytes=config.response_store, ttl=config.response_ttl
    )
    app.state.background = Background()
    app.state.receipts = receipts.Receipts(config.receipt_key, for_all=config.receipts)
    app.state.pool = models
    bodies = Budget(config.body_memory, what="bodies of requests")
    answers = Budget(config.answer_memory, what="answers", each=config.answer_memory // ANSWER_PARTS)
    texts, hooks = TextPool(), Hooks.load(config.hooks)
    for model, tokenizer in zip(models.models, tokenizers, strict=True):
        engine = model.engine
        model.serving = Serving(
            model.name,
            engine,
            tokenizer,
            config,
            Metrics(engine, model.name),
            Sessions(engine.config.session_lease),
            bodies,
            answers,
            texts,
            Admission(engine.config, partial(getattr, engine, "max_batch_size")),
            hooks,
            NextTurns(engine),
            used_prefixes(config, engine),
        )
    first = models.models[0].engine.config  # all have the same options of the queue, unless a file says otherwise
    app.state.batches = Batches(
        app,
        app.state.data,
        answers=answers,
        space=config.file_space,
        quota=first.queue_quota,
        max_line_bytes=config.max_body_bytes,
        max_running=lambda: models.models[0].engine.max_batch_size,
        is_ending=lambda: models.is_ending,
    )
    for router in ROUTERS:
        app.include_router(router)
    ours = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    app.state.api_routes = ours
    app.state.routes = [f"{min(route.methods or ())} {route.path_format}" for route in ours]
    app.add_exception_handler(RequestError, handle_request_error)
    app.add_exception_handler(HTTPException, handle_http_exception)
    app.add_middleware(Resumable)
    app.add_middleware(ApiKeys, keys=config.api_keys, file=config.api_key_file, proxy_key=config.proxy_key)
    if config.chat_page:
        app.add_middleware(ChatPage)
    app.add_middleware(Edge)
    app.add_middleware(with_cors, origins=config.cors_origins, credentials=config.cors_credentials)
    if not (config.api_keys or config.api_key_file):
        app.add_middleware(Hosts, names=(config.host, *config.allowed_hosts))
    app.add_middleware(AccessLog)
    app.add_middleware(Traced)
    app.add_middleware(WithV1, root=config.root_path)  # the last added is the outermost
    return app
