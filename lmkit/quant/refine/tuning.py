"""End-to-end tuning after the layer loop: the KL divergence from the original model's logits is lowered by changes of
scales, norms and biases (refine.parameters).

Targets are the original model's hidden states after its last layer, which the layer loop leaves. A step takes a few
rows. They go through the layers with their present changes, and the states before each layer are kept. Gradients
then go back through the layers, and each layer is computed once more, this time with gradients. One layer is in memory
at a time, and a batch of tokens inside it. Adam's moments are as large as the changes: three numbers for a group.

A step depends on its number and the changes before it alone, so a killed run goes on from its last snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace
from torch import Tensor

from lmkit.kernels.cuda.module import TORCH, tensor_device
from lmkit.layers.linear import Weights
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.quant.data.buffer import Buffer
from lmkit.quant.layer.gradients import with_gradients
from lmkit.quant.layer.head import HeadWithGradients
from lmkit.quant.layer.moments import held_out_rows, run
from lmkit.quant.refine.parameters import Changes, TunedLayer, no_changes
from lmkit.quant.refine.snapshot import Snapshot
from lmkit.quant.refine.whole import Finished, WholeModel
from lmkit.quant.report.report import RefineReport

BETAS = 0.9, 0.95
WARM_UP = 4  # steps in which the rate rises
SNAPSHOT_SECONDS = 60.0


@dataclass
class Tuning:
    """Tune `model` on each of its rows `epochs` times, `batch` rows a step. `rate` is the change of a step in the
    beginning; it falls to 0. Must be used outside inference mode."""

    model: WholeModel
    epochs: int
    batch: int
    rate: float
    changes: list[Changes] = field(init=False)

    def __post_init__(self) -> None:
        model = self.model
        self.original, self.stored, self.stream, self.rows = model.original, model.stored, model.stream, model.rows
        self.device, self.dtype = tensor_device(self.stream.device), model.dtype
        self.snapshot = Snapshot(model.work)
        spec = self.stored.spec
        self.layers = range(spec.num_layers)
        batch_tokens = min(self.batch, len(self.rows)) * self.rows.shape[1]
        folder = self.stream.folder
        self._buffer = Buffer((len(self.layers) + 1) * batch_tokens, spec.hidden_size, folder and folder / "refine.f32")
        self._states = self._buffer.states.view(len(self.layers) + 1, batch_tokens, -1)
        self._head = HeadWithGradients(self.original, self.dtype, self.device)
        self.changes = [no_changes(self._layer(index).weights) for index in self.layers]

    def finish(self, done: Callable[[int, int], None]) -> Finished:
        """Tune, and compare on the held-out rows."""
        start = time.perf_counter()
        before, after = self.tune(done)
        report = RefineReport(
            steps=self.num_steps,
            rows=self.training_rows,
            held_out_tokens=(len(self.rows) - self.training_rows) * self.rows.shape[1],
            kl_before=before,
            kl=after,
            seconds=round(time.perf_counter() - start, 2),
        )
        if not after < before:
            return Finished(replace(report, fallback="tuning found nothing better for the held-out rows"))
        return Finished(report, self.layer, self.behind_layers(len(self.rows) - 1))

    def layer(self, index: int) -> Weights:
        return self.tuned(self._layer(index)).changed()

    @property
    def training_rows(self) -> int:
        return len(self.rows) - held_out_rows(len(self.rows))

    @property
    def num_steps(self) -> int:
        return self.epochs * -(-self.training_rows // self.batch)

    def tune(self, done: Callable[[int, int], None]) -> tuple[float, float]:
        """Tune, and return the mean KL in nats a token on the held-out rows before and afterwards."""
        state = self.snapshot.load()
        if state is None:
            before, first, means, squares = self.held_out_kl(), 0, *(self._like_changes() for _ in range(2))
        else:
            before, first, self.changes, means, squares = state
        written = time.monotonic()
        for step in range(first, self.num_steps):
            done(step, self.num_steps)
            self._step(step, means, squares)
            if step + 1 == self.num_steps or time.monotonic() - written >= SNAPSHOT_SECONDS:
                self.snapshot.save(before, step + 1, self.changes, means, squares)
                written = time.monotonic()
        return before, self.held_out_kl()

    def held_out_kl(self) -> float:
        rows = torch.arange(self.training_rows, len(self.rows))
        total = 0.0
        with torch.no_grad():
            for some in rows.split(self.batch):
                self._forward(some)
                total += self._compare(some)
        return total / max(1, len(rows) * self.rows.shape[1])

    def behind_layers(self, row: int) -> Tensor:
        """The hidden states float32 [seq_len, hidden] of a row after the tuned layers, as a check computes them."""
        hidden = self._head.embed_rows(self.rows[row, None].to(self.device))
        for index in self.layers:
            layer = self._layer(index)
            tuned = DecoderLayer(layer.spec, index, self.tuned(layer).changed(), self.stream.device)
            self.stream.layer = index  # of its geometry
            hidden = run(tuned.multiply_in(self.dtype), self.stream, hidden)
        self.stream.layer = len(self.layers)
        return hidden

    def tuned(self, layer: DecoderLayer) -> TunedLayer:
        return TunedLayer(
            layer.weights,
            self.changes[layer.index],
            lambda role, vector: self.stored.read_back(layer.index, role, vector),
        )

    def _like_changes(self) -> list[Changes]:
        return [{role: torch.zeros_like(change) for role, change in changes.items()} for changes in self.changes]

    def _layer(self, index: int) -> DecoderLayer:
        self.stored.reader.release()
        return self.stored.layer(index, torch.float32, f"{TORCH}{self.device}").multiply_in(self.dtype)

    def _rows_of(self, step: int) -> Tensor:
        """The numbers of a step's rows: each row comes once in an epoch, in an order of its own."""
        per_epoch = self.num_steps // self.epochs
        generator = torch.Generator().manual_seed(self.model.seed + step // per_epoch)
        order = torch.randperm(self.training_rows, generator=generator)
        rows: Tensor = order.split(self.batch)[step % per_epoch]
        return rows

    def _step(self, step: int, means: list[Changes], squares: list[Changes]) -> None:
        rows = self._rows_of(step)
        with torch.no_grad():
            self._forward(rows)
        gradient = torch.empty(len(rows) * self.rows.shape[1], self._states.shape[-1])
        self._compare(rows, gradient)
        rate = self.rate * min(1, (step + 1) / WARM_UP) * (1 - step / self.num_steps)
        for index in reversed(self.layers):
            for role, found in self._backward(index, rows, gradient).items():
                change, mean, square = (part[index][role] for part in (self.changes, means, squares))
                mean.lerp_(found, 1 - BETAS[0])
                square.lerp_(found.square(), 1 - BETAS[1])
                unbiased = (square / (1 - BETAS[1] ** (step + 1))).sqrt().clamp_min(1e-20)
                change -= rate * mean / (1 - BETAS[0] ** (step + 1)) / unbiased

    def _parts(self, rows: Tensor) -> list[slice]:
        """The tokens of a step in pieces of as many as are computed at a time."""
        size, count = self.stream.batch_rows * self.rows.shape[1], len(rows) * self.rows.shape[1]
        return [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]

    def _forward(self, rows: Tensor) -> None:
        """Fill the states before each layer and after the last."""
        for part in self._parts(rows):
            whole = self.rows[rows].flatten()[part].view(-1, self.rows.shape[1])
            self._states[0, part] = self._head.embed_rows(whole.to(self.device)).cpu()
        for index in self.layers:
            layer = self._layer(index)
            tuned = with_gradients(layer, {role: w.detach() for role, w in self.tuned(layer).leaves().items()})
            for part in self._parts(rows):
                hidden = self._states[index, part].to(self.device)
                self._states[index + 1, part] = tuned.output(hidden, self.rows.shape[1]).cpu()
            self._buffer.release()

    def _backward(self, index: int, rows: Tensor, gradient: Tensor) -> Changes:
        """The gradients of a layer's changes. `gradient` [tokens, hidden] after it becomes that before it."""
        layer = self._layer(index)
        tuned = self.tuned(layer)
        leaves = tuned.leaves()
        computed = with_gradients(layer, leaves)
        for part in self._parts(rows):
            hidden = self._states[index, part].to(self.device, copy=True).requires_grad_()
            computed.output(hidden, self.rows.shape[1]).backward(gradient[part].to(self.device))
            assert hidden.grad is not None
            gradient[part] = hidden.grad.cpu()
        self._buffer.release()
        return tuned.gradients(leaves)

    def _compare(self, rows: Tensor, gradient: Tensor | None = None) -> float:
        """The sum of KL over the tokens of a step, and the gradients of its mean after the last layer. A few tokens
        are compared at a time."""
        seq_len, total = self.rows.shape[1], 0.0
        at_once = self._head.tokens_at_once
        exact = self.stream.states(self.stream.layer, exact=True)
        for place, row in enumerate(rows.tolist()):
            for begin in range(0, seq_len, at_once):
                part = slice(begin, min(begin + at_once, seq_len))
                own = slice(place * seq_len + part.start, place * seq_len + part.stop)
                target = exact[row * seq_len + part.start : row * seq_len + part.stop].clone()
                hidden = self._states[-1, own].to(self.device, copy=True).requires_grad_(gradient is not None)
                with torch.no_grad():
                    log_p = self._head.log_probabilities(target.to(self.device))
                kl = (log_p.exp() * (log_p - self._head.log_probabilities(hidden))).sum()
                total += float(kl.detach())
                if gradient is not None:
                    (kl / (len(rows) * seq_len)).backward()
                    assert hidden.grad is not None
                    gradient[own] = hidden.grad.cpu()
        self.original.reader.release()
        return total
