"""Batches drawn before they are asked for: which transitions, and their bytes, which a thread reads."""

import math
import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.errors import CorruptionError
from memhier.io.faults import is_unreadable
from memhier.recsys.replay.schema import Column, Columns
from memhier.recsys.replay.transitions.layout import Layout
from memhier.recsys.replay.transitions.newest import Newest
from memhier.recsys.replay.transitions.stored_rows import Place, StoredRows

__all__ = ["Drawn", "Fetcher"]

Ints = NDArray[np.int64]


@dataclass(slots=True)
class Drawn:
    """A batch that was drawn.

    Attributes
    ----------
    numbers, probabilities, ratios, lengths
        Of the transitions, and the real transitions of each run.
    columns
        Values of the fields, complete once `work` is None.
    work
        Reads the values that are on SSD.
    read
        The same on the thread.
    damage
        Why some values cannot be had; `complete` raises it.
    """

    numbers: Ints
    probabilities: NDArray[np.float64]
    ratios: NDArray[np.float64]
    lengths: NDArray[np.int32]
    columns: Columns
    work: Callable[[], None] | None = None
    read: "Future[None] | None" = None
    damage: Exception | None = None

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        own = self.numbers.nbytes + self.probabilities.nbytes + self.ratios.nbytes + self.lengths.nbytes
        return own + sum(values.nbytes for values in self.columns.values())

    def arrays(self) -> list[NDArray[Any]]:
        """Return everything, for a checkpoint, once it is complete."""
        return [self.numbers, self.probabilities, self.ratios, self.lengths, *self.columns.values()]

    @classmethod
    def decode(
        cls, raw: NDArray[np.uint8], count: int, columns: Mapping[str, tuple[Column, tuple[int, ...]]]
    ) -> tuple["Drawn", NDArray[np.uint8]]:
        """Return a batch of bytes in the order of `arrays`, copied, and the bytes after it."""
        found: list[NDArray[Any]] = []
        own = [(Column(np.dtype(dtype), ()), (count,)) for dtype in (np.int64, np.float64, np.float64, np.int32)]
        for column, shape in [*own, *columns.values()]:
            size = math.prod(shape) * column.bytes
            found.append(raw[:size].copy().view(column.dtype).reshape(*shape, *column.shape))
            raw = raw[size:]
        numbers, probabilities, ratios, lengths, *values = found
        return cls(numbers, probabilities, ratios, lengths, dict(zip(columns, values, strict=True))), raw

    def check(self, stop: int, most: int) -> None:
        """Raise ValueError unless all transitions are below the number `stop`, and runs have 1 to `most` of them."""
        if self.numbers.min() < 0 or self.numbers.max() >= stop:
            raise ValueError(f"numbers: expected 0 to {stop - 1}")
        if self.lengths.min() < 1 or self.lengths.max() > most:
            raise ValueError(f"lengths: expected 1 to {most}")

    def complete(self) -> None:
        """Return once all values are there; after an error that is no damage the next call reads again."""
        if self.damage is not None:
            raise self.damage
        work, read, self.read = self.work, self.read, None
        try:
            if read is not None:
                read.result()
            elif work is not None:
                work()
        except (CorruptionError, OSError) as error:
            if is_unreadable(error):
                self.damage = error
            raise
        self.work = None


class Fetcher:
    """Fills columns with transitions: those in DRAM at once, the others in one submission, on a thread if wanted.

    Attributes
    ----------
    waiting
        Batches under way, in the order of the calls that will return them.
    """

    def __init__(self, layout: Layout, newest: Newest, stored: StoredRows) -> None:
        self.waiting: deque[Drawn] = deque()
        self._layout = layout
        self._newest = newest
        self._stored = stored
        self._thread: ThreadPoolExecutor | None = None
        self._pid = os.getpid()
        self.rows_read = 0

    @property
    def memory_bytes(self) -> int:
        """DRAM held by batches, in bytes."""
        return sum(drawn.memory_bytes for drawn in self.waiting)

    def fill(self, drawn: Drawn, wanted: dict[str, Ints], *, beside: bool) -> None:
        """Give a batch the columns of transitions, by name of the field; read beside later calls, or at once."""
        newest, layout = self._newest, self._layout
        found: dict[int, tuple[Ints, NDArray[np.bool_] | None]] = {}
        late: list[tuple[str, NDArray[Any], NDArray[np.bool_]]] = []
        for name, numbers in wanted.items():
            if id(numbers) not in found:  # several fields share an array
                missing = numbers < newest.start if int(numbers.min()) < newest.start else None
                found[id(numbers)] = numbers % newest.room, missing
            slots, missing = found[id(numbers)]
            if missing is None:
                drawn.columns[name] = newest.take(name, slots)
                continue
            column = layout.columns[name]
            values = np.empty((*numbers.shape, *column.shape), column.dtype)
            values[~missing] = newest.take(name, slots[~missing])
            drawn.columns[name] = values
            late.append((name, values, missing))
        if not late:
            return
        needed = {id(wanted[name]): wanted[name][missing] for name, _, missing in late}
        rows: Ints = np.unique(np.concatenate([*needed.values()]))
        self.rows_read += len(rows)
        places = [(name, values, missing, np.searchsorted(rows, needed[id(wanted[name])]))
                  for name, values, missing in late]  # fmt: skip
        drawn.work = partial(self._read, self._stored.place(rows), places)
        if beside:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "transitions")
            drawn.read = self._thread.submit(drawn.work)

    def complete(self) -> None:
        """Have all batches under way read: the places of rows on SSD may change then.

        A damaged one tells in its turn.
        """
        for drawn in self.waiting:
            try:
                drawn.complete()
            except (CorruptionError, OSError):
                if drawn.damage is None:
                    raise

    def close(self) -> None:
        """Stop the thread, and forget the batches."""
        if self._thread is not None and self._pid == os.getpid():
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._thread = None
        self.waiting.clear()

    def _read(self, place: Place, places: list[tuple[str, NDArray[Any], NDArray[np.bool_], Ints]]) -> None:
        rows = self._stored.read(place)
        for name, values, missing, at in places:
            values[missing] = self._layout.unpack(rows, name)[at]
