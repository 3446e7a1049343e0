"""Gemma 4: layers with a window and without one have heads of different sizes. It answers text. Towers for images and
sound stay in the checkpoint.

After Gemma 3 it has a norm on v, a number that each layer multiplies the residual stream with, and, by its
configuration, keys that are values too, last layers that read the keys and values of earlier ones, vectors of each
token for each layer (layers.per_layer), and experts beside the dense MLP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmkit.attention_spec import AttentionSpec
from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.layers.blocks.base import Residual
from lmkit.layers.blocks.mlp import MLPSpec, PerLayerSpec
from lmkit.layers.blocks.moe import MoESpec
from lmkit.layers.rope_spec import RopeSpec
from lmkit.models.families import defaults
from lmkit.models.families.gemma import rounded
from lmkit.models.families.llama import activation, integer, layer_spec, model_spec, num_layers, number, rope_spec
from lmkit.models.families.nested import beside_towers
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.registry import family
from lmkit.models.roles import BESIDE_EXPERTS, LLAMA_NAMES, PER_LAYER_NAMES, POST_NORM_NAMES
from lmkit.models.spec import ModelSpec

FULL, SLIDING = "full_attention", "sliding_attention"
ROPES = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
TOWERS = ("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio.")


@family("Gemma4ForCausalLM", defaults=defaults.GEMMA4)
def gemma4(hf: dict[str, Any]) -> ModelSpec:
    kinds = _kinds(hf)
    shared = integer(hf, "num_kv_shared_layers", 0)
    sources = _sources(kinds, len(kinds) - shared)
    layers = [_layer(hf, index, kind, sources.get(index)) for index, kind in enumerate(kinds)]
    spec = model_spec(hf, layers, final_softcap=number(hf, "final_logit_softcapping", 0.0))
    tokens = integer(hf, "vocab_size_per_layer_input", 262144) if spec.per_layer else 0
    if spec.per_layer and tokens < spec.vocab_size:
        raise CheckpointError(
            f"config.json: vocab_size_per_layer_input {tokens} is less than vocab_size {spec.vocab_size}: "
            "the tokens beyond it have no vectors"
        )
    return replace(
        spec,
        embedding_scale=rounded(spec.hidden_size**0.5, spec.dtype),
        per_layer_vocab=tokens,
        per_layer_scale=rounded(layers[0].per_layer ** 0.5, spec.dtype),
    )


@family("Gemma4ForConditionalGeneration")
def gemma4_beside_towers(hf: dict[str, Any]) -> ModelSpec:
    return beside_towers(hf, gemma4, TOWERS)


@family("Gemma4UnifiedForCausalLM", defaults=defaults.GEMMA4_UNIFIED)
def gemma4_unified(hf: dict[str, Any]) -> ModelSpec:
    """Tokens have no vectors for each layer, and there are no experts."""
    return gemma4(hf | {"hidden_size_per_layer_input": 0, "enable_moe_block": False})


@family("Gemma4UnifiedForConditionalGeneration")
def gemma4_unified_beside_embedders(hf: dict[str, Any]) -> ModelSpec:
    return beside_towers(hf, gemma4_unified, (*TOWERS, "model.vision_embedder."))


def _kinds(hf: dict[str, Any]) -> list[str]:
    """The last layer has no window, whatever config.json says, as in transformers."""
    count = num_layers(hf)
    kinds = hf.get("layer_types") or [FULL if i % 6 == 5 else SLIDING for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {FULL, SLIDING}:
        raise CheckpointError(f"config.json: layer_types must name {FULL} or {SLIDING} {count} times")
    return [*kinds[:-1], FULL]


def _sources(kinds: list[str], first: int) -> dict[int, int]:
    """Each layer from `first` on reads the keys and values of the last layer of its kind before `first`."""
    last = {kind: index for index, kind in enumerate(kinds[: max(first, 0)])}
    if first < len(kinds) and set(last) != set(kinds):
        raise CheckpointError(f"config.json: num_kv_shared_layers leaves layers of {set(kinds) - set(last)} no keys")
    return {index: last[kinds[index]] for index in range(first, len(kinds))}


def _layer(hf: dict[str, Any], index: int, kind: str, kv_from: int | None) -> LayerSpec:
    bias = bool(hf.get("attention_bias", False))
    is_wide = bool(hf.get("use_double_wide_mlp", False)) and kv_from is not None
    mlp = MLPSpec(integer(hf, "intermediate_size") * (1 + is_wide), activation(hf))
    names = LLAMA_NAMES | POST_NORM_NAMES | PER_LAYER_NAMES
    has_experts = bool(hf.get("enable_moe_block", False))
    heads = _heads(hf, index, kind)
    layer = layer_spec(
        hf | heads,
        attention=AttentionSpec(1.0, window=integer(hf, "sliding_window") if kind == SLIDING else 0),
        rope=_rope(hf, kind, heads["head_dim"]),
        mlp=_experts(hf, mlp) if has_experts else mlp,
        attn_bias=bias, o_bias=bias, qk_norm=True, post_norms=True, value_norm=True,
        key_is_value=bool(hf.get("attention_k_eq_v", False)) and kind == FULL,
        kv_from=kv_from,
        names=names | BESIDE_EXPERTS if has_experts else names,
    )  # fmt: skip
    width, blocks = integer(hf, "hidden_size_per_layer_input"), layer.blocks
    if width:
        blocks += (Residual(PerLayerSpec(width, mlp.activation), norm_out="norm.per_layer_out"),)
    return replace(layer, blocks=(*blocks[:-1], replace(blocks[-1], scale="stream_scale")))


def _heads(hf: dict[str, Any], index: int, kind: str) -> dict[str, int]:
    """head_dim and num_key_value_heads of a layer. transformers writes `per_layer_config`; older files have the sizes
    of all layers without a window."""
    heads = {name: integer(hf, name) for name in ("head_dim", "num_key_value_heads")}
    if "per_layer_config" in hf:
        own = (hf["per_layer_config"] or {}).get(str(index), {})
        if not isinstance(own, dict) or own.keys() - heads:
            raise UnsupportedError(f"config.json: per_layer_config of layer {index} has more than {', '.join(heads)}")
        return heads | {name: integer(own, name) for name in own}
    if kind == FULL:
        heads["head_dim"] = integer(hf, "global_head_dim", 512)
        if hf.get("attention_k_eq_v"):
            heads["num_key_value_heads"] = integer(hf, "num_global_key_value_heads", heads["num_key_value_heads"])
    return heads


def _rope(hf: dict[str, Any], kind: str, head_dim: int) -> RopeSpec:
    given = hf.get("rope_parameters") or ROPES
    if not isinstance(given, dict) or not isinstance(given.get(kind), dict):
        raise CheckpointError(f"config.json: rope_parameters has nothing for {kind}")
    return rope_spec(hf | {"rope_scaling": None, "rope_parameters": given[kind]}, head_dim)


def _experts(hf: dict[str, Any], dense: MLPSpec) -> MoESpec:
    return MoESpec(
        num_experts=integer(hf, "num_experts"),
        experts_per_token=integer(hf, "top_k_experts"),
        expert=replace(dense, intermediate_size=integer(hf, "moe_intermediate_size")),
        shared=dense,
        shared_router=False,
        beside=True,
    )
