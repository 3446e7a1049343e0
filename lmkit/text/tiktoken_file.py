"""Tokenizers of a checkpoint that has a tiktoken file in place of tokenizer.json: Kimi, Qwen 1, Hunyuan.

A line has a token in base64 and its rank, which is its id. Of the neighbouring pairs of a text's tokens the one whose
union has the lowest rank is merged first. How a text is cut before that, and which special tokens follow, is code of
the repository elsewhere, and a table here: no code of a repository runs.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.small_files import read
from lmkit.text.decoding import CHARACTER_OF

Specials = Callable[[int, Mapping[str, Any]], list[str]]
SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SUFFIX}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SUFFIX}?"
RESERVED = 256  # ids after Kimi's vocabulary


def _listed(*names: str) -> Specials:
    extra = [f"<|extra_{i}|>" for i in range(205)]
    return lambda count, config: [f"<|{name}|>" for name in names] + extra


def _declared(count: int, config: Mapping[str, Any]) -> list[str]:
    """Those that tokenizer_config.json has at the ids from `count` on, between ids without a use."""
    entries = config.get("added_tokens_decoder") or {}
    texts = {str(key): entry.get("content") for key, entry in entries.items() if isinstance(entry, dict)}
    return [str(texts.get(str(i)) or f"<|reserved_token_{i}|>") for i in range(count, count + RESERVED)]


@dataclass(frozen=True)
class Kind:
    """What a family's tokenizers do beside merging."""

    pattern: str  # of the pieces of a text
    specials: Specials
    composed: bool = True  # texts are brought into Unicode's form C
    repeats: bool = False  # tokens occur again, and ids count those that are new, whatever the ranks


GPT4 = rf"{SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}"
KINDS = {
    "tiktoken.model": Kind(rf"[\p{{Han}}]+|{WORDS}|\p{{N}}{{1,3}}|{REST}", _declared, composed=False),
    "qwen.tiktoken": Kind(GPT4, _listed("endoftext", "im_start", "im_end")),
    "hy.tiktoken": Kind(GPT4, _listed("endoftext", "startoftext", "bos", "eos", "pad"), repeats=True),
}
MAX_BYTES = 64 << 20


def file_of(folder: Path) -> Path | None:
    """The tiktoken file of a folder, if there is one that is known. Raises UnsupportedError for another one."""
    found = next((folder / name for name in KINDS if (folder / name).is_file()), None)
    if found is None and (other := next(iter(sorted(folder.glob("*.tiktoken"))), None)) is not None:
        raise UnsupportedError(
            f"{other}: lmkit knows {', '.join(KINDS)}; save the tokenizer as tokenizer.json with transformers"
        )
    return found


def backend(file: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of a tiktoken file. `config` is tokenizer_config.json. Raises CheckpointError."""
    kind = KINDS[file.name]
    ranks = _ranks(file, repeats=kind.repeats)
    made = tokenizers.Tokenizer(models.BPE(*_vocabulary(ranks), ignore_merges=True))
    if kind.composed:
        made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(kind.pattern), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    special = [tokenizers.AddedToken(text, special=True) for text in kind.specials(len(ranks), config)]
    made.add_special_tokens(special)
    return made


def _ranks(file: Path, *, repeats: bool) -> dict[bytes, int]:
    """Tokens with their ids, in order. With `repeats` one that occurs again is left out, as in Hunyuan's code."""
    found: dict[bytes, int] = {}
    for number, line in enumerate(read(file, MAX_BYTES).splitlines(), 1):
        if not (parts := line.split()):
            continue
        try:
            token, rank = base64.b64decode(parts[0], validate=True), int(parts[1])
        except (IndexError, ValueError):
            raise CheckpointError(f"{file}: line {number} is no token in base64 with its rank") from None
        if not repeats and (rank != len(found) or token in found):
            raise CheckpointError(f"{file}: line {number} must have a new token of rank {len(found)}")
        found.setdefault(token, len(found))
    if missing := [byte for byte in range(256) if bytes([byte]) not in found]:
        raise CheckpointError(f"{file}: has no token for byte {missing[0]}")
    return found


def _vocabulary(ranks: Mapping[bytes, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Tokens in GPT-2's alphabet of bytes, and the pairs that may be merged, by the rank of their union."""
    text = {token: "".join(map(CHARACTER_OF.__getitem__, token)) for token in ranks}
    merges = []
    for token in ranks:
        pairs = ((token[:i], token[i:]) for i in range(1, len(token)))
        known = sorted(
            (ranks[left], ranks[right], left, right) for left, right in pairs if {left, right} <= ranks.keys()
        )
        merges += [(text[left], text[right]) for _, _, left, right in known]
    return {text[token]: rank for token, rank in ranks.items()}, merges
