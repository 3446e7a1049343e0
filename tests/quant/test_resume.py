"""Work that was interrupted goes on: the same bytes as without, and never with anything else than it began with."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmkit.errors import CheckpointError, ConfigError
from lmkit.quant.data.workdir import WorkFolder, differences
from lmkit.quant.run import Quantizer, prepare
from tests.quant.helpers import SCALE, recipe, tiny_checkpoint
from tests.quant.killed import RECIPE, digest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("source"))


@pytest.mark.slow
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_killed_at_stages_and_waits_for_the_disk(source: Path, tmp_path: Path, every: int) -> None:
    command = [sys.executable, "-m", "tests.quant.killed", source, tmp_path, str(every)]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr.decode()
    results = json.loads(done.stdout)
    assert [result["layers"] for result in results] == sorted(result["layers"] for result in results)
    assert {result["layers"] for result in results if not result["placed"]} == {0, 1, 2}
    assert len(results) > 20 // every
    for result in results:
        # Once it is in place the output is occupied, by what the run would write.
        assert result["exit"] == (2 if result["placed"] else 0), result
        assert result["equal"], result
        assert not result["left"], result


class Stopped(Exception):
    pass


def stop_at(quantizer: Quantizer, out: Path, layer: int, error: BaseException) -> None:
    def progress(what: str, done: int, total: int) -> None:
        if what == "layers" and done == 4 * layer + 1:
            raise error

    with pytest.raises(type(error)):
        quantizer.run(out, progress=progress)


def test_work_of_another_run_is_refused_with_the_difference(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stop_at(prepare(source, RECIPE), out, 1, Stopped())
    other_steps = recipe(SCALE, calibration={"num_samples": 3, "seq_len": 24})
    with pytest.raises(ConfigError, match=r"1 finished layers of another run: recipe.steps was .*--restart"):
        prepare(source, other_steps).run(out)
    other_data = recipe(*({"step": "awq_scale", "tokens": 32, "grid": 2}, {"step": "awq_clip", "grid": 1}),
                        calibration={"num_samples": 3, "seq_len": 24, "seed": 5})  # fmt: skip
    with pytest.raises(ConfigError, match=r"recipe.calibration.seed was 0, is 5; calibration data was [0-9a-f]{24}"):
        prepare(source, other_data).run(out)
    changed = tiny_checkpoint(tmp_path / "changed", initializer_range=0.11)
    with pytest.raises(ConfigError, match=r"another run: model was"):
        prepare(changed, RECIPE).run(out)
    assert WorkFolder.beside(out).num_done == 1
    prepare(changed, RECIPE).run(out, restart=True)
    prepare(changed, RECIPE).run(tmp_path / "whole")
    assert digest(out) == digest(tmp_path / "whole")
    assert not WorkFolder.beside(out).path.exists()


@pytest.mark.parametrize("name", ["layer-00000.safetensors", "layer-00000.kv.safetensors", "hidden-1.f32"])
def test_a_flipped_bit_of_the_work_is_found(source: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    stop_at(prepare(source, RECIPE), out, 1, Stopped())
    file = WorkFolder.beside(out).path / name
    data = bytearray(file.read_bytes())
    data[-7] ^= 4
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name}: its bytes have changed .*--restart"):
        prepare(source, RECIPE).run(out)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{name}: .*--restart"):
        prepare(source, RECIPE).run(out)
    prepare(source, RECIPE).run(out, restart=True)
    assert (out / "report.json").exists()


def test_a_failure_in_the_first_layer_leaves_nothing(source: Path, tmp_path: Path) -> None:
    stop_at(prepare(source, RECIPE), tmp_path / "out", 0, Stopped())
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_and_loses_no_layer(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quantizer, out, fsync = prepare(source, RECIPE), tmp_path / "out", os.fsync
    work = WorkFolder.beside(out)

    def full(fd: int) -> None:
        if work.num_done == 1:
            raise OSError(28, "No space left on device")
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr("lmkit.formats.safetensors_file.fsync", full)
        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(CheckpointError, match=r"layer-00001.safetensors: cannot be written: No space left"),
        ):
            quantizer.run(out)
    assert "1 of 2 layers are kept" in caplog.text
    assert work.num_done == 1
    stages: list[int] = []
    quantizer.run(out, progress=lambda what, done, total: stages.append(done))
    assert stages == [4, 5, 6, 7]
    prepare(source, RECIPE).run(tmp_path / "whole")
    assert digest(out) == digest(tmp_path / "whole")


def test_hidden_states_are_given_room_before_anything_is_done(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(CheckpointError, match=r"hidden-0.f32: cannot be written: No space left on device"):
        prepare(source, RECIPE).run(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_two_runs_of_one_output_at_a_time_are_refused(source: Path, tmp_path: Path) -> None:
    quantizer, out = prepare(source, RECIPE), tmp_path / "out"

    def progress(what: str, done: int, total: int) -> None:
        if done == 1:
            with pytest.raises(ConfigError, match=r"another process is writing it in .out.partial"):
                prepare(source, RECIPE).run(out)

    quantizer.run(out, progress=progress)


CTRL_C = """
import sys
from lmkit.cli.main import main
sys.argv = ["lmkit", "quantize", sys.argv[1], "-o", sys.argv[2], "--group-size", "32", "--num-samples", "4",
            "--seq-len", "32", "--no-eval", "--calibration", "demo"]
main()
"""


def test_ctrl_c_keeps_the_work_and_says_how_to_go_on(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", num_hidden_layers=40)
    out = tmp_path / "out"
    work = WorkFolder.beside(out)
    command = [sys.executable, "-c", CTRL_C, str(source), str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT)
    deadline = time.monotonic() + 120
    while work.num_done < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"lmkit: interrupted: " in stderr
    assert b" of 40 layers are kept in " in stderr
    assert b"the same command goes on" in stderr
    assert b"Traceback" not in stderr
    assert 2 <= work.num_done < 40
    assert not out.exists()


def test_differences_name_the_place() -> None:
    old = {"recipe": {"steps": [{"step": "rtn"}], "kv": {"bits": 16}}, "model": "a"}
    new = {"recipe": {"steps": [{"step": "rtn"}], "kv": {"bits": 8}}, "model": "a", "processes": 2}
    assert differences(old, old) == []
    assert differences(old, new) == ["recipe.kv.bits was 16, is 8", "processes was None, is 2"]
