"""Faults planted in the kernels' sources, one at a time: which of them does each emulator catch?

    python -m tests.emulator.mutant_runs [--sample 40] [--out build/mutants.jsonl]

A mutant swaps operands of inline PTX, changes a field of a matrix descriptor, leaves out a barrier, fence or commit,
waits for one group less, or moves a bound by one. EQUIVALENT names those that change nothing.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lmkit.kernels.cuda import source

BACKENDS: dict[str, str | None] = {"g++": None, "ptx": "90a"}  # what code is compiled for; None: the source text
HERE = "tests/kernels/cuda"
DECODING = (
    f"{HERE}/test_decode_attention.py::test_append_and_attend[cpu-types2-heads2-128-128-dtype2-mean]",
    f"{HERE}/test_decode_attention.py::test_splits[cpu-3]",
)
PROMPTS = (
    f"{HERE}/test_prefill_attention.py::test_attention[cpu-types1-dtype1-heads1-16-window1-]",
    f"{HERE}/test_prefill_attention.py::test_many_splits_merge[cpu]",
    f"{HERE}/test_prefill_attention.py::test_a_tile_ends_with_the_first_key_that_is_no_sink[cpu]",
    f"{HERE}/test_prefill_attention.py::test_few_queries_split_their_keys[cpu-window1-types1]",
    f"{HERE}/test_prefill_attention.py::test_learned_sinks[cpu-window1-4]",
    f"{HERE}/test_invariant.py::test_attention[cpu-types5-dtype5-heads5-window5-mean balance first-0.0]",
    f"{HERE}/test_balanced.py::test_splits[cpu-prompts-2]",
)
PRODUCTS = (
    f"{HERE}/test_linear.py::test_formats[cpu-int4-32]",
    f"{HERE}/test_linear.py::test_numbers_of_tokens[cpu-13-plan2]",
    f"{HERE}/test_overlap.py::test_products_read_weights_before_they_wait[5-plan1]",
    f"{HERE}/test_linear.py::test_norms_inside_the_product[cpu-dtype0-3-plan1]",
    f"{HERE}/test_int8_rows.py::test_numbers_of_tokens[cpu-67-plan1]",
    f"{HERE}/test_experts.py::test_rounded_inputs[cpu-int4-32-5]",
)
WIDE_PRODUCTS = (
    f"{HERE}/test_gemm_wide.py::test_formats_and_plans[cpu-int4-50-640-plan0]",
    f"{HERE}/test_gemm_wide.py::test_formats_and_plans[cpu-int4-64-128-264-plan3]",
)
FORMS = tuple(
    f"{HERE}/test_emulation.py::{name}"
    for name in ("test_ldmatrix", "test_movmatrix", "test_mma", "test_mma_s8", "test_half_types", "test_float8",
                 "test_bits", "test_copies_land_when_they_are_waited_for")
)  # fmt: skip
TESTS: dict[str, tuple[str, ...]] = {
    "ptx.cuh": (*FORMS, PRODUCTS[0], PRODUCTS[-1]),
    "wgmma.cuh": WIDE_PRODUCTS[:1],
    "kv.cuh": (*DECODING[:1], f"{HERE}/test_decode_attention.py::test_levels[cpu-types2-heads2-96]"),
    "gemm.cuh": PRODUCTS[:1],
    "recurrent.cuh": (f"{HERE}/test_short_conv.py::test_sequences_in_all_states[cpu-7x1-torch.float32]",),
    "peers.cuh": (f"{HERE}/test_stages.py::test_steps_come_in_their_order_through_all_stages[cpu-2]",),
    "rows.cuh": (f"{HERE}/test_overlap.py::test_products_read_weights_before_they_wait[5-plan1]",),
    "work.cuh": (f"{HERE}/test_work.py::test_any_lengths[cpu-1]",),
    "gemm.cu": PRODUCTS,
    "gemm_wide.cu": WIDE_PRODUCTS,
    "decode_attention.cu": DECODING,
    "prefill_attention.cu": PROMPTS,
    "wide_attention.cu": (
        f"{HERE}/test_wide_attention.py::test_attention[cpu-bfloat16-96-20-torch.bfloat16]",
        f"{HERE}/test_wide_attention.py::test_attention[cpu-int3-96-6-torch.float16]",
        f"{HERE}/test_wide_attention.py::test_a_row_is_stored_once[cpu-int4]",
        f"{HERE}/test_wide_attention.py::test_other_shapes_of_a_block[cpu-shape1]",
        f"{HERE}/test_wide_attention.py::test_heads_that_are_wide",
    ),
    "append.cu": (
        f"{HERE}/test_append.py::test_rope_append[cpu-types2-128-128-heads2-dtype2-mean]",
        f"{HERE}/test_append.py::test_levels[cpu-types1-256]",
    ),
    "copy.cu": (f"{HERE}/test_blocks.py::test_copies_are_made_one_after_the_other[cpu-0-pairs1]",),
    "delta.cu": (
        f"{HERE}/test_delta.py::test_more_tokens_than_a_tile[cpu]",
        f"{HERE}/test_delta.py::test_sequences_in_all_states[cpu-1x1x16x5x1]",
    ),
    "dense.cu": (f"{HERE}/test_invariant.py::test_dense[cpu-136-33-half1]",),
    "dequantize.cu": (
        f"{HERE}/test_linear.py::test_packing_loses_nothing[cpu-int4-silu]",
        f"{HERE}/test_linear.py::test_packing_loses_nothing[cpu-nvfp4-None]",
    ),
    "edit_logits.cu": ("tests/turbo/runners/test_gpu_sampler.py::test_edits_are_the_cpus_to_the_bit[cpu]",),
    "elementwise.cu": (
        f"{HERE}/test_elementwise.py::test_embedding[cpu-1-dtype1]",
        f"{HERE}/test_elementwise.py::test_gated_activation[cpu-silu-1-dtype1]",
        f"{HERE}/test_elementwise.py::test_angles_of_far_positions[cpu]",
        f"{HERE}/test_elementwise.py::test_gather_columns[cpu-30-dtype1]",
        f"{HERE}/test_elementwise.py::test_softcap[cpu-shape1]",
    ),
    "experts.cu": (
        f"{HERE}/test_experts.py::test_places_and_sums[cpu-37-2-41]",
        f"{HERE}/test_experts.py::test_places_and_sums[cpu-70-8-130]",
        f"{HERE}/test_experts.py::test_route[cpu-1-all]",
        f"{HERE}/test_experts.py::test_route[cpu-21-best of a group]",
        f"{HERE}/test_experts.py::test_equal_and_missing_scores_choose_the_lower_numbers[cpu-nan]",
    ),
    "gemv.cu": (f"{HERE}/test_library.py::test_few_tokens_stream_dense_weights[cpu-half0-7-520-40]",),
    "low_rank.cu": (
        f"{HERE}/test_low_rank.py::test_rows_by_adapter[cpu-9]",
        f"{HERE}/test_low_rank.py::test_rows_by_adapter[cpu-130]",
        f"{HERE}/test_low_rank.py::test_add_low_rank[cpu-64-columns0-given0-result0-half0]",
        f"{HERE}/test_low_rank.py::test_gated_panels[cpu-8-300-given0-result0-silu]",
    ),
    "norm.cu": (
        f"{HERE}/test_elementwise.py::test_rms_norm[cpu-given0-result0-7]",
        f"{HERE}/test_elementwise.py::test_codes_are_the_reference_s[cpu-codes1-given2-515]",
        f"{HERE}/test_elementwise.py::test_as_many_columns_as_there_may_be[cpu-32768]",
        f"{HERE}/test_overlap.py::test_products_read_weights_before_they_wait[5-plan1]",
    ),
    "ranks.cu": (
        f"{HERE}/test_ranks.py::test_sums_are_the_same_bits_on_all_ranks[cpu-2-False]",
        f"{HERE}/test_ranks.py::test_parts_of_rows_come_to_rank_0[cpu-2]",
        f"{HERE}/test_ranks.py::test_rows_of_experts_come_to_all_ranks[cpu-3]",
    ),
    "read_rows.cu": (f"{HERE}/test_latent.py::test_rows_are_read[cpu-int8-torch.bfloat16]",),
    "round_groups.cu": (
        f"{HERE}/test_int8_rows.py::test_formats[cpu-11-plan0-int4]",
        f"{HERE}/test_int8_rows.py::test_formats[cpu-3-plan1-int4-row]",
    ),
    "sampling.cu": (
        f"{HERE}/test_sampling.py::test_greedy[cpu-argmax-700]",
        f"{HERE}/test_sampling.py::test_draws_what_the_reference_draws[cpu-40-400]",
        f"{HERE}/test_sampling.py::test_draws_what_the_reference_draws[cpu-523-200]",
        f"{HERE}/test_sampling.py::test_nucleus_sums_are_exact[cpu-0]",
        f"{HERE}/test_sampling.py::test_greedy[cpu-argmax-20011]",
        f"{HERE}/test_sampling.py::test_greedy[cpu-sample-20011]",
        "tests/turbo/runners/test_gpu_sampler.py::test_tokens_and_logprobs_are_the_cpus[cpu-300-80]",
    ),
    "selective_scan.cu": (
        f"{HERE}/test_selective_scan.py::test_sequences_in_all_states[cpu-2x37x8x1x2-torch.float32]",
    ),
    "short_conv.cu": (f"{HERE}/test_short_conv.py::test_sequences_in_all_states[cpu-7x1-torch.float32]",),
    "stages.cu": (
        f"{HERE}/test_stages.py::test_steps_come_in_their_order_through_all_stages[cpu-2]",
        f"{HERE}/test_stages.py::test_a_stage_waits_for_room_and_not_for_ever[cpu]",
    ),
    "tokens.cu": (f"{HERE}/test_tokens.py::test_known_tokens[cpu-257]",),
    "turn.cu": (f"{HERE}/test_balanced.py::test_splits[cpu-new tokens-2]",),
}
# By kind: what is replaced, and by what. Within a line, or in an asm statement.
SWAPS: dict[str, tuple[tuple[str, str], ...]] = {
    "operand": (
        (r'"r"\(a\), "r"\(b\)', '"r"(b), "r"(a)'),
        (r'"f"\(hi\), "f"\(lo\)', '"f"(lo), "f"(hi)'),
        (r'"r"\(b0\), "r"\(b1\)', '"r"(b1), "r"(b0)'),
        (r'"r"\(a\[1\]\), "r"\(a\[2\]\)', '"r"(a[2]), "r"(a[1])'),
        (r'"=r"\(r\[0\]\), "=r"\(r\[1\]\)', '"=r"(r[1]), "=r"(r[0])'),
        (r"\{%4,%5,%6,%7\}", "{%5,%4,%6,%7}"),
        (r"(?<=x4)\.trans\.shared", ".shared"),
        (r"valid \? (16|BYTES) : 0", r"valid ? 0 : \1"),
    ),
    "descriptor": (
        (r"(next_k >> 4\)) << 16 (.*next_n >> 4\)) << 32", r"\1 << 32 \2 << 16"),
        (r"0x3ffffu\) >> 4", "0x3ffffu) >> 3"),
        (r"matrix \+ \(bytes >> 4\)", "matrix + (bytes >> 3)"),
        (r"CHUNK_BYTES, 128\)", "128, CHUNK_BYTES)"),
        (r"2 \* \(part \* STEPS \+ step\) \* CHUNK_BYTES", "(part * STEPS + step) * CHUNK_BYTES"),
    ),
    "barrier": ((r"__syncthreads\(\);", ";"), (r"__syncwarp\(\);", ";")),
    "fence": (
        (r"__threadfence\(\);", ";"),
        (r"(?<!void )\bfence_for_wgmma\(\);", ";"),
        (r"(?<!void )\bwgmma_fence\(\);", ";"),
    ),
    "group": (
        (r"(?<!void )\bcp_async_commit\(\);", ";"),
        (r"(?<!void )\bwgmma_commit\(\);", ";"),
        (r"\bcp_async_wait<([^>]+)>\(\);", r"cp_async_wait<\1 + 1>();"),
        (r"\bwgmma_wait<(\d)>\(\);", r"wgmma_wait<\1 + 1>();"),
    ),
    "bound": (
        (r"(?<=\bif \()([^;{]*\w) < ([a-z]\w*)", r"\1 <= \2"),
        (r"(?<=\bif \()([^;{]*\w) >= ([a-z]\w*)", r"\1 > \2"),
        (r"(\bfor \([^;]*(?:threadIdx|lane|warp)[^;]*; [^;]*\w) < (\w)", r"\1 <= \2"),  # not those of registers
        (r"(valid = [^;]*\w) < ([a-z]\w*)", r"\1 <= \2"),
    ),
}  # fmt: skip
# Mutants that change no result and add no race, with the reason.
COMMUTES = re.compile(r'asm\("(add|mul|fma\.rn)\.b?f16x2 ')
EQUIVALENT: tuple[tuple[str, re.Pattern[str], str], ...] = (
    ("operand", COMMUTES, "a + b and a * b are b + a and b * a to the last bit"),
    ("bound", re.compile(r"experts\.cu.*e < experts; e \+= blockDim"), "counts[experts] is starts[0], which is 0"),
    (
        "bound",
        re.compile(r"prefill_attention\.cu.*i < KEYS \* \(MEAN_COLUMNS / 6 \+ 1\)"),
        "its columns end before there",
    ),
    ("group", re.compile(r"(prefill_attention\.cu:748|wide_attention\.cu:359) "), "the last group has no copy"),
    ("operand", re.compile(r'asm\("lop3'), "a & b is b & a, and nothing else is computed so"),
    ("bound", re.compile(r"work\.cuh.*base < sequences; base \+= blockDim"), "no sequence is there to add"),
    (
        "bound",
        re.compile(r"wide_attention\.cu.*if \(i < end\) copy_tile"),
        "nothing reads that tile",
    ),
    ("bound", re.compile(r"turn\.cu.*row \+ e \* GROUPS >= count"), "the row's sums are dropped"),
    ("bound", re.compile(r"prefill_attention\.cu.*\|\| i >= end \|\|"), "nothing loads that tile"),
    ("bound", re.compile(r"prefill_attention\.cu.*first_row \+ row < work\.num_rows"), "the rows are never written"),
    ("bound", re.compile(r"sampling\.cu.*!\(x < infinity\(\)\)"), "infinity stays infinity"),
    ("bound", re.compile(r"gemm\.cu.*valid = first < stages"), "(WARPS_K - 1) / WARPS_K is 0"),
    ("bound", re.compile(r"gemm(_wide)?\.cu.*FIRST >= count"), "no token is there to give"),
    ("bound", re.compile(r"experts\.cu.*other == value && at < index"), "at == index is the same value"),
    ("bound", re.compile(r"experts\.cu.*at % 32 == lane_id\(\)"), "no value has that number"),
    ("barrier", re.compile(r"(gemm|norm)\.cu.*if \([^)]*\) __syncwarp"), "it orders the compiler's loads only"),
)


@dataclass(frozen=True)
class Mutant:
    file: str
    kind: str
    line: int
    before: str  # the line
    text: str  # the line, changed

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.kind}: {self.before.strip()} -> {self.text.strip()}"


def equivalent(name: str, kind: str) -> str:
    """Why the mutant of that name changes nothing, or "" if it does."""
    return next((why for of, pattern, why in EQUIVALENT if of == kind and pattern.search(name)), "")


def mutants() -> list[Mutant]:
    """All, by file and line."""
    found = []
    for file in TESTS:
        lines = (source.FOLDER / file).read_text().splitlines()
        found += [each for i, line in enumerate(lines) for each in _of_line(file, i + 1, line)]
    return found


def _of_line(file: str, number: int, line: str) -> Iterator[Mutant]:
    code = line.partition("//")[0]
    if code.lstrip().startswith(("#", "static_assert")) or "constexpr" in code:
        return
    for kind, swaps in SWAPS.items():
        for pattern, by in swaps:
            changed, count = re.subn(pattern, by, code, count=1)
            if count and changed != code:
                yield Mutant(file, kind, number, code, changed)


def is_read_by_gxx(mutant: Mutant) -> bool:
    """Whether the line is part of what g++ compiles: host.cuh stands in the place of PTX."""
    conditions: list[str] = []
    for line in (source.FOLDER / mutant.file).read_text().splitlines()[: mutant.line]:
        if line.startswith("#if"):
            conditions.append(line.strip())
        elif line.startswith("#else") and conditions[-1] == "#ifdef LMKIT_HOST":
            conditions[-1] = "#ifndef LMKIT_HOST"
        elif line.startswith("#endif"):
            conditions.pop()
    return "#ifndef LMKIT_HOST" not in conditions


def sampled(found: list[Mutant], count: int) -> list[Mutant]:
    """`count` of them. Files take turns, with a mutant of each kind, and with four of a kind that few files have. Kinds
    take turns, too."""
    groups: dict[tuple[str, str], list[Mutant]] = {}
    for each in random.Random(0).sample(found, len(found)):
        groups.setdefault((each.kind, each.file), []).append(each)
    files = Counter[str]()  # of each kind, so far
    turns = list[tuple[int, int, Mutant]]()
    for (kind, _), group in groups.items():
        turns += [(i // (1 if kind in ("barrier", "bound") else 4), files[kind], each) for i, each in enumerate(group)]
        files[kind] += 1
    return [each for *_, each in sorted(turns, key=lambda turn: turn[:2])][:count]


def table(rows: Iterable[dict[str, str]]) -> str:
    """By kind: how many mutants, how many are equivalent, and how many of the others each backend catches."""
    kinds = dict.fromkeys(SWAPS)
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in [*kinds, "all"]}
    for row in rows:
        for name in (row["kind"], "all"):
            counts[name]["mutants"] += 1
            if equivalent(row["name"], row["kind"]):
                counts[name]["equivalent"] += 1
                continue
            for backend in BACKENDS:
                counts[name][backend] += bool(row[backend])
    columns = "mutants", "equivalent", *BACKENDS
    lines = ["| kind | mutants | change nothing | caught by g++ | caught by PTX |", "|---|---|---|---|---|"]
    lines += [f"| {name} | {' | '.join(str(of[column]) for column in columns)} |" for name, of in counts.items()]
    return "\n".join(lines)
