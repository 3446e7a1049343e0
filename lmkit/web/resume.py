"""What a proxy and its node say to each other so that an answer can go on at another node.

The proxy sends `Identity` in a header. The node draws ids and seeds from it, and writes a comment after the events of
each output: the tokens that they came from. If the node ends, the proxy sends the request to another one, with the
tokens before the body. That node feeds them to its own parsers, writes none of their events, and goes on after them.

    first request:   x-lmkit-stream: ID CREATED                          body
    its answer:      x-lmkit-stream: FINGERPRINT     data: ...\n\n: lmkit [0,[5,9],"",0]\n\n ...  : lmkit end\n\n
    next request:    x-lmkit-stream: ID CREATED FINGERPRINT LENGTH       [[0,[5,9],"",0],...]body

An answer that is no stream can move, too, if the proxy asks for that. It then comes as comments and one event, from
which the proxy makes the answer. The event of an error that comes after the first comment is named for its status.

    request:    x-lmkit-whole: 1    answer:  x-lmkit-whole: 1    : lmkit [...]\n\n ... data: {...}\n\n: lmkit end\n\n
"""

from __future__ import annotations

import hashlib
import re
from typing import Literal, NamedTuple

import msgspec

from lmkit.errors import RequestError

STREAM_HEADER = b"x-lmkit-stream"
WHOLE_HEADER = b"x-lmkit-whole"
END = ": lmkit end\n\n"  # the client has all of the answer
ERROR = ": lmkit error\n\n"  # an error event comes that no other node would spare the client
MAX_JOURNAL_BYTES = 1 << 20
_HEADER = re.compile(r"([0-9a-f]{32}) (\d{1,12})(?: (fp_[0-9a-f]{12}) (\d{1,7}))?")


class Known(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a choice that the client has the events of."""

    choice: int
    token_ids: list[int]
    end: Literal["", "length", "token", "string"] = ""  # what ended the choice after them
    cached_tokens: int = 0


class Identity(NamedTuple):
    """The values of a stream that are the same at every node."""

    key: str  # 32 hexadecimal digits
    created: int  # seconds since 1970
    fingerprint: str = ""  # of the model that began it; "": it begins now
    num_bytes: int = 0  # of the known outputs before the body

    @classmethod
    def read(cls, value: str) -> Identity:
        found = _HEADER.fullmatch(value)
        if found is None or int(found[4] or 0) > MAX_JOURNAL_BYTES:
            raise RequestError("invalid_request", f"{STREAM_HEADER.decode()} is malformed")
        return cls(found[1], int(found[2]), found[3] or "", int(found[4] or 0))

    def __str__(self) -> str:
        return " ".join(map(str, self if self.fingerprint else self[:2]))

    @property
    def seed(self) -> int:
        """For a request without one. The key cannot be told from it."""
        return int.from_bytes(hashlib.sha256(b"seed " + self.key.encode()).digest()[:7])
