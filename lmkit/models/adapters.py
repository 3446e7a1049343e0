"""LoRA adapters of a decoder that serves: many at once, each for its own sequences."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lmkit.devices import holding, named
from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.peft import Adapter, read_adapter
from lmkit.formats.views import rows_of
from lmkit.kernels.cuda.module import tensor_device
from lmkit.layers.adapters import LinearAdapters
from lmkit.layers.batch import zeros
from lmkit.layers.linear import MergedLinear
from lmkit.low_rank import LowRank
from lmkit.models.decoder import Decoder
from lmkit.models.fused import fused_linears
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.shard import COLUMNS, WHOLE, Shard
from lmkit.models.spec import ModelSpec

Place = tuple[int, str]  # layer, role


@dataclass(frozen=True)
class Part:
    """A rank's part of a whole model."""

    whole: ModelSpec
    shard: Shard

    def of(self, addition: LowRank, layer: int, role: str) -> LowRank:
        """The rank's part of an addition to a linear: its inputs or its outputs."""
        inputs = role.rpartition(".")[2] in COLUMNS
        cut = self.shard.weights(self.whole.layers[layer], {role: addition.a if inputs else addition.b.T})[role]
        assert isinstance(cut, Tensor)
        return replace(addition, a=cut) if inputs else replace(addition, b=cut.T.contiguous())


class DecoderAdapters:
    """The adapters of a packed decoder, by a key, in host memory. `count` of them have a place, by a number that steps
    name. Steps without any compute as before.
    """

    def __init__(self, decoder: Decoder, count: int, part: Part | None = None) -> None:
        self._part = part or Part(decoder.spec, WHOLE)
        self._spec, self._dtype, self._device = decoder.spec, decoder.dtype, decoder.lm_head.device
        self.count = decoder.step_adapters.count = count
        self.digests: dict[int, str] = {}  # by key
        self._additions: dict[int, dict[Place, LowRank]] = {}  # by key
        self._placed: dict[int, int] = {}  # the key of each number
        self._linears: dict[Place, MergedLinear] = {}
        self._layers, self._other_names = {layer.index for layer in decoder.layers}, decoder.other_names
        for index, linear in decoder.adaptable():
            if adaptable(self._spec.layers[index]).keys() >= set(linear.roles):
                linear.adapt(decoder.step_adapters)
                self._linears |= {(index, role): linear for role in linear.roles}

    def read(self, key: int, folder: str | Path) -> str:
        """Read an adapter and keep it. Returns its digest. Any thread may call it, beside steps, too: the reading
        of files and torch's operations let others run.

        Raises CheckpointError if it does not fit the model, or for a file that cannot be used, and UnsupportedError.
        """
        adapter = read_adapter(folder)
        renamed = {self._other_names.get(module, module): each for module, each in adapter.additions.items()}
        placed = place(replace(adapter, additions=renamed), self._spec, self._part)
        additions = {at: addition for at, addition in placed.items() if at[0] in self._layers}  # of a stage
        if lacking := [at for at in additions if at not in self._linears]:
            module = self._spec.module_name(*lacking[0])
            raise UnsupportedError(
                f"{adapter.path}: {module} takes no adapter: it computes some tokens of a step alone"
            )
        if named(self._device).panels:
            additions = {at: addition.in_panels() for at, addition in additions.items()}
        else:
            additions = {at: _narrowed(addition, self._dtype) for at, addition in additions.items()}
        self._additions[key] = side_by_side(additions, is_pinned=holding(tensor_device(self._device)).own_memory)
        self.digests[key] = adapter.digest
        return adapter.digest

    def drop(self, key: int) -> None:
        """Forget an adapter that has no place. An unknown key is ignored."""
        self._additions.pop(key, None)
        self.digests.pop(key, None)

    def place(self, number: int, key: int | None) -> None:
        """Give an adapter the place of this number, which no step under way uses, or with None make the place free."""
        for layer, role in self._additions.get(self._placed.pop(number, -1), ()):
            self._adapters(layer, role).set(role, number, None)
        if key is None:
            return
        additions, self._placed[number] = self._additions[key], key
        if named(self._device).own_memory:
            additions = side_by_side(additions, tensor_device(self._device))
        for (layer, role), addition in additions.items():
            self._adapters(layer, role).set(role, number, addition)

    def _adapters(self, layer: int, role: str) -> LinearAdapters:
        adapters = self._linears[layer, role].adapters
        assert adapters is not None
        return adapters


def adaptable(layer: LayerSpec) -> dict[str, tuple[int, int]]:
    """The linears of a layer that an adapter may change, [out, in] by role: all that compute every token."""
    return {role: shape for role, shape in layer.linears.items() if ".experts." not in role and ".shared." not in role}


def one_by_one(adapter: Adapter, spec: ModelSpec) -> Adapter:
    """The adapter with an addition for each linear, also where a checkpoint has several in one tensor. Raises
    CheckpointError for another number of outputs."""
    additions = dict(adapter.additions)
    for index, layer in enumerate(spec.layers):
        for module, parts in fused_linears(layer).items():
            name = layer.path(index) + module
            if name not in additions or not parts.keys() <= layer.linears.keys():
                continue
            whole, outputs = additions.pop(name), sum(layer.linears[role][0] for role in parts)
            if (found := whole.b.shape[1]) != outputs:
                raise CheckpointError(f"{adapter.path}: {name} is for {found} outputs, the model has {outputs}")
            for role, rows in parts.items():
                part = rows_of(f"{name}.weight", tuple(whole.b.T.shape), rows, outputs).take(whole.b.T)
                additions[layer.module_name(index, role)] = replace(whole, b=part.T.contiguous())
    return replace(adapter, additions=additions)


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


def place(adapter: Adapter, spec: ModelSpec, part: Part) -> dict[Place, LowRank]:
    """The additions by layer and role, in the order of a step, for the packed linears of a rank, whose model `spec` is.
    Raises CheckpointError as `check_place` does.
    """
    adapter = one_by_one(adapter, part.whole)
    modules = {place: module for module, place in check_place(adapter, part.whole).items()}
    return {
        (index, role): in_order(part.of(adapter.additions[modules[index, role]], index, role), role, layer)
        for index, layer in enumerate(spec.layers)
        for role in layer.linears
        if (index, role) in modules
    }


def _narrowed(addition: LowRank, dtype: torch.dtype) -> LowRank:
    """The same numbers in `dtype`, or, unless they have it already, in float32. A GPU's kernels have one short type."""
    kept = dtype if addition.a.dtype == dtype else torch.float32
    return LowRank(addition.a.to(kept), addition.b.to(kept), addition.scale)


def side_by_side(placed: dict[Place, LowRank], device: str = "cpu", *, is_pinned: bool = False) -> dict[Place, LowRank]:
    """The same additions in one piece of memory: large pages hold it, and it is read from its start to its end. From
    pinned host memory a GPU copies by itself, in the order of its stream.
    """
    memory, moved = dict[torch.dtype, Tensor](), dict[Place, LowRank]()
    for dtype in {addition.a.dtype for addition in placed.values()}:
        size = _size(placed, dtype)
        memory[dtype] = torch.empty(size, dtype=dtype, pin_memory=True) if is_pinned else zeros((size,), dtype, device)
    used = dict.fromkeys(memory, 0)

    def move(tensor: Tensor) -> Tensor:
        start = used[tensor.dtype]
        used[tensor.dtype] += tensor.numel()
        piece = memory[tensor.dtype][start : used[tensor.dtype]].view(tensor.shape)
        return piece.copy_(tensor, non_blocking=True)

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
