"""Words of eight codes: known answers, and there and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lmkit.formats.packing import pack_awq, pack_words, unpack_awq, unpack_words

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


@pytest.mark.parametrize(
    ("row", "bits", "expected"),
    [
        (list(range(8)), 4, [1985229328]),  # 0x76543210
        ([8] * 8, 4, [-2004318072]),
        ([7] * 8, 4, [2004318071]),
        ([0] * 7 + [15], 4, [-(1 << 28)]),
        ([1, 2, 3], 4, [0x321]),
        ([5] * 9, 4, [0x55555555, 5]),
        ([1, 2, 3, 4], 8, [0x04030201]),
        ([3, 0, 1, 2] * 4 + [1], 2, [-1819044973, 1]),  # 0x93939393
        ([7, 0, 1] + [0] * 7 + [5], 3, [(1 << 6) + 7 + (1 << 30), 1]),  # code 10 lies in two words
        ([0, 0, 0, 255, 7], 8, [-(1 << 24), 7]),
    ],
)
def test_known_words_in_sequence(row: list[int], bits: int, expected: list[int]) -> None:
    packed = pack_words(torch.tensor([row], dtype=torch.uint8), bits)
    assert packed.dtype == torch.int32
    assert packed.tolist() == [expected]
    assert unpack_words(packed, bits, len(row)).tolist() == [row]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([2, 3, 4, 8]), st.integers(0, 4), st.integers(0, 19))
def test_codes_in_sequence_survive(data: st.DataObject, bits: int, rows: int, columns: int) -> None:
    array = data.draw(hnp.arrays(np.uint8, (rows, columns), elements=st.integers(0, (1 << bits) - 1)))
    packed = pack_words(torch.from_numpy(array), bits)
    assert packed.shape == (rows, -(-columns * bits // 32))
    assert torch.equal(unpack_words(packed, bits, columns), torch.from_numpy(array))


@settings(max_examples=60, deadline=None)
@given(words, st.sampled_from([2, 4, 8]))
def test_words_in_sequence_survive(array: np.ndarray, bits: int) -> None:
    tensor = torch.from_numpy(array)
    assert torch.equal(pack_words(unpack_words(tensor, bits, tensor.shape[1] * 32 // bits), bits), tensor)
