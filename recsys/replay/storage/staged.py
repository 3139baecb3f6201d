"""Samples that wait to be written together: one append to a log costs as much as forty of its samples."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.recsys.replay.schema import Columns, Schema

__all__ = ["StagedSamples"]

Ints = NDArray[np.int64]
Change = tuple[Any, Any, Any]  # of `set_at_once`

_SAMPLES = 64  # at most
_SHARE = 4  # as many additions fill the room, at least: larger ones are written at once


class StagedSamples:
    """The newest samples of storage, by field.

    Parameters
    ----------
    schema
        The fields of a sample.
    most
        Bytes of samples.
    """

    def __init__(self, schema: Schema, most: int) -> None:
        self._schema = schema
        self._room = min(_SAMPLES, most // (schema.sample_bytes + 8))
        self._count = 0
        self._positions: Ints = np.empty(0, np.int64)
        self._columns: Columns = {}

    def __len__(self) -> int:
        return self._count

    @property
    def memory_bytes(self) -> int:
        """DRAM held."""
        return self._positions.nbytes + sum(values.nbytes for values in self._columns.values())

    @property
    def positions(self) -> Ints:
        """int64 [len]: where the samples belong, in place; if a position comes twice, its last sample counts."""
        return self._positions[: self._count]

    @property
    def columns(self) -> Columns:
        """The samples, in place."""
        return {name: values[: self._count] for name, values in self._columns.items()}

    def takes(self, count: int) -> bool:
        """Whether `count` samples are few enough to wait, once there is room."""
        return count * _SHARE <= self._room

    def has_room(self, count: int) -> bool:
        """Whether there is room for `count` samples."""
        return self._count + count <= self._room

    def put(self, positions: Ints, columns: Columns) -> None:
        """Take copies of samples; there must be room."""
        if not self._columns:
            self._positions, self._columns = np.empty(self._room, np.int64), self._schema.empty(self._room)
        start, stop = self._count, self._count + len(positions)
        for name, values in self._columns.items():
            values[start:stop] = columns[name]
        self._positions[start:stop] = positions
        self._count = stop

    def put_at_once(self, position: int, columns: Columns) -> list[Change]:
        """Return the changes that take one sample, a copy of which is made now; none where it finds no room."""
        if not self._columns or not self.takes(1) or not self.has_room(1):
            return []
        for name, values in self._columns.items():
            values[self._count] = columns[name][0]
        return [(self._positions, self._count, position), (vars(self), "_count", self._count + 1)]

    def has_any(self, positions: NDArray[Any]) -> bool:
        """Whether a sample waits for one of these positions."""
        return self._count > 0 and not set(self.positions.tolist()).isdisjoint(positions.tolist())

    def clear(self) -> None:
        """Let go of the samples, which were written."""
        self._count = 0
