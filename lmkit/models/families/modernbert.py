"""ModernBERT, an encoder: a token sees the whole text, or in most layers its neighbours on both sides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmkit.errors import UnsupportedError
from lmkit.layers.blocks.mlp import MLPSpec
from lmkit.models.families import defaults
from lmkit.models.families.llama import ACTIVATIONS, integer, layer_spec, model_spec, num_layers, number, typed_layers
from lmkit.models.registry import BASE, family
from lmkit.models.roles import MODERNBERT_NAMES
from lmkit.models.spec import ModelSpec

OWN_ACTIVATIONS = ACTIVATIONS | {"gelu": "gelu_exact"}


@family("ModernBertModel", defaults=defaults.MODERNBERT)
def modernbert(hf: dict[str, Any]) -> ModelSpec:
    """The first layer has no norm before attention: embeddings are normalized already."""
    activation = hf["hidden_activation"]
    if activation not in OWN_ACTIVATIONS:
        known = ", ".join(OWN_ACTIVATIONS)
        raise UnsupportedError(f"config.json: hidden_activation {activation!r} is not supported; lmkit runs {known}")
    if hf.get("rope_scaling"):
        raise UnsupportedError("config.json: rope_scaling is not supported; lmkit runs rope_parameters by layer")
    bias = bool(hf["attention_bias"])
    layer = layer_spec(
        {name: hf[name] for name in ("hidden_size", "num_attention_heads")},
        mlp=MLPSpec(integer(hf, "intermediate_size"), OWN_ACTIVATIONS[activation], bool(hf["mlp_bias"])),
        norm_eps=number(hf, "norm_eps", 0.0),
        norm_bias=True,
        norms_lack_bias=not hf["norm_bias"],
        attn_bias=bias,
        o_bias=bias,
        names=MODERNBERT_NAMES,
        prefix="layers" if hf["architectures"][0].endswith(BASE) else "model.layers",
    )
    period = max(integer(hf, "global_attn_every_n_layers"), 1)
    kinds = ["sliding_attention" if i % period else "full_attention" for i in range(num_layers(hf))]
    hf = hf | {"layer_types": hf.get("layer_types") or kinds}
    bases = number(hf, "global_rope_theta", 0.0), number(hf, "local_rope_theta", 0.0)
    layers = typed_layers(hf, layer, integer(hf, "local_attention") // 2 + 1, bases=bases)
    attention, mlp = layers[0].blocks
    layers[0] = layers[0].having(blocks=(replace(attention, norm=""), mlp))
    return model_spec(hf, layers, embed_norm=True, sees_all=True)
