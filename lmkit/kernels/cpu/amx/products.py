"""Micro-kernels of quantized products on tiles: 16 tokens times a panel of 64 outputs, a chunk of groups at a time.

Activations are the first operand, in tiles of 16 tokens by 64 inputs (32 if a group is an odd multiple of 32). Weights
are the second operand as they lie in their panel, [inputs/4, 64, 4] bytes: tile registers 0 to 3 hold the sums of
16 outputs each, 4 and 5 activations, 6 and 7 weights.

A sum is stored some dots after its last one, since a store waits for the dots, and the next use of the register for the
store. What remains to be done for it, the epilogue, runs between the dots of the next 16 tokens. So products are
written to one buffer, int32 [groups, 4, 16, 16], while the epilogue reads another one. It computes what tiles.int_tile
computes, in the same order: sums float32 [tokens, 64] += scale * (step * product) group by group.

4-bit weights are widened to code - zero, signed. 8-bit codes stay unsigned, and their zeros are left to the epilogue.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from llvmlite import ir

from lmkit.kernels.cpu.amx.tile_file import ROW_BYTES, ROWS, TILE, TileFile
from lmkit.kernels.cpu.dots import vpdpwssd, word_products
from lmkit.kernels.cpu.emit import F32, I8, I32, I64, Emitter, Value, constant
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.tiles import CACHE_LINE, Tile, group_scales, register, zero_pairs

COLUMNS = 4  # tiles of 16 outputs in a panel
WIDTH = 64  # outputs
PRODUCTS = COLUMNS * TILE  # bytes of a group's products
MOST_INPUTS = 448  # of a panel, with the products of 16 tokens, in a first-level cache


class Grouping(NamedTuple):
    """The cut of inputs into chunks that stay in the first-level cache while all tokens take them: `together` whole
    groups, or one of `passes` equal parts of a group. A part, or a whole group, is `steps` tiles of `step` inputs.
    """

    step: int
    steps: int
    together: int
    passes: int


def grouping(group_size: int) -> Grouping:
    step = ROW_BYTES if group_size % ROW_BYTES == 0 else ROW_BYTES // 2
    steps = group_size // step
    passes = next(n for n in range(1, steps + 1) if steps % n == 0 and group_size <= n * MOST_INPUTS)
    return Grouping(step, steps // passes, 2 if group_size <= 128 else 1, passes)


def signed_tile(isa: Isa) -> Tile:
    """Widen `groups` groups of a panel of 4-bit codes to bytes, code - zero. A group is `pairs` pairs of quads of
    inputs (see tiles.unpack_tile). zeros are uint8 [groups, 64].
    """

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        codes, zeros, target, groups, pairs = arguments
        b, kind, bytes_ = e.builder, e.vector(I32), e.vector(I8, 4 * e.lanes)
        low, of_pair = constant(bytes_, 15), ROW_BYTES * COLUMNS
        lanes = [[16 * j + i // 4 for i in range(4 * e.lanes)] for j in range(COLUMNS)]
        orders = [ir.Constant(e.vector(I32, 4 * e.lanes), order) for order in lanes]
        with e.loop(groups) as group:
            zero = e.load(e.offset(zeros, e.times(group, WIDTH)), bytes_)
            of_quads = [b.shuffle_vector(zero, zero, order) for order in orders]
            with e.loop(pairs) as pair:
                at = e.times(b.add(b.mul(group, pairs), pair), of_pair)
                for j, of_quad in enumerate(of_quads):
                    both = e.load(e.offset(codes, at, ROW_BYTES * j), kind)
                    for quad, nibbles in enumerate((both, b.lshr(both, constant(kind, 4)))):
                        code = b.and_(b.bitcast(nibbles, bytes_), low)
                        place = e.offset(target, e.times(at, 2), of_pair * quad + ROW_BYTES * j)
                        e.store(b.sub(code, of_quad), place)

    return register(f"amx_signed_tile.{isa.name}", 16, (1,), 5, body)


class Operands(NamedTuple):
    """Addresses that the epilogue of 16 tokens needs, of a chunk's first group."""

    sums: Value  # float32 [tokens, 64]
    scales: Value  # float16 or float32 [groups, 64]
    steps: Value  # float32 [groups, 16]: the scales of activations
    zeros: Value  # uint8 [groups, 64]
    totals: Value  # int32 [groups, 16]: tiles.sum_pair of the activations
    products: Value  # int32 [groups, 4, 16, 16]


def _epilogue(
    e: Emitter, isa: Isa, bits: int, half: bool, groups: int, given: Operands
) -> Callable[[Value, int], None]:
    """A function that emits the epilogue of a chunk's `groups` groups at (row, column of tiles)."""
    b, floats = e.builder, e.vector(F32)
    scales = [group_scales(e, isa, half, given.scales, I64(WIDTH * g), COLUMNS) for g in range(groups)]
    zeros = [zero_pairs(e, COLUMNS, e.offset(given.zeros, WIDTH * g)) for g in range(groups)] if bits == 8 else []

    def emit(r: Value, j: int) -> None:
        place = e.offset(given.sums, e.times(r, 4 * WIDTH), ROW_BYTES * j)
        total = e.load(place, floats)
        for g in range(groups):
            of_token = e.offset(e.times(r, 4), 4 * ROWS * g)
            of_tile = e.offset(e.times(r, ROW_BYTES), PRODUCTS * g + TILE * j)
            product = e.load(e.offset(given.products, of_tile), e.vector(I32))
            if zeros:
                minus_sum = e.splat(e.load(e.offset(given.totals, of_token), I32))
                pair = zeros[g][j], minus_sum  # of word_products the compiler makes two instructions for Intel here
                product = word_products(e, isa, *pair, product) if isa.emulate else vpdpwssd(e, product, *pair)
            step = e.splat(e.load(e.offset(given.steps, of_token), F32))
            total = e.fma(scales[g][j], b.fmul(b.sitofp(product, floats), step), total)
        e.store(total, place)

    return emit


def _dots(groups: int, steps: int) -> Iterator[tuple[int, int, int]]:
    """(group, step, column) of each dot in order. Two tiles of activations stay in their registers. With more steps,
    two columns share each load of one."""
    at_once = 1 if steps <= 2 else 2
    for group in range(groups):
        for first in range(0, COLUMNS, at_once):
            for step in range(steps):
                for column in range(first, first + at_once):
                    yield group, step, column


def product_tile(isa: Isa, bits: int, cut: Grouping, *, half: bool, late: bool, more: bool) -> Tile:
    """`new` = x w of 16 tokens and a chunk's groups, whose number is the micro-kernel's number of rows; `new` += x w if
    `more`. If `late`, with the epilogue of `old` ones, as many groups. x is [inputs/step, 16, step] bytes. For each
    dot, `lines` cache lines from `ahead` on are prefetched.
    """

    def body(e: Emitter, groups: int, arguments: list[Value]) -> None:
        slots, x, w, new, ahead, lines, *old = arguments
        tiles, dots = TileFile(e, isa, slots), list(_dots(groups, cut.steps))
        finish = _epilogue(e, isa, bits, half, groups, Operands(*old)) if late else None
        places, share = itertools.product(range(ROWS), range(COLUMNS)), -(-ROWS * COLUMNS // len(dots))
        kept: dict[int, tuple[int, int]] = {}  # tiles of activations by register
        waiting: list[tuple[int, int, Value]] = []
        for n, (g, s, j) in enumerate(dots):
            register, weights = 4 + s % 2, 6 + n % 2
            if kept.get(register) != (g, s):
                kept[register] = g, s
                tiles.load(register, e.offset(x, (g * cut.steps + s) * ROWS * cut.step), cut.step)
            place = e.offset(new, PRODUCTS * g + TILE * j)
            if s == 0 and more:
                tiles.load(j, place, ROW_BYTES)
            elif s == 0:
                tiles.zero(j)
            at = (g * cut.steps + s) * cut.step * WIDTH + ROW_BYTES * j
            tiles.load(weights, e.offset(w, at), ROW_BYTES * COLUMNS)
            tiles.dot_int8(j, register, weights, unsigned=bits == 8)
            if finish is not None:
                for row, column in itertools.islice(places, share):
                    finish(I64(row), column)
            with e.loop(lines, unroll=False) as line:
                e.prefetch(e.offset(ahead, e.times(e.offset(e.times(lines, n), line), CACHE_LINE)))
            if s == cut.steps - 1:
                waiting.append((n + min(4, 2 * cut.steps), j, place))
            while waiting and (waiting[0][0] <= n or n == len(dots) - 1):
                _, column, target = waiting.pop(0)
                tiles.store(column, target, ROW_BYTES)

    form = f"{'x'.join(map(str, cut))}.{_name(half)}" + ".late" * late + ".more" * more
    name = f"amx_product_tile.{isa.name}.{bits}.{form}"
    return register(name, 16, tuple(range(cut.together, 0, -1)), 12 if late else 6, body)


def finish_tile(isa: Isa, bits: int, *, half: bool) -> Tile:
    """The epilogue alone, of `count` tokens and as many groups as the micro-kernel has rows."""

    def body(e: Emitter, groups: int, arguments: list[Value]) -> None:
        count, *given = arguments
        finish = _epilogue(e, isa, bits, half, groups, Operands(*given))
        with e.loop(count) as row:
            for column in range(COLUMNS):
                finish(row, column)

    name = f"amx_finish_tile.{isa.name}.{bits}.{_name(half)}"
    return register(name, 16, (2, 1), 7, body)


def _name(half: bool) -> str:
    return "half" if half else "float"
