"""Every op in plain torch with float32 accumulation: the oracle for all other implementations, on any device."""

from lmkit.kernels.reference import attention, elementwise, experts, kv, linear, sampling

__all__ = ["attention", "elementwise", "experts", "kv", "linear", "sampling"]
