"""Rounding of a dense checkpoint while it loads: each linear to the nearest codes, without calibration.

The schemes are those of the recipes rtn_w4a16_g128, rtn_w8a16 and fp8_channel, so the weights are the same. Embeddings,
routers, norms and the head stay as they are (`lm_head` int8 rounds the head).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from lmkit.errors import ConfigError
from lmkit.log import get_logger
from lmkit.qtensor import QuantScheme, float8_scheme, int_scheme

if TYPE_CHECKING:
    from lmkit.models.spec import ModelSpec

log = get_logger(__name__)

SCHEMES: Mapping[str, QuantScheme] = {
    "int4": int_scheme(4, 128),
    "int8": int_scheme(8, 128, symmetric=True),
    "fp8": float8_scheme(),
}
GROUPS = (128, 64, 32)
MAX_DENSE = 0.02  # of the weights of a model's linears may stay dense without being asked for


def scheme_for(name: str, in_features: int) -> QuantScheme | None:
    """The scheme of a linear of so many inputs. Its groups are whole: 128 inputs, else 64 or 32.

    None if the linear stays dense, as `name` is none or no group fits.
    """
    scheme = SCHEMES.get(name)
    if scheme is None or scheme.group_size == -1:
        return scheme
    size = next((size for size in GROUPS if in_features % size == 0), None)
    return None if size is None else replace(scheme, group_size=size)


def check_rounding(spec: ModelSpec, name: str, path: object) -> None:
    """Log the sizes of groups. Raise ConfigError if much would stay dense, as no group fits."""
    scheme = SCHEMES[name]
    shapes = [shape for layer in spec.layers for role, shape in layer.linears.items() if role not in layer.unrounded]
    dense = [shape for shape in shapes if scheme_for(name, shape[1]) is None]
    share = sum(rows * width for rows, width in dense) / spec.num_weights
    if share > MAX_DENSE:
        raise ConfigError(
            f"quantize={name}: {path}: {len(dense)} of {len(shapes)} linears, {share:.0%} of the weights, would "
            f"stay dense ({dense[0][1]} inputs are not a multiple of {GROUPS[-1]}); --quantize fp8 takes any number"
        )
    if scheme.group_size != -1:
        widths = {width for _, width in shapes}
        found = {fitting.group_size for width in widths if (fitting := scheme_for(name, width)) is not None}
        log.info("%s: weights are rounded to %s in %s", path, name, group_text(scheme.group_size, found, widths))


def group_text(asked: int, found: Collection[int], widths: Collection[int]) -> str:
    """`groups of 128 and 64 (128 does not divide 576)`, for `found` sizes of groups of so many inputs."""
    text = f"groups of {_joined(sorted(found, reverse=True) or [asked])}"
    odd = sorted(width for width in widths if width % asked)
    return text if set(found) <= {asked} else f"{text} ({asked} does not divide {_joined(odd)})"


def _joined(numbers: list[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last


def saved_bytes(spec: ModelSpec, name: str, dense: int) -> int:
    """Bytes that rounding saves in memory, at `dense` bytes for a weight that is not rounded."""
    saved = 0
    for layer in spec.layers:
        for role, (out_features, in_features) in layer.linears.items():
            if role not in layer.unrounded and (scheme := scheme_for(name, in_features)) is not None:
                saved += out_features * in_features * dense - scheme.num_bytes((out_features, in_features))
    return saved
