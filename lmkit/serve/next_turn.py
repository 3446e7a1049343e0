"""What can be known of a conversation's next prompt is computed before it is sent.

When an answer has ended, the conversation is rendered as the next turn will have it: with this answer as the client
sends it back, by the chat template's own rules, and with what comes next left open. So reasoning that a template drops
and calls that it writes anew are as they will be. The engine computes what the prefix cache lacks of this beginning, at
a time at which it has nothing else to do (turbo.scheduling.next_turns).

A conversation whose answer called tools comes back soon. The blocks of its beginning get a lease.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from lmkit.errors import LMKitError
from lmkit.serve.protocol import ChatCompletionRequest
from lmkit.strict import validate
from lmkit.text.chat.conversation import ChatMessage
from lmkit.text.history import num_common
from lmkit.turbo.request import TURN, Request, SamplingParams
from lmkit.turbo.transport.async_engine import AsyncEngine

PROBES = ("a", "1")  # beginnings of what comes next
_END_CHARS = 64  # of a text after what is common, so that the tokens before it are as they will be
MAX_WAITING = 16  # answers whose conversations wait to be rendered; the oldest leave
Work = Callable[[], Request | None]


class NextTurns:
    """The answers of one model that have ended, and whose next turns are not rendered yet."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._waiting: deque[Work] = deque(maxlen=MAX_WAITING)
        self._thread = ThreadPoolExecutor(1, "lmkit-next-turn")
        self._task: asyncio.Task[None] | None = None

    def add(self, work: Work, *, at_once: bool) -> None:
        """An answer has ended. `work` makes the request that is computed ahead, or finds that nothing can be.

        It is done `at_once`, or when no request is open.
        """
        if at_once:
            self._waiting.appendleft(work)
        else:
            self._waiting.append(work)
        if self._task is None and (at_once or self._is_idle):
            self._task = asyncio.create_task(self._run())

    def look(self) -> None:
        """A request has ended."""
        if self._task is None and self._waiting and self._is_idle:
            self._task = asyncio.create_task(self._run())

    @property
    def _is_idle(self) -> bool:
        return not self._engine.num_open

    async def _run(self) -> None:
        try:
            while self._waiting:
                work = self._waiting.popleft()
                request = await asyncio.get_running_loop().run_in_executor(self._thread, work)
                if request is not None:
                    self._engine.prepare(request)
                if not self._is_idle:
                    return
        finally:
            self._task = None


def ahead(
    like: Request,
    body: ChatCompletionRequest,
    answer: dict[str, object],
    render: Callable[[ChatCompletionRequest], str],
    encode: Callable[[str], list[int]],
    max_model_len: int,
) -> Request | None:
    """The request that computes the beginning of the next turn, None if the conversation cannot go on.

    `like`: the request that was answered by `answer`, a message. `encode`: as the next turn's prompt will be.
    """
    try:
        said = validate(answer, ChatMessage)
        ids = beginning(body, lambda probe: [said, *_follows(said, probe)], render, encode)
    except LMKitError:  # the template wants it otherwise
        return None
    if not 0 < len(ids) < max_model_len:
        return None
    session = like.session_id
    if session is None and said.tool_calls:
        session = TURN + _digest([*body.messages, said])
    return Request(
        request_id=f"{like.request_id}-next",
        prompt_ids=ids,
        params=SamplingParams(max_tokens=0),
        tenant=like.tenant,
        weight=like.weight,
        cache_salt=like.cache_salt,
        adapter=like.adapter,
        session_id=session,
        is_ahead=True,
    )


def beginning(
    body: ChatCompletionRequest,
    follows: Callable[[str], list[ChatMessage]],
    render: Callable[[ChatCompletionRequest], str],
    encode: Callable[[str], list[int]],
) -> list[int]:
    """The tokens with which prompts begin whose messages go on like this, whatever the tools or the user say.

    `follows`: further messages with a text of theirs. Raises LMKitError.
    """
    texts = [render(body.model_copy(update={"messages": [*body.messages, *follows(probe)]})) for probe in PROBES]
    known = num_common(*texts)
    first, second = (encode(text[: known + _END_CHARS]) for text in texts)
    return first[: num_common(first, second)]


def _follows(answer: ChatMessage, text: str) -> list[ChatMessage]:
    """The messages that answer this one: each tool's result, or what the user says."""
    calls = answer.tool_calls or ()
    if not calls:
        return [ChatMessage(role="user", content=text)]
    return [ChatMessage(role="tool", content=text, tool_call_id=call.id) for call in calls]


def _digest(messages: Iterable[ChatMessage]) -> str:
    """Of a conversation up to its first answer, which stay the same in all its turns."""
    state = hashlib.blake2b(digest_size=16)
    for message in messages:
        ids = [call.id for call in message.tool_calls or ()]
        state.update(msgspec.json.encode([message.role, message.content or "", ids]))
        if message.role == "assistant":
            break
    return state.hexdigest()
