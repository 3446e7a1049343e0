"""Choosing an instruction set, and what the compiler makes of the micro-kernels on processors that are not here."""

from __future__ import annotations

import functools
import platform
import re
import subprocess
import sys

import llvmlite.binding as llvm
import pytest
from llvmlite import ir
from numba.core import config

from lmkit.errors import ConfigError
from lmkit.formats.mxfp4 import MXFP4
from lmkit.kernels.cpu import attention_panels, attention_rows, attention_tiles, isa, tiles
from lmkit.kernels.cpu.amx import attention_tiles as amx_tiles
from lmkit.kernels.cpu.amx import dense_products, permission, products, tile_file
from lmkit.kernels.cpu.tiles import CODES4, CODES8, FLOAT8, Tile
from lmkit.kv_dtype import BFLOAT16, FLOAT32, FP8, INT4, INT8, KVDtype

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"


@functools.cache
def assembly(tile: Tile, cpu: str, triple: str = X86) -> str:
    """The optimized assembly of a tile's functions, with the compiler's notes."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    module.triple = triple
    tiles.emit(tile, module).linkage = "external"
    parsed = llvm.parse_assembly(str(module))
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    machine.set_asm_verbosity(True)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    llvm.create_pass_builder(machine, options).getModulePassManager().run(
        parsed, llvm.create_pass_builder(machine, options)
    )
    return str(machine.emit_assembly(parsed))


def innermost_loops(text: str) -> list[list[str]]:
    """The lines of each innermost loop, from its label to the jump back."""
    lines, loops = text.splitlines(), []
    for i, line in enumerate(lines):
        if "Inner Loop Header" not in line:
            continue
        label = next(m[1] for j in range(i, 0, -1) if (m := re.match(r"(\.LBB\w+):", lines[j])))
        jump = re.compile(rf"\t(j\w+|b(\.\w+)?|[ct]bn?z)\t.*{re.escape(label)}\b")
        end = next(j for j in range(i, len(lines)) if jump.match(lines[j]))
        loops.append(lines[i:end])
    return loops


def count(loop: list[str], instruction: str) -> int:
    return sum(f"\t{instruction}\t" in line for line in loop)


def spills(loop: list[str]) -> list[str]:
    return [line for line in loop if "Spill" in line or "Reload" in line]


def attention_kernels(level: isa.Isa, *forms: KVDtype) -> list[Tile]:
    kernels = (attention_tiles.score_tile, attention_tiles.product_tile)
    return [kernel(level, form) for kernel in kernels for form in forms]


@pytest.mark.parametrize(("level", "cpu"), [("avx512_vnni", "znver4"), ("avx2", "znver3"), ("avx2", "haswell")])
def test_scores_of_panels_without_spills(level: str, cpu: str) -> None:
    """No loop waits for a sum that lies in memory, and each is two products for a number of a query."""
    loops = innermost_loops(assembly(attention_panels.panel_score_tile(isa.named(level)), cpu))
    assert loops
    for loop in loops:
        assert not spills(loop)
        assert sum("vfmadd" in line for line in loop) == 2 * count(loop, "vbroadcastss") > 0


@pytest.mark.parametrize(("bits", "values"), [(4, ()), (8, ()), (4, MXFP4.plain.codes.values)])
@pytest.mark.parametrize(
    ("level", "cpu", "register"),
    [
        ("avx512_vnni", "znver4", "zmm"),
        ("avx512_vnni", "sapphirerapids", "zmm"),
        ("avx512_vnni", "icelake-server", "zmm"),
        ("avx_vnni", "alderlake", "ymm"),
    ],
)
def test_vnni_instructions_without_spills(
    level: str, cpu: str, register: str, bits: int, values: tuple[int, ...]
) -> None:
    for packed in {bits == 4, False}:
        tile = tiles.int_tile(isa.named(level), bits, packed=packed, half_scales=not values, values=values)
        dots = [loop for loop in innermost_loops(assembly(tile, cpu)) if any("vpdpbusd" in line for line in loop)]
        assert len(dots) == len(tile.rows)
        for loop in dots:
            assert all(f"%{register}" in line for line in loop if "vpdpbusd" in line)
            assert not [line for line in loop if "Spill" in line or "Reload" in line]


@pytest.mark.parametrize("cpu", ["sapphirerapids", "graniterapids"])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 128), (4, 32), (8, 128), (8, 512)])
def test_products_on_tiles_without_spills(cpu: str, bits: int, group_size: int) -> None:
    """Beside the dots of the next tokens stands the whole epilogue of those before, with its operands in memory."""
    level, cut, instruction = isa.named("amx"), products.grouping(group_size), "tdpbssd" if bits == 4 else "tdpbsud"
    tile = products.product_tile(level, bits, cut, half=True, late=True, more=cut.passes > 1)
    text = assembly(tile, cpu)
    dots = sum(4 * cut.steps * groups for groups in tile.rows)
    assert text.count(f"\t{instruction}\t") == dots
    assert len(re.findall(r"\tvfmadd\w+ps\t", text)) == sum(64 * groups for groups in tile.rows)
    if bits == 8:  # zeros; the compiler prefers two instructions here and there
        assert len(re.findall(r"\tvpdpwssd\t", text)) > 0.9 * sum(64 * groups for groups in tile.rows)
    assert not [line for line in text.splitlines() if re.search("zmm.*(Spill|Reload)", line)]


@pytest.mark.parametrize("cpu", ["sapphirerapids", "graniterapids"])
def test_exact_activations_on_tiles_without_spills(cpu: str) -> None:
    level = isa.named("amx")
    for coded in (True, False):
        text = assembly(dense_products.product_tile(level, coded=coded), cpu)
        assert text.count("\ttdpbf16ps\t") % 8 == 0
        assert text.count("\ttdpbf16ps\t") > 0
        assert len(re.findall(r"\tvfmadd\w+ps\t", text)) == 4 * coded  # a row of the epilogue
        assert not re.search("zmm.*(Spill|Reload)", text)
    halves = ((dense_products.HIGH, "vcvtph2ps"), (dense_products.LOW, "vcvtph2ps"))
    for kind, instruction in ((CODES4, "vpermw"), (CODES8, "vcvtdq2ps"), (FLOAT8, "vpermw"), *halves):
        (loop, *_) = innermost_loops(assembly(dense_products.widen_tile(level, kind), cpu))
        assert any(instruction in line for line in loop)
        assert not [line for line in loop if "Spill" in line or "vpinsr" in line]


def test_tiles_are_configured_and_released() -> None:
    level = isa.named("amx")
    assert "ldtilecfg" in assembly(tile_file.configure_tile(level, 64), "sapphirerapids")
    assert "tilerelease" in assembly(tile_file.release_tile(level), "sapphirerapids")


@pytest.mark.parametrize(("level", "cpu"), [("avx512_vnni", "znver4"), ("avx2", "haswell"), ("avx2", "znver3")])
def test_float_kernels_without_spills(level: str, cpu: str) -> None:
    for tile in (tiles.float_tile(isa.named(level)), *attention_kernels(isa.named(level), BFLOAT16, FLOAT32)):
        loops = innermost_loops(assembly(tile, cpu))
        assert sum(line.count("vfmadd") for loop in loops for line in loop) > 10
        assert not [line for loop in loops for line in loop if "Spill" in line or "Reload" in line]


@pytest.mark.parametrize(
    ("level", "cpu", "of_words", "of_bytes", "register"),
    [
        ("avx512_vnni", "znver4", "vpdpwssd", "vpdpbusd", "zmm"),
        pytest.param("avx512_vnni", "icelake-server", "vpdpwssd", "vpdpbusd", "zmm", marks=pytest.mark.exhaustive),
        ("avx_vnni", "alderlake", "vpdpwssd", "vpdpbusd", "ymm"),
        ("avx2", "znver3", "vpmaddwd", "vpmaddubsw", "ymm"),
    ],
)
def test_attention_on_codes(level: str, cpu: str, of_words: str, of_bytes: str, register: str) -> None:
    of_panels = attention_tiles.product_tile(isa.named(level), attention_tiles.PAIRS, raw=True)
    for tile in (*attention_kernels(isa.named(level), INT8, INT4), of_panels):
        instruction = of_bytes if tile is attention_tiles.score_tile(isa.named(level), INT4) else of_words
        loops = [
            loop for loop in innermost_loops(assembly(tile, cpu)) if any(f"\t{instruction}\t" in line for line in loop)
        ]
        assert len(loops) >= len(tile.rows)  # the compiler may split off a remainder
        for loop in loops:
            assert all(f"%{register}" in line for line in loop if instruction in line)
            assert not [line for line in loop if "Spill" in line and register in line]


def test_bfloat16_pairs_are_widened_without_shuffles_and_spills() -> None:
    for loop in innermost_loops(assembly(tiles.float_tile(isa.named("avx512_vnni"), "bfloat16"), "znver4")):
        assert not [line for line in loop if "vpmovzx" in line or "Spill" in line]


@pytest.mark.parametrize(
    ("level", "cpu", "triple"),
    [("avx512_vnni", "znver4", X86), ("neon_dot", "neoverse-n1", ARM), ("neon_i8mm", "neoverse-v2", ARM)],
)
def test_pairs_of_panels_without_spills(level: str, cpu: str, triple: str) -> None:
    for kind in ("float32", "float16"):
        tile = tiles.float_tile(isa.named(level), kind, pairs=True)
        loops = innermost_loops(assembly(tile, cpu, triple))
        assert len(loops) >= len(tile.rows)
        assert not [line for loop in loops for line in spills(loop)]


@pytest.mark.parametrize(
    ("level", "cpu", "triple", "instruction"),
    [
        ("avx2", "haswell", X86, "vcvtph2ps"),
        ("avx_vnni", "alderlake", X86, "vcvtph2ps"),
        ("avx512_vnni", "znver4", X86, "vcvtph2ps"),
        ("neon_dot", "neoverse-n1", ARM, "fcvtl"),
        ("neon_i8mm", "neoverse-v2", ARM, "fcvtl"),
    ],
)
def test_float16_is_widened_by_an_instruction_without_spills(
    level: str, cpu: str, triple: str, instruction: str
) -> None:
    for tile in (tiles.float_tile(isa.named(level), "float16"), tiles.widen_tile(isa.named(level), "float16")):
        loops = innermost_loops(assembly(tile, cpu, triple))
        assert len(loops) >= len(tile.rows)
        assert all(any(f"\t{instruction}\t" in line for line in loop) for loop in loops)
        assert not [line for loop in loops for line in spills(loop)]


@pytest.mark.parametrize("cpu", ["sapphirerapids", "graniterapids"])
def test_attention_on_tile_registers(cpu: str) -> None:
    level = isa.named("amx")
    products = [(amx_tiles.product_tile(level), "tdpbf16ps")]
    products += [(amx_tiles.code_product_tile(level, planes=n, scaled=n == 2), "tdpbsud") for n in (1, 2)]
    for tile, instruction in products:
        loops = innermost_loops(assembly(tile, cpu))
        assert sum(any(instruction in line for line in loop) for loop in loops) == len(tile.rows)
        assert not [line for loop in loops for line in loop if "Spill" in line or "Reload" in line]
    for kind in (BFLOAT16, FP8, INT8, INT4):  # every key is read once, and panels are made of whole vectors
        for tile in (attention_panels.key_panel_tile(kind, wide=False), amx_tiles.value_panel_tile(kind)):
            (loop, *_) = innermost_loops(assembly(tile, cpu))
            assert any("%zmm" in line for line in loop)
            assert not [line for line in loop if "Spill" in line or "Reload" in line or "vpinsr" in line]


NEON = [  # with the names of LLVM: Graviton 2, Graviton 3, Graviton 4 and Grace, Apple M2
    ("neon_dot", "neoverse-n1", "sdot"),
    ("neon_i8mm", "neoverse-v1", "usmmla"),
    *(pytest.param("neon_i8mm", cpu, "usmmla", marks=pytest.mark.exhaustive) for cpu in ("neoverse-v2", "apple-m2")),
]
LIBRARY_CALL = re.compile(r"\b(call|bl)\s+(?!\"?\.?L?lmkit)")


@pytest.mark.parametrize(("level", "cpu", "instruction"), NEON)
def test_neon_products_without_spills(level: str, cpu: str, instruction: str) -> None:
    """A block has 32 inputs. Each instruction takes the activations of one lane or of two rows as they lie there."""
    vectors, rows_at_once = isa.named(level).int_vectors, 2 if instruction == "usmmla" else 1
    for bits, packed in ((4, True), (4, False), (8, False)):
        tile = tiles.int_tile(isa.named(level), bits, packed=packed, half_scales=True)
        text = assembly(tile, cpu, ARM)
        dots = [loop for loop in innermost_loops(text) if count(loop, instruction)]
        pairs = [-(-rows // rows_at_once) for rows in tile.rows]
        assert [count(loop, instruction) for loop in dots] == [8 * vectors * n for n in pairs]
        for loop in dots:
            assert len(spills(loop)) <= count(loop, instruction) // 10  # only neoverse-v1's scheduler leaves any
            assert not count(loop, "ld1r")
        assert not LIBRARY_CALL.search(text)
        assert "fcvtl" in text  # of the scales


@pytest.mark.parametrize(("level", "cpu", "instruction"), NEON)
def test_neon_attention_and_float_kernels_without_spills(level: str, cpu: str, instruction: str) -> None:
    neon, pairs = isa.named(level), attention_tiles.PAIRS
    kernels = {
        "fmla": [
            tiles.float_tile(neon),
            tiles.float_tile(neon, "bfloat16"),
            *attention_kernels(neon, BFLOAT16, FLOAT32),
        ],
        "smlal": [*attention_kernels(neon, INT8, pairs), attention_tiles.product_tile(neon, INT4)],
        "sdot": [attention_tiles.score_tile(neon, INT4)],
    }
    for of_kernels, given in kernels.items():
        for tile in given:
            text = assembly(tile, cpu, ARM)
            loops = [loop for loop in innermost_loops(text) if count(loop, of_kernels)]
            assert len(loops) >= len(tile.rows)
            assert not [line for loop in loops for line in spills(loop)]
            assert not LIBRARY_CALL.search(text)


@pytest.mark.parametrize(("triple", "cpu"), [(X86, "x86-64"), (ARM, "generic"), (ARM, "neoverse-n1")])
def test_portable_kernels_compile_for_other_processors(triple: str, cpu: str) -> None:
    level = isa.named("portable")
    for tile in (
        tiles.int_tile(level, 4, packed=True, half_scales=True),
        tiles.float_tile(level),
        tiles.float_tile(level, "float16"),
        *attention_kernels(level, FLOAT32, INT8, INT4),
        attention_rows.softcap_tile(),
    ):
        text = assembly(tile, cpu, triple)
        assert "ymm" not in text
        assert not LIBRARY_CALL.search(text)


def forced(level: str, cache: str) -> subprocess.CompletedProcess[str]:
    code = (
        "from lmkit.kernels import ops; import lmkit.kernels; print(ops.linear_w4a8.select('cpu', group_size=32).name)"
    )
    environment = {"LMKIT_CPU_ISA": level, "LMKIT_CACHE_DIR": cache, "PATH": ""}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_forced_level(tmp_path: object) -> None:
    assert forced("portable", str(tmp_path)).stdout.strip() == "cpu.portable"
    assert f"expected one of {', '.join(isa.LEVELS)}" in forced("sse9", str(tmp_path)).stderr


def test_a_level_that_this_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMKIT_CPU_ISA", "avx512_vnni")
    monkeypatch.setattr(isa, "_features", lambda: frozenset({"avx2", "fma", "f16c", "avx512f"}))
    isa.host.cache_clear()
    try:
        with pytest.raises(ConfigError, match="this processor lacks avx512bw, avx512dq, avx512vl, avx512vnni"):
            isa.host()
        monkeypatch.delenv("LMKIT_CPU_ISA")
        assert isa.host().name == "avx2"
        monkeypatch.setattr(isa, "_features", frozenset)
        isa.host.cache_clear()
        assert isa.host().name == "portable"
    finally:
        isa.host.cache_clear()


def test_tiles_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """They are left out with one line. Asked for, they are refused with the reason."""
    monkeypatch.setattr(isa, "_features", lambda: isa.LEVELS["amx"].needs)
    monkeypatch.setattr(permission, "refused", lambda: "the kernel refuses")
    monkeypatch.delenv("LMKIT_CPU_ISA", raising=False)
    isa.host.cache_clear()
    try:
        assert isa.host().name == "avx512_vnni"
        assert isa.host().name == "avx512_vnni"
        assert caplog.messages == ["instruction set amx is not used: the kernel refuses"]
        assert isa.describe() == "avx512_vnni; not amx: the kernel refuses"
        monkeypatch.setenv("LMKIT_CPU_ISA", "amx")
        isa.host.cache_clear()
        with pytest.raises(ConfigError, match="LMKIT_CPU_ISA='amx': the kernel refuses"):
            isa.host()
        monkeypatch.setattr(permission, "refused", lambda: None)
        monkeypatch.delenv("LMKIT_CPU_ISA")
        assert isa.host().name == "amx"
        assert isa.describe() == "amx"
    finally:
        isa.host.cache_clear()


@pytest.mark.parametrize(
    ("hwcap", "hwcap2", "level"),
    [
        (0xFFFFFFFF, 0x7FFFFFFF, "neon_i8mm"),
        (1 << 1 | 1 << 20, ~(1 << 13), "neon_dot"),
        (~(1 << 20), ~0, "portable"),
        (0, 0, "portable"),
    ],
)
def test_levels_of_arm(monkeypatch: pytest.MonkeyPatch, hwcap: int, hwcap2: int, level: str) -> None:
    """LLVM finds none of these features itself. Linux lists those that all cores have."""
    monkeypatch.setattr(isa, "auxiliary", {16: hwcap, 26: hwcap2}.__getitem__)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(isa, "get_host_cpu_features", lambda: "+fp-armv8,-sve")
    monkeypatch.setattr(config, "CPU_NAME", None)
    monkeypatch.setattr(config, "CPU_FEATURES", None)
    isa._complete_arm_features()
    compiled = set(config.CPU_FEATURES.split(","))
    assert {"+fp-armv8", "-sve"} <= compiled
    monkeypatch.setattr(isa, "_features", lambda: frozenset(name[1:] for name in compiled if name[0] == "+"))
    monkeypatch.delenv("LMKIT_CPU_ISA", raising=False)
    isa.host.cache_clear()
    try:
        assert isa.host().name == isa.describe() == level
    finally:
        isa.host.cache_clear()


def test_features_set_by_the_user_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(config, "CPU_NAME", None)
    monkeypatch.setattr(config, "CPU_FEATURES", "+neon")
    isa._complete_arm_features()
    assert config.CPU_FEATURES == "+neon"


def test_permission_names_the_reason() -> None:
    """The question can be asked anywhere. A machine without tiles answers with a reason and no traceback."""
    reason = permission.refused()
    assert reason is None or reason.startswith("the kernel refuses the tile registers (")
