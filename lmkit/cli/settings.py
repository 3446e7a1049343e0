"""Options that may also stand in the environment (LMKIT_PORT) and in a YAML file (`--config`).

The command line comes before the environment, and the environment before the file. Wherever a value is given, it takes
the same way through the option's own checks, as text. An error names the place where the value stands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
import yaml

from lmkit import yaml_file
from lmkit.cli.usage import Command, Group, explain, no_option, words_of
from lmkit.environment import VARIABLES, lmkit_variables
from lmkit.errors import ConfigError
from lmkit.log import get_logger
from lmkit.other_names import hint, names

_ORIGINS = "lmkit.origins"  # in a context's meta: where each value stands that is not on the command line
_OF_A_CALL = ("config", "print_config")  # options that a file cannot have
_PROXY = "LMKIT_PROXY_"

logger = get_logger(__name__)


class Settings:
    """Mixed into the class of a command: takes its options from variables named `prefix` + NAME as well.

    Raises ConfigError for every mistake in its options.
    """

    prefix: str
    name: str | None
    params: list[Any]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = [word.partition("=")[0] for word in args]
        try:
            if not ctx.resilient_parsing:  # the shell does not complete a line
                ctx.default_map = self._environment(ctx)
            return super().parse_args(ctx, args)  # type: ignore[misc, no-any-return]
        except typer.TyperException as error:
            raise ConfigError(self._explain(ctx, words, error)) from None

    def _environment(self, ctx: Any) -> dict[str, Any]:
        ours = {self.prefix + param.name.upper(): param for param in self.params}
        known = [*ours, *VARIABLES]
        found = {}
        for variable, text in lmkit_variables().items():
            if param := ours.get(variable):
                found[param.name] = text.split() if _takes_several(param) else text
                ctx.meta.setdefault(_ORIGINS, {})[param.name] = variable
            elif variable not in known and variable.startswith(_PROXY) == (self.prefix == _PROXY):
                logger.warning("%s is not a variable of lmkit%s", variable, hint(variable, known))
        return found

    def _explain(self, ctx: Any, words: list[str], error: typer.TyperException) -> str:
        others = names(f"lmkit {ctx.info_name}")
        ours = {name for param in self.params for name in words_of(param)}
        for word in words:  # the parser takes -ngl for three options, and names the first
            if word.startswith("-") and word not in ours and word.lstrip("-").replace("-", "_") in others:
                return no_option(ctx, word)
        message, param = explain(error), getattr(error, "param", None)
        return message if param is None else message.replace(_label(param), origin(ctx, param), 1)


class ServeCommand(Settings, Command):
    prefix = "LMKIT_"


class ProxyGroup(Settings, Group):
    prefix = _PROXY


def origin(ctx: Any, param: Any) -> str:
    """Where the value of an option stands: `--port`, `LMKIT_PORT` or `serve.yaml:3: port`."""
    source = ctx.get_parameter_source(param.name)
    elsewhere = ctx.meta.get(_ORIGINS, {}) if source is None or source.name != "COMMANDLINE" else {}
    return str(elsewhere.get(param.name, _label(param)))


def _takes_several(param: Any) -> bool:
    return bool(param.multiple or param.nargs == -1)


def _label(param: Any) -> str:
    return str(words_of(param)[0] if param.param_type_name == "option" else param.name.upper())


def read_config(ctx: typer.Context, path: str | None) -> str | None:
    """The callback of `--config`: takes the file's values where the environment has none. Raises ConfigError."""
    if path is None or ctx.resilient_parsing:
        return path
    params: dict[str, Any] = {str(param.name): param for param in ctx.command.params if param.name not in _OF_A_CALL}
    tree, _ = yaml_file.read(Path(path))
    if tree is not None and not isinstance(tree, yaml.MappingNode):
        raise ConfigError(f"{path}: expected options as `name: value`, one a line")
    found = ctx.default_map or {}
    for key, value in tree.value if tree is not None else ():
        place, name = f"{path}:{key.start_mark.line + 1}", str(key.value).replace("-", "_")
        if name not in params:
            raise ConfigError(f"{place}: {key.value!r} is not an option{hint(name, params, 'lmkit serve')}")
        if name not in found:
            found[name] = _text(value, params[name], f"{place}: {name}")
            ctx.meta.setdefault(_ORIGINS, {})[name] = f"{place}: {name}"
    ctx.default_map = found
    return path


def _text(value: yaml.Node, param: Any, where: str) -> str | list[str]:
    """A value as it would be written on the command line."""
    values = value.value if isinstance(value, yaml.SequenceNode) and _takes_several(param) else [value]
    if not all(isinstance(item, yaml.ScalarNode) for item in values):
        raise ConfigError(
            f"{where}: expected {'one value or a list of them' if _takes_several(param) else 'one value'}"
        )
    if any(item.tag == "tag:yaml.org,2002:null" for item in values):
        raise ConfigError(f"{where}: has no value; leave the line out for the default")
    texts = [str(item.value) for item in values]
    return texts if _takes_several(param) else texts[0]


def resolved(ctx: typer.Context) -> str:
    """All options and where each stands, as a file for `--config`. API keys are not shown."""
    lines = []
    for param in ctx.command.params:
        name = str(param.name)
        value, source = ctx.params[name], ctx.get_parameter_source(name)
        if name in _OF_A_CALL or getattr(param, "hidden", False):
            continue
        if name == "api_key":
            text = f"# api_key: {len(value or ())}, not shown"
        elif name == "node_key" and value:
            text = "# node_key: not shown"
        elif value is None or (isinstance(value, list | tuple) and not value):
            text = f"# {name}:"
        else:
            text = yaml.safe_dump({name: str(value) if isinstance(value, Path) else value}, width=1 << 16).strip()
        lines.append(f"{text:<34}  # {'default' if source and source.name == 'DEFAULT' else origin(ctx, param)}")
    return "\n".join(lines)
