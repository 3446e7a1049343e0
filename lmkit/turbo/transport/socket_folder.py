"""The private folder of an engine process's sockets."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from lmkit.errors import ConfigError, LMKitError

MAX_IPC_PATH = 100  # sockaddr_un holds 107 bytes


class SocketFolder:
    """A folder that is made when a process is started, and made anew if it was removed meanwhile."""

    def __init__(self) -> None:
        self.path: Path | None = None

    def prefix(self, number: int) -> Path:
        """The path prefix of the sockets of process `number`. Raises LMKitError."""
        if self.path is None or not self.path.is_dir():
            try:
                self.path = Path(tempfile.mkdtemp(prefix="lmkit-"))  # mode 0700
            except OSError as error:
                raise LMKitError(f"{error.filename}: no folder for sockets can be made: {error.strerror}") from None
        if len(str(self.path)) > MAX_IPC_PATH - len("/00000.commands"):
            raise ConfigError(f"{self.path}: too long a path for a socket; set TMPDIR to a shorter one")
        return self.path / str(number)

    def remove(self) -> None:
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)
