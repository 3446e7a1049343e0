"""CPU kernels against torch's and against the machine: linears and paged attention.

    python -m benchmarks.kernels [--quick] [--json FILE]

The roofline of a call is the longer of two times: the time to read its weights (or its KV) once at the measured
bandwidth, and the time to do its multiply-adds at the measured peak of the fastest instruction for them. Both are
measured again after each measurement, and the best values so far count. Copies of the weights and of the KV take turns.
Together they are larger than the last-level cache.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import lmkit.kernels  # noqa: F401  (registers)
from benchmarks.ceilings import Meter, cache_bytes
from benchmarks.loops import Kind
from benchmarks.report import interleaved, machine, save, share
from lmkit.attention_spec import AttentionSpec
from lmkit.environment import default_num_threads
from lmkit.formats.mxfp4 import MXFP4
from lmkit.kernels import ops
from lmkit.kernels.cpu import isa, threads
from lmkit.kernels.ops import BatchGeometry
from lmkit.kernels.registry import Op
from lmkit.kv_dtype import FLOAT16, KV_DTYPES, KVDtype
from lmkit.layers.batch import KVLayer, allocate_kv
from lmkit.qtensor import QTensor, int_scheme, quantize

console = Console(width=None if sys.stdout.isatty() else 120)
SHAPES = {  # out, in: a 1B and an 8B Llama
    "1B gate+up": (16384, 2048),
    "1B down": (2048, 8192),
    "8B gate+up": (28672, 4096),
    "8B down": (4096, 14336),
}
ROWS = (1, 4, 16, 64, 512)


@dataclass(frozen=True)
class Candidate:
    """One way to multiply. It has several copies of the weight, so that none is in the cache."""

    name: str
    run: Callable[[Tensor, Any], Any]
    weights: list[Any]
    num_bytes: int  # of one copy
    kind: Kind = "float"  # of its multiply-adds


def num_copies(num_bytes: int) -> int:
    """How many buffers of `num_bytes`, used in turn, are read from memory: a quarter more than the last-level cache
    holds, and 96 MB at least."""
    return max(2, -(-max(96 << 20, cache_bytes() * 5 // 4) // num_bytes))


def _kernel(name: str, op: Op, weight: Any, num_bytes: int, *, kind: Kind, **traits: Any) -> Candidate:
    impl = op.select("cpu", **traits)
    weights = [impl.pack(weight) for _ in range(num_copies(num_bytes))]
    return Candidate(f"lmkit {name}", lambda x, w: impl(x, w, None), weights, num_bytes, kind)


def candidates(n: int, k: int) -> Iterator[Candidate]:
    dense = torch.randn(n, k) / k**0.5
    shape: dict[str, Any] = {"out_features": n, "in_features": k}
    four, eight = quantize(dense, int_scheme(4, 128)), quantize(dense, int_scheme(8, -1, symmetric=True))
    codes = n * k // 2 + n * k // 128 * 3
    yield _kernel("w4a8", ops.linear_w4a8, four, codes, kind="int4", group_size=128, bits=4, **shape)
    yield _kernel("w4a16", ops.linear_w4a16, four, codes, kind="bfloat16", group_size=128, bits=4, **shape)
    yield _kernel("w8a8", ops.linear_w8a8, eight, n * k, kind="int8", group_size=-1, bits=8, **shape)
    for name, group in (("mxfp4", 32), ("nvfp4", 16)):
        scheme, groups = replace(MXFP4.plain, group_size=group), (n, k // group)
        numbers = torch.tensor(scheme.codes.values, dtype=torch.uint8)[torch.randint(16, (n, k))]
        floats = QTensor(numbers, torch.rand(groups), torch.full(groups, 128, dtype=torch.uint8), scheme)
        traits = {"group_size": group, "bits": 8, "values": scheme.codes.values}
        yield _kernel(name, ops.linear_w8a8, floats, n * k // 2 + n * k // group * 5, kind="int4", **traits, **shape)
    kinds: dict[torch.dtype, Kind] = {torch.bfloat16: "bfloat16", torch.float32: "float"}
    for dtype, kind in kinds.items():
        weight, size = dense.to(dtype), n * k * dtype.itemsize
        name = str(dtype).removeprefix("torch.")
        yield _kernel(name, ops.linear_dense, weight, size, kind=kind, dtype=dtype, **shape)

        def product(x: Tensor, w: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            return torch.nn.functional.linear(x.to(dtype), w)

        yield Candidate(f"torch {name}", product, [weight.clone() for _ in range(num_copies(size))], size, kind)
    yield from _torch_int4(four.codes)


def _torch_int4(codes: Tensor) -> Iterator[Candidate]:
    """torch's own 4-bit product with groups of 128 and bfloat16 activations. Absent if this build cannot run it."""
    n, k = codes.shape
    scales = torch.ones(k // 128, n, 2, dtype=torch.bfloat16)
    size = n * k // 2 + scales.nbytes
    try:
        convert = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        packed = [convert(codes.int(), 1) for _ in range(num_copies(size))]

        def product(x: Tensor, w: Tensor) -> Tensor:
            return Tensor(torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), w, 128, scales))

        product(torch.zeros(1, k), packed[0])
    except RuntimeError as error:
        console.print(f"torch int4 does not run here: {str(error).splitlines()[0]}")
        return
    yield Candidate("torch int4", product, packed, size, "int8")  # torch may round activations


def bench_linears(meter: Meter, *, quick: bool) -> list[dict[str, Any]]:
    rows = []
    for title, (n, k) in list(SHAPES.items())[: 1 if quick else None]:
        found = list(candidates(n, k))
        table = Table(title=f"{title}: {k} -> {n}, weights of several layers in turn; the % is of the roofline")
        table.add_column("kernel")
        for m in ROWS:
            table.add_column(f"M={m}\nGOP/s", justify="right")
        table.add_column("M=1\nGB/s", justify="right")
        cells: dict[str, list[str]] = {c.name: [] for c in found}
        for m in ROWS:
            x = torch.randn(m, k)
            functions = {c.name: _in_turn(c, x) for c in found}
            seconds = interleaved(functions, seconds=1.5 if quick else 6)
            peaks = meter.best_so_far()
            for c in found:
                t, work = seconds[c.name], 2 * m * n * k
                reached = share(peaks.roofline(c.num_bytes, work, c.kind), t, f"{c.name}, {title}, M={m}")
                cells[c.name].append(f"{work / t / 1e9:.0f} ({reached:.0%})")
                if m == 1:
                    bandwidth = f"{c.num_bytes / t / 1e9:.1f}"
                    rows.append({"kernel": c.name, "weight_gb_per_s": float(bandwidth), "n": n, "k": k, "m": m})
                rows.append({"kernel": c.name, "n": n, "k": k, "m": m, "seconds": t, "gop_per_s": work / t / 1e9,
                             "weight_gb_per_s": c.num_bytes / t / 1e9, "of_roofline": reached})  # fmt: skip
        for c in found:
            at_one = next(r for r in rows if (r["kernel"], r["n"], r["k"], r["m"]) == (c.name, n, k, 1))
            table.add_row(c.name, *cells[c.name], f"{at_one['weight_gb_per_s']:.1f}")
        console.print(table)
    return rows


def _in_turn(candidate: Candidate, x: Tensor) -> Callable[[], None]:
    weights = itertools.cycle(candidate.weights)

    def call() -> None:
        candidate.run(x, next(weights))

    return call


def _copies(blocks: int, heads: int, block: int, dim: int, storage: KVDtype) -> list[KVLayer]:
    """KV layers to use in turn. Together they are larger than a cache."""
    first = allocate_kv(blocks, heads, block, dim, (storage, storage))
    count = num_copies(2 * first.k.data.nbytes)
    return [first, *(allocate_kv(blocks, heads, block, dim, (storage, storage)) for _ in range(count - 1))]


def bench_attention(meter: Meter, *, quick: bool) -> list[dict[str, Any]]:
    """Measure decoding and a chunk of 512 new tokens, with 8 KV heads of 128 and 4 query heads each."""
    heads, group, dim, block = 8, 4, 128, 32
    impl = ops.paged_attention.select("cpu", num_heads=heads * group, num_kv_heads=heads, head_dim=dim)
    rows, table = [], Table(title="paged attention, 8 KV heads of 128, 4 queries each; the % is of the roofline")
    for column in ("sequences", "context", "new", "KV", "ms", "GB/s", "GFLOP/s", "roofline"):
        table.add_column(column, justify="right")
    for sequences, context, new in (
        (16, 64, 1),
        (64, 64, 1),
        (1, 1024, 1),
        (1, 8192, 1),
        (16, 1024, 1),
        (1, 1024, 512),
    ):
        blocks = -(-context // block)
        tables = torch.randperm(sequences * blocks).view(sequences, blocks).int()
        starts, lens = torch.arange(sequences + 1).int() * new, torch.full((sequences,), context).int()
        q, nowhere = torch.randn(sequences * new, heads * group, dim), torch.full((sequences * new,), -1).int()
        layers = {
            name: _copies(sequences * blocks, heads, block, dim, t) for name, t in KV_DTYPES.items() if t != FLOAT16
        }

        def call(
            copies: Iterator[KVLayer],
            q: Tensor = q,
            geometry: BatchGeometry = BatchGeometry(starts, lens, tables, nowhere),
        ) -> Any:
            layer = next(copies)
            return impl(q, layer.k, layer.v, geometry, AttentionSpec(dim**-0.5))

        functions: dict[str, Callable[[], Any]] = {t: partial(call, itertools.cycle(kv)) for t, kv in layers.items()}
        seconds = interleaved(functions, seconds=1 if quick else 4)
        peaks = meter.best_so_far()
        for t, time in seconds.items():
            layer = layers[t][0]
            size = sum(x.data.nbytes + x.params.nbytes for x in (layer.k, layer.v))
            work = 4 * sequences * heads * group * dim * new * (context - new // 2)
            # Codes are multiplied as integers, and integer products are faster.
            kind: Kind = "int8" if layer.k.params.numel() else "float" if t == "float32" else "bfloat16"
            best = peaks.roofline(size, work, kind)
            reached = share(best, time, f"attention, {t} KV, {sequences} sequences of {context}")
            table.add_row(str(sequences), str(context), str(new), t, f"{1000 * time:.3f}", f"{size / time / 1e9:.1f}",
                          f"{work / time / 1e9:.0f}", f"{reached:.0%}")  # fmt: skip
            rows.append({"kernel": "paged_attention", "kv": t, "sequences": sequences, "context": context, "new": new,
                         "seconds": time, "kv_gb_per_s": size / time / 1e9, "of_roofline": reached})  # fmt: skip
    console.print(table)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one shape, fewer rounds: about two minutes")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    threads.configure(default_num_threads())
    meter = Meter()
    meter.keep_fastest(meter.measure(5)[1])
    console.print(f"{machine()['cpu']}, {threads.num_threads()} threads, {isa.describe()}")
    rows = bench_linears(meter, quick=arguments.quick) + bench_attention(meter, quick=arguments.quick)
    peaks = meter.best_so_far()
    console.print(peaks.describe())
    if arguments.json:
        save(arguments.json, "kernels", rows, isa=isa.host().name, peaks=vars(peaks))


if __name__ == "__main__":
    main()
