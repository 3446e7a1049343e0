"""The mixture of experts of a split layer (quant.split): who computes which tokens, and one expert at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cuda.module import tensor_device
from lmkit.layers.blocks.moe import SHARED
from lmkit.layers.linear import Weights
from lmkit.layers.moe import by_expert, mixtures_of
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.placed import placed
from lmkit.models.roles import expert_of
from lmkit.models.source import ModelSource
from lmkit.quant.split import experts_of, without_experts

TOKENS = 4096  # that an expert computes at a time


@dataclass
class Chosen:
    """What the experts read, `x` [T, hidden], and who computes it: tokens int64 [n] in order, and weights float32
    [n, 1] of the outputs, by the role before an expert's linears."""

    x: Tensor
    places: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def of(self, name: str) -> tuple[Tensor, Tensor]:
        nothing = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 1)
        return self.places.get(name, nothing)

    def count(self, name: str) -> int:
        return len(self.of(name)[0])


@dataclass(frozen=True)
class Mixture:
    """The block at the end of a layer. Products are of `dtype`."""

    source: ModelSource
    index: int
    dtype: torch.dtype
    device: str = "cpu"

    @cached_property
    def specs(self) -> dict[str, LayerSpec]:
        """Each expert as a layer, by the role before its linears."""
        return experts_of(self.source.spec.layers[self.index])

    @cached_property
    def _block(self) -> DecoderLayer:
        """The block without its experts: the router, and what chooses with it."""
        return load_part(self.source, self.index, without_experts(self.source.spec.layers[self.index]), self.device)

    @property
    def weights(self) -> Weights:
        """Of the norm, the router, and what chooses experts, float32."""
        linears = self._block.spec.linears
        return {
            role: weight for role, weight in self._block.weights.items() if role.removesuffix(".bias") not in linears
        }

    def choose(self, batches: Iterable[Tensor], x: Tensor) -> Chosen:
        """Fill `x` [T, hidden] with what experts read of all states, which come in `batches` [tokens, hidden]."""
        (block,) = self._block.blocks
        (moe,) = mixtures_of([block.block])
        begin, found = 0, []
        for states in batches:
            read, norm, _ = block.read(states)
            normed: Tensor = read if norm is None else ops.rms_norm.select(self.device)(read, norm)
            found.append(moe.chosen(normed))
            x[begin : begin + len(states)] = normed
            begin += len(states)
        weights, experts, shared = (torch.cat(part) for part in zip(*found, strict=True))
        factors, chosen = weights.flatten(), Chosen(x)
        for number, places in by_expert(experts):
            chosen.places[f"mlp.experts.{number}"] = places // experts.shape[1], factors[places, None]
        ones = torch.ones(len(x), 1)
        chosen.places[SHARED] = torch.arange(len(x)), shared.sigmoid() if shared.shape[1] else ones
        return chosen

    def expert(self, name: str) -> DecoderLayer:
        """One expert as a layer."""
        layer = load_part(self.source, self.index, self.specs[name], self.device)
        self.source.reader.release()
        return layer.multiply_in(self.dtype)

    def nearest(self, name: str, others: list[str]) -> str:
        """The expert among `others` whose row of the router points most nearly the same way."""
        router = self.weights["mlp.router"]
        assert isinstance(router, Tensor)
        rows = torch.nn.functional.normalize(router)
        numbers = [expert_of(f"{other}.up") for other in others]
        own = rows[expert_of(f"{name}.up")]
        return others[int((rows[numbers] @ own).argmax())]


def load_part(source: ModelSource, index: int, spec: LayerSpec, device: str) -> DecoderLayer:
    """A part `spec` of a layer, with its weights in float32."""
    wanted = {*spec.linears, *spec.routers, *spec.vectors, *spec.matrices}
    found = source.layer_weights(index, torch.float32, {*spec.linears, *spec.routers})
    at = tensor_device(device)
    weights = {
        role: placed(weight, device, at, torch.float32)
        for role, weight in found.items()
        if role.removesuffix(".bias") in wanted or role in wanted
    }
    return DecoderLayer(spec, index, weights, device)


def add(layer: DecoderLayer, chosen: Chosen, name: str, states: Tensor) -> None:
    """Add what an expert gives for its tokens to the states [T, hidden] after attention."""
    tokens, weights = chosen.of(name)
    for part, factors in zip(tokens.split(TOKENS), weights.split(TOKENS), strict=True):
        y = layer.blocks[0].block(chosen.x[part].float())
        states.index_add_(0, part, y * factors)
