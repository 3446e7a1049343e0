"""How embeddings are made: the files of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmkit.errors import CheckpointError, LMKitError, RequestError, UnsupportedError
from lmkit.formats.sentences import Sentences, read_dimensions, read_sentences

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
        (flags("lasttoken", "mean_tokens", "cls_token"), "cls+mean+last"),
        (flags("max_tokens", "weightedmean_tokens"), "max+weighted_mean"),
        ({"pooling_mode": ["mean_sqrt_len_tokens", "cls"]}, "mean_sqrt_len+cls"),
        ({"pooling_mode": "weightedmean"}, "weighted_mean"),
        (flags(), "mean"),
    ],
)
def test_the_pooling_of_a_checkpoint(tmp_path: Path, config: dict[str, Any], want: str) -> None:
    found = read_sentences(write(tmp_path, config, module("Normalize", "2_Normalize")))
    assert found.pooling == want
    assert found.is_unit
    assert found.modules == ()


def test_the_last_token_without_a_file(tmp_path: Path) -> None:
    assert read_sentences(tmp_path) == Sentences(pooling="last")
    assert read_sentences(tmp_path, "mean") == Sentences(pooling="mean")


@pytest.mark.parametrize(
    "config", [{"pooling_mode": 3}, {"pooling_mode": ["mean", "median"]}, {"pooling_mode_median": True}]
)
def test_other_poolings_are_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"1_Pooling/config\.json.*--pooling last"):
        read_sentences(write(tmp_path, config))


def test_a_module_that_lmkit_does_not_compute_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="module 'LSTM' is not supported"):
        read_sentences(write(tmp_path, flags("lasttoken"), module("LSTM", "3_LSTM")))


@pytest.mark.parametrize(
    "config",
    [{"activation_function": "torch.nn.modules.activation.Softmax"}, {"module_input_name": "token_embeddings"}],
)
def test_a_layer_that_lmkit_does_not_compute_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write(tmp_path, flags("lasttoken"), module("Dense", "2_Dense"))
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r"2_Dense/config\.json"):
        read_sentences(folder)


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({"sentence_bert_config.json": {"max_seq_length": 7}, "tokenizer_config.json": {"model_max_length": 9}}, 7),
        ({"sentence_roberta_config.json": {"max_seq_length": 8}}, 8),
        ({"tokenizer_config.json": {"model_max_length": 9}}, 9),
        (
            {"sentence_bert_config.json": {"max_seq_length": None}, "tokenizer_config.json": {"model_max_length": 99}},
            12,
        ),
        ({"tokenizer_config.json": {}}, 12),
    ],
)
def test_how_long_texts_are(tmp_path: Path, files: dict[str, Any], want: int) -> None:
    folder = write(tmp_path, flags("lasttoken"))
    for name, content in ({"config.json": {"max_position_embeddings": 12}} | files).items():
        (folder / name).write_text(json.dumps(content))
    assert read_sentences(folder).max_tokens == want
    (folder / "modules.json").unlink()
    assert read_sentences(folder).max_tokens == 0


def test_prompts(tmp_path: Path) -> None:
    folder = write(tmp_path, flags("lasttoken"))
    (folder / "config.json").write_text("{}")
    file = folder / "config_sentence_transformers.json"
    prompts = {"query": "q: ", "passage": "p: ", "sts": "s: "}
    file.write_text(json.dumps({"prompts": prompts, "default_prompt_name": "sts", "similarity_fn_name": "dot"}))
    found = read_sentences(folder)
    assert found.similarity == "dot"
    assert [found.prompt(name) for name in (None, "query", "passage")] == ["s: ", "q: ", "p: "]
    kinds = ("query", "search_query", "document", "passage", "search_document", "sts")
    assert [found.prompt(None, kind) for kind in kinds] == ["q: ", "q: ", "p: ", "p: ", "p: ", "s: "]
    assert Sentences().prompt(None, "query") == ""
    for asked in (("other", None), (None, "clustering")):
        with pytest.raises(RequestError, match="has the prompts: query, passage, sts"):
            found.prompt(*asked)
    for wrong in ({"prompts": [1]}, {"prompts": {"a": 1}}, {"default_prompt_name": "b"}, {"similarity_fn_name": "l2"}):
        file.write_text(json.dumps(wrong))
        with pytest.raises(LMKitError, match="config_sentence_transformers"):
            read_sentences(folder)


@pytest.mark.parametrize("path", ["../other", "/etc", "..", "a/b"])
def test_a_module_outside_the_checkpoint_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([module("Pooling", path)]))
    with pytest.raises(CheckpointError, match="inside the checkpoint"):
        read_sentences(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[1]", '[{"type": 1, "path": ""}]', "[", "[" * 100000])
def test_broken_files_are_errors(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(LMKitError):
        read_sentences(tmp_path)


def test_a_missing_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        read_sentences(write(tmp_path, None))


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
