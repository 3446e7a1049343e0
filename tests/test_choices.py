"""An error about a wrong choice lists the choices."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Literal

import msgspec
import pytest

from lmkit.config import parse
from lmkit.errors import ConfigError


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Inner(msgspec.Struct):
    mode: Literal["slow", "fast"] | None = None
    colour: Colour = Colour.RED


class Outer(msgspec.Struct):
    level: Annotated[Literal[1, 2], msgspec.Meta(description="of detail")] = 1
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    pair: tuple[Inner, Inner] | None = None
    named: dict[str, Inner] = {}
    number: int = 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"level": 3}, "file: Invalid enum value 3 - at `$.level`; expected 1, 2"),
        ({"inner": {"mode": "x"}}, "file: Invalid enum value 'x' - at `$.inner.mode`; expected fast, slow"),
        ({"many": [{}, {"mode": "x"}]}, "file: Invalid enum value 'x' - at `$.many[1].mode`; expected fast, slow"),
        ({"named": {"a": {"mode": "x"}}}, "file: Invalid enum value 'x' - at `$.named[...].mode`; expected fast, slow"),
        ({"inner": {"colour": "x"}}, "file: Invalid enum value 'x' - at `$.inner.colour`; expected red, blue"),
        ({"pair": [{}, {"mode": "x"}]}, "file: Invalid enum value 'x' - at `$.pair[1].mode`; expected fast, slow"),
        ({"number": "x"}, "file: Expected `int`, got `str` - at `$.number`"),
    ],
)
def test_a_wrong_choice_lists_the_choices(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(data, Outer, "file")
    assert str(caught.value) == message


def test_a_value_without_a_place() -> None:
    with pytest.raises(ConfigError, match=r"^--mode: Invalid enum value 'x'; expected fast, slow$"):
        parse("x", Literal["slow", "fast"], "--mode")
