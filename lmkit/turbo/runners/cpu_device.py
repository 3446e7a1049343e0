"""The CPU: steps run where they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import IO

from torch import Tensor

from lmkit.devices import CPU
from lmkit.turbo.host_memory import available_memory
from lmkit.turbo.runners import ranks, remote
from lmkit.turbo.runners.cpu import CpuRunner
from lmkit.turbo.runners.device import EngineDevice, FollowingRunner, Tell
from lmkit.turbo.runners.draft_head_runner import HeadRunner
from lmkit.turbo.runners.processes import Processes, SharedModel, Start
from lmkit.turbo.runners.runner import RunnerParts
from lmkit.turbo.runners.stages import FollowingStage, Stages


class CpuDevice(EngineDevice):
    """The processors of this process, and the host's memory."""

    facts = CPU
    tensors = CPU.tensors

    def free_memory(self) -> int:
        """See EngineDevice."""
        return available_memory()

    def runner(self, parts: RunnerParts) -> CpuRunner:
        """See EngineDevice."""
        return CpuRunner(parts)

    def head_runner(self, parts: RunnerParts, token_ids: Tensor | None) -> HeadRunner:
        """See EngineDevice."""
        return HeadRunner(parts, token_ids)

    def others(self, model: SharedModel, lose: Callable[[str], None]) -> Processes:
        """Stages, or ranks here or on other machines."""
        if model.config.num_ranks == 1:
            return Stages(model, lose)
        return (ranks.Ranks if model.config.cluster == "none" else remote.RemoteRanks)(model, lose)

    def following(self, parts: RunnerParts, start: Start, pipe: IO[bytes], tell: Tell) -> FollowingRunner:
        """See EngineDevice."""
        if parts.config.num_ranks == 1:
            return FollowingStage(parts, start, pipe)
        shared = (remote if start.store else ranks).joined(start, parts.decoder.spec.vocab_size)
        return ranks.FollowingRunner(parts, shared, pipe)
