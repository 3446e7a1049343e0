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
# The same for sparse layers, by kind of checkpoint; {} is the number of an expert.
QWEN_EXPERTS = {
    "mlp.router": "mlp.gate",
    "mlp.experts.{}.gate": "mlp.experts.{}.gate_proj",
    "mlp.experts.{}.up": "mlp.experts.{}.up_proj",
    "mlp.experts.{}.down": "mlp.experts.{}.down_proj",
    "mlp.shared_router": "mlp.shared_expert_gate",
    "mlp.shared.gate": "mlp.shared_expert.gate_proj",
    "mlp.shared.up": "mlp.shared_expert.up_proj",
    "mlp.shared.down": "mlp.shared_expert.down_proj",
}
MIXTRAL_EXPERTS = {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.{}.gate": "block_sparse_moe.experts.{}.w1",
    "mlp.experts.{}.up": "block_sparse_moe.experts.{}.w3",
    "mlp.experts.{}.down": "block_sparse_moe.experts.{}.w2",
}
EMBED, FINAL_NORM, LM_HEAD = "model.embed_tokens", "model.norm", "lm_head"

# Linears that read the same input and become one product when their formats agree.
FUSED = {"attn.qkv": ("attn.q", "attn.k", "attn.v"), "mlp.gate_up": ("mlp.gate", "mlp.up")}
ATTENTION = ("attn.q", "attn.k", "attn.v", "attn.o")
LINEARS = (*ATTENTION, "mlp.gate", "mlp.up", "mlp.down")  # of a dense layer

# Of a dense layer: (what is divided by s, which linears' input columns are multiplied by s): exact in floating point.
SMOOTH = (
    ("norm.attn", ("attn.q", "attn.k", "attn.v")),
    ("attn.v", ("attn.o",)),
    ("norm.mlp", ("mlp.gate", "mlp.up")),
    ("mlp.up", ("mlp.down",)),
)


def linears(spec: ModelSpec, layer: int) -> tuple[str, ...]:
    """The linears of a layer that may be quantized."""
    return (*ATTENTION, *(f"{mlp}.{part}" for mlp in gated_mlps(spec, layer) for part in ("gate", "up", "down")))


def routers(spec: ModelSpec, layer: int) -> tuple[str, ...]:
    """The linears of a sparse layer that decide which expert computes a token, and stay dense."""
    moe = spec.sparse(layer)
    if moe is None:
        return ()
    return ("mlp.router", "mlp.shared_router") if moe.shared_intermediate_size else ("mlp.router",)


def gated_mlps(spec: ModelSpec, layer: int) -> tuple[str, ...]:
    """What the names of a layer's gate, up and down begin with: one MLP, or one for each expert."""
    moe = spec.sparse(layer)
    if moe is None:
        return ("mlp",)
    experts = tuple(f"mlp.experts.{i}" for i in range(moe.num_experts))
    return (*experts, "mlp.shared") if moe.shared_intermediate_size else experts


def expert_of(role: str) -> int | None:
    """3 for `mlp.experts.3.up`; None for what computes every token."""
    return int(role.split(".")[2]) if role.startswith("mlp.experts.") else None


def fused(spec: ModelSpec, layer: int) -> tuple[tuple[str, ...], ...]:
    """Linears of a layer that read the same input and become one product when their formats agree."""
    return (FUSED["attn.qkv"], *((f"{mlp}.gate", f"{mlp}.up") for mlp in gated_mlps(spec, layer)))


def smooth(spec: ModelSpec, layer: int) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(what is divided by s, whose input columns are multiplied by s) in the order in which scales are searched.

    Routers read what the norm gives: they are multiplied too, or tokens would go to other experts.
    """
    mlps = gated_mlps(spec, layer)
    behind_norm = (*routers(spec, layer), *(f"{mlp}.{part}" for mlp in mlps for part in ("gate", "up")))
    return (*SMOOTH[:2], ("norm.mlp", behind_norm), *((f"{mlp}.up", (f"{mlp}.down",)) for mlp in mlps))


def input_of(spec: ModelSpec, layer: int) -> dict[str, str]:
    """role -> the first of the roles that read the same input, for every linear of the layer. An expert reads the
    tokens that are sent to it, the router and the shared expert all of them."""
    first = {role: group[0] for group in fused(spec, layer) for role in group}
    if dense := routers(spec, layer):
        first |= dict.fromkeys((*dense, "mlp.shared.gate", "mlp.shared.up"), dense[0])
    return {role: first.get(role, role) for role in (*linears(spec, layer), *routers(spec, layer))}


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def module_name(spec: ModelSpec, layer: int, role: str) -> str:
    """`attn.q` of layer 3 -> `model.layers.3.self_attn.q_proj`."""
    if role in LAYER_NAMES:
        return layer_prefix(layer) + LAYER_NAMES[role]
    assert spec.moe is not None, role
    expert = expert_of(role)
    pattern = role if expert is None else role.replace(f".{expert}.", ".{}.")
    return layer_prefix(layer) + spec.moe.names[pattern].format(expert)
