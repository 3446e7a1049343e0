"""Configuration: frozen, strict structs, and the only reader of the environment.

An unknown key or a wrong type is an error. No torch here: dtypes are strings. Longer than usual: every option stands
here once, and all commands read this list.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

import msgspec

from lmkit import choices, cores, other_names
from lmkit.checked import CheckedMeta
from lmkit.errors import ConfigError, UnsupportedError
from lmkit.kv_dtype import KVName

T = TypeVar("T")

Device = Literal["auto", "cpu", "cuda"]
WeightDtype = Literal["auto", "float32", "bfloat16", "float16"]
KVStorageName = Literal["auto", KVName]
HeadStorage = Literal["auto", "int8"]
ClusterName = Literal["none", "ray", "torchrun"]
Quantize = Literal["none", "int4", "int8", "fp8"]
Reranker = Literal["cosine", "yes_no"]  # of embeddings; or the probability that the model answers yes
PoolingName = Literal["auto", "last", "mean", "cls", "max", "weighted_mean", "mean_sqrt_len"]
Speculate = Annotated[str, msgspec.Meta(pattern=r"^(off|auto|ngram|mtp|(draft|eagle)=.+)$")]
Activations = Literal["auto", "int8", "fp8", "exact"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
LOG_LEVELS = get_args(LogLevel)
LogFormat = Literal["text", "json"]
PolicyName = Literal[
    "prefix", "least_tokens", "least_in_flight", "session", "power_of_two", "min_expected_latency",
    "min_observed_latency", "round_robin", "random",
]  # of the proxy  # fmt: skip
TenantsBy = Literal["header", "cache_salt"]  # how a node of the proxy learns of its clients
NodeRole = Literal["both", "prefill", "decode"]  # of a node of the proxy: which part of requests it computes
NAMED_PEERS = "named"  # as kv_peer: the engines that requests name
BLOCK_SIZE = {"cpu": 32, "cuda": 64}  # used if no block size is given
STEP_TOKENS = {"cpu": 512, "cuda": 4096}  # used if no token budget is given
MAX_BATCH_SIZE = 4096
BATCH_SIZE = 64  # used if no batch size is given, unless weights are streamed
BatchSize = Annotated[int, msgspec.Meta(ge=1, le=MAX_BATCH_SIZE)]
StepTokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
MAX_TIMEOUT = 86400.0  # seconds that a request may ask for
MAX_BODY = 32 << 20  # bytes of one request's body: an agent's conversation with images
BODY_MEMORY = 256 << 20  # bytes of the bodies of all requests under way
KVEventsAddress = Annotated[str, msgspec.Meta(pattern=r"^tcp://\S+:\d+$")]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
Share = Annotated[str, msgspec.Meta(pattern=r"^\d+(\.\d+)?%$")]
# Fields of EngineConfig that are bytes, and may be written like 2G.
SIZES = ("weights_memory", "kv_memory", "kv_host_memory", "kv_disk_memory", "image_memory")


def require_linux() -> None:
    """Raise UnsupportedError on any other system."""
    if sys.platform != "linux":
        system = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
        raise UnsupportedError(f"Linux only, and this is {system}; use a Linux machine, a container or WSL 2")


class StrictStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every configuration: immutable and keyword-only; unknown fields are refused."""


class _Sizes(CheckedMeta):
    """Its constructor takes sizes as bytes or as texts like "2G"."""

    def plain(cls, given: dict[str, Any]) -> dict[str, Any]:
        texts = {name: given[name] for name in SIZES if isinstance(given.get(name), str)}
        return given | {name: parse_size(name, text, name) for name, text in texts.items()}


class EngineConfig(StrictStruct, frozen=True, kw_only=True, metaclass=_Sizes):
    """How one engine runs one model. `auto` and None are resolved once, into a new value, and each decision is logged.

    `on` returns a copy with the fields that depend on the device resolved. The fields of SIZES are bytes; the
    constructor takes texts like "2G", too.
    """

    device: Device = "auto"
    dtype: WeightDtype = "auto"  # of dense weights; auto = the checkpoint's, see models.resolved.resolve_dtype
    kv_dtype: KVStorageName = "auto"  # auto = the checkpoint's kv_config.json, else the weights' dtype
    activations: Activations = "auto"  # of quantized linears: rounding per token and group; auto = by device
    lm_head: HeadStorage = "auto"  # auto = as the checkpoint has it, int8 = quantized while loading, groups of 128
    quantize: Quantize = "none"  # rounds the linears of a dense checkpoint while it loads, see models.rounding
    packed_cache: bool = True  # keep packed weights in a file beside the checkpoint, and map it at the next start
    weights_memory: PositiveInt | None = None  # bytes for weights; every step reads layers beyond; None = all stay
    weights_path: str | None = None  # folder for the packed weights that are read then; None = beside the checkpoint
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None  # tokens per KV block; None = by the device
    max_batch_size: BatchSize | None = None  # sequences in one step; None = 64, or more if reading weights takes longer
    max_step_tokens: StepTokens | None = None  # token budget of one step; None = by the device
    max_model_len: PositiveInt | None = None  # None = the model's max_position_embeddings
    kv_memory: PositiveInt | Share | None = None  # bytes for KV blocks, or a share of the free memory; None = by a plan
    max_queue: PositiveInt = 1024  # waiting requests; one more is refused with 503
    queue_quota: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0  # share of these that one tenant may have open
    max_queued_tokens: PositiveInt = 4 << 20  # prompt tokens of all open requests; more are refused with 503
    tp: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1  # processes that share each layer of the model
    ep: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1  # processes that share the experts; with tp the same processes
    pp: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1  # processes with some layers each, one behind the other
    devices: Annotated[str, msgspec.Meta(pattern=r"^(0(,\d+)*)?$")] = ""  # of the ranks of tp and ep; "" = 0,1,...
    cluster: ClusterName = "none"  # what has ranks of tp on other machines, see runners.placing; none = all are here
    deterministic: bool = False  # the tokens of a request depend on it alone: on a CPU always, on a GPU if asked for
    num_threads: PositiveInt | None = None  # of all of them; None = the physical cores this process may use
    image_memory: PositiveInt = 256 << 20  # bytes for images that are encoded, beyond those in use
    image_pixels: Annotated[int, msgspec.Meta(ge=1 << 10, le=1 << 24)] = 1 << 20  # larger images are made smaller
    prefix_cache: bool = True  # keep the KV of prompts and answers for later requests
    cache_quota: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0  # share of the KV blocks that one tenant may keep
    session_lease: PositiveFloat = 300.0  # seconds for which a session's KV stays after its last answer
    kv_host_memory: PositiveInt | None = None  # bytes of host memory for KV evicted from the device; None = none
    kv_disk_path: str | None = None  # folder for KV on disk, which survives a restart; None = none
    kv_disk_memory: PositiveInt = 16 << 30  # bytes on disk
    kv_listen: str | None = None  # HOST:PORT where it gives blocks of the two tiers above to other engines; None = no
    kv_peer: str | None = None  # HOST:PORT of such an engine, whose blocks it fetches; NAMED_PEERS; None = none
    kv_key_file: str | None = None  # the secret that both need
    kv_events: KVEventsAddress | None = None  # where it publishes what its prefix cache gets and loses; None = nowhere
    kv_events_topic: str = ""  # of these messages
    attention_sinks: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0  # first tokens that sliding windows still see
    priority_seconds: Annotated[float, msgspec.Meta(ge=0)] = 10.0  # seconds of waiting worth one level of priority
    max_overtakes: Annotated[int, msgspec.Meta(ge=0)] = 8  # by later requests with a longer cached prefix, per request
    decode_slowdown: Annotated[float, msgspec.Meta(gt=1)] = 2.0  # the largest slowdown of decoding during a prefill
    overlap: bool = True  # prepare the next step while one runs
    request_timeout: PositiveFloat | None = None  # seconds for a request that names none; None = no limit
    speculate: Speculate = "off"  # guess the next tokens and compute several in one step, where that is faster
    max_draft_tokens: Annotated[int, msgspec.Meta(ge=1, le=64)] = 16  # guesses for one sequence in one step
    draft_history: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 0  # tokens of a tenant's answers, for guesses
    adapters: tuple[str, ...] = ()  # LoRA adapters, each NAME=FOLDER, see formats.peft; a request names one
    adapter_root: str | None = None  # adapters in this folder may be loaded and unloaded while it runs; None = none may
    max_adapters: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = (
        None  # in one batch, at most; None = all `adapters`, 8 with a root
    )
    pooling: PoolingName = "auto"  # of embeddings; auto = the checkpoint's, see formats.sentences
    generation_config: str = "auto"  # sampling defaults: auto = the checkpoint's, none, or a file or folder
    chat_template: str | None = None  # a file of Jinja, or the template itself; None = the checkpoint's

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise other_names.missing(self, name)

    def on(self, device: Literal["cpu", "cuda"]) -> EngineConfig:
        """This configuration for that device, with the device's defaults filled in. A plan of streamed weights chooses
        batch and step."""
        return msgspec.structs.replace(
            self,
            device=device,
            block_size=self.block_size or BLOCK_SIZE[device],
            max_step_tokens=self.max_step_tokens or (None if self.weights_memory else STEP_TOKENS[device]),
        )

    @property
    def num_guesses(self) -> int:
        """Guesses for one sequence in one step, at most."""
        return self.max_draft_tokens if self.speculate != "off" else 0

    @property
    def has_drafter(self) -> bool:
        """Whether `speculate` names what guesses beside the model: a smaller model, a head or a layer."""
        return self.speculate not in ("off", "auto", "ngram")

    @property
    def adapter_folders(self) -> dict[str, str]:
        """The folders of `adapters` by name. Raises ConfigError."""
        folders: dict[str, str] = {}
        for given in self.adapters:
            name, _, folder = given.partition("=")
            if not (name and folder):
                raise ConfigError(f"adapters: {given!r}: write NAME=FOLDER")
            if name in folders:
                raise ConfigError(f"adapters: the name {name!r} stands there twice")
            folders[name] = folder
        return folders

    @property
    def num_ranks(self) -> int:
        """Processes that share each layer of the model."""
        return max(self.tp, self.ep)

    @property
    def shared_by(self) -> str:
        """The option that shares the model out to several processes, as NAME=NUMBER."""
        return next(f"{name}={number}" for name in ("tp", "ep", "pp") if (number := getattr(self, name)) > 1)

    @property
    def num_processes(self) -> int:
        """Processes that the model is shared out to."""
        return self.num_ranks * self.pp

    @property
    def num_local(self) -> int:
        """Those of them on this machine."""
        return self.num_processes if self.cluster == "none" else 1

    @property
    def gpus(self) -> list[int]:
        """The GPU of each rank, if the device is a GPU."""
        return [int(number) for number in self.devices.split(",")] if self.devices else list(range(self.num_ranks))

    @property
    def num_sharing(self) -> int:
        """Processes on this machine that share the memory of process 0's device."""
        return self.gpus.count(0) if self.device == "cuda" else self.num_local

    @property
    def tokens_per_block(self) -> int:
        """`block_size`, or the CPU's default if `on` has not resolved it."""
        return self.block_size or BLOCK_SIZE["cpu"]

    @property
    def sequences_per_step(self) -> int:
        """`max_batch_size`, or its default if no plan of streamed weights has chosen another."""
        return self.max_batch_size or BATCH_SIZE

    @property
    def tokens_per_step(self) -> int:
        """`max_step_tokens`, or the CPU's default if nothing has resolved it."""
        return self.max_step_tokens or STEP_TOKENS["cpu"]


def wrong_origin(origins: Sequence[str]) -> str | None:
    """Why these cannot be the origins of web pages; None if they can. "*" would let any page call a local server."""
    wrong = [origin for origin in origins if not re.fullmatch(r"https?://[a-z0-9.\-\[\]:]+", origin)]
    return f"{wrong[0]!r} is not an origin; write each site as https://chat.example.com" if wrong else None


def wrong_host(hosts: Sequence[str]) -> str | None:
    """Why these cannot be the names of a server; None if they can. "*" is every name."""
    wrong = [host for host in hosts if not re.fullmatch(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", host)]
    return f"{wrong[0]!r} is not a host; write a name such as llm.example.com or *.example.com" if wrong else None


ToolParser = Literal[
    "hermes", "qwen3_coder", "glm45", "functiongemma", "deepseek_v3", "deepseek_v31", "mistral", "mistral_list",
    "internlm", "cohere", "llama3", "harmony", "none",
]  # fmt: skip
ReasoningParser = Literal["think", "mistral", "seed_oss", "cohere", "harmony", "none"]


RootPath = Annotated[str, msgspec.Meta(pattern=r"^(/[A-Za-z0-9._~-]+)*$")]


class ServerConfig(StrictStruct, frozen=True):
    """How one `lmkit serve` front end listens."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    grpc_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None  # None = no gRPC
    tls_cert: str | None = None  # a certificate chain in PEM; None = plain HTTP
    tls_key: str | None = None  # its key; None = in the same file
    served_model_name: tuple[str, ...] = ()  # of one model, the first is its own; empty = the folder's name
    api_keys: tuple[str, ...] = ()  # each `KEY [name=value ...]`, see web.auth.ApiKey; empty = no authentication
    api_key_file: str | None = None  # more of them, one a line; read again when it changes
    proxy_key: str | None = None  # by which a server without keys knows a proxy, see web.running; None = it knows none
    root_path: RootPath = ""  # before every path, if a reverse proxy leaves it there, as /llm; "" = nothing
    allowed_hosts: tuple[str, ...] = ()  # its names besides loopback ones and `host`, if it has no keys: see web.hosts
    cors_origins: tuple[str, ...] = ()  # web pages that may read answers
    cors_credentials: bool = False  # and may send cookies, for a login in front of the server
    max_connections_per_address: PositiveInt | None = None  # None = as many as the server takes in all
    strict_fields: bool = False  # a field that lmkit lacks is refused even if it changes nothing
    max_body_bytes: PositiveInt = MAX_BODY
    body_memory: PositiveInt = BODY_MEMORY
    answer_memory: PositiveInt = 512 << 20  # bytes of all answers that have not ended or are not read
    drain_seconds: Annotated[float, msgspec.Meta(ge=0)] = 30.0  # how long requests may finish after SIGTERM
    step_timeout: Annotated[float, msgspec.Meta(ge=1)] | None = None  # None = by what a step costs at worst
    image_hosts: tuple[str, ...] = ()  # HOST or HOST:PORT from which images may be fetched; empty = from none
    image_folder: str | None = None  # file:// URLs of images may name files in it; None = none may
    chat_page: bool = True  # a page for people at /
    keep_alive: PositiveFloat | None = None  # seconds without a request after which a model sleeps; None = no limit
    memory_budget: PositiveInt | None = None  # bytes for all engines; None = for several models, what is free
    tool_parser: ToolParser | None = None  # see text.dialects; None = as the chat template shows
    reasoning_parser: ReasoningParser | None = None  # None = as the chat template shows
    reranker: Reranker = "cosine"  # how pairs of texts are scored
    data_dir: str | None = None  # what it keeps for clients, see serve.data_folder; None = a temporary folder
    response_store: Annotated[int, msgspec.Meta(ge=0)] = 256 << 20  # bytes of stored responses; 0 = none
    response_ttl: Annotated[float, msgspec.Meta(gt=0)] = 30 * 86400.0  # seconds since a response was last used
    max_file_bytes: PositiveInt = 100 << 20  # of one file that a client uploads
    file_space: PositiveInt = 4 << 30  # bytes on disk of the files of all clients
    enable_force_include_usage: bool = False  # every chunk of a stream has the usage so far
    enable_per_request_metrics: bool = False  # answers have their times
    max_logprobs: Annotated[int, msgspec.Meta(ge=-1)] = 20  # tokens with log-probabilities at a position; -1 = all
    hooks: tuple[str, ...] = ()  # each module:object or the name of an entry point, see serve.hooks
    proxies: tuple[str, ...] = ()  # addresses of `lmkit proxy` with which it registers
    node_key: str | None = None  # sent to them: one of their keys with role=node
    node_url: str | None = None  # at which they reach it; None = at the address it calls them from
    node_tags: tuple[str, ...] = ()  # its class, for their rules
    role: NodeRole = "both"  # what it is to them
    log_level: LogLevel = "INFO"
    log_format: LogFormat = "text"
    otlp_traces_endpoint: str | None = None  # a collector's URL; None = OTEL_EXPORTER_OTLP_ENDPOINT, else no traces

    def __post_init__(self) -> None:
        if reason := wrong_origin(self.cors_origins) or wrong_host(self.allowed_hosts):
            raise ConfigError(reason)
        for proxy in self.proxies:
            if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", proxy):
                raise ConfigError(f"--proxy {proxy!r}: write the proxy's address, for example http://10.0.0.5:8080")
        if not self.proxies and (self.node_key or self.node_url or self.node_tags):
            raise ConfigError("--node-key, --node-url and --node-tag are for a proxy: name it with --proxy")


# Variables that every command reads. `lmkit serve` and `lmkit proxy` read one for each of their options as well.
VARIABLES = (
    "LMKIT_API_KEY", "LMKIT_CA_FILE", "LMKIT_CACHE_DIR", "LMKIT_CPU_ISA", "LMKIT_CUDA", "LMKIT_LOG_LEVEL",
    "LMKIT_NUM_THREADS", "LMKIT_STATE_DIR",
)  # fmt: skip


class Environment(StrictStruct, frozen=True):
    """All environment variables that lmkit reads."""

    cpu_isa: str | None  # LMKIT_CPU_ISA: force a lower kernel path: a name of kernels.cpu.isa.LEVELS
    visible_gpus: str | None  # CUDA_VISIBLE_DEVICES, which CUDA reads; None = all
    cuda: str  # LMKIT_CUDA: parts of the engine on a GPU, on or off: see kernels.cuda.switches
    num_threads: int | None  # LMKIT_NUM_THREADS
    cache_dir: Path  # LMKIT_CACHE_DIR: compiled kernels; packed weights if the checkpoint is not writable
    state_dir: Path  # LMKIT_STATE_DIR: the lists of known models and of running servers
    log_level: str  # LMKIT_LOG_LEVEL: one of LOG_LEVELS
    rank: int  # of this process among these
    rendezvous: tuple[str, int]  # HOST, PORT at which processes of torchrun find each other
    world_size: int  # processes of one quantization on all machines, as its launcher sets it
    local_world_size: int  # processes of one quantization on this machine
    ca_file: str | None  # LMKIT_CA_FILE: authorities, in PEM, that lmkit's clients trust beside the usual ones
    traces: bool  # OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, which OpenTelemetry reads, is set
    api_key: str | None  # LMKIT_API_KEY: the key that `lmkit chat` and `lmkit proxy` clients send


def environment() -> Environment:
    """Read the environment. Raises ConfigError for a value that cannot be used."""
    threads = os.environ.get("LMKIT_NUM_THREADS")
    if threads is not None and not (threads.isdecimal() and int(threads) > 0):
        raise ConfigError(f"LMKIT_NUM_THREADS={threads!r}: expected a positive integer")
    return Environment(
        cpu_isa=os.environ.get("LMKIT_CPU_ISA") or None,
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
        cuda=os.environ.get("LMKIT_CUDA") or "",
        num_threads=int(threads) if threads else None,
        cache_dir=_folder("LMKIT_CACHE_DIR", "XDG_CACHE_HOME", "~/.cache"),
        state_dir=_folder("LMKIT_STATE_DIR", "XDG_STATE_HOME", "~/.local/state"),
        log_level=checked_level(os.environ.get("LMKIT_LOG_LEVEL") or "INFO", "LMKIT_LOG_LEVEL="),
        rank=_number("RANK", 0),
        rendezvous=(os.environ.get("MASTER_ADDR") or "127.0.0.1", _number("MASTER_PORT", 29500)),
        world_size=_launched("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
        local_world_size=_launched("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
        ca_file=os.environ.get("LMKIT_CA_FILE") or None,
        traces=any(os.environ.get(f"OTEL_EXPORTER_OTLP_{kind}ENDPOINT") for kind in ("", "TRACES_")),
        api_key=os.environ.get("LMKIT_API_KEY") or None,
    )


def checked_level(level: Any, name: str = "log level ") -> str:
    """The level in capitals. Raises ConfigError, which starts with `name`, for an unknown one."""
    if not isinstance(level, str) or level.upper() not in LOG_LEVELS:
        raise ConfigError(f"{name}{level!r}: expected {', '.join(LOG_LEVELS)}")
    return level.upper()


def _folder(own: str, parent: str, default: str) -> Path:
    """The folder that `own` names, else that of lmkit in the user's folder of this kind (XDG base directories)."""
    return Path(os.environ.get(own) or os.path.join(os.environ.get(parent) or os.path.expanduser(default), "lmkit"))


def lmkit_variables() -> dict[str, str]:
    """The variables LMKIT_* that are set and not empty."""
    return {name: text for name, text in sorted(os.environ.items()) if name.startswith("LMKIT_") and text}


def child_environment(**added: str) -> dict[str, str]:
    """This process' environment for a server that it starts, without its own options, with variables added."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("LMKIT_") or name in VARIABLES}
    kept.pop("LMKIT_API_KEY", None)
    return kept | added


def default_num_threads() -> int:
    """LMKIT_NUM_THREADS, else this process' share of the physical cores that it may use."""
    here = environment()
    return here.num_threads or max(1, cores.available().usable // here.local_world_size)


def calm_openmp() -> None:
    """Make the OpenMP threads of torch wait for work a fraction of a millisecond before they sleep, unless the user
    chose (libgomp's GOMP_SPINCOUNT). By default each spins for several after every step, on a core that other processes
    may need. For the entry of a process: torch's runtime reads it when it is loaded.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def tokenize_serially() -> None:
    """Make the tokenizers library work in the calling thread. By default all calls share threads of the library, and a
    short text waits until long ones are done. For the entry of a server, before it has threads.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _launched(*names: str) -> int:
    """A count that torchrun (the first name), Open MPI or MPICH sets for its processes; 1 without a launcher."""
    given = next((os.environ[name] for name in names if name in os.environ), "1")
    if not (given.isdecimal() and int(given) > 0):
        raise ConfigError(f"{names[0]}={given!r}: expected a positive integer")
    return int(given)


def _number(name: str, default: int) -> int:
    """A number that torchrun sets. Raises ConfigError if it is none."""
    given = os.environ.get(name) or str(default)
    if not given.isdecimal():
        raise ConfigError(f"{name}={given!r}: expected a number")
    return int(given)


def parse(data: Any, into: type[T], where: str) -> T:
    """Strictly convert plain data (from JSON, YAML, the CLI) into a struct; `where` names the source in the error."""
    try:
        return msgspec.convert(data, into)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {choices.with_choices(error, into)}") from None


_SECONDS = {"s": 1, "m": 60, "h": 3600}
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_seconds(text: str, where: str) -> float:
    """`90s`, `20m`, `1.5h`, `1h30m` -> seconds."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh])", text.strip().lower())
    if not parts or "".join(map("".join, parts)) != text.strip().lower():
        raise ConfigError(f"{where}: {text!r} is not a time; write for example 20m or 1h30m")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def parse_size(name: str, text: str, where: str) -> int | str:
    """The value of a field of SIZES. `kv_memory` may be a share of the free memory, `30%`. Raises ConfigError."""
    body = text.strip()
    if name != "kv_memory" or not body.endswith("%"):
        return parse_bytes(text, where)
    with suppress(ValueError):
        if 0 < float(body[:-1]) <= 100:
            return f"{float(body[:-1]):g}%"
    raise ConfigError(f"{where}: {text!r} is not a share of the memory; write for example 30%")


def parse_bytes(text: str, where: str) -> int:
    """`512M`, `2GiB`, `1.5g`, `1048576` -> bytes (powers of 1024)."""
    body = text.strip().lower().removesuffix("b").removesuffix("i")
    number, unit = (body[:-1], body[-1:]) if body[-1:].isalpha() else (body, "")
    try:
        value = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(f"{where}: {text!r} is not a size; write for example 512M or 2G") from None
    if value <= 0:
        raise ConfigError(f"{where}: {text!r} must be greater than zero")
    return value
