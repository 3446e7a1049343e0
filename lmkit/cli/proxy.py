"""`lmkit proxy`: run the proxy, and manage the nodes of a running one."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmkit.cli import proxy_keys
from lmkit.cli.options import fields_of, takes
from lmkit.cli.proxy_call import DEFAULT_PROXY, AdminKey, ProxyOption, call
from lmkit.cli.settings import ProxyGroup
from lmkit.config import TenantsBy
from lmkit.errors import ConfigError
from lmkit.extras import needed_for
from lmkit.garbage import search_rarely
from lmkit.proxy.config import NodeConfig, ProxyConfig, load_config

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(
    cls=ProxyGroup,
    help="One OpenAI address in front of many nodes. Every option may also stand in the environment: "
    "LMKIT_PROXY_PORT=9000 is --port 9000.",
    add_completion=False,
    invoke_without_command=True,
    rich_markup_mode=None,
)
app.add_typer(proxy_keys.keys, name="keys")
app.add_typer(proxy_keys.teams, name="teams")
app.command("usage")(proxy_keys.usage)

WAIT_SECONDS = 0.5  # between looks at a node that drains


@app.callback()
@takes(fields=fields_of(ProxyConfig, is_partial=True))
def proxy(
    context: typer.Context,
    config: Annotated[str | None, typer.Option(help="YAML or JSON file.")] = None,
    node: Annotated[list[str] | None, typer.Option(help="URL of a node, http://HOST:PORT; may be repeated.")] = None,
    *,
    fields: dict[str, Any],
) -> None:
    """Forward requests to nodes by the model they name. Without a command, runs until SIGTERM."""
    if context.invoked_subcommand is not None:
        sources = [context.get_parameter_source(str(param.name)) for param in context.command.params]
        if any(source is not None and source.name == "COMMANDLINE" for source in sources):
            raise ConfigError(f"lmkit proxy {context.invoked_subcommand}: options come after the command")
        return
    search_rarely()
    import asyncio
    import functools
    import secrets

    import msgspec

    from lmkit import log
    from lmkit.config import parse
    from lmkit.proxy.auth import Keys
    from lmkit.proxy.reload import ConfigFile
    from lmkit.proxy.server import run
    from lmkit.web.running import registered
    from lmkit.web.tracing import start_if_wanted

    nodes = [parse({"url": url}, NodeConfig, "--node") for url in node or ()]
    load = functools.partial(load_config, config, nodes=nodes, **fields)
    file = ConfigFile(config, load) if config is not None else None
    resolved = file.config if file is not None else load()
    log.setup(resolved.log_level, log_format=resolved.log_format)
    start_if_wanted("lmkit-proxy", resolved.otlp_traces_endpoint)
    if resolved.grpc_port is not None:
        with needed_for("--grpc-port"):
            import grpc_health.v1  # noqa: F401
    own = None
    if not Keys.of(resolved.api_keys, resolved.admin_keys).for_admin:
        own = secrets.token_urlsafe(32)
        resolved = msgspec.structs.replace(resolved, admin_keys=(own,))
    with registered("proxy", "", resolved.drain_seconds, own) as tell:

        def on_ready(url: str) -> None:
            tell(url)
            print(f"proxy on {url}", flush=True)

        asyncio.run(run(resolved, on_ready, file))


@app.command()
def add(
    url: Annotated[str, typer.Argument(help="The node's URL, as the proxy reaches it, without /v1.")],
    model: Annotated[list[str] | None, typer.Option(help="A model that it serves; default: the proxy asks it.")] = None,
    weight: Annotated[float, typer.Option(help="Its share of the load.")] = 1.0,
    tag: Annotated[list[str] | None, typer.Option(help="A class of it, for rules; may be repeated.")] = None,
    tenants: Annotated[
        TenantsBy, typer.Option(help="How it learns of clients: lmkit by header, vLLM and SGLang by cache_salt.")
    ] = "header",
    lease: Annotated[
        float | None, typer.Option(help="Seconds after which it must be added again; default never.")
    ] = None,
    node_key: Annotated[str | None, typer.Option(help="API key that the proxy sends to the node.")] = None,
    proxy: ProxyOption = DEFAULT_PROXY,
    admin_key: AdminKey = None,
) -> None:
    """Add a node to a running proxy, or change one."""
    fields = {
        "url": url,
        "models": model or None,
        "weight": weight,
        "tags": tag or None,
        "tenants": tenants,
        "lease_seconds": lease,
        "api_key": node_key,
    }
    body = {name: value for name, value in fields.items() if value is not None}
    answer = call("POST", proxy, admin_key, json=body)
    (state,) = answer["data"]
    saved = "" if answer["persistent"] else " (not saved: the proxy has no state_file)"
    models = ", ".join(state["models"]) or "no models yet"
    print(f"added {state['url']}, {models if state['healthy'] else 'not up: ' + state['reason']}{saved}")


@app.command()
def remove(
    url: Annotated[str, typer.Argument(help="The node's URL.")],
    proxy: ProxyOption = DEFAULT_PROXY,
    admin_key: AdminKey = None,
) -> None:
    """Remove a node; its running requests continue."""
    answer = call("DELETE", proxy, admin_key, params={"url": url})
    saved = "" if answer["persistent"] else " (not saved: the proxy has no state_file)"
    print(f"removed {answer['removed']}{saved}")


@app.command()
def drain(
    url: Annotated[str, typer.Argument(help="The node's URL.")],
    undo: Annotated[bool, typer.Option("--undo", help="Give it requests again.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when its last request has ended.")] = False,
    proxy: ProxyOption = DEFAULT_PROXY,
    admin_key: AdminKey = None,
) -> None:
    """Give a node no new requests, and let its running ones end."""
    import time

    answer = call("DELETE" if undo else "POST", proxy, admin_key, path="/admin/nodes/drain", params={"url": url})
    (state,) = answer["data"]
    while wait and not undo and state["in_flight"]:
        time.sleep(WAIT_SECONDS)
        known = {node["url"]: node for node in call("GET", proxy, admin_key)["data"]}
        state = known.get(state["url"], state | {"in_flight": 0})  # it may have been removed
    saved = "" if answer["persistent"] else " (not saved: the proxy has no state_file)"
    print(f"{state['url']} {'gets requests again' if undo else 'drains'}, {state['in_flight']} running{saved}")


@app.command("dashboard")
def show_dashboard(proxy: ProxyOption = DEFAULT_PROXY, admin_key: AdminKey = None) -> None:
    """Print the address of the dashboard, with the admin key."""
    from lmkit.environment import environment
    from lmkit.web.running import admin_key_at

    key = admin_key or admin_key_at(proxy) or environment().api_key
    print(f"{proxy.rstrip('/')}/dashboard" + (f"#key={key}" if key else ""))


@app.command()
def status(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    proxy: ProxyOption = DEFAULT_PROXY,
    admin_key: AdminKey = None,
) -> None:
    """Show the nodes of a running proxy."""
    answer = call("GET", proxy, admin_key)
    if json:
        print(jsonlib.dumps(answer, indent=2))
        return
    from rich.console import Console

    Console(markup=False).print(_table(proxy, answer))


def _table(proxy: str, answer: dict[str, Any]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    caption = f"policy {answer['policy']}, changes are {'' if answer['persistent'] else 'not '}saved"
    table = Table(title=f"nodes of {proxy}", title_justify="left", caption=caption, caption_justify="left", box=SIMPLE)
    table.add_column("node", overflow="fold")
    for column in ("state", "models"):
        table.add_column(column, overflow="fold")
    for column in ("busy", "done", "failed", "first byte"):
        table.add_column(column, justify="right", no_wrap=True)
    for node in answer["data"]:
        state = Text("up" if node["healthy"] else "down", style="green" if node["healthy"] else "red")
        if node["draining"]:
            state.append(", draining", style="yellow")
        if node["breaker"] != "closed":
            state.append(f", breaker {node['breaker']} ({node['breaker_reason']})", style="red")
        if node["ramp"] < 1:
            state.append(f", starts slowly at {node['ramp']:.0%}", style="yellow")
        if node["reason"]:
            state.append(f": {node['reason']}", style="default")
        latency = "" if node["latency_seconds"] is None else f"{1000 * node['latency_seconds']:.0f} ms"
        counts = [str(node["in_flight"]), str(node["requests"]), str(node["failovers"] + node["breaks"])]
        table.add_row(Text(node["url"]), state, Text(", ".join(node["models"])), *counts, latency)
    return table
