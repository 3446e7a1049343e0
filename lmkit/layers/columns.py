"""Outputs of several products side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from lmkit.devices import named
from lmkit.kernels import ops
from lmkit.kernels.cpu import workspace


class Join:
    """[T, n] each -> [T, sum of n]. On a CPU a kernel copies them, so a captured step does, too."""

    def __init__(self, device: str) -> None:
        self._copy = ops.keep.select(device)
        self._in_workspace = not named(device).own_memory

    def __call__(self, outputs: list[Tensor]) -> Tensor:
        if len(outputs) == 1:
            return outputs[0]
        if not self._in_workspace or any(y.dtype != torch.float32 for y in outputs):
            return torch.cat(outputs, dim=-1)
        widths = [y.shape[1] for y in outputs]
        merged = workspace.empty(len(outputs[0]), sum(widths))
        for y, columns in zip(outputs, merged.split(widths, dim=1), strict=True):
            self._copy(y.contiguous(), None, columns)
        return merged
