"""`lmkit serve`: an OpenAI-compatible server for one or several models."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from lmkit.cli import replicas
from lmkit.cli.engine_options import checked, engine_options, size
from lmkit.cli.model_list import ListedModel, listed_models
from lmkit.cli.node_role import with_role
from lmkit.cli.options import takes
from lmkit.cli.settings import read_config, resolved
from lmkit.config import (
    EngineConfig,
    LogFormat,
    LogLevel,
    NodeRole,
    ReasoningParser,
    Reranker,
    ServerConfig,
    ToolParser,
    environment,
)
from lmkit.errors import ConfigError
from lmkit.extras import needed_for
from lmkit.web.key_file import parse_keys, read_keys

SHARED_QUOTA = 0.5  # with several tenants, so that none can evict the KV of all others, or fill the queue

_SERVER = ServerConfig()


def _server(help: str, *flags: str, **settings: Any) -> Any:
    return typer.Option(*flags, help=help, rich_help_panel="Server", **settings)


@takes(engine_config=engine_options)
def serve(
    context: typer.Context,
    engine_config: EngineConfig,
    model: Annotated[str, typer.Argument(help='A checkpoint folder, a Hub name, "demo", or a YAML file of models.')],
    more_models: Annotated[list[str] | None, typer.Argument(help="Further models, loaded when needed.")] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Default: the folder's name, or the name given. Several: A,B.", rich_help_panel="Model"),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="A branch, tag or commit of a model on the Hub.", rich_help_panel="Model")
    ] = None,
    config: Annotated[
        str | None, _server("A YAML file of options, name: value.", is_eager=True, callback=read_config)
    ] = None,
    print_config: Annotated[
        bool, _server("Print all options and where each stands, and exit.", "--print-config")
    ] = False,
    host: Annotated[str, _server("Address to listen on; 0.0.0.0 for all.")] = _SERVER.host,
    port: Annotated[int, _server("0 takes a free one.", callback=checked(ServerConfig, "port"))] = _SERVER.port,
    grpc_port: Annotated[
        int | None, _server("Serve gRPC, too; 0 takes a free port.", callback=checked(ServerConfig, "grpc_port"))
    ] = None,
    tls_cert: Annotated[str | None, _server("A certificate chain in PEM: serve https.")] = None,
    tls_key: Annotated[str | None, _server("Its key; default in the same file.")] = None,
    api_key: Annotated[
        list[str] | None, _server("Accept this key; repeatable. Others see it here, not in LMKIT_API_KEY.")
    ] = None,
    api_key_file: Annotated[
        Path | None, _server("A file with one key a line: KEY [name=value ...]. It is read again when it changes.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None, _server("A name of this server, if it has no keys; *.example.com, repeatable.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, _server("Pages of this site may call the server; repeatable. None may by default.")
    ] = None,
    cors_credentials: Annotated[
        bool, _server("These pages may send cookies, too.", "--cors-credentials")
    ] = _SERVER.cors_credentials,
    root_path: Annotated[
        str,
        _server(
            "A path in front of every route, /llm: for a reverse proxy that leaves it.",
            callback=checked(ServerConfig, "root_path"),
        ),
    ] = _SERVER.root_path,
    max_connections_per_address: Annotated[
        int | None,
        _server(
            "Of one client address; default as many as the server takes in all.",
            callback=checked(ServerConfig, "max_connections_per_address"),
        ),
    ] = None,
    max_body: Annotated[str, _server("Largest request body.", callback=size)] = "32M",
    body_memory: Annotated[str, _server("For the bodies of all requests together.", callback=size)] = "256M",
    answer_memory: Annotated[
        str, _server("For answers that are not sent or read yet; one gets an eighth.", callback=size)
    ] = "512M",
    strict_fields: Annotated[
        bool, _server("Refuse fields that lmkit lacks, also those that change nothing.", "--strict-fields")
    ] = _SERVER.strict_fields,
    drain_seconds: Annotated[
        float,
        _server("Seconds for requests to finish after SIGTERM.", callback=checked(ServerConfig, "drain_seconds")),
    ] = _SERVER.drain_seconds,
    step_timeout: Annotated[
        float | None,
        _server(
            "Seconds after which a step hangs and the engine is started again. Default: two minutes or more.",
            callback=checked(ServerConfig, "step_timeout"),
        ),
    ] = None,
    memory_budget: Annotated[
        str | None, _server("For all engines of several models. Default: what is free.", callback=size)
    ] = None,
    keep_alive: Annotated[
        float | None,
        _server(
            "Seconds without a request after which a model sleeps. Default: no limit.",
            callback=checked(ServerConfig, "keep_alive"),
        ),
    ] = None,
    tool_parser: Annotated[
        ToolParser | None, _server("How the model writes calls. Default: as its chat template shows.", metavar="<name>")
    ] = None,
    reasoning_parser: Annotated[
        ReasoningParser | None, _server("How the model reasons. Default: as its chat template shows.", metavar="<name>")
    ] = None,
    reranker: Annotated[
        Reranker, _server("Scores of /v1/rerank: cosine (of embeddings), or yes_no (the model's answer).")
    ] = "cosine",
    data_dir: Annotated[
        str | None, _server("Keep files, batches and responses of clients here. Default: a temporary folder.")
    ] = None,
    response_store: Annotated[
        str, _server("For responses that clients may continue (/v1/responses); 0 stores none.", callback=size)
    ] = "256M",
    response_ttl: Annotated[
        float,
        _server(
            "Seconds that a response stays after its last use; default 30 days.",
            callback=checked(ServerConfig, "response_ttl"),
        ),
    ] = _SERVER.response_ttl,
    max_file: Annotated[str, _server("Largest file that a client may upload, for a batch.", callback=size)] = "100M",
    file_space: Annotated[
        str, _server("For the files of all clients in the data folder; one gets its --queue-quota.", callback=size)
    ] = "4G",
    image_host: Annotated[
        list[str] | None, _server("Fetch images of this HOST or HOST:PORT; repeatable. Default: of none.")
    ] = None,
    image_folder: Annotated[
        str | None, _server("A folder whose files messages may show, as file:///PATH. Default: none.")
    ] = None,
    chat_page: Annotated[bool, _server("A page for people at /.", "--chat-page/--no-chat-page")] = _SERVER.chat_page,
    max_logprobs: Annotated[
        int,
        _server(
            "Most tokens that a request may see at a position, with log-probabilities; -1 = the whole vocabulary.",
            callback=checked(ServerConfig, "max_logprobs"),
        ),
    ] = _SERVER.max_logprobs,
    enable_force_include_usage: Annotated[
        bool,
        _server("Every chunk of a stream has the usage so far, asked or not.", "--enable-force-include-usage"),
    ] = _SERVER.enable_force_include_usage,
    enable_per_request_metrics: Annotated[
        bool, _server("Answers have their times, as `metrics`.", "--enable-per-request-metrics")
    ] = _SERVER.enable_per_request_metrics,
    hook: Annotated[
        list[str] | None,
        _server("module:object that sees each request or answer, and may change or refuse it; repeatable."),
    ] = None,
    proxy: Annotated[
        list[str] | None, _server("Register with the lmkit proxy at this address; repeatable.", metavar="<url>")
    ] = None,
    node_key: Annotated[
        str | None, _server("The proxy's key with role=node; default that of a proxy of yours here.", metavar="<key>")
    ] = None,
    node_url: Annotated[
        str | None, _server("Where the proxy reaches this server; default where it is called from.", metavar="<url>")
    ] = None,
    node_tag: Annotated[list[str] | None, _server("Its class, for the proxy's rules; repeatable.")] = None,
    role: Annotated[
        NodeRole, _server("What it computes for a proxy: prefill (prompts), decode (the rest), or both.")
    ] = _SERVER.role,
    dp: Annotated[
        int, _server("Replicas of the model behind this address, each an engine of its own.", min=1, max=1000)
    ] = 1,
    log_level: Annotated[LogLevel, _server("How much is logged.", case_sensitive=False)] = _SERVER.log_level,
    log_format: Annotated[LogFormat, _server("json: an object a line.")] = _SERVER.log_format,
    otlp_traces_endpoint: Annotated[
        str | None, _server("Send OpenTelemetry traces to this collector, http://HOST:4318.")
    ] = None,
    engine: Annotated[str | None, typer.Option(hidden=True, help="module:Class of another engine.")] = None,
) -> None:
    """Serve a model over HTTP with OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models.

    Every option may also stand in the environment (LMKIT_KV_MEMORY=2G is --kv-memory 2G) and in a YAML file that
    --config names (kv_memory: 2G). The command line comes first, then the environment, then the file.
    """
    if print_config:
        print(resolved(context))
        return
    if engine_config.cluster == "torchrun" and environment().rank:
        from lmkit.turbo.runners.placing import follow

        follow()
        return
    if dp > 1:
        replicas.check(context)
    if proxy and (api_key or api_key_file or role != "both"):
        api_key = [*(api_key or []), f"{secrets.token_urlsafe(32)} role=proxy"]  # with which the proxies call
    keys = parse_keys(api_key or []) + (read_keys(api_key_file) if api_key_file else [])
    if int(body_memory) < int(max_body):
        raise ConfigError("--body-memory must be at least --max-body, or no body of that size could ever be read")
    if len(keys) > 1 or any(key.role == "proxy" for key in keys):
        sources = {name: context.get_parameter_source(name) for name in ("cache_quota", "queue_quota")}
        shared = {name: SHARED_QUOTA for name, source in sources.items() if source and source.name == "DEFAULT"}
        engine_config = msgspec.structs.replace(engine_config, **shared)
    server_config = ServerConfig(
        host=host,
        port=port,
        grpc_port=grpc_port,
        tls_cert=tls_cert,
        tls_key=tls_key,
        served_model_name=tuple(name for text in served_model_name or () for name in text.split(",")),
        api_keys=tuple(api_key or ()),
        api_key_file=str(api_key_file) if api_key_file else None,
        proxy_key=None if api_key or api_key_file else secrets.token_urlsafe(32),
        allowed_hosts=tuple(allowed_host or ()),
        cors_origins=tuple(cors_origin or ()),
        cors_credentials=cors_credentials,
        root_path=root_path,
        max_connections_per_address=max_connections_per_address,
        max_body_bytes=int(max_body),
        strict_fields=strict_fields,
        body_memory=int(body_memory),
        answer_memory=int(answer_memory),
        drain_seconds=drain_seconds,
        step_timeout=step_timeout,
        keep_alive=keep_alive,
        memory_budget=None if memory_budget is None else int(memory_budget),
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        reranker=reranker,
        data_dir=data_dir,
        response_store=int(response_store),
        response_ttl=response_ttl,
        max_file_bytes=int(max_file),
        file_space=int(file_space),
        image_hosts=tuple(image_host or ()),
        image_folder=image_folder,
        chat_page=chat_page,
        max_logprobs=max_logprobs,
        enable_force_include_usage=enable_force_include_usage,
        enable_per_request_metrics=enable_per_request_metrics,
        hooks=tuple(hook or ()),
        proxies=tuple(proxy or ()),
        node_key=node_key,
        node_url=node_url,
        node_tags=tuple(node_tag or ()),
        role=role,
        log_level=log_level,
        log_format=log_format,
        otlp_traces_endpoint=otlp_traces_endpoint,
    )
    if dp > 1:
        replicas.run(replicas.cluster(context, server_config))
        return
    models = listed_models([model, *(more_models or [])], engine_config, server_config, revision)
    raise typer.Exit(_run(with_role(models, role, has_proxy=bool(proxy)), server_config, engine))


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
