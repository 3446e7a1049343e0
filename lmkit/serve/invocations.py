"""What SageMaker asks of a container: POST /invocations with the body of another route, and GET /ping."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from starlette.types import Message

from lmkit.errors import RequestError
from lmkit.serve.body import read_raw
from lmkit.serve.chat import chat_completions
from lmkit.serve.choose import shared
from lmkit.serve.completions import completions
from lmkit.serve.embeddings.routes import embeddings, rerank, score
from lmkit.serve.health import health
from lmkit.web.receive import decode_json

router = APIRouter()
router.add_api_route("/ping", health, methods=["GET"])

ROUTES = (  # the fields that tell a body's route
    (("messages", "encoding_format"), "/v1/embeddings", embeddings),
    (("messages",), "/v1/chat/completions", chat_completions),
    (("prompt",), "/v1/completions", completions),
    (("input",), "/v1/embeddings", embeddings),
    (("query", "documents"), "/v1/rerank", rerank),
    (("text_1",), "/v1/score", score),
    (("queries",), "/v1/score", score),
    (("data_1",), "/v1/score", score),
)


@router.post("/invocations")
async def invocations(request: Request) -> Response:
    """Answer the body as the route does that its fields belong to. Raises RequestError."""
    with shared(request).bodies.share() as share:
        raw = await read_raw(request, share)
        data = decode_json(raw)
    keys = data.keys() if isinstance(data, dict) else ()
    found = next(((path, answer) for names, path, answer in ROUTES if all(name in keys for name in names)), None)
    if found is None:
        named = ", ".join(" and ".join(names) for names, *_ in ROUTES)
        raise RequestError("invalid_request", f"the fields of the body name no route; send {named}")
    path, answer = found
    was_read = False

    async def again() -> Message:
        nonlocal was_read
        if was_read:
            return await request.receive()
        was_read = True
        return {"type": "http.request", "body": raw, "more_body": False}

    return await answer(Request({**request.scope, "path": path}, again))
