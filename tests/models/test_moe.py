"""Mixtures of experts: where tokens go, and that a token's result is its own; what is refused."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from lmkit.config import EngineConfig
from lmkit.errors import CheckpointError
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.kernels import ops
from lmkit.kernels.ops import Routing
from lmkit.kernels.reference.experts import sigmoid
from lmkit.kv_dtype import FLOAT32
from lmkit.layers.batch import allocate_kv, whole_batch
from lmkit.layers.moe import MoE, by_expert
from lmkit.models import load_spec
from lmkit.models.decoder import Decoder
from lmkit.models.loader import load_model
from lmkit.models.roles import LINEARS, QKV
from lmkit.models.source import ModelSource
from lmkit.turbo.engine.describe import describe_model
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from tests.models import tiny

SPARSE = ["mixtral", "qwen2-moe", "qwen3-moe", "glm4-moe"]
ROWS = [[5, 7, 11, 2, 190, 3, 3, 8, 21], [3], [17, 4, 9, 9, 60], [100, 101]]


def logits(decoder: Decoder, rows: list[list[int]]) -> torch.Tensor:
    spec = decoder.spec
    batch, num_blocks = whole_batch(rows, 8)
    kv = [allocate_kv(num_blocks, layer.num_kv_heads, 8, layer.head_dim, (FLOAT32, FLOAT32)) for layer in spec.layers]
    return decoder(batch, kv)


@pytest.mark.parametrize("name", SPARSE)
def test_a_sequence_has_the_same_bits_in_any_company_and_from_the_packed_file(tmp_path: Path, name: str) -> None:
    tiny.make(tmp_path, name)
    decoder = load_model(tmp_path)
    together = logits(decoder, ROWS).split([len(row) for row in ROWS])
    for row, got in zip(ROWS, together, strict=True):
        assert torch.equal(logits(decoder, [row]), got)
    for _ in range(2):  # written, then mapped
        assert torch.equal(logits(load_model(tmp_path, packed_cache=True), ROWS), torch.cat(together))


def routed(x: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """tests/kernels compares the other implementations with this one."""
    weights, experts = ops.route.named("reference")(x, routing, bias)
    return weights, experts


@pytest.mark.parametrize("normalize", [True, False])
def test_route_chooses_the_most_likely_experts(normalize: bool) -> None:
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(1))
    weights, experts = routed(x, Routing(2, normalize, False, 1, 1, 2, 1.0))
    for row, got, chosen in zip(x.softmax(-1), weights, experts, strict=True):
        best = sorted(sorted(range(6), key=lambda e: -row[e])[:2])
        assert chosen.tolist() == best
        torch.testing.assert_close(got, row[best] / (row[best].sum() if normalize else 1))


def test_of_equal_experts_the_lower_number_is_chosen() -> None:
    weights, experts = routed(torch.zeros(3, 5), Routing(2, True, False, 1, 1, 2, 1.0))
    assert experts.tolist() == [[0, 1]] * 3
    assert weights.tolist() == [[0.5, 0.5]] * 3


def test_places_by_expert() -> None:
    experts = torch.tensor([[4, 1], [1, 0], [4, 0]])
    assert [(e, places.tolist()) for e, places in by_expert(experts)] == [(0, [3, 5]), (1, [1, 2]), (4, [0, 4])]


@pytest.mark.parametrize("width", [1, 13])
def test_sigmoid_is_the_sigmoid_and_does_not_depend_on_other_rows(width: int) -> None:
    x = torch.randn(67, width, generator=torch.Generator().manual_seed(2)) * 5
    whole = sigmoid(x)
    torch.testing.assert_close(whole, x.sigmoid())
    for start in range(67):
        assert torch.equal(sigmoid(x[start : start + 3]), whole[start : start + 3])


GROUPED = Routing(3, True, True, 4, 2, 2, 2.5)


def test_experts_come_from_the_groups_whose_two_best_are_best() -> None:
    """The bias takes part in the choice, and not in the weights."""
    generator = torch.Generator().manual_seed(5)
    x, bias = torch.randn(60, 8, generator=generator), torch.randn(8, generator=generator)
    weights, experts = routed(x, GROUPED, bias)
    for scores, got, chosen in zip(x.sigmoid(), weights, experts, strict=True):
        wanted = scores + bias
        groups = sorted(range(4), key=lambda g: -float(wanted[2 * g] + wanted[2 * g + 1]))[:2]
        best = sorted(sorted((e for g in groups for e in (2 * g, 2 * g + 1)), key=lambda e: -wanted[e])[:3])
        assert chosen.tolist() == best
        torch.testing.assert_close(got, scores[best] / scores[best].sum() * 2.5)


def test_sigmoids_that_are_all_zero_give_no_nan() -> None:
    assert torch.equal(routed(torch.full((2, 8), -1e4), GROUPED, torch.zeros(8))[0], torch.zeros(2, 3))


def test_the_bias_that_chooses_experts_is_not_rounded(tmp_path: Path) -> None:
    tiny.make(tmp_path, "glm4-moe")
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    bias = stored["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert not torch.equal(bias, bias.bfloat16().float())
    source = ModelSource(tmp_path)
    assert torch.equal(source.norms(1, torch.bfloat16)["mlp.score_bias"], bias)
    assert torch.equal(source.layer_weights(1, torch.bfloat16)["mlp.score_bias"], bias)


@pytest.mark.parametrize("name", SPARSE)
def test_experts_that_are_shown_all_tokens_give_the_same_output(tmp_path: Path, name: str) -> None:
    tiny.make(tmp_path, name)
    source = ModelSource(tmp_path)
    layer = source.layer(next(i for i in range(3) if source.spec.layers[i].is_sparse), torch.float32)
    assert isinstance(layer.mlp, MoE)
    x = torch.randn(20, source.spec.hidden_size)
    routed: dict[str, int] = {}
    layer.observe(lambda role, x: routed.update({role: len(x)}))
    exact = layer.mlp(x)
    shown: dict[str, int] = {}
    layer.shows_all_tokens = True
    layer.observe(lambda role, x: shown.update({role: len(x)}))
    torch.testing.assert_close(layer.mlp(x), exact)
    experts = [role for role in layer.spec.linears if role.startswith("mlp.experts.")]
    per_token = layer.mlp.spec.experts_per_token
    assert sum(routed.get(role, 0) for role in experts if role.endswith(".up")) == 20 * per_token
    assert {shown[role] for role in experts} == {20}
    layer.observe(None)
    assert not layer.mlp.all_tokens


def test_names_and_pairs_of_a_sparse_layer(tmp_path: Path) -> None:
    tiny.make(tmp_path / "mixtral", "mixtral")
    tiny.make(tmp_path / "qwen", "qwen2-moe")
    mixtral, qwen = (ModelSource(tmp_path / name).spec for name in ("mixtral", "qwen"))
    assert mixtral.module_name(2, "mlp.experts.3.up") == "model.layers.2.block_sparse_moe.experts.3.w3"
    assert qwen.module_name(0, "mlp.experts.13.down") == "model.layers.0.mlp.experts.13.down_proj"
    assert qwen.module_name(0, "mlp.shared_router") == "model.layers.0.mlp.shared_expert_gate"
    assert qwen.layers[1].smooth == (
        ("norm.attn", QKV), ("attn.v", ("attn.o",)), ("norm.mlp", ("mlp.gate", "mlp.up")), ("mlp.up", ("mlp.down",)),
    )  # fmt: skip
    assert tuple(qwen.layers[1].linears) == LINEARS
    pairs = dict(qwen.layers[0].smooth)
    assert {"mlp.router", "mlp.shared_router", "mlp.shared.up", "mlp.experts.6.gate"} <= set(pairs["norm.mlp"])
    assert pairs["mlp.experts.5.up"] == ("mlp.experts.5.down",)
    reads = qwen.layers[0].input_of
    assert (reads["mlp.shared.up"], reads["mlp.experts.2.up"]) == ("mlp.router", "mlp.experts.2.gate")


def test_the_engine_generates_in_captured_steps(tmp_path: Path) -> None:
    model = tiny.make(tmp_path, "qwen3-moe")
    shutil.copyfile(DEMO_FOLDER / "tokenizer.json", tmp_path / "tokenizer.json")
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("lmkit.turbo.runners.cpu_captured"), Handler()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        config = EngineConfig(block_size=8, max_batch_size=4, max_step_tokens=16, max_model_len=64, dtype="float32")
        engine = Engine(str(tmp_path), config)
        for i, row in enumerate(ROWS):
            params = SamplingParams(max_tokens=4 + 3 * i, temperature=0.0, ignore_eos=True)
            engine.add(Request(request_id=str(i), prompt_ids=row, params=params))
        found: dict[str, list[int]] = {}
        while engine.has_work():
            for output in engine.step():
                found.setdefault(output.request_id, []).extend(output.token_ids)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert not [line for line in messages if "not captured" in line]
    for i, row in enumerate(ROWS):
        ids = list(row)
        with torch.no_grad():
            for _ in range(4 + 3 * i):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert found[str(i)] == ids[len(row) :]


def test_inspect_tells_of_experts(tmp_path: Path) -> None:
    model = tiny.make(tmp_path, "qwen2-moe")
    told = describe_model(str(tmp_path), EngineConfig(max_model_len=64))
    assert told["architecture"]["experts"] == {
        "experts": 7, "experts_per_token": 3, "expert_size": 40, "shared_size": 56, "layers": 2
    }  # fmt: skip
    matrices = sum(
        p.numel() for n, p in model.named_parameters() if p.ndim > 1 and "layers." in n and "mlp.gate.w" not in n
    )
    assert told["weights"]["linear_parameters"] == matrices - 2 * 48  # without the shared experts' routers


CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 128,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip


def test_which_layers_are_sparse() -> None:
    some = load_spec(CONFIG | {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [layer.is_sparse for layer in some.layers] == [False, True, False, False]
    none = load_spec(CONFIG | {"mlp_only_layers": [0, 1, 2, 3]})
    assert not any(layer.is_sparse for layer in none.layers)


@pytest.mark.parametrize(
    "change",
    [
        {"num_experts": 10**6}, {"num_experts_per_tok": 9}, {"num_experts_per_tok": 0}, {"moe_intermediate_size": 0},
        {"decoder_sparse_step": 0}, {"mlp_only_layers": "all"}, {"mlp_only_layers": [None]}, {"num_experts": None},
        {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 2**30},
    ],
)  # fmt: skip
def test_absurd_experts_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_spec(CONFIG | change)


@pytest.mark.parametrize(
    ("lost", "message"),
    [("down_proj", r"experts\.0\.down_proj\.weight is missing"), ("gate_up_proj", r"experts\.0\.\w+_proj\.weight")],
)
def test_a_part_of_fused_experts_is_missed(tmp_path: Path, lost: str, message: str) -> None:
    tiny.make(tmp_path, "qwen2-moe-fused")
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    del tensors[f"model.layers.2.mlp.experts.{lost}"]
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(CheckpointError, match=message):
        ModelSource(tmp_path)


def test_fused_experts_of_another_number_are_refused(tmp_path: Path) -> None:
    tiny.make(tmp_path, "qwen2-moe-fused")
    file = tmp_path / "model.safetensors"
    name = "model.layers.2.mlp.experts.gate_up_proj"
    safetensors.torch.save_file(safetensors.torch.load_file(file) | {name: torch.zeros(6, 80, 48)}, file)
    with pytest.raises(CheckpointError, match=r"expected \[7 experts"):
        ModelSource(tmp_path)


BY_SIGMOID = CONFIG | {
    "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "n_group": 4, "topk_group": 2
}  # fmt: skip


def test_the_first_layers_of_glm_are_dense() -> None:
    spec = load_spec(BY_SIGMOID | {"first_k_dense_replace": 3})
    assert [layer.is_sparse for layer in spec.layers] == [False, False, False, True]
    assert not any(layer.is_sparse for layer in load_spec(BY_SIGMOID | {"first_k_dense_replace": 9}).layers)


@pytest.mark.parametrize(
    "change",
    [
        {"n_group": 3}, {"n_group": 8}, {"n_group": 0}, {"topk_group": 5}, {"topk_group": 0},
        {"num_experts_per_tok": 5}, {"routed_scaling_factor": 0}, {"n_routed_experts": None},
        {"n_shared_experts": 2**28},
    ],
)  # fmt: skip
def test_absurd_groups_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_spec(BY_SIGMOID | change)
