"""A layer for multi-token prediction as data. No torch: a ModelSpec holds one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from lmkit.models.layer_spec import LayerSpec


@dataclass(frozen=True)
class MTPSpec:
    """A layer that stands beside a model, and names of the parts before it and after it (see models.mtp)."""

    layer: LayerSpec
    prefix: str  # of the names of all its tensors
    fc: str
    token_norm: str
    state_norm: str
    norm: str

    def is_in(self, names: Iterable[str]) -> bool:
        """Whether a checkpoint with these tensors has it. Many were saved without."""
        return any(name.startswith(self.prefix) for name in names)


def mtp_apart(layer: LayerSpec) -> MTPSpec:
    """As Qwen3-Next and Qwen3.5 store it: apart from the model."""
    parts = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    return MTPSpec(replace(layer, prefix="mtp.layers", number=0), "mtp.", *(f"mtp.{part}" for part in parts))


def mtp_after_layers(layer: LayerSpec, number: int) -> MTPSpec:
    """As DeepSeek-V3 and GLM-4.5 store it: after the last layer, with copies of the embeddings and of the head."""
    prefix = f"{layer.prefix}.{number}."
    parts = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    return MTPSpec(replace(layer, number=number), prefix, *(prefix + part for part in parts))
