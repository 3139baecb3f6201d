"""The ids of a table for any ids that is only read."""

import numpy as np

from memhier.errors import CorruptionError
from memhier.recsys.embedding.initial import TableSpec
from memhier.recsys.embedding.tables import Ints

__all__ = ["ServedIds"]


class ServedIds:
    """Rows by id, for any number of threads.

    Parameters
    ----------
    spec
        The table.
    ids, rows
        int64 [n]: the ids that have a row of their own, and these rows, rising.
    where
        The file, for messages.

    Raises
    ------
    CorruptionError
        When an id comes twice.
    """

    def __init__(self, spec: TableSpec, ids: Ints, rows: Ints, where: object) -> None:
        self._spec = spec
        order = np.argsort(ids)
        self._ids: Ints = ids[order]
        self._rows: Ints = rows[order]
        if (self._ids[1:] == self._ids[:-1]).any():
            raise CorruptionError(f"{where}: an id of table {spec.name!r} has two rows")

    @staticmethod
    def bytes_for(count: int) -> int:
        """Return the DRAM for so many ids, while they are sorted."""
        return 48 * count + 2**12

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return self._ids.nbytes + self._rows.nbytes

    def __len__(self) -> int:
        return len(self._ids)

    def rows_of(self, ids: Ints) -> Ints:
        """Return the row of each id, int64 [n]: that of unknown ids for one without a row of its own."""
        places = np.searchsorted(self._ids, ids)
        there = places < len(self._ids)
        there[there] = self._ids[places[there]] == ids[there]
        rows = np.full(len(ids), self._spec.unknown_row, np.int64)
        rows[there] = self._rows[places[there]]
        if self._spec.padding_id is not None:
            rows[ids == self._spec.padding_id] = self._spec.padding_row
        return rows

    def in_order(self) -> Ints:
        """Return all ids, int64 [n], in the order of their rows."""
        ids: Ints = self._ids[np.argsort(self._rows)]
        return ids
