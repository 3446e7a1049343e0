"""Words of eight codes: known answers, and there and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lmkit.formats.packing import pack_awq, unpack_awq

codes = st.tuples(st.integers(0, 5), st.integers(0, 5)).flatmap(
    lambda size: hnp.arrays(np.uint8, (size[0], 8 * size[1]), elements=st.integers(0, 15))
)
words = hnp.arrays(np.int32, st.tuples(st.integers(0, 5), st.integers(0, 5)))


@pytest.mark.parametrize(
    ("row", "word"),
    [
        (list(range(8)), 1966171168),
        (list(range(8, 16)), -38146904),
        ([8] * 8, -2004318072),
        ([15] * 8, -1),
        ([0] * 7 + [8], -(2**31)),
        ([1] + [0] * 7, 1),
        ([0, 1] + [0] * 6, 1 << 16),
    ],
)
def test_known_answers(row: list[int], word: int) -> None:
    packed = pack_awq(torch.tensor([row], dtype=torch.uint8))
    assert packed.dtype == torch.int32
    assert packed.tolist() == [[word]]
    assert unpack_awq(packed).tolist() == [row]


@settings(max_examples=60, deadline=None)
@given(codes)
def test_codes_survive(array: np.ndarray) -> None:
    tensor = torch.from_numpy(array)
    packed = pack_awq(tensor)
    assert packed.shape == (tensor.shape[0], tensor.shape[1] // 8)
    assert torch.equal(unpack_awq(packed), tensor)
    assert torch.equal(unpack_awq(pack_awq(tensor.T.contiguous().T)), tensor)  # whatever the strides


@settings(max_examples=60, deadline=None)
@given(words)
def test_words_survive(array: np.ndarray) -> None:
    assert torch.equal(pack_awq(unpack_awq(torch.from_numpy(array))), torch.from_numpy(array))
    assert torch.equal(pack_awq(unpack_awq(torch.from_numpy(array).T).contiguous()), torch.from_numpy(array).T)
