"""The tests of kernels run a second time on what NVRTC makes of them: pytest --ptx, in processes of their own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lmkit.kernels.cuda import variants
from lmkit.kernels.cuda.module import EXACT, Kernel
from lmkit.kernels.cuda.source import FOLDER, kernel_source
from tests.emulator.ptx import special
from tests.emulator.ptx.syntax import parse
from tests.emulator.ptx.translation import translate
from tests.kernels.cuda import toolchain

pytestmark = pytest.mark.skipif(
    toolchain.missing_nvrtc() is not None or shutil.which("g++") is None, reason="NVRTC and g++ are needed"
)

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
SOURCES = {path.name for path in FOLDER.glob("*.cu")}
# What runs in `make test`: it launches a kernel of each file, with each instruction that touches memory or threads.
SELECTED: dict[str, tuple[str, ...]] = {
    "kernels/cuda/test_emulation.py": (
        "test_ldmatrix",
        "test_movmatrix",
        "test_mma",
    ),
    "kernels/cuda/test_gemm_wide.py": ("test_formats_and_plans[cpu-int4-50-640-plan0]",),
    "kernels/cuda/test_append.py": ("test_rope_append[cpu-types2-128-128-heads2-dtype2-mean]",),
    "kernels/cuda/test_balanced.py": (
        "test_attention[cpu-types0-dtype0-heads0-window0-0.0-mean balance first-new tokens]",
    ),
    "kernels/cuda/test_blocks.py": ("test_copies_are_made_one_after_the_other[cpu-0-pairs1]",),
    "kernels/cuda/test_delta.py": ("test_more_tokens_than_a_tile[cpu]",),
    "kernels/cuda/test_elementwise.py": (
        "test_rms_norm[cpu-given0-result0-7]",
        "test_embedding[cpu-1-dtype1]",
        "test_gated_activation[cpu-silu-1-dtype1]",
        "test_angles_of_far_positions[cpu]",
    ),
    "kernels/cuda/test_experts.py": ("test_places_and_sums[cpu-37-2-41]",),
    "kernels/cuda/test_library.py": (
        "test_few_tokens_stream_dense_weights[cpu-half0-1-200-33]",
        "test_dense[cpu-None-half0-9]",
        "test_codes[cpu-1-16-16-given0-op0-scheme0]",
    ),
    "kernels/cuda/test_int8_rows.py": ("test_formats[cpu-11-plan0-int4]",),
    "kernels/cuda/test_linear.py": ("test_many_tokens_take_the_library[cpu-None-dtype1]",),
    "kernels/cuda/test_invariant.py": ("test_dense[cpu-136-33-half1]",),
    "kernels/cuda/test_latent.py": ("test_rows_are_read[cpu-float16-torch.float16]",),
    "turbo/runners/test_gpu_sampler.py": ("test_edits_are_the_cpus_to_the_bit[cpu]",),
    "kernels/cuda/test_low_rank.py": ("test_rows_by_adapter[cpu-9]",),
    "kernels/cuda/test_ranks.py": (
        "test_sums_are_the_same_bits_on_all_ranks[cpu-2-False]",
        "test_parts_of_rows_come_to_rank_0[cpu-2]",
    ),
    "kernels/cuda/test_sampling.py": ("test_greedy[cpu-argmax-5]",),
    "kernels/cuda/test_selective_scan.py": ("test_sequences_in_all_states[cpu-2x37x8x1x2-torch.float32]",),
    "kernels/cuda/test_short_conv.py": ("test_sequences_in_all_states[cpu-7x1-torch.float32]",),
    "kernels/cuda/test_stages.py": ("test_steps_come_in_their_order_through_all_stages[cpu-2]",),
    "kernels/cuda/test_tokens.py": ("test_known_tokens[cpu-255]",),
    "kernels/cuda/test_wide_attention.py": ("test_attention[cpu-bfloat16-96-20-torch.bfloat16]",),
}
# Other variants of kernels that are launched above, which g++ takes long for.
MORE: dict[str, tuple[str, ...]] = {
    "kernels/cuda/test_decode_attention.py": (
        "test_append_and_attend[cpu-types1-heads1-128-64-dtype1-]",
        "test_append_and_attend[cpu-types6-heads6-64-32-dtype6-scales]",  # two blocks append the same rows
    ),
    "kernels/cuda/test_prefill_attention.py": ("test_attention[cpu-types1-dtype1-heads1-16-window1-]",),
}
OTHERS = "80", "89", "100a", "120a"
# What special.py has for instructions that no kernel has today.
UNUSED = {"_compare_and_swap", "_cvta_shared", "_cvta_to_shared"}


def run(arch: str, *arguments: str) -> str:
    """What pytest says. Raises AssertionError if a test fails."""
    options = ["-n", "0", "-q", "-p", "tests.kernels.cuda.compiled", "-p", "no:cacheprovider", f"--ptx=sm_{arch}"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


def selected(more: bool = False) -> list[str]:
    chosen = SELECTED | MORE if more else SELECTED
    return [f"tests/{file}::{name}" for file, names in chosen.items() for name in names]


def said(output: str, what: str) -> set[str]:
    found = re.search(rf"^{what}: (.*)$", output, re.MULTILINE)
    assert found is not None
    return set(found[1].split())


@pytest.mark.slow
def test_a_selection_runs_compiled() -> None:
    output = run("90a", *selected())
    assert said(output, "sources") >= SOURCES
    ran = said(output, "opcodes")
    idle = {writer.__name__ for pattern, writer in special.WRITERS if not any(map(pattern.fullmatch, ran))}
    assert idle == UNUSED, "instructions that no selected kernel has"


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["90a", *OTHERS])
def test_more_runs_compiled_for_every_gpu(arch: str) -> None:
    assert said(run(arch, *selected(more=True)), "sources") >= SOURCES


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("arch", OTHERS)
def test_every_instruction_is_known(arch: str) -> None:
    """One variant of each kernel, and the first and the last of those that are many."""
    texts: dict[str, list[Kernel]] = {}
    for kernel in variants.common():
        if kernel.source not in EXACT and "wgmma" not in kernel_source(kernel.source):
            texts.setdefault(kernel.source, []).append(kernel)
    for source, kernels in texts.items():
        for kernel in {kernels[0], kernels[-1]}:
            text = parse(toolchain.ptx(kernel_source(source), arch, kernel.defines))
            for name in text.entries:
                translate(text, name)
