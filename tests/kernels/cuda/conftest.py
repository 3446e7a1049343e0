"""Every test of a kernel runs emulated on tensors on the CPU, and on the GPU if there is one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from lmkit.kernels.cuda import module
from tests import emulator


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device for tensors that are passed to kernels. "cpu" means emulated."""
    if request.param == "cpu":
        if shutil.which("g++") is None:
            pytest.skip("kernels are emulated with g++")
        emulator.install(seed=hash(request.node.name) & 0xFFFF)
    yield request.param
    module.BACKENDS.pop("cpu", None)
    module.counters.cache_clear()


@pytest.fixture
def from_source(request: pytest.FixtureRequest) -> None:
    """For a fault that has another face in compiled code, where accesses are checked: test_ptx_checks.py."""
    if request.config.getoption("--ptx"):
        pytest.skip("of the source text")
