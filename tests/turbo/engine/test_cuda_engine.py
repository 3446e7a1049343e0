"""The engine on device "cuda", emulated: the same scheduler and plans, a stream's way of carrying them out, and the
CPU engine's tokens."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from benchmarks.random_llama import make_awq
from lmkit.config import EngineConfig
from lmkit.errors import ConfigError, EngineLostError, UnsupportedError
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.kernels.cuda import gemm, module
from lmkit.kernels.cuda.switches import parse
from lmkit.models.loader import load_model
from lmkit.qtensor import int_scheme
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.plan import StepPlan
from lmkit.turbo.request import Request, SamplingParams, StepOutput
from lmkit.turbo.runners import cuda as cuda_runner
from lmkit.turbo.runners.captured_sizes import Size, decode_sizes, draft_sizes, mixed_sizes
from lmkit.turbo.runners.cuda import CudaRunner
from lmkit.turbo.runners.cuda_captured import chosen
from lmkit.turbo.runners.cuda_device import CudaDevice
from lmkit.turbo.runners.devices import resolve_device
from lmkit.turbo.runners.gpu_sampler import GpuSampler
from lmkit.turbo.runners.staging import StagedInputs
from tests import emulator
from tests.emulator.device import EmulatedDevice
from tests.models import tiny
from tests.models.test_formats import every, rewritten
from tests.turbo.engine.test_engine import propose_drafts, run

pytestmark = pytest.mark.slow
SMALL: dict[str, Any] = {
    "block_size": 16, "max_batch_size": 4, "max_step_tokens": 24, "max_model_len": 128, "selftest": "off",
}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 211, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
PROMPTS = [[5, 6, 7], list(range(40, 75)), [9] * 11, [100, 3]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """float16, which CPU and GPU keep."""
    path = tmp_path_factory.mktemp("models") / "dense"
    model = tiny.make(path, "llama", **SIZES)
    model.half().save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO_FOLDER / file, path / file)
    return path


@pytest.fixture(scope="module")
def quantized(checkpoint: Path) -> Path:
    """W4, groups of 32."""
    out = checkpoint.parent / "w4"
    make_awq(checkpoint, out, group=32)
    return out


@pytest.fixture(params=["emulated", pytest.param("real", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    if request.param == "real":
        yield CudaDevice()
        return
    if shutil.which("g++") is None:
        pytest.skip("kernels are emulated with g++")
    emulator.install(seed=hash(request.node.name) & 0xFFFF)
    yield EmulatedDevice()
    module.BACKENDS.pop("cpu", None)
    module.counters.cache_clear()


# A library's float32 products, and launches that only the emulator counts.
emulated = pytest.mark.parametrize("device", ["emulated"], indirect=True)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model's steps are captured, whichever kernels they run."""
    monkeypatch.setattr(cuda_runner, "obstacle", lambda decoder, kv: None)


def on_gpu(path: Path, device: CudaDevice, **options: Any) -> Engine:
    return Engine(str(path), EngineConfig(**(SMALL | {"packed_cache": False} | options)), device=device)


def on_cpu(path: Path, **options: Any) -> Engine:
    exact: dict[str, Any] = {"device": "cpu", "activations": "exact", "packed_cache": False}
    return Engine(str(path), EngineConfig(**(SMALL | exact | options)))


def request(name: str, prompt: list[int], max_tokens: int, **fields: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=20)
    return Request(request_id=name, prompt_ids=prompt, params=params, **fields)


def requests(**params: Any) -> list[Request]:
    common = {"max_tokens": 14, "ignore_eos": True, "seed": 5, "logprobs": 20} | params
    return [
        Request(request_id=str(i), prompt_ids=prompt, params=SamplingParams(**common))
        for i, prompt in enumerate(PROMPTS)
    ]


def tokens(outputs: dict[str, list[StepOutput]]) -> dict[str, list[int]]:
    return {name: [token for output in parts for token in output.token_ids] for name, parts in outputs.items()}


def assert_alike(got: dict[str, list[StepOutput]], want: dict[str, list[StepOutput]], tolerance: float) -> float:
    """The same tokens with about the same log-probabilities, up to one that the other may as well have chosen: random
    models have ties, and say something else after one. The share of the tokens that were compared."""
    compared = total = 0
    for name, parts in want.items():
        mine, theirs = ([x for output in side for x in output.logprobs] for side in (got[name], parts))
        total += len(theirs)
        assert len(mine) == len(theirs)
        for ours, other in zip(mine, theirs, strict=True):
            assert dict(other.top)[ours.token_id] == pytest.approx(ours.logprob, abs=tolerance), name
            compared += 1
            if ours.token_id != other.token_id:
                assert ours.logprob > other.logprob - tolerance
                break
    return compared / total


@pytest.mark.parametrize(
    ("kv_dtype", "tolerance"),
    [
        ("auto", 0.02),
        pytest.param("bfloat16", 0.1, marks=pytest.mark.exhaustive),
        pytest.param("int8", 0.1, marks=pytest.mark.exhaustive),
        pytest.param("fp8", 0.2, marks=pytest.mark.exhaustive),
        pytest.param("int4", 0.8, marks=pytest.mark.exhaustive),
        pytest.param("int3", 1.5, marks=pytest.mark.exhaustive),
    ],
)
def test_greedy_tokens_are_those_of_the_cpu(
    checkpoint: Path, device: CudaDevice, kv_dtype: Any, tolerance: float
) -> None:
    """Prompts are cut into chunks beside sequences that decode."""
    want = run(on_cpu(checkpoint, kv_dtype="float16" if kv_dtype == "auto" else kv_dtype), requests())
    got = run(on_gpu(checkpoint, device, kv_dtype=kv_dtype), requests())
    assert assert_alike(got, want, tolerance) == 1 or kv_dtype != "auto"


def test_four_bit_weights_give_the_tokens_of_the_cpu(quantized: Path, device: CudaDevice) -> None:
    want, got = run(on_cpu(quantized), requests()), run(on_gpu(quantized, device), requests())
    assert assert_alike(got, want, 0.02) == 1


@pytest.mark.exhaustive
def test_rounded_inputs_give_nearly_the_logits_of_exact_ones(quantized: Path, device: CudaDevice) -> None:
    """No product runs through torch, and rounding costs what it costs on a CPU."""
    exact, rounded = (on_gpu(quantized, device, activations=kind) for kind in ("exact", "int8"))
    assert isinstance(rounded.runner, CudaRunner)
    assert {impl.name for name, impl in chosen(rounded.runner.decoder) if name == "linears"} == {"cuda"}
    assert rounded.info.captured == exact.info.captured
    wanted = request("p", list(range(50)), 8, prompt_logprobs=True)
    engines = exact, rounded, on_cpu(quantized), on_cpu(quantized, activations="int8")
    exact_gpu, rounded_gpu, exact_cpu, rounded_cpu = (
        torch.tensor([x.logprob for x in run(engine, [wanted])["p"][0].prompt_logprobs]) for engine in engines
    )

    def spread(x: torch.Tensor, y: torch.Tensor) -> float:
        return float((x - y).abs().mean())

    assert 0 < spread(exact_gpu, rounded_gpu) < 1.5 * spread(exact_cpu, rounded_cpu)
    assert spread(exact_gpu, exact_cpu) < 0.2 * spread(exact_cpu, rounded_cpu)


@pytest.mark.parametrize(("activations", "tolerance"), [("exact", 0.02), ("int8", 0.1)])
def test_an_int8_head(checkpoint: Path, device: CudaDevice, activations: Any, tolerance: float) -> None:
    """Steps stay captured, and logits are those of a CPU with such a head. Rounded inputs may differ by a code."""
    engine, dense = (on_gpu(checkpoint, device, lm_head=head, activations=activations) for head in ("int8", "auto"))
    assert isinstance(engine.runner, CudaRunner)
    (packed,) = engine.runner.decoder.lm_head.packed or ()
    assert packed.weight.bits == 8
    assert engine.info.captured == dense.info.captured
    wanted = request("p", list(range(40)), 6, prompt_logprobs=True)
    engines = engine, on_cpu(checkpoint, lm_head="int8", activations=activations)
    got, want = (torch.tensor([x.logprob for x in run(each, [wanted])["p"][0].prompt_logprobs]) for each in engines)
    torch.testing.assert_close(got, want, atol=tolerance, rtol=0)


@pytest.mark.exhaustive
def test_inputs_in_activation_order_give_the_tokens_of_the_cpu(
    checkpoint: Path, device: CudaDevice, tmp_path: Path
) -> None:
    model, _ = rewritten(checkpoint, tmp_path, "gptq_v2", every(int_scheme(4, 32, act_order=True)))
    engine = on_gpu(model, device)
    assert isinstance(engine.runner, CudaRunner)
    assert engine.runner.captured.size_for(3) is not None
    assert engine.info.captured == ("decode steps of 3 sizes up to 4 tokens; mixed steps of 1 sizes up to 16 tokens")
    assert assert_alike(run(engine, requests()), run(on_cpu(model), requests()), 0.02) == 1


@emulated
@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize(
    ("temperature", "dtype"), [(0.0, "float16"), pytest.param(1.0, "float32", marks=pytest.mark.exhaustive)]
)
def test_results_do_not_depend_on_batch_chunks_graphs_or_overlap(
    checkpoint: Path, device: CudaDevice, temperature: float, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draw follows the smallest change of a logit, so that what is drawn is compared in float32."""
    wanted = requests(temperature=temperature, top_p=0.95, repetition_penalty=1.1, max_tokens=9)
    alone = on_gpu(checkpoint, device, dtype=dtype)
    want = {name: parts for request in wanted for name, parts in run(alone, [request]).items()}
    engines = {
        "together": on_gpu(checkpoint, device, dtype=dtype),
        "step by step": on_gpu(checkpoint, device, dtype=dtype, overlap=False),
        "in small chunks": on_gpu(checkpoint, device, dtype=dtype, max_step_tokens=5),
    }
    monkeypatch.setattr(cuda_runner, "obstacle", lambda decoder, kv: "not in this test")
    engines["not captured"] = on_gpu(checkpoint, device, dtype=dtype)
    for name, engine in engines.items():
        got = run(engine, wanted)
        if temperature:
            assert tokens(got) == tokens(want), name
        else:
            assert assert_alike(got, want, 0.02) == 1, name


@pytest.mark.exhaustive
def test_a_sequence_that_gave_way_goes_on_where_it_was(checkpoint: Path, device: CudaDevice) -> None:
    """Its token may be on the way to the host when it leaves its slot to another."""
    wanted = requests(max_tokens=26)[1:3]
    want = run(on_gpu(checkpoint, device), wanted)
    engine = on_gpu(checkpoint, device, kv_memory=5 * 16 * 2 * 2 * 2 * 64 * 2, max_model_len=None)
    assert assert_alike(run(engine, wanted), want, 0.02) == 1
    assert engine.stats().preemptions > 0


def test_steps_are_launched_before_the_tokens_they_compute_are_known(
    checkpoint: Path, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = on_gpu(checkpoint, device)
    runner, unknown, under_way = engine.runner, [], []
    assert isinstance(runner, CudaRunner)
    launch, inputs = runner.launch, runner.batch.inputs

    def watched(chunks: Any) -> Any:
        found = inputs(chunks)
        unknown.extend(found[0].token_ids[found[0].token_ids < 0].tolist())
        return found

    def counted(plan: StepPlan) -> Any:
        under_way.append(len(engine._under_way))
        return launch(plan)

    monkeypatch.setattr(runner.batch, "inputs", watched)
    monkeypatch.setattr(runner, "launch", counted)
    run(engine, requests())
    assert max(under_way) == 1, "no step was launched while another was under way"
    assert set(unknown) == {-1, -2, -3, -4}


def test_decode_steps_are_replayed_in_the_next_captured_size(
    checkpoint: Path, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = on_gpu(checkpoint, device, max_batch_size=5)
    assert isinstance(engine.runner, CudaRunner)
    captured, sizes = engine.runner.captured, []
    replay = captured.replay
    monkeypatch.setattr(captured, "replay", lambda size: (sizes.append(size), replay(size))[1])
    more = [*requests(), request("more", [77, 78], 14)]
    late = msgspec.structs.replace(more[0], request_id="late", params=SamplingParams(max_tokens=40))
    run(engine, [*more, late])
    assert {size.seqs for size in sizes if size.tokens == size.seqs} in ({1, 2, 4, 5}, {1, 4, 5})
    assert [size.seqs for size in decode_sizes(64)] == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert decode_sizes(3) == [Size(1, 1), Size(2, 2), Size(3, 3)]


@pytest.mark.exhaustive
def test_steps_with_prompt_tokens_are_replayed_too(
    checkpoint: Path, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens, greedy ones and drawn ones, are those of the same steps without capture."""
    wanted = [*requests(max_tokens=6), *requests(max_tokens=6, temperature=1.0)[1:3]]
    wanted = [msgspec.structs.replace(request, request_id=str(i)) for i, request in enumerate(wanted)]
    results = []
    for names in ("", "mixed=off", "argmax=off"):
        monkeypatch.setattr(cuda_runner, "switches", lambda names=names: parse(names))
        engine = on_gpu(checkpoint, device, max_step_tokens=32)
        assert isinstance(engine.runner, CudaRunner)
        captured, sizes, outside = engine.runner.captured, [], []
        replay, sample = captured.replay, engine.runner._sampler.sample
        monkeypatch.setattr(captured, "replay", lambda size, of=replay, to=sizes: (to.append(size), of(size))[1])
        monkeypatch.setattr(
            engine.runner._sampler, "sample", lambda *x, of=sample, to=outside: (to.append(x[1]), of(*x))[1]
        )
        greedy = [msgspec.structs.replace(x, params=msgspec.structs.replace(x.params, logprobs=None)) for x in wanted]
        results.append(tokens(run(engine, greedy)))
        mixed = [size for size in sizes if size.tokens > size.seqs]
        assert bool(mixed) == (names != "mixed=off")
        assert set(mixed) <= set(mixed_sizes(4, 32)) == {Size(16, 4), Size(32, 4)}
        assert len(outside) < len(sizes) or names == "argmax=off"
        assert names or not outside, "captured steps draw, too"
    assert results[0] == results[1] == results[2]


@emulated
@pytest.mark.parametrize("names", ["", "norm=off"])
def test_a_layer_of_a_decode_step_is_five_launches_or_seven(
    quantized: Path, device: CudaDevice, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them are norms, unless these are inside the products."""
    monkeypatch.setattr(gemm, "switches", lambda: parse(names))
    norms = 2 if names else 0
    engine = on_gpu(quantized, device, overlap=False)
    engine.add(Request(request_id="a", prompt_ids=[5, 6, 7], params=SamplingParams(max_tokens=8, temperature=0)))
    engine.step()
    gpu = emulator.install()
    (output,) = engine.step()
    assert len(output.token_ids) == 1
    layers, launches = SIZES["num_hidden_layers"], Counter(gpu.launches)
    assert launches["gemm"] == 4 * layers
    assert launches["decode_attention"] == layers
    assert launches["norm_rows"] == norms * layers + 1, "and the one before the head"
    assert launches.total() - (5 + norms) * layers <= 6, "tokens, embedding, angles, norm, head, argmax"


@pytest.mark.exhaustive
@emulated
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_kernels_that_overlap_wait_for_each_other(
    quantized: Path, device: CudaDevice, monkeypatch: pytest.MonkeyPatch, kv_dtype: Any
) -> None:
    """Prompts beside tokens, greedy and drawn, and steps of one token each: of all that the host does, only the copy of
    a step's inputs is a barrier."""
    gpu, put = emulator.install(seed=6, overlap=True), StagedInputs.put

    def behind_a_barrier(*args: Any, **options: Any) -> Any:
        gpu.barrier()
        return put(*args, **options)

    monkeypatch.setattr(StagedInputs, "put", behind_a_barrier)
    engine = on_gpu(quantized, device, max_batch_size=3, kv_dtype=kv_dtype)
    first, second, third = (
        msgspec.structs.replace(request, params=SamplingParams(max_tokens=4, ignore_eos=True, **changes))
        for request, changes in zip(
            requests()[:3],
            ({}, {"temperature": 1.0, "seed": 1, "repetition_penalty": 1.3}, {"logprobs": 3}),
            strict=True,
        )
    )
    outputs = run(engine, [first, second, third])
    assert all(sum(len(part.token_ids) for part in parts) == 4 for parts in outputs.values())
    assert engine.stats().failed_steps == 0
    used = {"gemm", "norm_rows", "decode_attention", "prefill_attention", "append", "sample", "argmax", "edit_logits"}
    assert used <= set(gpu.launches)


@emulated
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "repetition_penalty": 1.3}], ids=["greedy", "drawn"])
def test_drafts_change_no_token(
    checkpoint: Path, device: CudaDevice, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = requests(**params)
    want = tokens(run(on_gpu(checkpoint, device, dtype="float32"), wanted))
    engine = on_gpu(checkpoint, device, dtype="float32", overlap=False)
    lengths = propose_drafts(engine, want, monkeypatch)
    assert tokens(run(engine, wanted)) == want
    assert max(lengths) == 4


@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.exhaustive)])
def test_steps_with_drafts_are_replayed_too(
    checkpoint: Path, device: CudaDevice, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens are those of the same steps without capture. If all sequences are greedy, a step waits for the
    device once."""
    several = requests(logprobs=None, temperature=temperature)[:3]
    drafts, results = tokens(run(on_gpu(checkpoint, device), several)), []
    possible = {Size(count, seqs, drafted=True) for seqs in (1, 3) for count in (2, 4, 8, 16) if seqs < count}
    assert set(draft_sizes(3, 24, 16)) == possible
    for names in ("", "drafts=off", "argmax=off"):
        monkeypatch.setattr(cuda_runner, "switches", lambda names=names: parse(names))
        engine = on_gpu(checkpoint, device, overlap=False, speculate="ngram", max_batch_size=3)
        assert isinstance(engine.runner, CudaRunner)
        captured, sizes, fetched = engine.runner.captured, set(), []
        sampler, replay = engine.runner._sampler, captured.replay
        assert isinstance(sampler, GpuSampler)
        fetch = sampler.fetch
        monkeypatch.setattr(captured, "replay", lambda size, of=replay, to=sizes: (to.add(size), of(size))[1])
        monkeypatch.setattr(sampler, "fetch", lambda *x, of=fetch, to=fetched: (to.append(len(x[0])), of(*x))[1])
        lengths = propose_drafts(engine, drafts, monkeypatch)
        results.append(tokens(run(engine, several)))
        assert max(lengths) == 4
        assert engine.stats().accepted_tokens > 8
        drafted = {size for size in sizes if size.drafted}
        assert bool(drafted) == (names != "drafts=off")
        assert drafted <= possible
        assert (max(fetched) > 3) == (temperature == 0), "the tokens of a draft come together"
    assert results[0] == results[1] == results[2]


def test_a_prefix_is_found_again(checkpoint: Path, device: CudaDevice) -> None:
    engine = on_gpu(checkpoint, device)
    first = run(engine, [request("a", list(range(60)), 5)])
    again = run(engine, [request("b", list(range(60)), 5)])
    assert tokens(first)["a"] == tokens(again)["b"]
    assert again["b"][0].cached_tokens >= 48


@pytest.mark.exhaustive
def test_layers_with_and_without_a_window_have_tables_of_their_own(
    tmp_path: Path, device: CudaDevice, captured: None
) -> None:
    """A full layer, and two with a window in another group each."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = SIZES | {"num_hidden_layers": 3, "sliding_window": 20, "layer_types": kinds}
    tiny.make(tmp_path, "qwen2-window", **sizes).half().save_pretrained(tmp_path)
    config = EngineConfig(**(SMALL | {"max_model_len": 112}))
    engine = Engine.of(load_model(tmp_path, device="cuda"), config, device=device)
    reference = load_model(tmp_path, activations="exact")
    want = run(Engine.of(reference, msgspec.structs.replace(config, device="cpu")), requests(max_tokens=6))
    assert engine.scheduler.limits.kv.num_groups == 3
    first, again = run(engine, requests(max_tokens=6)), run(engine, requests(max_tokens=6))
    assert tokens(first) == tokens(again)
    assert again["1"][0].cached_tokens >= 32
    assert_alike(first, want, 0.05)


def test_kv_comes_back_from_host_memory(checkpoint: Path, device: CudaDevice) -> None:
    engine = on_gpu(
        checkpoint, device, kv_memory=8 * 16 * 2 * 2 * 2 * 64 * 2, max_model_len=None, kv_host_memory=1 << 22
    )
    first = run(engine, [request("a", list(range(60)), 5)])
    run(engine, [request("other", list(range(100, 200)), 5)])  # takes every block
    again = run(engine, [request("b", list(range(60)), 5)])
    assert tokens(first)["a"] == tokens(again)["b"]
    assert engine.stats().tier_hits.get("host", 0) >= 16
    engine.close()


@pytest.mark.exhaustive
def test_prompt_logprobs_are_those_of_the_cpu(checkpoint: Path, device: CudaDevice) -> None:
    wanted = request("p", list(range(50)), 2, prompt_logprobs=True)
    got, want = (run(e, [wanted])["p"][0].prompt_logprobs for e in (on_gpu(checkpoint, device), on_cpu(checkpoint)))
    assert [x.token_id for x in got] == list(range(1, 50))
    assert max(abs(a.logprob - b.logprob) for a, b in zip(got, want, strict=True)) < 0.05


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        "llama-tied-bias",
        "llama-dynamic",
        "mistral-window",
        "qwen2-moe",
        "glm4-moe",
        "gemma2",
        "gemma3",
        "olmo2",
        "granite",
        "smollm3",
    ],
)
def test_every_kind_of_model_runs(tmp_path: Path, device: CudaDevice, family: str) -> None:
    """Those that kernels take and those that need torch."""
    tiny.make(tmp_path, family).half().save_pretrained(tmp_path)
    config = EngineConfig(**(SMALL | {"max_model_len": 32}))
    engines = [
        Engine.of(load_model(tmp_path, device="cuda"), config, device=device),
        Engine.of(load_model(tmp_path, activations="exact"), msgspec.structs.replace(config, device="cpu")),
    ]
    wanted = [request("a", [5, 6, 7, 8, 9, 1, 2, 3], 12)]
    got, want = (run(engine, wanted) for engine in engines)
    assert_alike(got, want, 0.05)


@pytest.mark.exhaustive
@emulated
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
def test_dtypes(checkpoint: Path, device: CudaDevice, dtype: Any) -> None:
    engine = on_gpu(checkpoint, device, dtype=dtype)
    wanted = torch.float16 if dtype == "auto" else getattr(torch, dtype)
    assert engine.runner.decoder.dtype == engine.runner.kv[0].k.data.dtype == wanted
    assert isinstance(engine.runner, CudaRunner)
    assert (engine.runner.captured.size_for(3) is None) == (dtype == "float32")
    got = run(engine, requests(max_tokens=4))
    if dtype == "float32":
        assert tokens(got) == tokens(run(on_cpu(checkpoint, dtype="float32"), requests(max_tokens=4)))


@pytest.mark.exhaustive
def test_packed_weights_are_mapped_from_the_file(
    quantized: Path, device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    shutil.copytree(quantized, path)
    want = tokens(run(on_gpu(path, device), requests(max_tokens=6)))
    for _ in range(2):
        assert tokens(run(on_gpu(path, device, packed_cache=True), requests(max_tokens=6))) == want
    assert len(list((path / ".lmkit").glob("packed-*.safetensors"))) == 1


@pytest.mark.exhaustive
def test_a_launch_that_fails_ends_its_own_requests(
    checkpoint: Path, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = on_gpu(checkpoint, device)
    runner = engine.runner
    assert isinstance(runner, CudaRunner)
    good, calls = runner._logits, []

    def fails_once(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return good(*args)

    monkeypatch.setattr(runner, "_logits", fails_once)
    first = run(engine, requests()[:2])
    assert {parts[-1].finish_reason for parts in first.values()} == {"error"}
    assert tokens(run(engine, requests())) == tokens(run(on_gpu(checkpoint, device), requests()))
    assert engine.stats().failed_steps >= 1


class DriverError(RuntimeError):
    """As CuPy raises it."""

    status = 719


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors ...", 700),
        DriverError("CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure: an illegal memory access was encountered"),
    ],
    ids=["torch", "driver"],
)
def test_a_lost_gpu_ends_every_request_and_the_engine(
    checkpoint: Path, device: CudaDevice, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    engine = on_gpu(checkpoint, device)
    runner = engine.runner
    assert isinstance(runner, CudaRunner)

    def lost(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(runner, "_logits", lost)
    for request in requests():
        engine.add(request)
    outputs = engine.step()
    assert outputs
    assert all(output.finish_reason == "error" for output in outputs)
    with pytest.raises(EngineLostError, match="illegal memory access was encountered"):
        engine.step()
    pytest.importorskip("zmq")
    from lmkit.turbo.transport.engine_process import EngineLoop

    loop = EngineLoop(engine, *(SimpleNamespace(watching=nullcontext) for _ in range(3)))  # type: ignore[arg-type]
    with pytest.raises(EngineLostError):  # which ends the worker's process
        loop._step()


@pytest.mark.exhaustive
def test_a_step_that_cannot_be_captured_is_run_as_it_is(
    checkpoint: Path, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(launch: Any) -> Any:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore words")

    want = tokens(run(on_gpu(checkpoint, device), requests(max_tokens=4)))
    monkeypatch.setattr(device, "capture", refuses)
    engine = on_gpu(checkpoint, device)
    assert isinstance(engine.runner, CudaRunner)
    assert engine.runner.captured.size_for(1) is None
    assert engine.info.captured.startswith(
        "no decode steps: CUDA error: operation not permitted when stream is capturing;"
    )
    assert tokens(run(engine, requests(max_tokens=4))) == want


def test_no_room_on_the_gpu_is_one_line(checkpoint: Path, device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")

    monkeypatch.setattr("lmkit.turbo.engine.loading.load_decoder", full)
    with pytest.raises(ConfigError, match=r"^the weights found no room .* CUDA out of memory$"):
        on_gpu(checkpoint, device)
    monkeypatch.setattr(device, "free_memory", lambda: 1 << 20)
    with pytest.raises(ConfigError, match=r"only 1.0 MiB of memory is free"):
        on_gpu(checkpoint, device)


def test_without_cupy_ops_run_through_torch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "missing", lambda: "CuPy is missing: pip install it")
    monkeypatch.setattr("lmkit.turbo.runners.gpu.log", logging.getLogger("device"))
    with caplog.at_level("WARNING"):
        device = resolve_device(EngineConfig(device="cuda"))
    assert device.name == "cuda"
    assert not device.has_kernels
    assert "CuPy is missing: pip install it. Every op runs through torch" in caplog.text
    assert resolve_device(EngineConfig()).name == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="torch finds no NVIDIA GPU; use --device cpu"):
        resolve_device(EngineConfig(device="cuda"))
    assert resolve_device(EngineConfig()).name == "cpu"
