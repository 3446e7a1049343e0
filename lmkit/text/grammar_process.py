"""Compiles grammars of requests in a `Sandbox`, to see whether that ends well.

llguidance recurses into a grammar, and no limit of its own keeps it from the end of the stack: a chain of some thousand
rules ends the process, and so does the number -9223372036854775807 in a schema (1.9.1).
"""

from __future__ import annotations

from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Fuel for building a lexer and for one mask; a request that needs more ends alone. The texts of errors would be long.
LIMITS = LLParserLimits(initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, verbose_errors=False)
_tokenizers: dict[str, LLTokenizer] = {}


def answer(kind: str, name: str, *value: Any) -> tuple[str, str]:
    """The reply to a request about a tokenizer, which has a name.

    "tokenizer", its JSON, the size of its vocabulary, the ids that end an answer: ("ok", "")
    "grammar", a grammar: ("ok", ""), ("refused", the reason), or ("unknown", "") if the tokenizer has not come yet
    """
    if kind == "tokenizer":
        text, vocab_size, eos = value
        _tokenizers[name] = LLTokenizer(text, n_vocab=vocab_size, eos_token=eos)
        return "ok", ""
    if name not in _tokenizers:
        return "unknown", ""
    matcher = LLMatcher(_tokenizers[name], value[0], log_level=0, limits=LIMITS)
    return ("refused", " ".join(matcher.get_error().split())[:300]) if matcher.is_error() else ("ok", "")
