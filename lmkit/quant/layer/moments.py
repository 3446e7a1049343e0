"""Second moments of the linears' inputs, as rounding with a Hessian needs them, over all calibration rows but the last
few, which are held out to judge the result.

They are sums over batches in float64, each batch a float32 product: the order of the batches does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lmkit.models.decoder import DecoderLayer, joined
from lmkit.quant.data.hidden_states import Stream

HELD_OUT = 16  # one of so many rows is held out


@dataclass
class Moments:
    """`hessian` float64 [in, in] x^T x and `cross` e^T x, x what a linear sees behind quantized layers and e what it
    saw in the original model. `held` and `held_exact` float32 [tokens, in] are x and e of the held-out rows; without an
    original stream e is x, and `cross` None."""

    hessian: Tensor
    cross: Tensor | None
    held: Tensor
    held_exact: Tensor
    num_tokens: int = 0
    is_exact: bool = False  # e is the original model's, before any scaling, and not x

    @classmethod
    def empty(cls, in_features: int) -> Moments:
        no_tokens = torch.empty(0, in_features)
        return cls(torch.zeros(in_features, in_features, dtype=torch.float64), None, no_tokens, no_tokens)

    def add(self, x: Tensor, exact: Tensor | None) -> None:
        self.hessian += x.T @ x
        self.num_tokens += len(x)
        if exact is not None:
            product = exact.T @ x
            self.cross = product.double() if self.cross is None else self.cross + product

    def divide_exact(self, s: Tensor) -> None:
        """The original inputs divided by s [in], as the weights they are for were multiplied by it; x is already."""
        if not self.is_exact:
            return
        self.held_exact = self.held_exact / s
        if self.cross is not None:
            self.cross /= s.double()[:, None]


def held_out_rows(num_rows: int) -> int:
    """How many of the last rows are held out."""
    return 0 if num_rows < 2 else max(1, num_rows // HELD_OUT)


def collect(
    stream: Stream, layer: DecoderLayer, original: DecoderLayer | None, roles: tuple[str, ...]
) -> dict[str, Moments]:
    """Moments of the inputs of `roles`, whose linears follow one another; `original` is the layer for the exact stream.

    Experts are shown other tokens by the original router: they have no exact inputs.
    """
    moments = {role: Moments.empty(layer.spec.linear_shape(role)[1]) for role in roles}
    for hidden, exact, held in batches(stream):
        seen = inputs_of(layer, stream, hidden, roles)
        wanted = tuple(role for role in seen if ".experts." not in role)
        originals = {} if original is None or exact is None else inputs_of(original, stream, exact, wanted)
        for role, x in seen.items():
            e = originals.get(role)
            moments[role].is_exact = e is not None
            if held:
                moments[role].held = torch.cat((moments[role].held, x))
                moments[role].held_exact = torch.cat((moments[role].held_exact, x if e is None else e))
            else:
                moments[role].add(x, e)
    return moments


def batches(stream: Stream) -> Iterator[tuple[Tensor, Tensor | None, bool]]:
    """(hidden states, the original model's or None, whether they are held out) of whole rows, in order; every batch is
    cut where the held-out rows begin."""
    first_held, row = stream.num_rows - held_out_rows(stream.num_rows), 0
    for number in range(len(stream)):
        hidden = stream.hidden(number)
        exact = stream.hidden(number, exact=True) if stream.has_exact else None
        num_rows = len(hidden) // stream.seq_len
        cut = min(max(first_held - row, 0), num_rows) * stream.seq_len
        for part, held in ((slice(0, cut), False), (slice(cut, None), True)):
            if len(hidden[part]):
                yield hidden[part], None if exact is None else exact[part], held
        row += num_rows


class _SeenAll(Exception):
    """Every wanted input was seen: the rest of the layer need not be computed."""


def inputs_of(layer: DecoderLayer, stream: Stream, hidden: Tensor, roles: tuple[str, ...]) -> dict[str, Tensor]:
    """The inputs [tokens, in] of `roles` for whole rows [tokens, hidden]; an expert without tokens is left out."""
    seen: dict[str, Tensor] = {}

    def record(role: str, x: Tensor) -> None:
        if role in roles:
            seen[role] = x
            if len(seen) == len(roles):
                raise _SeenAll

    layer.observe(record)
    try:
        run(layer, stream, hidden)
    except _SeenAll:
        pass
    finally:
        layer.observe(None)
    return seen


def run(layer: DecoderLayer, stream: Stream, hidden: Tensor) -> Tensor:
    """The layer's output for whole rows [tokens, hidden]."""
    geometry = stream.geometry(len(hidden) // stream.seq_len, stream.seq_len)
    delta, residual = layer(hidden.clone(), None, geometry.batch, geometry.rope, geometry.kv)
    return joined(delta, residual)


def squared(x: Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))
