"""Importing this registers every implementation this build has; nothing is compiled before its first call."""

from lmkit.kernels import cpu, cuda, reference

__all__ = ["cpu", "cuda", "reference"]
