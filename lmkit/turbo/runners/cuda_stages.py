"""Pipeline parallelism on GPUs: stage 0 lies in the engine, every other stage is a process with a GPU too.

    scheduler -> plan -> stage 0 -- pipe: plan --> stage 1, stage 2, ...
                         stage 0 == memory of GPUs: residual stream ==> stage 1 ==> stage 2 ... ==> stage 0

What stages do is that of runners.stages. Here all of it is launched on streams, and the stream of rows is kernels
there (kernels.cuda.stages), so layers are captured and hosts do not wait for steps. A plan has two parts on stage 0's
stream: its first layers, and head and sampling, before which the first layers of other plans stand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import IO

import torch
from torch import Tensor

from lmkit.kernels.cuda.stages import GpuLink
from lmkit.layers.batch import BatchInputs
from lmkit.turbo.changes import Change
from lmkit.turbo.plan import Chunk, StepPlan
from lmkit.turbo.runners.batch import Expected, StepRows
from lmkit.turbo.runners.cuda import CudaRunner, DeviceSampler, Drawn, Launched, Pending, Times
from lmkit.turbo.runners.cuda_captured import Chooser
from lmkit.turbo.runners.cuda_ranks import CudaProcesses, SampledElsewhere
from lmkit.turbo.runners.gpu import Gpu
from lmkit.turbo.runners.processes import plans, without_wishes
from lmkit.turbo.runners.runner import Flight, RunnerParts, Shown, StepResult, Ticket


def link_of(device: Gpu, parts: RunnerParts, index: int, *, through_host: bool) -> GpuLink:
    """A stage's place among the stages, which is yet to be connected. Raises UnsupportedError."""
    lost = device.staging(4).view(torch.int32).zero_()
    config, spec = parts.config, parts.decoder.spec
    sharing = device.sharing(through_host=through_host)
    most = config.tokens_per_step * spec.rows_sent
    return GpuLink(sharing, device.tensors, lost, index, config.pp, most, spec.hidden_size)


class CudaStages(CudaProcesses):
    """The processes of stages 1 and on."""

    shared: GpuLink

    def runner(self, parts: RunnerParts) -> FirstCudaStage:
        """See Processes. Raises LMKitError if a stage cannot start."""
        self.shared = link_of(self._device, parts, 0, through_host=self._through_host)
        self.connect([bytes.fromhex(handle) for handle in self.hear("memory")])
        return FirstCudaStage(self._device, parts, self)


class _Stage(CudaRunner):
    """The runner of a stage. Its steps end with rows for the next stage."""

    def __init__(self, device: Gpu, parts: RunnerParts, link: GpuLink) -> None:
        parts.decoder.link = self.link = link
        super().__init__(device, parts)
        self.captured.rehearsing = link.silent  # stages capture one by one

    def _chooser(self) -> Chooser | None:
        return None

    def _with_hidden(self, chunks: list[Chunk], rows: StepRows, inputs: BatchInputs) -> tuple[Tensor, list[Shown]]:
        self.decoder.hidden(inputs, self.kv)
        return torch.empty(0, self.decoder.spec.vocab_size), [Shown()] * len(chunks)


@dataclass
class _Flight(Flight):
    """Its first layers are launched, and what follows may be."""

    times: Times = field(kw_only=True)
    launched: Launched | None = None


class FirstCudaStage(_Stage):
    """The runner of stage 0. After a failure the stages may disagree, so no step follows it."""

    def __init__(self, device: Gpu, parts: RunnerParts, stages: CudaStages) -> None:
        super().__init__(device, parts, stages.shared)
        self.stages = stages
        self._flights: deque[_Flight] = deque()

    def warm_up(self) -> str:
        captured = super().warm_up()
        self.stages.check()
        return captured

    def launch(self, plan: StepPlan) -> Ticket:
        """See CudaRunner. The first layers are launched at once, and the rest when the plan is collected, or when a
        later plan needs its tokens."""
        return partial(self._land, self._unless_lost(lambda: self._begin(plan)))

    def collect(self, ticket: Ticket) -> StepResult:
        """See CudaRunner."""
        result = super().collect(ticket)
        self.stages.check()
        return result

    def tell(self, change: Change) -> None:
        """See Runner."""
        self.stages.send(change)

    def close(self) -> None:
        """End the other stages."""
        self.stages.close()

    def _unless_lost(self, work: Callable[[], _Flight]) -> _Flight:
        self.stages.check()
        try:
            return work()
        except Exception:
            self.link.lose()
            raise

    @torch.inference_mode()
    def _begin(self, plan: StepPlan) -> _Flight:
        """Launch the first layers, which end with rows for the next stage."""
        needed = {chunk.slot for chunk in plan.chunks} | {new.slot for new in plan.new} | set(plan.freed)
        while any(chunk.slot in needed for flight in self._flights for chunk in flight.chunks if chunk.num_sampled):
            self._finish()
        self.stages.send(without_wishes(plan))
        flight = _Flight(plan, times=Times(*(self._device.event() for _ in range(3))))
        with self._begun(plan) as flight.chunks:
            flight.times.begin.record()
            if flight.chunks:
                inputs, rows = self.batch.inputs(flight.chunks)
                flight.expect(inputs, rows)
                self._logits(flight.chunks, inputs, rows)
            flight.times.model.record()
        self._flights.append(flight)
        return flight

    def _land(self, flight: _Flight) -> StepResult:
        """The result of a plan."""
        while flight.launched is None:
            self._unless_lost(self._finish)
        return self._result(flight.launched)

    @torch.inference_mode()
    def _finish(self) -> _Flight:
        """Launch what follows the last stage of the oldest plan."""
        flight = self._flights.popleft()
        chunks, shown = flight.chunks, list[Shown]()
        pending: Pending = Drawn([])
        expected: Expected | None = None
        if chunks:
            logits, shown = self._shown_of(flight, self.link.receive(flight.num_rows))
            if slots := [chunk.slot for chunk in chunks if chunk.num_sampled]:
                pending, expected = self._sampler.sample(logits, slots), self.batch.expect(slots)
        flight.times.end.record()
        flight.launched = Launched(flight.plan, chunks, shown, None, pending, expected, flight.times)
        return flight


class FollowingCudaStage(_Stage):
    """The runner of another stage. It takes plans from a pipe."""

    def __init__(self, device: Gpu, parts: RunnerParts, link: GpuLink, pipe: IO[bytes]) -> None:
        super().__init__(device, parts, link)
        self._pipe = pipe

    def _make_sampler(self, device: Gpu, parts: RunnerParts) -> DeviceSampler:
        return SampledElsewhere(parts.config.sequences_per_step, device.tensors)

    def _know(self, token_ids: Tensor) -> None:
        """Do nothing: only the first stage needs tokens."""

    @torch.inference_mode()
    def run(self, change: Callable[[Change], None]) -> None:
        """Carry out plans, and changes between them, until the pipe ends, or the stages are lost."""
        for plan in plans(self._pipe, change):
            with self._begun(plan) as chunks:
                if chunks:
                    self._logits(chunks, *self.batch.inputs(chunks))
            if self.link.is_lost:
                return
