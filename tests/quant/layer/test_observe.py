"""Statistics are the plain sums over all tokens, however the calibration set is cut into batches."""

from __future__ import annotations

import pytest
import torch

from lmkit.quant.layer.observe import InputStats, sample_rows, sample_tokens


@pytest.mark.parametrize("cuts", [[60], [1, 19, 40], [20, 20, 20]])
def test_sums_and_samples_do_not_depend_on_batches(cuts: list[int]) -> None:
    x = torch.randn(60, 24, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([0, 7, 19, 20, 59])
    stats = InputStats.empty(24, 8, ids)
    for part in x.split(cuts):
        stats.add(part)
    wide = x.double()
    torch.testing.assert_close(stats.abs_mean, x.abs().mean(0))
    assert torch.equal(stats.abs_max, x.abs().amax(0))
    torch.testing.assert_close(stats.sample, x[ids])
    for group in range(3):
        columns = wide[:, 8 * group : 8 * group + 8]
        torch.testing.assert_close(stats.gram[group], columns.T @ columns, rtol=1e-5, atol=1e-5)


def test_divide_gives_the_statistics_of_the_divided_input() -> None:
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(1))
    s = torch.rand(16, generator=torch.Generator().manual_seed(2)) + 0.5
    stats, expected = (InputStats.empty(16, 8, torch.arange(40)) for _ in range(2))
    stats.add(x)
    stats.divide(s)
    expected.add(x / s)
    torch.testing.assert_close(stats.abs_mean, expected.abs_mean)
    torch.testing.assert_close(stats.abs_max, expected.abs_max)
    torch.testing.assert_close(stats.gram, expected.gram, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.sample, expected.sample)


def test_inputs_that_fill_no_group_are_counted_all_the_same() -> None:
    stats = InputStats.empty(5, 8, torch.arange(3))
    stats.add(torch.ones(3, 5))
    assert stats.gram.shape == (0, 8, 8)
    assert stats.abs_mean.tolist() == [1.0] * 5
    whole_row = InputStats.empty(5, -1, torch.arange(3))
    whole_row.add(torch.ones(3, 5))
    whole_row.add(torch.ones(0, 5))
    whole_row.divide(torch.full((5,), 2.0))
    assert len(whole_row.gram) == 0
    assert whole_row.abs_max.tolist() == [0.5] * 5


def test_sampled_tokens_are_distinct_ascending_and_seeded() -> None:
    ids = sample_tokens(1000, 100, seed=3)
    assert len(ids.unique()) == 100
    assert torch.equal(ids, ids.sort().values)
    assert torch.equal(ids, sample_tokens(1000, 100, seed=3))
    assert not torch.equal(ids, sample_tokens(1000, 100, seed=4))
    assert sample_tokens(10, 100, seed=0).tolist() == list(range(10))


@pytest.mark.parametrize(
    ("count", "rows", "length"),
    [(96, [0, 3, 6], 32), (20, [0], 20), (10_000, list(range(7)), 32), (70, [0, 6], 32)],
)
def test_sampled_rows_are_beginnings_spread_over_the_set(count: int, rows: list[int], length: int) -> None:
    ids, found = sample_rows(num_rows=7, seq_len=64, count=count, prefix=32)
    assert found == length
    assert ids.tolist() == [64 * row + i for row in rows for i in range(length)]
