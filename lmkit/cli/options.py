"""Options of commands: made from the fields of a configuration, and shared by several commands as one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import typer

from lmkit.cli.settings import origin
from lmkit.config import StrictStruct, parse, parse_seconds, parse_size
from lmkit.errors import ConfigError
from lmkit.option import Option, kinds, options_of

Maker = Callable[..., Any]
Config = type[StrictStruct]
NUMBERS = (int, float, int | None, float | None)
_UNITS = (("G", 30), ("M", 20), ("K", 10), ("", 0))


def takes(**makers: Maker) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator for a command: `makers[name]` makes its parameter `name` from options that the user sees."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in _parameters(command) if p.name not in makers]
        shared = {name: _parameters(maker) for name, maker in makers.items()}

        def run(**given: Any) -> None:
            made = {
                name: makers[name](**{p.name: given.pop(p.name, p.default) for p in ps}) for name, ps in shared.items()
            }
            command(**given, **made)

        every = [*own, *(p for parameters in shared.values() for p in parameters)]
        run.__signature__ = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in every])  # type: ignore[attr-defined]
        run.__annotations__ = {}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _parameters(function: Maker) -> list[inspect.Parameter]:
    return list(inspect.signature(function, eval_str=True).parameters.values())


def fields_of(
    config: Config, *only: str, group: str = "", is_partial: bool = False, shows_defaults: bool = True
) -> Maker:
    """A maker of the fields of `config` that are options, or of `only` these, as {field: value}.

    `group` is the heading of `only` these, else of options that name none. With `is_partial` an option that is not
    given has no value: something else, such as a file, has the default. The help shows the struct's unless that may be
    another one.
    """
    found = {field: option for field, option in options_of(config).items() if not only or field in only}
    names = {option.name or field: field for field, option in found.items()}
    headed = {field: group if only else option.group or group for field, option in found.items()}

    def made(**given: Any) -> dict[str, Any]:
        return {names[name]: value for name, value in given.items() if not (is_partial and value in (None, ()))}

    defaults = {field.name: field.default for field in msgspec.structs.fields(config)}
    parameters = []
    for field, option in found.items():
        option = option._replace(group=headed[field])
        if is_partial and shows_defaults and not option.is_switch and defaults[field] not in (None, (), ""):
            option = option._replace(help=f"{option.help} Default: {_shown(defaults[field])}.")
        parameters.append(_parameter(config, field, option, defaults[field], is_partial))
    made.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return made


def sections_of(top: Maker, **sections: Maker) -> Maker:
    """A maker of the values of `top` and of {section: its values}. An option belongs to one of them."""
    names = {name: [p.name for p in _parameters(maker)] for name, maker in sections.items()}

    def made(**given: Any) -> dict[str, Any]:
        parts = {
            name: maker(**{option: given.pop(option) for option in names[name]}) for name, maker in sections.items()
        }
        return {**top(**given), **parts}

    every = [p for maker in (top, *sections.values()) for p in _parameters(maker)]
    made.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    return made


def struct_of(config: Config, where: str, group: str = "") -> Maker:
    """A maker of `config` from its fields that are options. `where` begins the text of a ConfigError."""
    fields = fields_of(config, group=group)

    def made(**given: Any) -> Any:
        return parse(fields(**given), config, where)

    made.__signature__ = inspect.signature(fields)  # type: ignore[attr-defined]
    return made


def _parameter(config: Config, field: str, option: Option, default: Any, is_partial: bool) -> inspect.Parameter:
    """The parameter of a command that is the option of a field, as typer wants it."""
    kind, name = kinds(config)[field], option.name or field
    if option.is_size:
        kind, default = str if default is not None else str | None, default and size_text(default)
    elif option.is_time:
        kind = str | None
    elif choices := _choices(kind):
        kind = Literal[tuple(choices)]
    elif kind == tuple[str, ...]:
        kind, default = list[str], list(default)
    words = []
    if kind is bool:
        word = name.replace("_", "-")
        words = [f"--{word}" if option.is_switch else f"--{word}/--no-{word}"]
    if is_partial and default not in (None, [], ""):
        kind, default = kind | None, None
    described = typer.Option(
        *words,
        help=option.help,
        rich_help_panel=option.group or None,
        callback=_check(config, field, option),
        metavar=option.metavar or ("<size>" if option.is_size else "<time>" if option.is_time else None),
        case_sensitive=not option.any_case,
        **_limits(config, field) if kind in NUMBERS else {},
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, described]
    )


def _limits(config: Config, field: str) -> dict[str, Any]:
    """The inclusive limits of a number, as typer names them."""
    notes = [kinds(config, limits=True)[field]]
    found: dict[str, Any] = {}
    while notes:
        note = notes.pop()
        notes += [*get_args(note), *getattr(note, "__metadata__", ())]
        if isinstance(note, msgspec.Meta):
            found |= {"min": note.ge, "max": note.le}
    return found


def _choices(kind: Any) -> dict[str, Any]:
    """{text: value} of a choice among values of which some are no texts. Empty for any other type."""
    values = get_args(kind) if get_origin(kind) is Literal else ()
    return {} if all(isinstance(value, str) for value in values) else {str(value): value for value in values}


def _shown(default: Any) -> str:
    return {True: "on", False: "off"}[default] if isinstance(default, bool) else str(default)


def size_text(size: int) -> str:
    """`32M` for 32 << 20: the largest unit in which the size is a whole number."""
    unit, shift = next((unit, shift) for unit, shift in _UNITS if size >> shift << shift == size)
    return f"{size >> shift}{unit}"


def _check(config: Config, field: str, option: Option) -> Callable[[typer.Context, typer.CallbackParam, Any], Any]:
    """The callback of an option. It gives the field's value, and raises ConfigError for one out of range."""
    kind, choices = kinds(config, limits=True)[field], _choices(kinds(config)[field])

    def check(context: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
        if value is None:
            return None
        where, read = origin(context, param), choices.get(value, value) if choices else value
        if option.is_time:
            read = parse_seconds(value, where)
        elif option.is_size:
            read = 0 if value.strip() == "0" else parse_size(field, value, where)
        try:
            return parse(read, kind, f"{where} {value}")
        except ConfigError as error:
            reason = str(error).replace("Expected", "expected").replace("`float`", "a number")
            raise ConfigError(reason.replace("`int`", "an integer")) from None

    return check
