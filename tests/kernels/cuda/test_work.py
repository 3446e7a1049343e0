"""A step's work list for attention: every tile belongs to one item, and long sequences have more of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmkit.kernels.cuda import attention
from lmkit.kernels.cuda.module import Kernel

LIST = """#include "work.cuh"
extern "C" __global__ void __launch_bounds__(128)
    work(const i32* tiles, int sequences, int heads, int places, int cost, i32* items) {
    const Work work = find_work([&](int s) { return tiles[s]; }, sequences, blockIdx.x, gridDim.x, heads, places, cost);
    i32* item = items + 3 * blockIdx.x;
    if (threadIdx.x == blockDim.x - 25) item[0] = work.sequence, item[1] = work.split, item[2] = work.splits;
}
EXPORT(work)
"""
HEADS, COST = 8, 3


def splits_of(tiles: list[int], places: int, folder: Path, device: str) -> list[int]:
    """Splits of each sequence, from a list that is checked to be whole."""
    (path := folder / "work.cu").write_text(LIST)
    most = attention.num_items(len(tiles), HEADS, places)
    items = torch.full((most, 3), -2, dtype=torch.int32, device=device)
    given = torch.tensor(tiles, dtype=torch.int32, device=device)
    for threads in (128, 32):
        alone = items.clone()
        Kernel(str(path), "work")(most, threads, [given, len(tiles), HEADS, places, COST, items], shared=8 * threads)
    assert torch.equal(alone, items), "a block's warps share the search"
    found = [item for item in items.tolist() if item[0] >= 0]
    counts = [sum(item[0] == s for item in found) for s in range(len(tiles))]
    assert found == [[s, split, count] for s, count in enumerate(counts) for split in range(count)]
    assert items[len(found) :, 0].eq(-1).all(), "the others have nothing to do"
    assert all((count > 0) == (length > 0) for count, length in zip(counts, tiles, strict=True))
    return counts


@pytest.mark.parametrize(
    ("tiles", "places", "expected"),
    [
        ([16] * 16, 264, [2] * 16),  # as equal splits: one wave
        ([16] * 64, 264, [1] * 64),
        ([16, 0, 16], 264, [16, 0, 16]),  # a tile each, one wave
        ([1] * 40, 264, [1] * 40),
    ],
)
def test_equal_lengths(tiles: list[int], places: int, expected: list[int], tmp_path: Path, device: str) -> None:
    assert splits_of(tiles, places, tmp_path, device) == expected


def test_a_long_sequence_beside_short_ones(tmp_path: Path, device: str) -> None:
    """One of 32k tokens beside 63 of 1k: nobody waits for one block that has half as much as all others."""
    counts = splits_of([16] * 20 + [512] + [16] * 43, 264, tmp_path, device)
    assert counts[20] > 20
    assert counts[0] == 1


@pytest.mark.parametrize("seed", range(4))
def test_any_lengths(seed: int, tmp_path: Path, device: str) -> None:
    torch.manual_seed(seed)
    tiles = (torch.rand(int(torch.randint(2, 100, ()))) ** 6 * 3000).int().tolist()
    counts = splits_of(tiles, 264, tmp_path, device)
    assert max(counts) <= 64
    longest = max(length / count for length, count in zip(tiles, counts, strict=True) if count)
    average = sum(tiles) * HEADS / 264
    assert longest <= max(2 * average, 6 + max(tiles) / 32), "no item is much longer than a fair share"
