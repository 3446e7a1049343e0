"""Configuration: frozen, strict structs.

An unknown key or a wrong type is an error. No torch here: dtypes are strings. Longer than usual: every option stands
here once, and all commands read this list.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

import msgspec

from lmkit import choices, other_names
from lmkit.checked import CheckedMeta
from lmkit.devices import CPU, DEVICES, Device
from lmkit.errors import ConfigError, UnsupportedError
from lmkit.kv_dtype import KVDtype, KVName, asked_kv_dtype
from lmkit.option import Option, options_of

T = TypeVar("T")

if TYPE_CHECKING:
    DeviceName = str
else:
    DeviceName = Literal["auto", *DEVICES]

WeightDtype = Literal["auto", "float32", "bfloat16", "float16"]
KVStorageName = Literal["auto", KVName]
HeadStorage = Literal["auto", "int8", "stored"]
ClusterName = Literal["none", "ray", "torchrun"]
ModelImpl = Literal["auto", "fast", "flexible"]
Quantize = Literal["none", "int4", "int8", "fp8"]
Switch = Literal["on", "off"]
Reranker = Literal["cosine", "yes_no"]  # of embeddings; or the probability that the model answers yes
PoolingName = Literal["auto", "last", "mean", "cls", "max", "weighted_mean", "mean_sqrt_len"]
Speculate = Annotated[str, msgspec.Meta(pattern=r"^(off|auto|ngram|mtp|(draft|eagle)=.+)$")]
Activations = Literal["auto", "int8", "fp8", "exact"]
SelfTestMode = Literal["auto", "off", "require"]
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
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=64)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
_model = functools.partial(Option, group="Model")
_memory = functools.partial(Option, group="Memory and cache")
_schedule = functools.partial(Option, group="Scheduling")


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
        texts = {name: text for name, text in given.items() if isinstance(text, str) and is_size(cls, name)}
        return given | {name: parse_size(name, text, name) for name, text in texts.items()}


def is_size(config: type, name: str) -> bool:
    """Whether a field of a configuration is bytes, and may be written like 2G."""
    option = options_of(config).get(name)
    return option is not None and option.is_size


class EngineConfig(StrictStruct, frozen=True, kw_only=True, metaclass=_Sizes):
    """How one engine runs one model. `auto` and None are resolved once, into a new value, and each decision is logged.

    Each field is an option of the command line, in this order. `on` returns a copy with the fields that depend on the
    device resolved. For sizes the constructor takes texts like "2G", too.
    """

    device: Annotated[DeviceName, _model("auto takes a GPU if there is one.")] = "auto"
    # auto = the checkpoint's, see models.resolved.resolve_dtype
    dtype: Annotated[WeightDtype, _model("Type of dense weights, and on a GPU of activations.")] = "auto"
    # auto = the checkpoint's kv_config.json, else the weights' dtype
    kv_dtype: Annotated[KVStorageName, _model("Type of the KV cache.")] = "auto"
    # per token and group; auto = by device
    activations: Annotated[Activations, _model("Rounding of inputs of quantized linears.")] = "auto"
    # int8 = quantized while loading, see models.source.rounded_head
    lm_head: Annotated[
        HeadStorage, _model("int8 (smaller), stored, or auto: what the checkpoint's config.json asks for, else stored.")
    ] = "auto"
    # see models.rounding
    quantize: Annotated[Quantize, _model("Round the weights of a 16-bit checkpoint while it loads.")] = "none"
    # see models.engines
    model_impl: Annotated[
        ModelImpl,
        _model("Engine: fast is lmkit's, flexible runs transformers' modules; auto takes the fast one if it can."),
    ] = "auto"
    max_model_len: Annotated[PositiveInt | None, _model("Context in tokens. Default: the model's.")] = None
    generation_config: Annotated[
        str, _model("Sampling defaults: auto (the checkpoint's generation_config.json), none, or a path.")
    ] = "auto"
    chat_template: Annotated[
        str | None,
        _model("A chat template's file, its text, or its name in the checkpoint. Default: the checkpoint's."),
    ] = None
    # see formats.peft; a request names one
    adapters: Annotated[
        tuple[str, ...],
        _model("A LoRA adapter, NAME=FOLDER, served as a model of that name. Repeat the option for more."),
    ] = ()
    adapter_root: Annotated[
        str | None, _model("A folder whose adapters may be loaded while the server runs. Default: none may.")
    ] = None
    # None = all `adapters`, 8 with a root
    max_adapters: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=1024)] | None,
        _model("Adapters in one batch; others wait in host memory."),
    ] = None
    # see formats.sentences
    pooling: Annotated[
        PoolingName,
        _model("Embeddings: auto (the checkpoint's), the state of the last or first (cls) token, or the mean."),
    ] = "auto"
    attention_sinks: Annotated[
        int, msgspec.Meta(ge=0, le=1 << 20), _model("First tokens that sliding windows still see.")
    ] = 0
    packed_cache: Annotated[bool, _model("Keep packed weights in a file, <checkpoint>/.lmkit, for the next start.")] = (
        True
    )
    tp: Annotated[Ranks, _model("Processes that share the model: each computes a part of every layer.")] = 1
    ep: Annotated[
        Ranks,
        _model("Processes that share the experts of a mixture; with --tp the same processes, so the same number."),
    ] = 1
    pp: Annotated[Ranks, _model("Processes that share the model: each computes some of the layers.")] = 1
    devices: Annotated[
        str,
        msgspec.Meta(pattern=r"^(0(,\d+)*)?$"),
        _model(
            "GPUs of --tp, --ep or --pp, one for each process: 0,1 for example, or 0,0 to try it. Default: 0,1 and on."
        ),
    ] = ""
    # see runners.placing
    cluster: Annotated[
        ClusterName,
        _model("Place the processes of --tp on other machines: ray, or torchrun. Default: all here."),
    ] = "none"
    deterministic: Annotated[
        bool, _model("A request's tokens depend on it alone: on a CPU always; on a GPU slowly, if at all.")
    ] = False
    # see turbo.engine.self_test
    selftest: Annotated[
        SelfTestMode,
        _model("On a GPU: compare kernels with torch once, and go on without wrong ones (auto), or not (require)."),
    ] = "auto"
    # of all processes together
    num_threads: Annotated[PositiveInt | None, _model("Default: the physical cores this process may use.")] = None

    weights_memory: Annotated[
        PositiveInt | None,
        _memory("Memory for weights, e.g. 8G; layers beyond are read in every step. Default: for all.", is_size=True),
    ] = None
    weights_path: Annotated[
        str | None, _memory("A folder on a fast disk to read these layers from. Default: beside the checkpoint.")
    ] = None
    kv_memory: Annotated[
        PositiveInt | Share | None,
        _memory(
            "KV cache, as 2G or 30%. Default: for the batch; on a CPU at most a quarter of the free memory.",
            is_size=True,
        ),
    ] = None
    kv_host_memory: Annotated[
        PositiveInt | None, _memory("Host memory for KV that does not fit, e.g. 2G. Default: none.", is_size=True)
    ] = None
    kv_disk_path: Annotated[
        str | None, _memory("A folder for KV on disk, which survives a restart. Default: none.")
    ] = None
    kv_disk_memory: Annotated[PositiveInt, _memory("Bytes on disk that the folder may take.", is_size=True)] = 16 << 30
    kv_listen: Annotated[
        str | None, _memory("Give KV in host memory or on disk to other engines, at HOST:PORT. Default: no.")
    ] = None
    # or NAMED_PEERS
    kv_peer: Annotated[
        str | None,
        _memory("HOST:PORT of an engine with --kv-listen, to fetch the KV of prompts from. Default: none."),
    ] = None
    kv_key_file: Annotated[str | None, _memory("A file with the key that both engines need.")] = None
    # beyond those in use
    image_memory: Annotated[
        PositiveInt, _memory("Memory for encoded images that later requests may show again.", is_size=True)
    ] = 256 << 20
    image_pixels: Annotated[
        int,
        msgspec.Meta(ge=1 << 10, le=1 << 24),
        _memory("The most pixels that a model sees of an image; larger ones are made smaller."),
    ] = 1 << 20
    block_size: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=1024)] | None,
        _memory("Tokens in a KV block. Default: 32 on a CPU, 64 on a GPU."),
    ] = None
    prefix_cache: Annotated[bool, _memory("Keep the KV of prompts and answers for later requests.")] = True
    # see turbo.scheduling.audits
    audit: Annotated[
        int,
        msgspec.Meta(ge=0),
        _memory("Of so many cache hits compute one again while idle, and compare the bits of its KV. 0 = none."),
    ] = 1000
    cache_quota: Annotated[
        Fraction, _memory("Share of the KV cache that one API key may keep. Default with several keys: 0.5.")
    ] = 1.0
    kv_events: Annotated[
        KVEventsAddress | None,
        _memory("Publish what the cache gets and loses, over ZeroMQ at tcp://HOST:PORT. Default: nowhere."),
    ] = None
    kv_events_topic: Annotated[str, _memory("Topic of these messages.")] = ""
    session_lease: Annotated[
        PositiveFloat, _memory("Seconds for which a session's KV stays after its last answer.")
    ] = 300.0

    max_batch_size: Annotated[
        BatchSize | None,
        _schedule(
            "Sequences in one step. Default: 64, with --weights-memory as many as hide the disk, 16 on a small GPU."
        ),
    ] = None
    max_step_tokens: Annotated[
        StepTokens | None,
        _schedule(
            "Tokens in one step. Default: 512 on a CPU, 4096 on a GPU (1024 with less than 10 GiB free), at least "
            "twice a chosen batch."
        ),
    ] = None
    max_queue: Annotated[PositiveInt, _schedule("Waiting requests; one more is refused.")] = 1024
    queue_quota: Annotated[
        Fraction, _schedule("Share of the queue that one API key may fill. Default with several keys: 0.5.")
    ] = 1.0
    max_queued_tokens: Annotated[PositiveInt, _schedule("Prompt tokens of all open requests; more are refused.")] = (
        4 << 20
    )
    request_timeout: Annotated[
        PositiveFloat | None, _schedule("Seconds that a request may take if it names no timeout. Default: no limit.")
    ] = None
    priority_seconds: Annotated[
        float,
        msgspec.Meta(ge=0),
        _schedule("Seconds of waiting that one level of a request's priority is worth."),
    ] = 10.0
    max_overtakes: Annotated[
        int,
        msgspec.Meta(ge=0),
        _schedule("How often later requests with a longer cached prefix may overtake a request."),
    ] = 8
    decode_slowdown: Annotated[
        float,
        msgspec.Meta(gt=1),
        _schedule("Largest slowdown of decoding during a prefill: 2 = twice as slow."),
    ] = 2.0
    overlap: Annotated[bool, _schedule("Prepare the next step while one runs.")] = True
    speculate: Annotated[
        Speculate,
        _schedule("Draft tokens if that is faster: auto, ngram, mtp, draft=FOLDER (a model), eagle=FOLDER (a head)."),
    ] = "off"
    max_draft_tokens: Annotated[
        int, msgspec.Meta(ge=1, le=64), _schedule("The most draft tokens for one sequence in one step.")
    ] = 16
    draft_history: Annotated[
        int,
        msgspec.Meta(ge=0, le=1 << 24),
        _schedule("Tokens of one API key's earlier answers that drafts look up, too, e.g. 65536."),
    ] = 0

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise other_names.missing(self, name)

    def on(self, name: str, free: int | None = None) -> EngineConfig:
        """This configuration for that device, with the device's defaults filled in, which are smaller if it has little
        memory `free` (bytes). A plan of streamed weights chooses batch and step."""
        device = DEVICES[name]
        is_small = free is not None and free < device.small_memory
        tokens, batch = device.small_step if is_small else (device.step_tokens, None)
        return msgspec.structs.replace(
            self,
            device=name,
            block_size=self.block_size or device.block_size,
            max_batch_size=self.max_batch_size or batch,
            max_step_tokens=self.max_step_tokens or (None if self.weights_memory else tokens),
        )

    @property
    def target(self) -> Device:
        """The device, or a CPU if `on` has not resolved it."""
        return DEVICES.get(self.device, CPU)

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens for one sequence in one step, at most."""
        return self.max_draft_tokens if self.speculate != "off" else 0

    @property
    def has_drafter(self) -> bool:
        """Whether `speculate` names what drafts beside the model: a smaller model, a head or a layer."""
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
    def asked_kv(self) -> KVDtype | None:
        """The storage that `kv_dtype` names; None for auto."""
        return asked_kv_dtype(self.kv_dtype)

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
        """The GPU of each process, if the device is a GPU."""
        return [int(number) for number in self.devices.split(",")] if self.devices else list(range(self.num_processes))

    @property
    def num_sharing(self) -> int:
        """Processes on this machine that share the memory of process 0's device."""
        return self.gpus.count(0) if self.target.own_memory else self.num_local

    @property
    def num_shares(self) -> int:
        """Parts of the device's memory, one for each process of a plan: hosts of all processes count as one."""
        return self.num_sharing if self.target.own_memory else self.num_processes

    @property
    def is_invariant(self) -> bool:
        """Whether the bits of a request's KV and tokens depend on it alone, on lmkit's own engine."""
        return self.deterministic or (self.target.invariant and self.num_processes == 1)

    @property
    def tokens_per_block(self) -> int:
        """`block_size`, or the device's."""
        return self.block_size or self.target.block_size

    @property
    def sequences_per_step(self) -> int:
        """`max_batch_size`, or its default if no plan of streamed weights has chosen another."""
        return self.max_batch_size or BATCH_SIZE

    @property
    def tokens_per_step(self) -> int:
        """`max_step_tokens`, or the device's."""
        return self.max_step_tokens or self.target.step_tokens


def wrong_origin(origins: Sequence[str]) -> str | None:
    """Why these cannot be the origins of web pages; None if they can. "*" would let any page call a local server."""
    wrong = [origin for origin in origins if not re.fullmatch(r"https?://[a-z0-9.\-\[\]:]+", origin)]
    return f"{wrong[0]!r} is not an origin; write each site as https://chat.example.com" if wrong else None


def wrong_host(hosts: Sequence[str]) -> str | None:
    """Why these cannot be the names of a server; None if they can. "*" is every name."""
    wrong = [host for host in hosts if not re.fullmatch(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", host)]
    return f"{wrong[0]!r} is not a host; write a name such as llm.example.com or *.example.com" if wrong else None


ToolParser = Literal[
    "apertus", "cohere", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "functionary", "functiongemma",
    "gemma4", "gigachat3", "gigachat31", "glm45", "granite", "granite_20b", "harmony", "hermes", "hy3", "internlm",
    "kimi_k2", "kimi_k3", "lfm2", "llama3", "longcat", "minicpm5", "minimax_m1", "minimax_m2", "minimax_m3",
    "mistral", "mistral_ids", "mistral_list", "nemotron", "olmo3", "phi4_mini", "pythonic", "qwen3_coder", "seed_oss",
    "solar", "step3", "tool_calls", "xlam", "none",
]  # fmt: skip
ReasoningParser = Literal[
    "apriel", "cohere", "gemma4", "granite", "harmony", "hy3", "kimi_k3", "minimax_m3", "mistral", "response",
    "seed_oss", "solar", "think", "none",
]  # fmt: skip


RootPath = Annotated[str, msgspec.Meta(pattern=r"^(/[A-Za-z0-9._~-]+)*$")]


ListenPort = Annotated[Port, Option("0 takes a free one.")]


class Listener(StrictStruct, frozen=True):
    """What `lmkit serve` and `lmkit proxy` have in common as servers."""

    host: Annotated[str, Option("Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: ListenPort = 8000
    grpc_port: Annotated[Port | None, Option("Serve gRPC, too; 0 takes a free port.")] = None
    tls_cert: Annotated[str | None, Option("A certificate chain in PEM: serve https.")] = None
    tls_key: Annotated[str | None, Option("Its key; default in the same file.")] = None
    # besides loopback ones and `host`, see web.hosts
    allowed_hosts: Annotated[
        tuple[str, ...],
        Option("A name of this server, if it has no keys; *.example.com, repeatable.", name="allowed_host"),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        Option("Pages of this site may call the server; repeatable. None may by default.", name="cors_origin"),
    ] = ()
    cors_credentials: Annotated[bool, Option("These pages may send cookies, too.", is_switch=True)] = False
    root_path: Annotated[
        RootPath, Option("A path in front of every route, /llm: for a reverse proxy that leaves it.")
    ] = ""
    chat_page: Annotated[bool, Option("A page for people at /.")] = True
    log_format: Annotated[LogFormat, Option("json: an object a line.")] = "text"
    # None = OTEL_EXPORTER_OTLP_ENDPOINT, else no traces
    otlp_traces_endpoint: Annotated[
        str | None, Option("Send OpenTelemetry traces to this collector, http://HOST:4318.")
    ] = None


class ServerConfig(Listener, frozen=True):
    """How one `lmkit serve` front end listens. A field with an `Option` is an option of the command."""

    # of one model, the first is its own
    served_model_name: Annotated[
        tuple[str, ...], _model("Default: the folder's name, or the name given. Several: A,B.")
    ] = ()
    # each `KEY [name=value ...]`, see web.auth.ApiKey; empty = no authentication
    api_keys: Annotated[
        tuple[str, ...],
        Option("Accept this key; repeatable. Others see it here, not in LMKIT_API_KEY.", name="api_key"),
    ] = ()
    api_key_file: Annotated[
        str | None,
        Option("A file with one key a line: KEY [name=value ...]. It is read again when it changes.", metavar="<path>"),
    ] = None
    proxy_key: str | None = None  # by which a server without keys knows a proxy, see web.running; None = it knows none
    max_connections_per_address: Annotated[
        PositiveInt | None, Option("Of one client address; default as many as the server takes in all.")
    ] = None
    max_body_bytes: Annotated[PositiveInt, Option("Largest request body.", name="max_body", is_size=True)] = MAX_BODY
    body_memory: Annotated[PositiveInt, Option("For the bodies of all requests together.", is_size=True)] = BODY_MEMORY
    answer_memory: Annotated[
        PositiveInt, Option("For answers that are not sent or read yet; one gets an eighth.", is_size=True)
    ] = 512 << 20
    strict_fields: Annotated[
        bool, Option("Refuse fields that lmkit lacks, also those that change nothing.", is_switch=True)
    ] = False
    drain_seconds: Annotated[float, msgspec.Meta(ge=0), Option("Seconds for requests to finish after SIGTERM.")] = 30.0
    step_timeout: Annotated[
        Annotated[float, msgspec.Meta(ge=1)] | None,
        Option("Seconds after which a step hangs and the engine is started again. Default: two minutes or more."),
    ] = None
    memory_budget: Annotated[
        PositiveInt | None, Option("For all engines of several models. Default: what is free.", is_size=True)
    ] = None
    keep_alive: Annotated[
        PositiveFloat | None,
        Option("Seconds without a request after which a model sleeps. Default: no limit."),
    ] = None
    # see text.dialects
    tool_parser: Annotated[
        ToolParser | None,
        Option("How the model writes calls. Default: as its chat template shows.", metavar="<name>"),
    ] = None
    reasoning_parser: Annotated[
        ReasoningParser | None,
        Option("How the model reasons. Default: as its chat template shows.", metavar="<name>"),
    ] = None
    reranker: Annotated[
        Reranker, Option("Scores of /v1/rerank: cosine (of embeddings), or yes_no (the model's answer).")
    ] = "cosine"
    # see serve.next_turn
    next_turn: Annotated[
        Switch, Option("Compute ahead, while nothing else is to be done, how a chat's next prompt begins: on, off.")
    ] = "on"
    # see serve.warm
    warm: Annotated[
        str | None,
        Option(
            "Known prefixes to compute at the start: a file of JSON lines, or LAST for those used most.",
            metavar="<FILE|LAST>",
        ),
    ] = None
    warm_tokens: Annotated[PositiveInt, Option("Tokens that --warm computes at most.")] = 1 << 17
    warm_seconds: Annotated[PositiveFloat, Option("Seconds after which --warm begins no other prefix.")] = 60.0
    # see serve.receipts
    receipts: Annotated[
        bool, Option("Keep a signed receipt of every answer, not only where a request asks for it.", is_switch=True)
    ] = False
    receipt_key: Annotated[
        str | None,
        Option("Private key of receipts, made if there is none. Default: receipt.key in the cache.", metavar="<path>"),
    ] = None
    # see web.data_folder
    data_dir: Annotated[
        str | None, Option("Keep files, batches and responses of clients here. Default: a temporary folder.")
    ] = None
    response_store: Annotated[
        int,
        msgspec.Meta(ge=0),
        Option("For responses that clients may continue (/v1/responses); 0 stores none.", is_size=True),
    ] = 256 << 20
    response_ttl: Annotated[
        float,
        msgspec.Meta(gt=0),
        Option("Seconds that a response stays after its last use; default 30 days."),
    ] = 30 * 86400.0
    max_file_bytes: Annotated[
        PositiveInt, Option("Largest file that a client may upload, for a batch.", name="max_file", is_size=True)
    ] = 100 << 20
    file_space: Annotated[
        PositiveInt,
        Option("For the files of all clients in the data folder; one gets its --queue-quota.", is_size=True),
    ] = 4 << 30
    image_hosts: Annotated[
        tuple[str, ...],
        Option("Fetch images of this HOST or HOST:PORT; repeatable. Default: of none.", name="image_host"),
    ] = ()
    image_folder: Annotated[
        str | None, Option("A folder whose files messages may show, as file:///PATH. Default: none.")
    ] = None
    max_logprobs: Annotated[
        int,
        msgspec.Meta(ge=-1),
        Option("Most tokens that a request may see at a position, with log-probabilities; -1 = the whole vocabulary."),
    ] = 20
    enable_force_include_usage: Annotated[
        bool, Option("Every chunk of a stream has the usage so far, asked or not.", is_switch=True)
    ] = False
    enable_per_request_metrics: Annotated[bool, Option("Answers have their times, as `metrics`.", is_switch=True)] = (
        False
    )
    # or the name of an entry point, see serve.hooks
    hooks: Annotated[
        tuple[str, ...],
        Option("module:object that sees each request or answer, and may change or refuse it; repeatable.", name="hook"),
    ] = ()
    proxies: Annotated[
        tuple[str, ...],
        Option("Register with the lmkit proxy at this address; repeatable.", name="proxy", metavar="<url>"),
    ] = ()
    node_key: Annotated[
        str | None,
        Option("The proxy's key with role=node; default that of a proxy of yours here.", metavar="<key>"),
    ] = None
    node_url: Annotated[
        str | None,
        Option("Where the proxy reaches this server; default where it is called from.", metavar="<url>"),
    ] = None
    node_tags: Annotated[tuple[str, ...], Option("Its class, for the proxy's rules; repeatable.", name="node_tag")] = ()
    role: Annotated[
        NodeRole, Option("What it computes for a proxy: prefill (prompts), decode (the rest), or both.")
    ] = "both"
    log_level: Annotated[LogLevel, Option("How much is logged.", any_case=True)] = "INFO"

    def __post_init__(self) -> None:
        if reason := wrong_origin(self.cors_origins) or wrong_host(self.allowed_hosts):
            raise ConfigError(reason)
        for proxy in self.proxies:
            if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", proxy):
                raise ConfigError(f"--proxy {proxy!r}: write the proxy's address, for example http://10.0.0.5:8080")
        if not self.proxies and (self.node_key or self.node_url or self.node_tags):
            raise ConfigError("--node-key, --node-url and --node-tag are for a proxy: name it with --proxy")
        if self.body_memory < self.max_body_bytes:
            raise ConfigError("--body-memory must be at least --max-body, or no body of that size could ever be read")


def checked_level(level: Any, name: str = "log level ") -> str:
    """The level in capitals. Raises ConfigError, which starts with `name`, for an unknown one."""
    if not isinstance(level, str) or level.upper() not in LOG_LEVELS:
        raise ConfigError(f"{name}{level!r}: expected {', '.join(LOG_LEVELS)}")
    return level.upper()


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
    """The value of a field that is bytes. `kv_memory` may be a share of the free memory, `30%`. Raises ConfigError."""
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
