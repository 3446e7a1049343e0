"""Adapters on modules of transformers: a batch of several gives the tokens of the merged models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from lmkit.config import EngineConfig
from lmkit.errors import CheckpointError
from lmkit.models.head import quantize_rows
from lmkit.models.loader import load_model
from lmkit.models.rounding import scheme_for
from lmkit.qtensor import dequantize
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from tests.flexible import tiny
from tests.flexible.test_tokens import PROMPT, SIZES, check
from tests.models import peft_folder
from tests.turbo.engine.test_engine import run, tokens

NAMES = ("", "one", "two")


def linears(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """The linears [out, in] of a model's layers."""
    found = {}
    for name, part in model.named_modules():
        if isinstance(part, Conv1D):
            found[name] = (part.weight.shape[1], part.weight.shape[0])
        elif isinstance(part, torch.nn.Linear) and any(word.isdigit() for word in name.split(".")):
            found[name] = (part.out_features, part.in_features)
    return found


def merged(model: torch.nn.Module, added: dict[str, torch.Tensor]) -> torch.nn.Module:
    changed = copy.deepcopy(model)
    for name, delta in added.items():
        part: Any = changed.get_submodule(name)
        part.weight.data += delta.T if isinstance(part, Conv1D) else delta
    return changed


def answers(engine: Engine, prompt: list[int]) -> dict[str, list[int]]:
    """By the adapter's name, all in one batch."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    found = run(engine, [Request(request_id=name, prompt_ids=prompt, params=params, adapter=name) for name in NAMES])
    return {name: tokens(outputs) for name, outputs in found.items()}


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "jamba", "bloom"])
def test_base_and_two_adapters_in_one_batch(tmp_path: Path, name: str) -> None:
    model = tiny.make(tmp_path / "base", name)
    shapes, right = (
        {n: s for n, s in linears(model).items() if not any(word in n for word in ("experts", "router", "dt_proj"))},
        {"": model},
    )
    for seed, adapter in enumerate(NAMES[1:]):
        some = dict(list(shapes.items())[seed:])
        added = peft_folder.write(tmp_path / adapter, some, seed, size=0.5, fan_in_fan_out=name == "gpt2")
        right[adapter] = merged(model, added)
    folders = tuple(f"{adapter}={tmp_path / adapter}" for adapter in NAMES[1:])
    engine = Engine.of(load_model(tmp_path / "base", model_impl="flexible"), EngineConfig(**SIZES, adapters=folders))
    for _ in range(2):  # and behind a prefix in the cache
        found = answers(engine, PROMPT)
        for adapter, ids in found.items():
            check(right[adapter], [PROMPT], [ids])
        assert len({tuple(ids) for ids in found.values()}) == 3
    engine.close()


def test_adapters_beside_rounded_weights(tmp_path: Path) -> None:
    model = tiny.make(tmp_path / "base", "stablelm")
    added = peft_folder.write(tmp_path / "one", linears(model), 1, size=0.5)
    decoder = load_model(tmp_path / "base", model_impl="flexible", quantize="int4", activations="exact")
    engine = Engine.of(decoder, EngineConfig(**SIZES, adapters=(f"one={tmp_path / 'one'}",)))
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    found = run(engine, [Request(request_id="r", prompt_ids=PROMPT, params=params, adapter="one")])
    engine.close()
    for name in linears(model):  # not the head
        weight: Any = model.get_submodule(name).weight
        scheme = scheme_for("int4", weight.shape[1])
        assert scheme is not None
        weight.data = dequantize(quantize_rows(weight.data, scheme)).float()
    check(merged(model, added), [PROMPT], [tokens(found["r"])])


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("model.layers.0.self_attn.query", r"query is no linear of this model.*nearest is model\.layers\.0\."),
        ("model.layers.0.mlp.experts.0.up_proj", r"up_proj is no linear of this model that takes an adapter"),
    ],
)
def test_modules_that_take_no_adapter_are_refused(tmp_path: Path, module: str, reason: str) -> None:
    tiny.make(tmp_path / "base", "olmoe")
    decoder = load_model(tmp_path / "base", model_impl="flexible")
    peft_folder.write(tmp_path / "one", {module: (96, 64)}, 1)
    with pytest.raises(CheckpointError, match=reason):
        Engine.of(decoder, EngineConfig(**SIZES, adapters=(f"one={tmp_path / 'one'}",)))
