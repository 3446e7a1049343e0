"""GET /health: whether the server takes requests."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from lmkit.serve.serving import serving

router = APIRouter()


@router.api_route("/health", methods=["GET", "HEAD"])
async def health(request: Request) -> JSONResponse:
    """200 if the engine is ready, else 503. `status` is the engine's state."""
    state = serving(request).engine.state
    return JSONResponse({"status": state}, 200 if state == "ready" else 503)
