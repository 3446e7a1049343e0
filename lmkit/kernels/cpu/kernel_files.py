"""Object code of kernels: in files, and loaded into this process.

    file    SHA-256 of the rest (32 bytes) | symbol | newline | ELF object

A file gets its name once it is complete. Loading needs LLVM's linker alone, no compiler. The files are code that this
process runs, so they are read and written through a descriptor of a folder that no other user may write to.
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
from lmkit.private_folder import make_private

log = get_logger(__name__)


class ObjectCode(NamedTuple):
    symbol: str  # of the C function
    elf: bytes


def read(path: Path) -> ObjectCode | None:
    """The object code in a file. None if there is no file, or if it is damaged or not to be trusted."""
    if (folder := _folder(path.parent)) is None:
        return None
    try:
        with open(os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder), "rb") as file:
            digest, content = (data := file.read())[:32], data[32:]
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
    folder, content = _folder(path.parent), code.symbol.encode() + b"\n" + code.elf
    partial = f".{path.name}.{os.getpid()}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(os.open(partial, flags, 0o644, dir_fd=folder), "wb") as file:
            file.write(hashlib.sha256(content).digest() + content)
        os.rename(partial, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        log.warning("%s: %s; the kernel is compiled again in the next process", path, error.strerror)
        with suppress(OSError):
            os.unlink(partial, dir_fd=folder)


def is_writable(folder: Path) -> bool:
    """Whether files can be written to a folder, which is made if it is missing. Says once if it cannot be used."""
    return _folder(folder) is not None and os.access(folder, os.W_OK)


@functools.cache
def _folder(folder: Path) -> int | None:
    """An open descriptor of a folder of kernels, if no other user may write to it."""
    try:
        return make_private(folder, 0o755)
    except OSError as error:
        where = f"{error.filename}: {error.strerror}; remove it, or set LMKIT_CACHE_DIR to a folder of your own"
        log.warning("kernels are compiled anew in every process: %s", where)
        return None


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
