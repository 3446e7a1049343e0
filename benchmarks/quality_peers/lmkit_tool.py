"""lmkit itself, under the same protocol as the others."""

from __future__ import annotations

import lmkit
from benchmarks.quality_peers.protocol import Job, run
from lmkit.kernels.cpu import threads
from lmkit.quant.recipe import DEFAULT_RECIPE, load_recipe
from lmkit.quant.run import prepare

RECIPES = {
    "rtn": "rtn_w4a16_g128",
    "awq": "awq_rtn_w4a16_g128",
    "gptq": "gptq_w4a16_g128",
    "awq_gptq": "awq_w4a16_g128",
    "default": DEFAULT_RECIPE,
    "refined": "refined_w4a16_g128",
    "mixed_3.0": "mixed_3.0",
    "mixed_2.5": "mixed_2.5",
}


def quantize(job: Job) -> tuple[str, str]:
    threads.configure(job.threads)
    rows = job.load_rows()
    calibration = {"dataset": "demo", "num_samples": len(rows), "seq_len": len(rows[0]), "seed": 0}
    quantizer = prepare(job.model, load_recipe(RECIPES[job.recipe], {"calibration": calibration}))
    assert quantizer.data.rows.tolist() == rows, "not the rows that the other tools were given"
    quantizer.run(job.checkpoint)
    return lmkit.__version__, ", ".join(str(step) for step in quantizer.recipe.steps)


if __name__ == "__main__":
    run(quantize)
