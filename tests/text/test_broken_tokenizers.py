"""Tokenizer files that are broken, by hand and by mutation: one clear error, and never a panic of the library."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from lmkit.errors import CheckpointError, LMKitError, RequestError
from lmkit.text import Tokenizer
from tests.mutation import mutated
from tests.text.samples import DEMO, write_folder

FILES = {name: (DEMO / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json", "config.json")}


def changed(path: Path, **parts: Any) -> Path:
    """The demo's tokenizer with other parts; those of `model` are set in the model."""
    write_folder(path)
    file = path / "tokenizer.json"
    spec = json.loads(file.read_text())
    spec["model"] |= parts.pop("model", {})
    file.write_text(json.dumps(spec | parts))
    return path


@pytest.mark.parametrize(
    "parts",
    [
        {"model": {"continuing_subword_prefix": "#" * 99}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
        {"model": {"vocab": {"a": 0}, "merges": ["b c"]}},
    ],
)
def test_the_library_s_panics_are_checkpoint_errors(tmp_path: Path, parts: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot read the tokenizer: .") as error:
        Tokenizer.from_pretrained(changed(tmp_path, **parts))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"model": {"unk_token": "nope", "vocab": {"a": 0}, "merges": []}, "added_tokens": []},
    ],
)
def test_failures_on_a_text_are_request_errors(tmp_path: Path, parts: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_pretrained(changed(tmp_path, **parts))
    with pytest.raises(RequestError, match="the model's tokenizer fails on this text"):
        tokenizer.encode("Hello 日本")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "content",
    [
        '{"added_tokens_decoder": {"DIGITS": {"content": "x"}}}',
        '{"eos_token_id": DIGITS, "model_max_length": DIGITS}',
        '{"a": [[DIGITS]]}',
    ],
)
@pytest.mark.parametrize("count", [5000, 400])
def test_numbers_of_thousands_of_digits(tmp_path: Path, name: str, content: str, count: int) -> None:
    write_folder(tmp_path)
    (tmp_path / name).write_text(content.replace("DIGITS", "9" * count))
    try:
        Tokenizer.from_pretrained(tmp_path)
    except CheckpointError as error:
        assert name in str(error)  # noqa: PT017 - not every file reads every key


def use(folder: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(folder)
    tokenizer.decode(tokenizer.encode("Hello 日本 <|im_end|>"))


def refused_or_used(folder: Path, name: str, num_examples: int) -> None:
    """Mutations of a file are used, or refused with an LMKitError."""
    write_folder(folder)

    @settings(deadline=None, max_examples=num_examples)
    @given(data=mutated(FILES[name]))
    def try_one(data: bytes) -> None:
        (folder / name).write_bytes(data)
        with contextlib.suppress(LMKitError):
            use(folder)

    try_one()


@pytest.mark.parametrize("name", FILES)
def test_mutated_files(tmp_path: Path, name: str) -> None:
    refused_or_used(tmp_path, name, 15)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FILES)
def test_many_mutated_files(tmp_path: Path, name: str) -> None:
    refused_or_used(tmp_path, name, 1500)
