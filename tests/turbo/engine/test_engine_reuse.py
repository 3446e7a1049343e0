"""With a prefix cache, a small pool and overlap, a real model gives bit for bit what it gives without them.

On the CPU kernels, which compute a token alike in every batch and chunk.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmkit.config import EngineConfig
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams, StepOutput
from tests.models.tiny import make

VOCAB, LENGTH = 199, 256
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "block_size": 8, "max_batch_size": 4, "max_model_len": LENGTH, "decode_slowdown": 100.0,
    "packed_cache": False, "num_threads": 1,
}  # fmt: skip
WINDOW = {"sliding_window": 20, "max_position_embeddings": LENGTH}
DYNAMIC = {
    "max_position_embeddings": LENGTH,
    "rope_parameters": {
        "rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0, "original_max_position_embeddings": 48,
    },
}  # fmt: skip

Results = dict[str, list[StepOutput]]


def prompts(rng: random.Random) -> list[list[int]]:
    """Of one, of some that go on with it, and of strangers; several times the same one."""

    def text(count: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(count)]

    base = text(60)
    forks = [base[:cut] + text(length) for cut, length in ((60, 40), (60, 90), (37, 5), (24, 30), (60, 0), (8, 100))]
    return [base, *forks, *[text(33)] * 3, text(150), text(3)]


def requests(rng: random.Random) -> list[Request]:
    """One is greedy, the next one draws, and so on."""
    params = SamplingParams(top_p=0.95, ignore_eos=True, logprobs=3)
    return [
        Request(
            request_id=f"r{i}",
            prompt_ids=ids,
            params=msgspec.structs.replace(params, seed=i, temperature=i % 2, max_tokens=rng.choice([3, 12, 25])),
            session_id=rng.choice([None, "s"]),
            priority=rng.choice([0, 0, -1, 1]),
        )
        for i, ids in enumerate(prompts(rng))
    ]


def run(engine: Engine, waves: list[list[Request]], aborts: dict[int, str] | None = None) -> Results:
    """One wave after the other, of which one arrives every other step. `aborts`: step -> request that ends there."""
    results: Results = {}
    step = 0
    for wave in waves:
        arriving = wave[::-1]
        while arriving or engine.has_work():
            if arriving and step % 2 == 0:
                engine.add(arriving[-1])
                results[arriving.pop().request_id] = []
            if aborts and step in aborts:
                engine.abort(aborts[step])
            for output in engine.step():
                assert output.error is None
                results[output.request_id].append(output)
            step += 1
    engine.check_integrity()
    return results


def answer(outputs: list[StepOutput]) -> tuple[list[int], list[Any]]:
    return [t for o in outputs for t in o.token_ids], [x for o in outputs for x in o.logprobs]


def goes_on(wave: list[Request], results: Results) -> list[Request]:
    """The next turn of each conversation that has room for one."""
    turns = []
    for request in wave:
        ids = request.prompt_ids + answer(results[request.request_id])[0] + [7, 8, 9]
        if len(ids) < LENGTH - 30:
            turns.append(msgspec.structs.replace(request, request_id=request.request_id + "+", prompt_ids=ids))
    return turns


CASES = {
    "float32": ("llama", {"max_position_embeddings": LENGTH}, {}),
    "bfloat16": ("llama", {"max_position_embeddings": LENGTH}, {"kv_dtype": "bfloat16"}),
    "int8": ("llama", {"max_position_embeddings": LENGTH}, {"kv_dtype": "int8"}),
    "int4": ("llama", {"max_position_embeddings": LENGTH}, {"kv_dtype": "int4"}),
    "window": ("mistral-window", WINDOW, {}),
    "window-sinks": ("mistral-window", WINDOW, {"attention_sinks": 5}),
    "window-sinks-int8": ("mistral-window", WINDOW, {"attention_sinks": 9, "kv_dtype": "int8"}),
    "latent": ("deepseek-v2-lite", {"max_position_embeddings": LENGTH}, {}),
    "latent-bfloat16": ("deepseek-v3", {"max_position_embeddings": LENGTH}, {"kv_dtype": "bfloat16"}),
    "indexed-int8": ("glm-5", {"max_position_embeddings": LENGTH}, {"kv_dtype": "int8"}),
    "dynamic-rope": ("llama-dynamic", DYNAMIC, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_found_gives_what_is_computed(case: str, demo_model: Path, tmp_path: Path) -> None:
    family, overrides, options = CASES[case]
    make(tmp_path, family, **overrides)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model / name, tmp_path)
    options = OPTIONS | options
    plain = Engine(str(tmp_path), EngineConfig(**options, prefix_cache=False, overlap=False))
    block_bytes = plain.info.memory["kv"] // plain.info.num_blocks
    first = requests(random.Random(3))
    wanted = run(plain, [first])
    waves = [first, goes_on(first, wanted)]
    wanted |= run(plain, waves[1:])
    plain.close()
    for chunk, num_blocks in ((64, 34), (11, 45)):
        engine = Engine(
            str(tmp_path), EngineConfig(**options, max_step_tokens=chunk, kv_memory=num_blocks * block_bytes)
        )
        got = run(engine, waves, {9: "r2", 14: "r10", 30: "r4+"})
        stats = engine.stats()
        assert stats.prefix_hits > 300
        assert stats.evicted_blocks > 0
        assert stats.preemptions > 0
        for name, outputs in got.items():
            (tokens, logprobs), (want, want_logprobs) = answer(outputs), answer(wanted[name])
            if outputs[-1].finish_reason == "abort":
                want, want_logprobs = want[: len(tokens)], want_logprobs[: len(tokens)]
            assert tokens == want, (name, chunk)
            assert logprobs == want_logprobs, (name, chunk)
        engine.close()
