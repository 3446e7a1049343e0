"""A GPU as runners use it: its memory, captured steps, and a stream, whose launches run while the host goes on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor

from lmkit.devices import CUDA
from lmkit.environment import environment
from lmkit.errors import ConfigError, UnsupportedError
from lmkit.kernels.cuda import module
from lmkit.kernels.cuda.module import Kernel
from lmkit.kernels.cuda.ranks import LAYOUT, HostSharing, IpcSharing, Sharing, register_host
from lmkit.kernels.cuda.switches import switches
from lmkit.log import get_logger
from lmkit.turbo.runners.device import EngineDevice, Event

log = get_logger(__name__)

# CUresult: an ECC error, an illegal address, a kernel that took too long, a destroyed context, an assertion, and faults
# of a kernel from a bad stack to a launch that failed.
FATAL = frozenset({214, 700, 702, 709, 710, *range(714, 720)})


class Gpu(EngineDevice):
    """torch's current GPU and its default stream. Everything that an engine launches goes there, in order.

    Without CuPy (`has_kernels` False) every op runs through torch. The reference ops wait for the stream, so nothing is
    captured.
    """

    facts = CUDA
    tensors = CUDA.tensors
    first_steps_wait = True

    def __init__(self) -> None:
        self._pool: Any = None

    @property
    def has_kernels(self) -> bool:
        """See EngineDevice."""
        return module.is_available()

    def overlaps(self) -> bool:
        """Whether kernels begin while the one before them ends."""
        return self.has_kernels and module.backend(self.tensors).overlaps()

    @classmethod
    def missing(cls) -> str | None:
        """See EngineDevice. Kernels that were turned off miss nothing: torch computes then."""
        return module.missing() if switches().kernels or not torch.cuda.is_available() else None

    @classmethod
    def opened(cls) -> Self:
        """See EngineDevice."""
        reason = module.missing()
        if not torch.cuda.is_available():
            raise UnsupportedError(f"device {cls.facts.name}: {reason}; use --device cpu")
        if reason is not None:
            log.warning("%s. Every op runs through torch: right, but slow, and without CUDA graphs", reason)
        return cls()

    def free_memory(self) -> int:
        """Free bytes of the GPU's own memory; torch's cache of freed pieces counts as free."""
        free, _ = torch.cuda.mem_get_info()
        return int(free) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def staging(self, num_bytes: int) -> Tensor:
        """Pinned host memory, uint8 [num_bytes], from which the GPU copies by itself."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def event(self) -> Event:
        event: Event = torch.cuda.Event(enable_timing=True)
        return event

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Capture the launches of `launch`, and return one call that repeats them.

        All graphs share memory, because they run in turn.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # tiers' threads go on
                launch()
        except BaseException:
            self._pool = None  # the memory of a capture that failed is no other's
            raise
        return graph.replay

    def reach_each_other(self, gpus: Iterable[int]) -> bool:
        """Whether each of these GPUs can map the memory of the others."""
        pairs = itertools.permutations(set(gpus), 2)
        return all(torch.cuda.can_device_access_peer(*pair) for pair in pairs)

    def sharing(self, *, through_host: bool) -> Sharing:
        """How ranks share memory: that of GPUs, or of the host. Raises UnsupportedError where no kernels run."""
        if not self.has_kernels:
            raise UnsupportedError(f"several GPUs: {module.missing()}; use one")
        if 2 * torch.cuda.get_device_properties().multi_processor_count < LAYOUT.blocks:
            raise UnsupportedError("this GPU has too few multiprocessors to wait for others; use one GPU")
        return HostSharing(register_host) if through_host else IpcSharing()

    def environment(self, gpu: int) -> dict[str, str]:
        """The variables of a process with `gpu` as its first one, after which it sees all others, too. Raises
        ConfigError if it is not there."""
        count = torch.cuda.device_count()
        if gpu >= count:
            raise ConfigError(f"a process is to have GPU {gpu}, and there are {count}; use fewer, or name devices")
        visible = environment().visible_gpus
        names = [str(number) for number in range(count)] if visible is None else visible.split(",")[:count]
        return {"CUDA_VISIBLE_DEVICES": ",".join([names[gpu], *names[:gpu], *names[gpu + 1 :]])}

    def compile(self, kernels: Iterable[Kernel]) -> None:
        """Compile kernels before a step waits for them."""
        module.compile_all(kernels, self.tensors)

    def is_lost(self, error: BaseException) -> bool:
        """Whether the GPU refuses everything after this error. It is a kernel's fault, raised at the next wait or
        launch by torch, or by the driver, whose errors have a `status`."""
        if isinstance(error, torch.AcceleratorError):
            return not isinstance(error, torch.OutOfMemoryError)
        return getattr(error, "status", None) in FATAL
