"""GET /health: whether the server takes requests. GET /: what it serves."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from lmkit.serve.serving import serving

router = APIRouter()


@router.api_route("/health", methods=["GET", "HEAD"])
async def health(request: Request) -> JSONResponse:
    """200 if the engine is ready and shows that it works, else 503. `status` is the engine's state, or "stalled"."""
    health = serving(request).engine.health
    return JSONResponse({"status": health}, 200 if health == "ready" else 503)


@router.api_route("/", methods=["GET", "HEAD"])
async def root(request: Request) -> JSONResponse:
    """For a person who opens the address. Like other routes it needs a key if the server has keys."""
    return JSONResponse({"server": "lmkit", "model": serving(request).model_name, "routes": request.app.state.routes})
