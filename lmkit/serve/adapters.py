"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM: what an operator does with --adapter-root."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from lmkit.errors import RequestError
from lmkit.serve.body import read_json
from lmkit.serve.choose import choose, pool
from lmkit.serve.commands import AdapterCommand, LoadAdapterCommand
from lmkit.serve.sleep import check_role

router = APIRouter()


@router.post("/v1/load_lora_adapter")
async def load(request: Request) -> dict[str, Any]:
    """Load an adapter, which is then a model of its name."""
    check_role(request)
    body = await read_json(request, LoadAdapterCommand)
    if any(body.lora_name in model.names for model in pool(request).models):
        raise RequestError("invalid_request", f"{body.lora_name[:64]!r} is a model of this server already", "lora_name")
    return await _set(request, body, body.lora_path)


@router.post("/v1/unload_lora_adapter")
async def unload(request: Request) -> dict[str, Any]:
    """Unload an adapter that no request uses."""
    check_role(request)
    return await _set(request, await read_json(request, AdapterCommand), None)


async def _set(request: Request, body: AdapterCommand, folder: str | None) -> dict[str, Any]:
    serving = await choose(request, body.model)
    await serving.engine.set_adapter(body.lora_name, folder)
    return {"model": body.lora_name, "parent": pool(request).find(body.model).name, "loaded": folder is not None}
