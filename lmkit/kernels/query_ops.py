"""Ops of queries before attention."""

from __future__ import annotations

from torch import Tensor

from lmkit.attention_spec import Growth
from lmkit.kernels.registry import op


@op
def grown_queries(q: Tensor, positions: Tensor, growth: Growth) -> Tensor:
    """q [T, num_heads, D], rows at any stride, times the factor of each of the positions int32 [T] -> [T, num_heads, D]
    in q's dtype. `Growth` has the formula."""
