"""What happens to a layer's keys and values before they are stored. Attention undoes it exactly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmkit.formats.kv_config import KVLayerConfig, Numbers, PairMean
from lmkit.kernels.ops import Balance, KeyMean, KVTensor
from lmkit.models.layer_spec import LayerSpec

MeanByHead = tuple[tuple[PairMean, ...], ...]


@dataclass(frozen=True)
class KVTransform:
    """All by KV head, in this order. The mean before RoPE, `key_mean`, is subtracted from keys. From the key and value
    of position 0 `first_key` and `first_value` are. Keys are multiplied by the Walsh-Hadamard matrix, or by the matrix
    A of `balance`, which queries meet multiplied by A^-T.
    """

    key_mean: MeanByHead = ()
    hadamard: bool = False
    balance: Numbers | None = None  # [num_kv_heads, D, D]
    first_key: Numbers | None = None  # [num_kv_heads, D]
    first_value: Numbers | None = None

    @classmethod
    def of(cls, layer: KVLayerConfig, *, keys: bool, values: bool) -> KVTransform:
        """That of a configuration, for keys or values that become codes."""
        first_value = layer.first_value if values else None
        if not keys:
            return cls(first_value=first_value)
        return cls(layer.key_mean, layer.hadamard, layer.balance, layer.first_key, first_value)

    @property
    def has_mean(self) -> bool:
        return any(self.key_mean)

    def heads(self, heads: slice) -> KVTransform:
        """That of some KV heads."""
        parts: dict[str, Any] = {"key_mean": self.key_mean[heads]}
        for name in ("balance", "first_key", "first_value"):
            whole: Numbers | None = getattr(self, name)
            parts[name] = whole and whole.heads(heads)
        return replace(self, **parts)

    def num_bytes(self) -> int:
        """Bytes of the matrices in memory."""
        return 0 if self.balance is None else 2 * 4 * self.balance.array().size

    def keys(self, spec: LayerSpec, plain: KVTensor, table: Tensor | None) -> KVTensor:
        """The storage of keys; `table`: ops.KeyMean's, if there is a mean."""
        device = plain.data.device
        mean = None if table is None or not self.has_mean else _key_mean(spec, self.key_mean, table)
        balance = None if self.balance is None else _balance(self.balance, device)
        return replace(plain, mean=mean, hadamard=self.hadamard, balance=balance, first=_tensor(self.first_key, device))

    def values(self, plain: KVTensor) -> KVTensor:
        """The storage of values."""
        return replace(plain, first=_tensor(self.first_value, plain.data.device))


PLAIN = KVTransform()


def _tensor(numbers: Numbers | None, device: torch.device) -> Tensor | None:
    return None if numbers is None else torch.from_numpy(numbers.array()).to(device)


def _balance(numbers: Numbers, device: torch.device) -> Balance:
    """The inverse is that of the numbers in the file, so that scores stay as they are."""
    a = numbers.array().astype(np.float64)
    keys, queries = a.swapaxes(1, 2), np.linalg.inv(a)
    return Balance(*(torch.from_numpy(x.astype(np.float32, order="C")).to(device) for x in (keys, queries)))


def _key_mean(spec: LayerSpec, by_head: MeanByHead, table: Tensor) -> KeyMean:
    half, count = spec.rope.rotary_dim // 2, max(map(len, by_head))
    vector = torch.zeros(spec.num_kv_heads, spec.head_dim)
    pairs = torch.zeros(spec.num_kv_heads, count, dtype=torch.int32)
    for head, given in enumerate(by_head):
        numbers = [pair for pair, _, _ in given]
        unused = [pair for pair in range(half) if pair not in numbers]
        pairs[head] = torch.tensor(numbers + unused[: count - len(numbers)])
        for pair, first, second in given:
            vector[head, pair], vector[head, pair + half] = first, second
    return KeyMean(vector.to(table.device), pairs.to(table.device), table)
