"""When an engine process that died is started again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RestartPolicy:
    """A process that dies is started again after a delay. Each failure doubles the delay.

    After `max_failures` failures in a row the process is not started again.
    """

    max_failures: int = 3
    first_delay: float = 0.5  # seconds
    max_delay: float = 30.0
    stable_seconds: float = 60.0  # the failure of a process that lived longer starts a new row

    def delay(self, failures: int) -> float:
        return min(self.first_delay * 2.0 ** (failures - 1), self.max_delay)
