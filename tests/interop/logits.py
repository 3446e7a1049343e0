"""A model's logits for one sequence, as exactly as lmkit computes them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lmkit.kv_dtype import FLOAT32
from lmkit.layers.batch import allocate_kv, whole_batch
from lmkit.models.loader import load_model

BLOCK = 16


@torch.inference_mode()
def exact_logits(path: Path, token_ids: list[int]) -> Tensor:
    """float32 [tokens, vocabulary], computed with float32 activations and KV."""
    decoder = load_model(path, dtype="float32", activations="exact")
    spec = decoder.spec
    batch, num_blocks = whole_batch([token_ids], BLOCK)
    pair = (FLOAT32, FLOAT32)
    kv = [allocate_kv(num_blocks, layer.num_kv_heads, BLOCK, layer.head_dim, pair) for layer in spec.layers]
    return decoder.head(*decoder.hidden(batch, kv))
