"""Modules put off at import run when a name is looked up in them."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from lmkit.turbo.transport import deferred


def test_a_deferred_module_runs_when_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "put_off.py").write_text("import put_off_mark\nvalue = put_off_mark.__name__\n")
    (tmp_path / "put_off_mark.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [deferred.DeferredFinder(), *sys.meta_path])
    monkeypatch.setattr(deferred, "DEFERRED", frozenset({"put_off"}))
    module = importlib.import_module("put_off")
    try:
        assert not hasattr(module, "__path__")
        assert module.__file__ == str(tmp_path / "put_off.py")
        assert "put_off_mark" not in sys.modules
        assert module.value == "put_off_mark"
        with pytest.raises(AttributeError):
            _ = module.other
    finally:
        for name in ("put_off", "put_off_mark"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("import torch._dynamo; print(torch.ones(1))", "tensor([1.])"),  # it counts on the order of imports
        (
            "import torch; from lmkit.models.draft_head import rounded; "
            "print(rounded(torch.ones(8, 256)).codes.shape, hasattr(torch, '_refs'))",
            "torch.Size([8, 256]) False",
        ),
    ],
    ids=["dynamo", "quantize"],
)
def test_other_code_runs_without_them(code: str, shown: str) -> None:
    deferring = f"from lmkit.turbo.transport.deferred import defer_imports; defer_imports(); {code}"
    done = subprocess.run([sys.executable, "-c", deferring], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, shown), done.stderr


def test_a_quick_start_ends_with_the_search_for_garbage() -> None:
    finders = sys.meta_path[:]
    with deferred.quick_start():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count()
    gc.unfreeze()
    assert sys.meta_path == finders, "torch was imported before"
