"""Answers of every dialect, written from calls."""

from __future__ import annotations

import functools
from typing import Any

import tokenizers

from lmkit.text import Tokenizer
from lmkit.text.dialects import DIALECTS, THOUGHTS, Dialect, Thought
from lmkit.text.dialects.grammar import Called
from tests.serve.fake_engine import DEMO

DEMO_TOKENIZER = Tokenizer.from_pretrained(DEMO)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "s": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [Called("f", SCHEMA), Called("g", {"type": "object", "properties": {}, "additionalProperties": False})]
SCHEMAS = {tool.name: tool.schema for tool in TOOLS}
CALLS: list[tuple[str, dict[str, Any]]] = [("f", {"a": 3, "s": 'x "}'}), ("g", {})]


def thought_for(dialect: Dialect) -> Thought:
    return THOUGHTS.get(dialect.name, THOUGHTS["think"])


def thinking(dialect: Dialect, text: str) -> str:
    if dialect.name == "harmony":
        return f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant"
    thought = thought_for(dialect)
    return f"{thought.begin}\n{text}\n{thought.end}\n\n"


def content(dialect: Dialect, text: str) -> str:
    return f"<|channel|>final<|message|>{text}" if dialect.name == "harmony" else text


def written(dialect: Dialect, calls: list[tuple[str, dict[str, Any]]]) -> str:
    return dialect.text(calls)


def with_marks(dialect: Dialect, *, special: bool = True) -> Tokenizer:
    """The demo's tokenizer with a token for each mark of the dialect, and of all others that do not stand in its texts.

    Most dialects share one tokenizer, because each is compiled.
    """
    own, text = _marks(dialect), thinking(dialect, "") + written(dialect, CALLS)
    every = dict.fromkeys(mark for other in DIALECTS.values() for mark in _marks(other))
    strange = [mark for mark in every if mark in text and mark not in own]
    return _tokenizer(tuple(mark for mark in every if mark not in strange), special)


def _marks(dialect: Dialect) -> list[str]:
    thought = thought_for(dialect)
    return [*dialect.specials, *(thought.specials or (thought.begin, thought.end, *thought.around))]


@functools.cache
def _tokenizer(marks: tuple[str, ...], special: bool) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(DEMO_TOKENIZER.backend.to_str())
    backend.add_tokens([tokenizers.AddedToken(mark, special=special, normalized=False) for mark in marks])
    return Tokenizer(backend, eos_token_ids=DEMO_TOKENIZER.eos_token_ids)
