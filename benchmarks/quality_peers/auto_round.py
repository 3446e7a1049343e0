"""AutoRound: SignRound, its preset `light`, and SignRound after AWQ, in the AWQ format; NVFP4 and MXFP4 weights in
that of compressed-tensors."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import torch
import transformers
from auto_round import AutoRound

from benchmarks.quality_peers.dense import load_float32
from benchmarks.quality_peers.protocol import Job, run

# name -> (algorithms, iterations, learning rate or None for its own choice). "light" is its preset for a quarter of
# the time.
RECIPES: dict[str, tuple[str, int, float | None]] = {
    "light": ("signround", 50, 5e-3),
    "signround": ("signround", 200, None),
    "awq+signround": ("awq,signround", 200, None),
}
FLOAT4 = {"nvfp4": "NVFP4", "mxfp4": "MXFP4"}  # its schemes, which would round inputs, too
BATCH = 8


def quantize(job: Job) -> tuple[str, str]:
    torch.set_num_threads(job.threads)
    recipe, _, float4 = job.recipe.partition("_")
    algorithms, iterations, rate = RECIPES[recipe]
    integers = {"scheme": "W4A16", "sym": False, "group_size": job.group_size}
    scheme = {"scheme": FLOAT4[float4], "act_bits": 16} if float4 else integers
    form = "llm_compressor" if float4 else "auto_awq"
    rows = torch.tensor(job.load_rows())
    rounder = AutoRound(
        load_float32(Path(job.model)),
        tokenizer=transformers.AutoTokenizer.from_pretrained(job.model),
        **scheme,
        alg_configs=algorithms,
        dataset=[{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in rows.split(BATCH)],
        nsamples=len(rows),
        seqlen=rows.shape[1],
        batch_size=BATCH,
        iters=iterations,
        lr=rate,
        amp=False,  # float32, the better for its quality
        device_map="cpu",
    )
    rounder.quantize_and_save(str(job.checkpoint), format=form)
    saved = next(job.checkpoint.rglob("config.json")).parent  # newer versions save into a subfolder
    if saved != job.checkpoint:
        for file in saved.iterdir():
            file.rename(job.checkpoint / file.name)
        saved.rmdir()
    what = f"{FLOAT4[float4]}A16" if float4 else f"W4 asymmetric g{job.group_size}"
    return metadata.version("auto-round"), f"{what}, {iterations} iterations, batches of {BATCH}, {form}"


if __name__ == "__main__":
    run(quantize)
