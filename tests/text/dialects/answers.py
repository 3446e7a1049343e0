"""Answers of every dialect, written from calls."""

from __future__ import annotations

import json
from typing import Any

import tokenizers

from lmkit.text import Tokenizer
from lmkit.text.dialects import THOUGHTS, Dialect, Thought
from lmkit.text.dialects.grammar import Called
from lmkit.text.dialects.table import NUMBER
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
    return THOUGHTS[dialect.name if dialect.name in ("cohere", "harmony") else "think"]


def thinking(dialect: Dialect, text: str) -> str:
    if dialect.name == "harmony":
        return f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant"
    thought = thought_for(dialect)
    return f"{thought.begin}\n{text}\n{thought.end}\n\n"


def content(dialect: Dialect, text: str) -> str:
    return f"<|channel|>final<|message|>{text}" if dialect.name == "harmony" else text


def written(dialect: Dialect, calls: list[tuple[str, dict[str, Any]]]) -> str:
    texts = [
        dialect.written[0] + name + dialect.written[1] + _arguments(dialect, arguments) + dialect.written[2]
        for name, arguments in calls
    ]
    return (dialect.opening + dialect.between.join(texts) + dialect.closing).replace(NUMBER, "0")


def _arguments(dialect: Dialect, arguments: dict[str, Any]) -> str:
    match dialect.syntax:
        case "qwen_xml":
            return "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        case "glm_xml":
            form = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
            return "".join(form.format(key, value) for key, value in arguments.items())
        case "minimax_xml":
            return "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments.items())
        case "gemma":
            return _gemma(arguments)
    return json.dumps(arguments)


def _gemma(value: Any) -> str:
    match value:
        case str():
            return f"<escape>{value}<escape>"
        case list():
            return "[" + ",".join(map(_gemma, value)) + "]"
        case dict():
            return "{" + ",".join(f"{key}:{_gemma(item)}" for key, item in sorted(value.items())) + "}"
    return json.dumps(value)


def with_marks(dialect: Dialect, *, special: bool = True) -> Tokenizer:
    """The demo's tokenizer with a token for each mark of the dialect."""
    backend = tokenizers.Tokenizer.from_str(DEMO_TOKENIZER.backend.to_str())
    thought = thought_for(dialect)
    marks = dict.fromkeys([*dialect.specials, thought.begin, thought.end, *thought.around])
    backend.add_tokens([tokenizers.AddedToken(mark, special=special, normalized=False) for mark in marks])
    return Tokenizer(backend, eos_token_ids=DEMO_TOKENIZER.eos_token_ids)
