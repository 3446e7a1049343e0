"""Completions between two texts: `suffix` of /v1/completions and /api/generate, and /infill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from lmkit.errors import RequestError
from lmkit.serve.protocol import CompletionRequest
from lmkit.text import Tokenizer
from lmkit.text.infill import Marks, marks
from lmkit.turbo.request import EngineInfo

C = TypeVar("C", bound=CompletionRequest)
Encode = Callable[[str], list[int]]
LEFT_OUT = ("echo", "endings", "prompt_start_ids", "truncate_prompt_tokens")


def filled_in(
    body: C,
    suffix: str,
    tokenizer: Tokenizer,
    info: EngineInfo,
    param: str = "suffix",
    *,
    others: Sequence[tuple[str, str]] = (),
    begun: str = "",
) -> C:
    """`body` with the tokens that ask for what stands between each of its prompts and `suffix`.

    `others`: names and texts of other files. `begun`: how the answer begins. Raises RequestError for a model without
    such tokens, and for fields that do not go with it.
    """
    found = marks(tokenizer, param)
    if wrong := next((name for name in LEFT_OUT if getattr(body, name)), None):
        raise RequestError("invalid_request", f"{wrong}: it does not go with {param}; leave one out", wrong)

    def encoded(text: str) -> list[int]:
        tokenizer.check_length(text, info.max_model_len, param)
        return tokenizer.encode(text, add_special_tokens=False)

    after, start = encoded(suffix), [] if body.add_special_tokens is False else tokenizer.start
    ahead = [token for name, text in others for token in _file(name, text, found, encoded)]
    prompts = [
        found.prompt([*start, *ahead], encoded(prompt) if isinstance(prompt, str) else prompt, after) + encoded(begun)
        for prompt in body.prompt
    ]
    stops = [*(body.stop_token_ids or ()), *found.ends]
    return body.model_copy(update={"prompt": prompts, "suffix": None, "stop_token_ids": stops})


def _file(name: str, text: str, found: Marks, encoded: Encode) -> list[int]:
    """Another file ahead of the prompt: after the model's mark with its name, or the text alone."""
    if found.file is None:
        return encoded(f"{text}\n")
    return [found.file, *encoded(f"{name}\n{text}\n")]
