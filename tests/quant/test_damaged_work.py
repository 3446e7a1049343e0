"""Files of a killed run that were damaged since: a clear error, never a traceback."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings

from lmkit.errors import CheckpointError
from lmkit.quant.data.workdir import WorkFolder
from tests.mutation import mutated


@dataclass
class Stats:
    count: int = 0
    total: torch.Tensor | None = None


class Record(msgspec.Struct):
    name: str
    values: list[float]


RECORD = msgspec.json.encode(Record("layer 日", [1.5, 2.0]))


def committed(folder: Path) -> WorkFolder:
    work = WorkFolder(folder / "work", folder / "out")
    work.path.mkdir()
    work.commit(0, {}, Stats(7, torch.ones(3)), RECORD)
    return work


@pytest.mark.parametrize("suffix", [".json", ".kv.safetensors"])
def test_mutated_files_of_a_layer(tmp_path: Path, suffix: str) -> None:
    work = committed(tmp_path)
    (file,) = work.path.glob(f"*{suffix}")
    whole = file.read_bytes()

    @settings(deadline=None, max_examples=100)
    @given(data=mutated(whole))
    def try_one(data: bytes) -> None:
        file.write_bytes(data)
        try:
            work.record(0, Record)
            work.restore(0, Stats())
        except CheckpointError as error:
            assert str(work.path) in str(error)  # noqa: PT017 - some mutations change nothing that is read

    try_one()


def test_a_renamed_figure_is_refused(tmp_path: Path) -> None:
    work = committed(tmp_path)
    (file,) = work.path.glob("*.kv.safetensors")
    file.write_bytes(file.read_bytes().replace(b'"total"', b'"tosal"'))
    with pytest.raises(CheckpointError, match="'tosal' is damaged; delete this folder"):
        work.restore(0, Stats())
