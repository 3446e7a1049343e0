"""What a change of a model means for its answers, in figures and examples that need no statistics to be read.

An answer is so many tokens in a row of the text, and unchanged if both models take the same most likely token at each
of them. An example is a place where they do not: the text before it, and the token that each model goes on with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from lmkit.config import StrictStruct

LENGTH = 16  # tokens of an answer
EXAMPLES = 5
Decode = Callable[[list[int]], str]
BEFORE = 24  # tokens of the text that an example shows


class Example(StrictStruct, frozen=True):
    """A place where the models differ: the text until there, and the token that each goes on with. `certainty` is the
    probability that the reference gave its token."""

    before: str
    reference: str
    model: str
    certainty: float


class Answers(StrictStruct, frozen=True):
    """`unchanged` is the share of answers of `length` tokens without a change, of `count` of them. The examples are
    the changes at which the reference was most certain."""

    unchanged: float
    count: int
    length: int
    examples: tuple[Example, ...]


class Choices(NamedTuple):
    """The most likely tokens of a window at each of its predictions, int64 [n], and the reference's certainty [n]."""

    window: Sequence[int]
    reference: Tensor
    model: Tensor
    certainty: Tensor


def compare(choices: Sequence[Choices], decode: Decode | None = None) -> Answers:
    """The answers of windows. `decode` gives the text of tokens; without it there are no examples."""
    changed = [window.reference != window.model for window in choices]
    runs = [run for each in changed for run in each.split(LENGTH) if len(run) == LENGTH] or [torch.cat(changed)]
    places = [
        (float(window.certainty[place]), number, int(place))
        for number, (window, differs) in enumerate(zip(choices, changed, strict=True))
        for place in differs.nonzero()[:, 0]
    ]
    worst = [] if decode is None else [(decode, choices[n], at) for _, n, at in sorted(places, reverse=True)[:EXAMPLES]]
    return Answers(
        unchanged=sum(not bool(run.any()) for run in runs) / len(runs),
        count=len(runs),
        length=len(runs[0]),
        examples=tuple(_example(*each) for each in worst),
    )


def _example(decode: Decode, choices: Choices, place: int) -> Example:
    before = list(choices.window[max(0, place + 1 - BEFORE) : place + 1])

    def said(tokens: Tensor) -> str:
        text, start = decode([*before, int(tokens[place])]), decode(before)
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, start, strict=False)))
        return text[alike:]  # a token may end a character that `start` has in part

    return Example(
        before=decode(before),
        reference=said(choices.reference),
        model=said(choices.model),
        certainty=float(choices.certainty[place]),
    )
