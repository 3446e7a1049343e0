"""The model's tokenizer and chat template.

POST /tokenize, /detokenize, /v1/encode and /apply-template, GET /tokenizer_info.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from lmkit.errors import RequestError
from lmkit.serve.body import read_json
from lmkit.serve.choose import choose, shared
from lmkit.serve.protocol import DetokenizeRequest, EncodeRequest, TemplateRequest, TokenizeRequest
from lmkit.serve.serving import Serving
from lmkit.serve.to_request import check_ids
from lmkit.text.chat.conversation import ChatMessage

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    body = await read_json(request, TokenizeRequest)
    server = await choose(request, body.model)
    if sum(given is not None for given in (body.prompt, body.content, body.messages)) != 1:
        raise RequestError("invalid_request", "send one of prompt, content and messages", "prompt")
    theirs, ours = ("add_special", "content"), ("add_special_tokens", "prompt or messages")
    switch, goes_with = theirs if body.content is None else ours
    if switch in body.model_fields_set:
        raise RequestError("invalid_request", f"{switch}: it goes with {goes_with}", switch)
    if body.tools and body.messages is None:
        raise RequestError("invalid_request", "tools: only messages go with tools, not a prompt", "tools")
    num_chars = len(body.prompt or body.content or "") + body.num_chars
    max_model_len = server.info.max_model_len

    def answer() -> dict[str, Any]:
        ids = _token_ids(body, server)
        fields: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": max_model_len, "token_strs": None}
        if body.return_token_strs:
            fields["token_strs"] = list(map(server.tokenizer.id_to_token, ids))
        if body.with_pieces:
            pieces = {i: {"id": i, "piece": _piece(server.tokenizer.token_bytes(i))} for i in set(ids)}
            fields["tokens"] = [pieces[i] for i in ids]
        return fields

    return await _json(request, num_chars, answer)


def _piece(data: bytes) -> str | list[int]:
    """A token's text, or its bytes where they are not a text by themselves, as llama.cpp has it."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _token_ids(body: TokenizeRequest, server: Serving) -> list[int]:
    if body.content is not None:
        return server.tokenizer.encode(body.content, body.add_special)
    if body.messages is None:
        return server.tokenizer.encode(body.prompt or "", body.add_special_tokens is not False)
    if any(message.parts for message in body.messages):
        message = "messages: images have as many tokens as their pixels ask for; usage.prompt_tokens of an answer tells"
        raise RequestError("unsupported_parameter", message, "messages")
    return server.tokenizer.encode(_written(body, body.messages, server), bool(body.add_special_tokens))


def _written(body: TemplateRequest, messages: Sequence[ChatMessage], server: Serving) -> str:
    """The conversation as /v1/chat/completions writes it."""
    tools, variables = body.tools or (), body.chat_template_kwargs
    return server.style.write(
        messages,
        tools,
        variables,
        add_generation_prompt=body.add_generation_prompt,
        continue_final=body.continue_final_message,
    )


@router.post("/apply-template")
async def apply_template(request: Request) -> Response:
    """llama.cpp's: the text that the chat template makes of messages."""
    body = await read_json(request, TemplateRequest)
    server = await choose(request, body.model)
    if (messages := body.messages) is None:
        raise RequestError("invalid_request", "messages: Field required", "messages")
    return await _json(request, body.num_chars, lambda: {"prompt": _written(body, messages, server)})


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    body = await read_json(request, DetokenizeRequest)
    server = await choose(request, body.model)
    vocab_size = server.info.vocab_size

    def answer() -> dict[str, Any]:
        check_ids(body.tokens, vocab_size, "tokens")
        text = server.tokenizer.decode(body.tokens, body.skip_special_tokens)
        return {"prompt": text, "content": text}  # vLLM's name and llama.cpp's

    return await _json(request, len(body.tokens), answer)


@router.post("/v1/encode")
async def encode(request: Request) -> Response:
    """LMDeploy's: token ids and their number, of one text or of each of several."""
    body = await read_json(request, EncodeRequest)
    server = await choose(request, body.model)
    texts = [body.input] if isinstance(body.input, str) else body.input

    def answer() -> dict[str, Any]:
        ids = [_encoded(text, body, server) for text in texts]
        if isinstance(body.input, str):
            return {"input_ids": ids[0], "length": len(ids[0])}
        return {"input_ids": ids, "length": [len(row) for row in ids]}

    return await _json(request, sum(map(len, texts)), answer)


def _encoded(text: str, body: EncodeRequest, server: Serving) -> list[int]:
    if not body.do_preprocess:
        return server.tokenizer.encode(text, body.add_bos)
    written = server.style.write([ChatMessage(role="user", content=text)])
    return server.tokenizer.encode(written, add_special_tokens=False)


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request, model: str | None = None) -> Response:
    """vLLM's: what evaluation harnesses need to use the tokenizer from afar, by transformers' names."""
    server = await choose(request, model)
    tokenizer, template = server.tokenizer, server.tokenizer.chat_template
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # what transformers makes of a tokenizer.json
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": server.info.max_model_len,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_ids": tokenizer.eos_token_ids,
        **tokenizer.named_tokens,
        "chat_template": None if template is None else template.source,
    }
    return Response(msgspec.json.encode(fields), media_type="application/json")


async def _json(request: Request, num_chars: int, answer: Callable[[], dict[str, Any]]) -> Response:
    """A response with the JSON of `answer`, which is made in a thread."""
    body = await shared(request).texts.run(request.receive, num_chars, lambda: msgspec.json.encode(answer()))
    return Response(body, media_type="application/json")
