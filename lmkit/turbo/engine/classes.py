"""The head of a checkpoint that classifies (`ForSequenceClassification`), for the front end, which computes it."""

from __future__ import annotations

import torch

from lmkit.errors import CheckpointError
from lmkit.models.registry import CLASSIFIER
from lmkit.models.source import ModelSource
from lmkit.turbo.request import Activation, Classes

WEIGHT, BIAS = "score.weight", "score.bias"
MAX_BYTES = 64 << 20
REGRESSION, INDEPENDENT = "regression", "multi_label_classification"  # as transformers names the kinds of problems


def read_classes(source: ModelSource) -> Classes | None:
    """The head of a checkpoint that classifies; None for any other. Raises CheckpointError."""
    if not source.spec.architecture.endswith(CLASSIFIER):
        return None
    reader, hidden = source.reader, source.spec.hidden_size
    if not reader.has(WEIGHT):
        raise CheckpointError(f"{reader.path}: tensor {WEIGHT} is missing")
    weight = reader.tensor(WEIGHT).float()
    count = len(weight)
    if weight.shape != (count, hidden) or not 1 <= count <= MAX_BYTES // (4 * hidden):
        raise CheckpointError(f"{reader.path}: {WEIGHT} is {list(weight.shape)}, not [labels, {hidden}]")
    bias = reader.tensor(BIAS).float() if reader.has(BIAS) else torch.zeros(count)
    if bias.shape != (count,):
        raise CheckpointError(f"{reader.path}: {BIAS} is {list(bias.shape)}, not [{count}]")
    problem = source.config.get("problem_type")
    usual: Activation = "sigmoid" if count == 1 or problem == INDEPENDENT else "softmax"
    return Classes(
        labels=_labels(source, count),
        weight=weight.contiguous().numpy().tobytes(),
        bias=bias.contiguous().numpy().tobytes(),
        activation="none" if problem == REGRESSION else usual,
    )


def _labels(source: ModelSource, count: int) -> tuple[str, ...]:
    """The names of the classes, by default those of transformers."""
    named = source.config.get("id2label")
    named = named if isinstance(named, dict) else {}
    labels = [named.get(str(idx), f"LABEL_{idx}") for idx in range(count)]
    if not all(isinstance(label, str) for label in labels):
        raise CheckpointError(f"{source.reader.path}: config.json: id2label must name each class with a text")
    return tuple(labels)
