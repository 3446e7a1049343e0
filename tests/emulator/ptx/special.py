"""Instructions that touch memory, other threads or several registers: each form has a function that writes its C++."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.emulator.ptx.operands import TYPES, Operands
from tests.emulator.ptx.syntax import Instruction, PtxError, elements

Writer = Callable[[Instruction, "re.Match[str]", Operands], str]
WRITERS: list[tuple[re.Pattern[str], Writer]] = []

HINTS = r"(\.(ca|cg|cs|lu|cv|wb|wt|nc|volatile|L1::no_allocate|L2::\w+))*"
SPACE = r"(\.(?P<space>global|shared|local))?"
VECTOR = r"(\.v(?P<n>2|4))?"
TYPE = r"\.(?P<t>[bsuf](8|16|32|64))"
ATOMICS = {
    "add": "a + b",
    "min": "a < b ? a : b",
    "max": "a > b ? a : b",
    "and": "a & b",
    "or": "a | b",
    "xor": "a ^ b",
    "exch": "b",
}
REDUCTIONS = {"add": "Sum", "min": "Least", "max": "Greatest"}


def form(pattern: str) -> Callable[[Writer], Writer]:
    def add(writer: Writer) -> Writer:
        WRITERS.append((re.compile(pattern), writer))
        return writer

    return add


def statements(instruction: Instruction, operands: Operands) -> str | None:
    """The C++ of an instruction that has a function here, or None."""
    for pattern, writer in WRITERS:
        if (found := pattern.fullmatch(instruction.opcode)) is not None:
            return writer(instruction, found, operands)
    return None


def _array(type_: str, name: str, values: list[str]) -> str:
    return f"const {TYPES[type_]} {name}[{len(values)}] = {{{', '.join(values)}}};"


def _put_all(operands: Operands, registers: tuple[str, ...], array: str, type_: str) -> str:
    return " ".join(operands.put(register, f"{array}[{i}]", type_) for i, register in enumerate(registers))


# ---- registers


@form(r"mov\.(?P<t>[bsuf](16|32|64)|pred)")
def _mov(i: Instruction, m: re.Match[str], o: Operands) -> str:
    to, source = i.operands
    if to.startswith("{"):
        parts = elements(to)
        bits = int(m["t"][1:]) // len(parts)
        whole = f"const u64 whole = {o.value(source, m['t'])};"
        return whole + " ".join(
            o.put(part, f"static_cast<u{bits}>(whole >> {n * bits})") for n, part in enumerate(parts)
        )
    if source.startswith("{"):
        parts = elements(source)
        bits = int(m["t"][1:]) // len(parts)
        pieces = (f"static_cast<u64>({o.value(part, f'b{bits}')}) << {n * bits}" for n, part in enumerate(parts))
        return o.put(to, f"static_cast<{TYPES[m['t']]}>({' | '.join(pieces)})")
    return o.put(to, o.value(source, m["t"]), m["t"])


@form(r"cvta(\.to)?\.(global|local|const)\.(?P<t>u64)")
def _cvta(i: Instruction, m: re.Match[str], o: Operands) -> str:
    return o.put(i.operands[0], o.value(i.operands[1], m["t"]))


@form(r"cvta\.shared\.u64")
def _cvta_shared(i: Instruction, m: re.Match[str], o: Operands) -> str:
    return o.put(i.operands[0], f"{o.value(i.operands[1], 'u64')} + SHARED_WINDOW")


@form(r"cvta\.to\.shared\.u64")
def _cvta_to_shared(i: Instruction, m: re.Match[str], o: Operands) -> str:
    return o.put(i.operands[0], f"{o.value(i.operands[1], 'u64')} - SHARED_WINDOW")


# ---- memory


@form(r"ld\.param" + TYPE)
def _load_param(i: Instruction, m: re.Match[str], o: Operands) -> str:
    name, type_ = o.parameter(i.operands[1])
    if type_[1:] != m["t"][1:]:
        raise PtxError(f"a parameter of type {type_} is read as {m['t']}")
    return o.put(i.operands[0], f"get<{TYPES[m['t']]}>({name})")


@form(r"ld(\.(?P<acquire>acquire|relaxed)\.(?P<scope>gpu|sys))?" + SPACE + HINTS + VECTOR + TYPE)
def _load(i: Instruction, m: re.Match[str], o: Operands) -> str:
    registers = elements(i.operands[0])
    kind = "acquire" if m["acquire"] else m["space"] or "generic"
    load = f"load_{kind}<{TYPES[m['t']]}, {len(registers)}>(v, {o.address(i.operands[1])}, {i.line})"
    return f"{TYPES[m['t']]} v[{len(registers)}]; {load}; {_put_all(o, registers, 'v', m['t'])}"


@form(r"st(\.(?P<release>release|relaxed)\.(?P<scope>gpu|sys))?" + SPACE + HINTS + VECTOR + TYPE)
def _store(i: Instruction, m: re.Match[str], o: Operands) -> str:
    registers = elements(i.operands[1])
    kind = "release" if m["release"] else m["space"] or "generic"
    values = _array(m["t"], "v", [o.value(register, m["t"]) for register in registers])
    return f"{values} store_{kind}<{TYPES[m['t']]}, {len(registers)}>(v, {o.address(i.operands[0])}, {i.line});"


@form(rf"(atom|red){SPACE}\.(?P<o>{'|'.join(ATOMICS)})\.(?P<t>[bsuf](32|64))")
def _atomic(i: Instruction, m: re.Match[str], o: Operands) -> str:
    reads = i.opcode.startswith("atom")
    address, value = i.operands[1:] if reads else i.operands
    name = TYPES[m["t"]]
    change = f"[]({name} a, {name} b) -> {name} {{ return {ATOMICS[m['o']]}; }}"
    call = (
        f"atomic_{m['space'] or 'generic'}<{name}>({o.address(address)}, {o.value(value, m['t'])}, {change}, {i.line})"
    )
    return o.put(i.operands[0], call) if reads else f"{call};"


@form(rf"atom{SPACE}\.cas\.(?P<t>b32|b64)")
def _compare_and_swap(i: Instruction, m: re.Match[str], o: Operands) -> str:
    name, (_, address, expected, value) = TYPES[m["t"]], i.operands
    change = f"[e = {o.value(expected, m['t'])}]({name} a, {name} b) -> {name} {{ return a == e ? b : a; }}"
    call = (
        f"atomic_{m['space'] or 'generic'}<{name}>({o.address(address)}, {o.value(value, m['t'])}, {change}, {i.line})"
    )
    return o.put(i.operands[0], call)


@form(r"cp\.async\.(ca|cg)\.shared\.global(\.L2::\w+)?")
def _copy(i: Instruction, m: re.Match[str], o: Operands) -> str:
    to, source, size, *rest = i.operands
    given = o.value(rest[0], "u32") if rest and not rest[0].startswith("%rd") else size
    if m[1] == "cg" and size != "16":
        raise PtxError(f"cp.async.cg copies 16 bytes, not {size}")
    return f"copy_async({o.address(to)}, {o.address(source)}, {size}, {given}, {i.line});"


@form(r"cp\.async\.bulk\.prefetch\.L2\.global")
def _prefetch(i: Instruction, m: re.Match[str], o: Operands) -> str:
    return f"prefetch_bytes({o.address(i.operands[0])}, {o.value(i.operands[1], 'u32')}, {i.line});"


@form(r"createpolicy\.fractional\.L2::evict_first\.b64")
def _policy(i: Instruction, m: re.Match[str], o: Operands) -> str:
    return o.put(i.operands[0], "0ull")


@form(r"cp\.async\.commit_group")
def _commit(i: Instruction, m: re.Match[str], o: Operands) -> str:
    return "lm::commit_copies();"


@form(r"cp\.async\.wait_group")
def _wait_group(i: Instruction, m: re.Match[str], o: Operands) -> str:
    return f"lm::wait_copies({i.operands[0]});"


@form(r"ldmatrix\.sync\.aligned\.m8n8\.x(?P<n>1|2|4)(?P<trans>\.trans)?\.shared\.b16")
def _load_matrix(i: Instruction, m: re.Match[str], o: Operands) -> str:
    call = f"load_matrices<{m['n']}, {str(bool(m['trans'])).lower()}>(v, {o.address(i.operands[1])}, {i.line});"
    return f"u32 v[{m['n']}]; {call} {_put_all(o, elements(i.operands[0]), 'v', 'b32')}"


# ---- threads


@form(r"(bar|barrier)\.(cta\.)?sync(\.aligned)?")
def _barrier(i: Instruction, m: re.Match[str], o: Operands) -> str:
    number, *count = (o.value(operand, "u32") for operand in i.operands)
    return f"lm::barrier({number}, {count[0] if count else 0}, {i.line});"


@form(r"bar\.warp\.sync")
def _warp_barrier(i: Instruction, m: re.Match[str], o: Operands) -> str:
    return f"lm::warp_barrier({o.value(i.operands[0], 'u32')}, {i.line});"


@form(r"membar\.(?P<level>cta|gl|sys)|fence\.(acq_rel|sc)\.(cta|gpu|sys)")
def _fence(i: Instruction, m: re.Match[str], o: Operands) -> str:
    return ";" if i.opcode.endswith("cta") else "lm::fence_memory();"


@form(r"fence\.proxy\.async(\.shared::cta)?")
def _proxy_fence(i: Instruction, m: re.Match[str], o: Operands) -> str:
    return "lm::fence_copies();"


@form(r"griddepcontrol\.wait")
def _wait_for_previous(i: Instruction, m: re.Match[str], o: Operands) -> str:
    return "lm::wait_for_previous();"


@form(r"griddepcontrol\.launch_dependents")
def _launch_next(i: Instruction, m: re.Match[str], o: Operands) -> str:
    return ";"


@form(r"shfl\.sync\.(?P<mode>bfly|up|down|idx)\.b32")
def _shuffle(i: Instruction, m: re.Match[str], o: Operands) -> str:
    (to, _, inside), rest = i.operands[0].partition("|"), [o.value(operand, "u32") for operand in i.operands[1:]]
    call = f"const Shuffled s = shuffle<Lanes::{m['mode']}>({', '.join(rest)}, {i.line});"
    return f"{call} {o.put(to, 's.value', 'b32')}" + (f" {o.put(inside, 's.inside', 'pred')}" if inside else "")


@form(r"vote\.sync\.(?P<mode>ballot(?=\.b32)|any(?=\.pred)|all(?=\.pred))\.\w+")
def _vote(i: Instruction, m: re.Match[str], o: Operands) -> str:
    mask = o.value(i.operands[2], "u32")
    votes = f"lm::ballot({mask}, {_predicate(i.operands[1], o)}, {i.line})"
    meaning = {"ballot": "", "any": " != 0", "all": f" == {mask}"}[m["mode"]]
    return o.put(i.operands[0], votes + meaning)


def _predicate(operand: str, o: Operands) -> str:
    return f"!{o.value(operand[1:], 'pred')}" if operand.startswith("!") else o.value(operand, "pred")


@form(rf"redux\.sync\.(?P<o>{'|'.join(REDUCTIONS)})\.(?P<t>[su]32)")
def _reduce(i: Instruction, m: re.Match[str], o: Operands) -> str:
    value, mask = o.value(i.operands[1], m["t"]), o.value(i.operands[2], "u32")
    return o.put(i.operands[0], f"lm::reduce({mask}, {value}, {i.line}, lm::{REDUCTIONS[m['o']]}{{}})")


# ---- matrices


@form(r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16")
def _transpose(i: Instruction, m: re.Match[str], o: Operands) -> str:
    return o.put(i.operands[0], f"movmatrix_trans({o.value(i.operands[1], 'b32')}, {i.line})")


@form(
    r"mma\.sync\.aligned\.(m16n8k16\.row\.col\.(?P<t>f32)\.(?P<h>bf16|f16)\.(?P=h)\.f32"
    r"|m16n8k32\.row\.col\.((?P<i>s32)\.s8\.s8\.s32|(?P<f>f32)\.e4m3\.e4m3\.f32))"
)
def _mma(i: Instruction, m: re.Match[str], o: Operands) -> str:
    to, a, b, c = (elements(operand) for operand in i.operands)
    type_ = m["t"] or m["i"] or m["f"]
    multiply = f"lm::mma_16<{m['h'].upper()}>" if m["h"] else "lm::mma_s8" if m["i"] else "lm::mma_e4m3"
    sums = f"{TYPES[type_]} c[4] = {{{', '.join(o.value(x, type_) for x in c)}}};"
    factors = _array("b32", "a", [o.value(x, "b32") for x in a])
    args = f"lm::Mma args{{c, a, {{{o.value(b[0], 'b32')}, {o.value(b[1], 'b32')}}}}};"
    return f"{sums} {factors} {args} lm::collective(~0u, {i.line}, &args, {multiply}); {_put_all(o, to, 'c', type_)}"


@form(r"wgmma\.fence\.sync\.aligned")
def _wgmma_fence(i: Instruction, m: re.Match[str], o: Operands) -> str:
    return "lm::warpgroup_fence();"


@form(r"wgmma\.commit_group\.sync\.aligned")
def _wgmma_commit(i: Instruction, m: re.Match[str], o: Operands) -> str:
    return "lm::warpgroup_commit();"


@form(r"wgmma\.wait_group\.sync\.aligned")
def _wgmma_wait(i: Instruction, m: re.Match[str], o: Operands) -> str:
    return f"lm::warpgroup_wait({i.operands[0]});"


@form(r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k16\.f32\.(?P<h>bf16|f16)\.(?P=h)")
def _wgmma(i: Instruction, m: re.Match[str], o: Operands) -> str:
    sums, a, matrix, adds, *rest = i.operands
    if rest != ["1", "1", "0"]:
        raise PtxError(f"wgmma with the scales and the order {rest} is not known")
    if len(elements(sums)) != int(m["n"]) // 2:
        raise PtxError(f"wgmma of {m['n']} columns has {len(elements(sums))} sums")
    factors = _array("b32", "a", [o.value(x, "b32") for x in elements(a)])
    tuples = f"reinterpret_cast<float*>({o.arrays[elements(sums)]}), {m['n']}, a"
    described = f"matrix_of({o.value(matrix, 'u64')}, {m['n']}, {i.line})"
    half = f"{m['h'].upper()}::to_float"
    return f"{factors} lm::warpgroup_multiply({tuples}, {described}, {o.value(adds, 'pred')}, {half}, {i.line});"
