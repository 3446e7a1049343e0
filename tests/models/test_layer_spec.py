"""What a layer's specification says of its sizes, against counts that were made by hand, and against tensors."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from lmkit.config import EngineConfig
from lmkit.kv_dtype import FLOAT32, INT4
from lmkit.layers.batch import whole_batch
from lmkit.layers.block import At
from lmkit.layers.blocks.base import two_blocks
from lmkit.models import load_spec
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.models.kv_storage import KVStorage, allocate
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.roles import LLAMA_NAMES, POST_NORM_NAMES
from lmkit.models.source import ModelSource
from lmkit.turbo.engine.memory import plan_memory
from tests.models import tiny

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128_256, "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}  # fmt: skip
MIXTRAL = CONFIG | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
ATTENTION = 2 * 4096 * 4096 + 2 * 1024 * 4096
MLP = 3 * 14336 * 4096


def test_weights_and_flops() -> None:
    dense, sparse = load_spec(CONFIG).layers[0], load_spec(MIXTRAL).layers[0]
    assert (dense.num_weights, dense.active_weights) == (ATTENTION + MLP,) * 2
    assert (sparse.num_weights, sparse.active_weights) == (ATTENTION + 8 * MLP, ATTENTION + 2 * MLP)
    assert dense.weight_bytes(4.25) == (ATTENTION + MLP) * 4.25 / 8
    assert dense.flops(10, 100) == 10 * (2 * (ATTENTION + MLP) + 4 * 32 * 128 * 100)
    windowed = dense.having(attention=dataclasses.replace(dense.attention, window=30, sinks=4))
    assert windowed.flops(10, 100) == 10 * (2 * (ATTENTION + MLP) + 4 * 32 * 128 * 34)
    assert windowed.flops(10, 20) == dense.flops(10, 20)


@pytest.mark.parametrize(
    ("config", "cpu", "cuda"), [(CONFIG, 125_739_008, 1_512_570_880), (MIXTRAL, 205_430_784, 1_580_204_032)]
)
def test_the_workspace_of_a_step(config: dict[str, object], cpu: int, cuda: int) -> None:
    """The numbers of a memory plan. Those of Llama were measured."""
    spec = load_spec(config)
    config_of = EngineConfig(max_batch_size=4)
    for engine, expected in ((config_of.on("cpu"), cpu), (config_of.on("cuda"), cuda)):
        plan = plan_memory(spec, engine, [(FLOAT32, INT4)] * 8, 0, available=64 << 30)
        assert plan.workspace == expected


@pytest.mark.parametrize("name", ["llama-tied-bias", "qwen3", "mixtral", "qwen2-moe"])
def test_every_tensor_of_a_layer_is_named_and_has_its_shape(tmp_path: Path, name: str) -> None:
    model = tiny.make(tmp_path, name)
    spec, reader = ModelSource(tmp_path).spec, ModelSource(tmp_path).reader
    expected = {n: reader.info(n).shape for n in reader.names() if ".layers." in n}
    found: dict[str, tuple[int, ...]] = {}
    for index, layer in enumerate(spec.layers):
        shapes = layer.linears | layer.routers
        found |= {spec.tensor_name(index, role): shape for role, shape in shapes.items()}
        found |= {spec.tensor_name(index, role): (size,) for role, size in layer.vectors.items()}
        found |= {
            spec.tensor_name(index, role + ".bias"): shape[:1] for role, shape in shapes.items() if layer.has_bias(role)
        }
    assert found == expected
    assert model.num_parameters() > sum(layer.num_weights for layer in spec.layers)


def plain_layer(post_norms: bool) -> DecoderLayer:
    """A small layer of random weights."""
    config = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 88}
    (spec,) = load_spec(CONFIG | config | {"num_hidden_layers": 1}).layers
    spec = spec.having(blocks=two_blocks(*spec, post_norms=post_norms), names=LLAMA_NAMES | POST_NORM_NAMES)
    torch.manual_seed(0)
    weights = {role: torch.randn(shape) / 7 for role, shape in spec.linears.items()}
    weights |= {role: torch.rand(size) + 0.5 for role, size in spec.vectors.items()}
    return DecoderLayer(spec, 0, dict(weights))


@pytest.mark.parametrize("packed", [False, True])
def test_norms_behind_the_blocks(packed: bool) -> None:
    """x + norm(attn(norm(x))), then x + norm(mlp(norm(x))), with the stream in one piece or in two."""
    layer = plain_layer(post_norms=True)
    weights = dict(layer.weights)
    if packed:
        layer.pack("exact")
    batch, num_blocks = whole_batch([[0] * 9, [0] * 4], 8)
    (kv,) = allocate([layer.spec], [KVStorage(FLOAT32, FLOAT32)], num_blocks, 8, 9)
    cos, sin = torch.rand(13, layer.spec.rope.rotary_dim // 2), torch.rand(13, layer.spec.rope.rotary_dim // 2)
    x = torch.randn(13, 48)

    def norm(y: torch.Tensor, role: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(y, (48,), weights[role], layer.spec.norm_eps)  # type: ignore[arg-type]

    inner = plain_layer(post_norms=False)
    expected = x + norm(inner.attention(norm(x, "norm.attn"), None, At(batch, (cos, sin), kv)), "norm.attn_out")
    expected = expected + norm(inner.mlp(norm(expected, "norm.mlp")), "norm.mlp_out")
    for delta, residual in ((x.clone(), None), (x - 3.0, torch.full_like(x, 3.0))):
        delta, rest = layer(delta, residual, batch, (cos, sin), kv)
        assert rest is not None
        torch.testing.assert_close(delta + rest, expected, rtol=1e-4, atol=1e-4)


def test_a_norm_is_stored_without_its_offset(tmp_path: Path) -> None:
    """The factor is 1 + w: added once when it is read, in float32, and taken away when it is stored."""
    tiny.make(tmp_path, "llama", dtype="bfloat16")
    source = ModelSource(tmp_path)
    name = "model.layers.1.input_layernorm.weight"
    stored = source.reader.tensor(name)
    source.spec = dataclasses.replace(source.spec, norm_offset=1.0)
    for read in (source.layer_weights(1, torch.bfloat16), source.norms(1, torch.bfloat16)):
        weight = read["norm.attn"]
        assert isinstance(weight, torch.Tensor)
        assert torch.equal(weight, stored.to(torch.bfloat16).float() + 1)
    assert torch.equal(source.final_norm(), source.reader.tensor("model.norm.weight").float() + 1)
    factor = stored.float() + 1
    torch.testing.assert_close(source.stored(1, "norm.attn", factor), stored, rtol=1e-5, atol=1e-6)
    assert source.stored(1, "attn.q", factor).equal(factor.to(stored.dtype))  # a linear has none
    torch.testing.assert_close(source.read_back(1, "norm.attn", factor), factor, rtol=1e-6, atol=1e-6)


def test_layers_that_are_alike_are_one_kind() -> None:
    spec = load_spec(CONFIG | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True,
                               "sliding_window": 100, "max_window_layers": 5})  # fmt: skip
    assert len(spec.kinds) == 2
    assert spec.windows == (0,) * 5 + (100,) * 3
    assert isinstance(spec.kinds[0], LayerSpec)
    sinks = spec.with_sinks(4)
    assert [layer.attention.sinks for layer in sinks.layers] == [0] * 5 + [4] * 3


def test_an_activation_that_is_not_linear_in_up_keeps_its_scales(tmp_path: Path) -> None:
    """With gpt-oss's, up / s and down * s would give another result."""
    smooth = {name: ModelSource(tmp_path / name).spec.layers[0].smooth for name in made(tmp_path, "llama", "gpt-oss")}
    assert any(role.endswith(".up") for role, _ in smooth["llama"])
    assert not any(role.endswith(".up") for role, _ in smooth["gpt-oss"])


def made(folder: Path, *names: str) -> tuple[str, ...]:
    for name in names:
        tiny.make(folder / name, name)
    return names
