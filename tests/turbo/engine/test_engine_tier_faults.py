"""What goes wrong below the device never shows in the text, and holds nobody up."""

from __future__ import annotations

import errno
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.kv.tiers import files
from lmkit.turbo.request import Request, SamplingParams
from tests.turbo.engine.test_engine import SMALL, engine_for, run, tokens
from tests.turbo.engine.test_engine_cache import FIRST, SECOND, always_load, ask, settle

KILLED = """
import os, signal, sys
from lmkit.config import EngineConfig
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import SamplingParams, Request
from lmkit.turbo.kv.tiers import files

model, kv, call, count = sys.argv[1:]
whole, calls = getattr(os, call), 0

def die(*args):
    global calls
    calls += 1
    if calls == int(count):
        if call == "writev":
            whole(args[0], [args[1][0], args[1][1][:9999]])
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*args)

setattr(files.os, call, die)
engine = Engine(model, EngineConfig(kv_disk_path=kv, **OPTIONS))
engine.add(Request(request_id="r", prompt_ids=PROMPT, params=SamplingParams(ignore_eos=True, seed=0)))
while True:
    engine.step()
"""


@pytest.fixture(scope="module")
def want(demo_model: Path) -> list[int]:
    """The answer to FIRST of an engine that keeps nothing."""
    return ask(engine_for(demo_model, prefix_cache=False), FIRST)[0]


@pytest.fixture
def filled(demo_model: Path, tmp_path: Path) -> Path:
    """A folder with the KV of FIRST."""
    engine = engine_for(demo_model, kv_disk_path=str(tmp_path))
    ask(engine, FIRST)
    settle(engine)
    engine.close()
    return tmp_path


def restarted(model: Path, kv: Path) -> Engine:
    engine = engine_for(model, kv_disk_path=str(kv))
    always_load(engine)
    return engine


@pytest.mark.parametrize(("call", "count"), [("writev", 9), pytest.param("rename", 14, marks=pytest.mark.exhaustive)])
def test_a_killed_process(demo_model: Path, tmp_path: Path, want: list[int], call: str, count: int) -> None:
    code = KILLED.replace("PROMPT", str(FIRST)).replace("OPTIONS", str(SMALL))
    command = [sys.executable, "-c", code, str(demo_model), str(tmp_path), call, str(count)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(list(tmp_path.rglob(files.PARTIAL))) == 1
    assert len(list(tmp_path.rglob("*.kv"))) == count - 1
    engine = restarted(demo_model, tmp_path)
    assert not list(tmp_path.rglob(files.PARTIAL))
    assert ask(engine, FIRST) == (want, 8 * (count - 1))
    assert engine.stats().tiers["damaged"] == 0
    engine.close()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_damaged_files(demo_model: Path, filled: Path, want: list[int], seed: int) -> None:
    blocks = sorted(filled.rglob("*.kv"))
    for number, path in enumerate(blocks):
        kind, data = (number + seed) % 8, bytearray(path.read_bytes())
        if kind == 0:
            data[(977 * number) % len(data)] ^= 4
            path.write_bytes(data)
        elif kind == 1:
            path.unlink()
        elif kind == 2:
            path.write_bytes(data[: len(data) // 2])
        elif kind == 3:
            shutil.copy(blocks[number - 1], path)
    found = [-1]
    while found[-1] < 200:  # every load heals at least the damage that ended it
        engine = restarted(demo_model, filled)
        answer, cached = ask(engine, FIRST)
        assert answer == want
        found.append(cached)
        settle(engine)
        engine.close()
        assert found[-1] > found[-2]
    assert len(found) > 3


def test_damage_that_a_load_meets(demo_model: Path, filled: Path, want: list[int]) -> None:
    engine = restarted(demo_model, filled)
    for path in sorted(filled.rglob("*.kv"))[::3]:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    answer, cached = ask(engine, FIRST)
    assert answer == want
    assert cached < 200
    assert engine.stats().tiers["damaged"] == 1  # the load ended there
    assert engine.stats().tier_hits.get("disk", 0) == cached
    engine.close()


@pytest.mark.parametrize("trouble", ["full", "gone", "unreadable"])
def test_a_disk_that_fails_during_the_run(
    demo_model: Path, filled: Path, want: list[int], monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    plain = engine_for(demo_model, prefix_cache=False)
    engine = restarted(demo_model, filled)

    def fail(*args: Any) -> int:
        raise OSError({"full": errno.ENOSPC, "unreadable": errno.EIO}[trouble], "injected")

    if trouble == "gone":
        shutil.rmtree(filled)
    else:
        monkeypatch.setattr(files.os, "writev" if trouble == "full" else "readv", fail)
    assert ask(engine, FIRST) == (want, 200 if trouble == "full" else 0)
    assert ask(engine, SECOND) == (ask(plain, SECOND)[0], 0)
    settle(engine)
    assert engine.stats().tiers["failures"] > 0
    assert ask(engine, FIRST) == (want, 200)
    engine.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Reads of files wait for it."""
    event, whole = threading.Event(), files.read

    def held(*args: Any) -> None:
        assert event.wait(30)
        whole(*args)

    monkeypatch.setattr(files, "read", held)
    yield event
    event.set()


def test_a_slow_load_delays_nobody_else(demo_model: Path, filled: Path, want: list[int], gate: threading.Event) -> None:
    plain, engine = engine_for(demo_model, prefix_cache=False), restarted(demo_model, filled)
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=0)
    long = [Request(request_id=f"long{i}", prompt_ids=SECOND[i : i + 20], params=params) for i in range(2)]
    answers: dict[str, list[int]] = {"long0": [], "long1": [], "loads": []}
    waiting = Request(
        request_id="loads", prompt_ids=FIRST, params=SamplingParams(max_tokens=12, ignore_eos=True, seed=0)
    )

    def step() -> None:
        for output in engine.step():
            answers[output.request_id] += output.token_ids

    engine.add(long[0])
    while len(answers["long0"]) < 3:
        step()
    engine.add(waiting)
    engine.add(long[1])
    before = engine.stats().steps
    while min(len(answers["long0"]), len(answers["long1"])) < 40:
        step()
    # Both have come to their end: one token a step, but for the prompt of the second and what the pipeline holds.
    assert engine.stats().steps - before <= 40 + 6
    assert [len(answers[name]) for name in answers] == [40, 40, 0]
    assert not gate.is_set()
    gate.set()
    while engine.has_work():
        step()
    assert answers["loads"] == want
    for request in long:
        assert answers[request.request_id] == tokens(run(plain, [request])[request.request_id])
    assert engine.stats().tier_hits == {"disk": 200}
    engine.check_integrity()
    engine.close()


def test_a_request_that_ends_while_it_loads(
    demo_model: Path, filled: Path, want: list[int], gate: threading.Event
) -> None:
    engine = restarted(demo_model, filled)
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=0)
    for name, timeout in (("aborted", None), ("late", 0.05)):
        engine.add(Request(request_id=name, prompt_ids=FIRST, params=params, timeout=timeout))
    ended = {}
    for _ in range(3):
        engine.step()
    engine.abort("aborted")
    while len(ended) < 2:
        ended |= {output.request_id: (output.finish_reason, output.error_code) for output in engine.step()}
    assert ended["aborted"][0] == "abort"
    assert ended["late"] == ("error", "deadline_exceeded")
    gate.set()
    assert ask(engine, FIRST) == (want, 200)
    engine.close()
