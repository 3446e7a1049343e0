"""Recorded steps: a decode step runs the same jobs as the last one of its size, so they are recorded once and launched
together, without Python between them (CUDA graphs' idea, on a CPU).

What differs from step to step is in tensors that stay where they are: the persistent batch writes its inputs to the
same place every time, and kernels read lengths and tables from memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lmkit.kernels.cpu import threads
from lmkit.kernels.cpu.workspace import Workspace
from lmkit.layers.batch import BatchInputs, KVLayer
from lmkit.log import get_logger
from lmkit.models.decoder import Decoder

log = get_logger(__name__)
# They make views or uninitialized memory; anything else would be computed now and not in the recorded steps.
RECORDABLE = frozenset({
    "alias", "as_strided", "detach", "empty", "expand", "lift_fresh", "permute", "reshape", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unsqueeze", "view", "_unsafe_view",
})  # fmt: skip


class NotRecordableError(RuntimeError):
    """The forward computes something outside of the kernels."""


class _OnlyKernels(TorchDispatchMode):  # type: ignore[misc]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in RECORDABLE:
            raise NotRecordableError(str(func))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Recorded:
    program: threads.Program
    logits: Tensor  # [batch size, vocab], in the workspace


class StepGraphs:
    """Steps in which every sequence brings one token and wants its logits, by their number of sequences."""

    def __init__(self, decoder: Decoder, kv: list[KVLayer], workspace: Workspace) -> None:
        self._decoder, self._kv, self._workspace = decoder, kv, workspace
        self._recorded: dict[int, _Recorded | None] = {}

    def __call__(self, inputs: BatchInputs) -> Tensor | None:
        """The logits, valid until the next step; None if this model's steps cannot be recorded."""
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
            log.warning("decode steps are not recorded: the forward runs %s", error)
            return None
        return None if logits is None else _Recorded(program, logits)
