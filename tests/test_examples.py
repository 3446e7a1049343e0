"""Every file of examples/ runs as it is, with the demo model."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents import ROOT
from tests.reader import environment, free_ports, run, server

EXAMPLES = ROOT / "examples"
QUICK = ["--recipe", "rtn_w4a16_g128", "--num-samples", "2", "--seq-len", "64", "--no-eval"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """A server with the options of serve.yaml."""
    with server(f"lmkit serve --config {EXAMPLES}/serve.yaml --port 0", folder, environment(folder)) as printed:
        yield printed.rpartition(" on ")[2].strip()


def example(folder: Path, name: str, *arguments: str) -> str:
    return run([sys.executable, str(EXAMPLES / name), *arguments], folder, environment(folder))


def test_examples_are_short_and_listed() -> None:
    files = [path for path in EXAMPLES.iterdir() if path.is_file() and path.name != "README.md"]
    listed = re.findall(r"^\| \[(\S+)\]\((\S+)\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted((path.name, path.name) for path in files)
    assert [path.name for path in files if len(path.read_text().splitlines()) >= 40] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("batch.py", r"prompt 2: \d+ tokens, (length|stop): "),
        ("stream.py", r"\d+ tokens, (length|stop)"),
        ("chat_session.py", r"4 messages: user assistant user assistant"),
        ("branching.py", r"verdict:  (good|bad); \d+ tokens reused, \d+ computed"),
        ("async_pipeline.py", r"took too long: its request is aborted"),
    ],
)
def test_pipelines(folder: Path, name: str, last: str) -> None:
    printed = example(folder, name)
    assert re.match(last, printed.splitlines()[-1]), printed


@pytest.mark.slow
def test_a_client_of_openai(folder: Path, address: str) -> None:
    first, rest = example(folder, "openai_client.py", address).split("\n", 1)
    assert re.fullmatch(r"assistant answers .+ in \d+ tokens", first)
    assert rest.strip()


@pytest.mark.slow
def test_two_models_behind_a_proxy(folder: Path) -> None:
    variables = environment(folder) | {"PORT": str(free_ports(3))}
    printed = run([str(EXAMPLES / "two_models_behind_proxy.sh")], folder, variables)
    assert re.search(r"\bup\s+first\b", printed), printed
    assert re.search(r"\bup\s+second\b", printed), printed


@pytest.mark.exhaustive
def test_quantize_and_serve(folder: Path) -> None:
    """A second start finds the quantized model and serves it at once."""
    script = str(EXAMPLES / "quantize_and_serve.sh")
    variables = environment(folder) | {"PORT": "0"}
    with server(" ".join([script, "demo", "demo-awq", *QUICK]), folder, variables) as printed:
        assert "serving demo-awq on http://" in printed
    assert (folder / "demo-awq" / "kv_config.json").exists()
    with server(f"{script} demo demo-awq", folder, variables) as printed:
        assert "layers:" not in printed
