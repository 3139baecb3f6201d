"""Rows of a tier that are lent in place: read where they lie, and changed there."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from memhier.cache.slab import Slab
from memhier.table.residents import Residents
from memhier.table.row_loader import RowLoader
from memhier.table.tickets import Held

__all__ = ["Loan", "change"]

Ints = NDArray[np.int64]


class Loan:
    """Rows that stay in their slots of the slab until the loan is released, or its ``with`` block left.

    Attributes
    ----------
    slots
        int64, of the shape of the keys: where each row lies in :attr:`rows`.
    """

    def __init__(
        self,
        slots: Ints,
        rows: NDArray[Any],
        changing: Callable[[], AbstractContextManager[NDArray[Any]]],
        check_open: Callable[[], None],
        held: Held,
    ) -> None:
        self.slots = slots
        self.rows = rows
        self._changing = changing
        self._check_open = check_open
        self._held: Held | None = held

    @property
    def released(self) -> bool:
        """Whether the rows have gone back."""
        return self._held is None

    def changing(self) -> AbstractContextManager[NDArray[Any]]:
        """Return a context that gives all rows of the slab, writable; the lent ones may be changed in it.

        Other calls of the tier wait until it ends. The rows count as changed however it ends.

        Raises
        ------
        BudgetError, OSError, ClosedError
            As in :meth:`memhier.table.tiered.Tiered.scatter`.
        ValueError
            Once released.
        """
        if self._held is None:
            raise ValueError("the loan was released: its rows may lie elsewhere by now")
        return self._changing()

    def share(self) -> "Loan":
        """Return another loan of the same rows, which stay until both are released.

        Raises
        ------
        ClosedError
            When the tier was closed.
        ValueError
            Once released.
        """
        self._check_open()
        held = self._held
        if held is None:
            raise ValueError("the loan was released: its rows may lie elsewhere by now")
        return Loan(self.slots, self.rows, self._changing, self._check_open, held)

    def release(self) -> None:
        """Give the rows back. A second call does nothing."""
        self._held = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@contextmanager
def change(keys: Ints, slots: Ints, slab: Slab, residents: Residents, loader: RowLoader) -> Iterator[NDArray[Any]]:
    """Give a slab's rows to be changed, those of distinct keys that are resident; inside of a tier's call."""
    never_written = loader.check_never_written(keys, slots)
    residents.keep_image(slots)
    try:
        with slab.writing(slots) as rows:
            yield rows
    finally:
        residents.dirty[slots] = True
        loader.wrote(slots, never_written)
