"""`lmkit serve --role`: what a node that computes prompts, or that decodes, needs."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from lmkit.cli.model_list import ListedModel
from lmkit.config import NAMED_PEERS, EngineConfig, NodeRole
from lmkit.errors import ConfigError


def with_role(models: Sequence[ListedModel], role: NodeRole, *, has_proxy: bool) -> list[ListedModel]:
    """The models of a server with this role. Raises ConfigError for options that do not go together with it."""
    if role != "both" and len(models) > 1:
        raise ConfigError(f"--role {role} is for a server of one model")
    return [model._replace(engine=_engine(model.engine, role, has_proxy=has_proxy)) for model in models]


def _engine(config: EngineConfig, role: NodeRole, *, has_proxy: bool) -> EngineConfig:
    if role == "prefill":
        if config.kv_peer is not None:
            raise ConfigError("--role prefill computes prompts and fetches none; leave out --kv-peer")
        if config.kv_listen is None:
            raise ConfigError("--role prefill gives KV away: add --kv-listen, --kv-host-memory and --kv-key-file")
    if role == "decode":
        if config.kv_listen is not None:
            raise ConfigError("--role decode gives no KV away; leave out --kv-listen, or --role")
        if config.kv_peer is None and not has_proxy:
            raise ConfigError("--role decode: name the engine that computes prompts with --kv-peer, or a --proxy")
        if config.kv_key_file is None:
            raise ConfigError("--role decode fetches KV: add --kv-key-file, the key of the engines that compute it")
        return replace(config, kv_peer=config.kv_peer or NAMED_PEERS)
    if config.kv_peer == NAMED_PEERS:
        raise ConfigError(f"--kv-peer {NAMED_PEERS}: write HOST:PORT, or --role decode")
    return config
