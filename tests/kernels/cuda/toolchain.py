"""Compiles kernels for a GPU that need not be present, with CuPy's options, and reads the machine code.

NVRTC and nvdisasm are wheels (nvidia-cuda-nvrtc, nvidia-cuda-nvdisasm). nvcc replaces NVRTC if only nvcc is installed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lmkit.kernels.cuda.gpus import GPUS
from lmkit.kernels.cuda.module import Kernel
from lmkit.kernels.cuda.source import kernel_source, options

ARCHES = tuple(GPUS[capability].arch for capability in ((8, 0), (9, 0)))
# CuPy adds these. Subnormal float32 numbers are flushed to zero.
CUPY, CUPY_WITH_NVRTC = ("-ftz=true",), ("--device-as-default-execution-space",)

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_LABEL = re.compile(r"^(\.L_x_\d+):", re.MULTILINE)


@dataclass(frozen=True)
class Compiled:
    """The result for one entry point and one architecture. Without nvdisasm, the fields from the machine code are
    None."""

    arch: str
    log: str  # the output of ptxas
    max_threads: int | None  # of a block, by __launch_bounds__
    opcodes: Counter[str] | None
    loops: tuple[Counter[str], ...] | None  # the opcodes of each loop, including those of inner loops

    def _number(self, pattern: str) -> int:
        found = re.search(rf"(\d+) {pattern}|{pattern} (\d+)", self.log)
        assert found is not None, self.log
        return int(found[1] or found[2])

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        found = re.search(r"Used (\d+) registers", self.log)
        assert found is not None, self.log
        return int(found[1])

    @property
    def local_bytes(self) -> int:
        """Bytes of a thread's stack frame and of its spills from registers."""
        return sum(self._number(what) for what in ("bytes stack frame", "bytes spill stores", "bytes spill loads"))

    def main_loop(self, opcode: str) -> Counter[str]:
        """The smallest loop that has more of `opcode` than any loop inside it. Empty if no loop has any."""
        having = [loop for loop in self.loops or () if count(loop, opcode)]
        most = max((count(loop, opcode) for loop in having), default=0)
        return min((x for x in having if count(x, opcode) == most), key=Counter.total, default=Counter())


def count(opcodes: Counter[str], prefix: str) -> int:
    """Instructions whose name begins with `prefix`."""
    return sum(number for name, number in opcodes.items() if name.startswith(prefix))


def missing_nvrtc() -> str | None:
    """Why no PTX can be made here, or None."""
    return "NVRTC is not installed (pip install nvidia-cuda-nvrtc)" if _nvrtc() is None else None


def missing() -> str | None:
    """Why nothing can be compiled here, or None."""
    if _nvrtc() is None and shutil.which("nvcc") is None:
        return "neither NVRTC (pip install nvidia-cuda-nvrtc) nor nvcc is installed"
    return None


def compile_all(kernels: Iterable[Kernel], arches: Iterable[str] = ARCHES) -> list[tuple[Kernel, Compiled]]:
    """Compile every kernel for every architecture, two at a time. Kernels of one text are compiled together."""
    texts: dict[tuple[str, ...], list[Kernel]] = {}
    for kernel in kernels:
        texts.setdefault((kernel.source, *map(str, sorted(kernel.defines.items()))), []).append(kernel)
    work = [(together, arch) for together in texts.values() for arch in arches]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda item: _compile(item[0][0], item[1]), work))
    return [(kernel, code[kernel.name]) for (together, _), code in zip(work, found, strict=True) for kernel in together]


def compile_kernel(kernel: Kernel, arch: str, *, read: bool = True) -> Compiled:
    """Compile one kernel, and `read` its machine code. Raises AssertionError with the compiler's log."""
    return _compile(kernel, arch, read)[kernel.name]


def ptx(text: str, arch: str, defines: dict[str, int]) -> str:
    """The PTX that NVRTC makes of a kernel's text on its way to machine code, with the lines of the text that it comes
    from. Raises AssertionError with its log."""
    chosen = [option for option in options(defines) if not option.startswith("--ptxas")]
    flags = [f"--gpu-architecture=compute_{arch}", *CUPY, *CUPY_WITH_NVRTC, *chosen, "-lineinfo"]
    lib = _nvrtc()
    assert lib is not None, missing_nvrtc()
    written = _with_nvrtc(lib, text, flags, "PTX")[0].rstrip(b"\0").decode()
    return written.partition("\n\t.file\t")[0]  # then what a debugger needs, and the path of this folder


def _compile(kernel: Kernel, arch: str, read: bool = True) -> dict[str, Compiled]:
    """Compile all entry points of the kernel's text."""
    text, lib, tool = kernel_source(kernel.source), _nvrtc(), disassembler() if read else None
    flags = [f"--gpu-architecture=sm_{arch}", *CUPY, *options(kernel.defines), "--ptxas-options=-v"]
    cubin, log = _with_nvcc(text, flags) if lib is None else _with_nvrtc(lib, text, [*flags, *CUPY_WITH_NVRTC])
    _, *parts = re.split(r"Compiling entry function '(\w+)'", log)
    listing = None if tool is None else _disassembled(tool, cubin)
    return {name: _compiled(name, arch, part, listing) for name, part in zip(parts[::2], parts[1::2], strict=True)}


def _disassembled(tool: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, file.name], capture_output=True, text=True, check=True).stdout


def _compiled(name: str, arch: str, log: str, listing: str | None) -> Compiled:
    if listing is None:
        return Compiled(arch, log, None, None, None)
    info, code = (_section(listing, f"{prefix}.{name}") for prefix in (".nv.info", ".text"))
    bound = re.search(r"EIATTR_MAX_THREADS.*?\.word\s+(0x\w+)\s.*?\.word\s+(0x\w+)\s.*?\.word\s+(0x\w+)", info, re.S)
    threads = int(bound[1], 16) * int(bound[2], 16) * int(bound[3], 16) if bound else None
    return Compiled(arch, log, threads, *_read(code))


def _section(listing: str, name: str) -> str:
    found = re.search(rf"^//-+ {re.escape(name)} .*?(?=^//-+ \.|\Z)", listing, re.S | re.M)
    assert found is not None, name
    return found[0]


def _read(code: str) -> tuple[Counter[str], tuple[Counter[str], ...]]:
    """Opcodes of a listing, and of each of its loops. A loop goes from a label to the last branch back to it."""
    instructions = [(m.start(), m[1], m[2]) for m in _INSTRUCTION.finditer(code)]
    labels = {m[1]: m.start() for m in _LABEL.finditer(code)}
    ends: dict[int, int] = {}
    for at, name, operands in instructions:
        target = re.search(r"`\((\.L_x_\d+)\)", operands)
        if name.startswith("BRA") and target and labels.get(target[1], at) < at:
            ends[labels[target[1]]] = at
    loops = [Counter(name for at, name, _ in instructions if start <= at <= end) for start, end in ends.items()]
    return Counter(name for _, name, _ in instructions), tuple(loop for loop in loops if loop.total() > 1)


def _wheel_file(pattern: str) -> Path | None:
    """A file in one of NVIDIA's wheels."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return next((path for folder in folders for path in sorted(Path(folder).glob(pattern))), None)


@cache
def disassembler() -> str | None:
    """The path of nvdisasm, from its wheel or from a CUDA toolkit."""
    found = _wheel_file("*/bin/nvdisasm")
    return shutil.which("nvdisasm") if found is None else str(found)


@cache
def _nvrtc() -> ctypes.CDLL | None:
    library = _wheel_file("*/lib/libnvrtc.so.*")
    if library is None:
        return None
    builtins = next(library.parent.glob("libnvrtc-builtins.so.*"))
    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)  # NVRTC opens it by its name alone
    return ctypes.CDLL(str(library))


def _with_nvrtc(lib: ctypes.CDLL, text: str, flags: list[str], kind: str = "CUBIN") -> tuple[bytes, str]:
    """(the code of a kind, the log)"""
    program = ctypes.c_void_p()
    created = lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    assert created == 0, created
    try:
        status = lib.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*map(str.encode, flags)))
        log = _bytes(program, lib.nvrtcGetProgramLogSize, lib.nvrtcGetProgramLog).rstrip(b"\0").decode()
        assert status == 0, log
        return _bytes(program, lib[f"nvrtcGet{kind}Size"], lib[f"nvrtcGet{kind}"]), log
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes(program: ctypes.c_void_p, size_of: ctypes._NamedFuncPointer, get: ctypes._NamedFuncPointer) -> bytes:
    size = ctypes.c_size_t()
    assert size_of(program, ctypes.byref(size)) == 0
    buffer = ctypes.create_string_buffer(size.value)
    assert get(program, buffer) == 0
    return buffer.raw


def _with_nvcc(text: str, flags: list[str]) -> tuple[bytes, str]:
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.cu", Path(folder) / "kernel.cubin"
        source.write_text(text)
        command = ["nvcc", "-cubin", *flags, str(source), "-o", str(cubin)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return cubin.read_bytes(), done.stderr
