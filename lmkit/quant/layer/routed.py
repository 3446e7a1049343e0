"""Statistics of an expert's input. The tokens that are routed to an expert are known only while the layer runs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lmkit.quant.layer.observe import InputStats

MIN_TOKENS = 128  # an expert that saw fewer is rounded without statistics: they would fit these few tokens alone


@dataclass
class RoutedStats(InputStats):
    """InputStats whose `sample` holds `count` of the tokens that came, drawn with equal chances (all if fewer came).

    Records with the same seed that see the same tokens hold the same sample.
    """

    count: int = 0
    _draws: Tensor = field(default_factory=lambda: torch.zeros(0))  # [n], the draw of each token of the sample
    _generator: torch.Generator = field(default_factory=torch.Generator)

    @classmethod
    def of(cls, in_features: int, group_size: int, count: int, seed: int, at: str = "cpu") -> RoutedStats:
        no_tokens = torch.zeros(0, dtype=torch.int64)
        stats = cls(**vars(InputStats.empty(in_features, group_size, no_tokens, at)), count=count)
        stats._generator.manual_seed(seed)
        return stats

    def add(self, x: Tensor) -> None:
        """Add the next tokens, x float32 [tokens, in]. Every token draws a number. The sample holds the tokens with the
        smallest numbers."""
        draws = torch.cat([self._draws, torch.rand(len(x), generator=self._generator)])
        kept = draws.argsort(stable=True)[: self.count].sort().values
        old, new = kept[kept < len(self.sample)], kept[kept >= len(self.sample)] - len(self.sample)
        self._draws = draws[kept]
        self.sample_ids = torch.cat([self.sample_ids[old], self.num_tokens + new])
        self.sample = torch.cat([self.sample[old], x[new]])
        super().add(x)
