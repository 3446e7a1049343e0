"""Special tokens that stand beside tokenizer.json: which names they have, and which tokens the files add.

tokenizer_config.json has all of them if it has `added_tokens_decoder`. Older checkpoints have them in
special_tokens_map.json, whose values then win, and in added_tokens.json. This is the order of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from lmkit.errors import CheckpointError
from lmkit.jsonfile import read_json
from lmkit.small_files import exists

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_CONFIG_BYTES = 16 << 20  # tokenizer_config.json and the like; real ones stay below 1 MiB
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


class Declared(NamedTuple):
    """A token as a file declares it."""

    text: str
    flags: dict[str, bool]  # of `tokenizers.AddedToken`
    id: int | None = None
    where: str = ""


def read_config(file: Path) -> dict[str, Any]:
    """The JSON object of an optional file; {} without the file. Raises CheckpointError."""
    return read_json(file, MAX_CONFIG_BYTES) if exists(file) else {}


def add_special_tokens(backend: tokenizers.Tokenizer, folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Add the tokens that a checkpoint's files declare to its tokenizer. `config` is tokenizer_config.json.

    Returns the named ones as chat templates see them: `bos_token` and so on, and names of the model's own. Raises
    CheckpointError for tokens without text, and where a token would get another id than the file says.
    """
    named, others = _of_names(folder, config)
    names = {token.text for token in named.values()}
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    if "added_tokens_decoder" in config:
        declared = _of_decoder(config["added_tokens_decoder"] or {}, folder / CONFIG)
    else:
        special = names.union(token.text for token in others)
        declared = [token for token in _of_added(folder / ADDED, special) if token.text not in known]
        declared += [_of_library(token) for token in known.values() if token.content in names and not token.special]
    for token in sorted(declared, key=lambda token: token.id or 0):
        _add(backend, token, names)
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for token in (*named.values(), *others):
        if token.text not in known:
            _add(backend, token, names)  # of several with this text, the flags of the last
    return {name: token.text for name, token in named.items()}


def eos_token_id(folder: Path, config: dict[str, Any]) -> int | None:
    """The id of the `eos_token` that `add_special_tokens` names, as far as the files say it beside the tokenizer."""
    eos = _of_names(folder, config)[0].get("eos_token")
    declared = _of_decoder(config.get("added_tokens_decoder") or {}, folder / CONFIG)
    return next((token.id for token in declared if eos is not None and token.text == eos.text), None)


def _of_names(folder: Path, config: dict[str, Any]) -> tuple[dict[str, Declared], list[Declared]]:
    """The special tokens that have names, and further ones."""
    older = {} if "added_tokens_decoder" in config else read_config(folder / MAP)
    members, listed = _extra(config, older, folder)
    usual = {name: (config | older).get(name) for name in NAMED_TOKENS}
    own = {name: value for name, value in (older | config).items() if name.endswith("_token") and name not in usual}
    named = {name: token for name, value in (usual | own | members).items() if (token := _token(value))}
    return named, [token for value in listed if (token := _token(value))]


def _add(backend: tokenizers.Tokenizer, token: Declared, names: Set[str]) -> None:
    flags = token.flags | ({"special": True} if token.text in names else {})
    backend.add_tokens([tokenizers.AddedToken(token.text, **flags)])
    if token.where and backend.token_to_id(token.text) != token.id:
        found = backend.token_to_id(token.text)
        raise CheckpointError(f"{token.where}: token {token.text!r} has id {found}, not {token.id}")


def _token(value: Any) -> Declared | None:
    """A special token is a string, or an object with `content`; None for anything else."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text:
        return None
    flags = (
        {flag: value[flag] for flag in _FLAGS if isinstance(value.get(flag), bool)} if isinstance(value, dict) else {}
    )
    return Declared(text, {"normalized": False} | flags | {"special": True})


def _extra(config: Mapping[str, Any], older: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """Further special tokens, with names and without: of tokenizer_config.json, and those that the older file adds."""
    newer, found = "extra_special_tokens", "additional_special_tokens"
    members: dict[str, Any] = {}
    listed: list[Any] = []
    for file, value in ((CONFIG, config.get(newer) or config.get(found)), (MAP, older.get(newer))):
        if not isinstance(value, dict | list | None):
            raise CheckpointError(f"{folder / file}: {newer}: expected a list or an object of tokens")
        members |= value if isinstance(value, dict) else {}
        listed = listed + value if isinstance(value, list) else [] if value else listed  # an object replaces a list
    return members, listed or list(older.get(found) or [])


def _of_decoder(declared: Any, where: Path) -> list[Declared]:
    if not isinstance(declared, dict) or not all(key.isdecimal() and len(key) < 11 for key in declared):
        raise CheckpointError(f"{where}: added_tokens_decoder: expected an object of token id -> token")
    found = []
    for key, entry in declared.items():
        if (token := _token(entry)) is None:
            raise CheckpointError(f"{where}: added_tokens_decoder[{key}]: no token text")
        options = entry if isinstance(entry, dict) else {}
        flags = {flag: bool(options.get(flag)) for flag in _FLAGS}
        found.append(Declared(token.text, flags, int(key), str(where)))
    return found


def _of_added(file: Path, special: Set[str]) -> list[Declared]:
    """Tokens of added_tokens.json, which has their ids alone."""
    entries = read_config(file)
    if not all(text and type(token_id) is int for text, token_id in entries.items()):
        raise CheckpointError(f"{file}: expected an object of token -> token id")
    return [
        Declared(text, {"special": text in special, "normalized": text not in special}, token_id, str(file))
        for text, token_id in entries.items()
    ]


def _of_library(token: tokenizers.AddedToken) -> Declared:
    return Declared(token.content, {flag: getattr(token, flag) for flag in _FLAGS})
