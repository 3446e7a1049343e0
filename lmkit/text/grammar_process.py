"""Compiles grammars of requests in a `Sandbox`, to see whether that ends well, and follows them for some tokens.

llguidance recurses into a grammar, and no limit of its own keeps it from the end of the stack: a chain of some thousand
rules ends the process, and so does the number -9223372036854775807 in a schema (1.9.1).
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Fuel for building a lexer, and for one mask; a request that needs more ends alone. The first also bounds how far the
# lexer looks for an end of a text, which a pattern such as (a{1000}){1000} puts off: 0.2 s and 40 MiB, once. A state
# takes up to 1 KiB. The texts of errors would be long.
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000, step_lexer_fuel=100_000, max_lexer_states=30_000, verbose_errors=False
)
CPU_SECONDS, MEMORY = 1.0, 192 << 20  # of the process that checks one grammar
STEPS = 16  # tokens of an answer that it tries
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
    "grammar", a grammar: ("ok", ""), ("refused", the reason), ("limit", "") if it takes too much,
        or ("unknown", "") if the tokenizer has not come yet
    """
    if kind == "tokenizer":
        text, vocab_size, eos = value
        _tokenizers[name] = compiled_tokenizer(text, vocab_size, eos)
        return "ok", ""
    if name not in _tokenizers:
        return "unknown", ""
    return _in_a_child(_tokenizers[name], value[0])


def _in_a_child(tokenizer: LLTokenizer, grammar: str) -> tuple[str, str]:
    """The verdict of a forked process, with whose end all that the grammar took is free again."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # at its end, SIGPROF ends the process
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            os.write(writing, "\0".join(_verdict(tokenizer, grammar)).encode(errors="replace"))
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as stream:
        kind, _, reason = stream.read().decode().partition("\0")
    os.waitpid(child, 0)
    return kind or "limit", reason


def _verdict(tokenizer: LLTokenizer, grammar: str) -> tuple[str, str]:
    """Compiles a grammar and goes some tokens into it: most of a pattern is built where an answer gets there."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    chosen = random.Random(0)
    for step in range(STEPS):
        if matcher.is_error() or matcher.is_stopped():
            break
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if not allowed and not matcher.is_error():
            return "refused", "no answer fits it" if step == 0 else "no token can go on some of its answers"
        high = allowed >> chosen.randrange(allowed.bit_length() or 1)  # the allowed tokens from a random one on
        shift = allowed.bit_length() - high.bit_length()
        matcher.consume_tokens([shift + (high & -high).bit_length() - 1])
    return ("refused", " ".join(matcher.get_error().split())[:300]) if matcher.is_error() else ("ok", "")
