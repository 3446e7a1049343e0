"""EAGLE-3 heads (arXiv 2503.01840): one layer that drafts the next tokens of another model, from its residual streams.

    streams of three layers of token t --fc--> state --norm.attn--+
                                                                   side by side --q k v--> attention --o--> + state
    embedding of token t + 1 --------------------------norm.token--+      --norm.mlp--> MLP --> + = the next state

The next state, normalized, gives the logits of token t + 2. It is also the state before the next draft, for which
the model has no streams yet. The head may have fewer tokens than the model.

A draft token needs no exact numbers, so the linears are rounded to 8 bits, and on a CPU so are their inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor

from lmkit.devices import named
from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.formats.hub import DEMO, DEMO_HEAD
from lmkit.kernels.cuda.module import tensor_device
from lmkit.kernels.ops import Norm
from lmkit.kv_dtype import BFLOAT16, KVDtype, dense_kv_dtype
from lmkit.layers.attention import Attention
from lmkit.layers.batch import BatchInputs, KVLayer, Projected
from lmkit.layers.blocks.attention import SelfAttentionSpec
from lmkit.layers.forward import FORWARDS
from lmkit.layers.linear import MergedLinear, Weights
from lmkit.models import load_spec, roles
from lmkit.models.decoder import Decoder
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.models.head import quantize_rows
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.loader import to_device
from lmkit.models.placed import placed
from lmkit.models.resolved import ResolvedModel
from lmkit.models.rounding import scheme_for
from lmkit.models.shard import WHOLE
from lmkit.models.spec import ModelSpec
from lmkit.qtensor import QTensor

LAYER, FC, NORM, EMBED = "midlayer", "fc", "norm", "embed_tokens"
NORMS = {"norm.attn": "hidden_norm", "norm.token": "input_layernorm", "norm.mlp": "post_attention_layernorm"}
TO_MODEL = "d2t"  # int64 [the head's tokens]: what is added to a token of the head to get that of the model
SETTINGS = "eagle_config"


@dataclass(frozen=True)
class Place:
    """Where a head computes: on the device of its model."""

    device: str
    dtype: torch.dtype  # of activations

    @classmethod
    def of(cls, model: ResolvedModel) -> Self:
        return cls(model.packing.device, model.activation_dtype)

    @property
    def at(self) -> str:
        """The device of tensors."""
        return tensor_device(self.device)

    @property
    def kv_dtype(self) -> KVDtype:
        """The type of the head's keys and values."""
        return dense_kv_dtype(self.dtype) if named(self.device).half_activations else BFLOAT16

    @property
    def activations(self) -> str:
        """What inputs of linears are rounded to."""
        asked = named(self.device).activations
        return "exact" if asked == "auto" else asked

    def of_tensor(self, tensor: Tensor) -> Tensor:
        """A plain tensor, as activations are."""
        return tensor.to(self.at, self.dtype)

    def rounded(self, weight: Tensor) -> Tensor | QTensor:
        """A linear's weight in 8 bits, or plain if no groups fit."""
        coded = rounded(weight)
        return coded if isinstance(coded, QTensor) else self.of_tensor(coded)

    def all(self, weights: Weights) -> Weights:
        return {role: placed(weight, self.device, self.at, self.dtype) for role, weight in weights.items()}

    def linear(self, role: str, weight: Tensor) -> MergedLinear:
        """A packed linear."""
        linear = MergedLinear((role,), self.all({role: self.rounded(weight)}), self.device)
        linear.pack(self.activations)
        to_device((linear,), self.device)
        return linear

    def pack_layer(self, layer: DecoderLayer) -> None:
        layer.pack(self.activations)
        to_device(layer.linears, self.device)


class HeadAttention(Attention):
    """Attention that also reads embeddings. `of_token` is the part of q, k and v that does."""

    of_token: MergedLinear
    embedded: Tensor  # of a step's tokens, [T, hidden]

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        return self.of_token, *super().linears

    def queries_keys_values(self, x: Tensor, norm: Norm | None = None) -> Projected:
        """See Attention."""
        total = self.of_token.float32(self.embedded, self.parts.norm("norm.token"))
        delta, rest = self.inputs.add_to(total, x if norm is None else self.rms_norm(x, norm))
        spec, merged = self.spec, (delta if rest is None else delta + rest).to(self.dtype)
        parts = merged.split((spec.q_size, spec.kv_size, spec.kv_size), dim=-1)
        q, k, v = (part.view(len(x), -1, spec.head_dim) for part in parts)
        return Projected(q, k, v)


class HeadLayer(DecoderLayer):
    """The layer of a head."""

    forwards = FORWARDS | {SelfAttentionSpec: HeadAttention}
    mixer: HeadAttention

    def __init__(self, spec: LayerSpec, weights: Weights, token_part: Weights, place: Place) -> None:
        super().__init__(spec, 0, weights, place.device, place.dtype)
        self.mixer.of_token = MergedLinear(roles.QKV, token_part, place.device)


class DraftHead(Decoder):
    """A head that drafts. Logits are those of its own tokens.

    `states` float32 [tokens, hidden] has the state before each token of the next step, and is overwritten.
    `next_states` float32 [rows, hidden] then has the stream after each of its logit rows.
    """

    states: Tensor
    next_states: Tensor

    def first_states(self, streams: Tensor) -> Tensor:
        """The model's streams [tokens, streams * hidden] -> the states before the tokens after them."""
        raise NotImplementedError

    def own_states(self, states: Tensor) -> Tensor:
        """Some of `next_states` -> the states before the tokens after them."""
        return states

    def stream(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """The pair before the layer."""
        raise NotImplementedError

    def hidden(
        self, batch: BatchInputs, kv: list[KVLayer], *, logits_only: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """See Decoder."""
        (layer,) = self.layers
        angles = self.ropes[layer.spec.rope](batch)
        delta, residual = layer(*self.stream(batch.token_ids), batch, angles, kv[0], logits_only=logits_only)
        self.keep(delta, residual, self.next_states[: len(delta)])
        return delta, residual


class EagleHead(DraftHead):
    """An EAGLE-3 head."""

    fc: MergedLinear

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        return self.fc, *super().linears

    def first_states(self, streams: Tensor) -> Tensor:
        """See DraftHead."""
        return self.fc.float32(streams.to(self.dtype))

    def stream(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """See DraftHead."""
        (layer,) = self.layers
        assert isinstance(layer, HeadLayer)
        layer.mixer.embedded = self.embed(token_ids)
        return self.states[: len(token_ids)], None


class HeadParts(Protocol):
    """A head, read and packed, without what it takes from the model."""

    @property
    def spec(self) -> ModelSpec:
        """Its vocabulary is the model's."""

    @property
    def streams(self) -> tuple[int, ...]:
        """The layers whose inputs it reads. The number of the layers stands for what the last one gives."""

    @property
    def token_ids(self) -> Tensor | None:
        """int64, of the model, by the head's; None: they are the same."""

    def join(self, model: Decoder) -> DraftHead:
        """The head beside the model."""


class HeadSource(Protocol):
    """An open checkpoint of a head."""

    place: Place

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def streams(self) -> tuple[int, ...]: ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of the loaded head, at most."""

    def read(self) -> HeadParts: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class EagleParts:
    """See HeadParts."""

    spec: ModelSpec
    streams: tuple[int, ...]
    layer: HeadLayer
    fc: MergedLinear
    norm: Tensor
    lm_head: MergedLinear | None  # None: the model's
    embed_tokens: Tensor | None  # None: the model's
    token_ids: Tensor | None

    def join(self, model: Decoder) -> EagleHead:
        """The head beside the model."""
        embed = model.embed_tokens if self.embed_tokens is None else self.embed_tokens
        head = EagleHead(self.spec, embed, [self.layer], self.norm, self.lm_head or model.lm_head, model.dtype)
        head.fc = self.fc
        return head


def whole_head(model: ResolvedModel) -> MergedLinear | None:
    """The model's head, packed, where the rank's model has a part of it. None: it is whole there."""
    if model.shard.size == 1:
        return None
    lm_head = replace(model, shard=WHOLE).lm_head()
    lm_head.pack(model.head_activations)
    return lm_head


def whole_head_bytes(model: ResolvedModel) -> int:
    return math.prod(model.spec.head_shape) * model.embed_dtype.itemsize if model.shard.size > 1 else 0


class EagleSource:
    """An open checkpoint of a head for `model`; "demo" is that of the bundled model, unless there is such a folder.
    Raises CheckpointError or UnsupportedError.
    """

    def __init__(self, path: str | Path, model: ResolvedModel) -> None:
        path = DEMO_HEAD if str(path) == DEMO and not Path(path).is_dir() else path
        self.reader, self.place, target = CheckpointReader(path), Place.of(model), model.spec
        self._model = model
        config, where = self.reader.config, self.reader.path
        names = config.get("architectures") or [None]
        if "eagle3" not in str(names[0]).lower():
            raise UnsupportedError(f"{where}: architecture {names[0]!r} is no EAGLE-3 head")
        plain = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "vocab_size": target.vocab_size}
        own = load_spec(config | plain)
        self.spec = replace(own, layers=(replace(own.layers[0], prefix=LAYER),), embedding_scale=target.embedding_scale)
        self.num_tokens: int = config.get("draft_vocab_size") or target.vocab_size
        if type(self.num_tokens) is not int or not 1 <= self.num_tokens <= target.vocab_size:
            raise CheckpointError(f"{where}: config.json: draft_vocab_size is not in 1 .. {target.vocab_size}")
        layer, settings = self.spec.layers[0], config.get(SETTINGS) or {}
        if config.get("norm_before_residual") or settings.get("use_aux_hidden_state") is False:
            raise UnsupportedError(f"{where}: heads with norm_before_residual, or without use_aux_hidden_state")
        biased = any(layer.has_bias(role) for role in layer.linears if role.startswith("attn."))
        if biased or target.projected or self.spec.hidden_size != target.hidden_size:
            raise UnsupportedError(f"{where}: heads with biases, or of another hidden_size than the model's")
        last = target.num_layers
        self.streams = tuple(settings.get("eagle_aux_hidden_state_layer_ids") or (2, last // 2, last - 3))
        if len(self.streams) != 3 or not all(isinstance(x, int) and 0 <= x < last for x in self.streams):
            raise CheckpointError(
                f"{where}: {SETTINGS}: {list(self.streams)} are not three of the model's {last} layers"
            )

    @property
    def weight_bytes(self) -> int:
        """Bytes of the loaded head, at most."""
        return self.reader.nbytes() + (0 if self._has_head else whole_head_bytes(self._model))

    @property
    def _has_head(self) -> bool:
        return self.reader.has("lm_head.weight")

    def read(self) -> EagleParts:
        layer, hidden, reader, place = self.spec.layers[0], self.spec.hidden_size, self.reader, self.place
        weights: Weights = {role: self._plain(f"{LAYER}.{name}", (hidden,)).float() for role, name in NORMS.items()}
        token_part: Weights = {}
        for role, (rows, columns) in layer.linears.items():
            name = f"{LAYER}.{layer.names[role]}"
            if role in roles.QKV:
                both = self._plain(name, (rows, 2 * hidden))
                token_part[role], weights[role] = (place.rounded(part) for part in both.split(hidden, 1))
            else:
                weights[role] = place.rounded(self._plain(name, (rows, columns)))
        head_layer = HeadLayer(layer, place.all(weights), place.all(token_part), place)
        place.pack_layer(head_layer)
        fc = self._linear(FC, (hidden, len(self.streams) * hidden))
        has_head, ids = self._has_head, None
        lm_head = self._linear("lm_head", (self.num_tokens, hidden)) if has_head else whole_head(self._model)
        if has_head and self.num_tokens != self.spec.vocab_size:
            ids = self._token_ids()
        elif self.num_tokens != self.spec.vocab_size:
            raise CheckpointError(f"{reader.path}: {self.num_tokens} tokens of its own need an lm_head.weight")
        shape = self.spec.head_shape
        embed = place.of_tensor(self._plain(EMBED, shape)) if reader.has(EMBED + ".weight") else None
        norm = self._plain(NORM, (hidden,)).float().to(place.at)
        return EagleParts(self.spec, self.streams, head_layer, fc, norm, lm_head, embed, ids)

    def _linear(self, name: str, shape: tuple[int, int]) -> MergedLinear:
        return self.place.linear(name, self._plain(name, shape))

    def _token_ids(self) -> Tensor:
        reader = self.reader
        if not reader.has(TO_MODEL):
            raise CheckpointError(f"{reader.path}: tensor {TO_MODEL} is missing")
        ids = torch.arange(self.num_tokens) + reader.tensor(TO_MODEL).long().flatten()
        if len(ids) != self.num_tokens or not bool(((ids >= 0) & (ids < self.spec.vocab_size)).all()):
            raise CheckpointError(f"{reader.path}: {TO_MODEL} names tokens that the model does not have")
        return ids.to(self.place.at)

    def _plain(self, module: str, shape: tuple[int, ...]) -> Tensor:
        name, path = module + ".weight", self.reader.path
        if not self.reader.has(name):
            raise CheckpointError(f"{path}: tensor {name} is missing")
        tensor = self.reader.tensor(name)
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise CheckpointError(f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}, expected {list(shape)}")
        return tensor

    def close(self) -> None:
        self.reader.close()


def rounded(weight: Tensor) -> Tensor | QTensor:
    scheme = scheme_for("int8", weight.shape[1])
    return weight.float() if scheme is None else quantize_rows(weight.float(), scheme)
