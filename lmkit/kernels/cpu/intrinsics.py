"""Functions for compiled code that numba does not have: tiles, raw memory, bit-exact conversions."""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lmkit.kernels.cpu import tiles
from lmkit.kernels.cpu.emit import I32, I64, Emitter


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """An address as the pointer that numba.carray takes."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen


@intrinsic(prefer_literal=True)
def unpack(typing: Any, address: Any, count: Any) -> Any:
    """The tuple of `count` int64 at `address`."""
    result = types.UniTuple(types.int64, count.literal_value)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = builder.inttoptr(arguments[0], I64.as_pointer())
        items = [builder.load(builder.gep(start, [I64(i)]), typ=I64) for i in range(count.literal_value)]
        return context.make_tuple(builder, result, items)

    return result(types.int64, count), codegen


@intrinsic
def copy(typing: Any, source: Any, target: Any, num_bytes: Any) -> Any:
    """Copy bytes between two addresses. An assignment to a slice would also compile numba's message for wrong shapes,
    which takes longer than most kernels.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        start, place = (builder.inttoptr(address, byte) for address in arguments[:2])
        cgutils.raw_memcpy(builder, place, start, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def add(typing: Any, address: Any, amount: Any) -> Any:
    """Atomically add to the int64 at `address`. Returns the value before."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Prefetch the cache line of `address` for reading, into the second level."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        Emitter(builder).prefetch(arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def allocate(typing: Any, num_bytes: Any) -> Any:
    """The address of `num_bytes` bytes (a multiple of 64), aligned to 64, until `release`. numba would free an array of
    its own after the last line that names it, although an address taken from it is still in use."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return Emitter(builder).call("aligned_alloc", I64, [I64(64), arguments[0]])

    return types.int64(types.int64), codegen


@intrinsic
def release(typing: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        Emitter(builder).call("free", ir.VoidType(), [arguments[0]])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


SPINS = 1000  # some tens of microseconds; then the thread sleeps
SLEEPER = 1 << 32  # a counter counts up to 2^32 in its lower half, and the threads that went to sleep in its upper half
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())  # the system call's number
_WAIT, _WAKE = 128, 129  # its operations among the threads of a process
_WAIT_SHARED, WAKE_SHARED = 0, 1  # and among processes that share memory


def _futex(e: Emitter, address: Any, operation: int, value: Any) -> None:
    if FUTEX is None:
        e.call("sched_yield", I32, [])
    else:
        e.call("syscall", I64, [I64(FUTEX), address, I64(operation), e.builder.zext(value, I64), I64(0)])


def _wait(e: Emitter, counter: Any, is_over: Callable[[Any], Any], operation: int, count_sleeper: bool) -> None:
    """Spin, then sleep, until `is_over` holds for the lower half of the counter at the address `counter`. A thread that
    gave its core away without sleeping would lose its share of a busy core.
    """
    b = e.builder
    lower = b.inttoptr(counter, I32.as_pointer())
    spins = cgutils.alloca_once_value(b, I64(0))
    check, again, sleep, end = (b.append_basic_block(name) for name in ("check", "again", "sleep", "end"))
    b.branch(check)
    b.position_at_end(check)
    seen = b.load_atomic(lower, "acquire", 4, typ=I32)
    b.cbranch(is_over(seen), end, again)
    b.position_at_end(again)
    spun = b.add(b.load(spins), I64(1))
    b.store(spun, spins)
    e.pause()
    b.cbranch(b.icmp_signed(">", spun, I64(SPINS)), sleep, check)
    b.position_at_end(sleep)  # if the counter changes before the thread sleeps, the system call returns at once
    if count_sleeper:
        b.atomic_rmw("add", b.inttoptr(counter, I64.as_pointer()), I64(SLEEPER), "acq_rel")
    _futex(e, counter, operation, seen)
    b.branch(check)
    b.position_at_end(end)


@intrinsic
def wait_for(typing: Any, counter: Any, count: Any) -> Any:
    """Wait until the counter at the address `counter` has reached `count`. Earlier writes of the threads that counted
    are visible then.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wanted = builder.trunc(arguments[1], I32)
        has_reached = partial(builder.icmp_unsigned, "<=", wanted)
        _wait(Emitter(builder), arguments[0], has_reached, _WAIT, count_sleeper=True)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def wait_for_ranks(typing: Any, counter: Any, lost: Any, count: Any) -> Any:
    """Wait until the lower half of the counter at the address `counter`, which only grows and may overflow, has reached
    `count`, or until the int64 at `lost` is not 0. Otherwise as `wait_for`, among processes that share memory.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        b = builder
        mark, wanted = b.inttoptr(arguments[1], I64.as_pointer()), b.trunc(arguments[2], I32)

        def is_over(seen: Any) -> Any:
            is_there = b.icmp_signed(">=", b.sub(seen, wanted), I32(0))
            return b.or_(is_there, b.icmp_signed("!=", b.load_atomic(mark, "acquire", 8, typ=I64), I64(0)))

        _wait(Emitter(b), arguments[0], is_over, _WAIT_SHARED, count_sleeper=False)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _waker(operation: int) -> Any:
    """Wakes all that sleep until the counter at an address changes."""

    def typing_and_code(typing: Any, counter: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _futex(Emitter(builder), arguments[0], operation, I32(0x7FFFFFFF))
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    return intrinsic(typing_and_code)


wake = _waker(_WAKE)  # for wait_for
wake_ranks = _waker(WAKE_SHARED)  # for wait_for_ranks


def _call_address(context: Any, builder: Any, signature: Any, values: Any) -> Any:
    function, *arguments = values
    kind = ir.FunctionType(ir.VoidType(), [I64] * len(arguments))
    builder.call(builder.inttoptr(function, kind.as_pointer()), arguments)
    return context.get_dummy_value()


@intrinsic
def call(typing: Any, function: Any, args: Any, scratch: Any, index: Any) -> Any:
    """Call a compiled task by its address."""
    return types.void(*[types.int64] * 4), _call_address


@intrinsic
def call_worker(typing: Any, function: Any, job: Any) -> Any:
    """Call a compiled worker by its address."""
    return types.void(types.int64, types.int64), _call_address


@intrinsic(prefer_literal=True)
def tile(typing: Any, name: Any, rows: Any, arguments: Any) -> Any:
    """Run the micro-kernel `name` (a string constant) on as many of `rows` rows as it takes. Returns their number."""
    kernel = tiles.TILES[name.literal_value]
    given = types.UniTuple(types.int64, kernel.num_arguments)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        unpacked = cgutils.unpack_tuple(builder, values[2], kernel.num_arguments)
        return builder.call(tiles.emit(kernel, builder.module), [values[1], *unpacked])

    return types.int64(name, types.int64, given), codegen


def _elementwise(name: str, argument: Any, result: Any, method: Callable[[Emitter, Any], Any]) -> Any:
    def typing_and_code(typing: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return method(Emitter(builder), arguments[0])

        return result(argument), codegen

    typing_and_code.__name__ = typing_and_code.__qualname__ = name
    return intrinsic(typing_and_code)


exp = _elementwise("exp", types.float32, types.float32, Emitter.exp)
rint = _elementwise("rint", types.float32, types.float32, Emitter.rint)
order = _elementwise("order", types.float32, types.int32, Emitter.order)
unorder = _elementwise("unorder", types.int32, types.float32, Emitter.unorder)
half_to_float = _elementwise("half_to_float", types.uint32, types.float32, Emitter.half_to_float)
float_to_half = _elementwise("float_to_half", types.float32, types.uint32, Emitter.float_to_half)
bfloat_to_float = _elementwise("bfloat_to_float", types.uint32, types.float32, Emitter.bfloat_to_float)
float_to_bfloat = _elementwise("float_to_bfloat", types.float32, types.uint32, Emitter.float_to_bfloat)
float_to_e4m3 = _elementwise("float_to_e4m3", types.float32, types.uint32, Emitter.float_to_e4m3)
bits_to_float = _elementwise(
    "bits_to_float", types.uint32, types.float32, lambda e, x: e.builder.bitcast(x, ir.FloatType())
)


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32, fused if the processor can do so, independent of the surrounding code."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return Emitter(builder).fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), codegen
