"""Folders: single and sharded checkpoints, and everything about them that can be wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmkit.errors import CheckpointError
from lmkit.formats.checkpoint import CheckpointReader
from tests.formats.files import folder, sharded

X, Y = torch.arange(6.0).reshape(2, 3), torch.arange(4, dtype=torch.bfloat16)


def refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(path)


def test_single_file(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", {"model.x": X, "y": Y}, {"model_type": "llama"})
    with CheckpointReader(path) as reader:
        assert reader.path == path
        assert reader.config == {"model_type": "llama"}
        assert reader.names() == ["model.x", "y"]
        assert reader.has("y")
        assert not reader.has("z")
        info = reader.info("model.x")
        assert (info.dtype, info.shape, info.nbytes) == ("F32", (2, 3), 24)
        assert (reader.nbytes(), reader.nbytes("model."), reader.nbytes("z")) == (32, 24, 0)
        x, y = reader.tensor("model.x"), reader.tensor("y")
        with pytest.raises(CheckpointError, match="'z' is missing"):
            reader.tensor("z")
    assert torch.equal(x, X)
    assert torch.equal(y, Y)
    with pytest.raises(CheckpointError):
        reader.tensor("y")


def test_shards(tmp_path: Path) -> None:
    path = sharded(tmp_path / "m", {"a.safetensors": {"x": X}, "b.safetensors": {"y": Y, "z": X}})
    reader = CheckpointReader(str(path))
    assert reader.names() == ["x", "y", "z"]
    assert torch.equal(reader.tensor("y"), Y)
    assert reader.nbytes() == 24 + 8 + 24


def test_a_single_file_may_have_an_index(tmp_path: Path) -> None:
    assert CheckpointReader(sharded(tmp_path / "m", {"model.safetensors": {"x": X}})).names() == ["x"]


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    shards = {"a.safetensors": {"x": X}, "b.safetensors": {"y": Y}}
    right = {"x": "a.safetensors", "y": "b.safetensors"}
    refused(sharded(tmp_path / "1", shards, right | {"z": "b.safetensors"}), "b.safetensors has no tensor 'z'")
    refused(sharded(tmp_path / "2", shards, right | {"x": "b.safetensors"}), "b.safetensors has no tensor 'x'")
    refused(sharded(tmp_path / "3", shards | {"b.safetensors": {"y": Y, "w": X}}, right), "'w' is not in")
    twice = {"a.safetensors": {"x": X}, "b.safetensors": {"y": Y, "x": X}}
    refused(sharded(tmp_path / "4", twice, right), "'x' is also in a.safetensors")
    refused(sharded(tmp_path / "5", shards, right | {"z": "c.safetensors"}), "c.safetensors: no such file")
    refused(sharded(tmp_path / "6", shards, {}), "weight_map")
    path = sharded(tmp_path / "7", shards)
    (path / "model.safetensors").write_bytes((path / "a.safetensors").read_bytes())
    refused(path, "has both")
    path = sharded(tmp_path / "8", shards)
    (path / "b.safetensors").write_bytes((path / "b.safetensors").read_bytes()[:-1])
    refused(path, r"b.safetensors: truncated: its header describes \d+ bytes, the file has \d+")


@pytest.mark.parametrize(
    "file_name",
    ["../m.safetensors", "/etc/passwd", "sub/a.safetensors", "..", "", "a.bin", 3, None, "a" * 5000, "a\0.safetensors"],
)
def test_index_names_files_of_the_folder(tmp_path: Path, file_name: Any) -> None:
    (tmp_path / "m.safetensors").write_bytes(b"outside")
    refused(
        sharded(tmp_path / "m", {"a.safetensors": {"x": X}}, {"x": file_name}), "not a .safetensors file of this folder"
    )


def test_a_name_longer_than_a_file_system_takes(tmp_path: Path) -> None:
    path = sharded(tmp_path / "m", {"a.safetensors": {"x": X}}, {"x": "a" * 5000 + ".safetensors"})
    refused(path, "no such file")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_links_must_not_lead_outside(tmp_path: Path, name: str) -> None:
    path = folder(tmp_path / "m", {"x": X})
    os.rename(path / name, tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    refused(path, f"{name}: links to a file outside")
    (path / name).unlink()
    (path / name).symlink_to(name)
    refused(path, "no such file|not a regular file|has neither")
    (path / name).unlink()
    os.rename(tmp_path / "elsewhere", path / "elsewhere")
    (path / name).symlink_to("elsewhere")
    assert CheckpointReader(path).names() == ["x"]


def test_the_hub_cache_is_links_to_blobs(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots").mkdir()
    path = folder(tmp_path / "snapshots" / "0123", {"x": X})
    for name in ("model.safetensors", "config.json"):
        os.rename(path / name, tmp_path / "blobs" / name)
        (path / name).symlink_to(f"../../blobs/{name}")
    assert torch.equal(CheckpointReader(path).tensor("x"), X)


def test_no_readable_weights(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", {"x": X})
    (path / "model.safetensors").rename(path / "adapter.safetensors")
    refused(path, "has neither model.safetensors nor")
    os.mkfifo(path / "model.safetensors")  # opening it would wait for ever
    refused(path, "not a regular file")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no config.json"),
        ("", "not valid JSON"),
        ("{,}", "not valid JSON"),
        ("[1]", "expected a JSON object, got list"),
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        ('{"a": Infinity}', "not a JSON number"),
        ('{"a": ' * 100_000, "nested too deeply"),
        ('{"a": "' + "x" * (10 << 20) + '"}', "larger than the limit"),
    ],
    ids=["absent", "empty", "broken", "list", "repeated", "infinity", "deep", "large"],
)
def test_config(tmp_path: Path, text: str | None, message: str) -> None:
    path = folder(tmp_path / "m", {"x": X})
    (path / "config.json").unlink() if text is None else (path / "config.json").write_text(text)
    refused(path, message)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from(["x", "y", "z"]), st.text(max_size=12) | st.integers() | st.just("a.safetensors"))
)
def test_any_index_is_read_or_refused(tmp_path: Path, weight_map: dict[str, Any]) -> None:
    path = tmp_path / "m"
    if not path.exists():
        sharded(path, {"a.safetensors": {"x": X, "y": Y}})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    try:
        reader = CheckpointReader(path)
    except CheckpointError:
        return
    assert reader.names() == ["x", "y"]
