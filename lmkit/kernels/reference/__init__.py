"""Every op in plain torch with float32 accumulation: the oracle for all other implementations, on any device."""

from lmkit.kernels.reference import (
    attention,
    delta,
    elementwise,
    experts,
    index,
    kv,
    latent,
    linear,
    low_rank,
    sampling,
    selective_scan,
    short_conv,
)

__all__ = [
    "attention",
    "delta",
    "elementwise",
    "experts",
    "index",
    "kv",
    "latent",
    "linear",
    "low_rank",
    "sampling",
    "selective_scan",
    "short_conv",
]
