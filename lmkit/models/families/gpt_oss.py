"""gpt-oss: learned sinks, windows on every second layer, and experts with biases and a bounded activation."""

from __future__ import annotations

from typing import Any

from lmkit.errors import UnsupportedError
from lmkit.layers.blocks.mlp import MLPSpec
from lmkit.layers.blocks.moe import MoESpec
from lmkit.models.families import defaults
from lmkit.models.families.llama import integer, layer_spec, model_spec, num_layers, number, typed_windows, windowed
from lmkit.models.registry import family
from lmkit.models.roles import GPT_OSS_EXPERTS, LLAMA_NAMES
from lmkit.models.spec import ModelSpec

BUILT = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}  # the activation clamped_swish has these


@family("GptOssForCausalLM", defaults=defaults.GPT_OSS)
def gpt_oss(hf: dict[str, Any]) -> ModelSpec:
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers(hf))]
    hf = {"layer_types": kinds, "head_dim": 64} | {key: x for key, x in hf.items() if x is not None}
    for name, built in BUILT.items():
        if number(hf, name, built) != built:
            raise UnsupportedError(f"config.json: {name} = {hf[name]!r} is not supported; lmkit runs {built}")
    bias = bool(hf.get("attention_bias", True))
    moe = MoESpec(
        num_experts=integer(hf, "num_local_experts"),
        experts_per_token=integer(hf, "num_experts_per_tok", integer(hf, "experts_per_token", 4)),
        expert=MLPSpec(integer(hf, "intermediate_size"), "clamped_swish", bias=True),
        router_bias=True,
        interleaved=True,
    )
    names = LLAMA_NAMES | GPT_OSS_EXPERTS
    layer = layer_spec(hf, attn_bias=bias, o_bias=bias, has_sinks=True, mlp=moe, names=names)
    return model_spec(hf, windowed(layer, typed_windows(hf, integer(hf, "sliding_window", 128))))
