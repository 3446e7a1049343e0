"""Compiles kernels with NVRTC and runs its PTX on the emulator, which checks each access."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lmkit.environment import environment
from lmkit.errors import UnsupportedError
from lmkit.kernels.cuda.gpus import EARLY_CAPABILITY, GPUS, Capability
from lmkit.kernels.cuda.module import EXACT, Launch
from lmkit.kernels.cuda.source import FOLDER, kernel_source
from tests.emulator.backend import HERE, HOST, EmulatedBackend, build, compiler, processor
from tests.emulator.ptx.origins import Place, has_run, origins
from tests.emulator.ptx.syntax import Entry, PtxError, parse
from tests.emulator.ptx.traffic import Traffic, lines_of, loaded_together
from tests.emulator.ptx.translation import block_sizes, translate
from tests.kernels.cuda import toolchain

FLAGS = ("-std=c++17", "-march=native", "-fPIC", "-ftls-model=initial-exec", "-shared", "-fno-strict-aliasing",
         "-ffp-contract=off", "-fwrapv", "-w", f"-I{HERE}", f"-I{FOLDER}")  # fmt: skip
TRANSLATOR = Path(__file__).parent
EARLY = GPUS[EARLY_CAPABILITY].arch  # the one that has wgmma, and the first on which kernels overlap
# Shared memory of these has places that nothing writes: rows of tokens that are not there, and the ends of rows of keys
# and values whose elements fill no whole load (a multiple of so many does). What they hold is multiplied by zeros or
# dropped, so each launch runs with each of POISONS there and must leave the same bits.
PADDED = {"gemm.cu": 0, "decode_attention.cu": 64, "wide_attention.cu": 64}
POISONS = NAN, LARGE = 0x7FFF, 0x7B7B  # of all float types; large as any other type
ADDRESSES = 1 << 40  # an integer of at least this much may be an address


class PtxBackend(EmulatedBackend):
    """`arch` as NVRTC names it ("90a"). What no compiler makes for it is compiled for 9.0: products of warpgroups, and
    kernels that overlap on architectures before. `counting`: launches are counted."""

    loaded: ClassVar[list[tuple[str, str, str]]] = []  # (source, name, PTX) of all
    covered: ClassVar[set[Place] | None] = None  # lines of the sources that have run, if they are collected
    optimized: ClassVar[str] = "-Og"  # how g++ does it
    counting = False
    _poison: int | None = None  # of a launch that may read what nothing has written

    def __init__(self, arch: str, *, capability: Capability, overlap: bool) -> None:
        super().__init__(sanitize=False, capability=capability, overlap=overlap)
        self._arch = EARLY if overlap and int(re.sub(r"\D", "", arch)) < 90 else arch

    def _library(self, source: str, name: str, defines: dict[str, int]) -> ctypes.CDLL:
        text = kernel_source(source)
        exact = (
            source in EXACT or "wgmma" in text or ("FLOAT8_X" in defines and int(re.sub(r"\D", "", self._arch)) < 89)
        )
        compiled = _ptx(text, EARLY if exact else self._arch, *sorted(defines.items()))
        self.loaded.append((source, name, compiled))
        return self.load_ptx(compiled, name)

    def load(self, source: str, name: str, defines: dict[str, int]) -> Launch:
        once = super().load(source, name, defines)
        whole = PADDED.get(source, 1)
        return once if whole and defines.get("DIM", 0) % whole == 0 else self._with_each_poison(once, source, name)

    def _with_each_poison(self, once: Launch, source: str, name: str) -> Launch:
        def launch(grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared: int) -> None:
            tensors, seed, launched = _whole_tensors(args), self._seed, len(self.launches)
            before, found = [x.clone() for x in tensors], []
            try:
                # Counted once. What overlapping kernels asked L2 for may not be asked for again.
                for poison in POISONS[:1] if self.counting or self._overlap else POISONS:
                    self._poison = poison
                    for x, value in zip(tensors, before, strict=True):
                        x.copy_(value)
                    self._seed = seed
                    once(grid, block, args, shared)
                    found.append([x.clone() for x in tensors])
            finally:
                self._poison = None
                del self.launches[launched + 1 :]
            if not all(map(torch.equal, found[0], found[-1])):
                raise RuntimeError(f"{source}: {name}: results depend on shared memory that nothing has written")

        return launch

    def load_ptx(self, text: str, name: str) -> ctypes.CDLL:
        """The kernel of that name. Raises UnsupportedError with an instruction that the translator does not know."""
        flags = *FLAGS, self.optimized
        digest = hashlib.sha256("\0".join((text, name, *flags, _translator(), processor())).encode()).hexdigest()
        library = environment().cache_dir / "emulated" / f"{name}-ptx-{digest[:24]}.so"
        if not library.exists():
            try:
                code = translate(parse(text), name)
            except PtxError as error:
                raise UnsupportedError(f"{name}: {error}") from None
            build(library, name, code, [[compiler(), "-x", "c++", "-", *flags, "-o", f"{library}.{os.getpid()}"]])
            library.with_suffix(".ptx").write_text(text)
        return ctypes.CDLL(str(library))

    def run_ptx(self, text: str, name: str, grid: int, block: int, args: Sequence[Any], shared: int = 0) -> None:
        """Launch a kernel that is given as PTX. An array is the address of its first element."""
        tensors = [torch.from_numpy(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
        self._launcher(self.load_ptx(text, name), name, name)((grid, 1, 1), (block, 1, 1), tensors, shared)

    def _before(self, library: ctypes.CDLL, source: str, name: str, args: Sequence[Any]) -> None:
        size = ctypes.c_uint64()
        constants = getattr(library, f"{name}_constants")
        constants.restype = ctypes.c_void_p
        begin = constants(ctypes.byref(size))
        bounds = [(begin, begin + size.value)]
        for arg in args:
            if isinstance(arg, Tensor):
                storage = arg.untyped_storage()
                bounds.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        flat = [end for pair in bounds for end in pair]
        given = (ctypes.c_uint64 * len(flat))(*flat)
        bounded = not any(map(_has_addresses, args))
        _executed(library, name)
        self._runtime.lm_check(
            given,
            ctypes.c_uint64(len(bounds)),
            bounded,
            self._poison is not None,
            self.counting,
            ctypes.c_uint32(NAN if self._poison is None else self._poison),
        )

    @contextmanager
    def counted(self) -> Iterator[list[Traffic]]:
        """What each launch inside executes and moves."""
        self._counts = list[Traffic]()
        self.counting = True
        try:
            yield self._counts
        finally:
            self.counting = False

    def _after(self, library: ctypes.CDLL, source: str, name: str, threads: int) -> None:
        if self.covered is not None:
            entry = _entry(library, name)
            ran = np.zeros(max(1, sum(map(bool, block_sizes(entry.statements)))), np.uint64)
            _executed(library, name, ran)
            self.covered.update(has_run(entry, source, ran.tolist()))
        if not self.counting:
            return
        self._runtime.lm_traffic.restype = self._runtime.lm_in_flight.restype = ctypes.c_uint64
        places = self._runtime.lm_traffic(None, ctypes.c_uint64(0))
        rows = np.zeros((places, 5), np.uint64)
        self._runtime.lm_traffic(ctypes.c_void_p(rows.ctypes.data), ctypes.c_uint64(places))
        lines = lines_of(rows.tolist())
        in_flight = int(self._runtime.lm_in_flight())
        in_flight += threads * loaded_together(_entry(library, name).statements, lines)
        self._counts.append(Traffic(source, name, 1, _executed(library, name), in_flight, lines))

    def _explained(self, library: ctypes.CDLL, source: str, name: str, message: str) -> str:
        """The message, the lines of PTX that it names, and where in the sources they come from."""
        listing = Path(library._name).with_suffix(".ptx")
        lines, entry = listing.read_text().splitlines(), _entry(library, name)
        named = dict.fromkeys(int(number) for number in re.findall(r"line (\d+)", message))
        shown = [
            f"    {number}: {lines[number - 1].strip()}{_where(source, entry.source_lines(number))}"
            for number in named
            if 0 < number <= len(lines)
        ]
        return "\n".join([message, *shown, f"    of {listing}"] if shown else [message])


def _executed(library: ctypes.CDLL, name: str, each: np.ndarray | None = None) -> int:
    """Instructions of all threads since the last call, and in `each` those of each basic block."""
    executed = getattr(library, f"{name}_executed")
    executed.restype = ctypes.c_uint64
    return int(executed(None if each is None else ctypes.c_void_p(each.ctypes.data)))


@cache
def _entry(library: ctypes.CDLL, name: str) -> Entry:
    """What a library was translated from."""
    return parse(Path(library._name).with_suffix(".ptx").read_text()).entries[name]


def _where(source: str, lines: Sequence[int]) -> str:
    """ " (gemm.cu:12)", or nothing if PTX was given."""
    places = [":".join(map(str, origins(source)[line - 1])) for line in lines]
    return f" ({', '.join(places)})" if places else ""


def _whole_tensors(args: Sequence[Any]) -> list[Tensor]:
    """The memory of all tensors among arguments, as bytes, each once."""
    storages = {arg.untyped_storage().data_ptr(): arg.untyped_storage() for arg in args if isinstance(arg, Tensor)}
    return [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages.values()]  # type: ignore[call-overload]


def _has_addresses(arg: Any) -> bool:
    """Whether a kernel may follow an address that lies in the argument."""
    if isinstance(arg, Tensor):
        return arg.dtype == torch.int64 and arg.numel() > 0 and int(arg.max()) >= ADDRESSES
    return isinstance(arg, np.integer) and int(arg) >= ADDRESSES


@cache
def _ptx(text: str, arch: str, *defines: tuple[str, int]) -> str:
    return toolchain.ptx(text, arch, dict(defines))


@cache
def _translator() -> str:
    """All that a translation depends on."""
    modules = (TRANSLATOR / f"{name}.py" for name in ("syntax", "operands", "forms", "special", "translation"))
    return "".join(path.read_text() for path in (HOST, *modules, *sorted(TRANSLATOR.glob("*.h"))))
