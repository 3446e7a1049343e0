"""BERT and RoBERTa, encoders: a token sees the whole text. They give embeddings, or classes of texts and pairs."""

from __future__ import annotations

from typing import Any

from lmkit.errors import UnsupportedError
from lmkit.layers.blocks.mlp import UNGATED, MLPSpec
from lmkit.layers.rope_spec import RopeSpec
from lmkit.models.families import defaults
from lmkit.models.families.llama import integer, layer_spec, model_spec, num_layers, number
from lmkit.models.registry import BASE, family
from lmkit.models.roles import BERT_NAMES
from lmkit.models.spec import ModelSpec

# What the forward pass does not vary.
BUILT = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}


@family("BertModel", defaults=defaults.BERT)
def bert(hf: dict[str, Any]) -> ModelSpec:
    return _encoder(hf, "bert", first_position=0)


@family("RobertaModel", defaults=defaults.ROBERTA)
@family("XLMRobertaModel", defaults=defaults.XLM_ROBERTA)
def roberta(hf: dict[str, Any]) -> ModelSpec:
    """Positions begin after that of padding."""
    return _encoder(hf, "roberta", first_position=integer(hf, "pad_token_id", 1) + 1)


def _encoder(hf: dict[str, Any], prefix: str, first_position: int) -> ModelSpec:
    for name, built in BUILT.items():
        if hf.get(name, built) != built:
            raise UnsupportedError(f"config.json: {name} = {hf[name]!r} is not supported; lmkit runs {built}")
    activation = hf["hidden_act"]
    if activation not in UNGATED:
        known = ", ".join(UNGATED)
        raise UnsupportedError(f"config.json: hidden_act {activation!r} is not supported; this family has {known}")
    heads = max(integer(hf, "num_attention_heads"), 1)
    layer = layer_spec(
        {name: hf[name] for name in ("hidden_size", "intermediate_size")} | {"num_attention_heads": heads},
        rope=RopeSpec(kind="none", rotary_dim=integer(hf, "hidden_size") // heads),
        mlp=MLPSpec(integer(hf, "intermediate_size"), activation, bias=True),
        norm_eps=number(hf, "layer_norm_eps", 0.0),
        attn_bias=True,
        o_bias=True,
        norm_bias=True,
        pre_norms=False,
        stream_norms=True,
        names=BERT_NAMES,
        prefix="encoder.layer" if hf["architectures"][0].endswith(BASE) else f"{prefix}.encoder.layer",
    )
    flags = {
        "first_position": first_position,
        "max_position": integer(hf, "max_position_embeddings") - first_position,
        "token_types": integer(hf, "type_vocab_size"),
        "embed_norm": True,
        "final_norm": False,
        "sees_all": True,
    }
    return model_spec(hf, [layer] * num_layers(hf), **flags)
