"""The files of clients: a file for the content and one of JSON that describes it, in a private folder."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import msgspec

from lmkit.errors import JSON_ERRORS, RequestError
from lmkit.log import get_logger
from lmkit.web.data_folder import DataFolder

MAX_FILES = 10_000  # of all clients
FILE_SECONDS = 30 * 86400  # a file goes after so long, unless its upload says otherwise
MAX_NAME_CHARS = 255

logger = get_logger(__name__)


class File(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a file. `owner` is whose it is, see `Owner.own`."""

    id: str
    owner: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]

    def shown(self) -> dict[str, Any]:
        """OpenAI's object."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        del fields["owner"]
        return {"object": "file", **fields, "status": "processed", "status_details": None}


class Files:
    """The files of all clients, for a time each. The space and number of one client's files have a limit.

    Files on their way have no description yet. Those that a killed server left are removed at the start.
    """

    def __init__(
        self,
        data: DataFolder,
        space: int,
        quota: float,
        clock: Callable[[], float] = time.time,
        *,
        keep: Collection[str] = (),
        is_used: Callable[[str], bool] = lambda file_id: False,
    ) -> None:
        """`space` is in bytes, and `quota` the part of it that one client may take. `keep` are files under way.

        A file of which `is_used` is true does not expire.
        """
        self._data, self._clock, self._is_used = data, clock, is_used
        self._space, self._quota = space, quota
        self._files: dict[str, File] = {}
        self._used: Counter[str] = Counter()  # bytes by owner, with those of files on their way
        if data.lasts:
            self._load(keep)

    def _load(self, keep: Collection[str]) -> None:
        for path in sorted(self._folder.iterdir()):
            if path.suffix == ".json":
                with suppress(OSError, *JSON_ERRORS):
                    self._keep(msgspec.json.decode(path.read_bytes(), type=File))
        for path in self._folder.iterdir():
            if path.stem not in self._files and path.name not in keep:
                path.unlink(missing_ok=True)
        logger.info("%s: %d files of clients", self._folder, len(self._files))

    @property
    def _folder(self) -> Path:
        return self._data.folder("files")

    def path(self, file_id: str) -> Path:
        """The content's path. `file_id` is one that this server made."""
        return self._folder / file_id

    def new_id(self) -> str:
        return f"file-{uuid4().hex}"

    def get(self, owner: str, file_id: str) -> File:
        """Raises RequestError if the client has no such file."""
        self.expire()
        file = self._files.get(file_id)
        if file is None or file.owner != owner:
            raise RequestError("not_found", "there is no such file", "file_id")
        return file

    def of(self, owner: str) -> list[File]:
        """The client's files, the oldest first."""
        self.expire()
        return sorted((file for file in self._files.values() if file.owner == owner), key=lambda file: file.created_at)

    def reserve(self, owner: str, num_bytes: int) -> None:
        """Take space for a file on its way, or give it back if negative. Raises RequestError if there is none."""
        self._used[owner] += num_bytes
        if not self._used[owner]:
            del self._used[owner]
        if num_bytes > 0 and (self._used[owner] > self._space * self._quota or self._used.total() > self._space):
            message = f"the space for files is used up ({int(self._space * self._quota) >> 20} MiB); delete some"
            raise RequestError("request_too_large", message, "file")

    def check_number(self, owner: str) -> None:
        """Raise RequestError if the client may have no further file."""
        self.expire()
        own = sum(file.owner == owner for file in self._files.values())
        if own >= MAX_FILES * self._quota or len(self._files) >= MAX_FILES:
            raise RequestError("request_too_large", f"{own} files are kept, and no more fit; delete some", "file")

    def add(self, file: File) -> None:
        """Describe a file whose content is on the disk. From now on its owner sees it."""
        write_file(self._folder / f"{file.id}.json", msgspec.json.encode(file))
        self._keep(file)

    def _keep(self, file: File) -> None:
        before = self._files.get(file.id)
        self._files[file.id] = file
        self._used[file.owner] += file.bytes - (before.bytes if before else 0)

    def delete(self, file_id: str) -> None:
        """First the description, so that a kill in between leaves nothing that is seen."""
        if file := self._files.pop(file_id, None):
            self.reserve(file.owner, -file.bytes)
        for path in (self._folder / f"{file_id}.json", self.path(file_id)):
            path.unlink(missing_ok=True)

    def expire(self) -> None:
        now = self._clock()
        for file_id in [file.id for file in self._files.values() if file.expires_at <= now]:
            if not self._is_used(file_id):
                self.delete(file_id)

    def make(self, file_id: str, owner: str, purpose: Literal["batch", "batch_output"], name: str, ttl: int) -> File:
        """The description of content that lies at `path(file_id)`."""
        now = int(self._clock())
        size = self.path(file_id).stat().st_size
        return File(
            id=file_id, owner=owner, bytes=size, created_at=now, expires_at=now + ttl, filename=name, purpose=purpose
        )


def write_file(path: Path, content: bytes) -> None:
    """Replace a file, whole or not at all, and wait until the disk has it."""
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
