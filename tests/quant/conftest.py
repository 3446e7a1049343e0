"""One thread for the tests of quantization: on several threads, tiny products only wait for each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmkit.kernels.cpu import threads


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMKIT_NUM_THREADS", "1")
        threads.configure(1)
        yield
