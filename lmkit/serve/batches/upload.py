"""A form with a file (multipart/form-data), written to the disk as it arrives."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from starlette.types import Message, Receive, Scope

from lmkit.errors import RequestError
from lmkit.serve.batches.files import MAX_NAME_CHARS
from lmkit.web.receive import client_disconnected

SILENT_SECONDS = 30.0  # between two pieces
UPLOAD_SECONDS = 3600.0
MAX_FIELDS, MAX_FIELD_BYTES = 8, 1024
OVERHEAD = 64 << 10  # bytes of the form around the file


class Form:
    """`feed` it the body. Afterwards `fields` has the form's texts, and `filename` is set if a file came."""

    def __init__(self, boundary: bytes, path: Path) -> None:
        from python_multipart.multipart import MultipartParser

        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._path = path
        self._file: BinaryIO | None = None
        self._header: list[bytes] = [b"", b""]  # the name and value of the header that is being read
        self._headers: dict[bytes, bytes] = {}
        self._name, self._value = "", b""
        self._is_file = self._is_complete = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: self._add_to_header(0, data[start:end]),
                "on_header_value": lambda data, start, end: self._add_to_header(1, data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": lambda data, start, end: self._data(data[start:end]),
                "on_part_end": self._end,
                "on_end": self._complete,
            },
        )

    def feed(self, data: bytes) -> None:
        """Raises RequestError, or OSError of the disk."""
        from python_multipart.exceptions import FormParserError

        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _invalid(f"the body is not multipart/form-data: {error}", None) from None

    def finish(self) -> None:
        """Wait until the disk has the file. Raises RequestError if the form is not complete."""
        if not self._is_complete:
            raise _invalid("the form is cut off before its end", None)
        if self._file is None:
            raise _invalid("send a file in the field file", "file")
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _begin(self) -> None:
        self._headers, self._header = {}, [b"", b""]

    def _add_to_header(self, part: int, data: bytes) -> None:
        self._header[part] += data

    def _end_header(self) -> None:
        self._headers[self._header[0].lower()] = self._header[1]
        self._header = [b"", b""]

    def _end_headers(self) -> None:
        from python_multipart.multipart import parse_options_header

        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._value = b""
        self._is_file = self._name == "file"
        if self._name in self.fields or (self._is_file and self._file):
            raise _invalid(f"the form has {self._name[:64]!r} twice", self._name[:64])
        if len(self.fields) >= MAX_FIELDS:
            raise _invalid(f"the form has more than {MAX_FIELDS} fields", None)
        if self._is_file:
            name = options.get(b"filename", b"file").decode(errors="replace")
            self.filename = "".join(char for char in name if char.isprintable())[:MAX_NAME_CHARS] or "file"
            self._file = os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")

    def _data(self, data: bytes) -> None:
        if self._is_file:
            assert self._file is not None
            self._file.write(data)
            return
        self._value += data
        if len(self._value) > MAX_FIELD_BYTES:
            raise _invalid(f"{self._name[:64]}: more than {MAX_FIELD_BYTES} bytes", self._name[:64])

    def _end(self) -> None:
        if self._is_file:
            assert self._file is not None
            self._file.flush()
        else:
            self.fields[self._name] = self._value.decode(errors="replace")

    def _complete(self) -> None:
        self._is_complete = True


async def receive_form(
    scope: Scope, receive: Receive, path: Path, max_bytes: int, reserve: Callable[[int], None]
) -> Form:
    """The form of a request, whose file is written to `path`. `reserve` is told the bytes before they are written.

    Raises RequestError. The caller removes what was written then.
    """
    form = Form(_boundary(scope), path)
    length = dict(scope["headers"]).get(b"content-length", b"")
    too_large = RequestError("request_too_large", f"the file is larger than {max_bytes} bytes", "file")
    if length.isdigit() and int(length[:20]) > max_bytes + OVERHEAD:
        raise too_large
    size, more = 0, True
    try:
        async with asyncio.timeout(UPLOAD_SECONDS):
            while more:
                async with asyncio.timeout(SILENT_SECONDS):
                    message: Message = await receive()
                if message["type"] == "http.disconnect":
                    raise client_disconnected()
                data = message.get("body", b"")
                size += len(data)
                if size > max_bytes + OVERHEAD:
                    raise too_large
                reserve(len(data))
                await asyncio.to_thread(form.feed, data)
                more = message.get("more_body", False)
        await asyncio.to_thread(form.finish)
    except TimeoutError:
        raise RequestError("request_timeout", "the file did not arrive in time") from None
    except OSError as error:
        raise RequestError("overloaded", f"the file cannot be stored: {error.strerror}") from None
    finally:
        form.close()
    return form


def _boundary(scope: Scope) -> bytes:
    from python_multipart.multipart import parse_options_header

    kind, options = parse_options_header(dict(scope["headers"]).get(b"content-type", b""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise _invalid("send Content-Type: multipart/form-data with a boundary", None)
    return options[b"boundary"]


def _invalid(message: str, param: str | None) -> RequestError:
    return RequestError("invalid_request", message, param)
