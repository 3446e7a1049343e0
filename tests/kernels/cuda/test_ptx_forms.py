"""Each form of an instruction that the translator knows computes what the PTX ISA says: numpy is the oracle."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import numpy as np
import pytest

from lmkit.errors import UnsupportedError
from tests.emulator.ptx import forms
from tests.emulator.ptx.backend import PtxBackend
from tests.emulator.ptx.syntax import PtxError, parse
from tests.emulator.ptx.translation import translate
from tests.kernels.cuda.ptx_rows import BITS, DTYPES, LANES, ROWS, Row, given, wide, wrapped

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="translated PTX is compiled with g++")


def text_of(rows: Sequence[Row]) -> str:
    """A kernel of one block that reads operand k of row r at in[(4 r + k) 32 + lane], 8 bytes each, and writes out."""
    lines = [
        "ld.param.u64 %rd1, [in];",
        "ld.param.u64 %rd2, [out];",
        "mov.u32 %r1, %tid.x;",
        "mul.wide.u32 %rd3, %r1, 8;",
        "add.s64 %rd1, %rd1, %rd3;",
        "add.s64 %rd2, %rd2, %rd3;",
    ]
    for i, (opcode, result, types, _) in enumerate(rows):
        opcode, _, last = opcode.partition(":")
        declared, operands = [], []
        for k, type_ in enumerate(types.split()):
            kind, at = BITS[DTYPES[type_]], f"[%rd1+{(4 * i + k) * LANES * 8}]"
            declared.append(f".reg .{kind} a{k};")
            lines_of = [f"ld.global.{'b8' if type_ in ('s8', 'u8') else kind} a{k}, {at};"]
            if type_ == "pred":
                declared.append(f".reg .pred p{k};")
                lines_of.append(f"setp.ne.s32 p{k}, a{k}, 0;")
            operands.append(f"p{k}" if type_ == "pred" else f"a{k}")
            declared += lines_of
        kind = "pred" if result == "pred" else BITS[DTYPES[result]]
        to = f"[%rd2+{i * LANES * 8}]"
        stored = [f"st.global.{kind} {to}, d;"]
        if kind == "pred":
            stored = [".reg .b32 s;", "selp.u32 s, 1, 0, d;", f"st.global.b32 {to}, s;"]
        operands += [last] if last else []
        lines += ["{", f".reg .{kind} d;", *declared, f"{opcode} d, {', '.join(operands)};", *stored, "}"]
    return wrapped_text(".param .u64 in, .param .u64 out", lines)


def wrapped_text(params: str, lines: Sequence[str]) -> str:
    registers = ".reg .pred %p<9>;\n.reg .b16 %rs<9>;\n.reg .b32 %r<9>;\n.reg .b64 %rd<9>;"
    body = "\n".join(lines)
    return f".visible .entry mine({params})\n.maxntid 1024\n{{\n{registers}\n{body}\nret;\n}}\n"


@pytest.fixture(scope="module")
def backend() -> PtxBackend:
    return PtxBackend("90a", capability=(9, 0), overlap=False)


def test_numbers(backend: PtxBackend) -> None:
    inputs = np.zeros((len(ROWS), 4, LANES, 8), np.uint8)
    for i, (_, _, types, _) in enumerate(ROWS):
        for k, type_ in enumerate(types.split()):
            x = given(i, k, type_)
            inputs[i, k, :, : x.itemsize] = x.view(np.uint8).reshape(LANES, -1)
    out = np.zeros((len(ROWS), LANES, 8), np.uint8)
    backend.run_ptx(text_of(ROWS), "mine", 1, LANES, [inputs, out])
    wrong = []
    with np.errstate(all="ignore"):
        for i, (opcode, result, types, oracle) in enumerate(ROWS):
            dtype = np.dtype(DTYPES[result])
            found = np.ascontiguousarray(out[i, :, : dtype.itemsize]).view(dtype).ravel()
            want = oracle(*(given(i, k, type_) for k, type_ in enumerate(types.split())))
            want = wrapped(want, DTYPES[result]) if isinstance(want, list) else np.asarray(want).astype(dtype)
            near = 4e-7 if "approx" in opcode or "ex2" in opcode else 0
            if "f16" in result:  # any NaN is a NaN
                numbers = np.float16 if not result.startswith("b") else None
                same = (
                    np.array_equal(found.view(numbers), want.view(numbers), equal_nan=True)
                    if numbers
                    else _same_bf16(found, want)
                )
            else:
                same = np.allclose(found, want, rtol=near, atol=0, equal_nan=True)
            if not same:
                wrong.append(f"{opcode}: {found} {want}")
    assert not wrong, "\n".join(wrong)


def _same_bf16(found: np.ndarray, want: np.ndarray) -> bool:
    return np.array_equal(wide(found), wide(want), equal_nan=True)


def test_every_form_has_a_row() -> None:
    opcodes = [row[0].partition(":")[0] for row in ROWS]
    without = [
        form[0]
        for form, (pattern, _, _) in zip(forms.FORMS, forms._COMPILED, strict=True)
        if not any(map(pattern.fullmatch, opcodes))
    ]
    assert without == []


@pytest.mark.parametrize(
    ("instruction", "named"),
    [
        ("tanh.approx.f32 %r1, %r2;", "tanh.approx.f32"),
        ("add.sat.s32 %r1, %r2, %r3;", "add.sat.s32"),
        ("ld.global.v8.f32 {%r1}, [%rd1];", "ld.global.v8.f32"),
        ("mbarrier.init.shared.b64 [%rd1], 1;", "mbarrier.init"),
        ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 %r1, %r1, %r1, %r1;", "m16n8k8"),
        ("wgmma.wait_group.sync 0;", "wgmma.wait_group.sync"),
        ("cp.async.cg.shared.global [%r1], [%rd1], 8, %r2;", "16 bytes"),
        ("atom.global.inc.u32 %r1, [%rd1], %r2;", "atom.global.inc"),
        ("mov.u32 %r1, nowhere;", "nowhere"),
    ],
)
def test_an_unknown_instruction_is_named_with_its_line(backend: PtxBackend, instruction: str, named: str) -> None:
    with pytest.raises(UnsupportedError, match="mine: ") as error:
        backend.load_ptx(wrapped_text(".param .u64 in", [instruction]), "mine")
    assert named in str(error.value)
    if named != "nowhere":
        assert "line 8" in str(error.value)


def test_unknown_text_is_refused() -> None:
    for text, named in ((".func (.param .b32 x) f() {}", ".func"), (".entry mine(.param .b8 x[24]) { ret; }", "x[24]")):
        with pytest.raises(PtxError) as error:
            parse(text)
        assert named in str(error.value)
    with pytest.raises(PtxError, match="no entry point yours, but mine"):
        translate(parse(wrapped_text(".param .u64 in", [])), "yours")
