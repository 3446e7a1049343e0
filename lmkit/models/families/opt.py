"""OPT: LayerNorms, learned positions, biases everywhere, and an MLP of two linears with ReLU between them."""

from __future__ import annotations

from typing import Any

from lmkit.errors import UnsupportedError
from lmkit.layers.mlp_spec import MLPSpec
from lmkit.layers.rope_spec import RopeSpec
from lmkit.models.families.llama import integer, layer_spec, model_spec, num_layers
from lmkit.models.registry import family
from lmkit.models.roles import OPT_NAMES
from lmkit.models.spec import ModelSpec

EPS = 1e-5  # of torch's LayerNorm, which no config.json names
FIRST_POSITION = 2
# What the forward pass does not vary. OPT-350m has its norms behind, and embeddings of another width.
BUILT = {
    "activation_function": "relu", "do_layer_norm_before": True, "enable_bias": True,
    "layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False,
}  # fmt: skip


@family("OPTForCausalLM")
def opt(hf: dict[str, Any]) -> ModelSpec:
    hidden, heads = integer(hf, "hidden_size"), max(integer(hf, "num_attention_heads"), 1)
    for name, built in (BUILT | {"word_embed_proj_dim": hidden}).items():
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
        names=OPT_NAMES,
        prefix="model.decoder.layers",
    )
    return model_spec({"tie_word_embeddings": True} | hf, [layer] * num_layers(hf), first_position=FIRST_POSITION)
