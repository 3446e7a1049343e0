"""`lmkit proxy keys`, `teams` and `usage`: the keys of a running proxy's key_store, and what they have used."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

import typer

from lmkit.cli.proxy_call import DEFAULT_PROXY, AdminKey, ProxyOption, call
from lmkit.cli.usage import Group
from lmkit.errors import ConfigError

KEYS, TEAMS = "/admin/keys", "/admin/teams"
Limit = Annotated[
    list[str] | None,
    typer.Option(
        help="tokens/day=100000 (requests, tokens or money; minute, day, week, month or total). May be repeated."
    ),
]
Model = Annotated[
    list[str] | None, typer.Option(help="A model that it may use, or qwen*; default all. May be repeated.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
MinPriority = Annotated[int | None, typer.Option(help="The soonest priority of its requests; default 0.")]
Expires = Annotated[str | None, typer.Option(help="A day (2027-01-31), a time with its zone, 30d, or never.")]

keys = typer.Typer(cls=Group, help="Manage the keys of a running proxy.", rich_markup_mode=None)
teams = typer.Typer(cls=Group, help="Manage teams, whose keys share limits.", rich_markup_mode=None)


@keys.command()
def create(
    name: Annotated[str, typer.Argument(help="What the lists call the key.")],
    team: Annotated[str | None, typer.Option(help="The team that it belongs to.")] = None,
    limit: Limit = None,
    model: Model = None,
    min_priority: MinPriority = None,
    expires: Expires = None,
    json: Json = False,
    proxy: ProxyOption = DEFAULT_PROXY,
    admin_key: AdminKey = None,
) -> None:
    """Make a key and print it. It is shown only once."""
    fields = {"name": name, **_fields(team, limit, model, min_priority, expires)}
    made = call("POST", proxy, admin_key, KEYS, json=fields)
    print(jsonlib.dumps(made, indent=2) if json else made["key"])


@keys.command("update")
def update_key(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The key's id, from `keys list`.")],
    name: Annotated[str | None, typer.Option(help="A new name.")] = None,
    team: Annotated[str | None, typer.Option(help='The team that it belongs to; "" = none.')] = None,
    limit: Limit = None,
    model: Model = None,
    min_priority: MinPriority = None,
    expires: Expires = None,
    proxy: ProxyOption = DEFAULT_PROXY,
    admin_key: AdminKey = None,
) -> None:
    """Change a key. `--limit tokens/day=` takes a limit away."""
    fields = _fields(team, limit, model, min_priority, expires) | ({"name": name} if name else {})
    changed = call("PATCH", proxy, admin_key, KEYS, params={"id": key_id}, json=fields)
    print(f"changed {changed['id']} ({changed['name']})")


@keys.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The key's id, from `keys list`.")],
    proxy: ProxyOption = DEFAULT_PROXY,
    admin_key: AdminKey = None,
) -> None:
    """Refuse a key from now on. What it has used stays known."""
    revoked = call("DELETE", proxy, admin_key, KEYS, params={"id": key_id})
    print(f"revoked {revoked['id']} ({revoked['name']})")


@keys.command("list")
def list_keys(json: Json = False, proxy: ProxyOption = DEFAULT_PROXY, admin_key: AdminKey = None) -> None:
    """Show all keys, their limits and what they have used in this month."""
    found = call("GET", proxy, admin_key, KEYS)
    if json:
        print(jsonlib.dumps(found, indent=2))
        return
    rows = [[key["id"], key["name"], key["team"] or "", _state(key), *_account(key)] for key in found["data"]]
    _show(f"keys of {proxy}", ("id", "name", "team", "state", "limits", "requests", "tokens", "money"), rows)


@teams.command("set")
def set_team(
    name: Annotated[str, typer.Argument(help="The team's name.")],
    limit: Limit = None,
    model: Model = None,
    proxy: ProxyOption = DEFAULT_PROXY,
    admin_key: AdminKey = None,
) -> None:
    """Make a team, or change it. `--limit tokens/day=` takes a limit away."""
    fields = _fields(None, limit, model, None, None)
    call("PATCH", proxy, admin_key, TEAMS, params={"name": name}, json=fields)
    print(f"saved the team {name}")


@teams.command("list")
def list_teams(json: Json = False, proxy: ProxyOption = DEFAULT_PROXY, admin_key: AdminKey = None) -> None:
    """Show all teams, their limits and what they have used in this month."""
    found = call("GET", proxy, admin_key, TEAMS)
    if json:
        print(jsonlib.dumps(found, indent=2))
        return
    rows = [[team["name"], *_account(team)] for team in found["data"]]
    _show(f"teams of {proxy}", ("name", "limits", "requests", "tokens", "money"), rows)


@teams.command("remove")
def remove_team(
    name: Annotated[str, typer.Argument(help="The team's name.")],
    proxy: ProxyOption = DEFAULT_PROXY,
    admin_key: AdminKey = None,
) -> None:
    """Remove a team that has no keys."""
    call("DELETE", proxy, admin_key, TEAMS, params={"name": name})
    print(f"removed the team {name}")


def usage(
    by: Annotated[str, typer.Option(help="What to sum by: some of day,key,team,model.")] = "day,key,team,model",
    since: Annotated[str | None, typer.Option("--from", help="The first day, YYYY-MM-DD.")] = None,
    until: Annotated[str | None, typer.Option("--to", help="The last day, YYYY-MM-DD.")] = None,
    form: Annotated[Literal["table", "csv", "json"], typer.Option("--format", help="How it is printed.")] = "table",
    proxy: ProxyOption = DEFAULT_PROXY,
    admin_key: AdminKey = None,
) -> None:
    """Show what keys have used. Days are those of UTC."""
    days = {name: day for name, day in (("from", since), ("to", until)) if day}
    params = {"by": by, "format": "csv" if form == "csv" else "json", **days}
    found = call("GET", proxy, admin_key, "/admin/usage", params=params)
    if form == "csv":
        print(found, end="")
    elif form == "json":
        print(jsonlib.dumps(found, indent=2))
    else:
        columns = [*by.split(","), *(["name"] if "key" in by.split(",") else [])]
        columns += ["requests", "input", "cached", "output", "money"]
        _show(f"usage of {proxy}", columns, [[_text(row[name]) for name in columns] for row in found["data"]])


def _fields(
    team: str | None,
    limits: Sequence[str] | None,
    models: Sequence[str] | None,
    min_priority: int | None,
    expires: str | None,
) -> dict[str, Any]:
    """The options that were given, as fields of the admin API."""
    fields: dict[str, Any] = {"team": team or None} if team is not None else {}
    if limits:
        fields["limits"] = dict(map(_limit, limits))
    if models:
        fields["models"] = [name for name in models if name]
    if min_priority is not None:
        fields["min_priority"] = min_priority
    if expires is not None:
        fields["expires"] = _expires(expires)
    return fields


def _limit(text: str) -> tuple[str, int | float | None]:
    name, equals, value = text.partition("=")
    try:
        if equals:
            return name, (int(value) if value.isdigit() else float(value)) if value else None
    except ValueError:
        pass
    raise ConfigError(f"--limit {text}: expected for example tokens/day=100000")


def _expires(text: str) -> str | None:
    if text == "never":
        return None
    try:
        if text.endswith("d"):
            return (datetime.now(UTC) + timedelta(days=float(text[:-1]))).isoformat()
        time = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise ConfigError(f"--expires {text}: expected 2027-01-31, a time with its zone, 30d, or never") from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).isoformat()


def _state(key: dict[str, Any]) -> str:
    if key["revoked"]:
        return "revoked"
    if key["expires"] is None:
        return "active"
    over = datetime.fromisoformat(key["expires"]) <= datetime.now(UTC)
    return "expired" if over else f"until {key['expires'][:10]}"


def _account(account: dict[str, Any]) -> list[str]:
    month = account["used"]["month"]
    limits = "\n".join(f"{name}={_text(value)}" for name, value in account["limits"].items())
    return [limits, *(_text(month[name]) for name in ("requests", "tokens", "money"))]


def _text(value: Any) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=SIMPLE)
    for column in columns:
        right = column in ("requests", "tokens", "money", "input", "cached", "output")
        table.add_column(column, justify="right" if right else "left", overflow="fold", no_wrap=column == "limits")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(markup=False).print(table)
