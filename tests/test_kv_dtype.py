"""A KV type says the bytes of its rows, and storage follows what it says."""

from __future__ import annotations

import pytest
import torch

from lmkit.config import EngineConfig
from lmkit.kv_dtype import FP8, INT4, INT8, KV_DTYPES, KVDtype, asked_kv_dtype, dense_kv_dtype
from lmkit.layers.batch import allocate_kv
from lmkit.layers.blocks.state import PagedKV

IN_GROUPS = KVDtype("int4g32", 4, coded=True, has_minimum=True, group_size=32)  # a scale and a minimum for 32 values
BY_TABLE = KVDtype("table4", 4, coded=True, group_params=1)  # values of a table times one scale
TYPES = [*KV_DTYPES.values(), IN_GROUPS, BY_TABLE]


@pytest.mark.parametrize("dim", [16, 64, 96, 128])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_storage_takes_the_bytes_that_its_type_says(dtype: KVDtype, dim: int) -> None:
    layer = allocate_kv(3, 2, 8, dim, (dtype, dtype))
    for tensor in (layer.k, layer.v):
        assert tensor.data.nbytes + tensor.params.nbytes == 3 * 2 * 8 * dtype.row_bytes(dim)
        assert tensor.dim == dim == dtype.values(dtype.columns(dim))
    assert PagedKV(2, dim).token_bytes(dtype, dtype) == 2 * 2 * dtype.row_bytes(dim)


def test_a_type_may_have_other_parameters_than_a_scale_and_a_minimum() -> None:
    assert [dtype.num_params(96) for dtype in (INT8, FP8, INT4, IN_GROUPS, BY_TABLE)] == [2, 2, 2, 6, 1]
    assert IN_GROUPS.num_params(40) == 4  # the last group is short
    assert allocate_kv(3, 2, 8, 96, (IN_GROUPS, BY_TABLE)).k.params.shape == (3, 2, 8, 6)


def test_an_option_becomes_a_type_where_it_is_read() -> None:
    assert EngineConfig().asked_kv is None
    assert EngineConfig(kv_dtype="int4").asked_kv == INT4
    assert [asked_kv_dtype(name) for name in KV_DTYPES] == [*KV_DTYPES.values()]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        stored = dense_kv_dtype(dtype)
        assert (getattr(torch, stored.element), stored.num_params(64)) == (dtype, 0)
    with pytest.raises(KeyError):
        dense_kv_dtype(torch.int8)
