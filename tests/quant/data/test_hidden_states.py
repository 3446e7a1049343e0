"""Hidden states in files are those in memory; the present layer's stay as they are while the next one's are written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lmkit.models.source import ModelSource
from lmkit.quant.data.hidden_states import Stream
from tests.quant.helpers import tiny_checkpoint

ROWS = torch.arange(7 * 20).view(7, 20)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return ModelSource(tiny_checkpoint(tmp_path_factory.mktemp("source")))


def opened(source: ModelSource, folder: Path | None, layer: int = 0) -> Stream:
    return Stream.embedded(source, ROWS, exact=True, batch_tokens=45, folder=folder, layer=layer)


def states(stream: Stream, *, exact: bool = False) -> Tensor:
    return torch.cat([stream.hidden(number, exact=exact) for number in range(len(stream))])


def step(stream: Stream, source: ModelSource) -> None:
    """On to the next layer; the first stream gets outputs halved, in the place of quantization."""
    layer = source.layer(stream.layer, torch.float32)
    for number, output in stream.outputs(layer):
        stream.put(number, output / 2)
    for number, output in stream.outputs(layer, exact=True):
        stream.put(number, output, exact=True)
    stream.advance()


def test_files_hold_what_memory_holds(source: ModelSource, tmp_path: Path) -> None:
    on_disk, in_memory = opened(source, tmp_path), opened(source, None)
    assert len(on_disk) == 4  # batches of two rows, and one of one
    assert torch.equal(states(on_disk), source.embed_tokens()[ROWS.flatten()].float())
    for _ in range(2):
        step(on_disk, source)
        step(in_memory, source)
        for exact in (False, True):
            assert torch.equal(states(on_disk, exact=exact), states(in_memory, exact=exact))
    assert not torch.equal(states(on_disk), states(on_disk, exact=True))
    names = ["exact-0.f32", "exact-1.f32", "hidden-0.f32", "hidden-1.f32"]
    files = sorted(tmp_path.glob("*.f32"))
    assert [file.name for file in files] == names
    assert all(file.stat().st_size == 7 * 20 * 64 * 4 for file in files)


def test_a_layer_that_was_not_finished_begins_from_the_same_states(source: ModelSource, tmp_path: Path) -> None:
    stream = opened(source, tmp_path)
    step(stream, source)
    before = states(stream).clone(), states(stream, exact=True).clone()
    for number in range(len(stream) - 1):
        stream.put(number, torch.full((40, 64), 7.0))
        stream.put(number, torch.full((40, 64), 8.0), exact=True)
    again = opened(source, tmp_path, layer=1)
    assert torch.equal(states(again), before[0])
    assert torch.equal(states(again, exact=True), before[1])


def test_some_batches_are_run_without_the_others(source: ModelSource) -> None:
    stream = opened(source, None)  # batches of 2, 2, 2 and 1 rows
    layer = source.layer(0, torch.float32)
    every, some = dict(stream.outputs(layer)), dict(stream.outputs(layer, every=3))
    assert list(every) == [0, 1, 2, 3]
    assert list(some) == [0, 3]
    assert all(torch.equal(some[number], every[number]) for number in some)
    assert stream.rows_of(1) == 7
    assert stream.rows_of(3) == 3
