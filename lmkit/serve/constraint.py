"""The grammar that a request's fields ask for: OpenAI's response_format, or the names of other servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmkit.errors import RequestError
from lmkit.serve.protocol import ChatCompletionRequest, CompletionRequest
from lmkit.text import Tokenizer

# Fields of vLLM, SGLang and llama.cpp, each with the kind of its value in text.grammar.
_KINDS: Mapping[str, str] = {
    "guided_json": "json_schema",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "bad_words": "bad_words",
    "allowed_token_ids": "allowed_token_ids",
}
# Names inside vLLM's structured_outputs.
_STRUCTURED = {"json": "json_schema", **{kind: kind for kind in ("json_object", "regex", "choice", "grammar")}}


def constraint(body: ChatCompletionRequest | CompletionRequest, tokenizer: Tokenizer, vocab_size: int) -> str:
    """The grammar of the answer, "" for any answer. Raises RequestError, which names the field, if it cannot be held.

    Compiling takes milliseconds: call this in a thread.
    """
    asked = _asked(body)
    if not asked:
        return ""
    if len(asked) > 1:
        raise RequestError("invalid_request", f"send only one of {' and '.join(asked)}", list(asked)[1])
    ((param, value),) = asked.items()
    if param == "allowed_token_ids":
        value = _tokens(value, tokenizer, vocab_size)
    grammar = _grammar(param, value)
    if grammar:
        tokenizer.grammars(vocab_size).check(grammar, param)
    return grammar


def _tokens(ids: list[int], tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """Raises RequestError for a token that the model has not."""
    if (wrong := max(ids)) >= vocab_size:
        message = f"allowed_token_ids: token id {wrong} is not in [0, {vocab_size})"
        raise RequestError("invalid_request", message, "allowed_token_ids")
    ends = set(tokenizer.eos_token_ids)
    return {"ids": sorted(set(ids) - ends), "may_end": not ends.isdisjoint(ids)}


def is_constrained(body: ChatCompletionRequest | CompletionRequest) -> bool:
    return bool(_asked(body))


def checks_a_grammar(body: ChatCompletionRequest | CompletionRequest) -> bool:
    """Whether reading the request may compile a grammar."""
    others = ("tools", "thinking_token_budget")
    return is_constrained(body) or any(getattr(body, name, None) for name in others)


def _asked(body: ChatCompletionRequest | CompletionRequest) -> dict[str, Any]:
    fields = ("response_format", "structured_outputs", *_KINDS)
    return {name: value for name in fields if (value := getattr(body, name)) is not None}


def _grammar(param: str, value: Any) -> str:
    from lmkit.text import grammar  # most requests never need it

    if param == "response_format":
        return grammar.response_format(value)
    kind = _KINDS.get(param)
    if kind is None:
        value = {name: item for name, item in value.items() if item is not None and item is not False}
        if len(value) != 1 or not value.keys() <= _STRUCTURED.keys() | {"structural_tag"}:
            names = ", ".join([*_STRUCTURED, "structural_tag"])
            raise RequestError("invalid_request", f"{param}: expected one of {names}", param)
        ((name, value),) = value.items()
        kind = _STRUCTURED.get(name, name)
    return grammar.grammar_of(kind, value, param)
