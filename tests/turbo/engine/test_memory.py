"""The memory plan: what it adds up to, and what it refuses before anything is loaded."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkit.config import EngineConfig
from lmkit.devices import CPU
from lmkit.errors import ConfigError
from lmkit.kernels.cpu import low_rank
from lmkit.kv_dtype import BFLOAT16, FLOAT32, INT4, INT8, KVDtype
from lmkit.layers.batch import allocate_kv
from lmkit.layers.blocks.delta import DeltaSpec
from lmkit.models import load_spec
from lmkit.turbo.engine.memory import ADDED_ROWS, RECORD_BYTES, asked_kv, kv_limits, plan_memory

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}  # fmt: skip
SPEC = load_spec(CONFIG)
LAYER = SPEC.layers[0]
GIB = 1 << 30
BF16 = [(BFLOAT16, BFLOAT16)] * 4


@pytest.mark.parametrize("dtypes", [(FLOAT32, FLOAT32), (BFLOAT16, INT8), (INT8, INT4), (INT4, INT4)])
def test_token_bytes_are_what_is_allocated(dtypes: tuple[KVDtype, KVDtype]) -> None:
    layer = allocate_kv(3, LAYER.num_kv_heads, 16, LAYER.head_dim, dtypes)
    tensors = (layer.k.data, layer.k.params, layer.v.data, layer.v.params)
    assert sum(t.nbytes for t in tensors) == 3 * 16 * LAYER.kv_token_bytes(*dtypes)


def test_int8_and_int4_hold_more_tokens_at_head_dim_128() -> None:
    layer = load_spec(CONFIG | {"head_dim": 128}).layers[0]
    dense = layer.kv_token_bytes(BFLOAT16, BFLOAT16)
    assert dense / layer.kv_token_bytes(INT8, INT8) > 1.9
    assert dense / layer.kv_token_bytes(INT4, INT4) > 3.7


def test_default_pool_serves_the_whole_batch_when_memory_allows() -> None:
    plan = plan_memory(SPEC, EngineConfig(max_batch_size=3), BF16, weight_bytes=GIB, available=8 * GIB)
    assert plan.num_blocks == 3 * 4096 // 32
    assert plan.max_model_len == 4096
    assert plan.kv == plan.num_blocks * plan.block_bytes
    assert plan.weights + plan.workspace + plan.kv + plan.runtime <= plan.available
    assert plan.shortage() == ""
    assert plan.lines("bfloat16") == [
        "KV cache: bfloat16, 24.0 MiB for 12,288 tokens",
        "context: 4,096 tokens",
        "memory: 1.15 GiB of 8.00 GiB, weights 1.00 GiB",
    ]


def test_snapshots_of_recurrent_states_are_planned() -> None:
    delta = DeltaSpec(2, 4, 16, 16, 4)
    spec = replace(SPEC, layers=(LAYER.having(mixer=delta), *SPEC.layers[1:]))
    plan = plan_memory(spec, EngineConfig(max_batch_size=3), BF16, weight_bytes=GIB, available=8 * GIB)
    assert plan.states == 3 * delta.state.num_bytes
    assert (plan.num_snapshots, plan.snapshots) == (48, 48 * delta.state.num_bytes)
    assert plan.total == plan.weights + plan.workspace + plan.states + plan.snapshots + plan.kv
    assert "states: 0.0 MiB, 48 snapshots: 0.3 MiB" in plan.lines("bfloat16")
    little = plan_memory(
        spec, EngineConfig(max_batch_size=3), BF16, 0, available=CPU.runtime_bytes + plan.workspace + (1 << 20)
    )
    assert 0 < little.num_snapshots < 48
    assert little.snapshots <= little.kv
    without = plan_memory(spec, EngineConfig(max_batch_size=3, prefix_cache=False), BF16, 0, available=8 * GIB)
    assert without.snapshots == 0


def test_a_model_without_keys_and_values_is_planned() -> None:
    """Its blocks only count tokens, and a record is what they take."""
    spec = replace(SPEC, layers=(LAYER.having(mixer=DeltaSpec(2, 4, 16, 16, 4)),) * 4)
    plan = plan_memory(spec, EngineConfig(max_batch_size=3), BF16, weight_bytes=GIB, available=8 * GIB)
    assert (plan.num_tokens, plan.max_model_len) == (3 * 4096, 4096)
    assert plan.kv == plan.num_blocks * RECORD_BYTES
    assert (plan.states, plan.num_snapshots) == (3 * spec.state_bytes, 48)
    assert plan.lines("bfloat16")[0] == "no KV cache: states of 12,288 tokens"
    little = plan_memory(spec, EngineConfig(kv_memory=2 * RECORD_BYTES), BF16, weight_bytes=GIB, available=8 * GIB)
    assert little.max_model_len == 2 * 32
    assert "records of blocks" in little.shortage()


def test_context_shrinks_to_the_pool_unless_it_was_asked_for() -> None:
    config = EngineConfig(kv_memory=1 << 20)
    plan = plan_memory(SPEC, config, BF16, weight_bytes=0, available=8 * GIB)
    assert plan.max_model_len == plan.num_blocks * 32 < 4096
    told = plan.shortage()
    assert told.startswith(f"the context is cut to {plan.max_model_len} of the model's 4,096 tokens")
    needed = int(re.findall(r"set kv_memory (\d+)M", told)[0])
    full = [plan_memory(SPEC, EngineConfig(kv_memory=n << 20), BF16, 0, 8 * GIB) for n in (needed - 1, needed)]
    assert full[0].max_model_len < full[1].max_model_len == 4096
    assert not full[1].shortage()
    little = plan_memory(SPEC, EngineConfig(max_batch_size=1), BF16, 0, available=CPU.runtime_bytes + (12 << 20))
    assert "; free memory, use a smaller kv_dtype" in little.shortage(), "more kv_memory would be refused"
    asked = EngineConfig(kv_memory=1 << 20, max_model_len=plan.max_model_len)
    assert not plan_memory(SPEC, asked, BF16, weight_bytes=0, available=8 * GIB).shortage()
    with pytest.raises(ConfigError, match=f"lower max_model_len to {plan.max_model_len}"):
        plan_memory(SPEC, EngineConfig(kv_memory=1 << 20, max_model_len=4096), BF16, weight_bytes=0, available=8 * GIB)


@pytest.mark.parametrize(
    ("config", "weights", "message"),
    [
        (EngineConfig(), 9 * GIB, "quantize it"),
        (EngineConfig(kv_memory=9 * GIB), 0, "more than"),
        (EngineConfig(kv_memory=1000), 0, "holds no block"),
        (EngineConfig(max_model_len=5000), 0, "exceeds the model's context of 4096"),
    ],
)
def test_what_cannot_fit_is_refused(config: EngineConfig, weights: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_memory(SPEC, config, BF16, weight_bytes=weights, available=8 * GIB)


def test_a_default_pool_is_a_guest() -> None:
    """It takes a quarter of the memory, also if the batch could use more. What was asked for may be more."""
    plan = plan_memory(SPEC, EngineConfig(), BF16, weight_bytes=GIB // 8, available=GIB // 2)
    assert GIB // 8 - plan.block_bytes < plan.kv <= GIB // 8
    assert plan.max_model_len == 4096
    long = load_spec(CONFIG | {"max_position_embeddings": 1 << 17})  # 256 MiB of KV for one sequence
    assert plan_memory(long, EngineConfig(), BF16, 0, available=GIB - (4 << 20)).max_model_len < 1 << 17
    asked_len = EngineConfig(max_model_len=1 << 17)
    assert plan_memory(long, asked_len, BF16, 0, available=GIB - (4 << 20)).kv == 256 << 20
    asked = plan_memory(SPEC, EngineConfig(kv_memory=GIB // 4), BF16, weight_bytes=0, available=GIB // 2)
    assert asked.kv == GIB // 4
    on_gpu = plan_memory(SPEC, EngineConfig(max_batch_size=256).on("cuda"), BF16, weight_bytes=0, available=2 * GIB)
    assert on_gpu.kv > GIB


def test_a_share_is_of_what_is_free() -> None:
    plan = plan_memory(SPEC, EngineConfig(kv_memory="30%"), BF16, weight_bytes=0, available=GIB)
    assert 0.3 * GIB - plan.block_bytes < plan.kv <= 0.3 * GIB
    shared = plan_memory(SPEC, EngineConfig(kv_memory="30%", tp=2), BF16, weight_bytes=0, available=GIB)
    assert shared.kv == plan.kv, "each of two processes has as much free memory, and takes its part of both shares"
    with pytest.raises(ConfigError, match=r"kv_memory 972\.8 MiB is more than the .* left after the weights"):
        plan_memory(SPEC, EngineConfig(kv_memory="95%"), BF16, weight_bytes=0, available=GIB)


@settings(deadline=None, max_examples=200)
@given(
    available=st.integers(0, 4 * GIB),
    weights=st.integers(0, GIB),
    batch=st.integers(1, 256),
    length=st.none() | st.integers(1, 4096),
    kv_memory=st.none() | st.integers(1, GIB) | st.sampled_from(["1%", "25%", "100%"]),
)
def test_a_plan_is_within_the_limit_and_holds_a_sequence(
    available: int, weights: int, batch: int, length: int | None, kv_memory: int | str | None
) -> None:
    config = EngineConfig(max_batch_size=batch, max_model_len=length, kv_memory=kv_memory)  # type: ignore[arg-type]
    try:
        plan = plan_memory(SPEC, config, BF16, weights, available)
    except ConfigError:
        return
    assert plan.total + plan.runtime <= available
    limits = kv_limits(SPEC, config, plan.layout, plan.num_blocks)
    assert limits.blocks_for(plan.max_model_len) <= plan.num_blocks
    assert plan.max_model_len >= 1
    assert length is None or plan.max_model_len == length
    asked = asked_kv(config, available)
    if asked is not None:
        assert plan.kv <= asked
    else:
        one = limits.blocks_for(length) * plan.block_bytes if length else 0
        assert plan.kv <= max(available // 4, one)
        assert plan.kv <= batch * limits.blocks_for(plan.wanted_len) * plan.block_bytes


def test_what_adapters_add_is_planned() -> None:
    assert ADDED_ROWS == low_rank.ROWS
    plain, adapted = (
        plan_memory(SPEC, EngineConfig(max_batch_size=3, adapter_root=root), BF16, weight_bytes=GIB, available=8 * GIB)
        for root in (None, "adapters")
    )
    assert adapted.workspace - plain.workspace == 4 * ADDED_ROWS * LAYER.widest_product


def test_a_gpu_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are longer, activations narrower, and the host tier takes nothing from it."""
    config = EngineConfig(max_batch_size=3).on("cuda")
    alone = plan_memory(SPEC, config, BF16, weight_bytes=GIB, available=8 * GIB)
    assert alone.num_blocks == 3 * 4096 // 64
    monkeypatch.setattr("lmkit.turbo.engine.memory.available_memory", lambda: 2 * GIB)
    with_tier = EngineConfig(max_batch_size=3, kv_host_memory=GIB).on("cuda")
    assert plan_memory(SPEC, with_tier, BF16, weight_bytes=GIB, available=8 * GIB).kv == alone.kv
    too_much = EngineConfig(max_batch_size=3, kv_host_memory=3 * GIB).on("cuda")
    with pytest.raises(ConfigError, match=r"kv_host_memory 3\.00 GiB is more than the 2\.00 GiB of host memory"):
        plan_memory(SPEC, too_much, BF16, weight_bytes=GIB, available=8 * GIB)
    wide = EngineConfig(max_batch_size=3, max_step_tokens=8192).on("cuda")
    assert plan_memory(SPEC, wide, BF16, weight_bytes=GIB, available=8 * GIB).workspace > alone.workspace


LLAMA_8B = load_spec({
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
    "dtype": "bfloat16",
})  # fmt: skip


@pytest.mark.parametrize(
    ("card", "kv", "context", "tokens"),
    [(8, BFLOAT16, 2048, 2048), (8, INT8, 6144, 6144), (8, INT4, 8192, 12288), (12, BFLOAT16, 8192, 16384)],
)
def test_an_8b_of_4_bits_has_a_context_on_a_small_gpu(card: int, kv: KVDtype, context: int, tokens: int) -> None:
    """By default. A tenth of the card is taken by its driver and by others."""
    free = int(card * GIB * 0.92)
    config = EngineConfig(device="cuda").on("cuda", free)
    linears = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    weights = int(linears * 4.25 / 8) + 2 * 2 * 128256 * 4096  # groups of 128; embeddings and head of 16 bits
    plan = plan_memory(LLAMA_8B, config, [(kv, kv)] * 32, weights, available=free)
    assert plan.max_model_len >= context
    assert plan.num_tokens >= tokens
    assert plan.total + plan.runtime <= free
    assert config.sequences_per_step == (16 if card < 10 else 64)
