"""Defers modules that `import torch` imports and an engine never uses, until a name is looked up in one of them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# Python formulas of operators on tensors without data, for torch.compile and torch.export. They take a fifth of torch's
# import.
DEFERRED = frozenset({"torch._meta_registrations"})
NEEDING = frozenset({"torch._dynamo", "torch._prims", "torch._inductor"})


class _DeferredModule(ModuleType):
    """Runs its code when a name is looked up in it.

    importlib's LazyLoader also runs the code for `__file__`, which torch reads from every module.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.run()
        return getattr(self, name)

    def run(self) -> None:
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None
        assert isinstance(self.__spec__.loader, _DeferredLoader)
        self.__spec__.loader.real.exec_module(self)


class _DeferredLoader(Loader):
    def __init__(self, real: Loader) -> None:
        self.real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class DeferredFinder(MetaPathFinder):
    """Finds the modules of DEFERRED."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in NEEDING:  # these modules depend on an order of imports
            for module in [sys.modules.get(name) for name in DEFERRED]:
                if isinstance(module, _DeferredModule):
                    module.run()
        spec = PathFinder.find_spec(fullname, path) if fullname in DEFERRED else None
        if spec is not None and spec.loader is not None:
            spec.loader = _DeferredLoader(spec.loader)
        return spec


# Containers made since the last search for garbage, less those freed, that begin another. A step of hundreds of
# sequences has thousands. They are freed after it without a search: none is part of a cycle.
YOUNG_OBJECTS = 50_000


@contextmanager
def quick_start() -> Iterator[None]:
    """For a process of lmkit's own: defer imports, and look for garbage only after the start, among later objects."""
    defer_imports()
    gc.disable()  # objects made until the engine is ready stay: a search takes a tenth of the start
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS)
        gc.enable()


def defer_imports() -> None:
    """Defer the modules of DEFERRED from now on in this process, unless torch is imported already."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, DeferredFinder())
