"""A program at a pseudo-terminal, and a node that answers by words."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import signal
import sys

from tests.proxy.fakes import Exchange

ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-_])|\r|[\x01\x02]")


def event(content: str | None, field: str = "content") -> bytes:
    choice = {"index": 0, "delta": {field: content} if content is not None else {}}
    return b"data: " + json.dumps({"choices": [choice]}, ensure_ascii=False).encode() + b"\n\n"


async def answer_by_words(exchange: Exchange) -> None:
    """Echo the last message, a word at a time; "wait" waits for ever, "break" breaks off."""
    last = json.loads(exchange.request.body)["messages"][-1]["content"]
    await exchange.start_events()
    await exchange.chunk(b": ping\n\n" + event(""))
    for word in last.split():
        await exchange.chunk(event(f"<{word}>"))
        if word == "wait":
            await exchange.until_left()
        if word == "break":
            exchange.writer.close()
            return
    await exchange.chunk(event(None) + b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n')
    await exchange.end()


class Terminal:
    """`lmkit chat` at a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        program = "from lmkit.cli.chat import chat; import typer; typer.run(chat)"
        self.pid, self.fd = pty.fork()
        if self.pid == 0:  # pragma: no cover
            os.execv(sys.executable, [sys.executable, "-c", program, *arguments])
        os.set_blocking(self.fd, False)
        self.output = b""

    async def until(self, text: str) -> str:
        """What came up to and with `text`, without colours and movements."""
        async with asyncio.timeout(15):
            while text.encode() not in self.output:
                with contextlib.suppress(BlockingIOError, OSError):
                    self.output = ESCAPES.sub(b"", self.output + os.read(self.fd, 65536))
                await asyncio.sleep(0.01)
        seen, _, self.output = self.output.partition(text.encode())
        return seen.decode(errors="replace") + text

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    async def leave(self) -> int:
        self.type("\x04")
        _, status = await asyncio.to_thread(os.waitpid, self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.close(self.fd)
