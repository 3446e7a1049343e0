"""Tokens per second of the flexible engine beside the fast one and transformers' generate, in turns.

    python -m benchmarks.flexible [MODEL] [--layers N] [--batch B] [--prompt-len P] [--tokens N] [--quantize int4]
        [--dtype float32] [--seconds S]

MODEL is a checkpoint folder or a GGUF file of a family that lmkit has, so that all three run it; a GGUF file is written
as a dense checkpoint first. Without one it is the 1.1B Llama of benchmarks.random_llama with its first `--layers`
layers. All answers are greedy and of the same length. transformers' generate gets all prompts in one batch. `--dtype`
is that of all three (a processor without instructions for bfloat16 takes minutes for transformers' answer in it), and
`--quantize` rounds the weights of lmkit's. Times are medians over turns, in which a busy machine slows all alike;
`cpu` are seconds of the process on a processor, which others do not take part in.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.random_llama import LLAMA_1B, make_checkpoint
from lmkit.config import EngineConfig
from lmkit.formats.gguf_model import is_gguf
from lmkit.kernels.cpu.isa import host
from lmkit.models.gguf_convert import convert_gguf
from lmkit.models.loader import load_model
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams

IMPLEMENTATIONS = ("fast", "flexible")


def answer(engine: Engine, prompts: list[list[int]], num_tokens: int) -> None:
    """Generate from all prompts together."""
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        engine.add(Request(request_id=str(number), prompt_ids=prompt, params=params))
    while engine.has_work():
        if any(output.error for output in engine.step()):
            raise RuntimeError("a step failed")


def theirs(model: Any, prompts: list[list[int]], num_tokens: int) -> None:
    """The same with transformers' generate."""
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), min_new_tokens=num_tokens, max_new_tokens=num_tokens,
                       do_sample=False, pad_token_id=0)  # fmt: skip


def counted(function: Callable[[], None], seconds: list[float]) -> Callable[[], None]:
    """The function, which notes its seconds on a processor."""

    def call() -> None:
        start = time.process_time()
        function()
        seconds.append(time.process_time() - start)

    return call


def measure(
    folder: Path, batch: int, prompt_len: int, num_tokens: int, seconds: float, threads: int | None, quantize: str,
    dtype: str = "auto",
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each way: seconds, generated tokens per second, and how many times the other ways that is."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 2000, (batch, prompt_len), generator=generator).tolist()
    config = EngineConfig(
        num_threads=threads, max_batch_size=batch, max_model_len=prompt_len + num_tokens, prefix_cache=False
    )
    if threads is not None:
        torch.set_num_threads(threads)
    engines = {
        impl: Engine.of(load_model(folder, model_impl=impl, quantize=quantize, dtype=dtype), config)
        for impl in IMPLEMENTATIONS
    }
    ways: dict[str, Any] = {name: lambda e=engine: answer(e, prompts, num_tokens) for name, engine in engines.items()}
    ways["transformers"] = lambda: theirs(model, prompts, num_tokens)
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    ways = {name: counted(way, cpu[name]) for name, way in ways.items()}
    try:
        times = report.interleaved(ways, seconds=seconds)
    finally:
        for engine in engines.values():
            engine.close()
    weights = {**dict.fromkeys(IMPLEMENTATIONS, quantize), "transformers": "none"}
    stored = str(model.dtype).removeprefix("torch.")
    return [
        {
            "engine": name,
            "isa": host().name,
            "weights": stored if weights[name] == "none" else weights[name],
            "batch": batch,
            "seconds": taken,
            "cpu": statistics.median(cpu[name][1:]),
            "tokens_per_second": batch * num_tokens / taken,
            "times_transformers": times["transformers"] / taken,
            "times_fast": times["fast"] / taken,
        }
        for name, taken in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--layers", type=int, default=LLAMA_1B.layers)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as texts:
        folder = args.model or Path(texts) / "model"
        if args.model is None:
            make_checkpoint(folder, replace(LLAMA_1B, layers=args.layers))
        elif is_gguf(args.model):
            folder = Path(texts) / "model"
            convert_gguf(args.model, folder, "dense")
        rows = measure(
            folder, args.batch, args.prompt_len, args.tokens, args.seconds, args.threads, args.quantize, args.dtype
        )
    report.show(rows)
    if args.json:
        report.save(args.json, "flexible", rows)


if __name__ == "__main__":
    main()
