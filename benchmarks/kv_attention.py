"""Decode attention over quantized KV against bfloat16 KV at long context, and over calibrated INT4 KV against plain.

    python -m benchmarks.kv_attention [--json FILE] [--only long,calibrated,levels]

Long context: there are 8 KV heads of 128 with 4 query heads each, as in an 8B Llama. A pass reads 16 sequences of 8192
tokens, one after the other or as one batch. Their KV is several times as large as the last-level cache in every storage
type. Types take turns.

Calibrated: one sequence of small models and one thread, captured as the decode steps of the engine are. Keys have a
mean of 8 pairs, matrices, and a key and value of position 0 apart, as `lmkit quantize --kv-bits 4` finds them. The
least time of each counts, in turns.

Levels: INT3 and INT2 against INT4, the same way.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import lmkit.kernels  # noqa: F401  (registers)
from benchmarks.ceilings import measure_ceilings
from benchmarks.report import interleaved, machine, save
from lmkit.attention_spec import AttentionSpec
from lmkit.environment import default_num_threads
from lmkit.kernels import ops
from lmkit.kernels.cpu import isa, threads
from lmkit.kernels.ops import Balance, BatchGeometry, KeyMean
from lmkit.kv_dtype import kv_dtype
from lmkit.layers.batch import KVLayer, allocate_kv

HEADS, GROUP, DIM, BLOCK_SIZE = 8, 4, 128, 32
CONTEXT, SEQUENCES = 8192, 16
GOALS = {"int8": 1.7, "int4": 2.5}  # times the speed of bfloat16
# Name -> KV heads, query heads of each, D, context, which a sliding window bounds.
SMALL = {
    "SmolLM2-135M": (3, 3, 64, 1024),
    "SmolLM2-135M, long": (3, 3, 64, 4096),
    "Gemma 3 270M": (1, 4, 256, 512),
    "Llama 3.2 1B": (8, 4, 64, 1024),
}
PAIRS, CALIBRATED_GOAL, LEVELS_GOAL = 8, 0.9, 0.85  # of a key's mean; times the speed of plain INT4


def _filled(dtype: str, num_blocks: int, heads: int = HEADS, dim: int = DIM) -> KVLayer:
    """KV filled with normally distributed vectors."""
    kv = allocate_kv(num_blocks, heads, BLOCK_SIZE, dim, (kv_dtype(dtype), kv_dtype(dtype)))
    k, v = torch.randn(2, 64 * BLOCK_SIZE, heads, dim)
    for first in range(0, num_blocks, 64):
        slots = torch.arange(min(64, num_blocks - first) * BLOCK_SIZE, dtype=torch.int32)
        append = ops.kv_append.select("cpu", num_heads=heads, num_kv_heads=heads, head_dim=dim)
        append(k[: len(slots)], v[: len(slots)], kv.k, kv.v, slots + first * BLOCK_SIZE)
    return kv


def _decode(
    kv: KVLayer, tables: torch.Tensor, together: int, group: int = GROUP, context: int = CONTEXT
) -> Callable[[], None]:
    """A pass over all sequences, `together` at a time."""
    heads, dim = kv.k.data.shape[1], kv.k.dim
    impl = ops.paged_attention.select("cpu", num_heads=heads * group, num_kv_heads=heads, head_dim=dim)
    q = torch.randn(together, heads * group, dim)
    starts, lens = torch.arange(together + 1).int(), torch.full((together,), context).int()
    nowhere = torch.full((together,), -1).int()

    def decode() -> None:
        for first in range(0, len(tables), together):
            geometry = BatchGeometry(starts, lens, tables[first : first + together], nowhere)
            impl(q, kv.k, kv.v, geometry, AttentionSpec(dim**-0.5))

    return decode


def cases(seconds: float = 20) -> list[dict[str, Any]]:
    """Rows {"case", "ratio", "goal", "seconds", "gb_per_s"}; ratio = bfloat16's time of a pass / the type's."""
    blocks = CONTEXT // BLOCK_SIZE
    tables = torch.randperm(SEQUENCES * blocks).view(SEQUENCES, blocks).int()
    layers = {dtype: _filled(dtype, SEQUENCES * blocks) for dtype in ("bfloat16", *GOALS)}
    rows = []
    for name, together in (("one sequence", 1), (f"{SEQUENCES} sequences", SEQUENCES)):
        functions = {dtype: _decode(kv, tables, together) for dtype, kv in layers.items()}
        times = interleaved(functions, seconds=seconds / 2)
        for dtype, goal in GOALS.items():
            kv = layers[dtype]
            size = sum(x.data.nbytes + x.params.nbytes for x in (kv.k, kv.v))
            case = f"decode attention, {dtype} KV against bfloat16, {CONTEXT} tokens, {name}"
            ratio = times["bfloat16"] / times[dtype]
            rows.append({"case": case, "ratio": ratio, "goal": goal, "seconds": times[dtype],
                         "gb_per_s": size / times[dtype] / 1e9})  # fmt: skip
    return rows


def _calibrated(kv: KVLayer, context: int) -> KVLayer:
    """The same storage, read with all that calibration may find."""
    heads, dim = kv.k.data.shape[1], kv.k.dim
    angles = torch.arange(context) * 1e4 ** (-torch.arange(dim // 2)[:, None] / (dim // 2))
    pairs = torch.stack([torch.randperm(dim // 2)[:PAIRS] for _ in range(heads)]).int()
    mean = KeyMean(torch.randn(heads, dim), pairs, torch.stack([angles.cos(), angles.sin()], 1).contiguous())
    matrix = torch.linalg.qr(torch.randn(heads, dim, dim))[0].contiguous()
    first = torch.randn(2, heads, dim)
    keys = replace(kv.k, mean=mean, balance=Balance(matrix, matrix), first=first[0].contiguous())
    return replace(kv, k=keys, v=replace(kv.v, first=first[1].contiguous()))


def _captured(function: Callable[[], None]) -> threads.Program:
    """The function's kernels, as a decode step launches them: without Python between them."""
    function()
    with threads.capturing() as program:
        function()
    return program


def _small_cases(
    make: Callable[[KVLayer, int], dict[str, KVLayer]], goal: float, seconds: float
) -> list[dict[str, Any]]:
    """Rows as of `cases` for each of SMALL; ratio = time of plain INT4 / of a layer that `make` finds beside it."""
    rows = []
    for name, (heads, group, dim, context) in SMALL.items():
        kv = _filled("int4", context // BLOCK_SIZE, heads, dim)
        tables = torch.randperm(context // BLOCK_SIZE).view(1, -1).int()
        layers = {"plain": kv, **make(kv, context)}
        functions = {kind: _decode(layer, tables, 1, group, context) for kind, layer in layers.items()}  # own tensors
        launches = {kind: _captured(function).launch for kind, function in functions.items()}
        times = interleaved(launches, seconds=seconds / len(SMALL), rounds=4000, pick=min)
        for kind in functions.keys() - {"plain"}:
            case = f"decode attention, {kind} KV against plain INT4, {name}, {context} tokens"
            rows.append({"case": case, "ratio": times["plain"] / times[kind], "goal": goal, "seconds": times[kind]})
    return rows


def calibrated_cases(seconds: float = 20) -> list[dict[str, Any]]:
    """Calibrated INT4."""
    return _small_cases(lambda kv, context: {"calibrated": _calibrated(kv, context)}, CALIBRATED_GOAL, seconds)


def level_cases(seconds: float = 20) -> list[dict[str, Any]]:
    """INT3 and INT2 as they are."""

    def others(kv: KVLayer, context: int) -> dict[str, KVLayer]:
        return {name: _filled(name, context // BLOCK_SIZE, kv.k.data.shape[1], kv.k.dim) for name in ("int3", "int2")}

    return _small_cases(others, LEVELS_GOAL, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--only", default="long,calibrated,levels", help="long, calibrated, levels")
    arguments = parser.parse_args()
    rows = []
    for kind in arguments.only.split(","):
        threads.configure(default_num_threads() if kind == "long" else 1)
        print(f"{machine()['cpu']}, {threads.num_threads()} threads, {isa.describe()}")
        if kind == "long":
            print(measure_ceilings().describe())
        rows += (found := {"long": cases, "calibrated": calibrated_cases, "levels": level_cases}[kind]())
        for row in found:
            speed = f"{row['gb_per_s']:.1f} GB/s" if kind == "long" else f"{1e6 * row['seconds']:.0f} microseconds"
            print(f"{row['case']}: {row['ratio']:.2f}x (goal {row['goal']}), {speed}")
    if arguments.json:
        save(arguments.json, "kv_attention", rows, isa=isa.host().name)


if __name__ == "__main__":
    main()
