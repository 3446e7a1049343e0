"""What a program runs on: a pipeline of this process, or a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from lmkit.api.generation import GenerationConfig

Messages = Sequence[Mapping[str, Any]]
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Prompt:
    """A text: the tokens with which it begins, and the text after them."""

    ids: Ids
    text: str
    is_chat: bool  # a chat template wrote it, with its special tokens


@dataclass(frozen=True)
class Answer:
    """What followed a prompt."""

    prompt_ids: Ids
    ids: Ids | None  # of the text; None if a stop string cut it
    text: str
    num_tokens: int  # that were generated, with the one that ended it
    num_steps: int  # of the engine; fewer than tokens if draft tokens were right
    num_cached: int  # tokens of the prompt whose KV was found


@dataclass(frozen=True)
class Score:
    """One of several texts that may follow a prompt."""

    ids: Ids  # of the prompt and the text
    logprobs: tuple[float, ...]  # of each token of the text (natural log)
    num_cached: int

    @property
    def mean(self) -> float:
        return sum(self.logprobs) / len(self.logprobs)


class Model(Protocol):
    """All calls raise RequestError for what the model cannot do."""

    async def render(self, messages: Messages) -> str:
        """The text of a conversation, up to where the assistant speaks."""

    async def generate(self, prompt: Prompt, config: GenerationConfig, on_text: Callable[[str], None] | None) -> Answer:
        """Continue a prompt. `on_text` gets the text as it comes."""

    async def score(self, prompt: Prompt, texts: Sequence[str]) -> list[Score]:
        """The log-probabilities of texts behind a prompt that is not empty."""
