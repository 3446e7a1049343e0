"""Two processes that `accelerate` starts give what one gives, also when they are killed on the way."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from lmkit.errors import ConfigError
from lmkit.quant.data.comm import Comm
from lmkit.quant.data.workdir import WorkFolder
from lmkit.quant.recipe import load_recipe
from lmkit.quant.run import prepare
from tests.quant.helpers import recipe, tiny_checkpoint
from tests.quant.killed import digest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
RECIPE = """
scheme: {group_size: 32}
steps: [{step: awq_scale, tokens: 64, grid: 2}, {step: awq_clip, grid: 2}, {step: rtn}]
calibration: {num_samples: 70, seq_len: 120}
"""  # three batches: the last round has one for one process


def launch(source: Path, recipe_file: Path, out: Path) -> subprocess.Popen[bytes]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
        "--main_process_port", port, "-m", "lmkit", "quantize", source, "-o", out, "--recipe", recipe_file, "--no-eval",
        "--calibration", "demo",
    ]  # fmt: skip
    return subprocess.Popen(
        [str(word) for word in command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )  # fmt: skip


@pytest.mark.exhaustive
def test_two_processes_give_the_codes_of_one(tmp_path: Path) -> None:
    source, recipe_file = tiny_checkpoint(tmp_path / "source", num_hidden_layers=6), tmp_path / "recipe.yaml"
    recipe_file.write_text(RECIPE)
    out = tmp_path / "two"
    work = WorkFolder.beside(out)
    process = launch(source, recipe_file, out)
    deadline = time.monotonic() + 200
    while work.num_done < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    for one in [*psutil.Process(process.pid).children(recursive=True), process]:
        one.kill()
    shown = process.communicate()[0].decode()  # once all of them are gone
    assert 2 <= work.num_done < 6, shown
    assert (work.path / "rank-1" / "hidden-1.f32").stat().st_size == 70 * 120 * 64 * 4
    again = launch(source, recipe_file, out)
    shown = again.communicate(timeout=200)[0].decode()
    assert again.returncode == 0, shown
    assert shown.count("relative squared error of each layer") == 1

    same = load_recipe(str(recipe_file), {"calibration": {"dataset": ["demo"]}})
    prepare(source, same).run(tmp_path / "one")
    assert digest(out) == digest(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "recipe.yaml", "source", "two"]


def test_work_of_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    quantizer = prepare(tiny_checkpoint(tmp_path / "source"), recipe())

    def stop(what: str, done: int, total: int) -> None:
        if what == "layers" and done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantizer.run(tmp_path / "out", progress=stop)
    quantizer.comm = Comm(0, 2)
    with pytest.raises(ConfigError, match="processes was 1, is 2"):
        quantizer.run(tmp_path / "out")


def test_alone_nothing_is_exchanged() -> None:
    comm, tensors = Comm.launched(), [torch.ones(2)]
    assert comm == Comm(0, 1)
    assert comm.broadcast(tensors, 0) is tensors
    assert comm.broadcast_bytes(b"report") == b"report"
    comm.wait()
    comm.close()
