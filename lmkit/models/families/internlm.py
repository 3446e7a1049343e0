"""InternLM 2: Llama under other names, with q, k and v in one tensor."""

from __future__ import annotations

from typing import Any

from lmkit.models.families.llama import layer_spec, model_spec, num_layers
from lmkit.models.registry import family
from lmkit.models.roles import LLAMA_NAMES
from lmkit.models.spec import ModelSpec

NAMES = LLAMA_NAMES | {
    "norm.attn": "attention_norm",
    "attn.q": "attention.wq",
    "attn.k": "attention.wk",
    "attn.v": "attention.wv",
    "attn.o": "attention.wo",
    "norm.mlp": "ffn_norm",
    "mlp.gate": "feed_forward.w1",
    "mlp.up": "feed_forward.w3",
    "mlp.down": "feed_forward.w2",
}


@family("InternLM2ForCausalLM")
def internlm2(hf: dict[str, Any]) -> ModelSpec:
    bias = bool(hf.get("bias", True))  # as in its own configuration; published models have none
    layer = layer_spec(hf, attn_bias=bias, o_bias=bias, names=NAMES)
    return model_spec(hf, [layer] * num_layers(hf))
