"""`lmkit serve --dp N`: replicas of one model behind one address. It is a cluster of one group, without a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import typer

from lmkit.cli.settings import origin
from lmkit.config import Listener, ServerConfig, parse
from lmkit.conflicts import REPLICAS, excluded
from lmkit.environment import default_num_threads
from lmkit.errors import ConfigError

if TYPE_CHECKING:
    from lmkit.cluster.config import ClusterConfig

_OF_THE_ADDRESS = (
    "model", "served_model_name", "config", "print_config", "host", "port", "api_key", "allowed_host", "cors_origin",
    "chat_page", "cors_credentials", "root_path", "max_connections_per_address", "drain_seconds", "dp", "num_threads",
)  # fmt: skip
_OF_THE_PROXY = (
    *Listener.__struct_fields__, "api_keys", "max_connections_per_address", "max_body_bytes", "body_memory",
    "drain_seconds", "log_level",
)  # fmt: skip
_SHARED = ("weights_memory", "kv_memory", "kv_host_memory", "image_memory", "memory_budget")  # each has its part


def check(context: typer.Context) -> None:
    """Raise ConfigError for options of `lmkit serve` that do not go together with replicas."""
    given, model = _given(context), str(context.params["model"])
    if model.endswith((".yaml", ".yml")):
        raise ConfigError(f"--dp: {model} has several models; describe their replicas in a file for `lmkit up`")
    params: dict[str, Any] = {str(param.name): param for param in context.command.params}
    for name, reason in excluded(REPLICAS).items():
        if name in given:
            raise ConfigError(f"{origin(context, params[name])} does not go together with --dp: {reason}")
    if not given.get("kv_events", ":0").endswith(":0"):
        raise ConfigError("--kv-events: each replica needs an address of its own; port 0 takes free ones")


def cluster(context: typer.Context, server: ServerConfig) -> ClusterConfig:
    """The cluster that the options of `lmkit serve` describe. Raises ConfigError."""
    from lmkit.cluster.config import ClusterConfig, Group

    given, count, model = _given(context), context.params["dp"], context.params["model"]
    threads = context.params["num_threads"] or default_num_threads()
    options = {name: value for name, value in given.items() if name not in _OF_THE_ADDRESS}
    options |= {name: _divided(options[name], count) for name in _SHARED if options.get(name)}
    names = server.served_model_name
    group = Group(
        model=model,
        name=names[0] if names else None,
        replicas=count,
        cores=max(1, threads // count),
        options=options,
    )
    proxy = {name: getattr(server, name) for name in _OF_THE_PROXY}
    proxy["aliases"] = dict.fromkeys(names[1:], names[0]) if names else {}
    fields = {"models": [group], "proxy": proxy, "drain_seconds": max(server.drain_seconds, 1e-3)}
    return parse(msgspec.to_builtins(fields), ClusterConfig, "--dp")


def _divided(size: int | str, count: int) -> int | str:
    """The part of a replica: of bytes, or of a share like `30%`."""
    return size // count if isinstance(size, int) else f"{float(size.removesuffix('%')) / count:g}%"


def _given(context: typer.Context) -> dict[str, Any]:
    """The options that the user gave, wherever they stand."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}
    return {name: value for name, value in context.params.items() if name in given and value not in (None, [], ())}


def run(config: ClusterConfig) -> None:
    """Run the replicas until a signal. Raises LMKitError if the first ones cannot start."""
    import asyncio

    from lmkit import log
    from lmkit.cluster.cluster import Cluster
    from lmkit.formats.hub import resolve_model_path
    from lmkit.web.running import registered

    (group,) = config.models
    log.setup(config.proxy.log_level, log_format=config.proxy.log_format)
    resolve_model_path(group.model, revision=group.options.get("revision"))  # once, before replicas look for it
    with registered("serve", group.called, config.proxy.drain_seconds + config.drain_seconds) as tell:

        def on_ready(url: str) -> None:
            tell(url)
            print(f"serving {group.called} on {url}", flush=True)

        def say(id: str, line: str) -> None:
            print(f"{id} | {line}", flush=True)

        asyncio.run(Cluster(lambda: config, None, say, on_ready).run())
