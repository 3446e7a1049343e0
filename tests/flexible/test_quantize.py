"""`lmkit quantize` of architectures that transformers computes: by the same loop, with linears that are discovered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.families.sweep import engine_of, generate, prompts, rounded_like
from benchmarks.families.tiny import save_tiny
from lmkit.errors import LMKitError
from lmkit.formats.kv_config import FILE_NAME
from lmkit.models.engines import open_source
from lmkit.models.flexible.layer import Passage
from lmkit.quant.recipe import load_recipe
from lmkit.quant.run import prepare

TEXT = {"calibration": {"dataset": "demo", "num_samples": 8, "seq_len": 48}}
GRID = {"format": "compressed-tensors", "scheme": {"group_size": 32, "smaller_groups": False}}


def quantized(tmp_path: Path, model_type: str, recipe: str, changes: dict[str, Any]) -> tuple[Path, Any, Any]:
    """(folder of the result, its report, transformers' original)."""
    model = save_tiny(model_type, tmp_path / "source")
    quantizer = prepare(tmp_path / "source", load_recipe(recipe, changes))
    return tmp_path / "out", quantizer.run(tmp_path / "out"), model


def test_gptq_errs_less_and_transformers_opens_the_result(tmp_path: Path) -> None:
    folder, report, model = quantized(tmp_path, "gpt_neox", "gptq_w4a16_g128", GRID | TEXT)
    linears = [linear for layer in report.layers for linear in layer.linears]
    assert {linear.module.rpartition(".")[2] for linear in linears} == {
        "query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"
    }  # fmt: skip
    assert sum(x.method == "gptq" for x in linears) >= 4
    assert sum(x.error for x in linears) < 0.8 * sum(x.rtn_error for x in linears)
    assert rounded_like(model, folder)
    config = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = type(model).from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    ids = torch.tensor([prompts(0)[1]])
    with torch.inference_mode():
        wanted, found = model(ids).logits, theirs(ids).logits
    assert (found - wanted).abs().max() < 2e-3 * wanted.abs().max()  # they multiply scales in float16


@pytest.mark.parametrize("recipe", ["fp8_channel", "rtn_w8a16"])
def test_eight_bits_need_no_text(tmp_path: Path, recipe: str) -> None:
    folder, _, model = quantized(tmp_path, "gpt2", recipe, {})
    assert rounded_like(model, folder)
    asked = prompts(0)[:1]
    engine = engine_of(folder)
    (found,), _ = generate(engine, asked)
    engine.close()
    with torch.inference_mode():
        likeliest = model(torch.tensor([asked[0] + found])).logits[0, len(asked[0]) - 1 : -1].argmax(-1)
    assert found == likeliest.tolist()


def test_a_kv_cache_is_calibrated(tmp_path: Path) -> None:
    folder, _, _ = quantized(tmp_path, "gpt_neox", "kv4", TEXT)
    layers = json.loads((folder / FILE_NAME).read_text())["layers"]
    assert [layer["v"] for layer in layers] == ["int4"] * 2
    assert all(value > 0 for layer in layers for value in (*layer["k_absmax"], *layer["v_absmax"]))


def test_keys_and_values_that_no_calibration_sees_are_refused(tmp_path: Path) -> None:
    save_tiny("bloom", tmp_path)
    with pytest.raises(LMKitError, match="no file describes this model's KV cache; leave kv out"):
        prepare(tmp_path, load_recipe("kv4", TEXT))


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("smoothquant_w8a8", "smooth_quant needs to know what stands before a linear"),
        ("signround_w4a16_g128", "signround does not go with layers that transformers computes"),
        ("mixed_4.5", "average_bits does not go with layers that transformers computes"),
    ],
)
def test_steps_that_need_to_know_the_model_are_refused(tmp_path: Path, recipe: str, reason: str) -> None:
    save_tiny("gpt_neox", tmp_path)
    with pytest.raises(LMKitError, match=reason):
        prepare(tmp_path, load_recipe(recipe, TEXT))


def test_linears_that_read_one_input_and_weights_that_are_read_directly(tmp_path: Path) -> None:
    save_tiny("stablelm", tmp_path / "stablelm")
    block = open_source(tmp_path / "stablelm", "flexible").spec.layers[0].blocks[0].block
    attention = tuple(f"self_attn.{x}_proj" for x in "qkv")
    assert block.fused == (attention, ("mlp.gate_proj", "mlp.up_proj"))
    save_tiny("mamba", tmp_path / "mamba")
    roles = open_source(tmp_path / "mamba", "flexible").spec.layers[0].linears
    assert roles.keys() == {"mixer.in_proj", "mixer.x_proj", "mixer.out_proj"}  # not mixer.dt_proj


class Between(torch.nn.Module):
    """A model that changes states between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        x = torch.zeros(*input_ids.shape, 4)
        for layer in self.layers:
            x = layer(x) * 2
        return transformers.modeling_outputs.CausalLMOutput(logits=x)


def test_layers_that_do_not_follow_each_other_are_refused() -> None:
    model = Between()
    with pytest.raises(LMKitError, match="Between of transformers: states are changed between its layers"):
        Passage(model, list(model.layers), "Between").embed(torch.ones(1, 3, dtype=torch.int64))
