"""Draft tokens change nothing: answers to many prompts, and the distribution of sampled tokens at each position.

    python -m benchmarks.exactness [MODEL] [--speculate HOW] [--draft-history N] [--variations NAME ...]
                                   [--prompts N] [--seeds N] [--positions N] [--batch N]

Greedy: the answers to N prompts of held-out text are compared with those of an engine without drafts: tokens, text,
log-probabilities, and why each ended. `--variations` names what requests or engines have besides, each in turn:

    penalties, bias, logprobs, stop, grammar    fields of the requests
    again        each prompt comes twice: the prefix cache has it
    preempted    the engine with draft tokens has KV for half of a batch
    adapters     three of four requests have a LoRA adapter, one of two
    int4         the KV cache has 4 bits

Sampled: one prompt is continued at temperature 1, N times with draft tokens and N times without, by different seeds. A
chi-square test of two samples compares the tokens at each position; rare tokens are counted together. With the same
seeds the answers are the same, which is checked as well. Draft tokens are made in every step, whether they pay or not.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from benchmarks import report
from benchmarks.lora import write_adapter
from lmkit.config import EngineConfig
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.jsonfile import read_json
from lmkit.models import load_spec
from lmkit.quant.report.evaluate import HELDOUT_TEXT
from lmkit.text import Tokenizer
from lmkit.text.grammar import json_schema
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from lmkit.turbo.scheduling import model_speculation, speculation
from lmkit.turbo.scheduling.accounts import Account
from lmkit.turbo.transport.output import OutputProcessor, TextLogprobs

NUM_TOKENS = 32  # of a greedy answer
PROMPT_CHARACTERS = 160
MAX_TOKENS = 256  # of a prompt and its answer
RARE = 10  # tokens that were drawn less often, in both samples together, are one bin
ENDED = -1  # in place of a token: the answer has ended
TIGHT = 96  # tokens of KV for each sequence, if some are to be preempted
ADAPTERS = ("", "first", "first", "second")  # of requests, in turns
TEXT = {"type": "string", "maxLength": 9}
SCHEMA = {"type": "object", "properties": {"name": TEXT, "module": TEXT}, "required": ["name", "module"]}
PARAMS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4},
    "bias": {"logit_bias": {token: 0.02 * token - 2 for token in range(200)}},
    "logprobs": {"logprobs": 3},
    "stop": {"stop": ("\n\n", "self.", "):", "re")},
    "grammar": {"grammar": json_schema(SCHEMA), "ignore_eos": False},
    "preempted": {"max_tokens": 3 * NUM_TOKENS},
}
VARIATIONS = ("none", *PARAMS, "again", "adapters", "int4")


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TextLogprobs] = field(default_factory=list)
    why: str | None = None  # it ended


def answers(engine: Engine, requests: list[Request], batch: int) -> list[Answer]:
    """The answer to each request, `batch` of them at a time: while requests wait, no draft tokens are made."""
    tokenizer = Tokenizer.from_pretrained(DEMO_FOLDER)
    follow = {request.request_id: OutputProcessor(tokenizer, request) for request in requests}
    found = {name: Answer() for name in follow}
    for start in range(0, len(requests), batch):
        for request in requests[start : start + batch]:
            engine.add(request)
        while engine.has_work():
            for step in engine.step():
                output, answer = follow[step.request_id].process(step), found[step.request_id]
                assert output.error is None, output.error
                answer.tokens += output.token_ids
                answer.text += output.text
                answer.logprobs += output.logprobs
                answer.why = answer.why or output.finish_reason
                if output.abort_engine:
                    engine.abort(step.request_id)
    return list(found.values())


def prompts_of(count: int, vocab_size: int) -> list[list[int]]:
    """Held-out code, its beginning twice, so that drafts are made. Ids are folded into a smaller vocabulary."""
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


def deviation(one: list[Answer], two: list[Answer]) -> float:
    """The largest deviation of two samples of answers at a position."""
    columns = (zip_longest(*(answer.tokens for answer in sample), fillvalue=ENDED) for sample in (one, two))
    pairs = zip_longest(*columns, fillvalue=(ENDED,) * len(one))
    return max(chi_square(list(a), list(b)) for a, b in pairs)


def engines(given: argparse.Namespace, variation: str, folder: Path) -> tuple[Engine, Engine]:
    """One without draft tokens, and one that makes them. Adapters are written to `folder`."""
    options: dict[str, Any] = {"max_batch_size": given.batch, "max_model_len": MAX_TOKENS}
    if variation == "int4":
        options["kv_dtype"] = "int4"
    if variation == "adapters":
        spec = load_spec(read_json(Path(given.model) / "config.json", 1 << 20))
        for seed, name in enumerate(("first", "second")):
            write_adapter(folder / name, spec, None, 64, seed)
        options["adapters"] = tuple(f"{name}={folder / name}" for name in ("first", "second"))
    plain = Engine(given.model, EngineConfig(**options))
    if variation == "preempted":
        tokens = plain.info.num_blocks * plain.info.block_size
        options["kv_memory"] = max(TIGHT * given.batch, MAX_TOKENS) * plain.info.memory["kv"] // tokens
    how = {"speculate": given.speculate, "draft_history": given.draft_history}
    return plain, Engine(given.model, EngineConfig(**options, **how))


def compare(plain: Engine, drafting: Engine, given: argparse.Namespace, variation: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True} | PARAMS.get(variation, {})
    adapters = ADAPTERS if variation == "adapters" else ("",)
    times = 2 if variation == "again" else 1
    prompts = prompts_of(given.prompts // times, plain.info.vocab_size) * times

    def request(number: int, prompt: list[int], **changed: Any) -> Request:
        adapter, params = adapters[number % len(adapters)], SamplingParams(**fields | changed)
        return Request(request_id=str(number), prompt_ids=prompt, params=params, adapter=adapter)

    greedy = [request(i, prompt) for i, prompt in enumerate(prompts)]
    pairs = zip(*(answers(engine, greedy, given.batch) for engine in (drafting, plain)), strict=True)
    different = sum(mine != other for mine, other in pairs)
    of_greedy = drafting.stats()

    def drawn(engine: Engine, first: int) -> list[Answer]:
        how = {"max_tokens": given.positions, "temperature": 1.0}
        seeds = range(first, first + given.seeds)
        return answers(engine, [request(seed, prompts[0], seed=seed, **how) for seed in seeds], given.batch)

    one, two = drawn(drafting, 0), drawn(plain, given.seeds)
    stats = drafting.stats()
    return {
        "speculate": given.speculate, "variation": variation, "prompts": len(prompts), "different": different,
        "drafts": of_greedy.draft_tokens, "right": of_greedy.accepted_tokens, "seeds": given.seeds,
        "right_sampled": stats.accepted_tokens - of_greedy.accepted_tokens, "same_with_seed": drawn(plain, 0) == one,
        "largest_deviation": deviation(one, two), "preemptions": stats.preemptions,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Draft tokens change no token.")
    parser.add_argument("model", nargs="?", default=str(DEMO_FOLDER))
    parser.add_argument("--speculate", default="ngram", help="ngram, draft=FOLDER, eagle=FOLDER or mtp")
    parser.add_argument("--draft-history", type=int, default=0, help="tokens of earlier answers to draft from")
    parser.add_argument("--variations", nargs="+", choices=VARIATIONS, default=["none"])
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--positions", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    given = parser.parse_args()
    always = (
        patch.object(model_speculation, "PROBE_SHARE", 1e9),
        patch.object(model_speculation, "FIRST_PROBES", 1 << 30),
        patch.object(Account, "book"),
        patch.object(speculation.Speculation, "_rests", return_value=False),
        patch.object(speculation.Speculation, "_costs", lambda self, num_seqs: (1.0, 1e-6, 0.0, float(num_seqs))),
    )
    for change in always:
        change.start()
    rows = []
    for variation in given.variations:
        with TemporaryDirectory() as folder:
            plain, drafting = engines(given, variation, Path(folder))
            rows.append(compare(plain, drafting, given, variation))
            for engine in (plain, drafting):
                engine.close()
    report.show(rows)


if __name__ == "__main__":
    main()
