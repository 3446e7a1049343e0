"""Section "transformers": greedy decoding of a random bfloat16 Llama with its static cache, 64 sequences at once."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.gpu import models
from benchmarks.gpu.context import Context
from benchmarks.gpu.timing import synchronize

STEPS = 24


@torch.inference_mode()
def run(context: Context) -> None:
    import transformers

    name, batch, length = ("tiny Llama", 2, 4) if context.rehearsal else ("Llama-3-8B", 64, 1024)
    with context.attempt(f"{name} decode b{batch}"):
        config = transformers.LlamaConfig(**_fields(name))
        config._attn_implementation = "sdpa"
        with torch.device(context.device):
            torch.set_default_dtype(torch.bfloat16)
            model: Any = transformers.LlamaForCausalLM(config).eval()
            torch.set_default_dtype(torch.float32)
        cache = transformers.StaticCache(config=config, max_cache_len=length + STEPS + 1)
        ids = torch.randint(0, config.vocab_size, (batch, length), device=context.device)
        token = _forward(model, cache, ids, 0)
        token = _forward(model, cache, token, length)  # warms up
        synchronize(context.device)
        start = time.perf_counter()
        for step in range(1, STEPS):
            token = _forward(model, cache, token, length + step)
        synchronize(context.device)
        seconds = (time.perf_counter() - start) / (STEPS - 1)
        context.row(
            f"{name} decode b{batch}", library=f"transformers {transformers.__version__}", batch=batch, context=length,
            tokens_per_s=batch / seconds, step_seconds=seconds,
        )  # fmt: skip


def _forward(model: Any, cache: Any, ids: torch.Tensor, position: int) -> torch.Tensor:
    """The next tokens [B, 1]."""
    positions = torch.arange(position, position + ids.shape[1], device=ids.device)
    logits = model(
        ids, past_key_values=cache, position_ids=positions[None].expand(len(ids), -1), use_cache=True, logits_to_keep=1
    ).logits
    return torch.as_tensor(logits[:, -1:].argmax(-1))


def _fields(name: str) -> dict[str, Any]:
    fields = models.config(name)
    return {key: value for key, value in fields.items() if key not in ("architectures", "torch_dtype", "rope_theta")}
