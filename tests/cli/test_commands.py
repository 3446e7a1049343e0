"""The `lmkit` command as a user meets it: what it prints, and one clear line with exit code 2 for a mistake."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from lmkit import __version__
from lmkit.cli.main import app
from lmkit.errors import LMKitError
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.kernels.cuda import elementwise, module
from lmkit.qtensor import int_scheme
from lmkit.turbo.request import SelfTest
from tests.formats.linears import random_linear, written

pytestmark = pytest.mark.slow
COMMANDS = ["quantize", "convert", "serve", "proxy", "chat", "eval", "bench", "inspect", "tune", "doctor"]


def lmkit(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "lmkit", *arguments], capture_output=True, text=True, check=False)


def refused(*arguments: str) -> str:
    """The one line on stderr of a command that must fail as a user's mistake."""
    result = lmkit(*arguments)
    assert result.returncode == 2, result
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("lmkit: ")]
    assert len(lines) == 1, result.stderr
    return lines[0]


def refused_here(*arguments: str) -> str:
    """The message of such a mistake, from a command in this process: no time goes to imports. `refused` has seen that
    each command makes one line of it.
    """
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, LMKitError), error
    assert "\n" not in str(error)
    return str(error)


def test_help_names_every_command() -> None:
    text = lmkit("--help").stdout
    assert all(f"  {command} " in text for command in COMMANDS)
    assert lmkit("--version").stdout.strip() == __version__


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['lmkit', '--help']\n"
        "from lmkit.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numba', 'numpy', 'transformers', 'fastapi', 'datasets', 'aiohttp'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_convert(tmp_path: Path) -> None:
    source = written(tmp_path / "awq", "awq", {"m": random_linear(int_scheme(4, 16))})
    result = lmkit("convert", str(source), "-o", str(tmp_path / "ct"), "--format", "compressed-tensors")
    assert result.stdout == f"{tmp_path}/ct: 1 linears as compressed-tensors, read back and found equal\n"
    assert "m: gptq cannot store it" in refused("convert", str(source), "-o", str(tmp_path / "x"), "--format", "gptq")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["awq", "awq-source", "ct"]


def inspected(*options: str) -> str:
    return CliRunner().invoke(app, ["inspect", "demo", *options]).stdout


def test_inspect_tells_what_serving_takes() -> None:
    report = json.loads(lmkit("inspect", "demo", "--json").stdout)
    assert report["architecture"]["name"] == "LlamaForCausalLM"
    assert report["architecture"]["attention"] == [{"query_heads": 4, "kv_heads": 2, "head_dim": 64, "window": None}]
    assert report["weights"] == {
        "format": "dense",
        "dtype": "bfloat16",
        "parameters": 7340032,
        "linear_parameters": 6291456,
        "bits_per_linear_weight": 16.0,
        "file_bytes": 14688768,
        "vision_tower_bytes": None,
        "mtp_bytes": None,
    }
    assert report["kv_cache"]["bytes_per_token"] == 8 * 2 * 2 * 64 * 2
    assert report["serving"]["fits"] is True
    assert report["serving"]["problem"] is None
    assert report["serving"]["kv_bytes"] == 4096 * report["serving"]["kv_tokens"]
    assert all(re.fullmatch("[a-z_]+", key) for key in all_keys(report))
    assert report["serving"]["streaming"] is None
    streaming = json.loads(inspected("--weights-memory", "12M", "--json"))["serving"]["streaming"]
    assert streaming["streamed_layers"] in range(3, 8)
    assert streaming["resident_bytes"] <= 12 << 20
    per_second = streaming["disk_bytes_per_second"] / streaming["step_bytes"]
    expected = min(per_second, streaming["computed_tokens_per_second"])
    assert streaming["tokens_per_second"] == pytest.approx(expected, rel=1e-3)
    shown = inspected()
    assert "LlamaForCausalLM" in shown
    assert "query heads 4, KV heads 2, head dim 64" in shown
    assert max(map(len, shown.splitlines())) <= 80


def all_keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from all_keys(item)


def test_a_folder_keeps_its_brackets(tmp_path: Path) -> None:
    folder = tmp_path / "a[b]"
    shutil.copytree(DEMO_FOLDER, folder)
    assert "a[b]" in CliRunner().invoke(app, ["inspect", str(folder)], env={"COLUMNS": "200"}).output


def test_inspect_has_the_same_keys_for_a_model_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    fitting = json.loads(CliRunner().invoke(app, ["inspect", "demo", "--json"]).stdout)
    monkeypatch.setattr("lmkit.turbo.runners.cpu_device.available_memory", lambda: 100 << 20)
    report = json.loads(CliRunner().invoke(app, ["inspect", "demo", "--json"]).stdout)
    assert list(all_keys(report)) == list(all_keys(fitting))
    assert report["serving"]["fits"] is False
    assert "only 100.0 MiB" in report["serving"]["problem"]
    assert "problem" in CliRunner().invoke(app, ["inspect", "demo"]).stdout


def test_a_tensor_that_is_missing_shows_before_anything_is_read(broken: Path, tmp_path: Path) -> None:
    file, lost = broken / "model.safetensors", "model.layers.3.mlp.up_proj.weight"
    tensors = safetensors.torch.load_file(file)
    safetensors.torch.save_file({name: tensor for name, tensor in tensors.items() if name != lost}, file)
    for command in ("inspect", "serve"):
        assert refused_here(command, str(broken)) == f"{broken}: tensor {lost} is missing"
    safetensors.torch.save_file({name: tensor for name, tensor in tensors.items() if "layers.3" not in name}, file)
    assert "model.layers.3.input_layernorm.weight is missing, and 8 more" in refused_here("inspect", str(broken))


def test_doctor_names_the_kernels() -> None:
    report = json.loads(lmkit("doctor", "--json").stdout)
    assert report["kernels"]["linear_w4a8"].startswith("cpu.")
    assert report["packages"]["torch"][0].isdigit()
    assert "paged_attention" in CliRunner().invoke(app, ["doctor"]).stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_doctor_says_that_there_is_no_gpu() -> None:
    report = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert report["gpu"]["device"] == "none: torch finds no NVIDIA GPU"
    assert "kernels on the gpu" not in report


def test_doctor_shows_variables_and_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMKIT_API_KEY", "secret")
    monkeypatch.setenv("LMKIT_KV_MEMORY", "1G")
    monkeypatch.setattr("lmkit.extras.find_spec", lambda name: None)
    text = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"}).stdout
    assert "pip install 'lmkit[cuda]'" in text
    assert "LMKIT_KV_MEMORY" in text
    assert "secret" not in text


@pytest.mark.parametrize("has_cupy", [True, False])
def test_doctor_explains_a_gpu(monkeypatch: pytest.MonkeyPatch, has_cupy: bool) -> None:
    """Of which torch knows; with and without CuPy."""
    cupy = SimpleNamespace(
        __version__="14.0.1", __spec__=object(), cuda=SimpleNamespace(nvrtc=SimpleNamespace(getVersion=lambda: (13, 0)))
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy if has_cupy else None)
    monkeypatch.setattr(module, "missing", lambda: None if has_cupy else "CuPy is missing: pip install it")
    if has_cupy:
        monkeypatch.setitem(module.BACKENDS, "cuda", SimpleNamespace(capability=lambda: (9, 0), num_sms=lambda: 132))
    monkeypatch.setattr(elementwise, "missing", module.missing)
    fakes = {
        "is_available": lambda: True,
        "get_device_name": lambda: "NVIDIA H200",
        "mem_get_info": lambda: (1 << 36, 1 << 37),
        "get_device_capability": lambda: (9, 0),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    found = SelfTest(on="H200", model="/m", off={"norm.cu": "wrong"}, seconds=1.0)
    monkeypatch.setattr("lmkit.turbo.engine.self_test.results", lambda: [found])
    result = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout)
    assert report["gpu"]["memory"] == "64.00 GiB free of 128.00 GiB"
    norms = report["kernels on the gpu"]["rms_norm"]
    if has_cupy:
        assert (report["gpu"]["cupy"], report["gpu"]["nvrtc"], norms) == ("14.0.1", "13.0", "cuda")
        assert report["gpu"]["engine"] == "models run on the GPU"
        assert report["self-tests"] == {"/m": "norm.cu is turned off: wrong [H200]"}
    else:
        assert report["gpu"]["cupy"].startswith("missing: pip install 'lmkit[cuda]'")
        assert report["gpu"]["engine"] == "through torch, slowly: CuPy is missing: pip install it"
        assert norms.startswith("reference (not cuda: ")


def test_chat_samples_as_the_checkpoint_says(tmp_path: Path) -> None:
    """An answer at temperature 0.0 is the same each time; at 50 it is another."""
    file = tmp_path / "mine.json"
    file.write_text('{"temperature": 50.0, "max_new_tokens": 8}')
    words = ("chat", "demo", "--prompt", "class Queue:", "--seed", "1")
    told = [CliRunner().invoke(app, (*words, *more)).stdout for more in (
        ("--max-tokens", "8"), ("--generation-config", "none", "--max-tokens", "8"), ("--generation-config", str(file)),
        ("--generation-config", str(file), "--temperature", "0"),
    )]  # fmt: skip
    assert told[0] == told[1] == told[3] != told[2]
    assert "is for a folder" in refused_here("chat", "http://127.0.0.1:1", "--generation-config", "none")


@pytest.fixture
def broken(tmp_path: Path, demo_model: Path) -> Path:
    return Path(shutil.copytree(demo_model, tmp_path / "model"))


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    assert str(tmp_path / "none") in refused("serve", str(tmp_path / "none"))
    for command in ("inspect", "eval", "chat"):
        assert str(tmp_path / "none") in refused_here(command, str(tmp_path / "none"))
    assert "none" in refused_here("quantize", str(tmp_path / "none"), "-o", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_truncated_checkpoint(broken: Path, tmp_path: Path) -> None:
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    for command in ("inspect", "serve"):
        assert "model.safetensors" in refused_here(command, str(broken))
    assert "model.safetensors" in refused_here("quantize", str(broken), "-o", str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == [broken]


def test_absurd_configuration_and_missing_weights(broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    assert "num_hidden_layers" in refused_here("serve", str(broken))
    (broken / "config.json").write_text(json.dumps(config | {"hidden_size": 257}))
    assert "config.json" in refused_here("serve", str(broken))
    (broken / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchModel"]}))
    assert "Qwen3ForCausalLM" in refused_here("serve", str(broken))
    (broken / "model.safetensors").unlink()
    assert "safetensors" in refused_here("inspect", str(broken))


def test_what_cannot_fit_is_refused_before_loading() -> None:
    assert "kv_memory" in refused_here("serve", "demo", "--kv-memory", "100T")
    assert "context of 4096" in refused_here("serve", "demo", "--max-model-len", "100000")
    assert "--kv-memory" in refused_here("serve", "demo", "--kv-memory", "much")


def test_a_recipe_with_an_unknown_key(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("scheme: {bits: 4, group_size: 128}\nstepz: []\n")
    line = refused_here("quantize", "demo", "-o", str(tmp_path / "out"), "--recipe", str(recipe))
    assert "mine.yaml" in line
    assert "stepz" in line
    assert not (tmp_path / "out").exists()


def test_a_head_that_does_not_exist_is_refused() -> None:
    assert "--lm-head" in refused_here("serve", "demo", "--lm-head", "int4")
    assert "lm-head" in refused_here("eval", "demo", "--lm-head", "int4")


def test_inspect_shows_each_way_to_share_a_model_out() -> None:
    """Or why it is none: the demo model has no experts, and 4 heads."""
    whole = json.loads(lmkit("inspect", "demo", "--device", "cpu", "--json").stdout)["serving"]["weight_bytes"]
    tp, both, ep, pp = json.loads(lmkit("inspect", "demo", "--device", "cpu", "--processes", "2", "--json").stdout)
    assert [way["flags"] for way in (tp, both, ep, pp)] == ["--tp 2", "--tp 2 --ep 2", "--ep 2", "--pp 2"]
    assert tp["weight_bytes"] < whole
    assert pp["weight_bytes"] < whole
    assert tp["problem"] is pp["problem"] is None
    assert ep["problem"] == "ep=2: LlamaForCausalLM has no experts; use tp=2"
    shown = CliRunner().invoke(app, ["inspect", "demo", "--device", "cpu", "--processes", "3"], env={"COLUMNS": "200"})
    assert "4 attention heads cannot be shared out evenly" in shown.stdout
