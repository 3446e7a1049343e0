"""Launches of the kernels of every file, each on some shape: what budgets.py counts.

Products, attention and norms have Llama-3-8B's heads and widths, and fewer outputs. What few models have runs a case
of its own tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from lmkit.formats.mxfp4 import MXFP4
from lmkit.formats.nvfp4 import NVFP4
from lmkit.kernels import ops
from lmkit.kernels.cuda import append, elementwise, gemm, gemm_pack, gemm_plan, gemm_wide, latent
from lmkit.kernels.cuda.blocks import BlockCopier
from lmkit.kernels.cuda.gpus import GPUS
from lmkit.kernels.ops import KVTensor, Norm
from lmkit.kernels.reference.linear import keep
from lmkit.kernels.settings import Settings
from lmkit.kv_dtype import FLOAT16, INT3, INT4, INT8, KVDtype
from lmkit.layers.batch import allocate_kv
from lmkit.low_rank import Columns
from lmkit.qtensor import QuantScheme
from tests.kernels import planes
from tests.kernels.cases import filled_cache
from tests.kernels.cuda import (
    test_balanced,
    test_delta,
    test_experts,
    test_int8_rows,
    test_library,
    test_linear,
    test_low_rank,
    test_prefill_attention,
    test_ranks,
    test_sampling,
    test_selective_scan,
    test_short_conv,
    test_stages,
    test_tokens,
    test_wide_attention,
)
from tests.kernels.cuda.test_decode_attention import case, decode
from tests.kernels.cuda.test_linear import pack, weight
from tests.turbo.runners import test_gpu_sampler

H200, SMS = GPUS[9, 0], 132
F32, F16 = torch.float32, torch.float16
DEVICE = "cpu"
PRODUCT = 512, 4096  # outputs and inputs of products


def product(tokens: int, scheme: QuantScheme = test_linear.INT4) -> Callable[[], object]:
    """By the plan of Llama-3-8B's gate and up."""

    def run() -> None:
        packed = pack(weight(*PRODUCT, scheme), DEVICE)
        problem = replace(gemm.problem_of(tokens, packed), tiles=1792)
        plan = gemm_plan.best(problem, SMS, H200.block_shared, 1, 2 if tokens <= 16 else 1)[0]
        gemm.multiply(torch.randn(tokens, PRODUCT[1]).half(), packed, plan)

    return run


def kquant(name: str) -> Callable[[], object]:
    """A token's product with a weight of a type of GGUF."""

    def run() -> None:
        packed = gemm_pack.pack(planes.random_weight(planes.SCHEMES[name], *PRODUCT))
        problem = replace(gemm.problem_of(1, packed), tiles=1792)
        plan = gemm_plan.best(problem, SMS, H200.block_shared, 1, 2)[0]
        gemm.multiply(torch.randn(1, PRODUCT[1]).half(), packed, plan)

    return run


def wide_product(tokens: int) -> Callable[[], object]:
    def run() -> None:
        plan = gemm_wide.best(gemm_plan.Problem(tokens, 1792, 32, 1072), SMS, H200.block_shared)[0]
        gemm.multiply(torch.randn(tokens, 1024).half(), pack(weight(512, 1024), DEVICE), plan)

    return run


def ranges() -> None:
    plan = gemm_wide.WidePlan(64, 1, 2, 4, 2)
    gemm.multiply(torch.randn(64, 1024).half(), pack(weight(256, 1024), DEVICE), plan)


def rounded_product() -> None:
    q = weight(128, 1024)
    x = test_int8_rows.inputs(11, 1024, DEVICE)
    gemm.multiply(x, test_int8_rows.packed(q, DEVICE), test_linear.WIDE, None, F32)


def float8_product(*, rounds: bool) -> Callable[[], object]:
    """16 tokens' with a weight in blocks of float8 numbers."""

    def run() -> None:
        packed = pack(weight(128, 1024, test_linear.SCHEMES["fp8-block"]), DEVICE, rounds=rounds)
        gemm.multiply(test_int8_rows.inputs(16, 1024, DEVICE), packed, test_linear.WIDE, None, F32)

    return run


def dequantized() -> None:
    gemm_pack.dequantize(pack(weight(128, 1024), DEVICE), F16)


def decoding(stored: KVDtype) -> Callable[[], object]:
    return lambda: decode(case((stored, stored), (32, 8), 128, 64, F16, (512, 512)), 0, 0, DEVICE)


def prompt() -> None:
    args = test_prefill_attention.inputs(
        (INT8, INT8), F16, (2, 4, 128), DEVICE, block_size=64, lengths=((256, 64),)
    )  # fmt: skip
    test_prefill_attention.attend(args)


def wide_heads() -> None:
    lengths = ((300, 1), (40, 3))
    test_wide_attention.assert_attends(test_wide_attention.inputs(INT8, 576, 16, F16, DEVICE, lengths), 1)


def appending() -> None:
    heads, kv_heads, dim, tokens = 32, 8, 128, 16
    kv = allocate_kv(1, kv_heads, 64, dim, (INT8, INT8), DEVICE)
    q, k, v = torch.randn(tokens, heads + 2 * kv_heads, dim).half().split((heads, kv_heads, kv_heads), 1)
    angles = torch.rand(tokens, dim // 2) * 7
    append.rope_append(q, k, v, angles.cos(), angles.sin(), kv.k, kv.v, torch.arange(tokens).int())


def turned() -> None:
    args = test_prefill_attention.inputs(
        (INT4, INT4), F16, (2, 4, 128), DEVICE, block_size=16, lengths=((40, 1),) * 4
    )  # fmt: skip
    test_balanced.assert_right(args, 0.0, test_balanced.EVERYTHING, DEVICE)


def rows_of_a_latent() -> None:
    kv, tables = filled_cache((FLOAT16, FLOAT16), 1, 576, 16, [20, 41])
    latent.kv_rows(KVTensor(kv.k.data, kv.k.params, FLOAT16), tables[1], 41, F16)


def norm() -> None:
    elementwise.rms_norm(torch.randn(4, 4096).half(), Norm(torch.randn(4096), 1e-5))


def small() -> None:
    elementwise.embedding(torch.randn(5, 4096).half(), torch.tensor([3, 1, 0, 2]))
    elementwise.gated_activation(torch.randn(4, 2 * 4096).half(), "silu")
    elementwise.rope_angles(torch.arange(4), torch.rand(64), 1.0)


def dense(tokens: int) -> Callable[[], object]:
    def run() -> None:
        x, matrix = torch.randn(tokens, 1024).half(), torch.randn(64, 1024).half()
        test_library.run(ops.linear_dense, x, matrix, torch.randn(64), DEVICE)

    return run


def same_for_all_rows() -> None:
    with Settings(deterministic=True):
        impl = ops.linear_dense.named("cuda")
        impl(torch.randn(40, 1024).half(), keep(torch.randn(136, 1024).half()), None, dtype=F32)


def eight_bits() -> None:
    q = test_library.coded(ops.linear_w8a8, test_library.INT8, 48, 512)
    test_library.run(ops.linear_w8a8, torch.randn(9, 512).half(), q, None, DEVICE)


def copies() -> None:
    BlockCopier([torch.zeros(4, 64 * 128 * 8, dtype=torch.uint8)]).copy([(0, 2), (1, 3)])


def sums() -> None:
    test_ranks.together(test_ranks.connected(2), lambda _, ranks: ranks.sum(torch.ones(8, 4096)))


def stream() -> None:
    """One call after the other: nothing waits."""
    links = test_stages.linked(2, most=8, width=4096)
    for link in links:
        link.send(8)
    for link in links:
        link.receive(8)


def adapters() -> None:
    columns = Columns(0, 48, 48, 48)
    test_low_rank.test_add_low_rank(DEVICE, F16, F16, F16, 64, columns)
    test_low_rank.test_gated_panels(DEVICE, "silu", F32, F16, 8, 300)


def experts() -> None:
    name = next(iter(test_experts.ROUTINGS))
    test_experts.test_route(name, 21, DEVICE)
    test_experts.test_places_and_sums(37, 2, 41, DEVICE)


CASES: dict[str, Callable[[], object]] = {
    "norm of 4 rows": norm,
    "between products": small,
    "product of 1 token": product(1),
    "product of 1 token, MXFP4": product(1, MXFP4),
    "product of 1 token, NVFP4": product(1, NVFP4),
    "product of 1 token, Q4_K": kquant("Q4_K"),
    "product of 1 token, Q5_K": kquant("Q5_K"),
    "product of 1 token, Q6_K": kquant("Q6_K"),
    "product of 16 tokens": product(16),
    "product of 64 tokens": product(64),
    "wide product of 64 tokens": wide_product(64),
    "wide product of 128 tokens": wide_product(128),
    "wide product in ranges": ranges,
    "product of rounded tokens": rounded_product,
    "product of 16 tokens, float8 weights": float8_product(rounds=False),
    "product of 16 tokens, float8 weights and inputs": float8_product(rounds=True),
    "dequantized weight": dequantized,
    "decoding, INT8": decoding(INT8),
    "decoding, INT4": decoding(INT4),
    "decoding, INT3": decoding(INT3),
    "prompt, INT8": prompt,
    "heads of 576": wide_heads,
    "append, INT8": appending,
    "balanced keys, INT4": turned,
    "rows of a latent": rows_of_a_latent,
    "dense product of 4 tokens": dense(4),
    "dense product, the same for all rows": same_for_all_rows,
    "eight bits by the library": eight_bits,
    "copied blocks": copies,
    "sum of 2 ranks": sums,
    "stream of 2 stages": stream,
    "adapters": adapters,
    "experts": experts,
    "delta rule": lambda: test_delta.compare(DEVICE, test_delta.CASES[4].make(), F32),
    "scan": lambda: test_selective_scan.test_sequences_in_all_states(DEVICE, test_selective_scan.CASES[1], F32),
    "short convolution": lambda: test_short_conv.test_sequences_in_all_states(DEVICE, test_short_conv.CASES[0], F16),
    "greedy tokens": lambda: test_sampling.test_greedy(DEVICE, test_sampling.sampling.argmax, 20011),
    "drawn tokens": lambda: test_sampling.test_draws_what_the_reference_draws(DEVICE, 3001, 20),
    "edited logits": lambda: test_gpu_sampler.test_edits_are_the_cpus_to_the_bit(DEVICE),
    "known tokens": lambda: test_tokens.test_known_tokens(DEVICE, 257),
}
QUICK = "norm of 4 rows", "product of 1 token"
