"""Models of requests. A field that is not theirs is an error, or a hint that is left out (`lmkit.hints`).

A field of another server that would change the answer must ask for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)

from lmkit import neutral
from lmkit.errors import RequestError
from lmkit.hints import ignore
from lmkit.other_names import hint, is_misspelt, names
from lmkit.whole import whole

M = TypeVar("M", bound=BaseModel)
Schema = dict[str, Any]
NULL: Schema = {"type": "null"}
GIVEN: Schema = {"not": NULL}
NEVER: Schema = {"not": {}}
OF_MODEL = "x-of-model"  # a mark in a schema: a model limits it further, see serve.openapi_model


def given(*names: str, **properties: Schema) -> Schema:
    """The schema of objects in which these fields stand and are not null, and others are as `properties` says."""
    return {"required": list(names), "properties": dict.fromkeys(names, GIVEN) | properties}


def exactly_one(*names: str) -> Schema:
    """One of these fields is given."""
    return {"anyOf": [given(name, **{other: NULL for other in names if other != name}) for name in names]}


def goes_with(name: str, other: Schema, nothing: tuple[Any, ...] = (None,)) -> Schema:
    """A field asks for nothing, or the object is as `other` says."""
    return {"anyOf": [{"properties": {name: {"enum": list(nothing)}}}, other]}


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
    aliases: ClassVar[Mapping[str, str]] = {}  # other servers' names of fields -> ours
    takes_hints: ClassVar[bool] = True  # False: of our own commands, in which every field counts
    # Conditions between fields, for /openapi.json. Validators check them.
    conditions: ClassVar[tuple[Schema, ...]] = ()

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> Schema:
        schema = handler.resolve_ref_schema(handler(core_schema))
        for name, field in schema.get("properties", {}).items():
            if unset := [value for value in cls._unset(name) if name not in schema.get("required", ())]:
                schema["properties"][name] = {"anyOf": [*field.pop("anyOf", [field]), {"enum": unset}]}
        if cls.takes_hints:
            schema.pop("additionalProperties", None)
        if cls.conditions:
            schema["allOf"] = list(cls.conditions)
        return schema

    @classmethod
    def _unset(cls, name: str) -> neutral.Values:
        """Values with which a field that lmkit has is as if it were not there."""
        return neutral.UNSET.get(name, ())

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, data: Any) -> Any:
        """Our fields alone. Raises RequestError for the first field that is neither ours nor a hint.

        This runs before pydantic, which would report each of a million unknown fields.
        """
        if not isinstance(data, dict):
            return data
        data = _own_names(data, cls.aliases)
        absent = (data.keys() & cls.absent.keys()) - cls.model_fields.keys()
        data = _drop_neutral(data, {name: cls.absent[name] for name in absent})
        unknown = [name for name in data if name not in cls.model_fields]
        for name in unknown:
            _leave_out(name, cls.model_fields, cls.takes_hints)
        return {name: value for name, value in data.items() if name in cls.model_fields} if unknown else data


def _own_names(data: dict[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """`data` with our names of its fields. Raises RequestError if a field has two values."""
    for name in data.keys() & aliases.keys():
        own, value = aliases[name], data[name]
        if data.get(own) is not None and data[own] != value:
            raise RequestError("invalid_request", f"{own} and {name} differ; send one of them", name)
        data = {other: data[other] for other in data if other != name} | ({own: value} if value is not None else {})
    return data


def _leave_out(name: str, ours: Mapping[str, Any], takes_hints: bool) -> None:
    """Note a hint. Raises RequestError for a field that means one of ours, and where every field counts."""
    if not takes_hints or name in names("request") or is_misspelt(name, ours) or not ignore(name):
        name = name[:64]
        raise RequestError("unknown_parameter", f"unknown parameter {name!r}{hint(name, ours, 'request')}", name)


# The validators of APIs that not every server's clients use are built by the first request, and not at the start.
LAZY = ConfigDict(defer_build=True)


class Nullable(Strict):
    """A null is a field that is not set. Clients send an answer's parts back with all of their fields."""

    model_config = LAZY

    @classmethod
    def _unset(cls, name: str) -> neutral.Values:
        return (None, *super()._unset(name))

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = cls.model_fields.keys() | cls.absent.keys()
        return {name: value for name, value in data.items() if value is not None or name not in known}


def _drop_neutral(data: dict[str, Any], absent: Mapping[str, neutral.Values]) -> dict[str, Any]:
    """`data` without the fields that ask for nothing, and without hints. Raises RequestError for a field of `absent`
    that asks for something."""
    for name in data:
        if name not in absent or neutral.is_neutral(data[name], absent[name]):
            continue
        if name not in neutral.HINTS or not ignore(name):
            message = f"{name} is not supported by this server{hint(name, table='request')}"
            raise RequestError("unsupported_parameter", message, name)
    return {name: value for name, value in data.items()
            if name not in absent and not neutral.is_neutral(value, neutral.UNSET.get(name, ()))}  # fmt: skip


def _whole_numbers(value: Any, depth: int) -> Any:
    """`value` with 2.0 as 2, which JSON Schema and clients without integers hold for the same; itself if it has none.

    Deeper than `depth` nothing changes.
    """
    if isinstance(value, float):
        return value if (number := whole(value)) is None else number
    if not isinstance(value, list | dict) or not depth:
        return value
    before = list(value) if isinstance(value, list) else list(value.values())
    after = [_whole_numbers(item, depth - 1) for item in before]
    if all(old is new for old, new in zip(before, after, strict=True)):
        return value
    return after if isinstance(value, list) else dict(zip(value, after, strict=True))


def validate(data: Any, model: type[M]) -> M:
    """Plain JSON data as a request. Raises RequestError naming the first field at fault."""
    if not isinstance(data, dict):
        raise RequestError("invalid_request", "the body must be a JSON object")
    try:
        try:
            return model.model_validate(data)
        except ValidationError:
            if (again := _whole_numbers(data, 8)) is data:
                raise
            return model.model_validate(again)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        first = min(errors, key=lambda one: one["loc"][:1] != ("model",))  # which a proxy looks at first
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:64]}" for part in first["loc"]).lstrip(".")
        message = f"{where}: {first['msg'].removeprefix('Value error, ')}"
        raise RequestError("invalid_request", message, str(first["loc"][0]) if first["loc"] else None) from None
