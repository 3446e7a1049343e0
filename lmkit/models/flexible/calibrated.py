"""What a recipe asks of a checkpoint that transformers computes: layers one at a time, embeddings and logits."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lmkit.devices import named
from lmkit.errors import UnsupportedError
from lmkit.layers.linear import Weights
from lmkit.models.flexible.experts import UP
from lmkit.models.flexible.interface import use
from lmkit.models.flexible.layer import ForeignLayer, Passage, PlainLinear
from lmkit.models.flexible.linears import Uses, all_sites, read_site
from lmkit.models.flexible.module import load_module
from lmkit.models.flexible.names import OF_EXPERT, Names
from lmkit.models.flexible.spec import NUMBERED
from lmkit.models.source import ModelSource
from lmkit.models.spec import ModelSpec


def named_as_stored(spec: ModelSpec, names: Names, uses: Uses, num_experts: Collection[int]) -> ModelSpec:
    """The specification with the names of the file for linears, where transformers renames them, and with those that
    read the same input. Left out are linears that the file does not have one by one, and those that choose experts:
    they stay as they are, like those whose weights are read directly."""
    files = {name: file for file, name in names.modules.items() if name not in uses.direct}
    layers = []
    for index, layer in enumerate(spec.layers):
        found = {role: NUMBERED.fullmatch(files.get(f"{layer.prefix}.{index}.{role}", "")) for role in layer.linears}
        outputs = {role: rows for role, (rows, _) in layer.linears.items()}
        named = {
            r: match for r, match in found.items()
            if match and int(match[2]) == index and (outputs[r] not in num_experts or OF_EXPERT.fullmatch(r))
        }  # fmt: skip
        prefixes = {match[1] for match in named.values()}
        roles = {role: match[3] for role, match in named.items()}
        path = f"{layer.prefix}.{index}."
        groups = (tuple(name.removeprefix(path) for name in group if name.startswith(path)) for group in uses.shared)
        groups = (tuple(role for role in group if role in roles) for group in groups)
        shapes = tuple((role, shape) for role, shape in layer.linears.items() if role in roles)
        prefix = prefixes.pop() if len(prefixes) == 1 else layer.prefix
        shared = tuple(group for group in (*groups, *_of_experts(roles)) if len(group) > 1)
        layers.append(layer.having(shapes=shapes, shared=shared, prefix=prefix, names=roles))
    return replace(spec, layers=tuple(layers))


def _of_experts(roles: Collection[str]) -> Iterator[tuple[str, ...]]:
    """Gate and up of each expert, which read the same input."""
    for role in roles:
        match = OF_EXPERT.fullmatch(role)
        if match and match[3] == UP and (gate := f"{match[1]}.{match[2]}.gate_proj") in roles:
            yield gate, role


@dataclass
class Calibrated:
    """The layers of a source for a calibration. Their weights are read a layer at a time; all else of the model is in
    memory, in float32."""

    source: ModelSource
    config: Any  # of transformers
    outline: nn.Module  # the model on meta
    prefix: str  # of the layers' names in it
    attention: str  # the implementation of attention
    names: Names

    def __post_init__(self) -> None:
        self.sites = all_sites(self.outline)
        self.files = {name: file for file, name in self.names.modules.items()}

    @functools.cached_property
    def passage(self) -> Passage:
        spec = self.source.spec
        inside = {self._name(index, role) for index, layer in enumerate(spec.layers) for role in layer.linears}

        def place(name: str) -> nn.Module | None:
            return PlainLinear(self.sites[name]) if name in inside else None

        model = load_module(self.source.reader.path, self.config, spec.architecture, place)
        use(model, self.attention)
        stack = [model.get_submodule(f"{self.prefix}.{index}") for index in range(spec.num_layers)]
        return Passage(model, stack, spec.architecture)

    def layer(self, index: int, dtype: torch.dtype | None, device: str) -> ForeignLayer:
        """A layer with plain weights in `dtype`."""
        spec, weights = self.source.spec.layers[index], Weights()
        if named(device).own_memory:
            raise UnsupportedError(
                f"--device {device}: transformers computes {self.source.spec.architecture}; take cpu"
            )
        for role in spec.linears:
            name = self._name(index, role)
            weight, bias = read_site(self.source, self.files[name], self.sites[name], dtype)
            weights[role] = weight
            if bias is not None:
                weights[role + ".bias"] = bias if dtype is None else bias.to(dtype)
        return ForeignLayer(spec, index, weights, lambda: self.passage)

    def is_transposed(self, index: int, role: str) -> bool:
        """Whether the file has the weight of a linear as [in, out]."""
        name = self._name(index, role)
        return name in self.sites and self.sites[name].transposed

    def _name(self, index: int, role: str) -> str:
        return f"{self.prefix}.{index}.{role}"


class ForeignHead:
    """What stands before the layers."""

    per_layer = None

    def __init__(self, passage: Passage) -> None:
        self._passage = passage

    def embed_rows(self, ids: Tensor) -> Tensor:
        """ids int64 [rows, seq_len] -> states float32 [rows * seq_len, hidden]"""
        return self._passage.embed(ids)
