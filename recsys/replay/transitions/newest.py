"""The newest transitions, in DRAM by column: those that SSD lacks, and as many before them as the budget holds."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.recsys.replay.schema import Columns
from memhier.recsys.replay.transitions.layout import Layout

__all__ = ["Newest"]


class Newest:
    """A ring of columns. Transition number p lies at p modulo `room`.

    Attributes
    ----------
    start, stop
        The numbers that it has: `start` to `stop` - 1.
    """

    def __init__(self, layout: Layout, room: int, start: int) -> None:
        self.room = room
        self.start: int = start
        self.stop: int = start
        self._layout = layout
        self._columns: Columns = {
            name: np.empty((room, *column.shape), column.dtype) for name, column in layout.columns.items()
        }

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return sum(values.nbytes for values in self._columns.values())

    def begin(self, start: int) -> None:
        """Forget all; the next transition has this number."""
        self.start = self.stop = start

    def write(self, columns: Columns, first: int, last: int) -> None:
        """Append transitions `first` to `last` - 1 of a batch, at most `room`; the oldest give way."""
        done, slot = first, self.stop % self.room
        while done < last:
            count = min(last - done, self.room - slot)
            for name, values in self._columns.items():
                values[slot : slot + count] = columns[name][done : done + count]
            done, slot = done + count, 0
        self.stop += last - first
        self.start = max(self.start, self.stop - self.room)

    def take(self, name: str, slots: NDArray[np.int64]) -> NDArray[Any]:
        """Return the values of a field, of transitions that it has, by their numbers modulo `room`."""
        found: NDArray[Any] = self._columns[name].take(slots, axis=0, mode="clip")
        return found

    def pack(self, first: int, last: int, rows: NDArray[np.uint8]) -> None:
        """Fill rows with transitions `first` to `last` - 1."""
        done = first
        while done < last:
            slot = done % self.room
            count = min(last - done, self.room - slot)
            part = {name: values[slot : slot + count] for name, values in self._columns.items()}
            self._layout.pack(part, rows[done - first : done - first + count])
            done += count
