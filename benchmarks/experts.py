"""A sparse layer of a mixture of experts: all experts in a few jobs, and a call for each expert.

    python -m benchmarks.experts [--quick] [--json FILE]

The layer has the shape of Qwen3-30B-A3B: 128 experts of 2048 x 768, 8 for each token, 4 bits in groups of 128, and
activations of 8 bits. Its experts (340 MB) do not fit a cache, and each call has other tokens. The roofline of a call
is the longer of two times: to read the chosen experts once at the measured bandwidth, and to do the multiply-adds at
the measured peak.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.ceilings import Meter
from benchmarks.report import interleaved, save, share
from lmkit.environment import default_num_threads
from lmkit.kernels.cpu import isa, threads
from lmkit.kernels.cpu.workspace import Workspace
from lmkit.layers.blocks.mlp import MLPSpec
from lmkit.layers.blocks.moe import MoESpec
from lmkit.layers.linear import Weights
from lmkit.layers.moe import MoE
from lmkit.qtensor import QTensor, int_scheme

HIDDEN, INNER, EXPERTS, PER_TOKEN, GROUP = 2048, 768, 128, 8, 128
ROWS = (1, 4, 16, 64, 512)
BYTES = 3 * HIDDEN * INNER // 2 + 3 * HIDDEN * INNER // GROUP * 3  # of an expert: codes, float16 scales, zeros
console = Console()


def codes(outputs: int, inputs: int) -> QTensor:
    scales = torch.rand(outputs, inputs // GROUP).half() / 100
    zeros = torch.full(scales.shape, 8, dtype=torch.uint8)
    return QTensor(torch.randint(16, (outputs, inputs), dtype=torch.uint8), scales, zeros, int_scheme(4, GROUP))


def layer(*, together: bool) -> MoE:
    weights: Weights = {"mlp.router": torch.randn(EXPERTS, HIDDEN) / 20}
    for expert in range(EXPERTS):
        for role, shape in {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}.items():
            weights[f"mlp.experts.{expert}.{role}"] = codes(*shape)
    moe = MoE(MoESpec(EXPERTS, PER_TOKEN, MLPSpec(INNER)), weights)
    for linear in moe.linears:
        linear.pack("int8")
    if not together:
        moe.__dict__["_together"] = None
    return moe


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a shorter measurement")
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    options = parser.parse_args()
    threads.configure(default_num_threads())
    meter, rows = Meter(), []
    meter.keep_fastest(meter.measure(5)[1])
    table = Table("tokens", "together, ms", "each, ms", "times", "GB/s", "of the roofline")
    layers, workspace = (
        {name: layer(together=name == "together") for name in ("together", "each")},
        Workspace(256 << 20),
    )
    with workspace.active():
        for count in ROWS:
            inputs = [torch.randn(count, HIDDEN) for _ in range(16)]

            def call(moe: MoE, turns: itertools.cycle[torch.Tensor]) -> None:
                moe(next(turns))

            functions: dict[str, Callable[[], None]] = {
                name: partial(call, moe, itertools.cycle(inputs)) for name, moe in layers.items()
            }
            seconds = interleaved(functions, seconds=2 if options.quick else 6)
            peaks = meter.best_so_far()
            chosen = sum(_num_chosen(layers["each"], x) for x in inputs) / len(inputs)
            size, work = int(chosen * BYTES), 6 * count * PER_TOKEN * HIDDEN * INNER
            one, other = seconds["together"], seconds["each"]
            reached = share(peaks.roofline(size, work, "int4"), one, f"{count} tokens")
            figures = (f"{1000 * one:.2f}", f"{1000 * other:.2f}", f"{other / one:.2f}", f"{size / one / 1e9:.1f}")
            table.add_row(str(count), *figures, f"{reached:.0%}")
            rows.append({"tokens": count, "together": one, "each": other, "experts": chosen, "of_roofline": reached})
    console.print(f"{isa.describe()}, {threads.num_threads()} threads: {peaks.describe()}")
    console.print(table)
    if options.json:
        save(options.json, "experts", rows, isa=isa.host().name, peaks=vars(peaks))


def _num_chosen(moe: MoE, x: torch.Tensor) -> int:
    """Experts that have any of the tokens."""
    best = moe.router(x).topk(PER_TOKEN).indices
    return len(best.unique())


if __name__ == "__main__":
    main()
