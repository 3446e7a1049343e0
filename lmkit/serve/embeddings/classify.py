"""POST /classify: the classes of texts, by a model that was trained for them (`ForSequenceClassification`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from lmkit.errors import RequestError
from lmkit.serve.embeddings.protocol import ClassifyRequest
from lmkit.serve.embeddings.routes import begin, listed
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


def scores(states: Vectors, classes: Classes, *, raw: bool) -> Vectors:
    """float32 [texts, labels]: probabilities, or `raw` logits. A text's do not depend on the others."""
    import numpy as np

    weight = np.frombuffer(classes.weight, np.float32).reshape(len(classes.labels), -1)
    bias = np.frombuffer(classes.bias, np.float32)
    rows = [(weight * state).sum(axis=1, dtype=np.float64) + bias for state in states]
    logits = np.stack(rows)
    if raw or classes.activation == "none":
        return logits.astype(np.float32)
    if classes.activation == "sigmoid":
        probabilities = 0.5 + 0.5 * np.tanh(0.5 * logits)
    else:
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities = powers / powers.sum(axis=1, keepdims=True)
    shown: Vectors = probabilities.astype(np.float32)
    return shown


def _entries(classes: Classes, values: Vectors) -> Iterator[dict[str, Any]]:
    for index, row in enumerate(values):
        label = classes.labels[int(row.argmax())]
        yield {"index": index, "label": label, "probs": row.tolist(), "num_classes": len(row)}
