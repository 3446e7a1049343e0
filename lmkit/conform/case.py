"""A case, and the server that it asks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from lmkit.web.sse import EventData

if TYPE_CHECKING:
    import httpx

MAX_TOKENS = 24
SHOWN = 160  # characters of a reason
OTHER_FORM = (LookupError, TypeError, ValueError, AttributeError)  # raised where an answer has another form


class Failed(Exception):
    """Why a case is not passed."""


def need(condition: object, reason: str) -> None:
    """Raises Failed with the reason unless the condition holds."""
    if not condition:
        raise Failed(reason)


def each(names: Iterable[str], ask: Callable[[str], None]) -> None:
    """`ask` for each name. Raises Failed with all names for which it fails, and why the first one does."""
    reasons = {}
    for name in names:
        try:
            ask(name)
        except Failed as error:
            reasons[name] = str(error)
        except OTHER_FORM as error:
            reasons[name] = f"{type(error).__name__}: {error}"
    need(not reasons, f"{', '.join(reasons)}: {next(iter(reasons.values()), '')}")


class Server:
    """A model of a server. Its methods raise Failed for an answer of another status than 200."""

    def __init__(self, http: httpx.Client, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._http, self.model, self._clock = http, model, clock

    def get(self, path: str, **headers: str) -> Any:
        return json_of(self._http.get(path, headers=headers))

    def get_absolute(self, path: str) -> Any:
        """The request's target has scheme and host, as clients send it to what they take for a proxy."""
        target = str(self._http.base_url.join(path)).encode()
        return json_of(self._http.get(path, extensions={"target": target}))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return json_of(self._http.post(path, json={"model": self.model, **body}))

    def post_bytes(self, path: str, body: bytes, **headers: str) -> httpx.Response:
        return self._http.post(path, content=body, headers={"content-type": "application/json", **headers})

    def upload(self, name: str, content: bytes) -> Any:
        """A file for a batch."""
        return json_of(self._http.post("/v1/files", files={"file": (name, content)}, data={"purpose": "batch"}))

    def refusal(self, path: str, body: dict[str, Any], *statuses: int) -> Any:
        """The JSON of an answer that has one of these statuses."""
        answer = self._http.post(path, json={"model": self.model, **body})
        need(answer.status_code in statuses, f"HTTP {answer.status_code} instead of {' or '.join(map(str, statuses))}")
        return answer.json()

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The data of a stream's server-sent events. "[DONE]" is a text, all others are JSON."""
        data = self.stream(path, body, "text/event-stream")
        whole, cut = EventData(), EventData()
        events = whole.feed(data)
        need(data.endswith((b"\n\n", b"\r\n\r\n")), "the stream ends inside of an event")
        bytewise = [event for i in range(len(data)) for event in cut.feed(data[i : i + 1])]
        need(events == bytewise, "cut at every byte, the stream has other events")
        return [text if (text := event.decode()) == "[DONE]" else json.loads(text) for event in events]

    def lines(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The objects of a stream of JSON lines."""
        data = self.stream(path, body, "application/x-ndjson")
        need(data.endswith(b"\n"), "the stream ends inside of a line")
        return [json.loads(line) for line in data.splitlines()]

    def stream(self, path: str, body: dict[str, Any], media_type: str) -> bytes:
        """All bytes of a stream."""
        with self._http.stream("POST", path, json={"model": self.model, **body}) as answer:
            data = answer.read()
            need(answer.status_code == 200, _refused(answer))
            found = answer.headers.get("content-type", "")
            need(found.startswith(media_type), f"the stream's type is {found or 'missing'}, not {media_type}")
        return data

    def leave(self, path: str, body: dict[str, Any], num_bytes: int) -> None:
        """Begin a stream, and close the connection when this many of its bytes have come."""
        with self._http.stream("POST", path, json={"model": self.model, **body}) as answer:
            need(answer.status_code == 200, f"HTTP {answer.status_code}")
            seen = 0
            for piece in answer.iter_bytes() if num_bytes else ():
                if (seen := seen + len(piece)) >= num_bytes:
                    break

    def seconds_until(self, path: str, body: dict[str, Any], word: bytes) -> float:
        """Seconds until this word has come in a stream; for none, until its headers have."""
        start, seen = self._clock(), b""
        with self._http.stream("POST", path, json={"model": self.model, **body}) as answer:
            seconds = self._clock() - start
            if answer.status_code != 200:
                answer.read()
                raise Failed(_refused(answer))
            pieces = answer.iter_bytes() if word else iter(())
            while word not in seen:
                piece = next(pieces, None)
                need(piece is not None, f"a stream without {word.decode()}")
                seen += piece or b""
                seconds = self._clock() - start
        return seconds


class Case(NamedTuple):
    suite: str
    name: str
    run: Callable[[Server], None]

    def outcome(self, server: Server) -> str:
        """Why the server fails it; empty if it passes."""
        import httpx

        try:
            self.run(server)
        except Failed as error:
            return _shown(str(error))
        except httpx.HTTPError as error:
            return _shown(f"no whole answer: {error or type(error).__name__}")
        except OTHER_FORM as error:
            return _shown(f"the answer has another form: {type(error).__name__}: {error}")
        return ""


CASES: list[Case] = []
Run = Callable[[Server], None]


def case(suite: str, name: str) -> Callable[[Run], Run]:
    """A decorator: the function is a case of this suite."""

    def add(run: Run) -> Run:
        CASES.append(Case(suite, name, run))
        return run

    return add


def json_of(answer: httpx.Response) -> Any:
    need(answer.status_code == 200, _refused(answer))
    return answer.json()


def _refused(answer: httpx.Response) -> str:
    try:
        error = answer.json().get("error", {})
        message = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        message = None
    return f"HTTP {answer.status_code}: {message or answer.text}"


def _shown(reason: str) -> str:
    line = "".join(char if char.isprintable() else " " for char in reason)
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 4]} ..."
