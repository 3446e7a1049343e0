"""Copies of blocks, one after the other, in parts of every size and alignment."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmkit.kernels.cuda.blocks import BlockCopier

SIZES = [16, 4096, 5 * 4096 + 32, 4, 1028, 1, 77, 4099]
PAIRS = [
    [],
    [(0, 3)],
    [(0, 3), (3, 1), (4, 0)],  # what was written is read, and overwritten where it was read
    [(1, 2), (2, 3), (3, 4), (4, 1)],
    [(2, 5), (3, 5), (5, 6), (6, 2)],
]


def random_parts(shift: int) -> list[Tensor]:
    """Seven blocks of each size; `shift` bytes behind an address that is a multiple of 16."""
    flat = [torch.randint(256, (shift + 7 * size,), dtype=torch.uint8) for size in SIZES]
    return [part[shift:].view(7, -1) for part in flat]


@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("shift", [0, 4, 3])
def test_copies_are_made_one_after_the_other(device: str, pairs: list[tuple[int, int]], shift: int) -> None:
    parts = random_parts(shift)
    expected = [part.clone() for part in parts]
    for part in expected:
        for source, target in pairs:
            part[target] = part[source]
    there = [torch.empty(shift + part.numel(), dtype=torch.uint8, device=device)[shift:].view(7, -1) for part in parts]
    for part, copy in zip(parts, there, strict=True):
        copy.copy_(part)
    BlockCopier(there).copy(pairs)
    assert all(torch.equal(part.cpu(), want) for part, want in zip(there, expected, strict=True))


def test_blocks_beyond_two_to_the_thirtyone_bytes_are_addressed(device: str) -> None:
    if device == "cpu":
        pytest.skip("takes 2 GB")
    part = torch.zeros(3, 1 << 30, dtype=torch.uint8, device=device)
    part[0] = 7
    BlockCopier([part]).copy([(0, 2)])
    assert bool((part[2] == 7).all())
    assert not bool(part[1].any())
