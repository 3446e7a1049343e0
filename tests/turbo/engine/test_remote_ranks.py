"""Ranks that come to an engine over TCP, as Ray and torchrun start them."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lmkit.config import EngineConfig
from lmkit.errors import ConfigError, EngineLostError, LMKitError
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from lmkit.turbo.runners import placing, remote
from lmkit.turbo.runners.processes import PROCESS, Start
from lmkit.turbo.runners.remote import Door
from tests.turbo.engine.test_adapters import set_adapter
from tests.turbo.engine.test_ranks import GREEDY, PROMPTS, adapters, answers_with, engine, tokens  # noqa: F401


class LocalPlacer:
    """Starts ranks on this machine."""

    host = "127.0.0.1"
    started: list[subprocess.Popen[bytes]] = []

    def __init__(self, config: EngineConfig) -> None:
        self._count = config.num_ranks - 1

    def place(self, address: str, key: str) -> None:
        with socket.create_connection(address.split(":")) as stranger:  # who gets no rank
            stranger.sendall(b"x" * len(key))
        for _ in range(self._count):
            rank = subprocess.Popen([sys.executable, "-m", PROCESS, address], stdin=subprocess.PIPE)
            assert rank.stdin is not None
            rank.stdin.write(key.encode())
            rank.stdin.close()
            self.started.append(rank)


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(placing.PLACERS, "ray", LocalPlacer)


def test_ranks_over_tcp_give_the_tokens_of_one(demo_model: Path) -> None:
    options = {"kv_dtype": "int8", "kv_memory": 1 << 20}
    here, there = tokens(demo_model, 2, **options), tokens(demo_model, 2, cluster="ray", **options)
    assert there == here  # the same sums, drawn tokens included
    one = tokens(demo_model, 1, **options)
    assert {name: there[name] for name in GREEDY} == {name: one[name] for name in GREEDY}
    assert LocalPlacer.started[-1].wait(10) == 0  # it ends with its engine


def test_a_rank_that_ends_takes_the_engine_with_it(
    demo_model: Path,
    adapters: Path,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Until then it has loaded an adapter."""
    model = engine(demo_model, 2, cluster="ray", adapter_root=str(adapters))
    try:
        set_adapter(model, "a", "a")
        assert answers_with(model, ["a"])["a."] != answers_with(model, [""])["."]
        model.add(Request(request_id="a", prompt_ids=PROMPTS[0], params=SamplingParams(max_tokens=80)))
        model.step()
        LocalPlacer.started[-1].kill()
        with pytest.raises(EngineLostError, match="ended"):  # noqa: PT012 - which step notices is not known
            while model.has_work():
                model.step()
    finally:
        model.close()
        LocalPlacer.started[-1].wait(10)
    assert not any(record.exc_info for record in caplog.records)  # one line tells it


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "COME_SECONDS", 0.1)
    door = Door("127.0.0.1")
    with pytest.raises(LMKitError, match=r"rank 1 did not come to 127.0.0.1:\d+"):
        door.enter(Start(1, "", EngineConfig(), []))
    door.close()


@pytest.mark.parametrize("options", [{"tp": 1}, {"tp": 2, "ep": 2}, {"tp": 1, "pp": 2}])
def test_a_cluster_has_ranks_of_tp_alone(demo_model: Path, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="cluster=ray places the ranks of tp alone"):
        Engine(str(demo_model), EngineConfig(device="cpu", cluster="ray", **options))
