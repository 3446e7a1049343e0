"""`lmkit serve --role`: what a node that computes prompts, or that decodes, needs."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from lmkit import conflicts
from lmkit.cli.model_list import ListedModel
from lmkit.config import NAMED_PEERS, EngineConfig, NodeRole
from lmkit.errors import ConfigError


def with_role(models: Sequence[ListedModel], role: NodeRole, *, has_proxy: bool) -> list[ListedModel]:
    """The models of a server with this role. Raises ConfigError for options that do not go together with it."""
    if role != "both" and len(models) > 1:
        raise ConfigError(f"--role {role} is for a server of one model")
    return [model._replace(engine=_engine(model.engine, role, has_proxy=has_proxy)) for model in models]


def _engine(config: EngineConfig, role: NodeRole, *, has_proxy: bool) -> EngineConfig:
    if role == "decode" and has_proxy and config.kv_peer is None:
        config = replace(config, kv_peer=NAMED_PEERS)
    conflicts.check(config, f"role {role}")
    return config
