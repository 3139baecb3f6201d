"""What both tiers hold, as positions and slots: the state that admission and swapping decide on."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.recsys.replay.placement.members import Members
from memhier.recsys.replay.placement.residents import Residents
from memhier.recsys.replay.streams import Purpose, Uniforms

__all__ = ["Decisions", "Tiers"]

Ints = NDArray[np.int64]

DRAWS = 4
"""Random numbers set aside for each sample that comes."""
_LOOK = 256  # slots looked at together for a vacant one


class Decisions:
    """What becomes of the samples of one `add`.

    Attributes
    ----------
    positions
        int64 [n]: the position in storage of each; -1 where it is not kept.
    writes
        From a slot of memory to the sample that goes there now.
    late
        From a position to the sample that it holds now, where a swap is bringing what it held before.
    leaving
        From a position to the slot in which it has mutable fields that storage does not have yet, and which it loses.
    """

    def __init__(self, count: int) -> None:
        self.positions: Ints = np.full(count, -1, np.int64)
        self.writes: dict[int, int] = {}
        self.late: dict[int, int] = {}
        self.leaving: dict[int, int] = {}


class Tiers:
    """State of both tiers.

    Attributes
    ----------
    limit
        Most samples in storage; None for no limit.
    arrivals
        Samples that ever came.
    seen
        Those of them that storage is a sample of: forgotten ones do not count.
    seen_of
        The same for each label.
    """

    def __init__(self, seed: int, slots: int, limit: int | None, by_class: bool) -> None:
        self.members = Members(by_class)
        self.residents = Residents(slots, self.members)
        self.limit = limit
        self.arrivals = 0
        self.seen = 0
        self.seen_of: dict[int, int] = {}
        self.oldest = 0  # the position that a ring replaces next
        self._uniforms = Uniforms(seed, Purpose.ADMIT)
        self._first_vacant = 0  # no slot before it is vacant

    @property
    def memory_bytes(self) -> int:
        """DRAM held."""
        return self.members.memory_bytes + self.residents.memory_bytes

    def draws(self, labels: Ints) -> NDArray[np.float64]:
        """Count samples as seen and return the random numbers that are theirs, [n, DRAWS]."""
        uniforms = self._uniforms.at(DRAWS * self.arrivals, DRAWS * len(labels)).reshape(-1, DRAWS)
        self.arrivals += len(labels)
        self.seen += len(labels)
        return uniforms

    def count_labels(self, labels: Ints) -> None:
        """Count samples as seen, by label."""
        for label, count in zip(*(part.tolist() for part in np.unique(labels, return_counts=True)), strict=True):
            self.seen_of[label] = self.seen_of.get(label, 0) + count

    # Changes of storage.

    def replace(self, decisions: Decisions, sample: int, position: int, label: int, id: int) -> None:
        """Let a sample take a position; where that is in memory, the sample is there, too."""
        group, new = self.members.group_of(np.array([self.members.labels[position], label])).tolist()
        self.members.replace(position, label, id)
        if group != new:
            self.residents.regroup(position, group, new)
        decisions.positions[sample] = position
        decisions.leaving.pop(position, None)
        planned, shown = int(self.members.slots[position]), self.residents.slot_shown(position)
        if shown >= 0:
            decisions.writes[shown] = sample
            self.residents.refreshed[shown] = False
        if planned >= 0 and planned != shown:
            decisions.late[position] = sample

    def leave_memory(self, decisions: Decisions, position: int) -> None:
        """Take a position out of memory, before another sample takes it."""
        slot, shown = int(self.members.slots[position]), self.residents.slot_shown(position)
        if shown >= 0:
            self.residents.hide(shown)
            decisions.writes.pop(shown, None)
        decisions.late.pop(position, None)
        decisions.leaving.pop(position, None)
        if slot >= 0:
            # A swap that was bringing it brings nothing: what it was to replace stays.
            stays = int(self.residents.visible[slot])
            self.vacate(slot)
            if stays >= 0 and self.members.slots[stays] < 0:
                self.residents.plan(slot, stays)

    # Changes of memory.

    def put(self, decisions: Decisions, sample: int, slot: int) -> None:
        """Let a sample that storage holds take a slot, at once."""
        position = int(decisions.positions[sample])
        if self.residents.refreshed[slot]:
            decisions.leaving[int(self.residents.visible[slot])] = slot
        self.residents.plan(slot, position)
        self.residents.show(np.array([slot]), np.array([position]))
        decisions.writes[slot] = sample

    def vacate(self, slot: int) -> None:
        """Plan nothing for a slot."""
        self.residents.plan(slot, -1)
        self._first_vacant = min(self._first_vacant, slot)

    def first_vacant(self) -> int:
        """Return the first slot for which nothing is planned; there must be one."""
        while not (some := self.residents.planned[self._first_vacant : self._first_vacant + _LOOK] < 0).any():
            self._first_vacant += _LOOK
        self._first_vacant += int(some.argmax())
        return self._first_vacant

    def has_vacant(self) -> bool:
        """Whether there is a slot for which nothing is planned."""
        return self.residents.planned_count < self.residents.slots

    def recount_vacant(self) -> None:
        """Look for vacant slots anew."""
        self._first_vacant = 0

    def state(self) -> dict[str, Any]:
        """Return the counters, for JSON."""
        return {
            "limit": self.limit, "arrivals": self.arrivals, "seen": self.seen, "oldest": self.oldest,
            "seen_of": [[label, count] for label, count in self.seen_of.items()],
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Take over counters."""
        self.limit, self.arrivals, self.seen = state["limit"], state["arrivals"], state["seen"]
        self.oldest, self.seen_of = state["oldest"], dict(state["seen_of"])
        self.recount_vacant()
