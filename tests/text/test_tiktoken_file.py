"""Tokenizers of tiktoken files give the ids of the rule that tiktoken follows, and know their special tokens."""

from __future__ import annotations

import base64
import json
import random
import re
from itertools import pairwise
from pathlib import Path

import pytest

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.text import Tokenizer
from lmkit.text.tiktoken_file import KINDS

TEXTS = [
    "the then  there's\n\n a 1234567 x",
    "aaaaaaa ab abab",
    "中文English混合 café",
    "e\u0301 I'LL go",
    " \t\n ",
    "",
]


def vocabulary() -> list[bytes]:
    """Bytes, then random unions of two tokens of texts, as training makes them."""
    rng, tokens = random.Random(5), [bytes([i]) for i in range(256)]
    corpus = "".join(TEXTS).encode() * 3
    words = [bytes([byte]) for byte in corpus]
    for _ in range(120):
        at = rng.randrange(len(words) - 1)
        if (union := words[at] + words[at + 1]) not in tokens:
            tokens.append(union)
        words[at : at + 2] = [union]
    return tokens


def write(folder: Path, name: str, config: dict[str, object] | None = None) -> list[bytes]:
    tokens = vocabulary()
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return tokens


def merged(piece: bytes, tokens: list[bytes]) -> list[int]:
    """tiktoken's rule: a piece that is a token, or else always the union with the lowest rank, the first one of it."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    parts = [piece] if piece in ranks else [bytes([byte]) for byte in piece]
    while unions := [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
        at = min(unions)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [ranks[part] for part in parts]


PIECES = {
    "the then  there's\n\n a 1234567 x": {
        "tiktoken.model": ["the", " then", " ", " there's", "\n\n", " a", " ", "123", "456", "7", " x"],
        "qwen.tiktoken": ["the", " then", " ", " there", "'s", "\n\n", " a", " ", *"1234567", " x"],
    },
    "中文English混合 café": {
        "tiktoken.model": ["中文", "English", "混合", " café"],
        "qwen.tiktoken": ["中文English混合", " café"],
    },
    "aaaaaaa ab abab": {name: ["aaaaaaa", " ab", " abab"] for name in ("tiktoken.model", "qwen.tiktoken")},
}


@pytest.mark.parametrize("name", ["tiktoken.model", "qwen.tiktoken"])
def test_ids_are_those_of_the_rule(tmp_path: Path, name: str) -> None:
    tokens = write(tmp_path, name)
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    for text, pieces in PIECES.items():
        expected = [i for piece in pieces[name] for i in merged(piece.encode(), tokens)]
        assert tokenizer.encode(text) == expected
        assert max(expected) > 255
    for text in TEXTS:
        composed = text if name == "tiktoken.model" else text.replace("e\u0301", "é")
        assert tokenizer.decode(tokenizer.encode(text)) == composed


def test_special_tokens_follow_the_vocabulary(tmp_path: Path) -> None:
    count = len(write(tmp_path, "hy.tiktoken", {"eos_token": "<|eos|>"}))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("<|startoftext|><|extra_0|>") == [count + 1, count + 5]
    assert tokenizer.eos_token_ids == (count + 3,)
    assert tokenizer.decode([count + 1]) == ""


def test_kimis_special_tokens_have_their_ids_between_reserved_ones(tmp_path: Path) -> None:
    count = len(vocabulary())
    declared = {str(count + 3): {"content": "<|im_end|>", "special": True}}
    write(tmp_path, "tiktoken.model", {"added_tokens_decoder": declared, "eos_token": "<|im_end|>"})
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token_ids == (count + 3,)
    assert tokenizer.vocab_size == count + 256
    assert tokenizer.encode("a<|im_end|>")[-1] == count + 3


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "own.tiktoken").write_text("")
    with pytest.raises(UnsupportedError, match=r"own\.tiktoken: lmkit knows " + re.escape(", ".join(KINDS))):
        Tokenizer.from_pretrained(tmp_path)
    for text, why in (("%%% 1", "line 1 is no token"), ("YQ== 0", "no token for byte 0")):
        (tmp_path / "hy.tiktoken").write_text(text)
        with pytest.raises(CheckpointError, match=why):
            Tokenizer.from_pretrained(tmp_path)


def test_ids_are_the_ranks_that_the_file_has(tmp_path: Path) -> None:
    """Blank lines mean nothing; ids that the file does not have would be those of other tokens."""
    count, file = len(write(tmp_path, "qwen.tiktoken")), tmp_path / "qwen.tiktoken"
    file.write_bytes(file.read_bytes() + b"\n\n")
    assert Tokenizer.from_pretrained(tmp_path).encode("<|endoftext|>") == [count]
    for added in (b"YWFiYmNj %d" % (count + 1), b"YQ== %d" % count):  # a rank is left out, a token occurs again
        write(tmp_path, "qwen.tiktoken")
        file.write_bytes(file.read_bytes() + added)
        with pytest.raises(CheckpointError, match=f"line {count + 1} must have a new token of rank {count}"):
            Tokenizer.from_pretrained(tmp_path)
