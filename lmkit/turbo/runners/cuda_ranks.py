"""Tensor and expert parallelism on GPUs: rank 0 lies in the engine, every other rank is a process with a GPU too.

    scheduler -> plan -> rank 0 -- pipe: plan --> rank 1, rank 2, ...
                         rank 0 <== memory of GPUs: the last tokens, sums, parts of the logits ==> rank 1, rank 2, ...

Every rank launches the same kernels for the same plans, on its part of the model (models.shard) and of the KV cache.
They exchange on their streams (kernels.cuda.ranks), so steps are captured and hosts run ahead as with one GPU. Rank 0
samples. Its tokens come to the others at the beginning of the next step, on the device. A rank that ends takes the
engine with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import msgspec
import torch
from torch import Tensor

from lmkit.errors import EngineLostError, UnsupportedError
from lmkit.kernels.cuda.ranks import GpuRanks, SharedMemory
from lmkit.log import get_logger
from lmkit.models.decoder import Decoder
from lmkit.turbo.changes import Change
from lmkit.turbo.plan import Chunk, NewSequence, SampledToken, StepPlan
from lmkit.turbo.runners.batch import StepRows
from lmkit.turbo.runners.cuda import Computed, CudaRunner, DeviceSampler, Drawn, Pending
from lmkit.turbo.runners.cuda_captured import mixtures
from lmkit.turbo.runners.gpu import Gpu
from lmkit.turbo.runners.processes import ENDED, Processes, SharedModel, Start, plans, read, without_wishes
from lmkit.turbo.runners.ranks import Tokens
from lmkit.turbo.runners.runner import RunnerParts, StepResult, Ticket

log = get_logger(__name__)


class Handles(msgspec.Struct, frozen=True):
    """By which a rank opens the memory of all ranks, in their order."""

    handles: list[bytes]


def ranks_of(device: Gpu, parts: RunnerParts, rank: int, *, through_host: bool) -> GpuRanks:
    """A rank's view of the ranks, which is yet to be connected. Raises UnsupportedError."""
    lost = device.staging(4).view(torch.int32).zero_()
    size, vocab_size = parts.config.num_ranks, parts.decoder.spec.vocab_size
    sharing = device.sharing(through_host=through_host)
    return GpuRanks(sharing, device.tensors, lost, rank, size, vocab_size)


def way_of_experts(decoder: Decoder) -> str:
    """Whether one product has all experts of each layer. Ranks launch the same steps only if they agree."""
    return "way:" + "".join("01"[mixture.together(1, decoder.dtype) is not None] for mixture in mixtures(decoder))


class CudaProcesses(Processes):
    """Processes with a GPU each, whose memory all have mapped. Their first steps wait for each other, so `connect`
    waits until all are ready."""

    shared: SharedMemory

    def __init__(self, device: Gpu, model: SharedModel, lose: Any) -> None:
        self._device, self._gpus = device, model.config.gpus
        for gpu in self._gpus:
            device.environment(gpu)  # it is there
        self._through_host = not device.reach_each_other(self._gpus)
        if self._through_host:
            log.warning("GPUs that do not reach each other's memory exchange through host memory, which takes longer")
        super().__init__(model, lose)

    @contextmanager
    def _starts(self, model: SharedModel) -> Iterator[list[Start]]:
        common: dict[str, Any] = {"config": model.config, "files": [], "through_host": self._through_host}
        ranks = range(1, model.config.num_processes)
        yield [Start(rank, model.path, cpus=model.cpus[rank], **common) for rank in ranks]

    def _variables(self, rank: int) -> dict[str, str]:
        return self._device.environment(self._gpus[rank])

    def connect(self, handles: list[bytes]) -> None:
        """Map the memory of the other processes, given in their order, and have them map it."""
        all_handles = [self.shared.handle, *handles]
        self.send(Handles(all_handles))
        self.shared.connect(all_handles)
        super().wait_until_ready()

    def wait_until_ready(self) -> None:
        """Do nothing: `connect` has waited."""

    def check(self) -> None:
        """Raise EngineLostError if a process has ended, or an exchange took too long."""
        if self.shared.is_lost:
            raise EngineLostError(ENDED)

    def _ended(self, reason: str) -> None:
        super()._ended(reason)
        self.shared.lose()

    def close(self) -> None:
        if hasattr(self, "shared"):
            self.shared.lose()  # a step under way waits for processes that end now
        super().close()


class CudaRanks(CudaProcesses):
    """The processes of ranks 1 and on."""

    shared: GpuRanks

    def runner(self, parts: RunnerParts) -> LeadingCudaRunner:
        """See Processes. Raises LMKitError if a rank cannot start."""
        self.shared = ranks_of(self._device, parts, 0, through_host=self._through_host)
        said = [line.split() for line in self.hear("memory")]
        if {way for _, way in said} != {way_of_experts(parts.decoder)}:
            self.close()
            raise UnsupportedError("ep: the experts of some ranks have weights of several formats; use tp on GPUs")
        self.connect([bytes.fromhex(handle) for handle, _ in said])
        return LeadingCudaRunner(self._device, parts, self)


class _Joined(CudaRunner):
    """The runner of a rank."""

    def __init__(self, device: Gpu, parts: RunnerParts, shared: GpuRanks) -> None:
        parts.decoder.join(shared, split=parts.config.tp > 1)
        self.shared = shared
        super().__init__(device, parts)

    def _know(self, token_ids: Tensor) -> None:
        self.shared.from_first(self._sampler.last_token)
        super()._know(token_ids)


class LeadingCudaRunner(_Joined):
    """The runner of rank 0."""

    def __init__(self, device: Gpu, parts: RunnerParts, ranks: CudaRanks) -> None:
        self.ranks = ranks
        super().__init__(device, parts, ranks.shared)

    def warm_up(self) -> str:
        captured = super().warm_up()
        self.ranks.check()
        return captured

    def launch(self, plan: StepPlan) -> Ticket:
        """See CudaRunner. After a failure the ranks may disagree, so no step follows it."""
        self.ranks.check()
        try:
            self.ranks.send(without_wishes(plan))
            return super().launch(plan)
        except Exception:
            self.shared.lose()
            raise

    def collect(self, ticket: Ticket) -> StepResult:
        """See CudaRunner."""
        result = super().collect(ticket)
        self.ranks.check()
        return result

    def _sample_now(self, computed: Computed, chunks: list[Chunk], rows: StepRows) -> list[list[SampledToken]]:
        tokens = super()._sample_now(computed, chunks, rows)
        self.ranks.send(Tokens([[token.token_id for token in new] for new in tokens]))
        return tokens

    def tell(self, change: Change) -> None:
        """See Runner."""
        self.ranks.send(change)

    def close(self) -> None:
        """End the other ranks."""
        self.ranks.close()


class SampledElsewhere:
    """The sampler of a process that does not sample."""

    def __init__(self, num_slots: int, device: str) -> None:
        self.last_token = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def set(self, slot: int, new: NewSequence) -> None:
        """Do nothing."""

    def clear(self, slot: int) -> None:
        """Do nothing."""

    def resume(self, num_outputs: dict[int, int]) -> None:
        """Do nothing."""

    def sample(self, logits: Tensor, slots: Sequence[int]) -> Pending:
        """No tokens: they come with the next step."""
        return Drawn([])


class FollowingCudaRunner(_Joined):
    """The runner of another rank. It takes plans from a pipe, and the tokens of steps with drafts."""

    def __init__(self, device: Gpu, parts: RunnerParts, shared: GpuRanks, pipe: IO[bytes]) -> None:
        super().__init__(device, parts, shared)
        self._pipe = pipe

    def _make_sampler(self, device: Gpu, parts: RunnerParts) -> DeviceSampler:
        return SampledElsewhere(parts.config.sequences_per_step, device.tensors)

    def run(self, change: Callable[[Change], None]) -> None:
        """Carry out plans, and changes between them, until the pipe ends, or the ranks are lost."""
        for plan in plans(self._pipe, change):
            self.launch(plan)
            if self.shared.is_lost:
                return

    def _sample_now(self, computed: Computed, chunks: list[Chunk], rows: StepRows) -> list[list[SampledToken]]:
        return [[SampledToken(token) for token in new] for new in read(self._pipe, Tokens).token_ids]
