"""Captured steps: the same bits as steps run op by op, and nothing but kernels in them."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.random_llama import Shape, make_awq, make_checkpoint
from lmkit.config import EngineConfig
from lmkit.formats.kv_config import KVConfig, KVLayerConfig, save_kv_config
from lmkit.kernels.cpu.workspace import Workspace
from lmkit.models.source import ModelSource
from lmkit.qtensor import int_scheme
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.plan import Chunk, NewSequence
from lmkit.turbo.request import Request, SamplingParams
from lmkit.turbo.runners.cpu import CpuRunner
from lmkit.turbo.runners.cpu_captured import CapturedSteps, NotCapturableError, _OnlyKernels
from tests.models.test_formats import every, rewritten
from tests.quant.helpers import tiny_checkpoint

ORDERED = int_scheme(4, 64, act_order=True)
PROMPTS = [[5, 6, 7], list(range(40, 75)), [9] * 11]


def generate(engine: Engine) -> dict[str, list[Any]]:
    """Tokens and log-probabilities of prompts of different lengths, which end at different steps."""
    found: dict[str, list[Any]] = {}
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=10 + 7 * i, ignore_eos=True, logprobs=2)
        engine.add(Request(request_id=str(i), prompt_ids=prompt, params=params))
    while engine.has_work():
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(zip(output.token_ids, output.logprobs or [], strict=True))
    return found


def with_key_means(demo_model: Path, folder: Path) -> Path:
    """The demo model with a kv_config.json that has all there is: what is left out of its keys need not be theirs."""
    folder.mkdir()
    for file in demo_model.iterdir():
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    spec = ModelSource(demo_model).spec
    mean = tuple(((3, 5.0, -2.0), (30, 1.0, 40.0))[: 1 + head] for head in range(spec.layers[0].num_kv_heads))
    layers = [
        KVLayerConfig(k=kind, v="int4", key_mean=mean if i % 2 else (), hadamard=i % 3 == 0)
        for i, kind in enumerate(itertools.islice(itertools.cycle(("int4", "fp8", "int8")), spec.num_layers))
    ]
    sizes = {"num_kv_heads": spec.layers[0].num_kv_heads, "head_dim": spec.layers[0].head_dim}
    save_kv_config(KVConfig(**sizes, layers=tuple(layers)), folder)
    return folder


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "auto"])
def test_captured_steps_give_the_bits_of_steps_run_op_by_op(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: Any
) -> None:
    if kv_dtype == "auto":
        demo_model = with_key_means(demo_model, tmp_path / "model")
    config = EngineConfig(block_size=8, max_batch_size=4, max_step_tokens=64, max_model_len=128, kv_dtype=kv_dtype)
    launched: list[int] = []
    replay = CapturedSteps.__call__

    def counted(self: CapturedSteps, inputs: Any) -> Tensor | None:
        logits = replay(self, inputs)
        if logits is not None:
            launched.append(len(logits))
        return logits

    monkeypatch.setattr(CapturedSteps, "__call__", counted)
    captured = generate(Engine(str(demo_model), config))
    assert set(launched) == {1, 2, 3}
    monkeypatch.setattr(CapturedSteps, "__call__", lambda self, inputs: None)
    assert generate(Engine(str(demo_model), config)) == captured


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int4"])
def test_scores_of_captured_steps_have_the_bits_of_scores_from_hidden_states(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: Any
) -> None:
    """The choices of a prompt, which score, beside sequences that only sample: in one step, and cut into several."""
    launched: list[int] = []
    replay = CapturedSteps.__call__

    def counted(self: CapturedSteps, inputs: Any) -> Tensor | None:
        logits = replay(self, inputs)
        if logits is not None and len(inputs.token_ids) > len(logits) > len(inputs.logit_start) - 1:
            launched.append(len(logits))
        return logits

    monkeypatch.setattr(CapturedSteps, "__call__", counted)
    found = []
    for most, step in ((1000, 128), (0, 128), (1000, 24)):
        sizes = {"block_size": 8, "max_batch_size": 4, "max_model_len": 128, "max_step_tokens": step}
        engine = Engine(str(demo_model), EngineConfig(**sizes, kv_dtype=kv_dtype, prefix_cache=False))
        runner = engine.runner
        assert isinstance(runner, CpuRunner)
        runner.batch.max_scored_rows = most
        outputs: list[Any] = []
        for turn in range(3):
            for i, prompt in enumerate(PROMPTS):
                start = len(prompt) - 2 if turn else 0
                scored = {"prompt_logprobs": i != 1, "logprobs_start": start if i != 1 else 0}
                params = SamplingParams(max_tokens=2 * i, prompt_top=2, logprobs=1, logprob_token_ids=(3,) * (i == 2))
                engine.add(Request(request_id=f"{turn} {i}", prompt_ids=prompt, params=params, **scored))
            while engine.has_work():
                outputs += [(o.request_id, o.prompt_logprobs, o.token_ids, o.logprobs) for o in engine.step()]
        found.append(sorted(outputs, key=lambda output: output[0]))
    assert launched
    assert found[0] == found[1] == found[2]
    assert sum(len(scores) for _, scores, *_ in found[0]) == 12 + 2 * 2


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x.add_(1),
        lambda x: x.half(),
        lambda x: x[:, 1:].contiguous(),
        lambda x: x[[1, 0]],
        lambda x: x.copy_(x.clone()),
        lambda x: x.__setitem__(0, 1),
        lambda x: bool((x > 0).any()),
        lambda x: x.tolist(),
        lambda x: torch.cat([x, x]),
        lambda x: torch.zeros(3),
    ],
)
def test_what_torch_would_compute_is_refused(compute: Callable[[Tensor], Any]) -> None:
    x = torch.ones(4, 6)
    with pytest.raises(NotCapturableError), _OnlyKernels():
        compute(x)
    assert torch.equal(x, torch.ones(4, 6))


def test_views_facts_and_new_memory_are_allowed() -> None:
    x = torch.ones(4, 6)
    with _OnlyKernels():
        first, second = x.split((2, 4), dim=-1)
        assert second.view(4, -1, 2).shape == (4, 2, 2)
        assert first.stride(0) == 6
        assert x.float().data_ptr() == x.contiguous().data_ptr() == x[:3].data_ptr()
        assert torch.empty(2, dtype=torch.int8).numel() == 2


LENGTH = 600  # tokens of each sequence: three of attention's partitions
SHAPES = [(7, 1, 0), (7, 2, 1), (12, 3, 3), (20, 4, 0), (41, 2, 2), (64, 3, 1)]  # tokens, sequences, sampling ones


def runner_of(model: Path, **config: Any) -> CpuRunner:
    """A runner whose four slots have sequences of LENGTH computed tokens."""
    sizes: dict[str, Any] = {"block_size": 8, "max_batch_size": 4, "max_step_tokens": 64, "max_model_len": 640}
    sizes |= {"kv_memory": 2 << 20, "num_threads": 3}  # blocks for all, with a window too
    runner = Engine(str(model), EngineConfig(**sizes, **config)).runner
    assert isinstance(runner, CpuRunner)
    rng = random.Random(0)
    for slot in range(4):
        tokens, table = [rng.randrange(2, 150) for _ in range(LENGTH)], list(range(75 * slot, 75 * slot + 75))
        runner.batch.enter(NewSequence(slot, tokens, LENGTH, SamplingParams(), (), False, [table]))
        for start in range(0, LENGTH, 60):
            runner.decoder(runner.batch.inputs([Chunk(slot, start, 60, [], 0)])[0], runner.kv)
    return runner


def chunks_of(rng: random.Random, num_tokens: int, num_seqs: int, num_samples: int) -> list[Chunk]:
    """A random step of this shape: which sequences, where they stand, and which brings how much."""
    cuts = [0, *sorted(rng.sample(range(1, num_tokens), num_seqs - 1)), num_tokens]
    slots, samples = rng.sample(range(4), num_seqs), set(rng.sample(range(num_seqs), num_samples))
    return [
        Chunk(slot, rng.randrange(LENGTH - count), count, [], int(i in samples))
        for i, (slot, count) in enumerate(zip(slots, (b - a for a, b in itertools.pairwise(cuts)), strict=True))
    ]


def stored(runner: CpuRunner) -> list[Tensor]:
    blocks = [part for layer in runner.kv for tensor in (layer.k, layer.v) for part in (tensor.data, tensor.params)]
    return blocks + [part for layer in runner.kv if layer.states for part in (layer.states.conv, layer.states.matrix)]


@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [
        ("llama", "int8"),
        ("qwen3", "bfloat16"),
        ("mistral-window", "bfloat16"),
        ("awq", "int4"),
        ("act-order", "int8"),
        ("olmo2", "int8"),
        ("gemma3", "bfloat16"),
        ("granite", "bfloat16"),
        ("opt", "int8"),
        ("qwen3-next", "int8"),
    ],
)
def test_a_captured_step_serves_every_spread_of_its_tokens(tmp_path: Path, family: str, kv_dtype: Any) -> None:
    if family in ("awq", "act-order"):
        make_checkpoint(tmp_path / "dense", Shape(128, 256, 2, 6, 2, 32, 200, 1024))
        if family == "awq":
            make_awq(tmp_path / "dense", tmp_path / family)
        else:
            made, _ = rewritten(tmp_path / "dense", tmp_path / "made", "gptq_v2", every(ORDERED))
            made.rename(tmp_path / family)
    else:
        tiny_checkpoint(tmp_path / family, family, max_position_embeddings=1024)
    runner = runner_of(tmp_path / family, kv_dtype=kv_dtype)
    graphs, rng = CapturedSteps(runner.decoder, runner.kv, Workspace(32 << 20)), random.Random(1)
    for shape in SHAPES:
        for times in range(6):
            inputs, rows = runner.batch.inputs(chunks_of(rng, *shape))
            assert rows is not None
            before = [part.clone() for part in stored(runner)]
            expected = runner.decoder(inputs, runner.kv).clone()
            written = [part.clone() for part in stored(runner)]
            for part, old in zip(stored(runner), before, strict=True):
                part.copy_(old)
            logits = graphs(inputs)
            if times == 0:  # a shape that comes once is not captured
                assert logits is None
                continue
            assert logits is not None
            assert torch.equal(logits, expected)
            assert all(torch.equal(now, then) for now, then in zip(stored(runner), written, strict=True))


def test_of_steps_with_prompt_tokens_those_used_last_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint(tmp_path / "llama", "llama", max_position_embeddings=1024)
    runner = runner_of(tmp_path / "llama", kv_dtype="bfloat16")
    graphs = CapturedSteps(runner.decoder, runner.kv, Workspace(32 << 20))
    monkeypatch.setattr("lmkit.turbo.runners.cpu_captured.MAX_PROMPT_SHAPES", 2)

    def is_captured(count: int) -> bool:
        return graphs(runner.batch.inputs([Chunk(0, 0, count, [], 0)])[0]) is not None

    decode, _ = runner.batch.inputs([Chunk(0, 5, 1, [], 1)])
    assert graphs(decode) is not None  # at once, and whatever else comes
    assert [is_captured(n) for n in (9, 9, 12, 12, 9, 15, 12, 12)] == [
        False,
        True,
        False,
        True,
        True,
        False,
        False,
        True,
    ]
    assert graphs(decode) is not None
    assert len(graphs._captured) == 2


def test_a_step_that_does_not_fit_the_workspace_is_not_captured(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "llama", "llama", max_position_embeddings=1024)
    runner = runner_of(tmp_path / "llama", kv_dtype="bfloat16")
    inputs, _ = runner.batch.inputs([Chunk(0, 0, 60, [], 1)])
    for num_bytes, fits in ((16 << 10, False), (32 << 20, True)):
        graphs = CapturedSteps(runner.decoder, runner.kv, Workspace(num_bytes))
        assert graphs(inputs) is None
        assert (graphs(inputs) is not None) == fits


def test_a_prompt_that_comes_again_is_answered_from_captured_steps(demo_model: Path) -> None:
    config = EngineConfig(block_size=8, max_step_tokens=16, max_model_len=128, prefix_cache=False)
    engine = Engine(str(demo_model), config)
    answers = []
    for i in range(3):
        params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=2)
        engine.add(Request(request_id=str(i), prompt_ids=PROMPTS[1], params=params))
        outputs = [output for _ in iter(engine.has_work, False) for output in engine.step()]
        answers.append([(output.token_ids, output.logprobs) for output in outputs])
    assert answers[0] == answers[1] == answers[2]
    captured = {shape[:3] for shape, step in engine.runner._captured._captured.items() if step is not None}
    assert {(16, 1, 0), (3, 1, 1)} <= captured
