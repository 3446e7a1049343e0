"""What keys and teams have used and hold, in memory, and its way into the store.

A request reserves the most that it may use before it goes to a node. If its key or its team has less left, it is
refused. When the answer ends, the reservation is replaced by what was used. The client gets the end of its answer only
after the charge is committed: each answer that a client has seen whole is counted, even if the process is killed the
next moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from lmkit.errors import RequestError
from lmkit.log import get_logger
from lmkit.proxy.accounts.account import (
    PERIODS,
    Amount,
    Key,
    Period,
    Price,
    Team,
    Usage,
    changed,
    end_of,
    seconds_until,
    shown,
    start_of,
)  # fmt: skip
from lmkit.proxy.accounts.counters import Account
from lmkit.proxy.accounts.store import Charge, Store
from lmkit.web.auth import ApiKey

T = TypeVar("T")
SYNC_SECONDS = 1.0
MAX_ACCOUNTS = 100_000
SECRET_PREFIX = "lmk-"

log = get_logger(__name__)


def _now() -> datetime:
    return datetime.now(UTC)


def digest_of(secret: str | bytes) -> str:
    """Keys are drawn at random from 2^256, so a plain hash cannot be searched."""
    return hashlib.sha256(secret.encode() if isinstance(secret, str) else secret).hexdigest()


class Refusal(Exception):
    """A request that does not fit. `after` is the time in seconds until it may; None: never."""

    def __init__(self, error: RequestError, after: int | None) -> None:
        super().__init__(error.message)
        self.error, self.after = error, after


class Reservation:
    """The most that one running request may use. It ends with `settle` or `release`, once."""

    def __init__(self, ledger: Ledger, key: Key, model: str, most: Amount, price: Price | None) -> None:
        self._ledger, self._key, self._model, self._most, self._price = ledger, key, model, most, price
        self.accounts = ledger.accounts_of(key)
        for account in self.accounts:
            account.held = account.held.plus(most)

    def release(self) -> None:
        for account in self.accounts:
            account.held = account.held.plus(self._most, -1)

    async def settle(self, usage: Usage) -> None:
        """Charge what was used, and wait until it is committed."""
        self.release()
        money = self._price.of(usage) if self._price else 0
        day = self._ledger.today()
        await self._ledger.charge(Charge(day, self._key.id, self._key.team or "", self._model, usage, money))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's headers of limits per minute, and the same for each period: x-ratelimit-remaining-tokens-day."""
        now, found = self._ledger.now(), []
        for account, whose in zip(self.accounts, ("", "team-"), strict=False):
            if account.meter is not None and not whose:
                found += account.meter.headers()
            for kind, period, most in account.limits:
                left = max(0, most - getattr(account.used[period], kind) - getattr(account.held, kind))
                name = f"{whose}{kind}-{period}"
                found.append((f"x-ratelimit-limit-{name}".encode(), shown(kind, most).encode()))
                found.append((f"x-ratelimit-remaining-{name}".encode(), shown(kind, left).encode()))
                if end := end_of(period, now.date()):
                    found.append((f"x-ratelimit-reset-{name}".encode(), f"{seconds_until(end, now)}s".encode()))
        return found


class Ledger:
    """All keys and teams. `async with` it: it then writes in the background, and has written all at the end."""

    def __init__(self, path: Path, now: Callable[[], datetime] = _now) -> None:
        """Raises ConfigError for a file that cannot be used."""
        self.now = now
        self._store = Store(path)
        self._keys, self.teams = self._store.load()
        self._digests = {key.id: digest for digest, key in self._keys.items()}
        self._accounts: dict[tuple[str, str], Account] = {}
        self._thread = ThreadPoolExecutor(1, "key-store")
        self._pending: list[Charge] = []
        self._lock = asyncio.Lock()  # held while the thread works on the store
        self._failed = False
        self.prices: Mapping[str, Price] = {}  # by model; "*" = of all others
        self.ask_usage = True  # of nodes, with each chunk
        self.on_charge: Callable[[Charge], None] = lambda charge: None
        self._today = date.min
        for team in self.teams.values():
            self._accounts["team", team.name] = Account(f"the team {team.name}", team)
        for key in self._keys.values():
            self._accounts["key", key.id] = Account("this key", key)
        self._read_used(PERIODS)

    def _read_used(self, periods: Sequence[Period]) -> None:
        self._today = self.now().date()
        for kind in ("key", "team"):
            for period in periods:
                for name, amount in self._store.used(kind, start_of(period, self._today)).items():
                    if account := self._accounts.get((kind, name)):
                        account.used[period] = amount

    def today(self) -> date:
        """The day of UTC. Counters of periods that have ended begin anew."""
        today = self.now().date()
        if today != self._today:
            over = [period for period in PERIODS if start_of(period, today) != start_of(period, self._today)]
            self._today = today
            for account in self._accounts.values():
                account.used |= dict.fromkeys(over, Amount())
        return today

    # Requests

    def value(self, secret: bytes) -> ApiKey | None:
        """This key of the store, if it is in force. Its text there is the digest, which names the tenant."""
        digest = digest_of(secret)
        key = self._keys.get(digest)
        if key is None or key.revoked or self._has_expired(key):
            return None
        return ApiKey(key=digest, min_priority=key.min_priority)

    def _has_expired(self, key: Key) -> bool:
        return key.expires is not None and key.expires <= self.now()

    def check_expiry(self, secrets: Iterable[bytes]) -> None:
        """Raise RequestError if one of these is a key that has expired."""
        for key in filter(None, map(self._keys.get, map(digest_of, secrets))):
            if not key.revoked and self._has_expired(key):
                raise RequestError("invalid_api_key", f"this API key expired at {key.expires:%Y-%m-%d %H:%M} UTC")

    def key(self, held: ApiKey | None) -> Key | None:
        return self._keys.get(held.key) if held else None

    def accounts_of(self, key: Key) -> list[Account]:
        """The key's own, and its team's."""
        names = [("key", key.id), ("team", key.team)]
        return [self._accounts[kind, name] for kind, name in names if name]

    def allows(self, key: Key, model: str) -> bool:
        return all(account.rules.allows(model) for account in self.accounts_of(key))

    def price(self, model: str) -> Price | None:
        return self.prices.get(model, self.prices.get("*"))

    def room(self, key: Key, price: Price | None, prompt: int) -> float:
        """How many tokens of answers the key's limits and its team's leave, after a prompt of so many."""
        left = math.inf
        for account in self.accounts_of(key):
            for kind, amount in account.rest():
                if kind == "tokens":
                    left = min(left, amount - prompt)
                elif kind == "money" and price is not None:
                    left = min(left, price.answer_tokens(amount, prompt))
        return left

    def reserve(self, key: Key, model: str, most: Amount, price: Price | None) -> Reservation:
        """Hold the most that a request may use. Raises Refusal, and RequestError for what the key may never do."""
        today, accounts = self.today(), self.accounts_of(key)
        if not self.allows(key, model):
            raise RequestError("permission_denied", f"this key may not use the model {model[:100]!r}", "model")
        if price is None and any(kind == "money" for account in accounts for kind, _, _ in account.limits):
            message = f"this key has a limit of money, and the model {model[:100]!r} has no price"
            raise RequestError("permission_denied", message, "model")
        if self._failed:
            raise RequestError("overloaded", "the key store cannot be written now; try again")
        for account in accounts:
            if wrong := account.check(most):
                error, period = wrong
                end = end_of(period, today)
                raise Refusal(error, seconds_until(end, self.now()) if end else None)
        meters = [account.meter for account in accounts if account.meter]
        for meter in meters:
            try:
                meter.check()
            except RequestError as error:
                raise Refusal(error, meter.wait()) from None
        for meter in meters:
            meter.request()
        return Reservation(self, key, model, most, price)

    async def charge(self, charge: Charge) -> None:
        """Count what a request has used, and wait until it is committed."""
        for kind, name in (("key", charge.key), ("team", charge.team)):
            if account := self._accounts.get((kind, name)):
                account.used = {period: amount.plus(charge.amount) for period, amount in account.used.items()}
                if account.meter is not None:
                    account.meter.tokens(charge.usage.tokens)
        self._pending.append(charge)
        self.on_charge(charge)
        if self._lock.locked():  # the thread works on the store
            async with self._lock:
                self._commit()
        else:
            self._commit()

    # The way into the store

    def _commit(self) -> None:
        """Commit what is pending. It writes to the system's memory, so it takes less time than a thread's answer."""
        batch, self._pending = self._pending, []
        try:
            if batch:
                self._store.add(batch)
            self._failed = False
        except sqlite3.Error as error:
            log.error("%s: cannot be written, so requests are refused: %s", self._store.path, error)
            self._pending = batch
            self._failed = True

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        async with self._lock:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def _sync_forever(self) -> None:
        while True:
            await asyncio.sleep(SYNC_SECONDS)
            if self._failed and not self._lock.locked():
                self._commit()
            await self._flush()

    async def _flush(self) -> None:
        """Bring what is committed to the disk."""
        try:
            await asyncio.to_thread(self._store.flush)  # beside commits
            if self._store.is_long():
                await self._in_thread(self._store.checkpoint)
        except (OSError, sqlite3.Error) as error:
            log.error("%s: cannot be brought to the disk: %s", self._store.path, error)

    async def __aenter__(self) -> Ledger:
        self._sync = asyncio.create_task(self._sync_forever())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sync.cancel()
        await asyncio.gather(self._sync, return_exceptions=True)
        self._commit()
        with contextlib.suppress(sqlite3.Error):  # the log file has it
            await self._in_thread(self._store.checkpoint)
        self._thread.shutdown()
        self._store.close()

    # Changes by an administrator

    def listed(self) -> list[Key]:
        return sorted(self._keys.values(), key=lambda key: key.created or datetime.min.replace(tzinfo=UTC))

    def known(self, key_id: str) -> Key:
        """Raises RequestError."""
        digest = self._digests.get(key_id)
        if digest is None:
            raise RequestError("not_found", f"there is no key with the id {key_id[:100]!r}", "id")
        return self._keys[digest]

    async def create(self, fields: dict[str, Any]) -> tuple[Key, str]:
        """(a new key, its secret, which is told only here). Raises RequestError."""
        if len(self._keys) >= MAX_ACCOUNTS:
            raise RequestError("invalid_request", f"there are {MAX_ACCOUNTS} keys already")
        secret = SECRET_PREFIX + secrets.token_urlsafe(32)
        created = self.now().replace(microsecond=0).isoformat()
        key = _converted(Key, {"name": "", **fields, "id": secrets.token_hex(6), "created": created})
        await self._save_key(digest_of(secret), key)
        return key, secret

    async def update(self, key_id: str, changes: dict[str, Any]) -> Key:
        key: Key = _changed(self.known(key_id), changes, ("id", "created"))
        await self._save_key(self._digests[key_id], key)
        return key

    async def _save_key(self, digest: str, key: Key) -> None:
        if key.team is not None and key.team not in self.teams:
            raise RequestError("invalid_request", f"there is no team {key.team!r}", "team")
        await self._saved(self._store.put_key, digest, key)
        self._keys[digest], self._digests[key.id] = key, digest
        if account := self._accounts.get(("key", key.id)):
            account.apply(key)
        else:
            self._accounts["key", key.id] = Account("this key", key)

    async def set_team(self, name: str, changes: dict[str, Any]) -> Team:
        """Make a team or change it."""
        if name in self.teams:
            team: Team = _changed(self.teams[name], changes, ("name",))
        else:
            team = _converted(Team, {**changes, "name": name})
            if len(self.teams) >= MAX_ACCOUNTS:
                raise RequestError("invalid_request", f"there are {MAX_ACCOUNTS} teams already")
        await self._saved(self._store.put_team, team)
        self.teams[name] = team
        if account := self._accounts.get(("team", name)):
            account.apply(team)
        else:
            account = self._accounts["team", name] = Account(f"the team {name}", team)
            for period in PERIODS:  # a team of this name may have been removed
                used = await self._in_thread(self._store.used, "team", start_of(period, self.today()))
                account.used[period] = account.used[period].plus(used.get(name, Amount()))
        return team

    async def remove_team(self, name: str) -> None:
        if name not in self.teams:
            raise RequestError("not_found", f"there is no team {name[:100]!r}", "name")
        if members := sum(key.team == name for key in self._keys.values()):
            raise RequestError("invalid_request", f"{members} keys belong to the team {name!r}; move them first")
        await self._saved(self._store.drop_team, name)
        del self.teams[name]
        del self._accounts["team", name]

    async def _saved(self, work: Callable[..., None], *args: Any) -> None:
        try:
            await self._in_thread(work, *args)
        except sqlite3.Error as error:
            log.error("%s: cannot be written: %s", self._store.path, error)
            raise RequestError("internal_error", "the change cannot be saved; nothing has changed") from None

    def account(self, kind: str, name: str) -> Account:
        self.today()
        return self._accounts[kind, name]

    async def report(self, by: Sequence[str], since: str, until: str) -> list[dict[str, Any]]:
        """Sums of all that is committed, see Store.report."""
        return await self._in_thread(self._store.report, by, since, until)


def _converted(kind: type[T], fields: dict[str, Any]) -> T:
    try:
        return msgspec.convert(fields, kind)
    except ValueError as error:
        raise RequestError("invalid_request", str(error)) from None


def _changed(account: Any, changes: dict[str, Any], fixed: Sequence[str]) -> Any:
    try:
        return changed(account, changes, fixed)
    except ValueError as error:
        raise RequestError("invalid_request", str(error)) from None
