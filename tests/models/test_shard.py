"""Ranks that share a model compute what the whole model computes, but for the order of sums."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmkit.config import EngineConfig
from lmkit.errors import UnsupportedError
from lmkit.formats.base import get_format
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter
from lmkit.formats.kv_config import Numbers
from lmkit.kernels.cpu import collective
from lmkit.kernels.cpu.collective import SharedRanks, shared_bytes
from lmkit.kv_dtype import kv_dtype
from lmkit.layers.batch import allocate_state, whole_batch
from lmkit.models.kv_storage import KVStorage
from lmkit.models.kv_transform import KVTransform
from lmkit.models.loader import load_model
from lmkit.models.resolved import resolved
from lmkit.models.shard import Shard
from lmkit.qtensor import QuantScheme, dequantize, int_scheme, quantize
from lmkit.turbo.engine.describe import describe_model
from tests.formats.linears import rounded
from tests.models import tiny
from tests.models.test_packed_cache import awq

PROMPTS = [[3, 9, 27, 4, 5], [8, 1]]
SLOT = 1 << 10  # bytes: less than a step's rows, so that they go in parts


def logits_of(path: Path, tp: int, ep: int = 1, **options: Any) -> list[torch.Tensor]:
    """The logits on each rank. Ranks are threads here."""
    assert all(task.address for task in collective.TASKS)  # loaded before there are threads
    size = max(tp, ep)
    memory = mmap.mmap(-1, shared_bytes(size, SLOT))
    how = {"activations": "exact", "dtype": "float32"} | options

    def rank(number: int) -> torch.Tensor:
        decoder = load_model(path, shard=Shard(number, tp, ep), **how)
        if size > 1:
            decoder.join(SharedRanks(memory, number, size, SLOT, decoder.spec.vocab_size), split=tp > 1)
        batch, num_blocks = whole_batch(PROMPTS, 8)
        plain = kv_dtype("float32"), kv_dtype("float32")
        kv = [allocate_state(layer.state, num_blocks, 8, plain, len(PROMPTS)) for layer in decoder.spec.layers]
        return decoder(batch, kv).clone()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).max())


@pytest.mark.parametrize(
    "name",
    [
        "llama-tied-bias", "opt", "opt-350m", "gemma2", "gemma4", "qwen3", "gpt-oss", "qwen2-moe", "glm4",
        "deepseek-v2-lite", "deepseek-v3", "glm-5", "cohere2", "llama4", "arcee", "granite-swa",
        "qwen3-next", "nemotron-h", "lfm2", "bailing-hybrid", "zamba2",
    ],
)  # fmt: skip
def test_two_ranks_compute_the_whole_models_logits(tmp_path: Path, name: str) -> None:
    tiny.make(tmp_path, name)
    (whole,), (first, second) = logits_of(tmp_path, 1), logits_of(tmp_path, 2)
    assert first.shape == whole.shape
    assert len(second) == 0
    assert kl(whole, first) < 1e-5
    torch.testing.assert_close(first, whole, rtol=1e-4, atol=1e-4)


def test_ranks_cut_packed_weights_at_groups_and_map_their_own_part(tmp_path: Path) -> None:
    """The second load maps what the first has written, and computes the same bits."""
    awq(tmp_path)
    (whole,), (first, _) = logits_of(tmp_path, 1), logits_of(tmp_path, 2, packed_cache=True)
    assert kl(whole, first) < 1e-5
    assert len(list((tmp_path / ".lmkit").glob("packed-*.safetensors"))) == 2
    assert torch.equal(first, logits_of(tmp_path, 2, packed_cache=True)[0])


def test_ranks_that_outnumber_kv_heads_share_them(tmp_path: Path) -> None:
    tiny.make(tmp_path, "llama-tied-bias", num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    (whole,), (first, *_) = logits_of(tmp_path, 1), logits_of(tmp_path, 4)
    assert kl(whole, first) < 1e-5


def test_a_cut_through_a_group_is_refused(tmp_path: Path) -> None:
    awq(tmp_path)
    with pytest.raises(UnsupportedError, match=r"tp=4: attn.o has 64 inputs in groups of 32, and a rank needs whole"):
        logits_of(tmp_path, 4)


def ordered(path: Path, name: str = "qwen2", **sizes: int) -> Path:
    """A GPTQ checkpoint, the first layer dense, and in the other ones the inputs of mlp.down in activation order."""
    tiny.make(path / "plain", name, hidden_size=64, intermediate_size=128, num_attention_heads=4, **sizes)
    gptq, schemes = get_format("gptq_v2"), dict[str, QuantScheme | None]()
    writer = CheckpointWriter(path)
    with CheckpointReader(path / "plain") as reader:
        for name in reader.names():
            module, mark = name.rpartition(".")[::2]
            if "_proj" not in module or mark != "weight" or "layers.0." in module:
                writer.add(name, reader.tensor(name))
                continue
            scheme = int_scheme(4, 32, act_order="down" in module)
            gptq.write_linear(writer, module, rounded(reader.tensor(name), scheme))
            schemes[module] = scheme
        modules = {name.removesuffix(".weight"): None for name in reader.names() if "_proj.weight" in name}
        entry = gptq.config_entry(modules | schemes)
        writer.finish(reader.config | {"quantization_config": entry}, path / "plain")
    return path


@pytest.mark.parametrize(
    ("make", "tp", "reason"),
    [
        (ordered, 2, "tp=2: mlp.down has its inputs in activation order"),
        (awq, 4, r"tp=4: attn.o has 64 inputs in groups of 32"),
    ],
)
def test_inspect_refuses_a_cut_that_loading_refuses(
    tmp_path: Path, make: Callable[[Path], Path], tp: int, reason: str
) -> None:
    path = make(tmp_path)
    assert describe_model(str(path), EngineConfig(device="cpu"))["serving"]["fits"]
    with pytest.raises(UnsupportedError, match=reason):
        load_model(path, packed_cache=False, shard=Shard(0, tp))
    with pytest.raises(UnsupportedError, match=reason):
        describe_model(str(path), EngineConfig(device="cpu", tp=tp))


def test_inspect_takes_a_cut_that_loading_takes(tmp_path: Path) -> None:
    assert describe_model(str(awq(tmp_path)), EngineConfig(device="cpu", tp=2))["serving"]["fits"]


@pytest.mark.parametrize(("size", "reason"), [(3, "4 attention heads cannot"), (8, "4 attention heads cannot")])
def test_heads_that_cannot_be_shared_out_are_refused(tmp_path: Path, size: int, reason: str) -> None:
    tiny.make(tmp_path, "llama-tied-bias", num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    with resolved(tmp_path, shard=Shard(0, size)) as model, pytest.raises(UnsupportedError, match=reason):
        _ = model.spec


def test_the_parts_of_a_quantized_weight_are_the_whole() -> None:
    scheme = int_scheme(4, 32)
    weight = quantize(torch.randn(24, 128, generator=torch.Generator().manual_seed(3)), scheme)
    parts = [dequantize(Shard(rank, 4)._columns("attn.o", weight)) for rank in range(4)]
    assert torch.equal(torch.cat(parts, dim=1), dequantize(weight))


def test_the_storage_of_keys_follows_their_heads() -> None:
    plain = KVStorage(kv_dtype("int8"), kv_dtype("int8"), k_scales=(1.0, 2.0, 3.0, 4.0), v_scales=(5.0, 6.0, 7.0, 8.0))
    assert Shard(1, 2).storage(plain, 4) == replace(plain, k_scales=(3.0, 4.0), v_scales=(7.0, 8.0))
    assert Shard(5, 8).storage(plain, 4) == replace(plain, k_scales=(3.0,), v_scales=(7.0,))
    numbers = np.arange(4 * 2 * 2, dtype=np.float32).reshape(4, 2, 2)
    mean = tuple(((0, float(head), 1.0),) for head in range(4))
    whole = KVTransform(mean, balance=Numbers.of(numbers), first_key=Numbers.of(numbers[:, 0]))
    part = Shard(1, 2).storage(replace(plain, transform=whole), 4).transform
    assert part == KVTransform(mean[2:], balance=Numbers.of(numbers[2:]), first_key=Numbers.of(numbers[2:, 0]))
