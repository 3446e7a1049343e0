"""Object code of kernels: in files, and loaded into this process.

    file    SHA-256 of the rest (32 bytes) | symbol | newline | ELF object

A file gets its name once it is complete. Loading needs LLVM's linker alone, no compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import llvmlite.binding as llvm
from numba import _helperlib
from numba.core.runtime import _nrt_python

from lmkit.log import get_logger

log = get_logger(__name__)


class ObjectCode(NamedTuple):
    symbol: str  # of the C function
    elf: bytes


def read(path: Path) -> ObjectCode | None:
    """The object code in a file. None if there is no file, or if it is damaged."""
    try:
        digest, content = (data := path.read_bytes())[:32], data[32:]
    except OSError:
        return None
    if hashlib.sha256(content).digest() != digest:
        log.warning("%s: damaged, the kernel is compiled again", path)
        return None
    symbol, _, elf = content.partition(b"\n")
    return ObjectCode(symbol.decode(), elf)


def write(path: Path, code: ObjectCode) -> None:
    """Write a file, if its folder is writable."""
    if not is_writable(path.parent):
        return
    content = code.symbol.encode() + b"\n" + code.elf
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(hashlib.sha256(content).digest() + content)
        partial.replace(path)
    except OSError as error:
        log.warning("%s: %s; the kernel is compiled again in the next process", path, error.strerror)
        with suppress(OSError):
            partial.unlink()


@functools.cache
def is_writable(folder: Path) -> bool:
    """Whether files can be written to a folder, which is made if it is missing. Says once if not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("kernels are compiled anew in every process: %s", error)
        return False
    return os.access(folder, os.W_OK)


class Kernel:
    """A C function in memory, for as long as this object lives."""

    def __init__(self, code: ObjectCode) -> None:
        _prepare_linker()
        machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code.elf))
        self._engine.finalize_object()
        self.address = int(self._engine.get_function_address(code.symbol))


@functools.cache
def _prepare_linker() -> None:
    """Make known what numba's code refers to: its runtime, and functions of the C library."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for prefix, module in (("numba_", _helperlib), ("NRT_", _nrt_python)):
        for name, address in vars(module)["c_helpers"].items():
            llvm.add_symbol(name if name.startswith("_") else prefix + name, address)
    ctypes.CDLL("libm.so.6", ctypes.RTLD_GLOBAL)
