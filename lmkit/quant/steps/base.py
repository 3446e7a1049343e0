"""What a step of a recipe is: its keys in the recipe, what it does to a layer, what that costs and what it reports.

A new step is one module of this folder with one subclass of `Step`, and a recipe that names it. Nothing else knows a
step by its name: the pipeline, the estimate of time and the budget of memory ask the steps of the recipe.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Self

from lmkit.config import StrictStruct
from lmkit.formats.parts import Activations
from lmkit.models.spec import ModelSpec
from lmkit.qtensor import QuantScheme
from lmkit.quant.layer.work import LayerWork

SAMPLE_TOKENS = 2048  # that are kept of a linear's input, unless a step says how many
ROUNDING = 300  # multiplications that cost about as much as rounding one weight once


class Stage(IntEnum):
    """Stages come in this order. Steps of one stage exclude each other, and a recipe has one ROUNDER."""

    TRANSFORM = 0
    CLIP = 1
    ROUNDER = 2
    TUNER = 3


@dataclass(frozen=True)
class LayerCost:
    """Sizes of a layer and of the calibration, of which steps make their estimates. Weights are counted as numbers."""

    num_tokens: int  # of the calibration
    seq_len: int
    batch_tokens: int
    sample_tokens: int  # that are kept of an input
    group_size: int
    num_streams: int  # 2 with the original model's hidden states beside those of the quantized layers
    weights: int  # of all linears
    weights_of_a_token: int  # that one token is multiplied with; fewer in a sparse layer
    searched_weights: int  # of the blocks in which scales are compared
    largest: int  # of one linear
    input_widths: tuple[int, ...]  # of the inputs that linears read, each once
    attention: int  # multiplications of a token with keys and values
    num_heads: int
    token_width: int  # numbers that one token takes at the widest place of the layer

    @property
    def block_pass(self) -> float:
        """Operations of one candidate in a search over the layer's blocks, rounding included."""
        return self.searched_weights * (2.0 * self.sample_tokens + ROUNDING)

    @property
    def search_numbers(self) -> int:
        """float32 numbers in memory while candidates are compared on the sample."""
        return self.sample_tokens * self.token_width + 8 * self.largest


class Step(StrictStruct, frozen=True, tag_field="step"):
    """The keys of a step in a recipe; a subclass has a tag, which names it."""

    stage: ClassVar[Stage]
    is_plain: ClassVar[bool] = False  # rounds every weight to the nearest point of its grid, and does nothing else

    @classmethod
    def name(cls) -> str:
        return str(cls.__struct_config__.tag)

    @property
    def needs_exact(self) -> bool:
        """Whether the step wants the original model's hidden states."""
        return False

    @property
    def sample_tokens(self) -> int | None:
        """Tokens of each linear's input that the step wants in the sample, if it says so."""
        return None

    def with_sample(self, tokens: int) -> Self:
        """The step on a sample of so many tokens, if it says how many it wants."""
        return self

    def refuses(self, scheme: QuantScheme, activations: Activations) -> str | None:
        """Why the step does not go with the recipe's grid and activations."""
        return None

    def needs_integers(self, scheme: QuantScheme) -> str | None:
        """What `refuses` says where the step is for integer grids."""
        return None if scheme.kind == "int" else f"{self.name()} needs type int"

    def needs_groups(self, scheme: QuantScheme) -> str | None:
        """What `refuses` says where the step is for integer grids of a few inputs."""
        if scheme.kind == "int" and scheme.group_size != -1:
            return None
        return f"{self.name()} needs type int and groups of 32, 64 or 128 inputs"

    def refuses_model(self, spec: ModelSpec) -> str | None:
        """Why the step cannot be done to this model."""
        return None

    def apply(self, work: LayerWork) -> None:
        """Rewrite the layer, and add to `work` what the report says of it."""
        raise NotImplementedError

    def flops(self, cost: LayerCost) -> float:
        """Floating-point operations on one layer."""
        return 0.0

    def working_numbers(self, cost: LayerCost) -> int:
        """float32 numbers in memory at the step's peak, beside the layer and the statistics of its inputs."""
        return 0
