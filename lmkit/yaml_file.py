"""Strict reading of a YAML file that a user wrote: errors name its line, and a key given twice is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from lmkit.errors import ConfigError


def read(path: Path) -> tuple[yaml.Node | None, Any]:
    """The file's tree, whose nodes know their lines, and the same as plain data. JSON is YAML. Raises ConfigError."""
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        tree = loader.get_single_node()
        _refuse_duplicates(tree, path)
        return tree, loader.construct_document(tree) if tree is not None else {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None


def _refuse_duplicates(tree: Any, path: Path) -> None:
    """Raise ConfigError for a key that is given twice; YAML silently takes the last one."""
    if isinstance(tree, yaml.SequenceNode):
        for item in tree.value:
            _refuse_duplicates(item, path)
    elif isinstance(tree, yaml.MappingNode):
        seen = set()
        for key, value in tree.value:
            if key.value in seen:
                raise ConfigError(f"{path}:{key.start_mark.line + 1}: {key.value!r} is given twice")
            seen.add(key.value)
            _refuse_duplicates(value, path)
