"""What a step of decoding would take: counts of compiled kernels, and data sheets. Modelled, never measured.

    python -m benchmarks.gpu.model [--gpu H200] [--context 1024]     tokens/s by GPU and batch, the kernels of one GPU,
                                                                    its tokens/s by kind of weights, and attention by
                                                                    type of the KV cache

`lmkit/kernels/cuda/budgets.toml` has what kernels execute and move on some shape, counted on their PTX. A kernel of
Llama-3.1-8B with 4-bit weights and an INT8 cache executes and moves as much for each weight, or for each token of the
cache. Its time is the longest of

    memory     the bytes that it must read and write, at the data sheet's rate, or at what its bytes in flight allow
    L2         the sectors that its multiprocessors ask for
    tensor     its operations, at the data sheet's rate; mma.sync has 62 % of wgmma's on 9.0 and up (arXiv 2402.13499)
    issue      its instructions, one for each of 4 schedulers and clock

and a launch. Kernels of a step follow each other. Waves, barriers, divergence and the host cost nothing here, so
the figures are bounds, and a device will be slower.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.gpu.datasheets import DATASHEETS, Datasheet
from benchmarks.gpu.roofline import LLAMA_3_8B as MODEL
from benchmarks.gpu.roofline import W4_G128
from lmkit.kernels.cuda import gemm_plan
from lmkit.kernels.cuda.gemm_wide import CAPABILITY as WIDE_CAPABILITY
from lmkit.kernels.cuda.gemm_wide import MIN_TOKENS

TABLE = Path(gemm_plan.__file__).with_name("budgets.toml")
L2_BYTES = gemm_plan.L2 / gemm_plan.CLOCK  # an SM, each clock
LATENCY = 1e-9 * gemm_plan.LATENCY  # seconds of a load while memory is busy
MMA_SHARE = 0.62
SCHEDULERS, LANES, SECTOR = 4, 32, 32
FUSED_NORM = 4  # tokens up to which norms are inside the products
PRODUCT_WEIGHTS, WIDE_WEIGHTS = 512 * 4096, 512 * 1024  # of the counted products (tests/kernels/cuda/budget_cases.py)
COUNTED_CACHE = 2 * 512 * 8  # tokens times KV heads of the counted attention
BATCHES = 1, 16, 64, 256
CACHES = "int8", "int4", "int3"
# Bits of a weight, and what the counts of its product with one token are called. None: bytes alone are known.
WEIGHTS: dict[str, tuple[float, str | None]] = {
    "float16": (16, None),
    "INT4": (8 * W4_G128, ""),
    "MXFP4": (5, ", MXFP4"),
    "NVFP4": (6, ", NVFP4"),
    "Q4_K": (4.75, ", Q4_K"),
    "Q5_K": (6.75, ", Q5_K"),
    "Q6_K": (6.625, ", Q6_K"),
}


@cache
def counted() -> dict[str, dict[str, Any]]:
    """The table of counts, by case and kernel."""
    return tomllib.loads(TABLE.read_text())


@dataclass(frozen=True)
class Work:
    """What one launch needs: bytes of memory, operations of tensor cores, and as counted: instructions of all threads,
    sectors, and the bytes in flight of a block."""

    name: str
    num_bytes: float
    flops: float = 0.0
    instructions: float = 0.0
    sectors: float = 0.0
    in_flight: int = 0
    wgmma: bool = False
    blocks_per_sm: int = 1

    def bounds(self, sheet: Datasheet) -> dict[str, float]:
        """Seconds by what limits."""
        reach = sheet.sms * self.blocks_per_sm * self.in_flight / LATENCY if self.in_flight else sheet.peak.bytes_per_s
        slow = sheet.capability >= WIDE_CAPABILITY and not self.wgmma
        return {
            "memory": self.num_bytes / min(sheet.peak.bytes_per_s, reach),
            "L2": self.sectors * SECTOR / (sheet.sms * L2_BYTES * sheet.ghz * 1e9),
            "tensor": self.flops / (sheet.peak.flops * (MMA_SHARE if slow else 1)),
            "issue": self.instructions / LANES / (sheet.sms * SCHEDULERS * sheet.ghz * 1e9),
        }

    def seconds(self, sheet: Datasheet) -> float:
        return max(self.bounds(sheet).values()) + sheet.launch

    @staticmethod
    def of(name: str, case: str, kernel: str, times: float, num_bytes: float, **more: Any) -> Work:
        """`times` what was counted of a kernel in a case."""
        row = counted()[case][kernel]
        sectors = times * (row["loads"][0] + row["stores"][0])
        return Work(name, num_bytes, instructions=times * row["instructions"], sectors=sectors,
                    in_flight=row["in_flight"], **more)  # fmt: skip


def product(name: str, outputs: int, inputs: int, tokens: int, sheet: Datasheet) -> Iterator[Work]:
    """A product with 4-bit weights, by the kernels that it takes."""
    weights, flops = outputs * inputs, 2.0 * outputs * inputs * tokens
    num_bytes = weights * W4_G128 + 2.0 * tokens * (inputs + outputs)
    if sheet.capability == WIDE_CAPABILITY and tokens >= MIN_TOKENS:
        block = 64 if tokens <= 64 else 128
        case, blocks = f"wide product of {block} tokens", -(-tokens // block)
        arranged = blocks * inputs / 1024
        yield Work.of(f"{name}: arrange", case, "arrange", arranged, 0, blocks_per_sm=8)
        yield Work.of(name, case, "gemm_wide", blocks * weights / WIDE_WEIGHTS, num_bytes, flops=flops, wgmma=True)
        return
    block = next((n for n in (1, 16, 64) if tokens <= n), 64)
    times = -(-tokens // block) * weights / PRODUCT_WEIGHTS
    yield Work.of(name, f"product of {block} token{'s' * (block > 1)}", "gemm", times, num_bytes, flops=flops,
                  blocks_per_sm=2)  # fmt: skip


def product_of_one(name: str, outputs: int, inputs: int, weights: str, sheet: Datasheet) -> Work:
    """A token's product with weights of a kind."""
    bits, case = WEIGHTS[weights]
    num_bytes, flops = outputs * inputs * bits / 8 + 2.0 * (inputs + outputs), 2.0 * outputs * inputs
    if case is None:
        return Work(name, num_bytes, flops=flops)
    times = outputs * inputs / PRODUCT_WEIGHTS
    return Work.of(name, "product of 1 token" + case, "gemm", times, num_bytes, flops=flops, blocks_per_sm=2)


def rates_of_one(context: int, sheet: Datasheet) -> str:
    """Tokens/s of one sequence by the kind of weights, in Markdown."""
    lines = [f"| {sheet.name}, one sequence | bits | modelled tok/s |", "|---|---|---|"]
    others = [(count, work) for count, work in step(1, context, sheet) if work.name not in MODEL.products()]
    for weights, (bits, _) in WEIGHTS.items():
        products = [product_of_one(name, *shape, weights, sheet) for name, shape in MODEL.products().items()]
        of_layer = sum(work.seconds(sheet) for work in products)
        seconds = MODEL.layers * of_layer + sum(count * work.seconds(sheet) for count, work in others)
        lines.append(f"| {weights} | {bits:.3g} | {1 / seconds:,.0f} |")
    return "\n".join(lines)


def step(batch: int, context: int, sheet: Datasheet) -> Iterator[tuple[int, Work]]:
    """How often each launch stands in a step of decoding."""
    shape, rows = MODEL, batch / 4
    norm = Work.of("norm", "norm of 4 rows", "norm_rows", rows, 0, blocks_per_sm=2)
    yield 1 + (0 if batch <= FUSED_NORM else 2 * shape.layers), norm
    for name, (outputs, inputs) in shape.products().items():
        for work in product(name, outputs, inputs, batch, sheet):
            yield shape.layers, work
    yield shape.layers, attention(batch * context, "int8")
    logits = 4.0 * batch * shape.vocab
    yield 1, Work("head", 2.0 * shape.head_weights + logits, 2.0 * shape.head_weights * batch, wgmma=True)
    yield 1, Work("tokens", logits)


def attention(tokens: int, kv: str) -> Work:
    """Attention of a layer to as many tokens of all sequences, in a cache of a type."""
    cache_bytes, flops = (tokens * x / MODEL.layers for x in (MODEL.kv_bytes(kv), MODEL.attention_flops(1)))
    times = tokens * MODEL.kv_heads / COUNTED_CACHE
    return Work.of("attention", f"decoding, {kv.upper()}", "decode_attention", times, cache_bytes, flops=flops,
                   blocks_per_sm=2)  # fmt: skip


def caches(context: int, sheet: Datasheet, batch: int = 64) -> str:
    """Attention by the type of the cache, in Markdown."""
    lines = [f"| {sheet.name}, {batch} x {context:,} tokens | bytes of a token and layer | modelled us | limit |"]
    lines.append("|---|---|---|---|")
    for kv in CACHES:
        work, size = attention(batch * context, kv), MODEL.kv_bytes(kv) / MODEL.layers
        bounds = work.bounds(sheet)
        limit = max(bounds, key=bounds.__getitem__)
        lines.append(f"| {kv.upper()} | {size:,.0f} | {1e6 * work.seconds(sheet):.0f} | {limit} |")
    return "\n".join(lines)


def tokens_per_s(batch: int, context: int, sheet: Datasheet) -> float:
    return batch / sum(count * work.seconds(sheet) for count, work in step(batch, context, sheet))


def fits(batch: int, context: int, sheet: Datasheet) -> bool:
    """Whether weights and cache leave a tenth of the memory."""
    weights = MODEL.linear_weights * W4_G128 + 4.0 * MODEL.head_weights  # the head and the embedding
    return weights + batch * context * MODEL.kv_bytes("int8") < 0.9e9 * sheet.memory_gb


def _head(name: str) -> list[str]:
    return [f"| {name} | {' | '.join(map(str, BATCHES))} |", "|---|" + "---|" * len(BATCHES)]


def rates(context: int) -> str:
    """The table of tokens/s, in Markdown."""
    lines = _head(f"modelled tok/s, {context} tokens each")
    for sheet in DATASHEETS:
        cells = (
            f"{tokens_per_s(n, context, sheet):,.0f}" if fits(n, context, sheet) else "does not fit" for n in BATCHES
        )
        lines.append(f"| {sheet.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def kernels(context: int, sheet: Datasheet) -> str:
    """Microseconds of each launch with what limits it, in Markdown."""
    lines = _head(f"{sheet.name}, modelled us of a launch")
    cells: dict[str, dict[int, str]] = {}
    for batch in BATCHES:
        for _, work in step(batch, context, sheet):
            bounds = work.bounds(sheet)
            limit = max(bounds, key=bounds.__getitem__)
            cells.setdefault(work.name, {})[batch] = f"{1e6 * work.seconds(sheet):.1f} {limit}"
    lines += [f"| {name} | {' | '.join(found.get(n, '') for n in BATCHES)} |" for name, found in cells.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="H200", choices=[sheet.name for sheet in DATASHEETS])
    parser.add_argument("--context", type=int, default=1024)
    given = parser.parse_args()
    sheet = next(sheet for sheet in DATASHEETS if sheet.name == given.gpu)
    context = given.context
    tables = rates(context), kernels(context, sheet), rates_of_one(context, sheet), caches(context, sheet)
    sys.stdout.write("\n\n".join(tables) + "\n")


if __name__ == "__main__":
    main()
