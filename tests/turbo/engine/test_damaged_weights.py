"""Packed weights that were damaged on the disk: the engine finds it out while it serves, and the next one is whole."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from lmkit.api import in_process
from lmkit.config import EngineConfig
from lmkit.errors import EngineLostError
from lmkit.models import packed_cache
from lmkit.turbo.engine.engine import Engine
from tests.turbo.engine.test_engine import SMALL, engine_for, requests_for, run, tokens


@pytest.fixture
def damaged(demo_model: Path, tmp_path: Path) -> Path:
    """A checkpoint whose file of packed weights has 200 wrong bits, and a header that fits."""
    checkpoint = tmp_path / "model"
    shutil.copytree(demo_model, checkpoint, ignore=shutil.ignore_patterns(packed_cache.FOLDER))
    engine_for(checkpoint).close()
    data = bytearray(packed(checkpoint)[0].read_bytes())
    for n in range(1, 201):
        data[-n * (len(data) // 300)] ^= 1 << n % 8
    hurt = tmp_path / "hurt"  # the first engine may still look at the file: it must not be truncated
    hurt.write_bytes(data)
    hurt.replace(packed(checkpoint)[0])
    return checkpoint


def packed(checkpoint: Path) -> list[Path]:
    return list((checkpoint / packed_cache.FOLDER).glob("*.safetensors"))


def lost(engine: Engine) -> str:
    end = time.monotonic() + 30
    while engine._lost is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    return engine._lost


def test_damage_is_found_and_repaired(damaged: Path) -> None:
    engine = engine_for(damaged)
    assert "its data is damaged; it is removed" in lost(engine)
    assert not packed(damaged)
    assert engine.has_work()  # an idle engine says so as well
    with pytest.raises(EngineLostError, match="damaged"):
        engine.step()
    engine.close()
    again, want = engine_for(damaged), engine_for(damaged, packed_cache=False)
    got, expected = (run(each, requests_for(damaged))["r0"] for each in (again, want))
    assert tokens(got) == tokens(expected)
    assert len(packed(damaged)) == 1


def test_a_file_that_cannot_be_removed_is_named(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(path: Path, missing_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", read_only)
    assert "it cannot be removed (Read-only file system): remove it, or turn packed_cache off" in lost(
        engine_for(damaged)
    )


def test_a_pipeline_says_it_and_can_be_closed(damaged: Path) -> None:
    pipe = in_process.Pipeline(str(damaged), EngineConfig(**SMALL))
    lost(pipe.engine)
    with pytest.raises(EngineLostError, match="damaged"):
        pipe("import os")
    pipe.close()


def test_whole_weights_are_served(demo_model: Path) -> None:
    files = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_cache, "check_in_background", lambda file, damaged: files.append(file))
        engine = engine_for(demo_model)
    (file,) = files
    file.check()
    assert not engine.has_work()
