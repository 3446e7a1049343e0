"""The names of a checkpoint's tensors in a transformers model, by transformers' own rules.

A checkpoint names a linear as its file does, a model by the path of its module. `Names` leads from one to the other, so
a quantized checkpoint loads by the names that it has.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from lmkit.formats.checkpoint import CheckpointReader
from lmkit.formats.views import View, expert_of
from lmkit.models.flexible.experts import BIAS as EXPERT_BIAS
from lmkit.models.flexible.experts import GATE_UP, UP, Mixture, find_mixtures

WEIGHT, BIAS = ".weight", ".bias"
# The tensors of which a quantized linear has one, in any format that lmkit reads.
CODES = (".weight_packed", ".qweight", ".weight_scale", ".weight_scale_inv")
OF_EXPERT = re.compile(r"(.+)\.(\d+)\.(\w+)")


class Names:
    """`modules` maps a module of the file, quantized or not, to the model's module whose weight it is. Experts have
    modules of their own, `experts.3.up_proj`; `views` has those that the file keeps in one tensor. `parts` maps a
    parameter that transformers builds of several weights to the file's modules, one list for each of its patterns.
    """

    def __init__(self, model: Any, reader: CheckpointReader) -> None:
        transforms = get_model_conversion_mapping(model)
        self._renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self._prefix, self._known = model.base_model_prefix, model.state_dict()
        self._mixtures = find_mixtures(model)
        self._at: dict[str, str | None] = {}
        self.modules: dict[str, str] = {}
        self.parts: dict[str, dict[str, list[str]]] = {}
        self.views: dict[str, View] = {}
        for module in dict.fromkeys(weights_of(reader)):
            name, pattern = self._renamed(module + WEIGHT)
            if pattern is None and name in self._known:
                self.modules[module] = name.removesuffix(WEIGHT)
            elif name in self._known:
                self.parts.setdefault(name, {}).setdefault(str(pattern), []).append(module)
            elif (found := self._expert(module)) is not None:
                self.modules[module] = found
        for name, mixture in self._mixtures.items():
            self._resolve(name, mixture)
        self._look_inside(reader)

    def _renamed(self, key: str) -> tuple[str, str | None]:
        """(the name of a tensor of the file in the model, the pattern of a conversion that makes it)."""
        name, pattern = rename_source_key(key, self._renamings, self._converters, self._prefix, self._known)
        return (key, None) if name not in self._known and key in self._known else (name, pattern)

    def _expert(self, module: str) -> str | None:
        """The name in the model of an expert's linear, as `views` and `lmkit quantize` name it."""
        match = OF_EXPERT.fullmatch(module)
        name = match and self._mixture_at(match[1])
        return f"{name}.{match[2]}.{match[3]}" if match and name else None

    def _mixture_at(self, prefix: str) -> str | None:
        """The module of experts that a file has under `prefix`."""
        if prefix not in self._at:
            stems = (self._renamed(f"{prefix}.{first}")[0].removesuffix(f".{first}") for first in (GATE_UP, UP))
            self._at[prefix] = next((stem for stem in (prefix, *stems) if stem in self._mixtures), None)
        return self._at[prefix]

    def _resolve(self, name: str, mixture: Mixture) -> None:
        """Name the experts that the file has one by one and transformers merges."""
        if mixture.transposed:
            return
        found: dict[str, str] = {}
        for parameter in dict.fromkeys(part.parameter for part in mixture.parts):
            patterns = self.parts.get(f"{name}.{parameter}", {})
            makes = [c for c in self._converters if patterns and patterns.keys() <= set(c.source_patterns)]
            if not makes or not all(isinstance(op, MergeModulelist | Concatenate) for op in makes[0].operations):
                return
            merged = [patterns[pattern] for pattern in makes[0].source_patterns if pattern in patterns]
            parts = [part.name for part in mixture.parts if part.parameter == parameter]
            for part_name, modules in zip(parts, merged, strict=False):
                numbers = (re.findall(r"\.(\d+)(?=\.)", module)[-1] for module in modules)
                found |= {m: f"{name}.{number}.{part_name}" for m, number in zip(modules, numbers, strict=True)}
        if set(found.values()) == mixture.sites(name).keys():
            self.modules |= found
            for part in mixture.parts:
                self.parts.pop(f"{name}.{part.parameter}", None)

    def _look_inside(self, reader: CheckpointReader) -> None:
        """Show the experts of tensors that have all of them, where every part of a module can be shown."""
        shown: dict[str, dict[str, str]] = {}
        wanted = {
            f"{name}.{part.parameter}{kind}": (name, mixture, part.parameter)
            for name, mixture in self._mixtures.items() for part in mixture.parts for kind in ("", EXPERT_BIAS)
        }  # fmt: skip
        for source in reader.names() if wanted else ():
            shape = reader.info(source).shape
            target, pattern = self._renamed(source) if len(shape) in (2, 3) else ("", None)
            if target not in wanted:
                continue
            name, mixture, parameter = wanted[target]
            is_bias, theirs = target.endswith(EXPERT_BIAS), tuple(self._known[target].shape)
            turned = not is_bias and shape != theirs and shape == (theirs[0], theirs[2], theirs[1])
            if (pattern is not None and not self._turns(pattern)) or (not turned and shape != theirs):
                continue
            stem = source.removesuffix(WEIGHT).removesuffix(EXPERT_BIAS)
            prefix = stem.removesuffix(f".{parameter}") if stem.endswith(f".{parameter}") else name
            transposed = not is_bias and mixture.transposed is not turned
            suffix = BIAS if is_bias else WEIGHT
            for number, part in itertools.product(range(mixture.num_experts), mixture.parts):
                if part.parameter == parameter:
                    module = f"{prefix}.{number}.{part.name}"
                    self.views[module + suffix] = expert_of(source, shape, number, part.rows, transposed=transposed)
                    shown.setdefault(name, {})[module] = f"{name}.{number}.{part.name}"
        for name, modules in shown.items():
            if set(modules.values()) == self._mixtures[name].sites(name).keys():
                self.modules |= modules
            else:
                for module, kind in itertools.product(modules, (WEIGHT, BIAS)):
                    self.views.pop(module + kind, None)

    def _turns(self, pattern: str) -> bool:
        """Whether a conversion at most swaps inputs and outputs."""
        found = [c for c in self._converters if pattern in c.source_patterns]
        return all(isinstance(op, Transpose) and op.check_dims for c in found for op in c.operations)


def weights_of(reader: CheckpointReader) -> Iterator[str]:
    """The modules with a weight, dense or quantized, in the order of the names; some more than once."""
    for name in reader.names():
        module, _, _ = name.rpartition(".")
        if name.endswith((WEIGHT, *CODES)):
            yield module
