"""The tokenizer of a GGUF file: ids of llama.cpp, special tokens, templates, sampling, broken metadata.

`gguf_token_ids.json.xz` has texts of all scripts and the ids that llama.cpp (October 2026) gives them: of a small
vocabulary whose merges cross every border between words, under each pre-tokenizer, and of two published models.
"""

from __future__ import annotations

import json
import lzma
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from lmkit import small_files
from lmkit.errors import CheckpointError, LMKitError, UnsupportedError
from lmkit.formats.gguf_file import GgufFile
from lmkit.formats.gguf_tokenizer import generation_config, tokenizer_config, tokenizer_json
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.text import Tokenizer
from lmkit.text.infill import find_marks
from lmkit.text.special_tokens import CONFIG, read_config
from tests.formats.gguf_writer import write
from tests.formats.test_gguf import EMBED, LLAMA

G = "tokenizer.ggml."
TEXTS = ["", "Hello, it's 12345.", " naïve\n\n  façade\t", "<|im_start|>user\nHi<|im_end|>", "漢字 🙂\r\n", "a  b   c"]


@cache
def frozen() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(lzma.decompress((Path(__file__).parent / "gguf_token_ids.json.xz").read_bytes()))
    return data


def demo_metadata() -> dict[str, Any]:
    """The bundled model's tokenizer as llama.cpp's converter writes it."""
    spec = json.loads((DEMO_FOLDER / "tokenizer.json").read_text())
    special = {token["id"] for token in spec["added_tokens"]}
    tokens = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
    return {
        "general.architecture": "llama",
        G + "model": "gpt2",
        G + "pre": "gpt-2",
        G + "tokens": tokens,
        G + "token_type": [3 if i in special else 1 for i in range(len(tokens))],
        G + "merges": merges,
        G + "bos_token_id": 0,
        G + "eos_token_id": 2,
    }


def opened(folder: Path, metadata: dict[str, Any]) -> GgufFile:
    write(folder / "m.gguf", metadata, {})
    return GgufFile(folder / "m.gguf")


def backend(file: GgufFile) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(tokenizer_json(file))


@pytest.mark.parametrize("names", ["fim_pre fim_suf fim_mid", "prefix suffix middle"])
def test_tokens_for_filling_in_are_those_that_the_file_names(tmp_path: Path, names: str) -> None:
    ids = {f"{G}{name}_token_id": id for name, id in zip(names.split(), (300, 301, 302), strict=True)}
    write(tmp_path / "m.gguf", LLAMA | demo_metadata() | ids, EMBED)
    found = find_marks(Tokenizer.from_pretrained(tmp_path / "m.gguf"))
    assert found is not None
    assert (found.prefix, found.suffix, found.middle) == (300, 301, 302)


def test_the_demo_s_tokenizer_comes_back(tmp_path: Path) -> None:
    file = opened(tmp_path, demo_metadata() | {"tokenizer.chat_template": "{{ messages }}"})
    before, after = tokenizers.Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json")), backend(file)
    for text in TEXTS:
        ids = before.encode(text).ids
        assert after.encode(text).ids == ids
        assert after.decode(ids) == before.decode(ids)
    config = tokenizer_config(file)
    assert (config["bos_token"], config["eos_token"]) == ("<|endoftext|>", "<|im_end|>")
    assert (config["add_bos_token"], config["chat_template"]) == (False, "{{ messages }}")
    assert generation_config(file) == {"bos_token_id": 0, "eos_token_id": [0, 2]}


@pytest.mark.parametrize("pre", sorted(frozen()["pre"]))
def test_words_are_cut_as_llama_cpp_cuts_them(tmp_path: Path, pre: str) -> None:
    data = frozen()
    ends = len(data["tokens"]) - 6
    metadata = {
        G + "model": "gpt2", G + "pre": pre, G + "tokens": data["tokens"], G + "token_type": data["token_type"],
        G + "merges": data["merges"], G + "bos_token_id": ends, G + "eos_token_id": ends + 1,
    }  # fmt: skip
    tokenizer = backend(opened(tmp_path, metadata))
    for number, ids in zip(data["chosen"], data["ids"][data["pre"][pre]], strict=True):
        text = data["texts"][number]
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text


@pytest.mark.skipif("LMKIT_REAL_MODELS" not in os.environ, reason="LMKIT_REAL_MODELS names no folder of models")
@pytest.mark.parametrize("name", sorted(frozen()["real"]))
def test_published_models_give_llama_cpp_s_ids(name: str) -> None:
    path = Path(os.environ["LMKIT_REAL_MODELS"]) / name
    if not path.exists():
        pytest.skip(f"{name} is not in LMKIT_REAL_MODELS")
    tokenizer = backend(GgufFile(path))
    for text, ids in zip(frozen()["texts"], frozen()["real"][name], strict=True):
        assert tokenizer.encode(text).ids == ids, text


def scored(*tokens: tuple[str, float, int]) -> dict[str, Any]:
    columns = [list(column) for column in zip(*tokens, strict=True)]
    return dict(zip([G + "tokens", G + "scores", G + "token_type"], columns, strict=True))


SPM = {G + "model": "llama"} | scored(
    ("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("<0xC3>", 0.0, 6), ("<0xA9>", 0.0, 6), ("▁", -9.0, 1),
    ("a", -8.0, 1), ("b", -7.0, 1), ("ab", -2.0, 1), ("▁a", -1.0, 1), ("▁ab", -3.0, 1), ("<x>", 0.0, 4),
)  # fmt: skip


def test_sentencepiece_merges_by_score(tmp_path: Path) -> None:
    tokenizer = backend(opened(tmp_path, SPM))
    assert tokenizer.encode("ab").tokens == ["<s>", "▁ab"]
    assert tokenizer.encode("bab", add_special_tokens=False).tokens == ["▁", "b", "ab"]
    assert tokenizer.encode("é<x>a</s>", add_special_tokens=False).tokens == [
        "▁", "<0xC3>", "<0xA9>", "<x>", "▁a", "</s>"
    ]  # fmt: skip
    assert tokenizer.decode([10, 3, 4, 5, 6]) == "abé a"
    bare = backend(opened(tmp_path, SPM | {G + "add_space_prefix": False, G + "add_bos_token": False}))
    assert bare.encode("ab a").tokens == ["ab", "▁a"]


def test_word_pieces_have_bert_s_marks(tmp_path: Path) -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁un", "able", "▁,", "▁able"]
    metadata = {
        G + "model": "bert", G + "tokens": tokens, G + "token_type": [3] * 4 + [1] * 4, G + "bos_token_id": 2,
        G + "seperator_token_id": 3, G + "unknown_token_id": 1, G + "padding_token_id": 0,
    }  # fmt: skip
    file = opened(tmp_path, metadata)
    assert backend(file).encode("Unable, ÀBLE?").tokens == ["[CLS]", "un", "##able", ",", "able", "[UNK]", "[SEP]"]
    pair = backend(file).encode("un", "able")
    assert (pair.tokens, pair.type_ids) == (["[CLS]", "un", "[SEP]", "able", "[SEP]"], [0, 0, 0, 1, 1])
    assert tokenizer_config(file)["cls_token"] == "[CLS]"
    assert "eos_token_id" not in generation_config(file)


def test_unigram_takes_the_best_sum(tmp_path: Path) -> None:
    metadata = {G + "model": "t5", G + "remove_extra_whitespaces": True, G + "precompiled_charsmap": []} | scored(
        ("<pad>", 0.0, 3), ("</s>", 0.0, 3), ("<unk>", 0.0, 2), ("▁", -3.0, 1), ("▁a", -2.0, 1), ("b", -2.5, 1),
        ("▁ab", -4.0, 1), ("a", -5.0, 1),
    )  # fmt: skip
    tokenizer = backend(opened(tmp_path, {k: v for k, v in metadata.items() if v != []}))
    assert tokenizer.encode("  ab   a☃☃ ").tokens == ["▁ab", "▁a", "☃☃", "</s>"]


def test_templates_and_sampling_come_along(tmp_path: Path) -> None:
    more = {
        "tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "B",
        "tokenizer.chat_templates": ["tool_use"],
        "general.sampling.temp": 0.6, "general.sampling.top_k": 20, G + "eot_token_id": 1,
        G + "padding_token_id": NO_ID,
    }  # fmt: skip
    file = opened(tmp_path, demo_metadata() | more)
    assert tokenizer_config(file)["chat_template"] == [
        {"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"},
    ]  # fmt: skip
    assert generation_config(file) == {
        "bos_token_id": 0, "eos_token_id": [0, 1, 2], "temperature": 0.6, "top_k": 20, "do_sample": True,
    }  # fmt: skip


NO_ID = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({G + "model": "rwkv"}, "tokenizer.ggml.model is 'rwkv'; lmkit reads gpt2"),
        ({G + "pre": "klingon"}, "tokenizer.ggml.pre 'klingon' is not known; lmkit knows .*llama-bpe"),
        ({G + "tokens": [1, 2]}, "tokens: expected a list of texts"),
        ({G + "tokens": ["a", "b", "a"]}, "token 'a' is there twice"),
        ({G + "token_type": [1]}, "token_type: expected 4096 numbers"),
        ({G + "merges": ["a nothing"]}, "merge 0, 'a nothing', is not of tokens"),
        ({G + "merges": [7]}, "merge 0, 7, is not of tokens"),
        ({G + "merges": []}, "merges is missing"),
        ({G + "eos_token_id": 9999}, "eos_token_id is 9999, and there are 4096 tokens"),
        ({G + "eos_token_id": "x"}, "eos_token_id is 'x', expected int"),
        ({G + "add_bos_token": 3}, "add_bos_token is 3, expected bool"),
        ({"tokenizer.chat_template": 1}, "chat template 'default' is 1, expected a text"),
        ({"tokenizer.chat_templates": ["rag"]}, "chat_templates names 'rag'"),
    ],
)
def test_broken_metadata_is_one_clear_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    file = opened(tmp_path, {k: v for k, v in (demo_metadata() | change).items() if v != []})
    with pytest.raises((CheckpointError, UnsupportedError), match=message) as error:
        tokenizer_json(file), tokenizer_config(file), generation_config(file)
    assert isinstance(error.value, LMKitError)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(file.path))


def test_one_reading_of_the_vocabulary_makes_all_small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are asked for many times, and a vocabulary of 262144 tokens takes a second to read."""
    write(tmp_path / "m.gguf", LLAMA | demo_metadata(), EMBED)
    asked: list[str] = []
    array = GgufFile.array
    monkeypatch.setattr(GgufFile, "array", lambda self, key: asked.append(key) or array(self, key))
    tokenizer = Tokenizer.from_pretrained(tmp_path / "m.gguf")
    assert tokenizer.eos_token_ids == (0, 2)
    assert small_files.exists(tmp_path / "m.gguf" / "tokenizer.json")
    assert asked.count(G + "tokens") == 1
    assert asked.count(G + "merges") == 1


def test_small_files_follow_a_file_that_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for name in ("one", "three"):
        write(path, demo_metadata() | {"tokenizer.chat_template": name}, {})
        assert read_config(path / CONFIG)["chat_template"] == name
