"""Nemotron-H and Nemotron 3: each layer is one block, of Mamba-2, attention, an MLP without a gate, or experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.layers.blocks.base import Block, Residual
from lmkit.layers.blocks.mlp import MLPSpec
from lmkit.layers.blocks.moe import MoESpec
from lmkit.models.families import defaults
from lmkit.models.families.llama import integer, model_spec, number, self_attention
from lmkit.models.families.mamba import PARTS, mamba_block
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.registry import MAX_LAYERS, family
from lmkit.models.spec import ModelSpec

ACTIVATION = "relu2"
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}  # of hybrid_override_pattern
OLDER = {"mamba": "linear_attention", "attention": "full_attention"}  # names of earlier files
MIXER = {"norm.attn": "norm"} | {role: f"mixer.{name}" for role, name in PARTS.items()}
MIXER |= {f"attn.{x}": f"mixer.{x}_proj" for x in "qkvo"}
MIXER |= {"mlp.router": "mixer.gate", "mlp.score_bias": "mixer.gate.e_score_correction_bias"}
MIXER |= {"mlp.latent_in": "mixer.fc1_latent_proj", "mlp.latent_out": "mixer.fc2_latent_proj"}
for _role, _name in (("mlp", ""), ("mlp.experts.{}", "experts.{}."), ("mlp.shared", "shared_experts.")):
    MIXER |= {f"{_role}.{x}": f"mixer.{_name}{x}_proj" for x in ("up", "down")}


@family("NemotronHForCausalLM", defaults=defaults.NEMOTRON_H)
def nemotron_h(hf: dict[str, Any]) -> ModelSpec:
    """Attention turns no heads. Layers for multi-token prediction are not read."""
    if hf["mlp_hidden_act"] != ACTIVATION:
        raise UnsupportedError(f"config.json: mlp_hidden_act {hf['mlp_hidden_act']!r}; lmkit runs {ACTIVATION}")
    if hf.get("sliding_window") is not None:
        raise UnsupportedError("config.json: sliding_window of Nemotron-H is not supported; lmkit runs null")
    attention = self_attention(hf)
    eps, hidden = number(hf, "layer_norm_epsilon", 1e-5), integer(hf, "hidden_size")
    blocks = {
        "linear_attention": _mamba(hf, eps),
        "full_attention": replace(attention, rope=replace(attention.rope, kind="none")),
        "mlp": MLPSpec(integer(hf, "intermediate_size"), ACTIVATION, bool(hf["mlp_bias"])),
        "moe": _experts(hf),
    }
    layers = {
        kind: LayerSpec(hidden, (Residual(block, "norm.attn"),), eps, prefix="backbone.layers", names=MIXER)
        for kind, block in blocks.items()
    }
    kinds = _kinds(hf)
    if "moe" in kinds and hf.get("moe_latent_size") is not None and hf["mlp_bias"]:
        raise UnsupportedError("config.json: mlp_bias with moe_latent_size is not supported; lmkit runs false")
    return model_spec(hf, [layers[kind] for kind in kinds], unread=("mtp.",))


def _kinds(hf: dict[str, Any]) -> list[str]:
    kinds = hf.get("layers_block_type") or hf.get("layer_types")
    if kinds is None and isinstance(pattern := hf.get("hybrid_override_pattern"), str):
        kinds = [LETTERS.get(letter, letter) for letter in pattern]
    if kinds is None:
        kinds = ["linear_attention", "moe", "full_attention", "mlp"]  # as the class has it
    if not isinstance(kinds, list) or not 1 <= len(kinds) <= MAX_LAYERS:
        raise CheckpointError("config.json: layers_block_type is not a list of kinds of layers")
    kinds = [OLDER.get(kind, kind) for kind in map(str, kinds)]
    if not set(kinds) <= set(LETTERS.values()):
        raise CheckpointError(f"config.json: layers_block_type must name {', '.join(LETTERS.values())}")
    return kinds


def _mamba(hf: dict[str, Any], eps: float) -> Block:
    names = "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"
    limits = [number(hf, "time_step_min", 0.001), float("inf")]  # as transformers has it
    own = {"hidden_act": hf["mamba_hidden_act"], "time_step_limit": limits}
    return mamba_block(hf | own, [integer(hf, x) for x in names], eps, bool(hf["use_bias"]), bool(hf["use_conv_bias"]))


def _experts(hf: dict[str, Any]) -> MoESpec:
    shared = MLPSpec(integer(hf, "moe_shared_expert_intermediate_size"), ACTIVATION, bool(hf["mlp_bias"]))
    return MoESpec(
        num_experts=integer(hf, "n_routed_experts"),
        experts_per_token=integer(hf, "num_experts_per_tok"),
        expert=MLPSpec(integer(hf, "moe_intermediate_size"), ACTIVATION),
        normalize=bool(hf["norm_topk_prob"]),
        sigmoid=True,
        num_groups=integer(hf, "n_group", 1),
        groups_per_token=integer(hf, "topk_group", 1),
        scale=number(hf, "routed_scaling_factor", 1.0),
        shared=shared,
        shared_router=False,
        latent=integer(hf, "moe_latent_size", 0),
    )
