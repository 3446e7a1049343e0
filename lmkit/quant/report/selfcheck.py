"""The checks of a run on its input and on its own result, one layer in memory at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lmkit.errors import CheckpointError
from lmkit.kernels import ops
from lmkit.kernels.cuda.module import tensor_device
from lmkit.kernels.ops import Norm
from lmkit.layers.batch import KVLayer
from lmkit.models import roles
from lmkit.models.decoder_layer import joined
from lmkit.models.engines import foreign_logits, open_source
from lmkit.models.source import ModelSource
from lmkit.qtensor import QTensor, dequantize
from lmkit.quant.layer.layer import Geometry
from lmkit.quant.layer.mixture import Mixture, add, load_part
from lmkit.quant.report.evaluate import Progress
from lmkit.quant.split import before_experts, is_split

NUM_ELEMENTS = 4 << 20  # checked at a time
VOCAB_ROWS = 4096
# Of the largest logit, by the type of products. Those of bfloat16 are rounded to 8 bits, and one row adds them up in
# another order than the run's rows.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 2e-2}


def check_weights(source: ModelSource, progress: Progress) -> None:
    """Raise CheckpointError if a tensor has an infinity or NaN. It names the first such tensor in order of names."""
    names = source.reader.names()
    for done, name in enumerate(names):
        progress("weights", done, len(names))
        tensor = source.reader.tensor(name)
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        for number, part in enumerate(tensor.flatten().split(NUM_ELEMENTS)):
            if not all(bool(bound.isfinite()) for bound in part.aminmax()):
                index = number * NUM_ELEMENTS + int((~part.isfinite()).nonzero()[0])
                where = [int(i) for i in torch.unravel_index(torch.tensor(index), tensor.shape)]
                value = float(tensor.flatten()[index])
                raise CheckpointError(
                    f"{source.reader.path}: {name} at {where} is {value}, not a finite number; it is damaged"
                )
            source.reader.release()


def check_logits(
    checkpoint: Path,
    source: ModelSource,
    token_ids: Tensor,
    expected: Tensor,
    product_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> float:
    """Read a checkpoint back and run it, with exact activations, on one row of tokens int64 [seq_len].

    The layers are on `device` and multiply in `product_dtype`, as the run's did. `expected` float32 [seq_len, hidden]
    are the run's hidden states after the last layer. Returns the largest difference of two logits, in units of the
    largest logit. Raises CheckpointError if it exceeds that of TOLERANCES.
    """
    stored = open_source(checkpoint, "auto")
    difference, largest = 0.0, 1e-30
    found = _behind_layers(stored, token_ids, product_dtype, device)
    own, others = _normalized(source, expected.cpu()), _normalized(stored, found.cpu())
    heads = [_head(model) for model in (source, stored)]  # read once: a file's own codes take long to become floats
    for first in range(0, source.spec.vocab_size, VOCAB_ROWS):
        rows = slice(first, first + VOCAB_ROWS)
        wanted, found = (_logits(x, head, rows) for x, head in zip((own, others), heads, strict=True))
        difference = max(difference, float((found - wanted).abs().amax()))
        largest = max(largest, float(wanted.abs().amax()))
        source.reader.release()
        stored.reader.release()
    if not difference <= TOLERANCES[product_dtype] * largest:  # NaN is not
        raise CheckpointError(
            f"{checkpoint}: read back, the checkpoint gives other logits than it was made with: they differ by "
            f"{difference:.3g}, the largest is {largest:.3g}; its weights are not what was meant to be stored"
        )
    return difference / largest


def _behind_layers(source: ModelSource, token_ids: Tensor, product_dtype: torch.dtype, device: str) -> Tensor:
    """The hidden states after the last layer, float32 [seq_len, hidden]. One layer is loaded at a time."""
    head, at = source.head(), tensor_device(device)
    hidden = head.embed_rows(token_ids[None])
    vectors = None if head.per_layer is None else head.per_layer(token_ids, hidden).to(at)
    hidden, kept = hidden.to(at), dict[int | None, KVLayer]()
    for index in range(source.spec.num_layers):
        split = is_split(source.spec.layers[index])
        if split:
            layer = load_part(source, index, before_experts(source.spec.layers[index]), device)
        else:
            layer = source.layer(index, torch.float32, device)
        layer.multiply_in(product_dtype)
        geometry = Geometry.of(layer.spec, 1, len(token_ids), device)
        batch, kv = replace(geometry.batch, per_layer=vectors), kept.get(layer.spec.kv_from, geometry.kv)
        if index in source.spec.kv_sources:
            kept[index] = kv
        delta, residual = layer(hidden, None, batch, geometry.rope, kv)
        hidden = joined(delta, residual)
        if split:
            mixture = Mixture(source, index, product_dtype, device)
            chosen = mixture.choose([hidden], torch.empty_like(hidden))
            for name in mixture.specs:
                add(mixture.expert(name), chosen, name, hidden)
        source.reader.release()
    return hidden


def _normalized(source: ModelSource, hidden: Tensor) -> Tensor:
    """What `_logits` reads. transformers computes all logits at once."""
    if source.spec.foreign:
        return foreign_logits(source, hidden)
    norm = source.final_norm()
    if norm is None:
        return hidden
    normalized: Tensor = ops.rms_norm.select("cpu")(hidden, Norm(norm, source.spec.norm_eps, bias=source.final_bias()))
    return normalized


def _head(source: ModelSource) -> Tensor | None:
    """The head's weights [vocab, hidden]; None: what `_normalized` gives are logits."""
    if source.spec.foreign:
        return None
    weight = source.lm_head().weights[roles.LM_HEAD]
    return dequantize(weight) if isinstance(weight, QTensor) else weight


def _logits(x: Tensor, head: Tensor | None, rows: slice) -> Tensor:
    """x [seq_len, hidden], normalized -> logits float32 [seq_len, tokens] of some tokens."""
    return x[:, rows] if head is None else x @ head[rows].float().T
