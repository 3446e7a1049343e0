"""Section "smoke": whether the engine works at all. It comes first, and nothing else runs if it fails.

The bundled model with 4-bit weights: greedy tokens of steps that are captured, and of steps that are not, beside those
of the CPU; with every switch as it is by default, and with each turned off.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from benchmarks.gpu.context import Context
from benchmarks.gpu.engine import device_of
from benchmarks.gpu.switched import TURNED, UNCAPTURED, switched
from benchmarks.random_llama import make_awq
from lmkit.config import EngineConfig
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams

PROMPTS = [[5, 6, 7, 8], list(range(40, 90)), [100, 3]]
TOKENS, REHEARSED = 20, 6


def run(context: Context) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "w4"
        make_awq(DEMO_FOLDER, path)
        count = REHEARSED if context.rehearsal else TOKENS
        with context.attempt("self-test"):
            _self_test(context, path)
        expected, total = _tokens(Engine(str(path), _config("cpu")), count), count * len(PROMPTS)
        for text in ("", *TURNED):
            what = text or "as by default"
            if context.is_over:
                context.row(what, skipped="no time left")  # no failure: other sections may run
                continue
            with context.attempt(what), switched(text, context):
                start = time.perf_counter()
                engine = Engine(str(path), _config("cuda"), device=device_of(context))
                found = _tokens(engine, count)
                same = sum(a == b for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True))
                row = {"same_tokens": same, "of": total, "captured": engine.info.captured}
                context.row(what, **row, seconds=time.perf_counter() - start)
                if same < total:
                    raise AssertionError(f"{same} of {total} greedy tokens are the CPU's")
                if text not in UNCAPTURED and any(x.startswith("no ") for x in engine.info.captured.split("; ")):
                    raise AssertionError(engine.info.captured)


def _self_test(context: Context, path: Path) -> None:
    """Test the kernels as a server does at its first start."""
    engine = Engine(str(path), msgspec.structs.replace(_config("cuda"), selftest="auto"), device=device_of(context))
    if (found := engine.info.selftest) is not None:
        context.row("self-test", **msgspec.structs.asdict(found))
    engine.close()
    if found is not None and (found.off or found.problem):
        raise AssertionError(found.text)


def _config(device: str) -> EngineConfig:
    return EngineConfig(
        device="cuda" if device == "cuda" else "cpu", max_batch_size=4, max_step_tokens=64, max_model_len=128,
        packed_cache=False, activations="exact", selftest="off",
    )  # fmt: skip


def _tokens(engine: Engine, count: int) -> list[list[int]]:
    """The first `count` greedy tokens of every prompt."""
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(PROMPTS))}
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        engine.add(Request(request_id=str(i), prompt_ids=prompt, params=params))
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] += output.token_ids
    engine.close()
    return list(tokens.values())
