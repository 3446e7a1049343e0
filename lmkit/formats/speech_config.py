"""The tokens by which Whisper is told what to write: `generation_config.json`, as transformers has it. No torch here.

{"decoder_start_token_id": 50258, "no_timestamps_token_id": 50363, "lang_to_id": {"<|en|>": 50259, ...},
 "task_to_id": {"transcribe": 50359, "translate": 50358}, "suppress_tokens": [1, 2, ...], ...}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.generation_config import FILE, MAX_BYTES
from lmkit.jsonfile import read_json
from lmkit.small_files import exists
from lmkit.text.audio import AudioSettings


def read_speech(folder: Path, vocab_size: int, seconds: int) -> AudioSettings:
    """The tokens of the checkpoint in `folder`, whose encoder hears `seconds` at a time. Raises CheckpointError, or
    UnsupportedError if there is no such file."""
    path = folder / FILE
    if not exists(path):
        raise UnsupportedError(f"{path} is missing, which says what Whisper's tokens mean")
    given = read_json(path, MAX_BYTES)

    def token(name: str, value: Any) -> int:
        if type(value) is not int or not 0 <= value < vocab_size:
            raise CheckpointError(f"{path}: {name} = {value!r:.100} is no token of {vocab_size}")
        return value

    def needed(name: str) -> int:
        return token(name, given.get(name))

    def named(name: str) -> dict[str, int]:
        found = given.get(name) or {}
        if not isinstance(found, dict):
            raise CheckpointError(f"{path}: {name} is not an object")
        return {key.strip("<|>"): token(name, value) for key, value in found.items()}

    def several(name: str) -> tuple[int, ...]:
        found = given.get(name) or []
        if not isinstance(found, list):
            raise CheckpointError(f"{path}: {name} is not a list")
        return tuple(token(name, value) for value in found)

    ends, first = given.get("eos_token_id"), given.get("max_initial_timestamp_index")
    if first is not None and (type(first) is not int or first < 0):
        raise CheckpointError(f"{path}: max_initial_timestamp_index = {first!r:.100} is not a sensible integer")
    previous = given.get("prev_sot_token_id")
    return AudioSettings(
        seconds=seconds,
        start=needed("decoder_start_token_id"),
        end=token("eos_token_id", ends[0] if isinstance(ends, list) and ends else ends),
        no_timestamps=needed("no_timestamps_token_id"),
        languages=named("lang_to_id"),
        tasks=named("task_to_id"),
        previous=None if previous is None else token("prev_sot_token_id", previous),
        suppress=several("suppress_tokens"),
        begin_suppress=several("begin_suppress_tokens"),
        max_initial=first,
    )
