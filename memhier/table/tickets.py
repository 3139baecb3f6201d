"""Slots that may not be evicted: pinned rows, those lent, and rows read ahead that wait to be gathered."""

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from memhier.errors import BudgetError
from memhier.shield import shielded
from memhier.table.row_loader import Job

__all__ = ["Ahead", "Held", "Pin", "Pins", "Returning", "Ticket", "fixed_keys"]

Ints = NDArray[np.int64]

_TICKETS_MAX = 1024


class Held:
    """What a ticket has, and what loans of the same slots share: with the last of them it goes, and so do the slots.

    What hears of its end is built in, so that no interrupt comes between.
    """

    __slots__ = ("__weakref__",)


class Returning(weakref.ref[Held]):
    """Tells how slots go back when what holds them has gone."""

    __slots__ = ("give_back",)

    def __new__(cls, held: Held, told: Callable[["Returning"], object], give_back: Callable[[], object]) -> "Returning":
        return super().__new__(cls, held, told)

    def __init__(self, held: Held, told: Callable[["Returning"], object], give_back: Callable[[], object]) -> None:
        self.give_back = give_back


class Ahead:
    """The slots that a ticket still holds, int32 [n]."""

    __slots__ = ("slots",)

    def __init__(self, slots: NDArray[np.int32]) -> None:
        self.slots = slots

    def __len__(self) -> int:
        return len(self.slots)


class Ticket:
    """Rows on their way into DRAM. They stay there until they are gathered, or the ticket is released or forgotten.

    Leaving its ``with`` block releases a ticket.
    """

    def __init__(
        self,
        ahead: Ahead,
        held: Held,
        job: Job,
        wait: Callable[[Job], None],
        release: Callable[["Ticket"], None],
        keys: Ints | None,
    ) -> None:
        self._ahead = ahead
        self._held = held  # goes with the ticket, and tells of it
        # An array that nobody can change, of the keys in these slots: to know them again without comparing them.
        self._keys = None if keys is None else weakref.ref(keys)
        self._job = job
        self._wait = wait
        self._release = release

    def __len__(self) -> int:
        """How many rows are still held."""
        return len(self._ahead)

    @property
    def slots(self) -> Ints:
        """Where the rows are that are still held, int64 [n]."""
        return self._ahead.slots.astype(np.int64)

    def is_of(self, keys: Ints) -> bool:
        """Return whether this is known to be the array whose keys were in the slots at first."""
        return self._keys is not None and self._keys() is keys

    @property
    def done(self) -> bool:
        """Whether the read is over."""
        return self._job.done.is_set()

    def wait(self) -> None:
        """Wait until the rows are there.

        Raises
        ------
        OSError, CorruptionError
            When they could not be read. A gather tries again.
        ClosedError
            When the tier was closed before.
        """
        self._wait(self._job)

    def release(self) -> None:
        """Let rows go that were not gathered. A second call does nothing."""
        self._release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Pin:
    """Rows that stay in DRAM until the pin is released, or its ``with`` block left."""

    def __init__(self, keys: Ints, unpin: Callable[[Ints], None]) -> None:
        self._keys = keys
        self._unpin = unpin

    @shielded
    def release(self) -> None:
        """Let the rows go. A second call does nothing."""
        keys, self._keys = self._keys, self._keys[:0]
        self._unpin(keys)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Pins:
    """How often each slot is pinned, and the open tickets from the oldest to the newest."""

    def __init__(self, slots: int) -> None:
        self._pinned = np.zeros(slots, np.int32)
        self._ahead = np.zeros(slots, np.uint16)  # tickets that hold a slot
        self._marks = np.zeros(slots, np.bool_)
        self._tickets: list[Ahead] = []
        self._rows_ahead = 0

    @staticmethod
    def bytes_for(slots: int) -> int:
        """Return the most that `memory_bytes` can be for so many slots."""
        return slots * (4 + 2 + 1 + 4 * _rows_max(1))

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return self._pinned.nbytes + self._ahead.nbytes + self._marks.nbytes + 4 * self._rows_ahead

    def held(self) -> Ints:
        """Return the slots that may not be evicted, int64 [m]."""
        return np.flatnonzero((self._pinned > 0) | (self._ahead > 0))

    def is_held(self, slots: Ints) -> NDArray[np.bool_]:
        """Return which of these slots may not be evicted."""
        held: NDArray[np.bool_] = (self._pinned[slots] > 0) | (self._ahead[slots] > 0)
        return held

    def is_ahead(self, slots: Ints) -> NDArray[np.bool_]:
        """Return which of these slots a ticket holds."""
        ahead: NDArray[np.bool_] = self._ahead[slots] > 0
        return ahead

    def pin(self, slots: Ints) -> None:
        """Pin distinct slots once more."""
        self._pinned[slots] += 1

    def is_pinned(self, slots: Ints) -> NDArray[np.bool_]:
        """Return which of these slots are pinned, tickets aside."""
        pinned: NDArray[np.bool_] = self._pinned[slots] > 0
        return pinned

    def unpin(self, slots: Ints) -> None:
        """Pin distinct slots, all of them pinned, once less."""
        self._pinned[slots] -= 1

    def check_room(self, rows: int) -> None:
        """Raise BudgetError when a ticket for so many rows would be one too many."""
        limit = _rows_max(len(self._pinned))
        if len(self._tickets) == _TICKETS_MAX or self._rows_ahead + rows > limit:
            raise BudgetError(
                f"keys: {rows} rows beside {len(self._tickets)} open tickets for {self._rows_ahead} rows; expected at "
                f"most {_TICKETS_MAX} tickets and {limit} rows in all: gather their rows, or release them"
            )

    def open(self, ticket: Ticket) -> None:
        """Hold a ticket's slots, which are distinct."""
        self._ahead[ticket._ahead.slots] += np.uint16(1)
        self._rows_ahead += len(ticket)
        self._tickets.append(ticket._ahead)

    def gathered(self, slots: Ints) -> None:
        """Let distinct slots go that were gathered; of several tickets for one, the oldest lets go."""
        if not self._tickets:
            return
        self._marks[slots] = True
        for ahead in self._tickets:
            taken = self._marks[ahead.slots]
            self._marks[ahead.slots[taken]] = False
            self._take(ahead, taken)
        self._marks[slots] = False
        self._tickets = [ahead for ahead in self._tickets if len(ahead)]

    def release(self, ticket: Ticket) -> None:
        """Let all go that a ticket still holds."""
        self.let_go(ticket._ahead)

    def let_go(self, ahead: Ahead) -> None:
        """Let all go that a ticket still holds, or, where it is forgotten, still held."""
        self._take(ahead, np.ones(len(ahead), np.bool_))
        self._tickets = [other for other in self._tickets if other is not ahead]

    def _take(self, ahead: Ahead, taken: NDArray[np.bool_]) -> None:
        if not taken.any():
            return
        self._ahead[ahead.slots[taken]] -= np.uint16(1)
        ahead.slots = ahead.slots[~taken]
        self._rows_ahead -= int(np.count_nonzero(taken))


def fixed_keys(keys: Ints, distinct: Ints) -> Ints | None:
    """Return an array of keys that all differ, and that nobody can change; None for any other."""
    # Keys that all differ keep their order.
    return keys if keys.flags.owndata and not keys.flags.writeable and len(distinct) == keys.size else None


def _rows_max(slots: int) -> int:
    # Tickets of neighbouring batches share rows, so there may be more rows than slots; but not without limit.
    return 2 * slots
