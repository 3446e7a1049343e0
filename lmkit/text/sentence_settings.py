"""How sentence-transformers reads the texts of a checkpoint: the settings of its module Transformer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers

from lmkit.text.special_tokens import read_config

MODULES = "modules.json"
# In the order in which sentence-transformers looks.
FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


def sentence_settings(folder: Path) -> dict[str, Any]:
    """The first of the files; {} without `modules.json`. Raises CheckpointError."""
    names = FILES if (folder / MODULES).exists() else ()
    return next((read_config(folder / name) for name in names if (folder / name).exists()), {})


def lower_if_asked(backend: tokenizers.Tokenizer, folder: Path) -> None:
    """Let the tokenizer read texts in lower case, if the settings say so (`do_lower_case`)."""
    if sentence_settings(folder).get("do_lower_case") is True:
        own = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Lowercase(), *own])
