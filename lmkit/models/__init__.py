"""Decoder models: families as data, one forward."""

from lmkit.models.registry import load_spec
from lmkit.models.spec import ModelSpec

__all__ = ["ModelSpec", "load_spec"]
