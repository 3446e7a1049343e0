"""The batch slots: the running sequences in the slots of the persistent batch."""

from __future__ import annotations

from collections.abc import Iterator

from lmkit.turbo.scheduling import policy
from lmkit.turbo.sequence import Sequence, Status


class BatchSlots:
    """A sequence keeps its slot while it runs or loads. An ended one keeps it until its last step has completed."""

    def __init__(self, num_slots: int) -> None:
        # By request, in policy.order; includes sequences that load.
        self.running: dict[str, Sequence] = {}
        self.loading: dict[int, Sequence] = {}  # by job
        self.freed: set[int] = set()  # since the last plan
        self._slots: list[Sequence | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def __getitem__(self, slot: int) -> Sequence:
        seq = self._slots[slot]
        assert seq is not None, f"slot {slot} is empty"
        return seq

    def __iter__(self) -> Iterator[Sequence]:
        """All sequences that hold a slot, including ended ones."""
        return (seq for seq in self._slots if seq is not None)

    def occupy(self, seq: Sequence, status: Status) -> None:
        seq.slot, seq.status = self._free.pop(), status
        self._slots[seq.slot] = seq
        running = sorted([*self.running.values(), seq], key=policy.order)
        self.running = {other.request_id: other for other in running}

    def free(self, seq: Sequence) -> None:
        self._slots[seq.slot] = None
        self._free.append(seq.slot)
        self.freed.add(seq.slot)
        seq.slot, seq.has_entered = -1, False

    def take_freed(self) -> list[int]:
        freed, self.freed = sorted(self.freed), set()
        return freed

    def restore_freed(self, slots: list[int]) -> None:
        """Mark `slots` as freed again, because the plan that freed them may not have been carried out."""
        self.freed.update(slot for slot in slots if self._slots[slot] is None)

    def check_integrity(self) -> None:
        occupied = list(self)
        assert all(self._slots[seq.slot] is seq for seq in occupied), "a sequence sits in another's slot"
        free = set(self._free)
        assert len(free) == len(self._free) == len(self._slots) - len(occupied), "a slot leaked"
        assert all(self._slots[slot] is None for slot in free), "a free slot is taken"
        active = {seq for seq in occupied if seq.status in (Status.RUNNING, Status.LOADING)}
        assert active == set(self.running.values()), "a running sequence has no slot"
        assert all(seq.in_flight for seq in occupied if seq not in active), "a finished sequence kept its slot"
