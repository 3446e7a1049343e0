"""Inputs for every op: odd shapes that are multiples of nothing, and values at the edges. `make` builds each case."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lmkit.attention_spec import AttentionSpec, Growth
from lmkit.formats.mxfp4 import MXFP4
from lmkit.kernels import index_ops, ops, query_ops, recurrent_ops
from lmkit.kernels.delta import DeltaWeights
from lmkit.kernels.ops import Balance, BatchGeometry, KeyMean, KVTensor, Norm
from lmkit.kernels.recurrent import RecurrentStates
from lmkit.kernels.registry import Implementation, Op
from lmkit.kernels.selective_scan import ScanWeights
from lmkit.kernels.short_conv import ConvWeights
from lmkit.kv_dtype import BFLOAT16, FLOAT16, FLOAT32, FP8, INT2, INT3, INT4, INT8, KVDtype
from lmkit.layers.batch import KVLayer, allocate_kv
from lmkit.qtensor import QTensor, float8_scheme, int_scheme, quantize

F32_TOLERANCE, BF16_TOLERANCE = 3e-6, 8e-3  # of the largest result
# Attention on codes: queries of int8 keys and weights are words of 15 bits. A score errs by 2^-16 of the largest query
# times sqrt(D) keys. This is some 1e-4 for the scores of +-20 here. A weight errs as much, relatively.
WORD_TOLERANCE = 5e-4
SPLIT_TOLERANCE = 1e-5  # linears on tile registers: an activation keeps 16 bits
PLANES_TOLERANCE = 5e-5  # attention on tile registers: each number of a query and each weight keeps 16 bits


@dataclass(frozen=True)
class Case:
    """`make` returns the op's arguments. The second argument of a linear is the weight to pack. `tolerance` 0 means the
    same bits."""

    op: Op
    name: str
    make: Callable[[], tuple[Any, ...]]
    traits: dict[str, Any]
    tolerance: float = F32_TOLERANCE
    brief: bool = False  # one of the few that are also run for each instruction set

    @property
    def id(self) -> str:
        return f"{self.op.name}-{self.name}"


def run(implementation: Implementation, case: Case, device: str = "cpu") -> list[Tensor]:
    """Everything that the op returns or writes."""
    args = tuple(_to(arg, device) for arg in case.make())
    norms = [arg for arg in args if isinstance(arg, Norm)]
    streams = [norm.residual for norm in norms if norm.residual is not None]
    if case.op is ops.linear_heads:
        return [implementation(args[0], implementation.pack(args[1]))]
    if case.op.name.startswith("linear"):
        x, weight, bias, norm, activation = args
        return [implementation(x, implementation.pack(weight, activation), bias, norm), *streams]
    result = implementation(*args)
    if result is None:  # the op writes into its arguments
        places = {ops.rope_append.name: slice(2), ops.add_positions.name: slice(1), ops.keep.name: slice(2, 3)}
        changed = args[places.get(case.op.name, slice(0))]
        caches = [arg for arg in args if isinstance(arg, KVTensor)]
        return [*changed, *(part for cache in caches for part in (cache.data, cache.params))]
    states = [part for arg in args if isinstance(arg, RecurrentStates) for part in vars(arg).values()]
    return [*result] if isinstance(result, tuple) else [result, *streams, *states]


def _to(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Norm):
        residual = None if value.residual is None else value.residual.to(device)
        bias = None if value.bias is None else value.bias.to(device)
        return Norm(value.weight.to(device), value.eps, residual, value.dtype, bias)
    if isinstance(value, KVTensor):
        moved = {name: _to(part, device) for name, part in vars(value).items() if name != "dtype"}
        return replace(value, **moved)
    if isinstance(value, KeyMean | Balance):
        return replace(value, **{name: part.to(device) for name, part in vars(value).items()})
    if isinstance(value, RecurrentStates):
        return RecurrentStates(*(part.to(device) for part in vars(value).values()))
    if isinstance(value, DeltaWeights | ConvWeights | ScanWeights):
        return replace(value, **{k: _to(v, device) for k, v in vars(value).items()})
    if isinstance(value, BatchGeometry):
        return BatchGeometry(*(part.to(device) for part in vars(value).values()))
    if isinstance(value, QTensor):
        return QTensor(value.codes.to(device), value.scales.to(device), value.zeros.to(device), value.scheme)
    return value


def difference(got: list[Tensor], expected: list[Tensor]) -> float:
    """The largest absolute difference over the largest expected magnitude. Shapes and dtypes must agree."""
    worst = 0.0
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if b.numel():
            a, b = a.cpu().double(), b.cpu().double()
            assert bool(b.isfinite().all())
            worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)))
    return worst


def _seeded(make: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
    def seeded() -> tuple[Any, ...]:
        torch.manual_seed(1)
        return make()

    return seeded


def all_cases() -> list[Case]:
    return [
        *elementwise_cases(), *rope_cases(), *kv_cases(), *attention_cases(), *key_cases(), *balanced_cases(),
        *linear_cases(), *rope_attention_cases(), *draw_cases(), *delta_cases(), *conv_cases(), *scan_cases(),
        *choice_cases(),
    ]  # fmt: skip


def elementwise_cases() -> Iterator[Case]:
    for shape in ((1, 64), (7, 130), (3, 5, 7), (0, 16), (70, 515)):
        for dtype in (torch.float32, torch.bfloat16):
            tolerance = F32_TOLERANCE if dtype == torch.float32 else BF16_TOLERANCE
            name = f"{shape}-{dtype}"

            def norm(shape: tuple[int, ...] = shape, dtype: torch.dtype = dtype) -> tuple[Any, ...]:
                return (torch.randn(shape) * 50).to(dtype), Norm(torch.randn(shape[-1]), 1e-5)

            def add_norm(shape: tuple[int, ...] = shape, dtype: torch.dtype = dtype) -> tuple[Any, ...]:
                norm = Norm(torch.rand(shape[-1]), 1e-2, torch.randn(shape).to(dtype))
                return torch.randn(shape).to(dtype), norm

            def gated(activation: str, shape: tuple[int, ...] = shape, dtype: torch.dtype = dtype) -> tuple[Any, ...]:
                return (torch.randn(shape[0], 2 * shape[-1]) * 60).to(dtype), activation

            def layer_norm(make: Any = add_norm) -> tuple[Any, ...]:
                x, norm = make()
                return x, replace(norm, bias=torch.randn(x.shape[-1]))

            yield Case(ops.rms_norm, name, _seeded(norm), {}, tolerance)
            for activation in ops.ACTIVATIONS:
                make = functools.partial(gated, activation)
                yield Case(ops.gated_activation, f"{activation}-{name}", _seeded(make), {}, tolerance)
            if len(shape) == 2:
                yield Case(ops.rms_norm, f"{name}-residual", _seeded(add_norm), {}, tolerance)
                yield Case(ops.rms_norm, f"{name}-bias", _seeded(layer_norm), {}, tolerance)
    yield Case(ops.rms_norm, "strided", _seeded(_strided_heads), {})
    for dtype in (torch.float32, torch.bfloat16, torch.float16):

        def embed(dtype: torch.dtype = dtype) -> tuple[Any, ...]:
            return torch.randn(40, 30).to(dtype), torch.randint(40, (9,))

        yield Case(ops.embedding, str(dtype), _seeded(embed), {}, 0)
        scaled = _seeded(lambda embed=embed: (*embed(), 55.5))
        yield Case(ops.embedding, f"{dtype}-scaled", scaled, {}, 0)
        gather = _seeded(lambda dtype=dtype: (torch.randn(7, 130).to(dtype), torch.randperm(130).int()))
        yield Case(ops.gather_columns, str(dtype), gather, {}, 0)
    for which, tolerance in (("relu", 0), ("gelu", 1e-6), ("relu2", 0)):
        wide = _seeded(lambda: (torch.randn(7, 130) * 3,))
        yield Case(ops.ungated_activation, which, lambda wide=wide, which=which: (*wide(), which), {}, tolerance)
    for heads in (1, 3):

        def growing(heads: int = heads) -> tuple[Any, ...]:
            q = torch.randn(7, 5 * heads * 10)[:, 4 : 4 + heads * 10].unflatten(1, (heads, 10))
            return q, torch.tensor([0, 6, 7, 13, 14, 500, 90000]).int(), Growth(0.3, 7, heads - 1)

        yield Case(query_ops.grown_queries, f"{heads}", _seeded(growing), {}, 1e-6)
    rows = _seeded(lambda: (torch.randn(7, 30), torch.randn(40, 30), torch.randint(40, (7,)).int()))
    yield Case(ops.add_positions, "positions", rows, {}, 0)
    gates = _seeded(lambda: (torch.randn(7, 48), torch.randn(7, 130)[:, 70:118] * 20))
    for which in ("sigmoid", "silu", "gelu_tanh", "gelu_exact"):
        yield Case(ops.multiply_gates, which, lambda which=which: (*gates(), which), {}, 1e-5)
    for which in ("plain", "residual"):

        def kept(which: str = which) -> tuple[Any, ...]:
            return torch.randn(7, 30), torch.randn(7, 30) if which == "residual" else None, torch.zeros(7, 90)[:, 30:60]

        yield Case(ops.keep, which, _seeded(kept), {}, 0)
        yield Case(ops.keep, f"{which}-scaled", _seeded(lambda kept=kept: (*kept(), 0.75)), {}, 0)
    for shape in ((1, 4096), (3, 199), (0, 7)):
        yield Case(ops.softcap, str(shape), _seeded(lambda shape=shape: (torch.randn(shape) * 40, 30.0)), {}, 1e-5)
    yield Case(ops.softcap, "extremes", lambda: (torch.tensor([[0.0, 1e-6, -1e30, 1e30, 3.0]]), 2.0), {}, 1e-5)
    yield Case(ops.rope_angles, "long", _seeded(_positions), {})


def _strided_heads() -> tuple[Any, ...]:
    """Heads in the middle of a wider tensor."""
    return torch.randn(9, 5, 24)[:, 1:4], Norm(torch.randn(24), 1e-5)


def _positions() -> tuple[Any, ...]:
    return torch.tensor([0, 1, 77, 131071]).int(), 1 / 5e5 ** torch.linspace(0, 1, 20), 1.3


def rope_cases() -> Iterator[Case]:
    for heads, kv_heads, dim, rotary, dtype in (
        (3, 1, 16, 16, torch.float32),
        (4, 2, 80, 20, torch.float32),
        (2, 2, 6, 6, torch.bfloat16),
    ):
        for fused in (False, True):  # q, k and v may be views into one tensor

            def rotate(
                heads: int = heads,
                kv: int = kv_heads,
                d: int = dim,
                r: int = rotary,
                t: Any = dtype,
                fused: bool = fused,
            ) -> tuple[Any, ...]:
                whole, angles = torch.randn(9, heads + 2 * kv, d).to(t), torch.rand(9, r // 2) * 7
                parts = whole.split((heads, kv, kv), dim=1)
                cache = allocate_kv(4, kv, 4, d, (FLOAT32, BFLOAT16))
                slots = torch.tensor([3, 0, 1, 15, 9, -1, 4, 5, 6]).int()
                return (
                    *(part if fused else part.contiguous() for part in parts),
                    angles.cos(), angles.sin(), cache.k, cache.v, slots,
                )  # fmt: skip

            traits = {"rotary_dim": rotary, "head_dim": dim, "num_heads": heads, "num_kv_heads": kv_heads}
            tolerance = F32_TOLERANCE if dtype == torch.float32 else BF16_TOLERANCE
            yield Case(ops.rope_append, f"{dim}-{rotary}-{dtype}-{fused}", _seeded(rotate), traits, tolerance)


KV_TYPES = (
    (FLOAT32, BFLOAT16), (INT8, INT8), (INT4, INT8), (INT8, INT4), (FLOAT16, INT4),
    (FP8, FP8), (INT4, FP8), (FP8, FLOAT32),
)  # fmt: skip
HEADS = ((2, 3, 16, 4), (1, 4, 80, 32), (3, 1, 6, 7), (2, 2, 128, 1))  # KV heads, queries a KV head, D, block size


def names(types: tuple[KVDtype, KVDtype]) -> str:
    return "-".join(map(str, types))


def _heads(kv_heads: int, group: int, dim: int) -> dict[str, Any]:
    return {"num_heads": kv_heads * group, "num_kv_heads": kv_heads, "head_dim": dim}


def kv_cases() -> Iterator[Case]:
    """Cases whose codes and parameters must equal the reference's, bit for bit."""
    for types in KV_TYPES:
        for heads, group, dim, block_size in HEADS:
            for dtype in (torch.float32, torch.bfloat16):

                def append(
                    types: Any = types, h: int = heads, d: int = dim, size: int = block_size, dtype: Any = dtype
                ) -> tuple[Any, ...]:
                    kv = allocate_kv(40 // size + 2, h, size, d, types)
                    k, v = (edge_vectors(30, h, d, FLOAT16 in types).to(dtype) for _ in range(2))
                    slots = torch.randperm(40)[:30].int() + size
                    slots[4] = -1
                    return k, v, kv.k, kv.v, slots

                name = f"{names(types)}-{dim}-{dtype}"
                yield Case(ops.kv_append, name, _seeded(append), _heads(heads, group, dim), 0)


def edge_vectors(num_tokens: int, heads: int, dim: int, narrow: bool = False) -> Tensor:
    """Ordinary vectors, and constant, nearly constant, tiny, huge and one-sided ones. `narrow`: all fit float16."""
    x = torch.randn(num_tokens, heads, dim)
    x[0], x[1], x[2] = 0.0, 1.0003, -7.0
    x[3] = 1000.3
    x[3, :, 0] += 1e-4
    x[4] *= 1e-6
    x[5] *= 1e-30
    x[6] *= 2e4 if narrow else 1e6
    x[7] = 30000 + x[7]
    x[8] = x[8].abs()
    return x


LENGTHS = ((1, 1), (5, 5), (33, 1), (700, 2), (290, 129), (64, 64))  # (tokens in the cache, new tokens among them)


def filled_cache(
    types: tuple[KVDtype, KVDtype], kv_heads: int, dim: int, block_size: int, lengths: list[int]
) -> tuple[KVLayer, Tensor]:
    """(a layer holding sequences of these lengths in shuffled blocks, block tables)."""
    counts = [-(-n // block_size) for n in lengths]
    kv = allocate_kv(sum(counts) + 1, kv_heads, block_size, dim, types)
    order = torch.randperm(sum(counts)) + 1
    tables, slots, used = torch.zeros(len(lengths), max(counts), dtype=torch.int32), [], 0
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[b, :count] = order[used : used + count]
        used += count
        t = torch.arange(length)
        slots.append(tables[b, t // block_size] * block_size + t % block_size)
    total = sum(lengths)
    k, v = torch.randn(total, kv_heads, dim) * 2, torch.randn(total, kv_heads, dim)
    k[0], v[0] = 1.5, -2.0  # a constant vector has scale 0
    ops.kv_append.named("reference")(k, v, kv.k, kv.v, torch.cat(slots).int())
    return kv, tables


def geometry(query_start: list[int], lengths: list[int], tables: Tensor, slots: Tensor | None = None) -> BatchGeometry:
    """The geometry of a batch. Without `slots`, it is for ops that append nothing."""
    nowhere = torch.full((query_start[-1],), -1) if slots is None else slots
    return BatchGeometry(torch.tensor(query_start).int(), torch.tensor(lengths).int(), tables, nowhere.int())


SOFTCAP = 5.0  # of scores of some +-20
WINDOWS = ((0, 0), (3, 0), (300, 0), (3, 2), (40, 300), (300, 7), (40, 1000))  # and the sinks


def attention_cases() -> Iterator[Case]:
    for types in KV_TYPES:
        for heads, group, dim, block_size in HEADS:
            for window, sinks, softcap in (*((*w, 0.0) for w in WINDOWS), (0, 0, SOFTCAP), (40, 5, SOFTCAP)):
                if window and types != KV_TYPES[0]:
                    continue

                def attend(
                    types: Any = types,
                    h: int = heads,
                    g: int = group,
                    d: int = dim,
                    size: int = block_size,
                    spec: AttentionSpec = AttentionSpec(dim**-0.5, window, sinks, softcap),
                ) -> tuple[Any, ...]:
                    lengths, new = [n for n, _ in LENGTHS], [n for _, n in LENGTHS]
                    kv, tables = filled_cache(types, h, d, size, lengths)
                    query_start = torch.tensor([0, *new]).cumsum(0).tolist()
                    q = torch.randn(sum(new), h * g, d) * 2
                    return q, kv.k, kv.v, geometry(query_start, lengths, tables), spec

                name = f"{names(types)}-{dim}-{window}" + (f"-{sinks}" if sinks else "") + "-softcap" * bool(softcap)
                brief = types in (KV_TYPES[0], KV_TYPES[2]) and dim in (128, 6) and not window
                brief |= types in ((FP8, FP8), (FLOAT32, BFLOAT16)) and dim in (16, 80)
                tolerance = WORD_TOLERANCE if {INT8, INT4} & set(types) else F32_TOLERANCE
                yield Case(ops.paged_attention, name, _seeded(attend), _heads(heads, group, dim), tolerance, brief)
                if not softcap and not sinks:

                    def with_sinks(make: Any = attend, count: int = heads * group) -> tuple[Any, ...]:
                        return *make(), torch.randn(count) * 3

                    label = f"{name}-learned"
                    yield Case(ops.paged_attention, label, _seeded(with_sinks), _heads(heads, group, dim), tolerance)

    for types, dim in (((INT3, INT3), 64), ((INT2, INT3), 96), ((INT3, INT8), 128), ((FLOAT32, INT2), 32)):

        def levels(types: Any = types, dim: int = dim) -> tuple[Any, ...]:
            """Few rows, which read the storage, many rows, which read copies, and three heads of a group."""
            kv, tables = filled_cache(types, 2, dim, 16, [70, 300, 9])
            return (
                torch.randn(26, 6, dim) * 2,
                kv.k,
                kv.v,
                geometry([0, 1, 25, 26], [70, 300, 9], tables),
                (AttentionSpec(dim**-0.5)),
            )

        yield Case(ops.paged_attention, f"{names(types)}-{dim}", _seeded(levels), _heads(2, 3, dim), WORD_TOLERANCE)

    for dim in (256, 320):

        def largest(dim: int = dim) -> tuple[Any, ...]:
            """Every code of a query and of every third key is the largest, so that sums are as large as possible."""
            kv, tables = filled_cache((INT4, FLOAT32), 2, dim, 16, [100])
            kv.k.data.fill_(0)
            kv.k.data[:, :, ::3] = 255
            kv.k.params[:] = torch.tensor([2.0**-9, 0])
            return torch.ones(2, 8, dim), kv.k, kv.v, geometry([0, 2], [100], tables), AttentionSpec(0.25)

        yield Case(ops.paged_attention, f"largest-int4-{dim}", _seeded(largest), _heads(2, 4, dim), F32_TOLERANCE)

    def bfloat16() -> tuple[Any, ...]:
        kv, tables = filled_cache((BFLOAT16, BFLOAT16), 2, 16, 8, [40])
        q = torch.randn(3, 4, 16).bfloat16()
        return q, kv.k, kv.v, geometry([0, 3], [40], tables), AttentionSpec(0.25)

    yield Case(ops.paged_attention, "bfloat16-q", _seeded(bfloat16), _heads(2, 2, 16), BF16_TOLERANCE)


KEYS = (  # types, KV heads, queries a KV head, D, rotary dim, first position (keys before are zero), window
    ((FLOAT32, FLOAT32), 2, 3, 16, 16, 0, 0),
    ((BFLOAT16, INT8), 1, 2, 80, 20, 0, 3),
    ((INT8, INT8), 2, 3, 16, 16, 33000, 300),
    ((INT4, INT4), 2, 2, 64, 64, 0, 0),
    ((INT4, FP8), 1, 4, 64, 32, 0, 0),
    ((FP8, INT4), 2, 2, 6, 6, 0, 0),
)


def key_mean(kv_heads: int, dim: int, rotary: int, positions: int) -> KeyMean:
    """A mean with a large b at some pairs. The last head has fewer pairs."""
    half = rotary // 2
    count = min(half, 5)
    pairs = torch.stack([torch.randperm(half)[:count] for _ in range(kv_heads)]).int()
    vector = torch.zeros(kv_heads, dim)
    for head, of_head in enumerate(pairs.long()):
        vector[head, of_head] = torch.randn(count) * 30
        vector[head, of_head + half] = torch.randn(count) * 30
    vector[-1, pairs[-1, 0].long()] = vector[-1, pairs[-1, 0].long() + half] = 0
    inv_freq = 1.0 / 5e5 ** (torch.arange(half) / half)
    cos, sin = ops.rope_angles.named("reference")(torch.arange(positions).int(), inv_freq, 1.1)
    return KeyMean(vector, pairs, torch.stack([cos.T, sin.T], dim=1).contiguous())


def balance(kv_heads: int, dim: int) -> Balance:
    """Matrices whose rows have lengths from 1/4 to 4."""
    lengths = torch.logspace(-2, 2, dim, base=2)[:, None]
    of_keys = (torch.linalg.qr(torch.randn(kv_heads, dim, dim))[0] * lengths).contiguous()
    return Balance(of_keys, torch.linalg.inv(of_keys.double()).transpose(1, 2).float().contiguous())


BALANCED = (  # types, KV heads, queries a KV head, D, window, sinks, soft cap, whether keys have a mean, too
    ((FLOAT32, FLOAT32), 2, 3, 16, 0, 0, 0.0, True),
    ((INT4, INT4), 3, 3, 64, 0, 0, 0.0, True),
    ((INT4, INT4), 1, 4, 256, 40, 0, 0.0, True),
    ((INT4, INT8), 2, 9, 80, 40, 3, 0.0, False),
    ((INT8, INT4), 2, 1, 6, 0, 0, 30.0, True),
    ((INT4, FLOAT16), 2, 2, 128, 290, 0, 0.0, False),
)


def balanced_cases() -> Iterator[Case]:
    """Keys multiplied by matrices, and keys and values of position 0 that lack a vector, before and after windows."""
    for types, heads, group, dim, window, sinks, softcap, with_mean in BALANCED:

        def caches(
            num_blocks: int, types: Any = types, heads: int = heads, dim: int = dim, with_mean: bool = with_mean
        ) -> tuple[KVTensor, KVTensor]:
            kv = allocate_kv(num_blocks, heads, 16, dim, types)
            mean = key_mean(heads, dim, dim // 2 // 2 * 2, 16 * num_blocks) if with_mean else None
            k = replace(kv.k, mean=mean, balance=balance(heads, dim), first=torch.randn(heads, dim) * 9)
            return k, replace(kv.v, first=torch.randn(heads, dim) * 5)

        def append(make: Any = caches, heads: int = heads, group: int = group, dim: int = dim) -> tuple[Any, ...]:
            k_cache, v_cache = make(3)
            angles = torch.rand(40, dim // 2 // 2) * 7
            positions = torch.tensor([0, 1, 2, 0, *range(3, 39)]).int()
            q, k, v = torch.randn(40, heads * group, dim), torch.randn(40, heads, dim), torch.randn(40, heads, dim)
            slots = torch.randperm(48)[:40].int()
            return q, k, v, angles.cos(), angles.sin(), k_cache, v_cache, slots, positions

        def attend(
            make: Any = caches, heads: int = heads, group: int = group, dim: int = dim,
            spec: AttentionSpec = AttentionSpec(dim**-0.5, window, sinks, softcap),
        ) -> tuple[Any, ...]:  # fmt: skip
            lengths, new = [300, 1, 60, 700], [1, 1, 60, 30]
            width = -(-max(lengths) // 16)
            k_cache, v_cache = make(len(lengths) * width)
            tables = torch.randperm(len(lengths) * width).view(len(lengths), width).int()
            positions = torch.cat([torch.arange(length) for length in lengths])
            slots = torch.cat([t.repeat_interleave(16)[:n] * 16 for t, n in zip(tables, lengths, strict=True)])
            k, v = torch.randn(2, len(positions), heads, dim)
            at_zero = (positions == 0)[:, None, None]
            assert k_cache.first is not None
            k, v = k + at_zero * k_cache.first, v + at_zero * v_cache.first
            slots = (slots + positions % 16).int()
            ops.kv_append.named("reference")(k, v, k_cache, v_cache, slots, positions.int())
            starts = [0, *itertools.accumulate(new)]
            q = torch.randn(starts[-1], heads * group, dim)
            return q, k_cache, v_cache, geometry(starts, lengths, tables), spec

        traits, name = _heads(heads, group, dim), f"{names(types)}-{dim}-balanced"
        coarse = types[0].coded  # a last bit of the products may carry a number over the edge of a code
        tolerance = 0.07 if coarse else F32_TOLERANCE
        yield Case(ops.rope_append, name, _seeded(append), traits | {"rotary_dim": dim // 2 // 2 * 2}, tolerance)
        exact = {INT8, INT4}.isdisjoint(types)
        tolerance = 5e-5 if exact else 2 * WORD_TOLERANCE
        yield Case(ops.paged_attention, name, _seeded(attend), traits, tolerance, brief=True)


def key_cases() -> Iterator[Case]:
    """Keys without their mean, rotated by the Hadamard matrix, or on fixed scales. They are written, and read like
    plain keys."""
    for types, heads, group, dim, rotary, start, window in KEYS:

        def cache(
            types: Any = types, heads: int = heads, dim: int = dim, rotary: int = rotary, start: int = start
        ) -> tuple[KVTensor, KVTensor, int]:
            length = start + 300
            kv = allocate_kv(-(-length // 16) + 1, heads, 16, dim, types)
            coded = [torch.rand(heads).half().float() / 4 + 0.05 if t.coded else None for t in types]
            k = replace(kv.k, mean=key_mean(heads, dim, rotary, length), hadamard=dim in (16, 64))
            v = replace(kv.v, scales=coded[1])
            return (k if dim != 64 else replace(k, scales=coded[0])), v, length

        def append(make: Any = cache, heads: int = heads, group: int = group, dim: int = dim) -> tuple[Any, ...]:
            k_cache, v_cache, length = make()
            assert k_cache.mean is not None
            slots = torch.randperm(300)[:40].int() + length - 300
            cos, sin = (part[:, slots.long()].T.contiguous() for part in k_cache.mean.table.unbind(1))
            k = torch.randn(40, heads, dim) + k_cache.mean.vector
            q, v = torch.randn(40, heads * group, dim), torch.randn(40, heads, dim)
            return q, k, v, cos, sin, k_cache, v_cache, slots

        def attend(
            softcap: float, make: Any = cache, heads: int = heads, group: int = group, dim: int = dim, w: int = window
        ) -> tuple[Any, ...]:
            k_cache, v_cache, length = make()
            k, v = torch.randn(2, 300, heads, dim)
            slots = torch.arange(length - 300, length).int()
            ops.kv_append.named("reference")(k, v, k_cache, v_cache, slots)
            tables = torch.arange(len(k_cache.data))[None].int().repeat(2, 1)
            lengths = [length, length - 90]
            q = torch.randn(60, heads * group, dim)
            batch = geometry([0, 59, 60], lengths, tables)
            return q, k_cache, v_cache, batch, AttentionSpec(dim**-0.5, w, softcap=softcap)

        traits = {"rotary_dim": rotary} | _heads(heads, group, dim)
        name = f"{names(types)}-{dim}"
        coarse = types[0].coded  # a last bit of the rotation may carry a number over the edge of a code
        yield Case(ops.rope_append, f"{name}-mean", _seeded(append), traits, 0.07 if coarse else BF16_TOLERANCE)
        exact = {INT8, INT4}.isdisjoint(types)  # with the mean, scores are some hundreds, and words err by more there
        tolerance = 5e-5 if exact else 2 * WORD_TOLERANCE
        for softcap in (0.0, 100.0):
            make = _seeded(functools.partial(attend, softcap))
            label = f"{name}-mean" + "-softcap" * bool(softcap)
            yield Case(ops.paged_attention, label, make, _heads(heads, group, dim), tolerance)


def rope_attention_cases() -> Iterator[Case]:
    """Cases of rotation, append and attention in one op."""
    for types, heads, group, dim, rotary in (
        ((FLOAT32, FLOAT32), 2, 3, 16, 16), ((INT8, INT4), 1, 2, 80, 20), ((FP8, BFLOAT16), 2, 1, 64, 64),
    ):  # fmt: skip

        def attend(
            types: Any = types, heads: int = heads, group: int = group, dim: int = dim, rotary: int = rotary
        ) -> tuple[Any, ...]:
            kv, tables = filled_cache(types, heads, dim, 16, [40, 90, 7])
            new = [1, 20, 7]
            where = torch.cat([torch.arange(n - m, n) for n, m in zip([40, 90, 7], new, strict=True)])
            owner = torch.repeat_interleave(torch.arange(3), torch.tensor(new))
            slots = tables[owner, where // 16] * 16 + where % 16
            q, k = torch.randn(28, heads * group, dim), torch.randn(28, heads, dim)
            angles = torch.rand(28, rotary // 2) * 7
            batch, v = geometry([0, 1, 21, 28], [40, 90, 7], tables, slots), torch.randn(28, heads, dim)
            return q, k, v, angles.cos(), angles.sin(), kv.k, kv.v, batch, AttentionSpec(dim**-0.5)

        traits = {"rotary_dim": rotary} | _heads(heads, group, dim)
        tolerance = F32_TOLERANCE if types[0] == FLOAT32 else 2e-3  # a code may round the other way
        yield Case(ops.rope_paged_attention, names(types), _seeded(attend), traits, tolerance)


STATE_ROWS = [  # see kernels.recurrent
    [4, -1, 6, 3, 0, 2], [0, 5, -1, 0, 0, 0], [2, 2, 3, 4, 3, 4], [1, 1, -1, 0, 0, 0],
]  # fmt: skip


def delta_cases() -> Iterator[Case]:
    """Sequences that begin, go on from a snapshot, go on, and have no token, in scattered rows of states. Two end with
    draft tokens, and one begins with the right ones of the step before."""
    sizes = (2, 3, 8, 12, 4), (1, 1, 16, 5, 1), (3, 2, 32, 32, 2)
    layouts = ("", False, 0.0), ("-flat", False, 0.0), ("-rows", True, 0.0), ("-floor", True, -5.0)
    for (key_heads, share, key_dim, value_dim, kernel), (layout, by_row, floor) in itertools.product(sizes, layouts):

        def advance(
            hk: int = key_heads,
            g: int = share,
            dk: int = key_dim,
            dv: int = value_dim,
            size: int = kernel,
            flat: bool = bool(layout),
            decays: int = key_dim if by_row else 1,
            floor: float = floor,
        ) -> Any:
            hv, channels = hk * g, hk * (2 * dk + g * dv)
            query_start, lengths, rows = [0, 7, 8, 13, 13], [7, 30, 9, 4], torch.tensor(STATE_ROWS).int()
            conv, of_heads = torch.randn(channels, size), (torch.randn(hv), torch.randn(hv * decays) * 3)
            more: Any = flat, 1.8 if flat else 1.0, floor, decays > 1
            weights = DeltaWeights(conv, *of_heads, torch.randn(dv), 1e-6, *more)
            drafted = torch.randn(5, 4, channels + (1 + decays) * hv)
            states = RecurrentStates(torch.randn(7, channels, size - 1), torch.randn(7, hv, dk, dv), drafted)
            tokens = query_start[-1]
            y, gates = torch.randn(tokens, hk * (2 * dk + 2 * g * dv)), torch.randn(tokens, (1 + decays) * hv)
            tables = torch.zeros(len(lengths), 1).int()
            return y, gates, weights, states, rows, geometry(query_start, lengths, tables)

        yield Case(
            ops.gated_delta,
            f"{key_heads}x{share}x{key_dim}x{value_dim}x{kernel}{layout}",
            _seeded(advance),
            {},
            brief=True,
        )


def conv_cases() -> Iterator[Case]:
    """As `delta_cases`. 150 channels are more than a tile of the CPU, and no multiple of it."""
    for channels, kernel, bias in ((150, 4, True), (7, 1, False), (128, 3, False)):

        def advance(channels: int = channels, kernel: int = kernel, bias: bool = bias) -> Any:
            query_start, lengths, rows = [0, 7, 8, 13, 13], [7, 30, 9, 4], torch.tensor(STATE_ROWS).int()
            weights = ConvWeights(torch.randn(channels, kernel), torch.randn(channels) if bias else None)
            drafted = torch.randn(5, 4, channels)
            states = RecurrentStates(torch.randn(7, channels, kernel - 1), torch.zeros(7, 0, 0, 0), drafted)
            batch = geometry(query_start, lengths, torch.zeros(len(lengths), 1).int())
            return torch.randn(query_start[-1], 3 * channels), weights, states, rows, batch

        yield Case(recurrent_ops.short_conv, f"{channels}x{kernel}" + "-bias" * bias, _seeded(advance), {}, brief=True)


def scan_cases() -> Iterator[Case]:
    """As `delta_cases`. Tiles of the CPU divide the sizes, or leave rows and columns over."""
    for heads, dim, size, groups, kernel in ((4, 24, 11, 2, 4), (3, 64, 128, 1, 4), (2, 37, 8, 1, 2)):

        def advance(h: int = heads, p: int = dim, n: int = size, g: int = groups, kernel: int = kernel) -> Any:
            query_start, lengths, rows = [0, 7, 8, 13, 13], [7, 30, 9, 4], torch.tensor(STATE_ROWS).int()
            inner, channels = h * p, h * p + 2 * g * n
            taps = ConvWeights(torch.randn(channels, kernel), torch.randn(channels) if g > 1 else None)
            limits = (0.1, 2.0) if g > 1 else (0.0, float("inf"))
            a_log, dt_bias, d = torch.randn(3, h)
            weights = ScanWeights(taps, a_log, dt_bias, d, torch.randn(inner), 1e-5, g, limits)
            states = (torch.randn(7, channels, kernel - 1), torch.randn(7, h, n, p), torch.randn(5, 4, channels + h))
            batch = geometry(query_start, lengths, torch.zeros(len(lengths), 1).int())
            return torch.randn(query_start[-1], inner + channels + h), weights, RecurrentStates(*states), rows, batch

        name = f"{heads}x{dim}x{size}x{groups}x{kernel}"
        yield Case(recurrent_ops.selective_scan, name, _seeded(advance), {}, brief=True)


def choice_cases() -> Iterator[Case]:
    """Sequences that see fewer keys, as many, and more, in scattered blocks. Small whole numbers make many scores
    equal."""
    for kind in (FLOAT32, INT8):

        def make(kind: KVDtype = kind) -> tuple[Any, ...]:
            query_start, lengths, tables = [0, 4, 5, 12], [5, 40, 21], torch.randperm(30)[:24].int().view(3, 8)
            keys = allocate_kv(30, 1, 5, 6, (kind, kind)).k
            ops.kv_append.named("reference")(
                *[torch.randint(-2, 3, (150, 1, 6)).float()] * 2, keys, keys, torch.arange(150)
            )
            q, weights = (torch.randint(-2, 3, shape).float() for shape in ((12, 3, 6), (12, 3)))
            return q, weights, keys, geometry(query_start, lengths, tables), 9

        yield Case(index_ops.chosen_keys, str(kind), _seeded(make), {}, 0)


def draw_cases() -> Iterator[Case]:
    """Rows with ties, hidden tokens and extreme temperatures. The drawn tokens must be the same."""
    for size in (1, 40, 3001):

        def make(size: int = size) -> tuple[Any, ...]:
            logits = (torch.randn(50, size) * 4).round(decimals=1)
            logits[::7, 1::3] = -torch.inf
            rows = torch.randperm(50)[:40]
            temperature = torch.tensor([1e-3, 0.7, 1.0, 3.0, 1e3]).double().repeat(8)
            top_k = torch.tensor([0, 1, 5, size, size + 9, 0, 0, 3]).repeat(5)
            top_p = torch.tensor([1.0, 0.9, 0.5, 0.01, 1 - 2**-53], dtype=torch.float64).repeat_interleave(8)
            min_p = torch.tensor([0.0, 0.0, 0.1, 1.0]).double().repeat(10)
            share = torch.rand(40, dtype=torch.float64)
            share[:3] = torch.tensor([0.0, 1 - 2**-53, 0.5], dtype=torch.float64)
            return logits, rows, temperature, top_k, top_p, min_p, share

        yield Case(ops.draw, str(size), _seeded(make), {}, 0)


LINEAR_SHAPES = ((1, 64, 16), (5, 100, 50), (0, 64, 16), (20, 31, 33), (150, 520, 130), (110, 1100, 70))  # T, K, N


INTEGER_OPS = ((ops.linear_w4a16, 4), (ops.linear_w4a8, 4), (ops.linear_w8a8, 8), (ops.linear_w8a16, 8))


def linear_cases() -> Iterator[Case]:
    for shape in (*LINEAR_SHAPES, (3, 35, 20)):
        yield from (_dense(*shape, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16))
    for tokens in (0, 1, 9):
        heads = _seeded(lambda tokens=tokens: (torch.randn(tokens, 3, 40), torch.randn(3, 24, 40)))
        yield Case(ops.linear_heads, str(tokens), heads, {})
    for tokens, k, n in LINEAR_SHAPES:
        for group_size in (32, 64, 128, -1):
            for op, bits in INTEGER_OPS:
                yield _quantized(op, bits, tokens, k, n, group_size)
        for rows, columns in ((1, -1), (-1, -1), (128, 128), (7, 33)):
            for op in (ops.linear_fp8, ops.linear_fp8_a8):
                yield _float8(op, tokens, k, n, rows, columns)
    for op, bits in INTEGER_OPS:
        yield _quantized(op, bits, 20, 100, 50, 32, scales=torch.float32)
        yield _quantized(op, bits, 20, 100, 50, 32, symmetric=True)
        yield _quantized(op, bits, 20, 100, 50, 32, dtype=torch.bfloat16)
        yield _quantized(op, bits, 20, 100, 50, 32, scales=torch.bfloat16)
    for op, (tokens, k, n), group_size in itertools.product(
        (ops.linear_w8a8, ops.linear_w8a16), ((1, 64, 16), (5, 100, 50), (110, 520, 130)), (16, 32)
    ):
        yield _looked_up(op, tokens, k, n, group_size)
    yield _strided(ops.linear_w4a8)
    for op, bits in ((ops.linear_dense, 16), *INTEGER_OPS):
        for tokens, half, with_bias in ((1, 40, True), (7, 16, False), (30, 130, True)):
            for activation in ops.ACTIVATIONS:
                yield _normed_and_gated(op, bits, tokens, half, with_bias, activation)


def _dense(tokens: int, k: int, n: int, dtype: torch.dtype) -> Case:
    def make() -> tuple[Any, ...]:
        bias = torch.randn(n) if tokens != 5 else None
        return torch.randn(tokens, k) * 3, torch.randn(n, k).to(dtype), bias, None, None

    traits = {"out_features": n, "in_features": k, "dtype": dtype}
    brief = tokens in (3, 5, 110)
    return Case(ops.linear_dense, f"{tokens}x{k}x{n}-{dtype}", _seeded(make), traits, brief=brief)


def _normed_and_gated(op: Op, bits: int, tokens: int, half: int, with_bias: bool, activation: str) -> Case:
    """A linear with a norm in front and a gate after. The norm has a residual, except for one token."""
    k = 100

    def make() -> tuple[Any, ...]:
        weight: Any = torch.randn(2 * half, k) / 5
        if bits < 16:
            weight = quantize(weight, int_scheme(bits, 32))
        norm = Norm(torch.rand(k), 1e-3, torch.randn(tokens, k) if tokens > 1 else None)
        return torch.randn(tokens, k), weight, torch.randn(2 * half) if with_bias else None, norm, activation

    traits: dict[str, Any] = {"out_features": 2 * half, "in_features": k}
    traits |= {"dtype": torch.float32} if bits == 16 else {"group_size": 32, "bits": bits}
    # A last bit of the norm may carry an activation over the edge between two codes.
    tolerance = 2e-2 if op in (ops.linear_w4a8, ops.linear_w8a8) else F32_TOLERANCE
    return Case(op, f"{tokens}x{half}-normed-{activation}", _seeded(make), traits, tolerance, brief=tokens == 7)


def _quantized(
    op: Op, bits: int, tokens: int, k: int, n: int, group_size: int, *,
    scales: torch.dtype = torch.float16, symmetric: bool = False, dtype: torch.dtype = torch.float32,
) -> Case:  # fmt: skip
    def make() -> tuple[Any, ...]:
        weight = quantize(torch.randn(n, k) * torch.rand(n, 1), int_scheme(bits, group_size, symmetric))
        if scales != torch.float16:  # scales that float16 cannot represent
            wide = (weight.scales.float() * 1.0001).to(scales)
            weight = QTensor(weight.codes, wide, weight.zeros, weight.scheme)
        x = torch.randn(tokens, k) * 10 ** (torch.rand(tokens, 1) * 4 - 2)
        x[1:2] = 0
        x[2:3, :40] = 0  # a whole group
        x[3:4, 5] = 1e4
        return x.to(dtype), weight, torch.randn(n) if tokens != 5 else None, None, None

    name = (
        f"{tokens}x{k}x{n}-g{group_size}"
        + f"-{scales}" * (scales != torch.float16)
        + "-symmetric" * symmetric
        + f"-{dtype}"
    )
    traits = {"out_features": n, "in_features": k, "group_size": group_size, "bits": bits}
    tolerance = F32_TOLERANCE if dtype == torch.float32 else BF16_TOLERANCE
    brief = (tokens, group_size) in ((5, 32), (110, 128), (150, -1))
    return Case(op, name, _seeded(make), traits, tolerance, brief)


def _looked_up(op: Op, tokens: int, k: int, n: int, group_size: int) -> Case:
    """Codes of which few occur."""
    scheme = replace(MXFP4.plain, group_size=group_size)

    def make() -> tuple[Any, ...]:
        codes = torch.tensor(scheme.codes.values, dtype=torch.uint8)[torch.randint(16, (n, k))]
        groups = n, scheme.num_groups(k)
        weight = QTensor(codes, torch.rand(groups) / 100, torch.full(groups, 128, dtype=torch.uint8), scheme)
        return torch.randn(tokens, k), weight, torch.randn(n) if tokens != 5 else None, None, None

    traits = {"out_features": n, "in_features": k, "group_size": group_size, "bits": 8, "values": scheme.codes.values}
    return Case(op, f"{tokens}x{k}x{n}-g{group_size}-values", _seeded(make), traits, brief=tokens == 5)


def _float8(op: Op, tokens: int, k: int, n: int, rows: int, columns: int) -> Case:
    """Weights of every code that is a number, including subnormal ones."""

    def make() -> tuple[Any, ...]:
        codes = torch.randint(0, 256, (n, k), dtype=torch.uint8)
        codes[codes & 0x7F == 0x7F] = 0x80
        scheme = float8_scheme(columns, rows)
        scales = torch.rand(scheme.num_row_groups(n), scheme.num_groups(k)) / 100
        weight = QTensor(codes.view(torch.float8_e4m3fn), scales, torch.zeros(0, dtype=torch.uint8), scheme)
        return torch.randn(tokens, k), weight, torch.randn(n) if tokens != 5 else None, None, None

    traits = {"out_features": n, "in_features": k, "group_size": columns, "bits": 8}
    brief = (tokens, columns) in ((5, -1), (20, -1), (110, 128), (150, 33))
    return Case(op, f"{tokens}x{k}x{n}-{rows}x{columns}", _seeded(make), traits, brief=brief)


def _strided(op: Op) -> Case:
    """Activations that are columns of a wider tensor."""
    plain = _quantized(op, 4, 20, 100, 50, 32)

    def make() -> tuple[Any, ...]:
        x, *others = plain.make()
        return torch.cat([x, x], dim=1)[:, 100:], *others

    return Case(op, "strided", make, plain.traits)
