"""Families by architecture name, and the checks of every config.json: its numbers are untrusted."""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.layers.blocks.base import check_limits
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.spec import ModelSpec


class NoFamilyError(UnsupportedError):
    """No family computes this config.json. transformers may."""


class UnknownArchitectureError(NoFamilyError):
    """No family has this architecture."""


Family = Callable[[dict[str, Any]], ModelSpec]
FAMILIES: dict[str, Family] = {}
CAUSAL = "ForCausalLM"
BASE = "Model"  # ends the architecture of a model without its head
CLASSIFIER = "ForSequenceClassification"  # and that of a model with a head for classes
MASKED = "ForMaskedLM"  # and that of an encoder with the head that it was trained with, which nobody reads

# Far above any existing model, yet so low that no product of two overflows or is allocated by mistake.
MAX_LAYERS = 1 << 10
LIMITS = {"vocab_size": 1 << 22, "max_position": 1 << 26}
LAYER_LIMITS = {"hidden_size": 1 << 17}


def family(*architectures: str, defaults: Mapping[str, Any] | None = None) -> Callable[[Family], Family]:
    """Register a function from config.json to ModelSpec for these `architectures`. It gets the `defaults` of keys that
    config.json leaves out."""

    def register(function: Family) -> Family:
        @functools.wraps(function)
        def with_defaults(config: dict[str, Any]) -> ModelSpec:
            return function({**(defaults or {}), **config})

        FAMILIES.update(dict.fromkeys(architectures, with_defaults))
        return with_defaults

    return register


def architecture_of(config: dict[str, Any]) -> str:
    """The architecture that a config.json names. Raises CheckpointError if it names none."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError(f"config.json: architectures = {names!r:.100} names none")
    return names[0]


def why_no_family(config: dict[str, Any]) -> str:
    """Why lmkit's own decoder does not compute a config.json; an empty text if it does."""
    try:
        load_spec(config)
    except UnknownArchitectureError:
        return f"lmkit has no family of {architecture_of(config)}, and transformers has"
    except (UnsupportedError, CheckpointError) as error:
        return f"lmkit's family of {architecture_of(config)} refuses it ({error})"
    return ""


def load_spec(config: dict[str, Any]) -> ModelSpec:
    """The specification of a checkpoint by its config.json. Raises UnknownArchitectureError for an unknown
    architecture, listing the known ones, NoFamilyError for what its family does not compute, and CheckpointError for
    impossible numbers."""
    package = importlib.import_module("lmkit.models.families")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    names = config.get("architectures")
    asked = names[0] if isinstance(names, list) and names else None
    name = asked
    for other in (BASE, CLASSIFIER, MASKED):  # the same model, saved without its head; an encoder has none
        if isinstance(asked, str) and asked.endswith(other):
            stem = asked.removesuffix(other)
            name = stem + BASE if stem + BASE in FAMILIES else stem + CAUSAL
    if not isinstance(name, str) or name not in FAMILIES:
        raise _unknown(asked)
    try:
        spec = FAMILIES[name](config)
    except KeyError as error:
        raise CheckpointError(f"config.json: {error.args[0]!r} is missing") from None
    except UnsupportedError as error:
        raise NoFamilyError(str(error)) from None
    if config.get("is_causal") is False or config.get("use_bidirectional_attention") not in (None, False, "vision"):
        spec = spec if spec.sees_all else _seeing_all(spec)
    _check(spec)
    return spec


def _seeing_all(spec: ModelSpec) -> ModelSpec:
    """The model of a family that writes text, whose tokens see later ones."""
    if any(spec.windows) or spec.is_recurrent:
        raise UnsupportedError(
            "config.json: the model's tokens see later ones, through sliding windows or recurrent states; lmkit runs "
            "such models with full attention only"
        )
    return replace(spec, sees_all=True)


def _unknown(name: object) -> UnknownArchitectureError:
    """The error of an architecture that no family is. It tells the families with the most similar names."""
    stems = {known.removesuffix(CAUSAL).removesuffix(BASE): known for known in sorted(FAMILIES)}
    near = difflib.get_close_matches(str(name).removesuffix(CAUSAL).removesuffix(BASE), stems, cutoff=0.5)
    hint = f"the nearest names are {' and '.join(stems[stem] for stem in near)}; " if near else ""
    return UnknownArchitectureError(
        f"config.json: architecture {name!r} is not supported; {hint}lmkit runs {', '.join(stems.values())} "
        "(docs/families.md says how to add one)"
    )


def _check(spec: ModelSpec) -> None:
    check_limits(spec, LIMITS)
    for layer in spec.kinds:
        _check_layer(layer)


def _check_layer(layer: LayerSpec) -> None:
    check_limits(layer, LAYER_LIMITS)
    for block in layer:
        block.check()
    if not 0 < layer.norm_eps < 1:
        raise CheckpointError(f"config.json: rms_norm_eps = {layer.norm_eps!r} is not in (0, 1)")
