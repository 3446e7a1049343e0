"""Ops of indexers, which choose the keys that a query sees."""

from __future__ import annotations

from torch import Tensor

from lmkit.kernels.ops import BatchGeometry, KVTensor
from lmkit.kernels.registry import op


@op
def chosen_keys(
    q: Tensor, weights: Tensor, keys: KVTensor, geometry: BatchGeometry, count: int
) -> tuple[Tensor, Tensor]:
    """(slots int32 [T, count], lengths int32 [T]): the `count` keys with the greatest scores among those up to each
    query, or all if they are fewer, in the order of their positions. Slots after a row's length are 0.

    score of a key k = sum over heads h of weights[h] * max(0, q[h] . k)

    q float32 [T, H, D], weights float32 [T, H]; `keys` has one head. Rows lie in sequences as in ops.paged_attention,
    whose keys are already appended. Of equal scores the lower positions are chosen.
    """
