"""Answers that follow a JSON schema: what a grammar lets through, and the time of a mask.

    python -m benchmarks.constrained --suite DIR [--json FILE]

DIR is a checkout of JSON-Schema-Test-Suite (github.com/json-schema-org), or the folder `json` in the source archive of
the package jsonschema. Each test's instance is walked through the grammar of its schema, token by token. A grammar may
be refused, and it may be narrower than its schema, but it must never let an instance through that the schema forbids.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import string
import time
from collections import Counter
from pathlib import Path
from typing import Any

import tokenizers
from rich.console import Console
from rich.table import Table

from benchmarks.report import save
from lmkit.errors import RequestError
from lmkit.text import Tokenizer
from lmkit.text.grammar import Grammars, json_schema

console = Console()
DEMO = Path(__file__).parents[1] / "lmkit" / "demo" / "model"
LARGE = 128_000  # tokens of the large vocabulary


def large_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """The demo's tokenizer with random words as further tokens, up to LARGE."""
    data = json.loads(tokenizer.backend.to_str())
    rng, vocab, merges = random.Random(0), data["model"]["vocab"], data["model"]["merges"]
    pieces = [piece for piece in vocab if piece.strip(string.ascii_letters + "Ġ") == ""]
    next_id = tokenizer.vocab_size
    while next_id < LARGE:
        left, right = rng.choice(pieces), rng.choice(pieces)
        if "Ġ" not in right and left + right not in vocab:
            vocab[left + right] = next_id
            merges.append([left, right])
            pieces.append(left + right) if len(left + right) < 8 else None
            next_id += 1
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(data)), eos_token_ids=tokenizer.eos_token_ids)


def accepts(grammars: Grammars, tokenizer: Tokenizer, grammar: str, instance: Any, times: list[float]) -> bool:
    """Whether the instance can be the whole answer. The time of each mask in seconds is added to `times`."""
    guide = grammars.guide(grammar)
    for token in tokenizer.encode(json.dumps(instance, ensure_ascii=False), add_special_tokens=False):
        if not guide.allowed[token // 32] >> (token % 32) & 1:
            return False
        start = time.perf_counter()
        guide.advance([token])
        times.append(time.perf_counter() - start)
    return any(guide.allowed[token // 32] >> (token % 32) & 1 for token in tokenizer.eos_token_ids)


def measure(tokenizer: Tokenizer, suite: Path) -> dict[str, Any]:
    grammars = tokenizer.grammars(tokenizer.vocab_size)
    counts, masks, compiles = Counter[str](), list[float](), list[float]()
    for file in sorted((suite / "tests" / "draft2020-12").glob("*.json")):
        for group in json.loads(file.read_text()):
            schema = group["schema"]
            start = time.perf_counter()
            try:
                grammar = json_schema(schema)
                grammars.check(grammar, "schema")
            except (RequestError, ValueError):
                counts["schemas refused"] += 1
                continue
            compiles.append(time.perf_counter() - start)
            counts["schemas held"] += 1
            for test in group["tests"]:
                held = accepts(grammars, tokenizer, grammar, test["data"], masks)
                wanted = "allowed" if test["valid"] else "forbidden"
                counts[f"{wanted} instances {'let through' if held else 'kept out'}"] += 1
    ranked = sorted(masks)
    return dict(sorted(counts.items())) | {
        "tokens": tokenizer.vocab_size,
        "compile, median ms": round(1e3 * statistics.median(compiles), 2),
        "mask, median us": round(1e6 * statistics.median(masks), 1),
        "mask, 99 % us": round(1e6 * ranked[int(0.99 * len(ranked))], 1),
        "mask, worst us": round(1e6 * ranked[-1], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--suite", type=Path, required=True, help="JSON-Schema-Test-Suite")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    demo = Tokenizer.from_pretrained(DEMO)
    rows = [measure(tokenizer, arguments.suite) for tokenizer in (demo, large_tokenizer(demo))]
    table = Table(title="JSON-Schema-Test-Suite, draft 2020-12")
    for column in ("", "demo", "large"):
        table.add_column(column, justify="left" if not column else "right")
    for name in rows[0]:
        table.add_row(name, *(str(row[name]) for row in rows))
    console.print(table)
    if arguments.json:
        save(arguments.json, "constrained", rows)


if __name__ == "__main__":
    main()
