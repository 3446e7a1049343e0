"""DeepSeek-V2, V2-Lite, V3, R1, V3.2, GLM-4.7-Flash and GLM-5: latent attention, dense first layers, then many experts
in groups."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from lmkit.attention_spec import AttentionSpec
from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.layers.blocks.latent import IndexerSpec, LatentSpec
from lmkit.layers.rope_spec import RopeSpec
from lmkit.models.families import defaults
from lmkit.models.families.llama import integer, layer_spec, model_spec, num_layers, rope_spec
from lmkit.models.families.moe import deepseek_experts, with_mtp
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.registry import family
from lmkit.models.roles import LATENT_NAMES
from lmkit.models.spec import ModelSpec

GREEDY, GROUPS = "greedy", "group_limited_greedy"
SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


@family("DeepseekV2ForCausalLM", defaults=defaults.DEEPSEEK_V2)
def deepseek_v2(hf: dict[str, Any]) -> ModelSpec:
    """Experts by softmax. The best expert of a group stands for it. Their scores are not divided by their sum."""
    method = hf.get("topk_method") or GREEDY
    if method not in (GREEDY, GROUPS):
        raise UnsupportedError(f"config.json: topk_method {method!r} is not supported; lmkit runs {GREEDY}, {GROUPS}")
    if hf.get("norm_topk_prob"):
        raise UnsupportedError("config.json: norm_topk_prob of DeepSeek-V2 is not supported; lmkit runs false")
    if method == GREEDY:
        hf = hf | {"n_group": 1, "topk_group": 1}
    return model_spec(hf, deepseek_experts(hf, latent_layers(hf, interleaved=True), sigmoid=False, group_top=1))


@family("DeepseekV3ForCausalLM", defaults=defaults.DEEPSEEK_V3)
def deepseek_v3(hf: dict[str, Any]) -> ModelSpec:
    return with_mtp(hf, latent_layers(hf, interleaved=bool(hf.get("rope_interleave", True))))


@family("DeepseekV32ForCausalLM", defaults=defaults.DEEPSEEK_V32)
def deepseek_v32(hf: dict[str, Any]) -> ModelSpec:
    """An indexer chooses `index_topk` keys for each query. A layer that drafts tokens sees all keys."""
    spec = deepseek_v3(hf)
    return _indexed(hf, spec, [False] * spec.num_layers, interleaved=False)


@family("GlmMoeDsaForCausalLM", defaults=defaults.GLM_MOE_DSA)
def glm_moe_dsa(hf: dict[str, Any]) -> ModelSpec:
    """DeepSeek-V3.2 in which a layer may see what an earlier one has chosen (arXiv 2603.12201)."""
    spec = deepseek_v3(hf)
    return _indexed(hf, spec, _shares_choice(hf, spec.num_layers), interleaved=True)


def _indexed(hf: dict[str, Any], spec: ModelSpec, shared: list[bool], *, interleaved: bool) -> ModelSpec:
    indexer = IndexerSpec(
        num_heads=integer(hf, "index_n_heads"),
        head_dim=integer(hf, "index_head_dim"),
        top_k=integer(hf, "index_topk"),
        interleaved=interleaved,
    )
    layers = zip(spec.layers, shared, strict=True)
    return replace(spec, layers=tuple(x.having(indexer=replace(indexer, shared=follows)) for x, follows in layers))


@family("Glm4MoeLiteForCausalLM", defaults=defaults.GLM4_MOE_LITE)
def glm4_moe_lite(hf: dict[str, Any]) -> ModelSpec:
    """DeepSeek-V3 with its first layer dense, unless `mlp_layer_types` says otherwise."""
    return deepseek_v3(hf | {"first_k_dense_replace": 1})


def _shares_choice(hf: dict[str, Any], count: int) -> list[bool]:
    """Of each layer whether it has no indexer of its own, as config.json says in one of four ways."""
    kinds, pattern = hf.get("indexer_types"), hf.get("index_topk_pattern")
    if kinds is None and pattern is not None:
        kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    if kinds is None:
        every, first = max(integer(hf, "index_topk_freq", 1), 1), integer(hf, "index_skip_topk_offset", 2)
        kinds = ["shared" if max(i - first + 1, 0) % every else "full" for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) < count or kinds[0] != "full" or set(kinds) - {"full", "shared"}:
        raise CheckpointError("config.json: indexer_types must name full or shared for each layer, full for the first")
    return [kind == "shared" for kind in kinds[:count]]


def latent_layers(hf: dict[str, Any], *, interleaved: bool) -> list[LayerSpec]:
    """The layers as dense ones."""
    sizes: dict[str, Any] = {name: integer(hf, name) for name in SIZES} | {"q_lora_rank": integer(hf, "q_lora_rank", 0)}
    latent = LatentSpec(**sizes, num_heads=integer(hf, "num_attention_heads"))
    if not all(getattr(latent, name) for name in SIZES):
        raise CheckpointError(f"config.json: {', '.join(SIZES)} must be positive")
    rope, bias = rope_spec(hf, latent.qk_rope_head_dim), bool(hf.get("attention_bias", False))
    latent = replace(
        latent,
        attention=AttentionSpec(latent.query_dim**-0.5 * _magnitude(rope) ** 2),
        rope=replace(rope, interleaved=interleaved),
        attn_bias=bias,
        o_bias=bias,
    )
    return [layer_spec(hf, mixer=latent, names=LATENT_NAMES)] * num_layers(hf)


def _magnitude(rope: RopeSpec) -> float:
    """The factor on queries and on keys beside YaRN's own on cosines and sines."""
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
