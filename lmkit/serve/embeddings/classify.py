"""POST /classify: the classes of texts, by a model that was trained for them (`ForSequenceClassification`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from lmkit.errors import RequestError
from lmkit.serve.embeddings.protocol import ClassifyRequest
from lmkit.serve.embeddings.routes import begin, listed
from lmkit.serve.embeddings.vectors import scores
from lmkit.turbo.request import Classes

if TYPE_CHECKING:
    from lmkit.turbo.transport.vectors import Vectors

router = APIRouter()


@router.post("/v1/classify")
@router.post("/classify")
async def classify(request: Request) -> Response:
    body, embedder = await begin(request, ClassifyRequest, "classify-")
    classes = embedder.server.info.classes
    if classes is None:
        message = "this model has no classes: POST /classify needs a checkpoint that classifies, see docs/embeddings.md"
        raise RequestError("invalid_request", message, "model")
    texts = body.input or [await embedder.conversation(body)]
    states = await embedder.vectors(texts, "input" if body.messages is None else "messages", normalize=False)
    return listed(embedder, _entries(classes, scores(states, classes, raw=body.use_activation is False)))


def _entries(classes: Classes, values: Vectors) -> Iterator[dict[str, Any]]:
    for index, row in enumerate(values):
        label = classes.labels[int(row.argmax())]
        yield {"index": index, "label": label, "probs": row.tolist(), "num_classes": len(row)}
