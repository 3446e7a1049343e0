"""Files written tensor by tensor: read by others, aligned for vectors, and whole or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from lmkit.errors import CheckpointError
from lmkit.formats.safetensors_file import SafetensorsFile
from lmkit.formats.safetensors_stream import ALIGNMENT, SafetensorsStream

TENSORS = {
    "bytes": torch.arange(5, dtype=torch.uint8),
    "halves": torch.randn(3, 7).half(),
    "none": torch.zeros(0, 4),
    "floats": torch.randn(33, 2),
}


def write(path: Path, header_bytes: int = 4096) -> None:
    with SafetensorsStream(path, header_bytes) as stream:
        for name, tensor in TENSORS.items():
            stream.add(name, tensor)
        stream.finish({"made": "here"})


def test_it_is_read_by_us_and_by_the_library(tmp_path: Path) -> None:
    write(tmp_path / "a")
    file, library = SafetensorsFile(tmp_path / "a"), safetensors.torch.load_file(tmp_path / "a")
    assert file.metadata == {"made": "here"}
    assert file.infos.keys() == library.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(file.tensor(name), tensor)
        assert torch.equal(library[name], tensor)
        assert file.infos[name].start % ALIGNMENT == 0
        assert not tensor.numel() or file.tensor(name).data_ptr() % ALIGNMENT == 0


def test_the_same_calls_write_the_same_bytes(tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_header_without_room_is_an_error(tmp_path: Path) -> None:
    with SafetensorsStream(tmp_path / "a", 100) as stream:
        for i in range(100):
            stream.add(f"{i}", TENSORS["bytes"])
        with pytest.raises(CheckpointError, match="its header takes"):
            stream.finish({})


def test_a_file_without_its_header_is_refused(tmp_path: Path) -> None:
    with SafetensorsStream(tmp_path / "a", 100) as stream:
        stream.add("bytes", TENSORS["bytes"])
    with pytest.raises(CheckpointError):
        SafetensorsFile(tmp_path / "a")


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "a")
    with pytest.raises(CheckpointError, match="cannot be written"):
        SafetensorsStream(tmp_path / "a", 100)


def test_released_tensors_are_read_again_from_the_file(tmp_path: Path) -> None:
    write(tmp_path / "a")
    file = SafetensorsFile(tmp_path / "a")
    floats = file.tensor("floats")
    floats[0] = 7
    file.release()
    assert torch.equal(floats, TENSORS["floats"])


def test_a_full_disk_is_one_error() -> None:
    with pytest.raises(CheckpointError, match="No space left"), SafetensorsStream(FullDisk("/dev/full"), 100) as stream:
        stream.add("floats", torch.zeros(1 << 20))


class FullDisk(type(Path())):  # type: ignore[misc]
    """A device that takes nothing; it exists, so it is opened for writing."""

    def open(self, mode: str = "r", *args: Any, **options: Any) -> Any:
        return super().open("r+b", *args, **options)
