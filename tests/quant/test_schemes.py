"""Every kind of scheme, from recipe to a checkpoint that says how it is to be run and is close to the source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from benchmarks.quality_peers.cases import logits
from lmkit.models.roles import LINEARS
from lmkit.models.source import ModelSource
from lmkit.qtensor import QTensor, dequantize, quantize
from lmkit.quant.recipe import load_recipe, parse_recipe
from lmkit.quant.report.evaluate import encode_text
from lmkit.quant.run import prepare
from tests.quant.helpers import CLIP, RTN, SCALE, tiny_checkpoint

CT = {"format": "compressed-tensors"}
INT8_CHANNEL = {"bits": 8, "group_size": "channel", "symmetric": True}
FLOAT8 = {"bits": 8, "type": "float"}
FLOAT4 = {"bits": 4, "type": "float", "group_size": 16}
GPTQ = {"step": "gptq", "loss": 1}
SMOOTH = [{"step": "smooth_quant", "grid": 4}, RTN]
# name -> (recipe, bound of the mean KL, what input_activations says)
CASES: dict[str, tuple[dict[str, Any], float, dict[str, Any] | None]] = {
    "w8a16 grouped": (CT | {"scheme": {"bits": 8, "group_size": 32, "symmetric": True}}, 2e-3, None),
    "w8a16 channel": (CT | {"scheme": INT8_CHANNEL}, 2e-3, None),
    "w8a8": (CT | {"scheme": INT8_CHANNEL, "activations": "int8", "steps": SMOOTH}, 1e-2,
             {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}),
    "fp8 channel": (CT | {"scheme": FLOAT8 | {"group_size": "channel"}, "activations": "float8", "steps": SMOOTH}, 2e-2,
                    {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}),
    "fp8 tensor": (CT | {"scheme": FLOAT8 | {"group_size": "tensor"}}, 2e-2, None),
    "fp8 block": ({"format": "fp8", "scheme": FLOAT8 | {"group_size": "block"}, "activations": "float8"}, 2e-2, None),
    "w4a16 symmetric": (CT | {"scheme": {"group_size": 32, "symmetric": True}, "steps": [SCALE, RTN]}, 0.3, None),
    "nvfp4": (CT | {"scheme": FLOAT4}, 0.3, None),
    "nvfp4 gptq": (CT | {"scheme": FLOAT4, "steps": [SCALE, CLIP, GPTQ]}, 0.2, None),
    "nvfp4 w4a4": (CT | {"scheme": FLOAT4, "activations": "float4", "steps": [*SMOOTH[:1], GPTQ]}, 0.2,
                   {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}),
    "mxfp4 gptq": (CT | {"scheme": FLOAT4 | {"group_size": 32}, "steps": [CLIP, GPTQ]}, 0.2, None),
    "w4a16 gptq": ({"format": "gptq", "scheme": {"group_size": 32, "symmetric": True}}, 0.3, None),
    "w4a16 gptq_v2": ({"format": "gptq_v2", "scheme": {"group_size": 32}}, 0.3, None),
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("source"), num_hidden_layers=1)


@pytest.mark.parametrize("name", CASES)
def test_a_scheme_from_recipe_to_checkpoint(source: Path, tmp_path: Path, name: str) -> None:
    sections, bound, activations = CASES[name]
    data = {"steps": [RTN], "calibration": {"num_samples": 3, "seq_len": 48}} | sections
    asked = parse_recipe(data, name)
    report = prepare(source, asked).run(tmp_path / "out", eval_ids=encode_text(source)[:200])
    assert report.evaluation is not None
    assert report.evaluation.divergence is not None
    assert 0 < report.evaluation.divergence.kl_mean < bound
    before, after = ModelSource(source), ModelSource(tmp_path / "out")
    assert after.format.name == asked.format or after.format.name.startswith("gptq")
    dense, stored = before.layer_weights(0), after.layer_weights(0)
    for role in LINEARS:
        weight, q = dense[role], stored[role]
        assert isinstance(q, QTensor)
        assert q.scheme == asked.grid
        if data["steps"] == [RTN]:
            assert isinstance(weight, torch.Tensor)
            together = [role, *next((fused for fused in before.spec.layers[0].fused if role in fused), ())]
            largest = torch.stack([dense[each].abs().max() for each in together]).max()  # type: ignore[union-attr]
            expected = quantize(weight, q.scheme, largest=largest)
            assert torch.equal(q.codes.view(torch.uint8), expected.codes.view(torch.uint8))
            assert torch.equal(q.scales.float().flatten(), expected.scales.float().flatten())
            assert q.factor == expected.factor
    entry = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    if asked.format == "fp8":
        assert (entry["activation_scheme"], entry["weight_block_size"]) == ("dynamic", [128, 128])
    elif asked.format == "compressed-tensors":
        (group,) = entry["config_groups"].values()
        told = group["input_activations"]
        assert (told if activations is None else {key: told[key] for key in activations}) == activations
    if asked.grid.bits == 4 and asked.scheme.type == "float":
        _transformers_agrees(tmp_path / "out", told)


def _transformers_agrees(path: Path, inputs: dict[str, Any] | None) -> None:
    """It reads the same weights, and the factor of rounded inputs; with exact inputs it computes the same logits."""
    options = {} if inputs else {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    torch.nn.Module.float(model)  # it decodes float4 to bfloat16
    stored = ModelSource(path).layer_weights(0)["mlp.down"]
    assert isinstance(stored, QTensor)
    rounds = dict(model.named_buffers()) | dict(model.named_parameters())
    factor = "model.layers.0.mlp.down_proj.input_global_scale"
    assert (inputs is None) == (factor not in rounds)
    if inputs is not None:
        assert stored.input_factor == rounds[factor]
        assert 1 < float(rounds[factor]) < 1e6
        return
    decoded = rounds["model.layers.0.mlp.down_proj.weight"]
    torch.testing.assert_close(decoded, dequantize(stored), rtol=2**-7, atol=0)  # NVFP4: it multiplies in bfloat16
    ids = list(range(5, 25))
    with torch.inference_mode():
        theirs = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits(path, ids), theirs, rtol=0, atol=2e-2 * float(theirs.abs().max()))


@pytest.mark.parametrize("name", ["glm4-moe", "gpt-oss"])
def test_tensors_keep_their_names(tmp_path: Path, name: str) -> None:
    """Vectors whose names do not end with "weight"."""
    path = tiny_checkpoint(tmp_path / "source", name)
    prepare(path, load_recipe("fp8_channel")).run(tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (path, tmp_path / "out"))
    vectors = {key for key, tensor in before.items() if tensor.ndim == 1 and not key.endswith(("weight", ".bias"))}
    assert vectors
    assert all(torch.equal(before[key], after[key]) for key in vectors)
    assert ModelSource(tmp_path / "out").spec == ModelSource(path).spec
