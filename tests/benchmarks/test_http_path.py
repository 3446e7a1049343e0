import asyncio
import math

import pytest

from benchmarks import http_path


@pytest.mark.exhaustive
def test_both_ways_are_measured() -> None:
    (row,) = asyncio.run(http_path.measure("demo", [2], rounds=1))
    assert row["requests"] == 2
    assert all(math.isfinite(value) for value in row.values())
    assert row["pipeline_tokens_per_s"] > 0 < row["server_tokens_per_s"]
    assert row["pipeline_ttft_ms"] > 0 < row["server_ttft_ms"]
