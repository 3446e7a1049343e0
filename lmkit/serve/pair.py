"""This node's part of a request that a proxy gives to two nodes: one computes the prompt, the other decodes.

See web.pair for what the proxy sends, and turbo.kv.tiers.awaited for how the KV comes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from lmkit.errors import RequestError
from lmkit.serve.serving import Serving
from lmkit.serve.streaming import EventStream
from lmkit.turbo import request as engine
from lmkit.web.budget import Share
from lmkit.web.pair import PAIR_HEADER, Part


def part_of(request: Request) -> Part | None:
    """What the proxy says. None: nothing, or nothing that this node believes. Raises RequestError."""
    value = request.headers.get(PAIR_HEADER.decode())
    if value is None:
        return None
    part, key = Part.read(value), getattr(request.state, "key", None)
    if key is not None and key.role != "proxy":
        raise RequestError("permission_denied", "only a key with the role proxy may name the other node of a pair")
    return part if key is not None or (part.role, part.value) == ("prefill", "-") else _of_anyone(request, part)


def _of_anyone(request: Request, part: Part) -> Part | None:
    known = {model.engine.config.kv_peer for model in request.app.state.pool.models}
    return part if part.role == "decode" and part.value in known else None


def decoding(requests: Sequence[engine.Request], part: Part) -> list[engine.Request]:
    """The requests, whose prompts another node computes."""
    return [replace(request, kv_from=part.value) for request in requests]


async def prefill(
    request: Request, server: Serving, prompts: Sequence[engine.Request], share: Share, part: Part
) -> Response:
    """Compute prompts and keep their KV for another node. Raises RequestError."""
    asked = [_prompt_only(prompt, "" if part.value == "-" else part.value) for prompt in prompts]
    asked = [prompt for prompt in asked if not prompt.prompt_logprobs]  # such prompts the other node computes itself
    return await EventStream.open(request.receive, _computed(server, asked, share))


async def _computed(server: Serving, asked: Sequence[engine.Request], share: Share) -> AsyncGenerator[str]:
    """Something once the first blocks are there, and a line when all are."""
    block = server.info.block_size
    has_begun, num_cached = False, 0
    async with aclosing(server.run(asked, 1, share)) as outputs:
        async for _, output in outputs:
            if not has_begun and (output.num_computed or 0) - output.num_cached_tokens >= block:
                has_begun = True
                yield ": begun\n\n"
            num_cached += output.num_cached_tokens if output.finish_reason is not None else 0
    computed = {"prompt_tokens": sum(len(prompt.prompt_ids) for prompt in asked), "cached_tokens": num_cached}
    yield f"data: {msgspec.json.encode(computed).decode()}\n\n"


def _prompt_only(request: engine.Request, tenant: str) -> engine.Request:
    params = replace(request.params, max_tokens=0, min_tokens=0, logprobs=None, grammar="")
    return replace(
        request, params=params, tenant=tenant or request.tenant, session_id=None, gives_kv=True, progress=True
    )
