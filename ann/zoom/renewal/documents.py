"""The documents of the vectors that one call adds or updates, as records made block by block, as often as needed."""

from collections.abc import Iterator
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.payload.given import GivenDocuments, check_names
from memhier.ann.zoom.payload.record import pack, unpack
from memhier.ann.zoom.payload.staged import check_record
from memhier.ann.zoom.payload.stored import in_order
from memhier.ann.zoom.preview.code_scan import split_positions
from memhier.ann.zoom.storage.ids import Ids, Located, locate_all
from memhier.ann.zoom.storage.snapshot import IndexSnapshot

__all__ = ["ChangedDocuments"]

_BLOCK_ROWS = 256

Ints: TypeAlias = npt.NDArray[np.int64]


class ChangedDocuments:
    """The documents of the vectors of one call. An update keeps the documents that it does not give.

    Parameters
    ----------
    state
        The index before the call.
    given
        As :meth:`memhier.ann.ZoomIndex.add` takes them, or None.
    count
        Vectors.
    most
        Bytes of the documents of one vector, and of pages read together.
    ids
        Of the vectors that an update replaces; None for new vectors.

    Attributes
    ----------
    names
        Of all documents of the index after the call.
    record_bytes
        Bytes of all records.

    Raises
    ------
    ValueError, TypeError
        When the documents cannot be stored.
    BudgetError
        When those of one vector are too long for the DRAM of the index.
    KeyError
        For an id that is not in the index.
    """

    def __init__(self, state: IndexSnapshot, given: Any, count: int, most: int, ids: Ids | None = None) -> None:
        self._state, self._count, self._most = state, count, most
        self._given = None if given is None else GivenDocuments(given)
        self._places: Located | None = None
        if ids is not None and state.documents:
            self._places = locate_all(state.parts, state.fresh, ids)
        if self._given is not None:
            if self._given.streamed:
                raise TypeError("documents: an iterator is for build(); expected lists, arrays or a table")
            self._given.check_length(count)
        self.names: tuple[str, ...] = state.documents
        self.record_bytes: int = 0
        for row, record in enumerate(self._records()):
            check_record(len(record), most, row)
            self.record_bytes += len(record)

    def __bool__(self) -> bool:
        """Whether any vector has documents."""
        return self.record_bytes > 0

    def check(self, attributes: Any) -> None:
        """Refuse names that are those of attributes."""
        check_names(self.names, (), attributes)

    def runs(self, each: int, beyond: Ints, most: int) -> Iterator[tuple[slice, list[bytes] | None]]:
        """Yield runs of vectors that take `most` bytes together, with their records where any vector has documents.

        Parameters
        ----------
        each
            Bytes of a vector beside its record.
        beyond
            int64 ``[n]``: further ones of each vector.
        """
        run: list[bytes] = []
        start = taken = 0
        for row, record in enumerate(self._records() if self else repeat(b"", self._count)):
            size = each + int(beyond[row]) + len(record)
            if row > start and taken + size > most:
                yield slice(start, row), run if self else None
                run, start, taken = [], row, 0
            run.append(record)
            taken += size
        if run:
            yield slice(start, self._count), run if self else None

    def _records(self) -> Iterator[bytes]:
        if self._given is None and self._places is None:
            return
        start = 0
        for block in self._before():
            yield from block if self._given is None else self._changed(self._given, start, block)
            start += len(block)

    def _before(self) -> Iterator[list[bytes]]:
        """Yield the records before the call, block by block."""
        if self._places is None:
            for start in range(0, self._count, _BLOCK_ROWS):
                yield [b""] * min(_BLOCK_ROWS, self._count - start)
            return
        parts, waiting = self._state.parts, self._state.fresh.records
        offsets = np.cumsum([0, *map(len, parts)])
        number, row = split_positions(self._places.positions)
        fresh = self._places.fresh
        rows = np.where(fresh >= 0, offsets[-1], offsets[np.where(fresh >= 0, 0, number)] + row)
        start = 0
        for block in in_order([*(part.records for part in parts), None], [*map(len, parts), 1], rows, self._most):
            if waiting is not None:
                for place in np.flatnonzero(fresh[start : start + len(block)] >= 0).tolist():
                    block[place] = waiting[fresh[start + place]]
            yield block
            start += len(block)

    def _changed(self, given: GivenDocuments, start: int, records: list[bytes]) -> list[bytes]:
        """Return records with the documents given in their place."""
        rows = given.block(start, start + len(records))
        self.names = check_names(self.names, given.names, ())
        numbers = {name: number for number, name in enumerate(self.names)}
        changed = []
        for row, (record, values) in enumerate(zip(records, rows, strict=True), start):
            documents = unpack(record, "documents")
            for number, document in given.encoded(values, numbers, row).items():
                if document is None:
                    documents.pop(number, None)
                else:
                    documents[number] = document
            changed.append(pack(documents))
        return changed
