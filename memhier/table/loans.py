"""Rows that a tier keeps in DRAM for a caller: tickets of prefetches, pins, and loans in place."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.closing import Closing
from memhier.shield import ShieldedContext, shielded
from memhier.table.cache import PrefetchedSlots
from memhier.table.gate import Gate, Held, LentRows
from memhier.table.loader import Job

__all__ = ["Loan", "Pin", "Ticket", "changing"]

Ints = NDArray[np.int64]


class _Releasing(Closing):
    """Rows that are released at the end of a ``with`` block."""

    def release(self) -> None:
        """Let go of the rows. A second call does nothing."""
        raise NotImplementedError

    def close(self) -> None:
        """As `release`."""
        self.release()


class Ticket(_Releasing):
    """Rows on their way into DRAM. They stay there until they are gathered, or the ticket is released or forgotten.

    Leaving its ``with`` block releases a ticket.

    Attributes
    ----------
    ahead
        The slots that the ticket still holds, for the tier.
    """

    def __init__(
        self,
        ahead: PrefetchedSlots,
        held: Held,
        job: Job,
        wait: Callable[[Job], None],
        release: Callable[[PrefetchedSlots], None],
    ) -> None:
        self.ahead = ahead
        self._held = held  # goes with the ticket, and tells of it
        self._job = job
        self._wait = wait
        self._release = release

    def __len__(self) -> int:
        """Return how many rows are still held."""
        return len(self.ahead)

    @property
    def slots(self) -> Ints:
        """The slots of the rows that are still held, int64 [n]."""
        return self.ahead.slots.astype(np.int64)

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
        """Let go of the rows that were not gathered. A second call does nothing."""
        self._release(self.ahead)


class Pin(_Releasing):
    """Rows that stay in DRAM until the pin is released; leaving its ``with`` block releases it."""

    def __init__(self, keys: Ints, unpin: Callable[[Ints], None]) -> None:
        self._keys = keys
        self._unpin = unpin

    @shielded
    def release(self) -> None:
        """Let go of the rows. A second call does nothing."""
        keys, self._keys = self._keys, self._keys[:0]
        self._unpin(keys)


class Loan(_Releasing):
    """Rows that stay in their slots of the slab until the loan is released; leaving its ``with`` block releases it.

    Attributes
    ----------
    slots
        int64, of the shape of the keys: the place of each row in :attr:`rows`.
    rows
        All rows of the slab, read-only.
    """

    def __init__(self, slots: Ints, rows: NDArray[Any], lent: LentRows, gate: Gate, held: Held) -> None:
        self.slots = slots
        self.rows = rows
        self._lent = lent
        self._gate = gate
        self._held: Held | None = held

    @property
    def released(self) -> bool:
        """Whether the rows have gone back."""
        return self._held is None

    def changing(self) -> AbstractContextManager[NDArray[Any]]:
        """Return a context that gives all rows of the slab, writable; the block may change the lent ones.

        Other calls of the tier wait until it ends. The rows count as changed even if an error ends it.

        Raises
        ------
        BudgetError, OSError, ClosedError
            As in :meth:`memhier.table.tiered.Tiered.scatter`.
        ValueError
            Once released.
        """
        return ShieldedContext(partial(_first_changing, self.lent, self.gate))

    @property
    def gate(self) -> Gate:
        """The gate of the tier."""
        return self._gate

    @property
    def lent(self) -> LentRows:
        """The rows that are lent; ValueError once released."""
        if self._held is None:
            raise ValueError("the loan was released: its rows may lie elsewhere by now")
        return self._lent

    def share(self, some: Ints | None = None) -> "Loan":
        """Return another loan of the same rows, which stay until both are released.

        Parameters
        ----------
        some
            Which of the keys the other loan has, by their places; all by default.

        Raises
        ------
        ClosedError
            When the tier was closed.
        ValueError
            Once released.
        """
        self._gate.tables()
        held = self._held
        if held is None:
            raise ValueError("the loan was released: its rows may lie elsewhere by now")
        slots = self.slots if some is None else self.slots[some]
        return Loan(slots, self.rows, self._lent, self._gate, held)

    def release(self) -> None:
        """Give the rows back. A second call does nothing."""
        self._held = None


def changing(loans: Sequence[Loan]) -> AbstractContextManager[list[NDArray[Any]]]:
    """Return a context that gives all rows of the slab of each loan, writable; as :meth:`Loan.changing` for one.

    The loans are of tiers beside each other, one of each.
    """
    return ShieldedContext(partial(loans[0].gate.changing, [loan.lent for loan in loans]))


@contextmanager
def _first_changing(lent: LentRows, gate: Gate) -> Iterator[NDArray[Any]]:
    with gate.changing([lent]) as (rows,):
        yield rows
