"""AWQ, version "gemm": 4-bit codes, one float16 scale and one 4-bit zero per group of inputs, asymmetric.

    module.qweight  int32   [in, out / 8]           words of packing.py, along out
    module.qzeros   int32   [in / group, out / 8]
    module.scales   float16 [in / group, out]       w = (code - zero) * scale

The layout that AutoAWQ defined and vLLM, SGLang, LMDeploy and transformers read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter
from lmkit.formats.dense import read_dense
from lmkit.formats.packing import pack_awq, unpack_awq
from lmkit.qtensor import Linears, QTensor, QuantScheme

# (field, its other spelling, allowed values, None among them if it may be absent). Others decide how tensors are read.
_FIELDS: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("bits", "w_bit", (4,)),
    ("version", "format", ("gemm",)),
    ("zero_point", "zero_point", (True, None)),
    ("desc_act", "desc_act", (False, None)),
    ("lm_head", "lm_head", (False, None)),
    ("modules_in_block_to_quantize", "modules_in_block_to_quantize", (None,)),
)
_READ = {name for field in _FIELDS for name in field[:2]} | {
    "quant_method", "group_size", "q_group_size", "modules_to_not_convert",
}  # fmt: skip
# How the file was made, or how another engine should run it: no meaning for the tensors.
_NOTES = {
    "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_percent",
    "dataset", "do_fuse", "exllama_config", "fuse_max_seq_len", "max_input_length", "meta", "model_seqlen",
    "module_name_preceding_first_block", "modules_to_fuse", "pad_token_id", "sym", "tokenizer", "true_sequential",
}  # fmt: skip


class AwqFormat:
    name = "awq"

    def accepts(self, config: dict[str, Any]) -> str | None:
        entry = config.get("quantization_config")
        if not isinstance(entry, dict):
            return "config.json has no quantization_config object"
        if entry.get("quant_method") != "awq":
            return f"quant_method is {entry.get('quant_method')!r}"
        if unknown := sorted(entry.keys() - _READ - _NOTES):
            return f"quantization_config has unknown fields {', '.join(unknown)}"
        for field, other, allowed in _FIELDS:
            for name in [name for name in (field, other) if name in entry] or [field]:
                value = entry.get(name)
                value = value.lower() if isinstance(value, str) else value
                if value not in allowed or type(value) not in map(type, allowed):
                    return f"{name} is {entry.get(name)!r}, expected {allowed[0]!r}"
        return _group_size_problem(entry) or _skipped_problem(entry)

    def read_linear(self, reader: CheckpointReader, module: str) -> Tensor | QTensor:
        entry = reader.config["quantization_config"]
        if not reader.has(module + ".qweight"):
            return read_dense(reader, module)
        for name in ("weight", "g_idx"):
            if reader.has(f"{module}.{name}"):
                raise CheckpointError(f"{reader.path}: {module} has both qweight and {name}")
        if listed := _listed(module, entry):
            raise CheckpointError(f"{reader.path}: {module} has a qweight, but modules_to_not_convert lists {listed!r}")
        scheme = QuantScheme(bits=4, group_size=_group_size(entry))
        return _read(reader, module, scheme)

    def can_write(self, shape: tuple[int, int], scheme: QuantScheme) -> str | None:
        return can_write(shape, scheme)

    def write_linear(self, writer: CheckpointWriter, module: str, weight: Tensor | QTensor) -> None:
        if not isinstance(weight, QTensor):
            writer.add(module + ".weight", weight)
            return
        out_features, in_features = weight.codes.shape
        if reason := can_write((out_features, in_features), weight.scheme):
            raise UnsupportedError(f"{module}: AWQ cannot store it: {reason}")
        assert weight.scales.dtype == torch.float16
        writer.add(module + ".qweight", pack_awq(weight.codes.T.contiguous()))
        writer.add(module + ".qzeros", pack_awq(weight.zeros.T.contiguous()))
        writer.add(module + ".scales", weight.scales.T.contiguous())

    def config_entry(self, linears: Linears) -> dict[str, Any] | None:
        (scheme,) = {scheme for scheme in linears.values() if scheme is not None}
        skipped = [module for module, scheme in linears.items() if scheme is None]
        return {
            "quant_method": "awq",
            "bits": scheme.bits,
            "group_size": scheme.group_size,
            "zero_point": True,  # a symmetric weight is stored with its zeros, 8: no engine reads files without them
            "version": "gemm",
            "modules_to_not_convert": sorted(skipped) or None,
        }


def can_write(shape: tuple[int, int], scheme: QuantScheme) -> str | None:
    """None if a weight [out, in] quantized by `scheme` can be stored, else why it has to stay dense."""
    out_features, in_features = shape
    if scheme.bits != 4:
        return f"{scheme.bits} bits, AWQ has 4"
    if out_features % 8:
        return f"{out_features} outputs are not a multiple of 8"
    if scheme.group_size != -1 and in_features % scheme.group_size:
        return f"{in_features} inputs are not a multiple of the group size {scheme.group_size}"
    return None


def _read(reader: CheckpointReader, module: str, scheme: QuantScheme) -> QTensor:
    qweight = reader.info(module + ".qweight")
    if qweight.dtype != "I32" or len(qweight.shape) != 2 or 0 in qweight.shape:
        raise CheckpointError(
            f"{reader.path}: {module}.qweight is {qweight.dtype} {list(qweight.shape)}, expected I32 [in, out / 8]"
        )
    in_features, words = qweight.shape
    if reason := can_write((8 * words, in_features), scheme):
        raise CheckpointError(f"{reader.path}: {module}: {reason}")
    groups = scheme.num_groups(in_features)
    for name, dtype, shape in (("qzeros", "I32", (groups, words)), ("scales", "F16", (groups, 8 * words))):
        if not reader.has(f"{module}.{name}"):
            raise CheckpointError(f"{reader.path}: {module} has a qweight but no {name}")
        info = reader.info(f"{module}.{name}")
        if (info.dtype, info.shape) != (dtype, shape):
            raise CheckpointError(
                f"{reader.path}: {module}.{name} is {info.dtype} {list(info.shape)}; qweight {list(qweight.shape)} and "
                f"group_size {scheme.group_size} ask for {dtype} {list(shape)}"
            )
    scales = reader.tensor(module + ".scales").T.contiguous()
    if not bool(scales.isfinite().all()):
        raise CheckpointError(f"{reader.path}: {module}.scales holds numbers that are not finite")
    codes, zeros = (unpack_awq(reader.tensor(f"{module}.{name}")).T.contiguous() for name in ("qweight", "qzeros"))
    return QTensor(codes, scales, zeros, scheme)


def _group_size(entry: dict[str, Any]) -> Any:
    return entry.get("group_size", entry.get("q_group_size"))


def _group_size_problem(entry: dict[str, Any]) -> str | None:
    size = _group_size(entry)
    if type(size) is not int or (size != -1 and not 1 <= size <= 1 << 17):
        return f"group_size is {size!r}, expected a positive number or -1"
    if entry.get("q_group_size", size) != size:
        return f"group_size is {size} and q_group_size {entry['q_group_size']!r}"
    return None


def _skipped_problem(entry: dict[str, Any]) -> str | None:
    skipped = entry.get("modules_to_not_convert") or []
    if not isinstance(skipped, list) or not all(isinstance(name, str) for name in skipped):
        return "modules_to_not_convert is not a list of names"
    return None


def _listed(module: str, entry: dict[str, Any]) -> str | None:
    """The entry of modules_to_not_convert that names `module` or a part of its path, in whole components."""
    skipped = entry.get("modules_to_not_convert") or []
    return next((name for name in skipped if f".{name}." in f".{module}."), None)
