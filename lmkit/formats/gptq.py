"""GPTQ, versions 1 and 2: codes of b = 2, 3, 4 or 8 bits, one float16 scale and one zero per group of inputs.

    module.qweight  int32   [in * b / 32, out]      words in sequence, along in
    module.qzeros   int32   [in / group, out * b / 32]      words in sequence, along out
    module.scales   float16 [in / group, out]       w = (code - zero) * scale
    module.g_idx    int32   [in]                    the group of each input

Version 2 (`checkpoint_format` gptq_v2) stores zeros unchanged, version 1 (gptq) stores zero - 1. A version 1 file
cannot hold zero 0: one writer's -1 wraps around to the largest code, another's borrows from the next zero in the word,
and one reader takes the largest code as 2**b. Therefore only symmetric weights are written in version 1, and an
asymmetric file is read only if no zero is stored as the largest code.

Codes of 2 and 3 bits are read as codes of 4 with the same zeros and scales. They are not written.

`dynamic` maps patterns of module names to the differences of these modules. "-:pattern" leaves modules dense;
"+:pattern" or a bare pattern replaces bits, group_size or sym. Patterns match from the name's beginning, and the first
match counts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter
from lmkit.formats.dense import read_dense
from lmkit.formats.packing import pack_words, unpack_words
from lmkit.formats.parts import (
    AUTO_ROUND_NOTES,
    HEAD,
    Activations,
    Fields,
    by_input,
    field_problem,
    half_scales,
    in_groups,
    matrix_shape,
    method_problem,
    of_kernels,
    one_scheme,
    read_part,
    read_scales,
    refuse_beside,
    refuse_extras,
    size_problem,
)
from lmkit.formats.patterns import names_pattern, pattern_problem
from lmkit.qtensor import Linears, QTensor, QuantScheme

_FIELDS: Fields = (
    ("bits", "bits", (2, 3, 4, 8)),
    ("sym", "sym", (True, False)),
    ("desc_act", "desc_act", (False, True, None)),
    ("lm_head", "lm_head", (True, False, None)),
    ("data_type", "data_type", ("int", None)),
    ("pack_dtype", "pack_dtype", ("int32", None)),
    ("is_marlin_format", "is_marlin_format", (False, None)),
    ("modules_in_block_to_quantize", "modules_in_block_to_quantize", (None,)),
)
_READ = {"quant_method", "method", "group_size", "checkpoint_format", "format", "dynamic"}
# Fields that say how the file was made, or how another engine should run it. They do not concern the tensors.
_NOTES = {
    "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment",
    "damp_percent", "dataset", "disable_exllama", "exllama_config", "hyb_act", "max_input_length", "mse", "meta",
    "mock_quantization", "model_file_base_name", "model_name_or_path", "model_seqlen",
    "module_name_preceding_first_block", "offload_to_disk", "offload_to_disk_path", "pack_impl", "pad_token_id",
    "rotation", "static_groups", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama", "v2", "v2_alpha",
}  # fmt: skip
_OVERRIDES = {"bits", "group_size", "sym", "desc_act"}


@dataclass(frozen=True)
class GptqFormat:
    """`name` is the `checkpoint_format`: gptq or gptq_v2."""

    name: str = "gptq"

    @property
    def zero_offset(self) -> int:
        """The number that is subtracted from a zero before it is stored."""
        return 1 if self.name == "gptq" else 0

    def accepts(self, config: dict[str, Any]) -> str | None:
        if problem := method_problem(config, "gptq"):
            return problem
        entry = config["quantization_config"]
        stored = entry.get("checkpoint_format", entry.get("format", "gptq"))
        if stored != self.name or entry.get("format", stored) != stored:
            return f"checkpoint_format is {stored!r}"
        if entry.get("rotation"):
            return f"rotation is {entry['rotation']!r}: activations would have to be rotated"
        return (
            field_problem(entry, _FIELDS, _READ | _NOTES | AUTO_ROUND_NOTES)
            or size_problem(entry.get("group_size"))
            or _dynamic_problem(entry.get("dynamic"))
        )

    def activations(self, config: dict[str, Any]) -> Activations:
        return "none"

    def read_linear(self, reader: CheckpointReader, module: str) -> Tensor | QTensor:
        if not reader.has(module + ".qweight"):
            return read_dense(reader, module)
        refuse_beside(reader, module, "qweight", ("weight",))
        entry = _entry_for(reader.config["quantization_config"], module)
        if entry is None:
            raise CheckpointError(f"{reader.path}: {module} has a qweight, but `dynamic` leaves it dense")
        return self._read(reader, module, QuantScheme(entry["bits"], entry["group_size"], entry["sym"]))

    def _read(self, reader: CheckpointReader, module: str, scheme: QuantScheme) -> QTensor:
        words, out_features = matrix_shape(reader, module + ".qweight", ("I32",))
        in_features = words * 32 // scheme.bits
        if reason := _shape_problem((out_features, in_features), scheme):
            raise CheckpointError(f"{reader.path}: {module}: {reason}")
        groups = scheme.num_groups(in_features)
        qzeros = read_part(reader, module + ".qzeros", ("I32",), (groups, out_features * scheme.bits // 32))
        scales = read_scales(reader, module + ".scales", (groups, out_features)).T.contiguous()
        codes = unpack_words(reader.tensor(module + ".qweight").T.contiguous(), scheme.bits, in_features)
        zeros = self._zeros(reader, module, unpack_words(qzeros, scheme.bits, out_features), scheme)
        return in_groups(reader, module + ".g_idx", of_kernels(QTensor(codes, scales, zeros, scheme)))

    def _zeros(self, reader: CheckpointReader, module: str, stored: Tensor, scheme: QuantScheme) -> Tensor:
        """Zeros [groups, out] as stored -> [out, groups]. Raises CheckpointError if they are ambiguous."""
        where = f"{reader.path}: {module}.qzeros"
        if self.zero_offset and bool((stored == scheme.max_code).any()):
            raise CheckpointError(
                f"{where} holds {scheme.max_code}, which stands for a zero of {scheme.max_code + 1}, or of 0 in this "
                "version 1 of the format; a file of version 2 says which"
            )
        zeros = (stored + self.zero_offset).T.contiguous()
        if scheme.symmetric and bool((zeros != 1 << (scheme.bits - 1)).any()):
            raise CheckpointError(f"{where} are not all {1 << (scheme.bits - 1)}, but `sym` is true")
        return zeros

    def can_write(self, shape: tuple[int, int], scheme: QuantScheme) -> str | None:
        if scheme.kind != "int":
            return "float8 weights, GPTQ has integers"
        if self.zero_offset and not scheme.symmetric:
            return "asymmetric weights: version 1 of GPTQ cannot hold a zero of 0; use gptq_v2"
        return _shape_problem(shape, scheme)

    def write_linear(
        self, writer: CheckpointWriter, module: str, weight: Tensor | QTensor, *, activations: Activations = "none"
    ) -> None:
        if not isinstance(weight, QTensor):
            writer.add(module + ".weight", weight)
            return
        (out_features, in_features), scheme = weight.codes.shape, weight.scheme
        if reason := self.can_write((out_features, in_features), scheme):
            raise UnsupportedError(f"{module}: {self.name} cannot store it: {reason}")
        scales = half_scales(weight.scales, module, self.name)
        codes, groups = by_input(weight)
        zeros = (weight.zeros - self.zero_offset).T.contiguous()
        writer.add(module + ".qweight", pack_words(codes, scheme.bits).T.contiguous())
        writer.add(module + ".qzeros", pack_words(zeros, scheme.bits))
        writer.add(module + ".scales", scales.T.contiguous())
        writer.add(module + ".g_idx", groups)

    def config_entry(
        self, linears: Linears, *, activations: Activations = "none", kv_cache_scheme: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        refuse_extras(self.name, activations, kv_cache_scheme)
        scheme = one_scheme(linears, self.name)
        dense = [module for module, scheme in linears.items() if scheme is None]
        return {
            "quant_method": "gptq",
            "bits": scheme.bits,
            "group_size": scheme.group_size,
            "desc_act": scheme.act_order,
            "sym": scheme.symmetric,
            "checkpoint_format": self.name,
            "pack_dtype": "int32",
            "lm_head": linears.get(HEAD) is not None,
            "dynamic": {f"-:{pattern}": {} for pattern in names_pattern(dense)},
        }


def _shape_problem(shape: tuple[int, int], scheme: QuantScheme) -> str | None:
    """The reason why a weight [out, in] does not fill whole words and groups; None if it does."""
    (out_features, in_features), whole = shape, 32 // math.gcd(32, scheme.bits)  # codes that fill words
    if out_features % whole:
        return f"{out_features} outputs are not a multiple of {whole}"
    if in_features % whole:
        return f"{in_features} inputs are not a multiple of {whole}"
    if scheme.group_size != -1 and in_features % scheme.group_size:
        return f"{in_features} inputs are not a multiple of the group size {scheme.group_size}"
    return None


def _entry_for(entry: dict[str, Any], module: str) -> dict[str, Any] | None:
    """The quantization_config that applies to a module; None if `dynamic` leaves it dense."""
    for key, changes in (entry.get("dynamic") or {}).items():
        sign, pattern = _split(key)
        if re.match(pattern, module):
            return None if sign == "-" else entry | changes
    return entry


def _split(key: str) -> tuple[str, str]:
    """A key of `dynamic` -> (sign, pattern)."""
    return (key[0], key[2:]) if key[:2] in ("-:", "+:") else ("+", key)


def _dynamic_problem(dynamic: Any) -> str | None:
    if dynamic is None:
        return None
    if not isinstance(dynamic, dict):
        return "dynamic is not an object"
    for key, changes in dynamic.items():
        sign, pattern = _split(key)
        if problem := pattern_problem(pattern):
            return f"dynamic: {problem}"
        if sign == "+":
            if not isinstance(changes, dict) or changes.keys() - _OVERRIDES - _NOTES:
                return f"dynamic: {key!r} changes other fields than {', '.join(sorted(_OVERRIDES))}"
            if problem := _override_problem({name: changes[name] for name in changes.keys() & _OVERRIDES}):
                return f"dynamic: {key!r}: {problem}"
    return None


def _override_problem(changes: dict[str, Any]) -> str | None:
    allowed = {field: values for field, _, values in _FIELDS}
    for name, value in changes.items():
        if name == "group_size":
            if problem := size_problem(value):
                return problem
        elif value not in allowed[name] or value is None or type(value) is not type(allowed[name][0]):
            return f"{name} is {value!r}"
    return None
