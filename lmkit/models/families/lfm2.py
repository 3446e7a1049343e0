"""LFM2: a gated short convolution in most layers, full attention in the others. LFM2-MoE has experts after its first
layers."""

from __future__ import annotations

from typing import Any

from lmkit.errors import CheckpointError
from lmkit.layers.blocks.mlp import MLPSpec
from lmkit.layers.blocks.moe import MoESpec
from lmkit.layers.blocks.short_conv import ShortConvSpec
from lmkit.models.families import defaults
from lmkit.models.families.llama import integer, layer_spec, model_spec, num_layers, number
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.registry import family
from lmkit.models.spec import ModelSpec

CONV, FULL = "conv", "full_attention"
NAMES = {
    "norm.attn": "operator_norm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.out_proj",
    "attn.q_norm": "self_attn.q_layernorm",
    "attn.k_norm": "self_attn.k_layernorm",
    "conv.in": "conv.in_proj",
    "conv.taps": "conv.conv",
    "conv.out": "conv.out_proj",
    "norm.mlp": "ffn_norm",
    "mlp.gate": "feed_forward.w1",
    "mlp.up": "feed_forward.w3",
    "mlp.down": "feed_forward.w2",
    "mlp.router": "feed_forward.gate",
    "mlp.score_bias": "feed_forward.expert_bias",
    "mlp.experts.{}.gate": "feed_forward.experts.{}.w1",
    "mlp.experts.{}.up": "feed_forward.experts.{}.w3",
    "mlp.experts.{}.down": "feed_forward.experts.{}.w2",
}


@family("Lfm2ForCausalLM", defaults=defaults.LFM2)
def lfm2(hf: dict[str, Any]) -> ModelSpec:
    return _model(hf, _layers(hf, _mlp_size(hf)))


@family("Lfm2MoeForCausalLM", defaults=defaults.LFM2_MOE)
def lfm2_moe(hf: dict[str, Any]) -> ModelSpec:
    moe = MoESpec(
        num_experts=integer(hf, "num_experts"),
        experts_per_token=integer(hf, "num_experts_per_tok"),
        expert=MLPSpec(integer(hf, "moe_intermediate_size")),
        normalize=bool(hf["norm_topk_prob"]),
        sigmoid=True,
        score_bias=bool(hf["use_expert_bias"]),
        scale=number(hf, "routed_scaling_factor", 1.0),
    )
    layers, dense = _layers(hf, integer(hf, "intermediate_size")), integer(hf, "num_dense_layers")
    return _model(hf, [layer if i < dense else layer.having(mlp=moe) for i, layer in enumerate(layers)])


def _model(hf: dict[str, Any], layers: list[LayerSpec]) -> ModelSpec:
    return model_spec(hf, layers, tie_embeddings=bool(hf.get("tie_embedding", hf["tie_word_embeddings"])))


def _layers(hf: dict[str, Any], mlp_size: int) -> list[LayerSpec]:
    conv = ShortConvSpec(integer(hf, "hidden_size"), integer(hf, "conv_L_cache"), bool(hf["conv_bias"]))
    shared: dict[str, Any] = {"mlp": MLPSpec(mlp_size), "norm_eps": number(hf, "norm_eps", 1e-5), "names": NAMES}
    made = {CONV: layer_spec(hf, mixer=conv, **shared), FULL: layer_spec(hf, qk_norm=True, **shared)}
    kinds, count = hf.get("layer_types"), num_layers(hf)
    if kinds is None:
        full = hf.get("full_attn_idxs")
        full = list(range(count)) if full is None else full
        kinds = [FULL if isinstance(full, list) and i in full else CONV for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= made.keys():
        raise CheckpointError(f"config.json: layer_types must name {CONV} or {FULL} for each layer")
    return [made[kind] for kind in kinds]


def _mlp_size(hf: dict[str, Any]) -> int:
    """Two thirds of the size that config.json names, times a factor, rounded up to a multiple."""
    size = integer(hf, "block_ff_dim", integer(hf, "intermediate_size"))
    if not hf["block_auto_adjust_ff_dim"]:
        return size
    size = int(number(hf, "block_ffn_dim_multiplier", 1.0) * (2 * size // 3))
    multiple = max(integer(hf, "block_multiple_of"), 1)
    return -(-size // multiple) * multiple
