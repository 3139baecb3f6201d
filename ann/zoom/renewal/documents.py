"""The documents of the vectors that one call adds or updates, as records made block by block, as often as needed."""

from array import array
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.payload.given import GivenDocuments, check_names
from memhier.ann.zoom.payload.record import Document, pack, unpack
from memhier.ann.zoom.payload.staged import check_record
from memhier.ann.zoom.payload.stored import in_order
from memhier.ann.zoom.preview.scan_arguments import split_positions
from memhier.ann.zoom.storage.ids import Located
from memhier.ann.zoom.storage.rows import RowState

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
    places
        Of the vectors that an update replaces, those of new ones among them nowhere; None where all are new.

    Attributes
    ----------
    names
        Of all documents of the index after the call.
    sizes
        int64 ``[n]``: bytes of the record of each vector.
    record_bytes
        Bytes of all records.

    Raises
    ------
    ValueError, TypeError
        When the documents cannot be stored.
    BudgetError
        When those of one vector are too long for the DRAM of the index.
    """

    def __init__(self, state: RowState, given: Any, count: int, most: int, places: Located | None = None) -> None:
        self._state, self._count, self._most = state, count, most
        self._given = None if given is None else GivenDocuments(given)
        self._places = places if state.documents else None
        if self._given is not None:
            if self._given.streamed:
                raise TypeError("documents: an iterator is for build(); expected lists, arrays or a table")
            self._given.check_length(count)
        self.names: tuple[str, ...] = state.documents
        sizes = array("q")
        for row, record in enumerate(self.records()):
            check_record(len(record), most, row)
            sizes.append(len(record))
        self.sizes: Ints = np.array(sizes, np.int64) if sizes else np.zeros(count, np.int64)
        self.record_bytes: int = int(self.sizes.sum())

    def __bool__(self) -> bool:
        """Whether any vector has documents."""
        return self.record_bytes > 0

    def check(self, attributes: Any) -> None:
        """Refuse names that are those of attributes."""
        check_names(self.names, (), attributes)

    @property
    def work_bytes(self) -> int:
        """DRAM for the records on their way: one, its copy, and with an update some before it with their pages."""
        return 2 * int(self.sizes.max(initial=0)) + (0 if self._places is None else self._most // 2)

    def records(self) -> Iterator[bytes]:
        """Yield the record of each vector, made when it is asked for; none where no documents are stored or given."""
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
        stored = number >= 0
        rows = np.where(stored, offsets[np.where(stored, number, 0)] + row, offsets[-1])
        start = 0
        for block in in_order([*(part.records for part in parts), None], [*map(len, parts), 1], rows, self._most):
            if waiting is not None:
                for place in np.flatnonzero(fresh[start : start + len(block)] >= 0).tolist():
                    block[place] = waiting[fresh[start + place]]
            yield block
            start += len(block)

    def _changed(self, given: GivenDocuments, start: int, records: list[bytes]) -> Iterator[bytes]:
        """Yield records with the documents given in their place."""
        # The folder of all of them: blocks do not tell the part of a record.
        where = next((part.records.path.parent for part in self._state.parts if part.records is not None), None)
        low, step = 0, 1
        while low < len(records):
            block = records[low : low + step]
            rows = given.block(start + low, start + low + len(block))
            self.names = check_names(self.names, given.names, ())
            numbers = {name: number for number, name in enumerate(self.names)}
            taken = 0
            for row, values in enumerate(rows):
                made = [_merged(block[row], given.encoded(values, numbers, start + low + row), where)]
                taken += len(made[0])
                block[row] = b""
                yield made.pop()  # held by nothing here while the vectors before are written
            low += len(block)
            # A block holds copies of the values in arrays of other libraries: few of long ones.
            step = max(1, min(_BLOCK_ROWS, len(block) * (self._most // 4) // max(1, taken)))


def _merged(record: bytes, given: Mapping[int, Document | None], where: object) -> bytes:
    """Return a record with the documents given in their place; `where` names it in errors."""
    documents = unpack(record, where)
    for number, document in given.items():
        if document is None:
            documents.pop(number, None)
        else:
            documents[number] = document
    return pack(documents)
