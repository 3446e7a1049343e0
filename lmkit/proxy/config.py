"""The proxy's configuration: a strict YAML or JSON file, command-line options, and registrations over the admin API."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from lmkit import yaml_file
from lmkit.config import (
    BODY_MEMORY,
    MAX_BODY,
    Listener,
    ListenPort,
    LogLevel,
    NodeRole,
    PolicyName,
    PositiveInt,
    StrictStruct,
    TenantsBy,
    wrong_host,
    wrong_origin,
)
from lmkit.errors import ConfigError
from lmkit.option import Note, Option
from lmkit.proxy.accounts.account import Price
from lmkit.proxy.addresses import refusal
from lmkit.proxy.rules import ModelName, Rule, Tag, mistake
from lmkit.web.auth import parse_key

Key = Annotated[str, msgspec.Meta(min_length=1, max_length=512, pattern=r"^[\x21-\x7e]+$")]
_ROUTE = (
    r"^(/v[12](/[A-Za-z0-9_-][A-Za-z0-9._~:@-]*)+"
    r"|/api/(chat|generate|show|pull|embed|embeddings)|/(completion|infill)"
    r"|/(rerank|score|classify|tokenize|detokenize|apply-template|generate))$"  # none of the proxy's own pages
)
RoutePath = Annotated[str, msgspec.Meta(max_length=256, pattern=_ROUTE)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]

# The POST routes of OpenAI's, Anthropic's and other inference servers whose JSON body, or form, names a model.
FORMS = "/v1/audio/transcriptions", "/v1/audio/translations"
ROUTES = (
    "/v1/chat/completions", "/v1/chat/completions/input_tokens", "/v1/completions", "/v1/responses",
    "/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings", "/v1/rerank",
    "/v2/rerank", "/rerank", "/v1/score", "/score",
    "/tokenize", "/detokenize", "/apply-template", "/v1/encode", "/v1/classify", "/classify", "/v1/moderations",
    "/v1/audio/speech", "/v1/images/generations", "/generate", "/v1/files", "/v1/batches", "/v1/conversations",
    "/api/chat", "/api/generate", "/api/show", "/api/pull", "/api/embed", "/api/embeddings", "/completion", "/infill",
    *FORMS,
)  # fmt: skip


MIN_NODE_KEY = 16  # characters


class NodeConfig(StrictStruct, frozen=True):
    """One server that answers OpenAI routes below `url`. Raises ValueError for a URL that cannot be a node's."""

    url: Annotated[str, Note("http(s)://host[:port][/prefix], without /v1.")]
    models: Annotated[
        Annotated[tuple[ModelName, ...], msgspec.Meta(min_length=1, max_length=1000)] | None,
        Note("Default: those that the node itself lists."),
    ] = None
    api_key: Annotated[Key | None, Note("Sent to this node, as a Bearer token.")] = None
    weight: Annotated[float, msgspec.Meta(gt=0, le=1000), Note("Its share of the load.")] = 1.0
    tags: Annotated[tuple[Tag, ...], msgspec.Meta(max_length=32), Note("Its class, for rules.")] = ()
    tenants: Annotated[TenantsBy, Note("How it learns of clients; cache_salt is a field of the body.")] = "header"
    role: Annotated[NodeRole, Note("prefill: it computes prompts for the decode nodes of its model.")] = "both"
    kv_port: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=65535)] | None, Note("Of a prefill node's --kv-listen, on its host.")
    ] = None

    def __post_init__(self) -> None:
        if (self.role == "prefill") != (self.kv_port is not None):
            raise ValueError(
                f"role {self.role}: kv_port, the port of its --kv-listen, is for role prefill and no other"
            )
        if self.role != "both" and self.tenants != "header":
            raise ValueError(f"role {self.role}: such a node is lmkit's, and learns of its clients by a header")
        msgspec.structs.force_setattr(self, "url", node_url(self.url))


class Registration(NodeConfig, frozen=True):
    """A node added at run time."""

    lease_seconds: Annotated[float, msgspec.Meta(ge=1, le=86400)] | None = None  # None = until it is removed

    def __post_init__(self) -> None:
        super().__post_init__()
        import httpx

        if reason := refusal(httpx.URL(self.url).host, registered=True):
            raise ValueError(f"{self.url!r} {reason}")


class ProxyConfig(Listener, frozen=True):
    """How one `lmkit proxy` listens, checks its nodes and forwards. All times are in seconds.

    A field with an `Option` is an option of the command as well.
    """

    port: ListenPort = 8080
    nodes: Annotated[tuple[NodeConfig, ...], Note("The nodes; more may be added and register.")] = ()
    max_nodes: Annotated[PositiveInt, Note("How many there may be.")] = 256
    node_hosts: Annotated[
        tuple[str, ...], Note("Networks and host names, besides its own address, that a node may name as its own.")
    ] = ()
    policy: Annotated[PolicyName, Option("How a node is chosen.", metavar="<name>")] = "prefix"
    pair_tokens: Annotated[
        PositiveInt, Note("Of a prompt that a decode node lacks: a prefill node computes so many or more.")
    ] = 256
    pair_wait: Annotated[Seconds, Note("For a prefill node to begin; then the decode node computes the prompt.")] = 10.0
    aliases: Annotated[dict[ModelName, ModelName], Note("Other names of models.")] = {}
    on_demand: Annotated[
        dict[ModelName, Seconds], Note("Models whose nodes come when asked for, and how long requests wait for one.")
    ] = {}
    mixed_weights: Annotated[
        bool, Note("Nodes of one key may serve a name with other weights, as while a new version comes.")
    ] = False
    rules: Annotated[tuple[Rule, ...], Note("The first that fits a request counts.")] = ()
    max_shadows: Annotated[int, msgspec.Meta(ge=0), Note("Copies for shadows at once; one more is left out.")] = 16
    api_keys: Annotated[tuple[str, ...], Note("Each `KEY [name=value ...]`. Without any, clients need no key.")] = ()
    admin_keys: Annotated[
        tuple[Key, ...], Note("For /admin. Default: one that `lmkit proxy` makes and this user's commands find.")
    ] = ()
    dashboard: Annotated[bool, Option("A page for administrators at /dashboard.")] = True
    state_file: Annotated[str | None, Option("A file that keeps nodes added and removed at run time.")] = None
    key_store: Annotated[
        str | None, Option("A file of keys with limits, and of what they used; clients then need a key.")
    ] = None
    # see proxy.transcripts
    data_dir: Annotated[str | None, Option("A folder that keeps stored responses, for when their node is down.")] = None
    prices: Annotated[dict[str, Price], Note('By model, of a million tokens; "*" is all others.')] = {}
    ask_usage: Annotated[
        bool, Note("Ask nodes for the usage with each chunk of a stream; false: with the last one only.")
    ] = True
    forwarded_routes: Annotated[tuple[RoutePath, ...], Note("POST requests that go to nodes; others get 404.")] = ROUTES
    max_body_bytes: Annotated[PositiveInt, Note("Largest request body.")] = MAX_BODY
    body_memory: Annotated[PositiveInt, Note("Bytes of the bodies of all requests together.")] = BODY_MEMORY
    body_timeout: Annotated[Seconds, Note("For a client to send its whole body.")] = 30.0
    max_connections_per_address: Annotated[
        PositiveInt | None, Note("Of one client address. Default: as many as the proxy takes in all.")
    ] = None
    max_in_flight: Annotated[PositiveInt, Note("Requests at once; one more is refused with 503.")] = 1024
    connect_timeout: Annotated[Seconds, Note("For a connection to a node.")] = 3.0
    read_timeout: Annotated[
        Seconds, Note("The longest silence of a node, before its first byte and between two pieces.")
    ] = 600.0
    node_wait: Annotated[float, msgspec.Meta(ge=0, le=86400), Note("For a node that went down to come back.")] = 30.0
    health_interval: Annotated[Seconds, Note("Between checks of a node.")] = 5.0
    health_timeout: Annotated[Seconds, Note("For a node to answer a check.")] = 2.0
    unhealthy_after: Annotated[
        PositiveInt, Note("Consecutive failures, of checks or of connections for a request.")
    ] = 2
    healthy_after: Annotated[PositiveInt, Note("Consecutive good checks of a node that was unhealthy.")] = 1
    breaker_failures: Annotated[
        PositiveInt, Note("Consecutive failed requests after which a node gets none for a while.")
    ] = 5
    breaker_seconds: Annotated[Seconds, Note("That while; then one request is tried.")] = 10.0
    outlier_factor: Annotated[
        Annotated[float, msgspec.Meta(ge=2)] | None,
        Note("A node that takes so many times as long as its peers rests; null turns this off."),
    ] = 5.0
    max_ejected: Annotated[
        float, msgspec.Meta(ge=0, le=1), Note("Share of nodes of one kind that rest as outliers.")
    ] = 0.34
    slow_start_seconds: Annotated[float, msgspec.Meta(ge=0, le=3600), Note("Until a new node has all its weight.")] = (
        0.0
    )
    retry_share: Annotated[float, msgspec.Meta(ge=0, le=1), Note("Retries beside requests.")] = 0.2
    drain_seconds: Annotated[
        float, msgspec.Meta(ge=0, le=86400), Note("How long requests may finish after SIGTERM.")
    ] = 30.0
    log_level: Annotated[LogLevel, Note("What is logged.")] = "INFO"

    def __post_init__(self) -> None:
        urls = [node.url for node in self.nodes]
        if twice := sorted({url for url in urls if urls.count(url) > 1}):
            raise ValueError(f"node {twice[0]} is given twice")
        if reason := wrong_origin(self.cors_origins) or wrong_host(self.allowed_hosts):
            raise ValueError(reason)
        if self.body_memory < self.max_body_bytes:
            raise ValueError("body_memory is less than max_body_bytes; no body of that size could ever be read")
        if reason := mistake(self.rules, self.aliases):
            raise ValueError(reason)
        if len(self.nodes) > self.max_nodes:
            raise ValueError(f"{len(self.nodes)} nodes, max_nodes is {self.max_nodes}")
        keys = set()
        for i, line in enumerate(self.api_keys, 1):
            try:
                key = parse_key(line)
                if key.role == "node" and len(key.key) < MIN_NODE_KEY:
                    raise ValueError(f"a key with role=node has at least {MIN_NODE_KEY} characters")
                if key.is_limited or key.role == "metrics":
                    raise ValueError("a proxy has no limits per minute and no role metrics; give them to a node's keys")
                keys.add(key.key)
            except ValueError as error:
                raise ValueError(f"api_keys, entry {i}: {error}") from None
        if keys & set(self.admin_keys):
            raise ValueError("a key is in both api_keys and admin_keys; give each role its own")


def node_url(text: str) -> str:
    """The canonical spelling of a node's URL. Raises ValueError with the reason if it is wrong."""
    import httpx  # only here, because the command line imports this module

    if not re.fullmatch(r"(?i)https?://[a-z0-9._\-\[\]:]+(/[a-z0-9._~/\-]*)?", text):
        raise ValueError(f"{text!r} is not a node's URL; write for example http://10.0.0.5:8000")
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ValueError(f"{text!r} is not a URL: {error}") from None
    path = url.path.rstrip("/")
    if url.port is not None and not 0 < url.port < 65536:
        raise ValueError(f"{text!r}: a port is between 1 and 65535")
    if reason := refusal(url.host) if url.host else "has no host":
        raise ValueError(f"{text!r} {reason}")
    if path.endswith("/v1"):
        raise ValueError(f"{text!r}: leave out /v1, it is part of each route")
    return str(url.copy_with(path=path or "/")).rstrip("/")


def load_config(path: str | Path | None, *, nodes: Sequence[NodeConfig] = (), **options: Any) -> ProxyConfig:
    """The file's configuration, with more nodes and with those `options` that are not None.

    Without a file, the defaults are used. A relative path in it is relative to the file's folder. Raises ConfigError
    with the file's line.
    """
    config = ProxyConfig() if path is None else _read(Path(path))
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return msgspec.structs.replace(config, nodes=(*config.nodes, *nodes), **given)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _read(path: Path) -> ProxyConfig:
    config = yaml_file.load(path, ProxyConfig)
    named = {name: getattr(config, name) for name in ("state_file", "key_store", "data_dir", "tls_cert", "tls_key")}
    beside = {name: str(path.parent / value) for name, value in named.items() if value is not None}
    return msgspec.structs.replace(config, **beside)
