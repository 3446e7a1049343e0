"""POST /sleep, /wake_up and /reload, and GET /is_sleeping: what an operator does with a model beside its requests."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request

from lmkit.errors import LMKitError, RequestError
from lmkit.log import get_logger
from lmkit.serve.body import read_json
from lmkit.serve.choose import choose, pool
from lmkit.serve.commands import ModelCommand, SleepCommand
from lmkit.serve.pool import PooledModel, load_tokenizer
from lmkit.serve.sessions import Sessions
from lmkit.web.receive import while_connected

router = APIRouter()
logger = get_logger(__name__)


@router.post("/sleep")
async def sleep(request: Request) -> dict[str, Any]:
    """Put a model to sleep once its requests have ended. The next request wakes it."""
    check_role(request)
    body = await read_json(request, SleepCommand)
    model = pool(request).find(body.model)
    await while_connected(request.receive, pool(request).sleep(model, keep_process=body.level != 2))
    return _answer(model)


@router.post("/wake_up")
async def wake_up(request: Request) -> dict[str, Any]:
    """Load a model before a request needs it."""
    check_role(request)
    body = await read_json(request, ModelCommand)
    await choose(request, body.model)
    return _answer(pool(request).find(body.model))


@router.post("/reload")
async def reload(request: Request) -> dict[str, Any]:
    """Load a model's files again, which may have changed. A mistake in them leaves the model as it is."""
    check_role(request)
    body = await read_json(request, ModelCommand)
    models = pool(request)
    model = models.find(body.model)

    async def renew() -> None:
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, model.engine)
            await models.measure([model])
        except LMKitError as error:
            logger.error("%s is not loaded again: %s", model.name, error)
            message = "the model's files cannot be used, and it goes on as it was; the server's log says why"
            raise RequestError("invalid_request", message) from None
        sessions = Sessions(model.engine.config.session_lease)
        model.serving = replace(model.serving, tokenizer=tokenizer, sessions=sessions, edition=uuid4().hex)

    await while_connected(request.receive, models.reload(model, renew))
    return _answer(model)


@router.get("/is_sleeping")
async def is_sleeping(request: Request, model: str | None = None) -> dict[str, bool]:
    return {"is_sleeping": pool(request).find(model).is_asleep}


def _answer(model: PooledModel) -> dict[str, Any]:
    return {"model": model.name, "state": model.engine.health}


def is_operator(request: Request) -> bool:
    """Whether the key has the role admin, or the server has no keys."""
    key = request.state.key
    return key is None or key.role == "admin"


def check_role(request: Request) -> None:
    """Raise RequestError unless an operator asks."""
    if not is_operator(request):
        raise RequestError("permission_denied", "this needs a key with role=admin")
