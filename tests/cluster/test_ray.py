"""`lmkit up` on a Ray cluster of this machine. Needs `pip install 'lmkit[ray]'`."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from lmkit.cluster.on_ray import RayLauncher, ServerActor
from lmkit.errors import LMKitError
from tests.cluster.test_up import Up, gone, runs  # noqa: F401 - a fixture
from tests.serve.live import ROOT

pytestmark = pytest.mark.slow
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
RAY = {"ray": "local"}


@needs_ray
def test_actors_that_die_come_again_and_nothing_stays_behind(tmp_path: Path, gone: list[psutil.Process]) -> None:  # noqa: F811
    with Up(tmp_path, RAY, surge=0) as up:
        answer = up.ask().json()["choices"]
        up.until(lambda: up.num_ready == 2)
        first, second = up.children("serve")
        gone += up.children()
        first.kill()
        up.until(lambda: "was ended by SIGKILL" in up.log)
        assert up.ask().json()["choices"] == answer
        actor = second.parent()
        assert actor is not None
        actor.kill()  # its server drains and ends
        up.until(lambda: "lost its actor" in up.log)
        up.until(lambda: not runs(second))
        up.until(lambda: len(up.children("serve")) == 2 and up.num_ready == 2)
        assert up.ask().json()["choices"] == answer
        up.write(RAY, surge=0, version="2")
        up.until(lambda: up.log.count(" drains") == 2 and up.num_ready == 2)
        assert up.ask().json()["choices"] == answer
        gone += up.children()
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(90) == 0, up.log


@needs_ray
def test_a_replica_waits_for_its_cores(tmp_path: Path) -> None:
    """Two replicas that need all cores of the machine each: the second one starts when the first has ended."""
    cores = psutil.cpu_count()
    with Up(tmp_path, RAY, cores=cores) as up:
        up.until(lambda: up.num_ready == 1)
        assert len(up.children("serve")) == 1
        (server,) = up.children("serve")
        assert server.environ()["LMKIT_NUM_THREADS"] == str(cores)
        server.kill()
        up.until(lambda: "demo-1 was ended by SIGKILL" in up.log or "demo-2 was ended by SIGKILL" in up.log)
        up.until(lambda: up.num_ready == 1 and len(up.children("serve")) == 1)


@needs_ray
def test_all_end_with_a_cluster_that_is_killed(tmp_path: Path, gone: list[psutil.Process]) -> None:  # noqa: F811
    with Up(tmp_path, RAY, replicas=1) as up:
        up.until(lambda: up.num_ready == 1)
        gone += up.children("serve") + up.children("proxy")
        assert len(gone) == 2
        up.process.kill()


@pytest.mark.anyio
async def test_a_replica_that_drains_before_its_server_runs_ends() -> None:
    """Ray takes seconds to start an actor; meanwhile it may not be wanted any more."""
    actor = ServerActor("demo-1")
    await actor.drain()
    async with asyncio.timeout(30):
        assert await actor.run({"model": "demo", "port": 0}, 1) == "was ended by SIGTERM"


def test_no_ray_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps({"models": [{"model": "demo"}], "proxy": {"port": 0}, "ray": "auto"}))
    command = [sys.executable, "-m", "lmkit", "up", str(file)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    last = ended.stderr.strip().splitlines()[-1]
    if find_spec("ray") is None:
        assert last == "lmkit: `ray` in a cluster's file needs ray: pip install 'lmkit[ray]'"
    else:
        assert last.startswith("lmkit: ray: auto: ")


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_an_address_that_nothing_listens_at_is_refused_before_ray_tries(
    monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())  # it has no `init` to call
    with socket.socket() as bound:  # it does not listen
        bound.bind(("127.0.0.1", 0))
        address = f"{prefix}127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(LMKitError, match=f"^ray: {re.escape(address)}: no connection: Connection refused; "):
            RayLauncher.connect(address, "http://127.0.0.1:1")


@needs_ray
def test_an_unreachable_cluster_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        file = tmp_path / "cluster.yaml"
        file.write_text(json.dumps({"models": [{"model": "demo"}], "proxy": {"port": 0}, "ray": address}))
        command = [sys.executable, "-m", "lmkit", "up", str(file)]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode != 0
    assert ended.stderr.strip().splitlines()[-1].startswith(f"lmkit: ray: {address}: no connection: ")
    assert "Traceback" not in ended.stderr
