"""GPTQModel: GPTQ (activation-aware order within groups, its default) and AWQ, asymmetric in groups."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

os.cpu_count = lambda: 4  # it does not start with fewer than three

from gptqmodel import BACKEND, GPTQModel  # noqa: E402
from gptqmodel.quantization.config import FORMAT, AWQConfig, GPTQConfig  # noqa: E402

from benchmarks.quality_peers.dense import load_float32, save_dense  # noqa: E402
from benchmarks.quality_peers.protocol import Job, run  # noqa: E402

GRID: dict[str, Any] = {
    "bits": 4,
    "sym": False,
    "device": "cpu",
    "offload_to_disk": False,
    "pack_impl": "original",
}
RECIPES = {
    "gptq": lambda size: GPTQConfig(format=FORMAT.GPTQ_V2, group_size=size, **GRID),
    "awq": lambda size: AWQConfig(format=FORMAT.GEMM, group_size=size, **GRID),
}


def quantize(job: Job) -> tuple[str, str]:
    torch.set_num_threads(job.threads)
    model = GPTQModel.load(job.model, RECIPES[job.recipe](job.group_size), dtype=torch.float32, backend=BACKEND.TORCH)
    rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in job.load_rows()]
    model.quantize(rows, batch_size=4)
    model.save(str(job.checkpoint))
    return metadata.version("gptqmodel"), f"{job.recipe}, asymmetric g{job.group_size}"


def decode(job: Job) -> None:
    """Write the dense weights. The tool's own linears give back their weights; everything else is as in the file."""
    packed = GPTQModel.load(str(job.checkpoint), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16).model
    dense = load_float32(Path(job.model))
    weights = dict(dense.named_parameters())
    with torch.no_grad():
        for name, parameter in packed.named_parameters():
            if name in weights:
                weights[name].copy_(parameter)
        for name, module in packed.named_modules():
            if hasattr(module, "dequantize_weight"):
                weights[name + ".weight"].copy_(module.dequantize_weight().T)
    save_dense(dense, Path(job.model), job.dense)


if __name__ == "__main__":
    run(quantize, decode)
