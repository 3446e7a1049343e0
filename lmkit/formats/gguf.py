"""GGUF checkpoints: llama.cpp's single file, read as the Hugging Face checkpoint from which it was made.

Linears in Q4_0, Q5_0, Q8_0, IQ4_NL and IQ4_XS become QTensors without loss; other quantized tensors become floats. The
known architectures are llama, qwen2 and qwen3. The tokenizer inside the file is not read; a tokenizer.json must be
beside the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmkit.errors import CheckpointError, ConfigError, UnsupportedError
from lmkit.formats.base import get_format
from lmkit.formats.checkpoint import CheckpointWriter, atomic_directory
from lmkit.formats.gguf_blocks import CODED, values
from lmkit.formats.gguf_file import GgufFile, GgufTensor, Storage
from lmkit.formats.verify import verify, weight_digest
from lmkit.qtensor import Linears, QTensor, QuantScheme

Progress = Callable[[int, int], None]  # (tensors done, of how many)

GROUP = 32
ROPE_FREQS = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3_FACTORS = (8.0, 32.0)  # of Llama 3.1 and 3.3, and of 3.2
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LINEARS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_NORMS = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BITS = {"Q4_0": 4, "Q5_0": 8, "Q8_0": 8, "IQ4_NL": 8, "IQ4_XS": 8}  # of types whose groups have an integer zero


class GgufReader:
    """An open GGUF checkpoint with Hugging Face's names: `config` as in config.json, tensors and linears.

    `path` is the file, or a folder with one. Raises CheckpointError, and UnsupportedError for unknown types or
    architectures.
    """

    def __init__(self, path: str | Path) -> None:
        self.file_path = find_gguf(Path(path))
        self.path = self.file_path.parent
        self._file = GgufFile(self.file_path)
        self.config = _config(self._file)
        tensors = self._file.tensors.keys() - {ROPE_FREQS}  # which `config` tells
        self._names = {_hugging_face_name(name, self.file_path): name for name in tensors}

    def names(self) -> list[str]:
        """All tensors, sorted."""
        return sorted(self._names)

    def linears(self) -> dict[str, QuantScheme | None]:
        """Every linear's module and its scheme in the file; None = floats."""
        modules = {name.removesuffix(".weight"): self._info(name) for name in self.names() if _is_linear(name)}
        return {
            module: _scheme(info.storage.name) if info.storage.name in _BITS else None
            for module, info in modules.items()
        }

    def shape(self, module: str) -> tuple[int, int]:
        """[out, in] of a linear."""
        rows, *columns = self._info(module + ".weight").shape
        return rows, columns[0] if columns else 1

    def tensor(self, name: str) -> Tensor:
        """A tensor as floats in the file's type. The values of quantized tensors are rounded to float16."""
        storage, raw = self._info(name).storage, self._file.raw(self._names[name])
        shape = self._info(name).shape
        if storage.name in _FLOATS:
            tensor = raw.view(_FLOATS[storage.name]).reshape(shape)
        else:
            tensor = values(storage.name, raw, storage.nbytes).reshape(shape).half()
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{self._where(name)}: holds numbers that are not finite")
        return self._in_order(name, tensor)

    def read_linear(self, module: str) -> Tensor | QTensor:
        """A linear's weight [out, in], quantized if it is quantized in the file."""
        name = module + ".weight"
        info = self._info(name)
        if info.storage.name not in _BITS:
            return self.tensor(name)
        q = _quantized(info.storage, self._file.raw(self._names[name]), info.shape, self._where(name))
        codes, scales, zeros = (self._in_order(name, part) for part in (q.codes, q.scales, q.zeros))
        return QTensor(codes, scales, zeros, q.scheme)

    def _info(self, name: str) -> GgufTensor:
        if name not in self._names:
            raise CheckpointError(f"{self.file_path}: tensor {name} is missing")
        return self._file.tensors[self._names[name]]

    def _where(self, name: str) -> str:
        return f"{self.file_path}: {self._names[name]}"

    def _in_order(self, name: str, tensor: Tensor) -> Tensor:
        """Rows of q and k in the order of halves. The file has Llama's as rotary pairs: 0, half, 1, half + 1, ..."""
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if heads is None or self.config["architectures"] != ["LlamaForCausalLM"]:
            return tensor
        rows, count = len(tensor), self.config[heads]
        if rows % (2 * count):
            raise CheckpointError(f"{self._where(name)}: {rows} rows are not {count} heads of pairs")
        return tensor.reshape(count, rows // count // 2, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def find_gguf(path: Path) -> Path:
    """The file itself, or the one of a folder. Raises CheckpointError if there is none, or more than one."""
    if path.is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        raise CheckpointError(f"{path}: {len(files)} .gguf files; give the one that is to be read")
    return files[0]


def is_gguf(model: str | Path) -> bool:
    """Whether `model` names a GGUF file, or a folder that holds one and no safetensors."""
    path = Path(model)
    if path.is_dir():
        return any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
    return path.suffix == ".gguf" and path.exists()


def convert_gguf(
    model: str | Path, output: str | Path, format_name: str, *, progress: Progress = lambda done, total: None
) -> Linears:
    """Write a GGUF checkpoint as a Hugging Face folder, completely or not at all, and verify its quantized linears.

    `format_name` "dense" stores all linears as floats. Returns each linear's scheme. Raises ConfigError if `output` is
    occupied, CheckpointError for a damaged file or one without a tokenizer.json beside it, and UnsupportedError for
    linears that the format cannot store.
    """
    reader, target = GgufReader(model), get_format(format_name)
    if not (reader.path / "tokenizer.json").is_file():
        raise CheckpointError(
            f"{reader.path}: a GGUF file needs the model's tokenizer.json beside it (its repository has it); "
            "the tokenizer inside the file is not read"
        )
    linears = dict.fromkeys(reader.linears()) if target.name == "dense" else reader.linears()
    for module, scheme in linears.items():
        if scheme is not None and (reason := target.can_write(reader.shape(module), scheme)):
            raise UnsupportedError(f"{module}: {target.name} cannot store it: {reason}; use another --format, or dense")
    quantized = any(linears.values())
    if target.name != "dense" and not quantized:
        raise ConfigError(f"{reader.file_path}: no linear is quantized; use --format dense")
    with atomic_directory(output) as folder:
        writer, digests = CheckpointWriter(folder), {}
        names = reader.names()
        for number, name in enumerate(names):
            module = name.removesuffix(".weight")
            if linears.get(module) is None:
                writer.add(name, reader.tensor(name))
            else:
                weight = reader.read_linear(module)
                digests[module] = weight_digest(weight)
                target.write_linear(writer, module, weight)
            progress(number + 1, len(names))
        entry = {"quantization_config": target.config_entry(linears)} if quantized else {}
        writer.finish(reader.config | entry, reader.path)
        verify(folder, digests)
    return linears


def _quantized(storage: Storage, raw: Tensor, shape: tuple[int, ...], where: str) -> QTensor:
    """Blocks -> codes uint8 [out, in], positive scales and zeros uint8 [out, in / 32]. Scales are float16, those of
    IQ4_XS float32."""
    if len(shape) != 2:
        raise CheckpointError(f"{where}: is {list(shape)}, expected a matrix")
    rows, columns = shape
    coded = CODED[storage.name](raw.view(-1, storage.nbytes))
    codes, scales = coded.codes.reshape(rows, -1, GROUP), coded.scales.reshape(rows, -1)
    if not bool(scales.isfinite().all()):
        raise CheckpointError(f"{where}: holds scales that are not finite")
    negative = scales.signbit()
    if storage.name == "Q8_0" and bool(negative.any()):  # -128 has no opposite
        raise CheckpointError(f"{where}: holds negative scales")
    scheme = _scheme(storage.name)
    zeros = torch.full((rows, columns // GROUP), 1 << (scheme.bits - 1), dtype=torch.uint8)
    if storage.name == "Q4_0":
        # c d = (-1 - c - (-1)) (-d): half of Q4_0's scales are negative and become positive, with a zero of 7.
        codes, zeros = torch.where(negative[..., None], -1 - codes, codes), zeros - negative.to(torch.uint8)
    else:
        codes = torch.where(negative[..., None], -codes, codes)
    codes = (codes + (1 << (scheme.bits - 1))).to(torch.uint8).reshape(rows, columns)
    scales = scales.abs() if storage.name == "IQ4_XS" else scales.abs().half()
    return QTensor(codes, scales, zeros, scheme)


def _scheme(storage: str) -> QuantScheme:
    return QuantScheme(_BITS[storage], GROUP, symmetric=storage != "Q4_0")


def _hugging_face_name(name: str, path: Path) -> str:
    match = re.fullmatch(r"(?:blk\.(\d{1,5})\.)?(\w+)\.(weight|bias)", name)
    layer, part, kind = match.groups() if match else (None, "", "")
    table = _OUTER if layer is None else _LINEARS | _NORMS
    if part not in table:
        raise UnsupportedError(f"{path}: tensor {name!r} is not part of a model that lmkit reads from GGUF")
    return f"{'' if layer is None else f'model.layers.{layer}.'}{table[part]}.{kind}"


def _is_linear(name: str) -> bool:
    return name.startswith("model.layers.") and name.endswith("_proj.weight")


def _config(file: GgufFile) -> dict[str, Any]:
    """The content of config.json, made from the file's metadata.

    Its numbers are checked like those of every config.json.
    """
    data, path = file.metadata, file.path
    kind = data.get("general.architecture")
    if kind not in _ARCHITECTURES:
        raise UnsupportedError(f"{path}: architecture {kind!r}; lmkit reads {', '.join(_ARCHITECTURES)} from GGUF")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{path}: tensor token_embd.weight is missing")
    if data.get(f"{kind}.attention.sliding_window"):
        raise UnsupportedError(f"{path}: a sliding window is not read from GGUF; use the safetensors checkpoint")
    embedding = file.tensors["token_embd.weight"]

    def number(key: str, default: Any = None) -> Any:
        value = data.get(f"{kind}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointError(f"{path}: {kind}.{key} is {value!r}, expected a number")
        return float(f"{value:.7g}") if isinstance(value, float) else value  # 1e-5 as it was before float32

    heads, hidden = number("attention.head_count"), number("embedding_length")
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": number("attention.key_length", hidden // max(1, int(heads))),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": number("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": {"F32": "float32", "BF16": "bfloat16"}.get(embedding.storage.name, "float16"),
    }
    for key, name in (("bos_token_id", "bos"), ("eos_token_id", "eos")):
        if type(token := data.get(f"tokenizer.ggml.{name}_token_id")) is int:
            config[key] = token
    if kind == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if ROPE_FREQS in file.tensors:
        return config | _llama3_scaling(file, config)
    return config | _rope_scaling(data, kind, path)


def _rope_scaling(data: dict[str, Any], kind: str, path: Path) -> dict[str, Any]:
    scaling = data.get(f"{kind}.rope.scaling.type", "none")
    if scaling == "none":
        return {}
    if scaling not in ("linear", "yarn"):
        raise UnsupportedError(f"{path}: rope.scaling.type {scaling!r} is not read from GGUF")
    fields: dict[str, Any] = {"rope_type": scaling, "factor": data.get(f"{kind}.rope.scaling.factor", 1.0)}
    if (original := data.get(f"{kind}.rope.scaling.original_context_length")) is not None:
        fields["original_max_position_embeddings"] = original
    return {"rope_scaling": fields}


def _llama3_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3's RoPE scaling. The file has what frequencies are divided by, and not the numbers behind that; these are
    found among those of the published models. Raises UnsupportedError if none of them gives the file's divisors."""
    info, size = file.tensors[ROPE_FREQS], config["head_dim"]
    if info.storage.name == "F32" and info.shape == (size // 2,) and size > 0 < config["rope_theta"]:
        divisors = file.raw(ROPE_FREQS).view(torch.float32)
        turns = LLAMA3["original_max_position_embeddings"] / (2 * math.pi)
        turns = turns / config["rope_theta"] ** (torch.arange(0, size, 2) / size)  # of the original context
        low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
        ramp = ((turns - low) / (high - low)).clamp(0, 1)
        for factor in LLAMA3_FACTORS:
            if torch.allclose(divisors, 1 / ((1 - ramp) / factor + ramp), rtol=1e-4):
                return {"rope_scaling": {"rope_type": "llama3", "factor": factor, **LLAMA3}}
    raise UnsupportedError(f"{file.path}: {ROPE_FREQS} is not that of Llama 3.1, 3.2 or 3.3; use the safetensors")
