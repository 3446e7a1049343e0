"""Rounding of a dense checkpoint while it loads: each linear to the nearest codes, without calibration.

The schemes are those of the recipes rtn_w4a16_g128, rtn_w8a16 and fp8_channel, so the weights are the same. Embeddings,
routers, norms and the head stay as they are (`lm_head` int8 rounds the head).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from lmkit.qtensor import QuantScheme

if TYPE_CHECKING:
    from lmkit.models.spec import ModelSpec

SCHEMES: Mapping[str, QuantScheme] = {
    "int4": QuantScheme(4, 128),
    "int8": QuantScheme(8, 128, symmetric=True),
    "fp8": QuantScheme(8, -1, symmetric=True, kind="float"),
}
GROUPS = (128, 64, 32)


def scheme_for(name: str, in_features: int) -> QuantScheme | None:
    """The scheme of a linear of so many inputs. Its groups are whole: 128 inputs, else 64 or 32.

    None if the linear stays dense, as `name` is none or no group fits.
    """
    scheme = SCHEMES.get(name)
    if scheme is None or scheme.group_size == -1:
        return scheme
    size = next((size for size in GROUPS if in_features % size == 0), None)
    return None if size is None else replace(scheme, group_size=size)


def saved_bytes(spec: ModelSpec, name: str, dense: int) -> int:
    """Bytes that rounding saves in memory, at `dense` bytes for a weight that is not rounded."""
    saved = 0
    for layer in spec.layers:
        for role, (out_features, in_features) in layer.linears.items():
            if role not in layer.unrounded and (scheme := scheme_for(name, in_features)) is not None:
                scales = out_features * scheme.num_groups(in_features) * (4 if scheme.kind == "float" else 3)
                saved += out_features * in_features * dense - out_features * in_features * scheme.bits // 8 - scales
    return saved
