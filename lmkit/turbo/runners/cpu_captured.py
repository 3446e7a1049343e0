"""Captured steps: the idea of CUDA graphs on a CPU.

A step runs the same jobs as the last step of its shape. The jobs are therefore captured once and launched together,
without Python between them.

All values that differ between steps are in tensors that stay where they are. The persistent batch writes its inputs to
the same place every time, and kernels read lengths, tables and numbers of rows from memory. The spread of the tokens
over the sequences is such a value too, and no part of the shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lmkit.kernels.cpu import threads
from lmkit.kernels.cpu.workspace import Workspace
from lmkit.layers.batch import BatchInputs, KVLayer
from lmkit.log import get_logger
from lmkit.models.decoder import Decoder
from lmkit.turbo.runners.recording import NotCapturableError, recording

log = get_logger(__name__)
# Attributes that may be read of a tensor, besides taking views: they are the same in every step of this shape.
FACTS = frozenset({
    "__get__", "__len__", "data_ptr", "dim", "element_size", "is_contiguous", "numel", "size", "storage_offset",
    "stride",
})  # fmt: skip
MEMORY = frozenset({"empty", "from_numpy"})  # new memory that is not computed from anything


MAX_PROMPT_SHAPES = 64  # shapes that are remembered; a program takes about 5 KB per layer


class _OnlyKernels(TorchFunctionMode):
    """Refuses operations that torch would compute now but not in captured steps. Allows views, facts and new memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place or name == "__setitem__" or "out" in (kwargs or {}):
            raise NotCapturableError(name)
        result = func(*args, **(kwargs or {}))
        if name not in FACTS | MEMORY and not _all_views(result, args):
            raise NotCapturableError(name)
        return result


def _all_views(result: Any, sources: Any) -> bool:
    """Whether every tensor of `result`, a tensor or a tuple of tensors, is a view of a tensor of `sources`."""
    tensors = result if isinstance(result, tuple | list) else (result,)
    known = {x.untyped_storage().data_ptr() for x in sources if isinstance(x, Tensor)}
    return all(isinstance(x, Tensor) and x.untyped_storage().data_ptr() in known for x in tensors)


class StepShape(NamedTuple):
    """Everything that the jobs of a step depend on."""

    num_tokens: int
    num_seqs: int
    num_rows: int  # rows whose logits are wanted
    num_sampled: int  # sequences with such rows
    table_width: int
    has_adapters: bool = False
    is_followed: bool = False  # after each layer the host is called

    @classmethod
    def of(cls, inputs: BatchInputs, *, is_followed: bool = False) -> StepShape:
        num_seqs, table_width = inputs.geometries[0].block_tables.shape
        num_sampled, has_adapters = len(inputs.logit_start) - 1, inputs.adapters is not None
        return cls(
            len(inputs.token_ids), num_seqs, len(inputs.logit_rows), num_sampled, table_width, has_adapters, is_followed
        )


@dataclass
class _Captured:
    program: threads.Program
    logits: Tensor  # [num_rows, vocab], in the workspace
    proven: bool  # or the next step is computed op by op, too, and the logits are compared

    def launch(self) -> Tensor:
        self.program.launch()
        return self.logits


class CapturedSteps:
    """Captured steps by shape.

    A step in which every sequence decodes is captured when its shape first comes, because it surely comes again. A step
    with prompt tokens is captured when its shape comes the second time. Only the most recently used of these shapes are
    remembered, and of those in which torch computes, which have more to remember.
    """

    def __init__(self, decoder: Decoder, kv: list[KVLayer], workspace: Workspace) -> None:
        self._decoder, self._kv, self._workspace = decoder, kv, workspace
        self._captured: dict[StepShape, _Captured | None] = {}
        self._prompt_shapes: dict[StepShape, None] = {}  # shapes seen before, the most recent last
        self._latest: tuple[BatchInputs, _Captured] | None = None  # decode steps of a size have the same inputs
        # Until the forward pass shows that it is not; this holds for all shapes alike.
        self._is_capturable = decoder.captures

    def __call__(self, inputs: BatchInputs) -> Tensor | None:
        """Run a captured step. Returns logits [R, vocab], valid until the next step; None if it is not captured."""
        is_followed = self._decoder.after_layer is not None
        if self._latest is not None and self._latest[0] is inputs and not is_followed:
            return self._latest[1].launch()
        shape = StepShape.of(inputs, is_followed=is_followed)
        if inputs.places is not None:  # torch writes the rows of images
            return None
        if not self._is_capturable or not self._is_due(shape):
            return None
        if shape not in self._captured:
            self._captured[shape] = self._capture(inputs)
            if self._decoder.computes_with_torch:
                return None
        step = self._captured[shape]
        if step is None:
            return None
        if not step.proven:
            return self._prove(step, inputs)
        self._latest = None if is_followed else (inputs, step)
        return step.launch()

    def _is_due(self, shape: StepShape) -> bool:
        decodes = shape.num_tokens == shape.num_rows
        if decodes and not self._decoder.computes_with_torch:
            return True
        was_seen = shape in self._prompt_shapes
        self._prompt_shapes.pop(shape, None)
        self._prompt_shapes[shape] = None
        if len(self._prompt_shapes) > MAX_PROMPT_SHAPES:
            oldest = next(iter(self._prompt_shapes))
            del self._prompt_shapes[oldest]
            self._captured.pop(oldest, None)
        return was_seen or decodes

    def _capture(self, inputs: BatchInputs) -> _Captured | None:
        with_torch = self._decoder.computes_with_torch
        watching = recording(self._workspace) if with_torch else _OnlyKernels()
        try:
            with self._workspace.active(), threads.capturing() as program, watching:
                logits = self._decoder(inputs, self._kv)
                of_step = self._workspace.alias(logits) if len(logits) else logits
        except NotCapturableError as error:
            self._give_up(f"the forward calls torch's {error}")
            return None
        except Exception as error:
            if not with_torch:
                raise
            self._give_up(f"{type(error).__name__} without values: {error}")
            return None
        adds_up = with_torch or len(inputs.token_ids) > len(inputs.logit_rows)
        if of_step is None or (adds_up and program.kept):  # memory of each shape's own
            return None
        return _Captured(program, of_step, proven=not with_torch)

    def _prove(self, step: _Captured, inputs: BatchInputs) -> Tensor | None:
        """Compare a captured step with the same one op by op: a foreign module could have taken a value of the step
        that was captured for a constant. Keys and values are written twice."""
        found = step.launch().clone()
        with self._workspace.active():
            expected = self._decoder(inputs, self._kv)
        step.proven = torch.equal(found.view(torch.int32), expected.view(torch.int32))
        if not step.proven:
            self._give_up("a captured step gave other logits")
        return expected

    def _give_up(self, why: str) -> None:
        log.info("steps are not captured: %s", why)
        self._captured.clear()
        self._latest, self._is_capturable = None, False
