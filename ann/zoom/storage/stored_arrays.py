"""The lists of a part whose codes and ids stay on SSD."""

from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.filters.bitmaps import Words
from memhier.ann.zoom.preview.blocks import codes_of
from memhier.ann.zoom.preview.codes import CodeBook
from memhier.ann.zoom.preview.preview import Preview
from memhier.ann.zoom.preview.scan_arguments import positions_of
from memhier.ann.zoom.preview.stored_codes import ListRows, StoredCodes, block_bytes, list_offsets
from memhier.ann.zoom.preview.stored_scan import StoredPart
from memhier.ann.zoom.storage.arrays import Spread, check_starts, part_entry
from memhier.errors import CorruptionError
from memhier.fields import stored_array, stored_segment
from memhier.io.read_arguments import Tallies
from memhier.io.reader import Reader
from memhier.rows.rank_request import PageRows
from memhier.shield import when_gone
from memhier.store.store import SegmentInfo, Store

__all__ = ["StoredArrays"]

Ints: TypeAlias = npt.NDArray[np.int64]


class StoredArrays:
    """The arrays of :class:`memhier.ann.zoom.storage.arrays.PartArrays`, read from SSD as they are needed.

    Parameters
    ----------
    codes
        Reads the blocks; its file is closed once nothing has the arrays any more.
    store, name
        Hold the segments of the part, whose prefix is `name`.
    wave_bytes
        Of blocks that a scan reads at a time.
    """

    def __init__(self, codes: StoredCodes, store: Store, name: str, wave_bytes: int) -> None:
        self._codes, self._store, self._name, self._wave_bytes = codes, store, name, wave_bytes
        self.starts: Ints = codes.starts
        self.id_dtype: np.dtype[Any] = codes.id_dtype
        when_gone(self, codes.close)

    def __len__(self) -> int:
        return len(self._codes)

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return self._codes.memory_bytes

    @property
    def unbounded(self) -> int:
        """The most codes that may have unknown errors: all, as none is looked at."""
        return len(self)

    def ids_of(self, rows: Ints, tally: Tallies | None = None) -> npt.NDArray[Any]:
        """Return the ids of rows, in any order."""
        places, found = self._codes.rows(rows, tally)
        return found.ids[places]

    def take(self, rows: Ints, book: CodeBook) -> ListRows:
        """Return codes, numbers and ids of rows."""
        places, found = self._codes.rows(rows)
        return ListRows(codes_of(found.codes, places, book.dimensions), found.numbers[:, places], found.ids[places])

    def coded(self, allowed: Words | None) -> StoredPart:
        """Return the codes as a scan takes them."""
        return StoredPart(self._codes, self._wave_bytes, allowed)

    def page_rows(self, file: int, number: int, allowed: Words | None) -> PageRows:
        """Return the rows of the vectors in `file` as a ranking takes them, which calls them by their positions."""
        first = int(positions_of(number, np.zeros(1, np.int64))[0])
        return PageRows(file, range(first, first + len(self)), allowed)

    def spread(self, preview: Preview) -> Spread:
        """Return the spread of the vectors around their centroids, removed ones included, ``[2, lists]``."""
        squared = stored_array(self._store, f"{self._name}-spread", np.float64, (len(self.starts) - 1,))
        return np.stack([squared, np.diff(self.starts)])

    @staticmethod
    def segments(store: Store, name: str) -> list[SegmentInfo | None]:
        """Return the segments of the arrays of a part; None for one that the store lacks."""
        every = store.segments()
        return [every.get(f"{name}-{suffix}") for suffix in ("starts", "lists", "spread")]

    def entry(self, name: str) -> dict[str, Any]:
        """Return the catalog's entry of a part without removed rows."""
        return part_entry(name, len(self), self.id_dtype)

    @classmethod
    def load(
        cls, store: Store, entry: dict[str, Any], lists: int, code_bytes: int, reader: Reader, wave_bytes: int
    ) -> Self:
        """Return the arrays of the part that `entry` of the catalog describes."""
        name, count, id_dtype = entry["name"], int(entry["rows"]), np.dtype(entry["ids"])
        starts = stored_array(store, f"{name}-starts", np.int64, (lists + 1,))
        check_starts(store, name, starts, count)
        blocks = stored_segment(store, f"{name}-lists")
        if blocks.length != list_offsets(starts, block_bytes(code_bytes, id_dtype.itemsize))[-1]:
            raise CorruptionError(f"{blocks.path}: {blocks.payload} bytes do not hold {count} rows of codes and ids")
        file = store.attach(f"{name}-lists", reader, held=True)
        return cls(StoredCodes(starts, reader, file, code_bytes, id_dtype), store, name, wave_bytes)

    def read_by(self, reader: Reader) -> Self:
        """Return the arrays as another reader reads them."""
        file = self._store.attach(f"{self._name}-lists", reader, held=True)
        return type(self)(self._codes.read_by(reader, file), self._store, self._name, self._wave_bytes)
