"""AutoRound: SignRound, its preset `light`, and SignRound after AWQ; exported in the AWQ format."""

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
BATCH = 8


def quantize(job: Job) -> tuple[str, str]:
    torch.set_num_threads(job.threads)
    algorithms, iterations, rate = RECIPES[job.recipe]
    rows = torch.tensor(job.load_rows())
    rounder = AutoRound(
        load_float32(Path(job.model)),
        tokenizer=transformers.AutoTokenizer.from_pretrained(job.model),
        scheme="W4A16",
        sym=False,
        group_size=job.group_size,
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
    rounder.quantize_and_save(str(job.checkpoint), format="auto_awq")
    saved = next(job.checkpoint.rglob("config.json")).parent  # newer versions save into a subfolder
    if saved != job.checkpoint:
        for file in saved.iterdir():
            file.rename(job.checkpoint / file.name)
        saved.rmdir()
    what = f"W4 asymmetric g{job.group_size}, {iterations} iterations, batches of {BATCH}, auto_awq"
    return metadata.version("auto-round"), what


if __name__ == "__main__":
    run(quantize)
