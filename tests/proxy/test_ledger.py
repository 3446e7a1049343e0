"""Keys, limits and what was used: exact in memory, in the store, and after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmkit.errors import ConfigError, RequestError
from lmkit.proxy.accounts.account import Amount, Price, Usage, end_of, start_of
from lmkit.proxy.accounts.ledger import Ledger, Refusal, digest_of
from lmkit.proxy.accounts.store import Store
from lmkit.proxy.auth import Keys

pytestmark = pytest.mark.anyio


class Clock:
    def __init__(self, text: str) -> None:
        self.set(text)

    def set(self, text: str) -> None:
        self.now = datetime.fromisoformat(text).replace(tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


PRICE = Price(input=0.15, cached_input=0.0375, output=0.6)


async def request(ledger: Ledger, key_id: str, usage: Usage, most: Amount | None = None, model: str = "m") -> None:
    key = ledger.known(key_id)
    reservation = ledger.reserve(key, model, most or Amount(1, usage.tokens, PRICE.of(usage)), PRICE)
    await asyncio.sleep(0)
    await reservation.settle(usage)


async def test_a_price_is_exact_and_cached_tokens_have_their_own() -> None:
    assert PRICE.of(Usage(1_000_000, 0, 0)) == 15 * 10**9  # 0.15 in units of 10^-11
    assert PRICE.of(Usage(4, 4, 0)) == 4 * 3750
    assert PRICE.of(Usage(10, 4, 3)) == 6 * 15_000 + 4 * 3750 + 3 * 60_000
    assert Price(input=2.0).of(Usage(4, 4, 9)) == 4 * 200_000  # no price of its own: as input


async def test_periods() -> None:
    day = datetime(2026, 12, 31, tzinfo=UTC).date()  # a Thursday
    starts = [str(start_of(period, day)) for period in ("day", "week", "month", "total")]
    assert starts == ["2026-12-31", "2026-12-28", "2026-12-01", "0001-01-01"]
    ends = [str(end_of(period, day)) for period in ("day", "week", "month", "total")]
    assert ends == ["2027-01-01", "2027-01-04", "2027-01-01", "None"]


@pytest.mark.parametrize("limit", ["requests/day", "tokens/week", "money/month", "tokens/total"])
async def test_of_many_requests_at_once_exactly_those_pass_that_fit(tmp_path: Path, limit: str) -> None:
    each = Usage(6, 2, 4)
    most = {"requests": 7, "tokens": 70, "money": 7 * PRICE.of(each) / 10**11}[limit.partition("/")[0]]
    async with Ledger(tmp_path / "keys.db") as ledger:
        key, _ = await ledger.create({"name": "a", "limits": {limit: most}})
        results = await asyncio.gather(*(request(ledger, key.id, each) for _ in range(50)), return_exceptions=True)
        refused = [result for result in results if isinstance(result, Refusal)]
        assert len(refused) == 43
        assert {error.error.code for error in refused} == {"insufficient_quota"}
        assert {error.after is None for error in refused} == {limit.endswith("total")}
        assert ledger.account("key", key.id).held == Amount()
        assert list(ledger.account("key", key.id).left().values()) == [0]
    async with Ledger(tmp_path / "keys.db") as again:
        assert again.account("key", key.id).used["total"] == Amount(7, 70, 7 * PRICE.of(each))
        with pytest.raises(Refusal):
            await request(again, key.id, each)


async def test_a_team_bounds_all_its_keys_together(tmp_path: Path) -> None:
    async with Ledger(tmp_path / "keys.db") as ledger:
        await ledger.set_team("shop", {"limits": {"requests/day": 3}, "models": ["m*"]})
        ids = [(await ledger.create({"name": name, "team": "shop"}))[0].id for name in ("a", "b")]
        for key_id in (ids[0], ids[1], ids[0]):
            await request(ledger, key_id, Usage(1, 0, 1))
        with pytest.raises(Refusal, match="the team shop may use 3 requests a day: 3 are used"):
            await request(ledger, ids[1], Usage(1, 0, 1))
        with pytest.raises(RequestError, match="may not use the model 'other'"):
            await request(ledger, ids[1], Usage(1, 0, 1), model="other")
        with pytest.raises(RequestError, match="2 keys belong to the team 'shop'"):
            await ledger.remove_team("shop")


async def test_counters_begin_anew_with_their_period_also_after_a_restart(tmp_path: Path) -> None:
    clock = Clock("2026-11-29T23:59:59")  # a Sunday
    async with Ledger(tmp_path / "keys.db", clock) as ledger:
        key, _ = await ledger.create({"name": "a", "limits": {"requests/day": 1}})
        await request(ledger, key.id, Usage(1, 0, 1))
        with pytest.raises(Refusal) as refused:
            await request(ledger, key.id, Usage(1, 0, 1))
        assert refused.value.after == 2
        clock.set("2026-11-30T00:00:01")
        await request(ledger, key.id, Usage(1, 0, 1))
        counts = {period: amount.requests for period, amount in ledger.account("key", key.id).used.items()}
        assert counts == {"day": 1, "week": 1, "month": 2, "total": 2}
    clock.set("2026-12-01T00:00:00")
    async with Ledger(tmp_path / "keys.db", clock) as again:
        counts = {period: amount.requests for period, amount in again.account("key", key.id).used.items()}
        assert counts == {"day": 0, "week": 1, "month": 0, "total": 2}


async def test_a_reservation_holds_what_is_not_used_yet(tmp_path: Path) -> None:
    async with Ledger(tmp_path / "keys.db") as ledger:
        key, _ = await ledger.create({"name": "a", "limits": {"tokens/day": 100}})
        held = ledger.reserve(key, "m", Amount(1, 60, 0), None)
        with pytest.raises(Refusal, match="0 are used, 60 are reserved for running requests, this request may use 50"):
            ledger.reserve(key, "m", Amount(1, 50, 0), None)
        await held.settle(Usage(20, 0, 5))
        ledger.reserve(key, "m", Amount(1, 75, 0), None).release()
        assert ledger.account("key", key.id).left() == {"tokens/day": 75}


async def test_limits_per_minute(tmp_path: Path) -> None:
    async with Ledger(tmp_path / "keys.db") as ledger:
        key, _ = await ledger.create({"name": "a", "limits": {"requests/minute": 2}})
        for _ in range(2):
            await request(ledger, key.id, Usage(1, 0, 1))
        with pytest.raises(Refusal, match="this key may have 2 requests a minute"):
            await request(ledger, key.id, Usage(1, 0, 1))
        await ledger.update(key.id, {"models": ["m"]})  # a limit that did not change goes on counting
        with pytest.raises(Refusal):
            await request(ledger, key.id, Usage(1, 0, 1))


async def test_money_needs_a_price(tmp_path: Path) -> None:
    async with Ledger(tmp_path / "keys.db") as ledger:
        key, _ = await ledger.create({"name": "a", "limits": {"money/day": 1}})
        with pytest.raises(RequestError, match="has no price"):
            ledger.reserve(key, "m", Amount(1, 1, 0), None)


async def test_a_key_is_stored_as_its_digest_only(tmp_path: Path) -> None:
    path = tmp_path / "keys.db"
    async with Ledger(path) as ledger:
        key, secret = await ledger.create({"name": "a"})
        found = ledger.value(secret.encode())
        assert found is not None
        assert (found.key, ledger.key(found)) == (digest_of(secret), key)
        assert ledger.value(secret.upper().encode()) is None
        assert ledger.value(digest_of(secret).encode()) is None
    assert path.stat().st_mode & 0o777 == 0o600
    for file in tmp_path.iterdir():
        assert secret.encode() not in file.read_bytes()


async def test_an_expired_and_a_revoked_key_are_refused_and_keep_their_usage(tmp_path: Path) -> None:
    clock = Clock("2026-11-29T12:00:00")
    async with Ledger(tmp_path / "keys.db", clock) as ledger:
        key, secret = await ledger.create({"name": "a", "expires": "2026-11-30T00:00:00Z"})
        _, right = await ledger.create({"name": "b"})
        keys = Keys.of(["other"], [], ledger)
        header, beside = [(b"x-api-key", secret.encode())], (b"authorization", f"Bearer {right}".encode())
        assert keys.find(header) == ledger.value(secret.encode())
        assert keys.find([*header, beside]) is None  # who asks?
        assert keys.find([*header, (b"authorization", b"Bearer other")]) is None
        await request(ledger, key.id, Usage(1, 0, 1))
        clock.set("2026-11-30T00:00:00")
        with pytest.raises(RequestError, match="expired at 2026-11-30 00:00 UTC"):
            keys.find(header)
        assert keys.find([*header, beside]) == ledger.value(right.encode())  # the right one counts
        await ledger.update(key.id, {"expires": None})
        assert keys.find(header)
        await ledger.update(key.id, {"revoked": True})
        assert keys.find(header) is None
        assert keys.find([*header, beside]) == ledger.value(right.encode())
        assert [row["requests"] for row in await ledger.report(("key",), "2026-11-29", "2026-11-29")] == [1]


WRONG: list[dict[str, Any]] = [
    {"name": "<b>"}, {"name": "a", "limits": {"tokens": 1}}, {"name": "a", "limits": {"tokens/day": 1.5}},
    {"name": "a", "limits": {"money/day": -1}}, {"name": "a", "limits": {"requests/minute": 0}},
    {"name": "a", "expires": "2026-11-30"}, {"name": "a", "team": "none"}, {"name": "a", "key": "mine"},
    {"name": "a", "min_priority": 1001}, {"name": "a", "models": "m"},
]  # fmt: skip


@pytest.mark.parametrize("fields", WRONG)
async def test_wrong_fields_are_refused_and_nothing_is_made(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with Ledger(tmp_path / "keys.db") as ledger:
        with pytest.raises(RequestError) as refused:
            await ledger.create(fields)
        assert refused.value.code == "invalid_request"
        assert ledger.listed() == []


async def test_one_proxy_uses_a_store_and_a_wrong_file_is_refused(tmp_path: Path) -> None:
    async with Ledger(tmp_path / "keys.db"):
        with pytest.raises(ConfigError, match="another proxy uses it"):
            Ledger(tmp_path / "keys.db")
    (tmp_path / "text").write_text("no database, but long enough to be read as one " * 100)
    with pytest.raises(ConfigError, match="text: file is not a database"):
        Ledger(tmp_path / "text")
    with pytest.raises(ConfigError, match="No such file"):
        Ledger(tmp_path / "none" / "keys.db")
    with sqlite3.connect(tmp_path / "later") as later:
        later.execute("PRAGMA user_version = 9")
    with pytest.raises(ConfigError, match="another version"):
        Ledger(tmp_path / "later")


async def test_a_store_that_cannot_be_written_refuses_requests_until_it_can_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Ledger(tmp_path / "keys.db") as ledger:
        key, _ = await ledger.create({"name": "a"})
        with monkeypatch.context() as broken:

            def fail(self: Store, charges: object) -> None:
                raise sqlite3.OperationalError("disk full")

            broken.setattr(Store, "add", fail)
            await request(ledger, key.id, Usage(1, 0, 1))
            with pytest.raises(RequestError, match="cannot be written") as refused:
                ledger.reserve(key, "m", Amount(1, 1, 0), PRICE)
            assert refused.value.status == 503
        ledger._commit()
        await request(ledger, key.id, Usage(1, 0, 1))
        assert [row["requests"] for row in await ledger.report(("key",), "0001-01-01", "9999-12-31")] == [2]


async def test_a_removed_team_that_comes_again_has_used_what_it_had(tmp_path: Path) -> None:
    async with Ledger(tmp_path / "keys.db") as ledger:
        await ledger.set_team("shop", {})
        key, _ = await ledger.create({"name": "a", "team": "shop"})
        await request(ledger, key.id, Usage(1, 0, 1))
        await ledger.update(key.id, {"team": None})
        await ledger.remove_team("shop")
        await ledger.set_team("shop", {})
        assert ledger.account("team", "shop").used["total"].requests == 1
        assert msgspec.to_builtins(ledger.known(key.id))["team"] is None


async def test_rows_that_cannot_be_read_are_put_aside_and_the_store_opens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.db"
    async with Ledger(path) as ledger:
        await ledger.set_team("shop", {})
        ids = [(await ledger.create({"name": name, "team": team}))[0].id for name, team in WHOSE]
        for key_id in ids:
            await request(ledger, key_id, Usage(5, 0, 5))
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("UPDATE keys SET value = '{broken' WHERE id = ?", (ids[1],))
        db.execute("UPDATE teams SET value = '{\"name\": 5}'")
        for day, count in ((1, 9e18), (2, "many"), (3, -1), (4, (1 << 63) - 1), (5, 1 << 61), (6, 1 << 61)):
            values = (f"2026-11-0{day}", ids[0], "", "m", 1, count, 0, 1, count)
            db.execute("INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
    async with Ledger(path) as again:
        assert [key.id for key in again.listed()] == [ids[0]]  # the team of the last is gone, and with it its limits
        assert again.account("key", ids[0]).used["total"].tokens == 2 * ((1 << 61) + 1) + 10
        await request(again, ids[0], Usage(5, 0, 1 << 62))
        rows = await again.report(("key",), "0001-01-01", "9999-12-31")  # in the order of random ids
        assert {row["key"]: row["output"] for row in rows}[ids[0]] > 1 << 61
    assert "4 rows of usage cannot be read; they are in usage_aside now" in caplog.text
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert [db.execute(f"SELECT COUNT(*) FROM {name}_aside").fetchone()[0] for name in ASIDE] == [1, 1, 4]


WHOSE = (("a", None), ("b", None), ("c", "shop"))
ASIDE = ("keys", "teams", "usage")
