"""Requests for responses: one that continues a stored response or a conversation goes to the node that keeps that.

If the node is down and the proxy has copies, it goes to another node with the whole conversation as its input.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from lmkit.errors import RequestError
from lmkit.proxy.asked import Asked
from lmkit.proxy.call import Call
from lmkit.proxy.downstream import DownstreamResponse
from lmkit.proxy.forward import Forwarder
from lmkit.proxy.stored import CONVERSATIONS
from lmkit.proxy.stored import PATH as RESPONSES
from lmkit.proxy.transcripts import Transcripts, owner_of

NODE_IS_DOWN = frozenset({"engine_unavailable", "bad_gateway"})


async def respond(
    call: Call,
    asked: Asked,
    forwarder: Forwarder,
    transcripts: Transcripts | None,
    client: DownstreamResponse,
    run: Callable[[Call], Awaitable[None]],
) -> None:
    """Answer the call by `run`. Raises RequestError for an error that the client has not been told yet."""
    if call.path != RESPONSES:
        await run(call)
        return
    if asked.conversation_id is not None:  # no copy: the conversation is more than the input and the answer
        keeper = await forwarder.keeper(asked.conversation_id, call, CONVERSATIONS)
        await run(replace(call, routing=replace(call.routing, keeper=keeper)))
        return
    previous, owner = asked.previous_response_id, owner_of(call.key, call.client)
    if transcripts is not None:
        call = replace(call, recorder=transcripts.recorder(owner, asked))
    if not isinstance(previous, str):
        await run(call)
        return
    keeper = await forwarder.keeper(previous, call)
    resolved = None
    if transcripts is not None and keeper is None:
        resolved = await transcripts.resolved(owner, previous, call.body)
    if resolved is None:
        try:
            await run(replace(call, routing=replace(call.routing, keeper=keeper)))
            return
        except RequestError as error:
            if transcripts is None or client.finished or error.code not in NODE_IS_DOWN:
                raise
            resolved = await transcripts.resolved(owner, previous, call.body)
            if resolved is None:
                raise
    if not call.journal.reserve(len(resolved)):
        raise RequestError("overloaded", "the conversation does not fit the proxy's memory for bodies; try again later")
    await run(replace(call, body=resolved))
