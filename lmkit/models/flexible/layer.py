"""A layer of a transformers model while a recipe works on it: its linears are weights by role, all else is its module.

The layers of a module list are called in order, each with the states that the last one gave. What they are given
besides (angles, masks) follows from the shape of the batch alone; `Passage` has it from one pass of the model in which
every layer gives back its input. Models in which that does not hold are refused.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lmkit.errors import UnsupportedError
from lmkit.layers.batch import BatchInputs, KVLayer
from lmkit.layers.block import At, CosSin, Pair
from lmkit.layers.blocks.base import Residual
from lmkit.layers.linear import Observer, Weights
from lmkit.models.flexible.experts import Experts
from lmkit.models.flexible.site import Site
from lmkit.models.layer_spec import LayerSpec
from lmkit.qtensor import QTensor, dequantize

OBSERVED = "lmkit_observed"  # an attention implementation of transformers that shows keys and values
_SEEN: ContextVar[list[tuple[Tensor, Tensor]] | None] = ContextVar("seen", default=None)


def _observed(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    """The attention of the module's own file, which has all that its model needs, and keys and values are noted."""
    if (seen := _SEEN.get()) is not None:
        seen.append((key, value))
    file = sys.modules[type(module).__module__]
    own = getattr(file, "eager_attention_forward", None) or ALL_ATTENTION_FUNCTIONS["sdpa"]
    return own(module, query, key, value, mask, **options)


ALL_ATTENTION_FUNCTIONS.register(OBSERVED, _observed)
ALL_MASK_ATTENTION_FUNCTIONS.register(OBSERVED, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


class PlainLinear(nn.Module):
    """The place of a linear whose weight float32 [out, in] is given for each pass, and whose input may be seen."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.out_features, self.in_features = site.shape
        self.weight = torch.empty(site.shape, device="meta")
        self.bias: Tensor | None = None
        self.observe: Callable[[Tensor], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]"""
        if self.observe is not None:
            self.observe(x.reshape(-1, self.in_features))
        return nn.functional.linear(x, self.weight, self.bias)


class Passage:
    """What the layers of a model are given besides states.

    `model` has all its weights but those of the layers' linears; `layers` are its modules in order.
    """

    def __init__(self, model: Any, layers: Sequence[nn.Module], architecture: str) -> None:
        self.model, self.layers, self.architecture = model, layers, architecture
        self._given: dict[tuple[int, int], list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}
        self._tuples = False  # whether layers give a tuple, the states first

    def embed(self, ids: Tensor) -> Tensor:
        """ids int64 [rows, seq_len] -> the states before the first layer, float32 [rows * seq_len, hidden]."""
        states, _, _ = self._pass(ids)
        return states.flatten(0, 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden float32 [seq_len, hidden] after the last layer -> logits float32 [seq_len, vocab]."""
        _, _, logits = self._pass(torch.zeros(1, len(hidden), dtype=torch.int64), hidden[None])
        return logits[0]

    def given(self, index: int, num_rows: int, seq_len: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a layer after its states, for a batch of this shape. Raises UnsupportedError if they depend
        on the tokens."""
        if (num_rows, seq_len) not in self._given:
            shape = num_rows, seq_len
            first, second = (self._pass(torch.full(shape, token))[1] for token in (1, 2))
            if not _equal(first, second):
                raise self._refusal("layers read more of a token than the states before them")
            self._given = {shape: first}  # of the last shape alone: masks are large
        return self._given[num_rows, seq_len][index]

    def _pass(
        self, ids: Tensor, states: Tensor | None = None
    ) -> tuple[Tensor, list[tuple[tuple[Any, ...], dict[str, Any]]], Tensor]:
        """(states before the first layer, what each layer is given after them, logits) with layers that give back what
        they read, or `states`."""
        given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        inputs: list[Tensor] = []

        def through(layer: nn.Module) -> Callable[..., Any]:
            def forward(*args: Any, **options: Any) -> Any:
                name = next((name for name in ("hidden_states", "x", "hidden") if name in options), None)
                x = options.pop(name) if name is not None else args[0]
                rest = args if name is not None else args[1:]
                if len(given) >= len(self.layers) or self.layers[len(given)] is not layer:
                    raise self._refusal("its layers are not called in order")
                if inputs and x is not inputs[-1]:
                    raise self._refusal("states are changed between its layers")
                given.append((rest, options))
                inputs.append(x if states is None or len(given) < len(self.layers) else states)
                return (inputs[-1], None, None) if self._tuples else inputs[-1]

            return forward

        own = [layer.forward for layer in self.layers]
        try:
            for layer in self.layers:
                layer.forward = through(layer)  # type: ignore[method-assign]
            logits = self.model(input_ids=ids, use_cache=False).logits
        except (UnsupportedError, IndexError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            if not self._tuples:
                self._tuples = True  # a model that takes the first part of what a layer gives has lost the batch
                return self._pass(ids, states)
            if isinstance(error, UnsupportedError):
                raise
            raise self._refusal(f"its layers cannot be run one by one ({error})") from None
        finally:
            for layer, forward in zip(self.layers, own, strict=True):
                layer.forward = forward  # type: ignore[method-assign]
        if len(given) < len(self.layers):
            raise self._refusal("its layers are not all called")
        first = inputs[0] if states is None or len(inputs) > 1 else states
        return first.float(), given, logits.float()

    def _refusal(self, reason: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.architecture} of transformers: {reason}, so a recipe with calibration text cannot run them one by "
            "one; --recipe rtn_w4a16_g128 takes none"
        )


def _equal(one: Any, other: Any) -> bool:
    """Whether two trees of arguments have the same numbers."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other)


class WholeLayer:
    """The block of a ForeignLayer, which is computed as a whole."""

    out = None
    all_tokens = False


class ForeignResidual:
    """The residual stream around a whole layer."""

    def __init__(self, spec: Residual, layer: ForeignLayer) -> None:
        self.spec, self.block, self._layer = spec, WholeLayer(), layer

    def read(self, delta: Tensor, residual: Tensor | None = None) -> tuple[Tensor, None, Tensor]:
        """A pair -> (what the layer reads, no norm, the stream)."""
        stream = delta if residual is None else delta + residual
        return stream, None, stream

    def contribution(self, x: Tensor, norm: None, at: At) -> Tensor:
        """x [T, hidden] -> what the layer adds to it."""
        return self._layer.run(x, at.batch, at.kv) - x

    def apart(self, stream: Tensor, y: Tensor) -> Tensor:
        return stream + y


class ForeignLayer:
    """A layer with float32 `weights` of its linears and their biases, by role. It answers a calibration as a
    DecoderLayer does."""

    product_dtype = torch.float32
    device = "cpu"

    def __init__(self, spec: LayerSpec, index: int, weights: Weights, passage: Callable[[], Passage]) -> None:
        self.spec, self.index, self.weights, self._passage = spec, index, weights, passage
        self.blocks = [ForeignResidual(each, self) for each in spec.blocks]
        self.mixing = self.blocks[0]
        self.shows_all_tokens = False  # whether observers of an expert also see tokens of other experts
        self._observer: Observer | None = None
        self._numbers: dict[str, tuple[QTensor, Tensor]] = {}  # of rounded weights

    def multiply_in(self, dtype: torch.dtype) -> Self:
        """transformers' modules multiply in float32, whatever is asked for."""
        return self

    def with_weights(self, weights: Weights) -> ForeignLayer:
        """The same layer with other plain weights."""
        return ForeignLayer(self.spec, self.index, weights, self._passage)

    def observe(self, observer: Observer | None) -> None:
        """Call `observer(role, x [T, in])` before each linear, until called with None."""
        self._observer = observer

    def __call__(self, delta: Tensor, residual: Tensor | None, batch: BatchInputs, rope: CosSin, kv: KVLayer) -> Pair:
        """(delta, residual) [T, hidden] of whole rows -> the next layer's pair."""
        return self.run(delta if residual is None else delta + residual, batch, kv), None

    def run(self, x: Tensor, batch: BatchInputs, kv: KVLayer) -> Tensor:
        """The states [T, hidden] after the layer. Keys and values go to `kv`, if the layer keeps some."""
        num_rows = len(batch.geometries[0].context_lens)
        passage = self._passage()
        args, options = passage.given(self.index, num_rows, len(x) // num_rows)
        module, seen = passage.layers[self.index], list[tuple[Tensor, Tensor]]()
        token = _SEEN.set(seen)
        try:
            self._fill(module)
            found = module(x.view(num_rows, -1, x.shape[-1]), *args, **options)
        finally:
            self._empty(module)
            _SEEN.reset(token)
        if self.spec.kv is not None and seen:
            slots = batch.geometries[0].slots.long()
            for tensor, new in zip((kv.k, kv.v), seen[-1], strict=True):
                size, rows = tensor.data.shape[2], new.transpose(1, 2).flatten(0, 1)
                rows = nn.functional.pad(rows, (0, tensor.data.shape[3] - rows.shape[-1]))
                tensor.data.transpose(1, 2)[slots // size, slots % size] = rows
        states: Tensor = found[0] if isinstance(found, tuple) else found
        return states.flatten(0, 1).float()

    def _fill(self, module: nn.Module) -> None:
        """Put the weights into their places."""
        for part in module.modules():
            if isinstance(part, Experts):
                part.all_tokens = self.shows_all_tokens and self._observer is not None
        for role in self.spec.linears:
            place, weight, bias = module.get_submodule(role), self.weights[role], self.weights.get(role + ".bias")
            assert isinstance(place, PlainLinear)
            assert not isinstance(bias, QTensor)
            if isinstance(weight, QTensor):
                if role not in self._numbers or self._numbers[role][0] is not weight:
                    self._numbers[role] = weight, dequantize(weight)
                weight = self._numbers[role][1]
            place.weight, place.bias = weight, bias
            place.observe = None if self._observer is None else functools.partial(self._observer, role)

    def _empty(self, module: nn.Module) -> None:
        for role in self.spec.linears:
            place = module.get_submodule(role)
            assert isinstance(place, PlainLinear)
            place.weight, place.bias, place.observe = place.weight.to("meta"), None, None
