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
    "rtn_nvfp4": "rtn_nvfp4_w4a16",
    "nvfp4": "nvfp4_w4a16",
    "rtn_mxfp4": "rtn_mxfp4_w4a16",
    "mxfp4": "mxfp4_w4a16",
}


def quantize(job: Job) -> tuple[str, str]:
    threads.configure(job.threads)
    rows = job.load_rows()
    calibration = {"dataset": job.dataset, "num_samples": len(rows), "seq_len": len(rows[0]), "seed": 0}
    scheme = {} if job.recipe.endswith("fp4") else {"group_size": job.group_size}
    quantizer = prepare(job.model, load_recipe(RECIPES[job.recipe], {"calibration": calibration, "scheme": scheme}))
    assert quantizer.data.rows.tolist() == rows, "not the rows that the other tools were given"
    quantizer.run(job.checkpoint)
    return lmkit.__version__, ", ".join(str(step) for step in quantizer.recipe.steps)


if __name__ == "__main__":
    run(quantize)
