"""Rules of the configuration: what a request looks like, and how it is routed then. There is no I/O here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated

import msgspec

from lmkit.config import PolicyName, StrictStruct
from lmkit.option import Note

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

    model: Annotated[
        ModelName | tuple[ModelName, ...] | None,
        Note("The request names this model, or one of the list. Aliases are replaced before."),
    ] = None
    header: Annotated[dict[str, str] | None, Note("Each header has its value; * stands for any text.")] = None
    key: Annotated[
        str | tuple[str, ...] | None,
        Note("The client's key has this id, or one of the list. The access log shows the ids."),
    ] = None
    min_tokens: Annotated[
        Annotated[int, msgspec.Meta(ge=0)] | None, Note("The prompt has about so many tokens or more.")
    ] = None
    max_tokens: Annotated[
        Annotated[int, msgspec.Meta(ge=0)] | None, Note("The prompt has about so many tokens at most.")
    ] = None
    min_priority: Annotated[int | None, Note("The request's priority, 0 without one, is so much or more.")] = None
    max_priority: Annotated[int | None, Note("It is so much at most.")] = None

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

    model: Annotated[ModelName, Note("A model.")]
    weight: Annotated[float, msgspec.Meta(gt=0, le=1000), Note("Its share of the requests.")] = 1.0


class Shadow(StrictStruct, frozen=True):
    """A model that gets copies of requests. Nobody gets its answers."""

    model: Annotated[ModelName, Note("The model that gets copies. Its answers are dropped.")]
    share: Annotated[Share, Note("The share of requests that are copied.")] = 1.0


class Rule(StrictStruct, frozen=True):
    """How requests are routed that `when` describes."""

    name: Annotated[
        str, msgspec.Meta(max_length=64, pattern=r"^[\x21-\x7e]+( [\x21-\x7e]+)*$"), Note("What logs call it.")
    ]
    when: Annotated[When, Note("What requests it is for. Default: all.")] = When()
    to: Annotated[
        tuple[Target, ...],
        Note("One of these models gets the request, drawn by weight. Default: the one that it names."),
    ] = ()
    nodes: Annotated[tuple[Tag, ...], Note("Only nodes with one of these tags get it.")] = ()
    policy: Annotated[PolicyName | None, Note("It is routed by this policy.")] = None
    fallback: Annotated[
        tuple[ModelName, ...], Note("Models for a request that no node of the first can answer now.")
    ] = ()
    shadow: Annotated[Shadow | None, Note("A model that gets copies.")] = None


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
