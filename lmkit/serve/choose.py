"""The model that a request names."""

from __future__ import annotations

from typing import cast

from starlette.requests import Request as HttpRequest

from lmkit.serve.pool import ModelPool
from lmkit.serve.serving import Serving
from lmkit.web.receive import while_connected


def pool(request: HttpRequest) -> ModelPool:
    """The models that `create_app` was given."""
    return cast(ModelPool, request.app.state.pool)


async def choose(request: HttpRequest, name: str | None, seconds: float | None = None) -> Serving:
    """The model that a request names, which stays awake until the request ends. The request's body must have been read.

    A model that sleeps is loaded first. Raises RequestError for an unknown name, a model that does not load, and if it
    takes longer than `seconds`, by default the server's --request-timeout.
    """
    models = pool(request)
    model = models.find(name)
    with model.waits():
        while model.must_wait:
            limit = seconds or model.engine.config.request_timeout
            await while_connected(request.receive, models.until_awake(model, limit))
        model.users += 1
        model.is_done = False
    request.state.held.callback(models.release, model)
    return model.serving if name is None else model.serving.called(name)


def shared(request: HttpRequest) -> Serving:
    """The Serving of any model, for what all models of the server share."""
    return pool(request).models[0].serving
