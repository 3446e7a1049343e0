"""A linear of a transformers model, by its sizes."""

from __future__ import annotations

from dataclasses import dataclass

from lmkit.layers.blocks.base import Shape


@dataclass(frozen=True)
class Site:
    """A linear of a model. `transposed`: its module keeps the weight as [in, out]."""

    shape: Shape
    transposed: bool
    has_bias: bool
