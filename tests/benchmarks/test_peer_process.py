"""Engines in processes: the protocol, stopping, and what is said of failures."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.peers import client
from benchmarks.peers.client import EngineFailed, PeerProcess
from benchmarks.peers.protocol import Facts, Options, decode, prompts

MODULE = "tests.benchmarks.fake_engine"


def start(tmp_path: Path, model: str = "model") -> PeerProcess:
    return PeerProcess(sys.executable, MODULE, Options(tmp_path / model, 3, 8, 64, 100), tmp_path / "log")


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PeerProcess]:
    monkeypatch.delenv("LMKIT_CPU_ISA", raising=False)
    with start(tmp_path) as peer:
        peer.ready()
        yield peer


def test_answers_and_facts(peer: PeerProcess) -> None:
    assert peer.facts == Facts("1.2", "3 threads, no level", 1000)
    assert peer.ask(do="prefill", batch=4, prompt_len=5)["seconds"] >= 0
    assert peer.ask(do="decode", steps=6, limit=10)["tokens"] == 24


def test_is_stopped_between_questions(peer: PeerProcess) -> None:
    def status() -> str:
        return psutil.Process(peer.process.pid).status()

    deadline = time.monotonic() + 5
    while status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
        time.sleep(0.01)
    assert status() == psutil.STATUS_STOPPED
    peer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(peer.process.pid, 0)


def test_failures_are_one_line(peer: PeerProcess, tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match=r"^RuntimeError: out of memory$"):
        peer.ask(do="prefill", batch=1, prompt_len=13)
    with start(tmp_path, "broken") as broken, pytest.raises(EngineFailed, match=r"^RuntimeError: no such model$"):
        broken.ready()


def test_a_crash_has_a_reason(peer: PeerProcess) -> None:
    os.killpg(peer.process.pid, signal.SIGKILL)
    with pytest.raises(EngineFailed, match=r"^killed by SIGKILL after: "):
        peer.ask(do="prefill", batch=1, prompt_len=4)


def test_a_level_is_the_environment_of_one_process(tmp_path: Path) -> None:
    options = Options(tmp_path / "model", 3, 8, 64, 100)
    with PeerProcess(sys.executable, MODULE, options, tmp_path / "log", "avx2") as peer:
        assert peer.ready().settings == "3 threads, avx2"


def test_prepare(tmp_path: Path) -> None:
    client.prepare(sys.executable, MODULE, tmp_path / "source", tmp_path / "out", tmp_path / "log")
    assert (tmp_path / "out").read_text() == "made from source"


def test_can_import(tmp_path: Path) -> None:
    assert client.can_import(sys.executable, ("json", "lmkit"))
    assert not client.can_import(sys.executable, ("json", "no_such_package"))
    assert not client.can_import(str(tmp_path / "no-python"), ("json",))


def test_decode_gives_up_after_its_limit() -> None:
    class Slow:
        facts = Facts("", "", 0)

        def prefill(self, prompts: list[list[int]]) -> None: ...

        def step(self) -> int:
            time.sleep(0.02)
            return 5

    assert decode(Slow(), 1000, 0.0)["tokens"] == 2 * 5  # at least two steps


def test_prompts_are_the_same_everywhere() -> None:
    assert prompts(2, 3, 10) == prompts(3, 3, 10)[:2]
    assert prompts(2, 3, 10)[0] != prompts(2, 3, 10)[1]
    assert prompts(1, 3, 10, 0) != prompts(1, 3, 10, 1)
    assert min(prompts(1, 1000, 10)[0]) == 2
