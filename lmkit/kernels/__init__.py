"""Importing this registers every implementation of this build. Nothing is compiled before its first call."""

from lmkit.kernels import cpu, cuda, reference

__all__ = ["cpu", "cuda", "reference"]
