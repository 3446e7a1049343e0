"""The memory plan counts the launches of captured steps of all sizes: they have no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.host_cost import NoDevice, NoKernels
from benchmarks.random_llama import make_awq
from lmkit.config import EngineConfig
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.kernels.cuda import module
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.engine.memory import LAUNCHES

pytestmark = pytest.mark.slow


class Counting(NoKernels):
    """Kernels that are counted."""

    def __init__(self) -> None:
        self.count = 0

    def load(self, source: str, name: str, defines: dict[str, int]) -> module.Launch:
        launch = super().load(source, name, defines)

        def counted(*given: object) -> None:
            self.count += 1
            launch(*given)  # type: ignore[arg-type]

        return counted


class Capturing(NoDevice):
    """Counts the launches of what is captured."""

    def __init__(self, kernels: Counting) -> None:
        super().__init__()
        self.kernels, self.counts = kernels, list[int]()

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        before = self.kernels.count
        launch()
        self.counts.append(self.kernels.count - before)
        return super().capture(launch)


@pytest.fixture
def device() -> Iterator[Capturing]:
    module.BACKENDS["cpu"] = kernels = Counting()
    yield Capturing(kernels)
    module.BACKENDS.pop("cpu")
    module.counters.cache_clear()


def test_captured_steps_have_no_more_launches_than_are_planned(tmp_path: Path, device: Capturing) -> None:
    """On average, kernels of our own. A product of a library, of more than 256 tokens, is one launch more."""
    make_awq(DEMO_FOLDER, tmp_path / "w4")
    config = EngineConfig(
        device="cuda", max_batch_size=48, max_step_tokens=512, max_model_len=256, selftest="off", packed_cache=False,
        kv_dtype="int8", kv_memory="1G", speculate="ngram",
    )  # fmt: skip
    engine = Engine(str(tmp_path / "w4"), config, device=device)
    layers = engine.runner.decoder.spec.num_layers
    engine.close()
    assert len(device.counts) > 20
    assert 3 * layers < sum(device.counts) / len(device.counts) <= LAUNCHES * layers, device.counts
