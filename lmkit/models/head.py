"""Tied embeddings: `tie_word_embeddings` of config.json says that a model has them, and the file may say otherwise."""

from __future__ import annotations

from typing import Any

from lmkit.formats.checkpoint import CheckpointReader
from lmkit.formats.parts import FLOATS
from lmkit.formats.published import MARKS
from lmkit.models import roles

TIED = "tie_word_embeddings"
ROWS = 4096  # compared at a time


def has_own_head(reader: CheckpointReader) -> bool:
    """Whether a checkpoint that ties its embeddings has another head. It is quantized, which embeddings are not, or its
    weights differ. Tools for fine-tuning write such files, and transformers does not tie them either."""
    embed, head = f"{roles.EMBED}.weight", f"{roles.LM_HEAD}.weight"
    if any(reader.has(f"{roles.LM_HEAD}.{mark}") for mark in MARKS):
        return True
    if not (reader.has(embed) and reader.has(head)):
        return False
    if reader.info(embed).shape != reader.info(head).shape:
        return True
    if not {reader.info(embed).dtype, reader.info(head).dtype} <= {*FLOATS}:
        return False
    rows = zip(reader.tensor(embed).split(ROWS), reader.tensor(head).split(ROWS), strict=True)
    return any(bool((one.float() != other.float()).any()) for one, other in rows)


def untied(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of such a checkpoint as it should be. What is made of the checkpoint gets it, because other
    programs trust its word."""
    inner = {key: value | {TIED: False} for key, value in config.items() if isinstance(value, dict) and TIED in value}
    return config | inner | {TIED: False}
