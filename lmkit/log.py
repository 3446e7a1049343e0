"""The only set-up of logging. Modules use `get_logger(__name__)`.

Only a process entry point calls `setup`, and `pipeline(log_level=...)`. Otherwise the records of lmkit go where the
application sends those of all loggers, and lmkit changes no logger.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TextIO

from lmkit.config import LogFormat, checked_level


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


BURST, PERIOD = 5, 60.0  # records of one place in a library's code, and seconds


def setup(level: str = "INFO", *, process: str = "", libraries: bool = True, log_format: LogFormat = "text") -> None:
    """Send lmkit's records to stderr, one line each, and with `libraries` the warnings of all other loggers.

    Control characters in a message are escaped against log injection. A library that repeats itself is written BURST
    times in PERIOD; the others are counted. Raises ConfigError for an unknown level.
    """
    level = checked_level(level)
    handler = _ToStderr()
    words = ["%(asctime)s", "%(levelname).1s", process, "%(name)s" if level == "DEBUG" else ""]
    start = " ".join(filter(None, words)) + (":" if any(words[2:]) else "")
    as_json = _Json(process) if log_format == "json" else None
    handler.setFormatter(as_json or _OneLine(f"{start} %(message)s", "%m-%d %H:%M:%S"))
    root = logging.getLogger("lmkit")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False
    if libraries:
        handler = _ToStderr()
        handler.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level]))
        handler.setFormatter(as_json or _OneLine(f"{start} %(name)s: %(message)s", "%m-%d %H:%M:%S"))
        handler.addFilter(Sparing())
        everything = logging.getLogger()
        everything.handlers[:] = [other for other in everything.handlers if not isinstance(other, _ToStderr)]
        everything.addHandler(handler)
        logging.captureWarnings(True)


class _ToStderr(logging.StreamHandler[TextIO]):
    """Writes to the current sys.stderr. The stream that was sys.stderr at `setup` may be closed by now."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class Sparing(logging.Filter):
    """Lets BURST records of one place in the code and one kind of exception through in PERIOD, and counts the others.

    The first record after the period tells their number.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[object, ...], tuple[float, int]] = {}  # start of the period, records since

    def filter(self, record: logging.LogRecord) -> bool:
        place = record.pathname, record.lineno, record.exc_info and record.exc_info[0]
        now = self._clock()
        start, count = self._seen.get(place, (now, 0))
        left_out = 0
        if now - start >= PERIOD:
            start, count, left_out = now, 0, count - BURST
        self._seen[place] = start, count + 1
        if left_out > 0:
            record.msg, record.args = f"{record.getMessage()} ({left_out} more like this were not written)", None
        return count < BURST


class _OneLine(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        if not record.message.isprintable():
            record.message = "".join(c if c.isprintable() else repr(c)[1:-1] for c in record.message)
        return super().formatMessage(record)


class _Json(logging.Formatter):
    """One object a line. `extra={"fields": {...}}` of a record gives it more members."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        shown = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            **self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return json.dumps(shown, default=str)
