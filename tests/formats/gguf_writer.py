"""GGUF files as llama.cpp's tools write them, and naive encoders and decoders of its block types."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
    "Q5_K": 13, "Q6_K": 14, "IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18, "IQ1_S": 19, "IQ4_NL": 20, "IQ3_S": 21,
    "IQ2_S": 22, "IQ4_XS": 23, "IQ1_M": 29, "BF16": 30,
    "TQ1_0": 34, "TQ2_0": 35, "MXFP4": 39,
}  # fmt: skip
INNER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

ARRAYS = [(bool, "?", 7), (int, "i", 5), (float, "f", 6), (str, "s", 8)]  # type of values, code, type in the file

Encoded = tuple[str, tuple[int, ...], bytes]  # type, shape with the outermost size first, data


def floats(tensor: Tensor) -> Encoded:
    names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    return names[tensor.dtype], tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes()


def q4_0(tensor: Tensor) -> Encoded:
    """Encode as Q4_0. The number of largest magnitude becomes -8, so scales have either sign."""
    data = b""
    for block in tensor.float().reshape(-1, 32).tolist():
        d = torch.tensor(max(block, key=abs) / -8).half()
        codes = [min(15, int(x / float(d) + 8.5)) if d else 8 for x in block]
        data += struct.pack("<e", float(d)) + bytes(codes[i] | codes[i + 16] << 4 for i in range(16))
    return "Q4_0", tuple(tensor.shape), data


def q8_0(tensor: Tensor) -> Encoded:
    data = b""
    for block in tensor.float().reshape(-1, 32):
        d = (block.abs().max() / 127).half()
        codes = (block / d).round().clamp(-127, 127).to(torch.int8).tolist()
        data += struct.pack("<e32b", float(d), *codes)
    return "Q8_0", tuple(tensor.shape), data


def decode(encoded: Encoded) -> Tensor:
    """Decode to float32, block by block, as the description of the type says."""
    kind, shape, data = encoded
    block, decoder = {"Q4_0": (18, _decode_q4_0), "Q8_0": (34, _decode_q8_0), "Q6_K": (210, _decode_q6_k)}[kind]
    values = [value for at in range(0, len(data), block) for value in decoder(data[at : at + block])]
    return torch.tensor(values, dtype=torch.float32).reshape(shape)


def _decode_q4_0(block: bytes) -> list[float]:
    (d,) = struct.unpack_from("<e", block)
    return [(byte % 16 - 8) * d for byte in block[2:]] + [(byte // 16 - 8) * d for byte in block[2:]]


def _decode_q8_0(block: bytes) -> list[float]:
    d, *codes = struct.unpack("<e32b", block)
    return [code * d for code in codes]


def _decode_q6_k(block: bytes) -> list[float]:
    scales, (d,) = struct.unpack_from("<16b", block, 192), struct.unpack_from("<e", block, 208)
    values = []
    for i in range(256):
        half, j, place = i // 128, i % 128 // 32, i % 32
        low = block[64 * half + 32 * (j % 2) + place] >> (4 if j >= 2 else 0) & 15
        high = block[128 + 32 * half + place] >> 2 * j & 3
        values.append(d * scales[i // 16] * ((low | high << 4) - 32))
    return values


def write(path: Path, metadata: dict[str, Any], tensors: dict[str, Encoded], *, alignment: int = 32) -> None:
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        header += _string(key) + _value(value)
    offset, data = 0, b""
    for name, (kind, shape, content) in tensors.items():
        header += _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], TYPES[kind], offset)
        data += content + bytes(-len(content) % alignment)
        offset = len(data)
    path.write_bytes(header + bytes(-len(header) % alignment) + data)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, list):
        code, kind = next(known for known in ARRAYS if isinstance(next(iter(value), ""), known[0]))[1:]
        content = b"".join(map(_string, value)) if code == "s" else struct.pack(f"<{len(value)}{code}", *value)
        return struct.pack("<IIQ", 9, kind, len(value)) + content
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def paired(module: str, tensor: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Llama's rows of q and k as rotary pairs, other tensors as they are."""
    count = {"q_proj": heads, "k_proj": kv_heads}.get(module.split(".")[-1])
    if count is None:
        return tensor
    return tensor.reshape(count, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def halves(module: str, tensor: Tensor, heads: int, kv_heads: int) -> Tensor:
    """The other way round."""
    count = {"q_proj": heads, "k_proj": kv_heads}.get(module.split(".")[-1])
    if count is None:
        return tensor
    return tensor.reshape(count, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def write_model(path: Path, model: Any, encode: Callable[[Tensor], Encoded] = floats) -> dict[str, Encoded]:
    """Write a transformers model as a GGUF file, with its linears encoded by `encode`. Returns the tensors in the
    file's order."""
    config, kind = model.config, model.config.model_type
    metadata = {
        "general.architecture": kind,
        "tokenizer.ggml.tokens": ["<s>", "a", "b"],
        f"{kind}.context_length": config.max_position_embeddings,
        f"{kind}.embedding_length": config.hidden_size,
        f"{kind}.block_count": config.num_hidden_layers,
        f"{kind}.feed_forward_length": config.intermediate_size,
        f"{kind}.attention.head_count": config.num_attention_heads,
        f"{kind}.attention.head_count_kv": config.num_key_value_heads,
        f"{kind}.attention.key_length": getattr(config, "head_dim", config.hidden_size // config.num_attention_heads),
        f"{kind}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{kind}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        module, _, suffix = name.rpartition(".")
        inner = module.split(".", 3)[-1]
        if kind == "llama":
            tensor = paired(module, tensor, config.num_attention_heads, config.num_key_value_heads)
        place = OUTER.get(module) or f"blk.{module.split('.')[2]}.{INNER[inner]}"
        tensors[f"{place}.{suffix}"] = encode(tensor) if inner in INNER and tensor.ndim == 2 else floats(tensor)
    write(path, metadata, tensors)
    return tensors
