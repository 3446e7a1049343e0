"""The hooks of a server, in their order: `before` sees the body of a request, `after` the text of an answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Self

import msgspec

from lmkit.errors import RequestError
from lmkit.log import get_logger
from lmkit.serve.collect import joined, num_bytes
from lmkit.turbo.transport.output import RequestOutput
from lmkit.web.budget import Share

if TYPE_CHECKING:
    from lmkit.serve.hooks.process import HookProcesses, Stage

NEW_CHARS = 200  # a hook that sees the text so far sees it again after so many characters

log = get_logger(__name__)
Outputs = AsyncGenerator[tuple[int, RequestOutput]]


class Hooks:
    """All hooks. Each call's result is what the next hook sees."""

    def __init__(self, processes: list[HookProcesses]) -> None:
        self._all = processes
        self._before = [hook for hook in processes if hook.settings.before]
        self._after = [hook for hook in processes if hook.settings.after]
        self._holds_all = any(hook.settings.sees == "whole" for hook in self._after)

    @classmethod
    def load(cls, names: tuple[str, ...]) -> Self:
        """Raises ConfigError for a hook that cannot be used."""
        if not names:
            return cls([])
        from lmkit.serve.hooks.process import HookProcesses

        return cls([HookProcesses.load(name) for name in names])

    async def close(self) -> None:
        for hook in self._all:
            await hook.close()

    @property
    def sees_answers(self) -> bool:
        return bool(self._after)

    async def before(self, route: str, body: Any) -> Any:
        """The JSON body of a request as the hooks leave it. Raises RequestError."""
        for hook in self._before:
            body = await _result(hook, "before", "body", {"route": route, "body": body})
        return body

    async def after(self, outputs: Outputs, share: Share) -> Outputs:
        """The outputs of an answer as the hooks leave them. Raises RequestError.

        An output is held until the hooks have seen its text: the whole answer, unless all hooks see the text so far.
        `share` counts what is held.
        """
        held: dict[int, RequestOutput] = {}
        texts: dict[int, str] = {}  # of each choice, seen by the hooks
        async with aclosing(outputs):
            async for idx, output in outputs:
                whole = joined(held.pop(idx), output) if idx in held else output
                is_last = output.finish_reason is not None
                if not is_last and (self._holds_all or len(whole.text) < NEW_CHARS):
                    held[idx] = whole
                    share.add(num_bytes(output))
                    continue
                share.add(num_bytes(output) - num_bytes(whole))
                seen = texts.get(idx, "") + whole.text
                if seen:
                    whole = await self._checked(seen, whole, is_whole=is_last)
                    texts[idx] = seen
                yield idx, whole

    async def _checked(self, seen: str, output: RequestOutput, *, is_whole: bool) -> RequestOutput:
        text = seen
        for hook in self._after:
            call = {"text": text, "is_whole": is_whole, "request_id": output.request_id}
            new = await _result(hook, "after", "text", call)
            if new != text and not self._holds_all:
                raise _failed(hook, "it changed a text of which a part is sent already: set sees = 'whole'")
            text = new
        if text == seen:
            return output
        # The tokens of the answer are those of the text that must not be seen.
        return msgspec.structs.replace(output, text=text, token_ids=[], logprobs=[])


async def _result(hook: HookProcesses, stage: Stage, field: str, call: dict[str, Any]) -> Any:
    """`field` of the call as the hook leaves it. Raises RequestError if the hook refuses, or fails and must not."""
    from lmkit.serve.hooks.process import HookError

    try:
        value = await hook.call(stage, call)
        if value is None:
            return call[field]
        match value:
            case {"refuse": str(message), **rest} if not rest:
                raise RequestError("content_filter", message or "the server refuses this request")
            case {**fields} if fields.keys() == {field} and isinstance(fields[field], type(call[field])):
                return fields[field]
        raise HookError(f"{stage} returned something else than None, {{'{field}': ...}} or {{'refuse': 'why'}}")
    except HookError as error:
        failure = _failed(hook, str(error))
        if hook.settings.on_failure == "pass":
            return call[field]
        raise failure from None


def _failed(hook: HookProcesses, why: str) -> RequestError:
    """Logs why a hook failed. The client learns that it did."""
    log.error("hook %s: %s", hook.name, why)
    return RequestError("hook_failed", "a check of this server failed, so the request is refused; try again later")
