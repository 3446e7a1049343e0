"""Replicas of one machine have GPUs of their own, as far as there are enough."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any
from unittest.mock import MagicMock

import pytest

from lmkit.cluster import gpus, processes
from lmkit.cluster.on_ray import RayLauncher
from lmkit.cluster.processes import Child, LocalLauncher


class FakeDriver:
    """libcuda with three GPUs."""

    @staticmethod
    def cuInit(flags: int) -> int:
        return 0

    @staticmethod
    def cuDeviceGetCount(count: Any) -> int:
        count._obj.value = 3
        return 0


class FakeChild:
    def __init__(self) -> None:
        self.ended = ""


@pytest.mark.parametrize(
    ("variable", "names"), [(None, ["0", "1", "2"]), ("4,GPU-5ebe9f43,7", ["4", "GPU-5ebe9f43", "7"])]
)
def test_gpus_have_the_names_that_cuda_takes(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, names: list[str]
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert gpus.visible_gpus() == names


def test_without_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert gpus.visible_gpus() == []


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 1), ({"device": "cpu", "tp": 2}, 0), ({"device": "cuda", "tp": 4}, 4),
        ({"tp": 2, "devices": "0,0"}, 1), ({"tp": 2, "devices": "0,3"}, 4),
    ],
)  # fmt: skip
def test_a_replica_needs_a_gpu_for_each_rank(options: dict[str, Any], count: int) -> None:
    assert gpus.num_gpus(options) == count


def test_replicas_take_the_next_gpus(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Four GPUs, two for each replica. One that ends leaves its own to the next one. A fourth one has to share."""
    given: list[str | None] = []

    async def start(*args: Any, options: Any, **variables: str) -> Any:
        given.append(variables.get("CUDA_VISIBLE_DEVICES"))
        return FakeChild()

    monkeypatch.setattr(Child, "start", start)
    monkeypatch.setattr(processes, "visible_gpus", lambda: ["4", "5", "6", "7"])

    async def run() -> None:
        launcher = LocalLauncher("127.0.0.1", print)
        first: Any = await launcher.start("a-1", {"tp": 2}, None)
        await launcher.start("a-2", {"tp": 2}, None)
        first.ended = "ended with status 1"
        await launcher.start("a-3", {"tp": 2}, None)
        assert not caplog.records
        await launcher.start("a-4", {"tp": 2}, None)
        await launcher.start("b-1", {"device": "cpu"}, None)

    asyncio.run(run())
    assert given == ["4,5", "6,7", "4,5", "4,5", None]
    assert "a-4 shares GPU 4, 5 with other replicas" in caplog.text


@pytest.mark.parametrize(
    ("options", "bundle"), [({"device": "cuda", "tp": 2}, {"CPU": 3, "GPU": 2}), ({"tp": 2}, {"CPU": 3})]
)
def test_ray_gives_a_replica_a_gpu_for_each_rank(options: dict[str, Any], bundle: dict[str, int]) -> None:
    ray = MagicMock()

    async def run() -> None:
        ended = asyncio.get_running_loop().create_future()
        ended.set_result("ended with status 0")
        ray.remote.return_value.return_value.remote.return_value.run.remote.return_value = ended
        replica = await RayLauncher(ray, "127.0.0.1").start("a-1", options, 3)
        await asyncio.sleep(0)
        replica.kill()

    asyncio.run(run())
    ray.util.placement_group.assert_called_once_with([bundle], strategy="STRICT_PACK")
    needs = ray.remote.call_args.kwargs
    assert (needs["num_cpus"], needs["num_gpus"]) == (3, bundle.get("GPU", 0))
