"""Reference draws: one row at a time, in numpy and float64. Formulas: lmkit.kernels.ops.draw."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.registry import implements


@implements(ops.draw, "reference", device="any")
def draw(
    logits: Tensor, rows: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, share: Tensor
) -> Tensor:
    tokens = []
    for i, row in enumerate(rows.tolist()):
        values = logits[row].float().cpu().numpy()
        ids, k = np.arange(len(values)), int(top_k[i])
        if 0 < k < len(ids):
            ids = most_likely(values, k)
        weights = relative_weights(values[ids], values.max(), float(temperature[i]))
        if float(top_p[i]) < 1:
            kept = nucleus(weights, float(top_p[i]))
            ids, weights = ids[kept], weights[kept]
        kept = np.flatnonzero(weights >= float(min_p[i]))  # the most likely token's weight is 1
        sums = cumulative(weights[kept])
        tokens.append(int(ids[kept][sums.searchsorted(float(share[i]) * sums[-1], side="right")]))
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def relative_weights(logits: np.ndarray, top: np.float32, temperature: float) -> np.ndarray:
    """float64 weights relative to the most likely token's, which is exactly 1. `top` is that token's logit."""
    scaled = np.subtract(logits, top, dtype=np.float64)
    scaled /= temperature
    weights: np.ndarray = torch.from_numpy(scaled).exp().numpy()  # three times faster than numpy's without AVX-512
    return weights


def cumulative(weights: np.ndarray) -> np.ndarray:
    """Running sums, added one by one from the left in float64."""
    sums: np.ndarray = torch.from_numpy(weights).cumsum(0).numpy()  # four times faster than numpy's
    return sums


def most_likely(values: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` greatest of `values`, ascending. Of equal values the lower ids are taken."""
    return _greatest(values, np.partition(values, len(values) - count)[len(values) - count], count)


def nucleus(weights: np.ndarray, top_p: float) -> np.ndarray:
    """Ids, ascending, of the fewest weights whose sum reaches `top_p` of the total: at least one. arXiv 1904.09751."""
    total = weights.sum()
    # Weights below this threshold are left out. All of them together are less than 1 - top_p of the total. So only
    # some hundred weights are sorted, not the vocabulary.
    candidates = weights[weights >= (1 - top_p) * total / len(weights)]
    ranked = np.sort(candidates)[::-1]
    count = min(int(cumulative(ranked.copy()).searchsorted(top_p * total)) + 1, len(ranked))
    return _greatest(weights, ranked[count - 1], count)


def _greatest(values: np.ndarray, floor: np.floating, count: int) -> np.ndarray:
    """Ids of the `count` greatest of `values`. `floor` is the least of these."""
    ids = np.flatnonzero(values >= floor)
    excess = len(ids) - count
    if excess:
        ties = np.flatnonzero(values[ids] == floor)
        ids = np.delete(ids, ties[len(ties) - excess :])
    return ids
