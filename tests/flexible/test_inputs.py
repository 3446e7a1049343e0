"""Linears that read one tensor are one product, unless it is changed between them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lmkit.models.flexible.linears import Product, Uses


def test_an_input_that_is_changed_in_place_is_computed_again() -> None:
    one, two = torch.randn(2, 16, 16)
    product, x = Product({"a": (one, None), "b": (two, None)}, "exact"), torch.randn(3, 16)
    product.take("a", x, {"a": 16, "b": 16})
    x *= 2
    torch.testing.assert_close(product.take("b", x, {"a": 16, "b": 16}), x @ two.T)


class Changes(nn.Module):
    """Two linears that read one tensor, which is changed between them or not."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.a, self.b, self._factor = nn.Linear(4, 4), nn.Linear(4, 4), factor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        return y + self.b(x if self._factor == 1 else x.mul_(self._factor))


@pytest.mark.parametrize(("factor", "shared"), [(1.0, [("a", "b")]), (2.0, [])])
def test_linears_share_an_input_only_if_nothing_changes_it(factor: float, shared: list[tuple[str, ...]]) -> None:
    module = Changes(factor)
    with Uses(module) as uses, torch.no_grad():
        module(torch.randn(2, 4))
    assert uses.shared == shared
