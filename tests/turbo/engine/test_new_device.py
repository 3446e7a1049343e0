"""A device that lmkit does not know: this file is all that an engine needs of it. It has no kernels, so torch computes
every op."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lmkit import devices
from lmkit.config import EngineConfig
from lmkit.devices import CPU
from lmkit.errors import ConfigError
from lmkit.turbo.engine import describe
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.runners.cpu_device import CpuDevice
from tests.turbo.engine.test_cuda_engine import SMALL, checkpoint, on_cpu, requests, tokens
from tests.turbo.engine.test_engine import run

__all__ = ["checkpoint"]
pytestmark = pytest.mark.slow
NAME = "abacus"


class Abacus(CpuDevice):
    facts = replace(
        CPU, name=NAME, block_size=8, float4=False, planes=False, small_groups=False, panels=False, shares_head=False
    )


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(devices.DEVICES, NAME, Abacus.facts)


def test_an_engine_runs_on_a_new_device(checkpoint: Path) -> None:
    options = {"packed_cache": False, "activations": "exact", "block_size": None}
    engine = Engine(str(checkpoint), EngineConfig(**(SMALL | options)), device=Abacus())
    chosen = {engine.runner.decoder.embedding.device}
    chosen |= {packed.implementation.device for x in engine.runner.decoder.linears for packed in x.packed or ()}
    assert chosen == {"any"}
    assert engine.runner.batch.block_size == 8
    assert tokens(run(engine, requests())) == tokens(run(on_cpu(checkpoint), requests()))
    engine.close()


def test_its_name_is_that_of_reports_and_refusals(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describe, "resolve_device", lambda config: Abacus())
    serving = describe.describe_model(str(checkpoint), EngineConfig())["serving"]
    assert serving["device"] == NAME
    monkeypatch.setattr(Abacus, "has_kernels", False)
    with pytest.raises(ConfigError, match="deterministic needs kernels"):
        Engine(str(checkpoint), EngineConfig(**SMALL, deterministic=True), device=Abacus())
