"""An answer as blocks that follow each other: reasoning, text, calls. Two APIs write them, see `translated`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

from lmkit.serve.auth import Owner
from lmkit.serve.chat import ChatBuilder
from lmkit.serve.collect import num_bytes
from lmkit.serve.parts import PromptProgress
from lmkit.serve.protocol import ChatCompletionRequest
from lmkit.serve.serving import Serving
from lmkit.turbo.transport.output import RequestOutput, TextLogprobs
from lmkit.web.budget import Share

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    id: str
    kind: Kind
    index: int
    call_id: str = ""  # of a call
    name: str = ""  # of the function that is called
    parts: list[str] = field(default_factory=list)  # of the text, or of a call's arguments
    logprobs: list[TextLogprobs] = field(default_factory=list)
    is_cut: bool = False  # a limit or a failure ended the answer in it

    @property
    def text(self) -> str:
        return "".join(self.parts)


NO_BLOCK = Block("", "text", -1)


class Step(NamedTuple):
    """What became of a block: it was opened, it grew by `text`, or it was closed. Or the prompt was not done yet."""

    what: Literal["open", "grow", "close", "wait"]
    block: Block = NO_BLOCK
    text: str = ""
    logprobs: tuple[TextLogprobs, ...] = ()
    progress: PromptProgress | None = None


class Blocks:
    """The blocks of one answer. Its methods return the steps that they make."""

    def __init__(self, ids: Mapping[Kind, str], answer_id: str) -> None:
        """`ids`: how the ids of blocks begin; `answer_id`: the answer's own, from which they are made."""
        self.all: list[Block] = []
        self._ids, self._of = ids, answer_id
        self._is_open = False

    def grow(self, kind: Kind, text: str, logprobs: tuple[TextLogprobs, ...] = ()) -> Iterator[Step]:
        """Add to the block at the end, or to a new one of this kind."""
        if not self.ends_with(kind):
            yield from self._open(kind)
        block = self.all[-1]
        block.parts.append(text)
        block.logprobs.extend(logprobs)
        if text or logprobs:
            yield Step("grow", block, text, logprobs)

    def ends_with(self, kind: Kind) -> bool:
        return self._is_open and self.all[-1].kind == kind

    def call(self, call_id: str, name: str) -> Iterator[Step]:
        """Begin a call, whose arguments `grow` adds."""
        yield from self._open("call", call_id, name)

    def end(self, *, is_cut: bool) -> Iterator[Step]:
        """There is at least one block; an empty answer has an empty text."""
        if not self.all:
            yield from self._open("text")
        self.all[-1].is_cut = is_cut
        yield from self._close()

    def _open(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[Step]:
        yield from self._close()
        own = f"{self._of.rpartition('_')[2]}{len(self.all):02x}"  # so that an item's id finds its answer
        self.all.append(Block(self._ids[kind] + own, kind, len(self.all), call_id, name))
        self._is_open = True
        yield Step("open", self.all[-1])

    def _close(self) -> Iterator[Step]:
        if self._is_open:
            self._is_open = False
            yield Step("close", self.all[-1])


class BlockBuilder(ChatBuilder):
    """An answer of one choice."""

    brings_reasoning = True
    ids: ClassVar[Mapping[Kind, str]]
    last: RequestOutput

    def __init__(self, server: Serving, body: ChatCompletionRequest, owner: Owner, share: Share) -> None:
        super().__init__(server, body, owner, share)
        self._held: list[TextLogprobs] = []  # of tokens whose text has not come

    def prepare(self) -> None:
        super().prepare()
        self.blocks = Blocks(self.ids, self.id)

    async def steps(self) -> AsyncGenerator[Step]:
        """The blocks as they grow."""
        async with aclosing(self.outputs()) as outputs:
            async for _, output in outputs:
                self.note(0, output)
                self.share.add(num_bytes(output))  # the answer's end repeats all of it
                self.last = output
                for step in self.taken(output):
                    yield step
        for step in self.blocks.end(is_cut=self.last.finish_reason != "stop"):
            yield step

    def taken(self, output: RequestOutput) -> Iterator[Step]:
        """What an output adds."""
        for report in self.progress(output):
            yield Step("wait", progress=report)
        self._held += output.logprobs
        for kind, text in self.answers[0].take(output):
            match kind:
                case "call":
                    yield from self.blocks.call(self.answers[0].call_id(text), text)
                case "reasoning":
                    yield from self.blocks.grow("reasoning", text)
                case "arguments":
                    yield from self.blocks.grow("call", text)
                case "content":
                    yield from self.blocks.grow("text", text, tuple(self._held))
            self._held.clear()  # those of other tokens are not shown
        if output.finish_reason is not None and self._held and self.blocks.ends_with("text"):
            yield from self.blocks.grow("text", "", tuple(self._held))
