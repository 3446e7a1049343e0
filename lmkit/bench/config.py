"""The common configuration of the benchmarks. It imports little, because the command line imports it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from lmkit.config import PositiveInt, StrictStruct
from lmkit.errors import ConfigError
from lmkit.option import Option

N = TypeVar("N", int, float)
Progress = Callable[[str, int, int], None]  # the current work, the amount done, the total
Endpoint = Literal["chat", "completions"]

GOODPUT_NAMES = ("ttft", "tpot", "e2e")
DEFAULT_OUTPUT_LEN = 128
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
_server = functools.partial(Option, group="Server")
_load = functools.partial(Option, group="Load")


class WorkloadConfig(StrictStruct, frozen=True):
    """The prompts of a benchmark."""

    num_prompts: Annotated[PositiveInt, Option("Conversations.")] = 100
    dataset: Annotated[
        str | None, Option("ShareGPT JSON, or JSON lines with prompt or messages. Default: random text.")
    ] = None
    input_len: Annotated[PositiveInt, Option("Tokens of a random prompt, and of each later turn.")] = 256
    output_len: Annotated[PositiveInt | None, Option("Tokens of an answer. Default: the data set's, or 128.")] = None
    range_ratio: Annotated[
        float, msgspec.Meta(ge=0, lt=1), Option("Random lengths are uniform in LEN * (1 -+ RATIO).")
    ] = 0.0
    num_prefixes: Annotated[NonNegativeInt, Option("Random prompts begin with one of this many shared texts.")] = 0
    prefix_len: Annotated[NonNegativeInt, Option("Tokens of a shared text; the rest of the prompt follows it.")] = 0
    turns: Annotated[PositiveInt, Option("Turns of a conversation; each contains all earlier ones.")] = 1
    seed: Annotated[NonNegativeInt, Option("Seed of prompts and arrivals.")] = 0


class OnlineConfig(StrictStruct, frozen=True):
    """The server and the loads of an online benchmark: every rate with every concurrency."""

    url: str
    endpoint: Annotated[Endpoint, _server("The API that is called.")] = "chat"
    model: Annotated[str | None, _server("Default: the only one that the server lists.")] = None
    tokenizer: Annotated[
        str | None,
        _server("For random prompts: the model's folder or Hub name. Default: the model, if here."),
    ] = None
    timeout: Annotated[Positive, _server("Seconds for a whole answer.")] = 600.0
    ignore_eos: Annotated[bool, _server("Answers of exactly the given length, if the server can.")] = True
    rates: tuple[Positive | None, ...] = (None,)  # conversations per second; None = as soon as the limit allows
    concurrencies: tuple[PositiveInt | None, ...] = (None,)  # conversations at once; None = no limit
    burstiness: Annotated[Positive, _load("Shape of arrivals: 1 Poisson, below in bursts, above even.")] = 1.0
    duration: Annotated[Positive | None, _load("Send for this many seconds, with prompts used again.")] = None
    ramp: Annotated[Seconds, _load("Seconds in which the load rises; they are not measured.")] = 0.0
    think: Annotated[Seconds, _load("Seconds between an answer and the next turn.")] = 0.0
    warmup: Annotated[NonNegativeInt, _load("Conversations before each run that are not measured.")] = 1
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
