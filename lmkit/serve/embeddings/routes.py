"""POST /v1/embeddings, /v1/rerank and /v1/score. Scores are cosines of embeddings, or those of a reranker."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter, Request, Response

from lmkit.errors import RequestError
from lmkit.serve.body import read_json
from lmkit.serve.choose import choose
from lmkit.serve.embeddings.encoding import DType, Endianness, encoded, entries, positions
from lmkit.serve.embeddings.judge import Judge
from lmkit.serve.embeddings.protocol import (
    EmbeddingRequest,
    PairsRequest,
    RerankRequest,
    ScoreRequest,
    Text,
    TextsRequest,
)
from lmkit.serve.embeddings.vectors import Embedder, check_dimensions
from lmkit.serve.streaming import WholeAnswer
from lmkit.turbo.transport.vectors import similarities

if TYPE_CHECKING:
    from lmkit.turbo.transport.vectors import Vectors

B = TypeVar("B", bound=TextsRequest)
MAX_HEADER = 8192  # of an answer: what common clients and proxies take
router = APIRouter()


@router.post("/v1/embeddings")
async def embeddings(request: Request) -> Response:
    body, embedder = await begin(request, EmbeddingRequest, "embd-")
    info = embedder.server.info
    check_dimensions(body.dimensions, info)
    param = "input" if body.messages is None else "messages"
    texts: Sequence[Text] = body.input or [await embedder.conversation(body)]
    prompt = "" if body.messages else info.sentences.prompt(body.prompt_name, body.input_type)
    size = body.dimensions or info.hidden_size
    vectors = await embedder.vectors(texts, param, prompt=prompt, normalize=body.is_normalized, size=size)
    dtype, endianness = body.embed_dtype or "float32", body.endianness or "little"
    if body.encoding_format in ("bytes", "bytes_only"):
        return _bytes(embedder, vectors, dtype, endianness, with_metadata=body.encoding_format == "bytes")
    return listed(embedder, entries(vectors, body.encoding_format or "float", dtype, endianness))


@router.post("/v1/rerank")
@router.post("/v2/rerank")
@router.post("/rerank")
async def rerank(request: Request) -> Response:
    body, embedder = await begin(request, RerankRequest, "rerank-")
    texts, param = (body.texts or (), "texts") if body.documents is None else (body.documents, "documents")
    scores = await _scores(embedder, body, [body.query], texts, param, ("query", "document"))
    best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: body.top_n or None]
    if body.documents is None:
        return WholeAnswer(
            {"index": i, "score": scores[i]} | ({"text": texts[i]} if body.return_text else {}) for i in best
        )
    shown = [
        {"index": i, "relevance_score": scores[i]}
        | ({} if body.return_documents is False else {"document": {"text": texts[i]}})
        for i in best
    ]
    head = {"id": embedder.id, "model": embedder.server.model_name}
    return WholeAnswer(head | {"results": iter(shown), "usage": embedder.usage})


@router.post("/v1/score")
@router.post("/score")
async def score(request: Request) -> Response:
    body, embedder = await begin(request, ScoreRequest, "score-")
    first, second = body.text_1, body.text_2
    if len(first) not in (1, len(second)):
        message = f"text_1 has {len(first)} texts and text_2 {len(second)}: send one text_1, or as many as in text_2"
        raise RequestError("invalid_request", message, "text_1")
    scores = await _scores(embedder, body, first, second, "text_1 and text_2")
    return listed(embedder, ({"index": i, "object": "score", "score": value} for i, value in enumerate(scores)))


async def begin(request: Request, kind: type[B], prefix: str) -> tuple[B, Embedder]:
    body = await read_json(request, kind)
    request.state.user = body.user
    server = await choose(request, body.model, body.timeout)
    return body, Embedder(request, server, body, prefix)


async def _scores(
    embedder: Embedder,
    body: PairsRequest,
    first: list[str],
    second: Sequence[str],
    param: str,
    kinds: tuple[str | None, str | None] = (None, None),
) -> list[float]:
    """Of each pair, or of one `first` with each of `second`. `kinds` of both choose the prompts of an embedding.

    Raises RequestError.
    """
    classes, pairs = embedder.server.info.classes, list(zip(first * (len(second) // len(first)), second, strict=True))
    if embedder.server.config.reranker == "yes_no":
        return await Judge(embedder, body).scores(pairs, param)
    if body.instruction:
        message = "instruction: it goes with a reranker (--reranker yes_no)"
        raise RequestError("unsupported_parameter", message, "instruction")
    if classes is not None and classes.reads_pairs and len(classes.labels) == 1:
        return await embedder.pair_scores(pairs, classes, param)
    if classes is not None:
        raise RequestError("invalid_request", "this model classifies texts: POST /classify has its scores", "model")
    sentences = embedder.server.info.sentences
    normalize = sentences.is_unit or sentences.similarity == "cosine"
    prompts = [sentences.prompt(None, kind) for kind in kinds]
    texts = [prompt + text for prompt, side in zip(prompts, (first, second), strict=True) for text in side]
    vectors = await embedder.vectors(texts, param, normalize=normalize)
    return similarities(vectors[: len(first)], vectors[len(first) :], sentences.similarity)


def listed(embedder: Embedder, data: Iterator[dict[str, Any]]) -> Response:
    return WholeAnswer(_head(embedder) | {"object": "list", "data": data, "usage": embedder.usage})


def _bytes(
    embedder: Embedder, vectors: Vectors, dtype: DType, endianness: Endianness, *, with_metadata: bool
) -> Response:
    """The bytes of all vectors. vLLM's header `metadata` has what a body of JSON would have beside them."""
    headers = {}
    if with_metadata:
        about = {"data": positions(vectors, dtype, endianness), "usage": embedder.usage}
        headers["metadata"] = json.dumps(_head(embedder) | about)
        if len(headers["metadata"]) > MAX_HEADER:
            message = f"encoding_format=bytes: the header for {len(vectors)} texts is too long; ask for bytes_only"
            raise RequestError("invalid_request", message, "encoding_format")
    data = b"".join(encoded(vectors, dtype, endianness))
    return Response(data, media_type="application/octet-stream", headers=headers)


def _head(embedder: Embedder) -> dict[str, Any]:
    return {"id": embedder.id, "created": int(time.time()), "model": embedder.server.model_name}
