"""GET /v1/models."""

from __future__ import annotations

from fastapi import APIRouter, Request

from lmkit.serve.protocol import ModelCard, ModelList
from lmkit.serve.serving import Serving, serving

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    return ModelList(data=[_card(serving(request))])


@router.get("/v1/models/{name:path}")
async def get_model(name: str, request: Request) -> ModelCard:
    serving(request).check_model(name)
    return _card(serving(request))


def _card(server: Serving) -> ModelCard:
    info = server.engine.info
    return ModelCard(id=server.model_name, created=server.created, max_model_len=info.max_model_len if info else None)
