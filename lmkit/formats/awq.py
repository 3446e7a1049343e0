"""AWQ, version "gemm": 4-bit codes, one float16 scale and one 4-bit zero per group of inputs, asymmetric.

    module.qweight  int32   [in, out / 8]           words of packing.py, along out
    module.qzeros   int32   [in / group, out / 8]
    module.scales   float16 [in / group, out]       w = (code - zero) * scale; also read in other float types

AutoAWQ defined this layout; vLLM, SGLang, LMDeploy and transformers read it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter
from lmkit.formats.dense import read_dense
from lmkit.formats.names import Activations
from lmkit.formats.packing import pack_awq, unpack_awq
from lmkit.formats.parts import (
    FLOATS,
    HEAD,
    Fields,
    field_problem,
    half_scales,
    listed,
    matrix_shape,
    names_problem,
    one_scheme,
    read_part,
    read_scales,
    refuse_beside,
    refuse_extras,
    size_problem,
    stated_or_equal,
)
from lmkit.qtensor import Linears, QTensor, QuantScheme, int_scheme

_FIELDS: Fields = (("bits", "w_bit", (4, None)), ("data_type", "data_type", ("int", None)))


class AwqFormat:
    name = "awq"

    def accepts(self, config: dict[str, Any]) -> str | None:
        return entry_problem(config["quantization_config"])

    def activations(self, config: dict[str, Any]) -> Activations:
        return "none"

    def read_linear(self, reader: CheckpointReader, module: str) -> Tensor | QTensor:
        if (weight := read_if_dense(reader, module)) is not None:
            return weight
        return _read(reader, module)

    def can_write(self, shape: tuple[int, int], scheme: QuantScheme) -> str | None:
        return can_write(shape, scheme)

    def write_linear(
        self, writer: CheckpointWriter, module: str, weight: Tensor | QTensor, *, activations: Activations = "none"
    ) -> None:
        if not isinstance(weight, QTensor):
            writer.add(module + ".weight", weight)
            return
        out_features, in_features = weight.codes.shape
        if reason := can_write((out_features, in_features), weight.scheme):
            raise UnsupportedError(f"{module}: AWQ cannot store it: {reason}")
        scales = half_scales(weight.scales, module, "AWQ")
        writer.add(module + ".qweight", pack_awq(weight.codes.T.contiguous()))
        writer.add(module + ".qzeros", pack_awq(weight.zeros.T.contiguous()))
        writer.add(module + ".scales", scales.T.contiguous())

    def config_entry(
        self, linears: Linears, *, activations: Activations = "none", kv_cache_scheme: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        refuse_extras("AWQ", activations, kv_cache_scheme)
        scheme = one_scheme(linears, "AWQ")
        skipped = [module for module, scheme in linears.items() if scheme is None]
        return {
            "quant_method": "awq",
            "bits": scheme.bits,
            "group_size": scheme.group_size,
            "zero_point": True,  # a symmetric weight is stored with zeros of 8: no engine reads files without them
            "version": "gemm",
            "modules_to_not_convert": sorted(skipped) or None,
        } | ({"lm_head": True} if linears.get(HEAD) else {})


def entry_problem(entry: dict[str, Any]) -> str | None:
    """The reason why a quantization_config of any version of AWQ cannot be read; None if it can."""
    return (
        field_problem(entry, _FIELDS)
        or _group_size_problem(entry)
        or names_problem("modules_to_not_convert", entry.get("modules_to_not_convert"))
    )


def awq_version(config: dict[str, Any]) -> str:
    """The version of a checkpoint in AWQ; empty if it is in another format."""
    entry = config.get("quantization_config")
    if not isinstance(entry, dict) or entry.get("quant_method") != "awq":
        return ""
    return str(entry.get("version") or entry.get("format") or entry.get("checkpoint_format") or "gemm").lower()


def read_if_dense(reader: CheckpointReader, module: str) -> Tensor | None:
    """The weight of a module that is not quantized, None for one that is. Raises CheckpointError."""
    if not reader.has(module + ".qweight"):
        return read_dense(reader, module)
    refuse_beside(reader, module, "qweight", ("weight", "g_idx"))
    if name := listed(module, reader.config["quantization_config"].get("modules_to_not_convert")):
        raise CheckpointError(f"{reader.path}: {module} has a qweight, but modules_to_not_convert lists {name!r}")
    return None


def can_write(shape: tuple[int, int], scheme: QuantScheme) -> str | None:
    """None if a weight [out, in] quantized by `scheme` can be stored, else the reason why it must stay dense."""
    out_features, in_features = shape
    if not scheme.codes.uniform:
        return f"{scheme.codes.words}, AWQ has integers"
    if scheme.bits != 4:
        return f"{scheme.bits} bits, AWQ has 4"
    if scheme.act_order:
        return "activation order, AWQ has groups of neighbours"
    if out_features % 8:
        return f"{out_features} outputs are not a multiple of 8"
    if scheme.group_size != -1 and in_features % scheme.group_size:
        return f"{in_features} inputs are not a multiple of the group size {scheme.group_size}"
    return None


def _read(reader: CheckpointReader, module: str) -> QTensor:
    in_features, words = matrix_shape(reader, module + ".qweight", ("I32",))
    scheme = int_scheme(4, module_group_size(reader, module, in_features))
    if reason := can_write((8 * words, in_features), scheme):
        raise CheckpointError(f"{reader.path}: {module}: {reason}")
    groups = scheme.num_groups(in_features)
    qzeros = read_part(reader, module + ".qzeros", ("I32",), (groups, words))
    scales = read_scales(reader, module + ".scales", (groups, 8 * words)).T.contiguous()
    codes, zeros = (unpack_awq(part).T.contiguous() for part in (reader.tensor(module + ".qweight"), qzeros))
    return QTensor(codes, scales, zeros, scheme)


def module_group_size(reader: CheckpointReader, module: str, in_features: int) -> int:
    """The group size of a module in version "gemm"."""
    num_groups, _ = matrix_shape(reader, module + ".scales", FLOATS)
    return stated_or_equal(group_size(reader.config["quantization_config"]), in_features, num_groups)


def group_size(entry: dict[str, Any]) -> Any:
    """The entry's group size, under either of its names; None if it has none."""
    return entry.get("group_size", entry.get("q_group_size"))


def _group_size_problem(entry: dict[str, Any]) -> str | None:
    size = group_size(entry)
    if size is not None and (problem := size_problem(size)):
        return problem
    if entry.get("q_group_size", size) != size:
        return f"group_size is {size} and q_group_size {entry['q_group_size']!r}"
    return None
