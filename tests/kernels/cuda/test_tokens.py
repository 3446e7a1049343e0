"""Tokens the host did not know, against the reference."""

from __future__ import annotations

import pytest
import torch

from lmkit.kernels.cuda import tokens
from lmkit.kernels.reference import elementwise as reference


@pytest.mark.parametrize("count", [1, 255, 257, 700])
def test_known_tokens(device: str, count: int) -> None:
    ids = torch.randint(-5, 50, (count,))
    last = torch.tensor([7, 0, -2, 2**31 + 5, 9])
    got, expected = ids.to(device, copy=True), ids.clone()
    tokens.known_tokens(got, last.to(device))
    reference.known_tokens(expected, last)
    assert got.tolist() == expected.tolist()
    assert int(got.min()) >= 0
    assert torch.equal(got.cpu()[ids >= 0], ids[ids >= 0])
