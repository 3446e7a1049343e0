"""Numbers of requests. /openapi.json has their limits, which SamplingParams.validate checks."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema

from lmkit.formats.generation_config import TOP_K_OFF
from lmkit.strict import OF_MODEL
from lmkit.turbo.request import MAX_LOGIT_BIAS

MAX_NAMED = 4  # mistakes that an error names
TOKEN_ID = "^[0-9]{1,10}$"


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
TokenId = Annotated[int, Field(ge=0), WithJsonSchema({"type": "integer", "minimum": 0, OF_MODEL: "token"})]
Repetition = Annotated[float, _within(1e-7, 100)]
TopK = Annotated[
    int, AfterValidator(_top_k), WithJsonSchema({"type": "integer", "minimum": TOP_K_OFF[0], "maximum": (1 << 31) - 1})
]


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"expected an object of at most {MAX_LOGIT_BIAS} token ids")
    wrong = [key for key, bias in value.items()
             if not re.fullmatch(TOKEN_ID, key) or type(bias) not in (int, float)]  # fmt: skip
    if wrong:
        named = ", ".join(repr(key[:64]) for key in wrong[:MAX_NAMED])
        raise ValueError(f"expected token ids with numbers; these are not: {named}")
    return {int(key): float(bias) for key, bias in value.items()}


_BIAS = {"type": "number", "minimum": -100, "maximum": 100}
_BIASES = {
    "type": "object",
    "patternProperties": {TOKEN_ID: _BIAS},
    "additionalProperties": False,
    "maxProperties": MAX_LOGIT_BIAS,
}
Biases = Annotated[dict[int, float], PlainValidator(_biases), WithJsonSchema(_BIASES)]  # JSON has the ids as strings
