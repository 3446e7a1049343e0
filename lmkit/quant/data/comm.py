"""The processes of one quantization, as `accelerate launch` starts them; alone, none of this does anything.

Every process has all hidden states and reaches all decisions by itself. What is shared out is the work of a pass over
the calibration rows: each process runs every `world_size`-th batch, and each linear input's statistics are summed by
one process, which is sent that input of all batches in their order. So every sum is made of the same numbers in the
same order however many processes there are, and the codes are those of a single one.
"""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lmkit.config import environment

TIMEOUT = timedelta(days=7)  # one process evaluates, which takes as long as it takes, while the others wait


@dataclasses.dataclass(frozen=True)
class Comm:
    """This process among all; by default it is the only one. The first process alone writes."""

    rank: int = 0
    world_size: int = 1

    @classmethod
    def launched(cls) -> Comm:
        """As the launcher of this process has set it up."""
        if environment().world_size == 1:
            return cls()
        from accelerate import PartialState

        state = PartialState(cpu=True, timeout=TIMEOUT)
        return cls(state.process_index, state.num_processes)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def broadcast(self, tensors: list[Tensor], source: int) -> list[Tensor]:
        """What the process `source` gives, of any number, shapes and dtypes; what the others give is not looked at."""
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
            [tensor] = self.broadcast([value if isinstance(value, Tensor) else torch.tensor(value)], owner)
            setattr(record, field.name, tensor if isinstance(value, Tensor) else tensor.item())

    def wait(self) -> None:
        """Until every process is here."""
        if self.world_size > 1:
            torch.distributed.barrier()

    def close(self) -> None:
        """The end of working together."""
        if self.world_size > 1:
            torch.distributed.destroy_process_group()
