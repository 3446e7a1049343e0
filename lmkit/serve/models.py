"""GET /v1/models."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from lmkit.serve.choose import pool
from lmkit.serve.pool import PooledModel
from lmkit.turbo.request import EngineInfo
from lmkit.web import anthropic_models

router = APIRouter()


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "lmkit"
    max_model_len: int | None
    template_tokens: int | None  # of the shortest chat, nearly all the template's. null = there is none
    state: str
    input_modalities: list[str] = ["text"]
    tool_parser: str | None  # how it writes calls of tools: a dialect, see docs/tools.md. null = it cannot
    root: str  # its model's first name; of an adapter its folder inside the --adapter-root. Other folders are not told
    parent: str | None = None  # of an adapter: its model


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


@router.get("/v1/models", response_model=ModelList)
async def list_models(request: Request) -> Response:
    """Each model under each of its names."""
    cards = [_card(model, name).model_dump() for model in pool(request).models for name in model.names]
    return JSONResponse(anthropic_models.page(cards, request.headers.raw))


@router.get("/v1/models/{name:path}", response_model=ModelCard)
async def get_model(name: str, request: Request) -> Response:
    return JSONResponse(anthropic_models.card(_card(pool(request).find(name), name).model_dump(), request.headers.raw))


def _root(model: PooledModel, name: str) -> str:
    """What loads it again: a model's first name, or the folder of an adapter as /v1/load_lora_adapter takes it."""
    config = model.engine.config
    if name in config.adapter_folders and config.adapter_root is not None:
        base, folder = (Path(path).resolve() for path in (config.adapter_root, config.adapter_folders[name]))
        if folder.is_relative_to(base):
            return str(folder.relative_to(base))
    return model.name


def _modalities(info: EngineInfo | None) -> list[str]:
    """What its prompts are made of."""
    if info is not None and not isinstance(info.audio, str):
        return ["audio"]
    return ["text", "image"] if info and not isinstance(info.images, str) else ["text"]


def _card(model: PooledModel, name: str) -> ModelCard:
    info = model.engine.info
    return ModelCard(
        id=name,
        created=model.serving.created,
        max_model_len=info.max_model_len if info else None,
        template_tokens=model.serving.tokenizer.template_tokens,
        state=model.engine.health,
        input_modalities=_modalities(info),
        tool_parser=model.serving.style.tool_parser,
        root=_root(model, name),
        parent=model.name if name in model.engine.config.adapter_folders else None,
    )
