"""Fixtures that several folders of tests share, and the distribution of tests over processes."""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # a process for each core: threads of several would wait for each other
    for _name in ("LMKIT_NUM_THREADS", "OMP_NUM_THREADS"):  # torch reads the latter when it is imported
        os.environ.setdefault(_name, "1")

if "LMKIT_STATE_DIR" not in os.environ:  # what tests quantize and serve is no news for the user of this machine
    os.environ["LMKIT_STATE_DIR"] = tempfile.mkdtemp(prefix="lmkit-tests-")
    atexit.register(shutil.rmtree, os.environ["LMKIT_STATE_DIR"], ignore_errors=True)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; tests' processes inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch
import typer.testing

import lmkit
from lmkit.kernels.cuda import module
from lmkit.log import Sparing
from tests import emulator

# Every call of a CliRunner builds all commands, which takes a second.
typer.testing._get_command = functools.cache(typer.testing._get_command)

DEMO = Path(lmkit.__file__).parent / "demo"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The bundled, trained 7M-parameter checkpoint."""
    return DEMO / "model"


@pytest.fixture(scope="session")
def heldout_text() -> str:
    """Text that the demo model never saw."""
    return (DEMO / "text" / "heldout.txt").read_text()


@pytest.fixture
def emulated() -> Iterator[None]:
    """CUDA kernels take tensors on the CPU."""
    if shutil.which("g++") is None:
        pytest.skip("kernels are emulated with g++")
    emulator.install(seed=11)
    yield
    module.BACKENDS.pop("cpu", None)
    module.counters.cache_clear()


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Restore logging after each test. A command that runs in this process sends records to a stderr that is closed
    when the command ends."""
    logger, everything = logging.getLogger("lmkit"), logging.getLogger()
    handlers, level, propagate, others = logger.handlers[:], logger.level, logger.propagate, everything.handlers[:]
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)
    for handler in everything.handlers[:]:
        if handler not in others and any(isinstance(each, Sparing) for each in handler.filters):
            everything.removeHandler(handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    arches = [f"sm_{arch}" for arch in ("80", "89", "90a", "100a", "120a")]
    parser.addoption("--ptx", nargs="?", const="sm_90a", choices=arches, help="emulate what NVRTC compiles kernels to")


def pytest_configure(config: pytest.Config) -> None:
    arch = config.getoption("--ptx")
    emulator.run_compiled(arch and arch.removeprefix("sm_"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for garbage only among objects that tests make. The modules and the list of tests are a million, which stay:
    a search among them takes half a second."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests first. The processes then end with short tests, at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
