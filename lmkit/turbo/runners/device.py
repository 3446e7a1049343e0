"""What an engine asks of the device it runs on. The scheduler and its plans are the same on all.

A device that is there answers what an engine runs on it: its runner, that of a head that drafts, the other processes
of a shared model. `lmkit.devices` has what is known before. runners.devices chooses one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import IO, Any, ClassVar, Protocol, Self

from torch import Tensor

from lmkit.config import EngineConfig
from lmkit.conflicts import NO_KERNELS
from lmkit.devices import Device
from lmkit.kernels.settings import Settings
from lmkit.turbo.changes import Change
from lmkit.turbo.runners.processes import Processes, SharedModel, Start
from lmkit.turbo.runners.runner import Runner, RunnerParts

Tell = Callable[[str], None]  # a process tells the engine a line


class FollowingRunner(Protocol):
    """The runner of a process that is not the first one of its model."""

    def warm_up(self) -> str:
        """See Runner."""

    def run(self, change: Callable[[Change], None]) -> None:
        """Carry out plans, and changes between them, until the pipe ends."""


class EngineDevice(ABC):
    """A device on which an engine runs."""

    facts: ClassVar[Device]
    tensors: str  # the device of tensors, as torch names it
    first_steps_wait = False  # the first steps of processes that share a model wait for each other
    self_test = ""  # the module of the process that tests kernels, see engine.self_test; an empty text: there is none

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def has_kernels(self) -> bool:
        """Whether kernels run; otherwise torch computes every op."""
        return True

    @classmethod
    def missing(cls) -> str | None:
        """Why engines do not run here unless they are told to, or None."""
        return None

    @classmethod
    def opened(cls) -> Self:
        """The device, which was asked for by name. Raises UnsupportedError if it is not there."""
        return cls()

    def software(self) -> str:
        """The device and the software that its kernels depend on, with versions."""
        return self.name

    @property
    def traits(self) -> tuple[str, ...]:
        """What rows of lmkit.conflicts name of this very device."""
        return () if self.has_kernels else (NO_KERNELS,)

    def settings(self, config: EngineConfig) -> Settings:
        """What kernels of an engine with this configuration are set to: it enters them for each step."""
        return Settings(config.num_threads, deterministic=config.deterministic)

    @abstractmethod
    def free_memory(self) -> int:
        """Bytes that the engine may still take."""

    @abstractmethod
    def runner(self, parts: RunnerParts) -> Runner:
        """A runner with its state on the device. torch's OutOfMemoryError means that there is too little memory."""

    @abstractmethod
    def head_runner(self, parts: RunnerParts, token_ids: Tensor | None) -> Runner:
        """The runner of a head that drafts. `token_ids`: its tokens by the model's numbers; None: all."""

    @abstractmethod
    def others(self, model: SharedModel, lose: Callable[[str], None]) -> Processes:
        """Start the other processes of a model, see Processes."""

    @abstractmethod
    def following(self, parts: RunnerParts, start: Start, pipe: IO[bytes], tell: Tell) -> FollowingRunner:
        """The runner of another process than the first. Raises LMKitError."""


class Event(Protocol):
    """A place in a stream."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to `end_event`."""
