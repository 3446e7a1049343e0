"""Rotations of a model that leave its function alone (QuaRot, arXiv 2404.00456; SpinQuant, arXiv 2405.16406).

R1 turns the residual stream: x becomes x Q. The factors of norms are first multiplied into the linears that read them,
for x / |x| turns with x. Then embeddings E become E Q, linears that read the stream W Q, those that add to it Q^T W,
and a head of its own takes the place of tied embeddings. R2 turns each head of values: W_v becomes R^T W_v, and W_o
becomes W_o R. Q and R are Walsh-Hadamard matrices (of other widths than powers of two: Hartley's) with columns of
random sign, so that what one channel had lies in all.

Weights are turned as they are read, and rounded to the dtype that the checkpoint has. In float32 the logits stay.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from lmkit.formats.checkpoint import CheckpointReader
from lmkit.formats.safetensors_file import TensorInfo
from lmkit.models import roles
from lmkit.models.head import untied
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.source import ModelSource
from lmkit.models.spec import ModelSpec
from lmkit.quant.kv.balance import rotation, turns_values

Change = Callable[[Tensor], Tensor]
READS = ("q", "k", "v", "gate", "up", "router", "shared_router")  # the stream, by the last part of a role
ADDS = ("o", "down")  # to the stream
ROWS = 8192  # of embeddings that are turned at a time


@dataclass(frozen=True)
class Turned:
    """A tensor that a turned model has: one of the checkpoint's, changed."""

    source: str
    change: Change


class TurnedReader:
    """A checkpoint's reader that shows some tensors turned, in their own dtypes; otherwise it is that reader."""

    def __init__(self, reader: CheckpointReader, turned: dict[str, Turned]) -> None:
        self._reader, self._turned = reader, turned

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def names(self) -> list[str]:
        return sorted({*self._reader.names(), *self._turned})

    def has(self, name: str) -> bool:
        return name in self._turned or self._reader.has(name)

    def info(self, name: str) -> TensorInfo:
        return self._reader.info(self._turned[name].source if name in self._turned else name)

    def tensor(self, name: str) -> Tensor:
        if name not in self._turned:
            return self._reader.tensor(name)
        stored = self._reader.tensor(self._turned[name].source)
        return self._turned[name].change(stored).to(stored.dtype)


def problem(spec: ModelSpec) -> str | None:
    """Why a model cannot be turned, or None."""
    kinds = spec.kinds
    tables = spec.projected or spec.first_position is not None or spec.embed_norm or spec.token_types
    reasons = (
        (spec.foreign, "layers that transformers computes"),
        (tables, "embeddings that are projected, normalized or added to positions"),
        (spec.vision is not None or spec.token_width, "images or vectors of each token beside the stream"),
        (spec.mtp is not None, "a layer that drafts tokens"),
        (any(layer.norm_bias for layer in kinds), "LayerNorms, which do not turn with their input"),
        (any(layer.post_norms or not layer.pre_norms for layer in kinds), "norms behind attention and MLP"),
        (not spec.final_norm, "no final norm"),
    )
    unknown = next((role for layer in kinds for role in _roles(layer) if _last(role) not in READS + ADDS), None)
    if reason := next((reason for holds, reason in reasons if holds), None):
        return reason
    return None if unknown is None else f"{unknown}, of which it does not know what turns"


def stream_problem(source: ModelSource) -> str | None:
    """Why the residual stream of a checkpoint cannot be turned, or None: who else reads it would see it turned."""
    if source.lacks_head() or not source.has_head:
        return "a model without a head, for what reads its states would see them turned"
    beside = next((name for name in source.reader.names() if name.startswith(source.spec.unread)), None)
    return None if beside is None else f"{beside}, which lmkit does not read and so cannot turn"


def _roles(layer: LayerSpec) -> tuple[str, ...]:
    return (*layer.linears, *layer.routers, *layer.matrices)


def _last(role: str) -> str:
    return role.rpartition(".")[2]


def turned(source: ModelSource, *, residual: bool, values: bool) -> ModelSource:
    """The same checkpoint as a turned model, of which `problem` finds none."""
    spec, reader = source.spec, source.reader
    changes: dict[str, Turned] = {}
    result = copy.copy(source)
    q = _matrix(spec.hidden_size, seed=0) if residual else None
    if q is not None:
        head = f"{roles.EMBED if spec.tie_embeddings else roles.LM_HEAD}.weight"
        norm = _factor(source, f"{roles.FINAL_NORM}.weight")
        changes[f"{roles.LM_HEAD}.weight"] = Turned(head, _rows_through(norm[:, None] * q))
        changes[f"{roles.EMBED}.weight"] = Turned(f"{roles.EMBED}.weight", _rows_through(q))
        changes[f"{roles.FINAL_NORM}.weight"] = Turned(f"{roles.FINAL_NORM}.weight", _ones(spec))
        result.spec, result.config = replace(spec, tie_embeddings=False), untied(source.config)
    for index, layer in enumerate(spec.layers):
        r = _matrix(layer.head_dim, seed=1) if values and turns_values(layer) else None
        for each in layer.blocks:
            name = spec.tensor_name(index, each.norm)
            factor = _factor(source, name)
            if q is not None:
                changes[name] = Turned(name, _ones(spec))
            hidden = layer.hidden_size
            for role in (*each.block.linears(hidden), *each.block.routers(hidden)):
                for whole in (role, *([role + ".bias"] if layer.has_bias(role) else [])):
                    own = spec.tensor_name(index, whole)
                    changes[own] = Turned(own, _change(whole, factor, q, r))
    result.reader = cast("CheckpointReader", TurnedReader(reader, changes))
    return result


def _change(role: str, factor: Tensor, q: Tensor | None, r: Tensor | None) -> Change:
    """What turns a linear's weight [out, in] or bias [out]."""
    last, is_bias = _last(role.removesuffix(".bias")), role.endswith(".bias")

    def change(tensor: Tensor) -> Tensor:
        found = tensor.double()
        if r is not None and role.startswith("attn.v"):
            found = torch.einsum("hd...,de->he...", found.unflatten(0, (-1, len(r))), r).flatten(0, 1)
        if r is not None and role == "attn.o":
            found = (found.unflatten(1, (-1, len(r))) @ r).flatten(1)
        if q is not None and last in ADDS:
            found = q.T @ found
        if q is not None and last in READS and not is_bias:
            found = (found * factor) @ q
        return found

    return change


def _rows_through(matrix: Tensor) -> Change:
    """Embeddings times a matrix, some rows at a time."""

    def change(weight: Tensor) -> Tensor:
        found = torch.empty_like(weight)
        for part, into in zip(weight.split(ROWS), found.split(ROWS), strict=True):
            into.copy_(part.double() @ matrix)
        return found

    return change


def _matrix(size: int, seed: int) -> Tensor:
    """An orthogonal matrix float64 [size, size]."""
    signs = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return rotation(size) * signs


def _factor(source: ModelSource, name: str) -> Tensor:
    """A norm's factor, float64."""
    return source.reader.tensor(name).double() + source.spec.norm_offset


def _ones(spec: ModelSpec) -> Change:
    """A norm whose factor is 1."""
    return lambda weight: torch.full_like(weight, 1 - spec.norm_offset)
