"""Decoders of known shapes with random weights. They are made on the device; nothing is downloaded or read."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.gpu.roofline import LLAMA_3_2_1B, LLAMA_3_8B, QWEN_2_5_7B, Shape
from lmkit.config import Activations, HeadStorage
from lmkit.layers.linear import MergedLinear, Weights
from lmkit.models import load_spec, roles
from lmkit.models.decoder import Decoder
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.models.head import HEAD_SCHEME
from lmkit.models.layer_spec import LayerSpec
from lmkit.qtensor import QTensor, int_scheme, quantize

GROUP = 128
SCHEME = int_scheme(4, GROUP)
Storage = Literal["w4", "bfloat16"]
TINY = Shape("tiny Llama", 256, 256, 2, 4, 2, 64, 384)  # of a rehearsal
_LLAMA_ROPE = {"rope_theta": 500000.0}
CONFIGS: dict[str, tuple[Shape, dict[str, Any]]] = {
    "Llama-3-8B": (LLAMA_3_8B, _LLAMA_ROPE),
    "Qwen2.5-7B": (QWEN_2_5_7B, {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6, "rms_norm_eps": 1e-6}),
    "Llama-3.2-1B": (LLAMA_3_2_1B, _LLAMA_ROPE | {"tie_word_embeddings": True}),
    "tiny Llama": (TINY, {}),
}


def config(name: str) -> dict[str, Any]:
    """config.json of a model."""
    shape, others = CONFIGS[name]
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    } | others


def random_qtensor(rows: int, columns: int, device: str) -> QTensor:
    """4-bit codes in groups, as an asymmetric quantizer leaves them. The weights are about 1 / sqrt(columns)."""
    groups = columns // GROUP
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=device)
    scales = (torch.rand(rows, groups, device=device) + 0.5) * (columns**-0.5 / 4.6)  # of codes: 4.6
    zeros = torch.randint(7, 9, (rows, groups), dtype=torch.uint8, device=device)
    return QTensor(codes, scales.half(), zeros, SCHEME)


def random_decoder(
    name: str,
    storage: Storage,
    dtype: torch.dtype,
    device: str,
    *,
    head: HeadStorage = "auto",
    activations: Activations = "auto",
) -> Decoder:
    """A packed decoder, ready to run. Embedding and head are dense in `dtype`, unless `head` is int8; with `storage`
    bfloat16, all matrices are. `activations` are those of its layers' linears.

    `device` holds the tensors. The kernels are those of a GPU, emulated for "cpu".
    """
    spec = load_spec(config(name))
    layers = []
    for index, layer_spec in enumerate(spec.layers):
        layer = DecoderLayer(layer_spec, index, _layer(layer_spec, storage, dtype, device), "cuda", dtype)
        layer.pack(activations)
        layers.append(layer)
    embed = _dense(spec.vocab_size, spec.hidden_size, dtype, device)
    weight = embed if spec.tie_embeddings else _dense(spec.vocab_size, spec.hidden_size, dtype, device)
    stored = quantize(weight.float(), HEAD_SCHEME) if head == "int8" else weight
    lm_head = MergedLinear((roles.LM_HEAD,), {roles.LM_HEAD: stored}, "cuda")
    lm_head.pack("exact")
    return Decoder(spec, embed, layers, torch.ones(spec.hidden_size, device=device), lm_head, dtype)


def _layer(spec: LayerSpec, storage: Storage, dtype: torch.dtype, device: str) -> Weights:
    weights: Weights = {role: torch.ones(size, device=device) for role, size in spec.vectors.items()}
    for role, (rows, columns) in spec.linears.items():
        quantized = storage == "w4"
        weights[role] = random_qtensor(rows, columns, device) if quantized else _dense(rows, columns, dtype, device)
        if spec.has_bias(role):
            weights[role + ".bias"] = 0.1 * torch.randn(rows, device=device)
    return weights


def _dense(rows: int, columns: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(rows, columns, dtype=dtype, device=device).mul_(columns**-0.5)
