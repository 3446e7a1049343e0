"""The file of `lmkit up`: a proxy, groups of replicas and where they run."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from lmkit import yaml_file
from lmkit.config import NodeRole, PositiveFloat, PositiveInt, StrictStruct
from lmkit.option import Note
from lmkit.proxy.config import ProxyConfig, Seconds
from lmkit.proxy.rules import ModelName
from lmkit.small_files import model_name

# Options of `lmkit serve` that `lmkit up` itself gives to each replica.
OWN_OPTIONS = frozenset({
    "model", "more_models", "served_model_name", "config", "print_config", "host", "port", "grpc_port", "tls_cert",
    "tls_key", "api_key", "api_key_file", "proxy", "node_key", "node_url", "drain_seconds", "dp",
})  # fmt: skip
_OWN_FIELDS = ("nodes", "on_demand", "mixed_weights", "state_file")  # of the proxy


class Bounds(StrictStruct, frozen=True):
    """How many replicas there may be."""

    min: Annotated[int, msgspec.Meta(ge=0, le=1000), Note("Replicas at least. 0: none runs until a request comes.")] = 1
    max: Annotated[int, msgspec.Meta(ge=1, le=1000), Note("Replicas at most.")] = 1

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError(f"replicas: min {self.min} is more than max {self.max}")


class Scaling(StrictStruct, frozen=True):
    """How much one replica should have to do. What is more than that asks for another replica."""

    requests: Annotated[PositiveFloat, Note("Running and waiting requests that one replica should have.")] = 8.0
    tokens: Annotated[PositiveInt, Note("Tokens of waiting prompts that one replica should have.")] = 8192
    idle_seconds: Annotated[Seconds, Note("With less to do before a replica ends.")] = 120.0


class Group(StrictStruct, frozen=True):
    """Replicas of one model."""

    model: Annotated[str, Note("A folder, a Hub name or demo: what `lmkit serve` gets.")]
    role: Annotated[NodeRole, Note("prefill computes prompts for the group of the same name with the role decode.")] = (
        "both"
    )
    name: Annotated[ModelName | None, Note("In requests. Default: the folder's name, or `model` itself.")] = None
    replicas: Annotated[Bounds | Annotated[int, msgspec.Meta(ge=1, le=1000)], Note("A number, or {min, max}.")] = 1
    scaling: Annotated[Scaling, Note("What one replica should have to do.")] = Scaling()
    cores: Annotated[
        PositiveInt | None, Note("Threads of one replica, of all its processes. Default: as `lmkit serve` chooses.")
    ] = None
    surge: Annotated[
        Literal[0, 1], Note("Replicas above their number while versions change; 0: one fewer is ready meanwhile.")
    ] = 1
    version: Annotated[str, Note("Any text. Another one starts all replicas anew, one after the other.")] = ""
    options: Annotated[dict[str, Any], Note("Options of `lmkit serve`; checked before anything starts.")] = {}

    @property
    def called(self) -> str:
        return self.name or model_name(self.model)

    @property
    def label(self) -> str:
        """The group's own name. Two groups with roles have one name in requests."""
        return self.called if self.role == "both" else f"{self.called}-{self.role}"

    @property
    def bounds(self) -> Bounds:
        return self.replicas if isinstance(self.replicas, Bounds) else Bounds(min=self.replicas, max=self.replicas)

    @property
    def digest(self) -> str:
        """Of all that decides what a replica is. Replicas of another digest are of another version."""
        parts = (self.model, self.called, self.role, self.cores, self.version, self.options)
        return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()


class ClusterConfig(StrictStruct, frozen=True):
    """One cluster. All times are in seconds."""

    models: Annotated[tuple[Group, ...], msgspec.Meta(min_length=1), Note("Groups of replicas.")]
    proxy: Annotated[
        ProxyConfig, Note("Keys of the proxy's file, except nodes, on_demand, mixed_weights and state_file.")
    ] = ProxyConfig()
    address: Annotated[
        str | None, Note("Where replicas reach the proxy, http://HOST:PORT. Default: where it listens.")
    ] = None
    ray: Annotated[str | None, Note("auto or the address of a Ray cluster. Default: processes of this machine.")] = None
    start_seconds: Annotated[
        Seconds, Note("For a replica to load; requests for a model without a replica wait as long.")
    ] = 1800.0
    silent_seconds: Annotated[Seconds, Note("After which a replica that fails its health checks is killed.")] = 30.0
    drain_seconds: Annotated[Seconds, Note("For the requests of a replica to end before it does.")] = 30.0

    def _wrong_pair(self, group: Group) -> str:
        """Why this group, which has a role, cannot be one of a pair, or an empty text."""
        given = {name.replace("-", "_") for name in group.options}
        others = [other for other in self.models if other is not group and other.called == group.called]
        if sorted(other.role for other in (group, *others)) != ["decode", "prefill"]:
            return f"{group.called!r} needs one group with role: prefill and one with role: decode, and no other"
        if others[0].model != group.model:
            return f"both groups of {group.called!r} need the same `model`"
        if group.bounds.min == 0:
            return "a group with a role needs a replica; write replicas: {min: 1, ...}"
        if group.role == "prefill" and not given & {"kv_host_memory", "kv_disk_path"}:
            return "it gives the KV of prompts away from host memory: add kv_host_memory to its options"
        if "kv_listen" in given or "kv_peer" in given:
            return "`lmkit up` itself connects the two groups; leave out kv_listen and kv_peer"
        if self.ray is not None and "kv_key_file" not in given:
            return "on Ray, add kv_key_file to the options of both groups: a file with the same key on each machine"
        return ""

    def __post_init__(self) -> None:
        labels = [group.label for group in self.models]
        if again := next((label for label in labels if labels.count(label) > 1), None):
            raise ValueError(f"two models are called {again!r}; give each a name of its own")
        for group in self.models:
            if group.role != "both" and (reason := self._wrong_pair(group)):
                raise ValueError(f"{group.label}: {reason}")
        default = ProxyConfig()
        for name in _OWN_FIELDS:
            if getattr(self.proxy, name) != getattr(default, name):
                raise ValueError(f"proxy.{name} is not for a cluster: `lmkit up` sets it itself")
        for group in self.models:
            if own := sorted(OWN_OPTIONS & {option.replace("-", "_") for option in group.options}):
                raise ValueError(f"options of {group.called!r}: {own[0]} is what `lmkit up` sets itself")
            if "role" in group.options:
                raise ValueError(f"options of {group.called!r}: role is a field of the model, beside options")
        if self.address is not None and not re.fullmatch(r"https?://[^/\s]+", self.address):
            raise ValueError(f"address {self.address!r}: write for example http://10.0.0.1:8080")
        if self.proxy.tls_cert and self.address is None:
            raise ValueError("a proxy with tls_cert needs `address`, with the host name of its certificate")


def read(path: Path) -> ClusterConfig:
    """The file's configuration. Files that the proxy needs are beside it. Raises ConfigError with the file's line."""
    config = yaml_file.load(path, ClusterConfig)
    named = {name: getattr(config.proxy, name) for name in ("key_store", "data_dir", "tls_cert", "tls_key")}
    beside = {name: str((path.parent / value).resolve()) for name, value in named.items() if value is not None}
    return msgspec.structs.replace(config, proxy=msgspec.structs.replace(config.proxy, **beside))
