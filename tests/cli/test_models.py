"""`lmkit pull` against a Hub on this machine, and `lmkit list`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmkit.cli.main import app
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.formats.known import models, remember
from tests.cli.commands import mistake
from tests.formats.fake_hub import GATED, PRIVATE, FakeHub, fake_hub

pytestmark = pytest.mark.slow
FILES = {
    "config.json": (DEMO_FOLDER / "config.json").read_bytes(),
    "model.safetensors": bytes(range(256)) * 80_000,
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"pickled",
    "modeling.py": b"raise SystemExit",
    "onnx/model.safetensors": b"another export",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """The Hub; its client reads these variables when it is imported, so commands run as processes."""
    with fake_hub(dict(FILES)) as hub:
        for name, value in {
            "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1",
            "LMKIT_STATE_DIR": str(tmp_path / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield hub


def lmkit(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lmkit", *words], capture_output=True, text=True, check=False, timeout=60
    )


def test_pull_fetches_what_lmkit_reads_and_resumes(hub: FakeHub, tmp_path: Path) -> None:
    hub.cut = 15_000_000  # its client writes pieces of some 10 MB
    result = lmkit("pull", "org/model")
    assert result.returncode == 0, result.stderr
    first, last = result.stdout.splitlines()
    assert first == "org/model: 3 files, 19.5 MiB"
    folder = Path(last.removeprefix("org/model: "))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    ranges = [wanted for name, wanted in hub.fetched if name == "model.safetensors"]
    assert ranges[0] is None
    assert ranges[1] is not None, "the second request does not continue the first"

    hub.fetched.clear()
    assert lmkit("pull", "org/model").returncode == 0
    assert not hub.fetched

    (listed,) = [row for row in json.loads(lmkit("list", "--json").stdout) if row["name"] != "demo"]
    assert (listed["name"], listed["path"], listed["num_bytes"]) == ("org/model", str(folder), 20_480_000)
    assert os.path.samefile(listed["path"], folder)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([PRIVATE], "there is no such model, or it is private: log in"),
        ([GATED], "it is gated: accept its terms"),
        (["org/model", "--revision", "v9"], "it has no such revision"),
    ],
    ids=["none", "gated", "revision"],
)
def test_what_the_hub_refuses_is_one_line(hub: FakeHub, words: list[str], reason: str) -> None:
    result = lmkit("pull", *words)
    assert result.returncode == 2, result
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("lmkit: ")]
    assert f"{words[0]} " in line or f"{words[0]}:" in line
    assert reason in line
    assert "Traceback" not in result.stderr


def test_no_weights_and_no_network_are_one_line(hub: FakeHub) -> None:
    hub.files = {"config.json": b"{}", "model-q4.gguf": b"GGUF"}
    assert lmkit("pull", "org/model").stderr.splitlines()[-1] == (
        "lmkit: org/model has no weights as safetensors; download one of its GGUF files, and serve that"
    )
    hub.shutdown()
    hub.server_close()
    assert lmkit("pull", "org/model").stderr.splitlines()[-1] == (
        "lmkit: org/model cannot be fetched from the Hugging Face Hub: no connection; is there a network?"
    )


@pytest.mark.parametrize("name", ["demo", "model", "./org/model", "a/b/c", "org/"])
def test_a_name_that_is_no_model_of_the_hub(name: str) -> None:
    assert "expected a model of the Hugging Face Hub, ORG/NAME" in mistake("pull", name)


def checkpoint(folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    return folder


def test_list_finds_the_cache_and_remembered_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LMKIT_STATE_DIR", str(tmp_path / "file"))
    remember(tmp_path)  # the list cannot be written: nothing happens
    monkeypatch.setenv("LMKIT_STATE_DIR", str(tmp_path / "not" / "there"))  # as on a machine that is new to lmkit
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    awq = checkpoint(tmp_path / "awq", quantization_config={"quant_method": "awq", "bits": 4})
    groups = {"group_0": {"weights": {"num_bits": 8}}}
    packed = checkpoint(
        tmp_path / "ct", quantization_config={"quant_method": "compressed-tensors", "config_groups": groups}
    )
    checkpoint(tmp_path / "hub" / "models--org--name" / "snapshots" / "abc", dtype="bfloat16")
    checkpoint(tmp_path / "hub" / "models--org--broken" / "snapshots" / "abc")
    (tmp_path / "hub" / "models--org--broken" / "snapshots" / "abc" / "config.json").write_text("{")
    for folder in (awq, packed, tmp_path / "gone", awq, DEMO_FOLDER):
        remember(folder)
    found = {model.name: (model.format, model.bits) for model in models()}
    assert found == {
        str(awq): ("awq", 4), str(packed): ("compressed-tensors", 8), "org/name": ("dense", 16), "demo": ("dense", 16)
    }  # fmt: skip
    lines = CliRunner().invoke(app, ["list"]).stdout.splitlines()
    assert lines[0].split() == ["NAME", "SIZE", "FORMAT", "BITS", "MODIFIED"]
    assert len(lines) == 5
    (tmp_path / "not" / "there" / "models").write_bytes(b"\xff\n\n")  # damaged
    assert len(models()) == 2
