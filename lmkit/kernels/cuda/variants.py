"""The kernels that this package launches for common models: to build them ahead, and for tests that compile all.

There is no list. The ops run on tensors without data ("meta"), with a backend that only records launches.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import torch

import lmkit.kernels.cuda
from lmkit.attention_spec import AttentionSpec, Growth
from lmkit.codes import E2M1, Integers, Shifted
from lmkit.kernels import latent_ops, ops, plane_ops, query_ops, recurrent_ops
from lmkit.kernels.cuda import module, ranks, stages
from lmkit.kernels.cuda.gpus import Capability
from lmkit.kernels.cuda.library import invariant_product
from lmkit.kernels.cuda.module import HALVES, Kernel, Launch
from lmkit.kernels.cuda.prefill import PART_KEYS, variant
from lmkit.kernels.delta import DeltaWeights
from lmkit.kernels.ops import Balance, BatchGeometry, KeyMean, KVTensor, Norm
from lmkit.kernels.recurrent import ROW_FIELDS, RecurrentStates
from lmkit.kernels.registry import Implementation, Op
from lmkit.kernels.selective_scan import ScanWeights
from lmkit.kernels.short_conv import ConvWeights
from lmkit.kv_dtype import FLOAT16, FP8, INT3, INT4, INT8, KVDtype, dense_kv_dtype
from lmkit.qtensor import QTensor, QuantScheme, float8_scheme, int_scheme
from lmkit.scales import NUMBERS, SuperGroups

DEVICE = "meta"
# Query heads, KV heads, head size, soft cap: Llama 8B, Qwen 7B, Llama 1B, Gemma 2 9B.
HEADS = ((32, 8, 128, 0.0), (28, 4, 128, 0.0), (32, 8, 64, 0.0), (16, 8, 256, 50.0))
WIDE_HEADS = 8, 1, 512  # Gemma 4, layers without a window
LATENT_HEADS, ROW, ROW_ROTARY = (16, 128), 576, 64  # DeepSeek-V2-Lite, V3
PLAIN = 128, 512, 128  # of these: the part of keys that RoPE does not turn, the latent, values
DELTA = 16, 32, 128, 128, 4  # Qwen3-Next 80B: key heads, value heads, key and value sizes, convolution
SCAN = 48, 64, 128, 1, 4  # Granite 4 Tiny: heads, their size, rows of a state, groups, taps
CONV = 2048, 3  # LFM2-1.2B: channels, taps
WEIGHTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # out, in
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
STORAGES = (FLOAT16, INT8, INT4, INT3, FP8)
# Of the experts of Qwen3 30B-A3B: out, in, activation; and tokens with 8 experts each.
EXPERTS = ((1536, 2048, "silu"), (2048, 768, None))
EXPERT_TOKENS = (1, 32, 512)
# Q4_K, Q5_K and Q6_K
PLANES = (
    QuantScheme(Shifted(4), 32, scales=SuperGroups(8)),
    QuantScheme(Shifted(5), 32, scales=SuperGroups(8)),
    QuantScheme(Integers(6, symmetric=True), 16, scales=SuperGroups(16)),
)
MEAN_PAIRS = 8
BLOCK, BLOCKS, SEQUENCES = 64, 1024, 8
NUM_RANKS = 2, 4, 8
VOCAB, HIDDEN, SIZES = 128256, 4096, (2048, 3584, 4096)


class Recorder:
    """A backend that launches nothing. Its facts are those of an H200."""

    def __init__(self) -> None:
        self.kernels: dict[tuple[Any, ...], Kernel] = {}

    def device_name(self) -> str:
        return "recorder"

    def num_sms(self) -> int:
        return 132

    def capability(self) -> Capability:
        return 9, 0

    def overlaps(self) -> bool:
        return True

    def load(self, source: str, name: str, defines: dict[str, int]) -> Launch:
        self.add(Kernel(source, name, **defines))
        return lambda grid, block, args, shared: None

    def add(self, kernel: Kernel) -> None:
        self.kernels.setdefault((kernel.source, kernel.name, *sorted(kernel.defines.items())), kernel)


@cache
def common() -> tuple[Kernel, ...]:
    """Each variant once, for activations in float16 and in bfloat16."""
    modules = list(_modules())
    with _recording() as recorder:
        for half in HALVES:
            _between(half)
            _linears(half)
            _experts(half)
            _delta(half)
            _short_conv(half)
            _selective_scan(half)
            for storage in STORAGES:
                stored = dense_kv_dtype(half) if storage == FLOAT16 else storage
                for heads in HEADS:
                    _attention(half, heads, stored)
                    if stored == INT4:  # with what `lmkit quantize --kv-bits 4` finds
                        _attention(half, heads, stored, balanced=True)
                _plain_heads(half, stored)
                for num_heads in LATENT_HEADS:
                    _wide(half, (num_heads, 1, ROW), ROW_ROTARY, stored, latent=True)
                _wide(half, WIDE_HEADS, WIDE_HEADS[2] // 4, stored, latent=False)
        for kernel in (kernel for size in NUM_RANKS for kernel in (*ranks.kernels(size), *stages.kernels(size))):
            recorder.add(kernel)
        for each in modules:  # a module's constant kernel may belong to no op
            for kernel in filter(lambda value: isinstance(value, Kernel), vars(each).values()):
                recorder.add(kernel)
    return tuple(recorder.kernels.values())


@contextmanager
def _recording() -> Iterator[Recorder]:
    before, recorder = dict(module.BACKENDS), Recorder()
    module.BACKENDS.update({DEVICE: recorder, "cpu": recorder})  # "cpu": as if a GPU were emulated there
    try:
        yield recorder
    finally:
        module.BACKENDS.clear()
        module.BACKENDS.update(before)


def _modules() -> Iterator[ModuleType]:
    package = lmkit.kernels.cuda
    for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        yield importlib.import_module(info.name)


def _ours(op: Op, **traits: Any) -> Implementation | None:
    """This package's implementation, if it has one."""
    found = op.select("cuda", **traits)
    return None if found.device == "any" else found


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=DEVICE)


def _between(half: torch.dtype) -> None:
    """Run the ops between products."""
    for rows, hidden in itertools.product((1, 64), SIZES):
        x, stream, weight = _empty(rows, hidden, dtype=half), _empty(rows, hidden), _empty(hidden)
        if (norm := _ours(ops.rms_norm)) is not None:
            norm(stream, Norm(weight, 1e-5, None, half))
            norm(x, Norm(weight, 1e-5, stream, half))
            norm(_empty(rows, 32, 128, dtype=half), Norm(_empty(128), 1e-5, None, half))
        if (activate := _ours(ops.ungated_activation)) is not None:
            activate(x, "relu")
        if (grown := _ours(query_ops.grown_queries)) is not None:
            grown(_empty(rows, 32, 128, dtype=half), _empty(rows, dtype=torch.int32), Growth(0.1, 8192))
        if (positions := _ours(ops.add_positions)) is not None:
            positions(stream, _empty(SEQUENCES, hidden), _empty(rows, dtype=torch.int32))
        if (gate := _ours(ops.gated_activation)) is not None:
            gate(_empty(rows, 2 * hidden, dtype=half), "silu")
        ids = _empty(rows, dtype=torch.int64)
        if (embedding := _ours(ops.embedding)) is not None:
            embedding(_empty(VOCAB, hidden, dtype=half), ids)
            embedding(stream, ids)
        if (gather := _ours(ops.gather_columns)) is not None:
            gather(x, _empty(hidden, dtype=torch.int32))
        if (angles := _ours(ops.rope_angles)) is not None:
            angles(_empty(rows, dtype=torch.int32), _empty(64), 1.0)


def _linears(half: torch.dtype) -> None:
    """Run 4-bit groups of 128 in every size and number of tokens, and other formats in one."""
    for n, k in WEIGHTS:
        for tokens in TOKENS:
            _linear(ops.linear_w4a16, int_scheme(4, 128), half, n, k, tokens)
    for tokens in TOKENS[::2]:
        _linear(ops.linear_w4a8, int_scheme(4, 128), half, *WEIGHTS[0], tokens)
    for op, scheme in (
        (ops.linear_w4a16, int_scheme(4, 32)),
        (ops.linear_w4a8, int_scheme(4, 32)),
        (ops.linear_w4a8, int_scheme(4, -1)),
        (ops.linear_w8a16, int_scheme(8, 128)),
        (ops.linear_w8a8, int_scheme(8, -1, symmetric=True)),
        (ops.linear_w8a16, QuantScheme(E2M1.plain, 32)),
        (ops.linear_w8a16, QuantScheme(E2M1.plain, 16)),
        *((plane_ops.linear_split, scheme) for scheme in PLANES),
        (ops.linear_fp8, float8_scheme()),
        (ops.linear_fp8_a8, float8_scheme()),
        (ops.linear_fp8_a8, float8_scheme(128, 128)),
    ):
        for tokens in (1, 16, 512):
            _linear(op, scheme, half, *WEIGHTS[0], tokens)
    for tokens in (1, 16, 512):
        _dense(half, tokens)
    weight = _empty(VOCAB, HIDDEN, dtype=half)
    for tokens in TOKENS:
        invariant_product(_empty(tokens, HIDDEN, dtype=half), weight, None, None, half, None)


def _experts(half: torch.dtype) -> None:
    """Run 4-bit groups of 128 for few and many tokens of an expert."""
    scheme = int_scheme(4, 128)
    rounding = ops.linear_w4a16, ops.linear_w4a8
    for op, tokens, (n, k, activation) in itertools.product(rounding, EXPERT_TOKENS, EXPERTS):
        impl = _ours(op, out_features=n, in_features=k, group_size=128, bits=4)
        if impl is None or impl.of_experts is None:
            return
        table = impl.of_experts.table([(impl.pack(_weight(scheme, n, k), activation), None)] * 128)
        places = ops.Places(*(_empty(*size, dtype=torch.int64) for size in ((8 * tokens,), (tokens, 8), (385,))))
        x = _empty(tokens if activation else 8 * tokens, k, dtype=half)
        impl.of_experts.multiply(x, places, table, activation is not None)
    if (add := _ours(ops.add_shared)) is not None:
        add(_empty(8, HIDDEN), _empty(8, HIDDEN, dtype=half), None)


def _delta(half: torch.dtype) -> None:
    """Run linear attention, with a decay for each head, and with one for each row of a state."""
    for decays in (1, DELTA[2]):
        _delta_of(half, decays)


def _delta_of(half: torch.dtype, decays: int) -> None:
    key_heads, value_heads, key_dim, value_dim, kernel = DELTA
    values = value_heads * value_dim
    channels = 2 * key_heads * key_dim + values
    of_heads = _empty(value_heads)
    of_rows = _empty(value_heads * decays)
    weights = DeltaWeights(_empty(channels, kernel), of_heads, of_rows, _empty(value_dim), 1e-6, decays > 1)
    states = RecurrentStates(
        _empty(SEQUENCES, channels, kernel - 1),
        _empty(SEQUENCES, value_heads, key_dim, value_dim),
        _empty(SEQUENCES, 0, channels + (1 + decays) * value_heads),
    )
    if (advance := _ours(ops.gated_delta, key_dim=key_dim, kernel=kernel)) is not None:
        y, gates = _empty(SEQUENCES, channels + values, dtype=half), _empty(SEQUENCES, (1 + decays) * value_heads)
        advance(y, gates, weights, states, *_sequences())


def _sequences() -> tuple[torch.Tensor, BatchGeometry]:
    """What ops of recurrent blocks read of a step's sequences."""
    rows, starts, lens = (_empty(SEQUENCES, *size, dtype=torch.int32) for size in ((ROW_FIELDS,), (), ()))
    return rows, BatchGeometry(starts, lens, _empty(SEQUENCES, 1, dtype=torch.int32), lens)


def _short_conv(half: torch.dtype) -> None:
    """Run a short convolution."""
    channels, kernel = CONV
    states = (_empty(SEQUENCES, *size) for size in ((channels, kernel - 1), (0, 0, 0), (0, channels)))
    if (advance := _ours(recurrent_ops.short_conv, kernel=kernel)) is not None:
        y, weights = _empty(SEQUENCES, 3 * channels, dtype=half), ConvWeights(_empty(channels, kernel))
        advance(y, weights, RecurrentStates(*states), *_sequences())


def _selective_scan(half: torch.dtype) -> None:
    """Run the scan of Mamba-2."""
    heads, dim, size, groups, kernel = SCAN
    inner, channels = heads * dim, heads * dim + 2 * groups * size
    states = (
        _empty(SEQUENCES, *shape) for shape in ((channels, kernel - 1), (heads, size, dim), (0, channels + heads))
    )
    if (advance := _ours(recurrent_ops.selective_scan, kernel=kernel, state_size=size)) is not None:
        taps, of_heads = ConvWeights(_empty(channels, kernel)), _empty(heads)
        weights = ScanWeights(taps, of_heads, of_heads, of_heads, _empty(inner), 1e-6, groups)
        y = _empty(SEQUENCES, inner + channels + heads, dtype=half)
        advance(y, weights, RecurrentStates(*states), *_sequences())


def _linear(op: Op, scheme: QuantScheme, half: torch.dtype, n: int, k: int, tokens: int) -> None:
    kind = {"group_size": scheme.group_size, "bits": scheme.bits, "values": scheme.codes.values, "scheme": scheme}
    impl = _ours(op, out_features=n, in_features=k, **kind)
    if impl is None:
        return
    weight = _weight(scheme, n, k)
    for activation in (None, "silu"):
        _call_linear(impl, impl.pack(weight, activation), half, n, k, tokens)


def _weight(scheme: QuantScheme, n: int, k: int) -> QTensor:
    codes, whole = scheme.codes, scheme.scales != NUMBERS
    dtype = torch.int8 if whole else torch.float16 if codes.uniform else torch.float32
    scales = _empty(n, scheme.num_groups(k), dtype=dtype)
    zeros, factor = scheme.scales.like(scales, codes.zeros(scales.shape).to(DEVICE))
    factor = None if factor is None else factor.to(DEVICE)
    return QTensor(_empty(n, k, dtype=codes.element), scales, zeros, scheme, factor=factor)


def _dense(half: torch.dtype, tokens: int) -> None:
    impl = _ours(ops.linear_dense, out_features=VOCAB, in_features=HIDDEN, dtype=half)
    if impl is not None:
        packed = impl.pack(_empty(VOCAB, HIDDEN, dtype=half))
        _call_linear(impl, packed, half, VOCAB, HIDDEN, tokens)


def _call_linear(impl: Implementation, packed: Any, half: torch.dtype, n: int, k: int, tokens: int) -> None:
    x = _empty(tokens, k, dtype=half)
    impl(x, packed, None, None)
    impl(_empty(tokens, k), packed, None, Norm(_empty(k), 1e-5, None, half))
    if impl.epilogue and packed.activation is None:
        impl(x, packed, None, None, residual=_empty(tokens, n))
        impl(x, packed, None, None, dtype=torch.float32)


def _attention(
    half: torch.dtype, heads: tuple[int, int, int, float], storage: KVDtype, *, balanced: bool = False
) -> None:
    num_heads, num_kv_heads, dim, softcap = heads
    traits = {"rotary_dim": dim, "head_dim": dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    caches = _kv(num_kv_heads, dim, storage), _kv(num_kv_heads, dim, storage)
    if balanced:
        caches = _balanced(*caches)
    tables = _empty(SEQUENCES, BLOCKS // SEQUENCES, dtype=torch.int32)
    for tokens in (SEQUENCES, 64 * SEQUENCES):  # decoding, and prompts
        q = _empty(tokens, num_heads, dim, dtype=half)
        k, v = (_empty(tokens, num_kv_heads, dim, dtype=half) for _ in range(2))
        cos, sin = (_empty(tokens, dim // 2) for _ in range(2))
        starts, lens = (_empty(SEQUENCES + extra, dtype=torch.int32) for extra in (1, 0))
        slots = _empty(tokens, dtype=torch.int32)
        if (append := _ours(ops.rope_append, **traits)) is not None:
            append(q, k, v, cos, sin, *caches, slots)
        if (attend := _ours(ops.rope_paged_attention, **traits)) is not None:
            geometry = BatchGeometry(starts, lens, tables, slots)
            attend(q, k, v, cos, sin, *caches, geometry, AttentionSpec(dim**-0.5, softcap=softcap))
    if balanced:
        return
    kernel, *_ = variant(
        half == torch.bfloat16, (dim, dim), (storage, storage), 0, DEVICE, capped=softcap > 0, part_keys=PART_KEYS
    )
    kernel.compile(DEVICE)


def _wide(half: torch.dtype, heads: tuple[int, int, int], rotary: int, storage: KVDtype, *, latent: bool) -> None:
    """Run attention over wide rows, to new tokens and to prompts."""
    num_heads, num_kv_heads, dim = heads
    traits = {"head_dim": dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "rotary_dim": rotary}
    k_cache, tables = _kv(num_kv_heads, dim, storage), _empty(SEQUENCES, BLOCKS // SEQUENCES, dtype=torch.int32)
    v_cache = k_cache if latent else _kv(num_kv_heads, dim, storage)
    attend = _ours(ops.rope_paged_attention, latent=latent, **traits)
    for tokens in (SEQUENCES, 64 * SEQUENCES):
        q, row = _empty(tokens, num_heads, dim, dtype=half), _empty(tokens, num_kv_heads, dim, dtype=half)
        cos, sin = (_empty(tokens, rotary // 2) for _ in range(2))
        starts, lens = (_empty(SEQUENCES + extra, dtype=torch.int32) for extra in (1, 0))
        geometry = BatchGeometry(starts, lens, tables, _empty(tokens, dtype=torch.int32))
        if attend is not None:
            attend(q, row, row, cos, sin, k_cache, v_cache, geometry, AttentionSpec(dim**-0.5))


def _plain_heads(half: torch.dtype, storage: KVDtype) -> None:
    """Run a prompt of latent attention over plain keys and values."""
    heads, (nope, rank, width) = LATENT_HEADS[0], PLAIN
    rows = _ours(latent_ops.kv_rows, head_dim=ROW, dtype=half)
    expand, attend = (
        _ours(latent_ops.plain_heads),
        _ours(ops.paged_attention, head_dim=ROW_ROTARY + nope, num_heads=heads, num_kv_heads=heads),
    )
    if rows is None or expand is None or attend is None:
        return
    table = _empty(1, BLOCKS, dtype=torch.int32)
    found = rows(_kv(1, ROW, storage), table[0], BLOCK, half)
    k, v = expand(found, _empty(heads, rank, nope, dtype=half), _empty(heads, width, rank, dtype=half))
    start, lens = (_empty(size, dtype=torch.int32) for size in (2, 1))
    geometry = BatchGeometry(start, lens, table, table[0])
    attend(_empty(BLOCK, heads, ROW_ROTARY + nope, dtype=half), k, v, geometry, AttentionSpec(ROW**-0.5))


def _balanced(k_cache: KVTensor, v_cache: KVTensor) -> tuple[KVTensor, KVTensor]:
    """With matrices of keys, means at as many pairs as a calibration takes, and vectors of position 0."""
    heads, dim = k_cache.data.shape[1], k_cache.dim
    first, matrices = _empty(heads, dim), _empty(heads, dim, dim)
    mean = KeyMean(first, _empty(heads, MEAN_PAIRS, dtype=torch.int32), _empty(dim // 2, 2, BLOCK))
    k_cache = replace(k_cache, mean=mean, balance=Balance(matrices, matrices), first=first)
    return k_cache, replace(v_cache, first=first)


def _kv(num_kv_heads: int, dim: int, storage: KVDtype) -> KVTensor:
    shape, count = (BLOCKS, num_kv_heads, BLOCK), storage.num_params(dim)
    data = _empty(*shape, storage.columns(dim), dtype=getattr(torch, storage.element))
    params = _empty(*((*shape, count) if count else (0,)), dtype=torch.float16)
    return KVTensor(data, params, storage)
