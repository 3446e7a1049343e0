"""An answer as blocks that follow each other: reasoning, text, calls. Two APIs write them, see `translated`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

from lmkit.serve.auth import Owner
from lmkit.serve.chat import ChatBuilder
from lmkit.serve.collect import num_bytes
from lmkit.serve.protocol import ChatCompletionRequest
from lmkit.serve.serving import Serving, new_id
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


class Step(NamedTuple):
    """What became of a block: it was opened, it grew by `text`, or it was closed."""

    what: Literal["open", "grow", "close"]
    block: Block
    text: str = ""
    logprobs: tuple[TextLogprobs, ...] = ()


class BlockBuilder(ChatBuilder):
    """An answer of one choice."""

    ids: ClassVar[Mapping[Kind, str]]  # how the ids of blocks begin
    last: RequestOutput

    def __init__(self, server: Serving, body: ChatCompletionRequest, owner: Owner, share: Share) -> None:
        super().__init__(server, body, owner, share)
        self.blocks: list[Block] = []
        self._is_open = False

    async def steps(self) -> AsyncGenerator[Step]:
        """The blocks as they grow. There is at least one; an empty answer has an empty text."""
        async with aclosing(self.outputs()) as outputs:
            async for _, output in outputs:
                self.note(0, output)
                self.share.add(num_bytes(output))  # the answer's end repeats all of it
                self.last = output
                for step in self._taken(output):
                    yield step
        if not self.blocks:
            for step in self._grown("text", "", ()):
                yield step
        self.blocks[-1].is_cut = self.last.finish_reason != "stop"
        for step in self._closed():
            yield step

    def _taken(self, output: RequestOutput) -> Iterator[Step]:
        if output.text or output.logprobs:
            yield from self._grown("text", output.text, tuple(output.logprobs))

    def _grown(self, kind: Kind, text: str, logprobs: tuple[TextLogprobs, ...]) -> Iterator[Step]:
        if not self._is_open or self.blocks[-1].kind != kind:
            yield from self._opened(kind)
        block = self.blocks[-1]
        block.parts.append(text)
        block.logprobs.extend(logprobs)
        if text or logprobs:
            yield Step("grow", block, text, logprobs)

    def _opened(self, kind: Kind) -> Iterator[Step]:
        yield from self._closed()
        block = Block(new_id(self.ids[kind]), kind, len(self.blocks))
        self.blocks.append(block)
        self._is_open = True
        yield Step("open", block)

    def _closed(self) -> Iterator[Step]:
        if self._is_open:
            self._is_open = False
            yield Step("close", self.blocks[-1])
