"""An NVIDIA GPU: what an engine runs on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import IO

from torch import Tensor

from lmkit.kernels.cuda import module
from lmkit.turbo.runners import cuda_ranks, cuda_stages
from lmkit.turbo.runners.cuda import CudaRunner
from lmkit.turbo.runners.device import FollowingRunner, Tell
from lmkit.turbo.runners.draft_head_runner import CudaHeadRunner
from lmkit.turbo.runners.gpu import Gpu
from lmkit.turbo.runners.processes import Processes, SharedModel, Start, read
from lmkit.turbo.runners.runner import RunnerParts


class CudaDevice(Gpu):
    """See Gpu."""

    self_test = "lmkit.turbo.engine.self_test_process"

    def software(self) -> str:
        """See EngineDevice."""
        return module.software()

    def runner(self, parts: RunnerParts) -> CudaRunner:
        """See EngineDevice."""
        return CudaRunner(self, parts)

    def head_runner(self, parts: RunnerParts, token_ids: Tensor | None) -> CudaHeadRunner:
        """See EngineDevice."""
        return CudaHeadRunner(self, parts, token_ids)

    def others(self, model: SharedModel, lose: Callable[[str], None]) -> Processes:
        """Ranks or stages, each with a GPU."""
        return (cuda_stages.CudaStages if model.config.pp > 1 else cuda_ranks.CudaRanks)(self, model, lose)

    def following(self, parts: RunnerParts, start: Start, pipe: IO[bytes], tell: Tell) -> FollowingRunner:
        """See EngineDevice. It tells the others where its memory is, and waits for theirs."""
        if parts.config.pp > 1:
            link = cuda_stages.link_of(self, parts, start.rank, through_host=start.through_host)
            tell(f"memory {link.handle.hex()}")
            link.connect(read(pipe, cuda_ranks.Handles).handles)
            return cuda_stages.FollowingCudaStage(self, parts, link, pipe)
        shared = cuda_ranks.ranks_of(self, parts, start.rank, through_host=start.through_host)
        tell(f"memory {shared.handle.hex()} {cuda_ranks.way_of_experts(parts.decoder)}")
        shared.connect(read(pipe, cuda_ranks.Handles).handles)
        return cuda_ranks.FollowingCudaRunner(self, parts, shared, pipe)
