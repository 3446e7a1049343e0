"""Reading LoRA adapters as PEFT writes them: adapter_config.json and adapter_model.safetensors.

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight   [rank, in]
    base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight   [out, rank]

A linear's output gets scale * B A x, with scale = alpha / rank, or alpha / sqrt(rank) if `use_rslora`
(arXiv 2106.09685, 2312.03732; huggingface.co/docs/peft).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.safetensors_file import SafetensorsFile
from lmkit.jsonfile import read_json
from lmkit.low_rank import DTYPES, MAX_RANK, LowRank

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
CONFIG_BYTES = 1 << 20
PREFIX = "base_model.model."
NAME = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
# Fields that change nothing once the weights exist. All others must ask for nothing.
KNOWN = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "lora_alpha",
    "lora_dropout", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "task_type", "use_rslora",
})  # fmt: skip


@dataclass(frozen=True)
class Adapter:
    """An adapter's additions, by the name of the base model's module (`model.layers.3.self_attn.q_proj`)."""

    path: Path
    additions: Mapping[str, LowRank]
    digest: str  # of both files


def read_adapter(path: str | Path) -> Adapter:
    """Raises CheckpointError for files that are missing, damaged or inconsistent, and UnsupportedError for adapters
    that are not plain LoRA.
    """
    folder = Path(path)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            is_pickle = name == WEIGHTS and (folder / PICKLE).exists()
            hint = f"{PICKLE} may run code; save it as safetensors" if is_pickle else "a LoRA adapter of PEFT has it"
            raise CheckpointError(f"{folder}: no {name}; {hint}")
    config = read_json(folder / CONFIG, CONFIG_BYTES)
    alphas = _checked(config, folder / CONFIG)
    file = SafetensorsFile(folder / WEIGHTS)
    parts: dict[str, dict[str, str]] = {}
    for name in file.infos:
        found = NAME.fullmatch(name)
        if found is None or not name.startswith(PREFIX):
            raise UnsupportedError(f"{file.path}: {name} is no LoRA weight of a linear (lora_A or lora_B)")
        parts.setdefault(found[1].removeprefix(PREFIX), {})[found[2]] = name
    if not parts:
        raise CheckpointError(f"{file.path}: no LoRA weights")
    additions = {module: _addition(file, module, names, alphas, config) for module, names in parts.items()}
    return Adapter(folder, additions, _digest(folder))


def _checked(config: dict[str, Any], where: Path) -> dict[str, float]:
    """alpha by module pattern, "" for all others. Raises CheckpointError or UnsupportedError."""
    if (kind := config.get("peft_type")) != "LORA":
        raise UnsupportedError(f"{where}: peft_type {kind!r}: lmkit serves LoRA adapters alone")
    if config.get("bias", "none") != "none":
        raise UnsupportedError(f"{where}: bias {config['bias']!r}: trained biases are not supported; PEFT can merge it")
    if (start := config.get("init_lora_weights", True)) not in (True, False, None, "gaussian", "eva"):
        why = "the base model's weights were changed for it; save it as plain LoRA"  # PiSSA, OLoRA, CorDA, LoftQ
        raise UnsupportedError(f"{where}: init_lora_weights {str(start)[:64]!r}: {why}")
    for name, value in config.items():
        if name not in KNOWN | {"init_lora_weights"} and value not in (None, False, [], {}, ""):
            raise UnsupportedError(f"{where}: {name}: {str(value)[:64]!r} is not supported; PEFT can merge it")
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{where}: alpha_pattern: expected an object of names and numbers")
    alphas: dict[str, Any] = {"": config.get("lora_alpha"), **patterns}
    for pattern, alpha in alphas.items():
        if type(alpha) not in (int, float) or not abs(alpha) < 1e6:
            raise CheckpointError(f"{where}: lora_alpha {str(alpha)[:64]!r} is not a sensible number")
        if not re.fullmatch(r"[\w.]*", pattern):
            raise UnsupportedError(f"{where}: alpha_pattern {pattern[:64]!r}: names of modules are read, no patterns")
    return alphas


def _addition(
    file: SafetensorsFile, module: str, names: dict[str, str], alphas: dict[str, float], config: dict[str, Any]
) -> LowRank:
    if names.keys() != {"A", "B"}:
        raise CheckpointError(f"{file.path}: {module} has lora_{min(names)} alone")
    a, b = file.tensor(names["A"]), file.tensor(names["B"])
    if not (a.ndim == b.ndim == 2 and 1 <= len(a) == b.shape[1] <= MAX_RANK):
        shapes = f"{list(a.shape)} and {list(b.shape)}"
        raise CheckpointError(f"{file.path}: {module}: lora_A and lora_B are {shapes}, expected [r, in] and [out, r]")
    if not config.get("rank_pattern") and config.get("r") != len(a):
        raise CheckpointError(f"{file.path}: {module}: rank {len(a)}, and {CONFIG} has r {str(config.get('r'))[:64]}")
    if a.dtype not in DTYPES or a.dtype != b.dtype:
        raise CheckpointError(f"{file.path}: {module}: expected float32, bfloat16 or float16, got {a.dtype}, {b.dtype}")
    named = (pattern for pattern in alphas if pattern and (module == pattern or module.endswith("." + pattern)))
    alpha, rank = alphas[next(named, "")], len(a)
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return LowRank(a, b.T.contiguous(), scale)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
