"""With the switch `invariant` a row's bits are those of the row alone, wherever it stands in whichever batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cuda import coded_rows, elementwise, gemm_experts, gemm_plan, prefill, sampling
from lmkit.kernels.cuda.dense_shape import SHAPES, dense_shape
from lmkit.kernels.cuda.gemm_pack import pack
from lmkit.kernels.cuda.gemm_plan import Problem
from lmkit.kernels.cuda.gemm_table import BUCKETS
from lmkit.kernels.cuda.gpus import GPUS
from lmkit.kernels.cuda.linear import linear
from lmkit.kernels.ops import BatchGeometry, Norm
from lmkit.kernels.reference.linear import keep
from lmkit.kernels.settings import Settings
from lmkit.kv_dtype import BFLOAT16, FLOAT16, FP8, INT4, INT8, KVDtype
from lmkit.qtensor import QuantScheme, dequantize, float8_scheme, int_scheme, plain, quantize
from tests import emulator
from tests.kernels.cuda.test_balanced import changed, there
from tests.kernels.cuda.test_prefill_attention import inputs

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SPANS = ((0, 1), (7, 8), (3, 12), (20, 37), (90, 155), (0, 258))  # rows that are computed together


@pytest.fixture(autouse=True)
def invariant() -> Iterator[None]:
    with Settings(deterministic=True):
        yield


def assert_rows(product: Any, x: Tensor, oracle: Tensor) -> None:
    """Rows of x give the same bits in all spans, and those are right."""
    whole = product(x)
    assert float((whole.double().cpu() - oracle).abs().max()) < 1e-5 * float(oracle.abs().max())
    for start, end in SPANS:
        assert torch.equal(product(x[start:end]), whole[start:end]), (start, end)


@pytest.mark.parametrize(("inputs", "outputs", "half"), [(264, 150, F16), (136, 33, BF16)])
def test_dense(device: str, inputs: int, outputs: int, half: torch.dtype) -> None:
    torch.manual_seed(inputs)
    x, weight, bias = torch.randn(260, inputs).to(half), torch.randn(outputs, inputs).to(half), torch.randn(outputs)
    packed, impl = keep(weight.to(device)), ops.linear_dense.named("cuda")
    oracle = x.double() @ weight.double().t() + bias
    assert_rows(lambda rows: impl(rows, packed, bias.to(device), dtype=F32), x.to(device), oracle)


def test_dense_with_all_that_stands_around(device: str) -> None:
    """A norm and columns of a wider tensor in front; a gate, a residual stream, 16 bits after."""
    wide, weight = torch.randn(20, 80, device=device).half(), torch.randn(48, 64, device=device).half()
    impl, stream = ops.linear_dense.named("cuda"), torch.randn(20, 48, device=device)
    norm = Norm(torch.rand(64, device=device), 1e-5, dtype=F16)
    calls: tuple[Any, ...] = (
        lambda part: impl(wide[part, 8:72], keep(weight), None),
        lambda part: impl(wide[part, 8:72], keep(weight, "silu"), None),
        lambda part: impl(stream[part].repeat(1, 2)[:, :64].contiguous(), keep(weight), None, norm),
        lambda part: impl(wide[part, 8:72], keep(weight), None, residual=stream[part].clone()),
    )
    for call in calls:
        got = call(slice(None))
        for row in (0, 7, 19):
            assert torch.equal(call(slice(row, row + 1)), got[row : row + 1])
    want = wide[:, 8:72].double() @ weight.double().t()
    assert torch.allclose(calls[0](slice(None)).double(), want, rtol=2e-3, atol=2e-3)
    assert torch.allclose(calls[3](slice(None)).double(), want + stream, rtol=1e-5, atol=1e-5)
    gate, up = want.chunk(2, -1)
    assert torch.allclose(calls[1](slice(None)).double(), torch.nn.functional.silu(gate) * up, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("scheme", "rounds"),
    [
        (int_scheme(4, 128), False),
        (int_scheme(4, 32), True),
        (float8_scheme(128, 128), False),
        (float8_scheme(128, 128), True),
    ],
)
def test_packed_weights(device: str, scheme: QuantScheme, rounds: bool) -> None:
    """From 257 rows on, too, where a library would multiply."""
    torch.manual_seed(1)
    weight = plain(quantize(torch.randn(40, 520), scheme))
    packed = pack(replace(weight, **{name: getattr(weight, name).to(device) for name in ("codes", "scales", "zeros")}))
    packed, x = replace(packed, rounds=rounds), torch.randn(260, 520).half().to(device)
    seen = coded_rows.rounded(x.float(), packed) if rounds else x
    oracle = seen.cpu().double() @ dequantize(weight).double().t()
    assert_rows(lambda rows: linear(rows, packed, None, dtype=F32), x, oracle)


def test_codes_of_eight_bits(device: str) -> None:
    weight = plain(quantize(torch.randn(32, 272), int_scheme(8, -1)))
    weight = replace(weight, **{name: getattr(weight, name).to(device) for name in ("codes", "scales", "zeros")})
    impl = ops.linear_w8a8.named("cuda")
    packed, x = impl.pack(weight), torch.randn(40, 272, device=device)
    whole = impl(x, packed, torch.ones(32, device=device))
    for start, end in ((0, 1), (5, 12), (3, 39)):
        assert torch.equal(impl(x[start:end], packed, torch.ones(32, device=device)), whole[start:end])


@pytest.mark.parametrize("rounds", [False, True])
def test_products_of_experts(device: str, rounds: bool) -> None:
    """Of a token alone and among others that like the same experts, gate and up, then down."""
    torch.manual_seed(2)
    chosen = torch.tensor([[i % 3, 3 + (i > 4)] for i in range(60)], device=device)
    weights = [plain(quantize(torch.randn(48, 264), int_scheme(4, 32))) for _ in range(5)]
    packed = [pack(replace(q, **{n: getattr(q, n).to(device) for n in ("codes", "scales", "zeros")})) for q in weights]
    table = gemm_experts.ExpertTable.of([(replace(each, rounds=rounds), None) for each in packed])
    assert table is not None
    x = torch.randn(60, 264, device=device).half()

    def products(tokens: slice) -> Tensor:
        """[tokens, 2, outputs] of the tokens' experts."""
        places = ops.expert_places.named("cuda")(chosen[tokens], 5, range(5))
        of_tokens = gemm_experts.multiply(x[tokens], places, table, True)
        of_places = gemm_experts.multiply(x[tokens][places.tokens], places, table, False)
        assert torch.equal(of_tokens, of_places.half())
        return of_places[places.of_token]

    whole = products(slice(0, 60))
    seen = coded_rows.rounded(x.float(), table.packed).cpu() if rounds else x.cpu().float()
    oracle = seen[7] @ dequantize(weights[int(chosen[7, 1])]).t()
    assert float((whole[7, 1].cpu() - oracle).abs().max()) < 1e-4 * float(oracle.abs().max())
    for start, end in ((0, 1), (7, 8), (3, 12), (20, 53)):
        assert torch.equal(products(slice(start, end)), whole[start:end])


CASES = [
    ((FLOAT16, FLOAT16), F16, (2, 4, 128), (0, 0), "", 0.0),
    ((BFLOAT16, BFLOAT16), BF16, (1, 3, 64), (100, 5), "", 0.0),
    ((INT8, INT8), BF16, (1, 8, 64), (0, 0), "mean", 0.0),
    ((INT4, INT4), F16, (1, 4, 64), (0, 0), "hadamard", 3.0),
    ((FP8, FP8), F16, (1, 1, 256), (40, 0), "", 0.0),
    ((INT4, INT4), BF16, (1, 3, 64), (0, 0), "mean balance first", 0.0),
]
# The queries from position 250 on, as steps may have them: all, one by one, in chunks.
CHUNKS = ((70,), (1, 1, 30, 38), (5, 1, 64))


@pytest.mark.parametrize(("types", "dtype", "heads", "window", "keys", "softcap"), CASES)
def test_attention(
    device: str,
    types: tuple[KVDtype, KVDtype],
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    window: tuple[int, int],
    keys: str,
    softcap: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts and new tokens, whatever stands before the chunk in the step, and whatever the cache holds after it.
    Keys are in ranges, with a block of threads for each, or one for all (as all queries together have it)."""
    torch.manual_seed(heads[2])
    monkeypatch.setattr(prefill, "PART_KEYS", 64)
    ways, by_load, is_whole = list[int](), prefill.num_parts, False

    def num_parts(*args: Any) -> int:
        ways.append(1 if is_whole else by_load(*args))
        return ways[-1]

    monkeypatch.setattr(prefill, "num_parts", num_parts)
    args = inputs(types, dtype, heads, device, block_size=16, window=window, keys=keys, lengths=((320, 70), (90, 9)))
    if "balance" in keys:
        caches = changed(args.k_cache, args.v_cache, keys)
        args = args._replace(k_cache=there(caches[0], device), v_cache=there(caches[1], device))
    spec, batch, attend = replace(args.spec, softcap=softcap), args.geometry, ops.paged_attention.named("cuda")
    assert attend.run is not None
    learned = torch.linspace(-1, 2, args.q.shape[1], device=device)
    results = []
    for chunks, beside in zip(CHUNKS, (0, 1, 0), strict=True):  # 1: after the other sequence
        rows, begin, is_whole = [], 0, len(chunks) == 1
        for size in chunks:
            mine, other = args.q[begin : begin + size], args.q[70:79] if beside else args.q[:0]
            order = [1, 0] if beside else [0]
            starts = torch.tensor([0, 9, 9 + size] if beside else [0, size], dtype=torch.int32, device=device)
            lens = batch.context_lens.clone()
            lens[0] = 250 + begin + size
            step = BatchGeometry(starts, lens[order], batch.block_tables[order], batch.slots[: len(other) + size])
            rows.append(attend(torch.cat([other, mine]), *args[1:3], step, spec, learned)[len(other) :])
            begin += size
        results.append(torch.cat(rows))
    want = ops.paged_attention.named("reference")(args.q.float(), *args[1:3], batch, spec, learned)[:70]
    assert float((results[0].float() - want).abs().max() / want.abs().max()) < 2e-2
    assert all(torch.equal(result, results[0]) for result in results)
    assert max(ways) > 1


def test_blocks_of_ranges_follow_the_load(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block for each range of 1008 keys, unless half of 132 multiprocessors is busy without, or memory is short."""
    if device != "cpu":
        pytest.skip("the number of multiprocessors is given")
    monkeypatch.setattr(emulator.install(), "num_sms", lambda: 132)
    assert prefill.num_parts(8, 32768, 1008, 4160, device) == 33
    assert prefill.num_parts(8, 1000, 1008, 4160, device) == 1
    assert prefill.num_parts(132, 32768, 1008, 4160, device) == 33
    assert prefill.num_parts(133, 32768, 1008, 4160, device) == 1
    assert prefill.num_parts(128, 131072, 1008, 66560, device) == 1


def test_one_kernel_attends(device: str) -> None:
    """Also to new tokens alone."""
    if device != "cpu":
        pytest.skip("launches are counted under emulation")
    gpu = emulator.install()
    args = inputs((FLOAT16, FLOAT16), F16, (1, 1, 64), device, lengths=((33, 1), (64, 1)))
    ops.paged_attention.named("cuda")(*args)
    assert gpu.launches == ["prefill_attention"]


def test_rows_of_norms_and_scores(device: str) -> None:
    x, weight = torch.randn(9, 520, device=device), torch.rand(520, device=device)
    norms = elementwise.rms_norm(x, Norm(weight, 1e-5))
    codes = elementwise.quantize_rows(x, torch.int8, Norm(weight, 1e-5))
    for row in range(9):
        part = x[row : row + 1]
        assert torch.equal(elementwise.rms_norm(part, Norm(weight, 1e-5)), norms[row : row + 1])
        alone = elementwise.quantize_rows(part, torch.int8, Norm(weight, 1e-5))
        assert torch.equal(alone.codes[0], codes.codes[row])
    table, logits = torch.zeros(9, sampling.WORDS, dtype=torch.int64, device=device), torch.randn(9, 700, device=device)
    rows = torch.arange(9, dtype=torch.int32, device=device)
    tokens = rows.long()
    scores = sampling.score(logits, rows, rows, table, tokens, 0, gathered=False)
    for row in range(9):
        one = sampling.score(logits, rows[row : row + 1], rows, table, tokens, 0, gathered=False)
        assert torch.equal(one, scores[row : row + 1])


def test_plans_of_a_weight_add_up_in_one_order() -> None:
    """On every GPU, for every format and number of tokens there is a plan."""
    formats = ((1072, 1, False), (1216, 4, False), (1072, 0, False), (2096, 1, False), (1344, 4, True))
    for limit, (size, scales, coded_x) in itertools.product({gpu.block_shared for gpu in GPUS.values()}, formats):
        for tiles, stages in ((1, 1), (256, 32), (8016, 5)):
            weight = Problem(1, tiles, stages, size, scales, coded_x=coded_x)
            plans = [gemm_plan.pinned(replace(weight, tokens=tokens), 132, limit) for tokens in BUCKETS]
            assert plans[-1] is not None
            assert len({gemm_plan.order(plan) for plan in plans if plan is not None}) == 1
            assert all(plan.token_tiles * plan.rows > 1 for plan in plans if plan is not None)
        assert all(dense_shape(shape.tokens, limit).stages >= 2 for shape in SHAPES)
