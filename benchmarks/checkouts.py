"""Two checkouts of lmkit behind a server each, in turns: what a change costs or saves of the speed that clients see.

    python -m benchmarks.checkouts OLD [NEW] [--model demo] [--requests 1 16] [--words 48] [--rounds 9] [--json F]

NEW is by default this checkout. Both servers run all the time and one of them has load, so other work on the machine
slows both alike. A ratio is the median over the rounds of NEW to OLD, of two neighbours in time; above 1 NEW is faster.
Prompts are fresh: none is in a prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.http_path import LINE, NUM_WORDS, Ask, of_server, round_of
from lmkit.errors import ConfigError


def environment(checkout: Path) -> dict[str, str]:
    """Variables with which Python imports lmkit from `checkout`. Raises ConfigError if it finds another one."""
    there = os.environ | {"PYTHONPATH": str(checkout)}
    code = "import lmkit; print(lmkit.__file__)"
    found = subprocess.run([sys.executable, "-c", code], env=there, cwd=checkout, capture_output=True, text=True)
    if found.returncode or not Path(found.stdout.strip()).is_relative_to(checkout):
        raise ConfigError(f"{checkout}: no checkout of lmkit; Python finds {found.stdout.strip() or 'none'}")
    return there


@contextmanager
def serving(checkout: Path, model: str) -> Iterator[str]:
    """The URL of a server of `checkout` while it runs. It takes any free port."""
    command = [sys.executable, "-m", "lmkit", "serve", model, "--port", "0", "--served-model-name", "m"]
    server = subprocess.Popen(
        command, env=environment(checkout), cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert server.stdout is not None
        url = next((found[1] for line in server.stdout if (found := LINE.search(line))), None)
        if url is None:
            raise ConfigError(f"{checkout}: its server ended with {server.wait()}")
        yield url
    finally:
        server.terminate()
        server.wait()


async def compare(asks: tuple[Ask, Ask], count: int, rounds: int, words: int = NUM_WORDS) -> dict[str, Any]:
    """One row: `count` requests at once to OLD and to NEW, which begins every second round."""
    rng, samples = random.Random(count), []
    for turn in range(rounds + 1):
        order = (0, 1) if turn % 2 else (1, 0)
        found = {which: await round_of(asks[which], count, rng, words) for which in order}
        if turn:  # the first warms up
            samples.append((*found[0], *found[1]))
    ratios = [new / old for old, _, new, _ in samples]
    old_rate, _, new_rate, _ = (statistics.median(column) for column in zip(*samples, strict=True))
    return {
        "requests": count,
        "old_tokens_per_s": old_rate,
        "new_tokens_per_s": new_rate,
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "first_token_ratio": statistics.median(old / new for _, old, _, new in samples),
    }


async def measure(
    old: Path, new: Path, model: str, counts: list[int], rounds: int, words: int = NUM_WORDS
) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(checkout, model)) for checkout in (old, new)]
        asks = of_server(urls[0], "m"), of_server(urls[1], "m")
        return [await compare(asks, count, rounds, words) for count in counts]


def main() -> None:
    parser = argparse.ArgumentParser(description="The speed of two checkouts behind a server each.")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?", default=Path(__file__).parents[1])
    parser.add_argument("--model", default="demo", help="demo, or an absolute path")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16], help="requests at once")
    parser.add_argument("--words", type=int, default=NUM_WORDS, help="of a prompt, a few tokens each")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    old, new = given.old.resolve(), given.new.resolve()
    rows = asyncio.run(measure(old, new, given.model, given.requests, given.rounds, given.words))
    report.show(rows)
    if given.json:
        report.save(given.json, "checkouts", rows, old=str(old), new=str(new), model=given.model)


if __name__ == "__main__":
    main()
