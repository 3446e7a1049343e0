"""The processes of one quantization, as `accelerate launch` starts them. A single process needs none of this.

Every process has all hidden states and reaches all decisions by itself. The processes share only the work of a pass
over the calibration rows: each process runs every `world_size`-th batch. The statistics of each linear input are summed
by one process, which receives that input of all batches in their order. So every sum adds the same numbers in the same
order for any number of processes, and the codes equal those of a single process.
"""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lmkit.environment import environment
from lmkit.extras import needed_for

TIMEOUT = timedelta(days=7)  # the others wait while one process evaluates, which may take long


@dataclasses.dataclass(frozen=True)
class Comm:
    """This process among all; by default it is the only one. The first process alone writes."""

    rank: int = 0
    world_size: int = 1

    @classmethod
    def launched(cls) -> Comm:
        """This process as its launcher has set it up."""
        if environment().world_size == 1:
            return cls()
        with needed_for("quantizing with several processes"):
            from accelerate import PartialState

        state = PartialState(cpu=True, timeout=TIMEOUT)
        return cls(state.process_index, state.num_processes)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def broadcast(self, tensors: list[Tensor], source: int) -> list[Tensor]:
        """The tensors of the process `source`, on the CPU, of any number, shapes and dtypes. Those of the others are
        ignored.
        """
        if self.world_size == 1:
            return tensors
        described = [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in tensors]
        header = json.loads(self.broadcast_bytes(json.dumps(described).encode(), source))
        if self.rank != source:
            tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in header]
        tensors = [tensor.contiguous() for tensor in tensors]
        for tensor in tensors:
            torch.distributed.broadcast(tensor, source)
        return tensors

    def broadcast_bytes(self, data: bytes, source: int = 0) -> bytes:
        if self.world_size == 1:
            return data
        length = torch.tensor(len(data))
        torch.distributed.broadcast(length, source)
        content = torch.empty(int(length), dtype=torch.uint8)
        if self.rank == source:
            content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        torch.distributed.broadcast(content, source)
        return content.numpy().tobytes()

    def share(self, record: Any, owner: int) -> None:
        """Give every process the tensors and numbers of `owner`'s dataclass."""
        if self.world_size == 1:
            return
        for field in dataclasses.fields(record):
            value = getattr(record, field.name)
            if not isinstance(value, Tensor | int | float):
                continue
            [tensor] = self.broadcast([value.cpu() if isinstance(value, Tensor) else torch.tensor(value)], owner)
            setattr(record, field.name, tensor.to(value.device) if isinstance(value, Tensor) else tensor.item())

    def wait(self) -> None:
        """Wait until every process has made this call."""
        if self.world_size > 1:
            torch.distributed.barrier()

    def close(self) -> None:
        """End the process group."""
        if self.world_size > 1:
            torch.distributed.destroy_process_group()
