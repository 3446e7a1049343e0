"""Options that do not go together: one table, which loading, the commands and docs/reference.md read. No torch.

A side of a row is an option that is given (it differs from its default), an option that is not (`no kv_listen`), or a
trait: of a configuration (TRAITS), of a device (`device cuda`), or one that only the caller knows (CALLER_TRAITS).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from lmkit.config import NAMED_PEERS, EngineConfig
from lmkit.devices import DEVICES
from lmkit.errors import ConfigError


class Conflict(NamedTuple):
    """`option` does not go together with `with_`. `reason` says what is wrong and what to do: `{options}` are those of
    all rows of the same reason that hold, other names those of `words`."""

    option: str
    with_: str
    reason: str


# Traits of a configuration.
PROCESSES = "tp, ep or pp"
RANKS = "tp or ep"
UNEQUAL = "another number of ep"
MANY = "more ranks than the device takes"
WRONG_COUNT = "another number of ranks"
LONE_DRAFTER = "tp or ep on a device whose ranks take no drafter"
DRAFTER = "a draft model or head"
NO_TIER = "no kv_host_memory or kv_disk_path"
NO_ENGINES = "no kv_listen or kv_peer"
NO_ADAPTERS = "no adapters or adapter_root"
UNCALIBRATED = "a kv_dtype that needs a calibration"
NAMED = "kv_peer that requests name"
TRAITS: dict[str, Callable[[EngineConfig], bool]] = {
    PROCESSES: lambda config: config.num_processes > 1,
    RANKS: lambda config: config.num_ranks > 1,
    UNEQUAL: lambda config: min(config.tp, config.ep) > 1 and config.tp != config.ep,
    MANY: lambda config: config.num_processes > config.target.max_ranks,
    WRONG_COUNT: lambda config: bool(config.devices) and len(config.gpus) != config.num_processes,
    LONE_DRAFTER: lambda config: config.num_processes > 1 and not config.target.drafts_with_ranks,
    DRAFTER: lambda config: config.has_drafter,
    NO_TIER: lambda config: config.kv_host_memory is None and config.kv_disk_path is None,
    NO_ENGINES: lambda config: config.kv_listen is None and config.kv_peer is None,
    NO_ADAPTERS: lambda config: not config.adapters and config.adapter_root is None,
    UNCALIBRATED: lambda config: config.asked_kv is not None and config.asked_kv.needs_calibration,
    NAMED: lambda config: config.kv_peer == NAMED_PEERS,
}
# Traits that callers name.
NO_KERNELS = "a GPU without CuPy"
STATES = "a model with recurrent states"
FIXED_STATES = "recurrent states that no tier takes"
WHOLE_TEXTS = "a model that reads whole texts"
DECODER = "an engine of a decoder"
HEARS = "a model that hears"
FOREIGN = "the flexible engine"
OWN_CACHES = "caches of transformers that grow"
PREFILL, DECODE, NO_ROLE = "role prefill", "role decode", "role both"
REPLICAS = "dp"
CALLER_TRAITS = (
    NO_KERNELS, STATES, FIXED_STATES, WHOLE_TEXTS, HEARS, DECODER, FOREIGN, OWN_CACHES, PREFILL, DECODE, NO_ROLE,
    REPLICAS,
)  # fmt: skip

_CLUSTER = "cluster={cluster} places the ranks of tp alone: set tp, and leave out ep and pp"
_OUTSIDE = "{shared} keeps no KV outside the engine; leave out {options}"
_TIERS = "kv_host_memory and kv_disk_path keep what the prefix cache finds; do not turn it off"
_IN_STATES = "{architecture} has recurrent states; leave out {options}"
_WHOLE = "{architecture} reads each text as a whole; leave out {options}"
_HEARS = "{architecture} attends to an audio, of which {options} knows nothing; leave it out"
_GROWS = (
    "{architecture} keeps keys and values in transformers' caches, which lmkit neither rounds nor gives away; leave "
    "out {options}"
)
_NO_CHECKPOINT = "an engine of a decoder has no checkpoint whose KV could be kept in tiers"
_SHARED_NAME = "use `lmkit up`, whose file says by which name replicas reach the address"
_OWN_PROXY = "replicas have a proxy of their own"


NOT_HEARING = (
    "tp", "ep", "pp", DRAFTER, "adapters", "adapter_root", "weights_memory", "kv_host_memory", "kv_disk_path",
    "kv_listen", "kv_peer", "kv_events",
)  # fmt: skip


def _foreign(lacks: str, advice: str = "leave out {options}") -> str:
    return f"{{architecture}} runs on the flexible engine, which {lacks}; {advice}"


def _of_devices() -> Iterator[Conflict]:
    for device in DEVICES.values():
        for option, reason in device.refuses.items():
            yield Conflict(option, f"device {device.name}", reason)


# Of those that hold, the first is told.
CONFLICTS: tuple[Conflict, ...] = (
    # Of `lmkit serve --role`.
    Conflict("kv_peer", PREFILL, "--role prefill computes prompts and fetches none; leave out --kv-peer"),
    Conflict(
        "no kv_listen", PREFILL, "--role prefill gives KV away: add --kv-listen, --kv-host-memory and --kv-key-file"
    ),
    Conflict("kv_listen", DECODE, "--role decode gives no KV away; leave out --kv-listen, or --role"),
    Conflict(
        "no kv_peer", DECODE, "--role decode: name the engine that computes prompts with --kv-peer, or a --proxy"
    ),
    Conflict(
        "no kv_key_file", DECODE,
        "--role decode fetches KV: add --kv-key-file, the key of the engines that compute it",
    ),
    Conflict(NAMED, NO_ROLE, f"--kv-peer {NAMED_PEERS}: write HOST:PORT, or --role decode"),
    # Of `lmkit serve --dp`.
    Conflict("more_models", REPLICAS, "replicas are of one model; describe several in a file for `lmkit up`"),
    Conflict("grpc_port", REPLICAS, "the address of replicas has no gRPC; start one server without --dp"),
    Conflict("tls_cert", REPLICAS, _SHARED_NAME),
    Conflict("tls_key", REPLICAS, _SHARED_NAME),
    Conflict("api_key_file", REPLICAS, "give the keys by --api-key"),
    Conflict("data_dir", REPLICAS, "replicas cannot share a folder; each keeps its own for as long as it runs"),
    Conflict("kv_disk_path", REPLICAS, "replicas cannot share a folder; use --kv-host-memory"),
    Conflict("kv_listen", REPLICAS, "replicas cannot share an address; start servers without --dp"),
    Conflict(
        "proxy", REPLICAS, f"{_OWN_PROXY}; start servers without --dp to register them with yours"
    ),
    Conflict("node_key", REPLICAS, _OWN_PROXY),
    Conflict("node_url", REPLICAS, _OWN_PROXY),
    Conflict("node_tag", REPLICAS, _OWN_PROXY),
    Conflict("role", REPLICAS, "replicas are alike; start servers without --dp, or use `lmkit up`"),
    # Of every engine.
    Conflict("draft_history", "no speculate", "draft_history keeps answers for draft tokens: use speculate ngram, too"),
    Conflict("kv_events_topic", "no kv_events", "kv_events_topic is the topic of kv_events: name their address too"),
    Conflict("kv_events", "no prefix_cache", "kv_events tell what the prefix cache keeps; do not turn it off"),
    Conflict(
        "deterministic", NO_KERNELS,
        "deterministic needs kernels of its own on a GPU: install CuPy, or use --device cpu",
    ),
    Conflict("cluster", "no tp", _CLUSTER),
    Conflict("cluster", "ep", _CLUSTER),
    Conflict("cluster", "pp", _CLUSTER),
    Conflict(
        "devices", WRONG_COUNT, "devices={devices} names GPUs: give as many as tp, ep or pp, and device cuda"
    ),
    Conflict("pp", RANKS, "{shared} and pp={pp}: a model is shared out in one way; leave one of them out"),
    Conflict(
        "tp", UNEQUAL,
        "{shared} and ep={ep}: the same processes share both; give one number, or leave one of them out",
    ),
    *_of_devices(),
    Conflict(PROCESSES, MANY, "{shared}: at most {max_ranks} GPUs share a model; use a smaller number"),
    Conflict(
        DRAFTER, LONE_DRAFTER, "{shared} takes no draft model or head on GPUs; use speculate ngram, or one GPU"
    ),
    Conflict(
        "speculate", "pp", "{shared} drafts no tokens: it has several steps under way; leave out speculate, or use pp=1"
    ),
    Conflict("kv_host_memory", PROCESSES, _OUTSIDE),
    Conflict("kv_disk_path", PROCESSES, _OUTSIDE),
    Conflict("kv_peer", PROCESSES, _OUTSIDE),
    Conflict(
        "weights_path", "no weights_memory",
        "weights_path is where layers beyond weights_memory are read from: set weights_memory too",
    ),
    Conflict(
        "weights_memory", PROCESSES, "{shared} keeps all weights in memory; leave out weights_memory, or use {alone}"
    ),
    Conflict(
        "weights_memory", "no packed_cache",
        "weights_memory reads layers from the file of packed weights; do not turn packed_cache off",
    ),
    Conflict("kv_host_memory", "no prefix_cache", _TIERS),
    Conflict("kv_disk_path", "no prefix_cache", _TIERS),
    Conflict("kv_peer", "no prefix_cache", "kv_peer fetches what the prefix cache finds; do not turn it off"),
    Conflict("kv_listen", NO_TIER, "kv_listen gives blocks of host memory or disk; set kv_host_memory or kv_disk_path"),
    Conflict("kv_key_file", NO_ENGINES, "kv_key_file is the key of kv_listen and kv_peer; name one of them too"),
    Conflict(
        "kv_disk_memory", "no kv_disk_path", "kv_disk_memory bounds what lies in kv_disk_path; name that folder too"
    ),
    Conflict(
        "max_adapters", NO_ADAPTERS,
        "max_adapters is for adapters or an adapter_root: name some, or leave max_adapters out",
    ),
    Conflict("adapters", WHOLE_TEXTS, _WHOLE),
    Conflict("adapter_root", WHOLE_TEXTS, _WHOLE),
    Conflict("kv_host_memory", WHOLE_TEXTS, _WHOLE),
    Conflict("kv_disk_path", WHOLE_TEXTS, _WHOLE),
    Conflict("kv_listen", WHOLE_TEXTS, _WHOLE),
    Conflict("kv_peer", WHOLE_TEXTS, _WHOLE),
    Conflict("kv_events", WHOLE_TEXTS, _WHOLE),
    Conflict("ep", WHOLE_TEXTS, _WHOLE),
    Conflict("pp", WHOLE_TEXTS, _WHOLE),
    Conflict("weights_memory", WHOLE_TEXTS, _WHOLE),
    Conflict(UNCALIBRATED, WHOLE_TEXTS, _WHOLE.replace("{options}", "kv_dtype, whose calibration writes text")),
    *(Conflict(option, HEARS, _HEARS) for option in NOT_HEARING),
    Conflict("device cuda", HEARS, "{architecture} runs on CPUs; use device cpu"),
    Conflict("kv_host_memory", FIXED_STATES, _IN_STATES),
    Conflict("kv_disk_path", FIXED_STATES, _IN_STATES),
    Conflict("kv_listen", FIXED_STATES, _IN_STATES),
    Conflict("kv_peer", FIXED_STATES, _IN_STATES),
    Conflict("tp", FOREIGN, _foreign("is not shared by processes")),
    Conflict("ep", FOREIGN, _foreign("is not shared by processes")),
    Conflict("pp", FOREIGN, _foreign("is not shared by processes")),
    Conflict(DRAFTER, FOREIGN, _foreign("has no draft models or heads", "use speculate ngram")),
    Conflict("weights_memory", FOREIGN, _foreign("keeps all weights in memory")),
    Conflict("attention_sinks", FOREIGN, _foreign("leaves attention as the model has it")),
    Conflict("lm_head", FOREIGN, _foreign("keeps the head as it is")),
    Conflict("kv_listen", FOREIGN, _foreign("gives no KV away while it computes")),
    Conflict("kv_peer", FOREIGN, _foreign("gives no KV away while it computes")),
    Conflict("device cuda", FOREIGN, _foreign("is for CPUs", "use device cpu")),
    Conflict("kv_dtype", OWN_CACHES, _GROWS),
    Conflict("kv_host_memory", OWN_CACHES, _GROWS),
    Conflict("kv_disk_path", OWN_CACHES, _GROWS),
    Conflict("kv_events", OWN_CACHES, _GROWS),
    Conflict(PROCESSES, DECODER, "{shared} needs a checkpoint, which every process reads its part of"),
    Conflict("weights_memory", DECODER, "weights_memory needs a checkpoint, whose layers are read from the disk"),
    Conflict("kv_host_memory", DECODER, _NO_CHECKPOINT),
    Conflict("kv_disk_path", DECODER, _NO_CHECKPOINT),
    Conflict("kv_peer", DECODER, _NO_CHECKPOINT),
    Conflict(
        DRAFTER, DECODER, "an engine of a decoder has no checkpoint beside which a draft model or head could draft"
    ),
)  # fmt: skip


def facts(config: EngineConfig) -> set[str]:
    """The sides of rows that hold for a configuration."""
    found = {f"device {config.device}"} | {trait for trait, holds in TRAITS.items() if holds(config)}
    for name, default in _DEFAULTS.items():
        value = getattr(config, name)
        found.add(name if (value if isinstance(default, bool) else value != default) else f"no {name}")
    return found


_DEFAULTS = {name: getattr(EngineConfig(), name) for name in EngineConfig.__struct_fields__}


def excluded(side: str) -> dict[str, str]:
    """The options that do not go together with this side, and why."""
    return {row.option: row.reason for row in CONFLICTS if row.with_ == side}


def conflict(found: Collection[str]) -> tuple[Conflict, str] | None:
    """The first row of which both sides are `found`, and the options of all such rows of the same reason. None: no row
    is."""
    both = [row for row in CONFLICTS if row.option in found and row.with_ in found]
    return (both[0], ", ".join(row.option for row in both if row.reason == both[0].reason)) if both else None


def check(config: EngineConfig, *traits: str, **words: str) -> None:
    """Raise ConfigError for options that do not go together, or not with these traits. `words` are those of reasons
    that no configuration has."""
    if (first := conflict(facts(config) | set(traits))) is None:
        return
    row, options = first
    shared = config.shared_by if config.num_processes > 1 else ""
    words |= {"options": options, "shared": shared, "alone": shared.partition("=")[0] + "=1"}
    words |= {name: str(getattr(config, name)) for name in ("cluster", "devices", "pp", "ep")}
    raise ConfigError(row.reason.format_map(words | {"max_ranks": str(config.target.max_ranks)}))
