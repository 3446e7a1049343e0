"""How much the errors of a linear's outputs count for the loss.

H_O is the sum of g g^T over tokens, for the gradients g of the cross entropy at the outputs of linears that are
computed together. Labels are samples of the model's own distribution, so H_O is a factor of the Fisher information
(YAQA, arXiv 2505.22988). It is dense up to MAX_BLOCK outputs. More outputs are divided into blocks, and H_O has the
blocks on its diagonal.

A layer's curvature maps the roles of such linears, joined by commas, to float32 [out, block]: the rows of one block
after the other. The last block may be smaller; its rows end in zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lmkit.layers.linear import in_full
from lmkit.models.layer_spec import LayerSpec
from lmkit.quant.layer.moments import held_out_rows
from lmkit.quant.layer.products import add_square, mirror

MAX_BLOCK = 2048
MAX_TOKENS = 32768  # that H_O is the sum of
DAMPING = 0.1  # share of the mean of a block's diagonal that is added to it

Curvature = dict[str, Tensor]


def swept_rows(num_rows: int, seq_len: int) -> int:
    """How many of the calibration rows H_O is taken from. None of them is held out."""
    return min(num_rows - held_out_rows(num_rows), max(1, MAX_TOKENS // seq_len))


def block_size(num_outputs: int) -> int:
    """Outputs of a block: as few blocks as possible, of nearly one size."""
    return -(-num_outputs // -(-num_outputs // MAX_BLOCK))


def add_gradients(curvature: Curvature, roles: tuple[str, ...], gradients: Tensor, dtype: torch.dtype) -> None:
    """Add tokens. gradients [tokens, out] at the outputs of `roles`; products are of `dtype`."""
    name, num_outputs = ",".join(roles), gradients.shape[1]
    if name not in curvature:
        curvature[name] = torch.zeros(num_outputs, block_size(num_outputs), device=gradients.device)
    short = in_full(gradients.to(dtype))
    for part, block in _blocks(curvature[name]):
        add_square(block, short[:, part].contiguous())


def finish(curvature: Curvature) -> None:
    """Complete a layer's curvature after the last tokens."""
    for stored in curvature.values():
        for _, block in _blocks(stored):
            mirror(block)


def weights_of_outputs(
    curvature: Mapping[str, Tensor], spec: LayerSpec, group: tuple[str, ...], factors: Mapping[str, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """(rows int64 [n], H_O float32 [n, n]) of each block of the weights of `group`, one below the other.

    `factors` are those by which rows of weights were multiplied since the gradients were taken. H_O is divided by the
    mean of its diagonal and damped. Blocks without gradients, as those of an expert that saw no token, are left out.
    """
    starts, end = {}, 0
    for role in group:
        starts[role], end = end, end + spec.linear_shape(role)[0]
    for name, stored in curvature.items():
        roles = name.split(",")
        if not starts.keys() & set(roles):
            continue
        rows, factor = [], []
        for role in roles:
            size = spec.linear_shape(role)[0]
            rows.append(torch.arange(size) + starts[role] if role in starts else torch.full((size,), -1))
            factor.append(factors[role].to(stored.device) if role in factors else stored.new_ones(size))
        places, scale = torch.cat(rows), torch.cat(factor)
        for part, block in _blocks(stored):
            wanted = (places[part] >= 0).nonzero()[:, 0]
            own = scale[part][wanted]
            found = block[wanted][:, wanted] / (own[:, None] * own)
            mean = found.diagonal().mean()
            if len(wanted) and bool(found.isfinite().all()) and mean > 0:
                found /= mean
                found.diagonal().add_(DAMPING)
                yield places[part][wanted], found


def _blocks(stored: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(outputs, H_O [n, n] of them) for each block."""
    size = stored.shape[1]
    for begin in range(0, len(stored), size):
        part = slice(begin, min(begin + size, len(stored)))
        yield part, stored[part, : part.stop - begin]
