"""Ollama's API: /api/chat, /api/generate, /api/embed, /api/embeddings, /api/tags, /api/ps, /api/show, /api/version and
/api/pull.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from lmkit.errors import RequestError
from lmkit.hints import ignore
from lmkit.serve.auth import owner
from lmkit.serve.body import read_json
from lmkit.serve.choose import choose, pool
from lmkit.serve.embeddings.encoding import entries
from lmkit.serve.embeddings.protocol import EmbeddingRequest
from lmkit.serve.embeddings.vectors import Embedder, check_dimensions
from lmkit.serve.ollama import models
from lmkit.serve.ollama.answer import ChatAnswer, TextAnswer, refuse_beside, without_prompt
from lmkit.serve.ollama.protocol import ChatBody, EmbedBody, EmbeddingsBody, GenerateBody, PullBody, ShowBody
from lmkit.serve.ollama.translate import chat_of, chat_of_prompt, completion_of
from lmkit.serve.protocol import Placed
from lmkit.serve.response import answer, is_forwarded
from lmkit.serve.serving import Serving
from lmkit.serve.sleep import is_operator
from lmkit.serve.streaming import WholeAnswer
from lmkit.strict import validate
from lmkit.web.ollama import LINES, line, own_name, version

router = APIRouter()
Body = ChatBody | GenerateBody | EmbedBody | EmbeddingsBody  # that use a model


@router.post("/api/chat")
async def chat(request: Request) -> Response:
    started, body = time.monotonic(), await read_json(request, ChatBody)
    asked = chat_of(body) if body.messages else None
    if asked is None:
        return await _without_prompt(request, body, started)
    server = await _choose(request, body)
    share = request.state.held.enter_context(server.answers.share())
    builder = ChatAnswer(server, asked, owner(request), share)
    builder.be_asked(request.scope["path"], body.model, started)
    return await answer(request, builder)


@router.post("/api/generate")
async def generate(request: Request) -> Response:
    started, body = time.monotonic(), await read_json(request, GenerateBody)
    if not (body.prompt or body.suffix or body.images):
        return await _without_prompt(request, body, started)
    server = await _choose(request, body)
    share = request.state.held.enter_context(server.answers.share())
    as_it_is = body.raw or body.suffix or server.tokenizer.chat_template is None
    if as_it_is:
        refuse_beside(body)
    builder = (
        TextAnswer(server, completion_of(body), owner(request), share)
        if as_it_is
        else ChatAnswer(server, chat_of_prompt(body), owner(request), share, body)
    )
    builder.be_asked(request.scope["path"], body.model, started)
    return await answer(request, builder)


@router.post("/api/embed")
async def embed(request: Request) -> Response:
    """Embeddings of unit length, of a text or of several."""
    started, body = time.monotonic(), await read_json(request, EmbedBody)
    cut = {} if body.truncate is False else {"truncate_prompt_tokens": -1}
    embedder = await _embedder(request, body, body.input, cut)
    loaded_at = time.monotonic()
    vectors = await _vectors(embedder, body.input, body.dimensions)
    return WholeAnswer({
        "model": body.model,
        "embeddings": iter(vectors),
        "total_duration": round(1e9 * (time.monotonic() - started)),
        "load_duration": round(1e9 * (loaded_at - started)),
        "prompt_eval_count": embedder.usage["prompt_tokens"],
    })  # fmt: skip


@router.post("/api/embeddings")
async def embeddings(request: Request) -> Response:
    """Ollama's older route: one text, and its embedding."""
    body = await read_json(request, EmbeddingsBody)
    if not body.prompt:
        return WholeAnswer({"embedding": []})
    embedder = await _embedder(request, body, [body.prompt], {"truncate_prompt_tokens": -1})
    (vector,) = await _vectors(embedder, [body.prompt], None)
    return WholeAnswer({"embedding": vector, "prompt_eval_count": embedder.usage["prompt_tokens"]})


@router.get("/api/tags")
async def tags(request: Request) -> Response:
    """Each model under each of its names."""
    named = [(model, name) for model in pool(request).models for name in model.names]
    return JSONResponse({"models": await asyncio.to_thread(lambda: [models.listed(*each) for each in named])})


@router.get("/api/ps")
async def running(request: Request) -> Response:
    """The models that are in memory."""
    awake = [model for model in pool(request).models if not model.must_wait]
    return JSONResponse({"models": await asyncio.to_thread(lambda: list(map(models.running, awake)))})


@router.post("/api/show")
async def show(request: Request) -> Response:
    """What a model is and can do. A model that sleeps is loaded."""
    body = await read_json(request, ShowBody)
    server = await choose(request, _own(request, body.model))
    return JSONResponse(await asyncio.to_thread(models.shown, server))


@router.get("/api/version")
async def api_version() -> dict[str, str]:
    """The version of Ollama whose API this is, and lmkit's own."""
    return version()


@router.post("/api/pull")
async def pull(request: Request) -> Response:
    """A served model is there. Any other is refused: no client of a server decides what lies on its disk."""
    body = await read_json(request, PullBody)
    try:
        pool(request).find(_own(request, body.model))
    except RequestError:
        message = (
            f"pull: {body.model[:64]!r} is not a model of this server, which has the models that it was started with; "
            "its operator fetches one by `lmkit pull ORG/NAME`, and serves it by `lmkit serve`"
        )
        raise RequestError("model_not_found", message, "model") from None
    done = {"status": "success"}
    if body.stream is False:
        return JSONResponse(done)
    return Response(line({"status": "pulling manifest"}) + line(done), media_type=LINES)


def _own(request: Request, name: str) -> str:
    known = [known for model in pool(request).models for known in model.names]
    return own_name(name, known)


async def _choose(request: Request, body: Body) -> Serving:
    """The model of a request, which may say that it is the last one for now."""
    name = _own(request, body.model)
    server = await choose(request, name, body.timeout)
    pool(request).find(name).is_done = _unloads(request, body)
    return server


def _unloads(request: Request, body: Body) -> bool:
    """Whether a request orders its model out of memory. Who may not POST /sleep may not, and a proxy's client does not
    know the node: then it is a hint. Raises RequestError where every field counts.
    """
    if body.keep_alive is None:
        return False
    if is_operator(request) and not is_forwarded(request.headers):
        return True
    if not ignore("keep_alive"):
        raise RequestError("permission_denied", "keep_alive: this needs a key with role=admin of the node itself")
    return False


async def _without_prompt(request: Request, body: ChatBody | GenerateBody, started: float) -> Response:
    """Load the model, or unload it."""
    if unloads := _unloads(request, body):
        await pool(request).let_go(pool(request).find(_own(request, body.model)))
    else:
        await _choose(request, body)
    found = without_prompt(request.scope["path"], body.model, started, "unload" if unloads else "load")
    return JSONResponse(found) if body.stream is False else Response(line(found), media_type=LINES)


async def _embedder(
    request: Request, body: EmbedBody | EmbeddingsBody, texts: list[str], cut: dict[str, Any]
) -> Embedder:
    server = await _choose(request, body)
    placed = {name: value for name in Placed.model_fields if (value := getattr(body, name)) is not None}
    return Embedder(request, server, validate({"input": texts or [""], **placed, **cut}, EmbeddingRequest), "embd-")


async def _vectors(embedder: Embedder, texts: list[str], size: int | None) -> list[list[float]]:
    """The embeddings of texts, of which there may be none. Raises RequestError."""
    info = embedder.server.info
    check_dimensions(size, info)
    if not texts:
        return []
    prompt = info.sentences.prompt(None, None)
    vectors = await embedder.vectors(texts, "input", prompt=prompt, size=size or info.hidden_size)
    return [entry["embedding"] for entry in entries(vectors, "float", "float32", "little")]
