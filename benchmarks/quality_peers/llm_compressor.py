"""llm-compressor: AWQ and GPTQ, W4A16 asymmetric in groups of 128, with its defaults otherwise."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache

from benchmarks.quality_peers.dense import load_float32, save_dense
from benchmarks.quality_peers.protocol import Job, run

SCHEME: dict[str, Any] = {"scheme": "W4A16_ASYM", "targets": ["Linear"], "ignore": ["lm_head"]}
RECIPES = {
    "awq": lambda: [AWQModifier(duo_scaling="both"), QuantizationModifier(**SCHEME)],
    "gptq": lambda: [GPTQModifier(**SCHEME)],
}
SETTINGS = {"awq": "W4A16_ASYM, duo_scaling both, n_grid 20", "gptq": "W4A16_ASYM, actorder static, dampening 0.01"}


def quantize(job: Job) -> tuple[str, str]:
    torch.set_num_threads(job.threads)
    IntermediatesCache.pin_memory = _leave_in_place
    model = load_float32(Path(job.model))
    rows = job.load_rows()
    data = datasets.Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    oneshot(
        model=model,
        tokenizer=transformers.AutoTokenizer.from_pretrained(job.model),
        dataset=data,
        recipe=RECIPES[job.recipe](),
        max_seq_length=len(rows[0]),
        num_calibration_samples=len(rows),
        shuffle_calibration_samples=False,
        batch_size=4,
    )
    model.save_pretrained(job.checkpoint, save_compressed=True)
    return metadata.version("llmcompressor"), SETTINGS[job.recipe]


def _leave_in_place(self: Any, *arguments: Any, **options: Any) -> None:
    """Replaces pinning in AWQ. AWQ pins memory for copies to a GPU, and this fails without a GPU. Pinning has no effect
    on the result."""


def decode(job: Job) -> None:
    if "num_experts" in json.loads((Path(job.model) / "config.json").read_text()):
        return  # transformers refuses asymmetric experts (it finds no zeros), and lmkit reads them
    config = transformers.CompressedTensorsConfig(run_compressed=False)
    save_dense(load_float32(job.checkpoint, quantization_config=config), Path(job.model), job.dense)


if __name__ == "__main__":
    run(quantize, decode)
