"""Gemma 2 on every KV type: transformers, whose attention reads the keys and values that we stored, gives our logits.

Both sides then have the same rounded KV, so what is left is the arithmetic of the model. Distributions are compared
instead where more is rounded: queries of int4 keys (a last bit decides), the softmax weights in the CPU's kernels for
int8 and int4, and the activations of 16 bits on an emulated GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.masking_utils import eager_mask
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from lmkit.kernels import ops
from lmkit.kernels.cpu import isa
from lmkit.kernels.reference.attention import rounded_queries
from lmkit.kernels.reference.kv import read_blocks
from lmkit.kv_dtype import BFLOAT16, FLOAT16, FLOAT32, INT4, INT8, KV_DTYPES, KVDtype
from lmkit.layers.batch import KVLayer, allocate_kv, whole_batch
from lmkit.models.decoder import Decoder
from lmkit.models.loader import load_model
from lmkit.quant.run import prepare
from lmkit.turbo.plan import Chunk, NewSequence
from lmkit.turbo.request import SamplingParams
from lmkit.turbo.runners.batch import PersistentBatch
from tests.models import tiny
from tests.quant.helpers import CLIP, SCALE, recipe, tiny_checkpoint

TOLERANCE = 1e-3 if isa.host().tiles else 1e-4  # tile registers keep 16 bits of a query's and a weight's numbers
TYPES = [t for t in KV_DTYPES.values() if 16 % t.unit == 0]  # heads have 16 channels
KL = 1e-4  # nats per token, at most, of 16-bit activations
BLOCK = 16
ROW = torch.randint(0, 199, (40,), generator=torch.Generator().manual_seed(11)).tolist()
BLOCKS = [4, 0, 2]  # of ROW
CHUNKS = {"whole": [40], "chunked": [9, 17, 14], "decoding": [33, 1, 1, 1, 1, 1, 1, 1]}


class Stored:
    """An attention of transformers over the keys and values of our cache."""

    def __init__(self, layers: list[KVLayer], *, rounds_queries: bool) -> None:
        self.layers = layers
        self.rounds_queries = rounds_queries  # to 8 bits, where keys have 4: see ops.paged_attention

    def __call__(
        self, block: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Any:
        layer, table = self.layers[block.layer_idx], torch.tensor(BLOCKS)
        keys, values = (read_blocks(part, table, key.shape[2])[None] for part in (layer.k, layer.v))
        if self.rounds_queries and layer.k.dtype == INT4:
            query = rounded_queries(query)
        return eager_attention_forward(block, query, keys, values, mask, **options)


def expected(model: transformers.PreTrainedModel, stored: Stored) -> Tensor:
    """Logits [T, vocab] of ROW."""
    transformers.AttentionInterface.register("stored", stored)
    transformers.AttentionMaskInterface.register("stored", eager_mask)
    model.set_attn_implementation("stored")
    with torch.no_grad():
        return model(torch.tensor([ROW])).logits[0]


def ours(decoder: Decoder, kv: list[KVLayer], sizes: list[int]) -> dict[int, Tensor]:
    """Logits of the last position of each chunk, by position."""
    batch = PersistentBatch(num_slots=1, max_model_len=48, block_size=BLOCK, max_step_tokens=48)
    batch.enter(NewSequence(0, ROW, len(ROW), SamplingParams(), (), prompt_logprobs=False))
    found, end, blocks = {}, 0, iter(BLOCKS)
    for size in sizes:
        new = [next(blocks) for _ in range(-(-(end + size) // BLOCK) + -end // BLOCK)]
        inputs, _ = batch.inputs([Chunk(0, end, size, [new], 1)])
        end += size
        found[end - 1] = decoder(inputs, kv)[0].clone()
    return found


def kv_of(decoder: Decoder, dtype: KVDtype) -> list[KVLayer]:
    return [allocate_kv(5, layer.num_kv_heads, BLOCK, layer.head_dim, (dtype, dtype)) for layer in decoder.spec.layers]


def divergence(got: Tensor, want: Tensor) -> float:
    """KL of one position's distributions, in nats."""
    p, q = want.double().log_softmax(-1), got.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum())


@pytest.mark.parametrize("sizes", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("name", ["reference", "kernels"])
@pytest.mark.parametrize("dtype", [t for t in TYPES if t != FLOAT16], ids=str)
def test_logits_on_every_kv_type(tmp_path: Path, dtype: KVDtype, name: str, sizes: list[int]) -> None:
    model, decoder = tiny.make(tmp_path, "gemma2"), load_model(tmp_path)
    if name == "reference":
        for layer in decoder.layers:
            layer.attention.attention_op = ops.rope_paged_attention.named("reference")
    kv = kv_of(decoder, dtype)
    logits = ours(decoder, kv, sizes)
    want = expected(model, Stored(kv, rounds_queries=True))
    for position, got in logits.items():
        if dtype == INT4 or (name == "kernels" and dtype == INT8):
            assert divergence(got, want[position]) < KL
            assert divergence(got.roll(1), want[position]) > 100 * KL
        else:
            torch.testing.assert_close(got, want[position], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("sizes", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("dtype", [t for t in TYPES if t != FLOAT32], ids=str)
def test_distributions_on_an_emulated_gpu(tmp_path: Path, dtype: KVDtype, sizes: list[int], emulated: None) -> None:
    """Activations have 16 bits there, so distributions are compared."""
    model = tiny.make(tmp_path, "gemma2")
    decoder = load_model(tmp_path, device="cuda", dtype="bfloat16" if dtype == BFLOAT16 else "float16")
    kv = kv_of(decoder, dtype)
    logits = ours(decoder, kv, sizes)
    want = expected(model, Stored(kv, rounds_queries=False))
    tolerance = 64 * KL if dtype == BFLOAT16 else KL  # 3 bits fewer, and errors enter squared
    for position, got in logits.items():
        assert got.isfinite().all()
        assert divergence(got, want[position]) < tolerance
        assert divergence(got.roll(1), want[position]) > 10 * tolerance


def test_a_quantized_checkpoint_reads_back(tmp_path: Path) -> None:
    """AWQ's scales go into norms whose factor is 1 + w, and these are written as w."""
    path = tiny_checkpoint(tmp_path / "source", "gemma2", head_dim=16, num_hidden_layers=2)
    prepare(path, recipe(SCALE, CLIP, format="awq")).run(tmp_path / "out")
    rows = [torch.randint(0, 4096, (60,), generator=torch.Generator().manual_seed(1)).tolist()]
    found = []
    for folder in (path, tmp_path / "out"):
        decoder = load_model(folder, activations="exact")
        batch, num_blocks = whole_batch(rows, BLOCK)
        found.append(decoder(batch, [allocate_kv(num_blocks, layer.num_kv_heads, BLOCK, layer.head_dim,
                                                 (FLOAT32, FLOAT32)) for layer in decoder.spec.layers]))  # fmt: skip
    exact, quantized = found
    assert (quantized - exact).norm() < 0.25 * exact.norm()
