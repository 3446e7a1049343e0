"""compressed-tensors' part of config.json: the scheme of each module. It is read strictly, and written.

    {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
     "config_groups": {"group_0": {"targets": ["Linear"], "weights": {...}, "input_activations": null, ...}},
     "ignore": ["lm_head"], "kv_cache_scheme": null}

A target is a module's name, a pattern of names ("re:...", matched from the name's beginning) or "Linear" for every
linear. If several match, the most specific counts, in this order. `ignore` lists the dense modules in the same form.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from lmkit.config import parse
from lmkit.errors import ConfigError, UnsupportedError
from lmkit.formats.compressed_storages import STORAGES, Storage
from lmkit.formats.mxfp4 import MXFP4
from lmkit.formats.names import Activations
from lmkit.formats.nvfp4 import NVFP4
from lmkit.formats.parts import HEAD, size_problem
from lmkit.formats.patterns import names_pattern, pattern_problem
from lmkit.qtensor import Linears, QuantScheme, float8_scheme, int_scheme

EVERY_LINEAR = "Linear"
FLOAT4 = (NVFP4, MXFP4)
STATUSES = ("compressed", "frozen")  # others have scales that are not final


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of an object. Its other fields say how the file was made, or how another engine should run it."""


class Args(Read, frozen=True):
    """How a tensor is quantized."""

    num_bits: int = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: tuple[int, int] | None = None
    dynamic: bool | str | None = False
    actorder: str | bool | None = None


class Group(Read, frozen=True):
    targets: tuple[str, ...]
    weights: Args | None = None
    input_activations: Args | None = None
    output_activations: Args | None = None
    format: str | None = None


class Entry(Read, frozen=True):
    config_groups: dict[str, Group]
    format: str = "dense"
    quantization_status: str | None = None
    ignore: tuple[str, ...] | None = ()
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None
    moe_sparsity_config: None = None


@dataclass(frozen=True)
class Rule:
    """The storage of the modules that match `targets`."""

    targets: tuple[str, ...]
    scheme: QuantScheme
    storage: Storage
    activations: Activations


@dataclass(frozen=True)
class Rules:
    """The rules of one checkpoint."""

    rules: tuple[Rule, ...]
    ignore: tuple[str, ...]

    def of(self, module: str) -> Rule | None:
        """The rule of a linear; None if it stays dense."""
        if any(_rank(target, module) is not None for target in self.ignore):
            return None
        ranked = [(rank, rule) for rule in self.rules for t in rule.targets if (rank := _rank(t, module)) is not None]
        return min(ranked, key=lambda item: item[0])[1] if ranked else None

    @property
    def activations(self) -> Activations:
        """The activations of the 8-bit weights."""
        return next((rule.activations for rule in self.rules if rule.activations != "none"), "none")


def read_rules(entry: dict[str, Any]) -> Rules:
    """The rules of an entry.

    Raises ConfigError for a malformed entry, UnsupportedError for one that is not supported here.
    """
    return _read_rules(json.dumps(entry, sort_keys=True))


@functools.lru_cache(maxsize=8)
def _read_rules(entry: str) -> Rules:
    given = parse(json.loads(entry), Entry, "quantization_config")
    if given.quantization_status not in (None, *STATUSES):
        known = " or ".join(map(repr, STATUSES))
        raise UnsupportedError(f"quantization_status is {given.quantization_status!r}, expected {known}")
    if given.transform_config and given.transform_config.get("config_groups", True):
        raise UnsupportedError("transform_config: activations would have to be transformed")
    if given.sparsity_config and given.sparsity_config.get("format", "dense") != "dense":
        raise UnsupportedError(f"sparsity_config: {given.sparsity_config.get('format')!r} weights are not read")
    ignore = given.ignore or ()
    for target in (*ignore, *(target for group in given.config_groups.values() for target in group.targets)):
        if target.startswith("re:") and (problem := pattern_problem(target[3:])):
            raise UnsupportedError(problem)
    rules = [_rule(name, group, given.format) for name, group in given.config_groups.items()]
    return Rules(tuple(rule for rule in rules if rule is not None), ignore)


def _rule(name: str, group: Group, default: str) -> Rule | None:
    """The rule of a group; None for a group without weights."""
    try:
        if group.weights is None:
            return None
        scheme = _scheme(group.weights)
        if group.output_activations is not None:
            raise UnsupportedError("output_activations are not computed")
        activations = _activations(group.input_activations)
        storage = _storage(scheme, group.format or default)
        return Rule(group.targets, scheme, storage, activations)
    except UnsupportedError as error:
        raise UnsupportedError(f"{name}: {error}") from None


def _scheme(weights: Args) -> QuantScheme:
    strategy = weights.strategy or {None: "tensor", -1: "channel"}.get(weights.group_size, "group")
    if weights.dynamic:
        raise UnsupportedError(f"dynamic is {weights.dynamic!r} for weights")
    if weights.actorder not in (None, False, "weight", "static", "group", "dynamic"):
        raise UnsupportedError(f"actorder is {weights.actorder!r}")
    if weights.type == "float":
        asked = (weights.num_bits, strategy, weights.group_size, weights.symmetric)
        if found := next((known for known in FLOAT4 if asked == _asked(known)), None):
            return found
        if weights.num_bits != 8 or not weights.symmetric:
            raise UnsupportedError(f"weights are {weights.num_bits}-bit floats, symmetric {weights.symmetric}")
        shapes = {"tensor": (-1, -1), "channel": (1, -1), "block": weights.block_structure}
        shape = shapes.get(strategy)
        if shape is None or (strategy == "block" and min(shape) < 1):
            raise UnsupportedError(f"strategy {strategy!r} of 8-bit floats with blocks {weights.block_structure}")
        return float8_scheme(shape[1], shape[0])
    if weights.num_bits not in (2, 3, 4, 8):
        raise UnsupportedError(f"weights have {weights.num_bits} bits, expected 2, 3, 4 or 8")
    if strategy not in ("group", "channel", "tensor"):
        raise UnsupportedError(f"strategy {strategy!r} of integers")
    size = weights.group_size if strategy == "group" else -1
    if problem := size_problem(size):
        raise UnsupportedError(problem)
    return int_scheme(weights.num_bits, size if size is not None else -1, weights.symmetric)


def _asked(scheme: QuantScheme) -> tuple[int, str, int, bool]:
    """What an entry says of a scheme in groups."""
    return scheme.bits, scheme.scales.strategy, scheme.group_size, scheme.symmetric


def _activations(given: Args | None) -> Activations:
    if given is None or (given.type == "float" and given.num_bits == 4):  # float4, which lmkit leaves exact
        return "none"
    if given.num_bits != 8:
        raise UnsupportedError(f"input_activations have {given.num_bits} bits, expected 8")
    return "int8" if given.type == "int" else "float8"


def _storage(scheme: QuantScheme, name: str) -> Storage:
    """The packing of this name, which other packings of a scheme's kind may have, too."""
    for storage in STORAGES:
        if storage.holds(scheme) and name in (storage.name, *storage.others):
            return storage
    raise UnsupportedError(f"format {name!r} with {scheme.bits}-bit weights of type {scheme.codes.type}")


def _rank(target: str, module: str) -> int | None:
    """The rank of a matching target, the most specific first; None if it does not match."""
    if target.startswith("re:"):
        return 1 if re.match(target[3:], module) else None
    if target == EVERY_LINEAR:
        return 2
    return 0 if target == module else None


def storage_of(scheme: QuantScheme, activations: Activations) -> Storage:
    """The packing of a written weight."""
    return next(storage for storage in STORAGES if storage.writes(scheme, activations))


def make_entry(linears: Linears, activations: Activations, kv_cache_scheme: dict[str, Any] | None) -> dict[str, Any]:
    """config.json's quantization_config. A single scheme is written as "Linear" with `ignore`, several by name."""
    modules: dict[QuantScheme, list[str]] = {}
    for module, scheme in linears.items():
        if scheme is not None:
            modules.setdefault(scheme, []).append(module)
    ignore = sorted({HEAD, *(module for module, scheme in linears.items() if scheme is None)})
    if linears.get(HEAD) is not None:
        ignore.remove(HEAD)
    groups = {}
    for number, (scheme, names) in enumerate(modules.items()):
        targets = [EVERY_LINEAR] if len(modules) == 1 else [f"re:{pattern}" for pattern in names_pattern(names)]
        groups[f"group_{number}"] = {"targets": targets, **_group(scheme, activations)}
    storages = {str(group["format"]) for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": storages.pop() if len(storages) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
        "kv_cache_scheme": kv_cache_scheme,
    }


def _group(scheme: QuantScheme, activations: Activations) -> dict[str, Any]:
    """A config group without its targets."""
    weights: dict[str, Any] = {
        "num_bits": scheme.bits, "type": scheme.codes.type, "symmetric": scheme.symmetric,
        "strategy": "channel", "group_size": None, "dynamic": False, "actorder": None,
    }  # fmt: skip
    if scheme.rows == -1:
        weights["strategy"] = "tensor"
    elif scheme.rows > 1:
        weights |= {"strategy": "block", "block_structure": [scheme.rows, scheme.group_size]}
    elif scheme.group_size != -1:
        weights |= {"strategy": scheme.scales.strategy, "group_size": scheme.group_size} | scheme.scales.told
    return {
        "weights": weights,
        "input_activations": _input_activations(scheme, activations),
        "output_activations": None,
        "format": storage_of(scheme, activations).name,
    }


def _input_activations(scheme: QuantScheme, activations: Activations) -> dict[str, Any] | None:
    """Dynamic activations: a scale for each token, or with weights in blocks for each block's inputs; float4 is in
    groups like the weights. None = exact."""
    if activations == "float4":
        dynamic: bool | str = "local" if scheme.scales.shared else True
        return {
            "num_bits": 4, "type": "float", "symmetric": True, "strategy": scheme.scales.strategy,
            "group_size": scheme.group_size, "dynamic": dynamic, **scheme.scales.told,
        }  # fmt: skip
    if activations == "none" or (scheme.codes.type, scheme.bits) != ("int" if activations == "int8" else "float", 8):
        return None
    in_groups = scheme.rows > 1
    return {
        "num_bits": 8, "type": scheme.codes.type, "symmetric": True, "strategy": "group" if in_groups else "token",
        "group_size": scheme.group_size if in_groups else None, "dynamic": True,
    }  # fmt: skip


def problem(entry: dict[str, Any]) -> str | None:
    """The reason why an entry cannot be read; None if it can."""
    try:
        read_rules(entry)
    except (ConfigError, UnsupportedError) as error:
        return str(error)
    return None
