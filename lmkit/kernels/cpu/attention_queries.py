"""The queries of attention: scaled, turned as the stored keys are, with their shares of what keys lack, and in the form
that a score stage takes.

A row's *shares* are its products with what is left out of the stored keys: for each pair of a key mean its factors of
the cosine and of the sine (ops.KeyMean), then its product with the key of position 0 (KVTensor.first). They need the
query as it was before it is turned. A `balance` is D x D multiplications for each query head, too many to repeat for
every partition of a long context. Queries of such keys are therefore turned once, by a task of their own.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numba import carray
from torch import Tensor

from lmkit.kernels.cpu import attention_rows, threads, workspace
from lmkit.kernels.cpu.amx.attention_tiles import planes_tile
from lmkit.kernels.cpu.attention_arguments import (
    BYTES,
    FLOAT_PLANES,
    WORD_PLANES,
    WORDS,
    AttendArgs,
    Buffers,
    Mean,
    Queries,
)
from lmkit.kernels.cpu.attention_tiles import product_tile
from lmkit.kernels.cpu.emit import I8, I16
from lmkit.kernels.cpu.intrinsics import bits_to_float, fma, pointer, tile
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.jit import Task, float_bits, inline
from lmkit.kernels.cpu.kv import multiply, turn_hadamard
from lmkit.kernels.cpu.panels import address
from lmkit.kernels.cpu.structs import numbers, read
from lmkit.kernels.ops import KVTensor
from lmkit.kv_dtype import FLOAT32

TO_WORDS, TO_BYTES = (attention_rows.words_tile(element).name for element in (I16, I8))
OF_FLOATS, OF_WORDS = (planes_tile(words=words).name for words in (False, True))
SERIAL_TURNS = 1 << 17  # multiplications
TURN_ROWS = 24  # that share a matrix's loads
ONE_BITS = float_bits(1.0)


@inline
def _mean_shares(mean: Mean, query: int, head: int, dim: int, out: int) -> None:
    """Write a query's factors of the head's key mean: float32 (of the cosine, of the sine) per pair (ops.KeyMean)."""
    size, half = mean.num_pairs, mean.half
    index = carray(pointer(mean.pairs + 4 * head * size), size, np.int32)
    x = carray(pointer(query), 2 * half, np.float32)
    b = carray(pointer(mean.vectors + 4 * head * dim), 2 * half, np.float32)
    share = carray(pointer(out), 2 * size, np.float32)
    for p in range(size):
        i = np.int64(index[p])
        share[2 * p] = x[i] * b[i] + x[i + half] * b[i + half]
        share[2 * p + 1] = x[i + half] * b[i] - x[i] * b[i + half]


@inline
def prepare_queries(a: AttendArgs, source: int, head: int, rows: int, form: int, memory: Buffers) -> None:
    """Write queries times the scale, padded with 0, and then in their form: words or bytes up to the query limit, or
    for each row its two planes (see amx/attention_tiles.py).
    """
    dim, padded, scale = a.dim, a.padded, bits_to_float(np.uint32(a.queries.scale_bits))
    num_shares = 2 * a.mean.num_pairs + 1
    for r in range(rows):
        at = source + r // a.group * a.queries.stride + r % a.group * a.queries.row_bytes
        x = carray(pointer(at), dim + num_shares, np.float32)
        floats, shares = memory.floats + 4 * r * padded, memory.shares + 4 * r * num_shares
        row = carray(pointer(floats), padded, np.float32)
        for i in range(dim):
            row[i] = x[i] * scale
        for i in range(dim, padded):
            row[i] = 0
        if a.queries.are_turned:
            share = carray(pointer(shares), num_shares, np.float32)
            for i in range(num_shares):
                share[i] = x[dim + i]
        else:
            _mean_shares(a.mean, floats, head, dim, shares)
        if a.hadamard:
            turn_hadamard(floats, dim)
        sizes = (padded // 8, a.query_limit, memory.steps + 8 * r)
        if form == BYTES:
            tile(TO_BYTES, 1, (floats, memory.words + r * padded, *sizes))
        elif form == WORDS:
            tile(TO_WORDS, 1, (floats, memory.words + 2 * r * padded, *sizes))
        elif form == FLOAT_PLANES:
            tile(OF_FLOATS, 1, (floats, memory.words + 4 * r * padded, 2 * padded, padded // 32))
        elif form == WORD_PLANES:
            tile(TO_WORDS, 1, (floats, floats, *sizes))  # words need half the room and are written after the reads
            tile(OF_WORDS, 1, (floats, memory.words + 2 * r * padded, padded, padded // 32))


@inline
def _product(x: Any, y: Any, dim: int) -> Any:
    """x . y in four sums, so that no addition waits for the one before it."""
    a = b = c = d = np.float32(0)
    whole = dim // 4 * 4
    for i in range(0, whole, 4):
        a, b = fma(x[i], y[i], a), fma(x[i + 1], y[i + 1], b)
        c, d = fma(x[i + 2], y[i + 2], c), fma(x[i + 3], y[i + 3], d)
    for i in range(whole, dim):
        a = fma(x[i], y[i], a)
    return (a + b) + (c + d)


class TurnArgs(NamedTuple):
    queries: Queries
    num_tokens: int
    group: int
    dim: int
    mean: Mean
    first: int  # keys of position 0, or 0
    matrices: int  # or 0
    out: int  # float32 [num_kv_heads, num_tokens, group, dim + shares]
    block: int  # tokens of a unit
    parts: int  # units that share the columns of a block


@functools.cache
def turn_task(isa: Isa) -> Task:
    """The query heads of a block of tokens and a KV head. They share the loads of the matrix: index = KV head, block,
    part of the columns. The first part also writes the shares."""
    product, width = product_tile(isa, FLOAT32).name, 2 * isa.lanes

    def turn(args: int, scratch: int, index: int) -> None:
        a = read(args, TurnArgs)
        group, dim, size = a.group, a.dim, 2 * a.mean.num_pairs
        blocks, part = (a.num_tokens + a.block - 1) // a.block, index % a.parts
        head, token = index // a.parts // blocks, index // a.parts % blocks * a.block
        rows = min(a.block, a.num_tokens - token) * group
        scale, ld = bits_to_float(np.uint32(a.queries.scale_bits)), 4 * (dim + size + 1)
        first = carray(pointer(a.first + 4 * head * dim), dim, np.float32)
        whole, matrix, floats = dim % width == 0, a.matrices + 4 * head * dim * dim, scratch + 8 * dim
        places, to = carray(pointer(scratch), dim, np.int64), a.out + (head * a.num_tokens + token) * group * ld
        panels = (dim + width - 1) // width
        column, end = panels * part // a.parts * width, min(panels * (part + 1) // a.parts * width, dim)
        for i in range(dim):
            places[i] = matrix + 4 * i * dim
        for r in range(rows):
            at = a.queries.q + (token + r // group) * a.queries.stride + head * a.queries.head_bytes
            source = carray(pointer(at + r % group * a.queries.row_bytes), dim, np.float32)
            x, out = carray(pointer(floats + 4 * r * dim), dim, np.float32), to + r * ld
            y = carray(pointer(out), dim, np.float32)
            for i in range(dim):
                x[i] = source[i] * scale
            for i in range(column, end):
                y[i] = np.float32(0) if a.matrices else x[i]
            if a.matrices and not whole:
                multiply(floats + 4 * r * dim, matrix, dim, out)
            if part == 0:
                _mean_shares(a.mean, floats + 4 * r * dim, head, dim, out + 4 * dim)
                share = carray(pointer(out + 4 * (dim + size)), 1, np.float32)
                share[0] = _product(x, first, dim) if a.first else np.float32(0)
        if a.matrices and whole:
            for start in range(column, end, width):
                r = 0
                while r < rows:
                    x_at, out = floats + 4 * r * dim, to + r * ld + 4 * start
                    r += tile(product, rows - r, (x_at, 4 * dim, scratch, 4 * start, out, ld, 2 * width, dim, 0, 0))

    return Task(turn)


def _units(heads: int, num_tokens: int, group: int, panels: int) -> tuple[int, int]:
    """(tokens of a unit, parts of its columns): many rows share a matrix's loads, as long as all threads have work."""
    wanted = 2 * threads.num_threads()
    block = max(1, min(TURN_ROWS // group, heads * num_tokens // wanted))
    return block, min(panels, -(-wanted // (heads * -(-num_tokens // block))))


def queries_of(isa: Isa, q: Tensor, k_cache: KVTensor, mean: Mean, scale: float) -> tuple[Queries, Tensor]:
    """Queries float32 [T, num_heads, D] as attention reads them, and the tensor that holds them."""
    num_tokens, num_heads, dim = q.shape
    heads = k_cache.data.shape[1]
    group = num_heads // heads
    plain = Queries(q.data_ptr(), 4 * q.stride(0), 4 * group * dim, 4 * dim, float_bits(scale), 0)
    if k_cache.balance is None and k_cache.first is None:
        return plain, q
    width = dim + 2 * mean.num_pairs + 1
    out = workspace.empty(heads, num_tokens, group, width)
    assert k_cache.balance is None or k_cache.balance.queries.is_contiguous()
    matrices = None if k_cache.balance is None else k_cache.balance.queries
    block, parts = _units(heads, num_tokens, group, dim // isa.value_tile if dim % isa.value_tile == 0 else 1)
    parallel = num_tokens * num_heads * dim * dim > SERIAL_TURNS
    parts = parts if parallel and matrices is not None else 1
    args = TurnArgs(
        plain, num_tokens, group, dim, mean, address(k_cache.first), address(matrices), out.data_ptr(), block, parts
    )
    units = heads * -(-num_tokens // block) * parts
    scratch = 8 * dim + 4 * block * group * dim
    threads.run(turn_task(isa), units, numbers(args), parallel=parallel, scratch=scratch)
    return Queries(out.data_ptr(), 4 * group * width, 4 * num_tokens * group * width, 4 * width, ONE_BITS, 1), out
