"""The residual stream from stage to stage: each stage is a thread with an emulated GPU of its own."""

from __future__ import annotations

import random

import pytest
import torch

from lmkit.kernels.cuda.stages import BLOCKS, DEPTH, FLAGS, GpuLink
from tests import emulator
from tests.kernels.cuda.test_ranks import Threads, together

MOST, WIDTH = 37, 1003  # which no vector divides, in more pieces than there are blocks


def linked(count: int, seconds: float = 60.0, *, most: int = MOST, width: int = WIDTH) -> list[GpuLink]:
    sharing, lost = Threads(4 * FLAGS * BLOCKS), torch.zeros(count, 1, dtype=torch.int32)
    found = [GpuLink(sharing, "cpu", lost[n], n, count, most, width, seconds=seconds) for n in range(count)]
    for link in found:
        link.connect([each.handle for each in found])
    return found


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_steps_come_in_their_order_through_all_stages(device: str, count: int) -> None:
    """As many as are under way are sent before the first is received. Rows that pad a step are sent, and fewer are
    received, or none."""
    emulator.install(seed=count, overlap=True)  # a stage touches nothing before the kernels before have ended
    draw = random.Random(count)
    rows = [1, MOST, 0, 5, 0, 17, 33, 2]
    sent = [torch.randint(1000, (min(MOST, n + draw.randrange(4)), WIDTH)).float() for n in rows]

    def first(link: GpuLink) -> torch.Tensor:
        found, waiting = [], list[int]()
        for step in sent:
            link.place(len(step)).copy_(step)
            link.send(len(step))
            waiting.append(rows[len(found) + len(waiting)])
            if len(waiting) == DEPTH:
                found.append(link.receive(waiting.pop(0)).clone())
        return torch.cat([*found, *(link.receive(n).clone() for n in waiting)])

    def stage(index: int, link: GpuLink) -> torch.Tensor:
        if link.is_first:
            return first(link)
        for step in sent:
            link.place(len(step)).copy_(link.receive(len(step)) + index)
            link.send(len(step))
        return torch.empty(0)

    got = together(linked(count), stage)[0]
    more = sum(range(count))
    assert torch.equal(got, torch.cat([step[:n] for step, n in zip(sent, rows, strict=True)]) + more)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_a_stage_waits_for_room_and_not_for_ever(device: str) -> None:
    """A step more than the next stage has room for waits until one is received."""
    first, second = linked(2, seconds=0.2)
    for number in range(DEPTH):
        first.place(1).fill_(number)
        first.send(1)
    assert not first.is_lost
    assert float(second.receive(1)[0, 0]) == 0
    first.place(1).fill_(DEPTH)
    first.send(1)
    assert not first.is_lost
    with first.silent():
        first.send(1)
    first.send(1)
    assert first.is_lost
    assert not second.is_lost
