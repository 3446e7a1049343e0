"""Ranks that share the experts of a mixture compute the bits of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmkit.config import EngineConfig
from lmkit.errors import UnsupportedError
from lmkit.models.resolved import resolved
from lmkit.models.shard import Shard
from lmkit.turbo.engine.describe import describe_model
from tests.models import tiny
from tests.models.test_shard import kl, logits_of, ordered

MIXTURES = ["qwen3-moe", "qwen2-moe", "mixtral", "gpt-oss", "glm4-moe", "deepseek-v2", "deepseek-v3", "qwen3-next"]
GROUPS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}  # whole groups


@pytest.mark.parametrize("name", MIXTURES)
def test_ranks_with_whole_experts_compute_the_same_bits(tmp_path: Path, name: str) -> None:
    """Three ranks have uneven numbers of experts."""
    tiny.make(tmp_path, name)
    (whole,), (first, *others) = logits_of(tmp_path, 1), logits_of(tmp_path, 1, 3)
    assert torch.equal(first, whole)
    assert [len(other) for other in others] == [0, 0]


@pytest.mark.parametrize("activations", ["int8", "exact"])
def test_quantized_experts_compute_the_same_bits(tmp_path: Path, activations: str) -> None:
    """Also from their files, and with inputs in activation order, which tensor parallelism refuses. Such experts are
    computed one by one."""
    ordered(tmp_path, "qwen2-moe", **GROUPS)
    options = {"activations": activations, "packed_cache": True}
    (whole,) = logits_of(tmp_path, 1, **options)
    assert torch.equal(logits_of(tmp_path, 1, 2, **options)[0], whole)
    assert torch.equal(logits_of(tmp_path, 1, 2, **options)[0], whole)
    assert len(list((tmp_path / ".lmkit").glob("packed-*.safetensors"))) == 3


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen2-moe", "gpt-oss"])
def test_ranks_may_split_the_rest(tmp_path: Path, name: str) -> None:
    tiny.make(tmp_path, name)
    (whole,), (first, _) = logits_of(tmp_path, 1), logits_of(tmp_path, 2, 2)
    assert kl(whole, first) < 1e-5
    torch.testing.assert_close(first, whole, rtol=1e-4, atol=1e-4)


def test_no_rank_has_more_experts_than_the_first(tmp_path: Path) -> None:
    """Memory is planned for the first one."""
    tiny.make(tmp_path, "mixtral")
    held = []
    for rank in range(3):
        with resolved(tmp_path, shard=Shard(rank, 1, 3)) as model:
            held.append(next(layer.mixture.experts for layer in model.spec.layers if layer.mixture))
    assert held == [range(2), range(2, 3), range(3, 4)]


def test_the_plan_counts_a_ranks_experts(tmp_path: Path) -> None:
    tiny.make(tmp_path, "qwen2-moe", num_experts=8)
    serving = [
        describe_model(str(tmp_path), EngineConfig(device="cpu", **ranks))["serving"]
        for ranks in ({}, {"ep": 2}, {"ep": 8}, {"tp": 2, "ep": 2})
    ]
    alone, two, eight, split = (report["weight_bytes"] for report in serving)
    assert alone > two > eight
    assert two > split


@pytest.mark.parametrize(
    ("name", "ep", "reason"),
    [
        ("mixtral", 5, "ep=5: a layer has 4 experts, and a rank needs one; use a smaller ep"),
        ("qwen3", 2, "ep=2: Qwen3ForCausalLM has no experts; use tp=2"),
    ],
)
def test_models_without_enough_experts_are_refused(tmp_path: Path, name: str, ep: int, reason: str) -> None:
    tiny.make(tmp_path, name)
    with resolved(tmp_path, shard=Shard(0, 1, ep)) as model, pytest.raises(UnsupportedError, match=reason):
        _ = model.spec
    with pytest.raises(UnsupportedError, match=reason):
        describe_model(str(tmp_path), EngineConfig(device="cpu", ep=ep))
