"""Numbers of requests. /openapi.json has their limits, which SamplingParams.validate checks."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, WithJsonSchema

from lmkit.formats.generation_config import TOP_K_OFF


def _top_k(value: int) -> int:
    """`value` as lmkit has it. "Off" is a choice, so a checkpoint's default does not replace it."""
    theirs, ours = TOP_K_OFF
    return ours if value == theirs else value


def _within(least: float | None, most: float | None = None, above: float | None = None) -> WithJsonSchema:
    """The schema of a number whose limits SamplingParams.validate checks."""
    limits = {"minimum": least, "maximum": most, "exclusiveMinimum": above}
    return WithJsonSchema({"type": "number"} | {name: limit for name, limit in limits.items() if limit is not None})


Penalty = Annotated[float, _within(-100, 100)]
Share = Annotated[float, _within(0, 1)]
TopP = Annotated[float, _within(None, 1, above=0)]
Temperature = Annotated[float, _within(0, 100)]
TokenId = Annotated[int, Field(ge=0)]
Repetition = Annotated[float, _within(0.01, 100)]
TopK = Annotated[
    int, AfterValidator(_top_k), WithJsonSchema({"type": "integer", "minimum": TOP_K_OFF[0], "maximum": (1 << 31) - 1})
]
