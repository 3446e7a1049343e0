"""Every kernel variant compiles for GPUs that are not there, and its machine code is what was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmkit.kernels.cuda import gemm_wide, variants
from lmkit.kernels.cuda.gpus import GPUS, REGISTERS, Gpu
from lmkit.kernels.cuda.module import EXACT, Kernel
from lmkit.kernels.cuda.source import FOLDER
from tests.kernels.cuda import toolchain
from tests.kernels.cuda.toolchain import Compiled, compile_all, compile_kernel, count, disassembler

MMA, INTEGER_MMA = "HMMA.16816.F32", "IMMA.16832.S8"  # a kernel multiplies by one of them
WARPGROUP_MMA = "HGMMA.64x"  # or, as a warpgroup, by this
ASYNC_COPY = "LDGSTS.E.BYPASS"  # cp.async of 16 bytes, past L1
OVERLAP = "PREEXIT", "ACQBULK"  # griddepcontrol.launch_dependents and .wait
STREAM = "LDG.E.NA"  # 16 bytes that L1 does not keep
# What the loop with the most mma must also have, by file: of every file whose kernels have mma.
MAIN_LOOPS: dict[str, tuple[str, ...]] = {
    "gemm.cu": (ASYNC_COPY,),
    "gemm_wide.cu": (ASYNC_COPY, "WARPGROUP.ARRIVE"),
    "gemv.cu": (STREAM,),
    "dense.cu": (ASYNC_COPY, "LDSM.16.M88"),
    "decode_attention.cu": (ASYNC_COPY, "LDSM.16.M88.4", "MUFU.EX2"),
    "prefill_attention.cu": (ASYNC_COPY, "LDSM.16.M88.4", "LDSM.16.MT88.4", "MUFU.EX2"),
    "wide_attention.cu": (ASYNC_COPY, "LDSM.16.M88.4", "LDSM.16.MT88.4", "MUFU.EX2"),
}
BESIDE = ("arrange", "merge")  # kernels of gemm_wide.cu that multiply nothing
SOURCES = sorted(path.name for path in FOLDER.glob("*.cu"))
# Of a file's variants one in so many, by architecture and for bfloat16: what differs by variant shows in the first.
EVERY = {((9, 0), False): 1, ((9, 0), True): 6, ((8, 0), False): 8}

pytestmark = pytest.mark.skipif(toolchain.missing() is not None, reason=str(toolchain.missing()))
needs_disassembler = pytest.mark.skipif(
    disassembler() is None, reason="nvdisasm is missing (pip install nvidia-cuda-nvdisasm)"
)

LOOP = """#include "ptx.cuh"
extern "C" __global__ void __launch_bounds__(128) loop(const uint4* x, float* y, int steps) {
    float c[4] = {};
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
        u32 a[4];
        cp_async16(shared_memory + 16 * threadIdx.x, x + i * 128 + threadIdx.x);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        ldmatrix_x4(a, shared_memory + 16 * threadIdx.x);
        Half::mma(c, a, a[0], a[1]);
        __syncthreads();
    }
    y[threadIdx.x] = c[0] + c[1] + c[2] + c[3];
}
"""
SPILLS = """#include "ptx.cuh"
extern "C" __global__ void __launch_bounds__(1024) spills(const float* x, float* y) {
    float values[200];
#pragma unroll
    for (int i = 0; i < 200; ++i) values[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 200; ++i) y[i * 1024 + threadIdx.x] = values[199 - i] * values[i];
}
"""


def kernel(folder: Path, name: str, text: str) -> Kernel:
    path = folder / f"{name}.cu"
    path.write_text(text)
    return Kernel(str(path), name)


def problems(variant: Kernel, code: Compiled) -> list[str]:
    """What is wrong with a kernel that should be fast, in words."""
    found = []
    if code.local_bytes:
        found.append(f"{code.local_bytes} bytes of stack and spills")
    if code.opcodes is None:
        return found
    if code.max_threads is None:
        found.append("no __launch_bounds__")
    elif code.registers * code.max_threads > REGISTERS:
        found.append(f"{code.registers} registers for {code.max_threads} threads")
    found += [f"has {opcode}" for opcode in ("LDL", "STL") if count(code.opcodes, opcode)]
    if "serializ" in code.log:
        found.append("wgmma that wait for each other")
    mma = next((name for name in (INTEGER_MMA, WARPGROUP_MMA) if count(code.opcodes, name)), MMA)
    if variant.source in MAIN_LOOPS and variant.name not in BESIDE:
        loop, wanted = code.main_loop(mma), (mma, *MAIN_LOOPS[variant.source])
        found += [f"no {opcode} in the main loop" for opcode in wanted if not count(loop, opcode)]
    elif count(code.opcodes, mma):
        found.append(f"{mma}, and {variant.source} is not in MAIN_LOOPS")
    return found


@pytest.mark.parametrize("arch", toolchain.ARCHES)
@needs_disassembler
def test_machine_code_is_read(tmp_path: Path, arch: str) -> None:
    code = compile_kernel(kernel(tmp_path, "loop", LOOP), arch)
    assert code.opcodes is not None
    assert code.max_threads == 128
    assert 10 < code.registers < 64
    loop = code.main_loop(MMA)
    assert count(loop, MMA) == count(code.opcodes, MMA) == 1
    assert count(loop, ASYNC_COPY) == count(loop, MMA)
    assert count(loop, "STG") == 0
    assert count(code.opcodes, "STG") == 1
    assert problems(Kernel("loop.cu", "loop"), code) == [f"{MMA}, and loop.cu is not in MAIN_LOOPS"]
    assert not problems(Kernel("gemm.cu", "loop"), code)
    assert not code.main_loop("DMMA")


@pytest.mark.parametrize("arch", toolchain.ARCHES)
def test_spills_are_seen(tmp_path: Path, arch: str) -> None:
    code = compile_kernel(kernel(tmp_path, "spills", SPILLS), arch, read=False)
    assert code.local_bytes > 0
    assert problems(Kernel("spills.cu", "spills"), code)


def test_errors_carry_the_compilers_words(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no_such_thing"):
        compile_kernel(kernel(tmp_path, "loop", LOOP.replace("cp_async_commit", "no_such_thing")), "80")


def test_tables_name_files_that_exist() -> None:
    assert set(MAIN_LOOPS) <= set(SOURCES)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.arch)
def test_every_gpu_has_an_architecture_to_compile_for(tmp_path: Path, gpu: Gpu) -> None:
    assert compile_kernel(kernel(tmp_path, "loop", LOOP), gpu.arch, read=False).registers > 0


@pytest.mark.slow
@pytest.mark.parametrize("sparse", [96, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("source", SOURCES)
def test_variants_compile_well(source: str, sparse: int) -> None:
    """One in `sparse` of those that EVERY chooses."""
    mine = [variant for variant in variants.common() if variant.source == source]
    assert mine, "no common model launches it"
    built = []
    for (capability, bf16), step in EVERY.items():
        if source in EXACT and capability != gemm_wide.CAPABILITY:
            continue
        chosen = [variant for variant in mine if ("LM_BF16" in variant.defines) == bf16][:: step * sparse]
        chosen = [variant for variant in chosen if GPUS[capability].float8 or "FLOAT8_X" not in variant.defines]
        built += compile_all(chosen, (GPUS[capability].arch,))
    wrong = [
        f"{variant.name} {variant.defines} sm_{code.arch}: {', '.join(found)}"
        for variant, code in built
        if (found := problems(variant, code))
    ]
    assert not wrong, "\n".join(wrong)
    for variant, code in built:
        if code.arch == "90a" and code.opcodes is not None:
            assert all(count(code.opcodes, opcode) for opcode in OVERLAP), f"{variant.name} {variant.defines}"
    if source == "gemm.cu" and disassembler() is not None:
        for variant, code in built:
            _check_gemm(variant.defines, code)


def _check_gemm(defines: dict[str, int], code: Compiled) -> None:
    """A stage of 128 inputs and 16 outputs is 8 mma for each tile of tokens, or 4 of integers; its codes are copied 16
    bytes a lane."""
    mma, number = (INTEGER_MMA, 4) if "INT8" in defines else (MMA, 8)
    loop = code.main_loop(mma)
    tiles = defines["ROWS"]
    assert count(loop, mma) % (number * defines["N_TILES"] * tiles) == 0
    assert count(loop, ASYNC_COPY + ".128") >= tiles * defines["CODE_BITS"] // 2
