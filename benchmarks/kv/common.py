"""Shared parts of the KV cache's cases: rows, models of random weights, and a client that times an engine."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.random_llama import Shape, make_awq, make_checkpoint
from lmkit.config import EngineConfig
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams, StepOutput


@dataclass(frozen=True)
class Setting:
    """How the benchmark is run."""

    workdir: Path  # for models and KV on disk
    threads: int
    quick: bool = False  # everything runs, nothing is large enough to mean much


@dataclass(frozen=True)
class Row:
    """One figure. A larger `ratio` is better, and it should reach `goal`."""

    case: str
    ratio: float
    goal: float
    facts: dict[str, Any] = field(default_factory=dict)  # the measurements after the ratio

    @property
    def reached(self) -> bool:
        return self.ratio >= self.goal

    def as_dict(self) -> dict[str, Any]:
        return {"case": self.case, "ratio": self.ratio, "goal": self.goal, "reached": self.reached} | self.facts


def checkpoint(setting: Setting, shape: Shape, *, awq: bool = False) -> Path:
    """A checkpoint of this shape in the work folder, with 4-bit linears if `awq`. It is written on first use."""
    sizes = (shape.hidden, shape.mlp, shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.vocab)
    path = setting.workdir / "-".join(map(str, ("llama", *sizes, shape.max_position)))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        make_checkpoint(path, shape)
    quantized = path.with_name(path.name + "-awq")
    if awq and not quantized.exists():
        make_awq(path, quantized)
    return quantized if awq else path


def random_tokens(generator: random.Random, count: int, vocab: int) -> list[int]:
    """Random tokens without BOS and EOS (0 and 1)."""
    return [generator.randrange(2, vocab) for _ in range(count)]


@dataclass(frozen=True)
class Timing:
    seconds: float  # from the request to its first token
    tokens: list[int]
    cached: int  # prompt tokens that were not computed


class Client:
    """An engine in this process that gets one request at a time. Answers are greedy and do not end by themselves."""

    def __init__(self, model: Path, **config: Any) -> None:
        self.engine = Engine(str(model), EngineConfig(**config))
        self._names = itertools.count()

    def add(self, prompt: list[int], num_tokens: int, **fields: Any) -> str:
        """Queue a request. Returns its id."""
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        name = str(next(self._names))
        self.engine.add(Request(request_id=name, prompt_ids=prompt, params=params, **fields))
        return name

    def ask(self, prompt: list[int], num_tokens: int, **fields: Any) -> Timing:
        begin, first, cached, tokens = time.perf_counter(), 0.0, 0, list[int]()
        self.add(prompt, num_tokens, **fields)
        for outputs in self.steps():
            for output in outputs:
                if output.token_ids and not tokens:
                    first, cached = time.perf_counter() - begin, output.cached_tokens
                tokens += output.token_ids
        return Timing(first, tokens, cached)

    def steps(self) -> Iterable[list[StepOutput]]:
        """Outputs of each step until nothing is left to do. Raises RuntimeError for a request that failed."""
        while self.engine.has_work():
            outputs = self.engine.step()
            if error := next((output.error for output in outputs if output.error), None):
                raise RuntimeError(error)
            yield outputs


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least the share `share` of the values does not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]
