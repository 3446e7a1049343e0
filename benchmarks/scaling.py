"""Time of a decode step against context length, batch and model size, beside the roofline of the machine.

    python -m benchmarks.scaling [--quick] [--json FILE] [--plot FILE] [--threads N] [--workdir DIR]

The roofline of a step is the longer of two times: the time to read its weights once and its KV cache once at the
measured bandwidth, and the time to do its multiply-adds at the measured peaks (4-bit dot products for the layers'
matrices, bfloat16 for the head, bfloat16 or 8-bit dot products for attention). The ceilings are measured for each
setting, by reading as many bytes as the model's weights have: those of a small model stay in the cache. Models have
random weights. A sweep changes one quantity, and the other two stay fixed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.ceilings import Ceilings, measure_ceilings
from benchmarks.contention import REPEATS, undisturbed
from benchmarks.peers.lmkit_engine import LmkitEngine
from benchmarks.peers.protocol import Options, decode, prompts
from benchmarks.random_llama import LLAMA_1B, Shape, make_awq, make_checkpoint
from benchmarks.report import save, share
from lmkit.environment import default_num_threads
from lmkit.errors import LMKitError
from lmkit.kernels.cpu import threads as kernel_threads

LONG = 1 << 15
SIZES = {  # by parameters
    "40M": Shape(512, 2048, 8, 8, 2, 64, 8192, LONG),
    "140M": Shape(1024, 4096, 8, 16, 4, 64, 8192, LONG),
    "400M": Shape(1536, 6144, 10, 24, 8, 64, 16384, LONG),
    "1.1B": LLAMA_1B,
}
BASE = "140M"
SHORT_CONTEXT = 64
STEPS, SECONDS = 32, 2.0  # of one measurement
ROOM = (1 + REPEATS) * (1 + STEPS)  # tokens of an answer
KV_BYTES = {"bfloat16": 2.0, "int8": 1.0 + 4 / 64}  # of a value; int8 has 4 more bytes for a head of 64
console = Console(width=None if sys.stdout.isatty() else 120)


@dataclass(frozen=True)
class Setting:
    """One measurement. `sweep` names the quantity that changes."""

    sweep: str
    size: str
    kv: str
    batch: int
    context: int

    @property
    def x(self) -> float:
        """The value on the sweep's axis."""
        by_sweep = {"context": self.context, "batch": self.batch, "size": SIZES[self.size].num_parameters}
        return float(by_sweep[self.sweep])


def settings(*, quick: bool) -> list[Setting]:
    """All measurements. Those of one model and KV type are side by side."""
    contexts = (64, 512, 4096) if quick else (64, 256, 1024, 4096, 8192, 16384, LONG - ROOM)
    batches = (1, 8, 64) if quick else (1, 2, 4, 8, 16, 32, 64, 128, 256)
    sizes = ("40M", BASE) if quick else tuple(SIZES)
    found = [Setting("context", BASE, kv, 1, context) for kv in KV_BYTES for context in contexts]
    found += [Setting("batch", BASE, "bfloat16", batch, SHORT_CONTEXT) for batch in batches]
    found += [Setting("size", size, "bfloat16", 1, SHORT_CONTEXT) for size in sizes]
    return sorted(found, key=lambda setting: (setting.size, setting.kv))


def roofline(ceilings: Ceilings, shape: Shape, setting: Setting, weight_bytes: int) -> float:
    """The least seconds that one step can take."""
    cached = setting.batch * setting.context
    read = weight_bytes + cached * shape.kv_token_values * KV_BYTES[setting.kv]
    head = 2 * setting.batch * shape.vocab * shape.hidden
    attention = 4 * cached * shape.layers * shape.heads * shape.head_dim
    # Codes are multiplied as integers.
    products = ceilings.bfloat16_ops if KV_BYTES[setting.kv] == 2 else ceilings.int8_ops
    layers = 2 * setting.batch * shape.num_linear
    work = layers / ceilings.int4_ops + head / ceilings.bfloat16_ops + attention / products
    return max(read / ceilings.bytes_per_s, work)


def measure(
    found: list[Setting], threads: int, workdir: Path, ceilings_of: Callable[[int], Ceilings]
) -> Iterator[dict[str, Any]]:
    """A row for each setting. A model is loaded for the first of its settings. `ceilings_of` measures the ceilings by
    reading a number of bytes."""
    loaded: tuple[str, str, int] | None = None
    engine: LmkitEngine | None = None
    for setting in found:
        batch = max(s.batch for s in found if (s.size, s.kv) == (setting.size, setting.kv))
        if (wanted := (setting.size, setting.kv, batch)) != loaded:
            engine = None  # free its memory before the next engine is loaded
            engine, loaded = _load(setting, batch, found, threads, workdir), wanted
        assert engine is not None
        shape = SIZES[setting.size]
        engine.prefill(prompts(setting.batch, setting.context, shape.vocab))
        answer, others = undisturbed(partial(decode, engine, STEPS, SECONDS))
        seconds = answer["seconds"] / (answer["tokens"] / setting.batch)
        ceilings = ceilings_of(engine.facts.weight_bytes)
        best = roofline(ceilings, shape, setting, engine.facts.weight_bytes)
        yield asdict(setting) | {
            "parameters": shape.num_parameters,
            "x": setting.x,
            "ms_per_step": 1000 * seconds,
            "ms_per_token": 1000 * seconds / setting.batch,
            "roofline_ms_per_step": 1000 * best,
            "of_roofline": share(best, seconds, f"{setting}"),
            "ceilings": asdict(ceilings),
            "others": others,
        }


def _load(setting: Setting, batch: int, found: list[Setting], threads: int, workdir: Path) -> LmkitEngine:
    dense, quantized = workdir / setting.size / "checkpoint", workdir / setting.size / "lmkit-awq"
    shape = SIZES[setting.size]
    if not dense.exists():
        dense.parent.mkdir(parents=True, exist_ok=True)
        make_checkpoint(dense, shape)
    if not quantized.exists():
        make_awq(dense, quantized)
    longest = max(s.context for s in found if s.size == setting.size)
    tokens = max(s.batch * (s.context + 2 * ROOM) for s in found if s.size == setting.size)
    options = Options(quantized, threads, batch, min(longest + ROOM, shape.max_position), shape.vocab)
    kv_memory = int(1.2 * tokens * shape.kv_token_values * KV_BYTES[setting.kv]) + (64 << 20)
    return LmkitEngine(options, kv_dtype=setting.kv, kv_memory=kv_memory)


def table(rows: list[dict[str, Any]], threads: int) -> Table:
    ceilings = Ceilings(**rows[-1]["ceilings"])
    out = Table(title=f"decode, {threads} threads; {ceilings.describe()}")
    for column in ("sweep", "model", "KV", "batch", "context", "ms/step", "ms/token", "roofline ms", "of roofline"):
        out.add_column(column, justify="left" if column in ("sweep", "model", "KV") else "right")
    for row in sorted(rows, key=lambda row: (row["sweep"], row["kv"], row["x"])):
        out.add_row(
            row["sweep"],
            row["size"],
            row["kv"],
            *(str(row[name]) for name in ("batch", "context")),
            *(f"{row[name]:.2f}" for name in ("ms_per_step", "ms_per_token", "roofline_ms_per_step")),
            f"{row['of_roofline']:.0%}",
        )
    return out


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """A panel for each sweep: measured steps as points, their roofline as a dashed line of the same colour."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    labels = {
        "context": f"context, tokens ({BASE}, batch 1)",
        "batch": f"batch ({BASE}, context {SHORT_CONTEXT})",
        "size": f"parameters (batch 1, context {SHORT_CONTEXT})",
    }
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (sweep, label) in zip(figure.subplots(1, len(labels)), labels.items(), strict=True):
        kinds = sorted({row["kv"] for row in rows if row["sweep"] == sweep})
        for number, kv in enumerate(kinds):
            line = sorted((r for r in rows if (r["sweep"], r["kv"]) == (sweep, kv)), key=lambda r: float(r["x"]))
            xs = [row["x"] for row in line]
            name = f"{kv} KV" if len(kinds) > 1 else "measured"
            axes.plot(xs, [row["ms_per_step"] for row in line], "o-", color=f"C{number}", label=name)
            best = [row["roofline_ms_per_step"] for row in line]
            axes.plot(xs, best, "--", color=f"C{number}", label="roofline")
        axes.set(xscale="log", yscale="log", xlabel=label, ylabel="ms per step (log scale)")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), fontsize=8, ncols=2, frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="nine measurements on the smaller models")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--plot", type=Path, help="also draw them into this PNG file")
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--workdir", type=Path, default=Path("build/scaling"), help="for the models: 4 GB")
    arguments = parser.parse_args()
    try:
        kernel_threads.configure(arguments.threads)
        found = settings(quick=arguments.quick)
        rows = list(measure(found, arguments.threads, arguments.workdir, partial(measure_ceilings, 0.5)))
    except LMKitError as error:
        sys.exit(f"error: {error}")
    console.print(table(rows, arguments.threads))
    if arguments.json:
        save(arguments.json, "scaling", rows, threads=arguments.threads)
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
