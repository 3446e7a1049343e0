"""Strict reading of a YAML file that a user wrote: errors name its line, and a key given twice is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from lmkit.choices import explained
from lmkit.errors import ConfigError

T = TypeVar("T")


def read(path: Path, name: str = "") -> tuple[yaml.Node | None, Any]:
    """The file's tree, whose nodes know their lines, and the same as plain data. JSON is YAML.

    Raises ConfigError, which starts with `name`, by default the path.
    """
    name = name or str(path)
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        tree = loader.get_single_node()
        _refuse_duplicates(tree, name)
        return tree, loader.construct_document(tree) if tree is not None else {}
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: is not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{name}:{line}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None


def load(path: Path, into: type[T]) -> T:
    """The file as a struct. Raises ConfigError with the file's line."""
    tree, data = read(path)
    try:
        return msgspec.convert(data, into)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}:{line_of(tree, str(error))}: {explained(error, into)}") from None


def _refuse_duplicates(tree: yaml.Node | None, name: str) -> None:
    """Raise ConfigError for a key that is given twice; YAML silently takes the last one."""
    left, known = [tree], set[int]()  # an alias is the node that it names, so a node may even contain itself
    while left:
        node = left.pop()
        if id(node) in known or not isinstance(node, yaml.CollectionNode):
            continue
        known.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            left += node.value
            continue
        keys = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):  # constructing the data refuses other keys
                if key.value in keys:
                    raise ConfigError(f"{name}:{key.start_mark.line + 1}: {key.value!r} is given twice")
                keys.add(key.value)
            left.append(value)


def line_of(tree: Any, message: str) -> int:
    """The source line to which a validation message such as "unknown field `x` - at `$.nodes[0]`" refers."""
    where = re.search(r" - at `(?:key in )?\$(.*)`$", message)
    steps = re.findall(r"\.([^.\[]+)|\[(\d+)\]", where[1]) if where else []
    if unknown := re.search(r"unknown field `(.*?)`", message):
        steps.append((unknown[1], ""))
    line = tree.start_mark.line + 1 if tree is not None else 1
    for name, index in steps:
        if index and isinstance(tree, yaml.SequenceNode) and int(index) < len(tree.value):
            tree = tree.value[int(index)]
            line = tree.start_mark.line + 1
        elif name and isinstance(tree, yaml.MappingNode):
            entries = {key.value: (key, value) for key, value in tree.value}
            if name not in entries:
                break
            key, tree = entries[name]
            line = key.start_mark.line + 1
        else:
            break
    return line
