"""Measures on a GPU how a model's products and its attention are computed fastest: plans of products, of those with all
experts, too, how attention to new tokens is split, and when latent attention computes prompts over plain heads. Engines
on such a GPU then use the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmkit.attention_spec import AttentionSpec
from lmkit.config import Activations
from lmkit.devices import CUDA
from lmkit.errors import ConfigError, UnsupportedError
from lmkit.kernels import ops
from lmkit.kernels.cuda import attention, gemm, gemm_experts, gemm_table, linear, wide
from lmkit.kernels.cuda.append import MAX_HEAD_DIM
from lmkit.kernels.cuda.experts import MAX_PLACES
from lmkit.kernels.cuda.gemm_experts import ExpertTable
from lmkit.kernels.cuda.gemm_pack import PackedWeight
from lmkit.kernels.cuda.gemm_plan import Plan
from lmkit.kernels.cuda.gemm_table import (
    BUCKETS,
    PROMPT_BUCKETS,
    Entry,
    Key,
    LatentGain,
    SplitCost,
    SplitKey,
    Table,
    WideBlocks,
    WideKey,
)
from lmkit.kernels.cuda.module import Kernel
from lmkit.kernels.ops import BatchGeometry, Places
from lmkit.kv_dtype import INT4, INT8, KVDtype, dense_kv_dtype
from lmkit.layers import latent_cost
from lmkit.layers.batch import BatchInputs, KVLayer, allocate_kv
from lmkit.layers.block import At
from lmkit.layers.blocks.state import PagedKV
from lmkit.layers.latent_cost import Prompt
from lmkit.layers.latent_prompts import plain_heads
from lmkit.layers.moe import mixtures_of
from lmkit.layers.prompts import Prompts
from lmkit.models.decoder import Decoder
from lmkit.models.loader import load_model
from lmkit.turbo.runners.cuda import latent_key
from lmkit.turbo.runners.gpu import Gpu

SPLIT_TILES = (1, 2, 3, 4, 6, 8, 12)  # costs of a split that are compared
WIDE_BLOCKS = (1, 2, 3, 4, 6, 8)  # of wide rows, on a multiprocessor
LATENT_CHUNK = 512, 4096  # queries of a prompt's chunk, and its context
DECODING = ((1, 1024), (1, 16384), (8, 4096), (64, 1024))  # sequences, tokens of each
KV_BLOCK = 64


class Tuned(NamedTuple):
    entries: list[Entry]
    split_costs: list[SplitCost]
    wide_blocks: list[WideBlocks]
    latent_gains: list[LatentGain]
    path: Path


@torch.inference_mode()
def tune_model(path: str | Path, device: Gpu, *, num_plans: int, activations: Activations = "auto") -> Tuned:
    """Measure the `num_plans` most promising plans of each shape and number of tokens, and how attention is split.
    Returns the best ones and the file that has them now. Raises UnsupportedError or ConfigError."""
    if not device.has_kernels:
        raise UnsupportedError("lmkit tune needs CUDA kernels; `lmkit doctor` says what is missing")
    decoder = load_model(path, device=device.name, activations=activations)
    weights, of_experts = list(tunable(decoder)), list(tunable_experts(decoder))
    if not weights and not of_experts:
        raise UnsupportedError(f"{path}: no linear has 4- or 8-bit weights that csrc/gemm.cu multiplies")
    device.compile(_kernels(weights, decoder.dtype, num_plans))
    device.compile(kernel for each in of_experts for kernel in each.kernels(decoder.dtype, num_plans))
    table = gemm_table.table(device.tensors)
    try:
        entries = gemm_table.tune(weights, decoder.dtype, linear.library, num_plans=num_plans)
        for each in of_experts:
            entries += each.tune(table, decoder.dtype, num_plans)
        shapes = attention_shapes(decoder)
        at, dtype = device.tensors, decoder.dtype
        costs = [cost for shape in shapes if not shape.is_wide for cost in tune_splits(table, at, dtype, shape)]
        blocks = [found for shape in shapes if shape.is_wide for found in tune_wide(table, at, dtype, shape)]
        gains = tune_latent(table, device.tensors, decoder)
        table.save()
    except OSError as error:
        raise ConfigError(f"{table.path} cannot be written: {error.strerror}; LMKIT_CACHE_DIR sets another") from error
    return Tuned(entries, costs, blocks, gains, table.path)


def tunable(decoder: Decoder) -> Iterator[PackedWeight]:
    """A packed weight of each shape and format."""
    seen: set[Key] = set()
    for each in (*(part for layer in decoder.layers for part in layer.linears), decoder.lm_head):
        for packed in each.packed or ():
            if isinstance(packed.weight, PackedWeight):
                key = Key.of(packed.weight, decoder.dtype)
                if key not in seen:
                    seen.add(key)
                    yield packed.weight


def _kernels(weights: list[PackedWeight], dtype: torch.dtype, num_plans: int) -> Iterator[Kernel]:
    for weight in weights:
        for tokens in (*BUCKETS, *PROMPT_BUCKETS):
            for plan in gemm_table.promising(tokens, weight, num_plans):
                yield from gemm.kernels_of(weight, plan, dtype, tokens)


class TunableExperts(NamedTuple):
    """The product with all experts of a layer."""

    table: ExpertTable
    per_token: int  # experts of a token
    by_token: bool  # inputs are those of tokens, not of pairs of a token and an expert

    @property
    def tokens(self) -> list[int]:
        """Numbers of tokens whose products have plans."""
        most = min(gemm_experts.MAX_ROWS * len(self.table.parts), MAX_PLACES) // self.per_token
        return [1 << exponent for exponent in range(most.bit_length())]

    def plans(self, tokens: int, num_plans: int) -> tuple[Plan, ...]:
        places = gemm_experts.bucket(tokens * self.per_token)
        return gemm_experts.promising(self.table.packed, places, len(self.table.parts), num_plans)

    def kernels(self, dtype: torch.dtype, num_plans: int) -> Iterator[Kernel]:
        yield from gemm_experts.rounding(self.table, dtype)
        for tokens in self.tokens:
            for plan in self.plans(tokens, num_plans):
                yield gemm.kernel_for(self.table.packed, plan, dtype, "GROUPED")

    def tune(self, table: Table, dtype: torch.dtype, num_plans: int) -> list[Entry]:
        """Measure plans with tokens that like all experts equally, and put the best ones into the table."""
        packed, num_experts = self.table.packed, len(self.table.parts)
        key, device, found = Key.of(packed, dtype, num_experts), packed.codes.device, []
        place = ops.expert_places.select(CUDA.name)
        for tokens in self.tokens:
            chosen = torch.rand(tokens, num_experts, device=device).topk(self.per_token).indices
            places = place(chosen, num_experts, range(num_experts))
            rows = tokens if self.by_token else tokens * self.per_token
            x = torch.randn(rows, packed.in_features, device=device).to(dtype)
            bucket, times = gemm_experts.bucket(len(places.tokens)), {}
            for plan in self.plans(tokens, num_plans):
                table.add(Entry(key, bucket, plan, 0.0))
                times[plan] = gemm_table.measure_on_device(partial(self._multiply, x, places), 1)
            best = min(times, key=lambda plan: times[plan])
            found.append(Entry(key, bucket, best, times[best]))
            table.add(found[-1])
        return found

    def _multiply(self, x: Tensor, places: Places, i: int) -> Tensor:
        return gemm_experts.multiply(x, places, self.table, self.by_token)


def tunable_experts(decoder: Decoder) -> Iterator[TunableExperts]:
    """The products of experts of each shape and format."""
    seen: set[Key] = set()
    for mixture in mixtures_of(decoder.blocks):
        for by_token, linears in zip((True, False), mixture.together(1, decoder.dtype) or (), strict=False):
            if isinstance(table := linears.table, ExpertTable):
                key = Key.of(table.packed, decoder.dtype, len(table.parts))
                if key not in seen:
                    seen.add(key)
                    yield TunableExperts(table, mixture.spec.experts_per_token, by_token)


class AttentionShape(NamedTuple):
    head_dim: int
    num_heads: int
    num_kv_heads: int
    shared: bool = False  # rows are keys and values at once

    @property
    def is_wide(self) -> bool:
        """Whether csrc/wide_attention.cu computes it, not decode_attention.cu."""
        return self.shared or self.head_dim > MAX_HEAD_DIM


def attention_shapes(decoder: Decoder) -> list[AttentionShape]:
    """The shapes of attention to new tokens, each once."""
    of_layers = ((layer.spec.num_heads, layer.spec.kv) for layer in decoder.layers)
    return list(dict.fromkeys(_shape(num_heads, kv) for num_heads, kv in of_layers if kv))


def _shape(num_heads: int, kv: PagedKV) -> AttentionShape:
    return AttentionShape(kv.head_dim, num_heads, kv.num_heads, kv.shared)


def _storages(dtype: torch.dtype) -> tuple[KVDtype, ...]:
    return dense_kv_dtype(dtype), INT8, INT4


def tune_splits(table: Table, device: str, dtype: torch.dtype, shape: AttentionShape) -> list[SplitCost]:
    """Measure costs of splits for KV of 16, 8 and 4 bits, and put the best ones into the table: those with the lowest
    sum of the times of DECODING, each relative to its fastest."""
    found = []
    for stored in _storages(dtype):
        key = SplitKey(shape.head_dim, shape.num_heads // shape.num_kv_heads, stored.bits)
        found.append(SplitCost(key, _fastest(table.split_costs, key, SPLIT_TILES, device, dtype, shape, stored)))
    return found


def tune_wide(table: Table, device: str, dtype: torch.dtype, shape: AttentionShape) -> list[WideBlocks]:
    """The same for wide rows: into how many blocks of a multiprocessor few tiles of rows are split."""
    found = []
    for stored in _storages(dtype):
        key = WideKey(shape.head_dim, shape.num_heads // shape.num_kv_heads, stored.bits, shape.shared)
        found.append(WideBlocks(key, _fastest(table.wide_blocks, key, WIDE_BLOCKS, device, dtype, shape, stored)))
    return found


def _fastest(
    values: dict[Any, int],
    key: Any,
    candidates: tuple[int, ...],
    device: str,
    dtype: torch.dtype,
    shape: AttentionShape,
    stored: KVDtype,
) -> int:
    """Of the candidates, the value at `key` with the lowest sum of the times of DECODING, which stays there."""
    total = dict.fromkeys(candidates, 0.0)
    for sequences, length in DECODING:
        launch, copies = decoding(device, dtype, shape, stored, sequences, length)
        times = {}
        for candidate in candidates:
            values[key] = candidate
            times[candidate] = gemm_table.measure_on_device(launch, copies)
        for candidate, time in times.items():
            total[candidate] += time / min(times.values())
    values[key] = min(total, key=lambda candidate: total[candidate])
    return values[key]


def tune_latent(table: Table, device: str, decoder: Decoder) -> list[LatentGain]:
    """Measure what a chunk of a prompt saves over plain heads, and put that into the table, as a multiple of the
    estimate."""
    plain, (tokens, length) = plain_heads(decoder.blocks), LATENT_CHUNK
    if plain is None or not plain.runs:
        return []
    spec, num_heads = plain.latent.spec, plain.latent.num_heads
    blocks, stored = length // KV_BLOCK, _storages(decoder.dtype)[0]
    kv = allocate_kv(blocks, 1, KV_BLOCK, spec.row_dim, (stored, stored), device)
    kv = KVLayer(kv.k, kv.k)
    numbers = torch.arange(blocks * KV_BLOCK, dtype=torch.int32, device=device)
    start = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    geometry = BatchGeometry(
        start, start.new_tensor([length]), numbers[None, :blocks], numbers[length - tokens : length]
    )
    batch = BatchInputs(
        token_ids=numbers[:tokens].long(),
        positions=geometry.slots,
        geometries=(geometry,),
        rope_lens=geometry.context_lens,
        logit_rows=numbers[:1].long(),
        logit_start=start[:1],
    )
    chunk = Prompt(0, 0, tokens, length)
    over_plain = replace(batch, prompts=Prompts.of([chunk], [0, tokens], (geometry,)))
    x = torch.randn(tokens, decoder.spec.hidden_size, device=device).to(decoder.dtype)
    cos, sin = torch.rand(2, tokens, spec.rope.rotary_dim // 2, device=device)
    latent, at = plain.latent, At(batch, (cos, sin), kv)

    def over_latent(i: int) -> Tensor:
        return latent.attend(latent.queries_keys_values(x), at)

    def over_heads(i: int) -> Tensor:
        return plain(x, None, at._replace(batch=over_plain))

    times = [gemm_table.measure_on_device(way, 1) for way in (over_latent, over_heads)]
    key = latent_key(plain)
    table.latent_gains[key] = (times[0] - times[1]) / latent_cost.gain(tokens, length, spec, num_heads)
    return [LatentGain(key, table.latent_gains[key])]


def decoding(
    device: str, dtype: torch.dtype, shape: AttentionShape, stored: KVDtype, sequences: int, length: int
) -> tuple[Callable[[int], Tensor], int]:
    """Attention of one new token of each sequence to KV that no cache holds: launch number i uses copy i of so many."""
    dim, num_heads, num_kv_heads, shared = shape
    blocks = length // KV_BLOCK
    size = (1 if shared else 2) * sequences * length * num_kv_heads * stored.row_bytes(dim)
    copies = 2 + gemm_table.COLD_BYTES // size
    layers = [
        allocate_kv(sequences * blocks, num_kv_heads, KV_BLOCK, dim, (stored, stored), device) for _ in range(copies)
    ]
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=device)
    tables = torch.arange(sequences * blocks, dtype=torch.int32, device=device).view(sequences, blocks)
    geometry = BatchGeometry(starts, torch.full_like(starts[1:], length), tables, starts[1:])
    q = torch.randn(sequences, num_heads, dim, device=device).to(dtype)

    spec = AttentionSpec(dim**-0.5)

    def launch(i: int) -> Tensor:
        if shape.is_wide:
            return wide.wide_attention(q, layers[i].k, layers[i].k if shared else layers[i].v, geometry, spec)
        out = torch.empty_like(q)
        attention.decode_attention(q, None, layers[i].k, layers[i].v, geometry, spec, out)
        return out

    return launch, copies
