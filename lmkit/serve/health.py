"""GET /health: whether the server takes requests. GET /: what it serves. GET /version and /load, as vLLM has them."""

from __future__ import annotations

from collections import Counter

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from lmkit import __version__
from lmkit.serve.choose import pool
from lmkit.serve.pool import TAKES_REQUESTS

router = APIRouter()


@router.api_route("/health", methods=["GET", "HEAD"])
async def health(request: Request) -> JSONResponse:
    """200 if the server takes requests: an engine is ready and shows that it works, or sleeps and can be loaded.

    `status` is the state of the only engine, or "stalled", or the best state of several. `models` then counts them.
    """
    models = pool(request)
    counts = {} if models.only else {"models": Counter(model.engine.health for model in models.models)}
    return JSONResponse({"status": models.health, **counts}, 200 if models.health in TAKES_REQUESTS else 503)


@router.api_route("/", methods=["GET", "HEAD"])
async def root(request: Request) -> JSONResponse:
    """For a person who opens the address. Like other routes it needs a key if the server has keys."""
    names = [model.name for model in pool(request).models]
    served = {"model": names[0]} if len(names) == 1 else {"models": names}
    return JSONResponse({"server": "lmkit", **served, "routes": request.app.state.routes})


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """How many choices of answers are open: in a batch, in a queue, or waiting for a model to wake."""
    return {"server_load": pool(request).num_open}
