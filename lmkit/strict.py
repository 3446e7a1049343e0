"""Strict models of requests: an unknown field is an error. A field of another server must ask for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from lmkit import neutral
from lmkit.errors import RequestError
from lmkit.other_names import HTTP, hint

M = TypeVar("M", bound=BaseModel)


def _boolean(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError("expected a boolean")
    return value


# pydantic takes 0 for Literal[False]
No = Annotated[Literal[False], BeforeValidator(_boolean)]
Yes = Annotated[Literal[True], BeforeValidator(_boolean)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    # Fields of others, with their values that ask for nothing. An entry does not count for a model with such a field.
    absent: ClassVar[Mapping[str, neutral.Values]] = {}

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, data: Any) -> Any:
        """Refuse the first unknown field.

        This runs before pydantic, which would report each of a million unknown fields.
        """
        if not isinstance(data, dict):
            return data
        absent = (data.keys() & cls.absent.keys()) - cls.model_fields.keys()
        data = _drop_neutral(data, {name: cls.absent[name] for name in absent})
        unknown = next((name for name in data if name not in cls.model_fields), None)
        if unknown is not None:
            name = unknown[:64]
            advice = hint(name, HTTP, cls.model_fields)
            raise RequestError("unknown_parameter", f"unknown parameter {name!r}{advice}", name)
        return data


# The validators of APIs that not every server's clients use are built by the first request, and not at the start.
LAZY = ConfigDict(defer_build=True)


class Nullable(Strict):
    """A null is a field that is not set. Clients send an answer's parts back with all of their fields."""

    model_config = LAZY

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


def _drop_neutral(data: dict[str, Any], absent: Mapping[str, neutral.Values]) -> dict[str, Any]:
    """`data` without the fields that ask for nothing. Raises RequestError if a field of `absent` asks for something."""
    for name in data:
        if name in absent and not neutral.is_neutral(data[name], absent[name]):
            message = f"{name} is not supported by this server{hint(name, HTTP)}"
            raise RequestError("unsupported_parameter", message, name)
    return {name: value for name, value in data.items()
            if name not in absent and not neutral.is_neutral(value, neutral.UNSET.get(name, ()))}  # fmt: skip


def validate(data: Any, model: type[M]) -> M:
    """Plain JSON data as a request. Raises RequestError naming the first field at fault."""
    if not isinstance(data, dict):
        raise RequestError("invalid_request", "the body must be a JSON object")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        first = min(errors, key=lambda one: one["loc"][:1] != ("model",))  # which a proxy looks at first
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:64]}" for part in first["loc"]).lstrip(".")
        message = f"{where}: {first['msg'].removeprefix('Value error, ')}"
        raise RequestError("invalid_request", message, str(first["loc"][0]) if first["loc"] else None) from None
