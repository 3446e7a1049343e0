"""The head: whether it is the embeddings, which config.json may say and the file otherwise, and how it is rounded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lmkit.formats.checkpoint import CheckpointReader
from lmkit.formats.parts import FLOATS
from lmkit.formats.published import MARKS
from lmkit.models import roles
from lmkit.qtensor import SMALLEST_SCALE, QTensor, QuantScheme, codes_for, int_scheme, quantize

TIED = "tie_word_embeddings"
ROWS = 4096  # compared at a time
HEAD_SCHEME = int_scheme(8, 32, symmetric=True)  # of lm_head int8
ASKED_HEAD = "lm_head_storage"  # of config.json: the head's storage if nobody asks for another
QUANTIZED_ROWS = 2048  # rounded at a time


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


def rounded_head(weight: Tensor) -> QTensor:
    """A head [vocab, hidden] in HEAD_SCHEME. The largest number of a group lies 127 codes from the zero, as in GGUF's
    Q8_0, so weights that were made from such codes get the same ones."""
    missing = -weight.shape[1] % HEAD_SCHEME.group_size
    parts = []
    for rows in weight.split(QUANTIZED_ROWS):
        largest = pad(rows.float(), (0, missing)).unflatten(1, (-1, HEAD_SCHEME.group_size)).abs().amax(-1)
        scales = (largest / 127).half().clamp(min=SMALLEST_SCALE)
        zeros = HEAD_SCHEME.codes.zeros(tuple(scales.shape)).to(scales.device)
        parts.append((codes_for(rows, scales, zeros, HEAD_SCHEME), scales, zeros))
    codes, scales, zeros = (torch.cat(part) for part in zip(*parts, strict=True))
    return QTensor(codes, scales, zeros, HEAD_SCHEME)


def quantize_rows(weight: Tensor, scheme: QuantScheme) -> QTensor:
    """`quantize`, some rows at a time: float32 copies of a whole head would take many times its memory."""
    parts = [quantize(rows, scheme) for rows in weight.split(QUANTIZED_ROWS)]
    codes, scales, zeros = (torch.cat([getattr(p, name) for p in parts]) for name in ("codes", "scales", "zeros"))
    return QTensor(codes, scales, zeros, scheme)
