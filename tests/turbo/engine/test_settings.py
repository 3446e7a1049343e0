"""Engines of one process keep their own settings: numbers of threads, and switches of a GPU's kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from lmkit.kernels.cpu import threads
from lmkit.kernels.cuda.switches import switches
from lmkit.kernels.settings import Settings
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.runners.cuda_device import CudaDevice
from tests.turbo.engine.test_cuda_engine import checkpoint, device, emulated, on_cpu, on_gpu, requests, tokens
from tests.turbo.engine.test_engine import run

__all__ = ["checkpoint", "device"]
pytestmark = pytest.mark.slow
T = TypeVar("T")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = threads.num_threads(), torch.get_num_threads()
    yield
    threads.configure(before[0])
    torch.set_num_threads(before[1])


def noted(function: Callable[..., T], found: Callable[[], Any], seen: list[Any]) -> Callable[..., T]:
    """The function, which notes what `found` says before each call."""

    def call(*args: Any, **options: Any) -> T:
        seen.append(found())
        return function(*args, **options)

    return call


def in_turns(*engines: Engine) -> list[dict[str, list[int]]]:
    """The tokens of the same requests to each, a step of one after a step of the other."""
    found: list[dict[str, list[int]]] = [{} for _ in engines]
    for engine in engines:
        for request in requests():
            engine.add(request)
    while any(engine.has_work() for engine in engines):
        for engine, said in zip(engines, found, strict=True):
            for output in engine.step() if engine.has_work() else ():
                said.setdefault(output.request_id, []).extend(output.token_ids)
    return found


def test_settings_hold_inside_and_in_their_own_thread() -> None:
    threads.configure(3)
    elsewhere: list[Any] = []
    with Settings(2, deterministic=True):
        assert (threads.num_threads(), torch.get_num_threads(), switches().invariant) == (2, 2, True)
        with Settings():
            assert (threads.num_threads(), switches().invariant) == (3, False)
        assert (threads.num_threads(), switches().invariant) == (2, True)
        thread = threading.Thread(target=lambda: elsewhere.append((threads.num_threads(), switches().invariant)))
        thread.start()
        thread.join()
    assert elsewhere == [(3, False)]
    assert (threads.num_threads(), switches().invariant) == (3, False)


@pytest.mark.parametrize("overlap", [True, False])
def test_each_engine_has_its_threads(checkpoint: Path, overlap: bool) -> None:
    threads.configure(3)
    engines = [on_cpu(checkpoint, num_threads=count, overlap=overlap) for count in (1, 2)]
    seen: list[list[Any]] = [[], []]
    for engine, those in zip(engines, seen, strict=True):
        runner: Any = engine.runner
        runner._logits = noted(runner._logits, lambda: (threads.num_threads(), torch.get_num_threads()), those)
    one, other = in_turns(*engines)
    for engine in engines:
        engine.close()
    assert [set(those) for those in seen] == [{(1, 1)}, {(2, 2)}]
    assert one == other
    assert threads.num_threads() == 3  # outside


@emulated
def test_each_engine_has_its_switches(checkpoint: Path, device: CudaDevice) -> None:
    """The one that was made first and the one that was made last."""
    engines = [on_gpu(checkpoint, device, deterministic=pinned) for pinned in (True, False, True)]
    seen: list[list[Any]] = [[] for _ in engines]
    for engine, those in zip(engines, seen, strict=True):
        runner: Any = engine.runner
        runner._logits = noted(runner._logits, lambda: switches().invariant, those)
    want = tokens(run(engines[0], requests()))
    found = in_turns(*engines)
    assert [set(those) for those in seen] == [{True}, {False}, {True}]
    assert found[0] == found[2] == want
    assert not switches().invariant
