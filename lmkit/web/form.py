"""A form with a file (multipart/form-data), read whole. Server and proxy read it alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from lmkit.errors import RequestError

MAX_PARTS, MAX_FIELD_BYTES = 32, 64 << 10
NUMBERS = ("temperature", "stream", "priority", "timeout", "seed")  # fields whose texts are JSON
LISTS = ("timestamp_granularities",)  # fields that are lists also without []


class _Part(NamedTuple):
    head: bytes  # its headers
    name: str
    data: bytes
    is_file: bool


class Form:
    """`fields` as a JSON body would have them, and the file, which stays as it is."""

    def __init__(self, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        """Raises RequestError for anything but a form with one file, in the field `file`."""
        kind, options = parse_options_header(dict(headers).get(b"content-type", b""))
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise _invalid("send Content-Type: multipart/form-data with a boundary")
        self._boundary = options[b"boundary"]
        parts = _parsed(self._boundary, body)
        files = [part for part in parts if part.name == "file"]
        if len(files) != 1 or any(part.is_file != (part.name == "file") for part in parts):
            raise _invalid("send one file, in the field file", "file")
        self._file = files[0]
        self.fields: dict[str, Any] = {}
        for part in parts:
            if not part.is_file:
                self._take(part.name, part.data.decode(errors="replace"))

    @property
    def json(self) -> bytes:
        """The fields as a body."""
        return msgspec.json.encode(self.fields)

    @property
    def file(self) -> bytes:
        return self._file.data

    def _take(self, name: str, text: str) -> None:
        key = name.removesuffix("[]")
        is_list = key != name or key in LISTS
        if key in self.fields and not (is_list and isinstance(self.fields[key], list)):
            raise _invalid(f"the form has {key[:64]!r} twice", key[:64])
        self.fields[key] = [*self.fields.get(key, []), text] if is_list else _value(key, text)

    def written(self, fields: Mapping[str, Any]) -> bytes:
        """The body with these fields and the same file."""
        parts = list[bytes]()
        for name, value in fields.items():
            shown = name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
            for each in value if isinstance(value, list) else [value]:
                head = f'Content-Disposition: form-data; name="{shown}{"[]" * isinstance(value, list)}"\r\n\r\n'
                parts.append(head.encode() + (each.encode() if isinstance(each, str) else msgspec.json.encode(each)))
        parts.append(self._file.head + b"\r\n" + self._file.data)
        line = b"--" + self._boundary
        return b"".join(line + b"\r\n" + part + b"\r\n" for part in parts) + line + b"--\r\n"


def _value(name: str, text: str) -> Any:
    if name not in NUMBERS:
        return text
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        raise _invalid(f"{name}: expected a number, true or false", name) from None


def _parsed(boundary: bytes, body: bytes) -> list[_Part]:
    parts, head, data, complete = list[_Part](), bytearray(), bytearray(), list[bool]()

    def begin() -> None:
        if len(parts) == MAX_PARTS:
            raise _invalid(f"the form has more than {MAX_PARTS} fields")
        head.clear()
        data.clear()

    def end() -> None:
        headers = dict(_header(line) for line in bytes(head).split(b"\r\n") if line)
        _, options = parse_options_header(headers.get(b"content-disposition", b""))
        name, is_file = options.get(b"name", b"").decode(errors="replace"), b"filename" in options
        if not is_file and len(data) > MAX_FIELD_BYTES:
            raise _invalid(f"{name[:64]}: more than {MAX_FIELD_BYTES} bytes", name[:64])
        parts.append(_Part(bytes(head), name, bytes(data), is_file))

    def add(to: bytearray, after: bytes = b"") -> Any:
        return lambda piece, start, stop: to.extend(piece[start:stop] + after)

    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": begin,
            "on_header_field": add(head),
            "on_header_begin": lambda: None,
            "on_header_value": lambda piece, start, stop: head.extend(b": " + piece[start:stop]),
            "on_header_end": lambda: head.extend(b"\r\n"),
            "on_part_data": add(data),
            "on_part_end": end,
            "on_end": lambda: complete.append(True),
        },
    )
    try:
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise _invalid(f"the body is not multipart/form-data: {error}") from None
    if not complete:
        raise _invalid("the form is cut off before its end")
    return parts


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b": ")
    return name.lower(), value


def _invalid(message: str, param: str | None = None) -> RequestError:
    return RequestError("invalid_request", message, param)
