"""Instruction set levels: those of this machine, and the one in use."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from numba.core.registry import cpu_target

from lmkit.config import environment
from lmkit.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Isa:
    """One level. A micro-kernel holds rows * vectors accumulators, as many as the registers allow. `rows` lists the row
    counts that have a micro-kernel of their own, descending, down to 1.
    """

    name: str
    lanes: int  # of 32 bits in a vector
    dot: str  # "vpdpbusd", "pmadd" or "generic": see dots.py
    packed_rows: tuple[int, ...]  # for quantized weights unpacked in registers
    int_rows: tuple[int, ...]  # for quantized weights in bytes
    int_vectors: int
    float_rows: tuple[int, ...]
    float_vectors: int
    score_rows: tuple[int, ...]
    needs: frozenset[str]  # processor features, as LLVM names them
    emulate: bool = False  # generic instructions instead of `dot`, in the same layouts: testing on any machine

    @property
    def int_tile(self) -> int:
        """Outputs in a panel of quantized weights."""
        return self.int_vectors * self.lanes

    @property
    def float_tile(self) -> int:
        """Outputs in a panel of dense weights."""
        return self.float_vectors * self.lanes


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni"}
LEVELS = {
    isa.name: isa
    for isa in (  # best first
        Isa("avx512_vnni", 16, "vpdpbusd", (4, 2, 1), (6, 4, 2, 1), 4, (12, 6, 4, 2, 1), 2, (6, 4, 2, 1), _AVX512),
        Isa("avx_vnni", 8, "vpdpbusd", (4, 2, 1), (6, 4, 2, 1), 2, (6, 4, 2, 1), 2, (6, 4, 2, 1), _AVX2 | {"avxvnni"}),
        Isa("avx2", 8, "pmadd", (4, 2, 1), (6, 4, 2, 1), 2, (6, 4, 2, 1), 2, (6, 4, 2, 1), _AVX2),
        Isa("portable", 4, "generic", (4, 2, 1), (4, 2, 1), 2, (6, 4, 2, 1), 2, (2, 1), frozenset()),
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


def missing(isa: Isa) -> frozenset[str]:
    """Features of `isa` that numba does not compile for on this machine."""
    return isa.needs - _features()


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
        return next(isa for isa in LEVELS.values() if not missing(isa))
    if asked not in LEVELS:
        raise ConfigError(f"LMKIT_CPU_ISA={asked!r}: expected one of {', '.join(LEVELS)}")
    if lacking := missing(LEVELS[asked]):
        raise ConfigError(f"LMKIT_CPU_ISA={asked!r}: this processor lacks {', '.join(sorted(lacking))}")
    return LEVELS[asked]


def describe() -> str:
    forced = " (forced by LMKIT_CPU_ISA)" if environment().cpu_isa else ""
    return host().name + forced
