"""The models of `lmkit serve`: those of the command line, or of a YAML file that gives each its own options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from lmkit import yaml_file
from lmkit.config import EngineConfig, PositiveFloat, ServerConfig, is_size, parse, parse_size
from lmkit.errors import ConfigError
from lmkit.other_names import hint
from lmkit.small_files import model_name

FILES = (".yaml", ".yml")


class ListedModel(NamedTuple):
    """One model, as its user gave it."""

    name: str  # in requests
    path: str  # a folder, a Hub name or "demo"
    engine: EngineConfig
    keep_alive: float | None
    aliases: tuple[str, ...] = ()  # its other names
    revision: str | None = None  # on the Hub


def listed_models(
    given: Sequence[str], engine: EngineConfig, server: ServerConfig, revision: str | None = None
) -> list[ListedModel]:
    """The models that `given` names. `engine` and `server` have the options for all. Raises ConfigError."""
    own = server.served_model_name
    found: list[ListedModel] = []
    for text in given:
        if text.endswith(FILES):
            found += _from_file(Path(text), engine, server.keep_alive)
        else:
            found.append(ListedModel(model_name(text), text, engine, server.keep_alive))
    for option, value in {"--served-model-name": own, "--revision": revision}.items():
        if value and len(found) > 1:
            raise ConfigError(f"{option} is for a single model; list several in a file, see docs/operate.md")
    if own:
        found = [model._replace(name=own[0], aliases=own[1:]) for model in found]
    if revision is not None:
        found = [model._replace(revision=revision) for model in found]
    names = [name for model in found for name in (model.name, *model.aliases)]
    for name in names:
        if not name:
            raise ConfigError("a model's name is empty")
        if names.count(name) > 1:
            raise ConfigError(f"two models are called {name!r}; name them in a file, see docs/operate.md")
    return found


def _from_file(path: Path, engine: EngineConfig, keep_alive: float | None) -> list[ListedModel]:
    tree, data = yaml_file.read(path)
    if not isinstance(tree, yaml.MappingNode) or not data:
        raise ConfigError(f"{path}: expected models as `name: path`, or with options, see docs/operate.md")
    found = []
    for (key, _), (name, value) in zip(tree.value, data.items(), strict=True):
        where = f"{path}:{key.start_mark.line + 1}: {name}"
        given = {"path": value} if isinstance(value, str) else value
        if not isinstance(given, dict) or not isinstance(given.get("path"), str):
            raise ConfigError(f"{where}: expected a path, or options of which one is path")
        options = {str(option).replace("-", "_"): value for option, value in given.items()}
        found.append(_model(str(name), options, where, engine, keep_alive))
    return found


def _model(name: str, given: dict[str, Any], where: str, engine: EngineConfig, keep_alive: float | None) -> ListedModel:
    path = given.pop("path")
    if "keep_alive" in given:
        keep_alive = parse(given.pop("keep_alive"), PositiveFloat, f"{where}: keep_alive")
    aliases = parse(given.pop("aliases", ()), tuple[str, ...], f"{where}: aliases")
    revision = parse(given.pop("revision"), str, f"{where}: revision") if "revision" in given else None
    own = msgspec.structs.asdict(engine)
    for option, value in given.items():
        if option not in own:
            raise ConfigError(f"{where}: {option!r} is not an option of a model{hint(option, own, 'EngineConfig')}")
        is_text = isinstance(value, str) and is_size(EngineConfig, option)
        own[option] = parse_size(option, value, f"{where}: {option}") if is_text else value
    return ListedModel(name, path, parse(own, EngineConfig, where), keep_alive, aliases, revision)
