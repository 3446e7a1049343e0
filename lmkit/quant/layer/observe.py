"""The statistics that calibration keeps of a layer's activations: sums over all tokens, and a sample of tokens.

Linears that read the same tensor share one record, under the first of their roles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class InputStats:
    """One linear input x [tokens, in] over the whole calibration set, accumulated in float64.

    `sample` holds the inputs of the tokens `sample_ids` (their numbers in the set, ascending), in float32.
    """

    abs_sum: Tensor  # float64 [in]
    abs_max: Tensor  # float32 [in]
    gram: Tensor  # float64 [groups, group_size, group_size], x_g^T x_g of each group of inputs; no groups for -1
    sample_ids: Tensor  # int64 [n], on the CPU
    sample: Tensor  # float32 [n, in]
    num_tokens: int = 0

    @classmethod
    def empty(cls, in_features: int, group_size: int, sample_ids: Tensor, at: str = "cpu") -> InputStats:
        """Statistics of inputs on the device `at`."""
        groups = 0 if group_size == -1 else in_features // group_size
        return cls(
            abs_sum=torch.zeros(in_features, dtype=torch.float64, device=at),
            abs_max=torch.zeros(in_features, device=at),
            gram=torch.zeros(groups, abs(group_size), abs(group_size), dtype=torch.float64, device=at),
            sample_ids=sample_ids,
            sample=torch.zeros(len(sample_ids), in_features, device=at),
        )

    @property
    def group_size(self) -> int:
        return self.gram.shape[1]

    @property
    def abs_mean(self) -> Tensor:
        """float32 [in], mean over all tokens of |x|."""
        return (self.abs_sum / max(self.num_tokens, 1)).float()

    def add(self, x: Tensor) -> None:
        """Add the next tokens of the set, x [tokens, in]."""
        x = x.float()
        magnitude = x.abs()
        self.abs_sum += magnitude.sum(0)
        if len(x):
            self.abs_max = torch.maximum(self.abs_max, magnitude.amax(0))
        groups, size, _ = self.gram.shape
        grouped = x[:, : groups * size].reshape(len(x), groups, size).transpose(0, 1)
        self.gram += grouped.transpose(1, 2) @ grouped
        begin, end = torch.searchsorted(self.sample_ids, torch.tensor([self.num_tokens, self.num_tokens + len(x)]))
        self.sample[begin:end] = x[self.sample_ids[begin:end] - self.num_tokens]
        self.num_tokens += len(x)

    def divide(self, s: Tensor) -> None:
        """Change the statistics to those of x / s, s float32 [in]. The linears read x / s once s is folded into their
        weights."""
        groups, size, _ = self.gram.shape
        factor = s.double()[: groups * size].view(groups, size)
        self.abs_sum /= s
        self.abs_max /= s
        self.gram /= factor[:, :, None] * factor[:, None, :]
        self.sample /= s


class Observer:
    """Fills one InputStats per input while a layer runs over the calibration set in order."""

    def __init__(self, inputs: dict[str, InputStats]) -> None:
        self.inputs = inputs

    def __call__(self, role: str, x: Tensor) -> None:
        if role in self.inputs:
            self.inputs[role].add(x)


def sample_tokens(num_tokens: int, count: int, seed: int) -> Tensor:
    """Ascending numbers of `count` tokens (all if there are fewer). They are drawn without a period, because the
    position in a row matters, above all its first token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(num_tokens, generator=generator)[:count].sort().values


def sample_rows(num_rows: int, seq_len: int, count: int, prefix: int) -> tuple[Tensor, int]:
    """(token numbers, length): about `count` tokens, as the first `length` <= `prefix` tokens of rows that are spread
    over the set. Attention needs whole sequences, and the beginning of a sequence is one."""
    length = min(seq_len, prefix, count)
    pieces = max(1, min(num_rows, count // length))
    rows = torch.linspace(0, num_rows - 1, pieces).round().long()
    return (rows[:, None] * seq_len + torch.arange(length)).flatten(), length
