"""lmkit itself, under the same protocol as the others."""

from __future__ import annotations

import hashlib

import torch

import lmkit
from benchmarks.quality_peers.protocol import Job, run
from lmkit.kernels.cpu import threads
from lmkit.quant.calib import CalibrationData
from lmkit.quant.recipe import DEFAULT_RECIPE, Recipe, load_recipe, parse_recipe
from lmkit.quant.run import Quantizer, prepare

STEPS: dict[str, list[dict[str, str]]] = {
    "rtn": [{"step": "rtn"}],
    "awq": [{"step": "awq_scale"}, {"step": "awq_clip"}, {"step": "rtn"}],
    "gptq": [{"step": "gptq"}],
}


def recipe(name: str) -> Recipe:
    """One of STEPS, or `default`, what `lmkit quantize` does unless told otherwise."""
    if name == "default":
        return load_recipe(DEFAULT_RECIPE)
    return parse_recipe({"steps": STEPS[name]}, f"recipe {name}")


def quantize(job: Job) -> tuple[str, str]:
    threads.configure(job.threads)
    chosen = recipe(job.recipe)
    rows = torch.tensor(job.load_rows())
    prepared = prepare(job.model, chosen)
    data = CalibrationData(rows, ("given rows",), hashlib.sha256(rows.numpy().tobytes()).hexdigest())
    Quantizer(prepared.source, chosen, prepared.tokenizer, data, prepared.plan).run(job.checkpoint)
    return lmkit.__version__, ", ".join(str(step) for step in chosen.steps)


if __name__ == "__main__":
    run(quantize)
