"""StepLoan and StepTicket: the rows of a step that the tiers of all groups keep in DRAM."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from memhier.recsys.embedding.groups.row_groups import Ints, Part
from memhier.table.loans import Loan, Ticket, changing

__all__ = ["StepLoan", "StepTicket"]

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepLoan:
    """Rows of a step that stay in their slots until the loan is released.

    Attributes
    ----------
    slots
        int64 [u]: the place of each row in the slab of its group.
    slabs
        All rows in DRAM of each group, read-only.
    loans
        Of each group.
    """

    slots: Ints
    slabs: list[NDArray[Any]]
    loans: Sequence[Loan]

    @classmethod
    def of(cls, loans: Sequence[Loan], parts: Sequence[Part]) -> Self:
        """Return the loan of a step from those of each group, whose parts of the step these are."""
        slabs = [loan.rows for loan in loans]
        if len(loans) == 1:
            return cls(loans[0].slots, slabs, loans)
        slots = np.empty(sum(len(numbers) for _, numbers in parts), np.int64)
        for loan, (places, _) in zip(loans, parts, strict=True):
            slots[places] = loan.slots
        return cls(slots, slabs, loans)

    def changing(self) -> AbstractContextManager[list[Floats]]:
        """Return a context that gives the slabs, writable; the block may change the lent rows. See `Loan.changing`."""
        return changing(self.loans)

    def share(self, some: Ints | None = None) -> "StepLoan":
        """Return another loan, of all rows or of those of these places; all stay until both are released."""
        slots = self.slots if some is None else self.slots[some]
        return StepLoan(slots, self.slabs, [loan.share() for loan in self.loans])

    def release(self) -> None:
        """Give the rows back. A second call does nothing."""
        for loan in self.loans:
            loan.release()


class StepTicket:
    """Rows of a step on their way into DRAM.

    Attributes
    ----------
    tickets
        Of the groups whose rows are under way, which are the first ones if a later one has no room yet.
    loans
        Of the groups whose rows were lent already, when those of a later one could not be read.
    """

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.loans: list[Loan] = []

    def release(self) -> None:
        """Let go of the rows that were not lent. A second call does nothing."""
        for each in (*self.tickets, *self.loans):
            each.release()
