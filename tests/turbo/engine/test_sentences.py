"""Embeddings as sentence-transformers' modules make them, by their formulas over transformers' hidden states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lmkit.api.in_process import pipeline
from lmkit.errors import CheckpointError, RequestError, UnsupportedError
from lmkit.formats.sentences import ACTIVATIONS
from lmkit.turbo.runners.pooling import PooledText
from lmkit.turbo.transport.vectors import similarities
from tests.models import tiny
from tests.turbo.engine.test_whole_texts import states_of, tokenizer

POOLED = {
    "cls_token": lambda states: states[0],
    "max_tokens": lambda states: states.max(0),
    "mean_tokens": lambda states: states.mean(0),
    "mean_sqrt_len_tokens": lambda states: states.sum(0) / len(states) ** 0.5,
    "weightedmean_tokens": lambda states: (
        (np.arange(1, len(states) + 1) @ states) / np.arange(1, len(states) + 1).sum()
    ),
    "lasttoken": lambda states: states[-1],
}
TEXTS = ["t7 t20 t33 t180", "t9", " ".join(f"t{20 + 7 * i % 150}" for i in range(17))]
OPTIONS: dict[str, Any] = {"device": "cpu", "packed_cache": False, "max_batch_size": 4, "dtype": "float32"}


def checkpoint(path: Path, modes: tuple[str, ...], layers: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> Any:
    """A tiny BERT with these pooling modes and (kind, config, tensors) of the modules that follow."""
    model = tiny.make_encoder(path, "Bert")
    tokenizer(path)
    kinds = ["Transformer", "Pooling", *(kind for kind, _, _ in layers)]
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": f"{i}_{kind}" if i else ""}
               for i, kind in enumerate(kinds)]  # fmt: skip
    (path / "modules.json").write_text(json.dumps(modules))
    configs = [{f"pooling_mode_{mode}": mode in modes for mode in POOLED}, *(config for _, config, _ in layers)]
    for module, config in zip(modules[1:], configs, strict=True):
        (path / module["path"]).mkdir()
        (path / module["path"] / "config.json").write_text(json.dumps(config))
    for module, (_, _, tensors) in zip(modules[2:], layers, strict=True):
        if tensors:
            save_file(tensors, path / module["path"] / "model.safetensors")
    return model


def ids_of(text: str) -> list[int]:
    return [5, *(int(word[1:]) for word in text.split()), 6]


def dense(inputs: int, outputs: int, activation: str, **config: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    weights = torch.Generator().manual_seed(inputs)
    tensors = {"linear.weight": torch.randn(outputs, inputs, generator=weights) / inputs**0.5}
    tensors["linear.bias"] = torch.randn(outputs, generator=weights)
    if config.get("use_residual") and inputs != outputs:
        tensors["residual.weight"] = torch.randn(outputs, inputs, generator=weights)
    return "Dense", {"activation_function": f"torch.nn.modules.activation.{activation}"} | config, tensors


@pytest.mark.parametrize(
    "modes", [*((mode,) for mode in POOLED), ("mean_tokens", "cls_token"), ("lasttoken", "max_tokens", "cls_token")]
)
def test_poolings(tmp_path: Path, modes: tuple[str, ...]) -> None:
    model = checkpoint(tmp_path, modes, [("Normalize", {}, {})])
    with pipeline(str(tmp_path), **OPTIONS) as pipe:
        found = pipe.embed(TEXTS)
    for text, row in zip(TEXTS, found, strict=True):
        states = states_of(model, ids_of(text)).astype(np.float64)
        want = np.concatenate([pool(states) for mode, pool in POOLED.items() if mode in modes])
        np.testing.assert_allclose(row, want / np.linalg.norm(want), atol=2e-5)


def test_a_text_in_parts_is_pooled_as_a_whole() -> None:
    states = np.random.default_rng(3).standard_normal((9, 4)).astype(np.float32)
    modes = "cls+max+mean+mean_sqrt_len+weighted_mean+last"
    whole, parts = PooledText(modes, 4), PooledText(modes, 4)
    whole.add(states)
    for start, stop in ((0, 1), (1, 6), (6, 9)):
        parts.add(states[start:stop])
    assert np.array_equal(whole.result(), parts.result())
    want = np.concatenate([pool(states.astype(np.float64)) for pool in POOLED.values()])
    np.testing.assert_allclose(whole.result(), want, atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_layers_in_their_order(tmp_path: Path, activation: str) -> None:
    norm = {"norm.weight": torch.linspace(0.5, 2, 16), "norm.bias": torch.linspace(-1, 1, 16)}
    layers = [
        dense(48, 24, activation),
        ("Normalize", {}, {}),
        dense(24, 24, "Tanh", use_residual=True),
        dense(24, 16, "Identity", use_residual=True),
        ("LayerNorm", {"dimension": 16}, norm),
        ("Dropout", {"dropout": 0.1}, {}),
    ]
    model = checkpoint(tmp_path, ("mean_tokens",), layers)
    with pipeline(str(tmp_path), **OPTIONS) as pipe:
        found = pipe.embed(TEXTS)
        assert pipe.engine.info.hidden_size == 16
    functions = {"Identity": torch.nn.Identity(), "Tanh": torch.nn.Tanh()}
    functions[activation] = getattr(torch.nn, activation)()
    for text, row in zip(TEXTS, found, strict=True):
        x = torch.from_numpy(states_of(model, ids_of(text))).mean(0)
        for kind, config, tensors in layers:
            if kind == "Dense":
                name = config["activation_function"].rpartition(".")[2]
                y = functions[name](torch.nn.functional.linear(x, tensors["linear.weight"], tensors["linear.bias"]))
                if config.get("use_residual"):
                    y = y + (tensors["residual.weight"] @ x if "residual.weight" in tensors else x)
                x = y
            elif kind == "Normalize":
                x = x / x.norm()
            elif kind == "LayerNorm":
                x = torch.nn.functional.layer_norm(x, (16,), norm["norm.weight"], norm["norm.bias"])
        np.testing.assert_allclose(row, (x / x.norm()).numpy(), atol=3e-5)


def test_long_texts_are_cut_and_prompts_stand_before_texts(tmp_path: Path) -> None:
    checkpoint(tmp_path, ("mean_tokens",), [])
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8, "do_lower_case": True}))
    prompts = {"prompts": {"query": "t11 t12 "}, "default_prompt_name": None}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with pipeline(str(tmp_path), **OPTIONS) as pipe:
        long = "t20 t27 t34 t41 t48 t55 t62 t69 t76"
        first = pipe.embed([long, "T20 t27 t34"])
        assert np.array_equal(first, pipe.embed(["t20 t27 t34 t41 t48 t55", "t20 t27 t34"]))
        asked = pipe.embed(["t20 t27"], prompt_name="query")
        assert np.array_equal(asked, pipe.embed(["t11 t12 t20 t27"]))
        with pytest.raises(RequestError, match="has the prompts: query"):
            pipe.embed("t20", prompt_name="other")


def test_a_pooling_that_is_asked_for_leaves_the_files_out(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, ("mean_tokens",), [dense(48, 24, "Tanh")])
    with pipeline(str(tmp_path), **OPTIONS, pooling="max") as pipe:
        found = pipe.embed(TEXTS[0])
    want = states_of(model, ids_of(TEXTS[0])).max(0)
    np.testing.assert_allclose(found[0], want / np.linalg.norm(want), atol=2e-5)


def test_weights_of_another_size_and_without_safetensors_are_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path / "size", ("cls_token",), [dense(32, 24, "Tanh")])
    with pytest.raises(CheckpointError, match=r"linear\.weight is \[24, 32\], expected \[24, 48\]"):
        pipeline(str(tmp_path / "size"), **OPTIONS)
    checkpoint(tmp_path / "none", ("cls_token",), [("Dense", {}, {})])
    with pytest.raises(UnsupportedError, match=r"2_Dense/model\.safetensors: no such file.*--pooling"):
        pipeline(str(tmp_path / "none"), **OPTIONS)


def test_similarities() -> None:
    first, second = np.array([[3.0, 4.0]], np.float32), np.array([[0.0, 0.0], [3.0, 5.0]], np.float32)
    assert similarities(first, second, "dot") == [0, 29]
    assert similarities(first, second, "euclidean") == [-5, -1]
    assert similarities(first, second, "manhattan") == [-7, -1]
