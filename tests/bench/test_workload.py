"""Prompts: exact lengths of random ones, and what a data set's file may hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from lmkit.bench.config import DEFAULT_OUTPUT_LEN, WorkloadConfig
from lmkit.bench.synthetic import TextMaker
from lmkit.bench.workload import Conversation, Dialogue, Turn, make_workload, prompt_length
from lmkit.errors import ConfigError
from lmkit.text import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(demo_model)


def first_text(conversation: Conversation) -> str:
    return conversation.turns[0].messages[-1]["content"]


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("length", [20, 333])
def test_random_prompts_have_the_length_asked_for(tokenizer: Tokenizer, chat: bool, length: int) -> None:
    config = WorkloadConfig(num_prompts=8, input_len=length, output_len=7)
    made = make_workload(config, tokenizer, chat=chat)
    texts = [first_text(c) for c in made]
    assert {prompt_length(tokenizer, text, chat) for text in texts} == {length}
    assert len(set(texts)) == 8
    assert {turn.max_tokens for c in made for turn in c.turns} == {7}
    assert made == make_workload(config, tokenizer, chat=chat), "the same seed"
    assert first_text(make_workload(WorkloadConfig(seed=1), tokenizer, chat=chat)[0]) != texts[0]


def test_range_of_lengths(tokenizer: Tokenizer) -> None:
    config = WorkloadConfig(num_prompts=200, input_len=20, output_len=10, range_ratio=0.5)
    made = make_workload(config, tokenizer, chat=False)
    lengths = [prompt_length(tokenizer, first_text(c), False) for c in made]
    assert (min(lengths), max(lengths)) == (10, 30)
    outputs = [c.turns[0].max_tokens for c in made]
    assert (min(outputs), max(outputs)) == (5, 15)


def test_shared_prefixes(tokenizer: Tokenizer) -> None:
    config = WorkloadConfig(num_prompts=20, input_len=16, num_prefixes=3, prefix_len=40)
    rows = [tokenizer.encode(first_text(c)) for c in make_workload(config, tokenizer, chat=False)]
    assert {len(row) for row in rows} == {56}
    assert len({tuple(row[:40]) for row in rows}) == 3
    assert len({tuple(row) for row in rows}) == 20


def test_turns_carry_what_was_said(tokenizer: Tokenizer) -> None:
    (conversation,) = make_workload(WorkloadConfig(num_prompts=1, input_len=24, turns=3), tokenizer, chat=True)
    later = [turn.messages[0]["content"] for turn in conversation.turns[1:]]
    assert [len(tokenizer.encode(text, add_special_tokens=False)) for text in later] == [24, 24]
    dialogue = Dialogue(True)
    dialogue.ask(conversation.turns[0])
    dialogue.answer("yes")
    dialogue.ask(conversation.turns[1])
    assert [m["role"] for m in dialogue.messages] == ["user", "assistant", "user"]
    assert dialogue.token_ids(tokenizer, chat=True) == tokenizer.encode_chat(dialogue.messages)
    plain = Dialogue(False, dialogue.messages)
    assert plain.text == first_text(conversation) + "yes" + later[0]


def test_a_tokenizer_of_characters() -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={chr(c): c - 32 for c in range(32, 127)}, merges=[]))
    backend.decoder = decoders.Fuse()
    characters = Tokenizer(backend)
    text = TextMaker(characters, np.random.default_rng(0)).text(50, lambda t: len(characters.encode(t)))
    assert len(text) == 50


def test_a_tokenizer_that_puts_a_space_before_the_text() -> None:
    pieces = ["▁", *"abcdexyz", "ab", "de", "▁x", "▁ab", "▁de"]
    merges = [("a", "b"), ("d", "e"), ("▁", "x"), ("▁", "ab"), ("▁", "de")]
    backend = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    words = Tokenizer(backend)
    maker = TextMaker(words, np.random.default_rng(0))
    for length in (5, 50):
        text = maker.text(length, lambda t: len(words.encode(t)))
        assert len(words.encode(text)) == length
        assert set(text.split()) == {"ab", "de"}


def test_what_cannot_be_made(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="ask for more"):
        make_workload(WorkloadConfig(input_len=1), tokenizer, chat=True)
    with pytest.raises(ConfigError, match="--tokenizer"):
        make_workload(WorkloadConfig(), None, chat=True)
    with pytest.raises(ConfigError, match="belong together"):
        make_workload(WorkloadConfig(num_prefixes=2), tokenizer, chat=True)
    with pytest.raises(ConfigError, match="not a --dataset"):
        make_workload(WorkloadConfig(dataset="x", prefix_len=2), tokenizer, chat=True)


# ---- data sets


def dataset(path: Path, content: Any, **options: Any) -> list[Conversation]:
    file = path / "data.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return make_workload(WorkloadConfig(**{"num_prompts": 4, "dataset": str(file), **options}), None, chat=True)


SHAREGPT = [
    {"id": "a", "conversations": [
        {"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"},
        {"from": "human", "value": "more"}, {"from": "gpt", "value": "no"}]},
    {"id": "b", "conversations": [{"from": "gpt", "value": "begins with an answer"}]},
]  # fmt: skip


def test_sharegpt(tmp_path: Path) -> None:
    made = dataset(tmp_path, SHAREGPT)
    assert made == [Conversation((Turn(({"role": "user", "content": "hi"},), DEFAULT_OUTPUT_LEN),), True)] * 4
    (two,) = dataset(tmp_path, SHAREGPT, num_prompts=1, turns=5, output_len=9)
    assert [(turn.messages[0]["content"], turn.max_tokens) for turn in two.turns] == [("hi", 9), ("more", 9)]


def test_answers_are_as_long_as_the_data_sets(tmp_path: Path, tokenizer: Tokenizer) -> None:
    dataset(tmp_path, SHAREGPT)
    config = WorkloadConfig(num_prompts=1, dataset=str(tmp_path / "data.json"))
    (made,) = make_workload(config, tokenizer, chat=True)
    assert made.turns[0].max_tokens == len(tokenizer.encode("hello", add_special_tokens=False))


def test_json_lines(tmp_path: Path) -> None:
    lines = [
        {"prompt": "complete this", "max_tokens": 5},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"},
                      {"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}]},
    ]  # fmt: skip
    made = dataset(tmp_path, "\n".join(json.dumps(line) for line in lines) + "\n\n", num_prompts=2)
    plain, chat = sorted(made, key=lambda c: c.is_chat)
    assert plain == Conversation((Turn(({"role": "user", "content": "complete this"},), 5),), False)
    assert [m["content"] for m in chat.turns[0].messages] == ["s", "u", "a", "v"], "sent with its own answers"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": ', "line 2: not valid JSON"),
        ('{"prompt": "a"}\n[1]', "line 2: expected an object"),
        ('{"prompt": ""}', "line 1: expected"),
        ('{"prompt": "\\ud800"}', "line 1: not valid Unicode"),
        ('{"prompt": "a", "max_tokens": 0}', "line 1: max_tokens"),
        ('{"messages": [{"role": "user"}]}', "line 1: messages"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "line 1: messages: none"),
        ('{"messages": "x"}', "line 1: messages: expected a list"),
        ('[{"conversations": [{"from": "human"}]}]', "entry 0: conversations"),
        ("[1", "not valid JSON"),
        ("[]", "has no conversation"),
        ("", "has no conversation"),
    ],
)
def test_bad_lines_are_one_clear_error(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        dataset(tmp_path, content)
    assert "\n" not in str(caught.value)
    assert "data.json" in str(caught.value)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        make_workload(WorkloadConfig(dataset=str(tmp_path / "data.json")), None, chat=True)
    with pytest.raises(ConfigError, match="cannot be read"):
        make_workload(WorkloadConfig(dataset=str(tmp_path / "none")), None, chat=True)
