"""Kernels are compiled ahead of the first step, by several processes, each once."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from numba.core import event

from lmkit.config import EngineConfig
from lmkit.kernels.cpu import ahead, jit, kernel_files, threads
from lmkit.kernels.cpu.intrinsics import add, unpack
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams

ROOT = Path(__file__).parents[2]


def add_task(amount: Any) -> jit.Task:
    def plus(args: int, scratch: int, index: int) -> None:
        (total,) = unpack(args, 1)
        add(total, amount)

    return jit.Task(plus)


def sum_of(task: jit.Task) -> int:
    """What one run of the task adds."""
    total = torch.zeros(1, dtype=torch.int64)
    threads.run(task, 1, (total.data_ptr(),))
    return int(total)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of kernels. The pool's own kernel is there already."""
    assert threads.WORK.address
    monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path / "kernels")
    return tmp_path / "kernels"


@pytest.fixture
def messages() -> Iterator[list[str]]:
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(f"{record.levelname} {record.getMessage()}")

    handler, logger = Handler(), logging.getLogger("lmkit.kernels.cpu")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def test_tasks_are_collected_and_not_run(folder: Path) -> None:
    task, total = add_task(1), torch.zeros(1, dtype=torch.int64)
    with jit.collecting() as tasks:
        threads.run(task, 5, (total.data_ptr(),))
    assert list(tasks) == [task, threads.WORK]
    assert not total
    assert not folder.exists()


def test_each_missing_kernel_is_compiled_once_and_numbered(folder: Path, messages: list[str]) -> None:
    ahead.compile_missing([add_task(1)], 1)
    messages.clear()
    ahead.compile_missing([add_task(amount) for amount in (1, 2, 3)], 2)
    first, *kernels, last = messages
    assert first == "WARNING compiling 2 kernels, once on this machine"
    assert [line.partition(" (")[0] for line in kernels] == [
        "INFO compiling kernel 1 of 2: add_task", "INFO compiling kernel 2 of 2: add_task",
    ]  # fmt: skip
    assert all(re.search(r" \(\d+ s so far\)$", line) for line in kernels)
    assert re.fullmatch(r"INFO compiled 2 kernels in \d+ s", last)
    messages.clear()
    tasks = [add_task(amount) for amount in (1, 2, 3)]
    ahead.compile_missing(tasks, 2)
    assert [sum_of(task) for task in tasks] == [1, 2, 3]
    assert len(list(folder.iterdir())) == 3
    assert not messages


def test_an_unforeseen_kernel_says_so(folder: Path, messages: list[str]) -> None:
    assert sum_of(add_task(1)) == sum_of(add_task(1)) == 1
    assert messages == ["INFO compiling kernel add_task, once on this machine"]


def test_a_file_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead.compile_missing([add_task(1)], 1)
    paths: list[Path] = []
    read = kernel_files.read
    monkeypatch.setattr(kernel_files, "read", lambda path: paths.append(path) or read(path))
    task = add_task(1)
    ahead.compile_missing([task], 1)
    assert sum_of(task) == sum_of(task) == 1
    assert paths == list(folder.iterdir())


def test_a_damaged_file_is_written_again(folder: Path, messages: list[str]) -> None:
    ahead.compile_missing([add_task(7)], 1)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert sum_of(add_task(7)) == 7
    assert any("damaged" in line for line in messages)
    assert file.read_bytes() == whole


def test_a_kernel_that_cannot_be_compiled_raises_at_its_first_use(folder: Path) -> None:
    def wrong(args: int, scratch: int, index: int) -> None:
        args.no_such_name  # type: ignore[attr-defined]  # noqa: B018

    task = jit.Task(wrong)
    ahead.compile_missing([task], 1)
    with pytest.raises(Exception, match="no_such_name"):
        _ = task.address


def test_a_folder_that_cannot_be_written_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path / "file" / "kernels")
    ahead.compile_missing([add_task(1)], 2)
    assert sum_of(add_task(5)) == 5


def test_a_kernel_closes_over_numbers_and_texts() -> None:
    with pytest.raises(TypeError, match="add_task closes over amount, a list"):
        add_task([]).load()


def test_an_interrupt_waits_for_the_compiler() -> None:
    done = []

    def interrupted() -> None:
        with jit.uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("compiled")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done


PROGRAM = """
import sys
from lmkit import log
from lmkit.kernels.cpu import ahead
from tests.kernels.test_ahead import add_task
log.setup("INFO")
tasks = [add_task(amount) for amount in (11, 12, 13)]
ahead.compile_missing(tasks, 2)
print(len({task.address for task in tasks}))
"""


@pytest.mark.slow
def test_two_processes_share_the_work(tmp_path: Path) -> None:
    env = os.environ | {"LMKIT_CACHE_DIR": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=ROOT, env=env, text=True, stdout=-1, stderr=-1)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in both]
    assert [out for out, _ in outputs] == ["3\n", "3\n"], outputs
    assert sum(err.count("compiling kernel ") for _, err in outputs) == 3, outputs


@pytest.mark.slow
def test_kills_while_kernels_are_compiled(tmp_path: Path) -> None:
    """Whole files alone are read, and nothing waits for a process that is gone."""
    env = os.environ | {"LMKIT_CACHE_DIR": str(tmp_path)}
    start: dict[str, Any] = {"cwd": ROOT, "env": env, "text": True, "stdout": -1, "stderr": -1}
    for delay in (0.0, 0.2):
        killed = subprocess.Popen([sys.executable, "-c", PROGRAM], **start, start_new_session=True)
        assert killed.stderr is not None
        if any("compiling" in line for line in iter(killed.stderr.readline, "")):
            time.sleep(delay)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.communicate()
    done = subprocess.run([sys.executable, "-c", PROGRAM], **start, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
    assert "damaged" not in done.stderr
    with pytest.raises(ProcessLookupError):  # no compiler is left
        os.killpg(killed.pid, 0)


@pytest.mark.slow
def test_ctrl_c_ends_a_first_start_with_one_line(tmp_path: Path) -> None:
    env = os.environ | {"LMKIT_CACHE_DIR": str(tmp_path), "LMKIT_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "lmkit", "chat", "demo", "--prompt", "hello"]
    process = subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=-1, stderr=-1, start_new_session=True)
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert any("compiling" in line for line in lines)
    os.killpg(process.pid, signal.SIGINT)
    assert list(lines) == ["lmkit: interrupted\n"]
    assert process.wait(30) == 130
    with pytest.raises(ProcessLookupError):  # no compiler is left
        os.killpg(process.pid, 0)


class _NoCompiler(event.Listener):  # type: ignore[misc]
    """Fails if this process compiles anything. What other processes compiled is only read."""

    def __init__(self) -> None:
        self.process = os.getpid()

    def on_start(self, event: event.Event) -> None:
        assert os.getpid() != self.process, f"compiles: {event.data}"

    def on_end(self, event: event.Event) -> None:
        pass


def test_a_start_foresees_every_kernel(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreseen: set[jit.Task] = set()
    compile_missing, compute = ahead.compile_missing, jit.Task.address.fget
    assert compute is not None

    def noted(tasks: Any, num_processes: int) -> None:
        foreseen.update(tasks)
        compile_missing(tasks, num_processes)

    def address(task: jit.Task) -> int:
        used.add(task)
        return int(compute(task))

    used: set[jit.Task] = set()
    monkeypatch.setattr(ahead, "compile_missing", noted)
    with event.install_listener("numba:run_pass", _NoCompiler()):
        engine = Engine(str(demo_model), EngineConfig(max_batch_size=4, max_step_tokens=128))
    monkeypatch.setattr(jit.Task, "address", property(address))
    for number, (length, temperature) in enumerate(((1, 0.0), (100, 1.0), (30, 0.5))):
        params = SamplingParams(max_tokens=4, temperature=temperature, top_p=0.9, seed=0)
        engine.add(Request(request_id=str(number), prompt_ids=[1] * length, params=params))
    while engine.has_work():
        assert not any(output.error for output in engine.step())
    engine.close()
    assert used
    assert used <= foreseen, {task.name for task in used - foreseen}
