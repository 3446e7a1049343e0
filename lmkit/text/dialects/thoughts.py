"""How models reason: the marks around the reasoning, and around the answer after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Thought:
    """How reasoning stands before an answer."""

    name: str
    begin: str
    end: str
    before: tuple[str, ...] = ()  # marks that may stand before the answer itself
    after: tuple[str, ...] = ()  # and after it
    marks: tuple[str, ...] = ()  # in the chat templates of such models; () = `end` alone
    specials: tuple[str, ...] = ()  # the special tokens of the marks, if these are not special tokens themselves

    @property
    def around(self) -> tuple[str, ...]:
        return self.before + self.after


_OPEN, _CLOSE, _SEP = K3 = "<|open|>", "<|close|>", "<|sep|>"

# In the order in which a template is asked for their marks.
_ALL = (
    Thought("harmony", "<|channel|>", "<|end|>", marks=("<|channel|>", "<|message|>")),
    Thought("hy3", "<think:opensource>", "</think:opensource>", marks=("HYTK = ':opensource'",)),
    Thought("minimax_m3", "<mm:think>", "</mm:think>"),
    Thought(
        "kimi_k3",
        f"{_OPEN}think{_SEP}",
        f"{_CLOSE}think{_SEP}",
        before=(f"{_OPEN}response{_SEP}",),
        after=(f"{_CLOSE}response{_SEP}", f"{_CLOSE}message{_SEP}"),
        marks=(_OPEN, "open_tag('think'"),
        specials=K3,
    ),
    Thought("gemma4", "<|channel>thought", "<channel|>", specials=("<|channel>", "<channel|>")),
    Thought(
        "solar",
        "<|think|>",
        "<|end|>",
        before=("<|begin|>assistant", "<|content|>"),
        marks=("<|begin|>assistant<|think|>",),
        specials=("<|think|>", "<|end|>", "<|begin|>", "<|content|>"),
    ),
    Thought(
        "response",
        "<think>",
        "</think>",
        before=("<response>",),
        after=("</response>",),
        marks=("</think>", "<response></response>"),
    ),
    Thought("granite", "Here is my thought process:", "Here is my response:"),
    Thought("think", "<think>", "</think>"),
    Thought("mistral", "[THINK]", "[/THINK]"),
    Thought("seed_oss", "<seed:think>", "</seed:think>"),
    Thought(
        "cohere",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        before=("<|START_RESPONSE|>", "<|START_TEXT|>"),
        after=("<|END_RESPONSE|>", "<|END_TEXT|>"),
    ),
    Thought("apriel", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", after=("[END FINAL RESPONSE]",)),
)
THOUGHTS: Mapping[str, Thought] = {thought.name: thought for thought in _ALL}


def thought_of(template: str) -> Thought | None:
    """The reasoning whose marks a chat template has."""
    shown = (thought for thought in _ALL if all(mark in template for mark in thought.marks or (thought.end,)))
    return next(shown, None)
