"""A model after the layer loop, as a step of the last stage gets it, and what such a step gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lmkit.layers.linear import Weights
from lmkit.models.source import ModelSource
from lmkit.quant.data.hidden_states import Stream
from lmkit.quant.data.workdir import WorkFolder
from lmkit.quant.report.report import RefineReport


@dataclass(frozen=True)
class WholeModel:
    """`original` gives embeddings and the head, `stored` the layers as they are in the file, `rows` int64 [num_rows,
    seq_len] the text. `stream` stands after the last layer."""

    original: ModelSource
    stored: ModelSource
    stream: Stream
    rows: Tensor
    dtype: torch.dtype  # of products
    seed: int
    work: WorkFolder


@dataclass(frozen=True)
class Finished:
    """`layer(index)` gives a layer's changed weights; None: the layers stay. `hidden` float32 [seq_len, hidden] are the
    states of the last row after the changed layers."""

    report: RefineReport
    layer: Callable[[int], Weights] | None = None
    hidden: Tensor | None = None
