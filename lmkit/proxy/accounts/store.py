"""The SQLite file of keys, teams and usage.

A commit is in the file's write-ahead log before it counts, so it survives the death of the process. The log reaches the
disk once a second, so a power failure may lose the last second.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from lmkit.errors import JSON_ERRORS, ConfigError
from lmkit.log import get_logger
from lmkit.proxy.accounts.account import Amount, Key, Team, Usage

T = TypeVar("T")
VERSION = 1
log = get_logger(__name__)
MAX_LOG_BYTES = 8 << 20
_SCHEMA = """
CREATE TABLE keys (id TEXT PRIMARY KEY, digest TEXT NOT NULL UNIQUE, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE teams (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE usage (
    day TEXT NOT NULL, key TEXT NOT NULL, team TEXT NOT NULL, model TEXT NOT NULL, requests INTEGER NOT NULL,
    input INTEGER NOT NULL, cached INTEGER NOT NULL, output INTEGER NOT NULL, money INTEGER NOT NULL,
    PRIMARY KEY (day, key, team, model)) WITHOUT ROWID;
"""
_COUNTS = ("requests", "input", "cached", "output", "money")
MOST = 1 << 61  # of a count; two of them still fit SQLite's integers
_ADD = (
    "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
    + ", ".join(f"{name} = MIN({name} + excluded.{name}, {MOST})" for name in _COUNTS)
)  # fmt: skip
# Rows that lmkit does not write: of another program, of an older version, of a damaged disk.
_WRONG = " OR ".join(f"typeof({name}) != 'integer' OR {name} NOT BETWEEN 0 AND {MOST}" for name in _COUNTS)
GROUPS = ("day", "key", "team", "model")


class Charge(NamedTuple):
    """What one request has used."""

    day: date
    key: str  # its id
    team: str  # "" = none
    model: str
    usage: Usage
    money: int

    @property
    def amount(self) -> Amount:
        return Amount(1, self.usage.tokens, self.money)


class Store:
    """One file, which one proxy uses at a time. Its methods block, and only `flush` may run beside another."""

    def __init__(self, path: Path) -> None:
        """Open or make the file. Raises ConfigError."""
        self.path = path
        self._log = path.with_name(path.name + "-wal")
        self._dirty = False
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._db = sqlite3.connect(path, timeout=0.2, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("PRAGMA wal_autocheckpoint = 0")  # the ledger does it
            self._db.execute("BEGIN EXCLUSIVE")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {VERSION}")
            self._db.execute("COMMIT")
        except OSError as error:
            raise ConfigError(f"key_store {path}: {error.strerror}") from None
        except sqlite3.Error as error:
            reason = "another proxy uses it" if "locked" in str(error) else str(error)
            raise ConfigError(f"key_store {path}: {reason}") from None
        if version not in (0, VERSION):
            raise ConfigError(f"key_store {path}: made by another version of lmkit ({version}, not {VERSION})")

    def load(self) -> tuple[dict[str, Key], dict[str, Team]]:
        """(keys by digest, teams by name). What cannot be read is put aside, so that it never keeps a proxy from
        starting: its keys are refused. Raises ConfigError for a file that SQLite cannot read."""
        try:
            self._put_aside("usage", _WRONG)
            teams = {team.name: team for team in self._values("teams", "name", Team).values()}
            keys = self._values("keys", "digest", Key)
            for digest, key in list(keys.items()):
                if key.team is not None and key.team not in teams:
                    log.error("key_store %s: the key %s belongs to no team here; it is refused", self.path, key.id)
                    del keys[digest]
        except sqlite3.Error as error:
            raise ConfigError(f"key_store {self.path}: {error}") from None
        return keys, teams

    def _values(self, table: str, name: str, type: type[T]) -> dict[str, T]:
        found, wrong = {}, []
        for key, value in self._db.execute(f"SELECT {name}, value FROM {table}").fetchall():
            try:
                found[str(key)] = msgspec.json.decode(value, type=type)
            except (*JSON_ERRORS, TypeError):
                wrong.append(key)
        for key in wrong:
            self._put_aside(table, f"{name} IS ?", key)
        return found

    def _put_aside(self, table: str, condition: str, *values: Any) -> None:
        """Move rows to a table that nothing reads."""
        (count,) = self._db.execute(f"SELECT COUNT(*) FROM {table} WHERE {condition}", values).fetchone()
        if not count:
            return
        log.error(
            "key_store %s: %d rows of %s cannot be read; they are in %s_aside now", self.path, count, table, table
        )
        with self._db:
            self._db.execute("BEGIN")
            self._db.execute(f"CREATE TABLE IF NOT EXISTS {table}_aside AS SELECT * FROM {table} WHERE 0")
            self._db.execute(f"INSERT INTO {table}_aside SELECT * FROM {table} WHERE {condition}", values)
            self._db.execute(f"DELETE FROM {table} WHERE {condition}", values)

    def used(self, by: str, since: date) -> dict[str, Amount]:
        """What each key or team has used since a day. `by` is `key` or `team`."""
        assert by in GROUPS
        counts = ("requests", "input + output", "money")
        rows = self._db.execute(
            f"SELECT {by}, {_sums(counts)} FROM usage WHERE day >= ? GROUP BY {by}", (since.isoformat(),)
        )
        return {name: Amount(*_joined(parts)) for name, *parts in rows}

    def report(self, by: Sequence[str], since: str, until: str) -> list[dict[str, Any]]:
        """Sums of usage by some of GROUPS, for days from `since` to `until`, both included."""
        assert by
        assert set(by) <= set(GROUPS)
        names = ", ".join(by)
        rows = self._db.execute(
            f"SELECT {names}, {_sums(_COUNTS)} FROM usage WHERE day BETWEEN ? AND ? GROUP BY {names} ORDER BY {names}",
            (since, until),
        )
        return [dict(zip((*by, *_COUNTS), (*row[: len(by)], *_joined(row[len(by) :])), strict=True)) for row in rows]

    def add(self, charges: Iterable[Charge]) -> None:
        """Add charges, all or none."""
        rows = [
            (c.day.isoformat(), c.key, c.team, c.model, 1, *(min(n, MOST) for n in (*c.usage, c.money)))
            for c in charges
        ]
        with self._db:  # a statement of its own each, so begin one transaction
            self._db.execute("BEGIN")
            self._db.executemany(_ADD, rows)
        self._dirty = True

    def put_key(self, digest: str, key: Key) -> None:
        self._put("INSERT OR REPLACE INTO keys VALUES (?, ?, ?)", (key.id, digest, msgspec.json.encode(key).decode()))

    def put_team(self, team: Team) -> None:
        self._put("INSERT OR REPLACE INTO teams VALUES (?, ?)", (team.name, msgspec.json.encode(team).decode()))

    def drop_team(self, name: str) -> None:
        self._put("DELETE FROM teams WHERE name = ?", (name,))

    def _put(self, statement: str, values: tuple[str, ...]) -> None:
        self._db.execute(statement, values)
        self.checkpoint()

    def flush(self) -> None:
        """Bring all commits to the disk. May run beside `add`."""
        if self._dirty:
            self._dirty = False
            with open(self._log, "rb") as file:
                os.fsync(file.fileno())

    def is_long(self) -> bool:
        """Whether the write-ahead log should be emptied."""
        return self._log.exists() and self._log.stat().st_size > MAX_LOG_BYTES

    def checkpoint(self) -> None:
        """Move the write-ahead log into the file, and both to the disk."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        self._db.close()


def _sums(counts: Sequence[str]) -> str:
    """Sums in two parts each: one that is too large for an integer would be an error of SQLite's."""
    return ", ".join(f"SUM(({count}) >> 32), SUM(({count}) & 0xffffffff)" for count in counts)


def _joined(parts: Sequence[int]) -> list[int]:
    return [(high << 32) + low for high, low in zip(parts[::2], parts[1::2], strict=True)]
