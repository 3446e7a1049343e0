"""Models of Mamba-2: Mamba-2 itself, which has no attention, Granite 4 and Bamba, which have some layers of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.layers.blocks.base import Residual
from lmkit.layers.blocks.mamba import MambaSpec
from lmkit.layers.blocks.mlp import MLPSpec
from lmkit.layers.blocks.moe import MoESpec
from lmkit.models.families import defaults
from lmkit.models.families.granite import granite
from lmkit.models.families.llama import activation, integer, model_spec, num_layers, number
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.registry import family
from lmkit.models.roles import GRANITE_EXPERTS, LLAMA_NAMES
from lmkit.models.spec import ModelSpec

MAX_POSITION = 1 << 18  # config.json of Mamba-2 has none, and a state needs none
PARTS = {
    "ssm.in": "in_proj",
    "ssm.taps": "conv1d",
    "ssm.a_log": "A_log",
    "ssm.d": "D",
    "ssm.dt_bias": "dt_bias",
    "norm.ssm": "norm",
    "ssm.out": "out_proj",
}
MAMBA_NAMES = {"norm.attn": "norm"} | {role: f"mixer.{name}" for role, name in PARTS.items()}
GRANITE_NAMES = LLAMA_NAMES | {role: f"mamba.{name}" for role, name in PARTS.items()}
for _prefix in ("mlp", "mlp.shared"):
    _parts = {"gate": "gate_proj", "up": "up_proj", "down": "output_linear"}
    GRANITE_NAMES |= {f"{_prefix}.{part}": f"shared_mlp.{name}" for part, name in _parts.items()}
GRANITE_NAMES |= GRANITE_EXPERTS
BAMBA_NAMES = GRANITE_NAMES | {"norm.mlp": "pre_ff_layernorm"}
BAMBA_NAMES |= {f"mlp.{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
INFINITE = float("inf"), {"__float__": "Infinity"}  # the latter is how transformers writes it
RECURRENT, FULL = ("mamba", "linear_attention"), ("attention", "full_attention")


@family("Mamba2ForCausalLM", defaults=defaults.MAMBA2)
def mamba2(hf: dict[str, Any]) -> ModelSpec:
    eps = number(hf, "layer_norm_epsilon", 1e-5)
    names = "num_heads", "head_dim", "state_size", "n_groups", "conv_kernel"
    block = mamba_block(hf, [integer(hf, name) for name in names], eps, bool(hf["use_bias"]), bool(hf["use_conv_bias"]))
    _check_width(hf, block, integer(hf, "expand"))
    residual = Residual(block, "norm.attn")
    layer = LayerSpec(integer(hf, "hidden_size"), (residual,), eps, prefix="backbone.layers", names=MAMBA_NAMES)
    return model_spec({"max_position_embeddings": MAX_POSITION} | hf, [layer] * num_layers(hf))


@family("GraniteMoeHybridForCausalLM", defaults=defaults.GRANITE_HYBRID)
def granite_hybrid(hf: dict[str, Any]) -> ModelSpec:
    """Granite's factors. Each layer has an MLP, beside experts if the model has them."""
    dense = granite(hf | {"intermediate_size": integer(hf, "shared_intermediate_size"), "head_dim": None})
    full, (bias, conv_bias) = dense.layers[0], (bool(hf[f"mamba_{part}_bias"]) for part in ("proj", "conv"))
    if hf.get("position_embedding_type") != "rope":
        full = full.having(rope=replace(full.rope, kind="none"))
    heads, *others = (integer(hf, f"mamba_{name}") for name in ("n_heads", "d_state", "n_groups", "d_conv"))
    inner = integer(hf, "mamba_expand") * full.hidden_size
    dim = inner // max(heads, 1) if hf["mamba_d_head"] == "auto" else integer(hf, "mamba_d_head")
    block = mamba_block(hf, [heads, dim, *others], number(hf, "rms_norm_eps", 1e-6), bias, conv_bias)
    _check_width(hf, block, integer(hf, "mamba_expand"))
    full = replace(full, names=GRANITE_NAMES)
    if experts := integer(hf, "num_local_experts", 0):
        full = full.having(mlp=_experts(hf, experts))
    kinds = hf.get("layer_types") or hf.get("layers_block_type") or [RECURRENT[0]] * len(dense.layers)
    if not isinstance(kinds, list) or len(kinds) != len(dense.layers) or not set(kinds) <= {*RECURRENT, *FULL}:
        raise CheckpointError(f"config.json: layer_types must name {RECURRENT[0]} or {FULL[0]} for each layer")
    recurrent = full.having(mixer=block)
    return replace(dense, layers=tuple(recurrent if kind in RECURRENT else full for kind in kinds))


@family("BambaForCausalLM", defaults=defaults.BAMBA)
def bamba(hf: dict[str, Any]) -> ModelSpec:
    """Granite 4 without its factors. RoPE turns half of each head."""
    rope = {"partial_rotary_factor": 0.5} | (hf.get("rope_parameters") or {})
    full = hf.get("attn_layer_indices") or []
    if not isinstance(full, list):
        raise CheckpointError("config.json: attn_layer_indices is not a list of layers")
    kinds = [FULL[0] if i in full else RECURRENT[0] for i in range(num_layers(hf))]
    head_dim = max(integer(hf, "hidden_size") // max(integer(hf, "num_attention_heads"), 1), 1)
    own = {"shared_intermediate_size": hf["intermediate_size"], "num_local_experts": 0, "layer_types": kinds}
    own |= {"position_embedding_type": "rope", "rope_parameters": rope, "attention_multiplier": head_dim**-0.5}
    spec = granite_hybrid(hf | own)
    return replace(spec, layers=tuple(replace(layer, names=BAMBA_NAMES) for layer in spec.layers))


def _experts(hf: dict[str, Any], count: int) -> MoESpec:
    return MoESpec(
        num_experts=count,
        experts_per_token=integer(hf, "num_experts_per_tok"),
        expert=MLPSpec(integer(hf, "intermediate_size"), activation(hf)),
        shared=MLPSpec(integer(hf, "shared_intermediate_size"), activation(hf)),
        shared_router=False,
    )


def mamba_block(hf: dict[str, Any], sizes: list[int], eps: float, bias: bool, conv_bias: bool) -> MambaSpec:
    """`sizes`: num_heads, head_dim, state_size, num_groups, kernel."""
    if hf["hidden_act"] != "silu":
        raise UnsupportedError(f"config.json: hidden_act {hf['hidden_act']!r} of Mamba-2; lmkit runs silu")
    limits = hf.get("time_step_limit") or (0.0, INFINITE[0])
    if not isinstance(limits, list | tuple) or len(limits) != 2:
        raise CheckpointError(f"config.json: time_step_limit = {limits!r} is no pair of numbers")
    low, high = (float("inf") if x in INFINITE else number({"limit": x}, "limit", 0.0) for x in limits)
    heads, dim, size, groups, kernel = sizes
    return MambaSpec(heads, dim, size, groups, kernel, eps, bias, conv_bias, (low, high))


def _check_width(hf: dict[str, Any], block: MambaSpec, expand: int) -> None:
    """Raise CheckpointError if the heads are not as wide as the factor on the hidden size says."""
    if block.width != expand * integer(hf, "hidden_size"):
        raise CheckpointError(
            f"config.json: {block.num_heads} heads of {block.head_dim} are not {expand} times hidden_size"
        )
