"""Attention sinks: sliding-window models that still see their first tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmkit.errors import ConfigError
from lmkit.layers.batch import whole_batch
from lmkit.models.loader import load_model
from tests.models import tiny
from tests.models.test_families import BLOCK, kv_for

WINDOW, SINKS = 9, 3  # of the checkpoint


def test_sinks_match_transformers_with_such_a_mask(tmp_path: Path) -> None:
    model = tiny.make(tmp_path, "mistral-window")
    row = torch.randint(3, 199, (40,), generator=torch.Generator().manual_seed(3))
    query, key = torch.arange(40)[:, None], torch.arange(40)
    seen = (key <= query) & ((key > query - WINDOW) | (key < SINKS))
    mask = torch.zeros(40, 40).masked_fill(~seen, -torch.inf)
    with torch.inference_mode():
        expected = model(row[None], attention_mask=mask[None, None]).logits[0]
        without = model(row[None]).logits[0]
    decoder = load_model(tmp_path, dtype="float32", activations="exact", attention_sinks=SINKS)
    batch, num_blocks = whole_batch([row.tolist()], BLOCK)
    got = decoder(batch, kv_for(decoder, num_blocks))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert float((got - without).abs().max()) > 0.1


def test_a_model_without_windows_refuses_sinks(tmp_path: Path) -> None:
    tiny.make(tmp_path, "llama")
    with pytest.raises(ConfigError, match="no layer of this LlamaForCausalLM has a sliding window"):
        load_model(tmp_path, attention_sinks=4)
