"""Compiles grammars of requests in a `Sandbox`, to see whether that ends well.

llguidance recurses into a grammar, and no limit of its own keeps it from the end of the stack: a chain of some thousand
rules ends the process, and so does the number -9223372036854775807 in a schema (1.9.1).
"""

from __future__ import annotations

from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Fuel for building a lexer and for one mask; a request that needs more ends alone. The texts of errors would be long.
LIMITS = LLParserLimits(initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, verbose_errors=False)
# Sets of tokens that a mask takes as a whole where the grammar allows all of them. llguidance sees it where the state
# begins with a repetition: its own sets serve strings of any characters. Words serve those of letters and digits. Those
# that begin in ASCII are no plain repetition themselves, so that it looks for one in each alternative of the state.
ASCII_FIRST = r'[ !#-\[\]-~][^"\\\x00-\x1F\x7F]'
SPACES, *STRINGS = LLTokenizer.json_slices()
SLICES = [SPACES, "[a-z]+", "[A-Za-z]+", *(ASCII_FIRST + most for most in ("{0,9}", "{0,29}", "*")), *STRINGS]
_tokenizers: dict[str, LLTokenizer] = {}


def compiled_tokenizer(text: str, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    """The tokenizer of a tokenizer.json. Raises ValueError for a kind that has no bytes."""
    return LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_token_ids, slices=SLICES)


def answer(kind: str, name: str, *value: Any) -> tuple[str, str]:
    """The reply to a request about a tokenizer, which has a name.

    "tokenizer", its JSON, the size of its vocabulary, the ids that end an answer: ("ok", "")
    "grammar", a grammar: ("ok", ""), ("refused", the reason), or ("unknown", "") if the tokenizer has not come yet
    """
    if kind == "tokenizer":
        text, vocab_size, eos = value
        _tokenizers[name] = compiled_tokenizer(text, vocab_size, eos)
        return "ok", ""
    if name not in _tokenizers:
        return "unknown", ""
    matcher = LLMatcher(_tokenizers[name], value[0], log_level=0, limits=LIMITS)
    return ("refused", " ".join(matcher.get_error().split())[:300]) if matcher.is_error() else ("ok", "")
