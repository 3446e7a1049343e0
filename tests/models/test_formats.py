"""The engine on checkpoints of every weight format: the logits of the dense checkpoint with the same weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import transformers

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.base import get_format
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter
from lmkit.formats.convert import convert
from lmkit.formats.names import Activations
from lmkit.kernels.cpu import isa
from lmkit.kernels.ops import Norm
from lmkit.kv_dtype import FLOAT32
from lmkit.layers.batch import allocate_kv, whole_batch
from lmkit.models.decoder import Decoder
from lmkit.models.loader import load_model
from lmkit.models.shard import Shard
from lmkit.models.source import ModelSource
from lmkit.qtensor import QTensor, QuantScheme, dequantize, float8_scheme, int_scheme
from tests.formats.awq_gemv import repacked
from tests.formats.linears import rounded
from tests.models import tiny

SHAPE = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "head_dim": 16, "num_hidden_layers": 2}
PROMPTS = [[5, 7, 11, 2], [3]]
EXACT = 5e-5 if isa.host().tiles else 1e-5  # of the largest logit; on tile registers an input keeps 16 bits
FOUR, EIGHT = int_scheme(4, 32), int_scheme(8, -1, symmetric=True)
CHANNEL = float8_scheme()
BLOCK = float8_scheme(128, 128)  # of 64 outputs of q and 32 of k, 160 of gate
SMALL_BLOCK = float8_scheme(48, 48)
MIXED = {"q_proj": FOUR, "k_proj": int_scheme(4, 32, True), "v_proj": CHANNEL, "gate_proj": EIGHT, "up_proj": EIGHT}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    tiny.make(path, "llama-tied-bias", **SHAPE, tie_word_embeddings=False)
    return path


def rewritten(
    plain: Path, path: Path, name: str, schemes: dict[str, QuantScheme], activations: Activations = "none"
) -> tuple[Path, Path]:
    """(the checkpoint with linears whose names end with a key in its scheme, a dense one with the same weights)."""
    weight_format, linears = get_format(name), {}
    quantized, dense = path / "quantized", path / "dense"
    for folder in (quantized, dense):
        folder.mkdir(parents=True)
    writer, dense_writer = CheckpointWriter(quantized), CheckpointWriter(dense)
    with CheckpointReader(plain) as reader:
        for tensor_name in reader.names():
            module, tensor = tensor_name.removesuffix(".weight"), reader.tensor(tensor_name)
            scheme = next((s for suffix, s in schemes.items() if tensor_name.endswith(f"{suffix}.weight")), None)
            torch.manual_seed(crc32(re.sub("[qkv]_proj|gate|up", "", module).encode()))  # one order for one input
            weight: Any = tensor if scheme is None else rounded(tensor, scheme)
            linears[module] = scheme
            if isinstance(weight, QTensor):
                weight_format.write_linear(writer, module, weight, activations=activations)
                weight = dequantize(weight)
            else:
                writer.add(tensor_name, weight)
            dense_writer.add(tensor_name, weight)
        entry = weight_format.config_entry(linears, activations=activations)
        writer.finish(reader.config | {"quantization_config": entry}, plain)
        dense_writer.finish(reader.config, plain)
    return quantized, dense


def logits(decoder: Decoder) -> torch.Tensor:
    spec = decoder.spec
    batch, num_blocks = whole_batch(PROMPTS, 8)
    kv = [allocate_kv(num_blocks, layer.num_kv_heads, 8, layer.head_dim, (FLOAT32, FLOAT32))
          for layer in spec.layers]  # fmt: skip
    return decoder(batch, kv)


def every(scheme: QuantScheme) -> dict[str, QuantScheme]:
    return {"_proj": scheme}


CASES: list[tuple[str, dict[str, QuantScheme], Activations]] = [
    ("gptq", every(int_scheme(4, 32, True)), "none"),
    ("gptq_v2", every(FOUR), "none"),
    ("gptq_v2", every(int_scheme(8, -1)), "none"),
    ("gptq", every(int_scheme(4, 32, True, act_order=True)), "none"),
    ("gptq_v2", every(int_scheme(8, 16, act_order=True)), "none"),
    ("compressed-tensors", every(FOUR), "none"),
    ("compressed-tensors", every(int_scheme(8, 32)), "none"),
    ("compressed-tensors", every(EIGHT), "int8"),
    ("compressed-tensors", every(CHANNEL), "float8"),
    ("compressed-tensors", every(float8_scheme(-1, -1)), "none"),
    ("compressed-tensors", MIXED | {"lm_head": EIGHT}, "int8"),
    ("fp8", every(BLOCK), "float8"),
    ("fp8", every(SMALL_BLOCK), "float8"),
]


@pytest.mark.parametrize(("name", "schemes", "activations"), CASES)
def test_exact_activations(
    plain: Path, tmp_path: Path, name: str, schemes: dict[str, QuantScheme], activations: Activations
) -> None:
    quantized, dense = rewritten(plain, tmp_path, name, schemes, activations)
    expected = logits(load_model(dense))
    got = logits(load_model(quantized, activations="exact"))
    assert (got - expected).abs().max() <= EXACT * expected.abs().max()
    for _ in range(2):  # packed into the cache's file, and mapped from it
        assert torch.equal(logits(load_model(quantized, activations="exact", packed_cache=True)), got)


@pytest.mark.parametrize("schemes", [every(EIGHT), MIXED])
def test_int8_activations(plain: Path, tmp_path: Path, schemes: dict[str, QuantScheme]) -> None:
    quantized, dense = rewritten(plain, tmp_path, "compressed-tensors", schemes, "int8")
    expected, got = logits(load_model(dense)), logits(load_model(quantized))
    assert 0 < (got - expected).abs().max() < 0.05 * expected.abs().max()


def test_fp8_activations(plain: Path, tmp_path: Path) -> None:
    quantized, dense = rewritten(plain, tmp_path, "compressed-tensors", every(CHANNEL), "float8")
    expected, got = logits(load_model(dense)), logits(load_model(quantized, activations="fp8"))
    assert 0 < (got - expected).abs().max() < 0.2 * expected.abs().max()


def test_fp8_activations_of_integer_weights_are_refused(plain: Path, tmp_path: Path) -> None:
    quantized, _ = rewritten(plain, tmp_path, "compressed-tensors", MIXED, "int8")
    with pytest.raises(UnsupportedError, match="fp8 need float8 weights, not 4-bit integers"):
        load_model(quantized, activations="fp8")


def test_a_converted_checkpoint_computes_the_same(plain: Path, tmp_path: Path) -> None:
    schemes = {"q_proj": int_scheme(4, 32), "down_proj": int_scheme(4, 32)}
    quantized, _ = rewritten(plain, tmp_path, "awq", schemes)
    for name in ("compressed-tensors", "gptq_v2"):
        convert(quantized, tmp_path / name, name)
        assert torch.equal(logits(load_model(tmp_path / name)), logits(load_model(quantized)))


def test_activation_order_in_groups_of_128(tmp_path: Path) -> None:
    """transformers computes with the decoded weights."""
    shape = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 64}
    tiny.make(tmp_path / "plain", "llama", **shape)
    scheme = int_scheme(4, 128, True, act_order=True)
    quantized, dense = rewritten(tmp_path / "plain", tmp_path, "gptq", every(scheme))
    model = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])
    got = logits(load_model(quantized, activations="exact"))
    torch.testing.assert_close(
        got, expected, rtol=5e-4, atol=5e-4
    )  # tile registers have 16 bits of what attention reads


@pytest.mark.parametrize(("name", "scheme"), [("awq", FOUR), ("gptq_v2", int_scheme(4, 32, act_order=True))])
def test_linears_under_other_names(tmp_path: Path, name: str, scheme: QuantScheme) -> None:
    """OPT: fc1 and fc2 in model.decoder.layers."""
    tiny.make(tmp_path / "plain", "opt", hidden_size=96, ffn_dim=160)
    quantized, dense = rewritten(tmp_path / "plain", tmp_path, name, {"_proj": scheme, "fc1": scheme, "fc2": scheme})
    expected = logits(load_model(dense))
    torch.testing.assert_close(logits(load_model(quantized, activations="exact")), expected, rtol=1e-4, atol=1e-4)


def test_experts_in_activation_order(tmp_path: Path) -> None:
    tiny.make(tmp_path / "plain", "qwen3-moe", **SHAPE, moe_intermediate_size=64, decoder_sparse_step=1)
    scheme = int_scheme(4, 32, True, act_order=True)
    quantized, dense = rewritten(tmp_path / "plain", tmp_path, "gptq", every(scheme))
    expected = logits(load_model(dense))
    torch.testing.assert_close(logits(load_model(quantized, activations="exact")), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("gptq", int_scheme(4, 32, True)),
        ("gptq_v2", int_scheme(8, 32, act_order=True)),
        ("awq", FOUR),
        ("awq-gemv_fast", FOUR),
        ("fp8", BLOCK),
        ("compressed-tensors", EIGHT),
    ],
)
def test_a_quantized_head(tmp_path: Path, name: str, scheme: QuantScheme, tied: bool) -> None:
    """Beside embeddings that are not, even if config.json ties them. Two ranks have half of it each."""
    tiny.make(tmp_path / "plain", "llama-tied-bias", **SHAPE, vocab_size=200, tie_word_embeddings=False)
    kind, _, version = name.partition("-g")
    quantized, dense = rewritten(tmp_path / "plain", tmp_path, kind, {"lm_head": scheme, "q_proj": scheme})
    if version:
        quantized = repacked(quantized, tmp_path / "gemv", "g" + version)
    if tied:
        config = json.loads((quantized / "config.json").read_text())
        (quantized / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    expected = logits(load_model(dense))
    for cached in (False, True):
        found = logits(load_model(quantized, activations="exact", packed_cache=cached))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    if not scheme.act_order:
        first, second = (load_model(quantized, activations="exact", shard=Shard(rank, 2)).lm_head for rank in (0, 1))
        x, norm = torch.randn(3, 64), Norm(torch.ones(64), 1e-5)
        whole = load_model(quantized, activations="exact").lm_head(x, norm)
        assert torch.equal(torch.cat([first(x, norm), second(x, norm)], 1), whole)
    if kind in ("gptq", "awq"):
        convert(quantized, tmp_path / "converted", "gptq_v2")
        entry = json.loads((tmp_path / "converted" / "config.json").read_text())["quantization_config"]
        assert entry["lm_head"] is True
        assert torch.equal(logits(load_model(tmp_path / "converted", activations="exact")), found)


def test_ranks_refuse_inputs_in_activation_order(plain: Path, tmp_path: Path) -> None:
    quantized, _ = rewritten(plain, tmp_path, "gptq_v2", {"down_proj": int_scheme(4, 16, act_order=True)})
    with pytest.raises(UnsupportedError, match=r"tp=2: mlp\.down has its inputs in activation order"):
        load_model(quantized, shard=Shard(0, 2))


def test_memory_of_coded_weights(plain: Path, tmp_path: Path) -> None:
    """Scales are no dense weights that would be widened."""
    quantized, _ = rewritten(plain, tmp_path, "compressed-tensors", every(CHANNEL))
    source = ModelSource(quantized)
    names = [name for name in source.reader.names() if "_proj.weight" in name]
    assert source.weight_bytes("float32") == source.reader.nbytes()
    assert {source.reader.info(name).dtype for name in names} == {"F8_E4M3", "F32"}


def test_integers_where_floats_belong(plain: Path, tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    with CheckpointReader(plain) as reader:
        for name in reader.names():
            tensor = reader.tensor(name)
            writer.add(name, tensor.to(torch.int8) if name == "model.embed_tokens.weight" else tensor)
        writer.finish(reader.config, plain)
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight is I8, expected F16, BF16, F32"):
        load_model(tmp_path)
