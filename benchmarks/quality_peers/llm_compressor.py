"""llm-compressor: AWQ and GPTQ, W4A16 asymmetric in groups, and NVFP4 and MXFP4, with its defaults otherwise."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache

from benchmarks.quality_peers.dense import load_float32, save_dense
from benchmarks.quality_peers.protocol import Job, run

FLOAT4 = {"nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16"}
RECIPES = {
    "awq": lambda scheme: [AWQModifier(duo_scaling="both"), QuantizationModifier(**scheme)],
    "gptq": lambda scheme: [GPTQModifier(**scheme)],
    "rtn": lambda scheme: [QuantizationModifier(**scheme)],
}
SETTINGS = {"awq": "duo_scaling both, n_grid 20", "gptq": "actorder static, dampening 0.01", "rtn": "nearest"}


def _scheme(job: Job) -> tuple[str, dict[str, Any]]:
    """(in words, what its modifiers take)"""
    others = {"targets": ["Linear"], "ignore": ["lm_head"]}
    if named := FLOAT4.get(job.recipe.partition("_")[2]):
        return named, others | {"scheme": named}
    weights = QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=job.group_size)
    group = QuantizationScheme(targets=["Linear"], weights=weights)
    return f"W4A16_ASYM g{job.group_size}", {"config_groups": {"group_0": group}, "ignore": others["ignore"]}


def quantize(job: Job) -> tuple[str, str]:
    torch.set_num_threads(job.threads)
    IntermediatesCache.pin_memory = _leave_in_place
    model = load_float32(Path(job.model))
    rows, (words, scheme) = job.load_rows(), _scheme(job)
    data = datasets.Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    oneshot(
        model=model,
        tokenizer=transformers.AutoTokenizer.from_pretrained(job.model),
        dataset=data,
        recipe=RECIPES[job.recipe.partition("_")[0]](scheme),
        max_seq_length=len(rows[0]),
        num_calibration_samples=len(rows),
        shuffle_calibration_samples=False,
        batch_size=4,
    )
    model.save_pretrained(job.checkpoint, save_compressed=True)
    return metadata.version("llmcompressor"), f"{words}, {SETTINGS[job.recipe.partition('_')[0]]}"


def _leave_in_place(self: Any, *arguments: Any, **options: Any) -> None:
    """Replaces pinning in AWQ. AWQ pins memory for copies to a GPU, and this fails without a GPU. Pinning has no effect
    on the result."""


def decode(job: Job) -> None:
    if job.recipe.partition("_")[2] or "num_experts" in json.loads((Path(job.model) / "config.json").read_text()):
        return  # lmkit reads it; transformers makes float4 bfloat16, and refuses asymmetric experts (it finds no zeros)
    config = transformers.CompressedTensorsConfig(run_compressed=False)
    save_dense(load_float32(job.checkpoint, quantization_config=config), Path(job.model), job.dense)


if __name__ == "__main__":
    run(quantize, decode)
