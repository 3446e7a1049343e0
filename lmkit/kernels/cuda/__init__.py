"""CUDA C++ through CuPy. csrc/ has the kernels; each file here has the ops of one kind and launches them.

Importing this package registers the ops. It neither imports CuPy nor looks for a GPU.
"""

from lmkit.kernels.cuda import (
    append,
    attention,
    delta,
    elementwise,
    experts,
    latent,
    library,
    linear,
    low_rank,
    sampling,
    selective_scan,
    short_conv,
    tokens,
)

__all__ = [
    "append",
    "attention",
    "delta",
    "elementwise",
    "experts",
    "latent",
    "library",
    "linear",
    "low_rank",
    "sampling",
    "selective_scan",
    "short_conv",
    "tokens",
]
