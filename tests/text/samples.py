"""Small tokenizers of the kinds that checkpoints have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from lmkit.text import Tokenizer

DEMO = Path(__file__).parents[2] / "lmkit" / "demo" / "model"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁Hello", "▁wor", "ld", "a", "b", "▁▁", "é", "日", "\n", "<0xZZ>", "a▁b"]


def sentencepiece_like(decoder: Any, extra: tuple[str, ...] = ()) -> Tokenizer:
    vocab = {piece: i for i, piece in enumerate(["<unk>", "<s>", "</s>", *BYTES, *WORDS, *extra])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    backend.decoder = decoder
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens(["<added▁one>"])
    return Tokenizer(backend, eos_token_ids=(2,), named_tokens={"bos_token": "<s>"})


def word_pieces(*, cleanup: bool) -> Tokenizer:
    """As BERT's, whose second text has tokens of type 1."""
    pieces = ["[UNK]", "[CLS]", "[SEP]", "do", "not", "n", "##t", "##ing", "n't", "'s", ".", "##.", ",", "?", "'"]
    backend = tokenizers.Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    backend.decoder = decoders.WordPiece(cleanup=cleanup)
    backend.add_special_tokens(pieces[:3])
    return Tokenizer(backend)


def byte_level(*added: str) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    backend.add_tokens(list(added))
    backend.add_special_tokens(["<｜begin▁of｜>"])
    return Tokenizer(backend)


TOKENIZERS = {
    "demo": Tokenizer.from_pretrained(DEMO),
    "byte-level, odd added tokens": byte_level("é", "naïve", "<tool>", "日本"),
    "llama": sentencepiece_like(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    ),
    "strip two": sentencepiece_like(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2)]
        )
    ),
    "gemma": sentencepiece_like(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    ),
    "fallback first": sentencepiece_like(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "metaspace": sentencepiece_like(decoders.Metaspace()),
    "metaspace, never": sentencepiece_like(decoders.Metaspace(prepend_scheme="never")),
    "no decoder": sentencepiece_like(None),
}
# A token may stand for any number of characters.
UNBOUNDED = {"word pieces": word_pieces(cleanup=True), "word pieces, not cleaned": word_pieces(cleanup=False)}


def write_folder(path: Path, **files: Any) -> Path:
    (path / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    for name, value in files.items():
        (path / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return path
