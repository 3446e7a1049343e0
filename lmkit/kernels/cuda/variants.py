"""What this package can launch: for building ahead, and for tests that compile all of it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import lmkit.kernels.cuda
from lmkit.kernels.cuda.module import Kernel


def common() -> list[Kernel]:
    """The kernels of common models, each variant once: what `variants()` of the modules here yields."""
    found: dict[tuple[object, ...], Kernel] = {}
    for kernel in _offered():
        found.setdefault((kernel.source, kernel.name, *sorted(kernel.defines.items())), kernel)
    return list(found.values())


def _offered() -> Iterator[Kernel]:
    package = lmkit.kernels.cuda
    for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        offer = getattr(importlib.import_module(info.name), "variants", None)
        if offer is not None:
            yield from offer()
