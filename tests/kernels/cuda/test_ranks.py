"""Exchanges between ranks: each rank is a thread with an emulated GPU of its own, and memory is what they share."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pytest
import torch

from lmkit.kernels import ops
from lmkit.kernels.cuda import ranks as ranks_module
from lmkit.kernels.cuda.ranks import GpuRanks, Layout
from tests import emulator

SMALL = Layout(blocks=4, piece=2048)  # so that a few thousand numbers take several slices
VOCAB = 1001
T = TypeVar("T")


class Threads:
    """Memory of ranks that are threads of one process. It begins as NaN, but for its first `head` bytes."""

    def __init__(self, head: int) -> None:
        self._head, self._kept = head, list[np.ndarray]()

    def allocate(self, num_bytes: int) -> tuple[int, bytes]:
        memory = np.full(num_bytes, 0xFF, np.uint8)
        memory[: self._head] = 0
        self._kept.append(memory)
        return memory.ctypes.data, memory.ctypes.data.to_bytes(8, "little")

    def open(self, handle: bytes) -> int:
        return int.from_bytes(handle, "little")


def connected(size: int, seconds: float = 60.0) -> list[GpuRanks]:
    sharing = Threads(4 * (size + 1) * SMALL.blocks)
    found = [
        GpuRanks(sharing, "cpu", torch.zeros(1, dtype=torch.int32), rank, size, VOCAB, layout=SMALL, seconds=seconds)
        for rank in range(size)
    ]
    for rank in found:
        rank.connect([each.handle for each in found])
    return found


def together(ranks: list[T], call: Callable[[int, T], torch.Tensor]) -> list[torch.Tensor]:
    """What `call` returns for every rank. They begin in random order."""
    order = random.Random(len(ranks)).sample(range(len(ranks)), len(ranks))
    with ThreadPoolExecutor(len(ranks)) as pool:
        calls = {rank: pool.submit(call, rank, ranks[rank]) for rank in order}
        return [calls[rank].result() for rank in range(len(ranks))]


@pytest.mark.parametrize("two_shots", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_sums_are_the_same_bits_on_all_ranks(
    device: str, size: int, two_shots: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one number up to several slices for each block, one sum after the other, as a step has them."""
    monkeypatch.setattr(ranks_module, "SAVED_BYTES", -1 if two_shots else 1 << 40)
    emulator.install(seed=size, overlap=True)  # a rank touches nothing before the kernels before have ended
    shapes = [(1, 1), (1, 512), (3, 1367), (5, 2048), (9, 2500), (2, 2048), (1, 7)]
    inputs = [[torch.randn(shape) for shape in shapes] for _ in range(size)]
    want = [sum((inputs[rank][i] for rank in range(1, size)), inputs[0][i]) for i in range(len(shapes))]

    def sums(rank: int, ranks: GpuRanks) -> torch.Tensor:
        return torch.cat([ranks.sum(x.clone()).flatten() for x in inputs[rank]])

    found = together(connected(size), sums)
    assert all(torch.equal(each, found[0]) for each in found)
    assert torch.equal(found[0], torch.cat([x.flatten() for x in want]))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_parts_of_rows_come_to_rank_0(device: str, size: int) -> None:
    """Parts are uneven, and there are several slices. In between come sums and the first rank's numbers."""
    whole = torch.randn(17, VOCAB)
    sampled = torch.randint(-(2**62), 2**62, (3000,))

    def steps(rank: int, ranks: GpuRanks) -> torch.Tensor:
        for _ in range(2):
            part = whole[:, VOCAB * rank // size : VOCAB * (rank + 1) // size].contiguous()
            out = ranks.side_by_side(part)
            assert float(ranks.sum(torch.ones(1, 5)).sum()) == 5 * size
            tokens = sampled.clone() if rank == 0 else torch.zeros_like(sampled)
            ranks.from_first(tokens)
            assert torch.equal(tokens, sampled)
        return out

    found = together(connected(size), steps)
    assert torch.equal(found[0], whole)
    assert all(len(each) == 0 for each in found[1:])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_rows_of_experts_come_to_all_ranks(device: str, size: int) -> None:
    """Of 7 experts, some of which have no rows, and once all of a rank. What a rank does not have means nothing. In
    between come sums."""
    emulator.install(seed=size, overlap=True)
    held = [range(-(-7 * rank // size), -(-7 * (rank + 1) // size)) for rank in range(size)]
    kinds = (1, 0, 7), (40, 1, 6), (9, 0, 2), (60, 0, 7)
    chosen = [torch.randint(low, high, (tokens, 2)) for tokens, low, high in kinds]
    whole = [torch.randn(2 * len(experts), width) for experts, width in zip(chosen, (64, 132, 7, 260), strict=True)]

    def exchanges(rank: int, ranks: GpuRanks) -> torch.Tensor:
        found = []
        for experts, rows in zip(chosen, whole, strict=True):
            places = ops.expert_places.named("reference")(experts, 7, held[rank])
            sorted_experts = experts.flatten().sort(stable=True).values
            mine = torch.tensor([expert in held[rank] for expert in sorted_experts.tolist()])
            y = torch.where(mine[:, None], rows, torch.nan)
            ranks.exchange(y, places)
            assert float(ranks.sum(torch.ones(1, 5)).sum()) == 5 * size
            found.append(y.flatten())
        return torch.cat(found)

    want = torch.cat([rows.flatten() for rows in whole])
    assert all(torch.equal(each, want) for each in together(connected(size), exchanges))


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_nobody_waits_for_a_lost_rank_for_ever(device: str, told: bool) -> None:
    """Its end is told, or the time is over. Later sums do not wait at all."""
    first, _ = connected(2, seconds=600.0 if told else 0.05)
    if told:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(first.sum, torch.ones(1, 8))
            first.lose()
            waiting.result()
    else:
        first.sum(torch.ones(1, 8))
    assert first.is_lost
    first.sum(torch.ones(1, 8))
