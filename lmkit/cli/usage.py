"""What typer leaves to be said better: a mistake on the command line is one line, and help shows options in groups.

`Root` is the class of the whole command. It turns every usage error of every command into a ConfigError, so `main`
and tests meet one kind of error. `Command` and `Group` show options under the heading `rich_help_panel=` of an option.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from lmkit.errors import ConfigError
from lmkit.other_names import hint, names


def _format_options(command: Any, context: Any, formatter: Any) -> None:
    """Write arguments, options without a group, then each group under its heading."""
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for param in command.get_params(context):
        if (record := param.get_help_record(context)) is not None:
            default = "Arguments" if param.param_type_name == "argument" else "Options"
            sections.setdefault(param.rich_help_panel or default, []).append(record)
    for heading, records in sections.items():
        if records:
            with formatter.section(heading):
                formatter.write_dl(records)


class Command(TyperCommand):
    """A command whose help has groups of options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _format_options(self, ctx, formatter)


class Group(TyperGroup):
    """A command with commands of its own. Without any, it shows its help and succeeds."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or (["--help"] if self.no_args_is_help else []))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _format_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """`help COMMAND` is `COMMAND --help`. A command of another tool is answered with ours."""
        if args[0] == "help":
            args = [*args[1:], "--help"]
        if len(args) == 1 and args[0] == "--help":
            self.parse_args(ctx, args)  # shows the help and ends the command
        path = _path(ctx)
        for name in (" ".join([*path, *args[:2]]), " ".join([*path, args[0]])):
            if advice := hint(name, table="lmkit"):
                raise ConfigError(f"no command `{name}`{advice}")
        if args[0] not in self.commands and not args[0].startswith("-") and not ctx.resilient_parsing:
            advice = hint(args[0], self.commands) or f"; there are {', '.join(self.commands)}"
            raise ConfigError(f"no command `{' '.join([*path, args[0]])}`{advice}")
        return super().resolve_command(ctx, args)


class Root(Group):
    """The whole command. Raises ConfigError for a usage error; Ctrl-C is a line and exit code 130."""

    def main(self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **extra: Any) -> Any:  # type: ignore[override]
        try:
            code = super().main(args, standalone_mode=False, **extra)
        except typer.TyperException as error:
            raise ConfigError(explain(error)) from None
        if standalone_mode:
            sys.exit(code)
        return code

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            print("lmkit: interrupted" + "".join(f": {what}" for what in interrupt.args), file=sys.stderr)
            sys.unraisablehook = lambda _: None  # what a compiler began is half there, and says so when it is freed
            raise typer.Exit(130) from None


def explain(error: typer.TyperException) -> str:
    """One line for a usage error: the command, the mistake, and what to write instead."""
    return _EXPLAIN.get(type(error).__name__, _plain)(error)


def _path(context: Any) -> list[str]:
    """`["bench", "online"]`: the words after the program's name."""
    if context is None or context.parent is None:
        return []
    return [*_path(context.parent), context.info_name]


def _said(context: Any, message: str) -> str:
    """`bench online: MESSAGE`."""
    return ": ".join([*filter(None, [" ".join(_path(context))]), message])


def no_option(context: Any, given: str) -> str:
    """One line for an option that the command of this context has not."""
    options = [name for param in context.command.get_params(context) for name in words_of(param)]
    others = names(f"lmkit {' '.join(_path(context)) or context.info_name}")
    name = given.lstrip("-").replace("-", "_")
    if name in others:
        advice = f": {_as_options(others[name], options)}"
    elif given in _below(context.command):
        advice = "; options of a command come after its name"
    else:
        advice = hint(given.replace("_", "-"), options)
    help_command = " ".join(["lmkit help", *_path(context)])
    return _said(context, f"no option {given}{advice or f'; see `{help_command}`'}")


def _below(command: Any) -> set[str]:
    """The options of the commands of a group."""
    commands = getattr(command, "commands", {}).values()
    return {name for below in commands for param in below.params for name in words_of(param)}


def _as_options(advice: str, options: Iterable[str]) -> str:
    """`use max_model_len` -> `use --max-model-len`, for a word after "use" that is an option of the command."""
    verb, _, rest = advice.partition(" ")
    word, space, end = rest.partition(" ")
    name = word.rstrip(",;:")
    option = f"--{name.replace('_', '-')}"
    return f"{verb} {option}{word[len(name) :]}{space}{end}" if verb == "use" and option in options else advice


def _missing(error: Any) -> str:
    param = error.param
    name = " or ".join(words_of(param)) if param.param_type_name == "option" else param.name.upper()
    return _said(error.ctx, f"{name} is missing: {(param.help or '').rstrip('.')}")


def _bad_value(error: Any) -> str:
    param, cause = error.param, error.__cause__
    if param is None or not hasattr(cause, "errors"):
        return _plain(error)
    name = words_of(param)[0] if param.param_type_name == "option" else param.name.upper()
    value, wanted = cause.errors()[0]["input"], expected(param)
    advice = hint(str(value), table=name) or hint(str(value), table="value")
    return f"{name} {value!r}: expected {wanted}{advice or _between(param, value)}"


def _between(param: Any, value: Any) -> str:
    """What the help says after a semicolon, for a number where others are taken: it names an option for this one."""
    _, _, advice = (param.help or "").partition("; ")
    is_number = re.fullmatch(r"\d+(\.\d+)?", str(value)) is not None
    chosen = get_origin(param.type_descriptor.annotation) is Literal
    return f"; {advice.rstrip('.')}" if advice.startswith("--") and is_number and chosen else ""


def expected(param: Any) -> str:
    """What a parameter takes: `16, 8 or 4`, `an integer of at least 1`."""
    kind = param.type_descriptor.annotation
    kind = get_args(kind)[0] if get_origin(kind) is list else kind
    if get_origin(kind) is Literal:
        return listed([str(choice) for choice in get_args(kind)])
    name = {int: "an integer", float: "a number", bool: "true or false"}.get(kind, "a value")
    limits = [f"at least {param.min}"] * (param.min is not None) + [f"at most {param.max}"] * (param.max is not None)
    return f"{name} of {' and '.join(limits)}" if limits else name


def listed(values: Sequence[str]) -> str:
    """`16, 8 or 4`."""
    *most, last = values
    return f"{', '.join(most)} or {last}" if most else last


def _bad_use(error: Any) -> str:
    verb = "takes no value" if "does not take" in error.message else "needs a value"
    return _said(error.ctx, f"{error.option_name} {verb}")


def _plain(error: Any) -> str:
    message = error.format_message().rstrip(".")
    return _said(error.ctx, f"{message[:1].lower()}{message[1:]}")


def words_of(param: Any) -> list[str]:
    """The names of an option, the long one first."""
    return sorted([*param.opts, *param.secondary_opts], key=lambda name: not name.startswith("--"))


_EXPLAIN: dict[str, Callable[[Any], str]] = {
    "NoSuchOption": lambda error: no_option(error.ctx, error.option_name),
    "MissingParameter": _missing,
    "BadOptionUsage": _bad_use,
    "BadParameter": _bad_value,
}
