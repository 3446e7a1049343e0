"""Forms of instructions with what the PTX ISA says that they compute: numpy on values of all lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

LANES = 32
DTYPES: dict[str, Any] = {
    f"{k}{n}": f"{d}{n // 8}" for k, d in (("s", "i"), ("u", "u"), ("b", "u")) for n in (8, 16, 32, 64)
}
DTYPES |= {
    "f32": "f4",
    "f64": "f8",
    "f16x2": "u4",
    "bf16x2": "u4",
    "f16": "u2",
    "bf16": "u2",
    "small": "u4",
    "pred": "u4",
}
BITS = {
    "u1": "b16",
    "u2": "b16",
    "u4": "b32",
    "u8": "b64",
    "i1": "b16",
    "i2": "b16",
    "i4": "b32",
    "i8": "b64",
    "f4": "f32",
    "f8": "f64",
}
TINY = np.float32(1e-41)  # subnormal


def flush(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x).astype(np.float32)


def halves(x: np.ndarray) -> np.ndarray:
    return x.view(np.float16).astype(np.float32)


def packed(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint32)


def bf16(x: np.ndarray) -> np.ndarray:
    """The upper halves of bfloat16 pairs that are rounded from float32, as uint16."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def wide(x: np.ndarray) -> np.ndarray:
    """bfloat16 pairs as float32."""
    return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def wrapped(x: Any, dtype: str) -> np.ndarray:
    """Integers of any size, of which the lower bits stay."""
    return (
        np.array([int(each) & (1 << 8 * np.dtype(dtype).itemsize) - 1 for each in x], "u8")
        .astype("u" + dtype[1:])
        .view(dtype)
    )


def exact(change: Callable[..., Any]) -> Callable[..., list[Any]]:
    """On Python's integers, lane by lane."""
    return lambda *x: [change(*(int(each) for each in lane)) for lane in zip(*x, strict=True)]


def rounded(x: np.ndarray, towards: Callable[[np.ndarray], np.ndarray], dtype: str) -> np.ndarray:
    """As integers, at most the greatest and at least the least."""
    info = np.iinfo(dtype)
    return np.array([min(max(int(each), info.min), info.max) for each in towards(x.astype(np.float64))], dtype)


def byte_permuted(a: int, b: int, selector: int) -> int:
    source, out = (b << 32 | a).to_bytes(8, "little"), []
    for nibble in (selector >> 4 * i & 15 for i in range(4)):
        byte = source[nibble & 7]
        out.append((255 if byte & 128 else 0) if nibble & 8 else byte)
    return int.from_bytes(bytes(out), "little")


def inserted(a: int, b: int, at: int, count: int) -> int:
    mask = ((1 << count) - 1) << at
    return (b & ~mask) | (a << at & mask)


def quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


Row = tuple[str, str, str, Callable[..., Any]]  # opcode, type of the result, types of operands, oracle
INTEGERS: list[Row] = []
for t in ("s16", "u16", "s32", "u32", "s64", "u64"):
    two, bits, signed = f"{t} {t}", int(t[1:]), t[0] == "s"
    INTEGERS += [
        (f"add.{t}", t, two, exact(lambda a, b: a + b)),
        (f"sub.{t}", t, two, exact(lambda a, b: a - b)),
        (f"mul.lo.{t}", t, two, exact(lambda a, b: a * b)),
        (f"mul.hi.{t}", t, two, exact(lambda a, b, n=bits: a * b >> n)),
        (f"mad.lo.{t}", t, f"{two} {t}", exact(lambda a, b, c: a * b + c)),
        (f"div.{t}", t, two, exact(quotient)),
        (f"rem.{t}", t, two, exact(lambda a, b: a - quotient(a, b) * b)),
        (f"min.{t}", t, two, np.minimum),
        (f"max.{t}", t, two, np.maximum),
        (f"selp.{t}", t, f"{two} pred", lambda a, b, p: np.where(p, a, b)),
        (f"shr.{t}", t, f"{t} small", exact(lambda a, n: a >> n)),
        *(
            (f"setp.{c}.{t}", "pred", two, test)
            for c, test in {
                "eq": np.equal,
                "ne": np.not_equal,
                "lt": np.less,
                "le": np.less_equal,
                "gt": np.greater,
                "ge": np.greater_equal,
            }.items()
        ),
    ]
    if not signed:
        INTEGERS += [
            (f"setp.{c}.{t}", "pred", two, test)
            for c, test in {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}.items()
        ]
    if bits < 64:
        INTEGERS.append((f"mul.wide.{t}", f"{t[0]}{2 * bits}", two, exact(lambda a, b: a * b)))
        INTEGERS.append(
            (f"mad.wide.{t}", f"{t[0]}{2 * bits}", f"{two} {t[0]}{2 * bits}", exact(lambda a, b, c: a * b + c))
        )
    if signed:
        INTEGERS += [(f"neg.{t}", t, t, exact(lambda a: -a)), (f"abs.{t}", t, t, exact(abs))]
    INTEGERS += [(f"cvt.{d}.{t}", d, t, exact(lambda a: a)) for d in ("s16", "u16", "s32", "u32", "s64", "u64")]
    INTEGERS += [(f"cvt.rn.{f}.{t}", f, t, lambda a, f=f: a.astype(DTYPES[f])) for f in ("f32", "f64")]
for t in ("b16", "b32", "b64"):
    two = f"{t} {t}"
    INTEGERS += [
        (f"and.{t}", t, two, np.bitwise_and),
        (f"or.{t}", t, two, np.bitwise_or),
        (f"xor.{t}", t, two, np.bitwise_xor),
        (f"not.{t}", t, t, np.invert),
        (f"shl.{t}", t, f"{t} small", exact(lambda a, n: a << n)),
        (f"setp.eq.{t}", "pred", two, np.equal),
    ]
LUT = 0x6A
BIT_FORMS: list[Row] = [
    ("and.pred", "pred", "pred pred", np.bitwise_and),
    ("or.pred", "pred", "pred pred", np.bitwise_or),
    ("xor.pred", "pred", "pred pred", np.bitwise_xor),
    ("not.pred", "pred", "pred", lambda a: 1 - a),
    (
        f"lop3.b32:{LUT}",
        "b32",
        "b32 b32 b32",
        exact(
            lambda a, b, c: sum(
                (LUT >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32)
            )
        ),
    ),
    ("prmt.b32", "b32", "b32 b32 b32", exact(byte_permuted)),
    ("shf.l.wrap.b32", "b32", "b32 b32 b32", exact(lambda a, b, n: ((b << 32 | a) << (n & 31)) >> 32)),
    ("shf.r.wrap.b32", "b32", "b32 b32 b32", exact(lambda a, b, n: (b << 32 | a) >> (n & 31))),
    ("bfi.b32", "b32", "b32 b32 small small", exact(inserted)),
    ("bfi.b64", "b64", "b64 b64 small small", exact(inserted)),
    ("bfe.u32", "u32", "u32 small small", exact(lambda a, at, n: a >> at & (1 << n) - 1)),
    ("popc.b32", "u32", "b32", exact(int.bit_count)),
    ("popc.b64", "u32", "b64", exact(int.bit_count)),
    ("brev.b32", "b32", "b32", exact(lambda a: int(f"{a:032b}"[::-1], 2))),
    ("clz.b32", "u32", "b32", exact(lambda a: 32 - a.bit_length())),
    ("bfind.shiftamt.u32", "u32", "u32", exact(lambda a: 32 - a.bit_length() if a else 2**32 - 1)),
    ("cvt.s32.s8", "s32", "s8", lambda a: a),
    ("cvt.u32.u8", "u32", "u8", lambda a: a),
]
FLOATS: list[Row] = []
for t, z in (("f32", ".ftz"), ("f32", ""), ("f64", "")):
    near = flush if z else np.asarray

    def of(change: Callable[..., Any], near: Callable[[Any], Any] = near) -> Callable[..., Any]:
        return lambda *x: near(change(*map(near, x)))

    two = f"{t} {t}"
    unordered = {
        "equ": np.equal,
        "neu": np.not_equal,
        "ltu": np.less,
        "leu": np.less_equal,
        "gtu": np.greater,
        "geu": np.greater_equal,
    }
    FLOATS += [
        *((f"add{rn}{z}.{t}", t, two, of(np.add)) for rn in ("", ".rn")),
        *((f"sub{rn}{z}.{t}", t, two, of(np.subtract)) for rn in ("", ".rn")),
        *((f"mul{rn}{z}.{t}", t, two, of(np.multiply)) for rn in ("", ".rn")),
        (f"fma.rn{z}.{t}", t, f"{two} {t}", of(lambda a, b, c: (a.astype(np.longdouble) * b + c).astype(a.dtype))),
        (f"div.rn{z}.{t}", t, two, of(np.divide)),
        (f"rcp.rn{z}.{t}", t, t, of(np.reciprocal)),
        (f"sqrt.rn{z}.{t}", t, t, of(np.sqrt)),
        (f"rsqrt.approx{z}.{t}", t, t, of(lambda a: 1 / np.sqrt(a))),
        (f"abs{z}.{t}", t, t, of(np.abs)),
        (f"neg{z}.{t}", t, t, of(np.negative)),
        (f"min{z}.{t}", t, two, of(np.fmin)),
        (f"max{z}.{t}", t, two, of(np.fmax)),
        (f"selp.{t}", t, f"{two} pred", lambda a, b, p: np.where(p, a, b)),
        (f"copysign.{t}", t, two, lambda a, b: np.copysign(b, a)),
        *(
            (f"setp.{c}{z}.{t}", "pred", two, lambda a, b, f=f, near=near: f(near(a), near(b)) & ~np.isnan(a + b))
            for c, f in {
                "eq": np.equal,
                "ne": np.not_equal,
                "lt": np.less,
                "le": np.less_equal,
                "gt": np.greater,
                "ge": np.greater_equal,
            }.items()
        ),
        *(
            (f"setp.{c}{z}.{t}", "pred", two, lambda a, b, f=f, near=near: f(near(a), near(b)) | np.isnan(a + b))
            for c, f in unordered.items()
        ),
        (f"setp.nan{z}.{t}", "pred", two, lambda a, b: np.isnan(a + b)),
        (f"setp.num{z}.{t}", "pred", two, lambda a, b: ~np.isnan(a + b)),
        *(
            (
                f"cvt.{how}{z}.{d}.{t}",
                d,
                t,
                lambda a, f=f, d=d, near=near: rounded(np.nan_to_num(near(a)), f, DTYPES[d]),
            )
            for how, f in {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}.items()
            for d in ("s32", "u32")
        ),
    ]
FLOATS += [
    ("ex2.approx.ftz.f32", "f32", "f32", lambda a: flush(np.exp2(flush(a)))),
    ("lg2.approx.ftz.f32", "f32", "f32", lambda a: np.log2(flush(a))),
    ("fma.rm.ftz.f32", "f32", "f32 f32 f32", lambda a, b, c: flush(down(flush(a).astype("f8") * flush(b) + flush(c)))),
    ("add.rz.ftz.f32", "f32", "f32 f32", lambda a, b: flush(towards_zero(flush(a).astype("f8") + flush(b)))),
    ("cvt.ftz.sat.f32.f32", "f32", "f32", lambda a: flush(np.nan_to_num(np.clip(flush(a), 0, 1)))),
    ("cvt.ftz.f64.f32", "f64", "f32", lambda a: flush(a).astype("f8")),
    ("cvt.rn.ftz.f32.f64", "f32", "f64", lambda a: flush(a.astype("f4"))),
    ("cvt.rpi.f64.f64", "f64", "f64", np.ceil),
    ("cvt.rmi.f64.f64", "f64", "f64", np.floor),
    ("cvt.f32.f16", "f32", "f16", lambda a: a.view(np.float16).astype("f4")),
    ("cvt.f32.bf16", "f32", "bf16", wide),
    ("cvt.rn.f16.f32", "f16", "f32", lambda a: a.astype("f2").view("u2")),
    ("cvt.rn.bf16.f32", "bf16", "f32", bf16),
    ("cvt.rn.f16x2.f32", "f16x2", "f32 f32", lambda a, b: packed(np.stack([b, a], 1)).ravel()),
    ("cvt.rn.bf16x2.f32", "bf16x2", "f32 f32", lambda a, b: np.stack([bf16(b), bf16(a)], 1).view("u4").ravel()),
    *(
        (f"{o}.f16x2", "f16x2", "f16x2 f16x2", lambda a, b, f=f: packed(f(halves(a), halves(b))))
        for o, f in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply))
    ),
    (
        "fma.rn.f16x2",
        "f16x2",
        "f16x2 f16x2 f16x2",
        lambda a, b, c: packed(halves(a).astype("f8") * halves(b) + halves(c)),
    ),
    ("fma.rn.bf16x2", "bf16x2", "bf16x2 bf16x2 bf16x2", lambda a, b, c: bf16(wide(a) * wide(b) + wide(c)).view("u4")),
]
ROWS = INTEGERS + BIT_FORMS + FLOATS


def down(x: np.ndarray) -> np.ndarray:
    near = x.astype("f4")
    return np.where(near > x, np.nextafter(near, np.float32(-np.inf)), near)


def towards_zero(x: np.ndarray) -> np.ndarray:
    near = x.astype("f4")
    return np.where(np.abs(near.astype("f8")) > np.abs(x), np.nextafter(near, np.float32(0)), near)


def given(row: int, place: int, type_: str) -> np.ndarray:
    """Values of an operand, one for each lane. None is zero where another is divided by it."""
    random = np.random.default_rng([row, place])
    dtype = np.dtype(DTYPES[type_])
    if type_ == "pred":
        return random.integers(0, 2, LANES, "u4")
    if type_ == "small":
        return random.integers(0, 17, LANES, "u4")
    if type_ in ("f16x2", "f16"):
        return random.normal(size=LANES * dtype.itemsize // 2).astype("f2").view(dtype)
    if type_ in ("bf16x2", "bf16"):
        return bf16(random.normal(size=LANES * dtype.itemsize // 2)).view(dtype)
    if dtype.kind == "f":
        x = random.normal(size=LANES).astype(dtype) * 2.0 ** random.integers(-20, 20, LANES).astype(dtype)
        x[:4] = [0, np.nan, TINY, 1.5] if place == 0 else [2, 1, 1.5, np.nan]
        return x
    return random.integers(np.iinfo(dtype).min // 2, np.iinfo(dtype).max // 2, LANES, dtype) | 1
