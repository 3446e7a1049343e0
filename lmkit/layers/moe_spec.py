"""Mixture of experts as data. No torch: a model's specification holds one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class MoESpec:
    """Sparse layers: a token is computed by the `experts_per_token` experts to which a router gives most probability.

    An expert is a gated MLP. The output is the sum of theirs, each times its probability.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of an expert
    layers: tuple[bool, ...]  # which layers are sparse
    names: Mapping[str, str]  # role without the expert's number -> name in a checkpoint, see models.roles
    normalize: bool = True  # the chosen experts' probabilities are divided by their sum
    shared_intermediate_size: int = 0  # of one more expert, which computes every token; 0 = there is none
