"""A plain install serves. What it lacks is declared as an extra, and one line names it where it is missing."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lmkit
from lmkit.errors import UnsupportedError
from lmkit.extras import EXTRAS, needed_for

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = PROJECT["optional-dependencies"]
OPTIONAL_MODULES = {module for extra in EXTRAS.values() for module in extra.modules}
# Programs that run in environments of their own: other engines and tools, what makes fixtures with them or steers them.
FOREIGN = (
    "benchmarks/peers/", "benchmarks/quality_peers/", "tests/interop/make_fixtures.py",
    "tests/clients/loops.py", "tests/serve/schemathesis_rules.py",
)  # fmt: skip
# Where there is no GPU, CuPy is not installed.
CUPY = {"cupy": ["cupy-cuda13x"]}
RAY = {"ray": ["ray"]}  # no test needs it
# Of packages that share a namespace, the one that an extra names.
SHARED = {"google": ["protobuf"], "opentelemetry": ["opentelemetry-exporter-otlp-proto-http"]}


def imports(folder: str) -> dict[str, set[str]]:
    """The modules of other projects that a folder's files import anywhere, with the files."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        where = path.relative_to(ROOT).as_posix()
        if where.startswith(FOREIGN):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in (name.partition(".")[0] for name in names):
                if name not in {*sys.stdlib_module_names, "lmkit", "benchmarks", "tests"}:
                    found.setdefault(name, set()).add(where)
    return found


def declared(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in requirements}


@functools.cache
def distributions() -> dict[str, list[str]]:
    return {**metadata.packages_distributions(), **CUPY, **RAY, **SHARED}


def distribution(module: str) -> str:
    names = distributions().get(module)
    assert names, f"{module} is imported, but no distribution has it here"
    return canonicalize_name(names[0])


def test_the_package_declares_what_it_imports() -> None:
    used = imports("lmkit")
    scripts = {name for name, files in used.items() if all(file.startswith("lmkit/demo/") for file in files)}
    required = {distribution(name) for name in used.keys() - OPTIONAL_MODULES - scripts}
    assert required == declared(PROJECT["dependencies"])
    assert used.keys() >= OPTIONAL_MODULES
    assert {distribution(name) for name in scripts} <= declared(OPTIONAL["dev"])


def test_an_extra_brings_its_modules() -> None:
    for name, extra in EXTRAS.items():
        assert {distribution(module) for module in extra.modules} == declared(OPTIONAL[name]), name
    (everything,) = (Requirement(line) for line in OPTIONAL["all"])
    assert everything.name == "lmkit"
    assert everything.extras == EXTRAS.keys() - {"cuda", "ray"}
    assert "lmkit[all]" in OPTIONAL["dev"]
    assert OPTIONAL.keys() == {*EXTRAS, "cuda12", "all", "dev", "docs"}


@pytest.mark.parametrize("folder", ["benchmarks", "tests", "calibration"])
def test_dev_brings_what_tests_and_benchmarks_import(folder: str) -> None:
    lines = [*PROJECT["dependencies"], *OPTIONAL["dev"], *(line for name in EXTRAS for line in OPTIONAL[name])]
    used = {name for name in imports(folder) if name not in EXTRAS["cuda"].modules}
    assert {distribution(name) for name in used} <= declared(lines)


def test_every_package_of_dev_is_pinned() -> None:
    """The packages declared and all that these need, but for what torch brings along."""
    entries = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    pinned = {canonicalize_name(line.partition("==")[0]) for line in entries if "==" in line}
    wanted = [
        Requirement(line) for line in (*PROJECT["dependencies"], *(x for name in OPTIONAL for x in OPTIONAL[name]))
    ]
    seen: set[str] = set()
    while wanted:
        requirement = wanted.pop()
        key = str(requirement)
        if key in seen or requirement.name == "lmkit" or requirement.name.startswith("cupy"):
            continue
        seen.add(key)
        assert canonicalize_name(requirement.name) in pinned, requirement
        if requirement.name != "torch":
            wanted += needs(requirement)


def needs(requirement: Requirement) -> Iterator[Requirement]:
    """What an installed package needs here, with the extras asked for."""
    extras = requirement.extras or {""}
    try:
        lines = metadata.requires(requirement.name) or []
    except metadata.PackageNotFoundError:
        return  # of another platform
    for found in map(Requirement, lines):
        if found.marker is None or any(found.marker.evaluate({"extra": extra}) for extra in extras):
            yield found


def test_the_version_stands_in_one_place() -> None:
    assert PROJECT["dynamic"] == ["version"]
    text = (ROOT / "lmkit/__init__.py").read_text()
    assert re.findall(r'^__version__ = "(\d+\.\d+\.\d+)"$', text, re.MULTILINE) == [lmkit.__version__]


def test_an_import_that_fails_for_another_reason_says_so() -> None:
    with pytest.raises(UnsupportedError, match=r"^plots: No module named 'lmkit_part_of_a_part'$"), needed_for("plots"):
        importlib.import_module("lmkit_part_of_a_part")
    with pytest.raises(ZeroDivisionError), needed_for("plots"):
        _ = 1 / 0


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a plain install: no process of it can import the packages of the extras."""
    folder = tmp_path_factory.mktemp("plain")
    blocked = sorted(OPTIONAL_MODULES | {"transformers"})
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({blocked!r}))\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def run(plain: dict[str, str], code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=plain, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_plain_install_serves_and_quantizes(plain: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import sys, lmkit.serve.server, lmkit.proxy.server, lmkit.cli.chat, lmkit.bench.throughput\n"
        "from lmkit import GenerationConfig, pipeline\n"
        "from lmkit.cli.main import app\n"
        "with pipeline('demo') as pipe:\n"
        "    print(pipe('def', GenerationConfig(max_new_tokens=2, temperature=0)).finish_reason)\n"
        "recipe = ['--recipe', 'rtn_w4a16_g128', '--num-samples', '1', '--seq-len', '32', '--no-eval']\n"
        "app(['quantize', 'demo', '-o', sys.argv[1], *recipe])\n"
    )
    assert run(plain, code, str(tmp_path / "out")).startswith("length\n")
    assert (tmp_path / "out" / "report.html").is_file()


@pytest.mark.slow
def test_a_feature_without_its_extra_names_it(plain: dict[str, str], tmp_path: Path) -> None:
    """All in one process: that the command makes one line of an error is tested in tests/cli."""
    table, saved, output = tmp_path / "t.parquet", tmp_path / "saved", str(tmp_path / "x")
    table.touch()
    saved.mkdir()
    (saved / "state.json").write_text("{}")
    quantize = ("quantize", "demo", "-o", output, "--calibration")
    commands = {
        (*quantize, "hub:a/b"): "calibration data hub:a/b needs datasets: pip install 'lmkit[quantize]'",
        (*quantize, str(table)): f"calibration data {table} needs pyarrow: pip install 'lmkit[quantize]'",
        (*quantize, str(saved)): f"calibration data {saved} needs datasets: pip install 'lmkit[quantize]'",
        ("bench", "latency", "demo", "--plot", f"{output}.png"): "--plot needs matplotlib: pip install 'lmkit[bench]'",
        ("inspect", "a/b"): "a/b: no such folder, and fetching it from the Hugging Face Hub needs huggingface_hub: "
        "pip install 'lmkit[hub]'",
    }
    code = (
        "import json, os, sys\n"
        "from typer.testing import CliRunner\n"
        "from lmkit.cli.main import app\n"
        "from lmkit.errors import LMKitError\n"
        "from lmkit.quant.data.comm import Comm\n"
        "def message(run):\n"
        "    try: run()\n"
        "    except LMKitError as error: return str(error)\n"
        "commands = json.loads(sys.argv[1])\n"
        "found = [message(lambda: app(command, standalone_mode=False)) for command in commands]\n"
        "os.environ['WORLD_SIZE'] = '2'\n"
        "print(json.dumps([*found, message(Comm.launched)]))\n"
    )
    found = json.loads(run(plain, code, json.dumps(list(commands))))
    assert found[:-1] == list(commands.values())
    assert found[-1] == "quantizing with several processes needs accelerate: pip install 'lmkit[quantize]'"


@pytest.mark.slow
def test_doctor_names_missing_extras(plain: dict[str, str]) -> None:
    extras = json.loads(run(plain, "from lmkit.cli.main import app; app(['doctor', '--json'])"))["extras"]
    assert extras.keys() == EXTRAS.keys()
    assert extras["quantize"].startswith("datasets, pyarrow, accelerate missing: pip install 'lmkit[quantize]' (")
    assert "Parquet" in extras["quantize"]
