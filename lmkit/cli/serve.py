"""`lmkit serve`: an OpenAI-compatible server for one model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from lmkit.cli.engine_options import checked, engine_options, size
from lmkit.cli.options import takes
from lmkit.cli.settings import read_config, resolved
from lmkit.config import EngineConfig, LogLevel, ServerConfig
from lmkit.errors import ConfigError

SHARED_CACHE_QUOTA = 0.5  # with several keys, so that no tenant can evict the KV of all others

_SERVER = ServerConfig()


def _server(help: str, *flags: str, **settings: Any) -> Any:
    return typer.Option(*flags, help=help, rich_help_panel="Server", **settings)


@takes(engine_config=engine_options)
def serve(
    context: typer.Context,
    engine_config: EngineConfig,
    model: Annotated[str, typer.Argument(help='A checkpoint folder, a Hub name, or "demo".')],
    served_model_name: Annotated[
        str | None, typer.Option(help="Default: the folder's name, or the name given.", rich_help_panel="Model")
    ] = None,
    config: Annotated[
        str | None, _server("A YAML file of options, name: value.", is_eager=True, callback=read_config)
    ] = None,
    print_config: Annotated[
        bool, _server("Print all options and where each stands, and exit.", "--print-config")
    ] = False,
    host: Annotated[str, _server("Address to listen on; 0.0.0.0 for all.")] = _SERVER.host,
    port: Annotated[int, _server("0 takes a free one.", callback=checked(ServerConfig, "port"))] = _SERVER.port,
    api_key: Annotated[
        list[str] | None, _server("Accept this key; repeatable. Other users of this machine can see it here.")
    ] = None,
    api_key_file: Annotated[Path | None, _server("A file with one key a line.")] = None,
    max_body: Annotated[str, _server("Largest request body.", callback=size)] = "4M",
    drain_seconds: Annotated[
        float, _server("Seconds for running requests to finish after SIGTERM.", min=0)
    ] = _SERVER.drain_seconds,
    log_level: Annotated[LogLevel, _server("How much is logged.", case_sensitive=False)] = _SERVER.log_level,
    engine: Annotated[str | None, typer.Option(hidden=True, help="module:Class of another engine.")] = None,
) -> None:
    """Serve a model over HTTP with OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models.

    Every option may also stand in the environment (LMKIT_KV_MEMORY=2G is --kv-memory 2G) and in a YAML file that
    --config names (kv_memory: 2G). The command line comes first, then the environment, then the file.
    """
    if print_config:
        print(resolved(context))
        return
    from lmkit import log
    from lmkit.formats.hub import resolve_model_path
    from lmkit.formats.known import remember
    from lmkit.serve.server import serve as run
    from lmkit.turbo.transport.async_engine import AsyncEngine
    from lmkit.turbo.transport.messages import ENGINE
    from lmkit.web.running import registered

    keys = _keys(api_key or [], api_key_file)
    quota = context.get_parameter_source("cache_quota")
    if len(keys) > 1 and quota is not None and quota.name == "DEFAULT":
        engine_config = msgspec.structs.replace(engine_config, cache_quota=SHARED_CACHE_QUOTA)
    name = served_model_name or (Path(model).resolve().name if Path(model).is_dir() else model)
    server_config = ServerConfig(
        host=host,
        port=port,
        served_model_name=name,
        api_keys=keys,
        max_body_bytes=int(max_body),
        drain_seconds=drain_seconds,
        log_level=log_level,
    )
    log.setup(log_level)
    path = resolve_model_path(model)
    if Path(model).is_dir():
        remember(path)
    front_end = AsyncEngine(path, engine_config, engine=engine or ENGINE, log_level=log_level)
    with registered("serve", name, drain_seconds) as tell:

        def on_ready(url: str) -> None:
            tell(url)
            print(f"serving {name} on {url}", flush=True)

        raise typer.Exit(run(front_end, server_config, on_ready))


def _keys(given: list[str], file: Path | None) -> tuple[str, ...]:
    """All keys, without blank lines. Raises ConfigError for a key that no header can carry."""
    keys = list(given)
    if file is not None:
        try:
            keys += [line.strip() for line in file.read_text().splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: cannot read API keys: {error}") from None
        if not keys:
            raise ConfigError(f"{file}: no API key in it")
    for i, key in enumerate(keys, 1):
        if not (key and key.isascii() and key.isprintable() and " " not in key):
            raise ConfigError(f"API key {i}: expected printable ASCII without spaces")
    return tuple(keys)
