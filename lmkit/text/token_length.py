"""How many characters a token can stand for, so that a long text is known to be too long before it is tokenized."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import tokenizers

from lmkit.text.decoding import BYTE_ALPHABET

# Normalizers that drop no character -> how many characters of their input one of their output may stand for. Each
# input character decomposes into one or more, and a composed character decomposes into at most four (Unicode keeps
# this for its stability), so NFC and NFKC turn at most four characters into one.
_COMPOSED = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
# Pre-tokenizers that drop no character: they cut, insert, or replace one character by one or more.
_CUTTING = frozenset({"ByteLevel", "Metaspace", "Digits"})
# A text that grows more in the normalizer is none, and its tokens would take much time and memory.
MAX_GROWTH, PIECE = 4, 512
_BYTE_PIECES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def max_token_chars(backend: tokenizers.Tokenizer, vocab: Mapping[str, int]) -> int | None:
    """The most characters of a text that one token can stand for; None if a token may stand for any number.

    A text passes the normalizer, is cut at added tokens and by the pre-tokenizer, and the model spells each piece with
    entries of the vocabulary. Let N be the length of the longest entry, added tokens included as they are written and
    as they are normalized. If

    - the normalizer makes one character of at most C, and drops none,
    - no added token swallows the white space beside it, and the pre-tokenizer drops no character, and
    - the model drops no character and makes one token of no run of unknown ones,

    then each token covers at most N characters of the normalized text, and at most C * N of the text. The
    post-processor only adds tokens. What is not known to keep these rules gives None.
    """
    model, added = backend.model, backend.get_added_tokens_decoder().values()
    composed = _composed(_state(backend.normalizer))
    pre_tokenizers = _sequence(_state(backend.pre_tokenizer), "pretokenizers")
    if composed is None or not all(map(_drops_nothing, pre_tokenizers)):
        return None
    if any(token.lstrip or token.rstrip for token in added):
        return None
    if not isinstance(model, tokenizers.models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    last = [step["type"] for step in pre_tokenizers[-1:]]
    spells_bytes = last == ["ByteLevel"] and vocab.keys() >= BYTE_ALPHABET
    falls_back = model.byte_fallback and vocab.keys() >= _BYTE_PIECES
    if not (spells_bytes or falls_back or (model.unk_token and not model.fuse_unk)):
        return None
    normalized = backend.normalizer.normalize_str if backend.normalizer else str
    entries = [*vocab, *(normalized(token.content) for token in added)]
    return composed * max(map(len, entries), default=1)


def _state(component: Any) -> dict[str, Any] | None:
    return json.loads(component.__getstate__()) if component is not None else None


def _sequence(spec: dict[str, Any] | None, parts: str) -> list[dict[str, Any]]:
    if spec is None:
        return []
    return [step for part in spec[parts] for step in _sequence(part, parts)] if spec["type"] == "Sequence" else [spec]


def _composed(normalizer: dict[str, Any] | None) -> int | None:
    """How many characters one character of the normalizer's output may stand for."""
    factor = 1
    for step in _sequence(normalizer, "normalizers"):
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old and new:
                factor *= math.ceil(len(old) / len(new))
            case {"type": str(kind)} if kind in _COMPOSED:
                factor *= _COMPOSED[kind]
            case _:
                return None
    return factor


def _drops_nothing(pre_tokenizer: dict[str, Any]) -> bool:
    kind = pre_tokenizer["type"]
    return kind in _CUTTING or (kind in ("Split", "Punctuation") and pre_tokenizer["behavior"] != "Removed")


class Growth:
    """How much a text grows in a normalizer, found piece by piece, so that little is done for one that grows too much.

    Unicode's compatibility forms make up to 18 characters of one beyond ASCII, and replacements make any number.
    """

    def __init__(self, normalizer: Any) -> None:
        self._normalizer = normalizer
        steps = _sequence(_state(normalizer), "normalizers")
        self._any_text = any(map(_lengthens, steps))
        self._beyond_ascii = any(step["type"] in ("NFKC", "NFKD", "Precompiled") for step in steps)

    def is_too_much(self, text: str) -> bool:
        """Whether the text becomes one of more than MAX_GROWTH times its length, and of more than a piece's."""
        if not (self._any_text or (self._beyond_ascii and not text.isascii())):
            return False
        left = MAX_GROWTH * max(len(text), PIECE)
        for start in range(0, len(text), PIECE):
            left -= len(self._normalizer.normalize_str(text[start : start + PIECE]))
            if left < 0:
                return True
        return False


def _lengthens(step: Mapping[str, Any]) -> bool:
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return len(new) > len(old)
        case {"type": "Replace", "content": str(new)}:  # a regular expression may match nothing, everywhere
            return bool(new)
    return False
