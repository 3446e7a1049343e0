"""Which hidden states are an embedding: the files of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmkit.errors import CheckpointError, LMKitError, UnsupportedError
from lmkit.formats.pooling import read_dimensions, read_pooling

MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def module(kind: str, path: str) -> dict[str, Any]:
    return {"idx": 0, "name": "0", "path": path, "type": f"sentence_transformers.models.{kind}"}


def write(folder: Path, config: dict[str, Any] | None, *more: dict[str, Any]) -> Path:
    modules = [module("Transformer", ""), module("Pooling", "1_Pooling"), *more]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    if config is not None:
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return folder


def flags(*names: str) -> dict[str, Any]:
    return {"word_embedding_dimension": 8} | {f"pooling_mode_{mode}": mode in names for mode in MODES}


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (flags("lasttoken"), "last"),
        (flags("mean_tokens") | {"include_prompt": True}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        (flags("cls_token"), "cls"),
    ],
)
def test_the_pooling_of_a_checkpoint(tmp_path: Path, config: dict[str, Any], want: str) -> None:
    assert read_pooling(write(tmp_path, config, module("Normalize", "2_Normalize"))) == want


def test_the_last_token_without_a_file(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == "last"
    assert read_pooling(tmp_path, "mean") == "mean"


@pytest.mark.parametrize(
    "config", [flags("max_tokens"), flags("mean_tokens", "max_tokens"), flags(),
               {"pooling_mode": "weightedmean"}, {"pooling_mode": 3}]
)  # fmt: skip
def test_other_poolings_are_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"1_Pooling/config\.json.*--pooling last"):
        read_pooling(write(tmp_path, config))


def test_a_module_that_lmkit_does_not_compute_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="module 'Dense' is not supported"):
        read_pooling(write(tmp_path, flags("lasttoken"), module("Dense", "3_Dense")))


@pytest.mark.parametrize("path", ["../other", "/etc", "..", "a/b"])
def test_t3_a_module_outside_the_checkpoint_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([module("Pooling", path)]))
    with pytest.raises(CheckpointError, match="inside the checkpoint"):
        read_pooling(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[1]", '[{"type": 1, "path": ""}]', "[", "[" * 100000])
def test_broken_files_are_errors(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(LMKitError):
        read_pooling(tmp_path)


def test_a_missing_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        read_pooling(write(tmp_path, None))


def test_sizes_of_a_matryoshka_model(tmp_path: Path) -> None:
    assert read_dimensions(tmp_path) == ()
    file = tmp_path / "config.json"
    for text, want in (("{}", ()), ('{"matryoshka_dimensions": [64, 32]}', (32, 64))):
        file.write_text(text)
        assert read_dimensions(tmp_path) == want
    for wrong in ("[]", "64", "[0]", "[true]", '["64"]'):
        file.write_text(f'{{"matryoshka_dimensions": {wrong}}}')
        with pytest.raises(CheckpointError, match="matryoshka_dimensions: expected a list of whole numbers above zero"):
            read_dimensions(tmp_path)
