"""Zamba2: Mamba-2 in all layers. Some of them have attention and an MLP before it, whose weights they share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmkit.attention_spec import AttentionSpec
from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.layers.blocks.base import Residual
from lmkit.layers.blocks.mlp import MLPSpec
from lmkit.layers.blocks.shared import SharedSpec
from lmkit.models.families import hybrid_defaults as defaults
from lmkit.models.families.llama import integer, model_spec, number, self_attention
from lmkit.models.families.mamba import PARTS, mamba_block
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.registry import MAX_LAYERS, family
from lmkit.models.spec import ModelSpec

LINEAR, HYBRID = "linear_attention", "hybrid"
MLPS = {"gelu": "gelu_exact", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}
BY_DEFAULT = [LINEAR] + ([LINEAR] * 5 + [HYBRID]) * 7 + [LINEAR] * 4 + [HYBRID] + [LINEAR] * 3 + [HYBRID] + [LINEAR] * 2
NAMES = {"norm.attn": "input_layernorm"} | {role: f"mamba.{name}" for role, name in PARTS.items()}
HYBRID_NAMES = {"norm.mamba": "mamba_decoder.input_layernorm", "shared.out": "linear"}
HYBRID_NAMES |= {role: f"mamba_decoder.mamba.{name}" for role, name in PARTS.items()}
HYBRID_NAMES |= {"norm.attn": "shared_transformer.input_layernorm", "norm.mlp": "shared_transformer.pre_ff_layernorm"}
HYBRID_NAMES |= {f"attn.{x}": f"shared_transformer.self_attn.{x}_proj" for x in "qkvo"}
HYBRID_NAMES |= {f"mlp.{x}": f"shared_transformer.feed_forward.{x}_proj" for x in ("gate", "up", "down")}


@family("Zamba2ForCausalLM", defaults=defaults.ZAMBA2)
def zamba2(hf: dict[str, Any]) -> ModelSpec:
    """Of the layers with shared weights, those in turns of `num_mem_blocks` have the same ones."""
    for key in ("add_bias_linear", "use_long_context"):  # no published model has one
        if hf[key]:
            raise UnsupportedError(f"config.json: {key} of Zamba2 is not supported; lmkit runs false")
    if hf["hidden_act"] not in MLPS:
        raise UnsupportedError(f"config.json: hidden_act {hf['hidden_act']!r}; lmkit runs {', '.join(MLPS)}")
    hidden, heads, eps = (
        integer(hf, "hidden_size"),
        integer(hf, "num_attention_heads"),
        number(hf, "rms_norm_eps", 1e-5),
    )
    attention = self_attention(hf | {"head_dim": 2 * hidden // max(heads, 1)})
    attention = replace(attention, attention=AttentionSpec((max(attention.head_dim, 1) / 2) ** -0.5))
    if not hf["use_mem_rope"]:
        attention = replace(attention, rope=replace(attention.rope, kind="none"))
    if attention.q_size != 2 * hidden:
        raise CheckpointError(f"config.json: {heads} attention heads cannot share {2 * hidden} evenly")
    count, *sizes = (integer(hf, x) for x in ("n_mamba_heads", "mamba_d_state", "mamba_ngroups", "mamba_d_conv"))
    width = integer(hf, "mamba_expand") * hidden
    limits = {"hidden_act": "silu", "time_step_limit": [number(hf, "time_step_min", 0.001), float("inf")]}
    mamba = mamba_block(hf | limits, [count, width // max(count, 1), *sizes], 1e-5, bias=False, conv_bias=True)
    if mamba.width != width:
        raise CheckpointError(f"config.json: {count} heads of Mamba-2 cannot share {width} evenly")
    mlp = MLPSpec(integer(hf, "intermediate_size", 4 * hidden), MLPS[hf["hidden_act"]])
    linear, layers = LayerSpec(hidden, (Residual(mamba, "norm.attn"),), eps, names=NAMES), []
    kinds, blocks = _kinds(hf), max(integer(hf, "num_mem_blocks"), 1)
    hybrid = [i for i, kind in enumerate(kinds) if kind == HYBRID]
    for i, kind in enumerate(kinds):
        if kind == HYBRID:
            use = hybrid.index(i)
            block = SharedSpec(attention, mlp, mamba, hybrid[use % blocks], use)
            layers.append(LayerSpec(hidden, (Residual(block),), eps, names=HYBRID_NAMES))
        else:
            layers.append(linear)
    return model_spec(hf, layers)


def _kinds(hf: dict[str, Any]) -> list[str]:
    kinds = hf.get("layers_block_type") or hf.get("layer_types") or BY_DEFAULT
    if not isinstance(kinds, list) or not 1 <= len(kinds) <= MAX_LAYERS:
        raise CheckpointError("config.json: layers_block_type is not a list of kinds of layers")
    kinds = [LINEAR if kind == "mamba" else str(kind) for kind in kinds]
    if not set(kinds) <= {LINEAR, HYBRID}:
        raise CheckpointError(f"config.json: layers_block_type must name {LINEAR} or {HYBRID}")
    return kinds
