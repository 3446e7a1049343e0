"""Second moments of the linears' inputs, as rounding with a Hessian needs them. They cover all calibration rows but the
last few. The last rows are held out to judge the result.

The moments are sums in float32. Each batch is a product in the numbers that the layer multiplies in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from lmkit.layers.linear import in_full
from lmkit.models.decoder_layer import DecoderLayer, joined
from lmkit.models.roles import expert_of
from lmkit.quant.data.hidden_states import Stream
from lmkit.quant.layer.passes import LayerPass
from lmkit.quant.layer.products import add_product, add_square, mirror, times

HELD_OUT = 16  # one of so many rows is held out


@dataclass
class Moments:
    """Moments of one linear input: `hessian` x^T x float32 [in, in], and `shift`.

    x is the input after quantized layers, e the input in the original model. `shift` float32 is (e - x)^T x [in, in],
    or (W (e - x) + r)^T x [out, in] if there is a `weight` W. r is what the residual stream lacks of the original's, if
    the linear's outputs are added to it. Without an original stream, e is x and `shift` is None. `held`, `held_exact`
    float32 [tokens, in] and `held_lack` [tokens, out] are x, e and r of the held-out rows. The moments are complete
    after `finish`.
    """

    hessian: Tensor
    shift: Tensor | None
    held: Tensor
    held_exact: Tensor
    weight: Tensor | None = None
    held_lack: Tensor | None = None
    num_tokens: int = 0

    @classmethod
    def empty(cls, in_features: int, weight: Tensor | None = None, at: torch.device | str = "cpu") -> Moments:
        """Moments of inputs on the device `at`."""
        no_tokens = torch.empty(0, in_features, device=at)
        return cls(torch.zeros(in_features, in_features, device=at), None, no_tokens, no_tokens, weight)

    def add(
        self, x: Tensor, exact: Tensor | None, lack: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        """Add tokens. Products are of `dtype`."""
        self.num_tokens += len(x)
        short = in_full(x.to(dtype))
        add_square(self.hessian, short)
        if exact is not None:
            change = exact - x if self.weight is None else times(exact - x, self.weight, dtype)
            if lack is not None:
                change += lack
            if self.shift is None:
                self.shift = torch.zeros(change.shape[1], x.shape[1], device=x.device)
            add_product(self.shift, in_full(change.to(dtype)), short)

    def take(
        self,
        x: Tensor,
        exact: Tensor | None,
        lack: Tensor | None = None,
        *,
        held: bool,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Add the next tokens. `held`: they are of held-out rows."""
        if held:
            self.held = torch.cat((self.held, x))
            self.held_exact = torch.cat((self.held_exact, x if exact is None else exact))
            if lack is not None:
                self.held_lack = lack if self.held_lack is None else torch.cat((self.held_lack, lack))
        else:
            self.add(x, exact, lack, dtype)

    def finish(self) -> None:
        """Complete the moments after the last tokens."""
        mirror(self.hessian)


def held_out_rows(num_rows: int) -> int:
    """How many of the last rows are held out."""
    return 0 if num_rows < 2 else max(1, num_rows // HELD_OUT)


def collect(
    hidden: LayerPass,
    original: LayerPass | None,
    weights: Mapping[str, Tensor],
    columns: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Moments]:
    """Moments of the inputs of linears that begin one part of the layer. The passes end there.

    `weights` are the rows that will be rounded for each input, by the role of the first linear. `columns` are factors
    by which weights were multiplied: original inputs are divided by them, the others are already. The original router
    sends other tokens to the experts, so experts have no exact inputs.
    """
    roles, stream = tuple(weights), hidden.stream
    part = hidden.layer.spec.part_of(roles[0])
    exact_roles = tuple(role for role in roles if expert_of(role) is None)
    lacks = original is not None and hidden.residual_part(part) is not None
    moments = {
        role: Moments.empty(w.shape[1], w if lacks or w.shape[0] < w.shape[1] else None, w.device)
        for role, w in weights.items()
    }
    first_held = stream.num_rows - held_out_rows(stream.num_rows)
    for tokens in (piece for number in range(len(stream)) for piece in stream.slices(number, first_held)):
        x = hidden.inputs(tokens, part, roles)
        e = {} if original is None else original.inputs(tokens, part, exact_roles)
        e |= {role: e[role] / columns[role] for role in e.keys() & columns.keys()}
        lack = original.residual(tokens, part) - hidden.residual(tokens, part) if lacks and original else None
        for role in x:
            held = tokens.start >= first_held * stream.seq_len
            moments[role].take(x[role], e.get(role), lack, held=held, dtype=hidden.layer.product_dtype)
        stream.release()
    for each in (hidden, original):
        if each is not None:
            each.part = part
    for found in moments.values():
        found.finish()
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


def run(layer: DecoderLayer, stream: Stream, hidden: Tensor, tokens: slice | None = None) -> Tensor:
    """The layer's output for whole rows [tokens, hidden]. `tokens` says which they are, for a layer that reads more of
    them than states (data.side_inputs)."""
    if tokens is None:
        geometry = stream.geometry(len(hidden) // stream.seq_len, stream.seq_len)
    else:
        geometry = stream.inputs(tokens)
    delta, residual = layer(hidden.clone(), None, geometry.batch, geometry.rope, geometry.kv)
    return joined(delta, residual)


def squared(x: Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))
