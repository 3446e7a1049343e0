"""Makes demo-text.jsonl, demo-code.jsonl and demo-chat.jsonl from the sources and the manual of CPython 3.11.7.

    python3.11 calibration/make.py

The first NUM_WRITTEN conversations of demo-chat.jsonl were written for it by hand and stay. Files that the demo model
is evaluated on (lmkit/demo/text/SOURCES.txt) are left out.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

HERE = Path(__file__).parent
LIBRARY = Path(sysconfig.get_paths()["stdlib"])
PIECE = 6000  # characters of one document at most
NUM_MODULES, NUM_WRITTEN, NUM_ANSWERS = 48, 26, 150


def heldout() -> set[str]:
    sources = (HERE.parent / "lmkit" / "demo" / "text" / "SOURCES.txt").read_text()
    return set(sources.split("heldout.txt")[1].split("\n\n")[0].splitlines())


def modules() -> list[Path]:
    """Of the library without its tests, in an order that is mixed but always the same."""
    excluded = heldout()
    found = sorted(path for path in LIBRARY.rglob("*.py") if "test" not in str(path.relative_to(LIBRARY)))
    kept = [
        path for path in found if str(path.relative_to(LIBRARY)) not in excluded and "site-packages" not in path.parts
    ]
    random.Random(0).shuffle(kept)
    return [path for path in kept if 4000 < path.stat().st_size < 200_000]


def cut(text: str) -> str:
    return text if len(text) <= PIECE else text[: text.rfind("\n", 0, PIECE) + 1]


def answers() -> Iterator[dict[str, Any]]:
    """A conversation for a documented function: asked by what its docstring says, answered by its source."""
    for path in modules():
        source = path.read_text("utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)) and len(doc) > 40:
                code = ast.get_source_segment(source, node) or ""
                if 200 < len(code) < 1500:
                    question = f"Write a Python function `{node.name}`: {doc.split(chr(10) * 2)[0].strip()}"
                    answer = f"```python\n{code}\n```"
                    yield {
                        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                    }
                    break


def write(name: str, rows: list[dict[str, Any]]) -> None:
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    (HERE / name).write_bytes(data)
    sys.stdout.write(f"{name}: {len(rows)} rows, {len(data):,} bytes, sha256 {hashlib.sha256(data).hexdigest()}\n")


def main() -> None:
    write("demo-text.jsonl", [{"text": cut(text)} for _, text in sorted(topics.items()) if len(text) > 400])
    write("demo-code.jsonl", [{"text": cut(path.read_text("utf-8"))} for path in modules()[:NUM_MODULES]])
    lines = (HERE / "demo-chat.jsonl").read_text("utf-8").splitlines()
    written = [json.loads(line) for line in lines[:NUM_WRITTEN]]
    made = [row for row, _ in zip(answers(), range(NUM_ANSWERS), strict=False)]
    write("demo-chat.jsonl", written + made)


if __name__ == "__main__":
    main()
