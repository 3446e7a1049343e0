"""What a user may call a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError

from lmkit.errors import CheckpointError
from lmkit.formats.checkpoint import CheckpointReader, resolve_model_path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The Hub, out of reach; returns the calls it gets."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def download(name: str, **options: Any) -> str:
        calls.append((name, options))
        raise LocalEntryNotFoundError("cannot reach the server\nsee the documentation")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def test_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with CheckpointReader("demo") as reader:
        assert reader.config["architectures"] == ["LlamaForCausalLM"]
        assert reader.info("model.norm.weight").shape == (256,)
    (tmp_path / "demo").mkdir()
    assert resolve_model_path("demo", weights=False) == Path("demo")  # a folder of that name comes first


def test_a_checkpoint_s_folder(tmp_path: Path, hub: list[Any]) -> None:
    assert resolve_model_path(tmp_path, weights=False) == tmp_path
    for name in ("config.json", "model.safetensors", "pytorch_model.bin", "model.gguf"):
        (tmp_path / name).touch()
    assert resolve_model_path(str(tmp_path)) == tmp_path
    assert not hub


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("weights", "is a file; give the checkpoint's folder"),
        ("m.bin", "pickled weights can run code and are not read; give a checkpoint's folder, with safetensors"),
        ("m.safetensors", "is only a part of a checkpoint; give its folder (.), with config.json and the tokenizer"),
    ],
)
def test_a_file_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: list[Any], file: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for expected in ("no such folder", message.format(file)):
        if file != "weights" or Path(file).exists():
            with pytest.raises(CheckpointError) as caught:
                resolve_model_path(file)
            assert str(caught.value) == f"{file}: {expected}"
        Path(file).touch()
    assert not hub


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "the folder is empty"),
        (["config.json", "model.safetensors.index.json"], "has no .safetensors weights, so it is no checkpoint"),
        (["model.safetensors"], "has no config.json, so it is no checkpoint"),
        (["config.json", "pytorch_model.bin"], "has only pickled weights, which can run code and are not read"),
    ],
)
def test_a_folder_that_is_no_checkpoint(tmp_path: Path, files: list[str], message: str) -> None:
    for file in files:
        (tmp_path / file).touch()
    with pytest.raises(CheckpointError) as caught:
        resolve_model_path(str(tmp_path))
    assert str(caught.value).startswith(f"{tmp_path}: {message.format(tmp_path)}")


@pytest.mark.parametrize(
    "name", ["./missing", "/missing/model", "~/model", "a/b/c", "../x", "", "model/", Path("owner/model")]
)
def test_paths_are_never_looked_for_on_the_hub(
    hub: list[Any], name: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        resolve_model_path(name)
    assert not hub


def test_unreachable_hub_is_one_line_of_advice(hub: list[tuple[str, dict[str, Any]]]) -> None:
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader("owner/model")
    assert str(caught.value) == (
        "owner/model: no such folder, and it cannot be fetched from the Hugging Face Hub (cannot reach the server); "
        "give the path of a downloaded checkpoint folder"
    )
    [(name, options)] = hub
    assert name == "owner/model"
    assert not any(
        pattern.endswith((".bin", ".py", ".pt", "*"))
        for pattern in options["allow_patterns"]
        if "LICENSE" not in pattern
    )


@pytest.mark.parametrize("error", [HTTPError("down"), ValueError(""), OSError("disk full")])
def test_every_failure_is_a_checkpoint_error(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def download(name: str, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match="cannot be fetched"):
        resolve_model_path("model")


def test_bad_names_are_refused_without_a_connection() -> None:
    for name in ("a b", "x" * 300, "a\0b", "owner/.."):
        with pytest.raises(CheckpointError):
            resolve_model_path(name)


def test_a_tokenizer_needs_no_weights(hub: list[tuple[str, dict[str, Any]]]) -> None:
    with pytest.raises(CheckpointError):
        resolve_model_path("owner/model", weights=False)
    [(_, options)] = hub
    assert "*.json" in options["allow_patterns"]
    assert "*.safetensors" not in options["allow_patterns"]


def test_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(tmp_path))
    with pytest.raises(CheckpointError, match="the folder is empty"):  # a repository of GGUF files, say
        resolve_model_path("owner/model")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    assert resolve_model_path("owner/model") == tmp_path
