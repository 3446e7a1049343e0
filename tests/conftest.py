"""Fixtures that several rooms share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lmkit

DEMO = Path(lmkit.__file__).parent / "demo"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The bundled, trained 7M-parameter checkpoint."""
    return DEMO / "model"


@pytest.fixture(scope="session")
def heldout_text() -> str:
    """Text the demo model never saw."""
    return (DEMO / "text" / "heldout.txt").read_text()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
