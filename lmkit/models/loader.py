"""From a checkpoint to a decoder, one piece at a time: calibration holds a single layer, serving all of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmkit.errors import CheckpointError
from lmkit.formats.base import WeightFormat, resolve_format
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.layers.linear import MergedLinear, Weights
from lmkit.log import get_logger
from lmkit.models import load_spec, roles
from lmkit.models.decoder import Decoder, DecoderLayer
from lmkit.models.spec import ModelSpec
from lmkit.qtensor import QTensor

log = get_logger(__name__)


class ModelSource:
    """An open checkpoint: its specification, weight format and pieces. Raises CheckpointError/UnsupportedError."""

    def __init__(self, path: str | Path) -> None:
        self.reader = CheckpointReader(path)
        self.config: dict[str, Any] = self.reader.config
        self.spec: ModelSpec = load_spec(self.config)
        self.format: WeightFormat = resolve_format(self.config)
        self._check_names()

    def _check_names(self) -> None:
        """Every weight the specification needs is there, in its shape, before anything is read."""
        spec, reader = self.spec, self.reader
        dense = {roles.EMBED: (spec.vocab_size, spec.hidden_size), roles.FINAL_NORM: (spec.hidden_size,)}
        for layer in range(spec.num_layers):
            for role, size in self._vectors():
                dense[roles.module_name(layer, role)] = (size,)
        for module, shape in dense.items():
            name = module + ".weight"
            if not reader.has(name):
                raise CheckpointError(f"{reader.path}: tensor {name} is missing")
            if reader.info(name).shape != shape:
                raise CheckpointError(
                    f"{reader.path}: {name} is {list(reader.info(name).shape)}, config.json says {list(shape)}"
                )

    def _vectors(self) -> list[tuple[str, int]]:
        spec = self.spec
        vectors = [("norm.attn", spec.hidden_size), ("norm.mlp", spec.hidden_size)]
        return vectors + ([("attn.q_norm", spec.head_dim), ("attn.k_norm", spec.head_dim)] if spec.qk_norm else [])

    def layer_weights(self, index: int, dtype: torch.dtype | None = None) -> Weights:
        """All weights of a layer by role; dense ones as `dtype` (None = as stored)."""
        weights: Weights = {}
        for role, _ in self._vectors():
            weights[role] = self._plain(roles.module_name(index, role) + ".weight", dtype)
        for role in roles.LINEARS:
            module, (out_features, in_features) = roles.module_name(index, role), self.spec.linear_shape(role)
            weight = self.format.read_linear(self.reader, module)
            shape = tuple((weight.codes if isinstance(weight, QTensor) else weight).shape)
            if shape != (out_features, in_features):
                raise CheckpointError(
                    f"{self.reader.path}: {module} is {list(shape)}, config.json says {[out_features, in_features]}"
                )
            weights[role] = weight if isinstance(weight, QTensor) else _to(weight, dtype)
            if self.spec.has_bias(role):
                weights[role + ".bias"] = self._plain(module + ".bias", dtype)
            elif self.reader.has(module + ".bias"):
                raise CheckpointError(f"{self.reader.path}: {module}.bias is there, but config.json says there is none")
        return weights

    def layer(self, index: int, dtype: torch.dtype | None = None, device: str = "cpu") -> DecoderLayer:
        """A layer with plain weights, as calibration wants it."""
        weights: Weights = {
            role: weight if isinstance(weight, QTensor) else weight.to(device)
            for role, weight in self.layer_weights(index, dtype).items()
        }
        return DecoderLayer(self.spec, index, weights, device)

    def embed_tokens(self, dtype: torch.dtype | None = None) -> Tensor:
        return self._plain(roles.EMBED + ".weight", dtype)

    def final_norm(self) -> Tensor:
        return self._plain(roles.FINAL_NORM + ".weight", torch.float32)

    def lm_head(self, dtype: torch.dtype | None = None, device: str = "cpu") -> MergedLinear:
        """The head as a plain linear; a checkpoint with tied embeddings has none of its own."""
        name = roles.LM_HEAD + ".weight"
        if not self.reader.has(name):
            if not self.spec.tie_embeddings:
                raise CheckpointError(f"{self.reader.path}: tensor {name} is missing and tie_word_embeddings is false")
            name = roles.EMBED + ".weight"
        if self.spec.tie_embeddings:
            name = roles.EMBED + ".weight"
        weight = self._plain(name, dtype)
        if tuple(weight.shape) != (self.spec.vocab_size, self.spec.hidden_size):
            raise CheckpointError(f"{self.reader.path}: {name} is {list(weight.shape)}, not [vocab, hidden]")
        return MergedLinear((roles.LM_HEAD,), {roles.LM_HEAD: weight.to(device)}, device)

    def head(self, dtype: torch.dtype | None = None, device: str = "cpu") -> Decoder:
        """A decoder without layers: `embed` and `head` work, plainly."""
        embed = self.embed_tokens(dtype).to(device)
        return Decoder(self.spec, embed, [], self.final_norm().to(device), self.lm_head(dtype, device))

    def _plain(self, name: str, dtype: torch.dtype | None) -> Tensor:
        if not self.reader.has(name):
            raise CheckpointError(f"{self.reader.path}: tensor {name} is missing")
        return _to(self.reader.tensor(name), dtype)

    def weight_bytes(self, dtype: str) -> int:
        """What the model takes in memory with dense weights as `dtype`: a tied head is a second, packed copy."""
        dense = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
        total = 0
        for name in self.reader.names():
            info = self.reader.info(name)
            floating = info.dtype in ("F32", "F16", "BF16") and not name.endswith(".scales")
            total += math.prod(info.shape) * dense if floating else info.nbytes
        if self.spec.tie_embeddings:
            total += self.spec.vocab_size * self.spec.hidden_size * dense
        return total

    def close(self) -> None:
        self.reader.close()


def load_model(path: str | Path, *, device: str = "cpu", dtype: str = "auto", activations: str = "int8") -> Decoder:
    """A decoder ready to serve: every linear packed for the kernel that its format and this machine select.

    `dtype` of dense weights: auto keeps the checkpoint's, except float16 on a CPU, which is widened to float32 (no CPU
    kernel multiplies it directly, and bfloat16 would round it).
    """
    source = ModelSource(path)
    try:
        torch_dtype = getattr(torch, resolve_dtype(dtype, source.spec.dtype, device))
        layers = []
        for index in range(source.spec.num_layers):
            layer = source.layer(index, torch_dtype, device)
            layer.pack(activations)
            layers.append(layer)
        lm_head = source.lm_head(torch_dtype, device)
        lm_head.pack(activations)
        embed = source.embed_tokens(torch_dtype).clone().to(device)
        return Decoder(source.spec, embed, layers, source.final_norm().clone().to(device), lm_head)
    finally:
        source.close()


def resolve_dtype(asked: str, stored: str, device: str) -> str:
    """The dtype of dense weights, decided once."""
    dtype = stored if asked == "auto" else asked
    if dtype == "float16" and device == "cpu":
        log.info("float16 weights are widened to float32 on the CPU")
        return "float32"
    return dtype


def _to(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None else tensor.to(dtype)
