"""The container: what other writers make is read, what we write others read, and no header can lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmkit.errors import CheckpointError
from lmkit.formats.safetensors_file import DTYPES, MAX_HEADER_BYTES, SafetensorsFile, write_safetensors
from tests.formats.files import entry, raw

fuzz = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def example(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bytes that are a value of `dtype`."""
    count = torch.Size(shape).numel() * dtype.itemsize
    values = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return values.view(dtype).reshape(shape)


TENSORS = {
    f"{name}.{len(shape)}": example(dtype, shape) for name, dtype in DTYPES.items() for shape in [(), (3,), (2, 5)]
}
TENSORS["empty"] = torch.zeros(0, 7)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)


def check_equal(found: dict[str, torch.Tensor]) -> None:
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert same_bytes(found[name], tensor), name


def opened(path: Path, data: bytes) -> SafetensorsFile:
    path.write_bytes(data)
    return SafetensorsFile(path)


def test_reads_the_library(tmp_path: Path) -> None:
    safetensors.torch.save_file(TENSORS, tmp_path / "a", {"made": "by the library"})
    file = SafetensorsFile(tmp_path / "a")
    check_equal({name: file.tensor(name) for name in file.infos})
    info = file.infos["BF16.2"]
    assert (info.dtype, info.shape, info.nbytes) == ("BF16", (2, 5), 20)


def test_the_library_reads_us(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a", TENSORS)
    check_equal(safetensors.torch.load_file(tmp_path / "a"))
    with safetensors.safe_open(tmp_path / "a", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    ours = SafetensorsFile(tmp_path / "a")
    assert all(info.start % DTYPES[info.dtype].itemsize == 0 for info in ours.infos.values())


def test_written_bytes_depend_on_the_tensors_alone(tmp_path: Path) -> None:
    strided = torch.arange(12, dtype=torch.int32).reshape(3, 4).T
    write_safetensors(tmp_path / "a", {"x": strided, "y": torch.ones(2)})
    write_safetensors(tmp_path / "b", {"y": torch.ones(2), "x": strided.contiguous()})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_safetensors(tmp_path / "missing" / "a", {"x": strided})


def test_tensors_are_private_views(tmp_path: Path) -> None:
    data = safetensors.torch.save({"x": torch.arange(4.0)})
    file = opened(tmp_path / "a", data)
    tensor = file.tensor("x")
    assert tensor.data_ptr() == file.tensor("x").data_ptr()  # no copy
    del file
    tensor += 1  # the mapping outlives its file object
    assert tensor.tolist() == [1, 2, 3, 4]
    assert (tmp_path / "a").read_bytes() == data


def test_misaligned_tensor_is_read(tmp_path: Path) -> None:
    header = {"a": entry([1], 0, 1), "b": entry([2], 1, 9, "F32")}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file = opened(tmp_path / "a", raw(text, b"\x07" + torch.tensor([1.5, -2.0]).numpy().tobytes()))
    assert file.tensor("b").tolist() == [1.5, -2.0]
    assert file.tensor("b").data_ptr() % 4 == 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "truncated: 0 bytes"),
        (b"\x02\0\0\0\0\0\0", "truncated: 7 bytes"),
        (raw(b"{}", length=3), "header ends at byte 11, the file has 10"),
        (raw(b"{}", length=MAX_HEADER_BYTES + 1), "the limit is"),
        (raw(b"{}", length=2**64 - 1), "the limit is"),
        (raw(b"\xff\xfe"), "not UTF-8"),
        (raw(b"{'a': 1}"), "not valid JSON"),
        (raw(b"[]"), "expected a JSON object"),
        (raw(b"[" * 100_000), "nested too deeply"),
        (raw(b'{"a": ' + b"1" * 5000 + b"}"), "not valid JSON"),
        (raw({"__metadata__": {"format": 1}}), "__metadata__"),
        (raw({"__metadata__": None}), "__metadata__"),
        (raw({"a\nb": entry([0], 0, 0)}), "printable"),
        (raw(b'{"\\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}'), "printable"),
        (raw({"a": None}), "nothing else"),
        (raw({"a": entry([0], 0, 0) | {"extra": 1}}), "nothing else"),
        (raw({"a": entry([0], 0, 0, "F4")}), "dtype 'F4'"),
        (raw({"a": entry([0], 0, 0) | {"dtype": []}}), "dtype"),
        (raw({"a": entry([-1], 0, 0)}), "shape"),
        (raw({"a": entry([True], 0, 1)}, b"1"), "shape"),
        (raw({"a": entry([1.0], 0, 1)}, b"1"), "shape"),  # type: ignore[list-item]
        (raw({"a": entry([2**62, 2**62, 0], 0, 0)}), "shape"),
        (raw({"a": entry([1] * 9, 0, 1)}, b"1"), "shape"),
        (raw({"a": entry([2**64], 0, 2**64)}), "shape"),
        (raw({"a": entry([2], 0, 1)}, b"1"), "takes 2 bytes, its data_offsets hold 1"),
        (raw({"a": entry([2**40, 2**20], 0, 8, "F32")}, b"12345678"), "takes"),
        (raw({"a": entry([1], 1, 0)}, b"1"), "data_offsets"),
        (raw({"a": entry([1], 0, 1) | {"data_offsets": [0]}}, b"1"), "data_offsets"),
        (raw({"a": entry([1], -1, 0)}, b"1"), "data_offsets"),
        (raw({"a": entry([4], 0, 4)}, b"123"), "truncated: its header describes"),
        (raw({"a": entry([2], 0, 2)}, b"123"), "bytes after the last tensor"),
        (raw({"a": entry([1], 1, 2)}, b"12"), "leaves a gap"),
        (raw({"a": entry([2], 0, 2), "b": entry([2], 1, 3)}, b"123"), "overlaps"),
        (raw({"a": entry([2], 0, 2), "b": entry([2], 0, 2)}, b"12"), "overlaps"),
        (raw(b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": 1}', b"1"), "'a' is given twice"),
        (raw(b'{"a": {"dtype": "U8", "dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}', b"1"), "given twice"),
        (raw(b'{"a": {"dtype": "U8", "shape": [NaN], "data_offsets": [0, 1]}}', b"1"), "not a JSON number"),
    ],
)
def test_refuses(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        opened(tmp_path / "model.safetensors", data)
    assert str(tmp_path / "model.safetensors") in str(caught.value)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


VALID = safetensors.torch.save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4, dtype=torch.int32)})
HEADER_END = 8 + int.from_bytes(VALID[:8], "little")


def either_refused_or_whole(path: Path, data: bytes) -> None:
    """No crash, and nothing larger than the file."""
    try:
        file = opened(path, data)
    except CheckpointError:
        return
    tensors = [file.tensor(name) for name in file.infos]
    assert sum(t.nbytes for t in tensors) == len(data) - 8 - int.from_bytes(data[:8], "little")
    for tensor in tensors:
        tensor.clone()


@fuzz
@given(st.lists(st.tuples(st.integers(0, HEADER_END - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_mutated_headers(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    data = bytearray(VALID)
    for place, value in changes:
        data[place] = value
    either_refused_or_whole(tmp_path / "a", bytes(data))


@fuzz
@given(st.integers(0, len(VALID) - 1), st.binary(max_size=8))
def test_truncated_and_extended_files(tmp_path: Path, length: int, tail: bytes) -> None:
    either_refused_or_whole(tmp_path / "a", VALID[:length] + tail)
    with pytest.raises(CheckpointError):
        opened(tmp_path / "a", VALID[:length])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
sizes = st.lists(st.integers(0, 6) | st.integers(-(2**70), 2**70), max_size=3)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F32", "BF16", "I64", "F8_E4M3", "X"]),
        "shape": sizes | json_values,
        "data_offsets": st.lists(st.integers(0, 16), min_size=2, max_size=2) | json_values,
    }
)


@fuzz
@given(
    st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), entries | json_values, max_size=3), st.integers(0, 16)
)
def test_lying_headers(tmp_path: Path, header: dict[str, Any], size: int) -> None:
    either_refused_or_whole(tmp_path / "a", raw(header, bytes(size)))
