"""The layers that one process of a pipeline holds.

    stage 0   embedding, first layers, and the head      stage 1   the next layers      ...

The first stage has the head too, because it samples. The cut makes stages multiply about equally many weights for each
token. No torch here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from lmkit.errors import UnsupportedError
from lmkit.models.spec import ModelSpec


@dataclass(frozen=True)
class Stage:
    """Stage `index` of `count`."""

    index: int = 0
    count: int = 1

    def layers(self, spec: ModelSpec) -> range:
        """The stage's layers. Raises UnsupportedError if the layers cannot be shared out so."""
        return self.cut(spec)[self.index]

    def cut(self, spec: ModelSpec) -> list[range]:
        """The layers of each stage. Raises UnsupportedError as `layers` does."""
        if self.count > 1 and (spec.per_layer or spec.kv_sources):
            raise UnsupportedError(f"pp={self.count}: layers of this model share keys and values; use pp=1")
        if self.count > spec.num_layers:
            raise UnsupportedError(f"pp={self.count}: the model has {spec.num_layers} layers, and a stage needs one")
        work = list(accumulate((layer.active_weights for layer in spec.layers), initial=math.prod(spec.head_shape)))
        starts = [0]
        for index in range(1, self.count):
            later = range(starts[-1] + 1, spec.num_layers - (self.count - index) + 1)
            possible = [layer for layer in later if not spec.layers[layer].follows]
            if not possible:
                raise UnsupportedError(f"pp={self.count}: too few layers of this model choose keys; use a smaller pp")
            target = work[-1] * index / self.count
            starts.append(min(possible, key=lambda layer: abs(work[layer] - target)))
        return [range(start, end) for start, end in zip(starts, [*starts[1:], spec.num_layers], strict=True)]


ALONE = Stage()
