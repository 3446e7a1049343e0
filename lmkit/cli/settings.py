"""Options that may also stand in the environment (LMKIT_PORT) and in a YAML file (`--config`), and their errors.

The command line comes before the environment, and the environment before the file. Wherever a value is given, it takes
the same way through the option's own checks, as text. An error names the place where the value stands.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
import yaml
from typer.core import TyperCommand, TyperGroup

from lmkit import yaml_file
from lmkit.config import Environment, lmkit_variables
from lmkit.errors import ConfigError
from lmkit.log import get_logger
from lmkit.other_names import ENGINE, PROXY, SERVE, SERVE_COMMANDS, VALUES, hint

ORIGINS = "lmkit.origins"  # in a context's meta: where each value stands that is not on the command line
_OF_A_CALL = ("config", "print_config")  # options that a file cannot have
_PROXY = "LMKIT_PROXY_"
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

logger = get_logger(__name__)


class Settings:
    """Mixed into typer's class of a command: takes options from variables named `prefix` + NAME.

    Every mistake in its options is a ConfigError.
    """

    prefix: str
    other_flags: Mapping[str, str]  # of other tools, without dashes; and what to say about them
    other_commands: Mapping[str, str] = {}
    params: list[Any]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)
        if words and (advice := self.other_commands.get(words[0])) and not os.path.isdir(words[0]):
            raise ConfigError(f"lmkit {ctx.info_name} {words[0]}: {advice}")
        try:
            if not ctx.resilient_parsing:  # the shell does not complete a line
                ctx.default_map = self._environment(ctx)
            return super().parse_args(ctx, args)  # type: ignore[misc, no-any-return]
        except _UsageError as error:
            raise ConfigError(self._explain(ctx, words, error)) from None

    def _environment(self, ctx: Any) -> dict[str, Any]:
        ours = {self.prefix + param.name.upper(): param for param in self.params}
        known = [*ours, *(f"LMKIT_{name.upper()}" for name in Environment.__struct_fields__)]
        found = {}
        for variable, text in lmkit_variables().items():
            if param := ours.get(variable):
                found[param.name] = text.split() if param.multiple else text
                ctx.meta.setdefault(ORIGINS, {})[param.name] = variable
            elif variable not in known and variable.startswith(_PROXY) == (self.prefix == _PROXY):
                logger.warning("%s is not a variable of lmkit%s", variable, hint(variable, {}, known))
        return found

    def _explain(self, ctx: Any, words: list[str], error: Any) -> str:
        """One line for a mistake on the command line, in the environment or in the file."""
        command = f"lmkit {ctx.info_name}"
        ours = [flag for param in self.params for flag in (*param.opts, *param.secondary_opts)]
        table = {**ENGINE, **self.other_flags}
        for word in words:
            name = word.partition("=")[0]
            if name.startswith("-") and name not in ours and (advice := table.get(_key(name))):
                return f"{name} is not an option of {command}: {self._as_flags(advice)}"
        unknown = getattr(error, "option_name", None)
        if unknown and unknown not in ours:
            return f"{unknown} is not an option of {command}{hint(unknown, {}, ours)}"
        param = getattr(error, "param", None)
        if param is None or not error.message:
            message = error.format_message()
            return f"{command}: {message[:1].lower()}{message[1:].rstrip('.')}"
        message = error.message.removeprefix("Value error, ").rstrip(".")
        if message.startswith("Input should be"):  # pydantic, in typer
            message = "expected" + message.removeprefix("Input should be").partition(",")[0]
        value = re.match(r"'(\w+)' is not one of ", message)
        return f"{origin(ctx, param)}: {message}{hint(value[1], VALUES) if value else ''}"

    def _as_flags(self, advice: str) -> str:
        """The advice with fields of EngineConfig as options: use max_model_len -> use --max-model-len."""
        names = {param.name for param in self.params}
        return re.sub(r"(?<!-)\b\w+_\w+\b", lambda m: f"--{m[0].replace('_', '-')}" if m[0] in names else m[0], advice)


class ServeCommand(Settings, TyperCommand):
    prefix, other_flags, other_commands = "LMKIT_", SERVE, SERVE_COMMANDS

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """The options in groups, each under the title that its `rich_help_panel` names."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for param in self.get_params(ctx):
            title = getattr(param, "rich_help_panel", None) or (
                "Options" if param.param_type_name == "option" else "Arguments"
            )
            if (record := param.get_help_record(ctx)) is not None:
                groups.setdefault(title, []).append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class ProxyGroup(Settings, TyperGroup):
    prefix, other_flags = _PROXY, PROXY


def origin(ctx: Any, param: Any) -> str:
    """Where the value of an option stands: `--port`, `LMKIT_PORT` or `serve.yaml:3: port`."""
    given = ctx.get_parameter_source(param.name)
    if given is None or given.name == "DEFAULT_MAP":
        return str(ctx.meta.get(ORIGINS, {}).get(param.name) or param.opts[0])
    return str(param.opts[0])


def read_config(ctx: typer.Context, path: str | None) -> str | None:
    """The callback of `--config`: the file's values, below those of the environment. Raises ConfigError."""
    if path is None or ctx.resilient_parsing:
        return path
    params: dict[str, Any] = {str(param.name): param for param in ctx.command.params if param.name not in _OF_A_CALL}
    tree, _ = yaml_file.read(Path(path))
    if tree is not None and not isinstance(tree, yaml.MappingNode):
        raise ConfigError(f"{path}: expected options as `name: value`, one a line")
    above = ctx.default_map or {}
    for key, value in tree.value if tree is not None else ():
        place, name = f"{path}:{key.start_mark.line + 1}", str(key.value).replace("-", "_")
        if name not in params:
            table = {**ENGINE, **SERVE}
            raise ConfigError(f"{place}: {key.value!r} is not an option{hint(name, table, params)}")
        if name not in above:
            above[name] = _text(value, params[name], f"{place}: {name}")
            ctx.meta.setdefault(ORIGINS, {})[name] = f"{place}: {name}"
    ctx.default_map = above
    return path


def _text(value: yaml.Node, param: Any, where: str) -> str | list[str]:
    """A value as it would be written on the command line."""
    values = value.value if isinstance(value, yaml.SequenceNode) and param.multiple else [value]
    if not all(isinstance(item, yaml.ScalarNode) for item in values):
        raise ConfigError(f"{where}: expected {'one value or a list of them' if param.multiple else 'one value'}")
    if any(item.tag == "tag:yaml.org,2002:null" for item in values):
        raise ConfigError(f"{where}: has no value; leave the line out for the default")
    texts = [str(item.value) for item in values]
    return texts if param.multiple else texts[0]


def resolved(ctx: typer.Context) -> str:
    """All options and where each stands, as a file for `--config`. API keys are not shown."""
    lines = []
    for param in ctx.command.params:
        value = ctx.params[str(param.name)]
        if param.name in _OF_A_CALL or getattr(param, "hidden", False):
            continue
        source = ctx.get_parameter_source(str(param.name))
        place = "default" if source is None or source.name == "DEFAULT" else origin(ctx, param)
        if param.name == "api_key":
            text = f"# api_key: {len(value or ())}, not shown"
        elif value is None:
            text = f"# {param.name}:"
        else:
            text = yaml.safe_dump({param.name: str(value) if isinstance(value, Path) else value}, width=1 << 16).strip()
        lines.append(f"{text:<34}  # {place}")
    return "\n".join(lines)


def _key(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")
