"""A wheel has all that the repository's package has: sources, recipes, calibration texts, the demo model."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lmkit

pytestmark = pytest.mark.slow
ROOT = Path(lmkit.__file__).parents[1]
LOAD = """
import sys
from pathlib import Path
import lmkit
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.kernels.cuda.source import FOLDER, kernel_source
from lmkit.quant.data.sources import documents, load_presets
from lmkit.quant.recipe import RECIPES, load_recipe
from lmkit.quant.report.evaluate import HELDOUT_TEXT
from lmkit.text import Tokenizer

kernels = [kernel_source(path.name) for path in FOLDER.glob("*.cu")]
recipes = [load_recipe(path.stem) for path in RECIPES.glob("*.yaml")]
assert all(next(documents(name)) for name, preset in load_presets().items() if preset.file)
Tokenizer.from_pretrained(DEMO_FOLDER).encode(HELDOUT_TEXT.read_text()[:100])
found = {name: getattr(module, "__file__", None) for name, module in sys.modules.items() if name.startswith("lmkit")}
strangers = [name for name, file in found.items() if file and not file.startswith(sys.argv[1])]
assert not strangers, strangers
print(len(kernels), len(recipes))
"""


def files(folder: Path) -> Iterator[Path]:
    """Every file below a folder, those behind links too, relative to it; not what Python compiles."""
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (Path(parent, name).relative_to(folder) for name in names)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with lmkit installed from a wheel, which is built from a copy: building leaves files behind."""
    folder = tmp_path_factory.mktemp("packaging")
    source, target = folder / "source", folder / "target"
    source.mkdir()
    for name in ("lmkit", "recipes", "calibration"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    offline = ["--no-deps", "--no-index", "--disable-pip-version-check", "--quiet"]
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(folder), str(source), *offline)
    (wheel,) = folder.glob("*.whl")
    pip("install", "--target", str(target), str(wheel), *offline)
    shutil.rmtree(source)
    return target


def pip(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def run(installed: Path, *command: str) -> str:
    """The output of a command that finds lmkit in `installed` before any other place."""
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=installed.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_file_is_in_the_wheel(installed: Path) -> None:
    expected, found = set(files(ROOT / "lmkit")), set(files(installed / "lmkit"))
    assert found == expected
    for path in expected:
        assert (installed / "lmkit" / path).read_bytes() == (ROOT / "lmkit" / path).read_bytes(), path


def test_resources_load_without_the_repository(installed: Path) -> None:
    kernels, recipes = run(installed, sys.executable, "-P", "-c", LOAD, str(installed)).split()
    assert int(kernels) == len(list((ROOT / "lmkit/kernels/cuda/csrc").glob("*.cu"))) > 0
    assert int(recipes) == len(list((ROOT / "recipes").glob("*.yaml"))) > 0


def test_the_command_runs(installed: Path) -> None:
    assert lmkit.__version__ in run(installed, sys.executable, "-P", "-m", "lmkit", "--version")
    assert "serve" in run(installed, str(installed / "bin" / "lmkit"), "--help")
