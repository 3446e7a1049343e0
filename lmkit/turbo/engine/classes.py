"""The head of a checkpoint that classifies (`ForSequenceClassification`), for the front end, which computes it, and the
hidden states that it reads, or that are embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lmkit.config import PoolingName
from lmkit.errors import CheckpointError, ConfigError, UnsupportedError
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.formats.sentences import OF_SENTENCES, Mode, Sentences, read_sentences
from lmkit.jsonfile import read_json
from lmkit.models.registry import CLASSIFIER
from lmkit.models.source import ModelSource
from lmkit.models.spec import ModelSpec
from lmkit.turbo.request import Activation, Classes, VectorLayer


@dataclass(frozen=True)
class Head:
    """Where the parts of a head lie: the linear that gives the classes, and what an encoder has before it."""

    name: str
    inner: str = ""  # a linear
    activation: str = "Tanh"  # after it
    norm: str = ""  # a LayerNorm after that


DECODER = Head("score")
# By what an architecture begins with.
ENCODERS = {
    "Bert": Head("classifier", "bert.pooler.dense"),
    "Roberta": Head("classifier.out_proj", "classifier.dense"),
    "XLMRoberta": Head("classifier.out_proj", "classifier.dense"),
    "ModernBert": Head("classifier", "head.dense", "GELU", "head.norm"),
}
MAX_BYTES, MAX_CONFIG_BYTES = 64 << 20, 1 << 20
REGRESSION, INDEPENDENT = "regression", "multi_label_classification"  # as transformers names the kinds of problems
ACTIVATIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "none"}  # of torch, for sentence-transformers


def sentences_of(path: Path, asked: PoolingName, spec: ModelSpec, classes: Classes | None) -> Sentences:
    """How embeddings are made. A pooling that is `asked` for stands in place of sentence-transformers' files.

    Raises ConfigError for another choice than that of a head for classes.
    """
    if classes is None:
        usual: Mode = "mean" if spec.sees_all else "last"
        return read_sentences(path, usual) if asked == "auto" else Sentences(pooling=asked)
    if asked not in ("auto", classes.pooling):
        raise ConfigError(f"pooling={asked}: the classes of this model need {classes.pooling}; leave it out")
    return Sentences(pooling=classes.pooling)


def read_classes(source: ModelSource) -> Classes | None:
    """The head of a checkpoint that classifies; None for any other. Raises CheckpointError and UnsupportedError."""
    if not source.spec.architecture.endswith(CLASSIFIER):
        return None
    reader, hidden = source.reader, source.spec.hidden_size
    head = ENCODERS.get(source.spec.architecture.removesuffix(CLASSIFIER), DECODER)
    weight, bias = _linear(reader, head.name, hidden)
    problem = source.config.get("problem_type")
    usual: Activation = "sigmoid" if len(weight) == 1 or problem == INDEPENDENT else "softmax"
    return Classes(
        pooling=_pooling(source) if head.inner else "last",
        reads_pairs=bool(head.inner),
        labels=_labels(source, len(weight)),
        activation="none" if problem == REGRESSION else _named_activation(source) or usual,
        weight=_bytes(weight),
        bias=_bytes(bias),
        layers=tuple(_layers(source, head)),
    )


def _pooling(source: ModelSource) -> Mode:
    """The token whose state an encoder's head reads, or the mean of all."""
    named, path = source.config.get("classifier_pooling", "cls"), source.reader.path
    if named not in ("cls", "mean"):
        raise UnsupportedError(f"{path}: config.json: classifier_pooling {named!r:.80} is not cls or mean")
    return "mean" if named == "mean" else "cls"


def _layers(source: ModelSource, head: Head) -> Iterator[VectorLayer]:
    """What an encoder has before its classes. Raises UnsupportedError for an activation of another name."""
    if not head.inner:
        return
    reader, hidden = source.reader, source.spec.hidden_size
    weight, bias = _linear(reader, head.inner, hidden)
    if len(weight) != hidden:
        raise CheckpointError(f"{reader.path}: {head.inner}.weight is {list(weight.shape)}, not [{hidden}, {hidden}]")
    if (named := source.config.get("classifier_activation", "gelu")) != "gelu":
        raise UnsupportedError(f"{reader.path}: config.json: classifier_activation {named!r:.80} is not gelu")
    yield VectorLayer(kind="Dense", weight=_bytes(weight), bias=_bytes(bias), activation=head.activation)
    if head.norm:
        factor = source.norm(f"{head.norm}.weight", hidden)
        added = source.norm(f"{head.norm}.bias", hidden) if reader.has(f"{head.norm}.bias") else torch.zeros(hidden)
        yield VectorLayer(kind="LayerNorm", weight=_bytes(factor), bias=_bytes(added), eps=source.spec.norm_eps)


def _linear(reader: CheckpointReader, name: str, inputs: int) -> tuple[Tensor, Tensor]:
    """Weight float32 [outputs, inputs] and bias float32 [outputs], 0 if there is none."""
    if not reader.has(f"{name}.weight"):
        raise CheckpointError(f"{reader.path}: tensor {name}.weight is missing")
    weight = reader.tensor(f"{name}.weight").float()
    count = len(weight)
    if weight.shape != (count, inputs) or not 1 <= count <= MAX_BYTES // (4 * inputs):
        raise CheckpointError(f"{reader.path}: {name}.weight is {list(weight.shape)}, not [labels, {inputs}]")
    bias = reader.tensor(f"{name}.bias").float() if reader.has(f"{name}.bias") else torch.zeros(count)
    if bias.shape != (count,):
        raise CheckpointError(f"{reader.path}: {name}.bias is {list(bias.shape)}, not [{count}]")
    return weight, bias


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def _named_activation(source: ModelSource) -> Activation | None:
    """What sentence-transformers makes scores of logits with, if a file says it: its own, or, as it was before,
    config.json.
    """
    file, own = source.reader.path / OF_SENTENCES, source.config.get("sentence_transformers")
    newest = read_json(file, MAX_CONFIG_BYTES) if file.exists() else {}
    name = (
        newest.get("activation_fn")
        or (own.get("activation_fn") if isinstance(own, dict) else None)
        or source.config.get("sbert_ce_default_activation_function")
    )
    if name is None:
        return None
    kind = str(name).rpartition(".")[2]
    if kind not in ACTIVATIONS:
        raise UnsupportedError(f"{source.reader.path}: activation_fn {name!r:.80} is neither Sigmoid nor Identity")
    return ACTIVATIONS[kind]


def _labels(source: ModelSource, count: int) -> tuple[str, ...]:
    """The names of the classes, by default those of transformers."""
    named = source.config.get("id2label")
    named = named if isinstance(named, dict) else {}
    labels = [named.get(str(idx), f"LABEL_{idx}") for idx in range(count)]
    if not all(isinstance(label, str) for label in labels):
        raise CheckpointError(f"{source.reader.path}: config.json: id2label must name each class with a text")
    return tuple(labels)
