"""Falcon-H1: in each layer attention and Mamba-2 read the same norm, and their sum is added. Linears have factors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmkit.attention_spec import AttentionSpec
from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.layers.blocks.base import two_blocks
from lmkit.layers.blocks.mlp import MLPSpec
from lmkit.layers.blocks.parallel import ParallelSpec
from lmkit.models.families import hybrid_defaults as defaults
from lmkit.models.families.llama import activation, integer, model_spec, num_layers, number, self_attention
from lmkit.models.families.mamba import BAMBA_NAMES, mamba_block
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.registry import family
from lmkit.models.spec import ModelSpec

NAMES = {role: name for role, name in BAMBA_NAMES.items() if not role.startswith("mlp.shared")}
BIASES = ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")  # no published model has one


@family("FalconH1ForCausalLM", defaults=defaults.FALCON_H1)
def falcon_h1(hf: dict[str, Any]) -> ModelSpec:
    """Factors on what attention reads and on its keys are factors on its scores, and on its values."""
    for name in BIASES:
        if hf[name]:
            raise UnsupportedError(f"config.json: {name} of Falcon-H1 is not supported; lmkit runs false")
    normed = bool(hf["mamba_rms_norm"])
    if normed and hf["mamba_norm_before_gate"]:
        raise UnsupportedError("config.json: mamba_norm_before_gate is not supported; lmkit runs false")
    names = "attention_in", "attention_out", "ssm_in", "ssm_out", "key", "embedding", "lm_head"
    read, gave, ssm_in, ssm_out, key, embedding, head = (number(hf, f"{name}_multiplier", 1.0) for name in names)
    gate, down = _factors(hf, "mlp_multipliers", 2)
    hidden, eps = integer(hf, "hidden_size"), number(hf, "rms_norm_eps", 1e-5)
    attention = self_attention(hf)
    scores = AttentionSpec(attention.head_dim**-0.5 * key * read**2)
    heads, *sizes = (integer(hf, f"mamba_{name}") for name in ("n_heads", "d_state", "n_groups", "d_conv"))
    width = integer(hf, "mamba_d_ssm", integer(hf, "mamba_expand") * hidden)
    dim = width // max(heads, 1) if hf["mamba_d_head"] == "auto" else integer(hf, "mamba_d_head")
    mamba = mamba_block(hf, [heads, dim, *sizes], eps, bias=False, conv_bias=bool(hf["mamba_conv_bias"]))
    if mamba.width != width:
        raise CheckpointError(f"config.json: {heads} heads of {dim} are not mamba_d_ssm = {width}")
    mamba = replace(mamba, normed=normed, factors=_factors(hf, "ssm_multipliers", 5))
    mlp = MLPSpec(integer(hf, "intermediate_size"), activation(hf))
    # A gate's factor stands before its activation. So up has it, too, and it is taken from what down reads.
    factors = {"attn.o": read * gave, "ssm.in": ssm_in, "ssm.out": ssm_out, "mlp.gate": gate, "mlp.down": down / gate}
    blocks = two_blocks(ParallelSpec(replace(attention, attention=scores), mamba), mlp)
    layer = LayerSpec(hidden, blocks, eps, names=NAMES, factors=factors)
    return model_spec(hf, [layer] * num_layers(hf), embedding_scale=embedding, logit_scale=head)


def _factors(hf: dict[str, Any], key: str, count: int) -> tuple[float, ...]:
    found = hf.get(key) or [1.0] * count
    if not isinstance(found, list | tuple) or len(found) != count:
        raise CheckpointError(f"config.json: {key} must have {count} entries")
    factors = tuple(number({key: x}, key, 1.0) for x in found)
    if not all(factors):
        raise CheckpointError(f"config.json: {key} = {found!r} cannot be")
    return factors
