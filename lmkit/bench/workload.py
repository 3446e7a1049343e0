"""Workloads: conversations of one or more turns, random ones of exact lengths or those of a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lmkit.bench.config import DEFAULT_OUTPUT_LEN, WorkloadConfig
from lmkit.bench.dataset import Entry, Message, read_dataset
from lmkit.bench.synthetic import TextMaker, length_range
from lmkit.errors import ConfigError
from lmkit.text import Tokenizer


@dataclass(frozen=True)
class Turn:
    """The messages before the model's next answer."""

    messages: tuple[Message, ...]
    max_tokens: int


@dataclass(frozen=True)
class Conversation:
    turns: tuple[Turn, ...]
    is_chat: bool  # has roles; else plain text that the model continues


@dataclass
class Dialogue:
    """A running conversation. Each turn contains all earlier ones with the model's own answers."""

    is_chat: bool
    messages: list[Message] = field(default_factory=list)

    def ask(self, turn: Turn) -> None:
        self.messages = [*self.messages, *turn.messages]

    def answer(self, text: str) -> None:
        self.messages = [*self.messages, {"role": "assistant", "content": text}]

    @property
    def text(self) -> str:
        """The text for a model without roles."""
        return ("\n\n" if self.is_chat else "").join(message["content"] for message in self.messages)

    def token_ids(self, tokenizer: Tokenizer, *, chat: bool) -> list[int]:
        """The tokens that a model gets, `chat` or plain. A model without a chat template gets plain text."""
        if chat and tokenizer.chat_template is not None:
            return tokenizer.encode_chat(self.messages)
        return tokenizer.encode(self.text)


def make_workload(config: WorkloadConfig, tokenizer: Tokenizer | None, *, chat: bool) -> list[Conversation]:
    """`config.num_prompts` conversations. A smaller data set is used again from the beginning.

    `chat`: random prompts are messages of a user. Raises ConfigError for options that do not go together, and if random
    text or a data set lacks something.
    """
    if config.dataset is not None:
        if config.num_prefixes or config.prefix_len or config.range_ratio:
            raise ConfigError("--num-prefixes, --prefix-len and --range-ratio are for random prompts, not a --dataset")
        return _from_dataset(config, Path(config.dataset), tokenizer)
    if tokenizer is None:
        raise ConfigError("random prompts of exact lengths need --tokenizer: the model's folder or its Hub name")
    if bool(config.num_prefixes) != bool(config.prefix_len):
        raise ConfigError("--num-prefixes and --prefix-len belong together")
    return list(_random(config, tokenizer, chat))


def _random(config: WorkloadConfig, tokenizer: Tokenizer, chat: bool) -> Iterator[Conversation]:
    rng = np.random.default_rng(config.seed)
    maker = TextMaker(tokenizer, rng)

    def plain(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    def whole(text: str) -> int:
        return prompt_length(tokenizer, text, chat)

    prefixes = [maker.text(config.prefix_len, plain) for _ in range(config.num_prefixes)] or [""]
    inputs = length_range(config.input_len, config.range_ratio)
    outputs = length_range(config.output_len or DEFAULT_OUTPUT_LEN, config.range_ratio)
    for _ in range(config.num_prompts):
        turns = []
        for turn in range(config.turns):
            prefix = prefixes[int(rng.integers(len(prefixes)))] if turn == 0 else ""
            length = int(rng.integers(inputs[0], inputs[1] + 1)) + (config.prefix_len if turn == 0 else 0)
            text = prefix + maker.text(length, _after(prefix, whole if turn == 0 else plain))
            max_tokens = int(rng.integers(outputs[0], outputs[1] + 1))
            turns.append(Turn(({"role": "user", "content": text},), max_tokens))
        yield Conversation(tuple(turns), is_chat=chat)


def _after(prefix: str, measure: Callable[[str], int]) -> Callable[[str], int]:
    return lambda text: measure(prefix + text)


def prompt_length(tokenizer: Tokenizer, text: str, chat: bool) -> int:
    """The tokens of `text` as a prompt, with those that the tokenizer or the chat template adds."""
    if chat and tokenizer.chat_template is not None:
        return len(tokenizer.encode_chat([{"role": "user", "content": text}]))
    return len(tokenizer.encode(text))


def _from_dataset(config: WorkloadConfig, path: Path, tokenizer: Tokenizer | None) -> list[Conversation]:
    entries = read_dataset(path)
    order = np.random.default_rng(config.seed).permutation(len(entries)).tolist()
    made = [_conversation(entries[i], config, tokenizer) for i in order[: config.num_prompts]]
    return [made[i % len(made)] for i in range(config.num_prompts)]


def _conversation(entry: Entry, config: WorkloadConfig, tokenizer: Tokenizer | None) -> Conversation:
    """The conversation of a data set's entry.

    With one turn, messages that end with the user's are sent unchanged, with the data set's own answers. Otherwise the
    data set's answers only set the lengths of the model's.
    """
    if config.turns == 1 and entry.messages[-1]["role"] == "user":
        limit = entry.max_tokens or config.output_len or DEFAULT_OUTPUT_LEN
        return Conversation((Turn(tuple(entry.messages), limit),), entry.is_chat)
    turns: list[Turn] = []
    said: list[Message] = []
    for message in entry.messages:
        if message["role"] != "assistant":
            said.append(message)
        elif said:
            turns.append(Turn(tuple(said), _max_tokens(entry, config, tokenizer, message["content"])))
            said = []
    if said:
        turns.append(Turn(tuple(said), _max_tokens(entry, config, tokenizer, None)))
    return Conversation(tuple(turns[: config.turns]), entry.is_chat)


def _max_tokens(entry: Entry, config: WorkloadConfig, tokenizer: Tokenizer | None, answer: str | None) -> int:
    if limit := entry.max_tokens or config.output_len:
        return limit
    if answer and tokenizer is not None:
        return max(1, len(tokenizer.encode(answer, add_special_tokens=False)))
    return DEFAULT_OUTPUT_LEN
