"""Conversations keep their own tokens: the text stays the same, whatever the tokens were and whoever edits it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lmkit.text import ChatTemplate, EncodedTurn, TokenHistory, Tokenizer
from lmkit.text.history import num_common
from tests.text.samples import TOKENIZERS

END_TAGGED = (
    "{% for m in messages %}{{ START }}{{ m['role'] }}\n{{ m['content'] }}{{ END }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ START }}assistant\n{% endif %}"
)
UNMARKED = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WORDS = ["Hello", " world", "a", "ab ", "é", "日本", "naïve", "🙂", "\n", "  ", "<tool>", "<|im_", "end|>", "</s>"]


def with_template(tokenizer: Tokenizer, source: str) -> Tokenizer:
    llama = tokenizer.backend.token_to_id("</s>") is not None
    start, end = ("<s>", "</s>") if llama else ("<|im_start|>", "<|im_end|>")
    template = ChatTemplate(source.replace("{{ START }}", start).replace("{{ END }}", end))
    return Tokenizer(tokenizer.backend, chat_template=template)


# Those of the samples that give a text back as it was: the others' decoders do not fit what their models encode.
FAITHFUL = ("demo", "llama", "strip two", "gemma", "fallback first")
TALKING = {name: with_template(TOKENIZERS[name], END_TAGGED) for name in FAITHFUL}


def plain_text(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(map(tokenizer.token_bytes, ids))


def random_answer(rng: random.Random, tokenizer: Tokenizer) -> list[int]:
    """Tokens in an order that no tokenizer would choose, that spell valid text."""
    usual = tokenizer.encode("".join(rng.choices(WORDS, k=rng.randrange(8))), add_special_tokens=False)
    if rng.random() < 0.5:
        return [token for token in usual if token not in tokenizer.special_ids]
    ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(12))]
    return [i for i in ids if "\ufffd" not in tokenizer.token_text(i) and i not in tokenizer.special_ids]


def answer_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return plain_text(tokenizer, ids).decode()


@pytest.mark.parametrize("name", TALKING)
def test_the_text_is_that_of_plain_encoding_whatever_the_tokens_are(name: str) -> None:
    tokenizer = TALKING[name]
    rng = random.Random(name)
    num_known = 0
    for _ in range(60):
        messages: list[dict[str, str]] = []
        history = TokenHistory()
        for _ in range(rng.randrange(1, 6)):
            messages.append({"role": "user", "content": "".join(rng.choices(WORDS, k=rng.randrange(1, 6)))})
            text = tokenizer.render_chat(messages)
            turn = history.encode(tokenizer, text)
            plain = tokenizer.encode(text, add_special_tokens=False)
            assert plain_text(tokenizer, turn.ids) == plain_text(tokenizer, plain)
            assert name != "demo" or tokenizer.decode(turn.ids, skip_special_tokens=False) == text
            assert len(history.turns) == len(turn.history.turns), "an unchanged conversation lost its tokens"
            num_known += turn.num_known
            answer = random_answer(rng, tokenizer)
            history = turn.answered(answer)
            messages.append({"role": "assistant", "content": answer_text(tokenizer, answer)})
    assert num_known > 1000


def converse(tokenizer: Tokenizer, *turns: tuple[str, list[int]]) -> tuple[list[dict[str, str]], TokenHistory]:
    messages: list[dict[str, str]] = []
    history = TokenHistory()
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        history = history.encode(tokenizer, tokenizer.render_chat(messages)).answered(answer)
        messages.append({"role": "assistant", "content": answer_text(tokenizer, answer)})
    return messages, history


def odd(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token a character, which is not what the tokenizer makes of it."""
    ids = [token for char in text for token in tokenizer.encode(char)]
    assert ids != tokenizer.encode(text)
    return ids


def ask(tokenizer: Tokenizer, messages: list[dict[str, str]], history: TokenHistory) -> EncodedTurn:
    return history.encode(tokenizer, tokenizer.render_chat([*messages, {"role": "user", "content": "next"}]))


def test_answers_keep_their_own_tokens() -> None:
    demo = TALKING["demo"]
    first, second = odd(demo, "Hello there"), odd(demo, "import os")
    messages, history = converse(demo, ("one", first), ("two", second))
    turn = ask(demo, messages, history)
    tail = demo.encode("<|im_end|>\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n")
    assert turn.ids[turn.num_known :] == tail
    assert turn.ids[: turn.num_known][-len(second) :] == second
    joined = " ".join(map(str, turn.ids))
    assert " ".join(map(str, first)) in joined


def test_an_edited_turn_is_encoded_anew_and_those_before_it_are_not() -> None:
    demo = TALKING["demo"]
    first = odd(demo, "Hello there")
    messages, history = converse(demo, ("one", first), ("two", odd(demo, "import os")))
    messages[3] = {"role": "assistant", "content": "import sys"}
    turn = ask(demo, messages, history)
    assert len(turn.history.turns) == 1
    assert turn.ids[: turn.num_known][-len(first) :] == first
    assert turn.ids[turn.num_known :] == demo.encode(turn.rest)
    messages[0] = {"role": "user", "content": "ONE"}
    assert ask(demo, messages, history).ids == demo.encode_chat([*messages, {"role": "user", "content": "next"}])


def test_an_answer_that_goes_on_in_the_text_is_not_cut_there() -> None:
    """Without a special token at the seam, plain encoding might join what is on both sides of it."""
    demo = TALKING["demo"]
    messages, history = converse(demo, ("one", odd(demo, "Hello")))
    longer = [messages[0], {"role": "assistant", "content": "Hello there"}]
    assert ask(demo, longer, history).num_known == 0
    unmarked = with_template(demo, UNMARKED)
    messages, history = converse(unmarked, ("one", odd(demo, "Hello")))
    assert history.turns
    assert ask(unmarked, messages, history).num_known == 0


def test_an_answer_that_ends_inside_a_character_adds_nothing() -> None:
    demo = TALKING["demo"]
    half = next(i for i in range(demo.vocab_size) if demo.token_bytes(i) == b"\xe6")
    turn = TokenHistory().encode(demo, demo.render_chat([{"role": "user", "content": "one"}]))
    assert turn.answered([half]) == TokenHistory()


def test_forks_are_independent() -> None:
    demo = TALKING["demo"]
    messages, history = converse(demo, ("one", odd(demo, "Hello there")))
    turn = ask(demo, messages, history)
    left, right = turn.answered(odd(demo, "left")), turn.answered(odd(demo, "right"))
    assert left != right
    assert left.turns[:-1] == right.turns[:-1] == history.turns
    assert history == replace(history)


def test_memory_is_counted() -> None:
    demo = TALKING["demo"]
    _, history = converse(demo, ("one", odd(demo, "Hello there")))
    (turn,) = history.turns
    assert history.num_bytes == 4 * len(turn.text) + 4 * len(turn.ids)


@pytest.mark.parametrize("name", TALKING)
def test_another_rendering_is_encoded_from_where_it_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were encoded whole, wherever it was edited."""
    tokenizer, rng = TALKING[name], random.Random(name)
    contents = ["".join(rng.choices(WORDS, k=6)) for _ in range(9)]
    text = tokenizer.render_chat([{"role": "user", "content": content} for content in contents])
    turn = TokenHistory().encode(tokenizer, text)
    for _ in range(60):
        at, end = sorted(rng.choices(range(len(text) + 1), k=2))
        other = text[:at] + "".join(rng.choices(WORDS, k=2)) + text[rng.choice([at, end]) :]
        assert turn.rendered_anew(other) == tokenizer.encode(other, add_special_tokens=False)
    encoded: list[str] = []

    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        encoded.append(text)
        return real(text, add_special_tokens)

    real = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", encode)
    turn.rendered_anew(text + "more")
    assert len(encoded) == 2
    assert max(map(len, encoded)) < 40


def test_what_is_equal_is_counted() -> None:
    assert [num_common(a, b) for a, b in (("", "a"), ("abc", "abc"), ("abcd", "abce"), ("x", "y"))] == [0, 3, 3, 0]
    assert num_common([1, 2, 3], [1, 2]) == 2
