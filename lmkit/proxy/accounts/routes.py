"""The routes for keys, teams and usage. Each handler returns what is shown as JSON, or a response of its own."""

from __future__ import annotations

import csv
import io
from collections.abc import Awaitable, Callable
from datetime import date
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response

from lmkit.errors import RequestError
from lmkit.proxy.accounts.account import PERIODS, UNIT, Key, Rules
from lmkit.proxy.accounts.ledger import Ledger
from lmkit.proxy.accounts.store import GROUPS
from lmkit.proxy.auth import Access


class Call(NamedTuple):
    ledger: Ledger
    key: Key | None  # the caller's, if the store has it
    query: dict[str, list[str]]
    fields: dict[str, Any]  # of the body

    def one(self, name: str, default: str | None = None) -> str:
        """A parameter of the query. Raises RequestError."""
        values = self.query.get(name, [] if default is None else [default])
        if len(values) != 1:
            raise RequestError("invalid_request", f"give {name} once in the query: ?{name}=...", name)
        return values[0]


Handler = Callable[[Call], Awaitable[Any]]


def _view(ledger: Ledger, kind: str, name: str, rules: Rules) -> dict[str, Any]:
    account = ledger.account(kind, name)
    used = {
        period: {**amount._asdict(), "money": amount.money / UNIT}
        for period, amount in ((period, account.used[period]) for period in PERIODS)
    }
    return {**msgspec.to_builtins(rules), "used": used, "left": account.left()}


def _key(call: Call, key: Key) -> dict[str, Any]:
    return _view(call.ledger, "key", key.id, key)


async def list_keys(call: Call) -> Any:
    return {"object": "list", "data": [_key(call, key) for key in call.ledger.listed()]}


async def create_key(call: Call) -> Any:
    key, secret = await call.ledger.create(call.fields)
    return {"key": secret, **_key(call, key)}


async def update_key(call: Call) -> Any:
    return _key(call, await call.ledger.update(call.one("id"), call.fields))


async def revoke_key(call: Call) -> Any:
    return _key(call, await call.ledger.update(call.one("id"), {"revoked": True}))


async def list_teams(call: Call) -> Any:
    teams = sorted(call.ledger.teams.items())
    return {"object": "list", "data": [_view(call.ledger, "team", name, team) for name, team in teams]}


async def set_team(call: Call) -> Any:
    name = call.one("name")
    return _view(call.ledger, "team", name, await call.ledger.set_team(name, call.fields))


async def remove_team(call: Call) -> Any:
    await call.ledger.remove_team(call.one("name"))
    return {"removed": call.one("name")}


async def show_usage(call: Call) -> Any:
    """What was used, by day, key, team and model, or by some of them."""
    by = call.one("by", ",".join(GROUPS)).split(",")
    if not set(by) <= set(GROUPS) or len(set(by)) != len(by):
        raise RequestError("invalid_request", f"by={','.join(by)[:100]}: expected some of {','.join(GROUPS)}", "by")
    since, until = (_day(call, name, default) for name, default in (("from", "0001-01-01"), ("to", "9999-12-31")))
    rows = await call.ledger.report(by, since, until)
    names = {key.id: key.name for key in call.ledger.listed()}
    for row in rows:
        row["money"] /= UNIT
        if "key" in row:
            row["name"] = names.get(row["key"], "")
    match call.one("format", "json"):
        case "json":
            return {"object": "list", "data": rows}
        case "csv":
            columns = [*by, *(["name"] if "key" in by else []), "requests", "input", "cached", "output", "money"]
            text = io.StringIO()
            writer = csv.DictWriter(text, columns)
            writer.writeheader()
            writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
            return Response(text.getvalue(), media_type="text/csv")
        case other:
            raise RequestError("invalid_request", f"format={other[:100]}: expected json or csv", "format")


def _day(call: Call, name: str, default: str) -> str:
    text = call.one(name, default)
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise RequestError("invalid_request", f"{name}={text[:100]}: expected a day, YYYY-MM-DD", name) from None


def _cell(value: Any) -> Any:
    """A text that no spreadsheet takes for a formula: model names come from nodes."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


async def show_own(call: Call) -> Any:
    """What the caller's own key may use and has used."""
    if call.key is None:
        raise RequestError("not_found", "this key is not one of the key_store, so nothing of it is counted")
    return _key(call, call.key)


ROUTES: dict[str, dict[str, tuple[Access, Handler]]] = {
    "/v1/usage": {"GET": (Access.USER, show_own)},
    "/admin/keys": {
        "GET": (Access.ADMIN, list_keys),
        "POST": (Access.ADMIN, create_key),
        "PATCH": (Access.ADMIN, update_key),
        "DELETE": (Access.ADMIN, revoke_key),
    },
    "/admin/teams": {
        "GET": (Access.ADMIN, list_teams),
        "PATCH": (Access.ADMIN, set_team),
        "DELETE": (Access.ADMIN, remove_team),
    },
    "/admin/usage": {"GET": (Access.ADMIN, show_usage)},
}
