"""KV blocks are zeros at addresses of cache lines."""

from __future__ import annotations

import pytest

from lmkit.kv_dtype import KV_DTYPES
from lmkit.layers.batch import ALIGNMENT, allocate_kv


@pytest.mark.parametrize("name", KV_DTYPES)
def test_blocks_are_zeros_in_whole_lines(name: str) -> None:
    dtype = KV_DTYPES[name]
    layer = allocate_kv(3, 2, 32, 16, (dtype, dtype))
    for tensor in (layer.k, layer.v):
        assert tensor.data.shape == (3, 2, 32, dtype.columns(16))
        assert tensor.params.shape == ((3, 2, 32, dtype.num_params(16)) if dtype.coded else (0,))
        for part in (tensor.data, tensor.params):
            assert part.data_ptr() % ALIGNMENT == 0 or not part.numel()
            assert part.is_contiguous()
            assert not part.float().any()
