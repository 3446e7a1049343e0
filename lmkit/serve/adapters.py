"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM: what an operator does with --adapter-root."""

from __future__ import annotations

import asyncio
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
    name, models = body.lora_name, pool(request)
    async with models.loads_adapter:
        if (known := next((model for model in models.models if name in model.names), None)) is not None:
            if name not in known.engine.config.adapter_folders or known is not models.find(body.model):
                raise RequestError("invalid_request", f"{name[:64]!r} is a model of this server already", "lora_name")
            if not body.load_inplace:
                message = f"an adapter {name[:64]!r} has already been loaded; load_inplace: true replaces it"
                raise RequestError("invalid_request", message, "lora_name")
        return await _set(request, body, body.lora_path)


@router.post("/v1/unload_lora_adapter")
async def unload(request: Request) -> dict[str, Any]:
    """Unload an adapter that no request uses."""
    check_role(request)
    return await _set(request, await read_json(request, AdapterCommand), None)


async def _set(request: Request, body: AdapterCommand, folder: str | None) -> dict[str, Any]:
    serving = await choose(request, body.model)
    await asyncio.shield(serving.engine.set_adapter(body.lora_name, folder))  # it ends, also without its caller
    parent = pool(request).find(body.model).name
    return {"status": "success", "model": body.lora_name, "parent": parent, "loaded": folder is not None}
