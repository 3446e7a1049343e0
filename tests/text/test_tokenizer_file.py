"""A tokenizer before it is read: the ids that end a sequence are those of the tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmkit.errors import CheckpointError
from lmkit.text import Tokenizer
from lmkit.text.tokenizer_file import TokenizerFile
from tests.formats.gguf_writer import write
from tests.formats.test_gguf import EMBED, LLAMA
from tests.formats.test_gguf_tokenizer import demo_metadata
from tests.text.samples import write_folder


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The paths of the tokenizers that were read."""
    paths, read = list[Path](), Tokenizer.from_pretrained

    def counted(path: Path, chat_template: str | None = None) -> Tokenizer:
        paths.append(path)
        return read(path, chat_template)

    monkeypatch.setattr(Tokenizer, "from_pretrained", counted)
    return paths


def declared(folder: Path) -> Path:
    decoder = {"4096": {"content": "<tool>", "special": False}, "4097": {"content": "<end>", "special": True}}
    files: dict[str, Any] = {
        "tokenizer_config": {"added_tokens_decoder": decoder, "eos_token": {"content": "<end>"}},
        "generation_config": {"eos_token_id": [7, 5]},
        "config": {"eos_token_id": 0},
    }
    return write_folder(folder, **files)


def gguf(folder: Path) -> Path:
    write(folder / "m.gguf", LLAMA | demo_metadata(), EMBED)
    return folder / "m.gguf"


@pytest.mark.parametrize("make", [declared, gguf])
def test_ends_are_known_before_the_tokenizer_is_read(tmp_path: Path, readings: list[Path], make: Any) -> None:
    path = make(tmp_path)
    file = TokenizerFile(path)
    ends = file.eos_token_ids()
    assert not readings
    assert file.read().eos_token_ids == ends
    assert file.read() is file.read()
    assert readings == [path]


def test_ends_are_those_of_the_tokenizer_where_no_other_file_has_the_id(tmp_path: Path, readings: list[Path]) -> None:
    folder = write_folder(tmp_path, tokenizer_config={"eos_token": "<|im_end|>"}, config={"eos_token_id": 0})
    assert TokenizerFile(folder).eos_token_ids() == (0, 2)
    assert readings == [folder]


def test_a_broken_file_is_refused_as_the_tokenizer_refuses_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tokenizer_config={"added_tokens_decoder": {"9": {"content": ""}}})
    with pytest.raises(CheckpointError, match="no token text"):
        TokenizerFile(folder).eos_token_ids()
