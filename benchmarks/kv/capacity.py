"""The number of tokens in the same bytes, by storage type, for 4 layers of an 8B Llama with 8 KV heads of 128."""

from __future__ import annotations

from benchmarks.kv.common import Row, Setting
from lmkit.config import EngineConfig
from lmkit.kv_dtype import kv_dtype
from lmkit.models import load_spec
from lmkit.models.kv_storage import KVStorage, allocate
from lmkit.turbo.engine.memory import plan_memory

SPEC = load_spec(
    {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128_256, "max_position_embeddings": 8192,
        "dtype": "bfloat16",
    }
)  # fmt: skip
BUDGET = 256 << 20
GOALS = {"int8": 1.9, "int4": 3.7}


def cases(setting: Setting) -> list[Row]:
    """Tokens of a pool, divided by the tokens of a bfloat16 pool."""
    base = tokens_in("bfloat16")
    facts = {"bytes": BUDGET, "tokens_bfloat16": base}
    return [
        Row(f"tokens in the same bytes, {kind} KV, head_dim 128", tokens_in(kind) / base, goal, facts)
        for kind, goal in GOALS.items()
    ]


def tokens_in(kind: str) -> int:
    """The number of tokens that the engine plans into BUDGET bytes. Raises RuntimeError if its tensors take more."""
    config, storages = EngineConfig(kv_memory=BUDGET), [KVStorage(kv_dtype(kind), kv_dtype(kind))] * SPEC.num_layers
    kinds = [storage.dtypes for storage in storages]
    plan = plan_memory(SPEC, config, kinds, weight_bytes=0, available=64 << 30)
    layers = allocate(SPEC.layers, storages, plan.num_blocks, config.tokens_per_block, plan.max_model_len)
    allocated = sum(tensor.data.nbytes + tensor.params.nbytes for layer in layers for tensor in (layer.k, layer.v))
    if allocated > BUDGET:
        raise RuntimeError(f"{kind}: {allocated} bytes are allocated for {BUDGET}")
    return plan.num_blocks * config.tokens_per_block
