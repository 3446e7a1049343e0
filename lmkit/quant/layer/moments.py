"""Second moments of the linears' inputs, as rounding with a Hessian needs them. They cover all calibration rows but the
last few. The last rows are held out to judge the result.

The moments are sums over batches in float64, and each batch is a float32 product. The order of the batches does not
matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lmkit.models.decoder import DecoderLayer, joined
from lmkit.models.roles import expert_of
from lmkit.quant.data.hidden_states import Stream
from lmkit.quant.layer.passes import LayerPass, Part

HELD_OUT = 16  # one of so many rows is held out


@dataclass
class Moments:
    """Moments of one linear input: `hessian` x^T x and `cross` e^T x, float64 [in, in].

    x is the input behind quantized layers, e the input in the original model. `held` and `held_exact` float32
    [tokens, in] are x and e of the held-out rows. Without an original stream, e is x and `cross` is None.
    """

    hessian: Tensor
    cross: Tensor | None
    held: Tensor
    held_exact: Tensor
    num_tokens: int = 0
    is_exact: bool = False  # e comes from the original model, before any scaling, and is not x

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

    def take(self, x: Tensor, exact: Tensor | None, *, held: bool) -> None:
        """Add the next tokens. `held`: they are of held-out rows."""
        self.is_exact = exact is not None
        if held:
            self.held = torch.cat((self.held, x))
            self.held_exact = torch.cat((self.held_exact, x if exact is None else exact))
        else:
            self.add(x, exact)

    def divide_exact(self, s: Tensor) -> None:
        """Divide the original inputs by s [in], as their weights were multiplied by it. x is divided already."""
        if not self.is_exact:
            return
        self.held_exact = self.held_exact / s
        if self.cross is not None:
            self.cross /= s.double()[:, None]


def held_out_rows(num_rows: int) -> int:
    """How many of the last rows are held out."""
    return 0 if num_rows < 2 else max(1, num_rows // HELD_OUT)


def collect(hidden: LayerPass, original: LayerPass | None, roles: tuple[str, ...]) -> dict[str, Moments]:
    """Moments of the inputs of `roles`. These linears begin one part of the layer, and the passes end there.

    The original router sends other tokens to the experts, so experts have no exact inputs.
    """
    part, stream = Part.of(roles[0]), hidden.stream
    exact_roles = tuple(role for role in roles if expert_of(role) is None)
    moments = {role: Moments.empty(hidden.layer.spec.linear_shape(role)[1]) for role in roles}
    first_held = stream.num_rows - held_out_rows(stream.num_rows)
    for tokens in (piece for number in range(len(stream)) for piece in stream.slices(number, first_held)):
        x = hidden.inputs(tokens, part, roles)
        e = {} if original is None else original.inputs(tokens, part, exact_roles)
        for role in x:
            moments[role].take(x[role], e.get(role), held=tokens.start >= first_held * stream.seq_len)
        stream.release()
    for each in (hidden, original):
        if each is not None:
            each.part = part
    return moments


def batches(stream: Stream) -> Iterator[tuple[Tensor, Tensor | None, bool]]:
    """(hidden states, the original model's or None, whether they are held out) of whole rows, in order. A batch is cut
    where the held-out rows begin."""
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


def run(layer: DecoderLayer, stream: Stream, hidden: Tensor) -> Tensor:
    """The layer's output for whole rows [tokens, hidden]."""
    geometry = stream.geometry(len(hidden) // stream.seq_len, stream.seq_len)
    delta, residual = layer(hidden.clone(), None, geometry.batch, geometry.rope, geometry.kv)
    return joined(delta, residual)


def squared(x: Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))
