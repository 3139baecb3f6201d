"""The documents of a build, staged on disk in the order of the vectors until the order of the lists is known."""

from collections.abc import Iterator
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.payload.given import GivenDocuments, check_names
from memhier.ann.zoom.payload.record import pack
from memhier.ann.zoom.payload.stored import RecordWriter, StoredRecords, in_order
from memhier.budget import format_bytes
from memhier.errors import BudgetError
from memhier.io.reader import Reader
from memhier.store.store import Store

__all__ = ["StagedDocuments", "check_record"]

_BLOCK_ROWS = 256
_NAME = "documents"
_WORK_BYTES = 16 << 20

Ints: TypeAlias = npt.NDArray[np.int64]


def check_record(size: int, most: int, row: int) -> None:
    """Refuse the documents of one row, `size` bytes, that an index with room for `most` could not move."""
    if size > most:
        raise BudgetError(
            f"the documents of row {row} have {format_bytes(size)}: an index holds up to {format_bytes(most)} of one "
            f"row in DRAM while it changes, a thirty-second of dram= and at most 8 MiB; raise dram= at build, or store "
            f"the path of a file in place of its contents"
        )


class StagedDocuments:
    """The documents of a build. A block of rows is held in DRAM, and the rest lies in the scratch folder of the store.

    Parameters
    ----------
    store
        To be built.
    documents
        As :meth:`memhier.ann.ZoomIndex.build` takes them; None for none.
    most
        Bytes of the documents of one row.

    Attributes
    ----------
    record_bytes
        Bytes staged until now.
    """

    def __init__(self, store: Store, documents: Any, most: int) -> None:
        self._given = None if documents is None else GivenDocuments(documents)
        self._most = most
        self._staging = store.stage()
        self._writer = RecordWriter(self._staging, _NAME)
        self._numbers: dict[str, int] = {}
        self.record_bytes: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the documents, in the order of their numbers."""
        return tuple(self._numbers)

    def take(self, count: int) -> None:
        """Stage the documents of the next rows."""
        given = self._given
        while given is not None and count > 0:
            start, rows = self._writer.count, given.take(min(count, _BLOCK_ROWS))
            self._number()
            records = []
            for row, values in enumerate(rows, start):
                found = given.encoded(values, self._numbers, row)
                record = pack({number: document for number, document in found.items() if document is not None})
                check_record(len(record), self._most, row)
                self.record_bytes += len(record)
                records.append(record)
            self._writer.append(records)
            count -= len(rows)

    def finish(self, count: int, attributes: Any) -> None:
        """Stage the documents of the rows up to `count`, which is all that there are."""
        if self._given is None:
            return
        self._given.check_length(count)
        self.take(count - self._writer.count)
        self._given.check_ended()
        self._number()
        check_names((), self._numbers, attributes)

    def records(self, order: Ints, reader: Reader) -> Iterator[list[bytes]]:
        """Yield the records in another order, block by block; nothing where no row has documents."""
        completed = self._writer.complete()
        if completed is not None:
            info, first = completed
            records = StoredRecords(info, first, reader, reader.add(str(info.path), info.length, info.checksums))
            yield from in_order([records], [self._writer.count], order, _WORK_BYTES)

    def _number(self) -> None:
        assert self._given is not None
        for name in self._given.names:
            self._numbers.setdefault(name, len(self._numbers))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._staging.drop()
