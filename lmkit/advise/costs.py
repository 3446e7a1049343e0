"""What a step of an engine takes, as a sum of five terms, and the file that keeps it. No torch here.

    seconds = step + prompt * (prompt tokens) + attend * (KV tokens that prompt tokens see, summed)
              + decode * (decoding sequences) + read * (KV tokens that decoding sequences see, summed)

The terms are fitted to measured steps (lmkit.advise.measure), for each type of KV.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from lmkit.errors import JSON_ERRORS, ConfigError
from lmkit.turbo.plan import StepPlan
from lmkit.turbo.scheduling.limits import SchedulerLimits

SCHEMA = "lmkit.costs/1"
ROUNDS = 4  # of weights that follow from the terms of the round before
TRIMMED = 0.05  # share of the steps that fit worst and are left out: the machine did something else meanwhile


class Work(NamedTuple):
    """The work of one step, in the order of StepCosts' terms."""

    step: int
    prompt: int
    attend: int
    decode: int
    read: int


class StepCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of each unit of work."""

    step: float
    prompt: float
    attend: float
    decode: float
    read: float

    def seconds(self, work: Work) -> float:
        terms: tuple[float, ...] = msgspec.structs.astuple(self)
        return sum(term * count for term, count in zip(terms, work, strict=True))


class TypeCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The costs with one type of KV, and the limits of the engine that was measured."""

    costs: StepCosts
    error: float  # median of |predicted - measured| / measured of the steps
    num_steps: int
    limits: SchedulerLimits  # its blocks are those of `limits.max_batch_size` sequences, or as many as fit in memory


class CostFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a model's steps take on one machine."""

    schema: str = SCHEMA
    model: str
    environment: dict[str, Any]  # of the machine, as in the figures of `lmkit bench`
    options: dict[str, str]  # of `lmkit serve`, besides the type of KV
    largest_batch: int  # that was measured
    types: dict[str, TypeCosts]  # by kv_dtype


def work_of(plan: StepPlan) -> Work:
    """The work of a plan. A chunk that computes more than it samples is a prompt's."""
    prompt = attend = decode = read = 0
    for chunk in plan.chunks:
        count = chunk.num_tokens
        if count > chunk.num_sampled:
            prompt += count
            attend += count * chunk.start + count * (count + 1) // 2
        else:
            decode += 1
            read += chunk.start + count
    return Work(1, prompt, attend, decode, read)


def fit(works: Sequence[Work], seconds: Sequence[float]) -> tuple[StepCosts, float]:
    """The terms >= 0 with the least squared error, relative to what they predict, and the median of |relative error|.

    Relative to what was measured, steps that a disturbance made longer would count less than those it made shorter.
    Raises ConfigError if there are fewer measurements than terms.
    """
    if len(works) < len(Work._fields):
        raise ConfigError(f"{len(works)} measurements of steps, too few for {len(Work._fields)} terms")
    rows, times = np.array(works, np.float64), np.array(seconds)
    predicted, kept = times, np.arange(len(times))
    for _ in range(ROUNDS):
        terms = _least(rows[kept] / predicted[kept, None], times[kept] / predicted[kept])
        predicted = np.maximum(rows @ terms, times.min())
        kept = np.argsort(np.abs(np.log(times / predicted)))[: len(times) - int(TRIMMED * len(times))]
    return StepCosts(*terms.tolist()), float(np.median(np.abs(predicted / times - 1)))


def _least(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The terms >= 0 with the least |rows @ terms - values|: the best of the solutions of all subsets of the terms."""
    best, least = np.zeros(rows.shape[1]), np.inf
    columns = range(rows.shape[1])
    for subset in itertools.chain.from_iterable(itertools.combinations(columns, n + 1) for n in columns):
        part = rows[:, subset]
        scale = np.maximum(part.max(axis=0), 1e-300)
        found = np.linalg.lstsq(part / scale, values, rcond=None)[0] / scale
        error = float(np.square(part @ found - values).sum())
        if error < least and (found >= 0).all():
            best, least = np.zeros(rows.shape[1]), error
            best[list(subset)] = found
    return best


def read_costs(path: Path) -> CostFile:
    """Raises ConfigError for a file that `lmkit advise --model` has not written."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=CostFile)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; measure it with --model MODEL") from None
    except JSON_ERRORS as error:
        raise ConfigError(f"{path}: no costs of `lmkit advise --model`: {error}") from None
    if found.schema != SCHEMA or not found.types:
        raise ConfigError(f"{path}: schema is {found.schema!r}, expected {SCHEMA!r}; measure it with --model MODEL")
    return found


def write_costs(path: Path, costs: CostFile) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(costs)) + b"\n")
