"""Prompt lookup of lmkit, llama.cpp and vLLM, each beside its own decoding without: one model, the same prompts.

    python -m benchmarks.lookup_peers [--peer NAME=PYTHON ...] [--engines a,b] [--size 1b|tiny] [--workdir DIR]
                                      [--drafts N] [--rounds N] [--json FILE]

The model has random weights, but it counts: after token n it chooses n + 1 (random_llama). So all engines decode a
known text at the cost of any model of this shape, and the prompt decides which draft tokens are right.

    copy    the answer stands in the prompt
    edit    the same, but every eighth token is another one there
    fresh   nothing of the answer stands in the prompt

An engine runs in two processes, without drafts and with them. They take turns. The clock starts at the first token.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.cpu_peers import PEERS, SIZES
from benchmarks.peers import client
from benchmarks.peers.catalog import ENGINES, EngineKind
from benchmarks.peers.client import EngineFailed, PeerProcess
from benchmarks.peers.protocol import Options
from benchmarks.random_llama import Shape, make_checkpoint
from lmkit.environment import default_num_threads
from lmkit.errors import LMKitError

NUM_TOKENS, KNOWN, BEGINNING, CONTEXT = 160, 320, 16, 1024
FIRST = 2  # after the special tokens
EDITED = 8
NAMES = ("lmkit", "llama.cpp", "vllm-awq")


def prompts(vocab: int) -> dict[str, list[int]]:
    """By kind. What follows the last token is counted in all of them."""
    text = list(range(FIRST, FIRST + KNOWN))
    beginning = text[:BEGINNING]
    edited = [vocab - i // EDITED if i % EDITED == 0 else token for i, token in enumerate(text, 1)]
    others = random.Random(0).choices(range(FIRST + KNOWN, vocab - KNOWN // EDITED), k=KNOWN)
    return {"copy": text + beginning, "edit": edited + beginning, "fresh": others + beginning}


def measure(
    kind: EngineKind, pythons: list[str], shape: Shape, folder: Path, drafts: int, rounds: int
) -> list[dict[str, Any]]:
    """A row for each kind of prompt. Raises EngineFailed."""
    python, model = pythons[0], folder / (kind.form or "checkpoint")
    if not model.exists():
        maker = ENGINES.get(kind.maker, kind)
        maker_python = python if maker == kind else sys.executable
        client.prepare(maker_python, f"{PEERS}.{maker.module}", folder / "checkpoint", model, folder / "prepare.log")
    with contextlib.ExitStack() as stack:
        processes = []
        for count in (0, drafts):
            options = Options(model, default_num_threads(), 1, CONTEXT, shape.vocab, count)
            log = folder / f"{kind.name}.{count}.log"
            processes.append(stack.enter_context(PeerProcess(python, f"{PEERS}.{kind.module}", options, log)))
        for process in processes:
            process.ready()
        rows = []
        for name, prompt in prompts(shape.vocab).items():
            rates: list[list[float]] = [[], []]
            for turn in range(rounds + 1):  # the first warms up
                for process, of_process in zip(processes, rates, strict=True):
                    of_process += [_rate(process, prompt)] * bool(turn)
            plain, drafted = map(statistics.median, rates)
            row = {"engine": kind.label, "version": processes[0].facts.version, "kind": name}
            rows.append(row | {"plain_tok_s": plain, "drafting_tok_s": drafted, "ratio": drafted / plain})
        return rows


def _rate(process: PeerProcess, prompt: list[int]) -> float:
    answer = process.ask(do="answer", prompt=prompt, count=NUM_TOKENS)
    if answer["ids"] != list(range(prompt[-1] + 1, prompt[-1] + 1 + NUM_TOKENS)):
        raise EngineFailed(f"it counts wrong: {answer['ids']}")
    rate: float = answer["tokens"] / answer["seconds"]
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description="Prompt lookup of several engines.")
    parser.add_argument("--peer", action="append", default=[], help="NAME=PYTHON that has the engine")
    parser.add_argument("--engines", default=",".join(NAMES))
    parser.add_argument("--size", choices=["1b", "tiny"], default="1b")
    parser.add_argument("--workdir", type=Path, default=Path("lookup_peers"))
    parser.add_argument("--drafts", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    shape, folder = SIZES[given.size], given.workdir / given.size
    try:
        kinds = [ENGINES[name] for name in NAMES if name in given.engines.split(",")]
        pythons = client.parse_pythons(given.peer, {kind.python or kind.name for kind in kinds})
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "checkpoint").exists():
            make_checkpoint(folder / "checkpoint", shape, counts=True)
        rows = []
        for kind in kinds:
            having = pythons.get(kind.python or kind.name, [sys.executable])
            rows += measure(kind, having, shape, folder, given.drafts, given.rounds)
            report.show(rows)
    except (LMKitError, EngineFailed) as error:
        sys.exit(f"error: {error}")
    if given.json:
        report.save(given.json, "lookup_peers", rows, drafts=given.drafts)


if __name__ == "__main__":
    main()
