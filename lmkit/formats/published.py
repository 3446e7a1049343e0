"""quantization_config as tools publish it -> as the formats of this package read it.

AutoRound writes `quant_method` auto-round, and the tensors of GPTQ, AWQ or others. ModelOpt, AutoGPTQ and AutoAWQ may
leave config.json as it is, and write the entry to a file beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from lmkit.errors import UnsupportedError
from lmkit.jsonfile import read_json

MAX_BYTES = 10 << 20
KEY = "quantization_config"
MARKS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")  # a module with one of these is quantized


class Beside(NamedTuple):
    """A file beside config.json with a `quant_method`'s entry, or an object of it that has one."""

    file: str
    method: str
    object: str | None = None


BESIDE = (
    Beside("quantize_config.json", "gptq"),
    Beside("quant_config.json", "awq"),
    Beside("hf_quant_config.json", "modelopt", "quantization"),
)
ALIASES = {
    "auto_round": "auto-round", "autoround": "auto-round", "intel/auto-round": "auto-round",
    "compressed_tensors": "compressed-tensors", "modelopt_fp4": "modelopt", "modelopt_fp8": "modelopt",
    "fbgemm_fp8": "fp8", "gptq_v2": "gptq",
}  # fmt: skip
NVFP4_GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "format": "nvfp4-pack-quantized",
}
# packing_format of AutoRound -> the entry that describes the same tensors. Zeros of integers are stored minus 1 in
# "auto_gptq", and unchanged in "auto_round" and "gptqmodel".
ZEROS_AS_THEY_ARE = {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
ZEROS_LESS_ONE = {"quant_method": "gptq", "checkpoint_format": "gptq"}
FLOAT8, NVFP4 = ("fp", "fp8", "fp8_e4m3", "fp8_e4m3fn"), ("nv_fp", "nv_fp4", "nvfp4")  # data_type
AWQ = {"quant_method": "awq", "version": "gemm"}
INTEGERS: dict[str, dict[str, Any]] = {
    "auto_round": ZEROS_AS_THEY_ARE,
    "auto_round:gptqmodel": ZEROS_AS_THEY_ARE,
    "auto_round:gptq_v2": ZEROS_AS_THEY_ARE,
    "auto_round:auto_gptq": ZEROS_LESS_ONE,
    "auto_round:gptq": ZEROS_LESS_ONE,
    "auto_round:auto_awq": AWQ,
    "auto_round:awq": AWQ,
}


def as_read(config: dict[str, Any], folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """config.json of a checkpoint in `folder` with tensors of these names, with the entry that formats read. Raises
    UnsupportedError for a layout of AutoRound that no format has, and CheckpointError for a broken file."""
    entry = config.get(KEY)
    if entry is None and any(name.rpartition(".")[2] in MARKS for name in names):
        entry = _beside(folder)
    if not isinstance(entry, dict):
        return config
    if isinstance(inner := entry.get("quantization"), dict):  # ModelOpt's entry as hf_quant_config.json has it
        entry = inner | entry
    method = entry.get("quant_method")
    if method is None and "quant_algo" in entry:
        method = "modelopt"
    if isinstance(method, str):
        method = ALIASES.get(method.lower(), method.lower())
    entry = entry | {"quant_method": method}
    return config | {KEY: entry | _auto_round(entry) if method == "auto-round" else entry}


def _beside(folder: Path) -> dict[str, Any] | None:
    for file, method, name in BESIDE:
        if (folder / file).is_file():
            found = read_json(folder / file, MAX_BYTES)
            entry = found.get(name) if name else found
            return {"quant_method": method} | entry if isinstance(entry, dict) else None
    return None


def _auto_round(entry: dict[str, Any]) -> dict[str, Any]:
    """The fields that replace those of an entry of AutoRound."""
    packing, kind = str(entry.get("packing_format") or "auto_round:auto_gptq").lower(), entry.get("data_type") or "int"
    if kind == "int" and packing.removesuffix(":exllamav2") in INTEGERS:
        return INTEGERS[packing.removesuffix(":exllamav2")]
    if kind in FLOAT8 and entry.get("bits") == 8:
        return {"quant_method": "fp8"}
    if kind in NVFP4 and entry.get("bits") == 4:
        return {"quant_method": "compressed-tensors", "config_groups": {"group_0": NVFP4_GROUP}}
    known = ", ".join(INTEGERS)
    raise UnsupportedError(
        f"config.json: auto-round: packing_format is {packing!r} with data_type {kind!r}; lmkit reads {known} with "
        "integers, float8 and NVFP4"
    )
