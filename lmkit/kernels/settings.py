"""What one engine sets of the kernels, and another engine of the process does not."""

from __future__ import annotations

from contextvars import Token
from types import TracebackType

import torch

from lmkit.kernels.cpu import threads
from lmkit.kernels.cuda import switches


class Settings:
    """They hold in the thread that enters them, until it leaves. One thread enters an instance, and may do so inside.

    `num_threads`: of kernels on a CPU and of torch's operators; None: as the process has it. `deterministic`: on a GPU,
    a row's bits do not depend on the rows beside it. On a CPU they never do.
    """

    def __init__(self, num_threads: int | None = None, *, deterministic: bool = False) -> None:
        self.num_threads, self.deterministic = num_threads, deterministic
        self._left: list[tuple[Token[int], Token[bool]]] = []

    def __enter__(self) -> None:
        if self.num_threads is not None and torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)  # another engine was here
        self._left.append((threads.OF_ENGINE.set(self.num_threads or 0), switches.IS_PINNED.set(self.deterministic)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        num_threads, is_pinned = self._left.pop()
        threads.OF_ENGINE.reset(num_threads)
        switches.IS_PINNED.reset(is_pinned)
