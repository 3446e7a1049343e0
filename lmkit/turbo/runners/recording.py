"""Records what torch computes between kernels, so that a captured step repeats it without the modules around it.

A module of transformers rotates heads and adds residuals by operations of torch. What they read and write lies in the
step's workspace or stays where it is, as with kernels, so an operation is repeated by calling it on the same memory:

    kernels' jobs | add, out= | kernels' jobs | mul, out= | neg, out= | ...

What an operation gives goes into memory of the workspace. Views are the same in every step and are not repeated. What
reads a value on the host is refused: another step may read another one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lmkit.kernels.cpu import threads
from lmkit.kernels.cpu.workspace import Workspace, empty

# Their results, or the shapes of those, follow from values; or they draw numbers.
REFUSED = frozenset(
    {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
)
HOST_READS = frozenset({"tolist", "numpy", "__array__", "__dlpack__", "set_", "resize_"})


class NotCapturableError(RuntimeError):
    """The forward pass does something that cannot be repeated."""


class _NoHostReads(TorchFunctionMode):
    """Refuses methods that read a tensor's values without a call of torch's dispatcher, or move its memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in HOST_READS:
            raise NotCapturableError(func.__name__)
        return func(*args, **(kwargs or {}))


class _Recording(TorchDispatchMode):
    def __init__(self, workspace: Workspace) -> None:
        super().__init__()
        self._workspace = workspace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # operations that are made of others are recorded as those
            if (found := func.decompose(*args, **kwargs)) is not NotImplemented:
                return found
        if REFUSED.intersection(func.tags) and not (func is _INDEX and not any(map(_is_mask, args[1]))):
            raise NotCapturableError(func.name())
        found = func(*args, **kwargs)
        if func.is_view or func in _WITHOUT_VALUES:
            return found
        if func._schema.is_mutable:
            threads.run_on_host(functools.partial(func, *self._lent(args), **self._lent(kwargs)))
            return found
        given = tree_map_only(Tensor, _copied, found)
        threads.run_on_host(_into(func, self._lent(args), self._lent(kwargs), self._lent(given)))
        return given

    def _lent(self, values: Any) -> Any:
        """The same arguments, with tensors that do not hold their part of the workspace: later pieces may take it."""
        return tree_map_only(Tensor, lambda x: found if (found := self._workspace.alias(x)) is not None else x, values)


@contextmanager
def recording(workspace: Workspace) -> Iterator[None]:
    """Inside, where a step is captured, torch's operations are added to the program. Raises NotCapturableError."""
    with _NoHostReads(), _Recording(workspace):
        yield


_INDEX = torch.ops.aten.index.Tensor
_WITHOUT_VALUES = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _copied(x: Tensor) -> Tensor:
    """A result in memory of the workspace, with its strides."""
    size = sum((length - 1) * stride for length, stride in zip(x.shape, x.stride(), strict=True)) + 1
    return empty(size if x.numel() else 0, dtype=x.dtype).as_strided(x.shape, x.stride()).copy_(x)


def _into(func: OpOverload, args: Any, kwargs: Any, given: Any) -> Callable[[], Any]:
    """What calls an operation and leaves its result in `given`."""
    if isinstance(given, Tensor) and (writing := _out_variant(func)) is not None:
        return functools.partial(writing, *args, **kwargs, out=given)

    def call() -> None:
        for to, x in zip(tree_leaves(given), tree_leaves(func(*args, **kwargs)), strict=True):
            to.copy_(x)

    return call


@functools.cache
def _out_variant(func: OpOverload) -> OpOverload | None:
    """The overload that takes the same arguments and the memory of its result."""
    wanted = [(each.name, str(each.type)) for each in func._schema.arguments]
    packet = func.overloadpacket
    for name in packet.overloads():
        found: OpOverload = getattr(packet, name)
        arguments = found._schema.arguments
        rest = [(each.name, str(each.type)) for each in arguments if not each.is_out]
        if rest == wanted and [each.name for each in arguments if each.is_out] == ["out"]:
            return found
    return None
