"""OPT: LayerNorms, learned positions, biases everywhere, and an MLP of two linears with ReLU between them."""

from __future__ import annotations

from typing import Any

from lmkit.errors import UnsupportedError
from lmkit.layers.blocks.mlp import MLPSpec
from lmkit.layers.rope_spec import RopeSpec
from lmkit.models.families import defaults
from lmkit.models.families.llama import integer, layer_spec, model_spec, num_layers
from lmkit.models.registry import family
from lmkit.models.roles import OPT_NAMES
from lmkit.models.spec import ModelSpec

EPS = 1e-5  # of torch's LayerNorm, which no config.json names
FIRST_POSITION = 2
# What the forward pass does not vary.
BUILT = {"activation_function": "relu", "enable_bias": True, "layer_norm_elementwise_affine": True}


@family("OPTForCausalLM", defaults=defaults.OPT)
def opt(hf: dict[str, Any]) -> ModelSpec:
    hidden, heads = integer(hf, "hidden_size"), max(integer(hf, "num_attention_heads"), 1)
    before, width = bool(hf.get("do_layer_norm_before", True)), integer(hf, "word_embed_proj_dim", hidden)
    for name, built in BUILT.items():
        if hf.get(name, built) != built:
            raise UnsupportedError(f"config.json: {name} = {hf[name]!r} is not supported; lmkit runs {built}")
    ffn = integer(hf, "ffn_dim")
    layer = layer_spec(
        {"hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": ffn, "rms_norm_eps": EPS},
        rope=RopeSpec(kind="none", rotary_dim=hidden // heads),
        mlp=MLPSpec(ffn, "relu", bias=True),
        attn_bias=True,
        o_bias=True,
        norm_bias=True,
        pre_norms=before,
        stream_norms=not before,
        names=OPT_NAMES,
        prefix="model.decoder.layers",
    )
    flags = {
        "first_position": FIRST_POSITION,
        "final_norm": before and not hf.get("_remove_final_layer_norm", False),
        "projected": 0 if width == hidden else width,
    }
    return model_spec(hf, [layer] * num_layers(hf), **flags)
