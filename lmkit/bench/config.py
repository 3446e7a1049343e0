"""The common configuration of the benchmarks. It imports little, because the command line imports it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from lmkit.config import PositiveInt, StrictStruct
from lmkit.errors import ConfigError

N = TypeVar("N", int, float)
Progress = Callable[[str, int, int], None]  # the current work, the amount done, the total
Endpoint = Literal["chat", "completions"]

GOODPUT_NAMES = ("ttft", "tpot", "e2e")
DEFAULT_OUTPUT_LEN = 128
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class WorkloadConfig(StrictStruct, frozen=True):
    """The prompts of a benchmark."""

    num_prompts: PositiveInt = 100  # conversations
    dataset: str | None = None  # a file; None = random text
    input_len: PositiveInt = 256  # tokens of a random prompt, without the shared prefix
    output_len: PositiveInt | None = None  # None = the data set's, else DEFAULT_OUTPUT_LEN
    range_ratio: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0  # lengths are uniform in mean * (1 -+ ratio)
    num_prefixes: NonNegativeInt = 0  # different beginnings that random prompts share
    prefix_len: NonNegativeInt = 0  # tokens of such a beginning
    turns: PositiveInt = 1  # turns of a conversation; those of a data set may have fewer
    seed: NonNegativeInt = 0


class OnlineConfig(StrictStruct, frozen=True):
    """The server and the loads of an online benchmark: every rate with every concurrency."""

    url: str
    endpoint: Endpoint = "chat"
    model: str | None = None  # None = the only one that the server lists
    tokenizer: str | None = None  # a folder or a Hub name; None = `model`, if that is a folder here or "demo"
    rates: tuple[Positive | None, ...] = (None,)  # conversations per second; None = as soon as the limit allows
    concurrencies: tuple[PositiveInt | None, ...] = (None,)  # conversations at once; None = no limit
    burstiness: Positive = 1.0
    duration: Positive | None = None
    ramp: Seconds = 0.0
    think: Seconds = 0.0
    warmup: NonNegativeInt = 1
    timeout: Positive = 600.0
    ignore_eos: bool = True
    extra_body: dict[str, Any] = {}


def parse_goodput(text: str) -> dict[str, float]:
    """`ttft:500,tpot:50` -> {"ttft": 500.0, "tpot": 50.0}, in ms. Raises ConfigError."""
    targets: dict[str, float] = {}
    for part in text.split(","):
        name, colon, value = part.strip().partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if not colon or name not in GOODPUT_NAMES or name in targets or not 0 < limit < math.inf:
            names = ", ".join(GOODPUT_NAMES)
            raise ConfigError(f"--goodput {part.strip()!r}: write for example ttft:500,tpot:50 (of {names}, in ms)")
        targets[name] = limit
    return targets


def parse_list(text: str, kind: type[N], option: str) -> list[N]:
    """`1,4,16` or `0.5,2,inf` (of floats) -> numbers above zero. Raises ConfigError."""
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(value > 0 for value in values):
        example = "1,4,16" if kind is int else "0.5,2,inf"
        raise ConfigError(f"{option} {text!r}: write numbers above zero, for example {example}")
    return values
