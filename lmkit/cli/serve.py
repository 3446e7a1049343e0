"""`lmkit serve`: an OpenAI-compatible server for one or several models."""

from __future__ import annotations

import functools
import secrets
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from lmkit.cli import replicas
from lmkit.cli.model_list import ListedModel, listed_models
from lmkit.cli.node_role import with_role
from lmkit.cli.options import fields_of, struct_of, takes
from lmkit.cli.settings import read_config, resolved
from lmkit.config import EngineConfig, ServerConfig
from lmkit.environment import environment
from lmkit.errors import ConfigError
from lmkit.extras import needed_for
from lmkit.garbage import search_rarely
from lmkit.web.key_file import parse_keys, read_keys

SHARED_QUOTA = 0.5  # with several tenants, so that none can evict the KV of all others, or fill the queue

_server: Any = functools.partial(typer.Option, rich_help_panel="Server")


@takes(fields=fields_of(ServerConfig, group="Server"), engine_config=struct_of(EngineConfig, "engine options"))
def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help='A checkpoint folder, a .gguf file, a Hub name, "demo", or a YAML file of models.')
    ],
    more_models: Annotated[list[str] | None, typer.Argument(help="Further models, loaded when needed.")] = None,
    revision: Annotated[
        str | None, typer.Option(help="A branch, tag or commit of a model on the Hub.", rich_help_panel="Model")
    ] = None,
    config: Annotated[
        str | None, _server(help="A YAML file of options, name: value.", is_eager=True, callback=read_config)
    ] = None,
    print_config: Annotated[
        bool, _server("--print-config", help="Print all options and where each stands, and exit.")
    ] = False,
    dp: Annotated[
        int, _server(min=1, max=1000, help="Replicas of the model behind this address, each an engine of its own.")
    ] = 1,
    engine: Annotated[str | None, typer.Option(hidden=True, help="module:Class of another engine.")] = None,
    *,
    fields: dict[str, Any],
    engine_config: EngineConfig,
) -> None:
    """Serve a model over HTTP with OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models.

    Every option may also stand in the environment (LMKIT_KV_MEMORY=2G is --kv-memory 2G) and in a YAML file that
    --config names (kv_memory: 2G). The command line comes first, then the environment, then the file.
    """
    search_rarely()
    if print_config:
        print(resolved(context))
        return
    if engine_config.cluster == "torchrun" and environment().rank:
        from lmkit.turbo.runners.placing import follow

        follow()
        return
    if dp > 1:
        replicas.check(context)
    server_config = _server_config(fields)
    keys = parse_keys(server_config.api_keys)
    keys += read_keys(Path(server_config.api_key_file)) if server_config.api_key_file else []
    if len(keys) > 1 or any(key.role == "proxy" for key in keys):
        sources = {name: context.get_parameter_source(name) for name in ("cache_quota", "queue_quota")}
        shared = {name: SHARED_QUOTA for name, source in sources.items() if source and source.name == "DEFAULT"}
        engine_config = msgspec.structs.replace(engine_config, **shared)
    if dp > 1:
        replicas.run(replicas.cluster(context, server_config))
        return
    models = listed_models([model, *(more_models or [])], engine_config, server_config, revision)
    models = with_role(models, server_config.role, has_proxy=bool(server_config.proxies))
    raise typer.Exit(_run(models, server_config, engine))


def _server_config(fields: dict[str, Any]) -> ServerConfig:
    """The configuration that options describe, with the keys by which a proxy knows this server. Raises ConfigError."""
    names = tuple(name for text in fields["served_model_name"] for name in text.split(","))
    config = ServerConfig(**fields | {"served_model_name": names})
    if config.proxies and (config.api_keys or config.api_key_file or config.role != "both"):
        called_with = f"{secrets.token_urlsafe(32)} role=proxy"
        return msgspec.structs.replace(config, api_keys=(*config.api_keys, called_with))
    if not config.api_keys and not config.api_key_file:
        return msgspec.structs.replace(config, proxy_key=secrets.token_urlsafe(32))
    return config


def _run(models: list[ListedModel], config: ServerConfig, engine: str | None) -> int:
    """Serve until a signal; the exit status."""
    from lmkit import log
    from lmkit.formats.hub import resolve_model_path
    from lmkit.formats.known import remember
    from lmkit.serve.pool import ModelPool, PooledModel
    from lmkit.serve.server import serve
    from lmkit.turbo.transport.async_engine import AsyncEngine
    from lmkit.turbo.transport.messages import ENGINE
    from lmkit.web.running import registered
    from lmkit.web.tracing import start_if_wanted

    log.setup(config.log_level, log_format=config.log_format)
    start_if_wanted("lmkit", config.otlp_traces_endpoint)
    if config.grpc_port is not None:
        with needed_for("--grpc-port"):
            pass
    if config.api_keys or config.api_key_file:
        log.get_logger(__name__).info("every route but /health needs an API key")
    names = [name for model in models for name in (model.name, *model.aliases, *model.engine.adapter_folders)]
    if again := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{again}: two models or adapters have this name; give each its own")
    addresses = [model.engine.kv_events for model in models if model.engine.kv_events]
    if len(set(addresses)) < len(addresses):
        raise ConfigError("--kv-events: two models have one address; give each its own in a YAML file of models")
    pooled = []
    for model in models:
        path = resolve_model_path(model.path, revision=model.revision)
        if Path(model.path).exists():
            remember(path)
        front_end = AsyncEngine(
            path,
            model.engine,
            engine=engine or ENGINE,
            log_level=config.log_level,
            log_format=config.log_format,
            step_timeout=config.step_timeout,
        )
        pooled.append(PooledModel(model.name, front_end, aliases=model.aliases, keep_alive=model.keep_alive))
    name = ",".join(model.name for model in models)
    pool = ModelPool(pooled, config.memory_budget)
    with registered("serve", name, config.drain_seconds, proxy_key=config.proxy_key) as tell:

        def on_ready(url: str) -> None:
            tell(url, pool.reserved)
            print(f"serving {name} on {url}", flush=True)

        return serve(pool, config, on_ready)
