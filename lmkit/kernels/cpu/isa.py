"""Instruction set levels: those of this machine, and the one in use."""

from __future__ import annotations

import ctypes
import functools
import platform
from dataclasses import dataclass, replace

from numba.core import config
from numba.core.codegen import get_host_cpu_features
from numba.core.registry import cpu_target

from lmkit.environment import environment
from lmkit.errors import ConfigError
from lmkit.kernels.cpu.amx import permission
from lmkit.log import get_logger

log = get_logger(__name__)

HWCAP, HWCAP2 = 16, 26  # numbers of entries in the auxiliary vector
ARM_FEATURES = {"neon": (HWCAP, 1), "dotprod": (HWCAP, 20), "i8mm": (HWCAP2, 13)}  # LLVM's name -> (entry, bit)


def auxiliary(entry: int) -> int:
    """What Linux tells each process: for ARM, the features that all cores have."""
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, (ctypes.c_ulong,)
    return int(getauxval(entry))


def _complete_arm_features() -> None:
    """Name to numba the features of an ARM processor: LLVM does not look for all of them. numba asks once, when its
    first function is declared.
    """
    if platform.machine() != "aarch64" or config.CPU_NAME is not None or config.CPU_FEATURES is not None:
        return
    found = [f"+{name}" for name, (entry, bit) in ARM_FEATURES.items() if auxiliary(entry) >> bit & 1]
    config.CPU_FEATURES = ",".join([get_host_cpu_features(), *found])


_complete_arm_features()


@dataclass(frozen=True, eq=False)
class Isa:
    """One level. A micro-kernel holds rows * vectors accumulators, as many as the registers allow. `rows` lists the row
    counts that have a micro-kernel of their own, descending, down to 1.
    """

    name: str
    lanes: int  # of 32 bits in a vector
    dot: str  # "vpdpbusd", "pmadd", "usmmla", "sdot" or "generic": see dots.py
    packed_rows: tuple[int, ...]  # for quantized weights unpacked in registers; see tiles.int_tile
    int_rows: tuple[int, ...]  # for quantized weights in bytes
    int_vectors: int
    float_rows: tuple[int, ...]
    float_vectors: int
    score_rows: tuple[int, ...]
    needs: frozenset[str]  # processor features, as LLVM names them
    registers: int = 16
    direct_rows: int = 32  # of a dense product that widens 16-bit weights for each few of them; more share a copy
    tiles: bool = False  # AMX: see amx/tile_file.py
    layout: str = ""  # the level whose layout of packed weights this one has, if not its own
    emulate: bool = False  # generic instructions instead of `dot`, in the same layouts: testing on any machine

    @property
    def int_tile(self) -> int:
        """Outputs in a panel of quantized weights."""
        return self.int_vectors * self.lanes

    @property
    def float_tile(self) -> int:
        """Outputs in a panel of dense weights."""
        return self.float_vectors * self.lanes

    @property
    def value_tile(self) -> int:
        """Columns of values that attention computes at once."""
        return 2 * self.lanes

    @property
    def neon(self) -> bool:
        """Whether an instruction takes one lane of an operand for all lanes: a vector of scalars is loaded at once."""
        return self.dot in ("usmmla", "sdot")


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni"}
_AMX = _AVX512 | {"amx-tile", "amx-int8", "amx-bf16"}
_NEON = frozenset({"neon", "dotprod"})
_VNNI = Isa(
    "avx512_vnni", 16, "vpdpbusd", (8, 4, 2, 1), (6, 4, 2, 1), 4, (12, 6, 4, 2, 1), 2, (6, 4, 2, 1), _AVX512, 32
)
LEVELS = {
    isa.name: isa
    for isa in (  # best first
        replace(_VNNI, name="amx", needs=_AMX, tiles=True, layout=_VNNI.name),
        _VNNI,
        Isa("avx_vnni", 8, "vpdpbusd", (4, 2, 1), (6, 4, 2, 1), 2, (6, 4, 2, 1), 2, (6, 4, 2, 1), _AVX2 | {"avxvnni"}),
        Isa("avx2", 8, "pmadd", (4, 2, 1), (6, 4, 2, 1), 2, (6, 4, 2, 1), 2, (6, 4, 2, 1), _AVX2),
        Isa("neon_i8mm", 4, "usmmla", (4, 2, 1), (4, 2, 1), 4, (4, 2, 1), 4, (6, 4, 2, 1), _NEON | {"i8mm"}, 32, 6),
        Isa("neon_dot", 4, "sdot", (4, 2, 1), (4, 2, 1), 4, (4, 2, 1), 4, (6, 4, 2, 1), _NEON, 32, 6),
        Isa("portable", 4, "generic", (4, 2, 1), (4, 2, 1), 2, (6, 4, 2, 1), 2, (2, 1), frozenset(), direct_rows=6),
    )
}
EMULATED = "+emulated"


def named(name: str) -> Isa:
    """A level by name. `avx512_vnni+emulated` has its layout but not its instruction, and fewer micro-kernels."""
    isa = LEVELS[name.removesuffix(EMULATED)]
    if not name.endswith(EMULATED):
        return isa
    packed_rows, int_rows = (isa.packed_rows[0], 1), (isa.int_rows[0], 1)
    return replace(isa, name=name, emulate=True, needs=frozenset(), packed_rows=packed_rows, int_rows=int_rows)


def obstacle(isa: Isa) -> str | None:
    """Why this process cannot run `isa`, or None."""
    if lacking := isa.needs - _features():
        return f"this processor lacks {', '.join(sorted(lacking))}"
    return permission.refused() if isa.tiles and not isa.emulate else None


@functools.cache
def _features() -> frozenset[str]:
    """The features numba compiles for: the host's, unless NUMBA_CPU_NAME or NUMBA_ENABLE_AVX change them."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return frozenset(name[1:] for name in features.split(",") if name.startswith("+"))


@functools.cache
def host() -> Isa:
    """The level in use: LMKIT_CPU_ISA, or the best of this machine. Raises ConfigError if it cannot run here."""
    asked = environment().cpu_isa
    if asked is None:
        if reason := tiles_refused():
            log.warning("instruction set amx is not used: %s", reason)
        return next(isa for isa in LEVELS.values() if obstacle(isa) is None)
    if asked not in LEVELS:
        raise ConfigError(f"LMKIT_CPU_ISA={asked!r}: expected one of {', '.join(LEVELS)}")
    if reason := obstacle(LEVELS[asked]):
        raise ConfigError(f"LMKIT_CPU_ISA={asked!r}: {reason}")
    return LEVELS[asked]


def multiplies_bfloat16() -> bool:
    """Whether products of bfloat16 matrices are faster than those of float32, at the level in use."""
    return host().lanes == _VNNI.lanes and bool({"avx512bf16", "amx-bf16"} & _features())


def tiles_refused() -> str | None:
    """Why this process may not use the AMX that the processor has, or None."""
    return obstacle(LEVELS["amx"]) if LEVELS["amx"].needs <= _features() else None


def describe() -> str:
    forced = " (forced by LMKIT_CPU_ISA)" if environment().cpu_isa else ""
    refused = f"; not amx: {reason}" if (reason := tiles_refused()) else ""
    return host().name + forced + refused
