"""A text that grows: what a program writes, and what the model generates."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypedDict, Unpack

from lmkit.api.generation import GenerationConfig
from lmkit.errors import ConfigError
from lmkit.program.model import Ids, Model, Prompt
from lmkit.program.trace import Node, Part, Span

OnPart = Callable[[Part], None]
PLAIN = {"temperature": 0.0, "max_new_tokens": 512}
NOT_HERE = {  # fields of GenerationConfig
    "do_sample": "temperature=0 is greedy, any other temperature samples",
    "logprobs": "gen gives text alone; select compares log-probabilities",
    "response_format": "use schema, regex or choices",
}
SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")  # characters that mean something in a pattern


class Sampling(TypedDict, total=False):
    """Fields of GenerationConfig. Decoding is greedy, up to 512 tokens, unless they say otherwise."""

    max_new_tokens: int | None
    min_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    ignore_eos: bool
    skip_special_tokens: bool


@dataclass
class Branch:
    """One text under way. A conversation begins with `system` or `user`, any other text with `+=`.

    `fork` gives branches that go on from here, each on its own. What they have in common is computed once, and its KV
    is kept once. Awaiting their calls together (asyncio.gather) runs them in one batch.
    """

    model: Model
    node: Node
    on_part: OnPart | None = None
    values: dict[str, str] = field(default_factory=dict)  # of the variables, by name
    _messages: tuple[Mapping[str, Any], ...] = ()
    _rendered: str | None = ""  # the text of the messages; None: not known yet
    _own: str = ""  # the text after the messages
    _known: tuple[str, Ids] = ("", ())  # the beginning of the text whose tokens are known, and these

    def __iadd__(self, text: str) -> Self:
        """Write. After a user's message this begins the assistant's turn."""
        if not isinstance(text, str):
            raise ConfigError(f"a branch takes text, got {type(text).__name__}")
        self.node.spans.append(Span("text", text))
        self._own += text
        return self

    def __getitem__(self, name: str) -> str:
        """The value of a variable."""
        if name not in self.values:
            known = ", ".join(self.values) or "none"
            raise ConfigError(f"this branch has no variable {name!r}; it has: {known}")
        return self.values[name]

    def system(self, text: str) -> None:
        self._say("system", text)

    def user(self, text: str) -> None:
        """Add a user's message. What the assistant said before it is its turn."""
        self._say("user", text)

    def _say(self, role: str, text: str) -> None:
        if self._own and not self._messages:
            raise ConfigError(f"{role}(...) behind plain text: a conversation begins with system(...) or user(...)")
        turn: tuple[Mapping[str, Any], ...] = ({"role": "assistant", "content": self._own},) if self._own else ()
        self._messages += (*turn, {"role": role, "content": text})
        self._rendered, self._own = None, ""
        self.node.spans.append(Span("text", text, role=role))

    async def gen(
        self,
        name: str = "",
        *,
        schema: Mapping[str, Any] | None = None,
        regex: str | None = None,
        choices: Sequence[str] | None = None,
        **sampling: Unpack[Sampling],
    ) -> str:
        """Generate text, append it and return it. With a name it is also a variable of the branch.

        It is JSON that follows `schema`, or a text that matches `regex`, or one of `choices`, if one of them is given.
        Raises ConfigError or RequestError.
        """
        for given in NOT_HERE.keys() & sampling.keys():
            raise ConfigError(f"gen takes no {given}: {NOT_HERE[given]}")
        options: dict[str, Any] = {**PLAIN, **sampling, "response_format": _form(schema, regex, choices)}
        config = GenerationConfig(**options)
        whole = await self.text()
        prompt = self._prompt(whole)
        on_part = self.on_part
        show = None if on_part is None else (lambda text: on_part(Part(self.node.path, name, text)))
        answer = await self.model.generate(prompt, config, show)
        span = Span(
            "gen",
            answer.text,
            name,
            reused=answer.num_cached,
            computed=len(answer.prompt_ids) - answer.num_cached,
            generated=answer.num_tokens,
            drafted=answer.num_tokens - answer.num_steps,
        )
        if answer.ids is None:
            self._known = whole, answer.prompt_ids
        else:
            self._known = whole + answer.text, answer.prompt_ids + answer.ids
        return self._append(name, answer.text, span)

    async def select(self, choices: Sequence[str], name: str = "") -> str:
        """Append and return the choice whose tokens have the highest mean log-probability here.

        Choices that begin alike are computed once after the text so far, and their last tokens not at all. Raises
        ConfigError or RequestError.
        """
        _check_texts(choices, "select")
        whole = await self.text()
        if not whole:
            raise ConfigError("select: write some text first")
        scores = await self.model.score(self._prompt(whole), list(choices))
        best = max(range(len(choices)), key=lambda i: scores[i].mean)
        text = choices[best]
        computed = sum(len(score.ids) - score.num_cached for score in scores)
        span = Span(
            "select",
            text,
            name,
            reused=sum(score.num_cached for score in scores),
            computed=computed,
            scores={choice: score.mean for choice, score in zip(choices, scores, strict=True)},
        )
        self._known = whole + text, scores[best].ids
        return self._append(name, text, span)

    def _append(self, name: str, text: str, span: Span) -> str:
        self._own += text
        self.node.spans.append(span)
        if name:
            self.values[name] = text
        return text

    def fork(self, count: int) -> list[Branch]:
        """Branches that go on from here."""
        return [replace(self, node=self.node.fork(), values=dict(self.values)) for _ in range(count)]

    async def text(self) -> str:
        """The whole text so far; of a conversation, as the chat template writes it."""
        if self._rendered is None:
            self._rendered = await self.model.render(self._messages)
        return self._rendered + self._own

    def _prompt(self, whole: str) -> Prompt:
        text, ids = self._known
        if not (ids and whole.startswith(text)):  # if not, the template wrote an earlier turn in another way
            text, ids = "", ()
        return Prompt(ids, whole[len(text) :], is_chat=bool(self._messages))


def _check_texts(texts: Sequence[str], where: str) -> None:
    if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"{where}: expected a list of one or more texts that are not empty")


def _form(schema: Any, regex: str | None, choices: Sequence[str] | None) -> dict[str, Any] | None:
    """The response_format that says what the answer may be."""
    given = [name for name, value in (("schema", schema), ("regex", regex), ("choices", choices)) if value is not None]
    if len(given) > 1:
        raise ConfigError(f"gen: {' and '.join(given)} do not go together; give one of them")
    if schema is not None:
        if not isinstance(schema, Mapping):
            raise ConfigError(
                "gen: schema: expected a JSON schema as a dict; model_json_schema() of pydantic gives one"
            )
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    if choices is not None:
        _check_texts(choices, "gen: choices")
        regex = "|".join(SPECIAL.sub(r"\\\g<0>", text) for text in choices)
    return None if regex is None else {"type": "regex_schema", "regex_schema": regex}
