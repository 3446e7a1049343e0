"""The only set-up of logging. Modules use `get_logger(__name__)`.

Only a process entry point calls `setup`, and `pipeline(log_level=...)`. Otherwise the records of lmkit go where the
application sends those of all loggers, and lmkit changes no logger.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from lmkit.config import checked_level


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def setup(level: str = "INFO", *, process: str = "") -> None:
    """Send lmkit's records to stderr, one line each.

    Control characters in a message are escaped against log injection. Raises ConfigError for an unknown level.
    """
    level = checked_level(level)
    handler = _ToStderr()
    words = ["%(asctime)s", "%(levelname).1s", process, "%(name)s" if level == "DEBUG" else ""]
    start = " ".join(filter(None, words)) + (":" if any(words[2:]) else "")
    handler.setFormatter(_OneLine(f"{start} %(message)s", "%m-%d %H:%M:%S"))
    root = logging.getLogger("lmkit")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False


class _ToStderr(logging.StreamHandler[TextIO]):
    """Writes to the current sys.stderr. The stream that was sys.stderr at `setup` may be closed by now."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _OneLine(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = "".join(c if c.isprintable() else repr(c)[1:-1] for c in record.message)
        return super().formatMessage(record)
