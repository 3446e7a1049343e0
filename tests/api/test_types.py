"""What a type checker sees in a user's file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lmkit

RIGHT = """
from collections.abc import Generator
from typing import assert_type

from lmkit import AsyncPipeline, EngineConfig, GenerationConfig, LMKitError, Response, Session, pipeline

config = GenerationConfig(stop="ab", stop_token_ids=[5], top_k=-1, temperature=None, max_new_tokens=None)
with pipeline("demo", EngineConfig(block_size=32)) as pipe:
    assert_type(pipe("one", config), Response)
    assert_type(pipe([{"role": "user", "content": "one"}]), Response)
    assert_type(pipe(["one", "two"], [config, config], progress=True), list[Response])
    assert_type(pipe.infer(text for text in "ab"), list[Response])
    assert_type(pipe.stream_infer("one"), Generator[Response, None, None])
    assert_type(pipe.chat("one"), Session)
    assert_type(pipe.chat("one", stream_response=True), Generator[Response, None, None])
    assert_type(pipe.ppl(["a b"]) + pipe.get_ppl([[1, 2]]), list[float])


async def main() -> None:
    async with AsyncPipeline("demo", block_size=32) as pipe:
        assert_type(await pipe("one"), Response)
        assert_type(await pipe(["one"]), list[Response])
        async for part in pipe.stream_infer("one"):
            assert_type(part, Response)
        assert_type(await pipe.chat("one"), Session)
"""
WRONG = {
    "pipe(3)": "call-overload",
    "pipe.generate('one')": "attr-defined",
    "pipe.chat('one').text": "attr-defined",
    "pipe('one', temperature=0.5)": "call-overload",
    "GenerationConfig(max_tokens=3)": "call-arg",
    "GenerationConfig(stop=3)": "arg-type",
    "EngineConfig(blok_size=3)": "call-arg",
    "lmkit.LLM": "attr-defined",
}
# Other packages and the engine take most of the time and change nothing for a user.
CONFIG = """[mypy]
strict = True
follow_imports = silent
[mypy-torch.*,numpy.*,numba.*,zmq.*,rich.*,pydantic.*,tokenizers.*,lmkit.turbo.engine.*]
follow_imports = skip
"""


@pytest.mark.slow
def test_mypy_sees_the_types(tmp_path: Path) -> None:
    mistakes = "import lmkit\nfrom lmkit import EngineConfig, GenerationConfig, Pipeline\npipe: Pipeline\n"
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(mistakes + "\n".join(WRONG))
    (tmp_path / "mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--cache-dir", os.devnull, "right.py", "wrong.py"]
    environment = os.environ | {"MYPYPATH": str(Path(lmkit.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert not [line for line in errors if not line.startswith("wrong.py")], done.stdout
    for number, (use, code) in enumerate(WRONG.items(), 4):
        assert any(line.startswith(f"wrong.py:{number}:") and f"[{code}]" in line for line in errors), use + done.stdout


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(lmkit.__file__).parent / "py.typed").exists()
