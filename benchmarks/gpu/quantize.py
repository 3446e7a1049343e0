"""Section "quantize": the bundled model quantized by the default recipe on the GPU and on the CPU. The KL divergences
from the original should differ by 2 % at most."""

from __future__ import annotations

import time

from benchmarks.gpu.context import Context
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.quant.device import resolve_device
from lmkit.quant.recipe import DEFAULT_RECIPE, load_recipe
from lmkit.quant.report.evaluate import encode_text
from lmkit.quant.run import prepare


def run(context: Context) -> None:
    small = {"calibration": {"num_samples": 4, "seq_len": 64}} if context.rehearsal else {}
    ids = encode_text(DEMO_FOLDER)[: 256 if context.rehearsal else None]
    for device in ("torch:cpu" if context.rehearsal else resolve_device("cuda"), "cpu"):
        with context.attempt("demo", device=device):
            start = time.perf_counter()
            quantizer = prepare(DEMO_FOLDER, load_recipe(DEFAULT_RECIPE, small), device=device)
            report = quantizer.run(context.out / f"demo-{device.replace(':', '-')}", eval_ids=ids)
            assert report.evaluation is not None
            assert report.evaluation.divergence is not None
            found = report.evaluation.divergence
            seconds = time.perf_counter() - start
            context.row("demo", device=device, seconds=seconds, kl=found.kl_mean, kl_stderr=found.kl_stderr)
