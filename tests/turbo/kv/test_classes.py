"""Classes of layers take their blocks from one pool: a model with windows in most layers holds many more tokens."""

from __future__ import annotations

import random

import pytest

from lmkit.config import EngineConfig
from lmkit.kv_dtype import BFLOAT16
from lmkit.models import load_spec
from lmkit.models.kv_layout import KVClass
from lmkit.models.spec import ModelSpec
from lmkit.turbo.decisions import DecisionStats
from lmkit.turbo.engine.memory import kv_limits, plan_memory
from lmkit.turbo.kv.block_pool import BlockPool
from lmkit.turbo.kv.manager import KVLimits, KVManager
from lmkit.turbo.kv.radix_cache import HOLE
from lmkit.turbo.sequence import Sequence
from tests.turbo.kv.test_manager import manager, sequence

LENGTH, WINDOW = 32 << 10, 1024
MIXED = (KVClass(), KVClass(8, 0, 2))  # a full layer and two with a window


def model(num_windows: int) -> ModelSpec:
    """So many layers with a window before each that sees everything."""
    kinds = (["sliding_attention"] * num_windows + ["full_attention"]) * 12
    return load_spec({
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": LENGTH,
        "dtype": "bfloat16", "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": kinds[:12],
    })  # fmt: skip


def advance(kv: KVManager, seq: Sequence, chunk: int, end: int) -> bool:
    """As steps that compute the sequence's tokens, a chunk each; False if it finds no block."""
    while seq.num_computed < end:
        seq.num_computed = min(seq.num_computed + chunk, end)
        computed, seq.num_computed = seq.num_computed, seq.num_completed
        if kv.reserve(seq, computed, end) is None:
            return False
        seq.num_computed = seq.num_completed = computed
    return kv.reserve(seq, end) is not None


def num_held(num_windows: int, kv_memory: int) -> int:
    """Sequences of LENGTH tokens that a pool of so many bytes holds at once."""
    spec, config = model(num_windows), EngineConfig(kv_memory=kv_memory, max_batch_size=64)
    plan = plan_memory(spec, config, [(BFLOAT16, BFLOAT16)] * 12, weight_bytes=0, available=64 << 30)
    assert plan.max_model_len == LENGTH
    kv = KVManager(kv_limits(spec, config, plan.layout, plan.num_blocks), DecisionStats())
    held: list[Sequence] = []
    while True:
        seq = sequence(str(len(held)), [len(held)] * LENGTH)
        seq.max_tokens = LENGTH
        needed = kv.limits.blocks_for(LENGTH) + len(held) * kv.limits.num_groups
        if kv.num_for(kv.find(seq)) < needed:  # as the planner asks before it admits
            break
        assert advance(kv, seq, config.tokens_per_step, LENGTH), "an admitted sequence finds its blocks"
        held.append(seq)
    kv.check_integrity(held)
    assert len(held) - 4 <= plan.num_tokens // LENGTH <= len(held), "the plan promises what is held"
    return len(held)


def test_five_windows_for_each_full_layer_hold_more_than_four_times_the_tokens() -> None:
    kv_memory = (10 * LENGTH + LENGTH // 10) * 12 * 2 * 2 * 64 * 2  # ten sequences of a model that sees everything
    full, mixed = num_held(0, kv_memory), num_held(5, kv_memory)
    assert full == 10
    assert mixed >= 4.5 * full


def test_a_stripe_is_owned_as_one() -> None:
    pool = BlockPool(7)
    a, b = pool.allocate(2, 3)
    assert (pool.stripe(a), pool.stripe(b), pool.num_free) == ([0, 1, 2], [3, 4, 5], 1)
    pool.keep([a])
    pool.free_all([a, b])
    assert (pool.num_idle, pool.num_cached, pool.num_free) == (3, 3, 4)
    pool.check_integrity()
    assert pool.allocate(4) == [3, 4, 5, 6], "the blocks of a stripe serve any size"
    pool.drop([a])
    assert pool.stripe(*pool.allocate(1, 3)) == [0, 1, 2]
    pool.check_integrity()
    pool._stripes[0] = [0, 1, 3]
    with pytest.raises(AssertionError, match="two stripes"):
        pool.check_integrity()


def test_windows_give_back_while_full_layers_keep() -> None:
    kv, seq = manager(100, 4, classes=MIXED, max_step_tokens=8), sequence("a", 160)
    assert advance(kv, seq, 8, 160)
    full, window = seq.tables
    assert HOLE not in full.blocks
    assert len(full.blocks) == len(window.blocks) == 40
    assert [i for i, block in enumerate(window.blocks) if block != HOLE] == list(range(32, 40))
    assert kv.num_available == 100 - 40 - 2 * 8
    tables = kv.block_tables(seq)
    assert len(tables) == 3
    assert len({table[39] for table in tables}) == 3
    kv.check_integrity([seq])
    kv.release(seq)
    assert kv.num_available == 100


def test_a_prefix_ends_where_every_class_can_go_on() -> None:
    kv, a = manager(300, 4, classes=MIXED, prefix_cache=True, max_step_tokens=8), sequence("a", 160)
    assert advance(kv, a, 8, 160)
    kv.release(a)
    b = sequence("b", [*a.token_ids[:102], 9, 9])
    assert kv.find(b).num_tokens == 102
    _, window = kv.caches
    window.clear()
    assert kv.find(b).num_tokens == 0
    again = sequence("c", 160)
    assert advance(kv, again, 8, 160)  # the full layers' blocks are there twice: the window's come back
    kv.release(again)
    prefix = kv.find(b)
    assert prefix.num_tokens == 102
    assert all(match.num_tokens == 102 for match in prefix.matches)
    kv.acquire(b, prefix)
    assert len(kv.copies) == 3, "the last block, not full, of every group"
    assert {target for _, target in kv.copies} == {table[25] for table in kv.block_tables(b)}
    kv.check_integrity([b])


def test_copies_of_tails_never_overwrite_one_another() -> None:
    """The pool is so full that copies take the places of idle tails."""
    rng = random.Random(5)
    for _ in range(200):
        blocks = rng.randint(8, 14)
        kv = manager(blocks, 4, classes=(KVClass(), KVClass(8, 0, 2), KVClass(6)), prefix_cache=True)
        a = sequence("a", rng.randint(5, 7))
        assert advance(kv, a, 8, a.num_tokens)
        kv.release(a)
        content = {block: block for block in range(blocks)}
        b = sequence("b", [*a.token_ids, 7])
        prefix = kv.find(b)
        if kv.num_for(prefix) < kv.limits.blocks_for(b.num_tokens):
            continue
        tails = [kv.pool.stripe(match.tail) for match in prefix.matches if match.tail is not None]
        kv.acquire(b, prefix)
        for source, target in kv.copies:
            content[target] = content[source]
        copied = [table[-1] for table in kv.block_tables(b)]
        assert [content[block] for block in copied] == [block for stripe in tails for block in stripe]
        kv.check_integrity([b])


def test_what_was_used_longest_ago_leaves_first_whatever_its_class() -> None:
    kv = manager(24, 4, classes=MIXED, prefix_cache=True)
    seqs = [sequence(name, [number] * 8) for number, name in enumerate("abc", 1)]
    for seq in seqs:
        assert advance(kv, seq, 8, 8)
        kv.release(seq)
    assert kv.find(sequence("d", [1] * 9)).num_tokens == 8  # used again
    big = sequence("e", [9] * 16)
    assert kv.reserve(big, 12) is not None  # three blocks are missing
    found = [kv.find(sequence("f", [number] * 9)).num_tokens for number in (1, 2, 3)]
    assert found[0] == found[2] == 8
    assert found[1] < 8
    kv.check_integrity([big])


def test_a_quota_is_of_all_classes() -> None:
    kv = manager(60, 4, classes=MIXED, prefix_cache=True, cache_quota=0.25)
    for number in range(6):
        seq = sequence(str(number), [number] * 13, tenant="t")
        assert advance(kv, seq, 8, 13)
        kv.release(seq)
        assert kv.pool.num_cached <= 15
        kv.check_integrity([])
    assert kv.pool.num_cached > 6


def test_the_longest_sequence_is_found() -> None:
    limits = KVLimits(60, 4, MIXED, max_step_tokens=8)
    assert limits.blocks_for(limits.longest) <= 60 < limits.blocks_for(limits.longest + 1)
