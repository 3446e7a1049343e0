"""A client's request on its way to nodes."""

from __future__ import annotations

from dataclasses import dataclass

from lmkit.proxy.journal import Journal
from lmkit.proxy.router import Routing
from lmkit.proxy.transcripts import Recorder
from lmkit.web.form import Form


@dataclass(frozen=True)
class Call:
    """One client request, whole."""

    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    model: str
    routing: Routing
    journal: Journal
    key: str = ""  # the client's; "" if clients have none
    client: str = ""  # the one that another proxy names
    form: Form | None = None  # with a file; `body` has its fields as JSON
    last: bool = True  # no other model may answer it
    method: str = "POST"
    recorder: Recorder | None = None  # keeps a copy of the response
