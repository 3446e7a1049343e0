"""AutoAWQ, archived: AWQ with clipping, asymmetric in groups."""

from __future__ import annotations

import torch
import transformers
from awq import AutoAWQForCausalLM, __version__

from benchmarks.quality_peers.protocol import Job, run


def quantize(job: Job) -> tuple[str, str]:
    torch.set_num_threads(job.threads)
    rows = job.load_rows()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{job.model}/tokenizer.json")
    model = AutoAWQForCausalLM.from_pretrained(job.model, device_map="cpu", torch_dtype=torch.float32, safetensors=True)
    model.quantize(
        tokenizer,
        quant_config={"zero_point": True, "q_group_size": job.group_size, "w_bit": 4, "version": "GEMM"},
        calib_data=rows,
        max_calib_samples=len(rows),
        max_calib_seq_len=len(rows[0]),
    )
    model.save_quantized(str(job.checkpoint))
    return __version__, f"w_bit 4, zero_point, q_group_size {job.group_size}, clipping"


if __name__ == "__main__":
    run(quantize)
