"""The blocks themselves: storage types of each layer's keys and values, and their allocation."""

from __future__ import annotations

from lmkit.config import KVDtype
from lmkit.formats.kv_config import KVConfig
from lmkit.layers.batch import KVLayer, allocate_kv
from lmkit.models.spec import ModelSpec


def kv_dtypes(spec: ModelSpec, asked: KVDtype, kv_config: KVConfig | None, dense: str) -> list[tuple[str, str]]:
    """Storage types of (K, V) for each layer: what the user asks for, else the kv_config.json's, else `dense`."""
    if asked != "auto":
        return [(asked, asked)] * spec.num_layers
    if kv_config is None:
        return [(dense, dense)] * spec.num_layers
    return [kv_config.dtypes(layer, dense) for layer in range(spec.num_layers)]


def allocate(spec: ModelSpec, num_blocks: int, block_size: int, dtypes: list[tuple[str, str]]) -> list[KVLayer]:
    """Zeroed blocks for every layer (zeroed pages are taken from the machine only when first written)."""
    return [allocate_kv(num_blocks, spec.num_kv_heads, block_size, spec.head_dim, pair) for pair in dtypes]
