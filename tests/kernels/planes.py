"""Random weights of every scheme that kernels keep in planes of bits."""

from __future__ import annotations

import torch

from lmkit.formats.gguf import OWN
from lmkit.qtensor import QTensor, QuantScheme

SCHEMES = {name: scheme for name, scheme in OWN.items() if scheme.in_planes}


def random_weight(scheme: QuantScheme, outputs: int, inputs: int) -> QTensor:
    """All codes and scales that there are. Factors are float16."""
    values = torch.tensor(scheme.codes.values or range(1 << scheme.bits), dtype=torch.uint8)
    codes = values[torch.randint(len(values), (outputs, inputs))]
    groups = outputs, scheme.num_groups(inputs)
    scales, offsets = ((torch.randn(groups) / 20).half() for _ in range(2))
    if scheme.scales.bits == 16:
        return QTensor(codes, scales, scheme.codes.zeros(groups) if scheme.symmetric else offsets, scheme)
    scales, offsets = (torch.randint(-128, 128, groups, dtype=torch.int8) for _ in range(2))
    zeros, factor = scheme.scales.like(scales, scheme.codes.zeros(groups))
    assert factor is not None
    return QTensor(
        codes, scales, zeros if scheme.symmetric else offsets, scheme, factor=(torch.randn(factor.shape) / 500).half()
    )
