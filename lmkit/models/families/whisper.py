"""Whisper: a decoder whose layers attend to the states of an encoder of audio (arXiv 2212.04356)."""

from __future__ import annotations

from typing import Any

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.layers.blocks.base import Residual
from lmkit.layers.blocks.cross import CrossAttentionSpec
from lmkit.layers.blocks.mlp import MLPSpec
from lmkit.layers.rope_spec import RopeSpec
from lmkit.models.audio_spec import PREFIX, AudioSpec
from lmkit.models.families.llama import integer, model_spec, num_layers, self_attention
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.registry import MAX_LAYERS, family
from lmkit.models.roles import WHISPER_NAMES
from lmkit.models.spec import ModelSpec

DEFAULTS: dict[str, Any] = {
    "vocab_size": 51865, "num_mel_bins": 80, "encoder_layers": 4, "encoder_attention_heads": 6, "decoder_layers": 4,
    "decoder_attention_heads": 6, "decoder_ffn_dim": 1536, "encoder_ffn_dim": 1536, "activation_function": "gelu",
    "d_model": 384, "scale_embedding": False, "max_source_positions": 1500, "max_target_positions": 448,
    "tie_word_embeddings": True,
}  # fmt: skip
EPS = 1e-5  # of torch's LayerNorm, which no config.json names
BUILT = {"activation_function": "gelu", "scale_embedding": False, "tie_word_embeddings": True}


@family("WhisperForConditionalGeneration", defaults=DEFAULTS)
def whisper(hf: dict[str, Any]) -> ModelSpec:
    for name, built in BUILT.items():
        if hf[name] != built:
            raise UnsupportedError(f"config.json: {name} = {hf[name]!r} is not supported; lmkit runs {built}")
    hidden, heads, length = (integer(hf, key) for key in ("d_model", "decoder_attention_heads", "max_source_positions"))
    audio = AudioSpec(
        num_layers=integer(hf, "encoder_layers"),
        hidden_size=hidden,
        inner_size=integer(hf, "encoder_ffn_dim"),
        num_heads=integer(hf, "encoder_attention_heads"),
        mel_bins=integer(hf, "num_mel_bins"),
        length=length,
    )
    if not (heads and audio.num_heads) or hidden % heads or hidden % audio.num_heads or audio.num_layers > MAX_LAYERS:
        raise CheckpointError("config.json: d_model, the numbers of heads and encoder_layers do not fit together")
    dim = hidden // heads
    own = {"hidden_size": hidden, "num_attention_heads": heads}
    rope = RopeSpec(kind="none", rotary_dim=dim)
    mixer = self_attention(own, rope=rope, attn_bias=True, unbiased_keys=True, o_bias=True)
    layer = LayerSpec(
        hidden_size=hidden,
        blocks=(
            Residual(mixer, "norm.attn"),
            Residual(CrossAttentionSpec(heads, dim, length), "norm.cross"),
            Residual(MLPSpec(integer(hf, "decoder_ffn_dim"), "gelu", bias=True), "norm.mlp"),
        ),
        norm_eps=EPS,
        norm_bias=True,
        names=WHISPER_NAMES,
        prefix="model.decoder.layers",
    )
    count = num_layers({"num_hidden_layers": hf["decoder_layers"]})
    top = hf | {"max_position_embeddings": integer(hf, "max_target_positions")}
    return model_spec(top, [layer] * count, first_position=0, audio=audio, unread=(PREFIX,))
