"""The tokenizer of a GGUF file: ids of llama.cpp, special tokens, templates, sampling, broken metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from lmkit.formats.gguf_file import GgufFile
from lmkit.formats.gguf_tokenizer import generation_config, tokenizer_config, tokenizer_json
from lmkit.formats.hub import DEMO_FOLDER
from tests.formats.gguf_writer import write

TEXTS = [
    "",
    "Hello, world! It's 12345.",
    " naïve\n\n  façade\t",
    "<|im_start|>user\nHi<|im_end|>",
    "漢字 🙂\r\n",
    "a  b   c",
]


def demo_metadata() -> dict[str, Any]:
    """The bundled model's tokenizer as llama.cpp's converter writes it."""
    spec = json.loads((DEMO_FOLDER / "tokenizer.json").read_text())
    special = {token["id"] for token in spec["added_tokens"]}
    tokens = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].__getitem__)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if i in special else 1 for i in range(len(tokens))],
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]
        ],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
    }


def opened(folder: Path, metadata: dict[str, Any]) -> GgufFile:
    write(folder / "m.gguf", metadata, {})
    return GgufFile(folder / "m.gguf")


def test_the_demo_s_tokenizer_comes_back(tmp_path: Path) -> None:
    file = opened(tmp_path, demo_metadata() | {"tokenizer.chat_template": "{{ messages }}"})
    before = tokenizers.Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    after = tokenizers.Tokenizer.from_str(tokenizer_json(file))
    for text in TEXTS:
        ids = before.encode(text).ids
        assert after.encode(text).ids == ids
        assert after.decode(ids) == before.decode(ids)
    config = tokenizer_config(file)
    assert (config["bos_token"], config["eos_token"]) == ("<|endoftext|>", "<|im_end|>")
    assert (config["add_bos_token"], config["chat_template"]) == (False, "{{ messages }}")
    assert generation_config(file) == {"bos_token_id": 0, "eos_token_id": [0, 2]}
