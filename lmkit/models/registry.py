"""Families by architecture name, and the checks every config.json passes first: its numbers are untrusted."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.layers.moe_spec import MoESpec
from lmkit.models.spec import ModelSpec

Family = Callable[[dict[str, Any]], ModelSpec]
FAMILIES: dict[str, Family] = {}

# Far above any model there is, low enough that no product of two overflows or is allocated by mistake.
LIMITS = {
    "hidden_size": 1 << 17,
    "num_layers": 1 << 10,
    "num_heads": 1 << 12,
    "num_kv_heads": 1 << 12,
    "head_dim": 1 << 10,
    "intermediate_size": 1 << 19,
    "vocab_size": 1 << 22,
    "max_position": 1 << 26,
}
# The same for sparse layers.
MOE_LIMITS = {"num_experts": 1 << 12, "experts_per_token": 1 << 8, "intermediate_size": 1 << 19}


def family(*architectures: str) -> Callable[[Family], Family]:
    """Register a function from config.json to ModelSpec for these `architectures`."""

    def register(function: Family) -> Family:
        FAMILIES.update(dict.fromkeys(architectures, function))
        return function

    return register


def load_spec(config: dict[str, Any]) -> ModelSpec:
    """The specification of a checkpoint by its config.json. Raises UnsupportedError for an unknown architecture (and
    lists the known ones) and CheckpointError for numbers that cannot be."""
    package = importlib.import_module("lmkit.models.families")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedError(f"config.json: architecture {name!r} is not supported; lmkit runs {known}")
    try:
        spec = FAMILIES[name](config)
    except KeyError as error:
        raise CheckpointError(f"config.json: {error.args[0]!r} is missing") from None
    _check(spec)
    return spec


def _check(spec: ModelSpec) -> None:
    _check_limits(spec, LIMITS)
    if spec.moe is not None:
        _check_moe(spec.moe)
    if spec.num_heads % spec.num_kv_heads:
        raise CheckpointError(
            f"config.json: {spec.num_heads} attention heads cannot share {spec.num_kv_heads} key-value heads evenly"
        )
    rope = spec.rope
    if spec.head_dim % 2 or rope.rotary_dim % 2 or not 2 <= rope.rotary_dim <= spec.head_dim:
        raise CheckpointError(
            f"config.json: head_dim {spec.head_dim} with rotary part {rope.rotary_dim} cannot be rotated"
        )
    if not 0 < spec.norm_eps < 1:
        raise CheckpointError(f"config.json: rms_norm_eps = {spec.norm_eps!r} is not in (0, 1)")
    if not (rope.theta > 1 and rope.factor > 0):
        raise CheckpointError(f"config.json: rope_theta {rope.theta!r}, factor {rope.factor!r} cannot be")


def _check_limits(spec: ModelSpec | MoESpec, limits: dict[str, int], what: str = "") -> None:
    for name, limit in limits.items():
        value = getattr(spec, name)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
            raise CheckpointError(f"config.json: {what}{name} = {value!r} is not in 1 .. {limit}")


def _check_moe(moe: MoESpec) -> None:
    _check_limits(moe, MOE_LIMITS, "experts: ")
    if moe.shared_intermediate_size > MOE_LIMITS["intermediate_size"]:
        raise CheckpointError(f"config.json: shared_expert_intermediate_size = {moe.shared_intermediate_size}")
    if moe.experts_per_token > moe.num_experts:
        raise CheckpointError(f"config.json: a token cannot have {moe.experts_per_token} of {moe.num_experts} experts")
