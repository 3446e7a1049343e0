"""Decode attention over quantized KV against bfloat16 KV, at long context.

    python -m benchmarks.kv_attention [--json FILE]

There are 8 KV heads of 128 with 4 query heads each, as in an 8B Llama. A pass reads 16 sequences of 8192 tokens, one
after the other or as one batch. Their KV is several times as large as the last-level cache in every storage type. Types
take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
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
from lmkit.kernels.ops import BatchGeometry
from lmkit.kv_dtype import kv_dtype
from lmkit.layers.batch import KVLayer, allocate_kv

HEADS, GROUP, DIM, BLOCK_SIZE = 8, 4, 128, 32
CONTEXT, SEQUENCES = 8192, 16
GOALS = {"int8": 1.7, "int4": 2.5}  # times the speed of bfloat16


def _filled(dtype: str, num_blocks: int) -> KVLayer:
    """KV filled with normally distributed vectors."""
    kv = allocate_kv(num_blocks, HEADS, BLOCK_SIZE, DIM, (kv_dtype(dtype), kv_dtype(dtype)))
    k, v = torch.randn(2, 64 * BLOCK_SIZE, HEADS, DIM)
    for first in range(0, num_blocks, 64):
        slots = torch.arange(min(64, num_blocks - first) * BLOCK_SIZE, dtype=torch.int32)
        append = ops.kv_append.select("cpu", num_heads=HEADS, num_kv_heads=HEADS, head_dim=DIM)
        append(k[: len(slots)], v[: len(slots)], kv.k, kv.v, slots + first * BLOCK_SIZE)
    return kv


def _decode(kv: KVLayer, tables: torch.Tensor, together: int) -> Callable[[], None]:
    """A pass over all sequences, `together` at a time."""
    impl = ops.paged_attention.select("cpu", num_heads=HEADS * GROUP, num_kv_heads=HEADS, head_dim=DIM)
    q = torch.randn(together, HEADS * GROUP, DIM)
    starts, lens = torch.arange(together + 1).int(), torch.full((together,), CONTEXT).int()
    nowhere = torch.full((together,), -1).int()

    def decode() -> None:
        for first in range(0, len(tables), together):
            geometry = BatchGeometry(starts, lens, tables[first : first + together], nowhere)
            impl(q, kv.k, kv.v, geometry, AttentionSpec(DIM**-0.5))

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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    threads.configure(default_num_threads())
    print(f"{machine()['cpu']}, {threads.num_threads()} threads, {isa.describe()}: {measure_ceilings().describe()}")
    rows = cases()
    for row in rows:
        print(f"{row['case']}: {row['ratio']:.2f}x (goal {row['goal']}), {row['gb_per_s']:.1f} GB/s")
    if arguments.json:
        save(arguments.json, "kv_attention", rows, isa=isa.host().name)


if __name__ == "__main__":
    main()
