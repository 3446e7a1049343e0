"""What a pipeline returns: Response, Session."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from lmkit.api.prompts import Messages
from lmkit.errors import RequestError
from lmkit.other_names import missing
from lmkit.text import TokenHistory
from lmkit.turbo.request import StepOutput
from lmkit.turbo.transport.output import RequestOutput, TextLogprobs


@dataclass
class Response:
    """An answer, or the new part of it in a stream. `index` is the index of its prompt.

    In a stream `text`, `reasoning`, `token_ids` and `logprobs` are those of the part, and the numbers of tokens those
    so far. `tool_calls` are then deltas as OpenAI has them: the first of a call has its `id` and name, and the others
    have more of its arguments.
    """

    text: str = ""
    reasoning: str = ""  # apart from the text with tools or separate_reasoning
    tool_calls: list[dict[str, Any]] = field(default_factory=list)  # as in OpenAI's messages
    token_ids: list[int] = field(default_factory=list)
    input_token_len: int = 0
    generate_token_len: int = 0  # tokens generated so far, also in a part of a stream
    cached_token_len: int = 0  # input tokens reused from the KV cache
    finish_reason: str | None = None  # stop, tool_calls, length, abort or error; None before the end
    stop_reason: str | int | None = None  # what ended it: a stop string or id, or "repetition"
    logprobs: list[TextLogprobs] = field(default_factory=list)
    index: int = 0
    error_code: str | None = None
    error_message: str | None = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing(self, name)

    def extend(self, part: Response) -> None:
        """Append the next part of a stream."""
        self.text += part.text
        self.reasoning += part.reasoning
        for delta in part.tool_calls:
            if "id" in delta:
                call = {name: value for name, value in delta.items() if name != "index"}
                self.tool_calls.append(call | {"function": dict(call["function"])})
            else:
                self.tool_calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs
        self.input_token_len, self.generate_token_len = part.input_token_len, part.generate_token_len
        self.cached_token_len, self.finish_reason = part.cached_token_len, part.finish_reason
        self.stop_reason = part.stop_reason
        self.error_code, self.error_message = part.error_code, part.error_message

    @property
    def message(self) -> dict[str, Any]:
        """A whole answer as a message of a conversation, which can go on with the results of its calls."""
        parts = {"reasoning_content": self.reasoning, "tool_calls": self.tool_calls}
        return {"role": "assistant", "content": self.text} | {name: value for name, value in parts.items() if value}


@dataclass
class Session:
    """A conversation: `history` holds its messages, `response` the last answer.

    `history` may also be set to pairs (what the user said, what the assistant answered); the next turn makes messages
    of them. The engine keeps the session's KV for a lease (EngineConfig.session_lease). `tokens` are the tokens of its
    turns as they were generated, so that a new turn prefills only its own. If `history` was changed, the tokens from
    that place on are not used.
    """

    history: Messages = field(default_factory=list)
    response: Response | None = None
    id: str = field(default_factory=lambda: uuid4().hex)
    tokens: TokenHistory = field(default_factory=TokenHistory)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing(self, name)

    def fork(self) -> Session:
        """An independent copy. The common part of both is computed and kept once."""
        return Session(copy.deepcopy(self.history), copy.deepcopy(self.response), tokens=self.tokens)

    def reset(self) -> None:
        self.history.clear()
        self.response = None
        self.tokens = TokenHistory()


def refused(index: int, error: RequestError) -> Response:
    return Response(index=index, finish_reason="error", error_code=error.code, error_message=error.message)


def failed(request_id: str, error: RequestError) -> StepOutput:
    """The last output of a request that the engine refused."""
    return StepOutput(
        request_id=request_id, token_ids=[], finish_reason="error", error=error.message, error_code=error.code
    )


def response(index: int, output: RequestOutput) -> Response:
    return Response(
        text=output.text,
        token_ids=output.token_ids,
        input_token_len=output.num_prompt_tokens,
        generate_token_len=output.num_output_tokens,
        cached_token_len=output.num_cached_tokens,
        finish_reason=output.finish_reason,
        stop_reason=output.end,
        logprobs=output.logprobs,
        index=index,
        error_code=output.error_code if output.error else None,
        error_message=output.error,
    )
