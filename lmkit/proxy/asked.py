"""What routing reads of a request: a few fields of its body, and a header. All else is passed on unread."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from lmkit.web.auth import Headers
from lmkit.web.receive import decode_json

SESSION_HEADERS = (b"x-session-token", b"x-session-id")
MAX_SESSION = 256  # characters
FILE_BYTES = 4096  # of a prompt that a longer file in base64 counts as: an image has about 1024 tokens
_FILE = re.compile(rb'[",]([A-Za-z0-9+/\\]{%d,}={0,2})"' % FILE_BYTES)  # a whole text, or the end of a data: URL
_RAW = msgspec.Raw()


class Asked(msgspec.Struct, frozen=True):
    """The fields of a body. Those that routing can do without may have any type: the node refuses a wrong one."""

    model: str
    session_id: Any = None
    user: Any = None
    priority: Any = None
    cache_salt: Any = None
    previous_response_id: Any = None
    conversation: Any = None  # an id, or an object with one
    stream: Any = None
    tools: msgspec.Raw = _RAW
    system: msgspec.Raw = _RAW
    instructions: msgspec.Raw = _RAW
    messages: msgspec.Raw = _RAW
    prompt: msgspec.Raw = _RAW
    input: msgspec.Raw = _RAW

    def parts(self) -> Iterator[memoryview]:
        """The prompt's bytes in the order in which templates write them, with digests in place of files.

        The last byte of each part closes a list or a string. It is left out, so that a conversation begins with the
        bytes of its last turn.
        """
        for raw in (self.tools, self.system, self.instructions, self.messages, self.prompt, self.input):
            if part := memoryview(raw):
                yield from with_digests(part[:-1])

    @property
    def conversation_id(self) -> str | None:
        named = self.conversation.get("id") if isinstance(self.conversation, dict) else self.conversation
        return named if isinstance(named, str) else None

    def session(self, headers: Headers) -> str:
        """What says that requests belong together: a header, else `session_id`, else `user`; "" if nothing does."""
        named = [value.decode("latin-1") for name, value in headers if name in SESSION_HEADERS]
        values = (*named, self.session_id, self.user)
        return next((value[:MAX_SESSION] for value in values if isinstance(value, str) and value), "")

    @property
    def level(self) -> int:
        """The request's priority; 0 if it has none."""
        return self.priority if isinstance(self.priority, int) else 0


def with_digests(part: memoryview) -> Iterator[memoryview]:
    """The pieces of a prompt, in which its digest stands for each file in base64. An image takes far fewer tokens than
    bytes, and what comes after it is to be seen."""
    at = 0
    for found in _FILE.finditer(part):
        yield part[at : found.start(1)]
        digest = hashlib.sha256(found[1]).digest()
        yield memoryview(digest * (FILE_BYTES // len(digest)))
        at = found.end(1)
    yield part[at:]


def read_asked(body: bytes) -> Asked:
    """The fields of a JSON body. Raises RequestError for a body without a model."""
    asked: Asked = decode_json(body, Asked, mismatch="the request must name its model", param="model")
    return asked
