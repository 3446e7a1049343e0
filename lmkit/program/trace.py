"""What programs did: the tree of their branches, with the tokens that were computed, reused and generated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Literal, NamedTuple


class Part(NamedTuple):
    """New text of one variable, while it is generated."""

    branch: str  # its place in the tree: "2.0" is the first branch of the third program
    name: str  # of the variable; "" if it has none
    text: str


@dataclass
class Span:
    """A piece of a branch's text, and what it cost."""

    kind: Literal["text", "gen", "select"]
    text: str
    name: str = ""
    role: str = ""  # of a message
    reused: int = 0  # prompt tokens whose KV was found
    computed: int = 0  # prompt tokens that were computed
    generated: int = 0  # tokens of the answer
    drafted: int = 0  # tokens among these that came as accepted draft tokens, or were forced by a grammar
    scores: dict[str, float] = field(default_factory=dict)  # mean log-probability of each text to select from

    def cost(self) -> str:
        parts = [f"{self.reused} reused", f"{self.computed} computed"]
        if self.kind == "gen":
            parts.append(f"{self.generated} generated" + (f", {self.drafted} of them drafted" if self.drafted else ""))
        parts += [f"{text!r} {score:.3f}" for text, score in self.scores.items()]
        return "; ".join(parts)


@dataclass
class Node:
    """One branch. Its text goes on after its parent's, as it was when it was forked."""

    path: str
    spans: list[Span] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)

    def fork(self) -> Node:
        self.children.append(Node(f"{self.path}.{len(self.children)}"))
        return self.children[-1]

    def all_spans(self) -> Iterator[Span]:
        yield from self.spans
        for child in self.children:
            yield from child.all_spans()


class Trace:
    """Give one to `run`, `run_batch` or `start`, and look at it afterwards."""

    def __init__(self) -> None:
        self.programs: list[Node] = []

    def program(self) -> Node:
        self.programs.append(Node(str(len(self.programs))))
        return self.programs[-1]

    def totals(self) -> dict[str, int]:
        """Tokens of all programs: reused, computed, generated, drafted."""
        spans = [span for node in self.programs for span in node.all_spans()]
        return {
            name: sum(getattr(span, name) for span in spans) for name in ("reused", "computed", "generated", "drafted")
        }

    def save(self, path: str | Path) -> None:
        """Write a page that shows the tree."""
        from lmkit.quant.report.markup import cards, page

        totals = self.totals()
        figures = [(f"tokens {name}", value, "") for name, value in totals.items()]
        sections = ["<h1>Programs</h1>", cards(figures), *map(_section, self.programs)]
        Path(path).write_text(page("Programs", sections), encoding="utf-8")


def _section(node: Node) -> str:
    parts = "".join(map(_shown, node.spans)) + "".join(map(_section, node.children))
    return f"<details open><summary>{escape(node.path)}</summary>{parts}</details>"


def _shown(span: Span) -> str:
    role = f'<p class="soft">{escape(span.role)}</p>' if span.role else ""
    if span.kind == "text":
        return f"{role}<pre>{escape(span.text)}</pre>"
    what = escape(f"{span.kind} {span.name}".strip())
    return f'<pre><strong>{escape(span.text)}</strong></pre><p class="soft">{what}: {escape(span.cost())}</p>'
