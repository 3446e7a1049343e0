"""The interface of a recipe's step: its keys in the recipe, its work on a layer, its cost and its report.

A new step is one module of this folder with one subclass of `Step`, and a recipe that names it. Nothing else knows a
step by its name: the pipeline, the estimate of time and the budget of memory ask the steps of the recipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import ClassVar, Self

from lmkit.codes import Stepped
from lmkit.config import StrictStruct
from lmkit.formats.names import Activations
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.source import ModelSource
from lmkit.models.spec import ModelSpec
from lmkit.qtensor import QuantScheme
from lmkit.quant.layer.work import LayerWork
from lmkit.quant.refine.whole import Finished, WholeModel

SAMPLE_TOKENS = 2048  # tokens of a linear's input that are kept, unless a step says how many
MOVED = 0.9  # what a layer does with each number of a token beside products takes as long as rounding it so many times


class Stage(IntEnum):
    """The stages of a recipe, in order. Steps of one stage exclude each other, and a recipe has one ROUNDER."""

    ROTATION = 0  # as weights are read
    TRANSFORM = 1
    CLIP = 2
    ROUNDER = 3
    TUNER = 4
    MODEL = 5  # once, after the last layer: quant.refine


@dataclass(frozen=True)
class Speed:
    """What this machine does in a second. Operations are multiplications and additions."""

    short: float  # operations of products in the numbers that the calibration multiplies
    full: float  # operations of products in float32
    engine: float  # operations of products in the numbers that the engine multiplies
    rounding: float  # weights that are rounded once
    calls: float  # calls of torch for a few numbers


@dataclass(frozen=True)
class LayerCost:
    """A layer and the sizes of a calibration. Steps estimate their time and memory from these."""

    layer: LayerSpec
    num_tokens: int  # of the calibration
    seq_len: int
    batch_tokens: int
    sample_tokens: int  # tokens of an input that are kept
    group_size: int
    num_streams: int  # 2 if the original model's hidden states are kept besides those of the quantized layers

    @cached_property
    def forward(self) -> float:
        """Operations of one pass of all tokens. A token sees half a row on average."""
        return self.layer.flops(self.num_tokens, self.seq_len / 2)

    def forward_seconds(self, num_tokens: float, operations: float, speed: Speed) -> float:
        """Seconds of a pass of so many tokens with products of `operations` a second."""
        products = self.layer.flops(1, self.seq_len / 2) / operations
        return num_tokens * (products + MOVED * self.token_width / speed.rounding)

    @cached_property
    def largest(self) -> int:
        """Weights of the largest linear."""
        return max((math.prod(shape) for shape in self.layer.linears.values()), default=0)

    @cached_property
    def input_widths(self) -> list[int]:
        """The widths of the inputs that linears read, each input once."""
        return [width for part in self.part_widths for width in part]

    @cached_property
    def part_widths(self) -> list[list[int]]:
        """`input_widths` of each part of the layer. All experts are in one part."""
        readers = {reads for role, reads in self.layer.input_of.items() if role in self.layer.linears}
        parts: dict[int, list[int]] = {}
        for reader in readers:
            parts.setdefault(self.layer.part_of(reader), []).append(self.layer.linear_shape(reader)[1])
        return list(parts.values())

    @property
    def token_width(self) -> int:
        """Numbers of one token at the widest place: gate and up, separate and concatenated, and their product, or what
        linear attention reads and gives."""
        of_states = 2 * self.layer.widest_product if self.layer.recurrent else 0
        return max(5 * self.layer.widest_mlp, of_states) + 6 * self.layer.hidden_size

    @cached_property
    def readers(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of the linears that read each input, together."""
        outputs: dict[str, int] = {}
        for role, reads in self.layer.input_of.items():
            if role in self.layer.linears:
                outputs[reads] = outputs.get(reads, 0) + self.layer.linears[role][0]
        return [(rows, self.layer.linear_shape(reads)[1]) for reads, rows in outputs.items()]

    def search_seconds(self, speed: Speed, rounded: float, compared: float) -> float:
        """Seconds of a search over the blocks of a layer: `rounded` candidates are rounded, and the outputs of
        `compared` candidates on the whole sample are computed."""
        ends = sum(math.prod(s) for role, s in self.layer.linears.items() if role.endswith((".o", ".down")))
        products = 2.0 * self.sample_tokens * (self.layer.num_weights + ends)
        return rounded * self.layer.num_weights / speed.rounding + compared * products / speed.short

    @property
    def search_numbers(self) -> int:
        """float32 numbers in memory while candidates are compared on the sample."""
        return self.sample_tokens * self.token_width + 8 * self.largest


class Step(StrictStruct, frozen=True, tag_field="step"):
    """The keys of a step in a recipe. The tag of a subclass is the step's name."""

    stage: ClassVar[Stage]
    by_parts: ClassVar[bool] = False  # moves the hidden states through the layer part by part (layer.passes)
    sees_all: ClassVar[bool] = False  # its statistics of inputs are maxima, to which every token may add
    is_plain: ClassVar[bool] = False  # needs no text: rounds every weight to the nearest point of its grid, or turns it

    @property
    def rows(self) -> int:
        """Rows of the calibration that a step of the last stage takes at a time."""
        return 0

    @classmethod
    def name(cls) -> str:
        return str(cls.__struct_config__.tag)

    @property
    def needs_exact(self) -> bool:
        """Whether the step wants the original model's hidden states."""
        return False

    @property
    def needs_curvature(self) -> bool:
        """Whether the step wants to know how much each layer's outputs count for the loss (layer.curvature)."""
        return False

    @property
    def sample_tokens(self) -> int | None:
        """Tokens of each linear's input that the step wants in the sample, or None."""
        return None

    def with_sample(self, tokens: int) -> Self:
        """The step with a sample of `tokens` tokens. A step without a sample size of its own is returned unchanged."""
        return self

    def refuses(self, scheme: QuantScheme, activations: Activations) -> str | None:
        """Why the step does not go with the recipe's grid and activations, or None."""
        return None

    def needs_integers(self, scheme: QuantScheme) -> str | None:
        """The answer of `refuses` for a step that needs integer grids."""
        return None if scheme.codes.uniform else f"{self.name()} needs type int"

    def needs_steps(self, scheme: QuantScheme) -> str | None:
        """The answer of `refuses` for a step that chooses among the steps of codes."""
        return None if isinstance(scheme.codes, Stepped) else f"{self.name()} needs type int, or float of 4 bits"

    def needs_groups(self, scheme: QuantScheme) -> str | None:
        """The answer of `refuses` for a step that needs such grids with groups of a few inputs."""
        if isinstance(scheme.codes, Stepped) and scheme.group_size != -1:
            return None
        return f"{self.name()} needs groups of 128 inputs or fewer, of type int or of float with 4 bits"

    def needs_states_alone(self, spec: ModelSpec, what: str = "") -> str | None:
        """The answer of `refuses_model` for a step that computes layers from their states alone (data.side_inputs), or
        does so for its key `what`."""
        if spec.foreign:
            return f"{what or self.name()} does not go with layers that transformers computes"
        reason = f"{what or self.name()} does not go with layers that read the keys of others, or vectors of each token"
        return reason if spec.reads_beside else None

    def needs_pairs(self, spec: ModelSpec) -> str | None:
        """The answer of `refuses_model` for a step that moves scales through a norm or a linear to those after it."""
        reason = f"{self.name()} needs to know what stands before a linear, and transformers computes these layers"
        return reason if spec.foreign else None

    def refuses_model(self, spec: ModelSpec) -> str | None:
        """Why the step cannot be done to this model, or None."""
        return None

    def for_model(self, spec: ModelSpec) -> Self:
        """The step without what is `auto` in it and does not go with this model."""
        return self

    def opened(self, source: ModelSource) -> ModelSource:
        """The model as this step and those after it read it."""
        return source

    def apply(self, work: LayerWork) -> None:
        """Rewrite the layer and add the step's entries of the report to `work`."""
        raise NotImplementedError

    def finish(self, model: WholeModel, done: Callable[[int, int], None]) -> Finished:
        """Change the layers of a finished model. Only steps of the last stage do so; `done(units, of all)` reports the
        progress."""
        raise NotImplementedError

    def seconds(self, cost: LayerCost, speed: Speed) -> float:
        """Seconds that the step takes for one layer."""
        return 0.0

    def seconds_before(self, cost: LayerCost, speed: Speed) -> float:
        """Seconds that the step takes for one layer before the layer loop."""
        return 0.0

    def seconds_of_head(self, spec: ModelSpec, num_tokens: int, speed: Speed) -> float:
        """Seconds that the step takes for the model's head."""
        return 0.0

    def whole_numbers(self, spec: ModelSpec, group_size: int) -> int:
        """float32 numbers that the step holds of the whole model."""
        return 0

    def working_numbers(self, cost: LayerCost) -> int:
        """float32 numbers in memory at the step's peak, besides the layer and the statistics of its inputs."""
        return 0
