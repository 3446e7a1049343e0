"""LoRA adapters of a decoder that serves: many at once, each for its own sequences."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.peft import Adapter
from lmkit.layers.adapters import LinearAdapters
from lmkit.layers.batch import zeros
from lmkit.layers.linear import MergedLinear
from lmkit.low_rank import LowRank
from lmkit.models.decoder import Decoder
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.spec import ModelSpec

Place = tuple[int, str]  # layer, role


@dataclass(frozen=True)
class LoadedAdapter:
    number: int  # of its rows in a step
    digest: str


class DecoderAdapters:
    """Room for `count` adapters in a packed decoder on a CPU. Steps without any compute as before."""

    def __init__(self, decoder: Decoder, count: int) -> None:
        self._spec = decoder.spec
        self.loaded: dict[str, LoadedAdapter] = {}  # by name
        self._free = list(range(count))[::-1]
        self._linears: dict[Place, MergedLinear] = {}
        for layer in decoder.layers:
            roles = adaptable(layer.spec)
            for linear in layer.linears:
                if set(linear.roles) <= set(roles):
                    linear.adapt(count, decoder.row_adapters)
                    self._linears |= {(layer.index, role): linear for role in linear.roles}

    def load(self, name: str, adapter: Adapter) -> LoadedAdapter:
        """Raises CheckpointError if the adapter does not fit the model, and UnsupportedError if there is no room."""
        placed = place(adapter, self._spec)
        if not self._free:
            room = f"there is room for {len(self.loaded)} adapters"
            raise UnsupportedError(f"adapter {name}: {room}, and so many are loaded; unload one, or raise max_adapters")
        found = self.loaded[name] = LoadedAdapter(self._free.pop(), adapter.digest)
        for (layer, role), addition in side_by_side(placed).items():
            self._adapters(layer, role).set(role, found.number, addition)
        return found

    def unload(self, name: str) -> None:
        """Forget an adapter that no sequence uses."""
        number = self.loaded.pop(name).number
        for (_, role), linear in self._linears.items():
            assert linear.adapters is not None
            linear.adapters.set(role, number, None)
        self._free.append(number)

    def _adapters(self, layer: int, role: str) -> LinearAdapters:
        adapters = self._linears[layer, role].adapters
        assert adapters is not None
        return adapters


def adaptable(layer: LayerSpec) -> dict[str, tuple[int, int]]:
    """The linears of a layer that an adapter may change, [out, in] by role: all that compute every token."""
    return {role: shape for role, shape in layer.linears.items() if ".experts." not in role and ".shared." not in role}


def check_place(adapter: Adapter, spec: ModelSpec) -> dict[str, Place]:
    """The place of each of the adapter's modules. Raises CheckpointError for a module that the model lacks or that has
    another shape.
    """
    layers = enumerate(spec.layers)
    known = {layer.module_name(index, role): (index, role) for index, layer in layers for role in adaptable(layer)}
    for module, addition in adapter.additions.items():
        if module not in known:
            near = difflib.get_close_matches(module, known, 1)
            hint = f"; the nearest is {near[0]}" if near else ""
            raise CheckpointError(f"{adapter.path}: {module} is no linear of this model that takes an adapter{hint}")
        index, role = known[module]
        outputs, inputs = adaptable(spec.layers[index])[role]
        if (addition.b.shape[1], addition.a.shape[1]) != (outputs, inputs):
            found = f"[{addition.b.shape[1]}, {addition.a.shape[1]}]"
            raise CheckpointError(f"{adapter.path}: {module} is for {found}, the model has [{outputs}, {inputs}]")
    return {module: known[module] for module in adapter.additions}


def place(adapter: Adapter, spec: ModelSpec) -> dict[Place, LowRank]:
    """The additions by layer and role, for packed linears. Raises CheckpointError as `check_place` does."""
    places = check_place(adapter, spec)
    return {
        (index, role): in_order(adapter.additions[module], role, spec.layers[index])
        for module, (index, role) in places.items()
    }


def side_by_side(placed: dict[Place, LowRank]) -> dict[Place, LowRank]:
    """The same additions in one piece of memory: large pages hold it, and it is read from its start to its end."""
    dtypes = {addition.a.dtype for addition in placed.values()}
    memory = {dtype: zeros((_size(placed, dtype),), dtype, "cpu") for dtype in dtypes}
    used, moved = dict.fromkeys(dtypes, 0), dict[Place, LowRank]()

    def move(tensor: Tensor) -> Tensor:
        start = used[tensor.dtype]
        used[tensor.dtype] += tensor.numel()
        return memory[tensor.dtype][start : used[tensor.dtype]].view(tensor.shape).copy_(tensor)

    for key, addition in placed.items():
        moved[key] = LowRank(move(addition.a), move(addition.b), addition.scale)
    return moved


def _size(placed: dict[Place, LowRank], dtype: torch.dtype) -> int:
    return sum(part.a.numel() + part.b.numel() for part in placed.values() if part.a.dtype == dtype)


def in_order(addition: LowRank, role: str, layer: LayerSpec) -> LowRank:
    """The addition for packed heads, see LayerSpec.pair_order."""
    if not layer.pair_order or role not in ("attn.q", "attn.k"):
        return addition
    columns = torch.arange(addition.b.shape[1]).view(-1, layer.head_dim)[:, list(layer.pair_order)].flatten()
    return replace(addition, b=addition.b[:, columns].contiguous())
