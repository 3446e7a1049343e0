"""The tile registers, emulated where there are none, against numpy, and what both modes refuse."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir
from numba.core.registry import cpu_target

from lmkit.kernels.cpu import isa
from lmkit.kernels.cpu.amx.tile_file import CONFIGURATION, SLOTS, TileFile, write_configuration
from lmkit.kernels.cpu.emit import I64, Emitter, Value

EMULATED = isa.named("amx+emulated")
LEVEL = isa.host() if isa.host().tiles else EMULATED
ROWS, COLUMNS, DEPTH = 5, 13, 7  # tokens, outputs, words of inputs
SHAPES = ((ROWS, 4 * COLUMNS), (ROWS, 4 * DEPTH), (DEPTH, 4 * COLUMNS))
Body = Callable[[Emitter, TileFile, list[Value]], None]


def emitted(body: Body, level: isa.Isa, num_arguments: int) -> ir.Module:
    module = ir.Module()
    kind = ir.FunctionType(ir.VoidType(), [I64] * (num_arguments + 1))
    function = ir.Function(module, kind, "kernel")
    e = Emitter(ir.IRBuilder(function.append_basic_block("entry")), level.lanes)
    slots, *arguments = function.args
    body(e, TileFile(e, level, slots), arguments)
    e.builder.ret_void()
    return module


def run(body: Body, *arrays: np.ndarray, level: isa.Isa = LEVEL) -> None:
    """Compile as numba would, with little optimization, and run once on the arrays' addresses."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    _, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    machine = llvm.Target.from_default_triple().create_target_machine(cpu=cpu, features=features, opt=1)
    parsed = llvm.parse_assembly(str(emitted(body, level, len(arrays))))
    with llvm.create_mcjit_compiler(parsed, machine) as engine:
        engine.finalize_object()
        count = len(arrays) + 1
        kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * count)(engine.get_function_address("kernel"))
        slots = np.full(SLOTS, 0xEE, np.uint8)  # whatever was in scratch before
        kernel(slots.ctypes.data, *(array.ctypes.data for array in arrays))


def product(
    dot: Callable[[TileFile, int, int, int], None], e: Emitter, tiles: TileFile, arguments: list[Value]
) -> None:
    c, a, b, configuration = arguments
    write_configuration(e, configuration, SHAPES)
    tiles.configure(configuration)
    tiles.load(0, c, 4 * COLUMNS)
    tiles.load(1, a, 4 * DEPTH)
    tiles.load(2, b, 4 * COLUMNS)
    dot(tiles, 0, 1, 2)
    tiles.store(0, c, 4 * COLUMNS)
    tiles.release()


def configuration() -> np.ndarray:
    return np.full(CONFIGURATION, 0xEE, np.uint8)


@pytest.mark.parametrize("unsigned", [False, True])
def test_dot_int8(unsigned: bool) -> None:
    rng = np.random.default_rng(1)
    a = rng.integers(-128, 128, (ROWS, DEPTH, 4), np.int8)
    weights = rng.integers(0, 256, (DEPTH, COLUMNS, 4), np.uint8).view(np.uint8 if unsigned else np.int8)
    c = rng.integers(-1000, 1000, (ROWS, COLUMNS), np.int32)
    want = c + np.einsum("rki,kci->rc", a.astype(np.int32), weights.astype(np.int32))
    run(partial(product, partial(TileFile.dot_int8, unsigned=unsigned)), c, a, weights, configuration())
    assert np.array_equal(c, want)


def bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x y + z in float32 with one rounding: the product is exact in float64, and long doubles hold the sum."""
    return (x.astype(np.longdouble) * y + z).astype(np.float32)


def test_dot_bf16() -> None:
    rng = np.random.default_rng(2)
    a, weights = (rng.standard_normal(shape).astype(np.float32) for shape in ((ROWS, DEPTH, 2), (DEPTH, COLUMNS, 2)))
    a[0], weights[:, 1] = 1e-39, 1e30  # a subnormal factor
    a[1], weights[:, 0] = 1e-30, 1e-12  # a subnormal product
    a, weights = ((x.view(np.uint32) >> 16).astype(np.uint16) for x in (a, weights))
    c = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    c[0, 1] = c[1, 0] = 0
    chains = np.zeros((2, ROWS, COLUMNS), np.float32)
    for k in range(DEPTH):
        for odd in range(2):
            x, y = flushed(bfloat16(a[:, k, odd])), flushed(bfloat16(weights[k, :, odd]))
            chains[odd] = flushed(fused(x[:, None], y[None], chains[odd]))
    want = flushed(c + flushed(chains[0] + chains[1]))
    assert want[0, 1] == want[1, 0] == 0
    run(partial(product, TileFile.dot_bf16), c, a, weights, configuration())
    assert np.array_equal(c.view(np.uint32), want.view(np.uint32))


def test_shapes_of_loads_and_stores() -> None:
    """A load takes the rows and bytes of its tile and zeroes the rest. A store writes no more. Configuring zeroes."""
    source = np.arange(16 * 80, dtype=np.uint8).reshape(16, 80)
    small, whole, fresh = (np.full((16, 64), 0xEE, np.uint8) for _ in range(3))

    def body(e: Emitter, tiles: TileFile, arguments: list[Value]) -> None:
        source_at, small_at, whole_at, fresh_at, place = arguments
        write_configuration(e, place, ((16, 64), (3, 20)))
        tiles.configure(place)
        tiles.store(0, fresh_at, 64)
        tiles.load(0, source_at, 80)
        tiles.load(1, source_at, 80)
        tiles.store(0, whole_at, 64)
        tiles.store(1, small_at, 64)
        tiles.zero(0)
        tiles.store(0, source_at, 80)
        tiles.release()

    before = source.copy()
    run(body, source, small, whole, fresh, configuration())
    assert np.array_equal(whole, before[:, :64])
    assert np.array_equal(small[:3, :20], before[:3, :20])
    assert (small[3:] == 0xEE).all()
    assert (small[:, 20:] == 0xEE).all()
    assert not fresh.any()
    assert not source[:, :64].any()
    assert np.array_equal(source[:, 64:], before[:, 64:])


@pytest.mark.parametrize("numbers", [(0, 0, 1), (0, 1, 1), (0, 1, 0)])
@pytest.mark.parametrize("level", ["amx", "amx+emulated"])
def test_equal_registers_are_refused(level: str, numbers: tuple[int, int, int]) -> None:
    for dot in (TileFile.dot_int8, TileFile.dot_bf16):
        with pytest.raises(ValueError, match="the processor refuses equal ones"):
            emitted(lambda e, tiles, _, dot=dot: dot(tiles, *numbers), isa.named(level), 0)


def faulty(name: str) -> None:
    """What the processor refuses at run time."""

    def body(e: Emitter, tiles: TileFile, arguments: list[Value]) -> None:
        place, memory = arguments
        shapes = {"shapes": ((5, 64), (4, 64), (16, 64)), "rows": ((17, 64),)}.get(name, ((16, 64),) * 3)
        write_configuration(e, place, shapes)
        tiles.configure(memory if name == "palette" else place)
        if name == "released":
            tiles.release()
        tiles.zero(3 if name == "unconfigured" else 0)
        tiles.dot_int8(0, 1, 2)

    run(body, configuration(), np.zeros(1024, np.uint8), level=EMULATED)


@pytest.mark.parametrize(
    "name",
    [
        "rows",
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("shapes", "palette", "released", "unconfigured")),
    ],
)
def test_faults_end_the_process(name: str) -> None:
    code = f"from tests.kernels.amx.test_tile_file import faulty; print('started', flush=True); faulty({name!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "started\n"
    assert done.returncode == -signal.SIGILL, done.stderr
