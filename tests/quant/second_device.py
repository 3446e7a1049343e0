"""A device beside the CPU, without a GPU: tensors that only meet each other, as those of a GPU do.

A tensor of this device wraps one of the CPU, and is of torch's device type `meta`. The device computes what the CPU
computes, so results have the same bits. What a GPU refuses is refused: operands on two devices, unless one is a number
or an index.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

NAME = "torch:meta"  # of the device, for layers
CPU, META = torch.device("cpu"), torch.device("meta")
aten = torch.ops.aten

# Their indices may be on the CPU.
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}


class There(Tensor):
    """A tensor of the second device."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> There:
        made: There = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, raw.shape, raw.stride(), raw.storage_offset(), dtype=raw.dtype, device=META,
            requires_grad=raw.requires_grad,
        )  # fmt: skip
        made.raw = raw
        return made

    def tolist(self) -> Any:
        return self.raw.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"There({self.raw!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})[0]


class SecondDevice(TorchDispatchMode):
    """While it is entered, `meta` is the second device. `num_ops` counts the operations that computed there."""

    num_ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, is_there = run(func, args, kwargs or {})
        self.num_ops += is_there
        return result


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """(the operation's result, whether it was computed on the second device)."""
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    there = [x for x in tensors if isinstance(x, There)]
    asked = kwargs.get("device")
    if func is aten.copy_.default:
        is_there = isinstance(args[0], There)
    elif asked is not None:
        is_there = torch.device(asked) == META
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"} | {"device": CPU}
    else:
        is_there = bool(there)
        for x in tensors if is_there else ():
            if not isinstance(x, There) and x.ndim and not (func in INDEXING and x.dtype in (torch.int64, torch.bool)):
                raise RuntimeError(f"Expected all tensors to be on the same device, {func} got one of the CPU")
    raw_args, raw_kwargs = tree_map_only(There, lambda x: x.raw, (args, kwargs))
    # Gradients are recorded for the wrapping tensors.
    with torch.inference_mode(torch.is_inference_mode_enabled() or any(x.raw.is_inference() for x in there)):
        result = func(*raw_args, **raw_kwargs)
    if func._schema.is_mutable and isinstance(result, Tensor):
        return args[0], is_there
    if not is_there:
        return result, False
    # A view of a tensor of inference mode is one, too.
    is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
    with torch.inference_mode(torch.is_inference_mode_enabled() or (is_view and any(x.is_inference() for x in there))):
        return tree_map_only(Tensor, There, result), True
