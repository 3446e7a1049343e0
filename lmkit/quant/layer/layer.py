"""One decoder layer while a recipe works on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lmkit.codes import stepped
from lmkit.errors import CheckpointError
from lmkit.kernels.cuda.module import tensor_device
from lmkit.kv_dtype import FLOAT32
from lmkit.layers.batch import BatchInputs, KVLayer, allocate_state, whole_batch
from lmkit.layers.block import NO_ANGLES, At, CosSin
from lmkit.layers.rope import Rope
from lmkit.models import roles
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.models.layer_spec import LayerSpec
from lmkit.qtensor import QTensor, QuantScheme, dequantize
from lmkit.quant.layer.grid import Shrink, largest_together, round_to_nearest
from lmkit.quant.layer.observe import InputStats
from lmkit.quant.layer.products import times
from lmkit.quant.layer.routed import MIN_TOKENS

BLOCK_SIZE = 32


@dataclass(frozen=True)
class Geometry:
    """The inputs of a layer's forward pass except the hidden states, for `num_rows` sequences of `seq_len` tokens from
    position 0."""

    batch: BatchInputs
    rope: CosSin
    kv: KVLayer

    @classmethod
    def of(cls, spec: LayerSpec, num_rows: int, seq_len: int, device: str = "cpu") -> Geometry:
        at = tensor_device(device)
        batch, num_blocks = whole_batch([[0] * seq_len] * num_rows, BLOCK_SIZE, at)
        kv = allocate_state(spec.state, num_blocks, BLOCK_SIZE, (FLOAT32, FLOAT32), num_rows, device=at)
        return cls(batch, NO_ANGLES if spec.kv is None else Rope(spec.rope, device)(batch), kv)

    @property
    def at(self) -> At:
        """What blocks read of the sequences."""
        return At(self.batch, self.rope, self.kv)

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """The keys and values that the last pass stored, float32 [tokens, num_kv_heads, head_dim] each."""
        slots = self.batch.geometries[0].slots.long()
        keys, values = (tensor.data.transpose(1, 2).flatten(0, 1)[slots] for tensor in (self.kv.k, self.kv.v))
        return keys, values

    def store(self, keys: Tensor, values: Tensor) -> None:
        """Put keys and values, as `keys_and_values` returns them, in the place of those that a pass would store."""
        slots = self.batch.geometries[0].slots.long()
        for tensor, rows in ((self.kv.k, keys), (self.kv.v, values)):
            tensor.data.transpose(1, 2)[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = rows


@dataclass
class CalibratedLayer:
    """A layer with float32 weights that steps rewrite, and the statistics of its inputs.

    `inputs` are the statistics of each linear's input. They are kept consistent with the present weights. `sequences`
    is the geometry of the sample of attention's input. This sample consists of whole sequences.
    """

    layer: DecoderLayer
    inputs: dict[str, InputStats]
    sequences: Geometry
    schemes: dict[str, QuantScheme]  # of the roles that will be quantized
    read_back: Callable[[str, Tensor], Tensor]  # (role, weight) -> the weight after storing and reading
    shrinks: dict[str, Shrink] = field(default_factory=dict)

    def input(self, role: str) -> InputStats:
        return self.inputs[self.layer.spec.input_of[role]]

    def weight(self, role: str) -> Tensor:
        weight = self.layer.weights[role]
        assert isinstance(weight, Tensor), f"{role} is rounded already"
        return weight

    def rounded(self, role: str, weight: Tensor | None = None) -> QTensor:
        """The weight of `role`, or `weight` in its place, as it will be stored, with the clipping chosen so far."""
        weight = self.weight(role) if weight is None else weight
        return round_to_nearest(weight, self.schemes[role], self.shrinks.get(role), self.largest(role, weight))

    def largest(self, role: str, weight: Tensor | None = None) -> Tensor | None:
        """The largest magnitude of the weights that share a factor of scales with `role`, with `weight` in its place:
        all that read its input, for they may be multiplied together. None without such factors."""
        if not self.schemes[role].scales.shared:
            return None
        reads = self.layer.spec.input_of
        together = [each for each in self.schemes if reads[each] == reads[role]]
        weights = self.layer.weights if weight is None else {**self.layer.weights, role: weight}
        return largest_together(weights, [tuple(together)], self.schemes)[role]

    def block_output(self, source: str) -> Tensor:
        """The output of the block after `source` for the sampled inputs. After a norm, the
        block is the whole attention, MLP or mixture of experts. After a linear, it is the one linear that follows.
        Attention needs whole sequences and takes all inputs."""
        layer = self.layer
        readers = dict(layer.spec.smooth)
        if source == "norm.attn":  # a model without norms before its blocks has this block, too
            (reader, *_) = readers.get(source) or layer.mixing.spec.block.fused[0]
            mixing = layer.mixing
            return mixing.whole(mixing.block.searched(self.input(reader).sample, self.sequences.at))
        (reader, *_) = readers[source]
        sample = self.input(reader).sample
        block = next((each for each in layer.blocks if each.spec.norm == source), None)
        return layer.linear_of(reader)(sample) if block is None else block.contribution(sample, None, self.sequences.at)

    def tell_inputs(self) -> None:
        """Put the factors of inputs beside those of rounded weights, for engines that round both alike. An expert that
        no token met has the largest one of the layer's inputs."""
        tops = {role: self.input(role).abs_max.max() for role in self.schemes}
        widest = torch.stack([*tops.values()]).max()
        for role, top in tops.items():
            q = self.layer.weights[role]
            assert isinstance(q, QTensor)
            largest = (top if top > 0 else widest) / stepped(q.scheme.codes).largest
            _, factor = q.scheme.scales.fit(largest.reshape(1, 1), largest)
            self.layer.weights[role] = replace(q, input_factor=factor)

    def has_statistics(self, role: str) -> bool:
        """Whether a linear saw enough tokens to be fitted to them. An expert may have seen few or none."""
        return roles.expert_of(role) is None or self.input(role).num_tokens >= MIN_TOKENS

    def check_finite(self) -> None:
        """Raise CheckpointError if the input of a linear has an infinity or NaN. It names the first such linear."""
        for role, stats in self.inputs.items():
            if not bool(stats.abs_sum.isfinite().all()):
                raise CheckpointError(
                    f"layer {self.layer.index}: the input of {role} is not finite on the calibration data; "
                    "the checkpoint is damaged or overflows"
                )


def relative_error(weight: Tensor, rounded: QTensor, x: Tensor, dtype: torch.dtype = torch.float32) -> float:
    """|x (W^ - W)^T|^2 / |x W^T|^2 over the tokens of x [tokens, in]; 0 if the output is zero.

    Without tokens it is the relative error of the weights themselves, as if all inputs were alike (x = identity).
    Products are of `dtype`.
    """
    if not len(x):
        change, power = (float(w.norm(dim=1).norm()) ** 2 for w in (dequantize(rounded).sub_(weight), weight))
        return change / power if power > 0 else 0.0
    error = times(x, dequantize(rounded) - weight, dtype).square().sum(dtype=torch.float64)
    signal = times(x, weight, dtype).square().sum(dtype=torch.float64)
    return float(error / signal) if signal > 0 else 0.0
