"""Memory of a step: pieces do not overlap while they are in use, and come back when they are not."""

from __future__ import annotations

import random

import torch

from lmkit.kernels.cpu import workspace
from lmkit.kernels.cpu.workspace import ALIGN, Workspace


def whole(region: Workspace, num_bytes: int) -> bool:
    piece = region.take(num_bytes)
    return piece is not None


def test_live_pieces_never_overlap_and_all_memory_comes_back() -> None:
    rng, region = random.Random(5), Workspace(1 << 16)
    live: list[torch.Tensor] = []
    for step in range(3000):
        if live and rng.random() < 0.5:
            live.pop(rng.randrange(len(live)))
            continue
        piece = region.take(rng.randrange(1, 3000))
        if piece is None:
            assert live
            continue
        assert piece.data_ptr() % ALIGN == 0
        piece.fill_(step % 251)
        live.append(piece)
        assert all(bool((p == p[0]).all()) for p in live)
    live.clear()
    del piece
    assert whole(region, 1 << 16)


def test_a_view_keeps_its_piece_and_an_alias_does_not() -> None:
    region = Workspace(1 << 12)
    with region.active():
        x = workspace.empty(4, 16)
        row = x[2]
        del x
        assert not whole(region, 1 << 12)
        row.fill_(7)
        alias = region.alias(row)
        assert alias is not None
        assert torch.equal(alias, torch.full((16,), 7.0))
        del row
        assert whole(region, 1 << 12)


def test_what_does_not_fit_is_allocated_elsewhere() -> None:
    region = Workspace(256)
    with region.active():
        assert region.alias(workspace.empty(1000)) is None
    assert region.alias(workspace.empty(4)) is None  # not active
