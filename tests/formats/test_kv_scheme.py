"""kv_cache_scheme: what compressed-tensors writes is read, what cannot be honoured is refused."""

from __future__ import annotations

from typing import Any

import pytest

from lmkit.errors import CheckpointError
from lmkit.formats.kv_scheme import KVScheme, parse_kv_scheme
from lmkit.kv_dtype import FP8, INT8

WRITTEN = {  # by llm-compressor
    "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
    "observer": "minmax", "observer_kwargs": {}, "scale_dtype": None, "strategy": "tensor", "symmetric": True,
    "type": "float", "zp_dtype": None,
}  # fmt: skip


def parse(scheme: Any) -> KVScheme | None:
    return parse_kv_scheme({"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}})


def test_read() -> None:
    assert parse(WRITTEN) == KVScheme(type="float")
    assert parse(WRITTEN | {"type": "int", "strategy": "attn_head"}) == KVScheme(type="int", strategy="attn_head")
    assert parse(WRITTEN | {"dynamic": True}) == KVScheme(type="float", dynamic=True)
    assert [KVScheme(type="int").dtype, KVScheme(type="float").dtype] == [INT8, FP8]
    assert parse(None) is None
    assert parse_kv_scheme({}) is None
    assert parse_kv_scheme({"quantization_config": {"quant_method": "awq"}}) is None


def test_there_and_back() -> None:
    for scheme in (KVScheme(type="float"), KVScheme(type="int", strategy="attn_head")):
        assert parse(scheme.entry()) == scheme


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bits": 4}, "num_bits"),
        ({"symmetric": False}, "symmetric"),
        ({"strategy": "channel"}, "strategy"),
        ({"type": "uint"}, "type"),
        ({"group_size": 64}, "group_size = 64 has no meaning"),
        ({"zero": 1}, "unknown field `zero`"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"kv_cache_scheme.*{message}"):
        parse(WRITTEN | changes)
    with pytest.raises(CheckpointError, match="expected an object"):
        parse([1])
