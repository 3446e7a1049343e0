"""Architectures of transformers, as different from each other as can be, through the sweep of benchmarks.families."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.families.sweep import examine
from benchmarks.families.tiny import causal_types, tiny_config

# type -> the KV cache it runs on
VARIED = {
    "gpt2": "paged",  # weights as [in, out], learned positions
    "gpt_neox": "paged",  # q, k and v in one linear
    "stablelm": "paged",
    "cwm": "paged",  # windows
    "phimoe": "paged",  # windows that its masks alone have
    "doge": "paged",  # a mask of its own in each layer
    "jetmoe": "paged",  # experts of attention
    "mamba": "own",  # a weight that is read directly
    "inkling2_text": "own",  # experts that its file names otherwise, in a layout that only transformers undoes
    "falcon": "paged",  # linears of a class of its own
}


@pytest.mark.parametrize("model_type", VARIED)
def test_served_and_quantized_as_transformers_computes_it(tmp_path: Path, model_type: str) -> None:
    result = examine(model_type, tmp_path / model_type)
    assert (result.transformers, result.served, result.batch, result.quantized) == ("", "", "", ""), result.failure
    assert (result.engine, result.kv) == ("flexible", VARIED[model_type])


def test_an_architecture_that_no_tiny_model_is_made_of_is_told(tmp_path: Path) -> None:
    assert "timm" in examine("gemma3n", tmp_path).transformers


def test_configurations_are_tiny() -> None:
    assert {"llama", "gpt2", "mamba"} <= set(causal_types())
    assert tiny_config("gpt2").n_embd == tiny_config("llama").hidden_size == 64
