"""What /openapi.json says of the only model: its token ids, the variables of its template, whether it takes images.

Schemas have the mark OF_MODEL where a model decides more than the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmkit.formats.sentences import KINDS
from lmkit.serve.serving import Serving
from lmkit.strict import NEVER, OF_MODEL, Schema
from lmkit.text.template import THINKING_SWITCHES

VALUE: Schema = {"type": ["boolean", "number", "string", "null"]}  # of a variable


def limits(server: Serving) -> dict[str, Schema]:
    """By mark, what the model adds to a schema. Raises RequestError if no engine has started yet."""
    info, tokenizer = server.info, server.tokenizer
    template, most = tokenizer.chat_template, info.hidden_size
    parameters = frozenset[str]() if template is None else template.parameters
    variables = THINKING_SWITCHES | parameters
    return {
        "logprobs": most_logprobs(server.config.max_logprobs, info.vocab_size),
        "token": {"maximum": info.vocab_size - 1},
        "text": {} if tokenizer.encode("") else {"minLength": 1},
        "variables": {"properties": dict.fromkeys(sorted(variables), VALUE), "additionalProperties": {"type": "null"}},
        "image": NEVER if isinstance(info.images, str) else {},
        "video": NEVER if isinstance(info.videos, str) else {},
        "dimensions": {"enum": [*info.dimensions, most]} if info.dimensions else {"maximum": most},
        "prompt": {"enum": sorted(info.sentences.prompts)} if info.sentences.prompts else NEVER,
        "kind": {"enum": sorted({*info.sentences.prompts, *KINDS})},
        "cut": {"maximum": min(info.sentences.max_tokens or info.max_model_len, info.max_model_len)},
        "instruction": {"maxLength": 0} if server.config.reranker == "cosine" else {},
    }


def most_logprobs(most: int, vocab_size: int) -> Schema:
    """The schema of a number of tokens, which a server with --max-logprobs takes."""
    return {"minimum": -1, "maximum": (1 << 31) - 1} if most == -1 or most >= vocab_size else {"maximum": most}


def fitted(value: Any, limits: Mapping[str, Schema]) -> Any:
    """JSON with the limits in the places of their marks."""
    if isinstance(value, list):
        return [fitted(item, limits) for item in value]
    if not isinstance(value, dict):
        return value
    fields = {name: fitted(item, limits) for name, item in value.items() if name != OF_MODEL}
    return fields | limits.get(value.get(OF_MODEL, ""), {})
