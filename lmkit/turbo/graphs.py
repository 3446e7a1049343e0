"""Recorded steps: a decode step runs the same jobs as the last one of its size, so they are recorded once and launched
together, without Python between them (CUDA graphs' idea, on a CPU).

What differs from step to step is in tensors that stay where they are: the persistent batch writes its inputs to the
same place every time, and kernels read lengths and tables from memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from lmkit.kernels.cpu import threads
from lmkit.kernels.cpu.workspace import Workspace
from lmkit.layers.batch import BatchInputs, KVLayer
from lmkit.log import get_logger
from lmkit.models.decoder import Decoder

log = get_logger(__name__)
# What may be asked of a tensor, beside taking views of it: facts that are the same at every step of this size.
FACTS = frozenset({
    "__get__", "__len__", "data_ptr", "dim", "element_size", "is_contiguous", "numel", "size", "storage_offset",
    "stride",
})  # fmt: skip
MEMORY = frozenset({"empty", "from_numpy"})  # not computed from anything


class NotRecordableError(RuntimeError):
    """The forward computes something outside of the kernels."""


class _OnlyKernels(TorchFunctionMode):
    """Refuses what torch would compute now and not in the recorded steps: all but views, facts and new memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place or name == "__setitem__" or "out" in (kwargs or {}):
            raise NotRecordableError(name)
        result = func(*args, **(kwargs or {}))
        if name not in FACTS | MEMORY and not _all_views(result, args):
            raise NotRecordableError(name)
        return result


def _all_views(result: Any, sources: Any) -> bool:
    """Whether all of `result`, a tensor or a tuple of them, is memory of `sources`."""
    tensors = result if isinstance(result, tuple | list) else (result,)
    known = {x.untyped_storage().data_ptr() for x in sources if isinstance(x, Tensor)}
    return all(isinstance(x, Tensor) and x.untyped_storage().data_ptr() in known for x in tensors)


@dataclass(frozen=True)
class _Recorded:
    program: threads.Program
    logits: Tensor  # [batch size, vocab], in the workspace


class StepGraphs:
    """Steps in which every sequence brings one token and wants its logits, by their number of sequences."""

    def __init__(self, decoder: Decoder, kv: list[KVLayer], workspace: Workspace) -> None:
        self._decoder, self._kv, self._workspace = decoder, kv, workspace
        self._recorded: dict[int, _Recorded | None] = {}
        self._is_recordable = True  # until the forward shows that it is not; no size differs from others in that

    def __call__(self, inputs: BatchInputs) -> Tensor | None:
        """The logits, valid until the next step; None if this model's steps cannot be recorded."""
        if not self._is_recordable:
            return None
        size = len(inputs.context_lens)
        if size not in self._recorded:
            self._recorded[size] = self._record(inputs)
        step = self._recorded[size]
        if step is None:
            return None
        step.program.launch()
        return step.logits

    def _record(self, inputs: BatchInputs) -> _Recorded | None:
        try:
            with self._workspace.active(), threads.recording() as program, _OnlyKernels():
                logits = self._workspace.alias(self._decoder(inputs, self._kv))
        except NotRecordableError as error:
            log.info("decode steps are not recorded: the forward calls torch's %s", error)
            self._is_recordable = False
            return None
        return None if logits is None else _Recorded(program, logits)
