"""Layers for multi-token prediction (arXiv 2412.19437): one layer that drafts the next tokens of the model it is
stored with, from what the model's final norm gives.

    final norm's result of token t --norm--+
                                            side by side --fc--> layer --norm--> the next state
    embedding of token t + 1 --------norm--+

The model's head makes the next state the logits of token t + 2. It is also the state before the next draft, for
which the model has no result yet.

A draft needs no exact numbers, so the linears are rounded to 8 bits, and on a CPU so are their inputs. Linears that the
checkpoint has quantized stay as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from lmkit.errors import CheckpointError
from lmkit.formats.parts import missing_parts
from lmkit.kernels.ops import Norm
from lmkit.layers.linear import MergedLinear
from lmkit.models.decoder import Decoder
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.models.draft_head import DraftHead, Place, whole_head, whole_head_bytes
from lmkit.models.mtp_spec import MTPSpec
from lmkit.models.resolved import ResolvedModel
from lmkit.models.source import ModelSource
from lmkit.models.spec import ModelSpec
from lmkit.qtensor import QTensor, dequantize

FC = ("token", "state")  # the parts of fc


class MTPHead(DraftHead):
    """A layer beside its model. Streams are those after the model's last layer, before the final norm."""

    parts: MTPParts
    model: Decoder

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        return self.parts.of_token, self.parts.of_state, *super().linears

    def first_states(self, streams: Tensor) -> Tensor:
        """See DraftHead."""
        return self.model.final_states(streams, None)

    def own_states(self, states: Tensor) -> Tensor:
        """See DraftHead."""
        return self.final_states(states, None)

    def stream(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """See DraftHead."""
        eps = self.spec.norm_eps
        total = self.parts.of_token.float32(self.embed(token_ids), Norm(self.parts.token_norm, eps, None, self.dtype))
        states = self.states[: len(token_ids)]
        normed = self.rms_norm(states, Norm(self.parts.state_norm, eps, None, self.dtype))
        return self.parts.of_state.add_to(total, normed)


@dataclass(frozen=True)
class MTPParts:
    """A layer, read and packed, without what it takes from the model. See models.draft_head.HeadParts."""

    spec: ModelSpec
    streams: tuple[int, ...]
    layer: DecoderLayer
    of_token: MergedLinear  # the part of fc that reads embeddings
    of_state: MergedLinear
    token_norm: Tensor
    state_norm: Tensor
    norm: Tensor
    lm_head: MergedLinear | None  # None: the model's
    token_ids: Tensor | None = None

    def join(self, model: Decoder) -> MTPHead:
        """The head beside the model."""
        lm_head = self.lm_head or model.lm_head
        head = MTPHead(self.spec, model.embed_tokens, [self.layer], self.norm, lm_head, model.dtype)
        head.parts, head.model = self, model
        return head


class MTPSource:
    """The layer in the checkpoint of the model `target`, opened once more. See models.draft_head.HeadSource.

    Raises CheckpointError, also if the checkpoint was saved without it.
    """

    def __init__(self, target: ResolvedModel) -> None:
        mtp, path = target.source.spec.mtp, target.reader.path
        if mtp is None or not has_mtp(target):
            raise CheckpointError(f"{path}: this checkpoint has no layer for multi-token prediction")
        self.mtp: MTPSpec = mtp
        self.spec = replace(target.source.spec, layers=(mtp.layer,), mtp=None, vision=None)
        self.streams = (target.spec.num_layers,)
        self._model, self.place = target, Place.of(target)
        self._source = ModelSource(path, part=self.spec)
        self.reader = self._source.reader
        if missing := missing_parts(self.reader, mtp.fc):
            raise CheckpointError(f"{path}: tensor {missing[0]} is missing")

    @property
    def weight_bytes(self) -> int:
        """Bytes of the loaded layer, at most."""
        infos = (self.reader.info(name) for name in self.reader.names() if name.startswith(self.mtp.prefix))
        return sum(max(info.nbytes, 2 * math.prod(info.shape)) for info in infos) + whole_head_bytes(self._model)

    def read(self) -> MTPParts:
        source, hidden, mtp, place = self._source, self.spec.hidden_size, self.mtp, self.place
        weights = source.layer_weights(0, self._model.kept_dtype)
        for role in mtp.layer.linears.keys() - set(mtp.layer.unrounded):
            weight = weights[role]
            weights[role] = weight if isinstance(weight, QTensor) else place.rounded(weight)
        layer = DecoderLayer(mtp.layer, 0, place.all(weights), place.device, place.dtype)
        place.pack_layer(layer)
        fc = source.format.read_linear(self.reader, mtp.fc)
        whole = dequantize(fc) if isinstance(fc, QTensor) else fc
        if tuple(whole.shape) != (hidden, 2 * hidden):
            raise CheckpointError(f"{self.reader.path}: {mtp.fc} is {list(whole.shape)}, not {[hidden, 2 * hidden]}")
        of_token, of_state = (place.linear(*half) for half in zip(FC, whole.split(hidden, 1), strict=True))
        token_norm, state_norm, norm = (
            source.norm(name + ".weight", hidden).to(place.at) for name in (mtp.token_norm, mtp.state_norm, mtp.norm)
        )
        return MTPParts(
            self.spec, self.streams, layer, of_token, of_state, token_norm, state_norm, norm, whole_head(self._model)
        )

    def close(self) -> None:
        self._source.close()


def has_mtp(model: ResolvedModel) -> bool:
    """Whether the model's checkpoint has a layer for multi-token prediction."""
    mtp = model.source.spec.mtp
    return mtp is not None and mtp.is_in(model.reader.names())


def mtp_bytes(model: ResolvedModel) -> int:
    """Bytes of it in the checkpoint's files."""
    mtp = model.source.spec.mtp
    return 0 if mtp is None else model.reader.nbytes(mtp.prefix)
