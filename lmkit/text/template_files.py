"""Where the chat templates of a checkpoint are: one, or several with names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmkit.errors import CheckpointError, ConfigError
from lmkit.small_files import exists, read
from lmkit.text.special_tokens import CONFIG, MAX_CONFIG_BYTES, read_config
from lmkit.text.template import ChatTemplate

FILE, FOLDER = "chat_template.jinja", "additional_chat_templates"
OLDER_FILE = "chat_template.json"  # of models that see images
DEFAULT, FOR_TOOLS = "default", "tool_use"  # names of templates


def given_template(given: str) -> str:
    """The text of a template that a user gives: a file, or the text itself. Raises ConfigError."""
    if os.path.exists(given):
        try:
            return Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"chat_template {given}: cannot read: {error}") from None
    if "{{" in given or "{%" in given:
        return given
    raise ConfigError(f"chat_template {given[:64]!r}: there is no such file, and a template has {{{{ or {{%")


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of a checkpoint's templates by their names. `config` is tokenizer_config.json. Raises CheckpointError.

    Files of templates stand in place of tokenizer_config.json's. A model that sees images has its template in
    chat_template.json, if it has that file.
    """
    files = [(DEFAULT, folder / FILE), *((file.stem, file) for file in sorted((folder / FOLDER).glob("*.jinja")))]
    found = {name: _text(file) for name, file in files if exists(file)}
    if DEFAULT in found:
        return found
    older = _named(read_config(folder / OLDER_FILE).get("chat_template"), folder / OLDER_FILE)
    configured = _named(config.get("chat_template"), folder / CONFIG)
    sees_images = (folder / "preprocessor_config.json").exists()
    return (configured | older if sees_images else older | configured) | found


def chosen_template(templates: Mapping[str, str], named: Mapping[str, str]) -> ChatTemplate | None:
    """The default template, and beside it the one for requests with tools, if there is one."""
    source = templates.get(DEFAULT, templates.get(FOR_TOOLS))
    return None if source is None else ChatTemplate(source, named, for_tools=templates.get(FOR_TOOLS))


def _named(value: Any, where: Path) -> dict[str, str]:
    """Templates of a JSON file: one text, or a list of named ones."""
    if value is None:
        return {}
    entries = value if isinstance(value, list) else [{"name": DEFAULT, "template": value}]
    texts: dict[Any, Any] = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    if not all(isinstance(text, str) for item in texts.items() for text in item):
        raise CheckpointError(f"{where}: chat_template: expected text or a list of named texts")
    return texts


def _text(file: Path) -> str:
    try:
        return read(file, MAX_CONFIG_BYTES).decode()
    except ValueError as error:
        raise CheckpointError(f"{file}: cannot read: {error}") from None
