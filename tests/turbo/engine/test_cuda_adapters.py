"""Adapters on device "cuda", emulated: the tokens are a CPU's, in captured steps too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from lmkit.kernels import low_rank_ops
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import StepOutput
from lmkit.turbo.runners.cuda import CudaRunner
from lmkit.turbo.runners.cuda_device import CudaDevice
from tests.models import peft_folder, tiny
from tests.turbo.engine.test_adapters import FUSED, set_adapter
from tests.turbo.engine.test_cuda_engine import (  # noqa: F401  (fixtures)
    SIZES,
    assert_alike,
    checkpoint,
    device,
    emulated,
    on_cpu,
    on_gpu,
    quantized,
    requests,
    tokens,
)
from tests.turbo.engine.test_cuda_families import LENGTH, assert_right, saved
from tests.turbo.engine.test_engine import run

pytestmark = pytest.mark.slow
ADAPTERS = ("half", "wide", "")  # one for each of the first requests, and none


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One adapter of all linears in float16, and one of two linears in bfloat16."""
    root = tmp_path_factory.mktemp("adapters")
    shapes = peft_folder.linears(tiny.make(root / "base", "llama", **SIZES))
    peft_folder.write(root / "half", shapes, 1, rank=5, size=0.5, dtype=torch.float16)
    some = {name: shape for name, shape in shapes.items() if name.endswith(("up_proj", "o_proj"))}
    peft_folder.write(root / "wide", some, 2, rank=16, size=0.5, dtype=torch.bfloat16)
    return root


def answers(engine: Engine, **params: Any) -> dict[str, list[StepOutput]]:
    named = zip(requests(**params), [*ADAPTERS, "half"], strict=True)
    return run(engine, [msgspec.structs.replace(request, adapter=name) for request, name in named])


@emulated
@pytest.mark.parametrize("model", [pytest.param("checkpoint", marks=pytest.mark.exhaustive), "quantized"])
def test_adapters_of_one_batch_give_the_tokens_of_a_cpu(
    model: str,
    folders: Path,
    device: CudaDevice,  # noqa: F811
    request: pytest.FixtureRequest,
) -> None:
    path, loaded = request.getfixturevalue(model), tuple(f"{name}={folders / name}" for name in ADAPTERS if name)
    want = answers(on_cpu(path, adapters=loaded))
    before = low_rank_ops.add_low_rank.fallbacks.total()
    engine = on_gpu(path, device, adapters=loaded)
    assert assert_alike(answers(engine), want, 0.1) > 0.5
    assert low_rank_ops.add_low_rank.fallbacks.total() == before
    plain = run(engine, requests())
    assert tokens(plain) == tokens(run(on_gpu(path, device), requests()))
    assert all(tokens(plain)[name] != tokens(want)[name] for name in ("0", "1", "3"))


@pytest.mark.exhaustive
@emulated
def test_steps_with_adapters_are_captured(quantized: Path, folders: Path, device: CudaDevice) -> None:  # noqa: F811
    engine = on_gpu(quantized, device, adapter_root=str(folders), kv_dtype="int8", activations="exact")
    for name in ("half", "wide"):
        set_adapter(engine, name, name)
    runner, replayed = engine.runner, []
    assert isinstance(runner, CudaRunner)
    assert "decode steps" in engine.info.captured
    replay = runner.captured.replay

    def counted(size: Any) -> Any:
        replayed.append(size)
        return replay(size)

    runner.captured.replay = counted  # type: ignore[method-assign]
    got = answers(engine)
    assert {size.adapted for size in replayed} == {True}
    assert {size.is_decode for size in replayed} == {True, False}
    replayed.clear()
    set_adapter(engine, "half", None)
    run(engine, requests())
    assert {size.adapted for size in replayed} == {False}
    set_adapter(engine, "half", "half")  # in the same place
    assert tokens(answers(engine)) == tokens(got)


@pytest.mark.exhaustive
@emulated
@pytest.mark.parametrize(
    ("family", "dtype", "most"),
    [
        ("qwen3.5", "auto", 0.1),  # of float16; without the adapter a logit differs by 17
        ("qwen3-next-dense", "float32", 1e-4),
    ],
)
def test_adapters_of_linear_attention(
    tmp_path: Path,
    device: CudaDevice,  # noqa: F811
    family: str,
    dtype: Any,
    most: float,
) -> None:
    """Of all linears, some in one tensor of the checkpoint. In 16 bits steps are captured."""
    model = saved(tmp_path / "base", family, half=dtype == "auto", num_hidden_layers=3)
    shapes = peft_folder.linears(model, (*peft_folder.MODULES, *FUSED))
    for name, delta in peft_folder.write(tmp_path / "a", shapes, 1, size=0.3, dtype=torch.float16).items():
        model.get_submodule(name).weight.data += delta
    wanted = [msgspec.structs.replace(one, adapter="a") for one in requests(max_tokens=8)[1:3]]
    engine = on_gpu(tmp_path / "base", device, dtype=dtype, max_model_len=LENGTH, adapters=(f"a={tmp_path / 'a'}",))
    assert ("decode steps" in engine.info.captured) == (dtype == "auto")
    assert_right(model, {one.request_id: one.prompt_ids for one in wanted}, run(engine, wanted), most)
