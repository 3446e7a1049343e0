"""POST /tokenize, /detokenize and /v1/encode: the model's tokenizer and chat template."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from lmkit.errors import RequestError
from lmkit.serve.body import read_json
from lmkit.serve.protocol import ChatMessage, DetokenizeRequest, EncodeRequest, TokenizeRequest
from lmkit.serve.serving import serving
from lmkit.serve.to_request import chat_text, check_ids
from lmkit.text import Tokenizer

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> JSONResponse:
    server = serving(request)
    body = await read_json(request, TokenizeRequest)
    server.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("invalid_request", "send either prompt or messages", "prompt")
    ids = await asyncio.to_thread(_token_ids, body, server.tokenizer)
    answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": server.info.max_model_len}
    if body.return_token_strs:
        answer["token_strs"] = [server.tokenizer.token_text(i) for i in ids]
    return JSONResponse(answer)


def _token_ids(body: TokenizeRequest, tokenizer: Tokenizer) -> list[int]:
    if body.messages is None:
        return tokenizer.encode(body.prompt or "", body.add_special_tokens)
    text = chat_text(body.messages, tokenizer, body.add_generation_prompt, body.chat_template_kwargs)
    return tokenizer.encode(text, add_special_tokens=False)


@router.post("/detokenize")
async def detokenize(request: Request) -> JSONResponse:
    server = serving(request)
    body = await read_json(request, DetokenizeRequest)
    server.check_model(body.model)
    check_ids(body.tokens, server.info.vocab_size, "tokens")
    text = await asyncio.to_thread(server.tokenizer.decode, body.tokens, body.skip_special_tokens)
    return JSONResponse({"prompt": text})


@router.post("/v1/encode")
async def encode(request: Request) -> JSONResponse:
    """LMDeploy's: token ids and their number, of one text or of each of several."""
    server = serving(request)
    body = await read_json(request, EncodeRequest)
    texts = [body.input] if isinstance(body.input, str) else body.input
    ids = await asyncio.to_thread(lambda: [_encoded(text, body, server.tokenizer) for text in texts])
    if isinstance(body.input, str):
        return JSONResponse({"input_ids": ids[0], "length": len(ids[0])})
    return JSONResponse({"input_ids": ids, "length": [len(row) for row in ids]})


def _encoded(text: str, body: EncodeRequest, tokenizer: Tokenizer) -> list[int]:
    if not body.do_preprocess:
        return tokenizer.encode(text, body.add_bos)
    rendered = chat_text([ChatMessage(role="user", content=text)], tokenizer, add_generation_prompt=True)
    return tokenizer.encode(rendered, add_special_tokens=False)
