"""Rules of the configuration: what a request looks like, and how it is routed then. There is no I/O here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated

import msgspec

from lmkit.config import PolicyName, StrictStruct

ModelName = Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
Tag = Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[A-Za-z0-9._:-]+$")]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Request(msgspec.Struct, frozen=True):
    """What rules see of a request."""

    model: str
    headers: Mapping[str, str]  # names in lower case
    key: str  # the id of its key; "" without one
    tokens: int  # of its prompt, about
    priority: int


class When(StrictStruct, frozen=True):
    """All that is given must hold."""

    model: ModelName | tuple[ModelName, ...] | None = None
    header: dict[str, str] | None = None  # each name with its value; * stands for any text
    key: str | tuple[str, ...] | None = None  # ids of keys, as the access log shows them
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None  # of the prompt, about
    max_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    min_priority: int | None = None
    max_priority: int | None = None

    def holds(self, request: Request) -> bool:
        return (
            _among(request.model, self.model)
            and _among(request.key, self.key)
            and all(
                fnmatchcase(request.headers.get(name.lower(), ""), value) for name, value in (self.header or {}).items()
            )
            and (self.min_tokens or 0) <= request.tokens
            and (self.max_tokens is None or request.tokens <= self.max_tokens)
            and (self.min_priority is None or request.priority >= self.min_priority)
            and (self.max_priority is None or request.priority <= self.max_priority)
        )


class Target(StrictStruct, frozen=True):
    """A model, and its share of the requests of a rule."""

    model: ModelName
    weight: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0


class Shadow(StrictStruct, frozen=True):
    """A model that gets copies of requests. Nobody gets its answers."""

    model: ModelName
    share: Share = 1.0


class Rule(StrictStruct, frozen=True):
    """How requests are routed that `when` describes."""

    name: Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[\x21-\x7e]+( [\x21-\x7e]+)*$")]
    when: When = When()
    to: tuple[Target, ...] = ()  # empty = the model that the request names
    nodes: tuple[Tag, ...] = ()  # only nodes that have one of these tags; empty = all
    policy: PolicyName | None = None
    fallback: tuple[ModelName, ...] = ()  # models for a request that no node can answer now
    shadow: Shadow | None = None


def first_match(rules: Sequence[Rule], request: Request) -> Rule | None:
    return next((rule for rule in rules if rule.when.holds(request)), None)


def drawn(targets: Sequence[Target], point: float) -> str:
    """The model at `point`, from 0 to 1, of all weights in a row."""
    left = point * sum(target.weight for target in targets)
    for target in targets:
        left -= target.weight
        if left < 0:
            return target.model
    return targets[-1].model


def mistake(rules: Sequence[Rule], aliases: Mapping[str, str]) -> str:
    """Why rules and aliases cannot be used together, or an empty text."""
    names = [rule.name for rule in rules]
    if twice := [name for name in names if names.count(name) > 1]:
        return f"two rules have the name {twice[0]!r}"
    if chain := [alias for alias, model in aliases.items() if model in aliases]:
        return f"alias {chain[0]!r} leads to another alias; name the model itself"
    return ""


def _among(value: str, wanted: str | Sequence[str] | None) -> bool:
    return wanted is None or value == wanted or (not isinstance(wanted, str) and value in wanted)
