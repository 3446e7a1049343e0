"""Carries out step plans on a CPU.

With `overlap` a separate thread runs the plans while the host prepares the next one. Without it a plan runs when its
result is collected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmkit.kernels.cpu import ahead, jit, threads
from lmkit.kernels.cpu.workspace import Workspace
from lmkit.kernels.settings import Settings
from lmkit.layers.batch import BatchInputs
from lmkit.turbo.host_memory import available_memory
from lmkit.turbo.kv.tiers.store import TierStore
from lmkit.turbo.plan import Chunk, Sampled, SampledToken, StepPlan
from lmkit.turbo.runners.batch import StepRows
from lmkit.turbo.runners.cpu_captured import CapturedSteps
from lmkit.turbo.runners.runner import SCORED_BYTES, PlanRunner, RunnerParts, StepResult, Ticket, rows_of, sample_chunks
from lmkit.turbo.runners.sampler import Sampler
from lmkit.turbo.runners.step_thread import StepThread

MANY_ROWS = 64  # every kernel then runs its variant for many rows


@contextmanager
def _in_steps(num_threads: int) -> Iterator[None]:
    """The thread of the steps is inside. It enters torch's mode once, and not in every step."""
    threads.prepare(num_threads)
    with Settings(num_threads), torch.inference_mode():
        yield


class CpuRunner(PlanRunner):
    """`execute` carries out a plan in the thread that calls it."""

    def __init__(self, parts: RunnerParts) -> None:
        self.sampler = Sampler(parts.config.sequences_per_step, parts.decoder.spec.vocab_size, parts.guides)
        super().__init__(parts, self.sampler)
        self.batch.max_scored_rows = SCORED_BYTES // (4 * parts.decoder.spec.vocab_size)
        self.kernel_seconds = 0.0  # time of all steps in the model
        self._workspace = Workspace(parts.workspace_bytes)
        self._captured = CapturedSteps(self.decoder, self.kv, self._workspace)
        self._overlaps = parts.config.overlap
        self._thread = StepThread("engine-steps", partial(_in_steps, threads.num_threads()))

    @torch.inference_mode()
    def warm_up(self) -> str:
        """Compile the kernels of steps of one row and of many, unless they are on the disk.

        Steps are captured when they come.
        """
        many = min(MANY_ROWS, self.batch.max_step_tokens)
        with jit.collecting() as tasks, self._workspace.active():
            for num_tokens, num_logits in ((1, 1), (many, 1), (many, many)):
                logits = self.decoder(self.batch.example(num_tokens, num_logits, widest=num_tokens == 1), self.kv)
                if len(logits):  # rank 0's
                    self.sampler.draw(logits.numpy(), np.zeros(1, np.int64), [0], [0])
        ahead.compile_missing(tasks, min(threads.num_threads(), available_memory() // ahead.PROCESS_BYTES))
        return ""

    def launch(self, plan: StepPlan) -> Ticket:
        """Hand a plan to the thread, which runs it after the plans before it."""
        return self._thread.submit(self._run, plan) if self._overlaps else partial(self._run, plan)

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a plan. Raises the plan's own exception."""
        return ticket()

    def forced(self, slot: int) -> list[int]:
        """See Runner. A guide takes in each token as it is sampled."""
        edits = self.sampler.edits.get(slot)
        return edits.guide.forced() if edits is not None and edits.guide is not None else []

    def resume(self, num_outputs: dict[int, int]) -> None:
        """See Sampler."""
        self.sampler.resume(num_outputs)

    def call(self, work: Callable[[], Any]) -> Any:
        """Carry out `work` where steps run, after those under way, and wait for it."""
        return self._thread.submit(work)() if self._overlaps else work()

    def later(self, work: Callable[[], Any]) -> None:
        """Carry out `work` where steps run, after those under way, and do not wait for it."""
        if self._overlaps:
            self._thread.submit(work)
        else:
            work()

    def close(self) -> None:
        self._thread.close()

    def _run(self, plan: StepPlan) -> StepResult:
        start, before = time.perf_counter(), self.kernel_seconds
        sampled = self.execute(plan)
        return StepResult(sampled, time.perf_counter() - start, self.kernel_seconds - before)

    def execute(self, plan: StepPlan) -> list[Sampled]:
        """Carry out a plan. Returns one result for each of its chunks, in order."""
        with (
            nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode(),
            self._begun(plan) as chunks,
        ):
            return self.for_all(plan, chunks, self._compute(chunks))

    def _compute(self, chunks: list[Chunk]) -> list[Sampled]:
        if not chunks:
            return []
        inputs, rows = self.batch.inputs(chunks)
        start = time.perf_counter()
        with nullcontext() if self._tiers is None else self._giving(chunks, self._tiers):
            if rows is not None and rows.wants_hidden:
                with self._workspace.active():
                    logits, shown = self._with_hidden(chunks, rows, inputs)
            else:
                logits = self._logits(inputs)
                shown = self._shown_by_logits(chunks, rows, logits)
        if self.streams is not None:
            self.streams.keep(chunks)
        self.kernel_seconds += time.perf_counter() - start
        tokens = self.next_tokens(logits, chunks, rows)
        self.append(chunks, tokens)
        return [Sampled(new, *also) for new, also in zip(tokens, shown, strict=True)]

    @contextmanager
    def _giving(self, chunks: list[Chunk], tiers: TierStore) -> Iterator[None]:
        """Give the blocks that chunks fill to other engines, layer by layer."""
        gives = [save for chunk in chunks for save in chunk.gives]
        filling = tiers.filling
        if filling is None or not gives:
            yield
            return
        self.decoder.after_layer = lambda layer: threads.run_on_host(partial(filling.advance, layer))
        try:
            with filling.step(gives):
                yield
        finally:
            self.decoder.after_layer = None

    def next_tokens(self, logits: Tensor, chunks: list[Chunk], rows: StepRows | None) -> list[list[SampledToken]]:
        """The tokens of each chunk. Every rank of a tensor-parallel engine but the first gets no logits."""
        if rows is None:
            return [[token] for token in self.sampler.sample(logits, [chunk.slot for chunk in chunks])]
        if any(chunk.draft for chunk in chunks) and sum(chunk.num_sampled for chunk in chunks) == len(logits):
            drafts = [chunk.draft for chunk in chunks]
            sampled = self.sampler.sample_drafts(logits, drafts, [chunk.slot for chunk in chunks])
            if sampled is not None:
                return sampled
        return sample_chunks(lambda these, slots: self.sampler.sample(rows_of(logits, these), slots), chunks, rows)

    def _logits(self, inputs: BatchInputs) -> Tensor:
        """Logits float32 [R, vocab], valid until the next step."""
        logits = self._captured(inputs)
        if logits is not None:
            return logits
        with self._workspace.active():
            return self.decoder(inputs, self.kv)
