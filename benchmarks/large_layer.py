"""The quantization of a checkpoint that is larger than the machine: DeepSeek-V3's shapes, of which a part is measured.

    python -m benchmarks.large_layer FOLDER [--dense 0] [--experts 8] [--rows 16] [--recipe gptq_w4a16_g128]

Writes a checkpoint with random weights in float8 blocks: dense layers, if any are asked for, and a sparse one, in their
full shapes but for the number of experts. As many tokens come to each expert as to one of 256 with 64 rows of 512
tokens. `lmkit quantize` then runs on it. Prints the memory over time beside the command's own estimate, and what the 58
sparse layers of 256 experts would take. Random weights have the time and the memory of trained ones, and nothing can be
said about their quality.
"""

from __future__ import annotations

import argparse
import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lmkit.environment import default_num_threads
from lmkit.formats.base import get_format
from lmkit.formats.checkpoint import CheckpointWriter
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.kernels.cpu import threads
from lmkit.models import load_spec, roles
from lmkit.models.spec import ModelSpec
from lmkit.qtensor import QTensor, float8_scheme
from lmkit.quant import split
from lmkit.quant.recipe import load_recipe
from lmkit.quant.run import Quantizer, prepare

console = Console()
EXPERTS, PER_TOKEN, SPARSE = 256, 8, 58  # of DeepSeek-V3
ROWS, SEQ_LEN = 64, 512
BLOCK = 128
SCALE = 0.02
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
Sample = tuple[float, str, int, int]  # (seconds, phase, resident bytes, of which no file's)


def config(num_experts: int, per_token: int, hidden: int, dense: int) -> dict[str, Any]:
    """config.json of DeepSeek-V3 with `dense` dense layers and a sparse one. `hidden` scales all widths."""
    part = hidden / 7168
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
        "hidden_size": hidden, "intermediate_size": int(18432 * part), "moe_intermediate_size": int(2048 * part),
        "num_hidden_layers": dense + 1, "first_k_dense_replace": dense, "num_attention_heads": int(128 * part),
        "num_key_value_heads": int(128 * part), "q_lora_rank": int(1536 * part), "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": num_experts,
        "num_experts_per_tok": per_token, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rms_norm_eps": 1e-6,
        "vocab_size": int(129280 * part), "max_position_embeddings": 4096, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "attention_bias": False,
    }  # fmt: skip


def write(folder: Path, settings: dict[str, Any]) -> ModelSpec:
    """A checkpoint of these settings with random weights, its linears in float8."""
    folder.mkdir(parents=True)
    spec, float8 = load_spec(settings), get_format("fp8")
    scheme, generator = float8_scheme(BLOCK, BLOCK), torch.Generator().manual_seed(0)
    writer, linears = CheckpointWriter(folder, 4 << 30), {}

    def dense(shape: tuple[int, ...], scale: float = SCALE) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(torch.bfloat16)

    for name in (roles.EMBED, roles.LM_HEAD):
        writer.add(f"{name}.weight", dense((spec.vocab_size, spec.hidden_size), 1.0 if name == roles.EMBED else SCALE))
    writer.add(f"{roles.FINAL_NORM}.weight", torch.ones(spec.hidden_size, dtype=torch.bfloat16))
    for index, layer in enumerate(spec.layers):
        for role, size in layer.vectors.items():
            bias = role == "mlp.score_bias"
            value = torch.zeros(size) if bias else torch.ones(size, dtype=torch.bfloat16)
            writer.add(spec.tensor_name(index, role), value)
        for role, shape in (layer.routers | layer.matrices).items():
            writer.add(f"{spec.module_name(index, role)}.weight", dense(shape))
        for role, (out, width) in layer.linears.items():
            module = spec.module_name(index, role)
            linears[module] = scheme
            codes = torch.randn((out, width), generator=generator).to(torch.float8_e4m3fn)
            scales = torch.full((-(-out // BLOCK), -(-width // BLOCK)), SCALE)
            no_zeros = torch.zeros(0, dtype=torch.uint8)
            float8.write_linear(writer, module, QTensor(codes, scales, no_zeros, scheme))
    for file in TOKENIZER:
        shutil.copyfile(DEMO_FOLDER / file, folder / file)
    writer.finish(settings | {"quantization_config": float8.config_entry(linears)}, DEMO_FOLDER)
    return spec


class Watch:
    """Samples the memory of this process twice a second. `phase` is set by the run's progress."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.stages: list[tuple[float, str]] = []  # (processor seconds, phase) where each stage begins
        self.phase, self._start, self._ended = "begin", time.perf_counter(), threading.Event()

    def progress(self, what: str, done: int, total: int) -> None:
        self.phase = what
        self.stages.append((time.process_time(), what))

    @contextmanager
    def sampling(self) -> Iterator[None]:
        thread = threading.Thread(target=self._sample)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(0.5):
            fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            resident, own = (int(fields[name].split()[0]) << 10 for name in ("VmRSS", "RssAnon"))
            self.samples.append((time.perf_counter() - self._start, self.phase, resident, own))


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def show(quantizer: Quantizer, watch: Watch, num_experts: int) -> dict[str, Any]:
    """Print memory by phase, the estimate, and what the whole model would take. Returns what was printed."""
    estimate = quantizer.budget.memory_bytes
    table = Table(title="memory", title_justify="left")
    for column in ("phase", "until", "peak", "peak without files"):
        table.add_column(column, justify="right")
    for phase in dict.fromkeys(sample[1] for sample in watch.samples):
        of_phase = [sample for sample in watch.samples if sample[1] == phase]
        table.add_row(
            phase, f"{of_phase[-1][0]:.0f} s", gib(max(s[2] for s in of_phase)), gib(max(s[3] for s in of_phase))
        )
    console.print(table)
    peak, own = max(sample[2] for sample in watch.samples), max(sample[3] for sample in watch.samples)
    begins = [at for at, what in watch.stages if what == "layers"]
    experts = begins[-(num_experts + 2) :]  # each expert, the shared one, and what follows
    stages = len(quantizer.recipe.layer_steps) + 1  # of a layer, before its experts
    attention, expert = experts[0] - begins[-(num_experts + 2) - stages], experts[-2] - experts[0]
    expert, shared = expert / num_experts, experts[-1] - experts[-2]
    whole = SPARSE * (attention + EXPERTS * expert + shared)
    found = {
        "estimated_bytes": estimate, "peak_bytes": peak, "peak_without_files": own,
        "estimated_seconds": quantizer.plan.seconds, "attention_seconds": attention, "expert_seconds": expert,
        "shared_seconds": shared, "whole_hours": whole / 3600, "samples": watch.samples,
    }  # fmt: skip
    console.print(f"estimate {gib(estimate)}; peak {gib(peak)}, {gib(own)} of it no file's pages")
    console.print(f"layers: estimated {quantizer.plan.seconds['layers']:.0f} s, {experts[-1] - begins[0]:.0f} s")
    console.print(f"processor seconds: attention {attention:.0f}, an expert {expert:.1f}, the shared one {shared:.1f}")
    console.print(f"{SPARSE} layers of {EXPERTS} experts: {whole / 3600:.1f} hours by these")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the checkpoint and the result, which are removed first")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--dense", type=int, default=0)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--recipe", default="gptq_w4a16_g128")
    parser.add_argument("--hidden", type=int, default=7168, help="a multiple of 896; all widths follow")
    parser.add_argument("--json", type=Path, help="a file for all that was measured")
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    threads.configure(default_num_threads())
    per_token = max(1, args.experts * PER_TOKEN * ROWS // (EXPERTS * args.rows))
    write(args.folder / "model", config(args.experts, per_token, args.hidden, args.dense))
    recipe = load_recipe(args.recipe, {"calibration": {"dataset": "demo", "num_samples": args.rows}})
    split.WHOLE_BYTES = 0  # as of a layer with all experts
    watch = Watch()
    with watch.sampling():
        quantizer = prepare(args.folder / "model", recipe)
        quantizer.run(args.folder / "out", progress=watch.progress)
    found = show(quantizer, watch, args.experts)
    if args.json is not None:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
