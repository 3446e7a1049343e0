"""An engine that computes nothing and prints to stdout. It fails on a prompt of 13 tokens."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.peers.protocol import Facts, Options, main


class FakeEngine:
    def __init__(self, options: Options) -> None:
        if options.model.name == "broken":
            raise RuntimeError("no such model")
        level = os.environ.get("LMKIT_CPU_ISA", "no level")
        self.facts = Facts("1.2", f"{options.threads} threads, {level}", 1000)
        self.batch = 0

    def prefill(self, prompts: list[list[int]]) -> None:
        os.write(1, b"a library's own output\n")
        if len(prompts[0]) == 13:
            raise RuntimeError("out of memory")
        self.batch = len(prompts)

    def step(self) -> int:
        return self.batch


def prepare(source: Path, out: Path) -> None:
    out.write_text("made from " + source.name)


if __name__ == "__main__":
    main(FakeEngine, prepare)
