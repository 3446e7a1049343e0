"""Guesses change nothing: greedy tokens of many prompts, and the distribution of sampled tokens at each position.

    python -m benchmarks.exactness [MODEL] [--speculate HOW] [--prompts N] [--seeds N] [--positions N] [--batch N]

Greedy: every token of N prompts of held-out text is compared with that of an engine without guesses.

Sampled: one prompt is continued at temperature 1, N times with guesses and N times without, by different seeds. A
chi-square test of two samples compares the tokens at each position; rare tokens are counted together. With the same
seeds the tokens are the same, which is checked as well. Guesses are made in every step, whether they pay or not.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from typing import Any
from unittest.mock import patch

from benchmarks import report
from lmkit.config import EngineConfig
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.quant.report.evaluate import HELDOUT_TEXT
from lmkit.text import Tokenizer
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from lmkit.turbo.scheduling import drafting, speculation

NUM_TOKENS = 32  # of a greedy answer
PROMPT_CHARACTERS = 160
RARE = 10  # tokens that were drawn less often, in both samples together, are one bin


def answers(engine: Engine, prompts: list[list[int]], params: list[SamplingParams], batch: int) -> list[list[int]]:
    """The tokens behind each prompt, `batch` prompts at a time: while requests wait, no guesses are made."""
    found: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    requests = [
        Request(request_id=str(i), prompt_ids=ids, params=how)
        for i, (ids, how) in enumerate(zip(prompts, params, strict=True))
    ]
    for start in range(0, len(requests), batch):
        for request in requests[start : start + batch]:
            engine.add(request)
        while engine.has_work():
            for output in engine.step():
                assert output.error is None, output.error
                found[output.request_id] += output.token_ids
    return list(found.values())


def prompts_of(model: str, count: int, vocab_size: int) -> list[list[int]]:
    """Held-out code, its beginning twice, so that guesses are made. Ids are folded into a smaller vocabulary."""
    tokenizer, text = Tokenizer.from_pretrained(DEMO_FOLDER), HELDOUT_TEXT.read_text()
    starts = range(0, len(text) - PROMPT_CHARACTERS, max(1, (len(text) - PROMPT_CHARACTERS) // count))
    pieces = [text[start : start + PROMPT_CHARACTERS] for start in starts][:count]
    return [[token % vocab_size for token in tokenizer.encode(piece + piece[: len(piece) // 2])] for piece in pieces]


def chi_square(one: list[int], two: list[int]) -> float:
    """The deviation of two samples of one size from each other, in standard deviations (Wilson and Hilferty, 1931)."""
    first, second = Counter(one), Counter(two)
    common = [token for token in first | second if first[token] + second[token] >= RARE]
    pairs = [(first[token], second[token]) for token in common]
    pairs.append((len(one) - sum(a for a, _ in pairs), len(two) - sum(b for _, b in pairs)))
    pairs = [pair for pair in pairs if sum(pair)]
    freedom = len(pairs) - 1
    if not freedom:
        return 0.0
    total = sum((a - b) ** 2 / (a + b) for a, b in pairs)  # both samples have the same size
    return (math.cbrt(total / freedom) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def main() -> None:
    parser = argparse.ArgumentParser(description="Guesses change no token.")
    parser.add_argument("model", nargs="?", default=str(DEMO_FOLDER))
    parser.add_argument("--speculate", default="ngram")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--positions", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    given = parser.parse_args()
    options: dict[str, Any] = {"max_batch_size": given.batch, "max_model_len": 256}
    always = (
        patch.object(drafting, "PROBE_SHARE", 1e9),
        patch.object(drafting, "FIRST_PROBES", 1 << 30),
        patch.object(speculation.Speculation, "_costs", lambda self, num_seqs: (1.0, 1e-6, 0.0, float(num_seqs))),
    )
    for change in always:
        change.start()
    plain, guessing = (Engine(given.model, EngineConfig(**options, speculate=how)) for how in ("off", given.speculate))
    prompts = prompts_of(given.model, given.prompts, plain.info.vocab_size)
    greedy = [SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)] * len(prompts)
    greedy_of = (answers(engine, prompts, greedy, given.batch) for engine in (guessing, plain))
    pairs = zip(*greedy_of, strict=True)
    different = sum(mine != other for mine, other in pairs)
    of_greedy = guessing.stats()

    def drawn(engine: Engine, first: int) -> list[list[int]]:
        seeds = range(first, first + given.seeds)
        how = [SamplingParams(max_tokens=given.positions, temperature=1.0, seed=s, ignore_eos=True) for s in seeds]
        return answers(engine, [prompts[0]] * given.seeds, how, given.batch)

    one, two = drawn(guessing, 0), drawn(plain, given.seeds)
    same = drawn(plain, 0) == one
    deviations = [
        chi_square(list(a), list(b)) for a, b in zip(zip(*one, strict=True), zip(*two, strict=True), strict=True)
    ]
    accepted = guessing.stats().accepted_tokens - of_greedy.accepted_tokens
    report.show([{
        "speculate": given.speculate, "prompts": len(prompts), "different": different,
        "guesses": of_greedy.draft_tokens, "right": of_greedy.accepted_tokens, "seeds": given.seeds,
        "right_sampled": accepted, "same_with_seed": same, "largest_deviation": max(deviations),
    }])  # fmt: skip
    for engine in (plain, guessing):
        engine.close()


if __name__ == "__main__":
    main()
