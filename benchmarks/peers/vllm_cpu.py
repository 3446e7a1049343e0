"""vLLM's CPU backend, in this process: bfloat16 if the processor multiplies it, else float32. AWQ checkpoints run in 4
bits, with an fp8 KV cache where the processor has AVX512."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import KV_GIB, Facts, Options, main, multiplies_bfloat16

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # its steps can be counted, and it can be stopped
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(KV_GIB))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch
import vllm


class Vllm:
    def __init__(self, options: Options) -> None:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, range(options.threads))))
        dtype = "bfloat16" if multiplies_bfloat16() else "float32"
        quantized = "quantization_config" in json.loads((options.model / "config.json").read_text())
        small_kv = quantized and dtype == "bfloat16" and torch.cpu._is_avx512_supported()
        llm = vllm.LLM(
            model=str(options.model),
            dtype=dtype,
            skip_tokenizer_init=True,
            max_model_len=options.max_context,
            max_num_seqs=options.max_batch,
            max_num_batched_tokens=options.max_context,
            enforce_eager=True,
            enable_prefix_caching=False,
            kv_cache_dtype="fp8" if small_kv else "auto",
            speculative_config=_lookup(options.drafts),
        )
        self.engine: Any = llm.llm_engine
        self.params = vllm.SamplingParams(
            temperature=0.0, max_tokens=options.max_context, ignore_eos=True, detokenize=False
        )
        self.running: list[str] = []
        self.names = itertools.count()
        times = 1 if quantized or dtype == "bfloat16" else 2
        size, head = (times * _read_bytes(options.model, part) for part in ("", "lm_head"))
        kv = "fp8" if small_kv else dtype
        note = f"{_awq_kernel() if quantized else dtype}, {kv} KV, no prefix cache"
        self.facts = Facts(vllm.__version__, note, size, {"fp8": 1.0, "bfloat16": 2.0, "float32": 4.0}[kv], head)

    def prefill(self, prompts: list[list[int]]) -> None:
        self.engine.abort_request(self.running)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.running = [str(next(self.names)) for _ in prompts]
        for name, ids in zip(self.running, prompts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": ids}, self.params)
        started: set[str] = set()
        while len(started) < len(prompts):
            started |= {output.request_id for output in self.engine.step() if output.outputs[0].token_ids}

    def step(self) -> int:
        return len(self.engine.step())

    def answer(self, prompt: list[int], count: int) -> Iterator[list[int]]:
        kind = vllm.sampling_params.RequestOutputKind.DELTA
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, output_kind=kind
        )
        self.engine.add_request(str(next(self.names)), {"prompt_token_ids": prompt}, params)
        while self.engine.has_unfinished_requests():
            yield from (list(output.outputs[0].token_ids) for output in self.engine.step())


def _lookup(drafts: int) -> dict[str, Any] | None:
    """Prompt lookup by the n-grams that lmkit looks up."""
    sizes = {"prompt_lookup_min": 3, "prompt_lookup_max": 8}
    return {"method": "ngram", "num_speculative_tokens": drafts, **sizes} if drafts else None


def _awq_kernel() -> str:
    """What vLLM's CPUWNA16LinearKernel does with AWQ weights. It asks torch in the same way."""
    amx = torch.cpu._is_amx_tile_supported()
    return "AWQ g128, " + ("W4A8 on AMX" if amx else "W4A16, as its W4A8 needs AMX")


def _read_bytes(model: Path, part: str) -> int:
    from safetensors import safe_open

    total = 0
    for path in model.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if part in name and "embed_tokens" not in name]  # noqa: SIM118
            total += sum(file.get_tensor(name).nbytes for name in names)
    return total


def prepare(source: Path, out: Path) -> None:
    raise NotImplementedError("vLLM reads the checkpoint as it is")


if __name__ == "__main__":
    main(Vllm, prepare)
