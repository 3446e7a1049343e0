"""Roles: one word for each weight of a decoder layer, whatever a checkpoint calls it.

Smoothing pairs, fusing, tensor-parallel split and LoRA targets are written over roles, once, for every family.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmkit.models.spec import ModelSpec

# role -> the name of its module in a Llama-like checkpoint, below `model.layers.{i}.`
LAYER_NAMES = {
    "norm.attn": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "norm.mlp": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
EMBED, FINAL_NORM, LM_HEAD = "model.embed_tokens", "model.norm", "lm_head"

# Linears that read the same input and become one product when their formats agree.
FUSED = {"attn.qkv": ("attn.q", "attn.k", "attn.v"), "mlp.gate_up": ("mlp.gate", "mlp.up")}
LINEARS = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")

# (what is divided by s, which linears' input columns are multiplied by s): exact in floating point.
SMOOTH = (
    ("norm.attn", ("attn.q", "attn.k", "attn.v")),
    ("attn.v", ("attn.o",)),
    ("norm.mlp", ("mlp.gate", "mlp.up")),
    ("mlp.up", ("mlp.down",)),
)


def linears(spec: ModelSpec, layer: int) -> tuple[str, ...]:
    """The linears of a layer that may be quantized."""
    return LINEARS


def fused(spec: ModelSpec, layer: int) -> tuple[tuple[str, ...], ...]:
    """Linears of a layer that read the same input and become one product when their formats agree."""
    return tuple(FUSED.values())


def smooth(spec: ModelSpec, layer: int) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(what is divided by s, whose input columns are multiplied by s) in the order in which scales are searched."""
    return SMOOTH


def input_of(spec: ModelSpec, layer: int) -> dict[str, str]:
    """role -> the first of the roles that read the same input."""
    first = {role: group[0] for group in fused(spec, layer) for role in group}
    return {role: first.get(role, role) for role in linears(spec, layer)}


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def module_name(layer: int, role: str) -> str:
    """`attn.q` of layer 3 -> `model.layers.3.self_attn.q_proj`."""
    return layer_prefix(layer) + LAYER_NAMES[role]
