"""Kernels for the CPU: numba tasks over LLVM IR micro-kernels, chosen by the machine's instruction set (isa.py)."""

from lmkit.kernels import ops, plane_ops
from lmkit.kernels.cpu import (
    attention,
    delta,
    dense,
    elementwise,
    experts,
    index,
    isa,
    kv,
    low_rank,
    quantized,
    sampling,
    selective_scan,
    short_conv,
)
from lmkit.kernels.cpu.tiles import CODES4, CODES8, FLOAT8

ops.paged_attention.register(attention.implementation(isa.host()))
ops.rope_paged_attention.register(attention.after_append(isa.host()))
ops.linear_dense.register(dense.dense_implementation(isa.host()))
ops.linear_heads.register(dense.heads_implementation(isa.host()))
for _op, _kind in ((ops.linear_w4a16, CODES4), (ops.linear_w8a16, CODES8), (ops.linear_fp8, FLOAT8)):
    _op.register(dense.codes_implementation(isa.host(), _kind))
for _op, _bits in ((ops.linear_w4a8, 4), (ops.linear_w8a8, 8)):
    _op.register(quantized.implementation(isa.host(), _bits))
plane_ops.linear_planes.register(quantized.planes_implementation(isa.host()))
plane_ops.linear_split.register(quantized.split_implementation(isa.host()))

__all__ = [
    "attention",
    "delta",
    "dense",
    "elementwise",
    "experts",
    "index",
    "kv",
    "low_rank",
    "quantized",
    "sampling",
    "selective_scan",
    "short_conv",
]
