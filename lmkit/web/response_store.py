"""Stored responses: a SQLite database, bounded in bytes and time, whose rows belong to one owner each."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from lmkit.errors import RequestError
from lmkit.log import get_logger

if TYPE_CHECKING:
    import sqlite3

T = TypeVar("T")
LARGEST = 8  # a response may have this part of the store's bytes
MAX_TURNS = 1024  # of a conversation
# `used` is the time of the last continuation: a conversation that goes on keeps its first turns.
_SCHEMA = """
create table if not exists responses (
    id text primary key, owner text not null, previous text, used real not null, bytes integer not null,
    input blob not null, response blob not null
);
create index if not exists by_owner on responses (owner, used);
create index if not exists by_time on responses (used);
"""
_CHAIN = f"""
with recursive chain (id, previous, bytes, turn) as (
    select id, previous, bytes, 1 from responses where id = :id and owner = :owner and used > :start
    union all
    select r.id, r.previous, r.bytes, turn + 1 from responses r join chain on r.id = chain.previous
    where r.owner = :owner and turn < {MAX_TURNS}
)
"""
# The cast says that the blob is text: SQLite has a form of JSON in blobs, too.
_IDS = """
select id from responses where owner = :owner and used > :start and id glob :ids
and (:model is null or json_extract(cast(response as text), '$.model') = :model)
and not exists (
    select 1 from json_each(:metadata) asked where not exists (
        select 1 from json_each(cast(response as text), '$.metadata') label
        where label.key = asked.key and label.value = asked.value))
order by rowid
"""

log = get_logger(__name__)


class Stored(NamedTuple):
    """One response. `input` and `response` are JSON: the items of its own input, and the response object."""

    id: str
    previous: str | None  # the response that it continues
    input: bytes
    response: bytes


def labelled(metadata: Mapping[str, str]) -> Callable[[Stored], Stored]:
    """A change of a response's labels."""
    return lambda stored: stored._replace(
        response=json.dumps(json.loads(stored.response) | {"metadata": dict(metadata)}).encode()
    )


class ResponseStore:
    """The database has one thread, so calls wait for each other and never for the event loop.

    If the bytes do not suffice, the owner that holds the most loses the response that was used longest ago. What a
    method has returned is in the file, and survives the end of the process.
    """

    def __init__(
        self, folder: Callable[[], Path], *, max_bytes: int, ttl: float, clock: Callable[[], float] = time.time
    ) -> None:
        """`folder` makes the database's folder when it is needed; `ttl` is in seconds since the last use."""
        self._folder, self._max_bytes, self._ttl, self._clock = folder, max_bytes, ttl, clock
        self._thread = ThreadPoolExecutor(1, "lmkit-responses")
        self._bytes: Counter[str] = Counter()  # by owner
        self._opened: sqlite3.Connection | None = None

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    async def put(self, owner: str, stored: Stored) -> bool:
        """Keep a response. False if there is no room for it, or if the database failed, which is logged."""
        return await self._run(lambda: self._put(owner, stored), False)

    async def get(self, owner: str, id: str) -> Stored | None:
        return await self._run(lambda: self._get(owner, id), None)

    async def chain(self, owner: str, id: str, max_bytes: int) -> list[Stored]:
        """The response and those that it continues, oldest first. All of them count as used now.

        The list is empty if one of them is gone. Raises RequestError if they have more than `max_bytes`.
        """
        return await self._run(lambda: self._chain(owner, id, max_bytes), [])

    async def ids(self, owner: str, prefix: str, model: str | None, metadata: Mapping[str, str]) -> list[str]:
        """The ids that begin with `prefix`, oldest first, of responses by this model and with these labels."""
        return await self._run(lambda: self._ids(owner, prefix, model, metadata), [])

    async def change(self, owner: str, id: str, change: Callable[[Stored], Stored]) -> bool:
        """Put what `change` makes of a response in its place, as one step. False if it is gone or too large."""
        return await self._run(lambda: self._change(owner, id, change), False)

    async def delete(self, owner: str, id: str) -> bool:
        """Whether there was such a response."""
        return await self._run(lambda: self._delete(owner, id), False)

    async def _run(self, work: Callable[[], T], failed: T) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._safely, work, failed)

    def _safely(self, work: Callable[[], T], failed: T) -> T:
        import sqlite3

        try:
            return work()
        except (OSError, sqlite3.Error) as error:
            log.error("the store of responses failed: %s", error)
            if self._opened is not None:
                self._opened.rollback()
            return failed

    @property
    def _database(self) -> sqlite3.Connection:
        if self._opened is None:
            self._opened = _open(self._folder() / "responses.sqlite")
            self._bytes.update(dict(self._opened.execute("select owner, sum(bytes) from responses group by owner")))
        return self._opened

    def _put(self, owner: str, stored: Stored) -> bool:
        num_bytes = len(stored.input) + len(stored.response)
        if num_bytes * LARGEST > self._max_bytes:
            return False
        with self._database as database:
            # a stream that went on, and had ended before; or new labels, which change nothing in the order
            place = database.execute("select rowid from responses where id = ? and owner = ?", (stored.id, owner))
            (rowid,) = place.fetchone() or (None,)
            self._drop("id = ? and owner = ?", (stored.id, owner))
            row = (rowid, stored.id, owner, stored.previous, self._clock(), num_bytes, stored.input, stored.response)
            columns = "rowid, id, owner, previous, used, bytes, input, response"
            database.execute(f"insert into responses ({columns}) values (?, ?, ?, ?, ?, ?, ?, ?)", row)
            self._bytes[owner] += num_bytes
            self._drop("used <= ?", (self._clock() - self._ttl,))
            while self._bytes.total() > self._max_bytes:
                largest = max(self._bytes, key=self._bytes.__getitem__)
                self._drop("id = (select id from responses where owner = ? order by used limit 1)", (largest,))
        return self._get(owner, stored.id) is not None

    def _get(self, owner: str, id: str) -> Stored | None:
        query = "select id, previous, input, response from responses where id = ? and owner = ? and used > ?"
        row = self._database.execute(query, (id, owner, self._clock() - self._ttl)).fetchone()
        return None if row is None else Stored(*row)

    def _change(self, owner: str, id: str, change: Callable[[Stored], Stored]) -> bool:
        found = self._get(owner, id)
        return found is not None and self._put(owner, change(found))

    def _ids(self, owner: str, prefix: str, model: str | None, metadata: Mapping[str, str]) -> list[str]:
        names = {"owner": owner, "start": self._clock() - self._ttl, "ids": f"{prefix}*", "model": model}
        names["metadata"] = json.dumps(dict(metadata))
        return [id for (id,) in self._database.execute(_IDS, names)]

    def _chain(self, owner: str, id: str, max_bytes: int) -> list[Stored]:
        names = {"owner": owner, "id": id, "now": self._clock(), "start": self._clock() - self._ttl}
        with self._database as database:
            sizes = database.execute(_CHAIN + "select previous, bytes from chain order by turn", names).fetchall()
            if not sizes or sizes[-1][0] is not None:
                return []
            if (num_bytes := sum(size for _, size in sizes)) > max_bytes:
                message = f"the conversation that it continues has {num_bytes} bytes, and the limit is {max_bytes}"
                raise RequestError("request_too_large", message, "previous_response_id")
            database.execute(_CHAIN + "update responses set used = :now where id in (select id from chain)", names)
            columns = "id, chain.previous, input, response"
            query = _CHAIN + f"select {columns} from chain join responses using (id) order by turn desc"
            return [Stored(*row) for row in database.execute(query, names)]

    def _delete(self, owner: str, id: str) -> bool:
        with self._database:
            return self._drop("id = ? and owner = ?", (id, owner)) > 0

    def _drop(self, where: str, values: tuple[object, ...]) -> int:
        """Delete rows and count their bytes. Returns their number."""
        rows = self._database.execute(f"delete from responses where {where} returning owner, bytes", values).fetchall()
        for owner, num_bytes in rows:
            self._bytes[owner] -= num_bytes
            if not self._bytes[owner]:
                del self._bytes[owner]
        return len(rows)


def _open(path: Path) -> sqlite3.Connection:
    """The database in `path`. One that cannot be read is put aside."""
    import sqlite3

    try:
        return _connect(path)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):  # the disk, not the file's content
            raise
        log.error("%s cannot be read and is put aside: %s", path, error)
        path.replace(path.with_suffix(".damaged"))
        return _connect(path)


def _connect(path: Path) -> sqlite3.Connection:
    """With its log of changes, a process that is killed leaves whole rows. Deleted texts are overwritten."""
    import sqlite3

    database = sqlite3.connect(path)
    database.execute("pragma journal_mode = wal")
    database.execute("pragma synchronous = normal")
    database.execute("pragma secure_delete = on")
    database.executescript(_SCHEMA)
    return database
