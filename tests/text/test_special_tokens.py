"""Special tokens beside tokenizer.json: named, coded and decoded as transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from lmkit.errors import CheckpointError
from lmkit.text import Tokenizer
from tests.text.samples import write_folder

NAMES = ("bos_token", "eos_token", "pad_token", "image_token", "boi_token")
TEMPLATE = "|".join(f"{{{{ {name} }}}}" for name in NAMES)
TEXT = "a <|im_end|> <new> b <late>"
NEW = 4096  # the first id that the demo's tokenizer does not have


def added(text: str, **flags: bool) -> dict[str, Any]:
    return dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False) | flags | {"content": text}


def typed(token: dict[str, Any]) -> dict[str, Any]:
    """A token as tokenizer_config.json has it."""
    return token | {"__type": "AddedToken"}


CASES: dict[str, dict[str, Any]] = {
    "only in the map": {"map": {"bos_token": "<|im_start|>", "eos_token": added("<|im_end|>")}},
    "the map wins": {"config": {"eos_token": "<|im_start|>"}, "map": {"eos_token": "<|im_end|>"}},
    "the config wins with all its tokens": {
        "config": {"eos_token": "<|im_start|>", "added_tokens_decoder": {str(NEW): added("<new>", special=True)}},
        "map": {"eos_token": "<|im_end|>"},
    },
    "a token that the map adds": {"map": {"pad_token": added("<new>", rstrip=True)}},
    "two in the order of their names": {"map": {"pad_token": "<new>", "bos_token": "<late>"}},
    "names of the model's own": {"config": {"image_token": typed(added("<new>")), "boi_token": "<|im_end|>"}},
    "an object of names": {"config": {"extra_special_tokens": {"image_token": "<new>", "boi_token": "<late>"}}},
    "an object in the map": {"map": {"extra_special_tokens": {"image_token": "<new>"}}},
    "older list": {"config": {"additional_special_tokens": ["<new>", "<|im_end|>"]}},
    "older list in the map": {"map": {"additional_special_tokens": ["<new>"]}},
    "both lists": {"config": {"extra_special_tokens": ["<late>"]}, "map": {"extra_special_tokens": ["<new>"]}},
    "ids alone": {"added": {"<late>": NEW + 1, "<new>": NEW}},
    "ids alone, one is named": {"added": {"<new>": NEW}, "map": {"eos_token": "<new>"}},
    "ids alone, one is listed": {"added": {"<new>": NEW}, "config": {"additional_special_tokens": ["<new>"]}},
    "no special flag in the decoder": {
        "config": {"eos_token": "<new>", "added_tokens_decoder": {str(NEW): added("<new>", special=False)}}
    },
    "a word of the vocabulary": {"map": {"eos_token": "b"}},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_tokens_of_older_files_are_those_of_transformers(tmp_path: Path, case: dict[str, Any]) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE} | case.get("config", {})
    folder = write_folder(tmp_path, tokenizer_config=config)
    for key, name in (("map", "special_tokens_map.json"), ("added", "added_tokens.json")):
        if key in case:
            (tmp_path / name).write_text(json.dumps(case[key]))
    theirs, own = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "hi"}]
    assert own.render_chat(chat) == theirs.apply_chat_template(chat, tokenize=False)
    assert own.eos_token_ids == tuple(filter(None, [theirs.eos_token_id]))
    ids = theirs(TEXT, add_special_tokens=False)["input_ids"]
    assert own.encode(TEXT, add_special_tokens=False) == ids
    for skip in (True, False):
        assert own.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_names_of_tokens_are_no_variables_of_a_request(tmp_path: Path) -> None:
    template = "{{ image_token }}{{ thinking }}"
    folder = write_folder(tmp_path, tokenizer_config={"image_token": "<new>", "chat_template": template})
    chosen = Tokenizer.from_pretrained(folder).chat_template
    assert chosen is not None
    assert chosen.parameters == {"thinking"}


@pytest.mark.parametrize("content", ['{"<new>": 9}', '{"<new>": "4096"}', "[1]"])
def test_ids_that_cannot_be_are_refused(tmp_path: Path, content: str) -> None:
    folder = write_folder(tmp_path)
    (tmp_path / "added_tokens.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"added_tokens\.json"):
        Tokenizer.from_pretrained(folder)
