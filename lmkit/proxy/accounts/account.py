"""Keys, teams, their limits, and prices. Plain data.

A limit is `tokens/day: 100000`: what, in which period, and how much. Money is counted in whole units of 10^-11, so sums
are exact in any order.
"""

from __future__ import annotations

import calendar
import math
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from lmkit.config import StrictStruct
from lmkit.option import Note

Period = Literal["day", "week", "month", "total"]
PERIODS: tuple[Period, ...] = ("day", "week", "month", "total")
KINDS = ("requests", "tokens", "money")
UNIT = 10**11  # of money
MINUTE = {f"{kind}/minute" for kind in KINDS[:2]}
LIMITS = (*sorted(MINUTE), *(f"{kind}/{period}" for kind in KINDS for period in PERIODS))
MOST = 1 << 40
BIGGEST = 1_000_000  # of money; ninety times this still fits an integer of 64 bits

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._@-]*$")]
Models = Annotated[tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=256)], ...], msgspec.Meta(max_length=100)]
PricePerMillion = Annotated[float, msgspec.Meta(ge=0, le=BIGGEST)]


class Price(StrictStruct, frozen=True):
    """What a million tokens of a model cost."""

    input: Annotated[PricePerMillion, Note("Of prompts.")] = 0.0
    cached_input: Annotated[PricePerMillion | None, Note("Of prompts, found in a cache. Default: `input`.")] = None
    output: Annotated[PricePerMillion, Note("Of answers.")] = 0.0

    def of(self, usage: Usage) -> int:
        """In units of 10^-11."""
        cached = self.input if self.cached_input is None else self.cached_input
        rates = (self.input, cached, self.output)
        counts = (usage.input - usage.cached, usage.cached, usage.output)
        return sum(_units(rate) * count for rate, count in zip(rates, counts, strict=True))

    def answer_tokens(self, money: int, prompt: int) -> float:
        """How many tokens of answers so much money is left for, after a prompt of so many."""
        left, rate = money - max(self.of(Usage(prompt)), self.of(Usage(prompt, prompt))), _units(self.output)
        return left // rate if rate else math.inf


def _units(rate: float) -> int:
    """Of one token, for the price of a million."""
    return round(rate * (UNIT // 1_000_000))


class Sizes(NamedTuple):
    """What the nodes of a model tell of it, in tokens. None = not known."""

    context: int | None = None  # the longest
    template: int | None = None  # that its chat template adds to a message


class Usage(NamedTuple):
    """Tokens of one request. `cached` are a part of `input`."""

    input: int = 0
    cached: int = 0
    output: int = 0

    @property
    def tokens(self) -> int:
        return self.input + self.output


class Amount(NamedTuple):
    """What counts against limits. The names are those of KINDS."""

    requests: int = 0
    tokens: int = 0
    money: int = 0

    def plus(self, other: Amount, sign: int = 1) -> Amount:
        return Amount(*(a + sign * b for a, b in zip(self, other, strict=True)))


def reserved(most: Usage, price: Price | None) -> Amount:
    """What is held for a request that uses `most` at most. Any part of its prompt may be found in a cache."""
    money = max(price.of(most), price.of(most._replace(cached=most.input))) if price else 0
    return Amount(1, most.tokens, money)


class Rules(StrictStruct, frozen=True, kw_only=True):
    """What a key or a team may use. Raises ValueError for a limit that is none."""

    limits: dict[str, int | float] = {}
    models: Models = ()  # empty = all; `qwen*` allows each that begins so

    def __post_init__(self) -> None:
        for name, value in self.limits.items():
            if name not in LIMITS:
                raise ValueError(f"{name!r} is no limit; the limits are {', '.join(LIMITS)}")
            most, least = (BIGGEST, 0) if name.startswith("money") else (MOST, int(name in MINUTE))
            if not least <= value <= most or (most == MOST and value != int(value)):
                kind = "a number" if most == BIGGEST else "a whole number"
                raise ValueError(f"{name}={value}: expected {kind} from {least} to {most}")

    def allows(self, model: str) -> bool:
        return not self.models or any(
            model == name or (name.endswith("*") and model.startswith(name[:-1])) for name in self.models
        )


class Team(Rules, frozen=True, kw_only=True):
    name: Name


class Key(Rules, frozen=True, kw_only=True):
    """One key. The text that a client sends is not in it; the store has its digest."""

    id: str
    name: Name
    team: Name | None = None
    min_priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] = 0  # the soonest that its requests may have
    expires: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    created: datetime | None = None
    revoked: bool = False


def exact(kind: str, value: int | float) -> int:
    """A limit's value in the units in which it is counted."""
    return round(value * UNIT) if kind == "money" else int(value)


def shown(kind: str, value: int) -> str:
    return f"{value / UNIT:.6f}".rstrip("0").rstrip(".") if kind == "money" else str(value)


def start_of(period: Period, today: date) -> date:
    """The first day of the period that `today` is in. All days are those of UTC."""
    match period:
        case "day":
            return today
        case "week":
            return today - timedelta(days=today.weekday())
        case "month":
            return today.replace(day=1)
        case "total":
            return date.min


def end_of(period: Period, today: date) -> date | None:
    """The day on which the period's counters begin anew. None: never."""
    if period == "total":
        return None
    days = {"day": 1, "week": 7, "month": calendar.monthrange(today.year, today.month)[1]}[period]
    return start_of(period, today) + timedelta(days=days)


def seconds_until(end: date, now: datetime) -> int:
    return int((datetime(end.year, end.month, end.day, tzinfo=UTC) - now).total_seconds()) + 1


def changed(account: Any, changes: dict[str, Any], fixed: Iterable[str] = ()) -> Any:
    """A copy with other values; null in `limits` takes a limit away. Raises ValueError."""
    if wrong := sorted(set(changes) & set(fixed)):
        raise ValueError(f"{wrong[0]} cannot be changed")
    fields = msgspec.to_builtins(account)
    if isinstance(changes.get("limits"), dict):
        merged = {**fields["limits"], **changes["limits"]}
        changes = {**changes, "limits": {name: value for name, value in merged.items() if value is not None}}
    return msgspec.convert({**fields, **changes}, type(account))
