"""Small checkpoints, recipes and calibrated layers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmkit.formats.hub import DEMO_FOLDER
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.models.roles import LINEARS, QKV
from lmkit.qtensor import QuantScheme, int_scheme
from lmkit.quant.layer.layer import CalibratedLayer, Geometry
from lmkit.quant.layer.observe import InputStats, Observer
from lmkit.quant.recipe import Recipe, parse_recipe
from tests.models import tiny

SIZES = {
    "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.1,
}  # fmt: skip
# Sizes of which a family of `tiny` has odd ones. With these, groups of 32 divide the inputs of every linear.
WHOLE = {
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 32, "ffn_dim": 96, "v_head_dim": 16,
    "q_lora_rank": 32, "linear_value_head_dim": 16, "mamba_head_dim": 16, "moe_shared_expert_intermediate_size": 64,
    "intermediate_size_mlp": 96, "index_topk": 128,
}  # fmt: skip
# (role whose outputs are divided by s, roles whose input columns are multiplied by s) of a dense layer: exact in
# floating point.
SMOOTH = (("norm.attn", QKV), ("attn.v", ("attn.o",)), ("norm.mlp", ("mlp.gate", "mlp.up")), ("mlp.up", ("mlp.down",)))
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
SCALE = {"step": "awq_scale", "tokens": 128}
CLIP = {"step": "awq_clip", "grid": 5}
RTN = {"step": "rtn"}


def tiny_checkpoint(path: Path, name: str = "llama", **overrides: Any) -> Path:
    """A random model of family `name` with the demo model's tokenizer. Groups of 32 divide its linears."""
    own = tiny.FAMILIES[name][1]
    whole = {key: size for key, size in WHOLE.items() if own.get(key)}
    tiny.make(path, name, **(SIZES | whole | overrides))
    for file in TOKENIZER_FILES:
        shutil.copyfile(DEMO_FOLDER / file, path / file)
    return path


def recipe(*steps: dict[str, Any], rounder: dict[str, Any] | None = RTN, **sections: Any) -> Recipe:
    """A recipe of `steps` and `rounder`. With `rounder` None, `steps` include a rounder."""
    data = {
        "scheme": {"group_size": 32},
        "steps": [*steps, rounder] if rounder else list(steps),
        "calibration": {"num_samples": 6, "seq_len": 48},
    }
    return parse_recipe(data | sections, "test")


def calibrate(
    layer: DecoderLayer,
    hidden: Tensor,
    *,
    num_rows: int,
    group_size: int = 32,
    roles: tuple[str, ...] = LINEARS,
    dtype: torch.dtype = torch.float32,
    scheme: QuantScheme | None = None,
) -> CalibratedLayer:
    """The layer with statistics of `hidden` [num_rows * seq_len, hidden]. Every token is in every sample."""
    spec, tokens = layer.spec, torch.arange(len(hidden))
    scheme = scheme or int_scheme(4, group_size)
    inputs = {
        role: InputStats.empty(spec.linear_shape(role)[1], scheme.group_size, tokens)
        for role in dict.fromkeys(spec.input_of[role] for role in roles)
    }
    geometry = Geometry.of(spec, num_rows, len(hidden) // num_rows)
    layer.observe(Observer(inputs))
    layer(hidden.clone(), None, geometry.batch, geometry.rope, geometry.kv)
    layer.observe(None)
    return CalibratedLayer(layer, inputs, geometry, dict.fromkeys(roles, scheme), lambda _, w: w.to(dtype).float())


def run_layer(calibrated: CalibratedLayer, hidden: Tensor) -> Tensor:
    """The layer's output for the rows that it was calibrated on."""
    geometry = calibrated.sequences
    delta, residual = calibrated.layer(hidden.clone(), None, geometry.batch, geometry.rope, geometry.kv)
    return delta + residual
