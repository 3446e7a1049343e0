"""One pass through the original model and back, before the layer loop: the curvature of each layer's outputs.

Calibration rows that are not held out go through the layers, and the states before each are kept in a file.
Labels are drawn after the last layer, one for a token. Gradients then go back through the layers, and each layer is
computed once more, this time with gradients. One layer is in memory at a time, and a batch of tokens inside it.

The work folder gets, for a run that is resumed after the sweep:

loss-00003.safetensors    the curvature of a layer (layer.curvature), as bfloat16
loss.json                 the checksums of all of these; written last
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from lmkit.formats.safetensors_file import SafetensorsFile, write_safetensors
from lmkit.kernels.cuda.module import TORCH, tensor_device
from lmkit.models.source import ModelSource
from lmkit.quant.data.buffer import Buffer
from lmkit.quant.data.comm import Comm
from lmkit.quant.data.workdir import WorkFolder, crc32, damaged
from lmkit.quant.layer.curvature import Curvature, add_gradients, finish, swept_rows
from lmkit.quant.layer.gradients import LayerWithGradients, with_gradients
from lmkit.quant.layer.head import HeadWithGradients
from lmkit.quant.layer.moments import held_out_rows

RECORD, STATES = "loss.json", "loss-states.f32"


@dataclass
class Sweep:
    """Some of `rows` int64 [num_rows, seq_len], evenly spread, go through `source`, `batch_tokens` at a time. None of
    them is held out. Products are of `dtype`."""

    source: ModelSource
    rows: Tensor
    batch_tokens: int
    dtype: torch.dtype
    seed: int
    device: str = "cpu"

    def __post_init__(self) -> None:
        num_rows, seq_len = self.rows.shape
        count, given = swept_rows(num_rows, seq_len), num_rows - held_out_rows(num_rows)
        self.rows = self.rows[torch.arange(count) * given // count]

    def run(
        self, keep: Callable[[int, Curvature], None], done: Callable[[int, int], None], file: Path | None = None
    ) -> None:
        """Call `keep(index, curvature)` for each layer, the last one first. The states are in `file`, or in memory.
        `done(units, of all)` reports the progress. Must be called outside inference mode."""
        num_layers, num_tokens = self.source.spec.num_layers, self.rows.numel()
        buffer = Buffer((num_layers + 1) * num_tokens, self.source.spec.hidden_size, file)
        states = buffer.states.view(num_layers + 1, num_tokens, -1)
        head = HeadWithGradients(self.source, self.dtype, tensor_device(self.device))
        for part in self._parts():
            whole = self.rows.flatten()[part].view(-1, self.rows.shape[1])
            states[0, part] = head.embed_rows(whole.to(tensor_device(self.device))).cpu()
        with torch.no_grad():
            for index in range(num_layers):
                done(index, 2 * num_layers)
                layer = self._layer(index)
                for part in self._parts():
                    states[index + 1, part] = layer.output(self._here(states[index, part]), self.rows.shape[1]).cpu()
                    buffer.release()
        gradient = states[num_layers]  # after a layer; it takes the place of the states there
        self._start(head, gradient)
        for index in reversed(range(num_layers)):
            done(2 * num_layers - 1 - index, 2 * num_layers)
            keep(index, self._backward(index, states[index], gradient, buffer.release))
        if file is not None:
            file.unlink()

    def _parts(self) -> list[slice]:
        """All tokens in whole rows, as many as are computed at a time."""
        seq_len, count = self.rows.shape[1], self.rows.numel()
        size = max(1, self.batch_tokens // seq_len) * seq_len
        return [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]

    def _here(self, states: Tensor) -> Tensor:
        return states.to(tensor_device(self.device), copy=True)

    def _layer(self, index: int) -> LayerWithGradients:
        self.source.reader.release()
        layer = self.source.layer(index, torch.float32, f"{TORCH}{tensor_device(self.device)}")
        dense = {role: weight for role, weight in layer.weights.items() if isinstance(weight, Tensor)}
        return with_gradients(layer.multiply_in(self.dtype), dense)

    def _start(self, head: HeadWithGradients, states: Tensor) -> None:
        """Put gradients of the cross entropy with drawn labels in the place of the states after the last layer."""
        generator = torch.Generator().manual_seed(self.seed)
        for part in states.split(head.tokens_at_once):
            hidden = self._here(part).requires_grad_()
            log_p = head.log_probabilities(hidden)
            labels = torch.multinomial(log_p.detach().exp().cpu(), 1, generator=generator)[:, 0]
            functional.nll_loss(log_p, labels.to(log_p.device), reduction="sum").backward()
            assert hidden.grad is not None
            part.copy_(hidden.grad)
        self.source.reader.release()

    def _backward(self, index: int, states: Tensor, gradient: Tensor, release: Callable[[], None]) -> Curvature:
        """The curvature of a layer. `gradient` [tokens, hidden] after it becomes that before it."""
        layer, found = self._layer(index), Curvature()

        def observe(roles: tuple[str, ...], g: Tensor) -> None:
            if not layer.spec.routers.keys() & set(roles):
                add_gradients(found, roles, g, self.dtype)

        layer.observe_gradients(observe)
        for part in self._parts():
            hidden = self._here(states[part]).requires_grad_()
            layer.output(hidden, self.rows.shape[1]).backward(self._here(gradient[part]))
            assert hidden.grad is not None
            gradient[part] = hidden.grad.cpu()
            release()
        finish(found)
        return found


@dataclass(frozen=True)
class CurvatureFiles:
    """The curvature of all layers in the work folder. The first process of `comm` fills and reads it."""

    work: WorkFolder
    comm: Comm

    def fill(self, sweep: Sweep, done: Callable[[int, int], None]) -> None:
        checksums = [0] * sweep.source.spec.num_layers

        def keep(index: int, curvature: Curvature) -> None:
            short = {name: found.to(torch.bfloat16).cpu() for name, found in curvature.items()}
            write_safetensors(self._file(index), short)
            checksums[index] = crc32(self._file(index))

        with torch.inference_mode(False):
            sweep.run(keep, done, self.work.path / STATES)
        self.work.keep(RECORD, msgspec.json.encode(checksums))

    def load(self, index: int) -> Curvature:
        """The curvature of a layer, in every process. Raises CheckpointError if its bytes have changed."""
        found = self._read(index) if self.comm.is_first else {}
        names = msgspec.json.decode(self.comm.broadcast_bytes(msgspec.json.encode(list(found))), type=list[str])
        return dict(zip(names, self.comm.broadcast(list(found.values()), 0), strict=True))

    def _read(self, index: int) -> Curvature:
        path, checksums = self._file(index), msgspec.json.decode(self.work.kept(RECORD) or b"[]", type=list[int])
        if index >= len(checksums) or not path.exists() or crc32(path) != checksums[index]:
            raise damaged(path)
        file = SafetensorsFile(path)
        return {name: file.tensor(name).float() for name in file.infos}

    def _file(self, index: int) -> Path:
        return self.work.path / f"loss-{index:05d}.safetensors"
