"""CUDA C++ through CuPy: csrc/ has the kernels, every file here the ops of one kind and how they are launched.

Importing it registers the ops, and neither imports CuPy nor looks for a GPU.
"""

from lmkit.kernels.cuda import append, attention, elementwise, library, linear, sampling, tokens

__all__ = ["append", "attention", "elementwise", "library", "linear", "sampling", "tokens"]
