"""Decoding with LoRA adapters beside decoding without.

    python -m benchmarks.lora [MODEL] [--batches 1,32] [--adapters 32] [--rank 16] [--rounds N] [--load] [--json FILE]

Adapters of random weights in bfloat16, on all linears of attention and MLP, or on q and v alone. `plain`: the model as
it is. `unused`: the adapters are loaded. `all`: each sequence has another adapter. `half`: every second one has none.
They take turns.

`--load`: how long steps take while an adapter of `--rank` on all linears is loaded, and how long that takes alone.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from lmkit.config import EngineConfig
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.formats.safetensors_file import write_safetensors
from lmkit.jsonfile import read_json
from lmkit.models import load_spec
from lmkit.models.adapters import adaptable
from lmkit.models.spec import ModelSpec
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams

NUM_TOKENS, PROMPT_TOKENS = 24, 32
TARGETS = {"all": None, "qv": ("attn.q", "attn.v")}
ROWS = ("plain", "unused", "all", "half")


def write_adapter(folder: Path, spec: ModelSpec, targets: tuple[str, ...] | None, rank: int, seed: int) -> None:
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for index, layer in enumerate(spec.layers):
        for role, (outputs, inputs) in adaptable(layer).items():
            if targets is None or role in targets:
                name = f"base_model.model.{layer.module_name(index, role)}"
                a, b = (torch.randn(shape, generator=generator) for shape in ((rank, inputs), (outputs, rank)))
                tensors[f"{name}.lora_A.weight"] = (a / math.sqrt(inputs)).bfloat16()
                tensors[f"{name}.lora_B.weight"] = (b * 0.01).bfloat16()
    folder.mkdir()
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def rate(engine: Engine, batch: int, adapters: list[str]) -> float:
    """Tokens a second of decoding. The clock starts when all prompts are computed."""
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=0)
    for i in range(batch):
        prompt = [(7 * i + j) % 997 + 3 for j in range(PROMPT_TOKENS)]
        adapter = adapters[i % len(adapters)] if adapters else ""
        engine.add(Request(request_id=str(i), prompt_ids=prompt, params=params, adapter=adapter))
    begun: set[str] = set()
    start, counted = 0.0, 0
    while engine.has_work():
        for output in engine.step():
            begun.add(output.request_id)
            counted += len(output.token_ids) if start else 0
        if not start and len(begun) == batch:
            start = time.perf_counter()
    return counted / (time.perf_counter() - start)


def measure(model: str, target: str, batches: list[int], count: int, rank: int, rounds: int) -> list[dict[str, Any]]:
    spec = load_spec(read_json(Path(model) / "config.json", 1 << 20))
    with tempfile.TemporaryDirectory() as root:
        names = [f"a{i}" for i in range(count)]
        for i, name in enumerate(names):
            write_adapter(Path(root) / name, spec, TARGETS[target], rank, i)
        options: dict[str, Any] = {"max_batch_size": max(batches), "max_model_len": 128, "prefix_cache": False}
        plain = Engine(model, EngineConfig(**options))
        adapted = Engine(model, EngineConfig(**options, adapters=tuple(f"{name}={root}/{name}" for name in names)))
        use = {ROWS[0]: (plain, []), ROWS[1]: (adapted, []), ROWS[2]: (adapted, names)}
        use[ROWS[3]] = adapted, [name for pair in zip(names, [""] * count, strict=True) for name in pair]
        rows = []
        for batch in batches:
            rates: dict[str, list[float]] = {row: [] for row in ROWS}
            for round_number in range(rounds + 1):  # the first warms up
                for row, (engine, adapters) in use.items():
                    rates[row] += [rate(engine, batch, adapters)] * bool(round_number)
            median = {row: statistics.median(values) for row, values in rates.items()}
            figures = {f"{row}_tok_s": value for row, value in median.items()}
            ratios = {f"x_{row}": median[row] / median[ROWS[0]] for row in ROWS[1:]}
            rows.append({"linears": target, "b": batch} | figures | ratios)
        plain.close()
        adapted.close()
    return rows


def measure_load(model: str, batch: int, rank: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of steps, with and without a load beside them: the median and the longest one of a round."""
    spec = load_spec(read_json(Path(model) / "config.json", 1 << 20))
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as root:
        write_adapter(Path(root) / "a", spec, None, rank, 0)
        size = (Path(root) / "a" / "adapter_model.safetensors").stat().st_size
        engine = Engine(model, EngineConfig(max_batch_size=batch, max_model_len=1024, adapter_root=root))
        params = SamplingParams(max_tokens=900, ignore_eos=True, seed=0)
        for i in range(batch):
            engine.add(Request(request_id=str(i), prompt_ids=[7 * i + 3] * PROMPT_TOKENS, params=params))
        for _ in range(2 * NUM_TOKENS):
            engine.step()
        for _ in range(rounds):
            before = [_seconds(engine.step) for _ in range(2 * NUM_TOKENS)]
            done, during = engine.set_adapter("a", "a"), []
            while not done.done():
                during.append(_seconds(engine.step))
            for name, steps in (("step", before), ("step_loading", during)):
                figures.setdefault(f"{name}_ms", []).append(1e3 * statistics.median(steps))
                figures.setdefault(f"longest_{name}_ms", []).append(1e3 * max(steps))
            figures.setdefault("load_ms", []).append(1e3 * sum(during))
        for i in range(batch):
            engine.abort(str(i))
        while engine.has_work():
            engine.step()
        for _ in range(rounds):
            start, done = time.perf_counter(), engine.set_adapter("a", "a")
            while not done.done():
                engine.step()
            figures.setdefault("load_alone_ms", []).append(1e3 * (time.perf_counter() - start))
        engine.close()
    return {"b": batch, "rank": rank, "mb": size / 1e6} | {name: statistics.median(x) for name, x in figures.items()}


def _seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default=str(DEMO_FOLDER))
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 32])
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", action="store_true", help="measure loading beside steps instead")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    rows = list[dict[str, Any]]()
    if given.load:
        rows = [measure_load(given.model, batch, given.rank, given.rounds) for batch in given.batches]
    for target in () if given.load else TARGETS:
        rows += measure(given.model, target, given.batches, given.adapters, given.rank, given.rounds)
    report.show(rows)
    if given.json:
        report.save(given.json, "lora", rows, model=given.model)


if __name__ == "__main__":
    main()
