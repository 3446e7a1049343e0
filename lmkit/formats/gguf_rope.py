"""RoPE of a GGUF file as fields of config.json.

llama.cpp keeps the scaling of Llama 3 as a tensor of divisors, rope_freqs, and LongRoPE's as two of them. All other
kinds are keys below `ARCHITECTURE.rope.scaling`.
"""

from __future__ import annotations

import math
from typing import Any

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.gguf_facts import Facts

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINALS = (8192, 4096, 16384, 32768)  # contexts before the scaling; 8192 is that of Llama 3.1 to 3.3 and of EXAONE 4
FACTORS = (8.0, 16.0, 32.0)
ORIGINAL = "original_max_position_embeddings"
YARN = {
    "attention_factor": "rope.scaling.yarn_attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
UNTRUNCATED = ("gpt-oss",)  # whose bounds of YaRN's ramp are not whole numbers


def rope_fields(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    """rope_scaling and partial_rotary_factor. Raises UnsupportedError for a kind that there is not."""
    size = config.get("head_dim") or config["hidden_size"] // max(int(config["num_attention_heads"]), 1)
    turned, found = facts.number("rope.dimension_count"), {}
    if "qk_rope_head_dim" not in config and turned:
        found["partial_rotary_factor"] = facts.turned(config)
    scaling = _divided(facts, config, int(turned or size)) or _scaled(facts, config)
    return found | ({"rope_scaling": scaling} if scaling else {})


def _scaled(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    kind = facts.file.metadata.get(f"{facts.kind}.rope.scaling.type", "none")
    factor = facts.number("rope.scaling.factor")
    if kind == "none" and (factor := facts.number("rope.scale_linear")) and factor != 1:
        kind = "linear"  # as files of 2023 have it
    if kind in ("none", "longrope"):  # LongRoPE without its tensors
        return {}
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(f"{facts.file.path}: rope.scaling.type {kind!r} is not read from GGUF")
    fields: dict[str, Any] = {"rope_type": kind, "factor": float(factor or 1.0)}
    if kind == "linear":
        return fields
    if facts.number("rope.scaling.yarn_ext_factor") not in (None, 1, -1):
        raise UnsupportedError(f"{facts.file.path}: rope.scaling.yarn_ext_factor other than 1 is not read from GGUF")
    fields |= facts.fields(YARN)
    if original := facts.number("rope.scaling.original_context_length"):
        fields[ORIGINAL] = original
    if log := facts.number("rope.scaling.yarn_log_multiplier"):
        scale = float(f"{10 * log:.6g}") if facts.kind == "deepseek2" else log
        fields |= {"mscale": scale, "mscale_all_dim": scale}
    return fields | ({"truncate": False} if facts.kind in UNTRUNCATED else {})


def _divided(facts: Facts, config: dict[str, Any], turned: int) -> dict[str, Any]:
    """The scaling of a file that has divisors of the frequencies; {} without them."""
    file = facts.file
    names = ("rope_factors_short.weight", "rope_factors_long.weight", "rope_freqs.weight")
    short, long, every = (file.floats(name) for name in names)
    for divisors in (short, long, every):
        if divisors and (len(divisors) != turned // 2 or not all(0 < x < math.inf for x in divisors)):
            raise CheckpointError(f"{file.path}: {len(divisors)} divisors of RoPE do not fit {turned} turned elements")
    if short and long:
        fields: dict[str, Any] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        original = facts.number("rope.scaling.original_context_length")
        attention = facts.number("rope.scaling.attn_factor")
        fields |= {} if attention is None else {"attention_factor": attention}
        return fields | ({} if original is None else {ORIGINAL: original})
    if not every:
        return {}
    if known := _llama3(every, float(config.get("rope_theta", 10000.0))):
        return known
    same = {"rope_type": "longrope", "short_factor": every, "long_factor": every, "attention_factor": 1.0}
    return same | {ORIGINAL: config["max_position_embeddings"]}


def _llama3(divisors: list[float], theta: float) -> dict[str, Any]:
    """Llama 3's scaling, found from its divisors among those of published models; {} if it is none of them."""
    size = 2 * len(divisors)
    if not theta > 1:
        return {}
    for original in ORIGINALS:
        turns = [original / (2 * math.pi) / theta ** (i / size) for i in range(0, size, 2)]  # of the original context
        low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
        ramps = [min(max((turn - low) / (high - low), 0), 1) for turn in turns]
        for factor in (*FACTORS, float(f"{max(divisors):.6g}")):
            expected = (1 / ((1 - ramp) / factor + ramp) for ramp in ramps)
            if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(divisors, expected, strict=True)):
                return {"rope_type": "llama3", "factor": factor, **LLAMA3, ORIGINAL: original}
    return {}
