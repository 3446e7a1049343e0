"""Launches by the driver, which is a library of this test: it writes down what cuLaunchKernelEx is given."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmkit.errors import ConfigError
from lmkit.kernels.cuda.launcher import EARLY, DriverLaunch, LaunchError, driver
from lmkit.kernels.cuda.switches import Switches, parse

# The structs of cuda.h. `seen` gets the configuration, then 8 bytes of each argument.
DRIVER = r"""
#include <cstring>
struct Attribute { int id; char pad[4]; union { char pad[64]; int value; void* pointer; } value; };
struct Config {
    unsigned gridX, gridY, gridZ, blockX, blockY, blockZ, shared;
    void* stream;
    Attribute* attributes;
    unsigned count;
};
long long seen[64];
int status = 0;
extern "C" long long* lm_seen() { return seen; }
extern "C" void lm_fail(int with) { status = with; }
extern "C" int cuGetErrorString(int, const char** text) {
    *text = "an illegal memory access was encountered";
    return 0;
}
extern "C" int cuLaunchKernelEx(const Config* c, void* function, void** arguments, void** extra) {
    const long long head[] = {c->gridX, c->gridY, c->gridZ, c->blockX, c->blockY, c->blockZ, c->shared,
                              (long long)c->stream, c->count, c->attributes->id, c->attributes->value.value,
                              (long long)function, extra != 0};
    memcpy(seen, head, sizeof head);
    for (int i = 0; i < 6; ++i) memcpy(seen + 13 + i, arguments[i], 8);
    return status;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("the driver of this test is compiled with g++")
    folder: Path = tmp_path_factory.mktemp("driver")
    (folder / "driver.cpp").write_text(DRIVER)
    command = ["g++", "-shared", "-fPIC", str(folder / "driver.cpp"), "-o", str(folder / "libcuda.so")]
    subprocess.run(command, check=True)
    found = driver(str(folder / "libcuda.so"))
    found.lm_seen.restype = ctypes.POINTER(ctypes.c_longlong)
    return found


def seen(library: ctypes.CDLL) -> list[int]:
    return list(library.lm_seen()[:19])


@pytest.mark.parametrize("early", [False, True])
def test_the_driver_gets_grid_arguments_and_the_attribute(library: ctypes.CDLL, early: bool) -> None:
    launch = DriverLaunch("mine", 4321, early=early, library=library)
    x = torch.zeros(4)
    args: list[Any] = [x, None, -5, 1.5, np.int64(-(2**40)), True]
    launch((2, 3, 4), (64, 2, 1), args, 50000, 77)
    *head, a, b, c, d, e, f = seen(library)
    assert head == [2, 3, 4, 64, 2, 1, 50000, 77, int(early), EARLY, 1, 4321, 0]
    assert (a, b, e, f) == (x.data_ptr(), 0, -(2**40), 1)
    assert struct.unpack("=i4x", struct.pack("=q", c)) == (-5,)
    assert struct.unpack("=f4x", struct.pack("=q", d)) == (1.5,)
    launch((1, 1, 1), (32, 1, 1), [None, x, 2, 0.5, 7, 0], 0, 0)  # the same places, other values
    assert seen(library)[13:15] == [0, x.data_ptr()]
    assert seen(library)[17:] == [7, 0]


def test_an_error_has_its_number_and_text(library: ctypes.CDLL) -> None:
    launch = DriverLaunch("mine", 1, early=True, library=library)
    library.lm_fail(700)
    with pytest.raises(LaunchError, match=r"mine: an illegal memory access was encountered .*700") as caught:
        launch((1, 1, 1), (32, 1, 1), [None, None, 2, 0.5, np.int64(7), 0], 0, 0)
    library.lm_fail(0)
    assert caught.value.status == 700


def test_switches() -> None:
    assert parse("") == Switches()
    assert parse("overlap=off, launcher=on") == Switches(overlap=False)
    assert parse("kernels=off,gemm.cu=off,norm.cu=on") == Switches(kernels=False, off=frozenset({"gemm.cu"}))
    for wrong in ("off", "no.cu=off", "overlap", "overlap=1", "no_such=on"):
        with pytest.raises(
            ConfigError, match=rf"LMKIT_CUDA: '{wrong}': expected NAME=on or NAME=off, with NAME one of"
        ):
            parse(wrong)
