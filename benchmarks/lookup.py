"""How many tokens of known answers a step gets from drafts of them, without an engine.

    python -m benchmarks.lookup [--cost C] [--commits N] [--json FILE]

    copy, edit   the answers of benchmarks.speculation
    eighth       `edit` of benchmarks.lookup_peers: every eighth token is another one
    rename       held-out code is repeated with four names changed
    commits      files of this repository after the last commits that edited them; the prompt is the file before that

`index` is what `--speculate ngram` does. `longest` drafts what followed the longest suffix of the text that stood
before, where it stood last: a suffix automaton finds the same. Both with and without draft tokens after edits.

A step takes 1, and C more for each draft token. It has as many drafts as make the most tokens in this time, by the
chances that the answer has shown so far. The ratio is that of the time without draft tokens to the time with them.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from array import array
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks import lookup_peers, report, speculation
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.quant.report.evaluate import HELDOUT_TEXT
from lmkit.text import Tokenizer
from lmkit.turbo.scheduling import ngrams
from lmkit.turbo.scheduling.ngrams import LONGEST, SHORT, Ngrams
from lmkit.turbo.scheduling.speculation import BAND, BANDS, SURE, Chances

LONGEST_DRAFT, VOCAB, NAMES = 16, 32000, 4
MAX_TOKENS = 6000  # of an edited file
Case = tuple[list[int], list[int]]  # a prompt and its answer


class Longest(Ngrams):
    """Drafts what followed the longest suffix that stood before."""

    def __init__(self, token_ids: array[int]) -> None:
        self.ends: defaultdict[bytes, list[int]] = defaultdict(list)  # by the last SHORT tokens
        self.num_ends = 0
        super().__init__(token_ids)

    def _index(self, end: int) -> None:
        tokens = self._own.token_ids
        for before in range(self.num_ends + 1, end):
            self.ends[tokens[max(before - SHORT, 0) : before].tobytes()].append(before)
        self.num_ends = end - 1
        for place in reversed(self.ends[tokens[max(end - SHORT, 0) : end].tobytes()] if self.agreed < SHORT else []):
            self._take(tokens, place, end)


def commits(count: int, encode: Callable[[str], list[int]]) -> list[Case]:
    """The last so many files that a commit edited, before and after it."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], check=True, capture_output=True, text=True).stdout

    found: list[Case] = []
    log = git("log", "--no-merges", "--diff-filter=M", "--name-only", "--format=:%H", "--", "lmkit/*.py")
    for line in log.split("\n"):
        if line.startswith(":"):
            commit = line[1:]
        elif line:
            old, new = (encode(git("show", f"{at}:{line}")) for at in (f"{commit}~", commit))
            if len(new) <= MAX_TOKENS:
                found.append((old + encode("\n\n# The new version:\n"), new))
        if len(found) == count:
            break
    return found


def cases(num_commits: int) -> dict[str, list[Case]]:
    encode = Tokenizer.from_pretrained(DEMO_FOLDER).encode
    known = speculation.cases(6)
    eighth = lookup_peers.prompts(VOCAB)["edit"]
    found = {kind: known[kind] for kind in ("copy", "edit")}
    found["eighth"] = [(eighth, [eighth[-1] + i for i in range(1, lookup_peers.NUM_TOKENS + 1)])]
    found["rename"] = []
    for start in range(20_000, 32_500, 2500):
        code = HELDOUT_TEXT.read_text()[start:][:2000]
        names = sorted(set(re.findall(r"\b[a-z_]{4,}\b", code)), key=lambda name: (-code.count(name), name))[:NAMES]
        renamed = re.sub(rf"\b({'|'.join(names)})\b", r"\1_new", code)
        found["rename"].append((encode(f"{code}\n\n# Renamed:\n"), encode(renamed)))
    return found | {"commits": commits(num_commits, encode)}


def measure(pairs: list[Case], proposer: type[Ngrams], cost: float) -> tuple[float, float]:
    """(the time without draft tokens / the time with them, tokens a step)"""
    common, num_tokens, num_steps, time = Chances(), 0, 0, 0.0
    for prompt, answer in pairs:
        text, own = array("i", prompt), Chances([0.0] * len(BANDS), [0.0] * len(BANDS))
        drafter, rest = proposer(text), answer
        draft: list[int] = []
        while rest:
            right = next((i for i, pair in enumerate(zip(draft, rest, strict=False)) if pair[0] != pair[1]), len(draft))
            num_steps, time = num_steps + 1, time + 1 + cost * len(draft)
            text.extend(rest[: right + 1])
            rest = rest[right + 1 :]
            while drafter.known < len(text):
                if judged := drafter.learn():
                    own.record(*judged)
                    common.record(*judged)
            draft = drafter.draft(LONGEST_DRAFT)
            del draft[_best_length(len(draft), drafter.agreed, own, common, cost) :]
        num_tokens += len(answer)
    return num_tokens / time, num_tokens / num_steps


def _best_length(longest: int, agreed: int, own: Chances, common: Chances, cost: float) -> int:
    best, most, chance, expected = 0, 1.0, 1.0, 1.0
    for count in range(1, longest + 1):
        band = BAND[min(agreed + count - 1, LONGEST)]
        chance *= (own.right[band] + SURE * common.of(band)) / (own.tried[band] + SURE)
        expected += chance
        if expected / (1 + cost * count) > most:
            best, most = count, expected / (1 + cost * count)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description="Drafts of known answers from their text.")
    parser.add_argument("--cost", type=float, default=0.08, help="of a draft token, in plain steps")
    parser.add_argument("--commits", type=int, default=20)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for kind, pairs in cases(given.commits).items():
        for name, proposer in (("index", Ngrams), ("longest", Longest)):
            for run in (LONGEST + 1, ngrams.RUN):
                with patch.object(ngrams, "RUN", run):
                    ratio, tokens_a_step = measure(pairs, proposer, given.cost)
                row = {"kind": kind, "proposer": name, "behind edits": run <= LONGEST}
                rows.append(row | {"ratio": ratio, "tokens a step": tokens_a_step})
    report.show(rows)
    if given.json:
        report.save(given.json, "lookup", rows, cost=given.cost)


if __name__ == "__main__":
    main()
